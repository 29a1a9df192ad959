"""Arrays as 8-bit codes with a float32 scale for each block, for optimizer state.

A block of `block` neighbours is held as `map[code] * scale`, the scale being the block's largest
magnitude: one outlier costs its own block some digits and no other. The maps and their
arithmetic are `pallas_kernels.codes`; here are the blocks.

Blocks lie along the last dimension where they divide it, with scales `[*dims[:-1], blocks]`:
codes and scales can then be sharded as the array itself. Else they lie in the flattened
(row-major) array, the last one partial, with scales `[blocks]`; where both apply, codes and
scales are the same.

Error: at most 0.00703 (`dynamic`), 0.00352 (`dynamic_unsigned`), 0.00394 (`int8`) or 0.0358
(`e4m3`) of the block's largest magnitude; of a small number in `dynamic` at most 6 % within the
block's upper decade, 11 %, 18 %, 28 %, 47 % in those below it. Memory: 1 + 4 / block bytes an
element.

A scale may be *signed*: the value of the element of largest magnitude instead of that magnitude.
Dynamic codes have +1 but no -1, so a block whose extreme is negative would shrink each time it is
quantised; with the extreme always at +1, extremes are exact and quantising again changes nothing.
"""

import dataclasses
import math
from typing import Any, Literal, get_args, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from pallas_kernels import codes, dispatch
from pallas_kernels.codes import Map

Rounding = Literal["nearest", "stochastic", "geometric"]

# Below it a scale, or its inverse, is subnormal, which GPUs may flush to zero.
LEAST_SCALE = 2.0**-126


@jax.tree_util.register_dataclass
@no_type_check  # JAX rebuilds it around shapes and shardings too
@dataclasses.dataclass(frozen=True)
class BlockQuantized:
    """An array as codes and scales, from `quantize_blockwise`.

    (`numerics.Quantized` is another thing: FP8 values of a matmul's operand.)
    """

    codes: UInt8[Array, "*dims"]
    scale: Float[Array, "..."]  # float32 [*dims[:-1], blocks] or [blocks]
    block: int = dataclasses.field(metadata={"static": True})  # elements of a block
    code: Map = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})  # of the array
    signed: bool = dataclasses.field(default=False, metadata={"static": True})  # the scales

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        return self.codes.shape

    def __repr__(self) -> str:
        shape = ",".join(map(str, getattr(self.codes, "shape", "?")))
        return f"BlockQuantized({self.dtype}[{shape}], {self.code}, block {self.block})"


def check_block(block: int) -> None:
    """Refuses a block size that is not a positive multiple of 32.

    Args:
      block: elements of a block.

    Returns:
      Nothing.

    Raises:
      ValueError: says which sizes are legal.
    """
    if isinstance(block, bool) or not isinstance(block, int) or block < 32 or block % 32:
        raise ValueError(f"block is {block!r}; legal are positive multiples of 32, say 256")


def in_blocks(x: Array, block: int) -> Array:
    """`x` cut into blocks, [..., blocks, block]; a partial one is filled up with zeros.

    Args:
      x: any array.
      block: elements of a block.

    Returns:
      [*dims[:-1], blocks, block] if the block divides the last dimension, else [blocks, block].

    Example:
      >>> in_blocks(jnp.ones((2, 64)), 32).shape, in_blocks(jnp.ones((3, 50)), 32).shape
      ((2, 2, 32), (5, 32))
    """
    if x.ndim and x.shape[-1] % block == 0:
        return x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
    dispatch.refuse_explicit(f"{x.dtype}{list(x.shape)} in blocks that run from row to row", x)
    flat = x.reshape(-1)
    return jnp.pad(flat, (0, -flat.size % block)).reshape(-1, block)


def from_blocks(blocks: Array, shape: tuple[int, ...]) -> Array:
    """Undoes `in_blocks`.

    Args:
      blocks: from `in_blocks`, or of that shape.
      shape: of the array.

    Returns:
      The array, without what filled its last block.
    """
    size = math.prod(shape)
    if blocks.size != size:
        blocks = blocks.reshape(-1)[:size]
    return blocks.reshape(shape)


def zeros_like(x: Array, block: int, code: Map, *, signed: bool = False) -> BlockQuantized:
    """What `quantize_blockwise` makes of float32 zeros shaped like `x`, without computing it.

    Args:
      x: any array; its type does not matter.
      block: elements of a block.
      code: the map.
      signed: whether scales are to carry signs.

    Returns:
      Codes and scales of 0.
    """
    scale = jax.eval_shape(lambda: in_blocks(jnp.zeros(x.shape), block)).shape[:-1]
    codes = jnp.zeros_like(x, dtype=jnp.uint8)
    return BlockQuantized(codes, jnp.zeros(scale), block, code, jnp.dtype(jnp.float32), signed)


