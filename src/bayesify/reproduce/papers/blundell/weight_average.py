"""Average a posterior's parameters over the last epochs of a run."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from bayesify.io import read_tensors
from bayesify.module.bayesian import BayesianModule
from bayesify.training.checkpoint import CHECKPOINT_NAME

__all__ = ["TrajectoryMean"]

_AVERAGED = ("posterior.mean", "posterior.rho")


class TrajectoryMean:
    """Averages mean and rho over the checkpoints of a run's last epochs.

    Izmailov et al. 2018 average weights in this way. For small standard deviations the average of
    rho is their geometric mean.

    Args:
        epochs: number of epochs of the run.
        last: the part of the epochs to average, from 0 to 1; at least the last epoch is used.

    Example:
        >>> TrajectoryMean(epochs=10, last=0.25).first
        8
    """

    def __init__(self, epochs: int, last: float) -> None:
        self.first = min(epochs - 1, round(epochs * (1.0 - last)))
        self._epoch, self._count = 0, 0
        self._sums: dict[str, Tensor] = {}

    def add(self, folder: Path) -> None:
        """Add the epoch whose checkpoint is in ``folder``."""
        self._epoch += 1
        if self._epoch <= self.first:
            return
        tensors, _ = read_tensors(folder / CHECKPOINT_NAME)
        for name in _AVERAGED:
            value = tensors[name].double()
            self._sums[name] = self._sums[name] + value if self._count else value
        self._count += 1

    @torch.no_grad()
    def install(self, bnn: BayesianModule) -> None:
        """Set the network's parameters to the averages.

        Raises:
            ValueError: no epoch was averaged.
        """
        if not self._count:
            raise ValueError("an average needs the checkpoint of at least one epoch, got none")
        parameters = dict(bnn.named_parameters())
        for name, total in self._sums.items():
            parameters[name].copy_(total / self._count)
