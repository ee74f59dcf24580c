"""A step on a GPU is the objective by autograd on a CPU, also when it is captured as a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.backend_cases import (
    OPTIMIZERS,
    PRIORS,
    Outcome,
    Task,
    classes,
    distance,
    specified,
    vectors,
)
from tests.gpu.device import COMPILER_WARNING, DEVICE, needs_gpu
from torch import Tensor, nn

import bayesify as bf
from bayesify.noise.keys import Stream, kept_generators, seed_global_generators
from bayesify.training.backends import (
    AutogradBackend,
    Backend,
    ClosedFormBackend,
    CompiledBackend,
    GraphBackend,
    StepOptions,
    make_backend,
)

pytestmark = [needs_gpu, COMPILER_WARNING]

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
Make = Callable[[bf.ELBO, torch.optim.Optimizer], Backend]


def on_gpu(task: Task, make: Make) -> tuple[Outcome, Backend]:
    """A training there."""
    elbo, said = task.objective().to(DEVICE), Outcome()
    backend = make(elbo, task.optimizer_of(elbo))
    for number, (x, y, options) in enumerate(task.minibatches()):
        # Most steps without, so that they are those of a captured graph.
        options["with_kl"] = number % 10 == 0
        terms = backend.step(x.to(DEVICE), y.to(DEVICE), StepOptions(**options, with_residual=True))
        said.nll.append(float(terms.nll))
        if terms.has_kl:
            said.kl.append(float(terms.kl))
    elbo.to("cpu")
    return said.keep(elbo), backend


def check_agreement(task: Task, make: Make, *, kl: bool = True) -> Backend:
    expected, (found, backend) = specified(task, counter=True), on_gpu(task, make)
    tolerance = TOLERANCE[task.dtype]
    away = distance(found.state, expected.state)
    assert away <= tolerance, f"{backend.description} is {away:.1e} away from autograd on a CPU"
    assert found.nll == pytest.approx(expected.nll, rel=10 * tolerance)
    if kl:
        assert found.kl == pytest.approx(expected.kl, rel=10 * tolerance)
    return backend


@pytest.mark.parametrize(
    "task",
    [
        *(Task(prior) for prior in PRIORS),
        Task("scale-mixture-wide", "adam", torch.float32),
        Task("laplace", "sgd"),
        Task("scale-mixture-wide", "momentum"),
        Task("gaussian", "ivon"),
        Task("gaussian", elbo=(("num_samples", 2),)),
        Task("gaussian", pruned=0.5),
    ],
    ids=lambda task: f"{task.prior}-{task.optimizer}-{task.elbo}-{task.pruned}-{task.dtype}",
)
def test_the_compiled_step_is_that_of_a_cpu(task: Task) -> None:
    backend = check_agreement(task, make_backend)
    if not task.elbo:
        assert backend.description.endswith(", as a graph")


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "ivon"])
@pytest.mark.parametrize("prior", PRIORS)
def test_the_formulas_are_those_of_a_cpu(prior: str, optimizer: str) -> None:
    if optimizer == "ivon" and prior != "gaussian":
        pytest.skip("IVON has a Gaussian prior")
    check_agreement(Task(prior, optimizer), partial(CompiledBackend, compiled=False))


@pytest.mark.parametrize(
    "estimator", [bf.WeightSampling(), bf.LocalReparameterization(), bf.Flipout()], ids=str
)
@pytest.mark.parametrize("prior", ["gaussian", "scale-mixture-wide"])
def test_closed_forms_are_autograd_there(prior: str, estimator: bf.Estimator) -> None:
    task = Task(prior, bnn=(("estimator", estimator),))
    expected, _ = on_gpu(task, AutogradBackend)
    found, _ = on_gpu(task, ClosedFormBackend)
    assert distance(found.state, expected.state) <= 1e-9
    assert found.nll == pytest.approx(expected.nll, rel=1e-8)


@pytest.mark.parametrize("prior", ["gaussian", "scale-mixture-wide"])
def test_local_reparametrisation_has_the_noise_of_a_cpu(prior: str) -> None:
    task = Task(prior, bnn=(("estimator", bf.LocalReparameterization()),))
    # An estimate of the KL has noise of its own.
    backend = check_agreement(task, make_backend, kl=prior == "gaussian")
    assert backend.description.endswith(", as a graph")


@pytest.mark.parametrize("estimator", [bf.LocalReparameterization(), bf.Flipout()], ids=str)
def test_noise_of_outputs_is_new_in_each_step_of_a_graph(estimator: bf.Estimator) -> None:
    """Without it the nll of one minibatch, at weights that stay, would be the same."""
    task = replace(
        Task("gaussian", "sgd", torch.float32, bnn=(("estimator", estimator), ("init_std", 0.3))),
        inputs=lambda dtype: vectors(dtype)[:16].repeat(50, 1),
        targets=lambda: classes()[:16].repeat(50),
        optimizer=partial(torch.optim.SGD, lr=1e-9),
    )
    found, backend = on_gpu(task, make_backend)
    assert backend.description.endswith(", as a graph")
    assert len(set(found.nll)) == len(found.nll)
    again, _ = on_gpu(task, partial(CompiledBackend, compiled=True))
    assert again.nll == pytest.approx(found.nll, rel=1e-4)


# ------------------------------------------------------------------------------- within the graph


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 33), nn.ReLU(), nn.Dropout(0.5), nn.Linear(33, 5))


def steps_of(make: Make, net: Callable[[], nn.Module], *, mixed: bool) -> tuple[Any, list[float]]:
    """Parameters and nll after steps as ``fit`` makes them."""
    task = replace(Task("gaussian", "adam", torch.float32, net=net), steps=20)
    elbo = task.objective().to(DEVICE)
    backend, nll = make(elbo, task.optimizer_of(elbo)), []
    with kept_generators():
        for number, (x, y, options) in enumerate(task.minibatches()):
            seed_global_generators(3, Stream.DROPOUT, number)
            torch.clear_autocast_cache()
            with torch.autocast(DEVICE, torch.bfloat16, enabled=mixed):
                terms = backend.step(x.to(DEVICE), y.to(DEVICE), StepOptions(**options))
            nll.append(float(terms.nll))
    if make is GraphBackend:
        assert backend.description.endswith(", as a graph")
    return elbo.bnn.posterior.mean.detach(), nll


@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "bfloat16"])
def test_a_graph_has_the_masks_of_dropout_that_a_step_without_has(mixed: bool) -> None:
    means, nll = steps_of(GraphBackend, dropping, mixed=mixed)
    expected, said = steps_of(CompiledBackend, dropping, mixed=mixed)
    assert nll == pytest.approx(said, rel=1e-3 if mixed else 1e-5)
    assert torch.allclose(means, expected, rtol=0.0, atol=2e-3 if mixed else 1e-5)


def test_one_batch_of_another_size_is_an_ordinary_step() -> None:
    elbo = Task("gaussian").objective().to(DEVICE)
    backend = GraphBackend(elbo, torch.optim.Adam(elbo.parameters(), lr=1e-2))
    x, y = torch.randn(16, 20, dtype=torch.float64), torch.arange(16) % 5
    for size in (16, 16, 16, 16, 9, 16):
        inputs, targets = x[:size].to(DEVICE), y[:size].to(DEVICE)
        terms = backend.step(inputs, targets, StepOptions(batch_index=0))
        assert terms.outputs.shape == (1, size, 5)


def test_a_network_that_reads_from_the_device_is_not_captured() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(20, 5)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x)
            return -out if float(x.sum()) > 0 else out

    task = Task("gaussian", net=Branches)
    backend = check_agreement(task, make_backend)
    assert "but not captured: " in backend.description
    # Nothing is left of the capture: its generator would fail.
    assert len(set(torch.rand(20, device=DEVICE).tolist())) > 1
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
