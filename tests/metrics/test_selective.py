"""Intervals, CRPS, adaptive calibration, risk and coverage, against independent computations."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from sklearn.metrics import roc_auc_score
from tests.cases import normals
from torchmetrics.functional.classification import multiclass_calibration_error

from bayesify import metrics
from bayesify.prediction import BernoulliPredictive, CategoricalPredictive, GaussianPredictive

P = GaussianPredictive(normals(6, 9, 2), 0.2 + normals(6, 9, 2, seed=1).abs())
Y = normals(9, 2, seed=2)


@pytest.mark.parametrize(("row", "column"), [(0, 0), (4, 1), (8, 0)])
def test_crps_is_the_integral(row: int, column: int) -> None:
    means, stds = P.means[:, row, column].numpy(), P.noise_std[:, row, column].numpy()
    y = float(Y[row, column])

    def gap(z: float, above: float) -> float:
        return float((stats.norm.cdf(z, means, stds).mean() - above) ** 2)

    exact = integrate.quad(gap, -30, y, args=(0.0,), epsabs=1e-12, limit=400)[0]
    exact += integrate.quad(gap, y, 30, args=(1.0,), epsabs=1e-12, limit=400)[0]
    part = GaussianPredictive(
        P.means[:, row : row + 1, column], P.noise_std[:, row : row + 1, column]
    )
    assert metrics.crps(part, Y[row : row + 1, column]) == pytest.approx(exact, abs=1e-8)


def test_crps_without_noise_is_that_of_the_empirical_distribution() -> None:
    means, y = torch.tensor([[0.0, 1.0, 2.0], [3.0, 1.0, 2.0]]), torch.tensor([0.0, 4.0, 2.0])
    p = GaussianPredictive(means, torch.tensor(0.0))
    # E|X - y| - E|X - X'| / 2, by hand: 1.5 - 0.75, 3 and 0.
    assert metrics.crps(p, y) == pytest.approx((0.75 + 3 + 0) / 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_regression_metrics_on_a_gpu() -> None:
    found = metrics.regression_metrics(
        GaussianPredictive(P.means.cuda(), torch.tensor(0.5)), Y.cuda()
    )
    on_cpu = metrics.regression_metrics(GaussianPredictive(P.means, torch.tensor(0.5)), Y)
    assert found == pytest.approx(on_cpu)


def test_regression_metrics_by_their_definitions() -> None:
    found = metrics.regression_metrics(P, Y)
    assert found["rmse"] == pytest.approx(float(((P.mean - Y) ** 2).mean() ** 0.5))
    assert found["nll"] == pytest.approx(-float(P.log_prob(Y).mean()))
    assert found["crps"] == metrics.crps(P, Y)
    assert found["mean_std"] == pytest.approx(float(P.total.mean() ** 0.5))
    for level in (0.5, 0.8, 0.95):
        low, high = P.interval(level)
        name = f"{100 * level:.0f}"
        inside = (low <= Y) & (high >= Y)
        assert found[f"coverage_{name}"] == pytest.approx(100 * float(inside.double().mean()))
        assert found[f"coverage_{name}"] == metrics.interval_coverage(P, Y, level)
        assert found[f"width_{name}"] == pytest.approx(float((high - low).mean()))
        assert found[f"width_{name}"] == metrics.interval_width(P, level)
    assert all(type(value) is float for value in found.values())


def test_risk_and_coverage_by_hand_with_ties() -> None:
    uncertainty, loss = torch.tensor([0.2, 0.1, 0.2, 0.9]), torch.tensor([1.0, 0.0, 0.0, 4.0])
    curve = metrics.risk_coverage(uncertainty, loss)
    assert curve.threshold.tolist() == pytest.approx([0.1, 0.2, 0.9])
    assert curve.coverage.tolist() == [0.25, 0.75, 1.0]
    assert curve.coverage.dtype == curve.risk.dtype == torch.float64
    assert curve.risk.tolist() == pytest.approx([0.0, 1 / 3, 1.25])
    # The two orders of the tie: (0, 1/2, 1/3, 5/4) and (0, 0, 1/3, 5/4).
    assert curve.aurc == pytest.approx((0 + 0.25 + 1 / 3 + 1.25) / 4)
    assert curve.threshold_for(0.5) == pytest.approx(0.2)
    with pytest.raises(ValueError, match=r"at most -1; the least is 0\.0"):
        curve.threshold_for(-1)


def test_the_threshold_keeps_its_risk_where_it_is_used() -> None:
    logits = 2 * normals(500, 4)
    y = torch.multinomial(logits.softmax(-1), 1, generator=torch.Generator().manual_seed(0))[:, 0]
    p = CategoricalPredictive.from_logits([logits])
    wrong = 100.0 * (p.prediction != y)
    curve = metrics.risk_coverage(p.total, wrong)
    kept = p.abstain(curve.threshold_for(10.0))
    assert float(wrong[kept.answered].mean()) <= 10.0
    assert 0.1 < kept.coverage < 0.9
    # Better than any of 999 orders by chance, which luck would be once in a thousand times.
    generator = torch.Generator().manual_seed(1)
    for _ in range(999):
        order = torch.randperm(500, generator=generator)
        assert curve.aurc < metrics.risk_coverage(p.total[order], wrong).aurc


def test_auroc_of_scores_of_any_size() -> None:
    inside, outside = normals(300).round(decimals=1), normals(200, seed=1).round(decimals=1) + 0.5
    label = np.r_[np.zeros(300), np.ones(200)]
    for scale in (1.0, 1e-6, 1e6):
        scores = scale * torch.cat((inside, outside))
        exact = roc_auc_score(label, scores.numpy())
        got = metrics.ood_auroc(scale * inside, scale * outside)
        assert got == pytest.approx(exact, abs=1e-6)
    assert metrics.ood_auroc(torch.zeros(3), torch.zeros(2)) == 0.5
    assert metrics.ood_auroc(torch.ones(1), torch.full((1,), 2.0)) == 1.0


def case(n: int = 1000, k: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    logits = 2.0 * normals(n, k)
    generator = torch.Generator().manual_seed(0)
    y = torch.multinomial((0.6 * logits).softmax(-1), 1, generator=generator).squeeze(-1)
    return logits.softmax(-1), y


def test_calibration_in_equal_bins_is_torchmetrics() -> None:
    probs, y = case()
    for norm in ("l1", "l2", "max"):
        theirs = multiclass_calibration_error(probs, y, num_classes=5, n_bins=15, norm=norm)
        assert metrics.calibration_error(probs, y, norm=norm) == pytest.approx(float(theirs), 1e-4)
    # At a hundred bins some of torchmetrics' limits in float32 lie beside the hundredths.
    hundredths = torch.arange(51, 100) / 100.0
    sure = torch.stack([hundredths, 1.0 - hundredths], -1)
    labels = torch.arange(49) % 2
    gaps = (hundredths.double() - (labels == 0).double()).abs()  # one example a bin
    exact = {"l1": gaps.mean(), "l2": gaps.square().mean().sqrt(), "max": gaps.max()}
    for norm, wanted in exact.items():
        found = metrics.calibration_error(sure, labels, 100, norm=norm)  # type: ignore[arg-type]
        assert found == pytest.approx(float(wanted), rel=1e-6)
    certain = torch.where(probs > 0.9, 1.0, probs)
    certain = torch.where((certain == 1.0).any(-1, keepdim=True) & (certain < 1), 0.0, certain)
    exact = metrics.expected_calibration_error(certain, y)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        got = metrics.calibration_error(certain.to(dtype), y, num_bins=1)
        assert got == pytest.approx(
            metrics.expected_calibration_error(certain.to(dtype), y, num_bins=1), abs=1e-5
        )
    assert metrics.calibration_error(certain, y) == pytest.approx(exact, rel=1e-4)
    together = metrics.calibration_error(
        probs, y, num_bins=1, norm="max"
    )  # one bin: all norms agree
    assert together == pytest.approx(
        metrics.expected_calibration_error(probs, y, num_bins=1), rel=1e-4
    )
    last = torch.tensor([[1.0, 0.0], [0.95, 0.05]]), torch.tensor([1, 0])
    for norm in ("l1", "l2", "max"):  # both in the last bin
        assert metrics.calibration_error(*last, norm=norm) == pytest.approx(0.475, abs=1e-6)
    with pytest.raises(ValueError, match="norm must be"):
        metrics.calibration_error(probs, y, norm="l3")


def test_adaptive_bins_hold_equally_many() -> None:
    probs, y = case()
    order = probs.max(-1).values.argsort()
    gaps = []
    for part in order.reshape(10, 100):
        confidence, predicted = probs[part].max(-1)
        gaps.append(abs(float(confidence.mean() - (predicted == y[part]).double().mean())))
    assert metrics.adaptive_calibration_error(probs, y, 10) == pytest.approx(np.mean(gaps))
    mixed = torch.randperm(1000)
    rough = probs.round(decimals=1).clamp_min(0.01)
    rough = rough / rough.sum(-1, keepdim=True)
    first = metrics.adaptive_calibration_error(rough, y, 10)
    assert metrics.adaptive_calibration_error(rough[mixed], y[mixed], 10) == pytest.approx(first)
    assert metrics.adaptive_calibration_error(probs[:1], y[:1]) > 0.0
    confidence = torch.linspace(0.55, 0.95, 10, dtype=torch.float64)
    wrong = torch.arange(10) % 2
    alone = metrics.adaptive_calibration_error(
        torch.stack([confidence, 1.0 - confidence], -1), wrong, 10
    )
    assert alone == pytest.approx(float((1 - wrong - confidence).abs().mean()))


def test_labels_are_judged_as_two_classes() -> None:
    logits, y = normals(50, 3), (normals(50, 3, seed=1) > 0).long()
    p = BernoulliPredictive.from_logits([logits])
    found = metrics.classification_metrics(p, p.mean, y)
    assert found["nll"] == pytest.approx(
        float(torch.nn.functional.binary_cross_entropy(p.mean, y.double()))
    )
    assert found["error_mean_weights"] == found["error_predictive"]
    with pytest.raises(ValueError, match=r"must have shape \(50, 3\), got \(50,\)"):
        metrics.classification_metrics(p, p.mean, y[:, 0])
    with pytest.raises(ValueError, match=r"must be 0 or 1, got 0\.5"):
        metrics.classification_metrics(p, p.mean, 0.5 * y)


def test_without_torchmetrics_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchmetrics"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    with pytest.raises(ModuleNotFoundError, match="pip install torchmetrics"):
        metrics.ood_auroc(torch.zeros(2), torch.ones(2))


NAN = torch.tensor([0.0, float("nan")])
ONE = torch.ones(2)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: metrics.risk_coverage(NAN, ONE), ValueError, "uncertainty must not be nan.*1"),
        (lambda: metrics.risk_coverage(ONE, NAN), ValueError, "loss must not be nan"),
        (
            lambda: metrics.risk_coverage(ONE, torch.ones(3)),
            ValueError,
            "must have the same length",
        ),
        (lambda: metrics.risk_coverage(torch.ones(2, 1), ONE), ValueError, r"shape \(N,\)"),
        (lambda: metrics.risk_coverage(ONE[:0], ONE[:0]), ValueError, "N of at least 1"),
        (lambda: metrics.ood_auroc(ONE, NAN), ValueError, "out_scores must not be nan"),
        (lambda: metrics.crps(P, Y[:, 0]), ValueError, r"\(9, 2\), .* got shape \(9,\)"),
        (
            lambda: metrics.interval_coverage(P, torch.where(Y > 1, torch.nan, Y), 0.9),
            ValueError,
            "targets must not be nan, got . of 18",
        ),
        (lambda: metrics.interval_coverage(P, Y, 95), ValueError, "level must lie"),
        (
            lambda: metrics.regression_metrics(CategoricalPredictive.from_logits([Y]), Y),
            TypeError,
            "got CategoricalPredictive",
        ),
    ],
)
def test_invalid_arguments_raise(
    call: Callable[[], object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        call()
