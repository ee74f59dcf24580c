"""A fixture that the tests of trunks share."""

from __future__ import annotations

import pytest


@pytest.fixture
def trunks_of_small_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks that are too small to save time have a trunk too."""
    monkeypatch.setattr("bayesify.module.trunk._LEAST_SAVING", -1e9)


@pytest.fixture(params=[True, False], ids=["compared", "not compared"])
def compared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the second sample is compared with a whole pass, which hides other faults."""
    if not request.param:
        monkeypatch.setattr("bayesify.module.sampling._are_close", lambda *_: True)
    return bool(request.param)
