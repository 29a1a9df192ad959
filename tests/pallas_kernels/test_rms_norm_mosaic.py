"""The kernels of the norm: simulated, built and run; and who computes it."""

import math
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from jaxaccel import numerics
from pallas_kernels import backend, inspect, rms_norm_kernels, streaming, target
from pallas_kernels import rms_norm as op
from pallas_kernels.build import build_all
from pallas_kernels.rms_norm import rms_norm, rms_norm_fp8, rms_norm_reference

BF16, F32 = jnp.bfloat16, jnp.float32
CAST = 0.01


def data(shape, dtype=BF16, scale_dtype=BF16, residual=True):
    """x, residual, scale, and gradients of total and output."""
    keys = jax.random.split(jax.random.key(len(shape)), 5)
    x, r, dtotal, dy = (jax.random.normal(key, shape, dtype) for key in keys[:4])
    scale = (1 + 0.5 * jax.random.normal(keys[4], shape[-1:])).astype(scale_dtype)
    return (x, r, scale, dtotal, dy) if residual else (x, None, scale, None, dy)


def values_and_gradients(fn, x, residual, scale, dtotal, dy):
    """Total and output; gradients of x, residual and scale (None: no residual)."""

    def run(x, residual, scale):
        out = fn(x, scale, 1e-5, residual=residual)
        return out if residual is not None else (None, out)

    out, pullback = jax.vjp(run, x, residual, scale)
    return out, pullback((dtotal, dy))


def kernel(offset):
    norm = partial(rms_norm, offset=offset, implementation="mosaic_gpu")
    return jax.jit(partial(values_and_gradients, norm))


def check(shape, dtype=BF16, scale_dtype=BF16, residual=True, offset=0.0):
    """At most twice the error of plain JAX in the same dtype, thrice for gradients."""
    args = data(shape, dtype, scale_dtype, residual)
    reference = partial(values_and_gradients, partial(rms_norm_reference, offset=offset))
    wide = jax.tree.map(lambda a: a.astype(F32), args)
    runs = kernel(offset)(*args), reference(*wide), reference(*args)
    got, exact, naive = map(jax.tree.leaves, runs)
    assert [(a.shape, a.dtype) for a in got] == [(a.shape, a.dtype) for a in naive]
    for number, (a, b, c) in enumerate(zip(got, exact, naive, strict=True)):
        # Of the naive program it can be zero by chance, or where nothing is rounded but float32,
        # whose sums round more than once.
        steps = 4 if a.dtype == F32 else 1
        rounding = steps * float(jnp.finfo(a.dtype).eps) * float(jnp.abs(b).max())
        allowed = (2 if number < 1 + residual else 3) * error(c, b) + rounding
        assert error(a, b) <= allowed
        assert float(jnp.abs(b).max()) > 0.1 or shape[-1] == 1


def error(x, exact):
    return float(jnp.abs(x.astype(F32) - exact).max())


def sizes_of(shape, dtype=BF16, scale_dtype=BF16, residual=True, fp8=False):
    widths = (jnp.dtype(d).itemsize for d in (dtype, scale_dtype))
    return rms_norm_kernels.Sizes(math.prod(shape[:-1]), shape[-1], *widths, residual, fp8)


def assert_traffic(moved, *parts):
    assert moved.loads == sum(part.loads for part in parts)
    assert moved.stores == sum(part.stores for part in parts)


SHAPES = [(5, 1), (2, 7, 123), (9, 640), (5, 4096), (3, 12288)]


@pytest.mark.parametrize("shape", SHAPES)
def test_simulated(shape):
    with backend.simulate(), backend.counted_traffic() as moved:
        check(shape)
    sizes = sizes_of(shape)
    assert_traffic(moved, sizes.forward_traffic(), sizes.backward_traffic())


@pytest.mark.parametrize(
    "options",
    [
        {"residual": False, "scale_dtype": F32},
        {"dtype": F32, "scale_dtype": F32, "offset": 1.0},
        {"dtype": jnp.float16},
    ],
)
def test_simulated_options(options):
    with backend.simulate(), backend.counted_traffic() as moved:
        check((6, 512), **options)
    options.pop("offset", None)
    sizes = sizes_of((6, 512), **options)
    assert_traffic(moved, sizes.forward_traffic(), sizes.backward_traffic())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (4096, 123), (4099, 4096), (4096, 12288)])
