"""Continues a text with a trained model: `python -m experiments.generate --run DIR`.

    python -m experiments.generate --run runs/tiny --prompt "def " --temperature 0.7

prints the prompt and what the newest checkpoint makes of it, as it is made.
"""

import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments import cli
from experiments.errors import UserError, user_errors
from experiments.run import load_run
from experiments.tokenizer import Tokenizer
from jaxaccel import decode, precision
from jaxaccel.nn import Decoder


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """Continue a text with a trained model."""

    run: Path
    """Folder of a training run."""
    prompt: str = ""
    """The text to continue; empty: begin a new document."""
    max_new_tokens: int = 200
    """Tokens to make at most; fewer where a document ends, or the model's context does."""
    temperature: float = 0.8
    """0: always the likeliest token; 1: as the model has it."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that hold this share of the probability."""
    seed: int = 0
    """The same seed gives the same text."""


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """A prompt as a document begins in training: `bos`, where there is one, and the text.

    Raises:
      UserError: there is nothing to begin with.
    """
    # Bytes of the command line that are not UTF-8 come as escapes: undone, they are bytes.
    ids = tokenizer.encode(prompt.encode("utf-8", "surrogateescape"), "the prompt").tolist()
    if tokenizer.bos is not None:
        ids = [tokenizer.bos, *ids]
    if not ids:
        raise UserError(
            f"the prompt is empty, and tokenizer {tokenizer.name} has no token that begins a "
            "text: pass --prompt"
        )
    return ids


def stream_text(
    decoder: Decoder, tokenizer: Tokenizer, ids: Sequence[int], **options: Any
) -> Iterator[str]:
    """What the decoder adds to a prompt, in pieces of whole characters.

    Args:
      decoder: with the vocabulary of `tokenizer`.
      tokenizer: for the end of a document, and for text.
      ids: from `prompt_ids`.
      **options: `jaxaccel.decode.generate`'s.

    Returns:
      An iterator of text; each piece comes as soon as it is made.

    Raises:
      UserError: an option is out of its range; at the call.
    """
    stop = () if tokenizer.eos is None else (tokenizer.eos,)
    with user_errors():
        tokens = decode.generate(decoder, ids, stop=stop, **options)

    def pieces() -> Iterator[str]:
        text = tokenizer.stream()
        for token in tokens:
            if piece := text.push(token):
                yield piece
        if rest := text.flush():
            yield rest

    return pieces()


def complete(decoder: Decoder, tokenizer: Tokenizer, prompt: str, **options: Any) -> str:
    """What the decoder adds to `prompt`; options as `jaxaccel.decode.generate`'s."""
    return "".join(stream_text(decoder, tokenizer, prompt_ids(tokenizer, prompt), **options))


def main(config: GenerateConfig) -> None:
    """Prints the prompt and its continuation."""
    run = load_run(config.run)
    ids = prompt_ids(run.tokenizer, config.prompt)
    context = run.config.sequence
    room = context - len(ids)
    if room < 1:
        raise UserError(
            f"the prompt has {len(ids)} tokens, and the model was trained on {context} at once: "
            f"shorten it to {context - 1} or fewer"
        )
    pieces = stream_text(
        run.decoder(dtype=precision.COMPUTE_DTYPES[run.config.precision]),
        run.tokenizer,
        ids,
        max_new_tokens=min(config.max_new_tokens, room),
        temperature=config.temperature,
        top_p=config.top_p,
        seed=config.seed,
    )
    if config.max_new_tokens > room:
        print(
            f"note: at most {room} new tokens: the model's context is {context}, the prompt "
            f"takes {len(ids)}",
            file=sys.stderr,
        )
    try:
        _show(config.prompt)
        for piece in pieces:
            _show(piece)
        _show("\n")
    except BrokenPipeError:
        # The reader has enough, say `head`; nor must anything be flushed to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show(text: str) -> None:
    """Prints at once; what the terminal cannot show becomes a question mark."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), end="", flush=True)


if __name__ == "__main__":
    cli.run(main, GenerateConfig)
