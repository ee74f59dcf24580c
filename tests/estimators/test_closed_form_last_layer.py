"""A last layer that is integrated out: exact expectations, and the evidence of regressions."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from scipy import stats
from tests.cases import mlp, normals
from tests.estimators.test_dependent_weights import correlated, jacobian, weight_factor
from tests.loops import loop_over
from tests.training.test_statistics import check_mean
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, kl_divergence

from bayesify import (
    ELBO,
    BayesianModule,
    CategoricalLikelihood,
    ClosedFormLastLayer,
    Delta,
    Flipout,
    FullGaussian,
    Gaussian,
    GaussianLikelihood,
    LocalReparameterization,
    LowRankGaussian,
    MatrixGaussian,
    MeanFieldGaussian,
    Posterior,
    PosteriorByGroup,
    PosteriorFamily,
    WeightSampling,
    fit,
    last_layer,
    load,
    prune,
    save,
)
from bayesify.distributions.correlations import Correlation
from bayesify.distributions.kronecker import Kronecker
from bayesify.estimators import Estimator, moments

NOISE, PRIOR_STD = 0.6, 1.3
Family = PosteriorFamily | type[Posterior]
#: Of a whole layer; those of the first three contain the exact posterior of a regression.
FAMILIES: dict[str, Family] = {
    "full": FullGaussian(),
    "matrix": MatrixGaussian(),
    "inputs only": MatrixGaussian(max_side=4),
    "mean-field": MeanFieldGaussian,
    "outputs only": MatrixGaussian(max_side=2),
    "bias apart": PosteriorByGroup({"weight": FullGaussian(), "*": MeanFieldGaussian}),
    "bias depends apart": PosteriorByGroup({"weight": MatrixGaussian(), "*": FullGaussian()}),
}
EXACT = [*FAMILIES][:3]


def regression(outputs: int) -> tuple[Tensor, Tensor]:
    """20 examples with 3 correlated features; the targets have a constant of their own."""
    mixing = torch.tensor([[1.0, 0.9, 0.3], [0.0, 0.4, 0.2], [0.0, 0.0, 0.7]], dtype=torch.float64)
    x = normals(20, 3, seed=1) @ mixing
    return x, x @ normals(3, outputs, seed=2) + 0.7 + NOISE * normals(20, outputs, seed=3)


def layer(
    name: str, outputs: int = 2, estimator: Estimator | None = None, **options: object
) -> BayesianModule:
    """A linear layer of any correlated posterior of the family."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Linear(3, outputs if name != "inputs only" else 5)
    return correlated(
        net,
        FAMILIES[name],  # type: ignore[arg-type]
        ClosedFormLastLayer() if estimator is None else estimator,
        likelihood=GaussianLikelihood(NOISE),
        prior=Gaussian(PRIOR_STD),
        **options,
    )


def exact_posterior(bnn: BayesianModule, x: Tensor, y: Tensor) -> MultivariateNormal:
    """Of all weights, in the order of the flat vector."""
    rows = jacobian(bnn, x).flatten(0, 1)
    precision = rows.T @ rows / NOISE**2 + torch.eye(rows.shape[1]).double() / PRIOR_STD**2
    mean = torch.linalg.solve(precision, rows.T @ y.flatten() / NOISE**2)
    return MultivariateNormal(mean, precision_matrix=precision)


def log_evidence(bnn: BayesianModule, x: Tensor, y: Tensor) -> float:
    """log p(y), from the marginal Gaussian of all targets."""
    rows = jacobian(bnn, x).flatten(0, 1)
    covariance = PRIOR_STD**2 * rows @ rows.T + NOISE**2 * torch.eye(len(rows)).double()
    return float(stats.multivariate_normal.logpdf(y.flatten().numpy(), cov=covariance.numpy()))


def check_bound(name: str) -> None:
    """ELBO = log evidence - KL(q || exact posterior), whatever q is."""
    bnn = layer(name)
    x, y = regression(5 if name == "inputs only" else 2)
    factor = weight_factor(bnn).detach()
    q = MultivariateNormal(bnn.posterior.mean.detach(), factor.T @ factor)
    expected = log_evidence(bnn, x, y) - kl_divergence(q, exact_posterior(bnn, x, y)).item()
    elbo = ELBO(bnn, num_data=len(x))
    found = -len(x) * elbo(x, y).loss.item()
    assert found == pytest.approx(expected, rel=1e-10), "the bound is off"


@loop_over("name", FAMILIES)
def test_the_bound_is_the_evidence_less_the_divergence_from_the_posterior(name: str) -> None:
    check_bound(name)


