"""Attention's backward pass on Hopper: one kernel for dQ, one for dK and dV.

Both are the same loop, seen from two sides. A program keeps a tile of one side in shared memory,
(q, dO) for dQ, (k, v) for dK and dV, and meets blocks of the other side, which one warpgroup
fetches ahead by TMA while the others compute. With (a, b) for the side that stays and (x, y) for
the side that passes:

    S = a x^T,  dP = b y^T                           both factors in shared memory
    P = exp2(mask(S) - lse),  dS = P * (dP - delta)  in registers
    da += dS x                                       dQ += dS K, or dK += dS^T Q
    db += P y                                        dV += P^T dO, where the keys stay

P is computed again from the saved log-sum-exp. P and dS are left factors and never leave the
registers. dP is in flight while P is computed, db while dS is; and two warpgroups, each with a
tile of its own, fill each other's gaps. A gradient is summed by one warpgroup in float32 in a
fixed order, over the query heads of a key/value head too: no atomics, and runs are bit-equal.

Blocks that the mask empties are never loaded, those at its edge are masked before the exponential,
all others are not compared at all (`schedule.py`).

The price of two kernels is that S and dP are computed twice: 7 products in place of 5. One kernel
would have to sum dQ through memory, with atomics or in turns.

Legend: B batch, T queries, S keys, H query heads, K key/value heads, D key size, E value size.
A kernel speaks of rows (of the tile that stays) and columns (of the block that passes).
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import backend
from pallas_kernels.attention import schedule
from pallas_kernels.attention.mask import MaskArrays
from pallas_kernels.attention.xla import Options

WGMMA = plgpu.Layout.WGMMA
ROW, COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)  # layouts of a value for each row, each column
LOG2E = math.log2(math.e)
ROWS = 64  # of a consumer's part of the tile: M of wgmma
UNIT = 64  # head sizes are padded to a multiple: a row of the 128-byte swizzle
SHARED_MEMORY = 226 * 1024  # of a program on Hopper, less the barriers
SUMS = 320  # D + E beyond which dK and dV do not fit into registers together
# Registers of a consumer and of the producer. Three warpgroups of 168 may share 504.
REGISTERS = (232, 40)


@dataclass(frozen=True)
class Work:
    """Which kernel: the side that stays, and which of its gradients are wanted."""

    keys_stay: bool
    a: bool  # of q or k
    b: bool  # of v

    @property
    def name(self) -> str:
        if not self.keys_stay:
            return "attention_dq"
        return "attention_d" + "k" * self.a + "v" * self.b


DQ = Work(keys_stay=False, a=True, b=False)
DKV = Work(keys_stay=True, a=True, b=True)
DK = Work(keys_stay=True, a=True, b=False)
DV = Work(keys_stay=True, a=False, b=True)


@dataclass(frozen=True)
class Tiles:
    """How a kernel is cut.

    Attributes:
      columns: of a block that passes.
      stages: blocks in shared memory at a time.
      consumers: warpgroups that compute, with 64 rows each.
    """

    columns: int
    stages: int
    consumers: int = 2

    @property
    def rows(self) -> int:
        return ROWS * self.consumers


def choose(depth: int, value_depth: int) -> dict[Work, Tiles]:
    """The kernels for padded head sizes, with the widest blocks that fit into registers."""
    works = (DQ, DKV) if depth + value_depth <= SUMS else (DQ, DK, DV)
    return {work: _tiles(work, depth, value_depth) for work in works}


def _tiles(work: Work, depth: int, value_depth: int) -> Tiles:
    sums = (work.a * depth + work.b * value_depth) // 2  # registers of a thread
    logits = 1 if work.a else 0.5  # S and dP, for each column
    columns = next((n for n in (128, 64) if sums + logits * n <= 192), 32)
    row = 2 * (depth + value_depth)
    stages = (SHARED_MEMORY - 2 * ROWS * row) // (columns * (row + 12))
    return Tiles(columns, min(stages, 4))


def backward(
    options: Options,
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K E"],
    mask: MaskArrays,
    lse: Float[Array, "B T H"],
    delta: Float[Array, "B T H"],
    dout: Float[Array, "B T H E"],
) -> tuple[Float[Array, "B T H D"], Float[Array, "B S K D"], Float[Array, "B S K E"]]:
    """Returns the gradients of q, k and v.

    Args:
      options, mask: as for `xla.backward`.
      q, k, v, dout: bfloat16 or float16.
      lse: float32, natural log, -inf for queries that see nothing.
      delta: float32, `(out * dout).sum(-1) - dlse`.
    """
    padded = [_pad(x, UNIT, dim=3) for x in (q, k, v, dout)]
    gradients = []
    for work, tiles in choose(padded[0].shape[3], padded[2].shape[3]).items():
        gradients += gradients_of(work, tiles, options, *padded, mask, lse, delta)
    return tuple(g[..., : x.shape[3]] for g, x in zip(gradients, (q, k, v), strict=True))


def gradients_of(
    work: Work, tiles: Tiles, options: Options, q, k, v, dout, mask: MaskArrays, lse, delta
) -> list[Array]:
    """Runs one kernel on head sizes that are multiples of 64."""
    queries, keys, groups = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    q_block, k_block, blocks_of = tiles.rows, tiles.columns, schedule.key_blocks
    if work.keys_stay:
        q_block, k_block, blocks_of = k_block, q_block, schedule.query_blocks
    blocks = blocks_of(options.band, mask, queries, keys, q_block, k_block)
    # A query that sees nothing, and one of the padding, has P = exp2(S - inf) = 0.
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E)
    lse, delta = (_pad(x.swapaxes(1, 2), q_block, 2, f) for x, f in ((lse, jnp.inf), (delta, 0.0)))
    q_side = q, dout, mask.q_segments
    k_side = k, v, mask.k_segments
    q_side, k_side = (
        [x if x is None else _pad(x, block) for x in side]
        for side, block in ((q_side, q_block), (k_side, k_block))
    )
    stay, passing = (k_side, q_side) if work.keys_stay else (q_side, k_side)
    kernel = _Kernel(work, tiles, options, groups, keys, mask.q_segments is not None)
    out = kernel(blocks, mask.offset, *stay, *passing, lse, delta)
    return [x[:, : keys if work.keys_stay else queries] for x in out]


def _pad(x: Array, unit: int, dim: int = 1, fill: float = 0) -> Array:
    widths = [(0, -size % unit if i == dim else 0) for i, size in enumerate(x.shape)]
    return jnp.pad(x, widths, constant_values=fill)


class _Refs(NamedTuple):
    """What the body of a kernel gets. Barriers and `x` to `deltas` have one for each stage."""

    # Global memory. `stay` and `passing` are (B, length, heads, size) in pairs.
    blocks: Any  # of schedule.py
    offset: Any  # [B] or None
    stay_a: Any
    stay_b: Any
    row_ids: Any  # segments [B, length] or None
    pass_x: Any
    pass_y: Any
    column_ids: Any
    lse: Any  # [B, H, T]
    delta: Any
    # Shared memory.
    a: Any  # [consumers, 64, D]
    b: Any
    x: Any  # [stages, columns, D]
    y: Any
    ids: Any  # [stages, columns]; this and the next two None where no column has them
    lses: Any
    deltas: Any
    stay_full: Any  # one for each consumer
    x_full: Any  # x, ids and lses have come
    y_full: Any  # y and deltas have come
    free: Any  # all consumers are done with a stage


class _Place(NamedTuple):
    """Where in the grid a program is, and what it visits."""

    batch: Any
    head: Any  # of the side that stays
    tile: Any
    blocks: tuple  # start, stop, full_start, full_stop

    @property
    def count(self):
        return self.blocks[1] - self.blocks[0]


class _Rows(NamedTuple):
    """What is known of a consumer's rows: a vector for each, or None."""

    lse: Any
    delta: Any
    ids: Any
    low: Any  # first and last column that the row sees
    high: Any


