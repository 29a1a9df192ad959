"""The composed step: against a plain one, against itself on a mesh, and when it goes wrong.

Golden losses: `JAX_PLATFORMS=cpu python tests/jaxaccel/test_train_step.py` writes them anew.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxaccel import optim, sharding, train_step
from jaxaccel.nn import DecoderConfig
from jaxaccel.precision import LossScale, LossScaleConfig
from jaxaccel.train_step import StepConfig

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "ten_steps_float32.json"
GOLDEN_TOLERANCE = 2e-4  # relative: other CPUs add in another order, ten steps amplify it

MODEL = DecoderConfig(
    vocab_size=32, layers=2, width=16, heads=4, kv_heads=2, head_size=6, mlp_width=24,
    qkv_bias=True, rope_theta=100.0,
)  # fmt: skip
OPTIMIZER = optim.OptimizerConfig(1e-2, warmup_steps=3, weight_decay=0.1)
CLIP = 0.5
# Float32 rounding after a few steps of Adam, as a share of a leaf's largest value.
ACCUMULATED = 5e-5


def make_batch(seed, rows=8, length=12):
    """Packed, ragged rows of a language in which a word has four followers.

    By a generator of its own, so that golden losses do not hang on a library's.
    """
    state, previous = seed + 1, 0
    tokens, labels, segments, positions = np.zeros((4, rows, length), np.int32)
    labels -= 1
    for row in range(rows):
        ends = {(5 * row + 3) % length, (3 * row + 7) % length}
        used = length if row % 3 else 2 + row % length  # every third row is mostly padding
        document, place = 1, 0
        for column in range(used):
            state = (1103515245 * state + 12345) % 2**31
            previous = (3 * previous + (state >> 16) % 4) % MODEL.vocab_size
            tokens[row, column], segments[row, column] = previous, document
            positions[row, column] = place
            if place:
                labels[row, column - 1] = previous
            place += 1
            if column in ends:
                document, place = document + 1, 0
    names = train_step.BATCH_KEYS
    arrays = (tokens, labels, segments, positions)
    return {name: jnp.asarray(x) for name, x in zip(names, arrays)}


@functools.cache
def make(mesh="", devices=1, model=MODEL, **options):
    """A training step, made and compiled once for all tests that ask for the same."""
    sizes = sharding.parse_mesh(mesh, devices)
    mesh = sharding.make_mesh(sizes, jax.devices()[:devices])
    made = train_step.make_train_step(
        model, optim.adamw(OPTIMIZER, 20), StepConfig(clip_norm=CLIP, **options), mesh
    )
    # Without loss scaling no option changes the first state: on one device it compiles once.
    if options and model is MODEL and devices == 1 and options.get("precision") != "float16":
        return made._replace(init=make().init)
    return made


def start(maker, seed=0):
    return maker.init(jax.random.key(seed))


def with_scale(state, scale):
    return dataclasses.replace(state, loss_scale=LossScale(jnp.float32(scale), jnp.int32(0)))


def host(tree):
    return jax.tree.map(np.array, tree)


def assert_same_bits(a, b):
    """Same structure, dtypes and bits, NaN or not."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b)):
        assert x.dtype == y.dtype and x.tobytes() == y.tobytes(), jax.tree_util.keystr(path)


def largest_difference(a, b):
    """Of two trees, over all leaves, relative to the leaf's largest value."""
    pairs = zip(jax.tree.leaves(host(a)), jax.tree.leaves(host(b)))
    return max(float(np.abs(x - y).max() / max(np.abs(y).max(), 1e-3)) for x, y in pairs)


@contextlib.contextmanager
def compilations():
    """Names of what is compiled inside, from JAX's own log."""
    seen = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logger = logging.getLogger("jax")
    logger.addHandler(handler)
    try:
        with jax.log_compiles():
            yield seen
    finally:
        logger.removeHandler(handler)
        seen[:] = [s.split()[4] for s in seen if s.startswith("Finished XLA compilation of")]


