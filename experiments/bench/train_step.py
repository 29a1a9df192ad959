"""Times the compiled training step against plain JAX and PyTorch, on this machine's CPU.

    python -m experiments.bench.train_step [--json] [--shapes small large] [--rounds N]

Three steps of the same maths, from the same parameters, on the same batch, float32, AdamW
and clipping included: this project's (`jaxaccel.train_step`), the same model as a user
writes it first in plain JAX (`plain_jax`), and in eager PyTorch where it is installed
(`torch_model`). Every row of the batch is one document (all segments are 1), which is the
case PyTorch's `is_causal` can express.

All take turns in one process, round after round; a ratio is the median of the rounds' own
ratios, so that a machine that slows down for a while slows both sides. PyTorch collapses
where another process holds one of its cores: look at the load before trusting a ratio.
The input's share is the time that a loop spends waiting for batches of the default source.

Prints a table, or with `--json` one object a shape and line.
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import PyTree

from experiments import allocator, cli, data, tokenizer
from experiments.bench import plain_jax
from experiments.bench.plain_jax import Shape
from jaxaccel import optim, sharding
from jaxaccel.nn import DecoderConfig
from jaxaccel.train_step import BATCH_KEYS, StepConfig, TrainStep, make_train_step

SHAPES = {
    "small": Shape(layers=4, width=128, heads=4, sequence=64, batch=12),
    "large": Shape(layers=6, width=384, heads=6, sequence=256, batch=16),
}
# Bars of each shape: at least so many times as fast as plain JAX, and at most so many
# times PyTorch's time.
BARS = {"small": (1.6, 1.0), "large": (1.35, 1.15)}
INPUT_BAR = 0.05
INPUT_STEPS = 20

OPTIMIZER = optim.OptimizerConfig(schedule="constant", warmup_steps=0)
CLIP_NORM = 1.0
TURN_SECONDS = 0.3  # a turn is a few steps in a row, at least so long
PAUSE_SECONDS = 0.3

Step = Callable[[], float]  # takes one training step, returns its loss


@dataclass(frozen=True)
class Options:
    """Times the compiled training step against plain JAX and PyTorch, on the CPU."""

    json: bool = False
    """One JSON object a shape and line, and nothing else on standard output."""
    shapes: tuple[Literal["small", "large"], ...] = ("small", "large")
    rounds: int = 9
    """Turns of each side; the medians are taken over them."""


def random_batch(shape: Shape) -> dict[str, np.ndarray]:
    """Random tokens, one document a row."""
    size = shape.batch, shape.sequence + 1
    tokens = np.random.default_rng(0).integers(shape.vocab, size=size, dtype=np.int32)
    row = np.arange(shape.sequence, dtype=np.int32)
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "segments": np.ones_like(tokens[:, 1:]),
        "positions": np.broadcast_to(row, (shape.batch, shape.sequence)),
    }


def make_ours(shape: Shape) -> TrainStep:
    """This project's step for `shape`, with its defaults, on one CPU device."""
    config = DecoderConfig(
        shape.vocab,
        layers=shape.layers,
        width=shape.width,
        heads=shape.heads,
        kv_heads=shape.heads,
        head_size=shape.width // shape.heads,
        mlp_width=shape.mlp_width,
        norm_epsilon=plain_jax.EPSILON,
        rope_theta=plain_jax.ROPE_THETA,
    )
    mesh = sharding.make_mesh(sharding.parse_mesh("", 1), jax.devices("cpu")[:1])
    return make_train_step(
        config, optim.adamw(OPTIMIZER, steps=1000), StepConfig(clip_norm=CLIP_NORM), mesh
    )


def unstacked(params: PyTree) -> dict[str, Any]:
    """The decoder's parameters (or gradients) as `plain_jax`'s tree; NumPy copies."""
    params = jax.tree.map(lambda x: np.array(x), params)
    stack = {name: next(iter(leaf.values())) for name, leaf in params["layers"][0].items()}
    count = len(next(iter(stack.values())))
    return {
        "embedding": params["embedding"],
        "head": params["head"].T,
        "final_norm": params["final_norm"]["scale"],
        "layers": [{name: x[i] for name, x in stack.items()} for i in range(count)],
    }


