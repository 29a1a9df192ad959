"""The workbench as a program: its table, its JSON, its simulator, and bad input in one line."""

import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import build, inspect, target
from pallas_kernels import example_linear_residual as example
from pallas_kernels.attention import cases as attention
from pallas_kernels.attention import mask
from pallas_kernels.gpus import GPUS

KEYS = (
    "name target registers spill_bytes shared_memory_bytes barriers occupancy wgmma tma flops "
    "bytes roofline_us"
).split()
NAME = "example_linear_residual"
ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden/kernels_h200.json"


def run(capsys, *argv):
    """Exit status, standard output and standard error."""
    status = inspect.main(argv)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture(scope="module")
def everything():
    """One child process for all tests that look at built kernels."""
    todo = [(n, case) for n in inspect.KERNELS for case in inspect.cases(n, {})]
    gpu = target.parse("h200")
    built = build.build_all([(case.function, case.args) for _, case in todo], gpu)
    return [inspect.report(n, case, b, gpu.gpu) for (n, case), b in zip(todo, built, strict=True)]


@pytest.mark.target
def test_no_kernel_is_worse_than_recorded(everything):
    """Record: python -m pallas_kernels.inspect --all --json > tests/golden/kernels_h200.json"""
    key = lambda row: (row["name"], row["configuration"])
    recorded = {key(row): row for row in json.loads(GOLDEN.read_text())}
    assert list(map(key, everything)) == list(recorded)
    for row in everything:
        for figure in ("spill_bytes", "registers", "shared_memory_bytes"):
            assert row[figure] <= recorded[key(row)][figure], (key(row), figure)
        assert list(row["wgmma_kinds"]) == recorded[key(row)]["wgmma_kinds"], key(row)
        kinds = ".f32.bf16.bf16", ".f32.e4m3.e4m3"
        assert all(kind.endswith(kinds) for kind in row["wgmma_kinds"]), key(row)
        assert 0 < row["shared_memory_bytes"] <= 227 * 1024, key(row)
        assert (row["wgmma"] > 0) == (row["flops"] > 0), key(row)
        assert row["tma"] > 0 and row["occupancy"] > 0, key(row)
        assert not row["warnings"], key(row)


def test_what_is_recorded_does_not_spill_and_is_in_the_readme():
    rows = json.loads(GOLDEN.read_text())
    assert [r for r in rows if r["spill_bytes"]] == []
    assert inspect.table(rows) in (ROOT / "pallas_kernels/README.md").read_text()


@pytest.mark.target
def test_json_of_one_kernel_of_another_size(capsys):
    status, out, err = run(capsys, NAME, "--shape", "M=256,K=128", "--json", "--target", "h100")
    assert (status, err) == (0, "")
    (row,) = json.loads(out)
    assert set(KEYS) <= set(row)
    assert (row["name"], row["target"], row["spill_bytes"]) == (NAME, "h100", 0)
    assert row["flops"] == 2 * 256 * 128 * 4096
    assert row["bytes"] == 2 * (256 * 128 + 128 * 4096 + 2 * 256 * 4096)
    assert row["roofline_us"] == pytest.approx(1e6 * row["bytes"] / 3.35e12)


ROW = {
    "name": "one", "configuration": "D=64", "target": "h200", "registers": 168, "spill_bytes": 4,
    "shared_memory_bytes": 2048, "barriers": 9, "occupancy": 0.1875, "wgmma": 4, "tma": 3,
    "exp2": 1, "sass": None, "warnings": ["slow"], "flops": 2e9, "bytes": 3e6, "roofline_us": 2.022,
}  # fmt: skip


def test_table():
    lines = inspect.table([ROW, ROW | {"name": "another"}]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:4]]
    assert cells[0] == list(inspect.COLUMNS)
    assert cells[2] == "one D=64;168;4;2.0;9;19%;4;3;1;2;3;2.022".split(";")
    assert cells[3][0] == "another D=64"
    assert len({len(line) for line in lines[:4]}) == 1
    assert lines[4] == "" and "in PTX," in lines[5] and "modelled" in lines[6]
    assert lines[7:] == ["one D=64: ptxas warns: slow", "another D=64: ptxas warns: slow"]
    with_sass = inspect.table([ROW | {"sass": {"wgmma": 8, "tma": 2, "exp2": 0}}])
    assert "4 / 8" in with_sass and "PTX / SASS" in with_sass


@pytest.mark.parametrize(
    ("dtype", "flops", "moved", "seconds"),
    [
        ("bfloat16", 989e12, 0, 1),
        ("float16", 989e12, 4.8e12 * 3, 3),
        ("float8_e4m3fn", 1979e12, 0, 1),
        ("float32", 494.5e12, 0, 1),
    ],
)
def test_roofline(dtype, flops, moved, seconds):
    found = inspect.roofline_seconds(GPUS["h200"], dtype, int(flops), int(moved))
    assert found == pytest.approx(seconds)


@pytest.mark.parametrize(("gpu", "dtype"), [("a100", "float8_e4m3fn"), ("h200", "int8")])
def test_roofline_without_a_rate(gpu, dtype):
    with pytest.raises(ValueError, match=f"{gpu} has no peak rate for matmuls of {dtype}"):
        inspect.roofline_seconds(GPUS[gpu], dtype, 1, 1)


