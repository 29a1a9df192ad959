"""Packing against a plain reference, order, iterator state, splits, mixing."""

import collections
import dataclasses
import json
import random
import time

import grain  # noqa: F401, so that no test times its import
import numpy as np
import pytest

from experiments import tokenizer
from experiments.data import DataConfig, load_corpus, train_iterator, validation_batches
from experiments.errors import UserError

BYTES = tokenizer.load("bytes")
KEYS = {"tokens", "labels", "segments", "positions", "documents"}


def write_texts(folder, lengths, seed=0):
    """Files of random bytes; each begins with its number, so that no two are equal."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for i, n in enumerate(lengths):
        text = b"%d;" % i + bytes(rng.randrange(256) for _ in range(n))
        (folder / f"{i:04}.txt").write_bytes(text)
    return str(folder)


def write_bin(path, documents, *, header=0, dtype=np.uint16):
    """A nanoGPT (header=0) or llm.c `.bin` of [bos] text [eos] documents, as bytes tokens."""
    ids = [i for text in documents for i in (256, *text, 257)]
    head = np.zeros(256 if header else 0, np.int32)
    if header:
        head[:3] = header, {20240520: 1, 20240801: 7}[header], len(ids)
    path.write_bytes(head.tobytes() + np.array(ids, dtype).tobytes())
    return str(path)


def load(*source, **options):
    return load_corpus(DataConfig(source=source, **options), BYTES)


def reference_rows(documents, sequence):
    """(tokens, labels, segments, positions) of each row, packed the plain way."""
    stream = []  # (token, next token of the document, document)
    for number, text in enumerate(documents):
        ids = [256, *text, 257]
        stream += zip(ids, [*ids[1:], -1], [number] * len(ids))
    rows = []
    for at in range(0, len(stream), sequence):
        row, segment, position, previous = [], 0, 0, None
        for token, label, document in stream[at : at + sequence]:
            position = position + 1 if document == previous else 0
            segment += document != previous
            previous = document
            row.append((token, label, segment, position))
        row += [(0, -1, 0, 0)] * (sequence - len(row))
        rows.append(tuple(tuple(column) for column in zip(*row)))
    return rows


def rows_of(batch):
    return [
        tuple(
            tuple(batch[key][i].tolist()) for key in ("tokens", "labels", "segments", "positions")
        )
        for i in range(len(batch["tokens"]))
    ]


def draw(iterator, steps):
    return [next(iterator) for _ in range(steps)]


def same(batches, others):
    for batch, other in zip(batches, others, strict=True):
        assert batch.keys() == other.keys()
        for key in batch:
            np.testing.assert_array_equal(batch[key], other[key])


def texts_of(rows):
    """The documents that whole rows in order hold, as bytes."""
    ids = [t for row in rows for t, segment in zip(row[0], row[2]) if segment]
    text, documents = [], []
    for token in ids:
        if token == 257:
            documents.append(bytes(text))
        text = [] if token > 255 else [*text, token]
    return documents


LENGTHS = [0, 1, 2, 5, 30, 7, 64, 3, 0, 11, 1, 129, 17]


@pytest.mark.parametrize("sequence", [1, 2, 7, 16, 325])
def test_rows_equal_the_plain_reference(tmp_path, sequence):
    source = write_texts(tmp_path / "train", LENGTHS)
    held = write_texts(tmp_path / "held", [9, 40, 1], seed=1)
    corpus = load(source, validation=(held,))
    documents = [p.read_bytes() for p in sorted((tmp_path / "train").iterdir())]
    expected = reference_rows(documents, sequence)
    n = len(expected)
    batch = min(3, n)
    batches = draw(
        train_iterator(corpus, batch=batch, sequence=sequence, seed=5), -(-2 * n // batch)
    )
    assert all(b.keys() == KEYS for b in batches)
    assert all(
        a.dtype == np.int32 and a.shape == (batch, sequence) for b in batches for a in b.values()
    )
    drawn = [row for b in batches for row in rows_of(b)]
    # Every row, so every token, once in each of two epochs, and in another order.
    assert sorted(drawn[:n]) == sorted(drawn[n : 2 * n]) == sorted(expected)
    if n > 5:
        assert drawn[:n] != drawn[n : 2 * n]
        assert drawn[:n] != expected
    held_texts = [p.read_bytes() for p in sorted((tmp_path / "held").iterdir())]
    validation = [
        r for b in validation_batches(corpus, batch=2, sequence=sequence) for r in rows_of(b)
    ]
    expected = reference_rows(held_texts, sequence)
    assert validation[: len(expected)] == expected
    assert all(not any(segments) for _, _, segments, _ in validation[len(expected) :])


@pytest.mark.parametrize(
    ("header", "dtype"), [(0, np.uint16), (20240520, np.uint16), (20240801, np.uint32)]
)
def test_a_bin_gives_the_same_rows_as_its_text(tmp_path, header, dtype):
    rng = random.Random(2)
    texts = [bytes(rng.randrange(256) for _ in range(n)) for n in LENGTHS]
    # Two files: rows run over their border.
    write_bin(tmp_path / "a.bin", texts[:5], header=header, dtype=dtype)
    write_bin(tmp_path / "b.bin", texts[5:], header=header, dtype=dtype)
    held = write_bin(tmp_path / "val", texts[:1])  # no suffix: as text, its contents are moot
    corpus = load(str(tmp_path / "*.bin"), validation=(held,))
    expected = reference_rows(texts, 7)
    drawn = [
        r
        for b in draw(train_iterator(corpus, batch=1, sequence=7, seed=0), len(expected))
        for r in rows_of(b)
    ]
    assert sorted(drawn) == sorted(expected)
    # Small enough for the counts to be exact but in proportion over two files.
    assert corpus.train.tokens == sum(LENGTHS) + 2 * len(LENGTHS)


@pytest.mark.parametrize("header", [0, 20240520])
def test_one_id_for_both_ends(tmp_path, header):
    """GPT-2's end of text: after each document (nanoGPT), before each document (llm.c)."""
    both = dataclasses.replace(BYTES, bos=256, eos=256)
    path = tmp_path / "x.bin"
    ids = [256, 1, 2, 256, 3, 256, 4, 5, 6] if header else [1, 2, 256, 3, 256, 4, 5, 6, 256]
    head = np.array([header, 1, 9] + [0] * 253, np.int32) if header else np.zeros(0, np.int32)
    path.write_bytes(head.tobytes() + np.array(ids, np.uint16).tobytes())
    (tmp_path / "held.txt").write_bytes(b"held")
    corpus = load_corpus(
        DataConfig(source=(str(path),), validation=(str(tmp_path / "held.txt"),)), both
    )
    batch = next(train_iterator(corpus, batch=1, sequence=9, seed=0))
    assert batch["segments"][0].tolist() == [1, 1, 1, 2, 2, 3, 3, 3, 3]
    assert corpus.train.documents == 3 and corpus.train.bytes == 6


