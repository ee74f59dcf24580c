"""The likelihood of binary labels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesify.distributions.likelihoods.likelihood import Likelihood, check_target_rows
from bayesify.prediction import BernoulliPredictive, SizedIterable
from bayesify.prediction.bernoulli import check_labels
from bayesify.prediction.predictive import sum_components

__all__ = ["BernoulliLikelihood"]


class BernoulliLikelihood(Likelihood[BernoulliPredictive]):
    """Binary labels, from logits of shape (S, N) or (S, N, K).

    Targets have the shape of one sample's logits and hold 0 and 1 as booleans, integers or
    floating-point numbers. Several labels of an example are independent given the weights. For two
    exclusive classes this likelihood with one output is equivalent to ``CategoricalLikelihood``
    with two outputs.

    Example:
        >>> BernoulliLikelihood().log_prob(torch.zeros(1, 2), torch.tensor([True, False]))
        tensor([[-0.6931, -0.6931]])
    """

    error_name = "error (%)"

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the labels' log probability, in nats, summed over the labels, shape (S, N)."""
        self._check(outputs, targets)
        sign = 2.0 * targets.to(outputs.dtype) - 1.0
        return sum_components(F.logsigmoid(sign * outputs))

    def predictive(self, outputs: SizedIterable, *, keep_samples: bool) -> BernoulliPredictive:
        """Return the probability of 1 averaged over the weight samples."""
        return BernoulliPredictive.from_logits(outputs, keep_samples=keep_samples)

    def class_log_probs(self, outputs: Tensor) -> Tensor:
        """Return the log probabilities of 0 and of 1, in nats, shape (..., 2)."""
        return torch.stack((F.logsigmoid(-outputs), F.logsigmoid(outputs)), -1)

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the share of wrong labels, in percent."""
        self._check(outputs.unsqueeze(0), targets)
        return 100.0 * ((outputs > 0.0) != targets.to(torch.bool)).to(torch.float64).mean()

    def config(self) -> dict[str, float | int | bool]:
        """Return an empty dict: there are no arguments."""
        return {}

    @staticmethod
    def _check(outputs: Tensor, targets: Tensor) -> None:
        if outputs.dim() < 2:
            raise ValueError(
                "a Bernoulli likelihood needs logits of shape (N,) or (N, K) from the network, "
                f"got {tuple(outputs.shape[1:])}"
            )
        check_target_rows(targets, tuple(outputs.shape[1:]))
        check_labels(targets, tuple(outputs.shape[1:]))
