"""Attention in plain JAX, tile by tile.

The forward pass takes queries in blocks, the backward pass keys; a block meets only the range
of the other side that causal and window leave it. Up to `UNROLL` tokens the blocks are
unrolled: ranges are static, a block meets its range in one tile. Beyond, blocks and tiles are
loops with a running softmax, and the ranges are the bounds of the inner loop.

What was found on a 2-core CPU at (batch 12, 64 tokens, 4 heads of 32) and (16, 256, 6 of 64),
causal with segments, float32, in a scan over layers; CPU time of one core, measured. Heads are
moved ahead of the sequence throughout.

- Forward and backward against a first blocked version with tiles [queries, keys] in both passes
  and no barriers: 0.49 and 0.64; against the naive T x T form: 0.46 and 0.49.
- The select on the mask, left to XLA, is fused into maximum and exponential and its comparisons
  are repeated for each head. Barriers behind the comparisons and behind the select: 0.8 and 0.5
  of the forward pass.
- Tiles [keys, queries] in the backward pass, dQ transposed: 0.85 of it. A trailing dim of
  1 (G kept as a dim of its own) makes the exponential scalar: 1.2 to 1.5.
- Blocks of 128 against one block of 256: 0.8. Of 64: as 128, with twice the program. At 64
  tokens, blocks of 32 or 16 win nothing.
- Not kept, within noise: the scale folded into q, an added bias in place of the select, barriers
  behind the transposes or behind P.

Legend: B batch, T queries, S keys (s of one tile), K key/value heads, G query heads for each
of them (H = K * G), R = T * G rows of q for one key/value head (r of one tile), D key size,
E value size.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import manual_axes
from pallas_kernels.attention.mask import (
    Band,
    MaskArrays,
    band_covers,
    key_range,
    query_range,
    visible,
)

UNROLL = 1024  # longest sequence (T and S) whose blocks are unrolled
BLOCK = 128  # unit of unrolled blocks; a sequence has at most BLOCKS of them
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
    groups = q.shape[2] // k.shape[2]
    q = _to_rows(grid.pad_queries(q), groups)
    k, v = (grid.pad_keys(x).swapaxes(1, 2) for x in (k, v))

    def block(row, rows, carry):
        q_r = _take(q, row * groups, rows * groups)
        shape = q_r.shape[:-1]
        if sinks is None:
            top, total = jnp.full(shape, -jnp.inf), jnp.zeros(shape)
        else:  # a sink is a key that was met before all others, with value zero
            top = jnp.tile(sinks.astype(jnp.float32).reshape(1, -1, groups), (1, 1, rows))
            top, total = jnp.broadcast_to(top, shape), jnp.ones(shape)

        def meet(column, columns, state):
            top, total, sum_ = state
            k_s, v_s = _take(k, column, columns), _take(v, column, columns)
            logits = _cap(options, _einsum("bkrd,bksd->bkrs", q_r, k_s) * options.scale)
            logits = grid.hide(logits, row, rows, column, columns)
            new_top = jnp.maximum(top, logits.max(-1))
            finite = jnp.where(new_top == -jnp.inf, 0.0, new_top)
            p = jnp.exp(logits - finite[..., None])
            decay = jnp.exp(top - finite)
            product = _einsum("bkrs,bkse->bkre", p.astype(v.dtype), v_s)
            return new_top, total * decay + p.sum(-1), sum_ * decay[..., None] + product

        state = top, total, jnp.zeros((*shape, v.shape[-1]))
        state = manual_axes.vary_alike(*state, q, k, v)[:3]
        top, total, sum_ = grid.fold(grid.keys_of(row, rows), grid.key_tile, meet, state)
        some = total > 0
        divisor = jnp.where(some, total, 1.0)
        lse = jnp.where(some, top + jnp.log(divisor), -jnp.inf)
        return ((sum_ / divisor[..., None]).astype(q.dtype), lse), carry

    (out, lse), _ = grid.map_blocks(grid.queries, grid.query_tile, block, ())
    out, lse = (_from_rows(x, groups)[:, : grid.queries] for x in (out, lse))
    return out, lse


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
    groups = q.shape[2] // k.shape[2]
    q, dout, lse, delta = (_to_rows(grid.pad_queries(x), groups) for x in (q, dout, lse, delta))
    k, v = (grid.pad_keys(x).swapaxes(1, 2) for x in (k, v))
    k_BKDS = k.swapaxes(2, 3)

    # Tiles are [s, r]: P and dS are then the left factor, untransposed, of both dV and dK,
    # and the right factor of the transposed dQ. No T x S array is ever transposed.
    def block(column, columns, dq_BKDR):
        k_s, v_s = _take(k, column, columns), _take(v, column, columns)

        def meet(row, rows, state):
            dq, dk, dv = state
            r, n = row * groups, rows * groups
            q_r, dout_r, lse_r, delta_r = (_take(x, r, n) for x in (q, dout, lse, delta))
            capped = _cap(options, _einsum("bksd,bkrd->bksr", k_s, q_r) * options.scale)
            logits = grid.hide(capped, row, rows, column, columns, keys_first=True)
            p = jnp.exp(logits - lse_r[:, :, None])
            ds = p * (_einsum("bkse,bkre->bksr", v_s, dout_r) - delta_r[:, :, None])
            if options.soft_cap is not None:
                ds *= 1.0 - (capped / options.soft_cap) ** 2
            ds = (ds * options.scale).astype(q.dtype)
            dv += _einsum("bksr,bkre->bkse", p.astype(q.dtype), dout_r)
            dk += _einsum("bksr,bkrd->bksd", ds, q_r)
            k_ds = _take(k_BKDS, column, columns, dim=3)
            dq = _add(dq, r, _einsum("bkds,bksr->bkdr", k_ds, ds), dim=3)
            return dq, dk, dv

        state = dq_BKDR, jnp.zeros(k_s.shape), jnp.zeros(v_s.shape)
        state = manual_axes.vary_alike(*state)
        state = grid.fold(grid.queries_of(column, columns), grid.query_tile, meet, state)
        dq_BKDR, dk, dv = state
        return (dk.astype(q.dtype), dv.astype(q.dtype)), dq_BKDR

    dq_BKDR = jnp.zeros((*q.shape[:2], q.shape[3], q.shape[2]))
    dq_BKDR = manual_axes.vary_alike(dq_BKDR, q, k, v, dout)[0]
    (dk, dv), dq_BKDR = grid.map_blocks(grid.keys, grid.key_tile, block, dq_BKDR)
    # One transpose: a swap of D and R alone would be folded back into the matmul.
    dq = dq_BKDR.reshape(*dq_BKDR.shape[:3], -1, groups).transpose(0, 3, 1, 4, 2)
    dq = dq.reshape(*dq.shape[:2], -1, dq.shape[4])[:, : grid.queries].astype(q.dtype)
    dk, dv = (x.swapaxes(1, 2)[:, : grid.keys] for x in (dk, dv))
    return dq, dk, dv, dsinks


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

    def pad_queries(self, x: Array) -> Array:
        return x if self.unrolled else _pad(x, self.query_tile)

    def pad_keys(self, x: Array) -> Array:
        return x if self.unrolled else _pad(x, self.key_tile)

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

        def join(x):  # [n, B, K, size, ...] -> [B, K, n * size, ...]
            x = jnp.moveaxis(x, 0, 2)
            return x.reshape(*x.shape[:2], -1, *x.shape[4:])

        carry, outs = lax.scan(step, carry, jnp.arange(-(-length // size)))
        return jax.tree.map(join, outs), carry

    def fold(self, range_: tuple, size: int, meet: Callable, state: Any) -> Any:
        """Calls meet(start, size, state) -> state on the tiles of a range."""
        start, stop = range_
        if self.unrolled:
            return meet(start, stop - start, state) if start < stop else state
        tiles = start // size, (stop + size - 1) // size
        return lax.fori_loop(*tiles, lambda j, state: meet(j * size, size, state), state)

    def hide(self, logits, row, rows: int, column, columns: int, keys_first: bool = False):
        """Puts what the mask forbids of a tile, `[B, K, r, s]` or `[B, K, s, r]`, at -inf."""
        mask = self.mask
        if self.unrolled and mask.q_segments is None:
            ranges = range(row, row + rows), range(column, column + columns)
            if band_covers(self.band, *ranges):
                return logits
        groups = logits.shape[3 if keys_first else 2] // rows
        if mask.q_segments is not None:
            q_segments = _take(self.pad_queries(mask.q_segments), row, rows, 1)
            k_segments = _take(self.pad_keys(mask.k_segments), column, columns, 1)
            q_segments = jnp.repeat(q_segments, groups, axis=1)
            mask = replace(mask, q_segments=q_segments, k_segments=k_segments)
        query = row + jnp.arange(rows * groups) // groups
        key = column + jnp.arange(columns)
        allowed = visible(self.band, mask, query, key, keys_first=keys_first)
        if not self.unrolled:  # the last tile may reach into padding
            allowed &= jnp.expand_dims((key < self.keys)[None], 2 if keys_first else 1)
        # The barriers make XLA's CPU compiler do the comparisons once for all heads, and the
        # select once for maximum and exponential.
        allowed = lax.optimization_barrier(allowed[:, None])
        return lax.optimization_barrier(jnp.where(allowed, logits, -jnp.inf))


def _cap(options: Options, logits: Array) -> Array:
    if options.soft_cap is None:
        return logits
    return options.soft_cap * jnp.tanh(logits / options.soft_cap)


def _to_rows(x: Array, groups: int) -> Array:
    """[B, T, K * G, ...] -> [B, K, T * G, ...]."""
    b, length, heads, *rest = x.shape
    x = x.reshape(b, length, heads // groups, groups, *rest).swapaxes(1, 2)
    return x.reshape(b, heads // groups, length * groups, *rest)


def _from_rows(x: Array, groups: int) -> Array:
    """[B, K, T * G, ...] -> [B, T, K * G, ...]."""
    b, kv_heads, rows, *rest = x.shape
    x = x.reshape(b, kv_heads, rows // groups, groups, *rest).swapaxes(1, 2)
    return x.reshape(b, rows // groups, kv_heads * groups, *rest)


def _pad(x: Array, unit: int) -> Array:
    """Pads dim 1 with zeros to a multiple of `unit`."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % unit), *[(0, 0)] * (x.ndim - 2)])


def _take(x: Array, start, size: int, dim: int = 2) -> Array:
    if isinstance(start, int):
        return lax.slice_in_dim(x, start, start + size, axis=dim)
    return lax.dynamic_slice_in_dim(x, start, size, axis=dim)


def _add(x: Array, start, update: Array, dim: int) -> Array:
    update += _take(x, start, update.shape[dim], dim)
    return lax.dynamic_update_slice_in_dim(x, update, start, axis=dim)


def _einsum(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)
