"""The fused and the plain step are the objective by autograd, to rounding, over fifty steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.backend_cases import (
    BATCH,
    BATCHES,
    CLASSES,
    INPUTS,
    OPTIMIZERS,
    PRIORS,
    STEPS,
    Task,
    distance,
    each_compiled_kind,
    each_kind,
    needs_compiler,
    specified,
    trained,
)
from tests.cases import normals as numbers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam

from bayesify import (
    ByGroup,
    Flipout,
    Gaussian,
    GaussianLikelihood,
    Laplace,
    LocalReparameterization,
    Prior,
    ScaleMixture,
)
from bayesify.distributions.softplus import inverse_softplus
from bayesify.training.kernel.native import NativeKernel
from bayesify.training.kernel.tensors import TensorKernel

#: Relative L2 norm of the parameters after fifty steps.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


def check_agreement(kind: str, task: Task, *, kl: bool = True) -> None:
    expected, found = specified(task, counter=kind != "closed-form"), trained(kind, task)
    tolerance = TOLERANCE[task.dtype]
    away = distance(found.state, expected.state)
    # Written so that NaN fails too.
    assert away <= tolerance, f"{kind} is {away:.1e} away from autograd"
    assert found.nll == pytest.approx(expected.nll, rel=10 * tolerance)
    largest = max(abs(each) for step in expected.residual for each in step)
    for found_step, expected_step in zip(found.residual, expected.residual, strict=True):
        assert sum(found_step) == pytest.approx(sum(expected_step), abs=tolerance * largest)
        if task.dtype == torch.float64:  # in float32 a weight may be on the border of a group
            assert found_step == pytest.approx(expected_step, abs=tolerance * largest)
    if kl:
        assert found.kl == pytest.approx(expected.kl, rel=tolerance)


each_optimizer = pytest.mark.parametrize(
    "optimizer",
    [name if name == "adam" else pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS],
)


@each_kind
@each_optimizer
@pytest.mark.parametrize("prior", PRIORS)
def test_fifty_steps_agree(kind: str, prior: str, optimizer: str) -> None:
    check_agreement(kind, Task(prior, optimizer))


@needs_compiler
@each_optimizer
@pytest.mark.parametrize("prior", PRIORS)
def test_fifty_steps_of_the_kernel_agree_in_float32(prior: str, optimizer: str) -> None:
    check_agreement("kernel", Task(prior, optimizer, torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensors", "closed-form"])
@pytest.mark.parametrize("prior", PRIORS)
def test_fifty_steps_of_the_others_agree_in_float32(kind: str, prior: str) -> None:
    # The optimiser that is the most sensitive to rounding; the others have its gradients.
    check_agreement(kind, Task(prior, "adam", torch.float32))


@pytest.mark.parametrize("prior", PRIORS)
@each_optimizer
def test_the_kl_matters_in_these_fifty_steps(prior: str, optimizer: str) -> None:
    task = Task(prior, optimizer)
    without = specified(replace(task, elbo=(("temperature", 0.0),)), counter=True)
    assert distance(without.state, specified(task, counter=True).state) > 1e-3


# -------------------------------------------------------------------------------- other networks


class Convolutions(nn.Module):
    """One weight in two places, normalisation whose affine parameters are not random."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 1, 2), nn.Conv2d(1, 1, 2)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm2d(1, momentum=0.3)
        self.last = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x.view(-1, 1, 4, 5)))
        return self.last(torch.tanh(self.second(x)).flatten(1).repeat(1, 2)[:, :6])


class Words(nn.Module):
    """An embedding whose padding is no weight, and a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 8, padding_idx=0)
        self.idle = nn.Linear(3, 3)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.table(tokens).mean(1))


class Odd(nn.Module):
    """Parameters of one element and of none, one that is not contiguous, gradients that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.across = nn.Parameter((0.1 * numbers(7, INPUTS)).t())
        self.last = nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.softplus(x @ self.across) * self.scale) + self.nothing.sum()


