"""What a document becomes: its tokens, and which of them count in the loss.

A text counts whole, of a prompt and its completion the completion does, of a chat what the
assistant says. A chat is written by the template that the tokenizer brings along, a Jinja
program of `tokenizer_config.json` or `chat_template.jinja`, run in Jinja's sandbox under
the names and options that transformers gives it. Where the assistant speaks is

- what the template has between `{% generation %}` and `{% endgeneration %}`, if it has such;
- else, for each of the assistant's messages, what it adds to the chat so far, begun by
  what the template writes to make a model answer. That needs a template that writes the
  beginning of a chat the same however the chat goes on; another one is refused.

A token counts where any of it lies there.

What could be better: the second way renders a chat of n answers 2 n + 1 times, on one core.
"""

import datetime
import functools
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from experiments.errors import UserError
from experiments.sources import Document, check_messages

if TYPE_CHECKING:
    import jinja2

    from experiments.tokenizer import Tokenizer

# They bracket what a generation block writes, and are taken out again. Unicode keeps them
# for a program's own use: no text holds them.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"

Span = tuple[int, int]  # from and to, in bytes of the text


class Encoded(NamedTuple):
    """The tokens of a document."""

    ids: np.ndarray  # [n] int32
    counted: np.ndarray | None  # [n] bool: which are to be predicted; None: all
    bytes: int  # of the text that is; a special token's name is no text


def encode(documents: Sequence[Document], tokenizer: "Tokenizer") -> list[Encoded]:
    """Tokenizes documents of all kinds.

    A text, and a prompt with its completion, are put between `bos` and `eos`, where the
    tokenizer has them; a chat has what its template writes.

    Args:
      documents: read by `sources.read_documents`.
      tokenizer: made by `experiments.tokenizer.load`.

    Returns:
      The tokens of each document.

    Raises:
      UserError: there is no chat template, it refuses a chat, nothing in a chat is the
        assistant's, or a text is not UTF-8.
    """
    bos = [tokenizer.bos] if tokenizer.bos is not None else []
    eos = [tokenizer.eos] if tokenizer.eos is not None else []
    ended = lambda ids: np.array([*bos, *ids, *eos], np.int32)
    found: dict[int, Encoded] = {}

    texts = {i: d for i, d in enumerate(documents) if not d.whole}
    batch = [d.text for d in texts.values()], [d.name for d in texts.values()]
    for (i, document), ids in zip(texts.items(), tokenizer.encode_batch(*batch)):
        found[i] = Encoded(ended(ids), None, len(document.text))

    pairs = {i: d for i, d in enumerate(documents) if d.prompt}
    batch = [d.text for d in pairs.values()], [d.name for d in pairs.values()]
    for (i, document), (ids, offsets) in zip(pairs.items(), tokenizer.encode_offsets(*batch)):
        size = len(document.text)
        inside = _overlap(offsets, [(document.prompt, size)]) > 0
        counted = np.array([*[False] * len(bos), *inside, *[True] * len(eos)], bool)
        found[i] = Encoded(ended(ids), counted, size - document.prompt)

    chats = {i: _render_spans(tokenizer, d) for i, d in enumerate(documents) if d.chat}
    batch = [text for text, _ in chats.values()], [documents[i].name for i in chats]
    encoded = tokenizer.encode_offsets(*batch, special=True)
    for (i, (_, spans)), (ids, offsets) in zip(chats.items(), encoded):
        inside = _overlap(offsets, spans)
        names = int(inside[np.isin(ids, tokenizer.special_ids)].sum())
        found[i] = Encoded(ids, inside > 0, sum(hi - lo for lo, hi in spans) - names)
    return [found[i] for i in range(len(documents))]


def prompt(tokenizer: "Tokenizer", messages: list[dict[str, Any]]) -> np.ndarray:
    """A chat so far as ids, and what makes a model answer: the prompt of its next message.

    Args:
      tokenizer: one with a chat template.
      messages: each with a `role` and a `content`.

    Returns:
      [n] int32. The name of a special token within a message is that token, as it is in
      training, and as transformers has it.

    Raises:
      UserError: there is no chat template, it refuses the chat, or a message is none.
    """
    name = "the chat"
    text = _render(tokenizer, name, check_messages(messages, name), ask=True)
    text = _utf8(text.replace(_OPEN, "").replace(_CLOSE, ""), name)
    return tokenizer.encode_offsets([text], [name], special=True)[0][0]


