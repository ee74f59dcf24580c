"""Runs that the tests of the command line share; each is trained once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.app.cli.test_cli import BASELINES, TINY, Whole, as_json, bayesify, quick_runs


@pytest.fixture
def quick() -> Iterator[None]:
    """Few test images and no figures."""
    with quick_runs():
        yield


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, which no test changes."""
    place = tmp_path_factory.mktemp("finished") / "run"
    with quick_runs():
        as_json("train", "mnist", "--out", place, *TINY)
    return place


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture(scope="session", params=BASELINES)
def baseline(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A finished run of each baseline, which no test changes."""
    place = tmp_path_factory.mktemp("baseline") / request.param
    with quick_runs():
        said = bayesify("train", "mnist", "--out", place, *BASELINES[request.param])
    return Whole(place, said)
