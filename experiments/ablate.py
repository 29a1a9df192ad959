"""What each technique saves and costs, alone and stacked: `python -m experiments.ablate [CONFIG]`.

    python -m experiments.ablate llama-8b --target h200x8 [--json] [--plot FILE] [--steps 600]

The baseline is what a careful user writes today: bfloat16, Adam with float32 moments, `full`
rematerialisation, flash attention, a loss in chunks, plain FSDP. Its attention is our kernel,
which stands in for cuDNN's: cuDNN cannot be compiled where there is no GPU, the model prices both
alike, and blockwise XLA attention, a row of its own, would flatter everything else. Each
technique is then put on the baseline alone, and after that one by one on top of the others, up
to the full stack. A row is the baseline's command line with a few other options, which `--json`
prints.

  compiled   peak memory of one device, of CONFIG on `--target` with `--batch` rows a step.
  modelled   step time and the share of it that waits for communication, of the same program, by
             data-sheet rates (`jaxaccel.timeline`); no GPU is needed, or used.
  measured   on this machine's CPU: `tiny` trained for `--steps` steps on two devices that the
             CPU pretends to have; validation loss, tokens a second (median over the run), the
             process' peak memory. No kernel runs on a CPU, and FP8 is computed by casting, so
             the loss is what this part is for; its speed is a CPU's.

The last column names every figure in which the row is worse than the baseline.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments import cli, configs
from experiments.ablate_plot import draw
from experiments.config import ALIASES, TrainConfig
from experiments.errors import UserError, user_errors
from experiments.plan import compile_step
from experiments.plan_plot import check_picture
from jaxaccel import target
from jaxaccel.target import MissingExtra, Target

PROG = "python -m experiments.ablate"
Change = dict[str, str]  # options of `experiments.train`, by name

BASELINE: Change = {
    "precision": "bfloat16",
    "optimizer": "adamw",
    "remat": "full",
    "kernels": "xla",
}
TECHNIQUES: dict[str, Change] = {
    "blockwise XLA attention": {"attention": "xla"},
    "remat selective": {"remat": "selective"},
    "remat sqrt": {"remat": "sqrt"},
    "FP8 current": {"fp8": "current"},
    "fused kernels": {"kernels": "auto"},
    "fsdp-prefetch": {"overlap": "fsdp-prefetch"},
    "FP8 delayed": {"fp8": "delayed"},
    "8-bit Adam": {"optimizer": "adamw-8bit"},
    "4 micro-batches": {"micro-batches": "4"},
    "one MTP head": {"mtp.depth": "1"},
}
# In the order in which a reader meets them; what is no part of it is no better with the others.
# The head comes last and is not in the full stack: it changes the objective.
STACK = ("fused kernels", "fsdp-prefetch", "FP8 delayed", "8-bit Adam", "4 micro-batches")
HEAD = "one MTP head"
ON_GPUS = ("kernels", "attention")  # what a CPU computes in the same way whatever these say
CPU_MESH = "fsdp=2"
# How much worse than the baseline's a figure must be to be named: a measured one has noise.
WORSE = {
    "peak_gib": ("peak memory", 1.01),
    "modelled_step_ms": ("step", 1.005),
    "loss": ("loss", 1.005),
    "tokens_per_second": ("CPU speed", 1 / 1.1),
    "host_peak_gib": ("CPU memory", 1.1),
}
FIGURES = (
    "peak_gib",
    "modelled_step_ms",
    "exposed_fraction",
    "loss",
    "tokens_per_second",
    "host_peak_gib",
)
HEADINGS = (
    "peak, GiB (compiled)",
    "step, ms (modelled)",
    "exposed (modelled)",
    "loss of `tiny` (measured)",
    "tokens/s, CPU (measured)",
    "CPU peak, GiB (measured)",
    "worse than the baseline",
)


@dataclasses.dataclass(frozen=True)
class AblateConfig:
    """Compares the techniques, alone and stacked, on GPUs that need not be there."""

    target: str = "h200x8"
    """What CONFIG is compiled for, as of `experiments.plan`."""
    batch: int = 32
    """Rows of its step, over all devices."""
    steps: int = 600
    """Steps of `tiny` on this CPU; 0: nothing is measured."""
    only: tuple[str, ...] = ()
    """Names of rows, the baseline apart; empty: all."""
    json: bool = False
    """One JSON object a row and line, as soon as it is there, and nothing else on stdout."""
    plot: str = ""
    """Draw memory, step and loss of every row into this file."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    change: Change  # against the baseline

    @property
    def options(self) -> Change:
        """All that differs from the preset."""
        return BASELINE | self.change


