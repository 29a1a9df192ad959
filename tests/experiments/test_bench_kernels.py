"""The kernels' benchmark without a GPU: its programs run, and its arithmetic."""

import sys
import types

import jax
import jax.numpy as jnp
import pytest

from experiments.bench import kernels as bench
from experiments.errors import UserError
from pallas_kernels.gpus import GPUS


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Arrays of some hundred elements; timing by a few calls."""
    sizes = {"ROWS": 16, "WIDTH": 128, "MLP": 64, "TOKENS": 24, "NARROW": 64, "WORDS": 40}
    for name, value in sizes.items():
        monkeypatch.setattr(bench, name, value)


def test_every_case_counts_its_arrays_and_runs():
    for case in bench.cases():
        assert list(case.sides) == ["ours", "xla"]
        args = bench.values(case)
        outs = [jax.tree.leaves(jax.jit(call)(*args)) for call in case.sides.values()]
        for a, b in zip(*outs, strict=True):  # both are plain JAX here
            assert float(jnp.max(jnp.abs(a.astype(jnp.float32)))) > 0.01, case.name
            assert jnp.array_equal(a, b), case.name
        if case.flops or "grad" in case.name:
            continue
        # Read once and written once: all but the scales, which the count leaves out.
        arrays = [x for x in (*args, *outs[0]) if x.size >= 16 * 64]
        assert sum(x.size * x.dtype.itemsize for x in arrays) == case.bytes, case.name


def test_tokamax_is_a_side_where_it_has_the_op():
    calls = []
    tokamax = types.SimpleNamespace(
        layer_norm=lambda x, scale, offset, **options: calls.append(options) or x,
        linear_softmax_cross_entropy_loss=lambda h, labels, w: calls.append(w.shape) or h.sum(),
    )
    cases = {case.name: case for case in bench.cases(tokamax)}
    with_it = {name for name, case in cases.items() if "tokamax" in case.sides}
    assert with_it == {
        "add_rms_norm", "add_rms_norm grad", "cross_entropy", "cross_entropy grad"
    }  # fmt: skip
    for name in ("add_rms_norm", "cross_entropy"):
        cases[name].sides["tokamax"](*bench.values(cases[name]))
    assert calls == [{"subtract_mean": False, "epsilon": 1e-6}, (64, 40)]


def test_rates_and_shares():
    one = next(case for case in bench.cases() if case.name == "fp8_matmul")
    gpu = GPUS["h200"]
    seconds = one.bytes / gpu.memory_bandwidth  # so small that its bytes take longest
    got = bench.row(one, "ours", 2 * seconds, gpu)
    assert got["share_of_roofline"] == pytest.approx(0.5)
    assert got["gb_per_s"] == pytest.approx(gpu.memory_bandwidth / 2e9)
    assert got["tflops"] == pytest.approx(2 * 16 * 128 * 128 / (2 * seconds) / 1e12)
    refused = bench.row(one, "tokamax", "no such op", gpu)
    assert refused["ms"] is None and refused["refused"] == "no such op"
    text = bench.table([got, refused], "NVIDIA H200")
    assert "50%" in text and "tokamax refused fp8_matmul: no such op" in text


def test_bad_input_and_no_gpu(capsys, monkeypatch):
    for options, message in (
        (bench.Options(rounds=0), "--rounds 0: at least 1"),
        (bench.Options(only="nome"), "no case begins so; cases: add_rms_norm,"),
        (bench.Options(), "needs a GPU, and JAX runs on the cpu"),
    ):
        monkeypatch.setitem(sys.modules, "tokamax", None)
        with pytest.raises(UserError, match=message):
            bench.main(options)
    assert capsys.readouterr().out == ""
