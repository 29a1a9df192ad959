"""The Mosaic GPU kernels of attention's backward pass: simulated, built for an H200, run."""

import contextlib
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backend, target
from pallas_kernels.attention import Mask, attention_reference, mosaic_backward
from pallas_kernels.attention.mask import Band, MaskArrays, split
from pallas_kernels.attention.xla import Options
from pallas_kernels.build import build_all

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
        order = lambda pair: (sorted(names.index(f) for f, _ in pair), pair)
        row = dict(min(map(sorted, pairs), key=order))
        for name in names:
            if name not in row:
                row[name] = max(FEATURES[name], key=partial(_gain, pairs, row, name))
        pairs -= {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
        rows.append(row)
    return rows


def _gain(pairs, row, name, value):
    return sum(frozenset({(name, value), item}) in pairs for item in row.items())


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


def check(case, *, scale=None, logits_soft_cap=None, lane=backend.simulate):
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

    with jax.default_matmul_precision("highest"):  # float32, and on a GPU not TF32
        want, naive, lse, delta = references(case)
    kernels = jax.jit(partial(mosaic_backward.backward, Options(band, scale, logits_soft_cap)))
    inputs = q, k, v, arrays, lse, delta, dout
    with lane():
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


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(ROWS)))
def test_run(number):
    row = {name: FEATURES[name][value] for name, value in ROWS[number].items()}
    extra = dict(row.pop("extra"))
    case = make_case(LENGTHS[number % len(LENGTHS)], **row, **_sinks(extra), seed=number)
    check(case, **extra, lane=contextlib.nullcontext)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128)])
def test_run_long(sizes):
    """Many blocks for each program, and more programs than a GPU has cores."""
    case = make_case((2048, 2048), (8, 2), sizes, {"causal": True}, jnp.bfloat16, packed=True)
    check(case, lane=contextlib.nullcontext)


def _sinks(extra):
    return {"sinks": extra.pop("sinks", False)}


def small_case(mask, *, lengths=(140, 150), sizes=(64, 64), seed=0, **options):
    return make_case(lengths, (1, 1), sizes, mask, jnp.bfloat16, seed=seed, **options)


@pytest.mark.parametrize(
    ("lengths", "mask"),
    [
        ((799, 3), {}),
        ((256, 512), {"causal": True}),
        pytest.param((1023, 1024), {"causal": True}, marks=pytest.mark.slow),
    ],
)
def test_long_and_lopsided(lengths, mask):
    check(small_case(mask, lengths=lengths))


def test_two_runs_are_bit_equal():
    case = make_case((130, 70), (2, 1), (64, 64), {"causal": True}, jnp.bfloat16)
    got, kernels, inputs = check(case)
    with backend.simulate():
        again = kernels(*inputs)
    for a, b in zip(got, again, strict=True):
        np.testing.assert_array_equal(a, b)


def test_offset_known_only_when_it_runs():
    band, arrays = split(Mask(causal=True, offset=jnp.array([7])), 1, 70, 80)
    assert band.offset is None and arrays.offset.shape == (1,)
    check(small_case({"causal": True, "offset": jnp.array([7])}, lengths=(70, 80)))


def test_queries_that_see_nothing_get_and_give_no_gradient():
    random = np.random.default_rng(0)
    case = list(small_case({"causal": True}, lengths=(200, 70)))  # the first 130 see nothing
    case[3] = jnp.asarray(random.standard_normal(case[3].shape) * 1e4, jnp.bfloat16)
    (dq, dk, dv), *_ = check(case)
    assert not np.any(dq[:, :130])
    assert all(np.all(np.isfinite(x.astype(jnp.float32))) for x in (dq, dk, dv))


def test_blocks_that_the_mask_empties_are_never_loaded():
    """NaN where nobody may look: a block that was loaded would give NaN by 0 * NaN."""
    q, k, v, dout, *_, mask = small_case({"causal": True, "offset": 0}, lengths=(100, 400))
    k, v = (x.at[:, 256:].set(jnp.nan) for x in (k, v))  # key blocks 2 and 3 of dQ
    band, arrays = split(mask, 1, 100, 400)
    lse, delta = jnp.zeros(q.shape[:3]), jnp.zeros(q.shape[:3])
    with backend.simulate():
        dq, dk, dv = jax.jit(partial(mosaic_backward.backward, Options(band, 0.1, None)))(
            q, k, v, arrays, lse, delta, dout
        )
    assert np.all(np.isfinite(dq.astype(jnp.float32))) and np.any(dq)
    for x in (dk, dv):
        assert np.all(np.isfinite(x[:, :256].astype(jnp.float32)))
        assert not np.any(x[:, 256:].astype(jnp.float32))  # their programs visited no queries


