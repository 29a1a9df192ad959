"""Where the numbers of a run go: metrics.jsonl, the screen, loss.png, TensorBoard, W&B.

metrics.jsonl holds one JSON object a logged step, in the order of the steps, each step once:
on resume the rows after the resumed step go, because the run makes them again. JSON knows no
NaN and no infinity, and a diverged loss must not look like a missing one: the three values are
the strings "NaN", "Infinity" and "-Infinity", which `float()` takes, and so does
`read_metrics`. A line is flushed when it is written, so `kill -9` costs at most a torn last
line, which readers pass over.
"""

import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from experiments.errors import UserError

# What a record holds; None where a step has no such figure.
KEYS = (
    "step",  # steps done
    "loss",  # nats per token
    "val_loss",  # nats per token
    "grad_norm",  # before clipping
    "learning_rate",
    "tokens_per_second",
    "mfu",  # a share: 0.4 is 40 %
    "peak_memory_gib",
    "skipped_steps",  # so far, for a non-finite gradient
    "loss_scale",
    "fp8_skipped",  # non-finite magnitudes that delayed scaling left out, so far
)

_LINE = {
    "loss": "loss {:.4f}",
    "val_loss": "val_loss {:.4f}",
    "grad_norm": "grad_norm {:.3g}",
    "learning_rate": "lr {:.2e}",
    "tokens_per_second": "{:,.0f} tok/s",
    "mfu": "MFU {:.1%}",
    "peak_memory_gib": "{:.2f} GiB",
    "skipped_steps": "skipped {}",
    "eta": "eta {}",
}
_BAR = {key: _LINE[key] for key in ("loss", "tokens_per_second", "mfu", "eta")}
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")


