"""The state of delayed scaling: against a model in numpy, and through every transformation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxaccel import accumulate, fp8, fp8_delayed, sharding

PLAIN = (((1,), (0,)), ((), ()))
TOP = np.array([448.0, 448.0, 57344.0], np.float32)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def equal(a, b):
    """Bit for bit."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def gradient_of(dot, x, w, g):
    """state -> its gradient."""
    return lambda state: jax.grad(lambda s: jnp.sum(dot(x, w, PLAIN, state=s) * g))(state)


class Model:
    """What the state shall be, step by step."""

    def __init__(self, window, margin, use):
        self.scale, self.skipped = np.zeros(3, np.float32), np.zeros(3, np.float32)
        self.history = np.zeros((3, window), np.float32)
        self.margin, self.use = np.float32(2.0**margin), use

    def step(self, tops):
        for i, top in enumerate(tops):
            if not np.isfinite(top):
                self.skipped[i] += 1
                continue
            self.history[i] = np.concatenate([[top], self.history[i, :-1]])
            wanted = self.history[i].max() if self.use == "max" else top
            if wanted > 0:
                self.scale[i] = max(wanted * self.margin / TOP[i], np.float32(2.0**-126))


@pytest.mark.parametrize(
    ("window", "margin", "use"),
    [(4, 0, "max"), (1, 0, "max"), (7, 1, "max"), (4, 0, "most_recent")],
)
def test_fifty_steps_replay(window, margin, use):
    """Growth, shrinkage, an infinity, a NaN, an all-zero tensor, tiny values."""
    dot = fp8.dot_general("delayed", fp8.Scaling(window=window, margin=margin, use=use))
    sizes = np.concatenate([2.0 ** np.arange(20), 2.0 ** -np.arange(25.0), [0, 0, 0, 1e-30, 5]])
    assert len(sizes) == 50

    @jax.jit
    def step(state, x, w, g):
        return fp8.settle(state, gradient_of(dot, x, w, g)(state))

    state, model = dot.init_state(), Model(window, margin, use)
    for i, size in enumerate(sizes):
        x, w, g = (normal(3 * i + k, 4, 4) * size for k in range(3))
        if i == 11:
            x = x.at[1, 2].set(jnp.inf)
        if i == 23:
            w = w.at[0, 0].set(jnp.nan)
        if i == 30:
            g = g.at[0, 0].set(-jnp.inf)
        state = step(state, x, w, g)
        model.step([np.abs(np.asarray(a)).max() for a in (x, w, g)])
        np.testing.assert_array_equal(state.history, model.history)
        np.testing.assert_allclose(state.scale, model.scale, rtol=2e-7)
        np.testing.assert_array_equal(state.skipped, model.skipped)
    assert model.skipped.tolist() == [1, 1, 1]
    assert state.scale.dtype == state.history.dtype == state.skipped.dtype == jnp.float32


def test_one_bad_step_does_not_freeze_the_scale():
    dot = fp8.dot_general("delayed")
    x, w, g = normal(0, 4, 8), normal(1, 8, 4), normal(2, 4, 4)
    state = gradient_of(dot, x, w, g)(dot.init_state())
    bad = fp8.settle(state, gradient_of(dot, x.at[0].set(jnp.inf), w, g)(state))
    assert bad.scale[0] == state.scale[0] and bad.skipped.tolist() == [1, 0, 0]
    after = fp8.settle(bad, gradient_of(dot, x * 64, w, g)(bad))
    assert after.scale[0] == 64 * state.scale[0]


def test_the_first_step_is_scaled_by_its_own_magnitude():
    """From a scale of 1, gradients of a mean over many tokens would all be zero."""
    x, w, g = normal(0, 32, 64), normal(1, 64, 32), normal(2, 32, 32) * 1e-7
    delayed, current = fp8.dot_general("delayed"), fp8.dot_general("current")
    for dot in (functools.partial(delayed, state=delayed.init_state()), current):
        _, pull = jax.vjp(lambda x, w, dot=dot: dot(x, w, PLAIN), x, w)
        dx, dw = pull(g)
        assert float(jnp.mean(dx == 0)) < 0.01 and float(jnp.mean(dw == 0)) < 0.01


def test_without_warm_start_an_unknown_scale_is_loud_and_heals():
    x, w, g = normal(0, 4, 8), normal(1, 8, 4), normal(2, 4, 4)
    warm, hot = fp8.dot_general("delayed"), fp8.dot_general("delayed", warm_start=False)
    state = warm.init_state()
    assert bool(jnp.all(jnp.isnan(hot(x, w, PLAIN, state=state))))
    assert bool(jnp.all(hot(0 * x, w * 0, PLAIN, state=state) == 0))
    assert bool(fp8.is_cold(state))
    state = gradient_of(hot, x, w, g)(state)  # what was seen is recorded nevertheless
    assert not bool(fp8.is_cold(state))
    equal(hot(x, w, PLAIN, state=state), warm(x, w, PLAIN, state=state))


