"""Optimizers and schedules by configuration, and optimizers with 8-bit moments.

Everything here is a plain optax transformation. What 8-bit moments are, their errors and their
two modes stand in `jaxaccel.optim_8bit`.
"""

import dataclasses
import difflib
import fnmatch
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jaxtyping import PyTree

from jaxaccel.optim_8bit import (
    DEFAULT,
    Mask,
    Moments,
    scale_by_adam_8bit,
    scale_by_lion_8bit,
    trace_8bit,
)

__all__ = [
    "Moments",
    "OptimizerConfig",
    "adamw",
    "adamw_8bit",
    "decays",
    "lion_8bit",
    "make",
    "scale_by_adam_8bit",
    "scale_by_lion_8bit",
    "schedule",
    "sgd_8bit",
    "trace_8bit",
    "trainable",
]

LearningRate = float | jax.Array | Callable[[Any], Any]


Name = Literal["adamw", "adamw-8bit", "lion", "lion-8bit", "sgd", "muon"]


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer, its numbers, and the schedule of its learning rate."""

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
    name: Name = "adamw"
    """Also --optimizer NAME. AdamW (arXiv:1711.05101); Lion (arXiv:2302.06675), which wants a
    third to a tenth of AdamW's learning rate and three to ten times its decay; SGD with momentum
    b1; Muon for matrices of the layers, at AdamW's learning rate, and AdamW for the rest. -8bit:
    moments of matrices and embeddings as 8-bit codes."""

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


def trainable(params: PyTree, frozen: Sequence[str]) -> PyTree[bool]:
    """Which parameters are trained: all but those whose names a pattern matches.

    A name is the path, as in `layers.0.query.kernel`; `*` and `?` match dots too, so that
    `layers.*` is every layer.

    Args:
      params: nested dicts, abstract or not.
      frozen: shell patterns.

    Returns:
      A tree like `params` of booleans, an optax mask.

    Raises:
      ValueError: a pattern matches no parameter, or nothing is left to train.

    Example:
      >>> trainable({"query": {"kernel": 1.0, "bias": 2.0}, "embedding": 3.0}, ["query.*"])
      {'embedding': True, 'query': {'bias': False, 'kernel': False}}
    """
    named = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    names = [named(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    for pattern in frozen:
        if not fnmatch.filter(names, pattern):
            near = ", ".join(difflib.get_close_matches(pattern, names, 3, 0.0))
            raise ValueError(f"pattern {pattern!r} matches no parameter; nearest are {near}")
    kept = lambda path, _: not any(fnmatch.fnmatchcase(named(path), p) for p in frozen)
    mask = jax.tree_util.tree_map_with_path(kept, params)
    if not any(jax.tree.leaves(mask)):
        raise ValueError(f"patterns {', '.join(frozen)} match every parameter: none is trained")
    return mask


def make(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The optimizer of a configuration, with its schedule; clipping is the training step's.

    Weight decay is decoupled and spares norms and biases, which keep float32 moments too.

    Args:
      config: name and numbers.
      steps: length of the run, for the schedule.

    Returns:
      An optax transformation of float32 gradients.

    Raises:
      ValueError: the name is unknown.
    """
    rate, c = schedule(config, steps), config
    decay: dict[str, Any] = {"weight_decay": c.weight_decay, "mask": decays}
    moments = Moments(keep=lambda params: jax.tree.map(lambda decays: not decays, decays(params)))
    if c.name == "adamw":
        inner = optax.adamw(rate, c.b1, c.b2, c.epsilon, **decay)
    elif c.name == "adamw-8bit":
        inner = adamw_8bit(rate, c.b1, c.b2, c.epsilon, **decay, moments=moments)
    elif c.name == "lion":
        inner = optax.lion(rate, c.b1, c.b2, **decay)
    elif c.name == "lion-8bit":
        inner = lion_8bit(rate, c.b1, c.b2, **decay, moments=moments)
    elif c.name == "sgd":
        inner = optax.chain(
            optax.trace(c.b1),
            optax.add_decayed_weights(**decay),
            optax.scale_by_learning_rate(rate),
        )
    elif c.name == "muon":
        inner = _muon(rate, config)
    else:
        raise ValueError(f"unknown optimizer {c.name!r}; known: {', '.join(get_args(Name))}")

    def update(updates, state, params=None):
        # optax raises a float to an integer power, which strict dtype promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            return inner.update(updates, state, params)

    return optax.GradientTransformation(inner.init, update)


