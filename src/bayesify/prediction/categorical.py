"""The predictive distribution over classes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from bayesify.prediction.averaged import AveragedPredictive
from bayesify.prediction.averaging import average_probabilities
from bayesify.prediction.checks import check_logits, check_tensors
from bayesify.prediction.predictive import (
    SizedIterable,
    blocks_of,
    class_indices,
)

__all__ = ["CategoricalPredictive"]


@dataclass(frozen=True, eq=False)
class CategoricalPredictive(AveragedPredictive):
    """A distribution over K classes for each of N examples; create it with :meth:`from_logits`.

    Where an example has a class in each of several positions, such as the tokens of a text, each
    position has its distribution: (N, T, K) stands for (N, K) below, and (N, T) for (N,).

    Args:
        log_mean: logarithm of the averaged class probabilities, shape (N, K).
        expected_entropy: entropy averaged over the weight samples, in nats, shape (N,).
        mutual_information: mutual information of class and weights, in nats, shape (N,). None
            stands for the difference of the two entropies, which has a rounding error.
        log_samples: logarithm of the class probabilities of each weight sample, shape (S, N, K),
            or None.

    Example:
        >>> logits = [torch.tensor([[50.0, 0.0]]), torch.tensor([[0.0, 50.0]])]
        >>> p = CategoricalPredictive.from_logits(logits)
        >>> p.mean.tolist(), round(p.total.item(), 4), round(p.epistemic.item(), 4)
        ([[0.5, 0.5]], 0.6931, 0.6931)
    """

    log_mean: Tensor
    expected_entropy: Tensor | None
    mutual_information: Tensor | None = None
    log_samples: Tensor | None = None

    @classmethod
    def from_logits(cls, logits: SizedIterable, *, keep_samples: bool = False) -> Self:
        """Average softmax(logits) over weight samples, each of shape (N, K).

        The memory does not grow with the number of samples, unless they are kept.

        Raises:
            TypeError: the logits are no floating-point numbers.
            ValueError: there is no sample, or the logits are not of shape (N, K).
        """
        return cls(
            *average_probabilities(_log_probs(logits), len(logits), keep_samples=keep_samples)
        )

    @property
    def mean(self) -> Tensor:
        """Averaged class probabilities, shape (N, K)."""
        return self.log_mean.exp()

    @property
    def epistemic(self) -> Tensor:
        """Mutual information of class and weights, in nats, shape (N,).

        It is the KL divergence of each weight sample's probabilities from their average, averaged
        over the weight samples.
        """
        if self.mutual_information is None:
            return (self.total - self.aleatoric).clamp_min(0.0)
        return self.mutual_information

    @property
    def samples(self) -> Tensor | None:
        """Class probabilities of each weight sample, shape (S, N, K), if they were kept."""
        return None if self.log_samples is None else self.log_samples.exp()

    def log_prob(self, targets: Tensor) -> Tensor:
        """Return the log of the averaged probability of each target's class, in nats, shape (N,).

        Raises:
            TypeError: the targets are no tensor.
            ValueError: the targets are not of shape (N,), no whole numbers, or one is no class.
        """
        check_tensors(targets=targets)
        if targets.shape != self.log_mean.shape[:-1]:
            raise ValueError(
                f"targets must be class indices of shape {tuple(self.log_mean.shape[:-1])}, got "
                f"shape {tuple(targets.shape)}; nothing is broadcast"
            )
        targets = class_indices(targets)
        if targets.numel() and int(targets.min()) < 0:
            raise ValueError(
                f"targets must be class indices from 0, got {int(targets.min())}; leave positions "
                "without a class out, with a mask, or put any class there and drop its result"
            )
        classes = self.log_mean.shape[-1]
        if targets.numel() and int(targets.max()) >= classes:
            raise ValueError(
                f"targets must be class indices from 0 to {classes - 1}, got {int(targets.max())}; "
                "count the classes from 0"
            )
        return self.log_mean.gather(-1, targets.unsqueeze(-1)).squeeze(-1)

    def quantile(self, q: float) -> Tensor:  # noqa: ARG002
        """Raise TypeError: classes have no order."""
        raise TypeError("classes have no order, hence no quantiles; use mean, the probabilities")


def _log_probs(logits: SizedIterable) -> Iterator[Tensor]:
    for block in blocks_of(logits):
        check_logits(block)
        if block.dim() < 3:
            raise ValueError(
                f"logits must have shape (N, K) or (N, ..., K), got {tuple(block.shape[1:])}"
            )
        # The sum of many classes overflows float16.
        wide = torch.promote_types(block.dtype, torch.float32)
        yield torch.log_softmax(block, -1, dtype=wide).to(block.dtype)
