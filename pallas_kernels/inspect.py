"""The workbench: what the compiler made of a kernel, and whether it races, without a GPU.

    python -m pallas_kernels.inspect example_linear_residual --target h200
    python -m pallas_kernels.inspect example_linear_residual --shape M=1024,K=256 --json
    python -m pallas_kernels.inspect example_linear_residual --simulate
    python -m pallas_kernels.inspect --all

Registers, spills, shared memory and instructions are *compiled*: read from what ptxas says of
the very code that a GPU would run. The roofline time is *modelled*: the longer of FLOP over the
GPU's peak and bytes over its memory bandwidth, below which no kernel can get. Nothing here is
measured.

A kernel is in the table below by a function that yields its configurations. Its parameters are
the sizes that `--shape` sets.
"""

import argparse
import difflib
import inspect
import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp

from pallas_kernels import (
    adam_8bit,
    backend,
    example_linear_residual,
    fp8_matmul,
    rms_norm,
    swiglu,
)
from pallas_kernels import target as targets
from pallas_kernels.attention import cases as attention
from pallas_kernels.build import Build, CompileError, build, build_all, check_target
from pallas_kernels.cross_entropy import cases as cross_entropy
from pallas_kernels.gpus import Gpu

__all__ = [
    "KERNELS",
    "Case",
    "Entry",
    "RaceError",
    "build",
    "main",
    "report",
    "roofline_seconds",
    "simulate",
    "table",
]


class RaceError(RuntimeError):
    """Two threads touch the same memory unordered; the message says which accesses, and where."""


class Case(NamedTuple):
    """One configuration of a kernel at one size; what an entry's `cases` yields."""

    label: str  # tells configurations of a kernel apart
    function: Callable  # with one plgpu.kernel in it
    reference: Callable  # the same in plain JAX, of any float dtype
    args: Sequence[Any]  # trees of jax.ShapeDtypeStruct
    flops: int  # of its matmuls
    bytes: int  # read once and written once


class Entry(NamedTuple):
    """A kernel of the table."""

    cases: Callable[..., Iterator[tuple]]  # parameters: sizes, with defaults
    small: dict[str, int]  # sizes to simulate; the simulator takes about 1 s for a block


MAX_ERROR = 2.0  # of a kernel, over that of the same in plain JAX

_SMALL = {"T": 256, "H": 2, "K": 1, "D": 64}
KERNELS: dict[str, Entry] = {
    "attention_forward": Entry(attention.forward_cases, _SMALL),
    "attention_backward": Entry(attention.backward_cases, _SMALL),
    "example_linear_residual": Entry(example_linear_residual.cases, {"M": 128, "K": 320, "N": 256}),
    "rms_norm": Entry(rms_norm.cases, {"N": 24, "D": 512}),
    "swiglu": Entry(swiglu.cases, {"N": 12, "F": 1024}),
    "cross_entropy_forward": Entry(cross_entropy.forward_cases, {"N": 128, "D": 128, "V": 600}),
    "cross_entropy_backward": Entry(cross_entropy.backward_cases, {"N": 128, "D": 128, "W": 512}),
    "fp8_matmul": Entry(fp8_matmul.cases, {"M": 128, "N": 256, "K": 384}),
    "adam_8bit": Entry(adam_8bit.cases, {"N": 12, "D": 1024}),
}


def cases(name: str, sizes: dict[str, int]) -> list[Case]:
    """The configurations of a kernel of `KERNELS`, at sizes other than its defaults."""
    return [Case(*case) for case in KERNELS[name].cases(**sizes)]


def roofline_seconds(gpu: Gpu, dtype: Any, flops: int, bytes_: int) -> float:
    """*Modelled*: the time below which no kernel can get.

    Args:
      gpu: from `gpus.GPUS`.
      dtype: of the matmuls' operands.
      flops: of all matmuls.
      bytes_: read from memory and written to it.

    Returns:
      Seconds: of the peak rate or of the memory's, whichever takes longer.

    Example:
      >>> from pallas_kernels.gpus import GPUS
      >>> round(1e6 * roofline_seconds(GPUS["h200"], "bfloat16", 2 * 4096**3, 2**27))
      139
    """
    dtype = jnp.dtype(dtype)
    rates = {1: gpu.fp8_flops, 2: gpu.bf16_flops, 4: gpu.tf32_flops}
    rate = rates.get(dtype.itemsize) if jnp.issubdtype(dtype, jnp.floating) else None
    if rate is None:
        raise ValueError(f"{gpu.name} has no peak rate for matmuls of {dtype}")
    return max(flops / rate, bytes_ / gpu.memory_bandwidth)


