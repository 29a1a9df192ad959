"""The XLA path of attention against the naive reference, and what it promises beyond values."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.attention import (
    CONTEXT,
    LSE,
    Mask,
    attention,
    attention_backward,
    attention_reference,
    xla,
)
from pallas_kernels.attention.mask import key_range, query_range, split, visible

CAUSAL = Mask(causal=True)


def make_inputs(batch=2, queries=7, keys=7, heads=4, kv_heads=2, depth=8, v_depth=8, seed=0):
    shapes = (
        (batch, queries, heads, depth),
        (batch, keys, kv_heads, depth),
        (batch, keys, kv_heads, v_depth),
        (heads,),
        (batch, queries, heads, v_depth),
        (batch, queries, heads),
    )
    random = np.random.default_rng(seed)
    return [jnp.asarray(random.standard_normal(s), jnp.float32) for s in shapes]


def make_segments(batch, length, seed=0):
    """Documents 1, 2, 3 ... with some padding at the end of odd rows."""
    cuts = np.random.default_rng(seed).random((batch, length)) < 2.5 / max(length, 5)
    ids = np.cumsum(cuts, axis=1) + 1
    ids[1::2, length - length // 4 :] = 0
    return jnp.asarray(ids, jnp.int32)


def values_and_gradients(function, q, k, v, sinks, dout, dlse):
    """Output, lse, and gradients of q, k, v, sinks of a loss that uses out and lse."""

    def loss(q, k, v, sinks):
        out, lse = function(q, k, v, sinks)
        used = jnp.where(jnp.isfinite(lse), lse, 0.0) * dlse
        return (out.astype(jnp.float32) * dout).sum() + used.sum(), (out, lse)

    argnums = (0, 1, 2) if sinks is None else (0, 1, 2, 3)
    (_, (out, lse)), gradients = jax.jit(jax.value_and_grad(loss, argnums=argnums, has_aux=True))(
        q, k, v, sinks
    )
    return out, lse, gradients


def check(inputs, mask, *, sinks=False, tolerance=1e-5, **options):
    q, k, v, sinks_H, dout, dlse = inputs
    sinks_H = sinks_H if sinks else None
    got = values_and_gradients(
        lambda q, k, v, s: attention(q, k, v, mask=mask, sinks_H=s, return_lse=True, **options),
        *(q, k, v, sinks_H, dout, dlse),
    )
    want = values_and_gradients(
        lambda q, k, v, s: attention_reference(q, k, v, mask=mask, sinks_H=s, **options),
        *(q, k, v, sinks_H, dout, dlse),
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    return got


# Each pair of features meets in some row; the first two columns pick the code path.
SHAPES = {
    "one": {"queries": 1, "keys": 1},
    "decode": {"queries": 1, "keys": 37},
    "blocks": {"queries": 147, "keys": 147},
    "wide": {"queries": 70, "keys": 205},
    "tall": {"queries": 205, "keys": 70},
    "loops": {"queries": 311, "keys": 300},
}
HEADS = {
    "multi-head": {"heads": 2, "kv_heads": 2},
    "grouped": {"heads": 6, "kv_heads": 2},
    "multi-query": {"heads": 3, "kv_heads": 1, "v_depth": 5},
}
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (9, 4)},
    "causal-window": {"causal": True, "window": (60, None)},
    "far": {"window": (None, 0), "offset": -3},
}
EXTRAS = {
    "plain": {},
    "sinks": {"sinks": True},
    "cap": {"logits_soft_cap": 2.0},
    "both": {"sinks": True, "logits_soft_cap": 2.0, "scale": 0.7},
}
PAIRS = [
    (shape, list(HEADS)[i % 3], mask, list(EXTRAS)[(i + j) % 4], bool((i + j // 2) % 2))
    for i, shape in enumerate(SHAPES)
    for j, mask in enumerate(MASKS)
]


@pytest.mark.parametrize(("shape", "heads", "mask", "extra", "packed"), PAIRS)
def test_agrees_with_the_reference(shape, heads, mask, extra, packed, monkeypatch):
    if shape == "loops":
        monkeypatch.setattr(xla, "UNROLL", 64)
        monkeypatch.setattr(xla, "TILE", 64)
    sizes = SHAPES[shape]
    segments = {}
    if packed:
        segments["q_segments"] = make_segments(2, sizes["queries"])
        segments["k_segments"] = make_segments(2, sizes["keys"])
    inputs = make_inputs(**sizes, **HEADS[heads])
    got = check(inputs, Mask(**MASKS[mask], **segments), **EXTRAS[extra])
    *_, gradients = got
    if sizes["queries"] > 1:  # a lone query may see one key, or none: no gradient then
        assert all(float(jnp.abs(g).max()) > 1e-2 for g in gradients)


def test_gradients_of_parts_of_the_keys_are_those_of_the_whole():
    q, k, v, _, dout, _ = make_inputs(queries=9, keys=12, v_depth=5)
    out, lse = attention(q, k, v, logits_soft_cap=2.0, return_lse=True)
    part = lambda at: attention_backward(q, k[:, at], v[:, at], out, lse, dout, logits_soft_cap=2.0)
    (dq_1, *first), (dq_2, *second) = part(slice(0, 5)), part(slice(5, 12))
    got = (dq_1 + dq_2, *(jnp.concatenate(pair, axis=1) for pair in zip(first, second)))
    _, back = jax.vjp(lambda *x: attention_reference(*x, logits_soft_cap=2.0)[0], q, k, v)
    for a, b in zip(got, back(dout), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"lse \(2, 9\); for q .* and \(2, 9, 4\)"):
        attention_backward(q, k, v, out, lse[..., 0], dout)


def test_real_tile_sizes_of_the_loops():
    check(make_inputs(batch=1, queries=1030, keys=1100), Mask(causal=True, window=(300, None)))


def test_rule_of_the_mask():
    segments = jnp.array([[0, 1, 1, 2, 2]]), jnp.array([[1, 1, 0, 2, 2, 2, 7]])
    for causal, window, offset in itertools.product(
        (False, True), (None, (1, 1), (None, 2), (0, None)), (None, -2, 3, jnp.array([1]))
    ):
        mask = Mask(causal, window, *segments, offset)
        got = visible(*split(mask, 1, 5, 7), jnp.arange(5), jnp.arange(7))
        shift = 2 if offset is None else int(np.ravel(offset)[0])
        left, right = window or (None, None)
        for i, j in np.ndindex(5, 7):
            want = int(segments[0][0, i]) == int(segments[1][0, j]) != 0
            want &= not causal or j <= i + shift
            want &= left is None or j >= i + shift - left
            want &= right is None or j <= i + shift + right
            assert bool(got[0, i, j]) == want, (causal, window, offset, i, j)


def test_ranges_are_exactly_what_the_band_leaves():
    for left, right, offset in itertools.product((None, 0, 3), (None, 0, 2), (-4, 0, 5)):
        mask = Mask(window=(left, right), offset=offset)
        band, arrays = split(mask, 1, 11, 13)
        allowed = np.asarray(visible(band, arrays, jnp.arange(11), jnp.arange(13)))[0]
        for first, count in ((0, 4), (4, 4), (8, 3)):
            for range_, seen, length in (
                (key_range, allowed[first : first + count].any(0), 13),
                (query_range, allowed[:, first : first + count].any(1), 11),
            ):
                start, stop = range_(band, (band.offset,) * 2, first, count, length)
                assert list(range(start, stop)) == list(np.flatnonzero(seen))


@pytest.mark.parametrize("loops", [False, True])
def test_dynamic_offset_equals_static(loops, monkeypatch):
    if loops:
        monkeypatch.setattr(xla, "UNROLL", 8)
        monkeypatch.setattr(xla, "TILE", 32)
    q, k, v, sinks, dout, _ = make_inputs(queries=6, keys=90)

    def run(offset):
        mask = Mask(causal=True, offset=offset)
        out, pull = jax.vjp(lambda *x: attention(*x[:3], mask=mask, sinks_H=x[3]), q, k, v, sinks)
        return out, *pull(dout)

    dynamic = jax.jit(run)
    for offset in (84, 50, 0):
        static = jax.jit(lambda o=offset: run(o))()
        for traced in (jnp.array(offset), jnp.array([offset, offset])):
            for a, b in zip(dynamic(traced), static):
                assert float(jnp.abs(b).max()) > 1e-3
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_offset_of_each_row():
    q, k, v, *_ = make_inputs(queries=1, keys=9)
    mask = Mask(causal=True, offset=jnp.array([2, 7]))
    out = attention(q, k, v, mask=mask)
    for row, length in ((0, 3), (1, 8)):
        want = attention(q[row : row + 1], k[row : row + 1, :length], v[row : row + 1, :length])
        np.testing.assert_allclose(out[row : row + 1], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("loops", [False, True])
def test_rows_that_see_nothing(sinks, loops, monkeypatch):
    if loops:
        monkeypatch.setattr(xla, "UNROLL", 4)
        monkeypatch.setattr(xla, "TILE", 8)
    inputs = make_inputs(queries=20, keys=11)
    mask = Mask(  # row 0 is padding throughout; elsewhere the first queries see no key
        causal=True,
        q_segments=jnp.array([[0] * 20, [1] * 20]),
        k_segments=jnp.array([[0] * 11, [1] * 11]),
    )
    with jax.debug_nans(True):
        out, lse, gradients = check(inputs, mask, sinks=sinks)
    empty = [np.s_[0], np.s_[1, :9]]
    for rows in empty:
        assert not np.any(out[rows])
        assert not np.any(gradients[0][rows])
        want = np.broadcast_to(inputs[3] if sinks else -np.inf, lse[rows].shape)
        np.testing.assert_array_equal(lse[rows], want)
    assert not np.any(gradients[1][0]) and not np.any(gradients[2][0])
    assert np.all(np.isfinite(lse[1, 9:]))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_error_is_near_that_of_the_naive_form_in_the_same_dtype(dtype):
    q, k, v, sinks, dout, dlse = make_inputs(queries=130, keys=130, depth=32, v_depth=32)
    mask = Mask(True, None, make_segments(2, 130), make_segments(2, 130))
    small = [x.astype(dtype) for x in (q, k, v)]
    exact = [x.astype(jnp.float32) for x in small]

    def run(function, inputs):
        return values_and_gradients(
            lambda q, k, v, s: function(q, k, v, mask=mask, sinks_H=s), *inputs, sinks, dout, dlse
        )

    def ours(*args, **kwargs):
        return attention(*args, return_lse=True, **kwargs)

    out, lse, gradients = run(ours, small)
    assert out.dtype == dtype and lse.dtype == jnp.float32
    assert all(g.dtype == dtype for g in gradients[:3])
    errors = lambda a, b: [
        float(jnp.abs(x.astype(jnp.float32) - y).max())
        for x, y in zip(*map(jax.tree.leaves, (a, b)))
    ]
    want = run(attention_reference, exact)
    got, naive = errors((out, lse, gradients), want), errors(run(attention_reference, small), want)
    for i, (a, b) in enumerate(zip(got, naive)):
        assert 0 < a <= (2 if i < 2 else 3) * b, (i, a, b)


def test_vmap_and_scan():
    q, k, v, *_ = (jnp.stack([a, b]) for a, b in zip(make_inputs(), make_inputs(seed=1)))
    segments = jnp.stack([make_segments(2, 7), make_segments(2, 7, seed=1)])

    def loss(q, k, v, s):
        return attention(q, k, v, mask=Mask(True, None, s, s), logits_soft_cap=3.0).sum()

    gradient = jax.grad(loss, argnums=(0, 1, 2))
    want = jax.tree.map(
        lambda *x: jnp.stack(x), *[gradient(q[i], k[i], v[i], segments[i]) for i in range(2)]
    )
    _, scanned = jax.lax.scan(lambda c, x: (c, gradient(*x)), None, (q, k, v, segments))
    for got in (jax.vmap(gradient)(q, k, v, segments), scanned):
        for a, b in zip(got, want):
            assert float(jnp.abs(b).max()) > 1e-2
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_vmap_of_the_loops_over_an_offset(monkeypatch):
    monkeypatch.setattr(xla, "UNROLL", 8)
    monkeypatch.setattr(xla, "TILE", 8)
    q, k, v, *_ = make_inputs(queries=3, keys=30)
    decode = lambda o: attention(q, k, v, mask=Mask(causal=True, offset=o))
    got = jax.vmap(decode)(jnp.array([4, 27]))
    for a, offset in zip(got, (4, 27)):
        np.testing.assert_allclose(a, decode(offset), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("unroll", [1024, 16])
def test_sharded_over_batch_and_heads_without_a_collective(unroll, monkeypatch):
    monkeypatch.setattr(xla, "UNROLL", unroll)
    q, k, v, _, dout, _ = make_inputs(batch=4, queries=40, keys=40, heads=4, kv_heads=2)
    segments = make_segments(4, 40)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    heads = NamedSharding(mesh, P("data", None, "tensor"))

    def gradient(q, k, v, dout, s):
        mask = Mask(True, None, s, s)
        out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, mask=mask), q, k, v)
        return out, *pull(dout)

    want = jax.jit(gradient)(q, k, v, dout, segments)
    arguments = jax.device_put(
        (q, k, v, dout, segments), (heads,) * 4 + (NamedSharding(mesh, P("data")),)
    )
    compiled = jax.jit(gradient, out_shardings=heads).lower(*arguments).compile()
    for a, b in zip(compiled(*arguments), want):
        assert float(jnp.abs(b).max()) > 1e-2
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert not re.findall(
        r"all-gather|all-to-all|collective-permute|all-reduce", compiled.as_text()
    )


def test_saved_names_spare_the_forward_softmax():
    q, k, v, *_ = make_inputs()

    def count(*saved):
        policy = jax.checkpoint_policies.save_only_these_names(*saved)
        layer = jax.checkpoint(lambda *x: attention(*x, mask=CAUSAL), policy=policy)
        text = jax.jit(jax.value_and_grad(lambda *x: layer(*x).sum(), (0, 1, 2))).lower(q, k, v)
        # Tiles are [rows, keys] in the forward pass, [keys, rows] in the backward pass.
        text = text.as_text()
        tiles = [len(re.findall(rf"exponential .*<2x2x{t}xf32>", text)) for t in ("14x7", "7x14")]
        return tuple(tiles)

    assert count(CONTEXT, LSE) == (1, 1)
    assert count(CONTEXT) == count(LSE) == count() == (2, 1)


def test_second_derivative_is_refused():
    q, k, v, *_ = make_inputs()
    first = jax.grad(lambda q: (attention(q, k, v) ** 2).sum())
    for second in (jax.grad(lambda q: first(q).sum()), jax.jacfwd(first)):
        with pytest.raises(NotImplementedError, match="no second derivative"):
            second(q)


@pytest.mark.parametrize("mask", [CAUSAL, Mask(window=(500, 0))])
def test_no_square_buffer_at_32768(mask):
    def peak(length):
        q, k = (jax.ShapeDtypeStruct((1, length, h, 16), jnp.float32) for h in (2, 1))

        def step(q, k, v, dout):
            out, pull = jax.vjp(lambda *x: attention(*x, mask=mask), q, k, v)
            return out, *pull(dout)

        compiled = jax.jit(step).lower(q, k, k, q).compile()
        sizes = [
            np.prod([int(n) for n in dims.split(",")])
            for dims in re.findall(r"(?:f32|s32|pred)\[([\d,]+)\]", compiled.as_text())
        ]
        return max(sizes), compiled.memory_analysis().temp_size_in_bytes

    largest, bytes_ = peak(32768)
    assert largest <= 32768 * 2 * 16  # q itself; T x T would be 1000 times that
    assert bytes_ < 2.2 * peak(16384)[1]


def test_causal_blocks_beyond_the_diagonal_are_not_computed():
    def flops(mask):
        q = jax.ShapeDtypeStruct((1, 1024, 1, 64), jnp.float32)
        step = lambda q: jax.vjp(lambda *x: attention(*x, mask=mask), q, q, q)[1](q)
        text = jax.jit(step).lower(q).as_text()
        products = re.findall(r"dot_general.*?-> tensor<1x1x(\d+)x(\d+)xf32>", text)
        return sum(int(a) * int(b) for a, b in products if 64 not in (int(a), int(b)))

    # Four blocks: 10 of 16 tiles; a window of 256 leaves 7.
    assert flops(CAUSAL) / flops(Mask()) == 10 / 16
    assert flops(Mask(causal=True, window=(255, 0))) / flops(Mask()) < 8 / 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (2, 7, 8)}, r"q \(2, 7, 8\).*needs q \[B,T,H,D\]"),
        ({"k": (2, 6, 2, 8)}, r"must agree in B, S, K and D"),
        ({"v": (3, 7, 2, 8)}, r"v \(3, 7, 2, 8\).*must agree"),
        ({"q": (2, 7, 4, 9)}, r"q \(2, 7, 4, 9\).*must agree"),
        ({"q": (2, 0, 4, 8)}, r"at least 1"),
        ({"q": (2, 7, 3, 8)}, r"3 query heads must be a multiple of the 2"),
        ({"dtype": jnp.int32}, r"int32.*bfloat16, float16, float32"),
        ({"sinks_H": jnp.ones(3)}, r"sinks float32\[3\].*\[4\]"),
        ({"logits_soft_cap": 0.0}, r"must be positive"),
        ({"implementation": "triton"}, r"'triton'; legal"),
        ({"mask": Mask(window=(-1, 0))}, r"\(-1, 0\).*>= 0"),
        ({"mask": Mask(q_segments=jnp.ones((2, 7), int))}, "given together"),
        (
            {"mask": Mask(q_segments=jnp.ones((2, 7), int), k_segments=jnp.ones((2, 6), int))},
            r"k_segments is int32\[2, 6\].*\[2, 7\]",
        ),
        (
            {"mask": Mask(q_segments=jnp.ones((2, 7)), k_segments=jnp.ones((2, 7)))},
            r"q_segments is float32",
        ),
        ({"mask": Mask(causal=True, offset=jnp.ones(3, int))}, r"offset is int32\[3\].*\[2\]"),
    ],
)
def test_mistakes_are_told(change, message):
    change = dict(change)
    dtype = change.pop("dtype", jnp.float32)
    shapes = {"q": (2, 7, 4, 8), "k": (2, 7, 2, 8), "v": (2, 7, 2, 8)}
    q, k, v = (jnp.ones(change.pop(n, shape), dtype) for n, shape in shapes.items())
    with pytest.raises(ValueError, match=message) as error:
        attention(q, k, v, **change)
    assert "\n" not in str(error.value)


def test_mask_is_a_pytree_with_static_structure():
    mask = Mask(causal=True, window=(3, None), q_segments=jnp.ones((2, 7), int))
    leaves, structure = jax.tree.flatten(mask)
    assert len(leaves) == 1
    assert jax.tree.unflatten(structure, [P("data")]).window == (3, None)
