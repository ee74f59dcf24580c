"""Estimate the memory that a table needs, and compare it with what is free."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["available_memory"]


def available_memory() -> int | None:
    """Return the bytes of memory that are free for use; None if the system does not tell."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        if found:
            return 1024 * int(found[1])
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None
