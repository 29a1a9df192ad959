"""The gradients of a batch, computed by a pipeline of stages.

`pipeline` has the loop and knows no model; here it is given the decoder. Within a stage devices
share the work as without one: `explicit` says how rows, positions and heads are divided.

A stage's weights are gathered once a step, before the first tick, and lie there in the compute
dtype; their gradients are summed in float32 beside them, and reduced once, after the last. So
nothing but activations travels while the stages run. What is no layer is cut over the stages too
(`sharding.state_rules`) and comes whole to each: the embedding for the first, norm, heads and output
head for the last.

Layers lie where `jax.sharding` cuts a stack, in equal parts and in order. Where runs of layers
are others, interleaved or of unlike length, they are sent to the stages that run them, and their
gradients back, once a step.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
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
        """This stage's layers, [chunks * longest, ...], from those that lie here; zeros for none."""
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


def make_gradients(
    model: DecoderConfig,
    config: StepConfig,
    mesh: Mesh,
    placed: PyTree,
    dots: Mapping[str, Callable],
) -> Callable:
    """Gradients of a batch by a pipeline, the counterpart of `explicit.make_gradients`.

    Args:
      model, config, mesh: as of `make_train_step`; the mesh has several stages.
      placed: shardings of the parameters.
      dots: the layers' matmuls, as `Decoder` takes them.

    Returns:
      As `explicit.make_gradients`.
    """
    schedule = step_config.schedule(config, mesh.shape[STAGE])
    wanted = runs(step_config.runs(model, config, schedule), schedule.stages)
    exchange = Exchange(wanted)
    live = None if (wanted >= 0).all() else (wanted >= 0).astype(np.float32)
    split, tokens, dtype, build = explicit.on_device(model, config, mesh, dots)
    abstract = jax.eval_shape(lambda: build(rngs=nnx.Rngs(0)))
    graph, *shapes = nnx.split(abstract, nnx.Param, nn.NextValue)
    reads_ahead = abstract.heads is not None and abstract.heads.join is not None

    # Rules of a layer on its stage, and of what stages share.
    layer = functools.partial(Rule, dtype=dtype, tokens=tokens, last=True)
    shared = functools.partial(layer, tokens=(*tokens, STAGE), shards=(*SHARDS, STAGE))
    rows = (STAGE, *sharding.TOKEN_AXES)
    here = lambda table: jnp.asarray(table)[jax.lax.axis_index(STAGE)]
    stack = lambda x: x.reshape(*wanted.shape[1:], *x.shape[1:])
    unstack = lambda x: x.reshape(-1, *x.shape[2:])

    def gather(own: Decoder) -> Parts:
        """What this stage runs, from its shards."""
        mine = here(wanted.reshape(schedule.stages, -1))

        def layers(axes, x):
            rule = layer(axes)
            return stack(jax.vmap(rule.gather)(exchange(jax.vmap(rule.cast)(x))))

        gathered = shards.parameters(layers, own.layers)
        gathered = _states(lambda x: stack(manual_axes.vary(x, rows)[mine]), gathered)
        whole = functools.partial(shards.parameters, lambda axes, x: shared(axes).gather(x))
        embedding = whole(own.embedding)
        last = {
            "final_norm": whole(own.final_norm),
            "head": embedding if own.head is None else whole(own.head),
            "heads": _states(lambda x: manual_axes.vary(x, rows), whole(own.heads)),
            "embedding": embedding if reads_ahead else None,
        }
        return Parts(embedding, (gathered, None if live is None else here(live)), last)

    def reduce(own: Decoder, found: Parts) -> Decoder:
        """The gradients, and next FP8 states, of what `own` has the shards of."""
        count = len(jax.tree.leaves(own.layers)[0])
        mine = here(wanted.reshape(schedule.stages, -1))

        def layers(axes, g):
            reduce = lambda g: layer(axes).reduce(g, None)
            return exchange.back(jax.vmap(reduce)(unstack(g)), count)

        def settle(state):  # of all layers, this stage's in their places
            zeros = manual_axes.vary(jnp.zeros((wanted.max() + 1, *state.shape[2:])), rows)
            return jax.lax.pmax(zeros.at[mine].max(unstack(state), mode="drop"), rows)

        scatter = functools.partial(shards.parameters, lambda axes, g: shared(axes).reduce(g, None))
        sums, embedding = found.last, found.first
        if reads_ahead:
            embedding = jax.tree.map(jnp.add, embedding, sums["embedding"])
        if own.head is None:
            embedding = jax.tree.map(jnp.add, embedding, sums["head"])
        else:
            own.head = scatter(sums["head"])
        own.embedding = scatter(embedding)
        own.layers = _states(settle, shards.parameters(layers, found.layers[0]))
        own.final_norm = scatter(sums["final_norm"])
        own.heads = _states(lambda x: jax.lax.pmax(x, rows), scatter(sums["heads"]))
        return own

    def parts(scales: Array) -> Parts:
        """The decoder in pieces; `scales` [N] multiply each prediction's objective."""

        def first(embedding, micro_batch):
            return split.leave(explicit.words(embedding.get_value(), micro_batch["tokens"]))

        def layers(weights, x, micro_batch):
            decoder = nnx.merge(graph, *shapes)
            decoder.layers, live = weights
            decoder.scan = functools.partial(_scan, config.remat, live)
            return decoder.run_layers(x, micro_batch["segments"], micro_batch["positions"])

        def last(weights, x, micro_batch):
            decoder = nnx.merge(graph, *shapes)
            decoder.final_norm, decoder.heads = weights["final_norm"], weights["heads"]
            decoder.scan = functools.partial(remat.scan, policy=config.remat)
            embedded = first(weights["embedding"], micro_batch) if reads_ahead else None
            hidden = decoder.look_ahead(
                x, embedded, micro_batch["segments"], micro_batch["positions"]
            )
            sums = losses.ahead_cross_entropy(
                split.enter(hidden, dim=2),
                weights["head"].get_value(),
                micro_batch["labels"],
                z_loss=config.z_loss,
                axis_name=TENSOR,
            )
            return (sums.objective * scales).sum(), sums.nll

        return Parts(first, layers, last)

    def local(params, fp8_state, batch, scales):
        own = nnx.merge(graph, params, fp8_state)
        micro_batches = accumulate.split(batch, config.micro_batches)
        nll, found = pipeline.gradients(
            parts(scales), gather(own), micro_batches, schedule, combine=_combine
        )
        grads, fp8_next = nnx.state(reduce(own, found), nnx.Param, nn.NextValue)
        nll = jax.lax.psum(nll, rows)
        return (nll, nnx.to_pure_dict(grads)), nnx.to_pure_dict(fp8_next)

    return explicit.on_mesh(local, config, mesh, placed)


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
