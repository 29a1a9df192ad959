"""One model trained by several real processes on the loopback address, CPU collectives by Gloo."""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.runlog import read_metrics

STEPS = 25
OPTIONS = [
    "--model.layers", "2", "--model.width", "32", "--model.heads", "2", "--model.kv-heads", "2",
    "--model.head-size", "16", "--model.mlp-width", "64", "--batch", "8", "--sequence", "32",
    "--log-every", "1", "--save-every", "5", "--eval-every", "12", "--eval-batches", "2",
    "--steps", str(STEPS), "--join-timeout", "1",
]  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Lines of a small grammar, some 60 kB in twenty files."""
    folder, draw = tmp_path_factory.mktemp("text"), random.Random(0)
    for i in range(20):
        words = (draw.choice(["red", "green", "blue", "grows", "falls", "."]) for _ in range(600))
        (folder / f"{i}.txt").write_text(" ".join(words))
    return folder


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Run:
    """The processes of one run."""

    def __init__(self, text: Path, count: int, devices: int, *options: object, each=()):
        command = [sys.executable, "-m", "experiments.train", "tiny", *OPTIONS]
        command += ["--data.source", str(text), *map(str, options)]
        where = [f"--coordinator=127.0.0.1:{free_port()}", f"--processes={count}"]
        flags = f"--xla_force_host_platform_device_count={devices}"
        self.processes = []
        for i in range(count):
            own = [*where, f"--process={i}"] if count > 1 else []
            own += each[i] if each else []
            self.processes.append(
                subprocess.Popen(
                    [*command, *own],
                    env=os.environ | {"XLA_FLAGS": flags},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )

    def kill(self, index: int, number: signal.Signals) -> None:
        self.processes[index].send_signal(number)

    def ends(self, *, timeout: float = 150) -> list[tuple[int, str, str]]:
        """(status, stdout, stderr) of each."""
        ends = [process.communicate(timeout=timeout) for process in self.processes]
        return [(p.returncode, out, err) for p, (out, err) in zip(self.processes, ends)]

    def wait_for_step(self, folder: Path, step: int) -> None:
        deadline = time.monotonic() + 150
        while time.monotonic() < deadline and all(p.poll() is None for p in self.processes):
            if (folder / "metrics.jsonl").exists() and max(losses(folder), default=0) >= step:
                return
            time.sleep(0.01)
        raise AssertionError(f"never reached step {step}: {self.ends(timeout=5)}")


@pytest.fixture(scope="module")
def start(text):
    """Starts a run of so many processes with so many devices each; none outlives the tests."""
    with contextlib.ExitStack() as stack:

        def launch(*arguments: object, **options) -> Run:
            run = Run(text, *arguments, **options)
            for process in run.processes:
                stack.callback(process.wait)
                stack.callback(process.kill)
            return run

        yield launch


def losses(folder: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_metrics(folder)}


def validation(folder: Path) -> dict[int, float]:
    return {r["step"]: r["val_loss"] for r in read_metrics(folder) if r["val_loss"] is not None}


def same_losses(folder: Path, reference: Path) -> None:
    for figures in (losses, validation):
        got, wanted = figures(folder), figures(reference)
        assert got.keys() == wanted.keys()
        for step, loss in wanted.items():
            assert abs(got[step] - loss) < 1e-4 * loss, (step, got[step], loss)


def one_line(err: str) -> str:
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    return lines[0]


@pytest.fixture(scope="module")
def alone(start, tmp_path_factory) -> Path:
    """The run of one process with one device that the others are compared with."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    ((status, _, err),) = start(1, 1, "--run-dir", folder).ends()
    assert status == 0, err
    assert max(losses(folder)) == STEPS and len(validation(folder)) == 3
    return folder


def test_four_processes_one_killed_resumed_by_two_then_by_one(start, alone, tmp_path):
    # The mesh axis tensor lies across processes: pairs of them need the same rows.
    folder = tmp_path / "run"
    run = start(4, 1, "--run-dir", folder, "--mesh", "data=2,tensor=2")
    run.wait_for_step(folder, 7)
    killed, pid = time.monotonic(), run.processes[2].pid
    run.kill(2, signal.SIGKILL)
    ends = run.ends()
    assert time.monotonic() - killed < 60
    for i in (0, 1, 3):
        status, _, err = ends[i]
        assert status == 1
        line = one_line(err)
        assert re.search(rf"process 2 of 4 \(\S+, pid {pid}\) died; last step \d+", line)
        assert (folder / f"stopped-{i}.txt").read_text().strip() == line
    died = max(losses(folder))
    assert 7 <= died < STEPS
    same = losses(alone)
    assert all(abs(loss - same[step]) < 1e-4 * loss for step, loss in losses(folder).items())

    # The sequence lies across processes: each has all rows, and half of every one. A wish of one
    # process to stop is everyone's.
    run = start(2, 2, "--run-dir", folder, "--mesh", "sequence=2,fsdp=2")
    run.wait_for_step(folder, died + 2)
    run.kill(1, signal.SIGTERM)
    (status, out, err), other = run.ends()
    assert status == other[0] == 0, err + other[2]
    assert "resumed at step 5" in out or "resumed at step 10" in out
    stopped = re.search(r"SIGTERM \(process 1\): saving at step (\d+)", out)
    assert stopped and died + 2 <= int(stopped[1]) < STEPS
    assert not re.search(r"step|loss|text", other[1])  # process 0 alone speaks
    assert (folder / "checkpoints" / f"{int(stopped[1]):08}").is_dir()

    ((status, out, err),) = start(1, 1, "--run-dir", folder).ends()
    assert status == 0, err
    assert f"resumed at step {stopped[1]}" in out
    same_losses(folder, alone)


