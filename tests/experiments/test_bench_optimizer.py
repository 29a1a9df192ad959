"""The optimizers' benches: keys and figures that can be calculated by hand."""

import json

import pytest

from experiments.bench import optimizer, optimizer_parity
from experiments.errors import UserError


def test_bytes_of_state_and_keys(capsys):
    options = optimizer.Options(parameters=20_000, optimizers=("adamw-8bit",), json=True)
    optimizer.main(options)
    plain, coded = map(json.loads, capsys.readouterr().out.splitlines())
    assert plain["optimizer"] == "adamw" and coded["optimizer"] == "adamw-8bit"
    assert plain["times_adamw"] == 1
    assert plain["state_bytes_per_parameter"] == pytest.approx(8, abs=0.01)
    assert coded["state_bytes_per_parameter"] == pytest.approx(2 * (1 + 4 / 256), abs=0.01)
    assert coded["update_ms"] > 0 and "environment" in coded
    table = optimizer.table([plain, coded | {"share_of_step": 0.25}])
    assert "25.00% of a training step of small" in table


def test_bad_input_is_refused():
    with pytest.raises(UserError, match="it must be at least 16384"):
        optimizer.main(optimizer.Options(parameters=1000))
    with pytest.raises(UserError, match="--steps is 0"):
        optimizer_parity.main(optimizer_parity.Options(steps=0))


def test_the_parity_table_judges_the_mean_and_each_seed():
    def row(training, seed, gap):
        return {
            "training": training, "seed": seed, "validation_gap_percent": gap, "steps": 9,
            "batch": 1, "sequence": 2, "validation_tokens": 3, "validation_loss": 1.5,
            "training_loss": 1.4, "state_bytes_per_parameter": 8.0,
            "model": {"layers": 1, "width": 2},
            "environment": {"versions": {"jax": "1", "jaxlib": "2", "optax": "3"}},
        }  # fmt: skip

    rows = [
        row(name, seed, gap * (seed + 1))
        for name, gap in zip(optimizer_parity.TRAININGS, (0.0, 0.1, 0.4))
        for seed in range(3)
    ]
    table = optimizer_parity.table(rows)
    assert "2 micro-batches: mean gap +0.200 %, within the bar of 0.5 %; so is each seed" in table
    verdict = "mean gap +0.800 %, BEYOND the bar of 0.5 %; BEYOND it: seed 1 (+0.800 %), seed 2 "
    assert f"adamw-8bit: {verdict}(+1.200 %)" in table
