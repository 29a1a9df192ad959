"""The gated activation: simulated, built and run; and who computes it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from jaxaccel import numerics
from pallas_kernels import backend, inspect, target
from pallas_kernels import swiglu as op
from pallas_kernels.build import build_all
from pallas_kernels.swiglu import swiglu, swiglu_fp8, swiglu_reference

BF16, F32 = jnp.bfloat16, jnp.float32
CAST = 0.01


def data(shape, dtype=BF16):
    """gate, up, and the gradient of the output."""
    keys = jax.random.split(jax.random.key(len(shape)), 3)
    return [2 * jax.random.normal(key, shape, dtype) for key in keys]


def values_and_gradients(fn, gate, up, dy):
    out, pullback = jax.vjp(fn, gate, up)
    return out, *pullback(dy)


def check(shape, dtype=BF16):
    """At most twice the error of plain JAX in the same dtype, thrice for gradients."""
    args = data(shape, dtype)
    kernel = partial(swiglu, implementation="mosaic_gpu")
    got = jax.jit(partial(values_and_gradients, kernel))(*args)
    exact = values_and_gradients(swiglu_reference, *(a.astype(F32) for a in args))
    naive = values_and_gradients(lambda gate, up: jax.nn.silu(gate) * up, *args)
    for number, (a, b, c) in enumerate(zip(got, exact, naive, strict=True)):
        assert (a.shape, a.dtype) == (c.shape, c.dtype)
        rounding = float(jnp.finfo(dtype).eps) * float(jnp.abs(b).max()) * (dtype == F32)
        assert error(a, b) <= (3 if number else 2) * error(c, b) + rounding
        assert float(jnp.abs(b).max()) > 0.1


def error(x, exact):
    return float(jnp.abs(x.astype(F32) - exact).max())


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3, 5), BF16), ((2, 7, 123), F32), ((3, 4096), BF16), ((2, 5, 2048), jnp.float16)],
)
def test_simulated(shape, dtype):
    """Part of a piece, pieces with a part left over, one a warpgroup, several of one."""
    with backend.simulate(), backend.counted_traffic() as moved:
        check(shape, dtype)
    sizes = op.Sizes(int(np.prod(shape)), jnp.dtype(dtype).itemsize)
    parts = sizes.forward_traffic(), sizes.backward_traffic()
    assert moved.loads == sum(part.loads for part in parts)
    assert moved.stores == sum(part.stores for part in parts)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 5), (4099, 123), (4096, 8192)])
def test_run(shape):
    check(shape)


def test_eight_bits_are_the_cast_of_the_float32_output():
    gate, up, dy = data((6, 1024))
    gate = gate.at[0, 0].set(20.0)

    def run(implementation):
        def both(gate, up):
            y = swiglu_fp8(gate, up, jnp.float32(CAST), implementation=implementation)
            return y.like, (y.values, y.amax)

        like, pullback, aux = jax.vjp(both, gate, up, has_aux=True)
        return like, aux, pullback(dy)

    run = jax.jit(run, static_argnums=0)
    with backend.simulate(), backend.counted_traffic() as moved:
        like, (values, amax), gradients = jax.block_until_ready(run("mosaic_gpu"))
    sizes = op.Sizes(gate.size, 2, fp8=True)
    assert moved.stores == sizes.forward_traffic().stores + sizes.backward_traffic().stores
    assert (like.shape, like.dtype, values.dtype) == (gate.shape, BF16, jnp.float8_e4m3fn)
    assert not like.any()
    y = swiglu_reference(gate.astype(F32), up.astype(F32))
    np.testing.assert_allclose(amax, jnp.abs(y).max(), rtol=1e-6)
    want = numerics.cast(y, jnp.float32(CAST), "e4m3").astype(F32)
    assert float(jnp.abs(want).max()) == 448 and float(amax) > 448 * CAST  # it saturates
    # Where float32 rounds to the other side of a midpoint, one step of e4m3 is between them.
    got = values.astype(F32)
    assert np.all(np.abs(got - want) <= np.abs(want) / 8) and np.mean(got == want) > 0.99
    _, (_, other_amax), others = run("xla")
    np.testing.assert_allclose(amax, other_amax, rtol=1e-6)
    for a, b in zip(gradients, others, strict=True):
        assert float(jnp.abs(b).max()) > 0.1
        np.testing.assert_allclose(a.astype(F32), b.astype(F32), rtol=0.01, atol=1e-4)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_seen(value):
    """In the output, in its magnitude, and in eight bits, as in XLA."""
    gate, up = (jnp.ones((1, 2048), BF16).at[0, 7].set(v) for v in (value, 2.0))
    run = lambda how: swiglu_fp8(gate, up, jnp.float32(1), implementation=how)
    with backend.simulate():
        got = jax.jit(partial(run, "mosaic_gpu"))()
    want = run("xla")
    assert np.array_equal(np.asarray(got.amax), np.asarray(want.amax), equal_nan=True)
    assert not np.isfinite(got.amax)
    values = got.values.astype(F32)
    np.testing.assert_array_equal(values, want.values.astype(F32))
    assert np.isnan(values[0, 7]) and np.isnan(values).sum() == 1


def test_large_gates_overflow_nothing():
    gate = jnp.tile(jnp.array([-3e38, -200.0, -88.0, 0.0, 88.0, 3e38]), 2)
    up = jnp.ones(12)
    run = partial(values_and_gradients, partial(swiglu, implementation="mosaic_gpu"))
    with backend.simulate():
        y, dgate, _ = jax.jit(run)(gate, up, up)
    np.testing.assert_allclose(y, jnp.where(gate > 0, gate, 0.0), atol=1e-30)
    np.testing.assert_allclose(dgate[:6], [0, 0, 0, 0.5, 1, 1], atol=1e-30)


@pytest.mark.parametrize("elements", [4096 * 2048, 4096 * 12288])
def test_traffic_is_the_least_possible(elements):
    assert op.Sizes(elements, 2).forward_traffic().total == 6 * elements
    assert op.Sizes(elements, 2, fp8=True).forward_traffic().total <= 1.001 * 5 * elements
    assert op.Sizes(elements, 2).backward_traffic().total == 10 * elements


def test_a_missing_fence_is_a_race(monkeypatch):
    monkeypatch.setattr(plgpu, "commit_smem", lambda: None)
    with pytest.raises(Exception, match="RACE DETECTED"), backend.simulate():
        check((2, 2048))


def test_a_wrong_sigmoid_is_an_error(monkeypatch):
    monkeypatch.setattr(op, "LOG2_E", 1.0)
    with pytest.raises(AssertionError), backend.simulate():
        check((1, 2048))


@pytest.mark.target
def test_built_without_spills():
    programs = [(function, args) for _, function, _, args, _, _ in op.cases()]
    for built in build_all(programs, target.parse("h200")):
        assert built.spill_bytes == 0 and not built.warnings and built.tma > 0
        assert built.shared_memory_bytes <= 227 * 1024
        assert built.registers * built.threads <= 65536


def kernels_of(compiled):
    text = compiled.as_text()
    return [line for line in text.splitlines() if "custom-call" in line and "mosaic_gpu" in line]


@pytest.mark.target
def test_the_device_that_is_lowered_for_decides():
    def kernels(name, shape, **options):
        x = jax.ShapeDtypeStruct(shape, BF16)
        run = partial(values_and_gradients, partial(swiglu, **options))
        return len(kernels_of(target.parse(name).compile(jax.jit(run), x, x, x)))

    assert kernels("h200", (2, 3, 2048)) == 2
    assert kernels("h200", (2, 3, 2000)) == 0  # XLA needs no padding
    assert kernels("a100", (2, 3, 2048)) == 0
    with pytest.raises(NotImplementedError, match=r"needs a Hopper GPU.*lowered for NVIDIA B200"):
        kernels("b200", (2048,), implementation="mosaic_gpu")


@pytest.mark.target
def test_eight_bits_leave_no_trace_of_like():
    """What carries the gradient is never made: one kernel, and no 16 bits an element."""
    x = jax.ShapeDtypeStruct((4096, 2048), BF16)
    scale = jax.ShapeDtypeStruct((), F32)
    run = jax.jit(lambda *args: swiglu_fp8(*args)[1:])
    made = target.parse("h200").compile(run, x, x, scale)
    assert len(kernels_of(made)) == 1
    assert made.memory_analysis().temp_size_in_bytes < 2**16


@pytest.mark.target
def test_each_device_of_a_shard_map_runs_the_kernels():
    gpus = target.parse("h200x2")
    mesh = gpus.mesh({"data": 2})
    x = jax.ShapeDtypeStruct((8, 2048), BF16, sharding=jax.NamedSharding(mesh, P("data")))

    def loss(gate, up, scale):
        y = swiglu_fp8(gate, up, scale)
        return jax.lax.psum(jnp.sum(y.like.astype(F32)) + y.amax, "data")

    over = jax.shard_map(loss, mesh=mesh, in_specs=(P("data"), P("data"), P()), out_specs=P())
    step = jax.jit(jax.value_and_grad(over, argnums=(0, 1)))
    scale = jax.ShapeDtypeStruct((), F32, sharding=jax.NamedSharding(mesh, P()))
    assert len(kernels_of(gpus.compile(step, x, x, scale))) == 2


def test_without_a_gpu_it_is_the_reference():
    gate, up, dy = data((2, 3, 2048), F32)
    got = jax.jit(partial(values_and_gradients, swiglu))(gate, up, dy)
    want = values_and_gradients(swiglu_reference, gate, up, dy)
    also = values_and_gradients(lambda gate, up: jax.nn.silu(gate) * up, gate, up, dy)
    for a, b, c in zip(got, want, also, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(a, c, rtol=1e-5, atol=1e-6)


def test_transformations():
    gate, up, _ = data((3, 2, 5))
    want = swiglu_reference(gate, up)
    np.testing.assert_array_equal(jax.vmap(swiglu)(gate, up), want)
    _, scanned = jax.lax.scan(lambda c, x: (c, swiglu(*x)), None, (gate, up))
    np.testing.assert_array_equal(scanned, want)


def test_no_elements():
    y = swiglu_fp8(jnp.zeros((0, 4)), jnp.zeros((0, 4)), jnp.float32(1))
    assert y.values.shape == (0, 4) and float(y.amax) == 0


@pytest.mark.parametrize(
    ("up", "cast_scale", "how", "message"),
    [
        (jnp.ones(5), None, None, r"got gate, up float32\[4\], float32\[5\]; need the same"),
        (jnp.ones(4, BF16), None, None, r"got gate, up float32\[4\], bfloat16\[4\]"),
        (jnp.ones(4), jnp.ones(1), None, r"got cast_scale float32\[1\]; need float32\[\]"),
        (jnp.ones(4), None, "triton", "unknown implementation 'triton'"),
    ],
)
def test_mistakes_are_told_in_one_line(up, cast_scale, how, message):
    """Past the annotations, which only tests check."""
    with pytest.raises(ValueError, match=message) as caught:
        op._checked(how, jnp.ones(4), up, cast_scale)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_the_workbench_simulates_all_cases():
    for case in op.cases(N=12, F=1024):
        assert 0 <= inspect.simulate(inspect.Case(*case)) <= inspect.MAX_ERROR
