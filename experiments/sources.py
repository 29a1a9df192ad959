"""Where training text and tokens come from.

A source is a word for one place: `stdlib`, a file, a folder or a glob. Its files are
sorted by name, so that the order of documents depends on the files and on nothing else.
A file is read by its suffix: `.jsonl` and `.parquet` hold one document a line or row,
`.bin` holds token ids, everything else is one document of text. A line of `.jsonl` may also
hold a chat, or a prompt and its completion. Text is read whole (it is about to become tokens
in memory); a `.bin` is mapped and never read whole.
"""

import glob
import gzip
import hashlib
import json
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.errors import UserError

# Parts of an installation that are not the standard library's own source.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

# llm.c's header is 256 int32: magic, version, number of tokens, nothing else.
_LLMC_HEADER_BYTES = 1024
_LLMC_FORMATS = {20240520: (1, np.uint16), 20240801: (7, np.uint32)}


class Document(NamedTuple):
    """One piece of text that is never attended to from another."""

    text: bytes  # of a chat: what its messages say, one after the other
    file: str
    line: int = 0  # of the file, from 1, where the document begins; 0: it is the whole file
    prompt: int = 0  # so many bytes are a prompt, which is not learnt; the rest completes it
    chat: dict[str, Any] | None = None  # `messages` and `tools`, for the tokenizer's template

    @property
    def whole(self) -> bool:
        """Whether it makes no sense in parts."""
        return self.prompt > 0 or self.chat is not None

    @property
    def name(self) -> str:
        """`file`, or `file:line`."""
        return f"{self.file}:{self.line}" if self.line else self.file


class TokenFile(NamedTuple):
    """A mapped `.bin` of token ids."""

    file: str
    tokens: np.ndarray  # [n] uint16 or uint32, mapped
    header_bytes: int  # 0: nanoGPT's; 1024: llm.c's


def is_token_file(path: Path) -> bool:
    """Whether `path` holds token ids and not text."""
    return path.suffix == ".bin"


def resolve(source: str) -> list[Path]:
    """The files of a source, sorted.

    Args:
      source: `stdlib` (the running Python's own standard library), a file, a folder (all
        files below it but hidden ones), or a glob (`**` for any depth).

    Returns:
      At least one path.

    Raises:
      UserError: there is no such file, folder or match.
    """
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        paths = [p for p in _walk(root, _NOT_STDLIB) if p.suffix == ".py"]
        problem = f"this Python has no source text of its standard library at {root}"
    else:
        root = Path(source).expanduser()
        if root.is_dir():
            paths = list(_walk(root, {"__pycache__"}))
            problem = f"source folder {source} holds no files"
        elif root.exists():
            paths, problem = [root], f"source {source} is no regular file or folder"
        elif any(character in source for character in "*?["):
            paths = [Path(p) for p in glob.glob(str(root), recursive=True)]
            problem = f"source {source!r} matches no file"
        else:
            paths = []
            problem = f"source {source} does not exist: give 'stdlib', a file, a folder or a glob"
    if files := sorted(p for p in paths if p.is_file()):
        return files
    raise UserError(problem)


def _walk(root: Path, left_out: set[str]) -> Iterator[Path]:
    """Files below `root`, but for hidden ones and for folders of such names."""
    for folder, folders, names in root.walk():
        folders[:] = [f for f in folders if f not in left_out and not f.startswith(".")]
        yield from (folder / name for name in names if not name.startswith("."))


def read_documents(paths: Iterable[Path], field: str) -> Iterator[Document]:
    """Yields the documents of text, `.jsonl` and `.parquet` files, without empty ones.

    Args:
      paths: the files; a name that ends in `.gz` is decompressed.
      field: where a `.jsonl` object or a `.parquet` row holds its text. An object without
        it may have `messages`, or `prompt` and `completion`.

    Raises:
      UserError: a file cannot be read, a line is not JSON, a field is missing, or holds what
        it should not.
    """
    for path in paths:
        suffix = Path(path.name.removesuffix(".gz")).suffix
        read = {".jsonl": _read_jsonl, ".parquet": _read_parquet}.get(suffix, _read_text)
        try:
            yield from (d for d in read(path, field) if d.text or d.chat)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"cannot read {path}: {error}") from error


