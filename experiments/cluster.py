"""One run on many processes: how they find one another, agree, and end together.

    python -m experiments.train --coordinator HOST:PORT --processes 2 --process 0
    python -m experiments.train --coordinator HOST:PORT --processes 2 --process 1

Under Slurm, Open MPI and Kubernetes (an Indexed Job) JAX finds out by itself. A single process
needs nothing, and then nothing here opens a port or starts a thread.

At the start all processes compare their options, package versions and source code, and none goes
on where they differ. From then on whatever ends one of them ends all (`experiments.link`), with
one line that says which and why, on stderr and in `stopped-PROCESS.txt` of the run folder.
"""

import contextlib
import ctypes
import dataclasses
import hashlib
import importlib.util
import json
import logging
import os
import platform
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from experiments import metrics
from experiments.config import TrainConfig
from experiments.errors import UserError
from experiments.group import Group
from experiments.link import Hub, Link, LinkError, reach

# JAX's own, in seconds: above the link's, which says more than an abort. JAX also aborts a
# process whose coordinator, process 0, is gone; usually the link is sooner.
_JAX_HEARTBEAT, _JAX_SHUTDOWN = 100, 60
_OWN = ("process", "coordinator", "data.tokenizer")  # options that processes need not share


@contextlib.contextmanager
def join(
    config: TrainConfig, prog: str, explain: Callable[[BaseException], tuple[str, int] | None]
) -> Generator[Group]:
    """The group of processes that this one was started in; they end together.

    Args:
      config: a run's options.
      prog: what the line on stderr begins with.
      explain: line and exit status of an exception that needs no traceback.

    Raises:
      UserError: the options do not make sense together, or the others are not to be found.
    """
    if not many(config):
        yield Group(prog)
        return
    group = _connect(config, prog)
    try:
        group.hello(facts(config))
        yield group
        group.exchange("end", None)
        jax.distributed.shutdown()
        group.close()
    except BaseException as error:
        group.abandon(error, explain)


def facts(config: TrainConfig) -> dict[str, Any]:
    """What must be the same on all processes of a run: options, versions, source code."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, node: dict[str, Any]) -> None:
        for key, value in node.items():
            if isinstance(value, dict):
                walk(f"{prefix}{key}.", value)
            elif prefix + key not in _OWN:
                flat[prefix + key] = list(value) if isinstance(value, tuple) else value

    walk("", dataclasses.asdict(config))
    flat |= {f"version of {name}": version for name, version in metrics.versions().items()}
    flat["version of python"] = platform.python_version()
    flat["source code"] = source_digest(Path(__file__).parents[1])
    flags = os.environ.get("XLA_FLAGS", "").split()
    flat["XLA_FLAGS"] = " ".join(flag for flag in flags if not flag.startswith("--xla_dump"))
    return flat


def source_digest(root: Path) -> str:
    """Of every Python file of the three packages."""
    digest = hashlib.sha256()
    for package in ("experiments", "jaxaccel", "pallas_kernels"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def many(config: TrainConfig, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this is one of several processes: by its options, else by what started it.

    Raises:
      UserError: some of the three options are missing, or out of range.
    """
    if config.processes == 1 and not config.coordinator:
        return False
    given = (config.coordinator, config.processes, config.process)
    if any(value not in ("", None) for value in given):
        _check_given(*given)
        return config.processes != 1
    if all(f"SLURM_{key}" in environ for key in ("JOB_ID", "STEP_NODELIST", "PROCID", "LOCALID")):
        return int(environ.get("SLURM_NTASKS", "1")) > 1
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return int(environ["OMPI_COMM_WORLD_SIZE"]) > 1
    if not ("KUBERNETES_SERVICE_HOST" in environ and "JOB_COMPLETION_INDEX" in environ):
        return False
    if importlib.util.find_spec("kubernetes") is None:
        raise UserError(
            "this is a pod of a Kubernetes Indexed Job, and JAX finds the others by the package "
            "kubernetes, which is not installed: pip install 'jax[k8s]', or give --coordinator "
            "HOST:PORT --processes N --process $JOB_COMPLETION_INDEX, or --processes 1 to train "
            "alone"
        )
    return True


def _check_given(coordinator: str, processes: int | None, process: int | None) -> None:
    host, colon, port = coordinator.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
        raise UserError(
            f"--coordinator is {coordinator!r}; write HOST:PORT of process 0, with any free port, "
            "and give --processes and --process too"
        )
    if processes is None or processes < 1:
        raise UserError(f"--processes is {processes}; with --coordinator it must be 1 or more")
    if process is None or not 0 <= process < processes:
        raise UserError(
            f"--process is {process}; it must be one of 0 to {processes - 1}, another one for each "
            f"of the {processes} processes"
        )


