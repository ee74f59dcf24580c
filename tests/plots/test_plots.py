"""The figures show what they were given, and no text overlaps another."""

import itertools
import math
import subprocess
import sys

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from scipy.stats import binomtest
from tests.plots import test_uncertainty as uncertainty

from bayesify import ScaleMixture
from bayesify.metrics import reliability
from bayesify.plots import (
    digit_gallery,
    learning_curves,
    pruning_curve,
    reliability_diagram,
    snr_density_and_cdf,
    weight_densities,
    weight_posteriors,
)
from bayesify.plots.compared import Curve, pruning_compared
from bayesify.plots.effects import EffectLine, effect_of_levels
from bayesify.plots.grid import Mark, grid_lines
from bayesify.plots.intervals import predicted_against_true, residuals


def row(epoch, **changed):
    return {
        "epoch": epoch,
        "loss": 3.0 / epoch,
        "nll": 0.4 / epoch,
        "kl": 1e5 + 1e4 / epoch,
        "train_error": 20.0 / epoch,
        "test_error": 1.3 + 5.0 / epoch,
        "std_median": 0.05 + 0.001 * epoch,
        "learning_rate": 1e-3,
        "images_per_second": 1e4,
        "seconds": 6.0,
    } | changed


HISTORY = [row(epoch) for epoch in range(1, 31)]
FRACTIONS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.95, 0.98, 0.99)
TABLE = [
    {
        "fraction": fraction,
        "weights_left": round(2_395_210 * (1 - fraction)),
        "error_mean_weights": 1.3 + 20 * fraction**40,
        "error_predictive": 1.2 + 22 * fraction**40,
        "file_bytes": round(5e6 * (1.01 - fraction)),
    }
    for fraction in FRACTIONS
]


def calibrated(n=3000):
    generator = torch.Generator().manual_seed(0)
    probs = (3 * torch.randn(n, 5, generator=generator)).softmax(-1)
    return probs, torch.multinomial(probs, 1, generator=generator).squeeze(-1)


def gallery(n=8, k=10, names=None, width=28):
    generator = torch.Generator().manual_seed(0)
    probs = (3 * torch.randn(n, k, generator=generator)).softmax(-1)
    return digit_gallery(
        torch.rand(n, width, width, generator=generator),
        torch.randint(k, (n,), generator=generator),
        probs,
        1e-4 * torch.rand(n, generator=generator),
        torch.rand(n, generator=generator),
        names or [str(i) for i in range(k)],
        "The least certain",
    )


