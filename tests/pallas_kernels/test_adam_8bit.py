"""One step of 8-bit Adam: simulated, built and run; against the same in float32 arrays."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxaccel import optim_8bit
from jaxaccel.blockwise import BlockQuantized, dequantize_blockwise, quantize_blockwise
from pallas_kernels import adam_8bit as op
from pallas_kernels import adam_8bit_mosaic as mosaic
from pallas_kernels import backend, codes, inspect, streaming, target
from pallas_kernels.adam_8bit import Coded, Decay, Scalars, adam_8bit_update, adamw_8bit_step
from pallas_kernels.build import build_all

BF16, F32, U32 = jnp.bfloat16, jnp.float32, jnp.uint32
STEP = Scalars(0.9, 0.999, 1e-8, 0.0, 0.1, 0.001, U32(123456789), U32(0))
DECAY = Decay(1e-2, 0.1)


def data(shape, block=256, dtype=F32):
    """Parameter, gradient and moments in all codes, over four decades; some zeros."""
    rng = np.random.default_rng(0)
    g = rng.normal(size=shape) * 10 ** rng.uniform(-4, 0, size=shape) * (rng.random(shape) > 0.02)
    inside = shape[-1] % block == 0
    blocks = (*shape[:-1], shape[-1] // block) if inside else (-(-int(np.prod(shape)) // block),)
    scale = rng.normal(size=blocks) * (rng.random(blocks) > 0.1)
    coded = lambda scale: Coded(
        jnp.asarray(rng.integers(0, 256, shape), jnp.uint8), jnp.asarray(scale, F32)
    )
    p = jnp.asarray(rng.normal(size=shape), dtype)
    return p, jnp.asarray(g, F32), coded(scale), coded(np.abs(scale) / 10)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def run(implementation, block, mode, dtype, p, g, m, v, step):
    """With the step's numbers as operands, so that XLA does not know the zero among them."""
    options = {"block": block, "mode": mode, "implementation": implementation}
    if dtype is None:
        return adam_8bit_update(g, m, v, step, **options)
    return adamw_8bit_step(p, g, m, v, step, DECAY, **options)


def check(shape, block=256, mode="stable", dtype=None):
    """Kernel and plain form; codes differ where a scale's inverse, a quotient, rounds otherwise.

    A GPU's quotient may be two units off in the last place: then four codes in a million are
    the neighbouring ones. In the simulator none is.
    """
    args = *data(shape, block, dtype or F32), STEP
    out, m, v = run("mosaic_gpu", block, mode, dtype, *args)
    want, want_m, want_v = run("xla", block, mode, dtype, *args)
    assert (out.shape, out.dtype) == (shape, dtype or F32)
    eps = float(jnp.finfo(out.dtype).eps)
    np.testing.assert_allclose(
        out.astype(F32), want.astype(F32), rtol=max(eps, 2e-6), atol=1e-30 + eps * (dtype == BF16)
    )
    assert float(jnp.abs(want).max()) > 0.5
    for got, wanted in ((m, want_m), (v, want_v)):
        assert got.scale.shape == wanted.scale.shape
        np.testing.assert_array_equal(got.scale, wanted.scale)
        difference = np.abs(got.codes.astype(jnp.int32) - wanted.codes.astype(jnp.int32))
        assert difference.max() <= 1 and np.mean(difference) < 2e-5
        assert len(np.unique(got.codes)) > 20


@pytest.mark.parametrize(
    ("shape", "block", "mode", "dtype"),
    [
        ((4, 256), 256, "stable", None),  # a piece
        ((37, 512), 256, "stable", F32),  # more than a piece for some of the warpgroups
        ((3, 100), 64, "bitsandbytes", BF16),  # a part of a block, of a piece
        ((2, 5, 352), 352, "bitsandbytes", None),  # lines of 32
    ],
)
def test_simulated(shape, block, mode, dtype, monkeypatch):
    monkeypatch.setattr(streaming, "CORES", 1)
    with backend.simulate(), backend.counted_traffic() as moved:
        check(shape, block, mode, dtype)
    sizes = mosaic.Sizes(
        -(-int(np.prod(shape)) // block), block, 4, jnp.dtype(dtype).itemsize if dtype else 0
    )
    assert (moved.loads, moved.stores) == sizes.traffic()[:2]


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [1, 4, 10007, 65536])
@pytest.mark.parametrize("mode", ["stable", "bitsandbytes"])
def test_run(blocks, mode):
    check((blocks, 256), mode=mode)
    check((blocks, 256), mode=mode, dtype=BF16)


def test_two_runs_give_the_same_bits():
    args = data((4, 256))
    with backend.simulate():
        step = partial(run, "mosaic_gpu", 256, "stable", None, *args, STEP)
        jax.tree.map(np.testing.assert_array_equal, step(), step())


