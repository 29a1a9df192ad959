"""Domino: a batch in two halves, so that one half's all-reduce runs under the other's compute.

Under tensor parallelism each block of a layer, attention and MLP, ends in a sum over devices that
its next operation waits for. The rows of a batch do not depend on one another: of two halves,
one computes while the sum of the other is under way, within a layer and from each layer to the
next. Nothing is sent that was not sent before, in twice as many parts.

    compute   attention(a) | attention(b) | MLP(a)     | MLP(b)    | attention(a) of the next ...
    transfer               | sum of a     | sum of b   | sum of a  | sum of b

Ties (optimisation barriers) keep this order in the forward pass; left to itself XLA waits for a
sum before the block that would have hidden it, or merges two matmuls that share a weight. Ties
have no gradient: in the backward pass the halves are independent, and each sum has the weights'
gradients beside it too. Ties there were tried: they hide more where blocks are short, and cost
what the fused norms save.

It pays where a half's block computes for about as long as its sum travels, and where half of the
rows still fill the matmuls. It costs reading each weight twice, and at a loop's border half as
much again as a layer's input.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array


class Block(NamedTuple):
    """A block of a layer.

    Attributes:
      compute: `(arguments, x, found) -> (x + found, part)`: `found` is the sum of what the block
        before found, None where it is in `x` already; `part` is this device's part of this one's.
      keep: what is done to the sum, giving it a name for rematerialisation: named before the tie,
        a repeated forward pass would repeat what it is tied to.
    """

    compute: Callable[[Any, Array, Array | None], tuple[Array, Array]]
    keep: Callable[[Array], Array] = lambda x: x


class Halves(NamedTuple):
    """The streams of both halves between two blocks; a pytree, for a loop to carry."""

    a: Array  # [B/2, ...]
    b: Array
    pending: Array  # what the last block found for b, this device's part of the sum


def begin(x: Array, unreduce: Callable[[Array], Array]) -> Halves:
    """Cuts a stream in two.

    Args:
      x: [B, ...], B even.
      unreduce: from a sum to parts of it, one on each device: x on the first, say, and 0.

    Returns:
      `Halves`, for `interleave`, with all of b pending.

    Raises:
      ValueError: an odd number of rows.
    """
    a, b = halves(x)
    return Halves(a, b * 0, unreduce(b))


def interleave(
    blocks: Sequence[Block], arguments: tuple[Any, Any], state: Halves, reduce: Callable
) -> Halves:
    """Runs blocks on two halves in turn, each sum under the other half's block.

    **Exactness**: exact.

    Args:
      blocks: of a layer, or of several; what is pending comes from one like the last.
      arguments: of each half.
      state: from `begin`, or from the blocks before.
      reduce: the sum over devices.

    Returns:
      `Halves` after the last block.
    """
    (a, b, pending), found, keep = state, None, blocks[-1].keep
    for block in blocks:
        a, part = block.compute(arguments[0], a, found)
        other, part = _tie(reduce(pending), part)
        b, pending = block.compute(arguments[1], b, keep(other))
        found, pending = _tie(reduce(part), pending)
        found, keep = block.keep(found), block.keep
    return Halves(a if found is None else a + found, b, pending)


def end(state: Halves, reduce: Callable) -> Array:
    """The whole stream, after the last sum.

    Args:
      state: after the last block.
      reduce: the sum over devices.

    Returns:
      [B, ...].
    """
    return jnp.concatenate([state.a, state.b + reduce(state.pending)])


def halves(tree: Any) -> tuple[Any, Any]:
    """Both halves of the rows of every array.

    Args:
      tree: arrays with a common leading dimension, an even number.

    Returns:
      Two trees like it.

    Raises:
      ValueError: an odd number of rows.

    Example:
      >>> [half.tolist() for half in halves(jnp.arange(4))]
      [[0, 1], [2, 3]]
    """
    rows = {jnp.shape(x)[:1] for x in jax.tree.leaves(tree)}
    if any(not n or n[0] % 2 for n in rows):
        raise ValueError(
            f"Domino halves the rows of each device; got {sorted(rows)}, and needs an even number: "
            "raise the batch, or use fewer micro-batches"
        )
    cut = lambda first: jax.tree.map(lambda x: jnp.split(x, 2)[first], tree)
    return cut(0), cut(1)


@jax.custom_vjp
def _tie(x: Array, y: Array) -> tuple[Array, Array]:
    """The same values, neither before both; gradients go free."""
    return jax.lax.optimization_barrier((x, y))


_tie.defvjp(lambda x, y: (_tie(x, y), None), lambda _, cotangents: cotangents)
