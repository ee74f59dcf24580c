"""Ordered classes: probabilities, thresholds, quantiles, metrics, training and extremes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from tests.cases import normals
from tests.loops import loop_over
from torch import Tensor, nn

import bayesify as bf
from bayesify import OrdinalLikelihood
from bayesify.metrics import classification_metrics
from bayesify.prediction import OrdinalPredictive


def moved(num_classes: int) -> OrdinalLikelihood:
    """Thresholds away from their initial values, in float64."""
    likelihood = OrdinalLikelihood(num_classes).double()
    with torch.no_grad():
        for index, parameter in enumerate(likelihood.parameters()):
            parameter.add_(normals(*parameter.shape, seed=index))
    return likelihood


@loop_over("num_classes", [2, 3, 7])
def test_probabilities_are_differences_of_logistic_distribution_functions(num_classes: int) -> None:
    likelihood = moved(num_classes)
    outputs = 2.0 * normals(3, 40, 1)
    y = torch.arange(40) % num_classes
    cuts = likelihood.thresholds.detach().numpy()
    assert (np.diff(cuts) > 0.0).all()
    edges = np.concatenate([[-np.inf], cuts, [np.inf]])
    f = outputs[..., 0].numpy()
    exact = np.log(stats.logistic.cdf(edges[y + 1] - f) - stats.logistic.cdf(edges[y] - f))
    np.testing.assert_allclose(likelihood.log_prob(outputs, y).detach(), exact, rtol=1e-10)
    each = [likelihood.log_prob(outputs, torch.full((40,), k)).exp() for k in range(num_classes)]
    assert torch.allclose(sum(each), torch.ones(3, 40).double(), rtol=1e-13)
    wrong = stats.logistic.cdf(edges[1:] - f[0][:, None]) - stats.logistic.cdf(
        edges[:-1] - f[0][:, None]
    )
    share = 100.0 * (wrong.argmax(-1) != y.numpy()).mean()
    assert likelihood.error(outputs[0], y).item() == pytest.approx(share)


def test_at_the_start_all_classes_are_equally_probable() -> None:
    for num_classes in (2, 5):
        p = OrdinalLikelihood(num_classes).predictive([torch.zeros(1, 1)], keep_samples=False)
        assert torch.allclose(p.mean, torch.full((1, num_classes), 1.0 / num_classes))


def test_two_classes_are_labels() -> None:
    likelihood, outputs = OrdinalLikelihood(2), normals(3, 6, 1)
    y = torch.arange(6) % 2
    labels = bf.BernoulliLikelihood().log_prob(outputs[..., 0], y)
    assert torch.allclose(likelihood.log_prob(outputs, y), labels, rtol=1e-6)


def test_the_predictive_distribution_is_the_average_over_samples() -> None:
    likelihood, outputs, y = moved(5), 2.0 * normals(9, 40, 1), torch.arange(40) % 5
    p = likelihood.predictive(list(outputs), keep_samples=True)
    assert isinstance(p, OrdinalPredictive)
    assert not p.mean.requires_grad
    each = torch.stack(
        [likelihood.log_prob(outputs, torch.full((40,), k)).exp() for k in range(5)], -1
    ).detach()
    assert torch.allclose(p.samples, each, rtol=1e-12)
    mean = each.mean(0)
    assert torch.allclose(p.mean, mean, rtol=1e-12)
    assert torch.allclose(p.log_prob(y), mean[torch.arange(40), y].log(), rtol=1e-12)
    np.testing.assert_allclose(p.total, stats.entropy(mean, axis=-1), rtol=1e-10)
    np.testing.assert_allclose(p.aleatoric, stats.entropy(each, axis=-1).mean(0), rtol=1e-10)
    assert torch.allclose(p.total, p.aleatoric + p.epistemic, rtol=1e-10, atol=1e-12)
    found = classification_metrics(p, p.mean, y)
    assert found["nll"] == pytest.approx(-p.log_prob(y).mean().item())
    halves = [p.subset(range(4)), p.subset(range(4, 8))]
    joined = OrdinalPredictive.joined(halves)
    assert isinstance(joined, OrdinalPredictive)
    assert torch.allclose(joined.mean, p.subset(range(8)).mean, rtol=1e-12)


@loop_over("q", [1e-9, 0.05, 0.3, 0.5, 0.8, 0.95, 1.0 - 1e-9])
def test_quantiles_are_the_first_classes_that_reach_the_level(q: float) -> None:
    p = moved(7).predictive(list(2.0 * normals(9, 400, 1)), keep_samples=False)
    assert isinstance(p, OrdinalPredictive)
    found, below = p.quantile(q), p.mean.cumsum(-1)
    assert found.dtype == torch.int64
    rows = torch.arange(400)
    assert (below[rows, found] >= q - 1e-12).all()
    inside = found > 0
    assert (below[rows[inside], found[inside] - 1] < q + 1e-12).all()
    if q == 0.95:
        low, high = p.interval(0.9)
        held = below[rows, high] - torch.where(low > 0, below[rows, (low - 1).clamp(0)], 0.0)
        assert (held >= 0.9 - 1e-12).all()


@loop_over("dtype", [torch.float32, torch.float64])
@loop_over("num_samples", [1, 100])
@loop_over("num_classes", [2, 4, 6, 10, 20])
def test_quantiles_of_equal_probabilities(
    num_classes: int, num_samples: int, dtype: torch.dtype
) -> None:
    """The classes sum to the level exactly, which rounded logarithms do not."""
    p = OrdinalPredictive.from_logits(torch.zeros(num_samples, 1, num_classes, dtype=dtype))
    for place in range(1, 20):
        wanted = -(-place * num_classes // 20) - 1  # the first class with place / 20 up to it
        assert p.quantile(place / 20).tolist() == [wanted]


def test_quantiles_of_probabilities_that_are_nan_raise() -> None:
    outputs = normals(3, 4, 1)
    outputs[1, 2] = torch.nan
    p = moved(7).predictive(list(outputs), keep_samples=False)
    assert p.mean[2].isnan().all()
    calls: list[Callable[[], object]] = [lambda: p.quantile(0.05), lambda: p.interval(0.9)]
    for call in calls:
        with pytest.raises(ValueError, match="are numbers, got nan for example 2; correct its inp"):
            call()


@loop_over("dtype", [torch.float32, torch.float64])
@loop_over("output", [-1e4, -1e3, 0.0, 1e3, 1e4])
@loop_over("gap", [-1e3, 0.0, 1e3])
def test_extreme_outputs_have_finite_densities(
    gap: float, output: float, dtype: torch.dtype
) -> None:
    likelihood = OrdinalLikelihood(4)
    with torch.no_grad():
        likelihood.gaps.fill_(gap)
    outputs = torch.full((1, 4, 1), output, dtype=dtype, requires_grad=True)
    found = likelihood.log_prob(outputs, torch.arange(4))
    assert found.isfinite().all()
    found.sum().backward()
    assert outputs.grad is not None
    assert outputs.grad.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in likelihood.parameters())
    p = likelihood.predictive([outputs[0].detach()], keep_samples=False)
    assert p.total.isfinite().all()
    assert p.log_prob(torch.arange(4)).isfinite().all()


def graded(count: int) -> tuple[Tensor, Tensor]:
    """Grades 0 to 3 of a logistic model with slope 2 and thresholds -1, 0.5 and 2."""
    x = normals(count, 1, seed=1)
    noise = torch.from_numpy(stats.logistic.rvs(size=count, random_state=0))
    cuts = torch.tensor([-1.0, 0.5, 2.0], dtype=torch.float64)
    return x, torch.bucketize(2.0 * x[:, 0] + noise, cuts)


def test_slope_and_thresholds_of_the_data_are_found() -> None:
    x, y = graded(4000)
    net = nn.Linear(1, 1, bias=False).double()
    bnn = bf.BayesianModule(net, likelihood=OrdinalLikelihood(4).double(), posterior=bf.Delta)
    elbo = bf.ELBO(bnn, num_data=4000, temperature=0.0)
    optimizer = torch.optim.Adam(elbo.parameters(), lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        elbo(x, y).loss.backward()
        optimizer.step()
    assert isinstance(bnn.likelihood, OrdinalLikelihood)
    assert bnn.posterior.mean.item() == pytest.approx(2.0, rel=0.08)
    exact = torch.tensor([-1.0, 0.5, 2.0], dtype=torch.float64)
    assert torch.allclose(bnn.likelihood.thresholds, exact, atol=0.15)


GRADES = OrdinalLikelihood(4)
Y = torch.arange(5) % 4


@loop_over(
    ("call", "message"),
    [
        (lambda: OrdinalLikelihood(1), "num_classes must be at least 2, got 1"),
        (lambda: GRADES.log_prob(normals(2, 5, 4), Y), r"shape \(N, 1\), got \(5, 4\); end it"),
        (lambda: GRADES.log_prob(normals(2, 5), Y), r"shape \(N, 1\), got \(5,\)"),
        (lambda: GRADES.error(normals(5), Y), r"shape \(N, 1\), got \(5,\)"),
        (lambda: GRADES.predictive([normals(5, 2)], keep_samples=False), r"got \(5, 2\); end it"),
        (lambda: GRADES.predictive([], keep_samples=False), "at least one weight sample"),
        (lambda: GRADES.log_prob(normals(2, 5, 1), Y[:, None]), r"\(5,\), got shape \(5, 1\)"),
        (lambda: GRADES.log_prob(normals(2, 5, 1), Y.float()), r"got torch.float32; .*long\(\)"),
        (lambda: GRADES.log_prob(normals(2, 5, 1), Y + 1), "from 0 to 3 .*got 4; number"),
        (lambda: GRADES.log_prob(normals(2, 5, 1), Y - 1), "from 0 to 3 .*got -1; number"),
    ],
)
def test_a_wrong_argument_raises(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
