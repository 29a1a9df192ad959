"""What each technique of `--overlap` hides of a training step, beside XLA left to itself.

    python -m experiments.bench.overlap --target h200x8 [--json] [--only fsdp,data] [--plot DIR]

Compiles training steps for GPUs that need not be there; nothing is run. Needs the extra
`target`. The sides of a group differ in `--overlap` alone: same model, mesh, batch, bfloat16,
rematerialisation. `none` is the step that XLA's partitioner makes.

  modelled   step, and the share of it in which the compute stream waits: the compiled schedule
             played against data-sheet rates (`jaxaccel.timeline`). Sent: time of all transfers,
             hidden or not. Kernels are not slowed by transfers beside them.
  compiled   windows: collectives with a matmul issued between their start and their done, of
             all, counted as often as they run, scalars among them (`jaxaccel.windows`). GiB: of
             whole arrays gathered, reduced or exchanged; an all-reduce sends twice what a
             gather of as many bytes does. Peak: memory of one device.

A program runs as long as its slowest device. Under a sequence mesh plain attention is priced as
on the device with the last positions, which attends to (nearly) all keys.

A second table has the matmuls of a tensor-parallel layer by form (`overlap.choose`): alone, both
passes, as `matmul_cost` has it and as compiled.
"""

import dataclasses
import importlib.metadata
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from experiments import cli, configs
from experiments.bench import overlap_matmuls, overlap_plot
from experiments.config import TrainConfig
from experiments.errors import UserError, user_errors
from experiments.plan import Compiled, build_step, compile_step
from jaxaccel import hlo, target, windows
from jaxaccel.budget import GIB
from jaxaccel.nn import DecoderConfig
from jaxaccel.target import MissingExtra, Target
from jaxaccel.timeline import Timeline
from jaxaccel.train_step import abstract_batch

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin")
PLAIN = "none"
WITH_OPTIONS = "none, XLA options of the above"
WIDE = "llama-70b-wide"


@dataclasses.dataclass(frozen=True)
class Options:
    """Compiles training steps with and without overlap, and compares what they wait for."""

    target: str = "h200x8"
    """Several GPUs of a node: h100x8, h200x8, b200x4."""
    config: tuple[str, ...] = ("llama-8b", WIDE, "llama-1b3")
    """Presets, and `llama-70b-wide`: 8 layers as wide as those of Llama 3 70B."""
    only: str = ""
    """Groups, comma-separated, of fsdp, data, tensor, context, combined, matmuls; empty: all."""
    json: bool = False
    """One JSON object a row and line, when it is ready, and nothing else on standard output."""
    record: str = ""
    """Write those lines into this file as well."""
    plot: str = ""
    """Folder for pictures of one layer's timeline, plain above each technique."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Steps that differ in nothing but `--overlap`."""

    name: str
    mesh: str
    batch: int
    techniques: tuple[str, ...]
    lengthen: int = 1  # rows, by this
    micro_batches: int = 1
    options: bool = False  # also plain XLA under the options of the last technique


def groups(devices: int) -> list[Group]:
    """What is compared, for so many GPUs of one node."""
    both, n = "sequence,collective-matmul", devices
    combined = "fsdp-prefetch,sequence,collective-matmul", "fsdp-prefetch,domino"
    return [
        Group("fsdp", f"fsdp={n}", n, ("fsdp-prefetch",), options=True),
        Group("data", f"data={n}", 4 * n, ("buckets",)),
        Group("data", f"data={n}", 4 * n, ("buckets",), micro_batches=2),
        Group("tensor", f"tensor={n}", 2, ("sequence", "collective-matmul", both, "domino")),
        Group(
            "context",
            f"sequence={n}",
            1,
            ("ring-attention", "ring-attention,fsdp-prefetch"),
            lengthen=n,
        ),
        Group("combined", f"fsdp=2,tensor={n // 2}", 4, combined),
    ]


NAMES = ("fsdp", "data", "tensor", "context", "combined", "matmuls")
# A whole replica of 8 billion parameters and its optimizer does not fit a GPU: `data` has its own.
SMALLER = {"llama-1b3": ("data",)}
LARGER = tuple(name for name in NAMES if name != "data")


def load(name: str) -> TrainConfig:
    """A preset, or the wide one, in bfloat16."""
    preset = configs.load("llama-8b" if name == WIDE else name)
    if name == WIDE:
        wide = {"layers": 8, "width": 8192, "heads": 64, "mlp_width": 28_672}
        preset = dataclasses.replace(preset, model=dataclasses.replace(preset.model, **wide))
    return dataclasses.replace(preset, precision="bfloat16")


