"""The decoder against the published formulas, written once more in numpy and float64."""

import dataclasses
import math
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel import cache, names, sharding
from jaxaccel.nn import (
    Between,
    Decoder,
    DecoderConfig,
    Joint,
    Placement,
    RopeScaling,
    rope_frequencies,
)

BASE = DecoderConfig(
    vocab_size=29, layers=2, width=20, heads=6, kv_heads=2, head_size=8, mlp_width=27
)
TOLERANCE = 1e-4  # float32 through six layers, against float64; values are near 1

# A context so short that 8-channel heads have wavelengths kept, blended and stretched.
LLAMA3 = RopeScaling(factor=8.0, low_frequency=1.0, high_frequency=4.0, original_context=60)

CASES = {
    "llama-2": BASE,
    "llama-3.1": dataclasses.replace(BASE, rope_theta=500.0, rope_scaling=LLAMA3),
    "mistral": dataclasses.replace(BASE, windows=(3,), layers=3),
    "qwen2": dataclasses.replace(BASE, qkv_bias=True, tied_head=True, norm_epsilon=1e-2),
    "qwen3": dataclasses.replace(BASE, qk_norm=True, rope_theta=1e6, kv_heads=1),
    "alternating": dataclasses.replace(
        BASE, windows=(2, None), layers=6, activation="gelu_tanh", kv_heads=6
    ),
    "gemma-2": dataclasses.replace(
        BASE,
        windows=(3, None),
        activation="gelu_tanh",
        tied_head=True,
        zero_centered_norm=True,
        post_norms=True,
        embedding_scale=20**0.5,
        attention_scale=0.2,
        attention_soft_cap=2.0,
        logits_soft_cap=3.0,
        qk_norm=True,
    ),
    "gelu": dataclasses.replace(BASE, activation="gelu", layers=1),
    "relu": dataclasses.replace(BASE, activation="relu", layers=1),
}


# --- the formulas -----------------------------------------------------------------------


def np_frequencies(config):
    """Llama 3.1's rule by wavelength, case by case, as published with its weights."""
    out = []
    for i in range(config.head_size // 2):
        f = config.rope_theta ** (-2 * i / config.head_size)
        s = config.rope_scaling
        if s is not None:
            wavelength = 2 * math.pi / f
            longest_kept = s.original_context / s.high_frequency
            shortest_stretched = s.original_context / s.low_frequency
            if wavelength > shortest_stretched:
                f = f / s.factor
            elif wavelength >= longest_kept:
                smooth = (s.original_context / wavelength - s.low_frequency) / (
                    s.high_frequency - s.low_frequency
                )
                f = (1 - smooth) * f / s.factor + smooth * f
        out.append(f)
    return np.array(out)


def np_norm(c, x, p):
    scale = p["scale"] + c.zero_centered_norm
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + c.norm_epsilon) * scale


def np_capped(x, cap):
    return x if cap is None else cap * np.tanh(x / cap)


def np_rotate(x, positions, frequencies):
    """x [T, C]: `x cos + rotate_half(x) sin`, rotate_half(a, b) = (-b, a)."""
    angles = positions[:, None] * np.concatenate([frequencies, frequencies])
    half = x.shape[-1] // 2
    rotated = np.concatenate([-x[:, half:], x[:, :half]], -1)
    return x * np.cos(angles) + rotated * np.sin(angles)


def np_activation(name, x):
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "gelu":
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    if name == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return np.maximum(x, 0)


