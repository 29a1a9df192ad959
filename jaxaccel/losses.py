"""Cross-entropy that never holds the logits.

The logits of a batch are its largest tensor: 65,536 tokens of a 128,256-word vocabulary
are 31 GiB in float32, and the loss needs only two numbers of each row. Here the head's
matmul is part of the loss: `pallas_kernels.cross_entropy` has the algorithm, by kernels on
a Hopper GPU and by chunks of positions elsewhere, and says what each costs.

Where it pays: a vocabulary larger than the width. Where it does not: with one chunk it is
plain cross-entropy.
"""

from pallas_kernels.cross_entropy import (
    CHUNK_ELEMENTS,
    IGNORED,
    LossSums,
    chunk_positions,
    linear_cross_entropy,
)

__all__ = ["CHUNK_ELEMENTS", "IGNORED", "LossSums", "chunk_positions", "linear_cross_entropy"]
