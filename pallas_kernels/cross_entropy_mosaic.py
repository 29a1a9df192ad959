"""The kernels of linear cross-entropy on Hopper; see `cross_entropy.py`.

Both make the logits of a tile, 128 tokens by 256 words, as a matmul does: one warpgroup brings
hidden states and words through TMA into a ring of shared memory, two multiply, with 64 tokens
each. What they do with a tile is different:

  forward   joins it to each token's running log-sum-exp, in registers, tile after tile; a
            number for each token and block is all that is written
  backward  makes the gradient of the logits of it, and writes that in 16 bits

The vocabulary goes through in slices of some thousand words. A slice's gradient of the logits,
`d`, is held while XLA makes two matmuls of it: `d^T hidden`, which is the gradient of the slice's
words, complete and written once, and `d words`, which is added to that of hidden in float32. So
no two blocks add to the same number: there are no locks, no atomics, and no sum hangs on the
order in which blocks run. A kernel without that buffer would either make the logits D / 256 times
or add gradients of hidden in memory.

Slices are whole tiles and of one size. Where they do not divide the vocabulary the last begins
earlier, in words that were there before, and these are masked; so the head is never copied as a
whole, neither to pad it nor to cast it. Fewer words than a tile are padded. So are tokens, to 128,
and widths, to 64.

Legend: N tokens, D width, V words, S blocks along a slice.
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
from pallas_kernels.cross_entropy_xla import Options, Terms, capped, lift
from pallas_kernels.manual_axes import vary_alike

CONSUMERS = 2  # warpgroups that multiply; one more loads
ROWS = 64  # tokens of one, M of wgmma
TOKENS = CONSUMERS * ROWS  # of a tile
INNER = 64  # of D in a buffer: a row of the 128-byte swizzle
BLOCKS = 512  # a launch should have, for the last ones not to leave a GPU of 132 cores idle
SLICE_COST = 160  # words: the FLOP rate of a H200 over its bandwidth
LOG2_E = math.log2(math.e)
ROW = plgpu.Layout.WGMMA.reduce(1)


@dataclass(frozen=True)
class Tiles:
    """How a kernel is cut.

    Attributes:
      words: of a tile.
      stages: buffers in the ring.
      slice_bytes: of a slice's gradient of logits, at most,
      slice_words: unless a slice would have fewer words than these.
    """

    words: int = 256
    stages: int = 4
    slice_bytes: int = 2**27
    slice_words: int = 2048

    def slices(self, tokens: int, words: int) -> tuple[int, int]:
        """How many slices of a vocabulary, and the words of each.

        Slices cost what they hold beyond the vocabulary, and each about `SLICE_COST` words:
        the gradient of hidden is read and written, 8 D bytes a token, against 8 D FLOP a word.
        """
        limit = max(self.slice_bytes // (2 * tokens), self.slice_words) // self.words
        least = -(-words // (limit * self.words))
        counts = range(least, 2 * least + 2)
        sizes = [(n, -(-words // (n * self.words)) * self.words) for n in counts]
        fitting = [(n, size) for n, size in sizes if size <= words]
        cost = lambda slices: slices[0] * (slices[1] + SLICE_COST)
        return min(fitting, key=cost, default=(1, self.words))


FORWARD, BACKWARD = Tiles(stages=4), Tiles(stages=3)  # the backward pass stores a tile


def forward(
    options: Options,
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    labels: Int[Array, "B T R"],
    tiles: Tiles | None = None,
) -> Terms:
    """As `cross_entropy_xla.forward`."""
    tiles = tiles or FORWARD
    batch, length, width = hidden.shape
    tokens = batch * length
    x = _padded(hidden.reshape(tokens, width))
    count, size = tiles.slices(len(x), len(head))

    def step(carry, i):
        start, low = _slice(i, size, len(head))
        words = _words(head, x, start, size)
        lse, *sums = _forward_call(options, tiles, len(head), x, words, low)
        lse = jnp.logaddexp(carry[0], jax.nn.logsumexp(lse, axis=0))
        return (lse, *(old + new.sum(0) for old, new in zip(carry[1:], sums))), None

    zeros, *_ = vary_alike(jnp.zeros(len(x), jnp.float32), x, head)
    start = (zeros - jnp.inf, zeros)[: 1 + bool(options.label_smoothing)]
    (lse, *sums), _ = lax.scan(step, start, jnp.arange(count))
    rows = lambda vector: vector[:tokens].reshape(batch, length)
    mean = rows(sums[0]) / len(head) if sums else None
    return Terms(rows(lse), _targets(options, hidden, head, labels), mean)


def backward(
    options: Options,
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    labels: Int[Array, "B T R"],
    lse: Float[Array, "B T"],
    cotangents: Terms,
    tiles: Tiles | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "V D"]]:
    """As `cross_entropy_xla.backward`."""
    tiles = tiles or BACKWARD
    tokens, width = labels.shape[0] * labels.shape[1], hidden.shape[-1]
    x = _padded(hidden.reshape(tokens, width))
    count, size = tiles.slices(len(x), len(head))
    factor = lift(hidden.dtype, cotangents)
    ct = jax.tree.map(lambda array: array * factor, cotangents)
    if ct.mean is not None:
        ct = ct._replace(mean=ct.mean / len(head))

    def rows(array):  # [B, T, ...] -> [N, ...]
        array = array.reshape(tokens, *array.shape[2:])
        return jnp.pad(array, [(0, len(x) - tokens)] + [(0, 0)] * (array.ndim - 1))

    labels_NR, at_labels_NR = rows(labels), rows(_at_labels(options, hidden, head, labels, lse, ct))
    vectors = rows(lse * LOG2_E), rows(ct.lse), None if ct.mean is None else rows(ct.mean)

    def step(carry, i):
        d_x, d_head = carry
        start, low = _slice(i, size, len(head))
        words = _words(head, x, start, size)
        d = _backward_call(options, tiles, len(head), x, words, *vectors)
        column = labels_NR - start
        column = jnp.where((column >= 0) & (column < size), column, size)  # dropped
        token = lax.broadcasted_iota(column.dtype, column.shape, 0)
        d = d.at[token, column].set(at_labels_NR.astype(d.dtype), mode="drop")
        dot = partial(lax.dot_general, preferred_element_type=jnp.float32)
        d_words = dot(d, x, (((0,), (0,)), ((), ()))) / factor
        d_words = d_words[: len(head), :width].astype(head.dtype)
        d_head = lax.dynamic_update_slice_in_dim(d_head, d_words, start, 0)
        # Words of the slice before gave hidden their gradient there.
        new = jnp.where(lax.broadcasted_iota(jnp.int32, words.shape, 0) >= low, words, 0)
        return (d_x + dot(d, new, (((1,), (0,)), ((), ()))), d_head), None

    start = jnp.zeros(x.shape, jnp.float32), jnp.zeros(head.shape, head.dtype)
    start = vary_alike(*start, x, head)[:2]
    (d_x, d_head), _ = lax.scan(step, start, jnp.arange(count))
    d_hidden = (d_x[:tokens, :width] / factor).astype(hidden.dtype)
    return d_hidden.reshape(hidden.shape), d_head


def _padded(x: Array) -> Array:
    """Tokens and widths to whole tiles, one at least."""
    tokens, width = (max(n, 1) for n in x.shape)
    pads = -tokens % TOKENS + tokens - x.shape[0], -width % INNER + width - x.shape[1]
    return jnp.pad(x, [(0, n) for n in pads])


def _slice(i: Array, size: int, words: int) -> tuple[Array, Array]:
    """Where a slice begins, and how many of its words were in the one before."""
    start = jnp.maximum(jnp.minimum(i * size, words - size), 0)
    return start, i * size - start


def _words(head, x, start, size) -> Array:
    """A slice of the head, in the dtype of x and as wide."""
    part = lax.dynamic_slice_in_dim(head, start, min(size, len(head))).astype(x.dtype)
    return jnp.pad(part, [(0, size - len(part)), (0, x.shape[1] - part.shape[1])])


def _targets(options, hidden, head, labels) -> Float[Array, "B T R"]:
    """The label's logit: what the kernel has for it, up to the order of a float32 sum."""

    def rounded(x):
        # As the kernel sees it. XLA takes a cast to 16 bits and back for no cast at all.
        bits = jnp.finfo(hidden.dtype).nmant
        return lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=bits)

    words = head[jnp.clip(labels, 0, len(head) - 1)]
    return capped(options, (rounded(hidden)[:, :, None] * rounded(words)).sum(-1))


