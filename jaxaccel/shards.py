"""How a parameter's shard becomes what a layer reads, and its gradient that of the shard.

Inside `jax.shard_map`. What is done follows from the rules that say where a parameter lies
(`sharding.RULES`). Over an axis of the mesh

  that cuts it, `fsdp`, `sequence`      it is gathered before use, its gradient reduce-scattered
  that cuts it, `tensor`                it is used as it is (`tensor_parallel`)
  that does not, `fsdp`, `sequence`     its gradient is summed
  that does not, `data`                 its gradient is summed, once a batch

Matrices are gathered, and their gradients summed over devices, in the compute dtype, as by XLA's
partitioner; sums over `data` and over micro-batches are float32.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, PyTree

from jaxaccel import fp8, nn, sharding
from pallas_kernels import manual_axes

DATA = "data"
ONCE = {DATA, "tensor"}  # over these gradients are summed once a batch; what `tensor` adds is small
SHARDS = sharding.RULES["embed"]  # axes over which layers are cut, and gathered before use


class Seeded(NamedTuple):
    """A parameter's shard, and the sum of earlier micro-batches' gradients of it, if any."""

    shard: Any
    total: Any = None


class Rule(NamedTuple):
    """How one parameter becomes what a layer reads, and its gradient that of its shard."""

    axes: tuple[str | None, ...]  # logical, of `RULES`; `embed` is gathered
    dtype: Any  # that matrices are gathered in
    tokens: tuple[str, ...]  # axes along which devices have unlike tokens
    last: bool  # of the micro-batches: gradients are summed over `ONCE` as well
    shards: tuple[str, ...] = SHARDS  # that `embed` is cut over

    def dim(self, ndim: int) -> int | None:
        """Which dim is gathered; a loop over layers has taken the leading ones."""
        here = self.axes[len(self.axes) - ndim :]
        return here.index("embed") if "embed" in here else None

    def parts(self) -> tuple[str, ...]:
        """Axes, besides those gathered over, along which devices have parts of the gradient."""
        rules = {**sharding.RULES, "embed": self.shards}
        cut = {axis for name in self.axes if name for axis in rules[name]}
        return tuple(axis for axis in self.tokens if axis not in cut)

    def cast(self, shard: Array) -> Array:
        """In the dtype that it travels in."""
        return shard.astype(self.dtype) if shard.ndim > 1 else shard

    def gather(self, shard: Array) -> Array:
        """The parameter, whole but for what `tensor` cuts."""
        x = self.cast(shard)
        if (dim := self.dim(x.ndim)) is not None:
            x = jax.lax.all_gather(x, self.shards, axis=dim, tiled=True)
        return manual_axes.vary(x, self.parts())

    def reduce(self, gradient: Array, total: Array | None) -> Array:
        """The gradient of the shard, float32."""
        g = gradient
        if (dim := self.dim(g.ndim)) is not None:
            g = jax.lax.psum_scatter(g, self.shards, scatter_dimension=dim, tiled=True)
        g = jax.lax.psum(g, tuple(axis for axis in self.parts() if axis not in ONCE))
        g = g.astype(jnp.float32)
        if total is not None:
            g = g + total
        once = tuple(axis for axis in self.parts() if axis in ONCE)
        return jax.lax.psum(g, once) if self.last else g

    def __call__(self, seeded: Seeded) -> Array:
        """`gather`, with `reduce` as its gradient."""
        return _unshard(self, *seeded)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _unshard(rule: Rule, shard: Array, total: Array | None) -> Array:
    return rule.gather(shard)


_unshard.defvjp(
    lambda rule, shard, total: (rule.gather(shard), total),
    lambda rule, total, gradient: (rule.reduce(gradient, total), None),
)


def parameters(function: Callable, tree: PyTree, *more: PyTree) -> PyTree:
    """Maps `(axes, value, ...)` over the parameters of modules; other state stays."""

    def one(variable, *others):
        if not isinstance(variable, nnx.Param):
            return variable
        values = [other.get_value() for other in (variable, *others)]
        return variable.replace(function(variable.get_metadata("axes"), *values))

    is_variable = lambda node: isinstance(node, nnx.Variable)
    return jax.tree.map(one, tree, *more, is_leaf=is_variable)


def gather_layer(rule: Callable[..., Rule], layer: PyTree, *, narrow: bool) -> PyTree:
    """One layer's parameters, whole; kernels of FP8 matmuls travel as the eight bits they need."""
    whole = parameters(lambda axes, x: rule(axes).gather(x), layer)
    for linear, shard in zip(nn.linears(whole), nn.linears(layer)):
        dot = shard.dot_general
        if narrow and isinstance(dot, fp8.DotGeneral) and dot.recipe != "block":
            one = rule(shard.kernel.get_metadata("axes"))
            kernel, like = shard.kernel.get_value().astype(one.dtype), linear.kernel.get_value()
            state = None if shard.matmul_state is None else shard.matmul_state.get_value()
            cast = fp8.quantize_weights(kernel, dot, state)
            bits = one._replace(dtype=jnp.uint8).gather(cast.values.view(jnp.uint8))
            scale, amax = (manual_axes.vary(x, one.parts()) for x in (cast.scale, cast.amax))
            values = bits.view(cast.values.dtype)
            linear.prepared = nn.Prepared(cast._replace(values=values, scale=scale, amax=amax))
            # Nothing reads it: it stands for what the gradient is taken of, and takes no memory.
            linear.kernel.set_value(jnp.zeros_like(like))
    return whole


def reduce_layer(rule: Callable[..., Rule], layer: PyTree, total: PyTree) -> PyTree:
    """The gradient of one layer's shards."""
    for linear in nn.linears(layer):
        linear.prepared = None
    return parameters(lambda axes, x, total: rule(axes).reduce(x, total), layer, total)
