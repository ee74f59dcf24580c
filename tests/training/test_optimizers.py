"""Every optimiser and every scheduler of torch trains a Bayesian network."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from tests.loops import loop_over
from tests.module.test_torch_features import N, data, flat, new_elbo, objective
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer, lr_scheduler, swa_utils

from bayesify import (
    ELBO,
    BayesianModule,
    GaussianLikelihood,
    LocalReparameterization,
    fit,
    parameter_groups,
)
from bayesify.datasets import TensorLoader
from bayesify.training.optimizers import separate_rho

pytestmark = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")

OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.05, momentum=0.9),
    "nesterov": partial(SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adam": partial(Adam, lr=0.02),
    "amsgrad": partial(Adam, lr=0.02, amsgrad=True),
    "fused-adam": partial(Adam, lr=0.02, fused=True),
    "adamw": partial(torch.optim.AdamW, lr=0.02),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "adadelta": torch.optim.Adadelta,
    "nadam": partial(torch.optim.NAdam, lr=0.02),
    "radam": partial(torch.optim.RAdam, lr=0.05),
    "adamax": partial(torch.optim.Adamax, lr=0.02),
    "asgd": partial(torch.optim.ASGD, lr=0.1),
    "rprop": torch.optim.Rprop,
    "adafactor": partial(torch.optim.Adafactor, lr=0.03),
}
# Rprop reads the signs of gradients, so it needs the whole data a step.
WHOLE = {"rprop"}


def test_weight_decay_leaves_rho_alone() -> None:
    elbo = new_elbo()
    posterior = elbo.bnn.posterior
    rho = posterior.get_parameter("rho")
    mean, before = posterior.mean.detach().clone(), rho.detach().clone()
    optimizer = torch.optim.AdamW(parameter_groups(elbo), lr=0.1, weight_decay=0.5)
    for parameter in elbo.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(rho, before)
    torch.testing.assert_close(posterior.mean.detach(), 0.95 * mean)
    assert not {id(p) for p in optimizer.param_groups[0]["params"]} & {id(rho)}


def regression() -> ELBO:
    likelihood = GaussianLikelihood(0.3, learn_std=True)
    return ELBO(BayesianModule(torch.nn.Linear(3, 1), likelihood=likelihood), num_data=8)


def test_weight_decay_leaves_a_learned_noise_alone() -> None:
    """Its rho is decayed to a std of .69 otherwise, as any other."""
    elbo = regression()
    noise = elbo.bnn.likelihood.get_parameter("rho")
    before = noise.detach().clone()
    of_all = torch.optim.AdamW(elbo.parameters(), lr=0.1, weight_decay=0.5)
    separate_rho(of_all, elbo, lr_scale=2.0)
    assert [group["lr"] for group in of_all.param_groups] == [0.1, 0.1, 0.2]
    assert [group["weight_decay"] for group in of_all.param_groups] == [0.5, 0.0, 0.0]
    grouped = torch.optim.AdamW(parameter_groups(elbo), lr=0.1, weight_decay=0.5)
    for optimizer in (of_all, grouped):
        for parameter in elbo.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        assert torch.equal(noise, before)
    loader = TensorLoader(torch.zeros(8, 3), torch.zeros(8, 1), 8)
    own = [elbo.bnn.posterior.mean, noise]
    rho = {"params": [elbo.bnn.posterior.get_parameter("rho")], "weight_decay": 0.0}
    decayed = torch.optim.AdamW([{"params": own}, rho])
    with pytest.raises(ValueError, match=r"decay of the likelihood's rho must be 0, got 0\.01"):
        fit(elbo, loader, epochs=1, optimizer=decayed)
    fit(elbo, loader, epochs=1, optimizer=partial(torch.optim.AdamW, lr=0.01), rho_lr_scale=2.0)


def test_fit_refuses_to_decay_rho() -> None:
    loader = TensorLoader(*data(), 16)
    for decayed in (
        lambda elbo: torch.optim.AdamW(elbo.parameters()),
        lambda elbo: SGD(elbo.parameters(), lr=0.1, weight_decay=1e-4),
        lambda _: lambda groups: Adam([p for g in groups for p in g["params"]], weight_decay=0.1),
    ):
        elbo = new_elbo()
        with pytest.raises(ValueError, match=r"decay of rho must be 0, got .*parameter_groups"):
            fit(elbo, loader, epochs=1, optimizer=decayed(elbo))
    elbo = new_elbo()
    fit(elbo, loader, epochs=1, optimizer=partial(torch.optim.AdamW, lr=0.01))
    fit(elbo, loader, epochs=1, optimizer=torch.optim.AdamW(parameter_groups(elbo), lr=0.01))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimisers_lower_the_loss(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    elbo = new_elbo()
    before, start = objective(elbo), flat(elbo)
    loader = TensorLoader(*data(), N if name in WHOLE else 16, seed=0)
    rows = fit(elbo, loader, epochs=15, optimizer=OPTIMIZERS[name])
    assert math.isfinite(rows[-1]["loss"] or math.nan)
    assert bool(flat(elbo).isfinite().all())
    # Chance: the loss of the network as it was, with other noise, differs by less.
    assert objective(elbo) < before - 0.15
    moved = (flat(elbo) - start).abs()
    mean, rho = moved.split(elbo.bnn.posterior.num_weights)
    assert float(mean.max()) > 0.01
    assert float(rho.max()) > 0.001


def test_every_optimiser_of_torch_is_tried() -> None:
    tried = {getattr(each, "func", each) for each in OPTIMIZERS.values()}
    known = {
        each for each in vars(torch.optim).values()
        if isinstance(each, type) and issubclass(each, Optimizer)
    }  # fmt: skip
    untried = {each.__name__ for each in known - tried}
    # With a closure; for matrices; for sparse gradients.
    assert untried - {"Optimizer", "LBFGS", "Muon", "SparseAdam"} == set()


def test_lbfgs_needs_the_same_noise_in_each_call_of_its_closure() -> None:
    def run(*, same_noise: bool) -> list[float]:
        elbo = new_elbo(LocalReparameterization())
        optimizer = torch.optim.LBFGS(elbo.parameters(), max_iter=5, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            if same_noise:
                elbo.step = 7
            optimizer.zero_grad()
            loss: Tensor = elbo(*data()).loss
            loss.backward()
            return loss

        return [float(optimizer.step(closure).detach()) for _ in range(8)]

    losses = run(same_noise=True)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.3
    # With other noise in each call the search stops early, since nothing seems to go down.
    assert losses[-1] < run(same_noise=False)[-1] - 0.1


STEPS = 60
SCHEDULERS: dict[str, Any] = {
    "LambdaLR": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.99**step),
    "MultiplicativeLR": partial(lr_scheduler.MultiplicativeLR, lr_lambda=lambda _: 0.99),
    "StepLR": partial(lr_scheduler.StepLR, step_size=20),
    "MultiStepLR": partial(lr_scheduler.MultiStepLR, milestones=[20, 40]),
    "ConstantLR": partial(lr_scheduler.ConstantLR, total_iters=20),
    "LinearLR": partial(lr_scheduler.LinearLR, total_iters=20),
    "ExponentialLR": partial(lr_scheduler.ExponentialLR, gamma=0.99),
    "PolynomialLR": partial(lr_scheduler.PolynomialLR, total_iters=STEPS),
    "CosineAnnealingLR": partial(lr_scheduler.CosineAnnealingLR, T_max=STEPS),
    "CosineAnnealingWarmRestarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=20),
    "CyclicLR": partial(lr_scheduler.CyclicLR, base_lr=0.001, max_lr=0.05),
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=0.05, total_steps=STEPS + 1),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.99)],
        [10],
    ),
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.99)]
    ),
    "SWALR": partial(swa_utils.SWALR, swa_lr=0.01),
}


class Rates:
    """A callback that notes the rate that every step had."""

    def __init__(self) -> None:
        self.optimizer: Optimizer | None = None
        self.rates: list[float] = []

    def make(self, groups: list[dict[str, Any]]) -> Optimizer:
        self.optimizer = Adam(groups, lr=0.05)
        return self.optimizer

    def on_start(self, **_: Any) -> None: ...

    def on_step(self, **_: Any) -> None:
        assert self.optimizer is not None
        self.rates.append(float(self.optimizer.param_groups[0]["lr"]))

    def on_epoch(self, row: Any) -> None: ...


@loop_over("name", SCHEDULERS)
def test_schedulers_step_with_the_minibatches(name: str) -> None:
    elbo, watch = new_elbo(), Rates()
    before = objective(elbo)
    loader = TensorLoader(*data(), 16, seed=0)
    fit(
        elbo, loader, epochs=STEPS // 4, optimizer=watch.make, callback=watch,
        scheduler=lambda optimizer, _: SCHEDULERS[name](optimizer),
    )  # fmt: skip
    alone = Adam([torch.zeros(1, requires_grad=True)], lr=0.05)
    alone.step()
    schedule = SCHEDULERS[name](alone)
    expected = []
    for _ in range(STEPS):
        alone.step()
        schedule.step()
        expected.append(float(alone.param_groups[0]["lr"]))
    assert watch.rates == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert len(set(expected)) > 1
    assert objective(elbo) < before - 0.1


def test_every_scheduler_of_torch_is_tried() -> None:
    known = {
        each.__name__ for each in vars(lr_scheduler).values()
        if isinstance(each, type) and issubclass(each, lr_scheduler.LRScheduler)
    }  # fmt: skip
    assert known - set(SCHEDULERS) <= {"LRScheduler", "_LRScheduler", "ReduceLROnPlateau"}


def test_a_scheduler_that_needs_a_metric_works_by_hand() -> None:
    elbo = new_elbo()
    optimizer = SGD(elbo.parameters(), lr=1e-6)
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
    for _ in range(8):
        optimizer.zero_grad()
        loss = elbo(*data()).loss
        loss.backward()
        optimizer.step()
        schedule.step(objective(elbo))
    assert schedule.get_last_lr()[0] < 1e-6
