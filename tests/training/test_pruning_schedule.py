"""Pruning in training: the schedule, what it removes, and that every backend keeps to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests import backend_cases
from tests.backend_cases import Task, needs_compiler, use_counter_noise
from tests.cases import Case, mlp
from tests.loops import loop_over
from tests.training.test_fit import CASE, N
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from bayesify import (
    ELBO,
    IVON,
    BayesianModule,
    Delta,
    Gaussian,
    LocalReparameterization,
    LowRankGaussian,
    MatrixGaussian,
    PACBayesObjective,
    PruningSchedule,
    fit,
    kl_divergence,
    prune,
)
from bayesify.datasets import TensorLoader
from bayesify.training import pruning_schedule
from bayesify.training.backends import (
    AutogradBackend,
    Backend,
    ClosedFormBackend,
    CompiledBackend,
    GraphBackend,
    StepOptions,
    make_backend,
)
from bayesify.training.kernel.posterior_update import PosteriorUpdate

pytestmark = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")

EPOCHS, BATCHES = 5, 3
SCHEDULE = PruningSchedule(0.7, from_epoch=1, until_epoch=3.5)


def loader() -> TensorLoader:
    return TensorLoader(*CASE.data(N), 8, shuffle=False)


def trained(elbo: ELBO, schedule: PruningSchedule | None = SCHEDULE, **options: Any) -> Any:
    """The history of a training under the schedule."""
    options = {"epochs": EPOCHS, "pruning": schedule, "progress": False, **options}
    return fit(elbo, loader(), **options)


def objective(bnn: BayesianModule | None = None) -> ELBO:
    return ELBO(CASE.bnn() if bnn is None else bnn, num_data=N)


# --------------------------------------------------------------------------------- the schedule


def by_the_paper(t: float, first: float, last: float, final: float) -> float:
    """Equation 1 of Zhu and Gupta 2017, with an initial sparsity of 0."""
    return final + (0.0 - final) * (1.0 - (t - first) / (last - first)) ** 3


def check_formula(schedule: PruningSchedule) -> None:
    for step in range(10, 31):
        expected = by_the_paper(step, 10, 30, 0.9)
        assert math.isclose(schedule.fraction_at(step, batches=10), expected, abs_tol=1e-12)
    assert [schedule.fraction_at(step, batches=10) for step in (0, 10, 30, 99)] == [0, 0, 0.9, 0.9]


def test_the_fraction_is_that_of_the_paper() -> None:
    check_formula(PruningSchedule(0.9, 1, 3))


def test_another_power_is_not_that_of_the_paper() -> None:
    with pytest.raises(AssertionError):
        check_formula(PruningSchedule(0.9, 1, 3, power=2.9))


@loop_over("first, last", [(0, 1), (0.3, 2.9), (1, 1.01), (2, 7)])
def test_the_last_step_that_is_due_has_the_whole_fraction(first: float, last: float) -> None:
    schedule = PruningSchedule(0.8, first, last)
    due = [step for step in range(100) if schedule.is_due(step, batches=7)]
    assert schedule.fraction_at(due[-1], batches=7) == 0.8
    assert due[-1] == max(math.ceil(first * 7) + 1, math.ceil(last * 7))
    assert len(due) <= 1 + 7 * (last - first)


def test_a_straight_line_rises_evenly() -> None:
    schedule = PruningSchedule(0.8, 0, 4, power=1, times_per_epoch=1)
    due = [step for step in range(30) if schedule.is_due(step, batches=5)]
    assert due == [5, 10, 15, 20]
    fractions = [schedule.fraction_at(step, batches=5) for step in due]
    assert fractions == pytest.approx([0.2, 0.4, 0.6, 0.8])


# ------------------------------------------------------------------------------------- training


def by_hand() -> BayesianModule:
    """The network after steps between which it is pruned by :func:`prune`."""
    elbo = objective()
    step = 0
    for _ in range(EPOCHS):
        for index, (x, y) in enumerate(loader()):
            if SCHEDULE.is_due(step, BATCHES):
                fraction = SCHEDULE.fraction_at(step, BATCHES)
                pruned = ELBO(prune(elbo.bnn, fraction), num_data=N)
                pruned.step = elbo.step
                elbo = pruned
            backend = make_backend(elbo, SGD(elbo.bnn.parameters(), lr=0.05), "autograd")
            backend.step(x, y, StepOptions(batch_index=index))
            step += 1
    return elbo.bnn


def check_against_steps_by_hand(schedule: PruningSchedule) -> None:
    elbo = objective()
    trained(elbo, schedule, optimizer=partial(SGD, lr=0.05), backend="autograd")
    expected = by_hand().posterior
    assert torch.equal(elbo.bnn.posterior.mask, expected.mask)
    assert torch.equal(elbo.bnn.posterior.mean, expected.mean)


def test_training_is_that_of_networks_pruned_between_steps() -> None:
    check_against_steps_by_hand(SCHEDULE)


@loop_over("shift", [{"from_epoch": 1 + 1 / BATCHES}, {"times_per_epoch": 1}, {"power": 1}])
def test_another_schedule_trains_another_network(shift: dict[str, Any]) -> None:
    settings = {**SCHEDULE.settings["pruning"], **shift}
    with pytest.raises(AssertionError):
        check_against_steps_by_hand(PruningSchedule(**settings))


def ivon_elbo() -> ELBO:
    return objective(BayesianModule(mlp(), prior=Gaussian(0.5), init_std=0.1, seed=3))


def local() -> ELBO:
    return objective(CASE.bnn(estimator=LocalReparameterization()))


def structured() -> ELBO:
    return objective(Case("gaussian", "low-rank", "categorical").bnn())


RUNS: dict[str, Any] = {
    "autograd": (objective, {"backend": "autograd"}),
    "closed-form, adam": (objective, {"backend": "closed-form"}),
    "closed-form, momentum": (
        objective,
        {"backend": "closed-form", "optimizer": partial(SGD, lr=0.05, momentum=0.9)},
    ),
    "decay": (objective, {"optimizer": partial(Adam, lr=0.01, weight_decay=0.1, amsgrad=True)}),
    "local": (local, {"kl_warmup_epochs": 2}),
    # The last weights are pruned before the third minibatch of a step.
    "accumulated": (
        objective,
        {"accumulate_batches": 3, "schedule": replace(SCHEDULE, power=1.0)},
    ),
    "structured": (structured, {}),
    "full": (lambda: objective(Case("gaussian", "full", "categorical").bnn()), {}),
}


def check_pruned(elbo: ELBO, history: Any, fraction: float = 0.7) -> None:
    """The fraction is gone in mean and samples, to stay; the rest counts and was trained."""
    posterior = elbo.bnn.posterior
    mask = posterior.mask
    assert mask is not None
    size = mask.numel()
    assert int((~mask).sum()) == math.floor(fraction * size)
    assert not posterior.mean[~mask].any(), "also the parameter itself is zero"
    assert bool(posterior.mean[mask].all())
    draws = posterior.draw(torch.ones(2, posterior.noise_size).double())
    assert not draws.weights[:, ~mask].any()
    assert bool(draws.weights[:, mask].all())
    pruned = [row["fraction_pruned"] for row in history]
    assert pruned[0] == 0.0
    assert pruned == sorted(pruned)
    assert pruned[-1] == pytest.approx(1.0 - int(mask.sum()) / size)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_what_is_pruned_is_zero_and_stays_zero(run: Any) -> None:
    make, options = run
    elbo = make()
    check_pruned(elbo, trained(elbo, **options))


@needs_compiler
@pytest.mark.parametrize("optimizer", ["adam", "momentum", "ivon"])
def test_the_compiled_backend_prunes_too(optimizer: str) -> None:
    elbo = ivon_elbo()
    made: Optimizer = {
        "adam": partial(Adam, lr=0.01),
        "momentum": partial(SGD, lr=0.05, momentum=0.9),
        "ivon": lambda _: IVON(elbo, lr=0.1),
    }[optimizer]
    check_pruned(elbo, trained(elbo, optimizer=made, backend="compiled"))


def test_ivon_keeps_the_means_of_pruned_weights_at_zero() -> None:
    elbo = ivon_elbo()
    check_pruned(elbo, trained(elbo, optimizer=IVON(elbo, lr=0.1), backend="autograd"))
    assert bool(elbo.bnn.posterior.rho.isfinite().all())


def test_momentum_that_is_not_forgotten_moves_pruned_means(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pruning_schedule, "_forget_pruned", lambda *_: None)
    elbo = objective()
    history = trained(elbo, optimizer=partial(SGD, lr=0.05, momentum=0.9))
    with pytest.raises(AssertionError, match="the parameter itself"):
        check_pruned(elbo, history)


def test_the_kl_counts_what_is_left() -> None:
    elbo = objective()
    history = trained(elbo)
    bnn = elbo.bnn
    posterior = bnn.posterior
    mask = posterior.mask
    assert mask is not None
    std, prior = posterior.std[mask], 0.7
    each = torch.log(prior / std) + (std**2 + posterior.mean[mask] ** 2) / (2 * prior**2) - 0.5
    expected = float(each.detach().sum())
    assert float(kl_divergence(posterior, bnn.prior).detach()) == pytest.approx(expected)
    # The history has the KL before the last step.
    assert history[-1]["kl"] == pytest.approx(expected, rel=0.05)


def test_what_was_pruned_before_stays_pruned() -> None:
    before = prune(CASE.bnn(), 0.3)
    mask = before.posterior.mask
    assert mask is not None
    gone = ~mask.clone()
    elbo = objective(before)
    history = trained(elbo)
    assert history[0]["fraction_pruned"] == pytest.approx(13 / 44)
    after = elbo.bnn.posterior.mask
    assert after is not None
    assert not after[gone].any()


def test_a_point_estimate_is_pruned_by_magnitude() -> None:
    elbo = objective(BayesianModule(mlp(), posterior=Delta, prior=Gaussian(1.0), seed=3))
    with pytest.raises(TypeError, match="criterion='magnitude'"):
        trained(elbo)
    schedule = PruningSchedule(0.5, 1, 2, criterion="magnitude")
    check_pruned(elbo, trained(elbo, schedule), fraction=0.5)


def test_without_a_schedule_nothing_is_pruned() -> None:
    elbo = objective()
    assert [row["fraction_pruned"] for row in trained(elbo, None)] == [0.0] * EPOCHS
    assert elbo.bnn.posterior.mask is None


# --------------------------------------------------------------------------------- every backend

GRADUAL = PruningSchedule(0.6, from_epoch=1, until_epoch=7)


def graph(elbo: ELBO, optimizer: Optimizer) -> Backend:
    """A graph whose recorded operations run again, as on a GPU."""
    return GraphBackend(elbo, optimizer, lambda function: function, compiled=False)


def closed_form(elbo: ELBO, optimizer: Optimizer) -> Backend:
    return ClosedFormBackend(elbo, optimizer)


def kernel(elbo: ELBO, optimizer: Optimizer) -> Backend:
    return CompiledBackend(elbo, optimizer)


def tensors(elbo: ELBO, optimizer: Optimizer) -> Backend:
    return CompiledBackend(elbo, optimizer, compiled=False)


def pruned_steps(
    make: Callable[[ELBO, Optimizer], Backend], task: Task, *, counter: bool = False
) -> tuple[list[float], Tensor]:
    """The nll of each step of a training that is pruned, and the means that it ends with."""
    elbo = task.objective()
    elbo.fused = False
    if counter:
        use_counter_noise(elbo)
    optimizer = task.optimizer_of(elbo)
    GRADUAL.begin(elbo, epochs=10, batches=backend_cases.BATCHES)
    backend, nlls = make(elbo, optimizer), []
    for step, (x, y, options) in enumerate(task.minibatches()):
        GRADUAL.prune(elbo.bnn, optimizer, step, backend_cases.BATCHES)
        nlls.append(float(backend.step(x, y, StepOptions(**options)).nll))
    posterior = elbo.bnn.posterior
    assert posterior.mask is not None
    assert int(posterior.mask.sum()) == math.ceil(0.4 * posterior.mask.numel())
    assert not posterior.mean[~posterior.mask].any()
    return nlls, posterior.mean.detach()


def check_against_autograd(make: Callable[[ELBO, Optimizer], Backend], optimizer: str) -> None:
    task = Task("gaussian", optimizer)
    counter = make is not closed_form
    expected = pruned_steps(AutogradBackend, task, counter=counter)
    nlls, mean = pruned_steps(make, task)
    assert nlls == pytest.approx(expected[0], rel=1e-9)
    assert float((mean - expected[1]).norm() / mean.norm()) < 1e-9


@pytest.mark.parametrize(
    "make", [closed_form, pytest.param(kernel, marks=needs_compiler), tensors, graph]
)
@loop_over("optimizer", ["adam", "momentum", "ivon"])
def test_every_backend_prunes_as_autograd_does(make: Any, optimizer: str) -> None:
    check_against_autograd(make, optimizer)


def test_a_backend_that_keeps_the_weights_of_before_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Were the edit of the means not seen, a step would use weights that are pruned by then."""
    monkeypatch.setattr(PosteriorUpdate, "_state", lambda self: self._elbo.step)
    with pytest.raises(AssertionError):
        check_against_autograd(graph, "adam")


