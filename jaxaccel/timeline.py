"""A *modelled* step: two streams, a roofline for each kernel, a ring for each collective.

XLA's schedule says in which order kernels are issued and between which two of them a transfer
may run; it does not say how long anything takes. Here each kernel takes the longer of its
FLOP over the tensor cores' rate for its operand type and its bytes over the memory bandwidth;
each collective takes its bytes over the link's bandwidth, times the factor of a ring
((n - 1) / n; twice that for an all-reduce). Rates are the data sheet's, scaled by the
efficiencies that `CostModel` states and a reader may change; no GPU was asked.

Kernels run one after the other on the compute stream, collectives one after the other on the
communication stream. `x-start` puts a transfer on the second stream once all that was issued
before it is through; `x-done` makes the first stream wait. Time in which the compute stream
waits is exposed communication; a collective without start and done is exposed whole. A loop's
body is played once and counted by its trips (transfers do not cross from one turn to the next),
a pipeline's once for each kind of turn (`hlo.Turns`).

Left out: contention of a transfer for memory bandwidth and SMs, which makes overlapped kernels
slower; caches; kernels side by side. Better would be measured kernel times; see XLA's own
estimator (`xla_gpu_enable_analytical_sol_latency_estimator`), which schedules with a table of
those.
"""

import dataclasses
import functools
import math
import re
from collections import defaultdict
from typing import Literal

import numpy as np

from jaxaccel import hlo, hlo_bytes, hlo_loops
from jaxaccel.cost import CostModel
from jaxaccel.hlo import FREE, Computation, Instruction, Module, Turns

__all__ = [
    "HOST_COPY",
    "CostModel",
    "Segment",
    "Timeline",
    "Transfer",
    "group",
    "kernel_seconds",
    "simulate",
    "waits",
]

HOST_COPY = "host-copy"  # between device and host memory: what `offload` moves

# A loop with transfers is drawn turn by turn, up to this many.
_TURNS_DRAWN = 200


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """A piece of one stream, for a picture."""

    stream: Literal["compute", "communication"]
    start: float  # seconds from the start of the step
    duration: float
    name: str
    exposed: bool  # communication that the compute stream waits for


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """All executions of one kind of collective on one device."""

    kind: str
    bytes: float  # of the whole array: gathered, reduced or exchanged
    count: float
    seconds: float
    exposed_seconds: float

    @property
    def hidden_fraction(self) -> float:
        """Share of its time in which the compute stream works."""
        return 1 - self.exposed_seconds / self.seconds if self.seconds else 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Timeline:
    """One step (or one turn of a loop) of one device, *modelled*."""

    seconds: float
    transfers: tuple[Transfer, ...]  # one of each kind
    segments: tuple[Segment, ...]
    exposed_seconds: float  # in which the compute stream waits for a transfer

    @property
    def exposed_fraction(self) -> float:
        """Share of the step in which the compute stream waits."""
        return self.exposed_seconds / self.seconds if self.seconds else 0.0


def kernel_seconds(
    module: Module, where: Computation, node: Instruction, model: CostModel
) -> float:
    """Modelled time of one instruction that computes: the longer of arithmetic and memory."""
    inner = module.computations[node.called[0]] if "fusion" in node.opcode else where
    nodes = inner.instructions.values() if inner is not where else (node,)
    arithmetic = sum(
        hlo.flops(inner, n) / model.matmul_rate(hlo.operand_type(inner, n))
        for n in nodes
        if hlo.flops(inner, n)
    )
    memory = (
        hlo_bytes.moved(module, where, node)
        / model.target.gpu.memory_bandwidth
        / model.memory_efficiency
    )
    return max(arithmetic, memory, model.kernel_latency)


