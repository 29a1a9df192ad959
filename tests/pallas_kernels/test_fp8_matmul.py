"""FP8 matmuls with scales of blocks: simulated, built, run; what they move; what is refused."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from pallas_kernels import backend, build, target
from pallas_kernels import fp8_matmul as fp8
from pallas_kernels import fp8_matmul_kernel as kernel
from pallas_kernels.gpus import GPUS

# Ragged rows, of one tile and of two; a ring not filled, filled, and begun again.
SHAPES = [(1, 128, 128), (123, 200, 300), (257, 1, 256), (300, 129, 512)]
E4M3, E5M2, BF16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16


def make(M, N, K, scales="blocks", formats=(E4M3, E4M3)):
    """Operands, and scales over six powers of two."""
    keys = jax.random.split(jax.random.key(M + N + K), 4)
    a, b = (
        (jax.random.normal(key, (rows, K)) * 3).astype(format)
        for key, rows, format in zip(keys, (M, N), formats)
    )
    k, n = -(-K // 128), -(-N // 128)
    draw = lambda key, *shape: 2 ** jax.random.uniform(key, shape, minval=-3, maxval=3)
    if scales == "tensor":
        return a, b, draw(keys[2])
    return a, draw(keys[2], M, k), b, draw(keys[3], N if scales == "tiles" else n, k)


def multiply(args, implementation=None, **options):
    function = fp8.scaled_matmul if len(args) == 3 else fp8.block_scaled_matmul
    run = partial(function, implementation=implementation, **options)
    return jax.block_until_ready(jax.jit(lambda *args: run(*args))(*args))


def bound(args, unit=None):
    """What rounding to float32 may cost: a unit for each sum, of sums of magnitudes."""
    unit = float(jnp.finfo(jnp.float32).eps) if unit is None else unit
    wide = [jnp.abs(x.astype(jnp.float32)) for x in args]
    reference = fp8.scaled_matmul_reference if len(args) == 3 else fp8.block_scaled_matmul_reference
    return reference(*wide) * unit * (args[0].shape[1] / 128 + 4)


def check(shape, scales, unit=None):
    """The kernel equals XLA's form up to rounding, and bfloat16 is one rounding of it."""
    args = make(*shape, scales)
    got, want = multiply(args, "mosaic_gpu"), multiply(args, "xla")
    assert got.shape == want.shape == shape[:2] and got.dtype == jnp.float32
    assert jnp.all(jnp.abs(got - want) <= bound(args, unit))
    assert float(jnp.abs(got).min()) > 0
    np.testing.assert_array_equal(
        multiply(args, "mosaic_gpu", out_dtype=BF16).astype(jnp.float32),
        got.astype(BF16).astype(jnp.float32),
    )
    return got


@pytest.mark.parametrize(("shape", "scales"), list(zip(SHAPES, ["blocks", "tiles"] * 2)))
def test_simulated(shape, scales):
    with backend.simulate():
        check(shape, scales)


def test_simulated_with_one_scale():
    args = make(70, 130, 260, "tensor", (E5M2, E4M3))
    with backend.simulate():
        got = multiply(args, "mosaic_gpu")
    assert jnp.all(jnp.abs(got - multiply(args)) <= bound(args))


@pytest.mark.parametrize("scales", ["blocks", "tiles"])
def test_more_tiles_than_cores(scales, monkeypatch):
    """Blocks of the grid go on to a second and a third tile; two runs are bit-equal."""
    monkeypatch.setattr(kernel, "CORES", 2)
    monkeypatch.setattr(kernel, "GROUP", 2)
    args = make(700, 200, 256, scales)  # 3 x 2 tiles, and a third tile for no block
    with backend.simulate():
        got, again = multiply(args, "mosaic_gpu"), multiply(args, "mosaic_gpu")
    assert jnp.all(jnp.abs(got - multiply(args)) <= bound(args))
    np.testing.assert_array_equal(got, again)


