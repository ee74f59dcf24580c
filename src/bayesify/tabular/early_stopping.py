"""Callbacks of an estimator's training: count its steps, and stop where held-out rows say so."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayesify.module.bayesian import BayesianModule
from bayesify.training.history import EpochRow, History
from bayesify.training.progress import NoProgress

__all__ = ["EarlyStopping", "NoProgressError", "StepCounter"]


class StepCounter(NoProgress):
    """Count steps, and remember whether ``fit`` warned.

    Example:
        >>> counter = StepCounter()
        >>> counter.on_step(epoch=1, batch=1)
        >>> counter.steps, counter.has_not_converged
        (1, False)
    """

    steps = 0
    has_not_converged = False

    def on_warning(self, text: str) -> None:  # noqa: ARG002
        """Remember it."""
        self.has_not_converged = True

    def on_step(self, *, epoch: int, batch: int) -> None:  # noqa: ARG002
        """Count it."""
        self.steps += 1


class NoProgressError(Exception):
    """The nll of the held-out rows has not improved for the epochs of patience."""


class EarlyStopping(StepCounter):
    """Keep the parameters with the lowest nll of held-out rows; stop without progress.

    Args:
        bnn: the network in training.
        patience: epochs without progress.
        warm: steps of the warm-up, in which the objective is not yet the ELBO.

    Raises:
        NoProgressError: within training, after ``patience`` epochs without progress.

    Example:
        >>> bnn = BayesianModule(torch.nn.Linear(3, 2))
        >>> stopping, mean = EarlyStopping(bnn, patience=2, warm=0.0), bnn.posterior.mean
        >>> before = mean.detach().clone()
        >>> stopping.on_epoch({"validation_nll": 0.5})
        >>> with torch.no_grad():
        ...     _ = mean.add_(1.0)
        >>> stopping.on_epoch({"validation_nll": 0.6})
        >>> stopping.restore_best()
        >>> torch.equal(mean, before)
        True
    """

    def __init__(self, bnn: BayesianModule, patience: int, warm: float) -> None:
        self._bnn, self._patience, self._warm = bnn, patience, warm
        self._best, self._stale = math.inf, 0
        self._state: list[Tensor] | None = None
        self.rows: History = []

    def on_epoch(self, row: EpochRow) -> None:
        """Compare the nll of the held-out rows with the lowest."""
        self.rows.append(row)
        if self.steps < self._warm:
            return
        nll = row["validation_nll"]
        assert nll is not None
        if self._state is None or nll < self._best:
            self._best, self._stale = nll, 0
            self._state = [value.detach().clone() for value in self._bnn.parameters()]
            return
        self._stale += 1
        if self._stale >= self._patience:
            raise NoProgressError

    @torch.no_grad()
    def restore_best(self) -> None:
        """Put the best parameters back."""
        if self._state is not None:
            for value, best in zip(self._bnn.parameters(), self._state, strict=True):
                value.copy_(best)
