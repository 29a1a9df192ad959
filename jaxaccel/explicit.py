"""The gradients of a batch with every collective written out, for the techniques of `overlap`.

Left to itself, XLA's partitioner decides which collectives a step has, and its scheduler what
they run beside. Here forward and backward pass of a device are one function under
`jax.shard_map`: it sees its own rows, positions and shards, and what it needs of the others it
asks for; `shards` has the rules for parameters and `tensor_parallel` those for activations.

Up to the order of sums this is the partitioner's program.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import Partial
from jaxtyping import Array, PyTree

from jaxaccel import (
    accumulate,
    losses,
    nn,
    overlap,
    precision,
    remat,
    sharding,
    shards,
    step_config,
)
from jaxaccel.nn import Decoder, DecoderConfig, Placement
from jaxaccel.shards import DATA, ONCE, SHARDS, Rule, Seeded
from jaxaccel.step_config import StepConfig
from jaxaccel.tensor_parallel import TENSOR, TensorParallel, cost_model
from pallas_kernels import manual_axes
from pallas_kernels.attention import Mask, attention


def lookup(split: TensorParallel, dtype: Any, table: Array, tokens_BT: Array) -> Array:
    """Embeddings of this device's tokens, from a table cut over words and over width.

    Each device looks up everybody's tokens in its own part, and all exchange what they found:
    as many bytes as the result has, where a gathered table would be the whole vocabulary. The
    table's gradient stays where its shard is.
    """
    found = words(table, jax.lax.all_gather(tokens_BT, SHARDS)).astype(dtype)
    found = jax.lax.all_to_all(found, SHARDS, 0, found.ndim - 1, tiled=True)[0]
    return split.leave(found)


def words(table: Array, tokens: Array) -> Array:
    """Embeddings [..., D] of the tokens that this device has the words of, and zeros."""
    row = tokens - jax.lax.axis_index(TENSOR) * table.shape[0]
    mine = (row >= 0) & (row < table.shape[0])
    return jnp.where(mine[..., None], table[jnp.where(mine, row, 0)], 0)


class OnDevice(NamedTuple):
    """How a device computes its part of a decoder."""

    split: TensorParallel
    tokens: tuple[str, ...]  # axes along which devices have unlike tokens
    dtype: Any  # of the computation
    build: Callable[..., Decoder]  # takes `rngs`


def on_device(
    model: DecoderConfig, config: StepConfig, mesh: Mesh, dots: Mapping[str, Callable]
) -> OnDevice:
    """The decoder as a device runs it, with what it asks of others written out."""
    split = TensorParallel(
        positions="sequence" in config.techniques,
        model=cost_model(mesh) if "collective-matmul" in config.techniques else None,
    )
    tokens = (*sharding.TOKEN_AXES, TENSOR) if split.positions else sharding.TOKEN_AXES
    dtype = precision.COMPUTE_DTYPES[config.precision]
    # A collective matmul casts what it sends itself, and scales may not be known yet.
    cold = any(getattr(dot, "warm_start", False) for dot in dots.values())
    plain, casting = step_config.between(model, config, None)
    build = functools.partial(
        Decoder,
        model,
        config.mtp,
        dtype=dtype,
        dot_general=dots,
        attention=_attention(config, mesh),
        between=plain if split.model is not None or cold else casting,
        placement=Placement(lookup=functools.partial(lookup, split, dtype), joint=split.joint()),
    )
    return OnDevice(split, tokens, dtype, build)


def on_mesh(local: Callable, config: StepConfig, mesh: Mesh, placed: PyTree) -> Callable:
    """`local(params, fp8, batch, weights) -> ((nll, gradients), fp8)` of a device, for a mesh.

    Args:
      local: what each device computes.
      config: of the step.
      mesh: of the devices.
      placed: shardings of the parameters.
    """
    places, whole = jax.tree.map(lambda s: s.spec, placed), PartitionSpec()
    rows = sharding.spec(("batch", "sequence"))
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(places, whole, rows, whole),
        out_specs=((whole, places), whole),
    )
    if "ring-attention" not in config.techniques:
        return mapped
    balanced = lambda batch: jax.tree.map(
        lambda x: overlap.zigzag(x, mesh.shape["sequence"]), batch
    )
    return lambda params, fp8_state, batch, weights: mapped(
        params, fp8_state, balanced(batch), weights
    )


def make_gradients(
    model: DecoderConfig,
    config: StepConfig,
    mesh: Mesh,
    placed: PyTree,
    dots: Mapping[str, Callable],
) -> Callable:
    """Gradients of a batch, the counterpart of the partitioned ones in `train_step`.

    Args:
      model, config, mesh: as of `make_train_step`.
      placed: shardings of the parameters.
      dots: the layers' matmuls, as `Decoder` takes them.

    Returns:
      `(params, fp8, batch, weights) -> ((nll [N], gradients), fp8)`, for arrays on the mesh,
      under `jax.jit`. `labels` of the batch are `losses.ahead_labels`; `weights` [N] multiply
      the sum of each prediction's objective.
    """
    bucketed = "buckets" in config.techniques
    split, tokens, dtype, build = on_device(model, config, mesh, dots)
    abstract = jax.eval_shape(lambda: build(rngs=nnx.Rngs(0)))
    graph = nnx.split(abstract, nnx.Param, nn.NextValue)[0]

    def run(last: bool, decoder: Decoder, batch: Mapping[str, Array]) -> losses.LossSums:
        """This device's share of the loss; each parameter of the decoder is a `Seeded`."""
        rule = functools.partial(Rule, dtype=dtype, tokens=tokens, last=last)
        whole = functools.partial(shards.parameters, lambda axes, x: rule(axes)(x))
        unseed = lambda field: functools.partial(
            shards.parameters, lambda axes, x: getattr(x, field)
        )
        # What the loop over layers gathers for after it, it puts in place of the shard.
        head = [decoder.embedding if decoder.head is None else decoder.head]

        def ahead(after, body, carry, xs):
            """The loop that gathers ahead; of `after`, too, it makes whole parameters."""
            seeded = xs, after
            kept = remat.checkpoint(body.func, config.remat, prevent_cse=False)
            return overlap.prefetch_scan(
                Partial(kept, *body.args),
                carry,
                *unseed("shard")(seeded),
                gather=functools.partial(shards.gather_layer, rule, narrow=split.model is None),
                reduce=functools.partial(shards.reduce_layer, rule),
                totals=unseed("total")(seeded),
            )

        def in_place(after, body, carry, xs):
            """A plain loop: a layer is gathered where it is used or repeated."""
            layer = lambda carry, x: body(carry, whole(x))
            return *remat.scan(layer, carry, xs, policy=config.remat), whole(after)

        def scan(body, carry, xs):
            stack = xs is decoder.layers
            loop = functools.partial(
                ahead if config.prefetched else in_place, head if stack else []
            )
            if stack and "domino" in config.techniques:
                carry, ys, after = split.interleaved(loop, body, carry, xs)
            else:
                carry, ys, after = loop(body, carry, xs)
            head[:] = after or head
            return carry, ys

        decoder.scan = scan
        decoder.final_norm = whole(decoder.final_norm)
        table = Rule(("vocab", None), jnp.float32, (DATA,), last)  # see `lookup`
        tied = decoder.head is None  # then earlier sums of gradients go with the head
        decoder.embedding = shards.parameters(
            lambda _, x: table(Seeded(x.shard) if tied else x), decoder.embedding
        )
        places = {f"{key}_BT": batch[key] for key in ("segments", "positions")}
        hidden = split.enter(decoder.ahead(batch["tokens"], **places), dim=2)
        return losses.ahead_cross_entropy(
            hidden,
            head[0].get_value(),
            batch["labels"],
            axis_name=TENSOR,
            **step_config.loss_options(model, config),
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

    places = jax.tree.map(lambda s: s.spec, placed)

    def once(spec: PartitionSpec) -> tuple[str, ...]:
        cut = {axis for dim in spec for axis in (dim if isinstance(dim, tuple) else (dim,))}
        return tuple(axis for axis in tokens if axis in ONCE - cut)

    def local(params, fp8_state, batch, weights):
        fp8_state = jax.tree.map(lambda x: manual_axes.vary(x, sharding.TOKEN_AXES), fp8_state)
        apart = jax.tree.map(lambda x, spec: manual_axes.vary(x, once(spec)), params, places)
        parts = accumulate.split(batch, config.micro_batches)

        def take(part, sums=None, last=False):
            """Of one micro-batch, or on top of the sums of earlier ones."""
            totals = [] if sums is None else [sums[0][1]]
            here = gradient(last, params if last else apart, totals, fp8_state, weights, part)
            if sums is None:
                return here
            nll, fp8_next = step_config.merge((sums[0][0], sums[1]), (here[0][0], here[1]))
            return (nll, here[0][1]), fp8_next

        if config.micro_batches == 1:
            sums = take(batch, last=bucketed)
        elif bucketed:  # the last one's gradients take the others' along, layer by layer
            rest, part = jax.tree.map(lambda x: x[:-1], parts), jax.tree.map(lambda x: x[-1], parts)
            sums = take(part, accumulate.over(take, rest, step_config.merge), last=True)
        elif config.prefetched:  # each one's gradients are added where those before it lie
            sums = accumulate.fold(lambda sums, part: take(part, sums), take, parts)
        else:
            sums = accumulate.over(take, parts, step_config.merge)
        (nll, grads), fp8_next = sums
        left = lambda g, spec: tuple(axis for axis in once(spec) if axis in manual_axes.varying(g))
        grads = jax.tree.map(lambda g, spec: jax.lax.psum(g, left(g, spec)), grads, places)
        fp8_next = jax.tree.map(lambda x: jax.lax.pmax(x, sharding.TOKEN_AXES), fp8_next)
        return (jax.lax.psum(nll, sharding.TOKEN_AXES), grads), fp8_next

    return on_mesh(local, config, mesh, placed)


def _attention(config: StepConfig, mesh: Mesh) -> Callable:
    """Attention of this device's queries and heads, over the keys of the whole row."""
    implementation = config.implementations[0]
    plain = functools.partial(attention, implementation=implementation)
    ring = functools.partial(
        overlap.ring_attention, axis_name="sequence", implementation=implementation
    )

    def gathered(q: Array, k: Array, v: Array, *, mask: Mask, **options: float) -> Array:
        everyone = lambda x: jax.lax.all_gather(x, "sequence", axis=1, tiled=True)
        place = jax.lax.axis_index("sequence") * q.shape[1]  # the first query's, among all keys
        mask = dataclasses.replace(mask, k_segments=everyone(mask.k_segments), offset=place)
        return plain(q, everyone(k), everyone(v), mask=mask, **options)

    if "ring-attention" in config.techniques:
        return ring
    return gathered if mesh.shape["sequence"] > 1 else plain
