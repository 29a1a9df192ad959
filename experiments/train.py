"""Trains a language model: `python -m experiments.train [CONFIG] [options]`.

CONFIG is a preset (tiny by default); any option overrides it. Running the same command
again resumes. `--help` lists the options, `--dry-run` shows what would be trained. Several
processes train one model where a cluster starts them, or --coordinator tells them so
(`experiments.cluster`).
"""

import dataclasses
import errno
import math
import pprint
import re
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from experiments import (
    checkpoint,
    cli,
    cluster,
    configs,
    data,
    fit,
    fp8,
    generate,
    manifest,
    metrics,
    pretrained,
    run,
)
from experiments import tokenizer as tokenizers
from experiments.allocator import keep_freed_memory
from experiments.config import ALIASES, TrainConfig, check_options, model_flops, step_config
from experiments.errors import RunStopped, UserError, user_errors
from experiments.eval import mean_loss
from experiments.group import Group
from experiments.plan_pipeline import few_micro_batches
from experiments.rows import OwnRows
from experiments.runlog import RunLog, plot_losses
from experiments.watch import Clock, Profile, StopRequest
from experiments.watchdog import Watchdog
from jaxaccel import optim, precision, sharding
from jaxaccel.budget import GIB
from jaxaccel.decode import Sampling
from jaxaccel.fp8 import is_cold
from jaxaccel.memory import sharded_bytes
from jaxaccel.nn import parameter_count
from jaxaccel.plan import peak_bytes
from jaxaccel.train_step import StepMetrics, TrainStep, abstract_batch, make_train_step

PROG = "python -m experiments.train"


def main(argv: list[str] | None = None) -> None:
    """Reads the command line, trains, and exits: 0 done, 2 bad input, 1 stopped."""
    args = list(sys.argv[1:] if argv is None else argv)
    name = args.pop(0) if args and not args[0].startswith("-") else "tiny"
    keep_freed_memory()

    def program() -> int:
        preset = configs.load(name)
        config = cli.parse(
            TrainConfig, default=preset, args=args, prog=f"{PROG} [CONFIG]", aliases=ALIASES
        )
        config = pretrained.with_model(config, preset)
        try:
            with cluster.join(config, PROG, explain) as group:
                return train(name, config, group)
        except Exception as error:
            if (known := explain(error)) is None:
                raise
            print(f"{PROG}: {known[0]}", file=sys.stderr)
            return known[1]

    cli.exit_with(program, PROG)


def explain(error: BaseException) -> tuple[str, int] | None:
    """Line and exit status of what needs no traceback; None of everything else."""
    if isinstance(error, RunStopped | checkpoint.SaveError):
        return str(error), 1
    if isinstance(error, UserError):
        return str(error), 2
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.strerror}; checkpoints so far are kept", 1
    return ("interrupted", 130) if isinstance(error, KeyboardInterrupt) else None


