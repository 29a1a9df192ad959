"""Steps whose collectives are written out, compiled for eight H200s: what travels, beside what."""

import functools
import math
import re
from collections import defaultdict
from typing import NamedTuple

import optax
import pytest

from jaxaccel import hlo, sharding, train_step
from jaxaccel.nn import DecoderConfig, parameter_count
from jaxaccel.train_step import StepConfig
from jaxaccel.windows import Window, windows
from pallas_kernels import target

pytestmark = pytest.mark.target

X8 = target.parse("h200x8")
LAYERS, WIDTH, HEADS, SIZE, MLP, WORDS, LENGTH = 4, 512, 8, 64, 1024, 64, 256
MODEL = DecoderConfig(
    vocab_size=WORDS, layers=LAYERS, width=WIDTH, heads=HEADS, kv_heads=HEADS, head_size=SIZE,
    mlp_width=MLP,
)  # fmt: skip
# Bytes: of a layer's matrices in bfloat16, of its two norms in float32, of a table in bfloat16.
MATRICES = 2 * (4 * WIDTH * HEADS * SIZE + 3 * WIDTH * MLP)
NORMS, TABLE = 2 * 4 * WIDTH, 2 * WORDS * WIDTH


class Program(NamedTuple):
    windows: tuple[Window, ...]
    text: str

    def bytes(self):
        """Of all collectives, by kind; what is no more than a few numbers apart."""
        found = defaultdict(float)
        for w in self.windows:
            found[w.kind if w.bytes > 64 else "numbers"] += w.bytes * w.count
        return dict(found)

    def of_loops(self, kind):
        """Those that a loop over layers repeats."""
        return [w for w in self.windows if w.count > 1 and w.kind == kind]


@functools.cache
def compiled(mesh, rows, **options):
    on = X8.mesh(sharding.parse_mesh(mesh, 8))
    config = StepConfig(precision="bfloat16", attention="xla", clip_norm=math.inf, **options)
    made = train_step.make_train_step(MODEL, optax.sgd(1.0), config, on)
    batch = train_step.abstract_batch(made, rows, LENGTH)
    text = X8.compile(made.step, made.abstract_state, batch).as_text() or ""
    return Program(windows(hlo.parse(text)), text)


def prefetch():
    return compiled("fsdp=8", 8, overlap="fsdp-prefetch", remat="full")


def buckets():
    return compiled("data=8", 16, overlap="buckets", remat="full", micro_batches=2)


def domino():
    return compiled("tensor=8", 2, overlap="domino", remat="selective")


def test_prefetch_hides_every_gather_and_reduction_of_its_loops():
    program = prefetch()
    gathers, reductions = map(program.of_loops, ("all-gather", "reduce-scatter"))
    # Forward all layers but the last, backward all but the last two and the first.
    assert sum(w.bytes * w.count for w in gathers) == (2 * LAYERS - 3) * (MATRICES + NORMS)
    assert sum(w.bytes * w.count for w in reductions) == (LAYERS - 2) * (MATRICES + NORMS)
    assert all(w.matmuls and not w.synchronous for w in gathers + reductions)


def test_prefetch_sends_each_layer_twice_and_its_gradient_once():
    rows, norm = LENGTH * 2 * WIDTH, 4 * WIDTH  # a device's activations, the last norm
    found = prefetch().bytes()
    assert found.pop("numbers") <= 64
    assert found == {
        "all-gather": (2 * LAYERS - 1) * (MATRICES + NORMS) + TABLE + norm + 4 * 8 * LENGTH,
        "reduce-scatter": LAYERS * (MATRICES + NORMS) + TABLE + norm,
        "all-to-all": 2 * rows,  # the embedding, and its gradient
    }


def test_prefetch_keeps_no_stack_of_gathered_weights():
    """Whole, a layer's `up` is [512, 1024]; of its shards and gradients there is an eighth."""
    stacks = re.findall(rf"\w+\[(?:\d+,)+(?:{WIDTH},{MLP}|{MLP},{WIDTH})\]", prefetch().text)
    assert not stacks
    assert f"bf16[{WIDTH},{MLP}]" in prefetch().text


def test_buckets_reduce_each_parameter_once_in_all_micro_batches():
    program = buckets()
    numbers = sum(w.bytes * w.count for w in program.windows) - 4 * parameter_count(MODEL)
    assert {w.kind for w in program.windows} == {"all-reduce"} and 0 <= numbers <= 64
    layers = program.of_loops("all-reduce")
    assert sum(w.bytes * w.count for w in layers) == (LAYERS - 2) * (2 * MATRICES + NORMS)
    assert all(w.matmuls and not w.synchronous for w in layers)


def test_domino_hides_its_sums():
    """Forward four halves a layer; backward XLA may join the two halves of a sum."""
    layers = domino().of_loops("all-reduce")
    half = LENGTH * 2 * WIDTH
    for backward in (False, True):
        ours = [w for w in layers if ("transpose" in w.op_name) == backward]
        assert sum(w.bytes for w in ours) == 4 * half
        assert sum(w.bytes for w in ours if w.matmuls and not w.synchronous) >= 3 * half


def test_domino_sends_no_more_than_plain_tensor_parallelism():
    """Of [B, T, D]: four sums a layer, the embedding's, that of the head's gradient, and the half
    that is pending at the loop's border, in each pass."""
    whole, loss = 2 * LENGTH * 2 * WIDTH, 3 * 4 * 2 * LENGTH
    found = domino().bytes()
    assert found.pop("numbers") <= 64
    assert found == {"all-reduce": (4 * LAYERS + 3) * whole + loss}
