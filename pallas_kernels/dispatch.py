"""Who computes an op: its Mosaic GPU kernel, or plain JAX that XLA compiles.

The choice is made while the program is lowered, by the device it is lowered for, which may be
one that is not here; never by `jax.default_backend()`. The kernels are for Hopper. A kernel is
a black box to XLA's partitioner: programs that XLA partitions over many devices keep the plain
form; under `jax.shard_map` over all mesh axes each device runs the kernel.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax
from jaxtyping import Array

from pallas_kernels import backend, manual_axes

HOPPER = ("H100", "H200", "GH200")
IMPLEMENTATIONS = (None, "mosaic_gpu", "xla")
_NEEDS = f"implementation='mosaic_gpu' needs a Hopper GPU ({', '.join(HOPPER)})"


def check(implementation: str | None, unfit: str | None = None) -> None:
    """Refuses what cannot be served whatever the device is.

    Args:
      implementation: as a user gave it.
      unfit: why the kernel does not serve these inputs, a verb and what was got; None: it does.

    Raises:
      ValueError: an implementation that does not exist.
      NotImplementedError: the kernel was asked for and is unfit.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"unknown implementation {implementation!r}; known: mosaic_gpu, xla, None")
    if implementation == "mosaic_gpu" and unfit:
        raise NotImplementedError(f"implementation='mosaic_gpu' {unfit}; None or 'xla' works")


def choose(
    implementation: str | None,
    kernel: Callable[..., Any],
    plain: Callable[..., Any],
    *operands: Any,
    unfit: str | None = None,
) -> Any:
    """Calls the kernel in a program for a Hopper GPU, and plain JAX in any other.

    Args:
      implementation: None, "mosaic_gpu" or "xla".
      kernel: of the operands.
      plain: the same, with results of the same shapes and dtypes.
      *operands: trees of arrays, None among them.
      unfit: as of `check`.

    Returns:
      What either returns. In the simulator it is the kernel's only if that was asked for.

    Raises:
      ValueError, NotImplementedError: see `check`; also, while lowering, where the kernel was
        asked for and the program is not for one Hopper GPU.
    """
    check(implementation, unfit)
    if implementation == "xla" or unfit:
        return plain(*operands)
    kernel = partial(_varying_as, plain, kernel)
    if backend.interpreting():
        return (kernel if implementation == "mosaic_gpu" else plain)(*operands)
    required = _NEEDS if implementation == "mosaic_gpu" else None

    def on_gpu(*operands):
        hopper = backend.on_device(HOPPER, required=required)
        return lax.cond(hopper, kernel, plain, *operands)

    def elsewhere(*operands):
        if required:  # raises, while lowering
            hopper = backend.on_device(HOPPER, required=required)
            return lax.cond(hopper, plain, plain, *operands)
        return plain(*operands)

    return lax.platform_dependent(*operands, cuda=on_gpu, default=elsewhere)


def unsharded(*arrays: Array) -> str | None:
    """Why a kernel does not serve arrays that lie on explicit mesh axes; None where none does.

    Args:
      *arrays: to be given to a kernel.

    Returns:
      A reason for `check`.
    """
    if any(axes is not None for x in arrays for axes in jax.typeof(x).sharding.spec):
        return "takes no array sharded by explicit mesh axes; wrap it in jax.shard_map"
    return None


def refuse_explicit(what: str, *arrays: Array) -> None:
    """Refuses what JAX cannot do with arrays on explicit mesh axes, in words of its own.

    Args:
      what: is not done, the subject of the message.
      *arrays: that it would be done with.

    Raises:
      ValueError: one of them lies on such axes.
    """
    if reason := unsharded(*arrays):
        raise ValueError(f"{what} {reason}, or make the mesh with axis_types=(AxisType.Auto, ...)")


def _varying_as(plain, kernel, *operands):
    """Calls the kernel; under `shard_map` its results vary over the axes that XLA's do."""

    def match(x, like):
        axes = manual_axes.varying(like) - manual_axes.varying(x)
        return lax.pcast(x, tuple(axes), to="varying") if axes else x

    return jax.tree.map(match, kernel(*operands), jax.eval_shape(plain, *operands))
