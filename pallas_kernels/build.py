"""What the compiler makes of one Mosaic GPU kernel, on a machine that need not have a GPU.

A kernel is lowered here and compiled in a child process, for three reasons:

  Mosaic keeps compiled kernels for the life of a process, by a hash of their IR alone. A
  kernel that was compiled before, be it for another GPU, is not compiled again and nothing
  is reported (jax 0.12.0.1).

  It takes ptxas and nvlink from PATH or CUDA_ROOT, whichever XLA finds first, once in a
  process; a machine's own CUDA may be older and count other registers. The child sees the
  installed packages of the extra `target` first.

  Its dumps go to standard output (MOSAIC_GPU_DUMP_PTX, _PTXAS, _SASS, _HOST_LLVM). The variable
  MOSAIC_GPU_DUMP_TO would write files, but also megabytes of every compiler pass, and runs
  a disassembler whether there is one or not.

The program travels as StableHLO, so any function will do, a closure too. The child wraps it
into a `jax.export.Exported` of its own: `jax.export`'s own serialisation needs one more package.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import target as targets
from pallas_kernels.gpus import Gpu

__all__ = ["Build", "CompileError", "build", "build_all", "check_target", "occupancy"]

# The custom calls of Mosaic GPU, which jax.export must be told to let through.
_CALLS = ("mosaic_gpu", "mosaic_gpu_v2")
_MARK = "pallas_kernels.build program"
_SASS = {"wgmma": r"\b[HQI]GMMA\b", "tma": r"\bUTMA(?:LDG|STG|REDG)\b", "exp2": r"\bMUFU\.EX2\b"}


class CompileError(RuntimeError):
    """A kernel does not compile for the target; the message is the compiler's own."""


@dataclass(frozen=True)
class Build:
    """One compiled kernel. Counts are of instructions in the code, not of executions.

    Attributes:
      kernel: Mosaic's name for it, that of the kernel's function.
      target: the GPU.
      threads: of a block.
      registers: of a thread, at launch.
      spill_bytes: registers written to memory and read back, of a thread.
      shared_memory_bytes: of a block; all of it is allotted at launch.
      barriers: named barriers in hardware, of 16; barriers in shared memory do not count.
      occupancy: resident threads of a core, over the most it can hold.
      wgmma, tma, exp2: instructions in PTX. An instruction of TMA moves a tile, either way.
      wgmma_kinds: their shapes and dtypes, such as "m64n128k16.f32.bf16.bf16".
      warnings: what ptxas warns of, such as wgmma that it serialised.
      sass: the three counts in machine code; None without nvidia-cuda-nvdisasm.
      ptx: the text.
    """

    kernel: str
    target: str
    threads: int
    registers: int
    spill_bytes: int
    shared_memory_bytes: int
    barriers: int
    occupancy: float
    wgmma: int
    tma: int
    exp2: int
    wgmma_kinds: tuple[str, ...]
    warnings: tuple[str, ...]
    sass: dict[str, int] | None
    ptx: str = field(repr=False)


def build(function: Callable, *abstract_args: Any, target: targets.Target) -> Build:
    """Compiles a function that holds one kernel, and says what became of it.

    Args:
      function: traceable by `jax.jit`; plain JAX around its one `plgpu.kernel` is fine.
      abstract_args: trees of `jax.ShapeDtypeStruct`, without shardings.
      target: one GPU, such as `target.parse("h200")`.

    Returns:
      The report. Seconds go into starting the child process; `build_all` shares them.

    Raises:
      ValueError: the function holds no kernel, or several; the target has several GPUs.
      CompileError: the kernel does not compile for the target.
      target.MissingExtra: the extra `target` is not installed.

    Example:
      >>> gpu = targets.parse("h200")
      >>> build(kernel, abstract, target=gpu).spill_bytes  # doctest: +SKIP
      0
    """
    return build_all([(function, abstract_args)], target)[0]


