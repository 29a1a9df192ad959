"""The forward kernel on Mosaic GPU, simulated and built; and who is chosen to compute."""

import itertools
import linecache
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from pallas_kernels import backend, target
from pallas_kernels.attention import (
    Mask,
    attention,
    attention_reference,
    dispatch,
    mosaic_forward,
    schedule,
)
from pallas_kernels.attention.mask import split, visible
from pallas_kernels.attention.mosaic_forward import TILES, Tiles
from pallas_kernels.attention.xla import Options
from pallas_kernels.build import build_all

BF16 = jnp.bfloat16
LENGTHS = [(1, 1), (113, 203), (128, 217), (97, 64), (130, 40)]
FEATURES = {
    "mask": {
        "full": {},
        "causal": {"causal": True},
        "window": {"window": (40, 9)},
        "causal-window": {"causal": True, "window": (100, None)},
        "offset": {"window": (None, 70), "offset": -20},
        "offsets": {"causal": True, "offset": (-20, 11)},
    },
    "heads": {"multi-head": (2, 2), "grouped": (4, 2), "multi-query": (2, 1)},
    "sizes": {
        "64": (64, 64),
        "96": (96, 96),
        "128-64": (128, 64),
        "192-128": (192, 128),
        "256": (256, 256),
    },
    "extra": {
        "plain": {},
        "sinks": {"sinks": True},
        "cap": {"logits_soft_cap": 2.0},
        "scale": {"scale": -0.3},
    },
    "packed": {"one document": False, "packed": True},
    "dtype": {"bf16": BF16, "f16": jnp.float16},
}  # fmt: skip


def covering_rows() -> list[dict[str, str]]:
    """Rows in which each pair of values of two features meets, found greedily."""
    items = {name: [(name, value) for value in values] for name, values in FEATURES.items()}
    open_ = {
        frozenset(pair)
        for a, b in itertools.combinations(items.values(), 2)
        for pair in itertools.product(a, b)
    }
    rows = []
    while open_:
        row = list(min(map(sorted, open_)))
        for candidates in items.values():
            if not set(candidates) & set(row):
                gains = [sum({item, x} in open_ for x in row) for item in candidates]
                row.append(candidates[gains.index(max(gains))])
        open_ -= set(map(frozenset, itertools.combinations(row, 2)))
        rows.append(dict(row))
    return rows


ROWS = covering_rows()


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch, request):
    """The same kernel on blocks of 64 keys, two in the ring: little to simulate."""
    if request.node.get_closest_marker("target"):
        return
    monkeypatch.setattr(mosaic_forward, "TILES", dict.fromkeys(TILES, Tiles(64, 64, 2)))


