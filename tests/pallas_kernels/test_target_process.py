"""Whole processes: which CUDA is used, what is printed, which platform is chosen."""

import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from pallas_kernels import target

pytestmark = pytest.mark.target

ROOT = Path(__file__).parents[2]

# sin and pow call libdevice; the sum of a matmul is a Triton kernel: ptxas must run.
COMPILE = """
import jax, jax.numpy as jnp
x = jax.ShapeDtypeStruct((64, 96), jnp.float32)
program = target.parse("h200").compile(jax.jit(lambda x: jnp.sin(x) ** 1.5 @ x.T), x)
assert "HloModule" in program.as_text()
"""
PLATFORM = """
import jax
jax.numpy.ones(3).block_until_ready()
print(jax.devices()[0].platform)
"""
IMPORT = """
import os, sys
import jax
before = dict(os.environ), dict(jax.config.values)
from jaxaccel import target
assert before == (dict(os.environ), dict(jax.config.values)), "an import sets nothing"
assert not any(name.startswith("jax_plugins.") for name in sys.modules), "and looks at nothing"
"""


def python(*sections, prefix=(), **environment):
    """Runs a program without any CUDA or JAX setting of this process."""
    keep = {"HOME": os.environ.get("HOME", "/"), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    command = [*prefix, sys.executable, "-c", "\n".join(sections)]
    return subprocess.run(
        command, env=keep | environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture
def broken_cuda(tmp_path):
    """A CUDA installation whose every tool leaves a trace and fails."""
    tool = tmp_path / "bin" / "ptxas"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\ntouch {tmp_path}/used\nexit 1\n")
    tool.chmod(0o755)
    shutil.copy(tool, tool.with_name("nvlink"))
    return tmp_path


def hidden_system_cuda():
    """A command prefix under which no CUDA of the machine can be seen."""
    unshare = ["unshare", "--mount", "--map-root-user"]
    try:
        subprocess.run([*unshare, "true"], check=True, capture_output=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("unshare may not make a mount namespace here, so nothing can be hidden")
    places = [*Path("/usr/local").glob("cuda*"), *Path("/opt").glob("cuda*")]
    hide = [f"mount -t tmpfs none {place.resolve()} && test ! -e {place}/bin" for place in places]
    return [*unshare, "sh", "-c", " && ".join([*hide, 'exec "$@"']), "sh"]


def test_compiles_with_the_systems_cuda_hidden(broken_cuda):
    """Nor is a CUDA used that the environment points at; nothing is printed on the way."""
    hidden = hidden_system_cuda()
    done = python(
        IMPORT,
        COMPILE,
        PLATFORM,
        prefix=hidden,
        PATH=f"{broken_cuda}/bin:/usr/bin:/bin",
        CUDA_ROOT=str(broken_cuda),
        CUDA_HOME=str(broken_cuda),
        CUDA_DIR=str(broken_cuda),
    )
    assert done.returncode == 0, done.stderr
    assert not (broken_cuda / "used").exists()
    if not target._nvidia_device():
        assert (done.stdout, done.stderr) == ("cpu\n", "")


@pytest.mark.skipif(target._nvidia_device(), reason="the complaint is of machines without a GPU")
def test_quiet_cpu_silences_the_plugin_and_leaves_the_platform():
    plain = python(PLATFORM, "from jaxaccel import target", COMPILE)
    assert "cuDNN" in plain.stderr, "JAX does not complain any more: quiet_cpu can go"
    assert plain.returncode == 0, "a plugin that was turned away still compiles\n" + plain.stderr
    quiet = python("from jaxaccel import target", "target.quiet_cpu()", PLATFORM)
    assert (quiet.returncode, quiet.stderr) == (0, "")
    assert quiet.stdout == plain.stdout == "cpu\n"


@pytest.mark.parametrize(
    ("device", "platforms", "expected"),
    [(False, None, "1"), (False, "", "1"), (True, None, None), (False, "cuda", None)],
)
def test_quiet_cpu_only_acts_where_no_gpu_could_be_meant(monkeypatch, device, platforms, expected):
    monkeypatch.delenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", raising=False)
    monkeypatch.setattr(target.os.path, "exists", lambda path: device and "nvidia" in path)
    config = types.SimpleNamespace(jax_platforms=platforms)
    monkeypatch.setattr(target, "jax", types.SimpleNamespace(config=config))
    target.quiet_cpu()
    assert os.environ.pop("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", None) == expected
