"""How the devices of the mesh axis `tensor` compute a layer together, inside `jax.shard_map`.

Matmuls are cut by columns, then by rows (Megatron, arXiv:1909.08053, section 3). What stands
between the two, attention heads and the MLP's activation, each device has a part of; what stands
before and after, every device has whole, or (`positions`) for its own positions.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.tree_util import Partial
from jaxtyping import Array

from jaxaccel import fp8, names, overlap
from jaxaccel.cost import CostModel
from jaxaccel.layers import Joint, Linear, linears
from jaxaccel.overlap import domino
from jaxaccel.target import GPUS, Target, find
from pallas_kernels import manual_axes

TENSOR = "tensor"


def cost_model(mesh: Mesh) -> CostModel:
    """Rates of the mesh's devices; of H200s where they are none that the table knows."""
    gpu = find(mesh.devices.flat[0].device_kind) or GPUS["h200"]
    return CostModel(Target(gpu, 1, mesh.shape[TENSOR]))


class TensorParallel(NamedTuple):
    """How the devices of `tensor` share the activations between a layer's matmuls.

    The matmuls are cut by columns, then by rows (Megatron). Between them every device of the axis
    has all positions, and computes norms as all others do; or, with sequence parallelism
    (arXiv:2205.05198, section 3), its own positions alone.
    """

    positions: bool
    model: CostModel | None = None  # for collective matmuls, whose forms it chooses; None: plain

    def enter(self, x: Any, dim: int = 1) -> Any:
        """What matmuls by columns read: all positions (dim `dim`), of which each has a part."""
        if not self.positions:
            return jax.tree.map(lambda x: manual_axes.vary(x, (TENSOR,)), x)
        return jax.tree.map(functools.partial(_gather, dim), x)

    def leave(self, y: Array) -> Array:
        """The sum over devices of what matmuls by rows found."""
        if not self.positions:
            return jax.lax.psum(y, TENSOR)
        return jax.lax.psum_scatter(y, TENSOR, scatter_dimension=1, tiled=True)

    def unreduce(self, y: Array) -> Array:
        """Parts, one on each device, whose sum `leave` makes `y`."""
        index = jax.lax.axis_index(TENSOR)
        if not self.positions:
            return jnp.where(index == 0, manual_axes.vary(y, (TENSOR,)), 0)
        others = jnp.zeros(
            (y.shape[0], y.shape[1] * jax.lax.axis_size(TENSOR), *y.shape[2:]), y.dtype
        )
        others = manual_axes.vary(others, manual_axes.varying(y))
        return jax.lax.dynamic_update_slice_in_dim(others, y, index * y.shape[1], 1)

    def joint(self) -> Joint:
        """For `Layer`."""
        if self.model is not None:
            return Joint(self._gather_matmul, self._matmul_reduce)
        enter = lambda x, linears: [linear(y) for y in [self.enter(x)] for linear in linears]
        return Joint(enter, lambda x, linear, name: names.tag(self.leave(linear(x)), name))

    def _choose(self, operation: str, x: Array, columns: int, *, backward: bool = False) -> str:
        devices = jax.lax.axis_size(TENSOR)
        rows = x.shape[0] * x.shape[1] * (devices if operation == "all_gather_matmul" else 1)
        sizes = rows, x.shape[-1], columns, devices
        assert self.model is not None
        return overlap.choose(self.model, operation, *sizes, dtype=x.dtype, backward=backward)

    def _gather_matmul(self, x: Array, linears: Sequence[Linear]) -> list[Array]:
        kernels = tuple(linear.kernel.get_value().astype(x.dtype) for linear in linears)
        product = _product(linears)
        if not self.positions or product is None:
            return [linear(y) for y in [self.enter(x)] for linear in linears]
        form = self._choose("all_gather_matmul", x, sum(kernel.shape[1] for kernel in kernels))
        states = tuple(map(_state, linears))
        found = overlap.all_gather_matmul(
            x, kernels, TENSOR, form=form, dim=1, product=product, state=states
        )
        return [linear.shifted(y) for linear, y in zip(linears, found)]

    def _matmul_reduce(self, x: Array, linear: Linear, name: str) -> Array:
        kernel, product = linear.kernel.get_value().astype(x.dtype), _product([linear])
        if product is None:
            return names.tag(self.leave(linear(x)), name)
        options = {"product": product, "state": _state(linear)}
        if self.positions:
            choose = functools.partial(self._choose, "matmul_reduce_scatter", x, kernel.shape[1])
            forms = {"form": choose(), "backward": choose(backward=True)}
            y = overlap.matmul_reduce_scatter(x, kernel, TENSOR, dim=1, **forms, **options)
        else:
            form = self._choose("matmul_all_reduce", x, kernel.shape[1])
            y = overlap.matmul_all_reduce(x, kernel, TENSOR, form=form, **options)
        return names.tag(y, name)

    def interleaved(self, loop: Callable, body: Partial, x: Array, layers: Any) -> tuple:
        """The loop over layers with two halves of the rows in turn; `body` is the decoder's."""
        apart = self.joint()._replace(leave=lambda x, linear, name: linear(x))

        def attend(half, x, found, *, index):
            x = names.tag(x if found is None else x + found, names.LAYER_INPUT)
            arguments, layers = half
            return x, layers[index].attend(x, *arguments)

        def mlp(half, x, found, *, index):
            return half[1][index].mlp(x, found)

        def block(compute, index, name):
            compute = functools.partial(compute, index=index)
            return domino.Block(compute, lambda found: names.tag(found, name))

        def turn(arguments, state, layers):
            for layer in layers:
                layer.joint = apart
            blocks = []
            for index in range(len(layers)):
                blocks.append(block(attend, index, names.ATTENTION_OUTPUT))
                blocks.append(block(mlp, index, names.MLP_OUTPUT))
            first, second = zip(arguments, _twice(layers))
            return domino.interleave(blocks, (first, second), state, self.leave), None

        body = Partial(turn, domino.halves(body.args))
        state, ys, after = loop(body, domino.begin(x, self.unreduce), layers)
        return domino.end(state, self.leave), ys, after


def _gather(dim: int, x: Array) -> Array:
    """All positions of an activation; of one in FP8 (a tree) the eight bits, and no scalars."""
    if x.ndim == 0:
        return x
    if x.dtype.itemsize > 1:
        return jax.lax.all_gather(x, TENSOR, axis=dim, tiled=True)
    bits = jax.lax.stop_gradient(x).view(jnp.uint8)
    return jax.lax.all_gather(bits, TENSOR, axis=dim, tiled=True).view(x.dtype)


def _twice(layers: Any) -> tuple[Any, Any]:
    """Layers for each of two halves: FP8 state, which is for one call, merges by maximum."""
    both = layers, jax.tree.map(lambda x: x, layers)
    for one, other in zip(*map(linears, both)):
        if (held := one.matmul_state) is not None:
            first, second = fp8.share(held.get_value())
            one.matmul_state, other.matmul_state = held.replace(first), held.replace(second)
    return both


def _state(linear: Linear) -> Any:
    return None if linear.matmul_state is None else linear.matmul_state.get_value()


def _product(linears: Sequence[Linear]) -> overlap.Product | None:
    """How a collective multiplies for linears with one input; None if it cannot."""
    dots = {linear.dot_general for linear in linears}
    if len(dots) > 1:
        return None
    dot = dots.pop()
    if not isinstance(dot, fp8.DotGeneral):
        return overlap.PLAIN
    return None if dot.recipe == "block" else overlap.Product(*fp8.parts(dot))
