"""What heads for multi-token prediction do to the next token's loss, and what they cost.

    python -m experiments.bench.mtp_ablation [--json] [--steps N] [--record FILE] [--cost-only]

A byte-level model is trained on the default source (the standard library's own text) without
heads, with one and with two, sequential and parallel, from the same decoder on the same batches
in the same order, for each of three seeds. What is compared is the decoder's own validation loss
over held-out text, the heads left out: what a user who throws them away would have.

Two trainings that differ in one bit drift apart, so a gap has noise. `none, 2 micro-batches` shows
it: sums in another order, which is rounding and nothing else. A sequential head's own loss may
lie below the decoder's: it has read the same text, and has a layer more.

Agreement is what speculative decoding lives on: how often a head's likeliest token for a place is
the one that the decoder finds likeliest once it is there, over held-out text. In decoding the
text before is the model's own, and a sequential head reads drafts where it here reads the text.

The cost is of one training step, for 1, 2 and 4 heads of each kind: FLOP of the maths (*modelled*),
matmuls in the program and how often they run, loops by their trips (*compiled* for this machine's
CPU), and time relative to the step without heads, taking turns (*measured*, on this CPU).

Prints tables, or with `--json` one object a training or cost and line. With `--record FILE`
each is written there as soon as it is done, and what FILE already has is not done again.
"""

import dataclasses
import json
import os
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, PyTree

from experiments import allocator, cli, data, metrics, tokenizer
from experiments.bench import parity
from experiments.bench.parity import Setting
from experiments.bench.plain_jax import Shape
from experiments.bench.train_step import alternate, our_step, paired, random_batch
from experiments.errors import UserError
from jaxaccel import hlo, losses, matmuls, optim
from jaxaccel.nn import DecoderConfig, MtpConfig, flops_per_token, parameter_count
from jaxaccel.train_step import StepConfig, abstract_batch, abstract_decoder, make_train_step

MODEL = DecoderConfig(
    vocab_size=320, layers=3, width=128, heads=4, kv_heads=4, head_size=32, mlp_width=384
)
BATCH, SEQUENCE, VALIDATION = 4, 128, 256  # the last in batches
OPTIMIZER = optim.OptimizerConfig(learning_rate=2e-3, warmup_steps=100, final_fraction=0.0)
REFERENCE = "none"
COSTED = {REFERENCE: StepConfig(remat="none")} | {
    f"{kind} {depth}": StepConfig(remat="none", mtp=MtpConfig(depth, kind))
    for kind in get_args(MtpConfig.__annotations__["kind"])
    for depth in (1, 2, 4)
}
TRAININGS = {
    REFERENCE: COSTED[REFERENCE],
    "none, 2 micro-batches": dataclasses.replace(COSTED[REFERENCE], micro_batches=2),
    **{name: config for name, config in COSTED.items() if config.mtp.depth in (1, 2)},
}
SEEDS = (0, 1, 2)


@dataclasses.dataclass(frozen=True)
class Options:
    """Trains one model with and without heads for multi-token prediction, three seeds each."""

    steps: int = 600
    """Optimizer steps of each training."""
    json: bool = False
    """One JSON object a training or cost and line, and nothing else on standard output."""
    cost_only: bool = False
    """Train nothing: only what a step costs."""
    record: str = ""
    """Append each result to this file of JSON lines; what is there is not done again."""
    rounds: int = 21
    """Turns of each step that is timed; the medians are taken over them."""


def agreement(mtp: MtpConfig, params: PyTree[Array], batches: Iterable[data.Batch]) -> list[float]:
    """Of each head, how often it says what the decoder says once it is there.

    Args:
      mtp: the heads.
      params: of a decoder of `MODEL` with them.
      batches: held-out text. A position counts for a head if the token that the head is to
        predict is of the same document.
    """
    graphdef, _ = nnx.split(abstract_decoder(MODEL, mtp=mtp))

    @jax.jit
    def count(params, tokens_BT, labels_BT, segments_BT, positions_BT):  # [2, depth]: same, counted
        decoder = nnx.merge(graphdef, params)
        hidden_NBTD = decoder.ahead(tokens_BT, segments_BT=segments_BT, positions_BT=positions_BT)
        likeliest_NBT = jnp.argmax(hidden_NBTD @ decoder.head_VD.T, axis=-1)
        labels_BTN = losses.ahead_labels(labels_BT, segments_BT, mtp.depth)
        sums = []
        for k in range(1, mtp.depth + 1):
            counted = labels_BTN[:, :-k, k] != losses.IGNORED
            same = likeliest_NBT[k, :, :-k] == likeliest_NBT[0, :, k:]
            sums.append(jnp.stack([(same & counted).sum(), counted.sum()]))
        return jnp.stack(sums, axis=1)

    keys = ("tokens", "labels", "segments", "positions")
    counts = [jax.device_get(count(params, *(b[key] for key in keys))) for b in batches]
    same, counted = np.sum(counts, axis=0)
    return (same / counted).tolist()


