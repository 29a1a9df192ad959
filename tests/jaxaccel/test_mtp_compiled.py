"""What heads add to a program for an H200: no array of the vocabulary's size; FP8 stays FP8.

Many words, few tokens, a small width: an array of words by width, or the logits, stands out.
"""

import dataclasses
import functools

import pytest

from experiments.configs import load
from experiments.plan import compile_step
from jaxaccel import hlo, matmuls, target
from jaxaccel.nn import MtpConfig

pytestmark = pytest.mark.target

MODEL = dataclasses.replace(
    load("llama-1b3").model, vocab_size=65536, layers=2, width=256, heads=2, kv_heads=1,
    head_size=128, mlp_width=512,
)  # fmt: skip
ROWS, LENGTH = 2, 256
LOSS = ("linear_cross_entropy",)


@functools.cache
def program(kind, depth):
    """Temporaries in bytes, and matmuls, with FP8 by delayed scaling."""
    config = dataclasses.replace(
        load("llama-1b3"), model=MODEL, precision="bfloat16", fp8="delayed",
        batch=ROWS, sequence=LENGTH, mtp=MtpConfig(depth, kind),
    )  # fmt: skip
    made = compile_step(config, target.parse("h200")).program
    temporaries = made.memory_analysis().temp_size_in_bytes
    return temporaries, matmuls.matmuls(hlo.parse(made.as_text()))


def of_layers(found):
    """Executions by operand type; not those of the loss, whose slices shrink as rows get more."""
    counts = {}
    for m in found:
        if not any(name in m.op_name for name in LOSS):
            counts[m.dtype, m.kernel] = counts.get((m.dtype, m.kernel), 0) + m.count
    return counts


@pytest.mark.parametrize(
    ("kind", "depths"),
    [
        ("parallel", (1, 4)),
        pytest.param("sequential", (1, 2, 4), marks=pytest.mark.slow),
        pytest.param("parallel", (1, 2, 4), marks=pytest.mark.slow),
    ],
)
def test_memory_does_not_grow_by_the_vocabulary(kind, depths):
    """All heads more add less than one tensor [V, D] in 16 bits, or half of the logits of one."""
    held = [program(kind, depth)[0] for depth in depths]
    assert max(held) - held[0] < 2 * MODEL.vocab_size * MODEL.width
    assert max(held) - held[0] < 2 * MODEL.vocab_size * ROWS * LENGTH / 2


def test_parallel_heads_multiply_as_often_for_four_as_for_one():
    """All in FP8 but attention, three kernels a layer (the heads are one), and the loss."""
    one, four = (program("parallel", depth)[1] for depth in (1, 4))
    assert of_layers(one) == of_layers(four)
    assert of_layers(four).keys() == {("fp8", False), ("bf16", True)}
    assert of_layers(four)["bf16", True] == 3 * (MODEL.layers + 1)
    flops = [sum(m.count * m.flops for m in found if m.dtype == "fp8") for found in (one, four)]
    assert flops[1] / flops[0] == pytest.approx((MODEL.layers + 4) / (MODEL.layers + 1))
    assert not any(m.was_fp8 for m in (*one, *four))


@pytest.mark.slow
def test_sequential_heads_are_in_fp8():
    for depth in (1, 2):
        found = program("sequential", depth)[1]
        assert of_layers(found).keys() == {("fp8", False), ("bf16", True)}
        assert of_layers(found)["bf16", True] == 3 * (MODEL.layers + depth)
        assert not any(m.was_fp8 for m in found)
