"""The norm and its written backward pass against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rms_norm import rms_norm, rms_norm_reference

SHAPES = [(5,), (3, 1), (2, 7, 33), (2, 3, 5, 8), (0, 4), (1, 1)]


def data(shape, dtype=jnp.float32, scale_dtype=jnp.float32):
    rng = np.random.default_rng(0)
    x = jnp.asarray(3 * rng.normal(size=shape), dtype)
    scale = jnp.asarray(1 + 0.5 * rng.normal(size=shape[-1]), scale_dtype)
    g = jnp.asarray(rng.normal(size=shape), dtype)
    return x, scale, g


def gradients(fn, x, scale, g, epsilon):
    out, pullback = jax.vjp(lambda x, scale: fn(x, scale, epsilon), x, scale)
    return out, *pullback(g)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("epsilon", [1e-5, 0.5])
def test_value_and_gradients_are_those_of_the_reference(shape, epsilon):
    args = data(shape)
    got = jax.jit(gradients, static_argnums=(0, 4))(rms_norm, *args, epsilon)
    for a, b in zip(got, gradients(rms_norm_reference, *args, epsilon)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, atol=2e-6, rtol=1e-5)
    if np.prod(shape) > 5:
        assert all(np.linalg.norm(a) > 0.1 for a in got)


def test_the_reference_is_the_formula():
    x, scale, _ = data((4, 9))
    x64, scale64 = np.asarray(x, np.float64), np.asarray(scale, np.float64)
    want = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 0.1) * scale64
    np.testing.assert_allclose(rms_norm_reference(x, scale, 0.1), want, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_rounds_once(dtype):
    """Statistics in float32: at most twice the error of rounding the exact result."""
    x, scale, g = data((6, 65), dtype)
    exact = gradients(rms_norm_reference, *(a.astype(jnp.float32) for a in (x, scale, g)), 1e-5)
    got = gradients(rms_norm, x, scale, g, 1e-5)
    assert [a.dtype for a in got] == [dtype, dtype, jnp.float32]
    for a, want in zip(got, exact):
        rounded = np.abs(want.astype(dtype).astype(jnp.float32) - want).max()
        assert np.abs(a.astype(jnp.float32) - want).max() <= 2 * rounded


def test_a_row_of_zeros_is_no_nan():
    x, scale, g = jnp.zeros((2, 6)), jnp.ones(6), jnp.ones((2, 6))
    assert all(np.isfinite(a).all() for a in gradients(rms_norm, x, scale, g, 1e-5))


def test_large_values_of_float16_do_not_overflow():
    x = jnp.full((1, 8), 6e4, jnp.float16)
    np.testing.assert_allclose(rms_norm(x, jnp.ones(8), 1e-5), 1, rtol=1e-3)


def test_scale_may_have_a_dtype_of_its_own():
    x, scale, g = data((3, 4), jnp.bfloat16, jnp.bfloat16)
    _, d_x, d_scale = gradients(rms_norm, x, scale, g, 1e-5)
    assert (d_x.dtype, d_scale.dtype) == (jnp.bfloat16, jnp.bfloat16)


def test_works_under_vmap_and_scan():
    x, scale, _ = data((3, 4, 5))
    want = rms_norm(x, scale, 1e-5)
    np.testing.assert_allclose(jax.vmap(lambda x: rms_norm(x, scale, 1e-5))(x), want, rtol=1e-6)
    scanned = jax.lax.scan(lambda c, x: (c, rms_norm(x, scale, 1e-5)), 0, x)[1]
    np.testing.assert_allclose(scanned, want, rtol=1e-6)
