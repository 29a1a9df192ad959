"""Measures a trained model on held-out text: `python -m experiments.eval --run DIR`.

    python -m experiments.eval --run runs/tiny --data.source notes/ --json

Every token of the split counts once, the padded tail's too. Bits per byte compare models
of unlike tokenizers; loss and perplexity are per token and do not.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
from jaxtyping import Array

from experiments import cli, data
from experiments.errors import UserError
from experiments.run import Run, load_run
from jaxaccel import losses, precision, sharding
from jaxaccel.nn import Decoder


@dataclasses.dataclass(frozen=True)
class EvalData:
    """What to measure on."""

    source: tuple[str, ...] = ()
    """Sources as in training, of which the held-out part is read. Without: the run's own."""
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


@jax.jit
def _loss_sums(decoder: Decoder, batch: dict[str, Array]) -> losses.LossSums:
    hidden = decoder(
        batch["tokens"], segments_BT=batch["segments"], positions_BT=batch["positions"]
    )
    return losses.linear_cross_entropy(hidden, decoder.head_VD, batch["labels"])


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
    try:
        sizes = sharding.parse_mesh(mesh_axes, jax.device_count())
        mesh = sharding.make_mesh(sizes)
        dtype = precision.COMPUTE_DTYPES[config.precision]
        decoder = run.decoder(mesh, dtype=dtype, constrain=sharding.constrainer(mesh))
    except ValueError as error:
        raise UserError(str(error)) from error
    # Rows of padding weigh nothing: round up to what the devices can share.
    shards = sizes["data"] * sizes["fsdp"]
    batch = -(-config.batch // shards) * shards
    total, tokens = 0.0, 0
    for rows in data.validation_batches(corpus, batch=batch, sequence=config.sequence):
        sums = _loss_sums(decoder, jax.device_put(rows, sharding.batch_sharding(mesh)))
        total += float(sums.nll)  # in double precision from here on
        tokens += int(sums.count)
    if not tokens:
        raise UserError("the held-out text has no token to predict: its documents are too short")
    loss = total / tokens
    bits = loss / math.log(2) / corpus.bytes_per_token
    return Evaluation(loss, bits, math.exp(loss), tokens)


def main(config: EvalConfig) -> None:
    """Prints the figures."""
    run = load_run(config.run)
    changes: dict[str, Any] = {}
    if config.data.source:
        changes = {"source": config.data.source, "weights": (), "validation": ()}
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
