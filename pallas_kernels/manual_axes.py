"""Inside `jax.shard_map`: which arrays differ from device to device, and making them alike.

JAX checks that loops and custom derivatives agree on it. What a function makes itself, zeros
for a sum say, is the same on all devices until it is marked otherwise.
"""

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
    missing = [tuple(axes - varying(x)) for x in xs]
    return tuple(jax.lax.pcast(x, m, to="varying") if m else x for x, m in zip(xs, missing))
