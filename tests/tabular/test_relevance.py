"""The hyperprior of relevance: its gradient, once a step, and what it is for."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.backend_cases import needs_compiler
from tests.ranks import run_ranks, together
from torch import distributed

from bayesify import ELBO, BayesianModule, Gaussian, StreamingELBO, WeightSampling, make_step
from bayesify.sklearn import BayesianMLPClassifier, BayesianMLPRegressor
from bayesify.tabular.model import TableNet
from bayesify.tabular.relevance import sparse_relevance
from bayesify.training.backends import BackendName, StepOptions
from bayesify.training.backends.graph import GraphBackend

N, RATE = 40, 0.5


def objective(inputs: int, kind: Any = ELBO, **options: Any) -> ELBO:
    net = TableNet(inputs, (4,), 1, relevance=True)
    bnn = BayesianModule(
        net, prior=Gaussian(1.0), exclude=["log_*"], estimator=WeightSampling(), seed=0
    )
    made: ELBO = kind(bnn, num_data=N, **options)
    return made


def pull(elbo: ELBO, backend: BackendName = "autograd", steps: int = 1) -> torch.Tensor:
    """What the steps subtract from the logarithms of the factors, all of which start at 0.

    Inputs of 0 leave them alone.
    """
    factors = elbo.bnn.get_parameter("net.log_relevance")
    step = make_step(elbo, torch.optim.SGD(elbo.parameters(), lr=RATE), backend=backend)
    for _ in range(steps):
        step(torch.zeros(5, len(factors)), torch.zeros(5, dtype=torch.long))
    return -factors.detach()


def expected(inputs: int, steps: int = 1, weight: float = 1.0) -> float:
    scale, log_factor = 50.0 / (inputs - 100), 0.0
    for _ in range(steps):
        factor = np.exp(log_factor)
        log_factor -= RATE * weight * 2.0 * factor / (scale + factor) / N
    return -log_factor


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize(
    "backend", ["autograd", "closed-form", pytest.param("compiled", marks=needs_compiler)]
)
def test_each_step_follows_the_density_once(backend: BackendName, samples: int) -> None:
    elbo = objective(150, num_samples=samples)
    with sparse_relevance(elbo):
        found = pull(elbo, backend, steps=3)
    torch.testing.assert_close(found, torch.full((150,), expected(150, 3)))


def test_a_captured_graph_follows_it() -> None:
    """A graph repeats the operations of its capture, without the hook's Python."""
    elbo, captured = objective(150), []
    factors = elbo.bnn.get_parameter("net.log_relevance")

    def record(passes: Callable[[], None]) -> Callable[[], None]:
        passes()
        assert factors.grad is not None
        captured.append(RATE * factors.grad)
        return passes

    backend = GraphBackend(
        elbo, torch.optim.SGD(elbo.parameters(), lr=RATE), record, compiled=False
    )
    with sparse_relevance(elbo):
        for _ in range(4):
            backend.step(
                torch.zeros(5, 150), torch.zeros(5, dtype=torch.long), StepOptions(batch_index=0)
            )
    (gradient,) = captured
    torch.testing.assert_close(gradient, torch.full((150,), expected(150, 4) - expected(150, 3)))


@pytest.mark.parametrize("backend", ["autograd", "closed-form"])
def test_a_resumed_step_follows_it_once(backend: BackendName) -> None:
    elbo = objective(150, num_samples=2)
    with sparse_relevance(elbo):
        elbo.step = 7  # as from a checkpoint
        torch.testing.assert_close(pull(elbo, backend), torch.full((150,), expected(150)))


def test_the_slope_is_that_of_the_density() -> None:
    scale, logarithm = 50.0 / 200.0, torch.tensor(0.0, requires_grad=True)
    density = (1.0 + logarithm.exp() / scale) ** -2 / scale
    (slope,) = torch.autograd.grad(-density.log(), logarithm)
    assert expected(300) == pytest.approx(RATE * float(slope) / N)


def test_a_cold_objective_counts_it_as_its_kl() -> None:
    elbo = objective(150, temperature=0.5)
    with sparse_relevance(elbo):
        torch.testing.assert_close(pull(elbo), torch.full((150,), expected(150, weight=0.5)))


@pytest.mark.slow
@pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()),
    reason="this torch has no gloo",
)
def test_two_processes_follow_it_as_one(tmp_path: Path) -> None:
    run_ranks(lambda rank: [sys.executable, __file__, str(rank), str(tmp_path)], 60.0)
    for rank in range(2):
        found = torch.tensor(json.loads((tmp_path / f"{rank}.json").read_text()))
        torch.testing.assert_close(found, torch.full((150,), expected(150, 3)))


@pytest.mark.parametrize(
    ("inputs", "kind", "options"),
    [(100, ELBO, {}), (150, StreamingELBO, {"num_before": 0}), (150, ELBO, {"temperature": 0.0})],
)
def test_nothing_changes_otherwise(inputs: int, kind: Any, options: dict[str, Any]) -> None:
    elbo = objective(inputs, kind, **options)
    with sparse_relevance(elbo):
        assert not pull(elbo).any()


def test_it_ends_with_the_block() -> None:
    elbo = objective(150)
    with sparse_relevance(elbo):
        pass
    assert not pull(elbo).any()


def table(rows: int, seed: int) -> tuple[Any, Any]:
    """Of 300 columns two matter."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 300))
    return x, x[:, 0] - x[:, 1] + 0.5 * rng.normal(size=rows)


@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
def test_few_of_many_columns_are_found_and_intervals_hold() -> None:
    x, y = table(200, seed=0)
    new, targets = table(1000, seed=1)
    model = BayesianMLPRegressor((10,), steps=1000, random_state=0).fit(x, y)
    low, high = model.predict_interval(new, 0.9)
    # Without the hyperprior .62 and 77 %; the noise is .5.
    assert np.sqrt(np.mean((model.predict(new) - targets) ** 2)) < 0.57
    assert np.mean((low <= targets) & (targets <= high)) > 0.82
    assert model.relevance_[:2].min() > 5.0 * model.relevance_[2:].max()


@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
def test_few_of_many_columns_tell_the_class() -> None:
    x, y = table(200, seed=0)
    new, targets = table(1000, seed=1)
    model = BayesianMLPClassifier((10,), steps=500, random_state=0).fit(x, y > 0.0)
    p = model.predict_proba(new)[:, 1]
    # Without the hyperprior .37 nats and 85 %.
    assert -np.mean(np.log(np.where(targets > 0.0, p, 1.0 - p))) < 0.3
    assert np.mean((p > 0.5) == (targets > 0.0)) > 0.875


if __name__ == "__main__":  # what each of two processes runs
    number, folder = int(sys.argv[1]), Path(sys.argv[2])
    with together(number, folder, 30.0):
        own = objective(150)
        with sparse_relevance(own):
            moved = pull(own, "closed-form", steps=3)
        (folder / f"{number}.json").write_text(json.dumps(moved.tolist()))
