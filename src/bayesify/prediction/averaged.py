"""The predictive distributions of classes and of labels: averaged probabilities and entropies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from bayesify.prediction.averaging import (
    AveragedProbabilities,
    average_probabilities,
    entropy,
    join_averages,
)
from bayesify.prediction.predictive import (
    Predictive,
    check_joinable,
    check_kind,
    select_samples,
)

__all__ = ["AveragedPredictive"]


@dataclass(frozen=True, eq=False)
class AveragedPredictive(Predictive):
    """A distribution over classes, or over 0 and 1, averaged over weight samples.

    Args:
        log_mean: see ``AveragedProbabilities``, as the others.
        expected_entropy: see there.
        mutual_information: see there.
        log_samples: see there.
    """

    log_mean: Tensor
    expected_entropy: Tensor | None
    mutual_information: Tensor | None
    log_samples: Tensor | None

    @property
    def prediction(self) -> Tensor:
        """The most probable class, or the more probable of 0 and 1, int64, shape (N, ...)."""
        return self.log_mean.argmax(-1)

    @property
    def total(self) -> Tensor:
        """Entropy of the averaged probabilities, in nats, shape (N, ...)."""
        return entropy(self.log_mean)

    @property
    def aleatoric(self) -> Tensor:
        """Entropy averaged over the weight samples, in nats, shape (N, ...)."""
        return self.total if self.expected_entropy is None else self.expected_entropy

    def subset(self, samples: Sequence[int] | Tensor) -> Self:
        """See ``Predictive.subset``."""
        selected = select_samples(self.log_samples, samples)
        return type(self)(*average_probabilities([selected], len(selected), keep_samples=True))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """See ``Predictive.joined``."""
        check_kind(cls, parts)
        check_joinable([tuple(part.mean.shape) for part in parts])
        averages = [
            AveragedProbabilities(p.log_mean, p.expected_entropy, p.epistemic, p.log_samples)
            for p in parts
        ]
        return cls(*join_averages(averages))
