"""The worked example of README.md: a matmul that adds the residual before it stores.

`residual + x @ w` ends both halves of a transformer's layer; in one kernel, the product is
never written and read again. Legend: M tokens, K inputs, N outputs. A block computes a tile of
128 x 128: one warpgroup loads x and w into a ring of buffers, two multiply 64 rows each.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import backend

TILE, ROWS, INNER, STAGES = 128, 64, 64, 4  # of a block, a warpgroup, of K in a buffer; buffers


def linear_residual_reference(
    x: Float[Array, "M K"], w: Float[Array, "K N"], residual: Float[Array, "M N"]
) -> Float[Array, "M N"]:
    """`residual + x @ w`, summed in float32 and rounded once."""
    out = jnp.dot(x, w, preferred_element_type=jnp.float32) + residual.astype(jnp.float32)
    return out.astype(x.dtype)


def linear_residual(
    x: Float[Array, "M K"], w: Float[Array, "K N"], residual: Float[Array, "M N"]
) -> Float[Array, "M N"]:
    """`residual + x @ w` in one kernel, bfloat16; M and N multiples of 128, K of 64."""
    (M, K), N = x.shape, w.shape[1]
    fits = (w.shape, residual.shape) == ((K, N), (M, N)) and M % TILE == N % TILE == K % INNER == 0
    if not fits or {a.dtype for a in (x, w, residual)} != {jnp.dtype("bfloat16")}:
        got = ", ".join(f"{a.dtype}{list(a.shape)}" for a in (x, w, residual))
        raise ValueError(f"got {got}; need bfloat16 [M,K], [K,N], [M,N], M, N % 128 == K % 64 == 0")
    steps = K // INNER

    def body(x_gmem, w_gmem, residual_gmem, out_gmem, x_smem, w_smem, tile_smem, full, free, ready):
        rows, columns = (pl.ds(lax.axis_index(axis) * TILE, TILE) for axis in ("m", "n"))
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 2)
        def load():
            plgpu.set_max_registers(40, action="decrease")
            plgpu.copy_gmem_to_smem(residual_gmem.at[rows, columns], tile_smem, ready)

            def step(k, _):
                slot, inner = lax.rem(k, STAGES), pl.ds(k * INNER, INNER)
                pl.when(k >= STAGES)(lambda: plgpu.barrier_wait(free.at[slot]))
                plgpu.copy_gmem_to_smem(x_gmem.at[rows, inner], x_smem.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(w_gmem.at[inner, columns], w_smem.at[slot], full.at[slot])

            lax.fori_loop(0, steps, step, None)

        @pl.when(warpgroup < 2)
        def multiply():
            plgpu.set_max_registers(232, action="increase")
            mine = pl.ds(warpgroup * ROWS, ROWS)

            def step(k, acc):
                slot = lax.rem(k, STAGES)
                plgpu.barrier_wait(full.at[slot])
                acc = backend.accumulate(acc, x_smem.at[slot, mine], w_smem.at[slot])
                # As often as `load` waits: no phase of a barrier may be left unseen.
                pl.when(k < steps - STAGES)(lambda: plgpu.barrier_arrive(free.at[slot]))
                return acc

            acc = lax.fori_loop(0, steps, step, jnp.zeros((ROWS, TILE), jnp.float32))
            plgpu.barrier_wait(ready)
            tile_smem[mine] = (acc + tile_smem[mine].astype(jnp.float32)).astype(x.dtype)
            plgpu.commit_smem()  # or TMA, next, may read what was there before
            plgpu.copy_smem_to_gmem(tile_smem.at[mine], out_gmem.at[rows, columns].at[mine])
            plgpu.wait_smem_to_gmem(0)

    layout = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    shapes = (STAGES, TILE, INNER), (STAGES, INNER, TILE), (TILE, TILE)
    smem = [plgpu.SMEM(shape, x.dtype, transforms=layout) for shape in shapes]
    counts = (2, STAGES), (2, STAGES), (1, 1)  # arrivals, barriers
    barriers = [plgpu.Barrier(num_arrivals=a, num_barriers=n) for a, n in counts]
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((M, N), x.dtype),
        grid=(M // TILE, N // TILE),
        grid_names=("m", "n"),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=smem + barriers,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(x, w, residual)


def cases(M: int = 4096, K: int = 4096, N: int = 4096) -> Iterator[tuple]:
    """For the table of `pallas_kernels.inspect`."""
    args = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((M, K), (K, N), (M, N))]
    moved = 2 * (M * K + K * N + 2 * M * N)
    yield "", linear_residual, linear_residual_reference, args, 2 * M * K * N, moved
