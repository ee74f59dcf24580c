"""Markdown of the experiments' tables."""

from __future__ import annotations

__all__ = ["table_head"]


def table_head(line: str) -> list[str]:
    """Return a table's first line, which names its columns, and the line below it.

    Example:
        >>> table_head("| | error | nll |")
        ['| | error | nll |', '|---|---|---|']
    """
    return [line, "|---" * (line.count("|") - 1) + "|"]
