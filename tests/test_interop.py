"""Every technique alone, with each other one, and all together: what a user relies on holds.

The techniques, and the runs in which each pair of them meets, are in `interop.py`.
"""

import dataclasses
import functools
import itertools
import pathlib
import re
from typing import NamedTuple

import interop
import jax
import numpy as np
import pytest
import steps
from flax import nnx
from interop import ALL_TOGETHER, ELSEWHERE, REFUSED, TECHNIQUES, Names, Setup

from experiments import hf, hf_config
from experiments.checkpoint import Checkpoints
from jaxaccel import optim, overlap, sharding, train_step
from jaxaccel.fp8 import DelayedState
from jaxaccel.nn import DecoderConfig, MtpConfig
from jaxaccel.precision import LossScaleConfig
from jaxaccel.step_config import StepConfig
from jaxaccel.train_step import TrainState, TrainStep

ROWS, LENGTH, STEPS = 16, 16, 10
RATES = {"adamw": 3e-3, "adamw-8bit": 3e-3, "lion": 5e-4, "lion-8bit": 5e-4, "muon": 3e-3}
FALLS = 0.3  # nats, in ten steps on one batch
LOSS_SCALE = LossScaleConfig(initial=2.0**15)  # it does not overflow: no step is left out

COVERING = interop.covering()


@pytest.fixture(autouse=True, scope="module")
def _permutes():
    """At these sizes the cost model would choose plain collectives, with nothing to hide."""
    forms = {"all_gather_matmul": "ring", "matmul_reduce_scatter": "ring"}
    choose = lambda model, operation, *_, **options: forms.get(operation, "chunked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "choose", choose)
        yield


@functools.cache
def batch() -> dict[str, np.ndarray]:
    return steps.packed(ROWS, LENGTH, interop.LLAMA.vocab_size, 4)


def make(of: Setup) -> TrainStep:
    sizes = dict.fromkeys(sharding.AXES, 1) | dict.fromkeys(of.axes, 2)
    mesh = sharding.make_mesh(sizes, jax.devices()[: 2 ** len(of.axes)])
    rates = optim.OptimizerConfig(RATES[of.optimizer], "constant", 0, name=of.optimizer)
    config = StepConfig(**dict(of.step), loss_scale=LOSS_SCALE)
    return train_step.make_train_step(of.model, optim.make(rates, STEPS), config, mesh)


NO_HEADS = MtpConfig()


@functools.cache
def parameters(model: DecoderConfig, mtp: MtpConfig) -> dict:
    """Of which every one matters; small enough to leave attention soft."""
    random = np.random.default_rng(1)

    def draw(path, x):
        noise = random.standard_normal(x.shape, np.float32)
        scale = path[-1].key == "scale" and not model.zero_centered_norm
        return np.float32(0.1) * noise + np.float32(scale)

    shapes = nnx.to_pure_dict(nnx.state(train_step.abstract_decoder(model, mtp=mtp)))
    return jax.tree_util.tree_map_with_path(draw, shapes)


@functools.cache
def released(model: DecoderConfig, root: pathlib.Path) -> hf.Weights:
    """The parameters as a folder of Hugging Face's format, found again."""
    content = hf_config.write(model, LENGTH, "float32")
    folder = root / content["model_type"]
    hf.save(folder, parameters(model, NO_HEADS), hf_config.parse(content), dtype="float32")
    described = hf_config.read(folder)
    assert described.model == model
    return hf.find(folder, described.model)


@functools.cache
def scales() -> np.ndarray:
    """FP8 scales of a matmul's three operands, which one device finds: the largest of all."""
    of = interop.techniques(frozenset({"fp8 delayed"}))
    made = make(of)
    state = made.init(jax.random.key(0), parameters(of.model, NO_HEADS))
    found = made.warm_up(state, made.place(batch())).fp8
    each = [x.scale for x in jax.tree.leaves(found, is_leaf=is_delayed)]
    return np.max([np.reshape(x, (-1, 3)).max(0) for x in each], axis=0)


def is_delayed(node) -> bool:
    return isinstance(node, DelayedState)


def start(of: Setup, made: TrainStep, root: pathlib.Path) -> TrainState:
    """The state that `init` makes of given parameters; FP8 scales as steps before left them."""
    params = parameters(of.model, dict(of.step).get("mtp", NO_HEADS))
    where = jax.tree.map(lambda x: x.sharding, made.abstract_state)
    if of.folder:  # heads that predict further ahead are not in it
        params = params | hf.load(released(of.model, root), made.batch_sharding.mesh)
    state = made.init(jax.random.key(0), jax.device_put(params, where.params))
    scaled = np.float32([1, 1, state.loss_scale.scale])  # gradients, the third, are scaled up
    warm = lambda x: dataclasses.replace(x, scale=x.scale + 2 * scales() * scaled)
    fp8 = jax.tree.map(warm, jax.device_get(state.fp8), is_leaf=is_delayed)
    return dataclasses.replace(state, fp8=jax.device_put(fp8, where.fp8))


def kinds(tree) -> list:
    """Shape, dtype and sharding of each array."""
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree)


