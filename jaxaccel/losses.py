"""Cross-entropy that never holds the logits.

The logits of a batch are its largest tensor: 65,536 tokens of a 128,256-word vocabulary
are 31 GiB in float32, and the loss needs only two numbers of each row. Here the head's
matmul is part of the loss: `pallas_kernels.cross_entropy` has the algorithm, by kernels on
a Hopper GPU and by chunks of positions elsewhere, and says what each costs.

Where it pays: a vocabulary larger than the width. Where it does not: with one chunk it is
plain cross-entropy.

Shape suffixes: B batch, T positions, D width, V vocabulary.
"""

from jaxtyping import Array, Float, Int

from pallas_kernels import cross_entropy
from pallas_kernels.cross_entropy import CHUNK_ELEMENTS, IGNORED, LossSums, chunk_positions

__all__ = ["CHUNK_ELEMENTS", "IGNORED", "LossSums", "chunk_positions", "linear_cross_entropy"]


def linear_cross_entropy(
    hidden_BTD: Float[Array, "B T D"],
    head_VD: Float[Array, "V D"],
    labels_BT: Int[Array, "B T"],
    *,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    label_smoothing: float = 0.0,
    axis_name: str | None = None,
    chunk: int | None = None,
    implementation: str | None = None,
) -> LossSums:
    """Summed cross-entropy of `softmax(hidden @ head.T)` against `labels`.

    Per counted token, with `z = log(sum(exp(logits)))`:
    `nll = z - logits[label]`, `objective = nll + z_loss * z**2`.

    **Exactness**: exact up to rounding. The matmuls take their inputs in `hidden`'s
    dtype and accumulate in float32; softmax and sums are float32.

    Args:
      hidden_BTD: float32, bfloat16 or float16.
      head_VD: the output head, one row a word; cast to `hidden`'s dtype.
      labels_BT: ids below V, or -1 (`IGNORED`) where nothing is to be predicted.
      z_loss: weight of the squared log-partition (arXiv:2204.02311, section 5).
      chunk: positions of a row that go through at once, not by the kernels. None: as many as
        keep a chunk's logits under 2**27 elements.
      soft_cap, label_smoothing, axis_name, implementation: as for
        `pallas_kernels.cross_entropy.linear_cross_entropy`, which also takes flat arrays and
        several labels of each hidden state.

    Returns:
      `LossSums`; only `objective` carries a gradient.

    Raises:
      ValueError: shapes do not match, or an option is out of its range.
      NotImplementedError: `implementation` cannot serve these inputs, or the device.

    Example:
      >>> import jax.numpy as jnp
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
    return cross_entropy.linear_cross_entropy(
        hidden_BTD,
        head_VD,
        labels_BT,
        z_loss=z_loss,
        soft_cap=soft_cap,
        label_smoothing=label_smoothing,
        axis_name=axis_name,
        chunk=chunk,
        implementation=implementation,
    )
