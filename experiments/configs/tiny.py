"""A byte-level model of about a million parameters, for a CPU.

    python -m experiments.train

Trains on the source text of Python's own standard library. Expected: under 1.8 nats per
byte on held-out files, in under two minutes on two CPU cores.
"""

from experiments.config import TrainConfig
from jaxaccel.nn import DecoderConfig
from jaxaccel.optim import OptimizerConfig

CONFIG = TrainConfig(
    model=DecoderConfig(
        vocab_size=320,
        layers=4,
        width=128,
        heads=4,
        kv_heads=2,
        head_size=32,
        mlp_width=384,
    ),
    optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=50),
    steps=600,
    log_every=20,
    batch=16,
    sequence=128,
)
