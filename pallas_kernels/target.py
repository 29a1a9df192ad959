"""Compile for a GPU on a machine that has none.

XLA's CUDA plugin compiles for a described device as well as for a present one. All it needs
are the four packages of the extra `target`: the plugin, ptxas and libdevice. So the program
that a GPU would run, its memory and its schedule, are known before there is a GPU:

    target = parse("h200x8")
    mesh = target.mesh({"fsdp": 8})
    x = jax.ShapeDtypeStruct((64, 4096), "bfloat16", sharding=NamedSharding(mesh, P("fsdp")))
    print(target.compile(jax.jit(step), x).memory_analysis())

Importing this module sets nothing and looks at no device. JAX loads its plugins at its first
computation; `quiet_cpu` is for a program to call before that.
"""

import contextlib
import difflib
import functools
import importlib
import importlib.util
import math
import os
import platform
import sys
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

from pallas_kernels.gpus import GPUS, Gpu, describe, find

__all__ = ["GPUS", "Gpu", "MissingExtra", "Target", "describe", "find", "parse", "quiet_cpu"]

MAX_GPUS_PER_NODE = 8  # of the SXM boards described here


class MissingExtra(ImportError):
    """XLA's compiler for GPUs is not installed; the message says how to get it."""


@dataclass(frozen=True)
class Target:
    """GPUs to compile for: `nodes` of them joined by a network, each with NVLink inside."""

    gpu: Gpu
    nodes: int = 1
    gpus_per_node: int = 1

    @property
    def count(self) -> int:
        """How many GPUs in all."""
        return self.nodes * self.gpus_per_node

    def __str__(self) -> str:
        if self.nodes > 1:
            return f"{self.gpu.name}x{self.nodes}x{self.gpus_per_node}"
        return f"{self.gpu.name}x{self.count}" if self.count > 1 else self.gpu.name

    def devices(self) -> tuple[jax.Device, ...]:
        """The GPUs as devices that can be compiled for and hold no array.

        Returns:
          `count` devices, node by node; the same ones at each call.

        Raises:
          MissingExtra: the extra `target` is not installed.
        """
        _cuda_root()
        return _devices(self)

    def mesh(self, sizes: Mapping[str, int]) -> Mesh:
        """A mesh over all GPUs of the target, for `jax.NamedSharding`.

        Args:
          sizes: by axis, outermost first; later axes stay inside a node where they fit.

        Returns:
          A mesh with axes of type `AxisType.Auto`.

        Raises:
          ValueError: the sizes do not multiply to `count`.
          MissingExtra: the extra `target` is not installed.
        """
        if math.prod(sizes.values()) != self.count:
            text = ",".join(f"{axis}={size}" for axis, size in sizes.items())
            raise ValueError(
                f"mesh {text!r} has {math.prod(sizes.values())} places, but target {self} "
                f"has {self.count} GPUs"
            )
        types = (AxisType.Auto,) * len(sizes)
        return jax.make_mesh(tuple(sizes.values()), tuple(sizes), types, devices=self.devices())

    def compile(self, step: jax.stages.Wrapped, *abstract_args: Any) -> jax.stages.Compiled:
        """Compiles what a GPU would run; nothing is allocated or executed.

        Args:
          step: from `jax.jit`.
          abstract_args: trees of `jax.ShapeDtypeStruct`, whose shardings are on a mesh of this
            target. A target of one GPU needs none.

        Returns:
          The compiled program: `as_text()`, `memory_analysis()`, `cost_analysis()`.

        Raises:
          ValueError: the program was placed on other devices than the target's.
          MissingExtra: the extra `target` is not installed.

        Example:
          >>> x = jax.ShapeDtypeStruct((8, 128), "bfloat16")
          >>> parse("h200").compile(jax.jit(lambda x: x @ x.T), x)  # doctest: +SKIP
        """
        options = {"xla_gpu_cuda_data_dir": str(_cuda_root())}
        devices = self.devices()
        if self.count == 1:
            here = SingleDeviceSharding(devices[0])
            abstract_args = jax.tree.map(lambda x: _place(x, here), abstract_args)
        lowered = step.trace(*abstract_args).lower(lowering_platforms=("cuda",))
        with _kept_out_of_cache():
            compiled = lowered.compile(compiler_options=options)
        used = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
        if strangers := set().union(*(sharding.device_set for sharding in used)) - set(devices):
            raise ValueError(
                f"compiled for {next(iter(strangers))} and not for {self}: give the arguments "
                "shardings on a mesh from the target's own mesh()"
            )
        return compiled


