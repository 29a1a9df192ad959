"""Attention as the formula says, T x S scores and all: what the other paths are held to."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.attention.mask import Mask, split, visible


def attention_reference(
    q_BTHD: Float[Array, "B T H D"],
    k_BSKD: Float[Array, "B S K D"],
    v_BSKE: Float[Array, "B S K E"],
    *,
    mask: Mask = Mask(),  # noqa: B008 (frozen)
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks_H: Float[Array, "H"] | None = None,
) -> tuple[Float[Array, "B T H E"], Float[Array, "B T H"]]:
    """Naive attention, differentiated by JAX; arguments as `attention`, unchecked.

    Matmuls run in the inputs' dtype and are rounded to it, the softmax is float32. With
    float32 inputs it is the oracle; with bfloat16 inputs it shows what the dtype costs.

    Returns:
      Output in q's dtype and log-sum-exp in float32.
    """
    batch, queries, heads, depth = q_BTHD.shape
    keys, groups = k_BSKD.shape[1], heads // k_BSKD.shape[2]
    scale = depth**-0.5 if scale is None else scale
    k_BSHD, v_BSHE = (jnp.repeat(x, groups, axis=2) for x in (k_BSKD, v_BSKE))
    logits = jnp.einsum("bthd,bshd->bhts", q_BTHD, k_BSHD).astype(jnp.float32) * scale
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    allowed = visible(*split(mask, batch, queries, keys), jnp.arange(queries), jnp.arange(keys))
    allowed = allowed[:, None]
    # A row that sees nothing goes through the softmax unmasked and is cut off after it:
    # plain autodiff would make NaN of a row of -inf.
    some = allowed.any(-1, keepdims=True)
    logits = jnp.where(allowed | ~some, logits, -jnp.inf)
    empty = -jnp.inf
    if sinks_H is not None:
        empty = sinks = jnp.broadcast_to(
            sinks_H.astype(jnp.float32)[None, :, None, None], (batch, heads, queries, 1)
        )
        logits = jnp.concatenate([logits, sinks], axis=-1)
    lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    p = jnp.where(some, jnp.exp(logits - lse), 0.0)[..., :keys].astype(v_BSKE.dtype)
    lse = jnp.where(some, lse, empty)[..., 0]
    return jnp.einsum("bhts,bshe->bthe", p, v_BSHE), lse.transpose(0, 2, 1)
