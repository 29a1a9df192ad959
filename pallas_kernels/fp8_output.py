"""What an op returns that writes its result in eight bits (arXiv:2209.05433, e4m3).

The cast costs no pass over memory where the op that makes the values does it: the scale is one
that is known before (delayed scaling), the largest magnitude comes out for the next one.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

LARGEST = 448.0  # of e4m3


class Fp8Output(NamedTuple):
    """`y = values * cast_scale`, up to the rounding to eight bits.

    Attributes:
      like: shape of y and dtype of the op's input; zeros, which nothing should read. Its
        gradient is that of y: what takes `values` gives `like` the gradient. XLA never makes it.
      values: float8_e4m3fn, `y / cast_scale` of the float32 y; no gradient.
      amax: float32 [], the largest magnitude of the float32 y; no gradient. NaN or infinite if
        an element is.
    """

    like: Array
    values: Array
    amax: Array


def check(cast_scale: Array | None) -> None:
    """Refuses what is no scale of a whole tensor.

    Args:
      cast_scale: as a user gave it; None is none.

    Raises:
      ValueError: not float32 [].
    """
    if cast_scale is not None and (cast_scale.shape, cast_scale.dtype) != ((), jnp.float32):
        got = f"{cast_scale.dtype}{list(cast_scale.shape)}"
        raise ValueError(f"got cast_scale {got}; need float32[], one for the tensor")


def inverse_scale(scale: Float[Array, ""]) -> Float[Array, ""]:
    """What `to_fp8` multiplies by: `1 / scale`; 0 for 0, the scale of zeros.

    Args:
      scale: float32.

    Returns:
      float32.
    """
    return jnp.where(scale == 0, 0.0, 1 / scale)


def to_fp8(y: Float[Array, "..."], inverse: Float[Array, ""]) -> Float[Array, "..."]:
    """`y * inverse` in e4m3, saturating, as `jaxaccel.numerics.cast`; in kernels and in XLA.

    Args:
      y: float32. Infinities become NaN, so that an overflow is seen.
      inverse: from `inverse_scale`.

    Returns:
      float8_e4m3fn.

    Example:
      >>> to_fp8(jnp.array([1.0, 1e4]), inverse_scale(jnp.float32(2))).astype(jnp.float32).tolist()
      [0.5, 448.0]
    """
    # Plus 0, or NaN where y is not finite. A selection would do, but XLA writes its mask to memory
    # where two casts can share it.
    scaled = jnp.minimum(jnp.maximum(y * inverse, -LARGEST), LARGEST)
    return (scaled + y * 0.0).astype(jnp.float8_e4m3fn)
