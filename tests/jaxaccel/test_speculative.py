"""Speculation changes no token; its passes are those of a simulation by full passes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import BASE, full_logits, make

from jaxaccel import decode, sampling, speculate
from jaxaccel.cache import logits
from jaxaccel.nn import MtpConfig
from jaxaccel.sampling import Sampling

ONE, THREE, PARALLEL = MtpConfig(1), MtpConfig(3), MtpConfig(3, "parallel")


def run(decoder, prompts, **options):
    """Tokens of each row, passes, drafts verified and accepted by place."""
    rows, figures = [[] for _ in prompts], []
    for burst in decode.stream(decoder, prompts, **options):
        for row, new in zip(rows, burst.tokens):
            row += new
        figures.append((burst.passes, burst.drafted, burst.accepted))
    passes, drafted, accepted = (sum(part) for part in zip(*figures))
    return rows, passes, np.asarray(drafted).tolist(), np.asarray(accepted).tolist()


def compare(decoder, rng, batches, gammas):
    """Plain against speculative over random prompts; texts that stopped, and drafts accepted."""
    stopped = accepted = 0
    for i, batch in enumerate(batches):
        prompts = [rng.integers(0, BASE.vocab_size, rng.integers(1, 201)) for _ in range(batch)]
        options = {
            "max_new_tokens": 24,
            "sampling": Sampling(
                (0.0, 0.3, 0.7, 1.0, 1.5)[i % 5], top_p=(1.0, 0.9, 0.6)[i % 3], seed=i
            ),
            "stop": rng.integers(0, BASE.vocab_size, 2).tolist(),
        }
        plain, *_ = run(decoder, prompts, **options)
        rows, _, _, kept = run(decoder, prompts, gamma=gammas[i % len(gammas)], **options)
        assert rows == plain, (i, options)
        accepted += sum(kept)
        stopped += sum(len(row) < 24 for row in plain)
    return stopped, accepted


@pytest.mark.parametrize(
    ("name", "mtp", "batches", "gammas"),
    [
        ("grouped_windows", ONE, [8] * 13, (1, 4)),
        ("window", THREE, [5] * 12, (2, 3)),
        ("qwen", PARALLEL, [1] * 36, (3,)),
    ],
    ids=["one", "three", "parallel"],
)
def test_two_hundred_prompts_are_continued_as_without_speculation(name, mtp, batches, gammas):
    """Lengths 1 to 200, greedy and sampled, stops amid drafts, sliding windows; float32."""
    decoder = make(name, mtp)
    stopped, accepted = compare(decoder, np.random.default_rng(7), batches, gammas)
    assert stopped > 5 and accepted > 20


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [1, 2, 3, 4])
@pytest.mark.parametrize("batch", range(1, 9))
def test_every_batch_size_with_every_gamma(batch, gamma):
    batches = [batch] * -(-200 // (32 * batch) + 1)
    for name in ("grouped_windows", "window"):
        compare(make(name, ONE), np.random.default_rng(10 * batch + gamma), batches, (gamma,))


def simulated(decoder, ids, new, gamma, drawing):
    """Speculation of one row by full passes alone: tokens, passes, drafts accepted by place."""
    ids, start, drafts = list(ids), len(ids), []
    passes, accepted = 0, np.zeros(gamma, int)
    chained = decoder.heads.mtp.kind == "sequential" and decoder.heads.mtp.depth == 1
    padded = lambda row: jnp.asarray([row + [0] * (start + new + gamma - len(row))])

    def drawn(logits_TV, i):  # the token after position i
        row = jnp.zeros(1, jnp.int32)
        noise = sampling.noise(drawing, row, row + i + 1, BASE.vocab_size)
        return int(sampling.sample(logits_TV[i][None], noise, drawing)[0])

    while len(ids) < start + new:
        passes += 1
        found = np.asarray(full_logits(decoder, padded(ids + drafts))[0])
        for count in range(len(drafts) + 1):
            ids.append(drawn(found, len(ids) - 1))
            if drafts[count : count + 1] != ids[-1:] or len(ids) == start + new:
                break
        accepted[:count] += 1
        last, drafts = len(ids) - 2, []  # the last position whose hidden state is known
        for k in range(gamma):
            row = padded(ids + drafts)
            found = chain(decoder, row, last, k + 1) if chained else ahead(decoder, row)[k + 1]
            found = np.asarray(found)
            # Head k at one position, or the one head a position further each time.
            at = last + k if chained else last
            drafts.append(drawn({len(ids) + k - 1: found[at]}, len(ids) + k - 1))
    return ids[start:], passes, accepted.tolist()


@jax.jit
def ahead(decoder, tokens_1T):
    """Logits of all predictions of a row."""
    return logits(decoder, decoder.ahead(tokens_1T))[:, 0]


@functools.partial(jax.jit, static_argnums=3)
def chain(decoder, tokens_1T, last, repeats):
    """Logits of the one head; past `last` its states stand in the decoder's place, mixed."""
    hidden, embedded = decoder(tokens_1T), decoder.embed(tokens_1T)
    rope = decoder.rope(jnp.arange(tokens_1T.shape[1])[None])
    for step in range(repeats):
        go = lambda layer, x: layer(x, rope, None)
        out = decoder.heads(hidden, embedded, go, jax.lax.scan)[0]
        mixed = (1 - speculate.OWN) * hidden + speculate.OWN * out
        hidden = hidden.at[:, last + step + 1].set(mixed[:, last + step])
    return logits(decoder, out)[0]


