"""Schedules at their corners; who decays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxaccel import optim
from jaxaccel.nn import Decoder, DecoderConfig
from jaxaccel.optim import OptimizerConfig


def rates(steps, **options):
    options = {"learning_rate": 2.0, "final_fraction": 0.25} | options
    rate = optim.schedule(OptimizerConfig(**options), steps)
    return np.array([float(rate(s)) for s in range(steps)])


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("warmup", [1, 2, 10])
def test_the_warm_up_is_linear_and_reaches_the_peak(kind, warmup):
    got = rates(50, schedule=kind, warmup_steps=warmup)
    np.testing.assert_allclose(got[:warmup], 2.0 * np.arange(1, warmup + 1) / warmup, rtol=1e-6)
    assert got.max() <= 2.0 * (1 + 1e-6)


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, 7, 48])
def test_the_last_step_has_the_final_rate(kind, warmup):
    assert rates(50, schedule=kind, warmup_steps=warmup)[-1] == pytest.approx(0.5)


def test_without_warm_up_it_starts_at_the_peak():
    for kind in ("cosine", "wsd", "constant"):
        assert rates(50, schedule=kind, warmup_steps=0)[0] == pytest.approx(2.0)


def test_cosine_is_the_cosine():
    got = rates(41, schedule="cosine", warmup_steps=0)
    x = np.arange(41) / 40
    np.testing.assert_allclose(got, 0.5 + 1.5 * (1 + np.cos(np.pi * x)) / 2, rtol=1e-5)


def test_wsd_is_stable_then_linear():
    got = rates(110, schedule="wsd", warmup_steps=9, decay_fraction=0.2)
    np.testing.assert_allclose(got[8:90], 2.0, rtol=1e-6)  # stable to the last fifth of the rest
    np.testing.assert_allclose(np.diff(got[90:]), -1.5 / 20, rtol=1e-3)
    assert got[89] == pytest.approx(2.0) and got[-1] == pytest.approx(0.5)


def test_constant_stays():
    assert (rates(20, schedule="constant", warmup_steps=3)[2:] == 2.0).all()


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("warmup", [0, 1, 100])
def test_the_shortest_runs_have_sensible_rates(kind, steps, warmup):
    got = rates(steps, schedule=kind, warmup_steps=warmup)
    assert (got > 0).all() and (got <= 2.0).all() and np.isfinite(got).all()
    assert got.max() == pytest.approx(2.0)  # a warm-up longer than the run is cut to it


def test_past_the_end_the_rate_stays():
    rate = optim.schedule(OptimizerConfig(2.0, warmup_steps=3, final_fraction=0.25), 20)
    assert float(rate(500)) == pytest.approx(0.5)


def test_an_unknown_schedule_is_refused():
    config = OptimizerConfig()
    object.__setattr__(config, "schedule", "cosin")  # past the type checker of these tests
    with pytest.raises(ValueError, match="unknown schedule 'cosin'; known: cosine, wsd, constant"):
        optim.schedule(config, 10)


CONFIG = DecoderConfig(
    vocab_size=11, layers=2, width=8, heads=2, kv_heads=1, head_size=4, mlp_width=9,
    qk_norm=True, qkv_bias=True, windows=(2, None),
)  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_and_tables_decay_norms_and_biases_do_not(tied):
    config = dataclasses.replace(CONFIG, tied_head=tied)
    model = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    mask = optim.decays(nnx.to_pure_dict(nnx.state(model)))
    by_name = {}
    for path, value in jax.tree_util.tree_leaves_with_path(mask):
        by_name.setdefault(path[-1].key, set()).add(value)
    want = {"kernel": {True}, "embedding": {True}, "scale": {False}, "bias": {False}}
    assert by_name == want | ({} if tied else {"head": {True}})


def test_adamw_is_optax_adamw_with_its_numbers():
    config = OptimizerConfig(
        0.1, "constant", warmup_steps=0, b1=0.8, b2=0.9, epsilon=1e-3, weight_decay=0.3
    )
    params = {"kernel": jnp.array([1.0, -2.0]), "scale": jnp.array([1.0, 2.0])}
    grads = {"kernel": jnp.array([0.5, 0.1]), "scale": jnp.array([0.2, -0.3])}
    optimizer = optim.adamw(config, 10)
    state = optimizer.init(params)
    got = params
    m = v = jax.tree.map(np.zeros_like, params)
    want = jax.tree.map(np.asarray, params)
    for step in (1, 2):
        updates, state = optimizer.update(grads, state, got)
        got = optax.apply_updates(got, updates)
        m = jax.tree.map(lambda m, g: 0.8 * m + 0.2 * g, m, grads)
        v = jax.tree.map(lambda v, g: 0.9 * v + 0.1 * g * g, v, grads)
        for key, decay in (("kernel", 0.3), ("scale", 0.0)):
            m_hat, v_hat = m[key] / (1 - 0.8**step), v[key] / (1 - 0.9**step)
            change = m_hat / (np.sqrt(v_hat) + 1e-3) + decay * want[key]
            want[key] = want[key] - 0.1 * change
            np.testing.assert_allclose(got[key], want[key], rtol=1e-5)