@pytest.mark.parametrize("name", inspect.KERNELS)
def test_a_kernel_of_the_table_agrees_with_its_reference(name):
    """One configuration: the kernels' own tests go through all."""
    entry = inspect.KERNELS[name]
    sizes = entry.small | ({"T": 128, "K": 1, "H": 2} if "T" in entry.small else {})
    case = inspect.cases(name, sizes)[-1]
    assert 0 < inspect.simulate(case) <= inspect.MAX_ERROR


@pytest.mark.parametrize(
    ("off", "expected"), [(0.0, 0.0), (0.5, math.inf), (math.nan, math.inf), (math.inf, math.inf)]
)
def test_error_where_the_reference_has_none(off, expected):
    """Of an exact reference; NaN is not lost beside a leaf without, -inf is equal to itself."""
    exact = lambda x: (x, jnp.full(3, -jnp.inf), x)
    wrong = lambda x: (x, jnp.full(3, -jnp.inf), x + off)
    x = jax.ShapeDtypeStruct((4,), jnp.float32)
    found = inspect.simulate(inspect.Case("", wrong, exact, [x], 0, 0))
    assert found == expected


def test_simulate_as_a_program(capsys):
    status, out, err = run(capsys, NAME, "--simulate", "--json", "--shape", "N=128")
    assert (status, err) == (0, "")
    (row,) = json.loads(out)
    assert row["shape"] == {"M": 128, "K": 320, "N": 128}
    assert row["race"] is None and 0 < row["error"] <= inspect.MAX_ERROR


@pytest.mark.parametrize("variant", attention.VARIANTS)
def test_pairs_of_attention_are_those_of_its_mask(variant):
    q = jnp.zeros((1, 64, 2, 16))
    band, arrays = mask.split(attention._mask(variant, q), 1, 64, 64)
    places = jnp.arange(64)
    seen = int(mask.visible(band, arrays, places, places).sum())
    # Half of T x T leaves out half of the diagonal.
    assert attention._pairs(variant, 64) == seen - (32 if variant in ("causal", "packed") else 0)


def test_simulate_reports_a_race(monkeypatch, capsys):
    monkeypatch.setattr(plgpu, "commit_smem", lambda: None)
    status, out, err = run(capsys, NAME, "--simulate", "--shape", "M=128,K=64,N=128")
    assert (status, err) == (1, "")
    assert out.count("\n") == 1
    assert out.startswith(f"{NAME} M=128,K=64,N=128: RACE: read by warpgroup_id=")
    assert "example_linear_residual.py:" in out and " and write by warpgroup_id=" in out


def test_simulate_reports_a_wrong_result(monkeypatch, capsys):
    def wrong():
        x = jax.ShapeDtypeStruct((8, 4), jnp.bfloat16)
        i = jax.ShapeDtypeStruct((), jnp.int32)
        yield "none", lambda x, i: 3 * x, lambda x, i: 3 * x + i.astype(x.dtype), [x, i], 0, 1
        yield "some", lambda x, i: 3 * x + 0.1, lambda x, i: 3 * x, [x, i], 0, 1

    monkeypatch.setitem(inspect.KERNELS, "wrong", inspect.Entry(wrong, {}))
    status, out, _ = run(capsys, "wrong", "--simulate", "--json")
    right, off = json.loads(out)
    assert status == 1
    assert right["error"] == pytest.approx(1) and 2 < off["error"] < math.inf


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "name a kernel, or --all; kernels are .*example_linear_residual"),
        (["example_linear"], "unknown kernel 'example_linear'; did you mean example_linear_res"),
        (["--all", NAME], "--all takes no kernel and no --shape"),
        (
            [NAME, "--shape", "M=0"],
            "cannot read 'M=0' in --shape of .*; its sizes are M=4096,K=4096,N=4096",
        ),
        ([NAME, "--shape", "Q=64"], "cannot read 'Q=64'"),
        ([NAME, "--shape", "64x64"], "cannot read '64x64'"),
        (["attention_forward", "--shape", "d=64"], "'d=64'.*B=1,T=8192,H=16,K=4,D=all"),
        (["attention_backward", "--shape", "D=96"], "D=96; the backward kernels take multiples"),
        ([NAME, "--shape", "M=100"], "got bfloat16\\[100, 4096\\].*need bfloat16"),
        ([NAME, "--target", "h20"], "unknown target 'h20': did you mean h200"),
        ([NAME, "--target", "h200x2"], "built for one GPU"),
        ([NAME, "--target", "a100"], "from h100 on"),
        ([NAME, "--frob"], "unrecognized arguments: --frob"),
    ],
)
def test_bad_input_is_one_line(capsys, argv, message):
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert err.startswith("python -m pallas_kernels.inspect: ") and err.count("\n") == 1
    assert re.search(message, err)


def test_a_missing_extra_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(target, "_folders", lambda package: [])
    status, out, err = run(capsys, NAME)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1 and "pip install -e '.[target]'" in err


def test_a_kernel_that_does_not_lower_at_its_own_size_keeps_its_stack(monkeypatch):
    entry = inspect.Entry(lambda: example.cases(M=100), {})
    monkeypatch.setitem(inspect.KERNELS, "broken", entry)
    with pytest.raises(ValueError, match=r"got bfloat16\[100"):
        inspect.main(["broken"])
