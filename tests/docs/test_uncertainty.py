"""docs/uncertainty.md: its code runs, and its table is the script's."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "uncertainty.md").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore:.*standard deviations have not converged")
def test_the_snippets_run() -> None:
    snippets = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(snippets) >= 6
    names: dict[str, object] = {}
    for snippet in snippets:
        exec(compile(snippet, "docs/uncertainty.md", "exec"), names)


@pytest.mark.slow
def test_the_table_of_correlations_is_the_scripts() -> None:
    table = runpy.run_path(str(ROOT / "benchmarks" / "uncertainty.py"))["correlation_table"]()
    assert table in PAGE
