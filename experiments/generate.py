"""Continues a text with a trained model: `python -m experiments.generate --run DIR`.

    python -m experiments.generate --run runs/tiny --prompt "def " --temperature 0.7
    python -m experiments.generate --run runs/mtp --prompt "def " --speculative --gamma 2
    python -m experiments.generate --model FOLDER --prompt "Who are you?" --chat

prints the prompt and what the newest checkpoint of a run makes of it, or a released model in a
folder of Hugging Face's format, as it is made. With --speculative the model's own heads
(--mtp.depth of training) draft tokens that one pass verifies: the text is the same, and the last
lines say how much sooner it came.
"""

import dataclasses
import os
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from experiments import chat, cli
from experiments.errors import UserError, user_errors
from experiments.tokenizer import Tokenizer
from experiments.trained import open_trained
from jaxaccel import decode
from jaxaccel.decode import Burst, Sampling
from jaxaccel.nn import Decoder, MtpConfig

CACHES = {"auto": None, "bfloat16": jnp.bfloat16, "fp8": jnp.float8_e4m3fn}


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """Continue a text with a trained model."""

    run: Path | None = None
    """Folder of a training run."""
    model: Path | None = None
    """Folder of a released model, instead."""
    prompt: str = ""
    """The text to continue; empty: begin a new document."""
    chat: bool = False
    """The prompt is what a user says: put it into the tokenizer's chat template, and answer."""
    max_new_tokens: int = 200
    """Tokens to make at most; fewer where a document ends, or the model's context does."""
    temperature: float = 0.8
    """0: always the likeliest token; 1: as the model has it."""
    top_k: int = 0
    """Draw from so many likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that hold this share of the probability."""
    seed: int = 0
    """The same seed gives the same text."""
    cache: Literal["auto", "bfloat16", "fp8"] = "auto"
    """Type of the key/value cache; auto: the precision of the run."""
    speculative: bool = False
    """Draft with the heads that the model was trained with, and compare with plain decoding."""
    gamma: int | None = None
    """Tokens drafted for each pass; without: as many as there are heads."""


@dataclasses.dataclass
class Tally:
    """Counts what passes by."""

    tokens: int = 0
    passes: int = 0
    drafted: Any = 0  # int [G]: by place after the last known token
    accepted: Any = 0
    seconds: float = 0.0

    def watch(self, bursts: Iterable[Burst]) -> Iterator[Burst]:
        """The same bursts; the time of making them counts, and that of using them does not."""
        start = time.perf_counter()
        for burst in bursts:
            self.seconds += time.perf_counter() - start
            self.tokens += sum(map(len, burst.tokens))
            self.passes += burst.passes
            self.drafted = self.drafted + burst.drafted
            self.accepted = self.accepted + burst.accepted
            yield burst
            start = time.perf_counter()

    @property
    def tokens_per_second(self) -> float:
        """Over all, reading the prompt included."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Of the model."""
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def acceptance(self) -> list[float]:
        """Share of the drafts that were accepted, by place; a draft after a refused one is not."""
        return (self.accepted / np.maximum(self.drafted, 1)).tolist()


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


def bursts_of(
    decoder: Decoder,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    stop: Collection[int] = (),
    **options: Any,
) -> Iterator[Burst]:
    """`jaxaccel.decode.stream` of one prompt, which ends where a document does, or at a `stop`.

    Raises:
      UserError: an option is out of its range; at the call.
    """
    stop = {*stop} if tokenizer.eos is None else {*stop, tokenizer.eos}
    with user_errors():
        return decode.stream(decoder, [ids], stop=stop, **options)


def text_of(tokenizer: Tokenizer, bursts: Iterable[Burst]) -> Iterator[str]:
    """The first row's tokens as text, in pieces of whole characters."""
    text = tokenizer.stream()
    for burst in bursts:
        for token in burst.tokens[0]:
            if piece := text.push(token):
                yield piece
    if rest := text.flush():
        yield rest


