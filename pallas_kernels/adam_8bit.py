"""One step of Adam on moments that are 8-bit codes, in one pass over memory.

XLA decodes both moments, updates them and finds each block's largest element in one pass, and
has to come again to encode by it. The kernel reads the gradient, codes and scales (and the
parameter), keeps a block in registers while its scale is found, and writes the direction (or
the new parameter), codes and scales: 12.06 bytes an element, 16.06 with a float32 parameter.

A piece is R blocks, R a multiple of 4, of about 2048 elements together. Each block lies in one
warp, so that its largest element is found by shuffles within it. Codes and values are turned
into each other by arithmetic (`codes`), for Mosaic has no gather; the noise of the rounding is
a hash of a seed and an element's position in its whole array.

The kernel and the plain form are the same functions, on registers and on arrays.

Legend: N pieces, R blocks of a piece, a block [C, W] of C x W elements; W spans a warp.
"""

import dataclasses
import math
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, UInt, UInt8

from pallas_kernels import codes, dispatch, manual_axes, streaming
from pallas_kernels.streaming import Moved, Output, Plan

Mode = Literal["stable", "bitsandbytes"]

DTYPES = ("bfloat16", "float16", "float32")
PIECE = 1024  # elements, 8 of a thread; more where four blocks are longer
# Elements of a piece for which the registers suffice that four warpgroups leave a thread.
MOST_IN_128_REGISTERS = 1536
SHORTEST, LONGEST = 64, 512  # blocks
ZERO = 127  # the code of 0 in `dynamic`; in `dynamic_unsigned` it is 0
# Below it a scale, or its inverse, is subnormal, which GPUs may flush to zero.
LEAST_SCALE = 2.0**-126


class Coded(NamedTuple):
    """A moment: `map[codes] * scale`, in blocks of the last dimension or of the flat array."""

    codes: UInt8[Array, "*dims"]
    scale: Float[Array, "..."]  # float32, [*dims[:-1], blocks] or [blocks]


class Scalars(NamedTuple):
    """What one step shares over all elements of a parameter; floats or float32 scalars."""

    b1: Any
    b2: Any
    eps: Any
    eps_root: Any
    correction1: Any  # 1 - b1**t
    correction2: Any
    seed: UInt[Array, ""]  # uint32, of this step and parameter
    zero: UInt[Array, ""]  # uint32, 0: see `product`


class Decay(NamedTuple):
    """What makes a new parameter of a direction; floats or float32 scalars."""

    learning_rate: Any
    weight_decay: Any


def adam_8bit_update(
    g: Float[Array, "*dims"],
    m: Coded,
    v: Coded,
    scalars: Scalars,
    *,
    block: int = 256,
    mode: Mode = "stable",
    implementation: str | None = None,
) -> tuple[Float[Array, "*dims"], Coded, Coded]:
    """One step of Adam for one parameter: the direction, and the moments that follow.

    With m and v decoded (in mode "stable" m is 0 beside a v of 0): `m' = b1 m + (1 - b1) g`,
    `v' = b2 v + (1 - b2) g^2`, direction `(m' / c1) / (sqrt(v' / c2 + eps_root) + eps)`.

    Mode "stable": m's scales carry the sign of their block's extreme, v is rounded at random
    (`codes.encode`, geometric), and never to 0 from above. Mode "bitsandbytes": scales are
    magnitudes, and both moments are rounded to nearest.

    **Exactness**: approximate as the codes are, see `codes`; the direction is of the new
    moments before they are coded. Memory: no moment in float32.

    Args:
      g: gradient, float32 or 16 bits wide.
      m: first moment, codes of map `dynamic`, of the shape of g; scales float32.
      v: second moment, codes of `dynamic_unsigned`.
      scalars: the step's numbers.
      block: elements of a block, a multiple of 32. Blocks lie in the last dimension where they
        divide it, else in the flat array, the last one partial.
      mode: how moments are rounded.
      implementation: "mosaic_gpu", the kernel for Hopper; "xla"; None: the kernel in programs
        for Hopper where blocks come in whole pieces (8 blocks of 256). Asked for, it pads.

    Returns:
      Direction, of the dtype of g; the new moments.

    Raises:
      ValueError: shapes or dtypes do not match, an unknown mode or implementation.
      NotImplementedError: the kernel was asked for and does not serve this.

    Example:
      >>> zero = Coded(jnp.zeros(64, jnp.uint8), jnp.zeros(1))
      >>> step = Scalars(0.9, 0.999, 1e-8, 0.0, 0.1, 0.001, *jnp.zeros(2, jnp.uint32))
      >>> u, m, v = adam_8bit_update(jnp.full(64, -3.0), zero, zero, step, block=64)
      >>> round(float(u[0]), 5), m.codes[0].item(), round(float(m.scale[0]), 5)
      (-1.0, 255, -0.3)
    """
    return _step(implementation, block, mode, None, g, m, v, scalars, None)