def test_what_outgrows_the_scale_saturates_for_one_step():
    dot = fp8.dot_general("delayed")
    x, w, g = jnp.eye(16), jnp.eye(16), jnp.ones((16, 16))
    state = gradient_of(dot, x, w, g)(dot.init_state())
    np.testing.assert_allclose(dot(8 * x, w, PLAIN, state=state), x, rtol=1e-6)
    state = gradient_of(dot, 8 * x, w, g)(state)
    np.testing.assert_allclose(dot(8 * x, w, PLAIN, state=state), 8 * x, rtol=1e-6)


# ---- Merging --------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [None, 5])
def test_four_micro_batches_leave_the_state_of_one_batch(bad):
    """Also when one of them is not finite."""
    dot = fp8.dot_general("delayed")
    x, w, g = normal(0, 8, 16), normal(1, 16, 4), normal(2, 8, 4)
    state = gradient_of(dot, 0.5 * x, w, 2 * g)(dot.init_state())
    if bad is not None:
        x = x.at[bad].set(jnp.inf)
    step = lambda part: gradient_of(dot, part[0], w, part[1])(state)
    maximum = lambda a, b: jax.tree.map(jnp.maximum, a, b)
    whole = fp8.settle(state, step((x, g)))
    parts = fp8.settle(state, accumulate.accumulate(step, (x, g), 4, maximum))
    equal(whole, parts)
    assert float(whole.skipped[0]) == (bad is not None)


@pytest.mark.parametrize(("window", "use"), [(1, "max"), (4, "most_recent")])
def test_a_micro_batch_of_zeros_does_not_hold_the_scale(window, use):
    dot = fp8.dot_general("delayed", fp8.Scaling(window=window, use=use))
    x, w, g = normal(0, 8, 16), normal(1, 16, 4), normal(2, 8, 4)
    state = gradient_of(dot, 100 * x, w, g)(dot.init_state())
    x = x.at[:2].set(0.0)
    step = lambda part: gradient_of(dot, part[0], w, part[1])(state)
    maximum = lambda a, b: jax.tree.map(jnp.maximum, a, b)
    # Micro-batches take every fourth row: one of the four is all zero.
    whole, rows = fp8.settle(state, step((x, g))), jnp.array([0, 2, 3, 4, 1, 5, 6, 7])
    parts = accumulate.accumulate(step, (x[rows], g[rows]), 4, maximum)
    equal(fp8.settle(state, parts), whole)
    assert float(whole.scale[0]) < 0.1 * float(state.scale[0])


def test_calls_that_share_a_state_are_told_by_nan():
    """Their gradients are added, and a sum of magnitudes would grow from step to step."""
    dot = fp8.dot_general("delayed")
    x, w = normal(0, 4, 8), normal(1, 8, 8)

    def recurrent(state):
        step = lambda h, _: (jnp.tanh(dot(h, w, PLAIN, state=state)), None)
        return jnp.sum(jax.lax.scan(step, x, None, length=3)[0])

    state = dot.init_state()
    after = fp8.settle(state, jax.grad(recurrent)(state))
    assert bool(jnp.all(jnp.isnan(after.scale))) and float(after.calls) == 0
    assert bool(jnp.all(jnp.isnan(dot(x, w, PLAIN, state=after))))


def test_what_did_not_run_keeps_its_state():
    dot = fp8.dot_general("delayed")
    x, w, g = normal(0, 4, 8), normal(1, 8, 4), normal(2, 4, 4)
    state = fp8.settle(dot.init_state(), gradient_of(dot, x, w, g)(dot.init_state()))

    def loss(state, run):
        return jax.lax.cond(
            run, lambda s: jnp.sum(dot(2 * x, w, PLAIN, state=s)), lambda s: 0.0, state
        )

    for run in (False, True):
        after = fp8.settle(state, jax.jit(jax.grad(loss))(state, run))
        if run:
            assert float(after.scale[0]) == 2 * float(state.scale[0])
        else:
            equal(after, state)
    stopped = jax.grad(lambda s: jnp.sum(jax.lax.stop_gradient(dot(x, w, PLAIN, state=s))))(state)
    equal(fp8.settle(state, stopped), state)


@pytest.mark.parametrize("remat", [False, True])
def test_a_scan_over_layers_updates_each_once(remat):
    dot = fp8.dot_general("delayed", fp8.Scaling(window=4))
    x, w = normal(0, 4, 8), normal(1, 3, 8, 8)

    def stacked(state, w):
        body = lambda x, layer: (dot(x, layer[0], PLAIN, state=layer[1]), None)
        return jnp.sum(jax.lax.scan(jax.checkpoint(body) if remat else body, x, (w, state))[0] ** 2)

    def one_by_one(states, w):
        y = x
        for i, state in enumerate(states):
            y = dot(y, w[i], PLAIN, state=state)
        return jnp.sum(y**2)

    state, states = dot.init_state((3,)), [dot.init_state() for _ in range(3)]
    for _ in range(2):
        state = fp8.settle(state, jax.jit(jax.grad(stacked))(state, w))
        states = fp8.settle(states, jax.jit(jax.grad(one_by_one))(states, w))
        w = w * 2
    want = jax.tree.map(lambda *s: jnp.stack(s), *states)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(want)):
        np.testing.assert_allclose(a, b, rtol=1e-5)  # XLA fuses, and sums, differently
    assert int(jnp.sum(state.history > 0)) == 3 * 3 * 2  # two steps, not four