def chosen(options: Options) -> dict[str, tuple[str, ...]]:
    """Names of groups by config.

    Raises:
      UserError: a name of neither.
    """
    listed = tuple(part.strip() for part in options.only.split(",")) if options.only else NAMES
    if unknown := [name for name in listed if name not in NAMES]:
        raise UserError(f"--only {unknown[0]}: groups are {', '.join(NAMES)}")
    found = {}
    for name in options.config:
        load(name)
        can = SMALLER.get(name, LARGER if name in ("llama-8b", WIDE) else NAMES)
        found[name] = tuple(group for group in can if group in listed)
    if not any(found.values()):
        raise UserError(
            f"--only {options.only} leaves nothing of --config {' '.join(options.config)}: "
            f"llama-8b and {WIDE} do not fit a GPU, as data needs; llama-1b3 does data alone"
        )
    return found


def options_of(preset: TrainConfig, group: Group, technique: str) -> TrainConfig:
    """The run that one row is the step of."""
    return dataclasses.replace(
        preset,
        mesh=group.mesh,
        batch=group.batch,
        sequence=preset.sequence * group.lengthen,
        micro_batches=group.micro_batches,
        overlap=technique,
    )


def measure(made: Compiled, name: str) -> tuple[dict[str, Any], Timeline]:
    """What the program says of itself, as `--json` prints it, and its timeline."""
    analysis = made.analyse(name)
    found = windows.windows(hlo.parse(made.program.as_text() or ""))
    count, moved = defaultdict[str, float](float), defaultdict[str, float](float)
    for w in found:
        count[w.kind] += w.count
        moved[w.kind] += w.count * w.bytes
    report, played = analysis.report, analysis.timeline
    row = {
        "modelled_step_ms": report.modelled_step_ms,
        "modelled_exposed_fraction": report.exposed_fraction,
        "modelled_sent_ms": 1e3 * sum(t.seconds for t in played.transfers),
        "modelled_mfu": report.modelled_mfu,
        "compiled_windows_with_matmul": sum(w.count for w in found if w.matmuls),
        "compiled_windows": sum(count.values()),
        "compiled_collectives": {k: {"count": count[k], "bytes": moved[k]} for k in sorted(count)},
        "compiled_peak_gib": report.peak_gib,
    }
    return row, played


def heading(name: str, config: TrainConfig, on: Target, group: Group) -> dict[str, Any]:
    """What a row is of."""
    model: DecoderConfig = config.model
    return {
        "config": name,
        "target": str(on),
        "group": group.name,
        "layers": model.layers,
        "width": model.width,
        "mesh": config.mesh,
        "batch": config.batch,
        "sequence": config.sequence,
        "micro_batches": config.micro_batches,
        "remat": config.remat,
        "precision": config.precision,
        "overlap": config.overlap,
    }


def compile_with(config: TrainConfig, on: Target, options: dict[str, Any]) -> Compiled:
    """The plain step under XLA options that a technique is compiled with."""
    step = build_step(config, on)
    again = jax.jit(step.step, donate_argnums=0, compiler_options=options)
    batch = abstract_batch(step, config.batch, config.sequence)
    program = on.compile(again, step.abstract_state, batch)
    return Compiled(config, on, step._replace(compiler_options=options), program)


