"""How often each part of a compiled program runs: loops, conditionals, what is repeated.

How often a loop runs is in the text unless the program decides it on the device, as
attention does when it skips tiles that are masked whole. Such a loop walks an array in slices
of k of n elements, so it runs at most n / k times; it is counted as (n / k + 1) / 2, which is
exact for a causal mask over one document, and `guessed_loops` names it.

Which branch a conditional takes is not in the text. One that decides as the program runs counts by
its costliest branch; those of a loop that follows a table, as a pipeline's does, by `Module.turns`.
"""

import re
from collections import defaultdict
from collections.abc import Iterator

from jaxaccel.hlo import (
    Computation,
    Instruction,
    Module,
    Shape,
    Turns,
    carried_unchanged,
    element,
    flops,
    sources,
    while_parts,
)

_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
# How JAX names what a checkpoint's backward pass repeats.
REMATERIALISED = "rematted_computation"


def _counter(condition: Computation, body: Computation) -> int | None:
    """The element of the state that the condition compares and the body changes."""
    for name in condition.root.operands:
        index = element(condition, name)
        if index is not None and not carried_unchanged(body, index):
            return index
    return None


def _slices(module: Module, body: Computation) -> Iterator[tuple[Shape, Shape, set[int | None]]]:
    """(array, slice, elements of the state that place it) of a body's dynamic slices."""
    for outer in body.instructions.values():
        if outer.opcode == "dynamic-slice":
            array = body.instructions[outer.operands[0]].shapes[0]
            yield array, outer.shapes[0], {element(body, name) for name in outer.operands[1:]}
        elif outer.opcode.removesuffix("-start") == "fusion":
            inner = module.computations[outer.called[0]]
            operand = dict(zip(inner.parameters, outer.operands))
            for node in inner.instructions.values():
                if node.opcode == "dynamic-slice":
                    array = inner.instructions[node.operands[0]].shapes[0]
                    read = set().union(*(sources(inner, name) for name in node.operands[1:]))
                    places = {element(body, operand[name]) for name in read if name in operand}
                    yield array, node.shapes[0], places


def trips(module: Module, loop: Instruction) -> tuple[float, bool]:
    """How often a while loop's body runs, and whether the program fixes that number."""
    if found := _TRIPS.search(loop.attributes):
        return float(found.group(1)), True
    condition, body = while_parts(module, loop)
    counter = _counter(condition, body)
    most = max(
        (
            max(n // k for n, k in zip(array.dims, piece.dims))
            for array, piece, elements in _slices(module, body)
            if counter in elements and piece.dims and 0 not in piece.dims
        ),
        default=1,
    )
    return (most + 1) / 2, False


def guessed_loops(module: Module) -> tuple[str, ...]:
    """Loops whose number of turns the program decides as it runs: see `trips`."""
    return tuple(
        f"{node.op_name or node.name} (taken as {trips(module, node)[0]:g} turns)"
        for computation in module.computations.values()
        for node in computation.instructions.values()
        if node.opcode == "while" and not trips(module, node)[1]
    )


def scope(node: Instruction) -> str:
    """The named scope in which JAX made a conditional."""
    found = re.search(r"([^/]+)/cond$", node.op_name)
    return found.group(1) if found else ""


def branch(module: Module, node: Instruction, now: Turns | None = None) -> str:
    """The branch of a conditional that is taken.

    Args:
      module: from `parse`.
      node: the conditional.
      now: what is known of this turn of the loop around it.

    Returns:
      Name of the branch; of an unknown conditional the one with the most work: a branch not taken
      costs nothing.
    """

    def work(name: str) -> float:
        computation = module.computations[name]
        own = sum(flops(computation, i) for i in computation.instructions.values())
        return own + sum(work(c) for i in computation.instructions.values() for c in i.called)

    if now and (made_in := scope(node)) in now.runs | now.skips:
        # XLA may have turned the condition around; what JAX made for true bears that name.
        mine = f"/{made_in}/cond/branch_1_fun"
        for name in node.called:
            made = module.computations[name].instructions.values()
            if any(mine in each.op_name for each in made) == (made_in in now.runs):
                return name
    return max(node.called, key=work)


def turns(
    module: Module, loop: Instruction, now: Turns | None = None
) -> Iterator[tuple[float, Turns | None]]:
    """(how often, which) turns a while loop makes, by what its conditionals do.

    Args:
      module: from `parse`.
      loop: a while.
      now: what is known around it.

    Yields:
      `trips` once, or for the loop that `module.turns` is about each of these.

    Raises:
      ValueError: they are not as many as the loop's trips.
    """
    count = trips(module, loop)[0]
    named = set().union(*(each.runs | each.skips for each in module.turns))
    inside = while_parts(module, loop)[1].instructions.values()
    if not any(n.opcode == "conditional" and scope(n) in named for n in inside):
        yield count, now
        return
    if (known := sum(each.count for each in module.turns)) != count:
        raise ValueError(f"{loop.op_name or loop.name} turns {count:g} times, not {known} as told")
    for each in module.turns:
        yield float(each.count), each


def executions(module: Module) -> dict[tuple[str, bool], float]:
    """How often each computation runs in one step, apart for what rematerialisation repeats.

    A loop's body counts by `trips`, a conditional by the branch that `module.turns` says, or its
    costliest. A loop that is repeated runs a body whose own names may be those of its first run
    (JAX lowers a function once), so repetition is a matter of the caller.

    Returns:
      Executions by (name of the computation, whether a rematerialised instruction calls it);
      fused computations included.
    """
    counts: dict[tuple[str, bool], float] = defaultdict(float)

    def visit(name: str, times: float, again: bool, now: Turns | None) -> None:
        counts[name, again] += times
        for node in module.computations[name].instructions.values():
            if not node.called:
                continue
            # What is fused keeps names of its own.
            inside = again or ("fusion" not in node.opcode and REMATERIALISED in node.op_name)
            if node.opcode == "while":
                condition, body = while_parts(module, node)
                visit(condition.name, times * (trips(module, node)[0] + 1), inside, now)
                for count, then in turns(module, node, now):
                    visit(body.name, times * count, inside, then)
            elif node.opcode == "conditional":
                visit(branch(module, node, now), times, inside, now)
            else:
                for callee in node.called:
                    visit(callee, times, inside, now)

    visit(module.entry, 1.0, False, None)
    return dict(counts)
