"""One layer at 32,768 positions, forward and backward, compiled for an H200."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxaccel import hlo, nn, target

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
    assert len(kernels) == 3 and all("attention_" in name for name in kernels)
    largest = max(shape.bytes for node in nodes for shape in node.shapes)
    assert largest < 32768**2 // 4  # not even a quarter of a byte for each pair
