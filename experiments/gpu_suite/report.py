"""What the GPU suite found: a table, a report in Markdown, pictures.

    python -m experiments.gpu_suite.report DIR

draws the pictures from DIR/results.json (needs matplotlib). A figure has a unit and says whether
it was *measured*, *compiled* (read off a program that XLA compiled) or *modelled* (a roofline, or
the plan's times).
"""

import json
import math
import os
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

from experiments.gpu_suite.cases import FAKE, PLAN, STEPS

Results = dict[str, Any]


class Figure(NamedTuple):
    """One number."""

    group: str
    name: str
    value: float | None
    unit: str
    kind: str  # measured, compiled, modelled
    note: str = ""


def figures(results: Results) -> list[Figure]:
    """All numbers of a run, in the order of the table."""
    found: list[Figure] = []
    for stage in results.get("stages", ()):
        entries = [record for part in stage["parts"] for record in part["records"]]
        if stage["name"].startswith("train"):
            found += _training(stage, entries, results)
        for record in entries:
            found += _FIGURES.get(record["event"], lambda record: [])(record)
    return found


def _ceiling(record: dict[str, Any]) -> list[Figure]:
    values = record["name"], record["value"], record["unit"], "measured", record["note"]
    return [Figure("ceiling", *values)]


def _kernel(record: dict[str, Any]) -> list[Figure]:
    row, group = record["row"], "kernel"
    name = f"{row['name']}, {row['side']}"
    if row["refused"]:
        return [Figure(group, name, None, "ms", "measured", f"none: {row['refused']}")]
    rate, unit = (row["tflops"], "TFLOP/s") if row["tflops"] else (row["gb_per_s"], "GB/s")
    share = row["share_of_roofline"]
    note = f"{row['ms']:.3f} ms" + ("" if share is None else f", {share:.0%} of the roofline")
    return [Figure(group, name, rate, unit, "measured", note)]


def _attention(record: dict[str, Any]) -> list[Figure]:
    row = record["row"]
    name = f"{row['mask']} {row['length']} D {row['head_size']} {row['pass']}, {row['side']}"
    if row["refused"]:
        return [Figure("attention", name, None, "TFLOP/s", "measured", f"none: {row['refused']}")]
    share = row["share_of_peak"]
    note = f"{row['ms']:.3f} ms" + ("" if share is None else f", {share:.0%} of the data sheet's")
    if row["difference"]:
        note += f", at most {row['difference']:.2g} from ours"
    return [Figure("attention", name, row["tflops"], "TFLOP/s", "measured", note)]


def _decode(record: dict[str, Any]) -> list[Figure]:
    name, same = record["name"], record["same_text_as_plain"]
    note = f"{record['tokens_per_pass'] or 0:.2f} tokens a pass and row"
    note += "" if same is None else f", the plain text{'' if same else ' NOT'} again"
    note += f"; the first run, compiling, {record['first_run_seconds']:.0f} s"
    return [
        Figure("decode", name, record["tokens_per_second"], "tokens/s", "measured", note),
        Figure("decode", f"{name}: a pass", record["ms_per_pass"], "ms", "measured"),
    ]


def _decoder(record: dict[str, Any]) -> list[Figure]:
    if record["bound_ms"] is None:
        return []
    note = f"reads {record['read_gb']:.2f} GB of weights at the data sheet's rate"
    return [Figure("decode", "a plain pass, at best", record["bound_ms"], "ms", "modelled", note)]


_FIGURES = {
    "decoder": _decoder,
    "ceiling": _ceiling,
    "kernel": _kernel,
    "attention": _attention,
    "decode": _decode,
}


def plan_rows(file: Path = PLAN) -> list[dict[str, Any]]:
    """What was planned, with the version of JAX that did; nothing where the file is missing."""
    if not file.exists():
        return []
    found = json.loads(file.read_text("utf-8"))
    jax = found["made_by"]["versions"]["jax"]
    return [row | {"note": f"by jax {jax}"} for row in found["rows"]]


