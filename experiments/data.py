"""The input pipeline: documents, packed rows, checkpointable batches.

A split of the corpus is one long stream of tokens: each document as [bos] text [eos], or as
its chat template writes it, one after the other in the order of the files. Row r of a stream
is its tokens r * sequence to (r + 1) * sequence; only the last row is padded. So packing needs
no plan: a batch is a set of row numbers, read straight from arrays in memory or from a mapped
`.bin`, and where documents begin is found in the row itself. What is shuffled, mixed,
repeated and checkpointed, by grain, is row numbers. Every process computes the row numbers of
the global batch, which is next to free, and reads its own part of them: the order depends on
the seed and the global batch and not on how many devices or processes share the work.

What could be better: text is tokenized anew in every run and held in memory. A corpus beyond
a few GiB should be tokenized once, to a `.bin`.
"""

import dataclasses
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import chat, sources
from experiments.errors import UserError
from experiments.packing import Batch, Shard, Stream, TextShard, TokenShard, read_batch
from experiments.sources import Document, TokenFile

if TYPE_CHECKING:
    import grain

    from experiments.tokenizer import Tokenizer

_ENCODE_BYTES = 1 << 24  # of text at once: enough for all cores, little beside the tokens
_WHOLE_CHECK = 1 << 22  # a .bin of up to so many tokens is checked when it is opened
_SAMPLE = 1 << 16  # tokens of a larger one that are; the rest is checked row by row


@dataclass(frozen=True)
class DataConfig:
    """What to train on."""

    source: tuple[str, ...] = ("stdlib",)
    """Each is `stdlib` (this Python's own standard library), or a file, folder or glob of text,
    .jsonl or .parquet documents (.gz too, but for .parquet), or .bin token ids."""
    weights: tuple[float, ...] = ()
    """Share of each source in a batch. Without: all of every source, once per epoch."""
    field: str = "text"
    """Where a .jsonl or .parquet document holds its text. A .jsonl document without it may hold
    a chat in `messages`, or `prompt` and `completion`: loss on what the assistant says, or on
    the completion."""
    tokenizer: str = "bytes"
    """`bytes`, or a Hugging Face tokenizer.json, or a folder that holds one. With --init-from, the
    model's own stands in for `bytes`."""
    validation_fraction: float = 0.05
    """Part of each source that is held out: documents by a hash of their text, or the tail
    of a .bin. Where the hash leaves a side empty (few documents), the tail of the longest."""
    validation: tuple[str, ...] = ()
    """Sources to validate on instead; then nothing of `source` is held out."""


