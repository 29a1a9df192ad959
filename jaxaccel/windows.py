"""What lies between the start and the done of each collective, in XLA's schedule (*compiled*).

A transfer is hidden only by work that is issued between the two, so a program that promises
overlap is held to it by counting: of so many windows, so many have a matmul inside. Time is
not asked: a window may be shorter than its transfer; see `jaxaccel.timeline` for that.

    found = windows(hlo.parse(compiled.as_text()))
    assert all(w.matmuls for w in found if w.kind == "collective-permute")
"""

import dataclasses
from collections.abc import Iterable

from jaxaccel import hlo, hlo_bytes, hlo_loops
from jaxaccel.hlo import Instruction, Module


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """One collective of the program, and what is issued while it is under way."""

    kind: str
    bytes: int  # of the whole array: gathered, reduced or exchanged, in one execution
    count: float  # executions a step
    matmuls: int  # between start and done; of a loop or call there, those in its body
    synchronous: bool  # nothing can run beside it
    op_name: str


def _matmuls(module: Module, nodes: Iterable[Instruction]) -> int:
    """Matmuls and multiplying kernels among instructions and in what they call."""
    found = 0
    for node in nodes:
        multiplies = hlo.is_matmul(node) or (hlo.kernel_cost(node) or (0.0,))[0] > 0
        called = (hlo_loops.branch(module, node),) if node.opcode == "conditional" else node.called
        inner = (module.computations[name].instructions.values() for name in called)
        found += multiplies + sum(_matmuls(module, each) for each in inner)
    return found


def windows(module: Module) -> tuple[Window, ...]:
    """Every collective of a scheduled program with the matmuls that run beside it.

    A matmul is a dot, a call of a matmul library or a Pallas kernel that states FLOP, wherever
    it stands: alone, in a fusion, a called computation, a loop's body (once, however often the
    loop turns) or the costliest branch of a conditional.

    Args:
      module: from `hlo.parse`, of `compiled.as_text()` for a GPU. On CPUs XLA has no starts.

    Returns:
      One `Window` for each, computation by computation in the order of issue; those that run
      zero times left out.

    Example:
      >>> windows(hlo.parse('''ENTRY %main (x: f32[8,8]) -> f32[8,8] {
      ...   %x = f32[8,8]{1,0} parameter(0)
      ...   ROOT %y = f32[8,8]{1,0} all-reduce(%x), replica_groups={}
      ... }'''))
      (Window(kind='all-reduce', bytes=256, count=1.0, matmuls=0, synchronous=True, op_name=''),)
    """
    counts: dict[str, float] = {}
    wrapped = set()  # computations that are one collective, started by their caller
    for (name, _), times in hlo_loops.executions(module).items():
        counts[name] = counts.get(name, 0.0) + times
    found = []
    for name, times in counts.items():
        where = module.computations[name]
        issued = list(where.instructions.values())
        for at, node in enumerate(issued):
            crossing = hlo_bytes.collective(module, where, node)
            if crossing is None or name in wrapped:
                continue
            kind, inner, there = crossing
            if there is not where:
                wrapped.add(there.name)
            done = next((i for i, n in enumerate(issued) if _ends(n, node)), at)
            found.append(
                Window(
                    kind=kind,
                    bytes=hlo_bytes.whole(there, inner),
                    count=times,
                    matmuls=_matmuls(module, issued[at + 1 : done]),
                    synchronous=done == at or '"is_sync":true' in node.attributes,
                    op_name=node.op_name,
                )
            )
    return tuple(found)


def _ends(node: Instruction, start: Instruction) -> bool:
    return node.opcode.endswith("-done") and node.operands[0] == start.name
