"""Compare the free energy of a network with that of the best one that ignores the data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from bayesify.distributions.kl import kl_divergence
from bayesify.distributions.layout import ParameterLayout
from bayesify.distributions.posteriors import MeanFieldGaussian
from bayesify.distributions.priors import BlockPrior, Prior
from bayesify.estimators import stateless
from bayesify.module.inputs import Inputs
from bayesify.noise.keys import NoiseKey, Stream
from bayesify.training.elbo import ELBO

__all__ = [
    "FirstExamples",
    "free_energy_ignoring_data",
    "free_energy_remark",
    "is_above_ignorance",
]

#: Examples and weight samples on which a network that ignores the data is measured: its nll hardly
#: depends on which.
_EXAMPLES, _SAMPLES = 256, 2
#: Where a standard deviation is looked for, and in how many steps of golden sections.
_LOWEST, _HIGHEST, _STEPS = 1e-6, 1e2, 12
#: Points of a weight's density where a KL has no closed form.
_POINTS = 4096


class FirstExamples:
    """Keep the first minibatches of an epoch, enough to measure a network that ignores them.

    Example:
        >>> first = FirstExamples()
        >>> for _ in range(9):
        ...     first.add(torch.zeros(100, 3), torch.zeros(100))
        >>> len(first.minibatches), first.are_enough
        (3, True)
    """

    def __init__(self) -> None:
        self.minibatches: list[tuple[Inputs, Tensor]] = []
        self._count = 0

    @property
    def are_enough(self) -> bool:
        """Whether more would not be kept."""
        return self._count >= _EXAMPLES

    def add(self, inputs: Inputs, targets: Tensor) -> None:
        """Add a minibatch unless there are enough examples."""
        if not self.are_enough:
            self.minibatches.append((inputs, targets))
            self._count += len(targets)


@torch.no_grad()
def free_energy_ignoring_data(
    elbo: ELBO, minibatches: Sequence[tuple[Inputs, Tensor]]
) -> float | None:
    """Minimise the free energy over posteriors that do not depend on the data.

    All means are the prior's. The standard deviations are the lower of two choices: one number for
    all weights; or what costs the least KL, which is the prior's own for a Gaussian, but for the
    last layer one number. Each number is found by a line search.

    A trained posterior whose free energy is above this one explains the data worse, as a bound on
    the evidence, than no training: its KL costs more than its fit gains. The temperature does not
    count; the free energy is always that of the ELBO.

    Args:
        elbo: the objective; its network's other parameters stay as they are.
        minibatches: inputs and targets, some hundreds of examples.

    Returns:
        The free energy in nats per example, or None for a posterior without standard deviations.

    Example:
        >>> from bayesify.module.bayesian import BayesianModule
        >>> elbo = ELBO(BayesianModule(torch.nn.Linear(3, 2)), num_data=1000)
        >>> data = [(torch.ones(8, 3), torch.tensor([0, 1] * 4))]
        >>> value = free_energy_ignoring_data(elbo, data)
        >>> math.log(2) < value < math.log(2) + 0.05
        True
    """
    bnn = elbo.bnn
    if not isinstance(bnn.posterior, MeanFieldGaussian) or not minibatches:
        return None
    mean = torch.zeros_like(bnn.posterior.mean) if bnn.prior_mean is None else bnn.prior_mean
    q = MeanFieldGaussian(mean, std=1.0)
    q.mask = bnn.posterior.mask
    last = _last_layer(bnn.layout)
    kept = torch.ones_like(last) if q.mask is None else q.mask
    counts = [_counts(bnn.weight_prior, kept & layer) for layer in (~last, last)]
    cheapest = _minimize(lambda s: _kl(elbo, counts[0], s) + _kl(elbo, counts[1], s), _HIGHEST)
    key, samples = NoiseKey(bnn.seed, Stream.DIVERGENCE, elbo.step), range(_SAMPLES)

    def free_energy(of_last: float, of_others: float) -> float:
        std = torch.where(last, of_last, of_others).double()
        q.rho.copy_(std + torch.log(-torch.expm1(-std)))
        total, count = 0.0, 0
        for inputs, targets in minibatches:
            outputs, _ = bnn.sample_outputs(inputs, key, samples, posterior=q)
            total += float(elbo.nll(outputs, targets)) * len(targets)
            count += len(targets)
        total /= count
        total += _kl(elbo, counts[0], of_others) + _kl(elbo, counts[1], of_last)
        return total if math.isfinite(total) else math.inf  # wide weights may overflow

    with stateless.evaluation_mode(bnn.net):
        common = _minimize(lambda std: free_energy(std, std), cheapest)
        of_last = _minimize(lambda std: free_energy(std, cheapest), cheapest)
        return min(free_energy(common, common), free_energy(of_last, cheapest))


def _last_layer(layout: ParameterLayout) -> Tensor:
    """Whether each weight is of the last layer, shape (D,)."""
    layers = [name.rpartition(".")[0] for name in layout.names]
    last = torch.tensor([layer == layers[-1] for layer in layers])
    return last.repeat_interleave(torch.tensor(layout.sizes))


def _counts(prior: Prior, members: Tensor) -> list[tuple[Prior, int]]:
    """The number of members that each prior covers."""
    if not isinstance(prior, BlockPrior):
        return [(prior, int(members.sum()))]
    parts = zip(prior.priors, prior.parts(members), strict=True)
    return [(each, int(part.sum())) for each, part in parts]


def _kl(elbo: ELBO, counts: Sequence[tuple[Prior, int]], std: float) -> float:
    """KL from the prior of weights around its mean, per example."""
    q = MeanFieldGaussian(torch.zeros(_POINTS, dtype=torch.float64), std)
    levels = (torch.arange(_POINTS, dtype=torch.float64) + 0.5) / _POINTS
    draw = q.draw(torch.special.ndtri(levels).unsqueeze(0))
    # Of one weight, by quadrature where there is no closed form.
    return sum(
        count * float(kl_divergence(q, prior, draw, method=elbo.kl)) / _POINTS / elbo.num_data
        for prior, count in counts
        if count
    )


def _minimize(function: Callable[[float], float], highest: float) -> float:
    """Minimise a function of a standard deviation, by golden section over its logarithm."""
    left, right = math.log(_LOWEST), math.log(highest)
    ratio = (math.sqrt(5.0) - 1.0) / 2.0
    one, two = right - ratio * (right - left), left + ratio * (right - left)
    of_one, of_two = function(math.exp(one)), function(math.exp(two))
    for _ in range(_STEPS):
        if of_one <= of_two:
            right, two, of_two = two, one, of_one
            one = right - ratio * (right - left)
            of_one = function(math.exp(one))
        else:
            left, one, of_one = one, two, of_two
            two = left + ratio * (right - left)
            of_two = function(math.exp(two))
    return math.exp(one if of_one <= of_two else two)


def is_above_ignorance(row: Mapping[str, float | None]) -> bool:
    """Whether a row's free energy is known to be above that of a network that ignores the data.

    Example:
        >>> is_above_ignorance({"free_energy": 3.4, "free_energy_ignoring_data": 2.7})
        True
    """
    own, ignoring = row.get("free_energy"), row.get("free_energy_ignoring_data")
    return own is not None and ignoring is not None and own > ignoring


def free_energy_remark(row: Mapping[str, float | None]) -> str | None:
    """Describe the free energy in a row of the history, or return None where it is not known.

    Example:
        >>> free_energy_remark({"free_energy": 0.5, "free_energy_ignoring_data": 2.5})
        'free energy 0.5000 nats an example; the best network that ignores the data has 2.5000'
    """
    own, ignoring = row.get("free_energy"), row.get("free_energy_ignoring_data")
    if own is None or ignoring is None:
        return None
    remark = (
        f"free energy {own:.4f} nats an example; the best network that ignores the data has "
        f"{ignoring:.4f}"
    )
    if is_above_ignorance(row):
        remark += (
            ". As a bound on the evidence this posterior is worth less than no training: its KL "
            "costs more than its fit gains, so that its predictions must be judged on held-out "
            "data; a narrower prior, a shorter KL warm-up or longer training lowers it "
            "(docs/bound.md)"
        )
    return remark
