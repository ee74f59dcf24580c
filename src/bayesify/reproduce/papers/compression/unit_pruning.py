"""Pruning of whole units in training, on the schedule by which weights are pruned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from bayesify.distributions.posteriors import GaussianPosterior
from bayesify.module.bayesian import BayesianModule
from bayesify.training.pruning_schedule import PruningSchedule

__all__ = ["UnitPruning", "prune_units", "unit_scores"]


@dataclass(frozen=True)
class UnitPruning(PruningSchedule):
    """Prune weights as ``PruningSchedule`` does, and whole units at the same times.

    The network is a chain of linear layers and convolutions. A unit is an input of a layer
    together with the output of the layer before it from which it comes; its score is the sum over
    its weights of log(1 + mean^2 / std^2) / 2, their information in nats. The units with the lowest
    scores are removed: their number rises as the fraction of pruned weights does.

    Args:
        units: number of units that each layer keeps of its inputs, at least 1. After the flattening
            of a convolution's output a unit is a channel.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> UnitPruning(0.9, from_epoch=1, until_epoch=3, units=(97, 71, 33)).units
        (97, 71, 33)
    """

    units: Sequence[int] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "units", tuple(self.units))
        if not self.units or min(self.units) < 1:
            raise ValueError(f"units must be at least 1 for each layer, got {self.units}")

    def prune(self, bnn: BayesianModule, optimizer: Optimizer, step: int, batches: int) -> None:
        """Remove the units and weights that are due before ``step`` of a training."""
        if self.is_due(step, batches):
            prune_units(bnn, self.units, self.fraction_at(step, batches) / self.fraction)
        super().prune(bnn, optimizer, step, batches)


@torch.no_grad()
def unit_scores(bnn: BayesianModule) -> list[Tensor]:
    """Return the information of the units that feed each layer, in nats; one vector for each layer.

    Example:
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Conv2d(1, 3, 5), nn.Flatten(), nn.Linear(12, 2))
        >>> [len(scores) for scores in unit_scores(BayesianModule(net))]
        [1, 3]
    """
    posterior = bnn.posterior
    assert isinstance(posterior, GaussianPosterior)
    nats = torch.log1p((posterior.masked_mean / posterior.full_std).square()) / 2.0
    return [
        torch.stack([view.sum(dim=(0, 2)) for view in views]).sum(dim=0)
        for views in _by_unit(bnn, nats)
    ]


@torch.no_grad()
def prune_units(bnn: BayesianModule, units: Sequence[int], part: float = 1.0) -> None:
    """Prune units of the lowest scores, in place.

    Args:
        bnn: a chain of linear layers and convolutions.
        units: number of units that each layer keeps of its inputs in the end.
        part: the part of the others that is removed now, from 0 to 1.

    Raises:
        ValueError: there is not one number for each layer.

    Example:
        >>> from torch import nn
        >>> bnn = BayesianModule(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
        >>> prune_units(bnn, (4, 1)); int(bnn.posterior.mask.sum())
        9
    """
    posterior = bnn.posterior
    scores = unit_scores(bnn)
    if len(units) != len(scores):
        raise ValueError(
            f"units must have one number for each of {len(scores)} layers, got {len(units)}"
        )
    if posterior.mask is None:
        posterior.mask = torch.ones_like(posterior.mean, dtype=torch.bool)
    for score, views, kept in zip(scores, _by_unit(bnn, posterior.mask), units, strict=True):
        count = round(part * max(0, len(score) - kept))
        dead = score.argsort(stable=True)[:count]
        for view in views:
            view[:, dead] = False
    posterior.mean.masked_fill_(~posterior.mask, 0.0)


def _by_unit(bnn: BayesianModule, flat: Tensor) -> list[list[Tensor]]:
    """Return views of a flat vector for each layer, each of shape (rows, units, weights).

    They are the layer's own weights, then weights and biases of the layer before it.
    """
    tensors = bnn.layout.unflatten(flat)
    found: list[list[Tensor]] = []
    before: list[Tensor] = []
    for tensor in tensors.values():
        if tensor.dim() == 1:
            before.append(tensor.view(1, -1, 1))
            continue
        units = before[0].shape[1] if before else tensor.shape[1]
        found.append([tensor.view(len(tensor), units, -1), *before])
        before = [tensor.view(1, len(tensor), -1)]
    return found
