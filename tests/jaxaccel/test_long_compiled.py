"""Memory of long programs, compiled for an H200: of one layer, and of the loss in a whole step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from experiments.configs import load
from experiments.plan import compile_step
from jaxaccel import hlo, losses, nn, target

pytestmark = pytest.mark.target


def one_layer(length):
    """Temporaries in bytes, and the program."""
    model = nn.DecoderConfig(256, 1, width=512, heads=4, kv_heads=2, head_size=128, mlp_width=1024)
    build = lambda: nn.Decoder(model, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    graphdef, state = nnx.split(jax.eval_shape(build))

    def loss(params, tokens, segments):
        hidden = nnx.merge(graphdef, params)(tokens, segments_BT=segments)
        return jnp.sum(hidden.astype(jnp.float32) ** 2)

    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    step = jax.jit(jax.value_and_grad(loss))
    made = target.parse("h200").compile(step, nnx.to_pure_dict(state), tokens, tokens)
    return made.memory_analysis().temp_size_in_bytes, hlo.parse(made.as_text())


def test_memory_is_linear_and_no_square_is_held():
    short, _ = one_layer(16384)
    long, program = one_layer(32768)
    assert long < 2.1 * short
    nodes = [n for c in program.computations.values() for n in c.instructions.values()]
    kernels = [node.op_name for node in nodes if hlo.is_kernel(node)]
    assert sum("attention_" in name for name in kernels) == 3
    assert all("attention_" in name or "rms_norm_" in name for name in kernels)
    largest = max(shape.bytes for node in nodes for shape in node.shapes)
    assert largest < 32768**2 // 4  # not even a quarter of a byte for each pair


@pytest.mark.slow
def test_the_peak_falls_by_what_the_loss_held(monkeypatch):
    """Under full recomputation the loss is where memory peaks."""

    def peak():
        config = dataclasses.replace(load("llama-1b3"), precision="bfloat16", batch=4, remat="full")
        return compile_step(config, target.parse("h200")).peak_bytes

    kernels = peak()
    on_xla = functools.partial(losses.linear_cross_entropy, implementation="xla")
    monkeypatch.setattr(losses, "linear_cross_entropy", on_xla)
    chunks = peak()
    model = load("llama-1b3").model
    logits = 4 * losses.chunk_positions(4, model.vocab_size) * model.vocab_size
    held = logits * (4 + 2)  # in float32, and their gradient in bfloat16
    predicted = held - 2 * 4 * 4096 * 3584  # the kernels hold the gradient of so many words
    assert chunks - kernels == pytest.approx(predicted, rel=0.1)  # small arrays are left out
