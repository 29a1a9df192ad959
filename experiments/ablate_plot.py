"""The picture of an ablation: memory, step time and loss of every row, beside the baseline's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

PANELS = {  # figure: heading, format of its label
    "peak_gib": ("peak memory of a device, GiB (compiled)", "{:.1f}"),
    "modelled_step_ms": ("step, ms (modelled)", "{:,.0f}"),
    "loss": ("validation loss of tiny (measured on a CPU)", "{:.3f}"),
}
BASE, BETTER, WORSE = "#8c8c8c", "#4c72b0", "#c44e52"
CUT = 1.75  # bars longer than this many of the baseline's are cut off


def draw(path: Path, rows: Sequence[dict[str, Any]], title: str) -> None:
    """Draws one bar a row and panel, red where it is worse than the baseline, which is first.

    Args:
      path: of the picture; its ending says which format.
      rows: as `experiments.ablate` prints them; figures that are None have no bar.
      title: what was compiled and trained.
    """
    base = rows[0]
    panels = [key for key in PANELS if base[key] is not None]
    figure = Figure(figsize=(4.2 * len(panels) + 1.5, 0.36 * len(rows) + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, key in zip(grid, panels):
        heading, form = PANELS[key]
        values = [row[key] for row in rows]
        for place, value in enumerate(values):
            if value is None:
                continue
            worse = value > base[key] * 1.005
            color = BASE if place == 0 else WORSE if worse else BETTER
            axes.barh(place, min(value, CUT * base[key]), 0.7, color=color)
            axes.annotate(
                form.format(value) + ("  >>" if value > CUT * base[key] else ""),
                (min(value, CUT * base[key]), place),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        axes.axvline(base[key], color="black", linewidth=0.8, linestyle=":")
        axes.set_xlim(0, 1.2 * min(CUT * base[key], max(v for v in values if v is not None)))
        axes.set_title(heading, fontsize=9)
    grid[0].set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=9)
    grid[0].invert_yaxis()
    figure.savefig(path, dpi=110)
