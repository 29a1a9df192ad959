"""The table of tiles: what is chosen from it, and how it is refilled, with times made up."""

import dataclasses
import json
import re
import shutil
import types

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import target, tune
from pallas_kernels.attention import Mask, cases, mosaic_backward, mosaic_forward, tiles
from pallas_kernels.attention.mask import Band, MaskArrays, split
from pallas_kernels.attention.mosaic_backward import DK, DKV, DQ, DV
from pallas_kernels.attention.xla import Options
from pallas_kernels.build import Build

GOOD = Build("k", "h200", 384, 168, 0, 99 * 1024, 16, 0.1875, 24, 12, 132, (), (), None, "")
KEY = tiles.Key("hopper", "attention_forward", 64, 64, "causal")
FAST, SLOW = mosaic_forward.Tiles(64, 64, 3), mosaic_forward.Tiles(64, 128, 4)


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A copy of the table's file, to be written."""
    path = tmp_path / "tiles.json"
    shutil.copy(tiles.PATH, path)
    monkeypatch.setattr(tiles, "PATH", path)
    return path


def make_cell(current=SLOW, candidates=(SLOW, FAST)):
    x = jax.ShapeDtypeStruct((4, 4), jnp.bfloat16)
    return tune.Cell(KEY, current, list(candidates), lambda t, x: x * t.stages, [x])


def timer(times):
    """In place of `seconds`; also says what it was asked to time."""
    timer.asked = []

    def run(programs, args):
        timer.asked = list(programs)
        return {t: times[t] for t in programs}

    return run


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "t.json"
    tiles.write(dict(reversed(tiles.TABLE.items())), path)
    assert tiles.read(path) == tiles.TABLE
    # A row a line, in the order of the file at hand: a measured row is a diff of one line.
    assert path.read_text() == tiles.PATH.read_text()


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((64, 64), (64, 128, 4)),
        ((128, 128), (64, 128, 2)),
        ((192, 128), (64, 64, 2)),  # no row: by the larger
        ((64, 256), (64, 64, 2)),
    ],
)
def test_forward_without_a_row_for_the_mask(monkeypatch, sizes, expected):
    monkeypatch.setattr(tiles, "TABLE", {})
    found = mosaic_forward.choose(*sizes, "packed, cap")
    assert dataclasses.astuple(found) == expected


@pytest.mark.parametrize(
    ("size", "soft_cap", "expected"),
    [
        (64, False, {DQ: (128, 4, 2), DKV: (64, 3, 2)}),  # by a row; the rule says 4 stages
        (64, True, {DQ: (64, 4, 2), DKV: (64, 4, 2)}),
        (128, False, {DQ: (128, 2, 2), DKV: (64, 4, 2)}),
        (128, True, {DQ: (64, 4, 2), DK: (64, 4, 2), DV: (64, 4, 2)}),
        (192, False, {DQ: (64, 2, 2), DK: (64, 2, 2), DV: (64, 2, 2)}),
    ],
)
@pytest.mark.parametrize("empty", [False, True])
def test_backward_by_its_rule(monkeypatch, size, soft_cap, expected, empty):
    """What was not measured is what the rule says, with its row or without, but for one."""
    measured = {key for key, row in tiles.TABLE.items() if row["measured"]}
    rows = {} if empty else {k: row for k, row in tiles.TABLE.items() if k not in measured}
    monkeypatch.setattr(tiles, "TABLE", rows)
    if empty and (size, soft_cap) == (64, False):  # would spill with grouped heads
        expected = expected | {DKV: (64, 4, 2)}
    found = mosaic_backward.choose(size, size, soft_cap=soft_cap, mask="full")
    assert {work: dataclasses.astuple(t) for work, t in found.items()} == expected


