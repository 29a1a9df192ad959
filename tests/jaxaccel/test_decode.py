"""Text from prompts: greedy is argmax, noise is keyed, stops stop, programs compile once."""

import jax.numpy as jnp
import numpy as np
import pytest
from decoders import BASE, full_logits, make, tokens
from flax import nnx

from jaxaccel import decode, sampling
from jaxaccel.nn import Decoder
from jaxaccel.sampling import Sampling
from pallas_kernels.attention import attention


@pytest.mark.parametrize("name", ["grouped_windows", "qwen"])
def test_greedy_is_argmax_of_repeated_full_passes(name, monkeypatch):
    monkeypatch.setattr(decode, "CHUNKS", (16, 4))
    size = 2 * 16 + 4 + 3  # two chunks of the first size and two of the second
    decoder, ids = make(name), tokens(1, size)[0].tolist()
    got = list(decode.generate(decoder, ids, max_new_tokens=10, sampling=Sampling(0.0)))
    row = ids + [0] * 10  # causal: what comes later does not matter
    for place in range(size, size + 10):
        row[place] = int(full_logits(decoder, np.array([row]))[0, place - 1].argmax())
    assert got == row[size:]
    assert len(set(got)) > 2


def test_sampling_draws_the_keyed_noise_of_each_position():
    decoder, ids = make("grouped_windows"), tokens(1, 11)[0].tolist()
    draw = lambda **options: list(decode.generate(decoder, ids, max_new_tokens=12, **options))
    options = {"temperature": 0.9, "top_k": 30, "top_p": 0.8}
    got = draw(sampling=Sampling(**options, seed=5))
    assert got == draw(sampling=Sampling(**options, seed=5))
    assert got != draw(sampling=Sampling(**options, seed=6))
    # One pass over the whole text draws the same tokens: the noise depends on position only.
    logits = full_logits(decoder, np.array([ids + got]))[0]
    places = jnp.arange(1, len(logits) + 1)
    drawing = sampling.drawing(Sampling(**options, seed=5))
    noise = sampling.noise(drawing, jnp.zeros_like(places), places, BASE.vocab_size)
    assert sampling.sample(logits, noise, drawing)[10:-1].tolist() == got


def test_stop_and_zero_tokens():
    decoder, ids = make("grouped_query"), [1, 2, 3]
    options = {"max_new_tokens": 8, "sampling": Sampling(seed=3)}
    free = list(decode.generate(decoder, ids, **options))
    stopped = list(decode.generate(decoder, ids, **options, stop=free[4:5]))
    assert stopped == free[: free.index(free[4])]
    assert list(decode.generate(decoder, ids, max_new_tokens=0)) == []


def test_prefill_and_decode_compile_once():
    traces = []

    def counting(q, k, v, *, mask):
        traces.append(q.shape[1])
        return attention(q, k, v, mask=mask)

    decoder = Decoder(BASE, rngs=nnx.Rngs(0), attention=counting)
    for length, new, temperature, top_p in (
        (520, 5, 0.0, 1.0),  # all have the same room
        (600, 9, 0.7, 0.5),
        (560, 2, 1.0, 1.0),
    ):
        ids = tokens(1, length)[0].tolist()
        how = Sampling(temperature, top_p=top_p, seed=length)
        made = decode.generate(decoder, ids, max_new_tokens=new, sampling=how)
        assert len(list(made)) == new
    assert sorted(traces) == [1, *decode.CHUNKS[::-1]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_ids": []}, "prompt is empty"),
        ({"prompt_ids": [3, 37]}, "token 37; the model knows 0 to 36"),
        ({"prompt_ids": [-1]}, "token -1"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"prompt_ids": [[1, 2]]}, r"a prompt is a list of ids.*got \[\[1, 2\]\]"),
        ({"prompt_ids": [1.5]}, "a prompt is a list of ids"),
        ({"stop": (99,)}, "stop holds 99; the model knows 0 to 36"),
        ({"cache_dtype": jnp.int8}, "legal are float32, bfloat16, float16, float8_e4m3fn"),
        ({"rule": "medusa"}, "unknown rule 'medusa'; known: match, rejection"),
        ({"gamma": 1}, r"gamma is 1, and the model has no heads to draft with.*--mtp.depth 1"),
        ({"gamma": -1}, r"gamma is -1, and the model has no heads"),
    ],
)
def test_bad_arguments_are_refused_at_the_call(arguments, message):
    legal = {"prompt_ids": [1], "max_new_tokens": 3}
    with pytest.raises(ValueError, match=message):
        decode.generate(make("grouped_query"), **legal | arguments)


def test_rows_of_a_batch_have_noise_of_their_own_and_their_own_prompts():
    decoder, options = make("qwen"), {"max_new_tokens": 6, "sampling": Sampling(seed=2)}
    prompts = [tokens(1, size, seed=size)[0].tolist() for size in (1, 20, 150, 20)]
    prompts[3] = prompts[1]
    bursts = list(decode.stream(decoder, prompts, **options))
    rows = [[token for burst in bursts for token in burst.tokens[b]] for b in range(4)]
    assert rows[0] == list(decode.generate(decoder, prompts[0], **options))  # row 0's noise
    assert rows[1] != rows[3] and {len(row) for row in rows} == {6}
    places = np.arange(150, 156)
    full = full_logits(decoder, np.array([prompts[2] + rows[2]]))[0, places - 1]
    drawing = sampling.drawing(Sampling(seed=2))
    noise = sampling.noise(drawing, jnp.full(6, 2), jnp.asarray(places), BASE.vocab_size)
    assert sampling.sample(full, noise, drawing).tolist() == rows[2]
    with pytest.raises(ValueError, match="several are a list of such lists; got 1"):
        decode.stream(decoder, [1, 2], max_new_tokens=1)
    with pytest.raises(ValueError, match="there is no prompt"):
        decode.stream(decoder, [], max_new_tokens=1)
