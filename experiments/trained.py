"""A model to use: one that was trained here, or a released one."""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from experiments import hf, hf_config, pretrained
from experiments import tokenizer as tokenizers
from experiments.errors import UserError
from experiments.run import load_run
from experiments.tokenizer import Tokenizer
from jaxaccel import precision, sharding
from jaxaccel.nn import Decoder, MtpConfig
from jaxaccel.train_step import abstract_decoder


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model to generate with."""

    folder: Path
    tokenizer: Tokenizer
    context: int  # positions that it was made for
    mtp: MtpConfig  # its heads
    stop: tuple[int, ...]  # ids that end a text, beside the tokenizer's own
    decoder: Callable[[], Decoder]  # reads the weights


def open_trained(run: Path | None, model: Path | None) -> Trained:
    """A run folder or a released model's, whichever is given.

    Raises:
      UserError: none or both are; the folder is not what it should be.
    """
    if run is not None and model is None:
        return open_run(run)
    if run is None and model is not None:
        return open_model(model)
    raise UserError("pass one of --run (a training run) and --model (a released model)")


def open_run(folder: Path) -> Trained:
    """The newest checkpoint of a run, in the precision that it was computed in.

    Raises:
      UserError: as `run.load_run`.
    """
    run = load_run(folder)
    c, content = run.config, pretrained.origin(folder) or {}
    decoder = functools.partial(run.decoder, dtype=precision.COMPUTE_DTYPES[c.precision])
    stop = stop_tokens(folder, content)
    return Trained(folder, run.tokenizer, c.sequence, c.mtp, stop, decoder)


def open_model(folder: Path) -> Trained:
    """A released model: in bfloat16 on a GPU, in float32 on a CPU.

    Raises:
      UserError: as `hf_config.read` and `hf.find`; there is no tokenizer, or one that is larger
        than the embedding.
    """
    found = hf_config.read(folder)
    tokenizer = tokenizers.load(str(folder / "tokenizer.json"))
    pretrained.check_vocabulary(tokenizer, found.model, folder)
    weights = hf.find(folder, found.model, found.mtp)
    device = jax.devices()[0]
    dtype = jnp.float32 if device.platform == "cpu" else jnp.bfloat16

    def decoder() -> Decoder:
        mesh = sharding.make_mesh(sharding.parse_mesh("", 1), [device])
        graph = nnx.split(abstract_decoder(found.model, mtp=weights.mtp, dtype=dtype))[0]
        return nnx.merge(graph, hf.load(weights, mesh, dtype))

    stop = stop_tokens(folder, found.content)
    return Trained(folder, tokenizer, found.context, weights.mtp, stop, decoder)


def stop_tokens(folder: Path, content: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end a text: of `generation_config.json`, or else of a `config.json`'s content."""
    path = folder / "generation_config.json"
    try:
        content = {**content, **json.loads(path.read_text(encoding="utf-8"))}
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    found = content.get("eos_token_id")
    listed = found if isinstance(found, list) else [] if found is None else [found]
    if bad := [token for token in listed if type(token) is not int]:
        raise UserError(f"{folder}: eos_token_id has {bad[0]!r}; legal are ids, and lists of them")
    return tuple(listed)
