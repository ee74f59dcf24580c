"""What training tells whoever watches."""

from __future__ import annotations

import sys
from typing import Protocol

from bayesify.training.history import History, Row

__all__ = ["Callback", "LineProgress"]


class Callback(Protocol):
    """Called by ``fit`` as it goes; a method ``on_note(text)``, if there is one, for remarks."""

    def on_start(self, *, epochs: int, batches: int, history: History) -> None:
        """Training begins: so many epochs of so many minibatches; the rows of those done."""

    def on_step(self, *, epoch: int, batch: int) -> None:
        """A minibatch is done; both count from 0."""

    def on_epoch(self, row: Row) -> None:
        """An epoch is done; its row of the history."""


class LineProgress:
    """One plain line an epoch on standard error."""

    def on_start(self, *, epochs: int, batches: int, history: History) -> None:  # noqa: ARG002
        """Remember the number of epochs."""
        self._epochs = epochs

    def on_note(self, text: str) -> None:
        """Print a remark."""
        print(text, file=sys.stderr)

    def on_step(self, *, epoch: int, batch: int) -> None:
        """Say nothing."""

    def on_epoch(self, row: Row) -> None:
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
