"""Pictures of a plan: memory by policy (compiled), and the step's timeline (modelled)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.errors import UserError
from experiments.pipeline_plot import draw as draw_pipeline
from jaxaccel.plan import Report
from jaxaccel.schedules import Schedule, Times
from jaxaccel.timeline import Segment, Timeline

PARTS = {  # of a bar, from below: label and colour
    "parameters_gib": ("parameters", "#4c72b0"),
    "optimizer_gib": ("optimizer state", "#8172b3"),
    "gradients_gib": ("gradients", "#55a868"),
    "activations_gib": ("activations", "#dd8452"),
}
OTHER = ("other temporaries", "#b0b0b0")
COMPUTE, HIDDEN, EXPOSED = "#4c72b0", "#55a868", "#c44e52"
COLUMNS = 400  # of the timeline


def shares(segments: Sequence[Segment], seconds: float, columns: int) -> np.ndarray:
    """How much of each of `columns` equal parts of a step the segments fill.

    A transfer is often thinner than a pixel, and would be drawn or left out by chance.

    Args:
      segments: of one stream, not overlapping.
      seconds: the step's.
      columns: how many parts.

    Returns:
      Shares from 0 to 1.
    """
    edges = np.linspace(0, seconds, columns + 1)
    filled = np.zeros(columns + 1)
    for s in segments:
        filled += np.clip(edges - s.start, 0, s.duration)  # before each edge
    return np.diff(filled) / (seconds / columns)


def check_picture(path: Path) -> None:
    """Refuses, before minutes of compiling, a file that no picture could be written to.

    Raises:
      UserError: its folder does not exist, or its ending names no format.
    """
    if not path.parent.is_dir():
        raise UserError(f"--plot {path}: there is no folder {path.parent}")
    formats = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise UserError(f"--plot {path}: its ending is to be one of {', '.join(formats)}")


def draw(path: Path, *args: Any) -> None:
    """Writes `figure` into a file.

    Args:
      path: of the picture; its ending says which format.
      args: of `figure`.
    """
    figure(*args).savefig(path, dpi=120)


def figure(
    bars: Sequence[tuple[str, Report]],
    timeline: Timeline,
    limit_gib: float,
    pipeline: tuple[Schedule, Times] | None = None,
) -> Figure:
    """Draws memory per device, a bar for each policy, above the timeline of the plan itself.

    Args:
      bars: a label and the report of each policy.
      timeline: *modelled*, of the planned step.
      limit_gib: memory of one device, drawn as a line.
      pipeline: schedule and *modelled* times of a step with stages, drawn below.

    Returns:
      The picture, which a notebook shows.
    """
    heights = [5.0, 3.0]
    if pipeline:
        heights += 2 * [0.9 + 0.32 * pipeline[0].stages]
    picture = Figure(figsize=(11, sum(heights)), layout="constrained")
    FigureCanvasAgg(picture)
    memory, time, *panels = picture.subplots(len(heights), 1, height_ratios=heights)
    report = bars[0][1]

    labels = [label for label, _ in bars]
    bottom = [0.0] * len(bars)
    for part, (name, color) in PARTS.items():
        heights = [getattr(r, part) for _, r in bars]
        memory.bar(labels, heights, 0.6, bottom=bottom, label=name, color=color)
        bottom = [a + b for a, b in zip(bottom, heights)]
    rest = [max(0.0, r.peak_gib - below) for (_, r), below in zip(bars, bottom)]
    memory.bar(labels, rest, 0.6, bottom=bottom, label=OTHER[0], color=OTHER[1])
    for x, (_, r) in enumerate(bars):
        text = f"{r.peak_gib:.1f} GiB\n+{r.recompute_flops_fraction:.0%} FLOP"
        memory.annotate(text, (x, r.peak_gib), ha="center", va="bottom", fontsize=9)
    tallest = max(r.peak_gib for _, r in bars)
    title = f"{report.config} on {report.target}: memory by rematerialisation policy"
    if limit_gib < 3 * tallest:
        memory.axhline(limit_gib, color="black", linestyle="--", linewidth=1)
        memory.annotate(f"{limit_gib:.0f} GiB: the GPU", (-0.3, limit_gib), va="bottom", fontsize=9)
        tallest = max(tallest, limit_gib)
    else:
        title += f" (the GPU has {limit_gib:.0f} GiB)"
    memory.set_ylim(0, 1.2 * tallest)
    memory.set_ylabel("GiB a device (compiled)")
    memory.set_title(title)
    memory.set_xlim(-0.5, len(bars) + 0.2)
    handles, names = memory.get_legend_handles_labels()
    memory.legend(handles[::-1], names[::-1], loc="center right", fontsize=9)

    rows = {"compute": 1, "communication": 0}
    edges = np.linspace(0, 1e3 * timeline.seconds, COLUMNS + 1)
    for stream, row in rows.items():
        below = np.full(COLUMNS, row - 0.35)
        for exposed in (True, False):
            color = COMPUTE if stream == "compute" else EXPOSED if exposed else HIDDEN
            of_kind = [s for s in timeline.segments if (s.stream, s.exposed) == (stream, exposed)]
            above = below + 0.7 * shares(of_kind, timeline.seconds, COLUMNS)
            above = np.minimum(above, row + 0.35)  # copies to the host beside collectives
            time.stairs(above, edges, baseline=below, fill=True, color=color)
            below = above
    time.set_yticks(list(rows.values()), list(rows))
    time.set_ylim(-0.6, 1.6)
    time.set_xlim(0, 1e3 * timeline.seconds)
    time.set_xlabel("milliseconds of one step (modelled); height: share of that moment in use")
    time.set_title(
        f"modelled step {1e3 * timeline.seconds:.0f} ms; waiting for communication (red) "
        f"{timeline.exposed_fraction:.1%}, green is hidden behind compute"
    )
    if pipeline:
        draw_pipeline((panels[0], panels[1]), *pipeline)
    return picture
