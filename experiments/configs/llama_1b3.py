"""1.6 billion parameters in the shape that JAX trainers report Hopper figures for.

    python -m experiments.train llama-1b3 --data.source FOLDER --data.tokenizer tokenizer.json

24 layers of width 2048, the 128,256-word vocabulary of Llama 3, 65,536 tokens a step.
Not yet measured.
"""

from experiments.config import TrainConfig
from jaxaccel.nn import DecoderConfig
from jaxaccel.optim import OptimizerConfig

CONFIG = TrainConfig(
    model=DecoderConfig(
        vocab_size=128_256,
        layers=24,
        width=2048,
        heads=32,
        kv_heads=8,
        head_size=64,
        mlp_width=5632,
        rope_theta=500_000.0,
    ),
    optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000),
    steps=100_000,
    batch=16,
    sequence=4096,
    eval_every=2000,
    save_every=2000,
)
