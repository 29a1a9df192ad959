"""Cross-entropy that never holds the logits.

The logits of a batch are its largest tensor: 65,536 tokens of a 128,256-word vocabulary
are 31 GiB in float32, and the loss needs only two numbers of each row. Here the head's
matmul is part of the loss: `pallas_kernels.cross_entropy` has the algorithm, by kernels on
a Hopper GPU and by chunks of positions elsewhere, and says what each costs.

With heads that predict further ahead (`mtp`), the loss of each is the same op on hidden states
of its own: `ahead_labels` says what they are to predict, `ahead_cross_entropy` sums the losses of
all of them in one call, so that logits and the output head's gradient are there once.

Where it pays: a vocabulary larger than the width. Where it does not: with one chunk it is
plain cross-entropy.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.cross_entropy import (
    CHUNK_ELEMENTS,
    IGNORED,
    LossSums,
    chunk_positions,
    linear_cross_entropy,
)

__all__ = [
    "CHUNK_ELEMENTS",
    "IGNORED",
    "LossSums",
    "ahead_cross_entropy",
    "ahead_labels",
    "chunk_positions",
    "linear_cross_entropy",
]


def ahead_labels(
    labels_BT: Int[Array, "B T"], segments_BT: Int[Array, "B T"], depth: int
) -> Int[Array, "B T N"]:
    """What each position is to predict: the next token, and `depth` more after it.

    `[b, i, k] = labels[b, i + k]`, where i + k lies in the row and in the document of i. A
    document's tokens are side by side, so its two ends are all that has to be compared.

    Args:
      labels_BT: the next token of each position, IGNORED where it is not to be predicted.
      segments_BT: number of each position's document, 0 for padding.
      depth: tokens after the next one.

    Returns:
      Labels, IGNORED where there is nothing to predict; N is 1 + `depth`.

    Raises:
      ValueError: labels and segments are not both [B, T], or `depth` is below 0.

    Example:
      >>> segments = jnp.array([[1, 1, 2, 2, 3, 3, 0, 0]])
      >>> labels = jnp.where(segments > 0, 7, IGNORED)
      >>> (ahead_labels(labels, segments, 2) != IGNORED).sum((0, 1)).tolist()
      [6, 3, 0]
    """
    if labels_BT.ndim != 2 or labels_BT.shape != segments_BT.shape or depth < 0:
        raise ValueError(
            f"got labels {labels_BT.shape}, segments {segments_BT.shape}, depth {depth}; need both "
            "of one shape [B, T], and a depth of 0 or more"
        )

    def shifted(k: int) -> Array:
        later = lambda x, fill: jnp.pad(
            x[:, k:], ((0, 0), (0, min(k, x.shape[1]))), constant_values=fill
        )
        same = (later(segments_BT, 0) == segments_BT) & (segments_BT != 0)
        return jnp.where(same, later(labels_BT, IGNORED), IGNORED)

    # The next token is the batch's own business: what it masks is masked, and nothing else.
    return jnp.stack([labels_BT, *(shifted(k) for k in range(1, depth + 1))], axis=-1)


def ahead_cross_entropy(
    hidden_NBTD: Float[Array, "N B T D"],
    head_VD: Float[Array, "V D"],
    labels_BTN: Int[Array, "B T N"],
    *,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    axis_name: str | None = None,
    implementation: str | None = None,
) -> LossSums:
    """`linear_cross_entropy` of each prediction, in one call.

    Memory is that of one loss, and N times the hidden states. With N above 1 it costs XLA a fourth
    matmul, as `linear_cross_entropy` with several labels.

    Args:
      hidden_NBTD: what the output head reads for prediction k at [k], as from `Decoder.ahead`.
      head_VD: the output head.
      labels_BTN: from `ahead_labels`.
      z_loss, soft_cap, axis_name, implementation: as of `linear_cross_entropy`.

    Returns:
      `LossSums` of [N]: sums over the counted positions of each prediction.

    Raises:
      ValueError: as `linear_cross_entropy`.

    Example:
      >>> labels = jnp.array([[[1, 2], [2, IGNORED]]])
      >>> sums = ahead_cross_entropy(jnp.ones((2, 1, 2, 4)), jnp.zeros((5, 4)), labels)
      >>> sums.count.tolist(), [round(float(nll), 4) for nll in sums.nll]
      ([2, 1], [3.2189, 1.6094])
    """
    count, rows = hidden_NBTD.shape[:2]
    if labels_BTN.shape != (*hidden_NBTD.shape[1:-1], count):
        raise ValueError(
            f"got hidden states {hidden_NBTD.shape}, labels {labels_BTN.shape}; need [N, B, T, D] "
            "and [B, T, N]"
        )
    loss = functools.partial(
        linear_cross_entropy,
        z_loss=z_loss,
        soft_cap=soft_cap,
        axis_name=axis_name,
        implementation=implementation,
    )
    if count == 1:
        sums = loss(hidden_NBTD[0], head_VD, labels_BTN[..., 0])
        return jax.tree.map(lambda x: x[None], sums)
    # Rows of all predictions under one another, each with its own label and no other.
    own = jnp.eye(count, dtype=bool)[:, None, None, :]
    labels = jnp.where(own, labels_BTN[None], IGNORED).reshape(count * rows, -1, count)
    hidden = hidden_NBTD.reshape(count * rows, *hidden_NBTD.shape[2:])
    return loss(hidden, head_VD, labels)
