"""The training program as a user meets it: resume, stop, bad input, what it leaves behind."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments import train
from experiments.runlog import read_metrics

SMALL = [
    "--model.layers", "2", "--model.width", "32", "--model.heads", "2", "--model.kv-heads", "1",
    "--model.head-size", "16", "--model.mlp-width", "48", "--batch", "4", "--sequence", "32",
    "--log-every", "1", "--save-every", "5", "--eval-every", "1000", "--eval-batches", "2",
]  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Lines of a small grammar, some 60 kB in twenty files."""
    folder, draw = tmp_path_factory.mktemp("text"), random.Random(0)
    for i in range(20):
        words = (draw.choice(["red", "green", "blue", "grows", "falls", "."]) for _ in range(600))
        (folder / f"{i}.txt").write_text(" ".join(words))
    return folder


@pytest.fixture(scope="module")
def start(text):
    """Starts `python -m experiments.train` on so many CPU devices."""

    def launch(*options: object, devices: int = 1) -> subprocess.Popen:
        flags = f"--xla_force_host_platform_device_count={devices}"
        command = [sys.executable, "-m", "experiments.train", "tiny", *SMALL]
        command += ["--data.source", str(text), *map(str, options)]
        return subprocess.Popen(
            command,
            env=os.environ | {"XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return launch


@pytest.fixture(scope="module")
def run(start):
    """Runs it to its end: (status, stdout, stderr)."""

    def finish(*options: object, devices: int = 1) -> tuple[int, str, str]:
        process = start(*options, devices=devices)
        out, err = process.communicate(timeout=300)
        return process.returncode, out, err

    return finish


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory) -> Path:
    """A run of 20 steps that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    status, out, err = run("--run-dir", folder, "--steps", 20)
    assert status == 0, err
    assert "Validation loss" in out
    assert str(folder) in out
    return folder


def losses(folder: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_metrics(folder)}


def one_line(err: str) -> str:
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    assert "Traceback" not in err
    return lines[0]


def wait_for_step(process: subprocess.Popen, folder: Path, step: int) -> None:
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        if (folder / "metrics.jsonl").exists() and max(losses(folder), default=0) >= step:
            return
        time.sleep(0.01)
    raise AssertionError(f"never reached step {step}: {process.communicate(timeout=5)}")


def test_a_run_leaves_what_it_promises(whole):
    for name in ("config.json", "env.json", "loss.png", "sample.txt", "metrics.jsonl"):
        assert (whole / name).stat().st_size > 0, name
    rows = read_metrics(whole)
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5
    assert rows[-1]["val_loss"] < rows[0]["loss"] - 0.5
    assert set(rows[0]) >= set(
        "step loss val_loss grad_norm learning_rate tokens_per_second mfu peak_memory_gib "
        "skipped_steps loss_scale".split()
    )
    assert len(list((whole / "checkpoints").iterdir())) == 3


def test_killed_twice_and_resumed_the_losses_are_bit_for_bit_the_same(start, run, whole, tmp_path):
    folder = tmp_path / "run"
    for step in (7, 13):
        process = start("--run-dir", folder, "--steps", 20)
        wait_for_step(process, folder, step)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert max(losses(folder)) < 20
    status, out, err = run("--run-dir", folder, "--steps", 20)
    assert status == 0, err
    assert "resumed at step" in out
    assert losses(folder) == losses(whole)


def test_sigterm_saves_and_exits_with_0(start, run, whole, tmp_path):
    folder = tmp_path / "run"
    process = start("--run-dir", folder, "--steps", 20, "--save-every", 1000)
    wait_for_step(process, folder, 3)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert "SIGTERM: saving at step" in out
    status, out, err = run("--run-dir", folder, "--steps", 20)
    assert status == 0, err
    assert losses(folder) == losses(whole)


def test_time_limit_saves_and_steps_may_be_raised(run, tmp_path):
    folder = tmp_path / "run"
    schedule = ["--optimizer.schedule", "constant"]
    status, out, err = run("--run-dir", folder, "--steps", 9, "--time-limit", 0, *schedule)
    assert status == 0, err
    assert "time limit reached" in out
    status, out, err = run("--run-dir", folder, "--steps", 3, *schedule)
    assert status == 0, err
    assert max(losses(folder)) == 3
    status, out, err = run("--run-dir", folder, "--steps", 3, *schedule)
    assert status == 0
    assert "already at step 3 of 3" in out
    status, out, err = run("--run-dir", folder, "--steps", 5, *schedule)
    assert status == 0, err
    assert sorted(losses(folder)) == [1, 2, 3, 4, 5]


def test_eight_devices_give_the_losses_of_one(run, whole, tmp_path):
    options = ["--run-dir", tmp_path / "run", "--steps", 20, "--batch", 4]
    status, _, err = run(*options, "--mesh", "data=2,fsdp=2,tensor=2", devices=8)
    assert status == 0, err
    sharded, single = losses(tmp_path / "run"), losses(whole)
    assert sharded.keys() == single.keys()
    for step, loss in sharded.items():
        assert abs(loss - single[step]) < 2e-4 * abs(single[step])


def test_gradients_that_stay_non_finite_stop_the_run(run, tmp_path):
    status, _, err = run(
        "--run-dir", tmp_path / "run", "--steps", 20, "--max-skipped", 3, "--save-every", 1,
        "--optimizer.learning-rate", 1e30, "--optimizer.warmup-steps", 0,
    )  # fmt: skip
    assert status == 1
    line = one_line(err)
    assert "3 steps in a row had non-finite gradients" in line
    assert ".txt" in line
    assert "last good checkpoint: " in line
    assert (tmp_path / "run" / "checkpoints" / line.rpartition("/")[2]).is_dir()


def test_dry_run_writes_nothing(run, tmp_path):
    status, out, err = run("--run-dir", tmp_path / "run", "--dry-run")
    assert status == 0, err
    assert "parameters; 128 tokens a step;" in out
    assert "'kv_heads': 1" in out
    assert not (tmp_path / "run").exists()


# What to pass, and what the one line of refusal names.
REFUSED = [
    (["--batch", "5", "--micro-batches", "2"], ["batch of 5 rows", "multiples of 2", "4 or 6"]),
    (["--data.source", "no/such/file"], ["no/such/file"]),
    (["--sequence", "100000"], ["tokens", "one batch"]),
    (["--mesh", "fsdp=3"], ["fsdp=3", "3 places", "1 devices"]),
    (["--mesh", "fdsp=1"], ["fdsp=1", "data, fsdp, sequence, tensor"]),
    (["--model.vocab-size", "200"], ["258", "--model.vocab-size"]),
    (["--model.kv-heads", "3"], ["2 query heads", "3 key/value heads"]),
    (["--resume", "must"], ["no whole checkpoint"]),
    (["--profile", "7"], ["START:STOP"]),
    (["--steps", "0"], ["--steps is 0"]),
    (["--mtp.kind", "parallel"], ["--mtp options are for heads", "pass --mtp.depth 1"]),
    (["--mtp.depth", "1", "--mtp.schedule", "soon"], ["mtp schedule is 'soon'", "6000:0.1"]),
    (["--mtp.depth", "256"], ["--mtp.depth is 256", "at most"]),
    (["--remat", "auto", "--budget-gib", "nan"], ["--budget-gib is nan", "above 0"]),
    (["--remat", "offload"], ["--remat offload", "full"]),
    (["--seed", "-1"], ["--seed is -1", "2**32 - 1"]),
    (
        ["--fp8", "current", "--fp8-layers", "ffn"],
        ["FP8 for 'ffn': there is no such layer", "query"],
    ),
    (["--fp8", "current", "--fp8-strict"], ["cpu has no FP8 matmuls", "--fp8-strict"]),
    (["--fp8", "fast"], ["'off', 'current', 'delayed', 'block'"]),
    (["--fp8-scaling.window", "0"], ["window is 0 steps", "at least 1"]),
    (["--stpes", "3"], ["--steps"]),  # the nearest option
]

# Each case from the command line on, but all in one process: JAX is imported once.
REFUSE_ALL = """
import contextlib, io, json, sys
from experiments import train
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            train.main(arguments)
            status = None
        except SystemExit as stop:
            status = stop.code
    print(json.dumps([status, err.getvalue()]))
"""


def refuse_all(text: Path, cases: list[list[str]]) -> list[tuple[int, str]]:
    """Status and standard error of each command line."""
    start = ["tiny", *SMALL, "--data.source", str(text)]
    done = subprocess.run(
        [sys.executable, "-c", REFUSE_ALL, json.dumps([[*start, *case] for case in cases])],
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    found = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    assert len(found) == len(cases)
    return found


@pytest.fixture(scope="module")
def refusals(text, tmp_path_factory) -> tuple[list[tuple[int, str]], Path]:
    """What came of `REFUSED`, and the folder of their run folders."""
    folder = tmp_path_factory.mktemp("refused")
    cases = enumerate(options for options, _ in REFUSED)
    return refuse_all(text, [["--run-dir", str(folder / str(i)), *o] for i, o in cases]), folder


@pytest.mark.parametrize("case", range(len(REFUSED)), ids=lambda i: " ".join(REFUSED[i][0]))
def test_bad_input_is_one_line_and_writes_nothing(refusals, case):
    found, folder = refusals
    status, err = found[case]
    assert status == 2
    line = one_line(err)
    for part in REFUSED[case][1]:
        assert part in line
    assert not (folder / str(case)).exists()


def test_a_run_folder_that_cannot_be_made_is_one_line(text):
    folders = (text / "0.txt", text / "0.txt" / "run")
    found = refuse_all(text, [["--run-dir", str(folder), "--steps", "1"] for folder in folders])
    for folder, (status, err) in zip(folders, found, strict=True):
        assert status == 2
        assert str(folder) in one_line(err)


def test_no_space_for_metrics_is_one_line(monkeypatch, capsys, tmp_path):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(train, "train", full)
    with pytest.raises(SystemExit) as exit:
        train.main(["--run-dir", str(tmp_path / "run")])
    assert exit.value.code == 1
    assert "No space left on device; checkpoints" in one_line(capsys.readouterr().err)


def test_an_unknown_config_is_refused_with_the_nearest():
    process = subprocess.run(
        [sys.executable, "-m", "experiments.train", "tinny"], capture_output=True, text=True
    )
    assert process.returncode == 2
    assert "did you mean tiny?" in one_line(process.stderr)


def test_other_options_for_a_run_folder_are_refused(run, whole):
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    options = ["--run-dir", whole, "--steps", 30, "--seed", 7, "--model.qk-norm"]
    status, _, err = run(*options)
    assert status == 2
    line = one_line(err)
    assert "seed (0 there, 7 asked)" in line
    assert "model.qk_norm" in line
    assert before == {path: path.stat().st_mtime_ns for path in whole.rglob("*")}


def test_a_run_folder_with_another_tokenizer_is_refused(run, whole, tmp_path):
    for file in ("config.json", "metrics.jsonl"):
        (tmp_path / file).write_bytes((whole / file).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["tokenizer_fingerprint"] = "0" * 64
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, _, err = run("--run-dir", tmp_path)
    assert status == 2
    assert "tokenizer" in one_line(err)


def test_profile_is_written(run, tmp_path):
    status, out, err = run("--run-dir", tmp_path / "run", "--steps", 4, "--profile", "2:3")
    assert status == 0, err
    assert "profile of steps 2:3" in out
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))
