"""The shape of a decoder: its configuration, and what follows from it without any weights.

Shape suffixes: C head size.
"""

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Literal, get_args

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
    zero_centered_norm: bool = False
    """A norm multiplies by 1 + its scale (arXiv:2403.08295); norms of queries and keys too."""
    post_norms: bool = False
    """What a block adds to the stream is normed first (arXiv:2408.00118, section 2)."""
    embedding_scale: float = 1.0
    """Embeddings are multiplied by it; heads that predict further ahead read them so too."""
    attention_scale: float | None = None
    """Of queries times keys; None: head_size ** -0.5."""
    attention_soft_cap: float | None = None
    """Bound on attention's logits, by tanh; None: none."""
    logits_soft_cap: float | None = None
    """Bound on the output head's logits, likewise."""

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
        for field in (
            "embedding_scale", "attention_scale", "attention_soft_cap", "logits_soft_cap"
        ):  # fmt: skip
            value = getattr(self, field)
            if value is not None and not 0 < value < math.inf:
                none = "" if field == "embedding_scale" else ", or None"
                raise ValueError(f"{field} is {value}; it must be positive and finite{none}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"unknown activation {self.activation!r}; known: {', '.join(ACTIVATIONS)}"
            )

    @property
    def attention_options(self) -> dict[str, float]:
        """What attention is told beside the mask; empty where it would do so anyway."""
        options = {"scale": self.attention_scale, "logits_soft_cap": self.attention_soft_cap}
        return {name: value for name, value in options.items() if value is not None}


@dataclasses.dataclass(frozen=True)
class MtpConfig:
    """Multi-token prediction: heads that predict the tokens after the next one; see `mtp`."""

    depth: int = 0
    """Heads; head k of 1 to DEPTH predicts the token k places after the next. 0: none."""
    kind: Literal["sequential", "parallel"] = "sequential"
    """sequential: each reads the one before and the tokens between (DeepSeek-V3). parallel: all
    read the decoder alone (Gloeckle et al.)."""
    weight: float = 0.3
    """Of the heads' mean loss, beside the decoder's own."""
    schedule: str = "constant"
    """constant, or STEP:WEIGHT (several, comma-separated): another weight from that step on."""

    def __post_init__(self):
        if operator.index(self.depth) < 0:
            raise ValueError(f"mtp depth is {self.depth}; it must be 0 (no heads) or more")
        if self.kind not in get_args(MtpConfig.__annotations__["kind"]):
            raise ValueError(f"mtp kind is {self.kind!r}; known: sequential, parallel")
        for step, weight in [(0, self.weight), *self.changes]:
            if not 0 <= weight < float("inf"):
                raise ValueError(f"mtp weight is {weight}; it must be 0 or more, and finite")
            if step < 0:
                raise ValueError(f"mtp schedule {self.schedule!r} has step {step}, below 0")
        if len({step for step, _ in self.changes}) < len(self.changes):
            raise ValueError(f"mtp schedule {self.schedule!r} has two weights for one step")

    @property
    def changes(self) -> tuple[tuple[int, float], ...]:
        """The schedule's (step, weight) pairs, in the order of steps."""
        if self.schedule == "constant":
            return ()
        try:
            pairs = [part.split(":") for part in self.schedule.split(",")]
            return tuple(sorted((int(step), float(weight)) for step, weight in pairs))
        except ValueError:
            raise ValueError(
                f"mtp schedule is {self.schedule!r}; legal: constant, or STEP:WEIGHT like 6000:0.1"
            ) from None


def linear_shapes(
    config: DecoderConfig,
    mtp: MtpConfig = MtpConfig(),
) -> dict[str, tuple[int, int]]:
    """Shape of the kernel of each linear layer in a decoder's layer, by its name there.

    With sequential heads also that of their `mtp_projection`; the rest of a head is a layer.
    """
    c = config
    queries, keys = c.heads * c.head_size, c.kv_heads * c.head_size
    joined = mtp.depth > 0 and mtp.kind == "sequential"
    return {
        "query": (c.width, queries),
        "key": (c.width, keys),
        "value": (c.width, keys),
        "attention_output": (queries, c.width),
        "gate": (c.width, c.mlp_width),
        "up": (c.width, c.mlp_width),
        "down": (c.mlp_width, c.width),
        **({"mtp_projection": (2 * c.width, c.width)} if joined else {}),
    }


def flops_per_token(
    config: DecoderConfig,
    sequence: int,
    mtp: MtpConfig = MtpConfig(),
) -> float:
    """Model FLOP of one token's forward and backward pass (arXiv:2204.02311, appendix B).

    6 for every parameter of a matmul, the head included and the embedding not, plus
    attention's two matmuls over the positions a query sees on average: half of the row
    under a causal mask, less under a window. Recomputation does not count. A head of `mtp` is a
    layer, the output head once more, and its projection.

    Example:
      >>> config = DecoderConfig(64, 1, width=8, heads=2, kv_heads=1, head_size=4, mlp_width=16)
      >>> flops_per_token(config, 10) == 6 * (8 * 16 + 8 * 8 + 3 * 8 * 16 + 64 * 8 + 8 * 10)
      True
    """
    c = config

    def attended(window):  # of all query heads, both matmuls
        w = min(window or sequence, sequence)
        return 2 * c.heads * c.head_size * (w * (sequence - w) + w * w / 2) / sequence

    shapes = linear_shapes(c, mtp)
    projection = math.prod(shapes.pop("mtp_projection", (0,)))
    layer, head = sum(map(math.prod, shapes.values())), c.vocab_size * c.width
    trunk = c.layers * layer + c.layers / len(c.windows) * sum(map(attended, c.windows)) + head
    ahead = mtp.depth * (layer + attended(c.windows[-1]) + head + projection)
    return 6.0 * (trunk + ahead)


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
