"""Prediction: the average over weight samples, and the uncertainty it is split into."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from tests.cases import OF_CLASSES, Case, each_case, mlp, normals
from tests.loops import loop_over
from torch import Tensor, nn

from bayesify import BayesianModule, CategoricalLikelihood, Delta, GaussianLikelihood
from bayesify.distributions.likelihoods.likelihood import predictive_of
from bayesify.metrics import regression_metrics
from bayesify.noise.keys import NoiseKey, Stream
from bayesify.prediction import (
    BernoulliPredictive,
    CategoricalPredictive,
    GaussianPredictive,
    NegativeBinomialPredictive,
    NumericPredictive,
    OrdinalPredictive,
    PoissonPredictive,
    stack_samples,
)

CATEGORICAL = Case("scale-mixture", "mean-field", "categorical")
GAUSSIAN = Case("gaussian", "mean-field", "gaussian")
PAIR = [CATEGORICAL, GAUSSIAN]


class DropoutNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 20), nn.Dropout(0.5), nn.ReLU(), nn.Linear(20, 4))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(2, 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(self.left(a)) + self.right(b)


def explicit_outputs(bnn: BayesianModule, x: Tensor, num_samples: int) -> Tensor:
    """The plain net's outputs (S, N, K), with the weights of each sample made by hand."""
    mean, size = bnn.posterior.mean.detach(), bnn.layout.num_weights
    std = torch.log1p(bnn.posterior.rho.detach().exp())
    plain = bnn.to_module().eval()
    outputs = []
    for sample in range(num_samples):
        key = NoiseKey(bnn.seed, Stream.PREDICTION, 0)
        noise = key.normals(range(sample, sample + 1), size, dtype=mean.dtype)[0]
        torch.nn.utils.vector_to_parameters(mean + std * noise, plain.parameters())
        outputs.append(plain(x).detach())
    return torch.stack(outputs)


def check_predict(case: Case) -> None:
    """``predict`` is the average of S forward passes with the weights of its noise key."""
    bnn, (x, y) = case.bnn(), case.data(9)
    outputs = explicit_outputs(bnn, x, 7)
    predictive = bnn.predict(x, num_samples=7, keep_samples=True)
    if case.likelihood == "categorical":
        samples = outputs.softmax(-1)
        spread = -(samples * samples.log()).sum(-1).mean(0)
        mean = samples.mean(0)
        log_prob = mean[torch.arange(9), y].log()
        total = -(mean * mean.log()).sum(-1)
    else:
        samples, mean = outputs, outputs.mean(0)
        spread = torch.full_like(mean, 0.8**2)
        total = spread + ((outputs - mean) ** 2).mean(0)
        density = stats.norm.pdf(y.numpy(), outputs.numpy(), 0.8).prod(-1).mean(0)
        log_prob = torch.from_numpy(np.log(density))
    for got, expected in (
        (predictive.samples, samples),
        (predictive.mean, mean),
        (predictive.aleatoric, spread),
        (predictive.total, total),
        (predictive.epistemic, total - spread),
        (predictive.log_prob(y), log_prob),
    ):
        assert got.shape == expected.shape
        assert torch.allclose(got, expected, rtol=1e-12, atol=1e-12)


@loop_over("case", PAIR)
def test_predict_is_the_average_of_forward_passes(case: Case) -> None:
    check_predict(case)


def test_one_sample_for_all_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    right = NoiseKey.normals
    monkeypatch.setattr(
        NoiseKey, "normals", lambda self, rows, *a, **k: right(self, range(len(rows)), *a, **k)
    )
    bnn, (x, _) = CATEGORICAL.bnn(), CATEGORICAL.data(9)
    samples = bnn.predict(x, 3, keep_samples=True).samples
    assert torch.equal(samples[0], samples[2])
    monkeypatch.undo()
    samples = bnn.predict(x, 3, keep_samples=True).samples
    assert not torch.isclose(samples[0], samples[2]).any()


@loop_over("case", PAIR)
@loop_over("batch_size", [1, 4, 9, 100])
def test_prediction_does_not_depend_on_the_batch_size(case: Case, batch_size: int) -> None:
    bnn, (x, _) = case.bnn(), case.data(9)
    expected, got = bnn.predict(x, 5), bnn.predict(x, 5, batch_size=batch_size)
    assert torch.allclose(got.mean, expected.mean, rtol=1e-12, atol=1e-13)
    assert torch.allclose(got.total, expected.total, rtol=1e-12, atol=1e-13)
    mean = bnn.predict_mean(x, batch_size=batch_size)
    assert torch.allclose(mean.mean, bnn.predict_mean(x).mean, rtol=1e-12, atol=1e-13)


