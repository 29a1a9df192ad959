"""GPUs as data: peak rates, memory and links, for utilisation figures and rooflines.

Source: NVIDIA's data sheets of the A100 80GB, H100, H200 and HGX B200, in each case the SXM
column. Rates are *dense* tensor-core rates: the sheets of H100, H200 and B200 print twice as
much, for 2:4 sparsity. A sheet's GB of memory is taken as 2**30 bytes, which is what the
boards carry; the driver keeps about 1 % of it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """What the data sheet says of one GPU."""

    name: str  # a key of `GPUS`
    device_kinds: tuple[str, ...]  # what `jax.Device.device_kind` says
    memory_bytes: int
    memory_bandwidth: float  # bytes/s
    bf16_flops: float  # FLOP/s of bfloat16 and float16 matmuls
    tf32_flops: float  # FLOP/s of float32 matmuls at JAX's default precision, which is TF32
    fp8_flops: float | None  # FLOP/s; None: no FP8 tensor cores
    nvlink_bandwidth: float  # bytes/s in one direction, all links of the GPU together


_GPUS = (
    Gpu(
        name="a100",
        device_kinds=("NVIDIA A100-SXM4-80GB",),
        memory_bytes=80 * 2**30,
        memory_bandwidth=2.039e12,
        bf16_flops=312e12,
        tf32_flops=156e12,
        fp8_flops=None,
        nvlink_bandwidth=300e9,
    ),
    Gpu(
        name="h100",
        device_kinds=("NVIDIA H100 80GB HBM3",),
        memory_bytes=80 * 2**30,
        memory_bandwidth=3.35e12,
        bf16_flops=989e12,
        tf32_flops=494.5e12,
        fp8_flops=1979e12,
        nvlink_bandwidth=450e9,
    ),
    Gpu(
        name="h200",
        device_kinds=("NVIDIA H200",),
        memory_bytes=141 * 2**30,
        memory_bandwidth=4.8e12,
        bf16_flops=989e12,
        tf32_flops=494.5e12,
        fp8_flops=1979e12,
        nvlink_bandwidth=450e9,
    ),
    Gpu(
        name="b200",
        device_kinds=("NVIDIA B200",),
        memory_bytes=180 * 2**30,
        memory_bandwidth=8.0e12,
        bf16_flops=2250e12,
        tf32_flops=1100e12,
        fp8_flops=4500e12,
        nvlink_bandwidth=900e9,
    ),
)

GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in _GPUS}


def find(device_kind: str) -> Gpu | None:
    """Returns the GPU that JAX calls `device_kind`.

    The match is exact: "NVIDIA H100 PCIe", "NVIDIA H200 NVL" or a MIG slice share part of a
    name here and none of the figures.

    Args:
      device_kind: `jax.devices()[0].device_kind`.

    Returns:
      The description, or None for a device that has none.

    Example:
      >>> find("NVIDIA H200").name
      'h200'
      >>> find("cpu") is None
      True
    """
    return next((gpu for gpu in _GPUS if device_kind in gpu.device_kinds), None)