class Slopes(nn.Module):
    """A backward pass of its own within each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(INPUTS, 7), nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        inner = x.detach().requires_grad_()
        with torch.enable_grad():
            self.first(inner).tanh().sum().backward(retain_graph=True)
        assert inner.grad is not None
        return self.last(torch.tanh(self.first(x + inner.grad)))


def tokens(_: torch.dtype) -> Tensor:
    return torch.arange(STEPS * BATCH * 4).view(-1, 4) * 11 % 30


def reals() -> Tensor:
    return numbers(STEPS * BATCH, CLASSES, seed=2)


def options(**given: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(given.items())


def by_group(kind: Callable[[float], Prior]) -> ByGroup:
    """Blocks that begin and end within blocks of the kernel."""
    return ByGroup({"0.weight": kind(0.3), "2.weight": kind(0.05), "*": kind(1.0)})


def mixed(std: float) -> ScaleMixture:
    return ScaleMixture(pi=min(0.4, std), std1=2.0 * std, std2=0.3 * std)


LOCAL, FLIPOUT = (options(estimator=each) for each in (LocalReparameterization(), Flipout()))
LOCAL_PAIR = options(estimator=LocalReparameterization(antithetic=True))
ADAM = partial(Adam, lr=1e-2, betas=(0.8, 0.98), eps=1e-6, fused=True)
TASKS = {
    "prior mean": Task("laplace", bnn=options(prior_mean="initial")),
    "prior mean, mixture": Task(
        "scale-mixture-wide", "sgd", bnn=options(prior_mean=0.1 * numbers(863, seed=4))
    ),
    "pruned": Task("laplace", pruned=0.6),
    "pruned, mixture": Task("scale-mixture-wide", "momentum", pruned=0.6),
    "warm-up": Task(
        "gaussian", kl_scale=lambda step: min(1.0, step / 12), elbo=options(temperature=0.5)
    ),
    "geometric": Task(
        "laplace", "sgd", elbo=options(kl_weighting="geometric", num_batches=BATCHES)
    ),
    "local": Task("gaussian", bnn=LOCAL),
    "local, laplace": Task("laplace", "sgd", bnn=LOCAL),
    "local, pair": Task("laplace", bnn=LOCAL_PAIR, elbo=options(num_samples=2)),
    "local, mixture": Task("scale-mixture-wide", bnn=LOCAL),
    "flipout": Task("gaussian", "momentum", bnn=FLIPOUT),
    "flipout, mixture": Task("scale-mixture-wide", "sgd", bnn=FLIPOUT),
    "convolutions": Task("scale-mixture-wide", "momentum", net=Convolutions),
    "convolutions, local": Task("laplace", net=Convolutions, bnn=LOCAL),
    "words": Task("gaussian", "sgd", net=Words, inputs=tokens),
    "odd parameters": Task("scale-mixture-wide", ADAM, net=Odd),
    "slopes": Task("gaussian", "sgd", net=Slopes),
    "slopes, local": Task("gaussian", "sgd", net=Slopes, bnn=LOCAL),
    "by group": Task("gaussian", bnn=options(prior=by_group(Gaussian))),
    "by group, laplace": Task("laplace", "sgd", bnn=options(prior=by_group(Laplace))),
    "two groups": Task(
        "gaussian", bnn=options(prior=ByGroup({"0.*": Gaussian(0.1), "*": Gaussian(0.7)}))
    ),
    "by group, mixture": Task("scale-mixture-wide", "momentum", bnn=options(prior=by_group(mixed))),
    "by group, pruned": Task("laplace", bnn=options(prior=by_group(Laplace)), pruned=0.6),
    "by group, pair": Task(
        "gaussian",
        bnn=options(prior=by_group(mixed), prior_mean="initial"),
        elbo=options(num_samples=2),
    ),
    "by group, local": Task("gaussian", bnn=(*LOCAL, *options(prior=by_group(Gaussian)))),
    "learned noise": Task(
        "gaussian", targets=reals, bnn=options(likelihood=GaussianLikelihood(0.7, learn_std=True))
    ),
    "ivon": Task("gaussian", "ivon"),
    "ivon, by group, pruned": Task(
        "gaussian", "ivon", bnn=options(prior=by_group(Gaussian)), pruned=0.6
    ),
    "ivon, prior mean, pair": Task(
        "gaussian", "ivon", bnn=options(prior_mean="initial"), elbo=options(num_samples=2)
    ),
    "ivon, warm-up": Task(
        "gaussian", "ivon", kl_scale=lambda step: min(1.0, step / 12), elbo=options(temperature=0.5)
    ),
    "ivon, local": Task("gaussian", "ivon", bnn=LOCAL),
    "ivon, words": Task("gaussian", "ivon", net=Words, inputs=tokens),
    "ivon, learned noise": Task(
        "gaussian",
        "ivon",
        targets=reals,
        bnn=options(likelihood=GaussianLikelihood(0.7, learn_std=True)),
    ),
}


@each_kind
@pytest.mark.parametrize("name", TASKS)
def test_other_networks_and_objectives_agree(kind: str, name: str) -> None:
    # Where there is no one weight vector, the KL's value is an estimate by noise of its own.
    own = kind != "closed-form" and name in ("local, mixture", "flipout, mixture")
    check_agreement(kind, replace(TASKS[name], steps=20), kl=not own)


@each_kind
@pytest.mark.parametrize("largest", [0.49, 2.0])
def test_stds_of_every_size_agree_in_float32(kind: str, largest: float) -> None:
    # The kernel computes rho from the precision by formulas of its own, in two ranges of std.
    stds = torch.logspace(-4, math.log10(largest), 863)
    task = Task(
        "gaussian",
        "ivon",
        torch.float32,
        bnn=options(init_std=stds, prior=Gaussian(30.0)),
        inputs=lambda dtype: 1e-3 * numbers(STEPS * BATCH, INPUTS, seed=1).to(dtype),
        steps=1,  # such wide weights move chaotically
    )
    expected, found = specified(task, counter=kind != "closed-form"), trained(kind, task)
    start = inverse_softplus(stds)
    rho = expected.state["posterior.rho"]
    away = (found.state["posterior.rho"] - rho).abs() / (1.0 + rho.abs())
    assert float(away.max()) < 1e-6
    assert float((rho - start).abs().max()) > 1e-3


@each_kind
def test_fifty_steps_of_ivon_agree_in_float32(kind: str) -> None:
    task = Task("gaussian", "ivon", torch.float32)
    expected, found = specified(task, counter=kind != "closed-form"), trained(kind, task)
    for name in ("posterior.mean", "posterior.rho"):
        assert float((found.state[name] - expected.state[name]).abs().max()) < 1e-6


def test_what_else_is_trained_is_trained() -> None:
    for name, parameter in (("convolutions", "net.norm.weight"), ("learned noise", "likelihood")):
        before = TASKS[name].objective().bnn.state_dict()
        after = specified(replace(TASKS[name], steps=20), counter=True).state
        (key,) = (key for key in after if key.startswith(parameter))
        assert float((after[key] - before[key]).abs().min()) > 1e-3


# ------------------------------------------------------------------------------- planted faults

Update = Callable[..., float]


def wrong_noise(update: Update, self: Any, *gradients: Any, step: int, **k: Any) -> float:
    return update(self, *gradients, step=step + 1, **k)


def wrong_kl_factor(update: Update, *args: Any, kl_factor: float, **k: Any) -> float:
    return update(*args, kl_factor=1.05 * kl_factor, **k)


def shifted_gradients(
    update: Update, self: Any, in_mean: Sequence[Tensor], *args: Any, **k: Any
) -> float:
    """As if every parameter began one place further on."""
    flat = torch.cat([part.reshape(-1) for part in in_mean]).roll(1)
    moved = flat.split([part.numel() for part in in_mean])
    return update(self, moved, *args, **k)


def forgotten_gradient(
    update: Update, self: Any, in_mean: Sequence[Tensor], *args: Any, **k: Any
) -> float:
    return update(self, [*in_mean[:-1], None], *args, **k)


def uncorrected_adam(update: Update, *args: Any, rates: Any, **k: Any) -> float:
    wrong = tuple(each._replace(correction1=1.0, correction2=1.0) for each in rates)
    return update(*args, rates=wrong, **k)


def one_rate_for_both(update: Update, *args: Any, rates: Any, **k: Any) -> float:
    return update(*args, rates=(rates[0], rates[0]), **k)


def slower_second_moment(update: Update, *args: Any, rates: Any, **k: Any) -> float:
    wrong = tuple(each._replace(beta2=0.998) for each in rates)
    return update(*args, rates=wrong, **k)


FAULTS = [
    wrong_noise,
    wrong_kl_factor,
    shifted_gradients,
    forgotten_gradient,
    uncorrected_adam,
    one_rate_for_both,
    slower_second_moment,
]


@each_compiled_kind
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "float64"])
def test_a_planted_fault_is_caught(
    kind: str, dtype: torch.dtype, fault: Callable[..., float], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = NativeKernel if kind == "kernel" else TensorKernel
    right = kernel.update
    monkeypatch.setattr(kernel, "update", lambda *args, **k: fault(right, *args, **k))
    with pytest.raises(AssertionError, match="away from autograd"):
        check_agreement(kind, Task("gaussian", "adam", dtype))
