"""The arithmetic of a step of 8-bit Adam, and the step in XLA; see `adam_8bit`.

The functions here serve arrays and a kernel's registers alike. The two differ in how a block's
largest element is found (`over`) and a number a block put beside its elements (`spread`).
"""

import math
from functools import partial
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt, UInt8

from pallas_kernels import codes, dispatch

Mode = Literal["stable", "bitsandbytes"]

ZERO = 127  # the code of 0 in `dynamic`; in `dynamic_unsigned` it is 0
# Below it a scale, or its inverse, is subnormal, which GPUs may flush to zero.
LEAST_SCALE = 2.0**-126


class Coded(NamedTuple):
    """A moment: `map[codes] * scale`, in blocks of the last dimension or of the flat array."""

    codes: UInt8[Array, "*dims"]
    scale: Float[Array, "..."]  # float32, [*dims[:-1], blocks] or [blocks]


class Scalars(NamedTuple):
    """What one step shares over all elements of a parameter; floats or float32 scalars."""

    b1: Any
    b2: Any
    eps: Any
    eps_root: Any
    correction1: Any  # 1 - b1**t
    correction2: Any
    seed: UInt[Array, ""]  # uint32, of this step and parameter
    zero: UInt[Array, ""]  # uint32, 0: see `product`


class Decay(NamedTuple):
    """What makes a new parameter of a direction; floats or float32 scalars."""

    learning_rate: Any
    weight_decay: Any


class Numbers(NamedTuple):
    """Float32 scalars; references to them in the kernel."""

    b1: Any
    rest1: Any  # 1 - b1
    b2: Any
    rest2: Any
    eps: Any
    eps_root: Any
    inverse1: Any  # of the corrections
    inverse2: Any
    learning_rate: Any
    decay: Any


def numbers_of(s: Scalars, decay: Decay | None) -> Float[Array, " n"]:
    """`Numbers` as an array; `1 - b1` is taken in the precision in which b1 comes."""
    rate, weight = (0.0, 0.0) if decay is None else decay
    corrections = 1 / jnp.asarray(s.correction1), 1 / jnp.asarray(s.correction2)
    numbers = Numbers(s.b1, 1 - s.b1, s.b2, 1 - s.b2, s.eps, s.eps_root, *corrections, rate, weight)
    return jnp.stack([jnp.asarray(x, jnp.float32) for x in numbers])


def bits_of(s: Scalars) -> UInt[Array, " 2"]:
    """Seed and zero as an array."""
    return jnp.stack([s.seed, s.zero])


def product(a: Array, b: Any, zero: UInt[Array, ""]) -> Array:
    """`a * b`, rounded, in whatever sum it stands.

    A compiler may fuse a multiplication into an addition, and does so in one program and not in
    the next: a moment would differ in its last bit, and its code now and then. A zero that it
    does not know to be one, combined with the bits of the product, is in its way.

    Args:
      a, b: float32.
      zero: uint32, not a constant.

    Returns:
      float32.
    """
    bits = lax.bitcast_convert_type(a * b, jnp.uint32)
    return lax.bitcast_convert_type(bits ^ zero, jnp.float32)


def new_moments(g, first, second, n, zero, mode):
    """Both after a gradient, float32."""
    if mode == "stable":
        first = jnp.where(second == 0, 0.0, first)
    mean = lambda old, keep, new, rest: product(old, keep, zero) + product(new, rest, zero)
    return mean(first, n.b1, g, n.rest1), mean(second, n.b2, g * g, n.rest2)


def result(p, first, second, n, zero, mode):
    """The direction, or the new parameter."""
    root = jnp.sqrt(second * n.inverse2 + n.eps_root)
    direction = first * n.inverse1 / (root + n.eps)
    if p is None:
        return direction
    if mode == "stable":
        return p - product(direction + product(p, n.decay, zero), n.learning_rate, zero)
    left = 1 - product(n.learning_rate, n.decay, zero)
    return (p - product(direction, n.learning_rate, zero)) * left