def _connect(config: TrainConfig, prog: str) -> Group:
    """Starts JAX's distributed runtime and the link."""
    given: dict[str, Any] = {}
    if config.coordinator:
        given = {
            "coordinator_address": config.coordinator,
            "num_processes": config.processes,
            "process_id": config.process,
            "cluster_detection_method": "deactivate",
        }
    elif devices := one_task_devices(os.environ):
        given = {"local_device_ids": devices}
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    if not config.join_timeout > 0:
        raise UserError(f"--join-timeout is {config.join_timeout}; it must be above 0 minutes")
    seconds = 60 * config.join_timeout
    found = _Address(config.coordinator)
    # JAX aborts the process when its own time is up, with a page of C++: here it never is.
    with _deadline(seconds, prog, found), found:
        try:
            jax.distributed.initialize(
                **given,
                initialization_timeout=int(2 * seconds) + 60,
                heartbeat_timeout_seconds=_JAX_HEARTBEAT,
                shutdown_timeout_seconds=_JAX_SHUTDOWN,
            )
        except Exception as error:  # whatever JAX's detection of clusters raises
            reason = " ".join(str(error).split())
            raise UserError(
                f"cannot join the other processes{found.text}: {reason}; give --coordinator "
                "HOST:PORT --processes N --process I, or --processes 1 to train alone"
            ) from error
        index, count = jax.process_index(), jax.process_count()
        hub = Hub(count) if index == 0 else None
        where = [[host, hub.port] for host in own_addresses(found.host)] if hub else []
        told = _broadcast({"where": where, "token": hub.token if hub else ""})
        try:
            if hub:
                peers = hub.accept(seconds)
            else:
                peers = {0: reach([(h, p) for h, p in told["where"]], told["token"], index)}
        except LinkError as error:
            raise UserError(
                f"processes cannot reach process 0: {error}; check that firewalls let them "
                "connect to any port of it"
            ) from error
    if index:  # one of them is enough to be heard
        sys.stdout.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        _survive_abort()
    group = Group(prog)
    group.connect(Link(index, count, peers, group.ended))
    return group


def one_task_devices(environ: Mapping[str, str]) -> list[int] | None:
    """GPUs for a Slurm task that has its node for itself; None leaves the choice to JAX.

    JAX gives each task of a node one GPU, also where there is one task and eight GPUs.
    """
    alone = re.fullmatch(r"1(\(x\d+\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if not alone or environ.get("JAX_LOCAL_DEVICE_IDS"):
        return None
    return list(range(int(environ.get("SLURM_GPUS_ON_NODE", "0")))) or None


def _survive_abort() -> None:
    """Gives the link time for its line where JAX aborts because process 0 is gone.

    JAX's client ends its process within milliseconds, by `abort`, from a thread of its own. The
    handler is C's `sleep`, which gets the signal's number for its seconds: that thread sleeps
    for 6 s, then `abort` does its work, should the process still be there.
    """
    libc = ctypes.CDLL(None)
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


class _Address(logging.Handler):
    """Learns from JAX's log at what address it looks for process 0, where it found that itself."""

    def __init__(self, known: str):
        super().__init__(logging.INFO)
        self._known = known
        self._logger = logging.getLogger("jax._src.distributed")

    def __enter__(self):
        self._before = self._logger.level, self._logger.propagate
        self._logger.setLevel(logging.INFO)
        self._logger.propagate = False
        self._logger.addHandler(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self._logger.removeHandler(self)
        level, self._logger.propagate = self._before
        self._logger.setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the address of a record that has one."""
        text, _, address = record.getMessage().rpartition(" ")
        if text.startswith("Connecting to JAX distributed service"):
            self._known = address

    @property
    def host(self) -> str:
        """Of process 0, empty where it is not known."""
        return self._known.rpartition(":")[0].strip("[]")

    @property
    def text(self) -> str:
        """`` at HOST:PORT``, or nothing."""
        return f" at {self._known}" if self._known else ""

    def state(self) -> str:
        """What a connection to it meets just now."""
        if not self.host:
            return "its address is not known"
        try:
            with socket.create_connection((self.host, int(self._known.rpartition(":")[2])), 5):
                return "it answers, but not all processes have come to it"
        except OSError as error:
            return str(error.strerror or error).lower()


@contextlib.contextmanager
def _deadline(seconds: float, prog: str, found: _Address) -> Generator[None]:
    """Ends the process with one line, should what is within take longer."""

    def over() -> None:
        line = (
            f"{prog}: no meeting of all processes{found.text} within {seconds:g} s: "
            f"{found.state()}; check that process 0 runs there, that its port is free and open "
            "to the others, and that every process was started with one --process each "
            "(--join-timeout waits longer)\n"
        )
        os.write(2, line.encode())
        os._exit(2)

    timer = threading.Timer(seconds, over)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def own_addresses(coordinator: str) -> list[str]:
    """Names and numbers of this machine that others may reach it by, likeliest first."""
    names = [coordinator] if coordinator else []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        out.connect(("192.0.2.1", 9))  # nothing is sent: this asks for the default route
        names.append(out.getsockname()[0])
    names += [socket.getfqdn(), socket.gethostname()]
    return [*dict.fromkeys(names)]


def _broadcast(value: Any, size: int = 2048) -> Any:
    """Process 0's value, JSON, on every process."""
    text = json.dumps(value).encode().ljust(size)
    if len(text) > size:
        raise ValueError(f"{len(text)} bytes to broadcast, at most {size}")
    sent = multihost_utils.broadcast_one_to_all(np.frombuffer(text, np.uint8))
    return json.loads(np.asarray(sent).tobytes())