@pytest.mark.parametrize("residual", [True, False])
def test_run(shape, residual):
    check(shape, residual=residual)


def test_two_runs_are_bit_equal_and_several_blocks_too():
    """Blocks of several warpgroups, each with several rows: the sum of dscale is in one order."""
    args, run = data((13, 256)), kernel(0.0)
    with backend.simulate():
        first, second = run(*args), run(*args)
        jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize(("length", "residual"), [(123, True), (512, False)])
def test_eight_bits_are_the_cast_of_the_float32_output(length, residual):
    x, r, scale, _, dy = data((11, length), residual=residual)
    scale = scale.at[7].set(9.0)

    def run(implementation, cast_scale, x, r, scale):
        def both(x, r, scale):
            fn = partial(rms_norm_fp8, offset=1.0, implementation=implementation)
            out = fn(x, scale, cast_scale, 1e-5, residual=r)
            total, y = (None, out) if r is None else out
            return y.like, (total, y.values, y.amax)

        like, pullback, aux = jax.vjp(both, x, r, scale, has_aux=True)
        return like, aux, pullback(dy)

    args = jnp.float32(CAST), x, r, scale
    run = jax.jit(run, static_argnums=0)
    with backend.simulate(), backend.counted_traffic() as moved:
        like, (total, values, amax), gradients = run("mosaic_gpu", *args)
        jax.block_until_ready(gradients)
    sizes = sizes_of(x.shape, residual=residual, fp8=True)
    assert_traffic(moved, sizes.forward_traffic(), sizes.backward_traffic())
    assert (like.shape, like.dtype, values.dtype) == (x.shape, x.dtype, jnp.float8_e4m3fn)
    assert not like.any()
    y = rms_norm_reference(
        (x if r is None else total).astype(F32), scale.astype(F32), 1e-5, offset=1.0
    )
    np.testing.assert_allclose(amax, jnp.abs(y).max(), rtol=1e-6)
    want = numerics.cast(y, jnp.float32(CAST), "e4m3").astype(F32)
    assert float(want.max()) == 448 and float(amax) > 448 * CAST  # it saturates
    # Where float32 rounds to the other side of a midpoint, one step of e4m3 is between them.
    got = values.astype(F32)
    assert np.all(np.abs(got - want) <= np.abs(want) / 8) and np.mean(got == want) > 0.99
    # The gradient is that of the norm without a cast, and the fall-back's.
    _, (_, _, other_amax), others = run("xla", *args)
    np.testing.assert_allclose(amax, other_amax, rtol=1e-6)
    for a, b in zip(*map(jax.tree.leaves, (gradients, others)), strict=True):
        assert float(jnp.abs(b).max()) > 0.1
        np.testing.assert_allclose(a.astype(F32), b.astype(F32), rtol=0.01, atol=1e-4)


@pytest.mark.parametrize("length", [2048, 4096, 12288])
@pytest.mark.parametrize("residual", [True, False])
def test_traffic_is_near_the_least_possible(length, residual):
    """Each input read once and each output written once; 4096 rows, the scale in float32."""
    rows = 4096
    for fp8 in (False, True):
        sizes = rms_norm_kernels.Sizes(rows, length, 2, 4, residual, fp8)
        least = rows * length * (2 * (1 + 2 * residual) + (1 if fp8 else 2)) + 4 * (rows + length)
        assert least <= sizes.forward_traffic().total <= 1.05 * least
    least = rows * length * 2 * (3 + residual) + 4 * (rows + 2 * length)
    assert least <= sizes.backward_traffic().total <= 1.05 * least


# What the lanes are worth: faults that are planted here must come out.


def test_a_missing_fence_is_a_race(monkeypatch):
    monkeypatch.setattr(plgpu, "commit_smem", lambda: None)
    with pytest.raises(Exception, match="RACE DETECTED"), backend.simulate():
        check((5, 512))