def test_large_heads_are_refused():
    q = jnp.ones((1, 2, 1, 256), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=r"\(1, 2, 1, 256\).*up to 192"):
        mosaic_backward.backward(
            Options(Band(None, None, 0), 1.0, None),
            *(q, q, q, MaskArrays(), q[..., 0], q[..., 0], q),
        )


# The lanes themselves: faults that they must find.


def test_a_mask_that_is_off_by_one_is_found(monkeypatch):
    hide = mosaic_backward._Kernel.hide

    def shifted(self, refs, first_column, *rest):
        return hide(self, refs, first_column + 1, *rest)

    monkeypatch.setattr(mosaic_backward._Kernel, "hide", shifted)
    with pytest.raises(AssertionError, match="'q'"):
        check(small_case({"causal": True}, lengths=(70, 70)))


@pytest.mark.parametrize("removed", ["x_here", "free"])
def test_a_barrier_that_is_left_out_is_found(removed, monkeypatch):
    """Consumers that do not wait for a block, a producer that does not wait for its release."""
    wait = mosaic_backward.plgpu.barrier_wait
    counts = {"free": 0, "x_here": 2}  # place among the waits, as they are traced
    calls = iter(range(10**6))
    monkeypatch.setattr(
        mosaic_backward.plgpu,
        "barrier_wait",
        lambda barrier: None if next(calls) == counts[removed] else wait(barrier),
    )
    with pytest.raises(Exception, match="RACE DETECTED"):
        check(small_case({}, lengths=(64, 900)))


# Shared memory in bytes of each kernel for an H200, by head sizes, mask and cap; none spills.
GOLDEN = {
    ((64, 64), "packed", None): {"dq": 166000, "dkv": 85080},
    ((128, 128), "full", None): {"dq": 196672, "dkv": 198768},
    ((128, 128), "causal", None): {"dq": 196672, "dkv": 198768},
    ((128, 128), "packed", None): {"dq": 197696, "dkv": 199792},
    ((128, 128), "window", 30.0): {"dq": 196720, "dk": 198768, "dv": 197744},
    ((192, 128), "packed", None): {"dq": 205912, "dk": 207960, "dv": 206936},
    ((192, 192), "packed", None): {"dq": 197696, "dk": 199744, "dv": 198720},
}
MASKS = {
    "full": Mask(),
    "causal": Mask(causal=True),
    "packed": Mask(causal=True, q_segments=True, k_segments=True),
    "window": Mask(causal=True, window=(1000, None)),
}


def programs(depth, value_depth, mask, cap=None, *, length=4096, heads=4, kv_heads=2):
    """The kernels of one configuration, each with its abstract inputs."""
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32) if mask.q_segments is not None else None
    left, right = mask.window or (None, None)
    options = Options(Band(left, 0 if mask.causal else right, 0), depth**-0.5, cap)
    shapes = [(heads, depth), (kv_heads, depth), (kv_heads, value_depth), (heads, value_depth)]
    q, k, v, dout = (jax.ShapeDtypeStruct((1, length, *s), jnp.bfloat16) for s in shapes)
    vector = jax.ShapeDtypeStruct((1, length, heads), jnp.float32)
    tiles = mosaic_backward.choose(depth, value_depth, soft_cap=cap is not None)
    return {
        work.name.removeprefix("attention_"): (
            partial(mosaic_backward.run, work, tile, options),
            (q, k, v, dout, MaskArrays(ids, ids), vector, vector),
        )
        for work, tile in tiles.items()
    }


@pytest.mark.target
def test_built_for_h200():
    todo = {
        (key, name): program
        for key in GOLDEN
        for name, program in programs(*key[0], MASKS[key[1]], key[2]).items()
    }
    built = dict(zip(todo, build_all(list(todo.values()), target.parse("h200")), strict=True))
    memory = {key: {} for key in GOLDEN}
    for (key, name), report in built.items():
        assert report.spill_bytes == 0, (key, name)
        assert not report.warnings, (key, name, report.warnings)
        assert all(kind.endswith(".f32.bf16.bf16") for kind in report.wgmma_kinds)
        assert report.wgmma and report.tma and report.exp2
        assert report.shared_memory_bytes <= 227 * 1024
        memory[key][name] = report.shared_memory_bytes
    assert memory == GOLDEN
