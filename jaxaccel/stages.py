"""The gradients of a batch, computed by a pipeline of stages.

`pipeline` has the loop and knows no model; here it is given the decoder. Within a stage devices
share the work as without one: `explicit` says how rows, positions and heads are divided.

A stage's weights are gathered once a step, before the first tick, and lie there in the compute
dtype; their gradients are summed in float32 beside them, and reduced once, after the last. So
nothing but activations travels while the stages run. What is no layer is cut over the stages too
(`sharding.state_rules`) and comes whole to each: the embedding for the first, norm, heads and
output head for the last.

Layers lie where `jax.sharding` cuts a stack, in equal parts and in order. Where runs of layers
are others, interleaved or of unlike length, they are sent to the stages that run them, and their
gradients back, once a step.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import Partial
from jaxtyping import Array, PyTree

from jaxaccel import (
    accumulate,
    explicit,
    losses,
    nn,
    pipeline,
    remat,
    sharding,
    shards,
    step_config,
)
from jaxaccel.nn import Decoder, DecoderConfig
from jaxaccel.pipeline import Parts
from jaxaccel.sharding import STAGE
from jaxaccel.shards import SHARDS, Rule
from jaxaccel.step_config import StepConfig
from jaxaccel.tensor_parallel import TENSOR
from pallas_kernels import manual_axes

NOBODY = -1
EVERY = (STAGE, *sharding.TOKEN_AXES)  # along these, devices have unlike parts of a sum


def runs(lengths: Sequence[int], stages: int) -> np.ndarray:
    """Layers that each stage runs, from the lengths of all runs in the model's order.

    Args:
      lengths: of every run; run r is on stage r % stages.
      stages: how many.

    Returns:
      Numbers of layers [stages, chunks, longest]; NOBODY past the end of a shorter run.

    Example:
      >>> runs([2, 1, 1, 2], 2).tolist()
      [[[0, 1], [3, -1]], [[2, -1], [4, 5]]]
    """
    table = np.full((len(lengths), max(lengths)), NOBODY)
    for run, (end, length) in enumerate(zip(itertools.accumulate(lengths), lengths)):
        table[run, :length] = np.arange(end - length, end)
    return table.reshape(-1, stages, max(lengths)).transpose(1, 0, 2)


class Exchange:
    """Sends layers from where they lie to the stages that run them, inside `jax.shard_map`.

    Args:
      wanted: from `runs`.
    """

    def __init__(self, wanted: np.ndarray):
        stages = len(wanted)
        flat = wanted.reshape(stages, -1)
        layers = int(flat.max()) + 1
        share = layers // stages
        self.in_place = np.array_equal(flat, np.arange(layers).reshape(stages, -1))
        # What each stage sends to each other, and where in what arrives a layer lies.
        parcels = [[[n for n in there if n // share == s and n >= 0] for there in flat]
                   for s in range(stages)]  # fmt: skip
        size = max(len(parcel) for row in parcels for parcel in row)
        self._send = np.zeros((stages, stages, size), np.int32)
        place = np.full((stages, layers), stages * size)
        for source, target in itertools.product(range(stages), repeat=2):
            parcel = parcels[source][target]
            self._send[source, target, : len(parcel)] = np.array(parcel, int) % share
            place[target, parcel] = source * size + np.arange(len(parcel))
        self._take = np.where(
            flat < 0, stages * size, np.take_along_axis(place, np.maximum(flat, 0), 1)
        )

    def __call__(self, layers: Array) -> Array:
        """This stage's layers, [chunks * longest, ...], from those that lie here; 0 for none."""
        if self.in_place:
            return layers
        here = jax.lax.axis_index(STAGE)
        parcels = layers[jnp.asarray(self._send)[here]]
        arrived = jax.lax.all_to_all(parcels, STAGE, 0, 0)
        arrived = arrived.reshape(-1, *arrived.shape[2:])
        take = jnp.asarray(self._take)[here]
        return arrived.at[take].get(mode="fill", fill_value=0)

    def back(self, gradient: Array, share: int) -> Array:
        """The transpose: gradients of this stage's layers to where the layers lie."""
        if self.in_place:
            return gradient
        like = jnp.zeros((share, *gradient.shape[1:]), gradient.dtype)
        like = manual_axes.vary(like, manual_axes.varying(gradient))
        return jax.vjp(self, like)[1](gradient)[0]


