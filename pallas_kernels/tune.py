"""Fills the table of attention's tiles (`attention/tiles.json`) by time, on a Hopper GPU.

    python -m pallas_kernels.tune
    python -m pallas_kernels.tune attention_backward --head-size 128 --json
    python -m pallas_kernels.tune attention_forward --build-only

For each kernel, head size and kind of mask: every tiling that fits into shared memory is built,
as the workbench does it; those that spill, or of which ptxas warns, are out (*compiled*); the
others take turns on the GPU, and the least median time wins (*measured*). A row changes only
for a gain of more than `MARGIN`, and is written as soon as it is known. `--build-only` stops
after building and needs no GPU.

Not searched: 64 queries (or rows) of a warpgroup and two such warpgroups, which is what the
registers allow; and whether dK and dV share a kernel, which saves a product wherever it fits.

Legend: B batch, T queries and keys, H query heads, K key/value heads, D head size.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import target as targets
from pallas_kernels.attention import cases, dispatch, mosaic_backward, mosaic_forward, tiles
from pallas_kernels.build import Build, CompileError, build_all
from pallas_kernels.inspect import _Parser

TARGET = "h200"  # all of the family get the same code
SHARED_MEMORY = 227 * 1024
B, T, H, K = 1, 8192, 16, 4  # grouped heads: the code that needs more registers
FIGURES = "registers", "spill_bytes", "shared_memory_bytes", "warnings"
MARGIN = 0.02
ROUNDS, TURN_SECONDS = 9, 0.03
# Of a block that passes; blocks in the ring. wgmma's swizzle wants multiples of 64. With 192 the
# backward kernels spill, and Mosaic finds no layouts for the forward kernel (jax 0.12.0.1).
COLUMNS, STAGES = (64, 128), (2, 3, 4)

Tiles = mosaic_forward.Tiles | mosaic_backward.Tiles


class Cell(NamedTuple):
    """A row of the table to be."""

    key: tiles.Key
    current: Tiles
    candidates: list[Tiles]  # the current one among them
    program: Callable[..., Any]  # of tiles, then of `args`
    args: list[jax.ShapeDtypeStruct]


def _forward(D: int, mask: str) -> Iterator[tuple]:
    """Name, current tiles, other ones, program and arguments of each kernel."""

    def program(t: mosaic_forward.Tiles, q, k, v):
        options, arrays = cases._options(mask, q)
        return mosaic_forward.forward(options, q, k, v, None, arrays, t)

    args = [cases._bf16(B, T, heads, D) for heads in (H, K, K)]
    grid = [mosaic_forward.Tiles(64, n, stages) for n, stages in _grid(D, resident=1)]
    yield "attention_forward", mosaic_forward.choose(D, D, mask), grid, program, args


def _backward(D: int, mask: str) -> Iterator[tuple]:
    def program(work: mosaic_backward.Work, t: mosaic_backward.Tiles, *args):
        q, k, v, g, lse, delta = args
        options, arrays = cases._options(mask, q)
        return mosaic_backward.run(work, t, options, q, k, v, g, arrays, lse, delta)

    args = [cases._bf16(B, T, heads, D) for heads in (H, K, K, H)]
    args += [jax.ShapeDtypeStruct((B, T, H), jnp.float32)] * 2
    grid = [mosaic_backward.Tiles(*pair) for pair in _grid(D, resident=2, vectors=12)]
    chosen = mosaic_backward.choose(D, D, soft_cap="cap" in mask, mask=mask)
    for work, current in chosen.items():
        yield work.name, current, grid, partial(program, work), args


def _grid(D: int, resident: int, vectors: int = 0) -> list[tuple[int, int]]:
    """Columns and stages that fit into shared memory.

    Args:
      resident: arrays of which 128 rows stay; rows of two more pass.
      vectors: bytes that come with a column.
    """
    room = mosaic_backward.SHARED_MEMORY - resident * 128 * 2 * D
    pairs = [(n, stages) for n in COLUMNS for stages in STAGES]
    return [(n, stages) for n, stages in pairs if n * stages * (4 * D + vectors) <= room]


KERNELS = {
    "attention_forward": (_forward, tuple(sorted(mosaic_forward.TILES))),
    "attention_backward": (_backward, cases.BACKWARD_SIZES),
}


def cells(kernels: Sequence[str], head_size: int | None) -> list[Cell]:
    """Rows of the masks, and without a head size of the sizes, that the workbench lists."""
    found = []
    for make, sizes in map(KERNELS.__getitem__, kernels):
        if head_size is not None and head_size not in sizes:
            continue
        for D, mask in cases._configurations(head_size, sizes):
            for name, current, grid, program, args in make(D, mask):
                key = tiles.Key(tiles.FAMILY, name, D, D, mask)
                candidates = list(dict.fromkeys([current, *grid]))
                found.append(Cell(key, current, candidates, program, args))
    return found


def feasible(built: Build) -> bool:
    """Whether a candidate may be chosen at all."""
    fits = built.shared_memory_bytes <= SHARED_MEMORY
    return fits and not built.spill_bytes and not built.warnings


def seconds(programs: dict[Tiles, Callable], args: Sequence[Any]) -> dict[Tiles, float]:
    """Median seconds of a call of each program, which take turns on the GPU."""
    keys = jax.random.split(jax.random.key(0), len(args))
    values = [
        jax.random.normal(key, x.shape, x.dtype)
        if x.dtype == jnp.bfloat16
        else jnp.full(x.shape, math.log(T), x.dtype)  # about what log-sum-exp is
        for key, x in zip(keys, args, strict=True)
    ]

    def turn(call: Callable, calls: int) -> float:
        out, start = None, time.perf_counter()
        for _ in range(calls):
            out = call(*values)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / calls

    jitted = {t: jax.jit(call) for t, call in programs.items()}
    calls = {}
    for t, call in jitted.items():
        turn(call, 2)  # compiles
        calls[t] = max(1, round(TURN_SECONDS / turn(call, 1)))
    times = [{t: turn(call, calls[t]) for t, call in jitted.items()} for _ in range(ROUNDS)]
    return {t: statistics.median(row[t] for row in times) for t in jitted}


def pick(times: dict[Tiles, float], current: Tiles) -> Tiles:
    """The fastest; the current one where that gains no more than `MARGIN`."""
    best = min(times, key=lambda t: times[t])
    keep = current in times and times[current] <= (1 + MARGIN) * times[best]
    return current if keep else best


def tune(cell: Cell, builds: Sequence[Build], timer: Callable | None, device: str) -> list[dict]:
    """A line for each candidate; with a timer, the winner goes into the table's file.

    Args:
      builds: of the candidates, in order.
      timer: as `seconds`; None: nothing is timed.
      device: what the times were measured on.
    """
    fit = [t for t, built in zip(cell.candidates, builds, strict=True) if feasible(built)]
    times = timer({t: partial(cell.program, t) for t in fit}, cell.args) if timer and fit else {}
    chosen = pick(times, cell.current) if times else None
    if chosen:
        measured = f"{device}: {1e6 * times[chosen]:.0f} us"
        row = {"tiles": asdict(chosen), "measured": measured}
        tiles.write(tiles.read(tiles.PATH) | {cell.key: row}, tiles.PATH)
    return [
        {
            **cell.key._asdict(),
            "tiles": asdict(t),
            **{name: getattr(built, name) for name in FIGURES},
            "feasible": t in fit,
            "us": 1e6 * times[t] if t in times else None,
            "current": t == cell.current,
            "chosen": t == chosen,
        }
        for t, built in zip(cell.candidates, builds, strict=True)
    ]


def text(rows: Sequence[dict[str, Any]]) -> str:
    """The candidates of one cell for people, and what became of the row."""
    show = lambda t: " ".join(f"{name}={n}" for name, n in t.items())
    lines = [f"{rows[0]['kernel']} D={rows[0]['D']} {rows[0]['mask']}"]
    for r in rows:
        time_ = "" if r["us"] is None else f", {r['us']:.1f} us"
        lines.append(
            f"  {show(r['tiles'])}: {r['registers']} registers, {r['spill_bytes']} B of spills, "
            f"{r['shared_memory_bytes'] / 1024:.1f} KiB{'' if r['feasible'] else ', out'}{time_}"
            f"{', current' if r['current'] else ''}"
        )
    if new := [r for r in rows if r["chosen"]]:
        (old,) = (r for r in rows if r["current"])
        lines.append(f"  old: {show(old['tiles'])}; new: {show(new[0]['tiles'])}")
    return "\n".join(lines)


def _parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[Cell], str]:
    """Options, rows to do, and what JAX runs on."""
    parser = _Parser(prog="python -m pallas_kernels.tune", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("kernel", nargs="?", choices=KERNELS, help="both by default")
    parser.add_argument("--head-size", type=int, help="one of 64, 128, 192, 256; all by default")
    parser.add_argument("--build-only", action="store_true", help="time nothing; needs no GPU")
    parser.add_argument("--json", action="store_true", help="a list of all candidates")
    options = parser.parse_args(argv)
    kernels = [options.kernel] if options.kernel else list(KERNELS)
    todo = cells(kernels, options.head_size)
    if not todo:
        legal = sorted({size for kernel in kernels for size in KERNELS[kernel][1]})
        known = f"{' and '.join(kernels)} have {', '.join(map(str, legal))}"
        raise ValueError(f"--head-size {options.head_size}: {known}")
    device = jax.devices()[0].device_kind
    if not options.build_only and not any(name in device for name in dispatch.HOPPER):
        raise ValueError(
            f"timing needs a Hopper GPU ({', '.join(dispatch.HOPPER)}), and JAX runs on {device}; "
            "--build-only does without"
        )
    if not options.build_only and not os.access(tiles.PATH, os.W_OK):
        raise ValueError(f"cannot write the table {tiles.PATH}; install from a checkout")
    return options, todo, device


def main(argv: Sequence[str] | None = None) -> int:
    """The program.

    Returns:
      Exit status: 0, 1 if a candidate does not compile, 2 for bad input or no Hopper GPU.
    """
    targets.quiet_cpu()
    try:
        options, todo, device = _parse(argv)
    except ValueError as error:
        return _fail(error, 2)
    programs = [(partial(c.program, t), c.args) for c in todo for t in c.candidates]
    try:
        builds = iter(build_all(programs, targets.parse(TARGET)))
    except targets.MissingExtra as error:
        return _fail(error, 2)
    except CompileError as error:
        return _fail(error, 1)
    rows = []
    for cell in todo:
        mine = [next(builds) for _ in cell.candidates]
        rows += (new := tune(cell, mine, None if options.build_only else seconds, device))
        if not options.json:
            print(text(new), flush=True)
    if options.json:
        print(json.dumps(rows, indent=1))
    elif options.build_only:
        print(f"Compiled for {TARGET}, not timed: timing needs a Hopper GPU. Table unchanged.")
    else:
        print(f"{tiles.PATH} is new: now pytest -m gpu, and record the golden table again.")
    return 0


def _fail(error: Exception, status: int) -> int:
    print(f"python -m pallas_kernels.tune: {' '.join(str(error).split())}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
