"""What the benches share that train one small model again and again and compare its losses.

Each training is of one CPU device, on real text, and its figures are `figures`' keys.
"""

import dataclasses
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from experiments import data, metrics
from experiments.eval import mean_loss
from jaxaccel import sharding
from jaxaccel.nn import DecoderConfig, parameter_count
from jaxaccel.train_step import TrainState, TrainStep

LAST = 100  # steps whose training losses are averaged


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all trainings of a comparison have in common."""

    model: DecoderConfig
    steps: int
    batch: int  # rows
    sequence: int  # tokens of a row
    validation: int  # batches of held-out text


class Trained(NamedTuple):
    """What a training ends with."""

    state: TrainState
    mtp_losses: list[float]  # of each head, over the last steps
    figures: dict[str, Any]  # for its row


def cpu_mesh() -> Mesh:
    """A mesh of one CPU device."""
    return sharding.make_mesh(sharding.parse_mesh("", 1), jax.devices("cpu")[:1])


def held_out(corpus: data.Corpus, setting: Setting) -> Iterator[data.Batch]:
    """The batches that a comparison validates on, always the same."""
    shape = {"batch": setting.batch, "sequence": setting.sequence}
    return data.validation_batches(corpus, **shape, limit=setting.validation)


def train(made: TrainStep, seed: int, corpus: data.Corpus, setting: Setting) -> Trained:
    """One training from its first parameters to its losses.

    Args:
      made: the step, on `cpu_mesh`.
      seed: of the first parameters and of the order of the text.
      corpus: what to train and to validate on.
      setting: how long.
    """
    s, history = setting, []
    batches = data.train_iterator(corpus, batch=s.batch, sequence=s.sequence, seed=seed)
    state = made.init(jax.random.key(seed))
    start = time.perf_counter()
    for _ in range(s.steps):
        state, figures = made.step(state, made.place(next(batches)))
        history.append(jax.device_get(figures))
    seconds = time.perf_counter() - start
    validation, tokens = mean_loss(made, state.params, held_out(corpus, s))
    last = history[-LAST:]
    figures = {
        "validation_loss": validation,
        "validation_tokens": tokens,
        "training_loss": statistics.mean(float(f.loss) for f in last),
        "seconds": seconds,
        "skipped_steps": int(state.skipped),
    }
    return Trained(state, np.mean([f.mtp_losses for f in last], axis=0).tolist(), figures)


def progress(training: str, seed: int, steps: int) -> None:
    """Says on standard error what is trained now."""
    print(f"{training}, seed {seed}: {steps} steps", file=sys.stderr, flush=True)


def setting_keys(setting: Setting) -> dict[str, Any]:
    """A setting and where it is, for a row."""
    s = setting
    return {
        "steps": s.steps,
        "batch": s.batch,
        "sequence": s.sequence,
        "model": dataclasses.asdict(s.model),
        "environment": metrics.environment(),
    }


def heading(row: dict[str, Any], model: DecoderConfig) -> str:
    """The first line of a table: sizes of model, training and held-out text."""
    m = row["model"]
    return (
        f"{m['layers']} layers, width {m['width']}, {parameter_count(model):,} parameters; "
        f"{row['steps']} steps of {row['batch']} x {row['sequence']} tokens; "
        f"validation on {row['validation_tokens']:,} tokens, in nats a token"
    )


def versions(row: dict[str, Any]) -> str:
    """The last line of a table: what computed it."""
    found = row["environment"]["versions"]
    return ", ".join(f"{name} {found[name]}" for name in ("jax", "jaxlib", "optax"))
