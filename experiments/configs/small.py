"""124 million parameters, the size of GPT-2 small, for one GPU.

    python -m experiments.train small --data.source FOLDER --data.tokenizer tokenizer.json

The vocabulary holds a BPE of up to 50,304 words, such as `python -m
experiments.tokenizer` trains. Not yet measured.
"""

from experiments.config import TrainConfig
from jaxaccel.nn import DecoderConfig
from jaxaccel.optim import OptimizerConfig

CONFIG = TrainConfig(
    model=DecoderConfig(
        vocab_size=50_304,
        layers=12,
        width=768,
        heads=12,
        kv_heads=12,
        head_size=64,
        mlp_width=2048,
        tied_head=True,
    ),
    optimizer=OptimizerConfig(learning_rate=6e-4, warmup_steps=500),
    steps=20_000,
    batch=256,
    sequence=1024,
    micro_batches=4,
    eval_every=1000,
    save_every=1000,
)
