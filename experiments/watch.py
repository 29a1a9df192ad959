"""What the training loop watches: the clock, a request to stop, the profiler's window."""

import contextlib
import signal
import time
from collections.abc import Generator
from pathlib import Path
from types import FrameType

import jax

from experiments.errors import UserError


class Clock:
    """Time spent training, pauses (evaluation, saving) left out."""

    def __init__(self):
        self._begin = time.perf_counter()
        self._step = 0

    def start(self, step: int) -> float:
        """Begins a new interval at `step`; returns the seconds of the one before."""
        now = time.perf_counter()
        seconds, self._begin, self._step = now - self._begin, now, step
        return seconds

    def rate(self, step: int) -> float | None:
        """Steps per second since the last call, and begins a new interval; None if no step."""
        steps = step - self._step
        seconds = self.start(step)
        return steps / seconds if steps else None

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        """Leaves the time within out."""
        begin = time.perf_counter()
        yield
        self._begin += time.perf_counter() - begin


class StopRequest:
    """Set by SIGTERM, Ctrl-C or a time limit; the run then saves and ends. A second Ctrl-C kills.

    Args:
      minutes: the time limit, from now; None for none.
    """

    def __init__(self, minutes: float | None):
        self._deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self._signal: str | None = None
        self._before = {}

    def __enter__(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number).name
        signal.signal(number, self._before[number])

    @property
    def reason(self) -> str | None:
        """Why to stop, or None to go on."""
        if self._signal is None and self._deadline and time.monotonic() > self._deadline:
            return "time limit reached"
        return self._signal


class Profile:
    """Writes a JAX profiler trace of the steps START to STOP (counted from 1, both within)."""

    def __init__(self, window: str, folder: Path):
        self._first, self._last, self._folder, self._on = 0, 0, folder, False
        if window:
            first, _, last = window.partition(":")
            if not (first.isdigit() and last.isdigit() and 0 < int(first) <= int(last)):
                raise UserError(f"--profile is {window!r}; write START:STOP, say 10:12")
            self._first, self._last = int(first), int(last)

    def before(self, step: int) -> None:
        """To be called before step number `step` runs."""
        if step == self._first:
            jax.profiler.start_trace(str(self._folder))
            self._on = True

    def after(self, step: int, figures: object) -> bool:
        """To be called after; returns whether the trace was written just now."""
        if not (self._on and step == self._last):
            return False
        jax.block_until_ready(figures)
        self.close()
        return True

    def close(self) -> None:
        """Ends a trace that is under way."""
        if self._on:
            jax.profiler.stop_trace()
            self._on = False
