"""The report's figures of uncertainty show the uncertainty of the network."""

import re

import numpy as np
import pytest
import torch
from tests.app.report.test_report import figures_of, network

import bayesify as bf
from bayesify.app.report.figures import regression_figures
from bayesify.datasets import DataError, find_test_inputs
from bayesify.metrics import interval_coverage, ood_auroc, regression_metrics, risk_coverage
from bayesify.prediction import (
    GaussianPredictive,
    NegativeBinomialPredictive,
    NumericPredictive,
    PoissonPredictive,
)
from bayesify.tabular.censoring import Limits, RecordedPredictive


def test_the_report_shows_the_images_on_which_the_votes_are_split_most():
    bnn = network(init_std=0.5)
    figure = figures_of(bnn)["votes"]
    images = torch.rand(40, 36, generator=torch.Generator().manual_seed(1))
    samples = bnn.predict(images, 100, keep_samples=True).samples
    counts = torch.nn.functional.one_hot(samples.argmax(-1), 4).sum(0)
    fewest = counts.amax(-1).sort().values[:8]
    shown = [re.search(r"votes: (\d+) for", c.get_suptitle()).group(1) for c in figure.subfigs]
    assert [int(number) for number in shown] == fewest.tolist()
    assert int(fewest[0]) < 60  # they do disagree


def test_the_report_orders_the_answers_by_their_uncertainty():
    bnn = network(init_std=0.5)
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(40, 36, generator=generator)
    targets = torch.randint(4, (40,), generator=generator)
    predictive = bnn.predict(images, 5)
    lines = figures_of(bnn, image_shape=None)["risk_coverage"].axes[0].lines
    wrong = (predictive.mean.argmax(-1) != targets).double()
    for line, order in zip(lines, (predictive.total, predictive.epistemic, wrong), strict=False):
        curve = risk_coverage(order, 100.0 * wrong)
        np.testing.assert_allclose(line.get_xdata(), 100.0 * curve.coverage)
        np.testing.assert_allclose(line.get_ydata(), curve.risk)
    assert lines[0].get_ydata()[-1] == pytest.approx(100.0 * float(wrong.mean()))
    assert 0.0 < float(wrong.mean()) < 1.0


def test_the_report_measures_images_of_another_data_set():
    bnn = network(init_std=0.3)
    images = torch.rand(40, 36, generator=torch.Generator().manual_seed(1))
    inside, outside = bnn.predict(images, 5), bnn.predict(5.0 * images[:30], 5)
    figures = figures_of(bnn, image_shape=None, outside=("others", outside))
    figure = figures["out_of_distribution"]
    auroc = ood_auroc(inside.epistemic, outside.epistemic)
    assert figure.axes[0].get_title(loc="left") == f"AUROC {auroc:.3f} by epistemic uncertainty"
    point = network(posterior=bf.Delta)
    found = figures_of(point, image_shape=None, outside=("others", point.predict(images)))
    assert "out_of_distribution" not in found
    labels = [line.get_label() for line in found["risk_coverage"].axes[0].lines]
    assert not any("epistemic" in label for label in labels)


def test_images_of_another_data_set_are_found_without_download(make_tiny, places, monkeypatch):
    monkeypatch.setattr("requests.get", None)  # nothing may be downloaded
    make_tiny({})
    assert find_test_inputs("tiny").shape == (2, 784)
    assert find_test_inputs("fashion-mnist") is None
    assert find_test_inputs("tiny", places.cache) is None
    folder = places.env / "tiny"
    (folder / "test-images.gz").write_bytes(b"another set's")
    assert find_test_inputs("tiny") is None
    with pytest.raises(DataError, match="sudoku"):
        find_test_inputs("sudoku")


# ------------------------------------------------------------------------------------------ numbers


def wide(num_data=300, factor=1.0, dtype=torch.float64):
    """Predictions whose standard deviations are wrong by a factor, and the true values."""
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(7, num_data, 1, generator=generator, dtype=dtype)
    std = 0.5 + torch.rand(num_data, 1, generator=generator, dtype=dtype)
    which = torch.randint(7, (num_data,), generator=generator)
    noise = torch.randn(num_data, 1, generator=generator, dtype=dtype)
    y = means[which, torch.arange(num_data)] + std * noise
    return GaussianPredictive(means, factor * std.expand_as(means)), y


