"""Casts to eight bits: the largest magnitude of a tensor, its scale, and the cast itself.

A tensor `x` is held as `values * scale`, values in an eight-bit format, scale in float32.
The scale that uses the whole range is `max |x| / largest value of the format`. All
arithmetic on scales is float32: in bfloat16 a scale is off by up to 0.4 %, and so is every
product that it stands before.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Format = Literal["e4m3", "e5m2"]

# arXiv:2209.05433: 448 and 2**-9 are the largest and least magnitudes of e4m3 (no infinity),
# 57,344 and 2**-16 those of e5m2.
FORMATS = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}

# Below it, a float32 scale is subnormal, which GPUs may flush to zero.
_LEAST_SCALE = 2.0**-126


class Quantized(NamedTuple):
    """A tensor as `values * scale`, and its largest magnitude before the cast."""

    values: Array  # eight bits wide
    scale: Array  # float32: [] for the tensor, or one for each tile of it
    amax: Array  # float32, shaped like `scale`


def largest(format: Format) -> float:
    """The largest finite value of a format.

    Args:
      format: `e4m3` or `e5m2`.

    Returns:
      A Python number.

    Example:
      >>> largest("e4m3"), largest("e5m2")
      (448.0, 57344.0)
    """
    return float(jnp.finfo(FORMATS[format]).max)


def amax(x: Float[Array, "..."], dim: int | tuple[int, ...] | None = None) -> Array:
    """The largest magnitude of `x`, float32; NaN or infinite if an element is.

    Args:
      x: any floating-point array.
      dim: what to reduce; None: all dimensions.

    Returns:
      float32, without the reduced dimensions; 0 of an array without elements.

    Example:
      >>> float(amax(jnp.array([1.0, -3.0])))
      3.0
    """
    return jnp.max(jnp.abs(x), axis=dim, initial=0.0).astype(jnp.float32)


def scale(
    amax: Float[Array, "..."], format: Format, *, power_of_two: bool = False
) -> Float[Array, "..."]:
    """The factor that an eight-bit value is multiplied by to give back the original.

    Args:
      amax: float32, the largest magnitude to be held.
      format: of the values.
      power_of_two: round up to a power of two, so that scaling is exact.

    Returns:
      float32 of the same shape. 0 where `amax` is 0; infinite or NaN where `amax` is, so
      that a non-finite tensor does not come out of the cast as a finite one.

    Example:
      >>> float(scale(jnp.float32(896.0), "e4m3"))
      2.0
      >>> float(scale(jnp.float32(900.0), "e4m3", power_of_two=True))
      4.0
    """
    exact = amax / largest(format)
    if power_of_two:
        mantissa, exponent = jnp.frexp(exact)  # exact = mantissa * 2**exponent, 0.5 <= mantissa < 1
        up = jnp.ldexp(jnp.float32(1), exponent - (mantissa == 0.5).astype(jnp.int32))
        exact = jnp.where(jnp.isfinite(exact), up, exact)
    return jnp.where(amax == 0, 0.0, jnp.maximum(exact, _LEAST_SCALE))


def cast(x: Float[Array, "..."], scale: Float[Array, "..."], format: Format) -> Float[Array, "..."]:
    """`x / scale` in an eight-bit format, saturating; infinities become NaN.

    A plain `astype` turns what is too large into NaN (e4m3) or infinity (e5m2). Here a finite
    value stays finite, at the edge of the range, and a non-finite one is seen to be: saturating
    an infinity would hide an overflow from loss scaling.

    Args:
      x: any floating-point array.
      scale: float32, broadcast against `x`. 0 is the scale of zeros: all finite values become 0.
      format: of the result.

    Returns:
      Eight-bit values, shaped like `x`.

    Example:
      >>> cast(jnp.array([1.0, 1000.0]), jnp.float32(1), "e4m3").astype(jnp.float32).tolist()
      [1.0, 448.0]
    """
    # No selections: a constant or a mask in `jnp.where` is an array as large as `x`, which XLA
    # shares between casts, or JAX moves out of a scan over layers: written, and read each time.
    x = x.astype(jnp.float32)
    inverse = jnp.where(scale == 0, 0.0, 1 / scale)
    edge = largest(format)
    return (jax.lax.clamp(-edge, x * inverse, edge) + x * 0).astype(FORMATS[format])  # inf: NaN


def sqnr(reference: Float[Array, "..."], x: Float[Array, "..."]) -> Float[Array, ""]:
    """Signal to quantisation noise, in dB: 20 log10(|reference| / |reference - x|).

    Args:
      reference: what `x` should be.
      x: of the same shape.

    Returns:
      float32; infinite if both are equal.

    Example:
      >>> round(float(sqnr(jnp.array([100.0]), jnp.array([99.0]))))
      40
    """
    reference, x = reference.astype(jnp.float32), x.astype(jnp.float32)
    top = amax(reference)  # squares of tiny values would be zero
    norm = lambda v: jnp.linalg.norm((v / jnp.where(top == 0, 1.0, top)).ravel())
    return 20 * jnp.log10(norm(reference) / norm(reference - x))
