"""The likelihood of ordered classes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.distributions.likelihoods.likelihood import Likelihood, check_target_rows
from bayesify.distributions.precision import wide_default_dtype
from bayesify.distributions.softplus import inverse_softplus, softplus
from bayesify.noise.arguments import whole_number
from bayesify.prediction import OrdinalPredictive, SizedIterable

__all__ = ["OrdinalLikelihood"]


class OrdinalLikelihood(Likelihood[OrdinalPredictive]):
    """One of K ordered classes, such as grades: the cumulative logit (proportional odds) model.

    The network has one output f for each example, shape (N, 1); targets are class indices from 0 to
    K - 1, shape (N,). With thresholds c_1 < ... < c_(K-1),

        P(y <= k) = sigmoid(c_(k+1) - f),  log p(y = k) = log(P(y <= k) - P(y <= k - 1)),

    in nats, so that a greater output makes higher classes more probable. The thresholds are point
    estimates that are trained with the other parameters; their distances are softplus of
    parameters, so that they stay in order. At the start all classes are equally probable where the
    output is 0.

    Args:
        num_classes: K, at least 2.

    Raises:
        ValueError: ``num_classes`` is below 2.

    Example:
        >>> likelihood = OrdinalLikelihood(4)
        >>> likelihood.log_prob(torch.zeros(1, 2, 1), torch.tensor([0, 3])).exp()
        tensor([[0.2500, 0.2500]], grad_fn=<ExpBackward0>)
        >>> likelihood.thresholds.detach().round(decimals=4)
        tensor([-1.0986,  0.0000,  1.0986])
    """

    error_name = "error (%)"

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = whole_number("num_classes", num_classes, None)
        if self.num_classes < 2:
            raise ValueError(
                f"num_classes must be at least 2, got {num_classes}; count the classes that "
                "targets can have"
            )
        shares = torch.arange(1, self.num_classes, dtype=torch.float64) / self.num_classes
        starts, dtype = shares.logit(), wide_default_dtype()
        self.first = nn.Parameter(starts[:1].to(dtype))
        self.gaps = nn.Parameter(inverse_softplus(starts.diff()).to(dtype))

    @property
    def thresholds(self) -> Tensor:
        """c_1 < ... < c_(K-1), where neighbouring classes meet, in units of the output."""
        return torch.cat([self.first, self.first + softplus(self.gaps).cumsum(0)])

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the log probability of the target's class, in nats, shape (S, N)."""
        self._check(outputs, targets)
        index = targets.expand(outputs.shape[:2]).unsqueeze(-1)
        return self.class_log_probs(outputs).gather(-1, index).squeeze(-1)

    def predictive(self, outputs: SizedIterable, *, keep_samples: bool) -> OrdinalPredictive:
        """Return the class probabilities averaged over the weight samples."""
        with torch.no_grad():
            log_probs = _Mapped(outputs, self)
            return OrdinalPredictive.from_logits(log_probs, keep_samples=keep_samples)

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the share of examples whose most probable class is wrong, in percent."""
        self._check(outputs.unsqueeze(0), targets)
        is_wrong = self.class_log_probs(outputs).argmax(-1) != targets
        return 100.0 * is_wrong.to(torch.float64).mean()

    def config(self) -> dict[str, float | int | bool]:
        """Return ``num_classes``."""
        return {"num_classes": self.num_classes}

    def class_log_probs(self, outputs: Tensor) -> Tensor:
        """Return the log probabilities of all classes, in nats, (..., K), from outputs (..., 1).

        With b > a, sigmoid(b) - sigmoid(a) = sigmoid(b) sigmoid(-a) (1 - exp(a - b)). With
        b - a = softplus(gap) the last factor is sigmoid(gap): no difference is left.
        """
        distances = self.thresholds.to(outputs) - outputs
        below, above = F.logsigmoid(distances), F.logsigmoid(-distances)
        between = below[..., 1:] + above[..., :-1] + F.logsigmoid(self.gaps.to(outputs))
        return torch.cat([below[..., :1], between, above[..., -1:]], dim=-1)

    def _check(self, outputs: Tensor, targets: Tensor) -> None:
        self._check_outputs(tuple(outputs.shape[1:]))
        if targets.shape != outputs.shape[1:2]:
            check_target_rows(targets, tuple(outputs.shape[1:2]))
            raise ValueError(
                f"targets must be class indices of shape {tuple(outputs.shape[1:2])}, got shape "
                f"{tuple(targets.shape)}; flatten them with squeeze(-1)"
            )
        if targets.dtype != torch.int64:
            raise ValueError(
                f"targets must be class indices of dtype torch.int64, got {targets.dtype}; "
                "convert them with .long()"
            )
        on_cpu = targets.device.type == "cpu" and not torch.compiler.is_compiling()
        if on_cpu and targets.numel():
            low, high = int(targets.min()), int(targets.max())
            if low < 0 or high >= self.num_classes:
                raise ValueError(
                    f"targets must lie from 0 to {self.num_classes - 1} (num_classes="
                    f"{self.num_classes}), got {low if low < 0 else high}; number the classes "
                    "from 0 in their order"
                )

    @staticmethod
    def _check_outputs(shape: tuple[int, ...]) -> None:
        if len(shape) != 2 or shape[1] != 1:
            raise ValueError(
                "an ordinal likelihood needs one output for each example from the network, shape "
                f"(N, 1), got {shape}; end it with nn.Linear(..., 1)"
            )


class _Mapped:
    """The log probabilities of each weight sample, computed on iteration."""

    def __init__(self, outputs: SizedIterable, likelihood: OrdinalLikelihood) -> None:
        self._outputs, self._likelihood = outputs, likelihood

    def __len__(self) -> int:
        return len(self._outputs)

    def __iter__(self) -> Iterator[Tensor]:
        for sample in self._outputs:
            self._likelihood._check_outputs(tuple(sample.shape))
            yield self._likelihood.class_log_probs(sample)
