"""Data that a run is trained and measured on, of any kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from bayesify.tabular.table_data import TableData

__all__ = ["RunData", "num_train"]


class RunData(Protocol):
    """Training and test data of a run (``ImageData``, ``FolderData``, ``TableData``)."""

    @property
    def name(self) -> str:
        """Name of the data in reports."""

    @property
    def train_inputs(self) -> Tensor:
        """(N, D) float32."""

    @property
    def train_targets(self) -> Tensor:
        """(N,) int64 class indices, or numbers as in ``TableData``."""

    @property
    def test_inputs(self) -> Tensor:
        """(N_test, D) float32."""

    @property
    def test_targets(self) -> Tensor:
        """As ``train_targets``."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes; none for numbers."""

    @property
    def image_shape(self) -> Sequence[int] | None:
        """Height and width of an image, or channels, height and width; None for tables."""


def num_train(data: RunData) -> int:
    """Return the number of examples that a run is trained on; a streamed table has few in memory.

    Example:
        >>> import torch
        >>> no, x, y = torch.zeros(0), torch.zeros(3, 2), torch.zeros(3, 1)
        >>> num_train(TableData("t.csv", x, y, no, no, no, no, ()))
        3
    """
    return data.num_train if isinstance(data, TableData) else len(data.train_targets)
