"""Matmuls in FP8: right values, right gradients, FP8 residuals, nothing non-finite hidden."""

import functools

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxaccel import fp8, numerics, sharding
from pallas_kernels import backend, fp8_matmul

PLAIN = (((1,), (0,)), ((), ()))
RECIPES = ("current", "delayed", "block")


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def call(recipe, scaling=fp8.Scaling()):  # noqa: B008 (frozen)
    """A matmul of any recipe with the signature of `jax.lax.dot_general`; state still empty."""
    dot = fp8.dot_general(recipe, scaling)
    return functools.partial(dot, state=dot.init_state()) if recipe == "delayed" else dot


def all_three(dot, x, w, g, dims=PLAIN):
    """Output and the two gradients."""
    out, pull = jax.vjp(lambda x, w: dot(x, w, dims), x, w)
    return out, *pull(g)


def exact(x, w, g):
    """The three matmuls in float64."""
    x, w, g = (np.asarray(a, np.float64) for a in (x, w, g))
    return x @ w, g @ w.T, x.T @ g


def sqnr(reference, x):
    reference, x = np.asarray(reference, np.float64), np.asarray(x, np.float64)
    return 20 * np.log10(np.linalg.norm(reference) / np.linalg.norm(reference - x))


# ---- Values ---------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("size", [1.0, 1e-6, 1e6])
def test_noise_of_normal_and_of_tiny_data(recipe, size):
    x, w, g = normal(0, 256, 384) * size, normal(1, 384, 128) * size, normal(2, 256, 128) * size
    got, want = all_three(call(recipe), x, w, g), exact(x, w, g)
    backward = 28 if recipe == "block" else 24  # block: e4m3 for the gradient too
    for bar, a, b in zip((28, backward, backward), want, got):
        assert sqnr(a, b) >= bar
        assert float(jnp.mean(b == 0)) < 0.01  # no gradient is zero because its scale was 1


def test_constant_tiny_data_is_not_flushed():
    x = jnp.full((32, 64), 1e-6)
    out, dx, dw = all_three(call("current"), x, x.T, jnp.full((32, 32), 1e-6))
    np.testing.assert_allclose(out, 64e-12, rtol=1e-6)
    np.testing.assert_allclose(dx, 32e-12, rtol=1e-6)
    np.testing.assert_allclose(dw, 32e-12, rtol=1e-6)


def test_an_outlier_spoils_its_tile_only_in_block():
    """One activation a million times the rest: its row is its own, the others shall live."""
    x, w, g = normal(0, 256, 384), normal(1, 384, 256), normal(2, 256, 256)
    x = x.at[17, 200].set(1e6)
    want = exact(x, w, g)
    block, current = (all_three(call(recipe), x, w, g) for recipe in ("block", "current"))
    rows = np.arange(256) != 17
    assert sqnr(want[0][rows], block[0][rows]) >= 25
    assert sqnr(want[0][rows], current[0][rows]) < 1  # flushed to zero
    # The weight gradient contracts over tokens: the outlier lies in row 200.
    rows = np.arange(384) != 200
    assert sqnr(want[2][rows], block[2][rows]) >= 25
    assert sqnr(want[2][rows], current[2][rows]) < 1
    assert sqnr(want[1], block[1]) >= 25  # no part of it

    # An outlier in the gradient; e5m2 has the range for it, at two bits of mantissa.
    x, g = normal(0, 256, 384), g.at[5, 6].set(1e6)
    want, block = exact(x, w, g), all_three(call("block"), x, w, g)
    rows, columns = np.arange(256) != 5, np.arange(256) != 6
    assert sqnr(want[1][rows], block[1][rows]) >= 25
    assert sqnr(want[2][:, columns], block[2][:, columns]) >= 25


def test_block_by_kernels_is_block_by_loops(monkeypatch):
    """What a program for Hopper computes, in the simulator; a batch of two, ragged sizes."""
    x, w, g = normal(0, 2, 130, 260), normal(1, 260, 140), normal(2, 2, 130, 140)
    dims = (((2,), (0,)), ((), ()))
    want = all_three(call("block"), x, w, g, dims)
    by_kernel = functools.partial(fp8_matmul.block_scaled_matmul, implementation="mosaic_gpu")
    monkeypatch.setattr(fp8_matmul, "block_scaled_matmul", by_kernel)
    with backend.simulate():
        run = jax.jit(functools.partial(all_three, call("block"), dims=dims))
        got = jax.block_until_ready(run(x, w, g))
    for a, b in zip(want, got):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5 * float(jnp.abs(a).max()))


