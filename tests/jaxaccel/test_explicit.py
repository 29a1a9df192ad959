"""Steps whose collectives are written out, on eight devices: the one-device step, to rounding."""

import itertools

import jax
import numpy as np
import pytest
import steps
from steps import CURRENT, DELAYED, EIGHT_BITS, GEMMA, GROUPS, PARALLEL, PLAIN, SEQUENTIAL, Case

from jaxaccel import overlap, step_config
from jaxaccel.fp8 import DelayedState
from jaxaccel.train_step import StepConfig

EVERYTHING = ", ".join(step_config.OVERLAPS)
CASES = [
    Case("fsdp=8", "fsdp-prefetch", "none", 3),
    Case("data=8", "buckets", "full", 3),
    Case("data=2,tensor=4", "domino", "selective", 3),
    Case("fsdp=2,tensor=4", "sequence", "full", 1, GEMMA),
    Case("data=2,tensor=4", "collective-matmul", "none"),
    Case("fsdp=2,sequence=4", "ring-attention", "selective", 2, GEMMA),
    Case("data=2,sequence=2,tensor=2", EVERYTHING, "selective"),
    Case("data=2,fsdp=4", "fsdp-prefetch,buckets", "full", 3, GROUPS, (("mtp", SEQUENTIAL),)),
    Case(
        "fsdp=2,tensor=4", "fsdp-prefetch,domino,sequence", "none", 2, PLAIN, (("mtp", PARALLEL),)
    ),
    Case("sequence=2,tensor=4", "domino,collective-matmul,ring-attention", "none"),
    Case("fsdp=8", "fsdp-prefetch", "full", 3, EIGHT_BITS, DELAYED),
    Case("", "fsdp-prefetch", "full", 3, GROUPS, (("mtp", SEQUENTIAL),)),
    Case("data=2,tensor=4", "fsdp-prefetch", "full", 3),  # adds in place, gathers nothing
    Case(
        "data=2,tensor=4", "domino,sequence,collective-matmul", "selective", 2, EIGHT_BITS, DELAYED
    ),
    Case("fsdp=2,tensor=4", "fsdp-prefetch,sequence", "full", 1, EIGHT_BITS, CURRENT),
]  # fmt: skip


@pytest.fixture(autouse=True)
def forms(monkeypatch):
    """At these sizes the cost model would choose plain collectives, which others test."""
    forms = {"all_gather_matmul": "ring", "matmul_reduce_scatter": "ring"}
    choose = lambda model, operation, *_, **options: forms.get(operation, "chunked")
    monkeypatch.setattr(overlap, "choose", choose)


def test_every_technique_is_there_alone_and_every_pair_too():
    sets = [frozenset(StepConfig(overlap=case.overlap).techniques) for case in CASES]
    alone = {frozenset({name}) for name in step_config.OVERLAPS}
    pairs = {frozenset(pair) for pair in itertools.combinations(step_config.OVERLAPS, 2)}
    assert alone <= set(sets)
    assert all(any(pair <= names for names in sets) for pair in pairs)
    assert {case.remat for case in CASES} == {"none", "selective", "full"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.overlap.replace(EVERYTHING, "all"))
def test_loss_gradients_and_state_are_those_of_one_device(case):
    steps.assert_same(case)


def test_all_matmuls_of_the_delayed_cases_are_in_eight_bits():
    for case in CASES:
        if case.more == DELAYED:
            is_state = lambda node: isinstance(node, DelayedState)
            states = jax.tree.leaves(steps.run(case).fp8, is_leaf=is_state)
            assert len(states) == 7 and all((s.history[..., :2] > 0).all() for s in states)


def test_evaluation_is_as_ever():
    case = CASES[0]
    made = steps.make(case)
    places = jax.tree.map(lambda x: x.sharding, made.abstract_state.params)
    params = jax.device_put(steps.start(made).params, places)
    sums = jax.device_get(made.evaluate(params, made.place(steps.batch())))
    metrics = steps.run(steps.alone(case)).metrics
    np.testing.assert_allclose(sums.nll / metrics.tokens, metrics.loss, rtol=2e-6)
