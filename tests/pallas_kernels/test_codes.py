"""The arithmetic of the code maps against their definition, exhaustively."""

import hashlib
from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import codes

MAPS = codes.MAPS
encode = jax.jit(codes.encode, static_argnums=1)


def published(map):
    """The values of a map that its definition gives, by value; float32 step by step."""
    if map == "int8":
        return np.arange(-127, 128, dtype=np.float32) / np.float32(127)
    if map == "e4m3":
        finite = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
        return np.unique(finite[np.isfinite(finite)]) / np.float32(448)
    values = [0.0, 1.0]
    for i in range(7):
        edges = np.linspace(0.1, 1, 2 ** (i if map == "dynamic" else i + 1) + 1, dtype=np.float32)
        middles = (edges[:-1] + edges[1:]) / np.float32(2) * np.float32(10.0 ** (i - 6))
        values += [*middles, *(-middles if map == "dynamic" else ())]
    return np.sort(np.float32(values))


def known(map):
    """Codes that stand for a number, by value; of -0 and 0 the latter."""
    table = codes.table(map)
    at = np.flatnonzero(~np.isnan(table) & ~((table == 0) & np.signbit(table)))
    return at[np.argsort(table[at], kind="stable")]


def values_to_round(map, count, seed=0):
    """Uniform, normal and log-uniform numbers, and all that is critical: codes and midpoints."""
    rng = np.random.default_rng(seed)
    third = count // 3
    logs = np.exp(rng.uniform(np.log(1e-9), 0, third)) * rng.choice([-1, 1], third)
    values = np.sort(codes.table(map)[known(map)]).astype(np.float64)
    exact = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(np.float32)
    beside = [np.nextafter(exact, np.float32(to)) for to in (-2, 2)]
    drawn = [rng.uniform(-1, 1, third), rng.normal(size=third) * 0.2, logs]
    y = np.concatenate([*drawn, exact, *beside]).astype(np.float32)
    return np.clip(np.abs(y) if map == "dynamic_unsigned" else y, -1, 1)


@pytest.mark.parametrize("map", MAPS)
def test_the_table_is_the_published_one(map):
    got = codes.table(map)[known(map)]
    want = published(map)
    assert len(got) == {"dynamic": 256, "dynamic_unsigned": 256, "int8": 255, "e4m3": 253}[map]
    # The definition, evaluated in float32 step by step, ends up to two units beside its value.
    ulps = np.abs(got.view(np.int32) - want.view(np.int32))
    assert ulps.max() <= 2


def test_the_tables_do_not_move():
    digest = {m: hashlib.sha256(codes.table(m).tobytes()).hexdigest()[:16] for m in MAPS[:3]}
    assert digest == {
        "dynamic": "035c4114538df2a0",
        "dynamic_unsigned": "02a9b523750e2134",
        "int8": "eb9e5514a721b462",
    }


def test_the_dynamic_table_is_rounded_once():
    exact = [
        Fraction(2 * n + 18 * j + 9, 20 * n * 10 ** (6 - i))
        for i, n in ((i, 2**i) for i in range(7))
        for j in range(n)
    ]
    for got, want in zip(codes.table("dynamic")[128:255], exact, strict=True):
        beside = [np.nextafter(got, np.float32(to)) for to in (0, 2)]
        error = abs(Fraction(float(got)) - want)
        assert all(error < abs(Fraction(float(other)) - want) for other in beside)


@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("jitted", [False, True])  # compiled, multiply and add may be fused
@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int32])
def test_decode_is_the_table_bit_for_bit(map, jitted, dtype):
    decode = jax.jit(codes.decode, static_argnums=1) if jitted else codes.decode
    table = codes.table(map)
    got = np.asarray(decode(jnp.arange(256, dtype=dtype), map))
    assert got.dtype == np.float32
    there = ~np.isnan(table)
    np.testing.assert_array_equal(got[there].view(np.int32), table[there].view(np.int32))
    assert np.isfinite(got).all()


