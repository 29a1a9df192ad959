"""Rows and batches, read straight from token arrays.

A stream is the documents of a split, end to end. Row r holds its tokens r * sequence to
(r + 1) * sequence. Where documents begin is looked up in the row itself: by their recorded
starts where the text was tokenized here, by the special ids in a `.bin`, which may be of any
size and is never scanned.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.errors import UserError
from experiments.sources import TokenFile

Batch = dict[str, np.ndarray]

_BLOCK = 256  # tokens of a .bin that share a document number: its documents are not counted


@dataclass(frozen=True)
class TextShard:
    """Tokenized documents, in memory."""

    tokens: np.ndarray  # [n] uint16 or uint32
    starts: np.ndarray  # [documents + 1] int64: where each begins, and n
    names: list[str]
    bytes: int  # of the text that is predicted
    counted: np.ndarray | None = None  # [n] bool: tokens to predict; None: all

    @property
    def documents(self) -> int:
        """How many."""
        return len(self.names)

    @property
    def ids(self) -> int:
        """How many document numbers it takes."""
        return len(self.names)

    @property
    def predicted(self) -> int:
        """Tokens that are predicted: those that count, but for the first of each document."""
        if self.counted is None:
            return len(self.tokens) - self.documents
        return int(self.counted.sum()) - int(self.counted[self.starts[:-1]].sum())

    def read(self, lo: int, hi: int) -> tuple[np.ndarray, ...]:
        """Tokens lo to hi, which of them begin a document, which count, their documents."""
        first, last = np.searchsorted(self.starts, (lo, hi))
        start = np.zeros(hi - lo, bool)
        start[self.starts[first:last] - lo] = True
        counted = np.ones(hi - lo, bool) if self.counted is None else self.counted[lo:hi]
        return self.tokens[lo:hi], start, counted, np.cumsum(start) + (first - 1)

    def describe(self, document: int) -> str:
        """Its file, and the line where it begins."""
        return self.names[document]


@dataclass(frozen=True)
class TokenShard:
    """A stretch of a mapped `.bin`, never read whole: documents and bytes are estimates."""

    file: TokenFile
    offset: int  # of the stretch in the file, in tokens
    tokens: np.ndarray  # [n] uint16 or uint32, mapped
    vocab_size: int
    before: int | None  # a document begins at this id
    after: int | None  # a document begins after this id
    bytes: int = 0
    documents: int = 1

    @property
    def ids(self) -> int:
        """How many document numbers it takes."""
        return -(-len(self.tokens) // _BLOCK)

    @property
    def predicted(self) -> int:
        """Tokens that are predicted: all but the first of each document."""
        return len(self.tokens) - self.documents

    def read(self, lo: int, hi: int) -> tuple[np.ndarray, ...]:
        """Tokens lo to hi, which of them begin a document, which count, their documents."""
        tokens = self.tokens[lo:hi]
        if len(tokens) and tokens.max() >= self.vocab_size:
            at = int(np.argmax(tokens >= self.vocab_size))
            byte = self.file.header_bytes + (self.offset + lo + at) * tokens.itemsize
            raise UserError(
                f"{self.file.file}: token id {tokens[at]} at token {self.offset + lo + at:,} (byte "
                f"{byte:,}) is outside the tokenizer's vocabulary of {self.vocab_size:,}"
            )
        start = np.zeros(len(tokens), bool)
        if self.before is not None:
            start |= tokens == self.before
        if self.after is not None:
            start[1:] |= tokens[:-1] == self.after
            start[:1] |= lo > 0 and self.tokens[lo - 1] == self.after
        start[:1] |= lo == 0
        begins = np.maximum.accumulate(np.where(start, np.arange(len(tokens)), 0))
        return tokens, start, np.ones(len(tokens), bool), (lo + begins) // _BLOCK

    def describe(self, document: int) -> str:
        """Its file, and the first of the tokens that the number names."""
        return f"{self.file.file}: token {self.offset + document * _BLOCK:,}"


Shard = TextShard | TokenShard


class Stream:
    """Shards end to end, cut into rows."""

    def __init__(self, name: str, shards: Sequence[Shard], first_document: int):
        self.name = name
        self.shards = tuple(shards)
        self.ends = np.cumsum([len(s.tokens) for s in shards])
        self.first_documents = first_document + np.cumsum([0] + [s.ids for s in shards])
        self.tokens = int(self.ends[-1]) if shards else 0

    def rows(self, sequence: int) -> int:
        """How many rows of `sequence` tokens, the last one padded, hold every token once."""
        return -(-self.tokens // sequence)

    def read(self, lo: int, hi: int) -> tuple[np.ndarray, ...]:
        """`Shard.read` of up to hi - lo tokens, over the borders of shards."""
        hi = min(hi, self.tokens)
        parts = []
        shard = int(np.searchsorted(self.ends, lo, side="right"))
        while lo < hi:
            base = int(self.ends[shard]) - len(self.shards[shard].tokens)
            end = min(hi, int(self.ends[shard]))
            tokens, *flags, documents = self.shards[shard].read(lo - base, end - base)
            documents = documents + self.first_documents[shard]
            parts.append((tokens.astype(np.int32), *flags, documents))
            lo, shard = end, shard + 1
        return tuple(np.concatenate(arrays) for arrays in zip(*parts))


def read_batch(
    streams: Sequence[Stream], firsts: np.ndarray, rows: np.ndarray, sequence: int
) -> Batch:
    """The rows of a batch.

    Args:
      streams: all of a split.
      firsts: [streams] the number of each stream's first row.
      rows: [batch] row numbers; -1 is a row of padding.
      sequence: tokens in a row.
    """
    shape = (len(rows), sequence + 1)  # one more: the label of a row's last token
    tokens = np.zeros(shape, np.int32)
    start = np.ones(shape, bool)  # padding begins documents, so nothing is its label
    counted = np.zeros(shape, bool)
    documents = np.full(shape, -1, np.int32)
    for i, row in enumerate(rows):
        if row < 0:
            continue
        number = int(np.searchsorted(firsts, row, side="right")) - 1
        lo = int(row - firsts[number]) * sequence
        read = streams[number].read(lo, lo + sequence + 1)
        n = len(read[0])
        tokens[i, :n], start[i, :n], counted[i, :n], documents[i, :n] = read
    labels = np.where(counted[:, 1:] & ~start[:, 1:], tokens[:, 1:], np.int32(-1))
    start, documents = start[:, :-1], documents[:, :-1]
    start[:, 0] = True
    real = documents >= 0
    place = np.arange(sequence, dtype=np.int32)
    begins = np.maximum.accumulate(np.where(start, place, 0), axis=1)
    return {
        "tokens": np.ascontiguousarray(tokens[:, :-1]),
        "labels": labels,
        "segments": np.where(real, np.cumsum(start, axis=1, dtype=np.int32), np.int32(0)),
        "positions": place - begins,
        "documents": np.ascontiguousarray(documents),
    }
