"""Whether uncertainty tells right from wrong: abstaining, and data of another kind."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesify.metrics.borrowed import torchmetrics_function

__all__ = ["RiskCoverage", "ood_auroc", "risk_coverage"]


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """What is risked by answering only where the uncertainty is at most a threshold.

    All tensors are on the CPU, in float64, of shape (M,): one point for each of the M values that
    the uncertainty takes, ascending, since data of equal uncertainty are answered together.

    Args:
        coverage: share of the data that is answered, from 0 to 1; the last is 1.
        risk: mean loss of those that are answered, in the loss's unit.
        threshold: the uncertainty up to which there is an answer, for ``Predictive.abstain``.
        aurc: area under the curve, in the loss's unit: the mean of the risk over coverages 1/N,
            2/N, ..., 1, those within data of equal uncertainty in the mean over their orders
            (Geifman, Uziel and El-Yaniv 2019, eq. 2). A perfect order has the least.
    """

    coverage: Tensor
    risk: Tensor
    threshold: Tensor
    aurc: float

    def threshold_for(self, risk: float) -> float:
        """The threshold that answers the most data at a risk of at most ``risk``.

        Raises:
            ValueError: there is none.

        Example:
            >>> loss, uncertainty = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.1, 0.4, 0.9])
            >>> round(risk_coverage(uncertainty, loss).threshold_for(risk=0.2), 4)
            0.4
        """
        small = (self.risk <= risk).nonzero()
        if len(small) == 0:
            raise ValueError(
                f"no threshold has a risk of at most {risk}; the least is {float(self.risk.min())}"
            )
        return float(self.threshold[small[-1, 0]])


def risk_coverage(uncertainty: Tensor, loss: Tensor) -> RiskCoverage:
    """The risk-coverage curve of an uncertainty (El-Yaniv and Wiener 2010).

    Choose the threshold on data that were not trained on, and measure its risk on others again.

    Args:
        uncertainty: of each datum, shape (N,), such as ``p.total`` or ``p.epistemic``.
        loss: of each datum's answer, shape (N,), such as ``100.0 * (p.prediction != y)``, whose
            risk is an error in percent, or a squared error.

    Raises:
        ValueError: the shapes are not equal and (N,), there are no data, or something is nan.

    Example:
        >>> curve = risk_coverage(torch.tensor([0.9, 0.1, 0.4]), torch.tensor([1.0, 0.0, 0.0]))
        >>> curve.coverage.tolist()[-1], round(curve.risk.tolist()[-1], 4), round(curve.aurc, 4)
        (1.0, 0.3333, 0.1111)
    """
    scores, losses = _column("uncertainty", uncertainty), _column("loss", loss)
    if len(scores) != len(losses):
        raise ValueError(
            "uncertainty and loss must be of the same data, got shapes "
            f"{tuple(uncertainty.shape)} and {tuple(loss.shape)}"
        )
    threshold, group, counts = scores.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros_like(threshold).index_add_(0, group, losses)
    answered = counts.cumsum(0)
    # In the mean over the orders of a group each of its data has the group's mean loss.
    alike = (sums / counts).repeat_interleave(counts)
    risks = alike.cumsum(0) / torch.arange(1, len(alike) + 1)
    return RiskCoverage(
        answered / len(scores), sums.cumsum(0) / answered, threshold, float(risks.mean())
    )


def ood_auroc(in_scores: Tensor, out_scores: Tensor) -> float:
    """How well a score tells data of another kind from data like the training data.

    The area under the receiver operating characteristic, by torchmetrics: the probability that a
    datum out of the distribution scores higher than one in it, ties counted half. 0.5 is chance.

    Args:
        in_scores: of data like the training data, shape (N,), such as ``p.epistemic``.
        out_scores: of others, shape (M,).

    Returns:
        From 0 to 1.

    Raises:
        ValueError: a shape is not (N,), there are no data, or something is nan.
        ModuleNotFoundError: torchmetrics is not installed.

    Example:
        >>> ood_auroc(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.25, 0.9]))
        0.8333...
    """
    inside, outside = _column("in_scores", in_scores), _column("out_scores", out_scores)
    # As ranks: torchmetrics puts scores that are no probabilities through a sigmoid, which would
    # make ties of great ones.
    _, ranks = torch.cat((inside, outside)).unique(return_inverse=True)
    label = torch.cat((torch.zeros(len(inside)), torch.ones(len(outside)))).long()
    auroc = torchmetrics_function("binary_auroc")
    return float(auroc(ranks.double() / max(1, int(ranks.max())), label))


def _column(name: str, values: Tensor) -> Tensor:
    if values.dim() != 1 or len(values) < 1 or values.is_complex():
        raise ValueError(
            f"{name} must be real numbers of shape (N,) with N of at least 1, got shape "
            f"{tuple(values.shape)} and {values.dtype}; for targets of several parts take one, or "
            "sum over them"
        )
    column = values.detach().double().cpu()
    if bool(column.isnan().any()):
        raise ValueError(
            f"{name} must not be nan, got nan at place {int(column.isnan().nonzero()[0])}"
        )
    return column
