"""Keeps a CPU step's memory between steps, where the C library would return it each time.

XLA's CPU back end allocates a step's temporaries as one block and frees it after the step.
glibc maps a block of that size anew for each allocation, and the kernel then clears and
maps every page again at its first touch: measured, 8 to 14 % of a training step. Here
large blocks come from the heap, and the heap never shrinks: the process keeps its peak.
"""

import ctypes
import sys

# From glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> bool:
    """Makes this process keep and reuse the memory that it frees.

    Call it before JAX meets a device: a thread that already has an arena of its own keeps
    it, and such an arena cannot hold large blocks.

    Returns:
      Whether it took effect; False, with nothing changed, where the C library is not glibc.
    """
    if sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # -1 is no limit: never give back the top of the heap.
    settings = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1, M_ARENA_MAX: 1}
    return all(mallopt(option, value) for option, value in settings.items())