def run(maker, steps, rows=8, scale=1.0):
    """Losses and final state of some steps from the start, each on another batch."""
    state, losses = with_scale(start(maker), scale), []
    for index in range(steps):
        state, metrics = maker.step(state, make_batch(index, rows))
        losses.append(float(metrics.loss))
    return np.array(losses), state


@pytest.fixture(scope="module")
def plain():
    """Loss and gradients of a batch as anybody would write them."""
    abstract = train_step.abstract_decoder(MODEL)
    graphdef = nnx.split(abstract)[0]

    def mean_loss(params, batch):
        model = nnx.merge(graphdef, params)
        hidden = model(
            batch["tokens"], segments_BT=batch["segments"], positions_BT=batch["positions"]
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(
            hidden @ model.head_VD.T, jnp.maximum(batch["labels"], 0)
        )
        counted = batch["labels"] >= 0
        count = jnp.maximum(counted.sum(), 1).astype(jnp.float32)
        return jnp.where(counted, losses, 0.0).sum() / count

    return jax.jit(jax.value_and_grad(mean_loss))


# --- one step ---------------------------------------------------------------------------


def test_the_batches_are_as_ragged_as_they_claim():
    labels = np.asarray(make_batch(0)["labels"])
    counts = (labels >= 0).sum(1)
    assert len(set(counts)) >= 4 and counts.min() <= 1 and counts.max() >= 8


def test_the_step_compiles_once():
    make.cache_clear()
    maker = make()
    with compilations() as names:
        state = start(maker)
        batches = [make_batch(i) for i in range(5)]
        for batch in batches:
            state, _ = maker.step(state, batch)
    assert [name for name in names if "step" in name] == ["jit(step)"], names
    # And not again for a state that comes back from a checkpoint.
    restored = jax.tree.map(
        lambda x, a: jax.device_put(np.array(x), a.sharding), state, maker.abstract_state
    )
    with compilations() as names:
        maker.step(restored, batches[0])
    assert names == []


def test_the_step_is_a_plain_step(plain):
    maker = make()
    state, batch = start(maker), make_batch(0)
    loss, grads = plain(state.params, batch)
    before = host(state.params)
    state, metrics = maker.step(state, batch)
    norm = optax.tree.norm(grads)
    np.testing.assert_allclose(metrics.loss, loss, rtol=1e-6)
    np.testing.assert_allclose(metrics.grad_norm, norm, rtol=1e-5)
    assert metrics.tokens == (batch["labels"] >= 0).sum()
    assert norm > 2 * CLIP  # so that clipping is seen below
    for path, gradient in jax.tree_util.tree_leaves_with_path(grads):
        # The softmax does not see what is added to all keys: their bias has no gradient
        # but for the rotation, and a small one.
        assert np.linalg.norm(gradient) > 1e-4, jax.tree_util.keystr(path)
    clipped = jax.tree.map(lambda g: g * (CLIP / norm), grads)
    optimizer = optim.adamw(OPTIMIZER, 20)
    updates, _ = optimizer.update(clipped, optimizer.init(before), before)
    moment = state.opt_state[0].mu
    assert largest_difference(jax.tree.map(lambda m: m / 0.1, moment), clipped) < 1e-4
    assert largest_difference(state.params, optax.apply_updates(before, updates)) < 1e-4


def test_the_abstract_state_is_that_of_the_real_one_before_and_after_steps():
    maker = make()
    state = start(maker)
    for _ in range(2):
        assert jax.tree.structure(state) == jax.tree.structure(maker.abstract_state)
        for x, a in zip(jax.tree.leaves(state), jax.tree.leaves(maker.abstract_state)):
            assert (x.shape, x.dtype, x.sharding) == (a.shape, a.dtype, a.sharding)
            assert not x.weak_type
        state, _ = maker.step(state, make_batch(0))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.params))