def bits(tree) -> dict[str, bytes]:
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(tree))
    return {jax.tree_util.keystr(path): np.asarray(x).tobytes() for path, x in leaves}


class Result(NamedTuple):
    losses: list[float]  # of the next token: before each of ten steps, and after the last
    skipped: int


@functools.cache
def run(of: Setup, root: pathlib.Path) -> Result:
    """Ten steps on one batch, a checkpoint, and one step more from either side of it.

    What holds for all runs is asserted here.
    """
    made = make(of)
    state = start(of, made, root)
    given, expected = made.place(batch()), kinds(made.abstract_state)
    assert kinds(state) == expected
    coded = any(x.dtype == np.uint8 for x in jax.tree.leaves(state.opt_state))
    assert coded == of.optimizer.endswith("-8bit")
    before, losses = bits(state.params), []
    for _ in range(STEPS):
        state, metrics = made.step(state, given)
        losses.append(metrics.loss)
        assert kinds(state) == expected
    after, skipped = bits(state), int(metrics.skipped)
    folder = root / f"run-{len(list(root.iterdir()))}"
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(STEPS, state, {}, wait=True)
        restored = checkpoints.restore(made.abstract_state)
    assert bits(restored.state) == after and kinds(restored.state) == expected
    trained = bits(state.params)
    losses.append(made.step(state, given)[1].loss)
    assert made.step(restored.state, given)[1].loss == losses[-1]
    assert made.step._cache_size() == 1  # of programs; of another kind of state there were two
    frozen = "freeze" in dict(of.step)
    still = {
        key for key in before if frozen and key.endswith(("['embedding']", "['key']['kernel']"))
    }
    assert {key for key, x in before.items() if x == trained[key]} == still
    return Result([float(x) for x in losses], skipped)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("interop")


def assert_as_plain(names: Names, root: pathlib.Path) -> None:
    """Losses are within the techniques' bounds of the plain ones, and fall."""
    found, expected = run(interop.techniques(names), root), run(interop.plain(names), root)
    losses, wanted = found.losses, expected.losses
    assert np.isfinite(losses).all() and found.skipped == 0
    assert losses[-1] < losses[0] - FALLS
    for at, bound in zip((0, -1), interop.bounds(names)):
        np.testing.assert_allclose(losses[at], wanted[at], rtol=bound, atol=0)


@pytest.mark.parametrize("name", TECHNIQUES)
def test_each_alone(root, name):
    names = interop.alone(name)
    assert_as_plain(names, root)
    if any(TECHNIQUES[name].bounds):  # it does something
        assert run(interop.techniques(names), root) != run(interop.plain(names), root)


@pytest.mark.parametrize("names", COVERING, ids=lambda names: "+".join(sorted(names)))
def test_each_with_each_other(root, names):
    assert_as_plain(names, root)


def test_all_together(root):
    assert_as_plain(ALL_TOGETHER, root)


# --- the table --------------------------------------------------------------------------


def test_every_pair_meets():
    groups = {name: technique.group for name, technique in TECHNIQUES.items()}
    unlike = {pair for pair in interop.pairs(TECHNIQUES) if len({groups[n] for n in pair}) == 2}
    possible = {pair for pair in unlike if interop.possible(interop.closed(pair))}
    assert possible == unlike - REFUSED.keys()  # no pair is left out for want of devices
    runs = [ALL_TOGETHER, *COVERING, *map(interop.alone, TECHNIQUES)]
    assert all(map(interop.possible, runs))
    met = set().union(*(interop.pairs(interop.stand_ins(run)) for run in runs))
    assert interop.all_pairs() == {pair for pair in met if pair in possible}
    assert len(COVERING) < 50
    assert set().union(*COVERING) == set(TECHNIQUES) - {"float32", "remat none"}
    assert len(ALL_TOGETHER) > max(map(len, COVERING))


@pytest.mark.parametrize("names", REFUSED, ids=lambda names: "+".join(sorted(names)))
def test_what_is_refused(names):
    with pytest.raises(ValueError, match=re.escape(REFUSED[names])) as error:
        make(interop.techniques(interop.closed(names)))
    assert "\n" not in str(error.value)
    for fewer in itertools.combinations(names, len(names) - 1):  # not for one of them alone
        assert interop.possible(interop.closed(fewer))


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_a_cpu_cannot_run(name):
    message, where = ELSEWHERE[name]
    made = make(interop.setup([{"remat": name.removeprefix("remat ")}]))
    with pytest.raises(ValueError, match=message):
        made.step.lower(made.abstract_state, train_step.abstract_batch(made, ROWS, LENGTH))
    file, test = where.split("::")
    assert f"def {test}(" in (pathlib.Path(__file__).parent / file).read_text()