def hyperparameters() -> tuple[float, ...]:
    """Learning rate, b1, b2, epsilon, weight decay, clipping: the order of `make_step`."""
    o = OPTIMIZER
    return o.learning_rate, o.b1, o.b2, o.epsilon, o.weight_decay, CLIP_NORM


def our_step(
    ours: TrainStep, batch: dict[str, Any], program: jax.stages.Compiled | None = None
) -> Step:
    """This project's side; `program` is its step, where that is compiled already."""
    run = program or ours.step
    state = ours.init(jax.random.key(0))
    batch = jax.device_put(batch, ours.batch_sharding)

    def step() -> float:
        nonlocal state
        state, metrics = run(state, batch)
        return float(jax.block_until_ready((metrics, state))[0].loss)

    return step


def plain_step(shape: Shape, params: dict[str, Any], batch: dict[str, Any]) -> Step:
    """Plain JAX's side."""
    optimizer, update = plain_jax.make_step(shape.heads, *hyperparameters())
    cpu = jax.devices("cpu")[0]
    params, tokens, labels = jax.device_put((params, batch["tokens"], batch["labels"]), cpu)
    state = optimizer.init(params)

    def step() -> float:
        nonlocal params, state
        params, state, loss = update(params, state, tokens, labels)
        return float(jax.block_until_ready((loss, params, state))[0])

    return step


def torch_step(shape: Shape, params: dict[str, Any], batch: dict[str, Any]) -> Step:
    """PyTorch's side, with whichever AdamW is faster here."""
    from experiments.bench import torch_model

    def build(fused: bool) -> Step:
        model = torch_model.Decoder(params, shape.heads, shape.sequence)
        data = batch["tokens"], batch["labels"]
        return torch_model.make_step(model, *data, *hyperparameters(), fused=fused)

    def trial(fused: bool) -> float:
        step = build(fused)
        step()
        return min(seconds(step, 1) for _ in range(3))

    return build(min((True, False), key=trial))


def seconds(step: Step, steps: int) -> float:
    """Mean seconds of a step, over `steps` in a row."""
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


