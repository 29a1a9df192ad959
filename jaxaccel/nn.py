"""A Llama-family decoder in Flax NNX: the released Llama, Mistral and Qwen architecture.

The model knows no technique. What a technique replaces is an argument with a plain
default: the matmul (`dot_general`), the attention, the norm, the loop over layers
(`scan`) and the placing of activations (`constrain`). A module is a pytree; plain JAX
transforms it.

Layers are stacked on a leading dimension and run under one `scan`, so that a compiled
step does not grow with depth. Unlike layers (say a sliding window in every second one)
repeat in groups: the scan runs over groups, a group's layers run one after the other.

Shape suffixes: B batch, T positions, D width, H query heads, K key/value heads,
C head size, F width of the MLP, V vocabulary, L stack of layers.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxaccel import names
from jaxaccel.decoder_config import (
    ACTIVATIONS,
    DecoderConfig,
    RopeScaling,
    flops_per_token,
    linear_shapes,
    rope_frequencies,
)
from pallas_kernels import attention as attention_op
from pallas_kernels import rms_norm as rms_norm_op
from pallas_kernels import swiglu as swiglu_op

__all__ = [
    "Decoder",
    "DecoderConfig",
    "Layer",
    "Linear",
    "NextValue",
    "Norm",
    "Prepared",
    "RopeScaling",
    "flops_per_token",
    "linear_shapes",
    "parameter_count",
    "rope_frequencies",
    "rotate",
]

Axes = tuple[str | None, ...]


def parameter_count(config: DecoderConfig) -> int:
    """Parameters of a decoder, embedding and head included."""
    model = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    return sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(model)))


def rotate(x_BTHC: Array, cos_BTC: Array, sin_BTC: Array) -> Array:
    """Rotary embedding in the half-rotation layout: channel i pairs with i + C/2."""
    first, second = jnp.split(x_BTHC.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_BTC[:, :, None, :], sin_BTC[:, :, None, :]
    out = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return out.astype(x_BTHC.dtype)


class NextValue(nnx.Variable):
    """State of a matmul whose gradient is its next value; no parameter."""


class Prepared(nnx.Variable):
    """A kernel in the form in which its matmul reads it, made before; no parameter."""


class Linear(nnx.Module):
    """`x @ kernel (+ bias)`; leading dimensions of `x` are merged into one.

    A two-dimensional matmul is what the FP8 rewriting of XLA expects, and its weight
    gradient is one matmul too (with three dimensions XLA's CPU back end transposes).

    A `dot_general` with a method `init_state` is given that state as `state=`, and what
    `prepared` holds as `weight=`.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        axes: Axes,
        *,
        stack: int,
        bias: bool,
        std: float,
        dot_general: Callable,
        rngs: nnx.Rngs,
    ):
        normal = jax.random.normal(rngs.params(), (stack, *shape), jnp.float32)
        self.kernel = nnx.Param(normal * std, axes=("layers", *axes))
        zeros = jnp.zeros((stack, shape[1]))
        self.bias = nnx.Param(zeros, axes=("layers", axes[1])) if bias else None
        self.dot_general = dot_general
        init_state = getattr(dot_general, "init_state", lambda stack: None)
        state = init_state((stack,))
        self.matmul_state = None if state is None else NextValue(state)
        self.prepared = nnx.data(None)

    def __call__(self, x: Any) -> Array:
        # A norm may hand over a tree that only this matmul's technique can read.
        flat = jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]) if leaf.ndim else leaf, x)
        more = {"state": self.matmul_state, "weight": self.prepared}
        more = {key: held.get_value() for key, held in more.items() if held is not None}
        kernel = self.kernel[...].astype(x.dtype)
        out = self.dot_general(flat, kernel, (((1,), (0,)), ((), ())), **more)
        if self.bias is not None:
            out = out + self.bias[...].astype(x.dtype)[None]
        return out.reshape(*x.shape[:-1], out.shape[-1])


