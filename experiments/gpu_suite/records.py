"""What a stage of the GPU suite says while it runs: lines of JSON, each flushed at once.

So whatever ends the process, a crash, a hang, the machine's, what it found until then is kept. A
record has an `event`. Of a list of things to do: `items`, then for each `started` and `ended` with
an outcome. No third-party import: the process that starts the stages must leave the GPU alone.
"""

import contextlib
import ctypes
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

RECORDS = "GPU_SUITE_RECORDS"  # environment variables: the file, and
SKIP = "GPU_SUITE_SKIP"  # items not to do, a list in JSON
KERNELS = "GPU_SUITE_KERNELS"  # "off": every op in XLA's form
TAIL = 12  # lines of an error that are kept


def write(event: str, **fields: Any) -> None:
    """Adds a record to the file that the environment names."""
    with open(os.environ[RECORDS], "a", encoding="utf-8") as file:
        file.write(json.dumps({"event": event, "time": time.time(), **fields}) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """All whole records of a file; none if there is no file."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def skipped() -> frozenset[str]:
    """Items that this process leaves out."""
    return frozenset(json.loads(os.environ.get(SKIP, "[]")))


def die_with_parent() -> None:
    """Asks Linux to kill this process when the one that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL


def tail(text: str, lines: int = TAIL) -> list[str]:
    """The last lines that say something, cut to a readable width."""
    return [line.rstrip()[:300] for line in text.splitlines() if line.strip()][-lines:]


def brief(error: BaseException) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def broken(text: str) -> bool:
    """Whether an error leaves the process without a working GPU."""
    sticky = ("CUDA_ERROR_", "ILLEGAL_ADDRESS", "illegal memory access", "misaligned address",
              "LAUNCH_FAILED", "unspecified launch failure")  # fmt: skip
    return any(word in text for word in sticky) and "OUT_OF_MEMORY" not in text


def each(items: Iterable[tuple[str, Callable[[], None]]]) -> int:
    """Does one item after the other; an error ends its item alone.

    Args:
      items: names, and what is to be done, which writes records of its own.

    Returns:
      Exit status: 1 where an item failed.

    Raises:
      Exception: an item's, where the GPU works no more in this process; a new one goes on.
    """
    todo, left_out, failed = list(items), skipped(), False
    write("items", items=[name for name, _ in todo if name not in left_out])
    for name, work in todo:
        if name in left_out:
            continue
        write("started", item=name)
        start = time.perf_counter()
        try:
            work()
        except Exception as error:
            text, failed = traceback.format_exc(), True
            print(text, file=sys.stderr, flush=True)
            spent = time.perf_counter() - start
            write("ended", item=name, outcome="failed", seconds=spent, why=brief(error),
                  tail=tail(text))  # fmt: skip
            if broken(text):
                raise
            with contextlib.suppress(AttributeError):
                error.__traceback__ = None  # lets go of the arrays of its frames
        else:
            write("ended", item=name, outcome="passed", seconds=time.perf_counter() - start)
    return int(failed)
