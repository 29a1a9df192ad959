"""FP8 matmuls that are summed in float32: with scales for blocks of the operands, or with one.

Hopper's tensor cores add FP8 products in an accumulator of some 14 bits. So the product of each
128 of K is made apart, multiplied by the scales of its blocks and added in float32 registers
(arXiv:2412.19437, section 3.3). XLA has no matmul with scales of blocks for Hopper: its plain
form here is a loop that reads and writes the float32 sum once for each 128 of K.

8-bit wgmma takes no transposed operand: both are K-major, [M, K] and [N, K]. It pays for large
matmuls; the kernel (`fp8_matmul_kernel`) computes whole tiles of 256 x 128.

Shape suffixes: M, N rows and columns of the product, K contracted; k = K / 128 and n = N / 128,
rounded up.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import dispatch, manual_axes
from pallas_kernels import fp8_matmul_kernel as mosaic
from pallas_kernels.fp8_matmul_kernel import BLOCK, BLOCKS, TENSOR, TILES, pad, traffic

__all__ = [
    "BLOCK",
    "block_scaled_matmul",
    "block_scaled_matmul_reference",
    "cases",
    "scaled_matmul",
    "scaled_matmul_reference",
    "traffic",
]

Implementation = Literal["mosaic_gpu", "xla"] | None
E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
OUTPUTS = ("float32", "bfloat16", "float16")


def block_scaled_matmul_reference(
    a: Float[Array, "M K"],
    a_scale: Float[Array, "M k"],
    b: Float[Array, "N K"],
    b_scale: Float[Array, "_ k"],
) -> Float[Array, "M N"]:
    """The operands made float32, each value by its scale, and multiplied."""
    K, N = a.shape[1], b.shape[0]
    if b_scale.shape[0] != N:
        b_scale = jnp.repeat(b_scale, BLOCK, axis=0)[:N]
    wide = lambda x, scale: x.astype(jnp.float32) * jnp.repeat(scale, BLOCK, axis=1)[:, :K]
    return jnp.matmul(wide(a, a_scale), wide(b, b_scale).T, precision="highest")


def scaled_matmul_reference(
    a: Float[Array, "M K"], b: Float[Array, "N K"], scale: Float[Array, ""]
) -> Float[Array, "M N"]:
    """The operands made float32 and multiplied, then scaled."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.matmul(a, b.T, precision="highest") * scale


