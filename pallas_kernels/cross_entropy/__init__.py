"""Linear cross-entropy: see `api.py`."""

from pallas_kernels.cross_entropy.api import (
    CHUNK_ELEMENTS,
    LossSums,
    TokenLosses,
    chunk_positions,
    linear_cross_entropy,
    token_cross_entropy,
    token_cross_entropy_reference,
)
from pallas_kernels.cross_entropy.xla import IGNORED

__all__ = [
    "CHUNK_ELEMENTS",
    "IGNORED",
    "LossSums",
    "TokenLosses",
    "chunk_positions",
    "linear_cross_entropy",
    "token_cross_entropy",
    "token_cross_entropy_reference",
]