@dataclass(frozen=True)
class Split:
    """The training or the validation part of a corpus."""

    streams: tuple[Stream, ...]  # one per source where they are weighted, else one

    @property
    def tokens(self) -> int:
        """Tokens, special ones included."""
        return sum(stream.tokens for stream in self.streams)

    @property
    def bytes(self) -> int:
        """Bytes of predicted text; of a large `.bin`, estimated from its first tokens."""
        return sum(shard.bytes for stream in self.streams for shard in stream.shards)

    @property
    def documents(self) -> int:
        """Documents; of a large `.bin`, estimated from its first tokens."""
        return sum(shard.documents for stream in self.streams for shard in stream.shards)

    @property
    def predicted(self) -> int:
        """Tokens that are predicted: that count, and are not the first of their document."""
        return sum(shard.predicted for stream in self.streams for shard in stream.shards)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of predicted text per predicted token."""
        return self.bytes / max(1, self.predicted)


@dataclass(frozen=True)
class Corpus:
    """Training and validation text; made by `load_corpus`."""

    train: Split
    validation: Split
    weights: tuple[float, ...]

    @property
    def bytes_per_token(self) -> float:
        """Of the validation split: bits per byte = loss / ln(2) / bytes_per_token."""
        return self.validation.bytes_per_token

    def facts(self) -> dict[str, Any]:
        """What tells this corpus from another; of a `.bin` the first tokens are looked at."""
        found: dict[str, Any] = {}
        for name, split in (("training", self.train), ("validation", self.validation)):
            shards = [shard for stream in split.streams for shard in stream.shards]
            crc = 0
            for shard in shards:
                few = shard.tokens[:_SAMPLE] if isinstance(shard, TokenShard) else shard.tokens
                crc = zlib.crc32(np.ascontiguousarray(few).view(np.uint8).data, crc)
                if isinstance(shard, TextShard) and shard.counted is not None:
                    crc = zlib.crc32(np.packbits(shard.counted).data, crc)
            found |= {f"{name} tokens": split.tokens, f"checksum of {name} tokens": crc}
        return found

    def describe(self, documents: Sequence[int] | np.ndarray) -> list[str]:
        """Where the documents of a batch come from.

        Args:
          documents: a batch's `documents`, of any shape; -1 (padding) is left out.

        Returns:
          `file`, `file:line` or `file: token n` of each, without repeats.
        """
        streams = [*self.train.streams, *self.validation.streams]
        firsts = np.concatenate([stream.first_documents[:-1] for stream in streams])
        shards = [shard for stream in streams for shard in stream.shards]
        numbers = [int(n) for n in np.unique(np.asarray(documents)) if n >= 0]
        at = [int(np.searchsorted(firsts, n, side="right")) - 1 for n in numbers]
        return [shards[s].describe(n - int(firsts[s])) for s, n in zip(at, numbers)]


def load_corpus(config: DataConfig, tokenizer: "Tokenizer") -> Corpus:
    """Reads, splits and tokenizes the sources.

    Args:
      config: what to read.
      tokenizer: made by `experiments.tokenizer.load`.

    Returns:
      A corpus whose validation split is never empty.

    Raises:
      UserError: a source is missing, empty or unreadable, or an option is wrong.
    """
    fraction = _fraction(config)
    parts = [_load_source(s, config.field, fraction, tokenizer) for s in config.source]
    train, held = [part[0] for part in parts], [s for part in parts for s in part[1]]
    for source in config.validation:
        held += _load_source(source, config.field, 0.0, tokenizer)[0]
    if config.weights:
        named = list(zip(config.source, train))
    else:
        named = [(", ".join(config.source), [s for shards in train for s in shards])]
    streams, first = [], 0
    for name, shards in [*named, (", ".join(config.validation or config.source), held)]:
        streams.append(Stream(name, shards, first))
        first = int(streams[-1].first_documents[-1])
    return Corpus(Split(tuple(streams[:-1])), Split((streams[-1],)), config.weights)


def training_documents(config: DataConfig) -> list[Document]:
    """The documents of the training split, for training a tokenizer.

    Raises:
      UserError: as `load_corpus`; also where a source holds token ids.
    """
    fraction = _fraction(config)
    chosen = []
    for source in config.source:
        paths = sources.resolve(source)
        if binary := [path for path in paths if sources.is_token_file(path)]:
            raise UserError(f"{binary[0]} holds token ids: a tokenizer is trained on text")
        documents = list(sources.read_documents(paths, config.field))
        if not documents:
            raise UserError(f"source {source} holds no text")
        chosen += sources.split_documents(documents, fraction, source)[0]
    return chosen


def _fraction(config: DataConfig) -> float:
    """How much of each source to hold out, once all options are found legal."""
    if not all((config.source, *config.source, *config.validation)):
        raise UserError("no source: give 'stdlib', a file, a folder or a glob")
    if config.weights and len(config.weights) != len(config.source):
        raise UserError(
            f"{len(config.weights)} weights for {len(config.source)} sources: give one each"
        )
    if not all(0 < weight < float("inf") for weight in config.weights):
        raise UserError(f"weights must be positive, got {config.weights}")
    if not 0 < config.validation_fraction < 1:
        raise UserError(
            f"validation-fraction must lie between 0 and 1, got {config.validation_fraction}"
        )
    return 0.0 if config.validation else config.validation_fraction


def _load_source(
    source: str, field: str, fraction: float, tokenizer: "Tokenizer"
) -> tuple[list[Shard], list[Shard]]:
    """Training and validation shards of one source."""
    paths = sources.resolve(source)
    binary = [path for path in paths if sources.is_token_file(path)]
    text = [path for path in paths if not sources.is_token_file(path)]
    documents = list(sources.read_documents(text, field))
    files = [sources.open_tokens(path, tokenizer.vocab_size) for path in binary]
    files = [file for file in files if len(file.tokens)]
    if not documents and not files:
        raise UserError(f"source {source} is empty: it holds no text")
    train, held = [], []
    if documents:
        sides = sources.split_documents(documents, fraction, source)
        for side, shards in zip(sides, (train, held)):
            if side:
                shards.append(_tokenize(side, tokenizer))
            if side and shards[0].counted is not None and not shards[0].predicted:
                raise UserError(
                    f"source {source}: of {len(side)} documents, among them {side[0].name}, no "
                    "token counts in the loss: see the chat template's generation blocks"
                )
    if files:
        token_train, token_held = _split_tokens(files, fraction, tokenizer, source)
        train += token_train
        held += token_held
    return train, held


def _tokenize(documents: list[Document], tokenizer: "Tokenizer") -> TextShard:
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    chunks, masks, lengths, total = [], [], [], 0
    pending, size = [], 0
    for number, document in enumerate(documents, 1):
        pending.append(document)
        size += len(document.text)
        if size >= _ENCODE_BYTES or number == len(documents):
            encoded = chat.encode(pending, tokenizer)
            chunks.append(np.concatenate([e.ids.astype(dtype) for e in encoded]))
            masks += [e.counted for e in encoded]
            lengths += [len(e.ids) for e in encoded]
            total += sum(e.bytes for e in encoded if len(e.ids))
            pending, size = [], 0
    counted = None
    if any(mask is not None for mask in masks):
        masks = [np.ones(n, bool) if m is None else m for m, n in zip(masks, lengths)]
        counted = np.concatenate(masks)
    # A tokenizer without bos and eos can make nothing of a text; such documents are left out.
    return TextShard(
        tokens=np.concatenate(chunks),
        starts=np.cumsum([0, *(length for length in lengths if length)]),
        names=[document.name for document, length in zip(documents, lengths) if length],
        bytes=total,
        counted=counted,
    )


def _split_tokens(
    files: list[TokenFile], fraction: float, tokenizer: "Tokenizer", source: str
) -> tuple[list[TokenShard], list[TokenShard]]:
    """All but the tail of the files' tokens, and the tail, cut where a document begins."""
    total = sum(len(file.tokens) for file in files)
    remaining = total if fraction == 0 else min(total - 1, int(total * (1 - fraction)))
    if remaining == 0:
        raise UserError(f"source {source} holds {total} tokens: too few to hold out validation")
    train, held = [], []
    for file in files:
        n = len(file.tokens)
        whole = _token_shard(file, 0, n, tokenizer)
        whole.read(0, n if n <= _WHOLE_CHECK else _SAMPLE)  # for ids outside the vocabulary
        cut = min(remaining, n)
        remaining -= cut
        if 0 < cut < n:
            # The first document that begins within reach; a longer one is cut in two.
            _, start, *_ = whole.read(cut, min(cut + _WHOLE_CHECK, n))
            cut += int(np.argmax(start))
        if cut:
            train.append(_token_shard(file, 0, cut, tokenizer))
        if cut < n:
            held.append(_token_shard(file, cut, n, tokenizer))
    return _estimate(train, tokenizer), _estimate(held, tokenizer)


