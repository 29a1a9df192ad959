"""The gated activation of Llama-like models, `silu(gate) * up` (arXiv:2002.05202): one pass.

XLA's own fusion is at memory's limit: it makes both gradients in one pass, fuses the activation
that rematerialisation repeats into that pass, and casts of the gradients too, where a kernel is
closed to what is around it. Compiled for an H200, a layer of Llama-1B moves 2,288 MiB of [B, T, F]
arrays with XLA's and 2,640 MiB with the kernels, 4 x 4096 tokens. So by default XLA computes it.
The kernel is the default for the output in eight bits with its largest magnitude, which costs XLA
a pass for the cast and reads for the magnitude. The arithmetic is elementwise, so arrays of any
shape are one long run of elements, cut into pieces of 2048 (`streaming`).
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import dispatch, fp8_output, manual_axes, streaming
from pallas_kernels.fp8_output import Fp8Output
from pallas_kernels.streaming import LINE, Moved, Output, Plan

DTYPES = ("bfloat16", "float16", "float32")
PIECE = 2048  # elements: 4 KiB a copy in 16 bits
LOG2_E = 1.4426950408889634


def swiglu_reference(gate: Float[Array, "*B F"], up: Float[Array, "*B F"]) -> Float[Array, "*B F"]:
    """`gate * sigmoid(gate) * up`, differentiated by JAX; see `swiglu`.

    Args:
      gate: any float dtype.
      up: alike.

    Returns:
      The shape and dtype of `gate`; computed in float32.
    """
    return _plain_forward(gate, up, None)[0]


def swiglu(
    gate: Float[Array, "*B F"], up: Float[Array, "*B F"], *, implementation: str | None = None
) -> Float[Array, "*B F"]:
    """`silu(gate) * up`, where `silu(x) = x * sigmoid(x)`.

    **Exactness**: exact, computed in float32 and rounded once, gradients too. Memory: keeps
    gate and up, and computes the activation anew in the backward pass.

    Args:
      gate: any float dtype.
      up: shape and dtype of `gate`.
      implementation: "mosaic_gpu", the kernels for Hopper; "xla", which is also None's choice.

    Returns:
      The shape and dtype of `gate`.

    Raises:
      ValueError: shapes or dtypes do not match, or an unknown implementation.
      NotImplementedError: the kernels were asked for and do not serve this.

    Example:
      >>> y = swiglu(jnp.array([0.0, 1.0, 20.0]), jnp.array([1.0, 2.0, 3.0]))
      >>> [round(float(x), 3) for x in y]
      [0.0, 1.462, 60.0]
    """
    return _swiglu(implementation, *_checked(implementation, gate, up, None))


def swiglu_fp8(
    gate: Float[Array, "*B F"],
    up: Float[Array, "*B F"],
    cast_scale: Float[Array, ""],
    *,
    implementation: str | None = None,
) -> Fp8Output:
    """`swiglu` with its output in eight bits, cast where it is made.

    **Exactness**: approximate, the rounding to e4m3 (relative 2^-4). Cast and largest
    magnitude are of the float32 output, never rounded to the dtype of gate in between.

    Args:
      gate: any float dtype.
      up: shape and dtype of `gate`.
      cast_scale: float32; the output is held as multiples of it, see `fp8_output.to_fp8`.
      implementation: "mosaic_gpu", the kernels for Hopper; "xla"; None: the kernel forward,
        in programs for Hopper if the number of elements is a multiple of 2048, XLA backward.
        Asked for, the kernels pad others.

    Returns:
      The output, whose gradient is that of its `like`; `cast_scale` has none.

    Raises:
      ValueError, NotImplementedError: as `swiglu`.

    Example:
      >>> y = swiglu_fp8(jnp.array([1.0, 20.0]), jnp.array([2.0, 3.0]), jnp.float32(0.25))
      >>> y.values.astype(jnp.float32).tolist(), float(y.amax)
      ([6.0, 240.0], 60.0)
    """
    return _swiglu(implementation, *_checked(implementation, gate, up, cast_scale))


def _checked(implementation, gate, up, cast_scale):
    """The operands, which under `shard_map` vary alike."""
    if (gate.shape, gate.dtype) != (up.shape, up.dtype):
        got = ", ".join(f"{x.dtype}{list(x.shape)}" for x in (gate, up))
        raise ValueError(f"got gate, up {got}; need the same shape and dtype of both")
    if not jnp.issubdtype(gate.dtype, jnp.floating):
        raise ValueError(f"gate and up are {gate.dtype}; they must be floating-point")
    fp8_output.check(cast_scale)
    dispatch.check(implementation, _unfit(implementation, gate, up))
    operands, tree = jax.tree.flatten((gate, up, cast_scale))
    return jax.tree.unflatten(tree, manual_axes.vary_alike(*operands))


def _unfit(implementation, gate, up) -> str | None:
    if gate.dtype.name not in DTYPES:
        return f"has {', '.join(DTYPES)}, got {gate.dtype}"
    if gate.size == 0:
        return f"needs at least one element, got {gate.shape}"
    if implementation is None and gate.size % PIECE:
        return f"has multiples of {PIECE} elements, got {gate.shape}"
    return dispatch.unsharded(gate, up)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _swiglu(implementation, gate, up, cast_scale):
    return _swiglu_forward(implementation, gate, up, cast_scale)[0]


def _swiglu_forward(implementation, gate, up, cast_scale):
    inverse_cast = None if cast_scale is None else fp8_output.inverse_scale(cast_scale)
    unfit = _unfit(implementation, gate, up)
    if cast_scale is None:
        implementation = implementation or "xla"
    y, top = dispatch.choose(
        implementation, forward_kernel, _plain_forward, gate, up, inverse_cast, unfit=unfit
    )
    if cast_scale is not None:
        like, _ = manual_axes.vary_alike(jnp.zeros(gate.shape, gate.dtype), gate)
        y = Fp8Output(like, y, top)
    return y, (gate, up, cast_scale)


def _swiglu_backward(implementation, saved, dy):
    gate, up, cast_scale = saved
    dy = dy if cast_scale is None else dy.like
    unfit = _unfit(implementation, gate, up)
    dgate, dup = dispatch.choose(
        implementation or "xla", backward_kernel, _plain_backward, gate, up, dy, unfit=unfit
    )
    return dgate, dup, None if cast_scale is None else jnp.zeros_like(cast_scale)


_swiglu.defvjp(_swiglu_forward, _swiglu_backward)


def _plain_forward(gate, up, inverse_cast):
    """`forward_kernel` in XLA."""
    y = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
    if inverse_cast is None:
        return y.astype(gate.dtype), None
    return fp8_output.to_fp8(y, inverse_cast), jnp.max(jnp.abs(y), initial=0.0)


def _plain_backward(gate, up, dy):
    """`backward_kernel` in XLA."""
    g, u, d = (x.astype(jnp.float32) for x in (gate, up, dy))
    dgate, dup = _gradients(g, u, d, jax.nn.sigmoid(g))
    return dgate.astype(gate.dtype), dup.astype(up.dtype)


def _gradients(gate, up, dy, sigmoid):
    """Of `gate * sigmoid(gate) * up`."""
    return dy * up * (sigmoid + gate * (sigmoid * (1.0 - sigmoid))), dy * (gate * sigmoid)


def _kernel_sigmoid(x):
    return 1.0 / (1.0 + jnp.exp2(x * -LOG2_E))


def forward_kernel(
    gate: Float[Array, "..."], up: Float[Array, "..."], inverse_cast: Float[Array, ""] | None
) -> tuple[Array, Array | None]:
    """The forward pass in one kernel.

    Args:
      gate, up: of `swiglu`.
      inverse_cast: makes the output eight bits wide, see `fp8_output.to_fp8`.

    Returns:
      The output, and its largest magnitude [], None unless in eight bits.
    """
    fp8 = inverse_cast is not None
    plan = Sizes(gate.size, gate.dtype.itemsize, fp8).forward()
    parts = streaming.chunks(PIECE)

    def swiglu_forward(top, row, inputs, outputs, shared, numbers, extra):
        for part in parts:
            g, u = (ref[part].astype(jnp.float32) for ref in inputs)
            y = g * _kernel_sigmoid(g) * u
            if fp8:
                outputs[0][part] = fp8_output.to_fp8(y, numbers[0])
                top = jnp.maximum(top, jnp.abs(y))
            else:
                outputs[0][part] = y.astype(gate.dtype)
        return top

    def finish(top, block, warpgroup, extra, scratch):
        extra[0][block * plan.warpgroups + warpgroup] = jnp.max(top)

    y, *top = streaming.stream(
        swiglu_forward,
        [_pieces(gate), _pieces(up)],
        [Output(jnp.float8_e4m3fn) if fp8 else Output(gate.dtype, 0)],
        plan,
        numbers=[] if inverse_cast is None else [inverse_cast[None]],
        extra=[jax.ShapeDtypeStruct((plan.workers,), jnp.float32)] if fp8 else [],
        state=lambda: jnp.zeros((parts[0].size, LINE), jnp.float32) if fp8 else (),
        finish=finish if fp8 else None,
    )
    return _whole(y, gate.shape), jnp.max(top[0]) if fp8 else None


def backward_kernel(
    gate: Float[Array, "..."], up: Float[Array, "..."], dy: Float[Array, "..."]
) -> tuple[Array, Array]:
    """The backward pass in one kernel.

    Args:
      gate, up: of `swiglu`.
      dy: gradient of the output, of the same dtype.

    Returns:
      The gradients of gate and up.
    """

    def swiglu_backward(state, row, inputs, outputs, shared, numbers, extra):
        for part in streaming.chunks(PIECE):
            g, u, d = (ref[part].astype(jnp.float32) for ref in inputs)
            for ref, x in zip(outputs, _gradients(g, u, d, _kernel_sigmoid(g)), strict=True):
                ref[part] = x.astype(gate.dtype)
        return state

    dgate, dup = streaming.stream(
        swiglu_backward,
        [_pieces(x) for x in (gate, up, dy)],
        [Output(gate.dtype, 0), Output(gate.dtype, 1)],
        Sizes(gate.size, gate.dtype.itemsize).backward(),
    )
    return _whole(dgate, gate.shape), _whole(dup, gate.shape)


class Sizes(NamedTuple):
    """What the kernels' plans depend on."""

    elements: int
    itemsize: int  # bytes, of gate
    fp8: bool = False

    @property
    def rows(self) -> int:
        """Pieces."""
        return -(-self.elements // PIECE)

    def forward(self) -> Plan:
        """The forward kernel's plan."""
        return streaming.plan(self.rows, PIECE * (2 * self.itemsize + self.fp8), 0)

    def backward(self) -> Plan:
        """The backward kernel's."""
        return streaming.plan(self.rows, PIECE * 3 * self.itemsize, 0)

    def forward_traffic(self) -> Moved:
        """Bytes that the forward kernel moves."""
        elements = self.rows * PIECE
        stores = elements * (1 if self.fp8 else self.itemsize)
        return Moved(elements * 2 * self.itemsize, stores, 4 * self.fp8 * self.forward().workers)

    def backward_traffic(self) -> Moved:
        """Bytes that the backward kernel moves."""
        elements = self.rows * PIECE * self.itemsize
        return Moved(3 * elements, 2 * elements)


def _pieces(x: Array) -> Array:
    """[...] -> [N, C, 128]."""
    x = x.reshape(-1)
    return streaming.lined(x, -(-x.size // PIECE) * PIECE).reshape(-1, PIECE // LINE, LINE)


def _whole(x: Array, shape: tuple[int, ...]) -> Array:
    """[N, C, 128] -> [...]."""
    return x.reshape(-1)[: math.prod(shape)].reshape(shape)


def cases(N: int = 16384, F: int = 8192) -> Iterator[tuple]:
    """For the table of `pallas_kernels.inspect`: forward, in eight bits, backward.

    Args:
      N: rows.
      F: row length.

    Returns:
      The fields of an `inspect.Case`, of each.
    """
    x, one = jax.ShapeDtypeStruct((N, F), jnp.bfloat16), jax.ShapeDtypeStruct((), jnp.float32)
    first = lambda forward, gate, up: forward(gate, up, None)[0]
    rows: list[tuple[str, Callable, Callable, list, int]] = [
        ("forward", partial(first, forward_kernel), partial(first, _plain_forward), [x, x], 6),
        ("forward, FP8", forward_kernel, _plain_forward, [x, x, one], 5),
        ("backward", backward_kernel, _plain_backward, [x, x, x], 10),
    ]
    for label, kernel, plain, args, bytes_ in rows:
        yield label, kernel, plain, args, 0, bytes_ * N * F
