"""The attention benchmark without a GPU: its sides compute the same thing, and its arithmetic."""

import functools
import json
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from experiments.bench import attention as bench
from experiments.errors import UserError
from pallas_kernels.attention import mask as masks

CASES = [bench.Case(mask, 48, 16) for mask in bench.MASKS]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A case of 96 tokens; the window and the documents are shorter than a row."""
    for name, value in {"TOKENS": 96, "WIDTH": 32, "WINDOW": 6, "DOCUMENT": 16}.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench, "LENGTHS", (16, 48))
    monkeypatch.setattr(bench, "TURN_SECONDS", 1e-6)


@pytest.fixture
def peers(monkeypatch):
    """cuDNN and tokamax, played by XLA."""
    plain = jax.nn.dot_product_attention

    def play(name):
        def attend(*args, implementation, **options):
            assert implementation == name
            return plain(*args, implementation="xla", **options)

        return attend

    monkeypatch.setattr(jax.nn, "dot_product_attention", play("cudnn"))
    fake = types.SimpleNamespace(dot_product_attention=play("mosaic"))
    monkeypatch.setitem(sys.modules, "tokamax", fake)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.mask)
def test_all_sides_attend_to_the_pairs_that_are_counted(case, peers):
    shape = case.batch, case.length, case.heads, case.head_size
    assert shape == (2, 48, 2, 16)
    q, k, v, g = (jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(0), 4))
    want = bench.program("xla", case, True)(q, k, v, g)
    for side in bench.SIDES:
        got = bench.program(side, case, True)(q, k, v, g)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert float(jnp.max(jnp.abs(b))) > 0.1
            assert jnp.allclose(a, b, atol=1e-5), side
        assert jnp.array_equal(bench.program(side, case, False)(q, k, v, g), got[0])

    rows = jnp.arange(case.length) // bench.DOCUMENT + 1 if case.mask == "packed" else None
    rows = None if rows is None else jnp.stack([rows, rows])
    window = (bench.WINDOW, 0) if case.mask == "window" else None
    mask = masks.Mask(case.mask != "full", window, rows, rows)
    band, arrays = masks.split(mask, case.batch, case.length, case.length)
    positions = jnp.arange(case.length)
    pairs = int(masks.visible(band, arrays, positions, positions)[0].sum())
    # The diagonal of a causal mask is counted half, as everyone does; the window's is exact.
    diagonal = case.length / 2 if case.mask in ("causal", "packed") else 0
    assert case.pairs == pairs - diagonal


def test_flops():
    case = bench.Case("full", 48, 16)
    assert case.flops(False) == 2 * (2 * 48 * 48 * 16) * 2 * 2  # two matmuls, rows, heads
    assert case.flops(True) == 3.5 * case.flops(False)
    row = bench.row(case, True, "ours", 0.5, 1e9)
    assert (row["ms"], row["pass"]) == (500, "forward+backward")
    assert row["tflops"] == pytest.approx(case.flops(True) / 0.5 / 1e12)
    assert row["share_of_peak"] == pytest.approx(1e3 * row["tflops"])


def test_alternate_is_the_median_of_turns(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(bench, "TURN_SECONDS", 3)
    counts = dict.fromkeys("ab", 0)

    def call(side, x):
        counts[side] += 1
        return x

    sides = {side: functools.partial(call, side) for side in "ab"}
    assert bench.alternate(sides, (0,), rounds=5) == {"a": 1 / 3, "b": 1 / 3}
    assert counts == {"a": 2 + 1 + 5 * 3, "b": 2 + 1 + 5 * 3}


def test_cases_change_one_axis_at_a_time():
    found = bench.cases(48)
    assert len(found) == len(set(found)) == 2 + 2 * 4 - 1
    assert {c.length for c in found} == {16, 48} and {c.mask for c in found} == set(bench.MASKS)


def test_the_whole_program(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench, "gpu_here", lambda: "a device of no known peak")
    monkeypatch.setattr(bench, "HEAD_SIZES", (128,))
    monkeypatch.setattr(bench, "WIDTH", 128)
    bench.main(bench.Options(json=True, length=48, rounds=1, plot=str(tmp_path / "a.png")))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 2 * 3 * len(bench.cases(48))
    for row in rows:
        if row["side"] == "cudnn":  # a CPU has none, and that is no reason to stop
            assert row["refused"] and row["ms"] is None and row["tflops"] is None
        else:
            assert row["ms"] > 0 and row["tflops"] > 0 and row["refused"] is None
            assert row["difference"] < 0.1
            assert row["share_of_peak"] is None  # of an unknown device
    assert (tmp_path / "a.png").stat().st_size > 1000
    text = bench.table(rows, "some device")
    assert len(text.splitlines()) == 2 + 2 * len(bench.cases(48)) + 1
    assert "cudnn refused some: " in text


def test_without_a_gpu_it_says_so():
    with pytest.raises(UserError, match="needs a GPU, and JAX runs on the cpu"):
        bench.main(bench.Options(length=48))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (bench.Options(length=100), "--length 100: legal are 16, 48"),
        (bench.Options(length=48, rounds=0), "--rounds 0: at least 1"),
        (bench.Options(length=48, plot="/nowhere/a.png"), "there is no folder /nowhere"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(UserError, match=message):
        bench.main(options)


def test_the_program_exits_with_2(capsys):
    with pytest.raises(SystemExit) as stop:
        bench.cli.run(bench.main, bench.Options, ["--length", "48"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
