"""GPUs, and compiling for one without having it; see `pallas_kernels.target`."""

from pallas_kernels.target import (
    GPUS,
    Gpu,
    MissingExtra,
    Target,
    describe,
    find,
    parse,
    quiet_cpu,
)

__all__ = ["GPUS", "Gpu", "MissingExtra", "Target", "describe", "find", "parse", "quiet_cpu"]
