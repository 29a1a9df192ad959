"""One stage of the GPU suite, in a process of its own; `experiments.gpu_suite` starts it.

    GPU_SUITE_RECORDS=FILE python -m experiments.gpu_suite.child card|kernels|attention [--fake]
    GPU_SUITE_RECORDS=FILE python -m experiments.gpu_suite.child train bf16|fp8|full-stack [--fake]
    GPU_SUITE_RECORDS=FILE python -m experiments.gpu_suite.child decode [--fake]

What it finds it writes as records (`experiments.gpu_suite.records`). With --fake everything is so
small that a CPU does it in seconds.
"""

import functools
import itertools
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from experiments.allocator import keep_freed_memory
from experiments.gpu_suite import records as records

ROUNDS = 5


def card(fake: bool) -> int:
    """What JAX sees; a small kernel of XLA's and one of cuBLAS' run."""
    import jax
    import jax.numpy as jnp
    from jax.extend import backend

    from experiments import metrics
    from pallas_kernels import gpus

    device = jax.devices()[0]
    if not fake and device.platform == "cpu":
        raise RuntimeError("JAX found no GPU and runs on the CPU")
    gpu = gpus.find(device.device_kind)
    cuda = [os.environ.get(name) for name in ("CUDA_ROOT", "MOSAIC_GPU_CUDA_ROOT")]
    records.write(
        "card",
        platform=device.platform,
        device_kind=device.device_kind,
        devices=len(jax.devices()),
        gpu=gpu and gpu.name,
        hopper=any(kind in device.device_kind for kind in hopper()),
        compute_capability=str(getattr(device, "compute_capability", "")),
        platform_version=str(backend.get_backend().platform_version),
        memory_stats={k: v for k, v in (device.memory_stats() or {}).items() if "bytes" in k},
        cuda_root=next(filter(None, cuda), None),
        environment=metrics.environment() | {"command": None},
    )
    x = jax.random.normal(jax.random.key(0), (256, 256), jnp.bfloat16)
    total = float(jnp.abs(jax.jit(lambda x: x @ x)(x)).sum())
    if not total > 0:
        raise RuntimeError(f"a matmul of random numbers summed to {total}")
    return 0


def hopper() -> tuple[str, ...]:
    """Device kinds that the kernels are for."""
    from pallas_kernels.dispatch import HOPPER

    return HOPPER


def without_kernels() -> None:
    """Lets every op of this process take XLA's form."""
    from pallas_kernels import dispatch

    vars(dispatch)["HOPPER"] = ()


def in_groups(
    todo: list[Any], first: list[int], programs: Callable[[Any], dict[Any, Callable[[], Any]]]
) -> Callable[[Any], dict[Any, Any]]:
    """Compiles cases group by group, in threads; nothing is timed while others compile, and tune.

    Args:
      todo: all cases.
      first: sizes of the first groups; the last holds the rest.
      programs: of a case: keys, and what compiles each.

    Returns:
      A function of a case that gives what its programs' compilers gave.
    """
    bounds = [0, *itertools.accumulate(first)]
    groups = [todo[a:b] for a, b in itertools.pairwise([*bounds, len(todo)])]

    @functools.cache
    def group(number: int) -> list[dict[Any, Any]]:
        jobs = [programs(case) for case in groups[number]]
        flat = [job for case in jobs for job in case.values()]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            made = iter(list(pool.map(lambda job: job(), flat)))
        return [{key: next(made) for key in case} for case in jobs]

    def find(case: Any) -> dict[Any, Any]:
        number = next(i for i, cases in enumerate(groups) if case in cases)
        return group(number)[groups[number].index(case)]

    return find


def program(bench: Any, *args: Any, **options: Any) -> Callable | str:
    """What a benchmark compiles, or in a line why there is nothing, whatever the reason."""
    try:
        return bench.compiled(*args, **options)
    except Exception as error:
        return records.brief(error)


def own(programs: dict[str, Callable | str]) -> None:
    """A failure of our own is one; another library's limit is a result."""
    for side in ("ours", "xla"):
        if isinstance(why := programs.get(side), str):
            raise RuntimeError(f"{side}: {why}")


def kernels(fake: bool) -> int:
    """Every case of `experiments.bench.kernels`, and what the card reaches with plain programs."""
    from experiments.bench import kernels as bench
    from experiments.bench.attention import alternate
    from pallas_kernels import gpus

    if fake:
        for name in ("ROWS", "WIDTH", "MLP", "TOKENS", "NARROW", "WORDS"):
            vars(bench)[name] = 256
    import jax

    gpu = gpus.find(jax.devices()[0].device_kind)
    first = ("fp8_matmul", "cross_entropy", "add_rms_norm", "swiglu")
    place = lambda case: next(i for i, start in enumerate(first) if case.name.startswith(start))
    todo = sorted(bench.cases(), key=place)
    todo = [case for case in todo if case.name not in records.skipped()]

    def programs_of(case: Any) -> dict[str, Callable]:
        make = lambda side: program(bench, case.sides[side], case.args, peer=False)
        return {side: functools.partial(make, side) for side in case.sides}

    found = in_groups(todo, [4], programs_of)

    def measure(case: Any) -> None:
        programs = found(case)
        able = {side: call for side, call in programs.items() if not isinstance(call, str)}
        results = programs | alternate(able, bench.values(case), 2 if fake else ROUNDS)
        for side, result in results.items():
            records.write("kernel", row=bench.row(case, side, result, gpu))
        own(programs)

    return records.each(
        [
            ("ceilings", lambda: ceilings(fake)),
            *((case.name, functools.partial(measure, case)) for case in todo),
        ]
    )


