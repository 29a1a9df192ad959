"""Read what XLA made of a program: the optimised, scheduled HLO text of one device.

`compiled.as_text()` is the only thing read here, so a program compiled for a GPU that this
machine does not have is read like any other. `parse` turns the text into computations in
schedule order; `hlo_loops` says how often each of them runs (bodies of loops by their trip count);
`matmuls` lists what reaches the tensor cores, with its FLOP, operand type and origin. Nothing is
timed and nothing is run: every number is *compiled*.
"""

import dataclasses
import functools
import json
import math
import re
from typing import NamedTuple

BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128}
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<= ]*)\](\{[^}]*\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\s*$")
_NAME = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPERAND = re.compile(r"%([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|\w+_computations?)=\{?((?:%[\w.\-]+,? ?)+)"
)

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# Instructions that name a value and move nothing.
FREE = (
    "parameter constant tuple get-tuple-element bitcast after-all opt-barrier "
    "optimization-barrier partition-id replica-id add-dependency".split()
)


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """One array: XLA's name of its element type, and its dimensions."""

    dtype: str
    dims: tuple[int, ...]
    host: bool = False  # in the host's memory

    @property
    def bytes(self) -> int:
        """Size in bytes, without padding."""
        return math.prod(self.dims) * bits(self.dtype) // 8


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One line of HLO."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]  # leaves of its (perhaps nested) tuple, in order
    operands: tuple[str, ...]
    literal: str  # what stands in the parentheses of a constant or parameter
    attributes: str
    is_root: bool

    @property
    def op_name(self) -> str:
        """Where JAX made it: `jit(step)/jvp()/while/body/dot_general`; "" if XLA did."""
        found = _OP_NAME.search(self.attributes)
        return found.group(1) if found else ""

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that it calls; for a while loop its condition and its body."""
        return tuple(
            name for group in _CALLED.findall(self.attributes) for name in _OPERAND.findall(group)
        )

    def attribute(self, key: str) -> str:
        """Text of `key=...`, up to the next space or closing brace; "" without one."""
        found = re.search(rf"\b{key}=(\{{[^}}]*\}}|[^,\s]+)", self.attributes)
        return found.group(1) if found else ""

    def integers(self, key: str) -> tuple[int, ...]:
        """Numbers of `key={1,2}`."""
        return tuple(int(n) for n in re.findall(r"\d+", self.attribute(key)))

    @property
    def bytes(self) -> int:
        """Bytes of all that it returns."""
        return sum(shape.bytes for shape in self.shapes)


@dataclasses.dataclass(frozen=True, slots=True)
class Computation:
    """Instructions by name, in the order in which they are issued."""

    name: str
    instructions: dict[str, Instruction]
    root: Instruction

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of its parameters, in order."""
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return tuple(i.name for i in sorted(found, key=lambda i: int(i.literal)))


class Turns(NamedTuple):
    """Some turns in a row of a loop whose conditionals JAX made under named scopes."""

    count: int
    runs: frozenset[str]  # scopes whose conditional takes the branch for true
    skips: frozenset[str]  # and those where it does not


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A parsed program of one device."""

    computations: dict[str, Computation] = dataclasses.field(repr=False)
    entry: str
    devices: int
    # Of the loop that has such conditionals, if it is known what they do: all its turns. Set with
    # `dataclasses.replace`; without, a conditional counts by its costliest branch.
    turns: tuple[Turns, ...] = ()

    @functools.cached_property
    def sites(self) -> dict[str, tuple[str, Instruction]]:
        """For each called computation, a computation and an instruction that calls it."""
        return {
            callee: (computation.name, instruction)
            for computation in self.computations.values()
            for instruction in computation.instructions.values()
            for callee in instruction.called
        }


def bits(dtype: str) -> int:
    """Bits of one element, from XLA's name of the type: 8 of "f8e4m3fn", 4 of "s4"."""
    if dtype in BITS:
        return BITS[dtype]
    if not (found := re.match(r"[a-z]+(\d+)", dtype)):
        raise ValueError(f"unknown element type {dtype!r}")
    return int(found.group(1))


def _close(text: str, start: int) -> int:
    """Index just after the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        if text[i] == "(":
            depth += 1
        elif text[i] == ")":
            depth -= 1
            if depth == 0:
                return i + 1
    raise ValueError(f"unbalanced parentheses in HLO line: {text[:80]}")


def _instruction(line: str) -> Instruction | None:
    if not (head := _NAME.match(line)):
        return None
    start = head.end()
    end = _close(line, start) if line[start] == "(" else line.index(" ", start)
    arguments = line.index("(", end)
    stop = _close(line, arguments)
    inside = line[arguments + 1 : stop - 1]
    shapes = tuple(
        Shape(dtype, tuple(int(d) for d in re.findall(r"\d+", dims)), "S(5)" in layout)
        for dtype, dims, layout in _SHAPE.findall(line[start:end])
    )
    opcode = line[end:arguments].strip()
    named = opcode in ("constant", "parameter")
    return Instruction(
        name=head.group(2),
        opcode=opcode,
        shapes=shapes,
        operands=() if named else tuple(_OPERAND.findall(inside)),
        literal=inside if named else "",
        attributes=line[stop:],
        is_root=bool(head.group(1)),
    )


def parse(text: str) -> Module:
    """Parses optimised HLO text.

    Args:
      text: `compiled.as_text()`.

    Returns:
      The computations of the program; those that are scheduled, in schedule order.

    Raises:
      ValueError: the text has no entry computation.

    Example:
      >>> module = parse('''ENTRY %main (x: f32[2,3]) -> f32[2,3] {
      ...   %x = f32[2,3]{1,0} parameter(0)
      ...   ROOT %y = f32[2,3]{1,0} negate(%x)
      ... }''')
      >>> module.computations["main"].root.shapes[0].bytes
      24
    """
    computations, entry = {}, ""
    name, body = "", {}
    for line in text.splitlines():
        if name and line.startswith("}"):
            root = next(i for i in body.values() if i.is_root)
            computations[name] = Computation(name, body, root)
            name, body = "", {}
        elif name:
            if instruction := _instruction(line):
                body[instruction.name] = instruction
        elif head := _HEADER.match(line):
            name = head.group(2)
            entry = name if head.group(1) else entry
    if not entry:
        raise ValueError("no entry computation in the text: it is not optimised HLO")
    partitions = re.search(r"num_partitions=(\d+)", text.partition("\n")[0])
    return Module(computations, entry, int(partitions.group(1)) if partitions else 1)


def while_parts(module: Module, loop: Instruction) -> tuple[Computation, Computation]:
    """Condition and body of a while loop."""
    condition = loop.attribute("condition").lstrip("%")
    body = loop.attribute("body").lstrip("%")
    return module.computations[condition], module.computations[body]


def element(computation: Computation, name: str) -> int | None:
    """Which element of a loop's state `name` is, seen through bitcasts and copies."""
    node = computation.instructions[name]
    while node.opcode in ("bitcast", "copy"):
        node = computation.instructions[node.operands[0]]
    if node.opcode != "get-tuple-element":
        return None
    of = computation.instructions[node.operands[0]]
    return int(node.attribute("index")) if of.opcode == "parameter" else None


def carried_unchanged(body: Computation, index: int) -> bool:
    """Whether a loop passes element `index` of its state through untouched."""
    if body.root.opcode != "tuple":
        return False
    return element(body, body.root.operands[index]) == index


def sources(computation: Computation, name: str) -> set[str]:
    """Parameters and tuple elements that a value is computed from."""
    seen, todo = set(), [name]
    while todo:
        node = computation.instructions[todo.pop()]
        if node.name not in seen:
            seen.add(node.name)
            todo += [] if node.opcode == "get-tuple-element" else node.operands
    return seen


def _family(dtype: str) -> str:
    return "fp8" if dtype.startswith("f8") else dtype


def operand_type(computation: Computation, node: Instruction) -> str:
    """Type that a matmul reads ("fp8", "bf16"), the wider of two; of a kernel the first."""
    types = [computation.instructions[o].shapes[0].dtype for o in node.operands]
    if is_kernel(node):  # integers say where to read
        return _family(next((t for t in types if re.match("b?f", t)), ""))
    return _family(max(types[:2], key=bits, default=""))


def is_kernel(node: Instruction) -> bool:
    """Whether an instruction launches a Pallas kernel."""
    return node.opcode == "custom-call" and "mosaic" in node.attribute("custom_call_target")


def kernel_cost(node: Instruction) -> tuple[float, float] | None:
    """(FLOP, bytes) that a Pallas kernel's `cost_estimate` states, if it has one."""
    found = re.search(r"cost_estimate_json\W*?(\{[^}]*\})", node.attributes)
    if not (found and is_kernel(node)):
        return None
    estimate = json.loads(re.sub(r'\\(22|")', '"', found.group(1)))
    return float(estimate["flops"]), float(estimate["bytes_accessed"])


def is_matmul(node: Instruction) -> bool:
    """Whether an instruction is a dot or a call of a matmul library."""
    if node.opcode == "custom-call":
        return bool(re.search(r"__cublas|__triton_gemm", node.attribute("custom_call_target")))
    return node.opcode in ("dot", "scaled-dot")


def flops(computation: Computation, node: Instruction) -> float:
    """FLOP of a dot or of a call of a matmul library; 0 of anything else."""
    if cost := kernel_cost(node):
        return cost[0]
    if not is_matmul(node):
        return 0.0
    if node.opcode == "custom-call":
        found = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', node.attributes)
        contracting = re.findall(r"\d+", found.group(1)) if found else []
    else:
        contracting = node.integers("lhs_contracting_dims")
    lhs = computation.instructions[node.operands[0]].shapes[0]
    return 2.0 * math.prod(node.shapes[0].dims) * math.prod(lhs.dims[int(d)] for d in contracting)
