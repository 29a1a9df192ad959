"""Runs as training leaves them, made without training, for the tests of released models."""

from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments import cli, run
from experiments import tokenizer as tokenizers
from experiments.checkpoint import Checkpoints
from experiments.config import TrainConfig
from experiments.data import DataConfig
from jaxaccel.nn import DecoderConfig
from jaxaccel.train_step import abstract_decoder

MODEL = DecoderConfig(
    vocab_size=264, layers=2, width=16, heads=2, kv_heads=1, head_size=8, mlp_width=24
)


def write_run(folder: Path, tokenizer: object = "bytes", **options) -> Path:
    """A run folder in which every parameter matters; options of `TrainConfig`."""
    options = {"model": MODEL, "sequence": 40, "batch": 8, "precision": "float32"} | options
    config = TrainConfig(data=DataConfig(tokenizer=str(tokenizer)), **options)
    run.write_config(folder, config, tokenizers.load(str(tokenizer)))
    random = np.random.default_rng(0)

    def draw(path, x):
        noise = random.standard_normal(x.shape, np.float32)
        kernel = path[-1].key == "kernel"
        scaled = noise * np.float32(2.0 if kernel else 1.0) / np.sqrt(x.shape[-1 - kernel])
        return jnp.asarray(1 + 0.3 * noise if path[-1].key == "scale" else scaled, jnp.float32)

    shapes = nnx.to_pure_dict(nnx.state(abstract_decoder(config.model, mtp=config.mtp)))
    with Checkpoints(folder / "checkpoints") as checkpoints:
        params = jax.tree_util.tree_map_with_path(draw, shapes)
        checkpoints.save(1, {"params": params}, {})
    return folder


def call(program: ModuleType, kind: type, *args: object) -> int | str | None:
    """Runs a program's command line; its status."""
    with pytest.raises(SystemExit) as exit:
        cli.run(program.main, kind, [str(arg) for arg in args])
    return exit.value.code
