"""p(y | x, w): what the network's outputs say about the targets."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from bayesify.predictive import (
    CategoricalPredictive,
    GaussianPredictive,
    Predictive,
    SizedIterable,
    stacked,
)
from bayesify.softplus import inverse_softplus

__all__ = ["CategoricalLikelihood", "GaussianLikelihood", "Likelihood"]


class Likelihood(nn.Module, ABC):
    """A distribution of the target given the network's output.

    Parameters of its own (a learned noise) are point estimates, trained with the rest.

    Example:
        >>> for likelihood in (CategoricalLikelihood(), GaussianLikelihood(std=0.5)):
        ...     print(likelihood.error_name, likelihood.config())
        error (%) {}
        mean squared error {'std': 0.5, 'learn_std': False}
    """

    #: What ``error`` measures, with its unit.
    error_name: str

    @abstractmethod
    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """log p(y | output) of each datum, in nats.

        Args:
            outputs: the network's outputs, shape (S, N, ...).
            targets: shape (N, ...), without sample axis.

        Returns:
            Shape (S, N), summed over the parts of one datum's target.

        Raises:
            ValueError: shapes, dtype or values of the targets do not fit.
        """

    @abstractmethod
    def predictive(self, outputs: SizedIterable, *, keep_samples: bool) -> Predictive:
        """The mixture over weight samples, from one output of shape (N, ...) at a time.

        Args:
            outputs: S tensors, made as they are asked for: each is to be used at once and let go.
            keep_samples: whether the result holds what each says.
        """

    @abstractmethod
    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The error of outputs (N, ...), a mean over N, as a scalar; see ``error_name``.

        Raises:
            ValueError: shapes, dtype or values of the targets do not fit.
        """

    @abstractmethod
    def config(self) -> dict[str, float | int | bool]:
        """The constructor's arguments."""


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


class GaussianLikelihood(Likelihood):
    """y = output + std * noise, independently over the parts of the target.

    Args:
        std: standard deviation of the noise, positive, in units of the target.
        learn_std: whether the noise is trained along, as a point estimate.

    Raises:
        ValueError: std is not positive and finite.

    Example:
        >>> GaussianLikelihood(std=1.0).log_prob(torch.zeros(1, 2, 1), torch.zeros(2, 1))
        tensor([[-0.9189, -0.9189]])
    """

    error_name = "mean squared error"

    def __init__(self, std: float = 1.0, *, learn_std: bool = False) -> None:
        super().__init__()
        if not (std > 0.0 and math.isfinite(std)):
            raise ValueError(f"std must be positive and finite, got {std}")
        self._config: dict[str, float | int | bool] = {"std": std, "learn_std": learn_std}
        self._fixed = torch.tensor(std, dtype=torch.float64)
        self.rho = (
            nn.Parameter(inverse_softplus(self._fixed).to(torch.get_default_dtype()))
            if learn_std
            else None
        )

    @property
    def std(self) -> Tensor:
        """Standard deviation of the noise, a scalar."""
        if self.rho is None:
            return self._fixed
        return nn.functional.softplus(self.rho, threshold=40.0)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """log N(y; output, std^2), in nats, summed over the parts of a target, shape (S, N)."""
        self._check(outputs, targets)
        std = self.std.to(outputs)
        per_part = -0.5 * ((targets - outputs) / std).square() - std.log() - _HALF_LOG_2PI
        return per_part.flatten(2).sum(-1) if per_part.dim() > 2 else per_part

    def predictive(
        self,
        outputs: SizedIterable,
        *,
        keep_samples: bool,  # noqa: ARG002
    ) -> Predictive:
        """The mixture of Gaussians over the weight samples, which it always keeps: S x N numbers.

        Its densities and quantiles are functions of every component, not of mean and variance.
        """
        return GaussianPredictive(stacked(outputs), self.std.detach())

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean squared error, in squared units of the target."""
        self._check(outputs.unsqueeze(0), targets)
        return (outputs - targets).square().mean()

    def config(self) -> dict[str, float | int | bool]:
        """``std`` as given, and ``learn_std``."""
        return dict(self._config)

    @staticmethod
    def _check(outputs: Tensor, targets: Tensor) -> None:
        if targets.shape != outputs.shape[1:]:
            raise ValueError(
                f"targets must have the shape of the network's output, {tuple(outputs.shape[1:])}, "
                f"got {tuple(targets.shape)}; nothing is broadcast: use y.unsqueeze(-1) or "
                "y.squeeze(-1)"
            )


_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
