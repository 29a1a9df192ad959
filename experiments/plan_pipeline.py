"""What a plan says of a pipeline: its bubble (as published), its times (modelled)."""

import dataclasses
from collections.abc import Mapping

from experiments.config import TrainConfig, step_config
from jaxaccel.pipeline_times import PipelineReport
from jaxaccel.schedules import Schedule
from jaxaccel.step_config import check_pipeline
from jaxaccel.step_config import schedule as make_schedule

# What hides most of what travels along each axis of the mesh.
HIDES = {
    "fsdp": "fsdp-prefetch",
    "data": "buckets",
    "tensor": "sequence,collective-matmul",
    "sequence": "ring-attention",
}


def schedule(config: TrainConfig, stages: int) -> Schedule | None:
    """The schedule of a run on a mesh with so many stages; None for one."""
    if stages == 1:
        return None
    # The policy is nothing to a schedule, and may not be chosen yet.
    return make_schedule(step_config(dataclasses.replace(config, remat="full")), stages)


def few_micro_batches(config: TrainConfig, stages: int) -> list[str]:
    """A line if there are fewer micro-batches than stages, with the bubble's size."""
    found = schedule(config, stages)
    return [line] if found and (line := found.warning()) else []


def overlaps(config: TrainConfig, sizes: Mapping[str, int]) -> str:
    """Techniques to offer to a step that waits, as `--overlap` takes them; "" if there are none.

    Args:
      config: of the run.
      sizes: of the mesh, by axis.
    """

    def combines(name: str) -> bool:
        changed = dataclasses.replace(config, overlap=name, remat="full")
        try:
            check_pipeline(config.model, step_config(changed), sizes["stage"])
        except ValueError:
            return False
        return True

    names = ",".join(HIDES[axis] for axis in HIDES if sizes[axis] > 1).split(",")
    return ",".join(name for name in names if name and combines(name))


def lines(report: PipelineReport) -> list[str]:
    """The pipeline's part of the table."""
    r = report
    hidden = "beside them" if r.transfer_hidden else "after them: XLA lets nothing run beside it"
    runs = f" in {r.chunks} runs of layers" if r.chunks > 1 else ""
    steps = {
        "--no-delayed-sends": r.modelled_step_ms,
        "--delayed-sends": r.modelled_step_delayed_ms,
    }
    told = ", ".join(f"{ms:,.1f} ms with {option}" for option, ms in steps.items())
    return [
        f"pipeline {r.schedule}: {r.stages} stages{runs}, --micro-batches {r.micro_batches}; at "
        f"most {r.passes_kept} passes of a stage wait for their backward pass",
        f"  bubble of the ideal time (passes of one length): {r.bubble:.1%}, with delayed sends "
        f"{r.bubble_delayed:.1%}",
        f"  modelled, of one micro-batch: forward pass {r.forward_ms:,.2f} ms, backward pass "
        f"{r.backward_ms:,.2f} ms, loss {r.loss_ms:,.2f} ms on the last stage; transfer "
        f"{r.transfer_ms:,.2f} ms {hidden}",
        f"  modelled step: {told}; choose {r.option}",
    ]