def np_decoder(config, params, tokens, segments=None, positions=None):
    """Hidden states and logits of one row [T], layer by layer, head by head."""
    c, length = config, len(tokens)
    segments = np.ones(length, int) if segments is None else segments
    positions = np.arange(length) if positions is None else positions
    frequencies = np_frequencies(c)
    x = params["embedding"][tokens] * c.embedding_scale
    for index in range(c.layers):
        member, repeat = index % len(c.windows), index // len(c.windows)
        p = jax.tree.map(lambda a, r=repeat: a[r], params["layers"][member])
        window = c.windows[member] or length
        y = np_norm(c, x, p["attention_norm"])

        def project(name, y=y, p=p):
            return y @ p[name]["kernel"] + p[name].get("bias", 0)

        q, k, v = project("query"), project("key"), project("value")
        context = []
        for head in range(c.heads):
            kv = head // (c.heads // c.kv_heads)
            part = lambda a, i: a[:, i * c.head_size : (i + 1) * c.head_size]
            q_h, k_h = part(q, head), part(k, kv)
            if c.qk_norm:
                q_h, k_h = np_norm(c, q_h, p["query_norm"]), np_norm(c, k_h, p["key_norm"])
            q_h, k_h = (np_rotate(a, positions, frequencies) for a in (q_h, k_h))
            scores = q_h @ k_h.T * (c.attention_scale or c.head_size**-0.5)
            scores = np_capped(scores, c.attention_soft_cap)
            i, j = np.arange(length)[:, None], np.arange(length)[None, :]
            seen = (j <= i) & (i - j < window) & (segments[:, None] == segments[None, :])
            weights = np.exp(scores - scores.max(-1, keepdims=True)) * seen
            context.append(weights / weights.sum(-1, keepdims=True) @ part(v, kv))
        found = np.concatenate(context, -1) @ p["attention_output"]["kernel"]
        x = x + (np_norm(c, found, p["post_attention_norm"]) if c.post_norms else found)
        y = np_norm(c, x, p["mlp_norm"])
        gate = np_activation(c.activation, y @ p["gate"]["kernel"])
        found = (gate * (y @ p["up"]["kernel"])) @ p["down"]["kernel"]
        x = x + (np_norm(c, found, p["post_mlp_norm"]) if c.post_norms else found)
    hidden = np_norm(c, x, params["final_norm"])
    head = params["embedding"] if c.tied_head else params["head"]
    return hidden, np_capped(hidden @ head.T, c.logits_soft_cap)


# --- the model --------------------------------------------------------------------------


def make(config, seed=0, **arguments):
    """A decoder and its float64 parameters, no scale 1, no bias 0, attention not uniform."""
    model = Decoder(config, rngs=nnx.Rngs(seed), **arguments)
    rng = np.random.default_rng(seed)

    def draw(path, x):
        noise = rng.normal(size=x.shape)
        kind = path[-1].key
        value = {"scale": 1 - config.zero_centered_norm + 0.3 * noise, "bias": 0.5 * noise}.get(
            kind, np.asarray(x) * 1.5
        )
        return jnp.asarray(value, jnp.float32)

    params = nnx.to_pure_dict(nnx.state(model))
    params = jax.tree_util.tree_map_with_path(draw, params)
    nnx.update(model, params)
    return model, jax.tree.map(lambda x: np.asarray(x, np.float64), params)


def draw_tokens(config, *shape, seed=1):
    tokens = np.random.default_rng(seed).integers(0, config.vocab_size, shape)
    return jnp.asarray(tokens, jnp.int32)


@jax.jit
def run(model, tokens, segments=None, positions=None):
    hidden = model(tokens, segments_BT=segments, positions_BT=positions)
    return hidden, cache.logits(model, hidden)


PACKED = {  # two rows, of three and two documents and padding
    "segments": np.array([[1, 1, 1, 1, 2, 2, 3, 3, 3, 3, 3], [1, 1, 1, 2, 2, 2, 2, 2, 0, 0, 0]]),
    "positions": np.array([[0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 4], [0, 1, 2, 0, 1, 2, 3, 4, 0, 0, 0]]),
}
PACKED = {key: value.astype(np.int32) for key, value in PACKED.items()}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_published_formulas(name):
    config = CASES[name]
    model, params = make(config)
    tokens = draw_tokens(config, 2, 11)
    hidden, logits = run(model, tokens)
    for row in range(2):
        want_hidden, want_logits = np_decoder(config, params, np.asarray(tokens)[row])
        np.testing.assert_allclose(hidden[row], want_hidden, atol=TOLERANCE)
        np.testing.assert_allclose(logits[row], want_logits, atol=TOLERANCE)