def report(name: str, case: Case, built: Build, gpu: Gpu) -> dict[str, Any]:
    """One line of the table, as `--json` prints it."""
    dtype = jax.tree.leaves(list(case.args))[0].dtype
    seconds = roofline_seconds(gpu, dtype, case.flops, case.bytes)
    return {
        "name": name,
        "configuration": case.label,
        "target": built.target,
        "registers": built.registers,
        "spill_bytes": built.spill_bytes,
        "shared_memory_bytes": built.shared_memory_bytes,
        "barriers": built.barriers,
        "occupancy": built.occupancy,
        "wgmma": built.wgmma,
        "tma": built.tma,
        "exp2": built.exp2,
        "sass": built.sass,
        "wgmma_kinds": built.wgmma_kinds,
        "warnings": built.warnings,
        "flops": case.flops,
        "bytes": case.bytes,
        "roofline_us": 1e6 * seconds,
    }


def simulate(case: Case) -> float:
    """Runs a kernel on the CPU, on random numbers, with the race detector on.

    Args:
      case: at a small size.

    Returns:
      Its largest error over that of the reference in the same dtype, both against the
      reference in float32. An int in `args` is zero.

    Raises:
      RaceError: two threads race; the message says where, in one line.
    """
    leaves, tree = jax.tree.flatten(list(case.args))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    values = [
        jax.random.normal(key, x.shape, x.dtype)
        if jnp.issubdtype(x.dtype, jnp.floating)
        else jnp.zeros(x.shape, x.dtype)
        for key, x in zip(keys, leaves, strict=True)
    ]
    wide = [_wide(x) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in values]
    args, wide_args = jax.tree.unflatten(tree, values), jax.tree.unflatten(tree, wide)
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # JAX logs a race with the stack of every thread
    try:
        with backend.simulate():
            got = jax.block_until_ready(jax.jit(lambda *args: case.function(*args))(*args))
    except RuntimeError as error:
        if (race := _race(error)) is None:
            raise
        raise RaceError(race) from None
    finally:
        logging.disable(before)
    with jax.default_matmul_precision("highest"):
        exact = case.reference(*wide_args)
    mine, naive = _error(got, exact), _error(case.reference(*args), exact)
    return mine / naive if naive else 0.0 if mine == 0 else math.inf


def _error(out: Any, exact: Any) -> float:
    """The largest over all leaves; NaN if anything is, and none between two infinities."""
    pairs = zip(jax.tree.leaves(out), jax.tree.leaves(exact), strict=True)
    wide = [(_wide(a), _wide(b)) for a, b in pairs]
    errors = [jnp.max(jnp.where(a == b, 0, jnp.abs(a - b))) for a, b in wide]
    return float(jnp.max(jnp.stack(errors)))


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


COLUMNS = {
    "kernel": lambda r: f"{r['name']} {r['configuration']}".strip(),
    "registers": lambda r: str(r["registers"]),
    "spills, B": lambda r: str(r["spill_bytes"]),
    "shared, KiB": lambda r: f"{r['shared_memory_bytes'] / 1024:.1f}",
    "barriers": lambda r: str(r["barriers"]),
    "occupancy": lambda r: f"{r['occupancy']:.0%}",
    "wgmma": lambda r: _count(r, "wgmma"),
    "TMA": lambda r: _count(r, "tma"),
    "exp2": lambda r: _count(r, "exp2"),
    "GFLOP": lambda r: f"{r['flops'] / 1e9:.4g}",
    "MB": lambda r: f"{r['bytes'] / 1e6:.4g}",
    "roofline, us": lambda r: f"{r['roofline_us']:.4g}",
}