def adamw(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """`optax.adamw` with this schedule and decay mask, whatever the configuration's name.

    Args:
      config: its numbers.
      steps: length of the run, for the schedule.

    Returns:
      An optax transformation of float32 gradients.
    """
    return make(dataclasses.replace(config, name="adamw"), steps)


def _muon(rate: optax.Schedule, config: OptimizerConfig) -> optax.GradientTransformation:
    """Muon for the kernels of the layers, [layers, inputs, outputs]; AdamW for the rest."""
    c = config

    def dimensions(params):
        def one(path, p):
            if path[-1].key == "kernel" and p.ndim == 3:
                return optax.contrib.MuonDimensionNumbers(1, 2)
            return None

        return jax.tree_util.tree_map_with_path(one, params)

    return optax.contrib.muon(
        rate,
        weight_decay=c.weight_decay,
        weight_decay_mask=decays,
        adam_b1=c.b1,
        adam_b2=c.b2,
        eps=c.epsilon,
        adam_weight_decay=c.weight_decay,
        muon_weight_dimension_numbers=dimensions,
        consistent_rms=0.2,  # of an update, as AdamW's is: arXiv:2502.16982, section 2.2
    )


def adamw_8bit(
    learning_rate: LearningRate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    *,
    weight_decay: float = 1e-4,
    mask: Mask = None,
    moments: Moments = DEFAULT,
) -> optax.GradientTransformation:
    """`optax.adamw` with both moments in 8 bits: 2.03 bytes a parameter instead of 8.

    **Exactness**: approximate. Mode "stable" (default): a first moment errs by 0.00703, a second
    by 0.00352 of its block's largest at most. Mode "bitsandbytes", for parity: that and four
    defects, among them updates hundreds of times the learning rate where gradients of one block
    spread over three decades or more (head of `jaxaccel.optim_8bit`). It also decays after the
    update, `p <- (p - lr u) (1 - lr weight_decay)`, as that package's CUDA kernel does.

    Args:
      learning_rate: a number or an `optax.Schedule`.
      b1, b2, eps, eps_root: as `scale_by_adam_8bit`.
      weight_decay: decoupled, times the learning rate.
      mask: True for parameters that decay; an optax mask.
      moments: how the moments are held.

    Returns:
      An optax transformation.

    Raises:
      As `scale_by_adam_8bit`.

    Example:
      >>> optimizer = adamw_8bit(1e-3, weight_decay=0.1, moments=Moments(min_size=0))
      >>> params = {"kernel": jnp.ones((2, 256))}
      >>> updates, _ = optimizer.update(params, optimizer.init(params), params)
      >>> round(float(updates["kernel"][0, 0]), 5)
      -0.0011
    """
    adam = scale_by_adam_8bit(b1, b2, eps, eps_root, moments=moments)
    rate = optax.scale_by_learning_rate(learning_rate)
    if moments.mode == "stable":
        return optax.chain(adam, optax.add_decayed_weights(weight_decay, mask), rate)
    after = _decay_after(learning_rate, weight_decay)
    return optax.chain(adam, rate, after if mask is None else optax.masked(after, mask))


def _decay_after(rate: LearningRate, weight_decay: float) -> optax.GradientTransformation:
    """Decays what a parameter will be: `u <- (p + u) (1 - rate weight_decay) - p`."""

    def update(updates, state, params=None):
        if params is None:
            raise ValueError("weight decay needs the parameters: update(grads, state, params)")
        factor = weight_decay * (rate(state.count) if callable(rate) else rate)
        decay = lambda u, p: u - (factor * (p + u)).astype(u.dtype)
        count = optax.safe_increment(state.count)
        return jax.tree.map(decay, updates, params), optax.ScaleByScheduleState(count)

    return optax.GradientTransformation(
        lambda params: optax.ScaleByScheduleState(jnp.zeros([], jnp.int32)), update
    )


def lion_8bit(
    learning_rate: LearningRate,
    b1: float = 0.9,
    b2: float = 0.99,
    *,
    weight_decay: float = 1e-3,
    mask: Mask = None,
    moments: Moments = DEFAULT,
) -> optax.GradientTransformation:
    """`optax.lion` (arXiv:2302.06675) with its moment in 8 bits: 1.02 bytes a parameter.

    **Exactness**: approximate: the moment errs by 0.00703 of its block's largest at most; mode
    "bitsandbytes" has the first defect besides (head of `jaxaccel.optim_8bit`).

    Args:
      learning_rate: a number or an `optax.Schedule`.
      b1, b2: decay of the moment in the direction, and of the moment.
      weight_decay: decoupled, times the learning rate.
      mask: True for parameters that decay; an optax mask.
      moments: how the moment is held.

    Returns:
      An optax transformation.

    Raises:
      As `scale_by_adam_8bit`.
    """
    return optax.chain(
        scale_by_lion_8bit(b1, b2, moments=moments),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def sgd_8bit(
    learning_rate: LearningRate,
    momentum: float = 0.9,
    nesterov: bool = False,
    *,
    moments: Moments = DEFAULT,
) -> optax.GradientTransformation:
    """`optax.sgd` with momentum, which is held in 8 bits: 1.02 bytes a parameter.

    **Exactness**: as `lion_8bit`.

    Args:
      learning_rate: a number or an `optax.Schedule`.
      momentum: decay of the sum of gradients.
      nesterov: look one step ahead.
      moments: how the momentum is held.

    Returns:
      An optax transformation.

    Raises:
      As `scale_by_adam_8bit`.
    """
    return optax.chain(
        trace_8bit(momentum, nesterov, moments=moments),
        optax.scale_by_learning_rate(learning_rate),
    )
