"""Peaks, environment, metrics.jsonl through crashes, the screen, loss.png."""

import json
import math
import os
import pty
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import metrics, runlog
from experiments.errors import UserError
from experiments.runlog import KEYS, RunLog, plot_losses, read_metrics

CPU = jax.devices("cpu")[0]


def record(step, **values):
    return dict.fromkeys(KEYS) | {"step": step, "loss": 1.0 / (step + 1)} | values


def write_run(folder, steps, *, resume_step=0, total_steps=100, **values):
    options = {"total_steps": total_steps, "resume_step": resume_step, "plain": True}
    with RunLog(folder, **options) as log:
        for step in steps:
            log.log(record(step, **values))


def fake_device(kind, platform="gpu", stats=None):
    return types.SimpleNamespace(device_kind=kind, platform=platform, memory_stats=lambda: stats)


# --- peaks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype", "flops", "word"),
    [
        ("NVIDIA H200", jnp.bfloat16, 989e12, "16-bit"),
        ("NVIDIA H100 80GB HBM3", jnp.float16, 989e12, "16-bit"),
        ("NVIDIA A100-SXM4-80GB", jnp.float32, 156e12, "tf32"),
        ("NVIDIA B200", "bfloat16", 2250e12, "16-bit"),
    ],
)
def test_peak_of_known_gpu_is_its_data_sheet(kind, dtype, flops, word):
    peak = metrics.peak_flops(fake_device(kind), dtype)
    assert peak.flops == flops
    assert "data sheet" in peak.source and kind in peak.source and word in peak.source


def test_peak_of_cpu_is_measured_and_shared_by_its_devices(monkeypatch):
    monkeypatch.setattr(metrics, "_timed_matmul", lambda device, size, dtype: 8e9 + size)
    peak = metrics.peak_flops(CPU, jnp.bfloat16)
    assert peak.flops == (8e9 + 1024) / jax.local_device_count()
    assert peak.source.startswith("measured 1024^3 float32 matmul on this CPU")
    assert "shared by 8" in peak.source


def test_timed_matmul_is_plausible():
    flops = metrics._timed_matmul(CPU, 96, jnp.dtype("float32"))
    assert 1e7 < flops < 1e14


def test_peak_of_unknown_accelerator_is_measured_and_said_so(monkeypatch):
    seen = []

    def timed(device, size, dtype):
        seen.append((device.device_kind, dtype))
        return 5e12

    monkeypatch.setattr(metrics, "_timed_matmul", timed)
    peak = metrics.peak_flops(fake_device("NVIDIA Z1000"), jnp.bfloat16)
    assert peak.flops == 5e12
    assert seen == [("NVIDIA Z1000", jnp.dtype("bfloat16"))]
    assert "measured" in peak.source and "no data sheet is known for NVIDIA Z1000" in peak.source


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.int8, jnp.float8_e4m3fn])
def test_peak_refuses_other_dtypes(dtype):
    with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
        metrics.peak_flops(fake_device("NVIDIA H200"), dtype)


def test_convention_says_what_is_counted():
    for word in ("attention counted", "causal halved", "recomputation not", "16-bit", "FP8"):
        assert word in metrics.MFU_CONVENTION


# --- memory ----------------------------------------------------------------------------------


def test_peak_memory_of_cpu_is_that_of_this_process_alone():
    """600 MiB held and let go are counted; the parent's are not."""
    code = (
        "import jax; from experiments.metrics import peak_memory_gib as peak\n"
        "cpu = jax.devices('cpu')[0]; before = peak(cpu)\n"
        "held = bytearray(600 * 2**20); del held; print(before, peak(cpu))\n"
    )
    parent = bytearray(1200 * 2**20)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    del parent
    before, after = map(float, done.stdout.split())
    assert 0.05 < before < 1.0
    assert after - before == pytest.approx(600 / 1024, abs=0.15)


def test_peak_memory_of_gpu_is_its_allocators():
    gpu = fake_device("NVIDIA H200", stats={"peak_bytes_in_use": 3 * 2**29, "bytes_in_use": 1})
    assert metrics.peak_memory_gib(gpu) == 1.5


@pytest.mark.parametrize("stats", [None, {}])
def test_peak_memory_unknown(stats):
    assert metrics.peak_memory_gib(fake_device("NVIDIA H200", stats=stats)) is None


