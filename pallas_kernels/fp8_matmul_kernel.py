"""The kernel of `fp8_matmul` on Hopper: one Mosaic GPU kernel for all its scales.

A block of the grid has three warpgroups and computes tiles of 256 x 128, one after the other:

- the producer brings 128 of K of both operands, and scales, through TMA into a ring of shared
  memory, and runs ahead into the next tile while this one is still being written;
- each of two consumers holds 128 x 128 of the sum and multiplies 64 rows at a time, into an
  accumulator that begins at zero. They take turns in issuing, so that one scales and adds in
  registers while the other's product is made.

No larger tile fits: of a thread's registers the sum takes 128, the product in flight 64. A tile
reads 48 KiB for 8.4 MFLOP, 171 FLOP a byte, and an H200 wants 412 of its memory for FP8. So the
order of tiles matters: those computed at the same time form a square as nearly as they can, and
the second-level cache serves all but the first reading of their rows and columns (`traffic`).

What could be better: clusters of blocks that share a load (1.5 times fewer reads of the cache),
and writing a tile while the next is multiplied.

Shape suffixes: M, N rows and columns of the product, K contracted; k = K / 128, n = N / 128.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import backend

BLOCK = 128  # of K, between two scales; of N and K, in a block of `b`
ROWS, PARTS, CONSUMERS = 64, 2, 2  # of a wgmma; wgmmas of a consumer; warpgroups that compute
TILE_M, TILE_N = CONSUMERS * PARTS * ROWS, BLOCK
STAGES = 3  # of the ring, each with 128 of K
CORES = 132  # of a Hopper GPU; as many blocks of the grid share the tiles
GROUP = 8  # tiles below one another that are computed together: 8 x 16.5 are about a square
ROW, COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

BLOCKS, TILES, TENSOR = "blocks", "tiles", "tensor"  # what a scale of `b` is for


class _Static(NamedTuple):
    scales: str
    grid: tuple[int, int]  # rows and columns of tiles
    steps: int  # of 128 of K
    out_dtype: Any

    @property
    def programs(self) -> int:
        """Blocks of the grid."""
        return min(CORES, math.prod(self.grid))


def matmul(
    scales: str,
    out_dtype: Any,
    a: Float[Array, "M K"],
    b: Float[Array, "N K"],
    a_scale: Float[Array, "..."],
    b_scale: Float[Array, "_ _"] | None = None,
) -> Float[Array, "M N"]:
    """`a @ b.T` scaled; padded to whole tiles on the way in, and cut on the way out.

    Args:
      scales: `BLOCKS` or `TILES`: a_scale is [M, k], b_scale [n, k] or [N, k]. `TENSOR`: a_scale
        is [], for both operands.
      out_dtype: of the result.
      a, b: FP8.
      a_scale, b_scale: float32.

    Returns:
      The product.
    """
    M, N, K = a.shape[0], b.shape[0], a.shape[1]
    a, b = pad(a, TILE_M, BLOCK), pad(b, TILE_N, BLOCK)
    # Turned, so that the scales of a step are one box for TMA.
    a_scale = a_scale[None] if scales == TENSOR else pad(a_scale, TILE_M, 1).T
    if scales == TILES and b_scale is not None:
        b_scale = pad(b_scale, TILE_N, 1).T
    static = _Static(scales, grid(M, N), a.shape[1] // BLOCK, out_dtype)
    out = jax.ShapeDtypeStruct((a.shape[0], b.shape[0]), out_dtype)

    def tiled(dtype, *dims):  # rows of 128 bytes, as TMA and wgmma want them
        width = 128 // jnp.dtype(dtype).itemsize
        layout = plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(128)
        return plgpu.SMEM(dims, dtype, transforms=layout)

    rows, columns = (plgpu.SMEM((STAGES, tile), jnp.float32) for tile in (TILE_M, TILE_N))
    loads = {BLOCKS: 3, TILES: 4, TENSOR: 2}[scales]  # of a step
    scratch: dict[str, Any] = {
        "a_smem": tiled(a.dtype, STAGES, TILE_M, BLOCK),
        "b_smem": tiled(b.dtype, STAGES, TILE_N, BLOCK),
        "rows_smem": None if scales == TENSOR else rows,
        "columns_smem": columns if scales == TILES else None,
        "out_smem": tiled(out_dtype, CONSUMERS, ROWS, TILE_N),
        "full": plgpu.Barrier(num_arrivals=loads, num_barriers=STAGES),
        "free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=STAGES),
        "turn": plgpu.Barrier(num_arrivals=1, num_barriers=CONSUMERS),
    }
    return plgpu.kernel(
        partial(_kernel, static),
        out_type=out,
        scratch_types=scratch,
        grid=(static.programs,),
        grid_names=("program",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="fp8_matmul",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        **backend.cost(2 * M * N * K, a, b, a_scale, b_scale, out),
    )(a, b, a_scale, b_scale)[:M, :N]


def pad(x: Array, *units: int) -> Array:
    """Pads each dim with zeros to a multiple of its unit."""
    missing = [-size % unit for size, unit in zip(x.shape, units, strict=True)]
    return jnp.pad(x, [(0, m) for m in missing]) if any(missing) else x


def grid(M: int, N: int) -> tuple[int, int]:
    """Rows and columns of tiles."""
    return -(-M // TILE_M), -(-N // TILE_N)


def place(grid: tuple[int, int], tile: Any) -> tuple[Array, Array]:
    """Row and column of the n-th tile: `GROUP` tiles down, then one to the right."""
    group, inside = (op(tile, jnp.int32(GROUP * grid[1])) for op in (lax.div, lax.rem))
    height = jnp.minimum(grid[0] - group * GROUP, GROUP)
    return group * GROUP + lax.rem(inside, height), lax.div(inside, height)


def traffic(
    M: int,
    N: int,
    K: int,
    *,
    scales: str = BLOCKS,
    out_dtype: Any = jnp.float32,
    cached: bool = False,
) -> int:
    """Bytes that the kernel's loads and stores move, from its tiles.

    Not counted: the scales of blocks, one float32 for a tile's 128 of K.

    Args:
      M, N, K: of the product, without padding.
      scales: `BLOCKS`, `TILES` or `TENSOR`.
      out_dtype: of the result.
      cached: *modelled*: what reaches device memory if the tiles that are computed at the same
        time read each of their rows and columns once.

    Example:
      >>> tile = 32 * (256 + 128) * 128 + 4 * 32 * 256  # operands and scales of rows
      >>> traffic(4096, 4096, 4096) == 512 * tile + 4 * 4096**2
      True
    """
    across, steps = grid(M, N), -(-K // BLOCK)
    tiles = math.prod(across)
    rows = columns = tiles
    if cached:
        places = [[int(x) for x in place(across, jnp.int32(i))] for i in range(tiles)]
        waves = [places[i : i + CORES] for i in range(0, tiles, CORES)]
        rows, columns = (sum(len({tile[d] for tile in wave}) for wave in waves) for d in (0, 1))
    row = BLOCK + 4 * (scales != TENSOR)  # bytes of 128 of K
    column = BLOCK + 4 * (scales == TILES)
    loads = steps * (rows * TILE_M * row + columns * TILE_N * column)
    return loads + tiles * TILE_M * TILE_N * jnp.dtype(out_dtype).itemsize


def _kernel(
    static, a, b, a_scale, b_scale, out,
    *, a_smem, b_smem, rows_smem, columns_smem, out_smem, full, free, turn,
):  # fmt: skip
    warpgroup, program = lax.axis_index("warpgroup"), lax.axis_index("program")
    steps, programs = static.steps, static.programs
    rounds = lax.div(math.prod(static.grid) - program + (programs - 1), jnp.int32(programs))

    @pl.when(warpgroup == CONSUMERS)
    def produce():
        plgpu.set_max_registers(40, action="decrease")

        def load(i, _):
            m, n = place(static.grid, program + lax.div(i, jnp.int32(steps)) * programs)
            k, slot = lax.rem(i, jnp.int32(steps)), lax.rem(i, jnp.int32(STAGES))
            rows, columns = pl.ds(m * TILE_M, TILE_M), pl.ds(n * TILE_N, TILE_N)
            inner = pl.ds(k * BLOCK, BLOCK)
            pl.when(i >= STAGES)(lambda: plgpu.barrier_wait(free.at[slot]))
            plgpu.copy_gmem_to_smem(a.at[rows, inner], a_smem.at[slot], full.at[slot])
            plgpu.copy_gmem_to_smem(b.at[columns, inner], b_smem.at[slot], full.at[slot])
            if static.scales != TENSOR:
                plgpu.copy_gmem_to_smem(a_scale.at[k, rows], rows_smem.at[slot], full.at[slot])
            if static.scales == TILES:
                plgpu.copy_gmem_to_smem(
                    b_scale.at[k, columns], columns_smem.at[slot], full.at[slot]
                )

        def drain(i, _):
            plgpu.barrier_wait(free.at[lax.rem(i, jnp.int32(STAGES))])

        total = rounds * steps
        lax.fori_loop(0, total, load, None)
        # No phase of a barrier may be left unseen, and ptxas spills if consumers arrive or not.
        lax.fori_loop(jnp.maximum(total, STAGES), total + STAGES, drain, None)

    @pl.when(warpgroup < CONSUMERS)
    def consume():
        plgpu.set_max_registers(232, action="increase")
        pl.when(warpgroup == 1)(lambda: plgpu.barrier_arrive(turn.at[0]))
        mine = [pl.ds((warpgroup * PARTS + part) * ROWS, ROWS) for part in range(PARTS)]

        def product(slot, rows):
            def body(acc):
                backend.wgmma(acc, a_smem.at[slot, rows], b_smem.at[slot].T)
                plgpu.barrier_arrive(turn.at[1 - warpgroup])
                return backend.read(acc)

            plgpu.barrier_wait(turn.at[warpgroup])
            return backend.scoped(body, (ROWS, TILE_N))

        def add(total, slot, rows, block_scale):
            """The sum with the next product. Scales of rows are there before the product is."""
            if static.scales == TENSOR:
                return total + product(slot, rows)
            scale = plgpu.load(rows_smem.at[slot, rows], layout=ROW)
            if static.scales == BLOCKS:
                scale = scale * block_scale
            x = product(slot, rows) * lax.broadcast_in_dim(scale, total.shape, [0])
            if static.scales == TILES:
                columns = plgpu.load(columns_smem.at[slot], layout=COLUMN)
                x = x * lax.broadcast_in_dim(columns, total.shape, [1])
            return total + x

        def tile(round_, _):
            m, n = place(static.grid, program + round_ * programs)

            def step(k, sums):
                i = round_ * steps + k
                slot = lax.rem(i, jnp.int32(STAGES))
                # Asked for before the wait, and there when it is over.
                block_scale = b_scale[n, k] if static.scales == BLOCKS else None
                plgpu.barrier_wait(full.at[slot])
                # Or LLVM would add only at the end of the step, with both products alive.
                sums = tuple(
                    lax.optimization_barrier(add(total, slot, rows, block_scale))
                    for total, rows in zip(sums, mine, strict=True)
                )
                if static.scales != TENSOR:
                    plgpu.commit_smem()  # or TMA may write over scales still being read
                plgpu.barrier_arrive(free.at[slot])
                return sums

            zeros = plgpu.layout_cast(jnp.zeros((ROWS, TILE_N), jnp.float32), plgpu.Layout.WGMMA)
            sums = lax.fori_loop(0, steps, step, (zeros,) * PARTS)
            for part, total in enumerate(sums):
                if static.scales == TENSOR:
                    total = total * a_scale[0]
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out_smem[warpgroup] = total.astype(static.out_dtype)
                plgpu.commit_smem()
                rows = pl.ds(m * TILE_M + (warpgroup * PARTS + part) * ROWS, ROWS)
                plgpu.copy_smem_to_gmem(
                    out_smem.at[warpgroup], out.at[rows, pl.ds(n * TILE_N, TILE_N)]
                )

        lax.fori_loop(0, rounds, tile, None)
        pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(turn.at[0]))
        plgpu.wait_smem_to_gmem(0)
