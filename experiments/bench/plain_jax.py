"""The yardstick: the decoder and its training step as plain JAX, written once, never tuned.

What a competent user writes first, with none of this project's pieces: a Python loop over
layers, matmuls on [B, T, D], einsums in `bqhd` layout, softmax over all of T x T with a
causal mask, gradients by automatic differentiation alone, the whole logits, optax. It is
what `experiments.bench.train_step` measures against. Leave it as it is: a faster yardstick
would hide what the library gains, a slower one would flatter it.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

EPSILON = 1e-5
ROPE_THETA = 10_000.0


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and its batch; the head size is width / heads."""

    layers: int
    width: int
    heads: int
    sequence: int
    batch: int
    vocab: int = 320

    @property
    def mlp_width(self) -> int:
        return 3 * self.width


def rms_norm(x, scale):
    """Root-mean-square norm over the last dimension."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPSILON) * scale


def rotate(x, cos, sin):
    """Rotary embedding in the half-rotation layout."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(x, layer, heads, cos, sin):
    """Causal multi-head attention, projections included."""
    batch, length, width = x.shape
    split = lambda y: y.reshape(batch, length, heads, -1)
    q = rotate(split(x @ layer["query"]), cos, sin)
    k = rotate(split(x @ layer["key"]), cos, sin)
    v = split(x @ layer["value"])
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width // heads) ** 0.5
    causal = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    context = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return context.reshape(batch, length, width) @ layer["attention_output"]


def mlp(x, layer):
    """SwiGLU."""
    return (jax.nn.silu(x @ layer["gate"]) * (x @ layer["up"])) @ layer["down"]


def loss(params, tokens, labels, heads):
    """Mean cross-entropy in nats of int [B, T] `tokens` and `labels`."""
    x = params["embedding"][tokens]
    half = x.shape[-1] // heads // 2
    frequency = ROPE_THETA ** -(jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(tokens.shape[1], dtype=jnp.float32)[:, None] * frequency
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    for layer in params["layers"]:
        x = x + attention(rms_norm(x, layer["attention_norm"]), layer, heads, cos, sin)
        x = x + mlp(rms_norm(x, layer["mlp_norm"]), layer)
    logits = rms_norm(x, params["final_norm"]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def make_step(heads, learning_rate, b1, b2, epsilon, weight_decay, clip_norm):
    """The optimizer and the jitted step `(params, opt_state, tokens, labels) -> (.., loss)`."""
    decays = lambda params: jax.tree.map(lambda p: p.ndim >= 2, params)
    optimizer = optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adamw(learning_rate, b1, b2, epsilon, weight_decay=weight_decay, mask=decays),
    )

    def step(params, opt_state, tokens, labels):
        value, grads = jax.value_and_grad(loss)(params, tokens, labels, heads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return optimizer, jax.jit(step, donate_argnums=(0, 1))