def _training(stage: Results, entries: list[dict[str, Any]], results: Results) -> list[Figure]:
    name = stage["name"]
    group = "llama-1b3 " + name.removeprefix("train ")
    if results.get("fake"):
        group = "tiny " + name.removeprefix("train ")
    phases = {r["name"]: r for r in entries if r["event"] == "phase" and r["name"] != "memory"}
    steps = [r for r in entries if r["event"] == "step"]
    times = [r["seconds"] for r in steps if r["timed"]]
    model, compiled = phases.get("model"), phases.get("compiled")
    found: list[Figure] = []
    add = lambda *values: found.append(Figure(group, *values))
    if times and model:
        middle = statistics.median(times)
        spread = f"{1e3 * min(times):,.1f} to {1e3 * max(times):,.1f} in {len(times)} steps"
        add("step", 1e3 * middle, "ms", "measured", spread)
        add("speed", model["tokens"] / middle, "tokens/s", "measured")
        mfu = 100 * model["model_flops"] / middle / model["peak_flops"]
        add("MFU", mfu, "%", "measured", f"of {model['peak_source']}")
    peaks = [r["peak_gib"] for r in entries if r.get("name") == "memory" and r["peak_gib"]]
    moments = [f"{r['when']} {r['peak_gib']:.2f}" for r in entries
               if r.get("name") == "memory" and r["peak_gib"]]  # fmt: skip
    if peaks:
        add("peak memory", peaks[-1], "GiB", "measured", "up to: " + ", ".join(moments))
    if compiled:
        parts = compiled["micro_batches"]
        note = "of the program that ran" + (f", {parts} micro-batches" if parts > 1 else "")
        add("peak memory, by its program", compiled["peak_gib"], "GiB", "compiled", note)
        spent = ", ".join(f"{k} {v:.1f}" for k, v in compiled["seconds"].items())
        add("compiling", compiled["seconds"]["step"], "s", "measured", f"at the same time: {spent}")
    if steps:
        first, last = steps[0], steps[-1]
        finite = all(math.isfinite(r["loss"]) for r in steps)
        falls = "falling" if last["loss"] < first["loss"] else "NOT FALLING"
        falls = falls if finite else "NOT FINITE"
        add("loss of the first step", first["loss"], "nats", "measured")
        add("loss of the last step", last["loss"], "nats", "measured", falls)
        add("gradient norm of the first step", first["grad_norm"], "", "measured")
    case = stage["parts"][0]["command"]
    case = next((word for word in case if word in STEPS), "")
    gpu = (results.get("card") or {}).get("gpu")
    for row in plan_rows():
        as_planned = "," not in name and not results.get("fake")
        if as_planned and row["step"] == case and gpu in (row["target"], None):
            where = f"planned for {row['target']}"
            by = row["note"]
            add(f"step, {where}", row["modelled_step_ms"], "ms", "modelled", by)
            add(f"MFU, {where}", 100 * row["modelled_mfu"], "%", "modelled", by)
            add(f"peak memory, {where}", row["compiled_peak_gib"], "GiB", "compiled", by)
    return found


def _value(figure: Figure) -> str:
    if figure.value is None:
        return "-"
    return f"{figure.value:,.0f}" if abs(figure.value) >= 1000 else f"{figure.value:,.4g}"


def heading(results: Results) -> str:
    """The card and what ran on it, in a line."""
    card, smi = results.get("card") or {}, results.get("nvidia_smi") or {}
    versions = (card.get("environment") or {}).get("versions") or {}
    kind = "fake" if results.get("fake") else card.get("device_kind", "no card found")
    driver = smi.get("driver_version", "unknown (no nvidia-smi)")
    return f"GPU suite on {kind}, driver {driver}, jax {versions.get('jax')}"