def complete(decoder: Decoder, tokenizer: Tokenizer, prompt: str, **options: Any) -> str:
    """What the decoder adds to `prompt`; options as `jaxaccel.decode.stream`'s."""
    ids = prompt_ids(tokenizer, prompt)
    return "".join(text_of(tokenizer, bursts_of(decoder, tokenizer, ids, **options)))


def drafts_of(folder: Path, mtp: MtpConfig, gamma: int | None) -> int:
    """Drafts of a pass: as asked for, or as many as the model's heads make.

    Raises:
      UserError: the model has no heads.
    """
    depth = mtp.depth
    if not depth:
        raise UserError(
            f"{folder} was trained without heads that could draft: train with --mtp.depth 1 "
            "(python -m experiments.train --run-dir DIR --mtp.depth 1)"
        )
    if gamma is not None and gamma < 1:
        raise UserError(f"--gamma is {gamma}; it must be at least 1: leave out --speculative")
    return depth if gamma is None else gamma


def main(config: GenerateConfig) -> None:
    """Prints the prompt and its continuation."""
    if config.gamma is not None and not config.speculative:
        raise UserError("--gamma is for --speculative: pass both")
    trained = open_trained(config.run, config.model)
    tokenizer, context = trained.tokenizer, trained.context
    if config.chat:
        ids = chat.prompt(tokenizer, [{"role": "user", "content": config.prompt}]).tolist()
    else:
        ids = prompt_ids(tokenizer, config.prompt)
    room = context - len(ids)
    if room < 1:
        raise UserError(
            f"the prompt has {len(ids)} tokens, and the model was made for {context} at once: "
            f"shorten it to {context - 1} or fewer"
        )
    with user_errors():
        sampling = Sampling(config.temperature, config.top_k, config.top_p, config.seed)
    gamma = drafts_of(trained.folder, trained.mtp, config.gamma) if config.speculative else 0
    decoder = trained.decoder()
    options = {
        "stop": trained.stop,
        "max_new_tokens": min(config.max_new_tokens, room),
        "sampling": sampling,
        "cache_dtype": CACHES[config.cache],
    }
    make = lambda gamma: bursts_of(decoder, tokenizer, ids, gamma=gamma, **options)
    make(gamma)  # refuses bad options before anything is printed
    if config.max_new_tokens > room:
        print(
            f"note: at most {room} new token{'s' * (room > 1)}: the model's context is {context}, "
            f"the prompt takes {len(ids)}",
            file=sys.stderr,
        )
    if config.speculative:  # compiled before the clocks start
        for drafts in (0, gamma):
            next(make(drafts), None)
    made = Tally()
    try:
        if not config.chat:
            _show(config.prompt)
        for piece in text_of(tokenizer, made.watch(make(gamma))):
            _show(piece)
        _show("\n")
    except BrokenPipeError:
        # The reader has enough, say `head`; nor must anything be flushed to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    if config.speculative:
        plain = Tally()
        for _ in plain.watch(make(0)):
            pass
        print(report(made, plain), file=sys.stderr)


def report(made: Tally, plain: Tally) -> str:
    """What speculation brought, against plain decoding of the same prompt."""
    if not np.sum(made.drafted):
        return "speculative: no draft was verified, the text is too short"
    places = ", ".join(f"{share:.0%}" for share in made.acceptance)
    return (
        f"speculative: {made.tokens_per_second:,.1f} tokens/s, {made.tokens_per_pass:.2f} tokens a "
        f"pass, drafts accepted by place: {places}\n"
        f"plain:       {plain.tokens_per_second:,.1f} tokens/s, {plain.tokens_per_pass:.2f} tokens "
        f"a pass; speculation is {plain.seconds / max(made.seconds, 1e-9):.2f} times as fast "
        "(measured once, the prompt included)"
    )


def _show(text: str) -> None:
    """Prints at once; what the terminal cannot show becomes a question mark."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), end="", flush=True)


if __name__ == "__main__":
    cli.run(main, GenerateConfig)
