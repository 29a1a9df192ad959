"""Matmuls whose operands are eight bits wide: `jax.lax.dot_general` in FP8, forward and back.

FP8 doubles the rate of Hopper's tensor cores and halves the bytes that a matmul reads. Three
recipes say where the scale of an operand comes from:

| recipe | scale | formats (lhs, rhs, gradient) | state |
|---|---|---|---|
| `current` | the tensor's own largest magnitude | e4m3, e4m3, e5m2 | none |
| `delayed` | the largest of `window` steps | e4m3, e4m3, e5m2 | 3 (window + 2) + 1 floats |
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
matmul gains. It does not pay on hardware without FP8, which multiplies in a wider type.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType
from jaxtyping import Array, Float, PyTree

from jaxaccel import fp8_block, fp8_delayed, names, numerics
from jaxaccel.fp8_delayed import (
    OPERANDS,
    DelayedState,
    Scaling,
    is_cold,
    settle,
    share,
    skipped,
    with_window,
)
from jaxaccel.fp8_fused import Cast
from jaxaccel.fp8_layers import choose
from jaxaccel.numerics import Quantized
from jaxaccel.sharding import STAGE
from pallas_kernels import manual_axes

Dims = tuple[tuple[Any, Any], tuple[Any, Any]]  # ((contracting), (batch)), each (lhs, rhs)
RECIPES = ("current", "delayed", "block")
_PLAIN: Dims = (((1,), (0,)), ((), ()))  # [M, K] x [K, N]

__all__ = [
    "Cast",
    "DelayedState",
    "DotGeneral",
    "Quantized",
    "Scaling",
    "choose",
    "dot_general",
    "is_cold",
    "parts",
    "quantize_weights",
    "settle",
    "share",
    "skipped",
    "with_window",
]


@dataclasses.dataclass(frozen=True)
class DotGeneral:
    """A matmul in FP8, with the signature of `jax.lax.dot_general`; made by `dot_general`."""

    recipe: str
    scaling: Scaling
    warm_start: bool
    weights_first: bool = False

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
        lhs: Float[Array, "..."] | Cast,
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
          lhs, rhs: float16, bfloat16 or float32; any batch and contracting dims. `block` takes
            rhs to be the weight: mind that `jnp.einsum` swaps the two for some outputs.
            lhs may be a `Cast` [M, K], of `delayed`.
          dimension_numbers: as in `jax.lax.dot_general`.
          precision: `HIGHEST` accumulates the forward matmul in full as well; all else means
            what `Scaling.accumulation` says. `jax.default_matmul_precision` is not asked.
          preferred_element_type: of the result; the operands' common type by default.
          out_sharding: must be None; shardings come from `jax.jit`, on meshes of `Auto` axes.
          state: of `delayed`, for this call alone. Its gradient is its next value.
          weight: rhs, cast before by `quantize_weights`; rhs then only gets the gradient.

        Raises:
          ValueError: operands of another type or on explicit mesh axes, a state that is missing,
            a weight that is not this one.
          TypeError: shapes and dims that do not fit, as from `jax.lax.dot_general`.
        """
        cast, lhs = (lhs.quantized, lhs.like) if isinstance(lhs, Cast) else (None, lhs)
        if cast is not None and (self.recipe != "delayed" or dimension_numbers != _PLAIN):
            raise ValueError(
                f"lhs is a Cast, which `delayed` multiplies as [M, K] with [K, N]; got "
                f"{self.recipe} and dims {dimension_numbers}"
            )
        for name, x in (("lhs", lhs), ("rhs", rhs)):
            if x.dtype not in ("float16", "bfloat16", "float32"):
                raise ValueError(f"{name} is {x.dtype}; legal: float16, bfloat16, float32")
            if AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types:
                raise ValueError(
                    f"{name} is {jax.typeof(x)}, on a mesh with explicit axes; make the mesh with "
                    "axis_types=(AxisType.Auto, ...)"
                )
        if out_sharding is not None:
            raise ValueError("out_sharding is not supported by an FP8 matmul; leave it None")
        _check_state(self, state)
        # What it refuses is refused here: reshaped operands would hide a mismatch.
        jax.eval_shape(
            lambda lhs, rhs: jax.lax.dot_general(lhs, rhs, dimension_numbers),
            *(jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (lhs, rhs)),
        )
        out_dtype = preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype)
        a, b, shape = _as_matrices(lhs, rhs, dimension_numbers)
        if weight is not None:
            _check_weight(self, weight, rhs, dimension_numbers)
        a, b = manual_axes.vary_alike(a, b)
        if self.recipe == "block":
            out = fp8_block.matmul(a, b, weight, out_dtype, self.scaling.power_of_two)
        else:
            full = self.scaling.accumulation == "full" or _is_highest(precision)
            static = _Static(self, full, a.dtype, b.dtype, out_dtype)
            out = _matmul(static, a, b, state, weight, cast)
        return out.reshape(shape)