def outcomes(results: Results) -> list[tuple[str, str, float, str]]:
    """Name, status, seconds and remark of each stage."""
    rows = []
    for stage in results.get("stages", ()):
        remarks = []
        for part in stage["parts"]:
            counts: dict[str, int] = {}
            for item in part["ended"]:
                counts[item["outcome"]] = counts.get(item["outcome"], 0) + 1
            if part["left"]:
                counts["not reached"] = len(part["left"])
            said = ", ".join(f"{n} {word}" for word, n in counts.items())
            why = part["why"] if part["status"] != "ok" and not counts else ""
            if len(stage["parts"]) > 1 and (said or part["status"] != "ok"):
                said = f"{part['name']}: {said or part['status']}"
            remarks += [text for text in (said, why) if text]
        rows.append((stage["name"], stage["status"], stage["seconds"], "; ".join(remarks)[:400]))
    return rows


def failures(results: Results) -> list[tuple[str, str, list[str]]]:
    """What failed: stage and item, why, last lines."""
    found = []
    for stage in results.get("stages", ()):
        for part in stage["parts"]:
            bad = [item for item in part["ended"] if item["outcome"] not in ("passed", "skipped")]
            for item in bad:
                title = f"{stage['name']}: {item['item']}: {item['outcome']}"
                found.append((title, item.get("why") or "", item.get("tail") or []))
            if not bad and part["status"] not in ("ok", "not started"):
                title = f"{stage['name']}: {part['name']}: {part['status']}"
                found.append((title, part["why"], part["tail"]))
    return found


def table(results: Results) -> str:
    """What a terminal shows last."""
    lines = [results["fake"]] if results.get("fake") else []
    lines += [heading(results), ""]
    lines += [f"{name:30} {status:13} {spent:5.0f} s  {text[:150]}"
              for name, status, spent, text in outcomes(results)]  # fmt: skip
    lines.append("")
    group = ""
    for figure in figures(results):
        if figure.group != group:
            lines.append(group := figure.group)
        kind = "" if figure.kind == "measured" else f" ({figure.kind})"
        number = f"{_value(figure):>9} {figure.unit}{kind}"
        lines.append(f"  {figure.name:50} {number:24} {figure.note[:70]}".rstrip())
    lines += [f"failed: {title}: {why[:200]}" for title, why, _ in failures(results)]
    lines.append("measured, unless a line says compiled or modelled")
    lines += [results["fake"]] if results.get("fake") else []
    return "\n".join(lines)


def markdown(results: Results) -> str:
    """The report."""
    fake = results.get("fake")
    card, smi = results.get("card") or {}, results.get("nvidia_smi") or {}
    environment = card.get("environment") or {}
    lines = [f"# {heading(results)}", ""]
    lines += [f"**{fake}**", ""] if fake else []
    facts = {
        "date": results["started"],
        "commit": results["commit"] or "unknown",
        "command": f"`{results['command']}`",
        "time": f"{results['seconds']:.0f} s of {60 * results['minutes']:.0f} s"
        + ("" if results["complete"] else "; cut off"),
        "card": "fake" if fake else f"{card.get('device_kind')} ({card.get('devices')} here)",
        "compute capability": card.get("compute_capability"),
        "platform": card.get("platform_version"),
        "Python": environment.get("python"),
        "versions": ", ".join(
            f"{k} {v}" for k, v in (environment.get("versions") or {}).items() if v
        ),
        "environment": ", ".join(f"{k}={v}" for k, v in results["environment"].items() if v),
    }
    facts |= {f"nvidia-smi {k}": v for k, v in smi.items()}
    if not smi and not fake:
        facts["nvidia-smi"] = "not here: clocks, driver and power limit unknown"
    lines += ["| | |", "|---|---|"]
    lines += [f"| {key} | {_cell(value)} |" for key, value in facts.items() if value]
    lines += ["", "## Stages", "", "| stage | status | seconds | |", "|---|---|---|---|"]
    for name, status, spent, text in outcomes(results):
        lines.append(f"| {name} | {status} | {spent:.0f} | {_cell(text)} |")
    clocks = [(s["name"], s["card"]) for s in results.get("stages", ()) if s["card"]]
    if clocks:
        lines += ["", "Clocks while the GPU was busy (nvidia-smi, once a second; least, median, "
                  "most), measured:", ""]  # fmt: skip
        lines += [f"- {name}: SM {_three(c['sm_clock_mhz'])} MHz, {_three(c['power_w'])} W, at "
                  f"most {c['temperature_c']:.0f} C, {c['busy_seconds']} s"
                  for name, c in clocks]  # fmt: skip
    lines += ["", "## Figures", ""]
    lines += [f"**{fake}**", ""] if fake else []
    lines += ["| what | | value | unit | kind | |", "|---|---|---|---|---|---|"]
    for f in figures(results):
        row = (f.group, f.name, _value(f), f.unit, f"*{f.kind}*", f.note)
        lines.append("| " + " | ".join(map(_cell, row)) + " |")
    if bad := failures(results):
        lines += ["", "## Failures", ""]
        for title, why, last in bad:
            lines += [f"**{title}**: {why}", "", "```", *last, "```", ""]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _three(values: list[float]) -> str:
    return " / ".join(f"{value:,.0f}" for value in values)


