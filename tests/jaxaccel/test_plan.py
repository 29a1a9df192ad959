"""The report of a real training step, against sums made by hand."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import pytest

from jaxaccel import hlo, optim, plan
from jaxaccel.matmuls import reductions
from jaxaccel.nn import DecoderConfig, flops_per_token, parameter_count
from jaxaccel.timeline import CostModel
from jaxaccel.train_step import BATCH_KEYS, StepConfig, make_train_step
from pallas_kernels import target

DECODER = DecoderConfig(
    vocab_size=1000, layers=3, width=256, heads=4, kv_heads=2, head_size=64, mlp_width=520
)
B, T = 8, 256
KEYS = (
    "target config peak_gib parameters_gib optimizer_gib gradients_gib activations_gib "
    "temporaries_gib dominant advice matmuls collectives exposed_fraction modelled_step_ms "
    "modelled_mfu flops_per_step recompute_flops_fraction mtp_parameters_share mtp_flops_share "
    "pipeline uncovered"
).split()


@functools.cache
def analysed(place):
    options = {
        "h200": StepConfig(precision="float16", remat="selective"),
        "h200x8": StepConfig(precision="bfloat16", remat="full"),
    }
    where = target.parse(place)
    mesh = where.mesh({"stage": 1, "data": 1, "fsdp": where.count, "sequence": 1, "tensor": 1})
    optimizer = optim.adamw(optim.OptimizerConfig(learning_rate=1e-3, warmup_steps=2), 10)
    step = make_train_step(DECODER, optimizer, options[place], mesh)
    shape = jax.ShapeDtypeStruct((B, T), jnp.int32, sharding=step.batch_sharding)
    compiled = where.compile(step.step, step.abstract_state, dict.fromkeys(BATCH_KEYS, shape))
    state = step.abstract_state
    flops = flops_per_token(DECODER, T) * B * T
    analysis = plan.analyse(
        compiled,
        state.params,
        state.opt_state,
        CostModel(where),
        config="small",
        model_flops=flops,
    )
    return analysis, compiled


def test_a_step_on_one_gpu():
    analysis, compiled = analysed("h200")
    report = analysis.report
    count = parameter_count(DECODER)
    assert report.parameters_gib * 2**30 == 4 * count
    assert report.gradients_gib * 2**30 == 4 * count
    # Two moments of each, and the schedule's counts of steps.
    assert 8 * count <= report.optimizer_gib * 2**30 <= 8 * count + 16
    stats = compiled.memory_analysis()
    assert report.temporaries_gib * 2**30 == stats.temp_size_in_bytes
    assert report.peak_gib > report.parameters_gib + report.optimizer_gib + report.activations_gib
    assert report.dominant == (
        "activations" if report.activations_gib > 4 * 4 * count / 2**30 else "static"
    )
    assert report.collectives == report.uncovered == ()
    assert report.exposed_fraction == 0
    assert set(report.matmuls) == {"fp8", "bf16", "f16", "f32", "fp8_lost", "kernels"}
    assert report.matmuls["fp8"] == report.matmuls["fp8_lost"] == 0
    assert 0 < report.modelled_mfu < 1
    assert analysis.xla_remats == ()
    # Attention over whole tiles, and padding, are more than the model's own.
    model = flops_per_token(DECODER, T) * B * T
    assert 0.9 * model < report.flops_per_step < 1.6 * model
    saved = sum(s.shape.bytes for s in analysis.saved)
    assert saved == pytest.approx(report.activations_gib * 2**30)


def test_json_has_exactly_the_promised_keys():
    report = analysed("h200x8")[0].report
    again = json.loads(json.dumps(report.to_json()))
    assert list(again) == KEYS
    assert again["target"] == "h200x8"
    assert {tuple(c) for c in again["collectives"]} == {
        ("kind", "bytes", "count", "hidden_fraction")
    }


def test_eight_gpus_hold_an_eighth_and_talk():
    one = analysed("h200")[0].report
    eight = analysed("h200x8")[0].report
    assert eight.parameters_gib == pytest.approx(one.parameters_gib / 8, rel=0.01)
    kinds = {c.kind for c in eight.collectives}
    assert {"all-gather", "reduce-scatter"} <= kinds
    assert all(0 <= c.hidden_fraction <= 1 for c in eight.collectives)
    # XLA's partitioner leaves transfers bare: each is one of those counted above.
    moved = {c.kind: c.bytes for c in eight.collectives}
    bare = [u.bytes * u.count for u in eight.uncovered]
    assert bare == sorted(bare, reverse=True) and 0 < sum(bare) < sum(moved.values())
    assert all(plan.FEW_NUMBERS <= u.bytes <= moved[u.kind] and u.op_name for u in eight.uncovered)
    assert 0 < eight.exposed_fraction < 1
    assert eight.recompute_flops_fraction > 0.1
    assert eight.activations_gib < one.activations_gib / 8


@pytest.mark.parametrize(("place", "dtype"), [("h200x8", "bf16"), ("h200", "f16")])
def test_matmuls_are_16_bit_and_sums_float32(place, dtype):
    analysis, compiled = analysed(place)
    layers = [m for m in analysis.matmuls if "/while/body" in m.op_name]
    assert layers
    assert {m.dtype for m in layers} == {dtype}
    sums = [r for r in reductions(hlo.parse(compiled.as_text())) if "reduce_" in r.op_name]
    assert {r.dtype for r in sums if r.dtype[0] in "bf"} == {"f32"}


def test_bottlenecks():
    report = analysed("h200")[0].report
    cases = {
        ("static", 0.0, 4): ("static",),
        ("activations", 0.2, 4): ("activations", "waiting"),
        ("activations", 0.01, 1): ("activations", "batch"),
    }
    for (dominant, exposed, rows), expected in cases.items():
        changed = dataclasses.replace(report, dominant=dominant, exposed_fraction=exposed)
        assert plan.bottlenecks(changed, rows) == expected
    assert all(plan.TOOLS[name] for names in cases.values() for name in names)