def without_variance(patch: pytest.MonkeyPatch) -> None:
    """The outputs' variances are left out."""
    right = moments.closed_form_moments
    patch.setattr(
        "bayesify.estimators.per_example.closed_form_moments",
        lambda *args: (right(*args)[0], torch.zeros_like(right(*args)[1])),
    )


def outputs_not_mixed(patch: pytest.MonkeyPatch) -> None:
    """v in the place of A^2 v."""
    patch.setattr(Kronecker, "output_variances", lambda self, s, x, _: self.output_noise(s, x)[0])


def without_dependence(patch: pytest.MonkeyPatch) -> None:
    """Dependent weights have no variance."""
    patch.setattr(Correlation, "output_variances", lambda *args: args[1].new_zeros(args[3]))


@loop_over(
    "name, fault",
    [
        ("mean-field", without_variance),
        ("matrix", outputs_not_mixed),
        ("full", without_dependence),
        ("bias depends apart", without_dependence),
    ],
)
def test_a_wrong_expectation_is_caught(
    name: str, fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="bound is off"):
        check_bound(name)


def minimise(elbo: ELBO, x: Tensor, y: Tensor) -> float:
    """The loss at its minimum; it has no noise."""
    optimizer = torch.optim.LBFGS(
        elbo.parameters(),
        max_iter=2000,
        tolerance_grad=1e-9,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = elbo(x, y).loss
        loss.backward()
        return loss

    optimizer.step(closure)
    return elbo(x, y).loss.item()


@loop_over("name", EXACT)
def test_a_conjugate_regression_is_solved(name: str) -> None:
    """The posterior within 1 %, and a bound that is the log evidence."""
    bnn = BayesianModule(
        nn.Linear(3, 5 if name == "inputs only" else 2).double(),
        likelihood=GaussianLikelihood(NOISE),
        prior=Gaussian(PRIOR_STD),
        posterior=FAMILIES[name],
        estimator=ClosedFormLastLayer(),
        init_std=0.1,
    )
    x, y = regression(5 if name == "inputs only" else 2)
    loss = minimise(ELBO(bnn, num_data=len(x)), x, y)
    assert -len(x) * loss == pytest.approx(log_evidence(bnn, x, y), abs=1e-5)
    exact = exact_posterior(bnn, x, y)
    factor = weight_factor(bnn).detach()
    assert ((bnn.posterior.mean - exact.mean) / exact.stddev).abs().max() < 0.01
    error = factor.T @ factor - exact.covariance_matrix
    assert (error / torch.outer(exact.stddev, exact.stddev)).abs().max() < 0.01


def test_the_mean_field_has_the_variances_of_weights_whose_others_are_held_fixed() -> None:
    """Bishop 2006, section 10.1.2; its bound is below the evidence."""
    bnn = BayesianModule(
        nn.Linear(3, 1).double(),
        likelihood=GaussianLikelihood(NOISE),
        prior=Gaussian(PRIOR_STD),
        estimator=ClosedFormLastLayer(),
    )
    x, y = regression(1)
    loss = minimise(ELBO(bnn, num_data=len(x)), x, y)
    exact = exact_posterior(bnn, x, y)
    variances = 1.0 / exact.precision_matrix.diagonal()
    assert torch.allclose(bnn.posterior.std.square(), variances, rtol=0.01)
    assert -len(x) * loss < log_evidence(bnn, x, y) - 0.1


@loop_over("name", ["mean-field", "full", "bias apart"])
def test_pruned_weights_add_nothing(name: str) -> None:
    bnn = prune(layer(name), 0.4)
    x, y = regression(2)
    q, rows = bnn.posterior, jacobian(bnn, x)
    mask = q.mask
    assert mask is not None
    factor = weight_factor(bnn).detach()[:, mask]
    rows = rows[..., mask]
    variance = (rows @ factor.T @ factor @ rows.mT).diagonal(dim1=1, dim2=2)
    mean = rows @ q.mean.detach()[mask]
    expected = 0.5 * ((y - mean).square() + variance) / NOISE**2
    expected = (expected + math.log(NOISE) + 0.5 * math.log(2.0 * math.pi)).sum(1).mean()
    assert [row.treatment for row in bnn.summary(x)] == ["integrated", "integrated"]
    assert ELBO(bnn, num_data=20)(x, y).nll.item() == pytest.approx(expected.item(), rel=1e-10)


DEEP: dict[str, Family] = {
    "mean-field": MeanFieldGaussian,
    "low-rank": LowRankGaussian(2),
    "matrix": MatrixGaussian(),
    "full head": PosteriorByGroup({"2.*": FullGaussian(), "*": MeanFieldGaussian}),
}
BELOW: list[tuple[str, Estimator]] = [
    ("mean-field", WeightSampling(antithetic=True)),
    ("mean-field", Flipout()),
    ("low-rank", LocalReparameterization()),
    ("matrix", LocalReparameterization()),
    ("full head", WeightSampling()),
]
STEPS = 150


def deep_nlls(name: str, estimator: Estimator) -> Tensor:
    """The nll, and a projection of its gradients, of two samples in each of many steps."""
    bnn = correlated(
        mlp(num_outputs=2),
        DEEP[name],
        estimator,
        likelihood=GaussianLikelihood(0.8),  # type: ignore[arg-type]
    )
    x, y = normals(3, 3, seed=4), normals(3, 2, seed=5)
    elbo = ELBO(bnn, num_data=3, num_samples=2, fused=False)
    parameters = list(bnn.posterior.parameters())
    sides = [normals(p.numel(), seed=60 + i).view_as(p) for i, p in enumerate(parameters)]
    found = []
    for _ in range(STEPS):
        nll = elbo(x, y).nll
        gradients = torch.autograd.grad(nll, parameters)
        shift = sum((g * side).sum() for g, side in zip(gradients, sides, strict=True))
        found.append(torch.stack([nll.detach(), torch.as_tensor(shift)]))
    return torch.stack(found)


@loop_over("name, below", BELOW)
def test_the_expected_loss_of_a_deep_network_is_weight_samplings(
    name: str, below: Estimator
) -> None:
    """Two-sample z-tests; the chance that a right library fails one of all is 1e-3."""
    found = deep_nlls(name, ClosedFormLastLayer(below)), deep_nlls(name, WeightSampling())
    for one, other in zip(*(each.unbind(1) for each in found), strict=True):
        check_mean(one - other, 0.0, 2 * len(BELOW), (name, below))


def test_with_only_the_last_layer_random_there_is_no_noise() -> None:
    net = mlp(num_outputs=2)
    x, y = normals(3, 3, seed=4), normals(3, 2, seed=5)
    bnns = [
        correlated(
            net,
            FullGaussian(),
            estimator,
            likelihood=GaussianLikelihood(0.8),
            include=last_layer(net),
        )
        for estimator in (ClosedFormLastLayer(), WeightSampling())
    ]
    elbo, sampled = (ELBO(bnn, num_data=3, num_samples=2, fused=False) for bnn in bnns)
    terms = elbo(x, y)
    assert torch.equal(terms.loss, elbo(x, y).loss)
    assert terms.outputs.shape == (2, 3, 2)
    assert torch.allclose(terms.outputs[0], bnns[0].mean_outputs(x))
    nlls = torch.stack([sampled(x, y).nll.detach() for _ in range(500)])
    check_mean(nlls, terms.nll.item(), 1)


class Logits(nn.Module):
    """A network that returns its outputs in a mapping, from a product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(normals(3, 2, seed=1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"hidden": x.tanh(), "logits": x @ self.weight}


VIEWS: dict[str, tuple[Callable[[], nn.Module], dict[str, object], tuple[int, ...]]] = {
    "squeezed": (lambda: nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)), {}, (3,)),
    "unflattened": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Unflatten(1, (2, 2))), {}, (3, 2, 2)),
    "positions": (lambda: nn.Linear(3, 2), {}, (3, 5, 2)),
    "convolution": (lambda: nn.Conv1d(3, 2, 2), {}, (3, 2, 4)),
    "mapping": (Logits, {"output": "logits"}, (3, 2)),
}


@loop_over("name", VIEWS)
def test_views_positions_and_fields_of_outputs(name: str) -> None:
    make, options, shape = VIEWS[name]
    inputs = {"positions": (3, 5, 3), "convolution": (3, 3, 5)}.get(name, (3, 3))
    x, y = normals(*inputs, seed=4), normals(*shape, seed=5)
    bnns = [
        BayesianModule(
            make().double(),
            likelihood=GaussianLikelihood(0.8),
            init_std=0.4,
            estimator=estimator,
            **options,  # type: ignore[arg-type]
        )
        for estimator in (ClosedFormLastLayer(), WeightSampling())
    ]
    bnns[1].load_state_dict(bnns[0].state_dict())
    elbo, sampled = (ELBO(bnn, num_data=3, fused=False) for bnn in bnns)
    assert {row.treatment for row in bnns[0].summary(x)} == {"integrated"}
    nlls = torch.stack([sampled(x, y).nll.detach() for _ in range(200)])
    check_mean(nlls, elbo(x, y).nll.item(), len(VIEWS), name)


def test_classes_have_a_lower_bound() -> None:
    """Below the mean over 20,000 draws of the outputs, and exact where these have no variance."""
    likelihood, targets = CategoricalLikelihood(ignore_index=-1), torch.tensor([[0, -1], [2, 1]])
    mean, std = normals(1, 2, 2, 3, seed=1), 0.7 * normals(1, 2, 2, 3, seed=2).abs()
    draws = mean + std * normals(20_000, 2, 2, 3, seed=3)
    expected = likelihood.log_prob(draws, targets)
    bound = likelihood.expected_log_prob(mean, std.square(), targets)
    error = expected.std(0) / math.sqrt(len(draws))
    assert (bound[0] < expected.mean(0) + 4.0 * error).all()
    assert (bound[0] > expected.mean(0) - 0.5).all()
    exact = likelihood.expected_log_prob(mean, torch.zeros_like(mean), targets)
    assert torch.allclose(exact, likelihood.log_prob(mean, targets), rtol=1e-12)
    # Of great outputs small variances are not lost.
    great = torch.tensor([[[1e4, 0.0]]])
    found = CategoricalLikelihood().expected_log_prob(
        great, torch.full_like(great, 1e-3), torch.zeros(1, dtype=torch.long)
    )
    assert found.item() == pytest.approx(-5e-4, rel=1e-5)
    bnn = BayesianModule(mlp(), estimator=ClosedFormLastLayer())
    assert ELBO(bnn, num_data=2)(normals(2, 3), torch.tensor([0, 3])).loss.isfinite()


@pytest.mark.parametrize("ignored", [math.nan, math.inf])
def test_positions_without_a_class_have_no_gradient_of_their_outputs(ignored: float) -> None:
    likelihood, targets = CategoricalLikelihood(ignore_index=-100), torch.tensor([[1, -100]])
    mean, variance = torch.zeros(1, 1, 2, 3), torch.ones(1, 1, 2, 3)
    mean[0, 0, 1, 0] = variance[0, 0, 1, 2] = ignored
    mean.requires_grad_()
    variance.requires_grad_()
    found = likelihood.expected_log_prob(mean, variance, targets)
    alone = likelihood.expected_log_prob(mean[:, :, :1], variance[:, :, :1], targets[:, :1])
    assert found.item() == alone.item()
    for gradient in torch.autograd.grad(found.sum(), (mean, variance)):
        assert bool(gradient.isfinite().all())
        assert bool((gradient[0, 0, 1] == 0.0).all())


@pytest.mark.filterwarnings("ignore:.*standard deviations have not converged")
def test_fit_trains_network_noise_and_layers_below() -> None:
    x = normals(60, 3, dtype=torch.float32)
    y = x.sum(1, keepdim=True)
    bnn = BayesianModule(
        mlp(torch.float32, num_outputs=1),
        likelihood=GaussianLikelihood(1.0, learn_std=True),
        estimator=ClosedFormLastLayer(LocalReparameterization()),
    )
    before = {name: p.detach().clone() for name, p in bnn.named_parameters()}
    history = fit(ELBO(bnn, num_data=60), [(x[:30], y[:30]), (x[30:], y[30:])], epochs=30, lr=0.01)
    assert history[-1]["loss"] < history[0]["loss"]  # type: ignore[operator]
    for name, parameter in bnn.named_parameters():
        assert not torch.equal(parameter, before[name]), name
    with torch.autocast("cpu", torch.bfloat16):
        assert ELBO(bnn, num_data=60)(x, y).loss.isfinite()


def test_samples_and_predictions_draw_all_weights() -> None:
    bnn, twin = layer("full"), layer("full", estimator=WeightSampling())
    x = regression(2)[0]
    assert torch.equal(bnn(x), twin(x))
    assert torch.equal(bnn.predict(x).total, twin.predict(x).total)
    point = BayesianModule(
        mlp(num_outputs=2),
        likelihood=GaussianLikelihood(1.0),
        posterior=Delta,
        estimator=ClosedFormLastLayer(),
    )
    assert ELBO(point, num_data=20)(x, regression(2)[1]).loss.isfinite()


def test_compiled_code_has_the_same_loss() -> None:
    x, y = regression(2)
    elbos = [ELBO(layer("matrix"), num_data=20) for _ in range(2)]
    compiled = torch.compile(elbos[1], backend="eager")
    assert torch.allclose(compiled(x, y).loss, elbos[0](x, y).loss, rtol=1e-12)


@loop_over(
    "estimator",
    [ClosedFormLastLayer(), ClosedFormLastLayer(Flipout(antithetic=True))],
)
def test_it_is_saved_and_loaded(estimator: ClosedFormLastLayer, tmp_path: Path) -> None:
    bnn = layer("matrix", estimator=estimator)
    save(bnn, tmp_path / "model")
    assert load(tmp_path / "model", nn.Linear(3, 2)).estimator == estimator
    assert estimator.antithetic == estimator.below.antithetic
