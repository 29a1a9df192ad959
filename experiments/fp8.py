"""What FP8 means for a run: which layers it takes, where it runs, checkpoints of other recipes."""

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from experiments.checkpoint import Checkpoints, Restored, flatten
from experiments.config import TrainConfig
from experiments.errors import UserError, user_errors
from jaxaccel.fp8 import DelayedState, choose, with_window
from jaxaccel.nn import linear_shapes
from jaxaccel.target import find
from jaxaccel.train_step import TrainState
from pallas_kernels.dispatch import HOPPER


def describe(config: TrainConfig) -> str:
    """Which layers' matmuls are FP8, which are not, and why.

    Raises:
      UserError: the filter leaves no layer.
    """
    with user_errors():
        reasons = choose(linear_shapes(config.model, config.mtp), config.fp8_layers)
    converted = [name for name, reason in reasons.items() if not reason]
    kept = [f"{name} ({reason})" for name, reason in reasons.items() if reason]
    kept += ["embedding and output head", "attention's scores", "norms"]
    return f"fp8 {config.fp8}: {', '.join(converted)}; in {config.precision}: {', '.join(kept)}"


def is_native(device: jax.Device) -> bool:
    """Whether a device has FP8 tensor cores: by its data sheet, or its CUDA capability."""
    if gpu := find(device.device_kind):
        return gpu.fp8_flops is not None
    return float(getattr(device, "compute_capability", 0)) >= 8.9


def check_device(config: TrainConfig, name: str, *, native: bool, devices: int = 1) -> str:
    """What becomes of FP8 matmuls on a device; empty where they are the hardware's.

    Args:
      config: a run's options, `fp8` not off.
      name: of the device, for people.
      native: whether it has FP8 tensor cores.
      devices: of the run.

    Raises:
      UserError: they are not, and `--fp8-strict` forbids anything else.
    """
    if not native:
        text = f"{name} has no FP8 matmuls: the same values are multiplied in a wider type"
    elif config.fp8 == "block" and not (devices == 1 and any(k in name.upper() for k in HOPPER)):
        text = (
            "XLA has no block-scaled matmul, and the kernel is for one Hopper GPU: --fp8 block is "
            "a loop of FP8 matmuls over blocks of 128, far slower than one"
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
    tell = lambda text: print(text, file=sys.stderr) if checkpoints.speaks else None
    if saved != asked and arrays:
        tell(
            f"warning: the run was saved with --fp8 {saved} and goes on with --fp8 {asked}: "
            "parameters and optimizer are kept"
            + (", FP8 scales are found anew" if asked == "delayed" else "")
        )
    elif arrays and wanted.keys() - stored.keys():
        new = sorted({key.rsplit(".", 2)[0] for key in wanted.keys() - stored.keys()})
        tell(f"note: FP8 scales of {', '.join(new)} are found anew")
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
        return jax.tree.map(lambda x, like: _placed(x, like.sharding), state, empty)

    is_state = lambda node: isinstance(node, DelayedState)
    return jax.tree_util.tree_map_with_path(one, like, is_leaf=is_state)


def _placed(x: Array, sharding: jax.sharding.Sharding) -> Array:
    """An array that every process has, on devices of all of them."""
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
