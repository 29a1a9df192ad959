"""Casts made by the op before a matmul are the casts that the matmul would make itself."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxaccel import fp8, fp8_fused, names, nn, sharding
from pallas_kernels.rms_norm import rms_norm, rms_norm_fp8
from pallas_kernels.swiglu import swiglu

DOT = fp8.dot_general("delayed", warm_start=False)
PLAIN = (((1,), (0,)), ((), ()))
M, K, N = 24, 48, 32


def inputs(seed=0):
    keys = jax.random.split(jax.random.key(seed), 5)
    x, residual = (jax.random.normal(key, (M, K)) for key in keys[:2])
    weights = [jax.random.normal(key, (K, N)) * 0.1 for key in keys[2:4]]
    return x, residual, 1 + 0.1 * jax.random.normal(keys[4], (K,)), weights


def known_state(scale=0.02):
    """Scales for operands of about 1, and for gradients."""
    state = DOT.init_state()
    return dataclasses.replace(state, scale=jnp.array([scale, 0.001, 1e-4]))


@jax.jit
def apart(x, residual, scale, weights, states):
    """Sum, norm, and two matmuls that each make their own cast."""
    total = x + residual
    y = rms_norm(total, scale)
    outs = [DOT(y, w, PLAIN, state=s) for w, s in zip(weights, states, strict=True)]
    return total, outs


@jax.jit
def fused(x, residual, scale, weights, states):
    total, y = fp8_fused.rms_norm(x, scale, 1e-6, residual=residual, state=states[0])
    outs = [DOT(y, w, PLAIN, state=s) for w, s in zip(weights, states, strict=True)]
    return total, outs


def gradients(function, *args):
    def loss(*args):
        total, outs = function(*args)
        return sum(jnp.sum(jnp.sin(y)) for y in (total, *outs))

    return jax.grad(loss, argnums=tuple(range(len(args))))(*args)


def test_a_fused_norm_gives_the_same_numbers_and_the_same_next_states():
    args = (*inputs(), [known_state(), known_state()])
    chex.assert_trees_all_equal(fused(*args), apart(*args))
    got, want = gradients(fused, *args), gradients(apart, *args)
    chex.assert_trees_all_close(got, want, rtol=1e-6, atol=1e-7)
    chex.assert_trees_all_equal(got[4], want[4])
    assert float(jnp.max(jnp.abs(got[2]))) > 0.1
    next_state = fp8.settle(args[4], got[4])[1]
    assert float(next_state.scale[0]) == pytest.approx(float(next_state.history[0, 0]) / 448)
    assert float(next_state.history[0, 0]) > 1


def test_a_fused_activation_gives_the_same_numbers():
    gate, up, _, (w, _) = inputs(1)
    state = known_state()

    def loss(cast_first, gate, up, state):
        y = fp8_fused.swiglu(gate, up, state=state) if cast_first else swiglu(gate, up)
        return jnp.sum(jnp.sin(DOT(y, w, PLAIN, state=state)))

    for cast_first in (True, False):
        value = jax.jit(jax.value_and_grad(loss, argnums=(1, 2, 3)), static_argnums=0)
        found = value(cast_first, gate, up, state)
        want = value(not cast_first, gate, up, state)
        chex.assert_trees_all_close(found, want, rtol=1e-6, atol=1e-7)
        assert float(jnp.max(jnp.abs(found[1][0]))) > 0.01


def test_without_a_state_nothing_is_cast():
    x, residual, scale, _ = inputs()
    total, y = fp8_fused.rms_norm(x, scale, 1e-6, residual=residual)
    chex.assert_trees_all_equal((total, y), rms_norm(x, scale, residual=residual))
    assert jnp.array_equal(fp8_fused.swiglu(x, residual), swiglu(x, residual))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_scale_that_is_not_known_serves_zeros_only(bad):
    x, residual, _, (w, _) = inputs()
    cold = known_state(0.0)

    def out(x, state):
        y = fp8_fused.swiglu(x, residual, state=state)
        return DOT(y, w, PLAIN, state=state)

    assert bool(jnp.all(jnp.isnan(out(x, cold))))
    assert bool(jnp.all(out(0 * x, cold) == 0))
    found = out(x.at[3, 5].set(bad), known_state())
    assert bool(jnp.all(jnp.isnan(found[3])))
    assert bool(jnp.all(jnp.isfinite(found[4:])))


def test_a_cast_is_for_delayed_scaling_and_plain_dims():
    x, _, scale, (w, _) = inputs()
    cast = fp8_fused.rms_norm(x, scale, 1e-6, state=known_state())
    assert (cast.shape, cast.dtype) == ((M, K), jnp.float32)
    with pytest.raises(ValueError, match=r"lhs is a Cast, which `delayed` .* got current"):
        fp8.dot_general("current")(cast, w, PLAIN)
    with pytest.raises(ValueError, match=r"got delayed and dims \(\(\(0,\)"):
        DOT(cast, w.T, (((0,), (1,)), ((), ())), state=known_state())


def test_a_decoder_shares_casts_and_keeps_eight_bits():
    """Norms of the layers and the gated activation; not the last norm, which the head reads."""
    config = nn.DecoderConfig(32, 2, width=32, heads=2, kv_heads=1, head_size=16, mlp_width=48)
    seen = []

    def spy(name, op):
        def call(*args, **options):
            seen.append((name, options.get("state") is not None))
            return op(*args, **options)

        return call

    def decoder(**dots):
        dots = dict.fromkeys(nn.linear_shapes(config), DOT) | dots
        ops = {"norm": spy("norm", fp8_fused.rms_norm), "glu": spy("glu", fp8_fused.swiglu)}
        return nn.Decoder(config, rngs=nnx.Rngs(0), dot_general=dots, **ops)

    tokens = jnp.zeros((1, 5), jnp.int32)
    jax.eval_shape(lambda: decoder()(tokens))
    assert seen == [("norm", True), ("norm", True), ("glu", True), ("norm", False)]
    seen.clear()
    # One linear that reads the norm is not FP8: the norm casts for none.
    jax.eval_shape(lambda: decoder(key=jax.lax.dot_general)(tokens))
    assert seen == [("norm", False), ("norm", True), ("glu", True), ("norm", False)]


def test_names_are_on_eight_bits():
    x, _, scale, _ = inputs()
    cast = lambda x: names.tag(
        fp8_fused.rms_norm(x, scale, 1e-6, state=known_state()), names.MLP_NORM
    )
    jaxpr = str(jax.make_jaxpr(cast)(x))
    assert f"f8_e4m3fn[{M},{K}] = name[name=mlp_norm]" in jaxpr


@pytest.mark.parametrize("mesh", ["fsdp=8", "data=2,fsdp=2,tensor=2"])
def test_rows_on_shards_are_those_of_one_device(mesh):
    mesh = sharding.make_mesh(sharding.parse_mesh(mesh, 8))
    keys = jax.random.split(jax.random.key(0), 2)
    x, residual = (jax.random.normal(key, (8, 6, 32)) for key in keys)
    scale = jnp.linspace(0.5, 1.5, 32)
    cast = jnp.float32(0.02)

    def loss(op, x, residual, scale):
        total, y = op(x, scale, cast, 1e-6, residual=residual)
        values = y.values.astype(jnp.float32)
        return jnp.sum(jnp.sin(total)) + jnp.sum(y.like * jnp.cos(values)), (total, values, y.amax)

    spread = sharding.rows_on_shards(rms_norm_fp8, mesh)
    found = [
        jax.jit(jax.value_and_grad(lambda *a, op=op: loss(op, *a), (0, 1, 2), has_aux=True))(
            *jax.device_put((x, residual), jax.NamedSharding(mesh, P(("data", "fsdp")))), scale
        )
        for op in (spread, rms_norm_fp8)
    ]
    chex.assert_trees_all_close(*jax.device_get(found), rtol=1e-5, atol=1e-6)
    assert float(jnp.max(jnp.abs(found[0][1][2]))) > 0.1


def test_rows_on_shards_leaves_other_arrays_alone():
    mesh = sharding.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    heads = jnp.ones((2, 3, 4, 8))
    out = sharding.rows_on_shards(rms_norm, mesh)(heads, jnp.ones(8))
    assert jnp.array_equal(out, rms_norm(heads, jnp.ones(8)))
