"""Optimizers as a run sees them: by name, on a mesh, from a checkpoint; what they take."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from experiments import cli
from experiments.checkpoint import Checkpoints
from experiments.config import ALIASES, TrainConfig
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


def make(name, devices=1):
    mesh = sharding.make_mesh(sharding.parse_mesh("", devices), jax.devices()[:devices])
    config = optim.OptimizerConfig(1e-2, "constant", warmup_steps=0, name=name)
    return make_train_step(MODEL, optim.make(config, 20), StepConfig(), mesh)


def batch(step, seed=0):
    tokens = np.random.default_rng(seed).integers(0, 64, (8, 16), dtype=np.int32)
    ones, positions = np.ones_like(tokens), np.broadcast_to(np.arange(16, dtype=np.int32), (8, 16))
    return step.place(
        {"tokens": tokens, "labels": tokens, "segments": ones, "positions": positions}
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_goes_downhill_and_keeps_its_state(name):
    layer = {"gate": {"kernel": (2, 64, 96)}, "norm": {"scale": (100, 64)}}
    shapes = {"embedding": (64, 64), "layers": [layer]}
    is_shape = lambda node: isinstance(node, tuple)
    params = jax.tree.map(lambda s: jnp.full(s, 0.5, jnp.float32), shapes, is_leaf=is_shape)
    optimizer = optim.make(optim.OptimizerConfig(1e-2, "constant", 0, name=name), 20)

    @jax.jit
    def step(params, state):  # the gradient of half the sum of squares
        updates, state = optimizer.update(params, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    form = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    for _ in range(3):
        params, state = step(params, state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == form
    assert step._cache_size() == 1
    assert all((p > 0).all() and (p < 0.5).all() for p in jax.tree.leaves(params))
    coded = {x.dtype for x in jax.tree.leaves(state)} >= {jnp.dtype(jnp.uint8)}
    assert coded == name.endswith("8bit")
    if coded:
        mu = state[0].mu
        assert isinstance(mu["embedding"], BlockQuantized)
        assert isinstance(mu["layers"][0]["gate"]["kernel"], BlockQuantized)
        assert mu["layers"][0]["norm"]["scale"].dtype == jnp.float32  # large, but a norm


def test_the_name_alone_is_an_option_and_the_rest_of_the_group_too():
    args = ["--optimizer", "lion-8bit", "--optimizer.b1", "0.5"]
    config = cli.parse(TrainConfig, default=load("tiny"), args=args, prog="train", aliases=ALIASES)
    assert config.optimizer.name == "lion-8bit" and config.optimizer.b1 == 0.5
    with pytest.raises(UserError, match=r"'adamw-8'.*lion-8bit"):
        cli.parse(
            TrainConfig,
            default=load("tiny"),
            args=["--optimizer=adamw-8"],
            prog="train",
            aliases=ALIASES,
        )


@pytest.fixture(scope="module")
def trained():
    """A state after two steps on eight devices."""
    step = make("adamw-8bit", 8)
    state = step.init(jax.random.key(0))
    for seed in range(2):
        state, figures = step.step(state, batch(step, seed))
    assert float(figures.loss) < 5 and step.step._cache_size() == 1
    return state


def test_moments_lie_in_pieces(trained):
    kernel = trained.opt_state[0].nu["layers"][0]["gate"]["kernel"]
    assert kernel.codes.addressable_shards[0].data.shape == (2, 8, 96)
    assert kernel.scale.is_fully_replicated  # 96 is no fit for blocks: they run through it
    down = trained.opt_state[0].nu["layers"][0]["down"]["kernel"]
    assert down.codes.addressable_shards[0].data.shape == (2, 96, 8)


def test_a_checkpoint_is_read_on_another_mesh(trained, tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, trained, {}, wait=True)
        like = make("adamw-8bit").abstract_state
        restored = checkpoints.restore(like).state
    chex.assert_trees_all_equal(jax.device_get(restored), jax.device_get(trained))
    places = lambda tree: jax.tree.map(lambda x: x.sharding, tree)
    assert places(restored) == places(like)


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
