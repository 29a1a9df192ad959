"""8-bit moments: the four defects of the stock scheme, optax's wrappers, meshes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxaccel import optim, sharding
from jaxaccel.blockwise import BlockQuantized
from jaxaccel.optim_8bit import Moments, block_for, read

STABLE, STOCK = Moments(min_size=0), Moments(min_size=0, mode="bitsandbytes")
BOTH = pytest.mark.parametrize("moments", [STABLE, STOCK], ids=["stable", "bitsandbytes"])


def run(optimizer, gradient, shape, steps):
    """Updates [steps, *shape] on given gradients, and the last state."""

    def step(state, i):
        updates, state = optimizer.update(gradient(i), state)
        return state, updates

    go = jax.jit(lambda: jax.lax.scan(step, optimizer.init(jnp.zeros(shape)), jnp.arange(steps)))
    state, updates = go()
    return np.asarray(updates), state


# ---- The four defects ------------------------------------------------------------------------


@BOTH
def test_defect_1_a_constant_negative_gradient_keeps_its_value(moments):
    adam = optim.scale_by_adam_8bit(moments=moments)
    gradient = jnp.ones((2, 256)).at[1].set(-1.0)
    _, state = run(adam, lambda i: gradient, gradient.shape, 300)
    positive, negative = np.asarray(read(state.mu))[:, 0]
    assert positive == pytest.approx(1, rel=0.005)
    assert negative == pytest.approx(-1 if moments is STABLE else -0.934, rel=0.005)


def spread_gradients(decades, seeds, seed=0):
    """Normal gradients [seeds, 256] with scales log-uniform over so many decades of a block."""
    exponents = np.random.default_rng(seed).uniform(-decades, 0, (seeds, 256))
    scales = jnp.asarray(10.0**exponents, jnp.float32)
    return lambda i: scales * jax.random.normal(jax.random.key(i), (seeds, 256))


@BOTH
def test_defect_2_gradients_over_four_decades_make_no_giant_update(moments):
    adam = optim.scale_by_adam_8bit(moments=moments)
    updates, _ = run(adam, spread_gradients(4, 20), (20, 256), 400)
    peaks = np.abs(updates).max((0, 2))
    if moments is STABLE:
        assert peaks.max() < 2.5
    else:
        assert peaks.max() > 100


@BOTH
def test_defect_3_a_gradient_that_becomes_zero_is_not_amplified(moments):
    # Small within its block: the first moment survives as a code, the second only if it must.
    live = jnp.ones((1, 256)).at[0, 7].set(2e-4)
    gradient = lambda i: jnp.where(i < 5, live, live.at[0, 7].set(0.0))
    updates, _ = run(optim.scale_by_adam_8bit(moments=moments), gradient, (1, 256), 40)
    peak = np.abs(updates[5:, 0, 7]).max()
    assert peak < 1 if moments is STABLE else peak > 1000


def test_defect_3_a_first_moment_beside_a_second_of_zero_is_read_as_zero():
    """As a state of the stock scheme may have it."""
    adam = optim.scale_by_adam_8bit(moments=STABLE)
    state = adam.init(jnp.zeros((1, 256)))
    mu = dataclasses.replace(
        state.mu, codes=state.mu.codes.at[0, 0].set(200), scale=jnp.ones((1, 1))
    )
    updates, after = adam.update(jnp.zeros((1, 256)), state._replace(mu=mu))
    assert (updates == 0).all() and (read(after.mu) == 0).all()


@pytest.mark.parametrize("moments", [STABLE, STOCK], ids=["stable", "bitsandbytes"])
def test_defect_4_the_second_moment_follows_gradients_that_fall(moments):
    shape, before, after = (16, 256), 3000, 2000
    falls = jnp.broadcast_to(jnp.arange(256) % 2 == 0, shape)

    def gradient(i):
        scale = jnp.where((i >= before) & falls, 0.3, 1.0)
        return scale * jax.random.normal(jax.random.key(i), shape)

    def second(optimizer):
        def step(state, i):
            return optimizer.update(gradient(i), state)[1], None

        init = optimizer.init(jnp.zeros(shape))
        state = jax.jit(lambda: jax.lax.scan(step, init, jnp.arange(before + after))[0])()
        return np.asarray(read(state.nu))[:, ::2]

    with jax.numpy_dtype_promotion("standard"):
        exact = second(optax.scale_by_adam())
    ratio = np.exp(np.log(second(optim.scale_by_adam_8bit(moments=moments)) / exact).mean())
    assert abs(ratio - 1) < 0.1 if moments is STABLE else ratio > 2.5


def test_a_positive_second_moment_is_never_zero_and_zero_only_where_no_gradient_was():
    scales = jnp.asarray(10.0 ** np.random.default_rng(1).uniform(-9, 0, (4, 512)), jnp.float32)
    scales = scales.at[:, ::5].set(0.0)
    gradient = lambda i: scales * jax.random.normal(jax.random.key(i), scales.shape)
    _, state = run(optim.scale_by_adam_8bit(moments=STABLE), gradient, scales.shape, 50)
    never = np.asarray(scales) == 0
    np.testing.assert_array_equal(np.asarray(read(state.nu)) == 0, never)
    assert (np.asarray(read(state.mu))[never] == 0).all()
    _, state = run(optim.scale_by_adam_8bit(moments=STOCK), gradient, scales.shape, 50)
    assert ((np.asarray(read(state.nu)) == 0) & ~never).any()


# ---- Against float32 -------------------------------------------------------------------------

PAIRS = {
    "adamw": (
        lambda m: optim.adamw_8bit(1e-2, 0.8, 0.9, 1e-6, weight_decay=0.1, moments=m),
        lambda: optax.adamw(1e-2, 0.8, 0.9, 1e-6, weight_decay=0.1),
    ),
    "lion": (
        lambda m: optim.lion_8bit(1e-2, 0.8, 0.9, weight_decay=0.1, moments=m),
        lambda: optax.lion(1e-2, 0.8, 0.9, weight_decay=0.1),
    ),
    "sgd": (lambda m: optim.sgd_8bit(1e-2, 0.8, moments=m), lambda: optax.sgd(1e-2, 0.8)),
    "nesterov": (
        lambda m: optim.sgd_8bit(1e-2, 0.8, True, moments=m),
        lambda: optax.sgd(1e-2, 0.8, True),
    ),
}
PARAMS = {
    "kernel": jnp.asarray(np.random.default_rng(0).normal(size=(24, 256)), jnp.float32),
    "scale": jnp.ones(24),
}


def train(optimizer, params=PARAMS, steps=12):
    """Parameters after some steps of a noisy quadratic, and the state."""

    def step(carry, i):
        params, state = carry
        noise = lambda p: p - 2 + jax.random.normal(jax.random.key(i), p.shape, p.dtype)
        updates, state = optimizer.update(jax.tree.map(noise, params), state, params)
        return (optax.apply_updates(params, updates), state), None

    with jax.numpy_dtype_promotion("standard"):
        go = jax.jit(lambda p: jax.lax.scan(step, (p, optimizer.init(p)), jnp.arange(steps))[0])
        return go(params)


@pytest.mark.parametrize("name", PAIRS)
def test_float32_leaves_are_optax_and_codes_are_near(name):
    make, plain = PAIRS[name]
    want, _ = train(plain())
    kept, state = train(make(Moments()))
    assert isinstance(
        jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, BlockQuantized))[-1], jax.Array
    )
    np.testing.assert_allclose(kept["scale"], want["scale"], rtol=1e-5)
    for key, moved in want.items():
        coded, moves = kept[key] - PARAMS[key], moved - PARAMS[key]
        error = jnp.linalg.norm(coded - moves) / jnp.linalg.norm(moves)
        assert error < (0.15 if name == "lion" else 0.02), key
    assert not (kept["kernel"] == want["kernel"]).all()


def test_bitsandbytes_decays_after_the_update():
    rate = optax.linear_schedule(0.1, 0.2, 10)
    options = {"eps": 1e-6, "weight_decay": 0.3, "mask": {"a": True, "b": False}}
    optimizer = optim.adamw_8bit(rate, moments=Moments(mode="bitsandbytes"), **options)
    params = {"a": jnp.array([2.0, -1.0]), "b": jnp.array([5.0])}
    state, p = optimizer.init(params), params
    for _ in range(2):
        updates, state = optimizer.update(jax.tree.map(jnp.ones_like, p), state, p)
        p = optax.apply_updates(p, updates)
    want, b = np.array([2.0, -1.0]), 5.0
    for i in range(2):  # gradients of one: the direction is 1 / (1 + eps)
        want = (want - 0.1 * (1 + i / 10)) * (1 - 0.1 * (1 + i / 10) * 0.3)
        b -= 0.1 * (1 + i / 10)
    np.testing.assert_allclose(p["a"], want, rtol=1e-5)
    np.testing.assert_allclose(p["b"], b, rtol=1e-5)


# ---- Form of the state -----------------------------------------------------------------------


def test_which_parameters_have_codes():
    params = {
        "small": jnp.ones((15, 273)),  # 4095
        "large": jnp.ones((16, 256)),
        "half": jnp.ones((16, 256), jnp.bfloat16),
        "embedding": jnp.ones((100, 256)),
    }
    keep = lambda params: {name: name == "embedding" for name in params}
    for options in (Moments(keep=keep), Moments(keep=keep(params))):
        state = optim.scale_by_adam_8bit(moments=options).init(params)
        for moment in (state.mu, state.nu):
            coded = {name: isinstance(x, BlockQuantized) for name, x in moment.items()}
            assert coded == {"small": False, "large": True, "half": True, "embedding": False}
            assert moment["embedding"].dtype == moment["small"].dtype == jnp.float32
            assert moment["half"].dtype == jnp.float32  # whatever the parameter's


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((8, 2048), 256), ((5632,), 352), ((8, 14_336), 256), ((8, 768), 384), ((8, 512), 256),
        ((8, 320), 320), ((8, 128), 128), ((8, 96), 256), ((8, 100), 256), ((), 256), ((0,), 256),
    ],
)  # fmt: skip
def test_blocks_fit_the_last_dimension_and_its_shards(shape, block):
    assert block_for(shape, Moments()) == block
    assert block_for(shape, Moments(mode="bitsandbytes")) == 256


@BOTH
@pytest.mark.parametrize("name", PAIRS)
def test_the_state_keeps_its_form(name, moments):
    optimizer = PAIRS[name][0](moments)
    before = jax.eval_shape(optimizer.init, PARAMS)
    after = jax.eval_shape(optimizer.update, PARAMS, before, PARAMS)[1]
    assert jax.tree.structure(after) == jax.tree.structure(before)
    form = lambda tree: [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(tree)]
    assert form(after) == form(before) == form(optimizer.init(PARAMS))


def test_half_precision_parameters_and_gradients():
    params = {"kernel": PARAMS["kernel"].astype(jnp.bfloat16)}
    optimizer = optim.adamw_8bit(1e-2)
    updates, state = jax.eval_shape(optimizer.update, params, optimizer.init(params), params)
    assert updates["kernel"].dtype == jnp.bfloat16
    assert state[0].mu["kernel"].scale.dtype == jnp.float32


def test_noise_is_the_same_again_and_another_for_each_seed_and_array():
    grads = {"a": PARAMS["kernel"], "b": PARAMS["kernel"]}

    def second(seed):
        adam = optim.scale_by_adam_8bit(moments=Moments(seed=seed))
        return jax.jit(adam.update)(grads, adam.init(grads))[1].nu

    first, again, other = second(0), second(0), second(1)
    np.testing.assert_array_equal(first["a"].codes, again["a"].codes)
    np.testing.assert_array_equal(first["a"].scale, first["b"].scale)
    for unlike in (other["a"], first["b"]):
        assert 0.1 < (first["a"].codes != unlike.codes).mean() < 0.9


# ---- optax's wrappers ------------------------------------------------------------------------

WRAPPERS = {
    "chain": lambda make: optax.chain(optax.clip_by_global_norm(1.0), make(1e-2)),
    "masked": lambda make: optax.masked(make(1e-2), {"kernel": True, "scale": False}),
    "partition": lambda make: optax.partition(
        {"a": make(1e-2), "b": optax.sgd(1e-2)}, {"kernel": "a", "scale": "b"}
    ),
    "inject_hyperparams": lambda make: optax.inject_hyperparams(make)(learning_rate=1e-2),
    "MultiSteps": lambda make: optax.MultiSteps(make(1e-2), 2).gradient_transformation(),
    "apply_if_finite": lambda make: optax.apply_if_finite(make(1e-2), 3),
    "schedule": lambda make: make(optax.cosine_decay_schedule(1e-2, 10)),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_it_works_inside_optaxs_wrappers(wrapper):
    def make(learning_rate):
        return optim.adamw_8bit(learning_rate)

    def plain(learning_rate):
        return optax.adamw(learning_rate)

    got, state = train(WRAPPERS[wrapper](make))
    want, _ = train(WRAPPERS[wrapper](plain))
    assert any(x.dtype == jnp.uint8 for x in jax.tree.leaves(state))
    for key in want:
        moved = jnp.linalg.norm(want[key] - PARAMS[key])
        assert jnp.linalg.norm(got[key] - want[key]) < 0.05 * moved


def test_a_gradient_that_is_not_finite_leaves_skipped_state_bit_for_bit():
    optimizer = optax.apply_if_finite(optim.adamw_8bit(1e-2), 3)
    params, state = train(optimizer, steps=3)
    bad = jax.tree.map(lambda p: p.at[0].set(jnp.nan), params)
    updates, after = jax.jit(optimizer.update)(bad, state, params)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), state.inner_state, after.inner_state)
    assert all(jax.tree.leaves(same)) and all((u == 0).all() for u in jax.tree.leaves(updates))


@BOTH
def test_without_skipping_it_is_seen(moments):
    adam = optim.scale_by_adam_8bit(moments=moments)
    update = jax.jit(adam.update)
    for value in (jnp.nan, jnp.inf):
        g = jnp.ones((2, 256)).at[0, 3].set(value)
        _, state = update(jnp.ones_like(g), update(g, adam.init(g))[1])
        assert not np.isfinite(read(state.nu)[0, 3]) and np.isfinite(read(state.nu)[1]).all()


# ---- Meshes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "moments"),
    [((16, 2048), STABLE), ((3, 128, 24), STABLE), ((48, 768), STABLE), ((64, 100), STOCK)],
)  # whole blocks a shard; flattened; blocks shared by shards; bitsandbytes' order
def test_fsdp_over_eight_devices_has_the_codes_of_one(shape, moments):
    mesh = sharding.make_mesh(sharding.parse_mesh("", 8))
    adam = optim.scale_by_adam_8bit(moments=moments)
    gradient = lambda i: jax.random.normal(jax.random.key(i), shape)

    @jax.jit
    def step(g, state):
        return adam.update(g, state)

    one = eight = adam.init(jnp.zeros(shape))
    dim = max(d for d, size in enumerate(shape) if size % 8 == 0)
    place = NamedSharding(mesh, PartitionSpec(*[None] * dim, "fsdp"))
    for i in range(4):
        u_one, one = step(gradient(i), one)
        u_eight, eight = step(jax.device_put(gradient(i), place), eight)
        np.testing.assert_array_equal(one.mu.codes, eight.mu.codes)
        np.testing.assert_array_equal(one.nu.codes, eight.nu.codes)
        np.testing.assert_array_equal(one.mu.scale, eight.mu.scale)
        np.testing.assert_allclose(u_one, u_eight, rtol=1e-6)


# ---- Bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [0, -256, 33, 100])
def test_an_illegal_block_is_refused(block):
    with pytest.raises(ValueError, match=r"block is .*; legal are positive multiples of 32"):
        Moments(block=block)


def test_an_unknown_mode_and_seed_are_refused():
    unknown = Moments()
    object.__setattr__(unknown, "mode", "stabel")  # past the type checker of these tests
    with pytest.raises(ValueError, match="mode is 'stabel'; legal are stable and bitsandbytes"):
        unknown.__post_init__()
    with pytest.raises(ValueError, match="seed is -1"):
        Moments(seed=-1)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64])
@pytest.mark.parametrize("make", [optim.adamw_8bit, optim.lion_8bit, optim.sgd_8bit])
def test_parameters_that_are_not_real_numbers_are_refused(make, dtype):
    with pytest.raises(TypeError, match=r"parameter \['table'\] is .*: mask others out"):
        make(1e-3).init({"table": jnp.zeros((64, 64), dtype)})


def test_a_state_of_another_block_size_is_refused():
    params = {"kernel": jnp.ones((8, 1024))}
    state = optim.adamw_8bit(1e-3, moments=Moments(block=512)).init(params)
    with pytest.raises(ValueError, match=r"\(8, 1024\) has blocks of 512.*Moments\(block=512\)"):
        optim.adamw_8bit(1e-3).update(params, state, params)


@pytest.mark.parametrize(("made", "used"), [(STOCK, STABLE), (STABLE, STOCK)])
def test_a_state_of_the_other_mode_is_refused(made, used):
    params = {"kernel": jnp.ones((8, 1024))}
    for make in (optim.adamw_8bit, optim.lion_8bit, optim.sgd_8bit):
        state = make(1e-3, moments=made).init(params)
        message = rf"is of mode '{made.mode}'.*Moments\(mode='{made.mode}'\)"
        with pytest.raises(ValueError, match=message):
            make(1e-3, moments=used).update(params, state, params)
        with pytest.raises(ValueError, match=r"gradient \(1024, 8\) for .* state \(8, 1024\)"):
            make(1e-3, moments=made).update({"kernel": jnp.ones((1024, 8))}, state, params)


def test_rows_of_no_whole_blocks_on_explicit_axes_are_refused_in_one_line():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        w = jax.device_put(jnp.ones((64, 520)), jax.P("x"))
        for make in (optim.adamw_8bit, optim.lion_8bit, optim.sgd_8bit):
            optimizer = make(1e-3)
            with pytest.raises(
                ValueError, match=r"\[64, 520\] in blocks.*explicit mesh axes.*Auto"
            ):
                optimizer.update(w, optimizer.init(w), w)