@each_case
def test_uncertainty_adds_up_and_nothing_is_negative(case: Case) -> None:
    bnn, (x, _) = case.bnn(), case.data(40)
    for num_samples in (1, 2, 30):
        p = bnn.predict(x, num_samples)
        assert torch.allclose(p.total, p.aleatoric + p.epistemic, rtol=1e-12, atol=1e-12)
        assert p.epistemic.min() >= -1e-12
        assert p.aleatoric.min() > 0.0
        if num_samples == 1 or case.is_point:
            assert p.epistemic.abs().max() < 1e-12
        else:
            assert p.epistemic.median() > 1e-6
    assert bnn.predict_mean(x).epistemic.abs().max() < 1e-12


@each_case
def test_prediction_is_repeatable_and_seeded(case: Case) -> None:
    bnn, (x, _) = case.bnn(), case.data(5)
    first = bnn.predict(x, 4).mean
    bnn(x)
    torch.manual_seed(9)
    assert torch.equal(bnn.predict(x, 4).mean, first)
    assert torch.equal(bnn.predict(x, 4, seed=bnn.seed).mean, first)
    assert torch.equal(bnn.predict(x, 4, seed=99).mean, first) == case.is_point
    assert not bnn.predict(x, 4).mean.requires_grad
    assert (bnn.predict(x, 4).samples is None) == (case.likelihood in OF_CLASSES)


def test_dropout_is_off_and_every_mode_comes_back() -> None:
    net, x = DropoutNet(), normals(6, 3, dtype=torch.float32)
    bnn = BayesianModule(net, posterior=Delta)
    bnn.net[2].eval()
    modes = [module.training for module in bnn.modules()]
    assert any(modes)
    assert not all(modes)
    exact = net.eval()(x).softmax(-1)
    for _ in range(2):
        assert torch.allclose(bnn.predict(x, 2).mean, exact, atol=1e-6)
        assert torch.allclose(bnn.predict_mean(x).mean, exact, atol=1e-6)
    assert [module.training for module in bnn.modules()] == modes
    with pytest.raises(RuntimeError):
        bnn.predict(x[:, :2])
    assert [module.training for module in bnn.modules()] == modes, "also after an error"
    assert not torch.equal(bnn(x), bnn(x)), "dropout is on in training"
    assert not torch.isclose(bnn(x), net(x)).all()


def test_several_inputs_by_position_or_by_name() -> None:
    bnn = BayesianModule(TwoInputs(), likelihood=GaussianLikelihood(), init_std=0.3)
    a, b = normals(6, 3, dtype=torch.float32), normals(6, 2, seed=1, dtype=torch.float32)
    expected = bnn.predict((a, b), 3).mean
    assert expected.shape == (6, 4)
    for inputs in ([a, b], {"b": b, "a": a}):
        for batch_size in (4096, 4):
            got = bnn.predict(inputs, 3, batch_size=batch_size).mean
            assert torch.allclose(got, expected, atol=1e-6)
    key = NoiseKey(0, Stream.TRAINING, 0)
    by_name, _ = bnn.sample_outputs({"a": a, "b": b}, key, range(3))
    by_place, _ = bnn.sample_outputs((a, b), key, range(3))
    assert torch.equal(by_name, by_place)
    assert not torch.isclose(bnn.predict((-a, b), 3).mean, expected).any()


MEANS = normals(5, 4, 2, seed=3)
NOISE = 0.1 + normals(5, 1, 2, seed=4).abs()
TARGETS = normals(4, 2, seed=5)


def mixture_cdf(y: float, row: int, column: int) -> float:
    centres, noise = MEANS[:, row, column].numpy(), NOISE[:, 0, column].numpy()
    return float(stats.norm.cdf(y, centres, noise).mean())


@loop_over("q", [1e-9, 0.025, 0.3, 0.5, 0.975, 1.0 - 1e-7])
def test_quantiles_are_those_of_the_mixture(q: float) -> None:
    got = GaussianPredictive(MEANS, NOISE).quantile(q)
    for row in range(4):
        for column in range(2):
            exact = optimize.brentq(
                lambda y, r=row, c=column: mixture_cdf(y, r, c) - q, -60.0, 60.0, xtol=1e-13
            )
            assert got[row, column].item() == pytest.approx(exact, abs=1e-9)


