"""Matmuls whose operands are eight bits wide: `jax.lax.dot_general` in FP8, forward and back.

FP8 doubles the rate of Hopper's tensor cores and halves the bytes that a matmul reads. Three
recipes say where the scale of an operand comes from:

| recipe | scale | formats (lhs, rhs, gradient) | state |
|---|---|---|---|
| `current` | the tensor's own largest magnitude | e4m3, e4m3, e5m2 | none |
| `delayed` | the largest of the last `window` steps' | e4m3, e4m3, e5m2 | 3 (window + 2) floats |
| `block` | one for 128 values of a row; for 128 x 128 of rhs | all e4m3 | none |

`current` (arXiv:2209.05433, section 3.1, with a scale for each step) reads an operand twice,
once for its maximum and once for the cast. `delayed` (`fp8_delayed`) casts with
a scale that is known beforehand, in the same pass, and saturates what outgrows it. `block`
(arXiv:2412.19437, section 3.3) confines an outlier to its tile; see `fp8_block`.

The operands of `dot` are FP8 values and nothing else. Writing "quantise, dequantise, multiply"
and leaving it to the compiler to see an FP8 matmul in it fails in silence whenever a copy, a
collective or a changed pattern comes between. The result is scaled in float32. Between the
passes only the eight-bit operands are kept.

**Exactness**: approximate. A product is off by the rounding of both operands: of normally
distributed ones 28.5 dB below the signal for e4m3 with e4m3, 24.6 dB for e5m2 with e4m3.

It pays where matmuls are large: below some thousand rows and columns the casts take what the
matmul gains. It does not pay on hardware without FP8, where the same values are multiplied in a
wider type. What could be better: casts fused into the norm and the activation before them.
"""

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jaxaccel import fp8_block, fp8_delayed, names, numerics
from jaxaccel.fp8_delayed import (
    OPERANDS,
    DelayedState,
    Scaling,
    is_cold,
    settle,
    skipped,
    with_window,
)
from jaxaccel.numerics import Quantized
from pallas_kernels import manual_axes

Dims = tuple[tuple[Any, Any], tuple[Any, Any]]  # ((contracting), (batch)), each (lhs, rhs)
Recipe = Literal["current", "delayed", "block"]

__all__ = [
    "DelayedState",
    "DotGeneral",
    "Quantized",
    "Recipe",
    "Scaling",
    "choose",
    "dot_general",
    "is_cold",
    "quantize_weights",
    "settle",
    "skipped",
    "with_window",
]


@dataclasses.dataclass(frozen=True)
class DotGeneral:
    """A matmul in FP8, with the signature of `jax.lax.dot_general`; made by `dot_general`."""

    recipe: str
    scaling: Scaling
    warm_start: bool

    def init_state(self, stack: tuple[int, ...] = ()) -> DelayedState | None:
        """State before the first step; None for a recipe without.

        Args:
          stack: leading dims, for layers whose states lie in one array.

        Example:
          >>> dot_general("delayed").init_state((2,)).history.shape
          (2, 3, 16)
        """
        if self.recipe != "delayed":
            return None
        return fp8_delayed.init_state(self.scaling.window, stack)

    def __call__(
        self,
        lhs: Float[Array, "..."],
        rhs: Float[Array, "..."],
        dimension_numbers: Dims,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
        state: DelayedState | None = None,
        weight: Quantized | None = None,
    ) -> Array:
        """Multiplies as `jax.lax.dot_general` does, casting both operands to FP8.

        Args:
          lhs, rhs: floating-point, of any width above eight bits; any batch and contracting
            dims. `block` takes rhs to be the weight.
          dimension_numbers: as in `jax.lax.dot_general`.
          precision: `HIGHEST` accumulates the forward matmul in full as well.
          preferred_element_type: of the result; the operands' common type by default.
          out_sharding: must be None; shardings come from `jax.jit` here.
          state: of `delayed`. Its gradient is its next value.
          weight: rhs, cast before by `quantize_weights`; rhs then only gets the gradient.

        Raises:
          ValueError: operands that are not floating-point, or a state that is missing.
        """
        for name, x in (("lhs", lhs), ("rhs", rhs)):
            if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize == 1:
                raise ValueError(f"{name} is {x.dtype}; an FP8 matmul casts float16, bfloat16 and "
                                 "float32")  # fmt: skip
        if out_sharding is not None:
            raise ValueError("out_sharding is not supported by an FP8 matmul; leave it None")
        if (state is not None) != (self.recipe == "delayed"):
            raise ValueError(
                "delayed scaling needs state=, from init_state()"
                if state is None
                else f"{self.recipe} scaling has no state; pass none"
            )
        out_dtype = preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype)
        a, b, shape = _as_matrices(lhs, rhs, dimension_numbers)
        if weight is not None and (a.ndim > 2 or dimension_numbers[0][1][0] != 0):
            raise ValueError(
                f"weight= stands for an rhs [K, N] contracted over K; got {dimension_numbers}"
            )
        a, b = manual_axes.vary_alike(a, b)
        if self.recipe == "block":
            out = fp8_block.matmul(a, b, weight, self.scaling.power_of_two)
        else:
            full = self.scaling.accumulation == "full" or _is_highest(precision)
            out = _matmul(_Static(self, full, a.dtype, b.dtype, out_dtype), a, b, state, weight)
        return out.astype(out_dtype).reshape(shape)