@pytest.mark.parametrize(
    "change",
    [
        {"windows": (4,)},
        {"activation": "gelu"},
        {"rope_theta": 9_000.0},
        {"rope_scaling": LLAMA3},
        {"norm_epsilon": 1e-3},
    ],
)
def test_the_comparison_above_would_notice(change):
    config = BASE
    _, params = make(config)
    tokens = np.asarray(draw_tokens(config, 11))
    other = np_decoder(dataclasses.replace(config, **change), params, tokens)[1]
    assert np.abs(other - np_decoder(config, params, tokens)[1]).max() > 10 * TOLERANCE


def test_llama3_frequencies_keep_blend_and_stretch():
    config = CASES["llama-3.1"]
    got = np.asarray(rope_frequencies(config))
    plain = np.asarray(rope_frequencies(dataclasses.replace(config, rope_scaling=None)))
    np.testing.assert_allclose(got, np_frequencies(config), rtol=1e-6)
    ratio = got / plain
    assert ratio[0] == 1 and ratio[-1] == 1 / 8  # both ends and something between them
    assert ((ratio > 1 / 8) & (ratio < 1)).any()
    # Llama 3.1 8B's own numbers.
    real = dataclasses.replace(
        config, head_size=128, rope_theta=500_000.0, rope_scaling=RopeScaling()
    )
    np.testing.assert_allclose(rope_frequencies(real), np_frequencies(real), rtol=2e-5)


@pytest.mark.parametrize("name", ["llama-2", "alternating"])
def test_packed_rows_are_those_of_the_formulas(name):
    config = CASES[name]
    model, params = make(config)
    tokens = draw_tokens(config, 2, 11)
    hidden, _ = run(model, tokens, **PACKED)
    for row in range(2):
        one = {key: value[row] for key, value in PACKED.items()}
        want, _ = np_decoder(config, params, np.asarray(tokens)[row], **one)
        real = one["segments"] > 0
        np.testing.assert_allclose(hidden[row][real], want[real], atol=TOLERANCE)


def test_a_packed_document_equals_the_document_in_a_row_of_its_own():
    config = CASES["llama-3.1"]
    model, _ = make(config)
    tokens = draw_tokens(config, 2, 11)
    hidden, _ = run(model, tokens, **PACKED)
    for row, start, stop in [(0, 0, 4), (0, 4, 6), (0, 6, 11), (1, 3, 8)]:
        alone = np.zeros((2, 11), np.int32)
        alone[:, : stop - start] = tokens[row, start:stop]
        want, _ = run(model, alone)
        np.testing.assert_allclose(
            hidden[row, start:stop], want[0, : stop - start], atol=2e-6, rtol=2e-6
        )


@pytest.mark.parametrize("document", [1, 2, 3])
def test_documents_do_not_see_each_other(document):
    config = CASES["alternating"]
    model, _ = make(config)
    tokens = draw_tokens(config, 2, 11)
    mine = PACKED["segments"] == document
    changed = np.where(mine, (tokens + 1) % config.vocab_size, tokens)
    before, after = (np.asarray(run(model, t, **PACKED)[0]) for t in (tokens, changed))
    np.testing.assert_array_equal(before[~mine], after[~mine])
    assert np.abs(before[mine] - after[mine]).min(-1).max() > 1e-3


def test_padding_reaches_nothing_and_stays_finite():
    config = BASE
    model, _ = make(config)
    tokens = draw_tokens(config, 2, 11)
    padding = PACKED["segments"] == 0
    changed = np.where(padding, (tokens + 3) % config.vocab_size, tokens)
    before, after = (np.asarray(run(model, t, **PACKED)[0]) for t in (tokens, changed))
    np.testing.assert_array_equal(before[~padding], after[~padding])
    assert np.isfinite(before).all()

    def loss(model):
        hidden = model(tokens, segments_BT=jnp.zeros_like(tokens))  # nothing but padding
        return jnp.sum(hidden * hidden)

    assert all(np.isfinite(g).all() for g in jax.tree.leaves(jax.jit(jax.grad(loss))(model)))