def test_what_is_not_finite_stays_in_its_block():
    p, g, m, v = data((4, 256))
    g = g.at[1, 3].set(jnp.nan).at[2, 5].set(jnp.inf)
    with backend.simulate():
        _, *moments = run("mosaic_gpu", 256, "stable", None, p, g, m, v, STEP)
    for coded in moments:
        np.testing.assert_array_equal(np.isfinite(coded.scale[:, 0]), [True, False, False, True])


def test_a_missing_fence_is_a_race(monkeypatch):
    monkeypatch.setattr(plgpu, "commit_smem", lambda: None)
    with pytest.raises(Exception, match="RACE DETECTED"), backend.simulate():
        check((1, 256))


def test_noise_of_another_position_is_seen(monkeypatch):
    right = codes.noise
    kernels = lambda position: U32(position.ndim == 3)  # [blocks, block] in the plain one
    shifted = lambda seed, position: right(seed, position + kernels(position))
    monkeypatch.setattr(codes, "noise", shifted)
    with pytest.raises(AssertionError), backend.simulate():
        check((512,))


@pytest.mark.target
def test_built_without_spills():
    """Directions of 10,007 blocks, parameters, and the longest blocks."""
    sizes = {"N": 10007, "D": 256}, {}, {"D": 4 * mosaic.LONGEST, "block": mosaic.LONGEST}
    programs = []
    for number, options in zip((0, 3, 0), sizes, strict=True):
        _, function, _, args, _, _ = list(op.cases(**options))[number]
        programs.append((function, args))
    for built in build_all(programs, target.parse("h200")):
        assert built.spill_bytes == 0 and not built.warnings and built.tma > 0
        assert built.shared_memory_bytes <= 160 * 1024
        assert built.registers * built.threads <= 65536


@pytest.mark.parametrize("blocks", [4096, 4099, 10007, 2**20])
@pytest.mark.parametrize("parameter", [0, 2, 4])
def test_traffic_is_the_least_possible(blocks, parameter):
    """Everything once: gradient, codes and scales read; result, codes and scales written."""
    element = 4 + parameter + 2 + (parameter or 4) + 2
    assert mosaic.Sizes(blocks, 256, 4, parameter).traffic().total <= 1.001 * blocks * (
        256 * element + 16
    )


def kernels_of(compiled):
    text = compiled.as_text()
    return [line for line in text.splitlines() if "custom-call" in line and "mosaic_gpu" in line]


def abstract(shape, block=256, **options):
    _, g, m, v = jax.eval_shape(partial(data, shape, block))
    put = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, **options)
    return jax.tree.map(put, (g, m, v))


@pytest.mark.target
def test_the_device_that_is_lowered_for_decides():
    """And nothing is copied: moments given up are overwritten, and nothing else is held."""

    def compiled(name, shape, **options):
        step = jax.jit(partial(adam_8bit_update, **options), donate_argnums=(1, 2))
        numbers = jax.tree.map(lambda x: jax.ShapeDtypeStruct((), jnp.asarray(x).dtype), STEP)
        return target.parse(name).compile(step, *abstract(shape), numbers)

    made = compiled("h200", (512, 2048))
    assert len(kernels_of(made)) == 1 and " copy(" not in made.as_text()
    assert made.memory_analysis().temp_size_in_bytes < 2**14
    assert not kernels_of(compiled("h200", (3, 256)))  # XLA needs no padding
    with pytest.raises(NotImplementedError, match=r"needs a Hopper GPU.*lowered for NVIDIA B200"):
        compiled("b200", (64, 2048), implementation="mosaic_gpu")


@pytest.mark.target
def test_the_optimizer_runs_it():
    """For parameters whose moments are coded; others have none."""
    optimizer = optim_8bit.scale_by_adam_8bit()
    params = {"kernel": jnp.zeros((16, 768)), "scale": jnp.zeros(768)}
    abstracted = jax.eval_shape(lambda: (params, optimizer.init(params)))
    step = jax.jit(optimizer.update, donate_argnums=1)
    assert len(kernels_of(target.parse("h200").compile(step, *abstracted))) == 1


@pytest.mark.target
def test_each_device_of_a_shard_map_runs_the_kernel():
    gpus = target.parse("h200x2")
    mesh = gpus.mesh({"data": 2})
    step = lambda g, m, v: adam_8bit_update(g, m, v, STEP)
    args = abstract((64, 2048), sharding=NamedSharding(mesh, P("data")))
    over = jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    assert len(kernels_of(gpus.compile(jax.jit(over), *args))) == 1


