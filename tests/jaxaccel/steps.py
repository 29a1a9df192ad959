"""Training steps on meshes of CPU devices, and the step of one device that they are to equal."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxaccel import sharding, train_step
from jaxaccel.nn import DecoderConfig, MtpConfig
from jaxaccel.precision import LossScale
from jaxaccel.train_step import StepConfig

ROWS, LENGTH = 24, 24
# Sizes that devices share leave odd parts: 3 channels, 9 words, 9 of the MLP's, 3 positions.
PLAIN = DecoderConfig(
    vocab_size=36, layers=3, width=24, heads=8, kv_heads=4, head_size=6, mlp_width=36,
    qkv_bias=True, rope_theta=100.0,
)  # fmt: skip
# All that Gemma adds; caps at magnitudes that logits reach.
GEMMA = dataclasses.replace(
    PLAIN, zero_centered_norm=True, post_norms=True, embedding_scale=2.0, attention_scale=0.05,
    attention_soft_cap=2.0, logits_soft_cap=3.0, tied_head=True, activation="gelu_tanh",
)  # fmt: skip
GROUPS = dataclasses.replace(GEMMA, layers=4, windows=(7, None), qk_norm=True, qkv_bias=False)
EIGHT_BITS = dataclasses.replace(PLAIN, width=32, head_size=8, mlp_width=48)
SEQUENTIAL, PARALLEL = MtpConfig(1, "sequential"), MtpConfig(1, "parallel")


class Case(NamedTuple):
    mesh: str
    overlap: str
    remat: str
    micro_batches: int = 1
    model: DecoderConfig = PLAIN
    more: tuple = ()  # options that change the result
    how: tuple = ()  # others


DELAYED, CURRENT = (("fp8", "delayed"),), (("fp8", "current"),)
# A device adds in another order. Of the largest gradient of a parameter:
ROUNDING = 5e-6
# In FP8, where rounding carries a value over a border of eight bits, one operand moves by up to an
# eighth, and all that follows from it. Of the norm of a parameter's gradient, and of magnitudes:
FLIPS = 0.1


def batch():
    return packed(ROWS, LENGTH, PLAIN.vocab_size, 2)


def packed(rows, length, words, least):
    """Two documents a row, every third row mostly padding (`least` tokens or a few more).

    Micro-batches and devices count unlike many."""
    random = np.random.default_rng(0)
    tokens = random.integers(1, words, (rows, length))
    row, place = np.arange(rows)[:, None], np.arange(length)
    border, used = 3 + row % (length - 7), np.where(row % 3, length, least + row % 7)
    segments = np.where(place < used, 1 + (place >= border), 0)
    later = np.pad(segments[:, 1:], ((0, 0), (0, 1)))
    labels = np.where((segments == later) & (segments > 0), np.roll(tokens, -1, 1), -1)
    positions = np.where(place >= border, place - border, place)
    arrays = tokens, labels, segments, positions
    return {key: x.astype(np.int32) for key, x in zip(train_step.BATCH_KEYS, arrays)}


def start(made):
    """A first state in which every parameter matters: fresh scales are one, fresh biases zero.

    Small enough to leave attention soft: a sharp one would amplify rounding."""
    random = np.random.default_rng(1)

    def draw(path, x):
        noise = random.standard_normal(x.shape, np.float32)
        return 0.15 * noise + jax.tree_util.keystr(path).endswith("['scale']")

    shapes = made.abstract_state
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    return dataclasses.replace(
        zeros,
        params=jax.tree_util.tree_map_with_path(draw, shapes.params),
        loss_scale=LossScale(jnp.float32(1), jnp.int32(0)),
    )


@functools.cache
def make(case):
    sizes = sharding.parse_mesh(case.mesh, 8 if case.mesh else 1)
    mesh = sharding.make_mesh(sizes, jax.devices()[: math.prod(sizes.values())])
    options = {
        "micro_batches": case.micro_batches,
        "overlap": case.overlap,
        **dict(case.more + case.how),
    }
    config = StepConfig(remat=case.remat, clip_norm=math.inf, **options)
    # The first value of a trace is the gradient itself, to the last bit.
    optimizer = optax.chain(optax.trace(decay=0.0), optax.scale(-1.0))
    return train_step.make_train_step(case.model, optimizer, config, mesh)


def call(function, *arguments):
    """Calls what is jitted, compiled in half of the time, with the same arithmetic."""
    options = {"xla_backend_optimization_level": 0}
    return function.lower(*arguments).compile(compiler_options=options)(*arguments)


@functools.cache
def scales(case):
    """The first FP8 state, its scales found by one device."""
    made = make(case)
    cold = call(made.init, jax.random.key(0)).fp8
    state = jax.device_put(dataclasses.replace(start(made), fp8=jax.device_get(cold)))
    return jax.device_get(call(made.warm_up, state, made.place(batch())).fp8)


class Result(NamedTuple):
    metrics: train_step.StepMetrics
    gradients: dict
    fp8: dict
    state: train_step.TrainState


@functools.cache
def run(case):
    """One step from the same state on the same batch, whatever the mesh."""
    made, state = make(case), start(make(case))
    if case.more == DELAYED:
        state = dataclasses.replace(state, fp8=scales(alone(case)))
    given = made.place(batch())
    places = jax.tree.map(lambda x: x.sharding, made.abstract_state)
    state, metrics = call(made.step, jax.device_put(state, places), given)
    jax.tree.map(np.testing.assert_array_equal, given, batch())  # it is not changed
    metrics, gradients, fp8 = jax.device_get((metrics, state.opt_state[0].trace, state.fp8))
    return Result(metrics, gradients, fp8, state)


def alone(case):
    """On one device, as plainly as can be."""
    count = case.micro_batches if case.more == CURRENT else 1  # each has a scale of its own
    return case._replace(mesh="", overlap="none", remat="none", micro_batches=count, how=())


def assert_same(case):
    """The step of `case` is that of one device: metrics, gradients, FP8 state, kinds of arrays."""
    found, expected = run(case), run(alone(case))
    eight_bits = "fp8" in dict(case.more)
    assert_close(found.gradients, expected.gradients, eight_bits=eight_bits)
    for x, y in zip(found.metrics, expected.metrics, strict=True):
        np.testing.assert_allclose(x, y, rtol=0.01 if eight_bits else 2e-6)
    assert found.metrics.tokens == (batch()["labels"] >= 0).sum()
    for x, y in zip(jax.tree.leaves(found.fp8), jax.tree.leaves(expected.fp8), strict=True):
        np.testing.assert_allclose(x, y, rtol=FLIPS)
    kinds = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree)
    assert kinds(found.state) == kinds(make(case).abstract_state)


def assert_close(found, expected, *, eight_bits):
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        name, largest = jax.tree_util.keystr(path), np.abs(y).max()
        assert largest > 1e-4, f"{name} is near zero"
        if eight_bits:
            assert np.linalg.norm(x - y) <= FLIPS * np.linalg.norm(y), name
        else:
            np.testing.assert_allclose(x, y, rtol=0, atol=ROUNDING * largest, err_msg=name)
