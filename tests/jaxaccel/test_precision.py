"""Loss scaling against the rule written in plain Python."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaccel import precision
from jaxaccel.precision import LossScale, LossScaleConfig


def rule(scale, good, finite, config):
    """The next scale and run of finite steps."""
    if not finite:
        return max(scale / 2, config.floor), 0
    if good + 1 == config.growth_interval:
        return min(scale * 2, config.ceiling), 0
    return scale, good + 1


@functools.partial(jax.jit, static_argnums=2)
def update(state, finite, config):
    return precision.update_loss_scale(state, finite, config)


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("odds", [0.1, 0.5, 0.9])
def test_the_scale_follows_the_rule(interval, odds):
    config = LossScaleConfig(initial=16.0, growth_interval=interval, floor=2.0, ceiling=256.0)
    state = precision.init_loss_scale("float16", config)
    scale, good = 16.0, 0
    seen = set()
    for finite in np.random.default_rng(0).random(80) < odds:
        state = update(state, jnp.asarray(finite), config)
        scale, good = rule(scale, good, finite, config)
        assert (float(state.scale), int(state.good_steps)) == (scale, good)
        assert (state.scale.dtype, state.good_steps.dtype) == (jnp.float32, jnp.int32)
        seen.add(scale)
    assert len(seen) > 2 and seen & {2.0, 256.0}  # it moved, and met an end


def test_it_doubles_after_the_interval_and_not_before():
    config = LossScaleConfig(initial=8.0, growth_interval=4)
    state = precision.init_loss_scale("float16", config)
    scales = []
    for _ in range(9):
        state = update(state, jnp.array(True), config)
        scales.append(float(state.scale))
    assert scales == [8, 8, 8, 16, 16, 16, 16, 32, 32]


def test_it_stays_between_floor_and_ceiling():
    config = LossScaleConfig(initial=4.0, growth_interval=1, floor=2.0, ceiling=8.0)
    at = lambda scale: LossScale(jnp.float32(scale), jnp.int32(0))
    assert float(update(at(2.0), jnp.array(False), config).scale) == 2.0
    assert float(update(at(8.0), jnp.array(True), config).scale) == 8.0


@pytest.mark.parametrize("dtype", precision.COMPUTE_DTYPES)
def test_only_float16_is_scaled(dtype):
    state = precision.init_loss_scale(dtype, LossScaleConfig(initial=64.0))
    assert float(state.scale) == (64.0 if dtype == "float16" else 1.0)
    assert precision.COMPUTE_DTYPES[dtype] == jnp.dtype(dtype)


def test_default_scales_are_powers_of_two():
    """Multiplying by them and dividing by them again changes no gradient."""
    config = LossScaleConfig()
    for field in ("initial", "floor", "ceiling"):
        assert np.log2(getattr(config, field)).is_integer()
    assert config.floor <= config.initial <= config.ceiling
    assert dataclasses.is_dataclass(config)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_one_bad_number_anywhere_is_found(bad, dtype):
    tree = {"a": jnp.zeros((3, 5), dtype), "b": (jnp.ones(2), jnp.array(7, jnp.int32))}
    assert bool(precision.all_finite(tree))
    tree["a"] = tree["a"].at[2, 3].set(jnp.asarray(bad, dtype))
    assert not bool(jax.jit(precision.all_finite)(tree))


def test_nothing_is_finite():
    assert bool(precision.all_finite({}))
