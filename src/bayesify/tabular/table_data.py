"""Table as tensors, ready for training; importing this needs no pandas."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bayesify.tabular.censoring import Limits

if TYPE_CHECKING:  # pandas takes its time to load
    from bayesify.tabular.streaming.encoded import EncodedRows

__all__ = ["TableData"]


@dataclass(frozen=True, eq=False)
class TableData:
    """Table as tensors, in a training and a held-out part."""

    #: Name of the file.
    name: str
    #: (N, D) float32.
    train_inputs: Tensor
    #: (N,) int64 class indices, or (N, 1) float32 numbers: counts, others standardised; of censored
    #: numbers (N, 1, 2) bounds.
    train_targets: Tensor
    #: How far each row lies outside the training data, (N,) float64; see ``outside.widened``.
    train_distances: Tensor
    #: (N_test, D) float32.
    test_inputs: Tensor
    #: As ``train_targets``.
    test_targets: Tensor
    #: (N_test,) float64.
    test_distances: Tensor
    #: Labels of the classes; none for regression.
    class_names: tuple[str, ...]
    #: The target is ``shift + scale * standardised target``.
    shift: float = 0.0
    scale: float = 1.0
    #: What training's targets alone tell of a row, as ``Target.marginal``.
    marginal: tuple[float, ...] = ()
    #: Cells of the first column of texts in the held-out rows, if the table has one.
    test_texts: tuple[str, ...] = ()
    #: Limits between which numbers were recorded, in the unit of the target.
    limits: Limits = field(default_factory=Limits)
    #: Name of the likelihood, as in ``Target``.
    likelihood: str = ""
    #: The file of all training rows of a table that is streamed, of which those here are a sample.
    stream: EncodedRows | None = None
    #: Inputs are not images.
    image_shape: None = None

    @property
    def num_train(self) -> int:
        """Number of rows that the network is trained on."""
        return len(self.train_targets) if self.stream is None else self.stream.num_rows

    def numbers(self, targets: Tensor) -> Tensor:
        """Return some of the targets as recorded numbers in their own unit, float64, (N, 1)."""
        if self.limits.are_open:
            return targets.double() * self.scale + self.shift
        numbers = self.limits.recorded(targets).double() * self.scale + self.shift
        lower, upper = targets.unbind(-1)
        # Exactly the limits: those in float32 are rounded.
        numbers = torch.where(lower.isinf(), self.limits.below, numbers)
        return torch.where(upper.isinf(), self.limits.above, numbers)
