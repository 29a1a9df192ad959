"""Text out of a decoder: a key/value cache of static shape, and sampling.

The keys and values of positions already seen are kept, so that a new token costs one
position and not all of them. The cache has room for a fixed number of positions; each row
says how many of them count. That makes three things one operation, `forward`: a prompt, cut
into chunks of one length, its last one padded (`counts_B` says how much of it is real);
a single token; a block of drafts for a speculative decoder. Rolling back is setting
`lengths`: what lies at or past a row's length is never seen, because the query at
position p sees positions up to p only, and the block it comes with has written those.
So nothing depends on the lengths of prompts, and a program is compiled once for chunks and
once for single tokens.

Randomness is keyed by (seed, row, position). The token at a position is drawn with the same
noise however one gets there: in one step or as part of a verified block.

What could be better: a layer with a sliding window keeps all positions and looks at the
last few; a ring would hold only those, but cannot be rolled back past its slack.

Shape suffixes: B batch, T new positions, S positions of the cache, D width, K key/value
heads, C head size, V vocabulary, L stack of layers.
"""

import dataclasses
import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxaccel.nn import Decoder, DecoderConfig
from pallas_kernels.attention import Mask

PREFILL = 128  # prompt positions that go through at once
ROOM = 256  # the cache of `generate` is a multiple of it: few shapes to compile for


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values by position; made by `init_cache`."""

    # Any: JAX rebuilds pytrees around leaves that are no arrays.
    keys: Any  # one [L, B, S, K, C] for each layer of the repeating group
    values: Any  # likewise
    lengths: Any  # int32 [B]: positions of each row that count


def init_cache(config: DecoderConfig, batch: int, length: int, dtype: Any = jnp.float32) -> Cache:
    """An empty cache.

    Memory: 2 * layers * batch * length * kv_heads * head_size elements.

    Args:
      config: shape of the decoder.
      batch: rows.
      length: positions a row has room for.
      dtype: of keys and values.

    Returns:
      A cache in which no position counts.

    Example:
      >>> config = DecoderConfig(32, layers=4, width=16, heads=2, kv_heads=1, head_size=8,
      ...                        mlp_width=32, windows=(None, 5))
      >>> [k.shape for k in init_cache(config, batch=3, length=10).keys]
      [(2, 3, 10, 1, 8), (2, 3, 10, 1, 8)]
    """
    group = len(config.windows)
    shape = (config.layers // group, batch, length, config.kv_heads, config.head_size)
    zeros = lambda: tuple(jnp.zeros(shape, dtype) for _ in range(group))
    return Cache(zeros(), zeros(), jnp.zeros(batch, jnp.int32))


def forward(
    decoder: Decoder,
    tokens_BT: Int[Array, "B T"],
    cache: Cache,
    counts_B: Int[Array, "B"] | None = None,
) -> tuple[Float[Array, "B T D"], Cache]:
    """Hidden states of tokens that follow those in the cache.

    Row b's tokens stand at positions `lengths[b] + (0 .. T - 1)`.

    **Exactness**: exact; a row's hidden states are those of `decoder` on the whole row, up
    to rounding (and the cache's, if its dtype is narrower).

    Args:
      decoder: any; its layers' attention must take a mask with an offset per row.
      tokens_BT: ids below the vocabulary size, T at least 1.
      cache: has room for the tokens. A token past its room is dropped and its hidden state
        means nothing: lengths are known at run time only, so this cannot be checked here.
      counts_B: how many of a row's tokens are real, the rest is padding after them.
        None: all.

    Returns:
      Hidden states after the final norm, in the decoder's dtype (of padding: anything), and
      the cache, `counts_B` positions longer.
    """
    rows, length = tokens_BT.shape
    offsets_B = cache.lengths
    positions_BT = offsets_B[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
    rope = decoder.rope(positions_BT)
    row_B1 = jnp.arange(rows)[:, None]

    # The cache is carried and written in place, one position a layer. As a scanned input and
    # output it would be copied whole for every token: three times slower at 8192 positions.
    def write(cache_LBSKC, stack, new_BTKC):
        # Not dynamic_update_slice: it would move a block that does not fit over older entries.
        place = cache_LBSKC.at[stack, row_B1, positions_BT]
        return place.set(new_BTKC.astype(cache_LBSKC.dtype), mode="drop", unique_indices=True)

    def group(carry, xs):
        x_BTD, keys, values = carry[0], list(carry[1]), list(carry[2])
        layers, stack = xs
        for i, layer in enumerate(layers):
            q, k, v = layer.qkv(x_BTD, rope)
            keys[i], values[i] = write(keys[i], stack, k), write(values[i], stack, v)
            window = None if layer.window is None else (layer.window - 1, None)
            context = layer.attention(
                q,
                keys[i][stack].astype(q.dtype),
                values[i][stack].astype(q.dtype),
                mask=Mask(causal=True, window=window, offset=offsets_B),
            )
            x_BTD = layer.finish(x_BTD, context)
        return (x_BTD, tuple(keys), tuple(values)), None

    carry = (decoder.embed(tokens_BT), cache.keys, cache.values)
    xs = (decoder.layers, jnp.arange(len(cache.keys[0])))
    (x_BTD, keys, values), _ = jax.lax.scan(group, carry, xs)
    lengths_B = offsets_B + (length if counts_B is None else counts_B)
    return decoder.final_norm(x_BTD), Cache(keys, values, lengths_B)


def logits(decoder: Decoder, hidden_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
    """The head applied to hidden states; accumulated and returned in float32."""
    head_VD = decoder.head_VD.astype(hidden_BD.dtype)
    return jnp.einsum("bd,vd->bv", hidden_BD, head_VD, preferred_element_type=jnp.float32)


def noise_keys(
    key: Key[Array, ""], rows_B: Int[Array, "B"], positions_B: Int[Array, "B"]
) -> Key[Array, "B"]:
    """A key for the token at each (row, position): the same, however one gets there.

    Args:
      key: the seed's, from `jax.random.key`.
      rows_B: number of the sequence.
      positions_B: of the token that is drawn, from 0 at the start of the prompt.

    Returns:
      One key each, for `sample`.
    """
    fold = jax.random.fold_in
    return jax.vmap(lambda row, position: fold(fold(key, row), position))(rows_B, positions_B)


def keep_top_p(logits_BV: Float[Array, "B V"], top_p: float | Array) -> Float[Array, "B V"]:
    """Sets to -inf what is not among the likeliest tokens that hold `top_p` of probability.

    A token stays if those likelier than it hold less than `top_p`; so the likeliest stays
    always, and of equally likely ones at the edge all stay.

    Args:
      logits_BV: float32.
      top_p: in (0, 1].

    Returns:
      The logits, some of them -inf.

    Example:
      >>> keep_top_p(jnp.log(jnp.array([[0.5, 0.3, 0.2]])), 0.6) > -jnp.inf
      Array([[ True,  True, False]], dtype=bool)

    References:
      arXiv:1904.09751, section 3.1.
    """
    probabilities = jax.nn.softmax(logits_BV, axis=-1)
    falling = -jnp.sort(-probabilities, axis=-1)
    likelier = jnp.cumsum(falling, axis=-1) - falling
    least = jnp.min(jnp.where(likelier < top_p, falling, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(probabilities >= least, logits_BV, -jnp.inf)


def sample(
    logits_BV: Float[Array, "B V"],
    keys_B: Key[Array, "B"],
    temperature: float | Float[Array, ""],
    top_p: float | Float[Array, ""],
) -> Int[Array, "B"]:
    """Draws a token from each row: `argmax(keep_top_p(logits / temperature) + Gumbel noise)`.

    Args:
      logits_BV: float32.
      keys_B: from `noise_keys`; equal keys and logits draw equal tokens.
      temperature: 0 takes the likeliest token.
      top_p: in (0, 1]; 1 draws from all.

    Returns:
      int32 ids.

    Example:
      >>> keys = noise_keys(jax.random.key(0), jnp.arange(1), jnp.arange(1))
      >>> sample(jnp.array([[1.0, 3.0, 2.0]]), keys, temperature=0.0, top_p=1.0)
      Array([1], dtype=int32)
    """
    temperature, top_p = jnp.float32(temperature), jnp.float32(top_p)

    def draw(logits_BV):
        # The largest at 0 and a floor under the temperature: the quotient cannot be NaN.
        logits_BV = logits_BV - logits_BV.max(axis=-1, keepdims=True)
        logits_BV = logits_BV / jnp.maximum(temperature, 1e-6)
        # Sorting a vocabulary costs more than the rest: only where it changes something.
        keep = lambda x: keep_top_p(x, top_p)
        logits_BV = jax.lax.cond(top_p < 1, keep, lambda x: x, logits_BV)
        gumbel = lambda key: jax.random.gumbel(key, logits_BV.shape[1:])
        return jnp.argmax(logits_BV + jax.vmap(gumbel)(keys_B), axis=-1)

    likeliest = lambda x: jnp.argmax(x, axis=-1)
    return jax.lax.cond(temperature > 0, draw, likeliest, logits_BV).astype(jnp.int32)


def generate(
    decoder: Decoder,
    prompt_ids: Sequence[int] | np.ndarray,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Collection[int] = (),
) -> Iterator[int]:
    """Continues a prompt, token by token.

    Args:
      decoder: any.
      prompt_ids: at least one id below the vocabulary size.
      max_new_tokens: how many to make at most.
      temperature: 0 is greedy; below 1 sharpens, above 1 flattens.
      top_p: draw from the likeliest tokens that hold this much probability, in (0, 1].
      seed: the same seed gives the same tokens.
      stop: ids that end the text; they are not part of it.

    Returns:
      An iterator of ids; each comes as soon as it is made.

    Raises:
      ValueError: an argument is out of its range; at the call, not at the first token.

    Example:
      >>> from flax import nnx
      >>> config = DecoderConfig(32, layers=2, width=16, heads=2, kv_heads=1, head_size=8,
      ...                        mlp_width=32)
      >>> decoder = Decoder(config, rngs=nnx.Rngs(0))
      >>> len(list(generate(decoder, [1, 2, 3], max_new_tokens=4)))
      4
    """
    ids = np.asarray(prompt_ids)
    vocab_size = decoder.config.vocab_size
    if ids.ndim != 1 or not len(ids):
        raise ValueError("the prompt is empty; it must hold at least one token")
    if ids.min() < 0 or ids.max() >= vocab_size:
        bad = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise ValueError(f"the prompt holds token {bad}; the model knows 0 to {vocab_size - 1}")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 0")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; it must be 0 (greedy) or positive")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it must lie above 0 and be at most 1")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}; it must lie in 0 to 2**32 - 1")
    sampling = (jax.random.key(seed), jnp.float32(temperature), jnp.float32(top_p))
    return _stream(decoder, ids.astype(np.int32), max_new_tokens, sampling, frozenset(stop))


def _stream(decoder, ids, max_new_tokens, sampling, stop) -> Iterator[int]:
    if not max_new_tokens:
        return
    # Taking a module apart costs more than a small one's step: once, not for every token.
    leaves, treedef = jax.tree.flatten(decoder)
    room = -(-(len(ids) + max_new_tokens) // ROOM) * ROOM
    cache = init_cache(decoder.config, 1, room, decoder.dtype)
    token_B1 = np.zeros((1, 1), np.int32)
    for start in range(0, len(ids), PREFILL):
        chunk = ids[start : start + PREFILL]
        padded = np.pad(chunk, (0, PREFILL - len(chunk)))[None]
        count = np.array([len(chunk)], np.int32)
        token_B1, cache = _advance(treedef, leaves, padded, count, cache, *sampling)
    one = np.ones(1, np.int32)
    for left in reversed(range(max_new_tokens)):
        made_B1 = token_B1
        if left:  # start on the next one before waiting for this one
            token_B1, cache = _advance(treedef, leaves, made_B1, one, cache, *sampling)
        token = int(made_B1[0, 0])
        if token in stop:
            return
        yield token


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def _advance(treedef, leaves, tokens_BT, counts_B, cache, key, temperature, top_p):
    """Feeds tokens; returns the token [B, 1] drawn after each row's last, and the cache."""
    decoder = jax.tree.unflatten(treedef, leaves)
    hidden_BTD, cache = forward(decoder, tokens_BT, cache, counts_B)
    rows_B = jnp.arange(len(counts_B), dtype=jnp.int32)
    keys_B = noise_keys(key, rows_B, cache.lengths)
    last_BV = logits(decoder, hidden_BTD[rows_B, counts_B - 1])
    return sample(last_BV, keys_B, temperature, top_p)[:, None], cache
