"""A large block freed and allocated again is not mapped anew, in threads too."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource, threading
from experiments.allocator import keep_freed_memory

assert keep_freed_memory()
lib = ctypes.CDLL(None)
lib.malloc.restype, lib.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
lib.free.argtypes = [ctypes.c_void_p]
lib.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
size, pages = 128 << 20, (128 << 20) // resource.getpagesize()
counts = []


def touch():
    for _ in range(3):
        before = faults()
        block = lib.malloc(size)
        lib.memset(block, 1, size)
        lib.free(block)
        counts.append((faults() - before) / pages)


touch()
thread = threading.Thread(target=touch)
thread.start()
thread.join()
assert counts[0] > 0.9, counts  # or this test measures nothing
assert max(counts[1:]) < 0.1, counts
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_reused():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
