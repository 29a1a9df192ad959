"""The kernels of `rms_norm`: forward and backward, a row of one warpgroup (`streaming`).

Forward: `total = x + residual` is rounded into x's place, its squares summed, and the norm of
the total written into the residual's place (or beside it, in eight bits). Backward: the input
is read once more with the gradients; dx takes its place, and each warpgroup sums its share of
dscale in registers. At the end those of a block are added in a fixed order, and XLA adds those
of the blocks: two runs give the same bits.

Legend: N rows, D row length, C lines of 128 elements.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import dispatch, fp8_output, streaming
from pallas_kernels.streaming import LINE, Moved, Output, Plan

DTYPES = ("bfloat16", "float16", "float32")
UNPADDED = 2 * LINE  # rows of a multiple of it are read as they are, 4 bytes a thread at least


LONGEST = 12288  # of a row: 96 registers of a thread hold its share of dscale


class Sizes(NamedTuple):
    """What the kernels' plans depend on."""

    rows: int
    length: int  # of a row
    itemsize: int  # bytes, of x
    scale_itemsize: int
    residual: bool
    fp8: bool = False

    @property
    def columns(self) -> int:
        """The length of a row, padded."""
        return streaming.padded(self.length)

    def forward(self) -> Plan:
        """The forward kernel's plan."""
        row = self.columns * ((1 + self.residual) * self.itemsize + self.fp8)
        return streaming.plan(self.rows, row, self.columns * self.scale_itemsize)

    def backward(self) -> Plan:
        """The backward kernel's."""
        row = self.columns * (2 + self.residual) * self.itemsize
        block = self.columns * self.scale_itemsize + 4 * LINE * streaming.CHUNK
        return streaming.plan(self.rows, row, block)

    def forward_traffic(self) -> Moved:
        """Bytes that the forward kernel moves."""
        plan = self.forward()
        values = self.rows * self.columns
        inputs = values * (1 + self.residual) * self.itemsize
        outputs = values * (self.residual * self.itemsize + (1 if self.fp8 else self.itemsize))
        scales = plan.blocks * self.columns * self.scale_itemsize
        return Moved(inputs + scales, outputs, 4 * (self.rows + self.fp8 * plan.workers))

    def backward_traffic(self) -> Moved:
        """Bytes that the backward kernel moves."""
        plan = self.backward()
        values = self.rows * self.columns * self.itemsize
        columns = plan.blocks * self.columns
        loads = values * (2 + self.residual) + columns * self.scale_itemsize
        return Moved(loads, values + 4 * columns, 4 * self.rows)


def sizes_of(x: Array, scale: Array, residual: bool, fp8: bool) -> Sizes:
    """Those of a call with such arrays, x [*B, D] and scale [D]."""
    rows = x.size // x.shape[-1] if x.size else 0
    return Sizes(rows, x.shape[-1], x.dtype.itemsize, scale.dtype.itemsize, residual, fp8)


def unfit(asked: bool, sizes: Sizes, x: Array, scale: Array) -> str | None:
    """Why the kernels do not serve a call, for `dispatch.choose`.

    Rows that they would pad they leave to XLA, unless they are asked for.
    """
    if {x.dtype.name, scale.dtype.name} - set(DTYPES):
        return f"has {', '.join(DTYPES)}, got x {x.dtype}, scale {scale.dtype}"
    if not sizes.rows:
        return f"needs at least one element, got {x.shape}"
    if sizes.columns > LONGEST or not (sizes.forward().fits and sizes.backward().fits):
        return f"keeps six rows of up to {LONGEST} in shared memory, got {x.dtype} x {sizes.length}"
    if not asked and sizes.length % UNPADDED:
        return f"has rows of a multiple of {UNPADDED} elements, got {sizes.length}"
    return dispatch.unsharded(x, scale)


def forward(
    epsilon: float,
    offset: float,
    x: Float[Array, "*B D"],
    residual: Float[Array, "*B D"] | None,
    scale: Float[Array, " D"],
    inverse_cast: Float[Array, ""] | None,
) -> tuple[Array | None, Array, Array | None, Array]:
    """The forward pass in one kernel.

    Args:
      epsilon, offset, x, residual, scale: of `rms_norm`.
      inverse_cast: makes the output eight bits wide, see `fp8_output.to_fp8`.

    Returns:
      Total [*B, D] (None without residual), output [*B, D], its largest magnitude [] (None
      unless in eight bits), and 1/rms [*B, 1].
    """
    fp8, added = inverse_cast is not None, residual is not None
    sizes = sizes_of(x, scale, added, fp8)
    plan = sizes.forward()
    parts = streaming.chunks(sizes.columns)

    def rms_norm_forward(top, row, inputs, outputs, shared, numbers, extra):
        squares = 0.0
        total = inputs[0]
        for part in parts:
            value = total[part].astype(jnp.float32)
            if added:
                # Rounded before its squares are summed: what comes next sees it rounded.
                total[part] = (value + inputs[1][part].astype(jnp.float32)).astype(x.dtype)
                value = total[part].astype(jnp.float32)
            squares += value * value
        inverse = lax.rsqrt(jnp.sum(squares) * (1 / sizes.length) + epsilon)
        extra[0][row] = inverse
        for part in parts:
            weight = shared[0][part].astype(jnp.float32) + offset
            y = total[part].astype(jnp.float32) * inverse * weight
            if fp8:
                outputs[-1][part] = fp8_output.to_fp8(y, numbers[0])
                top = jnp.maximum(top, jnp.abs(y))
            else:
                outputs[-1][part] = y.astype(x.dtype)
        return top

    def finish(top, block, warpgroup, extra, scratch):
        extra[1][block * plan.warpgroups + warpgroup] = jnp.max(top)

    rows = [_rows(a, sizes) for a in (x, residual) if a is not None]
    outputs = [Output(x.dtype, 0)] if added else []
    outputs += [Output(jnp.float8_e4m3fn) if fp8 else Output(x.dtype, len(rows) - 1)]
    extra = [jax.ShapeDtypeStruct((n,), jnp.float32) for n in (sizes.rows, plan.workers)]
    results = streaming.stream(
        rms_norm_forward,
        rows,
        outputs,
        plan,
        shared=[streaming.lined(scale, sizes.columns)],
        numbers=[] if inverse_cast is None else [inverse_cast[None]],
        extra=extra if fp8 else extra[:1],
        state=lambda: _zeros(parts[:1])[0] if fp8 else (),
        finish=finish if fp8 else None,
    )
    total = _unrows(results[0], x.shape) if added else None
    y, inverse, *top = results[added:]
    inverse = inverse.reshape(*x.shape[:-1], 1)
    return total, _unrows(y, x.shape), jnp.max(top[0]) if fp8 else None, inverse


