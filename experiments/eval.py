"""Measures a trained model on held-out text: `python -m experiments.eval --run DIR`.

    python -m experiments.eval --run runs/tiny --data.source notes/ --json

Every token of the split counts once, the padded tail's too. Bits per byte compare models
of unlike tokenizers; loss and perplexity are per token and do not.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import optax
from jaxtyping import Array, PyTree

from experiments import cli, data
from experiments.config import step_config
from experiments.errors import UserError, user_errors
from experiments.run import Run, load_run
from jaxaccel import sharding
from jaxaccel.train_step import TrainStep, make_train_step


@dataclasses.dataclass(frozen=True)
class EvalData:
    """What to measure on."""

    source: tuple[str, ...] = ()
    """Sources as in training, read whole. Without: what the run held out of its own."""
    field: str | None = None
    """Where a .jsonl or .parquet document holds its text. Without: as in the run."""


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Measure a trained model on held-out text."""

    run: Path
    """Folder of a training run."""
    data: EvalData = EvalData()
    mesh: str = ""
    """Devices by axis, say data=2,fsdp=4 (also tensor); empty: all on fsdp."""
    json: bool = False
    """Print one JSON object."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Figures of a split."""

    loss: float  # nats per predicted token
    bits_per_byte: float
    perplexity: float  # exp(loss)
    tokens: int  # predicted: all but the first of each document


def mean_loss(
    step: TrainStep,
    params: PyTree[Array],
    batches: Iterable[data.Batch],
    place: Callable[[data.Batch], dict[str, Array]] | None = None,
) -> tuple[float, int]:
    """Mean negative log-likelihood over the tokens of all batches, in nats, and their number.

    Args:
      step: made by `make_train_step`.
      params: sharded as the step has them.
      batches: ragged or not: each weighs as many tokens as it has.
      place: brings a batch to the devices; None: `step.place`.
    """
    total, count = 0.0, 0
    for batch in batches:
        sums = step.evaluate(params, (place or step.place)(batch))
        total += float(sums.nll)  # in double precision from here on
        count += int(sums.count)
    return total / max(1, count), count


def evaluate(run: Run, corpus: data.Corpus, mesh_axes: str = "") -> Evaluation:
    """Measures the newest checkpoint of a run on the validation split of a corpus.

    Args:
      run: from `load_run`.
      corpus: tokenized by the run's tokenizer.
      mesh_axes: devices by axis, as `sharding.parse_mesh` reads them.

    Raises:
      UserError: the mesh does not fit the devices or the model, the run has no checkpoint,
        or the split has nothing to predict.
    """
    config = run.config
    with user_errors():
        sizes = sharding.parse_mesh(mesh_axes, jax.device_count())
        mesh = sharding.make_mesh(sizes)
        step = make_train_step(config.model, optax.identity(), step_config(config), mesh)
    # Rows of padding weigh nothing: round up to what the devices can share.
    shards = sizes["data"] * sizes["fsdp"]
    batch = -(-config.batch // shards) * shards
    batches = data.validation_batches(corpus, batch=batch, sequence=config.sequence)
    loss, tokens = mean_loss(step, run.params(mesh), batches)
    if not tokens:
        raise UserError("the held-out text has no token to predict: its documents are too short")
    bits = loss / math.log(2) / corpus.bytes_per_token
    return Evaluation(loss, bits, math.exp(loss), tokens)


def main(config: EvalConfig) -> None:
    """Prints the figures."""
    run = load_run(config.run)
    changes: dict[str, Any] = {}
    if config.data.source:
        changes = {"source": config.data.source, "weights": (), "validation": config.data.source}
    if config.data.field is not None:
        changes["field"] = config.data.field
    data_config = dataclasses.replace(run.config.data, **changes)
    corpus = data.load_corpus(data_config, run.tokenizer)
    result = evaluate(run, corpus, config.mesh)
    if config.json:
        print(json.dumps(dataclasses.asdict(result)))
        return
    named = ", ".join(data_config.validation or data_config.source)
    print(
        f"{result.tokens:,} tokens held out of {named}: loss {result.loss:.4f} nats per token, "
        f"{result.bits_per_byte:.4f} bits per byte, perplexity {result.perplexity:.3f}"
    )


if __name__ == "__main__":
    cli.run(main, EvalConfig)