def test_float32_scales_have_no_bias_in_bfloat16():
    """With scales in bfloat16, every product would be off in the same direction."""
    w = jnp.eye(64, dtype=jnp.bfloat16) * jnp.bfloat16(1.0)
    x = jnp.full((16, 64), 3.3, jnp.bfloat16)
    out = call("current")(x, w, PLAIN, preferred_element_type=jnp.float32)
    np.testing.assert_allclose(out, np.asarray(x, np.float32), rtol=1e-6)


DIMS = {
    "plain": ((16, 32), (32, 48), PLAIN),
    "transposed rhs": ((16, 32), (48, 32), (((1,), (1,)), ((), ()))),
    "transposed lhs": ((32, 16), (32, 48), (((0,), (0,)), ((), ()))),
    "three dims": ((2, 3, 32), (32, 48), (((2,), (0,)), ((), ()))),
    "to heads": ((2, 3, 32), (32, 4, 8), (((2,), (0,)), ((), ()))),
    "from heads": ((2, 3, 4, 8), (4, 8, 16), (((2, 3), (0, 1)), ((), ()))),
    "contracting swapped": ((2, 8, 4), (4, 8, 16), (((1, 2), (1, 0)), ((), ()))),
    "a batch": ((5, 3, 32), (5, 32, 7), (((2,), (1,)), ((0,), (0,)))),
    "two batches, moved": ((32, 5, 3, 2), (2, 7, 32, 5), (((0,), (2,)), ((1, 3), (3, 0)))),
    "one row": ((1, 32), (32, 1), PLAIN),
    "vector": ((32,), (32, 5), (((0,), (0,)), ((), ()))),
    "no tokens": ((0, 32), (32, 5), PLAIN),
    "nothing to contract": ((3, 0), (0, 5), PLAIN),
    "more than a block": ((130, 200), (200, 140), PLAIN),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", DIMS)
def test_any_dims_agree_with_lax(recipe, case):
    """Integers of three bits and scales of powers of two: FP8 is then exact."""
    lhs_shape, rhs_shape, dims = DIMS[case]
    integers = lambda seed, shape: jnp.float32(
        jax.random.randint(jax.random.key(seed), shape, -7, 8)
    )
    lhs, rhs = integers(0, lhs_shape), integers(1, rhs_shape)
    want, pull = jax.vjp(lambda a, b: jax.lax.dot_general(a, b, dims), lhs, rhs)
    g = integers(2, want.shape)
    dot = call(recipe, fp8.Scaling(power_of_two=True))
    got, pull_fp8 = jax.vjp(lambda a, b: dot(a, b, dims), lhs, rhs)
    for a, b in zip((want, *pull(g)), (got, *pull_fp8(g))):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_drops_into_flax(recipe):
    x, dot = normal(0, 4, 7, 32), fp8.dot_general(recipe)
    layer = nnx.Linear(32, 16, dot_general=dot, rngs=nnx.Rngs(0))
    plain = nnx.Linear(32, 16, rngs=nnx.Rngs(0))
    assert sqnr(plain(x), layer(x)) > 25
    dense = flax.linen.Dense(16, dot_general=dot)
    params = dense.init(jax.random.key(0), x)
    want = flax.linen.Dense(16).apply(params, x)
    assert sqnr(want, dense.apply(params, x)) > 25
    loss = lambda module: lambda params: jnp.sum(module.apply(params, x) ** 2)
    want, got = (
        jax.grad(loss(module))(params)["params"]["kernel"]
        for module in (flax.linen.Dense(16), dense)
    )
    assert sqnr(want, got) > 20


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_wider_result_is_not_rounded_first(recipe):
    x, w = jnp.full((4, 32), 65504, jnp.float16), jnp.ones((32, 16), jnp.float16)
    out = call(recipe)(x, w, PLAIN, preferred_element_type=jnp.float32)
    np.testing.assert_allclose(out, 65504 * 32, rtol=1e-3)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("recipe", RECIPES)
def test_dtypes_are_those_of_the_operands(recipe, dtype):
    x, w = normal(0, 8, 32, dtype=dtype), normal(1, 32, 16, dtype=dtype)
    out, dx, dw = all_three(call(recipe), x, w, normal(2, 8, 16, dtype=dtype))
    assert out.dtype == dx.dtype == dw.dtype == dtype
    assert call(recipe)(x, w, PLAIN, preferred_element_type=jnp.float32).dtype == jnp.float32


def test_float16_products_do_not_overflow():
    """The unscaled sum, up to 448 * 448 * K, is far beyond float16."""
    x, w = normal(0, 64, 512, dtype=jnp.float16), normal(1, 512, 64, dtype=jnp.float16)
    got = all_three(call("current"), x, w, normal(2, 64, 64, dtype=jnp.float16))
    assert all(bool(jnp.all(jnp.isfinite(a))) for a in got)


# ---- What is not finite ---------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_so(recipe, bad):
    x, w, g = normal(0, 8, 32), normal(1, 32, 16), normal(2, 8, 16)
    if recipe == "delayed":  # with scales from a finite step before
        dot = fp8.dot_general(recipe)
        loss = lambda state: jnp.sum(dot(x, w, PLAIN, state=state) * g)
        dot = functools.partial(dot, state=jax.grad(loss)(dot.init_state()))
    else:
        dot = call(recipe)
    finite = lambda a: bool(jnp.all(jnp.isfinite(a)))
    out, dx, dw = all_three(dot, x.at[3, 4].set(bad), w, g)
    assert not finite(out[3]) and not finite(dw[4])
    out, dx, dw = all_three(dot, x, w.at[4, 5].set(bad), g)
    assert not finite(out[:, 5]) and not finite(dx[:, 4])
    out, dx, dw = all_three(dot, x, w, g.at[3, 5].set(bad))
    assert finite(out) and not finite(dx[3]) and not finite(dw[:, 5])


def test_finite_values_saturate():
    top = jnp.array([1e30, -1e30, 449.0, 0.0])
    values = numerics.cast(top, jnp.float32(1), "e4m3").astype(jnp.float32)
    assert values.tolist() == [448.0, -448.0, 448.0, 0.0]


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("top", [0.0, 1e-45, 2e-38, 1e-30, 1e-6, 1.0, 3.0, 448.0, 1e30, 3.4e38])
def test_scales_are_finite_and_hold_the_largest(format, power_of_two, top):
    top = jnp.float32(top)
    scale = numerics.scale(top, format, power_of_two=power_of_two)
    # Hardware may take a subnormal number for zero; then the cast does too.
    assert np.isfinite(scale) and (float(scale) > 0 or float(top) < 2.0**-126)
    back = float(numerics.cast(top[None], scale, format).astype(jnp.float32)[0]) * float(scale)
    if top > 1e-30:
        assert abs(back - float(top)) <= 0.125 * float(top)
    assert np.isfinite(back)
    if power_of_two and float(scale) > 0:
        assert float(jnp.frexp(scale)[0]) == 0.5


# ---- What is kept and what is multiplied ----------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_only_fp8_is_kept_for_the_backward_pass(recipe):
    x, w = normal(0, 256, 256, dtype=jnp.bfloat16), normal(1, 256, 256, dtype=jnp.bfloat16)
    _, pull = jax.vjp(lambda x, w: call(recipe)(x, w, PLAIN), x, w)
    kept = jax.tree.leaves(pull)
    wide = [a for a in kept if a.dtype.itemsize > 1 and a.size > 256 * 256 // 100]
    assert not wide and sum(a.nbytes for a in kept) < 1.05 * 2 * 256 * 256


def dots(jaxpr):
    """Every dot_general of a jaxpr, inner ones too."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn
        for value in jax.tree.leaves(
            eqn.params, is_leaf=lambda v: hasattr(v, "jaxpr") or hasattr(v, "eqns")
        ):
            if hasattr(value, "jaxpr") or hasattr(value, "eqns"):
                yield from dots(getattr(value, "jaxpr", value))


@pytest.mark.parametrize("accumulation", ["fast", "full"])
def test_operands_and_accumulation(accumulation):
    dot = fp8.dot_general("current", fp8.Scaling(accumulation=accumulation))
    x, w, g = normal(0, 8, 32), normal(1, 32, 16), normal(2, 8, 16)
    jaxpr = jax.make_jaxpr(functools.partial(all_three, dot))(x, w, g)
    forward, dw, dx = dots(jaxpr.jaxpr)
    types = [[v.aval.dtype for v in eqn.invars] for eqn in (forward, dx, dw)]
    e4m3, e5m2 = jnp.float8_e4m3fn, jnp.float8_e5m2
    assert types == [[e4m3, e4m3], [e5m2, e4m3], [e4m3, e5m2]]
    full = [eqn.params["precision"][0] == jax.lax.Precision.HIGHEST for eqn in (forward, dx, dw)]
    assert full == [accumulation == "full", True, True]
    assert all(eqn.outvars[0].aval.dtype == jnp.float32 for eqn in (forward, dx, dw))


def test_precision_highest_is_honoured():
    x, w = normal(0, 8, 32), normal(1, 32, 16)
    for precision in ("highest", jax.lax.Precision.HIGHEST, (jax.lax.Precision.HIGHEST,) * 2):
        dot = lambda x, w, p=precision: call("current")(x, w, PLAIN, p)
        (eqn,) = dots(jax.make_jaxpr(dot)(x, w).jaxpr)
        assert eqn.params["precision"][0] == jax.lax.Precision.HIGHEST


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_cast_before_give_the_same(recipe):
    dot = fp8.dot_general(recipe)
    x, w, g = normal(0, 8, 200), normal(1, 3, 200, 16), normal(2, 3, 8, 16)
    state = dot.init_state((3,))
    cast = fp8.quantize_weights({"w": w}, dot, {"w": state} if state else None)["w"]

    def run(i, weight):
        more = {} if state is None else {"state": take(state, i)}
        y, pull = jax.vjp(lambda w, m: dot(x, w, PLAIN, weight=weight, **m), w[i], more)
        return y, pull(g[i])

    take = lambda tree, i: jax.tree.map(lambda a: a[i], tree)
    for i in range(3):
        plain, prepared = run(i, None), run(i, take(cast, i))
        for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(prepared)):
            np.testing.assert_allclose(a, b, rtol=1e-6)  # the stacked maximum divides otherwise


# ---- Transformations ------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_vmap_is_one_call_for_each_example(recipe):
    x, w, g = normal(0, 3, 8, 32), normal(1, 32, 16), normal(2, 3, 8, 16)
    x = x * jnp.array([1.0, 100.0, 1e-4])[:, None, None]
    one = lambda x, g: all_three(fp8.dot_general(recipe), x, w, g)
    for i in range(3):
        for a, b in zip(one(x[i], g[i]), jax.vmap(one)(x, g)):
            np.testing.assert_allclose(a, b[i], rtol=1e-6)


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_shard_map_sums_the_weight_gradient(recipe):
    mesh = sharding.make_mesh({"data": 8})
    x, w = normal(0, 64, 32), normal(1, 32, 16)
    shards = functools.partial(jax.shard_map, mesh=mesh, out_specs=P())

    @functools.partial(shards, in_specs=(P("data"), P()))
    def dw(x, w):
        return jax.grad(lambda w: jax.lax.psum(fp8.dot_general(recipe)(x, w, PLAIN).sum(), "data"))(
            w
        )

    want = exact(x, w, jnp.ones((64, 16)))[2]
    assert sqnr(want, jax.jit(dw)(x, w)) > 24


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_an_eight_device_mesh_gives_what_one_gives(recipe):
    mesh = sharding.make_mesh({"fsdp": 4, "tensor": 2})
    put = lambda a, *axes: jax.device_put(a, jax.NamedSharding(mesh, P(*axes)))
    args = normal(0, 64, 256), normal(1, 256, 384), normal(2, 64, 384)
    step = jax.jit(functools.partial(all_three, fp8.dot_general(recipe)))
    placed = put(args[0], "fsdp"), put(args[1], "fsdp", "tensor"), put(args[2], "fsdp", "tensor")
    for a, b in zip(step(*args), step(*placed)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


# ---- Bad input ------------------------------------------------------------------------------


def test_bad_input_says_what_would_be_legal():
    x, w = normal(0, 4, 32), normal(1, 32, 16)
    for options, message in (
        ({"window": 0}, "window is 0 steps; .* at least 1"),
        ({"lhs": "e5m2"}, "no matmul of e5m2 with e5m2"),
        ({"lhs": "e5m2", "rhs": "e5m2", "gradient": "e4m3"}, "no matmul of e5m2 with e5m2"),
        ({"margin": 40}, "margin is 40 doublings; legal is 0 to 16"),
    ):
        with pytest.raises(ValueError, match=message):
            fp8.Scaling(**options)
    scaling = fp8.Scaling()
    object.__setattr__(scaling, "use", "mean")  # past the types that are checked under test
    with pytest.raises(ValueError, match="use is 'mean'; legal: max, most_recent"):
        scaling.__post_init__()
    with pytest.raises(ValueError, match="unknown recipe 'dynamic'; known: current, delayed"):
        fp8.dot_general("dynamic")
    with pytest.raises(ValueError, match="delayed scaling needs a state"):
        fp8.dot_general("delayed")(x, w, PLAIN)
    with pytest.raises(ValueError, match="delayed scaling needs a state"):
        fp8.quantize_weights(w, fp8.dot_general("delayed"))
    with pytest.raises(ValueError, match="current scaling has no state"):
        fp8.dot_general()(x, w, PLAIN, state=fp8.dot_general("delayed").init_state())
    with pytest.raises(ValueError, match="rhs is float8_e4m3fn; legal: float16"):
        fp8.dot_general()(x, w.astype(jnp.float8_e4m3fn), PLAIN)
    with pytest.raises(ValueError, match=r"got float32\[16\]; weights are"):
        fp8.quantize_weights(w[0], fp8.dot_general())


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_what_lax_refuses_is_refused(recipe):
    """Operands are reshaped and padded: a mismatch could pass unseen."""
    dot = fp8.dot_general(recipe)
    for lhs, rhs, dims in (
        ((4, 6), (8, 5), PLAIN),
        ((4, 2, 6), (3, 4, 5), (((1, 2), (0, 1)), ((), ()))),
        ((2, 3, 4, 5), (3, 2, 5, 6), (((3,), (2,)), ((0, 1), (0, 1)))),
    ):
        with pytest.raises(TypeError, match="dot_general requires"):
            dot(jnp.ones(lhs), jnp.ones(rhs), dims)


def test_a_weight_that_is_not_this_one_is_refused():
    x, w = normal(0, 4, 128), normal(1, 128, 128)
    current, block = fp8.dot_general(), fp8.dot_general("block")
    for dot, weight, rhs, dims in (
        (current, fp8.quantize_weights(w, block), w, PLAIN),
        (block, fp8.quantize_weights(w, current), w, PLAIN),
        (current, fp8.quantize_weights(w[:, :16], current), w, PLAIN),
        (current, fp8.quantize_weights(w, current), w, (((1,), (1,)), ((), ()))),
    ):
        with pytest.raises(ValueError, match="it must be quantize_weights of the rhs"):
            dot(x, rhs, dims, weight=weight)


def test_explicit_mesh_axes_are_refused():
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Explicit,))
    x = jax.device_put(normal(0, 8, 32), jax.NamedSharding(mesh, P("data")))
    with pytest.raises(ValueError, match=r"explicit axes; make the mesh with axis_types"):
        fp8.dot_general()(x, normal(1, 32, 16), PLAIN)


def test_the_filter_says_what_it_leaves_out():
    shapes = {"up": (16, 16), "down": (72, 72), "norm": (32,)}
    reasons = {"up": "", "down": "72 is no multiple of 16", "norm": "no matrix"}
    assert fp8.choose(shapes) == reasons
    assert fp8.choose(shapes, "u*")["norm"] == "not asked for"
    with pytest.raises(ValueError, match="FP8 for 'gate': there is no such layer; layers: up"):
        fp8.choose(shapes, "up,gate")
    with pytest.raises(ValueError, match="no layer for FP8 in 'down': up: not asked for; down: 72"):
        fp8.choose(shapes, "down")
