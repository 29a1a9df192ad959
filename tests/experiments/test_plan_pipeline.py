"""What plan and train say of a pipeline: one step, compiled once."""

import dataclasses
import functools
import json

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments import pipeline_plot, plan, plan_pipeline
from experiments.config import TrainConfig
from experiments.configs import load
from experiments.plan import compile_step
from jaxaccel import target
from jaxaccel.nn import flops_per_token
from jaxaccel.schedules import Times, schedule

# Two sixteenths of a bubble; attention in plain XLA, which compiles in half the time.
OPTIONS = ["--target", "h200x2", "--mesh", "stage=2", "--micro-batches", "8", "--batch", "8",
           "--remat", "full", "--attention", "xla", "--no-advice"]  # fmt: skip
CONFIG = dataclasses.replace(
    load("tiny"), mesh="stage=2", micro_batches=8, batch=8, remat="full", attention="xla",
    precision="bfloat16",
)  # fmt: skip


@functools.cache
def compiled():
    return compile_step(CONFIG, target.parse("h200x2"))


@pytest.fixture
def printed(monkeypatch, capsys):
    """Runs the program on the one compiled step; returns its output."""

    def run(*options):
        monkeypatch.setattr(plan, "compile_step", lambda config, on: compiled())
        with pytest.raises(SystemExit) as stop:
            plan.main(["tiny", *OPTIONS, *options])
        out, err = capsys.readouterr()
        assert not stop.value.code, err
        return out, err

    return run


@pytest.mark.target
def test_json_and_table(printed):
    report = json.loads(printed("--json")[0])
    of = report["pipeline"]
    assert of["schedule"] == "1f1b" and not of["delayed_sends"] and of["warning"] is None
    assert (of["stages"], of["micro_batches"], of["chunks"]) == (2, 8, 1)
    assert of["passes_kept"] == 3  # 2 stages - 1
    assert of["bubble"] == pytest.approx(1 / 8)
    assert of["bubble_delayed"] == pytest.approx(2 / 8)
    assert of["modelled_step_ms"] == report["modelled_step_ms"] < of["modelled_step_delayed_ms"]
    assert of["option"] == "--no-delayed-sends"
    # The other way to send takes a forward and a backward pass more, once the loss is on its way.
    tick = of["forward_ms"] + of["backward_ms"] + of["loss_ms"]
    more = of["modelled_step_delayed_ms"] - of["modelled_step_ms"]
    assert 0.5 * tick < more < 1.5 * tick
    # 10 ticks of which a stage works in 8: most of the step, and no more than it.
    assert 8 * tick < report["modelled_step_ms"] < 12 * tick

    table = printed()[0]
    for part in ("pipeline 1f1b: 2 stages, --micro-batches 8", "12.5%, with delayed sends 25.0%",
                 "choose --no-delayed-sends", "at most 3 passes"):  # fmt: skip
        assert part in table


@pytest.mark.target
def test_flop_are_those_of_one_stage(printed):
    """Half of the layers, forward, again and backward, and the loss: not once in every tick."""
    report = json.loads(printed("--json")[0])
    tokens = CONFIG.batch * CONFIG.sequence
    head = 3 * 2 * CONFIG.model.vocab_size * CONFIG.model.width * tokens
    layers = flops_per_token(CONFIG.model, CONFIG.sequence) * tokens - head
    # Attention over whole squares is more than the model's own, which is causal.
    least = layers / 2 * 4 / 3 + head
    assert 0.9 * least < report["flops_per_step"] < 1.3 * least
    assert 0.15 < report["recompute_flops_fraction"] < 1 / 3


@pytest.mark.target
def test_the_picture(printed, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "POLICIES_DRAWN", ())
    file = tmp_path / "plan.png"
    assert f"picture: {file}" in printed("--plot", str(file))[1]
    assert file.stat().st_size > 50_000


@pytest.mark.parametrize("delayed", [False, True])
def test_a_schedule_is_drawn_to_scale(delayed):
    made = schedule("interleaved", 2, 4, chunks=2, delayed=delayed)
    times = Times(2.0, 4.0, 0.1, last=1.0)
    for stage in range(2):
        found = pipeline_plot.boxes(made, times, stage)
        kinds = [kind for kind, *_ in found]
        assert kinds.count("forward") == kinds.count("backward") == 8
        assert kinds.count("loss") == 4 * (stage == 1)
        takes = {"forward": 1.0, "backward": 2.0, "loss": 1.0}
        assert all(duration == takes[kind] for kind, _, _, _, duration in found)
        ends = [start + duration for *_, start, duration in found]
        starts = [start for *_, start, _ in found]
        assert all(end <= start + 1e-9 for end, start in zip(ends, starts[1:]))
        assert ends[-1] <= made.seconds(times) + 1e-9
    figure = Figure(layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1)
    pipeline_plot.draw((upper, lower), made, times)
    assert [axes.get_title().count("(this plan)") for axes in (upper, lower)] == [
        not delayed, delayed
    ]  # fmt: skip
    assert upper.get_title().startswith("interleaved, sends at once")
    assert "bubble 12.5%" in upper.get_title()
    # Each forward and each backward pass is a number, where there is room.
    assert len(upper.texts) == 2 * 2 * 8


def test_a_step_that_waits_is_offered_what_stages_leave_it():
    mesh = {"stage": 1, "data": 2, "fsdp": 2, "sequence": 2, "tensor": 2}
    offered = plan_pipeline.overlaps(CONFIG, mesh)
    assert set(offered.split(",")) == {
        "fsdp-prefetch", "buckets", "sequence", "collective-matmul", "ring-attention"
    }  # fmt: skip
    assert plan_pipeline.overlaps(CONFIG, mesh | {"stage": 2}) == "sequence"
    assert plan_pipeline.overlaps(CONFIG, mesh | {"stage": 2, "tensor": 1}) == ""


@pytest.mark.parametrize("remat", ["full", "auto"])
def test_fewer_micro_batches_than_stages(remat):
    config: TrainConfig = dataclasses.replace(CONFIG, micro_batches=2, remat=remat)
    (line,) = plan_pipeline.few_micro_batches(config, 4)
    assert "--micro-batches 2 for 4 stages" in line and "150%" in line
    assert plan_pipeline.few_micro_batches(config, 2) == []
    assert plan_pipeline.few_micro_batches(config, 1) == []
