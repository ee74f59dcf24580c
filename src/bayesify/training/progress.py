"""Progress of training: the callback interface, and one line per epoch."""

from __future__ import annotations

import sys
from typing import Protocol

from bayesify.training.history import EpochRow, History

__all__ = ["Callback", "LineProgress"]


class Callback(Protocol):
    """An object that ``fit`` calls.

    An optional method ``on_note(text)`` receives remarks, and another, ``on_warning(text)``, what
    would be a ``ConvergenceWarning`` otherwise.
    """

    def on_start(self, *, epochs: int, batches: int, history: History) -> None:
        """Training begins; ``history`` holds the rows of the epochs before a resume."""

    def on_step(self, *, epoch: int, batch: int) -> None:
        """A minibatch is finished; both indices count from 0."""

    def on_epoch(self, row: EpochRow) -> None:
        """An epoch is finished; ``row`` is its row of the history."""


class LineProgress:
    """Print one line per epoch to standard error."""

    def on_start(self, *, epochs: int, batches: int, history: History) -> None:  # noqa: ARG002
        """Remember the number of epochs."""
        self._epochs = epochs

    def on_note(self, text: str) -> None:
        """Print a remark."""
        print(text, file=sys.stderr)

    def on_step(self, *, epoch: int, batch: int) -> None:
        """Print nothing."""

    def on_epoch(self, row: EpochRow) -> None:
        """Print the row."""
        parts = [f"epoch {row['epoch']:.0f}/{self._epochs}"]
        for name, form in (
            ("loss", ".4f"),
            ("nll", ".4f"),
            ("kl", ",.0f"),
            ("train_error", ".2f"),
            ("validation_error", ".2f"),
        ):
            value = row.get(name)
            if value is not None:
                parts.append(f"{name.replace('_', ' ')} {value:{form}}")
        print("  ".join(parts), file=sys.stderr)