def coded(x, map, mode, noise, over, spread):
    """Codes (int32) and scales.

    Args:
      x: moment, float32.
      map: of the codes.
      mode: how it is rounded.
      noise: a function of no arguments.
      over: (maximum or minimum, x) -> that of each block.
      spread: a number a block -> one an element.
    """
    second = map == "dynamic_unsigned"
    if mode == "stable" and not second:
        top, bottom = over(jnp.max, x), over(jnp.min, x)
        scale = jnp.where(top >= -bottom, top, bottom)
    else:
        scale = over(jnp.max, x if second else jnp.abs(x))
    scale = jnp.where(jnp.abs(scale) < LEAST_SCALE, 0.0, scale)
    inverse = jnp.where(scale == 0, 0.0, 1 / jnp.where(scale == 0, 1.0, scale))
    inverse = spread(inverse)
    at_random = mode == "stable" and second
    noise = noise() if at_random else None
    found = codes.encode(x * inverse, map, noise, geometric=at_random)
    found = jnp.where(inverse == 0, 0, found)
    if at_random:  # never 0 from above, also where a product in `encode` underflows
        found = jnp.where(x > 0, jnp.maximum(found, 1), found)
    return found, scale


def plain(
    block: int,
    mode: Mode,
    p: Float[Array, "*dims"] | None,
    g: Float[Array, "*dims"],
    m: Coded,
    v: Coded,
    numbers: Float[Array, " n"],
    bits: UInt[Array, " 2"],
) -> tuple[Float[Array, "*dims"], Coded, Coded]:
    """`kernel` in XLA. Sharded parameters stay so: blocks are cut from the last dimension."""
    n = Numbers(*numbers)
    spread = lambda scale: scale[..., None]
    over = lambda f, x: f(x, axis=-1)
    first = codes.decode(_blocks(m.codes, block, ZERO), "dynamic") * spread(m.scale)
    second = codes.decode(_blocks(v.codes, block), "dynamic_unsigned") * spread(v.scale)
    gradient = _blocks(g.astype(jnp.float32), block)
    first, second = new_moments(gradient, first, second, n, bits[1], mode)
    value = None if p is None else _blocks(p.astype(jnp.float32), block)
    out = result(value, first, second, n, bits[1], mode)
    noise = lambda: codes.noise(bits[0], _positions(out.shape))
    moments = [
        coded(x, map, mode, noise, over, spread)
        for x, map in ((first, "dynamic"), (second, "dynamic_unsigned"))
    ]
    back = partial(whole, shape=g.shape)
    m, v = (Coded(back(x.astype(jnp.uint8)), scale) for x, scale in moments)
    return back(out.astype(g.dtype if p is None else p.dtype)), m, v


def _blocks(x: Array, block: int, fill: int = 0) -> Array:
    """[*dims] -> [*dims[:-1], blocks, block]; [blocks, block] where no block fits in a row."""
    if x.ndim and x.shape[-1] % block == 0:
        return x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
    return filled(x, block, fill).reshape(-1, block)


def filled(x: Array, multiple: int, fill: int) -> Array:
    """[*dims] -> [L], L a multiple; the last elements are `fill`."""
    dispatch.refuse_explicit(f"{x.dtype}{list(x.shape)} in blocks that run from row to row", x)
    flat = x.reshape(-1)
    missing = -flat.size % multiple
    if missing:
        flat = jnp.pad(flat, (0, missing), constant_values=jnp.asarray(fill, x.dtype))
    return flat


def whole(x: Array, shape: tuple[int, ...]) -> Array:
    """The first elements of an array in blocks, in its own shape."""
    size = math.prod(shape)
    return (x if x.size == size else x.reshape(-1)[:size]).reshape(shape)


def _positions(shape: tuple[int, ...]) -> UInt[Array, "..."]:
    """Row-major, modulo 2**32, without flattening a sharded array."""
    total, stride = jnp.zeros(shape, jnp.uint32), 1
    for dim in reversed(range(len(shape))):
        index = lax.broadcasted_iota(jnp.uint32, shape, dim)
        total, stride = total + index * jnp.uint32(stride % 2**32), stride * shape[dim]
    return total
