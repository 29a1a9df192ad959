"""Every format, and every kind of bad source."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from experiments import tokenizer
from experiments.data import DataConfig, load_corpus
from experiments.errors import UserError
from experiments.sources import Document, read_documents, resolve


def load(source, **options):
    return load_corpus(DataConfig(source=(source,), **options), tokenizer.load("bytes"))


def test_every_format_holds_the_same_text(tmp_path):
    texts = ["one", "zwei\n2", "trois é"]
    lines = "".join(json.dumps({"id": i, "body": t}) + "\n" for i, t in enumerate(texts))
    (tmp_path / "a.jsonl").write_text(lines)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(lines)
    pq.write_table(pa.table({"id": [0, 1, 2], "body": texts}), tmp_path / "c.parquet")
    (tmp_path / "d").mkdir()
    for i, text in enumerate(texts):
        with gzip.open(tmp_path / "d" / f"{i}.txt.gz", "wt", encoding="utf-8") as file:
            file.write(text)
    (tmp_path / "d" / ".hidden").write_text("not read")
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet", "d", "d/*.txt.gz", "**/[abc].jsonl"):
        documents = read_documents(resolve(str(tmp_path / name)), "body")
        assert [d.text.decode() for d in documents] == texts, name


def test_kinds_of_a_record(tmp_path):
    said = [{"type": "text", "text": t} for t in "bc"]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": said}]
    records = [
        {"text": "t", "messages": messages, "prompt": "p", "completion": "c"},
        {"messages": messages, "prompt": "p", "completion": "c", "tools": [{}]},
        {"prompt": "é", "completion": "c", "id": 1},
        {"prompt": "", "completion": ""},
        {"prompt": "", "completion": "c"},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    found = list(read_documents([path], "text"))
    name = str(path)
    assert found == [
        Document(b"t", name, 1),
        Document(b"a\nbc", name, 2, 0, {"messages": messages, "tools": [{}]}),
        Document("éc".encode(), name, 3, 2),
        Document(b"c", name, 5),
    ]
    path.write_text(json.dumps(records[0]))
    (by_name,) = read_documents([path], "messages")
    assert by_name.chat == {"messages": messages, "tools": None}
    assert [d.text for d in read_documents([path], "prompt")] == [b"p"]


def bad(tmp_path, name, content=b""):
    path = tmp_path / name
    path.write_bytes(content)
    return str(path)


SOURCES = {
    "missing": (lambda p: f"{p}/no.txt", "no.txt does not exist"),
    "no match": (lambda p: f"{p}/*.nothing", r"nothing' matches no file"),
    "empty name": (lambda p: "", "no source: give 'stdlib'"),
    "empty folder": (lambda p: str(p), "holds no files"),
    "empty file": (lambda p: bad(p, "e.txt"), r"e.txt is empty"),
    "empty bin": (lambda p: bad(p, "e.bin"), r"e.bin is empty"),
    "one byte": (lambda p: bad(p, "o.txt", b"x"), "o.txt holds 1 bytes of text: too little"),
    "one token": (lambda p: bad(p, "o.bin", b"x\0"), "o.bin holds 1 tokens: too few"),
    "not json": (lambda p: bad(p, "a.jsonl", b'{"text": "a"}\n{"text'), r"a.jsonl:2: not JSON: "),
    "not utf-8": (lambda p: bad(p, "a.jsonl", b'{"text": "\xff"}'), r"a.jsonl:1: not JSON: "),
    "no object": (lambda p: bad(p, "a.jsonl", b"[1]"), r"a.jsonl:1: not a JSON object"),
    "no field": (
        lambda p: bad(p, "a.jsonl", b'{"text": "a"}\n\n{"body": 1, "id": 2}'),
        r"a.jsonl:3: no field 'text'; it has: body, id",
    ),
    "no text": (
        lambda p: bad(p, "a.jsonl", b'{"text": null}'),
        "1: 'text' holds NoneType, not text",
    ),
    "not gzip": (lambda p: bad(p, "a.jsonl.gz", b"{}"), r"cannot read .*a.jsonl.gz: Not a gzipped"),
    "gzip cut short": (
        lambda p: bad(p, "a.gz", gzip.compress(b"abc" * 99)[:-9]),
        r"cannot read .*a.gz: ",
    ),
    "not parquet": (lambda p: bad(p, "a.parquet", b"PAR1 or not?"), r"cannot read .*a.parquet: "),
    "odd bytes": (lambda p: bad(p, "a.bin", b"abc"), "3 bytes is no whole number of uint16 ids"),
    "version": (
        lambda p: bad(p, "a.bin", np.array([20240520, 9, 0], "<i4").tobytes()),
        "a.bin: llm.c header of version 9, known is 1",
    ),
    "cut short": (
        lambda p: bad(p, "a.bin", np.array([20240520, 1, 50] + [0] * 253, "<i4").tobytes()),
        "a.bin: 1024 bytes where its header promises 1124",
    ),
    "outside the vocabulary": (
        lambda p: bad(p, "a.bin", np.array([1, 2, 258], np.uint16).tobytes()),
        r"a.bin: token id 258 at token 2 \(byte 4\) is outside the tokenizer's vocabulary of 258",
    ),
    "outside, with a header": (
        lambda p: bad(
            p, "a.bin", np.array([20240801, 7, 2] + [0] * 253 + [5, -1], "<i4").tobytes()
        ),
        r"a.bin: token id 4294967295 at token 1 \(byte 1,028\)",
    ),
}


@pytest.mark.parametrize("case", SOURCES)
def test_bad_source(tmp_path, case):
    make, message = SOURCES[case]
    with pytest.raises(UserError, match=message) as caught:
        load(make(tmp_path))
    assert "\n" not in str(caught.value)


def test_bad_parquet_column(tmp_path):
    pq.write_table(pa.table({"id": [0, 1], "body": ["a", None]}), tmp_path / "c.parquet")
    with pytest.raises(UserError, match=r"c.parquet: no column 'text'; it has: id, body"):
        load(str(tmp_path / "c.parquet"))
    with pytest.raises(UserError, match=r"c.parquet:2: 'body' holds NoneType, not text"):
        load(str(tmp_path / "c.parquet"), field="body")
