"""What a pipeline's schedule makes of a compiled step: how often its parts run, and their times.

The program is one loop over ticks whose conditionals skip what a stage does not have in a tick
(`jaxaccel.pipeline`); the schedule says which they are. Counts, of matmuls say, are *compiled*
and those of the last stage, which has the loss beside its layers. Times are *modelled*, of stages
in lock-step: in each tick all wait for the slowest.
"""

import dataclasses

from jaxaccel import hlo, hlo_loops, schedules, timeline
from jaxaccel.cost import CostModel
from jaxaccel.hlo import Computation, Instruction, Module, Turns
from jaxaccel.memory import Saved
from jaxaccel.schedules import PARTS, Schedule, Times

_SENDS = "collective-permute"


@dataclasses.dataclass(frozen=True)
class PipelineReport:
    """A pipeline's part of a plan."""

    schedule: schedules.Kind
    stages: int
    micro_batches: int
    chunks: int
    delayed_sends: bool
    passes_kept: int  # of one run of layers: most that wait on a stage for their backward pass
    bubble: float  # of the ideal time, as published: passes of one length, transfers free
    bubble_delayed: float  # the same with delayed sends
    forward_ms: float  # *modelled*, as all below: of one micro-batch on one stage, all its runs
    backward_ms: float
    loss_ms: float  # and its gradient, on the last stage
    transfer_ms: float  # to the next stage
    transfer_hidden: bool  # whether XLA lets a pass run beside it
    modelled_step_ms: float
    modelled_step_delayed_ms: float
    option: str  # the faster of the two
    warning: str | None


def turns(schedule: Schedule, stage: int | None = None) -> tuple[Turns, ...]:
    """A schedule's ticks as turns of the program's loop; see `Schedule.turns`."""
    names = {part: f"pipeline_{part}" for part in PARTS}
    return tuple(
        Turns(
            count,
            frozenset(names[part] for part in parts),
            frozenset(names[part] for part in PARTS if part not in parts),
        )
        for count, parts in schedule.turns(stage)
    )


def on_last_stage(module: Module, schedule: Schedule) -> Module:
    """The program as the last stage's devices run it, to count by."""
    return dataclasses.replace(module, turns=turns(schedule, schedule.stages - 1))


def in_lock_step(module: Module, schedule: Schedule) -> Module:
    """The program as stages run it that wait for one another, to time by."""
    return dataclasses.replace(module, turns=turns(schedule))


def _conditional(module: Module, part: str) -> tuple[Computation, Instruction]:
    for computation in module.computations.values():
        for node in computation.instructions.values():
            if node.opcode == "conditional" and hlo_loops.scope(node) == f"pipeline_{part}":
                return computation, node
    raise ValueError(f"the program has no conditional from a scope named pipeline_{part}")


def times(module: Module, model: CostModel, schedule: Schedule) -> Times:
    """Times of a pipeline's parts, *modelled*, each played by itself.

    Args:
      module: of the step, from `hlo.parse`.
      model: rates and efficiencies.
      schedule: of the pipeline.

    Returns:
      Seconds.

    Raises:
      ValueError: the program is not of a pipeline.
    """

    def seconds(*parts: str) -> float:
        runs = frozenset(f"pipeline_{part}" for part in parts)
        now = Turns(1, runs, frozenset(f"pipeline_{part}" for part in PARTS) - runs)
        node = _conditional(module, parts[0])[1]
        entry = hlo_loops.branch(module, node, now)
        played = dataclasses.replace(module, entry=entry, turns=())
        return timeline.simulate(played, model, now).seconds

    forward, backward = seconds("forward"), seconds("backward")
    # In the body of the loop over ticks stand the two sends.
    tick = _conditional(module, "forward")[0]
    idle = Turns(1, frozenset(), frozenset(f"pipeline_{part}" for part in PARTS))
    alone = timeline.simulate(dataclasses.replace(module, entry=tick.name, turns=()), model, idle)
    sent = next((t for t in alone.transfers if t.kind == _SENDS), None)
    starts = [n for n in tick.instructions.values() if n.opcode.startswith(_SENDS)]
    return Times(
        forward=forward * schedule.chunks,
        backward=backward * schedule.chunks,
        transfer=sent.seconds / sent.count if sent else 0.0,
        first=seconds("forward", "first") - forward,
        last=seconds("forward", "last") - forward,
        end=seconds("backward", "end") - backward,
        hides=not any(timeline.waits(node) for node in starts if "-done" not in node.opcode),
    )


def kept(module: Module, schedule: Schedule) -> tuple[Saved, ...]:
    """What forward passes keep for their backward passes: the slots that the loop carries.

    Args:
      module: of the step, from `hlo.parse`.
      schedule: of the pipeline.

    Returns:
      Each array of slots; none where as many chunks as slots would make weights look alike.
    """
    body = _conditional(module, "forward")[0]
    loops = (
        node
        for computation in module.computations.values()
        for node in computation.instructions.values()
        if node.opcode == "while" and hlo.while_parts(module, node)[1] is body
    )
    if schedule.kept == schedule.chunks:
        return ()
    return tuple(
        Saved(loop.name, shape, loop.op_name)
        for loop in loops
        for i, shape in enumerate(loop.shapes)
        if len(shape.dims) > 1 and shape.dims[0] == schedule.kept
        if not hlo.carried_unchanged(body, i)  # as the batch is
    )


def other_sends(schedule: Schedule) -> Schedule:
    """The same schedule, with delayed sends where it has none, and the other way round."""
    return schedules.schedule(
        schedule.kind,
        schedule.stages,
        schedule.micro_batches,
        chunks=schedule.chunks,
        delayed=not schedule.delayed,
    )


def report(schedule: Schedule, times: Times, step_seconds: float) -> PipelineReport:
    """What a plan says of a pipeline.

    Args:
      schedule: of the step as compiled.
      times: from `times`.
      step_seconds: *modelled*, of the whole step.

    Returns:
      `PipelineReport`. The step with the other way to send takes what its ticks take instead.
    """
    other = other_sends(schedule)
    changed = step_seconds + other.seconds(times) - schedule.seconds(times)
    by_mode = {schedule.delayed: (schedule, step_seconds), other.delayed: (other, changed)}
    (plain, at_once), (late, delayed) = by_mode[False], by_mode[True]
    return PipelineReport(
        schedule=schedule.kind,
        stages=schedule.stages,
        micro_batches=schedule.micro_batches,
        chunks=schedule.chunks,
        delayed_sends=schedule.delayed,
        passes_kept=schedule.kept,
        bubble=plain.bubble(),
        bubble_delayed=late.bubble(),
        forward_ms=1e3 * times.forward,
        backward_ms=1e3 * times.backward,
        loss_ms=1e3 * times.last,
        transfer_ms=1e3 * times.transfer,
        transfer_hidden=times.hides,
        modelled_step_ms=1e3 * at_once,
        modelled_step_delayed_ms=1e3 * delayed,
        option="--delayed-sends" if delayed < at_once else "--no-delayed-sends",
        warning=schedule.warning(),
    )
