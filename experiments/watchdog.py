"""Ends a run that hangs: no step finished for so long, so write down all there is, and exit.

A collective that one process never enters keeps all others waiting for ever, without an error.
`hang-PROCESS.txt` in the run folder then says

- which step, evaluation or save was under way, and how far each process had come: the one that
  is behind is the one to look at;
- the Python stacks of all threads (`faulthandler`);
- the collectives of the compiled step, in the order in which they begin. Which of them waits is
  not known: the device runs the whole step as one program and does not report from within. On
  NVIDIA GPUs `ncclras`, on any of the machines while the run hangs, tells which processes have
  entered NCCL's last collective and which have not (NCCL 2.24 or newer).

Should the main thread hold Python's lock, so that this thread cannot run, `faulthandler`'s own
thread, which needs no lock, writes the stacks to stderr and exits.
"""

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TextIO

from experiments.group import Group
from jaxaccel import hlo

FIRST_STEP = 4.0  # times as long: it is compiled
_LISTED = 60.0  # seconds that reading the compiled step may take; the stacks are written by then


class Watchdog:
    """Watches from `with` on; `mark` is what it waits for.

    Args:
      minutes: how long without a mark; 0 for ever.
      folder: of the run, made already.
      group: the processes of the run, which end together.
      program: makes the text of the compiled step.
    """

    def __init__(self, minutes: float, folder: Path, group: Group, program: Callable[[], str]):
        self._limit = 60 * minutes
        self._path = folder / f"hang-{group.index}.txt"
        self._group, self._program = group, program
        self._last = "start"
        self._since, self._times = time.monotonic(), FIRST_STEP
        self._over, self._writing = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._since = time.monotonic()
        if self._limit:
            self._group.on_hang = lambda: self.write("another process found the run hanging")
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        if self._limit:
            self._thread.join()
            self._group.on_hang = None

    def mark(self, last: str) -> None:
        """Something has finished: `last`, as in `step 7`."""
        self._last, self._since, self._times = last, time.monotonic(), 1.0

    def marked[T](self, things: Iterable[T], name: str) -> Iterator[T]:
        """The same things, with a mark before each."""
        for number, thing in enumerate(things, 1):
            self.mark(f"{name} {number} begun")
            yield thing

    def write(self, why: str) -> None:
        """Writes `hang-PROCESS.txt`."""
        with self._writing, open(self._path, "a", encoding="utf-8") as file:
            self._write(file, why)

    def _write(self, file: TextIO, why: str) -> None:
        member = self._group.members[self._group.index]
        print(f"{datetime.now().astimezone():%F %T %z}  {member}: {why}", file=file)
        print(f"last finished here: {self._last}", file=file)
        for i, step in enumerate(self._group.steps):
            if self._group.count > 1:
                print(f"process {i} has sent off step {step}, as far as known here", file=file)
        print("\nPython stacks:\n", file=file, flush=True)
        faulthandler.dump_traceback(file, all_threads=True)
        print("\nCollectives of the compiled step, in the order in which they begin;", file=file)
        print("which of them waits cannot be known from here:\n", file=file, flush=True)
        lines: list[str] = []
        # Apart, and only for a while: what hangs may be what this needs.
        reading = threading.Thread(target=lambda: lines.extend(self._collectives()), daemon=True)
        reading.start()
        reading.join(_LISTED)
        unread = f"(the compiled step could not be read in {_LISTED:g} s)"
        print("\n".join(lines or [unread]), file=file, flush=True)

    def _collectives(self) -> list[str]:
        try:
            return collectives(self._program()) or ["(none)"]
        except Exception as error:  # the stacks count for more: say what went wrong, and go on
            return [f"(the compiled step cannot be read: {type(error).__name__}: {error})"]

    def _watch(self) -> None:
        pause = min(1.0, self._limit / 10)
        while not self._over.wait(pause):
            limit = self._limit * self._times
            faulthandler.dump_traceback_later(limit + 2 * pause, exit=True, file=2)
            if time.monotonic() - self._since > limit:
                self._bite(limit)
        faulthandler.cancel_dump_traceback_later()

    def _bite(self, seconds: float) -> None:
        faulthandler.cancel_dump_traceback_later()
        why = f"sees the run hang: nothing finished for {seconds:.3g} s since {self._last}"
        with contextlib.suppress(OSError):
            self.write(why)
        why += f", stacks in {self._path}"
        self._group.fail(why, hang=True)
        if self._group.count > 1:
            time.sleep(10)  # the link ends all processes; unless process 0 does not answer
        os.write(
            2, f"{self._group.prog}: {self._group.members[self._group.index]} {why}\n".encode()
        )
        os._exit(1)


def collectives(text: str) -> list[str]:
    """The collectives of a compiled program, by computation, in the order of its schedule.

    Args:
      text: of the program, as XLA prints it.

    Returns:
      A line each: computation, name, kind, result, and where JAX made it.
    """
    return [
        f"{computation.name}: {node.name}, {shapes(node)}, {node.op_name or 'made by XLA'}"
        for computation in hlo.parse(text).computations.values()
        for node in computation.instructions.values()
        if node.opcode.removesuffix("-start") in hlo.COLLECTIVES
    ]


def shapes(node: hlo.Instruction) -> str:
    """What an instruction returns, as in `f32[4,8]`."""
    return " ".join(f"{shape.dtype}[{','.join(map(str, shape.dims))}]" for shape in node.shapes)
