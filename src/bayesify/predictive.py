"""What a Bayesian network answers: the predictive distribution and its uncertainty, split."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sized
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["CategoricalPredictive", "GaussianPredictive", "Predictive", "SizedIterable", "stacked"]


class SizedIterable(Sized, Iterable[Tensor], Protocol):
    """Tensors of which the number is known: a list, or some that are made as they are asked for."""


def stacked(tensors: SizedIterable) -> Tensor:
    """One tensor of all, each put in its place as it comes: ``torch.stack`` would hold them twice.

    Raises:
        ValueError: there are none.

    Example:
        >>> stacked([torch.zeros(2), torch.ones(2)])
        tensor([[0., 0.],
                [1., 1.]])
    """
    stack: Tensor | None = None
    for index, tensor in enumerate(tensors):
        if stack is None:
            stack = tensor.new_empty((len(tensors), *tensor.shape))
        stack[index] = tensor
    if stack is None:
        raise ValueError("at least one weight sample is needed, got none")
    return stack


class Predictive(ABC):
    """The predictive distribution p(y | x) of N data: a mixture over S weight samples.

    ``total = aleatoric + epistemic``. Aleatoric uncertainty is the noise that stays however much
    is known of the weights; epistemic uncertainty is what knowing the weights would remove.

    Example:
        >>> p = GaussianPredictive(torch.tensor([[-1.0], [1.0]]), torch.tensor(0.5))
        >>> p.total, p.interval(0.9)
        (tensor([1.2500]), (tensor([-1.6408]), tensor([1.6408])))
    """

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """Class probabilities (N, K), or the mean of the target (N, ...)."""

    @property
    @abstractmethod
    def total(self) -> Tensor:
        """Entropy in nats (N,), or the variance of the target (N, ...)."""

    @property
    @abstractmethod
    def aleatoric(self) -> Tensor:
        """The part of ``total`` expected for known weights."""

    @property
    @abstractmethod
    def epistemic(self) -> Tensor:
        """The part of ``total`` that comes from not knowing the weights."""

    @property
    @abstractmethod
    def samples(self) -> Tensor | None:
        """What each weight sample says, shape (S, N, ...), if it was kept."""

    @abstractmethod
    def log_prob(self, targets: Tensor) -> Tensor:
        """log p(y | x) of the mixture, in nats, shape (N,)."""

    @abstractmethod
    def quantile(self, q: float) -> Tensor:
        """The q-quantile of the target, the shape of ``mean``."""

    def interval(self, level: float) -> tuple[Tensor, Tensor]:
        """The equal-tailed interval that holds the target with probability ``level``.

        Raises:
            ValueError: level is not strictly between 0 and 1.
        """
        if not 0.0 < level < 1.0:
            raise ValueError(f"level must lie strictly between 0 and 1, got {level}")
        return self.quantile(0.5 - 0.5 * level), self.quantile(0.5 + 0.5 * level)


@dataclass(frozen=True, eq=False)
class CategoricalPredictive(Predictive):
    """A distribution over K classes for each of N data.

    Args:
        log_mean: logarithm of the averaged class probabilities, shape (N, K).
        expected_entropy: entropy averaged over the weight samples, in nats, shape (N,).
        sampled: class probabilities of each weight sample, shape (S, N, K), or None.

    Example:
        >>> logits = [torch.tensor([[50.0, 0.0]]), torch.tensor([[0.0, 50.0]])]
        >>> p = CategoricalPredictive.from_logits(logits)
        >>> p.mean.tolist(), round(p.total.item(), 4), round(p.epistemic.item(), 4)
        ([[0.5, 0.5]], 0.6931, 0.6931)
    """

    log_mean: Tensor
    expected_entropy: Tensor
    sampled: Tensor | None = None

    @classmethod
    def from_logits(
        cls, logits: SizedIterable, *, keep_samples: bool = False
    ) -> CategoricalPredictive:
        """Average softmax(logits) over weight samples, one tensor of shape (N, K) at a time.

        What it holds does not grow with their number, unless the samples are kept.

        Raises:
            ValueError: there is no sample, or the logits are not of shape (N, K).
        """
        log_sum: Tensor | None = None
        entropy_sum: Tensor | None = None
        kept: Tensor | None = None
        for index, sample in enumerate(logits):
            if sample.dim() != 2:
                raise ValueError(f"logits must have shape (N, K), got {tuple(sample.shape)}")
            log_probs = sample.log_softmax(-1)
            if keep_samples:
                if kept is None:
                    kept = log_probs.new_empty((len(logits), *log_probs.shape))
                kept[index] = log_probs.exp()
            entropy = _entropy(log_probs)
            if log_sum is None or entropy_sum is None:
                log_sum, entropy_sum = log_probs, entropy
                continue
            # In the log domain, so that a class that no sample believes in has a finite nll. In
            # place, unless the result is to be differentiated.
            out = None if log_probs.requires_grad or log_sum.requires_grad else log_sum
            log_sum = torch.logaddexp(log_sum, log_probs, out=out)
            entropy_sum = entropy_sum + entropy
        if log_sum is None or entropy_sum is None:
            raise ValueError("at least one weight sample is needed, got none")
        return cls(log_sum - math.log(len(logits)), entropy_sum / len(logits), kept)

    @property
    def mean(self) -> Tensor:
        """Averaged class probabilities, shape (N, K)."""
        return self.log_mean.exp()

    @property
    def total(self) -> Tensor:
        """Entropy of the averaged probabilities, in nats, shape (N,)."""
        return _entropy(self.log_mean)

    @property
    def aleatoric(self) -> Tensor:
        """Entropy averaged over the weight samples, in nats, shape (N,)."""
        return self.expected_entropy

    @property
    def epistemic(self) -> Tensor:
        """Mutual information of class and weights, in nats, shape (N,)."""
        return self.total - self.aleatoric

    @property
    def samples(self) -> Tensor | None:
        """Class probabilities of each weight sample, shape (S, N, K), if they were kept."""
        return self.sampled

    def log_prob(self, targets: Tensor) -> Tensor:
        """log of the averaged probability of each target's class, in nats, shape (N,).

        Raises:
            ValueError: the targets are not of shape (N,).
        """
        if targets.shape != self.log_mean.shape[:1]:
            raise ValueError(
                f"targets must be class indices of shape {tuple(self.log_mean.shape[:1])}, got "
                f"shape {tuple(targets.shape)}; nothing is broadcast"
            )
        return self.log_mean.gather(-1, targets.unsqueeze(-1)).squeeze(-1)

    def quantile(self, q: float) -> Tensor:  # noqa: ARG002
        """Raises TypeError: classes have no order."""
        raise TypeError("classes have no order, hence no quantiles; use mean, the probabilities")


@dataclass(frozen=True, eq=False)
class GaussianPredictive(Predictive):
    """An equal mixture of S Gaussians for each part of each target.

    Args:
        means: the network's output under each weight sample, shape (S, N, ...).
        noise_std: standard deviation of the noise, broadcastable to ``means``.

    Example:
        >>> p = GaussianPredictive(torch.tensor([[[-1.0]], [[1.0]]]), torch.tensor(0.5))
        >>> p.mean.item(), p.aleatoric.item(), p.epistemic.item()
        (0.0, 0.25, 1.0)
    """

    means: Tensor
    noise_std: Tensor

    @property
    def mean(self) -> Tensor:
        """Mean of the target, shape (N, ...)."""
        return self.means.mean(0)

    @property
    def total(self) -> Tensor:
        """Variance of the target, by the law of total variance, shape (N, ...)."""
        return self.aleatoric + self.epistemic

    @property
    def aleatoric(self) -> Tensor:
        """Variance of the noise, averaged over the weight samples, shape (N, ...)."""
        # Squared before it is expanded, which would make S x N numbers of one.
        return self.noise_std.to(self.means).square().expand_as(self.means).mean(0)

    @property
    def epistemic(self) -> Tensor:
        """Variance of the network's output over the weight samples, shape (N, ...)."""
        return self.means.var(0, correction=0)

    @property
    def samples(self) -> Tensor | None:
        """The network's output under each weight sample, shape (S, N, ...)."""
        return self.means

    @property
    def _noise_std(self) -> Tensor:
        return self.noise_std.to(self.means).expand_as(self.means)

    def log_prob(self, targets: Tensor) -> Tensor:
        """log density of the mixture, in nats, summed over the parts of a target, shape (N,).

        Raises:
            ValueError: the targets do not have the shape of ``mean``.
        """
        if targets.shape != self.means.shape[1:]:
            raise ValueError(
                f"targets must have shape {tuple(self.means.shape[1:])}, got "
                f"{tuple(targets.shape)}; nothing is broadcast"
            )
        density = torch.distributions.Normal(self.means, self._noise_std)
        per_part: Tensor = density.log_prob(targets)
        joint = per_part.flatten(2).sum(-1) if per_part.dim() > 2 else per_part
        return joint.logsumexp(0) - math.log(len(self.means))

    def quantile(self, q: float) -> Tensor:
        """The q-quantile of the mixture of each part, by bisection, shape (N, ...).

        Raises:
            ValueError: q is not strictly between 0 and 1.
        """
        if not 0.0 < q < 1.0:
            raise ValueError(f"q must lie strictly between 0 and 1, got {q}")
        # From the nearer end, since 1 - q and the distribution function round to 1 far out.
        sign, tail = (1.0, q) if q <= 0.5 else (-1.0, 1.0 - q)
        std = self._noise_std
        component = self.means + sign * std * torch.special.ndtri(self.means.new_tensor(tail))
        low: Tensor = component.amin(0)
        high: Tensor = component.amax(0)
        for _ in range(60):
            middle = 0.5 * (low + high)
            distance = sign * (self.means - middle) / std
            beyond = 0.5 * torch.erfc(distance * math.sqrt(0.5)).mean(0)
            below = beyond < tail if sign > 0.0 else beyond > tail
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return 0.5 * (low + high)


def _entropy(log_probs: Tensor) -> Tensor:
    # entr(0) = 0, also where log p is -inf.
    probs = log_probs.exp()
    entropy: Tensor = torch.special.entr(probs, out=None if probs.requires_grad else probs).sum(-1)
    return entropy