def _overlap(offsets: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """[n]: how many bytes of each token lie in a span."""
    lo, hi = np.array(spans, np.int64).reshape(-1, 2).T
    inside = np.minimum(offsets[:, 1:], hi) - np.maximum(offsets[:, :1], lo)
    return np.maximum(inside, 0).sum(axis=1)


def _render_spans(tokenizer: "Tokenizer", document: Document) -> tuple[bytes, list[Span]]:
    """A chat as its template writes it, and where in it the assistant speaks."""
    assert document.chat is not None
    name, messages, tools = document.name, document.chat["messages"], document.chat["tools"]
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError(f"{name}: no message is of the role 'assistant', so nothing would count")
    render = functools.partial(_render, tokenizer, name, tools=tools)
    whole = render(messages)
    if _compile(tokenizer.chat_template)[1]:
        return _between_marks(whole, name)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = render(messages[:i], ask=True), render(messages[: i + 1])
        if not (whole.startswith(after) and after.startswith(before)):
            raise UserError(
                f"{name}: message {i + 1}: the chat template begins a chat in another way where "
                "more of it follows, so that what the assistant says cannot be told: put "
                "{% generation %} and {% endgeneration %} around that in the template"
            )
        spans.append((len(_utf8(before, name)), len(_utf8(after, name))))
    return _utf8(whole, name), spans


def _between_marks(text: str, name: str) -> tuple[bytes, list[Span]]:
    """The text without marks, and the spans that were between them."""
    pieces, spans, at, begin = [], [], 0, 0
    for piece in re.split(f"([{_OPEN}{_CLOSE}])", text):
        if piece == _OPEN:
            begin = at
        elif piece == _CLOSE:
            spans.append((begin, at))
        else:
            pieces.append(_utf8(piece, name))
            at += len(pieces[-1])
    return b"".join(pieces), spans


def _utf8(text: str, name: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can escape one half of a pair
        raise UserError(
            f"{name}: holds half of a surrogate pair, {text[error.start]!a}, which is no character"
        ) from error


def _render(
    tokenizer: "Tokenizer",
    name: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    ask: bool = False,
) -> str:
    """A chat as the tokenizer's template writes it, with marks around generation blocks."""
    import jinja2

    if tokenizer.chat_template is None:
        raise UserError(
            f"{name}: tokenizer {tokenizer.name} has no chat template: put its "
            "chat_template.jinja, or a tokenizer_config.json that holds one, beside its "
            "tokenizer.json"
        )
    try:
        template, marks = _compile(tokenizer.chat_template)
    except jinja2.TemplateError as error:
        line = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise UserError(
            f"the chat template of tokenizer {tokenizer.name} has an error{line}: {_line(error)}"
        ) from error
    if marks and re.search(
        f"[{_OPEN}{_CLOSE}]", json.dumps(messages, ensure_ascii=False, default=str)
    ):
        raise UserError(f"{name}: holds U+FDD0 or U+FDD1, which is no character")
    try:
        return template.render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=ask,
            **tokenizer.special_tokens,
        )
    except Exception as error:  # a template is a program: it may fail in any way
        raise UserError(f"{name}: the chat template refuses it: {_line(error)}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


@functools.lru_cache(maxsize=8)
def _compile(source: str) -> tuple["jinja2.Template", bool]:
    """A chat template, and whether it marks what the assistant says."""
    import jinja2.ext
    import jinja2.sandbox  # not at the top: `--help` should not wait for it
    from jinja2 import nodes

    class Generation(jinja2.ext.Extension):
        """`{% generation %}`: what the block writes, between marks."""

        tags = {"generation"}  # noqa: RUF012 (jinja2's own way)

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            mark = lambda text: nodes.Output([nodes.TemplateData(text)])
            # A scope, as transformers has it: what is set in the block stays in it.
            return nodes.Scope([mark(_OPEN), *body, mark(_CLOSE)], lineno=line)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    tree = environment.parse(source)
    marks = any(data.data == _OPEN for data in tree.find_all(nodes.TemplateData))
    own = {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
    }
    return environment.from_string(tree, globals=own), marks


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """JSON as transformers writes it: Jinja's own filter escapes what HTML needs escaped."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)
