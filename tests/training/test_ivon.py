"""IVON: the paper's algorithm, its fixed point, and where its numbers come from."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
from tests import faults
from tests.cases import normals
from tests.loops import loop_over
from tests.training.test_exact_posterior import (
    Regression,
    check_optimum,
    correlated_regression,
    sigma_points,
)
from torch import Tensor, nn

from bayesify import (
    ELBO,
    IVON,
    BayesianModule,
    ByGroup,
    Delta,
    Gaussian,
    GaussianLikelihood,
    Laplace,
    PACBayesObjective,
    StreamingELBO,
    make_step,
)
from bayesify.distributions.softplus import inverse_softplus
from bayesify.noise.keys import NoiseKey, Stream
from bayesify.training import ivon as module
from bayesify.training.backends import BackendName
from bayesify.training.kernel.formulas import Rates

pytestmark = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")

N, BATCH, NOISE_STD = 40, 8, 0.5
PRIOR_STDS = {"weight": (0.7, 0.7, 0.7), "bias": (2.0,)}


def regression(prior_mean: Literal["initial"] | None = None, **options: Any) -> ELBO:
    """Four weights with two prior stds."""
    net = nn.Linear(3, 1, dtype=torch.float64)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[0.4, -0.2, 0.1]]))
        net.bias.fill_(0.3)
    prior = ByGroup({name: Gaussian(stds[0]) for name, stds in PRIOR_STDS.items()})
    bnn = BayesianModule(
        net,
        likelihood=GaussianLikelihood(NOISE_STD),
        prior=prior,
        prior_mean=prior_mean,
        seed=5,
    )
    return ELBO(bnn, num_data=N, **{"fused": False, **options})


def minibatch(step: int) -> tuple[Tensor, Tensor]:
    x = normals(BATCH, 3, seed=100 + step)
    return x, x @ torch.tensor([[1.0], [-0.5], [0.0]], dtype=torch.float64) + 0.2


# ---------------------------------------------------------------- the algorithm, step by step


def by_the_paper(
    elbo: ELBO, lr: float, beta1: float, beta2: float, h0: float, steps: int, parts: int
) -> list[list[float]]:
    """Algorithm 1 of Shen et al. 2024 on numbers, with the objective's own noise.

    A step averages over the minibatches of ``parts`` backward passes, and over weight samples.

    Returns:
        Mean, momentum, h and std at the end.
    """
    ess = N / elbo.temperature  # lambda
    prior_stds = [*PRIOR_STDS["weight"], *PRIOR_STDS["bias"]]
    delta = [1.0 / (ess * std**2) for std in prior_stds]
    m, centre = elbo.bnn.posterior.mean.tolist(), elbo.bnn.prior_mean
    c = [0.0] * 4 if centre is None else centre.tolist()
    g, h, sizes = [0.0] * 4, [h0] * 4, range(4)
    sigma = [1.0 / math.sqrt(ess * (h[i] + delta[i])) for i in sizes]
    q, samples, calls = elbo.bnn.posterior, range(elbo.num_samples), 0
    for t in range(1, steps + 1):
        g_hat, h_hat = [0.0] * 4, [0.0] * 4
        for _ in range(parts):
            x, y = minibatch(calls)
            noise = q.noise(NoiseKey(elbo.bnn.seed, Stream.TRAINING, calls), samples).tolist()
            calls += 1
            share = 1.0 / (parts * len(noise))
            for eps in noise:
                theta = [m[i] + sigma[i] * eps[i] for i in sizes]
                gradient = [0.0] * 4  # of the mean nll
                for row, target in zip(x.tolist(), y[:, 0].tolist(), strict=True):
                    features = [*row, 1.0]
                    error = sum(theta[i] * features[i] for i in sizes) - target
                    for i in sizes:
                        gradient[i] += error * features[i] / (NOISE_STD**2 * BATCH)
                for i in sizes:
                    g_hat[i] += share * gradient[i]
                    h_hat[i] += share * gradient[i] * (theta[i] - m[i]) / sigma[i] ** 2
        for i in sizes:
            g[i] = beta1 * g[i] + (1 - beta1) * g_hat[i]
            h[i] = (
                beta2 * h[i]
                + (1 - beta2) * h_hat[i]
                + 0.5 * (1 - beta2) ** 2 * (h[i] - h_hat[i]) ** 2 / (h[i] + delta[i])
            )
            g_bar = g[i] / (1 - beta1**t)
            m[i] -= lr * (g_bar + delta[i] * (m[i] - c[i])) / (h[i] + delta[i])
            sigma[i] = 1.0 / math.sqrt(ess * (h[i] + delta[i]))
    return [m, g, h, sigma]


def check_against_the_paper(
    samples: int = 1, temperature: float = 0.5, parts: int = 1, steps: int = 15, **options: Any
) -> None:
    elbo = regression(num_samples=samples, temperature=temperature, **options)
    numbers = {"lr": 0.05, "beta1": 0.8, "beta2": 0.9, "h0": 0.6}
    expected = by_the_paper(elbo, steps=steps, parts=parts, **numbers)
    optimizer = IVON(elbo, numbers["lr"], (numbers["beta1"], numbers["beta2"]), h0=numbers["h0"])
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(parts):
            (elbo(*minibatch(step * parts + part)).loss / parts).backward()
        optimizer.step()
    q = elbo.bnn.posterior
    found = [q.mean, *optimizer.state_of(), q.std]
    for name, one, other in zip(("mean", "g", "h", "std"), found, expected, strict=True):
        assert one.tolist() == pytest.approx(other, rel=1e-10), f"{name} is off"


@loop_over(
    ("samples", "temperature", "parts"), [(1, 1.0, 1), (1, 0.5, 1), (3, 2.0, 1), (2, 1.0, 3)]
)
def test_steps_are_those_of_the_paper(samples: int, temperature: float, parts: int) -> None:
    check_against_the_paper(samples, temperature, parts)


@pytest.mark.parametrize("prior_mean", [None, "initial"])
def test_a_network_larger_than_a_block_is_updated_as_a_whole(
    prior_mean: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK", 3)  # of four weights
    check_against_the_paper(prior_mean=prior_mean)


def without_riemann_term(values: tuple[Tensor, ...], **options: Any) -> tuple[Tensor, ...]:
    """The update of h without its last term: h <- beta2 h + (1 - beta2) h_hat."""
    rates: Rates = options["rates"]
    mean, momentum, h = values
    delta = options["delta"]
    h = h + (h + delta) * options["in_log_std"] * rates.ess * (1.0 - rates.beta2)
    gradient = options["in_mean"] - delta * options["centred"]
    momentum = momentum * rates.beta1 + gradient * (1.0 - rates.beta1)
    step = (momentum / rates.correction1 + delta * options["centred"]) / (h + delta)
    std = ((h + delta) * rates.ess).rsqrt()
    return mean - rates.lr * step, inverse_softplus(std), momentum, h


def no_riemann_term(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "ivon_updated", without_riemann_term)


def no_bias_correction(patch: pytest.MonkeyPatch) -> None:
    right = IVON.next_rates
    patch.setattr(IVON, "next_rates", lambda self: right(self)._replace(correction1=1.0))


def sampled_with_n(patch: pytest.MonkeyPatch) -> None:
    """std = 1 / sqrt(N (h + delta)), whatever the temperature."""
    patch.setattr(IVON, "ess", property(lambda self: float(self.elbo.num_data)))


def decay_in_the_momentum(patch: pytest.MonkeyPatch) -> None:
    """The momentum is that of the loss, with the decay in it, which is then counted twice."""
    right = module.ivon_updated

    def wrong(values: tuple[Tensor, ...], **options: Any) -> tuple[Tensor, ...]:
        added = options["in_mean"] + options["delta"] * options["centred"]
        return right(values, **{**options, "in_mean": added})

    patch.setattr(module, "ivon_updated", wrong)


@loop_over("fault", [no_riemann_term, no_bias_correction, sampled_with_n, decay_in_the_momentum])
def test_a_planted_fault_is_not_the_paper(
    fault: faults.Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="is off"):
        check_against_the_paper()


# ------------------------------------------------------------------------- the fixed point


def at_fixed_point(model: Regression, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Means and stds after many steps with noise of exact first and second moments."""
    elbo = ELBO(
        model.bnn(),
        num_data=len(model.x),
        num_samples=8,
        temperature=temperature,
        fused=False,
    )
    optimizer = IVON(elbo, lr=0.3, betas=(0.5, 0.8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NoiseKey, "normals", sigma_points)
        for _ in range(150):
            optimizer.zero_grad()
            elbo(model.x, model.y).loss.backward()
            optimizer.step()
    return elbo.bnn.posterior.mean.detach(), elbo.bnn.posterior.std.detach()


def test_the_fixed_point_is_the_exact_mean_field_posterior() -> None:
    model = correlated_regression()
    check_optimum(model, at_fixed_point(model), 1e-6, 1e-6)


@loop_over("fault", [faults.wider_draws, decay_in_the_momentum])
def test_a_planted_fault_moves_the_fixed_point(
    fault: faults.Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    model = correlated_regression()
    with pytest.raises(AssertionError, match="off by"):
        check_optimum(model, at_fixed_point(model), 0.02, 0.02)


def test_sampled_noise_leads_to_the_fixed_point() -> None:
    model, copies = correlated_regression(), 500  # to average over, as over the last steps
    bnn = model.bnn(copies)
    elbo = ELBO(bnn, num_data=len(model.x), num_samples=2)
    optimizer, targets = IVON(elbo, lr=0.05, betas=(0.9, 0.99)), model.y.expand(-1, copies)
    means, variances = [], []
    step = make_step(elbo, optimizer)
    for number in range(900):
        if number == 600:
            optimizer.param_groups[0].update(lr=0.01, betas=(0.9, 0.998))
        step(model.x, targets)
        if number >= 700:
            means.append(bnn.posterior.mean.detach().view(copies, -1).mean(0))
            variances.append(bnn.posterior.std.detach().square().view(copies, -1).mean(0))
    found = torch.stack(means).mean(0), torch.stack(variances).mean(0).sqrt()
    check_optimum(model, found, 0.02, 0.02)


def test_a_cold_posterior_is_narrower_by_the_root_of_the_temperature() -> None:
    model = correlated_regression()
    # The likelihood counts 1 / temperature = 4 times, and half the prior's std is 4 times the
    # precision: the mean stays, and each std is half as large.
    mean, std = at_fixed_point(model._replace(prior_std=0.5 * model.prior_std), temperature=0.25)
    check_optimum(model, (mean, 2.0 * std), 1e-6, 1e-6)


# ----------------------------------------------------------------- positive, and not frozen


def noisy_steps(steps: int = 60) -> list[Tensor]:
    """The precisions h + delta of each step of a run whose h_hat is often far below 0."""
    elbo = regression()
    optimizer, found = IVON(elbo, lr=1e-3, betas=(0.9, 0.3), h0=0.1), []
    for step in range(steps):
        x, y = minibatch(step)
        optimizer.zero_grad()
        elbo(x, y + 20.0 * normals(BATCH, 1, seed=step)).loss.backward()
        optimizer.step()
        found.append(optimizer.state_of()[1] + optimizer.delta)
    return found


def test_the_precision_stays_positive() -> None:
    precisions = noisy_steps()
    falls = [bool((b < 0.8 * a).any()) for a, b in pairwise(precisions)]
    assert sum(falls) > 10, "the case is too easy"
    for before, after in pairwise(precisions):
        assert bool((after >= 0.4999 * before).all())
        assert bool((after > 0.0).all())


def test_without_its_last_term_the_precision_turns_negative(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    no_riemann_term(monkeypatch)
    lowest = torch.stack(noisy_steps()).nan_to_num(-1.0).min()
    assert float(lowest) < 0.0


def test_stds_move_to_the_prior_where_nothing_is_learned_and_shrink_elsewhere() -> None:
    net = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    bnn = BayesianModule(net, likelihood=GaussianLikelihood(0.1), prior=Gaussian(0.5))
    elbo = ELBO(bnn, num_data=64)
    optimizer = IVON(elbo, lr=0.1, betas=(0.9, 0.99), h0=1.0)
    start = bnn.posterior.std.detach().clone()
    x = normals(64, 2, seed=0) * torch.tensor([1.0, 0.0])  # the second input is dead
    step = make_step(elbo, optimizer)
    for _ in range(1500):
        step(x, 2.0 * x[:, :1])
    used, dead = (bnn.posterior.std.detach() / start).tolist()
    assert used < 0.2
    assert dead > 3.0
    assert float(bnn.posterior.std.detach()[1]) == pytest.approx(0.5, rel=0.01)
    assert bnn.posterior.mean.tolist() == pytest.approx([2.0, 0.0], abs=0.02)


# ---------------------------------------------------------------------- where numbers come from


def test_delta_follows_from_prior_n_and_temperature() -> None:
    bnn = BayesianModule(nn.Linear(3, 2), prior=Gaussian(0.25))
    elbo = ELBO(bnn, num_data=200, temperature=0.5)
    optimizer = IVON(elbo, h0=0.3)
    assert optimizer.ess == 400.0
    assert optimizer.delta == pytest.approx(1.0 / (400.0 * 0.25**2), rel=1e-12)
    expected = 1.0 / math.sqrt(400.0 * (0.3 + 1.0 / 25.0))
    assert bnn.posterior.std.tolist() == pytest.approx([expected] * 8, rel=1e-6)
    delta = IVON(regression()).delta
    assert isinstance(delta, Tensor)
    assert delta.tolist() == pytest.approx([1.0 / (N * 0.49)] * 3 + [1.0 / (N * 4.0)])


def test_without_h0_the_stds_are_kept() -> None:
    bnn = BayesianModule(nn.Linear(3, 2), init_std=0.07)
    elbo = ELBO(bnn, num_data=50)
    optimizer = IVON(elbo, h0=None)
    assert bnn.posterior.std.tolist() == pytest.approx([0.07] * 8)
    h = optimizer.state_of()[1]
    precision = 50 * (h + optimizer.delta)
    assert precision.rsqrt().tolist() == pytest.approx([0.07] * 8, rel=1e-5)


def wide_elbo(**options: Any) -> ELBO:
    bnn = {k: options.pop(k) for k in ("prior", "posterior") if k in options}
    return ELBO(BayesianModule(nn.Linear(3, 2), **bnn), **{"num_data": 10, **options})


def frozen() -> ELBO:
    elbo = wide_elbo()
    elbo.bnn.posterior.get_parameter("rho").requires_grad_(requires_grad=False)
    return elbo


@loop_over(
    ("make", "options", "message"),
    [
        (lambda: wide_elbo(prior=Laplace(0.3)), {}, "needs a Gaussian prior.*Laplace"),
        (lambda: wide_elbo(posterior=Delta), {}, "MeanFieldGaussian posterior.*Delta"),
        (lambda: wide_elbo(kl="monte-carlo"), {}, "closed form"),
        (lambda: wide_elbo(kl_weighting="geometric", num_batches=2), {}, 'got .*"geometric"'),
        (lambda: wide_elbo(temperature=0.0), {}, "temperature above 0"),
        (frozen, {}, "one of them is frozen"),
        (wide_elbo, {"lr": 0.0}, "lr must be positive"),
        (wide_elbo, {"h0": -1.0}, "h0 must be positive"),
        (wide_elbo, {"deterministic_lr": math.nan}, "deterministic_lr must be positive"),
        (wide_elbo, {"betas": (0.9, 1.0)}, "betas must be"),
        (wide_elbo, {"betas": (0.9,)}, r"betas must be two numbers .*, got \(0\.9,\)"),
    ],
)
def test_an_objective_that_does_not_fit_is_an_error(
    make: Callable[[], ELBO], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        IVON(make(), **options)


def test_parameters_in_place_of_the_objective_are_an_error() -> None:
    with pytest.raises(TypeError, match=r"IVON needs the objective.*IVON\(ELBO\(bnn"):
        IVON(nn.Linear(2, 1).parameters())  # type: ignore[arg-type]


def test_another_objective_than_its_own_is_an_error() -> None:
    bnn = BayesianModule(nn.Linear(3, 2))
    one, other = ELBO(bnn, num_data=10), ELBO(bnn, num_data=1000)
    with pytest.raises(ValueError, match="the objective that it was made for"):
        make_step(other, IVON(one))
    elsewhere = ELBO(BayesianModule(nn.Linear(3, 2)), num_data=10)
    with pytest.raises(ValueError, match=r"it is of another one; make it by IVON\(elbo"):
        make_step(elsewhere, IVON(one))


@loop_over("backend", ["auto", "closed-form", "autograd"])
def test_a_prior_that_changes_during_training_is_an_error(backend: BackendName) -> None:
    elbo = wide_elbo()
    step = make_step(elbo, IVON(elbo), backend=backend)
    step(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))
    elbo.bnn.prior = Gaussian(0.1)
    step(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))
    elbo.bnn.prior = Laplace(0.3)
    with pytest.raises(ValueError, match="needs a Gaussian prior"):
        step(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))


@pytest.mark.parametrize("kind", [StreamingELBO, PACBayesObjective])
def test_objectives_with_a_kl_of_their_own_are_refused(kind: type[ELBO]) -> None:
    bnn = BayesianModule(nn.Linear(3, 2), prior=Gaussian(0.1))
    with pytest.raises(
        ValueError, match=f"{kind.__name__} has a (complexity|kl_factor) of its own"
    ):
        IVON(kind(bnn, num_data=10), lr=0.1)