def make_segments(random, length):
    """Documents 1, 2, 3 ..., and padding at the end of the second row."""
    ids = np.cumsum(random.random((2, length)) < 2.5 / max(length, 5), axis=1) + 1
    ids[1, length - length // 4 :] = 0
    return jnp.asarray(ids, jnp.int32)


def make_case(lengths, heads=(2, 2), sizes=(64, 64), mask=None, dtype=BF16, packed=False, seed=0):
    """q, k, v, sinks and a mask."""
    random = np.random.default_rng(seed)
    mask = dict(mask or {})
    offsets = isinstance(mask.get("offset"), tuple)
    if offsets:
        mask["offset"] = jnp.array(mask["offset"])
    if packed:
        ids = make_segments(random, max(lengths))
        mask["q_segments"], mask["k_segments"] = (ids[:, :n] for n in lengths)
    batch = 2 if packed or offsets else 1
    shapes = [
        (batch, lengths[0], heads[0], sizes[0]),
        (batch, lengths[1], heads[1], sizes[0]),
        (batch, lengths[1], heads[1], sizes[1]),
    ]
    q, k, v = (jnp.asarray(random.standard_normal(s), dtype) for s in shapes)
    return q, k, v, jnp.asarray(random.standard_normal(heads[0]), jnp.float32), Mask(**mask)


def simulated(q, k, v, sinks, mask, **options):
    def run(q, k, v, sinks, mask):
        return attention(
            q, k, v, mask=mask, sinks_H=sinks, return_lse=True,
            implementation="mosaic_gpu", **options,
        )  # fmt: skip

    with backend.simulate():
        return jax.block_until_ready(jax.jit(run)(q, k, v, sinks, mask))


def excess(got, q, k, v, sinks, mask, **options):
    """The error of (out, lse), over what is allowed: at most 1 is right.

    Allowed is twice the error of the naive form in the same dtype, and half a unit of the last
    place, for outputs that the naive form happens to hit, such as copies of v.
    """
    exact = [x.astype(jnp.float32) for x in (q, k, v)]
    reference = jax.jit(partial(attention_reference, **options))
    want, want_lse = reference(*exact, mask=mask, sinks_H=sinks)
    naive, naive_lse = reference(q, k, v, mask=mask, sinks_H=sinks)
    out, lse = got
    assert out.dtype == q.dtype and out.shape == want.shape
    assert lse.dtype == jnp.float32 and lse.shape == want_lse.shape
    np.testing.assert_array_equal(jnp.isfinite(lse), jnp.isfinite(want_lse))

    def error(x, want):
        x, want = (jnp.where(jnp.isfinite(want), x.astype(jnp.float32), 0.0) for x in (x, want))
        return float(jnp.abs(x - want).max())

    assert jnp.all(jnp.isfinite(out))
    ulp = float(jnp.finfo(q.dtype).eps) / 2 * max(float(jnp.abs(want).max()), 1e-3)
    return max(
        error(out, want) / (2 * error(naive, want) + ulp),
        error(lse, want_lse) / (2 * error(naive_lse, want_lse) + 1e-5),
    )


def check(case, *, sinks=False, **options):
    q, k, v, sinks_H, mask = case
    case = q, k, v, sinks_H if sinks else None, mask
    got = simulated(*case, **options)
    assert excess(got, *case, **options) <= 1
    return got


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_agrees_with_the_reference(number):
    row = {name: FEATURES[name][value] for name, value in ROWS[number].items()}
    extra = row.pop("extra")
    check(make_case(LENGTHS[number % len(LENGTHS)], **row, seed=number), **extra)


@pytest.mark.parametrize(
    ("lengths", "mask"),
    [
        ((239, 1), {}),
        ((256, 512), {"window": (90, None)}),
        ((799, 3), {"causal": True}),
        ((1023, 1024), {"causal": True}),
    ],
)
def test_lengths(lengths, mask):
    check(make_case(lengths, heads=(1, 1), mask=mask))


def test_the_real_tiles(monkeypatch):
    monkeypatch.setattr(mosaic_forward, "TILES", TILES)
    check(make_case((200, 700), heads=(1, 1), sizes=(128, 128), mask={"window": (300, 20)}))


def test_two_runs_are_bit_equal():
    case = make_case((100, 300), heads=(1, 1), mask={"causal": True}, packed=True)
    for a, b in zip(simulated(*case), simulated(*case), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_see_nothing(sinks):
    q, k, v, sinks_H, _ = make_case((190, 90), heads=(1, 1), packed=True)
    ids = jnp.array([[0], [1]])
    mask = Mask(True, None, jnp.tile(ids, (1, 190)), jnp.tile(ids, (1, 90)))
    # The first row is padding; in the second the first 100 queries stand ahead of all keys.
    out, lse = check((q, k, v, sinks_H, mask), sinks=sinks)
    for rows in (np.s_[0], np.s_[1, :100]):
        assert not np.any(out[rows])
        want = np.broadcast_to(sinks_H if sinks else -np.inf, lse[rows].shape)
        np.testing.assert_allclose(lse[rows], want, rtol=1e-6)
    assert np.all(np.isfinite(lse[1, 100:])) and np.any(out[1, 100:])


def test_logits_far_apart():
    q, k, v, _, mask = make_case((64, 300))
    check((q * 60, k * 60, v, None, mask))


def test_transformations():
    q, k, v, *_ = make_case((70, 70), packed=True)
    run = partial(attention, implementation="mosaic_gpu", mask=Mask(causal=True))
    with backend.simulate():
        want = jax.jit(run)(q, k, v)
        rows = [x[:, None] for x in (q, k, v)]
        vmapped = jax.jit(jax.vmap(run))(*rows)[:, 0]
        _, scanned = jax.jit(lambda *x: jax.lax.scan(lambda c, y: (c, run(*y)), None, x))(*rows)
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((1,), ("data",), axis_types=auto)  # the simulator has one GPU
        spec = P("data")
        over = jax.shard_map(run, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
        sharded = jax.jit(over)(q, k, v)
    for got in (vmapped, scanned[:, 0], sharded):
        np.testing.assert_array_equal(got, want)


def test_vmap_over_layers_with_the_rows_documents_in_common():
    """As parallel prediction heads run: each attends in the same packed rows."""
    cases = [
        make_case((70, 70), heads=(4, 2), packed=True, mask={"causal": True}, seed=seed)
        for seed in (0, 1)
    ]
    mask = cases[0][-1]
    arrays = [jnp.stack(pair) for pair in zip(*(case[:3] for case in cases))]
    run = partial(attention, implementation="mosaic_gpu", mask=mask, return_lse=True)
    with backend.simulate():
        got = jax.block_until_ready(jax.jit(jax.vmap(run))(*arrays))
    for number, (q, k, v, *_) in enumerate(cases):
        assert excess(jax.tree.map(lambda x, n=number: x[n], got), q, k, v, None, mask) <= 1
    assert float(jnp.abs(got[0][0] - got[0][1]).max()) > 0.1


def test_gradients_through_the_public_function():
    q, k, v, sinks, mask = make_case((70, 100), heads=(2, 1), mask={"causal": True}, packed=True)

    def loss(implementation, dtype, q, k, v, sinks):
        q, k, v = (x.astype(dtype) for x in (q, k, v))
        out, lse = attention(
            q, k, v, mask=mask, sinks_H=sinks, return_lse=True, implementation=implementation
        )
        return jnp.sin(out.astype(jnp.float32)).sum() + jnp.where(lse > -1e9, lse, 0.0).sum()

    def gradients(*options):
        return jax.jit(jax.grad(partial(loss, *options), argnums=(0, 1, 2, 3)))(q, k, v, sinks)

    want = gradients("xla", jnp.float32)
    with backend.simulate():
        got = jax.block_until_ready(gradients("mosaic_gpu", BF16))
    for a, b, c in zip(got, want, gradients("xla", BF16), strict=True):
        a, b, c = (x.astype(jnp.float32) for x in (a, b, c))
        assert float(jnp.abs(b).max()) > 1e-2
        assert float(jnp.abs(a - b).max()) <= 3 * float(jnp.abs(c - b).max()) + 1e-3


# What the lanes are worth: faults that are planted here must come out.


@pytest.mark.parametrize("barrier", ["q_here", "k_here", "v_here", "k_free", "v_free"])
def test_a_removed_barrier_is_a_race(barrier, monkeypatch):
    wait, dropped = plgpu.barrier_wait, []

    def wait_unless(ref):
        caller = sys._getframe(1)
        line = linecache.getline(caller.f_code.co_filename, caller.f_lineno)
        dropped.append(line) if barrier in line else wait(ref)

    monkeypatch.setattr(plgpu, "barrier_wait", wait_unless)
    # Which of its three complaints comes first is up to the threads.
    with pytest.raises(Exception, match=r"RACE DETECTED|observe|must do so in all phases"):
        simulated(*make_case((64, 400), heads=(1, 1)))
    assert dropped
    monkeypatch.undo()
    check(make_case((64, 100), heads=(1, 1)))  # the simulator is usable again


@pytest.mark.parametrize("fault", ["unmasked edge", "missing block", "one key more"])
def test_a_mask_fault_is_an_error(fault, monkeypatch):
    def faulty(band, *args):
        start, stop, full_start, full_stop = jnp.moveaxis(schedule.key_blocks(band, *args), -1, 0)
        if fault == "unmasked edge":
            full_start, full_stop = start, stop
        elif fault == "missing block":
            start = jnp.minimum(start + 1, stop)
        return jnp.stack([start, stop, jnp.maximum(start, full_start), full_stop], axis=-1)

    monkeypatch.setattr(mosaic_forward, "key_blocks", faulty)
    case = make_case((192, 192), mask={"causal": True})
    wrong = Mask(window=(None, 1), offset=0) if fault == "one key more" else case[-1]
    got = simulated(*case[:-1], wrong)
    assert excess(got, *case) > 1


# Which blocks are visited.


def blocks_with_pairs(mask, batch, queries, keys, block_q, block_kv):
    """For each block whether it holds an allowed pair, and only such: [B, N, M]."""
    allowed = visible(*split(mask, batch, queries, keys), jnp.arange(queries), jnp.arange(keys))
    allowed = np.broadcast_to(allowed, (batch, queries, keys))
    some, every = np.zeros((2, batch, -(-queries // block_q), -(-keys // block_kv)), bool)
    for i, j in np.ndindex(some.shape[1:]):
        block = allowed[:, i * block_q : (i + 1) * block_q, j * block_kv : (j + 1) * block_kv]
        some[:, i, j] = block.any((1, 2))
        every[:, i, j] = block.all((1, 2)) & (block.shape[2] == block_kv)
    return some, every


def masks(queries, keys):
    for left, right, offset in itertools.product((None, 0, 9), (None, 0, 5), (None, -7, 4)):
        yield Mask(window=(left, right), offset=offset)
    yield Mask(causal=True, offset=jnp.array([-30, 12]))
    random = np.random.default_rng(0)
    packed = {
        "q_segments": make_segments(random, queries),
        "k_segments": make_segments(random, keys),
    }
    yield Mask(**packed)
    same = packed["q_segments"]
    if queries == keys:
        yield Mask(causal=True, q_segments=same, k_segments=same)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (40, 40), (37, 61), (61, 20)])
def test_schedule_is_exact(queries, keys):
    for mask in masks(queries, keys):
        sizes = (queries, keys, 8, 4)
        some, every = blocks_with_pairs(mask, 2, *sizes)
        for turned, blocks in ((False, schedule.key_blocks), (True, schedule.query_blocks)):
            ranges = np.asarray(blocks(*split(mask, 2, queries, keys), *sizes))
            ranges = np.broadcast_to(ranges, (2, *ranges.shape[1:]))
            has, full = (x.swapaxes(1, 2) if turned else x for x in (some, every))
            for b, i in np.ndindex(has.shape[:2]):
                start, stop, full_start, full_stop = ranges[b, i]
                assert list(range(start, stop)) == list(np.flatnonzero(has[b, i])), mask
                assert full[b, i, full_start:full_stop].all()
                order = [
                    int(schedule.nth_block(tuple(ranges[b, i]), n)) for n in range(stop - start)
                ]
                edge = schedule.edge_count(tuple(ranges[b, i]))
                assert sorted(order) == list(range(start, stop))
                assert set(order[edge:]) == set(range(full_start, full_stop))
                if mask.q_segments is None:  # nothing full is left to the edge
                    assert full_stop - full_start == full[b, i].sum()


def test_ids_in_any_order_lose_no_pair():
    random = np.random.default_rng(1)
    ids = [jnp.asarray(random.integers(-1, 4, (2, n)), jnp.int32) for n in (50, 70)]
    mask = Mask(q_segments=ids[0], k_segments=ids[1])
    some, every = blocks_with_pairs(mask, 2, 50, 70, 4, 2)
    ranges = np.asarray(schedule.key_blocks(*split(mask, 2, 50, 70), 50, 70, 4, 2))
    for b, i in np.ndindex(some.shape[:2]):
        start, stop, full_start, full_stop = ranges[b, i]
        assert set(np.flatnonzero(some[b, i])) <= set(range(start, stop))
        assert every[b, i, full_start:full_stop].all()


@pytest.mark.parametrize(
    "mask",
    [
        {},
        {"causal": True},
        {"causal": True, "window": (130, None)},
        {"causal": True, "packed": True},
    ],
)
def test_only_blocks_with_pairs_are_loaded(mask):
    mask = dict(mask)
    case = make_case((500, 500), heads=(1, 1), packed=mask.pop("packed", False), mask=mask)
    with backend.counted_traffic() as traffic:
        simulated(*case[:3], None, case[4])
    batch = case[0].shape[0]
    some, _ = blocks_with_pairs(case[4], batch, 500, 500, 128, 64)
    # K and V for each block with a pair, and q for each consumer.
    assert traffic.load_count == 2 * some.sum() + 2 * batch * some.shape[1]
    assert not mask or some.sum() < 0.8 * some.size


# Built for a GPU.


def built_program(depth, value_depth, mask, dtype=BF16, length=4096):
    shapes = [(1, length, 4, depth), (1, length, 2, depth), (1, length, 2, value_depth)]
    arrays = [jax.ShapeDtypeStruct(s, dtype) for s in shapes]
    ids = (1, length) if mask in ("packed", "documents") else (1,)
    arrays.append(jax.ShapeDtypeStruct(ids, jnp.int32))

    def run(q, k, v, ids):
        masks = {
            "full": lambda: Mask(),
            "causal": lambda: Mask(causal=True),
            "documents": lambda: Mask(False, None, ids, ids),
            # All that a mask can have, at run time where it may be.
            "packed": lambda: Mask(False, (1000, 50), ids, ids, ids[:, 0]),
        }
        band, rest = split(masks[mask](), 1, length, length)
        options = Options(band, depth**-0.5, 30.0 if mask == "packed" else None)
        return mosaic_forward.forward(options, q, k, v, None, rest)

    return run, arrays


@pytest.mark.target
def test_built_without_spills():
    cases = [(d, d, m) for d in (64, 128, 192, 256) for m in ("full", "packed")]
    cases += [(128, 128, "causal"), (192, 128, "causal"), (128, 128, "documents")]
    programs = [
        built_program(*case, dtype=jnp.float16 if case[0] == 64 else BF16) for case in cases
    ]
    for (depth, value_depth, mask), built in zip(cases, build_all(programs, target.parse("h200"))):
        tiles = TILES[depth]
        keys, out = tiles.block_kv, 0 if depth == value_depth else 128 * value_depth
        elements = 128 * depth + tiles.stages * keys * (depth + value_depth) + out
        assert built.kernel == "attention_forward"
        assert (built.registers, built.spill_bytes, built.warnings) == (168, 0, ()), (depth, mask)
        # The tiles, the log-sum-exp, and up to 3 KiB for barriers, reductions and alignment.
        assert 0 <= built.shared_memory_bytes - 2 * elements - 512 <= 3072
        assert built.shared_memory_bytes <= 227 * 1024
        type_ = "f16" if depth == 64 else "bf16"
        assert set(built.wgmma_kinds) == {
            f"m64n{n}k16.f32.{type_}.{type_}" for n in (keys, value_depth)
        }
        # Two copies of the loop, masked or not, and what comes before and after.
        loops = 1 if mask == "full" else 2
        assert built.wgmma == (1 + loops) * (depth // 16 + keys // 16)
        # Nothing in a loop but exponentials of its tile and of what older rows shrink by.
        assert built.exp2 > 0 and built.tma >= 5


# Who computes.


def compiled(name, dtype=BF16, **options):
    x = jax.ShapeDtypeStruct((1, 256, 2, 64), dtype)
    step = lambda q, k, v: jax.vjp(lambda *a: attention(*a, **options), q, k, v)[1](q)
    return target.parse(name).compile(jax.jit(step), x, x, x)


@pytest.mark.target
def test_the_device_that_is_lowered_for_decides():
    assert len(set(kernels(compiled("h200").as_text()))) == 3  # forward, dQ, dK and dV
    assert not kernels(compiled("h200", jnp.float32).as_text())
    assert not kernels(compiled("a100").as_text())
    with pytest.raises(NotImplementedError, match=r"needs a Hopper GPU.*lowered for NVIDIA B200"):
        compiled("b200", implementation="mosaic_gpu")


def kernels(text):
    return [line for line in text.splitlines() if "custom-call" in line and "mosaic_gpu" in line]


@pytest.mark.target
def test_each_device_of_a_shard_map_runs_the_kernels():
    gpus = target.parse("h200x2")
    mesh = gpus.mesh({"data": 2})
    spec = P("data")
    x = jax.ShapeDtypeStruct((2, 128, 2, 64), BF16, sharding=jax.NamedSharding(mesh, spec))
    over = jax.shard_map(attention, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    text = gpus.compile(jax.jit(over), x, x, x).as_text()
    assert len(kernels(text)) == 1 and "all-gather" not in text
    # XLA partitions its own attention, and would gather the operands of a kernel.
    text = gpus.compile(jax.jit(attention), x, x, x).as_text()
    assert not kernels(text) and "all-gather" not in text
    with pytest.raises(NotImplementedError, match=r"2 x .*H200.*wrap it in jax.shard_map"):
        gpus.compile(jax.jit(partial(attention, implementation="mosaic_gpu")), x, x, x)


@pytest.mark.target
def test_memory_is_linear_in_the_length():
    def peak(length):
        run, shapes = built_program(128, 128, "causal", length=length)
        compiled = target.parse("h200").compile(jax.jit(run), *shapes)
        return compiled.memory_analysis().temp_size_in_bytes

    assert peak(32768) < 2.2 * max(peak(16384), 1024) < 2**22


def test_what_the_kernel_does_not_serve_is_refused():
    q, k, v, *_ = make_case((8, 8))
    ask = partial(attention, implementation="mosaic_gpu")
    for run in (ask, jax.jit(ask)):
        with pytest.raises(NotImplementedError, match=r"needs a Hopper GPU.*lowered for cpu"):
            run(q, k, v)
    with pytest.raises(NotImplementedError, match="has no float32"):
        ask(*(x.astype(jnp.float32) for x in (q, k, v)))
    wide = [jnp.ones((1, 8, 2, 320), BF16)] * 3
    with pytest.raises(NotImplementedError, match=r"heads of up to 256, got q \(1, 8, 2, 320\)"):
        ask(*wide)
    np.testing.assert_array_equal(attention(q, k, v), attention(q, k, v, implementation="xla"))


def test_arrays_sharded_by_explicit_axes_take_xla():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = jax.device_put(jnp.ones((2, 8, 2, 64), BF16), jax.NamedSharding(mesh, P("data")))
    assert jax.typeof(jax.jit(attention)(x, x, x)).sharding.spec[0] == "data"
    with pytest.raises(NotImplementedError, match=r"wrap it in jax.shard_map"):
        attention(x, x, x, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("gpus", "change", "serves"),
    [
        (("NVIDIA A100-SXM4-80GB",), {}, True),
        (("NVIDIA B200",), {"mask": Mask(causal=True)}, True),
        (("NVIDIA B200",), {"mask": Mask(window=(5, 0))}, False),
        (("NVIDIA B200",), {"mask": Mask(causal=True, offset=2)}, False),
        (("NVIDIA B200",), {"logits_soft_cap": 3.0}, False),
        (("NVIDIA B200",), {"return_lse": True}, False),
        (("NVIDIA H100 80GB HBM3",), {}, False),
        ((), {}, False),
    ],
)
def test_cudnn_is_asked_where_it_serves(gpus, change, serves, monkeypatch):
    asked = []
    monkeypatch.setattr(dispatch, "_gpus_here", lambda: gpus)
    monkeypatch.setattr(dispatch, "cudnn", lambda options, q, k, v: asked.append(options) or q)
    q, k, v, *_ = make_case((8, 8))
    attention(q, k, v, **change)
    assert bool(asked) == serves


def test_cudnn_path_is_attention():
    q, k, v, *_ = make_case((9, 9), heads=(4, 2), dtype=jnp.float32)
    band, _ = split(Mask(causal=True), 1, 9, 9)
    # The branch for a CPU: that of a GPU needs cuDNN to be traced.
    got = jax.nn.dot_product_attention(q, k, v, scale=0.2, is_causal=band.right == 0)
    want = attention(q, k, v, mask=Mask(causal=True), scale=0.2)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(ROWS)))
def test_run(number, monkeypatch):
    """The simulated lane's cases, with its bounds, on the real tiles."""
    monkeypatch.setattr(mosaic_forward, "TILES", TILES)
    row = {name: FEATURES[name][value] for name, value in ROWS[number].items()}
    extra = dict(row.pop("extra"))
    sinks = extra.pop("sinks", False)
    q, k, v, sinks_H, mask = make_case(LENGTHS[number % len(LENGTHS)], **row, seed=number)
    case = q, k, v, sinks_H if sinks else None, mask
    run = partial(attention, return_lse=True, implementation="mosaic_gpu", **extra)
    got = jax.jit(lambda q, k, v, s, m: run(q, k, v, sinks_H=s, mask=m))(*case)
    with jax.default_matmul_precision("highest"):  # float32 of the reference, and not TF32
        assert excess(got, *case, **extra) <= 1
