"""The house: three rings, one direction of imports, a light import, documented names."""

from __future__ import annotations

import ast
import graphlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

import bayesify

SOURCE = Path(bayesify.__file__).parent
ROOT = "bayesify"

#: From the bottom to the top: a module imports from its own package and from those before it only.
#: "bayesify" is ``__init__.py``, the public names; ``__main__`` only starts the command line.
LIBRARY = (
    "noise",
    "prediction",
    "distributions",
    "estimators",
    "module",
    "io",
    "training",
    "referee",
    "metrics",
    "plots",
    "datasets",
    "bandits",
    ROOT,
)
APPLICATION = ("adapters", "tabular", "export", "sklearn", "integrations", "app")
PAPERS = ("reproduce",)
START = ("__main__",)
PACKAGES = (*LIBRARY, *APPLICATION, *PAPERS, *START)

MAX_ENTRIES = 19


@cache
def read_sources() -> dict[str, str]:
    """The text of every module by its dotted name, such as ``bayesify.training.fit``."""
    sources = {}
    for path in SOURCE.rglob("*.py"):
        parts = (ROOT, *path.relative_to(SOURCE).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources[name] = path.read_text(encoding="utf-8")
    return sources


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@cache
def import_statements(source: str) -> list[ast.AST]:
    """The import statements of a module, wherever in its text they are."""
    nodes = ast.walk(parsed(source))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def imported_modules(name: str, sources: Mapping[str, str]) -> set[str]:
    """The modules of bayesify that a module imports."""
    found = set()
    for node in import_statements(sources[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            assert isinstance(node, ast.ImportFrom)
            assert node.level == 0, f"{name} has a relative import; write it out from {ROOT}"
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                found.add(inside if inside in sources else str(node.module))
    return {other for other in found if other == ROOT or other.startswith(f"{ROOT}.")}


def package_of(name: str) -> str:
    package = ROOT if name == ROOT else name.split(".")[1]
    assert package in PACKAGES, (
        f"{name} is in no ring: add {package!r} to tests/test_architecture.py, after all that it "
        "imports and before all that imports it"
    )
    return package


def check_imports(sources: Mapping[str, str]) -> None:
    """Papers import the application, which imports the library, in the order of its packages."""
    graph = {name: imported_modules(name, sources) - {name} for name in sources}
    for name, others in graph.items():
        here = package_of(name)
        for other in others:
            there = package_of(other)
            assert PACKAGES.index(there) <= PACKAGES.index(here), (
                f"{name} imports {other}, but {there!r} comes after {here!r} in PACKAGES"
            )
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        raise AssertionError(f"modules import each other in a circle: {error.args[1]}") from None


def test_imports_go_one_way() -> None:
    sources = read_sources()
    assert "bayesify.training.elbo" in sources
    assert "bayesify.distributions.layout" in imported_modules("bayesify.module.bayesian", sources)
    check_imports(sources)


def test_a_wrong_import_is_caught() -> None:
    planted = [
        ({"noise.keys": "from bayesify.module.bayesian import BayesianModule"}, "'module' comes"),
        ({"module.summary": "def f():\n    import bayesify.training.elbo"}, "'training' comes"),
        (
            {"noise": "from bayesify.training import elbo"},
            r"noise imports bayesify\.training\.elbo",
        ),
        ({"referee": "from bayesify import ELBO"}, "referee imports bayesify, but"),
        ({"training.loop": "from bayesify.app.cli import main"}, "'app' comes after 'training'"),
        ({"app.runs.new": "import bayesify.reproduce"}, "'reproduce' comes after 'app'"),
        ({"magic": "import torch"}, "magic is in no ring: add 'magic'"),
        ({"io": "from . import module"}, "io has a relative import"),
        (
            {
                "training.a": "from bayesify.training.b import x",
                "training.b": "from bayesify.training.a import y",
            },
            "in a circle",
        ),
    ]
    sources = read_sources()
    for extra, message in planted:
        with pytest.raises(AssertionError, match=message):
            check_imports(sources | {f"{ROOT}.{name}": text for name, text in extra.items()})


def test_a_stranger_opens_few_entries() -> None:
    entries = {
        path.name
        for path in SOURCE.iterdir()
        if path.name not in ("__init__.py", "__main__.py", "py.typed", "__pycache__")
    }
    assert len(entries) <= MAX_ENTRIES, sorted(entries)
    assert {Path(entry).stem for entry in entries} | {ROOT, *START} == set(PACKAGES)


def listed_names(tree: ast.Module) -> set[str] | None:
    """The names in a module's ``__all__``, or None if it has none."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(each, ast.Name) and each.id == "__all__" for each in targets):
            assert isinstance(node, ast.Assign)
            return {
                str(each.value) for each in ast.walk(node.value) if isinstance(each, ast.Constant)
            }
    return None


def test_modules_list_what_others_import_from_them() -> None:
    sources = read_sources()
    listed = {name: listed_names(parsed(text)) for name, text in sources.items()}
    for name, text in sources.items():
        for node in import_statements(text):
            names = listed.get(str(getattr(node, "module", None)))
            if not isinstance(node, ast.ImportFrom) or names is None or node.module == ROOT:
                continue
            wanted = {each.name for each in node.names}
            wanted = {each for each in wanted if f"{node.module}.{each}" not in sources}
            assert wanted <= names, f"{node.module} lacks {wanted - names}, which {name} imports"


#: A module's first line says what the module is or does; a riddle starts with one of these.
RIDDLE = re.compile(r"(What|How|Which|Whether|Where|Who|Of)\b")


def test_modules_say_what_they_are() -> None:
    assert RIDDLE.match("What a pass of a network takes.")
    for name, text in read_sources().items():
        first = (ast.get_docstring(parsed(text)) or "").partition("\n")[0]
        assert first, f"{name} has no docstring"
        assert not RIDDLE.match(first), f"{name} opens with a riddle: {first!r}"


HEAVY = (
    "matplotlib",
    "typer",
    "rich",
    "pandas",
    "sklearn",
    "torchmetrics",
    "transformers",
    "lightning",
    "peft",
    "jax",
    "numpyro",
    "constriction",
    "torch._dynamo",
    "torch._inductor",
)
PROBE = """
import json, random, sys
import numpy, torch

def state():
    return [
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_rng_state().tolist(),
        numpy.random.get_state()[1].tolist(),
        random.getstate(),
    ]

before, modules = state(), set(sys.modules)
from bayesify import *
print(json.dumps([sorted(set(sys.modules) - modules), state() == before]))
"""


def check_light(brought: list[str]) -> None:
    heavy = [name for name in HEAVY if any(f"{each}.".startswith(f"{name}.") for each in brought)]
    assert not heavy, f"import bayesify brings in {heavy}"


def test_the_import_is_light_and_has_no_side_effects() -> None:
    output = subprocess.run(
        [sys.executable, "-c", PROBE], check=True, capture_output=True, text=True
    )
    brought, unchanged = json.loads(output.stdout)
    assert "bayesify.training.elbo" in brought
    check_light(brought)
    assert unchanged, "importing bayesify changes global state"


def test_a_heavy_import_is_caught() -> None:
    with pytest.raises(AssertionError, match="matplotlib"):
        check_light(["bayesify.plots", "matplotlib.pyplot"])


def check_example(name: str, thing: object) -> None:
    text = thing.__doc__
    assert text, f"{name} has no docstring of its own"
    assert "Example:" in text, f"the docstring of {name} has no Example"
    assert ">>>" in text, f"the Example of {name} has nothing to run"


def test_every_public_name_has_an_example() -> None:
    for name in bayesify.__all__:
        thing = getattr(bayesify, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            check_example(name, thing)


def test_a_name_without_an_example_is_caught() -> None:
    class Silent(bayesify.BayesianModule):
        pass

    with pytest.raises(AssertionError, match="Silent has no docstring"):
        check_example("Silent", Silent)
    Silent.__doc__ = "A class."
    with pytest.raises(AssertionError, match="has no Example"):
        check_example("Silent", Silent)


def test_public_names_are_all_there_and_dir_shows_no_others() -> None:
    for name in bayesify.__all__:
        assert getattr(bayesify, name).__name__ == name
    public = {name for name in vars(bayesify) if not name.startswith("_")}
    modules = {name for name in public if inspect.ismodule(getattr(bayesify, name))}
    private = {"importlib", "TYPE_CHECKING", "Any"}
    assert set(bayesify.__all__) == public - modules - private
    assert len(set(bayesify.__all__)) == len(bayesify.__all__)
    shown = set(dir(bayesify)) - {"__version__"}
    assert shown > set(bayesify.__all__)
    for name in shown - set(bayesify.__all__):
        assert inspect.ismodule(getattr(bayesify, name)), name
