"""The Mosaic GPU kernels of attention's backward pass: simulated, and built for an H200."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backend
from pallas_kernels.attention import Mask, attention_reference, mosaic_backward
from pallas_kernels.attention.mask import MaskArrays, split
from pallas_kernels.attention.mosaic_backward import Tiles, choose
from pallas_kernels.attention.xla import Options

LENGTHS = [(1, 1), (113, 203), (239, 1), (97, 64), (128, 217), (130, 256)]
FEATURES = {
    "mask": {
        "full": {},
        "causal": {"causal": True},
        "window": {"window": (40, 9)},
        "causal-window": {"causal": True, "window": (100, None)},
        "offsets": {"window": (70, 5), "offset": (-2, 11)},
    },
    "extra": {
        "plain": {},
        "cap": {"logits_soft_cap": 2.0},
        "sinks, scale": {"sinks": True, "scale": -0.3},
    },
    "heads": {"multi-head": (2, 2), "grouped": (4, 2), "multi-query": (2, 1)},
    "sizes": {"64": (64, 64), "96": (96, 96), "192-128": (192, 128)},
    "packed": {"packed": True, "one document": False},
    "dtype": {"bf16": jnp.bfloat16, "f16": jnp.float16},
}


def covering_rows() -> list[dict[str, str]]:
    """Rows in which each pair of values of two features meets, found greedily."""
    names = list(FEATURES)
    pairs = {
        frozenset({(f, v), (g, w)})
        for f, g in itertools.combinations(names, 2)
        for v, w in itertools.product(FEATURES[f], FEATURES[g])
    }
    rows = []
    while pairs:
        row = dict(min(map(sorted, pairs), key=lambda pair: (sorted(names.index(f) for f, _ in pair), pair)))
        for name in names:
            if name not in row:
                gain = lambda v, n=name: sum(
                    frozenset({(n, v), item}) in pairs for item in row.items()
                )
                row[name] = max(FEATURES[name], key=gain)
        pairs -= {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
        rows.append(row)
    return rows


ROWS = covering_rows()


def make_segments(random, batch, length):
    """Documents 1, 2, 3 ... with some padding at the end."""
    ids = np.cumsum(random.random((batch, length)) < 2.5 / max(length, 5), axis=1) + 1
    ids[:, length - length // 8 :] = 0
    return jnp.asarray(ids, jnp.int32)


def make_case(lengths, heads, sizes, mask, dtype, *, packed=False, sinks=False, seed=0):
    random, batch = np.random.default_rng(seed), 2 if "offset" in mask else 1
    (queries, keys), (query_heads, kv_heads), (depth, value_depth) = lengths, heads, sizes
    shapes = (
        (batch, queries, query_heads, depth),
        (batch, keys, kv_heads, depth),
        (batch, keys, kv_heads, value_depth),
        (batch, queries, query_heads, value_depth),
    )
    arrays = [jnp.asarray(random.standard_normal(s), dtype) for s in shapes]
    dlse = jnp.asarray(random.standard_normal(shapes[0][:3]), jnp.float32)
    sinks = jnp.asarray(random.standard_normal(query_heads), jnp.float32) if sinks else None
    mask = dict(mask)
    if isinstance(mask.get("offset"), tuple):
        mask["offset"] = jnp.array(mask["offset"])
    if packed:
        mask["q_segments"] = make_segments(random, batch, queries)
        mask["k_segments"] = make_segments(random, batch, keys)
    return *arrays, dlse, sinks, Mask(**mask)


def reference(dtype, q, k, v, dout, dlse, sinks, mask, scale, cap):
    """Gradients, output and log-sum-exp of the naive form, computed in a dtype."""

    def loss(q, k, v):
        out, lse = attention_reference(
            q, k, v, mask=mask, scale=scale, logits_soft_cap=cap, sinks_H=sinks
        )
        used = jnp.where(jnp.isfinite(lse), lse, 0.0) * dlse
        return (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum() + used.sum(), (out, lse)

    inputs = (x.astype(dtype) for x in (q, k, v))
    return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*inputs)


def errors(got, want):
    return [float(jnp.abs(a.astype(jnp.float32) - b).max()) for a, b in zip(got, want)]


def check(case, *, scale=None, logits_soft_cap=None):
    """Gradients of the kernels, whose error is at most three times the naive form's."""
    q, k, v, dout, dlse, _, mask = case
    scale = q.shape[3] ** -0.5 if scale is None else scale
    band, arrays = split(mask, q.shape[0], q.shape[1], k.shape[1])

    @jax.jit
    def references(case):
        gradients, (out, lse) = reference(jnp.float32, *case, scale, logits_soft_cap)
        naive, _ = reference(q.dtype, *case, scale, logits_soft_cap)
        # The output as a forward pass in this dtype saves it.
        out = out.astype(q.dtype).astype(jnp.float32)
        return gradients, naive, lse, (out * dout.astype(jnp.float32)).sum(-1) - dlse

    want, naive, lse, delta = references(case)
    kernels = jax.jit(partial(mosaic_backward.backward, Options(band, scale, logits_soft_cap)))
    inputs = q, k, v, arrays, lse, delta, dout
    with backend.simulate():
        got = jax.block_until_ready(kernels(*inputs))
    for a, x in zip(got, (q, k, v), strict=True):
        assert a.dtype == x.dtype and a.shape == x.shape
    # Where a query sees one key, dS is 0 by cancellation; and delta has the rounding of `out`,
    # which the naive form does not use.
    floor = float(jnp.finfo(q.dtype).eps) * 0.05
    for name, error, bound, x in zip("qkv", errors(got, want), errors(naive, want), want):
        assert error <= 3 * bound + floor, (name, error, bound)
        assert min(q.shape[1], k.shape[1]) == 1 or float(jnp.abs(x).max()) > 1e-2
    return got, kernels, inputs


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_agrees_with_the_reference(number):
    row = {name: FEATURES[name][value] for name, value in ROWS[number].items()}
    extra = dict(row.pop("extra"))
    case = make_case(LENGTHS[number % len(LENGTHS)], **row, **_sinks(extra), seed=number)
    check(case, **extra)


def _sinks(extra):
    return {"sinks": extra.pop("sinks", False)}