def _open(path: Path):
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _read_text(path: Path, field: str) -> Iterator[Document]:
    with _open(path) as file:
        yield Document(file.read(), str(path))


def _read_jsonl(path: Path, field: str) -> Iterator[Document]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:  # not JSON, or not UTF-8
                raise UserError(f"{path}:{number}: not JSON: {error}") from error
            if not isinstance(record, dict):
                raise UserError(f"{path}:{number}: not a JSON object with a field {field!r}")
            yield _from_record(record, field, path, number)


def _from_record(record: dict[str, Any], field: str, path: Path, line: int) -> Document:
    """The document of a `.jsonl` object, by the fields that it has."""
    where, file = f"{path}:{line}", str(path)
    by_name = field == "messages" and isinstance(record.get(field), list)  # it is a chat
    if field in record and not by_name:
        return Document(_utf8(record[field], where, field), file, line)
    if "messages" in record:
        messages, tools = check_messages(record["messages"], where), record.get("tools")
        if tools is not None and not _is_objects(tools):
            raise UserError(f"{where}: 'tools' holds no list of objects")
        text = "\n".join(filter(None, map(_said, messages)))
        chat = {"messages": messages, "tools": tools}
        return Document(_utf8(text, where, "messages"), file, line, chat=chat)
    if "prompt" in record and "completion" in record:
        prompt, rest = (_utf8(record[f], where, f) for f in ("prompt", "completion"))
        return Document(prompt + rest, file, line, prompt=len(prompt))
    raise UserError(
        f"{where}: no field {field!r}; it has: {', '.join(record) or 'none'}; legal are also "
        "'messages', or 'prompt' and 'completion'"
    )


def check_messages(messages: object, where: str) -> list[dict[str, Any]]:
    """The messages of a chat, once they are found to be such.

    Args:
      messages: should be a list of objects, each with a `role` and a `content`: a string, or
        a list of `{"type": "text", "text": ...}`. Who calls tools need not say anything.
      where: their name in an error.

    Raises:
      UserError: they are not.
    """
    if not isinstance(messages, list) or not messages or not _is_objects(messages):
        raise UserError(f"{where}: 'messages' holds no list of {{role, content}} objects")
    for number, message in enumerate(messages, 1):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise UserError(
                f"{where}: message {number}: its 'role' is {_short(role)}, not a name such as "
                "'system', 'user' or 'assistant'"
            )
        if isinstance(content, str) or (content is None and message.get("tool_calls")):
            continue
        parts = content if isinstance(content, list) else [content]
        if bad := [part for part in parts if not _is_text(part)]:
            raise UserError(
                f"{where}: message {number}: its 'content' holds {_short(bad[0])}: legal are a "
                'string, and a list of {"type": "text", "text": ...}'
            )
    return messages


def _is_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _is_text(part: object) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


def _short(value: object) -> str:
    return text if len(text := repr(value)) <= 60 else f"{text[:57]}..."


