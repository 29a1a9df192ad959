"""`overlap.prefetch_scan` is `jax.lax.scan` on whole weights: values, gradients, what it keeps."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

from jaxaccel.overlap import prefetch_scan
from pallas_kernels import manual_axes

D, F, V, ROWS = 8, 12, 20, 16  # width, inner width, words, rows of the batch
BOTH = ("data", "fsdp")
# `scale` is whole on every device, the rest is cut over fsdp.
LAYER = {"down": P(None, None, "fsdp"), "scale": P(), "up": P(None, "fsdp")}
HEAD = P("fsdp")


def body(shift, kinds, x, layer):
    """Of a residual layer: all rows read `shift`, those of kind 0 stay as they are."""
    y = jnp.tanh((x * layer["scale"] + shift) @ layer["up"])
    y = checkpoint_name(y, "inner") @ layer["down"]
    x = jnp.where(kinds[:, None] > 0, x + y, x)
    return x, y.sum(1)


POLICIES = {
    "all": body,
    "nothing": jax.checkpoint(body, prevent_cse=False),
    "inner": jax.checkpoint(
        body, policy=jax.checkpoint_policies.save_only_these_names("inner"), prevent_cse=False
    ),
}


def arguments(length):
    """(x, layers, head, shift), kinds and totals; all random, none alike."""
    random = np.random.default_rng(length)
    array = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32)
    layers = lambda: {
        "down": array(length, F, D) / 3,
        "scale": array(length, 1, D),
        "up": array(length, D, F) / 3,
    }
    kinds = jnp.asarray(np.arange(ROWS) % 3, jnp.int32)
    floats = array(ROWS, D), layers(), array(D, V), array(ROWS, D)
    return floats, kinds, (layers(), array(D, V))


def whole(body, kinds, x, layers, head, shift):
    x, ys = lax.scan(partial(body, shift, kinds), x, layers)
    return x, ys, x @ head


def gather(shards):
    """Whole weights, each device's own: shards have one dim less than their specs in a loop."""
    cut = {"down": 1, "up": 0}
    if not isinstance(shards, dict):
        return manual_axes.vary(lax.all_gather(shards, "fsdp", tiled=True), BOTH)
    return {
        key: manual_axes.vary(
            lax.all_gather(w, "fsdp", axis=cut[key], tiled=True) if key in cut else w, BOTH
        )
        for key, w in shards.items()
    }


def reduce(gradient, total):
    scatter = partial(lax.psum_scatter, axis_name="fsdp", tiled=True)
    if not isinstance(gradient, dict):
        summed = lax.psum(scatter(gradient), "data")
    else:
        summed = {
            "down": lax.psum(scatter(gradient["down"], scatter_dimension=1), "data"),
            "scale": lax.psum(gradient["scale"], BOTH),
            "up": lax.psum(scatter(gradient["up"]), "data"),
        }
    return summed if total is None else jax.tree.map(jnp.add, summed, total)


def sharded(body, kinds, totals, *floats, loop=None):
    """`whole`, on eight devices."""
    mesh = jax.make_mesh((2, 4), BOTH, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows = P(BOTH)

    def run(kinds, totals, x, layers, head, shift):
        ahead = partial(prefetch_scan, gather=gather, reduce=reduce, totals=totals)
        x, ys, head = (loop or ahead)(Partial(body, shift, kinds), x, layers, head)
        return x, ys, x @ head

    total_specs = (None, None) if totals[0] is None else (LAYER, HEAD)
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(rows, total_specs, rows, LAYER, HEAD, rows),
        out_specs=(rows, P(None, BOTH), rows),
    )(kinds, totals, *floats)


def close(found, expected):
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        largest = np.abs(y).max()
        assert largest > 0.01, jax.tree_util.keystr(path)
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-6 * largest, err_msg=str(path))


@pytest.mark.parametrize(
    ("length", "policy", "add"),
    [(1, "all", True), (2, "nothing", False), (5, "inner", False), (5, "all", True)],
)
def test_it_is_a_scan_on_whole_weights(length, policy, add):
    floats, kinds, totals = arguments(length)
    random = np.random.default_rng(9)

    @jax.jit
    def both(floats, cotangents, totals):
        expected, pull = jax.vjp(partial(whole, body, kinds), *floats)
        given = totals if add else (None, None)
        found, pull_sharded = jax.vjp(partial(sharded, POLICIES[policy], kinds, given), *floats)
        return (expected, pull(cotangents)), (found, pull_sharded(cotangents))

    shapes = jax.eval_shape(partial(whole, body, kinds), *floats)
    cotangents = jax.tree.map(lambda s: jnp.asarray(random.normal(size=s.shape), s.dtype), shapes)
    (expected, gradients), (found, found_gradients) = both(floats, cotangents, totals)
    close(found, expected)
    if add:
        x, layers, head, shift = gradients
        layers, head = jax.tree.map(jnp.add, (layers, head), totals)
        gradients = x, layers, head, shift
    close(found_gradients, gradients)


def equations(jaxpr, times=1):
    """Every equation of a program, inner ones too, with how often a loop runs it."""
    for equation in jaxpr.eqns:
        yield equation, times
        turns = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(inner, "jaxpr", inner)  # a closed one, or one
            if hasattr(inner, "eqns"):
                yield from equations(inner, times * turns)


def plain(body, x, layers, head):
    x, ys = lax.scan(lambda x, layer: body(x, gather(layer)), x, layers)
    return x, ys, gather(head)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_stack_of_gathered_weights_is_kept(policy):
    """Layers are gathered ahead, once in each pass, and never are all of them alive."""
    length = 5
    floats, kinds, _ = arguments(length)

    def program(loop):
        run = partial(sharded, POLICIES[policy], kinds, (None, None), loop=loop)
        loss = lambda *floats: sum(x.sum() for x in run(*floats))
        return list(equations(jax.make_jaxpr(jax.grad(loss, (0, 1, 2, 3)))(*floats).jaxpr))

    def stacked(program, shape):
        """Loops that give a stack of arrays of this shape."""
        return sum(
            v.aval.shape[1:] == shape
            for equation, _ in program
            for v in equation.outvars
            if equation.primitive.name == "scan"
        )

    found, kept = program(None), program(plain)
    for shape in ((D, F), (F, D)):
        assert stacked(kept, shape) and not stacked(found, shape)
    # Of one number a row there is `ys`; the kinds that each layer reads would be another.
    assert stacked(found, (ROWS // 8,)) == 1
    counts = Counter()
    for equation, times in found:
        counts[equation.primitive.name] += times
    # The backward pass gathers all but the last layer anew; the head is gathered once.
    assert counts["all_gather_invariant"] + counts["all_gather"] == 2 * (2 * length - 1) + 1
    assert counts["reduce_scatter"] == 2 * length + 1


@pytest.mark.parametrize(
    ("xs", "lengths"),
    [
        ({"a": jnp.ones((3, 2)), "b": jnp.ones((2, 2))}, r"\[\(2,\), \(3,\)\]"),
        ({"a": jnp.ones((0, 2))}, r"\[\(0,\)\]"),
        ({"a": jnp.ones(3), "b": jnp.float32(1)}, r"\[\(\), \(3,\)\]"),
        ({}, r"\[\]"),
    ],
)
def test_stacks_without_a_common_length_are_refused(xs, lengths):
    message = f"^xs must share one leading dimension of at least 1; theirs are {lengths}$"
    with pytest.raises(ValueError, match=message):
        prefetch_scan(lambda c, x: (c, c), 1.0, xs, gather=lambda x: x, reduce=lambda g, total: g)
