"""Examples that arrive in parts: the posterior after one part is the prior of the next."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, Normal, kl_divergence

import bayesify as bf
from bayesify.datasets import Passes, TensorLoader
from bayesify.noise.keys import NoiseKey, Stream
from bayesify.training.schedules import cosine

D = torch.float64
CORRELATED = [
    bf.LowRankGaussian(2),
    bf.MatrixGaussian(),
    bf.FullGaussian(),
    bf.PosteriorByGroup({"body.*": bf.FullGaussian(), "*": bf.MeanFieldGaussian}),
]


@pytest.mark.parametrize("posterior", CORRELATED)
def test_a_pruned_network_learns_on(posterior: Any) -> None:
    """The gradient of the KL of correlated weights that are left, by a difference."""
    torch.manual_seed(0)
    net = nn.Sequential()
    net.add_module("body", nn.Linear(6, 3, dtype=D))
    net.add_module("head", nn.Linear(3, 2, dtype=D))
    before = bf.BayesianModule(net, posterior=posterior, init_std=0.1)
    moved(before, 0.1)
    elbo = bf.StreamingELBO(bf.prune(before, 0.2), num_data=10, num_before=10)
    parameters = [each for each in elbo.parameters() if each.requires_grad]
    step = [1e-5 * torch.randn_like(each) for each in parameters]

    def kl() -> Tensor:
        return elbo.complexity(None, 0, range(1))[0]

    with torch.no_grad():
        for each, part in zip(parameters, step, strict=True):
            each.add_(1e4 * part)
    value = kl()
    slopes = torch.autograd.grad(value, parameters, allow_unused=True)
    slope = sum(
        float((part * grad).sum())
        for part, grad in zip(step, slopes, strict=True)
        if grad is not None
    )
    values = []
    with torch.no_grad():
        for sign in (1.0, -2.0):
            for each, part in zip(parameters, step, strict=True):
                each.add_(sign * part)
            values.append(float(kl()))
    assert slope != 0.0
    assert values[0] - values[1] == pytest.approx(2.0 * slope, rel=1e-5)


def regression(num_data: int = 64) -> tuple[Tensor, Tensor]:
    """Three orthogonal columns in each half of the examples: the exact posterior factorises."""
    generator = torch.Generator().manual_seed(4)
    half = num_data // 2
    x = torch.cat(
        [torch.linalg.qr(torch.randn(half, 3, generator=generator, dtype=D)).Q for _ in range(2)]
    )
    x *= torch.tensor([1.0, 2.0, 3.0], dtype=D)
    noise = torch.randn(num_data, 1, generator=generator, dtype=D)
    return x, x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=D) + noise


def untrained(num_outputs: int = 1, **settings: object) -> bf.BayesianModule:
    """y = x w + noise of std 1, with the prior N(0, 1) of each weight."""
    net = nn.Linear(3, num_outputs, bias=False, dtype=D)
    nn.init.zeros_(net.weight)
    return bf.BayesianModule(
        net,
        likelihood=bf.GaussianLikelihood(std=1.0),
        prior=bf.Gaussian(1.0),
        init_std=0.5,
        **settings,  # type: ignore[arg-type]
    )


def gaussian(bnn: bf.BayesianModule) -> bf.MeanFieldGaussian:
    assert isinstance(bnn.posterior, bf.MeanFieldGaussian)
    return bnn.posterior


def train(elbo: bf.ELBO, x: Tensor, y: Tensor) -> None:
    bf.fit(
        elbo,
        Passes(TensorLoader(x, y, len(x), shuffle=False), 200),
        epochs=2,
        optimizer=partial(torch.optim.Adam, lr=0.05),
        scheduler=cosine,
        backend="autograd",
    )


def distance(bnn: bf.BayesianModule, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Largest error of a mean in exact standard deviations, and of a std relative to it."""
    precision = 1.0 + x.square().sum(0)
    exact, std = (x.T @ y).squeeze() / precision, precision.rsqrt()
    q = gaussian(bnn)
    return (
        float(((q.mean.detach() - exact) / std).abs().max()),
        float((q.std.detach() / std - 1.0).abs().max()),
    )


