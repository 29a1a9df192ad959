"""What FP8 means for a run: which layers it takes, where it runs, checkpoints of other recipes."""

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from experiments.checkpoint import Checkpoints, Restored, flatten
from experiments.config import TrainConfig
from experiments.errors import UserError, user_errors
from jaxaccel.fp8 import DelayedState, with_window
from jaxaccel.target import Gpu
from jaxaccel.train_step import TrainState, fp8_layers


def describe(config: TrainConfig) -> str:
    """Which layers' matmuls are FP8, which are not, and why.

    Raises:
      UserError: the filter leaves no layer.
    """
    with user_errors():
        reasons = fp8_layers(config.model, config.fp8_layers)
    converted = [name for name, reason in reasons.items() if not reason]
    kept = [f"{name} ({reason})" for name, reason in reasons.items() if reason]
    kept += ["embedding and output head", "attention's scores", "norms"]
    return f"fp8 {config.fp8}: {', '.join(converted)}; in {config.precision}: {', '.join(kept)}"


def check_device(config: TrainConfig, gpu: Gpu | None, name: str) -> str:
    """What becomes of FP8 matmuls on a device; empty where they are native.

    Args:
      config: a run's options, `fp8` not off.
      gpu: its data sheet; None for a CPU or an unknown device.
      name: of the device, for people.

    Raises:
      UserError: they are not native, and `--fp8-strict` forbids anything else.
    """
    if gpu is None or gpu.fp8_flops is None:
        text = f"{name} has no FP8 matmuls: the same values are multiplied in a wider type"
    elif config.fp8 == "block":
        text = (
            "XLA has no block-scaled matmul: --fp8 block is a loop of FP8 matmuls over blocks of "
            "128, far slower than one"
        )
    else:
        return ""
    if config.fp8_strict:
        raise UserError(f"{text}; --fp8-strict refuses that: choose --fp8 off, or leave it out")
    return text


def restore(checkpoints: Checkpoints, like: TrainState, saved: str, asked: str) -> Restored | None:
    """Restores a run whose FP8 recipe, window or layers may have changed since.

    Parameters and all else are as saved. FP8 state that the checkpoint lacks begins anew.

    Args:
      checkpoints: of the run.
      like: the state as this run wants it, abstract.
      saved, asked: the recipes.

    Returns:
      As `Checkpoints.restore`.
    """
    wanted = flatten(like.fp8)
    arrays = checkpoints.arrays()
    stored = {
        key.removeprefix("fp8."): kind for key, kind in arrays.items() if key.startswith("fp8.")
    }
    if saved != asked and arrays:
        print(
            f"warning: the run was saved with --fp8 {saved} and goes on with --fp8 {asked}: "
            "parameters and optimizer are kept, FP8 scales are found anew",
            file=sys.stderr,
        )
    if {key: (leaf.shape, leaf.dtype) for key, leaf in wanted.items()} == {
        key: (leaf.shape, leaf.dtype) for key, leaf in stored.items()
    }:
        return checkpoints.restore(like)
    # A state is known by its names, whatever classes it is made of.
    fields = {field.name: getattr(like, field.name) for field in dataclasses.fields(like)}
    restored = checkpoints.restore(fields | {"fp8": stored})
    if restored is None:
        return None
    held = restored.state["fp8"]
    state = like.__class__(**restored.state | {"fp8": _carried(like.fp8, held)})
    return dataclasses.replace(restored, state=state)


def _carried(like: PyTree[DelayedState], held: dict[str, Array]) -> PyTree[DelayedState]:
    """States as `like` wants them, from those of the same name, or empty."""

    def one(path: Any, empty: DelayedState) -> DelayedState:
        prefix = jax.tree_util.keystr(path, simple=True, separator=".")
        names = [f"{prefix}.{field.name}" for field in dataclasses.fields(DelayedState)]
        if all(name in held for name in names):
            state = with_window(
                DelayedState(*map(held.__getitem__, names)), empty.history.shape[-1]
            )
        else:
            state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), empty)
        return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), state, empty)

    is_state = lambda node: isinstance(node, DelayedState)
    return jax.tree_util.tree_map_with_path(one, like, is_leaf=is_state)
