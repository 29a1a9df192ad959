"""Linear cross-entropy's kernels one at a time, for the table of `pallas_kernels.inspect`.

Also what they move, as formulas. A tile of 128 x 256 has 85 FLOP for each byte that it loads;
the L2 cache serves that. Memory's share is less by what blocks that run at once have in common,
and they are numbered so that they have much: at 16,384 tokens 132 of them take some 20 tiles of
tokens against all words of a slice. Could be better: neighbours in a cluster might load words
once for both (TMA multicast), which JAX's interpreter cannot simulate.

Legend: N tokens, D width, V words.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.cross_entropy import kernels, mosaic, xla
from pallas_kernels.cross_entropy.api import token_cross_entropy_reference
from pallas_kernels.cross_entropy.xla import Options

_PLAIN = Options(z_loss=0.0, soft_cap=None, label_smoothing=0.0, chunk=1)
_OPTIONS = {"": _PLAIN, "cap, smoothing": Options(0.0, 30.0, 0.1, 1)}


class Traffic(NamedTuple):
    """Bytes, of all slices of the vocabulary together."""

    loads: int  # by TMA into shared memory
    stores: int  # by TMA out of it
    fetched: int  # of the loads what comes from memory, if blocks that run at once share it


def traffic(
    N: int,
    D: int,
    V: int,
    *,
    backward: bool = False,
    smoothing: bool = False,
    tiles: kernels.Tiles | None = None,
    cores: int = 132,
) -> Traffic:
    """What a pass moves, from its grid and blocks, at 16 bits an element.

    Args:
      N, D, V: sizes; padded as the kernels do.
      backward: the kernel of the backward pass, without the matmuls that XLA makes.
      smoothing: forward with label smoothing.
      tiles: as of `mosaic.forward` and `mosaic.backward`.
      cores: blocks that run at once.

    Returns:
      Bytes. The vectors over tokens that the backward pass reads, past TMA, are left out.
    """
    tiles = tiles or (mosaic.BACKWARD if backward else mosaic.FORWARD)
    tokens, width = mosaic.padded(N, kernels.TOKENS), mosaic.padded(D, kernels.INNER)
    slices, size = tiles.slices(max(tokens, width) if backward else width, V)
    shape = kernels.Shape(_PLAIN, tiles, tokens, size, width, V)
    blocks = tokens // kernels.TOKENS * shape.splits
    loads = blocks * shape.count * (kernels.TOKENS + tiles.words) * width * 2
    stores = tokens * size * 2 if backward else tokens * shape.splits * 4 * (1 + smoothing)
    fetched = 0
    for first in range(0, blocks, cores):
        last = min(first + cores, blocks) - 1
        token_tiles = last // shape.splits - first // shape.splits + 1
        words = min(shape.splits, last - first + 1) * shape.count * tiles.words
        fetched += (token_tiles * kernels.TOKENS + words) * width * 2
    return Traffic(slices * loads, slices * stores, slices * fetched)


def forward_cases(N: int = 16384, D: int = 2048, V: int = 128256) -> Iterator[tuple]:
    """The forward pass: log-sum-exp and logits of the labels."""
    for label, options in _OPTIONS.items():

        def kernel(hidden, head, labels, options=options):
            terms = mosaic.forward(options, hidden[None], head, labels[None, :, None])
            return terms.lse[0], terms.target[0, :, 0]

        def reference(hidden, head, labels, options=options):
            losses = token_cross_entropy_reference(hidden, head, labels, soft_cap=options.soft_cap)
            return losses.lse, losses.lse - losses.nll

        args = [*_matrices(N, D, V), jax.ShapeDtypeStruct((N,), jnp.int32)]
        yield label, kernel, reference, args, 2 * N * D * V, 2 * (N + V) * D + 8 * N


def backward_cases(N: int = 16384, D: int = 2048, W: int = 3584) -> Iterator[tuple]:
    """The kernel of the backward pass, for a slice of W words: the gradient of its logits."""
    units = kernels.TOKENS, kernels.INNER, mosaic.BACKWARD.words
    if any(size % unit for size, unit in zip((N, D, W), units, strict=True)):
        raise ValueError(f"N={N}, D={D}, W={W} must be multiples of {units}; others are padded")
    for label, options in _OPTIONS.items():

        def kernel(x, words, lse2, d_lse, d_mean=None, options=options):
            return kernels.d_logits(options, mosaic.BACKWARD, W, x, words, lse2, d_lse, d_mean)

        def reference(x, words, lse2, d_lse, d_mean=None, options=options):
            raw = (x @ words.T).astype(jnp.float32)
            logits = xla.capped(options, raw)
            lse2, d_lse = lse2[:, None], d_lse[:, None]
            d = jnp.exp(logits - lse2.astype(jnp.float32) / kernels.LOG2_E) * d_lse
            if d_mean is not None:
                d += d_mean[:, None]
            slope = jnp.ones_like(d)
            if options.soft_cap is not None:
                slope = 1 - jnp.tanh(raw / options.soft_cap) ** 2
            return (d * slope).astype(x.dtype)

        vectors = [jax.ShapeDtypeStruct((N,), jnp.float32)] * (3 if options.label_smoothing else 2)
        args = [*_matrices(N, D, W), *vectors]
        yield label, kernel, reference, args, 2 * N * D * W, 2 * ((N + W) * D + N * W)


def _matrices(N: int, D: int, V: int) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((n, D), jnp.bfloat16) for n in (N, V)]
