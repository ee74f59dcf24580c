"""The reasons against the compiled backend, and that another backend then trains the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from tests.cases import mlp, normals
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from bayesify import (
    ELBO,
    BayesianModule,
    ByGroup,
    Delta,
    EmpiricalGaussian,
    Flipout,
    Gaussian,
    GroupedGaussian,
    Laplace,
    LocalReparameterization,
    LogUniform,
    SpikeAndSlab,
    StudentT,
    WeightSampling,
    fit,
    fit_replicas,
    parameter_groups,
    prune,
)
from bayesify.datasets import TensorLoader
from bayesify.training.backends import (
    CompiledBackend,
    StepOptions,
    make_backend,
    why_no_closed_forms,
    why_not_compiled,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning"),
    # torch's own, where it traces an autograd.Function.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
N, BATCH, EPOCHS = 22, 8, 2
X, Y = normals(N, 3, seed=1), torch.arange(N) % 4


@dataclass
class Notes:
    """A callback that keeps what it is told."""

    said: list[str] = field(default_factory=list)

    def on_start(self, **_: Any) -> None: ...

    def on_note(self, text: str) -> None:
        self.said.append(text)

    def on_step(self, **_: Any) -> None: ...

    def on_epoch(self, row: Any) -> None: ...


class OwnELBO(ELBO):
    """Perhaps another objective."""


class OwnModule(BayesianModule):
    """Perhaps another network."""


class OwnGaussian(Gaussian):
    """Perhaps another density."""


class Halved(WeightSampling):
    """Another estimator: half the noise."""

    def _noise(self, *args: Any) -> Tensor:
        return 0.5 * super()._noise(*args)


def narrow(elbo: ELBO) -> None:
    """Conversions leave the posterior in float32; an assignment of its data does not."""
    for parameter in elbo.bnn.posterior.parameters():
        parameter.data = parameter.data.bfloat16()


def strided(name: str, elbo: ELBO) -> None:
    """Replace a parameter by one of equal values that is not contiguous."""
    pairs = parameter(elbo, name).detach().unsqueeze(1).repeat(1, 2)
    setattr(elbo.bnn.posterior, name, torch.nn.Parameter(pairs[:, 0]))


def of_two_dtypes(elbo: ELBO) -> None:
    elbo.bnn.posterior.rho = torch.nn.Parameter(parameter(elbo, "rho").detach().float())


def nothing(*_: Any) -> None: ...


sgd = partial(SGD, lr=0.1)
Change = Callable[[ELBO], object]
Make = Callable[[Any], Optimizer]


@dataclass(frozen=True)
class Case:
    """An objective and an optimiser that has no compiled backend."""

    why: str
    #: Options of the network, of the objective, and what is done to it afterwards.
    bnn: dict[str, Any] = field(default_factory=dict)
    elbo: dict[str, Any] = field(default_factory=dict)
    change: Change = nothing
    optimizer: Make = sgd
    alter: Callable[[Optimizer, ELBO], object] = nothing
    kind: type[ELBO] = ELBO
    network: type[BayesianModule] = BayesianModule
    pruned: bool = False
    dtype: torch.dtype = torch.float64

    def make(self) -> tuple[ELBO, Optimizer]:
        bnn = self.network(mlp(self.dtype), **{"seed": 5, **self.bnn})
        bnn = prune(bnn, 0.5) if self.pruned else bnn
        elbo = self.kind(bnn, num_data=N, **self.elbo)
        self.change(elbo)
        decays = "decay" in self.why or "AdamW" in self.why
        optimizer = self.optimizer(parameter_groups(elbo) if decays else elbo.parameters())
        self.alter(optimizer, elbo)
        return elbo, optimizer


def parameter(elbo: ELBO, name: str) -> torch.nn.Parameter:
    return elbo.bnn.posterior.get_parameter(name)


def clip(optimizer: Optimizer, _: ELBO) -> None:
    """Replace the optimiser's step by one that clips gradients first."""

    def step(self: Optimizer, closure: Any = None) -> Any:
        held = [each for group in self.param_groups for each in group["params"]]
        torch.nn.utils.clip_grad_norm_(held, 1e-3)
        return type(self).step(self, closure)

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


def weaker(*_: Any) -> Tensor:
    """A hook on a gradient."""
    return 0.5 * _[-1]


def halve(parameter: Tensor) -> None:
    """A hook on an accumulated gradient."""
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def own_forward(elbo: ELBO) -> None:
    right = elbo.forward

    def forward(*args: Any, **options: Any) -> Any:
        terms = right(*args, **options)
        return terms._replace(loss=0.5 * terms.loss)

    elbo.forward = forward  # type: ignore[method-assign]


def two_groups(momentum: tuple[float, float], parameters: Any) -> Optimizer:
    mean, rho = parameters
    groups = [{"params": [p], "momentum": m} for p, m in zip((mean, rho), momentum, strict=True)]
    return SGD(groups, lr=0.1)


