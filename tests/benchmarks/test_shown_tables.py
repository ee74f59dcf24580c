"""Tables of the documentation that scripts make: they are what the stored results give."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("script", "page", "function", "arguments"),
    [
        ("own_data", "tables.md", "table", ("texts",)),
        ("own_data", "image-folders.md", "table", ("images",)),
        ("architectures", "architectures.md", "table", ()),
        ("adapters", "adapters.md", "stored_tables", ()),
        ("conformal", "conformal.md", "table", ("methods",)),
        ("conformal", "conformal.md", "table", ("scores",)),
        ("tabular", "scikit-learn.md", "table", ()),
        ("export_parity", "export.md", "table", ()),
        ("freeze", "export.md", "table", ()),
        ("large_tables", "large-tables.md", "table", ()),
        ("posterior_prices", "which-posterior.md", "table", ()),
        ("release", "release.md", "table", ()),
        ("table_recipe", "adr/0008-recipe-for-tables.md", "table", ()),
    ],
)
def test_a_page_shows_the_stored_results(
    script: str,
    page: str,
    function: str,
    arguments: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # which one of the scripts sets
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    table = getattr(importlib.import_module(script), function)(*arguments)
    assert table in (ROOT / "docs" / page).read_text(encoding="utf-8")


def test_fifteen_architectures_work() -> None:
    stored = list((ROOT / "results" / "architectures").glob("*.json"))
    assert len(stored) >= 15
    assert not [path.name for path in stored if '"error"' in path.read_text(encoding="utf-8")]
