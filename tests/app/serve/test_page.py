"""The page of ``bayesify serve`` in headless Chromium: one draws a digit and changes a row.

Left out where Playwright (``pip install playwright``) or Chromium is missing.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from tests.app.cli.test_cli import bayesify

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
TRAINED = ["--hidden", "200", "--epochs", "8", "--threads", "1"]

pytestmark = pytest.mark.slow


def test_the_page_answers_while_one_draws_and_types(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("playwright", reason="needs Playwright")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    page = importlib.import_module("serve_page")
    if page.CHROMIUM is None:
        pytest.skip("needs Chromium")
    digits = tmp_path / "digits"
    assert bayesify("train", "mnist", "--out", digits, *TRAINED).code == 0
    found = page.check([str(digits), str(runs["regression"])], tmp_path)
    assert set(found["images"]["digits"]) == set(page.DIGITS)
    names = ("serve-digit", "serve-scribble", "serve-row")
    assert {path.name for path in tmp_path.glob("*.png")} == {
        f"{name}-{width}.png" for name in names for width in page.WIDTHS
    }
