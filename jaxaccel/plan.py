"""A report on a training step before it runs: memory, matmuls, communication.

`analyse` reads one program that was compiled for a GPU (`pallas_kernels.target` does that
without having the GPU) and puts together what the modules below it find. Sizes, matmuls and
collectives are *compiled*: facts of the program. Times are *modelled*: see
`jaxaccel.timeline` for the assumptions. Nothing here is measured.

Memory of one device adds up as arguments + outputs - donated + temporaries. The temporaries
hold activations and gradients among other things, so those two are parts of them, and a
picture shows `temporaries - activations - gradients` as the rest: weights in compute
precision, gathered weights, workspaces, what one layer recomputes.
"""

import dataclasses
from typing import Any, Literal

import jax
from jaxtyping import PyTree

from jaxaccel import hlo, hlo_loops, matmuls, memory, pipeline_times, timeline, windows
from jaxaccel.matmuls import Matmul
from jaxaccel.memory import Saved
from jaxaccel.pipeline_times import PipelineReport
from jaxaccel.schedules import Schedule, Times
from jaxaccel.timeline import CostModel, Timeline

GIB = 2**30

Bottleneck = Literal["activations", "static", "batch", "waiting"]

# Which bottleneck, which tool: what to try, in the order of what it usually costs.
TOOLS: dict[Bottleneck, tuple[str, ...]] = {
    "activations": ("flash attention", "selective rematerialisation", "full rematerialisation"),
    "static": ("mixed precision", "8-bit moments", "sharding"),
    "batch": ("gradient accumulation",),
    "waiting": ("overlap",),
}
FEW_NUMBERS = 1024  # bytes: the loss, norms
# A step that waits for less than this share of its time does not wait.
WAITING = 0.05


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of collective, over a step of one device."""

    kind: str
    bytes: float  # of whole arrays: gathered, reduced or exchanged
    count: float
    hidden_fraction: float  # *modelled*: share of its time behind compute


@dataclasses.dataclass(frozen=True)
class Uncovered:
    """A collective of one device with no matmul issued between its start and its end."""

    kind: str
    bytes: float  # of the whole array, in one execution
    count: float
    op_name: str  # JAX's, of where it comes from


@dataclasses.dataclass(frozen=True)
class Report:
    """What `experiments.plan --json` prints; memory is per device, in GiB."""

    target: str
    config: str
    peak_gib: float
    parameters_gib: float
    optimizer_gib: float
    gradients_gib: float  # one buffer of each parameter's shape and type
    activations_gib: float
    temporaries_gib: float  # XLA's, activations and gradients included
    dominant: Literal["static", "activations"]
    advice: tuple[str, ...]
    matmuls: dict[str, float]  # one device's (of the last stage) by operand type
    collectives: tuple[Collective, ...]
    exposed_fraction: float  # *modelled*
    modelled_step_ms: float
    modelled_mfu: float
    flops_per_step: float  # of one device's matmuls as compiled: repeated ones, padding and all
    recompute_flops_fraction: float  # of repeated matmuls over all others
    mtp_parameters_share: float  # from `nn.mtp_shares`; 0 without heads
    mtp_flops_share: float
    pipeline: PipelineReport | None = None  # of a mesh with stages
    uncovered: tuple[Uncovered, ...] = ()  # the largest first; a few numbers left out

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers, under the names of the fields."""
        plain = dataclasses.asdict(self)
        return plain | {k: list(plain[k]) for k in ("advice", "collectives", "uncovered")}


@dataclasses.dataclass(frozen=True)
class Analysis:
    """A report, and what it was made from."""

    report: Report
    matmuls: tuple[Matmul, ...]
    saved: tuple[Saved, ...]  # the activations, one by one
    timeline: Timeline
    guessed_loops: tuple[str, ...]  # loops whose trips the program does not fix
    xla_remats: tuple[str, ...]  # what XLA repeats on its own to fit; none if all is well
    unpriced: tuple[str, ...]  # custom calls whose FLOP nobody states: their bytes count alone
    pipeline: tuple[Schedule, Times] | None = None  # *modelled* seconds


def _stats(compiled: jax.stages.Compiled) -> Any:
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError("the backend that compiled this program reports no memory sizes")
    return stats


def peak_bytes(compiled: jax.stages.Compiled) -> int:
    """Device memory that a program needs at once: arguments, results, temporaries (*compiled*).

    Donated arguments, whose place the results take, count once.
    """
    stats = _stats(compiled)
    return (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
    )


