"""Ring attention: each device holds a part of the sequence, and keys and values go round.

Device i has the queries, keys and values of its own rows. In n steps it meets the keys and values
of all n devices, one device's at a time, while the next ones are on their way: step s works on
those of device i - s. The results of the steps are merged by their log-sum-exps. What a device
holds is that of its own rows, however many devices there are.

**Causal balance.** Cut in contiguous parts, the last device would have 2n - 1 times the work of
the first, and all would wait for it. Here the sequence is cut into 2n chunks and device i holds
chunks i and 2n - 1 - i (`zigzag.py`), `lo` and `hi`. Against the chunks of another device j then

    hi sees all of j's lo;    lo sees all of j's lo if j < i, else hi sees all of j's hi;

and nothing else: two chunk-by-chunk blocks without a causal mask in each step, on every device.
Which they are is a `where` on the device's index, and both are one attention call with the batch
doubled: no branch, no block that is computed and thrown away.

**Backward.** Each block's gradient is exact given the whole output and log-sum-exp. Keys and
values go round again, and their gradients, in float32, go with them and gather what each device
adds. Both are one transfer: XLA runs one at a time, and would run the smaller beside nothing. The
device's own block is cut in two parts of equal work: one hides the first transfer of keys and
values, the other the gradients' last hop home. Every transfer has a call of attention beside it;
`optimization_barrier` keeps XLA from pulling all transfers to the front. Steps are unrolled: a
loop would copy what it carries.

Where it pays: sequences whose activations do not fit, or whose attention outweighs the transfer.
A causal step has 2 T^2 H D FLOP for 4 T K D bytes in 16 bits, so its transfer hides once T is
above 2 K / H * (FLOP/s) / (bytes/s): about 1000 rows on each H200 for H = 4 K. Where it does not:
shorter ones (shard heads instead, as Ulysses does); windows, of which most steps would see
nothing; few key/value heads on one NVLink node, where gathering all keys and values in zigzag
order holds no more and is as fast (65,536 tokens, H 32, K 8 on eight H200s, modelled: forward
7.1 ms of either, with backward 31.0 ms against 29.9). What could be better: queries are copied in
each step to choose their halves, and results pass through memory once more to be merged, 10 % of
that forward pass. A kernel that takes halves by index, and starts from a state, would save both.

Legend: B batch, T queries and S keys *of this device*, H query heads, K key/value heads, D key
size, E value size; n devices.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, no_type_check

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxaccel import names
from pallas_kernels import manual_axes
from pallas_kernels.attention import Mask, attention, attention_backward

LO, HI, EITHER, ALL = range(4)  # halves of a device's rows; one of them, known at run time; both
HELD = 4  # results that wait to be summed in one pass over memory


@no_type_check  # a wrong shape is a ValueError of the attention op, also under beartype
def ring_attention(
    q_BTHD: Float[Array, "B T H D"],
    k_BSKD: Float[Array, "B S K D"],
    v_BSKE: Float[Array, "B S K E"],
    axis_name: str,
    *,
    mask: Mask = Mask(),  # noqa: B008 (frozen)
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    implementation: Literal["xla", "mosaic_gpu"] | None = None,
) -> Float[Array, "B T H E"]:
    """`attention` over a sequence that is sharded over a mesh axis; called inside `jax.shard_map`.

    The same result as `attention` on the whole sequence, each device giving and getting its own
    rows. If causal, rows are in the order of `overlap.zigzag`; else their order means nothing.

    **Exactness**: exact. In float32 up to rounding; in bfloat16 and float16 each step's result is
    rounded once more before the float32 sum over steps. Memory: O(B (T H + S K) (D + E)) beside
    the arguments, whatever n. Compute: that of `attention` divided by n, on every device, causal
    too. Transfers: n - 1 of k and v forward; n - 1 of k and v and n - 1 of their float32 gradients
    backward, together where both go; with segments an all-gather of B S n integers.

    Args:
      q_BTHD: queries of this device; bfloat16, float16 or float32. T is even.
      k_BSKD: its keys, of the same dtype; K divides H. If causal, S is T.
      v_BSKE: its values, of the same dtype.
      axis_name: mesh axis of the sequence; over one device this is `attention`.
      mask: of the whole sequence: `causal`, and segments `[B, T]` and `[B, S]` that are this
        device's, 0 for padding. No window and no offset.
      scale, logits_soft_cap, implementation: as of `attention`.

    Returns:
      The output `[B, T, H, E]` in the inputs' dtype. It and the log-sum-exp carry the checkpoint
      names of `names.ATTENTION`: a policy that saves both repeats nothing, no transfer either.

    Raises:
      ValueError: an axis that is not there, a window or an offset, lengths or head sizes that
        cannot be halved, and what `attention` refuses.
      NotImplementedError: as `attention`.

    Example:
      >>> auto = (jax.sharding.AxisType.Auto,)
      >>> mesh = jax.make_mesh((1,), ("sequence",), auto, devices=jax.devices()[:1])
      >>> spec = jax.P(None, "sequence")
      >>> attend = partial(ring_attention, axis_name="sequence", mask=Mask(causal=True))
      >>> attend = jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec)
      >>> q, k, v = jnp.ones((1, 8, 4, 8)), jnp.ones((1, 8, 2, 8)), jnp.ones((1, 8, 2, 8))
      >>> attend(q, k, v).shape
      (1, 8, 4, 8)

    References:
      Ring attention, arXiv 2310.01889; striped attention (causal balance), arXiv 2311.09431.
    """
    try:
        devices = lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"there is no mesh axis {axis_name!r} here; call ring_attention inside a "
            "jax.shard_map over a mesh that has it"
        ) from None
    options = (("scale", scale), ("logits_soft_cap", logits_soft_cap))
    options += (("implementation", implementation),)
    attend = partial(attention, mask=mask, **dict(options))
    if devices == 1:
        return attend(q_BTHD, k_BSKD, v_BSKE)
    jax.eval_shape(attend, q_BTHD, k_BSKD, v_BSKE)  # refuses what the op refuses
    if mask.window is not None or mask.offset is not None:
        raise ValueError(
            f"got window {mask.window}, offset {mask.offset}; over {devices} devices "
            "ring_attention has causal and segments only: set both to None"
        )
    queries, keys = q_BTHD.shape[1], k_BSKD.shape[1]
    if queries % 2 or (mask.causal and queries != keys):
        raise ValueError(
            f"got {queries} queries and {keys} keys on each device; queries must be two chunks, "
            "an even number, and if causal as many as keys"
        )
    if (q_BTHD.shape[3] + v_BSKE.shape[3]) * q_BTHD.dtype.itemsize % 4:
        raise ValueError(
            f"got q {q_BTHD.shape}, v {v_BSKE.shape} of {q_BTHD.dtype}; keys and values travel as "
            "32-bit words: the sum of their head sizes must be even"
        )
    arrays = (q_BTHD, k_BSKD, v_BSKE, mask.q_segments, mask.k_segments)
    return _attend(_Ring(axis_name, devices, mask.causal, options), *_all_vary(axis_name, arrays))


def _all_vary(axis: str, arrays: tuple) -> tuple:
    """The same arrays, varying over `axis` and wherever another does."""
    given = [x for x in arrays if x is not None]
    *given, _ = manual_axes.vary_alike(*given, lax.axis_index(axis))
    return tuple(None if x is None else given.pop(0) for x in arrays)


@dataclass(frozen=True)
class _Blocks:
    """Parts of the rows that meet in one call, side by side in its batch."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool = False


