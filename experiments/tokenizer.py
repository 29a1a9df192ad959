"""Tokenizers: bytes, or a Hugging Face `tokenizer.json`.

    python -m experiments.tokenizer --data.source notes/ --vocab-size 4096 --out tokenizer.json

trains a byte-level BPE on the training split of a source. Bytes are the default of the
programs: no vocabulary to train, and loss in nats per byte without conversion. What Hugging
Face keeps beside a tokenizer.json, above all the template of its chats, belongs to it.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from experiments import cli
from experiments.data import DataConfig, training_documents
from experiments.errors import UserError

# Usual names of the special tokens that begin and end a document, the most telling first.
# GPT-2 has one for both.
_BOS = ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]", "<|startoftext|>", "<|endoftext|>")
_EOS = ("<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|endoftext|>")

BOS, EOS = _BOS[0], _EOS[0]  # of tokenizers that are made here
# What lies beside a tokenizer.json and belongs to it.
_COMPANIONS = (
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "generation_config.json",
)

Offsets = tuple[np.ndarray, np.ndarray]  # ids [n] int32; from and to of each in the text [n, 2]


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back; made by `load`."""

    name: str
    vocab_size: int
    bos: int | None  # id that begins a document
    eos: int | None  # id that ends a document
    fingerprint: str  # equal for equal mappings from text and chats to ids
    _encode: Callable[[Sequence], list[np.ndarray]]
    _encode_offsets: Callable[[Sequence, bool], list[Offsets]]
    _decode: Callable[[list[int]], str]
    _wants_str: bool
    special_ids: tuple[int, ...]  # ids that stand for no text
    chat_template: str | None = None  # Jinja, for `experiments.chat`
    # By the names that a chat template has for them: `bos_token`, `eos_token`, ...
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)

    def encode(self, text: bytes, name: str = "text") -> np.ndarray:
        """`text` as ids, [n] int32, without `bos` and `eos`; see `encode_batch`."""
        return self.encode_batch([text], [name])[0]

    def encode_batch(self, texts: Sequence[bytes], names: Sequence[str]) -> list[np.ndarray]:
        """Texts as ids, on all cores where the tokenizer can.

        Args:
          texts: raw bytes.
          names: what to call each text in an error.

        Returns:
          For each text its ids, [n] int32, without `bos` and `eos`. The name of a special
          token within the text is text like any other.

        Raises:
          UserError: a text is not UTF-8 and the tokenizer needs it to be.
        """
        return self._encode(self._input(texts, names))

    def encode_offsets(
        self, texts: Sequence[bytes], names: Sequence[str], *, special: bool = False
    ) -> list[Offsets]:
        """Texts as ids, and where in the text each comes from.

        Args:
          texts: raw bytes.
          names: what to call each text in an error.
          special: the name of a special token within a text is that token, and not text.

        Returns:
          For each text its ids, [n] int32, without a `bos` and `eos` of the tokenizer's own,
          and the byte where each begins and ends, [n, 2] int64. Ids that share a character
          have all of it.

        Raises:
          UserError: a text is not UTF-8 and the tokenizer needs it to be.
        """
        found = self._encode_offsets(self._input(texts, names), special)
        if not self._wants_str:
            return found
        return [
            (ids, offsets if text.isascii() else _to_bytes(text, offsets))
            for (ids, offsets), text in zip(found, texts, strict=True)
        ]

    def _input(self, texts: Sequence[bytes], names: Sequence[str]) -> Sequence:
        """Texts as the tokenizer wants them."""
        if not self._wants_str:
            return texts
        decoded = []
        for text, name in zip(texts, names, strict=True):
            try:
                decoded.append(text.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{name}: byte {error.start} is not UTF-8, which {self.name} needs; "
                    "convert the file, or take the tokenizer 'bytes'"
                ) from error
        return decoded

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Ids as text, special tokens left out, U+FFFD for what is not UTF-8."""
        return self._decode([int(i) for i in ids])

    def stream(self) -> "StreamDecoder":
        """A decoder of ids that come one by one."""
        return StreamDecoder(self)


class StreamDecoder:
    """Decodes ids as they come; holds back a character until it is whole.

    What `push` and `flush` return, joined, is `tokenizer.decode` of all ids. Decoding in
    windows that begin at a whole character keeps it linear in the number of ids, and right
    for decoders that treat the first token of a text differently.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._window: list[int] = []  # the ids shown last, then those held back
        self._shown = 0  # how many of the window are shown
        self._shown_text = ""

    def push(self, token: int) -> str:
        """The text that `token` completes, possibly none."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        new = text[len(self._shown_text) :]
        if new:
            self._window = self._window[self._shown :]
            self._shown = len(self._window)
            self._shown_text = self._tokenizer.decode(self._window)
        return new

    def flush(self) -> str:
        """What is still held back, at the end."""
        new = self._tokenizer.decode(self._window)[len(self._shown_text) :]
        self._window, self._shown, self._shown_text = [], 0, ""
        return new


def load(spec: str) -> Tokenizer:
    """A tokenizer by name.

    Args:
      spec: `bytes` (ids 0 to 255 are bytes, 256 begins a document, 257 ends it), or the path
        of a Hugging Face `tokenizer.json` or of a folder that holds one. What lies beside it
        may bring a chat template: `chat_template.jinja`, else `tokenizer_config.json`.

    Raises:
      UserError: there is no such file, or it holds no tokenizer.

    Example:
      >>> load("bytes").encode("né".encode()).tolist()
      [110, 195, 169]
    """
    if spec == "bytes":
        encode = lambda text: np.frombuffer(text, np.uint8).astype(np.int32)
        return Tokenizer(
            name="bytes",
            vocab_size=258,
            bos=256,
            eos=257,
            fingerprint="bytes-256-257",
            _encode=lambda texts: [encode(t) for t in texts],
            _encode_offsets=lambda texts, _: [
                (encode(t), np.arange(len(t))[:, None] + np.array([0, 1])) for t in texts
            ],
            _decode=lambda ids: bytes(i for i in ids if i < 256).decode("utf-8", "replace"),
            _wants_str=False,
            special_ids=(256, 257),
        )
    found = files(spec)
    try:
        text = found["tokenizer.json"].read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read tokenizer {spec}: {error}; give 'bytes' or a tokenizer.json, or a "
            "folder that holds one"
        ) from error
    try:
        model = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{spec} is no tokenizer.json: {error}") from error
    settings = _read_object(found.get("tokenizer_config.json"))
    chat = _chat_settings(found, settings)
    return _from_model(model, json.loads(text), spec, settings, *chat)


def files(spec: str) -> dict[str, Path]:
    """The files of a tokenizer by name: tokenizer.json, and what belongs to it and is there.

    Args:
      spec: as `load` takes it; `bytes` has no files.
    """
    if spec == "bytes":
        return {}
    path = Path(spec).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    beside = {name: path.parent / name for name in _COMPANIONS}
    return {"tokenizer.json": path} | {n: p for n, p in beside.items() if p.is_file()}


def _chat_settings(
    found: Mapping[str, Path], config: Mapping[str, Any]
) -> tuple[str | None, dict[str, str]]:
    """The chat template of a tokenizer, and the special tokens that it may name."""
    special = {}
    for key, value in [
        *_read_object(found.get("special_tokens_map.json")).items(),
        *config.items(),
    ]:
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            special[key] = text
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
        template = named[0].get("template") if named else None
    if path := found.get("chat_template.jinja"):
        try:
            template = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read {path}: {error}") from error
    return template if isinstance(template, str) else None, special


def _read_object(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"cannot read {path}: it holds no JSON object")
    return content


def _from_model(
    model: tokenizers.Tokenizer,
    content: dict[str, Any],
    name: str,
    settings: Mapping[str, Any],
    chat_template: str | None,
    special_tokens: Mapping[str, str],
) -> Tokenizer:
    # A file may ask to cut or pad every text: right for classifiers, wrong for a corpus.
    model.no_truncation()
    model.no_padding()
    # It would add special tokens, which nobody asks for here, and take the spaces at a
    # token's ends out of its offsets.
    model.post_processor = None  # type: ignore
    # "<|endoftext|>" spelt out in a document is text, not the end of the document.
    model.encode_special_tokens = True
    begin, end = _template(content.get("post_processor"))
    first = lambda names: next((i for n in names if (i := model.token_to_id(n)) is not None), None)
    bos, eos = guessed = first([*begin, *_BOS]), first([*end, *_EOS])
    if settings:  # as transformers does it, which begins a text with what it is told to
        told = [special_tokens.get("bos_token", "")] if settings.get("add_bos_token") else []
        bos = first([*begin, *told])
        eos = first([*end, special_tokens.get("eos_token", ""), *_EOS])
    mapping = {k: v for k, v in content.items() if k not in ("truncation", "padding", "version")}
    canonical = json.dumps(mapping, sort_keys=True).encode()
    if chat_template is not None:
        canonical += json.dumps([chat_template, dict(special_tokens)], sort_keys=True).encode()
    if (bos, eos) != guessed:
        canonical += json.dumps([bos, eos]).encode()

    def encode(texts):
        encodings = model.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(e.ids, np.int32) for e in encodings]

    def encode_offsets(texts, special):
        model.encode_special_tokens = not special
        try:
            encodings = model.encode_batch(list(texts), add_special_tokens=False)
        finally:
            model.encode_special_tokens = True
        return [
            (np.array(e.ids, np.int32), np.array(e.offsets, np.int64).reshape(-1, 2))
            for e in encodings
        ]

    added = model.get_added_tokens_decoder().items()
    return Tokenizer(
        name=name,
        vocab_size=max(model.get_vocab(with_added_tokens=True).values()) + 1,
        bos=bos,
        eos=eos,
        fingerprint=hashlib.sha256(canonical).hexdigest()[:16],
        _encode=encode,
        _encode_offsets=encode_offsets,
        _decode=lambda ids: model.decode(ids, skip_special_tokens=True),
        _wants_str=True,
        chat_template=chat_template,
        special_tokens=special_tokens,
        special_ids=tuple(i for i, token in added if token.special),
    )


def _to_bytes(text: bytes, offsets: np.ndarray) -> np.ndarray:
    """Offsets in characters as offsets in bytes: a character begins where no 0b10xxxxxx is."""
    begins = np.flatnonzero(np.frombuffer(text, np.uint8) & 0xC0 != 0x80)
    return np.append(begins, len(text))[offsets]


def _template(processor: dict | None) -> tuple[list[str], list[str]]:
    """Names of the special tokens that a post-processor puts before and after a text."""
    begin, end = [], []
    for part in (processor or {}).get("processors", [processor or {}]):
        pieces = part.get("single", []) if part.get("type") == "TemplateProcessing" else []
        names = [piece.get("SpecialToken", {}).get("id") for piece in pieces]
        middle = names.index(None) if None in names else len(names)
        begin += names[:middle]
        end += [name for name in names[middle:] if name]
    return begin, end


def train_bpe(documents: Iterator[bytes], vocab_size: int) -> tokenizers.Tokenizer:
    """Trains a byte-level BPE: any text round-trips, nothing is unknown.

    Args:
      documents: UTF-8 text.
      vocab_size: ids in all, at least 258 (every byte and the two special tokens).

    Returns:
      A tokenizer with `<|begin_of_text|>` and `<|end_of_text|>`; fewer ids than asked for
      where the text holds fewer pairs.

    Raises:
      UserError: the vocabulary is too small.
    """
    if vocab_size < 258:
        raise UserError(f"vocab-size {vocab_size} is below 258: 256 bytes and 2 special tokens")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator((text.decode("utf-8") for text in documents), trainer)
    return model


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Train a byte-level BPE on the training split of a source."""

    out: Path
    """The tokenizer.json to write."""
    vocab_size: int = 4096
    """Number of ids, special tokens included."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)


def main(config: TrainConfig) -> None:
    """Writes `config.out` and says what it holds."""
    documents = training_documents(config.data)
    for document in documents:
        try:
            document.text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{document.name}: byte {error.start} is not UTF-8") from error
    model = train_bpe((document.text for document in documents), config.vocab_size)
    try:
        config.out.write_text(model.to_str(pretty=True), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {config.out}: {error}") from error
    size = sum(len(document.text) for document in documents)
    ids, count = model.get_vocab_size(), len(documents)
    print(f"{config.out}: {ids:,} ids from {count:,} documents, {size:,} bytes")


if __name__ == "__main__":
    cli.run(main, TrainConfig)