class Stages:
    """A decoder as a pipeline runs it, for use inside `jax.shard_map`.

    Args:
      model, config, mesh: as of `make_train_step`; the mesh has several stages.
      dots: the layers' matmuls, as `Decoder` takes them.
    """

    def __init__(
        self,
        model: DecoderConfig,
        config: StepConfig,
        mesh: Mesh,
        dots: Mapping[str, Callable],
    ):
        self.config, self.schedule = config, step_config.schedule(config, mesh.shape[STAGE])
        self.wanted = runs(step_config.runs(model, config, self.schedule), mesh.shape[STAGE])
        self.exchange = Exchange(self.wanted)
        self.split, tokens, dtype, build = explicit.on_device(model, config, mesh, dots)
        abstract = jax.eval_shape(lambda: build(rngs=nnx.Rngs(0)))
        self.graph, *self.shapes = nnx.split(abstract, nnx.Param, nn.NextValue)
        self.reads_ahead = abstract.heads is not None and abstract.heads.join is not None
        # Of a layer on its stage, and of what stages share.
        self.layer_rule = functools.partial(Rule, dtype=dtype, tokens=tokens, last=True)
        self.shared_rule = functools.partial(
            self.layer_rule, tokens=(*tokens, STAGE), shards=(*SHARDS, STAGE)
        )

    def gather(self, own: Decoder) -> Parts:
        """What this stage runs, whole, from its shards."""
        stack = lambda x: x.reshape(*self.wanted.shape[1:], *x.shape[1:])

        def layers(axes, x):
            rule = self.layer_rule(axes)
            return stack(jax.vmap(rule.gather)(self.exchange(jax.vmap(rule.cast)(x))))

        gathered = _states(
            lambda x: stack(manual_axes.vary(x, EVERY)[self._mine()]),
            shards.parameters(layers, own.layers),
        )
        live = None
        if (self.wanted == NOBODY).any():
            live = stack((self._mine() != NOBODY).astype(jnp.float32))
        whole = functools.partial(
            shards.parameters, lambda axes, x: self.shared_rule(axes).gather(x)
        )
        embedding = whole(own.embedding)
        last = {
            "final_norm": whole(own.final_norm),
            "head": embedding if own.head is None else whole(own.head),
            "heads": _states(lambda x: manual_axes.vary(x, EVERY), whole(own.heads)),
            "embedding": embedding if self.reads_ahead else None,
        }
        return Parts(embedding, (gathered, live), last)

    def reduce(self, own: Decoder, found: Parts) -> Decoder:
        """`own` with its shards' gradients, and next FP8 states, in the place of values."""
        unstack = lambda x: x.reshape(-1, *x.shape[2:])
        count = len(jax.tree.leaves(own.layers)[0])

        def layers(axes, g):
            reduce = lambda g: self.layer_rule(axes).reduce(g, None)
            return self.exchange.back(jax.vmap(reduce)(unstack(g)), count)

        def settle(state):  # of all layers; this stage's in their places
            zeros = jnp.zeros((self.wanted.max() + 1, *state.shape[2:]))
            zeros = manual_axes.vary(zeros, EVERY)
            return jax.lax.pmax(zeros.at[self._mine()].max(unstack(state), mode="drop"), EVERY)

        scatter = functools.partial(
            shards.parameters, lambda axes, g: self.shared_rule(axes).reduce(g, None)
        )
        sums, embedding = found.last, found.first
        if self.reads_ahead:
            embedding = pipeline.add(embedding, sums["embedding"])
        if own.head is None:
            embedding = pipeline.add(embedding, sums["head"])
        else:
            own.head = scatter(sums["head"])
        own.embedding = scatter(embedding)
        own.layers = _states(settle, shards.parameters(layers, found.layers[0]))
        own.final_norm = scatter(sums["final_norm"])
        own.heads = _states(lambda x: jax.lax.pmax(x, EVERY), scatter(sums["heads"]))
        return own

    def _mine(self) -> Array:
        """Numbers of this stage's layers."""
        flat = self.wanted.reshape(len(self.wanted), -1)
        return jnp.asarray(flat)[jax.lax.axis_index(STAGE)]

    def first(self, embedding: PyTree, micro_batch: Mapping[str, Array]) -> Array:
        """Embedded tokens."""
        decoder = nnx.merge(self.graph, *self.shapes)
        decoder.embedding = embedding
        decoder.lookup = lambda table, tokens: self.split.leave(explicit.words(table, tokens))
        return decoder.embed(micro_batch["tokens"])

    def layers(self, weights: PyTree, x: Array, micro_batch: Mapping[str, Array]) -> Array:
        """What a run of layers makes of the stream."""
        decoder = nnx.merge(self.graph, *self.shapes)
        decoder.layers, live = weights
        decoder.scan = functools.partial(_scan, self.config.remat, live)
        return decoder.run_layers(x, micro_batch["segments"], micro_batch["positions"])

    def last(self, weights: PyTree, x: Array, micro_batch: Mapping[str, Array]) -> losses.LossSums:
        """Sums of every prediction that the micro-batch has labels for."""
        decoder = nnx.merge(self.graph, *self.shapes)
        places = micro_batch["segments"], micro_batch["positions"]
        decoder.final_norm, decoder.heads = weights["final_norm"], weights["heads"]
        decoder.scan = functools.partial(remat.scan, policy=self.config.remat)
        if micro_batch["labels"].shape[-1] == 1:
            decoder.heads = None
        reads_ahead = self.reads_ahead and decoder.heads is not None
        embedded = self.first(weights["embedding"], micro_batch) if reads_ahead else None
        return losses.ahead_cross_entropy(
            self.split.enter(decoder.look_ahead(x, embedded, *places), dim=2),
            weights["head"].get_value(),
            micro_batch["labels"],
            axis_name=TENSOR,
            **step_config.loss_options(decoder.config, self.config),
        )


