"""Ring attention is attention: values and gradients against the naive form on one device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxaccel import names
from jaxaccel.overlap import ring_attention, unzigzag, zigzag
from pallas_kernels.attention import Mask, attention, attention_reference

B, T, H, K, D = 2, 64, 4, 2, 8
MESHES = {
    "1": {"sequence": 1},
    "2": {"sequence": 2},
    "8": {"sequence": 8},
    "2x4": {"tensor": 2, "sequence": 4},
}


def make_mesh(sizes):
    count = int(np.prod(list(sizes.values())))
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), types, devices=jax.devices()[:count])


def inputs(v_size=D, dtype=jnp.float32):
    random = np.random.default_rng(0)
    shapes = [(B, T, H, D), (B, T, K, D), (B, T, K, v_size), (B, T, H, v_size)]
    return [jnp.asarray(random.standard_normal(s), dtype) for s in shapes]


def documents():
    """Longer than a chunk and shorter, padding at the end and (rows that see nothing) within."""
    ids = np.repeat([1, 2, 3, 4], [3, 30, 10, 21])[None].repeat(B, 0)
    ids[1, 40:] = 0
    ids[0, 8:12] = 0
    return jnp.asarray(ids, jnp.int32)


def over(mesh, mask, **options):
    """`ring_attention` on whole sequences in their own order, sharded over the mesh."""
    n = mesh.shape["sequence"]
    heads = P(None, "sequence", "tensor" if "tensor" in mesh.shape else None)

    def attend(q, k, v, ids):
        here = Mask(mask.causal, mask.window, ids, ids)
        return ring_attention(q, k, v, "sequence", mask=here, **options)

    ring = jax.shard_map(
        attend, mesh=mesh, in_specs=(heads,) * 3 + (P(None, "sequence"),), out_specs=heads
    )
    turn = lambda x: x if x is None else zigzag(x, n)
    return lambda q, k, v: unzigzag(ring(*map(turn, (q, k, v, mask.q_segments))), n)


def gradients(attend, q, k, v, dout):
    def loss(q, k, v):
        out = attend(q, k, v)
        return (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(), out

    (_, out), found = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    return (out, *found)


CASES = {
    "one device": ("1", True, True, {}),
    "two devices": ("2", True, False, {"logits_soft_cap": 2.0, "v_size": 5}),
    "documents": ("8", True, True, {}),
    "beside tensor": ("2x4", True, True, {"scale": 0.5}),
    "full": ("2", False, False, {"v_size": 5}),
    "full, documents": ("2x4", False, True, {"logits_soft_cap": 2.0}),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_attention_to_the_whole_sequence(case):
    mesh, causal, packed, options = CASES[case]
    q, k, v, dout = inputs(options.pop("v_size", D))
    ids = documents() if packed else None
    mask = Mask(causal, None, ids, ids)
    got = gradients(over(make_mesh(MESHES[mesh]), mask, **options), q, k, v, dout)
    want = gradients(lambda *x: attention_reference(*x, mask=mask, **options)[0], *(q, k, v, dout))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        assert float(jnp.abs(b).max()) > 0.5
    if packed:  # what is padding gets, gives and learns nothing
        for x in got:
            assert not x[ids == 0].any()


def test_in_bfloat16_it_is_about_as_exact_as_attention():
    exact = inputs()
    rounded = inputs(dtype=jnp.bfloat16)
    mask = Mask(causal=True)
    want = gradients(lambda *x: attention_reference(*x, mask=mask)[0], *exact)
    plain = gradients(partial(attention, mask=mask), *rounded)
    ring = gradients(over(make_mesh(MESHES["2x4"]), mask), *rounded)
    for a, b, c in zip(ring, plain, want, strict=True):
        assert a.dtype == jnp.bfloat16
        error = lambda x, exact=c: float(jnp.sqrt(jnp.mean((x.astype(jnp.float32) - exact) ** 2)))
        assert error(a) < 1.5 * error(b)


@pytest.mark.parametrize(("saved", "transfers"), [(names.ATTENTION, 8), ((), 11)])
def test_saved_by_name_it_sends_nothing_twice(saved, transfers):
    """In a scan over layers, each a checkpoint: 3 transfers forward, 5 backward on 4 devices."""
    q, k, v, dout = inputs()
    attend = over(make_mesh({"sequence": 4}), Mask(causal=True))
    policy = jax.checkpoint_policies.save_only_these_names(*saved)

    def layers(attend, q, k, v):
        layer = jax.checkpoint(lambda x, _: (x + attend(x, k, v), None), policy=policy)
        return jax.lax.scan(layer, q, length=2)[0]

    got = gradients(partial(layers, attend), q, k, v, dout)
    reference = lambda *x: attention_reference(*x, mask=Mask(causal=True))[0]
    for a, b in zip(got, gradients(partial(layers, reference), q, k, v, dout), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    backward = jax.grad(lambda *x: layers(attend, *x).sum(), (0, 1, 2))
    assert str(jax.make_jaxpr(backward)(q, k, v)).count("ppermute") == transfers


def test_zigzag_gives_each_device_an_early_and_a_late_chunk():
    x = np.arange(2 * 24).reshape(2, 24)
    parts = np.split(zigzag(x, 3), 3, axis=1)
    for i, part in enumerate(parts):
        chunks = np.split(x, 6, axis=1)
        np.testing.assert_array_equal(part, np.concatenate([chunks[i], chunks[5 - i]], axis=1))
    for dim, n in ((1, 3), (-1, 4), (0, 1)):
        there = zigzag(jnp.asarray(x), n, dim)
        assert isinstance(there, jax.Array) and isinstance(zigzag(x, n, dim), np.ndarray)
        np.testing.assert_array_equal(unzigzag(there, n, dim), x)
    with pytest.raises(ValueError, match=r"dim 1 of \(2, 24\).*legal lengths are multiples of 10"):
        zigzag(x, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": Mask(True, (8, None))}, r"window \(8, None\).*set both to None"),
        ({"mask": Mask(True, offset=3)}, r"offset 3; over 2 devices"),
        ({"axis_name": "context"}, r"no mesh axis 'context' here; .*shard_map"),
        ({"q": (1, 6, 2, 4)}, r"got 3 queries and 4 keys on each device"),
        ({"q": (1, 4, 2, 4), "mask": Mask(True)}, r"got 2 queries and 4 keys"),
        ({"v": (1, 8, 2, 3), "dtype": jnp.bfloat16}, r"sum of their head sizes must be even"),
        ({"k": (1, 8, 2, 6)}, r"must agree in B, S, K and D"),
        ({"mask": Mask(q_segments=jnp.ones((1, 4), jnp.int32))}, r"must be given together"),
    ],
)
def test_what_it_cannot_do_is_refused(change, message):
    shape, dtype = (1, 8, 2, 4), change.get("dtype", jnp.float32)
    arrays = [jnp.ones(change.get(name, shape), dtype) for name in ("q", "k", "v")]
    run = partial(
        ring_attention,
        axis_name=change.get("axis_name", "sequence"),
        mask=change.get("mask", Mask()),
    )
    spec = P(None, "sequence")
    ring = jax.shard_map(run, mesh=make_mesh(MESHES["2"]), in_specs=spec, out_specs=spec)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(ring, *arrays)
