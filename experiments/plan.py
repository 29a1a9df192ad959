"""What a training run needs and does on GPUs: `python -m experiments.plan [CONFIG] [options]`.

    python -m experiments.plan llama-8b --target h200x8
    python -m experiments.plan llama-1b3 --target h200 --batch 4 --remat auto --budget-gib 30
    python -m experiments.plan small --model FOLDER --target h200x8

Takes the options of `experiments.train`, compiles the same training step for GPUs that need
not be here, and reads the program. Sizes and counts are *compiled*, times are *modelled*,
nothing is measured. Needs the extra `target`.
"""

import dataclasses
import json
import sys
from pathlib import Path

import jax

from experiments import cli, configs, fp8, plan_pipeline, pretrained
from experiments.config import ALIASES, TrainConfig, check_options, model_flops, step_config
from experiments.errors import UserError, user_errors
from experiments.fit import check_floor, fit
from experiments.plan_plot import check_picture, draw
from jaxaccel import optim, plan, remat, sharding, target
from jaxaccel.budget import GIB
from jaxaccel.memory import sharded_bytes
from jaxaccel.nn import mtp_shares
from jaxaccel.plan import Analysis, Report
from jaxaccel.target import MAX_GPUS_PER_NODE, MissingExtra, Target
from jaxaccel.timeline import CostModel
from jaxaccel.train_step import TrainStep, abstract_batch, make_train_step

PROG = "python -m experiments.plan"
UNCOVERED_SHOWN = 8
POLICIES_DRAWN = ("none", "selective", "full", "sqrt")


@dataclasses.dataclass(frozen=True)
class PlanConfig(TrainConfig):
    """A training run, planned for GPUs that need not be here."""

    target: str = "h200"
    """GPU, GPUxCOUNT or GPUxNODESxGPUS: a100, h100, h200, b200."""
    json: bool = False
    """Print one JSON object."""
    plot: str = ""
    """Draw memory by policy, the modelled timeline and a pipeline's schedule into this file."""
    advice: bool = True
    """Compile what could help as well, for its predicted saving."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A training step compiled for a target, and what it was made from."""

    config: TrainConfig
    on: Target
    step: TrainStep
    program: jax.stages.Compiled

    @property
    def peak_bytes(self) -> int:
        """Of one device, *compiled*."""
        return plan.peak_bytes(self.program)

    @property
    def stages(self) -> int:
        """Of the mesh."""
        return self.step.batch_sharding.mesh.shape["stage"]

    def analyse(self, name: str) -> Analysis:
        """Reads the program; `name` is the config's."""
        state, config = self.step.abstract_state, self.config
        tokens = config.batch * config.sequence
        return plan.analyse(
            self.program,
            state.params,
            state.opt_state,
            CostModel(self.on),
            config=name,
            model_flops=model_flops(config) * tokens,
            mtp=mtp_shares(config.model, config.sequence, config.mtp),
            trained=optim.trainable(state.params, config.freeze),
            pipeline=plan_pipeline.schedule(config, self.stages),
        )


def build_step(config: TrainConfig, on: Target) -> TrainStep:
    """The training step of `config` on the target's mesh, not compiled yet.

    Raises:
      UserError: mesh, batch and model do not fit the target or one another, or the extra
        `target` is not installed.
    """
    try:
        with user_errors():
            sizes = sharding.parse_mesh(config.mesh, on.count)
            check_options(config, sizes)
            optimizer = optim.make(config.optimizer, config.steps)
            return make_train_step(config.model, optimizer, step_config(config), on.mesh(sizes))
    except MissingExtra as error:
        raise UserError(str(error)) from error


def compile_step(config: TrainConfig, on: Target) -> Compiled:
    """Compiles the training step of `config` for GPUs, without having them.

    Args:
      config: a run's options, precision resolved.
      on: the GPUs.

    Raises:
      UserError: as `build_step`.
    """
    step = build_step(config, on)
    batch = abstract_batch(step, config.batch, config.sequence)
    with user_errors():
        program = on.compile(step.step, step.abstract_state, batch)
    return Compiled(config, on, step, program)


def floor_bytes(config: TrainConfig, on: Target) -> int:
    """Parameters and optimizer state on one device."""
    step = build_step(dataclasses.replace(config, remat="none"), on)
    return sharded_bytes(step.abstract_state)


WHY = {
    "activations": "activations dominate memory",
    "static": "parameters, gradients and optimizer state dominate memory",
    "batch": "a device holds a single sequence",
    "waiting": "the modelled step waits for collectives",
}