def rows(devices: int) -> list[Row]:
    """The table's lines: the baseline, each technique alone, the stack.

    Args:
      devices: of the target; what hides transfers is left out where there are none.
    """
    known = {k: v for k, v in TECHNIQUES.items() if devices > 1 or "overlap" not in v}
    found, total = [Row("baseline", {}), *(Row(*item) for item in known.items())], Change()
    stack = [name for name in STACK if name in known]
    for name in stack:
        total = total | known[name]
        if name != stack[0]:  # the first is the same alone
            found.append(Row(f"+ {name}" if name != stack[-1] else "full stack", total))
    return [*found, Row(f"full stack and {HEAD}", total | known[HEAD])]


def chosen(all_rows: list[Row], only: tuple[str, ...]) -> list[Row]:
    """The baseline and the rows that are named.

    Raises:
      UserError: a name of none.
    """
    names = [row.name for row in all_rows]
    if unknown := [name for name in only if name not in names]:
        raise UserError(f"--only {unknown[0]!r} is no row; rows are {', '.join(names[1:])}")
    return [row for row in all_rows if not only or row.name in ("baseline", *only)]


def command_line(change: Change) -> list[str]:
    """The options as a shell would pass them."""
    return [f"--{name}={value}" for name, value in change.items()]


def compiled(row: Row, preset: TrainConfig, on: Target) -> dict[str, Any]:
    """Figures of the step as it is compiled for the target.

    Raises:
      UserError: the step is refused.
    """
    args = command_line(row.options)
    config = cli.parse(TrainConfig, default=preset, args=args, prog=PROG, aliases=ALIASES)
    report = compile_step(config, on).analyse(row.name).report
    return {name: getattr(report, name) for name in FIGURES[:3]}


def measured(change: Change, steps: int) -> dict[str, Any]:
    """Trains `tiny` in a process of its own, on this CPU.

    Args:
      change: options, precision among them.
      steps: of the optimizer.

    Raises:
      UserError: the training ended with an error; its last line.
    """
    with tempfile.TemporaryDirectory() as folder:
        args = [*command_line(change), f"--run-dir={folder}/run", f"--steps={steps}"]
        args += [f"--mesh={CPU_MESH}", f"--eval-every={steps}", f"--save-every={steps}"]
        flags = "--xla_force_host_platform_device_count=2"
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        with open(f"{folder}/log", "w+", encoding="utf-8") as log:
            command = [sys.executable, "-m", "experiments.train", "tiny", *args]
            run = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            _, status, usage = os.wait4(run.pid, 0)
            run.returncode = os.waitstatus_to_exitcode(status)
            if run.returncode:
                log.seek(0)
                last = (log.read().splitlines() or ["no output"])[-1]
                raise UserError(f"training {' '.join(args)} ended with {run.returncode}: {last}")
        lines = Path(folder, "run", "metrics.jsonl").read_text("utf-8").splitlines()
    logged = [json.loads(line) for line in lines]
    speeds = [line["tokens_per_second"] for line in logged if line.get("tokens_per_second")]
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    return {
        "loss": [line["val_loss"] for line in logged if line.get("val_loss") is not None][-1],
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "host_peak_gib": usage.ru_maxrss * unit / 2**30,
    }