def make_gradients(
    model: DecoderConfig,
    config: StepConfig,
    mesh: Mesh,
    placed: PyTree,
    dots: Mapping[str, Callable],
) -> Callable:
    """Gradients of a batch by a pipeline, the counterpart of `explicit.make_gradients`.

    Args:
      model, config, mesh, dots: as of `Stages`.
      placed: shardings of the parameters.

    Returns:
      As `explicit.make_gradients`.
    """
    stages = Stages(model, config, mesh, dots)

    def local(params, fp8_state, batch, weights):
        def last(*arguments):
            sums = stages.last(*arguments)
            return (sums.objective * weights).sum(), sums.nll

        own = nnx.merge(stages.graph, params, fp8_state)
        nll, found = pipeline.gradients(
            Parts(stages.first, stages.layers, last),
            stages.gather(own),
            accumulate.split(batch, config.micro_batches),
            stages.schedule,
            combine=_combine,
        )
        grads, fp8_next = nnx.state(stages.reduce(own, found), nnx.Param, nn.NextValue)
        grads, fp8_next = nnx.to_pure_dict(grads), nnx.to_pure_dict(fp8_next)
        return (jax.lax.psum(nll, EVERY), grads), fp8_next

    return explicit.on_mesh(local, config, mesh, placed)


def make_evaluate(
    model: DecoderConfig, config: StepConfig, mesh: Mesh, placed: PyTree
) -> Callable[[PyTree, Mapping[str, Array]], losses.LossSums]:
    """The sums of the next token's loss over a batch, by the stages of a pipeline.

    Args:
      model, config, mesh: as of `Stages`.
      placed: shardings of the parameters.

    Returns:
      `(params, batch) -> LossSums`, without heads, never in FP8.
    """
    plain = dataclasses.replace(config, fp8="off")
    stages = Stages(
        model, plain, mesh, step_config.matmuls(model, plain, warm_start=False, devices=mesh.size)
    )
    rows = sharding.spec(("batch", "sequence"))

    def local(params, batch):
        sums = pipeline.sums(
            stages,
            stages.gather(nnx.merge(stages.graph, params, {})),
            accumulate.split(batch | {"labels": batch["labels"][..., None]}, config.micro_batches),
            stages.schedule,
        )
        return jax.tree.map(lambda x: x[0], jax.lax.psum(sums, EVERY))

    specs = jax.tree.map(lambda s: s.spec, placed), rows
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())


def _scan(policy: remat.Policy, live: Array | None, body: Partial, x: Array, layers: PyTree):
    """The loop over a run's layers; where stages have runs of unlike length, over the live ones."""
    if live is None:
        return remat.scan(body, x, layers, policy=policy)

    def one(*args):
        *ambient, x, (layer, live) = args
        run = lambda: body.func(*ambient, x, layer)[0]
        return jax.lax.cond(live > 0, run, lambda: x), None

    return remat.scan(Partial(one, *body.args), x, (layers, live), policy=policy)


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _states(function: Callable, tree: PyTree) -> PyTree:
    """Maps the FP8 states of modules; parameters stay."""
    one = lambda x: jax.tree.map(function, x) if isinstance(x, nn.NextValue) else x
    return jax.tree.map(one, tree, is_leaf=_is_variable)


def _combine(total: PyTree, part: PyTree) -> PyTree:
    """Sums of gradients; the gradient of FP8 state is its next value, and merges by maximum."""

    def one(total, part):
        if isinstance(total, nn.NextValue):
            return jax.tree.map(jnp.maximum, total, part)
        return pipeline.add(total, part)

    return jax.tree.map(one, total, part, is_leaf=_is_variable)