@dataclass(frozen=True)
class _Ring:
    """What is static."""

    axis: str
    devices: int
    causal: bool
    options: tuple[tuple[str, Any], ...]  # of the attention op

    def send(self, *arrays: Array) -> Array:
        """One transfer to the next device, of 32-bit words side by side along the last dim."""
        words = jnp.concatenate([x.view(jnp.uint32) for x in arrays], axis=-1)
        hops = [(i, (i + 1) % self.devices) for i in range(self.devices)]
        return lax.ppermute(words, self.axis, hops)

    def keys_ids(self, k_ids: Array | None) -> Callable[[int], Array | None]:
        """The segments that step s meets: all are gathered at once, they are small."""
        if k_ids is None:
            return lambda s: None
        ids, me = lax.all_gather(k_ids, self.axis), lax.axis_index(self.axis)
        return lambda s: lax.dynamic_index_in_dim(ids, (me - s) % self.devices, keepdims=False)

    @property
    def own(self) -> tuple[_Blocks, _Blocks]:
        """A device's rows against its own keys, in two parts of equal work."""
        if self.causal:
            return _Blocks((HI,), (LO,)), _Blocks((LO, HI), (LO, HI), causal=True)
        return _Blocks((LO,), (ALL,)), _Blocks((HI,), (ALL,))

    @property
    def others(self) -> _Blocks:
        """Its rows against another's keys."""
        if self.causal:
            return _Blocks((HI, EITHER), (LO, EITHER))
        return _Blocks((ALL,), (ALL,))

    def either(self, s: int) -> Array:
        """LO or HI, in step s: device i - s comes before i, unless that wraps around."""
        return jnp.where(lax.axis_index(self.axis) >= s, LO, HI)