def analyse(
    compiled: jax.stages.Compiled,
    parameters: PyTree,
    optimizer: PyTree,
    model: CostModel,
    *,
    config: str,
    model_flops: float,
    mtp: tuple[float, float] = (0.0, 0.0),
    data: tuple[str, ...] = ("batch",),
    trained: PyTree[bool] | None = None,
    pipeline: Schedule | None = None,
) -> Analysis:
    """Reads a compiled training step.

    Args:
      compiled: the step, compiled for a GPU.
      parameters: `ShapeDtypeStruct`s with shardings, as the step takes them.
      optimizer: the same of the optimizer's state.
      model: rates for the modelled times.
      config: printed.
      model_flops: FLOP of one step on all devices together, without recomputation
        (`nn.flops_per_token` times tokens); the numerator of MFU.
      mtp: from `nn.mtp_shares`, for a model with heads that predict further ahead.
      data: names of the step's arguments that carry the batch.
      trained: which parameters have gradients, from `optim.trainable`; None: all.
      pipeline: the schedule, of a step with stages.

    Returns:
      `Analysis`. In its report `matmuls` counts executions by operand type ("fp8", "bf16",
      "f16", "f32" always, others if there are any), "kernels" those of Pallas kernels, and
      "fp8_lost" matmuls among the wider types whose operands were FP8 until XLA widened
      them. `advice` is empty: its savings need further compiles.

    Raises:
      ValueError: the program takes no argument named in `data`, or its text is of an
        unknown form.
    """
    module = hlo.parse(compiled.as_text() or "")
    counted, timed, times = module, module, None
    if pipeline:
        counted = pipeline_times.on_last_stage(module, pipeline)
        timed = pipeline_times.in_lock_step(module, pipeline)
        times = pipeline_times.times(module, model, pipeline)
    found = matmuls.matmuls(counted)
    saved = pipeline_times.kept(module, pipeline) if pipeline else memory.activations(module, data)
    played = timeline.simulate(timed, model)
    sent = timeline.simulate(counted, model).transfers if pipeline else played.transfers
    hidden = {t.kind: t.hidden_fraction for t in played.transfers}

    counts: dict[str, float] = dict.fromkeys(("fp8", "bf16", "f16", "f32", "fp8_lost"), 0.0)
    work: dict[str, float] = {}
    for m in found:
        kind = "kernels" if m.kernel else m.dtype
        counts[kind] = counts.get(kind, 0.0) + m.count
        counts["fp8_lost"] += m.count * m.was_fp8
        work[m.dtype] = work.get(m.dtype, 0.0) + m.count * m.flops
    total = sum(work.values(), 0.0)
    repeated = sum(m.count * m.flops for m in found if m.recomputed)

    with_gradients = parameters
    if trained is not None:
        with_gradients = jax.tree.map(lambda x, yes: x if yes else None, parameters, trained)
    sizes = {
        "parameters": memory.sharded_bytes(parameters),
        "optimizer": memory.sharded_bytes(optimizer),
        "gradients": memory.sharded_bytes(with_gradients),
    }
    waiting = sum(s.shape.bytes for s in saved if not s.shape.host)
    # MFU is against the dense rate of the compute type; FP8 runs against bfloat16's.
    gpu = model.target.gpu
    rate = gpu.tf32_flops if work.get("f32", 0) > total / 2 else gpu.bf16_flops
    report = Report(
        target=str(model.target),
        config=config,
        peak_gib=peak_bytes(compiled) / GIB,
        parameters_gib=sizes["parameters"] / GIB,
        optimizer_gib=sizes["optimizer"] / GIB,
        gradients_gib=sizes["gradients"] / GIB,
        activations_gib=waiting / GIB,
        temporaries_gib=_stats(compiled).temp_size_in_bytes / GIB,
        dominant="activations" if waiting > sum(sizes.values()) else "static",
        advice=(),
        matmuls=counts,
        collectives=tuple(Collective(t.kind, t.bytes, t.count, hidden[t.kind]) for t in sent),
        exposed_fraction=played.exposed_fraction,
        modelled_step_ms=played.seconds * 1e3,
        modelled_mfu=model_flops / (module.devices * rate * played.seconds),
        flops_per_step=total,
        recompute_flops_fraction=repeated / (total - repeated) if total > repeated else 0.0,
        mtp_parameters_share=mtp[0],
        mtp_flops_share=mtp[1],
        pipeline=(
            pipeline_times.report(pipeline, times, played.seconds) if pipeline and times else None
        ),
        uncovered=_uncovered(module),
    )
    return Analysis(
        report,
        found,
        saved,
        played,
        hlo_loops.guessed_loops(module),
        matmuls.xla_remats(module),
        matmuls.unpriced(module),
        (pipeline, times) if pipeline and times else None,
    )


def _uncovered(module: hlo.Module) -> tuple[Uncovered, ...]:
    bare = [w for w in windows.windows(module) if not w.matmuls and w.bytes >= FEW_NUMBERS]
    bare.sort(key=lambda w: -w.bytes * w.count)
    return tuple(Uncovered(w.kind, float(w.bytes), w.count, w.op_name) for w in bare)


def bottlenecks(report: Report, rows_per_device: int) -> tuple[Bottleneck, ...]:
    """Which rows of `TOOLS` apply, the heaviest first.

    Args:
      report: of the step as it is.
      rows_per_device: sequences of one micro-batch on one device.

    Returns:
      What dominates memory; "waiting" if the modelled step waits for collectives more than
      `WAITING` of its time; "batch" if one device holds a single sequence.
    """
    found: list[Bottleneck] = [report.dominant]
    if report.exposed_fraction > WAITING:
        found.append("waiting")
    if rows_per_device <= 1:
        found.append("batch")
    return tuple(found)