def observed_in(figures):
    ax = figures["interval_coverage"].axes[0]
    (line,) = [line for line in ax.lines if line.get_label() == "observed"]
    return {round(x, 6): y for x, y in line.get_xydata().tolist()}


def test_the_coverage_is_that_of_the_intervals():
    predictive, y = wide()
    figures = regression_figures(predictive, y, "price")
    observed = observed_in(figures)
    for level in (0.05, 0.5, 0.8, 0.95, 0.99):
        expected = interval_coverage(predictive, y, level)
        assert observed[round(100 * level, 6)] == pytest.approx(expected)
    assert figures["interval_coverage"].axes[0].collections  # the band
    title = figures["predicted_against_true"].axes[0].get_title(loc="left")
    assert f"hold {interval_coverage(predictive, y, 0.95):.1f} % of 300" in title
    loss = (predictive.mean - y).square().flatten()
    curve = risk_coverage(predictive.total.flatten(), loss)
    line = figures["risk_coverage"].axes[0].lines[0]
    np.testing.assert_allclose(line.get_ydata(), curve.risk)


def with_steps(kind) -> NumericPredictive:
    """A calibrated predictive distribution of 3,000 counts or recorded numbers."""
    generator = torch.Generator().manual_seed(3)
    rates = torch.randn(4, 3000, 1, generator=generator, dtype=torch.float64)
    if kind == "poisson":
        return PoissonPredictive(rates)
    if kind == "negative binomial":
        return NegativeBinomialPredictive(rates, torch.tensor(0.5))
    latent = GaussianPredictive(rates, torch.tensor(0.7))
    return RecordedPredictive.of(latent, Limits(-0.5, 0.5))


@pytest.mark.parametrize("kind", ["poisson", "negative binomial", "recorded"])
def test_the_coverage_of_what_has_steps_is_that_of_the_table(kind):
    predictive = with_steps(kind)
    y = predictive.simulate(1, seed=1)[0].double()
    figures = regression_figures(predictive, y)
    observed, found = observed_in(figures), regression_metrics(predictive, y)
    for level in (50, 80, 90, 95):
        assert observed[level] == pytest.approx(found[f"coverage_{level}"])
    # Calibrated intervals hold more than their level, so that a band around it would mislead.
    assert observed[50] > 60.0
    assert not figures["interval_coverage"].axes[0].collections


def check_calibrated(factor):
    # 20 levels at a family-wise error rate of 1e-3: 4.06 standard errors.
    for level, share in observed_in(regression_figures(*wide(4000, factor))).items():
        assert abs(share - level) < 4.06 * (level * (100.0 - level) / 4000) ** 0.5


def test_calibrated_predictions_lie_on_the_diagonal_and_others_do_not():
    check_calibrated(1.0)
    for factor in (0.8, 1.25):
        with pytest.raises(AssertionError):
            check_calibrated(factor)


@pytest.mark.parametrize("num_data", [1, 2])
def test_few_numbers_can_be_drawn(num_data):
    assert len(regression_figures(*wide(num_data, dtype=torch.float32))) == 3


def test_the_report_of_a_number_has_its_figures():
    bnn = network(outputs=1, likelihood=bf.GaussianLikelihood(std=0.1))
    images = torch.rand(40, 36, generator=torch.Generator().manual_seed(1))
    truth = 100.0 + 3.0 * torch.rand(40, 1)
    found = figures_of(
        bnn,
        targets=torch.zeros(40, 1),
        image_shape=None,
        pruning=[],
        predictive=bnn.predict(images, 5).rescaled(100.0, 3.0),
        truth=("price (EUR)", truth),
    )
    assert list(found)[1:4] == ["interval_coverage", "risk_coverage", "predicted_against_true"]
    ax = found["predicted_against_true"].axes[0]
    assert ax.get_xlabel() == "true price (EUR)"
    drawn = torch.tensor(np.concatenate([line.get_xdata() for line in ax.lines[1:]]))
    torch.testing.assert_close(drawn.sort().values, truth.flatten().double().sort().values)
