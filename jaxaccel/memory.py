"""What a training step holds on one device, and what the backward pass waits for.

Two sources. The state's size follows from its shapes and shardings (`sharded_bytes`).
Activations are read from the compiled program (`activations`): XLA schedules a program before
it assigns buffers, so in the scheduled text a value's buffer lives from the instruction that
makes it to the last one that reads it. A value made by the forward pass and read by the
backward pass is an activation; JAX names the backward pass's instructions `transpose(...)`.
Where the step holds most of them at once is where forward ends and backward begins, and the
sum there is the figure.

A loop is one instruction here: the residuals of a scan over layers are stacked, and the stack
is an output of the forward loop that the backward loop takes. A loop that rematerialises
another loop (`remat` in segments) holds that inner loop's stack too, on top. What a layer
recomputes for itself and uses up at once is working memory, not an activation.

Only what depends on the batch counts (a weight's bf16 copy does not), and nothing of a
parameter's shape: a loss that computes its gradients on the way forward hands over the head's
gradient, and that is counted as a gradient.
"""

import dataclasses
import math
import re
from collections.abc import Collection

import jax
from jaxtyping import PyTree

from jaxaccel import hlo
from jaxaccel.hlo import Computation, Instruction, Module, Shape

_Leaf = tuple[str, int]  # a value: an instruction, and which of its outputs


@dataclasses.dataclass(frozen=True)
class Saved:
    """A buffer that waits for the backward pass."""

    name: str
    shape: Shape
    op_name: str


def sharded_bytes(tree: PyTree) -> int:
    """Bytes that one device holds of `tree`.

    Args:
      tree: `ShapeDtypeStruct`s (or arrays); those without a sharding count whole.

    Returns:
      Sum over the leaves of shard shape times item size.

    Example:
      >>> sharded_bytes({"w": jax.ShapeDtypeStruct((3, 5), jax.numpy.float32)})
      60
    """

    def size(leaf) -> int:
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(size(leaf) for leaf in jax.tree.leaves(tree))


def _resolve(module: Module, where: Computation, name: str, index: int = 0) -> _Leaf:
    """The value behind a name: through views, tuples, and loops that pass it on untouched."""
    while True:
        node = where.instructions[name]
        if node.opcode == "get-tuple-element":
            name, index = node.operands[0], int(node.attribute("index"))
        elif node.opcode in ("opt-barrier", "optimization-barrier", "bitcast"):
            name = node.operands[0]
        elif node.opcode == "tuple":
            name, index = node.operands[index], 0
        elif node.opcode == "while" and hlo.carried_unchanged(
            hlo.while_parts(module, node)[1], index
        ):
            name = node.operands[0]
        else:
            return name, index


def _start(where: Computation, node: Instruction) -> Instruction:
    """The instruction that does the work of an asynchronous pair."""
    return where.instructions[node.operands[0]] if node.opcode.endswith("-done") else node


def _root(module: Module, start: Instruction, index: int) -> tuple[Computation, Instruction]:
    """Output `index` of a fusion, inside it."""
    inner = module.computations[start.called[0]]
    root = inner.root
    return inner, inner.instructions[root.operands[index]] if root.opcode == "tuple" else root


def _origins(module: Module, where: Computation) -> dict[_Leaf, str]:
    """Where JAX made each value; of what XLA added, where what it reads was made."""
    found: dict[_Leaf, str] = {}
    for node in where.instructions.values():
        start = _start(where, node)
        inherited = ""
        if not start.op_name and start.opcode != "while":
            read = [found.get(_resolve(module, where, o), "") for o in start.operands]
            inherited = next((n for n in read if "transpose(" in n), next(iter(read), ""))
        for i in range(len(node.shapes)):
            name = start.op_name
            if start.opcode.removesuffix("-start") == "fusion":
                name = _root(module, start, min(i, len(node.shapes) - 1))[1].op_name or name
            found[node.name, i] = name or inherited
    return found


def _depends(module: Module, where: Computation, seeds: set[_Leaf]) -> set[_Leaf]:
    """All values of a computation that are computed from `seeds`."""
    found = set(seeds)
    known = lambda name: _resolve(module, where, name) in found
    for node in where.instructions.values():
        start = _start(where, node)
        base = start.opcode.removesuffix("-start")
        if node.opcode in hlo.FREE:
            continue
        for i in range(len(node.shapes)):
            if base == "while":
                state = [
                    _resolve(module, where, start.operands[0], k) for k in range(len(node.shapes))
                ]
                yes = any(leaf in found for leaf in state)
            elif base == "fusion":
                inner, root = _root(module, start, min(i, len(node.shapes) - 1))
                read = hlo.sources(inner, root.name)
                outside = zip(inner.parameters, start.operands)
                yes = any(known(operand) for p, operand in outside if p in read)
            elif base in hlo.COLLECTIVES and i < len(start.operands):
                yes = known(start.operands[i])
            else:
                yes = any(map(known, start.operands))
            if yes:
                found.add((node.name, i))
    return found