LOCAL = {"estimator": LocalReparameterization()}
OBJECTIVES = {
    "student-t": Case("the prior is StudentT", {"prior": StudentT()}),
    "empirical": Case("the prior is EmpiricalGaussian", {"prior": EmpiricalGaussian(min_size=2)}),
    "by unit": Case("the prior is SpikeAndSlab", {"prior": SpikeAndSlab()}),
    "log-uniform": Case("the prior is LogUniform", {"prior": LogUniform()}),
    "by group, by unit": Case(
        "the prior is ByGroup with GroupedGaussian",
        {"prior": ByGroup({"0.*": GroupedGaussian(), "*": Gaussian(0.1)})},
    ),
    "by group, two kinds": Case(
        "the prior is ByGroup with priors of several kinds",
        {"prior": ByGroup({"0.*": Gaussian(0.1), "*": Laplace(1.0)})},
    ),
    "by group, student-t": Case(
        "the prior is ByGroup with StudentT",
        {"prior": ByGroup({"0.*": Gaussian(0.1), "*": StudentT()})},
    ),
    "own prior": Case("the prior is OwnGaussian", {"prior": OwnGaussian(0.3)}),
    "delta": Case("the posterior is a Delta", {"posterior": Delta}),
    "own objective": Case("the objective is a OwnELBO", kind=OwnELBO),
    "own network": Case("the network is a OwnModule", network=OwnModule),
    "own forward": Case("the objective has a forward of its own", change=own_forward),
    "own estimator": Case("the estimator is Halved", {"estimator": Halved()}),
    "hook": Case(
        "the objective has hooks",
        change=lambda e: e.register_forward_hook(
            lambda _m, _a, terms: terms._replace(loss=2.0 * terms.loss)
        ),
    ),
    "hook of the network": Case(
        "the network has hooks", change=lambda e: e.bnn.register_forward_pre_hook(nothing)
    ),
    "hook of the posterior": Case(
        "the posterior has hooks", change=lambda e: e.bnn.posterior.register_forward_hook(nothing)
    ),
    "compiled": Case("the objective was compiled", change=lambda e: e.compile(backend="eager")),
    "narrow posterior": Case("the weights are bfloat16", change=narrow),
    "two dtypes": Case("mean and rho have two dtypes", change=of_two_dtypes),
    "strided mean": Case("mean is not contiguous", change=partial(strided, "mean")),
    "strided rho": Case("rho is not contiguous", change=partial(strided, "rho")),
    "two samples, local": Case(
        "the KL of a step is averaged over several samples",
        LOCAL,
        {"num_samples": 2, "kl": "monte-carlo"},
    ),
    "pruned, flipout": Case("weights are pruned", {"estimator": Flipout()}, pruned=True),
    "frozen mean": Case(
        "mean or rho is not trained", change=lambda e: parameter(e, "mean").requires_grad_(False)
    ),
    "frozen rho": Case(
        "mean or rho is not trained", change=lambda e: parameter(e, "rho").requires_grad_(False)
    ),
}
OPTIMIZERS = {
    "adamw": Case("the optimizer is AdamW", optimizer=partial(AdamW, lr=0.1)),
    "rmsprop": Case("the optimizer is RMSprop", optimizer=partial(RMSprop, lr=0.1)),
    "decay": Case("weight_decay 0.1", optimizer=partial(SGD, lr=0.1, weight_decay=0.1)),
    "decay, adam": Case("weight_decay 0.1", optimizer=partial(Adam, weight_decay=0.1)),
    "nesterov": Case("nesterov True", optimizer=partial(SGD, lr=0.1, momentum=0.5, nesterov=True)),
    "dampening": Case("dampening 0.5", optimizer=partial(SGD, lr=0.1, momentum=0.5, dampening=0.5)),
    "amsgrad": Case("amsgrad True", optimizer=partial(Adam, amsgrad=True)),
    "maximize": Case("maximize True", optimizer=partial(SGD, lr=0.1, maximize=True)),
    "momentum of rho": Case("momentum", optimizer=partial(two_groups, (0.0, 0.5))),
    "momentum of the mean": Case("momentum", optimizer=partial(two_groups, (0.5, 0.0))),
    "hook before": Case(
        "the optimizer has hooks", alter=lambda o, _: o.register_step_pre_hook(nothing)
    ),
    "hook after": Case(
        "the optimizer has hooks", alter=lambda o, _: o.register_step_post_hook(nothing)
    ),
    "own step": Case("the optimizer has a step of its own", alter=clip),
    "hook of the mean": Case(
        "mean has hooks", alter=lambda _, e: parameter(e, "mean").register_hook(weaker)
    ),
    "hook of rho": Case(
        "rho has hooks",
        alter=lambda _, e: parameter(e, "rho").register_post_accumulate_grad_hook(halve),
    ),
    "mean alone": Case(
        "the optimizer does not hold rho", optimizer=lambda p: SGD(list(p)[:1], lr=0.1)
    ),
}
CASES = OBJECTIVES | OPTIMIZERS


