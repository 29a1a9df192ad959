"""Options of XLA's that overlap needs, for one program, known to the XLA at hand.

An unknown flag in `XLA_FLAGS` ends the process; as an option of one compilation it raises, so that
it can be asked for first. Names come and go with each release.
"""

import functools
from typing import Any

import jax


def compiler_options(layer_bytes: int, bucket_bytes: int | None = None) -> dict[str, Any]:
    """What to give `jax.jit(step, compiler_options=)` for a step with `prefetch_scan`.

    `xla_gpu_all_gather_combine_threshold_bytes`: gathers of one layer become one, which a whole
    layer hides; of several, XLA's scheduler runs some with nothing beside them.
    `xla_gpu_all_reduce_combine_threshold_bytes` and the same of `reduce_scatter`: gradients of one
    layer are joined to buckets, each one reduction, of up to so many bytes; a gradient that is
    larger goes alone.

    Args:
      layer_bytes: of one layer's gathered weights.
      bucket_bytes: of a bucket; None: XLA's own size, 30 MiB.

    Returns:
      Options by name, without those that this XLA does not know; print them, to see what was set.

    Example:
      >>> compiler_options(1000)
      {'xla_gpu_all_gather_combine_threshold_bytes': 1000}
    """
    wanted = {"xla_gpu_all_gather_combine_threshold_bytes": layer_bytes}
    if bucket_bytes is not None:
        for kind in ("all_reduce", "reduce_scatter"):
            wanted[f"xla_gpu_{kind}_combine_threshold_bytes"] = bucket_bytes
    return {name: value for name, value in wanted.items() if known(name, value)}


def in_order(platform: str) -> dict[str, Any]:
    """What to give `jax.jit` for a program of several devices in which collectives meet.

    On CPUs, devices were seen to run two collectives that do not depend on one another, as
    `prefetch_scan` has them, in unlike orders: they waited for each other forever, or took each
    other's values (in FP8 with micro-batches NaN, in most runs). Scheduled for memory and not for
    concurrency, they did not, and results are the same to the last bit. GPUs run collectives in
    the order of the schedule.

    Args:
      platform: of the devices, as in `jax.Device.platform`.

    Returns:
      As `compiler_options`.

    Example:
      >>> in_order("gpu")
      {}
    """
    wanted = {"xla_cpu_enable_concurrency_optimized_scheduler": False} if platform == "cpu" else {}
    return {name: value for name, value in wanted.items() if known(name, value)}


@functools.cache
def known(name: str, value: Any) -> bool:
    """Whether the XLA at hand takes an option, found by compiling nothing much with it.

    Args:
      name: as in `XLA_FLAGS`, without dashes.
      value: its value.

    Returns:
      False if XLA refuses it.

    Example:
      >>> known("xla_gpu_no_such_option", True)
      False
    """
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return False
    return True
