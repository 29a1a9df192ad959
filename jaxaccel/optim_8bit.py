"""Optimizers whose moments are 8-bit codes, as optax transformations.

Adam's two float32 moments are 8 bytes a parameter; in block-wise codes (arXiv:2110.02861,
`jaxaccel.blockwise`) they are `2 (1 + 4 / block)`, 2.03 with blocks of 256. A step decodes a
moment, updates it in float32, uses it, and encodes it again.

The scheme as published, mode `"bitsandbytes"`, has four defects; each is a test here. Figures
are of Adam, from simulations with synthetic gradients:

1. The signed map has no -1, so a moment whose block's extreme is negative shrinks at every step:
   a constant gradient of -1 settles at -0.93.
2. A second moment below 1.6e-7 of its block's largest becomes 0 while the first does not, and the
   next update is divided by what little the last gradient adds: up to 312 times the learning rate.
3. Beside a second moment of 0 any first moment but 0 is amplified by 1 / eps.
4. With b2 = 0.999 a step moves the second moment by a thousandth of itself and codes are 0.7 % or
   more apart: rounded to nearest, it never moves. After gradients fall to 0.3x it stays 7.7x too
   large, and the learning rate in effect 2.8x too small.

Mode `"stable"`, the default, has cures that cost nothing in memory: the scale carries the sign
of the block's extreme (1); a positive second moment is never coded as 0 (2); a first moment
beside a second of 0 is read as 0 (3); the second moment is rounded at random to one of the two
neighbouring codes (4). Odds are such that a step keeps the mean of its *logarithm*. With those
that keep the mean of the value, as is usual, a small moment whose codes are a factor of three
apart stays at the lower one for hundreds of steps, and peaks come back (2.7 times the learning
rate). The noise is a hash of a seed, the step, the array and the position in it: a run can be
repeated, resumed and sharded otherwise.

**Exactness**: approximate. A moment errs by 0.00703 (first) or 0.00352 (second) of its block's
largest at most, a small one by up to 6 % of itself within the upper decade of its block and more
below (`jaxaccel.blockwise`); `"bitsandbytes"` adds the defects above.

Blocks lie within the last dimension of a parameter where one fits, so that codes and scales are
sharded like it and no block is shared by two devices (`block_for`); what is computed does not
depend on the sharding in any case. It pays where optimizer state is a large part of memory:
with few parameters a device, gradients and activations outweigh it. On Hopper, Adam's step is one
kernel that holds no moment in float32 (`pallas_kernels.adam_8bit`); programs that XLA partitions
over devices, and other machines, have the same arithmetic from XLA.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree, UInt

from jaxaccel.blockwise import (
    BlockQuantized,
    check_block,
    dequantize_blockwise,
    quantize_blockwise,
    zeros_like,
)
from pallas_kernels import codes
from pallas_kernels.adam_8bit import Coded, Scalars, adam_8bit_update, product

Mode = Literal["stable", "bitsandbytes"]
Moment = BlockQuantized | Array  # what is not coded is float32
Mask = PyTree[bool] | Callable[[PyTree], PyTree[bool]] | None

SHARDS = 8  # devices that a dimension is likely to be cut over


@dataclasses.dataclass(frozen=True)
class Moments:
    """How an optimizer holds its moments.

    Its fields are no hyperparameters to `optax.inject_hyperparams`, which would trace numbers.
    """

    block: int = 256
    """Elements of a block, a positive multiple of 32; see `block_for`."""
    mode: Mode = "stable"
    """stable, or bitsandbytes: its maps, rounding to nearest, and order of weight decay."""
    min_size: int = 4096
    """Smaller parameters, counted before sharding, have float32 moments."""
    keep: Mask = None
    """True for further parameters whose moments stay float32, as an optax mask: embeddings, say."""
    seed: int = 0
    """Of the noise that rounds the second moment."""

    def __post_init__(self):
        check_block(self.block)
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode is {self.mode!r}; legal are {' and '.join(get_args(Mode))}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed is {self.seed}; legal are 0 to 2**32 - 1")


DEFAULT = Moments()


def block_for(shape: tuple[int, ...], moments: Moments) -> int:
    """The block size of a parameter: `moments.block`, or up to twice that to fit a dimension.

    A block should divide the last dimension and, where that is cut over 2, 4 or 8 devices, lie on
    one device, or be a whole number of shards: the smallest such block of at least `block`
    elements. A dimension below `block` is one block if it is at least half of it. Where nothing
    fits, blocks run through the flattened parameter, which costs communication where it is
    sharded. Depends on the global shape alone: codes are the same on every mesh.

    Mode `bitsandbytes` flattens always; its blocks are `block`.

    Args:
      shape: of the parameter.
      moments: block and mode.

    Returns:
      Elements of a block.

    Example:
      >>> [block_for((8, n), Moments()) for n in (2048, 5632, 768, 128, 100)]
      [256, 352, 384, 128, 256]
    """
    block, last = moments.block, shape[-1] if shape else 1
    if moments.mode == "bitsandbytes":
        return block
    if block <= 2 * last and last < block and last % 32 == 0:
        return last
    shard = last // SHARDS if last % SHARDS == 0 else last
    for size in range(block, min(2 * block, last) + 1, 32):
        if last % size == 0 and (shard % size == 0 or size % shard == 0):
            return size
    return block


def unknown_zero(count: Int[Array, ""]) -> UInt[Array, ""]:
    """0, of a step counter that is never negative, which no compiler knows."""
    return count.astype(jnp.uint32) >> jnp.uint32(31)


def read(moment: Moment) -> Float[Array, "..."]:
    """A moment in float32."""
    return dequantize_blockwise(moment) if isinstance(moment, BlockQuantized) else moment


def write(value: Float[Array, "..."], like: Moment, mode: Mode) -> Moment:
    """A first moment in the form of `like`, rounded to nearest.

    Args:
      value: float32.
      like: the moment that it replaces.
      mode: see the head of this module.

    Returns:
      Codes, or `value` where `like` is float32.
    """
    if not isinstance(like, BlockQuantized):
        return value
    return quantize_blockwise(value, like.block, like.code, signed=mode == "stable")


def adam_leaf(
    g: Float[Array, "*dims"], m: Moment, v: Moment, s: Scalars, mode: Mode
) -> tuple[Float[Array, "*dims"], Moment, Moment]:
    """One step of Adam for one parameter: the direction, and the moments that follow.

    A pure function of its arguments, elementwise but for the largest magnitude of each block.

    Args:
      g: the gradient.
      m: first moment, codes of `dynamic` or float32.
      v: second moment, codes of `dynamic_unsigned` or float32.
      s: the step's numbers.
      mode: see the head of this module.

    Returns:
      `(m / c1) / (sqrt(v / c2 + eps_root) + eps)` of the new moments before they are rounded,
      in the type of `g`; the new moments.
    """
    if isinstance(m, BlockQuantized) and isinstance(v, BlockQuantized):
        held = Coded(m.codes, m.scale), Coded(v.codes, v.scale)
        update, (m_codes, m_scale), (v_codes, v_scale) = adam_8bit_update(
            g, held[0], held[1], s, block=m.block, mode=mode
        )
        new_m = dataclasses.replace(m, codes=m_codes, scale=m_scale)
        return update, new_m, dataclasses.replace(v, codes=v_codes, scale=v_scale)
    grad = g.astype(jnp.float32)
    first = product(read(m), s.b1, s.zero) + product(grad, 1 - s.b1, s.zero)
    second = product(read(v), s.b2, s.zero) + product(grad * grad, 1 - s.b2, s.zero)
    root = jnp.sqrt(second / s.correction2 + s.eps_root)
    return ((first / s.correction1) / (root + s.eps)).astype(g.dtype), first, second


class ScaleByAdam8bitState(NamedTuple):
    """Of `scale_by_adam_8bit`; moments are trees like the parameters."""

    count: Int[Array, ""]  # int32
    mu: PyTree[Moment]
    nu: PyTree[Moment]


class ScaleByLion8bitState(NamedTuple):
    """Of `scale_by_lion_8bit`."""

    count: Int[Array, ""]  # int32
    mu: PyTree[Moment]


class Trace8bitState(NamedTuple):
    """Of `trace_8bit`."""

    count: Int[Array, ""]  # int32
    trace: PyTree[Moment]


def _empty(params: PyTree, code: codes.Map, moments: Moments) -> PyTree[Moment]:
    """Moments of zero for every parameter."""
    keep = moments.keep(params) if callable(moments.keep) else moments.keep
    if keep is None:
        keep = jax.tree.map(lambda _: False, params)

    def one(path, p: Array, keep: bool) -> Moment:
        if not jnp.issubdtype(p.dtype, jnp.floating):
            raise TypeError(
                f"parameter {jax.tree_util.keystr(path) or 'given'} is {p.dtype}; 8-bit "
                "optimizers update real floating-point parameters: mask others out"
            )
        if keep or p.size < moments.min_size:
            return jnp.zeros_like(p, dtype=jnp.float32)
        signed = moments.mode == "stable" and code == "dynamic"
        return zeros_like(p, block_for(p.shape, moments), code, signed=signed)

    return jax.tree_util.tree_map_with_path(one, params, keep)


def _map_leaves(function: Callable, updates: PyTree, moments: Moments, *trees: PyTree) -> tuple:
    """`function(index, g, *moments of it)` for each gradient, transposed into trees.

    Raises:
      ValueError: a moment is of another shape or mode than the optimizer's, or of other blocks.
    """
    leaves, structure = jax.tree.flatten(updates)
    columns = [structure.flatten_up_to(tree) for tree in trees]
    for g, *held in zip(leaves, *columns):
        for moment in held:
            if isinstance(moment, BlockQuantized):
                if moment.shape != g.shape:
                    raise ValueError(f"got a gradient {g.shape} for optimizer state {moment.shape}")
                mode = "stable" if moment.signed else "bitsandbytes"
                if moment.code == "dynamic" and mode != moments.mode:
                    raise ValueError(
                        f"optimizer state of a parameter {g.shape} is of mode {mode!r}, and this "
                        f"optimizer's is {moments.mode!r}: pass moments=Moments(mode={mode!r}), or "
                        "begin anew with init"
                    )
                want = block_for(g.shape, moments)
                if moment.block != want:
                    raise ValueError(
                        f"optimizer state of a parameter {g.shape} has blocks of {moment.block}, "
                        f"and this optimizer's are {want}: pass "
                        f"moments=Moments(block={moment.block}), or begin anew with init"
                    )
    results = [function(i, *leaf) for i, leaf in enumerate(zip(leaves, *columns))]
    if not results:
        return updates, *trees
    return tuple(structure.unflatten(column) for column in zip(*results))


def scale_by_adam_8bit(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    *,
    moments: Moments = DEFAULT,
) -> optax.GradientTransformation:
    """`optax.scale_by_adam` with both moments in 8 bits.

    **Exactness**: approximate, as the head of this module says of each mode.

    **Memory**: `2 (1 + 4 / block)` bytes a parameter of at least `min_size` elements, 8 a smaller.

    Args:
      b1, b2: decay of the first and the second moment.
      eps: added to the root of the second moment.
      eps_root: added to it under the root.
      moments: how the moments are held; its `mode` is "stable" (errors of rounding only) or
        "bitsandbytes" (parity with that package, its four defects included).

    Returns:
      An optax transformation. Its state has the same shapes and types at every step.

    Raises:
      ValueError: from `update`, if the state was made with another block size or mode.
      TypeError: from `init`, if a parameter is not of a real floating-point type.

    Example:
      >>> params = {"kernel": jnp.ones((64, 256)), "scale": jnp.ones(64)}
      >>> state = scale_by_adam_8bit().init(params)
      >>> state.mu["kernel"], state.mu["scale"].dtype
      (BlockQuantized(float32[64,256], dynamic, block 256), dtype('float32'))
    """

    def init(params):
        return ScaleByAdam8bitState(
            count=jnp.zeros([], jnp.int32),
            mu=_empty(params, "dynamic", moments),
            nu=_empty(params, "dynamic_unsigned", moments),
        )

    def update(updates, state, params=None):
        del params
        count = jnp.asarray(optax.safe_increment(state.count))
        t, zero = count.astype(jnp.float32), unknown_zero(count)
        correction = lambda decay: 1 - jnp.asarray(decay, jnp.float32) ** t
        key = codes.mix(jnp.uint32(moments.seed) + jnp.uint32(0x9E3779B9))
        key = codes.mix(key ^ count.astype(jnp.uint32))

        def one(index, g, m, v):
            # An array is known by its place in the tree: the next one has another stream.
            seed = codes.mix(key + jnp.uint32(index * 0x9E3779B9 % 2**32))
            scalars = Scalars(b1, b2, eps, eps_root, correction(b1), correction(b2), seed, zero)
            return adam_leaf(g, m, v, scalars, moments.mode)

        updates, mu, nu = _map_leaves(one, updates, moments, state.mu, state.nu)
        return updates, ScaleByAdam8bitState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def scale_by_lion_8bit(
    b1: float = 0.9, b2: float = 0.99, *, moments: Moments = DEFAULT
) -> optax.GradientTransformation:
    """`optax.scale_by_lion` (arXiv:2302.06675) with its moment in 8 bits, rounded to nearest.

    **Exactness**, **memory**, `moments` and what is raised: as `scale_by_adam_8bit`, of the first
    moment; the direction is a sign, which an error of the moment changes only near 0.

    Args:
      b1: decay of the moment in the direction.
      b2: decay of the moment.
      moments: how it is held.

    Returns:
      An optax transformation.
    """

    def init(params):
        zeros = _empty(params, "dynamic", moments)
        return ScaleByLion8bitState(jnp.zeros([], jnp.int32), zeros)

    def update(updates, state, params=None):
        del params
        count = jnp.asarray(optax.safe_increment(state.count))
        zero = unknown_zero(count)

        def one(index, g, m):
            del index
            grad, first = g.astype(jnp.float32), read(m)
            mean = lambda b: product(first, b, zero) + product(grad, 1 - b, zero)
            direction, first = jnp.sign(mean(b1)), mean(b2)
            return direction.astype(g.dtype), write(first, m, moments.mode)

        updates, mu = _map_leaves(one, updates, moments, state.mu)
        return updates, ScaleByLion8bitState(count, mu)

    return optax.GradientTransformation(init, update)


def trace_8bit(
    decay: float, nesterov: bool = False, *, moments: Moments = DEFAULT
) -> optax.GradientTransformation:
    """`optax.trace` (momentum, a sum and not a mean) in 8 bits, rounded to nearest.

    **Exactness**, **memory**, `moments` and what is raised: as `scale_by_adam_8bit`, of the first
    moment.

    Args:
      decay: of the momentum.
      nesterov: look one step ahead.
      moments: how it is held.

    Returns:
      An optax transformation.
    """

    def init(params):
        return Trace8bitState(jnp.zeros([], jnp.int32), _empty(params, "dynamic", moments))

    def update(updates, state, params=None):
        del params
        count = jnp.asarray(optax.safe_increment(state.count))
        zero = unknown_zero(count)

        def one(index, g, m):
            del index
            grad = g.astype(jnp.float32)
            total = grad + product(read(m), decay, zero)
            direction = grad + product(total, decay, zero) if nesterov else total
            return direction.astype(g.dtype), write(total, m, moments.mode)

        updates, trace = _map_leaves(one, updates, moments, state.trace)
        return updates, Trace8bitState(count, trace)

    return optax.GradientTransformation(init, update)
