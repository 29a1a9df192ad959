"""The loop of a pipeline on a small model of its own: what runs when, and what comes of it."""

import functools
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import AxisType, PartitionSpec

from jaxaccel import pipeline
from jaxaccel.pipeline import Parts
from jaxaccel.schedules import IDLE, schedule

STAGES, WORDS, WIDTH, LAYERS, TOKENS = 4, 11, 6, 8, 3


def first(table, micro_batch):
    return table[micro_batch["tokens"]]


def layers(kernels, x, micro_batch):
    def layer(x, kernel):
        return x + jnp.tanh(x @ kernel) * micro_batch["scale"], None

    return jax.lax.scan(jax.checkpoint(layer), x, kernels["kernel"])[0]


def last(head, x, micro_batch):
    likelihood = jax.nn.log_softmax(x @ head)
    nll = -jnp.take_along_axis(likelihood, micro_batch["tokens"][:, None], 1).sum()
    return nll * micro_batch["weight"], {"nll": nll, "count": jnp.ones(())}


PLAIN = Parts(first, layers, last)


def model(micro_batches):
    random = np.random.default_rng(0)
    draw = lambda *shape: random.normal(size=shape).astype(np.float32) * 0.4
    weights = Parts(draw(WORDS, WIDTH), draw(LAYERS, WIDTH, WIDTH), draw(WIDTH, WORDS))
    batch = {
        "tokens": random.integers(0, WORDS, (micro_batches, TOKENS)).astype(np.int32),
        "scale": draw(micro_batches),
        "weight": draw(micro_batches),
        "index": np.arange(micro_batches, dtype=np.int32),
    }
    return weights, batch


def in_pipeline(plan, function, weights, batch):
    """A partial of `gradients` or `sums` on a mesh of stages; each has its own runs of layers."""
    mesh = jax.make_mesh((STAGES,), ("stage",), (AxisType.Auto,), devices=jax.devices()[:STAGES])
    by_run = weights.layers.reshape(plan.chunks, STAGES, -1, WIDTH, WIDTH)
    run = np.arange(plan.chunks * STAGES).reshape(plan.chunks, STAGES)
    kernels = {"kernel": by_run.swapaxes(0, 1), "run": run.T.astype(np.float32)}
    whole, cut = PartitionSpec(), PartitionSpec("stage")

    def local(weights, batch):
        mine = jax.tree.map(lambda x: x[0], weights.layers)
        found = function(weights=weights._replace(layers=mine), batch=batch, schedule=plan)
        sums, found = found if function.func is pipeline.gradients else (found, None)
        together = lambda tree: jax.lax.psum(tree, "stage")
        if found is None:
            return together(sums), None
        stacked = jax.tree.map(lambda x: x[None], found.layers)
        return together(sums), Parts(together(found.first), stacked, together(found.last))

    specs = Parts(whole, cut, whole)
    out_specs = whole, specs if function.func is pipeline.gradients else None
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(specs, whole), out_specs=out_specs)
    sums, found = jax.jit(mapped)(weights._replace(layers=kernels), batch)
    if found is not None:
        kernel = np.asarray(found.layers["kernel"]).swapaxes(0, 1)
        found = found._replace(layers=kernel.reshape(LAYERS, WIDTH, WIDTH))
    return sums, found


@functools.cache
def expected(micro_batches):
    weights, batch = model(micro_batches)

    def total(weights):
        one = lambda mb: last(
            weights.last, layers({"kernel": weights.layers}, first(weights.first, mb), mb), mb
        )
        objectives, sums = jax.vmap(one)(batch)
        return objectives.sum(), jax.tree.map(jnp.sum, sums)

    (_, sums), gradients = jax.value_and_grad(total, has_aux=True)(weights)
    return sums, gradients


SCHEDULES = [
    ("gpipe", 4, 1, False), ("gpipe", 5, 1, True), ("1f1b", 4, 1, True), ("1f1b", 16, 1, False),
    ("1f1b", 2, 1, False), ("interleaved", 16, 2, False), ("interleaved", 7, 2, True),
]  # fmt: skip


