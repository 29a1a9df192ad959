"""GPUs as data: peak rates, memory and links, and the description XLA compiles for.

Sources, in each case for the SXM board:

  rates, memory, links   NVIDIA's data sheets of the A100 80GB, H100, H200 and HGX B200.
                         Rates are *dense* tensor-core rates: the sheets of H100, H200 and
                         B200 print twice as much, for 2:4 sparsity. A sheet's GB of memory
                         is taken as 2**30 bytes, which is what the boards carry.
  cores, clock, L2       NVIDIA's whitepapers of the three architectures (clock: boost).
  limits of a core       CUDA C++ Programming Guide, technical specifications by compute
                         capability, and its table of arithmetic throughput.
  visible_*              openxla/xla, xla/backends/gpu/target_config/specs, read from real
                         boards, as are l2_bytes and vector_16bit of the B200. The H200's
                         memory there is the board's whole 141 GiB; programs on one see 139.8.
  network_bandwidth      an assumption: the one adapter per GPU of NVIDIA's DGX systems.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """What the data sheets say of one GPU."""

    name: str  # a key of `GPUS`
    device_kinds: tuple[str, ...]  # what `jax.Device.device_kind` says
    memory_bytes: int
    visible_bytes: int  # of these, what CUDA reports as the total: a plan must fit here
    memory_bandwidth: float  # bytes/s
    visible_bandwidth: float  # bytes/s by the clock and bus width that CUDA reports
    bf16_flops: float  # FLOP/s of bfloat16 and float16 matmuls
    tf32_flops: float  # FLOP/s of float32 matmuls at JAX's default precision, which is TF32
    fp8_flops: float | None  # FLOP/s; None: no FP8 tensor cores
    nvlink_bandwidth: float  # bytes/s in one direction, all links of the GPU together
    nvlinks: int
    pcie_bandwidth: float  # bytes/s in one direction
    network_bandwidth: float  # bytes/s in one direction to other nodes, a GPU's share
    compute_capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    clock_ghz: float
    l2_bytes: int
    shared_memory_per_core: int  # bytes; a block can have all but 1 KiB of it
    vector_32bit: int  # float32 results per clock and core, without tensor cores
    vector_16bit: int  # bfloat16 results, likewise
    matrix_16bit: int  # bfloat16 multiply-adds per clock and tensor core, of which 4 a core


_GPUS = (
    Gpu(
        name="a100",
        device_kinds=("NVIDIA A100-SXM4-80GB",),
        memory_bytes=80 * 2**30,
        visible_bytes=85_100_068_864,
        memory_bandwidth=2.039e12,
        visible_bandwidth=2.03904e12,
        bf16_flops=312e12,
        tf32_flops=156e12,
        fp8_flops=None,
        nvlink_bandwidth=300e9,
        nvlinks=12,
        pcie_bandwidth=32e9,
        network_bandwidth=25e9,  # DGX A100: 200 Gb/s
        compute_capability=(8, 0),
        cores=108,
        clock_ghz=1.41,
        l2_bytes=40 * 2**20,
        shared_memory_per_core=164 * 2**10,
        vector_32bit=64,
        vector_16bit=128,
        matrix_16bit=256,
    ),
    Gpu(
        name="h100",
        device_kinds=("NVIDIA H100 80GB HBM3",),
        memory_bytes=80 * 2**30,
        visible_bytes=84_942_979_072,
        memory_bandwidth=3.35e12,
        visible_bandwidth=3.35232e12,
        bf16_flops=989e12,
        tf32_flops=494.5e12,
        fp8_flops=1979e12,
        nvlink_bandwidth=450e9,
        nvlinks=18,
        pcie_bandwidth=64e9,
        network_bandwidth=50e9,  # DGX H100: 400 Gb/s
        compute_capability=(9, 0),
        cores=132,
        clock_ghz=1.98,
        l2_bytes=50 * 2**20,
        shared_memory_per_core=228 * 2**10,
        vector_32bit=128,
        vector_16bit=256,
        matrix_16bit=512,
    ),
    Gpu(
        name="h200",
        device_kinds=("NVIDIA H200",),
        memory_bytes=141 * 2**30,
        visible_bytes=1398 * 2**30 // 10,
        memory_bandwidth=4.8e12,
        visible_bandwidth=4.8e12,
        bf16_flops=989e12,
        tf32_flops=494.5e12,
        fp8_flops=1979e12,
        nvlink_bandwidth=450e9,
        nvlinks=18,
        pcie_bandwidth=64e9,
        network_bandwidth=50e9,  # DGX H200: 400 Gb/s
        compute_capability=(9, 0),
        cores=132,
        clock_ghz=1.98,
        l2_bytes=50 * 2**20,
        shared_memory_per_core=228 * 2**10,
        vector_32bit=128,
        vector_16bit=256,
        matrix_16bit=512,
    ),
    Gpu(
        name="b200",
        device_kinds=("NVIDIA B200",),
        memory_bytes=180 * 2**30,
        visible_bytes=191_514_411_008,
        memory_bandwidth=8.0e12,
        visible_bandwidth=7.67232e12,
        bf16_flops=2250e12,
        tf32_flops=1100e12,
        fp8_flops=4500e12,
        nvlink_bandwidth=900e9,
        nvlinks=18,
        pcie_bandwidth=64e9,
        network_bandwidth=50e9,  # DGX B200: 400 Gb/s
        compute_capability=(10, 0),
        cores=148,
        clock_ghz=1.965,
        l2_bytes=132_644_864,
        shared_memory_per_core=228 * 2**10,
        vector_32bit=128,
        vector_16bit=128,
        matrix_16bit=1024,
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


# XLA picks library calls by the versions it believes are installed: those that JAX's own
# wheels for CUDA 13 bring.
_CUDA_VERSION = "13.2.0"
_CUDNN_VERSION = "9.23.0"

# Numbers of `xla.PrimitiveType`.
_S8, _U8, _F16, _F32, _BF16, _F8E5M2, _F8E4M3FN = 2, 6, 10, 11, 16, 19, 20
_S32, _U32, _F64 = 4, 8, 12


def describe(gpu: Gpu) -> str:
    """Renders what XLA's compiler for GPUs takes in place of a device.

    Args:
      gpu: an entry of `GPUS`.

    Returns:
      A `GpuTargetConfigProto` in protobuf's text format.
    """
    major, minor = gpu.compute_capability
    # From 9.0 on, wgmma and its like exist only in the variant "sm_90a" of an architecture.
    extension = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    return f"""\