@loop_over("q", [1e-30, 1e-9, 0.001, 0.1, 0.5, 0.975, 1.0 - 1e-9])
@loop_over("dtype", [torch.float32, torch.float64])
def test_one_component_has_the_quantile_of_a_gaussian(q: float, dtype: torch.dtype) -> None:
    means = MEANS[:1].to(dtype).expand(3, 4, 2)
    got = GaussianPredictive(means, torch.tensor(0.3, dtype=dtype)).quantile(q)
    exact = stats.norm.ppf(q, means[0].numpy(), 0.3)
    tolerance = 30 * torch.finfo(dtype).eps
    assert np.allclose(got.numpy(), exact, rtol=tolerance, atol=tolerance)


def test_quantiles_of_a_usual_mixture_take_few_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, erfc = [], torch.erfc

    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.numel())
        return erfc(x)

    monkeypatch.setattr(torch, "erfc", counted)
    p = GaussianPredictive(normals(50, 400, seed=6), torch.tensor(0.5, dtype=torch.float64))
    p.quantile(0.975)
    assert len(calls) <= 8


@loop_over("q", [1e-6, 0.025, 0.25, 0.5, 0.75, 0.975])
@loop_over(
    ("means", "std"),
    [
        ([-30.0, -29.0, 29.0, 30.0], 0.3),  # nothing lies between two of them
        ([0.0, 0.0, 0.0, 1e4], 0.5),
        ([1e9, 1e9 + 1.0, 1e9 + 2.0, 1e9 + 7.0], 1e-3),
        ([5.0] * 4, 1e-12),
    ],
)
def test_quantiles_where_newton_would_leave_the_mixture(
    means: list[float], std: float, q: float
) -> None:
    centres = torch.tensor(means, dtype=torch.float64)
    p = GaussianPredictive(centres.unsqueeze(-1), torch.tensor(std, dtype=torch.float64))
    found = p.quantile(q)
    # One step of rounding to either side of it: the distribution function passes q there.
    step = 4.0 * torch.finfo(torch.float64).eps * centres.abs().max() + 1e-9 * std
    assert p.cdf(found - step).item() <= q * (1.0 + 1e-9)
    assert p.cdf(found + step).item() >= q * (1.0 - 1e-9)


def test_intervals_hold_their_level_with_equal_tails() -> None:
    p = GaussianPredictive(MEANS, NOISE)
    low, high = p.interval(0.9)
    for row in range(4):
        for column in range(2):
            assert mixture_cdf(low[row, column].item(), row, column) == pytest.approx(0.05)
            assert mixture_cdf(high[row, column].item(), row, column) == pytest.approx(0.95)


def test_gaussian_log_prob_is_of_the_joint_mixture() -> None:
    parts = stats.norm.pdf(TARGETS.numpy(), MEANS.numpy(), NOISE.expand_as(MEANS).numpy())
    exact = np.log(parts.prod(-1).mean(0))
    got = GaussianPredictive(MEANS, NOISE).log_prob(TARGETS)
    assert np.allclose(got.numpy(), exact, rtol=1e-12)
    marginal = np.log(parts.mean(0)).sum(-1)
    assert not np.allclose(exact, marginal, rtol=1e-3), "the parts of a target share the weights"
    scalar = GaussianPredictive(MEANS[..., 0], NOISE[..., 0]).log_prob(TARGETS[:, 0])
    assert np.allclose(scalar.numpy(), np.log(parts[..., 0].mean(0)), rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_classes_may_have_any_integer_dtype(dtype: torch.dtype) -> None:
    for kind in (CategoricalPredictive, OrdinalPredictive):
        p, y = kind.from_logits([normals(5, 3)]), torch.tensor([0, 2, 1, 1, 0])
        assert torch.equal(p.log_prob(y.to(dtype)), p.log_prob(y))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.complex64])
def test_classes_that_are_no_integers_raise(dtype: torch.dtype) -> None:
    p = CategoricalPredictive.from_logits([normals(5, 3)])
    message = f"class indices of dtype torch.int64, got {dtype}; convert them with"
    with pytest.raises(ValueError, match=message):
        p.log_prob(torch.ones(5, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.complex64])
def test_logits_that_are_no_floating_point_numbers_raise(dtype: torch.dtype) -> None:
    logits = torch.tensor([[[3, 0, 0]], [[0, 1, 0]]]).to(dtype)
    for kind in (CategoricalPredictive, OrdinalPredictive, BernoulliPredictive):
        with pytest.raises(TypeError, match=f"got {dtype}; use logits.float"):
            kind.from_logits(logits)
    if dtype == torch.int64:  # those of a network are converted
        p = predictive_of(CategoricalLikelihood(), logits, keep_samples=True)
        torch.testing.assert_close(p.mean, logits.float().softmax(-1).mean(0))


