"""One layer of a Llama-family decoder in Flax NNX, and what it is made of.

What a technique replaces is an argument with a plain default: the matmul (`dot_general`), the
attention, norm and activation (`Between`). A module is a pytree; its parameters are stacked on
a leading dimension, for a loop over layers or a `jax.vmap`.

Shape suffixes: B batch, T positions, D width, H query heads, K key/value heads,
C head size, F width of the MLP.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxaccel import names
from jaxaccel.decoder_config import ACTIVATIONS, DecoderConfig, linear_shapes
from pallas_kernels import attention as attention_op
from pallas_kernels import rms_norm as rms_norm_op
from pallas_kernels import swiglu as swiglu_op

Axes = tuple[str | None, ...]


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
        self.prepared: Prepared | None = nnx.data(None)

    def __call__(self, x: Any) -> Array:
        # A norm may hand over a tree that only this matmul's technique can read.
        flat = jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]) if leaf.ndim else leaf, x)
        more = {"state": self.matmul_state, "weight": self.prepared}
        more = {key: held.get_value() for key, held in more.items() if held is not None}
        kernel = self.kernel[...].astype(x.dtype)
        out = self.dot_general(flat, kernel, (((1,), (0,)), ((), ())), **more)
        return self.shifted(out).reshape(*x.shape[:-1], out.shape[-1])

    def shifted(self, out: Array) -> Array:
        """The product, with the bias if there is one."""
        if self.bias is None:
            return out
        return out + self.bias[...].astype(out.dtype).reshape(*[1] * (out.ndim - 1), -1)


def linears(tree: Any) -> list[Linear]:
    """All linear layers among modules, always in the same order.

    Args:
      tree: modules, any tree of them.

    Returns:
      The modules themselves, not copies.
    """
    is_linear = lambda node: isinstance(node, Linear)
    return [node for node in jax.tree.leaves(tree, is_leaf=is_linear) if is_linear(node)]


class Norm(nnx.Module):
    """Root-mean-square norm with a learned scale; zero-centred, the scale is what exceeds 1."""

    def __init__(
        self,
        size: int,
        axis: str | None,
        config: DecoderConfig,
        *,
        stack: int | None,
        norm: Callable,
    ):
        lead, axes = ((), ()) if stack is None else ((stack,), ("layers",))
        self.offset = 1.0 if config.zero_centered_norm else 0.0
        start = jnp.full((*lead, size), 1 - self.offset, jnp.float32)
        self.scale = nnx.Param(start, axes=(*axes, axis))
        self.epsilon, self.norm = config.norm_epsilon, norm

    def __call__(self, x: Array, *, residual: Array | None = None, readers: tuple = ()) -> Any:
        """The normalised `x`; with a residual, the sum of both, normalised too.

        Args:
          x: any float dtype.
          residual: added to `x` first.
          readers: all `Linear`s that read the result.
        """
        scale = self.scale[...] + self.offset if self.offset else self.scale[...]
        return self.norm(x, scale, self.epsilon, residual=residual, state=_shared_state(readers))


def _shared_state(readers: tuple[Linear, ...]) -> Any:
    """The matmul state of linears with one input, if all have one: that of the first."""
    states = [reader.matmul_state for reader in readers]
    known = [state.get_value() for state in states if state is not None]
    return known[0] if known and len(known) == len(states) else None


def rms_norm(
    x: Array,
    scale: Array,
    epsilon: float,
    *,
    residual: Array | None = None,
    state: Any = None,
    implementation: str | None = None,
) -> Any:
    """The default norm, `pallas_kernels.rms_norm`; it casts for nobody, whatever the state."""
    options = {"residual": residual, "implementation": implementation}
    return rms_norm_op.rms_norm(x, scale, epsilon, **options)


def gated(activation: str, implementation: str | None = None) -> Callable[..., Array]:
    """The default `glu` of a decoder with this activation."""
    if activation == "silu":
        return lambda gate, up, state=None: swiglu_op.swiglu(
            gate, up, implementation=implementation
        )
    return lambda gate, up, state=None: ACTIVATIONS[activation](gate) * up


class Between(NamedTuple):
    """What a layer computes between its matmuls.

    Attributes:
      norm: `(x, scale, epsilon, *, residual, state) -> y`; with a residual, `x` plus that and
        `y`. The state is that of the matmuls that read `y`, None unless all have one; they are
        given `y` as it is.
      glu: `(gate, up, *, state) -> y`. None: the configured activation of gate, times up.
    """

    norm: Callable = rms_norm
    glu: Callable | None = None


class Joint(NamedTuple):
    """How a layer's linears are computed with other devices; by default, without any.

    Attributes:
      enter: `(x, linears) -> outputs`, of linears with one input. Where these are cut by columns,
        it is here that `x` comes to all devices.
      leave: `(x, linear, name) -> y`, which carries the name for rematerialisation. Where the
        linear is cut by rows, it is here that what the devices found is summed.
    """

    enter: Callable = lambda x, linears: [linear(x) for linear in linears]
    leave: Callable = lambda x, linear, name: names.tag(linear(x), name)


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
        between: Between,
        joint: Joint = Joint(),  # noqa: B008 (immutable)
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
            return Norm(size, axis, c, stack=stack, norm=between.norm)

        post_norm = lambda: make_norm(c.width, "embed") if c.post_norms else None
        self.attention_norm = make_norm(c.width, "embed")
        self.query = linear("query", ("embed", "heads"), bias=c.qkv_bias)
        self.key = linear("key", ("embed", "kv_heads"), bias=c.qkv_bias)
        self.value = linear("value", ("embed", "kv_heads"), bias=c.qkv_bias)
        self.query_norm = make_norm(c.head_size, None) if c.qk_norm else None
        self.key_norm = make_norm(c.head_size, None) if c.qk_norm else None
        self.attention_output = linear("attention_output", ("heads", "embed"), scale=out_scale)
        self.post_attention_norm = post_norm()
        self.mlp_norm = make_norm(c.width, "embed")
        self.gate = linear("gate", ("embed", "mlp"))
        self.up = linear("up", ("embed", "mlp"))
        self.down = linear("down", ("mlp", "embed"), scale=out_scale)
        self.post_mlp_norm = post_norm()
        self.config, self.window, self.attention = c, window, attention
        self.glu, self.joint = between.glu or gated(c.activation), joint

    def qkv(self, x_BTD: Array, rope: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """Queries [B, T, H, C], keys and values [B, T, K, C]; positions rotated in."""
        c = self.config
        y = self.attention_norm(x_BTD, readers=(self.query, self.key, self.value))
        y = names.tag(y, names.ATTENTION_NORM)

        found = self.joint.enter(y, (self.query, self.key, self.value))
        # As many heads as this device has.
        heads = lambda out, name: names.tag(out, name).reshape(*out.shape[:2], -1, c.head_size)
        q, k, v = map(heads, found, (names.QUERY, names.KEY, names.VALUE))
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        return rotate(q, *rope), rotate(k, *rope), v

    def finish(self, x_BTD: Array, context_BTHC: Array) -> Array:
        """Adds what attention found, then the MLP's answer."""
        x_BTD, answer_BTD = self.mlp(x_BTD, self.project(context_BTHC))
        return x_BTD + answer_BTD

    def project(self, context_BTHC: Array) -> Array:
        """What attention adds to the stream."""
        context = context_BTHC.reshape(*context_BTHC.shape[:2], -1)
        found = self.joint.leave(context, self.attention_output, names.ATTENTION_OUTPUT)
        return found if self.post_attention_norm is None else self.post_attention_norm(found)

    def attend(self, x_BTD: Array, rope: tuple[Array, Array], segments_BT: Array | None) -> Array:
        """The first block: what attention adds to `x_BTD`."""
        q, k, v = self.qkv(x_BTD, rope)
        window = None if self.window is None else (self.window - 1, None)
        mask = attention_op.Mask(
            causal=True, window=window, q_segments=segments_BT, k_segments=segments_BT
        )
        return self.project(self.mix(q, k, v, mask))

    def mix(self, q: Array, k: Array, v: Array, mask: attention_op.Mask) -> Array:
        """Attention itself, [B, T, H, C], with the model's own scale and cap."""
        return self.attention(q, k, v, mask=mask, **self.config.attention_options)

    def mlp(self, x_BTD: Array, found_BTD: Array) -> tuple[Array, Array]:
        """The second block: the stream with what attention found, and what the MLP adds to it."""
        x_BTD, y = self.mlp_norm(found_BTD, residual=x_BTD, readers=(self.gate, self.up))
        y = names.tag(y, names.MLP_NORM)
        gate, up = self.joint.enter(y, (self.gate, self.up))
        gate, up = names.tag(gate, names.MLP_GATE), names.tag(up, names.MLP_UP)
        y = names.tag(self.glu(gate, up, state=_shared_state((self.down,))), names.MLP_ACTIVATION)
        found = self.joint.leave(y, self.down, names.MLP_OUTPUT)
        return x_BTD, found if self.post_mlp_norm is None else self.post_mlp_norm(found)

    def __call__(self, x_BTD: Array, rope: tuple[Array, Array], segments_BT: Array | None) -> Array:
        x_BTD, answer_BTD = self.mlp(x_BTD, self.attend(x_BTD, rope, segments_BT))
        return x_BTD + answer_BTD
