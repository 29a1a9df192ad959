"""What reaches the tensor cores: matmuls by operand type, lost FP8, recomputation, float32 sums.

Counted from the compiled program, loops by their trips; see `jaxaccel.hlo_loops`. A matmul whose
operands were FP8 and were widened before it (XLA does that in silence when no FP8 routine
fits: both operands e5m2, one operand of another type, a scale that is not a scalar) is found
by walking back from its operands through conversions, moves and scalings. XLA also removes a
cast to FP8 and back altogether, which leaves no trace: code that promises an FP8 matmul makes
it under `jax.named_scope(FP8_SCOPE)`, and a wider one from there counts as lost too.
"""

import dataclasses
import math
import re

from jaxaccel import names
from jaxaccel.hlo import (
    COLLECTIVES,
    Computation,
    Module,
    carried_unchanged,
    flops,
    is_kernel,
    is_matmul,
    kernel_cost,
    operand_type,
    while_parts,
)
from jaxaccel.hlo_loops import REMATERIALISED, executions

FP8_SCOPE = names.FP8_MATMUL


@dataclasses.dataclass(frozen=True, slots=True)
class Matmul:
    """One matrix multiplication (or Pallas kernel) of the program, and how often it runs."""

    name: str
    dtype: str  # fp8, bf16, f16, f32, ...: the operands, as the tensor cores see them
    flops: float  # of one execution
    count: float  # executions a step
    op_name: str
    kernel: bool  # a Pallas kernel that is more than a matmul; its FLOP are its own estimate
    was_fp8: bool  # meant to be FP8: an operand was, or it stands in `FP8_SCOPE`; and is not
    recomputed: bool  # rematerialisation put it there


# What may stand between an FP8 value and the matmul that was meant to read it.
_MOVES = frozenset(
    "convert copy bitcast transpose reshape broadcast slice dynamic-slice pad concatenate "
    "reduce-precision opt-barrier optimization-barrier".split()
)
_SCALES = ("broadcast", "constant", "convert")


def _was_fp8(module: Module, where: Computation, name: str, index: int = 0) -> bool:
    """Whether (output `index` of) a value is an FP8 one that was converted, moved or scaled."""
    node = where.instructions[name]
    if node.shapes and node.shapes[min(index, len(node.shapes) - 1)].dtype.startswith("f8"):
        return True
    base = re.sub(r"-(start|done)$", "", node.opcode)
    if base == "get-tuple-element":
        return _was_fp8(module, where, node.operands[0], int(node.attribute("index")))
    if base in _MOVES or base in COLLECTIVES or node.opcode.endswith("-done"):
        return _was_fp8(module, where, node.operands[0], index)
    if base == "tuple":
        return _was_fp8(module, where, node.operands[index])
    if base in ("multiply", "divide"):
        return any(
            where.instructions[scale].opcode in _SCALES and _was_fp8(module, where, value)
            for value, scale in (node.operands, node.operands[::-1])
        )
    if base == "fusion":
        inner = module.computations[node.called[0]]
        return _was_fp8(module, inner, inner.root.name, index)
    if base == "while":
        unchanged = carried_unchanged(while_parts(module, node)[1], index)
        return unchanged and _was_fp8(module, where, node.operands[0], index)
    if base == "parameter" and where.name in module.sites:
        caller, site = module.sites[where.name]
        outside = module.computations[caller]
        if site.opcode == "while":
            return _was_fp8(module, outside, site.name, index)
        if int(node.literal) < len(site.operands):
            return _was_fp8(module, outside, site.operands[int(node.literal)], index)
    return False


def matmuls(module: Module) -> tuple[Matmul, ...]:
    """Every matrix multiplication of the program.

    A dot counts wherever it stands: alone, in a Triton fusion, or as a call of cuBLAS. A
    Pallas kernel that multiplies counts with the FLOP of its `cost_estimate`; from `FP8_SCOPE`
    it is an FP8 matmul like any other. Dots that XLA wrote as a multiplication and a sum (they
    are too thin for the tensor cores) do not count.

    Args:
      module: from `parse`.

    Returns:
      One `Matmul` for each, those that run zero times left out.
    """
    found = []
    for (name, again), times in executions(module).items():
        computation = module.computations[name]
        for node in computation.instructions.values():
            kernel = is_kernel(node)
            if not (is_matmul(node) or (kernel and flops(computation, node))):
                continue
            dtype = operand_type(computation, node)
            site = module.sites.get(name)
            op_name = node.op_name or (site[1].op_name if site else "")
            lost = FP8_SCOPE in op_name or any(
                _was_fp8(module, computation, o) for o in node.operands[:2]
            )
            found.append(
                Matmul(
                    name=node.name,
                    dtype=dtype,
                    flops=flops(computation, node),
                    count=times,
                    op_name=op_name,
                    kernel=kernel and FP8_SCOPE not in op_name,
                    was_fp8=dtype != "fp8" and not kernel and lost,
                    recomputed=again or REMATERIALISED in op_name,
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
        for (name, _), times in executions(module).items()
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


def unpriced(module: Module) -> tuple[str, ...]:
    """Custom calls that are no matmul and state no cost, by target and origin."""
    return tuple(
        f"{node.attribute('custom_call_target')} {node.op_name or node.name}"
        for computation in module.computations.values()
        for node in computation.instructions.values()
        if node.opcode == "custom-call"
        and not (is_matmul(node) or kernel_cost(node) or "AllocateBuffer" in node.attributes)
    )
