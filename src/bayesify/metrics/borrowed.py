"""torchmetrics, imported when it is asked for: it takes seconds, and need not be installed."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["torchmetrics_function"]


def torchmetrics_function(name: str) -> Any:
    """A function of ``torchmetrics.functional.classification``.

    Raises:
        ModuleNotFoundError: torchmetrics is not installed.

    Example:
        >>> torchmetrics_function("binary_auroc").__name__
        'binary_auroc'
    """
    try:
        module = importlib.import_module("torchmetrics.functional.classification")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torchmetrics":
            raise
        raise ModuleNotFoundError(
            "this metric is computed by torchmetrics, which is not installed; install it with "
            "pip install 'bayesify[cli]' or pip install torchmetrics",
            name="torchmetrics",
        ) from error
    return getattr(module, name)
