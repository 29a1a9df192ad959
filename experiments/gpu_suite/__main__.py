"""The first minutes on a GPU: tests, benchmarks, training steps, decoding, and a report.

    python -m experiments.gpu_suite --minutes 8 --out runs/gpu_suite

On any NVIDIA GPU, with nothing but this repository and jax, flax, optax, chex, orbax-checkpoint,
numpy, jaxtyping and pytest. No network. Each stage has a process and a time box of its own: what
hangs, crashes or runs out of memory is written down, and the rest goes on. `--minutes` is kept
whatever happens. Nothing of the card's settings is changed.

  card       versions, card, clocks, driver, power limit (nvidia-smi is asked, never told)
  tests      the tests marked `gpu`, file by file, the kernels' first
  kernels    what the card reaches; `experiments.bench.kernels`, FP8 matmuls first
  attention  `experiments.bench.attention`
  train      llama-1b3, 65,536 tokens a step: bf16, FP8, FP8 with 8-bit AdamW
  decode     plain and speculative, random weights

DIR gets results.json (all of it), report.md, log.txt, and where matplotlib is installed speed.png;
the first three anew after every stage. Exit status 0: all stages ran and passed; 1: not all; 2: bad
input, no GPU, or a package is missing. `--fake` runs the same stages in small on a CPU. `--plan`
compiles the training steps for GPUs that are not here (needs the extra `target`) and writes
experiments/results/gpu_suite_plan.json, which the report sets beside what was measured.
"""

import argparse
import contextlib
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from experiments.errors import UserError
from experiments.gpu_suite import card as smi
from experiments.gpu_suite import records as records
from experiments.gpu_suite import report as reporting
from experiments.gpu_suite.cases import FAKE, PLAN
from experiments.gpu_suite.run import Part, run
from experiments.gpu_suite.stages import ROOT, Stage, child, stages

PROG = "python -m experiments.gpu_suite"
NEEDED = ("jax", "flax", "optax", "numpy", "jaxtyping", "pytest")
WHEELS = "jaxtyping wadler-lindig pytest iniconfig pluggy packaging pygments"
REPORT_SECONDS = 10.0
NO_BUFFERS = "--xla_gpu_enable_command_buffer="
NO_TUNING = "--xla_gpu_autotune_level=0"
CHANGES = ("XLA_FLAGS", records.KERNELS)  # what another way changes
FIRST_WAY = ("first",)


