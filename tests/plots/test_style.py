"""Ticks of figures: each label tells its value, and no two of them are alike."""

from __future__ import annotations

import itertools

import pytest
import torch
from matplotlib.axis import Axis

from bayesify.plots import EffectLine, effect_along_axis, learning_curves, predicted_against_true
from bayesify.plots.style import TickFormatter, compact, plain, tick


def check_labels(axis: Axis) -> None:
    """Within a twentieth of the distance of two ticks."""
    values, labels = axis.get_majorticklocs(), [t.get_text() for t in axis.get_majorticklabels()]
    assert len(set(labels)) == len(labels) > 1
    shown = [float(text.replace(",", "").replace("\N{MINUS SIGN}", "-")) for text in labels]
    gap = min(b - a for a, b in itertools.pairwise(values))
    assert max(abs(a - b) for a, b in zip(shown, values, strict=True)) < 0.051 * gap


@pytest.mark.parametrize(("low", "high"), [(250_000.0, 250_900.0), (1012.5, 1014.5), (-0.1, 0.2)])
def test_predictions_in_a_narrow_range(low: float, high: float) -> None:
    truth = torch.linspace(low, high, 50, dtype=torch.float64)
    std = torch.full_like(truth, 0.05 * (high - low))
    figure = predicted_against_true(truth, truth - std, truth + std, truth)
    figure.draw_without_rendering()
    for axis in (figure.axes[0].xaxis, figure.axes[0].yaxis):
        check_labels(axis)


def test_a_column_of_years() -> None:
    line = EffectLine("", [300_100.0, 300_900.0], [300_000.0, 300_800.0], [300_200.0, 301_000.0])
    figure = effect_along_axis([2016.0, 2018.0], [line], title="year", label="price")
    figure.draw_without_rendering()
    for axis in (figure.axes[0].xaxis, figure.axes[0].yaxis):
        check_labels(axis)


def test_a_loss_that_hardly_falls() -> None:
    rows = [{"epoch": i, "loss": 1500.2 - 0.01 * i, "nll": 1500.0 - 0.01 * i} for i in range(30)]
    figure = learning_curves(rows)
    figure.draw_without_rendering()
    check_labels(figure.axes[0].yaxis)


def test_right_labels_stay_short() -> None:
    for values, expected in (
        ([0.0, 250_000.0, 500_000.0], ["0", "250k", "500k"]),
        ([0.1, 1.0, 10.0, 1000.0000000000001], ["0.1", "1", "10", "1,000"]),
        ([-0.5, 0.0], ["\N{MINUS SIGN}0.5", "0"]),
        ([3.0], ["3"]),
        ([], []),
    ):
        assert TickFormatter(tick).format_ticks(values) == expected
    sizes = TickFormatter(lambda value, _: compact(value))
    assert sizes.format_ticks([1e6, 1.0001e6]) == ["1,000,000", "1,000,100"]
    great = TickFormatter(plain).format_ticks([1e9, 1e9 + 0.5])
    assert great == ["1,000,000,000", "1,000,000,000.5"]
