"""Which micro-batch a pipeline's stages run when: tables of ticks, made before anything runs.

A model is cut into `stages * chunks` runs of layers; stage s has runs s, s + stages, ... In a tick
every stage runs at most one forward and then at most one backward pass of one run and one
micro-batch; between ticks it hands what it found to its neighbours.

  gpipe         all forward passes, then all backward ones, the last micro-batch first
                (arXiv:1811.06965, figure 2c). Keeps every micro-batch.
  1f1b          a backward pass as soon as there is one (PipeDream-flush, arXiv:2006.09503, section
                2.2). Forward passes do not wait for it (eager 1F1B, arXiv:2211.05322, section
                4.2): stage s has up to 2 (stages - s) - 1 micro-batches under way where the
                original has stages - s. In return a tick is one forward and one backward pass
                on every stage, so that stages in lock-step lose nothing.
  interleaved   1f1b with several runs a stage (arXiv:2104.04473, section 2.2): a fill is shorter
                by their number, and that many times as much is sent.

Time: a tick takes what its slowest stage takes, a forward pass where any stage has one, and a
backward pass where any has one. So the bubble, time beyond the ideal `micro_batches * (forward +
backward)`, is (stages - 1) / micro_batches of it for gpipe and 1f1b, and that over `chunks` if
interleaved. A transfer runs beside a pass: gradients beside the forward one, activations beside the
backward one. With delayed sends they wait for the tick after, and a fill takes two ticks a stage:
about twice the bubble. That gives the transfer more room and costs time.
"""

import dataclasses
import functools
import heapq
import itertools
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

Kind = Literal["gpipe", "1f1b", "interleaved"]
IDLE = -1
# What a tick is made of, each skipped where a stage has none: a forward pass, in it the embedding
# and the loss with its gradient; a backward pass, in it the embedding's gradient.
PARTS = ("forward", "first", "last", "backward", "end")


Table = Any  # of NumPy here, of JAX in a program


class Ticks(NamedTuple):
    """What each stage does in each tick, int32 [ticks, stages]; IDLE where there is nothing.

    Slots are places in a stage's memory, used again once they are read. Arrivals and the last run's
    gradients without a slot go to the one past the last.
    """

    forward: Table  # micro-batch of the forward pass
    forward_chunk: Table  # which of the stage's runs
    read: Table  # slot of its input; IDLE: it is the first run, and makes its own
    keep: Table  # slot for what its backward pass needs
    turn: Table  # slot for the loss' gradient; IDLE: it is not the last run
    backward: Table  # micro-batch of the backward pass
    backward_chunk: Table
    kept: Table  # slot of what its forward pass kept
    gradient: Table  # slot of the gradient of its result
    ends: Table  # 1: it is the first run, whose input's gradient goes no further
    arrives: Table  # slot for the activations that arrive
    returns: Table  # slot for the gradient that arrives


class Times(NamedTuple):
    """What the parts of a tick take, in any unit; of one micro-batch on one stage, all its runs."""

    forward: float = 1.0
    backward: float = 2.0
    transfer: float = 0.0  # of one run's activations, or their gradient, to the neighbour
    first: float = 0.0  # what the other `PARTS` add to a pass
    last: float = 0.0
    end: float = 0.0
    hides: bool = True  # a transfer runs beside a pass, not after it


