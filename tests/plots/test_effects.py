"""Figures of importance, effects and residuals draw what they are given."""

import io
import warnings

import numpy as np
import pytest
import torch
from matplotlib.text import Text

from bayesify.plots import (
    EffectLine,
    effect_along_axis,
    effect_of_levels,
    importance_bars,
    residuals,
)

LINE = EffectLine("", [1.0, 2.0, 4.0], [0.5, 1.5, 3.0], [1.5, 2.5, 5.0], ([0, 0, 0], [9, 9, 9]))


def drawn(figure):
    figure.savefig("/dev/null", format="png")
    return figure.axes[0]


def test_residuals_have_the_quantiles_of_their_bins():
    generator = torch.Generator().manual_seed(0)
    mean = torch.rand(400, generator=generator)
    rest = mean * torch.randn(400, generator=generator)
    ax = drawn(residuals(mean, mean + rest, name="price"))
    lines = {line.get_label(): line.get_xydata() for line in ax.lines}
    order = mean.argsort()
    for place, part in enumerate(order.split(40)):
        for level in (10, 50, 90):
            assert lines[f"{level} %"][place, 1] == pytest.approx(
                float(rest[part].double().quantile(level / 100)), abs=1e-5
            )
    assert len(lines["residual"]) == 400
    assert ax.get_xlabel() == "predicted price"


def test_few_residuals_have_no_quantiles():
    ax = drawn(residuals(torch.arange(39.0), torch.zeros(39)))
    assert len(ax.lines) == 2
    assert "400 of 1,000 drawn" in drawn(residuals(torch.rand(1000), torch.rand(1000))).get_ylabel()
    with pytest.raises(ValueError, match="same length, got 2 and 3"):
        residuals(torch.zeros(2), torch.zeros(3))


def test_bars_are_in_their_order_with_short_names():
    rises = [("a" * 40, 2.0, 1.0, 3.0), ("b $x$", -0.1, -0.2, 0.1)]
    ax = drawn(importance_bars(rises, label="nll", title="t"))
    names = [text.get_text() for text in ax.get_yticklabels()]
    assert names == ["a" * 13 + "\N{HORIZONTAL ELLIPSIS}" + "a" * 12, "b $x$"]
    assert [bar.get_width() for bar in ax.patches] == [2.0, -0.1]
    (ends,) = ax.collections
    assert [segment[:, 0].tolist() for segment in ends.get_segments()] == [[1.0, 3.0], [-0.2, 0.1]]
    low, high = ax.get_ylim()
    assert low > high  # the first is at the top
    with pytest.raises(ValueError, match="at least one column"):
        importance_bars([], label="nll", title="t")


@pytest.mark.parametrize(
    ("first", "last", "labels"),
    [
        ("2024-01-01", "2024-03-01", ["2024-01-01", "2024-01-31", "2024-03-01"]),
        ("2021-01-01", "2023-01-01", ["2021-01", "2022-01", "2023-01"]),
        ("1800-01-01", "2000-01-01", ["1800", "1900", "2000"]),
        ("2022-01-08", "2022-01-09", ["2022-01-08 00:00", "2022-01-08 12:00", "2022-01-09 00:00"]),
        ("2022-01-08", "2022-01-11", ["2022-01-08", "2022-01-10", "2022-01-11"]),
    ],
)
def test_dates_are_as_precise_as_needed(first, last, labels):
    ends = np.array([first, last], "datetime64[D]").astype(float)
    axis = [ends[0], ends.mean(), ends[1]]
    ax = drawn(effect_along_axis(axis, [LINE], title="t", label="y", dates=True))
    assert [text.get_text() for text in ax.get_xticklabels()] == labels


def test_columns_whose_names_begin_alike_are_told_apart():
    rises = [(f"average_number_of_rooms_per_{of}", 0.5, 0.4, 0.6) for of in ("flat", "household")]
    ax = drawn(importance_bars(rises, label="nll (nats)", title="Importance"))
    assert len({text.get_text() for text in ax.get_yticklabels()}) == 2


