"""Whether training with 8-bit moments ends where training with float32 moments ends.

    python -m experiments.bench.optimizer_parity [--json] [--steps N]

A byte-level model is trained on the default source (the standard library's own text) with
`adamw` and with `adamw-8bit`, from the same parameters on the same batches, for each of three
seeds. What is compared is the validation loss over the whole held-out split.

Two runs that differ in one bit drift apart, so a gap has noise. `adamw, 2 micro-batches` shows it:
sums in another order, which is rounding and nothing else. The mean over the seeds is held to the
bar, and so is each seed: the table names those beyond it, on either side.

Prints a table, or with `--json` one object a training and line, as soon as it is done.
"""

import dataclasses
import json
import statistics
from collections.abc import Iterator
from typing import Any

from experiments import allocator, cli, data, tokenizer
from experiments.bench import parity
from experiments.bench.parity import Setting
from experiments.errors import UserError
from jaxaccel import optim
from jaxaccel.memory import sharded_bytes
from jaxaccel.nn import DecoderConfig, parameter_count
from jaxaccel.train_step import StepConfig, make_train_step

MODEL = DecoderConfig(
    vocab_size=320, layers=2, width=128, heads=4, kv_heads=4, head_size=32, mlp_width=384
)
BATCH, SEQUENCE, VALIDATION = 4, 128, 256  # the last in batches
OPTIMIZER = optim.OptimizerConfig(learning_rate=2e-3, warmup_steps=100, final_fraction=0.0)
TRAININGS: dict[
    str, tuple[optim.Name, int]
] = {  # optimizer and micro-batches; compared with the first
    "adamw": ("adamw", 1),
    "adamw, 2 micro-batches": ("adamw", 2),
    "adamw-8bit": ("adamw-8bit", 1),
}
SEEDS = (0, 1, 2)
BAR = 0.5  # per cent of the validation loss


@dataclasses.dataclass(frozen=True)
class Options:
    """Trains one model with float32 and with 8-bit moments, three seeds each."""

    steps: int = 1000
    """Optimizer steps of each training."""
    json: bool = False
    """One JSON object a training and line, and nothing else on standard output."""


def train(training: str, seed: int, corpus: data.Corpus, setting: Setting) -> dict[str, Any]:
    """One training from its first parameters to its losses."""
    name, parts = TRAININGS[training]
    optimizer = optim.make(dataclasses.replace(OPTIMIZER, name=name), setting.steps)
    config = StepConfig(remat="none", micro_batches=parts)
    made = make_train_step(MODEL, optimizer, config, parity.cpu_mesh())
    return {
        **parity.train(made, seed, corpus, setting).figures,
        "state_bytes_per_parameter": sharded_bytes(made.abstract_state.opt_state)
        / parameter_count(MODEL),
    }


def measure(steps: int) -> Iterator[dict[str, Any]]:
    """The trainings, as `--json` prints them."""
    corpus = data.load_corpus(data.DataConfig(), tokenizer.load("bytes"))
    setting = Setting(MODEL, steps, BATCH, SEQUENCE, VALIDATION)
    for seed in SEEDS:
        reference = {}
        for name in TRAININGS:
            parity.progress(name, seed, steps)
            found = train(name, seed, corpus, setting)
            reference = reference or found
            gap = 100 * (found["validation_loss"] / reference["validation_loss"] - 1)
            yield {
                "training": name,
                "seed": seed,
                "validation_gap_percent": gap,
                **found,
                "numbers": dataclasses.asdict(OPTIMIZER),
                **parity.setting_keys(setting),
            }


def table(rows: list[dict[str, Any]]) -> str:
    """The results for people: losses, gaps and the bar they are held to."""
    lines = [
        parity.heading(rows[0], MODEL),
        "training                seed  validation       gap  last steps  state, B/parameter",
    ]
    for r in rows:
        lines.append(
            f"{r['training']:<23} {r['seed']:>4} {r['validation_loss']:>11.4f} "
            f"{r['validation_gap_percent']:>+7.3f} % {r['training_loss']:>10.4f} "
            f"{r['state_bytes_per_parameter']:>18.2f}"
        )
    for name in list(TRAININGS)[1:]:
        gaps = {r["seed"]: r["validation_gap_percent"] for r in rows if r["training"] == name}
        mean = statistics.mean(gaps.values())
        beyond = [f"seed {seed} ({gap:+.3f} %)" for seed, gap in gaps.items() if abs(gap) > BAR]
        lines.append(
            f"{name}: mean gap {mean:+.3f} %, {'within' if abs(mean) <= BAR else 'BEYOND'} the bar "
            f"of {BAR} %; {'BEYOND it: ' + ', '.join(beyond) if beyond else 'so is each seed'}"
        )
    lines.append(parity.versions(rows[0]))
    return "\n".join(lines)


def main(options: Options) -> None:
    """Trains, and prints the results."""
    if options.steps < 1:
        raise UserError(f"--steps is {options.steps}; it must be at least 1")
    allocator.keep_freed_memory()
    rows = []
    for row in measure(options.steps):
        rows.append(row)
        if options.json:
            print(json.dumps(row), flush=True)
    if not options.json:
        print(table(rows))


if __name__ == "__main__":
    cli.run(main, Options)
