"""Table as tensors, ready for training; importing this needs no pandas."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["TableData"]


@dataclass(frozen=True, eq=False)
class TableData:
    """Table as tensors, in a training and a held-out part."""

    #: Name of the file.
    name: str
    #: (N, D) float32.
    train_inputs: Tensor
    #: (N,) int64 class indices, or (N, 1) float32 numbers, standardised.
    train_targets: Tensor
    #: How far each row lies outside the training data, (N,) float64; see ``outside.widened``.
    train_distances: Tensor
    #: (N_test, D) float32.
    test_inputs: Tensor
    #: (N_test,) or (N_test, 1).
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
    #: Inputs are not images.
    image_shape: None = None
