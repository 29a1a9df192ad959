"""The chunked loss against plain log-softmax."""

import functools
import re

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from jaxaccel import losses

B, T, D, V = 3, 7, 5, 13


def data(dtype=jnp.float32, seed=0, shape=(B, T, D, V), spread=2.0):
    b, t, d, v = shape
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(spread * rng.normal(size=(b, t, d)), dtype)
    head = jnp.asarray(rng.normal(size=(v, d)), jnp.float32)
    labels = rng.integers(0, v, (b, t)).astype(np.int32)
    labels[rng.random((b, t)) < 0.3] = losses.IGNORED
    return hidden, head, jnp.asarray(labels)


def naive(hidden, head, labels, z_loss=0.0, dtype=jnp.float32):
    """Objective and nll with the whole [B, T, V] tensor at hand."""
    logits = (hidden.astype(dtype) @ head.astype(dtype).T).astype(jnp.float32)
    counted = labels >= 0
    log_probabilities = jax.nn.log_softmax(logits, axis=-1)
    target = jnp.take_along_axis(log_probabilities, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
    z = jax.nn.logsumexp(logits, axis=-1)
    nll = jnp.sum(jnp.where(counted, -target, 0.0))
    return nll + z_loss * jnp.sum(jnp.where(counted, z * z, 0.0)), nll


@functools.partial(jax.jit, static_argnames=("z_loss", "chunk"))
def ours(hidden, head, labels, z_loss=0.0, chunk=None):
    """Sums, and gradients of the objective times 0.25 by hidden and head."""

    def loss(hidden, head):
        sums = losses.linear_cross_entropy(hidden, head, labels, z_loss=z_loss, chunk=chunk)
        return 0.25 * sums.objective, sums

    (_, sums), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, head)
    return sums, grads


def naive_grads(hidden, head, labels, z_loss=0.0, dtype=jnp.float32):
    loss = lambda hidden, head: 0.25 * naive(hidden, head, labels, z_loss, dtype)[0]
    return jax.grad(loss, (0, 1))(hidden, head)


@pytest.mark.parametrize("z_loss", [0.0, 0.02])
@pytest.mark.parametrize("chunk", [None, 1, 3, 7, 50])
def test_value_and_gradients_are_those_of_log_softmax(chunk, z_loss):
    hidden, head, labels = data()
    sums, grads = ours(hidden, head, labels, z_loss=z_loss, chunk=chunk)
    objective, nll = naive(hidden, head, labels, z_loss)
    np.testing.assert_allclose(sums.objective, objective, rtol=1e-5)
    np.testing.assert_allclose(sums.nll, nll, rtol=1e-5)
    assert sums.count == (np.asarray(labels) >= 0).sum() and sums.count.dtype == jnp.int32
    for got, want in zip(grads, naive_grads(hidden, head, labels, z_loss)):
        assert got.dtype == want.dtype and np.linalg.norm(want) > 0.1
        np.testing.assert_allclose(got, want, atol=1e-5)
    if z_loss:
        assert sums.objective > sums.nll


def test_ignored_positions_give_nothing():
    hidden, head, labels = data()
    ignored = np.asarray(labels) == losses.IGNORED
    assert ignored.any()
    wild = jnp.where(ignored[..., None], 1e3, hidden)
    for a, b in zip(
        jax.tree.leaves(ours(hidden, head, labels, chunk=3)),
        jax.tree.leaves(ours(wild, head, labels, chunk=3)),
    ):
        np.testing.assert_array_equal(a, b)
    assert not np.asarray(ours(hidden, head, labels)[1][0])[ignored].any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("chunk", [None, 2])
def test_all_ignored_is_zero_and_no_nan(chunk, dtype):
    hidden, head, labels = data(dtype)
    sums, grads = ours(hidden, head, jnp.full_like(labels, -1), z_loss=0.1, chunk=chunk)
    assert [float(x) for x in sums] == [0, 0, 0]
    assert not any(np.asarray(g).any() for g in grads)


@pytest.mark.parametrize("shape", [(0, 4, 5, 13), (2, 0, 5, 13), (1, 1, 1, 1)])
def test_empty_and_smallest(shape):
    hidden, head, labels = data(shape=shape)
    sums, grads = ours(hidden, head, labels)
    assert float(sums.nll) == 0.0  # of a vocabulary of one, too
    assert grads[0].shape == hidden.shape and not np.asarray(grads[1]).any()


def test_only_the_objective_carries_a_gradient():
    hidden, head, labels = data()
    loss = lambda h: losses.linear_cross_entropy(h, head, labels).nll
    assert not np.asarray(jax.grad(loss)(hidden)).any()


def test_one_table_as_embedding_and_head_gets_both_gradients():
    _, table, labels = data()
    tokens = jnp.roll(jnp.maximum(labels, 0), 1, axis=1)
    tied = lambda t: losses.linear_cross_entropy(t[tokens], t, labels, chunk=2).objective
    want = jax.grad(lambda t: naive(t[tokens], t, labels)[0])(table)
    np.testing.assert_allclose(jax.grad(tied)(table), want, atol=2e-5)
    assert np.linalg.norm(want) > 1