def _at_labels(options, hidden, head, labels, lse, ct) -> Float[Array, "B T R"]:
    """The gradient of the labels' logits; that of labels that a token has twice is one number."""
    target = _targets(options, hidden, head, labels)
    d = jnp.exp(target - lse[..., None]) * ct.lse[..., None]
    if ct.mean is not None:
        d += ct.mean[..., None]
    same = labels[..., :, None] == labels[..., None, :]
    d += jnp.where(same, ct.target[..., None, :], 0.0).sum(-1)
    return d if options.soft_cap is None else d * (1 - (target / options.soft_cap) ** 2)


@dataclass(frozen=True)
class _Shape:
    """What a kernel knows while it is traced, and what the two have in common."""

    options: Options
    tiles: Tiles
    tokens: int
    size: int  # words of a slice
    width: int
    high: int  # words of a slice that are not padding

    @property
    def splits(self) -> int:
        """Blocks along a slice: the fewest, of equal work, that make `BLOCKS` of them."""
        tiles = self.size // self.tiles.words
        divisors = [n for n in range(1, tiles + 1) if tiles % n == 0]
        return next((n for n in divisors if n * (self.tokens // TOKENS) >= BLOCKS), tiles)

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
        layout = plgpu.TilingTransform((8, INNER)), plgpu.SwizzleTransform(128)
        stages = self.tiles.stages
        ring = [
            plgpu.SMEM((stages, rows, INNER), x.dtype, transforms=layout)
            for rows in (TOKENS, self.tiles.words)
        ]
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


def _forward_call(options, tiles, words_in_all, x, words, low) -> list[Array]:
    """For each block and token its log-sum-exp and, for smoothing, its sum of logits: [S, N].

    Of the words of a slice from `low` on.
    """
    shape = _Shape(options, tiles, len(x), len(words), x.shape[1], min(len(words), words_in_all))
    results = 1 + bool(options.label_smoothing)
    out = [jax.ShapeDtypeStruct((shape.splits, len(x)), jnp.float32)] * results
    scratch = [plgpu.SMEM((CONSUMERS, ROWS), jnp.float32)] * results
    masked = words_in_all % len(words) != 0
    body = partial(_forward_kernel, results, masked)
    return shape.call(body, "cross_entropy_forward", out, scratch, x, words, low[None])


def _forward_kernel(results, masked, shape, x, words, low, *refs):
    options = shape.options
    outs, ring, smems = refs[:results], refs[results : results + 4], refs[results + 4 :]
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
                # Two numbers a tile, and an unmasked one is compared too: the loop is one.
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


def _backward_call(
    options, tiles, words_in_all, x, words, lse2, d_lse, d_mean
) -> Float[Array, "N size"]:
    """The gradient of a slice's logits, but for what labels add: of padding it is 0."""
    shape = _Shape(options, tiles, len(x), len(words), x.shape[1], min(len(words), words_in_all))
    out = [jax.ShapeDtypeStruct((len(x), len(words)), x.dtype)]
    layout = plgpu.TilingTransform((8, INNER)), plgpu.SwizzleTransform(128)
    scratch = [plgpu.SMEM((CONSUMERS, ROWS, tiles.words), x.dtype, transforms=layout)]
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