def write(results: Results, out: Path) -> None:
    """results.json and report.md, each whole at any moment."""
    plain = results | {"figures": [figure._asdict() for figure in figures(results)]}
    for name, text in (
        ("results.json", json.dumps(plain, indent=1) + "\n"),
        ("report.md", markdown(results)),
    ):
        temporary = out / f"{name}.tmp"
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, out / name)


def draw(results: Results, file: Path) -> None:
    """Attention and kernels as shares of what is possible, steps measured and modelled."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = [figure for figure in figures(results) if figure.value is not None]
    groups = {
        "attention, TFLOP/s": [f for f in found if f.group == "attention"],
        "kernels and ceilings, TFLOP/s": [
            f for f in found if f.group in ("kernel", "ceiling") and f.unit == "TFLOP/s"
        ],
        "kernels and ceilings, GB/s": [
            f for f in found if f.group in ("kernel", "ceiling") and f.unit == "GB/s"
        ],
        "a training step, ms": [f for f in found if f.name.startswith("step")],
    }
    groups = {title: bars for title, bars in groups.items() if bars}
    if not groups:
        return
    heights = [len(bars) + 2 for bars in groups.values()]
    figure, axes = pyplot.subplots(
        len(groups), 1, figsize=(9, 0.22 * sum(heights) + 1), layout="constrained",
        gridspec_kw={"height_ratios": heights}, squeeze=False,
    )  # fmt: skip
    for axis, (title, bars) in zip(axes[:, 0], groups.items()):
        names = [f.name if f.group != "ceiling" else f"ceiling: {f.name}" for f in bars]
        if title.startswith("a training"):
            names = [f"{f.group}: {f.name}" for f in bars]
        colors = ["tab:gray" if f.kind == "modelled" else "tab:blue" for f in bars]
        axis.barh(range(len(bars)), [f.value for f in bars], color=colors)
        axis.set_yticks(range(len(bars)), names, fontsize=7)
        axis.invert_yaxis()
        axis.set_title(f"{title} (grey: modelled)" if "tab:gray" in colors else title)
    figure.suptitle(FAKE if results.get("fake") else heading(results) + ", measured")
    figure.savefig(file, dpi=110)


def main(argv: list[str]) -> int:
    """Draws the picture of a folder's results."""
    if len(argv) != 1 or not (Path(argv[0]) / "results.json").exists():
        print("python -m experiments.gpu_suite.report DIR: a folder with results.json",
              file=sys.stderr)  # fmt: skip
        return 2
    folder = Path(argv[0])
    try:
        draw(json.loads((folder / "results.json").read_text("utf-8")), folder / "speed.png")
    except ImportError as error:
        print(f"matplotlib: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