@pytest.mark.parametrize("map", MAPS)
def test_every_value_is_a_fixed_point(map):
    at = known(map)
    np.testing.assert_array_equal(encode(jnp.asarray(codes.table(map)[at]), map), at)


@pytest.mark.parametrize("map", MAPS)
def test_nearest_is_the_argmin_on_a_million_values(map):
    y = values_to_round(map, 1_000_000)
    table = codes.table(map)
    at = np.sort(known(map))  # by code, so that argmin takes the lower one of two
    want = np.concatenate(
        [at[np.abs(part[:, None] - table[at]).argmin(1)] for part in np.array_split(y, 128)]
    )
    np.testing.assert_array_equal(encode(jnp.asarray(y), map), want)


@pytest.mark.parametrize(
    ("map", "bound"),
    [("dynamic", 9 / 1280), ("dynamic_unsigned", 9 / 2560), ("int8", 1 / 254), ("e4m3", 16 / 448)],
)
def test_the_error_is_bounded_and_the_bound_is_reached(map, bound):
    y = values_to_round(map, 300_000, seed=1)
    if map == "dynamic":
        y = y[y > -0.99]  # there is no -1: see the signed scale of jaxaccel.blockwise
    error = np.abs(codes.table(map)[np.asarray(encode(jnp.asarray(y), map))] - y).max()
    assert 0.99 * bound < error <= bound * (1 + 1e-4)


@pytest.mark.parametrize("map", MAPS)
def test_what_lies_outside_is_clipped(map):
    low, high = np.asarray(codes.table(map)[encode(jnp.array([-7.0, 7.0]), map)])
    assert high == 1
    assert low == {"dynamic": codes.table(map)[0], "dynamic_unsigned": 0}.get(map, -1)


@pytest.mark.parametrize(
    ("map", "geometric"), [*((m, False) for m in MAPS), ("dynamic_unsigned", True)]
)
def test_noise_chooses_between_the_two_neighbours_in_proportion(map, geometric):
    y = values_to_round(map, 1000)[:1000]
    if map == "dynamic":
        y = y[y > -0.99]
    draws = 4096
    position = jnp.arange(y.size * draws, dtype=jnp.uint32).reshape(draws, y.size)
    u = codes.noise(jnp.uint32(3), position)
    draw = jax.jit(partial(codes.encode, geometric=geometric), static_argnums=1)
    got = codes.table(map)[np.asarray(draw(jnp.broadcast_to(jnp.asarray(y), u.shape), map, u))]
    values = np.sort(codes.table(map)[known(map)])
    above = np.clip(np.searchsorted(values, y), 1, len(values) - 1)
    low, high = values[above - 1], values[above]
    assert ((got == low) | (got == high)).all()
    share = (y - low) / (high - low)
    if geometric:
        share = share * high / np.maximum(share * high + (1 - share) * low, 1e-30)
    # Within five standard deviations of the mean of so many draws.
    limit = 5 * np.sqrt(np.maximum(share * (1 - share), 1 / draws) / draws)
    assert (np.abs((got == high).mean(0) - share) <= limit).all()


@pytest.mark.parametrize("map", MAPS)
def test_noise_leaves_values_of_the_map_alone(map):
    at = known(map)
    y = jnp.asarray(codes.table(map)[at])
    for u in (0.0, 0.5, 1 - 2.0**-24):
        np.testing.assert_array_equal(encode(y, map, jnp.full_like(y, u)), at)


def test_the_noise_is_uniform_and_unlike_from_seed_to_seed():
    position = jnp.arange(1 << 20, dtype=jnp.uint32)
    u = np.stack([codes.noise(jnp.uint32(seed), position) for seed in (1, 2)])
    assert u.min() >= 0 and u.max() < 1
    counts = np.histogram(u[0], 256, (0, 1))[0]
    assert abs(((counts - 4096) ** 2 / 4096).sum() - 255) < 6 * np.sqrt(2 * 255)
    assert abs(np.corrcoef(u)[0, 1]) < 5e-3 and abs(np.corrcoef(u[0, 1:], u[0, :-1])[0, 1]) < 5e-3
