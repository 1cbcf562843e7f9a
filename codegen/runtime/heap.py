"""Freed memory kept for the next step, where tensors come from glibc's heap.

glibc gives memory back as it is freed: blocks of 128 KiB and more at once, the top of the heap above a threshold that
follows their size. A training step frees its activations and asks for as many again, and the kernel then clears every
page anew: an elementwise product of two tensors of 1 MiB took 107 us on kept memory and 860 us on fresh memory (one
core of an EPYC, virtualized). GPUs have torch's caching allocator for that.
"""

from __future__ import annotations

import ctypes
import os
import sys

TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""Parameters of mallopt (malloc.h): free bytes at the top of the heap above which they are returned, and how many
blocks may be mapped on their own. -1 trims nothing."""
CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Variables by which a person has already said how the heap behaves."""


def keep_freed_memory() -> bool:
    """From now on this process keeps what it frees; True if so.

    False, and nothing is changed, without glibc or where one of CHOSEN is set.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in CHOSEN):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(MMAP_MAX, 0)) and bool(mallopt(TRIM_THRESHOLD, -1))
