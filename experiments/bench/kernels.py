"""Times the kernels beside attention on the GPU of this machine, against XLA and tokamax.

    python -m experiments.bench.kernels [--json] [--only NAMES] [--rounds N]

  ours      the public op, with the implementation that it chooses here
  xla       the same op with implementation="xla"; a block-scaled matmul is then a loop over K
  tokamax   tokamax's op of the same job, where it is installed and has one

All programs are compiled first, in parallel; then the sides of a case take turns, as in
`experiments.bench.attention`. The rate is that of the lower bound: FLOP of the matmuls that the
op cannot do without, or bytes of each input read once and each output written once. The share
is of the roofline: the longer of FLOP and bytes at the data sheet's rates. Every figure is
*measured*; needs a GPU, and about two minutes.
"""

import dataclasses
import functools
import importlib
import importlib.util
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from experiments import cli
from experiments.bench.attention import alternate, gpu_here
from experiments.errors import UserError
from pallas_kernels import cross_entropy, fp8_matmul, gpus, rms_norm, swiglu
from pallas_kernels.inspect import roofline_seconds

SIDES = ("ours", "xla", "tokamax")
BF16, F32, FP8 = jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn
ROWS, WIDTH, MLP = 16_384, 4096, 14_336  # Llama-3 8B
TOKENS, NARROW, WORDS = 8192, 2048, 128_256  # Llama-3.2 1B's head


@dataclasses.dataclass(frozen=True)
class Options:
    """Times the kernels beside attention on this machine's GPU against XLA and tokamax."""

    json: bool = False
    """One JSON object a case and side and line, and nothing else on standard output."""
    only: str = ""
    """Comma-separated beginnings of the names of cases; empty: all."""
    rounds: int = 7
    """Turns of each side."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One op at one size; `sides` are functions of the arguments."""

    name: str
    sides: dict[str, Callable]
    args: Sequence[jax.ShapeDtypeStruct]
    flops: int  # of the matmuls it cannot do without
    bytes: int  # each input read once, each output written once
    dtype: Any  # of the matmuls' operands, for the roofline


