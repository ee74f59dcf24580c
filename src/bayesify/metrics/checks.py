"""Checks and imports that the metrics share."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from bayesify.noise.arguments import whole_number
from bayesify.prediction.checks import check_sums, check_tensors

__all__ = ["binary_auroc_function", "check_probabilities"]


def check_probabilities(
    probs: Tensor,
    targets: Tensor,
    *,
    logarithms: bool = False,
    num_bins: int = 1,
    name: str | None = None,
) -> None:
    """Check that ``probs`` are class probabilities and ``targets`` class indices.

    Errors call the probabilities by ``name``; None stands for ``probs`` or ``log_probs``.

    Raises:
        TypeError: one is no tensor, or ``num_bins`` no whole number.
        ValueError: shapes, dtypes or values are invalid, or ``num_bins`` is below 1.
    """
    name = name or ("log_probs" if logarithms else "probs")
    check_tensors(**{name: probs, "targets": targets})
    if probs.dim() != 2 or probs.shape[0] < 1 or probs.shape[1] < 2:
        fix = f"; flatten it: {name}.flatten(0, -2), and targets.flatten()"
        raise ValueError(
            f"{name} must have shape (N, K) with N of at least 1 and K of at least 2, got "
            f"{tuple(probs.shape)}{fix * (probs.dim() > 2)}"
        )
    if not probs.dtype.is_floating_point:
        raise ValueError(f"{name} must be floating point, got {probs.dtype}")
    if targets.shape != probs.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"targets must be class indices of shape ({probs.shape[0]},) and dtype torch.int64, "
            f"got shape {tuple(targets.shape)} and {targets.dtype}"
        )
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or high >= probs.shape[1]:
        raise ValueError(
            f"targets must lie from 0 to {probs.shape[1] - 1}, for {name} has {probs.shape[1]} "
            f"classes, got {low if low < 0 else high}"
        )
    whole_number("num_bins", num_bins)
    check_sums(name, probs, logarithms=logarithms)


def binary_auroc_function() -> Any:
    """Import ``torchmetrics.functional.classification.binary_auroc``.

    The import takes seconds and torchmetrics is optional, so that it is imported on use.

    Raises:
        ModuleNotFoundError: torchmetrics is not installed.
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
    return module.binary_auroc
