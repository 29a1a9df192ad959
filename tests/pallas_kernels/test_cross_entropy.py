"""Linear cross-entropy: all its options against the reference, and over devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import cross_entropy as ce
from pallas_kernels.cross_entropy import api

SIZES = 2, 7, 24, 37  # B, T, D, V
# Each pair of two options is on, off and half on; and all at once.
OPTIONS = [
    {"z_loss": z, "soft_cap": cap, "label_smoothing": smoothing}
    for z, cap, smoothing in (
        (0.0, None, 0.0),
        (0.02, 3.0, 0.0),
        (0.02, None, 0.1),
        (0.0, 3.0, 0.1),
        (0.02, 3.0, 0.1),
    )
]


def data(sizes=SIZES, rows=None, dtype=jnp.float32, flat=False, seed=0, spread=1.0):
    """Hidden, head, labels of which some are ignored."""
    b, t, d, v = sizes
    rng = np.random.default_rng(seed)
    lead = (b * t,) if flat else (b, t)
    hidden = jnp.asarray(spread * rng.normal(size=(*lead, d)), dtype)
    head = jnp.asarray(rng.normal(size=(v, d)), jnp.float32)
    labels = rng.integers(0, v, lead if rows is None else (*lead, rows)).astype(np.int32)
    labels[rng.random(labels.shape) < 0.3] = ce.IGNORED
    return hidden, head, jnp.asarray(labels)


def weighted(losses: ce.TokenLosses):
    """A scalar in which each loss and each log-sum-exp has a weight of its own."""
    weights = lambda x: jnp.sin(jnp.arange(x.size, dtype=jnp.float32).reshape(x.shape) + 1)
    return sum((x * weights(x) / (1 + i)).sum() for i, x in enumerate(losses))


def token_losses(function, *args, **options):
    """Losses of each token, and gradients of all of them by hidden and head."""

    def loss(hidden, head):
        losses = function(hidden, head, args[2], **options)
        return weighted(losses), losses

    (_, losses), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(*args[:2])
    return *losses, *grads


def assert_close(got, want, rtol=2e-5):
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, atol=rtol * float(jnp.abs(b).max()), rtol=rtol)


@pytest.mark.parametrize("options", OPTIONS)
def test_token_losses_and_gradients_are_those_of_the_reference(options):
    number = OPTIONS.index(options)
    args = data(rows=[None, 1, 3][number % 3], flat=number % 2 == 1, seed=number)
    run = jax.jit(
        partial(token_losses, ce.token_cross_entropy, chunk=[None, 3][number % 2], **options)
    )
    want = jax.jit(partial(token_losses, ce.token_cross_entropy_reference, **options))(*args)
    assert min(float(jnp.abs(x).max()) for x in want) > 0.1
    assert_close(run(*args), want)


@pytest.mark.parametrize("options", OPTIONS)
def test_sums_are_those_of_token_losses(options):
    number = OPTIONS.index(options)
    rows = [None, 2, 1][number % 3]
    args = data(rows=rows, flat=number % 2 == 0, seed=number)
    weight = jnp.arange(1.0, 1.0 + (rows or 1)).reshape(() if rows is None else (rows,))

    def sums(hidden, head):
        sums = ce.linear_cross_entropy(hidden, head, args[2], chunk=3, **options)
        return (sums.objective * weight).sum(), sums

    def reference(hidden, head):
        losses = ce.token_cross_entropy_reference(hidden, head, args[2], **options)
        lead = tuple(range(hidden.ndim - 1))
        objective, nll = (x.sum(lead) for x in losses[:2])
        count = jnp.sum(args[2] >= 0, lead, dtype=jnp.int32)
        return (objective * weight).sum(), ce.LossSums(objective, nll, count)

    got, want = (
        jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(*args[:2]) for f in (sums, reference)
    )
    assert got[0][1].count.shape == weight.shape
    assert_close(jax.tree.leaves(got), jax.tree.leaves(want))


def test_smoothing_and_cap_are_those_of_the_definition():
    """The reference itself, in float64 of numpy."""
    hidden, head, labels = data()
    s, cap = 0.2, 2.0
    got = ce.token_cross_entropy_reference(
        hidden, head, labels, z_loss=0.1, soft_cap=cap, label_smoothing=s
    )
    logits = cap * np.tanh(np.float64(hidden) @ np.float64(head).T / cap)
    z = np.log(np.exp(logits).sum(-1))
    target = np.full(logits.shape, s / head.shape[0])
    np.put_along_axis(target, np.maximum(labels, 0)[..., None], s / head.shape[0] + 1 - s, -1)
    want = -(target * (logits - z[..., None])).sum(-1) + 0.1 * z**2
    np.testing.assert_allclose(got.objective, np.where(labels >= 0, want, 0), rtol=1e-4)
    np.testing.assert_allclose(got.lse, z, rtol=1e-5)


@pytest.mark.parametrize("label", [37, 1000, -2])
def test_a_label_of_no_word_is_seen(label):
    hidden, head, labels = data()
    args = hidden, head, labels.at[1, 2].set(label)
    assert np.isnan(ce.linear_cross_entropy(*args).objective)
    losses = ce.token_cross_entropy(*args)
    assert np.isnan(losses.nll[1, 2]) and np.isfinite(losses.nll).sum() == 13
    for loss in (
        lambda h: ce.linear_cross_entropy(h, *args[1:]).objective,
        lambda h: ce.token_cross_entropy(h, *args[1:]).objective.sum(),
    ):
        gradient = jax.grad(loss)(hidden)
        assert np.isnan(gradient[1, 2]).all() and np.isfinite(gradient).sum() == 13 * 24


def test_the_gradient_on_explicit_axes_is_refused_in_one_line():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        hidden, labels = (jax.device_put(x, jax.P("x")) for x in (jnp.ones((8, 16)), jnp.arange(8)))
        loss = lambda h: ce.linear_cross_entropy(h, jnp.ones((13, 16)), labels).objective
        with pytest.raises(
            ValueError, match=r"the gradient of linear .* takes no array sharded.*Auto"
        ):
            jax.grad(loss)(hidden)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": jnp.int32}, "hidden is int32, head float32; both must be floating-point"),
        ({"labels": jnp.uint8}, "labels are uint8; they must be signed integers"),
        ({"labels": jnp.float32}, "labels are float32"),
        ({"z_loss": -1.0}, "z_loss is -1.0; it must be 0 or more"),
    ],
)
def test_wrong_kinds_of_numbers_are_refused(change, message):
    hidden, head, labels = data()
    cast = lambda x, name: x.astype(change.get(name, x.dtype))
    z_loss = change.get("z_loss", 0.0)
    with pytest.raises(ValueError, match=message):
        api._prepare(cast(hidden, "hidden"), head, cast(labels, "labels"), z_loss, None, 0.0, None)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_what_is_not_finite_is_seen_and_stays_in_its_row(bad):
    hidden, head, labels = data()
    labels = jnp.maximum(labels, 0)
    hidden = hidden.at[1, 2, 3].set(bad)
    losses = ce.token_cross_entropy(hidden, head, labels, chunk=2)
    finite = np.isfinite(losses.objective)
    assert not finite[1, 2] and finite.sum() == 13
    loss = lambda *a: ce.linear_cross_entropy(*a, labels).objective
    value, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(hidden, head)
    assert not np.isfinite(value)
    assert not np.isfinite(grads[0][1, 2]).any() and np.isfinite(grads[0]).sum() == 13 * 24
    assert not np.isfinite(grads[1]).all()


def test_one_row_of_labels_may_be_all_ignored():
    hidden, head, labels = data(rows=2)
    labels = labels.at[..., 1].set(ce.IGNORED)
    sums = ce.linear_cross_entropy(hidden, head, labels, z_loss=0.1)
    assert float(sums.objective[1]) == float(sums.nll[1]) == int(sums.count[1]) == 0
    total = lambda h, y: ce.linear_cross_entropy(h, head, y).objective.sum()
    both, one = (jax.jit(jax.grad(total))(hidden, y) for y in (labels, labels[..., 0]))
    assert_close([both], [one])


def mesh_of(**axes):
    auto = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=auto)


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[-1]])
def test_shards_of_the_vocabulary_on_eight_devices_equal_one(options):
    """Over ("data", "vocab"); labels and gradients of hidden are the same on all shards."""
    args = data((4, 6, 24, 40), rows=2)
    specs = P("data"), P("vocab"), P("data")
    out = ce.TokenLosses(*[P("data")] * 3)
    function = partial(ce.token_cross_entropy, axis_name="vocab", chunk=2, **options)
    sharded = jax.shard_map(function, mesh=mesh_of(data=2, vocab=4), in_specs=specs, out_specs=out)
    got = jax.jit(partial(token_losses, sharded))(*args)
    reference = partial(token_losses, ce.token_cross_entropy_reference, **options)
    assert_close(got, jax.jit(reference)(*args))


def test_gradients_taken_inside_of_a_shard_map_are_those_of_one_device():
    hidden, head, labels = args = data((4, 6, 24, 40))

    def step(hidden, head, labels):
        def loss(hidden, head):
            sums = ce.linear_cross_entropy(hidden, head, labels, axis_name="vocab", z_loss=0.01)
            return jax.lax.psum(sums.objective, "data")

        return jax.value_and_grad(loss, (0, 1))(hidden, head)

    specs = P("data"), P("vocab"), P("data")
    over = jax.shard_map(
        step, mesh=mesh_of(data=2, vocab=4), in_specs=specs, out_specs=(P(), specs[:2])
    )
    loss = lambda *a: ce.linear_cross_entropy(*a, labels, z_loss=0.01).objective
    want = jax.jit(jax.value_and_grad(loss, (0, 1)))(hidden, head)
    assert_close(jax.tree.leaves(jax.jit(over)(*args)), jax.tree.leaves(want))


def test_a_head_that_is_the_same_on_all_devices_gets_the_sum_of_gradients():
    args = data((8, 3, 24, 40))
    mesh = mesh_of(data=8)

    def loss(hidden, head, labels):
        one = lambda *a: jax.lax.psum(ce.linear_cross_entropy(*a).objective, "data")
        specs = P("data"), P(), P("data")
        return jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=P())(hidden, head, labels)

    got = jax.jit(jax.grad(loss, (0, 1)))(*args)
    want = jax.jit(jax.grad(lambda *a: ce.linear_cross_entropy(*a).objective, (0, 1)))(*args)
    assert_close(got, want)


def test_works_under_vmap_scan_and_checkpoint():
    hidden, head, labels = data((3, 5, 24, 37))

    def one(hidden, labels):
        return ce.linear_cross_entropy(hidden, head, labels, chunk=2).objective

    def scanned(hidden):
        row = lambda total, x: (total + jax.checkpoint(one)(*x), None)
        return jax.lax.scan(row, jnp.float32(0), (hidden, labels))[0]

    want = jax.jit(jax.value_and_grad(lambda h: one(h.reshape(15, 24), labels.reshape(15))))(hidden)
    for total in (lambda h: jax.vmap(one)(h, labels).sum(), scanned):
        assert_close(jax.jit(jax.value_and_grad(total))(hidden), want)


def test_half_precision_gradients_of_each_token_do_not_underflow():
    """Cotangents of 1e-9, as of a mean over many tokens, in float16."""
    hidden, head, labels = data(dtype=jnp.float16)
    loss = lambda h, w: 1e-9 * ce.token_cross_entropy(h, w, labels).objective.sum()
    want = jax.grad(lambda w: 1e9 * loss(hidden.astype(jnp.float32), w))(head)
    got = 1e9 * jax.grad(loss, 1)(hidden, head)
    assert jnp.linalg.norm(got - want) < 2e-3 * jnp.linalg.norm(want)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"soft_cap": 0.0}, ValueError, "soft_cap is 0.0; it must be positive"),
        ({"label_smoothing": 1.0}, ValueError, "label_smoothing is 1.0"),
        ({"chunk": 0}, ValueError, "chunk is 0"),
        ({"implementation": "triton"}, ValueError, "unknown implementation 'triton'"),
        ({"implementation": "mosaic_gpu"}, NotImplementedError, "has no float32"),
    ],
)
def test_mistakes_are_named(options, error, message):
    for function in (ce.linear_cross_entropy, ce.token_cross_entropy):
        with pytest.raises(error, match=message):
            function(*data(), **options)


@pytest.mark.parametrize("shape", [(2, 6), (2, 7, 1, 1), (14,)])
def test_shapes_that_do_not_match_are_named(shape):
    hidden, head, _ = data()
    with pytest.raises(ValueError, match=r"hidden \(2, 7, 24\), head .* must be \[B, T, D\]"):
        ce.linear_cross_entropy(hidden, head, jnp.zeros(shape, jnp.int32))