def cases(tokamax: Any = None) -> list[Case]:
    """What is timed.

    Args:
      tokamax: the module, where it is installed.
    """
    shape = jax.ShapeDtypeStruct
    rows, scale = shape((ROWS, WIDTH), BF16), shape((WIDTH,), F32)
    gate, one = shape((ROWS, MLP), BF16), shape((), F32)
    hidden, head = shape((TOKENS, NARROW), BF16), shape((WORDS, NARROW), BF16)
    labels = shape((TOKENS,), jnp.int32)
    n = WIDTH
    a, a_scale = shape((ROWS, n), FP8), shape((ROWS, n // 128), F32)
    b, b_scale = shape((n, n), FP8), shape((n // 128, n // 128), F32)

    def norm(x, residual, scale, *, implementation):
        return rms_norm.rms_norm(x, scale, residual=residual, implementation=implementation)

    def norm_fp8(x, residual, scale, cast, *, implementation):
        total, y = rms_norm.rms_norm_fp8(
            x, scale, cast, residual=residual, implementation=implementation
        )
        return total, y.values, y.amax

    def glu_fp8(gate, up, cast, *, implementation):
        y = swiglu.swiglu_fp8(gate, up, cast, implementation=implementation)
        return y.values, y.amax

    def loss(hidden, head, labels, *, implementation):
        return cross_entropy.linear_cross_entropy(
            hidden, head, labels, implementation=implementation
        ).objective

    def peer_norm(x, residual, scale):
        total = x + residual  # tokamax's op has no addition
        options = {"subtract_mean": False, "epsilon": 1e-6}
        return total, tokamax.layer_norm(total, scale.astype(x.dtype), None, **options)

    def peer_loss(hidden, head, labels):
        return tokamax.linear_softmax_cross_entropy_loss(hidden, labels, head.T)

    wide, glu = 2 * ROWS * WIDTH, 2 * ROWS * MLP  # bytes of an array
    logits, words = 2 * TOKENS * NARROW * WORDS, 2 * (TOKENS + WORDS) * NARROW
    product = 2 * ROWS * n * n
    quantised = ROWS * n + n * n + 4 * (ROWS * n // 128)
    block, whole = fp8_matmul.block_scaled_matmul, fp8_matmul.scaled_matmul
    out = 2 * ROWS * n
    bf16_block = functools.partial(block, out_dtype=BF16)
    bf16_whole = functools.partial(whole, out_dtype=BF16)
    norm_args, glu_args, loss_args = (rows, rows, scale), (gate, gate), (hidden, head, labels)
    return [
        _case("add_rms_norm", norm, norm_args, 4 * wide, peer=tokamax and peer_norm),
        _case("add_rms_norm grad", norm, norm_args, 8 * wide, 2, peer=tokamax and peer_norm),
        _case("add_rms_norm fp8", norm_fp8, (*norm_args, one), 7 * wide // 2),
        _case("swiglu", swiglu.swiglu, glu_args, 3 * glu),
        _case("swiglu grad", swiglu.swiglu, glu_args, 8 * glu, 2),
        _case("swiglu fp8", glu_fp8, (*glu_args, one), 5 * glu // 2),
        _case("cross_entropy", loss, loss_args, words, 0, logits, peer=tokamax and peer_loss),
        _case(
            "cross_entropy grad",
            loss,
            loss_args,
            2 * words,
            2,
            3 * logits,
            peer=tokamax and peer_loss,
        ),
        _case(
            "fp8_matmul block", bf16_block, (a, a_scale, b, b_scale), quantised + out, 0, product
        ),
        _case("fp8_matmul", bf16_whole, (a, b, one), ROWS * n + n * n + out, 0, product),
    ]


def _case(
    name: str,
    op: Callable,
    args: Sequence[jax.ShapeDtypeStruct],
    bytes_: int,
    gradients: int = 0,
    flops: int = 0,
    *,
    peer: Any = None,
) -> Case:
    """Sides of an op; `gradients` of the first so many arguments are taken too."""

    def program(call):
        if not gradients:
            return call

        def both(*args):
            out, pull = jax.vjp(lambda *first: call(*first, *args[gradients:]), *args[:gradients])
            return out, pull(out)  # any cotangent does

        return both

    sides = {
        "ours": functools.partial(op, implementation=None),
        "xla": functools.partial(op, implementation="xla"),
    }
    sides |= {"tokamax": peer} if peer else {}
    programs = {side: program(call) for side, call in sides.items()}
    return Case(name, programs, args, flops, bytes_, args[0].dtype)


def compiled(call: Callable, args: Sequence[Any], *, peer: bool) -> Callable | str:
    """The program; or, of another library, why it has none."""
    try:
        return jax.jit(call).lower(*args).compile()
    except (NotImplementedError, ValueError, RuntimeError, ExceptionGroup) as error:
        if not peer:
            raise
        return " ".join(str(error).split())[:200] or type(error).__name__


def values(case: Case) -> tuple[jax.Array, ...]:
    """Arguments on the device: normal numbers, scales of 1, labels of every kind."""
    keys = jax.random.split(jax.random.key(0), len(case.args))

    def one(key, x):
        if jnp.issubdtype(x.dtype, jnp.integer):
            return jax.random.randint(key, x.shape, 0, WORDS, x.dtype)
        if x.dtype == F32:
            return jnp.ones(x.shape, F32)
        return jax.random.normal(key, x.shape, BF16).astype(x.dtype)

    return tuple(one(key, x) for key, x in zip(keys, case.args, strict=True))


def row(case: Case, side: str, result: float | str, gpu: gpus.Gpu | None) -> dict[str, Any]:
    """One line of `--json`; `result` is seconds, or why there are none."""
    seconds = None if isinstance(result, str) else result
    bound = gpu and roofline_seconds(gpu, case.dtype, case.flops, case.bytes)
    return {
        "name": case.name,
        "side": side,
        "ms": seconds and 1e3 * seconds,
        "gb_per_s": seconds and case.bytes / seconds / 1e9,
        "tflops": case.flops / seconds / 1e12 if seconds and case.flops else None,
        "share_of_roofline": bound / seconds if bound and seconds else None,
        "refused": result if isinstance(result, str) else None,
    }


def table(rows: Sequence[dict[str, Any]], device: str) -> str:
    """The results for people."""
    lines = [f"kernels on {device}; measured, median; rate, share of the roofline"]
    lines.append(f"{'':20}" + "".join(f"{side:>30}" for side in SIDES))
    for name in dict.fromkeys(r["name"] for r in rows):
        cells = []
        for side in SIDES:
            r = next((r for r in rows if (r["name"], r["side"]) == (name, side)), None)
            if not r or r["ms"] is None:
                cells.append("-")
                continue
            rate = f"{r['tflops']:.0f} TFLOP/s" if r["tflops"] else f"{r['gb_per_s']:.0f} GB/s"
            share = r["share_of_roofline"]
            of = "" if share is None else f" {share:.0%}"
            cells.append(f"{r['ms']:.3f} ms {rate}{of}")
        lines.append(f"{name:20}" + "".join(f"{cell:>30}" for cell in cells))
    refused = {(r["side"], r["name"], r["refused"]) for r in rows if r["refused"]}
    lines += [f"{side} refused {name}: {why}" for side, name, why in sorted(refused)]
    return "\n".join(lines)


def main(options: Options) -> None:
    """Compiles everything, times it, and prints the results."""
    if options.rounds < 1:
        raise UserError(f"--rounds {options.rounds}: at least 1")
    installed = importlib.util.find_spec("tokamax") is not None
    chosen = cases(importlib.import_module("tokamax") if installed else None)
    if options.only:
        starts = tuple(part.strip() for part in options.only.split(","))
        names = ", ".join(case.name for case in chosen)
        chosen = [case for case in chosen if case.name.startswith(starts)]
        if not chosen:
            raise UserError(f"--only {options.only}: no case begins so; cases: {names}")
    device = gpu_here()
    gpu = gpus.find(device)
    todo = [(case, side) for case in chosen for side in case.sides]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        job = lambda t: compiled(t[0].sides[t[1]], t[0].args, peer=t[1] == "tokamax")
        found = dict(zip(((c.name, s) for c, s in todo), pool.map(job, todo), strict=True))
    rows = []
    for case in chosen:
        programs = {side: found[case.name, side] for side in case.sides}
        able = {side: call for side, call in programs.items() if not isinstance(call, str)}
        results = programs | alternate(able, values(case), options.rounds)
        new = [row(case, side, result, gpu) for side, result in results.items()]
        rows += new
        if options.json:
            print("\n".join(map(json.dumps, new)), flush=True)
    if not options.json:
        print(table(rows, device))


if __name__ == "__main__":
    cli.run(main, Options)