def _reads(module: Module, where: Computation, node: Instruction) -> set[_Leaf]:
    """Values that an instruction reads; of a loop's state, what its body uses."""
    if node.opcode != "while":
        return {_resolve(module, where, operand) for operand in node.operands}
    body = hlo.while_parts(module, node)[1]
    used = {
        hlo.element(body, name)
        for inner in body.instructions.values()
        if inner is not body.root and inner.opcode != "get-tuple-element"
        for name in inner.operands
    }
    return {_resolve(module, where, node.operands[0], i) for i in used if i is not None}


def _peak(
    module: Module,
    where: Computation,
    data: set[_Leaf],
    ignore: Collection[tuple[int, ...]],
    inside: bool,
) -> tuple[Saved, ...]:
    """What waits for the backward pass at the worst moment of one computation."""
    order = {name: i for i, name in enumerate(where.instructions)}
    data = _depends(module, where, data)
    backward = lambda name: "transpose(" in name and not (inside and "rematted_" in name)
    origins = _origins(module, where)
    last: dict[_Leaf, int] = {}
    nested: dict[int, tuple[Saved, ...]] = {}
    for node in where.instructions.values():
        if node.opcode == "while":
            body = hlo.while_parts(module, node)[1]
            state = [_resolve(module, where, node.operands[0], i) for i in range(len(node.shapes))]
            fresh = lambda i, body=body: not hlo.carried_unchanged(body, i)
            seeds = {
                (body.parameters[0], i)
                for i, leaf in enumerate(state)
                if leaf in data or (fresh(i) and (node.name, i) in data)
            }
            within = inside or backward(origins[node.name, 0])
            nested[order[node.name]] = _peak(module, body, seeds, ignore, within)
        elif node.opcode == "call":
            callee = module.computations[node.called[0]]
            seeds = {
                (parameter, 0)
                for parameter, operand in zip(callee.parameters, node.operands)
                if _resolve(module, where, operand) in data
            }
            nested[order[node.name]] = _peak(module, callee, seeds, ignore, inside)
        if node.opcode in hlo.FREE:
            continue
        if any(backward(origins[node.name, i]) for i in range(len(node.shapes))):
            for leaf in _reads(module, where, node):
                last[leaf] = max(last.get(leaf, 0), order[node.name])
    waiting = {}
    for leaf, end in last.items():
        node = where.instructions[leaf[0]]
        # Inside a backward loop only what another loop recomputed waits.
        made = node.opcode == "while" if inside else node.opcode != "parameter"
        name = origins[leaf]
        shape = node.shapes[leaf[1]]
        plain = tuple(d for d in shape.dims if d != 1)
        if leaf in data and made and not backward(name) and plain not in ignore:
            waiting[leaf] = (order[leaf[0]], end, Saved(node.name, shape, name))
    best: tuple[Saved, ...] = ()
    for moment in sorted({end for _, end, _ in waiting.values()} | set(nested)):
        held = tuple(s for begin, end, s in waiting.values() if begin < moment <= end)
        held += nested.get(moment, ())
        best = max(best, held, key=lambda many: sum(s.shape.bytes for s in many))
    return best


def activations(module: Module, data: Collection[str] = ("batch",)) -> tuple[Saved, ...]:
    """Buffers that live from the forward into the backward pass, at their peak (*compiled*).

    Args:
      module: a training step, from `hlo.parse`.
      data: names of the arguments of the jitted function that carry the batch.

    Returns:
      The buffers that wait for the backward pass when most bytes of them do, largest first;
      those in the host's memory have `shape.host` set.

    Raises:
      ValueError: the program has no argument of these names.
    """
    entry = module.computations[module.entry]
    arguments = [entry.instructions[name] for name in entry.parameters]
    argument = lambda node: (re.match(r"\w*", node.op_name) or [""])[0]
    seeds = {(node.name, 0) for node in arguments if argument(node) in data}
    if not seeds:
        known = ", ".join(sorted({argument(node) for node in arguments} - {""}))
        raise ValueError(f"no argument named {' or '.join(data)}; the program has {known}")
    ignore = {
        tuple(d for d in node.shapes[0].dims if d != 1)
        for node in arguments
        if (node.name, 0) not in seeds and math.prod(node.shapes[0].dims) > 1
    }
    found = _peak(module, entry, seeds, ignore, inside=False)
    return tuple(sorted(found, key=lambda s: (-s.shape.bytes, s.name)))