def backward(
    offset: float,
    x: Float[Array, "*B D"],
    scale: Float[Array, " D"],
    inverse: Float[Array, "*B 1"],
    dy: Float[Array, "*B D"],
    dtotal: Float[Array, "*B D"] | None,
) -> tuple[Array, Array]:
    """The backward pass in one kernel, and the sum of what its blocks give of dscale.

    Args:
      offset: of `rms_norm`.
      x: what was normalised, the total if there was a residual.
      scale, inverse: as given to and made by the forward pass.
      dy: gradient of the output, of the dtype of x.
      dtotal: of the total.

    Returns:
      dx [*B, D] of the dtype of x, dscale [D] float32.
    """
    sizes = sizes_of(x, scale, dtotal is not None, False)
    plan = sizes.backward()
    parts = streaming.chunks(sizes.columns)

    def rms_norm_backward(sums, row, inputs, outputs, shared, numbers, extra):
        x_ref, dy_ref, *more = inputs
        (inverse,) = numbers

        def read(part):
            unit = x_ref[part].astype(jnp.float32) * inverse
            dy = dy_ref[part].astype(jnp.float32)
            return unit, dy, dy * (shared[0][part].astype(jnp.float32) + offset)

        products = 0.0
        new_sums = []
        for part, sum_ in zip(parts, sums, strict=True):
            unit, dy, dunit = read(part)
            products += dunit * unit
            new_sums.append(sum_ + dy * unit)
        # Or the compiler sums later, and keeps the row in registers until then: spills.
        new_sums = lax.optimization_barrier(tuple(new_sums))
        projection = jnp.sum(products) * (1 / sizes.length)

        def write(number, _):
            part = pl.ds(number * parts[0].size, parts[0].size)
            unit, _, dunit = read(part)
            dx = (dunit - unit * projection) * inverse
            for ref in more:
                dx += ref[part].astype(jnp.float32)
            outputs[0][part] = dx.astype(x.dtype)

        lax.fori_loop(0, len(parts), write, None)
        return new_sums

    def finish(sums, block, warpgroup, extra, scratch):
        stage, turns = scratch
        last = plan.warpgroups - 1

        def add(number, who):
            """Warpgroup `who` adds its sums of a chunk to those of the ones before it."""
            if last and (number, who) != (0, 0):
                plgpu.barrier_wait(turns.at[who])
            stage[...] = sums[number] if who == 0 else stage[...] + sums[number]
            if who == last:
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(stage, extra[0].at[block, parts[number]])
                plgpu.wait_smem_to_gmem(0)
            if last and (number, who) != (len(parts) - 1, last):
                plgpu.barrier_arrive(turns.at[(who + 1) % plan.warpgroups])

        for number in range(len(parts)):
            for who in range(plan.warpgroups):
                pl.when(warpgroup == who)(partial(add, number, who))

    rows = [_rows(a, sizes) for a in (x, dy, dtotal) if a is not None]
    lines = sizes.columns // LINE
    dx, dscale = streaming.stream(
        rms_norm_backward,
        rows,
        [Output(x.dtype, 0)],
        plan,
        shared=[streaming.lined(scale, sizes.columns)],
        numbers=[inverse.reshape(-1)],
        extra=[jax.ShapeDtypeStruct((plan.blocks, lines, LINE), jnp.float32)],
        state=partial(_zeros, parts),
        finish=finish,
        scratch=[
            plgpu.SMEM((parts[0].size, LINE), jnp.float32),
            plgpu.Barrier(num_arrivals=1, num_barriers=plan.warpgroups),
        ],
    )
    dscale = jnp.sum(dscale, axis=0).reshape(-1)[: sizes.length]
    return _unrows(dx, x.shape), dscale


def _zeros(parts: list[Any]) -> Any:
    """For each chunk, float32."""
    return tuple(jnp.zeros((part.size, LINE), jnp.float32) for part in parts)


def _rows(x: Array, sizes: Sizes) -> Array:
    """[*B, D] -> [N, C, 128]."""
    return streaming.lined(x.reshape(sizes.rows, sizes.length), sizes.columns)


def _unrows(x: Array, shape: tuple[int, ...]) -> Array:
    """[N, C, 128] -> [*B, D]."""
    return x.reshape(x.shape[0], -1)[:, : shape[-1]].reshape(shape)
