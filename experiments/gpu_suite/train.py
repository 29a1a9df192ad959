"""The GPU suite's training steps and its decoding, as they run and as they are planned.

The step is that of `llama-1b3` at 65,536 tokens, everything recomputed, on synthetic tokens: the
words of a Zipf distribution, which a model learns to weigh within a few steps. The same batch
every time, so the loss must fall. Decoding has random weights and a head that was never trained:
its drafts are refused, and what counts is what a pass costs.
"""

import dataclasses
import functools
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments import configs, metrics
from experiments.config import TrainConfig, model_flops, step_config
from experiments.gpu_suite import records as records
from experiments.gpu_suite.cases import DECODE, STEPS, TARGETS
from jaxaccel import decode, optim, plan, precision, sharding
from jaxaccel.fp8 import is_cold
from jaxaccel.nn import Decoder, MtpConfig, parameter_count
from jaxaccel.optim import OptimizerConfig
from jaxaccel.sampling import Sampling
from jaxaccel.train_step import abstract_batch, make_train_step
from pallas_kernels import gpus

GIB = 2**30
WARM_UPS, TIMED = 2, 8


def train_config(case: str, fake: bool) -> TrainConfig:
    """The step of a case of `STEPS`."""
    config = configs.load("tiny" if fake else "llama-1b3")
    if fake:
        model = dataclasses.replace(config.model, layers=2, width=64, mlp_width=128)
        config = dataclasses.replace(config, model=model, batch=2, sequence=32)
    # No warm-up: a rate that begins at nothing would leave the loss as it is.
    optimizer = OptimizerConfig(learning_rate=3e-4, schedule="constant", warmup_steps=0)
    fp8, optimizer_name = STEPS[case]
    return dataclasses.replace(
        config,
        precision="bfloat16",
        remat="full",
        fp8=fp8,
        optimizer=dataclasses.replace(optimizer, name=optimizer_name),
    )


def tokens(config: TrainConfig) -> dict[str, np.ndarray]:
    """A batch of synthetic rows, one document each."""
    shape = config.batch, config.sequence + 1
    chance = 1 / np.arange(1, config.model.vocab_size + 1)
    rng = np.random.default_rng(0)
    drawn = rng.choice(len(chance), size=shape, p=chance / chance.sum()).astype(np.int32)
    row = np.arange(config.sequence, dtype=np.int32)
    return {
        "tokens": drawn[:, :-1],
        "labels": drawn[:, 1:],
        "segments": np.ones_like(drawn[:, 1:]),
        "positions": np.broadcast_to(row, (config.batch, config.sequence)).copy(),
    }


