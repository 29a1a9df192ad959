"""What an instruction of a compiled program reads from device memory and writes to it.

Read from XLA's text, see `jaxaccel.hlo`; *compiled*, not measured. Caches are not known here:
an array that two instructions read counts twice.
"""

import dataclasses
import math

from jaxaccel import hlo, hlo_loops
from jaxaccel.hlo import COLLECTIVES, FREE, Computation, Instruction, Module, Shape


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """An array, or the part of one that an instruction slices, read or written."""

    dtype: str
    elements: float
    write: bool

    @property
    def bytes(self) -> float:
        """Size in bytes."""
        return self.elements * hlo.bits(self.dtype) / 8


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """An instruction that is no matmul, and the arrays of one size that it goes over."""

    name: str
    op_name: str
    reads: int  # arrays of that many elements, in one execution
    writes: int
    bytes: float  # of those arrays
    count: float  # executions a step
    kernel: bool  # a Pallas kernel
    read_types: tuple[str, ...]  # of the arrays read, by XLA's names


def _whole(shapes: tuple[Shape, ...], write: bool) -> list[Access]:
    return [Access(s.dtype, float(math.prod(s.dims)), write) for s in shapes]


def _unviewed(inner: Computation, name: str) -> Instruction:
    """What stands behind bitcasts."""
    node = inner.instructions[name]
    while node.opcode == "bitcast":
        node = inner.instructions[node.operands[0]]
    return node


def _through_views(inner: Computation, name: str) -> list[Instruction]:
    """Readers of a value, bitcasts skipped."""
    found = []
    for node in inner.instructions.values():
        if name in node.operands:
            found += _through_views(inner, node.name) if node.opcode == "bitcast" else [node]
    return found


def _fused(module: Module, node: Instruction) -> list[Access]:
    """Of a fusion: of what it slices only the slice, in place only the update."""
    inner = module.computations[node.called[0]]
    found = []
    for name in inner.parameters:
        (whole,) = _whole(inner.instructions[name].shapes, False) or [None]
        if whole is None:
            continue
        part = 0.0
        for reader in _through_views(inner, name):
            sliced = _unviewed(inner, reader.operands[0]).name == name
            if reader.opcode in ("dynamic-slice", "slice", "gather") and sliced:
                part += math.prod(reader.shapes[0].dims)
            elif reader.opcode not in ("dynamic-update-slice", "scatter") or not sliced:
                part += whole.elements
        found.append(dataclasses.replace(whole, elements=min(part, whole.elements)))
    roots = [inner.root]
    if inner.root.opcode == "tuple":
        roots = [inner.instructions[name] for name in inner.root.operands]
    for root in (_unviewed(inner, root.name) for root in roots):
        update = {"dynamic-update-slice": 1, "scatter": 2}.get(root.opcode)
        written = inner.instructions[root.operands[update]] if update else root
        found += _whole(written.shapes, True)
    return found


def accesses(module: Module, where: Computation, node: Instruction) -> list[Access]:
    """Every array that an instruction reads or writes.

    Args:
      module: from `hlo.parse`.
      where: the computation that it stands in.
      node: of that computation.

    Returns:
      One `Access` for each operand and each result.
    """
    base = node.opcode.removesuffix("-start")
    if base == "fusion":
        return _fused(module, node)
    if base in ("dynamic-slice", "slice", "gather"):
        part = node.shapes[-1 if base != node.opcode else 0]
        return _whole((part,), False) + _whole((part,), True)
    if base in ("dynamic-update-slice", "scatter"):
        part = where.instructions[node.operands[1 if base != "scatter" else 2]].shapes
        return _whole(part, False) + _whole(part, True)
    read = tuple(s for o in node.operands for s in where.instructions[o].shapes)
    written = node.shapes[:1] if hlo.is_matmul(node) else node.shapes
    return _whole(read, False) + _whole(written, True)


def moved(module: Module, where: Computation, node: Instruction) -> float:
    """Bytes that an instruction reads and writes; a Pallas kernel's as it states them itself.

    Args:
      module: from `hlo.parse`.
      where: the computation that it stands in.
      node: of that computation.

    Returns:
      Bytes of one execution.
    """
    if cost := hlo.kernel_cost(node):
        return cost[1]
    return sum(access.bytes for access in accesses(module, where, node))


def passes(module: Module, elements: int, written: str | None = None) -> tuple[Pass, ...]:
    """What goes over arrays of one size, matmuls and attention left out.

    Norms, activations, casts, additions and copies do little with each element: their time is
    their bytes.

    Args:
      module: from `hlo.parse`.
      elements: of the arrays that count, B x T x D say, sliced from a stack of layers or whole.
      written: count only those that write one of this type, by XLA's name.

    Returns:
      One `Pass` for each instruction that reads or writes such an array.
    """
    found = []
    for (name, _), times in hlo_loops.executions(module).items():
        site = module.sites.get(name)
        if site and site[1].opcode not in ("while", "conditional"):  # fused, or a sum's addition
            continue
        where = module.computations[name]
        for node in where.instructions.values():
            inner = where
            nodes = [node]
            if "fusion" in node.opcode and node.called:
                inner = module.computations[node.called[0]]
                nodes = list(inner.instructions.values())
            done = node.opcode.endswith("-done") or node.opcode in ("while", "conditional", "call")
            if node.opcode in FREE or done or any(hlo.flops(inner, n) for n in nodes):
                continue
            hits = [a for a in accesses(module, where, node) if a.elements == elements]
            types = {a.dtype for a in hits if a.write}
            if not hits or (written is not None and written not in types):
                continue
            writes = sum(a.write for a in hits)
            found.append(
                Pass(
                    name=node.name,
                    op_name=node.op_name,
                    reads=len(hits) - writes,
                    writes=writes,
                    bytes=sum(a.bytes for a in hits),
                    count=times,
                    kernel=any(map(hlo.is_kernel, nodes)),
                    read_types=tuple(a.dtype for a in hits if not a.write),
                )
            )
    return tuple(found)


def collective(
    module: Module, where: Computation, node: Instruction
) -> tuple[str, Instruction, Computation] | None:
    """The collective that an instruction performs or starts, perhaps as a fusion of it.

    Args:
      module: from `hlo.parse`.
      where: the computation that holds `node`.
      node: any instruction.

    Returns:
      Its kind, the collective itself and where that stands; None of anything else.
    """
    base = node.opcode.removesuffix("-start")
    if base in COLLECTIVES:
        return base, node, where
    if base in ("fusion", "async") and node.called:
        inner = module.computations[node.called[0]]
        for each in inner.instructions.values():
            if each.opcode in COLLECTIVES:
                return each.opcode, each, inner
    return None


def whole(where: Computation, node: Instruction) -> int:
    """Bytes of the whole array that a collective gathers, reduces or exchanges."""
    received = node.shapes[len(node.operands) :] if node.opcode.endswith("-start") else node.shapes
    if len(node.shapes) == len(node.operands):
        received = node.shapes  # an all-reduce's start returns its results alone
    sent = sum(where.instructions[o].bytes for o in node.operands)
    return max(sent, sum(s.bytes for s in received))
