"""Metrics of uncertainty: risk-coverage curve and out-of-distribution AUROC."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesify.metrics.checks import binary_auroc_function
from bayesify.prediction.checks import check_tensors

__all__ = ["RiskCoverage", "ood_auroc", "risk_coverage"]


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """Risk of answering only where the uncertainty is at most a threshold.

    All tensors are on the CPU, in float64, of shape (M,): one point for each of the M distinct
    uncertainties, ascending. Examples of equal uncertainty are answered together.

    Args:
        coverage: share of the examples that are answered, from 0 to 1; the last is 1.
        risk: mean loss of the answered examples, in the loss's unit.
        threshold: largest uncertainty that is answered, for ``Predictive.abstain``.
        aurc: area under the curve, in the loss's unit: the mean of the risk over coverages 1/N,
            2/N, ..., 1; examples of equal uncertainty count as the mean over their orders
            (Geifman, Uziel and El-Yaniv 2019, eq. 2). A perfect order has the smallest area.

    Example:
        >>> curve = risk_coverage(torch.tensor([0.9, 0.1]), torch.tensor([1.0, 0.0]))
        >>> curve.coverage.tolist(), curve.risk.tolist()
        ([0.5, 1.0], [0.0, 0.5])
    """

    coverage: Tensor
    risk: Tensor
    threshold: Tensor
    aurc: float

    def threshold_for(self, risk: float) -> float:
        """Return the threshold that answers the most examples at a risk of at most ``risk``.

        Raises:
            ValueError: no threshold has so low a risk.

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
    """Compute the risk-coverage curve of an uncertainty (El-Yaniv and Wiener 2010).

    Choose the threshold on examples that were not trained on, and measure its risk on other ones.

    Args:
        uncertainty: one value per example, shape (N,), such as ``p.total`` or ``p.epistemic``.
        loss: loss of each prediction, shape (N,), such as ``100.0 * (p.prediction != y)``, whose
            risk is an error in percent, or a squared error.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: the shapes are not equal and (N,), there is no example, or a value is nan.

    Example:
        >>> curve = risk_coverage(torch.tensor([0.9, 0.1, 0.4]), torch.tensor([1.0, 0.0, 0.0]))
        >>> curve.coverage.tolist()[-1], round(curve.risk.tolist()[-1], 4), round(curve.aurc, 4)
        (1.0, 0.3333, 0.1111)
    """
    scores, losses = _column("uncertainty", uncertainty), _column("loss", loss)
    if len(scores) != len(losses):
        raise ValueError(
            "uncertainty and loss must have the same length, got shapes "
            f"{tuple(uncertainty.shape)} and {tuple(loss.shape)}"
        )
    threshold, group, counts = scores.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros_like(threshold).index_add_(0, group, losses)
    answered = counts.cumsum(0)
    # Averaged over the orders of a group, each of its examples has the mean loss of the group.
    alike = (sums / counts).repeat_interleave(counts)
    risks = alike.cumsum(0) / torch.arange(1, len(alike) + 1)
    return RiskCoverage(
        answered.double() / len(scores), sums.cumsum(0) / answered, threshold, float(risks.mean())
    )


def ood_auroc(in_scores: Tensor, out_scores: Tensor) -> float:
    """Return the AUROC with which a score separates out-of-distribution examples.

    The area under the receiver operating characteristic, by torchmetrics: the probability that an
    out-of-distribution example scores higher than an in-distribution one, with ties counted half.
    Chance is 0.5.

    Args:
        in_scores: scores of in-distribution examples, shape (N,), such as ``p.epistemic``.
        out_scores: scores of out-of-distribution examples, shape (M,).

    Returns:
        A number from 0 to 1.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: a shape is not (N,), there is no example, or a value is nan.
        ModuleNotFoundError: torchmetrics is not installed.

    Example:
        >>> ood_auroc(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.25, 0.9]))
        0.8333...
    """
    inside, outside = _column("in_scores", in_scores), _column("out_scores", out_scores)
    # As ranks, because torchmetrics applies a sigmoid to scores that are no probabilities, and
    # large scores would become ties.
    _, ranks = torch.cat((inside, outside)).unique(return_inverse=True)
    label = torch.cat((torch.zeros(len(inside)), torch.ones(len(outside)))).long()
    auroc = binary_auroc_function()
    return float(auroc(ranks.double() / max(1, int(ranks.max())), label))


def _column(name: str, values: Tensor) -> Tensor:
    check_tensors(**{name: values})
    if values.dim() != 1 or len(values) < 1 or values.is_complex():
        raise ValueError(
            f"{name} must be real numbers of shape (N,) with N of at least 1, got shape "
            f"{tuple(values.shape)} and {values.dtype}; for targets of several parts select one or "
            "sum over them"
        )
    column = values.detach().double().cpu()
    if bool(column.isnan().any()):
        raise ValueError(
            f"{name} must not be nan, got nan at place {int(column.isnan().nonzero()[0])}"
        )
    return column
