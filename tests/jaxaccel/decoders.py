"""Decoders for the tests of decoding, in which every parameter matters."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jaxaccel.cache import logits
from jaxaccel.nn import Decoder, DecoderConfig, MtpConfig

BASE = DecoderConfig(
    vocab_size=37, layers=4, width=24, heads=4, kv_heads=2, head_size=10, mlp_width=40
)
CONFIGS = {
    "grouped_query": BASE,
    "one_kv_head_tied": dataclasses.replace(BASE, kv_heads=1, tied_head=True),
    "window": dataclasses.replace(BASE, windows=(5,)),
    "window_of_one": dataclasses.replace(BASE, windows=(1,)),
    "grouped_windows": dataclasses.replace(BASE, windows=(3, None)),
    "gemma": dataclasses.replace(
        BASE, windows=(None, 4), zero_centered_norm=True, post_norms=True, embedding_scale=5.0,
        attention_scale=0.4, attention_soft_cap=1.5, logits_soft_cap=2.0, tied_head=True,
    ),
    "qwen": dataclasses.replace(BASE, qk_norm=True, qkv_bias=True, windows=(None, 7)),
}  # fmt: skip


NO_HEADS = MtpConfig()


@functools.cache
def make(name, mtp=NO_HEADS, dtype=jnp.float32):
    """Fresh scales are one, fresh biases zero: all are moved."""
    graphdef, state = nnx.split(Decoder(CONFIGS[name], rngs=nnx.Rngs(0), mtp=mtp, dtype=dtype))
    params = nnx.to_pure_dict(state)
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    leaves = [x + 0.2 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves)]
    return nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))


def tokens(batch, length, seed=0):
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, BASE.vocab_size)


@jax.jit
def full_logits(decoder, tokens_BT):
    return logits(decoder, decoder(tokens_BT))
