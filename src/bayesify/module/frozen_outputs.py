"""The outputs of a frozen network: predictions and uncertainties from tensor operations only."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bayesify.distributions.likelihoods import (
    BernoulliLikelihood,
    CategoricalLikelihood,
    GaussianLikelihood,
    Likelihood,
    OrdinalLikelihood,
)
from bayesify.distributions.precision import WideModule, at_least_float32

__all__ = ["ClassOutputs", "NumberOutputs", "frozen_head"]

#: The bracket of a quantile, as wide as the weight samples disagree, is divided into parts, of
#: which one is the next bracket: 8 parts in 8 steps are 24 bisections in a third of the operations.
_PARTS, _STEPS = 8, 8
#: The least level of a quantile; of lesser ones float32 resolves too little of the tail.
LEAST = 1e-4
#: The logarithm that stands for that of 0: its exponential is 0 in every dtype.
_LOG_ZERO = -1e4


class ClassOutputs(NamedTuple):
    """The prediction of classes for N examples, in the shapes of a ``Predictive``.

    Args:
        mean: averaged probabilities, shape (N, K); of binary labels the probability of 1, (N, ...).
        total: entropy of the averaged probabilities, in nats, (N,), of binary labels (N, ...).
        epistemic: mutual information of class and weights, in nats, shape as ``total``.
    """

    mean: Tensor
    total: Tensor
    epistemic: Tensor


class NumberOutputs(NamedTuple):
    """The prediction of numbers for N examples.

    Args:
        mean: mean of the target, shape (N, ...).
        std: standard deviation of the target, noise included, in its units, shape (N, ...).
        quantiles: quantiles of the target, shape (N, ..., Q).
        epistemic: variance of the mean over the weight samples, in squared units, shape (N, ...).
    """

    mean: Tensor
    std: Tensor
    quantiles: Tensor
    epistemic: Tensor


class _ClassHead(nn.Module):
    """Average the class probabilities of S weight samples."""

    def __init__(self, likelihood: Likelihood) -> None:
        super().__init__()
        self.likelihood = copy.deepcopy(likelihood)
        self.is_binary = isinstance(likelihood, BernoulliLikelihood)

    def forward(self, outputs: Tensor) -> ClassOutputs:
        assert isinstance(
            self.likelihood, CategoricalLikelihood | BernoulliLikelihood | OrdinalLikelihood
        )
        wide = at_least_float32(outputs)
        # A probability of 0, as where a network masks its logits, adds nothing, to gradients too.
        log_probs = self.likelihood.class_log_probs(wide).clamp_min(_LOG_ZERO)
        log_mean = log_probs.logsumexp(0) - math.log(len(log_probs))
        mean = log_mean.exp()
        # KL(sample || average), averaged: exact where the samples nearly agree, as a difference of
        # two entropies is not.
        divergence = (log_probs.exp() * (log_probs - log_mean)).sum(-1).mean(0)
        total = -(mean * log_mean).sum(-1)
        return ClassOutputs(
            mean[..., 1] if self.is_binary else mean,
            total.clamp_min(0.0),
            divergence.clamp_min(0.0),
        )


class _NumberHead(WideModule):
    """Average S Gaussians: moments, and quantiles by dividing a bracket.

    In half precision a level near 1 would become 1, whose quantile is the top of the bracket.
    """

    levels: Tensor
    standard: Tensor
    places: Tensor

    def __init__(self, likelihood: GaussianLikelihood, quantiles: Sequence[float]) -> None:
        super().__init__()
        self.likelihood = copy.deepcopy(likelihood)
        levels = torch.tensor(list(quantiles), dtype=torch.float64)
        self.register_buffer("levels", levels)
        self.register_buffer("standard", torch.special.ndtri(levels))
        self.register_buffer("places", torch.arange(1.0, _PARTS))

    def forward(self, outputs: Tensor) -> NumberOutputs:
        wide = at_least_float32(outputs)
        locations, scale = self.likelihood.location_and_scale(wide)
        mean = locations.mean(0)
        epistemic = (locations - mean).square().mean(0)
        std = (epistemic + scale.square().expand_as(locations).mean(0)).sqrt()
        return NumberOutputs(mean, std, self._quantiles(locations, scale), epistemic)

    def _quantiles(self, locations: Tensor, scale: Tensor) -> Tensor:
        found = self._by_brackets(locations.detach(), scale.detach())
        if not (locations.requires_grad or scale.requires_grad):
            return found
        # Each component moves the quantile by its share of the density there: the gradient of the
        # root of the mixture's cdf. The value is the one that was found.
        locations, scale = locations.unsqueeze(-1), scale.unsqueeze(-1)
        standard = ((found - locations) / scale).detach()
        shares = (-0.5 * standard.square() - scale.detach().log()).softmax(0)
        return (shares * (locations + scale * standard)).sum(0)

    def _by_brackets(self, locations: Tensor, scale: Tensor) -> Tensor:
        # The mixture's quantile lies between the smallest and the largest of the components'.
        levels, standard = self.levels.to(locations), self.standard.to(locations)
        locations, scale = locations.unsqueeze(-1), scale.unsqueeze(-1)
        components = locations + scale * standard
        low = components.amin(0)
        width = components.amax(0) - low
        locations, spread = locations.unsqueeze(-1), scale.unsqueeze(-1) * math.sqrt(2.0)
        for _ in range(_STEPS):
            width = width / _PARTS
            points = low.unsqueeze(-1) + width.unsqueeze(-1) * self.places.to(low)
            below = 0.5 + 0.5 * torch.erf((points - locations) / spread).mean(0)
            passed = (below < levels.unsqueeze(-1)).sum(-1)
            low = low + width * passed.to(low)
        return low + 0.5 * width


def frozen_head(likelihood: Likelihood, quantiles: Sequence[float]) -> nn.Module:
    """Return the module that turns outputs of S weight samples, (S, N, ...), into a prediction.

    Args:
        likelihood: the likelihood of the network; it is copied.
        quantiles: the levels of the quantiles of numbers, at least one.

    Raises:
        TypeError: the prediction under this likelihood needs more than tensor operations, or the
            levels are no numbers.
        ValueError: a level lies outside of 0.0001 to 0.9999, or there is none.

    Example:
        >>> head = frozen_head(CategoricalLikelihood(), ())
        >>> mean, total, epistemic = head(torch.tensor([[[50.0, 0.0]], [[0.0, 50.0]]]))
        >>> mean, total, epistemic
        (tensor([[0.5000, 0.5000]]), tensor([0.6931]), tensor([0.6931]))
        >>> head = frozen_head(GaussianLikelihood(std=0.5), quantiles=(0.05, 0.95))
        >>> head(torch.tensor([[[-1.0]], [[1.0]]])).quantiles
        tensor([[[-1.6408,  1.6408]]])
    """
    if isinstance(likelihood, CategoricalLikelihood | BernoulliLikelihood | OrdinalLikelihood):
        return _ClassHead(likelihood)
    if not isinstance(likelihood, GaussianLikelihood):
        raise TypeError(
            "a network can be frozen with a likelihood of classes, or a Gaussian one, got "
            f"{type(likelihood).__name__}, whose quantiles are no tensor operations; use predict"
        )
    try:
        levels = tuple(float(level) for level in quantiles)
    except TypeError as error:
        raise TypeError(f"quantiles must be a sequence of levels, got {quantiles!r}") from error
    if not levels or not all(LEAST <= level <= 1.0 - LEAST for level in levels):
        raise ValueError(
            f"quantiles must be at least one level from {LEAST:g} to {1.0 - LEAST:g}, such as "
            f"(0.025, 0.5, 0.975), got {levels}; bnn.predict has those farther out"
        )
    return _NumberHead(likelihood, levels)
