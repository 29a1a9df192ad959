"""What a run reports about its machine: peak rate, peak memory, versions.

MFU is only as good as the peak it divides by, so a peak travels with the sentence that says
where it comes from: the data sheet where there is one, otherwise a matmul timed here.
"""

import importlib.metadata
import os
import platform
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import target

MFU_CONVENTION = (
    "MFU = model FLOP/s / (peak x devices); attention counted, causal halved; "
    "recomputation not counted; the 16-bit peak also under FP8"
)

_PACKAGES = ("jaxaccel", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


@dataclass(frozen=True)
class Peak:
    """The rate that MFU divides by, for one device."""

    flops: float  # FLOP/s
    source: str  # where it comes from, to be printed


def peak_flops(device: jax.Device, dtype: DTypeLike) -> Peak:
    """Returns the peak matmul rate of one device.

    A GPU of `target.GPUS` has its data-sheet rate. Any other device is measured, for about
    0.3 s: a CPU in float32 whatever `dtype` is (16-bit matmuls are emulated there), divided by
    the number of JAX's CPU devices, which share the cores.

    Args:
      device: a device of this process.
      dtype: what the model computes in: float32, bfloat16 or float16.

    Raises:
      ValueError: another dtype.

    Example:
      >>> peak_flops(jax.local_devices(backend="cpu")[0], jnp.dtype("float32")).flops > 1e8
      True
    """
    dtype = jnp.dtype(dtype)
    if dtype.name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"no peak for {dtype.name}: float32, bfloat16 or float16")
    if gpu := target.find(device.device_kind):
        flops = gpu.tf32_flops if dtype == jnp.float32 else gpu.bf16_flops
        rate = "tf32" if dtype == jnp.float32 else "16-bit"
        return Peak(flops, f"data sheet of the {device.device_kind}, dense {rate}")
    if device.platform == "cpu":
        sharers = jax.local_device_count("cpu")
        source = "measured 1024^3 float32 matmul on this CPU"
        source += f", shared by {sharers} devices" if sharers > 1 else ""
        return Peak(_timed_matmul(device, 1024, jnp.dtype("float32")) / sharers, source)
    return Peak(
        _timed_matmul(device, 4096, dtype),
        f"measured 4096^3 {dtype.name} matmul; no data sheet is known for {device.device_kind}",
    )


def _timed_matmul(device: jax.Device, size: int, dtype: jnp.dtype) -> float:
    """FLOP/s of the fastest square matmul within 0.3 s, the compilation apart."""
    x = jax.device_put(jnp.ones((size, size), dtype), device)
    matmul: Callable[[jax.Array], jax.Array] = jax.jit(lambda x: x @ x)
    matmul(x).block_until_ready()
    best = float("inf")
    end = time.perf_counter() + 0.3
    while (start := time.perf_counter()) < end:
        matmul(x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def peak_memory_gib(device: jax.Device) -> float | None:
    """Returns the most memory held so far, in GiB (2**30 bytes).

    Args:
      device: a device of this process. On a CPU the figure is the peak resident set of the
        whole process, elsewhere the peak that the device's allocator has handed out.

    Returns:
      GiB, or None where the allocator keeps no statistics.
    """
    if device.platform == "cpu":
        if (status := Path("/proc/self/status")).exists():
            # Not ru_maxrss, which on Linux also counts what the parent held when it started us.
            return int(status.read_text().split("VmHWM:")[1].split()[0]) / 2**20  # KiB
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 2**30 if sys.platform == "darwin" else peak / 2**20  # bytes, or KiB
    stats = device.memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    return None if peak is None else peak / 2**30


def environment() -> dict[str, Any]:
    """Returns what is needed to tell why two runs differ, as plain JSON values.

    No host name and no environment variable but XLA_FLAGS: a run folder gets shared.
    """
    devices = jax.devices()
    commit, dirty = _git_state(Path(__file__))
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": versions(),
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "device_count": len(devices),
        "process_index": jax.process_index(),
        "process_count": jax.process_count(),
        "git_commit": commit,
        "git_dirty": dirty,
        "command": shlex.join(sys.orig_argv),
        "xla_flags": os.environ.get("XLA_FLAGS"),
    }


def versions() -> dict[str, str | None]:
    """Of the packages that a run's numbers may depend on."""
    return {name: _version(name) for name in _PACKAGES}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None  # ours, run from a checkout without being installed


def _git_state(file: Path) -> tuple[str | None, bool | None]:
    """Commit of the repository that tracks `file`, and whether tracked files differ from it."""

    def git(*arguments: str) -> str | None:
        # --no-optional-locks: `status` would otherwise write the index, under a user's commit.
        command = ["git", "--no-optional-locks", "-C", str(file.parent), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:  # no git here
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # An environment inside somebody's repository is no checkout of ours: ask for the file.
    if git("ls-files", "--error-unmatch", file.name) is None:
        return None, None
    status = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "HEAD"), None if status is None else bool(status)