def in_two_parts(objective: type[bf.ELBO]) -> tuple[float, float]:
    x, y = regression()
    bnn = untrained(estimator=bf.LocalReparameterization())
    train(bf.ELBO(bnn, num_data=32, num_samples=4), x[:32], y[:32])
    train(objective(bnn, num_data=32, num_samples=4), x[32:], y[32:])
    return distance(bnn, x, y)


@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
def test_two_halves_give_the_exact_posterior_of_all_examples() -> None:
    shift, growth = in_two_parts(bf.StreamingELBO)
    assert shift < 0.05
    assert growth < 0.03


def correlated_in_two_parts(posterior: Any) -> float:
    """KL from what two halves of correlated columns have taught to the exact posterior, in nats."""
    x, y = regression()
    x = x @ torch.tensor([[1.0, 0.9, 0.0], [0.0, 0.3, 0.8], [0.0, 0.0, 0.4]], dtype=D) * 3.0
    bnn = untrained(posterior=posterior)
    train(bf.ELBO(bnn, num_data=32, num_samples=8), x[:32], y[:32])
    train(bf.StreamingELBO(bnn, num_data=32, num_samples=8), x[32:], y[32:])
    exact = torch.linalg.inv(torch.eye(3, dtype=D) + x.T @ x)
    q = bnn.posterior
    factor = q.draw(torch.eye(3, dtype=D)).weights.detach() - q.mean.detach()
    learned = MultivariateNormal(q.mean.detach(), factor.T @ factor)
    reference = MultivariateNormal((exact @ x.T @ y).squeeze(), exact)
    return float(kl_divergence(learned, reference))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
def test_a_full_covariance_keeps_the_correlations_of_the_first_half() -> None:
    assert correlated_in_two_parts(bf.FullGaussian()) < 0.02


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
def test_a_mean_field_does_not_keep_them() -> None:
    assert correlated_in_two_parts(bf.MeanFieldGaussian) > 0.2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
def test_forgetting_the_first_half_is_caught() -> None:
    shift, growth = in_two_parts(bf.ELBO)
    assert shift > 0.05
    assert growth > 0.03


def test_the_optimum_is_the_exact_posterior() -> None:
    x, y = regression()
    bnn = untrained()
    q = gaussian(bnn)

    def at_exact(count: int) -> None:
        precision = 1.0 + x[:count].square().sum(0)
        std = precision.rsqrt()
        with torch.no_grad():
            q.mean.copy_((x[:count].T @ y[:count]).squeeze() / precision)
            q.rho.copy_(torch.log(torch.expm1(std)))

    at_exact(32)
    elbo = bf.StreamingELBO(bnn, num_data=32)
    at_exact(64)
    # The expected nll of a linear model in closed form; its gradient and that of the KL cancel.
    kl, _ = elbo.complexity(None, 0, range(1))
    a, b = x[32:], y[32:]
    nll = 0.5 * ((b - a @ q.mean.unsqueeze(-1)).square().sum() + (a.square() @ q.std**2).sum())
    of_nll = torch.autograd.grad(nll, [q.mean, q.rho])
    of_kl = torch.autograd.grad(kl, [q.mean, q.rho])
    for one, other in zip(of_nll, of_kl, strict=True):
        torch.testing.assert_close(one, -other, atol=1e-10, rtol=0.0)
        assert float((one + 0.5 * other).abs().max()) > 1e-2  # half of the KL is caught


def test_the_kl_is_that_between_two_gaussians_without_pruned_weights() -> None:
    bnn = bf.prune(untrained(4), fraction=0.25)
    before = Normal(gaussian(bnn).mean.detach().clone(), gaussian(bnn).full_std.detach().clone())
    elbo = bf.StreamingELBO(bnn, num_data=1)
    q = gaussian(bnn)
    with torch.no_grad():
        q.mean.add_(torch.linspace(-1.0, 1.0, 12, dtype=D))
        q.rho.add_(torch.linspace(-3.0, 3.0, 12, dtype=D))
    kl, penalty = elbo.complexity(None, 0, range(1))
    each = kl_divergence(Normal(q.mean, q.full_std), before)
    assert q.mask is not None
    assert int(q.mask.sum()) == 9
    torch.testing.assert_close(kl, each[q.mask].sum())
    assert penalty == 0.0