def train(training: str, seed: int, corpus: data.Corpus, setting: Setting) -> dict[str, Any]:
    """One training from its first parameters to its losses, and its heads' agreement."""
    config = TRAININGS[training]
    optimizer = optim.adamw(OPTIMIZER, setting.steps)
    made = make_train_step(MODEL, optimizer, config, parity.cpu_mesh())
    state, mtp_losses, figures = parity.train(made, seed, corpus, setting)
    held_out = parity.held_out(corpus, setting)
    found = agreement(config.mtp, state.params, held_out) if config.mtp.depth else []
    return {**figures, "mtp_losses": mtp_losses, "agreement": found}


def measure(steps: int, known: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The trainings that are not among the rows `known`, as `--json` prints them.

    Raises:
      UserError: a row of `known` is of another setting.
    """
    corpus = data.load_corpus(data.DataConfig(), tokenizer.load("bytes"))
    setting = Setting(MODEL, steps, BATCH, SEQUENCE, VALIDATION)
    common = {
        "training_tokens": corpus.train.tokens,
        "numbers": dataclasses.asdict(OPTIMIZER),
        **parity.setting_keys(setting),
    }
    done = {(row["training"], row["seed"]): row for row in known}
    for row in known:
        for key, here in json.loads(json.dumps(common)).items():
            if key != "environment" and row.get(key) != here:
                raise UserError(
                    f"recorded trainings are of {key} {row.get(key)}, and here it is {here}: "
                    "name another file"
                )
    for seed in SEEDS:
        for name, config in TRAININGS.items():
            if (name, seed) in done:
                continue
            parity.progress(name, seed, steps)
            found = train(name, seed, corpus, setting)
            loss = found["validation_loss"]
            without = done.get((REFERENCE, seed), found)["validation_loss"]
            done[name, seed] = {
                "training": name,
                "seed": seed,
                "validation_gap_percent": 100 * (loss / without - 1),
                "validation_gap_nats": loss - without,
                **found,
                "mtp": dataclasses.asdict(config.mtp),
                **common,
                "environment": metrics.environment(),
            }
            yield done[name, seed]


def costs(rounds: int) -> Iterator[dict[str, Any]]:
    """What a step costs, by kind and number of heads, as `--json` prints it."""
    m, found, sides = MODEL, {}, {}
    shape = Shape(m.layers, m.width, m.heads, SEQUENCE, BATCH, m.vocab_size)
    for name, config in COSTED.items():
        made = make_train_step(m, optim.adamw(OPTIMIZER, 1000), config, parity.cpu_mesh())
        batch = abstract_batch(made, BATCH, SEQUENCE)
        program = made.step.lower(made.abstract_state, batch).compile()
        dots = matmuls.matmuls(hlo.parse(program.as_text() or ""))
        found[name] = {
            "cost": name,
            "mtp": dataclasses.asdict(config.mtp),
            "parameters": parameter_count(m, config.mtp),
            "step_flops": flops_per_token(m, SEQUENCE, config.mtp) * BATCH * SEQUENCE,
            "matmuls": len(dots),
            "matmul_runs": int(sum(dot.count for dot in dots)),
        }
        sides[name] = our_step(made, random_batch(shape), program)
    times = alternate(sides, rounds)
    for name, row in found.items():
        yield {
            **row,
            "step_ms": 1e3 * statistics.median(times[name]),
            "times_none": paired(times[name], times[REFERENCE]),
            "rounds": rounds,
            "batch": BATCH,
            "sequence": SEQUENCE,
            "cpus": os.cpu_count(),
            "load": os.getloadavg()[0],  # what else runs here disturbs times
            "environment": metrics.environment(),
        }


def percent(values: Iterable[float]) -> str:
    """Shares as a list of per cents; `-` where there are none."""
    return ", ".join(f"{100 * value:.1f}" for value in values) or "-"


def training_table(rows: list[dict[str, Any]]) -> list[str]:
    """Losses of the trainings and gaps to the one without heads, for people."""
    lines = [
        parity.heading(rows[0], MODEL),
        "heads                 seed  validation  gap, nats    gap, %  last steps  heads' losses   "
        "agreement, %",
    ]
    for r in rows:
        of_heads = ", ".join(f"{loss:.3f}" for loss in r["mtp_losses"]) or "-"
        lines.append(
            f"{r['training']:<21} {r['seed']:>4} {r['validation_loss']:>11.4f} "
            f"{r['validation_gap_nats']:>+10.4f} {r['validation_gap_percent']:>+9.3f} "
            f"{r['training_loss']:>11.4f}  {of_heads:<14}  {percent(r['agreement'])}"
        )
    for name in list(TRAININGS)[1:]:
        if not (own := [r for r in rows if r["training"] == name]):
            continue
        gaps = [r["validation_gap_percent"] for r in own]
        verdict = "the seeds disagree"
        if min(gaps) > 0 or max(gaps) < 0:
            verdict = f"{'worse' if gaps[0] > 0 else 'better'} with every seed"
        mean = statistics.mean(r["validation_gap_nats"] for r in own)
        line = (
            f"{name}: mean gap {statistics.mean(gaps):+.3f} % ({mean:+.4f} nats), of {len(gaps)} "
            f"seeds {min(gaps):+.3f} to {max(gaps):+.3f} %: {verdict}"
        )
        if own[0]["agreement"]:
            means = map(statistics.mean, zip(*(r["agreement"] for r in own)))
            line += f"; agreement {percent(means)} %"
        lines.append(line)
    return lines


def cost_table(rows: list[dict[str, Any]]) -> list[str]:
    """What a step costs, for people."""
    r = rows[0]
    lines = [
        f"a step of {r['batch']} x {r['sequence']} tokens; time on {r['cpus']} CPUs, median of "
        f"{r['rounds']} rounds, load average {r['load']:.1f}",
        "heads         parameters  GFLOP, modelled  matmuls, compiled  and runs  ms, measured  "
        "x none",
    ]
    for r in rows:
        lines.append(
            f"{r['cost']:<13} {r['parameters']:>10,} {r['step_flops'] / 1e9:>16.2f} "
            f"{r['matmuls']:>18} {r['matmul_runs']:>9} {r['step_ms']:>13.1f} "
            f"{r['times_none']:>7.2f}"
        )
    return lines


def table(rows: list[dict[str, Any]]) -> str:
    """The results for people."""
    trained, costed = [[r for r in rows if key in r] for key in ("training", "cost")]
    lines = training_table(trained) if trained else []
    lines += cost_table(costed) if costed else []
    return "\n".join([*lines, rows[0]["environment"]["command"], parity.versions(rows[0])])


def read(record: Path) -> list[dict[str, Any]]:
    """The rows of a record; none where it does not exist yet."""
    if not record.parent.is_dir():
        raise UserError(f"--record is {record}, and there is no folder {record.parent}")
    try:
        text = record.read_text() if record.exists() else ""
        return [json.loads(line) for line in text.splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"--record {record} is not a file of JSON lines: {error}") from error


def main(options: Options) -> None:
    """Trains, times, and prints the results."""
    for option in ("steps", "rounds"):
        if (value := getattr(options, option)) < 1:
            raise UserError(f"--{option} is {value}; it must be at least 1")
    allocator.keep_freed_memory()
    record = Path(options.record) if options.record else None
    rows = read(record) if record else []

    def new() -> Iterator[dict[str, Any]]:
        if not options.cost_only:
            yield from measure(options.steps, [row for row in rows if "training" in row])
        if not any("cost" in row for row in rows):
            yield from costs(options.rounds)

    for row in new():
        rows.append(row)
        if record:
            with record.open("a") as file:
                print(json.dumps(row), file=file)
    print("\n".join(map(json.dumps, rows)) if options.json else table(rows))


if __name__ == "__main__":
    cli.run(main, Options)
