"""Metrics of predictions: error, log loss, calibration, intervals, abstention, distances."""

from bayesify.metrics.calibration import (
    Reliability,
    adaptive_calibration_error,
    calibration_error,
    expected_calibration_error,
    reliability,
)
from bayesify.metrics.classification import brier, classification_metrics, error_percent, nll
from bayesify.metrics.distances import (
    agreement,
    quantile_grid,
    total_variation,
    wasserstein,
    wasserstein_of_samples,
)
from bayesify.metrics.regression import (
    crps,
    interval_coverage,
    interval_width,
    regression_metrics,
)
from bayesify.metrics.selective import RiskCoverage, ood_auroc, risk_coverage
from bayesify.training.binary_kl import binary_kl, binary_kl_inverse
from bayesify.training.certificate import sampled_error

__all__ = [
    "Reliability",
    "RiskCoverage",
    "adaptive_calibration_error",
    "agreement",
    "binary_kl",
    "binary_kl_inverse",
    "brier",
    "calibration_error",
    "classification_metrics",
    "crps",
    "error_percent",
    "expected_calibration_error",
    "interval_coverage",
    "interval_width",
    "nll",
    "ood_auroc",
    "quantile_grid",
    "regression_metrics",
    "reliability",
    "risk_coverage",
    "sampled_error",
    "total_variation",
    "wasserstein",
    "wasserstein_of_samples",
]
