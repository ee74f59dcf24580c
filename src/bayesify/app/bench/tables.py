"""Format the rows of a measurement as tables, for the terminal and for the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bayesify.app.bench.contestants import OURS
from bayesify.app.bench.measuring import BenchRow

__all__ = ["by_group", "cells_of", "headings_of", "label_of", "markdown", "replaced"]

#: Older names of the paths of a training step in stored measurements.
_RENAMED = {"plain": "closed-form", "fused": "compiled"}
_HEADINGS = ("step", "ms", "spread", "ratio", "paired", "floor", "MB", "vectors")
BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"


def by_group(rows: Sequence[BenchRow]) -> dict[str, list[BenchRow]]:
    """Return the rows by case and minibatch size, in their order, with today's names of paths.

    Example:
        >>> by_group([{"case": "mlp-400", "batch": 128, "path": "fused"}])
        {'mlp-400, batch 128': [{'case': 'mlp-400', 'batch': 128, 'path': 'compiled'}]}
    """
    groups: dict[str, list[BenchRow]] = {}
    for row in rows:
        groups.setdefault(f"{row['case']}, batch {row['batch']}", []).append(_with_path(row))
    return groups


def _with_path(row: BenchRow) -> BenchRow:
    """Return a row with the path's name of today."""
    path = row["path"]
    if row["case"].startswith("predict") and path == "plain":
        return {**row, "path": OURS}
    return {**row, "path": _RENAMED.get(path, path)}


def label_of(row: BenchRow) -> str:
    """Return path, estimator and optimizer of a row as text.

    Example:
        >>> label_of({"path": "compiled", "estimator": "sampling", "optimizer": "adam"})
        'compiled, sampling, adam'
        >>> label_of({"path": "bayesify", "estimator": "none", "optimizer": "none"})
        'bayesify'
    """
    parts = (row["path"], row["estimator"], row["optimizer"])
    return ", ".join(part for part in parts if part != "none")


def headings_of(rows: Sequence[BenchRow]) -> list[str]:
    """Return the headings of the columns for these rows.

    Example:
        >>> headings_of([{"resident_mb": 9.0}])[-3:]
        ['MB', 'vectors', 'process, MB']
    """
    return [*_HEADINGS, *(["process, MB"] if any("resident_mb" in row for row in rows) else [])]


def cells_of(row: BenchRow) -> list[str]:
    """Return the numbers of a row as text."""
    numbers = [_short(row["ms_median"]), _short(row["ms_iqr"])]
    numbers += [f"{row['ratio']:.2f}", f"{row['ratio_paired']:.2f}"]
    numbers += [f"{row['ratio_floor']:.2f}" if "ratio_floor" in row else ""]
    numbers += [f"{row['peak_mb']:.1f}", f"{row['vectors']:+.1f}"]
    numbers += [f"{row['resident_mb']:.1f}"] if "resident_mb" in row else []
    return [label_of(row), *numbers]


def markdown(document: Mapping[str, Any]) -> str:
    """Return the tables of a stored measurement as Markdown, with hardware and versions.

    Args:
        document: content of a file that ``bayesify bench --out`` wrote.
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
    r"""Return a page with new text between its two marks.

    Raises:
        ValueError: the page lacks one of them.

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
