"""Figures of bands and of results next to reported ones."""

from __future__ import annotations

import io

import pytest

from bayesify.plots.bands import Band, bands
from bayesify.plots.compared import comparison

AXIS = [0.0, 0.5, 1.0]
BAND = Band("wide", AXIS, {0.25: [0.0, -1.0, -2.0], 0.5: [0.0] * 3, 0.75: [0.0, 1.0, 2.0]})
LINE = Band("line", AXIS, {0.5: [0.0, 0.1, 0.2]})


def test_bands_share_their_axes_and_one_legend() -> None:
    drawn = bands([BAND, LINE], data=([0.1, 0.2], [1.0, 3.0]), truth=[0.0, 1.0, 0.0])
    left, right = drawn.axes
    assert left.get_ylim() == right.get_ylim() == pytest.approx((-0.4, 4.4))
    assert len(left.collections) == 1
    assert not right.collections  # a line has no band
    (legend,) = drawn.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "data",
        "without noise",
        "median prediction",
        "interquartile range",
    ]
    drawn.savefig(io.BytesIO(), format="png")


def test_bands_of_other_levels_are_named() -> None:
    quantiles = {0.025: [-3.0] * 3, **BAND.quantiles, 0.975: [3.0] * 3}
    drawn = bands([BAND._replace(quantiles=quantiles)], limits=(-4.0, 4.0))
    assert drawn.axes[0].get_ylim() == (-4.0, 4.0)
    assert "95 %" in {text.get_text() for text in drawn.legends[0].get_texts()}


def test_bands_say_what_is_missing() -> None:
    with pytest.raises(ValueError, match="at least one method"):
        bands([])
    with pytest.raises(ValueError, match=r"wide must have the median"):
        bands([BAND._replace(quantiles={0.25: [0.0] * 3, 0.75: [0.0] * 3})])
    with pytest.raises(ValueError, match=r"the quantile 0\.25 but not 0\.75"):
        bands([BAND._replace(quantiles={0.25: [0.0] * 3, 0.5: [0.0] * 3})])


def test_a_comparison_has_a_panel_a_data_set() -> None:
    reported = {"PBP": {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}}
    drawn = comparison(reported, dict.fromkeys("abcd", (0.5, 0.1)))
    assert [ax.get_title(loc="left") for ax in drawn.axes] == list("abcd")
    labels = ["".join(text.get_text() for text in ax.get_yticklabels()) for ax in drawn.axes]
    assert labels == ["PBPbayesify", "", "", "PBPbayesify"]  # the first of each row
    for ax in drawn.axes:
        (ours,) = ax.containers
        [bar] = ours.lines[2][0].get_segments()
        assert bar.ravel().tolist() == pytest.approx([0.3, 1.0, 0.7, 1.0])  # two standard errors
    drawn.savefig(io.BytesIO(), format="png")
    with pytest.raises(ValueError, match="at least one data set"):
        comparison(reported, {})
