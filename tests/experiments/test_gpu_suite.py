"""The GPU suite without a GPU: all of it in small, and what it does where stages go wrong."""

import json
import math
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.errors import UserError
from experiments.gpu_suite import __main__ as gpu_suite
from experiments.gpu_suite import card as gpu_suite_card
from experiments.gpu_suite import report as gpu_suite_report
from experiments.gpu_suite import train as gpu_suite_train
from experiments.gpu_suite.cases import DECODE, FAKE, STEPS, TARGETS
from experiments.gpu_suite.run import Part, run
from experiments.gpu_suite.stages import Stage, parts_of_tests, stages


def script(name, body, **options):
    """A part that runs Python; `say` writes a record."""
    head = "import os, signal, sys, time\nfrom experiments.gpu_suite.records import *\n"
    return Part(name, [sys.executable, "-c", head + body], **options)


def items(text, *names):
    """A program that does items; `text` maps a name to what happens in it."""
    cases = ", ".join(f"({name!r}, lambda: exec({text.get(name, 'pass')!r}))" for name in names)
    return f"sys.exit(each([{cases}]))"


def alive(pid):
    """Whether a process runs; one that is dead and not asked for does not."""
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def outcomes(part):
    return {name: record["outcome"] for name, record in part.ended.items()}


def test_the_suite_in_small(tmp_path):
    """Every stage runs, ends well and is reported, and nothing claims to be of a GPU."""
    command = [sys.executable, "-m", "experiments.gpu_suite", "--fake", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert {stage["name"]: stage["status"] for stage in results["stages"]} == dict.fromkeys(
        ["card", "tests", "kernels", "attention", "train bf16", "decode", "train full-stack"], "ok"
    )
    assert results["complete"] and results["commit"] and results["seconds"] < 480
    last = done.stdout.rstrip().splitlines()
    assert last[-1] == FAKE and "on fake" in done.stdout
    report = (tmp_path / "report.md").read_text()
    assert report.count(FAKE) >= 2 and results["fake"] == FAKE
    figures = {(f["group"], f["name"]): f for f in results["figures"]}
    for group, name, unit, kind in (
        ("ceiling", "fp8 matmul", "TFLOP/s", "measured"),
        ("kernel", "fp8_matmul block, ours", "TFLOP/s", "measured"),
        ("attention", "causal 64 D 128 forward+backward, ours", "TFLOP/s", "measured"),
        ("tiny bf16", "step", "ms", "measured"),
        ("tiny bf16", "MFU", "%", "measured"),
        ("tiny full-stack", "peak memory, by its program", "GiB", "compiled"),
        ("tiny full-stack", "peak memory", "GiB", "measured"),
        ("decode", "speculative, 1 draft", "tokens/s", "measured"),
    ):
        figure = figures[group, name]
        assert (figure["unit"], figure["kind"]) == (unit, kind) and figure["value"] > 0
        assert f"| {name} |" in report
    assert figures["tiny bf16", "loss of the last step"]["note"] == "falling"
    assert "cuDNN" in figures["attention", "causal 64 D 128 forward, cudnn"]["note"]
    assert not any("planned" in name for _, name in figures)
    assert "==== card-1" in (tmp_path / "log.txt").read_text()
    assert (tmp_path / "speed.png").stat().st_size > 10_000


def test_the_suite_itself_leaves_jax_alone():
    """Its process would otherwise hold the GPU's memory while the stages want it."""
    code = "import sys, experiments.gpu_suite.__main__; assert 'jax' not in sys.modules, 'jax'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_fails_crashes_or_hangs_does_not_stop_the_rest(tmp_path):
    steps = {
        "wrong": "assert 1 == 2, 'off by one'",
        "crash": "os.kill(os.getpid(), signal.SIGSEGV)",
        "hang": "time.sleep(60)",
        "gpu": "raise RuntimeError('CUDA_ERROR_ILLEGAL_ADDRESS')",
        "exit": "os._exit(3)",
    }
    names = ["good", "wrong", "crash", "better", "hang", "gpu", "exit", "best"]
    part = script("items", items(steps, *names), item_box=1.0)
    other = script("other", "write('row', value=1)")
    start = time.monotonic()
    run([part, other], 60, tmp_path)
    assert time.monotonic() - start < 30
    assert outcomes(part) == {
        "good": "passed", "wrong": "failed", "crash": "crashed", "better": "passed",
        "hang": "hung", "gpu": "failed", "exit": "crashed", "best": "passed",
    }  # fmt: skip
    assert part.ended["wrong"]["why"] == "AssertionError: off by one"
    assert (part.status, part.finished, part.starts) == ("failed", True, 5)
    assert "5 of 8" in part.why and not part.left
    assert (other.status, other.records[0]["value"]) == ("ok", 1)


def test_the_time_is_kept_and_what_is_left_can_go_on(tmp_path):
    """A process and its own children are killed; what it found stays."""
    body = "import subprocess\nwrite('row', pid=subprocess.Popen(['sleep', '61']).pid)\n"
    slow = script("slow", body + items({"b": "time.sleep(60)"}, "a", "b", "c"))
    late = script("late", "pass")
    start = time.monotonic()
    run([slow, late], 2.0, tmp_path)
    assert time.monotonic() - start < 6
    assert (slow.status, slow.finished, slow.left) == ("out of time", False, ["b", "c"])
    assert (late.status, late.starts) == ("not started", 0)
    end = time.monotonic() + 5
    while alive(slow.records[0]["pid"]) and time.monotonic() < end:
        time.sleep(0.1)
    assert not alive(slow.records[0]["pid"])
    slow.item_box = 0.5
    run([slow, late], 20, tmp_path)
    assert outcomes(slow) == {"a": "passed", "b": "hung", "c": "passed"} and late.status == "ok"


def test_out_of_memory_is_told_apart(tmp_path):
    part = script("big", "print('RESOURCE_EXHAUSTED: 3 GiB'); sys.exit(1)")
    run([part], 20, tmp_path)
    assert (part.status, part.why) == ("out of memory", "RESOURCE_EXHAUSTED: 3 GiB")


def test_outcomes_of_tests(tmp_path):
    """Of each test what became of it; a GPU that no longer works costs a process, not a file."""
    file = tmp_path / "test_some.py"
    file.write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad():\n    assert 3 == 4\n"
        "def test_broken(): raise RuntimeError('CUDA_ERROR_LAUNCH_FAILED: x')\n"
        "@pytest.mark.skip(reason='no such card')\ndef test_left_out(): pass\n"
        "@pytest.fixture\ndef broken(): raise ValueError('at the start')\n"
        "def test_fixture(broken): pass\n"
        "def test_last(): pass\n"
    )
    part = parts_of_tests(fake=True)[0]
    part.command[5:] = [str(file), *part.command[6:-2]]  # without its choice of tests
    run([part], 60, tmp_path)
    found = {name.split("::")[1]: outcome for name, outcome in outcomes(part).items()}
    assert found == {
        "test_good": "passed", "test_bad": "failed", "test_broken": "failed",
        "test_left_out": "skipped", "test_fixture": "failed", "test_last": "passed",
    }  # fmt: skip
    assert part.starts == 2 and part.status == "failed"
    whys = {name.split("::")[1]: record["why"] for name, record in part.ended.items()}
    assert whys["test_bad"] == "assert 3 == 4" and "no such card" in whys["test_left_out"]
    skips = Part("skips", [*part.command, "-k", "left_out"], environment=part.environment)
    run([skips], 60, tmp_path)
    assert skips.status == "skipped" and "no such card" in skips.why  # no success


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """A suite of a few seconds, whose report takes none of them."""
    monkeypatch.setenv("PYTHONPATH", str(gpu_suite.ROOT))
    made = gpu_suite.Suite(14 / 60, tmp_path, True, tmp_path)
    yield made
    made.watch.stop()