EVEN = Times()  # what the published bubbles assume, but for the ratio, which they do without


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """A pipeline's ticks, and how many slots of each kind they need on the fullest stage."""

    kind: Kind
    stages: int
    micro_batches: int
    chunks: int
    delayed: bool
    ticks: Ticks
    inputs: int
    kept: int
    gradients: int

    def turns(self, stage: int | None = None) -> tuple[tuple[int, frozenset[str]], ...]:
        """What runs in the ticks, in their order: (ticks in a row, which of `PARTS`).

        Args:
          stage: whose; None: of all stages in lock-step, what any of them runs. There `first` is
            left out beside `last`: another stage has it, and an embedding takes less than a loss.

        Example:
          >>> for ticks, parts in schedule("1f1b", 2, 3).turns(stage=1):
          ...     print(ticks, *sorted(parts))
          1
          3 backward forward last
          1
        """
        mine = slice(None) if stage is None else [stage]
        runs = np.stack(self._runs(), 1)[:, :, mine].any(2)  # [ticks, parts]
        found = [frozenset(itertools.compress(PARTS, tick)) for tick in runs]
        if stage is None and self.stages > 1:
            found = [parts - {"first"} if "last" in parts else parts for parts in found]
        return tuple((len(list(same)), parts) for parts, same in itertools.groupby(found))

    def passes(self, times: Times) -> np.ndarray:
        """How long each stage computes in each tick, [ticks, 2, stages]: forward, then backward."""
        forward, first, last, backward, end = (part.astype(float) for part in self._runs())
        ahead = forward * times.forward / self.chunks + first * times.first + last * times.last
        return np.stack([ahead, backward * times.backward / self.chunks + end * times.end], 1)

    def halves(self, times: Times) -> np.ndarray:
        """How long the two halves of each tick take all stages in lock-step, [ticks, 2].

        Activations and gradients are sent in every tick, be there any or not, one of them beside
        the forward and one beside the backward pass.
        """
        passes = self.passes(times).max(2)
        return np.maximum(passes, times.transfer) if times.hides else passes + times.transfer

    def seconds(self, times: Times) -> float:
        """Time of all ticks, in lock-step, in the unit of `times`."""
        return float(self.halves(times).sum())

    def bubble(self, times: Times = EVEN) -> float:
        """`seconds` beyond those that the passes of one stage take, as a share of these."""
        return self.seconds(times) / (self.micro_batches * (times.forward + times.backward)) - 1

    def warning(self) -> str | None:
        """A line for whoever has fewer micro-batches than stages: what that costs."""
        if self.micro_batches >= self.stages:
            return None
        full = schedule(
            self.kind, self.stages, self.stages, chunks=self.chunks, delayed=self.delayed
        )
        return (
            f"--micro-batches {self.micro_batches} for {self.stages} stages: the bubble is "
            f"{self.bubble():.0%} of the ideal time; {full.bubble():.0%} with --micro-batches "
            f"{self.stages}, and less with more"
        )

    def _runs(self) -> tuple[np.ndarray, ...]:
        """For each of `PARTS` which stages run it in which ticks, bool [ticks, stages]."""
        forward, backward = self.ticks.forward != IDLE, self.ticks.backward != IDLE
        first, last = forward & (self.ticks.read == IDLE), self.ticks.turn != IDLE
        return forward, first, last, backward, self.ticks.ends == 1

    def drawing(self) -> str:
        """A row a stage, two signs a tick: F and B where they run."""
        signs = lambda runs, sign: np.where(runs == IDLE, ".", sign)
        forward, backward = signs(self.ticks.forward, "F"), signs(self.ticks.backward, "B")
        return "\n".join(
            " ".join(f + b for f, b in zip(forward[:, s], backward[:, s]))
            for s in range(self.stages)
        )


@functools.cache
def schedule(
    kind: Kind, stages: int, micro_batches: int, *, chunks: int = 1, delayed: bool = False
) -> Schedule:
    """The table of a schedule; see the head of this module.

    Args:
      kind: of the schedule.
      stages, micro_batches: how many, at least 1.
      chunks: runs of layers on each stage; above 1 for `interleaved` alone.
      delayed: sends travel under the next tick, and arrive for the one after.

    Returns:
      A `Schedule`.

    Raises:
      ValueError: an unknown kind, a number below 1, or chunks that do not fit the kind.

    Example:
      >>> print(schedule("1f1b", 2, 3).drawing())
      F. F. FB .B .B
      .. FB FB FB ..
      >>> round(schedule("interleaved", 4, 8, chunks=2).bubble(), 4)  # 3 / 16
      0.1875
    """
    if kind not in ("gpipe", "1f1b", "interleaved"):
        raise ValueError(f"schedule is {kind!r}; it must be gpipe, 1f1b or interleaved")
    if min(stages, micro_batches, chunks) < 1:
        raise ValueError(
            f"got {stages} stages, {micro_batches} micro-batches, {chunks} chunks; each must be at "
            "least 1"
        )
    if (chunks > 1) != (kind == "interleaved"):
        raise ValueError(
            f"schedule {kind!r} with {chunks} chunks a stage; interleaved has 2 or more, others 1"
        )
    run = _run(kind, stages, micro_batches, chunks, 2 if delayed else 1)
    return _with_slots(kind, stages, micro_batches, chunks, delayed, *run)


def _orders(kind: Kind, stages: int, count: int, chunks: int, hop: int):
    """Each stage's forward and backward passes in order, as (micro-batch, chunk)."""
    # A group comes back to the first stage for its next run when the group is through.
    group = stages * hop
    groups = [range(at, min(at + group, count)) for at in range(0, count, group)]
    forward = [(mb, c) for mbs in groups for c in range(chunks) for mb in mbs]
    backward = [(mb, c) for mbs in groups for c in reversed(range(chunks)) for mb in mbs]
    return forward, forward[::-1] if kind == "gpipe" else backward