def test_a_document_over_two_rows(tmp_path):
    """Spelt out: the last label of a row is the next row's first token, of the same document."""
    (tmp_path / "a.jsonl").write_text('{"text": "abcd"}\n\n{"text": "e"}\n')
    (tmp_path / "v.txt").write_text("held")
    corpus = load(str(tmp_path / "a.jsonl"), validation=(str(tmp_path / "v.txt"),))
    batches = draw(train_iterator(corpus, batch=1, sequence=5, seed=0), 2)
    first, second = sorted(batches, key=lambda b: b["documents"].max())
    assert {k: v[0].tolist() for k, v in first.items()} == {
        "tokens": [256, 97, 98, 99, 100],
        "labels": [97, 98, 99, 100, 257],
        "segments": [1, 1, 1, 1, 1],
        "positions": [0, 1, 2, 3, 4],
        "documents": [0, 0, 0, 0, 0],
    }
    assert {k: v[0].tolist() for k, v in second.items()} == {
        "tokens": [257, 256, 101, 257, 0],
        "labels": [-1, 101, 257, -1, -1],
        "segments": [1, 2, 2, 2, 0],
        "positions": [0, 0, 1, 2, 0],
        "documents": [0, 1, 1, 1, -1],
    }
    names = [f"{tmp_path}/a.jsonl:1", f"{tmp_path}/a.jsonl:3"]
    assert corpus.describe(second["documents"]) == names
    (held,) = validation_batches(corpus, batch=1, sequence=9)
    assert corpus.describe(held["documents"]) == [f"{tmp_path}/v.txt"]