def train(case: str, fake: bool) -> int:
    """Compiles the step, takes some, and says how long each took."""
    config, device = train_config(case, fake), jax.devices()[0]
    mesh = sharding.make_mesh(sharding.parse_mesh("", 1), [device])
    phase = lambda name, **more: records.write("phase", name=name, **more)
    memory = lambda when: phase("memory", when=when, peak_gib=metrics.peak_memory_gib(device))
    limit = (device.memory_stats() or {}).get("bytes_limit")
    peak = metrics.peak_flops(device, jnp.bfloat16)
    flops = model_flops(config) * config.batch * config.sequence
    phase(
        "model",
        parameters=parameter_count(config.model, config.mtp),
        tokens=config.batch * config.sequence,
        model_flops=flops,
        peak_flops=peak.flops,
        peak_source=peak.source,
        bytes_limit=limit,
    )

    def build(config: TrainConfig) -> tuple[Any, dict[str, Any], dict[str, float]]:
        """The step and its programs, compiled at the same time."""
        step = make_train_step(
            config.model, optim.make(config.optimizer, 1000), step_config(config), mesh
        )
        state, batch = step.abstract_state, abstract_batch(step, config.batch, config.sequence)
        lowered = {"step": step.step.lower(state, batch)}
        if config.fp8 == "delayed":
            lowered["warm_up"] = step.warm_up.lower(state, batch)
        lowered["init"] = jax.jit(step.init).lower(jax.random.key(0))

        def compile_(name: str) -> tuple[Any, float]:
            start = time.perf_counter()
            return lowered[name].compile(), time.perf_counter() - start

        with ThreadPoolExecutor(len(lowered)) as pool:
            made = dict(zip(lowered, pool.map(compile_, lowered)))
        return step, {k: v[0] for k, v in made.items()}, {k: v[1] for k, v in made.items()}

    phase("compiling")
    step, programs, spent = build(config)
    needed = plan.peak_bytes(programs["step"])
    parts = 1
    while limit and needed > limit and parts < config.batch:  # a smaller GPU than planned for
        parts *= 4
        step, programs, spent = build(dataclasses.replace(config, micro_batches=parts))
        needed = plan.peak_bytes(programs["step"])
    phase(
        "compiled",
        seconds=spent,
        peak_gib=needed / GIB,
        warm_up_peak_gib="warm_up" in programs and plan.peak_bytes(programs["warm_up"]) / GIB,
        micro_batches=parts,
    )
    state = jax.block_until_ready(programs["init"](jax.random.key(0)))
    memory("parameters drawn")
    batch = step.place(tokens(config))
    if "warm_up" in programs and bool(is_cold(state.fp8)):
        state = jax.block_until_ready(programs["warm_up"](state, batch))
        memory("FP8 scales found")
    losses: list[float] = []
    for number in range(WARM_UPS + (TIMED // 2 if fake else TIMED)):
        start = time.perf_counter()
        state, figures = jax.block_until_ready(programs["step"](state, batch))
        seconds = time.perf_counter() - start
        records.write(
            "step",
            number=number,
            seconds=seconds,
            timed=number >= WARM_UPS,
            loss=float(figures.loss),
            grad_norm=float(figures.grad_norm),
            skipped=int(figures.skipped),
        )
        losses.append(float(figures.loss))
    memory("steps taken")
    if fault := fault_of(losses):
        print(fault, file=sys.stderr)
    return int(bool(fault))


def fault_of(losses: list[float]) -> str:
    """What is wrong with the losses of steps on one batch; empty: nothing."""
    if not np.isfinite(losses).all():
        return f"a loss is not finite: {losses}"
    if not losses[-1] < losses[0]:
        return f"the loss of one batch, again and again, did not fall: {losses}"
    return ""


def decode_speed(fake: bool) -> int:
    """Plain and speculative decoding of `llama-1b3` with random weights, greedily."""
    config = train_config("bf16", fake)
    new = 24 if fake else 256
    rng = np.random.default_rng(0)
    make = lambda: Decoder(
        config.model,
        mtp=MtpConfig(depth=1),
        dtype=precision.COMPUTE_DTYPES["bfloat16"],
        rngs=nnx.Rngs(0),
    )
    decoder = jax.block_until_ready(jax.jit(make)())
    cast = lambda path, x: x if "scale" in jax.tree_util.keystr(path) else x.astype(jnp.bfloat16)
    decoder = jax.jit(lambda d: jax.tree_util.tree_map_with_path(cast, d))(decoder)
    # Of the embedding a token reads a row; a plain pass reads no head that predicts further ahead.
    read = sum(
        x.nbytes
        for path, x in jax.tree_util.tree_leaves_with_path(decoder)
        if not jax.tree_util.keystr(path).startswith((".embedding", ".heads"))
    )
    gpu = gpus.find(jax.devices()[0].device_kind)
    bound = gpu and 1e3 * read / gpu.memory_bandwidth
    records.write("decoder", read_gb=read / 1e9, new_tokens=new, bound_ms=bound)

    def once(prompts: list[Any], gamma: int) -> dict[str, Any]:
        """One generation; the first burst holds the prompt's time."""
        start, marks, bursts = time.perf_counter(), [], []
        for burst in decode.stream(
            decoder, prompts, max_new_tokens=new, sampling=Sampling(0.0), gamma=gamma
        ):
            marks.append(time.perf_counter())
            bursts.append(burst)
        made = sum(len(row) for burst in bursts for row in burst.tokens)
        later = [len(row) for burst in bursts[1:] for row in burst.tokens]
        passes = sum(burst.passes for burst in bursts[1:])
        between = marks[-1] - marks[0]
        return {
            "seconds": marks[-1] - start,
            "tokens": made,
            "tokens_per_second": sum(later) / between if later and between else None,
            "ms_per_pass": 1e3 * between / passes if passes else None,
            "tokens_per_pass": sum(later) / passes / len(prompts) if passes else None,
            "text": [token for burst in bursts for token in burst.tokens[0]],
        }

    names = [name for name in DECODE if name not in records.skipped()][: 2 if fake else None]
    prompts = {
        name: [np.arange(32), *(rng.integers(config.model.vocab_size, size=(7, 32)))][
            : DECODE[name][0]
        ]
        for name in names
    }
    texts: dict[int, list[int]] = {}

    @functools.cache
    def first_runs(pair: tuple[str, ...]) -> dict[str, float]:
        """Compiles two at a time, since each takes long."""
        job = lambda name: once(prompts[name], DECODE[name][1])["seconds"]
        with ThreadPoolExecutor(len(pair)) as pool:
            return dict(zip(pair, pool.map(job, pair)))

    def measure(name: str) -> None:
        rows, gamma = DECODE[name]
        start = names.index(name) // 2 * 2
        compiling = first_runs(tuple(names[start : start + 2]))[name]
        runs = [once(prompts[name], gamma) for _ in range(3)]
        middle = lambda key: statistics.median(found) if (found := [
            run[key] for run in runs if run[key] is not None
        ]) else None  # fmt: skip
        same = None
        if rows == 1:
            texts[gamma] = runs[0]["text"]
            same = texts[gamma] == texts[0] if gamma and 0 in texts else None
        records.write(
            "decode",
            name=name,
            rows=rows,
            gamma=gamma,
            first_run_seconds=compiling,
            same_text_as_plain=same,
            **{k: middle(k) for k in ("tokens_per_second", "ms_per_pass", "tokens_per_pass")},
        )

    return records.each([(name, functools.partial(measure, name)) for name in names])


def make_plan(file: Path) -> None:
    """Compiles the steps for GPUs that are not here, and writes what the suite reports beside.

    Raises:
      UserError: the extra `target` is not installed.
    """
    from experiments import plan as plans  # needs packages that a GPU's machine may lack
    from jaxaccel import target

    rows = []
    for gpu in TARGETS:
        for case in STEPS:
            config = train_config(case, fake=False)
            start = time.perf_counter()
            made = plans.compile_step(config, target.parse(gpu))
            report = made.analyse("llama-1b3").report
            rows.append(
                {
                    "step": case,
                    "target": gpu,
                    "compiled_peak_gib": report.peak_gib,
                    "modelled_step_ms": report.modelled_step_ms,
                    "modelled_mfu": report.modelled_mfu,
                    "matmuls": report.matmuls,
                    "tokens": config.batch * config.sequence,
                }
            )
            print(
                f"{gpu} {case}: compiled peak {report.peak_gib:.2f} GiB, modelled "
                f"{report.modelled_step_ms:,.0f} ms ({time.perf_counter() - start:.0f} s)",
                flush=True,
            )
    facts = metrics.environment()
    keep = ("time", "python", "versions", "git_commit", "git_dirty")
    made_by = {key: facts[key] for key in keep} | {
        "command": "python -m experiments.gpu_suite --plan"
    }
    file.write_text(json.dumps({"made_by": made_by, "rows": rows}, indent=1) + "\n")
    print(file)
