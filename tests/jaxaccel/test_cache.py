"""The key/value cache: its logits equal the full pass, rows roll back, FP8 is near."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import BASE, CONFIGS, full_logits, make, tokens

from jaxaccel.cache import forward, init_cache, logits


@jax.jit
def cached_logits(decoder, tokens_BT, cache, counts_B=None):
    hidden_BTD, cache = forward(decoder, tokens_BT, cache, counts_B)
    return logits(decoder, hidden_BTD), cache


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
    cache = init_cache(decoder.config, 3, sum(blocks))  # no room to spare
    got, start = [], 0
    for block in blocks:
        found, cache = cached_logits(decoder, tokens_BT[:, start : start + block], cache)
        got.append(found)
        start += block
    assert float(jnp.std(expected)) > 0.1
    chex.assert_trees_all_close(np.concatenate(got, 1), np.asarray(expected), atol=2e-5)
    assert cache.lengths.tolist() == [start] * 3


def test_rows_of_unlike_lengths_padding_and_rollback():
    decoder = make("grouped_windows")
    tokens_BT = np.asarray(tokens(3, 16))
    expected = np.asarray(full_logits(decoder, tokens_BT))
    cache = init_cache(decoder.config, 3, 16)
    # Rows advance by 4, 0 and 8; what follows in each row is padding of other tokens.
    counts = np.array([4, 0, 8], np.int32)
    real = np.arange(8)[None] < counts[:, None]
    padded = np.where(real, tokens_BT[:, :8], (tokens_BT[:, :8] + 1) % BASE.vocab_size)
    found, cache = cached_logits(decoder, padded, cache, counts)
    assert cache.lengths.tolist() == [4, 0, 8]
    chex.assert_trees_all_close(np.asarray(found)[real], expected[:, :8][real], atol=2e-5)
    # Drafts that are thrown away leave no trace, though the last do not fit row 2's room.
    _, drafted = cached_logits(decoder, np.asarray(tokens(3, 12, seed=9)), cache)
    cache = dataclasses.replace(drafted, lengths=jnp.array([3, 0, 6]))
    take = lambda x: np.stack([x[0, 3:11], x[1, :8], x[2, 6:14]])
    found, cache = cached_logits(decoder, take(tokens_BT), cache, np.full(3, 8, np.int32))
    assert cache.lengths.tolist() == [11, 8, 14]
    chex.assert_trees_all_close(np.asarray(found), take(expected), atol=2e-5)


def test_tokens_past_the_room_overwrite_nothing():
    decoder, tokens_BT = make("grouped_windows"), tokens(3, 19)
    cache = init_cache(decoder.config, 3, 16)
    for start in (0, 9, 10):  # the last block has 9 tokens and room for 6
        block = tokens_BT[:, start : start + (1 if start == 9 else 9)]
        found, cache = cached_logits(decoder, block, cache)
    expected = full_logits(decoder, tokens_BT)[:, 10:16]
    chex.assert_trees_all_close(np.asarray(found[:, :6]), np.asarray(expected), atol=2e-5)


@pytest.mark.parametrize(
    ("dtype", "bytes_per_element", "bound"),
    [(jnp.bfloat16, 2, 0.1), (jnp.float8_e4m3fn, 1 + 4 / BASE.head_size, 0.6)],
    ids=["bfloat16", "fp8"],
)
def test_a_narrow_cache_stays_narrow_and_rounds_no_more_than_that(dtype, bytes_per_element, bound):
    decoder, tokens_BT = make("grouped_query"), tokens(3, 19)
    cache = init_cache(BASE, 3, 19, dtype)
    held = sum(x.nbytes for x in jax.tree.leaves((cache.keys, cache.values)))
    assert held == 2 * 3 * 19 * BASE.layers * BASE.kv_heads * BASE.head_size * bytes_per_element
    found, after = cached_logits(decoder, tokens_BT, cache)
    chex.assert_trees_all_equal_shapes_and_dtypes(cache, after)
    assert found.dtype == jnp.float32
    error = jnp.abs(found - full_logits(decoder, tokens_BT)).max()
    assert 1e-5 < error < bound
