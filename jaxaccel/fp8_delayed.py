"""Delayed scaling: what is remembered of a matmul's operands, and what the next step makes of it.

The scale that a tensor is cast with comes from the largest magnitudes of the steps before
(arXiv:2209.05433, section 3.2; Transformer Engine's `DelayedScaling`). The backward pass of a
matmul returns, as the gradient of its state, the state's next value: automatic differentiation
carries it through scans, checkpoints and meshes. It is no gradient: never clip it, never give
it to an optimizer, and take the maximum where gradients are added.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, get_args, no_type_check

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Float, PyTree

from jaxaccel import numerics
from jaxaccel.numerics import Format
from pallas_kernels import manual_axes

OPERANDS = ("lhs", "rhs", "gradient")


@dataclasses.dataclass(frozen=True)
class Scaling:
    """What a recipe may vary. `window`, `use` and `margin` are of `delayed` only."""

    lhs: Format = "e4m3"
    rhs: Format = "e4m3"
    gradient: Format = "e5m2"
    """Of the gradient of the output. `block` uses e4m3 for all three."""
    power_of_two: bool = False
    """Round scales up to powers of two: scaling is then exact, at up to one bit of range."""
    accumulation: Literal["fast", "full"] = "fast"
    """Of the forward matmul. fast: Hopper's tensor cores keep about 14 bits of a sum. full:
    sums are promoted to float32 now and then, at a lower rate. Both backward matmuls are full."""
    window: int = 16
    """Steps that a scale looks back."""
    use: Literal["max", "most_recent"] = "max"
    """Of the window's largest magnitudes."""
    margin: int = 0
    """Doublings of the scale beyond what the window asks for; 1 if a loss scale may double."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if (legal := get_args(field.type)) and getattr(self, field.name) not in legal:
                raise ValueError(
                    f"{field.name} is {getattr(self, field.name)!r}; legal: {', '.join(legal)}"
                )
        if self.window < 1:
            raise ValueError(f"window is {self.window} steps; delayed scaling needs at least 1")
        if [self.lhs, self.rhs, self.gradient].count("e5m2") > 1:
            raise ValueError(
                f"formats are lhs {self.lhs}, rhs {self.rhs}, gradient {self.gradient}; each is "
                "multiplied with each, and cuBLAS has no matmul of e5m2 with e5m2"
            )
        if not 0 <= self.margin <= 16:
            raise ValueError(f"margin is {self.margin} doublings; legal is 0 to 16")


@jax.tree_util.register_dataclass
@no_type_check  # JAX rebuilds it around shapes and shardings too
@dataclasses.dataclass(frozen=True)
class DelayedState:
    """What delayed scaling remembers of one matmul, of each of its three operands.

    Its gradient is its next value. All of it is float32, as a gradient must be. One state is
    for one call: gradients of several calls would be added, which `settle` detects.
    """

    scale: Float[Array, "*stack 3"]  # to cast with next; 0: nothing but zeros seen yet
    history: Float[Array, "*stack 3 window"]  # largest magnitudes, newest first
    skipped: Float[Array, "*stack 3"]  # steps whose largest magnitude was not finite
    calls: Float[Array, "*stack"]  # of a gradient: how often the matmul ran; else 0


def init_state(window: int, stack: tuple[int, ...] = ()) -> DelayedState:
    """The state before the first step.

    Args:
      window: steps to remember.
      stack: leading dims, for layers whose states lie in one array.

    Returns:
      All zeros.

    Example:
      >>> init_state(16, (2,)).history.shape
      (2, 3, 16)
    """
    zeros = lambda *shape: jnp.zeros((*stack, *shape), jnp.float32)
    n = len(OPERANDS)
    return DelayedState(zeros(n), zeros(n, window), zeros(n), zeros())


def recorder(scaling: Scaling) -> Callable[[DelayedState, Array], DelayedState]:
    """What turns a state and the largest magnitudes of a step into the next state.

    Args:
      scaling: window, margin, formats.

    Returns:
      A function of a state and float32 [3]. Inside `jax.shard_map` it takes the
      maximum over devices, under `jax.vmap` with one state over examples.
    """

    @custom_vmap
    def record(state: DelayedState, top: Array) -> DelayedState:
        axes = tuple(manual_axes.varying(top) - manual_axes.varying(state.scale))
        if axes:  # inside shard_map the devices see unlike shards
            top = jax.lax.pmax(top, axes)
        window = jnp.concatenate([top[..., None], state.history[..., :-1]], axis=-1)
        wanted = window.max(-1) if scaling.use == "max" else top
        scales = [
            numerics.scale(
                wanted[..., i] * 2.0**scaling.margin,
                getattr(scaling, operand),
                power_of_two=scaling.power_of_two,
            )
            for i, operand in enumerate(OPERANDS)
        ]
        finite = jnp.isfinite(top)
        return DelayedState(
            scale=jnp.where(finite, jnp.stack(scales, axis=-1), state.scale),
            history=jnp.where(finite[..., None], window, state.history),
            skipped=state.skipped + (~finite).astype(jnp.float32),
            calls=jnp.ones_like(state.calls),
        )

    @record.def_vmap
    def _(size, batched, state, top):
        each = batched[0].scale  # a state for each example, or one for all
        if each:
            top = top if batched[1] else jnp.broadcast_to(top, (size, *top.shape))
        else:
            top = top.max(0)
        return record(state, top), jax.tree.map(lambda _: each, state)

    return record


def settle(state: PyTree[DelayedState], gradient: PyTree[DelayedState]) -> PyTree[DelayedState]:
    """The next state of delayed scaling, from its gradient; once an optimizer step.

    The gradient of one call is the next state. This adds what it cannot say: a matmul that did
    not run keeps its state, and so does an operand that was zero all through the window, or not
    finite in some micro-batch. A state that several calls shared, or whose gradient was summed
    over devices (`jax.shard_map` with `check_vma=False`), gets scales of NaN: what follows is
    NaN, where a scale too large would go unseen.

    Args:
      state: what the step began with.
      gradient: of the same structure; of several micro-batches the elementwise maximum.

    Returns:
      The same structure.
    """

    def one(old: DelayedState, new: DelayedState) -> DelayedState:
        failed = new.skipped > old.skipped
        ran = (new.calls > 0)[..., None]
        kept = failed | ~ran
        scale = jnp.where(kept | (new.scale == 0), old.scale, new.scale)
        return DelayedState(
            scale=jnp.where((new.calls > 1)[..., None], jnp.nan, scale),
            history=jnp.where(kept[..., None], old.history, new.history),
            skipped=jnp.where(ran, new.skipped, old.skipped),
            calls=jnp.zeros_like(old.calls),
        )

    return jax.tree.map(one, state, gradient, is_leaf=_is_state)


@jax.custom_vjp
def share(state: DelayedState) -> tuple[DelayedState, DelayedState]:
    """A state for each of two calls of one matmul; their next values merge by maximum.

    Args:
      state: of one matmul.

    Returns:
      Two like it.

    Example:
      >>> loss = lambda s: sum((i + 1) * x.calls for i, x in enumerate(share(s)))
      >>> float(jax.grad(loss)(init_state(2)).calls)
      2.0
    """
    return state, state


share.defvjp(
    lambda state: ((state, state), None),
    lambda _, both: (jax.tree.map(jnp.maximum, *both),),
)


def with_window(state: PyTree[DelayedState], window: int) -> PyTree[DelayedState]:
    """The same states with histories of another length: cut, or filled up with zeros.

    Args:
      state: any tree of states.
      window: at least 1.

    Returns:
      The same structure.

    Raises:
      ValueError: a window below 1.
    """
    if window < 1:
        raise ValueError(f"window is {window} steps; delayed scaling needs at least 1")

    def one(s: DelayedState) -> DelayedState:
        history = s.history[..., :window]
        more = [(0, 0)] * (history.ndim - 1) + [(0, window - history.shape[-1])]
        return dataclasses.replace(s, history=jnp.pad(history, more))

    return jax.tree.map(one, state, is_leaf=_is_state)


def is_cold(state: PyTree[DelayedState]) -> Bool[Array, ""]:
    """Whether an operand of some matmul has no scale yet, having been nothing but zeros.

    Args:
      state: any tree of states.

    Returns:
      A boolean; false of an empty tree.
    """
    scales = [jnp.any(s.scale == 0) for s in jax.tree.leaves(state, is_leaf=_is_state)]
    return jnp.any(jnp.stack(scales)) if scales else jnp.array(False)


def skipped(state: PyTree[DelayedState]) -> Float[Array, ""]:
    """How many largest magnitudes were not finite and left no trace, over all operands.

    Args:
      state: any tree of states.

    Returns:
      float32; 0 of an empty tree.
    """
    counts = [jnp.sum(s.skipped) for s in jax.tree.leaves(state, is_leaf=_is_state)]
    return jnp.sum(jnp.stack(counts)) if counts else jnp.float32(0)


def _is_state(node: Any) -> bool:
    return isinstance(node, DelayedState)