def train(case: Case, backend: Any) -> tuple[dict[str, Tensor], Notes]:
    elbo, optimizer = case.make()
    notes = Notes()
    loader = TensorLoader(X.to(case.dtype), Y, BATCH, shuffle=False)
    fit(elbo, loader, epochs=EPOCHS, optimizer=optimizer, backend=backend, callback=notes)
    return dict(elbo.bnn.state_dict()), notes


def train_by_hand(case: Case) -> dict[str, Tensor]:
    elbo, optimizer = case.make()
    elbo.fused = why_no_closed_forms(elbo) is None
    for _ in range(EPOCHS):
        for index, rows in enumerate(torch.arange(N).split(BATCH)):
            optimizer.zero_grad()
            elbo(X[rows].to(case.dtype), Y[rows], batch_index=index, kl_scale=1.0).loss.backward()
            optimizer.step()
    return dict(elbo.bnn.state_dict())


@pytest.mark.parametrize("name", CASES)
def test_compiled_raises(name: str) -> None:
    elbo, optimizer = CASES[name].make()
    why = why_not_compiled(elbo, optimizer)
    # First, as what is fused in spite of it may read memory that is not there.
    assert why is not None
    assert CASES[name].why in why
    with pytest.raises(ValueError, match=r'backend="compiled" does not .*; use') as e:
        make_backend(elbo, optimizer, "compiled")
    assert why in str(e.value)


@pytest.mark.parametrize("name", CASES)
def test_auto_then_trains_as_by_hand(name: str) -> None:
    test_compiled_raises(name)
    found, expected = train(CASES[name], "auto")[0], train_by_hand(CASES[name])
    for key, value in expected.items():
        assert torch.allclose(found[key].double(), value.double(), rtol=1e-10, atol=1e-12), key


@pytest.mark.parametrize("name", CASES)
def test_auto_then_says_why(name: str) -> None:
    test_compiled_raises(name)
    said = train(CASES[name], "auto")[1].said
    assert sum("backend" in note for note in said) == 1
    assert said[0].startswith(("backend: autograd", "backend: closed-form", "backend: fused"))
    assert CASES[name].why in said[0]


@pytest.mark.parametrize(
    ("dtype", "eps", "why"),
    [
        (torch.float32, 1e-16, "the optimizer has eps 1e-16, below 1e-12"),
        (torch.float32, 1e-12, None),
        (torch.float32, torch.tensor(1e-12), None),
        (torch.float64, 1e-16, None),
    ],
)
def test_a_small_eps_is_left_to_other_backends(
    dtype: torch.dtype, eps: Any, why: str | None
) -> None:
    elbo, optimizer = Case("", dtype=dtype, optimizer=partial(Adam, lr=0.1)).make()
    for group in optimizer.param_groups:  # as a schedule or a callback sets it
        group["eps"] = eps
    assert why_not_compiled(elbo, optimizer) == why
    assert make_backend(elbo, optimizer).description.startswith("compiled") == (why is None)


def test_an_eps_that_gets_small_is_noticed() -> None:
    elbo, optimizer = Case("", dtype=torch.float32, optimizer=partial(Adam, lr=0.1)).make()
    backend = CompiledBackend(elbo, optimizer)
    backend.step(X.float(), Y, StepOptions(batch_index=0))
    optimizer.param_groups[0]["eps"] = 1e-16
    with pytest.raises(ValueError, match="eps 1e-16, below 1e-12"):
        backend.step(X.float(), Y, StepOptions(batch_index=0))


def test_replicas_refuse_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    elbo, _ = Case("").make()
    monkeypatch.setattr("bayesify.training.checks.process_count", lambda: 2)
    with pytest.raises(ValueError, match="2: each would train alone, on all data"):
        fit_replicas([elbo], TensorLoader(X, Y, 10), epochs=1)


def test_a_kl_that_is_nan_is_not_learnt() -> None:
    class Broken(StudentT):
        def log_prob(self, weights: Tensor) -> Tensor:
            return super().log_prob(weights) * torch.nan

    elbo, optimizer = Case("", {"prior": Broken()}).make()
    backend = make_backend(elbo, optimizer)
    with pytest.raises(ArithmeticError, match="the KL or penalty at step 1"):
        backend.step(X, Y, StepOptions(batch_index=0))
    assert all(bool(p.isfinite().all()) for p in elbo.parameters())


def test_an_unknown_backend_raises() -> None:
    with pytest.raises(ValueError, match=r'backend must be one of "auto", .*, got .quick.'):
        train(Case(""), "quick")


def test_the_kl_factor_of_a_compiled_objective_has_its_scale() -> None:
    elbo, optimizer = CASES["compiled"].make()
    backend = make_backend(elbo, optimizer, "autograd")
    terms = backend.step(X, Y, StepOptions(batch_index=0, kl_scale=0.25))
    assert terms.kl_factor == pytest.approx(0.25 / N)
