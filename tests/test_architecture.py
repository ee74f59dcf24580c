"""The house: one direction of imports, a light import, documented names, short files."""

from __future__ import annotations

import ast
import graphlib
import inspect
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

import bayesify

SOURCE = Path(bayesify.__file__).parent
ROOT = "bayesify"

#: From top to bottom: a module imports from those above it only. "bayesify" is ``__init__.py``,
#: the public names; a package counts as one layer.
LAYERS = (
    "eligible",
    "layout",
    "stateless",
    "noise",
    "softplus",
    "posteriors",
    "pretrained",
    "priors",
    "groups",
    "closed_forms",
    "divergence",
    "perturbations",
    "coverage",
    "predictive",
    "likelihoods",
    "inputs",
    "random_network",
    "footprint",
    "pieces",
    "prediction",
    "module",
    "elbo",
    "pruning",
    "storage",
    "saving",
    "fused",
    "training",
    "baselines",
    ROOT,
    "networks",
    "metrics",
    "plots",
    "figures",
    "report_captions",
    "report_style",
    "report_page",
    "report",
    "datasets",
    "bandits",
    "tabular",
    "sklearn",
    "tables",
    "runs",
    "bench",
    "experiments",
    "cli",
)


def read_sources() -> dict[str, str]:
    """The text of every module by its dotted name, such as ``bayesify.training.loop``."""
    sources = {}
    for path in SOURCE.rglob("*.py"):
        parts = (ROOT, *path.relative_to(SOURCE).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources[name] = path.read_text(encoding="utf-8")
    return sources


def imported_modules(name: str, sources: Mapping[str, str]) -> set[str]:
    """The modules of bayesify that a module imports, wherever in its text it does so."""
    found = set()
    for node in ast.walk(ast.parse(sources[name])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import; write it out from {ROOT}"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            submodules = inside & set(sources)
            found |= submodules
            if submodules != inside:
                found.add(str(node.module))
    return {other for other in found if other == ROOT or other.startswith(f"{ROOT}.")}


def layer_of(name: str) -> int:
    layer = ROOT if name == ROOT else name.split(".")[1]
    assert layer in LAYERS, (
        f"{name} is in no layer: add {layer!r} to LAYERS in tests/test_architecture.py, below "
        "everything that it imports and above everything that imports it"
    )
    return LAYERS.index(layer)


def check_imports(sources: Mapping[str, str]) -> None:
    """Every import goes up the list of layers, and the modules of one package form no circle."""
    siblings: dict[int, dict[str, set[str]]] = defaultdict(dict)
    for name in sources:
        here = layer_of(name)
        for other in imported_modules(name, sources):
            there = layer_of(other)
            if there == here:
                siblings[here].setdefault(name, set()).add(other)
                continue
            assert there < here, (
                f"{name} imports {other}, but {LAYERS[there]!r} comes below {LAYERS[here]!r}: "
                "imports go from top to bottom of LAYERS only"
            )
    for graph in siblings.values():
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            raise AssertionError(
                f"modules import each other in a circle: {error.args[1]}"
            ) from None


def test_imports_go_one_way() -> None:
    sources = read_sources()
    assert f"{ROOT}.elbo" in sources
    assert f"{ROOT}.layout" in imported_modules(f"{ROOT}.module", sources)
    check_imports(sources)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"priors": "from bayesify.module import BayesianModule"}, "priors imports .*module, but"),
        ({"layout": "def f():\n    import bayesify.elbo"}, r"layout imports bayesify\.elbo, but"),
        ({"noise": "from bayesify import elbo"}, r"noise imports bayesify\.elbo, but"),
        ({"pruning": "from bayesify import ELBO"}, "pruning imports bayesify, but"),
        ({"training.loop": "from bayesify.cli import main"}, "loop imports bayesify.cli, but"),
        ({"magic": "import torch"}, "magic is in no layer: add 'magic' to LAYERS"),
        ({"elbo": "from . import module"}, "elbo has a relative import"),
        (
            {
                "training.a": "from bayesify.training.b import x",
                "training.b": "from bayesify.training.a import y",
            },
            "in a circle",
        ),
    ],
    ids=str,
)
def test_a_wrong_import_is_caught(extra: dict[str, str], message: str) -> None:
    planted = {f"{ROOT}.{name}": text for name, text in extra.items()}
    with pytest.raises(AssertionError, match=message):
        check_imports(read_sources() | planted)


HEAVY = ("matplotlib", "typer", "rich", "pandas", "sklearn", "torchmetrics")
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
import bayesify
print(json.dumps([sorted(set(sys.modules) - modules), state() == before]))
"""


def check_light(brought: list[str]) -> None:
    heavy = sorted(set(HEAVY) & {name.split(".")[0] for name in brought})
    assert not heavy, f"import bayesify brings in {heavy}"


def test_the_import_is_light_and_has_no_side_effects() -> None:
    output = subprocess.run(
        [sys.executable, "-c", PROBE], check=True, capture_output=True, text=True
    )
    brought, unchanged = json.loads(output.stdout)
    assert "bayesify.elbo" in brought
    check_light(brought)
    assert unchanged, "import bayesify changes global state"


def test_a_heavy_import_is_caught() -> None:
    with pytest.raises(AssertionError, match="matplotlib"):
        check_light(["bayesify.plots", "matplotlib.pyplot"])


def check_example(name: str, thing: object) -> None:
    text = thing.__doc__
    assert text, f"{name} has no docstring of its own"
    assert "Example:" in text, f"the docstring of {name} has no Example"
    assert ">>>" in text, f"the Example of {name} has nothing to run"


@pytest.mark.parametrize("name", bayesify.__all__)
def test_every_public_name_has_an_example(name: str) -> None:
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


def test_public_names_are_sorted_and_all_there() -> None:
    public = {name for name, thing in vars(bayesify).items() if not name.startswith("_")}
    modules = {name for name in public if inspect.ismodule(getattr(bayesify, name))}
    assert set(bayesify.__all__) == public - modules
    assert len(set(bayesify.__all__)) == len(bayesify.__all__)


MAX_LINES = 300


@pytest.mark.parametrize("name", sorted(read_sources()))
def test_files_are_short(name: str) -> None:
    lines = len(read_sources()[name].splitlines())
    assert lines <= MAX_LINES, f"{name} has {lines} lines, over {MAX_LINES}: split it"
