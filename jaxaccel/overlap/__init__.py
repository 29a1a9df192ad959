"""Sharding whose communication hides behind compute; each function serves in any `shard_map`."""

from jaxaccel.overlap.collective_matmul import (
    Product,
    all_gather_matmul,
    choose,
    matmul_all_reduce,
    matmul_reduce_scatter,
    modelled_seconds,
)
from jaxaccel.overlap.fsdp import prefetch_scan

__all__ = [
    "Product",
    "all_gather_matmul",
    "choose",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "modelled_seconds",
    "prefetch_scan",
]