def test_transformations():
    args = make(40, 130, 256)
    run = partial(fp8.block_scaled_matmul, implementation="mosaic_gpu")
    with backend.simulate():
        want = multiply(args, "mosaic_gpu")
        rows = [jnp.stack([x, x[::-1]]) for x in args]
        vmapped = jax.jit(jax.vmap(run))(*rows)
        _, scanned = jax.jit(lambda *x: jax.lax.scan(lambda c, y: (c, run(*y)), None, x))(*rows)
        mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        specs = P("data"), P("data"), P(), P()
        over = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P("data"))
        sharded = jax.jit(over)(*args)
    np.testing.assert_array_equal(vmapped[0], want)
    np.testing.assert_array_equal(vmapped, scanned)
    np.testing.assert_array_equal(sharded, want)


def test_non_finite_values_and_scales_stay_where_they_are():
    a, a_scale, b, b_scale = make(40, 130, 256)
    a = a.at[3, 200].set(jnp.nan)
    a_scale = a_scale.at[5, 0].set(jnp.inf).at[7].set(0.0)
    with backend.simulate():
        got = multiply((a, a_scale, b, b_scale), "mosaic_gpu")
    assert jnp.all(jnp.isnan(got[3])) and not jnp.any(jnp.isfinite(got[5]))
    assert not jnp.any(got[7]) and jnp.all(jnp.isfinite(jnp.delete(got, jnp.array([3, 5]), axis=0)))


# What the lane is worth: faults that are planted here must come out.


@pytest.mark.parametrize("fault", ["full", "free", "fence"])
def test_simulated_catches_a_race(fault, monkeypatch):
    """A load that is not waited for, a buffer taken too early, a tile stored unfenced."""
    if fault == "fence":
        monkeypatch.setattr(plgpu, "commit_smem", lambda: None)
    else:
        wait = plgpu.barrier_wait
        shape = {"full": (3, 3), "free": (2, 3)}[fault]  # arrivals, barriers
        of = lambda ref: (ref.ref.aval.inner_aval.dtype.num_arrivals, ref.ref.shape[0])
        monkeypatch.setattr(
            plgpu, "barrier_wait", lambda ref: None if of(ref) == shape else wait(ref)
        )
    with (
        pytest.raises(Exception, match=r"RACE DETECTED|observe|must do so in all phases"),
        backend.simulate(),
    ):
        multiply(make(40, 130, 640), "mosaic_gpu")


@pytest.mark.parametrize("fault", ["value", "scale"])
def test_simulated_catches_a_wrong_result(fault, monkeypatch):
    if fault == "value":
        read = backend.read
        monkeypatch.setattr(backend, "read", lambda acc: 1.0001 * read(acc))
    else:  # the scale of the next block
        monkeypatch.setattr(kernel, "pad", lambda x, *units: jnp.roll(_pad(x, *units), 1, axis=0))
    with pytest.raises(AssertionError), backend.simulate():
        check((300, 129, 256), "blocks")


_pad = kernel.pad


@pytest.mark.target
def test_built():
    """At 4096^3 and 12288 x 4096, and where the last tiles are ragged: no spill, no warning."""
    sizes = {
        jnp.float32: [(4096, 4096, 4096), (12288, 4096, 2048)],
        BF16: [(4096, 12288, 4096), (123, 200, 300)],
    }
    programs = [
        (partial(kernel.matmul, kind, dtype), args)
        for dtype, shapes in sizes.items()
        for shape in shapes
        for kind, _, _, args, _, _ in fp8.cases(*shape)
    ]
    for built in build.build_all(programs, target.parse("h200")):
        assert built.spill_bytes == 0
        assert built.shared_memory_bytes <= 214 * 1024
        assert built.wgmma_kinds == ("m64n128k32.f32.e4m3.e4m3",)
        assert not built.warnings


