"""What makes a training step fit a memory budget, found by compiling it.

Used by `plan`, which compiles for GPUs that need not be here, and by `train`, which compiles
for the devices at hand; `peak_of` is where they differ. Peaks are *compiled*.
"""

import dataclasses
from collections.abc import Callable

import jax

from experiments.config import TrainConfig
from experiments.errors import UserError, user_errors
from jaxaccel.budget import CANDIDATES, GIB, Fit, fit_remat

PeakOf = Callable[[TrainConfig], int]  # bytes of one device


def fit(config: TrainConfig, peak_of: PeakOf, limit: float, floor: int) -> Fit:
    """The rematerialisation policy for `config` that repeats least and fits.

    Args:
      config: a run's options; its `remat` does not matter.
      peak_of: compiles a config's step and returns its peak.
      limit: bytes of one device.
      floor: bytes of parameters and optimizer state on one device.

    Raises:
      UserError: the limit is below the floor, or nothing fits.
    """
    check_floor(floor, limit)
    with user_errors():
        peak = lambda policy: peak_of(dataclasses.replace(config, remat=policy))
        return fit_remat(peak, limit, candidates(config))


def candidates(config: TrainConfig) -> tuple[str, ...]:
    """Policies that may be tried; with `--overlap` none that cuts the stack in segments."""
    return CANDIDATES if config.overlap == "none" else CANDIDATES[:-1]


def check_floor(floor: int, limit: float) -> None:
    """Refuses a budget below what no rematerialisation can lower."""
    if limit < floor:
        raise UserError(
            f"a budget of {limit / GIB:.3g} GiB is below the {floor / GIB:.3g} GiB of parameters "
            "and optimizer state on each device, which rematerialisation cannot lower; more "
            "devices on the mesh's fsdp axis can"
        )


def memory_limit(config: TrainConfig, device: jax.Device) -> float | None:
    """Bytes that a step may take of one device; None where neither user nor device says."""
    if config.budget_gib is not None:
        return config.budget_gib * GIB
    return (device.memory_stats() or {}).get("bytes_limit")


def changes_that_fit(
    config: TrainConfig, peak_of: PeakOf, limit: float, rows: int, most: int = 3
) -> list[str]:
    """The cheapest changes to `config` under which its step fits, as options to pass.

    Args:
      config: a run's options, of which the step did not fit.
      peak_of: compiles a config's step and returns its peak.
      limit: bytes of one device.
      rows: of one micro-batch on one device; what micro-batches can cut.
      most: how many to find.

    Returns:
      Options and the compiled peak of each, the one that repeats least first.
    """
    policies = [config.remat]  # then what repeats more
    if config.remat in (listed := candidates(config)):
        policies += [p for p in listed[listed.index(config.remat) + 1 :] if p[:5] != "names"]
    halves = 2 if "domino" in config.overlap else 1
    parts = [config.micro_batches * n for n in (1, 2, 4, 8) if rows % (n * halves) == 0]
    found = []
    for policy in policies:
        for count in parts:
            change = dataclasses.replace(config, remat=policy, micro_batches=count)
            if change == config:
                continue
            peak = peak_of(change)
            if peak <= limit:
                options = [f"--remat {policy}"] * (policy != config.remat)
                options += [f"--micro-batches {count}"] * (count != config.micro_batches)
                found.append(f"{' '.join(options)} (compiled peak {peak / GIB:.3g} GiB)")
                break  # more parts would fit too, and gain nothing
        if len(found) == most:
            break
    return found
