"""The ablation: which rows there are, what they are compared by, one of them for real."""

import dataclasses
import json
from pathlib import Path

import pytest

from experiments import ablate, cli, configs
from experiments.ablate import BASELINE, HEAD, STACK, TECHNIQUES, main, rows, table, worse
from experiments.config import ALIASES, TrainConfig, check_options
from jaxaccel import sharding


def test_each_technique_alone_and_then_one_by_one_on_top_of_the_others():
    names = [row.name for row in rows(8)]
    assert names[: 1 + len(TECHNIQUES)] == ["baseline", *TECHNIQUES]
    assert names[-2:] == ["full stack", f"full stack and {HEAD}"]
    changes = [row.change for row in rows(8)]
    stack = [changes[names.index(STACK[0])], *changes[1 + len(TECHNIQUES) :]]
    for less, more, added in zip(stack[:-1], stack[1:], (*STACK[1:], HEAD), strict=True):
        assert more == less | TECHNIQUES[added] != less


def test_every_row_is_a_legal_run():
    preset = dataclasses.replace(configs.load("llama-8b"), batch=ablate.AblateConfig.batch)
    options = {"aliases": ALIASES, "prog": "test"}
    seen = []
    for row in rows(8):
        args = ablate.command_line(row.options)
        config = cli.parse(TrainConfig, default=preset, args=args, **options)
        check_options(config, sharding.parse_mesh(config.mesh, 8))
        assert config not in seen  # no option is lost
        seen.append(config)
    assert seen[0].precision == BASELINE["precision"]


def test_one_gpu_has_nothing_to_hide():
    assert not any("overlap" in row.change for row in rows(1))
    assert rows(1)[-2].name == "full stack"


ROOT = Path(__file__).parents[2]
FIGURES = dict.fromkeys(ablate.FIGURES, 2.0)


@pytest.mark.parametrize(
    ("figure", "value", "expected"),
    [
        ("peak_gib", 2.1, ["peak memory +5.0%"]),
        ("modelled_step_ms", 1.0, []),
        ("loss", 2.009, []),
        ("loss", 2.02, ["loss +1.0%"]),
        ("tokens_per_second", 1.0, ["CPU speed -50.0%"]),
        ("tokens_per_second", 4.0, []),
        ("host_peak_gib", None, []),
    ],
)
def test_worse_names_what_a_row_loses(figure, value, expected):
    assert worse(FIGURES | {figure: value}, FIGURES) == expected
    base = FIGURES | {"name": "baseline"}
    row = base | {"name": "other", figure: value}
    assert table([base, row], "title").endswith(f"| {', '.join(expected)} |")


def test_the_first_page_opens_with_the_recorded_table():
    recorded = ROOT / "experiments/results/ablation_h200x8.jsonl"
    found = [json.loads(line) for line in recorded.read_text().splitlines()]
    assert [row["name"] for row in found] == [row.name for row in rows(8)]
    lines = table(found, "").strip()
    assert lines in (ROOT / "README.md").read_text()
    assert lines in recorded.with_suffix(".txt").read_text()
    base, full = found[0], found[-2]
    assert full["peak_gib"] <= 0.6 * base["peak_gib"]
    assert full["modelled_step_ms"] <= 0.7 * base["modelled_step_ms"]


@pytest.mark.target
def test_one_row_compiled_trained_and_drawn(tmp_path, capsys):
    picture = tmp_path / "ablation.png"
    args = ["--target", "h200x2", "--batch", "16", "--steps", "2", "--only", "8-bit Adam"]
    with pytest.raises(SystemExit) as stop:
        main(["tiny", *args, "--json", "--plot", str(picture)])
    assert stop.value.code == 0
    base, row = map(json.loads, capsys.readouterr().out.splitlines())
    keys = ["name", *ablate.FIGURES, "options"]
    assert list(base) == list(row) == keys and row["name"] == "8-bit Adam"
    assert row["peak_gib"] < 0.9 * base["peak_gib"]
    assert row["loss"] != base["loss"] and abs(row["loss"] / base["loss"] - 1) < 0.05
    assert min(base["host_peak_gib"], base["modelled_step_ms"], base["tokens_per_second"]) > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--only", "FP9"], "--only 'FP9' is no row; rows are blockwise XLA attention, "),
        (["--steps", "-1"], "--steps is -1"),
        (["--batch", "0"], "--batch is 0"),
        (["--batch", "7"], "the baseline is refused: a batch of 7 rows"),
        (["--target", "h300"], "h300"),
        (["--plot", "nowhere/x.png"], "there is no folder nowhere"),
    ],
)
@pytest.mark.target
def test_bad_input_is_one_line(args, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["tiny", *args])
    assert stop.value.code == 2
    *progress, error = capsys.readouterr().err.splitlines()
    assert message in error and all(": compiling" in line for line in progress)