def ceilings(fake: bool) -> None:
    """What plain XLA programs reach on this card: a copy, matmuls in bfloat16 and in FP8."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    from experiments.bench.attention import alternate

    n = 256 if fake else 8192
    a, b = jax.random.normal(jax.random.key(0), (2, n, n), jnp.bfloat16)
    big = jax.random.normal(jax.random.key(1), (2**16 if fake else 2**30,), jnp.bfloat16)
    a8, b8 = a.astype(jnp.float8_e4m3fn), b.astype(jnp.float8_e4m3fn)
    one = jnp.float32(1)
    # In the form that XLA turns into a matmul of cuBLASLt with FP8 operands: scaled, A times B^T.
    wide = lambda x, scale: x.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16)
    contract = (((1,), (1,)), ((), ()))
    product = lambda x, y: lax.dot_general(x, y, contract)
    cases = {
        "copy": (lambda x: x + jnp.bfloat16(1), (big,), 2 * big.nbytes / 1e9, "GB/s"),
        "bf16 matmul": (product, (a, b), 2 * n**3 / 1e12, "TFLOP/s"),
        "fp8 matmul": (
            lambda x, y, s: product(wide(x, s), wide(y, s)),
            (a8, b8, one),
            2 * n**3 / 1e12,
            "TFLOP/s",
        ),
    }
    for name, (call, args, work, unit) in cases.items():
        compiled = jax.jit(call).lower(*args).compile()
        times = alternate({name: compiled}, args, 2 if fake else ROUNDS)
        note = "plain XLA program, " + (f"{n}^3" if "matmul" in name else f"{2 * big.size:,} bytes")
        if name == "fp8 matmul" and "matmul$f8" not in (compiled.as_text() or ""):
            note += ", in a wider type: not cuBLASLt's FP8"
        records.write("ceiling", name=name, value=work / times[name], unit=unit, note=note)


def attention(fake: bool) -> int:
    """Cases of `experiments.bench.attention`, those that matter most first."""
    import jax

    from experiments.bench import attention as bench
    from pallas_kernels import gpus

    if fake:
        small = {"TOKENS": 128, "WIDTH": 128, "DOCUMENT": 32, "WINDOW": 16}
        vars(bench).update(small, LENGTHS=(64, 128), HEAD_SIZES=(64,))
    gpu = gpus.find(jax.devices()[0].device_kind)
    peak = gpu.bf16_flops if gpu else None
    length = 64 if fake else 8192
    todo = bench.cases(length)
    if fake:
        todo = todo[:1]
    else:  # llama-1b3's own first, then a line of each mask, then the rest
        masks = [bench.Case(mask, length, 128) for mask in bench.MASKS]
        todo = list(dict.fromkeys([bench.Case("causal", 4096, 64), *masks, *todo]))
    name = lambda case: f"{case.mask} {case.length} x {case.head_size}"
    todo = [case for case in todo if name(case) not in records.skipped()]
    sides = [side for side in bench.SIDES if side != "tokamax"]

    def programs_of(case: Any) -> dict[tuple[bool, str], Callable]:
        make = lambda backward, side: program(bench, side, case, backward)
        keys = [(backward, side) for backward in (False, True) for side in sides]
        return {key: functools.partial(make, *key) for key in keys}

    found = in_groups(todo, [2, 3], programs_of)

    def measure(case: Any) -> None:
        made = found(case)
        programs = {
            backward: {side: made[backward, side] for side in sides} for backward in (False, True)
        }
        for row in bench.measure(case, programs, 2 if fake else ROUNDS, peak):
            records.write("attention", row=row)
        for group in programs.values():
            own(group)

    return records.each([(name(case), functools.partial(measure, case)) for case in todo])


def main(argv: list[str]) -> int:
    """Runs the stage that the command line names."""
    records.die_with_parent()
    fake = "--fake" in argv
    names = [word for word in argv if not word.startswith("--")]
    keep_freed_memory()
    if os.environ.get(records.KERNELS) == "off":
        without_kernels()
    if names[0] in ("train", "decode"):
        from experiments.gpu_suite import train

        if names[0] == "train":
            return train.train(names[1], fake)
        return train.decode_speed(fake)
    stages = {"card": card, "kernels": kernels, "attention": attention}
    return stages[names[0]](fake)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