class RunLog:
    """Takes a record a logged step and hands it to every sink.

    Nothing is written before `with` is entered. Without a folder it takes everything and keeps
    nothing: of several processes one logs.

    Example:
      >>> import tempfile
      >>> folder = Path(tempfile.mkdtemp())
      >>> with RunLog(folder, total_steps=10, resume_step=0, plain=True) as log:
      ...     log.log(dict.fromkeys(KEYS) | {"step": 5, "loss": 2.5, "mfu": 0.4})
      step  5/10  loss 2.5000  MFU 40.0%
      >>> read_metrics(folder)[0]["loss"]
      2.5
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        total_steps: int,
        resume_step: int,
        plain: bool | None = None,
        tensorboard: bool = False,
        wandb_project: str | None = None,
    ):
        """Checks that what was asked for is installed.

        Args:
          folder: the run folder, made where missing; None to log nothing.
          total_steps: steps of the whole run, those before the resume included.
          resume_step: steps done already, 0 for a fresh start. Later rows are dropped; at 0
            all are.
          plain: lines instead of a progress bar; None: when stdout is no terminal.
          tensorboard: write event files to `folder/tensorboard`.
          wandb_project: the Weights & Biases project to log to, None for none.

        Raises:
          UserError: TensorBoard or W&B is asked for and not installed.
        """
        self._folder = folder
        self._total_steps = total_steps
        self._resume_step = resume_step
        self._plain = not _is_terminal() if plain is None else plain
        self._tensorboard = _import("tensorboardX", "tensorboard") if tensorboard else None
        self._wandb = _import("wandb", "wandb") if wandb_project else None
        self._wandb_project = wandb_project
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._first: tuple[int, float] | None = None  # step and time of the first record
        self._last_step = -1
        self._sinks: list[Callable[[dict[str, Any]], None]] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if self._folder is None:
            return self
        self._folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            if self._wandb:  # first: it may refuse, and nothing is written yet
                run = _start_wandb(
                    self._wandb, self._folder, self._wandb_project, self._resume_step
                )
                stack.callback(run.finish)
                self._sinks.append(lambda record: run.log(_present(record), step=record["step"]))
            path = self._folder / "metrics.jsonl"
            rows = _drop_rows_after(path, self._resume_step)
            self._last_step = rows[-1]["step"] if rows else -1
            file = stack.enter_context(path.open("a", encoding="utf-8"))
            # The file comes before the other sinks: whatever they do, the row is safe.
            self._sinks.insert(0, lambda record: print(_encode(record), file=file, flush=True))
            if self._tensorboard:
                # Hides what earlier event files of the folder hold from this step on.
                redone = self._resume_step + 1 if self._resume_step else 0
                logdir = str(self._folder / "tensorboard")
                writer = self._tensorboard.SummaryWriter(logdir, purge_step=redone)
                stack.callback(writer.close)
                self._sinks.append(lambda record: _to_tensorboard(writer, record))
            if not self._plain:
                self._progress = stack.enter_context(_progress_bar())
                self._task = self._progress.add_task(
                    "", total=self._total_steps, completed=self._resume_step, text=""
                )
                self._progress.refresh()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()
        self._progress = None

    def log(self, record: dict[str, Any]) -> None:
        """Takes the figures of one step.

        Args:
          record: a value for each of `KEYS`, and more if you like: int, float, None, or a
            NumPy or JAX scalar.

        Raises:
          ValueError: a key is missing, or the step does not come after the last one.
        """
        if missing := [key for key in KEYS if key not in record]:
            raise ValueError(f"the record lacks {', '.join(missing)}")
        record = {key: record[key] for key in KEYS} | record  # KEYS first
        # item(): a NumPy or JAX scalar becomes the Python number
        record = {k: v.item() if hasattr(v, "item") else v for k, v in record.items()}
        if record["step"] <= self._last_step:
            raise ValueError(f"step {record['step']} comes after step {self._last_step}")
        self._last_step = record["step"]
        for sink in self._sinks:
            sink(record)
        if self._folder is not None:
            self._show(record)

    def message(self, text: str) -> None:
        """Prints a line, above the progress bar where there is one."""
        if self._folder is None:
            return
        if self._progress is None:
            print(text, flush=True)
        else:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _show(self, record: dict[str, Any]) -> None:
        step = record["step"]
        shown = record | {"eta": self._eta(step)}
        if self._progress is None:
            heads = {key: f"{key} {{:.4f}}" for key in record if key.startswith("mtp_loss")}
            count = f"step {step:{len(str(self._total_steps))}}/{self._total_steps}"
            print("  ".join([count, *_fields(shown, _LINE | heads)]), flush=True)
            return
        if record["val_loss"] is not None:  # rare, and the bar has no room for it
            self.message(f"step {step}: val_loss {record['val_loss']:.4f}")
        text = "  ".join(_fields(shown, _BAR))
        self._progress.update(self._task, completed=step, text=text, refresh=True)

    def _eta(self, step: int) -> timedelta | None:
        """Time left, at the pace since the first record; that one pays for the compilation."""
        now = time.monotonic()
        if self._first is None:
            self._first = step, now
            return None
        first_step, start = self._first
        seconds = (now - start) / (step - first_step) * (self._total_steps - step)
        return timedelta(seconds=round(seconds))


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Returns the records of a run, oldest first, with NaN and infinities as floats.

    Raises:
      UserError: the folder has no metrics.jsonl, or one with a damaged line other than the
        last.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{folder} has no metrics.jsonl: is it the folder of a run?")
    lines = path.read_bytes().splitlines()
    rows = [_decode(line) for line in lines]
    if rows and rows[-1] is None:
        rows.pop()  # torn by a crash
    if None in rows:
        raise UserError(f"{path}, line {rows.index(None) + 1}: not a JSON object with a step")
    return [row for row in rows if row is not None]


def plot_losses(folder: Path) -> Path | None:
    """Draws training and validation loss over steps into `folder/loss.png`.

    Returns:
      The picture's path, or None where the run has logged no loss and there is none to draw.

    Raises:
      UserError: as `read_metrics`.
    """
    # pyplot would choose a backend for the whole process; a bare Figure draws with Agg.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_metrics(folder)
    train = [(row["step"], row["loss"]) for row in rows if row.get("loss") is not None]
    val = [(row["step"], row["val_loss"]) for row in rows if row.get("val_loss") is not None]
    if not train and not val:
        return None
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if train:
        # A line through one point shows nothing.
        marker = "." if len(train) < 40 else None
        axes.plot(*zip(*train), color="tab:blue", linewidth=1, marker=marker, label="training")
    if val:
        axes.plot(*zip(*val), color="tab:orange", marker="o", markersize=4, label="validation")
    final = f"final validation loss {val[-1][1]:.4f}" if val else "no validation"
    axes.set_title(f"{folder.resolve().name}: {final}")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    path = folder / "loss.png"
    canvas.print_png(path)
    return path


def _is_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def _progress_bar() -> Progress:
    # No refresh thread: between two records there is nothing new to draw.
    return Progress(
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[text]}"),
        console=Console(force_terminal=True),
        auto_refresh=False,
        expand=True,
    )


def _present(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if value is not None}


def _fields(record: dict[str, Any], formats: dict[str, str]) -> list[str]:
    present = _present(record)
    return [form.format(present[key]) for key, form in formats.items() if key in present]


def _encode(record: dict[str, Any]) -> str:
    return json.dumps({key: _finite(value) for key, value in record.items()}, allow_nan=False)


def _finite(value: Any) -> Any:
    bad = isinstance(value, float) and not math.isfinite(value)
    return json.dumps(value) if bad else value  # json's own spelling, but as a string


def _decode(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    return {k: float(v) if v in _NOT_FINITE else v for k, v in row.items()}


def _drop_rows_after(path: Path, resume_step: int) -> list[dict[str, Any]]:
    """Leaves the rows up to the resumed step in the file, and returns them."""
    if not path.exists():
        return []
    # A run that starts over logs its step 0 again.
    rows = read_metrics(path.parent) if resume_step else []
    rows = [row for row in rows if row["step"] <= resume_step]
    draft = path.with_suffix(".jsonl.tmp")
    with draft.open("w", encoding="utf-8") as file:
        file.writelines(_encode(row) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)  # a crash leaves the old file or the new one
    return rows


def _to_tensorboard(writer: Any, record: dict[str, Any]) -> None:
    for key, value in _present(record).items():
        if key != "step":
            writer.add_scalar(key, value, record["step"])
    writer.flush()


def _start_wandb(wandb: ModuleType, folder: Path, project: str | None, resume_step: int) -> Any:
    """The W&B run of this folder: the same one after a resume, a new one after a restart."""
    id_file = folder / "wandb_run_id.txt"
    known = id_file.read_text().strip() if resume_step and id_file.exists() else None
    try:
        run = wandb.init(
            project=project,
            name=folder.resolve().name,
            dir=str(folder),
            id=known,
            resume="allow",
            settings=wandb.Settings(console="off"),  # its capture would fight the bar
        )
    except wandb.errors.Error as error:
        raise UserError(f"W&B: {' '.join(str(error).split())}") from None
    id_file.write_text(run.id)
    return run


def _import(module: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed: pip install 'jaxaccel[{extra}]'") from None
