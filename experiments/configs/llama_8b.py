"""Llama 3.1 8B, on eight GPUs under FSDP: 8,192 tokens a device and step.

    python -m experiments.train llama-8b --data.source FOLDER --data.tokenizer tokenizer.json

One row of 8,192 tokens a device: raise `--batch` with the number of devices. Not yet
measured.
"""

from experiments.config import TrainConfig
from jaxaccel.nn import DecoderConfig, RopeScaling
from jaxaccel.optim import OptimizerConfig

CONFIG = TrainConfig(
    model=DecoderConfig(
        vocab_size=128_256,
        layers=32,
        width=4096,
        heads=32,
        kv_heads=8,
        head_size=128,
        mlp_width=14_336,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(),
    ),
    optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000),
    steps=100_000,
    batch=8,
    sequence=8192,
    eval_every=2000,
    save_every=2000,
)
