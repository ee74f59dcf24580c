"""Metrics against independent computations and against examples worked by hand."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss

from bayesify.metrics import (
    Reliability,
    brier,
    classification_metrics,
    crps,
    error_percent,
    expected_calibration_error,
    nll,
    ood_auroc,
    reliability,
    total_variation,
    wasserstein_of_samples,
)
from bayesify.prediction import BernoulliPredictive, CategoricalPredictive, GaussianPredictive


def random_case(n=500, k=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(n, k, generator=generator, dtype=torch.float64)
    y = torch.multinomial((0.6 * logits).softmax(-1), 1, generator=generator).squeeze(-1)
    return logits.softmax(-1), y


def numpy_ece(probs, y, bins):
    """From the definition, by loops, in float64."""
    probs, y = probs.double().numpy(), y.numpy()
    confidence, correct = probs.max(1), probs.argmax(1) == y
    total = 0.0
    for b in range(bins):
        last = b == bins - 1
        inside = (confidence >= b / bins) & ((confidence < (b + 1) / bins) | last)
        if inside.any():
            total += inside.mean() * abs(correct[inside].mean() - confidence[inside].mean())
    return total


def test_against_scikit_learn():
    probs, y = random_case()
    assert error_percent(probs, y) == pytest.approx(
        100 * (1 - accuracy_score(y, probs.argmax(-1))), rel=1e-12
    )
    assert nll(probs.log(), y) == pytest.approx(log_loss(y, probs), rel=1e-12)
    expected = brier_score_loss(y, probs, labels=range(7), scale_by_half=False)
    assert brier(probs, y) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("bins", [1, 7, 15])
@pytest.mark.parametrize("k", [2, 7])
def test_calibration_error_against_its_definition(bins, k):
    probs, y = random_case(k=k)
    ece = expected_calibration_error(probs, y, bins)
    assert ece == pytest.approx(numpy_ece(probs, y, bins), rel=1e-4)
    assert 0.0 < ece < 1.0


def test_by_hand():
    probs = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1]])
    y = torch.tensor([0, 2])
    assert error_percent(probs, y) == 50.0
    assert nll(probs.log(), y) == pytest.approx(-(math.log(0.5) + math.log(0.1)) / 2)
    first, second = 0.25 + 0.09 + 0.04, 0.01 + 0.64 + 0.81
    assert brier(probs, y) == pytest.approx((first + second) / 2)
    # Alone in their bins: |1 - .5| and |0 - .8|, each of half the data.
    assert expected_calibration_error(probs, y) == pytest.approx(0.65)


def test_a_confidence_of_one_shares_the_last_bin():
    # One bin from 14/15 to 1: mean confidence .975, accuracy .5. A bin of its own for the
    # certain example would give (1 + .05) / 2 instead.
    probs, y = torch.tensor([[1.0, 0.0], [0.95, 0.05]]), torch.tensor([1, 0])
    assert expected_calibration_error(probs, y) == pytest.approx(0.475, abs=1e-6)
    r = reliability(probs, y)
    assert r.counts.tolist() == [0] * 14 + [2]
    assert r.confidence[-1].item() == pytest.approx(0.975)
    assert r.accuracy[-1].item() == 0.5


def test_a_probability_above_one_by_rounding_is_not_a_logit():
    probs = torch.tensor([[1.0 + 2e-7, 0.0], [0.75, 0.25]])
    assert expected_calibration_error(probs, torch.tensor([0, 0])) == pytest.approx(0.125)


def test_half_precision():
    probs, y = random_case(n=200)
    half = probs.to(torch.bfloat16)
    assert brier(half, y) == pytest.approx(brier(probs, y), rel=0.02)
    assert expected_calibration_error(half, y, 1) == pytest.approx(
        expected_calibration_error(probs, y, 1), abs=0.01
    )


@pytest.mark.parametrize("k", [2, 100, 4000])
def test_equal_classes_in_half_precision_are_probabilities(k):
    p = CategoricalPredictive.from_logits([torch.zeros(3, k, dtype=torch.bfloat16)] * 2)
    metrics = classification_metrics(p, p.mean, torch.zeros(3).long())
    assert metrics["nll"] == pytest.approx(math.log(k), rel=0.005)


def test_nll_is_finite_where_float32_probabilities_vanish():
    log_probs = torch.tensor([[0.0, -200.0]]).log_softmax(-1)
    assert log_probs.exp()[0, 1] == 0.0
    assert nll(log_probs, torch.tensor([1])) == pytest.approx(200.0)


def test_reliability_against_numpy_and_its_own_calibration_error():
    probs, y = random_case(n=2000)
    r = reliability(probs, y, num_bins=10)
    confidence = probs.max(-1).values.numpy()
    counts, edges = np.histogram(confidence, bins=10, range=(0, 1))
    assert r.counts.tolist() == counts.tolist()
    np.testing.assert_allclose(r.edges, edges, atol=1e-7)
    empty = r.counts == 0
    assert empty.any()
    assert torch.equal(r.accuracy.isnan(), empty)
    assert torch.equal(r.confidence.isnan(), empty)
    correct = (probs.argmax(-1) == y).double().numpy()
    sums = np.histogram(confidence, bins=10, range=(0, 1), weights=correct)[0]
    np.testing.assert_allclose(r.accuracy[~empty], sums[~empty.numpy()] / counts[~empty.numpy()])
    gaps = (r.counts / r.counts.sum() * (r.accuracy - r.confidence).abs()).nansum()
    assert expected_calibration_error(probs, y, 10) == pytest.approx(gaps.item(), rel=1e-4)


def test_a_bin_includes_its_lower_limit():
    probs = torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.75, 0.0], [0.45, 0.45, 0.1]])
    y = torch.tensor([0, 1, 2])
    assert reliability(probs, y, num_bins=4).counts.tolist() == [0, 1, 1, 1]
    assert reliability(probs, y, num_bins=2).counts.tolist() == [1, 2]
    # Between .7 and the float32 next to it, which is below.
    close = torch.tensor([[0.7 - 6e-9, 0.3 + 6e-9]], dtype=torch.float64)
    assert reliability(close, y[:1], num_bins=10).counts.tolist() == [0] * 6 + [1, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bins", [10, 15, 20])
def test_shares_of_votes_lie_in_the_bin_that_they_begin(bins, dtype):
    """Also where k / bins is less in float32 than in float64."""
    for k in range(bins // 2 + 1, bins):
        share = torch.tensor(k / bins, dtype=dtype)
        probs = torch.stack((share, 1.0 - share))[None]
        counts = reliability(probs, torch.tensor([0]), bins).counts
        assert counts.tolist() == [int(place == k) for place in range(bins)]


def test_opposite_errors_of_neighbouring_bins_do_not_cancel():
    probs = torch.tensor([[0.8, 0.2]] * 10 + [[0.9, 0.1]] * 10)
    y = torch.tensor([0] * 9 + [1] + [0] * 8 + [1] * 2)
    assert expected_calibration_error(probs, y, 10) == pytest.approx(0.1, abs=1e-6)


def test_shares_of_many_examples_are_summed_in_float64():
    # 2**24 + 1 is no float32.
    few = Reliability(
        torch.tensor([0.0, 0.5, 1.0]),
        torch.tensor([0.0, 1.0], dtype=torch.float64),
        torch.tensor([1.0, 1.0], dtype=torch.float64),
        torch.tensor([1, 2**24]),
    )
    assert few.mean_gap == 1 / (2**24 + 1)


def test_classification_metrics_read_the_averaged_prediction():
    # Two weight samples: the first certain and right, the second unsure and wrong.
    sure, unsure = torch.tensor([[4.0, 0.0], [0.0, 4.0]]), torch.tensor([[1.0, 2.0], [2.0, 1.0]])
    predictive = CategoricalPredictive.from_logits([sure, unsure])
    y = torch.tensor([0, 1])
    mean_probs = torch.tensor([[0.4, 0.6], [0.3, 0.7]])
    metrics = classification_metrics(predictive, mean_probs, y)
    assert set(metrics) == {"error_mean_weights", "error_predictive", "nll", "brier", "ece"}
    assert metrics["error_mean_weights"] == 50.0
    assert metrics["error_predictive"] == error_percent(predictive.mean, y)
    assert metrics["nll"] == pytest.approx(-float(predictive.mean[[0, 1], y].log().mean()))
    assert metrics["brier"] == brier(predictive.mean, y)
    assert metrics["ece"] == expected_calibration_error(predictive.mean, y)
    assert all(type(value) is float for value in metrics.values())


def test_each_class_of_an_example_counts_but_those_that_are_ignored():
    generator = torch.Generator().manual_seed(0)
    p = CategoricalPredictive.from_logits(torch.randn(4, 5, 2, 3, 3, generator=generator))
    mean_probs = torch.randn(5, 2, 3, 3, generator=generator).softmax(-1)
    y = torch.randint(3, (5, 2, 3), generator=generator)
    found = classification_metrics(p, mean_probs, y)
    assert found["error_predictive"] == error_percent(p.mean.flatten(0, -2), y.flatten())
    assert found["error_mean_weights"] == error_percent(mean_probs.flatten(0, -2), y.flatten())
    assert found["nll"] == nll(p.log_mean.flatten(0, -2), y.flatten())
    counts = torch.rand(5, 2, 3, generator=generator) < 0.5
    left_out = classification_metrics(p, mean_probs, y.where(counts, -100), ignore_index=-100)
    assert left_out["nll"] == nll(p.log_mean[counts], y[counts]) != found["nll"]
    assert left_out["brier"] == brier(p.mean[counts], y[counts])
    assert left_out["error_mean_weights"] == error_percent(mean_probs[counts], y[counts])
    with pytest.raises(ValueError, match=r"flatten it: probs\.flatten\(0, -2\), and targets\.fl"):
        error_percent(p.mean, y)
    with pytest.raises(ValueError, match=r"targets \(5, 2, 3\), got .* and \(5, 6\)"):
        classification_metrics(p, mean_probs, y.flatten(1))
    labels = BernoulliPredictive.from_logits([torch.zeros(3)])
    with pytest.raises(ValueError, match="ignore_index must be None where labels are 0 and 1"):
        classification_metrics(labels, labels.mean, torch.zeros(3), ignore_index=-100)


def test_a_regression_raises_type_error():
    predictive = GaussianPredictive(torch.zeros(2, 3, 1), torch.tensor(1.0))
    with pytest.raises(TypeError, match=r"CategoricalPredictive, .* got GaussianPredictive"):
        classification_metrics(predictive, torch.full((3, 2), 0.5), torch.zeros(3).long())


@pytest.mark.parametrize(
    ("probs", "y", "message"),
    [
        (torch.full((2, 1, 2), 0.5), torch.zeros(2).long(), r"shape \(N, K\).* got \(2, 1, 2\)"),
        (torch.ones(2, 1), torch.zeros(2).long(), "K of at least 2"),
        (torch.zeros(0, 2), torch.zeros(0).long(), "N of at least 1"),
        (torch.ones(2, 2).long(), torch.zeros(2).long(), "floating point"),
        (torch.full((2, 2), 0.5), torch.zeros(2, 1).long(), r"shape \(2,\).* got shape \(2, 1\)"),
        (torch.full((2, 2), 0.5), torch.zeros(2), "int64, got .*float32"),
        (torch.full((2, 2), 0.5), torch.tensor([0, 2]), "from 0 to 1, .* got 2"),
        (torch.full((2, 2), 0.5), torch.tensor([-1, 0]), "got -1"),
        (torch.tensor([[2.0, -1.0]]), torch.zeros(1).long(), r"softmax\(-1\)"),
        (torch.tensor([[0.3, 0.3]]), torch.zeros(1).long(), "off by 0.4"),
        (torch.tensor([[math.nan, 0.3]]), torch.zeros(1).long(), "off by nan"),
    ],
)
def test_invalid_arguments_raise(probs, y, message):
    for metric in (error_percent, brier, expected_calibration_error, reliability):
        with pytest.raises(ValueError, match=message):
            metric(probs, y)


def test_logits_and_no_bins_raise():
    with pytest.raises(ValueError, match=r"log_softmax\(-1\)"):
        nll(torch.tensor([[2.0, 1.0]]), torch.tensor([0]))
    for metric in (expected_calibration_error, reliability):
        with pytest.raises(ValueError, match="num_bins must be at least 1, got 0"):
            metric(torch.full((1, 2), 0.5), torch.tensor([0]), num_bins=0)
        with pytest.raises(TypeError, match=r"num_bins must be a whole number, got 2\.5"):
            metric(torch.full((1, 2), 0.5), torch.tensor([0]), num_bins=2.5)


def test_lists_and_arrays_are_told_to_be_tensors():
    p, y = torch.full((1, 2), 0.5), torch.tensor([0])
    with pytest.raises(TypeError, match=r"log_probs must be a tensor, got ndarray; use torch.as_t"):
        nll(p.log().numpy(), y)
    with pytest.raises(TypeError, match="targets must be a tensor, got list"):
        error_percent(p, [0])
    with pytest.raises(TypeError, match="targets must be a tensor, got list"):
        crps(GaussianPredictive(torch.zeros(1, 1), torch.tensor(1.0)), [0.0])
    with pytest.raises(TypeError, match="in_scores must be a tensor, got list"):
        ood_auroc([0.1], torch.tensor([0.2]))
    with pytest.raises(TypeError, match="probs must be a tensor, got ndarray"):
        total_variation(p.numpy(), p)
    with pytest.raises(TypeError, match="other must be a tensor, got list"):
        wasserstein_of_samples(torch.zeros(2), [0.0])


def test_labels_in_a_list_are_named():
    p = BernoulliPredictive.from_logits([torch.zeros(3)])
    for targets, probs, name in (([0, 1, 0], p.mean, "targets"), (p.mean, [0.5] * 3, "mean_probs")):
        with pytest.raises(TypeError, match=f"{name} must be a tensor, got list"):
            classification_metrics(p, probs, targets)
