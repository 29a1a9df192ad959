"""8-bit code maps by arithmetic: a code to its value, a value to its nearest code.

A block of numbers is held as `map[code] * scale`, with the scale the block's largest magnitude
and the map 256 numbers of [-1, 1]:

  dynamic           arXiv:2110.02861 section 2.1, arXiv:1511.04561. For i = 0..6 the decade
                    10**(i-6) * [0.1, 1] is cut into 2**i equal cells; codes are their middles,
                    with both signs, and 0 and 1. Small numbers keep some digits.
  dynamic_unsigned  the same with 2**(i+1) cells, without a sign.
  int8              k / 127.
  e4m3              the finite numbers of float8_e4m3fn, over 448.

A table of 256 entries wants a gather, which Mosaic does not have and XLA's CPU back end does
one number at a time. Here both directions are elementwise arithmetic: of a *magnitude index*
`k`, which counts the magnitudes of a map from 0 upwards, the leading bit is the decade and the
rest the cell, `value = (18 k - 16 n + 9) / (20 n 10**(6-i))` with n the leading bit (signed).
Every function is plain `jnp` on whole arrays or on a kernel's registers.

**Exactness.** Values are the formulas above in exact arithmetic, rounded once to float32:
multiplying by a reciprocal in two parts, the first of which has so few digits that its product
is exact, does that, and comes out the same whether or not the compiler fuses multiply and add.
(bitsandbytes adds up the same map step by step in float32: 72 of its signed and 100 of its
unsigned entries are one or two units in the last place away.) `encode` is the argmin of
`|y - map|` in float32; of two equally near codes it takes the lower.
"""

import math
from fractions import Fraction
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt

Map = Literal["dynamic", "dynamic_unsigned", "int8", "e4m3"]
MAPS: tuple[Map, ...] = get_args(Map)

# The code of 0, and the largest magnitude index of positive and of negative numbers.
_ZERO: dict[Map, int] = {"dynamic": 127, "dynamic_unsigned": 0, "int8": 128, "e4m3": 0}
_TOP: dict[Map, int] = {"dynamic": 128, "dynamic_unsigned": 255, "int8": 127, "e4m3": 126}
_TOP_NEGATIVE: dict[Map, int] = _TOP | {"dynamic": 127}  # there is no -1


def _parts(x: Fraction, bits: int) -> tuple[float, float]:
    """Two float32 that sum to `x`; the first has at most `bits` binary digits."""
    unit = Fraction(2) ** (math.frexp(float(x))[1] - bits)
    first = math.floor(x / unit) * unit
    return float(first), float(np.float32(float(x - first)))


# Numerators have at most 12 binary digits (dynamic), 7 (int8) and 4 (e4m3).
_FIFTHS = [_parts(Fraction(1, 5 ** (7 - i)), 12) for i in range(7)]  # by decade
_PER_127, _PER_448 = _parts(Fraction(1, 127), 16), _parts(Fraction(1, 448), 16)


def table(map: Map) -> np.ndarray:
    """The 256 values of a map by code, from its definition in exact arithmetic.

    Args:
      map: one of `MAPS`.

    Returns:
      float32 [256]. NaN for the codes that stand for nothing: 0 of int8, 127 and 255 of e4m3.

    Example:
      >>> table("dynamic")[[0, 127, 128, 255]].tolist()
      [-0.992968738079071, 0.0, 5.499999815583578e-07, 1.0]
    """
    if map == "int8":
        values = [math.nan, *(k / 127 for k in range(-127, 128))]
    elif map == "e4m3":
        values = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float64) / 448
    else:
        cells = [(i, (1 if map == "dynamic" else 2) << i) for i in range(7)]
        positive = [
            float(Fraction(2 * n + 18 * j + 9, 20 * n * 10 ** (6 - i)))
            for i, n in cells
            for j in range(n)
        ]
        negative = [-x for x in reversed(positive)] if map == "dynamic" else []
        values = [*negative, 0.0, *positive, 1.0]
    return np.array(values, np.float32)


# The smallest of each decade, by map.
_FIRSTS: dict[Map, list[float]] = {
    map: [
        float(np.float32(float(Fraction(2 * n + 9, 20 * n * 10 ** (6 - i)))))
        for i, n in enumerate(2 ** (i + shift) for i in range(7))
    ]
    for shift, map in enumerate(("dynamic", "dynamic_unsigned"))
}


