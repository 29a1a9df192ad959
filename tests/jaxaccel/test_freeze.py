"""Parameters that stay: bit for bit as they were, in no norm, with no state and no gradient."""

import dataclasses
import functools
import math

import jax
import numpy as np
import optax
import pytest
import steps
from steps import ROWS, Case

from jaxaccel import hlo, optim, sharding, train_step
from jaxaccel.matmuls import matmuls
from jaxaccel.train_step import StepConfig, abstract_batch, parameter_shardings

MODEL = dataclasses.replace(steps.EIGHT_BITS, layers=2, mlp_width=64)  # gates are held in 8 bits
QUICK = {"xla_backend_optimization_level": 0}
FROZEN = ("embedding", "layers.0.query.*", "*.down.kernel")
STAY = {"embedding", "layers.0.query.kernel", "layers.0.query.bias", "layers.0.down.kernel"}
LENGTH = steps.LENGTH


@functools.cache
def make(frozen=FROZEN, mesh="", optimizer="adamw", **options):
    sizes = sharding.parse_mesh(mesh, math.prod(int(part[-1]) for part in mesh.split(",") if part))
    where = sharding.make_mesh(sizes, jax.devices()[: math.prod(sizes.values())])
    rates = optim.OptimizerConfig(1e-2, "constant", 0, name=optimizer)
    config = StepConfig(freeze=frozen, clip_norm=math.inf, remat="none", **options)
    return train_step.make_train_step(MODEL, optim.make(rates, 10), config, where)


def by_name(tree):
    named = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    return {named(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


@functools.cache
def run(**how):
    """Parameters before and after two steps, the last state, and what the first step found."""
    made = make(**how)
    start = steps.start(made)  # optimizer state is zeros, as it begins
    before = by_name(start.params)
    state = jax.device_put(start, jax.tree.map(lambda x: x.sharding, made.abstract_state))
    batch, figures = made.place(steps.batch()), []
    program = made.step.lower(state, batch).compile(QUICK)
    for _ in range(2):
        state, found = program(state, batch)
        figures.append(jax.device_get(found))
    return before, by_name(jax.device_get(state.params)), state, figures[0]


# Several devices hold the moments in 8 bits, or by Muon.
HOW = [
    {},
    {"mesh": "fsdp=2,tensor=2", "optimizer": "adamw-8bit"},
    {"mesh": "stage=2", "optimizer": "muon", "micro_batches": 2},
    {"mesh": "data=2,fsdp=2", "overlap": "buckets", "zero": 1},
]


@pytest.mark.parametrize("how", HOW, ids=str)
def test_what_is_frozen_stays_bit_for_bit_and_the_rest_moves(how):
    before, after, state, _ = run(**how)
    assert {n for n, x in before.items() if x.tobytes() == after[n].tobytes()} == STAY
    assert int(state.skipped) == 0


@pytest.mark.parametrize("how", HOW, ids=str)
def test_the_norm_is_that_of_the_other_gradients(how):
    case = Case("", "none", "none", model=MODEL)
    gradients, figures = by_name(steps.run(case).gradients), run(**how)[3]
    norm = math.sqrt(sum(float((x**2).sum()) for n, x in gradients.items() if n not in STAY))
    np.testing.assert_allclose(figures.grad_norm, norm, rtol=1e-5)
    assert norm < 0.98 * float(optax.tree.norm(gradients))  # which the frozen would have raised
    np.testing.assert_allclose(figures.loss, steps.run(case).metrics.loss, rtol=1e-5)


@pytest.mark.parametrize("how", HOW, ids=str)
def test_no_state_is_held_for_what_is_frozen(how):
    made = make(**how)
    names = by_name(made.abstract_state.opt_state)
    held = lambda name: [key for key in names if f".{name}" in f".{key}"]
    assert not any(held(name) for name in STAY)
    trained = [n for n in by_name(made.abstract_state.params) if n not in STAY]
    assert all(held(name) for name in trained)
    if not how:  # two moments of 4 bytes, and the counts of three transformations at most
        sizes = {n: x.size for n, x in by_name(made.abstract_state.params).items()}
        found = sum(x.nbytes for x in jax.tree.leaves(run()[2].opt_state) if x.ndim)
        assert found == 8 * sum(sizes[name] for name in trained)


def test_moments_lie_like_their_parameters():
    how = HOW[-1]
    made, state = make(**how), run(**how)[2]
    mesh = made.batch_sharding.mesh
    wanted = by_name(parameter_shardings(train_step.abstract_decoder(MODEL), mesh, zero=True))
    moments = {n: x for n, x in by_name(state.opt_state).items() if ".mu." in f".{n}"}
    assert len(moments) == len(wanted) - len(STAY)
    for name, x in moments.items():
        of = next(n for n in wanted if name.endswith(n))
        assert x.sharding.is_equivalent_to(wanted[of], x.ndim), name
        assert "kernel" not in name or len({s.index for s in x.addressable_shards}) == 4, name


def test_the_moments_in_8_bits_are():
    moments = by_name(run(**HOW[1])[2].opt_state).items()
    assert any(x.dtype.itemsize == 1 for name, x in moments if ".gate.kernel." in name)


def flops(frozen, **how):
    made = make(frozen, **how)
    lowered = made.step.lower(made.abstract_state, abstract_batch(made, ROWS, LENGTH))
    return sum(m.flops * m.count for m in matmuls(hlo.parse(lowered.compile(QUICK).as_text())))


def test_gradients_of_what_is_frozen_are_not_computed():
    tokens, kernels = ROWS * LENGTH, by_name(make().abstract_state.params)
    sizes = [x.size for name, x in kernels.items() if name.endswith("kernel")]
    whole, layers = flops(()), flops(("layers.*",))
    assert whole - layers == 2 * tokens * sum(sizes)
    # Nothing below the output head: no backward pass through the layers at all.
    assert flops(("embedding", "layers.*")) < layers - 2 * tokens * sum(sizes)


@pytest.mark.parametrize(
    ("frozen", "message"),
    [
        (
            ("embedding", "layers.0.qeury.kernel"),
            r"'layers.0.qeury.kernel' matches no parameter; nearest are layers.0.query.kernel",
        ),
        (("layers.2.*",), r"'layers.2.\*' matches no parameter; nearest are .*layers.0"),
        (("*",), r"patterns \* match every parameter: none is trained"),
        (("layers.*", "[!l]*"), r"patterns layers.\*, \[!l\]\* match every parameter"),
    ],
)
def test_patterns_that_cannot_work(frozen, message):
    with pytest.raises(ValueError, match=message) as error:
        make(frozen)
    assert "\n" not in str(error.value)