def advise(made: Compiled, analysis: Analysis) -> tuple[str, ...]:
    """What could help, each with the saving that a second compile predicts."""
    config, report = made.config, analysis.report
    lines: list[str] = []
    shards = made.step.batch_sharding.mesh.shape
    rows = config.batch // (shards["data"] * shards["fsdp"] * config.micro_batches)
    same = lambda text, **change: (text, dataclasses.replace(config, **change), made.on)
    changes: dict[str, list[tuple[str, TrainConfig, Target]]] = {name: [] for name in WHY}
    if config.remat in ("none", "attention"):
        changes["activations"].append(same("--remat selective", remat="selective"))
    elif config.remat != "full":
        changes["activations"].append(same("--remat full", remat="full"))
    if rows > 1 and rows % 2 == 0:
        parts = 2 * config.micro_batches
        changes["activations"].append(same(f"--micro-batches {parts}", micro_batches=parts))
    if config.precision == "float32":
        changes["static"].append(same("--precision bfloat16", precision="bfloat16"))
    coded: dict[optim.Name, optim.Name] = {"adamw": "adamw-8bit", "lion": "lion-8bit"}
    if name := coded.get(config.optimizer.name):
        optimizer = dataclasses.replace(config.optimizer, name=name)
        changes["static"].append(same(f"--optimizer {name}", optimizer=optimizer))
    twice = 2 * made.on.gpus_per_node
    if not config.mesh and made.on.nodes == 1 and twice <= MAX_GPUS_PER_NODE and rows % 2 == 0:
        wider = dataclasses.replace(made.on, gpus_per_node=twice)
        changes["static"].append((f"--target {wider}", config, wider))
    doubled = {"batch": 2 * config.batch, "micro_batches": 2 * config.micro_batches}
    text = f"--batch {doubled['batch']} --micro-batches {doubled['micro_batches']}"
    changes["batch"].append(same(text, **doubled))
    if config.overlap == "none" and not remat.parse(config.remat)[1]:
        names = plan_pipeline.overlaps(config, shards)
        if names:
            changes["waiting"].append(same(f"--overlap {names}", overlap=names))
    for bottleneck in plan.bottlenecks(report, rows):
        for text, changed, on in changes[bottleneck]:
            other = compile_step(changed, on)
            peak = other.peak_bytes / GIB
            line = (
                f"{WHY[bottleneck]}: {text}: compiled peak {peak:.3g} GiB instead of "
                f"{report.peak_gib:.3g} ({peak - report.peak_gib:+.3g})"
            )
            if bottleneck == "waiting":
                r = other.analyse("").report
                line += (
                    f", modelled step {r.modelled_step_ms:,.1f} ms instead of "
                    f"{report.modelled_step_ms:,.1f}, exposed {r.exposed_fraction:.1%}"
                )
            lines.append(line)
        if not changes[bottleneck]:
            tools = ", ".join(plan.TOOLS[bottleneck])
            lines.append(f"{WHY[bottleneck]}: what helps is {tools}; no option is left to compile")
    return tuple(lines)


def table(report: Report, analysis: Analysis) -> str:
    """The report for people."""
    r = report
    rest = r.temporaries_gib - r.activations_gib - r.gradients_gib
    per_parameter = 4 * r.optimizer_gib / r.parameters_gib  # parameters are float32
    lines = [
        f"{r.config} on {r.target}, each device (compiled):",
        f"  peak memory      {r.peak_gib:9.2f} GiB",
        f"  parameters       {r.parameters_gib:9.2f}",
        f"  optimizer        {r.optimizer_gib:9.2f}   {per_parameter:.2f} bytes a parameter",
        f"  temporaries      {r.temporaries_gib:9.2f}   of these:",
        f"    activations    {r.activations_gib:9.2f}",
        f"    gradients      {r.gradients_gib:9.2f}",
        f"    other          {rest:9.2f}",
        f"  dominant: {r.dominant}",
        "  matmuls: " + ", ".join(f"{k} {v:,.0f}" for k, v in r.matmuls.items() if v),
        f"  recomputed: {r.recompute_flops_fraction:.1%} of matmul FLOP beyond the others",
    ]
    if r.mtp_flops_share:
        lines.append(
            f"  multi-token prediction: {r.mtp_parameters_share:+.1%} parameters, "
            f"{r.mtp_flops_share:+.1%} model FLOP, of the decoder's without the heads"
        )
    for c in r.collectives:
        lines.append(
            f"  {c.kind}: {c.count:,.0f}, {c.bytes / GIB:.2f} GiB, "
            f"{c.hidden_fraction:.0%} hidden (modelled)"
        )
    if r.uncovered:
        sizes = [u.bytes * u.count for u in r.uncovered]
        lines.append(f"  with no matmul beside them (compiled): {sum(sizes) / GIB:.2f} GiB, of it")
        for u, size in list(zip(r.uncovered, sizes))[:UNCOVERED_SHOWN]:
            lines.append(f"    {u.kind}: {u.count:,.0f}, {size / GIB:.3f} GiB, {u.op_name}")
        if (more := len(sizes) - UNCOVERED_SHOWN) > 0:
            lines.append(f"    and {more} smaller ones (--json has all)")
    lines.append(
        f"modelled (data-sheet rates, see jaxaccel.timeline): step {r.modelled_step_ms:,.1f} ms, "
        f"MFU {r.modelled_mfu:.1%}, exposed communication {r.exposed_fraction:.1%}"
    )
    if r.pipeline:
        lines += plan_pipeline.lines(r.pipeline)
    for title, names in (
        ("XLA repeats on its own to fit", analysis.xla_remats),
        ("loops whose trips the program does not fix", analysis.guessed_loops),
        ("kernels of unknown FLOP", analysis.unpriced),
    ):
        if names:
            lines.append(f"note: {title}: {', '.join(names[:5])}")
    return "\n".join([*lines, *(f"advice: {line}" for line in r.advice)])


