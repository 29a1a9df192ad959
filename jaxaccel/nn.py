"""A Llama-family decoder in Flax NNX: the released Llama, Mistral, Qwen and Gemma 2.

The model knows no technique. What a technique replaces is an argument with a plain
default: the matmul (`dot_general`), the attention, norm and activation, the loop over layers
(`scan`) and what is due to a mesh (`placement`). A module is a pytree; plain JAX
transforms it.

Layers are stacked on a leading dimension and run under one `scan`, so that a compiled
step does not grow with depth. Unlike layers (say a sliding window in every second one)
repeat in groups: the scan runs over groups, a group's layers run one after the other.

Heads that predict further ahead (`mtp`) share embedding and output head with the decoder and
leave what it computes alone.

Shape suffixes: B batch, T positions, D width, C head size, V vocabulary, N predictions of a
position.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import Partial
from jaxtyping import Array, Float, Int

from jaxaccel import names
from jaxaccel.decoder_config import (
    DecoderConfig,
    MtpConfig,
    RopeScaling,
    flops_per_token,
    linear_shapes,
    rope_frequencies,
)
from jaxaccel.layers import (
    Axes,
    Between,
    Joint,
    Layer,
    Linear,
    NextValue,
    Norm,
    Prepared,
    gated,
    linears,
    rms_norm,
    rotate,
)
from jaxaccel.mtp import Heads
from pallas_kernels import attention as attention_op

__all__ = [
    "Between",
    "Decoder",
    "DecoderConfig",
    "Heads",
    "Joint",
    "Layer",
    "Linear",
    "MtpConfig",
    "NextValue",
    "Norm",
    "Placement",
    "Prepared",
    "RopeScaling",
    "flops_per_token",
    "gated",
    "linear_shapes",
    "linears",
    "mtp_shares",
    "parameter_count",
    "rms_norm",
    "rope_frequencies",
    "rotate",
]


def parameter_count(config: DecoderConfig, mtp: MtpConfig = MtpConfig()) -> int:  # noqa: B008
    """Parameters of a decoder, embedding and head included."""
    model = jax.eval_shape(lambda: Decoder(config, mtp=mtp, rngs=nnx.Rngs(0)))
    return sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(model)))


def mtp_shares(config: DecoderConfig, sequence: int, mtp: MtpConfig) -> tuple[float, float]:
    """What heads that predict further ahead add to a decoder, in shares of the decoder alone.

    Their own parameters over the decoder's, the embedding and one output head among these; and
    their model FLOP over the decoder's. The embedding, a look-up, has none; the output head is the
    decoder's, so that it is no parameter of theirs, but each head multiplies by it once more. So
    counted DeepSeek-V3's one head adds 4.2 % of the FLOP, by the sizes that its README states:
    (2.4 - 0.9) billion over (36.7 - 0.9), activated parameters without the embedding.

    Args:
      config: shape of the decoder.
      sequence: tokens of a row.
      mtp: the heads.

    Returns:
      Share of parameters and share of FLOP; zeros without heads.

    Example:
      >>> config = DecoderConfig(64, 4, width=8, heads=2, kv_heads=1, head_size=4, mlp_width=16)
      >>> [round(share, 3) for share in mtp_shares(config, 10, MtpConfig(1, "parallel"))]
      [0.176, 0.372]
    """
    parameters = parameter_count(config, mtp) / parameter_count(config)
    flops = flops_per_token(config, sequence, mtp) / flops_per_token(config, sequence)
    return parameters - 1, flops - 1


class Placement(NamedTuple):
    """What a decoder does about the devices that it runs on; by default, nothing.

    Attributes:
      constrain: `(x, logical axes) -> x`, to place activations on a mesh.
      lookup: `(table [V, D], tokens [B, T]) -> [B, T, D]`, of the embedding.
      joint: how a layer's linears are computed with other devices.
    """

    constrain: Callable[[Array, Axes], Array] = lambda x, axes: x
    lookup: Callable[[Array, Array], Array] = lambda table, tokens: jnp.take(table, tokens, axis=0)
    joint: Joint = Joint()


class Decoder(nnx.Module):
    """Embedding, layers, final norm; `head_VD` maps the result to logits.

    Args:
      config: the shape.
      rngs: `nnx.Rngs`; the stream `params` is drawn from.
      mtp: the heads that predict further ahead; none by default. Parameters of the rest are
        drawn first, and are the same with and without them.
      dtype: of activations and of each weight as it is used; parameters are float32.
      dot_general: the layers' matmul, with `jax.lax.dot_general`'s signature; or one for each
        name of `linear_shapes`.
      attention: with `pallas_kernels.attention.attention`'s signature.
      between: norm and gated activation of the layers.
      scan: the loop over layers, with `jax.lax.scan`'s first three arguments; its body is a
        `jax.tree_util.Partial` over the arrays that every layer reads.
      placement: what it does about the devices that it runs on.

    Example:
      >>> config = DecoderConfig(32, layers=2, width=16, heads=2, kv_heads=1, head_size=8,
      ...                        mlp_width=32)
      >>> model = Decoder(config, rngs=nnx.Rngs(0))
      >>> model(jnp.zeros((1, 5), jnp.int32)).shape
      (1, 5, 16)
    """

    def __init__(
        self,
        config: DecoderConfig,
        mtp: MtpConfig = MtpConfig(),  # noqa: B008 (immutable)
        *,
        rngs: nnx.Rngs,
        dtype: Any = jnp.float32,
        dot_general: Callable | Mapping[str, Callable] = jax.lax.dot_general,
        attention: Callable = attention_op.attention,
        between: Between = Between(),  # noqa: B008 (immutable)
        scan: Callable = jax.lax.scan,
        placement: Placement = Placement(),  # noqa: B008 (immutable)
    ):
        c = config
        parts = {
            "dot_general": dot_general,
            "attention": attention,
            "between": between,
            "joint": placement.joint,
        }

        def table():
            normal = jax.random.normal(rngs.params(), (c.vocab_size, c.width), jnp.float32)
            return nnx.Param(normal * 0.02, axes=("vocab", "embed"))

        self.embedding = table()
        self.head = None if c.tied_head else table()
        self.layers = nnx.List(
            Layer(
                c,
                window,
                stack=c.layers // len(c.windows),
                rngs=rngs,
                **parts,
            )
            for window in c.windows
        )
        self.final_norm = Norm(c.width, "embed", c, stack=None, norm=between.norm)
        self.heads = Heads(c, mtp, rngs=rngs, **parts) if mtp.depth else None
        self.config, self.dtype, self.scan = c, dtype, scan
        self.lookup, self.constrain = placement.lookup, placement.constrain

    @property
    def head_VD(self) -> Array:
        """The output head, or the embedding where they are tied; float32."""
        return self.embedding[...] if self.head is None else self.head[...]

    def embed(self, tokens_BT: Array) -> Array:
        """Looks tokens up: [B, T] -> [B, T, D] in the compute dtype."""
        x = self.lookup(self.embedding[...], tokens_BT).astype(self.dtype)
        if self.config.embedding_scale != 1:
            x = x * jnp.asarray(self.config.embedding_scale, x.dtype)
        return self.constrain(x, ("batch", "sequence", None))

    def rope(self, positions_BT: Array) -> tuple[Array, Array]:
        """Cosine and sine of every position's angles, [B, T, C/2] float32."""
        frequencies = rope_frequencies(self.config)[None, None]
        angles = positions_BT[..., None].astype(jnp.float32) * frequencies
        return jnp.cos(angles), jnp.sin(angles)

    def __call__(
        self,
        tokens_BT: Int[Array, "B T"],
        *,
        segments_BT: Int[Array, "B T"] | None = None,
        positions_BT: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Hidden states after the final norm.

        Args:
          tokens_BT: ids below `vocab_size`.
          segments_BT: number of the document of each token, 0 for padding; tokens of
            unlike documents do not see each other. None: one document a row.
          positions_BT: place of each token in its document. None: counted along the row.

        Returns:
          [B, T, D] in the compute dtype.
        """
        places = segments_BT, _counted(tokens_BT, positions_BT)
        return self.final_norm(self.run_layers(self.embed(tokens_BT), *places))

    def ahead(
        self,
        tokens_BT: Int[Array, "B T"],
        *,
        segments_BT: Int[Array, "B T"] | None = None,
        positions_BT: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "N B S D"]:
        """Hidden states for the next token, and for each one that the heads predict after it.

        Args:
          tokens_BT, segments_BT, positions_BT: as of a call.

        Returns:
          [1 + depth, B, S, D] in the compute dtype: of position i, [k] is what the output head
          reads for token i + 1 + k, with [0] the result of a call. Where a head would need a
          token of the next document, or past the row, it means nothing. S is T, or what `lookup`
          leaves this device of it.
        """
        places = segments_BT, _counted(tokens_BT, positions_BT)
        embedded_BTD = self.embed(tokens_BT)
        return self.look_ahead(self.run_layers(embedded_BTD, *places), embedded_BTD, *places)

    def look_ahead(
        self,
        x_BTD: Float[Array, "B S D"],
        embedded_BTD: Float[Array, "B S D"] | None,
        segments_BT: Int[Array, "B T"] | None,
        positions_BT: Int[Array, "B T"],
    ) -> Float[Array, "N B S D"]:
        """What `ahead` returns, from what the layers found.

        Args:
          x_BTD: from `run_layers`.
          embedded_BTD: from `embed`; sequential heads read it.
          segments_BT, positions_BT: as of a call.
        """
        hidden_BTD = self.final_norm(x_BTD)
        if self.heads is None:
            return hidden_BTD[None]

        def run(rope, segments_BT, layer: Layer, x_BTD: Array) -> Array:
            y_BTD = layer(names.tag(x_BTD, names.LAYER_INPUT), rope, segments_BT)
            return self.constrain(y_BTD, ("batch", "sequence", None))

        run = Partial(run, self.rope(positions_BT), segments_BT)
        later_NBTD = self.heads(hidden_BTD, embedded_BTD, run, self.scan)
        return jnp.concatenate([hidden_BTD[None], later_NBTD])

    def run_layers(
        self,
        x_BTD: Float[Array, "B S D"],
        segments_BT: Int[Array, "B T"] | None,
        positions_BT: Int[Array, "B T"],
    ) -> Float[Array, "B S D"]:
        """The stream after all layers, before the final norm.

        Args:
          x_BTD: embedded tokens, or what earlier layers made of them.
          segments_BT, positions_BT: as of a call.
        """

        def group(rope, segments_BT, x_BTD, layers):
            x_BTD = names.tag(x_BTD, names.LAYER_INPUT)
            for layer in layers:
                x_BTD = layer(x_BTD, rope, segments_BT)
            return self.constrain(x_BTD, ("batch", "sequence", None)), None

        body = Partial(group, self.rope(positions_BT), segments_BT)
        return self.scan(body, x_BTD, self.layers)[0]


def _counted(tokens_BT: Array, positions_BT: Array | None) -> Array:
    """Places in the row, where no others are given."""
    if positions_BT is not None:
        return positions_BT
    return jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.int32), tokens_BT.shape)
