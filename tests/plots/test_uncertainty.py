"""The figures of uncertainty show what they were given."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from bayesify.metrics import risk_coverage
from bayesify.plots import (
    epistemic_histogram,
    epistemic_histograms,
    interval_coverage,
    predicted_against_true,
    risk_coverage_curve,
    votes_gallery,
)

LEVELS = (0.1, 0.5, 0.8, 0.95)
LONG_NAMES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"]
LONG_NAMES += ["Sandal", "Shirt", "Sneaker", "Bag", "Ankle-boot"]


def numbers(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def curves(n=500):
    uncertainty, wrong = numbers(n).exp(), 100.0 * (numbers(n, 1) > 1.5)
    return {
        "by total uncertainty": risk_coverage(uncertainty, wrong),
        "best possible order": risk_coverage(wrong, wrong),
    }


def pair(n=400):
    return (numbers(n) - 5.0).exp(), (0.5 * numbers(n, 1) - 1.0).exp()


def votes(n=8, k=10, s=100, names=None):
    generator = torch.Generator().manual_seed(0)
    return votes_gallery(
        torch.rand(n, 28, 28, generator=generator),
        torch.randint(k, (n,), generator=generator),
        torch.randn(s, n, k, generator=generator).softmax(-1),
        names or [str(i) for i in range(k)],
        "The most disputed",
    )


def predicted(n=1000):
    y, std = 50.0 + 10.0 * numbers(n), 1.0 + numbers(n, 1).abs()
    mean = y + std * numbers(n, 2)
    return predicted_against_true(mean, mean - 2 * std, mean + 2 * std, y, name="strength (MPa)")


FIGURES = {
    "interval coverage": lambda: interval_coverage(LEVELS, (0.2, 0.45, 0.8, 0.99), 50),
    "risk and coverage": lambda: risk_coverage_curve(curves()),
    "risk and coverage, two examples": lambda: risk_coverage_curve(curves(2)),
    "histogram": lambda: epistemic_histogram(*pair()),
    "histograms": lambda: epistemic_histograms({"one": pair(), "other": pair(30), "third": pair()}),
    "votes": votes,
    "votes, long names": lambda: votes(n=5, names=LONG_NAMES),
    "votes, one sample of one image": lambda: votes(n=1, s=1),
    "votes, many classes": lambda: votes(k=100, names=[f"{i} of the classes" for i in range(100)]),
    "predicted": predicted,
    "predicted, one": lambda: predicted_against_true(*(torch.tensor([[v]]) for v in (1, 0, 2, 1))),
}


# --------------------------------------------------------------------------- coverage of intervals


def band_of(figure):
    """Lower and upper end of the band by level, all in percent."""
    points = figure.axes[0].collections[0].get_paths()[0].vertices
    found: dict[float, list[float]] = {}
    for x, y in points:
        found.setdefault(round(float(x), 6), []).append(float(y))
    return {x: (min(ys), max(ys)) for x, ys in found.items()}


def check_band(band, num_data):
    """The exact probability that calibrated intervals lie within it, at each level."""
    for level in (0.2, 0.5, 0.8):
        low, high = band[100.0 * level]
        counts = np.arange(num_data + 1)
        share = 100.0 * counts / num_data
        inside = stats.binom.pmf(counts, num_data, level)[(low <= share) & (share <= high)].sum()
        assert 0.94 < inside < 0.96, (level, inside)


def test_the_band_holds_95_percent_of_calibrated_results():
    check_band(band_of(interval_coverage([0.5], [0.5], 2000)), 2000)
    arrays = interval_coverage(np.array([0.5, 0.9]), np.array([0.5, 0.8]), 2000)
    assert band_of(arrays).keys() == band_of(interval_coverage([0.5, 0.9], [0.5, 0.8], 2000)).keys()
    narrow = {
        x: (x - 0.9 * (x - a), x + 0.9 * (b - x))
        for x, (a, b) in band_of(interval_coverage([0.5], [0.5], 2000)).items()
    }
    with pytest.raises(AssertionError):
        check_band(narrow, 2000)


def test_the_coverage_is_drawn_in_the_order_of_the_levels():
    ax = interval_coverage([0.95, 0.5], [0.9, 0.55], 1).axes[0]
    (line,) = [line for line in ax.lines if line.get_label() == "observed"]
    np.testing.assert_allclose(line.get_xydata(), [[50.0, 55.0], [95.0, 90.0]])
    low, high = band_of(ax.figure)[50.0]
    assert (low, high) == (0.0, 100.0)  # one example allows any share


@pytest.mark.parametrize(
    ("levels", "observed", "num_data", "message"),
    [
        ([], [], 5, "at least one, got 0 and 0"),
        ([0.5], [0.5, 0.6], 5, "got 2 and 1"),
        ([1.0], [0.5], 5, "strictly between 0 and 1"),
        ([math.nan], [0.5], 5, "strictly between 0 and 1"),
        ([0.5], [55.0], 5, "divide percent by 100"),
        ([0.5], [math.nan], 5, "shares from 0 to 1"),
        ([0.5], [0.5], 0, "num_data must be at least 1"),
    ],
)
def test_invalid_coverage_raises(levels, observed, num_data, message):
    with pytest.raises(ValueError, match=message):
        interval_coverage(levels, observed, num_data)


# --------------------------------------------------------------------------------------- abstaining


def test_the_risk_coverage_curve_is_the_one_given():
    given = curves()
    ax = risk_coverage_curve(given).axes[0]
    for line, (name, curve) in zip(ax.lines, given.items(), strict=False):
        drawn = torch.stack((100.0 * curve.coverage, curve.risk), -1)
        np.testing.assert_allclose(line.get_xydata(), drawn)
        label, area = line.get_label().split(", area ")
        assert label == name
        assert float(area) == pytest.approx(curve.aurc, rel=5e-3)
    whole = float(given["best possible order"].risk[-1])
    assert ax.lines[-1].get_ydata()[0] == whole
    assert ax.get_ylim()[1] > whole
    with pytest.raises(ValueError, match="at least one curve"):
        risk_coverage_curve({})


def test_a_network_without_error_has_a_risk_of_zero():
    perfect = risk_coverage(numbers(10).abs(), torch.zeros(10))
    assert risk_coverage_curve({"by entropy": perfect}).axes[0].get_ylim()[0] == 0.0


# --------------------------------------------------------------------------------------- histograms


def test_the_histograms_hold_every_example_on_common_bins():
    inside, outside = pair()
    inside[:2] = torch.tensor([0.0, 1e-30])  # left of the axis
    first, second = epistemic_histograms({"a": (inside, outside), "b": (outside, inside)}).axes
    drawn = [[patch.get_data() for patch in ax.patches[1::2]] for ax in (first, second)]
    edges = drawn[0][0].edges
    for shares, values in zip(drawn[0], (inside, outside), strict=True):
        np.testing.assert_array_equal(shares.edges, edges)
        assert shares.values.sum() == pytest.approx(100.0)
        expected = 100.0 * ((values >= edges[-2]) & (values <= edges[-1])).double().mean()
        assert shares.values[-1] == pytest.approx(float(expected))
    np.testing.assert_array_equal(drawn[0][0].values, drawn[1][1].values)
    assert edges[0] >= 1e-6


@pytest.mark.parametrize(
    ("value", "message"), [(math.nan, "finite"), (math.inf, "finite"), (-0.1, "at least 0")]
)
def test_invalid_uncertainty_raises(value, message):
    with pytest.raises(ValueError, match=f"outside must be .*{message}"):
        epistemic_histogram(torch.ones(3), torch.tensor([0.5, value]))
    with pytest.raises(ValueError, match=r"inside must have shape \(N,\)"):
        epistemic_histogram(torch.ones(0), torch.ones(1))
    with pytest.raises(ValueError, match="at least one pair"):
        epistemic_histograms({})
    with pytest.raises(ValueError, match="shorter"):
        epistemic_histogram(torch.ones(3), torch.ones(3), names=("inside",))


def test_small_values_of_a_large_unit_are_told_apart():
    inside, outside = torch.linspace(1e-8, 1e-7, 50), torch.linspace(1e-6, 2e-6, 50)
    (ax,) = epistemic_histogram(inside, outside, label="variance (m²)").axes
    first, second = (patch.get_data().values for patch in ax.patches[1::2])
    assert first.sum() == pytest.approx(100.0)
    assert not (first * second).any()


def test_zero_uncertainty_can_be_drawn():
    epistemic_histogram(torch.zeros(5), torch.zeros(3))


# -------------------------------------------------------------------------------------- predictions


def test_predictions_that_miss_are_marked():
    y = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    mean = y + torch.tensor([0.0, 0.5, -1.5, 0.9])
    ax = predicted_against_true(mean, mean - 1.0, mean + 1.0, y.unsqueeze(1), level=0.8).axes[0]
    assert ax.get_title(loc="left") == "The 80 % intervals hold 75.0 % of 4 targets"
    lines = {line.get_label(): line.get_xydata() for line in ax.lines}
    np.testing.assert_allclose(lines["target outside the interval"], [[2.0, 0.5]])
    assert len(lines["target inside the interval"]) == 3
    segments = ax.collections[1].get_segments()
    np.testing.assert_allclose(segments[0], [[2.0, -0.5], [2.0, 1.5]])


def test_a_level_of_intervals_is_not_rounded_to_one():
    y = torch.arange(4.0)
    figure = predicted_against_true(y, y - 1.0, y + 1.0, y.unsqueeze(1), level=0.9999999)
    assert "The 99.99999 % intervals" in figure.axes[0].get_title(loc="left")


def test_many_predictions_are_thinned_but_all_counted():
    ax = predicted(5001).axes[0]
    drawn = sum(len(line.get_xydata()) for line in ax.lines[1:])
    assert drawn == 400
    assert "of 5,001 targets" in ax.get_title(loc="left")
    assert ax.get_ylabel() == "predicted strength (MPa), 400 of them drawn"


def test_invalid_predictions_raise():
    one = torch.ones(3)
    with pytest.raises(ValueError, match=r"targets of several parts one by one"):
        predicted_against_true(*(torch.ones(3, 2),) * 4)
    with pytest.raises(ValueError, match=r"same length, got mean \(3,\).*targets \(2,\)"):
        predicted_against_true(one, one, one, torch.ones(2))
    with pytest.raises(ValueError, match="exchanged"):
        predicted_against_true(one, one + 1, one - 1, one)
    with pytest.raises(ValueError, match="low must be finite"):
        predicted_against_true(one, torch.tensor([0.0, math.nan, 0.0]), one, one)


# -------------------------------------------------------------------------------------------- votes


def test_votes_are_counted_and_the_average_decides():
    # Two of three samples favour class 0 slightly; the third is certain of class 2.
    sample = [[0.4, 0.3, 0.3], [0.4, 0.3, 0.3], [0.0, 0.0, 1.0]]
    samples = torch.tensor(sample).unsqueeze(1)
    figure = votes_gallery(torch.rand(1, 3, 3), torch.tensor([1]), samples, ["a", "b", "$c"], "")
    (card,) = figure.subfigs
    assert card.get_suptitle() == "true b\npredicted $c\nvotes: 2 for a, 1 for $c"
    bars = card.axes[1].patches
    np.testing.assert_allclose([bar.get_width() for bar in bars], [2 / 3, 0.0, 1 / 3], atol=1e-6)
    colours = [bar.get_facecolor() for bar in bars]
    assert len(set(colours)) == 3  # another, the truth, a wrong prediction
    with pytest.raises(ValueError, match=r"samples of shape \(S, n, K\), .* got \(3, 1, 3\), 2, 1"):
        votes_gallery(torch.rand(2, 3, 3), torch.tensor([1]), samples, "abc", "")
    with pytest.raises(ValueError, match="none of them 0"):
        votes_gallery(torch.rand(1, 3, 3), torch.tensor([1]), samples[:0], "abc", "")