GRID_STDS = (0.1, 0.25, 0.5, 0.75, 1.0)
LONG = "Total yearly household income before taxes, in euros of the year 2010"
SECTORS = (
    "Management and administration",
    "Transport and warehousing",
    "Wholesale merchandising",
    "Retail",
)
MANY = torch.linspace(0.0, 5.0, 1000)
SHARES = [0.0, 0.5, *(0.9 + 0.01 * k for k in range(10))]
FIGURES = {
    "learning curves": lambda: learning_curves(HISTORY, {"SGD": HISTORY, "dropout": HISTORY}),
    "one epoch": lambda: learning_curves(HISTORY[:1]),
    "reliability": lambda: reliability_diagram(reliability(*calibrated()), 0.01),
    "pruning": lambda: pruning_curve(TABLE, 1.3),
    "pruning, many": lambda: pruning_curve(
        [*TABLE, *({**TABLE[0], "fraction": f} for f in (0.9, 0.96, 0.97, 0.995, 0.999, 1.0))], 1.3
    ),
    "snr": lambda: snr_density_and_cdf(torch.linspace(-60, 20, 5000).square() / -60),
    "snr, pruned": lambda: snr_density_and_cdf(
        torch.cat((torch.full((900,), -math.inf), torch.linspace(-20.0, 20.0, 2100)))
    ),
    "densities": lambda: weight_densities(
        {"mean": 0.01 * torch.linspace(-1, 1, 999), "SGD": torch.linspace(-1, 1, 999)}
    ),
    "posteriors": lambda: weight_posteriors(
        [0.0, 0.02, 0.5],
        [0.1, 0.05, 1e-4],
        [
            "lowest ratio, -90.0 dB\n0.weight[399, 783]",
            "median\n2.weight[3, 3]",
            "highest\n4.bias[3]",
        ],
        ScaleMixture(),
    ),
    "grid": lambda: grid_lines(
        {"std2 = 1": {f"std1 = {s}": [(0.1, s), (0.5, 2 * s), (0.9, s)] for s in GRID_STDS}},
        [Mark("std2 = 1", "std1 = 0.5", 0.5, 1.5)],
        xlabel="pi",
        ylabel="test error (%)",
    ),
    "learning curves, long names": lambda: learning_curves(
        [row(epoch, nll=10.0 ** (5 - epoch)) for epoch in range(1, 13)],
        {LONG: HISTORY[:12]},
        error_label=f"RMSE of {LONG}",
    ),
    "pruning, long name": lambda: pruning_curve(TABLE, 1.3, error_label=f"RMSE of {LONG}"),
    "densities, long name": lambda: weight_densities(
        {LONG: torch.linspace(-1, 1, 999), "SGD": torch.linspace(-1, 1, 999)}
    ),
    "posteriors, long names": lambda: weight_posteriors(
        [0.0, 0.02, 0.5],
        [0.1, 0.05, 1e-4],
        [
            f"{place}\nbase_model.model.bert.encoder.layer.11.attention.self.query.weight[3, 17]"
            for place in ("lowest ratio, -90.0 dB", "median", "highest")
        ],
    ),
    "intervals, long name": lambda: predicted_against_true(
        MANY, MANY - 1.0, MANY + 1.0, MANY.roll(1), name=LONG
    ),
    "residuals, long name": lambda: residuals(MANY, MANY.roll(1), name=LONG),
    "levels, long names": lambda: effect_of_levels(
        SECTORS[:2],
        [EffectLine(name, [1, 2], [0, 1], [2, 3]) for name in SECTORS],
        title=LONG,
        label=LONG,
    ),
    "pruning compared": lambda: pruning_compared(
        {name: [Curve("ours", SHARES, [SHARES])] for name in ("2x400", "2x1200")}
    ),
    "intervals, huge": lambda: predicted_against_true(
        1e140 * MANY.double(), 9e139 * MANY.double(), 2e140 * MANY.double(), 1e140 * MANY.double()
    ),
    "gallery": gallery,
    "gallery, long names": lambda: gallery(n=5, names=uncertainty.LONG_NAMES),
    "gallery, one": lambda: gallery(n=1),
    "gallery, many classes": lambda: gallery(
        k=100, names=[f"{i} of the classes" for i in range(100)]
    ),
}

#: Figures of many subfigures take seconds to draw.
SLOW = ["gallery, many classes", "votes, many classes", "gallery", "votes"]
FAST = [name for name in FIGURES | uncertainty.FIGURES if name not in SLOW]


