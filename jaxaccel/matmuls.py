"""What reaches the tensor cores: matmuls by operand type, lost FP8, recomputation, float32 sums.

Counted from the compiled program, loops by their trips; see `jaxaccel.hlo`. A matmul whose
operands were FP8 and were widened before it (XLA does that in silence when no FP8 routine
fits: both operands e5m2, one operand of another type, a scale that is not a scalar) is found
by walking back from its operands through conversions, moves and scalings. A cast to FP8 and
back that XLA removed altogether leaves no trace here.
"""

import dataclasses
import math
import re

from jaxaccel.hlo import (
    COLLECTIVES,
    Computation,
    Module,
    executions,
    flops,
    is_kernel,
    is_matmul,
    kernel_cost,
    operand_type,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Matmul:
    """One matrix multiplication (or Pallas kernel) of the program, and how often it runs."""

    name: str
    computation: str  # of the instruction that launches it
    dtype: str  # fp8, bf16, f16, f32, ...: the operands, as the tensor cores see them
    flops: float  # of one execution
    count: float  # executions a step
    op_name: str
    kernel: bool  # a Pallas kernel, whose FLOP are its own estimate
    was_fp8: bool  # an operand was FP8 and was converted to `dtype` first

    @property
    def recomputed(self) -> bool:
        """Whether rematerialisation put it there."""
        return "rematted_computation" in self.op_name


# What may stand between an FP8 value and the matmul that was meant to read it.
_PASSES = (
    "convert copy bitcast transpose reshape broadcast slice dynamic-slice pad concatenate "
    "reduce-precision copy-start copy-done opt-barrier optimization-barrier".split()
)


def _was_fp8(module: Module, where: Computation, name: str, index: int | None = None) -> bool:
    """Whether a value is an FP8 one that was converted, moved or scaled."""
    node = where.instructions[name]
    if (
        node.shapes[index if index is not None and index < len(node.shapes) else 0].dtype[:2]
        == "f8"
    ):
        return True
    back = lambda operand, index=None: _was_fp8(module, where, operand, index)
    base = re.sub(r"-(start|done)$", "", node.opcode)
    if node.opcode == "get-tuple-element":
        return back(node.operands[0], int(node.attribute("index")))
    if node.opcode in _PASSES or base in COLLECTIVES:
        return back(node.operands[0], index)
    if node.opcode == "tuple" and index is not None:
        return back(node.operands[index])
    if node.opcode in ("multiply", "divide"):
        return any(
            back(one)
            for one, other in (node.operands, node.operands[::-1])
            if where.instructions[other].opcode in ("broadcast", "constant", "convert")
        )
    if node.opcode == "fusion":
        inner = module.computations[node.called[0]]
        return _was_fp8(module, inner, inner.root.name, index)
    if node.opcode in ("fusion-done", "while"):
        if node.opcode == "while" and index is not None:
            start = where.instructions[node.operands[0]]
            return start.opcode == "tuple" and back(start.operands[index])
        start = where.instructions[node.operands[0]]
        inner = module.computations[start.called[0]]
        return _was_fp8(module, inner, inner.root.name, index)
    if node.opcode == "parameter" and where.name in module.sites:
        caller, site = module.sites[where.name]
        outside = module.computations[caller]
        if site.opcode == "while":
            return index is not None and _was_fp8(module, outside, site.name, index)
        if int(node.literal) < len(site.operands):
            return _was_fp8(module, outside, site.operands[int(node.literal)], index)
    return False


def matmuls(module: Module) -> tuple[Matmul, ...]:
    """Every matrix multiplication of the program.

    A dot counts wherever it stands: alone, in a Triton fusion, or as a call of cuBLAS. A
    Pallas kernel counts with the FLOP of its `cost_estimate`. Dots that XLA wrote as a
    multiplication and a sum (they are too thin for the tensor cores) do not count.

    Args:
      module: from `parse`.

    Returns:
      One `Matmul` for each, those that run zero times left out.
    """
    found = []
    for name, times in executions(module).items():
        computation = module.computations[name]
        for node in computation.instructions.values():
            kernel = is_kernel(node)
            if not (is_matmul(node) or (kernel and kernel_cost(node))):
                continue
            dtype = operand_type(computation, node)
            site = module.sites.get(name)
            found.append(
                Matmul(
                    name=node.name,
                    computation=site[0] if site and site[1].opcode == "fusion" else name,
                    dtype=dtype,
                    flops=flops(computation, node),
                    count=times,
                    op_name=node.op_name or (site[1].op_name if site else ""),
                    kernel=kernel,
                    was_fp8=dtype != "fp8"
                    and not kernel
                    and any(_was_fp8(module, computation, o) for o in node.operands[:2]),
                )
            )
    return tuple(found)


@dataclasses.dataclass(frozen=True, slots=True)
class Reduction:
    """One sum (or maximum) of the program."""

    dtype: str  # it accumulates in
    inputs: int  # elements that it reads
    count: float  # executions a step
    op_name: str


def reductions(module: Module) -> tuple[Reduction, ...]:
    """Every `reduce` of the program: softmax, norm statistics, losses, gradient sums.

    A test that wants them in float32 selects by `op_name` (`reduce_max`, `reduce_sum`).

    Args:
      module: from `hlo.parse`.

    Returns:
      One `Reduction` for each.
    """
    return tuple(
        Reduction(
            dtype=node.shapes[0].dtype,
            inputs=math.prod(
                module.computations[name].instructions[node.operands[0]].shapes[0].dims
            ),
            count=times,
            op_name=node.op_name,
        )
        for name, times in executions(module).items()
        for node in module.computations[name].instructions.values()
        if node.opcode == "reduce"
    )


def xla_remats(module: Module) -> tuple[str, ...]:
    """Instructions that XLA itself chose to compute twice, to fit its memory limit."""
    return tuple(
        name
        for computation in module.computations.values()
        for name in computation.instructions
        if re.search(r"\.remat\d*(\.|$)", name)
    )