@partial(jax.jit, static_argnums=(0, 1))
def step_by_step(block, mode, g, m, v, s):
    """Of whole moments in float32, by the functions that code and decode arrays."""
    first, second = (
        dequantize_blockwise(BlockQuantized(x.codes, x.scale, block, map, jnp.dtype(F32)))
        for x, map in ((m, "dynamic"), (v, "dynamic_unsigned"))
    )
    stable = mode == "stable"
    if stable:
        first = jnp.where(second == 0, 0, first)
    mean = lambda b, x, new: op.product(x, b, s.zero) + op.product(new, 1 - b, s.zero)
    first, second = mean(s.b1, first, g), mean(s.b2, second, g * g)
    direction = (first / s.correction1) / (jnp.sqrt(second / s.correction2 + s.eps_root) + s.eps)
    rounding = {"rounding": "geometric", "seed": s.seed} if stable else {}
    m = quantize_blockwise(first, block, "dynamic", signed=stable)
    v = quantize_blockwise(second, block, "dynamic_unsigned", **rounding)
    if stable:
        v = dataclasses.replace(v, codes=jnp.maximum(v.codes, (second > 0).astype(jnp.uint8)))
    return direction, m, v


@pytest.mark.parametrize(
    ("mode", "shape"),
    [("stable", (3, 5, 352)), ("stable", (37, 123)), ("bitsandbytes", (37, 123))],
)
def test_the_plain_form_is_the_step_in_float32(mode, shape):
    """Codes and scales bit for bit; directions but for the last digits of quotients."""
    block = 352 if shape[-1] == 352 else 256
    _, g, m, v = data(shape, block)
    want = step_by_step(block, mode, g, m, v, STEP)
    got = run("xla", block, mode, None, None, g, m, v, STEP)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    for a, b in zip(got[1:], want[1:], strict=True):
        np.testing.assert_array_equal(a.codes, b.codes)
        np.testing.assert_array_equal(a.scale, b.scale)
        assert len(np.unique(a.codes)) > 20


@pytest.mark.parametrize("mode", ["stable", "bitsandbytes"])
def test_parameters_are_the_direction_applied(mode):
    p, g, m, v = data((4, 256))
    direction, *moments = run("xla", 256, mode, None, p, g, m, v, STEP)
    new, *others = run("xla", 256, mode, F32, p, g, m, v, STEP)
    rate, weight = DECAY
    if mode == "stable":
        want = p - rate * (direction + weight * p)
    else:
        want = (p - rate * direction) * (1 - rate * weight)
    np.testing.assert_allclose(new, want, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, others, moments)


def test_sharded_arrays_stay_where_they_are():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    _, g, m, v = data((16, 2048))
    step = jax.jit(adam_8bit_update)
    want = step(g, m, v, STEP)
    put = partial(jax.device_put, device=NamedSharding(mesh, P(None, "data")))
    args = *jax.tree.map(put, (g, m, v)), STEP
    text = step.lower(*args).compile().as_text()
    assert not any(name in text for name in ("all-gather", "all-to-all", "collective-permute"))
    jax.tree.map(np.testing.assert_array_equal, step(*args)[1:], want[1:])


def test_moments_of_zero_and_no_gradient():
    zero = Coded(jnp.zeros((4, 256), jnp.uint8), jnp.zeros((4, 1)))
    with backend.simulate():
        g = jnp.zeros((4, 256))
        direction, m, v = run("mosaic_gpu", 256, "stable", None, g, g, zero, zero, STEP)
    assert not direction.any() and not m.scale.any() and not v.scale.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "bnb"}, "mode is 'bnb'; legal are stable and bitsandbytes"),
        ({"block": 40}, "block is 40; legal are positive multiples of 32"),
        ({"block": 128}, r"m has codes \(4, 256\), scales \(4, 1\); need \(4, 256\), \(4, 2\)"),
        ({"implementation": "triton"}, "unknown implementation 'triton'"),
    ],
)
def test_mistakes_are_told_in_one_line(change, message):
    """Past the annotations, which only tests check."""
    options = {"implementation": None, "block": 256, "mode": "stable"} | change
    _, g, m, v = data((4, 256))
    with pytest.raises(ValueError, match=message) as caught:
        op._step(*options.values(), None, g, m, v, STEP, None)
    assert "\n" not in str(caught.value)


def test_blocks_that_no_warp_holds_are_refused():
    _, g, m, v = data((4, 1024), 1024)
    with pytest.raises(NotImplementedError, match=f"blocks of 64 to {mosaic.LONGEST} elements"):
        adam_8bit_update(g, m, v, STEP, block=1024, implementation="mosaic_gpu")
    jax.eval_shape(partial(adam_8bit_update, block=1024), g, m, v, STEP)


@pytest.mark.slow
def test_the_workbench_simulates_all_cases():
    for case in op.cases(N=12, D=1024):
        assert 0 <= inspect.simulate(inspect.Case(*case)) <= inspect.MAX_ERROR
