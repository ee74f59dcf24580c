"""The tutorials: what a reader sees is all that runs, warnings included."""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = {path.name: path for path in (ROOT / "docs" / "tutorials").glob("*.md")}
SUPPRESSED = re.compile(r"simplefilter|filterwarnings|catch_warnings|showwarning|setLevel")
each_tutorial = pytest.mark.parametrize("name", sorted(set(TUTORIALS) - {"index.md"}))


def blocks(name: str) -> Iterator[tuple[str, str]]:
    """The options and the code of each block that the build runs."""
    text = TUTORIALS[name].read_text(encoding="utf-8")
    found = re.findall(r'^```python (exec="1"[^\n]*)\n(.*?)^```', text, re.M | re.S)
    assert found
    yield from found


@pytest.fixture
def site_warnings(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "site_warnings", ROOT / "docs" / "site_warnings.py"
    )
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@each_tutorial
def test_no_tutorial_hides_warnings(name: str) -> None:
    for _, code in blocks(name):
        assert not SUPPRESSED.search(code)


@each_tutorial
def test_a_hidden_block_only_shows_a_figure(name: str) -> None:
    for options, code in blocks(name):
        if "source=" not in options:
            assert code.startswith("from site_figures import html_of\n\nprint(")


@each_tutorial
def test_a_block_that_trains_can_show_a_warning(name: str) -> None:
    for options, code in blocks(name):
        if re.search(r"\bfit\(", code):
            assert 'result="text"' in options


@each_tutorial
def test_a_tutorial_reads_no_file_of_the_repository(name: str) -> None:
    for _, code in blocks(name):
        assert "__file__" not in code


def test_a_page_shows_the_warnings_of_its_code(site_warnings: ModuleType) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        site_warnings.show_in_pages()
        shown: list[str] = []
        code = 'import warnings\nwarnings.warn("too short", stacklevel=1)'
        exec(compile(code, "<code block: session a; n1>", "exec"), {"print": shown.append})
    assert shown == ["UserWarning: too short"]


def test_other_warnings_go_where_they_went(
    site_warnings: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed_on: list[str] = []
    monkeypatch.setattr(
        site_warnings, "_show_elsewhere", lambda message, *_, **__: passed_on.append(str(message))
    )
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        site_warnings.show_in_pages()
        warnings.warn("elsewhere", stacklevel=1)
    assert passed_on == ["elsewhere"]
