"""The sides of the benchmark compute the same thing, and its report says what it found."""

import importlib.util
import json

import chex
import jax
import numpy as np
import pytest

from experiments.bench import plain_jax, train_step
from experiments.bench.plain_jax import Shape

SHAPE = Shape(layers=2, width=24, heads=3, sequence=13, batch=2, vocab=31)
has_torch = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not has_torch, reason="PyTorch is not installed")


@pytest.fixture(scope="module", autouse=True)
def first_draft():
    """The yardstick promotes ranks and dtypes implicitly, as a first draft does."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def batch():
    return train_step.random_batch(SHAPE)


@pytest.fixture(scope="module")
def ours():
    return train_step.make_ours(SHAPE)


@pytest.fixture(scope="module")
def params(ours):
    return train_step.unstacked(ours.init(jax.random.key(0)).params)


@pytest.fixture(scope="module")
def plain(params, batch):
    """Plain JAX's loss and gradients."""
    gradient = jax.value_and_grad(plain_jax.loss)
    return gradient(params, batch["tokens"], batch["labels"], SHAPE.heads)


def test_ours_is_the_same_maths_as_plain_jax(ours, batch, plain):
    params = ours.init(jax.random.key(0)).params
    tokens = SHAPE.batch * SHAPE.sequence
    value, grads = jax.value_and_grad(lambda p: ours.evaluate(p, batch).objective / tokens)(params)
    np.testing.assert_allclose(value, plain[0], rtol=1e-6)
    grads = train_step.unstacked(grads)
    chex.assert_trees_all_close(grads, jax.device_get(plain[1]), rtol=1e-4, atol=1e-6)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert np.abs(grad).max() > 1e-4, jax.tree_util.keystr(path)


@needs_torch
def test_torch_is_the_same_maths_as_plain_jax(params, batch, plain):
    import torch

    from experiments.bench import torch_model

    model = torch_model.Decoder(params, SHAPE.heads, SHAPE.sequence)
    loss = model.loss(*(torch.tensor(batch[key]).long() for key in ("tokens", "labels")))
    loss.backward()
    np.testing.assert_allclose(loss.item(), plain[0], rtol=1e-6)
    expected = jax.device_get(plain[1])
    chex.assert_trees_all_close(model.gradients(), expected, rtol=1e-4, atol=1e-6)


def test_optimizers_agree(ours, params, batch):
    """Four steps, which the loss of each one after the first holds to the ones before."""
    sides = [train_step.our_step(ours, batch), train_step.plain_step(SHAPE, params, batch)]
    if has_torch:
        sides.append(train_step.torch_step(SHAPE, params, batch))
    losses = [[step() for _ in range(4)] for step in sides]
    assert losses[0][3] < losses[0][0] - 1e-3
    for other in losses[1:]:
        np.testing.assert_allclose(other, losses[0], rtol=1e-5)


def test_sides_take_turns():
    called = []
    sides = {name: lambda name=name: called.append(name) or 0.0 for name in "ab"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_step, "TURN_SECONDS", 0.0)
        patch.setattr(train_step, "PAUSE_SECONDS", 0.0)
        times = train_step.alternate(sides, 3)
    assert called == [*"aabb", *"ab", *"ba", *"ab"]  # compiling and a trial come first
    assert [len(values) for values in times.values()] == [3, 3]


def test_ratios_are_of_the_same_round():
    assert train_step.paired([2.0, 30.0, 3.0], [1.0, 10.0, 2.0]) == 2.0


def test_report(monkeypatch, capsys):
    monkeypatch.setitem(train_step.SHAPES, "small", SHAPE)
    monkeypatch.setattr(train_step, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(train_step, "INPUT_STEPS", 2)
    monkeypatch.setattr(train_step.allocator, "keep_freed_memory", lambda: True)  # not of pytest
    train_step.main(train_step.Options(json=True, shapes=("small",), rounds=1))
    result = json.loads(capsys.readouterr().out)
    assert result["shape"] == "small" and result["width"] == SHAPE.width
    speedup = result["plain_jax_ms"] / result["ours_ms"]
    assert result["speedup_vs_plain"] == pytest.approx(speedup, rel=1e-6)
    assert (result["torch_ms"] is None) == (result["time_vs_torch"] is None) == (not has_torch)
    assert 0 < result["input_share"] < 1
    assert result["versions"]["jax"] == jax.__version__

    without = result | {"torch_ms": None, "time_vs_torch": None, "speedup_vs_plain": 1.7}
    with_torch = result | {"torch_ms": 50.0, "time_vs_torch": 0.8}
    assert "1.70x as long (bar: at least 1.60x)" in train_step.table([without])
    assert "PyTorch     not installed" in train_step.table([without])
    assert "1.25x as long (bar: at least 1.00x)" in train_step.table([with_torch])
