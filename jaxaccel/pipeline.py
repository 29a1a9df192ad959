"""Pipeline parallelism as one program: stages that pass activations on and gradients back.

Every device of the mesh axis `stage` runs the same loop over ticks, inside `jax.shard_map`. A table
(`schedules`) says which micro-batch a stage has in which tick; a stage without one skips the
computation. In a tick

  a forward pass runs    while the gradient of the last tick's backward pass travels back
  a backward pass runs   while the activations of this tick's forward pass travel on

or, with delayed sends, both beside what the last tick found. What a forward pass keeps for its
backward pass (`jax.vjp`'s residuals; `jax.checkpoint` in `layers` decides how much) lies in slots
that are used again once read, as many as the schedule has micro-batches under way; weights are
not among it. So memory follows from the number of stages under 1F1B, and from that of micro-batches
under GPipe.

Where it pays: between machines, where a micro-batch's activations are a small part of what sharded
weights would send. Where it does not: with few micro-batches; see `schedules` for the bubble. All
stages wait for the slowest, which is the last if its loss costs more than a layer or two.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxaccel.schedules import IDLE, Schedule, Ticks
from pallas_kernels import manual_axes


class Parts(NamedTuple):
    """A model in the pieces that stages run, and in that order its weights.

    Attributes:
      first: `(weights, micro_batch) -> x`, what the first run reads: an embedding.
      layers: `(weights of one run, x, micro_batch) -> x`.
      last: `(weights, x, micro_batch) -> (objective, sums)`: a scalar to differentiate, and a tree
        to add up over micro-batches.
    """

    first: Any
    layers: Any
    last: Any


def add(total: Any, part: Any) -> Any:
    """The sum of two trees, in the dtypes of the first."""
    return jax.tree.map(lambda t, p: t + p.astype(t.dtype), total, part)


def gradients(
    parts: Parts,
    weights: Parts,
    batch: Any,
    schedule: Schedule,
    *,
    axis_name: str = "stage",
    combine: Callable[[Any, Any], Any] = add,
) -> tuple[Any, Parts]:
    """Gradients of a sum of objectives over micro-batches, computed by the stages of a pipeline.

    For use inside `jax.shard_map`.

    **Exactness**: exact up to the order of float32 additions.

    Args:
      parts: functions. All devices of a stage must take part alike in their collectives.
      weights: for each function; `layers` a tree of [chunks, ...] arrays, this stage's runs of
        layers. Run c of stage s is the model's run c * stages + s.
      batch: micro-batches, [micro_batches, ...] arrays, the same on every stage.
      schedule: from `schedules.schedule`.
      axis_name: the mesh axis.
      combine: `(total, part) -> total` for gradients, in place of float32 sums; it begins with
        zeros.

    Returns:
      The sum of `sums`, zero but on the last stage, and a gradient for each weight, float32: of
      `first` and `last` zero but on the stages that ran them.

    Raises:
      ValueError: the axis or the arrays do not have the schedule's sizes.

    Along other axes of the mesh gradients are as `jax.grad` gives them inside `jax.shard_map`:
    summed over the devices for weights that do not vary along them, else each device's own.

    Example:
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> from jaxaccel.schedules import schedule
      >>> parts = Parts(
      ...     lambda table, tokens: table[tokens],
      ...     lambda kernel, x, tokens: jnp.tanh(x @ kernel),
      ...     lambda head, x, tokens: (((x @ head) ** 2).sum(), ()),
      ... )
      >>> stages, micro_batches = 1, 4  # as many stages as there are devices
      >>> def step(first, kernels, last, tokens):
      ...     weights, plan = Parts(first, kernels, last), schedule("1f1b", stages, micro_batches)
      ...     _, found = gradients(parts, weights, tokens, plan)
      ...     first, last = jax.lax.psum((found.first, found.last), "stage")
      ...     return first, found.layers, last
      >>> devices = jax.devices()[:stages]
      >>> mesh = jax.make_mesh((stages,), ("stage",), (AxisType.Auto,), devices=devices)
      >>> specs = P(), P("stage"), P()  # stage s has kernel s
      >>> step = jax.shard_map(step, mesh=mesh, in_specs=(*specs, P()), out_specs=specs)
      >>> weights = jnp.ones((9, 3)), jnp.ones((stages, 3, 3)), jnp.ones((3, 1))
      >>> [x.shape for x in jax.jit(step)(*weights, jnp.zeros((micro_batches, 5), jnp.int32))]
      [(9, 3), (1, 3, 3), (3, 1)]

    References:
      GPipe: arXiv:1811.06965. 1F1B: arXiv:2006.09503. Interleaved: arXiv:2104.04473.
    """
    _check(weights, batch, schedule, axis_name)
    vary = _vary(axis_name)
    weights = Parts(*map(vary, weights))
    micro_batch = lambda index: vary(_at(batch, index))
    run = lambda chunk: _at(weights.layers, chunk)
    send_on, send_back = _sends(schedule, axis_name)

    def embed(index):
        return vary(parts.first(weights.first, micro_batch(index)))

    rebuild: list[Any] = []  # the pullback's structure: known once `layers` was traced

    def layers(chunk, x, index):
        """One run, and what its backward pass needs apart from weights and micro-batch."""
        arguments = run(chunk), x, micro_batch(index)
        y, pullback = jax.vjp(parts.layers, *arguments, saveable_args=(False, True, False))
        leaves, rebuild[:] = vary(jax.tree.leaves(pullback)), [jax.tree.structure(pullback)]
        return vary(y), leaves

    with_loss = jax.value_and_grad(parts.last, argnums=(0, 1), has_aux=True)

    def forward(now: Ticks, memory: dict):
        index, chunk = now.forward, now.forward_chunk
        x = _when(
            "first", now.read == IDLE, lambda: embed(index), lambda: _at(memory["inputs"], now.read)
        )
        y, kept = layers(chunk, x, index)
        memory = memory | {"kept": _put(memory["kept"], kept, now.keep)}

        def turn(memory):
            (_, sums), (more, back) = with_loss(weights.last, y, micro_batch(index))
            return memory | {
                "sums": add(memory["sums"], vary(sums)),
                "last": combine(memory["last"], more),
                "gradients": _put(memory["gradients"], back, now.turn),
            }

        return y, _when("last", now.turn != IDLE, turn, lambda memory: memory, memory)

    def backward(now: Ticks, memory: dict):
        index, chunk = now.backward, now.backward_chunk
        pullback = jax.tree.unflatten(rebuild[0], _at(memory["kept"], now.kept))
        arguments = [run(chunk), pullback.args_res[1], micro_batch(index)]
        more, back, _ = pullback.replace(args_res=arguments)(_at(memory["gradients"], now.gradient))
        total = combine(_at(memory["layers"], chunk), more)
        memory = memory | {"layers": _put(memory["layers"], total, chunk)}

        def end(memory):
            pullback = jax.vjp(lambda w: vary(parts.first(w, micro_batch(index))), weights.first)[1]
            return memory | {"first": combine(memory["first"], pullback(back)[0])}

        return back, _when("end", now.ends == 1, end, lambda memory: memory, memory)

    def idle(now: Ticks, memory: dict):
        return _zeros(x), memory

    # Delayed, what the last tick found travels; else activations have this tick's backward pass
    # beside them, and gradients the next one's forward pass.
    beside_forward, beside_backward = "gradients", "inputs"
    if schedule.delayed:
        beside_forward, beside_backward = beside_backward, beside_forward

    def tick(state, now: Ticks):
        memory, y, g = state
        send = {"inputs": lambda: send_on(y), "gradients": lambda: send_back(g)}
        slots = {"inputs": now.arrives, "gradients": now.returns}
        arrive = lambda what, x: memory | {what: _put(memory[what], x, slots[what])}

        sent = send[beside_forward]()
        y, memory = _when("forward", now.forward != IDLE, forward, idle, now, memory)
        sent, y, g = _together(sent, y, g)
        memory = arrive(beside_forward, sent)
        sent = send[beside_backward]()
        g, memory = _when("backward", now.backward != IDLE, backward, idle, now, memory)
        sent, g = _together(sent, g)
        return (arrive(beside_backward, sent), y, g), None

    x = jax.eval_shape(embed, 0)
    kept = jax.eval_shape(lambda x: layers(0, x, 0)[1], x)
    sums = jax.eval_shape(lambda x: vary(parts.last(weights.last, x, micro_batch(0))[1]), x)
    floats = functools.partial(_zeros, dtype=jnp.float32)
    memory = {
        "inputs": _zeros(x, schedule.inputs + 1),
        "kept": _zeros(kept, schedule.kept),
        "gradients": _zeros(x, schedule.gradients + 1),
        "sums": _zeros(sums),
        **{name: floats(tree) for name, tree in weights._asdict().items()},
    }
    ticks = _mine(schedule.ticks, axis_name)
    memory = jax.lax.scan(tick, (memory, _zeros(x), _zeros(x)), ticks)[0][0]
    return memory["sums"], Parts(memory["first"], memory["layers"], memory["last"])


def sums(
    parts: Any, weights: Parts, batch: Any, schedule: Schedule, *, axis_name: str = "stage"
) -> Any:
    """The forward passes of a schedule alone, to evaluate a model.

    Args:
      parts: as of `gradients`, but that `last` returns sums alone.
      weights, batch, schedule, axis_name: as of `gradients`.

    Returns:
      The sum over micro-batches of what `last` returned, zero but on the last stage.

    Raises:
      ValueError: as `gradients`.
    """
    _check(weights, batch, schedule, axis_name)
    vary = _vary(axis_name)
    weights = Parts(*map(vary, weights))
    micro_batch = lambda index: vary(_at(batch, index))
    send_on, _ = _sends(schedule, axis_name)
    embed = lambda index: vary(parts.first(weights.first, micro_batch(index)))
    score = lambda x, index: vary(parts.last(weights.last, x, micro_batch(index)))

    def forward(now: Ticks, inputs, total):
        index, read = now.forward, now.read
        x = _when("first", read == IDLE, lambda: embed(index), lambda: _at(inputs, read))
        y = vary(parts.layers(_at(weights.layers, now.forward_chunk), x, micro_batch(index)))
        more = lambda: add(total, score(y, index))
        return y, _when("last", now.turn != IDLE, more, lambda: total)

    def tick(state, now: Ticks):
        inputs, before, total = state
        run = lambda: forward(now, inputs, total)
        y, total = _when("forward", now.forward != IDLE, run, lambda: (_zeros(x), total))
        inputs = _put(inputs, send_on(before if schedule.delayed else y), now.arrives)
        return (inputs, y, total), None

    x = jax.eval_shape(embed, 0)
    state = _zeros(x, schedule.inputs + 1), _zeros(x), _zeros(jax.eval_shape(score, x, 0))
    last = int(np.flatnonzero((schedule.ticks.forward != IDLE).any(axis=1))[-1])
    ticks = jax.tree.map(lambda table: table[: last + 1], _mine(schedule.ticks, axis_name))
    return jax.lax.scan(tick, state, ticks)[0][-1]


def _mine(ticks: Ticks, axis_name: str) -> Ticks:
    """This stage's columns."""
    here = jax.lax.axis_index(axis_name)
    return jax.tree.map(lambda table: jnp.asarray(table)[:, here], ticks)