def test_confident_logits_have_finite_answers() -> None:
    logits = [torch.tensor([[800.0, 0.0, -800.0]]), torch.tensor([[500.0, 0.0, -900.0]])]
    p = CategoricalPredictive.from_logits(logits, keep_samples=True)
    assert p.log_prob(torch.tensor([2])).item() == pytest.approx(-1400.0 - np.log(2.0), rel=1e-6)
    assert p.total.item() == p.aleatoric.item() == p.epistemic.item() == 0.0
    assert torch.equal(p.samples.sum(-1), torch.ones(2, 1))


def test_the_error_of_outputs_is_the_stated_one() -> None:
    outputs, y = normals(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    wrong = int((outputs.argmax(-1) != y).sum())
    assert CATEGORICAL.bnn().likelihood.error(outputs, y).item() == pytest.approx(100 * wrong / 6)
    squared = GAUSSIAN.bnn().likelihood.error(outputs, torch.zeros(6, 4))
    assert squared.item() == pytest.approx(outputs.square().mean().item(), rel=1e-6)


def test_mean_outputs_are_the_nets_own() -> None:
    net = mlp()
    x, _ = CATEGORICAL.data(5)
    bnn = CATEGORICAL.bnn(net)
    assert torch.allclose(bnn.mean_outputs(x), net(x), atol=1e-14)
    assert torch.allclose(bnn.predict_mean(x).mean, net(x).softmax(-1), atol=1e-14)


class InBlocks:
    """Outputs that are computed several samples at a time."""

    def __init__(self, outputs: Tensor, sizes: list[int]) -> None:
        self._outputs, self._sizes = outputs, sizes

    def __len__(self) -> int:
        return len(self._outputs)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._outputs)

    def blocks(self) -> Iterator[Tensor]:
        yield from self._outputs.split(self._sizes)


@loop_over("sizes", [[7], [1, 6], [3, 1, 3]])
def test_blocks_of_samples_give_the_average_of_all(sizes: list[int]) -> None:
    torch.manual_seed(0)
    logits = 3.0 * torch.randn(7, 5, 4, dtype=torch.float64)
    for predictive in (CategoricalPredictive, BernoulliPredictive):
        expected = predictive.from_logits(list(logits), keep_samples=True)
        found = predictive.from_logits(InBlocks(logits, sizes), keep_samples=True)
        for name in ("log_mean", "expected_entropy", "epistemic", "samples"):
            torch.testing.assert_close(
                getattr(found, name), getattr(expected, name), rtol=1e-12, atol=1e-14
            )
    assert torch.equal(stack_samples(InBlocks(logits, sizes)), logits)


@pytest.mark.parametrize(
    "p",
    [
        GaussianPredictive(torch.zeros(2, 3), torch.tensor(1.0)),
        PoissonPredictive(torch.zeros(2, 3)),
    ],
)
def test_draws_take_any_seed_and_a_whole_number(p: NumericPredictive) -> None:
    assert torch.equal(p.simulate(50, seed=-1), p.simulate(50, seed=-1))
    assert not torch.equal(p.simulate(50, seed=-1), p.simulate(50, seed=1))
    with pytest.raises(TypeError, match=r"num_draws must be a whole number, got 2\.5"):
        p.simulate(2.5)  # type: ignore[arg-type]


def poisson(rates: Tensor) -> NumericPredictive:
    return PoissonPredictive(rates)


def negative_binomial(rates: Tensor) -> NumericPredictive:
    return NegativeBinomialPredictive(rates, 0.5 * rates.exp().mean())


@pytest.mark.parametrize("made", [poisson, negative_binomial])
def test_counts_in_a_loop_that_has_gradients(made: Callable[[Tensor], NumericPredictive]) -> None:
    rates = torch.randn(3, 4, requires_grad=True)
    p, alone = made(rates), made(rates.detach())
    assert torch.equal(p.simulate(5), alone.simulate(5))
    assert regression_metrics(p, torch.ones(4)) == regression_metrics(alone, torch.ones(4))


def test_numbers_must_be_floating_point() -> None:
    """In integers the noise and the probabilities would be cut."""
    with pytest.raises(TypeError, match=r"log_rates must be floating-point numbers, got torch.int"):
        PoissonPredictive(torch.tensor([[1], [2]]))
    with pytest.raises(TypeError, match=r"means must be .*use means\.float\(\)"):
        GaussianPredictive(torch.tensor([[10], [10]]), torch.tensor(1.5))
