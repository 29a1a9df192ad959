"""Linear cross-entropy by the kernels for Hopper: what XLA does around them.

The vocabulary goes through in slices of some thousand words. A slice's gradient of the logits,
`d`, is held while XLA makes two matmuls of it: `d^T hidden`, which is the gradient of the slice's
words, complete and written once, and `d words`, which is added to that of hidden in float32. So
no two blocks of a kernel add to the same number: there are no locks, no atomics, and no sum hangs
on the order in which blocks run. A kernel without that buffer would either make the logits
D / 256 times or add gradients of hidden in memory.

Labels are XLA's, too: a label's logit is one dot product a token, and one element of `d` a token
is set. To compare each column with each label took registers that the kernel does not have.

Slices are whole tiles and of one size. Where they do not divide the vocabulary the last begins
earlier, in words that were there before, and these count once; so the head is never copied as a
whole, neither to pad it nor to cast it. Fewer words than a tile are padded. So are tokens, to 128,
and widths, to 64.

Legend: B batch, T positions, N tokens, R rows of labels, D width, V words.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.cross_entropy import kernels
from pallas_kernels.cross_entropy.xla import Options, Terms, capped, lift
from pallas_kernels.manual_axes import vary_alike

FORWARD = kernels.Tiles(words=256, stages=4, slice_bytes=2**26)
BACKWARD = kernels.Tiles(words=256, stages=3, slice_bytes=2**27)  # it stores a tile
SCOPE = "linear_cross_entropy"  # in the names of its operations, also of XLA's matmuls


@jax.named_scope(SCOPE)
def forward(
    options: Options,
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    labels: Int[Array, "B T R"],
    tiles: kernels.Tiles | None = None,
) -> Terms:
    """As `xla.forward`."""
    tiles = tiles or FORWARD
    batch, length, width = hidden.shape
    tokens = batch * length
    x = _padded(hidden.reshape(tokens, width))
    count, size = tiles.slices(x.shape[1], len(head))

    def step(carry, i):
        start, low = _slice(i, size, len(head))
        words = _words(head, x, start, size)
        lse, *sums = kernels.log_sum_exp(options, tiles, len(head), x, words, low)
        lse = jnp.logaddexp(carry[0], jax.nn.logsumexp(lse, axis=0))
        return (lse, *(old + new.sum(0) for old, new in zip(carry[1:], sums))), None

    zeros, *_ = vary_alike(jnp.zeros(len(x), jnp.float32), x, head)
    start = (zeros - jnp.inf, zeros)[: 1 + bool(options.label_smoothing)]
    (lse, *sums), _ = lax.scan(step, start, jnp.arange(count))
    rows = lambda vector: vector[:tokens].reshape(batch, length)
    mean = rows(sums[0]) / len(head) if sums else None
    return Terms(rows(lse), _targets(options, hidden, head, labels), mean)


@jax.named_scope(SCOPE)
def backward(
    options: Options,
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    labels: Int[Array, "B T R"],
    lse: Float[Array, "B T"],
    cotangents: Terms,
    tiles: kernels.Tiles | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "V D"]]:
    """As `xla.backward`."""
    tiles = tiles or BACKWARD
    tokens, width = labels.shape[0] * labels.shape[1], hidden.shape[-1]
    x = _padded(hidden.reshape(tokens, width))
    count, size = tiles.slices(max(x.shape), len(head))
    factor = lift(hidden.dtype, cotangents)
    ct = jax.tree.map(lambda array: array * factor, cotangents)
    if ct.mean is not None:
        ct = ct._replace(mean=ct.mean / len(head))

    def rows(array):  # [B, T, ...] -> [N, ...]
        array = array.reshape(tokens, *array.shape[2:])
        return jnp.pad(array, [(0, len(x) - tokens)] + [(0, 0)] * (array.ndim - 1))

    labels_NR, at_labels_NR = rows(labels), rows(_at_labels(options, hidden, head, labels, lse, ct))
    vectors = rows(lse * kernels.LOG2_E), rows(ct.lse), None if ct.mean is None else rows(ct.mean)

    def step(carry, i):
        d_x, d_head = carry
        start, low = _slice(i, size, len(head))
        words = _words(head, x, start, size)
        d = kernels.d_logits(options, tiles, len(head), x, words, *vectors)
        column = labels_NR - start
        column = jnp.where((column >= 0) & (column < size), column, size)  # dropped
        token = lax.broadcasted_iota(column.dtype, column.shape, 0)
        d = d.at[token, column].set(at_labels_NR.astype(d.dtype), mode="drop")
        dot = partial(lax.dot_general, preferred_element_type=jnp.float32)
        d_words = dot(d, x, (((0,), (0,)), ((), ()))) / factor
        d_words = d_words[: len(head), :width].astype(head.dtype)
        d_head = lax.dynamic_update_slice_in_dim(d_head, d_words, start, 0)
        # Words of the slice before gave hidden their gradient there.
        new = jnp.where(lax.broadcasted_iota(jnp.int32, words.shape, 0) >= low, words, 0)
        return (d_x + dot(d, new, (((1,), (0,)), ((), ()))), d_head), None

    start = jnp.zeros(x.shape, jnp.float32), jnp.zeros(head.shape, head.dtype)
    start = vary_alike(*start, x, head)[:2]
    (d_x, d_head), _ = lax.scan(step, start, jnp.arange(count))
    d_hidden = (d_x[:tokens, :width] / factor).astype(hidden.dtype)
    return d_hidden.reshape(hidden.shape), d_head


def padded(size: int, unit: int) -> int:
    """A size in whole units, one at least."""
    return max(-(-size // unit), 1) * unit


def _padded(x: Array) -> Array:
    sizes = padded(x.shape[0], kernels.TOKENS), padded(x.shape[1], kernels.INNER)
    return jnp.pad(x, [(0, size - old) for size, old in zip(sizes, x.shape, strict=True)])


def _slice(i: Array, size: int, words: int) -> tuple[Array, Array]:
    """Where a slice begins, and how many of its words were in the one before."""
    start = jnp.maximum(jnp.minimum(i * size, words - size), 0)
    return start, i * size - start


def _words(head, x, start, size) -> Array:
    """A slice of the head, in the dtype of x and as wide."""
    part = lax.dynamic_slice_in_dim(head, start, min(size, len(head))).astype(x.dtype)
    return jnp.pad(part, [(0, size - len(part)), (0, x.shape[1] - part.shape[1])])


def _targets(options, hidden, head, labels) -> Float[Array, "B T R"]:
    """The label's logit: what the kernel has for it, up to the order of a float32 sum."""

    def rounded(x):
        # As the kernel sees it. XLA takes a cast to 16 bits and back for no cast at all.
        bits = jnp.finfo(hidden.dtype).nmant
        return lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=bits)

    words = head[jnp.clip(labels, 0, len(head) - 1)]
    return capped(options, (rounded(hidden)[:, :, None] * rounded(words)).sum(-1))


def _at_labels(options, hidden, head, labels, lse, ct) -> Float[Array, "B T R"]:
    """The gradient of the labels' logits; that of labels that a token has twice is one number."""
    target = _targets(options, hidden, head, labels)
    d = jnp.exp(target - lse[..., None]) * ct.lse[..., None]
    if ct.mean is not None:
        d += ct.mean[..., None]
    same = labels[..., :, None] == labels[..., None, :]
    d += jnp.where(same, ct.target[..., None, :], 0.0).sum(-1)
    return d if options.soft_cap is None else d * (1 - (target / options.soft_cap) ** 2)
