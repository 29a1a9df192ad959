"""The gradients of a batch with every collective written out, for the techniques of `overlap`.

Left to itself, XLA's partitioner decides which collectives a step has, and its scheduler what they
run beside. Here forward and backward pass of a device are one function under `jax.shard_map`: it
sees its own rows, positions and shards, and what it needs of the others it asks for. Which parameter
is gathered and summed over what follows from the same rules as its sharding (`sharding.RULES`):

  cut over       along a dim      gathered before use, gradient reduce-scattered (`fsdp`, `sequence`)
                                  or used as it is (`tensor`: matmuls by columns, then by rows)
  not cut over   fsdp, sequence   gradient summed
                 data             gradient summed, once a batch

Sums are float32, gathered matrices in the compute dtype. Numerically this is the program that
the partitioner makes, up to the order of sums.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import Partial
from jaxtyping import Array, PyTree

from jaxaccel import accumulate, losses, names, nn, overlap, precision, remat, sharding, step_config
from jaxaccel.nn import Decoder, DecoderConfig, Joint
from jaxaccel.overlap import domino
from jaxaccel.step_config import StepConfig
from pallas_kernels import manual_axes

DATA, TENSOR = "data", "tensor"
ONCE = {DATA, TENSOR}  # over these gradients are summed once a batch; what `tensor` adds is small
SHARDS = sharding.RULES["embed"]  # axes over which parameters are cut, and gathered before use


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

    def dim(self, ndim: int) -> int | None:
        """Which dim is gathered; a loop over layers has taken the leading ones."""
        here = self.axes[len(self.axes) - ndim :]
        return here.index("embed") if "embed" in here else None

    def parts(self) -> tuple[str, ...]:
        """Axes, besides those gathered over, along which devices have parts of the gradient."""
        cut = {axis for name in self.axes if name for axis in sharding.RULES[name]}
        return tuple(axis for axis in self.tokens if axis not in cut)

    def gather(self, shard: Array) -> Array:
        """The parameter, whole but for what `tensor` cuts."""
        x = shard.astype(self.dtype) if shard.ndim > 1 else shard
        if (dim := self.dim(x.ndim)) is not None:
            x = jax.lax.all_gather(x, SHARDS, axis=dim, tiled=True)
        return manual_axes.vary(x, self.parts())

    def reduce(self, gradient: Array, total: Array | None) -> Array:
        """The gradient of the shard, float32."""
        g = gradient
        if (dim := self.dim(g.ndim)) is not None:
            g = jax.lax.psum_scatter(g, SHARDS, scatter_dimension=dim, tiled=True)
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


def _parameters(function: Callable, tree: PyTree, *more: PyTree) -> PyTree:
    """Maps `(axes, value, ...)` over the parameters of modules; other state stays."""

    def one(variable, *others):
        if not isinstance(variable, nnx.Param):
            return variable
        values = [other.get_value() for other in (variable, *others)]
        return variable.replace(function(variable.get_metadata("axes"), *values))

    is_variable = lambda node: isinstance(node, nnx.Variable)
    return jax.tree.map(one, tree, *more, is_leaf=is_variable)


class Split(NamedTuple):
    """How the devices of `tensor` share the activations between a layer's matmuls.

    The matmuls are cut by columns, then by rows (Megatron). Between them every device of the axis
    has all positions, and computes norms as all others do; or, with sequence parallelism
    (arXiv:2205.05198, section 3), its own positions alone.
    """

    positions: bool

    def enter(self, x: Any, dim: int = 1) -> Any:
        """What matmuls by columns read: all positions (dim `dim`), of which each has a part."""
        if not self.positions:
            return jax.tree.map(lambda x: manual_axes.vary(x, (TENSOR,)), x)
        return jax.tree.map(lambda x: jax.lax.all_gather(x, TENSOR, axis=dim, tiled=True), x)

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
        others = jnp.zeros((y.shape[0], y.shape[1] * jax.lax.axis_size(TENSOR), *y.shape[2:]), y.dtype)
        others = manual_axes.vary(others, manual_axes.varying(y))
        return jax.lax.dynamic_update_slice_in_dim(others, y, index * y.shape[1], 1)

    def joint(self) -> Joint:
        """For `Layer`."""
        enter = lambda x, linears: [linear(y) for y in [self.enter(x)] for linear in linears]
        return Joint(enter, lambda x, linear, name: names.tag(self.leave(linear(x)), name))

    def interleaved(self, loop: Callable, body: Partial, x: Array, layers: Any) -> tuple:
        """The loop over layers with two halves of the rows in turn; `body` is the decoder's."""
        apart = self.joint()._replace(leave=lambda x, linear, name: linear(x))

        def attend(layer, arguments, x, found):
            x = names.tag(x if found is None else x + found, names.LAYER_INPUT)
            return x, layer.attend(x, *arguments)

        def mlp(layer, _, x, found):
            return layer.mlp(x, found)

        def turn(arguments, state, layers):
            keep = lambda name: lambda found: names.tag(found, name)
            blocks = []
            for layer in layers:
                layer.joint = apart
                first, second = functools.partial(attend, layer), functools.partial(mlp, layer)
                blocks.append(domino.Block(first, keep(names.ATTENTION_OUTPUT)))
                blocks.append(domino.Block(second, keep(names.MLP_OUTPUT)))
            return domino.interleave(blocks, arguments, state, self.leave), None

        body = Partial(turn, domino.halves(body.args))
        state, ys, after = loop(body, domino.begin(x, self.unreduce), layers)
        return domino.end(state, self.leave), ys, after

    def lookup(self, dtype: Any, table: Array, tokens_BT: Array) -> Array:
        """Embeddings of this device's tokens, from a table cut over words and over width.

        Each device looks up everybody's tokens in its own part, and all exchange what they found:
        as many bytes as the result has, where a gathered table would be the whole vocabulary. The
        table's gradient stays where its shard is.
        """
        everyone = jax.lax.all_gather(tokens_BT, SHARDS)
        row = everyone - jax.lax.axis_index(TENSOR) * table.shape[0]
        mine = (row >= 0) & (row < table.shape[0])
        found = jnp.where(mine[..., None], table[jnp.where(mine, row, 0)], 0).astype(dtype)
        found = jax.lax.all_to_all(found, SHARDS, 0, found.ndim - 1, tiled=True)[0]
        return self.leave(found)


