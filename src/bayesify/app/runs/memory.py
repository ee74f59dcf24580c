"""Measure the memory of this process."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import psutil

__all__ = ["peak_memory", "used_memory"]


def used_memory() -> int:
    """Return the resident bytes of this process.

    Example:
        >>> 0 < used_memory() <= peak_memory() + 2**20
        True
    """
    return int(psutil.Process().memory_info().rss)


def peak_memory() -> int:
    """Return the largest number of resident bytes that this process ever had."""
    if sys.platform == "linux":  # where getrusage has the memory of the parent before exec
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        if found:
            return 1024 * int(found[1])
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