class Norm(nnx.Module):
    """Root-mean-square norm with a learned scale."""

    def __init__(self, size: int, axis: str | None, *, stack: int | None, epsilon: float, norm):
        lead, axes = ((), ()) if stack is None else ((stack,), ("layers",))
        self.scale = nnx.Param(jnp.ones((*lead, size)), axes=(*axes, axis))
        self.epsilon, self.norm = epsilon, norm

    def __call__(self, x: Array, *, residual: Array | None = None, readers: tuple = ()) -> Any:
        """The normalised `x`; with a residual, the sum of both, normalised too.

        Args:
          x: any float dtype.
          residual: added to `x` first.
          readers: all `Linear`s that read the result.
        """
        return self.norm(
            x, self.scale[...], self.epsilon, residual=residual, state=_shared_state(readers)
        )


def _shared_state(readers: tuple[Linear, ...]) -> Any:
    """The matmul state of linears with one input, if all have one: that of the first."""
    states = [reader.matmul_state for reader in readers]
    return states[0].get_value() if states and None not in states else None


def rms_norm(
    x: Array, scale: Array, epsilon: float, *, residual: Array | None = None, state: Any = None
) -> Any:
    """The default norm, `pallas_kernels.rms_norm`; it casts for nobody, whatever the state."""
    return rms_norm_op.rms_norm(x, scale, epsilon, residual=residual)


def gated(activation: str) -> Callable[..., Array]:
    """The default `glu` of a decoder with this activation."""
    if activation == "silu":
        return lambda gate, up, state=None: swiglu_op.swiglu(gate, up)
    return lambda gate, up, state=None: ACTIVATIONS[activation](gate) * up


