"""The cache equals the full pass, sampling equals its definition, programs compile once."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel import decode
from jaxaccel.nn import Decoder, DecoderConfig
from pallas_kernels.attention import attention

BASE = DecoderConfig(
    vocab_size=37, layers=4, width=24, heads=4, kv_heads=2, head_size=10, mlp_width=40
)
CONFIGS = {
    "grouped_query": BASE,
    "one_kv_head_tied": dataclasses.replace(BASE, kv_heads=1, tied_head=True),
    "window": dataclasses.replace(BASE, windows=(5,)),
    "window_of_one": dataclasses.replace(BASE, windows=(1,)),
    "grouped_windows": dataclasses.replace(BASE, windows=(3, None)),
    "qwen": dataclasses.replace(BASE, qk_norm=True, qkv_bias=True, windows=(None, 7)),
}


@functools.cache
def make(name):
    """A decoder whose every parameter matters: fresh scales are one, fresh biases zero."""
    graphdef, state = nnx.split(Decoder(CONFIGS[name], rngs=nnx.Rngs(0)))
    params = nnx.to_pure_dict(state)
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    leaves = [x + 0.2 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves)]
    return nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))


def tokens(batch, length, seed=0):
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, BASE.vocab_size)


@jax.jit
def full_logits(decoder, tokens_BT):
    return jax.vmap(lambda h: decode.logits(decoder, h), 1, 1)(decoder(tokens_BT))


@jax.jit
def cached_logits(decoder, tokens_BT, cache, counts_B=None):
    hidden_BTD, cache = decode.forward(decoder, tokens_BT, cache, counts_B)
    return jax.vmap(lambda h: decode.logits(decoder, h), 1, 1)(hidden_BTD), cache


@pytest.mark.parametrize(
    ("name", "blocks"),
    [(name, (9, 1, 1, 9)) for name in CONFIGS]
    + [("grouped_windows", (19,)), ("grouped_windows", (1,) * 12)],
    ids=str,
)
def test_logits_equal_full_pass(name, blocks):
    decoder = make(name)
    tokens_BT = tokens(3, sum(blocks))
    expected = full_logits(decoder, tokens_BT)
    cache = decode.init_cache(decoder.config, 3, sum(blocks))  # no room to spare
    got, start = [], 0
    for block in blocks:
        logits, cache = cached_logits(decoder, tokens_BT[:, start : start + block], cache)
        got.append(logits)
        start += block
    assert float(jnp.std(expected)) > 0.1
    chex.assert_trees_all_close(np.concatenate(got, 1), np.asarray(expected), atol=2e-5)
    assert cache.lengths.tolist() == [start] * 3


def test_rows_of_unlike_lengths_padding_and_rollback():
    decoder = make("grouped_windows")
    tokens_BT = np.asarray(tokens(3, 16))
    expected = np.asarray(full_logits(decoder, tokens_BT))
    cache = decode.init_cache(decoder.config, 3, 16)
    # Rows advance by 4, 0 and 8; what follows in each row is padding of other tokens.
    counts = np.array([4, 0, 8], np.int32)
    real = np.arange(8)[None] < counts[:, None]
    padded = np.where(real, tokens_BT[:, :8], (tokens_BT[:, :8] + 1) % BASE.vocab_size)
    logits, cache = cached_logits(decoder, padded, cache, counts)
    assert cache.lengths.tolist() == [4, 0, 8]
    chex.assert_trees_all_close(np.asarray(logits)[real], expected[:, :8][real], atol=2e-5)
    # Drafts that are thrown away leave no trace, though the last do not fit row 2's room.
    _, drafted = cached_logits(decoder, np.asarray(tokens(3, 12, seed=9)), cache)
    cache = dataclasses.replace(drafted, lengths=jnp.array([3, 0, 6]))
    take = lambda x: np.stack([x[0, 3:11], x[1, :8], x[2, 6:14]])
    logits, cache = cached_logits(decoder, take(tokens_BT), cache, np.full(3, 8, np.int32))
    assert cache.lengths.tolist() == [11, 8, 14]
    chex.assert_trees_all_close(np.asarray(logits), take(expected), atol=2e-5)


def test_tokens_past_the_room_overwrite_nothing():
    decoder, tokens_BT = make("grouped_windows"), tokens(3, 19)
    cache = decode.init_cache(decoder.config, 3, 16)
    for start in (0, 9, 10):  # the last block has 9 tokens and room for 6
        block = tokens_BT[:, start : start + (1 if start == 9 else 9)]
        logits, cache = cached_logits(decoder, block, cache)
    expected = full_logits(decoder, tokens_BT)[:, 10:16]
    chex.assert_trees_all_close(np.asarray(logits[:, :6]), np.asarray(expected), atol=2e-5)


def test_bfloat16_cache_stays_bfloat16():
    decoder, tokens_BT = make("grouped_query"), tokens(3, 19)
    cache = decode.init_cache(BASE, 3, 19, jnp.bfloat16)
    logits, after = cached_logits(decoder, tokens_BT, cache)
    chex.assert_trees_all_equal_shapes_and_dtypes(cache, after)
    assert logits.dtype == jnp.float32
    error = jnp.abs(logits - full_logits(decoder, tokens_BT)).max()
    assert 1e-5 < error < 0.1  # rounded, but no more than that


@pytest.mark.parametrize("name", ["grouped_windows", "qwen"])
def test_greedy_is_argmax_of_repeated_full_passes(name, monkeypatch):
    monkeypatch.setattr(decode, "PREFILL", 5)  # a prompt of 13 takes three chunks
    decoder, ids = make(name), tokens(1, 13)[0].tolist()
    got = list(decode.generate(decoder, ids, max_new_tokens=10, temperature=0.0))
    row = ids + [0] * 10  # causal: what comes later does not matter
    for place in range(13, 23):
        row[place] = int(full_logits(decoder, np.array([row]))[0, place - 1].argmax())
    assert got == row[13:]
    assert len(set(got)) > 2


def test_sampling_draws_the_keyed_noise_of_each_position():
    decoder, ids = make("grouped_windows"), tokens(1, 11)[0].tolist()
    draw = lambda **options: list(decode.generate(decoder, ids, max_new_tokens=12, **options))
    options = {"temperature": 0.9, "top_p": 0.8, "seed": 5}
    got = draw(**options)
    assert got == draw(**options)
    assert got != draw(**options | {"seed": 6})
    # One pass over the whole text draws the same tokens: the noise depends on position only.
    logits = full_logits(decoder, np.array([ids + got]))[0]
    places = jnp.arange(1, len(logits) + 1)
    keys = decode.noise_keys(jax.random.key(5), jnp.zeros_like(places), places)
    assert decode.sample(logits, keys, 0.9, 0.8)[10:-1].tolist() == got


def test_stop_and_zero_tokens():
    decoder, ids = make("grouped_query"), [1, 2, 3]
    free = list(decode.generate(decoder, ids, max_new_tokens=8, seed=3))
    stopped = list(decode.generate(decoder, ids, max_new_tokens=8, seed=3, stop=free[4:5]))
    assert stopped == free[: free.index(free[4])]
    assert list(decode.generate(decoder, ids, max_new_tokens=0)) == []


def test_prefill_and_decode_compile_once():
    traces = []

    def counting(q, k, v, *, mask):
        traces.append(q.shape[1])
        return attention(q, k, v, mask=mask)

    decoder = Decoder(BASE, rngs=nnx.Rngs(0), attention=counting)
    for length, new, temperature, top_p in ((1, 5, 0.0, 1.0), (60, 9, 0.7, 0.5), (9, 2, 1.0, 1.0)):
        ids = tokens(1, length)[0].tolist()
        options = {"temperature": temperature, "top_p": top_p, "seed": length}
        assert len(list(decode.generate(decoder, ids, max_new_tokens=new, **options))) == new
    assert sorted(traces) == [1, decode.PREFILL]


def numpy_top_p(logits, top_p):
    p = np.exp(logits.astype(np.float64))
    p /= p.sum()
    kept, total = [], 0.0
    for token in np.argsort(-p, kind="stable"):
        if total >= top_p and p[token] < p[kept[-1]]:
            break
        kept.append(token)
        total += p[token]
    return set(kept)


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.77, 0.9999])
def test_top_p_equals_numpy(top_p):
    logits = np.array(jax.random.normal(jax.random.key(2), (20, 33))) * 3
    logits[1] = 0.0  # all equally likely
    logits[2, :4] = logits[2].max() + 1  # a tie at the top
    kept = np.asarray(decode.keep_top_p(jnp.asarray(logits), top_p)) > -np.inf
    for row, expected in zip(kept, logits):
        assert set(np.flatnonzero(row)) == numpy_top_p(expected, top_p)


def test_draws_follow_the_distribution():
    logits = jnp.array([0.0, 2.0, 1.0, -1.0, 1.5])
    rows = 20_000
    keys = decode.noise_keys(jax.random.key(0), jnp.arange(rows), jnp.full(rows, 7))
    drawn = decode.sample(jnp.broadcast_to(logits, (rows, 5)), keys, 0.7, 0.9)
    expected = np.exp(np.asarray(logits, np.float64) / 0.7)
    kept = numpy_top_p(np.asarray(logits) / 0.7, 0.9)
    expected = np.array([x if i in kept else 0.0 for i, x in enumerate(expected)])
    expected /= expected.sum()
    assert 1 < len(kept) < 5
    frequency = np.bincount(np.asarray(drawn), minlength=5) / rows
    np.testing.assert_allclose(frequency, expected, atol=4 * np.sqrt(0.25 / rows))
    assert (frequency[expected == 0] == 0).all()


def test_extreme_temperatures_are_finite():
    logits = jnp.array([[1.0, 3.0, 2.0]] * 50)
    keys = decode.noise_keys(jax.random.key(0), jnp.arange(50), jnp.zeros(50, jnp.int32))
    assert set(decode.sample(logits, keys, 1e-45, 0.5).tolist()) == {1}
    assert set(decode.sample(logits, keys, 1e30, 1.0).tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_ids": []}, "prompt is empty"),
        ({"prompt_ids": [3, 37]}, "token 37; the model knows 0 to 36"),
        ({"prompt_ids": [-1]}, "token -1"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"temperature": -0.5}, r"temperature is -0.5"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, r"top_p is 0.0"),
        ({"top_p": 1.5}, r"top_p is 1.5"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_bad_arguments_are_refused_at_the_call(arguments, message):
    legal = {"prompt_ids": [1], "max_new_tokens": 3}
    with pytest.raises(ValueError, match=message):
        decode.generate(make("grouped_query"), **legal | arguments)
