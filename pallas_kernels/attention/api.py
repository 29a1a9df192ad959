"""The public op: what is checked, what is kept for the backward pass, who computes.

Legend: B batch, T queries, S keys, H query heads, K key/value heads, D key size, E value size.

The backward pass gets q, k, v, the output and the log-sum-exp, and computes the
probabilities again: memory is linear in the length. Output and log-sum-exp carry checkpoint
names inside the forward rule. A policy that saves both repeats no part of attention in the
backward pass; one that saves neither runs the forward pass twice.
"""

from functools import partial
from typing import Literal, no_type_check

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from pallas_kernels import manual_axes
from pallas_kernels.attention import dispatch
from pallas_kernels.attention.mask import Mask, MaskArrays, split
from pallas_kernels.attention.xla import Options

# Checkpoint names of what the backward pass needs beyond q, k and v.
CONTEXT = "attention_context"
LSE = "attention_lse"

DTYPES = ("bfloat16", "float16", "float32")


@no_type_check  # a wrong shape is this function's ValueError, also under beartype
def attention(
    q_BTHD: Float[Array, "B T H D"],
    k_BSKD: Float[Array, "B S K D"],
    v_BSKE: Float[Array, "B S K E"],
    *,
    mask: Mask = Mask(),  # noqa: B008 (frozen)
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks_H: Float[Array, "H"] | None = None,
    return_lse: bool = False,
    implementation: Literal["xla", "mosaic_gpu"] | None = None,
) -> Float[Array, "B T H E"] | tuple[Float[Array, "B T H E"], Float[Array, "B T H"]]:
    """Attends: `softmax(mask(q k^T * scale)) v`, head by head, in blocks.

    With `s = q k^T * scale`, `s = cap * tanh(s / cap)` if there is a cap, masked pairs at
    -inf: `lse = log(sum_j exp(s_j) [+ exp(sink)])` and `out = sum_j exp(s_j - lse) v_j`.
    Query head `h` uses key/value head `h // (H / K)`. A query that may attend to nothing
    gets output 0, log-sum-exp -inf (with sinks: the sink) and gradient 0.

    **Exactness**: exact. Softmax and sums are float32; in bfloat16 and float16 the
    probabilities are rounded to the inputs' dtype before they meet v, as in every flash
    attention. Memory: O(B H (T + S) (D + E)). Compute: 2 (D + E) FLOP for each pair and head
    forward, 2 (3 D + 2 E) backward; blocks that causal or window empty are skipped.

    Args:
      q_BTHD: queries; bfloat16, float16 or float32.
      k_BSKD: keys, of the same dtype; K divides H.
      v_BSKE: values, of the same dtype; E may differ from D.
      mask: what attends to what; see `Mask`. All pairs by default.
      scale: a Python number; `D ** -0.5` by default.
      logits_soft_cap: a positive Python number, or None.
      sinks_H: one learned logit for each head that takes probability and gives no value.
      return_lse: also return the log-sum-exp (natural log), which is differentiable.
      implementation: None takes the Mosaic GPU kernels in a program that is lowered for one
        H100 or H200 (or for many under `jax.shard_map`), cuDNN or XLA otherwise; see
        `dispatch.py`. "mosaic_gpu" insists on the kernels, "xla" on plain JAX.

    Returns:
      The output `[B, T, H, E]` in the inputs' dtype; with `return_lse` also the
      log-sum-exp, float32 `[B, T, H]`.

    Raises:
      ValueError: shapes, dtypes or options that do not fit together.
      NotImplementedError: second derivatives; `implementation="mosaic_gpu"` with float32, heads
        above 256, or (while lowering) on a device other than Hopper.

    Example:
      >>> q = jnp.ones((1, 3, 4, 8))
      >>> k = v = jnp.ones((1, 5, 2, 8))
      >>> attention(q, k, v, mask=Mask(causal=True)).shape
      (1, 3, 4, 8)

    References:
      FlashAttention-2, arXiv 2307.08691, section 3.1.
    """
    options, mask_arrays = _checked(
        q_BTHD, k_BSKD, v_BSKE, sinks_H, mask, scale, logits_soft_cap, implementation
    )
    q_BTHD, k_BSKD, v_BSKE = manual_axes.vary_alike(q_BTHD, k_BSKD, v_BSKE)
    if implementation is None and dispatch.cudnn_serves(
        options, q_BTHD, k_BSKD, v_BSKE, sinks_H, mask_arrays, return_lse
    ):
        return dispatch.cudnn(options, q_BTHD, k_BSKD, v_BSKE)
    out, lse = _attention(implementation, options, q_BTHD, k_BSKD, v_BSKE, sinks_H, mask_arrays)
    return (out, lse) if return_lse else out