class Suite:
    """A run of the suite: its stages, its clock, its files."""

    def __init__(self, minutes: float, out: Path, fake: bool, work: Path):
        self.end = time.monotonic() + 60 * minutes
        self.started, self.out, self.fake, self.work = time.monotonic(), out, fake, work
        self.done: list[Stage] = []
        self.environment: dict[str, str] = {}
        # Files that XLA's own cache would keep could not be told from compiling.
        common = {"JAX_ENABLE_COMPILATION_CACHE": "false", "PYTHONPATH": _path()}
        if fake:
            common |= {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}
            common |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
        else:
            common |= {"JAX_PLATFORMS": "cuda,cpu"}
            if root := smi.cuda_root():
                common["CUDA_ROOT"] = root
            if root is None:
                print("note: no folder with ptxas and libdevice: kernels may not compile")
        self.environment |= common
        self.way: tuple[str, dict[str, str]] = ("", {})  # in which training works, if not as it is
        self.watch = smi.Watch(work)
        self.results: dict[str, Any] = {
            "fake": FAKE if fake else None,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(sys.orig_argv),
            "minutes": minutes,
            "commit": _commit(),
            "nvidia_smi": {} if fake else smi.ask(),
            "environment": common | {"PYTHONPATH": None},
            "complete": False,
        }

    @property
    def left(self) -> float:
        """Seconds for stages."""
        return self.end - time.monotonic() - (2 if self.fake else REPORT_SECONDS)

    def run(self, stage: Stage, box: float) -> None:
        """Runs what is left of a stage, within `box` seconds."""
        if stage not in self.done:
            self.done.append(stage)
        print(f"{stage.name}: up to {box:.0f} s", flush=True)
        self.watch.since()
        start, before = time.monotonic(), stage.seconds
        environment = self.environment | stage.environment

        def listen(part: Part, new: list[dict[str, Any]]) -> None:
            stage.seconds = before + time.monotonic() - start
            self.write()

        run(
            stage.parts,
            box,
            self.work,
            at_once=stage.at_once,
            environment=environment,
            listen=listen,
        )
        stage.seconds = before + time.monotonic() - start
        stage.card = self.watch.since() or stage.card
        if stage.status == "ok" and stage.name.startswith("train") and "," in stage.name:
            change = {k: v for k, v in stage.environment.items() if k in CHANGES}
            self.way = (stage.name.partition(", ")[2], change)
        print(f"{stage.name}: {stage.status}, {stage.seconds:.0f} s", flush=True)
        for part in stage.parts:
            if part.status != "ok" and part.why:
                print(f"  {part.name}: {part.status}: {part.why}", flush=True)
        self.write()
        self.write_log()
        if not self.fake:
            smi.wait_until_free(self.results["nvidia_smi"])

    def find_card(self) -> Stage:
        """The first stage; where JAX refuses CUDA's versions, once more without that check."""
        for check in ({}, {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}):
            self.environment |= check
            stage = Stage("card", [child("card", fake=self.fake)], 20, 90)
            self.run(stage, min(stage.cap, max(5.0, self.left)))
            found = [r for r in stage.parts[0].records if r["event"] == "card"]
            if found and stage.status == "ok":
                self.results["card"] = found[0]
                break
        return stage

    def run_all(self, todo: list[Stage]) -> None:
        """Runs stages in order, then what did not fit, each with what later ones can spare."""
        later = list(todo)
        scale = min(1.0, self.left / max(1.0, sum(stage.reserve for stage in todo)))
        while later:
            stage = later.pop(0)
            box = min(stage.cap, self.left - scale * sum(s.reserve for s in later))
            if box < (5 if stage.reserve else 45):
                if "," not in stage.name:  # another way of one that is listed is left out
                    stage.parts[0].why = "no time was left"
                    self.done.append(stage)
                continue
            name, change = self.way
            if change and stage.name.startswith(("train", "decode")) and "," not in stage.name:
                stage.name, stage.variants = f"{stage.name}, {name}", ()
                stage.environment = stage.environment | change
            self.run(stage, box)
            if other := self.another_way(stage):
                later.insert(0, other)
        for stage in todo:
            if self.left > 15 and any(_can_go_on(part) for part in stage.parts):
                self.run(stage, self.left)

    def another_way(self, stage: Stage) -> Stage | None:
        """A training step that failed once more, without what may be to blame."""
        (part, *more) = stage.parts
        if not stage.variants or more or stage.status in ("ok", "out of memory"):
            return None
        if any(r.get("timed") for r in part.records) and stage.status == "out of time":
            return None  # what it took is a result
        compiled = any(r.get("name") == "compiled" for r in part.records)
        flags = self.environment.get("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
        first, slow = stage.variants == FIRST_WAY, stage.status == "out of time"
        if first and slow and not compiled:
            name, change = "no autotuning", {"XLA_FLAGS": f"{flags} {NO_TUNING}".strip()}
        elif first and not slow:
            name, change = "no command buffers", {"XLA_FLAGS": f"{flags} {NO_BUFFERS}".strip()}
        else:
            name, change = "no kernels", {records.KERNELS: "off"}
        base = stage.name.split(",")[0]
        environment = {k: v for k, v in stage.environment.items() if k != "XLA_FLAGS"} | change
        fresh = Part(f"{part.name.split(',')[0]}, {name}", part.command, part.item_box)
        left = ("last",) if name != "no kernels" else ()
        return Stage(f"{base}, {name}", [fresh], 0, stage.cap, 1, environment, left)

    def write(self) -> None:
        """All files but the picture."""
        self.results["stages"] = [stage.plain() for stage in self.done]
        self.results["seconds"] = time.monotonic() - self.started
        reporting.write(self.results, self.out)

    def write_log(self) -> None:
        """What the stages printed, one after the other."""
        logs = sorted(self.work.glob("*.log"), key=lambda p: p.stat().st_mtime)
        with open(self.out / "log.txt", "w", encoding="utf-8") as file:
            for log in logs:
                text = log.read_text(encoding="utf-8", errors="replace")
                file.write(f"==== {log.stem}\n{text[-200_000:]}\n")

    def finish(self) -> int:
        """The last files and the table."""
        self.watch.stop()
        self.results["complete"] = True
        self.write()
        self.write_log()
        spare = max(1.0, self.end - time.monotonic() - 1)
        command = [sys.executable, "-m", "experiments.gpu_suite.report", str(self.out)]
        with contextlib.suppress(subprocess.TimeoutExpired):
            environment = os.environ | {"PYTHONPATH": _path()}
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=spare
            )
            if done.returncode:
                print("no pictures: " + (records.tail(done.stderr, 1) or ["?"])[0], flush=True)
        print(reporting.table(self.results), flush=True)
        return 0 if self.done and all(stage.status == "ok" for stage in self.done) else 1


