"""The shape of a decoder: its configuration, and what follows from it without any weights.

Shape suffixes: C head size.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of long wavelengths (its `rope_type: llama3`).

    Wavelengths above `original_context / low_frequency` are multiplied by `factor`,
    those below `original_context / high_frequency` are kept, between the two it blends.
    """

    factor: float = 8.0
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    original_context: int = 8192


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder. `windows` is the repeating group: one entry a layer of it,
    the number of positions a layer sees including its own, or None for all before.
    """

    vocab_size: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    mlp_width: int
    tied_head: bool = False
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    norm_epsilon: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    windows: tuple[int | None, ...] = (None,)

    def __post_init__(self):
        for field in ("vocab_size", "layers", "width", "heads", "head_size", "mlp_width"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be at least 1")
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} query heads do not divide into {self.kv_heads} key/value heads"
            )
        if self.head_size % 2:
            raise ValueError(f"head_size is {self.head_size}; rotary embedding needs an even one")
        if not (self.norm_epsilon > 0 and self.rope_theta > 0):
            raise ValueError(
                f"norm_epsilon is {self.norm_epsilon} and rope_theta {self.rope_theta}; both must "
                "be positive"
            )
        if not self.windows or self.layers % len(self.windows):
            raise ValueError(
                f"{self.layers} layers are no multiple of the group of {len(self.windows)} windows"
            )
        if any(window is not None and window < 1 for window in self.windows):
            raise ValueError(f"windows are {self.windows}; each must be at least 1, or None")
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"unknown activation {self.activation!r}; known: {', '.join(ACTIVATIONS)}"
            )


def linear_shapes(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """Shape of the kernel of each linear layer in a decoder's layer, by its name there."""
    c = config
    queries, keys = c.heads * c.head_size, c.kv_heads * c.head_size
    return {
        "query": (c.width, queries),
        "key": (c.width, keys),
        "value": (c.width, keys),
        "attention_output": (queries, c.width),
        "gate": (c.width, c.mlp_width),
        "up": (c.width, c.mlp_width),
        "down": (c.mlp_width, c.width),
    }


def flops_per_token(config: DecoderConfig, sequence: int) -> float:
    """Model FLOP of one token's forward and backward pass (arXiv:2204.02311, appendix B).

    6 for every parameter of a matmul, the head included and the embedding not, plus
    attention's two matmuls over the positions a query sees on average: half of the row
    under a causal mask, less under a window. Recomputation does not count.

    Example:
      >>> config = DecoderConfig(64, 1, width=8, heads=2, kv_heads=1, head_size=4, mlp_width=16)
      >>> flops_per_token(config, 10) == 6 * (8 * 16 + 8 * 8 + 3 * 8 * 16 + 64 * 8 + 8 * 10)
      True
    """
    c = config
    projections = 2 * c.width * c.head_size * (c.heads + c.kv_heads)
    matmuls = c.layers * (projections + 3 * c.width * c.mlp_width) + c.vocab_size * c.width
    seen = 0.0
    for window in c.windows:
        w = min(window or sequence, sequence)
        seen += (w * (sequence - w) + w * w / 2) / sequence
    seen *= c.layers / len(c.windows)
    return 6.0 * (matmuls + 2 * c.heads * c.head_size * seen)


def rope_frequencies(config: DecoderConfig) -> Float[Array, "C_half"]:
    """Angle per position of each pair of channels, float32 (arXiv:2104.09864, 3.2.2)."""
    half = config.head_size // 2
    frequency = config.rope_theta ** -(jnp.arange(half, dtype=jnp.float32) / half)
    s = config.rope_scaling
    if s is None:
        return frequency
    turns = s.original_context * frequency / (2 * math.pi)  # over the original context
    keep = (turns - s.low_frequency) / (s.high_frequency - s.low_frequency)
    keep = jnp.clip(keep, 0.0, 1.0)
    return frequency * (keep + (1 - keep) / s.factor)
