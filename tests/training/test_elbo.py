"""What the loss of one minibatch is, and that an epoch of them is the free energy of all data."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from tests import faults
from tests.cases import PRIORS, Case, each_case, mlp, normals
from tests.loops import loop_over
from torch import Tensor, nn

from bayesify import (
    ELBO,
    BayesianModule,
    CategoricalLikelihood,
    ClosedFormLastLayer,
    Delta,
    Estimator,
    Gaussian,
    GaussianLikelihood,
    LocalReparameterization,
    MeanFieldGaussian,
    Posterior,
)
from bayesify.distributions.kl import kl_divergence, minibatch_weight
from bayesify.noise.keys import NoiseKey, Stream

WEIGHTINGS = ("uniform", "geometric")


def free_energy(bnn: BayesianModule, x: Tensor, y: Tensor, num_samples: int, tau: float) -> Tensor:
    """-sum of log p(y|x,w) + tau * complexity, by hand, at the noise of training step 0."""
    key = NoiseKey(bnn.seed, Stream.TRAINING, 0)
    draw = bnn.posterior.draw(bnn.posterior.noise(key, range(num_samples)))
    log_lik = torch.zeros((), dtype=torch.float64)
    for weights in draw.weights:
        log_lik = log_lik + bnn.likelihood.log_prob(bnn.run_with(weights, x)[None], y).sum()
    if isinstance(bnn.posterior, Delta):
        complexity = -bnn.prior.log_prob(bnn.posterior.mean).sum()
    else:
        complexity = kl_divergence(bnn.posterior, bnn.prior, draw)
    return tau * complexity - log_lik / num_samples


def check_epoch(
    case: Case, weighting: str, tau: float = 1.0, batch_size: int = 5, num_data: int = 23
) -> None:
    """The sum over an epoch of B_i loss_i, and its gradient, are those of the free energy."""
    bnn = case.bnn()
    x, y = case.data(num_data)
    batches = list(zip(x.split(batch_size), y.split(batch_size), strict=True))
    elbo = ELBO(
        bnn,
        num_data=num_data,
        kl_weighting=weighting,
        temperature=tau,
        num_samples=2,
        num_batches=len(batches),
        fused=False,
    )
    total = 0.0
    for index, (part_x, part_y) in enumerate(batches):
        elbo.step = 0  # the same noise for each
        terms = elbo(part_x, part_y, batch_index=index)
        (len(part_x) * terms.loss).backward()
        total += len(part_x) * terms.loss.item()
        if weighting == "geometric":
            share = Fraction(2 ** (len(batches) - 1 - index), 2 ** len(batches) - 1)
            part = tau * float(share) * (terms.kl + terms.penalty) / len(part_x)
            got = (terms.loss - terms.nll).item()
            assert got == pytest.approx(part.item(), rel=1e-9, abs=1e-12), index
    summed = [parameter.grad.clone() for parameter in bnn.parameters()]
    bnn.zero_grad()
    expected = free_energy(bnn, x, y, 2, tau)
    expected.backward()
    assert total == pytest.approx(expected.item(), rel=1e-12)
    for got, parameter in zip(summed, bnn.parameters(), strict=True):
        assert torch.allclose(got, parameter.grad, rtol=1e-9, atol=1e-9)


@loop_over("weighting", WEIGHTINGS)
@each_case
def test_an_epoch_is_the_free_energy(case: Case, weighting: str) -> None:
    check_epoch(case, weighting)


@loop_over("weighting", WEIGHTINGS)
@loop_over("tau", [0.0, 0.1, 3.0])
def test_a_tempered_epoch_is_the_tempered_free_energy(tau: float, weighting: str) -> None:
    check_epoch(Case("scale-mixture", "mean-field", "gaussian"), weighting, tau)


MANY = Case("gaussian", "mean-field", "categorical")


@loop_over(
    ("fault", "weighting", "tau"),
    [
        (faults.kl_halved, "uniform", 1.0),
        (faults.kl_not_divided, "uniform", 1.0),
        (faults.kl_per_batch, "uniform", 1.0),
        (faults.temperature_on_nll, "uniform", 0.5),
        (faults.geometric_off_by_one, "geometric", 1.0),
        (faults.geometric_reversed, "geometric", 1.0),
    ],
)
def test_a_planted_fault_leaves_the_free_energy(
    fault: faults.Fault, weighting: str, tau: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check_epoch(MANY, weighting, tau)


@loop_over("num_batches", [1, 2, 7, 60, 1074, 1100, 2000, 100_000])
def test_geometric_weights_are_the_papers(num_batches: int) -> None:
    """pi_i = 2^(M - i) / (2^M - 1), in exact integers, whatever the size of the last minibatch."""
    shares = [
        minibatch_weight(
            "geometric", batch_index=i, num_batches=num_batches, batch_size=3, num_data=10
        )
        * 3
        / 10
        for i in range(min(num_batches, 80))
    ]
    for i, share in enumerate(shares):
        exact = float(Fraction(2 ** (num_batches - 1 - i), 2**num_batches - 1))
        assert share == pytest.approx(exact, rel=1e-14), i
    assert sum(shares) == pytest.approx(1.0, rel=1e-14)
    last = minibatch_weight(
        "geometric", batch_index=num_batches - 1, num_batches=num_batches, batch_size=1, num_data=1
    )
    assert 0.0 <= last <= 1.0


def test_an_epoch_of_2000_minibatches_does_not_overflow() -> None:
    net = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    bnn = BayesianModule(net, likelihood=GaussianLikelihood(), prior=PRIORS["gaussian"])
    x, y = normals(2000, 1, seed=1), normals(2000, 1, seed=2)
    elbo = ELBO(bnn, num_data=2000, kl_weighting="geometric", num_batches=2000, fused=False)
    total = 0.0
    with torch.no_grad():
        for index in range(2000):
            elbo.step = 0
            total += elbo(x[index : index + 1], y[index : index + 1], batch_index=index).loss.item()
        assert total == pytest.approx(free_energy(bnn, x, y, 1, 1.0).item(), rel=1e-11)


@loop_over("weighting", WEIGHTINGS)
@each_case
def test_terms_add_up(case: Case, weighting: str) -> None:
    bnn = case.bnn()
    x, y = case.data(6)
    elbo = ELBO(
        bnn, num_data=50, kl_weighting=weighting, temperature=0.3, num_samples=2, num_batches=9
    )
    terms = elbo(x, y, batch_index=4, kl_scale=0.25)
    weight = 1.0 if weighting == "uniform" else 2.0**-5 / (1.0 - 2.0**-9) * 50 / 6
    factor = 0.25 * 0.3 * weight / 50
    expected = terms.nll + factor * (terms.kl + terms.penalty)
    assert terms.loss.item() == pytest.approx(expected.item(), rel=1e-13)
    assert all(value.shape == () for value in terms[:4])
    assert (terms.kl == 0.0).item() == case.is_point
    assert (terms.penalty == 0.0).item() == (not case.is_point)
    assert elbo.step == 1


def test_each_step_and_each_seed_has_its_own_noise() -> None:
    x, y = MANY.data(6)
    elbo = ELBO(MANY.bnn(), num_data=6)
    losses = [elbo(x, y).loss.item() for _ in range(4)]
    assert len(set(losses)) == 4
    assert [ELBO(MANY.bnn(), num_data=6)(x, y).loss.item() for _ in range(2)] == [losses[0]] * 2
    assert ELBO(MANY.bnn(seed=12), num_data=6)(x, y).loss.item() != losses[0]
    later = ELBO(MANY.bnn(), num_data=6)
    later.step = 2
    assert later(x, y).loss.item() == losses[2]


def plain_loss(net: nn.Module, likelihood: str, x: Tensor, y: Tensor) -> Tensor:
    if likelihood == "categorical":
        return nn.functional.cross_entropy(net(x), y)
    variance = torch.full_like(y, 0.8**2)
    nll = nn.functional.gaussian_nll_loss(net(x), y, variance, full=True, reduction="none")
    return nll.sum(-1).mean()


def check_point_estimate(prior: str, likelihood: str, tau: float) -> None:
    """A Delta posterior trains as the plain net with the penalty -log p(w) tau / N."""
    case = Case(prior, "delta", likelihood)
    net = mlp()
    bnn = case.bnn(net)
    x, y = case.data(10)
    terms = ELBO(bnn, num_data=70, temperature=tau, num_samples=2)(x, y)
    terms.loss.backward()

    nll = plain_loss(net, likelihood, x, y)
    flat = torch.cat([parameter.flatten() for parameter in net.parameters()])
    penalty = -PRIORS[prior].log_prob(flat).sum()
    loss = nll + tau * penalty / 70
    loss.backward()
    assert terms.nll.item() == pytest.approx(nll.item(), rel=1e-12)
    assert terms.penalty.item() == pytest.approx(penalty.item(), rel=1e-12)
    assert terms.loss.item() == pytest.approx(loss.item(), rel=1e-12)
    assert terms.kl.item() == 0.0
    expected = torch.cat([parameter.grad.flatten() for parameter in net.parameters()])
    assert torch.allclose(bnn.posterior.mean.grad, expected, rtol=1e-11, atol=1e-13)


@loop_over("tau", [0.0, 0.5, 1.0])
@loop_over("likelihood", ["categorical", "gaussian"])
@loop_over("prior", PRIORS)
def test_a_point_estimate_is_the_plain_net(prior: str, likelihood: str, tau: float) -> None:
    check_point_estimate(prior, likelihood, tau)


@loop_over(("fault", "tau"), [(faults.kl_not_divided, 1.0), (faults.temperature_on_nll, 0.5)])
def test_a_planted_fault_leaves_the_plain_net(
    fault: faults.Fault, tau: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check_point_estimate("gaussian", "categorical", tau)


def test_temperature_zero_is_the_plain_loss_exactly() -> None:
    net = mlp()
    x, y = MANY.data(10)
    bnn = BayesianModule(net, likelihood=CategoricalLikelihood(), posterior=Delta)
    terms = ELBO(bnn, num_data=70, temperature=0.0)(x, y)
    assert torch.equal(terms.loss, terms.nll)
    assert terms.loss.item() == pytest.approx(
        plain_loss(net, "categorical", x, y).item(), rel=1e-14
    )


def test_a_closed_form_that_is_missing_is_noticed_at_once() -> None:
    assert ELBO(BayesianModule(mlp()), num_data=5, kl="closed").kl == "closed"
    with pytest.raises(ValueError, match="no registered closed form"):
        ELBO(BayesianModule(mlp(), prior=PRIORS["scale-mixture"]), num_data=5, kl="closed")


class NotSummed(GaussianLikelihood):
    """A likelihood with a number for each component of a target, which would be averaged."""

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.distributions.Normal(outputs, 1.0).log_prob(targets)

    def expected_log_prob(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        return self.log_prob(mean, targets) + 0.0 * variance


class Summed(Gaussian):
    """A prior with one number for all weights, which would be added for each of them."""

    def log_prob(self, weights: Tensor) -> Tensor:
        return super().log_prob(weights).sum()


@loop_over("estimator", [None, ClosedFormLastLayer(), LocalReparameterization()])
def test_a_likelihood_has_a_number_for_each_example(estimator: Estimator | None) -> None:
    x, y = normals(6, 4, seed=1), normals(6, 3, seed=2)
    net = nn.Linear(4, 3).double()
    options = {} if estimator is None else {"estimator": estimator}
    bnn = BayesianModule(net, likelihood=NotSummed(1.0), **options)  # type: ignore[arg-type]
    message = (
        r"NotSummed\.(expected_)?log_prob must return shape \(S, N\) = \(1, 6\), .* \(1, 6, 3\)"
    )
    with pytest.raises(ValueError, match=message):
        ELBO(bnn, num_data=6)(x, y)
    with pytest.raises(ValueError, match=r"NotSummed\.log_prob must return shape"):
        bnn.log_prob(x, y)
    # Targets (N, 1) and means (N,) would be compared each with each.
    flat = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)).double()
    narrow = BayesianModule(flat, likelihood=NotSummed(1.0))
    with pytest.raises(ValueError, match=r"\(S, N\) = \(1, 6\), .* got \(6, 6\)"):
        ELBO(narrow, num_data=6)(x, y[:, :1])


@pytest.mark.parametrize("weighting", [{}, {"kl_weighting": "geometric", "num_batches": 2}])
def test_an_empty_minibatch_is_an_error(weighting: dict[str, Any]) -> None:
    elbo = ELBO(BayesianModule(nn.Linear(4, 3)), num_data=6, **weighting)
    with pytest.raises(ValueError, match="a minibatch must hold at least one example, got none"):
        elbo(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long), batch_index=0)


@loop_over("posterior", [MeanFieldGaussian, Delta])
def test_a_prior_has_a_number_for_each_weight(posterior: type[Posterior]) -> None:
    x, y = normals(6, 4, seed=1), torch.arange(6) % 3
    bnn = BayesianModule(nn.Linear(4, 3).double(), prior=Summed(0.3), posterior=posterior)
    message = r"must return the log density of each weight, shape .*15.*, got \(\); do not sum over"
    with pytest.raises(ValueError, match=message):
        ELBO(bnn, num_data=6, kl="monte-carlo")(x, y)
