"""Runs that the tests of the service share; each is trained once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.app.cli.test_cli import TINY, bayesify, quick_runs
from tests.app.cli.test_folders import QUICK as QUICK_IMAGES
from tests.app.cli.test_folders import write_images
from tests.app.cli.test_tables import TABLES, trained

from bayesify.app.runs import Run
from bayesify.app.serve.limits import ServiceLimits
from bayesify.app.serve.run_model import RunModel
from bayesify.app.serve.service import make_app

Client = Callable[..., TestClient]


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """500 held-out images."""
    with quick_runs():
        yield


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of digits, one of a folder of images, and one of each kind of table."""
    place = tmp_path_factory.mktemp("served")
    found = {"digits": place / "digits", "folder": place / "folder"}
    with quick_runs():
        assert bayesify("train", "mnist", "--out", found["digits"], *TINY).code == 0
        write_images(place / "photos")
        said = bayesify("train", place / "photos", "--out", found["folder"], *QUICK_IMAGES)
        assert said.code == 0, said.err
    for name, text in TABLES.items():
        (place / name).mkdir()
        trained(place / name, text)
        found[name] = place / name / "run"
    return found


@pytest.fixture(scope="session")
def models(runs: dict[str, Path]) -> dict[str, RunModel]:
    """The served models of these runs."""
    found = {}
    with quick_runs():
        for name, folder in runs.items():
            run = Run.open(folder)
            found[name] = RunModel(run, run.load_module(), num_samples=16, level=0.9, coverage=0.95)
    return found


@pytest.fixture
def client(models: dict[str, RunModel]) -> Iterator[Client]:
    """A client of a kind of model; a file of tests may have models of its own."""
    opened = []

    def make(kind: str, **limits: Any) -> TestClient:
        found = TestClient(
            make_app(models[kind], ServiceLimits(**limits)), raise_server_exceptions=False
        )
        found.__enter__()
        opened.append(found)
        return found

    yield make
    for each in opened:
        each.__exit__(None, None, None)
