"""Whether training in FP8 ends where training in bfloat16 ends, on real text.

    python -m experiments.bench.fp8_parity [--json] [--steps N] [--plot FILE]

One model is trained again and again from the same parameters on the same batches of the
default source (the standard library's own text): in bfloat16, in float32, and in bfloat16
with each FP8 recipe. A gap is a loss relative to bfloat16's. The validation loss is over the
whole held-out split and computed without FP8, so it compares what was learned; the training
loss is the mean of the last 100 steps and has FP8 in its forward pass.

Two runs that differ in the rounding of one bit drift apart, so a gap has noise, and two rows
more show it: `2 micro-batches` is bfloat16 with its sums in another order, which is rounding
and nothing else, and `seed 1` has other first parameters and another order of the text. A gap
no larger than theirs is none.

The share of the matmuls is measured: a profile of a few steps, the time of the operations
that hold a matmul over that of all. Of FP8 recipes it means little, as a CPU has no FP8 and
spends its time on casts.

Prints a table, or with `--json` one object a training and line, as soon as it is done.
"""

import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np

from experiments import allocator, cli, data, metrics, tokenizer
from experiments.bench import parity
from experiments.bench.parity import LAST
from experiments.errors import UserError
from experiments.eval import mean_loss
from experiments.plan_plot import check_picture
from jaxaccel import hlo, optim
from jaxaccel.nn import DecoderConfig
from jaxaccel.train_step import StepConfig, make_train_step

MODEL = DecoderConfig(
    vocab_size=320, layers=4, width=256, heads=4, kv_heads=4, head_size=64, mlp_width=768
)
BATCH, SEQUENCE = 8, 128
OPTIMIZER = optim.OptimizerConfig(learning_rate=1e-3, warmup_steps=100, final_fraction=0.0)

# Nothing is recomputed: that would change the time and no number.
BF16 = StepConfig(precision="bfloat16", remat="none")
TRAININGS = {  # step and seed; what the others are compared with comes first
    "bfloat16": (BF16, 0),
    "2 micro-batches": (dataclasses.replace(BF16, micro_batches=2), 0),
    "seed 1": (BF16, 1),
    "float32": (dataclasses.replace(BF16, precision="float32"), 0),
    "current": (dataclasses.replace(BF16, fp8="current"), 0),
    "delayed": (dataclasses.replace(BF16, fp8="delayed"), 0),
    "block": (dataclasses.replace(BF16, fp8="block"), 0),
}
REFERENCE = next(iter(TRAININGS))
BAR = 0.25  # per cent, of the validation loss of a recipe: arXiv:2412.19437, section 3.3
PIECES = 40  # the training's curve has so many points
PROFILED = 3  # steps, of which the share of the matmuls is taken


@dataclasses.dataclass(frozen=True)
class Options:
    """Trains one model in float32, bfloat16 and with each FP8 recipe, and compares losses."""

    steps: int = 1000
    """Optimizer steps of each training."""
    json: bool = False
    """One JSON object a training and line, and nothing else on standard output."""
    plot: str = ""
    """Also draw the gaps of the training losses, as they develop, into this file."""


def matmul_share(program: jax.stages.Compiled, step: Callable[[], Any]) -> float:
    """Part of the time of a program's operations that goes into those that hold a matmul.

    Args:
      program: what `step` runs.
      step: runs it once, to its end.
    """
    module = hlo.parse(program.as_text() or "")
    nodes = [n for c in module.computations.values() for n in c.instructions.values()]

    def holds(node: hlo.Instruction) -> bool:
        bodies = (module.computations[name] for name in node.called)
        return hlo.is_matmul(node) or any(holds(n) for c in bodies for n in c.instructions.values())

    # Loops and branches are profiled too, and would count what is in them twice.
    matmul = {n.name: holds(n) for n in nodes if n.opcode not in ("while", "conditional")}
    spent = {True: 0.0, False: 0.0}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(PROFILED):
                step()
        (file,) = Path(folder).rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for event in (event for line in plane.lines for event in line.events):
                if event.name in matmul:
                    spent[matmul[event.name]] += event.duration_ns
    return spent[True] / sum(spent.values())


