"""Which query may attend to which key: the description, and the rule it stands for.

Legend: B batch, T queries, S keys.

A mask is never given as a T x S array. It is a band of diagonals (causal, window) and a
pair of segment ids, so that a kernel can tell from the corners of a tile whether the tile
is empty (skip it), full (no select) or mixed.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mask:
    """Which keys a query attends to; everything given must allow a pair.

    Query `i` stands at key position `i + offset`. The default offset is `S - T`: the last
    query stands at the last key (bottom-right alignment), for `T > S` the first `T - S`
    queries of a causal mask see nothing.

    A pytree: segments and an array offset are leaves, the rest is static. An `int` offset
    is known while tracing, if the mask is made inside `jax.jit`; tiles are then skipped
    at compile time.

    Attributes:
      causal: key position at most the query's.
      window: `(left, right)`: key position at least the query's minus left and at most the
        query's plus right; `None` is no limit.
      q_segments: integers `[B, T]`. Only equal ids attend to each other, and id 0 is
        padding: it attends to nothing, nothing attends to it. Compared as int32.
      k_segments: integers `[B, S]`; given together with `q_segments`.
      offset: an int, or integers `[]` or `[B]` that may be traced (a KV cache).

    Example:
      >>> Mask(causal=True, window=(128, None))
      Mask(causal=True, window=(128, None), q_segments=None, k_segments=None, offset=None)
    """

    causal: bool = field(default=False, metadata={"static": True})
    window: tuple[int | None, int | None] | None = field(default=None, metadata={"static": True})
    # Any: JAX rebuilds pytrees around leaves that are no arrays (axes, shardings).
    q_segments: Any = None
    k_segments: Any = None
    offset: Any = None


@dataclass(frozen=True)
class Band:
    """The static part of a mask: `-left <= key - (query + offset) <= right`.

    Attributes:
      left, right: `None` is no limit.
      offset: `None` when it is known at run time only.
    """

    left: int | None
    right: int | None
    offset: int | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MaskArrays:
    """The run-time part of a mask; see `Mask`.

    Attributes:
      q_segments: int32 `[B, T]` or None, with padding replaced by an id that no key has.
      k_segments: int32 `[B, S]` or None.
      offset: int32 `[B]`, or None when the band knows it.
    """

    q_segments: Any = None
    k_segments: Any = None
    offset: Any = None


def split(mask: Mask, batch: int, queries: int, keys: int) -> tuple[Band, MaskArrays]:
    """Returns the static and the run-time part of a mask that was checked."""
    left, right = mask.window or (None, None)
    if mask.causal:
        right = 0
    q_segments, k_segments = mask.q_segments, mask.k_segments
    if q_segments is not None:
        nobody = jnp.iinfo(jnp.int32).min
        q_segments = q_segments.astype(jnp.int32)
        q_segments = jnp.where(q_segments == 0, nobody, q_segments)
        k_segments = k_segments.astype(jnp.int32)
    offset = keys - queries if mask.offset is None else mask.offset
    if left is None and right is None:
        offset = 0  # means nothing without a band
    if isinstance(offset, int):
        return Band(left, right, offset), MaskArrays(q_segments, k_segments)
    offset = jnp.broadcast_to(offset.astype(jnp.int32), (batch,))
    return Band(left, right, None), MaskArrays(q_segments, k_segments, offset)


def key_range(band: Band, offset: tuple, first: Any, count: int, keys: int) -> tuple:
    """The keys `start:stop` that some of `count` queries from `first` may see, by the band.

    Args:
      band: the static mask.
      offset: the least and the greatest offset; ints or int32 scalars.
      first: index of the first query; int or int32 scalar.
      count: number of queries.
      keys: S.

    Returns:
      `start`, `stop`; ints if all arguments are. `stop <= start` if nothing is seen.

    Example:
      >>> key_range(Band(left=None, right=0, offset=0), (0, 0), 64, 64, 256)
      (0, 128)
    """
    low, high = offset
    start = 0 if band.left is None else first + low - band.left
    stop = keys if band.right is None else first + count - 1 + high + band.right + 1
    if isinstance(start, int) and isinstance(stop, int):
        return max(start, 0), min(stop, keys)
    return jnp.maximum(start, 0), jnp.minimum(stop, keys)


def query_range(band: Band, offset: tuple, first: Any, count: int, queries: int) -> tuple:
    """The queries `start:stop` that may see some of `count` keys from `first`.

    Seen from the keys, the band is mirrored: `-right <= query - (key - offset) <= left`.
    """
    mirrored = Band(left=band.right, right=band.left, offset=None)
    return key_range(mirrored, (-offset[1], -offset[0]), first, count, queries)


def count_pairs(band: Band, queries: int, keys: int) -> int:
    """Pairs of a query and a key that the band allows; segments, and an offset that is known at
    run time only, may allow fewer.

    Example:
      >>> count_pairs(Band(left=None, right=0, offset=0), 4, 4)
      10
    """
    if band.offset is None:
        return queries * keys
    place = np.arange(queries) + band.offset
    first = np.zeros_like(place) if band.left is None else np.maximum(place - band.left, 0)
    last = keys - 1 if band.right is None else np.minimum(place + band.right, keys - 1)
    return int(np.maximum(last - first + 1, 0).sum())


def band_covers(band: Band, rows: range, columns: range) -> bool:
    """Whether the band is known to allow every pair, so that no select is needed."""
    if band.left is None and band.right is None:
        return True
    if band.offset is None:
        return False
    return (band.right is None or columns[-1] <= rows[0] + band.offset + band.right) and (
        band.left is None or columns[0] >= rows[-1] + band.offset - band.left
    )


def visible(
    band: Band,
    arrays: MaskArrays,
    rows_T: Int[Array, "T"],
    columns_S: Int[Array, "S"],
    *,
    keys_first: bool = False,
) -> Bool[Array, "_ _ _"]:
    """The rule itself, on a tile.

    Args:
      band, arrays: the mask; its segments are those of the tile.
      rows_T: query indices of the tile.
      columns_S: key indices of the tile.
      keys_first: return the tile transposed.

    Returns:
      Whether the query attends to the key: `[1 or B, T, S]`, or `[1 or B, S, T]`.
    """
    q_dim, k_dim = (1, 2) if keys_first else (2, 1)
    rows = jnp.expand_dims(rows_T[None], q_dim)
    columns = jnp.expand_dims(columns_S[None], k_dim)
    offset = arrays.offset[:, None, None] if band.offset is None else band.offset
    distance = columns - rows - offset
    allowed = jnp.ones(distance.shape, bool)
    if band.left is not None:
        allowed &= distance >= -band.left
    if band.right is not None:
        allowed &= distance <= band.right
    if arrays.q_segments is not None:
        q_segments = jnp.expand_dims(arrays.q_segments, q_dim)
        allowed &= q_segments == jnp.expand_dims(arrays.k_segments, k_dim)
    return allowed