# --------------------------------------------------------------------------------------- errors


@loop_over(
    "arguments, message",
    [
        ((1.1, 0, 1), "fraction must lie between 0 and 1, got 1.1"),
        ((math.nan, 0, 1), "fraction must lie between 0 and 1"),
        ((0.0, 0, 1), "leave out pruning"),
        ((0.5, -1, 1), "from_epoch must be at least 0"),
        ((0.5, 2, 2), "below until_epoch"),
        ((0.5, 0, math.inf), "below until_epoch"),
        ((0.5, 0, math.nan), "below until_epoch"),
        ((0.5, 0, 1, 0.0), "power must be positive"),
        ((0.5, 0, 1, math.nan), "power must be positive"),
        ((0.5, 0, 1, 3.0, 0), "times_per_epoch must be at least 1, got 0"),
        ((0.5, 0, 1, 3.0, 1, "size"), "criterion must be snr or magnitude"),
    ],
)
def test_settings_out_of_range_are_errors(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PruningSchedule(*arguments)


def test_a_part_of_a_time_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"times_per_epoch must be a whole number, got 1\.5"):
        PruningSchedule(0.5, 0, 1, 3.0, 1.5)  # type: ignore[arg-type]


def test_pruning_that_outlasts_training_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"below epochs=3, got 3.5"):
        trained(objective(), epochs=3)


