"""Figures of a run: learning curves, calibration, pruning, weights and single images.

Every function takes plain data and returns a :class:`matplotlib.figure.Figure`. None of them uses
pyplot, so that no global state is changed.
"""

# First, because it names the missing extra where matplotlib is not installed.
from bayesify.plots.style import COLOURS, STYLE, Record  # isort: skip
from bayesify.plots.compared import Curve, curves_compared, pruning_compared
from bayesify.plots.curves import learning_curves, pruning_curve, reliability_diagram
from bayesify.plots.effects import (
    EffectLine,
    effect_along_axis,
    effect_of_levels,
    importance_bars,
)
from bayesify.plots.gallery import digit_gallery, votes_gallery
from bayesify.plots.intervals import interval_coverage, predicted_against_true, residuals
from bayesify.plots.uncertainty import (
    epistemic_histogram,
    epistemic_histograms,
    risk_coverage_curve,
)
from bayesify.plots.weights import snr_density_and_cdf, weight_densities, weight_posteriors

__all__ = [
    "COLOURS",
    "STYLE",
    "Curve",
    "EffectLine",
    "Record",
    "curves_compared",
    "digit_gallery",
    "effect_along_axis",
    "effect_of_levels",
    "epistemic_histogram",
    "epistemic_histograms",
    "importance_bars",
    "interval_coverage",
    "learning_curves",
    "predicted_against_true",
    "pruning_compared",
    "pruning_curve",
    "reliability_diagram",
    "residuals",
    "risk_coverage_curve",
    "snr_density_and_cdf",
    "votes_gallery",
    "weight_densities",
    "weight_posteriors",
]
