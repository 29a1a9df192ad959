"""Which blocks of the T x S pairs a kernel visits: computed by XLA, read by the kernel.

A block of queries visits a range of key blocks (seen from the keys: of query blocks). Blocks
outside of it hold no pair that the mask allows and are never loaded. Inside, one run of blocks
is full: these need no comparison. What is left on both sides, the edge, is masked pair by pair.

For the band the classes are exact, from the corners of a block. Segments are compared by the
range of ids in a block, which is exact for packed rows, whose documents follow each other. For
other ids a range may hold blocks without a pair; masking makes these harmless.

Legend: B batch (1 if all rows of the batch are alike), T queries, S keys, N blocks.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.attention.mask import Band, MaskArrays

INT32 = jnp.iinfo(jnp.int32)


def key_blocks(
    band: Band, arrays: MaskArrays, queries: int, keys: int, block_q: int, block_kv: int
) -> Int[Array, "B N 4"]:
    """For each block of queries, the key blocks that it visits.

    Args:
      band, arrays: the mask, as `mask.split` returns it.
      queries, keys: T and S, without padding. The last blocks may reach beyond.
      block_q, block_kv: sizes of the blocks.

    Returns:
      int32 `start, stop, full_start, full_stop`: blocks `start:stop` are visited, of which
      `full_start:full_stop` allow every pair of a query and a key (padding after S is no key).

    Example:
      >>> key_blocks(Band(None, 0, 0), MaskArrays(), 256, 256, 128, 64).tolist()
      [[[0, 2, 2, 2], [0, 4, 0, 2]]]
    """
    return _ranges(*_classes(band, arrays, queries, keys, block_q, block_kv))


def query_blocks(
    band: Band, arrays: MaskArrays, queries: int, keys: int, block_q: int, block_kv: int
) -> Int[Array, "B N 4"]:
    """For each block of keys, the query blocks that it visits; otherwise as `key_blocks`.

    Padding after T may lie in a full block: the caller makes it count for nothing.
    """
    some, full = _classes(band, arrays, queries, keys, block_q, block_kv)
    return _ranges(some.swapaxes(1, 2), full.swapaxes(1, 2))


def edge_count(blocks: tuple) -> Any:
    """How many visited blocks need a mask; they come first. `blocks` is one row of the above."""
    start, stop, full_start, full_stop = blocks
    return (full_start - start) + (stop - full_stop)


def nth_block(blocks: tuple, n: Any) -> Any:
    """The block of visit `n` of `stop - start`: the edge from the right, the edge left, the run.

    Example:
      >>> [int(nth_block((2, 8, 3, 6), n)) for n in range(6)]
      [7, 6, 2, 3, 4, 5]
    """
    start, stop, _, full_stop = blocks
    right = stop - full_stop
    return jnp.where(n < right, stop - 1 - n, start + n - right)


def _classes(
    band: Band, arrays: MaskArrays, queries: int, keys: int, block_q: int, block_kv: int
) -> tuple[Bool[Array, "B N M"], Bool[Array, "B N M"]]:
    """Whether a block may hold an allowed pair, and whether all its pairs are allowed."""
    row = jnp.arange(0, queries, block_q, dtype=jnp.int32)[None, :, None]
    column = jnp.arange(0, keys, block_kv, dtype=jnp.int32)[None, None, :]
    last_row = jnp.minimum(row + block_q, queries) - 1
    last_column = jnp.minimum(column + block_kv, keys) - 1
    offset = arrays.offset[:, None, None] if band.offset is None else band.offset
    nearest, farthest = column - last_row - offset, last_column - row - offset
    some = jnp.ones(nearest.shape, bool)
    full = some & (column + block_kv <= keys)
    if band.left is not None:
        some &= farthest >= -band.left
        full &= nearest >= -band.left
    if band.right is not None:
        some &= nearest <= band.right
        full &= farthest <= band.right
    if arrays.q_segments is not None:
        nobody = INT32.min  # what `mask.split` makes of padding
        q_low, q_high, q_uniform = _id_ranges(arrays.q_segments, block_q, nobody)
        k_low, k_high, k_uniform = _id_ranges(arrays.k_segments, block_kv, 0)
        q_low, q_high, q_uniform = (x[:, :, None] for x in (q_low, q_high, q_uniform))
        k_low, k_high, k_uniform = (x[:, None, :] for x in (k_low, k_high, k_uniform))
        some = some & (q_low <= k_high) & (k_low <= q_high)
        full = full & q_uniform & k_uniform & (q_low == k_low)
    return some, full


def _id_ranges(ids: Int[Array, "B T"], block: int, padding: int) -> tuple:
    """Least and greatest id of each block, and whether all its ids are one; not of padding."""
    ids = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % block)), mode="edge")
    ids = ids.reshape(ids.shape[0], -1, block)
    real = ids != padding
    low = jnp.where(real, ids, INT32.max).min(-1)
    high = jnp.where(real, ids, INT32.min).max(-1)
    return low, high, real.all(-1) & (low == high)


def _ranges(some: Bool[Array, "B N M"], full: Bool[Array, "B N M"]) -> Int[Array, "B N 4"]:
    count = some.shape[-1]
    j = jnp.arange(count, dtype=jnp.int32)[None, None]
    stop = jnp.where(some, j + 1, 0).max(-1)
    start = jnp.minimum(jnp.where(some, j, count).min(-1), stop)
    full_start = jnp.where(full, j, count).min(-1)
    full_stop = jnp.where(~full & (j > full_start[..., None]), j, count).min(-1)
    # Without a full block the run is empty, at the end.
    full_start, full_stop = jnp.minimum(full_start, stop), jnp.minimum(full_stop, stop)
    return jnp.stack([start, stop, full_start, full_stop], axis=-1)
