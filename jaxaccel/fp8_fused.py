"""Casts to FP8 in the op that makes an activation, instead of in the matmul that reads it.

With delayed scaling the scale is known beforehand, so the norm and the activation before a
matmul can write eight bits in place of sixteen, and find the largest magnitude on the way: the
cast's own pass over memory is gone. Linears that read one input (queries, keys and values; gate
and up) share one cast, where each would make its own.

**Exactness**: approximate, as the cast in the matmul; it is nearer to the float32 value by the
rounding to sixteen bits that no longer comes before it. Linears that share a cast use the scale
of the first of them; all have seen the same magnitudes, so it differs only after a restart that
changed which layers are FP8.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxaccel.fp8_delayed import OPERANDS, DelayedState
from jaxaccel.numerics import Quantized
from pallas_kernels import rms_norm as norm_op
from pallas_kernels import swiglu as swiglu_op
from pallas_kernels.fp8_output import Fp8Output


class Cast(NamedTuple):
    """An activation in FP8, for the lhs of an FP8 matmul in place of an array."""

    like: Array  # zeros of its shape and dtype; its gradient is the activation's
    quantized: Quantized

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the activation."""
        return self.like.shape

    @property
    def dtype(self) -> Any:
        """Of the activation's gradient."""
        return self.like.dtype


def rms_norm(
    x: Float[Array, "*B D"],
    scale: Float[Array, " D"],
    epsilon: float,
    *,
    residual: Float[Array, "*B D"] | None = None,
    state: DelayedState | None = None,
    plain: Callable = norm_op.rms_norm,
    fp8: Callable = norm_op.rms_norm_fp8,
) -> Any:
    """`pallas_kernels.rms_norm`, cast to FP8 where delayed scaling asks for it.

    Args:
      x: any float dtype.
      scale: one per channel.
      epsilon: added to the mean of squares.
      residual: added to `x` first.
      state: of the matmul that reads the output; None: no cast.
      plain, fp8: the two ops, with these signatures.

    Returns:
      The normalised value, an array or a `Cast`; with a residual, the sum and that.
    """
    if state is None:
        return plain(x, scale, epsilon, residual=residual)
    cast_scale = _scale(state)
    out = fp8(x, scale, cast_scale, epsilon, residual=residual)
    return _cast(out, cast_scale) if residual is None else (out[0], _cast(out[1], cast_scale))


def swiglu(
    gate: Float[Array, "*B F"],
    up: Float[Array, "*B F"],
    *,
    state: DelayedState | None = None,
    plain: Callable = swiglu_op.swiglu,
    fp8: Callable = swiglu_op.swiglu_fp8,
) -> Any:
    """`pallas_kernels.swiglu`, cast to FP8 where delayed scaling asks for it.

    Args:
      gate, up: of one shape and dtype.
      state: of the matmul that reads the output; None: no cast.
      plain, fp8: the two ops, with these signatures.

    Returns:
      An array or a `Cast`.
    """
    if state is None:
        return plain(gate, up)
    cast_scale = _scale(state)
    return _cast(fp8(gate, up, cast_scale), cast_scale)


def _scale(state: DelayedState) -> Array:
    return jax.lax.stop_gradient(state.scale[OPERANDS.index("lhs")])


def _cast(out: Fp8Output, scale: Array) -> Cast:
    # As in a matmul's own cast: a scale that is not known yet serves zeros only.
    scale = jnp.where((scale == 0) & (out.amax != 0), jnp.nan, scale)
    return Cast(out.like, Quantized(out.values, scale, out.amax))