@dataclass(frozen=True)
class _Kernel:
    work: Work
    tiles: Tiles
    options: Options
    groups: int
    keys: int  # without padding
    packed: bool

    def __call__(self, blocks, offset, stay_a, stay_b, row_ids, pass_x, pass_y, *rest) -> list:
        stages, columns, consumers = self.tiles.stages, self.tiles.columns, self.tiles.consumers
        by_column, dtype = self.work.keys_stay, stay_a.dtype
        batch, rows, heads, _ = stay_a.shape
        wanted = [x for x, w in ((stay_a, self.work.a), (stay_b, self.work.b)) if w]

        def tiled(*shape):
            tiling = plgpu.TilingTransform((8, UNIT)), plgpu.SwizzleTransform(128)
            return plgpu.SMEM(shape, dtype, transforms=tiling)

        def vectors(dtype, exist):
            return plgpu.SMEM((stages, columns), dtype) if exist else None

        def barriers(count, arrivals):
            return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)

        return plgpu.kernel(
            self.body,
            out_type=[jax.ShapeDtypeStruct(x.shape, dtype) for x in wanted],
            grid=(batch, heads, rows // self.tiles.rows),
            grid_names=("batch", "head", "tile"),
            num_threads=consumers + 1,
            thread_name="warpgroup",
            scratch_types=[
                tiled(consumers, ROWS, stay_a.shape[3]),
                tiled(consumers, ROWS, stay_b.shape[3]),
                tiled(stages, columns, stay_a.shape[3]),
                tiled(stages, columns, stay_b.shape[3]),
                vectors(jnp.int32, self.packed),
                vectors(jnp.float32, by_column),
                vectors(jnp.float32, by_column and self.work.a),
                barriers(consumers, 2),
                barriers(stages, 1 + self.packed + by_column),
                barriers(stages, 1 + (by_column and self.work.a)),
                barriers(stages, consumers),
            ],
            compiler_params=plgpu.CompilerParams(
                approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
            ),
            kernel_name=self.work.name,
        )(blocks, offset, stay_a, stay_b, row_ids, pass_x, pass_y, *rest)

    def body(self, *refs):
        split = len(_Refs._fields) - 11, self.work.a + self.work.b
        outs = refs[split[0] : sum(split)]
        refs = _Refs(*refs[: split[0]], *refs[sum(split) :])
        batch, head, tile, warpgroup = map(lax.axis_index, ("batch", "head", "tile", "warpgroup"))
        tiles, consumers = refs.blocks.shape[1], self.tiles.consumers
        if not self.work.keys_stay:
            tile = tiles - 1 - tile  # causal: long ones first, short ones fill up the end
        row = batch if refs.blocks.shape[0] > 1 else 0
        place = _Place(batch, head, tile, tuple(refs.blocks[row, tile, i] for i in range(4)))

        @pl.when(warpgroup == consumers)
        def _():
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
            self.produce(refs, place)

        @pl.when(warpgroup < consumers)
        def _():
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            self.consume(refs, outs, place, warpgroup)

    def produce(self, refs: _Refs, place: _Place):
        """Loads the blocks that pass, head by head, into stages as these become free."""
        stages = jnp.int32(self.tiles.stages)
        heads = self.groups if self.work.keys_stay else 1
        total = place.count * heads

        def load(i, _):
            stage, n = lax.rem(i, stages), lax.rem(i, place.count)
            if self.work.keys_stay:
                head = place.head * self.groups + lax.div(i, place.count)
            else:
                head = lax.div(place.head, jnp.int32(self.groups))
            at = pl.ds(self.first_column(place, n), self.tiles.columns)
            pl.when(i >= stages)(lambda: plgpu.barrier_wait(refs.free.at[stage]))

            def fetch(source, target, barrier):
                if target is not None:
                    plgpu.copy_gmem_to_smem(source, target.at[stage], barrier.at[stage])

            fetch(refs.pass_x.at[place.batch, at, head], refs.x, refs.x_full)
            fetch(refs.lse.at[place.batch, head, at], refs.lses, refs.x_full)
            if self.packed:
                fetch(refs.column_ids.at[place.batch, at], refs.ids, refs.x_full)
            fetch(refs.pass_y.at[place.batch, at, head], refs.y, refs.y_full)
            fetch(refs.delta.at[place.batch, head, at], refs.deltas, refs.y_full)

        def drain(i, _):
            plgpu.barrier_wait(refs.free.at[lax.rem(i, stages)])

        lax.fori_loop(0, total, load, None)
        lax.fori_loop(jnp.maximum(total - stages, 0), total, drain, None)

    def consume(self, refs: _Refs, outs, place: _Place, warpgroup):
        """Sums the gradients of 64 rows over all visits and stores them."""
        first_row = place.tile * self.tiles.rows + warpgroup * ROWS
        at = place.batch, pl.ds(first_row, ROWS), place.head
        a, b, full = (ref.at[warpgroup] for ref in (refs.a, refs.b, refs.stay_full))
        plgpu.copy_gmem_to_smem(refs.stay_a.at[at], a, full)
        plgpu.copy_gmem_to_smem(refs.stay_b.at[at], b, full)
        rows = self.rows(refs, place, first_row)
        plgpu.barrier_wait(full)

        def head(g, sums):
            def visit(masked, n, sums):
                i = g * place.count + n
                return self.meet(refs, a, b, rows, i, self.first_column(place, n), masked, sums)

            edge = schedule.edge_count(place.blocks)
            if not self.has_edge(refs):
                return lax.fori_loop(0, place.count, lambda n, s: visit(False, n, s), sums)
            sums = lax.fori_loop(0, edge, lambda n, s: visit(True, n, s), sums)
            return lax.fori_loop(edge, place.count, lambda n, s: visit(False, n, s), sums)

        wanted = [x for x, w in ((a, self.work.a), (b, self.work.b)) if w]
        sums = tuple(
            plgpu.layout_cast(jnp.zeros(x.shape, jnp.float32), WGMMA) for x in wanted
        )
        if self.work.keys_stay and self.groups > 1:
            sums = lax.fori_loop(0, self.groups, head, sums)
        else:
            sums = head(0, sums)

        scales = [self.options.scale] * self.work.a + [1.0] * self.work.b
        for total, scale, smem in zip(sums, scales, wanted):
            smem[...] = (total * scale).astype(smem.dtype)  # a and b have done their service
        plgpu.commit_smem()
        for smem, out in zip(wanted, outs):
            plgpu.copy_smem_to_gmem(smem, out.at[at])
        plgpu.wait_smem_to_gmem(0)

    def meet(self, refs: _Refs, a, b, rows: _Rows, i, first_column, masked: bool, sums):
        """Adds to the gradients what one block gives."""
        stage = lax.rem(i, jnp.int32(self.tiles.stages))
        x, y = refs.x.at[stage], refs.y.at[stage]
        shape = ROWS, self.tiles.columns

        def value(row_vector, column_vectors):
            if row_vector is not None:
                return lax.broadcast_in_dim(row_vector, shape, [0])
            vector = plgpu.load(column_vectors.at[stage], layout=COLUMN)
            return lax.broadcast_in_dim(vector, shape, [1])

        def step(s_acc, dp_acc=None):
            plgpu.barrier_wait(refs.x_full.at[stage])
            backend.wgmma(s_acc, a, x.T)
            plgpu.barrier_wait(refs.y_full.at[stage])
            if self.work.a:
                backend.wgmma(dp_acc, b, y.T)
            logits, slope = self.logits(backend.read(s_acc, in_flight=int(self.work.a)))
            if masked:
                logits = self.hide(refs, rows, stage, first_column, logits)
            p = jnp.exp2(logits - value(rows.lse, refs.lses))

            def add(*accs):
                if self.work.b:
                    backend.wgmma(accs[-1], p.astype(y.dtype), y)
                if self.work.a:
                    dp = backend.read(dp_acc, in_flight=int(self.work.b))
                    ds = p * (dp - value(rows.delta, refs.deltas))
                    ds = ds if slope is None else ds * slope
                    backend.wgmma(accs[0], ds.astype(x.dtype), x)

            return backend.carried(add, *sums)

        sums = backend.scoped(step, *[shape] * (1 + self.work.a))
        backend.release(refs.free.at[stage])
        return sums

    def logits(self, s):
        """The logits in base 2, and their derivative where there is a soft cap."""
        cap, scale = self.options.soft_cap, self.options.scale
        if cap is None:
            return s * (scale * LOG2E), None
        # The hardware's own tanh is right to 11 bits only.
        tanh = 1.0 - 2.0 / (1.0 + jnp.exp2(s * (2.0 * LOG2E * scale / cap)))
        return tanh * (cap * LOG2E), 1.0 - tanh * tanh

    def rows(self, refs: _Refs, place: _Place, first_row) -> _Rows:
        def load(ref):
            return plgpu.load(ref, layout=ROW, optimized=False)

        lse = delta = ids = None
        if not self.work.keys_stay:
            lse = load(refs.lse.at[place.batch, place.head, pl.ds(first_row, ROWS)])
            delta = load(refs.delta.at[place.batch, place.head, pl.ds(first_row, ROWS)])
        if self.packed:
            ids = load(refs.row_ids.at[place.batch, pl.ds(first_row, ROWS)])
        band = self.options.band
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW) + first_row
        left, right = band.left, band.right
        if left is None and right is None:
            offset = 0
        else:
            offset = refs.offset[place.batch] if band.offset is None else band.offset
        if self.work.keys_stay:
            left, right, offset = right, left, -offset
        low = None if left is None else row + (offset - left)
        high = None if right is None else row + (offset + right)
        if self.pads_keys(refs):
            last = jnp.full_like(row, self.keys - 1)
            high = last if high is None else jnp.minimum(high, last)
        return _Rows(lse, delta, ids, low, high)

    def hide(self, refs: _Refs, rows: _Rows, stage, first_column, logits):
        """Puts what the mask forbids at -inf."""
        column = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=WGMMA) + first_column
        over_columns = lambda x: lax.broadcast_in_dim(x, logits.shape, [0])
        if rows.low is not None:
            logits = jnp.where(column >= over_columns(rows.low), logits, -jnp.inf)
        if rows.high is not None:
            logits = jnp.where(column <= over_columns(rows.high), logits, -jnp.inf)
        if self.packed:
            ids = plgpu.load(refs.ids.at[stage], layout=COLUMN)
            ids = lax.broadcast_in_dim(ids, logits.shape, [1])
            logits = jnp.where(over_columns(rows.ids) == ids, logits, -jnp.inf)
        return logits

    def pads_keys(self, refs: _Refs) -> bool:
        return not self.work.keys_stay and refs.pass_x.shape[1] > self.keys

    def has_edge(self, refs: _Refs) -> bool:
        band = self.options.band
        return band.left is not None or band.right is not None or self.packed or self.pads_keys(refs)

    def first_column(self, place: _Place, n):
        return schedule.nth_block(place.blocks, n) * self.tiles.columns