def test_it_trains_a_convolutional_network_on_classes() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    bnn = bf.BayesianModule(net)
    x, y = torch.randn(6, 1, 4, 4), torch.arange(6) % 3
    elbo = bf.StreamingELBO(bnn, num_data=6)
    before = gaussian(bnn).mean.detach().clone()
    assert elbo(x, y).kl.item() == 0.0
    optimizer = torch.optim.SGD(elbo.parameters(), lr=0.1)
    elbo(x, y).loss.backward()
    optimizer.step()
    terms = elbo(x, y)
    assert not torch.equal(gaussian(bnn).mean, before)
    assert terms.kl.item() > 0.0
    torch.testing.assert_close(terms.loss, terms.nll + terms.kl / 6)


def test_init_std_lowers_larger_ones_and_not_the_prior() -> None:
    bnn = untrained(4)
    stds = torch.linspace(0.01, 1.0, 12, dtype=D)
    with torch.no_grad():
        gaussian(bnn).rho.copy_(torch.log(torch.expm1(stds)))
    before = Normal(gaussian(bnn).mean.detach().clone(), stds)
    elbo = bf.StreamingELBO(bnn, num_data=1, init_std=0.3)
    torch.testing.assert_close(gaussian(bnn).std.detach(), stds.clamp(max=0.3))
    torch.testing.assert_close(elbo.previous.log_scale.exp(), stds)
    now = Normal(gaussian(bnn).mean, gaussian(bnn).std)
    kl, _ = elbo.complexity(None, 0, range(1))
    torch.testing.assert_close(kl, kl_divergence(now, before).sum())


@pytest.mark.parametrize("posterior", CORRELATED)
def test_init_std_lowers_those_of_correlated_weights(posterior: bf.PosteriorFamily) -> None:
    """A std that is small enough stays, and so do correlations but those of MatrixGaussian."""
    bnn = moved(with_heads(posterior=posterior), 0.3)
    before, correlated = bnn.posterior.std.detach().clone(), covariance(bnn)
    elbo = bf.StreamingELBO(bnn, num_data=1, new=("body.*", "heads.*"), init_std=0.08)
    std = bnn.posterior.std.detach()
    assert float(before.max()) > 0.08 > float(before.min())
    assert float(std.max()) < 0.08 * (1.0 + 1e-9)
    if not isinstance(posterior, bf.MatrixGaussian):
        torch.testing.assert_close(std, before.clamp(max=0.08))
        expected = correlated / before / before.unsqueeze(-1)
        torch.testing.assert_close(covariance(bnn) / std / std.unsqueeze(-1), expected)
    own, _ = bf.ELBO(bnn, num_data=1).complexity(None, 0, range(1))
    torch.testing.assert_close(elbo.complexity(None, 0, range(1))[0], own)
    correlated = covariance(bnn)
    bf.StreamingELBO(bnn, num_data=1, init_std=1.0)  # above all
    torch.testing.assert_close(covariance(bnn), correlated)


@pytest.mark.parametrize("posterior", [bf.MeanFieldGaussian, *CORRELATED])
@pytest.mark.parametrize("tiny", [1e-60, 5e-324])
def test_an_init_std_below_the_numbers_of_float32(tiny: float, posterior: Any) -> None:
    bnn = with_heads(posterior=posterior).float()
    elbo = bf.StreamingELBO(bnn, num_data=1, init_std=tiny)
    assert bool(bnn.posterior.rho.isfinite().all())  # type: ignore[operator, union-attr]
    assert bool(elbo.complexity(None, 0, range(1))[0].isfinite())


