"""Root-mean-square norm (arXiv:1910.07467): reference, and XLA with a written backward.

There is no kernel: the forward pass is one read and one write, and XLA's own fusion is
at that limit. The written backward exists because automatic differentiation keeps more
intermediates than the two needed (the input and 1/rms) and, on a CPU, recomputes the
chain of them several times over.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm_reference(
    x: Float[Array, "*B D"], scale: Float[Array, " D"], epsilon: float = 1e-6
) -> Float[Array, "*B D"]:
    """`x / sqrt(mean(x^2) + epsilon) * scale`, differentiated by JAX; see `rms_norm`.

    Args:
      x: any float dtype.
      scale: one per channel.
      epsilon: added to the mean of squares.

    Returns:
      The shape and dtype of `x`; computed in float32.
    """
    x32 = x.astype(jnp.float32)
    rms = jnp.sqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + epsilon)
    scale32 = jnp.expand_dims(scale.astype(jnp.float32), range(x.ndim - 1))
    return (x32 / rms * scale32).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(
    x: Float[Array, "*B D"], scale: Float[Array, " D"], epsilon: float = 1e-6
) -> Float[Array, "*B D"]:
    """Root-mean-square norm over the last dimension, statistics in float32.

    **Exactness**: exact, `rms_norm_reference` up to float32 rounding, gradients too.

    Args:
      x: any float dtype.
      scale: multiplies the normalised value; one per channel.
      epsilon: added to the mean of squares.

    Returns:
      The shape and dtype of `x`.

    Example:
      >>> [round(float(x), 3) for x in rms_norm(jnp.array([3.0, 4.0]), jnp.ones(2), 0.0)]
      [0.849, 1.131]
    """
    return _forward(x, scale, epsilon)[0]


def _forward(x, scale, epsilon):
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + epsilon)
    scale32 = jnp.expand_dims(scale.astype(jnp.float32), range(x.ndim - 1))
    return (x32 * inverse * scale32).astype(x.dtype), (x, scale, inverse)


def _backward(epsilon, saved, g):
    x, scale, inverse = saved
    unit = x.astype(jnp.float32) * inverse
    g32 = g.astype(jnp.float32)
    # The barrier keeps XLA's CPU back end from fusing the two reductions below with
    # each other's inputs, which would compute `unit` anew for each.
    unit, g32 = jax.lax.optimization_barrier((unit, g32))
    d_scale = jnp.sum(g32 * unit, axis=tuple(range(x.ndim - 1)))
    d_unit = g32 * jnp.expand_dims(scale.astype(jnp.float32), range(x.ndim - 1))
    projection = jnp.mean(d_unit * unit, axis=-1, keepdims=True)
    return ((d_unit - unit * projection) * inverse).astype(x.dtype), d_scale.astype(scale.dtype)


rms_norm.defvjp(_forward, _backward)
