"""A pipeline of single matmuls, compiled for GPUs: how often each runs, and what ticks take."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxaccel import hlo, hlo_loops, pipeline, pipeline_times, timeline
from jaxaccel.matmuls import matmuls
from jaxaccel.pipeline import Parts
from jaxaccel.schedules import Times, schedule
from pallas_kernels import target

pytestmark = pytest.mark.target

STAGES, COUNT = 4, 6
ON = target.parse(f"h200x{STAGES}")
MODEL = timeline.CostModel(ON)
# Told apart by their FLOP: of the embedding, a layer, the loss.
ROWS, IN, WIDTH, OUT = 4096, 512, 16384, 24576
FLOPS = {
    "first": 2 * ROWS * IN * WIDTH,
    "layer": 2 * ROWS * WIDTH**2,
    "last": 2 * ROWS * WIDTH * OUT,
}
PARTS = Parts(
    lambda w, mb: mb @ w,
    lambda w, x, mb: jnp.tanh(x @ w),
    lambda w, x, mb: ((s := jnp.tanh(x @ w).astype(jnp.float32).sum()), s),
)
PLANS = {
    "1f1b": schedule("1f1b", STAGES, COUNT),
    "gpipe": schedule("gpipe", STAGES, COUNT, delayed=True),
    "interleaved": schedule("interleaved", STAGES, COUNT, chunks=2),
}


@functools.cache
def compiled(kind):
    plan, mesh = PLANS[kind], ON.mesh({"stage": STAGES})

    def local(weights, batch):
        sums, found = pipeline.gradients(PARTS, weights, batch, plan)
        together = lambda x: lax.psum(x, "stage")
        return together(sums), Parts(together(found.first), found.layers, together(found.last))

    specs = Parts(P(), P("stage"), P())
    program = jax.shard_map(local, mesh=mesh, in_specs=(specs, P()), out_specs=(P(), specs))
    shape = lambda spec, *dims: jax.ShapeDtypeStruct(
        dims, jnp.bfloat16, sharding=NamedSharding(mesh, spec)
    )
    weights = Parts(
        shape(P(), IN, WIDTH),
        shape(P("stage"), plan.chunks * STAGES, WIDTH, WIDTH),
        shape(P(), WIDTH, OUT),
    )
    text = ON.compile(jax.jit(program), weights, shape(P(), COUNT, ROWS, IN)).as_text()
    return hlo.parse(text)


def counts(module):
    """Executions of each part's matmuls."""
    found = matmuls(module)
    assert {m.flops for m in found} <= set(FLOPS.values())
    return {name: sum(m.count for m in found if m.flops == FLOPS[name]) for name in FLOPS}


@pytest.mark.parametrize("kind", PLANS)
def test_matmuls_are_those_of_the_stage(kind):
    """Forward one, backward two: but the embedding's input has no gradient."""
    module, plan = compiled(kind), PLANS[kind]
    layer = 3 * COUNT * plan.chunks
    last = pipeline_times.on_last_stage(module, plan)
    assert counts(last) == {"first": 0, "layer": layer, "last": 3 * COUNT}
    of = lambda stage: hlo_turns(module, plan, stage)
    assert counts(of(0)) == {"first": 2 * COUNT, "layer": layer, "last": 0}
    assert counts(of(1)) == {"first": 0, "layer": layer, "last": 0}
    # Without the schedule, every tick counted as if it had everything.
    ticks = sum(count for count, _ in plan.turns())
    assert counts(module) == {"first": 2 * ticks, "layer": 3 * ticks, "last": 3 * ticks}


def hlo_turns(module, plan, stage):
    turns = pipeline_times.turns(plan, stage)
    return hlo.Module(module.computations, module.entry, module.devices, turns)


