"""Optimizers as a run sees them: by name, on a mesh, from a checkpoint; what they take."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments import cli
from experiments.checkpoint import Checkpoints
from experiments.config import TrainConfig
from experiments.configs import load
from experiments.errors import UserError
from jaxaccel import optim, sharding
from jaxaccel.blockwise import BlockQuantized
from jaxaccel.memory import sharded_bytes
from jaxaccel.nn import DecoderConfig
from jaxaccel.train_step import StepConfig, abstract_decoder, make_train_step

MODEL = DecoderConfig(
    vocab_size=64, layers=2, width=64, heads=2, kv_heads=1, head_size=32, mlp_width=96
)
NAMES = ("adamw", "adamw-8bit", "lion", "lion-8bit", "sgd", "muon")


def make(name, devices=1, learning_rate=1e-2):
    mesh = sharding.make_mesh(sharding.parse_mesh("", devices), jax.devices()[:devices])
    config = optim.OptimizerConfig(learning_rate, "constant", warmup_steps=0, name=name)
    return make_train_step(MODEL, optim.make(config, 20), StepConfig(), mesh)


def batch(step, seed=0):
    tokens = np.random.default_rng(seed).integers(0, 64, (8, 16), dtype=np.int32)
    ones, positions = np.ones_like(tokens), np.broadcast_to(np.arange(16, dtype=np.int32), (8, 16))
    return step.place(
        {"tokens": tokens, "labels": tokens, "segments": ones, "positions": positions}
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_lowers_the_loss_and_keeps_its_state(name):
    step = make(name, learning_rate={"sgd": 0.3, "lion": 2e-3, "lion-8bit": 2e-3}.get(name, 1e-2))
    state, data = step.init(jax.random.key(0)), batch(step)
    losses = []
    for _ in range(6):
        state, figures = step.step(state, data)
        losses.append(float(figures.loss))
    assert losses[-1] < losses[0] - 0.5
    form = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree)
    assert form(state) == form(step.abstract_state)
    coded = any(x.dtype == jnp.uint8 for x in jax.tree.leaves(state.opt_state))
    assert coded == name.endswith("8bit")
    assert step.step._cache_size() == 1


def test_the_name_alone_is_an_option_and_the_rest_of_the_group_too():
    args = ["--optimizer", "lion-8bit", "--optimizer.b1", "0.5"]
    config = cli.parse(TrainConfig, default=load("tiny"), args=args, prog="train")
    assert config.optimizer.name == "lion-8bit" and config.optimizer.b1 == 0.5
    with pytest.raises(UserError, match=r"'adamw-8'.*lion-8bit"):
        cli.parse(TrainConfig, default=load("tiny"), args=["--optimizer=adamw-8"], prog="train")


@pytest.fixture(scope="module")
def trained():
    step = make("adamw-8bit")
    state = step.init(jax.random.key(0))
    for seed in range(2):
        state, _ = step.step(state, batch(step, seed))
    return state


def test_eight_devices_train_as_one(trained):
    step = make("adamw-8bit", 8)
    state = step.init(jax.random.key(0))
    for seed in range(2):
        state, _ = step.step(state, batch(step, seed))
    # The gradients' sums are in another order; parameters move by 1e-2 a step.
    chex.assert_trees_all_close(jax.device_get(state.params), trained.params, atol=1e-3)
    kernel = state.opt_state[0].nu["layers"][0]["gate"]["kernel"]
    assert kernel.codes.addressable_shards[0].data.shape == (2, 8, 96)


def test_a_checkpoint_is_read_on_another_mesh(trained, tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, trained, {}, wait=True)
        like = make("adamw-8bit", 8).abstract_state
        restored = checkpoints.restore(like).state
    chex.assert_trees_all_equal(jax.device_get(restored), jax.device_get(trained))
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, like)


def test_a_checkpoint_of_another_block_size_or_optimizer_is_refused(trained, tmp_path):
    params = trained.params
    other = optim.adamw_8bit(1e-2, moments=optim.Moments(block=64))
    like = dataclasses.replace(trained, opt_state=jax.eval_shape(other.init, params))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=None), like)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, trained, {}, wait=True)
        with pytest.raises(UserError, match=r"scale: got float32\[.*\], expected float32\["):
            checkpoints.restore(like)
        with pytest.raises(UserError, match=r"codes: got uint8\[.*\], expected nothing"):
            checkpoints.restore(make("adamw").abstract_state)


@pytest.mark.parametrize("name", ["llama-1b3", "llama-8b"])
def test_bytes_of_the_real_state(name):
    params = nnx.to_pure_dict(nnx.state(abstract_decoder(load(name).model)))
    config = optim.OptimizerConfig(name="adamw-8bit")
    state = jax.eval_shape(optim.make(config, 10).init, params)
    is_coded = lambda x: isinstance(x, BlockQuantized)
    moments = jax.tree.leaves((state[0].mu, state[0].nu), is_leaf=is_coded)
    coded = [m for m in moments if is_coded(m)]
    count = sum(m.codes.size for m in coded) / 2
    assert sharded_bytes(coded) / count <= 2.04
    assert count > 0.9995 * sum(p.size for p in jax.tree.leaves(params))  # all but the norms
    plain = jax.eval_shape(optim.make(optim.OptimizerConfig(), 10).init, params)
    assert sharded_bytes(state) < 0.26 * sharded_bytes(plain)