def block_scaled_matmul(
    a: Float[Array, "M K"],
    a_scale: Float[Array, "_ _"],  # checked below: a mistake there says what would be legal
    b: Float[Array, "N K"],
    b_scale: Float[Array, "_ _"],
    *,
    out_dtype: Any = jnp.float32,
    implementation: Implementation = None,
) -> Float[Array, "M N"]:
    """`a @ b.T` of FP8 values with a scale for each 128 of a row, or block of 128 x 128.

    The sum over blocks of K of `(a_block @ b_block.T) * a_scale * b_scale`: each product made by
    the tensor cores, scaled and added in float32.

    **Exactness**: float32 rounding of scaling and adding; within a block, what the tensor cores'
    accumulator costs. A narrower result is rounded once.

    Memory: the result. XLA's form holds it in float32; the kernel pads M to a multiple of 256,
    N and K to 128, which takes a copy where they are none.

    Args:
      a: float8_e4m3fn.
      a_scale: float32, k = K / 128 rounded up.
      b: float8_e4m3fn.
      b_scale: float32, [n, k] of blocks of 128 x 128 (n = N / 128 rounded up), or [N, k].
      out_dtype: float32, bfloat16 or float16.
      implementation: "mosaic_gpu" (Hopper) or "xla"; None: the kernel in a program for one
        Hopper GPU, or under `jax.shard_map` over all axes, and XLA elsewhere.

    Returns:
      The product. It has no gradient: `jaxaccel.fp8` gives a matmul that has one.

    Raises:
      ValueError: shapes or dtypes that do not fit.
      NotImplementedError: "mosaic_gpu" where it cannot be served.

    Example:
      >>> ones, one = jnp.ones((2, 128), jnp.float8_e4m3fn), jnp.ones((1, 1))
      >>> block_scaled_matmul(ones, jnp.array([[0.5], [2.0]]), ones, one).tolist()
      [[64.0, 64.0], [256.0, 256.0]]

    References:
      arXiv:2412.19437, section 3.3.
    """
    _check(a, b, out_dtype, (E4M3,))
    (M, K), N = a.shape, b.shape[0]
    k, n = -(-K // BLOCK), -(-N // BLOCK)
    one, other = (f"{x.dtype}{list(x.shape)}" for x in (a_scale, b_scale))
    rows, blocks, tiles = (f"float32{[size, k]}" for size in (M, n, N))
    if one != rows or other not in (blocks, tiles):
        raise ValueError(
            f"scales are {one} and {other}; of {list(a.shape)} and {list(b.shape)} they are "
            f"{rows} and {blocks} (blocks) or {tiles} (tiles)"
        )
    kernel = partial(mosaic.matmul, TILES if other == tiles else BLOCKS, out_dtype)
    plain = partial(_block_scaled, out_dtype)
    return _choose(implementation, kernel, plain, a, b, a_scale, b_scale)


def scaled_matmul(
    a: Float[Array, "M K"],
    b: Float[Array, "N K"],
    scale: Float[Array, ""],
    *,
    out_dtype: Any = jnp.float32,
    implementation: Implementation = None,
) -> Float[Array, "M N"]:
    """`(a @ b.T) * scale` of FP8 values: what cuBLASLt does with a scale for a whole tensor.

    **Exactness**: the kernel adds the products of each 128 of K in float32, as cuBLASLt does
    where fast accumulation is off, which is what XLA's form asks it for. A narrower result is
    rounded once, from the scaled sum.

    Args:
      a, b: float8_e4m3fn or float8_e5m2, each.
      scale: float32, of both operands together.
      out_dtype, implementation: as of `block_scaled_matmul`, and so is the padding.

    Returns:
      The product; it has no gradient.

    Raises:
      ValueError, NotImplementedError: as `block_scaled_matmul`.

    Example:
      >>> ones = jnp.ones((2, 16), jnp.float8_e5m2)
      >>> scaled_matmul(ones, ones, jnp.float32(0.25)).tolist()
      [[4.0, 4.0], [4.0, 4.0]]
    """
    _check(a, b, out_dtype, (E4M3, E5M2))
    if scale.shape or scale.dtype != jnp.float32:
        raise ValueError(f"scale is {scale.dtype}{list(scale.shape)}; legal: one float32, []")

    plain = lambda a, b, scale: (_dot(a, b) * scale).astype(out_dtype)
    return _choose(implementation, partial(mosaic.matmul, TENSOR, out_dtype), plain, a, b, scale)


def cases(M: int = 4096, N: int = 4096, K: int = 4096) -> Iterator[tuple]:
    """For the table of `pallas_kernels.inspect`: one kernel for each kind of scale."""
    k, n = -(-K // BLOCK), -(-N // BLOCK)
    a, b = (jax.ShapeDtypeStruct((rows, K), E4M3) for rows in (M, N))
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    of = {BLOCKS: (f32(M, k), f32(n, k)), TILES: (f32(M, k), f32(N, k)), TENSOR: (f32(),)}
    for kind, scales in of.items():

        def kernel(a, b, *scales, kind=kind):
            return mosaic.matmul(kind, jnp.bfloat16, a, b, *scales)

        def reference(a, b, *scales, kind=kind):
            if kind == TENSOR:
                out = scaled_matmul_reference(a, b, *scales)
            else:
                out = block_scaled_matmul_reference(a, scales[0], b, scales[1])
            return out if a.dtype == jnp.float32 else out.astype(jnp.bfloat16)

        moved = (M + N) * K + 4 * sum(math.prod(x.shape) for x in scales) + 2 * M * N
        yield kind, kernel, reference, (a, b, *scales), 2 * M * N * K, moved


def _check(a: Array, b: Array, out_dtype: Any, legal: tuple) -> None:
    if a.dtype not in legal or b.dtype not in legal or a.shape[1] != b.shape[1]:
        got = f"{a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}"
        raise ValueError(f"got {got}; legal: [M, K] and [N, K] of {' or '.join(map(str, legal))}")
    if jnp.dtype(out_dtype).name not in OUTPUTS:
        raise ValueError(f"out_dtype is {jnp.dtype(out_dtype)}; legal: {', '.join(OUTPUTS)}")


def _choose(implementation: Implementation, kernel, plain, *operands: Array) -> Array:
    unfit = dispatch.unsharded(*operands)
    dispatch.check(implementation, unfit)
    if any(0 in x.shape for x in operands):  # no tile
        return plain(*operands)
    return dispatch.choose(implementation, kernel, plain, *operands, unfit=unfit)


def _block_scaled(out_dtype: Any, a: Array, b: Array, a_scale: Array, b_scale: Array) -> Array:
    """One FP8 matmul for each 128 of K."""
    if b_scale.shape[0] != b.shape[0]:
        b_scale = jnp.repeat(b_scale, BLOCK, axis=0)[: b.shape[0]]
    a, b = pad(a, 1, BLOCK), pad(b, 1, BLOCK)

    def add(i, total):
        cut = lambda x, width: lax.dynamic_slice_in_dim(x, i * width, width, axis=1)
        product = _dot(cut(a, BLOCK), cut(b, BLOCK))
        return total + product * cut(a_scale, 1) * cut(b_scale, 1).T

    zeros = jnp.zeros((a.shape[0], b.shape[0]), jnp.float32)
    total, *_ = manual_axes.vary_alike(zeros, a, a_scale, b, b_scale)
    if a.shape[1]:
        total = lax.fori_loop(0, a.shape[1] // BLOCK, add, total)
    return total.astype(out_dtype)


def _dot(a: Array, b: Array) -> Array:
    """On Hopper `HIGHEST`, and nothing else, makes cuBLASLt promote its sums to float32."""
    return lax.dot_general(
        a,
        b,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
