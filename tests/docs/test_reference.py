"""The reference: every name that a user imports is on a page, and its docstring has an example."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import bayesify

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
#: Subpackages all of whose names are public; of others, those that pages and examples import.
PUBLIC = (
    "adapters",
    "bandits",
    "datasets",
    "export",
    "integrations.lightning",
    "integrations.transformers",
    "metrics",
    "plots",
    "prediction",
    "referee",
    "sklearn",
    "training",
)
#: What the needed extra is called by the module that is missing without it.
EXTRAS = {"adapters": "peft", "integrations.lightning": "lightning"}
EXTRAS |= {"integrations.transformers": "transformers", "referee": "numpyro"}


def shown() -> set[str]:
    """The full names that the pages of the reference show, those of whole modules included."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted(REFERENCE.glob("*.md")))
    found = set(re.findall(r"^::: (\S+)$", pages, re.M))
    for name in PUBLIC:
        if f"bayesify.{name}" in found:
            found |= {f"bayesify.{name}.{each}" for each in module_of(name).__all__}
    return found


def module_of(name: str) -> Any:
    """Import a subpackage, or skip the test where its extra is not installed."""
    if name in EXTRAS:
        pytest.importorskip(EXTRAS[name])
    return importlib.import_module(f"bayesify.{name}")


def imported(text: str) -> set[str]:
    """The full names that a page or an example imports from a module of the library."""
    lines = re.findall(r"^\s*from (bayesify[\w.]*) import (\([^)]*\)|.+)$", text, re.M)
    return {f"{module}.{name}" for module, names in lines for name in re.findall(r"\w+", names)}


def missing(names: set[str], pages: set[str]) -> list[str]:
    """Names that no page shows; one of ``bayesify`` itself may come from elsewhere."""
    own = {f"bayesify.{name}" for name in bayesify.__all__}
    known = pages | {name for name in names if f"bayesify.{name.rpartition('.')[2]}" in own & pages}
    return sorted(names - known)


def test_every_name_of_the_package_is_on_a_page() -> None:
    found = shown() | {"bayesify.open_run", "bayesify.__version__"}
    assert "bayesify.app.trained_table.open_run" in found
    # What bf.open_run and bnn.summary return.
    assert "bayesify.app.trained_table.TrainedTable" in found
    assert {
        f"bayesify.module.summary.{name}" for name in ("ModuleSummary", "ParameterSummary")
    } <= (found)
    assert [name for name in dir(bayesify) if f"bayesify.{name}" not in found] == []
    index = (REFERENCE / "index.md").read_text(encoding="utf-8")
    assert [name for name in bayesify.__all__ if f"`{name}`" not in index] == []


@pytest.mark.parametrize("name", PUBLIC)
def test_every_name_of_a_public_subpackage_is_on_a_page(name: str) -> None:
    names = {f"bayesify.{name}.{each}" for each in module_of(name).__all__}
    assert missing(names, shown()) == []


def test_every_name_that_a_reader_is_shown_to_import_is_on_a_page() -> None:
    places = (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py"))
    names = set().union(*(imported(place.read_text(encoding="utf-8")) for place in places))
    assert "bayesify.prediction.GaussianPredictive" in names
    papers = {name for name in names if name.startswith("bayesify.reproduce.")}
    assert missing(names - papers, shown()) == []


def test_a_name_on_no_page_is_caught() -> None:
    names = imported("from bayesify.metrics import nll, nothing\nfrom bayesify.io import save\n")
    assert missing(names, shown()) == ["bayesify.metrics.nothing"]


@pytest.mark.parametrize("name", ["", *PUBLIC])
def test_every_public_name_has_an_example(name: str) -> None:
    module = module_of(name) if name else bayesify
    without = [each for each in module.__all__ if not has_example(module, each)]
    assert without == []


def test_every_other_name_of_the_reference_has_an_example() -> None:
    for full in sorted(shown()):
        module, _, name = full.rpartition(".")
        if module not in ("", "bayesify") and module.removeprefix("bayesify.") not in PUBLIC:
            assert has_example(importlib.import_module(module), name), full


def has_example(module: Any, name: str) -> bool:
    """Whether a name's docstring has a doctest; a constant needs a comment instead."""
    found = getattr(module, name)
    if inspect.isclass(found) or inspect.isfunction(found):
        return bool(re.search(r"^    +Example:\n +>>> ", found.__doc__ or "", re.M))
    package = Path(module.__file__).parent
    comment = re.compile(rf"^#: .*\n{name}\b", re.M)
    return any(comment.search(path.read_text(encoding="utf-8")) for path in package.glob("*.py"))


def test_a_missing_example_is_caught() -> None:
    class Planted:
        """A class without an example."""

    assert not has_example(SimpleNamespace(Planted=Planted), "Planted")
    assert not has_example(bayesify.datasets, "__doc__")  # a constant without a comment