def test_vmap_over_examples_takes_the_maximum():
    dot = fp8.dot_general("delayed")
    x, w, g = normal(0, 5, 4, 8), normal(1, 8, 4), normal(2, 5, 4, 4)
    x = x * jnp.array([1.0, 2.0, 9.0, 3.0, 1.0])[:, None, None]
    loss = lambda state: jnp.sum(jax.vmap(lambda x: dot(x, w, PLAIN, state=state))(x) * g)
    state = jax.grad(loss)(dot.init_state())
    want = [float(jnp.abs(a).max()) for a in (x, w, g)]
    np.testing.assert_allclose(state.history[:, 0], want, rtol=1e-6)


def test_vmap_over_states_keeps_them_apart():
    dot = fp8.dot_general("delayed")
    x, w, g = normal(0, 5, 4, 8), normal(1, 5, 8, 4), normal(2, 5, 4, 4)
    apart = jax.vmap(lambda x, w, g, s: gradient_of(dot, x, w, g)(s))(x, w, g, dot.init_state((5,)))
    for i in range(5):
        one = gradient_of(dot, x[i], w[i], g[i])(dot.init_state())
        for a, b in zip(jax.tree.leaves(apart), jax.tree.leaves(one)):
            np.testing.assert_allclose(a[i], b, rtol=1e-6)


def test_devices_take_the_maximum_under_jit_and_shard_map():
    mesh = sharding.make_mesh({"data": 8})
    dot = fp8.dot_general("delayed")
    x, w, g = normal(0, 64, 16), normal(1, 16, 8), normal(2, 64, 8)
    want = gradient_of(dot, x, w, g)(dot.init_state())
    rows = jax.NamedSharding(mesh, P("data"))
    placed = jax.device_put(x, rows), w, jax.device_put(g, rows)
    equal(jax.jit(lambda x, w, g, s: gradient_of(dot, x, w, g)(s))(*placed, dot.init_state()), want)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("data"), P(), P("data"), P()), out_specs=P()
    )
    def sharded(x, w, g, state):
        loss = lambda s: jax.lax.psum(jnp.sum(dot(x, w, PLAIN, state=s) * g), "data")
        return jax.grad(loss)(state)

    equal(jax.jit(sharded)(x, w, g, dot.init_state()), want)

    # Without the check JAX sums the state's gradient over devices: told by NaN.
    unchecked = jax.shard_map(
        lambda x, w, s: dot(x, w, PLAIN, state=s),
        mesh=mesh,
        in_specs=(P("data"), P(), P()),
        out_specs=P("data"),
        check_vma=False,
    )
    loss = lambda s: jnp.sum(unchecked(x, w, s) * g)
    summed = fp8.settle(dot.init_state(), jax.jit(jax.grad(loss))(dot.init_state()))
    assert bool(jnp.all(jnp.isnan(summed.scale)))


# ---- Shape of the state ---------------------------------------------------------------------


def test_state_is_stable_abstract_and_donated():
    dot = fp8.dot_general("delayed")
    x, w, g = normal(0, 4, 8), normal(1, 8, 4), normal(2, 4, 4)
    step = jax.jit(
        lambda state: fp8.settle(state, gradient_of(dot, x, w, g)(state)), donate_argnums=0
    )
    state = dot.init_state()
    kinds = lambda tree: jax.tree.map(lambda a: (a.shape, a.dtype), tree)
    assert kinds(jax.eval_shape(step, jax.eval_shape(dot.init_state))) == kinds(state)
    after = step(state)
    assert state.history.is_deleted() and kinds(after) == kinds(dot.init_state())
    assert step._cache_size() == 1


@pytest.mark.parametrize("window", [1, 3, 16, 40])
def test_another_window_keeps_what_fits(window):
    state = fp8_delayed.init_state(16, (2,))
    state = jax.tree.map(lambda a: a + 1, state)
    other = fp8.with_window({"up": state}, window)["up"]
    assert other.history.shape == (2, 3, window)
    assert int(other.history.sum()) == 2 * 3 * min(window, 16)
    equal(other.scale, state.scale)
    with pytest.raises(ValueError, match="window is 0 steps"):
        fp8.with_window(state, 0)


def test_no_state_is_neither_cold_nor_skipped():
    assert not bool(fp8.is_cold({})) and float(fp8.skipped({})) == 0
