"""The run folder: what lies in it, and how a program gets a trained model out of it.

config.json     every option, and the fingerprint of the tokenizer
tokenizer.json  a copy, where the tokenizer is a file, and of what belongs to it: its chat template
env.json        versions, devices, commit, command of the newest start
metrics.jsonl   one object a logged step
loss.png  sample.txt
checkpoints/    one folder a saved step
"""

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from experiments import tokenizer as tokenizers
from experiments.checkpoint import Checkpoints
from experiments.config import TrainConfig, identity
from experiments.errors import UserError
from experiments.manifest import write_json
from experiments.tokenizer import Tokenizer
from jaxaccel import sharding
from jaxaccel.nn import Decoder
from jaxaccel.train_step import abstract_decoder, parameter_shardings


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that was trained: its options, its tokenizer, and where its parameters lie."""

    folder: Path
    config: TrainConfig
    tokenizer: Tokenizer

    def decoder(self, mesh: Mesh | None = None, **arguments: Any) -> Decoder:
        """The decoder with the newest checkpoint's parameters, float32, on `mesh`.

        Args:
          mesh: where the parameters go; None: the first device.
          **arguments: `Decoder`'s, such as `dtype`.

        Raises:
          UserError: the run has no whole checkpoint.
        """
        return nnx.merge(nnx.split(self._abstract(**arguments))[0], self.params(mesh))

    def _abstract(self, **arguments: Any) -> Decoder:
        return abstract_decoder(self.config.model, mtp=self.config.mtp, **arguments)

    def params(self, mesh: Mesh | None = None) -> PyTree[Array]:
        """The parameters alone, a nested dict of float32."""
        mesh = mesh or sharding.make_mesh(sharding.parse_mesh("", 1), jax.devices()[:1])
        model = self._abstract()
        like = jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            nnx.to_pure_dict(nnx.state(model)),
            parameter_shardings(model, mesh),
        )
        with Checkpoints(self.folder / "checkpoints") as checkpoints:
            found = checkpoints.restore_part(like, "params")
        if found is None:
            raise UserError(f"{self.folder} has no whole checkpoint yet")
        return found.state


def write_config(folder: Path, config: TrainConfig, tokenizer: Tokenizer) -> None:
    """Writes `config.json`, and keeps a copy of the tokenizer where it is in files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in tokenizers.files(config.data.tokenizer).items():
        (folder / name).write_bytes(path.read_bytes())
    write_json(
        folder / "config.json",
        dataclasses.asdict(config) | {"tokenizer_fingerprint": tokenizer.fingerprint},
    )


def read_config(folder: Path) -> tuple[TrainConfig, str]:
    """The options of a run folder and the fingerprint of its tokenizer.

    Raises:
      UserError: there is no `config.json`, or it is not one of this program's.
    """
    path = folder / "config.json"
    try:
        tree = json.loads(path.read_text())
        fingerprint = tree.pop("tokenizer_fingerprint")
        return _from_json(TrainConfig, tree), fingerprint
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{folder} is no run folder: it has no config.json") from None
    except KeyError:
        raise UserError(
            f"{folder} is no run folder: its config.json is not of this program (a released model "
            "is passed as --model)"
        ) from None
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def load_run(folder: str | Path) -> Run:
    """Opens a run folder.

    Raises:
      UserError: it is none, or its tokenizer is not the one it was trained with.
    """
    folder = Path(folder)
    config, fingerprint = read_config(folder)
    copy = folder / "tokenizer.json"
    tokenizer = tokenizers.load(str(copy) if config.data.tokenizer != "bytes" else "bytes")
    check_tokenizer(tokenizer, fingerprint, folder)
    return Run(folder, config, tokenizer)


def check_tokenizer(tokenizer: Tokenizer, fingerprint: str, folder: Path) -> None:
    """Refuses a tokenizer other than the one that the run in `folder` was trained with."""
    if tokenizer.fingerprint != fingerprint:
        raise UserError(
            f"tokenizer {tokenizer.name} ({tokenizer.fingerprint[:12]}) is not the one that "
            f"{folder} was trained with ({fingerprint[:12]})"
        )


def check_same(folder: Path, config: TrainConfig, tokenizer: Tokenizer) -> TrainConfig:
    """Refuses to go on with a run under options that would make it another run.

    Returns:
      The options that the run had so far.
    """
    saved, fingerprint = read_config(folder)
    check_tokenizer(tokenizer, fingerprint, folder)
    old, new = identity(saved), identity(config)
    unlike = [key for key in new if old.get(key) != new[key]]
    if unlike:
        shown = ", ".join(f"{key} ({old.get(key)!r} there, {new[key]!r} asked)" for key in unlike)
        raise UserError(
            f"{folder} holds a run with other options: {shown}; "
            "take them back, or choose another --run-dir"
        )
    return saved


def _from_json(kind: Any, value: Any) -> Any:
    """A dataclass from the dict that `dataclasses.asdict` and JSON made of it."""
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        unknown = set(value) - set(hints)
        if unknown:
            raise ValueError(f"unknown option {', '.join(sorted(unknown))}")
        return kind(**{key: _from_json(hints[key], item) for key, item in value.items()})  # type: ignore
    if typing.get_origin(kind) is types.UnionType and value is not None:
        return _from_json(next(k for k in typing.get_args(kind) if k is not type(None)), value)
    if typing.get_origin(kind) is tuple:
        return tuple(value)
    return value