def _take(tree: Any, parts: tuple[int, ...], either: Array) -> Any:
    """Each array [B, T, ...] -> [len(parts) * B, T / 2, ...]."""
    if parts == (ALL,):
        return tree

    def take(x: Array) -> Array:
        lo, hi = jnp.split(x, 2, axis=1)
        choices = {LO: lambda: lo, HI: lambda: hi, EITHER: lambda: jnp.where(either == LO, lo, hi)}
        return jnp.concatenate([choices[part]() for part in parts], axis=0)

    return jax.tree.map(take, tree)


def _put(y: Array, parts: tuple[int, ...], either: Array) -> Array:
    """The transpose of `_take`, in float32."""
    y = y.astype(jnp.float32)
    if parts == (ALL,):
        return y
    # By broadcasts, which XLA fuses with what comes next; of two concatenations it fuses one.
    here = lambda part: jnp.arange(2) == (either if part == EITHER else part)
    here = [here(part).reshape(1, 2, *(1,) * (y.ndim - 1)) for part in parts]
    pieces = jnp.split(y[:, None], len(parts))
    both: Any = sum(jnp.where(there, piece, 0.0) for there, piece in zip(here, pieces))
    return both.reshape(-1, both.shape[1] * both.shape[2], *y.shape[2:])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Result:
    """Output and log-sum-exp for the queries of `parts`, over some of the keys."""

    out: Array
    lse: Array
    either: Array
    parts: tuple[int, ...] = field(metadata={"static": True})

    def of(self, rows: int) -> list[tuple[Array, Array]]:
        """What it says of `rows`: LO, HI or ALL."""
        found, n = [], len(self.parts)
        for part, out, lse in zip(self.parts, jnp.split(self.out, n), jnp.split(self.lse, n)):
            if part == rows:
                found.append((out, lse))
            elif part == EITHER:
                found.append((out, jnp.where(self.either == rows, lse, -jnp.inf)))
            elif part == ALL:
                found.append(tuple(jnp.split(x, 2, axis=1)[rows] for x in (out, lse)))
        return found


def _merge(results: list[_Result], rows: tuple[int, ...]) -> _Result:
    """One float32 result over the keys of all, which must differ."""

    def merge(found: list[tuple[Array, Array]]) -> tuple:
        lses = jnp.stack([lse for _, lse in found])
        lse = jax.nn.logsumexp(lses, axis=0)
        weights = jnp.exp(lses - jnp.where(lse == -jnp.inf, 0.0, lse)[None])  # no inf - inf
        # A row's, not an element's: without the barrier each element would compute them again.
        weights = lax.optimization_barrier(weights)[..., None]
        return sum(w * out.astype(jnp.float32) for w, (out, _) in zip(weights, found)), lse

    merged = [merge([x for result in results for x in result.of(half)]) for half in rows]
    out, lse = (jnp.concatenate(x) for x in zip(*merged))
    return _Result(out, lse, results[0].either, rows)