@pytest.fixture
def drawn_texts(monkeypatch):
    """What a figure really draws, with its place in pixels: (text, box)."""

    def texts(figure):
        drawn = []
        draw = Text.draw

        def record(self, renderer, *args, **kwargs):
            if self.get_visible() and self.get_text().strip():
                drawn.append((self.get_text(), self.get_window_extent(renderer)))
            draw(self, renderer, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(Text, "draw", record)
            FigureCanvasAgg(figure).draw()
        return drawn

    return texts


@pytest.fixture(params=[*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def make(request):
    return (FIGURES | uncertainty.FIGURES)[request.param]


def test_a_figure_is_labelled_and_no_text_overlaps_or_leaves_it(make, drawn_texts):
    before = dict(mpl.rcParams)
    figure = make()
    assert dict(mpl.rcParams) == before
    charts = [ax for ax in figure.axes if ax.axison]
    assert charts
    for ax in charts:
        column = ax.get_shared_x_axes().get_siblings(ax)
        assert any(one.get_xlabel() for one in column)
    texts = drawn_texts(figure)
    assert len(texts) > 5
    width, height = figure.canvas.get_width_height()
    for text, box in texts:
        # One pixel is rounding.
        assert -1 <= box.x0 < box.x1 <= width + 1, text
        assert -1 <= box.y0 < box.y1 <= height + 1, text
    for (one, first), (other, second) in itertools.combinations(texts, 2):
        apart_x = first.x1 <= second.x0 + 1 or second.x1 <= first.x0 + 1
        apart_y = first.y1 <= second.y0 + 1 or second.y1 <= first.y0 + 1
        assert apart_x or apart_y, f"{one!r} overlaps {other!r}"


def test_runs_with_long_names_are_told_apart():
    runs = {f"Bayes by Backprop (adult-lr-0.0{place})": HISTORY for place in (1, 2)}
    axes = learning_curves(HISTORY, runs).axes
    [legend] = [ax.get_legend() for ax in axes if ax.get_title(loc="left") == "Error"]
    texts = [text.get_text() for text in legend.get_texts()]
    assert len(set(texts)) == len(texts) == 4


def test_the_overlap_test_sees_an_overlap(drawn_texts):
    figure = Figure()
    figure.text(0.5, 0.5, "one")
    figure.text(0.51, 0.5, "two")
    (_, first), (_, second) = drawn_texts(figure)
    assert first.overlaps(second)


@pytest.mark.slow
def test_pyplot_is_not_imported():
    code = "import sys, bayesify.app.report.page; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_learning_curves_draw_the_history():
    figure = learning_curves(HISTORY, {"SGD": [{"epoch": 1, "test_error": 5.0}]})
    axes = {ax.get_title(loc="left"): ax for ax in figure.axes}
    assert list(axes) == ["Objective", "Error", "Complexity", "Width of the posterior"]
    lines = {line.get_label(): line for line in axes["Error"].lines}
    assert list(lines) == ["train, sampled weights", "test, mean weights", "test, SGD"]
    drawn = lines["test, mean weights"].get_xydata()
    np.testing.assert_allclose(drawn, [(r["epoch"], r["test_error"]) for r in HISTORY])
    assert lines["test, SGD"].get_xydata().tolist() == [[1.0, 5.0]]


def test_learning_curves_begin_at_epoch_0():
    rows = [{"epoch": epoch, "nll": 3.0 - epoch} for epoch in range(3)]
    assert learning_curves(rows).axes[0].lines[0].get_xdata().tolist() == [0.0, 1.0, 2.0]


def test_learning_curves_skip_what_is_missing():
    plain = [row(e, kl=0.0, loss=0.4 / e, std_median=None) for e in (1, 2, 3)]
    plain[1]["test_error"] = None
    plain[2]["train_error"] = math.nan
    del plain[0]["learning_rate"]
    figure = learning_curves(plain)
    objective, errors = figure.axes  # no KL, no width
    assert [line.get_label() for line in objective.lines] == ["nll, training data"]
    assert [line.get_label() for line in errors.lines] == ["train", "test"]
    assert [line.get_xdata().tolist() for line in errors.lines] == [[1.0, 2.0], [1.0, 3.0]]
    with pytest.raises(ValueError, match="at least one row"):
        learning_curves([{"epoch": 1, "loss": None}])


def test_negative_losses_have_a_linear_axis():
    figure = learning_curves([row(e, nll=2.0 - e, loss=3.0 - e) for e in range(1, 9)])
    assert figure.axes[0].get_yscale() == "linear"
    assert learning_curves(HISTORY).axes[0].get_yscale() == "log"


def test_reliability_diagram_draws_every_full_bin():
    r = reliability(*calibrated())
    top, bottom = reliability_diagram(r, 0.0123).axes
    full = r.counts > 0
    assert 0 < full.sum() < 15
    drawn = top.lines[1].get_xydata()
    np.testing.assert_allclose(drawn, torch.stack((r.confidence, r.accuracy), -1)[full])
    assert [int(bar.get_height()) for bar in bottom.patches] == r.counts[full].tolist()
    assert top.get_title(loc="left") == "Expected calibration error 0.0123"
    assert (top.get_xlim(), top.get_ylim()) == ((0.0, 1.0), (0.0, 1.02))
    segments = np.array(top.collections[0].get_segments())
    for segment, n, share in zip(segments, r.counts[full], r.accuracy[full], strict=True):
        wilson = binomtest(round(float(n * share)), int(n)).proportion_ci(method="wilson")
        np.testing.assert_allclose(segment[:, 1], (wilson.low, wilson.high), atol=1e-12)
    # Wilson intervals of calibrated predictions nearly always hold the diagonal.
    inside = (segments[:, 0, 1] <= segments[:, 0, 0]) & (segments[:, 0, 0] <= segments[:, 1, 1])
    assert inside.mean() >= 0.8


def test_pruning_ticks_name_the_share_and_the_count():
    figure = pruning_curve(TABLE, 1.3)
    labels = [label.get_text() for label in figure.axes[-1].get_xticklabels()]
    assert labels[-3:] == ["95 %\n120k", "98 %\n47.9k", "99 %\n24k"]
    assert all(labels)
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert lines["mean weights"].get_ydata().tolist() == [r["error_mean_weights"] for r in TABLE]
    assert lines["nothing removed, mean weights: 1.3"].get_ydata()[0] == 1.3
    assert figure.axes[1].lines[0].get_ydata().tolist() == [r["file_bytes"] for r in TABLE]
    assert len(pruning_curve([{**TABLE[1], "file_bytes": None}], None).axes) == 1


def test_pruning_needs_rows_with_fractions():
    with pytest.raises(ValueError, match="at least one row"):
        pruning_curve([], 1.0)
    with pytest.raises(ValueError, match="needs 'fraction'"):
        pruning_curve([{"weights_left": 3}], 1.0)


@pytest.mark.parametrize("pruned", [0, 40_000])
def test_snr_density_integrates_to_one_and_the_cut_removes_three_quarters(pruned):
    finite = 10 * torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    ratio = torch.cat((finite, torch.full((pruned,), -math.inf)))
    top, bottom = snr_density_and_cdf(ratio).axes
    density, edges, _ = top.patches[0].get_data()
    assert (density * np.diff(edges)).sum() == pytest.approx(1.0, abs=0.003)
    cut = top.lines[0].get_xdata()[0]
    assert (ratio < cut).double().mean().item() == pytest.approx(0.75, abs=1e-4)
    cdf = bottom.lines[0].get_xydata()
    for x, share in cdf[::20]:
        assert share == pytest.approx((ratio <= x).double().mean().item(), abs=1e-6)
    title = top.get_title(loc="right")
    assert title.startswith("28.6 % of the weights lie below") == bool(pruned)


def test_a_weight_at_the_floor_of_the_ratio_is_drawn():
    top, bottom = snr_density_and_cdf(torch.tensor([-100.0, -20.0, 0.0])).axes
    assert bottom.get_xlim() == (-100.0, 0.0)
    assert top.get_title(loc="right") == ""
    bottom = snr_density_and_cdf(torch.tensor([-100.1, -20.0, 0.0])).axes[1]
    assert bottom.get_xlim() == (-20.0, 0.0)


def test_weight_densities_integrate_to_one_on_a_common_axis():
    generator = torch.Generator().manual_seed(0)
    wide, narrow = torch.randn(50_000, generator=generator), torch.randn(5_000, generator=generator)
    ax = weight_densities({"wide": wide, "narrow": 0.2 * narrow}).axes[0]
    assert ax.get_yscale() == "linear"
    for patch in ax.patches:
        density, edges, _ = patch.get_data()
        assert (density * np.diff(edges)).sum() == pytest.approx(1.0, abs=0.005)
        assert len(density) == 31  # odd, by the smaller vector
    few = weight_densities({"few": narrow[:100]}).axes[0].patches[0].get_data()
    assert len(few.values) == 21
    negative = weight_densities({"negative": -wide.abs()}).axes[0].patches[0].get_data()
    assert (negative.values * np.diff(negative.edges)).sum() == pytest.approx(1.0, abs=0.005)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["wide", "narrow"]
    assert weight_densities({"a": wide, "b": 0.02 * narrow}).axes[0].get_yscale() == "log"
    spike = torch.cat([0.001 * narrow, wide[:50]])
    assert weight_densities({"a": spike}).axes[0].get_yscale() == "log"
    with pytest.raises(ValueError, match="at least one vector"):
        weight_densities({"none": torch.zeros(0)})


@pytest.mark.parametrize("std", [2.0, 0.1, 1e-4])
def test_posterior_densities_are_resolved_and_zero_is_in_view(std):
    ax = weight_posteriors([0.3], [std], ["w"], ScaleMixture()).axes[0]
    x, density = ax.lines[0].get_xydata().T
    assert np.trapezoid(density, x) == pytest.approx(1.0, abs=0.01)
    assert x[density.argmax()] == pytest.approx(0.3, abs=std / 10)
    assert ax.get_xlim()[0] < 0.0 < ax.get_xlim()[1]
    assert {line.get_label() for line in ax.lines} == {"posterior", "prior", "zero"}


@pytest.mark.parametrize(("count", "first"), [(1, {0}), (2, {0}), (4, {0, 3})])
def test_the_first_posterior_of_each_row_names_the_axis(count, first):
    axes = weight_posteriors([0.3] * count, [0.1] * count, ["w"] * count).axes
    assert {place for place, ax in enumerate(axes) if ax.get_ylabel() == "density"} == first


def test_invalid_weights_raise():
    with pytest.raises(ValueError, match="all are -inf dB"):
        snr_density_and_cdf(torch.full((3,), -math.inf))
    with pytest.raises(ValueError, match="positive stds"):
        weight_posteriors([0.0], [0.0], ["w"])
    with pytest.raises(ValueError, match="1 means, 2 names"):
        weight_posteriors([0.0], [1.0], ["w", "v"])


def test_gallery_draws_the_probabilities_and_names_truth_and_prediction():
    probs = torch.tensor([[0.1, 0.6, 0.3], [0.05, 0.15, 0.8]])
    figure = digit_gallery(
        torch.rand(2, 4, 4, requires_grad=True),
        torch.tensor([2, 2]),
        probs,
        torch.tensor([0.25, -1e-9]),
        torch.tensor([0.898, 0.003]),
        ["ant", "$b$", "cat"],
        "Two",
    )
    wrong, right = (card.get_suptitle() for card in figure.subfigs)
    assert wrong == "true cat\npredicted $b$\ntotal 0.90, epistemic 0.25 nats"
    assert right == "true cat\npredicted cat\ntotal 3e-03, epistemic 0.00 nats"
    for card, expected in zip(figure.subfigs, probs, strict=True):
        bars = card.axes[1].patches
        np.testing.assert_allclose([bar.get_width() for bar in bars], expected)
    colours = [[bar.get_facecolor() for bar in card.axes[1].patches] for card in figure.subfigs]
    assert len(set(colours[0])) == 3  # prediction, truth, other
    assert colours[1][2] == colours[0][2]  # truth where it is predicted, too


def test_gallery_of_many_classes_keeps_the_true_one():
    probs = torch.full((1, 100), 0.005)
    probs[0, 7] = 0.505
    one = torch.zeros(1)
    names = [f"c{i}" for i in range(100)]
    figure = digit_gallery(torch.rand(1, 3, 3), torch.tensor([99]), probs, one, one, names, "")
    labels = [label.get_text() for label in figure.subfigs[0].axes[1].get_yticklabels()]
    assert len(labels) in (10, 11)
    assert "c7" in labels
    assert labels[-1] == "c99"


def test_gallery_needs_as_many_of_each():
    with pytest.raises(ValueError, match="same number"):
        digit_gallery(
            torch.rand(2, 3, 3), torch.zeros(1), torch.ones(1, 2), *torch.zeros(2, 1), "ab", ""
        )
