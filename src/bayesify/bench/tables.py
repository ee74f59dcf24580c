"""The rows of a measurement as tables: on the terminal, and in the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bayesify.bench.measuring import Row

__all__ = ["by_group", "cells_of", "headings_of", "label_of", "markdown", "replaced"]

_HEADINGS = ("step", "ms", "spread", "ratio", "paired", "floor", "MB", "vectors")
BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"


def by_group(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows by case and size of the minibatch, in their order.

    Example:
        >>> list(by_group([{"case": "mlp-400", "batch": 128}]))
        ['mlp-400, batch 128']
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{row['case']}, batch {row['batch']}", []).append(row)
    return groups


def label_of(row: Row) -> str:
    """Who was measured, in a few words.

    Example:
        >>> label_of({"path": "fused", "estimator": "sampling", "optimizer": "adam"})
        'fused, sampling, adam'
        >>> label_of({"path": "plain", "estimator": "none", "optimizer": "none"})
        'plain'
    """
    parts = (row["path"], row["estimator"], row["optimizer"])
    return ", ".join(part for part in parts if part != "none")


def headings_of(rows: Sequence[Row]) -> list[str]:
    """What stands above the cells of the rows.

    Example:
        >>> headings_of([{"resident_mb": 9.0}])[-3:]
        ['MB', 'vectors', 'process, MB']
    """
    return [*_HEADINGS, *(["process, MB"] if any("resident_mb" in row for row in rows) else [])]


def cells_of(row: Row) -> list[str]:
    """The row's numbers as text."""
    numbers = [_short(row["ms_median"]), _short(row["ms_iqr"])]
    numbers += [f"{row['ratio']:.2f}", f"{row['ratio_paired']:.2f}"]
    numbers += [f"{row['ratio_floor']:.2f}" if "ratio_floor" in row else ""]
    numbers += [f"{row['peak_mb']:.1f}", f"{row['vectors']:+.1f}"]
    numbers += [f"{row['resident_mb']:.1f}"] if "resident_mb" in row else []
    return [label_of(row), *numbers]


def markdown(document: Mapping[str, Any]) -> str:
    """The tables of a stored measurement, with what it was measured on.

    Args:
        document: what ``bayesify bench --out`` wrote.
    """
    config, versions = document["config"], document["versions"]
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [
        f"Measured on {document['hardware']}, {config['rounds']} rounds, commit "
        f"`{document['commit']}`; {shown}.",
    ]
    lines += [f"{note}." for note in document["notes"]]
    for name, rows in by_group(document["metrics"]["rows"]).items():
        headings = headings_of(rows)
        lines += ["", f"**{name}**", "", f"| {' | '.join(headings)} |"]
        lines += ["|---" * len(headings) + "|"]
        lines += [f"| {' | '.join(cells_of(row))} |" for row in rows]
    return "\n".join(lines) + "\n"


def replaced(page: str, text: str) -> str:
    r"""A page with new text between its two marks.

    Raises:
        ValueError: the page has not both.

    Example:
        >>> replaced("a\n<!-- bench: begin -->\nold\n<!-- bench: end -->\nb", "new")
        'a\n<!-- bench: begin -->\n\nnew\n\n<!-- bench: end -->\nb'
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page must have the marks {BEGIN} and {END}, in this order")
    return f"{before}{BEGIN}\n\n{text.strip()}\n\n{END}{after}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