@pytest.mark.parametrize(("first", "until"), [(8.2, 9.5), (9.1, 9.5), (0.0, 9.01)])
def test_pruning_that_ends_with_the_last_step_is_an_error(first: float, until: float) -> None:
    bnn = BayesianModule(nn.Linear(3, 2))
    x, y = torch.zeros(8, 3), torch.zeros(8, dtype=torch.long)
    loader, elbo = TensorLoader(x, y, 8), ELBO(bnn, num_data=8)
    with pytest.raises(ValueError, match=r"end after step 1[01] of 10; lower until_epoch, or fr"):
        fit(elbo, loader, epochs=10, pruning=PruningSchedule(0.9, first, until), progress=False)


@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
@pytest.mark.parametrize("batch_size", [2, 8])
@pytest.mark.parametrize("until", [0.5, 1.0, 1.7, 2.0])
def test_the_fraction_is_reached(batch_size: int, until: float) -> None:
    bnn = BayesianModule(nn.Linear(3, 2))
    x, y = torch.zeros(8, 3), torch.zeros(8, dtype=torch.long)
    loader, elbo = TensorLoader(x, y, batch_size), ELBO(bnn, num_data=8)
    schedule = PruningSchedule(0.5, 0.0, until)
    rows = fit(elbo, loader, epochs=3, pruning=schedule, progress=False)
    assert rows[-1]["fraction_pruned"] == 0.5