def parse(text: str) -> Target:
    """Reads a target as users write it.

    Args:
      text: a GPU of `GPUS`, then optionally GPUs, or nodes and GPUs of each.

    Returns:
      The target.

    Raises:
      ValueError: an unknown GPU, or numbers that no node has.

    Example:
      >>> parse("h100x2x8").count, str(parse("h200x1x4")), parse("b200").gpu.cores
      (16, 'h200x4', 148)
    """
    name, *numbers = text.strip().lower().split("x")
    forms = "write a GPU, GPUxCOUNT or GPUxNODESxGPUS: h200, h200x8, h100x2x8"
    if name not in GPUS:
        near = difflib.get_close_matches(name, GPUS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(
            f"unknown target {text!r}: {hint}known GPUs are {', '.join(GPUS)}; {forms}"
        )
    if len(numbers) > 2 or not all(n.isdecimal() and int(n) > 0 for n in numbers):
        raise ValueError(f"cannot read the numbers of target {text!r}; {forms}")
    nodes, gpus = (1, 1, *map(int, numbers))[-2:]
    if gpus > MAX_GPUS_PER_NODE:
        raise ValueError(
            f"target {text!r} has {gpus} GPUs in a node, where at most {MAX_GPUS_PER_NODE} fit; "
            f"write nodes x GPUs: {name}x{-(-gpus // MAX_GPUS_PER_NODE)}x{MAX_GPUS_PER_NODE}"
        )
    return Target(GPUS[name], nodes, gpus)


def quiet_cpu() -> None:
    """Keeps JAX from complaining about CUDA where there is no GPU; for programs, at their start.

    With the extra `target` installed, JAX finds a CUDA plugin, asks it for cuDNN, logs the
    traceback and runs on the CPU. Where there is no NVIDIA device, this tells the plugin not to
    ask (the environment variable JAX_SKIP_CUDA_CONSTRAINTS_CHECK, which child processes
    inherit). The platform stays JAX's choice: the CPU, since JAX opens no CUDA client without
    a device. Where there is one, or JAX_PLATFORMS names a platform, nothing is done.
    """
    if not jax.config.jax_platforms and not _nvidia_device():
        os.environ.setdefault(_SKIP_CHECK, "1")


# The plugin's version check; a compiler alone needs none of the libraries it asks for.
_SKIP_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
_PLUGIN = "jax_plugins.xla_cuda13"


def _nvidia_device() -> bool:
    """Whether there is a GPU that JAX would open; the last is that of Windows' Linux."""
    return any(map(os.path.exists, ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")))


def _place(x: Any, sharding: jax.sharding.Sharding) -> Any:
    free = isinstance(x, jax.ShapeDtypeStruct) and x.sharding is None
    return x.update(sharding=sharding) if free else x


def _cuda_root() -> Path:
    """The folder of the installed ptxas, nvlink and libdevice.

    It is handed to each compilation, since XLA would otherwise follow CUDA_ROOT, or take what
    it finds in /usr/local/cuda where a package is missing.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise MissingExtra(
            f"compiling for a GPU needs linux on x86_64, where XLA's CUDA plugin exists; this "
            f"is {sys.platform} on {platform.machine()}"
        )
    missing = {
        "jax-cuda13-pjrt": not _folders(_PLUGIN),
        "jax-cuda13-plugin": not _folders("jax_cuda13_plugin"),
    }
    roots = [Path(folder) for folder in _folders("nvidia.cu13")]
    ptxas = [root for root in roots if (root / "bin/ptxas").exists()]
    nvvm = [root for root in roots if (root / "nvvm/libdevice/libdevice.10.bc").exists()]
    missing |= {"nvidia-cuda-nvcc": not ptxas, "nvidia-nvvm": not nvvm}
    if names := [name for name, lacks in missing.items() if lacks]:
        raise MissingExtra(
            f"compiling for a GPU needs {', '.join(names)}: pip install -e '.[target]', or "
            "uv run --extra target"
        )
    return ptxas[0]


def _folders(package: str) -> list[str]:
    """Where a package lies, without importing it; empty if it is not installed."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # of its parent
        return []
    return list(spec.submodule_search_locations or ()) if spec else []


@functools.cache
def _devices(target: Target) -> tuple[jax.Device, ...]:
    # XLA counts partitions x hosts x devices; a partition is what NVLink joins.
    topology = functools.partial(
        topologies.get_topology_desc,
        platform="cuda",
        target_config=describe(target.gpu),
        topology=f"{target.nodes}x1x{target.gpus_per_node}",
    )
    # This may be what makes JAX load its plugins.
    with contextlib.nullcontext() if _nvidia_device() else _check_skipped():
        try:
            return tuple(topology().devices)
        except NotImplementedError:
            pass
    # JAX loaded its plugins before, and the check turned this one away. It must not become a
    # platform that JAX might choose, so JAX chooses first.
    jax.devices()
    with _check_skipped():
        importlib.import_module(_PLUGIN).initialize()
        return tuple(topology().devices)


@contextlib.contextmanager
def _check_skipped() -> Generator[None]:
    before = os.environ.get(_SKIP_CHECK)
    os.environ[_SKIP_CHECK] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SKIP_CHECK]
        else:
            os.environ[_SKIP_CHECK] = before


@contextlib.contextmanager
def _kept_out_of_cache() -> Generator[None]:
    """JAX's persistent cache would keep the program, then fail to load it for want of a GPU."""
    option = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, option)
    jax.config.update(option, math.inf)
    try:
        yield
    finally:
        jax.config.update(option, before)
