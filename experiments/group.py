"""The processes of one run, as the program sees them: what they agree on, and how they end."""

import contextlib
import hashlib
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments.errors import RunStopped, UserError
from experiments.link import Ending, Link

_CAUSE = 3.0  # an error may be the echo of a death: so long the death has to become known


class DifferError(UserError):
    """Processes of one run are unlike; each of them raises it."""


class Group:
    """The processes of a run; without a link, the only one.

    `folder` is set once the run folder is there, and `on_hang` to what writes stacks.
    """

    def __init__(self, prog: str = ""):
        self.folder: Path | None = None
        self.on_hang: Callable[[], None] | None = None
        self.members = ["this process"]
        self._link: Link | None = None
        self.prog, self._posted = prog, ""

    @property
    def index(self) -> int:
        """Of this process."""
        return self._link.index if self._link else 0

    @property
    def count(self) -> int:
        """Of processes."""
        return self._link.count if self._link else 1

    @property
    def first(self) -> bool:
        """Whether this is process 0, which prints, logs and decides."""
        return self.index == 0

    @property
    def steps(self) -> list[int | None]:
        """The last step that each process has sent off, as far as it is known here."""
        return self._link.steps if self._link else [None]

    def exchange(self, name: str, value: Any) -> list[Any]:
        """Everyone's value of `name`, by process; waits for all of them."""
        return self._link.exchange(name, value) if self._link else [value]

    def agree(self, facts: Mapping[str, Any], about: str) -> None:
        """Refuses to go on where a process has other facts than process 0.

        Raises:
          DifferError: on every process.
        """
        every = self.exchange(about, dict(facts))
        if unlike := differences(every):
            raise DifferError(
                f"the processes of this run differ in {about}: {unlike}; "
                "start all of them with the same options, code and packages"
            )

    def stop(self, step: int, reason: str | None) -> str | None:
        """Why all processes stop after `step`, or None; `reason` is this process' own.

        With several processes it answers what they said a step ago, so that none waits for
        another and all stop at the same step.
        """
        if self._link is None:
            return reason
        before, self._posted = self._posted, f"step {step}"
        self._link.post(self._posted, reason, step)
        if not before:
            return None
        said = {i: why for i, why in enumerate(self._link.result(before)) if why}
        return next((f"{why} (process {i})" for i, why in said.items()), None)

    def fail(self, what: str, *, status: int = 1, hang: bool = False) -> None:
        """Ends the run on all processes, for what happened to this one."""
        if self._link:
            self._link.end(what, status=status, hang=hang)

    def check_shared(self, path: Path, patience: float = 60) -> None:
        """Refuses a run folder that is not one and the same for all processes.

        Args:
          path: a file that process 0 has just written.
          patience: seconds that a network file system may take to show it.

        Raises:
          DifferError: on every process.
        """
        digest = lambda: hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None
        wanted = self.exchange("run folder", digest() if self.first else None)[0]
        waiting = threading.Event()
        while (seen := digest() == wanted) is False and patience > 0:
            waiting.wait(0.2)
            patience -= 0.2
        blind = [i for i, sees in enumerate(self.exchange("run folder seen", seen)) if not sees]
        if blind:
            raise DifferError(
                f"{path.parent.absolute()}, as {self.members[0]} wrote it, is not seen by "
                f"{', '.join(self.members[i] for i in blind[:4])}: choose a --run-dir on a file "
                "system that all machines share"
            )

    def connect(self, link: Link) -> None:
        """Makes this one process of several."""
        self._link = link

    def hello(self, facts: Mapping[str, Any]) -> None:
        """Learns who the others are, and refuses to go on where `facts` differ."""
        us = {"host": socket.gethostname(), "pid": os.getpid()}
        self.members = [
            f"process {i} of {self.count} ({it['host']}, pid {it['pid']})"
            for i, it in enumerate(self.exchange("hello", us))
        ]
        self.agree(facts, "options or code")

    def close(self) -> None:
        """Parts from the others after a clean end."""
        if self._link:
            self._link.close()

    def ended(self, ending: Ending) -> None:
        """On a thread of the link: one line, and out."""
        known = len(self.members) > ending.process
        who = self.members[ending.process] if known else f"process {ending.process}"
        last = "before the first step" if ending.last is None else f"last step {ending.last}"
        line = f"{self.prog}: {who} {ending.what}; {last}; this process ends with it\n"
        os.write(2, line.encode())  # nothing buffered: the main thread may hold that lock
        with contextlib.suppress(OSError):
            if self.folder is not None and self.folder.is_dir():
                with open(self.folder / f"stopped-{self.index}.txt", "a") as file:
                    file.write(line)
            if ending.hang and ending.process != self.index and self.on_hang:
                self.on_hang()
        os._exit(ending.status)

    def abandon(self, error: BaseException, explain: Callable) -> None:
        """On the main thread, for an exception that ends the run: never returns."""
        assert self._link is not None
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        if isinstance(error, DifferError):  # everyone's: nobody has to be told
            os.write(2, f"{self.prog}: {error}\n".encode())
            self._link.close()
            os._exit(2)
        own = type(error) in (UserError, RunStopped, KeyboardInterrupt)
        if own or not self._link.ends_within(_CAUSE):
            if (known := explain(error)) is None:
                traceback.print_exception(error)
                reason = (str(error).splitlines() or [""])[0]
                known = f"{type(error).__name__}: {reason}", 1
            self._link.end(f"stopped: {known[0]}", status=known[1])
        threading.Event().wait(2 * _CAUSE)  # the link ends this process
        os._exit(1)


def differences(every: list[dict[str, Any]], most: int = 6) -> str:
    """Facts in which processes differ from process 0, with both values; empty if there are none.

    Example:
      >>> differences([{"seed": 0, "steps": 9}, {"seed": 1, "steps": 9}])
      'seed (0 on process 0, 1 on process 1)'
    """
    first, found = every[0], []
    for key in dict.fromkeys(key for facts in every for key in facts):
        for i, facts in enumerate(every):
            if facts.get(key) != first.get(key):
                found.append(
                    f"{key} ({first.get(key)!r} on process 0, {facts.get(key)!r} on process {i})"
                )
                break
    more = [f"and {len(found) - most} more"] if len(found) > most else []
    return ", ".join(found[:most] + more)
