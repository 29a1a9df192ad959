"""Counts of programs that are written so that the right count is known.

The contracting dimensions divide by 128: XLA may cut a matmul there, and pads the last piece.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxaccel import hlo, hlo_loops, matmuls
from pallas_kernels import target

H200 = target.parse("h200")


def shape(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype)


def compiled(function, *arguments):
    return hlo.parse(H200.compile(jax.jit(function), *arguments).as_text())


def work(module):
    return sum(m.flops * m.count for m in matmuls.matmuls(module))


@pytest.mark.parametrize(
    ("spec", "left", "right", "flops"),
    [
        ("mk,kn->mn", (136, 512), (512, 264), 2 * 136 * 512 * 264),
        ("bmk,bkn->bmn", (3, 72, 128), (3, 128, 264), 2 * 3 * 72 * 128 * 264),
        ("km,nk->mn", (512, 136), (264, 512), 2 * 136 * 512 * 264),
    ],
)
def test_a_matmul_counts_its_flop(spec, left, right, flops):
    module = compiled(lambda a, b: jnp.einsum(spec, a, b), shape(*left), shape(*right))
    assert work(module) == flops


def test_loops_multiply():
    """Three matmuls 5 x 3 times, one 5 times, one once."""

    def program(x, w):
        def inner(x, _):
            for _ in range(3):
                x = jnp.tanh(x @ w)
            return x, None

        def outer(x, _):
            return jnp.tanh(lax.scan(inner, x, None, length=3)[0] @ w), None

        return lax.scan(outer, x, None, length=5)[0] @ w

    module = compiled(program, shape(136, 256), shape(256, 256))
    assert work(module) == 2 * 136 * 256 * 256 * (5 * 3 * 3 + 5 + 1)
    assert sum(m.count for m in matmuls.matmuls(module)) == 5 * 3 * 3 + 5 + 1
    assert hlo_loops.guessed_loops(module) == ()


def test_a_loop_that_the_device_ends_is_guessed_and_named():
    """It walks 2,048 rows in slices of 128: at most 16 turns, 8.5 under a causal mask."""

    def program(x, w, last):
        def turn(i, total):
            rows = lax.dynamic_slice_in_dim(x, i * 128, 128)
            return total + rows @ w

        return lax.fori_loop(0, last, turn, jnp.zeros((128, 264), jnp.bfloat16))

    module = compiled(program, shape(2048, 512), shape(512, 264), shape(dtype=jnp.int32))
    assert work(module) == 8.5 * 2 * 128 * 512 * 264
    (name,) = hlo_loops.guessed_loops(module)
    assert "8.5" in name


def test_a_conditional_counts_its_costliest_branch():
    def program(p, x, w):
        return lax.cond(p, lambda: jnp.tanh(x @ w) @ w, lambda: x @ w)

    module = compiled(program, shape(dtype=jnp.bool_), shape(136, 256), shape(256, 256))
    assert work(module) == 2 * 2 * 136 * 256 * 256


CUBLAS = """HloModule m, is_scheduled=true, num_partitions=2
ENTRY %main (a: f8e4m3fn[32,64], b: f8e5m2[48,64], s: f32[]) -> bf16[32,48] {
  %a = f8e4m3fn[32,64]{1,0} parameter(0)
  %b = f8e5m2[48,64]{1,0} parameter(1)
  %s = f32[] parameter(2)
  %c = (bf16[32,48]{1,0}, s8[1024]{0}) custom-call(%a, %b, %s, %s), \
custom_call_target="__cublas$lt$matmul$f8", backend_config={"gemm_backend_config":\
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}}}
  ROOT %r = bf16[32,48]{1,0} get-tuple-element(%c), index=0
}"""


def test_a_call_of_cublas_is_a_matmul():
    """cuBLAS is chosen by measuring, which a machine without a GPU does not do."""
    module = hlo.parse(CUBLAS)
    (matmul,) = matmuls.matmuls(module)
    assert (matmul.dtype, matmul.flops, matmul.was_fp8) == ("fp8", 2 * 32 * 64 * 48, False)
    assert module.devices == 2
    assert matmuls.unpriced(module) == ()


KERNEL = """ENTRY %main (a: bf16[32,64]) -> bf16[32,64] {
  %a = bf16[32,64]{1,0} parameter(0)
  ROOT %k = bf16[32,64]{1,0} custom-call(%a), custom_call_target="mosaic_gpu_v2", \
metadata={op_name="jit(f)/norm"}, backend_config={COST}
}"""
COST = r'cost_estimate_json = "{\22flops\22: 640, \22bytes_accessed\22: 96}", kernel_hash = "\C4}"'


def test_a_pallas_kernel_counts_by_its_own_estimate():
    (kernel,) = matmuls.matmuls(hlo.parse(KERNEL.replace("COST", COST)))
    assert kernel.kernel
    assert (kernel.dtype, kernel.flops) == ("bf16", 640)


def test_a_pallas_kernel_without_an_estimate_is_named():
    module = hlo.parse(KERNEL.replace("COST", 'kernel_hash = "a"'))
    assert matmuls.matmuls(module) == ()
    assert matmuls.unpriced(module) == ('"mosaic_gpu_v2" jit(f)/norm',)


@pytest.mark.parametrize(
    ("dtype", "bits"), [("f8e4m3fn", 8), ("s4", 4), ("bf16", 16), ("pred", 8), ("c64", 64)]
)
def test_bits(dtype, bits):
    assert hlo.bits(dtype) == bits


def test_text_without_a_program_is_refused():
    with pytest.raises(ValueError, match="no entry computation"):
        hlo.parse("")
