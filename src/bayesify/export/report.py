"""The result of an export, and the comparison of an exported network with PyTorch's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

__all__ = ["ExportError", "ExportReport", "largest_difference"]


class ExportError(ValueError):
    """A network cannot be exported, or its exported form has other outputs; nothing is written.

    Example:
        >>> import torch
        >>> largest_difference([torch.zeros(2)], {"mean": torch.zeros(3)})
        Traceback (most recent call last):
        bayesify.export.report.ExportError: the exported network's output mean must have shape ...
    """


@dataclass(frozen=True)
class ExportReport:
    """An exported network: its file, and how well it agrees with PyTorch.

    Args:
        path: the file.
        bytes: its size.
        inputs: names of the inputs.
        outputs: names of the outputs.
        largest_difference: from PyTorch's outputs, over all examples, absolute, or relative to an
            output's largest value where that is above 1.
        float_bytes: with int8 weights, the size with weights in floating point.

    Example:
        >>> report = ExportReport(Path("net.onnx"), 9_000, ("x",), ("mean", "total"), 2e-7)
        >>> report.outputs, report.largest_difference < 1e-5
        (('mean', 'total'), True)
    """

    path: Path
    bytes: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    largest_difference: float
    float_bytes: int | None = None


def largest_difference(found: Sequence[Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest difference, absolute or relative to an output's largest value above 1.

    Raises:
        ExportError: an output has another shape, or is not finite where PyTorch's is.

    Example:
        >>> import torch
        >>> largest_difference([torch.tensor([0.5, 1.5])], {"mean": torch.tensor([0.5, 2.0])})
        0.25
    """
    largest = 0.0
    for value, (name, own) in zip(found, expected.items(), strict=True):
        if value.shape != own.shape:
            raise ExportError(
                f"the exported network's output {name} must have shape {tuple(own.shape)}, as in "
                f"PyTorch, got {tuple(value.shape)}"
            )
        if not own.numel():
            continue
        value, wide = value.double(), own.double()
        is_same = (value == wide) | (value.isnan() & wide.isnan())  # infinities may be equal
        difference = (value - wide).abs().where(~is_same, 0.0)
        largest_value = wide.abs().where(wide.isfinite(), 0.0).max()
        worst = float(difference.max()) / max(1.0, float(largest_value))
        if not math.isfinite(worst):
            raise ExportError(f"the exported network's output {name} is not finite as PyTorch's is")
        largest = max(largest, worst)
    return largest
