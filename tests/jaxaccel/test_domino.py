"""Domino's halves in turn are the sequential program: values, gradients, sums over devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxaccel.overlap import domino
from pallas_kernels import manual_axes

LAYERS, ROWS, T, D, F = 3, 8, 3, 6, 12
WEIGHTS = {"in": P(None, None, None, "tensor"), "out": P(None, None, "tensor")}
X = P("data")


def inputs():
    random = np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32)
    weights = {"in": array(LAYERS, 2, D, F) / 3, "out": array(LAYERS, 2, F, D) / 3}
    return array(ROWS, T, D), weights, array(ROWS, 1, D)


def block(weights, which, scale, x):
    """What a block adds to `x`; of a device, its part of it. `scale` differs from row to row."""
    return jnp.tanh((x * scale) @ weights["in"][which]) @ weights["out"][which]


def sequential(x, weights, scale):
    def layer(x, weights):
        x = x + block(weights, 0, scale, x)
        return x + block(weights, 1, scale, x), None

    return lax.scan(layer, x, weights)[0]


def interleaved(x, weights, scale, *, keep=lambda x: x, rule=None):
    """The same on data=2, tensor=4: weights by columns, then by rows."""
    total = partial(lax.psum, axis_name="tensor")

    def unreduce(x):
        first = lax.axis_index("tensor") == 0
        return jnp.where(first, manual_axes.vary(x, ("tensor",)), 0)

    def run(x, weights, scale):
        def layer(state, weights):
            def compute(which, scale, x, found):
                x = x if found is None else x + found
                return x, block(weights, which, scale, x)

            blocks = [domino.Block(partial(compute, which), keep) for which in (0, 1)]
            return domino.interleave(blocks, domino.halves(scale), state, total), None

        if rule is not None:
            layer = jax.checkpoint(layer, policy=rule, prevent_cse=False)
        state, _ = lax.scan(layer, domino.begin(x, unreduce), weights)
        return domino.end(state, total)

    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    return jax.shard_map(run, mesh=mesh, in_specs=(X, WEIGHTS, X), out_specs=X)(x, weights, scale)


NAMED = {
    "keep": partial(checkpoint_name, name="sum"),
    "rule": jax.checkpoint_policies.save_only_these_names("sum"),
}
NOTHING = {"rule": jax.checkpoint_policies.nothing_saveable}


@pytest.mark.parametrize("options", [{}, NAMED, NOTHING], ids=["plain", "named", "nothing"])
def test_it_is_the_sequential_program(options):
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, T, D)), jnp.float32)

    @jax.jit
    def both(arguments):
        expected, pull = jax.vjp(sequential, *arguments)
        found, pull_halves = jax.vjp(partial(interleaved, **options), *arguments)
        return (expected, pull(cotangent)), (found, pull_halves(cotangent))

    expected, found = both(inputs())
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        largest = np.abs(y).max()
        assert largest > 0.1
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-6 * largest)


def sums(options):
    """How often a program of a layer's gradient sums over devices, as it is written."""
    loss = lambda *arguments: interleaved(*arguments, **options).sum()
    return str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*inputs())).count("psum_invariant[")


def test_a_sum_with_a_name_is_not_repeated():
    assert sums(NAMED) == sums({}) < sums(NOTHING)


@pytest.mark.parametrize("rows", [(3,), (4, 2, 5), ()])
def test_odd_rows_are_refused(rows):
    tree = [jnp.zeros((n, 2)) for n in rows] if rows else [jnp.float32(0)]
    message = r"^Domino halves the rows of each device; got \[.*\], and needs an even number: raise"
    with pytest.raises(ValueError, match=message):
        domino.halves(tree)
    if len(rows) == 1:
        with pytest.raises(ValueError, match=message):
            domino.begin(*tree, unreduce=lambda x: x)


def test_halves_of_trees():
    a, b = domino.halves({"x": jnp.arange(4), "y": jnp.arange(8).reshape(4, 2)})
    assert a["x"].tolist() + b["x"].tolist() == [0, 1, 2, 3]
    assert b["y"].tolist() == [[4, 5], [6, 7]]