@pytest.mark.parametrize("level", ["a", "school", "secondary", "SECONDARY SCHOOL"])
@pytest.mark.parametrize(
    "title",
    [
        "average annual household income in euros",
        "Temperature_Mean_Window_30_Days_before",
        "ANNUAL_HOUSEHOLD_INCOME_IN_EUROS",
    ],
)
def test_a_long_title_ends_within_the_picture(title, level):
    for figure in (
        effect_of_levels([level, "b", "c"], [LINE], title=title, label="y"),
        effect_along_axis([1, 2, 3], [LINE], title=title, label="price"),
        importance_bars([(level, 0.5, 0.4, 0.6)], label="nll (nats)", title=f"{title} {title}"),
    ):
        texts = drawn(figure).findobj(Text)
        (shown,) = [text for text in texts if text.get_text().startswith(title[:9])]
        assert shown.get_text().endswith("\N{HORIZONTAL ELLIPSIS}")
        assert shown.get_window_extent().x1 <= figure.bbox.x1


@pytest.mark.parametrize("names", [["yes", "no"], ["Management and administration", "Retail"]])
def test_long_names_of_lines_and_labels_end_within_the_picture(names):
    lines = [EffectLine(name, [1.0, 2.0], [0.5, 1.5], [1.5, 2.5]) for name in names]
    figure = effect_along_axis([0.0, 1.0], lines, title="t", label="yearly income " * 5)
    drawn(figure)
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == names
    for part in (legend, figure.axes[0].yaxis.label):
        box = part.get_window_extent()
        assert figure.bbox.x0 <= box.x0, part
        assert box.x1 <= figure.bbox.x1, part
        assert box.y1 <= figure.bbox.y1 + 1, part


def test_characters_that_the_font_lacks_are_reported_when_the_figure_is_saved():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = effect_of_levels(["\u65e5\u672c", "b", "c"], [LINE], title="\u65e5", label="y")
    with pytest.warns(UserWarning, match="missing from font"):
        figure.savefig(io.BytesIO())


def test_effects_show_values_band_and_spread():
    limits = (-1.0, 10.0)
    ax = drawn(
        effect_along_axis([1, 2, 3], [LINE], title="t", label="y", limits=limits, marks=[2.0])
    )
    assert ax.lines[0].get_ydata().tolist() == [1.0, 2.0, 4.0]
    assert ax.get_ylim() == limits
    spread, band = (each.get_paths()[0].vertices[:, 1] for each in ax.collections)
    assert (spread.min(), spread.max()) == (0.0, 9.0)
    assert (band.min(), band.max()) == (0.5, 5.0)
    several = [LINE._replace(name=name, spread=None) for name in "abc"]
    figure = effect_of_levels(["x", "y", "z"], several, title="t", label="y", limits=limits)
    ax = drawn(figure)
    assert ax.get_xlim() == limits
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b", "c"]
    assert len({tuple(line.get_ydata()) for line in ax.lines}) == 3  # none hides another
    hidden = [LINE._replace(name=name) for name in ("_a", "b")]  # matplotlib hides "_a"
    figure = effect_of_levels(["x", "y", "z"], hidden, title="t", label="y")
    shown = [text.get_text() for text in drawn(figure).figure.legends[0].get_texts()]
    assert [name.lstrip("\N{ZERO WIDTH SPACE}") for name in shown] == ["_a", "b"]
    for lines in ([], [LINE] * 5):
        with pytest.raises(ValueError, match="from one to 4 lines"):
            effect_of_levels(["x"], lines, title="t", label="y")


def test_a_day_is_named_by_its_date_at_any_hour():
    first = np.datetime64("2020-12-31T16:48").astype("datetime64[m]").astype(float) / 1440.0
    axis = [first, first + 3.0, first + 13.0]
    ax = drawn(effect_along_axis(axis, [LINE], title="t", label="y", dates=True))
    labels = [text.get_text() for text in ax.get_xticklabels()]
    assert (labels[0], labels[-1]) == ("2020-12-31", "2021-01-13")