@pytest.mark.gpu
@pytest.mark.parametrize("scales", ["blocks", "tiles"])
@pytest.mark.parametrize("shape", [*SHAPES, (4096, 4096, 4096), (12288, 4096, 2048)])
def test_run(shape, scales):
    """Hopper's FP8 tensor cores keep about 14 bits of a sum within a block of 128 of K.

    Such a block is four instructions, of either side: eight roundings to 2**-13 of the sums of
    magnitudes, however many blocks there are (arXiv:2412.19437, section 3.3.2).
    """
    blocks = -(-shape[2] // 128)
    check(shape, scales, 8 * 2**-13 / (blocks + 4))


# Bytes.


@pytest.mark.parametrize("scales", ["blocks", "tiles", "tensor"])
def test_traffic_is_what_the_simulated_kernel_moves(scales):
    shape = (300, 200, 300)
    with backend.simulate(), backend.counted_traffic() as moved:
        multiply(make(*shape, scales), "mosaic_gpu", out_dtype=BF16)
    want = fp8.traffic(*shape, scales=scales, out_dtype=BF16)
    assert moved.loads + moved.stores == want


@pytest.mark.parametrize("shape", [(4096, 4096, 4096), (4096, 12288, 4096), (12288, 4096, 2048)])
@pytest.mark.parametrize("scales", ["blocks", "tiles"])
def test_arithmetic_intensity_is_above_the_ridge(shape, scales):
    gpu = GPUS["h200"]
    flops = 2 * shape[0] * shape[1] * shape[2]
    moved = fp8.traffic(*shape, scales=scales, cached=True)
    assert flops / moved > 1.5 * gpu.fp8_flops / gpu.memory_bandwidth
    # No less than each operand once, and no more than each tile's own.
    *_, least = next(fp8.cases(*shape))
    assert least <= moved < fp8.traffic(*shape, scales=scales)


@pytest.mark.parametrize("grid", [(1, 1), (16, 32), (3, 7), (9, 2), (20, 5)])
def test_every_tile_has_one_place(grid):
    places = jax.vmap(partial(kernel.place, grid))(jnp.arange(grid[0] * grid[1]))
    found = {(int(m), int(n)) for m, n in zip(*places)}
    assert found == set(itertools.product(range(grid[0]), range(grid[1])))


# The plain form and the edge.


@pytest.mark.parametrize("scales", ["blocks", "tiles"])
def test_the_plain_form_is_the_reference(scales):
    args = make(123, 200, 300, scales)
    difference = jnp.abs(multiply(args) - fp8.block_scaled_matmul_reference(*args))
    assert jnp.all(difference <= bound(args) * 8)  # both sum over K in float32


def test_an_outlier_stays_in_its_tile():
    """A value of another size in its own block of 128, and the rest of the product is as before."""
    a, a_scale, b, b_scale = make(64, 256, 384)
    want = multiply((a, a_scale, b, b_scale))
    got = multiply((a.at[9, 130].set(448.0), a_scale.at[9, 1].mul(1e4), b, b_scale))
    rows = np.arange(64) != 9
    np.testing.assert_array_equal(got[rows], want[rows])
    assert jnp.all(got[9] != want[9])


def test_empty():
    for M, N, K in ((0, 5, 128), (5, 0, 128), (5, 4, 0)):
        got = multiply(make(M, N, K, "tiles"))
        assert got.shape == (M, N) and not jnp.any(got)


def test_bad_input_says_what_would_be_legal():
    a, a_scale, b, b_scale = make(40, 300, 256)
    call = fp8.block_scaled_matmul
    for args, options, message in (
        ((a, a_scale[:, :1], b, b_scale), {}, r"float32\[40, 1\] .* float32\[40, 2\] and float32"),
        (
            (a, a_scale, b, b_scale[:2]),
            {},
            r"\[2, 2\]; .*\[3, 2\] \(blocks\) or float32\[300, 2\]",
        ),
        ((a, a_scale.astype(BF16), b, b_scale), {}, r"bfloat16\[40, 2\]"),
        ((a.astype(E5M2), a_scale, b, b_scale), {}, "float8_e5m2.*legal: .* of float8_e4m3fn"),
        ((a, a_scale, b, b_scale), {"out_dtype": E4M3}, "out_dtype is float8_e4m3fn; legal: float"),
    ):
        with pytest.raises(ValueError, match=message):
            call(*args, **options)
    with pytest.raises(ValueError, match="legal: one float32"):
        fp8.scaled_matmul(a, b, jnp.ones((), BF16))
    with pytest.raises(NotImplementedError, match=r"needs a Hopper GPU.*lowered for cpu"):
        call(a, a_scale, b, b_scale, implementation="mosaic_gpu")
