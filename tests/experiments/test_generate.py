"""Text from a run folder, and its figures on held-out text; no training involved."""

import dataclasses
import json
import math
import os
import re
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx

from experiments import cli, data, eval, generate
from experiments import tokenizer as tokenizer_module
from experiments.bench import decode as bench
from experiments.checkpoint import Checkpoints
from experiments.config import TrainConfig
from experiments.data import DataConfig
from experiments.errors import UserError
from experiments.run import load_run, write_config
from jaxaccel import decode
from jaxaccel.nn import Decoder, DecoderConfig, MtpConfig
from jaxaccel.sampling import Sampling

MODEL = DecoderConfig(
    vocab_size=260, layers=2, width=16, heads=2, kv_heads=1, head_size=8, mlp_width=24
)
BYTES = tokenizer_module.load("bytes")


@pytest.fixture(scope="module")
def decoder():
    return Decoder(MODEL, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "numbers.jsonl"
    lines = [json.dumps({"text": f"{i} squared is {i * i}, naïve…\n"}) for i in range(150)]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory, decoder, text_file):
    """A run folder as training leaves it."""
    folder = tmp_path_factory.mktemp("run")
    config = TrainConfig(
        model=MODEL,
        data=DataConfig(source=(str(text_file),), validation_fraction=0.3),
        batch=3,  # the eight devices of the tests do not divide it
        sequence=40,
        precision="float32",
    )
    write_config(folder, config, BYTES)
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(7, {"params": nnx.to_pure_dict(nnx.state(decoder))}, {})
    return folder


def call(program, *args):
    """Runs a program's command line; returns its exit status."""
    kind = {generate: generate.GenerateConfig, eval: eval.EvalConfig}[program]
    with pytest.raises(SystemExit) as exit:
        cli.run(program.main, kind, [str(arg) for arg in args])
    return exit.value.code


def test_text_is_that_of_the_tokens(decoder):
    options = {"max_new_tokens": 30, "sampling": Sampling(1.5, seed=4)}
    ids = generate.prompt_ids(BYTES, "é")
    assert ids == [256, *"é".encode()]
    pieces = list(generate.text_of(BYTES, generate.bursts_of(decoder, BYTES, ids, **options)))
    tokens = list(decode.generate(decoder, ids, stop=(257,), **options))
    assert (
        "".join(pieces) == BYTES.decode(tokens) == generate.complete(decoder, BYTES, "é", **options)
    )
    assert len(pieces) > 5


def burst(*tokens):
    return decode.Burst([list(tokens)], 1, np.zeros(0, int), np.zeros(0, int))


def test_a_character_is_held_back_until_it_is_whole():
    given = "a…\N{SNOWMAN}".encode() + b"\xe2"
    pieces = generate.text_of(BYTES, [burst(*given[:3]), burst(*given[3:])])
    assert list(pieces) == ["a", "…", "\N{SNOWMAN}", "\N{REPLACEMENT CHARACTER}"]


def test_text_comes_while_tokens_are_made():
    made = []

    def slow():
        for token in b"abc":
            made.append(token)
            yield burst(token)

    assert next(generate.text_of(BYTES, slow())) == "a" and made == [ord("a")]


def test_empty_prompt_needs_a_token_to_begin_with():
    assert generate.prompt_ids(BYTES, "") == [256]
    without = dataclasses.replace(BYTES, bos=None)
    assert generate.prompt_ids(without, "x") == [120]
    with pytest.raises(UserError, match=r"prompt is empty.*no token that begins a text"):
        generate.prompt_ids(without, "")


def test_program_streams_prompt_and_text(folder, capsys):
    args = ("--run", folder, "--prompt", "12 sq", "--max-new-tokens", 8, "--seed", 3)
    assert call(generate, *args) == 0
    first = capsys.readouterr()
    assert first.out.startswith("12 sq") and first.out.endswith("\n") and not first.err
    expected = generate.complete(
        load_run(folder).decoder(), BYTES, "12 sq", max_new_tokens=8, sampling=Sampling(0.8, seed=3)
    )
    assert first.out == f"12 sq{expected}\n"


