"""Every matmul of a converted layer is FP8 in the program for an H200, and memory does not grow."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from experiments.configs import load
from experiments.plan import compile_step
from jaxaccel import fp8, hlo, hlo_bytes, matmuls, names, nn, target

pytestmark = pytest.mark.target

# What stays in 16 bits: attention, which is kernels here, and the head's three matmuls.
HEAD = ("btd,vd->btv", "btv,btd->vd", "btv,vd->btd", "linear_cross_entropy")


@functools.cache
def program(gpus="h200", **options):
    """`llama-1b3` compiled; temporaries in bytes, and the program."""
    config = dataclasses.replace(load("llama-1b3"), precision="bfloat16", **options)
    made = compile_step(config, target.parse(gpus)).program
    memory = made.memory_analysis()
    return memory.temp_size_in_bytes, hlo.parse(made.as_text())


def linear_flops(config, tokens):
    """Of the layers' matmuls in one pass."""
    return 2 * tokens * config.layers * sum(k * n for k, n in nn.linear_shapes(config).values())


def strangers(found):
    """Matmuls that are neither FP8, nor the head's, nor attention's; and all lost FP8."""
    attention = lambda m: m.kernel and "attention_" in m.op_name
    expected = lambda m: m.dtype == "fp8" or attention(m) or any(s in m.op_name for s in HEAD)
    return [m for m in found if not expected(m) or m.was_fp8]


def check(found, model, tokens, repeated=0.0):
    """XLA merges matmuls of a common input; the FLOP stay: forward and two matmuls back."""
    assert not strangers(found)
    flops = sum(m.count * m.flops for m in found if m.dtype == "fp8")
    assert flops == (3 + repeated) * linear_flops(model, tokens)


MODEL = load("llama-1b3").model
ROW = load("llama-1b3").sequence
ADAM_8BIT = dataclasses.replace(load("llama-1b3").optimizer, name="adamw-8bit")
STACK = {"fp8": "delayed", "optimizer": ADAM_8BIT}
SLOW = pytest.mark.slow


def turned(module):
    """Arrays of all layers' weights with the inner dim last, which the matmul of one wants."""
    stacks = {(n, MODEL.layers, k) for k, n in nn.linear_shapes(MODEL).values()}
    nodes = (node for c in module.computations.values() for node in c.instructions.values())
    return [s for node in nodes for s in node.shapes if s.dims in stacks]


def test_current_with_selective_recomputation_and_its_memory():
    """A peer's FP8 kept operands twice and needed 1.66 times the memory of bfloat16."""
    plain, wide = program(batch=4)
    temporaries, found = program(batch=4, fp8="current")
    check(matmuls.matmuls(found), MODEL, 4 * ROW)
    assert temporaries <= 1.02 * plain
    assert not turned(found)
    assert len(strangers(matmuls.matmuls(wide))) >= 16  # the check can fail


@pytest.mark.parametrize("options", [{}, {"fp8": "delayed"}], ids=["bfloat16", "fp8"])
def test_65536_tokens_a_step_under_full_recomputation(options):
    """The best peers, compiled the same way, need 35.3 GiB in bfloat16 and 36.9 in FP8."""
    config = dataclasses.replace(load("llama-1b3"), precision="bfloat16", remat="full", **options)
    assert config.batch * config.sequence == 65_536
    assert 30 * 2**30 < compile_step(config, target.parse("h200")).peak_bytes <= 34 * 2**30


@pytest.mark.parametrize(
    ("where", "options", "lowest", "bar"),
    [
        ("h200x8", {"batch": 128}, 12, 13),
        pytest.param("h200x8", STACK | {"batch": 128, "micro_batches": 4}, 5, 7, marks=SLOW),
        pytest.param("h200", STACK | {"micro_batches": 16}, 16, 20, marks=SLOW),
    ],
    ids=["eight GPUs", "eight GPUs, full stack", "one GPU, full stack"],
)
def test_65536_tokens_a_device_whose_loop_gathers_ahead_and_sums_in_place(
    where, options, lowest, bar
):
    """The best peer, compiled the same way, needs 14.3 GiB on eight; 5.7 of its 8.8 are bare."""
    preset = dataclasses.replace(load("llama-1b3"), precision="bfloat16", remat="full")
    config = dataclasses.replace(preset, overlap="fsdp-prefetch", **options)
    report = compile_step(config, target.parse(where)).analyse("").report
    assert lowest < report.peak_gib <= bar
    assert sum(u.bytes * u.count for u in report.uncovered) <= 2**30


def casts(module, size):
    """Casts in a layer to e4m3 arrays of `size`, kernels and mere copies left out."""
    found = hlo_bytes.passes(module, size, written="f8e4m3fn")
    wide = lambda p: any(not t.startswith("f8") for t in p.read_types)
    return sum(p.count for p in found if wide(p) and not p.kernel) / MODEL.layers