def test_the_state_is_donated():
    maker = make()
    state = start(maker)
    maker.step(state, make_batch(0))
    assert all(x.is_deleted() for x in jax.tree.leaves((state.params, state.opt_state)))


def test_a_repeated_batch_is_learnt():
    maker = make()
    state, batch, losses = start(maker), make_batch(0), []
    for _ in range(20):
        state, metrics = maker.step(state, batch)
        losses.append(float(metrics.loss))
    assert abs(losses[0] - np.log(MODEL.vocab_size)) < 0.3
    assert losses[-1] < 0.7 * losses[0] and int(state.step) == 20


def test_evaluation_is_the_loss_of_the_step():
    maker = make()
    state, batch = start(maker), make_batch(0)
    sums = maker.evaluate(state.params, batch)
    _, metrics = maker.step(state, batch)
    np.testing.assert_allclose(sums.nll / sums.count.astype(jnp.float32), metrics.loss, rtol=1e-6)
    assert sums.count == metrics.tokens


def test_the_start_depends_on_the_key_and_on_nothing_else():
    maker = make()
    assert_same_bits(host(start(maker)), host(start(maker)))
    assert largest_difference(start(maker, 0).params["head"], start(maker, 1).params["head"]) > 0.1


def test_nothing_to_predict_leaves_all_but_decayed_weights():
    maker = make()
    state, batch = start(maker), make_batch(0)
    state, _ = maker.step(state, batch)
    # Moments away: what moves now is weight decay alone.
    state = dataclasses.replace(state, opt_state=jax.tree.map(jnp.zeros_like, state.opt_state))
    before = host(state.params)
    state, metrics = maker.step(state, batch | {"labels": jnp.full_like(batch["labels"], -1)})
    assert [float(metrics.loss), float(metrics.grad_norm), int(metrics.tokens)] == [0, 0, 0]
    assert int(metrics.skipped) == 0
    first_rate = OPTIMIZER.learning_rate / OPTIMIZER.warmup_steps
    for (path, new), old in zip(
        jax.tree_util.tree_leaves_with_path(host(state.params)), jax.tree.leaves(before)
    ):
        decays = path[-1].key in ("kernel", "embedding", "head")
        want = old * (1 - first_rate * OPTIMIZER.weight_decay) if decays else old
        np.testing.assert_allclose(new, want, rtol=1e-6, err_msg=str(path))
        assert decays or new.tobytes() == old.tobytes()


# --- accumulation -----------------------------------------------------------------------


@pytest.mark.parametrize("micro_batches", [2, 4, 8])
def test_micro_batches_of_unlike_token_counts_equal_the_large_batch(micro_batches):
    losses, state = run(make(micro_batches=micro_batches), 3)
    want_losses, want = run(make(), 3)
    np.testing.assert_allclose(losses, want_losses, rtol=2e-6)
    assert largest_difference(state.params, want.params) < ACCUMULATED


