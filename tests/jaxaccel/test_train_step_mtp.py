"""Heads that predict further ahead in the composed step: their losses, and what stays as it was."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxaccel import fp8, optim, sharding, train_step
from jaxaccel.nn import DecoderConfig, MtpConfig
from jaxaccel.train_step import StepConfig

MODEL = DecoderConfig(
    vocab_size=32, layers=2, width=32, heads=2, kv_heads=1, head_size=16, mlp_width=48
)
DEPTH = 2
SEQUENTIAL, PARALLEL = (MtpConfig(DEPTH, kind) for kind in ("sequential", "parallel"))
# Float32 rounding after a few steps of Adam, as a share of a leaf's largest value.
ACCUMULATED = 5e-5


@functools.cache
def make(mtp=SEQUENTIAL, mesh="", devices=1, **options):
    """A training step that does not clip, so that Adam's first moment shows the gradient."""
    sizes = sharding.parse_mesh(mesh, devices)
    mesh = sharding.make_mesh(sizes, jax.devices()[:devices])
    optimizer = optim.adamw(optim.OptimizerConfig(1e-2, warmup_steps=3), 20)
    config = StepConfig(mtp=mtp, clip_norm=math.inf, **options)
    return train_step.make_train_step(MODEL, optimizer, config, mesh)


@functools.cache
def start(kind):
    """The first state, on the host; the same whatever mesh, weight and micro-batches."""
    return jax.device_get(make(MtpConfig(DEPTH, kind)).init(jax.random.key(0)))


def batch(seed, rows=8, length=12):
    """Packed rows of a language in which a word has two followers; parts count unlike many."""
    random = np.random.default_rng(seed)
    tokens, labels, segments, positions = np.zeros((4, rows, length), np.int32)
    for row in range(rows):
        used = length if row % 4 else 3  # every fourth row is mostly padding
        border = 2 + row % 5
        for i in range(used):
            tokens[row, i] = (3 * tokens[row, i - 1] + random.integers(2) + 1) % MODEL.vocab_size
            segments[row, i] = 1 + (i >= border)
            positions[row, i] = i - border * (i >= border)
    labels[:, :-1], later = tokens[:, 1:], np.pad(segments[:, 1:], ((0, 0), (0, 1)))
    labels[(segments != later) | (segments == 0)] = -1
    return dict(zip(train_step.BATCH_KEYS, (tokens, labels, segments, positions)))


def run(made, state, seeds=(0, 1, 2)):
    """The state after a step on each batch, and their losses: the decoder's, then the heads'."""
    state = jax.device_put(state, jax.tree.map(lambda x: x.sharding, made.abstract_state))
    losses = []
    for seed in seeds:
        state, metrics = made.step(state, made.place(batch(seed)))
        losses.append([metrics.loss, *metrics.mtp_losses])
    return jax.device_get(state), np.array(losses, np.float64)


@functools.cache
def plain_run(mtp=SEQUENTIAL):
    return run(make(mtp), start(mtp.kind))