def test_sums_out_of_turn_are_a_race(monkeypatch):
    wait = plgpu.barrier_wait
    of_turns = lambda: sys._getframe(2).f_code.co_name == "add"
    monkeypatch.setattr(plgpu, "barrier_wait", lambda ref: None if of_turns() else wait(ref))
    x, _, scale, _, dy = data((8, 256), residual=False)
    with pytest.raises(Exception, match="RACE DETECTED"), backend.simulate():
        jax.jit(partial(rms_norm_kernels.backward, 0.0))(x, scale, jnp.ones((8, 1)), dy, None)


def test_a_wrong_weight_is_an_error(monkeypatch):
    right = streaming.lined
    monkeypatch.setattr(streaming, "lined", lambda x, n: right(x, n) * jnp.asarray(1.02, x.dtype))
    with pytest.raises(AssertionError), backend.simulate():
        check((5, 512))


# Built.


def programs():
    forward = partial(rms_norm_kernels.forward, 1e-6, 1.0)
    backward = partial(rms_norm_kernels.backward, 1.0)
    one = jax.ShapeDtypeStruct((), F32)
    for length in (123, 4096, 12288):
        x, r, scale, dtotal, dy = jax.eval_shape(lambda n=length: data((4096, n), BF16, F32))
        inverse = jax.ShapeDtypeStruct((4096, 1), F32)
        yield lambda *args: forward(*args, None)[:2], (x, r, scale)
        yield forward, (x, r, scale, one)
        yield backward, (x, scale, inverse, dy, dtotal)
    yield lambda x, scale: forward(x, None, scale, None)[1], (x, scale)
    yield lambda *args: backward(*args, None), (x, scale, inverse, dy)


@pytest.mark.target
def test_built_without_spills():
    for built in build_all(list(programs()), target.parse("h200")):
        assert built.spill_bytes == 0 and not built.warnings and built.tma > 0
        assert built.shared_memory_bytes <= 227 * 1024
        assert built.registers * built.threads <= 65536


# Who computes.


def kernels_of(compiled):
    text = compiled.as_text()
    return [line for line in text.splitlines() if "custom-call" in line and "mosaic_gpu" in line]


def compiled(name, length, dtype=BF16, **options):
    def step(x, scale):
        out, pullback = jax.vjp(lambda x, s: rms_norm(x, s, residual=x, **options), x, scale)
        return out, pullback(out)

    shapes = jax.ShapeDtypeStruct((3, 40, length), dtype), jax.ShapeDtypeStruct((length,), F32)
    return target.parse(name).compile(jax.jit(step), *shapes)


@pytest.mark.target
def test_the_device_that_is_lowered_for_decides():
    assert len(kernels_of(compiled("h200", 1024))) == 2
    assert not kernels_of(compiled("h200", 1000))  # XLA needs no padding
    assert not kernels_of(compiled("a100", 1024))
    assert len(kernels_of(compiled("h200", 123, implementation="mosaic_gpu"))) == 2
    with pytest.raises(NotImplementedError, match=r"needs a Hopper GPU.*lowered for NVIDIA B200"):
        compiled("b200", 1024, implementation="mosaic_gpu")


@pytest.mark.target
def test_each_device_of_a_shard_map_runs_the_kernels():
    gpus = target.parse("h200x2")
    mesh = gpus.mesh({"data": 2})
    x = jax.ShapeDtypeStruct((8, 512), BF16, sharding=jax.NamedSharding(mesh, P("data")))
    scale = jax.ShapeDtypeStruct((512,), F32, sharding=jax.NamedSharding(mesh, P()))

    def loss(x, scale):
        total, y = rms_norm(x, scale, residual=x)
        return jax.lax.psum(jnp.sum((total * y).astype(F32)), "data")

    over = jax.shard_map(loss, mesh=mesh, in_specs=(P("data"), P()), out_specs=P())
    step = jax.jit(jax.grad(over, argnums=(0, 1)))
    assert len(kernels_of(gpus.compile(step, x, scale))) == 2
    alone = jax.jit(lambda x, scale: rms_norm(x, scale))
    assert not kernels_of(gpus.compile(alone, x, scale))  # XLA partitions its own


