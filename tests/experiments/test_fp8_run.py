"""FP8 as a run sees it: what is converted, where it runs, a checkpoint of another recipe."""

import dataclasses
import types

import chex
import jax
import jax.numpy as jnp
import pytest

from experiments import fp8
from experiments.checkpoint import Checkpoints
from experiments.configs import load
from experiments.errors import UserError
from jaxaccel import optim, sharding
from jaxaccel.fp8 import Scaling, is_cold
from jaxaccel.nn import DecoderConfig
from jaxaccel.train_step import StepConfig, make_train_step

MODEL = DecoderConfig(
    vocab_size=32, layers=2, width=32, heads=2, kv_heads=1, head_size=16, mlp_width=48
)


def make(devices=1, **options):
    mesh = sharding.make_mesh(sharding.parse_mesh("", devices), jax.devices()[:devices])
    optimizer = optim.adamw(optim.OptimizerConfig(1e-2), 20)
    return make_train_step(MODEL, optimizer, StepConfig(**options), mesh)


@pytest.fixture
def saved(tmp_path):
    """A function that saves a fresh state with FP8 state of ones, and returns it."""
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:

        def save(**options):
            state = make(**options).init(jax.random.key(0))
            state = dataclasses.replace(state, fp8=jax.tree.map(jnp.ones_like, state.fp8))
            checkpoints.save(1, state, {"at": 3}, wait=True)
            return checkpoints, state

        yield save


def test_another_mesh_and_another_window(saved, capsys):
    checkpoints, state = saved(fp8="delayed")
    for window in (16, 4, 20):
        like = make(8, fp8="delayed", fp8_scaling=Scaling(window=window)).abstract_state
        restored = fp8.restore(checkpoints, like, "delayed", "delayed")
        assert restored.data_state == {"at": 3}
        chex.assert_trees_all_equal(jax.device_get(restored.state.params), state.params)
        query = restored.state.fp8["layers"][0]["query"]["matmul_state"]
        assert query.history.shape == (2, 3, window)
        assert int(query.history.sum()) == 2 * 3 * min(window, 16)
        assert float(query.scale.sum()) == 2 * 3
        places = jax.tree.map(lambda a, b: a.sharding == b.sharding, restored.state, like)
        assert all(jax.tree.leaves(places))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("old", "new"), [("delayed", "current"), ("off", "delayed"), ("current", "delayed")]
)
def test_another_recipe_keeps_parameters_and_warns(saved, capsys, old, new):
    checkpoints, state = saved(fp8=old)
    restored = fp8.restore(checkpoints, make(fp8=new).abstract_state, old, new)
    (warning,) = capsys.readouterr().err.splitlines()
    assert f"saved with --fp8 {old} and goes on with --fp8 {new}" in warning
    chex.assert_trees_all_equal(restored.state.params, state.params)
    chex.assert_trees_all_equal(restored.state.opt_state, state.opt_state)
    assert bool(is_cold(restored.state.fp8)) == (new == "delayed")


def test_more_layers_begin_anew_and_the_others_keep_theirs(saved, capsys):
    checkpoints, _ = saved(fp8="delayed", fp8_layers="up")
    like = make(fp8="delayed", fp8_layers="up,down").abstract_state
    layer = fp8.restore(checkpoints, like, "delayed", "delayed").state.fp8["layers"][0]
    assert float(layer["up"]["matmul_state"].scale.sum()) == 6
    assert float(layer["down"]["matmul_state"].scale.sum()) == 0
    assert "FP8 scales of layers.0.down are found anew" in capsys.readouterr().err


def test_no_checkpoint_is_none(tmp_path, capsys):
    with Checkpoints(tmp_path) as checkpoints:
        like = make(fp8="delayed").abstract_state
        assert fp8.restore(checkpoints, like, "off", "delayed") is None
    assert capsys.readouterr().err == ""


def test_what_is_converted_is_said():
    config = load("tiny")
    config = dataclasses.replace(config, precision="bfloat16", fp8="current", fp8_layers="up,g*")
    text = fp8.describe(config)
    assert text.startswith("fp8 current: gate, up; in bfloat16: query")
    assert "query (not asked for)" in text and "output head" in text
    with pytest.raises(UserError, match="FP8 for 'ffn': there is no such layer"):
        fp8.describe(dataclasses.replace(config, fp8_layers="ffn"))


def test_devices_without_fp8_fall_back_or_are_refused():
    config = dataclasses.replace(load("tiny"), fp8="current")
    assert fp8.check_device(config, "h200", native=True) == ""
    assert "a100 has no FP8 matmuls" in fp8.check_device(config, "a100", native=False)
    with pytest.raises(UserError, match="--fp8-strict refuses"):
        fp8.check_device(dataclasses.replace(config, fp8_strict=True), "a100", native=False)
    config = dataclasses.replace(config, fp8="block")
    assert fp8.check_device(config, "h200", native=True) == ""  # a kernel
    for name, devices in (("h200", 8), ("b200", 1)):
        text = fp8.check_device(config, name, native=True, devices=devices)
        assert "no block-scaled matmul" in text


@pytest.mark.parametrize(("kind", "capability", "native"), [
    ("NVIDIA H200", None, True), ("NVIDIA A100-SXM4-80GB", None, False), ("cpu", None, False),
    ("NVIDIA L40S", "8.9", True), ("NVIDIA T4", "7.5", False),
])  # fmt: skip
def test_which_devices_have_fp8(kind, capability, native):
    device = types.SimpleNamespace(device_kind=kind)
    if capability:
        device.compute_capability = capability
    assert fp8.is_native(device) == native
