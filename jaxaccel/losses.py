"""Cross-entropy that never holds the logits.

The logits of a batch are its largest tensor: 65,536 tokens of a 128,256-word vocabulary
are 31 GiB in float32, and the loss needs only one number of each row. Here the head's
matmul is part of the loss. Positions go through in chunks; a chunk's logits live as long
as the chunk. The gradient is taken in the same pass, while they are at hand (the loss is
a sum, so its cotangent is a scalar that can multiply afterwards): three matmuls, none
repeated, where `jax.checkpoint` around a chunk would pay a fourth.

Where it pays: a vocabulary larger than the width. Where it does not: with one chunk it is
plain cross-entropy. Could be better: a fused kernel would not write a chunk's logits to
memory at all.

Shape suffixes: B batch, T positions, D width, V vocabulary.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

IGNORED = -1

# Logits of one chunk and one batch shard, in elements: 512 MiB of float32.
CHUNK_ELEMENTS = 2**27


class LossSums(NamedTuple):
    """Sums over the counted tokens; divide by `count` for means."""

    objective: Float[Array, ""]  # what to differentiate: nll + z_loss * z
    nll: Float[Array, ""]  # negative log-likelihood in nats; no gradient
    count: Int[Array, ""]  # labels that are not IGNORED


def chunk_positions(rows: int, vocab_size: int) -> int:
    """Positions of each of `rows` rows that go through at once: logits under 2**27 elements.

    Args:
      rows: of one device.
      vocab_size: words of the head.

    Returns:
      At least 1.

    Example:
      >>> chunk_positions(16, 128256)
      65
    """
    return max(1, CHUNK_ELEMENTS // max(1, rows * vocab_size))


def linear_cross_entropy(
    hidden_BTD: Float[Array, "B T D"],
    head_VD: Float[Array, "V D"],
    labels_BT: Int[Array, "B T"],
    *,
    z_loss: float = 0.0,
    chunk: int | None = None,
) -> LossSums:
    """Summed cross-entropy of `softmax(hidden @ head.T)` against `labels`.

    Per counted token, with `z = log(sum(exp(logits)))`:
    `nll = z - logits[label]`, `objective = nll + z_loss * z**2`.

    **Exactness**: exact up to rounding. The two matmuls take their inputs in `hidden`'s
    dtype and accumulate in float32; softmax and sums are float32.

    Args:
      hidden_BTD: float32, bfloat16 or float16.
      head_VD: the output head, one row a word; cast to `hidden`'s dtype.
      labels_BT: ids below V, or -1 (`IGNORED`) where nothing is to be predicted.
      z_loss: weight of the squared log-partition (arXiv:2204.02311, section 5).
      chunk: positions of a row that go through at once. None: as many as keep a chunk's
        logits under 2**27 elements.

    Returns:
      `LossSums`; only `objective` carries a gradient.

    Raises:
      ValueError: shapes do not match, or `chunk` is not positive.

    Example:
      >>> hidden, head = jnp.ones((1, 3, 4)), jnp.zeros((5, 4))
      >>> sums = linear_cross_entropy(hidden, head, jnp.array([[1, 2, -1]]))
      >>> int(sums.count), round(float(sums.nll), 4)
      (2, 3.2189)
    """
    if hidden_BTD.shape[:2] != labels_BT.shape or hidden_BTD.shape[-1] != head_VD.shape[-1]:
        raise ValueError(
            f"hidden {hidden_BTD.shape}, head {head_VD.shape} and labels {labels_BT.shape} "
            "must be [B, T, D], [V, D] and [B, T]"
        )
    batch, length = labels_BT.shape
    if chunk is None:
        chunk = chunk_positions(batch, head_VD.shape[0])
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1 position")
    objective, nll = _sums(hidden_BTD, head_VD, labels_BT, z_loss, min(chunk, max(length, 1)))
    count = jnp.sum(labels_BT != IGNORED, dtype=jnp.int32)
    return LossSums(objective, jax.lax.stop_gradient(nll), count)


def _chunked(x_BT: Array, chunk: int, fill: int = 0) -> Array:
    """[B, T, ...] -> [ceil(T / chunk), B, chunk, ...], the tail filled up.

    Cut along positions and not along the batch: the batch is what a mesh shards, and
    every device then works on its own rows of each chunk.
    """
    batch, length, *rest = x_BT.shape
    count = -(-length // chunk)
    pad = [(0, 0), (0, count * chunk - length)] + [(0, 0)] * len(rest)
    x_BT = jnp.pad(x_BT, pad, constant_values=fill)
    return jnp.moveaxis(x_BT.reshape(batch, count, chunk, *rest), 1, 0)


def _chunk_terms(hidden, head, labels):
    """Logits, log-partition and nll of a chunk, zero where the label is ignored."""
    logits = jnp.einsum("btd,vd->btv", hidden, head, preferred_element_type=jnp.float32)
    z = jax.nn.logsumexp(logits, axis=-1)
    counted = labels != IGNORED
    target = jnp.take_along_axis(logits, jnp.where(counted, labels, 0)[..., None], axis=-1)[..., 0]
    return logits, z, jnp.where(counted, z - target, 0.0), counted


def _lift(dtype) -> float:
    """Factor on the logits' gradient while it is in `dtype`.

    float16 reaches down to 6e-8 only and loss scaling comes later (it multiplies the scalar
    cotangent). The gradient lies in [-1, 1], or a little beyond under a z-loss.
    """
    return 1024.0 if dtype == jnp.float16 else 1.0


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _sums(hidden, head, labels, z_loss, chunk):
    cast = head.astype(hidden.dtype)

    def step(sums, xs):
        _, z, nll, counted = _chunk_terms(xs[0], cast, xs[1])
        objective = jnp.sum(nll + z_loss * jnp.where(counted, z * z, 0.0))
        return (sums[0] + objective, sums[1] + jnp.sum(nll)), None

    xs = _chunked(hidden, chunk), _chunked(labels, chunk, IGNORED)
    return jax.lax.scan(step, (jnp.float32(0), jnp.float32(0)), xs)[0]


def _sums_forward(hidden, head, labels, z_loss, chunk):
    cast = head.astype(hidden.dtype)
    lift = _lift(hidden.dtype)

    def step(carry, xs):
        objective, nll_sum, d_head = carry
        h, y = xs
        logits, z, nll, counted = _chunk_terms(h, cast, y)
        objective += jnp.sum(nll + z_loss * jnp.where(counted, z * z, 0.0))
        # d objective / d logits = (1 + 2 z_loss z) softmax - onehot(label)
        soft = jnp.exp(logits - z[..., None]) * (1 + 2 * z_loss * z)[..., None]
        word = jax.lax.broadcasted_iota(y.dtype, logits.shape, logits.ndim - 1)
        target = (word == y[..., None]).astype(jnp.float32)
        d_logits = jnp.where(counted[..., None], soft - target, 0.0)
        d_logits = (d_logits * lift).astype(h.dtype)
        d_h = jnp.einsum("btv,vd->btd", d_logits, cast, preferred_element_type=jnp.float32)
        d_head += jnp.einsum("btv,btd->vd", d_logits, h, preferred_element_type=jnp.float32)
        d_h = d_h if lift != 1 else d_h.astype(h.dtype)
        return (objective, nll_sum + jnp.sum(nll), d_head), d_h

    zero = jnp.float32(0)
    start = (zero, zero, jnp.zeros(head.shape, jnp.float32))
    xs = _chunked(hidden, chunk), _chunked(labels, chunk, IGNORED)
    (objective, nll, d_head), d_h = jax.lax.scan(step, start, xs)
    batch, length, width = hidden.shape
    d_hidden = jnp.moveaxis(d_h, 0, 1).reshape(batch, len(d_h) * chunk, width)
    saved = d_hidden[:, :length], d_head, jnp.zeros((), hidden.dtype), head[:0]
    return (objective, nll), saved


def _sums_backward(z_loss, chunk, saved, cotangents):
    d_hidden, d_head, hidden_like, head_like = saved
    g = cotangents[0] / _lift(hidden_like.dtype)
    d_hidden = (d_hidden.astype(jnp.float32) * g).astype(hidden_like.dtype)
    return d_hidden, (d_head * g).astype(head_like.dtype), None


_sums.defvjp(_sums_forward, _sums_backward)
