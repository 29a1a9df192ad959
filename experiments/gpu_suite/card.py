"""What `nvidia-smi` says of the card: asked, never told. Without the program, it says so."""

import contextlib
import importlib.util
import os
import shutil
import signal
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

FIELDS = (
    "name", "driver_version", "vbios_version", "memory.total", "memory.used", "clocks.sm",
    "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit", "power.default_limit",
    "power.draw", "temperature.gpu", "compute_mode", "persistence_mode", "mig.mode.current",
    "ecc.mode.current", "pcie.link.gen.current", "pcie.link.width.current",
)  # fmt: skip
PREFIX = Path("/usr/local")  # of CUDA
WATCHED = ("clocks.sm", "power.draw", "temperature.gpu", "utilization.gpu", "memory.used")


def ask(fields: tuple[str, ...] = FIELDS, program: str = "nvidia-smi") -> dict[str, str]:
    """Values of the first GPU, as the program prints them; those that it does not know are absent.

    Returns:
      By field; empty where the program is missing or silent.
    """
    if not shutil.which(program):
        return {}

    def query(names: tuple[str, ...]) -> list[str]:
        command = [program, f"--query-gpu={','.join(names)}", "--format=csv,noheader", "--id=0"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, timeout=10)
            if done.returncode == 0 and done.stdout.strip():
                values = [value.strip() for value in done.stdout.splitlines()[0].split(",")]
                if len(values) == len(names):
                    return values
        return []

    if values := query(fields):
        return dict(zip(fields, values))
    if not query(("name",)):
        return {}
    # An older or newer program refuses the whole question for one field.
    return {name: value[0] for name in fields if (value := query((name,)))}


def cuda_root() -> str | None:
    """A folder with ptxas and libdevice, for JAX where its own wheels of them are missing.

    Without them, but with others of NVIDIA's wheels, jax 0.11 and 0.12 look in a folder called
    None, and no Mosaic kernel compiles.

    Returns:
      The folder; "" where JAX finds one itself; None where there is none.
    """
    whole = lambda root: (
        (root / "bin/ptxas").exists() and (root / "nvvm/libdevice/libdevice.10.bc").exists()
    )
    wheels: list[Path] = []
    for package in ("nvidia.cu13", "nvidia.cuda_nvcc"):
        with contextlib.suppress(ModuleNotFoundError):
            spec = importlib.util.find_spec(package)
            wheels += map(Path, (spec.submodule_search_locations or ()) if spec else ())
    if os.environ.get("CUDA_ROOT") or any(map(whole, wheels)):
        return ""
    roots = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    tools = filter(None, (shutil.which("ptxas"), shutil.which("nvcc")))
    roots += [Path(tool).resolve().parents[1] for tool in tools]
    roots += [PREFIX / "cuda", *sorted(PREFIX.glob("cuda-*"), reverse=True)]
    return next((str(root) for root in roots if whole(root)), None)


class Watch:
    """`nvidia-smi` once a second beside the stages; none where there is no such program."""

    def __init__(self, folder: Path):
        self.file, self.process = folder / "card.csv", None
        if shutil.which("nvidia-smi"):
            names = ",".join(WATCHED)
            command = ["nvidia-smi", f"--query-gpu={names}", "--id=0", "-l", "1"]
            with open(self.file, "wb") as out, contextlib.suppress(OSError):
                self.process = subprocess.Popen(
                    [*command, "--format=csv,noheader,nounits"],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
        self.seen = 0

    def since(self) -> dict[str, Any]:
        """Clock, power, temperature since the last call, of the seconds in which the GPU worked."""
        text = self.file.read_text(errors="replace") if self.file.exists() else ""
        lines, rows = text.splitlines(), []
        for line in lines[self.seen :]:
            with contextlib.suppress(ValueError):
                values = [float(value) for value in line.split(",")]
                rows += [values] if len(values) == len(WATCHED) and values[3] >= 50 else []
        self.seen = len(lines)
        if not rows:
            return {}
        clock, power, heat, _, used = zip(*rows)
        return {
            "busy_seconds": len(rows),
            "sm_clock_mhz": [min(clock), statistics.median(clock), max(clock)],
            "power_w": [min(power), statistics.median(power), max(power)],
            "temperature_c": max(heat),
            "memory_used_mib": max(used),
        }

    def stop(self) -> None:
        """Ends the program."""
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(timeout=5)


def wait_until_free(at_first: dict[str, str], seconds: float = 5.0) -> None:
    """Waits until the memory of a process that was killed is free again, or the time is over.

    Args:
      at_first: what `ask` said before anything ran.
      seconds: at most.
    """
    end, before = time.monotonic() + seconds, _mib(at_first)
    while time.monotonic() < end and before is not None:
        used = _mib(ask(("memory.used",)))
        if used is None or used < before + 1000:
            return
        time.sleep(0.3)


def _mib(values: dict[str, str]) -> int | None:
    number = values.get("memory.used", "").split(" ")[0]
    return int(number) if number.isdigit() else None
