"""Networks in half precision: mean and rho stay in float32 and are trained as in float32."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.loops import loop_over
from torch import Tensor, nn
from torch.optim import Adam

import bayesify as bf
from bayesify.datasets import TensorLoader
from bayesify.distributions.likelihoods.likelihood import predictive_of
from bayesify.estimators import Estimator
from bayesify.prediction import GaussianPredictive, Predictive, SizedIterable
from bayesify.training import TargetScaleWarning

pytestmark = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")

ESTIMATORS: list[Estimator] = [
    bf.WeightSampling(),
    bf.LocalReparameterization(),
    bf.Flipout(),
]
HALVES = [torch.bfloat16, torch.float16]


def regression(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 4, generator=generator)
    y = x[:, :1] + 0.1 * torch.randn(64, 1, generator=generator)
    return x.to(dtype), y


def linear(estimator: Estimator | None = None, dtype: torch.dtype = torch.float32) -> bf.ELBO:
    torch.manual_seed(0)
    bnn = bf.BayesianModule(
        nn.Linear(4, 1).to(dtype),
        likelihood=bf.GaussianLikelihood(std=0.5),
        estimator=estimator,
        init_std=0.3,
    )
    return bf.ELBO(bnn, num_data=64)


def trained(elbo: bf.ELBO, backend: str = "auto", epochs: int = 4) -> bf.ELBO:
    x, y = regression(elbo.bnn.layout.dtype)
    loader = TensorLoader(x, y, batch_size=4)
    options = {"optimizer": partial(Adam, lr=3e-3), "backend": backend, "progress": False}
    bf.fit(elbo, loader, epochs=epochs, **options)
    return elbo


def kl_of(elbo: bf.ELBO) -> float:
    return float(bf.kl_divergence(elbo.bnn.posterior, elbo.bnn.prior).detach())


@pytest.mark.slow
@loop_over("estimator", ESTIMATORS)
def test_standard_deviations_train_as_in_float32(estimator: Estimator) -> None:
    """In bfloat16 a step of rho would be rounded away, and the std stay at .3."""
    whole = trained(linear(estimator), epochs=60)
    kl = kl_of(whole)
    for dtype, elbo in (
        (torch.float16, linear(estimator, torch.float16)),
        (torch.bfloat16, linear(estimator).bfloat16()),
    ):
        half = trained(elbo, epochs=60)
        assert half.bnn.layout.dtype == dtype
        assert half.bnn(regression(dtype)[0]).dtype == dtype
        assert half.bnn.posterior.rho.dtype == torch.float32
        assert torch.allclose(half.bnn.posterior.std, whole.bnn.posterior.std, rtol=0.1)
        assert kl_of(half) == pytest.approx(kl, rel=0.1)
    assert float(whole.bnn.posterior.std.detach().max()) < 0.2


@loop_over("backend", ["autograd", "closed-form", "compiled"])
def test_each_backend_trains_a_network_in_half_precision(backend: str) -> None:
    whole, half = trained(linear(), backend), trained(linear(dtype=torch.bfloat16), backend)
    assert torch.allclose(half.bnn.posterior.std, whole.bnn.posterior.std, rtol=0.1)


@loop_over("estimator", ESTIMATORS)
def test_replicas_train_in_half_precision(estimator: Estimator) -> None:
    x, y = regression(torch.bfloat16)
    elbos = [linear(estimator, torch.bfloat16) for _ in range(2)]
    bf.fit_replicas(elbos, TensorLoader(x, y, batch_size=32), epochs=2, progress=False)
    assert {each.bnn.posterior.mean.dtype for each in elbos} == {torch.float32}


@loop_over("estimator", ESTIMATORS)
def test_operations_are_still_recognised(estimator: Estimator) -> None:
    bnn = linear(estimator, torch.bfloat16).bnn
    whole = linear(estimator).bnn
    x, _ = regression(torch.bfloat16)
    treatments = [row.treatment for row in bnn.summary(x)]
    assert treatments == [row.treatment for row in whole.summary(x.float())]


@loop_over("dtype", HALVES)
def test_saving_and_the_plain_network(dtype: torch.dtype, tmp_path: Path) -> None:
    bnn = linear(dtype=dtype).bnn
    with torch.no_grad():
        bnn.posterior.mean += 1e-4 * torch.arange(5.0)  # no numbers of the narrow dtype
    bf.save(bnn, tmp_path / "a.safetensors")
    again = bf.load(tmp_path / "a.safetensors", nn.Linear(4, 1))
    assert torch.equal(again.posterior.mean, bnn.posterior.mean)
    assert torch.equal(again.posterior.rho, bnn.posterior.rho)
    assert (again.layout.dtype, again.posterior.mean.dtype) == (dtype, torch.float32)
    x = regression(dtype)[0]
    assert torch.equal(again.predict(x, 3).mean, bnn.predict(x, 3).mean)
    assert {parameter.dtype for parameter in again.to_module().parameters()} == {dtype}
    torch.testing.assert_close(again.to_module()(x), again.mean_outputs(x))


def test_everything_of_the_objective_stays_wide() -> None:
    net = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    bnn = bf.BayesianModule(
        net, likelihood=bf.GaussianLikelihood(learn_std=True), prior_mean="initial"
    )
    before = copy.deepcopy(bnn)
    bnn.half()
    assert bnn.prior_mean is not None
    assert before.prior_mean is not None
    assert torch.equal(bnn.prior_mean, before.prior_mean)
    assert {p.dtype for p in bnn.likelihood.parameters()} == {torch.float32}
    assert {p.dtype for p in bnn.net.parameters()} == {torch.float16}
    bnn.double()
    assert {p.dtype for p in bnn.parameters()} == {torch.float64}
    assert bnn.layout.dtype == torch.float64
    assert torch.equal(bnn.posterior.mean, before.posterior.mean.double())


LIKELIHOODS: list[tuple[bf.Likelihood, int]] = [
    (bf.CategoricalLikelihood(), 100),
    (bf.BernoulliLikelihood(), 3),
    (bf.OrdinalLikelihood(4), 1),
    (bf.GaussianLikelihood(300.0), 2),
    (bf.GaussianLikelihood(1e-4), 2),
    (bf.StudentTLikelihood(df=2.01), 2),
    (bf.CensoredGaussianLikelihood(1e-4), 2),
    (bf.PoissonLikelihood(), 2),
    (bf.NegativeBinomialLikelihood(), 2),
]


@pytest.mark.parametrize("dtype", HALVES)
@loop_over("case", LIKELIHOODS)
def test_predictions_are_in_float32(dtype: torch.dtype, case: tuple[bf.Likelihood, int]) -> None:
    """Variances overflow or vanish in half precision, and probabilities do not sum to 1."""
    likelihood, size = case
    bnn = bf.BayesianModule(nn.Linear(4, size), likelihood=likelihood, init_std=0.02)
    x = regression()[0]
    whole = bnn.predict(x, 5, keep_samples=True)
    with torch.autocast("cpu", dtype):
        mixed = bnn.predict(x, 5, keep_samples=True)
    bnn.to(dtype)
    for p in (mixed, bnn.predict(x.to(dtype), 5, keep_samples=True), bnn.predict_mean(x.to(dtype))):
        for name in ("mean", "total", "aleatoric", "epistemic"):
            assert getattr(p, name).dtype == torch.float32
        assert bool((p.total >= 0.99 * p.aleatoric).all())
        torch.testing.assert_close(p.aleatoric, whole.aleatoric, rtol=0.1, atol=0.0)


class OwnNoise(bf.Likelihood):
    """Numbers with a noise that the network predicts, as in docs/training.md."""

    error_name = "mean squared error"

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        mean, log_std = outputs.unbind(-1)
        return torch.distributions.Normal(mean, log_std.exp()).log_prob(targets)

    def predictive(self, outputs: SizedIterable, *, keep_samples: bool) -> Predictive:  # noqa: ARG002
        mean, log_std = torch.stack(list(outputs)).unbind(-1)
        return GaussianPredictive(mean, log_std.exp())

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, 0] - targets).square().mean()

    def config(self) -> dict[str, float | int | bool]:
        return {}


class Heir(OwnNoise):
    """Inherits its prediction."""


@pytest.mark.parametrize("dtype", HALVES)
def test_a_likelihood_of_ones_own_predicts_in_float32(dtype: torch.dtype) -> None:
    net = nn.Sequential(nn.Dropout(0.1), nn.Linear(4, 2))
    nn.init.constant_(net[1].bias, 6.0)  # of the noise: its variance is beyond float16
    x = regression()[0].to(dtype)
    for likelihood in (OwnNoise(), Heir()):
        bnn = bf.BayesianModule(net, likelihood=likelihood, init_std=0.02).to(dtype)
        with torch.autocast("cpu", dtype):
            mixed = bnn.predict(x.to(dtype), 5)
        for p in (
            mixed,
            bnn.predict(x, 5),
            bnn.predict_mean(x),
            bf.MCDropout(bnn.to_module(), likelihood=likelihood).predict(x, 3),
            bf.DeepEnsemble([bnn, copy.deepcopy(bnn)]).predict(x, 3),
        ):
            for part in (p.mean, p.total, p.aleatoric, p.epistemic):
                assert part.dtype == torch.float32
                assert bool(part.isfinite().all())


@pytest.mark.parametrize("dtype", HALVES)
def test_input_dependent_noise_is_predicted_in_float32(dtype: torch.dtype) -> None:
    outputs = torch.tensor([[[[0.0, 300.0], [0.0, -9.0]]]] * 2, dtype=dtype)
    p = predictive_of(bf.GaussianLikelihood(input_dependent=True), outputs, keep_samples=False)
    expected = torch.nn.functional.softplus(torch.tensor([300.0, -9.0]))
    torch.testing.assert_close(p.aleatoric[0], expected.square())


@pytest.mark.parametrize("dtype", HALVES)
def test_errors_and_validation_do_not_overflow(dtype: torch.dtype) -> None:
    bnn = bf.BayesianModule(nn.Linear(3, 1), likelihood=bf.GaussianLikelihood(1.0)).to(dtype)
    x, y = torch.zeros(8, 3, dtype=dtype), torch.zeros(8, 1, dtype=dtype)
    y[0] = 1000.0  # its square is beyond float16
    loader = TensorLoader(x, y, 8)
    elbo = bf.ELBO(bnn, num_data=8)
    with pytest.warns(TargetScaleWarning):
        (row,) = bf.fit(elbo, loader, loader, epochs=1, lr=1e-9, progress=False)
    error = 1000.0**2 / 8
    assert row["train_error"] == pytest.approx(error, rel=0.02)
    assert row["validation_error"] == pytest.approx(error, rel=0.02)
    assert row["validation_nll"] == pytest.approx(1000.0**2 / 16, rel=0.02)
