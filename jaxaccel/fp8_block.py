"""FP8 matmuls with a scale for every 128 values: DeepSeek-V3's recipe.

Activations and gradients are scaled in tiles of 1 x 128 along the contraction, weights in
blocks of 128 x 128, so that an outlier spoils its tile and nothing else. Being finely scaled,
all operands are e4m3. Products of 128 are summed by the tensor cores, then scaled and added in
float32, which also mends the tensor cores' short accumulator (arXiv:2412.19437, section 3.3).

A tile lies along the contraction. The weight gradient contracts over tokens and not over
channels, so activations and gradients are cast twice, both times from the original; of an
activation only the second cast is kept for the backward pass. Square blocks serve both ways.

All operands are K-major, the contracted dim last, as Hopper's 8-bit matmuls want them: the cast
for the weight gradient is transposed, and so are a weight's values for the forward product.

On Hopper the products are kernels (`pallas_kernels.fp8_matmul`). Elsewhere, and in programs that
XLA partitions over several GPUs, they are loops over blocks of 128, each an FP8 matmul, which
read and write the float32 sum every time: right, on any device, and slow.

Shape suffixes: M tokens, K contracted, N columns; k = K / 128 and n = N / 128, rounded up.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxaccel import names, numerics
from jaxaccel.numerics import Quantized
from pallas_kernels import fp8_matmul
from pallas_kernels.fp8_matmul import BLOCK

FORMAT = "e4m3"


def matmul(
    x: Float[Array, "*B M K"],
    w: Float[Array, "*B K N"],
    weight: Quantized | None,
    out_dtype: Any,
    power_of_two: bool = False,
) -> Float[Array, "*B M N"]:
    """`x @ w` with tiles of `x` and blocks of `w` scaled each for itself.

    Args:
      x: activations.
      w: weights.
      weight: `w` from `quantize_blocks`, or None; `w` then only gets the gradient.
      out_dtype: of the result.
      power_of_two: round scales up to powers of two.

    Returns:
      The product, summed in float32.
    """
    static = _Static(power_of_two, w.shape[-1], x.dtype, w.dtype, out_dtype)
    multiply = functools.partial(_matmul, static)
    for _ in range(x.ndim - 2):
        multiply = jax.vmap(multiply)
    return multiply(x, w, weight)


def quantize_blocks(w_KN: Float[Array, "K N"], power_of_two: bool = False) -> Quantized:
    """A weight in blocks of 128 x 128.

    Args:
      w_KN: floating-point.
      power_of_two: round scales up to powers of two.

    Returns:
      Values padded with zeros to multiples of 128, a scale [k, n] for each block.
    """
    w_KN = _pad(_pad(w_KN, 0), 1)
    tiles = w_KN.reshape(w_KN.shape[0] // BLOCK, BLOCK, w_KN.shape[1] // BLOCK, BLOCK)
    amax = numerics.amax(tiles, (1, 3))
    scale = numerics.scale(amax, FORMAT, power_of_two=power_of_two)
    values = numerics.cast(tiles, scale[:, None, :, None], FORMAT)
    return Quantized(values.reshape(w_KN.shape), scale, amax)


def quantize_tiles(x_MK: Float[Array, "M K"], power_of_two: bool = False) -> Quantized:
    """An activation or gradient in tiles of 1 x 128, along the dim to be contracted.

    Args:
      x_MK: floating-point.
      power_of_two: round scales up to powers of two.

    Returns:
      Values padded with zeros to K a multiple of 128, a scale [M, k] for each tile.
    """
    x_MK = _pad(x_MK, 1)
    tiles = x_MK.reshape(x_MK.shape[0], x_MK.shape[1] // BLOCK, BLOCK)
    amax = numerics.amax(tiles, 2)
    scale = numerics.scale(amax, FORMAT, power_of_two=power_of_two)
    values = numerics.cast(tiles, scale[..., None], FORMAT)
    return Quantized(values.reshape(x_MK.shape), scale, amax)


class _Static(NamedTuple):
    power_of_two: bool
    width: int  # N
    x_dtype: Any
    w_dtype: Any
    out_dtype: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(static: _Static, x_MK, w_KN, weight: Quantized | None):
    return _matmul_fwd(static, x_MK, w_KN, weight)[0]


def _matmul_fwd(static: _Static, x_MK, w_KN, weight: Quantized | None):
    weight = quantize_blocks(w_KN, static.power_of_two) if weight is None else weight
    w_NK = Quantized(weight.values.T, weight.scale.T, weight.amax.T)
    out = _contract(quantize_tiles(x_MK, static.power_of_two), w_NK, static.out_dtype)
    return out[:, : static.width], (quantize_tiles(x_MK.T, static.power_of_two), weight)


def _matmul_bwd(static: _Static, residuals, g_MN):
    x_KM, w_KN = residuals
    width = x_KM.values.shape[0]
    dx = _contract(quantize_tiles(g_MN, static.power_of_two), w_KN, static.x_dtype)[:, :width]
    dw = _contract(x_KM, quantize_tiles(g_MN.T, static.power_of_two), static.w_dtype)
    return dx, dw, None


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def _contract(a: Quantized, b: Quantized, out_dtype: Any) -> Float[Array, "M N"]:
    """a [M, K] and b [N, K], with 1 x 128 tiles both, or 128 x 128 blocks of b; summed over K."""
    with jax.named_scope(names.FP8_MATMUL):
        return fp8_matmul.block_scaled_matmul(
            a.values, a.scale, b.values, b.scale, out_dtype=out_dtype
        )


def _pad(x: Array, dim: int) -> Array:
    """With zeros to a multiple of 128."""
    return jnp.pad(x, [(0, -x.shape[d] % BLOCK if d == dim else 0) for d in range(x.ndim)])