@no_type_check  # as above
def attention_backward(
    q_BTHD: Float[Array, "B T H D"],
    k_BSKD: Float[Array, "B S K D"],
    v_BSKE: Float[Array, "B S K E"],
    out_BTHE: Float[Array, "B T H E"],
    lse_BTH: Float[Array, "B T H"],
    dout_BTHE: Float[Array, "B T H E"],
    *,
    mask: Mask = Mask(),  # noqa: B008 (frozen)
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    implementation: Literal["xla", "mosaic_gpu"] | None = None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B S K D"], Float[Array, "B S K E"]]:
    """Gradients of attention given its output and log-sum-exp, which may be over more keys.

    With `P = exp(s - lse)` and `dS = P * (dout v^T - sum_e dout * out)`: `dv = P^T dout`,
    `dq = scale * dS k`, `dk = scale * dS^T q`. A key's terms depend on other keys through `out`
    and `lse` alone. Given these of *all* keys, calls with disjoint parts of the keys return each
    part's `dk` and `dv`, and terms of `dq` that sum to it: what ring attention is made of.

    **Exactness**: exact, as `attention`. Compute: 2 (3 D + 2 E) FLOP for each pair and head.

    Args:
      q_BTHD, k_BSKD, v_BSKE, mask, scale, logits_soft_cap, implementation: as of `attention`.
      out_BTHE: what attention to all keys returned, in q's dtype.
      lse_BTH: its log-sum-exp, float32; -inf for a query that sees no key.
      dout_BTHE: gradient of the output, in q's dtype.

    Returns:
      Gradients of q, k and v, in their dtype.

    Raises:
      ValueError, NotImplementedError: as `attention`; it has no derivative itself.

    Example:
      >>> q = k = v = jnp.ones((1, 4, 2, 8))
      >>> out, lse = attention(q, k, v, return_lse=True)
      >>> dq, dk, dv = attention_backward(q, k[:, :2], v[:, :2], out, lse, jnp.ones_like(out))
      >>> dv.shape, round(float(dv.sum()), 4)  # half of the keys get half of the gradient
      ((1, 2, 2, 8), 32.0)

    References:
      FlashAttention-2, arXiv 2307.08691, section 3.1; ring attention, arXiv 2310.01889.
    """
    options, arrays = _checked(
        q_BTHD, k_BSKD, v_BSKE, None, mask, scale, logits_soft_cap, implementation
    )
    shape = (*q_BTHD.shape[:3], v_BSKE.shape[3])
    if out_BTHE.shape != shape or dout_BTHE.shape != shape or lse_BTH.shape != shape[:3]:
        raise ValueError(
            f"got out {out_BTHE.shape}, dout {dout_BTHE.shape}, lse {lse_BTH.shape}; for q "
            f"{q_BTHD.shape} and v {v_BSKE.shape} they are {shape}, {shape} and {shape[:3]}"
        )
    dlse = jnp.zeros_like(lse_BTH)
    inputs = (q_BTHD, k_BSKD, v_BSKE, None, arrays)
    return _backward(implementation, options, *inputs, out_BTHE, lse_BTH, dout_BTHE, dlse)[:3]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(implementation: str | None, options: Options, q, k, v, sinks, mask: MaskArrays):
    return dispatch.forward(implementation, options, q, k, v, sinks, mask)


def _attention_fwd(implementation, options, q, k, v, sinks, mask):
    out, lse = dispatch.forward(implementation, options, q, k, v, sinks, mask)
    out, lse = checkpoint_name(out, CONTEXT), checkpoint_name(lse, LSE)
    return (out, lse), (q, k, v, sinks, mask, out, lse)


def _attention_bwd(implementation, options, residuals, cotangents):
    return (*_backward(implementation, options, *residuals, *cotangents), None)


# A JVP rule of its own, only to refuse: differentiating the loops would fail far from here.
@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _backward(implementation, options, q, k, v, sinks, mask, out, lse, dout, dlse):
    return dispatch.backward(implementation, options, q, k, v, sinks, mask, out, lse, dout, dlse)


@_backward.defjvp
def _backward_jvp(implementation, options, primals, tangents):
    raise NotImplementedError(
        "attention has no second derivative; attention_reference has, at O(T * S) memory"
    )


_attention.defvjp(_attention_fwd, _attention_bwd)


def _checked(q, k, v, sinks, mask, scale, soft_cap, implementation) -> tuple[Options, MaskArrays]:
    """What is static and what is not of the options, once they are known to fit."""
    if implementation not in (None, "xla", "mosaic_gpu"):
        raise ValueError(f"implementation is {implementation!r}; legal: None, 'xla', 'mosaic_gpu'")
    _check_arrays(q, k, v, sinks)
    (batch, queries, _, depth), keys = q.shape, k.shape[1]
    _check_mask(mask, batch, queries, keys)
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"logits_soft_cap is {soft_cap}; it must be positive, or None")
    band, arrays = split(mask, batch, queries, keys)
    dispatch.refuse(implementation, q, v)
    return Options(band, depth**-0.5 if scale is None else float(scale), soft_cap), arrays