def test_large_logits_do_not_overflow():
    hidden, head, labels = data()
    hidden = hidden * 1e4
    sums, grads = ours(hidden, head, labels)
    np.testing.assert_allclose(sums.nll, naive(hidden, head, labels)[1], rtol=1e-5)
    assert all(np.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_costs_no_more_than_it_costs_a_naive_reference(dtype):
    """Against float32: at most twice the naive error of the value, thrice of gradients."""
    hidden, head, labels = data(dtype, shape=(4, 33, 64, 97), spread=0.5)
    exact = hidden.astype(jnp.float32)
    want, want_grads = naive(exact, head, labels)[1], naive_grads(exact, head, labels)
    sums, grads = ours(hidden, head, labels, chunk=10)
    low = naive(hidden, head, labels, dtype=dtype)[1]
    assert abs(sums.nll - want) <= 2 * abs(low - want) + 1e-6 * want
    low_grads = naive_grads(hidden, head, labels, dtype=dtype)
    for got, naive_low, exact_grad in zip(grads, low_grads, want_grads):
        error = lambda x, e=exact_grad: np.linalg.norm(np.asarray(x, np.float32) - e)
        assert 0 < error(got) <= 3 * error(naive_low)
        assert error(got) < 4 * jnp.finfo(dtype).eps * np.linalg.norm(exact_grad)


def test_small_float16_gradients_do_not_underflow():
    """A word of probability near 1e-8 still gets its gradient; float16 ends at 6e-8."""
    hidden = jnp.ones((1, 6, 4), jnp.float16)
    head = jnp.zeros((50, 4)).at[0].set(18.0 / 4)
    labels = jnp.zeros((1, 6), jnp.int32)
    loss = lambda head: losses.linear_cross_entropy(hidden, head, labels).objective
    want = jax.grad(lambda head: naive(hidden.astype(jnp.float32), head, labels)[0])(head)
    assert 1e-9 < want[1, 0] / 6 < 6e-8
    np.testing.assert_allclose(jax.grad(loss)(head)[1:], want[1:], rtol=2e-2)


def test_loss_scaling_lifts_small_float16_gradients_of_hidden():
    """The scale multiplies before the cast: 1e-8 times 2**15 is well inside float16."""
    hidden, head, labels = data(jnp.float16)
    head = head * 1e-2

    def loss(loss_fn, scale, hidden):
        return loss_fn(hidden, head, labels)[0] * (scale / 1e6)

    scaled = jax.grad(lambda h: loss(losses.linear_cross_entropy, 2.0**15, h))(hidden)
    exact = jax.grad(lambda h: loss(naive, 1.0, h))(hidden.astype(jnp.float32))
    assert np.abs(exact).max() < 1e-7
    error = np.linalg.norm(scaled.astype(jnp.float32) / 2**15 - exact)
    assert error < 2e-3 * np.linalg.norm(exact)


def largest_buffer(chunk):
    """Elements of the largest array in the compiled gradient."""
    shape = (2, 32, 8, 64)
    hidden, head, labels = data(shape=shape)
    text = ours.lower(hidden, head, labels, chunk=chunk).compile().as_text()
    shapes = re.findall(r"\b(?:f|bf|s|u|pred)\d*\[([\d,]+)\]", text)
    return max(int(np.prod([int(n) for n in s.split(",")])) for s in shapes)


def test_no_buffer_holds_the_logits():
    whole = 2 * 32 * 64
    assert largest_buffer(chunk=32) >= whole  # unchunked, the search finds them
    assert largest_buffer(chunk=8) <= whole // 4


def test_the_default_chunk_bounds_the_logits():
    hidden = jax.ShapeDtypeStruct((8, 4096, 16), jnp.bfloat16)
    head = jax.ShapeDtypeStruct((128256, 16), jnp.float32)
    labels = jax.ShapeDtypeStruct((8, 4096), jnp.int32)
    text = (
        jax.jit(jax.grad(lambda *a: losses.linear_cross_entropy(*a).objective))
        .lower(hidden, head, labels)
        .as_text()
    )
    sizes = [np.prod([int(n) for n in s.split("x")]) for s in re.findall(r"<((?:\d+x)+\d+)x", text)]
    assert 2**26 < max(sizes) <= losses.CHUNK_ELEMENTS


@pytest.mark.parametrize("chunk", [None, 3])
def test_without_a_gradient_the_value_is_the_same(chunk):
    hidden, head, labels = data()
    plain = jax.jit(lambda *a: losses.linear_cross_entropy(*a, z_loss=0.02, chunk=chunk))(
        hidden, head, labels
    )
    for a, b in zip(plain, ours(hidden, head, labels, z_loss=0.02, chunk=chunk)[0]):
        np.testing.assert_allclose(a, b, rtol=3e-7)


def test_mistakes_are_named(monkeypatch):
    hidden, head, labels = data()
    with pytest.raises(ValueError, match="chunk is 0; it must be at least 1"):
        losses.linear_cross_entropy(hidden, head, labels, chunk=0)
    with pytest.raises(ValueError, match=r"hidden \(3, 7, 5\).*labels \(3, 6\)"):
        losses.linear_cross_entropy(hidden, head, labels[:, :-1])
    with pytest.raises(jaxtyping.TypeCheckError):
        losses.linear_cross_entropy(hidden, head[:, :-1], labels)
    # A user without the type checker gets the function's own message.
    unchecked = losses.linear_cross_entropy.__wrapped__
    with pytest.raises(ValueError, match=r"head \(13, 4\)"):
        unchecked(hidden, head[:, :-1], labels)
