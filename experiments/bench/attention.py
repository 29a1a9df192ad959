"""Times attention on the GPU of this machine against cuDNN, plain JAX and tokamax.

    python -m experiments.bench.attention [--json] [--plot FILE] [--length N] [--rounds N]

bfloat16, forward alone and forward with backward, 32768 tokens in all and a model width of
2048: `--length` and its like change one axis at a time (lengths of a causal mask; masks and head
sizes at one length), since the whole product would take an hour of compiling.

  ours      pallas_kernels.attention, with the implementation that it chooses here
  cudnn     jax.nn.dot_product_attention(implementation="cudnn"); packed rows as a mask array
  xla       pallas_kernels.attention(implementation="xla"), blockwise
  tokamax   tokamax.dot_product_attention, where it is installed

All programs are compiled first, in parallel. Then the sides of a case take turns, round after
round, each turn a few calls in a row; a time is the median over rounds. Rates count the pairs
that the mask allows (a causal mask: half of T x T), 4 D FLOP for a pair and head forward and
2.5 times that backward, as FlashAttention's authors do. The share is of the data sheet's dense
bfloat16 rate. Every figure is *measured*; needs a GPU.
"""

import dataclasses
import functools
import importlib
import importlib.util
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from experiments import cli
from experiments.errors import UserError
from pallas_kernels import attention as ours
from pallas_kernels import gpus

TOKENS, WIDTH = 32_768, 2048  # of a case: batch x length, heads x head size
WINDOW = 1024  # keys to the left of a query, with itself one more
DOCUMENT = 1024  # tokens of a packed document
LENGTHS = (1024, 2048, 4096, 8192, 16_384, 32_768)
HEAD_SIZES = (64, 128)
MASKS = ("causal", "full", "window", "packed")
SIDES = ("ours", "cudnn", "xla", "tokamax")
TURN_SECONDS = 0.02

MaskName = Literal["causal", "full", "window", "packed"]


@dataclasses.dataclass(frozen=True)
class Options:
    """Times attention on this machine's GPU against cuDNN, XLA and tokamax."""

    json: bool = False
    """One JSON object a case, pass and side and line, and nothing else on standard output."""
    plot: str = ""
    """Also draw the rates of the causal lengths into this file."""
    length: int = 8192
    """At which masks and head sizes are compared; a divisor of 32768."""
    rounds: int = 7
    """Turns of each side."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One input; all sides compute the same of it."""

    mask: MaskName
    length: int
    head_size: int

    @property
    def batch(self) -> int:
        """Rows of the batch."""
        return TOKENS // self.length

    @property
    def heads(self) -> int:
        """Query heads, and as many key/value heads."""
        return WIDTH // self.head_size

    @property
    def pairs(self) -> float:
        """Pairs of a query and a key that the mask allows, in one row."""
        n = self.length
        if self.mask == "full":
            return n * n
        if self.mask == "causal":
            return n * n / 2
        if self.mask == "packed":
            return n * min(n, DOCUMENT) / 2
        seen = min(n, WINDOW + 1)
        return seen * (seen + 1) / 2 + (n - seen) * seen

    def flops(self, backward: bool) -> float:
        """FLOP of all matmuls."""
        forward = 4 * self.head_size * self.heads * self.batch * self.pairs
        return forward * (3.5 if backward else 1)


def cases(length: int) -> list[Case]:
    """Causal at all lengths, then all masks and head sizes at one."""
    axes = [Case("causal", n, 128) for n in LENGTHS]
    axes += [Case(mask, length, size) for size in HEAD_SIZES for mask in MASKS]
    return list(dict.fromkeys(axes))