def test_a_number_in_place_of_a_schedule_is_an_error() -> None:
    with pytest.raises(TypeError, match="pruning must be a PruningSchedule, got"):
        fit(objective(), loader(), pruning=0.9)  # type: ignore[arg-type]


def test_a_pac_bayes_bound_is_an_error() -> None:
    bnn = BayesianModule(nn.Linear(3, 4).double(), prior=Gaussian(0.1))
    with pytest.raises(ValueError, match="pruning needs an ELBO"):
        trained(PACBayesObjective(bnn, num_data=N, form="f-quad"))


def test_too_large_a_layer_is_an_error_before_the_first_step() -> None:
    net = nn.Sequential(nn.Linear(100, 50), nn.Linear(50, 2))
    elbo = ELBO(BayesianModule(net, posterior=MatrixGaussian()), num_data=N)
    x, y = torch.randn(N, 100), torch.zeros(N).long()
    with pytest.raises(TypeError, match=r"a layer of at most 4,096 weights, got one of 5,050"):
        fit(elbo, TensorLoader(x, y, 4), epochs=EPOCHS, pruning=SCHEDULE, progress=False)
    assert elbo.step == 0
    assert elbo.bnn.posterior.mask is None


def test_the_order_of_two_networks_is_their_own_snr() -> None:
    """A weight with a large mean and a larger std goes first."""
    bnn = BayesianModule(nn.Linear(3, 4, dtype=torch.float64), init_std=0.1, seed=0)
    values: Tensor = bnn.posterior.mean
    with torch.no_grad():
        values.copy_(torch.linspace(1, 2, 16))
        bnn.posterior.rho[-4:] = 10.0
    schedule = PruningSchedule(0.25, 0, 1, times_per_epoch=1)
    schedule.begin(ELBO(bnn, num_data=N), epochs=2, batches=3)
    schedule.prune(bnn, SGD(bnn.parameters(), lr=0.1), step=3, batches=3)
    assert bnn.posterior.mask is not None
    assert bnn.posterior.mask.tolist() == [True] * 12 + [False] * 4


def test_the_factor_of_pruned_weights_has_no_momentum() -> None:
    """Of a low-rank posterior the averages of whole rows are forgotten."""
    elbo = ELBO(BayesianModule(nn.Linear(4, 3), posterior=LowRankGaussian(2)), num_data=N)
    optimizer = Adam(elbo.parameters(), lr=0.1)
    elbo(torch.randn(5, 4), torch.zeros(5, dtype=torch.long)).loss.backward()
    optimizer.step()
    posterior = elbo.bnn.posterior
    [factor] = [p for p in posterior.parameters() if p.dim() == 2 and p.shape[1] == 2]
    PruningSchedule(0.5, from_epoch=0, until_epoch=1).prune(elbo.bnn, optimizer, 1, 1)
    assert posterior.mask is not None
    gone = ~posterior.mask
    assert gone.any()
    average = optimizer.state[factor]["exp_avg"]
    assert not average[gone].any()
    assert average[~gone].any()
    assert factor.grad is not None
    assert not factor.grad[gone].any()