def _can_go_on(part: Part) -> bool:
    return (
        not part.finished
        and part.status in ("out of time", "not started")
        and (bool(part.items) or part.status == "not started")
    )


def _path() -> str:
    """Where children find this repository, wherever they are started."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def _commit() -> str | None:
    """Of this repository, with a note where files were changed since."""

    def git(*words: str) -> str | None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            command = ["git", "--no-optional-locks", "-C", str(ROOT), *words]
            done = subprocess.run(command, capture_output=True, text=True, timeout=10)
            return done.stdout.strip() if done.returncode == 0 else None
        return None

    # A copy of a working tree may come without its repository: then whoever made it may say.
    commit = git("rev-parse", "HEAD") or os.environ.get("GPU_SUITE_COMMIT")
    changed = git("status", "--porcelain", "--untracked-files=no")
    return f"{commit}, with changes" if commit and changed else commit


def check_packages() -> None:
    """Refuses to start without what every stage needs.

    Raises:
      UserError: with the command that helps.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"missing here: {', '.join(missing)}. On a machine with a network: pip download "
            f"--no-deps -d wheels {WHEELS}; then here: pip install --no-index --find-links wheels "
            f"{WHEELS}"
        )


def suite(minutes: float, out: Path, fake: bool) -> int:
    """Runs everything; returns the exit status."""
    check_packages()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}") from error
    if fake:
        print(FAKE, flush=True)
    with tempfile.TemporaryDirectory(prefix="gpu-suite-") as work:
        made = Suite(minutes, out, fake, Path(work))
        try:
            card = made.find_card()
            if card.status != "ok":
                print(f"JAX cannot use a GPU here: {card.parts[0].why}", file=sys.stderr)
                made.finish()
                return 2
            alone = made.results["nvidia_smi"].get("compute_mode", "Default") != "Default"
            made.run_all(stages(fake, alone))
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
        finally:
            status = made.finish() if not made.results["complete"] else 2
    return status


def main(argv: list[str] | None = None) -> NoReturn:
    """Reads the command line and runs the suite."""
    parser = argparse.ArgumentParser(
        PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="for all of it; 8 by default")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_suite"), help="a folder")
    parser.add_argument("--fake", action="store_true", help="in small, on a CPU")
    parser.add_argument("--plan", action="store_true", help="write the planned figures, and exit")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what is found is kept
    try:
        if not 0.2 <= options.minutes <= 600:
            raise UserError(f"--minutes {options.minutes}: legal are 0.2 to 600")
        if options.plan:
            from experiments.gpu_suite.train import make_plan
            from jaxaccel.target import quiet_cpu

            quiet_cpu()
            make_plan(PLAN)
            sys.exit(0)
        sys.exit(suite(options.minutes, options.out, options.fake))
    except UserError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