def test_a_mean_of_means_would_be_noticed(plain):
    """The same three steps with each micro-batch divided by its own count."""
    optimizer = optim.adamw(OPTIMIZER, 20)
    maker = make()
    params = host(start(maker).params)
    opt_state = optimizer.init(params)
    for index in range(3):
        batch = make_batch(index)
        parts = [jax.tree.map(lambda x, i=i: x[i::4], batch) for i in range(4)]
        grads = [plain(params, part)[1] for part in parts]
        grads = jax.tree.map(lambda *g: sum(g) / 4, *grads)
        norm = optax.tree.norm(grads)
        grads = jax.tree.map(lambda g, n=norm: g * jnp.minimum(CLIP / n, 1.0), grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    assert largest_difference(params, run(maker, 3)[1].params) > 20 * ACCUMULATED


# --- precision and skipped steps --------------------------------------------------------


def spoilt(batch):
    """A label that is no word: its loss is NaN."""
    return batch | {"labels": batch["labels"].at[1, 1].set(MODEL.vocab_size)}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_step_that_is_not_finite_is_skipped_and_counted(precision):
    maker = make(precision=precision)
    state, _ = maker.step(start(maker), make_batch(0))
    before = host(state)
    counts = []
    for bad in (True, True, False, True):
        good_before = host((state.params, state.opt_state))
        batch = make_batch(1)
        state, metrics = maker.step(state, spoilt(batch) if bad else batch)
        counts.append((int(metrics.skipped), int(metrics.skipped_in_row)))
        assert np.isfinite(metrics.loss) != bad
        if bad:
            assert_same_bits(host((state.params, state.opt_state)), good_before)
    assert counts == [(1, 1), (2, 2), (2, 0), (3, 1)]
    assert int(state.step) == int(before.step) + 4
    assert float(state.loss_scale.scale) == 1.0
    # The one good step is the step that the bad ones never happened before.
    want, _ = maker.step(jax.device_put(before), make_batch(1))
    assert_same_bits(host((state.params, state.opt_state)), host((want.params, want.opt_state)))


FLOAT16 = LossScaleConfig(initial=2.0**30, growth_interval=3, ceiling=2.0**30)


def test_float16_halves_on_overflow_and_doubles_after_good_steps():
    maker = make(precision="float16", loss_scale=FLOAT16)
    state = start(maker)
    scale, good, overflows, doublings, skipped = FLOAT16.initial, 0, 0, 0, 0
    for index in range(45):
        before = host(state)
        state, metrics = maker.step(state, make_batch(index % 5))
        after = host(state)
        assert float(metrics.loss_scale) == scale
        if np.isfinite(metrics.grad_norm):
            good += 1
            if good == FLOAT16.growth_interval:
                scale, good, doublings = min(2 * scale, FLOAT16.ceiling), 0, doublings + 1
        else:
            scale, good, overflows, skipped = scale / 2, 0, overflows + 1, skipped + 1
            assert_same_bits(after.params, before.params)
            assert_same_bits(after.opt_state, before.opt_state)
            assert after.key.tobytes() == before.key.tobytes()
        assert (float(after.loss_scale.scale), int(after.loss_scale.good_steps)) == (scale, good)
        assert (int(after.step), int(after.skipped)) == (index + 1, skipped)
        assert np.isfinite(metrics.loss)
    assert overflows >= 3 and doublings >= 3


def test_the_scale_changes_no_gradient_but_the_smallest():
    maker = make(precision="float16", loss_scale=FLOAT16)
    moments = []
    for scale in (2.0**3, 2.0**10):
        state, metrics = maker.step(with_scale(start(maker), scale), make_batch(0))
        assert int(metrics.skipped) == 0
        moments.append(state.opt_state[0].mu)
    assert largest_difference(*moments) < 0.02


@pytest.mark.parametrize(
    ("options", "scale", "bound"),
    [
        ({"precision": "bfloat16"}, 1.0, 1e-2),
        ({"precision": "float16", "loss_scale": FLOAT16}, 2.0**10, 1e-3),
    ],
)
def test_low_precision_trains_like_float32(options, scale, bound):
    losses, state = run(make(**options), 5, scale=scale)
    want, _ = run(make(), 5)
    assert 0 < np.abs(losses / want - 1).max() < bound
    floats = (state.params, state.opt_state[0].mu, state.opt_state[0].nu)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(floats))


# --- devices ----------------------------------------------------------------------------

MESHES = {
    "fsdp=8": {"kernel": (2, 2, 24), "embedding": (32, 2)},
    "fsdp=4,tensor=2": {"kernel": (2, 4, 12), "embedding": (16, 4)},
    "data=2,fsdp=2,tensor=2": {"kernel": (2, 8, 12), "embedding": (16, 8)},
}


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_of_eight_devices_gives_the_losses_of_one(mesh):
    maker = make(mesh, 8, micro_batches=2)
    losses, state = run(maker, 4, rows=16)
    want, one = run(make(), 4, rows=16)
    np.testing.assert_allclose(losses, want, rtol=2e-6)
    assert largest_difference(state.params, one.params) < ACCUMULATED
    for x, a in zip(jax.tree.leaves(state), jax.tree.leaves(maker.abstract_state)):
        assert x.sharding.is_equivalent_to(a.sharding, x.ndim)