def build_all(
    programs: Sequence[tuple[Callable, Sequence[Any]]], target: targets.Target
) -> list[Build]:
    """`build` of many `(function, abstract_args)`, in a child process for each core.

    Returns:
      Their reports, in order. Raises as `build` does.
    """
    check_target(target)
    root = targets._cuda_root()
    with tempfile.TemporaryDirectory(prefix="pallas-build-") as folder:
        hashes = [_write(Path(folder), function, args) for function, args in programs]
        distinct = list(dict.fromkeys(hashes))
        # Compiling keeps one core busy: as many children as cores.
        count = max(1, min(os.cpu_count() or 1, len(distinct)))
        shares = [distinct[i::count] for i in range(count)]
        command = [sys.executable, "-m", __name__, folder, str(target)]
        run = functools.partial(
            subprocess.run, env=_environment(root), capture_output=True, text=True, check=False
        )
        with ThreadPoolExecutor(count) as pool:
            children = list(pool.map(run, [[*command, *share] for share in shares]))
    reports = {}
    for share, child in zip(shares, children, strict=True):
        _, *outputs = child.stdout.split(_MARK)
        if child.returncode:
            first = hashes.index(share[max(len(outputs), 1) - 1])
            name = _name(programs[first][0])
            raise CompileError(f"{name} for {target}: {_complaint(child.stderr)}")
        reports |= {key: _read(target, text) for key, text in zip(share, outputs, strict=True)}
    return [reports[key] for key in hashes]


def check_target(target: targets.Target) -> None:
    """Raises ValueError for a target that no Mosaic GPU kernel can be built for."""
    if target.count != 1:
        raise ValueError(f"a kernel is built for one GPU, and {target} has {target.count}")
    if target.gpu.compute_capability < (9, 0):
        raise ValueError(f"Mosaic GPU kernels need a GPU from h100 on, and the target is {target}")