@pytest.mark.parametrize(
    ("mtp", "gamma"), [(ONE, 1), (ONE, 3), (THREE, 2), (THREE, 3), (PARALLEL, 2)], ids=str
)
def test_drafts_are_those_of_the_trained_heads(mtp, gamma):
    """What the cache, the window and the rollback do to heads is what full passes do."""
    decoder, how = make("grouped_windows", mtp), Sampling(0.6, seed=3)
    ids = np.random.default_rng(1).integers(0, BASE.vocab_size, 9).tolist()
    new = 24
    tokens, passes, accepted = simulated(decoder, ids, new, gamma, sampling.drawing(how))
    rows, made, drafted, kept = run(decoder, [ids], max_new_tokens=new, sampling=how, gamma=gamma)
    assert rows[0] == tokens
    assert (made, kept) == (passes, accepted)
    assert drafted == [passes - 1] * gamma and sum(kept) > 1


def test_the_rejection_rule_draws_from_the_plain_distribution():
    """Rows of one prompt: the first two tokens are distributed as plain decoding's."""
    decoder, rows = make("one_kv_head_tied", ONE), 1500
    options = {"max_new_tokens": 2, "sampling": Sampling(0.5, top_k=3, seed=1)}
    counts = []
    for more in ({}, {"gamma": 1, "rule": "rejection"}):
        made, *_ = run(decoder, [[5, 3]] * rows, **options, **more)
        counts.append(np.zeros((BASE.vocab_size,) * 2))
        np.add.at(counts[-1], tuple(np.transpose(made)), 1)
    first, second = counts
    assert (first > 0).sum() > 4
    spread = np.sqrt(first + second + 1)
    assert np.abs(first - second).max() < 4.5 * spread.max()
    assert (np.abs(first - second) / spread).max() < 4.5
    assert (first != second).any()  # not the same noise


def test_bfloat16_differs_only_where_two_tokens_tie():
    decoder = make("grouped_query", ONE, jnp.bfloat16)
    rng, differences = np.random.default_rng(0), 0
    for seed in range(6):
        prompts = [rng.integers(0, BASE.vocab_size, 20) for _ in range(8)]
        how = Sampling(0.8 * (seed % 2), seed=seed)
        options = {"max_new_tokens": 24, "sampling": how}
        plain, *_ = run(decoder, prompts, **options)
        rows, *_ = run(decoder, prompts, gamma=2, **options)
        for b, (one, other) in enumerate(zip(plain, rows)):
            if one == other:
                continue
            differences += 1
            at = next(i for i, pair in enumerate(zip(one, other)) if pair[0] != pair[1])
            text = np.concatenate([prompts[b], one[:at]]).astype(np.int32)
            found = np.asarray(full_logits(decoder, text[None])[0, -1])
            if how.temperature:
                row, place = jnp.full(1, b), jnp.full(1, len(text))
                keys = sampling.noise_keys(jax.random.key(seed), row, place)
                noise = sampling.gumbel(keys, BASE.vocab_size)[0]
                found = found / how.temperature + np.asarray(noise)
            margin = abs(found[one[at]] - found[other[at]])
            # Logits of hidden states in bfloat16: a few units in the last place of the largest.
            assert margin < 8 * 2**-8 * np.abs(found).max(), (margin, seed, b)
    print(f"{differences} of 48 texts differ")


def test_an_fp8_cache_is_as_lossless():
    decoder = make("qwen", ONE)
    options = {"max_new_tokens": 30, "sampling": Sampling(0.0), "cache_dtype": jnp.float8_e4m3fn}
    prompts = [[1, 2, 3], list(range(30))]
    plain, *_ = run(decoder, prompts, **options)
    assert run(decoder, prompts, gamma=2, **options)[0] == plain


@pytest.mark.parametrize(
    ("mtp", "gamma", "legal"),
    [(ONE, 17, "0 to 16"), (THREE, 4, "0 to 3: the model has 3 sequential heads"),
     (PARALLEL, 4, "0 to 3: the model has 3 parallel heads"), (ONE, -1, "0 to 16")],
)  # fmt: skip
def test_gamma_beyond_the_heads_is_refused(mtp, gamma, legal):
    with pytest.raises(ValueError, match=rf"gamma is {gamma}; legal are {legal}"):
        decode.generate(make("qwen", mtp), [1], max_new_tokens=3, gamma=gamma)
