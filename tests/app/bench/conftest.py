"""A quiet machine for all tests of the bench, unless they say otherwise."""

from __future__ import annotations

import pytest

from bayesify.app.bench import measuring, timing
from bayesify.app.cli import bench_command


class Disturbances:
    """Stands in for ``Watch``: the first few blocks of rounds are disturbed."""

    seconds = 1.0  # longer than a block, so that each round is one

    def __init__(self, count: int = 0) -> None:
        self.left = count

    def __call__(self) -> Disturbances:
        return self

    @property
    def is_disturbed(self) -> bool:
        self.left -= 1
        return self.left >= 0


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "Watch", Disturbances())
    monkeypatch.setattr(bench_command, "Watch", Disturbances())
    monkeypatch.setattr(measuring, "is_unsteady", lambda *_: False)
