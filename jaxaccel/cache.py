"""The key/value cache of a decoder: static shape, and a length for each row.

Keys and values of positions already seen are kept, so that a new token costs one position and not
all of them. The cache has room for a fixed number of positions; each row says how many of them
count. That makes three things one operation, `forward`: a prompt, cut into chunks of one length,
its last one padded (`counts_B` says how much of it is real); a single token; a block of drafts to
be verified. Rolling back is setting `lengths`: what lies at or past a row's length is never seen,
because the query at position p sees positions up to p only, and the block it comes with has
written those. So nothing depends on the lengths of prompts.

In FP8 each head's key or value of a position is e4m3 with a scale of its own (a float32 for
`head_size` bytes): half the memory of 16 bits, and nothing to calibrate. A pass still reads it
through a copy in the compute type, of one layer at a time.

What could be better: a layer with a sliding window keeps all positions and looks at the
last few; a ring would hold only those, but cannot be rolled back past its slack.

Shape suffixes: B batch, T new positions, S positions of the cache, D width, K key/value
heads, C head size, V vocabulary, L stack of layers.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from jaxaccel import numerics
from jaxaccel.nn import Decoder, DecoderConfig, Layer
from pallas_kernels.attention import Mask

FP8 = jnp.dtype(numerics.FORMATS["e4m3"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values by position; made by `init_cache`."""

    # Any: JAX rebuilds pytrees around leaves that are no arrays.
    keys: Any  # one [L, B, S, K, C] for each layer of the repeating group; FP8: with its scales
    values: Any  # likewise
    lengths: Any  # int32 [B]: positions of each row that count