def test_transformations():
    x, _, scale, _, _ = data((2, 2, 128))
    run = partial(rms_norm, scale=scale, implementation="mosaic_gpu")
    with backend.simulate():
        want = jax.jit(run)(x)
        vmapped = jax.jit(jax.vmap(run))(x)
        _, scanned = jax.jit(lambda x: jax.lax.scan(lambda c, x: (c, run(x)), None, x))(x)
    for got in (vmapped, scanned):
        np.testing.assert_array_equal(got, want)


def test_vmap_over_layers_with_scales_of_their_own():
    """As parallel prediction heads run: each with its input, scale and gradients."""
    parts = [data((2, 3, 256)), data((6, 256))]  # other keys
    one, two = ([None if a is None else a.reshape(-1, 256) for a in part] for part in parts)
    args = [jnp.stack([a, b]) for a, b in zip(one, two)]
    args[2] = args[2][:, 0]  # a scale has no rows
    norm = partial(values_and_gradients, partial(rms_norm, implementation="mosaic_gpu"))
    with backend.simulate():
        got = jax.jit(jax.vmap(norm))(*args)
        alone = [jax.jit(norm)(*(a[i] for a in args)) for i in range(2)]
    want = jax.vmap(partial(values_and_gradients, rms_norm_reference))(*args)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *alone)
    for a, b, c in zip(*map(jax.tree.leaves, (got, stacked, want)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert error(a, c.astype(F32)) <= 0.02 * float(jnp.abs(c).max())
        assert float(jnp.abs(c[0] - c[1]).max()) > 0.1


def test_without_a_gpu_it_is_the_reference():
    args = data((4, 1024), F32, F32)
    got = jax.jit(partial(values_and_gradients, rms_norm))(*args)
    for a, b in zip(*map(jax.tree.leaves, (got, values_and_gradients(rms_norm_reference, *args)))):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cast_scale", [None, 1.0])
def test_no_elements(cast_scale):
    x, scale = jnp.zeros((0, 512), BF16), jnp.ones(512)
    if cast_scale is None:
        assert rms_norm(x, scale).shape == x.shape
    else:
        y = rms_norm_fp8(x, scale, jnp.float32(cast_scale))
        assert y.values.shape == x.shape and float(y.amax) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": jnp.ones(3)}, r"got x \(2, 4\), scale \(3,\); need x \[..., D\], scale \[D\]"),
        ({"residual": jnp.ones((2, 4), BF16)}, r"got residual bfloat16\[2, 4\], need that of x"),
        ({"residual": jnp.ones((1, 4))}, r"got residual float32\[1, 4\]"),
        ({"cast_scale": jnp.ones(4)}, r"got cast_scale float32\[4\]; need float32\[\]"),
        ({"implementation": "triton"}, "unknown implementation 'triton'"),
    ],
)
def test_mistakes_are_told_in_one_line(change, message):
    """Past the annotations, which only tests check."""
    none = {"residual": None, "cast_scale": None, "implementation": None}
    given = {"x": jnp.ones((2, 4)), "scale": jnp.ones(4), **none} | change
    options = op._Options(1e-6, 0.0, given["implementation"])
    with pytest.raises(ValueError, match=message) as caught:
        op._checked(options, *(given[k] for k in ("x", "residual", "scale", "cast_scale")))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((2, 512), BF16, r"needs a Hopper GPU.*lowered for cpu"),
        ((2, 20000), BF16, r"six rows of up to 12288 .*got bfloat16 x 20000; None or 'xla' works"),
        ((2, 12288), F32, r"six rows of up to 12288 .*got float32 x 12288"),
        ((0, 512), BF16, "needs at least one element"),
    ],
)
def test_what_the_kernel_does_not_serve_is_refused(shape, dtype, message):
    run = jax.jit(partial(rms_norm, implementation="mosaic_gpu"))
    with pytest.raises(NotImplementedError, match=message):
        run(jnp.ones(shape, dtype), jnp.ones(shape[-1]))


@pytest.mark.slow
def test_the_workbench_simulates_all_cases():
    for case in op.cases(N=24, D=512):
        assert 0 <= inspect.simulate(inspect.Case(*case)) <= inspect.MAX_ERROR
