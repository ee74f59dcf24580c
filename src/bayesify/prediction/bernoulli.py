"""The predictive distribution of binary labels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesify.prediction.averaged import AveragedPredictive
from bayesify.prediction.averaging import average_probabilities
from bayesify.prediction.checks import check_logits, check_tensors
from bayesify.prediction.predictive import (
    KEEP_SAMPLES_HINT,
    SizedIterable,
    blocks_of,
)

__all__ = ["BernoulliPredictive", "check_labels"]


@dataclass(frozen=True, eq=False)
class BernoulliPredictive(AveragedPredictive):
    """The distribution of one or several binary labels for each of N examples.

    Create it with :meth:`from_logits`. Several labels of an example are independent given the
    weights. Uncertainties are those of each single label.

    Args:
        log_mean: logarithm of the averaged probabilities of 0 and of 1, shape (N, ..., 2).
        expected_entropy: entropy averaged over the weight samples, in nats, shape (N, ...); None
            stands for the entropy of ``log_mean``, which it is with one sample.
        mutual_information: mutual information of label and weights, in nats, shape (N, ...).
        log_samples: logarithm of each weight sample's probabilities, shape (S, N, ..., 2), or
            None.

    Example:
        >>> logits = [torch.tensor([9.0, 9.0]), torch.tensor([9.0, -9.0])]
        >>> p = BernoulliPredictive.from_logits(logits)
        >>> p.mean, p.epistemic.round(decimals=4)
        (tensor([0.9999, 0.5000]), tensor([0.0000, 0.6919]))
    """

    log_mean: Tensor
    expected_entropy: Tensor | None
    mutual_information: Tensor
    log_samples: Tensor | None = None

    @classmethod
    def from_logits(
        cls, logits: SizedIterable, *, keep_samples: bool = False
    ) -> BernoulliPredictive:
        """Average sigmoid(logits) over weight samples, each of shape (N, ...).

        The memory does not grow with the number of samples, unless they are kept.

        Raises:
            TypeError: the logits are no floating-point numbers.
            ValueError: there is no sample, or the logits have no axis of examples.
        """
        return cls(
            *average_probabilities(_log_probs(logits), len(logits), keep_samples=keep_samples)
        )

    @property
    def mean(self) -> Tensor:
        """Averaged probability of 1, shape (N, ...)."""
        return self.log_mean[..., 1].exp()

    @property
    def epistemic(self) -> Tensor:
        """Mutual information of label and weights, in nats, shape (N, ...)."""
        return self.mutual_information

    @property
    def samples(self) -> Tensor | None:
        """Probability of 1 of each weight sample, shape (S, N, ...), if they were kept."""
        return None if self.log_samples is None else self.log_samples[..., 1].exp()

    def log_prob(self, targets: Tensor) -> Tensor:
        """Return the log of the joint probability of each example's labels, in nats, shape (N,).

        Several labels of an example share the weights. They are dependent once the weights are
        averaged out, so that their joint probability needs the weight samples.

        Raises:
            TypeError: the targets are no tensor.
            ValueError: the targets do not have the shape of ``mean`` or are not all 0 or 1, or
                there are several labels and the samples were not kept.
        """
        check_tensors(targets=targets)
        check_labels(targets, tuple(self.log_mean.shape[:-1]))
        index = targets.to(torch.int64).unsqueeze(-1)
        labels = targets[0].numel() if len(targets) else 1
        if labels == 1:
            return self.log_mean.gather(-1, index).flatten()
        if self.log_samples is None:
            raise ValueError(
                f"the {labels} labels of an example share the weights, so that their joint "
                f"probability needs the weight samples; {KEEP_SAMPLES_HINT}, or use mean for the "
                "probability of each label"
            )
        index = index.expand(len(self.log_samples), *index.shape)
        parts = self.log_samples.gather(-1, index).flatten(2).sum(-1)
        return parts.logsumexp(0) - math.log(len(parts))

    def quantile(self, q: float) -> Tensor:  # noqa: ARG002
        """Raise TypeError: a binary label has no useful quantiles."""
        raise TypeError("a label that is 0 or 1 has no useful quantiles; use mean, its probability")


def check_labels(targets: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the targets are zeros and ones of this shape.

    Values are checked on the CPU only, and not in compiled code.
    """
    if tuple(targets.shape) != shape:
        raise ValueError(
            f"targets must have the shape of the network's output, {shape}, got "
            f"{tuple(targets.shape)}; nothing is broadcast: use y.unsqueeze(-1) or y.squeeze(-1)"
        )
    if targets.is_complex():
        raise ValueError(f"targets must be 0 or 1, got dtype {targets.dtype}")
    on_cpu = targets.device.type == "cpu" and not torch.compiler.is_compiling()
    if on_cpu and targets.dtype != torch.bool:
        wrong = targets[(targets != 0) & (targets != 1)]
        if wrong.numel():
            raise ValueError(
                f"targets must be 0 or 1, got {wrong[0].item()}; for more than two classes use "
                "CategoricalLikelihood"
            )


def _log_probs(logits: SizedIterable) -> Iterator[Tensor]:
    for block in blocks_of(logits):
        check_logits(block)
        if block.dim() < 2:
            raise ValueError(f"logits must have shape (N, ...), got {tuple(block.shape[1:])}")
        yield torch.stack((F.logsigmoid(-block), F.logsigmoid(block)), -1)
