"""A fixture that the tests of trunks share."""

from __future__ import annotations

import pytest


@pytest.fixture
def trunks_of_small_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks that are too small to save time have a trunk too."""
    monkeypatch.setattr("bayesify.module.trunk._LEAST_SAVING", -1e9)
