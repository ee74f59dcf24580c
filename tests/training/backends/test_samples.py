"""Steps of several weight samples are the objective's by autograd, on the same noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.backend_cases import (
    CLASSES,
    INPUTS,
    OPTIMIZERS,
    PRIORS,
    Task,
    backend_of,
    each_compiled_kind,
    each_kind,
    use_counter_noise,
)
from tests.training.backends.test_agreement import (
    TASKS,
    Convolutions,
    Odd,
    Slopes,
    Words,
    check_agreement,
    options,
    tokens,
)
from torch import nn

from bayesify import GaussianLikelihood, WeightSampling
from bayesify.training.backends import StepOptions
from bayesify.training.backends.closed_form import ClosedFormBackend
from bayesify.training.backends.leaf import LeafBackend, SampleSource
from bayesify.training.backends.leaves import Leaves
from bayesify.training.kernel.posterior_update import PosteriorUpdate

each_prior = pytest.mark.parametrize("prior", PRIORS)
PAIRS = options(estimator=WeightSampling(antithetic=True))


def several(task: Task, count: int) -> Task:
    return replace(task, elbo=(*task.elbo, *options(num_samples=count)), steps=20)


@each_kind
@pytest.mark.parametrize(
    "count", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(5, marks=pytest.mark.slow)]
)
@each_prior
def test_steps_agree(kind: str, prior: str, count: int) -> None:
    check_agreement(kind, several(Task(prior), count))


@pytest.mark.slow
@each_kind
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "adam"])
@each_prior
def test_steps_of_other_optimisers_agree(kind: str, prior: str, optimizer: str) -> None:
    check_agreement(kind, several(Task(prior, optimizer), 3))


@pytest.mark.slow
@each_kind
@each_prior
def test_steps_agree_in_float32(kind: str, prior: str) -> None:
    check_agreement(kind, several(Task(prior, "adam", torch.float32), 3))


@pytest.mark.slow
@each_kind
@each_prior
def test_antithetic_pairs_agree(kind: str, prior: str) -> None:
    check_agreement(kind, several(Task(prior, bnn=PAIRS), 4))


OTHERS = {
    "prior mean": TASKS["prior mean"],
    "prior mean, mixture": TASKS["prior mean, mixture"],
    "pruned": TASKS["pruned"],
    "pruned, mixture": TASKS["pruned, mixture"],
    "pruned, pairs": replace(TASKS["pruned, mixture"], bnn=PAIRS),
    "warm-up": TASKS["warm-up"],
    "geometric": TASKS["geometric"],
    "buffers": Task("scale-mixture-wide", "momentum", net=Convolutions),
    "words": Task("gaussian", "sgd", net=Words, inputs=tokens),
    "odd parameters": Task("scale-mixture-wide", net=Odd),
    "slopes": Task("gaussian", "sgd", net=Slopes),
    # What is not random gets gradients from within each pass too.
    "slopes, in part": Task("gaussian", "sgd", net=Slopes, bnn=options(exclude=("first.*",))),
    # In double precision, since it is not the network's that it has.
    "learned noise": replace(
        TASKS["learned noise"],
        bnn=options(likelihood=GaussianLikelihood(0.7, learn_std=True).double()),
    ),
}


@pytest.mark.slow
@each_kind
@pytest.mark.parametrize("name", OTHERS)
def test_other_networks_and_objectives_agree(kind: str, name: str) -> None:
    check_agreement(kind, several(OTHERS[name], 2))


def dropping() -> nn.Module:
    return nn.Sequential(
        nn.Linear(INPUTS, 33), nn.BatchNorm1d(33), nn.Dropout(0.4), nn.Linear(33, CLASSES)
    )


@each_kind
def test_dropout_and_buffers_follow_the_objectives(kind: str) -> None:
    task = several(Task("gaussian", net=dropping), 3)
    elbo, specified = task.objective(), task.objective()
    specified.fused = False
    if kind != "closed-form":
        use_counter_noise(specified)
    step, optimizer = backend_of(kind, elbo, task.optimizer_of(elbo)), task.optimizer_of(specified)
    for number, (x, y, told) in enumerate(task.minibatches()):
        torch.manual_seed(number)
        values = step.step(x, y, StepOptions(**told))
        torch.manual_seed(number)
        optimizer.zero_grad()
        terms = specified(x, y, **told)
        terms.loss.backward()
        optimizer.step()
        assert values.outputs.shape == (3, len(x), CLASSES)
        assert torch.allclose(values.outputs, terms.outputs, rtol=0, atol=1e-11)
        assert float(values.nll) == pytest.approx(float(terms.nll.detach()), rel=1e-11)
    for one, two in zip(elbo.bnn.buffers(), specified.bnn.buffers(), strict=True):
        assert torch.allclose(one.double(), two.double(), rtol=1e-9, atol=1e-12)


# ------------------------------------------------------------------------------- planted faults

SCALED = several(Task("gaussian"), 3)
ESTIMATED = several(Task("scale-mixture-wide"), 3)
Patch = pytest.MonkeyPatch
Kind = type[PosteriorUpdate] | type[ClosedFormBackend]


def name_of(kind: Kind) -> str:
    return "accumulate" if kind is PosteriorUpdate else "_accumulate"


def whole_nll(patch: Patch, _: Kind) -> None:
    """The samples' nll is summed, not averaged."""
    right = Leaves.backward
    patch.setattr(Leaves, "backward", lambda self, nll: right(self, 3 * nll))


