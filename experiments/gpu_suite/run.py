"""Runs the parts of a GPU suite's stage, each in a process of its own, within a time box.

A part may have items (tests of a file, cases of a benchmark), of which it says when each starts and
ends (`records`). Where an item crashes its process, hangs, or leaves the GPU broken, it
is written down, and a new process goes on with the others. A part whose stage ran out of time can
go on later. Processes are killed as groups, with SIGKILL: what waits for a GPU hears nothing else.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.gpu_suite import records as records

ROOT = Path(__file__).parents[2]
STARTS = 6  # processes of a part, at most
POLL = 0.1  # seconds


@dataclasses.dataclass
class Part:
    """One program of a stage, and what is known of it."""

    name: str
    command: list[str]
    item_box: float = 60.0  # seconds of an item
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    starts: int = 0
    seconds: float = 0.0
    status: str = "not started"  # then ok, failed, out of time, out of memory, hung, crashed
    why: str = ""
    finished: bool = False  # nothing is left to go on with
    tail: list[str] = dataclasses.field(default_factory=list)
    items: list[str] = dataclasses.field(default_factory=list)
    ended: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    records: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def take(self, new: list[dict[str, Any]]) -> None:
        """Takes in records."""
        for record in new:
            if record["event"] == "items":
                self.items += [item for item in record["items"] if item not in self.items]
            elif record["event"] == "ended":
                self.ended[record["item"]] = record
            elif record["event"] != "started":
                self.records.append(record)

    @property
    def left(self) -> list[str]:
        """Items that have not been tried."""
        return [item for item in self.items if item not in self.ended]

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return fields | {"ended": list(self.ended.values()), "left": self.left}


class _Process:
    """A running part."""

    def __init__(self, part: Part, folder: Path, environment: dict[str, str]):
        self.part, self.started, self.seen = part, time.monotonic(), 0
        part.starts += 1
        stem = f"{part.name}-{part.starts}".replace("/", "_").replace(" ", "_")
        self.file, self.log = folder / f"{stem}.jsonl", folder / f"{stem}.log"
        self.item, self.item_started = "", self.started
        variables = os.environ | environment | part.environment
        variables[records.RECORDS] = str(self.file)
        variables[records.SKIP] = json.dumps(list(part.ended))
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                part.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=variables,
                cwd=ROOT,
                start_new_session=True,
            )

    def news(self) -> list[dict[str, Any]]:
        """Records since the last call."""
        found = records.read(self.file)
        new, self.seen = found[self.seen :], len(found)
        for record in new:
            if record["event"] in ("started", "ended"):
                self.item = record["item"] if record["event"] == "started" else ""
                self.item_started = time.monotonic()
        self.part.take(new)
        return new

    def kill(self) -> None:
        """Ends the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        # A process amid a call of the driver may take its time: it is not waited for.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=3)

    def settle(self, killed: str) -> None:
        """Writes down how the process ended; `killed` says why it was, if it was."""
        part, code = self.part, self.process.poll()
        self.news()
        part.seconds += time.monotonic() - self.started
        output = self.log.read_text(encoding="utf-8", errors="replace")
        part.tail = records.tail(output)
        no_memory = "RESOURCE_EXHAUSTED" in output or "OUT_OF_MEMORY" in output
        if killed == "out of time":  # of the stage: the item that ran is not to blame
            part.status, part.why = killed, f"after {part.seconds:.0f} s"
            return
        if killed or (code and code < 0):
            part.status = killed or "crashed"
            part.why = f"{self.item or 'no item'}: " + (
                f"nothing for {time.monotonic() - self.item_started:.0f} s"
                if killed
                else f"signal {-(code or 0)}"
            )
            if self.item:
                outcome = {"outcome": part.status, "why": part.why, "tail": part.tail}
                spent = time.monotonic() - self.item_started
                part.ended[self.item] = {"item": self.item, "seconds": spent, **outcome}
        elif code and self.item:  # it ended amid an item without a word
            why = part.tail[-1] if part.tail else f"exit status {code}"
            outcome = {"outcome": "crashed", "seconds": 0.0, "why": why, "tail": part.tail}
            part.ended[self.item] = {"item": self.item, **outcome}
        outcomes = {item: record["outcome"] for item, record in part.ended.items()}
        bad = [item for item, outcome in outcomes.items() if outcome not in ("passed", "skipped")]
        if outcomes and set(outcomes.values()) == {"skipped"}:
            part.status, part.why = "skipped", next(iter(part.ended.values()))["why"]
        elif bad:
            part.status = "failed"
            part.why = f"{len(bad)} of {len(part.items)}: " + ", ".join(sorted(bad))[:300]
        elif code and not killed and code > 0:
            part.status = "out of memory" if no_memory else "failed"
            part.why = part.tail[-1] if part.tail else f"exit status {code}"
        elif not code and not killed:
            part.status, part.why = "ok", ""
        part.finished = not part.left or part.starts >= STARTS


def run(
    parts: list[Part],
    seconds: float,
    folder: Path,
    *,
    at_once: int = 1,
    environment: dict[str, str] = {},  # noqa: B006 (never changed)
    listen: Callable[[Part, list[dict[str, Any]]], None] = lambda part, new: None,
) -> None:
    """Runs parts until all are finished or the time is over; `parts` hold what was found.

    Args:
      parts: those that are finished are left alone, others go on with the items that are left.
      seconds: for all together.
      folder: for records and logs.
      at_once: how many run at the same time.
      environment: variables of all.
      listen: told of new records, and with none when a process has ended.
    """
    deadline = time.monotonic() + seconds
    waiting = [part for part in parts if not part.finished and part.starts < STARTS]
    running: list[_Process] = []
    try:
        while waiting or running:
            now = time.monotonic()
            while waiting and len(running) < at_once and now < deadline:
                running.append(_Process(waiting.pop(0), folder, environment))
            if not running:
                break
            for one in list(running):
                if new := one.news():
                    listen(one.part, new)
                killed = ""
                if one.process.poll() is None:
                    if time.monotonic() >= deadline:
                        killed = "out of time"
                    elif one.item and time.monotonic() - one.item_started > one.part.item_box:
                        killed = "hung"
                    if not killed:
                        continue
                    one.kill()
                running.remove(one)
                one.settle(killed)
                listen(one.part, [])
                if not one.part.finished and killed != "out of time":
                    waiting.append(one.part)  # behind those that have not had a turn
            time.sleep(POLL)
    finally:
        for one in running:
            one.kill()
            one.settle("out of time")
