"""FP8 in the composed step: its state is apart, survives everything, and hides no overflow."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaccel import fp8, optim, sharding, train_step
from jaxaccel.nn import DecoderConfig
from jaxaccel.precision import LossScaleConfig
from jaxaccel.train_step import StepConfig

MODEL = DecoderConfig(
    vocab_size=32, layers=2, width=32, heads=2, kv_heads=1, head_size=16, mlp_width=48
)
RECIPES = ("current", "delayed", "block")


@functools.cache
def make(mesh="", devices=1, **options):
    sizes = sharding.parse_mesh(mesh, devices)
    mesh = sharding.make_mesh(sizes, jax.devices()[:devices])
    optimizer = optim.adamw(optim.OptimizerConfig(1e-2, warmup_steps=3), 20)
    made = train_step.make_train_step(MODEL, optimizer, StepConfig(**options), mesh)
    if options.keys() & {"clip_norm", "micro_batches"}:  # which leave the first state alone
        return made._replace(init=make(fp8=options["fp8"]).init)
    return made


def batch(seed, rows=8, length=12):
    """Random tokens, a third of the rows short."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(1, 32, (rows, length)).astype(np.int32)
    labels = np.roll(tokens, -1, axis=1)
    labels[:, -1] = -1
    labels[::3, 4:] = -1
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    segments = np.ones_like(tokens)
    arrays = (tokens, labels, segments, positions)
    return dict(zip(train_step.BATCH_KEYS, arrays))


def warmed(made):
    """The first state, its scales found on the first batch."""
    return made.warm_up(made.init(jax.random.key(0)), made.place(batch(0)))


def run(made, steps=3, fp8_state=None):
    """State and figures of some steps, from these scales or from those of the first batch."""
    if fp8_state is None:
        state = warmed(made)
    else:
        state = dataclasses.replace(made.init(jax.random.key(0)), fp8=fp8_state)
    figures = []
    for i in range(steps):
        state, figure = made.step(state, made.place(batch(i)))
        figures.append(figure)
    return jax.device_get((state, figures))


def close(a, b, rtol):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * np.abs(y).max(initial=0))


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_are_almost_those_of_float32(recipe):
    _, plain = run(make())
    _, figures = run(make(fp8=recipe))
    for a, b in zip(plain, figures):
        assert abs(float(a.loss) - float(b.loss)) < 0.02 * float(a.loss)
        assert float(a.loss) != float(b.loss)


def test_state_is_outside_clipping_and_norm():
    """A clip that leaves next to nothing of a gradient leaves the state untouched."""
    scales = jax.device_get(warmed(make(fp8="delayed"))).fp8
    clipped, loose = (
        run(made, 1, scales) for made in (make(fp8="delayed", clip_norm=1e-8), make(fp8="delayed"))
    )
    chex.assert_trees_all_equal(clipped[0].fp8, loose[0].fp8)
    assert clipped[1][0].grad_norm == loose[1][0].grad_norm
    history = jax.tree.leaves(clipped[0].fp8, is_leaf=lambda s: isinstance(s, fp8.DelayedState))
    assert all((s.history[..., :2] > 0).all() for s in history)
    names = [str(path) for path, _ in jax.tree.leaves_with_path(clipped[0].opt_state)]
    assert names and not any("matmul_state" in name for name in names)


def test_micro_batches_leave_state_and_gradient_of_one_batch():
    scales = jax.device_get(warmed(make(fp8="delayed"))).fp8
    whole, parts = (run(make(fp8="delayed", micro_batches=n), 1, scales) for n in (1, 4))
    close(parts[0].fp8, whole[0].fp8, 1e-3)
    close(parts[1][0].grad_norm, whole[1][0].grad_norm, 1e-4)
    close(parts[1][0].loss, whole[1][0].loss, 1e-5)


def test_eight_devices_have_the_state_of_one():
    one, eight = run(make(fp8="delayed")), run(make("data=2,fsdp=4", 8, fp8="delayed"))
    close(eight[0].fp8, one[0].fp8, 1e-3)
    close([f.loss for f in eight[1]], [f.loss for f in one[1]], 1e-3)


def test_an_overflow_in_float16_is_seen():
    """The loss scale is far too large; FP8 casts may not saturate the infinity away."""
    scaling = LossScaleConfig(initial=2.0**34, ceiling=2.0**34)
    made = make(fp8="delayed", precision="float16", loss_scale=scaling)
    state = made.init(jax.random.key(0))
    fine = dataclasses.replace(
        state, loss_scale=dataclasses.replace(state.loss_scale, scale=jnp.float32(8))
    )
    warm = made.warm_up(fine, made.place(batch(0))).fp8
    state = dataclasses.replace(made.init(jax.random.key(0)), fp8=warm)
    before = jax.device_get(state.params)
    scale = float(state.loss_scale.scale)
    seen = 0
    for i in range(30):
        state, figures = made.step(state, made.place(batch(0)))
        if int(figures.skipped) == seen:
            break
        seen = int(figures.skipped)
        chex.assert_trees_all_equal(jax.device_get(state.params), before)
        assert float(state.loss_scale.scale) == scale / 2 ** (i + 1)
    assert 0 < seen < 30 and np.isfinite(figures.loss) and np.isfinite(figures.grad_norm)
    assert float(figures.fp8_skipped) > 0


def test_a_step_with_unknown_scales_is_skipped_not_wrong():
    made = make(fp8="delayed")
    _, figures = made.step(made.init(jax.random.key(0)), made.place(batch(0)))
    assert int(figures.skipped) == 1 and not np.isfinite(figures.loss)
    assert not bool(fp8.is_cold(warmed(made).fp8))


def test_one_compilation_and_a_stable_state():
    made = make(fp8="delayed", micro_batches=4)
    kinds = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree)
    state, _ = made.step(warmed(made), made.place(batch(0)))
    before = made.step._cache_size()
    for i in range(5):
        state, _ = made.step(state, made.place(batch(i)))
        assert kinds(state) == kinds(made.abstract_state)
    assert made.step._cache_size() == before


def test_a_filter_converts_what_it_names():
    made = make(fp8="delayed", fp8_layers="up, d*")
    assert set(made.abstract_state.fp8["layers"][0]) == {"up", "down"}
    with pytest.raises(ValueError, match="FP8 for 'mlp': there is no such layer; layers: query"):
        make(fp8="current", fp8_layers="mlp")


def test_evaluation_is_not_in_fp8():
    made, plain = make(fp8="current"), make()
    params = plain.init(jax.random.key(0)).params
    a, b = (m.evaluate(params, m.place(batch(0))) for m in (made, plain))
    chex.assert_trees_all_equal(jax.device_get(a), jax.device_get(b))
