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

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import backend
from pallas_kernels.attention import tiles as table
from pallas_kernels.attention.mask import MaskArrays, count_pairs
from pallas_kernels.attention.mosaic_forward import LOG2_E, logits, pad
from pallas_kernels.attention.schedule import edge_count, key_blocks, nth_block, query_blocks
from pallas_kernels.attention.xla import Options

ROW, COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
ROWS = 64  # of a consumer's part of the tile: M of wgmma
UNIT = 64  # head sizes are padded to a multiple: a row of the 128-byte swizzle
SHARED_MEMORY = 226 * 1024  # of a program on Hopper, less the barriers
REGISTERS = 192  # of a consumer's thread, for gradients and logits; it has 240
LARGEST_HEAD = 192  # with 256 the sums of dQ alone spill


@dataclass(frozen=True)
class Work:
    """Which kernel: the side that stays, and which of its gradients are wanted."""

    keys_stay: bool
    a: bool  # of q or k
    b: bool  # of v

    @property
    def name(self) -> str:
        return "attention_d" + ("k" * self.a + "v" * self.b if self.keys_stay else "q")


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


def choose(
    depth: int, value_depth: int, *, soft_cap: bool, mask: str | None = None
) -> dict[Work, Tiles]:
    """The kernels for padded head sizes and a kind of mask (`tiles.kind`), and their tiles.

    From the table; without a row, the widest blocks that fit into registers.
    """
    together = _registers(DKV, depth, value_depth, 64, soft_cap) <= REGISTERS
    works = (DQ, DKV) if together else (DQ, DK, DV)
    masks = (mask,) if soft_cap else (mask, table.ANY)  # a cap needs registers of its own
    found = {work: table.find(work.name, depth, value_depth, *masks) for work in works}
    return {
        work: Tiles(**row) if row else _tiles(work, depth, value_depth, soft_cap)
        for work, row in found.items()
    }


def _tiles(work: Work, depth: int, value_depth: int, soft_cap: bool) -> Tiles:
    wide = not work.keys_stay and _registers(work, depth, value_depth, 128, soft_cap) <= REGISTERS
    columns = 128 if wide else 64
    row = 2 * (depth + value_depth)
    stages = (SHARED_MEMORY - 2 * ROWS * row) // (columns * (row + 12))
    return Tiles(columns, min(stages, 4))


