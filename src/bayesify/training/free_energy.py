"""Compare the free energy of a network with that of one whose means are untrained."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from bayesify.distributions.by_group import EmpiricalGaussian
from bayesify.distributions.kl import has_closed_form, kl_divergence
from bayesify.distributions.layout import ParameterLayout
from bayesify.distributions.posteriors import MeanFieldGaussian
from bayesify.distributions.priors import (
    BlockPrior,
    Gaussian,
    Laplace,
    Prior,
    ScaleMixture,
    StudentT,
)
from bayesify.estimators.module_attributes import kept_attributes
from bayesify.estimators.network_state import evaluation_mode
from bayesify.module.edited_inputs import copied
from bayesify.module.inputs import Inputs, arguments_of
from bayesify.noise.keys import NoiseKey, Stream
from bayesify.training.backends.requirements import why_own_code
from bayesify.training.elbo import ELBO

__all__ = [
    "FirstExamples",
    "UntrainedFreeEnergy",
    "free_energy_note",
    "is_above_untrained",
    "untrained_columns",
    "untrained_free_energy",
]

#: Examples and weight samples of the result; the search needs fewer, since it only ranks.
_EXAMPLES, _SAMPLES = 256, range(2, 10)
_SEARCH_EXAMPLES, _SEARCH_SAMPLES = 128, range(2)
#: Standard deviations that are tried, before the best is refined by golden sections.
_GRID = [10.0 ** (-6 + i / 2) for i in range(17)]
_REFINEMENTS = 6
#: Golden sections where only the KL is minimised, which takes little time.
_KL_REFINEMENTS = 22
#: The search holds two samples of all weights, and takes seconds for this many.
_MOST_WEIGHTS = 10_000_000
#: Points of a weight's density where a KL has no closed form.
_POINTS = 4096
_KNOWN_PRIORS = (Gaussian, Laplace, ScaleMixture, StudentT, EmpiricalGaussian)


class FirstExamples:
    """Copies of the first examples of an epoch, in minibatches.

    The last minibatch is cut to the number that is still missing, unless its inputs hold something
    else than tensors with one row per example: it is then kept whole.

    Example:
        >>> first = FirstExamples()
        >>> for _ in range(9):
        ...     first.add(torch.zeros(100, 3), torch.zeros(100))
        >>> [len(targets) for _, targets in first.minibatches], first.are_enough
        ([100, 100, 56], True)
    """

    def __init__(self) -> None:
        self.minibatches: list[tuple[Inputs, Tensor]] = []
        self._missing = _EXAMPLES

    @property
    def are_enough(self) -> bool:
        """True if more would not be kept."""
        return self._missing <= 0

    def add(self, inputs: Inputs, targets: Tensor) -> None:
        """Add the examples of a minibatch that are still missing."""
        if self.are_enough or not isinstance(targets, Tensor) or targets.dim() == 0:
            return  # the training step explains what is wrong with such targets
        if len(targets) > self._missing and _has_rows(inputs, len(targets)):
            count = self._missing
            inputs, targets = tree_map(lambda tensor: tensor[:count], inputs), targets[:count]
        self.minibatches.append((copied(inputs), targets.clone()))
        self._missing -= len(targets)


def _has_rows(inputs: Inputs, count: int) -> bool:
    """Whether all parts of the inputs are tensors with ``count`` rows."""
    return all(
        isinstance(leaf, Tensor)
        and leaf.layout is torch.strided  # others cannot all be cut
        and not leaf.is_nested
        and leaf.dim() > 0
        and len(leaf) == count
        for leaf in tree_leaves(inputs)
    )


def _thinned(minibatches: Sequence[tuple[Inputs, Tensor]]) -> list[tuple[Inputs, Tensor]]:
    """Return every second example, or as few as a search needs, where the inputs can be cut."""
    step = max(1, sum(len(targets) for _, targets in minibatches) // _SEARCH_EXAMPLES)
    return [
        (tree_map(lambda tensor: tensor[::step], inputs), targets[::step])
        if _has_rows(inputs, len(targets))
        else (inputs, targets)
        for inputs, targets in minibatches
    ]


class UntrainedFreeEnergy(NamedTuple):
    """A free energy in nats per example, and the standard error of its estimate."""

    value: float
    error: float


@torch.no_grad()
def untrained_free_energy(
    elbo: ELBO, minibatches: Sequence[tuple[Inputs, Tensor]]
) -> UntrainedFreeEnergy | None:
    """Minimise the free energy over standard deviations, with all means at zero.

    Such a posterior has learnt nothing. Its standard deviations are the better of two choices, each
    found by a search: one number for all weights; or for each weight what costs the least KL, which
    is the prior's own for a Gaussian, and one number for the layer that was registered last.

    A trained posterior whose free energy is above this one explains the data worse, as a bound on
    the evidence, than no training: its KL costs more than its fit gains. The temperature does not
    count; the free energy is always that of the ELBO.

    Args:
        elbo: the objective.
        minibatches: inputs and targets, some hundreds of examples.

    Returns:
        None where the comparison would not be one: for a posterior without standard deviations, a
        prior around other means than zero, a prior or objective of the user's own, and where
        something outside the posterior is trained too, such as the noise of a likelihood. And for
        more than 10 million random weights, of which the search holds two samples.

    Example:
        >>> from bayesify.module.bayesian import BayesianModule
        >>> elbo = ELBO(BayesianModule(torch.nn.Linear(3, 2)), num_data=1000)
        >>> data = [(torch.ones(8, 3), torch.tensor([0, 1] * 4))]
        >>> 0.69 < untrained_free_energy(elbo, data).value < 0.8
        True
    """
    bnn, prior = elbo.bnn, elbo.bnn.weight_prior
    priors = prior.priors if isinstance(prior, BlockPrior) else (prior,)
    if (
        not minibatches
        or bnn.layout.num_weights > _MOST_WEIGHTS
        or why_own_code(elbo) is not None
        or not elbo.has_free_energy
        or bnn.prior_mean is not None
        or any(type(each) not in _KNOWN_PRIORS for each in priors)
        or len([p for p in elbo.parameters() if p.requires_grad]) != 2
    ):
        return None
    owners = _owners(prior, bnn.layout)
    with evaluation_mode(bnn.net):
        return _Search(elbo, minibatches, priors, owners.to(bnn.posterior.mean.device)).result()


#: A choice of standard deviations by one number: the KL per example, and all of them, shape (D,).
_Choice = Callable[[float], tuple[float, Tensor]]


class _Search:
    """The search for standard deviations, on a few weight samples, and its result on others."""

    def __init__(
        self,
        elbo: ELBO,
        minibatches: Sequence[tuple[Inputs, Tensor]],
        priors: Sequence[Prior],
        owners: Tensor,
    ) -> None:
        bnn = elbo.bnn
        self._elbo, self._minibatches, self._priors = elbo, minibatches, priors
        self._searched = _thinned(minibatches)
        levels = (torch.arange(_POINTS, dtype=torch.float64) + 0.5) / _POINTS
        self._quantiles = torch.special.ndtri(levels).unsqueeze(0)
        self._kls: dict[tuple[Prior, float], float] = {}
        self._q = MeanFieldGaussian(torch.zeros_like(bnn.posterior.mean), std=1.0)
        self._q.mask = bnn.posterior.mask
        self._key = NoiseKey(bnn.seed, Stream.DIVERGENCE, elbo.step)
        self._search_noise = self._q.noise(self._key, _SEARCH_SAMPLES)
        last = _last_layer(bnn.layout).to(owners.device)
        kept = torch.ones_like(last) if self._q.mask is None else self._q.mask
        # Unpruned weights of each prior, in the last layer and in the others.
        self._in_last, self._in_others = (
            torch.bincount(owners[kept & layer], minlength=len(priors)).tolist()
            for layer in (last, ~last)
        )
        self._cheapest = [self._cheapest_std(prior) for prior in priors]
        self._last = last
        self._cheapest_stds = self._q.mean.new_tensor(self._cheapest)[owners]

    def result(self) -> UntrainedFreeEnergy | None:
        """The free energy of the better choice, on samples that did not choose it."""
        choices = [self._one_std]
        # The learned width of a group is that of its stds only where these are one number.
        if not any(isinstance(prior, EmpiricalGaussian) for prior in self._priors):
            choices.append(self._one_std_of_last)
        value, std, choice = min(
            ((*self._best(choice), choice) for choice in choices), key=lambda found: found[0]
        )
        if not math.isfinite(value):
            return None
        kl, stds = choice(std)
        each = (self._q.noise(self._key, range(sample, sample + 1)) for sample in _SAMPLES)
        nlls = [self._nll(stds, noise, self._minibatches) for noise in each]
        if not all(map(math.isfinite, nlls)):
            return None
        return UntrainedFreeEnergy(kl + fmean(nlls), stdev(nlls) / len(nlls) ** 0.5)

    def _one_std(self, std: float) -> tuple[float, Tensor]:
        counts = [a + b for a, b in zip(self._in_last, self._in_others, strict=True)]
        each = zip(counts, self._priors, strict=True)
        kl = sum(count * self._kl(prior, std) for count, prior in each)
        return kl, torch.full_like(self._q.mean, std)

    def _one_std_of_last(self, std: float) -> tuple[float, Tensor]:
        each = zip(self._in_last, self._in_others, self._priors, self._cheapest, strict=True)
        kl = sum(
            in_last * self._kl(prior, std) + in_others * self._kl(prior, cheapest)
            for in_last, in_others, prior, cheapest in each
        )
        return kl, torch.where(self._last, std, self._cheapest_stds)

    def _best(self, choice: _Choice) -> tuple[float, float]:
        """The least free energy of a choice, and its number.

        The nll, which costs more than the KL, is computed in the order of the KL; it is hardly
        below that of no noise, so that the search ends where the KL alone exceeds what was found.
        """

        def free_energy(std: float) -> float:
            kl, stds = choice(std)
            total = kl + self._nll(stds, self._search_noise, self._searched)
            return total if math.isfinite(total) else math.inf  # wide weights may overflow

        _, stds = choice(_GRID[0])
        without_noise = self._nll(stds, self._search_noise, self._searched)
        best, place = math.inf, _GRID[0]
        # With the stds of the least KL, which many weights for few examples miss at a high price.
        for kl, std in sorted((choice(std)[0], std) for std in {*_GRID, *self._cheapest}):
            if kl + without_noise >= best:
                break
            value = free_energy(std)
            if value < best:
                best, place = value, std
        return _refined(free_energy, place, _REFINEMENTS)

    def _nll(
        self, stds: Tensor, noise: Tensor, minibatches: Sequence[tuple[Inputs, Tensor]]
    ) -> float:
        """The nll per example under the weights ``stds * noise``, averaged over rows of noise."""
        bnn, mask = self._elbo.bnn, self._q.mask
        kept = stds if mask is None else stds * mask
        total, count = 0.0, 0
        for inputs, targets in minibatches:
            outputs = []
            for row in noise:
                args, kwargs = arguments_of(copied(inputs))  # a network may edit them in place
                with kept_attributes(bnn.net):  # and cache its weights
                    outputs.append(bnn.tensor_of(bnn.run_with(kept * row, *args, **kwargs)))
            total += float(self._elbo.nll(torch.stack(outputs), targets)) * len(targets)
            count += len(targets)
        return total / count

    def _cheapest_std(self, prior: Prior) -> float:
        if type(prior) is Gaussian:
            return prior.std
        grid = min(_GRID, key=lambda std: self._kl(prior, std))
        # An excess in one weight's KL counts for every weight.
        return _refined(lambda std: self._kl(prior, std), grid, _KL_REFINEMENTS)[1]

    def _kl(self, prior: Prior, std: float) -> float:
        """KL of a weight N(0, std^2) to its prior, per example."""
        if isinstance(prior, EmpiricalGaussian):
            return 0.0
        if (prior, std) not in self._kls:
            # By quadrature where there is no closed form.
            points = 1 if has_closed_form(self._q, prior) else _POINTS
            q = MeanFieldGaussian(torch.zeros(points, dtype=torch.float64), std)
            divergence = kl_divergence(q, prior, q.draw(self._quantiles[:, :points]))
            self._kls[prior, std] = float(divergence) / points / self._elbo.num_data
        return self._kls[prior, std]


def _refined(
    function: Callable[[float], float], std: float, refinements: int
) -> tuple[float, float]:
    """Minimise a function near a point of the grid, by golden section over the logarithm."""
    ratio = (math.sqrt(5.0) - 1.0) / 2.0

    def tried(place: float) -> tuple[float, float]:
        return function(math.exp(place)), place

    middle, width = math.log(std), math.log(_GRID[1] / _GRID[0])
    left, right = middle - width, middle + width
    one, two = tried(right - ratio * (right - left)), tried(left + ratio * (right - left))
    found = [tried(middle), one, two]
    for _ in range(refinements):
        # One place of each interval is one of the interval before.
        if one[0] <= two[0]:
            right, two = two[1], one
            one = tried(right - ratio * (right - left))
            found.append(one)
        else:
            left, one = one[1], two
            two = tried(left + ratio * (right - left))
            found.append(two)
    value, place = min(found)
    return value, math.exp(place)


def _owners(prior: Prior, layout: ParameterLayout) -> Tensor:
    """The index of the prior of each weight, shape (D,)."""
    if not isinstance(prior, BlockPrior):
        return torch.zeros(layout.num_weights, dtype=torch.long)
    return torch.tensor(prior.owners).repeat_interleave(torch.tensor(prior.sizes))


def _last_layer(layout: ParameterLayout) -> Tensor:
    """True for the weights of the layer that was registered last, shape (D,)."""
    layers = [name.rpartition(".")[0] for name in layout.names]
    last = torch.tensor([layer == layers[-1] for layer in layers])
    return last.repeat_interleave(torch.tensor(layout.sizes))


def untrained_columns(found: UntrainedFreeEnergy | None) -> dict[str, float | None]:
    """Return the columns of the history for an untrained free energy.

    Example:
        >>> untrained_columns(UntrainedFreeEnergy(2.5, 0.01))
        {'free_energy_untrained': 2.5, 'free_energy_untrained_error': 0.01}
    """
    value, error = (None, None) if found is None else found
    return {"free_energy_untrained": value, "free_energy_untrained_error": error}


def is_above_untrained(row: Mapping[str, float | None]) -> bool:
    """Return True if a row's free energy is above the untrained one by two standard errors.

    Example:
        >>> is_above_untrained({"free_energy": 3.4, "free_energy_untrained": 2.7})
        True
    """
    own, untrained = row.get("free_energy"), row.get("free_energy_untrained")
    if own is None or untrained is None:
        return False
    return own > untrained + 2.0 * (row.get("free_energy_untrained_error") or 0.0)


def free_energy_note(row: Mapping[str, float | None]) -> str | None:
    """Describe the free energy in a row of the history, or return None where it is not known.

    Example:
        >>> free_energy_note({"free_energy": 0.5, "free_energy_untrained": 2.5})
        'free energy 0.50 nats an example; with untrained means it would be 2.50'
    """
    own, untrained = row.get("free_energy"), row.get("free_energy_untrained")
    if own is None or untrained is None:
        return None
    note = f"free energy {own:.2f} nats an example; with untrained means it would be"
    note += f" {untrained:.2f}"
    if is_above_untrained(row):
        note += (
            ". As a bound on the evidence this posterior is worth less than no training: its KL "
            "costs more than its fit gains. Judge its predictions on held-out data; a narrower "
            "prior, a shorter KL warm-up or longer training lowers the free energy"
        )
    return note
