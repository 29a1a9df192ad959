"""The rematerialisation policy that repeats least and still fits a memory budget.

The candidates are one list, whatever the budget: from keeping everything to keeping nothing,
each keeps a subset of what the one before it keeps, so each repeats at least as much. What is
given up first is what costs least to repeat for its bytes. Which of them fits is asked of the
compiler and not of a formula. Bisection over a fixed list makes the choice deterministic, and
a larger budget never leads to a candidate further down the list.
"""

import dataclasses
from collections.abc import Callable, Sequence

from jaxaccel import names

GIB = 2**30


def _keeping(*kept: str) -> str:
    return "names:" + ",".join(kept)


CANDIDATES: tuple[str, ...] = (
    "none",
    "attention",
    "selective",
    # From here on matmuls are repeated: the MLP's first, which are the largest tensors.
    _keeping(names.QUERY, names.KEY, names.VALUE, names.ATTENTION_OUTPUT, names.MLP_GATE,
             *names.ATTENTION),
    _keeping(names.QUERY, names.KEY, names.VALUE, names.ATTENTION_OUTPUT, *names.ATTENTION),
    _keeping(names.KEY, names.VALUE, names.ATTENTION_OUTPUT, *names.ATTENTION),
    _keeping(names.ATTENTION_OUTPUT, *names.ATTENTION),
    _keeping(*names.ATTENTION),
    "full",
    "sqrt",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Fit:
    """A policy that fits, and the *compiled* peaks that the search saw."""

    policy: str
    peak_bytes: int
    tried: dict[str, int]  # peak by policy, in the order of the search


class NothingFitsError(ValueError):
    """No candidate fits; the message names the smallest peak found."""


def fit_remat(
    peak_of: Callable[[str], int], budget_bytes: float | int, candidates: Sequence[str] = CANDIDATES
) -> Fit:
    """The first of `candidates` whose compiled peak is at most the budget.

    Args:
      peak_of: compiles the step under a policy and returns its peak in bytes, such as
        `plan.peak_bytes` of `Target.compile`; called at most log2(len(candidates)) + 2 times.
      budget_bytes: of one device.
      candidates: policies, each repeating at least what the one before it repeats.

    Returns:
      The policy, its peak, and what was tried.

    Raises:
      NothingFitsError: neither of the last two fits.

    Example:
      >>> peaks = {"none": 9, "selective": 5, "full": 2}
      >>> fit_remat(peaks.__getitem__, 6, list(peaks)).policy
      'selective'
    """
    tried: dict[str, int] = {}

    def fits(index: int) -> bool:
        policy = candidates[index]
        if policy not in tried:
            tried[policy] = peak_of(policy)
        return tried[policy] <= budget_bytes

    # On a shallow stack segments cost more than they save: the last may not be the smallest.
    low, last = 0, len(candidates) - 1
    high = next((i for i in (last, last - 1) if i >= 0 and fits(i)), None)
    if high is None:
        smallest = min(tried, key=tried.__getitem__)
        raise NothingFitsError(
            f"no rematerialisation policy fits {budget_bytes / GIB:.3g} GiB: the smallest "
            f"compiled peak is {tried[smallest] / GIB:.3g} GiB, under {smallest}"
        )
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return Fit(candidates[low], tried[candidates[low]], tried)