def alternate(sides: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds a step of every side, one number a round."""
    steps = {}
    for name, step in sides.items():
        step()  # compiles
        steps[name] = max(1, round(TURN_SECONDS / seconds(step, 1)))
    times: dict[str, list[float]] = {name: [] for name in sides}
    order = list(sides)
    for _ in range(rounds):
        for name in order:
            time.sleep(PAUSE_SECONDS)
            times[name].append(seconds(sides[name], steps[name]))
        order = order[1:] + order[:1]  # nobody always follows the same side
    return times


def paired(numerator: list[float], denominator: list[float]) -> float:
    """Median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def default_batches(shape: Shape) -> Iterator[dict[str, np.ndarray]]:
    """Batches of the default source and tokenizer."""
    config = data.DataConfig()
    corpus = data.load_corpus(config, tokenizer.load(config.tokenizer))
    return data.train_iterator(corpus, batch=shape.batch, sequence=shape.sequence, seed=0)


def input_share(ours: TrainStep, batches: Iterator[dict[str, Any]], steps: int) -> float:
    """Part of a training loop's time that goes into the next batch, transfer included.

    The loop waits for each step to end before it asks for a batch, as it must where it
    looks at the loss, so nothing hides the wait but what the pipeline itself reads ahead.
    """
    state = ours.init(jax.random.key(0))
    waiting = total = 0.0
    for i in range(steps + 1):
        start = time.perf_counter()
        batch = next(batches)
        batch = jax.device_put({key: batch[key] for key in BATCH_KEYS}, ours.batch_sharding)
        ready = time.perf_counter()
        state, _ = jax.block_until_ready(ours.step(state, batch))
        if i > 0:  # the first batch starts the pipeline
            waiting += ready - start
            total += time.perf_counter() - start
    return waiting / total


def measure(name: str, rounds: int) -> dict[str, Any]:
    """One shape's result, as `--json` prints it."""
    shape = SHAPES[name]
    batch, ours = random_batch(shape), make_ours(shape)
    params = unstacked(ours.init(jax.random.key(0)).params)
    sides = {"ours": our_step(ours, batch), "plain": plain_step(shape, params, batch)}
    if has_torch := importlib.util.find_spec("torch") is not None:
        sides["torch"] = torch_step(shape, params, batch)
    times = alternate(sides, rounds)
    median = {side: statistics.median(values) for side, values in times.items()}
    return {
        "shape": name,
        **dataclasses.asdict(shape),
        "ours_ms": 1e3 * median["ours"],
        "plain_jax_ms": 1e3 * median["plain"],
        "torch_ms": 1e3 * median["torch"] if has_torch else None,
        "speedup_vs_plain": paired(times["plain"], times["ours"]),
        "time_vs_torch": paired(times["ours"], times["torch"]) if has_torch else None,
        "tokens_per_second": shape.batch * shape.sequence / median["ours"],
        "input_share": input_share(ours, default_batches(shape), INPUT_STEPS),
        "rounds": rounds,
        "threads": threads(has_torch),
        "versions": versions(has_torch),
    }


def threads(has_torch: bool) -> dict[str, int]:
    """CPUs of this process, all of which XLA uses, and the threads that PyTorch chose."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = {"cpus": cpus or 1}
    if has_torch:
        from experiments.bench import torch_model

        found["torch"] = torch_model.threads()
    return found


def versions(has_torch: bool) -> dict[str, str]:
    """Of everything that computes."""
    packages = ("jax", "jaxlib", "flax", "optax", *(("torch",) if has_torch else ()))
    found = {package: importlib.metadata.version(package) for package in packages}
    return {"python": platform.python_version(), **found}


def table(results: list[dict[str, Any]]) -> str:
    """The results for people: times, ratios and the bars they are held to."""
    lines = []
    for r in results:
        against_plain, against_torch = BARS[r["shape"]]
        sizes = f"{r['layers']} layers, width {r['width']}, {r['batch']} x {r['sequence']} tokens"
        lines += [
            f"{r['shape']}: {sizes}, float32, one document a row",
            f"  this step   {r['ours_ms']:8.1f} ms  {r['tokens_per_second']:,.0f} tokens/s",
            f"  plain JAX   {r['plain_jax_ms']:8.1f} ms  {r['speedup_vs_plain']:.2f}x as long "
            f"(bar: at least {against_plain:.2f}x)",
        ]
        if r["torch_ms"] is None:
            lines.append("  PyTorch     not installed")
        else:
            lines.append(
                f"  PyTorch     {r['torch_ms']:8.1f} ms  {1 / r['time_vs_torch']:.2f}x as long "
                f"(bar: at least {1 / against_torch:.2f}x)"
            )
        share = f"{100 * r['input_share']:8.2f} %"
        lines.append(f"  input       {share} of the loop (bar: under {100 * INPUT_BAR:.0f} %)")
    first = results[0]
    stated = [f"{name} {version}" for name, version in first["versions"].items()]
    stated += [f"{name} threads {count}" for name, count in first["threads"].items()]
    return "\n".join([*lines, ", ".join(stated)])


def main(options: Options) -> None:
    """Measures the shapes asked for and prints the results."""
    allocator.keep_freed_memory()  # for every side: they share the process
    results = []
    for name in options.shapes:
        results.append(measure(name, options.rounds))
        if options.json:
            print(json.dumps(results[-1]), flush=True)
    if not options.json:
        print(table(results))


if __name__ == "__main__":
    cli.run(main, Options)
