"""A released model as what a run begins with, and what a run keeps of it to be exported again."""

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from experiments import hf, hf_config
from experiments.config import TrainConfig
from experiments.errors import UserError
from experiments.tokenizer import Tokenizer
from jaxaccel.nn import DecoderConfig

ORIGIN = "origin.json"  # in the run folder: the `config.json` of the model it began with


def with_model[T: TrainConfig](config: T, preset: TrainConfig) -> T:
    """Options whose model, and tokenizer if it has one, are those of `config.init_from`.

    Reads `config.json` only.

    Args:
      config: a run's options.
      preset: those that they started from.

    Raises:
      UserError: as `hf_config.read`; options of the model beside it, or rows longer than it reads.
    """
    if not config.init_from:
        return config
    found = hf_config.read(config.init_from)
    if config.model not in (preset.model, found.model):
        raise UserError("--model.* options and --init-from exclude each other: the folder decides")
    if config.sequence > found.context:
        raise UserError(
            f"--sequence is {config.sequence}, and the model in {config.init_from} was made for "
            f"{found.context} positions: pass --sequence {found.context} or less"
        )
    folder = str(Path(config.init_from).expanduser().resolve())
    config = dataclasses.replace(config, init_from=folder, model=found.model)
    if config.data.tokenizer != "bytes":
        return config
    data = dataclasses.replace(config.data, tokenizer=own_tokenizer(config))
    return dataclasses.replace(config, data=data)


def own_tokenizer(config: TrainConfig) -> str:
    """The path of the tokenizer that belongs to the model which a run begins with, if any."""
    return str(Path(config.init_from) / "tokenizer.json") if config.init_from else ""


def check_vocabulary(tokenizer: Tokenizer, model: DecoderConfig, folder: str | Path = "") -> None:
    """Refuses a tokenizer that is larger than the embedding, of the model in `folder` if any."""
    ids, rows = tokenizer.vocab_size, model.vocab_size
    if ids > rows:
        remedy = (
            f"it is not that of {folder}" if folder else f"pass --model.vocab-size {ids} or more"
        )
        raise UserError(
            f"tokenizer {tokenizer.name} has {ids} ids, the model's vocabulary {rows}: {remedy}"
        )


def find(config: TrainConfig) -> hf.Weights | None:
    """The weights that a run begins with, if it begins with any; reads headers only.

    Raises:
      UserError: as `hf.find`; other heads are asked for than there are.
    """
    if not config.init_from:
        return None
    asked, there = ((m.depth, m.kind) for m in (config.mtp, hf_config.read(config.init_from).mtp))
    if config.mtp.depth and there[0] and asked != there:
        raise UserError(
            f"--mtp options ask for {asked[0]} {asked[1]} heads, and {config.init_from} has "
            f"{there[0]} {there[1]}: pass --mtp.depth {there[0]} --mtp.kind {there[1]}, or neither"
        )
    return hf.find(config.init_from, config.model, config.mtp)


def load(weights: hf.Weights | None, mesh: Mesh) -> dict[str, Any]:
    """Parameters to begin with, for `TrainStep.init`; none without weights."""
    return {} if weights is None else hf.load(weights, mesh)


def describe(config: TrainConfig, weights: hf.Weights) -> str:
    """What is begun with, and what is not in the folder."""
    text = f"begun with {len(weights.tensors)} tensors, {weights.nbytes:,} bytes, of "
    text += config.init_from
    if config.mtp.depth and not weights.mtp.depth:
        text += "; it has no heads that predict further ahead: they are drawn at random"
    return text


def keep_origin(folder: Path, config: TrainConfig) -> None:
    """Keeps the model's own `config.json` in the run folder, for `export`."""
    if config.init_from:
        source = Path(config.init_from).expanduser() / "config.json"
        shutil.copyfile(source, folder / ORIGIN)


def origin(folder: Path) -> Mapping[str, Any] | None:
    """The `config.json` of the model that a run began with; None if it began with none."""
    try:
        return json.loads((folder / ORIGIN).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {folder / ORIGIN}: {error}") from error
