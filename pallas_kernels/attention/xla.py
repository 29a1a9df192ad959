"""Attention in plain JAX, block by block.

Queries are taken in blocks, and a block meets only the keys that causal and window leave it.
Up to `UNROLL` tokens the blocks are unrolled: their key ranges are static, a block meets its
keys in one tile. Beyond, blocks and tiles are loops with a running softmax; the bounds of the
inner loop are the key range, so empty tiles are skipped there too.

Legend: B batch, T queries (t of one block), S keys (s of one tile), K key/value heads,
G query heads for each of them (H = K * G), D key size, E value size.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.attention.mask import Band, MaskArrays, band_covers, key_range, visible

BLOCK = 128  # query rows of a block
TILE = 512  # keys of a tile in the loops for long sequences
UNROLL = 1024  # longest sequence (T and S) whose blocks are unrolled


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
    plan = _Plan(options, mask, q.shape[1], k.shape[1])
    kv_heads = k.shape[2]
    q, k, v = plan.pad_rows(_rows(q, kv_heads)), *(plan.pad_columns(_columns(x)) for x in (k, v))

    def start(rows):
        shape = (q.shape[0], kv_heads, rows, q.shape[3])
        if sinks is None:
            top, total = jnp.full(shape, -jnp.inf), jnp.zeros(shape)
        else:  # a sink is a key that was met before all others, with value zero
            top = sinks.astype(jnp.float32).reshape(kv_heads, 1, -1)
            top, total = jnp.broadcast_to(top, shape), jnp.ones(shape)
        return top, total, jnp.zeros((*shape, v.shape[3]))

    def meet(row, rows, column, columns, state):
        top, total, sum_ = state
        v_s = _take(v, column, columns)
        _, logits = plan.logits(q, k, row, rows, column, columns)
        new_top = jnp.maximum(top, logits.max(-1))
        finite = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        p = jnp.exp(logits - finite[..., None])
        decay = jnp.exp(top - finite)
        product = _einsum("bktgs,bkse->bktge", p.astype(v.dtype), v_s)
        return new_top, total * decay + p.sum(-1), sum_ * decay[..., None] + product

    def block(row, rows):
        top, total, sum_ = plan.over_tiles(row, rows, meet, start(rows))
        some = total > 0
        divisor = jnp.where(some, total, 1.0)
        lse = jnp.where(some, top + jnp.log(divisor), -jnp.inf)
        return (sum_ / divisor[..., None]).astype(q.dtype), lse

    out, lse = plan.over_blocks(block)
    return _heads_last(out), _heads_last(lse)


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
    # d out and d lse meet in one number for each row: dS = P * (dP - delta).
    delta = jnp.einsum("bthe,bthe->bth", out, dout, preferred_element_type=jnp.float32) - dlse
    delta = jnp.where(empty, 0.0, delta)
    finite_lse = jnp.where(empty, 0.0, lse)
    dsinks = None
    if sinks is not None:
        dsinks = -jnp.exp(sinks.astype(jnp.float32)[None, None] - finite_lse) * delta
        dsinks = dsinks.sum((0, 1)).astype(sinks.dtype)

    plan = _Plan(options, mask, q.shape[1], k.shape[1])
    q, dout, finite_lse, delta = (
        plan.pad_rows(_rows(x, k.shape[2])) for x in (q, dout, finite_lse, delta)
    )
    k, v = (plan.pad_columns(_columns(x)) for x in (k, v))

    def meet(row, rows, column, columns, state):
        dq, dk, dv = state
        q_t, dout_t, lse_t, delta_t = (_take(x, row, rows) for x in (q, dout, finite_lse, delta))
        k_s, v_s = _take(k, column, columns), _take(v, column, columns)
        capped, logits = plan.logits(q, k, row, rows, column, columns)
        p = jnp.exp(logits - lse_t[..., None])
        dp = _einsum("bktge,bkse->bktgs", dout_t, v_s)
        ds = p * (dp - delta_t[..., None]) * options.scale
        if options.soft_cap is not None:
            ds *= 1.0 - (capped / options.soft_cap) ** 2
        ds = ds.astype(q.dtype)
        dq += _einsum("bktgs,bksd->bktgd", ds, k_s)
        dk = _add(dk, column, _einsum("bktgs,bktgd->bksd", ds, q_t))
        dv = _add(dv, column, _einsum("bktgs,bktge->bkse", p.astype(v.dtype), dout_t))
        return dq, dk, dv

    def block(row, rows, gradients):
        dq = jnp.zeros((*q.shape[:2], rows, *q.shape[3:]))
        dq, *gradients = plan.over_tiles(row, rows, meet, (dq, *gradients))
        return dq.astype(q.dtype), tuple(gradients)

    dq, (dk, dv) = plan.over_blocks_with_carry(block, (jnp.zeros(k.shape), jnp.zeros(v.shape)))
    dk, dv = (x[:, :, : plan.keys].swapaxes(1, 2).astype(q.dtype) for x in (dk, dv))
    return _heads_last(dq), dk, dv, dsinks


@dataclass(frozen=True)
class _Plan:
    """How the pairs are cut into tiles, and the logits of one of them."""

    options: Options
    mask: MaskArrays
    queries: int
    keys: int

    @property
    def unrolled(self) -> bool:
        return max(self.queries, self.keys) <= UNROLL

    @property
    def block(self) -> int:
        return min(BLOCK, self.queries)

    def pad_rows(self, x: Array, dim: int = 2) -> Array:
        return x if self.unrolled else _pad(x, self.block, dim)

    def pad_columns(self, x: Array, dim: int = 2) -> Array:
        return x if self.unrolled else _pad(x, TILE, dim)

    def over_blocks(self, function):
        out, _ = self.over_blocks_with_carry(lambda *args: (function(*args[:2]), None), None)
        return out

    def over_blocks_with_carry(self, function, carry):
        """Calls function(row, rows, carry) -> (rows of outputs, carry) block after block."""
        if self.unrolled:
            outs = []
            for row in range(0, self.queries, self.block):
                out, carry = function(row, min(self.block, self.queries - row), carry)
                outs.append(out)
            join = lambda *x: jnp.concatenate(x, axis=2)
            return jax.tree.map(join, *outs), carry

        def step(carry, i):
            out, carry = function(i * self.block, self.block, carry)
            return carry, out

        carry, outs = lax.scan(step, carry, jnp.arange(-(-self.queries // self.block)))

        def join(x):  # [n, B, K, t, ...] -> [B, K, n * t, ...]
            x = jnp.moveaxis(x, 0, 2)
            x = x.reshape(*x.shape[:2], -1, *x.shape[4:])
            return x[:, :, : self.queries]

        return jax.tree.map(join, outs), carry

    def over_tiles(self, row, rows, meet, state):
        """Calls meet(row, rows, column, columns, state) -> state for every tile of a block."""
        offset = self.mask.offset
        offsets = (self.options.band.offset,) * 2
        if offset is not None:
            offsets = (offset.min(), offset.max())
        start, stop = key_range(self.options.band, offsets, row, row + rows - 1, self.keys)
        if not self.unrolled:
            tiles = (start // TILE, (stop + TILE - 1) // TILE)
            return lax.fori_loop(*tiles, lambda j, x: meet(row, rows, j * TILE, TILE, x), state)
        if offset is not None:
            start, stop = 0, self.keys
        return meet(row, rows, start, stop - start, state) if start < stop else state

    def logits(self, q, k, row, rows, column, columns):
        """Returns the logits `[B, K, t, G, s]` of a tile in float32, before and after the mask."""
        logits = _einsum("bktgd,bksd->bktgs", _take(q, row, rows), _take(k, column, columns))
        logits *= self.options.scale
        if self.options.soft_cap is not None:
            logits = self.options.soft_cap * jnp.tanh(logits / self.options.soft_cap)
        allowed = self.allowed(row, rows, column, columns)
        if allowed is None:
            return logits, logits
        return logits, jnp.where(allowed[:, None, :, None, :], logits, -jnp.inf)

    def allowed(self, row, rows, column, columns):
        """Returns the mask `[1 or B, t, s]` of a tile, or None if it allows every pair."""
        band, mask = self.options.band, self.mask
        if self.unrolled and mask.q_segments is None:
            if band_covers(band, range(row, row + rows), range(column, column + columns)):
                return None
        if mask.q_segments is not None:
            mask = replace(
                mask,
                q_segments=_take(self.pad_rows(mask.q_segments, 1), row, rows, 1),
                k_segments=_take(self.pad_columns(mask.k_segments, 1), column, columns, 1),
            )
        key = column + jnp.arange(columns)
        allowed = visible(band, mask, row + jnp.arange(rows), key)
        return allowed if self.unrolled else allowed & (key < self.keys)[None, None]


def _rows(x: Array, kv_heads: int) -> Array:
    """[B, T, K * G, ...] -> [B, K, T, G, ...]."""
    return x.reshape(*x.shape[:2], kv_heads, -1, *x.shape[3:]).swapaxes(1, 2)


def _columns(x: Array) -> Array:
    return x.swapaxes(1, 2)


def _heads_last(x: Array) -> Array:
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


def _add(x: Array, start, update: Array) -> Array:
    update += _take(x, start, update.shape[2])
    return lax.dynamic_update_slice_in_dim(x, update, start, axis=2)


def _einsum(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)
