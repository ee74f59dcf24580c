"""Time contestants in turns, so that a disturbance of the machine affects all of them alike."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import torch

from bayesify.app.bench.contestants import Contestant, Step
from bayesify.app.bench.disturbance import Watch
from bayesify.estimators.out_of_memory import is_out_of_memory

__all__ = ["Entrant", "Turn", "frozen_objects", "paired_ratio", "spread", "take_turns", "wait"]

#: A disturbance is looked for in rounds that take at least this long together.
_BLOCK_S = 0.5


@dataclass
class Entrant:
    """A contestant that is built, with its measurements.

    Args:
        contestant: the contestant.
        step: does one step.
        peak: bytes, see ``step_memory``.
        times: milliseconds of a step, one number per round.
        disturbed: the number of these rounds in which others used the CPU.
        error: why it was left out, or None.
    """

    contestant: Contestant
    step: Step
    peak: int = 0
    times: list[float] = field(default_factory=list)
    disturbed: int = 0
    error: Exception | None = None


@dataclass(frozen=True)
class Turn:
    """The steps of one turn of a contestant.

    Args:
        untimed: steps at the start, which load its memory into the caches, as in training.
        timed: steps after these.
    """

    untimed: int
    timed: int

    @classmethod
    def for_steps_of(cls, seconds: float) -> Turn:
        """Choose a turn for steps of this duration; long steps need no untimed one.

        Example:
            >>> Turn.for_steps_of(0.002), Turn.for_steps_of(0.02), Turn.for_steps_of(0.5)
            (Turn(untimed=5, timed=20), Turn(untimed=1, timed=2), Turn(untimed=0, timed=1))
        """
        if seconds >= 0.05:
            return cls(0, 1)
        timed = min(max(round(0.04 / seconds), 1), 50)
        return cls(-(-timed // 4), timed)

    def take(self, step: Step) -> float:
        """Return the milliseconds of a step, averaged over the timed ones."""
        for _ in range(self.untimed):
            step()
        wait()
        started = time.perf_counter()
        for _ in range(self.timed):
            step()
        wait()
        return 1e3 * (time.perf_counter() - started) / self.timed


def wait() -> None:
    """Wait until a GPU has finished all work of this process, if it uses one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def take_turns(
    entrants: Sequence[Entrant],
    *,
    rounds: int,
    turn: Turn,
    on_turn: Callable[[], None] = lambda: None,
) -> None:
    """Time every entrant once per round, in random order.

    Rounds that other processes disturb are dropped and taken again, at most as many as were asked
    for. If the machine does not become quiet, those that are left are kept, and counted in
    ``disturbed``. An error of another library is kept in its ``error``, and it gets no more turns.

    Args:
        entrants: with their steps.
        rounds: rounds to keep.
        turn: of every entrant in a round.
        on_turn: called after every turn.

    Raises:
        KeyboardInterrupt: Ctrl-C; the rounds until then stay in the entrants' times.

    Example:
        >>> calls = []
        >>> ours = Entrant(Contestant("closed-form", "sampling", "adam", lambda: None), calls.clear)
        >>> take_turns([ours], rounds=3, turn=Turn(0, 1))
        >>> len(ours.times)
        3
    """
    order, chance = list(entrants), random.Random(0)
    left, spare = rounds, rounds
    with _collected_between():
        while left:
            before = {id(entrant): len(entrant.times) for entrant in entrants}
            watch, taken = Watch(), 0
            while taken < left and (not taken or watch.seconds < _BLOCK_S):
                gc.collect()
                chance.shuffle(order)
                for entrant in order:
                    _take(turn, entrant)
                    on_turn()
                taken += 1
            if not watch.is_disturbed:
                left -= taken
            elif spare:
                spare -= min(spare, taken)
                for entrant in entrants:
                    del entrant.times[before[id(entrant)] :]
            else:
                left -= taken
                for entrant in entrants:
                    entrant.disturbed += len(entrant.times) - before[id(entrant)]


def _take(turn: Turn, entrant: Entrant) -> None:
    if entrant.error is not None:
        return
    try:
        entrant.times.append(turn.take(entrant.step))
    except Exception as error:  # whatever another library raises
        if not entrant.contestant.is_peer or is_out_of_memory(error):
            raise
        entrant.error = error


def spread(times: Sequence[float]) -> float:
    """Return the interquartile range.

    Example:
        >>> spread([1.0, 2.0, 3.0, 4.0, 5.0])
        2.0
    """
    low, high = np.quantile(times, (0.25, 0.75))
    return float(high - low)


def paired_ratio(times: Sequence[float], baseline: Sequence[float]) -> float:
    """Return the median over the rounds of the ratio within a round.

    Example:
        >>> paired_ratio([2.0, 30.0, 2.0], [1.0, 10.0, 1.0])
        2.0
    """
    return median(ours / theirs for ours, theirs in zip(times, baseline, strict=False))


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Collect garbage, and leave the objects that remain out of further collections until the end.

    Example:
        >>> with frozen_objects():
        ...     gc.get_freeze_count() > 0
        True
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _collected_between() -> Iterator[None]:
    """Let the garbage collector run only where it is called."""
    was_enabled = gc.isenabled()
    with frozen_objects():
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()