def group(node: Instruction, devices: int) -> tuple[int, ...]:
    """Devices of the first group of a collective, as positions in the mesh.

    Args:
      node: a collective.
      devices: of the whole program.

    Returns:
      Positions; of a permutation the two ends of its longest hop.

    Raises:
      ValueError: the groups are written in a way unknown here.

    Example:
      >>> line = "ENTRY %e (x: f32[4]) -> f32[4] {\\n  %x = f32[4]{0} parameter(0)\\n  ROOT %r ="
      >>> line += " f32[4]{0} all-reduce(%x), replica_groups=[2,4]<=[4,2]T(1,0)\\n}"
      >>> group(hlo.parse(line).computations["e"].root, 8)
      (0, 2, 4, 6)
    """
    text = node.attributes
    if pairs := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", text):
        hops = [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs.group(1))]
        return max(hops, key=lambda hop: abs(hop[0] - hop[1]), default=(0,))
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
        return tuple(map(int, found.group(1).split(",")))
    if "replica_groups={}" in text or "replica_groups" not in text:
        return tuple(range(devices))
    iota = r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
    if found := re.search(iota, text):
        dims = [int(d) for d in found.group(2).split(",")]
        order = [int(d) for d in found.group(3).split(",")] if found.group(3) else None
        ids = np.arange(math.prod(dims)).reshape(dims).transpose(order).ravel()
        return tuple(ids[: int(found.group(1))].tolist())
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] \{((?:'[^']*',?)+)\}", text):
        axes = re.findall(r"'([^']*)'=(\d+)", found.group(1))
        sizes = [int(size) for _, size in axes]
        chosen = re.findall(r"'([^']*)'", found.group(2))
        first = tuple(slice(None) if axis in chosen else 0 for axis, _ in axes)
        return tuple(np.arange(math.prod(sizes)).reshape(sizes)[first].ravel().tolist())
    raise ValueError(f"cannot read the replica groups of {node.name}: {node.attributes[:120]}")


def _transfer(
    module: Module, where: Computation, node: Instruction, kind: str, model: CostModel
) -> tuple[float, float]:
    """(bytes of the whole array, seconds) of one execution of a transfer."""
    if kind == HOST_COPY:
        copied = (
            node.shapes[0].bytes
            if "copy" in node.opcode
            else hlo_bytes.moved(module, where, node) / 2
        )
        rate = model.target.gpu.pcie_bandwidth * model.link_efficiency
        return float(copied), copied / rate + model.kernel_latency
    members = group(node, module.devices)
    payload = hlo_bytes.whole(where, node)
    per_node = max(
        sum(m // model.target.gpus_per_node == k for m in members)
        for k in {m // model.target.gpus_per_node for m in members}
    )
    return float(payload), model.collective_seconds(kind, payload, len(members), per_node)


def _crosses(
    module: Module, where: Computation, node: Instruction
) -> tuple[str, Instruction, Computation] | None:
    """(kind, the transfer, where it stands) if an instruction is one, perhaps wrapped."""
    if found := hlo_bytes.collective(module, where, node):
        return found
    if node.opcode.removesuffix("-start") in ("fusion", "copy"):
        touched = [*node.shapes, *(s for o in node.operands for s in where.instructions[o].shapes)]
        if any(shape.host for shape in touched):
            return HOST_COPY, node, where
    return None


def _merge(parts: list[tuple[Transfer, float]]) -> tuple[Transfer, ...]:
    """Sums transfers by kind, each multiplied by how often it ran."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
    for t, times in parts:
        values = (t.bytes, t.count, t.seconds, t.exposed_seconds)
        sums[t.kind] = [a + times * b for a, b in zip(sums[t.kind], values)]
    return tuple(Transfer(kind, *values) for kind, values in sorted(sums.items()))


def waits(node: Instruction) -> bool:
    """Whether nothing can run beside a transfer: it is not started, or XLA made it wait."""
    return '"is_sync":true' in node.attributes or not node.opcode.endswith("-start")


def _split(
    start: float, end: float, idle: list[tuple[float, float]]
) -> list[tuple[float, float, bool]]:
    """Cuts a transfer where the compute stream begins or stops to wait."""
    pieces, at = [], start
    for a, b in idle:
        a, b = max(a, start), min(b, end)
        if a < b:
            pieces += [(at, a, False)] if at < a else []
            pieces.append((a, b, True))
            at = b
    return pieces + ([(at, end, False)] if at < end else [])


def simulate(module: Module, model: CostModel, now: Turns | None = None) -> Timeline:
    """Plays the schedule of one device against a cost model (*modelled*).

    Args:
      module: a scheduled program, from `hlo.parse`.
      model: rates and efficiencies.
      now: which conditionals run, where `module.entry` is a part of a loop that has such.

    Returns:
      Step time, collectives by kind with what is exposed of them, and both streams as
      segments. A loop without collectives is one segment.

    Raises:
      ValueError: a collective's groups cannot be read.
    """

    @functools.cache
    def play(name: str, known: Turns | None) -> Timeline:
        where = module.computations[name]
        now = 0.0
        free = {True: 0.0, False: 0.0}  # when the wire to the host, and to other GPUs, is free
        running: dict[str, tuple[str, float, float, float, str]] = {}
        through: list[tuple[str, float, float, float, str]] = []
        idle: list[tuple[float, float]] = []
        segments: list[Segment] = []
        nested: list[tuple[Transfer, float]] = []
        waited = 0.0

        def compute(seconds: float, label: str) -> None:
            nonlocal now
            segments.append(Segment("compute", now, seconds, label, False))
            now += seconds

        def include(part: Timeline, times: float, label: str) -> None:
            nonlocal now, waited
            nested.extend((t, times) for t in part.transfers)
            waited += part.exposed_seconds * times
            if not part.transfers:
                if part.seconds:
                    compute(part.seconds * times, label)
                return
            for turn in range(min(round(times), _TURNS_DRAWN)):
                segments.extend(
                    dataclasses.replace(s, start=s.start + now + turn * part.seconds)
                    for s in part.segments
                )
            now += part.seconds * times

        for node in where.instructions.values():
            label = node.op_name or node.name
            if (
                node.opcode in FREE
                or "AllocateBuffer" in node.attributes
                or (node.opcode.endswith("-done") and node.operands[0] not in running)
            ):
                continue
            if node.opcode.endswith("-done"):
                event = running.pop(node.operands[0])
                if event[3] > now:
                    idle.append((now, event[3]))
                    now = event[3]
            elif node.opcode == "while":
                body = hlo.while_parts(module, node)[1]
                for count, then in hlo_loops.turns(module, node, known):
                    include(play(body.name, then), count, label)
            elif node.opcode == "conditional":
                include(play(hlo_loops.branch(module, node, known), known), 1.0, label)
            elif found := _crosses(module, where, node):
                kind, inner, there = found
                payload, seconds = _transfer(module, there, inner, kind, model)
                begin = max(now, free[kind == HOST_COPY])
                end = free[kind == HOST_COPY] = begin + seconds
                event = (kind, payload, begin, end, label)
                through.append(event)
                if waits(node):
                    idle.append((now, end))
                    now = end
                else:
                    running[node.name] = event
            elif node.opcode in ("call", "async-start"):
                include(play(node.called[0], known), 1.0, label)
            else:
                compute(kernel_seconds(module, where, node, model), label)
        for kind, payload, begin, end, label in through:
            pieces = _split(begin, end, idle)
            exposed = sum((b - a for a, b, alone in pieces if alone), 0.0)
            nested.append((Transfer(kind, payload, 1.0, end - begin, exposed), 1.0))
            segments += [Segment("communication", a, b - a, label, e) for a, b, e in pieces]
        waited += sum((b - a for a, b in idle), 0.0)
        in_order = tuple(sorted(segments, key=lambda s: s.start))
        return Timeline(now, _merge(nested), in_order, waited)

    return play(module.entry, now)