def results(config: AblateConfig, name: str, on: Target) -> Iterator[dict[str, Any]]:
    """Compiles and trains each row, one after the other; a refused one has a reason."""
    preset = dataclasses.replace(configs.load(name), batch=config.batch)
    trained: dict[str, dict[str, Any]] = {}
    for row in chosen(rows(on.count), config.only):
        found: dict[str, Any] = {"name": row.name} | dict.fromkeys(FIGURES)
        print(f"{row.name}: compiling {name} for {on}", file=sys.stderr)
        try:
            found |= compiled(row, preset, on)
        except UserError as error:
            found["refused"] = str(error)
        if config.steps and "refused" not in found:
            here = {key: value for key, value in row.options.items() if key not in ON_GPUS}
            key = json.dumps(here)
            if key not in trained:
                print(f"{row.name}: {config.steps} steps of tiny on this CPU", file=sys.stderr)
                trained[key] = measured(here, config.steps)
            found |= trained[key]
        yield found | {"options": " ".join(command_line(row.options))}


def worse(found: dict[str, Any], base: dict[str, Any]) -> list[str]:
    """Names of the figures in which a row loses against the baseline, and by how much."""
    losses = []
    for key, (label, factor) in WORSE.items():
        if found[key] is None or base[key] is None:
            continue
        ratio = found[key] / base[key]
        if ratio > factor if factor > 1 else ratio < factor:
            losses.append(f"{label} {ratio - 1:+.1%}")
    return losses


def table(found: list[dict[str, Any]], title: str) -> str:
    """The results for people, in Markdown."""
    base = found[0]
    lines = [title, "", f"| | {' | '.join(HEADINGS)} |", "|---" * (len(HEADINGS) + 1) + "|"]

    def cell(row: dict[str, Any], key: str, form: str) -> str:
        value = row[key]
        if value is None:
            return ""
        ratio = f" ({value / base[key]:.2f})" if base[key] and key in FIGURES[:2] else ""
        return format(value, form) + (ratio if row is not base else "")

    for row in found:
        forms = (".2f", ",.0f", ".1%", ".4f", ",.0f", ".2f")
        cells = [cell(row, key, form) for key, form in zip(FIGURES, forms)]
        reason = f"refused: {row['refused']}" if "refused" in row else ", ".join(worse(row, base))
        lines.append(f"| {' | '.join([row['name'], *cells, reason])} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Reads the command line, compiles, trains and prints."""
    args = list(sys.argv[1:] if argv is None else argv)
    name = args.pop(0) if args and not args[0].startswith("-") else "llama-8b"

    def program() -> None:
        config = cli.parse(AblateConfig, args=args, prog=f"{PROG} [CONFIG]")
        preset = configs.load(name)
        for option, least in (("steps", 0), ("batch", 1)):
            if (value := getattr(config, option)) < least:
                raise UserError(f"--{option} is {value}; it must be at least {least}")
        if config.plot:
            check_picture(Path(config.plot))
        try:
            with user_errors():
                on = target.parse(config.target)
            on.devices()
        except MissingExtra as error:
            raise UserError(str(error)) from error
        found = []
        for row in results(config, name, on):
            found.append(row)
            if row is found[0] and "refused" in row:
                raise UserError(f"the baseline is refused: {row['refused']}")
            if config.json:
                print(json.dumps(row), flush=True)
        title = f"{name} on {on}, {config.batch} x {preset.sequence:,} tokens a step"
        if config.steps:
            title += f"; tiny for {config.steps} steps on this machine's CPU"
        if not config.json:
            print(table(found, title))
        if config.plot:
            draw(Path(config.plot), found, title)
            print(f"picture: {config.plot}", file=sys.stderr)

    cli.exit_with(program, PROG)


if __name__ == "__main__":
    main()