def _vary(axis_name: str) -> Callable[[Any], Any]:
    return functools.partial(jax.tree.map, lambda x: manual_axes.vary(x, (axis_name,)))


def _sends(schedule: Schedule, axis_name: str) -> tuple[Callable, Callable]:
    """To the next stage, and to the one before."""
    stages = schedule.stages
    pairs = [(s, (s + 1) % stages) for s in range(stages if schedule.chunks > 1 else stages - 1)]
    send = lambda pairs, x: jax.tree.map(lambda x: jax.lax.ppermute(x, axis_name, pairs), x)
    return functools.partial(send, pairs), functools.partial(send, [pair[::-1] for pair in pairs])


def _when(what: str, runs: Array, run: Callable, skip: Callable, *operands: Any) -> Any:
    """One or the other; a program's reader finds the branch by its name (`Schedule.turns`)."""
    with jax.named_scope(f"pipeline_{what}"):
        return jax.lax.cond(runs, run, skip, *operands)


def _check(weights: Parts, batch: Any, schedule: Schedule, axis_name: str) -> None:
    sizes = {
        f"devices of {axis_name!r}": ({jax.lax.axis_size(axis_name)}, schedule.stages),
        "micro-batches": ({x.shape[0] for x in jax.tree.leaves(batch)}, schedule.micro_batches),
        "runs of layers": ({x.shape[0] for x in jax.tree.leaves(weights.layers)}, schedule.chunks),
    }
    for what, (got, wanted) in sizes.items():
        if got != {wanted}:
            raise ValueError(f"got {sorted(got)} {what}; the schedule has {wanted}")


def _at(stack: Any, index: Any) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), stack)


def _put(stack: Any, one: Any, index: Any) -> Any:
    put = lambda s, x: jax.lax.dynamic_update_index_in_dim(s, x, index, 0)
    return jax.tree.map(put, stack, one)


def _together(*trees: Any) -> tuple:
    """The same values, none before all: XLA's scheduler moves nothing across."""
    return jax.lax.optimization_barrier(trees)


def _zeros(tree: Any, count: int | None = None, dtype: Any = None) -> Any:
    """Zeros like the arrays, or `count` of each; they vary over devices as the arrays do."""

    def zeros(x):
        shape = x.shape if count is None else (count, *x.shape)
        return manual_axes.vary(jnp.zeros(shape, dtype or x.dtype), manual_axes.varying(x))

    return jax.tree.map(zeros, tree)
