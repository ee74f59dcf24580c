"""The data of a run, whatever they are: inputs and targets in two parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

__all__ = ["RunData"]


class RunData(Protocol):
    """Training and test data, as ``ImageData`` and ``TableData`` have them."""

    @property
    def name(self) -> str:
        """What reports call the data."""

    @property
    def train_inputs(self) -> Tensor:
        """(N, D) float32."""

    @property
    def train_targets(self) -> Tensor:
        """(N,) int64 class indices, or (N, 1) float32 standardised numbers."""

    @property
    def test_inputs(self) -> Tensor:
        """(N_test, D) float32."""

    @property
    def test_targets(self) -> Tensor:
        """As ``train_targets``."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """What each class is called; none for numbers."""

    @property
    def image_shape(self) -> Sequence[int] | None:
        """Height and width, where inputs are images."""
