"""Posteriors whose weights depend on each other, against dense Gaussians and exact posteriors."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from tests.cases import PRIORS, mlp, normals
from tests.loops import loop_over, noted
from torch import Tensor, nn
from torch.distributions import MultivariateNormal
from torch.distributions import kl_divergence as reference_kl

from bayesify import (
    ELBO,
    BayesianModule,
    Delta,
    Flipout,
    FullGaussian,
    Gaussian,
    GaussianLikelihood,
    LocalReparameterization,
    LowRankGaussian,
    MatrixGaussian,
    MeanFieldGaussian,
    PosteriorByGroup,
    PosteriorFamily,
    StudentT,
    fit,
    fit_replicas,
    kl_divergence,
    load,
    prune,
    save,
    snr,
)
from bayesify.distributions import correlations
from bayesify.distributions.structured import StructuredGaussian
from bayesify.noise.keys import NoiseKey, Stream

FAMILIES: dict[str, PosteriorFamily] = {
    "low-rank": LowRankGaussian(rank=3),
    "low-rank-full": LowRankGaussian(rank=44),
    "matrix": MatrixGaussian(),
    "matrix-one-side": MatrixGaussian(max_side=4),
    "full": FullGaussian(),
    "by-layer": PosteriorByGroup({"2.*": FullGaussian(), "*": MeanFieldGaussian}),
    "interleaved": PosteriorByGroup({"*.weight": LowRankGaussian(2), "*": FullGaussian()}),
}
each_family = loop_over("family", list(FAMILIES.values()))


def wide(family: PosteriorFamily, **options: object) -> BayesianModule:
    """A network of 44 weights with strong correlations, in float64."""
    bnn = BayesianModule(mlp(), posterior=family, init_std=0.3, seed=5, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        for index, parameter in enumerate(bnn.posterior.parameters()):
            shift = normals(parameter.numel(), seed=20 + index).view_as(parameter)
            parameter.add_(shift, alpha=0.5)
    return bnn


def covariance(bnn: BayesianModule) -> Tensor:
    """Draws are linear in the noise: row i of the draw of the identity is what noise i does."""
    q = bnn.posterior
    size = q.noise(NoiseKey(0, Stream.TRAINING, 0), range(1)).shape[1]
    factor = q.draw(torch.eye(size, dtype=q.mean.dtype)).weights - q.masked_mean
    return (factor.T @ factor).detach()


def dense(bnn: BayesianModule) -> MultivariateNormal:
    kept = slice(None) if bnn.posterior.mask is None else bnn.posterior.mask
    return MultivariateNormal(bnn.posterior.mean.detach()[kept], covariance(bnn)[kept][:, kept])


def reference_total_correlation(q: MultivariateNormal) -> float:
    entropies = q.variance.log().mul(0.5) + 0.5 * math.log(2.0 * math.pi * math.e)
    return float(entropies.sum() - q.entropy())


@each_family
@loop_over("pruned", [False, True])
def test_std_and_total_correlation_are_those_of_the_dense_gaussian(
    family: PosteriorFamily, pruned: bool
) -> None:
    bnn = wide(family)
    if pruned:
        bnn = prune(bnn, 0.4)
    q, reference = bnn.posterior, dense(bnn)
    kept = slice(None) if q.mask is None else q.mask
    assert torch.allclose(q.std[kept], reference.stddev, rtol=1e-12)
    # Covariances of draws lose digits where the weights are nearly dependent.
    total = q.total_correlation().item()
    assert total == pytest.approx(reference_total_correlation(reference), rel=1e-7)


@each_family
def test_well_conditioned_total_correlations_agree_to_ten_digits(family: PosteriorFamily) -> None:
    bnn = BayesianModule(mlp(), posterior=family, init_std=0.3, seed=5)
    with torch.no_grad():
        for name, parameter in bnn.posterior.named_parameters():
            if "correlations" in name:
                parameter.copy_(0.08 * normals(parameter.numel(), seed=3).view_as(parameter))
    expected = reference_total_correlation(dense(bnn))
    total = bnn.posterior.total_correlation().item()
    assert total > 0.001
    assert total == pytest.approx(expected, rel=1e-10, abs=1e-12)


@each_family
def test_kl_to_a_gaussian_is_that_of_dense_gaussians(family: PosteriorFamily) -> None:
    bnn = wide(family)
    centre = normals(44, seed=9)
    p = MultivariateNormal(centre, 0.7**2 * torch.eye(44, dtype=torch.float64))
    got = kl_divergence(bnn.posterior, Gaussian(0.7), prior_mean=centre)
    assert got.item() == pytest.approx(reference_kl(dense(bnn), p).item(), rel=1e-7)


@each_family
def test_a_monte_carlo_kl_agrees_with_the_joint_density(family: PosteriorFamily) -> None:
    """Two estimates over the same 4,000 draws; their difference has mean 0 (5 standard errors)."""
    bnn = wide(family)
    q, reference = bnn.posterior, dense(bnn)
    with torch.no_grad():
        draws = [
            q.draw(q.noise(NoiseKey(1, Stream.TRAINING, step), range(40))) for step in range(100)
        ]
        log_q = [reference.log_prob(d.weights) for d in draws]
    for prior in PRIORS.values():
        with torch.no_grad(), noted(prior=prior):
            ours = torch.stack([kl_divergence(q, prior, d, method="monte-carlo") for d in draws])
            joint = torch.stack(
                [
                    (each - prior.log_prob(d.weights).sum(1)).mean()
                    for each, d in zip(log_q, draws, strict=True)
                ]
            )
            difference = ours - joint
            error = difference.std() / math.sqrt(len(draws))
            assert abs(difference.mean()) < 5.0 * error + 1e-6


def test_a_dropped_total_correlation_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        correlations.LowRank, "total_correlation", lambda *arguments: arguments[1].sum() * 0.0
    )
    with pytest.raises(AssertionError):
        test_kl_to_a_gaussian_is_that_of_dense_gaussians.__wrapped__(LowRankGaussian(3))  # type: ignore[attr-defined]


# Bayesian linear regression, whose posterior is a Gaussian that is known exactly.

NOISE, PRIOR_STD = 0.5, 1.2


def regression() -> tuple[Tensor, Tensor]:
    mixing = torch.tensor([[1.0, 0.9, 0.3], [0.0, 0.4, 0.2], [0.0, 0.0, 0.7]], dtype=torch.float64)
    x = normals(40, 3, seed=1) @ mixing
    return x, (x @ torch.tensor([[1.0], [-2.0], [0.5]]).double()) + NOISE * normals(40, 1, seed=2)


def exact_posterior(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    precision = x.T @ x / NOISE**2 + torch.eye(3, dtype=x.dtype) / PRIOR_STD**2
    covariance = precision.inverse()
    return (covariance @ x.T @ y / NOISE**2).squeeze(1), covariance


def trained_regression(family: PosteriorFamily | type[MeanFieldGaussian]) -> BayesianModule:
    x, y = regression()
    net = nn.Linear(3, 1, bias=False).double()
    bnn = BayesianModule(
        net,
        likelihood=GaussianLikelihood(std=NOISE),
        prior=Gaussian(PRIOR_STD),
        posterior=family,
        init_std=0.1,
        seed=2,
    )
    # The loss is quadratic in the noise: over these points its mean is the exact expectation.
    size = bnn.posterior.noise(NoiseKey(0, Stream.TRAINING, 0), range(1)).shape[1]
    points = math.sqrt(size) * torch.cat([torch.eye(size), -torch.eye(size)]).double()
    bnn.posterior.noise = lambda *_: points  # type: ignore[method-assign]
    elbo = ELBO(bnn, num_data=40, num_samples=len(points), fused=False)
    optimizer = torch.optim.LBFGS(elbo.parameters(), max_iter=400, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = elbo(x, y).loss
        loss.backward()
        return loss

    optimizer.step(closure)
    del bnn.posterior.noise
    return bnn


@loop_over("family", [FullGaussian(), LowRankGaussian(rank=3), MatrixGaussian()])
def test_linear_regression_has_the_exact_posterior(family: PosteriorFamily) -> None:
    """Low rank of full rank equals full; a layer of one output has any covariance of its inputs."""
    bnn = trained_regression(family)
    mean, expected = exact_posterior(*regression())
    stds = expected.diagonal().sqrt()
    assert ((bnn.posterior.mean - mean).abs() < 0.001 * stds).all()
    error = (covariance(bnn) - expected) / torch.outer(stds, stds)
    assert error.abs().max() < 0.01


def test_the_mean_field_fails_that_test() -> None:
    """Its variances are those of the other weights held fixed (Bishop 2006, section 10.1.2)."""
    expected = exact_posterior(*regression())[1]
    bnn = trained_regression(MeanFieldGaussian)
    variances = covariance(bnn).diagonal()
    assert torch.allclose(variances, 1.0 / expected.inverse().diagonal(), rtol=1e-3)
    assert (variances / expected.diagonal()).min() < 0.6


# The rest of the library


@each_family
@loop_over("pruned", [False, True])
def test_saved_and_loaded_they_give_the_same_predictions(
    family: PosteriorFamily, pruned: bool, tmp_path: Path
) -> None:
    bnn = prune(wide(family), 0.5) if pruned else wide(family)
    save(bnn, tmp_path / "model")
    again = load(tmp_path / "model", mlp(seed=8))
    x = normals(6, 3)
    assert again.posterior.family == family
    assert torch.equal(again.predict(x).mean, bnn.predict(x).mean)
    assert torch.equal(again.posterior.std, bnn.posterior.std)
    if pruned:
        save(wide(family), tmp_path / "whole")
        assert (tmp_path / "model").stat().st_size < (tmp_path / "whole").stat().st_size


@each_family
def test_pruning_goes_by_the_marginals(family: PosteriorFamily) -> None:
    bnn = wide(family)
    ratio = snr(bnn)
    assert torch.allclose(ratio, bnn.posterior.mean.abs() / bnn.posterior.std)
    kept = prune(bnn, 0.5).posterior.mask
    assert kept is not None
    assert ratio[kept].min() > ratio[~kept].max()


@loop_over("estimator", [LocalReparameterization(), Flipout()])
def test_noise_for_each_example_keeps_the_correlations(
    estimator: LocalReparameterization | Flipout,
) -> None:
    """Mean and covariance of a network's outputs over 4,000 passes: those of weight draws.

    The network is linear in its weights, so that both are known. Each entry is compared by its
    standard error; that one of 30 is 5 of them off has a probability below 2e-5.
    """
    family = LowRankGaussian(rank=2)
    net = nn.Linear(3, 4).double()
    bnn = BayesianModule(net, posterior=family, estimator=estimator, init_std=0.3, seed=3)
    with torch.no_grad():
        bnn.posterior.correlations[0].factor.copy_(normals(16, 2, seed=4))
    x, count = normals(1, 3, seed=6), 4000
    with torch.no_grad():
        outputs, _ = bnn.sample_outputs(x, NoiseKey(0, Stream.TRAINING, 0), range(count))
    jacobian = torch.cat(
        [torch.kron(torch.eye(4, dtype=x.dtype), x), torch.eye(4, dtype=x.dtype)], dim=1
    )
    expected = jacobian @ covariance(bnn) @ jacobian.T
    outputs = outputs[:, 0]
    mean = jacobian @ bnn.posterior.mean
    assert ((outputs.mean(0) - mean).abs() < 5.0 * (expected.diagonal() / count).sqrt()).all()
    variances = expected.diagonal()
    error = ((torch.outer(variances, variances) + expected.square()) / count).sqrt()
    assert ((outputs.T.cov() - expected).abs() < 5.0 * error).all()


def test_examples_have_their_own_noise_around_what_they_share() -> None:
    bnn = BayesianModule(
        nn.Linear(3, 4),
        posterior=LowRankGaussian(1),
        estimator=LocalReparameterization(),
        init_std=0.3,
    )
    outputs = bnn(torch.ones(2, 3))
    assert not torch.allclose(outputs[0], outputs[1])


@each_family
def test_fit_trains_them(family: PosteriorFamily) -> None:
    bnn = BayesianModule(mlp(torch.float32), posterior=family, seed=1)
    x, y = normals(60, 3, dtype=torch.float32), torch.arange(60) % 4
    before = {name: p.detach().clone() for name, p in bnn.named_parameters()}
    loader = [(x[:30], y[:30]), (x[30:], y[30:])]
    history = fit(ELBO(bnn, num_data=60), loader, epochs=3)
    assert len(history) == 3
    for name, parameter in bnn.named_parameters():
        assert not torch.equal(parameter, before[name]), name


def test_several_at_once_become_what_each_becomes_alone() -> None:
    x, y = normals(40, 3, dtype=torch.float32), torch.arange(40) % 4

    def objective(seed: int) -> ELBO:
        net = mlp(torch.float32, seed=seed)
        return ELBO(BayesianModule(net, posterior=LowRankGaussian(2), seed=seed), num_data=40)

    together, alone = [objective(1), objective(2)], [objective(1), objective(2)]
    fit_replicas(together, [[(x, y)], [(x, y)]], epochs=3, backend="autograd")
    for elbo in alone:
        fit(elbo, [(x, y)], epochs=3, backend="autograd")
    for one, other in zip(together, alone, strict=True):
        for name, parameter in one.bnn.named_parameters():
            assert torch.allclose(parameter, other.bnn.get_parameter(name), atol=1e-5), name


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_parameter_without_elements_has_no_correlations() -> None:
    net = nn.Sequential(nn.Linear(3, 0), nn.Linear(0, 2))
    bnn = BayesianModule(net, posterior=MatrixGaussian())
    terms = ELBO(bnn, num_data=4)(torch.ones(4, 3), torch.zeros(4, dtype=torch.long))
    assert bool(terms.loss.isfinite())


def test_half_precision_keeps_the_factors_wide() -> None:
    bnn = BayesianModule(mlp(torch.float32), posterior=LowRankGaussian(2)).bfloat16()
    assert {p.dtype for p in bnn.posterior.parameters()} == {torch.float32}
    assert bnn(torch.ones(2, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_pruned_large_layer_has_no_formula() -> None:
    bnn = prune(BayesianModule(nn.Linear(100, 60), posterior=MatrixGaussian()), 0.5)
    assert bnn.predict(torch.ones(2, 100)).mean.shape == (2, 60)
    with pytest.raises(TypeError, match="at most 4,096 weights, got one of 6,060; predict with"):
        bnn.posterior.total_correlation()


@pytest.mark.parametrize(("family", "scale"), [(FullGaussian(), 0.5), (MatrixGaussian(), 1.0)])
def test_pruning_keeps_the_digits_of_nearly_dependent_weights(
    family: PosteriorFamily, scale: float
) -> None:
    net = nn.Linear(100, 1, bias=False) if isinstance(family, FullGaussian) else nn.Linear(19, 20)
    bnn = BayesianModule(net, posterior=family)
    with torch.no_grad():
        for name, parameter in bnn.posterior.named_parameters():
            if "correlations" in name:
                parameter.copy_(scale * normals(parameter.numel(), seed=3).view_as(parameter))
    bnn.posterior.mask = torch.arange(bnn.layout.num_weights) > 0
    found = float(bnn.posterior.total_correlation().detach())
    expected = float(copy.deepcopy(bnn).double().posterior.total_correlation().detach())
    assert found == pytest.approx(expected, rel=1e-4)


def test_a_parameter_without_a_number_has_a_group_too() -> None:
    net = mlp()
    net.register_parameter("a_nothing", nn.Parameter(torch.zeros(0, 3, dtype=torch.float64)))
    groups = {"0.*": FullGaussian(), "*": MeanFieldGaussian}
    bnn = BayesianModule(net, posterior=PosteriorByGroup(groups))
    assert bnn.posterior.std.shape == (bnn.layout.num_weights,)
    assert torch.allclose(bnn.posterior.std, BayesianModule(net).posterior.std)


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="rank must be at least 1, got 0"):
        LowRankGaussian(0)
    with pytest.raises(ValueError, match="must have at least one pattern, got none"):
        PosteriorByGroup({})
    for wrong in (5, [("a",)]):
        with pytest.raises(TypeError, match="must be given a mapping of name patterns or pairs"):
            PosteriorByGroup(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"or families such as FullGaussian.*got .*Delta"):
        PosteriorByGroup({"*": Delta})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"every random parameter a family"):
        BayesianModule(mlp(), posterior=PosteriorByGroup({"9.*": FullGaussian()}))
    with pytest.raises(TypeError, match="must be made by a family; write posterior=LowRank"):
        BayesianModule(mlp(), posterior=StructuredGaussian)


@each_family
def test_autocast_does_not_change_the_distribution(family: PosteriorFamily) -> None:
    pruned = prune(wide(family), fraction=0.5).float()
    for bnn in (wide(family).float(), pruned):
        q = bnn.posterior
        noise = q.noise(NoiseKey(0, Stream.TRAINING, 0), range(3))
        expected = q.draw(noise).weights, q.std, q.total_correlation()
        with torch.autocast("cpu", torch.bfloat16):
            torch.clear_autocast_cache()
            got = q.draw(noise).weights, q.std, q.total_correlation()
        for narrow, exact in zip(got, expected, strict=True):
            assert torch.equal(narrow, exact)


def test_autocast_does_not_change_the_moments_given_some_noise() -> None:
    bnn = wide(LowRankGaussian(3)).float()
    q, shared = bnn.posterior, normals(3, seed=1, dtype=torch.float32)
    assert isinstance(q, StructuredGaussian)
    means = q.moments_given(shared, bnn.layout).means
    with torch.autocast("cpu", torch.bfloat16):
        torch.clear_autocast_cache()
        narrow = q.moments_given(shared, bnn.layout).means
    assert all(torch.equal(narrow[name], means[name]) for name in means)


@pytest.mark.parametrize("family", [LowRankGaussian(3), FullGaussian()], ids=repr)
def test_a_tiny_initial_std_in_float32(family: PosteriorFamily) -> None:
    bnn = BayesianModule(nn.Linear(3, 2), posterior=family, init_std=1e-30)
    torch.testing.assert_close(bnn.posterior.std, torch.full((8,), 1e-30), rtol=1e-4, atol=0.0)


def test_the_error_of_an_embedding_with_padding_names_it() -> None:
    net = nn.Sequential(nn.Embedding(500, 10, padding_idx=0), nn.Flatten(), nn.Linear(20, 2))
    elbo = ELBO(BayesianModule(net, posterior=MatrixGaussian()), num_data=2)
    with pytest.raises(TypeError, match=r"an embedding's padding row, .* by PosteriorByGroup"):
        elbo(torch.ones(2, 2, dtype=torch.long), torch.zeros(2, dtype=torch.long))


@pytest.mark.parametrize("family", [LowRankGaussian(2), MatrixGaussian(), FullGaussian()])
@pytest.mark.parametrize("rho", [-100.0, -60.0, -46.0, 0.0, 100.0])
def test_extreme_standard_deviations_are_finite(family: PosteriorFamily, rho: float) -> None:
    bnn = BayesianModule(nn.Linear(3, 2), posterior=family, prior=Gaussian(1.0))
    with torch.no_grad():
        bnn.posterior.rho.fill_(rho)
    kl = kl_divergence(bnn.posterior, bnn.weight_prior)
    kl.backward()
    assert bool(kl.isfinite())
    for name, parameter in bnn.posterior.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name


def test_extreme_standard_deviations_side_by_side_have_the_kl_of_the_mean_field() -> None:
    """At its start the family has no correlations."""
    found = []
    for posterior in (MeanFieldGaussian, MatrixGaussian()):
        bnn = BayesianModule(nn.Linear(3, 2), posterior=posterior, prior=Gaussian(1.0))
        with torch.no_grad():
            bnn.posterior.mean.zero_()
            bnn.posterior.rho.copy_(torch.tensor([-100.0, 50.0] * 4))
        kl = kl_divergence(bnn.posterior, bnn.weight_prior)
        slopes = torch.autograd.grad(kl, list(bnn.posterior.parameters()))
        assert all(bool(slope.isfinite().all()) for slope in slopes)
        found.append((kl.detach(), slopes[1]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("family", [LowRankGaussian(2), MatrixGaussian(), FullGaussian()])
@pytest.mark.parametrize("init_std", [1e-30, 1e-24, 1e-3])
def test_tiny_initial_standard_deviations(family: PosteriorFamily, init_std: float) -> None:
    bnn = BayesianModule(nn.Linear(3, 2), posterior=family, init_std=init_std)
    torch.testing.assert_close(bnn.posterior.std, torch.full((8,), init_std), rtol=1e-4, atol=0.0)
    expected = torch.full((8,), math.log(init_std))
    torch.testing.assert_close(bnn.posterior.log_std, expected, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("family", [LowRankGaussian(2), MatrixGaussian(), FullGaussian()])
@pytest.mark.parametrize("rho", [-200.0, -20.0, -14.0, 0.0])
def test_densities_of_draws_do_not_lose_small_deviations(
    family: PosteriorFamily, rho: float
) -> None:
    """At their start the families have no correlations: they are the mean field."""
    found = []
    for posterior in (MeanFieldGaussian, family):
        bnn = BayesianModule(nn.Linear(20, 3), posterior=posterior, prior=StudentT())
        with torch.no_grad():
            bnn.posterior.mean.fill_(0.3)
            bnn.posterior.rho.fill_(rho)
            for name, each in bnn.posterior.named_parameters():
                if name not in ("mean", "rho"):
                    each.zero_()
        noise = normals(4, bnn.posterior.noise(NoiseKey(0, Stream.TRAINING, 0), range(4)).shape[1])
        if posterior is not MeanFieldGaussian and family == LowRankGaussian(2):
            noise[:, 63:] = 0.0
        noise[:, :63] = normals(4, 63, seed=1)
        log_q = bnn.posterior.log_prob_of(bnn.posterior.draw(noise.float()))
        log_q.sum().backward()
        assert bnn.posterior.rho.grad is not None
        found.append((log_q.detach(), bnn.posterior.rho.grad))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-4)
