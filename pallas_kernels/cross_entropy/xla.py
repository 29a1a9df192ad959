"""Linear cross-entropy in plain JAX, by chunks of positions; see `api.py`.

A chunk's logits live as long as the chunk. Where the loss is one sum, its cotangent is a scalar
that can multiply afterwards; so its gradient is taken in the forward pass, while the logits are
at hand: three matmuls (`forward_and_gradient`). A cotangent for each token is not known before
the backward pass, which then makes the logits again: four (`forward`, `backward`).

Chunks are cut along positions and not along the batch: the batch is what a mesh shards, and
every device then works on its own rows of each chunk.

Shape suffixes: B batch, T positions, R rows of labels, D width, V words.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.manual_axes import vary_alike

IGNORED = -1  # a label where nothing is to be predicted


@dataclass(frozen=True)
class Options:
    """What `linear_cross_entropy` takes, as one hashable value."""

    z_loss: float
    soft_cap: float | None
    label_smoothing: float
    chunk: int  # positions of a row of the batch, on XLA


class Terms(NamedTuple):
    """What the loss needs of the logits; also what its gradient gives to each."""

    lse: Float[Array, "B T"]  # log-sum-exp over the words
    target: Float[Array, "B T R"]  # logit of the label, of word 0 where it is ignored
    mean: Float[Array, "B T"] | None  # of the logits over the words; None without smoothing


def valid(labels: Int[Array, "..."], words: int) -> Float[Array, "..."]:
    """1; NaN for a label of no word, a mistake that must not pass unseen."""
    return jnp.where((labels < IGNORED) | (labels >= words), jnp.nan, 1.0)


def unit_cotangents(
    options: Options, lse: Float[Array, "B T"], labels: Int[Array, "B T R"], words: int
) -> Terms:
    """Derivatives of the summed objective by the terms.

    `objective = lse - (1 - s) target - s mean + z_loss lse^2`, where a label counts.
    """
    counted = (labels != IGNORED).astype(jnp.float32)
    rows = counted.sum(-1)
    smoothing = options.label_smoothing
    return Terms(
        lse=rows * (1 + 2 * options.z_loss * lse) * valid(labels, words).mean(-1),
        target=(smoothing - 1) * counted,
        mean=-smoothing * rows if smoothing else None,
    )


def lift(dtype, cotangents: Terms) -> Float[Array, ""] | float:
    """Factor on the logits' gradient while it is in `dtype`.

    float16 reaches down to 6e-8 only; the largest gradient of a logit is brought to about 1024.
    """
    if dtype != jnp.float16:
        return 1.0
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(x)) for x in cotangents if x is not None]))
    return 1024.0 / jnp.maximum(largest, 1e-30)


def forward(
    options: Options,
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    labels: Int[Array, "B T R"],
) -> Terms:
    """The terms, and a chunk's logits at a time."""
    cast = head.astype(hidden.dtype)
    step = lambda _, chunk: (None, _terms(options, *_logits(options, cast, *chunk)))
    chunks = _chunked(options, hidden), _chunked(options, labels, IGNORED)
    _, terms = jax.lax.scan(step, None, chunks)
    return jax.tree.map(lambda x: _joined(x, hidden.shape[1]), terms)


def forward_and_gradient(
    options: Options,
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    labels: Int[Array, "B T R"],
) -> tuple[Terms, Array, Array]:
    """The terms, and the gradient of the summed objective by hidden and head.

    In float32, except that hidden's is in its own dtype where that has float32's range.
    """
    cast, range_is_wide = head.astype(hidden.dtype), hidden.dtype != jnp.float16
    factor = 1.0 if range_is_wide else 1024.0  # `lift` of cotangents that are about 1

    def step(d_head, chunk):
        logits, y = _logits(options, cast, *chunk)
        terms = _terms(options, logits, y)
        cotangents = unit_cotangents(options, terms.lse, y, len(head))
        d_h, d_head = _gradients(
            options, chunk[0], cast, y, logits, terms.lse, cotangents, factor, d_head
        )
        return d_head, (terms, d_h.astype(hidden.dtype) if range_is_wide else d_h / factor)

    start, _ = vary_alike(jnp.zeros(head.shape, jnp.float32), hidden)
    chunks = _chunked(options, hidden), _chunked(options, labels, IGNORED)
    d_head, ys = jax.lax.scan(step, start, chunks)
    terms, d_hidden = jax.tree.map(lambda x: _joined(x, hidden.shape[1]), ys)
    return terms, d_hidden, d_head if range_is_wide else d_head / factor


