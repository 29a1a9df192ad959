"""What a step of each optimizer takes: time, and bytes of state.

    python -m experiments.bench.optimizer [--json] [--parameters N] [--share]

The update alone, parameters included, of matrices [*, 2048] on the first device: each optimizer
is compiled first, then all take turns in one process, round after round, and the median of the
rounds counts. `adamw` is `optax.adamw`, what the others are compared with. A time is *measured*
and of this machine; a ratio travels better.

`--share` also sets the update against a whole training step of the preset `small`: the gradients
of one of its rows are timed, and taken as many times as its batch has rows.

Prints a table, or with `--json` one object an optimizer and line.
"""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax

from experiments import allocator, cli, configs, metrics
from experiments.errors import UserError
from jaxaccel import optim, sharding
from jaxaccel.memory import sharded_bytes
from jaxaccel.nn import parameter_count
from jaxaccel.train_step import BATCH_KEYS, StepConfig, make_train_step

COLUMNS, ROUNDS, LEAVES = 2048, 7, 4
NAMES: tuple[optim.Name, ...] = get_args(optim.Name)
SHARE_OF = "small"


@dataclasses.dataclass(frozen=True)
class Options:
    """Times the update of each optimizer, and counts the bytes of its state."""

    parameters: int = 10_000_000
    """How many, about."""
    optimizers: tuple[optim.Name, ...] = ("adamw", "adamw-8bit", "lion", "lion-8bit", "sgd")
    """Which; adamw is always timed."""
    share: bool = False
    """Time a training step of the preset small as well; takes minutes on a CPU."""
    json: bool = False
    """One JSON object an optimizer and line, and nothing else on standard output."""


def prepare(name: optim.Name, parameters: int) -> tuple[Callable[[], None], float, int]:
    """Compiles the update of an optimizer.

    Args:
      name: of the optimizer.
      parameters: how many, about.

    Returns:
      A function that runs it once to its end; bytes of state a parameter; temporary bytes that
      the program needs besides.
    """
    optimizer = optim.make(optim.OptimizerConfig(name=name), 1000)
    rows = max(parameters // (LEAVES * COLUMNS), 2)
    keys = jax.random.split(jax.random.key(0), LEAVES)
    params = {
        str(i): {"kernel": jax.random.normal(key, (1, rows, COLUMNS))} for i, key in enumerate(keys)
    }
    grads = jax.tree.map(lambda p: 1e-3 * p, params)
    state = jax.jit(optimizer.init)(params)

    def update(grads, state, params):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    program = jax.jit(update, donate_argnums=(1, 2)).lower(grads, state, params).compile()
    size = sharded_bytes(jax.eval_shape(lambda: state)) / sum(
        p.size for p in jax.tree.leaves(params)
    )
    held = {"params": params, "state": state}
    del params, state

    def run() -> None:
        held["params"], held["state"] = program(grads, held["state"], held["params"])
        jax.block_until_ready(held)

    stats = program.memory_analysis()
    return run, size, stats.temp_size_in_bytes if stats else 0


def timed(function: Callable[[], None]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(options: Options) -> list[dict[str, Any]]:
    """The results, as `--json` prints them; `adamw` first."""
    names: list[optim.Name] = ["adamw", *(n for n in options.optimizers if n != "adamw")]
    prepared = {name: prepare(name, options.parameters) for name in names}
    for run, *_ in prepared.values():
        run()
    seconds = {name: [] for name in names}
    for _ in range(ROUNDS):
        for name, (run, *_) in prepared.items():
            seconds[name].append(timed(run))
    rows = []
    for name, (_, size, temporary) in prepared.items():
        ratios = [a / b for a, b in zip(seconds[name], seconds["adamw"])]
        rows.append(
            {
                "optimizer": name,
                "parameters": options.parameters,
                "update_ms": 1e3 * statistics.median(seconds[name]),
                "times_adamw": statistics.median(ratios),
                "state_bytes_per_parameter": size,
                "temporary_bytes_per_parameter": temporary / options.parameters,
                "rounds": ROUNDS,
                "environment": metrics.environment(),
            }
        )
    return rows


def step_seconds(name: optim.Name) -> tuple[float, float]:
    """Seconds of a training step of the preset, and of its update alone.

    The gradients are timed on one row; the batch's rows are taken to cost as much each.
    """
    preset = configs.load(SHARE_OF)
    mesh = sharding.make_mesh(sharding.parse_mesh("", 1), jax.devices()[:1])
    optimizer = optim.make(optim.OptimizerConfig(name=name), 1000)
    made = make_train_step(preset.model, optimizer, StepConfig(), mesh)
    row = jnp.ones((1, preset.sequence), jnp.int32)
    batch = dict.fromkeys(BATCH_KEYS, row) | {"positions": jnp.arange(preset.sequence)[None]}
    held = {"state": made.init(jax.random.key(0))}

    def step() -> None:
        held["state"], _ = jax.block_until_ready(made.step(held["state"], batch))

    step()
    whole = statistics.median(timed(step) for _ in range(3))
    del held["state"]
    update, *_ = prepare(name, parameter_count(preset.model))
    update()
    alone = statistics.median(timed(update) for _ in range(3))
    return max(whole - alone, 0.0) * preset.batch + alone, alone


def table(rows: list[dict[str, Any]]) -> str:
    """The results for people."""
    lines = [
        f"{rows[0]['parameters']:,} parameters on {rows[0]['environment']['device_kind']}, median "
        f"of {ROUNDS} rounds (measured)",
        "optimizer     update, ms   x adamw   state, B/parameter   temporaries, B/parameter",
    ]
    for r in rows:
        lines.append(
            f"{r['optimizer']:<12} {r['update_ms']:>11.1f} {r['times_adamw']:>9.2f} "
            f"{r['state_bytes_per_parameter']:>20.2f} {r['temporary_bytes_per_parameter']:>26.2f}"
        )
        if "share_of_step" in r:
            lines.append(f"  {r['share_of_step']:.2%} of a training step of {SHARE_OF}")
    return "\n".join(lines)


def main(options: Options) -> None:
    """Times, counts and prints."""
    least = 2 * LEAVES * COLUMNS
    if options.parameters < least:
        raise UserError(f"--parameters is {options.parameters}; it must be at least {least}")
    allocator.keep_freed_memory()
    rows = measure(options)
    if options.share:
        for row in rows:
            step, update = step_seconds(row["optimizer"])
            row |= {"step_seconds": step, "share_of_step": update / step}
    print("\n".join(map(json.dumps, rows)) if options.json else table(rows))


if __name__ == "__main__":
    cli.run(main, Options)