def _times(x: Array, parts: tuple[float | Array, float | Array]) -> Array:
    return x * parts[0] + x * parts[1]


def _by_decade(below: list[Array], choices: list[float]) -> Array:
    """The choice of each element's decade; `below[i]`: the element lies below decade i + 1."""
    chosen = jnp.full(below[0].shape, choices[6], jnp.float32)
    for i in range(5, -1, -1):
        chosen = jnp.where(below[i], jnp.float32(choices[i]), chosen)
    return chosen


def _value(k: Int[Array, "*dims"], map: Map) -> Float[Array, "*dims"]:
    """Of a magnitude index; float32."""
    if map == "int8":
        return _times(k.astype(jnp.float32), _PER_127)
    if map == "e4m3":  # three bits of mantissa; below index 8 subnormal
        bits = jax.lax.shift_left(k + (120 << 3), jnp.int32(20))
        normal = jax.lax.bitcast_convert_type(bits, jnp.float32)
        small = k.astype(jnp.float32) * 2.0**-9
        return _times(jnp.where(k < 8, small, normal), _PER_448)
    shift = 0 if map == "dynamic" else 1  # n = 2**(i + shift), k = n - shift + cell
    x = k + shift
    below = [x < (2 << (i + shift)) for i in range(6)]
    real = x.astype(jnp.float32)
    exponent = jax.lax.bitcast_convert_type(real, jnp.int32) & 0x7F800000
    n = jax.lax.bitcast_convert_type(exponent, jnp.float32)
    unit = 2.0 ** -(8 + shift)  # 1 / (20 n 10**(6-i)) = 5**(i-7) * unit
    parts = [_by_decade(below, [p[part] * unit for p in _FIFTHS]) for part in (0, 1)]
    value = _times(18 * real - 16 * n + 9, (parts[0], parts[1]))
    return jnp.where(k == 0, 0.0, jnp.where(k == _TOP[map], 1.0, value))


def _neighbours(a: Float[Array, "*dims"], map: Map) -> tuple[Array, Array, Array]:
    """The magnitude index at or below `a` in [0, 1], its value, and that of the next.

    Where `a` is all but a value the index may be one off; the nearest is among the two still.
    """
    if map in ("dynamic", "dynamic_unsigned"):
        return _dynamic_neighbours(a, map)
    if map == "int8":
        k = (a * 127).astype(jnp.int32)
    else:
        scaled = a * 448
        bits = jax.lax.bitcast_convert_type(scaled, jnp.int32)
        normal = jax.lax.shift_right_logical(bits, jnp.int32(20)) - (120 << 3)
        k = jnp.where(scaled < 2.0**-6, (scaled * 2.0**9).astype(jnp.int32), normal)
    k = jnp.clip(k, 0, _TOP[map] - 1)
    return k, _value(k, map), _value(k + 1, map)


def _dynamic_neighbours(a, map):
    """Both values are of the lower one's decade, in multiples of its 1 / (20 n 10**(6-i))."""
    shift = 0 if map == "dynamic" else 1
    cells = [2.0 ** (i + shift) for i in range(7)]  # n; x = k + shift is n to 2 n - 1
    first = _FIRSTS[map]  # of each decade
    below = [a < first[i + 1] for i in range(6)]
    n = _by_decade(below, cells)
    slope = _by_decade(below, [c * 10.0 ** (6 - i) / 0.9 for i, c in enumerate(cells)])
    unit = 2.0 ** -(8 + shift)
    parts = [_by_decade(below, [p[part] * unit for p in _FIFTHS]) for part in (0, 1)]
    last, zero = 2 * n - 1, a < first[0]
    x = (a * slope + (n * (8 / 9) - 0.5)).astype(jnp.int32).astype(jnp.float32)
    x = jnp.where(zero, n - 1, jnp.maximum(jnp.minimum(x, last), n))
    low = 18 * x - 16 * n + 9
    # After a decade's last comes the next one's first, three cells up; or, half a cell up, 1.
    beyond = jnp.where(below[5], 54.0, 9.0)
    high = low + jnp.where(x == last, beyond, 18.0)
    values = [_times(numerator, (parts[0], parts[1])) for numerator in (low, high)]
    return x.astype(jnp.int32) - shift, jnp.where(zero, 0.0, values[0]), values[1]


