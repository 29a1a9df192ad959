"""Attention in plain JAX, tile by tile.

The forward pass takes queries in blocks, the backward pass keys; a block meets only the range
of the other side that causal and window leave it. Up to `UNROLL` tokens the blocks are
unrolled: ranges are static, a block meets its range in one tile. Beyond, blocks and tiles are
loops with a running softmax, and the ranges are the bounds of the inner loop.

What makes it fast on a CPU, found at (batch 12, 64 tokens, 4 heads of 32) and (16, 256, 6 of
64), causal with segments, in a scan over layers, CPU time of one core, against heads moved
ahead + blocks alone:

MEASUREMENTS

Legend: B batch, T queries (t of one tile), S keys (s of one tile), K key/value heads,
G query heads for each of them (H = K * G), D key size, E value size.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.attention.mask import (
    Band,
    MaskArrays,
    band_covers,
    key_range,
    query_range,
    visible,
)

UNROLL = 1024  # longest sequence (T and S) whose blocks are unrolled
BLOCK = 64  # unit of unrolled blocks; a sequence has at most BLOCKS of them
BLOCKS = 4
TILE = 256  # rows and columns of a tile in the loops


@dataclass(frozen=True)
class Options:
    """What is static: the band, the factor on the logits, and their soft cap."""

    band: Band
    scale: float
    soft_cap: float | None


def forward(
    options: Options,
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K E"],
    sinks: Float[Array, "H"] | None,
    mask: MaskArrays,
) -> tuple[Float[Array, "B T H E"], Float[Array, "B T H"]]:
    """Returns output and log-sum-exp."""
    grid = _Grid(options.band, mask, q.shape[1], k.shape[1])
    q, k, v = _split_heads(q, k.shape[2]), k.swapaxes(1, 2), v.swapaxes(1, 2)
    q, (k, v) = grid.pad_queries(q), (grid.pad_keys(x) for x in (k, v))

    def block(row, rows, carry):
        q_t = _take(q, row, rows)
        shape = q_t.shape[:-1]
        if sinks is None:
            top, total = jnp.full(shape, -jnp.inf), jnp.zeros(shape)
        else:  # a sink is a key that was met before all others, with value zero
            top = sinks.astype(jnp.float32).reshape(1, q.shape[1], 1, -1)
            top, total = jnp.broadcast_to(top, shape), jnp.ones(shape)

        def meet(column, columns, state):
            top, total, sum_ = state
            k_s, v_s = _take(k, column, columns), _take(v, column, columns)
            logits = _cap(options, _einsum("bktgd,bksd->bktgs", q_t, k_s) * options.scale)
            allowed = grid.allowed(row, rows, column, columns)
            if allowed is not None:
                logits = _select(allowed[:, None, :, None, :], logits)
            new_top = jnp.maximum(top, logits.max(-1))
            finite = jnp.where(new_top == -jnp.inf, 0.0, new_top)
            p = jnp.exp(logits - finite[..., None])
            decay = jnp.exp(top - finite)
            product = _einsum("bktgs,bkse->bktge", p.astype(v.dtype), v_s)
            return new_top, total * decay + p.sum(-1), sum_ * decay[..., None] + product

        state = top, total, jnp.zeros((*shape, v.shape[-1]))
        top, total, sum_ = grid.fold(grid.keys_of(row, rows), grid.key_tile, meet, state)
        some = total > 0
        divisor = jnp.where(some, total, 1.0)
        lse = jnp.where(some, top + jnp.log(divisor), -jnp.inf)
        return ((sum_ / divisor[..., None]).astype(q.dtype), lse), carry

    (out, lse), _ = grid.map_blocks(grid.queries, grid.query_tile, block, ())
    return _join_heads(out), _join_heads(lse)


def backward(
    options: Options,
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K E"],
    sinks: Float[Array, "H"] | None,
    mask: MaskArrays,
    out: Float[Array, "B T H E"],
    lse: Float[Array, "B T H"],
    dout: Float[Array, "B T H E"],
    dlse: Float[Array, "B T H"],
) -> tuple[Array, Array, Array, Array | None]:
    """Returns the gradients of q, k, v and sinks."""
    empty = lse == -jnp.inf
    # dout and dlse meet in one number for each row: dS = P * (dP - delta).
    delta = (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(-1) - dlse
    delta = jnp.where(empty, 0.0, delta)
    lse = jnp.where(empty, 0.0, lse)
    dsinks = None
    if sinks is not None:
        p_sink = jnp.exp(sinks.astype(jnp.float32)[None, None] - lse)
        dsinks = -(p_sink * delta).sum((0, 1)).astype(sinks.dtype)

    grid = _Grid(options.band, mask, q.shape[1], k.shape[1])
    q, dout, lse, delta = (
        grid.pad_queries(_split_heads(x, k.shape[2])) for x in (q, dout, lse, delta)
    )
    k, v = (grid.pad_keys(x.swapaxes(1, 2)) for x in (k, v))
    k_BKDS = k.swapaxes(2, 3)

    # Tiles are [s, t]: P and dS are then the left factor, untransposed, of both dV and dK,
    # and the right factor of the transposed dQ. No T x S array is ever transposed.
    def block(column, columns, dq_BKDTG):
        k_s, v_s = _take(k, column, columns), _take(v, column, columns)

        def meet(row, rows, state):
            dq, dk, dv = state
            q_t, dout_t, lse_t, delta_t = (_take(x, row, rows) for x in (q, dout, lse, delta))
            capped = _cap(options, _einsum("bksd,bktgd->bkstg", k_s, q_t) * options.scale)
            logits = capped - lse_t[:, :, None]
            allowed = grid.allowed(row, rows, column, columns)
            if allowed is not None:
                logits = _select(allowed.swapaxes(1, 2)[:, None, :, :, None], logits)
            p = jnp.exp(logits)
            ds = p * (_einsum("bkse,bktge->bkstg", v_s, dout_t) - delta_t[:, :, None])
            if options.soft_cap is not None:
                ds *= 1.0 - (capped / options.soft_cap) ** 2
            ds = (ds * options.scale).astype(q.dtype)
            dv += _einsum("bkstg,bktge->bkse", p.astype(q.dtype), dout_t)
            dk += _einsum("bkstg,bktgd->bksd", ds, q_t)
            k_ds = _take(k_BKDS, column, columns, dim=3)
            dq = _add(dq, row, _einsum("bkds,bkstg->bkdtg", k_ds, ds), dim=3)
            return dq, dk, dv

        state = dq_BKDTG, jnp.zeros(k_s.shape), jnp.zeros(v_s.shape)
        state = grid.fold(grid.queries_of(column, columns), grid.query_tile, meet, state)
        dq_BKDTG, dk, dv = state
        return (dk.astype(q.dtype), dv.astype(q.dtype)), dq_BKDTG

    b, kv_heads, rows, groups, depth = q.shape
    dq_BKDTG = jnp.zeros((b, kv_heads, depth, rows, groups))
    (dk, dv), dq_BKDTG = grid.map_blocks(grid.keys, grid.key_tile, block, dq_BKDTG)
    dq = dq_BKDTG[:, :, :, : grid.queries].transpose(0, 3, 1, 4, 2).astype(q.dtype)
    dq = dq.reshape(b, grid.queries, kv_heads * groups, depth)
    return dq, dk.swapaxes(1, 2), dv.swapaxes(1, 2), dsinks


@dataclass(frozen=True)
class _Grid:
    """How the T x S pairs are cut into tiles, and in what order these are met."""

    band: Band
    mask: MaskArrays
    queries: int
    keys: int

    @property
    def unrolled(self) -> bool:
        return max(self.queries, self.keys) <= UNROLL

    @property
    def query_tile(self) -> int:
        return self._tile(self.queries)

    @property
    def key_tile(self) -> int:
        return self._tile(self.keys)

    def _tile(self, length: int) -> int:
        return min(length, BLOCK * -(-length // (BLOCK * BLOCKS)) if self.unrolled else TILE)

    def pad_queries(self, x: Array, dim: int = 2) -> Array:
        return x if self.unrolled else _pad(x, self.query_tile, dim)

    def pad_keys(self, x: Array, dim: int = 2) -> Array:
        return x if self.unrolled else _pad(x, self.key_tile, dim)

    def keys_of(self, row, rows: int) -> tuple:
        return self._range(key_range, row, rows, self.keys)

    def queries_of(self, column, columns: int) -> tuple:
        return self._range(query_range, column, columns, self.queries)

    def _range(self, range_, first, count: int, length: int) -> tuple:
        offset = self.mask.offset
        if offset is None:
            return range_(self.band, (self.band.offset,) * 2, first, count, length)
        if self.unrolled:
            return 0, length
        return range_(self.band, (offset.min(), offset.max()), first, count, length)

    def map_blocks(self, length: int, size: int, function: Callable, carry: Any) -> tuple:
        """Calls function(start, size, carry) -> (outs, carry); outs are joined along dim 2."""
        if self.unrolled:
            outs = []
            for start in range(0, length, size):
                out, carry = function(start, min(size, length - start), carry)
                outs.append(out)
            return jax.tree.map(lambda *x: jnp.concatenate(x, axis=2), *outs), carry

        def step(carry, i):
            out, carry = function(i * size, size, carry)
            return carry, out

        def join(x):  # [n, B, K, size, ...] -> [B, K, length, ...]
            x = jnp.moveaxis(x, 0, 2)
            return x.reshape(*x.shape[:2], -1, *x.shape[4:])[:, :, :length]

        carry, outs = lax.scan(step, carry, jnp.arange(-(-length // size)))
        return jax.tree.map(join, outs), carry

    def fold(self, range_: tuple, size: int, meet: Callable, state: Any) -> Any:
        """Calls meet(start, size, state) -> state on the tiles of a range."""
        start, stop = range_
        if self.unrolled:
            return meet(start, stop - start, state) if start < stop else state
        tiles = start // size, (stop + size - 1) // size
        return lax.fori_loop(*tiles, lambda j, state: meet(j * size, size, state), state)

    def allowed(self, row, rows: int, column, columns: int) -> Array | None:
        """Returns the mask `[1 or B, t, s]` of a tile, or None if it allows every pair."""
        mask = self.mask
        if self.unrolled and mask.q_segments is None:
            ranges = range(row, row + rows), range(column, column + columns)
            if band_covers(self.band, *ranges):
                return None
        if mask.q_segments is not None:
            mask = replace(
                mask,
                q_segments=_take(self.pad_queries(mask.q_segments, 1), row, rows, 1),
                k_segments=_take(self.pad_keys(mask.k_segments, 1), column, columns, 1),
            )
        key = column + jnp.arange(columns)
        allowed = visible(self.band, mask, row + jnp.arange(rows), key)
        return allowed if self.unrolled else allowed & (key < self.keys)[None, None]


def _select(allowed: Array, logits: Array) -> Array:
    # The barriers make XLA's CPU compiler compute the comparisons once for all heads and the
    # select once for maximum and exponential; see the head of the file.
    allowed = lax.optimization_barrier(allowed)
    return lax.optimization_barrier(jnp.where(allowed, logits, -jnp.inf))


def _cap(options: Options, logits: Array) -> Array:
    if options.soft_cap is None:
        return logits
    return options.soft_cap * jnp.tanh(logits / options.soft_cap)


def _split_heads(x: Array, kv_heads: int) -> Array:
    """[B, T, K * G, ...] -> [B, K, T, G, ...]."""
    return x.reshape(*x.shape[:2], kv_heads, -1, *x.shape[3:]).swapaxes(1, 2)


def _join_heads(x: Array) -> Array:
    """[B, K, T, G, ...] -> [B, T, K * G, ...]."""
    x = x.swapaxes(1, 2)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _pad(x: Array, unit: int, dim: int) -> Array:
    widths = [(0, 0)] * x.ndim
    widths[dim] = (0, -x.shape[dim] % unit)
    return jnp.pad(x, widths)


def _take(x: Array, start, size: int, dim: int = 2) -> Array:
    if isinstance(start, int):
        return lax.slice_in_dim(x, start, start + size, axis=dim)
    return lax.dynamic_slice_in_dim(x, start, size, axis=dim)


def _add(x: Array, start, update: Array, dim: int) -> Array:
    update += _take(x, start, update.shape[dim], dim)
    return lax.dynamic_update_slice_in_dim(x, update, start, axis=dim)


def _einsum(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)