def test_norms_and_activation_write_fp8_themselves():
    """What is left is the cast of what attention found; weights are of another size."""
    _, fused = program("h200x8", batch=16, fp8="delayed", remat="none")
    _, apart = program(batch=4, fp8="current")  # its scales are known only after a pass
    of = lambda module, rows: [
        casts(module, rows * ROW * width) for width in (MODEL.width, MODEL.mlp_width)
    ]
    assert of(fused, 2) == [1, 0]
    wide, mlp = of(apart, 4)
    assert wide >= 3 and mlp >= 1


def check_gathers(module):
    """Weights are gathered, and in e4m3."""
    gathered = [
        shape
        for computation in module.computations.values()
        for node in computation.instructions.values()
        if node.opcode.startswith("all-gather") and not node.opcode.endswith("done")
        for shape in node.shapes
    ]
    weights = [s for s in gathered if s.dims in nn.linear_shapes(MODEL).values()]
    assert weights and {s.dtype for s in weights} == {"f8e4m3fn"}


def test_on_eight_gpus_without_recomputation():
    _, module = program("h200x8", batch=16, fp8="delayed", remat="none")
    check(matmuls.matmuls(module), MODEL, 2 * ROW)  # of one device's rows
    check_gathers(module)


# Gathers of delayed weights are checked above; with recomputation too under slow.
@pytest.mark.parametrize("recipe", ["current", pytest.param("delayed", marks=pytest.mark.slow)])
def test_on_eight_gpus_with_recomputation(recipe):
    _, module = program("h200x8", batch=16, fp8=recipe, remat="full")
    found = matmuls.matmuls(module)
    assert not strangers(found)
    flops = sum(m.count * m.flops for m in found if m.dtype == "fp8")
    once = linear_flops(MODEL, 2 * ROW)  # of one device's rows
    assert 3 * once < flops <= 4 * once  # recomputation leaves out what nobody reads
    check_gathers(module)


@pytest.mark.slow
def test_delayed_without_recomputation_on_one_gpu():
    """What each of eight runs as well, less the gathers."""
    _, module = program(batch=4, fp8="delayed", remat="none")
    check(matmuls.matmuls(module), MODEL, 4 * ROW)


def unrolled(body, carry, xs):
    """`jax.lax.scan` as a Python loop."""
    for i in range(2):
        carry, _ = body(carry, jax.tree.map(lambda x, i=i: x[i], xs))
    return carry, None


def two_layers(**arguments):
    """The gradient of two layers of a small decoder, without a scan."""
    model = dataclasses.replace(MODEL, layers=2, width=512, mlp_width=1024, vocab_size=256)
    build = lambda: nn.Decoder(
        model, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, scan=unrolled, **arguments
    )
    graphdef, *state = nnx.split(jax.eval_shape(build), nnx.Param, nn.NextValue)
    shapes = [nnx.to_pure_dict(s) for s in state]

    def loss(params, matmul_state, tokens):
        hidden = nnx.merge(graphdef, params, matmul_state)(tokens)
        return jnp.sum(hidden.astype(jnp.float32) ** 2)

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    tokens = jax.ShapeDtypeStruct((2, 512), jnp.int32)
    compiled = target.parse("h200").compile(step, *shapes, tokens)
    return model, matmuls.matmuls(hlo.parse(compiled.as_text()))


# In CI the mismatch below is planted among delayed ones; both are checked in a scan above.
@pytest.mark.parametrize(
    "recipe",
    [*(pytest.param(r, marks=pytest.mark.slow) for r in ("current", "delayed")), "block"],
)
def test_without_a_scan(recipe):
    model, found = two_layers(dot_general=fp8.dot_general(recipe))
    check(found, model, 2 * 512)
    if recipe == "block":  # kernels, one for each matmul
        scaled = [m for m in found if m.dtype == "fp8"]
        assert sum(m.count for m in scaled) == 3 * 2 * len(nn.linear_shapes(model))
        assert not any(m.kernel for m in scaled)


def test_a_planted_mismatch_is_caught():
    """One layer casts one operand only: XLA widens the other without a word.

    All other matmuls are FP8, delayed, and without a scan.
    """

    def careless(lhs, rhs, dims):
        (cast,) = jax.tree.leaves(fp8.quantize_weights(rhs, fp8.dot_general()))[:1]
        with jax.named_scope(names.FP8_MATMUL):
            return jax.lax.dot_general(lhs, cast.astype(lhs.dtype), dims)

    dots = dict.fromkeys(nn.linear_shapes(MODEL), fp8.dot_general("delayed"))
    model, found = two_layers(dot_general=dots | {"up": careless})
    lost = strangers(found)
    assert lost and all(m.was_fp8 for m in lost)
    flops = 2 * 2 * 512 * math.prod(nn.linear_shapes(model)["up"])
    assert sum(m.count * m.flops for m in lost) == 3 * 2 * flops  # of two layers
    kept = sum(m.count * m.flops for m in found if m.dtype == "fp8")
    assert kept == 3 * linear_flops(model, 2 * 512) - 3 * 2 * flops
