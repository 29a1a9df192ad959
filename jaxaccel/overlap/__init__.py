"""Sharding whose communication hides behind compute."""

from jaxaccel.overlap.collective_matmul import (
    all_gather_matmul,
    choose,
    matmul_all_reduce,
    matmul_reduce_scatter,
    modelled_seconds,
)

__all__ = [
    "all_gather_matmul",
    "choose",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "modelled_seconds",
]
