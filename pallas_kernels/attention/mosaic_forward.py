"""The forward pass of attention on Hopper: one Mosaic GPU kernel.

A block of the grid has three warpgroups and computes 2 x 64 queries of one head. The producer
brings K and V blocks through TMA into a ring of shared memory and gives its registers away.
Each of the two consumers holds 64 queries, keeps its running softmax in registers and hides
that softmax behind matmuls in two ways:

- its own: `S_i = Q K_i^T` and `O += P_(i-1) V_(i-1)` are issued together, and the softmax of
  S_i runs while the second is still in flight;
- the other's: the consumers take turns in issuing, so that one's softmax meets the other's
  matmuls (FlashAttention-3, arXiv 2407.08608, sections 3.1 and 3.2).

Logits are kept times log2(e), so that an exponential is one `exp2`. Which blocks are visited
and which of these need a mask comes from `schedule.py`: masked ones first, then a loop without
a comparison. In a masked block a pair is hidden before the exponential, always.

Only whole blocks exist here: lengths are padded to blocks, head sizes to multiples of 64.

Legend: B batch, T queries, S keys, H query heads, K key/value heads, D key size, E value size.
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
from jaxtyping import Array, Float

from pallas_kernels import backend
from pallas_kernels.attention import tiles as table
from pallas_kernels.attention.mask import MaskArrays, count_pairs
from pallas_kernels.attention.schedule import edge_count, key_blocks, nth_block
from pallas_kernels.attention.xla import Options

CONSUMERS = 2  # warpgroups that compute; one more loads
LOG2_E = math.log2(math.e)
SWIZZLE = 128  # bytes; 64 elements of 16 bits, to which head sizes are padded
ROW, COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


@dataclass(frozen=True)
class Tiles:
    """Sizes: queries of a consumer, keys of a block, and blocks in the ring."""

    block_q: int
    block_kv: int
    stages: int


# By padded head size, for masks that have no row of their own in the table.
TILES = {
    key.D: Tiles(**row["tiles"])
    for key, row in table.TABLE.items()
    if (key.kernel, key.E, key.mask) == ("attention_forward", key.D, table.ANY)
}


def choose(depth: int, value_depth: int, mask: str | None = None) -> Tiles:
    """The tiles for padded head sizes and a kind of mask (`tiles.kind`).

    From the table; without a row, those of `TILES` for the larger size.
    """
    found = table.find("attention_forward", depth, value_depth, mask)
    return Tiles(**found) if found else TILES[max(depth, value_depth)]


def forward(
    options: Options,
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K E"],
    sinks: Float[Array, "H"] | None,
    mask: MaskArrays,
    tiles: Tiles | None = None,
) -> tuple[Float[Array, "B T H E"], Float[Array, "B T H"]]:
    """Returns output and log-sum-exp, as `xla.forward`; bfloat16 or float16.

    Args:
      options, q, k, v, sinks, mask: as `xla.forward`.
      tiles: sizes; those of `choose` by default.
    """
    queries, keys, value_size = q.shape[1], k.shape[1], v.shape[3]
    q, k, v = (pad(x, 3, SWIZZLE // 2) for x in (q, k, v))
    tiles = tiles or choose(q.shape[3], v.shape[3], table.kind(options, mask))
    span = CONSUMERS * tiles.block_q
    blocks = key_blocks(options.band, mask, queries, keys, span, tiles.block_kv)
    q, k, v = pad(q, 1, span), pad(k, 1, tiles.block_kv), pad(v, 1, tiles.block_kv)
    q_ids, k_ids = mask.q_segments, mask.k_segments
    if q_ids is not None:
        q_ids, k_ids = pad(q_ids, 1, span), pad(k_ids, 1, tiles.block_kv)
    out, lse = _call(options, tiles, keys, q, k, v, blocks, mask.offset, q_ids, k_ids)
    out, lse = out[:, :queries, :, :value_size], lse[:, :, :queries].swapaxes(1, 2)
    return (out, lse) if sinks is None else add_sinks(out, lse, sinks)


def pad(x: Array, dim: int, unit: int) -> Array:
    """Pads a dim with zeros to a multiple of `unit`."""
    missing = -x.shape[dim] % unit
    return jnp.pad(x, [(0, missing if i == dim else 0) for i in range(x.ndim)]) if missing else x


def add_sinks(out: Array, lse: Array, sinks: Array) -> tuple[Array, Array]:
    """A logit without a value only makes the probabilities smaller: exact, after the fact."""
    total = jnp.logaddexp(lse, sinks.astype(jnp.float32)[None, None])
    share = jnp.exp(lse - total)[..., None]
    return (out.astype(jnp.float32) * share).astype(out.dtype), total


@dataclass(frozen=True)
class _Shape:
    """What the kernel knows while it is traced."""

    options: Options
    tiles: Tiles
    keys: int  # without padding
    groups: int
    heads: int
    query_tiles: int
    same_rows: bool  # one schedule for all rows of the batch
    dtype: Any

    @property
    def masked(self) -> bool:
        """Whether any block can need a mask; segments are told from the refs."""
        band = self.options.band
        return (
            band.left is not None or band.right is not None or self.keys % self.tiles.block_kv != 0
        )

    def place(self, blocks) -> tuple:
        """Row of the batch, query tile, head, and the visits there.

        Each warpgroup computes these for itself: they would not fit what the producer keeps.
        """
        program = lax.axis_index("program")
        # The last queries, which see the most under a causal mask, come first.
        tile = self.query_tiles - 1 - lax.rem(program, jnp.int32(self.query_tiles))
        head = lax.rem(lax.div(program, jnp.int32(self.query_tiles)), jnp.int32(self.heads))
        row = lax.div(program, jnp.int32(self.query_tiles * self.heads))
        visits = tuple(blocks[0 if self.same_rows else row, tile, i] for i in range(4))
        return row, tile, head, visits


def _call(options, tiles, keys, q, k, v, blocks, offset, q_ids, k_ids):
    batch, queries, heads, depth = q.shape
    value_size = v.shape[3]
    shape = _Shape(
        options=options,
        tiles=tiles,
        keys=keys,
        groups=heads // k.shape[2],
        heads=heads,
        query_tiles=blocks.shape[1],
        same_rows=blocks.shape[0] == 1,
        dtype=q.dtype,
    )
    layout = (plgpu.TilingTransform((8, SWIZZLE // 2)), plgpu.SwizzleTransform(SWIZZLE))

    def ring(*dims):
        return plgpu.SMEM(dims, q.dtype, transforms=layout)

    n = tiles.stages
    scratch: dict[str, Any] = {
        "q_smem": ring(CONSUMERS, tiles.block_q, depth),
        "k_smem": ring(n, tiles.block_kv, depth),
        "v_smem": ring(n, tiles.block_kv, value_size),
        # The output takes the place of the queries where it fits.
        "out_smem": None if depth == value_size else ring(CONSUMERS, tiles.block_q, value_size),
        "lse_smem": plgpu.SMEM((CONSUMERS, tiles.block_q), jnp.float32),
        "q_here": plgpu.Barrier(num_arrivals=1, num_barriers=CONSUMERS),
        "k_here": plgpu.Barrier(num_arrivals=1, num_barriers=n),
        "v_here": plgpu.Barrier(num_arrivals=1, num_barriers=n),
        "k_free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=n),
        "v_free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=n),
        "turn": plgpu.Barrier(num_arrivals=1, num_barriers=CONSUMERS),
    }
    out = (
        jax.ShapeDtypeStruct((batch, queries, heads, value_size), q.dtype),
        jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32),
    )
    pairs = batch * heads * count_pairs(options.band, queries, keys)
    # One grid axis: it becomes the first of CUDA's, the only one without a limit of 65535.
    return plgpu.kernel(
        partial(_kernel, shape),
        out_type=out,
        scratch_types=scratch,
        grid=(batch * heads * shape.query_tiles,),
        grid_names=("program",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="attention_forward",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        **backend.cost(2 * (depth + value_size) * pairs, q, k, v, out),
    )(q, k, v, blocks, offset, q_ids, k_ids)


def _kernel(shape, q, k, v, blocks, offset, q_ids, k_ids, out, lse, **scratch):
    warpgroup = lax.axis_index("warpgroup")
    pl.when(warpgroup < CONSUMERS)(
        lambda: _consume(shape, blocks, warpgroup, q, offset, q_ids, k_ids, out, lse, **scratch)
    )
    pl.when(warpgroup == CONSUMERS)(lambda: _produce(shape, blocks, k, v, **scratch))


def _produce(
    shape, blocks, k, v,
    *, k_smem, v_smem, k_here, v_here, k_free, v_free, **_,
):  # fmt: skip
    """Loads the visited blocks in order; waits for a place in the ring to be given up."""
    plgpu.set_max_registers(24, action="decrease")
    row, _, head, visits = shape.place(blocks)
    kv_head = lax.div(head, jnp.int32(shape.groups))
    stages = jnp.int32(shape.tiles.stages)

    def load(n, _):
        slot = lax.rem(n, stages)
        block = nth_block(visits, n)
        columns = pl.ds(block * shape.tiles.block_kv, shape.tiles.block_kv)
        pl.when(n >= stages)(lambda: plgpu.barrier_wait(k_free.at[slot]))
        plgpu.copy_gmem_to_smem(k.at[row, columns, kv_head], k_smem.at[slot], k_here.at[slot])
        pl.when(n >= stages)(lambda: plgpu.barrier_wait(v_free.at[slot]))
        plgpu.copy_gmem_to_smem(v.at[row, columns, kv_head], v_smem.at[slot], v_here.at[slot])

    def drain(n, _):
        slot = lax.rem(n, stages)
        plgpu.barrier_wait(k_free.at[slot])
        plgpu.barrier_wait(v_free.at[slot])

    start, stop, *_ = visits
    count = stop - start
    lax.fori_loop(0, count, load, None)
    # Every completion of a barrier is seen by someone: interpreters insist on it.
    lax.fori_loop(jnp.maximum(count, stages), count + stages, drain, None)


def _consume(
    shape, blocks, me, q, offset, q_ids, k_ids, out, lse,
    *, q_smem, k_smem, v_smem, out_smem, lse_smem,
    q_here, k_here, v_here, k_free, v_free, turn,
):  # fmt: skip
    """Attends with 64 queries to the visited blocks."""
    plgpu.set_max_registers(240, action="increase")
    row, tile, head, visits = shape.place(blocks)
    block_q, block_kv = shape.tiles.block_q, shape.tiles.block_kv
    stages = jnp.int32(shape.tiles.stages)
    value_size = v_smem.shape[-1]
    first_row = (tile * CONSUMERS + me) * block_q
    rows = pl.ds(first_row, block_q)
    start, stop, *_ = visits
    count = stop - start

    plgpu.copy_gmem_to_smem(q.at[row, rows, head], q_smem.at[me], q_here.at[me])
    row_offset = shape.options.band.offset if offset is None else offset[row]
    row_ids = None
    if q_ids is not None:
        row_ids = plgpu.load(q_ids.at[row, rows], layout=ROW, optimized=False)
    plgpu.barrier_wait(q_here.at[me])

    def hide(s, n):
        """Puts the pairs of visit n that the mask forbids at -inf."""
        first_column = nth_block(visits, n) * block_kv
        band = shape.options.band
        # Each row sees a range of columns: two numbers a row, and one comparison a pair.
        # Made where they are used: Mosaic finds no layout for a vector that nothing uses.
        i = lambda: plgpu.layout_cast(lax.iota(jnp.int32, block_q), ROW) + (first_row + row_offset)
        j = lambda: lax.broadcasted_iota(jnp.int32, s.shape, 1) + first_column
        if band.left is not None:
            s = jnp.where(j() >= lax.broadcast_in_dim(i() - band.left, s.shape, [0]), s, -jnp.inf)
        if band.right is not None:
            last = jnp.minimum(i() + band.right, shape.keys - 1)
            s = jnp.where(j() <= lax.broadcast_in_dim(last, s.shape, [0]), s, -jnp.inf)
        elif shape.keys % block_kv:
            s = jnp.where(j() < shape.keys, s, -jnp.inf)
        if row_ids is not None:
            # Not through shared memory: the latency passes under the matmul still in flight.
            columns = pl.ds(first_column, block_kv)
            column_ids = plgpu.load(k_ids.at[row, columns], layout=COLUMN, optimized=False)
            same = lax.broadcast_in_dim(row_ids, s.shape, [0]) == lax.broadcast_in_dim(
                column_ids, s.shape, [1]
            )
            s = jnp.where(same, s, -jnp.inf)
        return s

    may_mask = shape.masked or q_ids is not None

    def softmax(n, slot, masked, s, state):
        """The probabilities of visit n, not yet divided, and what older ones shrink by."""
        top, total, *_ = state
        s, factor = logits(shape.options, s)
        if masked:
            s = hide(s, n)
        plgpu.barrier_arrive(k_free.at[slot])
        new_top = jnp.maximum(top, s.max(axis=1) * factor)
        # Where nothing was seen yet all is -inf, and -inf less -inf is no number.
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top) if may_mask else new_top
        shrink = jnp.exp2(top - base)
        p = jnp.exp2(s * factor - lax.broadcast_in_dim(base, s.shape, [0]))
        total = total * shrink + p.sum(axis=1)
        return new_top, total, shrink, p

    def step(masked, n, carry):
        """Softmax of visit n, and the values of the visit before it."""
        acc, p, top, total = carry
        slot, last = lax.rem(n, stages), lax.rem(n - 1, stages)
        plgpu.barrier_wait(k_here.at[slot])
        plgpu.barrier_wait(v_here.at[last])
        plgpu.barrier_wait(turn.at[me])
        acc, (top, total, shrink, p) = backend.overlap(
            (q_smem.at[me], k_smem.at[slot].T),
            (acc, p, v_smem.at[last]),
            issued=lambda: plgpu.barrier_arrive(turn.at[1 - me]),
            meanwhile=partial(softmax, n, slot, masked),
            state=(top, total, top, jnp.zeros((block_q, block_kv), jnp.float32)),
        )
        plgpu.barrier_arrive(v_free.at[last])
        acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
        # Rounded only here: the registers of the last p were read until now.
        return acc, p.astype(shape.dtype), top, total

    def attend():
        pl.when(me == 1)(lambda: plgpu.barrier_arrive(turn.at[0]))
        top = plgpu.layout_cast(jnp.full((block_q,), -jnp.inf, jnp.float32), ROW)
        total = plgpu.layout_cast(jnp.zeros((block_q,), jnp.float32), ROW)
        plgpu.barrier_wait(k_here.at[0])
        s = backend.matmul(q_smem.at[me], k_smem.at[0].T)
        top, total, _, p = softmax(0, 0, may_mask, s, (top, total))
        acc = plgpu.layout_cast(jnp.zeros((block_q, value_size), jnp.float32), plgpu.Layout.WGMMA)
        carry = acc, p.astype(shape.dtype), top, total
        edge = jnp.int32(1)
        if may_mask:
            edge = jnp.maximum(edge_count(visits), 1)
            carry = lax.fori_loop(1, edge, partial(step, True), carry)
        acc, p, top, total = lax.fori_loop(edge, count, partial(step, False), carry)
        last = lax.rem(count - 1, stages)
        plgpu.barrier_wait(v_here.at[last])
        acc = backend.accumulate(acc, p, v_smem.at[last])
        plgpu.barrier_arrive(v_free.at[last])
        pl.when(me == 0)(lambda: plgpu.barrier_wait(turn.at[0]))
        return acc, top, total

    def nothing():
        row_zeros = plgpu.layout_cast(jnp.zeros((block_q,), jnp.float32), ROW)
        acc = jnp.zeros((block_q, value_size), jnp.float32)
        return plgpu.layout_cast(acc, plgpu.Layout.WGMMA), row_zeros, row_zeros

    acc, top, total = lax.cond(count > 0, attend, nothing)
    out_smem = q_smem if out_smem is None else out_smem
    some = total > 0.0
    inverse = jnp.where(some, 1.0 / jnp.where(some, total, 1.0), 0.0)
    out_smem[me] = (acc * lax.broadcast_in_dim(inverse, acc.shape, [0])).astype(shape.dtype)
    natural = (top + jnp.log2(jnp.where(some, total, 1.0))) * (1.0 / LOG2_E)
    lse_smem[me] = jnp.where(some, natural, -jnp.inf)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_smem.at[me], out.at[row, rows, head])
    plgpu.copy_smem_to_gmem(lse_smem.at[me], lse.at[row, head, rows])
    plgpu.wait_smem_to_gmem(0)


def logits(options: Options, s: Array) -> tuple[Array, float]:
    """Scales and caps a tile of products.

    Returns:
      `x` and a positive factor: `x * factor` are the logits times log2(e). The factor is kept
      apart so that it joins the subtraction before the exponential in one instruction.
    """
    if options.soft_cap is not None:
        # tanh(y) = 1 - 2 / (exp(2 y) + 1). The hardware's own tanh has 11 bits, too few for a
        # logit of some tens.
        e = jnp.exp2(s * (2.0 * LOG2_E * options.scale / options.soft_cap))
        return 1.0 - 2.0 / (e + 1.0), options.soft_cap * LOG2_E
    if options.scale > 0:
        return s, options.scale * LOG2_E
    return s * options.scale, LOG2_E
