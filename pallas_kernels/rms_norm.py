"""Root-mean-square norm (arXiv:1910.07467), with the residual's addition before it.

XLA's forward pass of a plain norm is at the limit: one read and one write. A kernel pays
where the addition, the statistics kept for the backward pass, the cast to eight bits and the
reductions of the backward pass would each be a pass of its own. All are one here
(`rms_norm_kernels`), on Hopper; elsewhere XLA, with a written backward: automatic
differentiation keeps more intermediates than the two needed (the input and 1/rms) and, on a
CPU, recomputes the chain of them several times over.

What could be better: the total is read again in the backward pass; it could be computed there
from output and scale, if no scale were near zero.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from pallas_kernels import dispatch, fp8_output, manual_axes
from pallas_kernels import rms_norm_kernels as kernels
from pallas_kernels.fp8_output import Fp8Output

INVERSE = "rms_norm_inverse"  # under this name 1/rms is kept for the backward pass


def rms_norm_reference(
    x: Float[Array, "*B D"],
    scale: Float[Array, " D"],
    epsilon: float = 1e-6,
    *,
    residual: Float[Array, "*B D"] | None = None,
    offset: float = 0.0,
) -> Float[Array, "*B D"] | tuple[Float[Array, "*B D"], Float[Array, "*B D"]]:
    """`x / sqrt(mean(x^2) + epsilon) * (offset + scale)`, differentiated by JAX; see `rms_norm`.

    Args:
      x: any float dtype.
      scale: one per channel.
      epsilon: added to the mean of squares.
      residual: added to x first, rounded to the dtype of x.
      offset: added to the scale.

    Returns:
      The shape and dtype of `x`; computed in float32. With a residual: the sum, and that.
    """
    total = x if residual is None else _add(x, residual)
    x32 = total.astype(jnp.float32)
    rms = jnp.sqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + epsilon)
    y = (x32 / rms * _weight(offset, scale, x.ndim)).astype(x.dtype)
    return y if residual is None else (total, y)


def rms_norm(
    x: Float[Array, "*B D"],
    scale: Float[Array, " D"],
    epsilon: float = 1e-6,
    *,
    residual: Float[Array, "*B D"] | None = None,
    offset: float = 0.0,
    implementation: str | None = None,
) -> Float[Array, "*B D"] | tuple[Float[Array, "*B D"], Float[Array, "*B D"]]:
    """Root-mean-square norm over the last dimension, statistics in float32.

    With a residual, `total = x + residual` is rounded to the dtype of x and then normalised,
    as separate operations would: the same numbers, one pass.

    **Exactness**: exact, `rms_norm_reference` up to float32 rounding, gradients too; two runs
    of the kernel give the same bits. Memory: keeps the total (or x), the scale and 1/rms.

    Args:
      x: any float dtype.
      scale: multiplies the normalised value; one per channel.
      epsilon: added to the mean of squares.
      residual: shape and dtype of `x`; added to it before.
      offset: added to the scale; 1 for Gemma, whose scale is kept less 1.
      implementation: "mosaic_gpu", the kernels for Hopper; "xla"; None: the kernels in
        programs for Hopper if D is a multiple of 256. Asked for, they pad other lengths; up to
        12288, in float32 7680.

    Returns:
      The shape and dtype of `x`; with a residual, the total and that.

    Raises:
      ValueError: shapes or dtypes do not match, or an unknown implementation.
      NotImplementedError: the kernels were asked for and do not serve this.

    Example:
      >>> [round(float(x), 3) for x in rms_norm(jnp.array([3.0, 4.0]), jnp.ones(2), 0.0)]
      [0.849, 1.131]
    """
    options = _Options(float(epsilon), float(offset), implementation)
    total, y = _norm(options, *_checked(options, x, residual, scale, None))
    return y if residual is None else (total, y)


def rms_norm_fp8(
    x: Float[Array, "*B D"],
    scale: Float[Array, " D"],
    cast_scale: Float[Array, ""],
    epsilon: float = 1e-6,
    *,
    residual: Float[Array, "*B D"] | None = None,
    offset: float = 0.0,
    implementation: str | None = None,
) -> Fp8Output | tuple[Float[Array, "*B D"], Fp8Output]:
    """`rms_norm` with its output in eight bits, cast where it is made.

    **Exactness**: approximate, the rounding to e4m3 (relative 2^-4). Cast and largest
    magnitude are of the float32 output, never rounded to the dtype of x in between.

    Args:
      x: any float dtype.
      scale: multiplies the normalised value; one per channel.
      cast_scale: float32; the output is held as multiples of it, see `fp8_output.to_fp8`.
      epsilon: added to the mean of squares.
      residual: as of `rms_norm`.
      offset: added to the scale.
      implementation: as of `rms_norm`.

    Returns:
      The output; with a residual, the total and that. The gradient of the output is the
      gradient of its `like`; `cast_scale` has none.

    Raises:
      ValueError, NotImplementedError: as `rms_norm`.

    Example:
      >>> y = rms_norm_fp8(jnp.array([3.0, 4.0]), jnp.ones(2), jnp.float32(0.5), 0.0)
      >>> y.values.astype(jnp.float32).tolist(), round(float(y.amax), 3)
      ([1.75, 2.25], 1.131)
    """
    options = _Options(float(epsilon), float(offset), implementation)
    total, y = _norm(options, *_checked(options, x, residual, scale, cast_scale))
    return y if residual is None else (total, y)


class _Options(NamedTuple):
    epsilon: float
    offset: float
    implementation: str | None

    def unfit(self, x, residual, scale, fp8=False) -> str | None:
        sizes = kernels.sizes_of(x, scale, residual is not None, fp8)
        return kernels.unfit(self.implementation == "mosaic_gpu", sizes, x, scale)


def _checked(options, x, residual, scale, cast_scale):
    """The operands, which under `shard_map` vary alike."""
    if x.ndim == 0 or scale.shape != x.shape[-1:]:
        raise ValueError(f"got x {x.shape}, scale {scale.shape}; need x [..., D], scale [D]")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x is {x.dtype}; it must be floating-point")
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        got = f"{residual.dtype}{list(residual.shape)}"
        raise ValueError(f"got residual {got}, need that of x, {x.dtype}{list(x.shape)}")
    fp8_output.check(cast_scale)
    unfit = options.unfit(x, residual, scale, cast_scale is not None)
    dispatch.check(options.implementation, unfit)
    operands, tree = jax.tree.flatten((x, residual, scale, cast_scale))
    return jax.tree.unflatten(tree, manual_axes.vary_alike(*operands))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm(options: _Options, x, residual, scale, cast_scale):
    """Total (or None) and output."""
    return _norm_forward(options, x, residual, scale, cast_scale)[0]


def _norm_forward(options, x, residual, scale, cast_scale):
    inverse_cast = None if cast_scale is None else fp8_output.inverse_scale(cast_scale)
    total, y, top, inverse = dispatch.choose(
        options.implementation,
        partial(kernels.forward, options.epsilon, options.offset),
        partial(_plain_forward, options.epsilon, options.offset),
        *(x, residual, scale, inverse_cast),
        unfit=options.unfit(x, residual, scale, cast_scale is not None),
    )
    # For rematerialisation: with it and the total saved, the forward pass is not repeated.
    inverse = checkpoint_name(inverse, INVERSE)
    if cast_scale is not None:
        like, _ = manual_axes.vary_alike(jnp.zeros(x.shape, x.dtype), x)
        y = Fp8Output(like, y, top)
    return (total, y), (x if residual is None else total, scale, inverse, cast_scale)


def _norm_backward(options, saved, gradients):
    x, scale, inverse, cast_scale = saved
    dtotal, dy = gradients
    dx, dscale = dispatch.choose(
        options.implementation,
        partial(kernels.backward, options.offset),
        partial(_plain_backward, options.offset),
        *(x, scale, inverse, dy if cast_scale is None else dy.like, dtotal),
        unfit=options.unfit(x, dtotal, scale),
    )
    dcast = None if cast_scale is None else jnp.zeros_like(cast_scale)
    return dx, None if dtotal is None else dx, dscale.astype(scale.dtype), dcast


_norm.defvjp(_norm_forward, _norm_backward)


def _plain_forward(epsilon, offset, x, residual, scale, inverse_cast):
    """`kernels.forward` in XLA."""
    total = None if residual is None else _add(x, residual)
    x32 = (x if total is None else total).astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + epsilon)
    y = x32 * inverse * _weight(offset, scale, x.ndim)
    if inverse_cast is None:
        return total, y.astype(x.dtype), None, inverse
    top = jnp.max(jnp.abs(y), initial=0.0)
    return total, fp8_output.to_fp8(y, inverse_cast), top, inverse


def _plain_backward(offset, x, scale, inverse, dy, dtotal):
    """`kernels.backward` in XLA."""
    unit = x.astype(jnp.float32) * inverse
    dy = dy.astype(jnp.float32)
    # The barrier keeps XLA's CPU back end from fusing the two reductions below with
    # each other's inputs, which would compute `unit` anew for each.
    unit, dy = jax.lax.optimization_barrier((unit, dy))
    dscale = jnp.sum(dy * unit, axis=tuple(range(x.ndim - 1)))
    dunit = dy * _weight(offset, scale, x.ndim)
    projection = jnp.mean(dunit * unit, axis=-1, keepdims=True)
    dx = (dunit - unit * projection) * inverse
    if dtotal is not None:
        dx += dtotal.astype(jnp.float32)
    return dx.astype(x.dtype), dscale


def _add(x, residual):
    return (x.astype(jnp.float32) + residual.astype(jnp.float32)).astype(x.dtype)


def _weight(offset, scale, ndim):
    return jnp.expand_dims(scale.astype(jnp.float32) + offset, range(ndim - 1))


def cases(N: int = 16384, D: int = 2048) -> Iterator[tuple]:
    """For the table of `pallas_kernels.inspect`: forward, in eight bits, backward; a residual.

    Args:
      N: rows.
      D: row length.

    Returns:
      The fields of an `inspect.Case`, of each.
    """
    if D > kernels.LONGEST:
        raise ValueError(f"D={D}; the kernels take rows of up to {kernels.LONGEST}")
    x = jax.ShapeDtypeStruct((N, D), jnp.bfloat16)
    scale, inverse, one = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((D,), (N, 1), ()))

    def forward(run, x, residual, scale, inverse_cast=None):
        return run(1e-6, 0.0, x, residual, scale, inverse_cast)[:3]

    backward = lambda run, *args: run(0.0, *args)
    pairs = (kernels.forward, _plain_forward), (kernels.backward, _plain_backward)
    small = 4 * (N + D)
    for label, call, (kernel, plain), args, moved in (
        ("forward", forward, pairs[0], [x, x, scale], 8 * N * D + small),
        ("forward, FP8", forward, pairs[0], [x, x, scale, one], 7 * N * D + small),
        ("backward", backward, pairs[1], [x, scale, inverse, x, x], 8 * N * D + small + 4 * D),
    ):
        yield label, partial(call, kernel), partial(call, plain), args, 0, moved
