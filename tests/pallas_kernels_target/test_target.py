"""The data sheets' figures, and which device they are for."""

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
        assert 2e12 < gpu.memory_bandwidth <= 8e12
        assert 300e9 <= gpu.nvlink_bandwidth <= 900e9
        # 16-bit matmuls become bound by compute at 150 to 300 FLOP a byte.
        assert 150 <= gpu.bf16_flops / gpu.memory_bandwidth <= 300


def test_gpu_is_immutable_and_kinds_are_unique():
    with pytest.raises(dataclasses.FrozenInstanceError):
        target.GPUS["h100"].memory_bytes = 0
    kinds = [kind for gpu in target.GPUS.values() for kind in gpu.device_kinds]
    assert len(kinds) == len(set(kinds))
