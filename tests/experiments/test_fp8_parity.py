"""The committed comparison of FP8 and bfloat16: its arithmetic, and bad input."""

import json
from pathlib import Path

import pytest

from experiments.bench import fp8_parity
from experiments.errors import UserError

RESULTS = Path(fp8_parity.__file__).parents[1] / "results"


def test_the_committed_figures_are_whole_and_within_the_bar():
    rows = [json.loads(line) for line in (RESULTS / "fp8_parity.jsonl").read_text().splitlines()]
    assert [row["training"] for row in rows] == list(fp8_parity.TRAININGS)
    first = rows[0]
    for row in rows:
        assert row["steps"] >= 1000 and row["validation_tokens"] == first["validation_tokens"]
        for kind in ("validation", "training"):
            gap = 100 * (row[f"{kind}_loss"] / first[f"{kind}_loss"] - 1)
            assert gap == pytest.approx(row[f"{kind}_gap_percent"])
        if row["fp8"] != "off":
            assert abs(row["validation_gap_percent"]) <= fp8_parity.BAR
    assert fp8_parity.table(rows) + "\n" == (RESULTS / "fp8_parity.txt").read_text()


def test_a_gap_beyond_the_bar_is_said():
    rows = [json.loads(line) for line in (RESULTS / "fp8_parity.jsonl").read_text().splitlines()]
    rows[-1]["validation_gap_percent"] = 0.3
    assert "block: +0.300 %, BEYOND the bar" in fp8_parity.table(rows)


def test_no_steps_are_refused():
    with pytest.raises(UserError, match="--steps is 0; it must be at least 1"):
        fp8_parity.main(fp8_parity.Options(steps=0))