def test_time_is_shared_out_and_none_is_exceeded(suite, tmp_path):
    slow = script("slow", items({"a": "time.sleep(60)"}, "a", "b"), item_box=100.0)
    quick = script("quick", "write('ceiling', name='copy', value=2.0, unit='GB/s', note='')")
    todo = [
        Stage("slow", [slow], 1, 100),
        Stage("quick", [quick], 6, 5),
        Stage("optional", [script("optional", "pass")], 0, 60),
    ]
    start = time.monotonic()
    suite.run_all(todo)
    assert 4 < time.monotonic() - start < 14
    assert [stage.name for stage in suite.done] == ["slow", "quick", "optional"]
    assert (slow.status, quick.status) == ("out of time", "ok")
    assert todo[2].parts[0].status == "not started"  # no time for what nothing is kept for
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["figures"][0]["value"] == 2.0 and not results["complete"]
    assert suite.finish() == 1
    text = (tmp_path / "report.md").read_text()
    assert "| slow | out of time |" in text and "| optional | not started |" in text


def test_a_training_step_that_fails_is_tried_in_other_ways(suite):
    """Slow to compile: no autotuning. An error: no command buffers, then no kernels."""

    def stage(status, *recorded, name="train bf16", variants=("first",)):
        part = Part("train-bf16", ["x"], status=status, records=list(recorded))
        return Stage(name, [part], 9, 9, 1, {"A": "1"}, variants)

    compiled, timed = {"event": "phase", "name": "compiled"}, {"event": "step", "timed": True}
    assert suite.another_way(stage("ok")) is None
    assert suite.another_way(stage("out of memory")) is None
    assert suite.another_way(stage("out of time", compiled, timed)) is None
    slow = suite.another_way(stage("out of time"))
    assert slow.name == "train bf16, no autotuning"
    assert slow.environment["XLA_FLAGS"].endswith(gpu_suite.NO_TUNING)
    hung = suite.another_way(stage("out of time", compiled))
    assert (hung.name, hung.environment["GPU_SUITE_KERNELS"]) == ("train bf16, no kernels", "off")
    second = suite.another_way(stage("failed", compiled))
    assert second.name == "train bf16, no command buffers"
    assert second.environment["XLA_FLAGS"].endswith("--xla_gpu_enable_command_buffer=")
    second.parts[0].status = "failed"
    third = suite.another_way(second)
    assert third.name == "train bf16, no kernels" and "XLA_FLAGS" not in third.environment
    third.parts[0].status = "crashed"
    assert suite.another_way(third) is None