def adamw_8bit_step(
    p: Float[Array, "*dims"],
    g: Float[Array, "*dims"],
    m: Coded,
    v: Coded,
    scalars: Scalars,
    decay: Decay,
    *,
    block: int = 256,
    mode: Mode = "stable",
    implementation: str | None = None,
) -> tuple[Float[Array, "*dims"], Coded, Coded]:
    """`adam_8bit_update`, and the new parameter instead of the direction u.

    Mode "stable", as optax: `p - lr (u + decay p)`; "bitsandbytes": `(p - lr u) (1 - lr decay)`.
    For a program that holds its parameters itself; an optax transformation returns directions.

    Args:
      p: parameter, float32 or 16 bits wide.
      g, m, v, scalars: of `adam_8bit_update`.
      decay: learning rate and weight decay.
      block, mode, implementation: of `adam_8bit_update`.

    Returns:
      New parameter, of the dtype of p; the new moments.

    Raises:
      ValueError, NotImplementedError: as `adam_8bit_update`.
    """
    return _step(implementation, block, mode, p, g, m, v, scalars, decay)


def _step(implementation, block, mode, p, g, m, v, scalars, decay):
    _check(block, mode, p, g, m, v)
    missing = unfit(g, block, asked=implementation == "mosaic_gpu", parameter=p)
    dispatch.check(implementation, missing)
    numbers = _numbers(scalars, decay)
    operands, tree = jax.tree.flatten((p, g, m, v, numbers, _bits(scalars)))
    operands = jax.tree.unflatten(tree, manual_axes.vary_alike(*operands))
    forms = (partial(form, block, mode) for form in (kernel, plain))
    return dispatch.choose(implementation, *forms, *operands, unfit=missing)


