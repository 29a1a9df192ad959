"""Mixed precision: compute dtypes, and loss scaling that moves by itself.

Parameters are float32 throughout; the model casts each weight as it uses it. bfloat16
has float32's range and needs no scaling. float16 ends at 65,504 and 6e-8: the loss is
multiplied by a scale before the backward pass and gradients are divided by it, in
float32, after. The scale doubles after a run of finite steps and halves on an overflow
(arXiv:1710.03740, section 3.2; the dynamic rule as in NVIDIA's Apex).
"""

import dataclasses
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

COMPUTE_DTYPES = {
    "float32": jnp.float32,
    "bfloat16": jnp.bfloat16,
    "float16": jnp.float16,
}


@jax.tree_util.register_dataclass
@no_type_check  # JAX rebuilds it around shapes and shardings too
@dataclasses.dataclass(frozen=True)
class LossScale:
    """State of dynamic loss scaling; powers of two, so that scaling is exact."""

    scale: Float[Array, ""]  # float32
    good_steps: Int[Array, ""]  # int32, finite steps since the scale last moved


@dataclasses.dataclass(frozen=True)
class LossScaleConfig:
    """When the scale moves: doubled after `growth_interval` finite steps in a row."""

    initial: float = 2.0**15
    growth_interval: int = 2000
    floor: float = 1.0
    ceiling: float = 2.0**24


def init_loss_scale(dtype: str, config: LossScaleConfig | None = None) -> LossScale:
    """Starting state: `config.initial` for float16, 1 for a dtype that needs no scaling.

    Args:
      dtype: one of `COMPUTE_DTYPES`.
      config: where float16 starts.

    Returns:
      The state, with no finite step behind it.

    Example:
      >>> float(init_loss_scale("float16").scale), float(init_loss_scale("bfloat16").scale)
      (32768.0, 1.0)
    """
    initial = (config or LossScaleConfig()).initial if dtype == "float16" else 1.0
    return LossScale(jnp.float32(initial), jnp.int32(0))


def update_loss_scale(
    state: LossScale, finite: Bool[Array, ""], config: LossScaleConfig
) -> LossScale:
    """Next state after a step whose gradients were `finite` or not.

    Args:
      state: the present state.
      finite: whether every gradient of the step was finite.
      config: interval, floor and ceiling.

    Returns:
      The scale doubled (to the ceiling at most) when this is the `growth_interval`-th
      finite step in a row, halved (to the floor at least) when it is not finite.

    Example:
      >>> state = init_loss_scale("float16")
      >>> float(update_loss_scale(state, jnp.array(False), LossScaleConfig()).scale)
      16384.0
    """
    good = jnp.where(finite, state.good_steps + 1, 0)
    grow = good >= config.growth_interval
    up = jnp.where(grow, jnp.minimum(state.scale * 2, config.ceiling), state.scale)
    down = jnp.maximum(state.scale / 2, config.floor)
    return LossScale(jnp.where(finite, up, down), jnp.where(grow, 0, good).astype(jnp.int32))


def all_finite(tree: PyTree[Array]) -> Bool[Array, ""]:
    """Whether no array of `tree` holds an infinity or NaN.

    Args:
      tree: arrays of any dtype.

    Returns:
      A boolean; true of an empty tree.

    Example:
      >>> bool(all_finite({"a": jnp.ones(2), "b": jnp.array(jnp.inf)}))
      False
    """
    leaves = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(leaves)) if leaves else jnp.array(True)