def make_gradients(
    model: DecoderConfig,
    config: StepConfig,
    mesh: Mesh,
    placed: PyTree,
    attend: Callable,
    dots: Mapping[str, Callable],
) -> Callable:
    """Gradients of a batch, the counterpart of the partitioned ones in `train_step`.

    Args:
      model, config, mesh: as of `make_train_step`.
      placed: shardings of the parameters.
      attend, dots: attention and matmuls of one device's arrays, as `Decoder` takes them.

    Returns:
      `(params, fp8, batch, weights) -> ((nll [N], gradients), fp8)`, for arrays on the mesh,
      under `jax.jit`. `labels` of the batch are `losses.ahead_labels`; `weights` [N] multiply
      the sum of each prediction's objective.

    Raises:
      ValueError: heads that do not divide by the mesh's `tensor`.
    """
    if model.kv_heads % mesh.shape[TENSOR]:
        raise ValueError(
            f"{model.kv_heads} key/value heads do not divide by the {mesh.shape[TENSOR]} devices of "
            f"tensor; with --overlap it must be a divisor of {model.kv_heads}"
        )
    bucketed = "buckets" in config.techniques
    prefetched = bucketed or "fsdp-prefetch" in config.techniques
    split = Split("sequence" in config.techniques)
    tokens = (*sharding.TOKEN_AXES, TENSOR) if split.positions else sharding.TOKEN_AXES
    dtype = precision.COMPUTE_DTYPES[config.precision]
    build = functools.partial(
        Decoder,
        model,
        config.mtp,
        dtype=dtype,
        dot_general=dots,
        attention=attend,
        between=step_config.between(model, config, None)[1],
        lookup=functools.partial(split.lookup, dtype),
        joint=split.joint(),
    )
    abstract = jax.eval_shape(lambda: build(rngs=nnx.Rngs(0)))
    graph = nnx.split(abstract, nnx.Param, nn.NextValue)[0]

    def run(last: bool, decoder: Decoder, batch: Mapping[str, Array]) -> losses.LossSums:
        """This device's share of the loss; each parameter of the decoder is a `Seeded`."""
        rule = functools.partial(Rule, dtype=dtype, tokens=tokens, last=last)
        whole = functools.partial(_parameters, lambda axes, x: rule(axes)(x))
        unseed = lambda field: functools.partial(_parameters, lambda axes, x: getattr(x, field))
        head = [decoder.embedding if decoder.head is None else decoder.head]

        def ahead(after, body, carry, xs):
            """The loop that gathers ahead; of `after`, too, it makes whole parameters."""
            seeded = xs, after
            kept = remat.checkpoint(body.func, config.remat, prevent_cse=False)
            return overlap.prefetch_scan(
                Partial(kept, *body.args),
                carry,
                *unseed("shard")(seeded),
                gather=functools.partial(_parameters, lambda axes, x: rule(axes).gather(x)),
                reduce=functools.partial(
                    _parameters, lambda axes, x, total: rule(axes).reduce(x, total)
                ),
                totals=unseed("total")(seeded),
            )

        def in_place(after, body, carry, xs):
            """A plain loop: a layer is gathered where it is used, and again where it is repeated."""
            layer = lambda *args: body.func(*args[:-1], whole(args[-1]))
            kept = remat.checkpoint(layer, config.remat, prevent_cse=False)
            return *jax.lax.scan(Partial(kept, *body.args), carry, xs), whole(after)

        def scan(body, carry, xs):
            stack = xs is decoder.layers
            loop = functools.partial(ahead if prefetched else in_place, head if stack else [])
            if stack and "domino" in config.techniques:
                carry, ys, after = split.interleaved(loop, body, carry, xs)
            else:
                carry, ys, after = loop(body, carry, xs)
            head[:] = after or head
            return carry, ys

        decoder.scan = scan
        decoder.final_norm = whole(decoder.final_norm)
        table = Rule(("vocab", None), jnp.float32, (DATA,), last)  # see `Split.lookup`
        decoder.embedding = _parameters(lambda _, x: table(x), decoder.embedding)
        places = {f"{key}_BT": batch[key] for key in ("segments", "positions")}
        hidden = split.enter(decoder.ahead(batch["tokens"], **places), dim=2)
        return losses.ahead_cross_entropy(
            hidden, head[0].get_value(), batch["labels"], z_loss=config.z_loss, axis_name=TENSOR
        )

    def gradient(last, params, totals, fp8_state, weights, batch):
        """Of one micro-batch, on one device: its share of nll, gradients and next FP8 state."""

        def objective(params, fp8_state):
            seeded = jax.tree.map(lambda *both: Seeded(*both), params, *totals)
            sums = run(last, nnx.merge(graph, seeded, fp8_state), batch)
            return (sums.objective * weights).sum(), sums.nll

        with_value = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)
        (_, nll), (grads, fp8_next) = with_value(params, fp8_state)
        return (nll, grads), fp8_next

    places, whole = jax.tree.map(lambda s: s.spec, placed), PartitionSpec()

    def once(spec: PartitionSpec) -> tuple[str, ...]:
        cut = {axis for dim in spec for axis in (dim if isinstance(dim, tuple) else (dim,))}
        return tuple(axis for axis in tokens if axis in ONCE - cut)

    def local(params, fp8_state, batch, weights):
        fp8_state = jax.tree.map(lambda x: manual_axes.vary(x, sharding.TOKEN_AXES), fp8_state)
        apart = jax.tree.map(lambda x, spec: manual_axes.vary(x, once(spec)), params, places)
        parts = accumulate.split(batch, config.micro_batches)
        earlier = functools.partial(gradient, False, apart, [], fp8_state, weights)
        final = functools.partial(gradient, True, params)
        if not bucketed:
            (nll, grads), fp8_next = accumulate.over(earlier, parts, step_config.merge)
        elif config.micro_batches == 1:
            (nll, grads), fp8_next = final([], fp8_state, weights, batch)
        else:  # the last one's gradients take the others' along, layer by layer
            rest, part = (jax.tree.map(lambda x: x[cut], parts) for cut in (slice(-1), -1))
            (nll, totals), seen = accumulate.over(earlier, rest, step_config.merge)
            (more, grads), fp8_next = final([totals], fp8_state, weights, part)
            nll, fp8_next = step_config.merge((nll, seen), (more, fp8_next))
        left = lambda g, spec: tuple(axis for axis in once(spec) if axis in manual_axes.varying(g))
        grads = jax.tree.map(lambda g, spec: jax.lax.psum(g, left(g, spec)), grads, places)
        fp8_next = jax.tree.map(lambda x: jax.lax.pmax(x, sharding.TOKEN_AXES), fp8_next)
        return (jax.lax.psum(nll, sharding.TOKEN_AXES), grads), fp8_next

    rows = sharding.spec(("batch", "sequence"))
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(places, whole, rows, whole),
        out_specs=((whole, places), whole),
    )