def _check(block, mode, p, g, m, v):
    if mode not in ("stable", "bitsandbytes"):
        raise ValueError(f"mode is {mode!r}; legal are stable and bitsandbytes")
    if block < 32 or block % 32:
        raise ValueError(f"block is {block!r}; legal are positive multiples of 32, say 256")
    inside = g.ndim and g.shape[-1] % block == 0
    scales = (*g.shape[:-1], g.shape[-1] // block) if inside else (-(-g.size // block),)
    for name, coded in (("m", m), ("v", v)):
        if (coded.codes.shape, coded.scale.shape) != (g.shape, scales):
            raise ValueError(
                f"{name} has codes {coded.codes.shape}, scales {coded.scale.shape}; need "
                f"{g.shape}, {scales} with blocks of {block}"
            )
    if p is not None and p.shape != g.shape:
        raise ValueError(f"got a parameter {p.shape}, a gradient {g.shape}; need the same shape")


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


class _Numbers(NamedTuple):
    """Float32 scalars; references to them in the kernel."""

    b1: Any
    rest1: Any  # 1 - b1
    b2: Any
    rest2: Any
    eps: Any
    eps_root: Any
    inverse1: Any  # of the corrections
    inverse2: Any
    learning_rate: Any
    decay: Any  # in mode bitsandbytes 1 - lr * decay


def _numbers(s: Scalars, decay: Decay | None) -> Float[Array, " n"]:
    """`_Numbers` as an array."""
    rate, weight = (0.0, 0.0) if decay is None else decay
    corrections = 1 / jnp.asarray(s.correction1), 1 / jnp.asarray(s.correction2)
    numbers = _Numbers(
        s.b1, 1 - s.b1, s.b2, 1 - s.b2, s.eps, s.eps_root, *corrections, rate, weight
    )
    return jnp.stack([jnp.asarray(x, jnp.float32) for x in numbers])


def _bits(s: Scalars) -> UInt[Array, " 2"]:
    return jnp.stack([s.seed, s.zero])


def product(a: Array, b: Any, zero: UInt[Array, ""]) -> Array:
    """`a * b`, rounded, in whatever sum it stands.

    A compiler may fuse a multiplication into an addition, and does so in one program and not in
    the next: a moment would differ in its last bit, and its code now and then. A zero that it
    does not know to be one, combined with the bits of the product, is in its way.

    Args:
      a, b: float32.
      zero: uint32, not a constant.

    Returns:
      float32.
    """
    bits = lax.bitcast_convert_type(a * b, jnp.uint32)
    return lax.bitcast_convert_type(bits ^ zero, jnp.float32)


def _new_moments(g, first, second, n, zero, mode):
    if mode == "stable":
        first = jnp.where(second == 0, 0.0, first)
    mean = lambda old, keep, new, rest: product(old, keep, zero) + product(new, rest, zero)
    return mean(first, n.b1, g, n.rest1), mean(second, n.b2, g * g, n.rest2)


def _result(p, first, second, n, mode):
    """The direction, or the new parameter."""
    direction = first * n.inverse1 / (jnp.sqrt(second * n.inverse2 + n.eps_root) + n.eps)
    if p is None:
        return direction
    if mode == "stable":
        return p - n.learning_rate * (direction + n.decay * p)
    return (p - n.learning_rate * direction) * (1 - n.learning_rate * n.decay)


def _coded(x, map, mode, noise, over, spread):
    """Codes (int32) and scales.

    Args:
      x: moment, float32.
      map: of the codes.
      mode: how it is rounded.
      noise: a function of no arguments.
      over: (maximum or minimum, x) -> that of each block.
      spread: a number a block -> one an element.
    """
    second = map == "dynamic_unsigned"
    if mode == "stable" and not second:
        top, bottom = over(jnp.max, x), over(jnp.min, x)
        scale = jnp.where(top >= -bottom, top, bottom)
    else:
        scale = over(jnp.max, x if second else jnp.abs(x))
    scale = jnp.where(jnp.abs(scale) < LEAST_SCALE, 0.0, scale)
    inverse = jnp.where(scale == 0, 0.0, 1 / jnp.where(scale == 0, 1.0, scale))
    inverse = spread(inverse)
    at_random = mode == "stable" and second
    noise = noise() if at_random else None
    found = codes.encode(x * inverse, map, noise, geometric=at_random)
    found = jnp.where(inverse == 0, 0, found)
    if at_random:  # never 0 from above, also where a product in `encode` underflows
        found = jnp.where(x > 0, jnp.maximum(found, 1), found)
    return found, scale


def plain(
    block: int,
    mode: Mode,
    p: Float[Array, "*dims"] | None,
    g: Float[Array, "*dims"],
    m: Coded,
    v: Coded,
    numbers: Float[Array, " n"],
    bits: UInt[Array, " 2"],
) -> tuple[Float[Array, "*dims"], Coded, Coded]:
    """`kernel` in XLA. Sharded parameters stay so: blocks are cut from the last dimension."""
    n = _Numbers(*numbers)
    spread = lambda scale: scale[..., None]
    over = lambda f, x: f(x, axis=-1)
    zero = ZERO
    first = codes.decode(_blocks(m.codes, block, zero), "dynamic") * spread(m.scale)
    second = codes.decode(_blocks(v.codes, block), "dynamic_unsigned") * spread(v.scale)
    gradient = _blocks(g.astype(jnp.float32), block)
    first, second = _new_moments(gradient, first, second, n, bits[1], mode)
    value = None if p is None else _blocks(p.astype(jnp.float32), block)
    out = _result(value, first, second, n, mode)
    noise = lambda: codes.noise(bits[0], _positions(out.shape))
    moments = [
        _coded(x, map, mode, noise, over, spread)
        for x, map in ((first, "dynamic"), (second, "dynamic_unsigned"))
    ]
    whole = partial(_whole, shape=g.shape)
    m, v = (Coded(whole(x.astype(jnp.uint8)), scale) for x, scale in moments)
    return whole(out.astype(g.dtype if p is None else p.dtype)), m, v


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
      numbers: of `_numbers`.
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
        n = _Numbers(*(numbers[0][i] for i in range(len(_Numbers._fields))))
        gradient = read(g_ref).astype(jnp.float32)
        first = codes.decode(read(m_ref), "dynamic") * spread(m_scale[...])
        second = codes.decode(read(v_ref), "dynamic_unsigned") * spread(v_scale[...])
        first, second = _new_moments(gradient, first, second, n, numbers[1][1], mode)
        value = read(p_ref[0]).astype(jnp.float32) if p_ref else None
        outputs[0][...] = _result(value, first, second, n, mode).astype(out_dtype)

        def noise():
            index = (
                plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, i), layout)
                for i in range(3)
            )
            r, c, w = index
            place = row * math.prod(shape) + r * block + c * shape[2] + w
            return codes.noise(numbers[1][0], place.astype(jnp.uint32))

        for x, map, codes_ref, scale_ref in (
            (first, "dynamic", outputs[1], outputs[2]),
            (second, "dynamic_unsigned", outputs[3], outputs[4]),
        ):
            found, scale = _coded(x, map, mode, noise, over, spread)
            codes_ref[...] = found.astype(jnp.uint8)
            scale_ref[...] = scale
        return state

    pieces = partial(_pieces, sizes=sizes)
    rows = [pieces(g), pieces(m.codes, fill=ZERO), _scales(m.scale, sizes)]
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
        numbers=[numbers, bits],
    )
    out, m_codes, m_scale, v_codes, v_scale = results
    whole = partial(_whole, shape=g.shape)
    scales = partial(_whole, shape=m.scale.shape)
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
        if elements > MOST_IN_128_REGISTERS:
            plan = dataclasses.replace(
                plan, blocks=min(streaming.CORES, -(-self.pieces // 3)), warpgroups=3
            )
        return plan

    def traffic(self) -> Moved:
        """Bytes that the kernel moves."""
        elements, scales = math.prod((self.pieces, *self.piece)), self.pieces * self.together
        out = self.parameter_itemsize or self.itemsize
        numbers = 4 * (len(_Numbers._fields) + 2)
        return Moved(
            elements * self.element_bytes + 8 * scales, elements * (out + 2) + 8 * scales, numbers
        )


def _blocks(x: Array, block: int, fill: int = 0) -> Array:
    """[*dims] -> [*dims[:-1], blocks, block]; [blocks, block] where no block fits in a row."""
    if x.ndim and x.shape[-1] % block == 0:
        return x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
    return _filled(x, block, fill).reshape(-1, block)


def _filled(x: Array, multiple: int, fill: int) -> Array:
    """[*dims] -> [L], L a multiple."""
    flat = x.reshape(-1)
    missing = -flat.size % multiple
    if missing:
        flat = jnp.pad(flat, (0, missing), constant_values=jnp.asarray(fill, x.dtype))
    return flat


def _pieces(x: Array, sizes: Sizes, fill: int = 0) -> Array:
    """[*dims] -> [N, R, C, W]."""
    return _filled(x, math.prod(sizes.piece), fill).reshape(-1, *sizes.piece)


def _scales(x: Array, sizes: Sizes) -> Array:
    """[..., blocks] -> [N, R]."""
    return _filled(x, sizes.together, 0).reshape(-1, sizes.together)


def _whole(x: Array, shape: tuple[int, ...]) -> Array:
    """Undoes them."""
    size = math.prod(shape)
    return (x if x.size == size else x.reshape(-1)[:size]).reshape(shape)


def _positions(shape: tuple[int, ...]) -> UInt[Array, "..."]:
    """Row-major, modulo 2**32, without flattening a sharded array."""
    total, stride = jnp.zeros(shape, jnp.uint32), 1
    for dim in reversed(range(len(shape))):
        index = lax.broadcasted_iota(jnp.uint32, shape, dim)
        total, stride = total + index * jnp.uint32(stride % 2**32), stride * shape[dim]
    return total


def cases(N: int = 16384, D: int = 4096, block: int = 256) -> Iterator[tuple]:
    """For the table of `pallas_kernels.inspect`: directions in both modes, and parameters."""
    step = Scalars(0.9, 0.999, 1e-8, 0.0, 0.1, 0.001, jnp.uint32(1), jnp.uint32(0))
    array = jax.ShapeDtypeStruct
    coded = jax.eval_shape(lambda: Coded(jnp.zeros((N, D), jnp.uint8), jnp.zeros((N, D // block))))
    g, narrow = array((N, D), jnp.float32), array((N, D), jnp.bfloat16)

    def case(label: str, mode: Mode, p: Any) -> tuple:
        def form(function, p, g, m, v):
            v = v._replace(scale=jnp.abs(v.scale))  # whatever numbers it is given
            numbers = _numbers(step, None if p is None else Decay(0.01, 0.1))
            return function(block, mode, p, g, m, v, numbers, _bits(step))

        forms = (partial(form, function) for function in (kernel, plain))
        sizes = Sizes(N * D // block, block, 4, 0 if p is None else p.dtype.itemsize)
        return label, *forms, [p, g, coded, coded], 0, sizes.traffic().total

    yield case("direction", "stable", None)
    yield case("direction, bitsandbytes", "bitsandbytes", None)
    yield case("parameter", "stable", g)
    yield case("bfloat16 parameter", "stable", narrow)