@pytest.fixture(scope="module")
def with_heads(tmp_path_factory, folder):
    """The same run, trained with two heads."""
    path = tmp_path_factory.mktemp("heads")
    config = dataclasses.replace(load_run(folder).config, mtp=MtpConfig(2))
    write_config(path, config, BYTES)
    model = Decoder(MODEL, mtp=config.mtp, rngs=nnx.Rngs(0))
    with Checkpoints(path / "checkpoints") as checkpoints:
        checkpoints.save(1, {"params": nnx.to_pure_dict(nnx.state(model))}, {})
    return path


def test_speculation_prints_the_same_text_and_what_it_brought(with_heads, capsys):
    args = ("--run", with_heads, "--prompt", "12 sq", "--max-new-tokens", 20, "--temperature", 0)
    assert call(generate, *args) == 0
    plain = capsys.readouterr()
    assert call(generate, *args, "--speculative") == 0
    made = capsys.readouterr()
    assert made.out == plain.out and not plain.err
    assert re.fullmatch(
        r"speculative: [\d,.]+ tokens/s, \d\.\d\d tokens a pass, drafts accepted by place: "
        r"\d+%, \d+%\nplain: +[\d,.]+ tokens/s, 1\.00 tokens a pass; speculation is "
        r"\d+\.\d\d times as fast \(measured once, the prompt included\)\n",
        made.err,
    )
    assert call(generate, "--run", with_heads, "--max-new-tokens", 0, "--speculative") == 0
    assert "no draft was verified" in capsys.readouterr().err
    for gamma, message in ((3, "gamma is 3; legal are 0 to 2"), (0, "--gamma is 0; it must be")):
        assert call(generate, *args, "--speculative", "--gamma", gamma) == 2
        assert message in capsys.readouterr().err


def test_the_bench_of_decoding(with_heads, capsys):
    options = {"prompts": 2, "prompt_tokens": 5, "gamma": 1, "json": True}
    bench.main(bench.DecodeConfig(run=with_heads, **options))
    figures = json.loads(capsys.readouterr().out)
    assert figures["identical"] is True and figures["gamma"] == 1 and figures["prompts"] == 2
    assert 1 <= figures["tokens_per_pass"] <= 2 and 0 <= figures["acceptance"][0] <= 1
    for key in ("speedup", "tokens_per_second_plain", "tokens_per_second_speculative"):
        assert figures[key] > 0
    assert figures["plain_over_bare"] > 0
    with pytest.raises(UserError, match=r"--prompt-tokens is 40.*at most 39"):
        bench.main(bench.DecodeConfig(run=with_heads, **options | {"prompt_tokens": 40}))


def test_a_reader_that_has_enough(folder, monkeypatch):
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        os.close(reader)
        assert call(generate, "--run", folder, "--max-new-tokens", 5) == 0


def test_program_says_that_the_context_is_short(folder, capsys):
    assert call(generate, "--run", folder, "--prompt", "x" * 35, "--max-new-tokens", 9) == 0
    assert capsys.readouterr().err == (
        "note: at most 4 new tokens: the model's context is 40, the prompt takes 36\n"
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--prompt", "x" * 40), "the prompt has 41 tokens.* shorten it to 39 or fewer"),
        (("--max-new-tokens", "-1"), "max_new_tokens is -1; it must be at least 0"),
        (("--temperature", "-0.1"), r"temperature is -0.1; it must be 0 \(greedy\) or positive"),
        (("--top-p", "0"), "top_p is 0.0; it must lie above 0"),
        (("--top-p", "1.01"), "top_p is 1.01"),
        (("--seed", "-3"), "seed is -3"),
        (("--top-k", "-2"), "top_k is -2"),
        (("--gamma", "2"), "--gamma is for --speculative: pass both"),
        (("--speculative",), r"was trained without heads that could draft: train with --mtp.depth"),
    ],
)
def test_generate_refuses_in_one_line(folder, capsys, args, message):
    assert call(generate, "--run", folder, *args) == 2
    captured = capsys.readouterr()
    assert re.search(message, captured.err) and captured.err.count("\n") <= 2
    assert captured.out == ""