def function(side: str, case: Case) -> Callable:
    """One side as a function of q, k, v, each `[batch, length, heads, head size]`."""
    causal, window = case.mask != "full", (WINDOW, 0) if case.mask == "window" else None
    document = lambda: jnp.arange(case.length, dtype=jnp.int32) // DOCUMENT + 1

    def pallas_kernels(q, k, v):
        rows = jnp.broadcast_to(document(), q.shape[:2]) if case.mask == "packed" else None
        mask = ours.Mask(causal, window, rows, rows)
        return ours.attention(q, k, v, mask=mask, implementation="xla" if side == "xla" else None)

    def peer(q, k, v, attend: Callable, implementation: str):
        mask = None
        if case.mask == "packed":
            mask = (document()[:, None] == document()[None])[None, None]
        options = {"mask": mask, "is_causal": causal, "local_window_size": window}
        return attend(q, k, v, implementation=implementation, **options)

    if side in ("ours", "xla"):
        return pallas_kernels
    if side == "cudnn":
        attend = jax.nn.dot_product_attention
        return functools.partial(peer, attend=attend, implementation="cudnn")
    # Its default would try its kernel, then take XLA without a word.
    attend = importlib.import_module("tokamax").dot_product_attention
    return functools.partial(peer, attend=attend, implementation="mosaic")


def program(side: str, case: Case, backward: bool) -> Callable:
    """What is timed: the output, or the gradients of the three inputs for a given cotangent."""
    forward = function(side, case)
    if not backward:
        return lambda q, k, v, g: forward(q, k, v)

    def both(q, k, v, g):
        out, pull = jax.vjp(forward, q, k, v)
        return out, pull(g)

    return both


def compiled(side: str, case: Case, backward: bool) -> Callable | str:
    """The program, or why this side has none."""
    x = jax.ShapeDtypeStruct((case.batch, case.length, case.heads, case.head_size), jnp.bfloat16)
    try:
        return jax.jit(program(side, case, backward)).lower(x, x, x, x).compile()
    except (NotImplementedError, ValueError, RuntimeError, ExceptionGroup) as error:
        # Another library's limit on this GPU is a result; our own would be a defect.
        if side in ("ours", "xla"):
            raise
        return " ".join(str(error).split())[:200] or type(error).__name__


def alternate(programs: dict[str, Callable], args: tuple, rounds: int) -> dict[str, float]:
    """Median seconds of a call of each side, which take turns."""

    def turn(call: Callable, calls: int) -> float:
        out, start = None, time.perf_counter()
        for _ in range(calls):
            out = call(*args)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / calls

    calls = {}
    for side, call in programs.items():
        turn(call, 2)
        calls[side] = max(1, round(TURN_SECONDS / turn(call, 1)))
    order, times = list(programs), {side: [] for side in programs}
    for _ in range(rounds):
        for side in order:
            times[side].append(turn(programs[side], calls[side]))
        order = order[1:] + order[:1]
    return {side: statistics.median(values) for side, values in times.items()}


def row(case: Case, backward: bool, side: str, result: float | str, peak: float | None) -> dict:
    """One line of `--json`; `result` is seconds, or why there are none."""
    refused = result if isinstance(result, str) else None
    rate = None if isinstance(result, str) else case.flops(backward) / result
    return {
        **dataclasses.asdict(case),
        "batch": case.batch,
        "heads": case.heads,
        "pass": "forward+backward" if backward else "forward",
        "side": side,
        "ms": None if isinstance(result, str) else 1e3 * result,
        "tflops": rate and rate / 1e12,
        "share_of_peak": rate and peak and rate / peak,
        "difference": None,
        "refused": refused,
    }


def measure(case: Case, programs: dict[bool, dict], rounds: int, peak: float | None) -> list[dict]:
    """Both passes of a case, all sides; `difference` is the largest, from our output, if any."""
    shape = case.batch, case.length, case.heads, case.head_size
    keys = jax.random.split(jax.random.key(0), 4)
    args = tuple(jax.random.normal(key, shape, jnp.bfloat16) for key in keys)
    rows = []
    for backward, sides in programs.items():
        able = {side: call for side, call in sides.items() if not isinstance(call, str)}
        results = sides | alternate(able, args, rounds)
        new = {side: row(case, backward, side, r, peak) for side, r in results.items()}
        output = lambda call: jax.tree.leaves(call(*args))[0].astype(jnp.float32)
        reference = output(able["ours"]) if "ours" in able else math.nan
        for side, call in able.items():
            new[side]["difference"] = float(jnp.max(jnp.abs(output(call) - reference)))
        rows += new.values()
    return rows


