"""A schedule of pruning in training: a fraction of the weights that rises from epoch to epoch."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from bayesify.distributions.structured import StructuredGaussian
from bayesify.module.bayesian import BayesianModule
from bayesify.module.pruning import check_pruning, prune_in_place
from bayesify.noise.arguments import one_number, positive_number, whole_number
from bayesify.training.elbo import ELBO
from bayesify.training.pac_bayes import PACBayesObjective

__all__ = ["PruningSchedule"]


@dataclass(frozen=True)
class PruningSchedule:
    """Prune while :func:`fit` trains: the fraction of pruned weights rises between two epochs.

    After a part r of the way from ``from_epoch`` to ``until_epoch`` the fraction is
    ``fraction * (1 - (1 - r) ** power)`` (Zhu and Gupta 2017, arXiv 1710.01878, equation 1, with an
    initial sparsity of 0). Power 3 is theirs: it removes many weights early, when many are
    superfluous, and few at the end. Power 1 is a straight line.

    Each time, the weights with the lowest |mean| / std of the whole network are removed, as by
    :func:`prune`. The others are trained on under the objective, whose KL no longer counts the
    pruned weights. A pruned weight never returns.

    Args:
        fraction: the fraction of all random weights that is pruned at the end, above 0 and at
            most 1.
        from_epoch: pruning begins after so many epochs, at least 0.
        until_epoch: it ends after so many, above ``from_epoch`` and below the epochs of training.
        power: shape of the rise, positive.
        times_per_epoch: about how often weights are removed in an epoch, at least 1. It is at most
            once a step.
        criterion: ``"snr"``, or ``"magnitude"`` for |mean|, which a point estimate has too.

    Raises:
        TypeError: an argument is no number, or ``times_per_epoch`` no whole one.
        ValueError: an argument is out of its range.

    Example:
        >>> schedule = PruningSchedule(0.9, from_epoch=1, until_epoch=3)
        >>> [round(schedule.fraction_at(step, batches=2), 4) for step in range(8)]
        [0.0, 0.0, 0.0, 0.5203, 0.7875, 0.8859, 0.9, 0.9]
    """

    fraction: float
    from_epoch: float
    until_epoch: float
    power: float = 3.0
    times_per_epoch: int = 4
    criterion: Literal["snr", "magnitude"] = "snr"

    def __post_init__(self) -> None:
        check_pruning(self.fraction, self.criterion)
        if self.fraction == 0.0:
            raise ValueError("fraction must be above 0, got 0; leave out pruning to prune nothing")
        object.__setattr__(self, "power", positive_number("power", self.power))
        for name in ("fraction", "from_epoch", "until_epoch"):
            object.__setattr__(self, name, one_number(name, getattr(self, name)))
        if not 0.0 <= self.from_epoch < self.until_epoch < math.inf:
            raise ValueError(
                "from_epoch must be at least 0 and below until_epoch, got "
                f"from_epoch={self.from_epoch} and until_epoch={self.until_epoch}"
            )
        times = whole_number("times_per_epoch", self.times_per_epoch)
        object.__setattr__(self, "times_per_epoch", times)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings for a checkpoint."""
        return {"pruning": dataclasses.asdict(self)}

    def begin(self, elbo: ELBO, epochs: int, batches: int) -> None:
        """Prepare the objective's network for a training of so many epochs.

        Its posterior gets a mask, if it has none, so that the training backend is one that supports
        pruned networks from the first step on.

        Args:
            elbo: the objective.
            epochs: of training.
            batches: minibatches an epoch.

        Raises:
            ValueError: pruning would not end before training does, the objective is a bound that a
                pruned network has not, or its estimator takes no pruned last layer.
            TypeError: the weights have no std, and the criterion needs one; or a layer's KL
                cannot be computed where some of its weights are pruned.
        """
        if self.until_epoch >= epochs:
            raise ValueError(
                "pruning must end before training does, so that the weights that are left are "
                f"trained on: until_epoch must be below epochs={epochs}, got {self.until_epoch}"
            )
        last, steps = self.last_step(batches), epochs * batches
        if last >= steps:
            raise ValueError(
                "pruning must end before the last step of training, so that the weights that are "
                f"left are trained on, but from_epoch={self.from_epoch} and until_epoch="
                f"{self.until_epoch} end after step {last} of {steps}; lower until_epoch, or "
                "from_epoch too"
            )
        if isinstance(elbo, PACBayesObjective):
            raise ValueError(
                "pruning needs an ELBO, got a PACBayesObjective: its bound does not hold for a "
                "network whose weights are removed by the data; leave out pruning"
            )
        if isinstance(elbo.bnn.posterior, StructuredGaussian):
            elbo.bnn.posterior.check_prunable()
        prune_in_place(elbo.bnn, 0.0, self.criterion)

    def last_step(self, batches: int) -> int:
        """Return the step after which no more is pruned, with so many minibatches an epoch.

        Example:
            >>> PruningSchedule(fraction=0.9, from_epoch=0, until_epoch=1.5).last_step(batches=10)
            15
        """
        return self._steps(batches)[1]

    def fraction_at(self, step: int, batches: int) -> float:
        """The fraction that is pruned before ``step``, from 0, with so many minibatches an epoch.

        It is the formula's; weights are removed only a few times an epoch.
        """
        first, last = self._steps(batches)
        way = min(1.0, max(0.0, (step - first) / (last - first)))
        return float(self.fraction * (1.0 - (1.0 - way) ** self.power))

    def is_due(self, step: int, batches: int) -> bool:
        """Whether weights are removed before ``step``.

        Example:
            >>> schedule = PruningSchedule(0.9, from_epoch=1, until_epoch=2, times_per_epoch=2)
            >>> [step for step in range(12) if schedule.is_due(step, batches=4)]
            [6, 8]
        """
        first, last = self._steps(batches)
        interval = max(1, batches // self.times_per_epoch)
        return first < step <= last and ((step - first) % interval == 0 or step == last)

    def prune(self, bnn: BayesianModule, optimizer: Optimizer, step: int, batches: int) -> None:
        """Remove the weights that are due before ``step`` of a training.

        Args:
            bnn: the network, which is pruned in place.
            optimizer: of its parameters; gradients and averages of the pruned weights are set to
                zero.
            step: the step that comes next, from 0.
            batches: minibatches an epoch.
        """
        if not self.is_due(step, batches):
            return
        prune_in_place(bnn, self.fraction_at(step, batches), self.criterion)
        _forget_pruned(bnn, optimizer)

    def _steps(self, batches: int) -> tuple[int, int]:
        """The step before which pruning begins, and that before which it ends."""
        first = math.ceil(self.from_epoch * batches)
        return first, max(first + 1, math.ceil(self.until_epoch * batches))


@torch.no_grad()
def _forget_pruned(bnn: BayesianModule, optimizer: Optimizer) -> None:
    """Set gradients and the optimiser's averages to zero where a weight is pruned.

    Momentum would otherwise move the mean of a pruned weight away from zero, as would the gradients
    of minibatches that share a step with the next ones.
    """
    posterior = bnn.posterior
    assert posterior.mask is not None
    gone = ~posterior.mask
    for name in posterior.names_by_weight():
        parameter = posterior.get_parameter(name)
        for value in (parameter.grad, *optimizer.state.get(parameter, {}).values()):
            if isinstance(value, torch.Tensor) and value.shape[:1] == gone.shape:
                value[gone] = 0.0  # of a low-rank factor the rows
