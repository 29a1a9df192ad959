"""The kernels of linear cross-entropy on Hopper; `mosaic.py` says what they are for.

Both make the logits of a tile, 128 tokens by 256 words, as a matmul does: one warpgroup brings
hidden states and words through TMA into a ring of shared memory, two multiply, with 64 tokens
each. What they do with a tile is different:

  forward   joins it to each token's running log-sum-exp, in registers, tile after tile; a
            number for each token and block is all that is written
  backward  makes the gradient of the logits of it, and writes that in 16 bits

Legend: N tokens, D width, W words of a slice, S blocks along it.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import backend
from pallas_kernels.cross_entropy.xla import Options

CONSUMERS = 2  # warpgroups that multiply; one more loads
ROWS = 64  # tokens of one, M of wgmma
TOKENS = CONSUMERS * ROWS  # of a tile
INNER = 64  # of D in a buffer: a row of the 128-byte swizzle
# In words, of 8 D FLOP a token; adding a slice's gradient of hidden moves 8 D bytes a token.
SLICE_COST = 160
LOG2_E = math.log2(math.e)
ROW = plgpu.Layout.WGMMA.reduce(1)
LAYOUT = plgpu.TilingTransform((8, INNER)), plgpu.SwizzleTransform(128)


@dataclass(frozen=True)
class Tiles:
    """How a kernel is cut.

    Attributes:
      words: of a tile.
      stages: buffers in the ring.
      slice_bytes: of what is held of a slice of the vocabulary, at most,
      slice_words: unless a slice would have fewer words than these.
      blocks: of a launch, at least, so that the last to run do not leave many of 132 cores idle.
    """

    words: int
    stages: int
    slice_bytes: int
    slice_words: int = 2048
    blocks: int = 512

    def slices(self, held: int, words: int) -> tuple[int, int]:
        """How many slices of a vocabulary, and the words of each.

        Slices cost what they hold beyond the vocabulary, and each about `SLICE_COST` words.

        Args:
          held: elements of a slice for each word: D, of a copy of the word in 16 bits; for the
            backward pass also N, of the gradient of its logits, if that is more.
          words: of the vocabulary.
        """
        limit = max(self.slice_bytes // (2 * held), self.slice_words) // self.words
        least = -(-words // (limit * self.words))
        counts = range(least, 2 * least + 2)
        sizes = [(n, -(-words // (n * self.words)) * self.words) for n in counts]
        fitting = [(n, size) for n, size in sizes if size <= words]
        cost = lambda slices: slices[0] * (slices[1] + SLICE_COST)
        return min(fitting, key=cost, default=(1, self.words))


@dataclass(frozen=True)
class Shape:
    """What a kernel knows while it is traced, and what the two have in common."""

    options: Options
    tiles: Tiles
    tokens: int
    size: int  # words of a slice
    width: int
    vocabulary: int

    @classmethod
    def of(cls, options: Options, tiles: Tiles, vocabulary: int, x: Array, words: Array) -> "Shape":
        return cls(options, tiles, len(x), len(words), x.shape[1], vocabulary)

    @property
    def high(self) -> int:
        """Words of a slice that are not padding."""
        return min(self.size, self.vocabulary)

    @property
    def splits(self) -> int:
        """Blocks along a slice: the fewest, of equal work, that make enough of them."""
        tiles = self.size // self.tiles.words
        divisors = [n for n in range(1, tiles + 1) if tiles % n == 0]
        return next(
            (n for n in divisors if n * (self.tokens // TOKENS) >= self.tiles.blocks), tiles
        )

    @property
    def count(self) -> int:
        """Tiles of a block."""
        return self.size // self.tiles.words // self.splits

    @property
    def steps(self) -> int:
        """Buffers of a tile."""
        return self.width // INNER

    def place(self) -> tuple[Array, Array, Array]:
        """First token, first tile of the slice, and block along it.

        Blocks along a slice are neighbours: those that run at once share hidden states as well
        as words, and the L2 cache serves both.
        """
        program, splits = lax.axis_index("program"), jnp.int32(self.splits)
        split = lax.rem(program, splits)
        return lax.div(program, splits) * TOKENS, split * self.count, split

    def produce(self, x, words, x_smem, words_smem, full, free):
        """Loads buffer after buffer, of all tiles of the block, as places become free."""
        plgpu.set_max_registers(24, action="decrease")
        token, tile, _ = self.place()
        stages, steps = jnp.int32(self.tiles.stages), jnp.int32(self.steps)

        def load(i, _):
            slot, inner = lax.rem(i, stages), pl.ds(lax.rem(i, steps) * INNER, INNER)
            rows = pl.ds((tile + lax.div(i, steps)) * self.tiles.words, self.tiles.words)
            pl.when(i >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
            tokens = x.at[pl.ds(token, TOKENS), inner]
            plgpu.copy_gmem_to_smem(tokens, x_smem.at[slot], full.at[slot])
            plgpu.copy_gmem_to_smem(words.at[rows, inner], words_smem.at[slot], full.at[slot])

        lax.fori_loop(0, self.count * self.steps, load, None)

    def multiply(self, n, me, x_smem, words_smem, full, free) -> Array:
        """Tile n of the block: the products of this warpgroup's tokens."""
        stages, mine = jnp.int32(self.tiles.stages), pl.ds(me * ROWS, ROWS)

        def step(k, acc):
            i = n * self.steps + k
            slot = lax.rem(i, stages)
            plgpu.barrier_wait(full.at[slot])
            acc = backend.accumulate(acc, x_smem.at[slot, mine], words_smem.at[slot].T)
            # As often as `produce` waits: no phase of a barrier may be left unseen.
            again = i < self.count * self.steps - stages
            pl.when(again)(lambda: plgpu.barrier_arrive(free.at[slot]))
            return acc

        acc = jnp.zeros((ROWS, self.tiles.words), jnp.float32)
        return lax.fori_loop(0, self.steps, step, plgpu.layout_cast(acc, plgpu.Layout.WGMMA))

    def logits(self, s: Array) -> tuple[Array, float]:
        """`x` and a positive factor: `x * factor` are the logits, capped, times log2(e)."""
        cap = self.options.soft_cap
        if cap is None:
            return s, LOG2_E
        # tanh(y) = 1 - 2 / (exp(2 y) + 1). The hardware's own tanh has 11 bits, too few for a
        # logit of some tens.
        return 1.0 - 2.0 / (jnp.exp2(s * (2.0 * LOG2_E / cap)) + 1.0), cap * LOG2_E

    def call(self, body, name: str, out: list, scratch: list, x, *operands) -> Any:
        """The kernel, with a ring of buffers and its barriers before its own scratch memory."""
        stages = self.tiles.stages
        ring = [
            plgpu.SMEM((stages, rows, INNER), x.dtype, transforms=LAYOUT)
            for rows in (TOKENS, self.tiles.words)
        ]
        # Arrivals: two copies fill a buffer, two warpgroups give it up.
        barriers = [plgpu.Barrier(num_arrivals=2, num_barriers=stages)] * 2
        return plgpu.kernel(
            partial(body, self),
            out_type=out,
            scratch_types=[*ring, *barriers, *scratch],
            # One grid axis: it becomes the first of CUDA's, the only one without a limit of 65535.
            grid=(self.tokens // TOKENS * self.splits,),
            grid_names=("program",),
            num_threads=CONSUMERS + 1,
            thread_name="warpgroup",
            kernel_name=name,
            compiler_params=plgpu.CompilerParams(
                approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
            ),
            **backend.cost(2 * self.tokens * self.size * self.width, x, *operands, out),
        )(x, *operands)


def log_sum_exp(
    options: Options,
    tiles: Tiles,
    vocabulary: int,
    x: Float[Array, "N D"],
    words: Float[Array, "W D"],
    low: Int[Array, ""],
) -> list[Float[Array, "S N"]]:
    """What each block finds over its part of a slice.

    Args:
      options: soft_cap, label_smoothing.
      tiles: how to cut.
      vocabulary: words in all.
      x: hidden states, a multiple of 128 of them, D a multiple of 64; bfloat16 or float16.
      words: a slice of the head in x's dtype, whole tiles.
      low: its first words that are not counted.

    Returns:
      The log-sum-exp of the logits and, for label smoothing, their sum.
    """
    shape = Shape.of(options, tiles, vocabulary, x, words)
    results = 1 + bool(options.label_smoothing)
    out = [jax.ShapeDtypeStruct((shape.splits, len(x)), jnp.float32)] * results
    scratch = [plgpu.SMEM((CONSUMERS, ROWS), jnp.float32)] * results
    body = partial(_forward_kernel, results)
    return shape.call(body, "cross_entropy_forward", out, scratch, x, words, low[None])


def _forward_kernel(results, shape, x, words, low, *refs):
    options = shape.options
    outs, ring, smems = refs[:results], refs[results : results + 4], refs[results + 4 :]
    masked = shape.vocabulary % shape.size != 0
    me = lax.axis_index("warpgroup")
    pl.when(me == CONSUMERS)(lambda: shape.produce(x, words, *ring))

    @pl.when(me < CONSUMERS)
    def consume():
        plgpu.set_max_registers(240, action="increase")
        token, first, split = shape.place()

        def tile(n, carry):
            top, total, *sums = carry
            s, factor = shape.logits(shape.multiply(n, me, *ring))
            if masked:
                # Every tile is compared, though most need not be: a second copy of the loop
                # would save less than a hundredth of a tile's time.
                column = lax.broadcasted_iota(jnp.int32, s.shape, 1)
                column += (first + n) * shape.tiles.words
                shown = (column >= low[0]) & (column < shape.high)
                sums = [old + jnp.where(shown, s, 0.0).sum(axis=1) for old in sums]
                s = jnp.where(shown, s, -jnp.inf)
            else:
                sums = [old + s.sum(axis=1) for old in sums]
            new_top = jnp.maximum(top, s.max(axis=1) * factor)
            # Where nothing was seen yet all is -inf, and -inf less -inf is no number.
            base = jnp.where(new_top == -jnp.inf, 0.0, new_top) if masked else new_top
            p = jnp.exp2(s * factor - lax.broadcast_in_dim(base, s.shape, [0]))
            return new_top, total * jnp.exp2(top - base) + p.sum(axis=1), *sums

        row = lambda value: plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), ROW)
        start = row(-jnp.inf), row(0.0), *[row(0.0)] * (results - 1)
        top, total, *sums = lax.fori_loop(0, shape.count, tile, start)
        smems[0][me] = (top + jnp.log2(total)) * (1.0 / LOG2_E)  # -inf where all is masked
        for smem, value in zip(smems[1:], sums, strict=True):
            smem[me] = value * (options.soft_cap or 1.0)
        plgpu.commit_smem()
        for smem, out in zip(smems, outs, strict=True):
            rows = pl.ds(token + me * ROWS, ROWS)
            plgpu.copy_smem_to_gmem(smem.at[me], out.at[split, rows])
        plgpu.wait_smem_to_gmem(0)


