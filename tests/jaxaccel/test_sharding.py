"""Meshes, rules and their errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxaccel import optim, sharding


@pytest.mark.parametrize(
    ("text", "devices", "sizes"),
    [
        ("", 1, (1, 1, 1, 1, 1)),
        ("", 8, (1, 1, 8, 1, 1)),
        ("fsdp=8", 8, (1, 1, 8, 1, 1)),
        ("data=2,fsdp=2,tensor=2", 8, (1, 2, 2, 1, 2)),
        ("sequence=4,data=2", 8, (1, 2, 1, 4, 1)),
        ("tensor=2, fsdp=4", 8, (1, 1, 4, 1, 2)),
        ("stage=2,fsdp=4", 8, (2, 1, 4, 1, 1)),
        (" data = 3 ", 3, (1, 3, 1, 1, 1)),
    ],
)
def test_meshes_are_read(text, devices, sizes):
    assert sharding.parse_mesh(text, devices) == dict(zip(sharding.AXES, sizes))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model=8", r"'model=8'.*stage, data, fsdp, sequence, tensor"),
        ("fsdp", "'fsdp'"),
        ("fsdp=", "'fsdp='"),
        ("fsdp=0", "'fsdp=0'"),
        ("fsdp=-8", "'fsdp=-8'"),
        ("fsdp=8.0", "'fsdp=8.0'"),
        ("fsdp=²", "'fsdp=²'"),
        ("fsdp=2,fsdp=4", "'fsdp=4'.* at most once"),
        ("fsdp=8,", "''"),
        ("fsdp=4", "has 4 places, but there are 8 devices"),
        ("data=16", "has 16 places, but there are 8 devices"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_in_one_line(text, message):
    with pytest.raises(ValueError, match=message) as caught:
        sharding.parse_mesh(text, 8)
    assert "\n" not in str(caught.value) and repr(text) in str(caught.value)


def test_a_mesh_has_the_axes_in_order():
    mesh = sharding.make_mesh(sharding.parse_mesh("tensor=2,data=4", 8))
    assert tuple(mesh.shape.items()) == tuple(zip(sharding.AXES, (1, 4, 1, 1, 2)))
    one = sharding.make_mesh(sharding.parse_mesh("", 1), jax.devices()[3:4])
    assert one.devices.ravel().tolist() == [jax.devices()[3]]


@pytest.mark.parametrize(
    ("axes", "want"),
    [
        ((), P()),
        (("embed", "mlp"), P(("fsdp", "sequence"), "tensor")),
        (("vocab", "embed"), P("tensor", ("fsdp", "sequence"))),
        (("layers", "heads", "embed"), P(None, "tensor", ("fsdp", "sequence"))),
        (("layers", None), P(None, None)),
        (("batch", "sequence", None), P(("data", "fsdp"), "sequence", None)),
    ],
)
def test_logical_axes_become_mesh_axes(axes, want):
    assert sharding.spec(axes) == want


def test_two_dimensions_on_one_mesh_axis_are_refused():
    with pytest.raises(ValueError, match=r"'heads' and 'mlp' of .* both want .* 'tensor'"):
        sharding.spec(("heads", "mlp"))
    with pytest.raises(ValueError, match=r"'batch' and 'embed'.*'fsdp'"):
        sharding.spec(("batch", None, "embed"))
    assert sharding.spec(("heads", "mlp"), {"heads": ("tensor",), "mlp": ()}) == P("tensor", None)


def test_an_axis_without_a_rule_is_refused():
    with pytest.raises(ValueError, match=r"no rule for logical axis 'head'; rules: batch, .*heads"):
        sharding.spec(("head",))


def test_a_dimension_that_does_not_divide_is_refused():
    mesh = sharding.make_mesh(sharding.parse_mesh("data=2,fsdp=2,tensor=2", 8))
    sharding.sharding(mesh, ("embed", "mlp"), (6, 4))
    with pytest.raises(ValueError, match=r"'mlp' of 5 .* by 2, .*tensor; .*multiples of 2"):
        sharding.sharding(mesh, ("embed", "mlp"), (6, 5))
    with pytest.raises(ValueError, match=r"'batch' of 6 .* by 4, .*dataxfsdp; .*multiples of 4"):
        sharding.sharding(mesh, ("batch",), (6,))


def test_arrays_really_lie_in_pieces():
    mesh = sharding.make_mesh(sharding.parse_mesh("fsdp=4,tensor=2", 8))
    x = jnp.arange(8 * 6.0).reshape(8, 6)
    placed = jax.device_put(x, sharding.sharding(mesh, ("embed", "mlp"), x.shape))
    assert {s.data.shape for s in placed.addressable_shards} == {(2, 3)}
    rows = jax.device_put(x, sharding.batch_sharding(mesh))
    assert {s.data.shape for s in rows.addressable_shards} == {(2, 6)}
    whole = jax.device_put(x, sharding.replicated(mesh))
    assert {s.data.shape for s in whole.addressable_shards} == {(8, 6)}
    np.testing.assert_array_equal(placed, x)


def test_activations_are_placed():
    mesh = sharding.make_mesh(sharding.parse_mesh("fsdp=8", 8))
    place = sharding.constrainer(mesh)
    y = jax.jit(lambda x: place(x * 2, ("batch", "sequence", None)))(jnp.ones((8, 3, 2)))
    assert y.sharding.is_equivalent_to(sharding.batch_sharding(mesh), 3)
    one = sharding.constrainer(sharding.make_mesh({"data": 1}, jax.devices()[:1]))
    x = jnp.ones(3)
    assert one(x, ("nonsense",)) is x


def test_moments_lie_like_their_parameters():
    mesh = sharding.make_mesh(sharding.parse_mesh("fsdp=8", 8))
    params = {"a": jax.ShapeDtypeStruct((8, 2), jnp.float32), "b": {"c": jnp.ones(3)}}
    placed = {
        "a": sharding.sharding(mesh, ("embed", None), (8, 2)),
        "b": {"c": sharding.replicated(mesh)},
    }
    optimizer = optax.chain(optax.clip(1.0), optax.adamw(optax.constant_schedule(1e-3)))
    state = jax.eval_shape(optimizer.init, params)
    got = sharding.like_parameters(state, params, placed, mesh)
    assert jax.tree.structure(got) == jax.tree.structure(state)
    adam = got[1][0]
    assert adam.mu == placed and adam.nu == placed
    assert adam.count == sharding.replicated(mesh) == got[1][2].count


def test_codes_and_scales_lie_like_their_parameter():
    mesh = sharding.make_mesh(sharding.parse_mesh("fsdp=4,tensor=2", 8))
    shapes = {"even": (64, 2048), "shared": (64, 768), "flat": (64, 100), "masked": (4, 4)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    cut = sharding.sharding(mesh, ("mlp", "embed"), (8, 8))
    placed = dict.fromkeys(params, cut)
    mask = {name: name != "masked" for name in params}
    adam = optax.masked(optim.scale_by_adam_8bit(moments=optim.Moments(min_size=0)), mask)
    state = jax.eval_shape(adam.init, params)
    got = sharding.like_parameters(state, params, placed, mesh)
    assert jax.tree.structure(got) == jax.tree.structure(state)
    spec = lambda *axes: NamedSharding(mesh, P(*axes))
    moments = got.inner_state.nu
    for name in ("even", "shared", "flat"):
        assert moments[name].codes == cut
    assert moments["even"].scale.spec == P("tensor", ("fsdp", "sequence"))
    assert moments["shared"].scale.spec == P("tensor", None)  # two blocks over four
    assert moments["flat"].scale == spec()
    assert isinstance(moments["masked"], optax.MaskedNode)
    assert got.inner_state.count == spec()
