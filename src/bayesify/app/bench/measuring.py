"""Measure groups of contestants, and summarise their times and memory as rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from bayesify.app.bench.cases import Case
from bayesify.app.bench.contestants import PLAIN_NET, Contestant, bayesian
from bayesify.app.bench.disturbance import is_unsteady
from bayesify.app.bench.floor import FLOOR, floor_contestants, floor_ms, has_floor
from bayesify.app.bench.step_memory import (
    built_on_gpu_with_peak,
    built_with_peak,
    resident_bytes,
)
from bayesify.app.bench.timing import (
    Entrant,
    Turn,
    frozen_objects,
    paired_ratio,
    spread,
    take_turns,
    wait,
)
from bayesify.estimators.out_of_memory import is_out_of_memory
from bayesify.training.backends import CompilerError

__all__ = ["BenchRow", "Group", "Measurement", "estimated_seconds", "measure"]

#: The measurements of one contestant.
BenchRow = dict[str, Any]

_WARMUP = 2
#: The first steps on a GPU compile, and capture a graph.
_GPU_WARMUP = 6
# Typical ratio to the plain network, for the estimate alone.
_USUAL_RATIO = 2.5
_RATIOS = {PLAIN_NET: 1.0, FLOOR: 1.0}


@dataclass(frozen=True)
class Group:
    """Contestants that are timed in turns, on the same work.

    Args:
        case: the work.
        batch: number of examples.
        contestants: the contestants, a plain network first.
        with_floor: whether to measure the floor of the steps that have one too; none has on a GPU.
    """

    case: Case
    batch: int
    contestants: Sequence[Contestant]
    with_floor: bool = True

    @property
    def entered(self) -> list[Contestant]:
        """The contestants, and the parts of their floor if they have one."""
        # The parts of a large network's floor would need as much memory again.
        possible = self.case.device == "cpu" and not self.case.is_large
        wanted = possible and self.with_floor and any(map(has_floor, self.contestants))
        parts = floor_contestants(self.case, self.batch) if wanted else []
        return [*self.contestants, *parts]


@dataclass
class Measurement:
    """The results of :func:`measure`.

    Args:
        rows: one for each contestant that was measured.
        notes: the contestants that were left out, and why.
        interrupted: whether Ctrl-C ended it early.
    """

    rows: list[BenchRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False


def measure(
    groups: Sequence[Group],
    *,
    rounds: int,
    resident: bool = False,
    on_turn: Callable[[str], None] = lambda _: None,
) -> Measurement:
    """Time all groups one after the other, each in turns; Ctrl-C keeps the results so far.

    Args:
        groups: the groups.
        rounds: turns of each contestant.
        resident: whether to measure the memory of a process for each contestant too.
        on_turn: called with the group's name after every turn.

    Example:
        >>> from bayesify.app.bench.cases import perceptron
        >>> from bayesify.app.bench.contestants import contestants_of
        >>> case = perceptron("tiny", 8, inputs=4)
        >>> plain = contestants_of(case, 16)[:1]
        >>> measure([Group(case, 16, plain)], rounds=2).rows[0]["ratio"]
        1.0
    """
    found = Measurement()
    for group in groups:
        rows = _timed(group, rounds, on_turn, found)
        found.rows += [row for _, row in rows]
        try:
            for contestant, row in rows if resident and not found.interrupted else ():
                row["resident_mb"] = resident_bytes(group.case, group.batch, contestant) / 1e6
        except KeyboardInterrupt:
            found.interrupted = True
        if found.interrupted:
            break
    return found


def _timed(
    group: Group, rounds: int, on_turn: Callable[[str], None], found: Measurement
) -> list[tuple[Contestant, BenchRow]]:
    """Time a group, and return the rows by contestant; what its steps hold is free afterwards."""
    entrants: list[Entrant] = []
    name = f"{group.case.name}, batch {group.batch}"
    try:
        # What the libraries hold need not be collected after each contestant.
        with frozen_objects():
            for contestant in group.entered:  # by Ctrl-C those before it are kept
                entrants += [_prepared(contestant, group.case.device)]
            ready = [each for each in entrants if each.error is None]
            turn = Turn.for_steps_of(_seconds(entrants[0]))
            take_turns(ready, rounds=rounds, turn=turn, on_turn=lambda: on_turn(name))
    except KeyboardInterrupt:
        found.interrupted = True
    found.notes += [
        f"{name}: {each.contestant.label} was left out: {_in_a_line(each.error)}"
        for each in entrants
        if each.error is not None
    ]
    return _rows(group, entrants)


def estimated_seconds(groups: Sequence[Group], *, rounds: int) -> float:
    """Estimate the seconds of :func:`measure` from a few steps of each plain network."""
    total = 0.0
    for group in groups:
        first = group.contestants[0]
        seconds = _seconds(Entrant(first, first.build()))
        turn = Turn.for_steps_of(seconds)
        steps = rounds * (turn.untimed + turn.timed) + _WARMUP + 1
        shares = [_RATIOS.get(each.path, _USUAL_RATIO) for each in group.entered]
        total += seconds * steps * sum(shares)
    return total


def _prepared(contestant: Contestant, device: str) -> Entrant:
    """Build and warm up a contestant; keep the error of a peer, or of a missing compiler."""
    try:
        if device == "cpu":
            step, peak = built_with_peak(contestant.build, warmup=_WARMUP)
        else:
            step, peak = built_on_gpu_with_peak(contestant.build, warmup=_GPU_WARMUP)
    except CompilerError as error:
        return Entrant(contestant, lambda: None, error=error)
    except Exception as error:  # whatever another library raises
        if not contestant.is_peer or is_out_of_memory(error):
            raise
        return Entrant(contestant, lambda: None, error=error)
    return Entrant(contestant, step, peak)


def _seconds(entrant: Entrant) -> float:
    """Return the shorter time of two steps."""
    times = []
    for _ in range(2):
        started = time.perf_counter()
        entrant.step()
        wait()
        times.append(time.perf_counter() - started)
    return min(times)


def _rows(group: Group, entrants: Sequence[Entrant]) -> list[tuple[Contestant, BenchRow]]:
    timed = [each for each in entrants if each.times and each.error is None]
    plain = {each.contestant.optimizer: each for each in timed if each.contestant.path == PLAIN_NET}
    parts = {
        (each.contestant.estimator, each.contestant.optimizer): median(each.times)
        for each in timed
        if each.contestant.path == FLOOR
    }
    # In an incomplete first round there may be no plain network to compare with.
    compared = [
        each
        for each in timed
        if each.contestant.path != FLOOR and each.contestant.baseline in plain
    ]
    num_weights = bayesian(group.case).layout.num_weights
    return [
        (each.contestant, _row(group, each, plain[each.contestant.baseline], parts, num_weights))
        for each in compared
    ]


def _row(
    group: Group,
    entrant: Entrant,
    plain: Entrant,
    parts: dict[tuple[str, str], float],
    num_weights: int,
) -> BenchRow:
    who, typical, plain_typical = entrant.contestant, median(entrant.times), median(plain.times)
    row: BenchRow = {
        "case": group.case.name,
        "estimator": who.estimator,
        "path": who.path,
        "optimizer": who.optimizer,
        "hidden": group.case.hidden,
        "batch": group.batch,
        "ms_median": typical,
        "ms_iqr": spread(entrant.times),
        "ratio": typical / plain_typical,
        "ratio_paired": paired_ratio(entrant.times, plain.times),
        "peak_mb": entrant.peak / 1e6,
        "vectors": (entrant.peak - plain.peak) / (4 * num_weights),
        "num_weights": num_weights,
        "rounds": len(entrant.times),
        "rounds_disturbed": entrant.disturbed,
        "disturbed": entrant.disturbed > 0 or is_unsteady(plain_typical, spread(plain.times)),
        "threads": torch.get_num_threads(),
        "device": group.case.device,
    }
    floor = floor_ms(parts, who, num_weights) if has_floor(who) else {}
    if floor:
        row |= {**floor, "ratio_floor": floor["floor_ms"] / plain_typical}
    return row


def _in_a_line(error: Exception | None) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