def test_documents_are_split_by_their_text_and_never_cross(tmp_path):
    lengths = [random.Random(3).randrange(1, 40) for _ in range(300)]
    source = write_texts(tmp_path / "a", lengths)
    everything = sorted(p.read_bytes() for p in (tmp_path / "a").iterdir())
    corpus = load(source, validation_fraction=0.2)
    held = texts_of(r for b in validation_batches(corpus, batch=3, sequence=11) for r in rows_of(b))
    epoch = draw(
        train_iterator(corpus, batch=1, sequence=500, seed=0), -(-corpus.train.tokens // 500)
    )
    epoch.sort(key=lambda b: int(np.max(b["documents"])))
    train = texts_of(r for b in epoch for r in rows_of(b))
    assert sorted(train + held) == everything
    assert len(held) == corpus.validation.documents and 30 < len(held) < 95
    assert sum(len(t) for t in held) == corpus.validation.bytes
    labels = sum((b["labels"] >= 0).sum() for b in validation_batches(corpus, batch=3, sequence=11))
    assert corpus.bytes_per_token == corpus.validation.bytes / labels
    # The same texts under other names and in another order fall on the same sides.
    (tmp_path / "b").mkdir()
    for i, text in enumerate(reversed(everything)):
        (tmp_path / "b" / f"{i}.md").write_bytes(text)
    again = load(str(tmp_path / "b"), validation_fraction=0.2)
    rows = [r for b in validation_batches(again, batch=1, sequence=11) for r in rows_of(b)]
    assert sorted(texts_of(rows)) == sorted(held)


@pytest.mark.parametrize("lines", [200, 1])
def test_one_document_gives_its_tail_to_validation(tmp_path, lines):
    """The commonest source of all: one text file. Cut at a line end, else between characters."""
    text = ("é" * 7 + ("\n" if lines > 1 else "é")) * 200
    path = tmp_path / "input.txt"
    path.write_text(text, encoding="utf-8")
    corpus = load(str(path), validation_fraction=0.1)
    (held,) = texts_of(
        r for b in validation_batches(corpus, batch=1, sequence=99) for r in rows_of(b)
    )
    assert text.endswith(held.decode("utf-8"))
    assert 0.09 < len(held) / len(text.encode()) < 0.12
    assert corpus.train.bytes + corpus.validation.bytes == len(text.encode())
    (batch, *_) = validation_batches(corpus, batch=1, sequence=9)
    (name,) = corpus.describe(batch["documents"])
    assert name == f"{path}:{1 + text[: -len(held.decode())].count(chr(10))}"


@pytest.mark.parametrize(("fraction", "first"), [(0.2, 80), (0.197, 81), (0.203, 80)])
@pytest.mark.parametrize("ids", [(256, 257), (257, 257)])
def test_a_bin_gives_its_tail_to_validation(tmp_path, fraction, first, ids):
    """Cut where a document begins: 5 tokens each with both ids, 4 where one ends a document."""
    texts = [b"%03d" % i for i in range(100)]
    size = 5 if ids[0] != ids[1] else 4
    tokens = [i for text in texts for i in ([256, *text, 257] if size == 5 else [*text, 257])]
    source = str(tmp_path / "x.bin")
    np.array(tokens, np.uint16).tofile(source)
    corpus = load_corpus(
        DataConfig(source=(source,), validation_fraction=fraction),
        dataclasses.replace(BYTES, bos=ids[0], eos=ids[1]),
    )
    held = texts_of(r for b in validation_batches(corpus, batch=1, sequence=7) for r in rows_of(b))
    assert held == texts[first:]
    assert (corpus.train.documents, corpus.validation.documents) == (first, 100 - first)
    assert (corpus.train.bytes, corpus.validation.bytes) == (3 * first, 300 - 3 * first)
    batch = next(validation_batches(corpus, batch=1, sequence=7))
    assert corpus.describe(batch["documents"]) == [f"{source}: token {first * size}"]


def test_a_large_bin_is_not_scanned(tmp_path):
    """3 GiB of nothing (a sparse file), bad only in its middle: opened and read in no time."""
    path = tmp_path / "large.bin"
    n = 3 << 29
    with path.open("wb") as file:
        file.truncate(2 * n)
        file.seek(n)  # bytes: the middle
        file.write(np.array([999], np.uint16).tobytes())
    begin = time.process_time()
    corpus = load(str(path))
    assert next(train_iterator(corpus, batch=2, sequence=5, seed=0))["tokens"].sum() == 0
    assert time.process_time() - begin < 0.5
    stream = corpus.train.streams[0]
    with pytest.raises(
        UserError, match=r"large.bin: token id 999 at token 805,306,368 \(byte 1,610,"
    ):
        stream.read(n // 2 - 3, n // 2 + 3)


def test_state_round_trips_through_json_in_mid_epoch_and_over_its_end(tmp_path):
    source = write_texts(tmp_path / "a", LENGTHS)
    options = {"batch": 4, "sequence": 13, "seed": 11}
    corpus = load(source)
    rows = -(-corpus.train.tokens // 13)
    steps = 3 * rows // 4
    assert rows % 4  # batches run over the end of an epoch
    whole = draw(train_iterator(corpus, **options), steps + 3)
    for stop in (0, 1, rows // 4, rows // 4 + 1, steps):
        iterator = train_iterator(corpus, **options)
        draw(iterator, stop)
        state = json.loads(json.dumps(iterator.get_state()))
        resumed = train_iterator(load(source), **options)
        resumed.set_state(state)
        same(draw(resumed, steps + 3 - stop), whole[stop:])
    other = draw(train_iterator(corpus, batch=4, sequence=13, seed=12), rows // 4)
    assert any((a["tokens"] != b["tokens"]).any() for a, b in zip(whole, other))


def test_epochs_of_neighbouring_seeds_differ(tmp_path):
    """grain's shuffle adds the epoch to the seed; a second run would repeat the first's."""
    corpus = load(write_texts(tmp_path / "a", [70] * 20))
    rows = -(-corpus.train.tokens // 16)
    orders = [
        [
            b["tokens"].tolist()
            for b in draw(train_iterator(corpus, batch=1, sequence=16, seed=s), 2 * rows)
        ]
        for s in (0, 1)
    ]
    assert orders[0][rows:] != orders[1][:rows]
    assert sorted(orders[0][rows:]) == sorted(orders[1][:rows])


@pytest.mark.parametrize("weights", [(), (0.3, 0.7)])
def test_processes_share_the_same_global_batches(tmp_path, weights):
    sources = [write_texts(tmp_path / "a", LENGTHS), write_texts(tmp_path / "b", [50] * 4, seed=9)]
    corpus = load(*sources, weights=weights)
    whole = draw(train_iterator(corpus, batch=6, sequence=8, seed=3), 25)
    # Rows need not be neighbours, and several processes may need the same ones.
    for rows in ([0, 1, 2], [3, 4, 5], [5], [0, 1, 4, 5]):
        own = train_iterator(corpus, batch=6, sequence=8, seed=3, rows=np.array(rows))
        same(draw(own, 25), [{k: a[rows] for k, a in batch.items()} for batch in whole])
        held = {"batch": 6, "sequence": 8, "limit": 3}
        same(
            validation_batches(corpus, **held, rows=np.array(rows)),
            [{k: a[rows] for k, a in b.items()} for b in validation_batches(corpus, **held)],
        )


def test_weights_set_the_shares(tmp_path):
    small = write_texts(tmp_path / "small", [40] * 9)
    large = write_texts(tmp_path / "large", [40] * 90, seed=1)
    corpus = load(small, large, weights=(3, 1))
    first_of_large = int(corpus.train.streams[1].first_documents[0])
    batches = draw(train_iterator(corpus, batch=10, sequence=16, seed=0), 40)
    share = np.mean([(b["documents"][:, 0] < first_of_large).mean() for b in batches])
    assert abs(share - 0.75) < 0.01
    assert all(0.5 <= (b["documents"][:, 0] < first_of_large).mean() <= 0.9 for b in batches)
    # Within its share each source goes round in whole epochs.
    counts = collections.Counter(tuple(r) for b in batches for r in b["tokens"])
    of_small = {
        tuple(t)
        for b in batches
        for t, d in zip(b["tokens"], b["documents"])
        if d[0] < first_of_large
    }
    assert max(counts[r] for r in of_small) - min(counts[r] for r in of_small) <= 1
    # Unweighted, the shares are those of the sizes.
    assert len(load(small, large).train.streams) == 1


def test_validation_batches_are_bounded_even_and_always_the_same(tmp_path):
    corpus = load(write_texts(tmp_path / "a", [60] * 60), validation_fraction=0.5)
    rows = -(-corpus.validation.tokens // 8)
    every = [r for b in validation_batches(corpus, batch=4, sequence=8) for r in rows_of(b)]
    assert len(every) == -(-rows // 4) * 4
    some = list(validation_batches(corpus, batch=4, sequence=8, limit=5))
    same(some, validation_batches(corpus, batch=4, sequence=8, limit=5))
    at = [every.index(r) for b in some for r in rows_of(b)]
    assert len(some) == 5 and min(np.diff(at)) >= rows // 20 and max(at) > rows * 0.9
    assert list(validation_batches(corpus, batch=4, sequence=8, limit=0)) == []


def test_the_standard_library_is_there():
    corpus = load("stdlib")
    assert corpus.train.tokens > 10**6 and corpus.validation.tokens > 10**4
    names = corpus.describe(np.arange(corpus.train.documents))
    assert any(
        name.endswith("/json/decoder.py")
        for name in names
        + corpus.describe(np.arange(corpus.train.documents + corpus.validation.documents))
    )
    assert not any("site-packages" in name or "/test/" in name for name in names)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": (1.0, 2.0)}, "2 weights for 1 sources"),
        ({"weights": (0.0,)}, r"weights must be positive, got \(0.0,\)"),
        ({"weights": (-1.0,)}, "weights must be positive"),
        ({"weights": (float("nan"),)}, "weights must be positive"),
        ({"validation_fraction": 0.0}, "must lie between 0 and 1, got 0.0"),
        ({"validation_fraction": 1.0}, "must lie between 0 and 1, got 1.0"),
        ({"validation": ("/no/such",)}, "source /no/such does not exist"),
        ({"source": ()}, "no source"),
    ],
)
def test_bad_option(tmp_path, options, message):
    source = write_texts(tmp_path, [5, 5])
    with pytest.raises(UserError, match=message):
        load_corpus(DataConfig(**{"source": (source,), **options}), BYTES)


def test_facts_tell_texts_apart(tmp_path):
    a, b = write_texts(tmp_path / "a", [40, 50]), write_texts(tmp_path / "b", [40, 50], seed=1)
    documents = [b"one", b"another"] * 20
    c = write_bin(tmp_path / "c.bin", documents)
    d = write_bin(tmp_path / "d.bin", [b"two", *documents[1:]])
    for left, right in ((a, b), (c, d)):
        assert load(left).facts() == load(left).facts() != load(right).facts()
        assert load(left).train.tokens == load(right).train.tokens


def test_less_text_than_a_batch(tmp_path):
    small = write_texts(tmp_path / "small", [20])
    large = write_texts(tmp_path / "large", [90] * 9, seed=1)
    for corpus in (load(small), load(large, small, weights=(1, 1))):
        with pytest.raises(UserError, match=r"small holds 2\d training tokens, .*2 x 16 = 32"):
            train_iterator(corpus, batch=2, sequence=16, seed=0)


def test_a_bad_token_met_while_training_reaches_the_reader(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.data._WHOLE_CHECK", 4)
    monkeypatch.setattr("experiments.data._SAMPLE", 4)
    ids = np.zeros(300, np.uint16)
    ids[123] = 300
    ids.tofile(tmp_path / "late.bin")
    corpus = load(str(tmp_path / "late.bin"))
    iterator = train_iterator(corpus, batch=1, sequence=10, seed=0)
    with pytest.raises(UserError, match=r"late.bin: token id 300 at token 123 \(byte 246\)"):
        draw(iterator, 30)