def _check_arrays(q, k, v, sinks) -> None:
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"got {shapes}; attention needs q [B,T,H,D], k [B,S,K,D], v [B,S,K,E]")
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"got {shapes}; q [B,T,H,D], k [B,S,K,D], v [B,S,K,E] must agree in B, S, K and D"
        )
    if 0 in q.shape or 0 in k.shape or 0 in v.shape:
        raise ValueError(f"got {shapes}; every dim must be at least 1")
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"got {shapes}; the {q.shape[2]} query heads must be a multiple of the "
            f"{k.shape[2]} key/value heads"
        )
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        raise ValueError(
            f"got q {q.dtype}, k {k.dtype}, v {v.dtype}; they must share one of {', '.join(DTYPES)}"
        )
    if sinks is not None and (sinks.shape != q.shape[2:3] or sinks.dtype not in DTYPES):
        raise ValueError(
            f"got sinks {sinks.dtype}{list(sinks.shape)}; they must be float [{q.shape[2]}], "
            "one for each query head"
        )


def _check_mask(mask: Mask, batch: int, queries: int, keys: int) -> None:
    for limit in mask.window or ():
        if limit is not None and limit < 0:
            raise ValueError(f"window is {mask.window}; left and right must be >= 0, or None")
    if (mask.q_segments is None) != (mask.k_segments is None):
        raise ValueError("q_segments and k_segments must be given together")
    if mask.q_segments is not None:
        for name, segments, length in (
            ("q_segments", mask.q_segments, queries),
            ("k_segments", mask.k_segments, keys),
        ):
            if segments.shape != (batch, length) or not _is_integer(segments):
                raise ValueError(
                    f"{name} is {segments.dtype}{list(segments.shape)}; it must be an integer "
                    f"array [{batch}, {length}]"
                )
    offset = mask.offset
    if (
        offset is not None
        and not isinstance(offset, int)
        and (offset.shape not in ((), (batch,)) or not _is_integer(offset))
    ):
        raise ValueError(
            f"offset is {offset.dtype}{list(offset.shape)}; it must be an int, or an integer "
            f"array [] or [{batch}]"
        )


def _is_integer(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.integer)