def _count(row: dict[str, Any], key: str) -> str:
    return str(row[key]) if row["sass"] is None else f"{row[key]} / {row['sass'][key]}"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The reports for people, in Markdown."""
    cells = [list(COLUMNS), *([column(row) for column in COLUMNS.values()] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
    pad = lambda line: [
        x.rjust(width) if i else x.ljust(width)
        for i, (x, width) in enumerate(zip(line, widths, strict=True))
    ]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [f"| {' | '.join(line)} |" for line in (pad(cells[0]), rule, *map(pad, cells[1:]))]
    ways = "PTX / SASS" if rows[0]["sass"] is not None else "PTX"
    notes = [
        f"Compiled for {rows[0]['target']}; wgmma, TMA and exp2 count instructions in {ways}, "
        "not how often they run.",
        "The roofline is modelled: the longer of FLOP and bytes at the GPU's peak rates.",
    ]
    notes += [f"{COLUMNS['kernel'](r)}: ptxas warns: {w}" for r in rows for w in r["warnings"]]
    return "\n".join([*lines, "", *notes])


def _sizes(name: str, text: str | None) -> dict[str, int]:
    """Reads `--shape`."""
    legal = {k: p.default for k, p in inspect.signature(KERNELS[name].cases).parameters.items()}
    defaults = ",".join(f"{k}={n or 'all'}" for k, n in legal.items())
    sizes = {}
    for part in text.split(",") if text else ():
        key, _, value = part.strip().partition("=")
        if key not in legal or not value.isdecimal() or int(value) == 0:
            raise ValueError(f"cannot read {part!r} in --shape of {name}; its sizes are {defaults}")
        sizes[key] = int(value)
    return sizes


def _race(error: Exception) -> str | None:
    """What the race detector says, in one line: which accesses, by which warpgroup, where."""
    _, found, text = str(error).rpartition("RACE DETECTED")
    access = r"(read|write) of [^\n]* from \w+\([^\n]*?(\w+=\d+)\), (\S+):\d+ \((\S+)\)"
    sides = [
        f"{what} by {who} in {function.split('.')[-1]}, {'/'.join(where.split('/')[-2:])}"
        for what, who, where, function in re.findall(access, text)
    ]
    return (" and ".join(sides) or "no more is known") if found else None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


class _Todo(NamedTuple):
    name: str
    sizes: dict[str, int]
    case: Case


def _parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, targets.Target, list[_Todo]]:
    parser = _Parser(prog="python -m pallas_kernels.inspect", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("kernel", nargs="?", help=f"one of: {', '.join(KERNELS)}")
    parser.add_argument("--target", default="h200", help="a GPU: h100, h200 (the default)")
    parser.add_argument("--shape", help="sizes other than the defaults: M=1024,K=256")
    parser.add_argument("--json", action="store_true", help="a list, and nothing else")
    parser.add_argument("--simulate", action="store_true", help="run with the race detector")
    parser.add_argument("--all", action="store_true", help="every kernel of the table")
    options = parser.parse_args(argv)
    known = f"kernels are {', '.join(KERNELS)}"
    if options.all and (options.kernel or options.shape):
        raise ValueError("--all takes no kernel and no --shape: it is every kernel at its own size")
    if not options.all and options.kernel is None:
        raise ValueError(f"name a kernel, or --all; {known}")
    if not options.all and options.kernel not in KERNELS:
        near = difflib.get_close_matches(options.kernel, KERNELS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"unknown kernel {options.kernel!r}; {hint}{known}")
    gpu = targets.parse(options.target)
    check_target(gpu)
    todo = []
    for name in KERNELS if options.all else [options.kernel]:
        sizes = (KERNELS[name].small if options.simulate else {}) | _sizes(name, options.shape)
        todo += [_Todo(name, sizes, case) for case in cases(name, sizes)]
    if not todo:
        raise ValueError(f"{options.kernel} has no kernel for --shape {options.shape}")
    return options, gpu, todo


def _run(options: argparse.Namespace, gpu: targets.Target, todo: Sequence[_Todo]) -> int:
    if not options.simulate:
        built = build_all([(_named(t), t.case.args) for t in todo], gpu)
        rows = [report(t.name, t.case, b, gpu.gpu) for t, b in zip(todo, built, strict=True)]
        print(json.dumps(rows, indent=1) if options.json else table(rows))
        return 0
    rows = [_simulated(*t) for t in todo]
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        for r in rows:
            sizes = ",".join(f"{k}={n}" for k, n in r["shape"].items())
            outcome = (
                f"RACE: {r['race']}"
                if r["race"]
                else (f"no race; {r['error']:.2f} times the error of the same in plain JAX")
            )
            print(f"{r['name']} {r['configuration']} {sizes}: {outcome}".replace("  ", " "))
    return int(any(r["race"] or not r["error"] <= MAX_ERROR for r in rows))


def _named(todo: _Todo) -> Callable:
    """The function under the name by which errors should call it."""

    def function(*args):
        return todo.case.function(*args)

    function.__name__ = f"{todo.name} {todo.case.label}".strip()
    return function


def _simulated(name: str, sizes: dict[str, int], case: Case) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "configuration": case.label, "shape": sizes}
    row |= {"race": None, "error": None}
    try:
        row["error"] = simulate(case)
    except RaceError as error:
        row["race"] = str(error)
    return row


def main(argv: Sequence[str] | None = None) -> int:
    """The program.

    Returns:
      Exit status: 0, 1 if a kernel races, is wrong or does not compile, 2 for bad input.
    """
    targets.quiet_cpu()
    try:
        options, gpu, todo = _parse(argv)
    except ValueError as error:
        return _fail(error, 2)
    try:
        return _run(options, gpu, todo)
    except targets.MissingExtra as error:
        return _fail(error, 2)
    except CompileError as error:
        return _fail(error, 1)
    except ValueError as error:
        if options.shape is None:  # a defect of the kernel: its author wants the stack
            raise
        return _fail(error, 2)


def _fail(error: Exception, status: int) -> int:
    print(f"python -m pallas_kernels.inspect: {' '.join(str(error).split())}", file=sys.stderr)
    return status


if __name__ == "__main__":
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", backend.THREADS)  # for the simulator
    sys.exit(main())
