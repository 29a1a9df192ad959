"""Domino: a batch in two halves, so that one half's all-reduce runs under the other's compute.

Under tensor parallelism each block of a layer, attention and MLP, ends in a sum over devices that
its next operation waits for. The rows of a batch do not depend on one another: of two halves,
one computes while the sum of the other is under way, within a layer and from each layer to the
next, forward and backward. Nothing is sent that was not sent before, in twice as many parts.

    attention(a) | attention(b)  | MLP(a)        | MLP(b)
                 | sum of a      | sum of b      | sum of a      ...

It pays where a half's block computes for about as long as its sum travels, and where half of the
rows still fill the matmuls. It costs reading each weight twice. The halves are independent
operations to XLA, which puts them side by side; no barrier is needed.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial


def domino_scan(scan: Callable, body: Callable, carry: Any, xs: Any, **options: Any) -> Any:
    """`scan(body, carry, xs)` with the rows of the carry in two independent halves.

    **Exactness**: exact, if `body` treats rows alike and apart.

    Args:
      scan: `jax.lax.scan`, or another of its kind such as `prefetch_scan`.
      body: `(carry, layer) -> (carry, None)`; it holds the collectives that are to be hidden. A
        `jax.tree_util.Partial`'s arrays are cut as the carry is.
      carry: arrays with a common leading dimension of rows, an even number.
      xs: stacked layers.
      options: of `scan`.

    Returns:
      What `scan` returns.

    Raises:
      ValueError: an odd number of rows.

    Example:
      >>> body = lambda c, x: (c * x, None)
      >>> domino_scan(jax.lax.scan, body, jnp.ones(2), jnp.array([3.0, 4.0]))[0].tolist()
      [12.0, 12.0]

    References:
      Domino: arXiv:2409.15241, sections 3.2 and 3.3.
    """
    if not isinstance(body, Partial):
        body = Partial(lambda carry, layer, body=body: body(carry, layer))
    args, carries = _halves(body.args), _halves(carry)

    def both(args, carries, layer):
        found = [body.func(*mine, carry, layer)[0] for mine, carry in zip(args, carries)]
        return tuple(found), None

    carries, *rest = scan(Partial(both, args), carries, xs, **options)
    return jax.tree.map(lambda *half: jnp.concatenate(half), *carries), *rest


def _halves(tree: Any) -> tuple[Any, Any]:
    rows = {x.shape[:1] for x in jax.tree.leaves(tree)}
    if any(n == () or n[0] % 2 or not n[0] for n in rows):
        raise ValueError(
            f"Domino halves the rows on each device; got {sorted(rows)}, and needs an even number: "
            "raise the batch, or use fewer micro-batches"
        )
    cut = lambda low, high: jax.tree.map(lambda x: x[low * len(x) // 2 : high * len(x) // 2], tree)
    return cut(0, 1), cut(1, 2)
