"""Policies change what is kept, and nothing else."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel import names, remat
from jaxaccel.nn import Decoder, DecoderConfig

CONFIG = DecoderConfig(
    vocab_size=17, layers=3, width=12, heads=4, kv_heads=2, head_size=6, mlp_width=20
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 17, (2, 9)), jnp.int32)


def gradient(policy):
    """Jitted gradient of a decoder by its parameters, and its arguments."""
    model = Decoder(CONFIG, rngs=nnx.Rngs(0), scan=functools.partial(remat.scan, policy=policy))
    graphdef, params = nnx.split(model)

    def loss(params):
        model = nnx.merge(graphdef, params)
        return jnp.sum(jnp.sin(3 * model(TOKENS) @ model.head_VD.T))

    return jax.jit(jax.value_and_grad(loss)), nnx.to_pure_dict(params)


@pytest.fixture(scope="module")
def compiled():
    """By policy: loss and gradients, matmuls in the program, bytes of temporary memory."""
    out = {}
    for policy in remat.POLICIES:
        fn, params = gradient(policy)
        lowered = fn.lower(params)
        matmuls = len(re.findall(r"dot_general", lowered.as_text()))
        out[policy] = fn(params), matmuls
    return out


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_values_and_gradients_are_the_same(compiled, policy):
    (loss, grads), (want_loss, want) = compiled[policy][0], compiled["none"][0]
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(want)):
        assert np.linalg.norm(b) > 1e-3, path
        np.testing.assert_allclose(a, b, atol=2e-6 * np.abs(b).max(), err_msg=str(path))


def test_only_full_repeats_matmuls(compiled):
    none, selective, full = (compiled[policy][1] for policy in ("none", "selective", "full"))
    assert none == selective
    # Of a layer's seven projections the backward pass needs all outputs but the last; two
    # more are attention's.
    assert full - none >= 8


def saved(policy, fn, *args):
    """Bytes kept between the forward and the backward pass of `fn`."""
    _, pullback = jax.vjp(remat.checkpoint(fn, policy), *args)
    return sum(x.nbytes for x in jax.tree.leaves(pullback))


def test_less_is_kept_in_order():
    x, w = jnp.ones((64, 32)), jnp.full((32, 32), 0.1)

    def layer(x, w):
        y = names.tag(jnp.sin(x), names.MLP_NORM)
        y = names.tag(y @ w, names.MLP_UP)
        return jnp.sin(jnp.cos(jnp.sin(y)))

    sizes = [saved(policy, layer, x, w) for policy in ("full", "selective", "none")]
    inputs = x.nbytes + w.nbytes
    assert sizes[0] == inputs
    assert sizes[1] == inputs + x.nbytes  # and the matmul's output
    assert sizes[2] > sizes[1] + x.nbytes


def test_scan_is_jax_scan():
    body = lambda c, x: (jnp.sin(c) * x, c)
    xs = jnp.linspace(0.1, 1.0, 5)
    want = jax.lax.scan(body, jnp.float32(2.0), xs)
    for policy in remat.POLICIES:
        got = remat.scan(body, jnp.float32(2.0), xs, policy=policy)
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_array_equal(got[1], want[1])


def test_none_adds_nothing():
    assert remat.checkpoint(jnp.sin, "none") is jnp.sin


def test_an_unknown_policy_is_refused():
    unchecked = remat.checkpoint.__wrapped__  # without the type checker of these tests
    with pytest.raises(ValueError, match="unknown remat policy 'all'; known: none, selective, f"):
        unchecked(jnp.sin, "all")