def occupancy(gpu: Gpu, threads: int, registers: int, shared_memory_bytes: int) -> float:
    """The share of a core's threads that blocks of a kernel can fill.

    Args:
      gpu: from `gpus.GPUS`; the limits below are those of all of them (CUDA C++ Programming
        Guide, technical specifications by compute capability).
      threads: of a block.
      registers: of a thread.
      shared_memory_bytes: of a block.

    Returns:
      From 0 to 1; 0 if not one block fits.

    Example:
      >>> from pallas_kernels.gpus import GPUS
      >>> occupancy(GPUS["h200"], threads=384, registers=168, shared_memory_bytes=200 * 1024)
      0.1875
    """
    warps = -(-threads // 32)
    warp_registers = -(-registers * 32 // 256) * 256
    # Each of the four parts of a core has a quarter of the registers.
    by_registers = 4 * (65536 // 4 // warp_registers) // warps
    # The driver keeps 1 KiB of each block.
    by_memory = gpu.shared_memory_per_core // (-(-shared_memory_bytes // 128) * 128 + 1024)
    blocks = min(by_registers, by_memory, 64 // warps, 32)
    return blocks * warps / 64


def _name(function: Callable) -> str:
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    return getattr(function, "__name__", repr(function))


def _write(folder: Path, function: Callable, args: Sequence[Any]) -> str:
    """Lowers a program into files for the child, named by the hash of its kernel."""
    checks = [jax.export.DisabledSafetyCheck.custom_call(call) for call in _CALLS]
    jitted = jax.jit(function, keep_unused=True)
    try:
        with _newest_encoding():
            exported = jax.export.export(jitted, platforms=["cuda"], disabled_checks=checks)(*args)
    except Exception as error:
        error.add_note(f"while lowering {_name(function)}")
        raise
    hashes = set(re.findall(r'kernel_hash = ("(?:[^"\\]|\\.)*")', exported.mlir_module()))
    if len(hashes) != 1:
        raise ValueError(
            f"{_name(function)} holds {len(hashes) or 'no'} kernels; build takes a function with "
            "one plgpu.kernel"
        )
    key = hashlib.sha256(hashes.pop().encode()).hexdigest()
    (folder / f"{key}.mlir").write_bytes(exported.mlir_module_serialized)
    avals = {"inputs": exported.in_avals, "outputs": exported.out_avals}
    text = {name: [[x.shape, x.dtype.name] for x in value] for name, value in avals.items()}
    (folder / f"{key}.json").write_text(json.dumps(text))
    return key


@contextlib.contextmanager
def _newest_encoding() -> Generator[None]:
    """An export is for older releases too, and would lack newer instructions."""
    option = "jax_export_ignore_forward_compatibility"
    before = getattr(jax.config, option)
    jax.config.update(option, True)
    try:
        yield
    finally:
        jax.config.update(option, before)


def _environment(root: Path) -> dict[str, str]:
    settings = {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "PATH": f"{root / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
        "CUDA_ROOT": str(root),
        "MOSAIC_GPU_CUDA_ROOT": str(root),  # where it looks for nvdisasm
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # what it holds is not compiled
    }
    dumps = ["PTX", "PTXAS", "HOST_LLVM"]
    for folder in targets._folders("nvidia.cu13"):
        if Path(folder, "bin/nvdisasm").exists():
            settings["MOSAIC_GPU_CUDA_ROOT"] = folder
            dumps.append(
                "SASS"
            )  # leaves a temporary folder mosaic-gpu-* behind, as jaxlib says itself
    settings |= {f"MOSAIC_GPU_DUMP_{name}": "1" for name in dumps}
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MOSAIC_GPU_DUMP_")}
    return kept | settings


def _complaint(stderr: str) -> str:
    """The line that says why a compilation failed: ptxas' first error, or the last line."""
    if error := re.search(r"; error\s+: (.*)", stderr):
        return f"ptxas: {error[1]}"
    lines = [line for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else "the compiler ended without a message"


def _read(target: targets.Target, output: str) -> Build:
    """A report from what the child printed of one program: PTX, ptxas' words, SASS, LLVM."""
    ptx, _, rest = output.partition("ptxas info")
    machine, _, host = rest.partition("; ModuleID")

    def find(pattern: str, text: str, default: str | None = None) -> str:
        if match := re.search(pattern, text):
            return match[1]
        if default is not None:
            return default
        raise RuntimeError(f"no {pattern!r} in what this version of jaxlib dumps of a kernel")

    threads = math.prod(int(n) for n in find(r"\.maxntid ([\d, ]+)", ptx).split(","))
    registers = int(find(r"Used (\d+) registers", machine))
    # The launch: grid, cluster and block of three dimensions each, then the shared memory.
    shared = int(find(r"@mosaic_gpu_\w+\(ptr %\w+, (?:i32 \d+, ){9}i32 (\d+)", host))
    kinds = re.findall(r"wgmma\.mma_async\.sync\.aligned\.([\w.]+)", ptx)
    spills = [int(find(rf"(\d+) bytes spill {way}", machine)) for way in ("stores", "loads")]
    warned = re.findall(r"Potential Performance Loss: (.*)|ptxas warning\s*: (.*)", machine)
    sass = None
    if "/*0000*/" in machine:
        sass = {name: len(re.findall(code, machine)) for name, code in _SASS.items()}
    return Build(
        kernel=find(r"Compiling entry function '(\w+?)(?:_mosaic_gpu_kernel)?'", machine),
        target=str(target),
        threads=threads,
        registers=registers,
        spill_bytes=sum(spills),
        shared_memory_bytes=shared,
        barriers=int(find(r"used (\d+) barriers", machine, default="0")),
        occupancy=occupancy(target.gpu, threads, registers, shared),
        wgmma=len(kinds),
        tma=len(re.findall(r"cp\.(?:reduce\.)?async\.bulk\.tensor", ptx)),
        exp2=len(re.findall(r"ex2\.approx", ptx)),
        wgmma_kinds=tuple(sorted(set(kinds))),
        warnings=tuple(dict.fromkeys("".join(pair) for pair in warned)),
        sass=sass,
        ptx=ptx,
    )


def _compile(path: Path, target: targets.Target) -> None:
    """In the child: one program."""
    text = json.loads(path.with_suffix(".json").read_text())
    inputs, outputs = (
        [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in text[key]]
        for key in ("inputs", "outputs")
    )

    def stand_in(*_):  # of the program's signature
        return [jnp.zeros(x.shape, x.dtype) for x in outputs]

    export = jax.export.export(jax.jit(stand_in, keep_unused=True), platforms=["cuda"])
    module = path.with_suffix(".mlir").read_bytes()
    program = dataclasses.replace(export(*inputs), mlir_module_serialized=module)
    target.compile(jax.jit(program.call), *inputs)


if __name__ == "__main__":
    folder, gpu, *keys = sys.argv[1:]
    for key in keys:
        print(_MARK, flush=True)  # before what the compiler prints past Python's buffer
        _compile(Path(folder, key), targets.parse(gpu))
