"""Round trips, special tokens, streaming, training, bad input."""

import json
import subprocess
import sys

import numpy as np
import pytest
import tokenizers

from experiments import tokenizer
from experiments.data import DataConfig, load_corpus, train_iterator, validation_batches
from experiments.errors import UserError

TEXT = "def naïve(x):\n    return '€ 𝄞 日本' * x  # <|begin_of_text|>\n"


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    model = tokenizer.train_bpe(iter([TEXT.encode() * 3, b"return x " * 50]), 300)
    model.save(str(path))
    return path


def variant(bpe, **changes):
    """The file with top-level entries changed."""
    path = bpe.parent / f"{'-'.join(changes)}.json"
    path.write_text(json.dumps({**json.loads(bpe.read_text()), **changes}))
    return tokenizer.load(str(path))


def whole_words(*special):
    """A tokenizer with such special tokens, in memory."""
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.add_special_tokens(list(special))
    return model


def test_bytes():
    t = tokenizer.load("bytes")
    assert (t.vocab_size, t.bos, t.eos, t.name) == (258, 256, 257, "bytes")
    every = bytes(range(256))
    ids = t.encode(every)
    assert ids.dtype == np.int32 and ids.tolist() == list(range(256))
    assert t.decode([256, *TEXT.encode(), 257]) == TEXT
    assert t.decode(np.array([255, 65])) == "\N{REPLACEMENT CHARACTER}A"
    assert t.encode(b"").shape == (0,) and t.decode([]) == ""


def test_bpe_round_trips_and_adds_nothing(bpe):
    t = tokenizer.load(str(bpe))
    assert t.vocab_size == 300 and (t.bos, t.eos) == (0, 1)
    for text in (TEXT, "", " x", "\x00\u2028 \U0001f600"):
        ids = t.encode(text.encode())
        assert ids.dtype == np.int32 and t.decode(ids) == text
        # A special token's name in a text is text.
        assert not np.isin(ids, [t.bos, t.eos]).any()
    assert len(t.encode(TEXT.encode())) < len(TEXT.encode()) / 1.3
    assert t.decode([t.bos, *t.encode(b"x"), t.eos]) == "x"
    batch = t.encode_batch([b"x", TEXT.encode()], ["a", "b"])
    assert [t.decode(ids) for ids in batch] == ["x", TEXT]


@pytest.mark.parametrize("special", [False, True])
def test_offsets_are_bytes_of_whole_characters(bpe, special):
    """An emoji of four ids is one place; a folder is as good as its file."""
    text = "e\u0301 €\U0001f600<|end_of_text|> naïve"
    for t in (tokenizer.load("bytes"), tokenizer.load(str(bpe.parent))):
        (ids, offsets), (none, empty) = t.encode_offsets(
            [text.encode(), b""], ["a", "b"], special=special
        )
        assert none.shape == (0,) and empty.shape == (0, 2)
        assert ids.dtype == np.int32 and offsets.dtype == np.int64 and len(ids) == len(offsets)
        found = special and t.name != "bytes"
        assert (t.eos in ids) == found
        # `encode` takes it as text all the same.
        assert (ids.tolist() == t.encode(text.encode()).tolist()) != found
        assert offsets[0, 0] == 0 and offsets[-1, 1] == len(text.encode())
        assert (offsets[1:, 0] <= offsets[:-1, 1]).all() and (np.diff(offsets, axis=0) >= 0).all()
        if t.name != "bytes":  # where characters are cut, all of their ids have all of them
            pieces = [text.encode()[lo:hi].decode() for lo, hi in offsets]
            assert pieces.count("\U0001f600") == 4 and "\u0301" in pieces
            assert ("<|end_of_text|>" in pieces) == special
    with pytest.raises(UserError, match="b: byte 0 is not UTF-8"):
        tokenizer.load(str(bpe)).encode_offsets([b"", b"\xff"], ["a", "b"])


