"""The data sheets' figures, which device they are for, and targets as users write them."""

import dataclasses

import pytest

from pallas_kernels import target


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
    ],
)
def test_find_knows_what_jax_prints(kind, name):
    assert target.find(kind) is target.GPUS[name]
    assert target.GPUS[name].name == name


@pytest.mark.parametrize(
    "kind",
    ["", "cpu", "h200", "NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA A100-SXM4-40GB", "NVIDIA"],
)
def test_find_takes_no_relative_for_the_board_itself(kind):
    assert target.find(kind) is None


def test_rates_are_the_dense_ones():
    """TF32 is half of 16 bits, FP8 twice: a sparse figure among them breaks the ratio."""
    for gpu in target.GPUS.values():
        assert gpu.tf32_flops == pytest.approx(gpu.bf16_flops / 2, rel=0.03)
        if gpu.fp8_flops is not None:
            assert gpu.fp8_flops == pytest.approx(gpu.bf16_flops * 2, rel=0.03)
    assert target.GPUS["h200"].bf16_flops == 989e12
    assert target.GPUS["a100"].fp8_flops is None


def test_order_of_magnitude_of_memory_and_links():
    """A figure in GB, in bits, or of both directions would be out of line."""
    for gpu in target.GPUS.values():
        assert 80 * 2**30 <= gpu.memory_bytes <= 192 * 2**30
        assert 0.98 < gpu.visible_bytes / gpu.memory_bytes <= 1
        assert 2e12 < gpu.memory_bandwidth <= 8e12
        assert 300e9 <= gpu.nvlink_bandwidth <= 900e9
        assert 1 / 20 < gpu.network_bandwidth / gpu.nvlink_bandwidth < 1 / 8
        # 16-bit matmuls become bound by compute at 150 to 300 FLOP a byte.
        assert 150 <= gpu.bf16_flops / gpu.memory_bandwidth <= 300


def test_rates_follow_from_cores_and_clocks():
    """Tensor cores reach their rate below the boost clock, and vectors reach the sheet's at it."""
    for gpu in target.GPUS.values():
        per_clock = gpu.cores * 4 * 2 * gpu.matrix_16bit
        assert 0.9 < gpu.bf16_flops / per_clock / 1e9 / gpu.clock_ghz <= 1.001
    float32 = {g.name: g.cores * g.vector_32bit * 2 * g.clock_ghz for g in target.GPUS.values()}
    sheet = {"a100": 19.5e3, "h100": 67e3, "h200": 67e3, "b200": 75e3}  # GFLOP/s
    assert float32 == pytest.approx(sheet, rel=0.01)


def test_gpu_is_immutable_and_kinds_are_unique():
    with pytest.raises(dataclasses.FrozenInstanceError):
        target.GPUS["h100"].memory_bytes = 0
    kinds = [kind for gpu in target.GPUS.values() for kind in gpu.device_kinds]
    assert len(kinds) == len(set(kinds))


@pytest.mark.parametrize(
    ("text", "name", "nodes", "gpus", "printed"),
    [
        ("h200", "h200", 1, 1, "h200"),
        ("h200x1", "h200", 1, 1, "h200"),
        ("h200x8", "h200", 1, 8, "h200x8"),
        ("h200x1x8", "h200", 1, 8, "h200x8"),
        ("h100x2x8", "h100", 2, 8, "h100x2x8"),
        ("a100x3x1", "a100", 3, 1, "a100x3x1"),
        (" B200X4 ", "b200", 1, 4, "b200x4"),
    ],
)
def test_parse(text, name, nodes, gpus, printed):
    found = target.parse(text)
    assert found == target.Target(target.GPUS[name], nodes, gpus)
    assert found.count == nodes * gpus
    assert str(found) == printed
    assert target.parse(str(found)) == found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("h20", "did you mean h200"),
        ("h210x8", "did you mean h200"),
        ("", "known GPUs are a100, h100, h200, b200"),
        ("tpu", "known GPUs are a100, h100, h200, b200; write a GPU"),
        ("8xh200", "h200x8, h100x2x8"),
        ("h200x", "numbers of target 'h200x'; write a GPU"),
        ("h200x0", "h200x8, h100x2x8"),
        ("h200x2x0", "h200x8, h100x2x8"),
        ("h200x-1", "h200x8, h100x2x8"),
        ("h200x1.5", "h200x8, h100x2x8"),
        ("h200x2x2x2", "h200x8, h100x2x8"),
        ("h200x12", "write nodes x GPUs: h200x2x8"),
        ("h200x2x16", "at most 8"),
    ],
)
def test_parse_refuses_in_one_line_and_teaches(text, says):
    with pytest.raises(ValueError, match="target") as caught:
        target.parse(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