def whole_estimate(patch: Patch, kind: Kind) -> None:
    """Each sample but the last bears all of the KL's estimate, not a part."""
    right = getattr(kind, name_of(kind))
    patch.setattr(kind, name_of(kind), lambda self, g, k, factor: right(self, g, k, 3 * factor))


def no_spread(patch: Patch, kind: Kind) -> None:
    """The derivative in log std is the last sample's alone."""
    right = getattr(kind, name_of(kind))

    def wrong(self: Any, *args: Any) -> None:
        right(self, *args)
        sums = self._kernel._vectors.sums if isinstance(self, PosteriorUpdate) else self._sums
        sums[1].zero_()

    patch.setattr(kind, name_of(kind), wrong)


def last_sample_alone(patch: Patch, kind: Kind) -> None:
    """All sums begin anew with each sample."""
    right = getattr(kind, name_of(kind))

    def wrong(self: Any, gradients: Any, sample: int, factor: float) -> None:
        right(self, gradients, sample, factor)
        sums = self._kernel._vectors.sums if isinstance(self, PosteriorUpdate) else self._sums
        for each in sums if sample == 0 else ():
            each.zero_()

    patch.setattr(kind, name_of(kind), wrong)


def same_noise(patch: Patch, kind: Kind) -> None:
    same = SampleSource(0, opposite=False)
    patch.setattr(
        "bayesify.training.backends.leaf.sample_sources",
        lambda elbo, _: [same] * elbo.num_samples,
    )


FAULTS: list[tuple[Callable[[Patch, Kind], None], Task]] = [
    (whole_nll, SCALED),
    (whole_estimate, ESTIMATED),
    *((fault, task) for fault in (no_spread, last_sample_alone) for task in (SCALED, ESTIMATED)),
    (same_noise, SCALED),
]


@each_kind
@pytest.mark.parametrize(("fault", "task"), FAULTS)
def test_a_planted_fault_is_caught(
    kind: str, fault: Callable[[Patch, Kind], None], task: Task, monkeypatch: Patch
) -> None:
    fault(monkeypatch, ClosedFormBackend if kind == "closed-form" else PosteriorUpdate)
    with pytest.raises(AssertionError, match="away from autograd"):
        check_agreement(kind, task)


@each_compiled_kind
@pytest.mark.parametrize("name", ["learned noise", "slopes, in part"])
def test_forgotten_gradients_of_the_rest_are_caught(
    kind: str, name: str, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(LeafBackend, "_other_parameters", lambda _: [])
    with pytest.raises(AssertionError, match="away from autograd"):
        check_agreement(kind, several(OTHERS[name], 2))