def test_init_std_narrows_a_new_head_and_the_body_but_no_other_head() -> None:
    bnn = with_heads()
    bf.StreamingELBO(bnn, num_data=1, new=("heads.1.*",), init_std=0.01)
    std, layout = gaussian(bnn).std.detach(), bnn.layout
    for name, expected in {
        "body.weight": 0.01,
        "heads.0.weight": 0.1,
        "heads.1.weight": 0.01,
    }.items():
        part = std[layout.slice_of(name)]
        torch.testing.assert_close(part, torch.full_like(part, expected))


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("inf"), float("nan"), "0.1"])
def test_init_std_must_be_a_positive_number(wrong: Any) -> None:
    error = TypeError if isinstance(wrong, str) else ValueError
    with pytest.raises(error, match="init_std must be"):
        bf.StreamingELBO(untrained(), num_data=1, init_std=wrong)


def test_half_precision_does_not_overflow() -> None:
    bnn = bf.BayesianModule(nn.Linear(300, 300, bias=False)).half()
    elbo = bf.StreamingELBO(bnn, num_data=1)
    with torch.no_grad():
        gaussian(bnn).mean.add_(0.1)
    kl = elbo.complexity(None, 0, range(1))[0]
    assert kl.dtype == torch.float32
    assert 0.5 * 90_000 * 20 < kl.item() < 0.5 * 90_000 * 30


def test_it_needs_a_gaussian_posterior() -> None:
    with pytest.raises(TypeError, match=r"needs a Gaussian posterior, .* got Delta"):
        bf.StreamingELBO(bf.BayesianModule(nn.Linear(3, 1), posterior=bf.Delta), num_data=1)


def with_heads(prior: bf.Prior | None = None, **settings: object) -> bf.BayesianModule:
    body = nn.Linear(3, 4, bias=False, dtype=D)
    net = bf.MultiHead(body, [nn.Linear(4, 2, bias=False, dtype=D) for _ in range(2)])
    return bf.BayesianModule(
        net,
        prior=prior or bf.Gaussian(0.7),
        init_std=0.1,
        **settings,  # type: ignore[arg-type]
    )


def test_the_prior_of_new_parameters_is_the_networks() -> None:
    bnn = with_heads(bf.ByGroup({"heads.*": bf.Gaussian(0.5), "*": bf.Gaussian(0.7)}))
    head = bnn.layout.slice_of("heads.1.weight")
    q = gaussian(bnn)
    prior = Normal(torch.zeros_like(q.mean), torch.full_like(q.mean, 0.5))
    each = kl_divergence(Normal(q.mean, q.full_std), prior)
    kl, _ = bf.StreamingELBO(bnn, num_data=1, new=("heads.1.*",)).complexity(None, 0, range(1))
    torch.testing.assert_close(kl, each[head].sum())
    nothing, _ = bf.StreamingELBO(bnn, num_data=1).complexity(None, 0, range(1))
    assert float(nothing.detach()) == 0.0  # its initial values as its prior are caught


def test_a_parameter_without_elements_has_no_prior() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.rest = nn.Linear(3, 2), nn.ParameterDict({"bias": torch.zeros(0)})

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    bnn = bf.BayesianModule(
        Net(), prior=bf.ByGroup({"*.weight": bf.Gaussian(1.0), "*": bf.Gaussian(0.5)})
    )
    of_all, _ = bf.StreamingELBO(bnn, num_data=1, new=("*",)).complexity(None, 0, range(1))
    torch.testing.assert_close(of_all, bf.kl_divergence(bnn.posterior, bnn.weight_prior))


