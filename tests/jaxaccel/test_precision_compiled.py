"""What a step in 16 bits computes in which type, counted in a program for an H200."""

import dataclasses

import pytest

from experiments.configs import load
from experiments.plan import compile_step
from jaxaccel import hlo, matmuls, target

pytestmark = pytest.mark.target

LAYERS, BATCH, LENGTH = 2, 4, 128


@pytest.fixture(scope="module", params=["bfloat16", "float16"])
def program(request):
    tiny = load("tiny")
    config = dataclasses.replace(
        tiny,
        model=dataclasses.replace(tiny.model, layers=LAYERS),
        batch=BATCH,
        sequence=LENGTH,
        remat="none",
        precision=request.param,
    )
    made = compile_step(config, target.parse("h200"))
    short = {"bfloat16": "bf16", "float16": "f16"}[request.param]
    return config.model, short, hlo.parse(made.program.as_text())


def test_every_matmul_is_16_bit(program):
    model, short, module = program
    found = matmuls.matmuls(module)
    assert {m.dtype for m in found} == {short}
    assert not any(m.was_fp8 for m in found)
    # XLA merges what shares an input; the FLOP stay, forward and two matmuls back.
    attention = model.width * model.head_size * 2 * (model.heads + model.kv_heads)
    weights = LAYERS * (attention + 3 * model.width * model.mlp_width)
    head = model.width * model.vocab_size
    tokens = BATCH * LENGTH
    scores = LAYERS * BATCH * model.heads * LENGTH**2 * model.head_size
    expected = 6 * tokens * (weights + head) + (2 * 2 + 5 * 2) * scores
    assert sum(m.count * m.flops for m in found) == expected


def test_softmax_norms_and_loss_reduce_in_float32(program):
    model, _, module = program
    found = matmuls.reductions(module)
    assert {r.dtype for r in found} == {"f32", "s32"}  # s32 counts tokens
    assert all(r.inputs == BATCH * LENGTH for r in found if r.dtype == "s32")

    def count(operation, inputs):
        """Executions in the forward pass, which takes the loss's gradient as well."""
        return sum(
            r.count
            for r in found
            if r.dtype == "f32"
            and r.inputs == inputs
            and "/jvp()/" in r.op_name
            and r.op_name.endswith(operation)
        )

    tokens = BATCH * LENGTH
    scores = BATCH * model.heads * LENGTH**2
    assert count("reduce_max", scores) == count("reduce_sum", scores) == LAYERS
    assert count("reduce_sum", tokens * model.width) == 2 * LAYERS + 1  # norm statistics
    logits = tokens * model.vocab_size
    assert count("reduce_max", logits) == count("reduce_sum", logits) == 1
    assert count("reduce_sum", tokens) == 1  # of the losses themselves
