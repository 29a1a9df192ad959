"""A pytest plugin: what becomes of each test, as records of the GPU suite, while they run."""

import time
from typing import Any

from experiments.gpu_suite import records as records

_outcomes: dict[str, tuple[str, list[str]]] = {}
_started: dict[str, float] = {}
_session: list[Any] = []


def pytest_sessionstart(session: Any) -> None:
    """Keeps what can be told to stop."""
    records.die_with_parent()
    _session.append(session)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leaves out what another process has run already."""
    skip = records.skipped()
    left_out = [item for item in items if item.nodeid in skip]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid not in skip]


def pytest_collection_finish(session: Any) -> None:
    """Says what is going to run."""
    records.write("items", items=[item.nodeid for item in session.items])


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    """Says which test runs now."""
    _started[nodeid] = time.perf_counter()
    records.write("started", item=nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    """Keeps the outcome of setting up, calling and tearing down: the worst counts."""
    text = str(report.longrepr or "")
    if isinstance(report.longrepr, tuple):  # of a skip: file, line, reason
        text = str(report.longrepr[2])
    if report.failed or report.nodeid not in _outcomes or report.skipped:
        _outcomes[report.nodeid] = (report.outcome, records.tail(text))
    if report.failed and records.broken(text):  # so would be all tests to come
        _session[0].shouldstop = "the GPU works no more in this process"


def pytest_runtest_logfinish(nodeid: str, location: Any) -> None:
    """Writes the test's record."""
    outcome, lines = _outcomes.pop(nodeid, ("failed", ["no report of this test"]))
    reasons = [line for line in lines if line.startswith("E ")] or lines[-1:]
    spent = time.perf_counter() - _started.pop(nodeid)
    why = " ".join(reasons[0].removeprefix("E ").split()) if reasons else ""
    records.write("ended", item=nodeid, outcome=outcome, seconds=spent, why=why, tail=lines)
