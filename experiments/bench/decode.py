"""Speculative against plain decoding: `python -m experiments.bench.decode --run DIR [--json]`.

    python -m experiments.train --run-dir runs/mtp --mtp.depth 1
    python -m experiments.bench.decode --run runs/mtp --json

Continues held-out prompts of the run's own text, one at a time (batch 1), in one process and in
alternation: plainly, and with the run's heads drafting. Both are compiled beforehand; the clock
counts reading the prompt. Prints medians over the prompts, and whether every text was the same.
`plain_over_bare` compares a token of plain decoding, once it is under way, with what it cannot be
faster than: one token after another through the model and its head in a single program, nothing
drawn and nothing read back. All of it is *measured*, on the device at hand.
"""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import cli, data
from experiments.errors import UserError, user_errors
from experiments.generate import Tally, drafts_of
from experiments.run import Run, load_run
from jaxaccel import decode, precision
from jaxaccel.decode import Sampling
from jaxaccel.nn import Decoder


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Measure speculative against plain decoding."""

    run: Path
    """Folder of a run that was trained with heads."""
    gamma: int | None = None
    """Tokens drafted for each pass; without: the fastest of 1 to 4 on the first prompts."""
    prompts: int = 24
    """Held-out texts."""
    prompt_tokens: int = 32
    """Tokens of each that are the prompt; the model writes on to its context."""
    temperature: float = 0.0
    """0: greedy."""
    top_p: float = 1.0
    seed: int = 0
    json: bool = False
    """Print one JSON object."""


def held_out(run: Run, count: int, length: int) -> list[np.ndarray]:
    """Beginnings of rows of the validation split that lie in one document, evenly spread.

    Raises:
      UserError: there are too few.
    """
    corpus = data.load_corpus(run.config.data, run.tokenizer)
    rows = []
    for batch in data.validation_batches(corpus, batch=16, sequence=run.config.sequence):
        whole = (batch["segments"][:, :length] == 1).all(axis=1)
        rows += list(batch["tokens"][whole, :length])
    if len(rows) < count:
        raise UserError(f"the held-out text has {len(rows)} whole rows; {count} are asked for")
    return [rows[i * len(rows) // count] for i in range(count)]


def bare_seconds(decoder: Decoder, tokens: int) -> Callable[[], float]:
    """A function that times `tokens` one-token passes, one after the other in one program."""
    leaves, treedef = jax.tree.flatten(decoder)

    @jax.jit
    def run(leaves, cache, token_11):
        decoder = jax.tree.unflatten(treedef, leaves)

        def one(_, carry):
            token_11, cache = carry
            hidden_BTD, cache = decode.forward(decoder, token_11, cache)
            found = jnp.argmax(decode.logits(decoder, hidden_BTD), axis=-1)
            return found.astype(jnp.int32), cache

        return jax.lax.fori_loop(0, tokens, one, (token_11, cache))[0]

    cache = decode.init_cache(decoder.config, 1, decode.ROOM, decoder.dtype)
    start_11 = jnp.zeros((1, 1), jnp.int32)

    def seconds() -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(leaves, cache, start_11))
        return time.perf_counter() - start

    seconds()  # compiles
    return seconds


def measure(run: Run, config: DecodeConfig) -> dict[str, Any]:
    """The benchmark's figures, by the names it prints."""
    decoder = run.decoder(dtype=precision.COMPUTE_DTYPES[run.config.precision])
    if not 0 < config.prompt_tokens < run.config.sequence:
        raise UserError(
            f"--prompt-tokens is {config.prompt_tokens}; the model's context is "
            f"{run.config.sequence}: at most {run.config.sequence - 1}"
        )
    new = run.config.sequence - config.prompt_tokens
    with user_errors():
        sampling = Sampling(config.temperature, top_p=config.top_p, seed=config.seed)
    prompts = held_out(run, config.prompts, config.prompt_tokens)

    def seconds_per_token(ids: np.ndarray) -> float:
        """Of plain decoding between its first burst and its last: no prompt, no setting up."""
        times, counts = [], []
        for burst in decode.stream(decoder, [ids], max_new_tokens=new, sampling=sampling):
            times.append(time.perf_counter())
            counts.append(len(burst.tokens[0]))
        return (times[-1] - times[0]) / max(1, sum(counts[1:]))

    def timed(ids: np.ndarray, gamma: int) -> tuple[list[int], Tally]:
        made = Tally()
        with user_errors():
            bursts = decode.stream(
                decoder, [ids], max_new_tokens=new, sampling=sampling, gamma=gamma
            )
        return [token for burst in made.watch(bursts) for token in burst.tokens[0]], made

    gamma = drafts_of(run.folder, run.config.mtp, config.gamma)
    if config.gamma is None:
        legal = range(1, 5 if run.config.mtp.depth == 1 else run.config.mtp.depth + 1)
        if run.config.mtp.kind == "parallel":
            legal = range(1, run.config.mtp.depth + 1)
        for candidate in legal:
            timed(prompts[0], candidate)  # compiles
        spent = dict.fromkeys(legal, 0.0)
        for ids in 2 * prompts[:6]:
            for candidate in legal:
                spent[candidate] += timed(ids, candidate)[1].seconds
        gamma = min(spent, key=lambda candidate: spent[candidate])
    for drafts in (0, gamma):
        timed(prompts[0], drafts)
    bare = bare_seconds(decoder, new)

    identical, plains, speculations, bares = True, [], [], []
    for ids in prompts:
        text, plain = timed(ids, 0)
        bares.append(seconds_per_token(ids) / (bare() / new))
        other, made = timed(ids, gamma)
        identical &= text == other
        plains.append(plain)
        speculations.append(made)
    middle = lambda values: statistics.median(list(values))
    return {
        "identical": identical,
        "speedup": middle(p.seconds / s.seconds for p, s in zip(plains, speculations)),
        "acceptance": np.divide(
            sum(s.accepted for s in speculations), sum(s.drafted for s in speculations)
        ).tolist(),
        "tokens_per_second_plain": middle(p.tokens_per_second for p in plains),
        "tokens_per_second_speculative": middle(s.tokens_per_second for s in speculations),
        "tokens_per_pass": middle(s.tokens_per_pass for s in speculations),
        "gamma": gamma,
        "plain_over_bare": middle(bares),
        "prompts": len(prompts),
        "device": jax.devices()[0].device_kind,
    }


def main(config: DecodeConfig) -> None:
    """Prints the figures."""
    figures = measure(load_run(config.run), config)
    if config.json:
        print(json.dumps(figures))
        return
    places = ", ".join(f"{share:.0%}" for share in figures["acceptance"])
    same = "the same texts" if figures["identical"] else "texts that differ"
    print(
        f"{figures['prompts']} held-out prompts on {figures['device']}, {same} (measured):\n"
        f"plain       {figures['tokens_per_second_plain']:,.0f} tokens/s, "
        f"a token costs {figures['plain_over_bare']:.2f} bare one-token passes\n"
        f"speculative {figures['tokens_per_second_speculative']:,.0f} tokens/s with gamma "
        f"{figures['gamma']}: {figures['speedup']:.2f} times as fast, "
        f"{figures['tokens_per_pass']:.2f} tokens a pass, drafts accepted by place: {places}"
    )


if __name__ == "__main__":
    cli.run(main, DecodeConfig)