def decode(code: Int[Array, "*dims"] | UInt[Array, "*dims"], map: Map) -> Float[Array, "*dims"]:
    """`table(map)[code]`, bit for bit, by arithmetic.

    Args:
      code: 0 to 255, any integer type.
      map: one of `MAPS`.

    Returns:
      float32; a finite number for codes that stand for nothing.

    Example:
      >>> decode(jnp.array([0, 127, 255]), "dynamic").tolist()
      [-0.992968738079071, 0.0, 1.0]
    """
    code = code.astype(jnp.int32)
    if map == "dynamic_unsigned":
        return _value(code, map)
    if map == "e4m3":
        value, negative = _value(code & 127, map), code > 127
    else:
        signed = code - _ZERO[map]
        value, negative = _value(jnp.abs(signed), map), signed < 0
    return jnp.where(negative, -value, value)


def encode(
    y: Float[Array, "*dims"],
    map: Map,
    noise: Float[Array, "*dims"] | None = None,
    *,
    geometric: bool = False,
) -> Int[Array, "*dims"]:
    """The code of the value nearest to `y`, or of one of its two neighbours at random.

    Args:
      y: float32; magnitudes above 1, and negative numbers of an unsigned map, are clipped.
      map: one of `MAPS`.
      noise: float32 in [0, 1), shaped like `y`: the upper neighbour is taken where the noise
        lies below `(|y| - lower) / (upper - lower)`, so that uniform noise makes the decoded
        value's mean `y`. None: nearest, the lower code of two equally near ones.
      geometric: with noise, the odds of the upper neighbour are larger by upper / lower. Beside
        a code, where a moving average lies after a step, that keeps the mean of the logarithm
        instead (between codes far apart it is above, by 0.15 at most); only 0 becomes 0.

    Returns:
      int32, 0 to 255.

    Example:
      >>> encode(jnp.array([-2.0, 0.0, 1e-8, 0.5]), "dynamic").tolist()
      [0, 127, 127, 219]
    """
    signed = map != "dynamic_unsigned"
    a = jnp.minimum(jnp.abs(y) if signed else jnp.maximum(y, 0.0), 1.0)
    k, low, high = _neighbours(a, map)
    to_low, to_high = a - low, high - a
    if noise is not None and geometric:
        up = to_low * high * (1 - noise) > to_high * low * noise
    elif noise is not None:
        up = to_low > noise * (high - low)
    elif signed and map != "e4m3":  # the lower code of a negative number is the larger magnitude
        up = (to_high < to_low) | ((to_high == to_low) & (y < 0))
    else:
        up = to_high < to_low
    k = jnp.where(up, k + 1, k)
    if not signed:
        return k
    if map == "e4m3":
        return jnp.where((y < 0) & (k > 0), k + 128, k)
    return _ZERO[map] + jnp.where(y < 0, -jnp.minimum(k, _TOP_NEGATIVE[map]), k)


def mix(x: UInt[Array, "*dims"]) -> UInt[Array, "*dims"]:
    """Scrambles 32 bits so that each depends on all (the last step of MurmurHash3).

    Args:
      x: uint32.

    Returns:
      uint32; unlike for unlike `x`.
    """
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))


def noise(seed: UInt[Array, ""], position: UInt[Array, "*dims"]) -> Float[Array, "*dims"]:
    """Uniform numbers in [0, 1) that depend on a seed and a position, and on nothing else.

    Keyed by the position in the whole array, they are the same however the array is sharded
    or tiled. Not for cryptography, nor for a Monte Carlo estimate.

    Args:
      seed: uint32, itself well mixed: of the step and the array.
      position: uint32, of each element in its array.

    Returns:
      float32 multiples of 2**-24.

    Example:
      >>> bool((noise(jnp.uint32(1), jnp.arange(4, dtype=jnp.uint32)) < 1).all())
      True
    """
    bits = mix(position ^ seed) >> jnp.uint32(8)
    return bits.astype(jnp.int32).astype(jnp.float32) * 2.0**-24