# --- environment -----------------------------------------------------------------------------


def test_environment_is_strict_json_and_names_versions(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_ugly=1")
    env = json.loads(json.dumps(metrics.environment(), allow_nan=False))
    assert env["versions"]["jax"] == jax.__version__
    assert env["versions"]["numpy"] == np.__version__
    assert all(env["versions"][name] for name in ("jaxlib", "flax", "optax", "orbax-checkpoint"))
    assert env["time"].endswith("+00:00")
    assert (env["platform"], env["device_kind"], env["device_count"]) == ("cpu", "cpu", 8)
    assert (env["process_index"], env["process_count"]) == (0, 1)
    assert env["xla_flags"] == "--xla_ugly=1"
    assert "python" in env["command"]  # of a process of pytest's own
    assert os.uname().nodename not in env.values()


def test_git_state_of_tracked_file_only(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    tracked, untracked = tmp_path / "tracked.py", tmp_path / "untracked.py"
    tracked.write_text("1")
    untracked.write_text("1")
    git("init", "-q")
    git("add", "tracked.py")
    git("commit", "-q", "-m", "one")
    commit = git("rev-parse", "HEAD")
    assert metrics._git_state(tracked) == (commit, False)
    tracked.write_text("2")
    assert metrics._git_state(tracked) == (commit, True)
    assert metrics._git_state(untracked) == (None, None)


def test_git_state_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert metrics._git_state(Path(metrics.__file__)) == (None, None)


def test_version_of_missing_package_is_none():
    assert metrics._version("no-such-package-here") is None


# --- metrics.jsonl ---------------------------------------------------------------------------


def strict_rows(folder):
    def refuse(word):
        raise AssertionError(f"not strict JSON: {word}")

    text = (folder / "metrics.jsonl").read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_row_holds_the_record_keys_first(tmp_path):
    with RunLog(tmp_path / "deep" / "run", total_steps=7, resume_step=0, plain=True) as log:
        log.log({"mtp_loss": 2.5} | record(3, val_loss=0.1 + 0.2, skipped_steps=0))
    (row,) = strict_rows(tmp_path / "deep" / "run")
    assert tuple(row) == (*KEYS, "mtp_loss")
    assert row == record(3, val_loss=0.1 + 0.2, skipped_steps=0, mtp_loss=2.5)


def test_row_is_on_disk_before_the_log_is_closed(tmp_path):
    with RunLog(tmp_path, total_steps=7, resume_step=0, plain=True) as log:
        log.log(record(1))
        assert len(strict_rows(tmp_path)) == 1


def test_array_scalars_become_numbers(tmp_path):
    scalars = {"loss": jnp.float32(0.1), "mfu": np.float64(0.5), "skipped_steps": jnp.int32(3)}
    write_run(tmp_path, [np.int64(4)], **scalars)
    (row,) = strict_rows(tmp_path)
    assert row["step"] == 4 and row["skipped_steps"] == 3 and row["mfu"] == 0.5
    assert np.float32(row["loss"]) == np.float32(0.1)  # bit for bit


def test_non_finite_values_are_strings_in_the_file_and_floats_when_read(tmp_path):
    write_run(tmp_path, [1], loss=math.nan, grad_norm=math.inf, val_loss=-math.inf)
    (row,) = strict_rows(tmp_path)
    assert (row["loss"], row["grad_norm"], row["val_loss"]) == ("NaN", "Infinity", "-Infinity")
    (row,) = read_metrics(tmp_path)
    assert math.isnan(row["loss"]) and row["grad_norm"] == math.inf
    assert row["val_loss"] == -math.inf


def test_missing_key_is_refused_and_writes_nothing(tmp_path):
    short = record(1)
    del short["mfu"], short["loss_scale"]
    log = RunLog(tmp_path, total_steps=7, resume_step=0, plain=True)
    with log, pytest.raises(ValueError, match="lacks mfu, loss_scale"):
        log.log(short)
    assert strict_rows(tmp_path) == []


def test_a_step_is_logged_once(tmp_path):
    write_run(tmp_path, [5])
    with RunLog(tmp_path, total_steps=7, resume_step=5, plain=True) as log:
        with pytest.raises(ValueError, match="step 5 comes after step 5"):
            log.log(record(5))
        log.log(record(6))
    assert [row["step"] for row in strict_rows(tmp_path)] == [5, 6]


@pytest.mark.parametrize(
    ("resume_step", "kept"), [(0, []), (1, [0]), (3, [0, 3]), (7, [0, 3, 6]), (99, [0, 3, 6, 9])]
)
def test_resume_drops_later_rows(tmp_path, resume_step, kept):
    write_run(tmp_path, [0, 3, 6, 9], loss=math.nan)
    before = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    write_run(tmp_path, [], resume_step=resume_step)
    assert [row["step"] for row in strict_rows(tmp_path)] == kept
    # what is kept is kept byte for byte
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(before[: len(kept)])
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("cut", [1, 2, 30, 60])
def test_torn_last_line_is_passed_over_and_dropped(tmp_path, cut):
    write_run(tmp_path, [2, 4, 6])
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    whole = [2, 4, 6] if cut == 1 else [2, 4]  # only the newline is gone: the row is whole
    assert [row["step"] for row in read_metrics(tmp_path)] == whole
    write_run(tmp_path, [8], resume_step=6)
    assert [row["step"] for row in strict_rows(tmp_path)] == [*whole, 8]


def test_torn_line_of_zeros(tmp_path):
    """What a power cut leaves of an append on some file systems."""
    write_run(tmp_path, [2])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(bytes(57))
    write_run(tmp_path, [4], resume_step=2)
    assert [row["step"] for row in strict_rows(tmp_path)] == [2, 4]


@pytest.mark.parametrize("line", [b"{", b"[3]", b'{"loss": 1.0}', b"", b"\xff\xfe"])
def test_damaged_line_within_the_file_is_an_error_and_stays(tmp_path, line):
    write_run(tmp_path, [2, 4])
    path = tmp_path / "metrics.jsonl"
    first, second = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([first, line, second, b""]))
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2: not a JSON object"):
        write_run(tmp_path, [6], resume_step=4)
    assert path.read_bytes() == before


def test_interrupted_rewrite_leaves_the_old_file(tmp_path, monkeypatch):
    write_run(tmp_path, [2, 4])
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def killed(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(runlog.os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        write_run(tmp_path, [], resume_step=2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_kill_minus_nine_loses_no_finished_row(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from experiments.runlog import KEYS, RunLog\n"
        "with RunLog(Path(sys.argv[1]), total_steps=9, resume_step=0, plain=True) as log:\n"
        "    for step in (3, 5):\n"
        "        log.log(dict.fromkeys(KEYS) | {'step': step})\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True)
    assert done.returncode == -9
    assert [row["step"] for row in strict_rows(tmp_path)] == [3, 5]
    assert b"step 5/9" in done.stdout  # plain lines do not wait in a buffer


def test_read_metrics_of_no_run(tmp_path):
    with pytest.raises(UserError, match=r"has no metrics\.jsonl"):
        read_metrics(tmp_path)


# --- screen ----------------------------------------------------------------------------------


def test_plain_lines(tmp_path, capsys, monkeypatch):
    clock = iter([100.0, 110.0])
    monkeypatch.setattr(runlog.time, "monotonic", lambda: next(clock))
    figures = {
        "loss": 2.34567,
        "grad_norm": 0.98765,
        "learning_rate": 3e-4,
        "tokens_per_second": 12345.6,
        "mfu": 0.4123,
        "peak_memory_gib": 1.204,
        "skipped_steps": 1,
    }
    with RunLog(tmp_path, total_steps=2000, resume_step=0, plain=True) as log:
        log.message("[bold]hello[/bold]")
        log.log(record(50, **figures))
        log.log(record(100, **figures, val_loss=2.5))
    hello, first, second = capsys.readouterr().out.splitlines()
    assert hello == "[bold]hello[/bold]"
    assert first == (
        "step   50/2000  loss 2.3457  grad_norm 0.988  lr 3.00e-04  12,346 tok/s  MFU 41.2%  "
        "1.20 GiB  skipped 1"
    )
    assert "val_loss 2.5000" in second
    assert second.endswith("eta 0:06:20")  # 1900 steps at 5 a second


def test_nan_is_shown(tmp_path, capsys):
    write_run(tmp_path, [1], loss=math.nan)
    assert "loss nan" in capsys.readouterr().out


def test_no_terminal_means_plain(tmp_path, capsys):
    with RunLog(tmp_path, total_steps=9, resume_step=0) as log:
        log.log(record(3))
    assert capsys.readouterr().out == "step 3/9  loss 0.2500\n"


def test_bar(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with RunLog(tmp_path, total_steps=2000, resume_step=700, plain=False) as log:
        log.message("[bold]hello[/bold]")
        log.log(record(750, loss=2.5, tokens_per_second=123456.0, mfu=0.4))
        log.log(record(800, loss=math.nan, val_loss=2.25, tokens_per_second=123456.0, mfu=0.4))
        print("from elsewhere")
    out = capsys.readouterr().out
    for text in ("700/2000", "750/2000", "loss 2.5000", "123,456 tok/s", "MFU 40.0%", "eta 0:"):
        assert text in out
    assert "loss nan" in out
    lines = [line.split("\x1b[2K")[-1] for line in out.splitlines()]
    for text in ("[bold]hello[/bold]", "step 800: val_loss 2.2500", "from elsewhere"):
        assert text in lines  # alone on its line, not broken by the bar


def test_terminal_means_bar(tmp_path):
    """On a real pseudo-terminal, in a process of its own."""
    code = (
        "import sys; from pathlib import Path\n"
        "from experiments.runlog import KEYS, RunLog\n"
        "with RunLog(Path(sys.argv[1]), total_steps=9, resume_step=0) as log:\n"
        "    log.log(dict.fromkeys(KEYS) | {'step': 3, 'loss': 1.5})\n"
    )
    outputs = {}
    for term in ("xterm", "dumb"):
        ours, theirs = pty.openpty()
        command = [sys.executable, "-c", code, str(tmp_path / term)]
        subprocess.run(command, stdout=theirs, check=True, env=os.environ | {"TERM": term})
        os.close(theirs)
        outputs[term] = os.read(ours, 65536).decode()
        os.close(ours)
    assert "3/9" in outputs["xterm"] and "━" in outputs["xterm"] and "\x1b[" in outputs["xterm"]
    assert outputs["dumb"] == "step 3/9  loss 1.5000\r\n"


def test_cursor_comes_back_after_an_error(tmp_path, capsys):
    log = RunLog(tmp_path, total_steps=9, resume_step=0, plain=False)
    with pytest.raises(ValueError, match="lacks step"), log:
        log.log({})
    assert capsys.readouterr().out.endswith("\x1b[?25h")


# --- TensorBoard and W&B ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "extra", "options"),
    [
        ("tensorboardX", "tensorboard", {"tensorboard": True}),
        ("wandb", "wandb", {"wandb_project": "p"}),
    ],
)
def test_missing_package_names_the_extra_and_writes_nothing(
    tmp_path, monkeypatch, module, extra, options
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"{module} is not installed: .*jaxaccel\[{extra}\]") as e:
        RunLog(tmp_path / "run", total_steps=9, resume_step=0, **options)
    assert "\n" not in str(e.value)
    assert not (tmp_path / "run").exists()


def test_nothing_optional_is_imported_unasked(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    write_run(tmp_path, [1])
    assert len(strict_rows(tmp_path)) == 1


def test_tensorboard_gets_each_figure_once(tmp_path, monkeypatch):
    calls = []
    writer = types.SimpleNamespace(
        add_scalar=lambda *arguments: calls.append(arguments),
        flush=lambda: calls.append("flush"),
        close=lambda: calls.append("close"),
    )

    def summary_writer(logdir, purge_step):
        calls.append((logdir, purge_step))
        return writer

    fake = types.SimpleNamespace(SummaryWriter=summary_writer)
    monkeypatch.setitem(sys.modules, "tensorboardX", fake)
    options = {"total_steps": 9, "plain": True, "tensorboard": True}
    with RunLog(tmp_path, resume_step=4, **options) as log:
        log.log(record(5, loss=2.0, mfu=0.5))
    folder = str(tmp_path / "tensorboard")
    assert calls == [(folder, 5), ("loss", 2.0, 5), ("mfu", 0.5, 5), "flush", "close"]
    with RunLog(tmp_path, resume_step=0, **options):
        pass
    assert calls[-2] == (folder, 0)


def test_real_tensorboard_writer(tmp_path):
    pytest.importorskip("tensorboardX")
    with RunLog(tmp_path, total_steps=9, resume_step=0, plain=True, tensorboard=True) as log:
        log.log(record(3, loss=2.0, val_loss=math.nan))
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"loss" in events.read_bytes()


class FakeWandb(types.SimpleNamespace):
    """As much of wandb as is used; `calls` is what it was asked."""

    def __init__(self, error=None):
        self.calls = []
        self.error = error
        self.errors = types.SimpleNamespace(Error=ZeroDivisionError)
        self.Settings = dict

    def init(self, **options):
        if self.error:
            raise self.error
        self.calls.append(("init", options["project"], options["id"]))
        return types.SimpleNamespace(
            id=options["id"] or f"new{len(self.calls)}",
            log=lambda record, step: self.calls.append(("log", step, record)),
            finish=lambda: self.calls.append("finish"),
        )


def test_wandb_run_is_the_same_after_a_resume_and_new_after_a_restart(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    options = {"total_steps": 9, "plain": True, "wandb_project": "p"}
    for resume_step in (0, 3, 0):
        with RunLog(tmp_path, resume_step=resume_step, **options) as log:
            log.log(record(resume_step + 1, loss=2.0))
    assert fake.calls == [
        *(("init", "p", None), ("log", 1, {"step": 1, "loss": 2.0}), "finish"),
        *(("init", "p", "new1"), ("log", 4, {"step": 4, "loss": 2.0}), "finish"),
        *(("init", "p", None), ("log", 1, {"step": 1, "loss": 2.0}), "finish"),
    ]


def test_wandb_refusal_is_one_line_and_loses_nothing(tmp_path, monkeypatch):
    write_run(tmp_path, [2, 4])
    before = (tmp_path / "metrics.jsonl").read_bytes()
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(ZeroDivisionError("no key.\n Log in")))
    log = RunLog(tmp_path, total_steps=9, resume_step=2, plain=True, wandb_project="p")
    with pytest.raises(UserError, match=r"^W&B: no key\. Log in$"), log:
        pass
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


# --- loss.png --------------------------------------------------------------------------------


def spy_on_axes(monkeypatch):
    """The axes that `plot_losses` draws, to look into."""
    from matplotlib.figure import Figure

    drawn = []
    add = Figure.add_subplot

    def spy(self, *arguments, **options):
        drawn.append(add(self, *arguments, **options))
        return drawn[-1]

    monkeypatch.setattr(Figure, "add_subplot", spy)
    return drawn


def test_plot_shows_both_losses_and_the_final_one(tmp_path, monkeypatch):
    drawn = spy_on_axes(monkeypatch)
    with RunLog(tmp_path, total_steps=9, resume_step=0, plain=True) as log:
        for step in range(1, 8):
            log.log(record(step, val_loss=3.0 - step / 10 if step % 3 == 0 else None))
    assert plot_losses(tmp_path) == tmp_path / "loss.png"
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = drawn
    assert axes.get_title() == f"{tmp_path.name}: final validation loss 2.4000"
    assert axes.get_xlabel() == "step" and "nats" in axes.get_ylabel()
    train, val = axes.get_lines()
    assert (train.get_label(), val.get_label()) == ("training", "validation")
    assert list(train.get_xdata()) == [1, 2, 3, 4, 5, 6, 7] and list(val.get_xdata()) == [3, 6]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_plot_of_a_diverged_run(tmp_path, monkeypatch, bad):
    drawn = spy_on_axes(monkeypatch)
    write_run(tmp_path, [1, 2, 3], loss=bad, val_loss=bad)
    assert plot_losses(tmp_path).exists()
    assert f"{bad}" in drawn[0].get_title()


def test_plot_without_validation(tmp_path, monkeypatch):
    drawn = spy_on_axes(monkeypatch)
    write_run(tmp_path, [4])
    assert plot_losses(tmp_path).exists()
    assert "no validation" in drawn[0].get_title() and len(drawn[0].get_lines()) == 1


def test_plot_of_nothing(tmp_path):
    write_run(tmp_path, [])
    assert plot_losses(tmp_path) is None
    assert not (tmp_path / "loss.png").exists()


def test_plot_leaves_the_backend_alone(tmp_path):
    write_run(tmp_path, [1, 2])
    code = (
        "import sys; from pathlib import Path; from experiments.runlog import plot_losses\n"
        "plot_losses(Path(sys.argv[1])); assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
