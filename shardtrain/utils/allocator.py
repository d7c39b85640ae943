"""What the C library does with memory that a process has freed."""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
"""Numbers of glibc's malloc.h."""
LARGEST_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Let the process keep blocks of up to 1 GiB that it frees, for the next ones; say whether that is so now.

    glibc gives large blocks back to the system, and the pages of the next are then cleared one by one when they are
    first written: 2.4 of 4.2 ms for a product of 12 MiB tensors. Nothing is changed where the environment says what
    malloc should do, and without glibc.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1))
