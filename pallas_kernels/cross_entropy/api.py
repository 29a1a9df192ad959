"""Linear cross-entropy: loss and gradients from hidden states and the head, without the logits.

The logits of a batch are its largest tensor: 16,384 tokens of a 128,256-word vocabulary are
7.8 GiB in float32, and the loss needs two numbers of each row, the log-sum-exp and the logit of
the label. So the head's matmul is part of the loss. Who computes it:

  Hopper, bfloat16 and float16   the kernels of `kernels.py`: a tile of logits lives in registers,
                                 the log-sum-exp is summed as tiles go by
  all else                       XLA by chunks of positions, `xla.py`

Everything that is not a matmul over words (labels that are ignored, smoothing, z-loss, sums,
shards of the vocabulary) is plain JAX on one number a token. That leaves one function to
differentiate by hand, `(hidden, head) -> (log-sum-exp, logit of the label, mean logit)`, whose
gradient by a logit is `softmax * d_lse + onehot * d_target + d_mean / V`.

Nothing is filtered or skipped: it is exact up to rounding, and bit-equal from run to run.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.cross_entropy import mosaic, xla
from pallas_kernels.cross_entropy.xla import IGNORED, Options, Terms
from pallas_kernels.manual_axes import vary_alike

# Logits of one chunk on XLA, in elements: 512 MiB of float32.
CHUNK_ELEMENTS = 2**27


class LossSums(NamedTuple):
    """Sums over the counted tokens; divide by `count` for means."""

    objective: Float[Array, "*R"]  # what to differentiate: nll, smoothed, + z_loss * z**2
    nll: Float[Array, "*R"]  # negative log-likelihood in nats; no gradient
    count: Int[Array, "*R"]  # labels that are not IGNORED


class TokenLosses(NamedTuple):
    """Losses of each token, all differentiable; zero where the label is ignored."""

    objective: Float[Array, "*BR"]  # nll, smoothed, + z_loss * z**2
    nll: Float[Array, "*BR"]  # negative log-likelihood in nats
    lse: Float[Array, "*B"]  # z, the log-sum-exp of the logits, of ignored tokens too


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


def token_cross_entropy_reference(
    hidden: Float[Array, "*B D"],
    head: Float[Array, "V D"],
    labels: Int[Array, "*BR"],
    *,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    label_smoothing: float = 0.0,
) -> TokenLosses:
    """`token_cross_entropy` with all logits at hand, differentiated by JAX.

    Args:
      hidden, head, labels, z_loss, soft_cap, label_smoothing: as for `token_cross_entropy`.

    Returns:
      The same as `token_cross_entropy`.
    """
    logits = (hidden @ head.astype(hidden.dtype).T).astype(jnp.float32)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    lse = jax.nn.logsumexp(logits, axis=-1)
    rows = labels if labels.ndim == hidden.ndim else labels[..., None]
    log_p = logits - lse[..., None]
    nll = -jnp.take_along_axis(log_p, jnp.maximum(rows, 0), axis=-1)
    smooth = (1 - label_smoothing) * nll - label_smoothing * log_p.mean(-1, keepdims=True)
    objective = smooth + z_loss * lse[..., None] ** 2
    objective, nll = (
        jnp.where(rows != IGNORED, x, 0.0).reshape(labels.shape) for x in (objective, nll)
    )
    return TokenLosses(objective, nll, lse)


def linear_cross_entropy(
    hidden: Float[Array, "*B D"],
    head: Float[Array, "V D"],
    labels: Int[Array, "*BR"],
    *,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    label_smoothing: float = 0.0,
    axis_name: str | None = None,
    chunk: int | None = None,
    implementation: str | None = None,
) -> LossSums:
    """Summed cross-entropy of `softmax(hidden @ head.T)` against `labels`.

    Per counted token, with `logits = soft_cap * tanh(hidden @ head.T / soft_cap)` and
    `z = log(sum(exp(logits)))`, `nll = z - logits[label]`, and with label smoothing s
    `objective = (1 - s) * nll + s * (z - mean(logits)) + z_loss * z**2`.

    **Exactness**: exact up to rounding. The matmuls take their inputs in `hidden`'s dtype and
    accumulate in float32; softmax and sums are float32; the gradient of the logits is rounded
    to `hidden`'s dtype before its two matmuls. Runs are bit-equal.

    **Memory**: on XLA a chunk of logits, in float32. By the kernels no logits, but a slice of the
    head in 16 bits, at most 2**26 bytes, and in the backward pass the gradient of a slice's
    logits in 16 bits, at most 2**27 bytes, or 2048 words where that is more, and hidden's
    gradient in float32. **Compute**: three matmuls of 2 N V D FLOP on XLA for one row of labels
    without `axis_name`; four elsewhere, as the backward pass makes the logits again.

    Args:
      hidden: [N, D] or [B, T, D]; float32, bfloat16 or float16.
      head: the output head, one row a word; cast to `hidden`'s dtype. Under `axis_name` this
        device's shard of it, all of one size, in order.
      labels: the shape of hidden without D; or with a dim R after it, for R labels of each hidden
        state, each with sums of its own. Ids below V, of the whole vocabulary; -1 (`IGNORED`)
        where nothing is to be predicted. Any other label makes its sums NaN, and their gradients.
      z_loss: weight of the squared log-partition (arXiv:2204.02311, section 5).
      soft_cap: bound on the logits' magnitude, by tanh (arXiv:2408.00118, section 2). None: none.
      label_smoothing: share of the target that is spread evenly over all words.
      axis_name: mesh axis of an enclosing `jax.shard_map` over which the vocabulary is sharded.
      chunk: positions of a row that go through at once on XLA, a flat `hidden` being one row.
        None: `chunk_positions`.
      implementation: "mosaic_gpu", "xla"; None: by the device the program is lowered for.

    Returns:
      `LossSums`, of scalars, or of [R]; only `objective` carries a gradient.

    Raises:
      ValueError: shapes do not match, or an option is out of its range.
      NotImplementedError: "mosaic_gpu" cannot serve these inputs, or the device.

    Example:
      >>> hidden, head = jnp.ones((3, 4)), jnp.zeros((5, 4))
      >>> sums = linear_cross_entropy(hidden, head, jnp.array([1, 2, -1]))
      >>> int(sums.count), round(float(sums.nll), 4)
      (2, 3.2189)
    """
    options, hidden_BTD, labels_BTR = _prepare(
        hidden, head, labels, z_loss, soft_cap, label_smoothing, chunk
    )
    count = jnp.sum(labels_BTR != IGNORED, axis=(0, 1), dtype=jnp.int32)
    if axis_name is None and labels_BTR.shape[-1] == 1:
        operands = vary_alike(hidden_BTD, head, labels_BTR)
        objective, nll = _sums(options, implementation, *operands)
    else:
        whole = _whole_terms(options, implementation, axis_name, hidden_BTD, head, labels_BTR)
        objective, nll = (x.sum((0, 1)) for x in _losses(options, labels_BTR, *whole))
    shape = labels.shape[hidden.ndim - 1 :]
    objective, nll, count = (x.reshape(shape) for x in (objective, nll, count))
    return LossSums(objective, jax.lax.stop_gradient(nll), count)


def token_cross_entropy(
    hidden: Float[Array, "*B D"],
    head: Float[Array, "V D"],
    labels: Int[Array, "*BR"],
    *,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    label_smoothing: float = 0.0,
    axis_name: str | None = None,
    chunk: int | None = None,
    implementation: str | None = None,
) -> TokenLosses:
    """The terms of `linear_cross_entropy` for each token, and the log-sum-exp.

    For weights on tokens, log-probabilities, or a use of the log-sum-exp of one's own. A
    cotangent for each token costs a fourth matmul on XLA, too; otherwise all is as there.

    Args:
      hidden, head, labels, z_loss, soft_cap, label_smoothing, axis_name, chunk, implementation:
        as for `linear_cross_entropy`.

    Returns:
      `TokenLosses`, float32: `objective` and `nll` of the shape of `labels`, `lse` of that of
      `hidden` without D.

    Raises:
      ValueError, NotImplementedError: as `linear_cross_entropy`.

    Example:
      >>> losses = token_cross_entropy(jnp.ones((2, 4)), jnp.zeros((5, 4)), jnp.array([1, -1]))
      >>> [round(float(x), 4) for x in (*losses.nll, *losses.lse)]
      [1.6094, 0.0, 1.6094, 1.6094]
    """
    options, hidden_BTD, labels_BTR = _prepare(
        hidden, head, labels, z_loss, soft_cap, label_smoothing, chunk
    )
    terms, words = _whole_terms(options, implementation, axis_name, hidden_BTD, head, labels_BTR)
    both = _losses(options, labels_BTR, terms, words)
    objective, nll = (x.reshape(labels.shape) for x in both)
    return TokenLosses(objective, nll, terms.lse.reshape(hidden.shape[:-1]))


def _prepare(hidden, head, labels, z_loss, soft_cap, label_smoothing, chunk):
    """Checks, and brings hidden to [B, T, D], labels to [B, T, R]."""
    *lead, width = hidden.shape
    fits = len(lead) in (1, 2) and head.ndim == 2 and head.shape[1] == width and head.shape[0]
    if not fits or labels.shape[: len(lead)] != tuple(lead) or labels.ndim > len(lead) + 1:
        raise ValueError(
            f"hidden {hidden.shape}, head {head.shape} and labels {labels.shape} "
            "must be [B, T, D], [V, D] and [B, T]; or [N, D] and [N]; labels may end in a dim R"
        )
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (hidden, head)):
        raise ValueError(
            f"hidden is {hidden.dtype}, head {head.dtype}; both must be floating-point"
        )
    if not jnp.issubdtype(labels.dtype, jnp.signedinteger):
        raise ValueError(f"labels are {labels.dtype}; they must be signed integers, ids and -1")
    if not 0 <= z_loss < float("inf"):
        raise ValueError(f"z_loss is {z_loss}; it must be 0 or more, and finite")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap is {soft_cap}; it must be positive, or None")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing is {label_smoothing}; it must be in [0, 1)")
    batch, length = lead if len(lead) == 2 else (1, *lead)
    if chunk is None:
        chunk = chunk_positions(batch, head.shape[0])
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1 position")
    options = Options(z_loss, soft_cap, label_smoothing, min(chunk, max(length, 1)))
    rows = labels.shape[len(lead)] if labels.ndim > len(lead) else 1
    return options, hidden.reshape(batch, length, width), labels.reshape(batch, length, rows)


def _losses(options: Options, labels_BTR, terms: Terms, words: int) -> tuple[Array, Array]:
    """Objective and nll, [B, T, R]; NaN for a label of no word, and so is the gradient."""
    lse = terms.lse[..., None] * xla.valid(labels_BTR, words)
    nll = lse - terms.target
    objective = nll
    if terms.mean is not None:  # label smoothing
        even = lse - terms.mean[..., None]
        objective = (1 - options.label_smoothing) * nll + options.label_smoothing * even
    if options.z_loss:
        objective += options.z_loss * lse**2
    objective, nll = (jnp.where(labels_BTR != IGNORED, x, 0.0) for x in (objective, nll))
    return objective, nll


def _whole_terms(options, implementation, axis_name, hidden, head, labels) -> tuple[Terms, int]:
    """The terms over the whole vocabulary, of which `head` may be a shard; and its words."""
    words = head.shape[0]
    if axis_name is None:
        return _terms(options, implementation, *vary_alike(hidden, head, labels)), words
    shards = jax.lax.axis_size(axis_name)
    here = labels - jax.lax.axis_index(axis_name) * words
    mine = (here >= 0) & (here < words)
    here = jnp.where(mine, here, IGNORED)  # IGNORED is no word of any shard
    terms = _terms(options, implementation, *vary_alike(hidden, head, here))
    top = jax.lax.pmax(jax.lax.stop_gradient(terms.lse), axis_name)
    lse = top + jnp.log(jax.lax.psum(jnp.exp(terms.lse - top), axis_name))
    target = jax.lax.psum(jnp.where(mine, terms.target, 0.0), axis_name)
    mean = None if terms.mean is None else jax.lax.pmean(terms.mean, axis_name)
    return Terms(lse, target, mean), words * shards


def _unfit(hidden, head) -> str | None:
    if hidden.dtype not in (jnp.bfloat16, jnp.float16):
        return f"has no {hidden.dtype}"
    return dispatch.unsharded(hidden, head)


def _forward(options, implementation, hidden, head, labels) -> Terms:
    kernel, plain = (partial(form.forward, options) for form in (mosaic, xla))
    operands = hidden, head, labels
    return dispatch.choose(implementation, kernel, plain, *operands, unfit=_unfit(hidden, head))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _terms(options, implementation, hidden, head, labels) -> Terms:
    return _forward(options, implementation, hidden, head, labels)


def _terms_forward(options, implementation, hidden, head, labels):
    dispatch.refuse_explicit("the gradient of linear cross-entropy", hidden, head)
    terms = _forward(options, implementation, hidden, head, labels)
    return terms, (hidden, head, labels, terms.lse)


def _terms_backward(options, implementation, saved, cotangents: Terms):
    kernel, plain = (partial(form.backward, options) for form in (mosaic, xla))
    unfit = _unfit(*saved[:2])
    gradients = dispatch.choose(implementation, kernel, plain, *saved, cotangents, unfit=unfit)
    return *gradients, None


_terms.defvjp(_terms_forward, _terms_backward)


def _summed(options, labels, terms: Terms, words: int) -> tuple[Array, Array]:
    objective, nll = _losses(options, labels, terms, words)
    return objective.sum(), nll.sum()


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sums(options, implementation, hidden, head, labels):
    """Sums over all tokens, for one row of labels; only the first is differentiated."""
    terms = _forward(options, implementation, hidden, head, labels)
    return _summed(options, labels, terms, head.shape[0])


def _sums_forward(options, implementation, hidden, head, labels):
    """XLA has its gradient now, the kernels only later: neither form keeps what it lacks.

    Both must return the same arrays, as the choice is made while lowering. Those that a form
    does not need are zeros that nothing reads, and are gone from the compiled program.
    """

    dispatch.refuse_explicit("the gradient of linear cross-entropy", hidden, head)

    def kernel(*operands):
        like = jax.eval_shape(plain, *operands)[1:]
        return mosaic.forward(options, *operands), *(jnp.zeros(x.shape, x.dtype) for x in like)

    plain = partial(xla.forward_and_gradient, options)
    operands, unfit = (hidden, head, labels), _unfit(hidden, head)
    terms, *gradients = dispatch.choose(implementation, kernel, plain, *operands, unfit=unfit)
    sums = _summed(options, labels, terms, head.shape[0])
    return sums, (hidden, head, labels, terms.lse, gradients)


def _sums_backward(options, implementation, saved, cotangents):
    def kernel(hidden, head, labels, lse, _, g):
        unit = xla.unit_cotangents(options, lse, labels, head.shape[0])
        scaled = jax.tree.map(lambda x: x * g, unit)
        return mosaic.backward(options, hidden, head, labels, lse, scaled)

    def plain(hidden, head, labels, lse, gradients, g):
        d_hidden, d_head = gradients
        d_hidden = (d_hidden.astype(jnp.float32) * g).astype(hidden.dtype)
        return d_hidden, (d_head * g).astype(head.dtype)

    operands, unfit = (*saved, cotangents[0]), _unfit(*saved[:2])
    return *dispatch.choose(implementation, kernel, plain, *operands, unfit=unfit), None


_sums.defvjp(_sums_forward, _sums_backward)