def test_later_tokens_do_not_reach_back():
    model, _ = make(BASE)
    tokens = draw_tokens(BASE, 1, 11)
    changed = tokens.at[:, 6].set((tokens[:, 6] + 1) % BASE.vocab_size)
    before, after = (np.asarray(run(model, t)[0]) for t in (tokens, changed))
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert np.abs(before[:, 6:] - after[:, 6:]).max(-1).min() > 1e-4


def python_scan(body, carry, xs):
    """The loop over layers without `jax.lax.scan`."""
    for i in range(jax.tree.leaves(xs)[0].shape[0]):
        carry, _ = body(carry, jax.tree.map(lambda x, i=i: x[i], xs))
    return carry, None


def test_the_scan_equals_an_unscanned_loop():
    config = CASES["alternating"]
    scanned, _ = make(config)
    looped, _ = make(config, scan=python_scan)
    tokens = draw_tokens(config, 2, 11)

    @jax.jit
    def gradients(model):
        def loss(model):
            hidden = model(tokens)
            return jnp.sum(jnp.sin(hidden @ model.head_VD.T))

        return nnx.to_pure_dict(nnx.state(jax.grad(loss)(model)))

    one, two = gradients(scanned), gradients(looped)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(two)):
        assert np.linalg.norm(a) > 1e-3, path
        np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(a).max(), err_msg=str(path))


def test_the_program_does_not_grow_with_depth():
    def lines(layers):
        model = Decoder(dataclasses.replace(BASE, layers=layers), rngs=nnx.Rngs(0))
        loss = lambda model, tokens: jnp.sum(model(tokens))
        text = jax.jit(jax.grad(loss)).lower(model, draw_tokens(BASE, 1, 7)).as_text()
        return len(text.splitlines())

    assert lines(2) == lines(9)


def test_every_name_is_on_a_tensor():
    model, _ = make(BASE)

    def loss(model):
        return jnp.sum(model(draw_tokens(BASE, 1, 7)))

    text = str(jax.make_jaxpr(jax.grad(loss))(model))
    assert set(re.findall(r"name\[name=(\w+)\]", text)) == set(names.ALL)


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"'mlp_gat'.*known: .*mlp_gate"):
        names.tag(jnp.ones(2), "mlp_gat")


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_has_logical_axes_with_rules(name):
    model = jax.eval_shape(lambda: Decoder(CASES[name], rngs=nnx.Rngs(0)))
    is_variable = lambda node: isinstance(node, nnx.Variable)
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(model), is_leaf=is_variable)
    assert len(leaves) >= 11
    for path, variable in leaves:
        axes = variable.get_metadata("axes")
        assert len(axes) == len(variable.shape), path
        assert variable.dtype == jnp.float32, path
        sharding.spec(axes)  # no unknown axis, no collision


def test_parameters_are_named_and_shaped_as_the_configuration_says():
    config = dataclasses.replace(BASE, qkv_bias=True, qk_norm=True)
    model = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    layer = model.layers[0]
    shapes = {
        "embedding": (model.embedding, (29, 20), ("vocab", "embed")),
        "head": (model.head, (29, 20), ("vocab", "embed")),
        "query": (layer.query.kernel, (2, 20, 48), ("layers", "embed", "heads")),
        "key": (layer.key.kernel, (2, 20, 16), ("layers", "embed", "kv_heads")),
        "bias": (layer.value.bias, (2, 16), ("layers", "kv_heads")),
        "output": (layer.attention_output.kernel, (2, 48, 20), ("layers", "heads", "embed")),
        "down": (layer.down.kernel, (2, 27, 20), ("layers", "mlp", "embed")),
        "qk": (layer.query_norm.scale, (2, 8), ("layers", None)),
    }
    for name, (parameter, shape, axes) in shapes.items():
        assert (parameter.shape, parameter.get_metadata("axes")) == (shape, axes), name


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_stays_near_float32(dtype):
    config = CASES["qwen3"]
    exact, _ = make(config)
    low, _ = make(config, dtype=dtype)
    tokens = draw_tokens(config, 2, 11)
    want = run(exact, tokens)[0]
    got = jax.jit(lambda m: m(tokens))(low)
    assert got.dtype == dtype
    error = np.abs(np.asarray(got, np.float32) - want).max() / np.abs(want).max()
    assert 0 < error < 8 * jnp.finfo(dtype).eps


