"""Fixtures of the experiments' tests."""

from typing import Any

import pytest
from tests.app.cli.test_cli import few_images
from tests.killable import epochs_done

from bayesify.datasets import ImageData

__all__ = ["epochs_done", "few_test_images"]


@pytest.fixture
def few_test_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """500 test images: a quick run would predict 10,000 of them for longer than it trains."""

    def few(name: str, *_: Any, limit: int | None = None, **__: Any) -> ImageData:
        return few_images(name, limit)

    monkeypatch.setattr("bayesify.reproduce.harness.image_runs.load_images", few)