def test_a_row_is_what_the_kernels_use(monkeypatch):
    """Of the mask in question, not of another one."""
    row = lambda **fields: {"tiles": fields, "measured": "yes"}
    narrow = row(block_q=64, block_kv=64, stages=3)
    rows = {KEY: narrow, KEY._replace(kernel="attention_dq"): row(columns=64, stages=3)}
    monkeypatch.setattr(tiles, "TABLE", tiles.TABLE | rows)
    used = []
    call, run = mosaic_forward._call, mosaic_backward.run
    monkeypatch.setattr(mosaic_forward, "_call", lambda *a: used.append(a[1]) or call(*a))
    monkeypatch.setattr(mosaic_backward, "run", lambda *a: used.append(a[1]) or run(*a))

    def both(mask):
        x, sums = jnp.zeros((1, 256, 1, 50), jnp.bfloat16), jnp.zeros((1, 256, 1))  # padded to 64
        band, arrays = split(mask, 1, 256, 256)
        options = Options(band, 0.1, None)
        mosaic_forward.forward(options, x, x, x, None, arrays)
        return mosaic_backward.backward(options, x, x, x, arrays, sums, sums, x)

    for mask in (Mask(causal=True), Mask()):
        jax.eval_shape(both, mask)
    assert list(map(dataclasses.astuple, used)) == [
        *((64, 64, 3), (64, 3, 2), (64, 3, 2)),
        *((64, 128, 4), (128, 4, 2), (64, 3, 2)),
    ]


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (None, None, "full"),
        (None, 0, "causal"),
        (64, 0, "window"),
        (0, None, "window"),
        (None, 7, "window"),
    ],
)
def test_kind(left, right, expected):
    kind = lambda cap, ids: tiles.kind(
        Options(Band(left, right, 0), 1.0, cap), MaskArrays(ids, ids)
    )
    assert kind(None, None) == expected
    assert kind(30.0, None) == f"{expected}, cap"
    assert kind(None, jnp.ones((1, 4), jnp.int32)) == "packed"


@pytest.mark.parametrize("variant", cases.VARIANTS)
def test_the_workbench_names_masks_alike(variant):
    options, arrays = cases._options(variant, jnp.zeros((1, 64, 1, 64), jnp.bfloat16))
    assert tiles.kind(options, arrays) == variant


def test_the_fastest_is_written_and_nothing_else_changes(table):
    before = tiles.read(table)
    run = timer({FAST: 1e-4, SLOW: 2e-4})
    old, new = tune.tune(make_cell(), [GOOD, GOOD], run, "NVIDIA H200")
    after = tiles.read(table)
    assert after.pop(KEY) == {
        "tiles": {"block_q": 64, "block_kv": 64, "stages": 3},
        "measured": "NVIDIA H200: 100 us",
    }
    assert after == before
    assert (old["us"], old["current"], old["chosen"]) == (pytest.approx(200), True, False)
    assert (new["us"], new["current"], new["chosen"]) == (pytest.approx(100), False, True)
    text = tune.text([old, new])
    assert text.endswith(
        "old: block_q=64 block_kv=128 stages=4; new: block_q=64 block_kv=64 stages=3"
    )


@pytest.mark.parametrize(("gain", "expected"), [(1.01, SLOW), (1.03, FAST), (0.5, SLOW)])
def test_noise_changes_nothing(gain, expected):
    assert tune.pick({SLOW: gain, FAST: 1.0}, SLOW) == expected


@pytest.mark.parametrize(
    "fault", [{"spill_bytes": 8}, {"warnings": ("slow",)}, {"shared_memory_bytes": 227 * 1024 + 1}]
)
def test_what_spills_is_never_timed(table, fault):
    bad = dataclasses.replace(GOOD, **fault)
    run = timer({FAST: 1e-5, SLOW: 2e-4})
    rows = tune.tune(make_cell(), [GOOD, bad], run, "gpu")
    assert timer.asked == [SLOW]
    assert [r["chosen"] for r in rows] == [True, False] and rows[1]["us"] is None
    # The current one too, if it is at fault; and with none left the table stays.
    rows = tune.tune(make_cell(), [bad, GOOD], run, "gpu")
    assert [r["chosen"] for r in rows] == [False, True]
    written = table.read_text()
    rows = tune.tune(make_cell(), [bad, bad], run, "gpu")
    assert not any(r["chosen"] for r in rows) and table.read_text() == written


def test_without_a_timer_the_table_stays(table):
    written = table.read_text()
    rows = tune.tune(make_cell(), [GOOD, GOOD], None, "cpu")
    assert [r["feasible"] for r in rows] == [True, True] and not any(r["chosen"] for r in rows)
    assert table.read_text() == written