@pytest.mark.parametrize("how", SCHEDULES, ids=str)
def test_sums_and_gradients_are_those_without_a_pipeline(how):
    kind, count, chunks, delayed = how
    plan = schedule(kind, STAGES, count, chunks=chunks, delayed=delayed)
    weights, batch = model(count)
    found = in_pipeline(plan, partial(pipeline.gradients, PLAIN), weights, batch)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected(count)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=5e-6)
    forward = Parts(first, layers, lambda *args: last(*args)[1])
    sums, _ = in_pipeline(plan, partial(pipeline.sums, forward), weights, batch)
    np.testing.assert_allclose(sums["nll"], expected(count)[0]["nll"], rtol=1e-6)
    assert sums["count"] == count


@pytest.mark.parametrize("how", [SCHEDULES[i] for i in (1, 3, 6)], ids=str)
def test_what_runs_is_what_the_schedule_says(how, monkeypatch):
    kind, count, chunks, delayed = how
    plan = schedule(kind, STAGES, count, chunks=chunks, delayed=delayed)
    ticks, events = Counter(), []

    def begin(stage, runs):  # a new tick of a stage
        ticks[int(stage)] += 1
        return np.bool_(runs)

    def when(what, runs, *branches, plain=pipeline._when):
        if what == "forward":
            stage, kind = jax.lax.axis_index("stage"), jax.ShapeDtypeStruct((), bool)
            runs = jax.lax.pcast(io_callback(begin, kind, stage, runs), ("stage",), to="varying")
        return plain(what, runs, *branches)

    def note(what, run, micro_batch):
        stage = int(run) % STAGES
        events.append((what, ticks[stage] - 1, stage, int(run) // STAGES, int(micro_batch)))

    @jax.custom_vjp
    def watched(x, run, micro_batch):
        return x

    def forward(x, run, micro_batch):
        jax.debug.callback(note, "F", run, micro_batch)
        return x, (run, micro_batch)

    def backward(known, g):
        jax.debug.callback(note, "B", *known)
        return g, jnp.zeros_like(known[0]), None

    watched.defvjp(forward, backward)
    monkeypatch.setattr(pipeline, "_when", when)
    parts = Parts(first, lambda w, x, mb: layers(w, watched(x, w["run"], mb["index"]), mb), last)
    weights, batch = model(count)
    jax.block_until_ready(in_pipeline(plan, partial(pipeline.gradients, parts), weights, batch))
    jax.effects_barrier()
    said = []
    for what, runs, run_chunks in (
        ("F", plan.ticks.forward, plan.ticks.forward_chunk),
        ("B", plan.ticks.backward, plan.ticks.backward_chunk),
    ):
        said += [
            (what, int(t), int(s), int(run_chunks[t, s]), int(runs[t, s]))
            for t, s in np.argwhere(runs != IDLE)
        ]
    assert sorted(events) == sorted(said)
    assert len(said) == 2 * count * STAGES * chunks
    assert set(ticks.values()) == {len(plan.ticks.forward)} and len(ticks) == STAGES


def test_sizes_that_are_not_the_schedules_are_refused():
    plan = schedule("1f1b", STAGES, 4)
    weights, batch = model(5)
    call = partial(pipeline.gradients, PLAIN)
    with pytest.raises(ValueError, match=r"got \[5\] micro-batches; the schedule has 4"):
        in_pipeline(plan, call, weights, batch)
    with pytest.raises(ValueError, match=r"got \[4\] devices of 'stage'; the schedule has 2"):
        in_pipeline(schedule("1f1b", 2, 5), call, weights, batch)

    def twice(*, weights, **rest):
        twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), weights.layers)
        return pipeline.gradients(PLAIN, weights._replace(layers=twice), **rest)

    with pytest.raises(ValueError, match=r"got \[2\] runs of layers; the schedule has 1"):
        in_pipeline(schedule("1f1b", STAGES, 5), partial(twice), weights, batch)