def test_what_a_technique_replaces_is_called():
    called = []

    def spy(name, fn):
        def wrapped(*args, **kwargs):
            called.append(name)
            return fn(*args, **kwargs)

        return wrapped

    plain = Decoder(BASE, rngs=nnx.Rngs(0))
    layer = plain.layers[0]
    spied = Decoder(
        BASE,
        rngs=nnx.Rngs(0),
        dot_general=spy("dot_general", jax.lax.dot_general),
        attention=spy("attention", layer.attention),
        between=Between(spy("norm", plain.final_norm.norm), spy("glu", layer.glu)),
        scan=spy("scan", jax.lax.scan),
        placement=Placement(
            spy("constrain", lambda x, axes: x),
            spy("lookup", plain.lookup),
            Joint(spy("enter", layer.joint.enter), spy("leave", layer.joint.leave)),
        ),
    )
    tokens = draw_tokens(BASE, 1, 5)
    jax.eval_shape(spied, tokens)
    counts = {name: called.count(name) for name in called}
    # One traced layer: 7 matmuls, 2 norms and the final one.
    assert counts == {
        "dot_general": 7,
        "attention": 1,
        "norm": 3,
        "glu": 1,
        "scan": 1,
        "constrain": 2,
        "lookup": 1,
        "enter": 2,
        "leave": 2,
    }


def test_initial_loss_is_that_of_a_uniform_guess():
    config = CASES["alternating"]
    logits = run(Decoder(config, rngs=nnx.Rngs(0)), draw_tokens(config, 2, 11))[1]
    assert np.abs(logits).max() < 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, "5 query heads do not divide into 2 key/value heads"),
        ({"kv_heads": 0}, "0 key/value heads"),
        ({"head_size": 7}, "head_size is 7; .* even"),
        ({"head_size": 0}, "head_size is 0"),
        ({"heads": 0}, "heads is 0"),
        ({"layers": 3, "windows": (2, None)}, "3 layers .* group of 2 windows"),
        ({"windows": ()}, "group of 0 windows"),
        ({"windows": (0, None)}, r"windows are \(0, None\); each must be at least 1"),
        ({"vocab_size": 0}, "vocab_size is 0; .* at least 1"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BASE, **change)


def test_an_unknown_activation_is_refused():
    config = dataclasses.replace(BASE)
    object.__setattr__(config, "activation", "swish")  # past the type checker of these tests
    with pytest.raises(ValueError, match="unknown activation 'swish'; known: silu"):
        config.__post_init__()


def test_works_without_nnx_graph_mode():
    """In tree mode modules are plain pytrees; flax moves towards it."""
    code = """
import jax, jax.numpy as jnp
from flax import nnx
from jaxaccel.nn import Decoder, DecoderConfig
config = DecoderConfig(32, layers=2, width=16, heads=2, kv_heads=1, head_size=8, mlp_width=32)
model = Decoder(config, rngs=nnx.Rngs(0))
loss = lambda model: jnp.sum(jnp.sin(model(jnp.ones((1, 5), jnp.int32))))
grads = nnx.to_pure_dict(nnx.state(jax.jit(jax.grad(loss))(model)))
assert float(jnp.linalg.norm(grads["layers"][0]["query"]["kernel"])) > 0
graphdef, state = nnx.split(model)
assert bool(loss(nnx.merge(graphdef, nnx.to_pure_dict(state))) == loss(model))
"""
    env = dict(os.environ, NNX_GRAPH_MODE="false", NNX_GRAPH_UPDATES="false")
    subprocess.run([sys.executable, "-W", "error", "-c", code], env=env, check=True, timeout=120)