def dot_general(
    recipe: Recipe | str = "current",
    scaling: Scaling = Scaling(),  # noqa: B008 (frozen)
    *,
    warm_start: bool = True,
) -> DotGeneral:
    """A matmul in FP8, to be passed where `jax.lax.dot_general` is the default.

    Forward: `cast(lhs) . cast(rhs) * (scale_lhs * scale_rhs)`, in float32 up to the result's
    type. Backward: the output's gradient is cast once and multiplied with the two FP8 operands
    that the forward pass kept.

    **Exactness**: approximate; see the head of this module.

    Args:
      recipe: `current`, `delayed` or `block`.
      scaling: formats, accumulation, window.
      warm_start: of `delayed`. An operand whose state is empty is scaled by its own largest
        magnitude, which costs every step the pass over memory that delayed scaling saves.
        False: such an operand is zero or the result NaN. Begin with True, go on with False.

    Returns:
      A callable with `jax.lax.dot_general`'s signature, and with `state=` for `delayed`.

    Example:
      >>> from flax import nnx
      >>> layer = nnx.Linear(32, 16, dot_general=dot_general("current"), rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((4, 32))).shape
      (4, 16)
      >>> dot = dot_general("delayed")
      >>> state, dims = dot.init_state(), (((1,), (0,)), ((), ()))
      >>> loss = lambda w, state: dot(jnp.ones((4, 32)), w, dims, state=state).sum()
      >>> dw, state = jax.grad(loss, argnums=(0, 1))(jnp.ones((32, 16)), state)
      >>> [round(float(x), 5) for x in state.scale * 448]  # the gradient is e5m2: 128 times less
      [1.0, 1.0, 0.00781]

    References:
      FP8 formats and per-tensor scaling: arXiv:2209.05433. Blocks: arXiv:2412.19437, 3.3.
    """
    if recipe not in ("current", "delayed", "block"):
        raise ValueError(f"unknown recipe {recipe!r}; known: current, delayed, block")
    return DotGeneral(recipe, scaling, warm_start)


def quantize_weights(
    params: PyTree[Array], dot: DotGeneral, state: PyTree[DelayedState] | None = None
) -> PyTree[Quantized]:
    """Casts weights once, for all the micro-batches of a step.

    Costs a byte a weight, held through the step; saves a cast for each micro-batch.

    Args:
      params: weights `[..., K, N]` that are contracted over K as rhs, any tree of them.
      dot: what they will be passed to, as `weight=`.
      state: of `delayed`; the same tree with a `DelayedState` in place of each weight.

    Returns:
      The same tree with a `Quantized` in place of each weight; leading dims stay, for a scan.

    Example:
      >>> w = jnp.ones((2, 32, 16))  # of two layers
      >>> quantize_weights({"up": w}, dot_general())["up"].scale.shape
      (2,)
    """

    def one(w, state):
        if dot.recipe == "block":
            return fp8_block.quantize_blocks(w, dot.scaling.power_of_two)
        return _quantize(dot, w, "rhs", state)

    def stacked(w, state):
        function = one
        for _ in range(w.ndim - 2):
            function = jax.vmap(function)
        return function(w, state)

    if state is None:
        return jax.tree.map(lambda w: stacked(w, None), params)
    return jax.tree.map(stacked, params, state)