@pytest.mark.parametrize("program", [generate, eval])
def test_a_folder_that_is_no_run(tmp_path, capsys, program):
    assert call(program, "--run", tmp_path) == 2
    assert re.search("no run folder", capsys.readouterr().err)


def plain_loss(decoder, corpus):
    """Mean loss and token count, document by document in numpy."""
    total, count = 0.0, 0
    for start, stop in zip(corpus.starts, corpus.starts[1:]):
        ids = np.asarray(corpus.tokens[start:stop], np.int32)
        logits = np.asarray(decoder(jnp.asarray(ids[None]))[0] @ decoder.head_VD.T, np.float64)
        z = np.log(np.exp(logits).sum(-1))
        total += (z[:-1] - logits[np.arange(len(ids) - 1), ids[1:]]).sum()
        count += len(ids) - 1
    return total / count, count


@pytest.fixture(scope="module")
def short_documents(tmp_path_factory):
    """Documents that no row border cuts, so that each is a forward pass of its own."""
    path = tmp_path_factory.mktemp("short") / "short.jsonl"
    lines = [json.dumps({"body": f"{i:018}"}) for i in range(9)]  # 20 tokens, two a row
    path.write_text("\n".join(lines))
    return path


def test_eval_equals_a_plain_pass(folder, decoder, short_documents, capsys):
    source = ("--data.source", short_documents, "--data.field", "body")
    assert call(eval, "--run", folder, *source, "--json") == 0
    got = json.loads(capsys.readouterr().out)
    # Another source is read whole.
    config = DataConfig((str(short_documents),), field="body", validation=(str(short_documents),))
    held_out = data.load_corpus(config, BYTES).validation
    assert held_out.documents == 9
    loss, tokens = plain_loss(decoder, held_out.streams[0].shards[0])
    assert got["tokens"] == tokens == 9 * 19
    assert got["loss"] == pytest.approx(loss, rel=1e-5)
    assert got["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    bits = loss * tokens / math.log(2) / held_out.bytes
    assert got["bits_per_byte"] == pytest.approx(bits, rel=1e-5)


def test_eval_of_the_runs_own_text(folder, capsys):
    assert call(eval, "--run", folder, "--mesh", "data=2,fsdp=4") == 0
    out = capsys.readouterr().out
    assert re.fullmatch(
        r"[\d,]+ tokens held out of \S+numbers.jsonl: loss 5\.\d{4} nats per token, "
        r"\d+\.\d{4} bits per byte, perplexity \d+\.\d{3}\n",
        out,
    )


def test_a_file_is_no_run_folder(text_file):
    with pytest.raises(UserError, match="is no run folder"):
        load_run(text_file)


def test_loss_weighs_tokens_not_batches(folder):
    """The figure does not depend on how the split is cut into batches."""
    run = load_run(folder)
    corpus = data.load_corpus(run.config.data, BYTES)
    figures = []
    for batch in (3, 16):
        resized = dataclasses.replace(run, config=dataclasses.replace(run.config, batch=batch))
        figures.append(eval.evaluate(resized, corpus))
    assert (
        figures[0].tokens
        == figures[1].tokens
        == corpus.validation.tokens - corpus.validation.documents
    )
    assert figures[0].loss == pytest.approx(figures[1].loss, rel=1e-6)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--data.source", "/nowhere"), "/nowhere does not exist"),
        (("--data.field", "body"), "no field 'body'"),
        (("--mesh", "data=3"), "has 3 places, but there are 8 devices"),
    ],
)
def test_eval_refuses_in_one_line(folder, capsys, args, message):
    assert call(eval, "--run", folder, *args) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_tokenizer_that_was_exchanged(tmp_path, decoder, capsys):
    path = tmp_path / "tokenizer.json"
    documents = [b"abab abba", b"cdcd"]
    path.write_text(tokenizer_module.train_bpe(iter(documents), 260).to_str())
    config = TrainConfig(model=MODEL, data=DataConfig(tokenizer=str(path)))
    write_config(tmp_path / "run", config, tokenizer_module.load(str(path)))
    other = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    (tmp_path / "run" / "tokenizer.json").write_text(other.to_str())
    for program in (generate, eval):
        assert call(program, "--run", tmp_path / "run") == 2
        assert "is not the one that" in capsys.readouterr().err