@pytest.mark.parametrize("kind", PLANS)
def test_times_are_those_of_the_matmuls(kind):
    module, plan = compiled(kind), PLANS[kind]
    found = pipeline_times.times(module, MODEL, plan)
    rate = MODEL.matmul_rate("bf16")
    layer, last = (FLOPS[name] / rate for name in ("layer", "last"))
    v = plan.chunks
    # Beside the matmul each pass reads and writes slots.
    assert layer * v < found.forward < 1.5 * layer * v
    assert 2 * layer * v < found.backward < 2.6 * layer * v
    assert 3 * last < found.last < 3.5 * last
    sent = MODEL.collective_seconds("collective-permute", 2 * ROWS * WIDTH, 2)
    assert found.transfer == pytest.approx(sent)
    assert found.hides


@pytest.mark.parametrize("kind", PLANS)
def test_the_modelled_step_is_the_sum_of_ticks(kind):
    """Played turn by turn, and added up from the parts: two ways to the same time."""
    module, plan = compiled(kind), PLANS[kind]
    played = timeline.simulate(pipeline_times.in_lock_step(module, plan), MODEL)
    found = pipeline_times.times(module, MODEL, plan)
    # Beside the ticks the program sums two gradients over the stages.
    outside = sum(t.exposed_seconds for t in played.transfers if t.kind == "all-reduce")
    assert played.seconds - outside == pytest.approx(plan.seconds(found), rel=0.05)
    sent = next(t for t in played.transfers if t.kind == "collective-permute")
    assert sent.count == 2 * sum(count for count, _ in plan.turns())
    # As long as if every tick had everything, without the schedule.
    assert timeline.simulate(module, MODEL).seconds > 1.3 * played.seconds


def test_a_conditional_turned_around_is_found_by_its_names():
    """XLA may swap the branches; a branch not taken does nearly nothing."""
    module = compiled("1f1b")
    for name in ("forward", "backward"):
        node = next(
            node
            for computation in module.computations.values()
            for node in computation.instructions.values()
            if node.opcode == "conditional" and hlo_loops.scope(node) == f"pipeline_{name}"
        )
        scope = frozenset([f"pipeline_{name}"])
        taken = hlo_loops.branch(module, node, hlo.Turns(1, scope, frozenset()))
        skipped = hlo_loops.branch(module, node, hlo.Turns(1, frozenset(), scope))
        assert taken == hlo_loops.branch(module, node)  # the costliest
        assert {taken, skipped} == set(node.called)


@pytest.mark.parametrize("kind", PLANS)
def test_slots_are_what_stages_keep(kind):
    """Input and result of a layer, whose derivatives read them."""
    saved = pipeline_times.kept(compiled(kind), PLANS[kind])
    assert [s.shape.dims[1:] for s in saved] == [(ROWS, WIDTH)] * 2
    assert sum(s.shape.bytes for s in saved) == 2 * PLANS[kind].kept * 2 * ROWS * WIDTH


def test_another_schedule_is_refused():
    module = compiled("1f1b")
    other = pipeline_times.in_lock_step(module, schedule("1f1b", STAGES, COUNT + 1))
    with pytest.raises(ValueError, match="turns 12 times, not 13"):
        matmuls(other)
    text = "ENTRY %e (x: f32[4]) -> f32[4] {\n  ROOT %x = f32[4]{0} parameter(0)\n}"
    with pytest.raises(ValueError, match="no conditional from a scope named pipeline_forward"):
        pipeline_times.times(hlo.parse(text), MODEL, PLANS["1f1b"])


def test_the_report_compares_both_ways_to_send():
    plan, times = PLANS["1f1b"], Times(1.0, 2.0, 0.1, last=0.5)
    found = pipeline_times.report(plan, times, 40.0)
    late = schedule("1f1b", STAGES, COUNT, delayed=True)
    assert (found.bubble, found.bubble_delayed) == (pytest.approx(3 / 6), pytest.approx(6 / 6))
    assert found.modelled_step_ms == 40e3
    more = late.seconds(times) - plan.seconds(times)
    assert more > 0
    assert found.modelled_step_delayed_ms == pytest.approx(1e3 * (40 + more))
    assert found.option == "--no-delayed-sends"
    back = pipeline_times.report(late, times, 40 + more)
    assert back.modelled_step_ms == pytest.approx(40e3)
    assert back.modelled_step_delayed_ms == 1e3 * (40 + more)