def train(config: StepConfig, seed: int, corpus: data.Corpus, steps: int) -> dict[str, Any]:
    """One training from its first parameters to its losses."""
    made = make_train_step(MODEL, optim.adamw(OPTIMIZER, steps), config, parity.cpu_mesh())
    batches = data.train_iterator(corpus, batch=BATCH, sequence=SEQUENCE, seed=seed)
    state, batch = made.init(jax.random.key(seed)), made.place(next(batches))
    if config.fp8 == "delayed":
        state = made.warm_up(state, batch)
    program = made.step.lower(state, batch).compile()

    losses, skipped = [], 0
    start = time.perf_counter()
    for i in range(steps):
        state, figures = program(state, batch)
        batch = made.place(next(batches))
        losses.append(float(figures.loss))
        skipped = int(figures.skipped)
        if (i + 1) % 100 == 0:
            print(f"  step {i + 1}: {statistics.mean(losses[-LAST:]):.4f}", file=sys.stderr)
    seconds = time.perf_counter() - start

    held_out = data.validation_batches(corpus, batch=BATCH, sequence=SEQUENCE)
    validation, tokens = mean_loss(made, state.params, held_out)

    def step() -> None:
        nonlocal state
        state, _ = jax.block_until_ready(program(state, batch))

    return {
        "validation_loss": validation,
        "validation_tokens": tokens,
        "training_loss": statistics.mean(losses[-LAST:]),
        "seconds": seconds,
        "skipped_steps": skipped,
        "matmul_share": matmul_share(program, step),
        "curve": [float(np.mean(piece)) for piece in np.array_split(losses, min(PIECES, steps))],
    }


def measure(steps: int) -> Iterator[dict[str, Any]]:
    """The trainings, as `--json` prints them."""
    corpus = data.load_corpus(data.DataConfig(), tokenizer.load("bytes"))
    reference: dict[str, Any] = {}
    for name, (config, seed) in TRAININGS.items():
        print(f"{name}: {steps} steps", file=sys.stderr)
        found = train(config, seed, corpus, steps)
        reference = reference or found
        gaps = {
            f"{kind}_gap_percent": 100 * (found[f"{kind}_loss"] / reference[f"{kind}_loss"] - 1)
            for kind in ("validation", "training")
        }
        yield {
            "training": name,
            "precision": config.precision,
            "fp8": config.fp8,
            "micro_batches": config.micro_batches,
            "seed": seed,
            **found,
            **gaps,
            "steps": steps,
            "batch": BATCH,
            "sequence": SEQUENCE,
            "model": dataclasses.asdict(MODEL),
            "optimizer": dataclasses.asdict(OPTIMIZER),
            "environment": metrics.environment(),
        }


def table(rows: list[dict[str, Any]]) -> str:
    """The results for people: losses, gaps and the bar they are held to."""
    lines = [
        parity.heading(rows[0], MODEL),
        "training         validation      gap   last steps      gap  seconds  matmuls",
    ]
    for r in rows:
        lines.append(
            f"{r['training']:<16} {r['validation_loss']:>10.4f} {_percent(r, 'validation')}   "
            f"{r['training_loss']:>10.4f} {_percent(r, 'training')} {r['seconds']:>8.0f} "
            f"{100 * r['matmul_share']:>6.0f} %"
        )
    for r in rows:
        if r["fp8"] != "off":
            gap = r["validation_gap_percent"]
            verdict = "within" if abs(gap) <= BAR else "BEYOND"
            lines.append(f"{r['training']}: {gap:+.3f} %, {verdict} the bar of {BAR} %")
    if skipped := [r["training"] for r in rows if r["skipped_steps"]]:
        lines.append(f"steps with non-finite gradients were skipped in: {', '.join(skipped)}")
    lines.append(parity.versions(rows[0]))
    return "\n".join(lines)


def _percent(row: dict[str, Any], kind: str) -> str:
    return f"{row[f'{kind}_gap_percent']:>+6.3f} %"


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """Gaps of the training losses over the steps; other seeds, of other batches, left out."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    reference = np.array(rows[0]["curve"])
    ends = rows[0]["steps"] * np.arange(1, len(reference) + 1) / len(reference)
    for r in rows[1:]:
        if r["seed"] == rows[0]["seed"]:
            gap = 100 * (np.array(r["curve"]) / reference - 1)
            axes.plot(ends, gap, label=r["training"], linewidth=2 if r["fp8"] != "off" else 1)
    axes.axhspan(-BAR, BAR, color="0.92", zorder=0, label=f"{BAR} %")
    axes.set(xlabel="step", ylabel=f"training loss relative to {REFERENCE}, %")
    axes.legend()
    figure.savefig(file, dpi=150)
    plt.close(figure)


def main(options: Options) -> None:
    """Trains, and prints the results."""
    if options.steps < 1:
        raise UserError(f"--steps is {options.steps}; it must be at least 1")
    if options.plot:
        check_picture(Path(options.plot))
    allocator.keep_freed_memory()
    rows = []
    for row in measure(options.steps):
        rows.append(row)
        if options.json:
            print(json.dumps(row), flush=True)
    if not options.json:
        print(table(rows))
    if options.plot:
        plot(rows, Path(options.plot))


if __name__ == "__main__":
    cli.run(main, Options)
