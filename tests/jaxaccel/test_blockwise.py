"""Blocks of codes: any shape, the same codes on any mesh."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxaccel import sharding
from jaxaccel.blockwise import BlockQuantized, dequantize_blockwise, quantize_blockwise
from pallas_kernels import codes

MAPS = codes.MAPS
quantize = jax.jit(
    quantize_blockwise, static_argnums=(1, 2), static_argnames=("code", "signed", "rounding")
)
BOUNDS = {"dynamic": 9 / 1280, "dynamic_unsigned": 9 / 2560, "int8": 1 / 254, "e4m3": 16 / 448}


def normal(shape, seed=0, spread=2.0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.exp(spread * rng.normal(size=shape))
    return jnp.asarray(x.astype(np.float32))


def flat_blocks(x, block):
    flat = np.asarray(x).reshape(-1)
    return [flat[i : i + block] for i in range(0, flat.size, block)]


@pytest.mark.parametrize(
    ("shape", "code"),
    [((1,), "dynamic"), ((257,), "int8"), ((3, 512), "dynamic"), *(((5, 7, 50), c) for c in MAPS)],
)
def test_codes_are_those_of_each_flat_block(shape, code):
    x = normal(shape)
    x = jnp.abs(x) if code == "dynamic_unsigned" else x
    q = quantize(x, 64, code)
    assert q.shape == shape and q.codes.dtype == jnp.uint8 and q.scale.dtype == jnp.float32
    blocks, scales = flat_blocks(x, 64), np.asarray(q.scale).reshape(-1)
    np.testing.assert_array_equal(scales, [np.abs(b).max() for b in blocks])
    normed = np.concatenate([b * (np.float32(1) / s) for b, s in zip(blocks, scales)])
    want = codes.encode(jnp.asarray(normed), code)
    np.testing.assert_array_equal(np.asarray(q.codes).reshape(-1), want)


@pytest.mark.parametrize("code", MAPS)
@pytest.mark.parametrize(("shape", "signed"), [((3, 512), True), ((1000,), False)])
def test_the_error_is_within_the_bound_of_the_block(shape, signed, code):
    x = normal(shape, 1, spread=0.5)
    x = jnp.abs(x) if code == "dynamic_unsigned" else x
    q = quantize(x, 256, code, signed=signed)
    got = dequantize_blockwise(q)
    for b, g in zip(flat_blocks(x, 256), flat_blocks(got, 256)):
        top = np.abs(b).max()
        # A scale without a sign cannot hold a negative extreme: the first of the four defects.
        bound = BOUNDS[code] * (1 if signed or code != "dynamic" else 1.0001)
        assert np.abs(g - b).max() <= bound * top * (1 + 1e-4)


@pytest.mark.parametrize("code", ["dynamic", "int8", "e4m3"])
def test_with_a_signed_scale_extremes_are_exact_and_a_second_time_changes_nothing(code):
    x = normal((4, 512), 2).at[0, 3].set(-900.0).at[0, 300].set(900.0)
    once = dequantize_blockwise(quantize(x, code=code, signed=True))
    for b, g in zip(flat_blocks(x, 256), flat_blocks(once, 256)):
        at = np.abs(b).argmax()
        assert g[at] == b[at]
    q = quantize(once, code=code, signed=True)
    np.testing.assert_array_equal(dequantize_blockwise(q), once)
    mirrored = dequantize_blockwise(quantize(-x, code=code, signed=True))
    np.testing.assert_array_equal(mirrored, -once)


def test_without_a_sign_a_negative_extreme_shrinks_each_time():
    x = jnp.full(256, -1.0)
    for _ in range(100):
        x = dequantize_blockwise(quantize(x))
    assert float(x[0]) == pytest.approx(-0.494, abs=0.001)


def test_stochastic_codes_have_the_right_mean():
    x = normal((2, 256), 3)
    draw = jax.jit(
        jax.vmap(
            lambda s: dequantize_blockwise(
                quantize_blockwise(x, signed=True, rounding="stochastic", seed=s)
            )
        )
    )
    count = 1000
    drawn = draw(codes.mix(jnp.arange(count, dtype=jnp.uint32)))
    mean, std = drawn.mean(0), drawn.std(0)
    assert (std > 0).mean() > 0.9
    gap = 2 * 9 / 1280 * jnp.abs(x).max(1, keepdims=True)  # at most
    assert (jnp.abs(mean - x) <= 6 * jnp.maximum(std, gap / count**0.5) / count**0.5).all()


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("shape", [(16, 512), (8, 8, 64), (64, 24)])
@pytest.mark.parametrize("spec", [("fsdp",), (None, "fsdp"), ("fsdp", "tensor")])
def test_sharded_arrays_have_the_codes_of_one_device(shape, spec, seed):
    sizes = "fsdp=4,tensor=2" if "tensor" in spec else ""
    mesh = sharding.make_mesh(sharding.parse_mesh(sizes, 8))
    x = normal(shape, 4)
    how = {} if seed is None else {"rounding": "stochastic", "seed": jnp.uint32(seed)}
    want = quantize(x, 32, **how)
    got = quantize(jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec))), 32, **how)
    np.testing.assert_array_equal(got.codes, want.codes)
    np.testing.assert_array_equal(got.scale, want.scale)


@pytest.mark.parametrize("shape", [(), (0,), (0, 256), (3, 0)])
def test_arrays_of_one_element_and_none(shape):
    x = jnp.full(shape, -3.0)
    got = dequantize_blockwise(quantize(x, signed=True))
    assert got.shape == shape
    np.testing.assert_array_equal(got, x)


@pytest.mark.parametrize("signed", [False, True])
def test_zeros_are_zeros_and_what_is_not_finite_stays_so(signed):
    x = jnp.zeros(512).at[256].set(jnp.nan)
    q = quantize(x, signed=signed)
    got = dequantize_blockwise(q)
    assert (got[:256] == 0).all() and jnp.isnan(got[256:]).all()
    assert (q.codes[:256] == 0).all() and q.scale[0] == 0
    got = dequantize_blockwise(quantize(jnp.ones(4).at[1].set(-jnp.inf), signed=signed))
    assert not jnp.isfinite(got[1])
    tiny = dequantize_blockwise(quantize(jnp.full(3, 1e-39)))
    assert (tiny == 0).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_other_types_are_quantised_in_float32(dtype):
    x = normal((300,), 5, spread=0.5).astype(dtype)
    q = quantize(x)
    np.testing.assert_array_equal(q.codes, quantize(x.astype(jnp.float32)).codes)
    assert dequantize_blockwise(q).dtype == dtype


def test_it_is_a_pytree_that_jit_scan_and_eval_shape_know():
    x = normal((2, 64), 6)
    q = quantize_blockwise(x, 32)
    assert repr(q) == "BlockQuantized(float32[2,64], dynamic, block 32)"
    assert len(jax.tree.leaves(q)) == 2
    again = lambda q, _: (quantize_blockwise(dequantize_blockwise(q), 32), None)
    assert isinstance(jax.lax.scan(again, q, None, 3)[0], BlockQuantized)
    abstract = jax.eval_shape(lambda x: quantize_blockwise(x, 32), x)
    assert repr(abstract) == repr(q) and jax.tree.structure(abstract) == jax.tree.structure(q)


@pytest.mark.parametrize("block", [0, -32, 31, 48, True])
def test_an_illegal_block_is_refused(block):
    with pytest.raises(ValueError, match="legal are positive multiples of 32"):
        quantize_blockwise(jnp.ones(4), block)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64, jnp.bool_])
def test_an_array_that_is_not_of_real_numbers_is_refused(dtype):
    with pytest.raises(TypeError):
        quantize_blockwise(jnp.ones(4, dtype))


def test_an_unknown_map_or_rounding_is_refused():
    plain = inspect.unwrap(quantize_blockwise)  # past the type checker of these tests
    with pytest.raises(ValueError, match="unknown code map 'fp4'"):
        plain(jnp.ones(4), code="fp4")
    with pytest.raises(ValueError, match="unknown rounding 'up'"):
        plain(jnp.ones(4), rounding="up")
    with pytest.raises(ValueError, match="all but 'nearest' take a seed"):
        quantize_blockwise(jnp.ones(4), rounding="stochastic")
    with pytest.raises(ValueError, match="all but 'nearest' take a seed"):
        quantize_blockwise(jnp.ones(4), seed=jnp.uint32(1))
