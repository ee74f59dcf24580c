"""Hamiltonian Monte Carlo: exact posteriors at a stated error rate, and faults that are caught."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import Tensor, nn

import bayesify as bf
from bayesify.referee import PosteriorDraws, hmc
from bayesify.referee.density import PosteriorDensity

diagnostics = pytest.importorskip("numpyro.diagnostics")

#: Family-wise rate of false alarms of each check of exactness.
FALSE_ALARMS = 1e-3
NOISE, PRIOR_STD, N = 0.8, 0.5, 12


def regression_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(N, 2, generator=generator)
    inputs[:, 1] += 0.7 * inputs[:, 0]  # a correlated posterior
    targets = inputs @ torch.tensor([[1.0], [-0.5]]) + 0.3
    return inputs, targets + NOISE * torch.randn(N, 1, generator=generator)


def linear_model(**options: object) -> bf.BayesianModule:
    settings = {"prior": bf.Gaussian(PRIOR_STD), "likelihood": bf.GaussianLikelihood(NOISE)}
    return bf.BayesianModule(nn.Linear(2, 1), **(settings | options), seed=3)


def exact_posterior(
    temperature: float = 1.0, prior_mean: float = 0.0, prior_std: float = PRIOR_STD
) -> tuple[Tensor, Tensor]:
    """Mean and covariance of (weight, bias), by the formulas of conjugate linear regression."""
    inputs, targets = regression_data()
    design = torch.cat([inputs, torch.ones(N, 1)], 1).double()
    by_noise = 1.0 / (temperature * NOISE**2)
    by_prior = torch.eye(3, dtype=torch.float64) / prior_std**2
    covariance = torch.linalg.inv(by_noise * design.T @ design + by_prior)
    assert (covariance.diagonal() / PRIOR_STD**2).min() > 0.1, "the prior must matter"
    shifts = by_prior.sum(-1) * prior_mean
    return covariance @ (by_noise * design.T @ targets[:, 0].double() + shifts), covariance


def check_exact(draws: PosteriorDraws, mean: Tensor, covariance: Tensor) -> None:
    """The whitened draws have mean 0 and covariance 1, within their Monte Carlo error."""
    factor = torch.linalg.cholesky(covariance)
    whitened = torch.linalg.solve_triangular(
        factor, (draws.weights - mean).flatten(0, 1).T, upper=False
    ).T.unflatten(0, draws.weights.shape[:2])
    count = whitened.shape[-1]
    moments = [whitened[..., i] for i in range(count)]
    moments += [
        whitened[..., i] * whitened[..., j] - float(i == j)
        for i in range(count)
        for j in range(i + 1)
    ]
    stacked = torch.stack(moments, -1)
    sizes = torch.from_numpy(diagnostics.effective_sample_size(stacked.numpy()))
    errors = stacked.flatten(0, 1).std(0) / sizes.sqrt()
    z = stacked.flatten(0, 1).mean(0) / errors
    p_values = torch.special.erfc(z.abs() / math.sqrt(2.0))
    assert p_values.min() > FALSE_ALARMS / len(moments), f"z = {z.tolist()}"


@pytest.fixture(scope="module")
def draws() -> PosteriorDraws:
    return hmc(linear_model(), regression_data(), num_warmup=200, num_samples=400)


def test_a_conjugate_posterior_is_met(draws: PosteriorDraws) -> None:
    inputs, _ = regression_data()
    check_exact(draws, *exact_posterior())
    assert draws.weights.shape == (4, 400, 3)
    assert draws.r_hat(inputs).shape == (N, 1)
    assert (draws.r_hat(inputs) < 1.05).all()
    assert (draws.effective_sample_size(inputs) > 200).all()
    assert (draws.divergences == 0).all()
    assert ((draws.acceptance > 0.6) & (draws.acceptance <= 1.0)).all()


def test_the_prediction_is_the_exact_one(draws: PosteriorDraws) -> None:
    inputs, _ = regression_data()
    mean, covariance = exact_posterior()
    design = torch.cat([inputs, torch.ones(N, 1)], 1).double()
    predictive = draws.predict(inputs)
    std = (design @ covariance * design).sum(-1, keepdim=True).sqrt()
    assert ((predictive.mean[:, 0] - design @ mean).abs() < 0.2 * std[:, 0]).all()
    torch.testing.assert_close(predictive.epistemic.sqrt(), std, rtol=0.15, atol=0.0)
    torch.testing.assert_close(predictive.aleatoric, torch.full((N, 1), NOISE**2).double())
    assert draws.predict(inputs, 10, keep_samples=True).samples.shape == (10, N, 1)


def test_other_moments_are_caught(draws: PosteriorDraws) -> None:
    mean, covariance = exact_posterior()
    with pytest.raises(AssertionError, match="z ="):
        check_exact(draws, mean + 0.25 * covariance.diagonal().sqrt(), covariance)
    with pytest.raises(AssertionError, match="z ="):
        check_exact(draws, mean, 1.3 * covariance)
    with pytest.raises(AssertionError, match="z ="):
        check_exact(draws, mean, covariance.diagonal().diag())  # as of a mean field


def test_a_prior_twice_as_wide_is_caught(draws: PosteriorDraws) -> None:
    """The draws of one prior, compared with the posterior of the other."""
    with pytest.raises(AssertionError, match="z ="):
        check_exact(draws, *exact_posterior(prior_std=2.0 * PRIOR_STD))


@pytest.mark.slow
def test_temperature_and_centre_of_the_prior() -> None:
    bnn = linear_model(prior_mean=torch.full((3,), 1.5))
    settings = {"num_chains": 2, "num_warmup": 150, "num_samples": 250}
    short = hmc(bnn, regression_data(), temperature=3.0, **settings)
    check_exact(short, *exact_posterior(3.0, 1.5))
    for ignored in ({"temperature": 3.0}, {"prior_mean": 1.5}, {}):
        with pytest.raises(AssertionError, match="z ="):
            check_exact(short, *exact_posterior(**ignored))


def test_too_large_a_step_is_seen() -> None:
    inputs, targets = regression_data()
    with pytest.warns(UserWarning, match=r"\d+ of 100 trajectories diverged"):
        wild = hmc(
            linear_model(),
            (inputs, targets),
            num_chains=2,
            num_warmup=5,
            num_samples=50,
            step_size=30.0,
        )
    assert (wild.divergences > 25).all()
    assert (wild.acceptance < 0.1).all()
    assert (wild.r_hat(inputs) > 1.5).any()
    assert (wild.step_size == 30.0).all()


@pytest.mark.slow
def test_point_estimates_are_held_and_pruned_weights_stay_zero() -> None:
    inputs, targets = regression_data()
    settings = {"num_chains": 1, "num_warmup": 50, "num_samples": 10}
    learned = linear_model(likelihood=bf.GaussianLikelihood(NOISE, learn_std=True))
    pruned = bf.prune(learned, fraction=1 / 3)
    before = {name: value.clone() for name, value in pruned.state_dict().items()}
    found = hmc(pruned, (inputs, targets), **settings)
    assert found.bnn.likelihood.std.item() == pytest.approx(NOISE, rel=1e-6)
    after = pruned.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    kept = pruned.posterior.mask
    assert int(kept.sum()) == 2
    assert (found.weights[..., ~kept] == 0.0).all()
    assert (found.weights[..., kept].std(1) > 0.0).all()
    only_bias = bf.BayesianModule(
        nn.Linear(2, 1), include=["bias"], likelihood=bf.GaussianLikelihood(NOISE)
    )
    assert hmc(only_bias, (inputs, targets), **settings).weights.shape == (1, 10, 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*trajectories diverged")  # chains are short here
def test_classes_and_noise_by_example() -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(15, 2, generator=generator)
    settings = {"num_chains": 2, "num_warmup": 50, "num_samples": 20}
    classes = hmc(bf.BayesianModule(nn.Linear(2, 3)), (inputs, torch.arange(15) % 3), **settings)
    assert classes.predict(inputs).mean.shape == (15, 3)
    assert classes.r_hat(inputs).shape == (15, 3)
    net = nn.Sequential(nn.Linear(2, 2), nn.Unflatten(-1, (1, 2)))
    bnn = bf.BayesianModule(net, likelihood=bf.GaussianLikelihood(input_dependent=True))
    numbers = hmc(bnn, (inputs, inputs[:, :1]), **settings)
    assert numbers.predict(inputs).mean.shape == (15, 1)
    assert numbers.r_hat(inputs).shape == (15, 1, 2)  # of mean and noise


@pytest.mark.slow
def test_the_draws_are_a_function_of_the_seed() -> None:
    settings = {"num_chains": 1, "num_warmup": 10, "num_samples": 5}
    bnn, parts = linear_model(), []
    state = torch.get_rng_state()
    first, again, other = (
        hmc(bnn, regression_data(), **settings, seed=seed, on_progress=parts.append)
        for seed in (1, 1, 2)
    )
    assert torch.equal(first.weights, again.weights)
    assert not torch.equal(first.weights, other.weights)
    assert torch.equal(torch.get_rng_state(), state)
    assert parts == [1.0] * 3
    assert int(first.num_steps) >= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_chains": 0}, "num_chains must be at least 1, got 0"),
        ({"num_samples": 3}, "num_samples must be at least 4"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"step_size": math.inf}, "step_size must be positive and finite, got inf"),
        ({"target_acceptance": 1.0}, "target_acceptance must lie strictly"),
        ({"data": (torch.zeros(5, 2), torch.zeros(4, 1))}, "a target for each of 5 examples"),
        ({"data": (torch.zeros(5, 2), torch.full((5, 1), math.nan))}, "must be finite where"),
    ],
)
def test_errors_of_values(options: dict[str, object], message: str) -> None:
    data = options.pop("data", regression_data())
    with pytest.raises(ValueError, match=message):
        hmc(linear_model(), data, **options)


def test_errors_of_types() -> None:
    with pytest.raises(TypeError, match="bnn must be a BayesianModule, got Linear"):
        hmc(nn.Linear(2, 1), regression_data())
    with pytest.raises(TypeError, match=r"data must be a pair \(inputs, targets\)"):
        hmc(linear_model(), torch.zeros(5, 2))
    with pytest.raises(TypeError, match="EmpiricalGaussian"):
        hmc(linear_model(prior=bf.EmpiricalGaussian(min_size=2)), regression_data())
    for name in ("num_chains", "num_warmup", "num_samples", "max_tree_depth"):
        with pytest.raises(TypeError, match=rf"{name} must be a whole number, got 4\.5"):
            hmc(linear_model(), regression_data(), **{name: 4.5})
    some = torch.ones(2)
    draws = PosteriorDraws(linear_model().double(), torch.zeros(2, 9, 3).double(), *[some] * 4)
    with pytest.raises(TypeError, match=r"num_samples must be a whole number, got 2\.5"):
        draws.predict(regression_data()[0], num_samples=2.5)


def test_arguments_that_are_no_tensors_reach_the_network() -> None:
    class Flagged(nn.Linear):
        def forward(self, x: Tensor, flag: bool = False, mask: object = None) -> Tensor:
            return super().forward(x) if flag and mask is None else x[:, :1]

    inputs, targets = regression_data()
    named = {"x": inputs, "flag": True, "mask": None}
    settings = {"prior": bf.Gaussian(PRIOR_STD), "likelihood": bf.GaussianLikelihood(NOISE)}
    bnn = bf.BayesianModule(Flagged(2, 1), **settings).double()
    weights, one = torch.randn(2, 9, 3).double(), torch.ones(2)
    first, second = (
        PosteriorDensity(model, data, targets, temperature=1.0)(weights[0, 0])
        for model, data in ((bnn, named), (linear_model().double(), inputs))
    )
    torch.testing.assert_close(first, second)
    draws = PosteriorDraws(bnn, weights, one, one, one, one)
    design = torch.cat([inputs, torch.ones(N, 1)], 1).double()
    wanted = (weights.flatten(0, 1) @ design.T).mean(0)
    torch.testing.assert_close(draws.predict(named).mean[:, 0], wanted)
    assert draws.r_hat(named).shape == draws.effective_sample_size(named).shape == (N, 1)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("numpyro", "numpyro.infer"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'bayesify\[referee\]'"):
        hmc(linear_model(), regression_data())


def test_draws_that_are_no_numbers_agree_on_nothing() -> None:
    weights, one = torch.randn(2, 100, 3).double(), torch.ones(2)
    fields = {"acceptance": one, "divergences": one.long(), "step_size": one, "num_steps": one}
    model = linear_model().double()
    x = torch.zeros(1, 2).double()
    weights[:, :, :] = 1.0
    equal = PosteriorDraws(bnn=model, weights=weights, **fields)
    assert float(equal.r_hat(x)) == 1.0
    assert float(equal.effective_sample_size(x)) == 200.0
    weights[0, 3, 0] = torch.nan
    broken = PosteriorDraws(bnn=model, weights=weights, **fields)
    assert float(broken.r_hat(x)) == math.inf
    assert float(broken.effective_sample_size(x)) == 0.0


def test_another_density_in_jax_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from bayesify.referee import sampler

    real = sampler.to_jax

    def faulty(*arguments: object) -> object:
        return lambda weights: 1.001 * real(*arguments)(weights)  # type: ignore[arg-type]

    monkeypatch.setattr(sampler, "to_jax", faulty)
    with pytest.raises(NotImplementedError, match="the network's density in JAX must be PyTorch's"):
        hmc(linear_model(), regression_data(), num_chains=1, num_warmup=5, num_samples=4)


def test_trajectories_that_are_cut_off_are_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"of 20 trajectories had the greatest length, 2\^1 - 1"):
        hmc(
            linear_model(),
            regression_data(),
            num_chains=1,
            num_warmup=50,
            num_samples=20,
            max_tree_depth=1,
        )
