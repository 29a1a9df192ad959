"""A picture of a pipeline's schedule: who runs what when, to *modelled* scale."""

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch

from jaxaccel.pipeline_times import other_sends
from jaxaccel.schedules import IDLE, Schedule, Times

# Apart from one another in every kind of colour blindness (Okabe and Ito's).
FORWARD, BACKWARD, LOSS, IDLE_TIME = "#56b4e9", "#e69f00", "#009e73", "#e8e8e8"
DIGIT = 0.005  # of the axis' width: what a digit of a number needs


def boxes(made: Schedule, times: Times, stage: int) -> list[tuple[str, int, int, float, float]]:
    """What one stage does, in the order of the ticks.

    Args:
      made: the schedule.
      times: of its parts.
      stage: whose.

    Returns:
      (forward, loss or backward; micro-batch; chunk; start; duration), in the unit of `times`.
    """
    ends = made.halves(times).cumsum()
    starts = (ends - made.halves(times).ravel()).reshape(-1, 2)
    table, found = made.ticks, []
    bare = made.passes(times._replace(last=0.0))
    for tick, (ahead, behind) in enumerate(starts):
        if (index := int(table.forward[tick, stage])) != IDLE:
            chunk, takes = int(table.forward_chunk[tick, stage]), bare[tick, 0, stage]
            found.append(("forward", index, chunk, ahead, takes))
            if table.turn[tick, stage] != IDLE:
                found.append(("loss", index, chunk, ahead + takes, times.last))
        if (index := int(table.backward[tick, stage])) != IDLE:
            chunk = int(table.backward_chunk[tick, stage])
            found.append(("backward", index, chunk, behind, bare[tick, 1, stage]))
    return found


def shade(color: str, chunk: int, chunks: int) -> tuple[float, float, float]:
    """A colour, the paler the later the run of layers."""
    pale = 0.6 * chunk / chunks
    red, green, blue = ((1 - pale) * part + pale for part in to_rgb(color))
    return red, green, blue


def draw_schedule(axes: Axes, made: Schedule, times: Times, longest: float, title: str) -> None:
    """Draws stages as rows over time; grey is idle.

    Args:
      axes: where.
      made: the schedule.
      times: seconds of its parts, *modelled*.
      longest: seconds that the axis spans.
      title: of the picture.
    """
    colors = {"forward": FORWARD, "backward": BACKWARD}
    end = made.seconds(times)
    for stage in range(made.stages):
        axes.barh(stage, 1e3 * end, 0.84, color=IDLE_TIME, zorder=0)
        found = boxes(made, times, stage)
        corners = [
            [(x, stage - 0.42), (x, stage + 0.42), (x + w, stage + 0.42), (x + w, stage - 0.42)]
            for x, w in ((1e3 * start, 1e3 * takes) for *_, start, takes in found)
        ]
        fills = [
            LOSS if kind == "loss" else shade(colors[kind], chunk, made.chunks)
            for kind, _, chunk, *_ in found
        ]
        line = 0.6 if len(found) < 150 else 0.2
        axes.add_collection(
            PolyCollection(corners, facecolors=fills, edgecolors="white", linewidths=line)
        )
        for kind, index, _, start, takes in found:
            digits = len(str(index + 1))
            if kind != "loss" and takes > DIGIT * longest * (digits + 0.5):
                at = 1e3 * (start + takes / 2), stage
                axes.annotate(str(index + 1), at, ha="center", va="center_baseline", fontsize=6.5)
    axes.set_xlim(0, 1e3 * longest)
    axes.set_ylim(made.stages - 0.5, -0.5)
    axes.set_yticks(range(made.stages), [f"stage {stage}" for stage in range(made.stages)])
    axes.set_title(title, fontsize=10)


def draw(axes: tuple[Axes, Axes], made: Schedule, times: Times) -> None:
    """Draws a pipeline with either way to send, one above the other, on one scale.

    Args:
      axes: two, the upper one for sends at once.
      made: the schedule, with either.
      times: seconds of its parts, *modelled*.
    """
    modes = {made.delayed: made, not made.delayed: other_sends(made)}
    longest = max(each.seconds(times) for each in modes.values())
    for panel, (delayed, each) in zip(axes, sorted(modes.items())):
        how = ("delayed sends" if delayed else "sends at once") + (
            " (this plan)" if each is made else ""
        )
        title = (
            f"{made.kind}, {how}: bubble {each.bubble():.1%} of the ideal time; all ticks "
            f"{1e3 * each.seconds(times):,.0f} ms (modelled)"
        )
        draw_schedule(panel, each, times, longest, title)
    chunked = lambda color: [shade(color, c, made.chunks) for c in range(made.chunks)]
    handles = [
        Patch(color=color, label=f"{name}{f', run {c + 1}' if made.chunks > 1 else ''}")
        for name, base in (("forward", FORWARD), ("backward", BACKWARD))
        for c, color in enumerate(chunked(base))
    ]
    handles.append(Patch(color=LOSS, label="loss and its gradient"))
    handles.append(Patch(color=IDLE_TIME, label="idle"))
    axes[1].set_xlabel("milliseconds of the stages' ticks (modelled); numbers are micro-batches")
    axes[1].figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False
    )
