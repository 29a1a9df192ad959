"""GPUs, and compiling for one without having it; see `pallas_kernels.target`."""

from pallas_kernels.target import (
    GPUS,
    MAX_GPUS_PER_NODE,
    Gpu,
    MissingExtra,
    Target,
    describe,
    find,
    parse,
    quiet_cpu,
)

__all__ = [
    "GPUS",
    "MAX_GPUS_PER_NODE",
    "Gpu",
    "MissingExtra",
    "Target",
    "describe",
    "find",
    "parse",
    "quiet_cpu",
]
