"""Fixtures of the experiments' tests."""

from typing import Any

import pytest
from tests.app.cli.test_cli import few_images
from tests.killable import epochs_done

from bayesify.datasets import ImageData

__all__ = ["epochs_done", "few_test_images"]

#: The modules of experiments that load images by their name.
LOADING = (
    "harness.image_runs",
    "papers.blundell.bound",
    "papers.blundell.comparison",
    "papers.blundell.ensemble",
    "papers.koca_dittmann",
)


@pytest.fixture
def few_test_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """500 test images: a quick run would predict 10,000 of them for longer than it trains."""

    def few(name: str, *_: Any, limit: int | None = None, **__: Any) -> ImageData:
        return few_images(name, limit)

    for module in LOADING:
        monkeypatch.setattr(f"bayesify.reproduce.{module}.load_images", few)