def positions(shape: tuple[int, ...]) -> Array:
    """The row-major position of each element, uint32 (modulo 2**32).

    Made of `iota`s, so that a sharded program computes each shard's own.

    Args:
      shape: of the array.

    Returns:
      uint32 of that shape.
    """
    total, stride = jnp.zeros(shape, jnp.uint32), 1
    for dim in reversed(range(len(shape))):
        iota = jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
        total = total + iota * jnp.uint32(stride % 2**32)
        stride *= shape[dim]
    return total


def quantize_blockwise(
    x: Float[Array, "*dims"],
    block: int = 256,
    code: Map = "dynamic",
    *,
    signed: bool = False,
    rounding: Rounding = "nearest",
    seed: Array | None = None,
) -> BlockQuantized:
    """An array as 8-bit codes and a float32 scale a block.

    **Exactness**: approximate; the bounds stand at the head of this module. Codes are nearest
    (`codes.encode`), those of a block of zeros are 0. A block with a non-finite element decodes
    to non-finite ones; one whose largest magnitude is below 2**-126 to zeros.

    Args:
      x: any floating-point array, of any shape.
      block: elements of a block, a positive multiple of 32.
      code: the map.
      signed: scales carry the sign of the block's extreme.
      rounding: nearest; stochastic, to a neighbour at random so that the mean is `x`; or
        geometric, so that next to a code the mean logarithm is, and nothing but 0 becomes 0.
      seed: uint32 scalar for the latter two. Noise is keyed by it and by the position in `x`.

    Returns:
      `BlockQuantized`.

    Raises:
      ValueError: an illegal block, an unknown map or rounding, a seed missing or of no use.
      TypeError: `x` is not of a real floating-point type.

    Example:
      >>> q = quantize_blockwise(jnp.array([0.5, -2.0, 0.0]), signed=True)
      >>> q, q.scale.tolist(), dequantize_blockwise(q)[1].item()
      (BlockQuantized(float32[3], dynamic, block 256), [-2.0], -2.0)
    """
    check_block(block)
    if code not in codes.MAPS:
        raise ValueError(f"unknown code map {code!r}; known: {', '.join(codes.MAPS)}")
    if rounding not in get_args(Rounding):
        raise ValueError(f"unknown rounding {rounding!r}; known: {', '.join(get_args(Rounding))}")
    if (seed is None) != (rounding == "nearest"):
        raise ValueError(f"rounding {rounding!r} with seed {seed}: all but 'nearest' take a seed")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x is {x.dtype}; block-wise codes are of floating-point arrays")
    values = in_blocks(x.astype(jnp.float32), block)
    if signed:
        top, bottom = jnp.max(values, axis=-1), jnp.min(values, axis=-1)
        scale = jnp.where(top >= -bottom, top, bottom)
    else:
        scale = jnp.max(jnp.abs(values), axis=-1)
    scale = jnp.where(jnp.abs(scale) < LEAST_SCALE, 0.0, scale)
    noise = None
    if seed is not None:
        noise = in_blocks(codes.noise(seed, positions(x.shape)), block)
    empty = scale == 0
    inverse = jnp.where(empty, 0.0, 1 / jnp.where(empty, 1.0, scale))
    normed = values * inverse[..., None]
    found = codes.encode(normed, code, noise, geometric=rounding == "geometric")
    found = jnp.where(empty[..., None], 0, found).astype(jnp.uint8)
    found = from_blocks(found, x.shape)
    return BlockQuantized(found, scale, block, code, jnp.dtype(x.dtype), signed)


def dequantize_blockwise(quantized: BlockQuantized) -> Float[Array, "*dims"]:
    """The array that codes and scales stand for, in its own type.

    Args:
      quantized: from `quantize_blockwise`.

    Returns:
      Of `quantized.shape` and `quantized.dtype`.

    Example:
      >>> dequantize_blockwise(quantize_blockwise(jnp.array([4.0, 0.0]))).tolist()
      [4.0, 0.0]
    """
    q = quantized
    values = codes.decode(in_blocks(q.codes, q.block), q.code) * q.scale[..., None]
    return from_blocks(values, q.shape).astype(q.dtype)
