"""Sharding whose communication runs under compute: functions for anybody's `jax.shard_map`."""

from jaxaccel.overlap.ring_attention import ring_attention
from jaxaccel.overlap.zigzag import unzigzag, zigzag

__all__ = ["ring_attention", "unzigzag", "zigzag"]
