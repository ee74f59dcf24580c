"""Rows that count more or less than once."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesify.likelihoods import GaussianLikelihood, Likelihood
from bayesify.predictive import Predictive, SizedIterable

__all__ = ["WeightedLikelihood"]


class WeightedLikelihood(Likelihood):
    """A likelihood of which datum i counts ``c_i`` times: p(y_i | x_i, w)^c_i.

    Its targets hold the weights beside them, see :meth:`packed`, so that loaders and training
    steps need know nothing of them. The free energy of N rows is then sum c_i nll_i + KL, that of
    a table in which row i stands ``c_i`` times; losses are means over the N rows, with N the
    ``num_data`` of the objective.

    Args:
        likelihood: of the targets themselves.

    Example:
        >>> from bayesify.likelihoods import CategoricalLikelihood
        >>> targets = WeightedLikelihood.packed(torch.tensor([0, 1]), torch.tensor([2.0, 1.0]))
        >>> WeightedLikelihood(CategoricalLikelihood()).log_prob(torch.zeros(1, 2, 2), targets)
        tensor([[-1.3863, -0.6931]])
    """

    def __init__(self, likelihood: Likelihood) -> None:
        super().__init__()
        self.likelihood = likelihood
        self.error_name = likelihood.error_name
        self._numbers = isinstance(likelihood, GaussianLikelihood)

    @staticmethod
    def packed(targets: Tensor, weights: Tensor) -> Tensor:
        """Targets (N,) or (N, K) with the weights (N,) as a last column, in float64.

        Raises:
            ValueError: the lengths differ, or a weight is not positive and finite.
        """
        if weights.shape != targets.shape[:1]:
            raise ValueError(
                f"weights must be one number for each row, shape ({len(targets)},), got shape "
                f"{tuple(weights.shape)}"
            )
        if not bool(((weights > 0.0) & weights.isfinite()).all()):
            raise ValueError(
                "weights must be positive and finite; leave out the rows of weight 0, and mend "
                "the others"
            )
        columns = targets.to(torch.float64).reshape(len(targets), -1)
        return torch.cat([columns, weights.to(columns).unsqueeze(-1)], dim=-1)

    def _unpacked(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        targets, weights = packed[..., :-1], packed[..., -1]
        # Class indices are exact in float64.
        return (targets if self._numbers else targets.squeeze(-1).long()), weights

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Weight times log p(y | output), in nats, shape (S, N)."""
        plain, weights = self._unpacked(targets)
        return self.likelihood.log_prob(outputs, plain) * weights.to(outputs.dtype)

    def predictive(self, outputs: SizedIterable, *, keep_samples: bool) -> Predictive:
        """That of the likelihood itself."""
        return self.likelihood.predictive(outputs, keep_samples=keep_samples)

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """That of the likelihood itself, each row once."""
        return self.likelihood.error(outputs, self._unpacked(targets)[0])

    def config(self) -> dict[str, float | int | bool]:
        """That of the likelihood itself."""
        return self.likelihood.config()
