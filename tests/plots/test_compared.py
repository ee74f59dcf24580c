"""Figures that compare runs with each other and with reported results."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest

from bayesify.plots import Curve, curves_compared, pruning_compared
from bayesify.plots.regret import RegretCurves, cumulative_regret

OURS = Curve("ours", [1, 2, 3], [[90.0, 95.0, 96.0], [92.0, 95.0, 98.0]])
PAPER = Curve("paper", [1, 2], [[89.0, 94.0]], reported=True)


def test_a_top_cuts_the_first_epochs_off() -> None:
    curve = Curve.by_epoch("ours", [[50.0, 2.0, 1.0]])
    [ax] = curves_compared({"a": [curve]}, ylabel="error (%)", top=3.0).axes
    assert ax.get_yscale() == "linear"
    assert ax.get_ylim() == pytest.approx((0.9, 3.0))
    for top in (0.5, 1.0):  # no mean lies below it
        [ax] = curves_compared({"a": [curve]}, ylabel="error (%)", top=top).axes
        assert ax.get_ylim()[1] > 50.0


def test_a_band_is_one_standard_error() -> None:
    (ax,) = curves_compared({"Test": [PAPER, OURS]}, ylabel="accuracy (%)").axes
    paper, ours = ax.lines
    assert paper.get_linestyle() == "--"
    assert ours.get_linestyle() == "-"
    assert list(ours.get_ydata()) == [91.0, 95.0, 97.0]
    (band,) = ax.collections  # a single run has none
    (path,) = band.get_paths()
    at_one = path.vertices[path.vertices[:, 0] == 1.0, 1]
    # Of two runs: |a - b| / 2.
    assert (at_one.min(), at_one.max()) == (90.0, 92.0)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("epoch", "accuracy (%)")


def test_a_name_looks_the_same_in_every_panel() -> None:
    other = Curve("other", [1, 2], [[1.0, 2.0]])
    figure = curves_compared({"a": [OURS, other], "b": [other]}, ylabel="y")
    left, right = figure.axes
    assert left.lines[1].get_color() == right.lines[0].get_color() != left.lines[0].get_color()
    assert left.get_ylim() == right.get_ylim()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["ours", "other"]
    figure.savefig(io.BytesIO(), format="png")


@pytest.mark.parametrize(("last", "scale"), [(2.0, "linear"), (200.0, "log")])
def test_the_scale_follows_the_values(last: float, scale: str) -> None:
    figure = curves_compared({"a": [Curve("a", [1, 2, 3], [[1.0, math.nan, last]])]}, ylabel="y")
    assert figure.axes[0].get_yscale() == scale


def test_pruning_has_a_place_for_every_share() -> None:
    ours = Curve("ours", [0.0, 0.5, 0.95, 1.0], [[2.0, 2.1, 3.0, 90.0]] * 3)
    paper = Curve("paper", [0.5, 0.98], [[2.2, 5.0]], reported=True)
    figure = pruning_compared({"2x400": [paper, ours]})
    (ax,) = figure.axes
    labels = [label.get_text() for label in ax.get_xticklabels()]
    assert labels == ["0 %", "50 %", "95 %", "98 %", "100 %"]
    places = ax.get_xticks()
    assert np.all(np.diff(places) > 0.0)
    assert list(ax.lines[0].get_xdata()) == [places[1], places[3]]
    figure.savefig(io.BytesIO(), format="png")


def test_the_regret_axis_leaves_out_the_first_interactions() -> None:
    # The first 0.5 % of 1000 interactions are those before the fifth.
    runs = [[1.0, 2.0, 5.0, 40.0], [1.0, 4.0, 7.0, 60.0]]
    (ax,) = cumulative_regret([RegretCurves("greedy", [1, 4, 5, 1000], runs)]).axes
    assert ax.get_ylim()[0] == pytest.approx(0.8 * 6.0)
    assert not ax.yaxis.get_minorticklocs().size


def test_invalid_curves_raise() -> None:
    with pytest.raises(ValueError, match="at least one curve, got none"):
        curves_compared({}, ylabel="y")
    with pytest.raises(ValueError, match="at least one curve, got none"):
        pruning_compared({})
    with pytest.raises(ValueError, match=r"ours needs at least one run, .* 2 values .* \[1\]"):
        curves_compared({"a": [Curve("ours", [1, 2], [[1.0]])]}, ylabel="y")
    with pytest.raises(ValueError, match=r"got runs of \[\]"):
        curves_compared({"a": [Curve("ours", [1, 2], [])]}, ylabel="y")