@pytest.mark.parametrize("mesh", MESHES)
def test_parameters_and_moments_really_lie_in_pieces(mesh):
    state = start(make(mesh, 8, micro_batches=2))
    want = MESHES[mesh]
    trees = (state.params, state.opt_state[0].mu, state.opt_state[0].nu)
    for tree in trees:
        kernel = tree["layers"][0]["gate"]["kernel"]
        assert {s.data.shape for s in kernel.addressable_shards} == {want["kernel"]}
        table = tree["embedding"]
        assert {s.data.shape for s in table.addressable_shards} == {want["embedding"]}
    parts = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(trees)]
    whole = [x.nbytes for x in jax.tree.leaves(trees)]
    assert sum(parts) < 0.3 * sum(whole)


@pytest.mark.parametrize("overlap", ["none", "buckets"])
def test_zero_cuts_moments_over_data_and_changes_nothing_else(overlap):
    maker = make("data=4,fsdp=2", 8, zero=1, overlap=overlap)
    losses, state = run(maker, 3, rows=16)
    want, one = run(make(), 3, rows=16)
    np.testing.assert_allclose(losses, want, rtol=2e-6)
    assert largest_difference(state.params, one.params) < ACCUMULATED
    for tree, pieces in ((state.params, 2), (state.opt_state[0].mu, 8), (state.opt_state[0].nu, 8)):
        kernel = tree["layers"][0]["gate"]["kernel"]
        assert {s.data.size for s in kernel.addressable_shards} == {kernel.size // pieces}


def test_a_model_that_does_not_divide_is_refused_by_name():
    with pytest.raises(ValueError, match=r"parameter .*'embedding'.* 33 .*multiples of 2"):
        make("tensor=2", 2, dataclasses.replace(MODEL, vocab_size=33))
    with pytest.raises(ValueError, match=r"parameter .*'down'.*'kernel'.* 25 .*multiples of 8"):
        make("tensor=8", 8, dataclasses.replace(MODEL, mlp_width=25, kv_heads=4, head_size=8))


# --- options ----------------------------------------------------------------------------


def test_remat_changes_no_loss():
    losses, state = run(make(remat="full"), 3)
    want, other = run(make(), 3)
    np.testing.assert_allclose(losses, want, rtol=1e-6)
    assert largest_difference(state.params, other.params) < ACCUMULATED


def test_z_loss_is_in_the_gradient_and_not_in_the_loss():
    maker = make(z_loss=1.0)
    first, metrics = maker.step(start(maker), make_batch(0))
    _, plain_metrics = make().step(start(make()), make_batch(0))
    np.testing.assert_allclose(metrics.loss, plain_metrics.loss, rtol=1e-6)
    assert abs(float(metrics.grad_norm / plain_metrics.grad_norm) - 1) > 1e-2
    assert int(first.skipped) == 0


# --- golden -----------------------------------------------------------------------------


def test_ten_golden_losses():
    want = json.loads(GOLDEN.read_text())["losses"]
    losses, _ = run(make(), 10)
    np.testing.assert_allclose(losses, want, rtol=GOLDEN_TOLERANCE)
    assert np.median(np.abs(np.diff(losses))) > 10 * GOLDEN_TOLERANCE * losses.max()


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    record = {"what": "mean nll of ten steps, tests/jaxaccel/test_train_step.py", "losses": []}
    record["losses"] = [round(float(x), 6) for x in run(make(), 10)[0]]
    GOLDEN.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {GOLDEN}")
