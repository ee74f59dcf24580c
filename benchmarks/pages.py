"""Write tables that scripts make between their marks in a page of the documentation."""

from __future__ import annotations

from pathlib import Path

from bayesify.io import atomic_write

DOCS = Path(__file__).resolve().parents[1] / "docs"


def insert(path: Path, name: str, table: str) -> None:
    """Replace the text between the marks of this name."""
    page = path.read_text(encoding="utf-8")
    before, begin, rest = page.partition(f"<!-- {name}: begin -->")
    _, end, after = rest.partition(f"<!-- {name}: end -->")
    if not (begin and end):
        raise ValueError(f"{path} lacks the marks of {name}")
    atomic_write(path, f"{before}{begin}\n\n{table}\n\n{end}{after}")
