"""Notice what else a machine does while something is timed."""

from __future__ import annotations

import time

import psutil

__all__ = ["Watch", "is_unsteady"]

#: CPU time that others may use: cores, and seconds below which nothing can be said, since the
#: system counts in hundredths of a second.
_CORES, _SECONDS = 0.08, 0.04
#: Largest interquartile range of undisturbed times, as a share of their median.
_SPREAD = 0.25


class Watch:
    """Compares the CPU time of the whole machine with that of this process.

    The difference is what others used: processes, the system, and other machines on the same
    hardware. Children of this process count as others.

    Example:
        >>> watch = Watch()
        >>> watch.seconds >= 0.0 and watch.others >= 0.0
        True
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._started, self._before = time.perf_counter(), self._times()

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return time.perf_counter() - self._started

    @property
    def others(self) -> float:
        """CPU seconds that others have used since the start."""
        machine, own = self._times()
        return max(0.0, machine - self._before[0] - (own - self._before[1]))

    @property
    def is_disturbed(self) -> bool:
        """Whether others used more than 8 % of a core, and .04 s on top."""
        return self.others > _CORES * self.seconds + _SECONDS

    def _times(self) -> tuple[float, float]:
        machine, own = psutil.cpu_times(), self._process.cpu_times()
        # Guests are counted in user and nice too.
        idle = machine.idle + getattr(machine, "iowait", 0.0)
        guests = getattr(machine, "guest", 0.0) + getattr(machine, "guest_nice", 0.0)
        return sum(machine) - idle - guests, own.user + own.system


def is_unsteady(median: float, spread: float) -> bool:
    """Whether times of a plain network vary more than those on a quiet machine.

    Args:
        median: of the times.
        spread: their interquartile range.

    Example:
        >>> is_unsteady(2.0, 0.1), is_unsteady(2.0, 1.0)
        (False, True)
    """
    return spread > _SPREAD * median
