"""Operand types, FP8 that was lost, recomputation, float32 sums: planted, then counted."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxaccel import hlo
from jaxaccel.matmuls import FP8_SCOPE, matmuls, reductions, xla_remats
from pallas_kernels import target

H200 = target.parse("h200")
M, K, N = 128, 256, 512
E4M3, E5M2, BF16, F16, F32 = (
    jnp.float8_e4m3fn,
    jnp.float8_e5m2,
    jnp.bfloat16,
    jnp.float16,
    jnp.float32,
)


def shape(*dims, dtype=BF16):
    return jax.ShapeDtypeStruct(dims, dtype)


def compiled(function, *arguments):
    return hlo.parse(H200.compile(jax.jit(function), *arguments).as_text())


def dot(a, b, out=BF16):
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=out)


@pytest.mark.parametrize(
    ("left", "right", "dtype", "lost"),
    [
        (E4M3, E4M3, "fp8", False),
        (E5M2, E4M3, "fp8", False),
        (E4M3, BF16, "bf16", True),
        (E4M3, F32, "f32", True),
        (BF16, BF16, "bf16", False),
        (F16, F16, "f16", False),
        (F32, F32, "f32", False),
    ],
)
def test_operand_types(left, right, dtype, lost):
    out = F32 if F32 in (left, right) else BF16
    module = compiled(
        functools.partial(dot, out=out), shape(M, K, dtype=left), shape(K, N, dtype=right)
    )
    (found,) = matmuls(module)
    assert (found.dtype, found.was_fp8, found.recomputed) == (dtype, lost, False)


def test_dequantised_by_rows_before_the_matmul_is_lost():
    def program(a, b, scale):
        return dot(a.astype(BF16) * scale[:, None], b.astype(BF16))

    (found,) = matmuls(
        compiled(program, shape(M, K, dtype=E4M3), shape(K, N, dtype=E4M3), shape(M))
    )
    assert (found.dtype, found.was_fp8) == ("bf16", True)


def test_fp8_that_feeds_other_arithmetic_first_is_not_lost():
    """The matmul reads the activation function's bfloat16 and was never meant to be FP8."""
    program = lambda a, b: dot(jnp.tanh(a.astype(BF16)), b)
    (found,) = matmuls(compiled(program, shape(M, K, dtype=E4M3), shape(K, N)))
    assert (found.dtype, found.was_fp8) == ("bf16", False)


def test_one_lost_matmul_among_stacked_fp8_weights():
    """Weights are FP8 and stacked over 5 layers; the second matmul of a layer forgets x."""

    def layer(x, w):
        x = dot(x.astype(E4M3), w)
        return jnp.tanh(dot(jnp.tanh(x), w)), None

    program = lambda x, w: lax.scan(layer, x, w)[0]
    found = matmuls(compiled(program, shape(M, K), shape(5, K, K, dtype=E4M3)))
    counts = {(m.dtype, m.was_fp8): m.count for m in found}
    assert counts == {("fp8", False): 5, ("bf16", True): 5}


def test_a_cast_that_xla_removed_is_lost_by_its_scope():
    def program(a, b):
        with jax.named_scope(FP8_SCOPE):
            return dot(a.astype(E4M3), b)

    (found,) = matmuls(compiled(program, shape(M, K), shape(K, N)))
    assert (found.dtype, found.was_fp8) == ("bf16", True)


def layer(x, w):
    hidden = checkpoint_name(x @ w[0], "hidden")
    return x + jnp.tanh(hidden) @ w[1], None


POLICIES = jax.checkpoint_policies


@pytest.mark.parametrize(
    ("policy", "repeated"),
    [
        # Two matmuls forward and four backward; the layer's last is never repeated.
        (POLICIES.everything_saveable, 0),
        (POLICIES.save_only_these_names("hidden"), 0),
        (POLICIES.nothing_saveable, 1),
    ],
)
def test_recomputed_matmuls(policy, repeated):
    body = jax.checkpoint(layer, policy=policy)
    loss = lambda w, x: jnp.sum(lax.scan(body, x, w)[0].astype(F32))
    w = (shape(5, K, N), shape(5, N, K))
    found = matmuls(compiled(jax.grad(loss), w, shape(M, K)))
    assert sum(m.count for m in found) == 5 * (6 + repeated)
    assert sum(m.count for m in found if m.recomputed) == 5 * repeated
    assert {m.flops for m in found} == {2 * M * K * N}


def test_sums_of_16_bit_numbers_in_float32():
    def program(x):
        y = x.astype(F32)
        y = y / jnp.sqrt(jnp.mean(y * y, -1, keepdims=True))
        return jax.nn.softmax(y.astype(BF16).astype(F32), -1).astype(BF16)

    found = reductions(compiled(program, shape(M, 5000)))
    by_row = [r for r in found if r.inputs >= M * 5000 / 10]
    assert {r.dtype for r in by_row} == {"f32"}
    assert any("reduce_max" in r.op_name for r in found)
    assert any("reduce_sum" in r.op_name for r in found)


def test_instructions_that_xla_repeats():
    text = """ENTRY %e (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %remat2.1 = f32[4]{0} negate(%x)
  %tanh.3.remat = f32[4]{0} tanh(%remat2.1)
  ROOT %add.5.remat2.1 = f32[4]{0} add(%tanh.3.remat, %x)
}"""
    assert xla_remats(hlo.parse(text)) == ("tanh.3.remat", "add.5.remat2.1")
