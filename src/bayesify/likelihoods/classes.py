"""Likelihoods of classes: one of several, or labels that are each 0 or 1."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesify.likelihoods.base import Likelihood
from bayesify.predictive import (
    BernoulliPredictive,
    CategoricalPredictive,
    Predictive,
    SizedIterable,
)
from bayesify.predictive.bernoulli import check_labels

__all__ = ["BernoulliLikelihood", "CategoricalLikelihood"]


class CategoricalLikelihood(Likelihood):
    """One of K classes, from logits of shape (S, N, K); targets are class indices, shape (N,).

    Example:
        >>> outputs = torch.zeros(1, 2, 4)
        >>> CategoricalLikelihood().log_prob(outputs, torch.tensor([0, 3]))
        tensor([[-1.3863, -1.3863]])
    """

    error_name = "error (%)"

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """log softmax of the target's class, in nats, shape (S, N)."""
        self._check(outputs, targets)
        log_probs = outputs.log_softmax(-1)
        index = targets.expand(outputs.shape[:-1]).unsqueeze(-1)
        return log_probs.gather(-1, index).squeeze(-1)

    def predictive(self, outputs: SizedIterable, *, keep_samples: bool) -> Predictive:
        """The average of the class probabilities over the weight samples."""
        return CategoricalPredictive.from_logits(outputs, keep_samples=keep_samples)

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Misclassified, in percent."""
        self._check(outputs.unsqueeze(0), targets)
        return 100.0 * (outputs.argmax(-1) != targets).to(torch.float64).mean()

    def config(self) -> dict[str, float | int | bool]:
        """No arguments."""
        return {}

    @staticmethod
    def _check(outputs: Tensor, targets: Tensor) -> None:
        if outputs.dim() != 3:
            raise ValueError(
                "a categorical likelihood needs logits of shape (N, K) from the network, got "
                f"{tuple(outputs.shape[1:])}"
            )
        if targets.shape != outputs.shape[1:2]:
            raise ValueError(
                f"targets must be class indices of shape ({outputs.shape[1]},), got shape "
                f"{tuple(targets.shape)}; flatten them, or turn one-hot rows into indices with "
                "argmax(-1)"
            )
        if targets.dtype != torch.int64:
            raise ValueError(
                f"targets must be class indices of dtype torch.int64, got {targets.dtype}; "
                "convert them with .long()"
            )
        num_classes = outputs.shape[-1]
        on_cpu = targets.device.type == "cpu" and not torch.compiler.is_compiling()
        if on_cpu and targets.numel():
            low, high = int(targets.min()), int(targets.max())
            if low < 0 or high >= num_classes:
                raise ValueError(
                    f"targets must lie from 0 to {num_classes - 1} (the network has {num_classes} "
                    f"outputs), got {low if low < 0 else high}"
                )


class BernoulliLikelihood(Likelihood):
    """Labels that are each 0 or 1, from their logits of shape (S, N) or (S, N, K).

    Targets have the shape of a sample's logits and hold 0 and 1, boolean, integer or floating
    point. Several labels of a datum are independent for known weights. For two classes that
    exclude each other a network of one output with this likelihood, and one of two with
    ``CategoricalLikelihood``, say the same.

    Example:
        >>> BernoulliLikelihood().log_prob(torch.zeros(1, 2), torch.tensor([True, False]))
        tensor([[-0.6931, -0.6931]])
    """

    error_name = "error (%)"

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """log of the labels' probability, in nats, summed over a datum's labels, shape (S, N)."""
        self._check(outputs, targets)
        sign = 2.0 * targets.to(outputs.dtype) - 1.0
        per_part = F.logsigmoid(sign * outputs)
        return per_part.flatten(2).sum(-1) if per_part.dim() > 2 else per_part

    def predictive(self, outputs: SizedIterable, *, keep_samples: bool) -> Predictive:
        """The average of the probability of 1 over the weight samples."""
        return BernoulliPredictive.from_logits(outputs, keep_samples=keep_samples)

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Labels that are wrong, in percent."""
        self._check(outputs.unsqueeze(0), targets)
        return 100.0 * ((outputs > 0.0) != targets.to(torch.bool)).to(torch.float64).mean()

    def config(self) -> dict[str, float | int | bool]:
        """No arguments."""
        return {}

    @staticmethod
    def _check(outputs: Tensor, targets: Tensor) -> None:
        if outputs.dim() < 2:
            raise ValueError(
                "a Bernoulli likelihood needs logits of shape (N,) or (N, K) from the network, "
                f"got {tuple(outputs.shape[1:])}"
            )
        check_labels(targets, tuple(outputs.shape[1:]))