def moved(bnn: bf.BayesianModule, size: float) -> bf.BayesianModule:
    """Move all parameters of the posterior by different amounts."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for each in bnn.posterior.parameters():
            each.add_(torch.randn(each.shape, generator=generator, dtype=each.dtype), alpha=size)
    return bnn


def covariance(bnn: bf.BayesianModule) -> Tensor:
    """Draws are linear in the noise: row i of the draw of the identity is what noise i does."""
    q = bnn.posterior
    size = q.noise(NoiseKey(0, Stream.TRAINING, 0), range(1)).shape[1]
    factor = q.draw(torch.eye(size, dtype=D)).weights.detach() - q.mean.detach()
    return factor.T @ factor


@pytest.mark.parametrize("posterior", CORRELATED)
def test_the_kl_of_correlated_weights_is_that_of_dense_gaussians(
    posterior: bf.PosteriorFamily,
) -> None:
    bnn = moved(with_heads(posterior=posterior), 0.3)
    before = MultivariateNormal(bnn.posterior.mean.detach().clone(), covariance(bnn))
    elbo = bf.StreamingELBO(bnn, num_data=1)
    assert list(elbo.previous.parameters()) == []  # an optimiser would move the prior
    moved(bnn, 0.2)
    now = MultivariateNormal(bnn.posterior.mean.detach(), covariance(bnn))
    expected = kl_divergence(now, before)
    kl = elbo.complexity(None, 0, range(1))[0].detach()
    torch.testing.assert_close(kl, expected, rtol=1e-8, atol=0.0)
    # Without pruned weights it is that of the others' marginals.
    mask = torch.arange(28) % 3 > 0
    bnn.posterior.mask = mask
    kept = [
        MultivariateNormal(each.mean[mask], each.covariance_matrix[mask][:, mask])
        for each in (now, before)
    ]
    rest = elbo.complexity(None, 0, range(1))[0].detach()
    torch.testing.assert_close(rest, kl_divergence(*kept), rtol=1e-8, atol=0.0)
    bnn.posterior.mask = None
    elbo.previous.correlations.apply(lambda each: [p.zero_() for p in each.buffers()])
    other = elbo.complexity(None, 0, range(1))[0].detach()
    assert abs(float(other / expected) - 1.0) > 0.01  # a prior without correlations is caught


@pytest.mark.parametrize("posterior", [bf.LowRankGaussian(2), bf.FullGaussian()])
def test_new_parameters_must_not_depend_on_others(posterior: bf.PosteriorFamily) -> None:
    bnn = with_heads(posterior=posterior)
    with pytest.raises(ValueError, match=r"new must name all .* of a group under .*\(.* got 8 of"):
        bf.StreamingELBO(bnn, num_data=1, new=("heads.1.*",))
    parts = "body", "heads.0", "heads.1"
    apart = bf.PosteriorByGroup({f"{part}.*": posterior for part in parts})
    bnn = moved(with_heads(posterior=apart), 0.3)
    kl, _ = bf.StreamingELBO(bnn, num_data=1, new=("heads.1.*",)).complexity(None, 0, range(1))
    head = bnn.layout.slice_of("heads.1.weight")
    mean, cov = bnn.posterior.mean.detach()[head], covariance(bnn)[head, head]
    prior = MultivariateNormal(torch.zeros(8, dtype=D), 0.49 * torch.eye(8, dtype=D))
    torch.testing.assert_close(kl.detach(), kl_divergence(MultivariateNormal(mean, cov), prior))


@pytest.mark.parametrize("posterior", [bf.MeanFieldGaussian, *CORRELATED])
def test_with_all_parameters_new_it_is_the_elbo(posterior: Any) -> None:
    bnn = moved(with_heads(prior_mean="initial", posterior=posterior), 0.3)
    kl, _ = bf.StreamingELBO(bnn, num_data=1, new=("*",)).complexity(None, 0, range(1))
    torch.testing.assert_close(kl, bf.ELBO(bnn, num_data=1).complexity(None, 0, range(1))[0])


@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
def test_a_head_of_correlated_weights_that_is_not_used_stays_but_for_rounding() -> None:
    x, y = torch.eye(3, dtype=D).repeat(3, 1)[:8], torch.arange(8) % 2
    bnn = moved(with_heads(posterior=bf.MatrixGaussian()), 0.3)
    place = bnn.layout.slice_of("heads.0.weight")
    before = bnn.posterior.mean.detach().clone(), covariance(bnn)
    elbo = bf.StreamingELBO(bnn, num_data=8, new=("heads.1.*",))
    bf.fit(elbo, TensorLoader((x, torch.ones(8, dtype=torch.long)), y, 4), epochs=20)
    torch.testing.assert_close(bnn.posterior.mean.detach()[place], before[0][place])
    torch.testing.assert_close(covariance(bnn)[place, place], before[1][place, place])


@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
@pytest.mark.parametrize("init_std", [None, 0.05])
def test_a_head_that_is_not_used_stays_as_it_is(init_std: float | None) -> None:
    x, y = torch.eye(3, dtype=D).repeat(3, 1)[:8], torch.arange(8) % 2
    bnn = with_heads(estimator=bf.LocalReparameterization())
    before = gaussian(bnn).mean.detach().clone(), gaussian(bnn).rho.detach().clone()
    elbo = bf.StreamingELBO(bnn, num_data=8, new=("body.*", "heads.1.*"), init_std=init_std)
    bf.fit(elbo, TensorLoader((x, torch.ones(8, dtype=torch.long)), y, 4), epochs=2)
    first, second = (bnn.layout.slice_of(f"heads.{i}.weight") for i in range(2))
    for vector, old in zip((gaussian(bnn).mean, gaussian(bnn).rho), before, strict=True):
        assert torch.equal(vector[first], old[first])
        assert not bool((vector[second] == old[second]).any())


def test_new_must_name_parameters_with_a_gaussian_prior() -> None:
    bnn = with_heads()
    with pytest.raises(ValueError, match=r"every pattern of new .* 'heads.2.\*' matches none"):
        bf.StreamingELBO(bnn, num_data=1, new=("body.*", "heads.2.*"))
    for wrong in ("body.*", (1,), None, 5):
        with pytest.raises(TypeError, match="new must be a sequence of name patterns"):
            bf.StreamingELBO(bnn, num_data=1, new=wrong)  # type: ignore[arg-type]
    laplace = with_heads(bf.ByGroup({"heads.*": bf.Laplace(1.0), "*": bf.Gaussian(1.0)}))
    assert bf.StreamingELBO(laplace, num_data=1, new=("body.*",)).num_data == 1
    with pytest.raises(TypeError, match="new parameters need a Gaussian prior, got Laplace"):
        bf.StreamingELBO(laplace, num_data=1, new=("heads.0.*",))


@pytest.mark.parametrize("posterior", [bf.MeanFieldGaussian, bf.LowRankGaussian(2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_does_not_round_the_prior(dtype: torch.dtype, posterior: Any) -> None:
    bnn = bf.BayesianModule(nn.Linear(30, 20), init_std=1e-8, posterior=posterior)
    elbo = bf.StreamingELBO(bnn, num_data=64)
    elbo.to(dtype)
    assert elbo.bnn.layout.dtype == dtype
    kl, _ = elbo.complexity(None, 0, range(1))
    assert abs(kl.item()) < (1e-3 if isinstance(posterior, bf.PosteriorFamily) else 1e-30)
    assert elbo.double().previous.log_scale.dtype == torch.float64


def test_standard_deviations_that_underflow_leave_a_finite_kl() -> None:
    bnn = bf.BayesianModule(nn.Linear(3, 2))
    with torch.no_grad():
        bnn.posterior.rho.fill_(-110.0)
    terms = bf.StreamingELBO(bnn, num_data=10)(torch.ones(4, 3), torch.zeros(4, dtype=torch.long))
    terms.loss.backward()
    assert terms.kl.item() == 0.0
    assert all(bool(p.grad.isfinite().all()) for p in bnn.parameters() if p.grad is not None)


def test_parameters_without_a_posterior_have_a_prior_of_earlier_examples() -> None:
    """The penalty is that of a Gaussian, and a part of one example leaves the noise as it was."""
    torch.manual_seed(0)  # a network far from the one example moves the noise by more
    noise = bf.GaussianLikelihood(std=0.5, learn_std=True)
    bnn = bf.BayesianModule(nn.Linear(2, 1), likelihood=noise, init_std=0.1)
    elbo = bf.StreamingELBO(bnn, num_data=1, num_before=200)
    with pytest.warns(
        UserWarning, match=r"train likelihood\S*, which have no posterior; give num_"
    ):
        bf.StreamingELBO(bnn, num_data=1)
    bf.StreamingELBO(bnn, num_data=1, new=("*",))  # the first part: no warning
    free = bf.StreamingELBO(bnn, num_data=1, num_before=0)
    [rho] = bnn.likelihood.parameters()
    before = rho.detach().clone()
    with torch.no_grad():
        rho.add_(0.3)
    x, y = torch.ones(1, 2), torch.zeros(1, 1)
    for objective, penalty in ((elbo, 0.5 * 200 * 0.3**2), (free, 0.0)):
        terms = objective(x, y)
        assert terms.penalty.item() == pytest.approx(penalty, rel=1e-5)
        assert terms.loss.item() == pytest.approx(
            terms.nll.item() + terms.kl.item() + penalty, rel=1e-5
        )
    copied = copy.deepcopy(elbo)
    for parameter in copied.bnn.likelihood.parameters():
        parameter.data.copy_(before)
    assert copied(x, y).penalty.item() == 0.0
    bf.fit(elbo, TensorLoader(x, y, 1), epochs=200, lr=0.02, progress=False)
    assert abs(rho.item() - before.item()) < 0.02


def error_after_parts(*, own_noise: bool) -> float:
    """Root mean square error of 200 means after 60 parts, in standard deviations of the exact."""
    torch.manual_seed(0)
    net = nn.Linear(1, 200, bias=False)
    nn.init.zeros_(net.weight)
    likelihood = bf.GaussianLikelihood(std=1.0)
    bnn = bf.BayesianModule(net, likelihood=likelihood, prior=bf.Gaussian(1.0), init_std=1.0)
    x, y = torch.ones(5, 1), 0.5 + torch.randn(60, 5, 200)
    for number, part in enumerate(y):
        if own_noise:
            bnn.seed = number
        elbo = (bf.StreamingELBO if number else bf.ELBO)(bnn, num_data=5)
        bf.fit(elbo, TensorLoader(x, part, 5), epochs=30, lr=0.03, scheduler=cosine, progress=False)
    exact = y.flatten(0, 1).sum(0) / (y[:, :, 0].numel() + 1)
    errors = (bnn.posterior.mean.detach().flatten() - exact) * (y[:, :, 0].numel() + 1) ** 0.5
    return float(errors.square().mean().sqrt())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
def test_errors_of_parts_with_one_noise_add_up() -> None:
    assert error_after_parts(own_noise=True) < 0.75 * error_after_parts(own_noise=False)


def test_new_parameters_without_a_posterior_are_not_held() -> None:
    body = nn.Linear(3, 4, dtype=D)
    heads = [nn.Sequential(nn.LayerNorm(4, dtype=D), nn.Linear(4, 2, dtype=D)) for _ in range(2)]
    bnn = bf.BayesianModule(bf.MultiHead(body, heads), prior=bf.Gaussian(0.7), exclude=("*.bias",))
    elbo = bf.StreamingELBO(bnn, num_data=8, num_before=100, new=("heads.1.*",))
    moved = 0
    with torch.no_grad():
        for name, parameter in bnn.named_parameters():
            if "net." in name:
                parameter.add_(0.1)
                moved += 0 if "heads.1." in name else parameter.numel()
    _, penalty = elbo.complexity(None, 0, range(1))
    assert penalty.item() == pytest.approx(0.5 * 100 * 0.1**2 * moved)
    bf.StreamingELBO(bnn, num_data=8, num_before=100, new=("heads.1.0.bias",))  # a point alone
    with pytest.raises(ValueError, match=r"'heads.2.\*' matches none of"):
        bf.StreamingELBO(bnn, num_data=8, num_before=100, new=("heads.2.*",))


@pytest.mark.parametrize(
    ("wrong", "error"), [(-1, ValueError), (float("inf"), ValueError), ("7", TypeError)]
)
def test_num_before_is_a_number_of_examples(wrong: Any, error: type[Exception]) -> None:
    bnn = bf.BayesianModule(nn.Linear(2, 1))
    with pytest.raises(error, match="num_before must be"):
        bf.StreamingELBO(bnn, num_data=1, num_before=wrong)
