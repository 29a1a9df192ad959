"""Linear cross-entropy's kernels: simulated, built, run; what they hold and move; who computes."""

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
from pallas_kernels import cross_entropy as ce
from pallas_kernels.build import build_all
from pallas_kernels.cross_entropy import cases, kernels, mosaic
from pallas_kernels.cross_entropy.xla import Options
from pallas_kernels.gpus import GPUS
from pallas_kernels.inspect import Case, simulate

BF16, F16 = jnp.bfloat16, jnp.float16
SMALL = kernels.Tiles(words=64, stages=2, slice_bytes=0, slice_words=128, blocks=2)
# Tokens, D, V, rows of labels, dtype, options: each pair of what may interact meets somewhere.
# One slice, several, a last one that overlaps; fewer words than a tile; padded tokens and widths.
ROWS = [
    (100, 64, 150, None, BF16, {}),
    (200, 128, 257, None, BF16, {"z_loss": 0.02, "soft_cap": 3.0}),
    (128, 192, 128, 2, F16, {"label_smoothing": 0.1}),
    (5, 72, 50, 1, F16, {"z_loss": 0.02, "label_smoothing": 0.1, "soft_cap": 3.0}),
    (130, 64, 300, 3, BF16, {"soft_cap": 3.0, "label_smoothing": 0.2}),
    (1, 8, 1, None, F16, {"z_loss": 0.1}),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch, request):
    """The same kernels on tiles of 64 words, two buffers, slices of two tiles."""
    if not any(request.node.get_closest_marker(mark) for mark in ("target", "gpu")):
        for name in ("FORWARD", "BACKWARD"):
            monkeypatch.setattr(mosaic, name, SMALL)


def data(tokens, width, words, rows=None, dtype=BF16, seed=0):
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.normal(size=(tokens, width)), dtype)
    head = jnp.asarray(rng.normal(size=(words, width)) * 2 / width**0.5, jnp.float32)
    labels = rng.integers(0, words, (tokens,) if rows is None else (tokens, rows)).astype(np.int32)
    labels[rng.random(labels.shape) < 0.3] = ce.IGNORED
    return hidden, head, jnp.asarray(labels)


def run(function, hidden, head, labels, **options):
    """Losses of each token, and gradients of a sum in which each has its own weight."""

    def loss(hidden, head):
        losses = function(hidden, head, labels, **options)
        weights = lambda x: jnp.sin(1 + jnp.arange(x.size, dtype=jnp.float32).reshape(x.shape))
        return sum((x.astype(jnp.float32) * weights(x)).sum() for x in losses), losses

    (_, losses), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, head)
    return [x.astype(jnp.float32) for x in (*losses, *grads)]


def simulated(*args, function=ce.token_cross_entropy, **options):
    call = jax.jit(partial(run, function, implementation="mosaic_gpu", **options))
    with backend.simulate():
        return jax.block_until_ready(call(*args))


def excess(got, hidden, head, labels, **options):
    """The error over what is allowed, twice the naive one of losses and thrice of gradients."""
    reference = jax.jit(partial(run, ce.token_cross_entropy_reference, **options))
    wide = hidden.astype(jnp.float32), head.astype(hidden.dtype).astype(jnp.float32), labels
    with jax.default_matmul_precision("highest"):
        exact = reference(*wide)
    naive = reference(hidden, head.astype(hidden.dtype), labels)
    worst = 0.0
    for i, (a, b, want) in enumerate(zip(got, naive, exact, strict=True)):
        error = lambda x, want=want: float(jnp.abs(x - want).max())
        ulp = float(jnp.finfo(hidden.dtype).eps) / 2 * float(jnp.abs(want).max())
        worst = max(worst, error(a) / ((2 if i < 3 else 3) * error(b) + ulp + 1e-6))
        assert a.shape == want.shape
    assert any(float(jnp.abs(a - want).max()) > 0 for a, want in zip(got, exact))
    return worst


def check(tokens, width, words, rows, dtype, options):
    args = data(tokens, width, words, rows, dtype, seed=tokens)
    compiled = jax.jit(partial(run, ce.token_cross_entropy, implementation="mosaic_gpu", **options))
    assert excess(jax.block_until_ready(compiled(*args)), *args, **options) <= 1