def rows(
    name: str, preset: TrainConfig, on: Target, group: Group, folder: Path | None
) -> Iterator[dict[str, Any]]:
    """Compiles the steps of one group, one after the other; what is refused has a reason."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    plain: Timeline | None = None
    options: dict[str, Any] = {}
    for technique in (PLAIN, *group.techniques, *([WITH_OPTIONS] if group.options else [])):
        alone = technique == WITH_OPTIONS
        config = options_of(preset, group, PLAIN if alone else technique)
        parts = f" --micro-batches {group.micro_batches}" if group.micro_batches > 1 else ""
        print(f"compiling {name} {group.mesh}{parts} --overlap {technique}", file=sys.stderr)
        row = heading(name, config, on, group) | {"side": technique, "versions": versions}
        try:
            made = compile_with(config, on, options) if alone else compile_step(config, on)
        except UserError as error:
            yield row | {"refused": str(error)}
            continue
        options = made.step.compiler_options
        figures, played = measure(made, name)
        yield row | {"compiler_options": options} | figures
        if technique == PLAIN:
            plain = played
        elif folder and plain and not alone:
            parts = f"_{group.micro_batches}" if group.micro_batches > 1 else ""
            file = f"overlap_{name}_{group.name}{parts}_{technique.replace(',', '_')}.png"
            title = f"{name} on {on}, {group.mesh}"
            sides = {"none": plain, technique: played}
            overlap_plot.draw(folder / file, title, sides, preset.model.layers)


def matmul_rows(name: str, preset: TrainConfig, on: Target) -> Iterator[dict[str, Any]]:
    """The matmuls of a config's layer, at the tokens of the group `tensor`."""
    (group,) = (group for group in groups(on.count) if group.name == "tensor")
    config = options_of(preset, group, PLAIN)
    common = heading(name, config, on, group) | {"group": "matmuls"}
    if preset.model.kv_heads % on.count:
        return  # and `tensor` says why
    print(f"compiling the matmuls of {name} {group.mesh}", file=sys.stderr)
    for row in overlap_matmuls.rows(preset.model, on, config.batch * config.sequence):
        yield common | row


def block(r: dict[str, Any]) -> tuple[str, ...]:
    """Title and heads of a group's columns."""
    parts = f" in {r['micro_batches']} micro-batches" if r["micro_batches"] > 1 else ""
    return (
        f"{r['config']} ({r['layers']} layers, width {r['width']}) on {r['target']}, {r['mesh']}: "
        f"{r['batch']} x {r['sequence']:,} tokens{parts}, remat {r['remat']}, {r['precision']}",
        f"{'':<42}{'modelled':^38}  {'compiled':^33}",
        f"{'--overlap':<42}{'step, ms':>10} {'x none':>7} {'exposed':>8} {'sent, ms':>10}  "
        f"{'windows':>13} {'GiB':>8} {'peak, GiB':>10}",
    )


def table(found: Sequence[dict[str, Any]]) -> str:
    """The steps for people, a block for each group."""
    lines, title, base = [], None, None
    for r in found:
        if block(r) != title:
            title, base = block(r), None
            lines += ["", *title]
        if "refused" in r:
            lines.append(f"{r['side']:<42}refused: {r['refused']}")
            continue
        step = r["modelled_step_ms"]
        base = step if r["side"] == PLAIN else base
        times = f"{step / base:.3f}" if base else "-"
        inside = f"{r['compiled_windows_with_matmul']:.0f} / {r['compiled_windows']:.0f}"
        size = sum(kind["bytes"] for kind in r["compiled_collectives"].values()) / GIB
        lines.append(
            f"{r['side']:<42}{step:>10,.1f} {times:>7} "
            f"{100 * r['modelled_exposed_fraction']:>6.1f} % {r['modelled_sent_ms']:>10,.1f}  "
            f"{inside:>13} {size:>8.2f} {r['compiled_peak_gib']:>10.2f}"
        )
    return "\n".join(lines[1:])


def main(options: Options) -> None:
    """Compiles, and prints the results."""
    try:
        with user_errors():
            on = target.parse(options.target)
        if on.count == 1:
            raise UserError(f"--target {on} is one GPU, which waits for nobody; write {on}x8, say")
        on.devices()
    except MissingExtra as error:
        raise UserError(str(error)) from error
    todo = chosen(options)
    folder = Path(options.plot) if options.plot else None
    record = Path(options.record) if options.record else None
    for option, path in (("plot", folder), ("record", record and record.parent)):
        if path and not path.is_dir():
            raise UserError(f"--{option}: there is no folder {path}")
    if record:
        record.write_text("")

    def everything() -> Iterator[dict[str, Any]]:
        for name, names in todo.items():
            preset = load(name)
            for group in groups(on.count):
                if group.name in names:
                    yield from rows(name, preset, on, group, folder)
        for name, names in todo.items():
            if "matmuls" in names:
                yield from matmul_rows(name, load(name), on)

    found = []
    for row in everything():
        found.append(row)
        line = json.dumps(row)
        if record:
            with record.open("a") as file:
                print(line, file=file)
        if options.json:
            print(line, flush=True)
    if not options.json:
        steps, alone = [[r for r in found if ("matmul" in r) == which] for which in (False, True)]
        print("\n\n".join(filter(None, [table(steps), overlap_matmuls.table(alone)])))


if __name__ == "__main__":
    cli.run(main, Options)