def _token_shard(file: TokenFile, lo: int, hi: int, tokenizer: "Tokenizer") -> TokenShard:
    # With one id for both ends, llm.c (which has a header) writes it before each document,
    # nanoGPT (which has none) after it.
    before, after = tokenizer.bos, tokenizer.eos
    if before == after:
        before, after = (before, None) if file.header_bytes else (None, after)
    return TokenShard(file, lo, file.tokens[lo:hi], tokenizer.vocab_size, before, after)


def _estimate(shards: list[TokenShard], tokenizer: "Tokenizer") -> list[TokenShard]:
    """Sets `bytes` and `documents`, in proportion to a sample; exact for one small shard."""
    if not shards:
        return []
    tokens, start, *_ = shards[0].read(0, _SAMPLE)
    size = len(tokenizer.decode(tokens).encode())
    return [
        dataclasses.replace(
            shard,
            bytes=round(size * len(shard.tokens) / len(tokens)),
            documents=max(1, round(int(start.sum()) * len(shard.tokens) / len(tokens))),
        )
        for shard in shards
    ]


def train_iterator(
    corpus: Corpus,
    *,
    batch: int,
    sequence: int,
    seed: int,
    rows: np.ndarray | None = None,
) -> "grain.DatasetIterator[Batch]":
    """Shuffled training batches without end.

    Each epoch holds every token of the split once, in an order of its own; with weights,
    each source has epochs of its own, and its rows come in proportion to its weight. The
    order of the global batches depends on `seed` and `batch` alone.

    Args:
      corpus: made by `load_corpus`.
      batch: rows of the global batch.
      sequence: tokens in a row.
      seed: of the order.
      rows: which rows of each global batch to read (`OwnRows.numbers`); None: all.

    Returns:
      An iterator with grain's `get_state()` and `set_state()`, whose state is JSON. It yields
      dicts of int32 [rows, sequence]:
        tokens: ids.
        labels: the next token of the same document, -1 where there is none or it does not count.
        segments: 1, 2, ... for the documents of a row; 0 is padding, in a tail row only.
        positions: within the part of the document that the row holds, from 0.
        documents: numbers for `Corpus.describe`; -1 is padding.

    Raises:
      UserError: a source holds less than one batch.
    """
    import grain  # not at the top: `--help` should not wait for it

    for stream in corpus.train.streams:
        if stream.tokens < batch * sequence:
            raise UserError(
                f"source {stream.name} holds {stream.tokens:,} training tokens, less than one "
                f"batch of {batch} x {sequence} = {batch * sequence:,}"
            )
    streams = corpus.train.streams
    firsts = np.cumsum([0] + [stream.rows(sequence) for stream in streams])
    # grain's shuffle adds the epoch to its seed: neighbouring seeds would share epochs.
    seeds = np.random.SeedSequence(seed % 2**64).generate_state(len(streams))
    numbers = [
        grain.MapDataset.range(int(lo), int(hi)).shuffle(seed=int(s)).repeat()
        for lo, hi, s in zip(firsts, firsts[1:], seeds)
    ]
    mixed = grain.MapDataset.mix(numbers, corpus.weights) if corpus.weights else numbers[0]
    mine = np.arange(batch) if rows is None else rows

    def read(numbers: np.ndarray) -> Batch:
        return read_batch(streams, firsts[:-1], numbers[mine], sequence)

    # No remainder, of a dataset without end: grain's other way overflows for a batch of 1.
    batches = mixed.batch(batch, drop_remainder=True).map(read)
    # One thread reads ahead: grain hands batches out in order, so determinism is kept.
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))


def validation_batches(
    corpus: Corpus,
    *,
    batch: int,
    sequence: int,
    limit: int | None = None,
    rows: np.ndarray | None = None,
) -> Iterator[Batch]:
    """Yields the validation split in batches like `train_iterator`'s, always the same.

    Args:
      corpus: made by `load_corpus`.
      batch: rows; the last batch is filled up with rows of padding.
      sequence: tokens in a row.
      limit: at most so many batches, of rows spread evenly over the split; None is all.
      rows: which rows of each batch to read (`OwnRows.numbers`); None: all.
    """
    streams = corpus.validation.streams
    mine = np.arange(batch) if rows is None else rows
    numbers = np.arange(streams[0].rows(sequence))
    if limit is not None and limit * batch < len(numbers):
        numbers = np.arange(limit * batch) * len(numbers) // (limit * batch)
    for at in range(0, len(numbers), batch):
        chosen = numbers[at : at + batch]
        chosen = np.pad(chosen, (0, batch - len(chosen)), constant_values=-1)
        yield read_batch(streams, np.zeros(1, np.int64), chosen[mine], sequence)
