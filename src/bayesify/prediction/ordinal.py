"""The predictive distribution over ordered classes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesify.prediction.categorical import CategoricalPredictive
from bayesify.prediction.checks import check_level

__all__ = ["OrdinalPredictive"]


@dataclass(frozen=True, eq=False)
class OrdinalPredictive(CategoricalPredictive):
    """A distribution over K ordered classes for each of N examples, with quantiles.

    Example:
        >>> logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
        >>> p = OrdinalPredictive.from_logits([logits.unsqueeze(0)])
        >>> p.prediction, p.quantile(0.5), p.interval(0.9)
        (tensor([3]), tensor([2]), (tensor([0]), tensor([3])))
    """

    def quantile(self, q: float) -> Tensor:
        """Return the first class up to which the probabilities sum to at least q, int64, (N,).

        The median, ``quantile(0.5)``, minimises the expected distance in classes. Equal-tailed
        intervals from these quantiles hold their level or more.

        Raises:
            TypeError: q is not one number.
            ValueError: q is not strictly between 0 and 1, or a probability is NaN.
        """
        check_level("q", q)
        probs = self.log_mean.double().exp()
        wrong = probs.isnan().flatten(1).any(1)
        if bool(wrong.any()):
            raise ValueError(
                "quantiles are classes, which need probabilities that are numbers, got nan for "
                f"example {int(wrong.nonzero()[0])}; correct its inputs"
            )
        # Logarithms round, so that four probabilities of a quarter do not sum to 1/2 after two.
        rounding = min(16.0 * torch.finfo(self.log_mean.dtype).eps, 0.01)
        # Sums from the nearer end, since the sum from the other end rounds to 1.
        if q <= 0.5:
            is_before = probs.cumsum(-1) < q * (1.0 - rounding)
        else:
            is_before = probs.flip(-1).cumsum(-1).flip(-1)[..., 1:] > (1.0 - q) * (1.0 + rounding)
        return is_before.sum(-1).clamp(max=probs.shape[-1] - 1)