def train(name: str, config: TrainConfig, group: Group) -> int:
    """One run from its options to its summary; returns the exit status.

    All of `group` do the same, in step. Process 0 alone writes and prints, but for checkpoints.
    """
    started = time.monotonic()

    # ---- Devices, precision, mesh -------------------------------------------------------
    devices, own_device = jax.devices(), jax.local_devices()[0]
    if config.precision == "auto":
        chosen = "float32" if devices[0].platform == "cpu" else "bfloat16"
        config = dataclasses.replace(config, precision=chosen)
    folder = Path(config.run_dir or f"runs/{name}")
    config = dataclasses.replace(config, run_dir=str(folder))
    with user_errors():
        sizes = sharding.parse_mesh(config.mesh, len(devices))
    check_options(config, sizes)
    notes = []
    if config.fp8 != "off":
        native = fp8.is_native(devices[0])
        on_device = fp8.check_device(
            config, devices[0].device_kind, native=native, devices=len(devices)
        )
        notes = [fp8.describe(config), *filter(None, [on_device])]
    notes += few_micro_batches(config, sizes["stage"])
    if config.dry_run:
        tree = dataclasses.asdict(config)
        print(pprint.pformat(tree, sort_dicts=False, width=100, compact=True))
        print("\n".join([describe(config, sizes), *notes]))
        return 0

    # ---- Tokenizer and text -------------------------------------------------------------
    tokenizer = tokenizers.load(config.data.tokenizer)
    pretrained.check_vocabulary(tokenizer, config.model, config.init_from)
    saved_fp8 = config.fp8
    if (folder / "config.json").exists():
        saved_fp8 = run.check_same(folder, config, tokenizer).fp8
    corpus = data.load_corpus(config.data, tokenizer)
    if group.count > 1:
        group.agree({"tokenizer": tokenizer.fingerprint} | corpus.facts(), "text")
    mesh = sharding.make_mesh(sizes, devices)
    own = OwnRows(sharding.batch_sharding(mesh), config.batch, config.sequence)
    shape = {"batch": config.batch, "sequence": config.sequence, "rows": own.numbers}
    batches = data.train_iterator(corpus, **shape, seed=config.seed)

    # ---- The step -----------------------------------------------------------------------
    rate = optim.schedule(config.optimizer, config.steps)

    def build(config: TrainConfig) -> TrainStep:
        optimizer = optim.make(config.optimizer, config.steps)
        with user_errors():
            return make_train_step(config.model, optimizer, step_config(config), mesh)

    def peak_of(config: TrainConfig) -> int:
        made = build(config)
        batch = abstract_batch(made, config.batch, config.sequence)
        return peak_bytes(made.step.lower(made.abstract_state, batch).compile())

    limits = group.exchange("memory limit", fit.memory_limit(config, own_device))
    limit = min((limit for limit in limits if limit is not None), default=None)
    if config.remat == "auto":
        if limit is None:
            raise UserError("--remat auto needs --budget-gib here: the device states no limit")
        state_bytes = sharded_bytes(build(dataclasses.replace(config, remat="none")).abstract_state)
        fitted = fit.fit(config, peak_of, limit, state_bytes)
        tried = (f"{name} {peak / GIB:.3g} GiB" for name, peak in fitted.tried.items())
        print(f"--remat auto: {fitted.policy}, of these compiled: {', '.join(tried)}")
        config = dataclasses.replace(config, remat=fitted.policy)
        group.agree({"--remat auto": config.remat}, "what fits")
    step = build(config)
    if devices[0].platform == "cpu" and re.search(r"\boffload\b|@host\b", config.remat):
        raise UserError(
            f"--remat {config.remat} offloads to host memory, and a CPU has none apart: choose full"
        )

    # ---- Resume or begin ----------------------------------------------------------------
    checkpoints = checkpoint.Checkpoints(folder / "checkpoints", keep=config.keep, group=group)
    restored = None
    if config.resume != "never":
        restored = fp8.restore(checkpoints, step.abstract_state, saved_fp8, config.fp8)
    if config.resume == "never" and checkpoints.latest is not None:
        raise UserError(f"{folder} has checkpoints and --resume is never: choose another --run-dir")
    if restored is None and any(checkpoints.folder.glob("*[0-9]")):
        raise UserError(
            f"no checkpoint in {checkpoints.folder} is whole: choose another --run-dir, or remove "
            "that folder to begin anew"
        )
    if config.resume == "must" and restored is None:
        raise UserError(f"{folder} has no whole checkpoint and --resume is must")
    weights = pretrained.find(config) if restored is None else None
    if restored is None:
        key = jax.random.key(config.seed)
        state, first = step.init(key, pretrained.load(weights, mesh)), 0
    else:
        state, first = restored.state, restored.step
        batches.set_state(restored.data_state)
    if first >= config.steps:
        print(
            f"{folder} is already at step {first} of {config.steps}: raise --steps to go on, "
            "or choose another --run-dir for a new run"
        )
        return 0

    # ---- Train --------------------------------------------------------------------------
    peak = metrics.peak_flops(own_device, precision.COMPUTE_DTYPES[config.precision])
    flops = model_flops(config)
    profile = Profile(config.profile if group.first else "", folder / "profile")
    stop = StopRequest(config.time_limit)
    log = RunLog(
        folder if group.first else None,
        total_steps=config.steps,
        resume_step=first,
        tensorboard=config.tensorboard,
        wandb_project=config.wandb_project,
    )
    try:
        if group.first:
            run.write_config(folder, config, tokenizer)
            pretrained.keep_origin(folder, config)
            environment = metrics.environment() | {"compiler_options": step.compiler_options}
            manifest.write_json(folder / "env.json", environment)
    except OSError as error:
        raise UserError(f"cannot write run folder {folder}: {error}") from error
    group.check_shared(folder / "env.json")
    group.folder = folder

    def program() -> str:
        batch = abstract_batch(step, config.batch, config.sequence)
        return step.step.lower(step.abstract_state, batch).compile().as_text() or ""

    watchdog = Watchdog(config.hang_timeout, folder, group, program)
    with checkpoints, stop, log, watchdog:
        log.message("\n".join([describe(config, sizes), *notes]))
        log.message(describe_corpus(corpus, tokenizer))
        log.message(f"{metrics.MFU_CONVENTION}; peak {peak.flops:.3g} FLOP/s: {peak.source}")
        if first:
            log.message(f"resumed at step {first}")
        if weights is not None:
            log.message(pretrained.describe(config, weights))
        clock, final_loss = Clock(), math.nan
        cold = bool(is_cold(state.fp8))

        def settle(done: int, figures: StepMetrics, documents, val_loss: float | None = None):
            """Logs a finished step, and stops a run whose gradients stay non-finite."""
            nonlocal cold
            jax.block_until_ready(figures)
            watchdog.mark(f"step {done}")
            cold = cold or (config.fp8 == "delayed" and int(figures.skipped_in_row) > 0)
            if int(figures.skipped_in_row) >= config.max_skipped:
                raise RunStopped(
                    f"{config.max_skipped} steps in a row had non-finite gradients, the last is "
                    f"step {done}; its documents: {some(corpus.describe(documents))}; "
                    f"last good checkpoint: {last_checkpoint(checkpoints)}"
                )
            if done % config.log_every and val_loss is None and done != config.steps:
                return
            steps_per_second = clock.rate(done)
            speed = steps_per_second and steps_per_second * config.batch * config.sequence
            log.log(
                {
                    "step": done,
                    "loss": float(figures.loss),
                    "val_loss": val_loss,
                    "grad_norm": float(figures.grad_norm),
                    "learning_rate": float(jnp.asarray(rate(done - 1 - int(figures.skipped)))),
                    "tokens_per_second": speed,
                    "mfu": speed and speed * flops / (peak.flops * len(devices)),
                    "peak_memory_gib": metrics.peak_memory_gib(own_device),
                    "skipped_steps": int(figures.skipped),
                    "loss_scale": float(figures.loss_scale),
                    "fp8_skipped": int(figures.fp8_skipped),
                    **{f"mtp_loss_{k}": float(x) for k, x in enumerate(figures.mtp_losses, 1)},
                }
            )

        # A step's figures are read after the next one is under way: the device never waits.
        pending = None
        done = first
        while done < config.steps:
            profile.before(done + 1)
            batch = next(batches)
            try:
                placed = own.place(batch)
                if cold:  # FP8 scales that are not known yet, from the batch at hand
                    state, cold = step.warm_up(state, placed), False
                state, figures = step.step(state, placed)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error) or done > first:
                    raise
                rows = config.batch // (sizes["data"] * sizes["fsdp"] * config.micro_batches)
                changes = fit.changes_that_fit(config, peak_of, limit or math.inf, rows)
                raise RunStopped(
                    f"out of memory: {str(error).splitlines()[0]}; what would fit: "
                    f"{'; '.join(changes) or 'nothing that was tried'}"
                ) from error
            done += 1
            if pending:
                settle(*pending)
            pending = done, figures, batch["documents"]
            if profile.after(done, figures):
                log.message(f"profile of steps {config.profile} in {folder / 'profile'}")
            if done == first + 1:
                jax.block_until_ready(figures)
                log.message(f"first step, compilation included: {clock.start(done):.1f} s")

            reason = group.stop(done, stop.reason)
            evaluating = done % config.eval_every == 0 or done == config.steps
            # Not amid non-finite gradients: such a checkpoint would push out a good one.
            due = done % config.save_every == 0 and not int(figures.skipped_in_row)
            saving = due or done == config.steps or reason
            if evaluating or saving:
                jax.block_until_ready(figures)
                with clock.paused():
                    val_loss = None
                    if evaluating:
                        held_out = data.validation_batches(
                            corpus, **shape, limit=config.eval_batches
                        )
                        held_out = watchdog.marked(held_out, "validation batch")
                        final_loss = val_loss = mean_loss(step, state.params, held_out, own.place)[
                            0
                        ]
                settle(*pending, val_loss)
                pending = None
                if saving:
                    with clock.paused():
                        checkpoints.save(done, state, batches.get_state())
                    watchdog.mark(f"save of step {done}")
            if reason:
                log.message(f"{reason}: saving at step {done}; the same command goes on from there")
                break
        profile.close()
        checkpoints.wait()
    if not group.first:
        return 0
    plot_losses(folder)
    if done < config.steps:
        return 0

    # ---- Summary ------------------------------------------------------------------------
    decoder = run.load_run(folder).decoder(dtype=precision.COMPUTE_DTYPES[config.precision])
    room = config.sequence - len(generate.prompt_ids(tokenizer, config.sample_prompt))
    sample = generate.complete(
        decoder,
        tokenizer,
        config.sample_prompt,
        max_new_tokens=max(0, min(256, room)),
        sampling=Sampling(temperature=0.8, seed=config.seed),
    )
    (folder / "sample.txt").write_text(sample, encoding="utf-8")
    print(f"\nA sample, continuing {config.sample_prompt!r}:\n\n{sample}\n")
    count, tokens = parameter_count(config.model, config.mtp), config.batch * config.sequence
    seconds, per_byte = time.monotonic() - started, final_loss / corpus.bytes_per_token
    print(
        f"Trained {count:,} parameters for {done - first} steps "
        f"({(done - first) * tokens:,} tokens) in {seconds:.0f} s.\n"
        f"Validation loss {final_loss:.4f} nats per token, {per_byte:.4f} nats "
        f"({per_byte / math.log(2):.4f} bits) per byte.\n"
        f"All of it is in {folder}: metrics.jsonl, loss.png, sample.txt, config.json, env.json, "
        f"checkpoints/{checkpoints.path(done).name}.\n"
        f'Next: python -m experiments.generate --run {folder} --prompt "{config.sample_prompt}"'
        + (" --speculative" if config.mtp.depth else "")
    )
    return 0


def describe(config: TrainConfig, sizes: dict[str, int]) -> str:
    """What the options come to."""
    count = parameter_count(config.model, config.mtp)
    flops = model_flops(config)
    tokens = config.batch * config.sequence
    mesh = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    return (
        f"{count:,} parameters; {tokens:,} tokens a step; {flops:.4g} FLOP a token; "
        f"{config.optimizer.name}; {config.precision}; mesh {mesh}"
    )


def describe_corpus(corpus: data.Corpus, tokenizer: tokenizers.Tokenizer) -> str:
    """How much text there is."""
    train, held_out = corpus.train, corpus.validation
    return (
        f"text: {train.tokens:,} tokens of {train.documents:,} documents to train on, "
        f"{held_out.tokens:,} of {held_out.documents:,} held out; tokenizer {tokenizer.name}"
    )


def last_checkpoint(checkpoints: checkpoint.Checkpoints) -> str:
    """Where the newest checkpoint lies, in words; one that is being written counts."""
    checkpoints.wait()
    latest = checkpoints.latest
    return "none" if latest is None else str(checkpoints.path(latest))


def some(names: list[str], most: int = 8) -> str:
    """The first of `names`, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


if __name__ == "__main__":
    main()
