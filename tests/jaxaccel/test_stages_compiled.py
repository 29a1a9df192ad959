"""A pipeline's step compiled for eight H200s: what it keeps, and what travels beside what."""

import functools
import math
from typing import NamedTuple

import optax
import pytest

from jaxaccel import hlo, sharding, train_step
from jaxaccel.nn import DecoderConfig
from jaxaccel.schedules import schedule
from jaxaccel.train_step import StepConfig
from jaxaccel.windows import Window, windows
from pallas_kernels import target

pytestmark = pytest.mark.target

X8 = target.parse("h200x8")
LENGTH, WIDTH = 256, 512
MODEL = DecoderConfig(
    vocab_size=64, layers=8, width=WIDTH, heads=8, kv_heads=8, head_size=64, mlp_width=1024
)
ACTIVATIONS = 2 * LENGTH * WIDTH  # bytes of a micro-batch of one row between two stages


class Program(NamedTuple):
    temporaries: int  # bytes
    windows: tuple[Window, ...]


@functools.cache
def compiled(pipeline: str, micro_batches: int, *, delayed_sends: bool = False) -> Program:
    sizes = sharding.parse_mesh("stage=4,fsdp=2", 8)
    config = StepConfig(
        precision="bfloat16", attention="xla", remat="full", clip_norm=math.inf,
        pipeline=pipeline, micro_batches=micro_batches, delayed_sends=delayed_sends,
    )  # fmt: skip
    made = train_step.make_train_step(MODEL, optax.sgd(1.0), config, X8.mesh(sizes))
    rows = micro_batches * sizes["data"] * sizes["fsdp"]
    batch = train_step.abstract_batch(made, rows, LENGTH)
    program = X8.compile(made.step, made.abstract_state, batch)
    found = windows(hlo.parse(program.as_text() or ""))
    return Program(program.memory_analysis().temp_size_in_bytes, found)


def test_1f1b_keeps_what_its_stages_need_and_gpipe_every_micro_batch():
    few, many = compiled("1f1b", 8, delayed_sends=False), compiled("1f1b", 64)
    assert abs(many.temporaries / few.temporaries - 1) < 0.02
    # The inputs of a stage's two layers: of 64 micro-batches instead of seven.
    more = compiled("gpipe", 64).temporaries - many.temporaries
    assert more > (64 - 7) * 2 * ACTIVATIONS


@pytest.mark.parametrize(("kind", "delayed"), [("1f1b", False), ("interleaved", True)])
def test_both_transfers_of_a_tick_have_matmuls_beside_them(kind, delayed):
    found = compiled(kind, 8, delayed_sends=delayed).windows
    chunks = 2 if kind == "interleaved" else 1
    ticks = len(schedule(kind, 4, 8, chunks=chunks, delayed=delayed).ticks.forward)
    sent = [w for w in found if w.kind == "collective-permute"]
    assert [(w.bytes, w.count, w.synchronous) for w in sent] == [(ACTIVATIONS, ticks, False)] * 2
    assert all(w.matmuls for w in sent)


def test_nothing_else_travels_while_stages_run():
    for w in compiled("1f1b", 8, delayed_sends=False).windows:
        assert w.count == 1 or w.kind == "collective-permute", w


def test_interleaved_layers_travel_once_a_step():
    found = compiled("interleaved", 8, delayed_sends=True).windows
    moved = [w for w in found if w.kind == "all-to-all"]
    assert moved and all(w.count == 1 for w in moved)