platform_name: "CUDA"
device_description_str: "{gpu.device_kinds[0]}"
gpu_device_info {{
  name: "{gpu.device_kinds[0]}"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
  runtime_version: "{_CUDA_VERSION}"
  compile_time_toolkit_version: "{_CUDA_VERSION}"
  driver_version: "{_CUDA_VERSION}"
  dnn_version: "{_CUDNN_VERSION}"
  core_count: {gpu.cores}
  clock_rate_ghz: {gpu.clock_ghz}
  fpus_per_core: {gpu.vector_32bit}
  device_memory_size: {gpu.visible_bytes}
  memory_bandwidth: {gpu.visible_bandwidth:.0f}
  l2_cache_size: {gpu.l2_bytes}
  pcie_bandwidth: {gpu.pcie_bandwidth:.0f}
  device_interconnect_info {{ active_links: {gpu.nvlinks} }}
  device_address_bits: 64
  ecc_enabled: true
  collective_memory_granularity: 2097152
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  max_blocks_per_multiprocessor: 32
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_core: {gpu.shared_memory_per_core}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {gpu.shared_memory_per_core - 1024}
  reserved_shared_memory_per_block: 1024
  scalar_unit_description {{
{_vector_rates(gpu)}
  }}
  matrix_unit_description {{
{_matrix_rates(gpu)}
  }}
}}
"""


def _vector_rates(gpu: Gpu) -> str:
    results = {
        _F32: gpu.vector_32bit,
        _F16: gpu.vector_16bit,
        _BF16: gpu.vector_16bit,
        _F64: gpu.vector_32bit // 2,
        _S32: 64,
        _U32: 64,
    }
    return "\n".join(_rate(key, gpu.clock_ghz, n, 1) for key, n in results.items())


def _matrix_rates(gpu: Gpu) -> str:
    """Tensor cores run at the clock at which they reach the sheet's rate, below the boost."""
    multiply_adds = {
        _BF16: gpu.matrix_16bit,
        _F16: gpu.matrix_16bit,
        _F32: gpu.matrix_16bit // 2,
        _S8: gpu.matrix_16bit * 2,
        _U8: gpu.matrix_16bit * 2,
    }
    if gpu.fp8_flops is not None:
        multiply_adds |= {_F8E4M3FN: gpu.matrix_16bit * 2, _F8E5M2: gpu.matrix_16bit * 2}
    ghz = gpu.bf16_flops / (2 * gpu.cores * 4 * gpu.matrix_16bit) / 1e9
    return "\n".join(_rate(key, round(ghz, 4), 4, n) for key, n in multiply_adds.items())


def _rate(key: int, ghz: float, units: int, per_clock: int) -> str:
    value = f"clock_rate_ghz: {ghz} units_per_core: {units} ops_per_clock: {per_clock}"
    return f"    rate_infos {{ key: {key} value {{ {value} }} }}"
