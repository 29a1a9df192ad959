"""The three collective matmuls as custom derivatives; see `collective_matmul` for their use.

Each is a walk over parts (`parts`) with a matmul at each of them. Operands are cast once, by a
`Product`, before they travel; what is kept for the backward pass are the cast operands.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxaccel.overlap import parts
from jaxaccel.overlap.parts import Form


class Product(NamedTuple):
    """How operands are cast and multiplied: a seam for narrower types.

    A cast returns any tree of arrays. Those with the operand's number of dims travel and are
    cut as it is; the rest (a scale) must be the same on all devices of the axis.
    """

    lhs: Callable[[Array, Any], Any]  # (x, state), once, before it travels
    rhs: Callable[[Array, Any], Any]  # (w, state)
    gradient: Callable[[Array, Any], Any]  # (of the output, state), once, before it travels
    multiply: Callable[[Any, Any, tuple[int, int], Any], Array]
    """Of two cast matrices, which dim of each is contracted, and the type of the result."""
    next_state: Callable[[Any, Any, Any, Any], Any]  # (state, cast lhs, rhs, gradient)


def _dot(a: Array, b: Array, dims: tuple[int, int], dtype: Any) -> Array:
    contracting = ((dims[0],), (dims[1],))
    return lax.dot_general(a, b, (contracting, ((), ())), preferred_element_type=dtype)


_unchanged = lambda x, state: x
PLAIN = Product(_unchanged, _unchanged, _unchanged, _dot, lambda state, *_: state)


_Static = tuple[Form, Form, Product]  # of the forward and of the backward pass


def _multiply(static: _Static, a: Any, b: Any, dims: tuple[int, int], dtype: Any) -> Array:
    """Rows by a weight (either dim of it), or by rows: then over all dims but the last."""
    form, _, product = static
    leading = next(x.shape[:-1] for x in jax.tree.leaves(a) if x.ndim == form.ndim)
    flat = functools.partial(parts.on_rows, form, lambda x: x.reshape(-1, x.shape[-1]))
    if dims[0] == 0:
        return product.multiply(flat(a), flat(b), dims, dtype)
    return product.multiply(flat(a), b, dims, dtype).reshape(*leading, -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather_matmul(static, x, ws, states):
    """Of x [..., t, K] and weights [K, N] the products with all devices' rows."""
    return _gather_matmul_fwd(static, x, ws, states)[0]


def _gather_matmul_fwd(static, x, ws, states):
    form, _, product = static
    lhs, rhs = product.lhs(x, states[0]), tuple(map(product.rhs, ws, states))

    def use(carry, rows, part, block):
        each = [_multiply(static, rows, w, (1, 0), x.dtype) for w in rhs]
        # XLA merges matmuls that share an operand; slices of the result would be tied one by one.
        return carry, jnp.concatenate(each, axis=-1)

    _, out = parts.gathered(form, lhs, use)
    ends = list(itertools.accumulate(w.shape[1] for w in ws))
    return tuple(jnp.split(out, ends[:-1], axis=-1)), (lhs, rhs, states)


def _gather_matmul_bwd(static, residuals, gradients):
    _, form, product = static
    lhs, rhs, states = residuals
    dtype = gradients[0].dtype
    cast = tuple(map(product.gradient, gradients, states))
    if form.kind != "plain":  # or XLA might keep the forward pass's gather instead
        lhs, cast = parts.tie((lhs, cast))
    whole = parts.gather(form, lhs)
    terms = functools.reduce(
        jnp.add, (_multiply(static, g, w, (1, 1), dtype) for g, w in zip(cast, rhs))
    )
    if form.kind != "plain":  # the gather under this matmul, the scatter under the next
        whole, terms = parts.tie((whole, terms))
    dx = parts.scatter(form, terms)
    dws = tuple(_multiply(static, whole, g, (0, 0), dtype) for g in cast)
    return dx, dws, tuple(product.next_state(s, lhs, w, g) for s, w, g in zip(states, rhs, cast))


gather_matmul.defvjp(_gather_matmul_fwd, _gather_matmul_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul_scatter(static, x, w, state):
    """This device's rows of the sum of x [..., n t, K] by w [K, N]."""
    return _matmul_scatter_fwd(static, x, w, state)[0]


def _matmul_scatter_fwd(static, x, w, state):
    form, _, product = static
    operands = product.lhs(x, state), product.rhs(w, state)

    def make(operands, part, block):
        lhs, rhs = operands
        return _multiply(static, parts.select(form, lhs, part, block), rhs, (1, 0), x.dtype)

    return parts.scattered(form, make, operands), (*operands, state)


def _matmul_scatter_bwd(static, residuals, gradient):
    _, form, product = static
    lhs, rhs, state = residuals
    cast = product.gradient(gradient, state)

    def use(dw, rows, part, block):
        own = parts.select(form, lhs, part, block)
        term = _multiply(static, own, rows, (0, 0), jnp.float32)
        return term if dw is None else dw + term, _multiply(
            static, rows, rhs, (1, 1), gradient.dtype
        )

    dw, dx = parts.gathered(form, cast, use)
    return dx, dw.astype(gradient.dtype), product.next_state(state, lhs, rhs, cast)


matmul_scatter.defvjp(_matmul_scatter_fwd, _matmul_scatter_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul_reduce(static, x, w, state):
    """The sum over devices of x [..., K] by w [K, N]."""
    return _matmul_reduce_fwd(static, x, w, state)[0]


def _matmul_reduce_fwd(static, x, w, state):
    form, _, product = static
    operands = product.lhs(x, state), product.rhs(w, state)

    def make(operands, part):
        lhs, rhs = operands
        n = w.shape[1] // form.parts
        cut = lambda x: x[:, part * n : (part + 1) * n] if x.ndim == 2 else x
        return _multiply(static, lhs, jax.tree.map(cut, rhs), (1, 0), x.dtype)

    total = functools.partial(lax.psum, axis_name=form.axis)
    columns = parts.reduced(form.parts, make, operands, total)
    return jnp.concatenate(columns, axis=-1), (*operands, state)


def _matmul_reduce_bwd(static, residuals, gradient):
    _, _, product = static
    lhs, rhs, state = residuals
    g = product.gradient(gradient, state)
    dx = _multiply(static, g, rhs, (1, 1), gradient.dtype)
    dw = _multiply(static, lhs, g, (0, 0), gradient.dtype)
    return dx, dw, product.next_state(state, lhs, rhs, g)


matmul_reduce.defvjp(_matmul_reduce_fwd, _matmul_reduce_bwd)
