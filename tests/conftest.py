"""Eight CPU devices, strict numerics, warnings are errors."""

import gc
import os
import pathlib
import platform
import sys
import tempfile

# Programs under test keep compiled code under the user's cache folder: not this user's.
_cache = tempfile.TemporaryDirectory(prefix="jaxaccel-tests-")
os.environ["XDG_CACHE_HOME"] = _cache.name
# They start by the dozen, and without byte code each would parse all of JAX again: where it may
# not lie beside the source, it lies here.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    os.environ["PYTHONPYCACHEPREFIX"] = _cache.name + "/byte-code"
# `pytest -m gpu`, where there is a GPU, is the kernels' third lane.
_RUN_LANE = "gpu" in sys.argv and os.path.exists("/dev/nvidiactl")
os.environ["JAX_PLATFORMS"] = "cuda,cpu" if _RUN_LANE else "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True, scope="module")
def _few_programs():
    """Drops compiled programs between files, before a process has as many as it may have.

    Each is about 15 memory mappings, and Linux allows a process 65,530: past them XLA aborts.
    """
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > 20_000:
        jax.clear_caches()
        gc.collect()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """On linux x86_64 a missing extra is a failure: the development group has it."""
    # What runs here is small: compiling it well takes longer than running it. What is compiled for
    # a GPU is looked at, and must be as users have it.
    on_gpu = item.get_closest_marker("target") or item.get_closest_marker("gpu")
    jax.config.update("jax_disable_most_optimizations", on_gpu is None)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(on_gpu is None))  # of programs it starts
    if item.get_closest_marker("gpu") and not _RUN_LANE:
        pytest.skip("needs a GPU, and to be asked for by `pytest -m gpu`")
    here = (sys.platform, platform.machine())
    if item.get_closest_marker("target") and here != ("linux", "x86_64"):
        pytest.skip("XLA's CUDA plugin exists for linux on x86_64 only")