def test_two_processes_give_the_losses_of_one_and_end_together(start, alone, tmp_path):
    folder = tmp_path / "run"
    # Each process is a stage of a pipeline, and needs all rows.
    ends = start(2, 2, "--run-dir", folder, "--mesh", "stage=2,fsdp=2", "--micro-batches", 2).ends()
    assert [status for status, _, _ in ends] == [0, 0], ends
    assert not any(err for _, _, err in ends)
    same_losses(folder, alone)
    for name in ("config.json", "env.json", "loss.png", "sample.txt"):
        assert (folder / name).stat().st_size > 0, name
    assert len(list((folder / "checkpoints").iterdir())) == 3
    assert "Validation loss" in ends[0][1]
    assert not list(folder.glob("stopped*")) and not list(folder.glob("hang*"))


# What a run is to the link: processes that join, and meet in a collective at every step.
MEMBER = """
import dataclasses, pathlib, sys
import jax, numpy as np
from jax.experimental import multihost_utils
from experiments import cluster, configs
from experiments.errors import UserError

address, index, folder, last = sys.argv[1:]
config = dataclasses.replace(
    configs.load("tiny"), coordinator=address, processes=2, process=int(index), join_timeout=1.0
)
explain = lambda error: (str(error), 2) if isinstance(error, UserError) else None
with cluster.join(config, "prog", explain) as group:
    for step in range(1, 100_000):
        if group.index == 1 and step == int(last):
            raise UserError("a line of the file data.txt is damaged")
        multihost_utils.process_allgather(np.int32(step))
        group.stop(step, None)
        if step == 3:
            pathlib.Path(folder, index).touch()
"""


def members(folder: Path, last: int) -> list[subprocess.Popen]:
    address = f"127.0.0.1:{free_port()}"
    return [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER, address, str(i), str(folder), str(last)],
            env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]


def test_process_0_killed_and_an_error_of_one_end_the_other(tmp_path):
    (tmp_path / "killed").mkdir()
    first, second = members(tmp_path / "killed", 0)
    deadline = time.monotonic() + 100
    while not (tmp_path / "killed" / "1").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    first.kill()
    _, err = second.communicate(timeout=60)
    first.communicate()
    # JAX aborts a process whose coordinator is gone, and sometimes is there first with its words.
    assert second.returncode == 1
    line = rf"^prog: process 0 of 2 \(\S+, pid {first.pid}\) died; last step \d+; this process"
    assert re.search(line, err, re.MULTILINE)

    both = members(tmp_path, 4)
    for process in both:
        _, err = process.communicate(timeout=100)
        assert process.returncode == 2
        cause = f"pid {both[1].pid}) stopped: a line of the file data.txt is damaged; last step 3"
        assert cause in one_line(err)


def test_a_process_that_is_stuck_is_found_by_the_watchdog(start, tmp_path):
    folder = tmp_path / "run"
    run = start(2, 1, "--run-dir", folder, "--hang-timeout", 0.05, "--save-every", 1000)
    run.wait_for_step(folder, 3)
    run.kill(1, signal.SIGSTOP)
    out, err = run.processes[0].communicate(timeout=100)
    assert run.processes[0].returncode == 1, out
    run.kill(1, signal.SIGKILL)
    run.processes[1].communicate()
    line = one_line(err)
    assert re.search(
        r"process 0 of 2 \(.*\) sees the run hang: nothing finished for 3 s since step \d+", line
    )
    assert str(folder / "hang-0.txt") in line
    report = (folder / "hang-0.txt").read_text()
    sent = [int(n) for n in re.findall(r"process \d has sent off step (\d+)", report)]
    assert len(sent) == 2 and sent[1] <= sent[0]  # the stuck one is not ahead
    assert "experiments/train.py" in report and "in settle" in report  # where the loop waits
    assert re.search(r"all-gather|all-reduce|all-to-all", report)
    assert "jit(step)" in report.partition("Collectives of the compiled step")[2]


def test_bad_starts_are_one_line_and_write_nothing(start, tmp_path):
    folder = tmp_path / "run"
    unlike = start(
        2, 1, "--run-dir", folder, each=[["--seed=0"], ["--seed=7", "--optimizer.b2=0.9"]]
    )
    absent = start(2, 1, "--run-dir", folder, "--join-timeout", 0.05)
    absent.kill(0, signal.SIGKILL)
    for status, _, err in unlike.ends():
        assert status == 2
        line = one_line(err)
        assert "seed (0 on process 0, 7 on process 1)" in line
        assert "optimizer.b2 (0.95 on process 0, 0.9 on process 1)" in line
        assert "process (" not in line
    _, (status, _, err) = absent.ends()
    assert status == 2
    assert re.search(r"127\.0\.0\.1:\d+ within 3 s: connection refused; check", one_line(err))
    assert not folder.exists()
