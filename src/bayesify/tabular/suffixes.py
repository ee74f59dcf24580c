"""Suffixes of the files that hold a table; importing this needs no pandas."""

from __future__ import annotations

__all__ = ["TABLE_SUFFIXES"]

#: Suffixes of files that hold a table.
TABLE_SUFFIXES = (".csv", ".tsv", ".txt", ".gz", ".parquet")
