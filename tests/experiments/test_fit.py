"""The search for what fits: on made-up peaks, and compiled for a GPU."""

import dataclasses
import itertools
import random

import pytest

from experiments import configs, fit, plan
from experiments.errors import UserError
from jaxaccel import target
from jaxaccel.budget import CANDIDATES, GIB, NothingFitsError, fit_remat


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
        "--micro-batches 4 (compiled peak 2.00 GiB)",
        "--remat attention --micro-batches 2 (compiled peak 3.50 GiB)",
        "--remat selective --micro-batches 2 (compiled peak 2.00 GiB)",
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
def test_auto_fits_at_every_budget_and_repeats_no_more_as_it_grows(deep):
    config, on, peak_of, made = deep
    under = lambda policy: peak_of(dataclasses.replace(config, remat=policy))
    low, high = under("full"), under("none")
    assert low < 0.7 * high
    floor = plan.floor_bytes(config, on)
    repeated = []
    for part in (0.0, 0.3, 0.6, 1.0):
        limit = low + part * (high - low)
        found = fit.fit(config, peak_of, limit, floor)
        assert made[found.policy].peak_bytes <= limit
        repeated.append(made[found.policy].analyse("deep").report.recompute_flops_fraction)
    assert repeated == sorted(repeated, reverse=True)
    assert repeated[0] > 0.1
    assert repeated[-1] == 0


@pytest.mark.target
def test_a_budget_below_the_static_state_names_the_floor(deep):
    config, on, peak_of, _ = deep
    floor = plan.floor_bytes(config, on)
    with pytest.raises(UserError, match=r"below the 0\.0\d GiB of parameters.*fsdp"):
        fit.fit(config, peak_of, floor - 1, floor)
