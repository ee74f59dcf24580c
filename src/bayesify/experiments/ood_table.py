"""The table of the experiment ``mnist-ood``: who wins, and where Bayes by Backprop loses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from bayesify.experiments.cells import cell, standard_error
from bayesify.experiments.experiment import Row

__all__ = ["ood_table", "ordered"]

#: By place in a row's metrics: heading, decimals, whether more is better.
_COLUMNS: dict[tuple[str, str], tuple[str, int, bool]] = {
    ("test", "error"): ("error %", 2, False),
    ("test", "nll"): ("nll", 4, False),
    ("test", "brier"): ("Brier", 4, False),
    ("test", "ece"): ("ECE", 4, False),
    ("auroc", "entropy"): ("AUROC by entropy", 4, True),
    ("auroc", "mutual_information"): ("AUROC by mutual information", 4, True),
    ("auroc", "max_probability"): ("AUROC by largest probability", 4, True),
}
_OURS = "Bayes by Backprop"
#: By unit: what its networks are called when each is asked alone, with point weights.
_ALONE = {"plain": "SGD", "dropout": "dropout, off in the test"}
#: Units in the order in which they are shown.
_UNITS = ("bayes", "bayes-wide", "plain", "dropout")
_Found = Mapping[str, Mapping[tuple[str, str], list[float]]]


def ood_table(rows: Sequence[Row]) -> str:
    """Markdown: a line a method, then in words where Bayes by Backprop is worse."""
    found = _by_method(rows)
    best = {
        column: (max if more else min)(mean(of[column]) for of in found.values() if column in of)
        for column, (_, _, more) in _COLUMNS.items()
        if any(column in of for of in found.values())
    }
    heads = [heading for column, (heading, _, _) in _COLUMNS.items() if column in best]
    lines = [f"| | networks | {' | '.join(heads)} |", "|---" * (2 + len(heads)) + "|"]
    for method, of in found.items():
        cells = []
        for column, value in best.items():
            text = cell(of.get(column, []), _COLUMNS[column][1])
            won = column in of and mean(of[column]) == value
            cells.append(f"**{text}**" if won else text)
        count = len(of["test", "error"])
        lines.append(f"| {method} | {count} | {' | '.join(cells)} |")
    said = [
        "Mean over networks trained from different seeds +- its standard error, the best mean of "
        "each column in bold. An ensemble counts as one network; its members are those of the row "
        f"{_ALONE['plain']}.",
        "\n".join(lines),
        *_losses(found),
    ]
    return "\n\n".join(said) + "\n"


def ordered(rows: Sequence[Row]) -> list[Row]:
    """The rows in the order in which they are shown, whatever order their files have.

    Example:
        >>> [row["unit"] for row in ordered([{"unit": "dropout"}, {"unit": "plain"}])]
        ['plain', 'dropout']
    """
    return sorted(rows, key=lambda row: _UNITS.index(row["unit"]))


def _by_method(rows: Sequence[Row]) -> _Found:
    found: dict[str, dict[tuple[str, str], list[float]]] = {}
    for row in ordered(rows):
        metrics = row["metrics"]
        parts: list[tuple[str, Any]] = [(row["config"]["method"], metrics)]
        parts[:0] = [(_ALONE[row["unit"]], one) for one in metrics.get("alone", ())]
        for method, measured in parts:
            of = found.setdefault(method, {})
            for part, key in _COLUMNS:
                if key in measured[part]:
                    of.setdefault((part, key), []).append(measured[part][key])
    return found


def _losses(found: _Found) -> list[str]:
    """A sentence for each pair of ours and another: the columns in which ours is worse."""
    said = []
    for ours in (method for method in found if method.startswith(_OURS)):
        parts = []
        for other in (method for method in found if not method.startswith(_OURS)):
            worse = [
                heading + (" (within two standard errors)" if _is_close(a, b) else "")
                for column, (heading, _, more) in _COLUMNS.items()
                if (a := found[ours].get(column))
                and (b := found[other].get(column))
                and (mean(a) < mean(b) if more else mean(a) > mean(b))
            ]
            parts.append(f"to {other} on {', '.join(worse) if worse else 'nothing'}")
        if parts:
            said.append(f"{ours} loses {'; '.join(parts)}.")
    return said


def _is_close(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether the means differ by no more than two standard errors; of one network, unknown."""
    if len(one) < 2 or len(other) < 2:
        return False
    error = math.hypot(standard_error(one), standard_error(other))
    return abs(mean(one) - mean(other)) <= 2.0 * error