def test_the_way_that_worked_is_kept(suite):
    """What follows begins with it."""
    code = "sys.exit(0 if os.environ.get('GPU_SUITE_KERNELS') else 1)"
    todo = [Stage(f"train {name}", [script(name, code)], 1, 60, 1, {}, ("first",)) for name in "ab"]
    suite.end += 60
    suite.run_all(todo)
    assert [(stage.name, stage.status) for stage in suite.done] == [
        ("train a", "failed"),
        ("train a, no command buffers", "failed"),
        ("train a, no kernels", "ok"),
        ("train b, no kernels", "ok"),
    ]


def test_losses_of_one_batch_must_fall():
    assert gpu_suite_train.fault_of([3.0, 2.5, 2.0]) == ""
    assert "not finite" in gpu_suite_train.fault_of([3.0, math.nan, 2.0])
    assert "did not fall" in gpu_suite_train.fault_of([3.0, 3.0])


def test_stages_of_a_gpu():
    """Attention's tests come first, and every file with tests for a GPU comes at all."""
    first, *others = stages(fake=False)
    names = [part.name for part in first.parts]
    assert names[:3] == [
        "test_attention_mosaic", "test_attention_mosaic_backward", "test_cross_entropy_mosaic"
    ]  # fmt: skip
    assert {"test_rms_norm_mosaic", "test_fp8_matmul", "test_example_linear_residual"} < {*names}
    assert all(part.command[1:5] == ["-m", "pytest", "-m", "gpu"] for part in first.parts)
    assert [s.name for s in others if s.name.startswith("train")] == [
        *(f"train {case}" for case in STEPS), "train bf16, no kernels"
    ]  # fmt: skip
    assert sum(stage.reserve for stage in (first, *others)) < 8 * 60 - 30
    assert stages(fake=False, alone=True)[0].at_once == 1


def record(event, **fields):
    return {"event": event, "time": 0.0, **fields}


def test_figures_stand_beside_the_plan():
    """Arithmetic of a step; of the planned figures those of the card at hand."""
    model = {"tokens": 65536, "model_flops": 6e14, "peak_flops": 1e15, "peak_source": "a sheet"}
    entries = [
        record("phase", name="model", **model),
        record("phase", name="compiled", seconds={"step": 20.0}, peak_gib=32.0, micro_batches=4),
        record("phase", name="memory", when="steps taken", peak_gib=33.0),
        *(
            record("step", number=n, seconds=s, timed=n > 1, loss=11 - n, grad_norm=1.0, skipped=0)
            for n, s in enumerate([9.0, 2.0, 1.0, 1.2, 1.1])
        ),
    ]
    part = Part("train-bf16", ["python", "train", "bf16"], records=entries, status="ok")
    decode = Part("decode", [], records=[record("decoder", read_gb=4.8, bound_ms=1.0)])
    both = [Stage("train bf16", [part], 1, 1), Stage("decode", [decode], 1, 1)]
    results = {"card": {"gpu": "h200"}, "stages": [stage.plain() for stage in both]}
    found = {f.name: f for f in gpu_suite_report.figures(results)}
    assert found["step"].value == pytest.approx(1100) and "1,000.0 to 1,200.0" in found["step"].note
    assert found["speed"].value == pytest.approx(65536 / 1.1)
    assert found["MFU"].value == pytest.approx(100 * 6e14 / 1.1 / 1e15)
    assert found["a plain pass, at best"][2:5] == (1.0, "ms", "modelled")
    assert "4 micro-batches" in found["peak memory, by its program"].note
    planned = {name: f.kind for name, f in found.items() if "planned for h200" in name}
    assert planned == {
        "step, planned for h200": "modelled", "MFU, planned for h200": "modelled",
        "peak memory, planned for h200": "compiled",
    }  # fmt: skip
    assert not any("h100" in name for name in found)