def dot_general(
    recipe: str = "current",
    scaling: Scaling = Scaling(),  # noqa: B008 (frozen)
    *,
    warm_start: bool = True,
    weights_first: bool = False,
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
      weights_first: as `remat.weights_first`.

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
    if recipe not in RECIPES:
        raise ValueError(f"unknown recipe {recipe!r}; known: {', '.join(RECIPES)}")
    return DotGeneral(recipe, scaling, warm_start, weights_first)


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

    Raises:
      ValueError: an array that is no matrix, or a state that is missing.

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
        if w.ndim < 2:
            raise ValueError(f"got {w.dtype}{list(w.shape)}; weights are [..., K, N]")
        _check_state(dot, state)
        function = one
        for _ in range(w.ndim - 2):
            function = jax.vmap(function)
        return function(w, state)

    if state is None:
        return jax.tree.map(lambda w: stacked(w, None), params)
    return jax.tree.map(stacked, params, state)


def parts(dot: DotGeneral) -> tuple[Callable, ...]:
    """What a matmul in pieces calls where `dot` is one call: the fields of `overlap.Product`.

    Args:
      dot: of `current` or `delayed`.

    Returns:
      Casts of lhs, rhs and gradient, `(x, state) -> Quantized`; the product of two cast matrices,
      `(a, b, contracted dims, dtype) -> Array`; and `(state, lhs, rhs, gradient) -> next state`.

    Raises:
      ValueError: `block`, whose scales go along with rows and columns.
    """
    if dot.recipe == "block":
        raise ValueError("block scaling multiplies whole rows; choose current or delayed")

    def multiply(a, b, dims, dtype):
        full = dims != (1, 0) or dot.scaling.accumulation == "full"
        return _multiply(a, b, dims, full=full).astype(dtype)

    def record(state, *operands):
        if state is None:
            return None
        top = jnp.stack([operand.amax for operand in operands])
        return fp8_delayed.recorder(dot.scaling)(state, top)

    casts = [lambda x, state, name=name: _quantize(dot, x, name, state) for name in OPERANDS]
    return *casts, multiply, record


# ---- One matmul, [M, K] x [K, N] or [B, M, K] x [B, K, N] ------------------------------------


class _Static(NamedTuple):
    dot: DotGeneral
    full: bool  # accumulation of the forward matmul
    lhs_dtype: Any
    rhs_dtype: Any
    out_dtype: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(static: _Static, lhs, rhs, state, weight, cast):
    return _matmul_fwd(static, lhs, rhs, state, weight, cast)[0]


def _matmul_fwd(static: _Static, lhs, rhs, state, weight, cast):
    lhs = _quantize(static.dot, lhs, "lhs", state) if cast is None else cast
    rhs = _quantize(static.dot, rhs, "rhs", state) if weight is None else weight
    # Hopper wants the inner dim last: XLA would turn the weights of all layers beforehand, in
    # float32, and so hold them twice.
    as_it_lies = with_layout_constraint(rhs.values, Layout(tuple(range(rhs.values.ndim))))
    rhs = rhs._replace(values=as_it_lies)
    out = _multiply(lhs, rhs, (-1, -2), full=static.full)
    return out.astype(static.out_dtype), (lhs, rhs, state)


def _matmul_bwd(static: _Static, residuals, gradient):
    lhs, rhs, state = residuals
    g = _quantize(static.dot, gradient, "gradient", state)
    drhs = _multiply(lhs, g, (-2, -2), full=True).astype(static.rhs_dtype)
    if static.dot.weights_first:
        g, drhs = jax.lax.optimization_barrier((g, drhs))
    dlhs = _multiply(g, rhs, (-1, -1), full=True).astype(static.lhs_dtype)
    if state is not None:
        state = fp8_delayed.recorder(static.dot.scaling)(
            state, jnp.stack([lhs.amax, rhs.amax, g.amax])
        )
    return dlhs, drhs, state, None, None


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
    if dot.recipe == "current" and (axes := tuple(manual_axes.varying(x) - {STAGE})):
        top = jax.lax.pmax(top, axes)  # inside shard_map: of the tensor, not of this shard
    scale = numerics.scale(top, format, power_of_two=dot.scaling.power_of_two)
    if state is not None:
        known = state.scale[OPERANDS.index(operand)]
        scale = jnp.where(known == 0, scale, known) if dot.warm_start else known
    values = numerics.cast(x, scale, format)
    # A scale that is not known yet serves zeros; of anything else the result is NaN.
    return Quantized(values, jnp.where((scale == 0) & (top != 0), jnp.nan, scale), top)


def _check_state(dot: DotGeneral, state: DelayedState | None) -> None:
    if (state is not None) != (dot.recipe == "delayed"):
        raise ValueError(
            "delayed scaling needs a state, from init_state()"
            if state is None
            else f"{dot.recipe} scaling has no state; pass none"
        )


def _check_weight(dot: DotGeneral, weight: Quantized, rhs: Array, dims: Dims) -> None:
    whole = dims[0][1] and dims[0][1][0] == 0 and rhs.ndim == 2
    wanted = jax.eval_shape(
        lambda w: quantize_weights(w, dataclasses.replace(dot, recipe=_STATELESS[dot.recipe])), rhs
    )
    shapes = lambda q: [x.shape for x in q]
    if not whole or shapes(weight) != shapes(wanted):
        raise ValueError(
            f"weight= has values {list(weight.values.shape)} and scale {list(weight.scale.shape)}; "
            f"for {dot.recipe} scaling it must be quantize_weights of the rhs, [K, N] contracted "
            f"over K; rhs is {list(rhs.shape)}, dims {dims}"
        )


_STATELESS = {"current": "current", "delayed": "current", "block": "block"}


def _is_highest(precision: Any) -> bool:
    both = precision if isinstance(precision, tuple) else (precision,)
    return any(p in (jax.lax.Precision.HIGHEST, "highest", "float32") for p in both)


def _as_matrices(lhs: Array, rhs: Array, dims: Dims) -> tuple[Array, Array, list[int]]:
    """Operands as [M, K] and [K, N], with a batch as [B, ...]; and the shape of the result."""
    (lc, rc), (lb, rb) = dims
    lf = [d for d in range(lhs.ndim) if d not in (*lc, *lb)]
    rf = [d for d in range(rhs.ndim) if d not in (*rc, *rb)]
    sizes = lambda x, *groups: [math.prod(x.shape[d] for d in group) for group in groups]
    a = lhs.transpose(*lb, *lf, *lc).reshape(sizes(lhs, lb, lf, lc)[not lb :])
    b = rhs.transpose(*rb, *rc, *rf).reshape(sizes(rhs, rb, rc, rf)[not lb :])
    return a, b, [lhs.shape[d] for d in (*lb, *lf)] + [rhs.shape[d] for d in rf]
