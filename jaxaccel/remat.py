"""Which tensors of the forward pass are kept for the backward pass.

Policies choose by the names of `names.py` and not by primitive, so that they see through
Pallas kernels and custom VJPs. A policy is a plain `jax.checkpoint` policy, and `scan` is
`jax.lax.scan` over layers with a policy around its body.

Selective recomputation (arXiv:2205.05198, section 5) keeps the outputs of matmuls and
repeats norms, activations and the inside of attention. It pays on a CPU too: XLA's CPU
back end otherwise spills and recomputes long elementwise chains by its own rules.

**Exactness**: exact. The same operations run again, on the same inputs.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax

from jaxaccel import names

Policy = Literal["none", "selective", "full"]
POLICIES: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "selective": jax.checkpoint_policies.save_only_these_names(*names.MATMULS, *names.ATTENTION),
    "full": jax.checkpoint_policies.nothing_saveable,
}


def checkpoint(fn: Callable, policy: Policy = "selective", *, prevent_cse: bool = True) -> Callable:
    """`fn`, whose backward pass recomputes what `policy` does not keep.

    Args:
      fn: any function of arrays and pytrees.
      policy: `none` keeps everything; `selective` the outputs of matmuls and what
        attention needs; `full` only `fn`'s inputs.
      prevent_cse: keep the compiler from merging the repeated operations with the first
        ones. False is right inside a `scan`, where it cannot, and faster.

    Returns:
      A function of the same values and gradients.

    Raises:
      ValueError: no such policy.

    Example:
      >>> float(jax.grad(checkpoint(jax.numpy.sin, "full"))(0.0))
      1.0
    """
    if policy not in POLICIES:
        raise ValueError(f"unknown remat policy {policy!r}; known: {', '.join(POLICIES)}")
    chosen = POLICIES[policy]
    return fn if chosen is None else jax.checkpoint(fn, policy=chosen, prevent_cse=prevent_cse)


def scan(body: Callable, carry: Any, xs: Any, *, policy: Policy = "selective") -> Any:
    """`jax.lax.scan(body, carry, xs)` under a policy; the loop over a stack of layers.

    Args:
      body: `(carry, x) -> (carry, y)`.
      carry: the stream between layers.
      xs: stacked layers, a leading dimension of L on every array.
      policy: what each layer keeps.

    Returns:
      What `jax.lax.scan` returns.

    Example:
      >>> import jax.numpy as jnp
      >>> scan(lambda c, x: (c * x, None), 2.0, jnp.array([3.0, 4.0]), policy="full")[0].item()
      24.0
    """
    return jax.lax.scan(checkpoint(body, policy, prevent_cse=False), carry, xs)