@pytest.mark.parametrize(
    "number",
    [0, 1, pytest.param(2, marks=pytest.mark.slow), 3, 4, pytest.param(5, marks=pytest.mark.slow)],
)
def test_simulated(number):
    with backend.simulate():
        check(*ROWS[number])


def test_sums_by_the_kernels_are_those_of_xla():
    """The form whose gradient XLA takes in the forward pass, and the kernels only later."""
    hidden, head, labels = data(70, 64, 150)
    options = {"z_loss": 0.02, "label_smoothing": 0.1}

    def step(implementation, hidden, head):
        loss = partial(ce.linear_cross_entropy, **options, implementation=implementation)
        return jax.value_and_grad(lambda *a: 0.1 * loss(*a, labels).objective, (0, 1))(hidden, head)

    want = jax.jit(partial(step, "xla"))(hidden, head)
    with backend.simulate():
        got = jax.block_until_ready(jax.jit(partial(step, "mosaic_gpu"))(hidden, head))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        a, b = (x.astype(jnp.float32) for x in (a, b))
        assert jnp.linalg.norm(b) > 0.1 and jnp.linalg.norm(a - b) < 5e-3 * jnp.linalg.norm(b)


def test_two_runs_are_bit_equal_and_what_is_not_finite_stays_in_its_row():
    hidden, head, labels = data(130, 64, 150)
    labels = jnp.maximum(labels, 0).at[100:].set(ce.IGNORED)
    bad = hidden.at[3, 5].set(jnp.nan).at[6, 7].set(jnp.inf)
    call = jax.jit(partial(run, ce.token_cross_entropy, implementation="mosaic_gpu", z_loss=0.1))
    with backend.simulate():
        first, second, got = jax.block_until_ready(
            [call(x, head, labels) for x in (hidden, hidden, bad)]
        )
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
    for per_token in (*got[:3], got[3].sum(-1)):
        assert set(np.flatnonzero(~np.isfinite(per_token))) == {3, 6}
    assert not np.isfinite(got[4]).all()
    assert not np.any(first[0][100:]) and not np.any(first[1][100:])


def test_empty():
    *losses, d_hidden, d_head = simulated(*data(0, 64, 70))
    assert [x.shape for x in losses] == [(0,)] * 3 and d_hidden.shape == (0, 64)
    assert not np.any(d_head)


