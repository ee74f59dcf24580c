"""PAC-Bayes objectives: values, gradients on every backend, resuming, and what cannot be bound."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesify as bf
from bayesify.datasets import TensorLoader
from bayesify.noise.keys import NoiseKey, Stream
from bayesify.training.backends import BackendName
from bayesify.training.pac_bayes import best_lambda, risk_bound

FORMS = ("f-quad", "f-classic", "f-lambda")
N, BOUND, DELTA, P_MIN = 60, 40, 0.05, 1e-3


def at_prior(net: nn.Module, std: float = 0.1, **options: Any) -> bf.BayesianModule:
    return bf.BayesianModule(
        net, prior=bf.Gaussian(std), prior_mean="initial", init_std=std, **options
    )


def moved(seed: int = 0) -> bf.BayesianModule:
    """A network whose posterior is away from its prior."""
    torch.manual_seed(seed)
    bnn = at_prior(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))).double()
    with torch.no_grad():
        bnn.posterior.mean += 0.05 * torch.randn_like(bnn.posterior.mean)
        bnn.posterior.rho += 0.1 * torch.randn_like(bnn.posterior.rho)
    return bnn


def minibatch(count: int = 20) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(count, 4, dtype=torch.float64), torch.randint(3, (count,))


def objective(bnn: bf.BayesianModule, form: str, **options: Any) -> bf.PACBayesObjective:
    settings = {"num_data": N, "num_bound": BOUND, "delta": DELTA, "p_min": P_MIN, **options}
    return bf.PACBayesObjective(bnn, form=form, **settings)


def written_out(form: str, loss: Tensor, kl: Tensor, lambda_: float = 1.0) -> Tensor:
    """f as the paper writes it, of tensors."""
    log_term = math.log(2 * math.sqrt(BOUND) / DELTA)
    if form == "f-quad":
        ratio = (kl + log_term) / (2 * BOUND)
        return ((loss + ratio).sqrt() + ratio.sqrt()) ** 2
    if form == "f-classic":
        return loss + ((kl + log_term) / (2 * BOUND)).sqrt()
    first = loss / (1 - lambda_ / 2)
    return first + (kl + log_term) / (BOUND * lambda_ * (1 - lambda_ / 2))


def bound_by_autograd(form: str, bnn: bf.BayesianModule) -> tuple[Tensor, Tensor]:
    """f of the first minibatch under the first noise of training, and its derivative in L."""
    x, y = minibatch()
    outputs, _ = bnn.sample_outputs(x, NoiseKey(bnn.seed, Stream.TRAINING, 0), range(1))
    picked = outputs[0].softmax(-1)[torch.arange(len(y)), y]
    loss = -picked.clamp(min=P_MIN).log().mean() / math.log(1 / P_MIN)
    kl = bf.kl_divergence(bnn.posterior, bnn.weight_prior, prior_mean=bnn.prior_mean)
    value = written_out(form, loss, kl)
    [slope] = torch.autograd.grad(value, loss, retain_graph=True)
    return value, slope


@pytest.mark.parametrize("form", FORMS)
def test_a_step_follows_the_gradient_of_the_bound(form: str) -> None:
    bnn, other = moved(), moved()
    own = objective(bnn, form, fused=False)
    own(*minibatch()).loss.backward()
    value, slope = bound_by_autograd(form, other)
    value.backward()
    for name in ("mean", "rho"):
        found, reference = (getattr(each.posterior, name).grad for each in (bnn, other))
        wanted = reference / slope * math.log(1 / P_MIN)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
        # Planted faults: the ELBO's factor, and n = N instead of the examples of the bound.
        for fault in (
            bf.ELBO(moved(), num_data=N, fused=False),
            objective(moved(), form, num_bound=N, fused=False),
        ):
            fault(*minibatch()).loss.backward()
            wrong = getattr(fault.bnn.posterior, name).grad
            assert not torch.allclose(wrong, wanted, rtol=1e-3)
    assert own.bound() == pytest.approx(value.item(), rel=1e-9)


def test_the_least_f_lambda_is_f_quad() -> None:
    for loss, r in ((0.02, 0.001), (0.3, 0.2), (0.0, 0.01)):
        least = best_lambda(loss, r)
        quad = risk_bound(loss, r, "f-quad")
        assert risk_bound(loss, r, "f-lambda", least) == pytest.approx(quad, rel=1e-12)
        for other in (0.5 * least, min(1.9, 1.3 * least)):
            assert risk_bound(loss, r, "f-lambda", other) > quad


def trained(
    form: str,
    backend: BackendName,
    *,
    steps: int = 45,
    dtype: torch.dtype = torch.float64,
    num_samples: int = 1,
) -> bf.PACBayesObjective:
    bnn = moved().to(dtype)
    own = objective(bnn, form, num_samples=num_samples)
    optimizer = torch.optim.SGD(own.parameters(), lr=1e-3, momentum=0.9)
    step = bf.make_step(own, optimizer, backend=backend)
    x, y = minibatch(60)
    for index in range(steps):
        some = slice(20 * (index % 3), 20 * (index % 3 + 1))
        step(x[some].to(dtype), y[some])
    return own


@pytest.mark.parametrize("num_samples", [1, 4])
@pytest.mark.parametrize("form", FORMS)
def test_the_closed_forms_make_the_steps_of_autograd(form: str, num_samples: int) -> None:
    found, wanted = (
        trained(form, backend, num_samples=num_samples) for backend in ("closed-form", "autograd")
    )
    assert found.running == pytest.approx(wanted.running, rel=1e-9)
    for name in ("mean", "rho"):
        parts = (getattr(each.bnn.posterior, name) for each in (found, wanted))
        torch.testing.assert_close(*parts, rtol=1e-9, atol=1e-12)
    if form == "f-lambda":
        assert found.running["lambda"] < 1.0  # chosen anew after an epoch


def test_the_compiled_backend_lowers_the_bound() -> None:
    for form in FORMS:
        assert trained(form, "auto", steps=400).bound() < trained(form, "auto", steps=1).bound()


def test_the_cross_entropy_is_bounded() -> None:
    bnn = at_prior(nn.Linear(4, 3))
    outputs = torch.tensor([[[0.0, 0.0, 1e4], [0.0, 0.0, 0.0]]])
    found = objective(bnn, "f-quad").nll(outputs, torch.tensor([0, 1]))
    assert float(found) == pytest.approx(0.5 * (math.log(1 / P_MIN) + math.log(3)), rel=1e-6)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    x, y = minibatch(60)

    def fitted(folder: Path | None, epochs: Sequence[int], form: str) -> Tensor:
        for number in epochs:
            own = objective(moved(), form)
            with warnings.catch_warnings(action="ignore"):
                bf.fit(
                    own,
                    TensorLoader(x, y, 20),
                    epochs=number,
                    optimizer=partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
                    checkpoint_dir=folder,
                    resume=True,
                    progress=False,
                )
        return own.bnn.posterior.mean.detach()

    for form in FORMS:
        whole = fitted(None, [9], form)
        assert torch.equal(fitted(tmp_path / form, [4, 9], form), whole)
    own = objective(moved(), "f-classic")
    sgd = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
    loader = TensorLoader(x, y, 20)
    with pytest.raises(bf.io.StorageError, match="form is f-classic here and f-lambda there"):
        bf.fit(own, loader, epochs=9, optimizer=sgd, checkpoint_dir=tmp_path / form, resume=True)


def test_what_cannot_be_certified_is_named() -> None:
    net = nn.Linear(4, 3)
    shifted = moved()
    shifted.posterior.mask = torch.ones_like(shifted.posterior.mean, dtype=torch.bool)
    cases: list[tuple[bf.BayesianModule, str]] = [
        (bf.BayesianModule(net, posterior=bf.Delta), "needs a posterior with a KL"),
        (bf.BayesianModule(net, prior=bf.EmpiricalGaussian(min_size=1)), "learned from them"),
        (bf.BayesianModule(net, prior=bf.ScaleMixture()), "needs the exact KL"),
        (at_prior(net, likelihood=bf.GaussianLikelihood()), "error of a classifier"),
        (shifted, "before it is pruned"),
        (at_prior(net, exclude=["bias"]), "bias would be trained too"),
        (
            at_prior(nn.Sequential(net, nn.BatchNorm1d(3, affine=False))),
            "statistics that training collects",
        ),
    ]
    for bnn, message in cases:
        with pytest.raises(ValueError, match=message):
            objective(bnn, "f-quad")
        with pytest.raises(ValueError, match=message):
            bf.certify(bnn, torch.zeros(20, 4), torch.zeros(20).long(), prior_indices=())
    frozen = nn.Linear(4, 3)
    frozen.bias.requires_grad_(False)
    objective(at_prior(frozen), "f-quad")


def test_arguments_are_checked() -> None:
    bnn = moved()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"form": "quad"}, 'form must be one of "f-quad", "f-classic", "f-lambda"'),
        ({"form": "f-quad", "num_bound": 61}, "num_bound must be from 8 to num_data 60, got 61"),
        ({"form": "f-quad", "num_data": 7}, "num_data must be at least 8, got 7"),
        ({"form": "f-quad", "num_bound": 7}, "num_bound must be from 8 to num_data 60, got 7"),
        ({"form": "f-quad", "delta": 0.0}, "delta must be above 0 and below 1, got 0.0"),
        ({"form": "f-quad", "p_min": 1.0}, "p_min must be above 0 and below 1, got 1.0"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            objective(bnn, **options)
    some = [objective(moved(), "f-quad") for _ in range(2)]
    loader = TensorLoader(*minibatch(60), 20)
    with pytest.raises(ValueError, match="the objective is a PACBayesObjective"):
        bf.fit_replicas(some, loader, epochs=1)


def test_a_learned_prior_sees_its_part_only_and_has_no_dropout() -> None:
    seen = bf.split_for_prior(60, 0.5, seed=3)
    assert len(seen.unique()) == 30
    assert not torch.equal(seen, bf.split_for_prior(60, 0.5, seed=4))
    x, y = minibatch(60)
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)).double()
    before = net[1].weight.detach().clone()
    loader = TensorLoader(x[seen], y[seen], 10)
    found = bf.learn_prior_mean(net, loader, num_data=30, epochs=3, progress=False)
    assert torch.equal(net[1].weight, before)
    assert not torch.equal(found[1].weight, before)
    assert (net[0].p, found[0].p) == (0.5, 0.0)
    for fraction in (0.0, 1.0, 0.001):
        with pytest.raises(ValueError, match="examples on both sides"):
            bf.split_for_prior(60, fraction)
    with pytest.raises(TypeError, match=r"num_data must be a whole number, got 2\.5"):
        bf.split_for_prior(2.5, 0.5)  # type: ignore[arg-type]


def test_a_learned_prior_is_trained_at_the_rate_that_is_asked_for() -> None:
    x, y = minibatch(60)
    net = nn.Linear(4, 3).double()
    found = [
        bf.learn_prior_mean(
            net, TensorLoader(x, y, 60), num_data=60, epochs=1, lr=lr, progress=False
        ).weight
        for lr in (0.01, 0.2)
    ]
    # The first step of Adam is as long as its rate.
    assert [round(float((w - net.weight).detach().abs().max()), 4) for w in found] == [0.01, 0.2]


def test_a_learned_prior_of_a_network_whose_result_holds_the_logits() -> None:
    class Named(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return {"logits": super().forward(x), "states": x}

    x, y = minibatch(60)
    net = Named(4, 3).double()
    loader = TensorLoader(x, y, 20)
    found = bf.learn_prior_mean(net, loader, num_data=60, epochs=2, output="logits", progress=False)
    assert not torch.equal(found.weight, net.weight)


@pytest.mark.parametrize("form", FORMS)
def test_it_has_a_value_before_the_first_step(form: str) -> None:
    with torch.no_grad():
        before = objective(moved(), form)(*minibatch())
    with_gradient = objective(moved(), form)(*minibatch())
    assert float(before.loss) == pytest.approx(float(with_gradient.loss.detach()), rel=1e-12)
    assert math.isfinite(before.kl_factor)


def test_its_state_holds_the_running_values() -> None:
    made = objective(moved(), "f-lambda")
    for _ in range(7):
        made(*minibatch()).loss.backward()
    again = objective(moved(1), "f-lambda")
    again.load_state_dict(made.state_dict())
    assert (again.step, again.running) == (7, made.running)
    assert again.kl_factor(20) == made.kl_factor(20)
    older = made.state_dict()
    older["_extra_state"] = torch.tensor(3)  # of the step alone
    again.load_state_dict(older)
    assert again.step == 3


class Same(bf.ELBO):
    """An objective with an nll of its own, which is the likelihood's."""

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().nll(outputs, targets)


def test_its_history_has_no_free_energy() -> None:
    """-log max(p, p_min) is no log probability: the classes' shares add up to more than 1."""
    own_nll = bf.fit(Same(moved(), num_data=N), [minibatch(N)], epochs=1, progress=False)
    assert own_nll[-1]["free_energy"] is not None
    own = objective(moved(), "f-quad", p_min=0.3)
    history = bf.fit(own, [minibatch(N)], epochs=1, progress=False)
    assert history[-1]["free_energy"] is None
    assert history[-1]["free_energy_untrained"] is None
