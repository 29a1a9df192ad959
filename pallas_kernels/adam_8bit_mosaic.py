"""The kernel of a step of 8-bit Adam; see `adam_8bit`.

A piece is R blocks, R a multiple of 4, of about 1024 elements together, a row of `streaming`.
Each block lies in one warp, so that its largest element is found by shuffles within it.

Legend: N pieces, R blocks of a piece, a block [C, W] of C x W elements; W spans a warp.
"""

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, UInt

from pallas_kernels import adam_8bit_xla as xla
from pallas_kernels import codes, dispatch, streaming
from pallas_kernels.adam_8bit_xla import Coded, Mode, Numbers
from pallas_kernels.streaming import Moved, Output, Plan

DTYPES = ("bfloat16", "float16", "float32")
PIECE = 1024  # elements, 8 of a thread; more where four blocks are longer
# The most elements of a piece for which a thread's registers suffice, by warpgroups of a block.
MOST_ELEMENTS = {4: 1536, 3: 1920, 2: 2048}
SHORTEST, LONGEST = 64, 512  # blocks


def unfit(
    g: Array, block: int, *, asked: bool = False, parameter: Array | None = None
) -> str | None:
    """Why the kernel does not serve a parameter, for `dispatch.choose`.

    Args:
      g: gradient.
      block: elements of a block.
      asked: the kernel was asked for; what it would pad is left to XLA if not.
      parameter: where there is one.
    """
    given = [g] if parameter is None else [g, parameter]
    if {x.dtype.name for x in given} - set(DTYPES):
        return f"has {', '.join(DTYPES)}, got {', '.join(x.dtype.name for x in given)}"
    if not SHORTEST <= block <= LONGEST:
        return f"has blocks of {SHORTEST} to {LONGEST} elements, got {block}"
    if not g.size:
        return f"needs at least one element, got {g.shape}"
    sizes = Sizes(-(-g.size // block), block)
    if not asked and g.size % (sizes.together * block):
        return f"has multiples of {sizes.together} blocks of {block} elements, got {g.shape}"
    return dispatch.unsharded(*given)


def kernel(
    block: int,
    mode: Mode,
    p: Float[Array, "*dims"] | None,
    g: Float[Array, "*dims"],
    m: Coded,
    v: Coded,
    numbers: Float[Array, " n"],
    bits: UInt[Array, " 2"],
) -> tuple[Float[Array, "*dims"], Coded, Coded]:
    """One step in one kernel.

    Args:
      block, mode: of `adam_8bit_update`.
      p: parameter; None: the direction is returned.
      g, m, v: of `adam_8bit_update`.
      numbers: of `numbers_of`.
      bits: seed and zero of `Scalars`.

    Returns:
      Direction or parameter, and new moments.
    """
    out_dtype = g.dtype if p is None else p.dtype
    sizes = Sizes(
        -(-g.size // block), block, g.dtype.itemsize, 0 if p is None else p.dtype.itemsize
    )
    shape = sizes.piece
    layout = sizes.layout

    def spread(scale):
        return lax.broadcast_in_dim(scale, shape, (0,))

    def over(f, x):
        return f(f(x, axis=1), axis=1)

    def read(ref):
        return plgpu.layout_cast(ref[...], layout)

    def adam_8bit(state, row, inputs, outputs, shared, numbers, extra):
        g_ref, m_ref, m_scale, v_ref, v_scale, *p_ref = inputs
        n, (seed, zero) = Numbers(*numbers[0]), numbers[1]
        gradient = read(g_ref).astype(jnp.float32)
        first = codes.decode(read(m_ref), "dynamic") * spread(m_scale[...])
        second = codes.decode(read(v_ref), "dynamic_unsigned") * spread(v_scale[...])
        first, second = xla.new_moments(gradient, first, second, n, zero, mode)
        value = read(p_ref[0]).astype(jnp.float32) if p_ref else None
        outputs[0][...] = xla.result(value, first, second, n, zero, mode).astype(out_dtype)

        def noise():
            along = lambda dim: lax.broadcasted_iota(jnp.int32, shape, dim)
            r, c, w = (plgpu.layout_cast(along(dim), layout) for dim in range(3))
            place = row * math.prod(shape) + r * block + c * shape[2] + w
            return codes.noise(seed, place.astype(jnp.uint32))

        for x, map, codes_ref, scale_ref in (
            (first, "dynamic", outputs[1], outputs[2]),
            (second, "dynamic_unsigned", outputs[3], outputs[4]),
        ):
            found, scale = xla.coded(x, map, mode, noise, over, spread)
            codes_ref[...] = found.astype(jnp.uint8)
            scale_ref[...] = scale
        return state

    pieces = partial(_pieces, sizes=sizes)
    rows = [pieces(g), pieces(m.codes, fill=xla.ZERO), _scales(m.scale, sizes)]
    rows += [pieces(v.codes), _scales(v.scale, sizes)]
    rows += [] if p is None else [pieces(p)]
    results = streaming.stream(
        adam_8bit,
        rows,
        [
            Output(out_dtype, 0) if p is None else Output(out_dtype, 5, overwrites=True),
            *(Output(rows[i].dtype, i, overwrites=True) for i in range(1, 5)),
        ],
        sizes.plan(),
        numbers=[numbers[None], bits[None]],
    )
    out, m_codes, m_scale, v_codes, v_scale = results
    whole = partial(xla.whole, shape=g.shape)
    scales = partial(xla.whole, shape=m.scale.shape)
    return (
        whole(out),
        Coded(whole(m_codes), scales(m_scale)),
        Coded(whole(v_codes), scales(v_scale)),
    )


class Sizes(NamedTuple):
    """What the kernel's plan depends on."""

    blocks: int
    block: int  # elements
    itemsize: int = 4  # bytes, of a gradient
    parameter_itemsize: int = 0  # 0: the kernel returns directions

    @property
    def together(self) -> int:
        """Blocks of a piece."""
        return 4 * max(1, PIECE // (4 * self.block))

    @property
    def pieces(self) -> int:
        """All of them."""
        return -(-self.blocks // self.together)

    @property
    def piece(self) -> tuple[int, int, int]:
        """[R, C, W]; a thread has neighbours, where that leaves C of 2 or more."""
        wide = next(w for w in (128, 64, 32) if self.block % w == 0 and self.block > w)
        return self.together, self.block // wide, wide

    @property
    def layout(self) -> Any:
        """A warp has every fourth block, its lanes lie along W."""
        wide = self.piece[2]
        tiling = plgpu.Tiling(((4, 1, wide), (wide // 32,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1)

    @property
    def element_bytes(self) -> int:
        """Of gradient, parameter and codes."""
        return self.itemsize + self.parameter_itemsize + 2

    def plan(self) -> Plan:
        """Grid and buffers."""
        elements, scales = math.prod(self.piece), 2 * max(128, 4 * self.together)
        plan = streaming.plan(self.pieces, elements * self.element_bytes + scales, 0)
        most = next(n for n, limit in MOST_ELEMENTS.items() if elements <= limit)
        if plan.warpgroups > most:
            blocks = min(streaming.CORES, -(-self.pieces // most))
            plan = dataclasses.replace(plan, blocks=blocks, warpgroups=most)
        return plan

    def traffic(self) -> Moved:
        """Bytes that the kernel moves."""
        elements, scales = math.prod((self.pieces, *self.piece)), self.pieces * self.together
        out = self.parameter_itemsize or self.itemsize
        numbers = 4 * (len(Numbers._fields) + 2)
        return Moved(
            elements * self.element_bytes + 8 * scales, elements * (out + 2) + 8 * scales, numbers
        )


def _pieces(x: Array, sizes: Sizes, fill: int = 0) -> Array:
    """[*dims] -> [N, R, C, W]."""
    return xla.filled(x, math.prod(sizes.piece), fill).reshape(-1, *sizes.piece)


def _scales(x: Array, sizes: Sizes) -> Array:
    """[..., blocks] -> [N, R]."""
    return xla.filled(x, sizes.together, 0).reshape(-1, sizes.together)