def _said(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _read_parquet(path: Path, field: str) -> Iterator[Document]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UserError(f"{path}: needs pyarrow: pip install 'jaxaccel[parquet]'") from error
    try:
        with pq.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if field not in columns:
                raise UserError(f"{path}: no column {field!r}; it has: {', '.join(columns)}")
            row = 0
            for batch in file.iter_batches(columns=[field]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield Document(_utf8(value, f"{path}:{row}", field), str(path), row)
    except pa.ArrowInvalid as error:
        raise UserError(f"cannot read {path}: {str(error).splitlines()[0]}") from error


def _utf8(value: object, where: str, field: str) -> bytes:
    if not isinstance(value, str):
        raise UserError(f"{where}: {field!r} holds {type(value).__name__}, not text")
    # JSON can escape half of a surrogate pair; those bytes are for the tokenizer to judge.
    return value.encode("utf-8", "surrogatepass")


def split_documents(
    documents: list[Document], fraction: float, source: str
) -> tuple[list[Document], list[Document]]:
    """Training and validation documents, by a hash of the text: equal texts stay together.

    Args:
      documents: at least one.
      fraction: of the documents, to hold out; with 0 there are no validation documents.
      source: their name in an error.

    Returns:
      Both sides. Where the hash leaves one empty (few documents), the tail of the longest
      document is held out; among chats and completions, which are not cut, one of them.

    Raises:
      UserError: the text is too short to be cut in two.
    """
    if fraction == 0:
        return documents, []
    digests = [hashlib.blake2b(d.text, digest_size=8).digest() for d in documents]
    least = [int.from_bytes(digest) for digest in digests]
    limit = fraction * 2**64
    if any(d.whole for d in documents) and not min(least) < limit <= max(least):
        if min(least) == max(least):
            raise UserError(
                f"source {source} holds one chat or completion: too little to hold out "
                "validation; give --data.validation"
            )
        # The nearest limit that leaves neither side empty.
        limit = min(n for n in least if n > min(least)) if limit <= min(least) else max(least)
    train, held = [], []
    for document, number in zip(documents, least):
        (held if number < limit else train).append(document)
    if train and held:
        return train, held
    longest = max(documents, key=lambda document: len(document.text))
    head, tail = _cut(longest, fraction * sum(len(d.text) for d in documents), source)
    rest = [document for document in documents if document is not longest]
    return ([*rest, head], [tail]) if train else ([head], [*rest, tail])


def _cut(document: Document, tail_bytes: float, source: str) -> tuple[Document, Document]:
    """Cuts off about so many bytes, at most half: at a line end, or else between characters."""
    text = document.text
    if len(text) < 8:
        raise UserError(
            f"source {source} holds {len(text)} bytes of text: too little to hold out validation"
        )
    cut = len(text) - min(max(1, round(tail_bytes)), len(text) // 2)
    if line_end := text.rfind(b"\n", len(text) // 4, cut) + 1:
        cut = line_end
    else:  # at the character's first byte; where there is none within 4 bytes it is not UTF-8
        cut = next((at for at in range(cut, cut - 4, -1) if text[at] & 0xC0 != 0x80), cut)
    line = document.line or 1 + text.count(b"\n", 0, cut)
    return document._replace(text=text[:cut]), Document(text[cut:], document.file, line)


def open_tokens(path: Path, vocab_size: int) -> TokenFile:
    """Maps a `.bin` of token ids, reading only its header.

    llm.c's files begin with 256 int32 (magic 20240520: uint16 ids; 20240801: uint32 ids).
    Any other file is headerless, as nanoGPT writes it: uint16 where the vocabulary fits in
    it, else uint32.

    Raises:
      UserError: the file is unreadable, cut short, or of an unknown version.
    """
    try:
        size = os.path.getsize(path)
        with path.open("rb") as file:
            header = np.frombuffer(file.read(12), np.dtype("<i4")) if size >= 12 else np.zeros(3)
        magic, version, count = (int(x) for x in header)
        if magic in _LLMC_FORMATS:
            legal, dtype = _LLMC_FORMATS[magic]
            if version != legal:
                raise UserError(f"{path}: llm.c header of version {version}, known is {legal}")
            offset = _LLMC_HEADER_BYTES
            expected = offset + count * np.dtype(dtype).itemsize
            if size != expected:
                raise UserError(f"{path}: {size} bytes where its header promises {expected}")
        else:
            dtype, offset = np.uint16 if vocab_size <= 1 << 16 else np.uint32, 0
            if size % np.dtype(dtype).itemsize:
                raise UserError(f"{path}: {size} bytes is no whole number of {dtype.__name__} ids")
        if size <= offset:
            return TokenFile(str(path), np.zeros(0, dtype), offset)
        mapped = np.memmap(path, np.dtype(dtype).newbyteorder("<"), mode="r", offset=offset)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error}") from error
    # A plain view: slicing np.memmap itself costs more than reading the row.
    return TokenFile(str(path), np.asarray(mapped), offset)