def _run(kind: Kind, stages: int, count: int, chunks: int, hop: int):
    """Ticks at which each pass runs, everything as early as its order and its input allow.

    Returns:
      Two dicts, of forward and backward passes: (micro-batch, run) to tick.
    """
    orders = _orders(kind, stages, count, chunks, hop)
    forward, backward = {}, {}
    ahead, behind = [0] * stages, [0] * stages
    last, tick = stages * chunks - 1, 0
    while len(backward) < count * (last + 1):
        for stage in range(stages):
            if ahead[stage] < len(orders[0]):
                mb, chunk = orders[0][ahead[stage]]
                run = chunk * stages + stage
                if run == 0 or forward.get((mb, run - 1), tick) + hop <= tick:
                    forward[mb, run] = tick
                    ahead[stage] += 1
        for stage in range(stages):
            waits = kind == "gpipe" and ahead[stage] < len(orders[0])
            if behind[stage] < len(orders[1]) and not waits:
                mb, chunk = orders[1][behind[stage]]
                run = chunk * stages + stage
                ready = forward.get((mb, run), tick + 1) <= tick
                if ready and (run == last or backward.get((mb, run + 1), tick) + hop <= tick):
                    backward[mb, run] = tick
                    behind[stage] += 1
        tick += 1
    return forward, backward


def _with_slots(kind, stages, count, chunks, delayed, forward, backward) -> Schedule:
    last, hop = stages * chunks - 1, 2 if delayed else 1
    # Moments of a tick: forward reads, forward writes, something arrives, backward reads,
    # something arrives.
    reads, writes, middle, turns, end = range(5)
    x_comes, g_comes = (middle, end) if delayed else (end, middle)
    at = lambda tick, moment: 5 * tick + moment
    spans = {"inputs": {}, "kept": {}, "gradients": {}}  # (micro-batch, run): written, read
    for (mb, run), tick in forward.items():
        back = backward[mb, run]
        if run:
            sent = forward[mb, run - 1] + hop - 1
            spans["inputs"][mb, run] = at(sent, x_comes), at(tick, reads)
        spans["kept"][mb, run] = at(tick, writes), at(back, turns)
        known = at(tick, writes) if run == last else 0
        arrived = known or at(backward[mb, run + 1] + 1, g_comes)
        spans["gradients"][mb, run] = arrived, at(back, turns)
    slots, sizes = {}, {}
    for name, of_all in spans.items():
        slots[name] = {}
        for stage in range(stages):
            mine = {item: span for item, span in of_all.items() if item[1] % stages == stage}
            slots[name] |= dict(_allot(mine))
        sizes[name] = 1 + max(slots[name].values(), default=-1)

    length = 1 + max(backward.values())
    table = Ticks(*(np.full((length, stages), IDLE, np.int32) for _ in Ticks._fields))
    table.arrives[:], table.returns[:], table.ends[:] = sizes["inputs"], sizes["gradients"], 0
    for (mb, run), tick in forward.items():
        chunk, stage = divmod(run, stages)
        table.forward[tick, stage], table.forward_chunk[tick, stage] = mb, chunk
        table.keep[tick, stage] = slots["kept"][mb, run]
        if run:
            table.read[tick, stage] = slot = slots["inputs"][mb, run]
            table.arrives[forward[mb, run - 1] + hop - 1, stage] = slot
        if run == last:
            table.turn[tick, stage] = slots["gradients"][mb, run]
    for (mb, run), tick in backward.items():
        chunk, stage = divmod(run, stages)
        table.backward[tick, stage], table.backward_chunk[tick, stage] = mb, chunk
        table.kept[tick, stage] = slots["kept"][mb, run]
        table.gradient[tick, stage] = slot = slots["gradients"][mb, run]
        table.ends[tick, stage] = run == 0
        if run != last:
            table.returns[backward[mb, run + 1] + 1, stage] = slot
    return Schedule(kind, stages, count, chunks, delayed, table, **sizes)


def _allot(spans: dict) -> Iterator[tuple]:
    """(item, slot): the lowest slot that is free from when it is written to when it is read."""
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    made = 0
    for item, (written, read) in sorted(spans.items(), key=lambda span: span[1]):
        while busy and busy[0][0] < written:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            slot = heapq.heappop(free)
        else:
            slot, made = made, made + 1
        heapq.heappush(busy, (read, slot))
        yield item, slot
