"""Inside `jax.shard_map`: which arrays differ from device to device, and making them alike.

JAX checks that loops and custom derivatives agree on it. What a function makes itself, zeros
for a sum say, is the same on all devices until it is marked otherwise.
"""

from collections.abc import Iterable

import jax
from jaxtyping import Array


def varying(x: Array | jax.ShapeDtypeStruct) -> frozenset[str]:
    """Mesh axes of an enclosing `jax.shard_map` along which `x` differs from device to device.

    Args:
      x: any array or tracer, or its shape.

    Returns:
      Names of axes; none outside of `shard_map`, or under `check_vma=False`.
    """
    return jax.typeof(x).manual_axis_type.varying


def vary(x: Array, axes: Iterable[str]) -> Array:
    """Marks `x` as varying along these axes too: its gradient is then each device's own.

    Args:
      x: any array.
      axes: of an enclosing `jax.shard_map`.

    Returns:
      The same values.
    """
    missing = tuple(axis for axis in axes if axis not in varying(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def vary_alike(*xs: Array) -> tuple[Array, ...]:
    """Marks arrays as varying along all the axes that one of them varies along.

    A custom VJP inside `jax.shard_map` must give each argument a gradient that varies as the
    argument does; the mark's own gradient is the sum over the devices that is then due.

    Args:
      *xs: any arrays.

    Returns:
      The same values.
    """
    axes = frozenset().union(*map(varying, xs))
    return tuple(vary(x, axes) for x in xs)
