"""The search for what fits: on made-up peaks, and compiled for a GPU."""

import dataclasses
import itertools
import os
import random
import re
import subprocess
import sys

import jax
import pytest

from experiments import configs, fit, plan, train
from experiments.errors import UserError
from experiments.plan_plot import draw
from jaxaccel import target
from jaxaccel.budget import CANDIDATES, GIB, NothingFitsError, fit_remat

FEW = ("none", CANDIDATES[4], "full")  # that keep all, some names, next to nothing


def test_candidates_keep_ever_fewer_names():
    kept = [set(c.removeprefix("names:").split(",")) for c in CANDIDATES if c[:6] == "names:"]
    assert all(later < earlier for earlier, later in itertools.pairwise(kept))


def test_a_larger_budget_never_repeats_more():
    draw = random.Random(0)
    for _ in range(300):
        peaks = {name: draw.randint(1, 20) for name in CANDIDATES}  # in no order at all
        chosen = []
        for limit in range(1, 21):
            if min(peaks[CANDIDATES[-1]], peaks[CANDIDATES[-2]]) > limit:
                with pytest.raises(NothingFitsError, match="smallest"):
                    fit_remat(peaks.__getitem__, limit)
                continue
            if peaks[CANDIDATES[-1]] > limit:
                continue  # the list then ends one earlier: only ordered peaks compare
            found = fit_remat(peaks.__getitem__, limit)
            assert found.peak_bytes == peaks[found.policy] <= limit
            assert len(found.tried) <= 5
            chosen.append(CANDIDATES.index(found.policy))
        assert chosen == sorted(chosen, reverse=True)


def test_ordered_peaks_give_the_first_that_fits():
    peaks = dict(zip(CANDIDATES, range(len(CANDIDATES), 0, -1)))
    for limit in range(1, len(CANDIDATES) + 1):
        assert peaks[fit_remat(peaks.__getitem__, limit).policy] == limit


def test_changes_that_fit_come_cheapest_first():
    peak = {"none": 8 * GIB, "attention": 7 * GIB, "selective": 4 * GIB}
    config = dataclasses.replace(configs.load("tiny"), remat="none", batch=8)
    changes = fit.changes_that_fit(
        config, lambda c: peak.get(c.remat, GIB) // c.micro_batches, 3.5 * GIB, rows=8
    )
    assert changes == [
        "--micro-batches 4 (compiled peak 2 GiB)",
        "--remat attention --micro-batches 2 (compiled peak 3.5 GiB)",
        "--remat selective --micro-batches 2 (compiled peak 2 GiB)",
    ]


@pytest.fixture(scope="module")
def deep():
    """A decoder of eight layers, large enough for policies to differ; peaks are remembered."""
    tiny = configs.load("tiny")
    config = dataclasses.replace(
        tiny,
        model=dataclasses.replace(tiny.model, layers=8),
        precision="bfloat16",
        batch=16,
        sequence=512,
    )
    on, peaks = target.parse("h200"), {}

    def peak_of(changed):
        if changed.remat not in peaks:
            peaks[changed.remat] = plan.compile_step(changed, on)
        return peaks[changed.remat].peak_bytes

    return config, on, peak_of, peaks


@pytest.mark.target
@pytest.mark.parametrize(
    "candidates", [FEW, pytest.param(CANDIDATES, marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_auto_fits_at_every_budget_and_repeats_no_more_as_it_grows(deep, candidates):
    config, _, peak_of, made = deep
    under = lambda policy: peak_of(dataclasses.replace(config, remat=policy))
    low, high = under("full"), under("none")
    assert low < 0.7 * high
    repeated = []
    for part in (0.0, 0.3, 0.6, 1.0):
        limit = low + part * (high - low)
        found = fit_remat(under, limit, candidates)
        assert made[found.policy].peak_bytes <= limit
        repeated.append(made[found.policy].analyse("deep").report.recompute_flops_fraction)
    assert repeated == sorted(repeated, reverse=True)
    assert repeated[0] > 0.1
    assert repeated[-1] == 0
    assert len({*made} & {*candidates}) > 2  # something between the two was tried


@pytest.mark.target
def test_a_picture_is_drawn(deep, tmp_path):
    config, _, peak_of, made = deep
    peak_of(dataclasses.replace(config, remat="full"))
    analysis = made["full"].analyse("deep")
    draw(tmp_path / "plan.png", [("full", analysis.report)], analysis.timeline, 140.0)
    assert (tmp_path / "plan.png").stat().st_size > 10_000


@pytest.mark.target
def test_a_budget_below_the_static_state_names_the_floor(deep):
    config, on, peak_of, _ = deep
    floor = plan.floor_bytes(config, on)
    with pytest.raises(UserError, match=r"below the 0\.0\d+ GiB of parameters.*fsdp"):
        fit.fit(config, peak_of, floor - 1, floor)


SMALL = [
    "--model.layers", "2", "--model.width", "32", "--model.heads", "2", "--model.kv-heads", "1",
    "--model.head-size", "16", "--model.mlp-width", "48", "--batch", "8", "--sequence", "64",
]  # fmt: skip


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("red green blue\n" * 2000)
    return file


def test_auto_chooses_while_training(text, tmp_path):
    """On one device, where there is nothing to partition."""
    command = [
        sys.executable, "-m", "experiments.train", *SMALL, "--data.source", str(text),
        "--run-dir", str(tmp_path / "run"), "--eval-batches", "1", "--remat", "auto",
    ]  # fmt: skip
    run = lambda *options: subprocess.run(
        [*command, *options],
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    done = run("--steps", "2", "--budget-gib", "1")
    assert done.returncode == 0, done.stderr
    assert "--remat auto: none, of these compiled: " in done.stdout
    done = run("--steps", "3", "--budget-gib", "0.00001")
    assert done.returncode == 2
    assert re.search(r"a budget of 1e-05 GiB is below the 0\.000\d+ GiB", done.stderr)


class OutOfMemory:
    """A compiled step that runs out of memory, as XLA reports it."""

    def __init__(self, step):
        self.lower = step.lower

    def __call__(self, *args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")


def test_out_of_memory_ends_with_what_would_fit(text, tmp_path, capsys, monkeypatch):
    real = train.make_train_step
    fake = lambda *args: (made := real(*args))._replace(step=OutOfMemory(made.step))
    monkeypatch.setattr(train, "make_train_step", fake)
    with pytest.raises(SystemExit) as stop:
        train.main(
            [
                *SMALL,
                "--data.source",
                str(text),
                "--run-dir",
                str(tmp_path / "run"),
                "--remat",
                "none",
            ]
        )
    assert stop.value.code == 1
    err = capsys.readouterr().err.strip()
    assert len(err.splitlines()) == 1
    assert "out of memory: RESOURCE_EXHAUSTED" in err
    assert "what would fit: --remat attention (compiled peak 0." in err
    assert "; --remat selective (" in err
    assert "; --remat full (" in err