@pytest.mark.parametrize("text", [TEXT, "a", "", "é", "日本語", "\ufffd ok", "tail €"])
def test_streaming_equals_decoding_at_once(bpe, text):
    for t in (tokenizer.load("bytes"), tokenizer.load(str(bpe))):
        ids = [t.bos, *t.encode(text.encode()).tolist(), t.eos]
        decoder = t.stream()
        pieces = [decoder.push(i) for i in ids]
        assert "".join(pieces) + decoder.flush() == t.decode(ids) == text
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces)
            assert decoder.flush() == ""


def test_streaming_shows_a_character_when_it_is_whole():
    decoder = tokenizer.load("bytes").stream()
    assert [decoder.push(i) for i in "a€b".encode()] == ["a", "", "", "€", "b"]
    # Cut short: shown as broken, but not lost.
    ids = [*"x€".encode()[:-1]]
    assert [decoder.push(i) for i in ids] == ["x", "", ""]
    assert decoder.flush() == "\N{REPLACEMENT CHARACTER}"
    assert decoder.push(65) == "A"
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 258, 3000)
    t = tokenizer.load("bytes")
    decoder = t.stream()
    assert "".join([decoder.push(int(i)) for i in noise]) + decoder.flush() == t.decode(noise)


@pytest.mark.parametrize(
    ("special", "bos", "eos"),
    [
        (("<s>", "</s>"), 2, 3),
        (("<|endoftext|>",), 2, 2),
        (("<|end_of_text|>", "<|begin_of_text|>"), 3, 2),
        (("<pad>",), None, None),
        (("<eos>", "<pad>"), None, 2),
    ],
)
def test_special_tokens_by_their_usual_names(tmp_path, special, bos, eos):
    whole_words(*special).save(str(tmp_path / "t.json"))
    t = tokenizer.load(str(tmp_path / "t.json"))
    assert (t.bos, t.eos) == (bos, eos)
    assert t.vocab_size == 2 + len(special)


def test_special_tokens_by_the_post_processor(tmp_path):
    model = whole_words("<s>", "[GO]", "[STOP]")
    template = tokenizers.processors.TemplateProcessing(
        single="[GO] $A [STOP]", special_tokens=[("[GO]", 3), ("[STOP]", 4)]
    )
    for i, processor in enumerate(
        [template, tokenizers.processors.Sequence([tokenizers.processors.ByteLevel(), template])]
    ):
        model.post_processor = processor
        model.save(str(tmp_path / f"{i}.json"))
        t = tokenizer.load(str(tmp_path / f"{i}.json"))
        assert (t.bos, t.eos) == (3, 4)
        assert t.encode(b"a b").tolist() == [0, 1]


def test_truncation_and_padding_in_the_file_do_not_touch_the_corpus(tmp_path):
    model = whole_words("<pad>")
    model.enable_truncation(3)
    model.enable_padding(length=8)
    model.save(str(tmp_path / "t.json"))
    assert tokenizer.load(str(tmp_path / "t.json")).encode(b"a b a b a").tolist() == [0, 1, 0, 1, 0]


def test_fingerprint_follows_the_mapping_and_not_the_file(bpe):
    t = tokenizer.load(str(bpe))
    prints = {t.fingerprint, tokenizer.load("bytes").fingerprint}
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    assert variant(bpe, truncation=cut).fingerprint == t.fingerprint
    prints.add(variant(bpe, normalizer={"type": "Lowercase"}).fingerprint)
    assert len(prints) == 3


def test_a_document_of_no_tokens_is_left_out(tmp_path):
    whole_words().save(str(tmp_path / "t.json"))  # neither bos nor eos; spaces are no token
    (tmp_path / "a.jsonl").write_text(
        '{"text": "a b"}\n{"text": "  "}\n{"text": "b"}\n{"text": " "}'
    )
    (tmp_path / "v.txt").write_text("a")
    config = DataConfig(source=(f"{tmp_path}/a.jsonl",), validation=(f"{tmp_path}/v.txt",))
    corpus = load_corpus(config, tokenizer.load(str(tmp_path / "t.json")))
    assert (corpus.train.tokens, corpus.train.documents, corpus.train.bytes) == (3, 2, 4)
    batch = next(train_iterator(corpus, batch=1, sequence=3, seed=0))
    assert batch["segments"].tolist() == [[1, 1, 2]] and batch["labels"].tolist() == [[1, -1, -1]]
    assert corpus.describe(batch["documents"][0, 2:]) == [f"{tmp_path}/a.jsonl:3"]