class Layer(nnx.Module):
    """Attention, then a gated MLP, each behind a norm and added to the stream.

    `qkv` and `finish` are the halves before and after attention; a decoder with a cache
    calls them itself.
    """

    def __init__(
        self,
        config: DecoderConfig,
        window: int | None,
        *,
        stack: int,
        rngs: nnx.Rngs,
        dot_general: Callable | Mapping[str, Callable],
        attention: Callable,
        norm: Callable,
        glu: Callable,
    ):
        c, shapes = config, linear_shapes(config)
        # Output projections start smaller, so that the stream's variance does not grow
        # with depth (GPT-2; Radford et al. 2019, section 2.3).
        out_scale = 1 / math.sqrt(2 * c.layers)

        def linear(name, axes, *, bias=False, scale=1.0):
            per_layer = isinstance(dot_general, Mapping)
            return Linear(
                shapes[name],
                axes,
                stack=stack,
                bias=bias,
                std=scale / math.sqrt(shapes[name][0]),
                dot_general=dot_general[name] if per_layer else dot_general,
                rngs=rngs,
            )

        def make_norm(size, axis):
            return Norm(size, axis, stack=stack, epsilon=c.norm_epsilon, norm=norm)

        self.attention_norm = make_norm(c.width, "embed")
        self.query = linear("query", ("embed", "heads"), bias=c.qkv_bias)
        self.key = linear("key", ("embed", "kv_heads"), bias=c.qkv_bias)
        self.value = linear("value", ("embed", "kv_heads"), bias=c.qkv_bias)
        self.query_norm = make_norm(c.head_size, None) if c.qk_norm else None
        self.key_norm = make_norm(c.head_size, None) if c.qk_norm else None
        self.attention_output = linear("attention_output", ("heads", "embed"), scale=out_scale)
        self.mlp_norm = make_norm(c.width, "embed")
        self.gate = linear("gate", ("embed", "mlp"))
        self.up = linear("up", ("embed", "mlp"))
        self.down = linear("down", ("mlp", "embed"), scale=out_scale)
        self.config, self.window, self.attention, self.glu = c, window, attention, glu

    def qkv(self, x_BTD: Array, rope: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """Queries [B, T, H, C], keys and values [B, T, K, C]; positions rotated in."""
        c = self.config
        y = self.attention_norm(x_BTD, readers=(self.query, self.key, self.value))
        y = names.tag(y, names.ATTENTION_NORM)

        def heads(projection, name, count):
            out = names.tag(projection(y), name)
            return out.reshape(*x_BTD.shape[:2], count, c.head_size)

        q = heads(self.query, names.QUERY, c.heads)
        k = heads(self.key, names.KEY, c.kv_heads)
        v = heads(self.value, names.VALUE, c.kv_heads)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        return rotate(q, *rope), rotate(k, *rope), v

    def finish(self, x_BTD: Array, context_BTHC: Array) -> Array:
        """Adds what attention found, then the MLP's answer."""
        context = context_BTHC.reshape(*context_BTHC.shape[:2], -1)
        found = names.tag(self.attention_output(context), names.ATTENTION_OUTPUT)
        x_BTD, y = self.mlp_norm(found, residual=x_BTD, readers=(self.gate, self.up))
        y = names.tag(y, names.MLP_NORM)
        gate = names.tag(self.gate(y), names.MLP_GATE)
        up = names.tag(self.up(y), names.MLP_UP)
        y = names.tag(self.glu(gate, up, state=_shared_state((self.down,))), names.MLP_ACTIVATION)
        return x_BTD + names.tag(self.down(y), names.MLP_OUTPUT)

    def __call__(self, x_BTD: Array, rope: tuple[Array, Array], segments_BT: Array | None) -> Array:
        q, k, v = self.qkv(x_BTD, rope)
        window = None if self.window is None else (self.window - 1, None)
        mask = attention_op.Mask(
            causal=True, window=window, q_segments=segments_BT, k_segments=segments_BT
        )
        return self.finish(x_BTD, self.attention(q, k, v, mask=mask))


class Decoder(nnx.Module):
    """Embedding, layers, final norm; `head_VD` maps the result to logits.

    Args:
      config: the shape.
      rngs: `nnx.Rngs`; the stream `params` is drawn from.
      dtype: of activations and of each weight as it is used; parameters are float32.
      dot_general: the layers' matmul, with `jax.lax.dot_general`'s signature; or one for each
        name of `linear_shapes`.
      attention: with `pallas_kernels.attention.attention`'s signature.
      norm: `(x, scale, epsilon, *, residual, state) -> y`; with a residual, `x` plus that and
        `y`. The state is that of the matmuls that read `y`, None unless all have one; they are
        given `y` as it is.
      glu: `(gate, up, *, state) -> y`; the configured activation of gate, times up.
      scan: the loop over layers, with `jax.lax.scan`'s first three arguments.
      constrain: `(x, logical axes) -> x`, to place activations on a mesh.

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
        *,
        rngs: nnx.Rngs,
        dtype: Any = jnp.float32,
        dot_general: Callable | Mapping[str, Callable] = jax.lax.dot_general,
        attention: Callable = attention_op.attention,
        norm: Callable = rms_norm,
        glu: Callable | None = None,
        scan: Callable = jax.lax.scan,
        constrain: Callable[[Array, Axes], Array] = lambda x, axes: x,
    ):
        c = config

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
                dot_general=dot_general,
                attention=attention,
                norm=norm,
                glu=glu or gated(c.activation),
            )
            for window in c.windows
        )
        self.final_norm = Norm(c.width, "embed", stack=None, epsilon=c.norm_epsilon, norm=norm)
        self.config, self.dtype, self.scan, self.constrain = c, dtype, scan, constrain

    @property
    def head_VD(self) -> Array:
        """The output head, or the embedding where they are tied; float32."""
        return self.embedding[...] if self.head is None else self.head[...]

    def embed(self, tokens_BT: Array) -> Array:
        """Looks tokens up: [B, T] -> [B, T, D] in the compute dtype."""
        x = jnp.take(self.embedding[...], tokens_BT, axis=0).astype(self.dtype)
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
        if positions_BT is None:
            row = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
            positions_BT = jnp.broadcast_to(row, tokens_BT.shape)
        rope = self.rope(positions_BT)

        def group(x_BTD, layers):
            x_BTD = names.tag(x_BTD, names.LAYER_INPUT)
            for layer in layers:
                x_BTD = layer(x_BTD, rope, segments_BT)
            return self.constrain(x_BTD, ("batch", "sequence", None)), None

        x_BTD, _ = self.scan(group, self.embed(tokens_BT), self.layers)
        return self.final_norm(x_BTD)