def init_cache(config: DecoderConfig, batch: int, length: int, dtype: Any = jnp.float32) -> Cache:
    """An empty cache.

    Memory: 2 * layers * batch * length * kv_heads * head_size elements; in FP8, of a byte each,
    and 4 bytes more for every head_size of them.

    Args:
      config: shape of the decoder.
      batch: rows.
      length: positions a row has room for.
      dtype: of keys and values; `float8_e4m3fn` holds them with scales.

    Returns:
      A cache in which no position counts.

    Example:
      >>> config = DecoderConfig(32, layers=4, width=16, heads=2, kv_heads=1, head_size=8,
      ...                        mlp_width=32, windows=(None, 5))
      >>> [k.shape for k in init_cache(config, batch=3, length=10).keys]
      [(2, 3, 10, 1, 8), (2, 3, 10, 1, 8)]
    """
    group = len(config.windows)
    made = [room(config, config.layers // group, batch, length, dtype) for _ in range(2 * group)]
    return Cache(tuple(made[:group]), tuple(made[group:]), jnp.zeros(batch, jnp.int32))


def room(config: DecoderConfig, stack: int, batch: int, length: int, dtype: Any) -> PyTree[Array]:
    """Zeros for the keys, or the values, of a stack of layers.

    Args:
      config: shape of the decoder.
      stack: layers.
      batch, length, dtype: as of `init_cache`.

    Returns:
      [stack, batch, length, kv_heads, head_size]; in FP8 that and its scales.
    """
    shape = (stack, batch, length, config.kv_heads, config.head_size)
    if jnp.dtype(dtype) == FP8:
        return jnp.zeros(shape, FP8), jnp.zeros(shape[:-1], jnp.float32)
    return jnp.zeros(shape, dtype)


class Place(NamedTuple):
    """Where a block of new positions stands."""

    rope: tuple[Array, Array]  # angles of the positions
    positions: Int[Array, "B T"]  # row b's are offsets[b] + (0 .. T - 1)

    @property
    def offsets(self) -> Int[Array, "B"]:
        """Position of the first of each row; below 0 for one that does not exist."""
        return self.positions[:, 0]


def place(decoder: Decoder, offsets_B: Int[Array, "B"], length: int) -> Place:
    """The `length` positions from `offsets_B` on.

    Args:
      decoder: for its angles.
      offsets_B: first position of each row.
      length: of the block.

    Returns:
      `Place`.
    """
    positions_BT = offsets_B[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
    return Place(decoder.rope(positions_BT), positions_BT)


def attend(
    layer: Layer,
    x_BTD: Float[Array, "B T D"],
    held: tuple[PyTree[Array], PyTree[Array]],
    stack: int | Int[Array, ""],
    at: Place,
) -> tuple[Float[Array, "B T D"], tuple[PyTree[Array], PyTree[Array]]]:
    """One layer on new positions, which see themselves and what is held of those before.

    Args:
      layer: its parameters not stacked.
      x_BTD: the stream.
      held: keys and values of its stack, from `room`.
      stack: which layer of the stack it is.
      at: the positions. Below 0, or past the room, they are not written and mean nothing.

    Returns:
      The stream after the layer, and keys and values with the new ones written.
    """
    q, k, v = layer.qkv(x_BTD, at.rope)
    row_B1 = jnp.arange(len(x_BTD))[:, None]

    def write(old, new):
        # Not dynamic_update_slice: it would move a block that does not fit over older entries.
        # A negative index would count from the end: past the end it is dropped.
        length = old.shape[2]
        where = jnp.where(at.positions < 0, length - at.positions, at.positions)
        put = old.at[stack, row_B1, where]
        return put.set(new.astype(old.dtype), mode="drop", unique_indices=True)

    held = tuple(jax.tree.map(write, old, _stored(old, new)) for old, new in zip(held, (k, v)))
    keys, values = (_loaded(jax.tree.map(lambda x: x[stack], x), q.dtype) for x in held)
    window = None if layer.window is None else (layer.window - 1, None)
    mask = Mask(causal=True, window=window, offset=at.offsets)
    return layer.finish(x_BTD, layer.mix(q, keys, values, mask)), held


def _stored(like: PyTree[Array], x_BTKC: Array) -> PyTree[Array]:
    """New keys or values in the form in which they are held."""
    if not isinstance(like, tuple):
        return x_BTKC
    scale = numerics.scale(numerics.amax(x_BTKC, -1), "e4m3")
    return numerics.cast(x_BTKC, scale[..., None], "e4m3"), scale


def _loaded(held: PyTree[Array], dtype: Any) -> Array:
    if not isinstance(held, tuple):
        return held.astype(dtype)
    values, scale = held
    return (values.astype(jnp.float32) * scale[..., None]).astype(dtype)


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
    length = tokens_BT.shape[1]
    at = place(decoder, cache.lengths, length)

    # The cache is carried and written in place, one position a layer. As a scanned input and
    # output it would be copied whole for every token: three times slower at 8192 positions.
    def group(carry, xs):
        (x_BTD, held), (layers, stack) = carry, xs
        held = list(held)
        for i, layer in enumerate(layers):
            x_BTD, held[i] = attend(layer, x_BTD, held[i], stack, at)
        return (x_BTD, tuple(held)), None

    held = tuple(zip(cache.keys, cache.values))
    stacks = jnp.arange(decoder.config.layers // len(held))
    carry = (decoder.embed(tokens_BT), held)
    (x_BTD, held), _ = jax.lax.scan(group, carry, (decoder.layers, stacks))
    keys, values = (tuple(part) for part in zip(*held))
    lengths_B = cache.lengths + (length if counts_B is None else counts_B)
    return decoder.final_norm(x_BTD), Cache(keys, values, lengths_B)


def logits(decoder: Decoder, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """The head applied to hidden states, and the model's cap; in float32 throughout.

    Args:
      decoder: for its output head.
      hidden: after the final norm, of the decoder or of one of its heads.

    Returns:
      Logits.
    """
    head_VD = decoder.head_VD.astype(hidden.dtype)
    found = jnp.einsum("...d,vd->...v", hidden, head_VD, preferred_element_type=jnp.float32)
    cap = decoder.config.logits_soft_cap
    return found if cap is None else cap * jnp.tanh(found / cap)