def d_logits(
    options: Options,
    tiles: Tiles,
    vocabulary: int,
    x: Float[Array, "N D"],
    words: Float[Array, "W D"],
    lse2: Float[Array, "N"],
    d_lse: Float[Array, "N"],
    d_mean: Float[Array, "N"] | None,
) -> Float[Array, "N W"]:
    """The gradient of a slice's logits, but for what the labels add; zero for padding.

    Args:
      options, tiles, vocabulary, x, words: as for `log_sum_exp`.
      lse2: log-sum-exp of the logits over the vocabulary, times log2(e).
      d_lse: gradient of the log-sum-exp.
      d_mean: gradient of the mean logit, divided by the vocabulary.

    Returns:
      `softmax * d_lse + d_mean`, times the derivative of the cap; in x's dtype.
    """
    shape = Shape.of(options, tiles, vocabulary, x, words)
    out = [jax.ShapeDtypeStruct((len(x), len(words)), x.dtype)]
    scratch = [plgpu.SMEM((CONSUMERS, ROWS, tiles.words), x.dtype, transforms=LAYOUT)]
    operands = words, lse2, d_lse, d_mean
    (d,) = shape.call(_backward_kernel, "cross_entropy_backward", out, scratch, x, *operands)
    return d


def _backward_kernel(shape, x, words, lse2, d_lse, d_mean, out, *refs):
    *ring, d_smem = refs
    me = lax.axis_index("warpgroup")
    pl.when(me == CONSUMERS)(lambda: shape.produce(x, words, *ring))

    @pl.when(me < CONSUMERS)
    def consume():
        plgpu.set_max_registers(240, action="increase")
        token, first, _ = shape.place()
        rows = pl.ds(token + me * ROWS, ROWS)
        read = lambda ref: plgpu.load(ref.at[rows], layout=ROW, optimized=False)
        top, scale = read(lse2), read(d_lse)
        even = None if d_mean is None else read(d_mean)

        def tile(n, _):
            start = (first + n) * shape.tiles.words
            s, factor = shape.logits(shape.multiply(n, me, *ring))
            spread = lambda row: lax.broadcast_in_dim(row, s.shape, [0])
            d = jnp.exp2(s * factor - spread(top)) * spread(scale)
            if even is not None:
                d += spread(even)
            if shape.options.soft_cap is not None:
                d *= 1.0 - s * s  # s is the tanh
            if shape.high < shape.size:
                column = lax.broadcasted_iota(jnp.int32, s.shape, 1) + start
                d = jnp.where(column < shape.high, d, 0.0)
            plgpu.wait_smem_to_gmem(0)  # of the tile before
            d_smem[me] = d.astype(out.dtype)
            plgpu.commit_smem()
            columns = pl.ds(start, shape.tiles.words)
            plgpu.copy_smem_to_gmem(d_smem.at[me], out.at[rows, columns])

        lax.fori_loop(0, shape.count, tile, None)
        plgpu.wait_smem_to_gmem(0)
