"""Which form of a collective matmul is the fastest, by a cost model (*modelled*).

A form is a pipeline: parts are transferred one after the other, each under the matmul of the
part before (or after). It takes its first part's exposed time, then part by part the longer of
transfer and matmul, then what is left; and a pass over memory that puts the parts in order.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxaccel.cost import CostModel
from jaxaccel.overlap.parts import RINGS, parse

OPERATIONS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
_XLA_NAMES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
# `bidirectional` needs an option of XLA's, so it is a user's own choice.
_CHOICES = ("plain", "chunked", "chunked:4", "ring")


def modelled_seconds(
    model: CostModel,
    operation: str,
    rows: int,
    inner: int,
    columns: int,
    devices: int,
    *,
    dtype: Any = "bfloat16",
    backward: bool = False,
) -> dict[str, float]:
    """Time of one pass of a collective matmul in each form, *modelled*.

    Args:
      model: rates.
      operation: the function's name, of `OPERATIONS`.
      rows: of all devices, leading dims multiplied in.
      inner: K, which one device's matmul contracts.
      columns: N of one device's weight; of a tuple of weights their sum.
      devices: of the axis.
      dtype: of the operands.
      backward: the backward pass instead of the forward pass.

    Returns:
      Seconds by form; only forms that the sizes allow.

    Raises:
      ValueError: rows that the devices do not divide; an unknown operation.

    Example:
      >>> from pallas_kernels.target import parse as target
      >>> model = CostModel(target("h200x8"))
      >>> of = modelled_seconds(model, "all_gather_matmul", 8192, 4096, 3584, 8)
      >>> {form: round(1e6 * seconds) for form, seconds in of.items()}  # microseconds
      {'plain': 521, 'chunked': 468, 'chunked:4': 427, 'ring': 376, 'bidirectional': 405}
    """
    if operation not in OPERATIONS:
        raise ValueError(f"operation is {operation!r}; legal: {', '.join(OPERATIONS)}")
    if rows % devices:
        raise ValueError(f"{rows} rows must be a multiple of the {devices} devices")
    size = jnp.dtype(dtype).itemsize
    rate = model.matmul_rate(_XLA_NAMES.get(jnp.dtype(dtype).name, "fp8"))
    memory = model.target.gpu.memory_bandwidth * model.memory_efficiency
    passed = lambda elements: max(size * elements / memory, model.kernel_latency)
    sent = lambda kind, elements: model.collective_seconds(kind, size * elements, devices)
    matmul = lambda m, k, n: max(2 * m * k * n / rate, passed(m * k + k * n + m * n))
    forward = lambda m: matmul(m, inner, columns)
    dx, dw = lambda m: matmul(m, columns, inner), lambda m: matmul(inner, m, columns)
    block = rows // devices

    def gathered(kind: str, count: int, width: int, work: Callable, cut: int) -> float:
        """`cut`: columns of what is put in order, or taken part by part."""
        if kind in RINGS:
            hop = count * sent("collective-permute", block // count * width)
            used = count * work(block // count)
            return (devices - 1) * max(hop, used) + used + count * passed(2 * rows * cut)
        arrival, used = sent("all-gather", rows * width // count), work(rows // count)
        order = passed(2 * rows * cut) if count > 1 else 0.0
        return arrival + (count - 1) * max(arrival, used) + used + order

    def reduced(collective: str, count: int, made: float, order: float) -> float:
        total = sent(collective, rows * columns // count)
        return made + (count - 1) * max(made, total) + total + (order if count > 1 else 0.0)

    def scattered(kind: str, count: int) -> float:
        if kind in RINGS:
            hop = count * sent("collective-permute", block // count * columns)
            made = count * forward(block // count)
            return made + (devices - 1) * (max(hop, made) + passed(3 * block * columns))
        return reduced("reduce-scatter", count, forward(rows // count), 0.0)

    def seconds(kind: str, count: int) -> float:
        match operation, backward:
            case "all_gather_matmul", False:
                return gathered(kind, count, inner, forward, columns)
            case "all_gather_matmul", True:  # two whole transfers, in every form
                gather, scatter = (sent(k, rows * inner) for k in ("all-gather", "reduce-scatter"))
                return max(gather, dx(rows)) + max(scatter, dw(rows))
            case "matmul_reduce_scatter", False:
                return scattered(kind, count)
            case "matmul_reduce_scatter", True:
                return gathered(kind, count, columns, lambda m: dx(m) + dw(m), 2 * inner)  # x, dx
            case _, False:
                made = matmul(rows, inner, columns // count)
                return reduced("all-reduce", count, made, passed(2 * rows * columns))
            case _:
                return dx(rows) + dw(rows)

    divided = columns if operation == "matmul_all_reduce" else block
    forms = {form: parse(form) for form in (*_CHOICES, "bidirectional")}
    return {
        form: seconds(kind, count)
        for form, (kind, count) in forms.items()
        if divided % count == 0 and not (operation == "matmul_all_reduce" and kind in RINGS)
    }


def choose(
    model: CostModel,
    operation: str,
    rows: int,
    inner: int,
    columns: int,
    devices: int,
    *,
    dtype: Any = "bfloat16",
    backward: bool = False,
) -> str:
    """The form with the least `modelled_seconds`; the simpler of two that are as fast.

    `bidirectional` is never chosen: it needs an option of XLA's, and on NVSwitch wins nothing.

    Args:
      model, operation, rows, inner, columns, devices, dtype, backward: see `modelled_seconds`.

    Returns:
      A form.

    Example:
      >>> from pallas_kernels.target import parse as target
      >>> model = CostModel(target("h200x8"))
      >>> {n: choose(model, "all_gather_matmul", 8192, 4096, n, 8) for n in (768, 3584)}
      {768: 'chunked', 3584: 'ring'}
    """
    if devices == 1:
        return "plain"
    seconds = modelled_seconds(
        model, operation, rows, inner, columns, devices, dtype=dtype, backward=backward
    )
    if operation == "matmul_reduce_scatter" and backward:
        # Of small parts' gathers XLA starts some behind the first of the two matmuls.
        seconds.pop("chunked:4", None)
    return min((form for form in _CHOICES if form in seconds), key=seconds.__getitem__)
