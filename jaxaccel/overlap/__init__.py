"""Sharding whose communication hides behind compute; each function serves in any `shard_map`."""

from jaxaccel.overlap import domino
from jaxaccel.overlap.collective_matmul import (
    PLAIN,
    Product,
    all_gather_matmul,
    choose,
    matmul_all_reduce,
    matmul_reduce_scatter,
    modelled_seconds,
)
from jaxaccel.overlap.fsdp import prefetch_scan
from jaxaccel.overlap.options import compiler_options, in_order
from jaxaccel.overlap.ring_attention import ring_attention
from jaxaccel.overlap.zigzag import unzigzag, zigzag

__all__ = [
    "PLAIN",
    "Product",
    "all_gather_matmul",
    "choose",
    "compiler_options",
    "domino",
    "in_order",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "modelled_seconds",
    "prefetch_scan",
    "ring_attention",
    "unzigzag",
    "zigzag",
]
