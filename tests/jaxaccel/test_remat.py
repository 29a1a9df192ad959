"""Policies change what is kept, and nothing else."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

from jaxaccel import names, remat
from jaxaccel.nn import Decoder, DecoderConfig
from pallas_kernels import attention

# Five layers, which no segment length but 1 and 5 divides.
CONFIG = DecoderConfig(
    vocab_size=17, layers=5, width=12, heads=4, kv_heads=2, head_size=6, mlp_width=20
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 17, (2, 9)), jnp.int32)
NAMED = "names:query,key,attention_context,attention_lse"
POLICIES = [*remat.POLICIES, "sqrt", "sqrt:none", NAMED]
POLICIES.remove("none")
# Offloading does not compile for a CPU; see below.
COMPILABLE = [policy for policy in POLICIES if policy != "offload"]

# Without the type checker of these tests, as a user calls them.
scan, checkpoint, parse = (f.__wrapped__ for f in (remat.scan, remat.checkpoint, remat.parse))
make_names = remat.names.__wrapped__


def gradient(policy):
    """Loss and gradients of a decoder by its parameters, and its arguments."""
    model = Decoder(CONFIG, rngs=nnx.Rngs(0), scan=functools.partial(remat.scan, policy=policy))
    graphdef, params = nnx.split(model)

    def loss(params):
        model = nnx.merge(graphdef, params)
        return jnp.sum(jnp.sin(3 * model(TOKENS) @ model.head_VD.T))

    return jax.value_and_grad(loss), nnx.to_pure_dict(params)


@pytest.fixture(scope="module")
def compiled():
    fn, params = gradient("none")
    return jax.jit(fn)(params)


@pytest.fixture(scope="module")
def one_by_one():
    fn, params = gradient("none")
    with jax.disable_jit():
        return fn(params)


@pytest.mark.parametrize("policy", COMPILABLE)
def test_compiled_values_and_gradients_are_the_same(compiled, policy):
    fn, params = gradient(policy)
    (loss, grads), (want_loss, want) = jax.jit(fn)(params), compiled
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(want)):
        assert np.linalg.norm(b) > 1e-3, path
        np.testing.assert_allclose(a, b, atol=3e-6 * np.abs(b).max(), err_msg=str(path))


@pytest.mark.parametrize("policy", POLICIES)
def test_one_by_one_they_are_the_same_bit_for_bit(one_by_one, policy):
    fn, params = gradient(policy)
    with jax.disable_jit():
        got = fn(params)
    jax.tree.map(np.testing.assert_array_equal, got, one_by_one)


def matmuls(policy):
    fn, params = gradient(policy)
    return len(re.findall(r"dot_general", jax.jit(fn).lower(params).as_text()))


def test_which_policies_repeat_matmuls():
    none = matmuls("none")
    assert matmuls("selective") == matmuls("attention") == none
    # Of a layer's seven projections the backward pass needs all outputs but the last; two
    # more are attention's.
    assert matmuls("full") - none == 8
    # Query, key and attention are kept: value, attention's output, gate and up are not.
    assert matmuls(NAMED) - none == 4


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

    policies = ("full", remat.names(["mlp_norm"]), "selective", "attention", "none")
    sizes = [saved(policy, layer, x, w) for policy in policies]
    inputs = x.nbytes + w.nbytes
    assert sizes[0] == inputs
    assert sizes[1] == sizes[2] == inputs + x.nbytes  # and one tensor
    assert sizes[3] == inputs + 2 * x.nbytes  # and both
    assert sizes[4] > sizes[3] + x.nbytes


def test_attention_drops_what_plain_attention_computes_inside():
    """Nothing of T x T is kept, and nothing else is given up."""
    q = jax.random.normal(jax.random.key(0), (1, 50, 1, 4))
    w = jnp.eye(4) * 0.5

    def layer(q, w):
        q = names.tag(q @ w, names.QUERY)
        context = names.tag(attention.attention_reference(q, q, q)[0], names.ATTENTION_CONTEXT)
        return jnp.sin(names.tag(context @ w, names.ATTENTION_OUTPUT))

    def kept(policy):
        _, pullback = jax.vjp(remat.checkpoint(layer, policy), q, w)
        return [x.shape for x in jax.tree.leaves(pullback)]

    whole = lambda shape: np.prod(shape) >= 2500
    assert any(map(whole, kept("none")))
    assert not any(map(whole, kept("attention")))
    assert kept("attention").count(q.shape) == 4  # its input and the three named


def occurrences(text, fn, *args):
    """How often the gradient of `fn`, as JAX traces it, contains `text`."""
    total = lambda *args: jnp.sum(jnp.sin(fn(*args)))
    return str(jax.make_jaxpr(jax.grad(total))(*args)).count(text)


@pytest.mark.parametrize(
    ("policy", "extra"),
    [("full", 2), ("selective", 0), (remat.names(["attention_context"]), 1), ("attention", 0)],
)
def test_policies_see_inside_a_custom_vjp(policy, extra):
    """Attention's backward pass repeats nothing where all it needs is kept.

    Without the log-sum-exp it repeats the logits.
    """
    q = jnp.ones((1, 7, 2, 4))
    fn = lambda q: attention.attention(q, q, q)
    dots = occurrences("dot_general[", fn, q)
    assert dots == 7
    assert occurrences("dot_general[", remat.checkpoint(fn, policy), q) == dots + extra


@pytest.mark.parametrize(("policy", "calls"), [("full", 2), (remat.names(["doubled"]), 1)])
def test_policies_see_the_output_of_a_pallas_kernel(policy, calls):
    def kernel(x_ref, out_ref):
        out_ref[...] = 2 * x_ref[...]

    @jax.custom_vjp
    def double(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x)

    double.defvjp(lambda x: (checkpoint_name(double(x), "doubled"), None), lambda _, g: (2 * g,))
    fn = lambda x: jnp.sin(double(jnp.cos(x)))
    x = jnp.linspace(0.0, 1.0, 8)
    assert occurrences("pallas_call[", remat.checkpoint(fn, policy), x) == calls
    slope = lambda f: jax.grad(lambda x: f(x).sum())(x)
    got, want = slope(remat.checkpoint(fn, policy)), slope(fn)
    assert np.linalg.norm(want) > 0.1
    np.testing.assert_allclose(got, want, rtol=1e-6)


LENGTHS = [(0, None), (1, None), (2, 1), (7, 3), (7, 7), (3, 9), (9, None)]


@pytest.mark.parametrize(("length", "segment"), LENGTHS)
@pytest.mark.parametrize("policy", ["none", "sqrt", "sqrt:none"])
def test_scan_is_jax_scan(length, segment, policy):
    """With random masks, a loop inside the body, integers among the layers, and outputs."""

    def body(carry, x):
        scale, number = x["scale"], x["number"]
        keep = jax.random.bernoulli(jax.random.fold_in(jax.random.key(3), number), 0.6, (4,))
        carry = jnp.where(keep, jnp.sin(carry) * scale, carry)
        carry, inner = jax.lax.scan(lambda c, i: (jnp.cos(c) + i, c), carry, jnp.arange(2.0))
        return carry, (inner.sum(0), number)

    scales = jnp.linspace(0.5, 1.0, length)
    xs = {"scale": scales, "number": jnp.arange(length)}
    start = jnp.linspace(-1.0, 1.0, 4)

    def total(loop):
        def loss(start, scale):
            carry, (ys, numbers) = loop(body, start, xs | {"scale": scale})
            return jnp.sum(carry**2) + jnp.sum(jnp.sin(ys)), (carry, ys, numbers)

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(start, scales)

    segmented = functools.partial(remat.scan, policy=policy, segment=segment)
    got, want = total(segmented), total(jax.lax.scan)
    assert np.linalg.norm(want[1][0]) > 0.1
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=1e-6), got, want)


def test_segment_lengths_hold_few_inputs():
    for length in range(1, 200):
        size = remat.segment_length(length)
        held = -(-length // size) + size
        assert held <= 2 * np.sqrt(length) + 1
    assert remat.segment_length(0) == 1


def test_none_adds_nothing():
    assert remat.checkpoint(jnp.sin, "none") is jnp.sin


def test_every_policy_is_documented():
    for policy in remat.POLICIES:
        assert f"| `{policy}` |" in remat.__doc__


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("all", "unknown remat policy 'all'; known: none, selective, full, attention, offload, s"),
        ("sqrt:all", "unknown remat policy 'all'"),
        ("sqrt:sqrt", "unknown remat policy 'sqrt:sqrt'"),
        ("names:", "no tensor is named '' in policy 'names:'; there are query, key, value, "),
        ("names:query,keys", "no tensor is named 'keys' in .*'names:query,keys'; there are query"),
        ("names:query,key,query@host", "both saved and offloaded: query"),
    ],
)
def test_a_wrong_policy_is_refused(policy, message):
    with pytest.raises(ValueError, match=re.escape(message).replace(r"\.\*", ".*")):
        parse(policy)


def test_a_name_that_no_tensor_carries_is_refused():
    """Also where it is in the vocabulary; the message lists what the function has."""
    fn = lambda x: names.tag(jnp.sin(names.tag(x, names.QUERY)), names.KEY)
    for policy in ("names:key,value", make_names(["key"], ["value"])):
        with pytest.raises(ValueError, match=r"no tensor is named value; this .* has key, query"):
            checkpoint(fn, policy)(1.0)
    loop = lambda xs: scan(lambda c, x: (c * x, None), 1.0, xs, policy="names:key")[0]
    with pytest.raises(ValueError, match=r"no tensor is named key; this .* has no named tensor"):
        jax.jit(loop)(jnp.ones(3))
    assert checkpoint(fn, "names:key")(1.0) == pytest.approx(np.sin(1.0))


def test_names_inside_custom_vjps_count():
    q = jnp.ones((1, 3, 2, 4))
    both = make_names([attention.CONTEXT, attention.LSE])
    assert checkpoint(lambda q: attention.attention(q, q, q), both)(q).shape == q.shape


def test_other_misuse_is_refused():
    with pytest.raises(ValueError, match=r"'sqrt:none' cuts a stack .* use remat.scan"):
        checkpoint(jnp.sin, "sqrt:none")
    with pytest.raises(ValueError, match="segment is 0; it must be at least 1 layer"):
        scan(lambda c, x: (c, None), 1.0, jnp.ones(3), segment=0)
    for xs in ((), 1.0, (jnp.ones(3), jnp.ones(4))):
        with pytest.raises(ValueError, match="xs must share one leading dimension"):
            scan(lambda c, x: (c, None), 1.0, xs)
    with pytest.raises(ValueError, match="no names to save or offload"):
        make_names()
    with pytest.raises(ValueError, match="are lists of names; got 'key'"):
        make_names("key")


@pytest.mark.parametrize("policy", ["offload", "names:key,layer_input@host", "sqrt:offload"])
def test_offloading_is_refused_by_a_cpu(policy):
    def body(x, w):
        x = names.tag(x, names.LAYER_INPUT)
        return jnp.sin(names.tag(x @ w, names.KEY)), None

    def loss(w):
        return jnp.sum(scan(body, jnp.ones((2, 3)), w, policy=policy)[0])

    w = jnp.ones((4, 3, 3))
    with pytest.raises(ValueError, match="policy offloads to host memory, and cpu has none"):
        jax.jit(jax.grad(loss)).lower(w)


def test_weights_first_is_dot_general_with_an_order():
    random = np.random.default_rng(0)
    x, w, g = (jnp.float32(random.normal(size=s)) for s in ((5, 3), (3, 4), (5, 4)))
    dims = (((1,), (0,)), ((), ()))

    def gradients(dot):
        return jax.jit(lambda x, w: jax.vjp(lambda x, w: dot(x, w, dims), x, w)[1](g))

    ours, theirs = gradients(remat.weights_first), gradients(jax.lax.dot_general)
    jax.tree.map(np.testing.assert_array_equal, ours(x, w), theirs(x, w))
    np.testing.assert_array_equal(remat.weights_first(x, w, dims), jax.lax.dot_general(x, w, dims))
    lines = str(jax.make_jaxpr(ours)(x, w)).splitlines()
    kinds = [
        name for line in lines for name in ("dot_general", "optimization_barrier") if name in line
    ]
    # Forward (which nobody reads), the weight's, and the input's after it.
    assert kinds[-3:] == ["dot_general", "optimization_barrier", "dot_general"]
    assert "optimization_barrier" not in str(jax.make_jaxpr(theirs)(x, w))
