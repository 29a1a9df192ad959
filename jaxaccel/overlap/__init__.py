"""Collectives that run while something else computes; each function serves in any `shard_map`."""

from jaxaccel.overlap.domino import domino_scan
from jaxaccel.overlap.fsdp import prefetch_scan

__all__ = ["domino_scan", "prefetch_scan"]
