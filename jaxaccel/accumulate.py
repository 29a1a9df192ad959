"""Gradients of a large batch from small ones, equal to those of the large batch.

The mean over the tokens of a batch is not the mean of its micro-batches' means when these
count different numbers of tokens: dividing each by its own count gives a token of a short
micro-batch a larger weight. Here the function differentiated returns a *sum* that its
caller has already divided by the count of the whole batch, and micro-batches just add.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from pallas_kernels import manual_axes


def split(batch: PyTree[Array], count: int) -> PyTree[Array]:
    """[B, ...] -> [count, B / count, ...]; micro-batch i takes the rows i, i + count, ...

    Strided, so that rows sharded over devices stay where they are: each device's rows
    are spread evenly over the micro-batches.

    Args:
      batch: arrays with a common leading dimension B.
      count: number of micro-batches.

    Returns:
      The same tree, each leaf with a leading dimension of `count`.

    Raises:
      ValueError: `count` does not divide B.

    Example:
      >>> split(jnp.arange(6), 2).tolist()
      [[0, 2, 4], [1, 3, 5]]
    """

    def cut(x):
        if count < 1 or x.shape[0] % count:
            raise ValueError(f"a batch of {x.shape[0]} rows does not divide into {count} parts")
        return jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0)

    return jax.tree.map(cut, batch)


def add(total: PyTree[Array], part: PyTree[Array]) -> PyTree[Array]:
    """Adds two trees, leaf by leaf.

    Args:
      total, part: trees of the same structure.

    Returns:
      The same structure.
    """
    return jax.tree.map(jnp.add, total, part)


def accumulate(
    fn: Callable[[PyTree[Array]], PyTree[Array]],
    batch: PyTree[Array],
    count: int,
    combine: Callable[[PyTree[Array], PyTree[Array]], PyTree[Array]] = add,
) -> PyTree[Array]:
    """Sum of `fn` over `count` micro-batches of `batch`, one after the other.

    **Exactness**: exact up to the order of float32 additions, if `fn` is a sum over rows.

    Args:
      fn: takes a micro-batch, returns a tree of arrays to be summed, say
        `jax.value_and_grad` of a sum over tokens. Sum in float32: give it float32.
      batch: arrays with a common leading dimension.
      count: number of micro-batches; 1 calls `fn` once, without a loop.
      combine: `(total, part) -> total`, in place of the sum; it begins with zeros.

    Returns:
      The sum, in the dtypes that `fn` returns.

    Example:
      >>> float(accumulate(lambda x: (x * x).sum(), jnp.arange(4.0), 2))
      14.0
    """
    return fn(batch) if count == 1 else over(fn, split(batch, count), combine)


def over(
    fn: Callable[[PyTree[Array]], PyTree[Array]],
    parts: PyTree[Array],
    combine: Callable[[PyTree[Array], PyTree[Array]], PyTree[Array]] = add,
) -> PyTree[Array]:
    """`accumulate` of a batch that `split` has divided, or of some of its parts.

    Args:
      fn, combine: as of `accumulate`.
      parts: arrays with a common leading dimension, at least 1.

    Returns:
      The sum, in the dtypes that `fn` returns.

    Example:
      >>> float(over(jnp.sum, jnp.ones((2, 3))))
      6.0
    """
    first = jax.tree.map(lambda x: x[0], parts)
    if len(jax.tree.leaves(parts)[0]) == 1:
        return fn(first)
    return fold(lambda total, part: combine(total, fn(part)), fn, parts)


def fold(
    step: Callable[[PyTree[Array], PyTree[Array]], PyTree[Array]],
    like: Callable[[PyTree[Array]], PyTree[Array]],
    parts: PyTree[Array],
) -> PyTree[Array]:
    """`total = step(total, part)` for one part after the other, from zeros.

    For a function that adds to the total itself, where it lies.

    Args:
      step: `(total, part) -> total`.
      like: takes a part; the total is of the shapes and dtypes that it would return. Not run.
      parts: arrays with a common leading dimension.

    Returns:
      The last total.

    Example:
      >>> float(fold(lambda total, part: total + part.sum(), jnp.sum, jnp.ones((2, 3))))
      6.0
    """
    shapes = jax.eval_shape(like, jax.tree.map(lambda x: x[0], parts))
    # Under `shard_map` the sum must vary over devices as its parts do.
    zeros = jax.tree.map(
        lambda s: manual_axes.vary(jnp.zeros(s.shape, s.dtype), manual_axes.varying(s)), shapes
    )
    return jax.lax.scan(lambda total, part: (step(total, part), None), zeros, parts)[0]