def table(rows: list[dict[str, Any]], device: str) -> str:
    """The results for people."""
    lines = [f"attention on {device}, bfloat16, {TOKENS} tokens, width {WIDTH}; TFLOP/s (of peak)"]
    lines.append(
        f"{'mask':7} {'length':>6} {'D':>4} {'pass':17}" + "".join(f"{s:>14}" for s in SIDES)
    )
    groups: dict[tuple, dict[str, dict]] = {}
    for r in rows:
        key = r["mask"], r["length"], r["head_size"], r["pass"]
        groups.setdefault(key, {})[r["side"]] = r
    for (mask, length, size, which), sides in groups.items():
        cells = []
        for side in SIDES:
            r = sides.get(side)
            share = "" if not r or r["share_of_peak"] is None else f" ({r['share_of_peak']:.0%})"
            cells.append(f"{r['tflops']:.0f}{share}" if r and r["tflops"] else "-")
        lines.append(
            f"{mask:7} {length:6} {size:4} {which:17}" + "".join(f"{c:>14}" for c in cells)
        )
    refused = {(r["side"], r["refused"]) for r in rows if r["refused"]}
    lines += [f"{side} refused some: {reason}" for side, reason in sorted(refused)]
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], device: str, file: Path) -> None:
    """Rates of the causal mask at head size 128 against the length; a picture for each pass."""
    from matplotlib.figure import Figure  # not at the top: to time needs none

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    for axes, which in zip(figure.subplots(1, 2, sharey=True), ("forward", "forward+backward")):
        for side in SIDES:
            mine = [
                r
                for r in rows
                if (r["side"], r["pass"], r["mask"], r["head_size"]) == (side, which, "causal", 128)
                and r["tflops"]
            ]
            mine.sort(key=lambda r: r["length"])
            if mine:
                axes.plot(
                    [r["length"] for r in mine], [r["tflops"] for r in mine], "o-", label=side
                )
        axes.set_xscale("log", base=2)
        axes.set(xlabel="length", title=f"{which}, causal, D = 128")
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.axes[0].set_ylabel(f"TFLOP/s, measured on {device}")
    figure.savefig(file, dpi=150)


def gpu_here() -> str:
    """What JAX calls the GPU it runs on."""
    device = jax.devices()[0]
    if device.platform not in ("gpu", "cuda"):
        raise UserError(f"this benchmark needs a GPU, and JAX runs on the {device.platform}")
    return device.device_kind


def main(options: Options) -> None:
    """Compiles everything, times it, and prints the results."""
    if options.length not in LENGTHS:
        raise UserError(f"--length {options.length}: legal are {', '.join(map(str, LENGTHS))}")
    if options.rounds < 1:
        raise UserError(f"--rounds {options.rounds}: at least 1")
    if options.plot:
        from experiments.plan_plot import check_picture

        check_picture(Path(options.plot))
    device = gpu_here()
    gpu = gpus.find(device)
    sides = [s for s in SIDES if s != "tokamax" or importlib.util.find_spec("tokamax")]
    keys = [(c, b, s) for c in cases(options.length) for b in (False, True) for s in sides]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(lambda key: compiled(key[2], key[0], key[1]), keys))
    rows = []
    for case in cases(options.length):
        programs: dict[bool, dict] = {False: {}, True: {}}
        for (c, backward, side), call in zip(keys, found, strict=True):
            if c == case:
                programs[backward][side] = call
        new = measure(case, programs, options.rounds, gpu.bf16_flops if gpu else None)
        rows += new
        if options.json:
            print("\n".join(map(json.dumps, new)), flush=True)
    if not options.json:
        print(table(rows, device))
    if options.plot:
        plot(rows, device, Path(options.plot))


if __name__ == "__main__":
    cli.run(main, Options)