def test_transformations():
    hidden, head, labels = data(4, 64, 70)
    one = partial(ce.token_cross_entropy, implementation="mosaic_gpu")
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 1), ("data", "vocab"), axis_types=auto)  # the simulator has one GPU
    specs = P("data"), P("vocab"), P("data")
    over = partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=P("data"))
    scan = lambda h, w, y: jax.lax.scan(lambda c, row: (c, one(row[0], w, row[1])), 0, (h, y))[1]
    with backend.simulate():
        want = jax.jit(partial(run, one))(hidden, head, labels)
        sharded = jax.jit(partial(run, over(partial(one, axis_name="vocab"))))(hidden, head, labels)
        scanned = jax.jit(scan)(hidden.reshape(2, 2, 64), head, labels.reshape(2, 2))
    for a, b in zip(sharded, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    for a, b in zip(scanned, want[:3], strict=True):
        np.testing.assert_allclose(a.reshape(4), b, rtol=1e-6)


# What the lanes are worth: faults that are planted here must come out.


SLOW = [pytest.param(x, marks=pytest.mark.slow) for x in ("free", "wait_smem_to_gmem")]


@pytest.mark.parametrize("fault", ["full", "commit_smem", *SLOW])
def test_a_removed_barrier_or_fence_is_a_race(fault, monkeypatch):
    wait, removed = plgpu.barrier_wait, []

    def wait_unless(ref):
        caller = sys._getframe(1)
        line = linecache.getline(caller.f_code.co_filename, caller.f_lineno)
        removed.append(line) if fault in line else wait(ref)

    if fault in ("full", "free"):
        monkeypatch.setattr(plgpu, "barrier_wait", wait_unless)
    else:
        monkeypatch.setattr(plgpu, fault, lambda *_: removed.append(fault))
    with pytest.raises(Exception, match=r"RACE DETECTED|Not all copy_smem_to_gmem"):
        simulated(*data(256, 128, 128))
    assert removed
    monkeypatch.undo()


@pytest.mark.parametrize(
    "fault",
    ["counted twice", pytest.param("padding counts", marks=pytest.mark.slow), "one label too far"],
)
def test_a_fault_of_slices_is_an_error(fault, monkeypatch):
    words = 150
    if fault == "counted twice":  # the words that the last slice shares with the one before
        slice_ = mosaic._slice
        monkeypatch.setattr(mosaic, "_slice", lambda *a: (slice_(*a)[0], jnp.int32(0)))
    elif fault == "one label too far":
        right = mosaic._at_labels
        monkeypatch.setattr(mosaic, "_at_labels", lambda *a: jnp.roll(right(*a), 1, axis=1))
    else:
        words = 50
        monkeypatch.setattr(kernels.Shape, "high", property(lambda shape: shape.size))
    args = data(100, 64, words)
    assert excess(simulated(*args), *args) > 1


# What they move and hold.


@pytest.mark.parametrize(("sizes", "smoothing"), [((200, 72, 300), 0.0), ((100, 64, 150), 0.1)])
def test_traffic_is_what_the_simulator_counts(sizes, smoothing):
    hidden, head, labels = data(*sizes)
    options = Options(0.0, None, smoothing, 1)
    rows = hidden[None], head, labels[None, :, None]
    with backend.simulate():
        with backend.counted_traffic() as forward:
            terms = jax.block_until_ready(jax.jit(partial(mosaic.forward, options))(*rows))
        with backend.counted_traffic() as backward:
            step = jax.jit(partial(mosaic.backward, options))
            jax.block_until_ready(step(*rows, terms.lse, terms))
    want = cases.traffic(*sizes[:2], sizes[2], smoothing=bool(smoothing))
    assert (forward.loads, forward.stores) == want[:2]
    want = cases.traffic(*sizes[:2], sizes[2], backward=True)
    assert (backward.loads, backward.stores) == want[:2]


def test_a_tile_of_one_core_shares_all_that_it_loads_with_nobody():
    sizes = 256, 64, 640
    one = cases.traffic(*sizes, cores=1)
    slices, size = SMALL.slices(64, 640)
    blocks = 2 * kernels.Shape(cases._PLAIN, SMALL, 256, size, 64, 640).splits
    tokens_once = slices * blocks * 128 * 64 * 2
    assert one.fetched == tokens_once + slices * 2 * size * 64 * 2 <= one.loads


@pytest.mark.target
@pytest.mark.parametrize(
    ("tokens", "width", "words"), [(16384, 2048, 128256), (16384, 2048, 50257)]
)
def test_intensity_is_above_the_ridge(tokens, width, words):
    """FLOP for each byte of memory; and of the tiling alone, for each byte that L2 serves."""
    gpu = GPUS["h200"]
    ridge = gpu.bf16_flops / gpu.memory_bandwidth
    flops = 2 * tokens * width * words
    for backward in (False, True):
        moved = cases.traffic(tokens, width, words, backward=backward, cores=gpu.cores)
        assert flops / (moved.fetched + moved.stores) > 3 * ridge
        assert moved.loads == pytest.approx(flops / (128 * 256 / (128 + 256)), rel=0.01)


def abstract(tokens, width, words, head_dtype=BF16):
    shapes = ((tokens, width), BF16), ((words, width), head_dtype), ((tokens,), jnp.int32)
    return [jax.ShapeDtypeStruct(*shape) for shape in shapes]


def step(hidden, head, labels, **options):
    """Mean loss and its gradients."""

    def loss(hidden, head):
        sums = ce.linear_cross_entropy(hidden, head, labels, **options)
        return sums.objective / sums.count.astype(jnp.float32)

    return jax.value_and_grad(loss, (0, 1))(hidden, head)


def custom_calls(text):
    return [line for line in text.splitlines() if "custom-call" in line and "mosaic_gpu" in line]


@pytest.mark.target
def test_no_logits_in_memory():
    """Both passes at 16,384 tokens; all logits are 7.8 GiB in float32, and the head 0.5 in bf16."""
    gpu, shapes = target.parse("h200"), abstract(16384, 2048, 128256, jnp.float32)
    compiled = gpu.compile(jax.jit(step), *shapes)
    assert len(custom_calls(compiled.as_text())) == 2
    assert 0 < compiled.memory_analysis().temp_size_in_bytes < 0.3 * 2**30


# Built for a GPU.


@pytest.mark.target
def test_built_without_spills():
    plain, full = cases._OPTIONS.values()

    def forward(options, tokens, width, words):
        hidden, head, labels = abstract(tokens, width, words)
        function = lambda h, w, y: mosaic.forward(options, h[None], w, y[None, :, None])
        return function, [hidden, head, labels]

    def backward(options, tokens, width, words):
        tokens, width = mosaic.padded(tokens, 128), mosaic.padded(width, 64)
        _, size = mosaic.BACKWARD.slices(max(tokens, width), words)
        vector = jax.ShapeDtypeStruct((tokens,), jnp.float32)
        function = lambda *args: kernels.d_logits(options, mosaic.BACKWARD, words, *args)
        mean = vector if options.label_smoothing else None
        return function, [*abstract(tokens, width, size)[:2], vector, vector, mean]

    large, gpt2, small = (16384, 2048, 128256), (16384, 2048, 50257), (100, 72, 100)
    kinds = [(forward, plain, large), (forward, full, gpt2)]
    kinds += [(backward, full, large), (backward, plain, gpt2), (backward, full, small)]
    reports = build_all(
        [make(options, *sizes) for make, options, sizes in kinds], target.parse("h200")
    )
    for (make, options, _), built in zip(kinds, reports, strict=True):
        forward_ = make is forward
        tiles = mosaic.FORWARD if forward_ else mosaic.BACKWARD
        assert built.kernel == f"cross_entropy_{make.__name__}"
        assert (built.registers, built.spill_bytes, built.warnings) == (168, 0, ())
        # The ring; a tile of the gradient, or the results of 128 tokens, and what reductions take.
        stored = 512 * (1 + bool(options.label_smoothing)) if forward_ else 128 * tiles.words * 2
        rest = built.shared_memory_bytes - tiles.stages * (128 + tiles.words) * 64 * 2 - stored
        assert 0 <= rest <= 4096 and built.shared_memory_bytes <= 227 * 1024
        assert built.wgmma_kinds == ("m64n256k16.f32.bf16.bf16",)


# Who computes.


@pytest.mark.target
def test_the_device_that_is_lowered_for_decides():
    shapes = abstract(256, 64, 1000)
    compile_ = lambda name, **options: target.parse(name).compile(
        jax.jit(partial(step, **options)), *shapes
    )
    assert len(custom_calls(compile_("h200").as_text())) == 2
    assert not custom_calls(compile_("a100").as_text())
    with pytest.raises(NotImplementedError, match=r"needs a Hopper GPU.*lowered for NVIDIA B200"):
        compile_("b200", implementation="mosaic_gpu")


@pytest.mark.target
def test_each_device_has_the_kernels_for_its_shard_of_the_vocabulary():
    gpus = target.parse("h200x2")
    mesh = gpus.mesh({"vocab": 2})
    specs = P(), P("vocab"), P()
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec))
        for x, spec in zip(abstract(256, 64, 1024), specs)
    ]
    over = jax.shard_map(
        partial(step, axis_name="vocab"), mesh=mesh, in_specs=specs, out_specs=(P(), specs[:2])
    )
    text = gpus.compile(jax.jit(over), *shapes).as_text()
    assert len(custom_calls(text)) == 2 and "all-gather" not in text and "all-reduce" in text


def test_what_the_kernels_do_not_serve_is_refused():
    args = data(8, 64, 70)
    for function in (ce.linear_cross_entropy, ce.token_cross_entropy):
        ask = partial(function, implementation="mosaic_gpu")
        with pytest.raises(NotImplementedError, match=r"needs a Hopper GPU.*lowered for cpu"):
            jax.jit(ask)(*args)
        mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
        sharded = jax.device_put(args[0], jax.NamedSharding(mesh, P("data")))
        with pytest.raises(NotImplementedError, match=r"wrap it in jax.shard_map"):
            ask(sharded, *args[1:])


@pytest.mark.slow
def test_the_cases_of_the_table():
    for make, sizes in (
        (cases.forward_cases, (130, 64, 150)),
        (cases.backward_cases, (128, 64, 128)),
    ):
        *_, case = make(*sizes)  # with a cap and smoothing
        assert simulate(Case(*case)) <= 2


@pytest.mark.gpu
@pytest.mark.parametrize("row", [*ROWS, (4096, 2048, 50257, None, BF16, {"z_loss": 1e-4})])
def test_run(row):
    """The simulated lane's cases on the real tiles, and a size that fills a GPU."""
    check(*row)
