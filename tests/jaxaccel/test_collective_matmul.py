"""Collective matmuls against the unsharded matmul, values and gradients, on eight CPU devices."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxaccel.cost import CostModel
from jaxaccel.overlap import collective_matmul as cm
from jaxaccel.sharding import make_mesh
from pallas_kernels.target import parse

B, T, K = 2, 48, 16  # rows divide by 8 devices and by 2 or 3 parts
COLUMNS = (16, 8, 24)  # a tuple of weights, of unlike widths


def mesh_of(**sizes):
    return make_mesh(sizes, jax.devices()[: math.prod(sizes.values())])


def inputs(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 6)
    normal = lambda key, *shape: jax.random.normal(key, shape, dtype)
    ws = tuple(normal(k, K, n) for k, n in zip(keys, COLUMNS))
    return normal(keys[3], B, T, K), ws, normal(keys[4], sum(COLUMNS), 12)


def whole(x, ws, v):
    """Gathered rows by three weights, joined; back by one more, whose sum is used twice."""
    hidden = jnp.concatenate([jnp.tanh(x @ w) for w in ws], axis=-1)
    return hidden @ v, hidden @ v


def loss(outputs):
    return sum(jnp.sum(jnp.sin(out + i)) for i, out in enumerate(outputs))


@functools.cache
def expected():
    return jax.value_and_grad(lambda *a: loss(whole(*a)), argnums=(0, 1, 2))(*inputs())


def sharded(mesh, form, dim=-2, remat=False):
    """`whole` with rows of x, columns of ws and rows of v cut over `tensor`."""
    batch = "data" if "data" in mesh.shape else None
    x_spec = P(batch, "tensor") if dim == -2 else P("tensor", batch)
    reduce_form = form if form.startswith("chunked") else "plain"

    def local(x, ws, vs):
        hidden = cm.all_gather_matmul(x, ws, "tensor", form=form, dim=dim)
        hidden = [jnp.tanh(h) for h in hidden]
        # Of v each device has the rows of its own columns of the three weights.
        joined, v = jnp.concatenate(hidden, axis=-1), jnp.concatenate(vs)
        scattered = cm.matmul_reduce_scatter(joined, v, "tensor", form=form, dim=dim)
        return scattered, cm.matmul_all_reduce(joined, v, "tensor", form=reduce_form)

    out_specs = (x_spec, P(*(None if axis == "tensor" else axis for axis in x_spec)))
    specs = (x_spec, P(None, "tensor"), P("tensor"))
    local = jax.checkpoint(local) if remat else local
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out_specs)


def check(found, wanted=None):
    for got, want in zip(*map(jax.tree.leaves, (found, wanted or expected())), strict=True):
        assert jnp.abs(want).max() > 0.1
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * float(jnp.abs(want).max()))


@pytest.mark.parametrize(
    ("sizes", "form", "dim"),
    [
        ({"tensor": 1}, "ring", -2),
        ({"data": 2, "tensor": 2}, "chunked:3", -2),
        ({"data": 2, "tensor": 2}, "bidirectional", 0),
        ({"tensor": 8}, "plain", -2),
        ({"tensor": 8}, "chunked:3", -3),
        ({"tensor": 8}, "ring", -2),
        ({"tensor": 8}, "ring", 0),
        ({"tensor": 8}, "bidirectional", -2),
    ],
    ids=str,
)
def test_each_form_is_the_unsharded_matmul(sizes, form, dim):
    x, ws, v = inputs()
    mesh = mesh_of(**sizes)
    function = sharded(mesh, form, dim, remat=form == "chunked:3")

    def value(x, ws, v):
        ends = np.cumsum(COLUMNS)[:-1]
        x = x if dim == -2 else jnp.swapaxes(x, 0, 1)
        return loss(function(x, ws, tuple(jnp.split(v, ends))))

    check(jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2)))(x, ws, v))


def test_layers_in_a_checkpointed_scan():
    """Rows stay cut from layer to layer; the forward and backward forms of a sum may differ."""
    w, v = (0.3 * jax.random.normal(jax.random.key(i), (3, K, K)) for i in (1, 2))
    x = inputs()[0]

    def layer(x, weights):
        hidden = cm.all_gather_matmul(x, weights[0], "tensor", form="ring")
        added = cm.matmul_reduce_scatter(
            jnp.tanh(hidden), weights[1], "tensor", form="chunked", backward="ring"
        )
        return x + added, None

    def local(x, w, v):
        return lax.scan(jax.checkpoint(layer), x, (w, v))[0]

    def unsharded(x, w, v):
        return lax.scan(lambda x, p: (x + jnp.tanh(x @ p[0]) @ p[1], None), x, (w, v))[0]

    specs = (P(None, "tensor"), P(None, None, "tensor"), P(None, "tensor"))
    cut = jax.shard_map(local, mesh=mesh_of(tensor=8), in_specs=specs, out_specs=specs[0])
    of = lambda f: jax.jit(
        jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(f(*a))), argnums=(0, 1, 2))
    )
    check(of(cut)(x, w, v), of(unsharded)(x, w, v))


def test_another_product_casts_once_and_its_state_goes_along():
    """Operands are rounded to FP8 before they travel; the state's gradient is its next value."""
    scale = 0.25

    def cast(x, state):
        return {"values": (x / scale).astype(jnp.float8_e4m3fn), "scale": jnp.float32(scale)}

    def multiply(a, b, dims, dtype):
        values = [each["values"].astype(jnp.float32) for each in (a, b)]
        product = lax.dot_general(*values, (((dims[0],), (dims[1],)), ((), ())))
        return (product * a["scale"] * b["scale"]).astype(dtype)

    product = cm.Product(cast, cast, cast, multiply, lambda state, *_: state + 1)
    rounded = lambda x: scale * (x / scale).astype(jnp.float8_e4m3fn).astype(x.dtype)
    x, (w, *_), _ = inputs()
    dy = jax.random.normal(jax.random.key(7), (B, T, w.shape[1]))

    def local(x, w, dy):
        gather = functools.partial(
            cm.all_gather_matmul, axis_name="tensor", form="ring", product=product
        )
        y, back = jax.vjp(lambda x, w, s: gather(x, w, state=s), x, w, jnp.float32(3))
        return y, back(dy)

    cut = P(None, "tensor"), P(None, "tensor"), P(None, None, "tensor")
    y, (dx, dw, state) = jax.jit(
        jax.shard_map(
            local, mesh=mesh_of(tensor=8), in_specs=cut, out_specs=(cut[2], (*cut[:2], P()))
        )
    )(x, w, dy)
    wanted, back = jax.vjp(jnp.matmul, rounded(x), rounded(w))
    check((y, dx, dw), (wanted, *back(rounded(dy))))
    assert state == 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w: cm.all_gather_matmul(x, w, "tensor", form="rings"), "form is 'rings'; legal"),
        (lambda x, w: cm.all_gather_matmul(x, w, "tensor", form="chunked:0"), "'chunked:0'; legal"),
        (lambda x, w: cm.all_gather_matmul(x, w, "tensor", form="ring:2"), "'ring:2'; legal"),
        (lambda x, w: cm.all_gather_matmul(x, w, "fsdp", form="ring"), "shard_map over 'fsdp'"),
        (
            lambda x, w: cm.all_gather_matmul(x, w.T, "tensor", form="ring"),
            r"x float32\[2, 6, 16\] and w float32\[24, 16\]; legal",
        ),
        (
            lambda x, w: cm.all_gather_matmul(x, w.astype("bfloat16"), "tensor", form="ring"),
            r"w bfloat16\[16, 24\]; legal: .* of one type",
        ),
        (lambda x, w: cm.all_gather_matmul(x, w, "tensor", form="ring", dim=2), "any dim but the"),
        (
            lambda x, w: cm.all_gather_matmul(x, w, "tensor", form="chunked:4"),
            "6 rows must be a multiple of 4, the parts",
        ),
        (
            lambda x, w: cm.matmul_reduce_scatter(x, w, "tensor", form="ring"),
            r"dim 1 of x float32\[2, 6, 16\] must be a multiple of the 8 devices",
        ),
        (
            lambda x, w: cm.matmul_reduce_scatter(x, w, "tensor", form="plain", backward="rng"),
            "form is 'rng'",
        ),
        (lambda x, w: cm.matmul_all_reduce(x, w, "tensor", form="ring"), "legal for matmul_all_"),
        (
            lambda x, w: cm.matmul_all_reduce(x, w, "tensor", form="chunked:5"),
            r"w float32\[16, 24\] must have a multiple of 5 columns",
        ),
    ],
)
def test_what_is_refused(call, message):
    x, (*_, w), _ = inputs()
    function = jax.shard_map(
        call, mesh=mesh_of(tensor=8), in_specs=(P(None, "tensor"), P()), out_specs=P("tensor")
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(function, x, w)


def test_a_sum_is_refused_where_its_gradient_would_be_wrong():
    x, (w, *_), _ = inputs()
    function = jax.shard_map(
        lambda x, w: cm.matmul_all_reduce(x, w, "tensor", form="plain"),
        mesh=mesh_of(tensor=8),
        in_specs=(P(None, None, "tensor"), P("tensor")),
        out_specs=P(),
        check_vma=False,
    )
    with pytest.raises(ValueError, match="legal: check_vma=True"):
        jax.eval_shape(function, x, w)


def test_the_form_follows_the_shape():
    model = CostModel(parse("h200x8"))
    choose = functools.partial(cm.choose, model)
    assert choose("all_gather_matmul", 8192, 4096, 7168, 8) == "ring"  # a block outlasts its hop
    assert choose("all_gather_matmul", 8192, 4096, 768, 8) == "chunked"
    assert choose("all_gather_matmul", 64, 4096, 768, 8) == "plain"  # latency is all
    assert choose("all_gather_matmul", 8192, 4096, 7168, 1) == "plain"
    assert choose("matmul_all_reduce", 8192, 1792, 4096, 8) == "chunked:4"
    forms = cm.modelled_seconds(model, "matmul_reduce_scatter", 8 * 3, 64, 64, 8)
    assert list(forms) == ["plain", "ring"]  # 3 rows a device have no halves
    with pytest.raises(ValueError, match="30 rows must be a multiple of the 8 devices"):
        choose("all_gather_matmul", 30, 64, 64, 8)
    with pytest.raises(ValueError, match="operation is 'gather'; legal: all_gather_matmul, "):
        choose("gather", 64, 64, 64, 8)