def _registers(work: Work, depth: int, value_depth: int, columns: int, soft_cap: bool) -> int:
    """Of a thread: for gradients, S, dP and what the derivative of the cap needs."""
    tiles = work.a * depth + work.b * value_depth + columns * (1 + work.a + soft_cap)
    return tiles * ROWS // 128


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

    Raises:
      NotImplementedError: heads larger than `LARGEST_HEAD`.
    """
    if max(q.shape[3], v.shape[3]) > LARGEST_HEAD:
        raise NotImplementedError(
            f"got q {q.shape}, v {v.shape}; the kernels take heads of up to {LARGEST_HEAD}"
        )
    sizes = q.shape[3], k.shape[3], v.shape[3]
    q, k, v, dout = (pad(x, 3, UNIT) for x in (q, k, v, dout))
    gradients = []
    capped, kind = options.soft_cap is not None, table.kind(options, mask)
    for work, tiles in choose(q.shape[3], v.shape[3], soft_cap=capped, mask=kind).items():
        gradients += run(work, tiles, options, q, k, v, dout, mask, lse, delta)
    dq, dk, dv = (x[..., :size] for x, size in zip(gradients, sizes, strict=True))
    return dq, dk, dv


def run(
    work: Work, tiles: Tiles, options: Options, q, k, v, dout, mask: MaskArrays, lse, delta
) -> list[Array]:
    """One kernel, on head sizes that are multiples of 64; arguments as for `backward`."""
    queries, keys = q.shape[1], k.shape[1]
    q_block, k_block = tiles.rows, tiles.columns
    if work.keys_stay:
        q_block, k_block = k_block, q_block
    blocks_of = query_blocks if work.keys_stay else key_blocks
    blocks = blocks_of(options.band, mask, queries, keys, q_block, k_block)
    # A query that sees nothing, and one of the padding, has P = exp2(S - inf) = 0.
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2_E).swapaxes(1, 2)
    lse = jnp.pad(lse, ((0, 0), (0, 0), (0, -queries % q_block)), constant_values=jnp.inf)
    delta = pad(delta.swapaxes(1, 2), 2, q_block)
    q_side, k_side = (
        [x if x is None else pad(x, 1, block) for x in side]
        for side, block in (
            ((q, dout, mask.q_segments), q_block),
            ((k, v, mask.k_segments), k_block),
        )
    )
    stay, passing = (k_side, q_side) if work.keys_stay else (q_side, k_side)
    # S; dP with the gradient of q or k; and a product for each gradient.
    depth, value_depth = q.shape[3], v.shape[3]
    products = depth + work.a * (value_depth + depth) + work.b * value_depth
    pairs = q.shape[0] * q.shape[2] * count_pairs(options.band, queries, keys)
    kernel = _Kernel(
        work, tiles, options, q.shape[2] // k.shape[2], keys, flops=2 * products * pairs
    )
    out = kernel(blocks, mask.offset, *stay, *passing, lse, delta)
    return [x[:, : keys if work.keys_stay else queries] for x in out]


class _Refs(NamedTuple):
    """What a kernel gets, apart from where its results go."""

    # Global memory.
    blocks: Any  # of schedule.py
    offset: Any  # [B], or None
    stay_a: Any  # [B, length, heads, size]
    stay_b: Any
    row_ids: Any  # segments [B, length], or None
    pass_x: Any
    pass_y: Any
    column_ids: Any
    lse: Any  # [B, H, T]
    delta: Any
    # Shared memory; vectors are None where a kernel has none for each column.
    a: Any  # [consumers, 64, size]
    b: Any
    x: Any  # [stages, columns, size]
    y: Any
    x_ids: Any  # [stages, columns]
    x_lse: Any
    y_delta: Any
    # Barriers: for each consumer, and the rest for each stage.
    ab_here: Any
    x_here: Any  # with its vectors
    y_here: Any
    free: Any


SCRATCH = len(_Refs._fields) - _Refs._fields.index("a")


class _Place(NamedTuple):
    """What a warpgroup is for: 64 rows of a tile of one head in a row of the batch."""

    row: Any
    head: Any
    tile: Any
    me: Any  # which warpgroup
    rows: Any  # a slice


@dataclass(frozen=True)
class _Kernel:
    work: Work
    tiles: Tiles
    options: Options
    groups: int  # query heads of a key/value head
    keys: int  # without padding
    flops: int

    def __call__(self, blocks, offset, stay_a, stay_b, row_ids, *rest) -> list[Array]:
        stages, columns, consumers = self.tiles.stages, self.tiles.columns, self.tiles.consumers
        dtype, by_column, packed = stay_a.dtype, self.work.keys_stay, row_ids is not None
        depths = stay_a.shape[3], stay_b.shape[3]
        layout = plgpu.TilingTransform((8, UNIT)), plgpu.SwizzleTransform(128)

        def tiled(*shape):
            return plgpu.SMEM(shape, dtype, transforms=layout)

        def vectors(exist, dtype):
            return plgpu.SMEM((stages, columns), dtype) if exist else None

        def barriers(count, arrivals):
            return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)

        batch, length, heads = stay_a.shape[:3]
        out = [jax.ShapeDtypeStruct(x.shape, dtype) for x in self.wanted(stay_a, stay_b)]
        return plgpu.kernel(
            self.body,
            out_type=out,
            # One grid axis: it becomes the first of CUDA's, the only one without a limit of 65535.
            grid=(batch * heads * (length // self.tiles.rows),),
            grid_names=("program",),
            num_threads=consumers + 1,
            thread_name="warpgroup",
            scratch_types=[
                *(tiled(consumers, ROWS, size) for size in depths),
                *(tiled(stages, columns, size) for size in depths),
                vectors(packed, jnp.int32),
                vectors(by_column, jnp.float32),
                vectors(by_column and self.work.a, jnp.float32),
                barriers(consumers, 2),
                barriers(stages, 1 + by_column + packed),
                barriers(stages, 1 + (by_column and self.work.a)),
                barriers(stages, consumers),
            ],
            compiler_params=plgpu.CompilerParams(
                approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
            ),
            kernel_name=self.work.name,
            **backend.cost(self.flops, stay_a, stay_b, rest, out),
        )(blocks, offset, stay_a, stay_b, row_ids, *rest)

    def wanted(self, a, b) -> list:
        """Those of a pair whose gradient is asked for."""
        return [a] * self.work.a + [b] * self.work.b

    def body(self, *refs):
        operands = len(_Refs._fields) - SCRATCH
        outs = refs[operands:-SCRATCH]
        refs = _Refs(*refs[:operands], *refs[-SCRATCH:])
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup == self.tiles.consumers)(lambda: self.produce(refs))
        pl.when(warpgroup < self.tiles.consumers)(lambda: self.consume(refs, outs))

    def place(self, refs: _Refs) -> _Place:
        """Computed where it is needed: kept, it would take registers that the matmuls need."""
        axes = "program", "warpgroup"
        program, me = (lax.optimization_barrier(lax.axis_index(axis)) for axis in axes)
        tiles, heads = jnp.int32(refs.blocks.shape[1]), jnp.int32(refs.stay_a.shape[2])
        tile = lax.rem(program, tiles)
        if not self.work.keys_stay:
            tile = tiles - 1 - tile  # as for keys, tiles that see much under a causal mask first
        head = lax.rem(lax.div(program, tiles), heads)
        rows = pl.ds(tile * self.tiles.rows + me * ROWS, ROWS)
        return _Place(lax.div(program, tiles * heads), head, tile, me, rows)

    def blocks(self, refs: _Refs, place: _Place) -> tuple:
        """What the program visits: start, stop, full_start, full_stop."""
        row = place.row if refs.blocks.shape[0] > 1 else 0
        return tuple(refs.blocks[row, place.tile, i] for i in range(4))

    def produce(self, refs: _Refs):
        """Loads the blocks that pass, head by head, as stages become free."""
        plgpu.set_max_registers(24, action="decrease")
        place = self.place(refs)
        blocks = self.blocks(refs, place)
        stages, count = jnp.int32(self.tiles.stages), blocks[1] - blocks[0]

        def load(i, _):
            stage, visit = lax.rem(i, stages), lax.rem(i, count)
            if self.work.keys_stay:
                head = place.head * self.groups + lax.div(i, count)
            else:
                head = lax.div(place.head, jnp.int32(self.groups))
            at = pl.ds(self.first_column(blocks, visit), self.tiles.columns)

            def fetch(source, target, barrier):
                plgpu.copy_gmem_to_smem(source, target.at[stage], barrier.at[stage])

            pl.when(i >= stages)(lambda: plgpu.barrier_wait(refs.free.at[stage]))
            fetch(refs.pass_x.at[place.row, at, head], refs.x, refs.x_here)
            if refs.x_lse is not None:
                fetch(refs.lse.at[place.row, head, at], refs.x_lse, refs.x_here)
            if refs.x_ids is not None:
                fetch(refs.column_ids.at[place.row, at], refs.x_ids, refs.x_here)
            fetch(refs.pass_y.at[place.row, at, head], refs.y, refs.y_here)
            if refs.y_delta is not None:
                fetch(refs.delta.at[place.row, head, at], refs.y_delta, refs.y_here)

        lax.fori_loop(0, count * (self.groups if self.work.keys_stay else 1), load, None)

    def consume(self, refs: _Refs, outs):
        """Sums the gradients of 64 rows over all that passes, and stores them."""
        plgpu.set_max_registers(240, action="increase")
        place = self.place(refs)
        a, b, here = (ref.at[place.me] for ref in (refs.a, refs.b, refs.ab_here))
        plgpu.copy_gmem_to_smem(refs.stay_a.at[place.row, place.rows, place.head], a, here)
        plgpu.copy_gmem_to_smem(refs.stay_b.at[place.row, place.rows, place.head], b, here)
        lse = delta = None
        if not self.work.keys_stay:
            lse = _load_rows(refs.lse.at[place.row, place.head, place.rows])
            delta = _load_rows(refs.delta.at[place.row, place.head, place.rows])
        plgpu.barrier_wait(here)
        meet = partial(self.meet, refs, a, b, lse, delta)

        def meet_head(_, state):
            if self.may_mask(refs):
                place = self.place(refs)
                blocks, visible = self.blocks(refs, place), self.visible(refs, place)

                def meet_edge(n, state):
                    first = self.first_column(blocks, n)
                    return meet(partial(self.hide, refs, first, *visible), *state)

                state = lax.fori_loop(0, edge_count(blocks), meet_edge, state)
                _, _, start, stop = self.blocks(refs, self.place(refs))
            else:  # what is not full holds padding of this side only
                start, stop, _, _ = self.blocks(refs, self.place(refs))
            # From 0: under shard_map the bounds vary over devices, a loop's index may not.
            return lax.fori_loop(0, stop - start, lambda _, state: meet(None, *state), state)

        zeros = [jnp.zeros(x.shape, jnp.float32) for x in self.wanted(a, b)]
        sums = tuple(plgpu.layout_cast(x, plgpu.Layout.WGMMA) for x in zeros)
        state = jnp.int32(0), sums
        if self.work.keys_stay and self.groups > 1:
            _, sums = lax.fori_loop(0, self.groups, meet_head, state)
        else:
            _, sums = meet_head(0, state)

        place = self.place(refs)
        # Nobody needs a and b any more: their memory takes the results.
        results = self.wanted(refs.a.at[place.me], refs.b.at[place.me])
        for sum_, factor, smem in zip(sums, self.wanted(self.options.scale, 1.0), results):
            smem[...] = (sum_ * factor).astype(smem.dtype)
        plgpu.commit_smem()
        for smem, out in zip(results, outs, strict=True):
            plgpu.copy_smem_to_gmem(smem, out.at[place.row, place.rows, place.head])
        plgpu.wait_smem_to_gmem(0)

    def meet(self, refs: _Refs, a, b, lse, delta, hide, i, sums):
        """Adds what the block of visit `i` gives to the gradients; returns the next visit, sums."""
        stage = lax.rem(i, jnp.int32(self.tiles.stages))
        x, y = refs.x.at[stage], refs.y.at[stage]
        shape = ROWS, self.tiles.columns

        def spread(row_vector, column_vectors):
            if row_vector is not None:
                return lax.broadcast_in_dim(row_vector, shape, [0])
            return _over_rows(plgpu.load(column_vectors.at[stage], layout=COLUMN), shape)

        def step(s_acc, dp_acc=None):
            plgpu.barrier_wait(refs.x_here.at[stage])
            backend.wgmma(s_acc, a, x.T)
            plgpu.barrier_wait(refs.y_here.at[stage])
            if self.work.a:
                backend.wgmma(dp_acc, b, y.T)
            s, factor = logits(self.options, backend.read(s_acc, in_flight=int(self.work.a)))
            shown = s if hide is None else hide(stage, s)
            p = jnp.exp2(shown * factor - spread(lse, refs.x_lse))
            # With a cap s is the tanh; its derivative joins P here, so that s need not stay.
            slope = p if self.options.soft_cap is None else p * (1.0 - s * s)

            def add(*accs):
                if self.work.b:
                    backend.wgmma(accs[-1], p.astype(y.dtype), y)
                if self.work.a:
                    dp = backend.read(dp_acc, in_flight=int(self.work.b))
                    ds = slope * (dp - spread(delta, refs.y_delta))
                    backend.wgmma(accs[0], ds.astype(x.dtype), x)

            return backend.carried(add, *sums)

        sums = backend.scoped(step, *[shape] * (1 + self.work.a))
        plgpu.barrier_arrive(refs.free.at[stage])
        return i + 1, sums

    def visible(self, refs: _Refs, place: _Place) -> tuple:
        """By the band the first and last column that each of 64 rows sees, and its segment.

        Vectors for the rows: to compare two tiles of indices keeps one of them in registers.
        """
        band = self.options.band
        left, right, offset = band.left, band.right, band.offset
        if offset is None:
            offset = refs.offset[place.row]
        if self.work.keys_stay:
            left, right, offset = right, left, -offset

        def row_plus(shift):
            return plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW) + shift

        low = None if left is None else row_plus(place.rows.start + offset - left)
        high = None if right is None else row_plus(place.rows.start + offset + right)
        if self.pads_keys():
            last = plgpu.layout_cast(jnp.full((ROWS,), self.keys - 1, jnp.int32), ROW)
            high = last if high is None else jnp.minimum(high, last)
        ids = None if refs.row_ids is None else _load_rows(refs.row_ids.at[place.row, place.rows])
        return low, high, ids

    def hide(self, refs: _Refs, first_column, low, high, row_ids, stage, s):
        """Puts the pairs that the mask forbids at -inf."""
        column = lax.broadcasted_iota(jnp.int32, s.shape, 1) + first_column
        if low is not None:
            s = jnp.where(column >= lax.broadcast_in_dim(low, s.shape, [0]), s, -jnp.inf)
        if high is not None:
            s = jnp.where(column <= lax.broadcast_in_dim(high, s.shape, [0]), s, -jnp.inf)
        if row_ids is not None:
            column_ids = _over_rows(plgpu.load(refs.x_ids.at[stage], layout=COLUMN), s.shape)
            same = lax.broadcast_in_dim(row_ids, s.shape, [0]) == column_ids
            s = jnp.where(same, s, -jnp.inf)
        return s

    def pads_keys(self) -> bool:
        """Whether padding passes as keys. That which stays gets gradients that are cut off."""
        return not self.work.keys_stay and self.keys % self.tiles.columns != 0

    def may_mask(self, refs: _Refs) -> bool:
        band = self.options.band
        some_band = band.left is not None or band.right is not None
        return some_band or refs.row_ids is not None or self.pads_keys()

    def first_column(self, blocks: tuple, n):
        return nth_block(blocks, n) * self.tiles.columns


def _load_rows(ref):
    return plgpu.load(ref, layout=ROW, optimized=False)


def _over_rows(vector, shape):
    return lax.broadcast_in_dim(vector, shape, [1])