def test_the_plan_is_committed_and_whole():
    rows = gpu_suite_report.plan_rows()
    assert {(r["step"], r["target"]) for r in rows} == {(s, t) for s in STEPS for t in TARGETS}
    for row in rows:
        assert row["tokens"] == 65536 and 10 < row["compiled_peak_gib"] < 80
        assert 500 < row["modelled_step_ms"] < 3000
    config = gpu_suite_train.train_config("full-stack", fake=False)
    assert config.batch * config.sequence == 65536 and config.remat == "full"
    assert (config.fp8, config.optimizer.name) == ("delayed", "adamw-8bit")
    assert {rows for rows, _ in DECODE.values()} == {1, 8}


def test_bad_input_and_missing_packages(tmp_path, capsys, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    for argv, message in (
        (["--minutes", "0"], "--minutes 0.0: legal are 0.2 to 600"),
        (["--fake", "--out", str(blocked / "x")], "--out"),
    ):
        with pytest.raises(SystemExit) as stop:
            gpu_suite.main(argv)
        assert stop.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    find = gpu_suite.importlib.util.find_spec
    monkeypatch.setattr(
        gpu_suite.importlib.util, "find_spec", lambda n: None if n == "pytest" else find(n)
    )
    with pytest.raises(UserError, match=r"missing here: pytest\. .*pip download --no-deps.*pytest"):
        gpu_suite.check_packages()


def test_nvidia_smi_is_asked(tmp_path, monkeypatch):
    """By any version of it: a field that it does not know costs that field alone."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f"#!{sys.executable}\n"
        "import sys, time\n"
        "text = ' '.join(sys.argv)\n"
        "assert not set('pm pl ac lgc lmc r c mig'.split()) & {a.lstrip('-') for a in sys.argv}\n"
        "if 'vbios' in text: sys.exit('Field vbios_version is not a valid field to query.')\n"
        "fields = sys.argv[1].split('=')[1].split(',')\n"
        "values = {'memory.used': '700 MiB', 'name': 'NVIDIA H200', 'utilization.gpu': '99'}\n"
        "print(', '.join(values.get(f, '1980') for f in fields), flush=True)\n"
        "time.sleep(30 if '-l' in sys.argv else 0)\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = gpu_suite_card.ask(("name", "vbios_version", "clocks.sm"))
    assert found == {"name": "NVIDIA H200", "clocks.sm": "1980"}
    start = time.monotonic()
    gpu_suite_card.wait_until_free({"memory.used": "600 MiB"})
    assert time.monotonic() - start < 3
    watch = gpu_suite_card.Watch(tmp_path)
    for _ in range(100):
        if watch.file.read_text().endswith("\n"):
            break
        time.sleep(0.1)
    monkeypatch.setattr(gpu_suite_card, "WATCHED", ("a", "b", "c", "d", "e"))
    watch.file.write_text("1980, 600.5, 50, 99, 700\n1755, 690, 61, 100, 700\n345, 80, 30, 0, 1\n[")
    assert watch.since()["sm_clock_mhz"] == [1755, 1867.5, 1980]
    assert watch.since() == {}
    watch.stop()
    assert watch.process.poll() is not None
    monkeypatch.setenv("PATH", "/nowhere")
    (blank := tmp_path / "blank").mkdir()
    assert gpu_suite_card.ask() == {} and gpu_suite_card.Watch(blank).since() == {}


def test_cuda_is_found_where_the_wheels_of_its_compiler_are_missing(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("CUDA_ROOT", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name in ("bin/ptxas", "nvvm/libdevice/libdevice.10.bc"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch(mode=0o755)
    assert gpu_suite_card.cuda_root() == str(tmp_path)
    monkeypatch.setenv("CUDA_ROOT", "/somewhere")
    assert gpu_suite_card.cuda_root() == ""  # the user has said
    monkeypatch.delenv("CUDA_ROOT")
    (tmp_path / "bin/ptxas").unlink()
    monkeypatch.setattr(gpu_suite_card, "PREFIX", tmp_path)
    assert gpu_suite_card.cuda_root() is None
