"""Priors by unit: their KL against minima and quadrature, their units, and what they switch off."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from tests.cases import Case, mlp, normals
from tests.loops import loop_over
from torch import Tensor, nn

import bayesify as bf
from bayesify.distributions import by_group, closed_forms
from bayesify.distributions.sparsity import GroupedGaussianBlock, SpikeAndSlabBlock

SPARSE: dict[str, bf.Prior] = {
    "log-uniform": bf.LogUniform(),
    "grouped-input": bf.GroupedGaussian(by="input"),
    "grouped-output": bf.GroupedGaussian(by="output"),
    "grouped-weight": bf.GroupedGaussian(by="weight"),
    "spike-and-slab": bf.SpikeAndSlab(0.3, 0.8, 0.02, by="input"),
    "spike-and-slab-output": bf.SpikeAndSlab(0.3, 0.8, 0.02, by="output"),
}
each_sparse = loop_over("prior", SPARSE.values())

#: A matrix of 3 outputs and 2 inputs, some of whose weights are pruned.
ROWS, COLUMNS = [[0, 1], [2, 3], [4, 5]], [[0, 2, 4], [1, 3, 5]]
UNITS = {"output": ROWS, "input": COLUMNS, "weight": [[i] for i in range(6)]}
KEPT = torch.tensor([True, True, False, True, False, True])


def posterior(kept: Tensor | None = None) -> bf.MeanFieldGaussian:
    stds = torch.tensor([0.2, 1.5, 0.4, 0.03, 2.0, 0.7], dtype=torch.float64)
    q = bf.MeanFieldGaussian(1.3 * normals(6, seed=4), stds)
    q.mask = kept
    return q


def of_weights(q: bf.MeanFieldGaussian, indices: list[int]) -> bf.MeanFieldGaussian:
    """The unpruned ones of these weights."""
    left = [i for i in indices if q.mask is None or bool(q.mask[i])]
    return bf.MeanFieldGaussian(q.mean.detach()[left], q.std.detach()[left])


def check_grouped(by: str, kept: Tensor | None) -> None:
    """The KL is the least over one width for each unit, found by numerical minimisation."""
    q = posterior(kept)
    p = bf.GroupedGaussian(by=by).for_parameter((3, 2))
    least = 0.0
    for unit in UNITS[by]:
        alone = of_weights(q, unit)
        least += optimize.minimize_scalar(
            lambda log_std, alone=alone: bf.kl_divergence(
                alone, bf.Gaussian(math.exp(log_std))
            ).item(),
            bounds=(-6.0, 4.0),
            options={"xatol": 1e-12},
        ).fun
    assert bf.kl_divergence(q, p).item() == pytest.approx(least, rel=1e-11)


@loop_over("by", UNITS)
@loop_over("kept", [None, KEPT])
def test_each_unit_has_the_width_of_the_least_kl(by: str, kept: Tensor | None) -> None:
    check_grouped(by, kept)


def test_units_along_the_wrong_axis_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(UNITS, "input", ROWS)
    with pytest.raises(AssertionError):
        check_grouped("input", None)


def test_counting_pruned_weights_in_a_unit_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = by_group.UnitBlock.count_by_unit
    monkeypatch.setattr(
        by_group.UnitBlock, "count_by_unit", lambda p, like, _: right(p, like, None)
    )
    with pytest.raises(AssertionError):
        check_grouped("input", KEPT)


def test_by_weight_it_is_half_the_log_of_one_plus_the_ratio() -> None:
    q = posterior()
    got = bf.kl_divergence(q, bf.GroupedGaussian(by="weight").for_parameter((3, 2)))
    expected = 0.5 * torch.log1p((q.mean / q.std).square()).sum()
    assert got.item() == pytest.approx(expected.item(), rel=1e-12)


SPIKE = SpikeAndSlabBlock((1, 1, 2), 0.3, 0.8, 0.1)
NEAR = bf.MeanFieldGaussian(torch.tensor([0.1, -0.15], dtype=torch.float64), 0.15)


def joint_kl(q: bf.MeanFieldGaussian, prior: SpikeAndSlabBlock, gamma: float) -> float:
    """KL of weights and choice, where the slab has probability gamma."""
    slab, spike = (bf.kl_divergence(q, bf.Gaussian(std)).item() for std in (prior.std1, prior.std2))
    choice = gamma * math.log(gamma / prior.pi)
    choice += (1.0 - gamma) * math.log((1.0 - gamma) / (1.0 - prior.pi))
    return choice + gamma * slab + (1.0 - gamma) * spike


def check_choices(kl: Callable[[bf.MeanFieldGaussian, bf.Prior], Tensor]) -> None:
    for scale in (0.3, 1.0, 1.2, 3.0):
        q = bf.MeanFieldGaussian(scale * NEAR.mean.detach(), scale * NEAR.std.detach())
        least = optimize.minimize_scalar(
            lambda gamma, q=q: joint_kl(q, SPIKE, gamma),
            bounds=(1e-9, 1.0 - 1e-9),
            options={"xatol": 1e-12},
        ).fun
        assert kl(q, SPIKE).item() == pytest.approx(least, rel=1e-7)


def test_the_choice_of_each_unit_is_the_best() -> None:
    check_choices(bf.kl_divergence)


@loop_over(
    "fault",
    [
        lambda q, p: bf.kl_divergence(q, SpikeAndSlabBlock(p.shape, 1 - p.pi, p.std1, p.std2)),
        lambda q, p: bf.kl_divergence(q, SpikeAndSlabBlock((1, 2, 1), p.pi, p.std1, p.std2)),
        lambda q, p: bf.kl_divergence(q, p) + 1e-5,
    ],
)
def test_a_planted_fault_leaves_the_best_choice(
    fault: Callable[[bf.MeanFieldGaussian, bf.Prior], Tensor],
) -> None:
    with pytest.raises(AssertionError):
        check_choices(fault)


def test_it_bounds_the_kl_of_the_weights() -> None:
    """The KL with the choice summed out, by quadrature, is at most that with the choice."""
    mean, std = NEAR.mean.detach().numpy(), NEAR.std.detach().numpy()

    def integrand(first: float, second: float) -> float:
        weights = np.array([first, second])
        log_q = stats.norm.logpdf(weights, mean, std).sum()
        slab, spike = (stats.norm.logpdf(weights, scale=s).sum() for s in (0.8, 0.1))
        log_p = np.logaddexp(math.log(0.3) + slab, math.log(0.7) + spike)
        return float(math.exp(log_q) * (log_q - log_p))

    edges = [(float(m - 9 * s), float(m + 9 * s)) for m, s in zip(mean, std, strict=True)]
    nodes, weights = np.polynomial.legendre.leggauss(40)
    axes = [0.5 * (high - low) * nodes + 0.5 * (high + low) for low, high in edges]
    area = math.prod(0.5 * (high - low) for low, high in edges)
    marginal = area * math.fsum(
        u * v * integrand(x, y)
        for x, u in zip(axes[0], weights, strict=True)
        for y, v in zip(axes[1], weights, strict=True)
    )
    bound = bf.kl_divergence(NEAR, SPIKE).item()
    assert marginal < bound < marginal + 1.0
    assert 0.6 * bound < marginal  # so that a KL that counts less is caught


def test_units_follow_the_shapes_of_the_parameters() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(5, 6))
    layout = bf.ParameterLayout.of(net)
    shapes = [
        [getattr(p, "shape", None) for p in prior.for_layout(layout).priors]
        for prior in (bf.GroupedGaussian(by="input"), bf.SpikeAndSlab(by="output"))
    ]
    assert shapes == [
        [(4, 3, 4), None, (6, 5, 1), None],
        [(1, 4, 12), None, (1, 6, 5), None],
    ]
    by_weight = bf.GroupedGaussian(by="weight").for_layout(layout)
    assert [p.shape for p in by_weight.priors] == [(1, 48, 1), (1, 4, 1), (1, 30, 1), (1, 6, 1)]


def test_parameters_of_equal_shape_have_units_of_their_own() -> None:
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)).double()
    bnn = bf.BayesianModule(net, prior=bf.GroupedGaussian(), init_std=0.2)
    parts = [bf.MeanFieldGaussian(p.detach().flatten(), 0.2) for p in net.parameters()]
    expected = sum(bf.kl_divergence(q, GroupedGaussianBlock((3, 3, 1))).item() for q in parts)
    assert bf.kl_divergence(bnn.posterior, bnn.weight_prior).item() == pytest.approx(expected)


def test_they_combine_with_others_by_name() -> None:
    layout = bf.ParameterLayout.of(mlp())
    prior = bf.ByGroup({"0.weight": bf.GroupedGaussian(), "*": bf.Gaussian(0.5)}).for_layout(layout)
    assert prior.sizes == (15, 29)
    assert prior.priors == (GroupedGaussianBlock((5, 3, 1)), bf.Gaussian(0.5))
    assert prior.is_learned
    assert prior.is_proper


@each_sparse
def test_pruned_weights_leave_the_kl(prior: bf.Prior) -> None:
    bnn = bf.prune(bf.BayesianModule(mlp(), prior=prior, init_std=0.2), 0.4)
    kl = bf.kl_divergence(bnn.posterior, bnn.weight_prior)
    kl.backward()
    assert torch.equal(bnn.posterior.rho.grad != 0.0, bnn.posterior.mask)
    with torch.no_grad():
        bnn.posterior.rho[~bnn.posterior.mask] += 1.0
    assert bf.kl_divergence(bnn.posterior, bnn.weight_prior).item() == kl.item()


@each_sparse
def test_derivatives_agree_with_differences(prior: bf.Prior) -> None:
    p = prior.for_parameter((3, 2))

    def kl(mean: Tensor, rho: Tensor) -> Tensor:
        q = posterior(KEPT)
        del q.mean, q.rho
        q.mean, q.rho = mean, rho
        return bf.kl_divergence(q, p)

    q = posterior()
    point = (q.mean.detach().requires_grad_(), q.rho.detach().requires_grad_())
    assert torch.autograd.gradcheck(kl, point)
    assert torch.autograd.gradgradcheck(kl, point)


@each_sparse
def test_extremes_have_finite_derivatives(prior: bf.Prior) -> None:
    p = prior.for_parameter((3, 2))
    for rho in (-100.0, -30.0, 30.0):
        q = bf.MeanFieldGaussian(torch.tensor([0.0, 1e-30, 1e-10, -1.0, 1e8, 3.0]), 1.0)
        with torch.no_grad():
            q.rho.fill_(rho)
        kl = bf.kl_divergence(q, p)
        kl.backward()
        for tensor in (kl, q.mean.grad, q.rho.grad):
            assert bool(tensor.isfinite().all()), rho


@each_sparse
def test_a_saved_network_has_the_same_prior(prior: bf.Prior, tmp_path: Path) -> None:
    bnn = bf.BayesianModule(mlp(), prior=prior)
    bf.save(bnn, tmp_path / "model.safetensors")
    assert bf.load(tmp_path / "model.safetensors", mlp()).prior == prior


@each_sparse
def test_structured_posteriors_have_the_kl_of_their_marginals(prior: bf.Prior) -> None:
    bnn = bf.BayesianModule(mlp(), posterior=bf.LowRankGaussian(rank=2), prior=prior, init_std=0.2)
    q, p = bnn.posterior, bnn.weight_prior
    alone = bf.MeanFieldGaussian(q.mean.detach(), q.std.detach())
    expected = bf.kl_divergence(alone, p) + q.total_correlation()
    assert bf.kl_divergence(q, p).item() == pytest.approx(expected.item(), rel=1e-9)


@pytest.mark.filterwarnings("ignore::bayesify.training.convergence.ConvergenceWarning")
@pytest.mark.parametrize("prior", SPARSE.values(), ids=SPARSE)
def test_fit_trains_with_them(prior: bf.Prior) -> None:
    x, y = Case("gaussian", "mean-field", "categorical").data(8, torch.float32)
    for estimator in (bf.WeightSampling(), bf.LocalReparameterization(), bf.Flipout()):
        bnn = bf.BayesianModule(mlp(torch.float32), prior=prior, estimator=estimator)
        rows = bf.fit(bf.ELBO(bnn, num_data=8), [(x, y)], epochs=2)
        assert math.isfinite(rows[-1]["loss"])
    members = [bf.BayesianModule(mlp(torch.float32), prior=prior, seed=i) for i in range(2)]
    histories = bf.fit_replicas([bf.ELBO(m, num_data=8) for m in members], [[(x, y)]] * 2, epochs=2)
    assert all(math.isfinite(rows[-1]["loss"]) for rows in histories)


def trained(prior: bf.Prior) -> bf.BayesianModule:
    """A linear layer of ten inputs, of which the first two matter."""
    x, noise = normals(300, 10, seed=1), normals(300, 8, seed=2)
    y = x[:, :2] @ normals(2, 8, seed=3) + 0.5 * noise
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Linear(10, 8).double()
    bnn = bf.BayesianModule(
        net,
        likelihood=bf.GaussianLikelihood(0.5).double(),
        prior=prior,
        estimator=bf.LocalReparameterization(),
        init_std=0.05,
    )
    elbo = bf.ELBO(bnn, num_data=300)
    optimizer = torch.optim.Adam(elbo.parameters(), lr=0.03)
    for _ in range(120):
        optimizer.zero_grad()
        elbo(x, y).loss.backward()
        optimizer.step()
    return bnn


def check_irrelevant_inputs_fall(prior: bf.Prior) -> None:
    """The signal-to-noise ratios of the weights that do not matter are low.

    Under a wide Gaussian prior they are standard normals, with a root mean square of 1.
    """
    bnn = trained(prior)
    squares = bnn.layout.unflatten(bf.snr(bnn))["weight"].square()
    assert squares[:, :2].mean(dim=0).sqrt().min() > 8.0
    assert squares[:, 2:].mean().sqrt() < 0.7


@pytest.mark.parametrize("name", [name for name in SPARSE if "output" not in name])
def test_irrelevant_inputs_fall_to_zero(name: str) -> None:
    check_irrelevant_inputs_fall(SPARSE[name])


def check_whole_inputs_go(prior: bf.Prior) -> None:
    bnn = trained(prior)
    small = bf.prune(bnn, fraction=(bf.snr(bnn) < 2.0).double().mean().item())
    weights = bnn.layout.unflatten(small.posterior.masked_mean)["weight"]
    assert (weights != 0.0).all(dim=0).tolist() == [True] * 2 + [False] * 8
    assert (weights != 0.0).any(dim=0).tolist() == [True] * 2 + [False] * 8


def test_pruning_removes_whole_inputs() -> None:
    for name in ("grouped-input", "spike-and-slab"):
        check_whole_inputs_go(SPARSE[name])
    with pytest.raises(AssertionError):
        check_whole_inputs_go(bf.Gaussian(1.0))


@loop_over("prior", [bf.Gaussian(1.0), bf.EmpiricalGaussian(min_size=1)])
def test_a_prior_that_treats_all_inputs_alike_leaves_them(prior: bf.Prior) -> None:
    with pytest.raises(AssertionError, match=r"< 0\.7"):
        check_irrelevant_inputs_fall(prior)


@loop_over("name", [name for name in SPARSE if name != "log-uniform"])
def test_a_point_estimate_and_monte_carlo_are_refused(name: str) -> None:
    x, y = Case("gaussian", "delta", "categorical").data(6)
    prior = SPARSE[name]
    with pytest.raises(TypeError, match=f"{type(prior).__name__} prior is one of whole units"):
        bf.ELBO(bf.BayesianModule(mlp(), prior=prior, posterior=bf.Delta), num_data=6)(x, y)
    bnn = bf.BayesianModule(mlp(), prior=prior)
    with pytest.raises(TypeError, match="no density of a single weight"):
        bf.ELBO(bnn, num_data=6, kl="monte-carlo")(x, y)
    with pytest.raises(TypeError, match=r"give prior\.for_layout"):
        bf.kl_divergence(posterior(), prior)


def test_only_a_fixed_prior_gives_a_certificate() -> None:
    net = mlp(torch.float32)
    bf.PACBayesObjective(bf.BayesianModule(net, prior=SPARSE["spike-and-slab"]), num_data=100)
    with pytest.raises(ValueError, match="got GroupedGaussian, which is learned"):
        bf.PACBayesObjective(bf.BayesianModule(net, prior=bf.GroupedGaussian()), num_data=100)


def test_their_errors_are_clear() -> None:
    with pytest.raises(ValueError, match="by must be one of input, output, weight, got 'column'"):
        bf.GroupedGaussian(by="column")
    with pytest.raises(ValueError, match="by must be one of input, output, got 'weight'"):
        bf.SpikeAndSlab(by="weight")
    with pytest.raises(ValueError, match="pi must lie strictly between 0 and 1"):
        bf.SpikeAndSlab(pi=1.0)
    with pytest.raises(ValueError, match="std1 must be larger than std2"):
        bf.SpikeAndSlab(std1=0.1, std2=0.5)
    with pytest.raises(ValueError, match="std2 must be positive and finite, got nan"):
        bf.SpikeAndSlab(std2=math.nan)


def test_a_wrong_logarithm_of_the_width_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_forms, "PRIOR_LIMITS", (1.0, 1e15))
    with pytest.raises(AssertionError):
        check_grouped("weight", None)