def backward(
    options: Options,
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    labels: Int[Array, "B T R"],
    lse: Float[Array, "B T"],
    cotangents: Terms,
) -> tuple[Float[Array, "B T D"], Float[Array, "V D"]]:
    """Gradients of hidden and head from those of the terms."""
    cast, factor = head.astype(hidden.dtype), lift(hidden.dtype, cotangents)

    def step(d_head, chunk):
        h, y, z, ct = chunk
        logits, _ = _logits(options, cast, h, y)
        d_h, d_head = _gradients(options, h, cast, y, logits, z, ct, factor, d_head)
        return d_head, (d_h / factor).astype(hidden.dtype)

    start, _ = vary_alike(jnp.zeros(head.shape, jnp.float32), hidden)
    rest = jax.tree.map(lambda x: _chunked(options, x), (lse, cotangents))
    chunks = _chunked(options, hidden), _chunked(options, labels, IGNORED), *rest
    d_head, d_hidden = jax.lax.scan(step, start, chunks)
    return _joined(d_hidden, hidden.shape[1]), (d_head / factor).astype(head.dtype)


def _chunked(options: Options, x: Array, fill: int = 0) -> Array:
    """[B, T, ...] -> [ceil(T / chunk), B, chunk, ...], the tail filled up."""
    batch, length, *rest = x.shape
    count = -(-length // options.chunk)
    pad = [(0, 0), (0, count * options.chunk - length)] + [(0, 0)] * len(rest)
    x = jnp.pad(x, pad, constant_values=fill)
    return jnp.moveaxis(x.reshape(batch, count, options.chunk, *rest), 1, 0)


def _joined(x: Array, length: int) -> Array:
    """The inverse of `_chunked`."""
    count, batch, chunk, *rest = x.shape
    return jnp.moveaxis(x, 0, 1).reshape(batch, count * chunk, *rest)[:, :length]


def _logits(options, cast, h, y):
    logits = jnp.einsum("btd,vd->btv", h, cast, preferred_element_type=jnp.float32)
    return capped(options, logits), y


def capped(options: Options, logits: Array) -> Array:
    """`soft_cap * tanh(logits / soft_cap)`, if there is a cap."""
    cap = options.soft_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def _terms(options, logits, y) -> Terms:
    target = jnp.take_along_axis(logits, jnp.clip(y, 0, logits.shape[-1] - 1), axis=-1)
    mean = logits.mean(-1) if options.label_smoothing else None
    return Terms(jax.nn.logsumexp(logits, axis=-1), target, mean)


def _gradients(options, h, cast, y, logits, lse, cotangents, factor, d_head):
    """Gradient of a chunk of hidden, and that of the head so far; both times `factor`."""
    d = jnp.exp(logits - lse[..., None]) * cotangents.lse[..., None]
    word = jax.lax.broadcasted_iota(y.dtype, logits.shape, logits.ndim - 1)
    for row in range(y.shape[-1]):
        at = slice(row, row + 1)
        d += jnp.where(word == y[..., at], cotangents.target[..., at], 0.0)
    if cotangents.mean is not None:
        d += cotangents.mean[..., None] / logits.shape[-1]
    if options.soft_cap is not None:
        d *= 1 - (logits / options.soft_cap) ** 2  # the derivative of tanh
    d = (d * factor).astype(h.dtype)
    d_h = jnp.einsum("btv,vd->btd", d, cast, preferred_element_type=jnp.float32)
    return d_h, d_head + jnp.einsum("btv,btd->vd", d, h, preferred_element_type=jnp.float32)
