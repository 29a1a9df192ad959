"""The watchdog, in processes of its own: it ends them."""

import re
import subprocess
import sys
from pathlib import Path

from experiments.watchdog import collectives

PROGRAM = """ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %start = (f32[8]{0}, f32[8]{0}) all-gather-start(%x), metadata={op_name="jit(step)/embed"}
  %done = f32[8]{0} all-gather-done(%start)
  ROOT %sum = f32[8]{0} all-reduce(%done), to_apply=%add
}"""

SCRIPT = """
import ctypes, sys, threading, time
from pathlib import Path
from experiments.group import Group
from experiments.watchdog import Watchdog

def stuck():
    if sys.argv[2] == "waits":
        threading.Event().wait(100)
    ctypes.PyDLL(None).sleep(100)  # with Python's lock held

dog = Watchdog(0.3 / 60, Path(sys.argv[1]), Group("prog"), lambda: PROGRAM)
with Watchdog(0, Path(sys.argv[1]), Group("prog"), lambda: PROGRAM), dog:
    for batch in dog.marked(range(10), "validation batch"):  # three times as long
        time.sleep(0.1)
    dog.mark("step 7")
    if sys.argv[2] != "ends":
        stuck()
print("done")
"""


def run(folder: Path, how: str) -> tuple[int, str, str]:
    program = f"PROGRAM = {PROGRAM!r}\n{SCRIPT}"
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder), how],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


def test_marks_keep_it_quiet_and_a_wait_without_end_is_reported(tmp_path):
    status, out, err = run(tmp_path, "waits")
    assert (status, out) == (1, "")
    path = tmp_path / "hang-0.txt"
    seen = "prog: this process sees the run hang: nothing finished for 0.3 s since step 7"
    line = f"{seen}, stacks in {path}\n"
    assert err == line
    report = path.read_text()
    assert "last finished here: step 7" in report
    assert re.search(r'File "<string>", line \d+ in stuck', report)
    first, second = report.strip().splitlines()[-2:]
    assert first == "main: start, f32[8] f32[8], jit(step)/embed"
    assert second == "main: sum, f32[8], made by XLA"


def test_without_pythons_lock_the_stacks_go_to_stderr(tmp_path):
    status, out, err = run(tmp_path, "holds the lock")
    assert (status, out) == (1, "")
    assert re.search(r'File "<string>", line \d+ in stuck', err)


def test_it_leaves_nothing_behind(tmp_path):
    assert run(tmp_path, "ends") == (0, "done\n", "")
    assert not list(tmp_path.iterdir())


def test_collectives_are_those_of_the_program():
    assert [line.partition(",")[0] for line in collectives(PROGRAM)] == ["main: start", "main: sum"]
