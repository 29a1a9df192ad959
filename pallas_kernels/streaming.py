"""The frame of kernels that do little with each byte: rows through shared memory and back.

A norm or an activation is as fast as memory, if enough of it is in flight and none of it is
read twice. So a block stays on its core for the whole array, and each of its warpgroups is a
pipeline of its own, without a word to the others: it takes every so many-th row, has the next
rows brought by TMA into a ring of buffers, computes one in place, and has it written back
while it turns to the next. What all rows share (a norm's scale) is read once a block.

A row is [C, 128], C lines of 128 elements: then one TMA box holds it (at most 256 elements a
dimension), and its elements lie across the 128 threads of a warpgroup. Rows of other lengths
are padded. Kernels go through a row in chunks of up to 16 lines, 16 registers of float32 each.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels import backend, manual_axes

LINE = 128
CHUNK = 16  # lines
CORES = 132  # of an H100 or H200; where there are fewer, the last blocks wait for the first
_SHARED = 227 * 1024 - 8 * 1024  # but for barriers and what reductions take
_MOST_WARPGROUPS, _MOST_STAGES = 4, 4


@dataclass(frozen=True)
class Plan:
    """Sizes of a kernel: its grid, warpgroups of a block, buffers of each."""

    blocks: int
    warpgroups: int
    stages: int

    @property
    def workers(self) -> int:
        """Warpgroups of the grid."""
        return self.blocks * self.warpgroups

    @property
    def fits(self) -> bool:
        """Whether there is a buffer to compute in and one to load into."""
        return self.stages > 1


@dataclass(frozen=True)
class Output:
    """A result with rows. It takes the place of an input in shared memory, or has its own."""

    dtype: Any
    place: int | None = None  # which input's, of the same dtype
    overwrites: bool = False  # that input in memory, too; XLA copies what it needs longer


class Moved(NamedTuple):
    """Bytes that a kernel moves between memory and its cores."""

    loads: int  # by TMA
    stores: int
    others: int = 0  # a number a row, one of a warpgroup

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


def padded(length: int) -> int:
    """The length that a row takes: whole lines, in chunks of more than a line if it is long."""
    unit = LINE if length < 4 * LINE else 2 * LINE
    return max(1, -(-length // unit)) * unit


def plan(rows: int, row_bytes: int, block_bytes: int) -> Plan:
    """As many warpgroups and buffers as fit and are of use.

    Args:
      rows: of the array.
      row_bytes: of one buffer: a row's inputs, and outputs that take no input's place.
      block_bytes: of what else is in a block's shared memory.

    Returns:
      The sizes, which need not fit.
    """
    buffers = (_SHARED - block_bytes) // row_bytes
    warpgroups = min(_MOST_WARPGROUPS, max(1, buffers // 3))
    stages = min(_MOST_STAGES, buffers // warpgroups)
    return Plan(min(CORES, -(-rows // warpgroups)), warpgroups, stages)


def chunks(columns: int) -> list[Any]:
    """Slices that part the lines of a row of so many elements."""
    lines = columns // LINE
    size = math.gcd(lines, CHUNK)
    return [pl.ds(start, size) for start in range(0, lines, size)]


def lined(x: Array, columns: int) -> Array:
    """[..., D] -> [..., C, 128], padded with zeros to `columns` elements."""
    missing = columns - x.shape[-1]
    if missing:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    return x.reshape(*x.shape[:-1], columns // LINE, LINE)


def stream(
    compute: Callable,
    rows: Sequence[Array],
    outputs: Sequence[Output],
    sizes: Plan,
    *,
    shared: Sequence[Array] = (),
    numbers: Sequence[Array] = (),
    extra: Sequence[jax.ShapeDtypeStruct] = (),
    state: Callable[[], Any] = tuple,
    finish: Callable | None = None,
    scratch: Sequence[Any] = (),
) -> list[Array]:
    """Calls `compute` on each row.

    Args:
      compute: `(state, row, inputs, outputs, shared, numbers, extra) -> state`. `row` is its
        index; inputs, outputs and shared are references [C, 128] in shared memory, where an
        output may be an input; numbers are read, extra is references to the results below.
      rows: each [N, C, 128], N at least 1; or [N, ...], a row at most 256 each way, and a
        multiple of 16 bytes.
      outputs: each of the shape of the rows whose place it takes, or else of the first.
      sizes: from `plan`.
      shared: each [C, 128], the same for all rows.
      numbers: [N], of which a row gets its own, or [1]; or [1, K], of which it gets a list.
      extra: other results, which `compute` and `finish` write, element by element.
      state: makes what a warpgroup carries from row to row, in registers.
      finish: `(state, block, warpgroup, extra, scratch)`, called by each warpgroup at its end.
      scratch: shared memory and barriers for `finish`.

    Returns:
      The outputs, [N, C, 128], then the extra results.
    """
    count = len(rows[0])
    stages, workers = sizes.stages, sizes.workers
    own = [i for i, out in enumerate(outputs) if out.place is None]
    # Under `shard_map` kernels take no references to what varies (jax 0.12.0.1).
    in_place = not any(map(manual_axes.varying, rows))
    places = [out.place if out.overwrites and in_place else None for out in outputs]
    new = [out for out, place in zip(outputs, places, strict=True) if place is None]
    shape_of = lambda out: rows[out.place or 0].shape
    groups = tuple(map(len, (rows, shared, numbers, new, extra, rows, shared)))

    def body(*refs):
        refs = iter(refs)
        take = lambda n: [next(refs) for _ in range(n)]
        ins, shared_gmem, numbers_gmem, news, extra_gmem, buffers, shared_smem = map(take, groups)
        own_buffers, (full, ready), more = take(len(own)), take(2), list(refs)
        outs = [news.pop(0) if place is None else ins[place] for place in places]
        results = [
            own_buffers[own.index(i)] if out.place is None else buffers[out.place]
            for i, out in enumerate(outputs)
        ]
        block, me = lax.axis_index("block"), lax.axis_index("warpgroup")
        worker = block * sizes.warpgroups + me
        mine = lax.div(count + workers - 1 - worker, jnp.int32(workers))

        def place(i):
            return worker + i * workers, me * stages + lax.rem(i, jnp.int32(stages))

        def load(i):
            row, slot = place(i)
            for x, buffer in zip(ins, buffers, strict=True):
                plgpu.copy_gmem_to_smem(x.at[row], _of(buffer, slot, x), full.at[slot])

        @pl.when(me == 0)
        def load_shared():
            for x, smem in zip(shared_gmem, shared_smem, strict=True):
                plgpu.copy_gmem_to_smem(x, smem, ready.at[0])

        for i in range(stages):
            pl.when(i < mine)(partial(load, jnp.int32(i)))
        if shared:
            plgpu.barrier_wait(ready.at[0])

        def step(i, carry):
            row, slot = place(i)
            # While the row is on its way.
            values = [_numbers(ref, row, count) for ref in numbers_gmem]
            plgpu.barrier_wait(full.at[slot])
            inputs, out = (
                [_of(ref, slot, x) for ref, x in zip(some, of, strict=True)]
                for some, of in ((buffers, ins), (results, outs))
            )
            carry = compute(carry, row, inputs, out, shared_smem, values, extra_gmem)
            plgpu.commit_smem()
            for k, (ref, x) in enumerate(zip(out, outs, strict=True)):
                last = k == len(outs) - 1  # one group for all
                plgpu.copy_smem_to_gmem(ref, x.at[row], commit_group=last)

            @pl.when((i > 0) & (i - 1 + stages < mine))
            def refill():  # where the row before was, once that is on its way
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                load(i - 1 + stages)

            return carry

        carry = lax.fori_loop(0, mine, step, state())
        plgpu.wait_smem_to_gmem(0)
        if finish:
            finish(carry, block, me, extra_gmem, more)

    body.__name__ = compute.__name__
    slots = sizes.warpgroups * stages
    ring = lambda shape, dtype: plgpu.SMEM((slots, *_held(shape[1:], dtype)), dtype)
    out_types = [jax.ShapeDtypeStruct(shape_of(out), out.dtype) for out in new] + list(extra)
    operands: list[Any] = [jax.new_ref(x) if i in places else x for i, x in enumerate(rows)]
    written = out_types + [rows[place] for place in places if place is not None]
    made = plgpu.kernel(
        body,
        out_type=out_types,
        grid=(sizes.blocks,),
        grid_names=("block",),
        num_threads=sizes.warpgroups,
        thread_name="warpgroup",
        scratch_types=[
            *(ring(x.shape, x.dtype) for x in rows),
            *(plgpu.SMEM(x.shape, x.dtype) for x in shared),
            *(ring(shape_of(outputs[i]), outputs[i].dtype) for i in own),
            plgpu.Barrier(num_arrivals=len(rows), num_barriers=slots),
            plgpu.Barrier(num_arrivals=max(1, len(shared)), num_barriers=1),
            *scratch,
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        **backend.cost(0, rows, shared, numbers, written),
    )(*operands, *shared, *numbers)
    made = list(made)
    kept = [made.pop(0) if place is None else operands[place][...] for place in places]
    return kept + made


def _numbers(ref: Any, row: Any, count: int) -> Any:
    """What a row gets of a reference to numbers."""
    if len(ref.shape) == 2:
        return [ref[0, i] for i in range(ref.shape[1])]
    return ref[row if ref.shape[0] == count else 0]


def _held(row: tuple[int, ...], dtype: Any) -> tuple[int, ...]:
    """A row's shape in shared memory, where TMA wants each at a multiple of 128 bytes."""
    least = 128 // jnp.dtype(dtype).itemsize
    return row if math.prod(row) % least == 0 else (*row[:-1], -(-row[-1] // least) * least)


def _of(ring: Any, slot: Any, x: Any) -> Any:
    """The part of a slot that holds a row of `x`."""
    if ring.shape[1:] == x.shape[1:]:
        return ring.at[slot]
    return ring.at[slot, *(pl.ds(0, n) for n in x.shape[1:])]
