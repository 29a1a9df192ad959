"""Optimizers and schedules by configuration, as plain optax transformations."""

import dataclasses
import math
from typing import Literal

import jax
import optax
from jaxtyping import PyTree


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (arXiv:1711.05101) and the schedule of its learning rate."""

    learning_rate: float = 3e-4
    """Peak, reached after the warm-up."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warm-up: cosine to the end, or stable with a linear decay at the end."""
    warmup_steps: int = 100
    final_fraction: float = 0.1
    """Learning rate at the last step, as a share of the peak."""
    decay_fraction: float = 0.2
    """wsd: the share of the steps after the warm-up, at the end, over which it decays."""
    b1: float = 0.9
    b2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    """Applied to matrices and embeddings; never to norms and biases."""

    def __post_init__(self):
        legal = {
            "learning_rate": (0 <= self.learning_rate < math.inf, "0 or more, and finite"),
            "warmup_steps": (self.warmup_steps >= 0, "0 or more"),
            "final_fraction": (0 <= self.final_fraction <= 1, "0 to 1"),
            "decay_fraction": (0 <= self.decay_fraction <= 1, "0 to 1"),
            "b1": (0 <= self.b1 < 1, "0 to 1, without 1"),
            "b2": (0 <= self.b2 < 1, "0 to 1, without 1"),
            "epsilon": (0 < self.epsilon < math.inf, "positive"),
            "weight_decay": (0 <= self.weight_decay < math.inf, "0 or more, and finite"),
        }
        for field, (holds, range_) in legal.items():
            if not holds:
                raise ValueError(f"{field} is {getattr(self, field)}; legal is {range_}")


def schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate by optimizer step, for a run of `steps`.

    Args:
      config: peak, warm-up and shape.
      steps: length of the run; the last step ends at `final_fraction` of the peak,
        unless the warm-up is as long as the run.

    Returns:
      An `optax.Schedule`. Warm-up is linear from `peak / warmup_steps`.

    Example:
      >>> rate = schedule(OptimizerConfig(1.0, warmup_steps=10), 100)
      >>> [round(float(rate(s)), 2) for s in (0, 9, 99)]
      [0.1, 1.0, 0.1]
    """
    peak, end = config.learning_rate, config.learning_rate * config.final_fraction
    warmup = min(config.warmup_steps, max(steps - 1, 0))
    last = max(steps - 1, 1)
    rest = max(last - warmup, 1)
    if config.schedule == "cosine":
        main = optax.cosine_decay_schedule(peak, rest, config.final_fraction)
    elif config.schedule == "wsd":
        decay = max(round(config.decay_fraction * rest), 1)
        main = optax.linear_schedule(peak, end, decay, transition_begin=rest - decay)
    elif config.schedule == "constant":
        main = optax.constant_schedule(peak)
    else:
        raise ValueError(f"unknown schedule {config.schedule!r}; known: cosine, wsd, constant")
    if warmup == 0:
        return main
    rise = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, main], [warmup])


def decays(params: PyTree) -> PyTree[bool]:
    """Which parameters weight decay applies to: kernels, the embedding and the head.

    Args:
      params: nested dicts, abstract or not.

    Returns:
      A tree like `params` of booleans, an optax mask.

    Example:
      >>> decays({"query": {"kernel": 1.0, "bias": 2.0}, "embedding": 3.0})
      {'embedding': True, 'query': {'bias': False, 'kernel': True}}
    """
    matrices = ("kernel", "embedding", "head")
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in matrices, params)


def adamw(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """`optax.adamw` with this schedule and decay mask; clipping is the training step's.

    Args:
      config: its numbers.
      steps: length of the run, for the schedule.

    Returns:
      An optax transformation of float32 gradients.
    """
    inner = optax.adamw(
        schedule(config, steps),
        b1=config.b1,
        b2=config.b2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=decays,
    )

    def update(updates, state, params=None):
        # optax raises a float to an integer power, which strict dtype promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            return inner.update(updates, state, params)

    return optax.GradientTransformation(inner.init, update)