def test_a_corpus_under_bpe(tmp_path, bpe):
    t = tokenizer.load(str(bpe))
    (tmp_path / "a.txt").write_text("train", encoding="utf-8")
    (tmp_path / "v.txt").write_text(TEXT, encoding="utf-8")
    config = DataConfig(source=(str(tmp_path / "a.txt"),), validation=(str(tmp_path / "v.txt"),))
    corpus = load_corpus(config, t)
    ids = [t.bos, *t.encode(TEXT.encode()), t.eos]
    (batch,) = validation_batches(corpus, batch=1, sequence=len(ids))
    assert batch["tokens"][0].tolist() == ids
    assert corpus.bytes_per_token == len(TEXT.encode()) / (len(ids) - 1)
    (tmp_path / "a.txt").write_bytes(b"abc\xff")
    with pytest.raises(
        UserError, match=r"a.txt: byte 3 is not UTF-8, which .*tokenizer.json needs"
    ):
        load_corpus(config, t)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot read tokenizer .*t.json: .*give 'bytes' or a tokenizer.json"),
        (b"{}", r"t.json is no tokenizer.json: "),
        (b"\xff\xfe", r"cannot read tokenizer .*t.json"),
    ],
)
def test_bad_tokenizer(tmp_path, content, message):
    if content is not None:
        (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        tokenizer.load(str(tmp_path / "t.json"))
    assert "\n" not in str(caught.value)


def run(*arguments):
    command = [sys.executable, "-m", "experiments.tokenizer", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_command_trains_a_tokenizer(tmp_path):
    lines = [json.dumps({"body": f"{TEXT} {i}"}) for i in range(50)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    out = tmp_path / "out.json"
    options = ["--data.source", tmp_path / "a.jsonl", "--vocab-size", 290, "--out", out]
    done = run(*options, "--data.field", "body")
    assert done.returncode == 0, done.stderr
    assert f"{out}: 290 ids from " in done.stdout
    assert tokenizer.load(str(out)).vocab_size == 290
    refused = run(*options)
    assert refused.returncode == 2 and refused.stdout == ""
    assert refused.stderr.count("\n") == 1 and "a.jsonl:1: no field 'text'" in refused.stderr
    unknown = run("--out", out, "--vocab", 5)
    assert unknown.returncode == 2 and unknown.stderr.count("\n") == 1
    assert unknown.stderr.startswith("python -m experiments.tokenizer: ")
    assert "--vocab-size" in unknown.stderr


def test_training_is_refused(tmp_path):
    with pytest.raises(UserError, match="vocab-size 257 is below 258"):
        tokenizer.train_bpe(iter([b"text"]), 257)
    (tmp_path / "a.txt").write_bytes(b"\xff" * 99)
    config = DataConfig(source=(str(tmp_path / "a.txt"),))
    with pytest.raises(UserError, match=r"a.txt: byte 0 is not UTF-8"):
        tokenizer.main(tokenizer.TrainConfig(out=tmp_path / "t.json", data=config))
    (tmp_path / "a.bin").write_bytes(b"abcd")
    config = DataConfig(source=(str(tmp_path / "a.bin"),))
    with pytest.raises(UserError, match=r"a.bin holds token ids: a tokenizer is trained on text"):
        tokenizer.main(tokenizer.TrainConfig(out=tmp_path / "t.json", data=config))
    (tmp_path / "b.txt").write_bytes(b"text enough")
    config = DataConfig(source=(str(tmp_path / "b.txt"),))
    with pytest.raises(UserError, match=r"cannot write .*no/such"):
        tokenizer.main(tokenizer.TrainConfig(out=tmp_path / "no" / "such", data=config))