def test_seconds_are_of_one_call(monkeypatch):
    """By a clock that only the programs move: no test hangs on how busy a machine is."""
    now = [0.0]
    monkeypatch.setattr(tune, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(tune.jax, "jit", lambda program: program)

    def takes(seconds):
        def program(x, lse):
            now[0] += seconds
            return x

        return program

    args = [jax.ShapeDtypeStruct((8, 8), d) for d in (jnp.bfloat16, jnp.float32)]
    found = tune.seconds({FAST: takes(0.5), SLOW: takes(3.0)}, args)
    assert found == {FAST: pytest.approx(0.5), SLOW: pytest.approx(3.0)}


@pytest.mark.parametrize("kernel", tune.KERNELS)
def test_candidates_fit_and_hold_the_current_one(kernel):
    found = tune.cells([kernel], None)
    assert len({cell.key for cell in found}) == len(found)
    assert {cell.key.D for cell in found} == set(tune.KERNELS[kernel][1])
    for cell in found:
        assert cell.candidates[0] == cell.current
        assert len(set(cell.candidates)) == len(cell.candidates)
        assert len(cell.candidates) > 1 or cell.key.D > 128  # memory leaves one
    (one,) = {cell.key.D for cell in tune.cells([kernel], 192)}
    assert one == 192


@pytest.mark.target
def test_build_only_as_a_program(monkeypatch, capsys, table):
    """Two candidates: one that fits, one that spills."""
    fits = tune.cells(["attention_forward"], 256)[0]
    fits = fits._replace(candidates=[fits.current])
    (spills,) = (
        cell
        for cell in tune.cells(["attention_backward"], 64)
        if (cell.key.kernel, cell.key.mask) == ("attention_dkv", "window, cap")
    )
    wide = mosaic_backward.Tiles(128, 2)
    assert wide in spills.candidates
    todo = [fits, spills._replace(current=wide, candidates=[wide])]
    monkeypatch.setattr(tune, "cells", lambda *_: todo)
    written = table.read_text()
    assert tune.main(["--build-only", "--json"]) == 0
    captured = capsys.readouterr()
    first, second = json.loads(captured.out)
    assert (first["kernel"], first["D"], first["mask"]) == ("attention_forward", 256, "full")
    assert (first["registers"], first["spill_bytes"], first["feasible"]) == (168, 0, True)
    assert 190 * 1024 < first["shared_memory_bytes"] <= 227 * 1024
    assert second["spill_bytes"] > 0 and not second["feasible"] and second["us"] is None
    assert captured.err == "" and table.read_text() == written


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], r"timing needs a Hopper GPU \(H100, .*runs on cpu; --build-only does without"),
        (["attention_backward", "--head-size", "256"], "256: attention_backward have 64, 128, 192"),
        (["--head-size", "96"], "--head-size 96: .* have 64, 128, 192, 256"),
        (["attention"], "invalid choice: 'attention'"),
        (["--head-size", "x"], "invalid int value"),
    ],
)
def test_bad_input_is_one_line(capsys, argv, message):
    assert tune.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert re.search(message, captured.err)


def test_on_a_hopper_gpu_the_winner_is_written(monkeypatch, capsys, table):
    """The program, with the device, the builds and the times made up."""
    gpu = type("Gpu", (), {"device_kind": "NVIDIA H200"})
    monkeypatch.setattr(tune.jax, "devices", lambda: [gpu])
    monkeypatch.setattr(tune, "build_all", lambda programs, _: [GOOD] * len(programs))
    fastest = lambda programs, args: {t: float(t.stages * t.columns) for t in programs}
    monkeypatch.setattr(tune, "seconds", fastest)
    assert tune.main(["attention_backward", "--head-size", "128"]) == 0
    out = capsys.readouterr().out
    assert "old: columns=128 stages=2 consumers=2; new: columns=64 stages=2 consumers=2" in out
    new = {key: row for key, row in tiles.read(table).items() if row["measured"]}
    assert {key.mask for key in new} == {"full", "causal", "window, cap", "packed"}
    assert {row["tiles"]["columns"] * row["tiles"]["stages"] for row in new.values()} == {128}
    assert str(table) in out


def test_a_table_that_cannot_be_written_is_said_first(monkeypatch, capsys, tmp_path):
    gpu = type("Gpu", (), {"device_kind": "NVIDIA H100 80GB HBM3"})
    monkeypatch.setattr(tune.jax, "devices", lambda: [gpu])
    monkeypatch.setattr(tiles, "PATH", tmp_path / "none.json")
    assert tune.main([]) == 2
    assert re.search("cannot write the table .*none.json", capsys.readouterr().err)


def test_a_missing_extra_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(target, "_folders", lambda package: [])
    assert tune.main(["attention_forward", "--head-size", "64", "--build-only"]) == 2
    assert "pip install -e '.[target]'" in capsys.readouterr().err
