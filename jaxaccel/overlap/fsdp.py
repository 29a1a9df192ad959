"""A loop over layers whose weights arrive, and whose gradients leave, while it computes.

Sharded weights (ZeRO-3, FSDP) are gathered a layer at a time. In a plain loop a layer's matmuls
wait for its own weights, and in the backward pass each gradient's reduction ends the turn that
made it, with nothing left to run beside it. Here both are moved by one turn:

  forward    turn l   gather(l + 1)                  while layer l computes
  backward   turn l   gather(l - 1), reduce(l + 1)   while layer l's gradient is taken

The backward pass gathers again: what the forward pass gathered is not among its residuals
(`jax.vjp(..., saveable_args=)`), so that two layers' weights are alive at once and no more, and
one layer's gradient beside them. What else is kept for the backward pass is left to a
`jax.checkpoint` of the body.

The two collectives are arguments, which makes this one loop serve several techniques:

| `gather` | `reduce` | technique |
|---|---|---|
| all-gather | reduce-scatter | FSDP (ZeRO-3) with prefetch |
| all-gather, after a cast to 16 or 8 bits | reduce-scatter | the same, fewer bytes |
| nothing | all-reduce | data parallelism, a bucket for each layer |

It pays where a layer computes for longer than its weights travel: from some thousand tokens a
device on. Where it computes for less, what is left is the time of the transfers. The first gather
and the last reduction have nothing beside them here, but what surrounds the loop.

Three turns (the last of the forward pass, the first and the last of the backward pass) stand
outside of the loops, so that no layer is gathered in vain and no weight copied; a program
holds a layer more often for it, and takes longer to compile.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import manual_axes

Body = Callable[[Any, Any], tuple[Any, Any]]


def prefetch_scan(
    body: Body,
    carry: Any,
    xs: Any,
    after: Any = (),
    *,
    gather: Callable[[Any], Any],
    reduce: Callable[[Any, Any], Any],
    totals: tuple[Any, Any] = (None, None),
) -> tuple[Any, Any, Any]:
    """`jax.lax.scan(body, carry, xs)` of layers that are gathered ahead and reduced behind.

    For use inside `jax.shard_map`; reverse mode. Equal to

        jax.lax.scan(lambda c, x: body(c, gather(x)), carry, xs)

    with, in the backward pass, `reduce` in the place of `gather`'s transpose.

    **Exactness**: exact.

    Args:
      body: `(carry, layer) -> (carry, y)`. Arrays that it needs beside are best given as
        `jax.tree_util.Partial(function, *arrays)`: they then count as arguments, and are
        not kept for each layer. Put `jax.checkpoint` around it as for any loop.
      carry: the stream between layers.
      xs: stacked shards of layers, a leading dimension of L >= 1 on every array.
      after: shards of what is read after the loop, the output head say: gathered while the last
        layer computes, its gradient reduced while that layer's is taken.
      gather: from one layer's shards (or `after`) to what `body` takes; any collectives. Its
        result must be marked as varying along every axis along which `reduce` is to sum.
      reduce: `(gradient of gather's result, one layer of totals) -> gradient of the shards`.
      totals: of `xs` and of `after`: trees like them of earlier micro-batches' gradients, for
        `reduce` to add, or None. Not differentiated. The sums take the place of those of `xs` in
        memory, unless `reduce` sums them over axes along which they vary.

    Returns:
      What `jax.lax.scan` returns, and `gather(after)`.

    Raises:
      ValueError: no layers, or unlike leading dimensions.

    Example:
      >>> identity = lambda layer: layer
      >>> body = lambda c, x: (c * x, None)
      >>> xs = jnp.array([3.0, 4.0])
      >>> prefetch_scan(body, 2.0, xs, gather=identity, reduce=lambda g, total: g)[0].item()
      24.0

    References:
      ZeRO: arXiv:1910.02054, section 5.3. Prefetching: PyTorch FSDP, arXiv:2304.11277, 3.3.2.
    """
    lengths = {jnp.shape(x)[:1] for x in jax.tree.leaves(xs)}
    if len(lengths) != 1 or lengths & {(), (0,)}:
        raise ValueError(
            f"xs must share one leading dimension of at least 1; theirs are {sorted(lengths)}"
        )
    # A `Partial` is a tree of its arrays; of another callable nothing is an argument.
    is_tree = isinstance(body, jax.tree_util.Partial)
    ambient, rebuild = jax.tree.flatten(body if is_tree else ())

    def call(ambient, carry, layer):
        return (rebuild.unflatten(ambient) if is_tree else body)(carry, layer)

    return _scan(call, gather, reduce, ambient, carry, xs, after, totals)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _scan(call, gather, reduce, *arguments):
    return _forward(call, gather, reduce, *arguments)[0]


def _forward(call, gather, reduce, ambient, carry, xs, after, totals):
    def compute(carry, layer):
        # Neither what surrounds the layers nor gathered weights are kept for each of them.
        (carry, y), pullback = jax.vjp(
            call, ambient, carry, layer, saveable_args=(False, True, False)
        )
        return carry, y, pullback

    def turn(state, following):
        carry, layer = state
        following = gather(_at(xs, following))
        carry, y, pullback = compute(carry, layer)
        return (carry, following), (y, pullback)

    start, turns = (carry, gather(_at(xs, 0))), jnp.arange(1, _length(xs))
    (carry, last), (ys, pullbacks) = jax.lax.scan(turn, start, turns)
    carry, after = _together(carry, after)
    whole = gather(after)
    carry, y, pullback = compute(carry, last)
    ys = jax.tree.map(lambda ys, y: jnp.concatenate([ys, y[None]]), ys, y)
    return (carry, ys, whole), (ambient, xs, totals, last, pullbacks, pullback)


def _backward(call, gather, reduce, residuals, cotangents):
    ambient, xs, totals, last, pullbacks, pullback = residuals
    carry, ys, after = cotangents
    length = _length(xs)

    def compute(sums, pullback, carry, layer, index):
        pullback = pullback.replace(args_res=[ambient, pullback.args_res[1], layer])
        more, carry, gradient = pullback((carry, _at(ys, index)))
        return jax.tree.map(jnp.add, sums, _floats(more)), carry, gradient

    def put(gradients, gradient, index):
        total = gradients if in_place else totals[0]
        gradient = reduce(gradient, _at(total, index))
        place = lambda all, one: jax.lax.dynamic_update_index_in_dim(all, one, index, 0)
        return jax.tree.map(place, gradients, gradient)

    def turn(state, index):
        sums, carry, layer, pending, gradients = state
        before = gather(_at(xs, index - 1))
        gradients = put(gradients, pending, index + 1)
        sums, carry, pending = compute(sums, _at(pullbacks, index), carry, layer, index)
        return (sums, carry, before, pending, gradients), None

    sums = [_zeros(x) for x in _floats(ambient)]
    # Not before the loss is through, or another layer's weights would be alive; and what the last
    # layer makes again would be what its forward pass made, kept until now.
    carry, before, pullback = _together(carry, _at(xs, max(length - 2, 0)), pullback)
    before = gather(before)
    after = reduce(after, totals[1])
    sums, carry, pending = compute(sums, pullback, carry, last, length - 1)
    carry, after = _together(carry, after)
    # Sums take the place of the totals that they begin with, layer by layer, unless these vary
    # along axes that `reduce` sums over.
    made = jax.eval_shape(reduce, pending, _at(totals[0], 0))
    kinds = [[manual_axes.varying(x) for x in jax.tree.leaves(tree)] for tree in (totals[0], made)]
    in_place = kinds[0] == kinds[1]
    gradients = totals[0] if in_place else jax.tree.map(_zeros, xs)
    if length > 1:
        state = (sums, carry, before, pending, gradients)
        state, _ = jax.lax.scan(turn, state, jnp.arange(length - 2, 0, -1))
        sums, carry, first, pending, gradients = state
        gradients = put(gradients, pending, 1)
        sums, carry, pending = compute(sums, _at(pullbacks, 0), carry, first, 0)
    gradients = put(gradients, pending, 0)
    sums = iter(sums)
    ambient = [next(sums) if _is_float(x) else None for x in ambient]
    return ambient, carry, gradients, after, None


_scan.defvjp(_forward, _backward)


def _length(xs: Any) -> int:
    return len(jax.tree.leaves(xs)[0])


def _at(xs: Any, index: Any) -> Any:
    """One of a stack. A loop over indices reads it where it lies; a stack cut short is copied."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), xs)


def _together(*trees: Any) -> tuple:
    """The same values, none before all: XLA's scheduler moves nothing across."""
    return jax.lax.optimization_barrier(trees)


def _zeros(x: Any) -> Any:
    return manual_axes.vary(jnp.zeros(x.shape, x.dtype), manual_axes.varying(x))


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _floats(xs: list) -> list:
    """What has a gradient: JAX gives others, segments say, one without elements (float0)."""
    return [x for x in xs if _is_float(x)]
