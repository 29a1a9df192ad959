"""Pictures of what a technique of `--overlap` does to one layer's timeline (*modelled*)."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.plan_plot import COMPUTE, EXPOSED, HIDDEN, shares
from jaxaccel.timeline import Segment, Timeline

STREAMS = {"communication": 0, "compute": 1}
COLUMNS = 300
# What each layer begins its share of a pass with, in the names that JAX gives instructions.
MARKS = {"forward": "attention_forward", "backward": "attention_dq"}


def layer(timeline: Timeline, layers: int, which: str) -> tuple[float, float]:
    """Where the middle layer of a pass begins and ends: from its attention to the next one's.

    Args:
      timeline: of a step.
      layers: of the model.
      which: "forward" or "backward".

    Returns:
      Seconds from the start of the step; all of it where layers cannot be told apart.
    """
    starts = [
        s.start
        for s in timeline.segments
        if MARKS[which] in s.name and ("transpose(" in s.name) == (which == "backward")
    ]
    calls = round(len(starts) / layers)  # by a ring, one for each part of the keys
    if not calls or layers < 2:
        return 0.0, timeline.seconds
    first = calls * (layers // 2 - 1)
    return starts[first], starts[first + calls]


def stream(axes: Axes, segments: list[Segment], name: str, seconds: float) -> None:
    """One stream's share in use, column by column; waiting is red."""
    row = STREAMS[name]
    edges, below = np.linspace(0, 1e3 * seconds, COLUMNS + 1), np.full(COLUMNS, row - 0.35)
    for exposed in (True, False):
        color = COMPUTE if name == "compute" else EXPOSED if exposed else HIDDEN
        mine = [s for s in segments if (s.stream, s.exposed) == (name, exposed)]
        above = np.minimum(below + 0.7 * shares(mine, seconds, COLUMNS), row + 0.35)
        axes.stairs(above, edges, baseline=below, fill=True, color=color)
        below = above


def draw(path: Path, title: str, sides: Mapping[str, Timeline], layers: int) -> None:
    """Writes `figure` into a file.

    Args:
      path: of the picture.
      title, sides, layers: of `figure`.
    """
    figure(title, sides, layers).savefig(path, dpi=100)


def figure(title: str, sides: Mapping[str, Timeline], layers: int) -> Figure:
    """One layer forward and one backward, of each side, one above the other on one scale.

    Args:
      title: what the sides have in common.
      sides: timelines by what to call them.
      layers: of the model.

    Returns:
      The picture, which a notebook shows.
    """
    picture = Figure(figsize=(11, 1.6 * len(sides) + 0.8), layout="constrained")
    FigureCanvasAgg(picture)
    grid = picture.subplots(len(sides), len(MARKS), sharey=True, squeeze=False)
    picture.suptitle(
        f"{title}: one layer, modelled; compute blue, communication green, waited for red",
        fontsize=10,
    )
    for column, which in enumerate(MARKS):
        spans = {name: layer(side, layers, which) for name, side in sides.items()}
        longest = max(end - start for start, end in spans.values())
        for axes, (name, side) in zip(grid[:, column], sides.items()):
            start, end = spans[name]
            moved = [
                dataclasses.replace(s, start=s.start - start)
                for s in side.segments
                if s.start < end and s.start + s.duration > start
            ]
            for each in STREAMS:
                stream(axes, moved, each, end - start)
            waited = sum(
                min(s.start + s.duration, end - start) - max(s.start, 0.0)
                for s in moved
                if s.exposed
            )
            axes.set_title(
                f"{name}, {which}: {1e3 * (end - start):.2f} ms, waiting {1e3 * waited:.2f}",
                fontsize=9,
            )
            axes.axvline(1e3 * (end - start), color="black", linewidth=0.8, linestyle=":")
            axes.set_xlim(0, 1e3 * longest)
            axes.set_ylim(-0.5, 1.5)
            axes.set_yticks(list(STREAMS.values()), list(STREAMS), fontsize=8)
            axes.tick_params(axis="x", labelsize=8)
        grid[-1, column].set_xlabel("milliseconds", fontsize=8)
    return picture