def close(a, b, bound=ACCUMULATED):
    """Leaf by leaf, as a share of the leaf's largest value."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.abs(x - y).max() <= bound * max(np.abs(y).max(), 1e-3)


def plain_loss(mtp):
    """Loss of a batch as anybody would write it, for `jax.value_and_grad`."""
    graphdef = nnx.split(train_step.abstract_decoder(MODEL, mtp=mtp))[0]

    def loss(params, batch):
        made = nnx.merge(graphdef, params)
        tokens, labels, segments, positions = (batch[key] for key in train_step.BATCH_KEYS)
        hidden = made.ahead(tokens, segments_BT=segments, positions_BT=positions)
        means = []
        for k, x in enumerate(hidden):
            target, end = labels[:, k:], labels.shape[1] - k
            counted = (target >= 0) & (segments[:, :end] == segments[:, k:])
            nll = optax.softmax_cross_entropy_with_integer_labels(
                x[:, :end] @ made.head_VD.T, jnp.maximum(target, 0)
            )
            counted = counted.astype(jnp.float32)
            means.append(jnp.sum(nll * counted) / jnp.sum(counted))
        return means[0] + mtp.weight * sum(means[1:]) / DEPTH, jnp.stack(means)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def test_the_batches_are_as_ragged_as_they_claim():
    labels = batch(0)["labels"]
    counts = [(labels[part::4] >= 0).sum() for part in range(4)]
    assert min(counts) < max(counts) / 3


@pytest.mark.parametrize("mtp", [SEQUENTIAL, PARALLEL])
def test_losses_and_gradients_are_those_of_a_plain_step_and_fall(mtp):
    (_, means), gradients = plain_loss(mtp)(start(mtp.kind).params, batch(0))
    state, losses = run(make(mtp), start(mtp.kind), [0])
    np.testing.assert_allclose(losses[0], means, rtol=1e-6)
    close(state.opt_state[0].mu, jax.tree.map(lambda g: 0.1 * g, gradients), 1e-4)
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients["heads"]):
        norms = np.linalg.norm(gradient.reshape(DEPTH, -1), axis=1)
        assert norms.min() > 1e-4, jax.tree_util.keystr(path)
    assert np.abs(losses[0] - np.log(MODEL.vocab_size)).max() < 0.5
    _, losses = run(make(mtp), start(mtp.kind), [0] * 10)
    assert (losses[-1] < 0.9 * losses[0]).all()


@pytest.mark.parametrize(
    ("mtp", "options"),
    [
        (SEQUENTIAL, {"micro_batches": 4, "remat": "sqrt"}),
        (SEQUENTIAL, {"mesh": "data=2,fsdp=2,tensor=2", "devices": 8, "remat": "none"}),
        (PARALLEL, {"mesh": "fsdp=4,tensor=2", "devices": 8, "micro_batches": 2, "remat": "full"}),
    ],
)
def test_parts_devices_and_recomputation_change_nothing(mtp, options):
    state, losses = run(make(mtp, **options), start(mtp.kind))
    want, want_losses = plain_run(mtp)
    np.testing.assert_allclose(losses, want_losses, rtol=2e-6)
    close(state.params, want.params)


def test_weight_and_schedule():
    """At weight 0 a run is one without heads; from a scheduled step on it is none."""
    first = start("sequential")
    made = make(MtpConfig(DEPTH, "sequential", 0.0, "5:0.1, 3:0.3"))
    state, losses = run(made, first)
    without = make(MtpConfig())
    bare = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), without.abstract_state)
    trunk = lambda params: {key: value for key, value in params.items() if key != "heads"}
    bare = dataclasses.replace(bare, params=trunk(first.params), loss_scale=first.loss_scale)
    want, want_losses = run(without, bare)
    np.testing.assert_allclose(losses[:, :1], want_losses, rtol=2e-6)
    close(trunk(state.params), want.params)

    def gradient(made, step):
        state, _ = run(made, dataclasses.replace(first, step=np.int32(step)), [0])
        return state.opt_state[0].mu["heads"]

    off, on, still, later = (gradient(made, step) for step in (2, 3, 4, 5))
    assert not any(x.any() for x in jax.tree.leaves(off))
    close(on, gradient(make(), 0))
    close(still, on, 0.0)
    close(later, jax.tree.map(lambda x: x / 3, on))


# --- FP8 ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mtp", "recipe", "micro_batches"),
    [
        (PARALLEL, "delayed", 2),
        pytest.param(SEQUENTIAL, "delayed", 1, marks=pytest.mark.slow),
        pytest.param(PARALLEL, "current", 1, marks=pytest.mark.slow),
        pytest.param(PARALLEL, "block", 1, marks=pytest.mark.slow),
        pytest.param(SEQUENTIAL, "block", 1, marks=pytest.mark.slow),
    ],
)
def test_heads_train_in_fp8(mtp, recipe, micro_batches):
    made, first = make(mtp, fp8=recipe, micro_batches=micro_batches), start(mtp.kind)
    state = dataclasses.replace(first, fp8=made.init(jax.random.key(0)).fp8)
    if recipe == "delayed":
        state = made.warm_up(jax.device_put(state), made.place(batch(0)))
        heads = state.fp8["heads"]
        held = jax.tree.leaves(heads, is_leaf=lambda s: isinstance(s, fp8.DelayedState))
        assert len(held) == 7 + (mtp is SEQUENTIAL)
        # Each head has scales of its own, known after the warm-up.
        assert all(s.history.shape[0] == DEPTH and (s.history[..., :1] > 0).all() for s in held)
        assert all((s.history[0] != s.history[1]).any() for s in held)
    state, losses = run(made, state)
    _, want = plain_run(mtp)
    assert (losses != want).all() and (np.abs(losses - want) < 0.02 * want).all()
    changed = jax.tree.map(lambda a, b: (a != b).any(), state.params, first.params)
    assert all(jax.tree.leaves(changed))
