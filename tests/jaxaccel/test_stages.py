"""Steps of a pipeline, on eight devices: the one-device step, to rounding."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
import steps
from steps import CURRENT, DELAYED, EIGHT_BITS, GEMMA, GROUPS, PARALLEL, PLAIN, SEQUENTIAL, Case

from jaxaccel import step_config
from jaxaccel.fp8 import DelayedState
from jaxaccel.train_step import StepConfig

FOUR = dataclasses.replace(PLAIN, layers=4)
EIGHT = dataclasses.replace(PLAIN, layers=8)
NARROW = dataclasses.replace(EIGHT_BITS, layers=4)


def how(pipeline: str, **options: Any) -> tuple:
    return (("pipeline", pipeline), *options.items())


CASES = [
    Case("stage=2,fsdp=4", "none", "none", 6, FOUR, (), how("1f1b")),
    Case("stage=4,tensor=2", "none", "full", 4, FOUR, (), how("gpipe", delayed_sends=True)),
    Case("stage=2,fsdp=2,tensor=2", "none", "selective", 4, EIGHT, (), how("interleaved")),
    Case(
        "stage=4,data=2", "none", "selective", 12, EIGHT, (("mtp", PARALLEL),),
        how("interleaved", delayed_sends=True),
    ),
    Case(
        "stage=2,data=2,fsdp=2", "none", "full", 3, GROUPS, (("mtp", SEQUENTIAL),), how("gpipe")
    ),
    Case("stage=4,fsdp=2", "none", "full", 4, EIGHT, (), how("1f1b", stage_layers=(1, 3, 2, 2))),
    Case(
        "stage=2,sequence=2,tensor=2", "sequence", "none", 4,
        dataclasses.replace(GEMMA, layers=4), (), how("1f1b"),
    ),
    Case("stage=2,sequence=2,tensor=2", "none", "sqrt", 4, EIGHT, (), how("1f1b")),
    Case("stage=4,fsdp=2", "none", "full", 4, NARROW, DELAYED, how("1f1b")),
    Case("stage=2,fsdp=2,tensor=2", "none", "full", 4, NARROW, DELAYED, how("interleaved")),
    Case("stage=2,data=4", "none", "selective", 3, NARROW, CURRENT, how("1f1b")),
]  # fmt: skip


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.mesh}-{dict(case.how)['pipeline']}"
)
def test_loss_gradients_and_state_are_those_of_one_device(case):
    steps.assert_same(case)


def test_evaluation_is_that_of_one_device():
    case = CASES[3]
    made, state = steps.make(case), steps.start(steps.make(case))
    places = jax.tree.map(lambda x: x.sharding, made.abstract_state.params)
    params = jax.device_put(state.params, places)
    sums = jax.device_get(made.evaluate(params, made.place(steps.batch())))
    metrics = steps.run(steps.alone(case)).metrics
    np.testing.assert_allclose(sums.nll / metrics.tokens, metrics.loss, rtol=2e-6)
    assert sums.count == metrics.tokens


def test_a_warm_start_finds_scales_in_the_pipeline():
    case = next(case for case in CASES if case.more == DELAYED)
    made, state = steps.make(case), steps.start(steps.make(case))
    places = jax.tree.map(lambda x: x.sharding, made.abstract_state)
    cold = steps.call(made.init, jax.random.key(0)).fp8
    state = jax.device_put(dataclasses.replace(state, fp8=jax.device_get(cold)), places)
    found = steps.call(made.warm_up, state, made.place(steps.batch())).fp8
    # As many micro-batches: a cold start scales each by its own largest magnitudes.
    expected = steps.scales(steps.alone(case)._replace(micro_batches=case.micro_batches))
    is_state = lambda node: isinstance(node, DelayedState)
    states = functools.partial(jax.tree.leaves, is_leaf=is_state)
    assert len(states(found)) == 7
    for x, y in zip(states(found), states(expected), strict=True):
        np.testing.assert_allclose(x.scale[:, :2], y.scale[:, :2], rtol=steps.FLIPS)
        # The largest gradient of a layer is one element; with two bits behind the point (e5m2)
        # a flip moves what it is made of by up to a quarter.
        np.testing.assert_allclose(x.scale[:, 2], y.scale[:, 2], rtol=0.5)


@pytest.mark.parametrize(
    ("stages", "options", "message"),
    [
        (8, {}, "stage=8 with 1 run of layers each needs 8 layers, and the model has 4"),
        (4, {"pipeline": "interleaved"}, "stage=4 with 2 runs of layers each needs 8 layers"),
        (3, {}, "4 layers do not divide over stage=3, .* legal numbers of stages: 2, 4"),
        (2, {"stage_layers": (1, 2)}, r"stage_layers \(1, 2\) must be 2 numbers, .* up to 4"),
        (2, {"stage_layers": (4, 0)}, "1 or more each"),
        (2, {"stage_layers": (4,)}, "must be 2 numbers"),
        (2, {"chunks": 3}, "chunks is 3, and pipeline '1f1b' has one run"),
        (2, {"pipeline": "interleaved", "chunks": 1}, "interleaved has 2 or more"),
        (1, {"pipeline": "gpipe", "delayed_sends": True}, "pipeline, delayed_sends is for a pipe"),
        *((2, {"overlap": name}, f"overlap '{name}' and a pipeline do not combine: ")
          for name in step_config.OVERLAPS if name != "sequence"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(stages, options, message):
    config = StepConfig(micro_batches=4, **options)
    with pytest.raises(ValueError, match=message) as error:
        step_config.check_pipeline(FOUR, config, stages)
    assert "\n" not in str(error.value)


def test_layers_that_repeat_in_groups_stay_together():
    config = StepConfig(micro_batches=4, stage_layers=(2, 6))
    model = dataclasses.replace(GROUPS, layers=8)
    plan = step_config.schedule(config, 2)
    assert step_config.runs(model, config, plan) == (1, 3)
    odd = dataclasses.replace(config, stage_layers=(3, 5))
    with pytest.raises(ValueError, match="2 numbers, multiples of 2 from 2, that add up to 8"):
        step_config.check_pipeline(model, odd, 2)


def test_layers_are_divided_as_evenly_as_can_be():
    config = StepConfig(pipeline="interleaved", chunks=3)
    assert step_config.runs(EIGHT, config, step_config.schedule(config, 2)) == (2, 2, 1, 1, 1, 1)