def choose(shapes: Mapping[str, Sequence[int]], patterns: Sequence[str] = ("*",)) -> dict[str, str]:
    """Which linear layers to convert, and why not the others.

    Args:
      shapes: of each layer's weight, by name.
      patterns: shell patterns; a name that matches one of them is asked for.

    Returns:
      By name: "" for a layer that is to be converted, else the reason why it is not.

    Raises:
      ValueError: no layer is left; lists the reasons.

    Example:
      >>> choose({"up": (32, 64), "gate": (32, 60), "query": (32, 32)}, ["up", "gate"])
      {'up': '', 'gate': '60 is no multiple of 16', 'query': 'no pattern matches'}
    """
    reasons = {}
    for name, shape in shapes.items():
        odd = [size for size in shape if size % 16]
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            reasons[name] = "no pattern matches"
        elif odd:  # XLA would pad each operand, at the cost of a copy
            reasons[name] = f"{' and '.join(map(str, odd))} is no multiple of 16"
        else:
            reasons[name] = ""
    if all(reasons.values()):
        raise ValueError(
            f"no layer for FP8 in {','.join(patterns)!r}: "
            + "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        )
    return reasons


# ---- One matmul, [M, K] x [K, N] or [B, M, K] x [B, K, N] ------------------------------------


class _Static(NamedTuple):
    dot: DotGeneral
    full: bool  # accumulation of the forward matmul
    lhs_dtype: Any
    rhs_dtype: Any
    out_dtype: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(static: _Static, lhs, rhs, state, weight):
    return _matmul_fwd(static, lhs, rhs, state, weight)[0]


def _matmul_fwd(static: _Static, lhs, rhs, state, weight):
    lhs = _quantize(static.dot, lhs, "lhs", state)
    rhs = _quantize(static.dot, rhs, "rhs", state) if weight is None else weight
    out = _multiply(lhs, rhs, (-1, -2), full=static.full)
    return out.astype(static.out_dtype), (lhs, rhs, state)


def _matmul_bwd(static: _Static, residuals, gradient):
    lhs, rhs, state = residuals
    g = _quantize(static.dot, gradient, "gradient", state)
    dlhs = _multiply(g, rhs, (-1, -1), full=True).astype(static.lhs_dtype)
    drhs = _multiply(lhs, g, (-2, -2), full=True).astype(static.rhs_dtype)
    if state is not None:
        state = fp8_delayed.recorder(static.dot.scaling)(
            state, jnp.stack([lhs.amax, rhs.amax, g.amax])
        )
    return dlhs, drhs, state, None


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def _multiply(a: Quantized, b: Quantized, contract: tuple[int, int], *, full: bool) -> Array:
    """The product in float32; `contract` is a dim of each."""
    batch = tuple(range(a.values.ndim - 2))
    contracting = tuple((dim % a.values.ndim,) for dim in contract)
    # On Hopper HIGHEST, and nothing else, promotes sums to float32.
    precision = jax.lax.Precision.HIGHEST if full else jax.lax.Precision.DEFAULT
    with jax.named_scope(names.FP8_MATMUL):
        product = jax.lax.dot_general(
            a.values,
            b.values,
            ((contracting[0], contracting[1]), (batch, batch)),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return product * (a.scale * b.scale)


def _quantize(dot: DotGeneral, x: Array, operand: str, state: DelayedState | None) -> Quantized:
    format, top = getattr(dot.scaling, operand), numerics.amax(x)
    scale = numerics.scale(top, format, power_of_two=dot.scaling.power_of_two)
    if state is not None:
        known = state.scale[OPERANDS.index(operand)]
        scale = jnp.where(known > 0, known, scale) if dot.warm_start else known
    return Quantized(numerics.cast(x, scale, format), scale, top)


def _is_highest(precision: Any) -> bool:
    both = precision if isinstance(precision, tuple) else (precision,)
    return jax.lax.Precision.HIGHEST in [p and jax.lax.Precision(p) for p in both]


def _as_matrices(lhs: Array, rhs: Array, dims: Dims) -> tuple[Array, Array, list[int]]:
    """Operands as [M, K] and [K, N], with a batch as [B, ...]; and the shape of the result."""
    (lc, rc), (lb, rb) = dims
    lf = [d for d in range(lhs.ndim) if d not in (*lc, *lb)]
    rf = [d for d in range(rhs.ndim) if d not in (*rc, *rb)]
    sizes = lambda x, *groups: [math.prod(x.shape[d] for d in group) for group in groups]
    a = lhs.transpose(*lb, *lf, *lc).reshape(sizes(lhs, lb, lf, lc)[not lb :])
    b = rhs.transpose(*rb, *rc, *rf).reshape(sizes(rhs, rb, rc, rf)[not lb :])
    return a, b, [lhs.shape[d] for d in (*lb, *lf)] + [rhs.shape[d] for d in rf]
