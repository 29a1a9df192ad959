"""What a step in 16 bits computes in which type, counted in programs for an H200 and an A100.

On the H200 attention and the loss are Pallas kernels, on the A100 XLA's.
"""

import dataclasses
import math

import pytest

from experiments.configs import load
from experiments.plan import compile_step
from jaxaccel import hlo, matmuls, target
from pallas_kernels.cross_entropy import mosaic

pytestmark = pytest.mark.target

LAYERS, BATCH, LENGTH = 2, 4, 128


@pytest.fixture(scope="module", params=["bfloat16-h200", "float16-a100"])
def program(request):
    precision, gpu = request.param.split("-")
    tiny = load("tiny")
    config = dataclasses.replace(
        tiny,
        model=dataclasses.replace(tiny.model, layers=LAYERS),
        batch=BATCH,
        sequence=LENGTH,
        remat="none",
        precision=precision,
    )
    made = compile_step(config, target.parse(gpu))
    short = {"bfloat16": "bf16", "float16": "f16"}[precision]
    return config.model, short, hlo.parse(made.program.as_text())


def test_every_matmul_is_16_bit(program):
    model, short, module = program
    found = matmuls.matmuls(module)
    assert {m.dtype for m in found} == {short}
    assert not any(m.was_fp8 for m in found)
    # XLA merges what shares an input; the FLOP stay, forward and two matmuls back.
    projections = model.width * model.head_size * 2 * (model.heads + model.kv_heads)
    weights = LAYERS * (projections + 3 * model.width * model.mlp_width)
    tokens = BATCH * LENGTH
    loss = 6 * tokens * model.width * model.vocab_size
    rows = LAYERS * BATCH * model.heads
    if any(m.kernel for m in found):
        # They state what the causal mask leaves, with heads of 32 padded to 64: two products
        # forward, three for dQ, four for dK and dV.
        # Theirs of the loss make the logits twice, of whole tiles; XLA does the rest with these.
        attention = (2 + 3 + 4) * 2 * 64 * rows * LENGTH * (LENGTH + 1) // 2
        size, width = mosaic.padded(tokens, 128), mosaic.padded(model.width, 64)
        once = math.prod(mosaic.FORWARD.slices(width, model.vocab_size))
        thrice = math.prod(mosaic.BACKWARD.slices(max(size, width), model.vocab_size))
        loss = 2 * size * width * (once + 3 * thrice)
    else:
        attention = (2 + 5) * 2 * model.head_size * rows * LENGTH**2
    expected = 6 * tokens * weights + loss + attention
    assert sum(m.count * m.flops for m in found) == expected


def test_softmax_norms_and_loss_reduce_in_float32(program):
    model, _, module = program
    found = matmuls.reductions(module)
    # Integers count tokens and the blocks that a kernel visits.
    assert {r.dtype for r in found} <= {"f32", "s32", "pred"}

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
    if not any(m.kernel for m in matmuls.matmuls(module)):
        scores = BATCH * model.heads * LENGTH**2
        assert count("reduce_max", scores) == count("reduce_sum", scores) == LAYERS
        logits = tokens * model.vocab_size
        assert count("reduce_max", logits) == count("reduce_sum", logits) == 1
    assert count("reduce_sum", tokens * model.width) == 2 * LAYERS + 1  # norm statistics
    assert count("reduce_sum", tokens) == 1  # of the losses themselves