def main(argv: list[str] | None = None) -> None:
    """Reads the command line and prints the plan."""
    args = list(sys.argv[1:] if argv is None else argv)
    name = args.pop(0) if args and not args[0].startswith("-") else "tiny"

    def program() -> None:
        preset = configs.load(name)
        values = {f.name: getattr(preset, f.name) for f in dataclasses.fields(TrainConfig)}
        start = PlanConfig(**values)
        config = cli.parse(
            PlanConfig, default=start, args=args, prog=f"{PROG} [CONFIG]", aliases=ALIASES
        )
        config = pretrained.with_model(config, start)
        report(name, config)

    cli.exit_with(program, PROG)


def report(name: str, config: PlanConfig) -> None:
    """Compiles, reads and prints one plan."""
    if config.plot:
        check_picture(Path(config.plot))
    with user_errors():
        on = target.parse(config.target)
    if config.precision == "auto":
        config = dataclasses.replace(config, precision="bfloat16")
    limit = on.gpu.visible_bytes if config.budget_gib is None else config.budget_gib * GIB
    if config.remat == "auto":
        found = fit(
            config, lambda c: compile_step(c, on).peak_bytes, limit, floor_bytes(config, on)
        )
        for policy, peak in found.tried.items():
            print(f"tried {policy}: compiled peak {peak / GIB:.2f} GiB", file=sys.stderr)
        print(f"chosen: --remat {found.policy}", file=sys.stderr)
        config = dataclasses.replace(config, remat=found.policy)
    elif config.budget_gib is not None:
        check_floor(floor_bytes(config, on), limit)
    if config.fp8 != "off":
        native = on.gpu.fp8_flops is not None
        on_device = fp8.check_device(config, on.gpu.name, native=native, devices=on.count)
        print("\n".join([fp8.describe(config), *filter(None, [on_device])]), file=sys.stderr)
    made = compile_step(config, on)
    for line in plan_pipeline.few_micro_batches(config, made.stages):
        print(line, file=sys.stderr)
    analysis = made.analyse(name)
    if config.fp8_strict and (lost := analysis.report.matmuls["fp8_lost"]):
        raise UserError(f"{lost:,.0f} FP8 matmuls became wider ones; --fp8-strict refuses that")
    advice = advise(made, analysis) if config.advice else ()
    result = dataclasses.replace(analysis.report, advice=advice)
    if config.budget_gib is not None:
        fits = result.peak_gib <= config.budget_gib
        print(
            f"{'fits' if fits else 'does not fit'} the budget of {config.budget_gib} GiB: compiled "
            f"peak {result.peak_gib:.2f} GiB",
            file=sys.stderr,
        )
    if config.plot:
        bars = [(f"{config.remat}\n(this plan)", analysis.report)]
        for policy in POLICIES_DRAWN:
            if policy != config.remat:
                other = compile_step(dataclasses.replace(config, remat=policy), on)
                bars.append((policy, other.analyse(name).report))
        bars.sort(key=lambda bar: -bar[1].peak_gib)
        limit_gib = on.gpu.visible_bytes / GIB
        draw(Path(config.plot), bars, analysis.timeline, limit_gib, analysis.pipeline)
        print(f"picture: {config.plot}", file=sys.stderr)
    print(json.dumps(result.to_json()) if config.json else table(result, analysis))


if __name__ == "__main__":
    main()