def _forward(ring: _Ring, q, k, v, q_ids, k_ids) -> tuple[Array, Array]:
    @partial(jax.jit, static_argnums=0)  # one lowering for all steps
    def attend(blocks: _Blocks, kv, k_ids, either):
        q_, q_ids_ = _take((q, q_ids), blocks.queries, either)
        kv, k_ids = _take((kv, k_ids), blocks.keys, either)
        mask = Mask(blocks.causal, None, q_ids_, k_ids)
        k, v = jnp.split(kv, [q.shape[3]], axis=-1)
        return attention(q_, k, v, mask=mask, return_lse=True, **dict(ring.options))

    kv, ids, last = jnp.concatenate([k, v], axis=-1), ring.keys_ids(k_ids), ring.devices - 1
    rows = (LO, HI) if ring.causal else (ALL,)
    results = []
    for s in range(ring.devices):
        blocks = ring.others if s else _Blocks((ALL,), (ALL,), ring.causal)
        coming = ring.send(kv) if s < last else kv
        found = attend(blocks, kv, ids(s), ring.either(s))
        # The transfer may start before the call, and is over before the next one starts.
        found, coming, results = lax.optimization_barrier((found, coming, results))
        out, lse = found
        results.append(_Result(out, lse, ring.either(s), blocks.queries))
        if len(results) == HELD or s == last:
            results = [_merge(results, rows)]
        kv = coming.view(kv.dtype)
    out, lse = (
        jnp.concatenate(jnp.split(x, len(rows)), axis=1) for x in (results[0].out, results[0].lse)
    )
    return out.astype(q.dtype), lse


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: _Ring, q, k, v, q_ids, k_ids):
    return _forward(ring, q, k, v, q_ids, k_ids)[0]


def _attend_fwd(ring, q, k, v, q_ids, k_ids):
    out, lse = _forward(ring, q, k, v, q_ids, k_ids)
    out = checkpoint_name(out, names.ATTENTION_CONTEXT)
    lse = checkpoint_name(lse, names.ATTENTION_LSE)
    return out, (q, k, v, q_ids, k_ids, out, lse)


def _attend_bwd(ring, residuals, dout):
    q, k, v, q_ids, k_ids, out, lse = residuals
    # The barrier: the first transfer is that of the forward pass, which XLA would keep instead.
    k, v, out = lax.optimization_barrier((k, v, out))

    @partial(jax.jit, static_argnums=0)
    def gradients(blocks: _Blocks, kv, k_ids, either):
        rows = q, out, lse, dout, q_ids
        q_, out_, lse_, dout_, q_ids_ = _take(rows, blocks.queries, either)
        kv, k_ids = _take((kv, k_ids), blocks.keys, either)
        mask = Mask(blocks.causal, None, q_ids_, k_ids)
        k, v = jnp.split(kv, [q.shape[3]], axis=-1)
        dq, *dk_dv = attention_backward(
            q_, k, v, out_, lse_, dout_, mask=mask, **dict(ring.options)
        )
        return dq, jnp.concatenate(dk_dv, axis=-1)

    own, ids, n = jnp.concatenate([k, v], axis=-1), ring.keys_ids(k_ids), ring.devices
    width, words = own.shape[-1], own.view(jnp.uint32).shape[-1]
    kv, dq, dkv, dkv_early = own, *[jnp.float32(0.0)] * 3
    early, late = ring.own
    for s, blocks in enumerate([early, *[ring.others] * (n - 1), late]):
        # Under call s: keys and values for the next one, and the gradients of those it meets.
        going = [kv] * (s < n - 1) + [dkv] * (s > 1)
        coming = ring.send(*going) if going else None
        found = gradients(blocks, kv, ids(s % n), ring.either(s))
        summed = dq if s % HELD == HELD - 1 else None  # now, so that few results are held
        (dq_s, dkv_s), coming, summed = lax.optimization_barrier((found, coming, summed))
        dq = _put(dq_s, blocks.queries, ring.either(s)) + (dq if summed is None else summed)
        dkv_s = _put(dkv_s, blocks.keys, ring.either(s))
        if s == 0:
            dkv_early = dkv_s
        else:
            dkv = dkv_s + (coming[..., -width:].view(jnp.float32) if s > 1 else 0.0)
        kv = coming[..., :words].view(own.dtype) if s < n - 1 else own
    dk, dv = jnp.split(dkv + dkv_early, [k.shape[3]], axis=-1)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None


_attend.defvjp(_attend_fwd, _attend_bwd)
