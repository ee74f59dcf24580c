"""IVON as an optimiser like any other: in fit, in loops, resumed, copied, together with Adam."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.backend_cases import needs_compiler
from tests.cases import normals
from tests.loops import loop_over
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR

from bayesify import (
    ELBO,
    IVON,
    BayesianModule,
    Gaussian,
    MeanFieldGaussian,
    fit,
    fit_replicas,
    last_layer,
    load,
    prune,
    save,
    snr,
)
from bayesify.datasets import TensorLoader
from bayesify.training.backends import (
    AutogradBackend,
    BackendName,
    ClosedFormBackend,
    CompiledBackend,
    StepOptions,
)
from bayesify.training.history import EpochRow
from bayesify.training.optimizers import separate_rho
from bayesify.training.progress import Callback

pytestmark = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")


def classes() -> TensorLoader:
    x = normals(96, 3, seed=1).float()
    return TensorLoader(x, (x[:, 0] > 0.0).long(), 16, seed=0)


def number(row: Mapping[str, float | None], name: str) -> float:
    found = row[name]
    assert found is not None
    return found


def classifier(seed: int = 0, **options: Any) -> BayesianModule:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
    return BayesianModule(net, seed=seed, **options)


@pytest.mark.parametrize("backend", ["auto", "closed-form", "autograd"])
def test_a_resumed_run_is_the_uninterrupted_one(backend: BackendName, tmp_path: Path) -> None:
    def run(folder: str, *epochs: int) -> tuple[ELBO, IVON]:
        for count in epochs:
            elbo = ELBO(classifier(), num_data=96)
            optimizer = IVON(elbo, lr=0.02, betas=(0.9, 0.99))
            fit(
                elbo, classes(), epochs=count, optimizer=optimizer, backend=backend,
                checkpoint_dir=tmp_path / folder, resume=True,
            )  # fmt: skip
        return elbo, optimizer

    (whole, one), (resumed, other) = run("whole", 3), run("parts", 1, 2, 3)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(torch.as_tensor(tensor), torch.as_tensor(resumed.state_dict()[name]))
    for first, second in zip(one.state_of(), other.state_of(), strict=True):
        assert torch.equal(first, second)
    # It is the state that does it.
    fresh = IVON(whole, h0=None).state_of()
    assert not torch.equal(fresh[0], one.state_of()[0])


@loop_over("backend", ["auto", "closed-form", "autograd"])
def test_fit_learns_and_leaves_an_ordinary_posterior(backend: BackendName, tmp_path: Path) -> None:
    elbo = ELBO(classifier(), num_data=96)
    optimizer = IVON(elbo, lr=0.02, betas=(0.9, 0.99))
    rows = fit(elbo, classes(), epochs=30, optimizer=optimizer, backend=backend)  # type: ignore[arg-type]
    first, last = rows[0], rows[-1]
    assert number(last, "nll") < number(first, "nll") - 0.2
    assert number(last, "free_energy") < 0.68
    assert last["std_residual"] is not None
    q = elbo.bnn.posterior
    assert type(q) is MeanFieldGaussian
    precision = optimizer.ess * (optimizer.state_of()[1] + optimizer.delta)
    assert torch.allclose(q.std, precision.rsqrt(), rtol=1e-5)
    save(elbo.bnn, tmp_path / "model.safetensors")
    loaded = load(tmp_path / "model.safetensors", classifier().to_module())
    assert torch.equal(loaded.posterior.std, q.std)
    small = prune(elbo.bnn, fraction=0.5)
    assert int((snr(small) > 0).sum()) == q.num_weights // 2
    again = ELBO(small, num_data=96)
    fit(again, classes(), epochs=1, optimizer=IVON(again, h0=None))
    assert int((snr(small) > 0).sum()) == q.num_weights // 2


@pytest.mark.parametrize(
    "make",
    [
        AutogradBackend,
        ClosedFormBackend,
        pytest.param(CompiledBackend, marks=needs_compiler),
        partial(CompiledBackend, compiled=False),
    ],
)
def test_pruned_weights_are_not_drawn_to_the_mean_of_their_prior(make: Any) -> None:
    bnn = classifier(prior=Gaussian(0.5), prior_mean="initial")
    elbo = ELBO(prune(bnn, 0.5), num_data=96)
    backend = make(elbo, IVON(elbo, lr=0.1))
    for x, y in classes():
        backend.step(x, y, StepOptions(batch_index=0))
    mean, mask = elbo.bnn.posterior.mean, elbo.bnn.posterior.mask
    assert mask is not None
    assert not mean[~mask].any()
    assert not torch.isclose(mean[mask], bnn.posterior.mean[mask]).all()


def test_only_what_is_random_is_moved_by_ivon_and_the_rest_by_adam() -> None:
    bnn = classifier(include=("3.*",))
    elbo = ELBO(bnn, num_data=96)
    optimizer = IVON(elbo, deterministic_lr=0.01)
    others = [p for name, p in elbo.named_parameters() if "posterior" not in name]
    assert len(others) == 4
    copies = [nn.Parameter(p.detach().clone()) for p in others]
    adam = torch.optim.Adam(copies, lr=0.01)
    for x, y in classes():
        optimizer.zero_grad()
        elbo(x, y).loss.backward()
        for parameter, copied in zip(others, copies, strict=True):
            assert parameter.grad is not None
            copied.grad = parameter.grad.clone()
        optimizer.step()
        adam.step()
    for parameter, copied in zip(others, copies, strict=True):
        assert torch.equal(parameter, copied)


def test_numbers_of_half_precision_without_a_gradient_stay() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)).half()
    elbo = ELBO(BayesianModule(net, include=("1.*",), prior=Gaussian(0.3)), num_data=6)
    x, y = torch.ones(6, 4).half(), torch.arange(6) % 3
    x[:, 0] = 0.0  # its weights have no gradient
    optimizer = IVON(elbo, deterministic_lr=0.01)
    weight = elbo.bnn.net[0].weight  # type: ignore[index]
    before = weight.detach().clone()
    elbo(x, y).loss.backward()
    optimizer.step()
    assert torch.equal(weight[:, 0], before[:, 0])
    assert torch.isfinite(weight).all()
    assert not torch.equal(weight[:, 1:], before[:, 1:])


def test_a_last_layer_is_trained_over_a_frozen_network() -> None:
    net = classifier().to_module()
    for parameter in net[:3].parameters():
        parameter.requires_grad_(requires_grad=False)
    bnn = BayesianModule(net, include=last_layer(net))
    elbo = ELBO(bnn, num_data=96)
    before = bnn.posterior.mean.detach().clone()
    rows = fit(elbo, classes(), epochs=20, optimizer=IVON(elbo, lr=0.02, betas=(0.9, 0.99)))
    assert number(rows[-1], "nll") < number(rows[0], "nll")
    assert float((bnn.posterior.mean.detach() - before).abs().max()) > 0.05


def test_a_closure_and_a_schedule_work_as_ever() -> None:
    elbo = ELBO(classifier(), num_data=96)
    optimizer = IVON(elbo, lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    x, y = next(iter(classes()))

    def closure() -> float:
        optimizer.zero_grad()
        loss = elbo(x, y).loss
        loss.backward()
        return float(loss.detach())

    assert math.isfinite(optimizer.step(closure))
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.0005]


@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR"])
def test_schedules_that_cycle_the_momentum(name: str) -> None:
    def schedule(optimizer: Optimizer, steps: int) -> LRScheduler:
        if name == "OneCycleLR":
            return OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return CyclicLR(optimizer, base_lr=0.01, max_lr=0.1, step_size_up=4)

    elbo = ELBO(classifier(), num_data=96)
    optimizer = IVON(elbo, lr=0.1)
    rows = fit(elbo, classes(), epochs=3, optimizer=optimizer, scheduler=schedule)
    assert number(rows[-1], "nll") < number(rows[0], "nll")
    beta1, beta2 = optimizer.param_groups[0]["betas"]
    assert beta1 != 0.9
    assert beta2 == 0.999


def test_a_layer_that_thaws_is_trained() -> None:
    bnn = classifier(include=["3.*"])
    first = bnn.net[0].weight.requires_grad_(requires_grad=False)
    elbo, before = ELBO(bnn, num_data=96), first.detach().clone()
    optimizer = IVON(elbo, lr=0.02)

    class Thaw(Callback):
        def on_epoch(self, row: EpochRow) -> None:
            if row["epoch"] == 1:
                assert torch.equal(first, before)
                optimizer.add_param_group({"params": first.requires_grad_()})

    fit(elbo, classes(), epochs=2, optimizer=optimizer, callback=Thaw())
    assert optimizer.param_groups[-1]["lr"] == 1e-3
    assert not torch.equal(first, before)


def test_rho_may_have_a_group_of_its_own() -> None:
    def trained(*, separate: bool) -> Tensor:
        elbo = ELBO(classifier(), num_data=96)
        optimizer = IVON(elbo, lr=0.02)
        if separate:
            separate_rho(optimizer, elbo)
        for x, y in classes():
            optimizer.zero_grad()
            elbo(x, y).loss.backward()
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in elbo.parameters()])

    assert torch.equal(trained(separate=True), trained(separate=False))


def test_a_copy_trains_the_copied_objective() -> None:
    elbo = ELBO(classifier(), num_data=96)
    optimizer = IVON(elbo, lr=0.02)
    copied, other = deepcopy((elbo, optimizer))
    assert other.elbo is copied
    for x, y in classes():
        for objective, each in ((elbo, optimizer), (copied, other)):
            each.zero_grad()
            objective(x, y).loss.backward()
            each.step()
    assert torch.equal(elbo.bnn.posterior.mean, copied.bnn.posterior.mean)


def test_networks_that_are_trained_at_once_are_those_trained_alone() -> None:
    def objectives() -> list[ELBO]:
        return [ELBO(classifier(seed), num_data=96) for seed in (1, 2)]

    def made(elbo: ELBO) -> IVON:
        return IVON(elbo, lr=0.02, betas=(0.9, 0.99))

    together, alone = objectives(), objectives()
    factories = [lambda _, elbo=elbo: made(elbo) for elbo in together]
    fit_replicas(together, classes(), epochs=2, optimizer=factories)
    for one, other in zip(together, alone, strict=True):
        fit(other, classes(), epochs=2, optimizer=made(other))
        means = one.bnn.posterior.mean.detach(), other.bnn.posterior.mean.detach()
        stds = one.bnn.posterior.std.detach(), other.bnn.posterior.std.detach()
        assert torch.allclose(*means, atol=1e-5)
        assert torch.allclose(*stds, rtol=1e-4)


def test_a_state_dict_brings_the_state_back() -> None:
    def train(elbo: ELBO, optimizer: IVON, steps: int) -> None:
        x, y = next(iter(classes()))
        for _ in range(steps):
            optimizer.zero_grad()
            elbo(x, y).loss.backward()
            optimizer.step()

    whole = ELBO(classifier(), num_data=96)
    optimizer = IVON(whole, lr=0.02)
    train(whole, optimizer, 5)
    stored = {k: v.clone() for k, v in whole.state_dict().items()}, deepcopy(optimizer.state_dict())
    resumed = ELBO(classifier(), num_data=96)
    other = IVON(resumed, lr=0.5)
    resumed.load_state_dict(stored[0])
    other.load_state_dict(stored[1])
    assert other.param_groups[0]["lr"] == 0.02
    train(whole, optimizer, 5)
    train(resumed, other, 5)
    assert torch.equal(whole.bnn.posterior.mean, resumed.bnn.posterior.mean)
    assert torch.equal(whole.bnn.posterior.std, resumed.bnn.posterior.std)


def test_a_loop_of_ones_own_resumes_in_the_usual_order() -> None:
    """The network, the optimiser, then its state: the constructor sets rho to that of h0."""
    x, y = next(iter(classes()))

    def steps(elbo: ELBO, optimizer: IVON, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            elbo(x, y).loss.backward()
            optimizer.step()

    whole = ELBO(classifier(), num_data=96, fused=False)
    optimizer = IVON(whole, lr=0.02, betas=(0.9, 0.99))
    steps(whole, optimizer, 50)
    stored = deepcopy((whole.state_dict(), optimizer.state_dict()))
    std = whole.bnn.posterior.std.detach().clone()
    steps(whole, optimizer, 10)
    resumed = ELBO(classifier(), num_data=96, fused=False)
    resumed.load_state_dict(stored[0])
    other = IVON(resumed, lr=0.02, betas=(0.9, 0.99))
    assert not torch.allclose(resumed.bnn.posterior.std, std, rtol=0.1)
    other.load_state_dict(stored[1])
    assert torch.equal(resumed.bnn.posterior.std, std)
    steps(resumed, other, 10)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(torch.as_tensor(tensor), torch.as_tensor(resumed.state_dict()[name]))
