"""fit(accumulate_batches=...): several minibatches for one step of the optimiser."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cases import Case
from tests.loops import loop_over
from tests.training.test_fit import CASE, N, Rates, loader
from tests.training.test_resume import NAME, CrashError, Stop, check_same_checkpoint, crash, ctrl_c
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer, RMSprop

from bayesify import ELBO, IVON, BayesianModule, LocalReparameterization, fit
from bayesify.datasets import TensorLoader
from bayesify.io import StorageError, read_tensors
from bayesify.training.history import History
from bayesify.training.schedules import cosine

pytestmark = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
EPOCHS, BATCH = 3, 5  # 22 data: minibatches of 5, 5, 5, 5 and 2
SMALL = partial(loader, BATCH)


def weights_of(elbo: ELBO) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in elbo.parameters()])


def by_hand(elbo: ELBO, optimizer: Optimizer, every: int) -> None:
    """Train in a loop of one's own; the last step of an epoch has fewer minibatches."""
    x, y = CASE.data(N)
    parts = list(torch.arange(N).split(BATCH))
    for _ in range(EPOCHS):
        for first in range(0, len(parts), every):
            together = parts[first : first + every]
            optimizer.zero_grad()
            for index in together:
                (elbo(x[index], y[index], kl_scale=1.0).loss / len(together)).backward()
            optimizer.step()


@loop_over("every", [2, 3, 5, 9])
@loop_over("backend", ["auto", "autograd"])
def test_it_is_the_loop_that_people_write(every: int, backend: Any) -> None:
    for estimator in (None, LocalReparameterization()):
        ours, theirs = (ELBO(CASE.bnn(), num_data=N) for _ in range(2))
        for each in (ours, theirs):
            each.bnn.estimator = estimator or each.bnn.estimator
        theirs.fused = backend == "auto"
        by_hand(theirs, Adam(theirs.parameters(), lr=0.05), every)
        fit(
            ours,
            SMALL(),
            epochs=EPOCHS,
            optimizer=partial(Adam, lr=0.05),
            accumulate_batches=every,
            backend=backend,
        )
        torch.testing.assert_close(weights_of(ours), weights_of(theirs), rtol=0.0, atol=1e-12)
        assert ours.step == theirs.step == EPOCHS * 5


@loop_over("optimizer", [RMSprop, "ivon"])
def test_any_optimizer_accumulates(optimizer: Any) -> None:
    case = Case("gaussian", "mean-field", "categorical")
    ours, theirs = (ELBO(case.bnn(), num_data=N) for _ in range(2))
    made = [
        IVON(each, lr=0.1) if optimizer == "ivon" else optimizer(each.parameters(), lr=0.05)
        for each in (ours, theirs)
    ]
    by_hand(theirs, made[1], 2)
    fit(ours, SMALL(), epochs=EPOCHS, optimizer=made[0], accumulate_batches=2)
    torch.testing.assert_close(weights_of(ours), weights_of(theirs), rtol=0.0, atol=1e-12)


def test_without_noise_it_is_one_large_minibatch() -> None:
    case = Case("gaussian", "delta", "categorical")
    small, large = (ELBO(case.bnn(), num_data=N) for _ in range(2))
    x, y = case.data(N)
    x, y = x[:20], y[:20]
    for each, size, every in ((small, 5, 2), (large, 10, 1)):
        each.num_data = 20
        data = TensorLoader(x, y, size, shuffle=True, seed=3)
        fit(each, data, epochs=4, optimizer=partial(SGD, lr=0.3), accumulate_batches=every)
    torch.testing.assert_close(weights_of(small), weights_of(large), rtol=0.0, atol=1e-12)


def test_a_schedule_counts_the_steps_of_the_optimizer() -> None:
    rates = Rates()
    elbo = ELBO(CASE.bnn(), num_data=N)
    options: dict[str, Any] = {"scheduler": cosine, "callback": rates, "epochs": 2}
    fit(elbo, SMALL(), optimizer=rates.factory, accumulate_batches=2, **options)
    seen = [each[0] for each in rates.rates]
    assert len(seen) == 10
    # A step after minibatches 2, 4 and 5 of each epoch: six in all, and the rate falls to 0.
    before = [0.5, *seen[:-1]]
    changed = [index for index in range(10) if seen[index] != before[index]]
    assert changed == [1, 3, 4, 6, 8, 9]
    assert abs(seen[-1]) < 1e-12


def run(folder: Path, **options: Any) -> tuple[ELBO, History]:
    elbo = ELBO(CASE.bnn(), num_data=N)
    inputs = {"epochs": EPOCHS, "accumulate_batches": 2, "checkpoint_dir": folder, "resume": True}
    return elbo, fit(elbo, SMALL(shuffle=True), scheduler=cosine, **{**inputs, **options})


def test_a_stopped_run_ends_its_step_and_is_resumed(tmp_path: Path) -> None:
    whole, rows = run(tmp_path / "whole")
    # Ctrl-C after the first of two minibatches ends after the second.
    places = [(ctrl_c, 1, 0, 2), (ctrl_c, 1, 1, 2), (ctrl_c, 0, 2, 4), (crash, 1, 2, 0)]
    for number, (action, epoch, batch, left_at) in enumerate(places):
        folder = tmp_path / str(number)
        with pytest.raises(KeyboardInterrupt if action is ctrl_c else CrashError):
            run(folder, callback=Stop(action, epoch, batch))
        assert read_tensors(folder / NAME)[1]["position"]["batch"] == left_at
        again, history = run(folder)
        assert torch.equal(weights_of(again), weights_of(whole))
        assert [row["nll"] for row in history] == [row["nll"] for row in rows]
        check_same_checkpoint(folder, tmp_path / "whole")


def test_a_resumed_run_accumulates_as_it_did(tmp_path: Path) -> None:
    run(tmp_path, epochs=1)
    with pytest.raises(StorageError, match="accumulate_batches is 3 here and 2 there"):
        run(tmp_path, accumulate_batches=3)
    with pytest.raises(StorageError, match="accumulate_batches is None here and 2 there"):
        run(tmp_path, accumulate_batches=1)


@loop_over("wrong", [0, -1, 1.5, True, None, "2"])
def test_a_number_of_minibatches_is_asked_for(wrong: Any) -> None:
    elbo = ELBO(CASE.bnn(), num_data=N)
    before = weights_of(elbo)
    kind, most = (TypeError, "a whole") if type(wrong) is not int else (ValueError, "at least 1")
    with pytest.raises(kind, match=f"accumulate_batches must be {most}"):
        fit(elbo, SMALL(), accumulate_batches=wrong)
    assert torch.equal(weights_of(elbo), before)


@loop_over("backend", ["compiled", "closed-form"])
def test_backends_that_update_at_each_minibatch_refuse(backend: Any) -> None:
    elbo = ELBO(CASE.bnn(), num_data=N)
    with pytest.raises(ValueError, match="several minibatches share a step; use backend="):
        fit(elbo, SMALL(), accumulate_batches=2, backend=backend)


def test_the_standard_deviations_derivative_is_that_of_the_mean_loss() -> None:
    # Of the last step of an epoch only, whose gradient is whole.
    rows = {}
    for every in (1, 5):
        torch.manual_seed(0)
        bnn: BayesianModule = Case("gaussian", "mean-field", "categorical").bnn()
        elbo = ELBO(bnn, num_data=N)
        [rows[every]] = fit(
            elbo,
            SMALL(),
            epochs=1,
            optimizer=partial(SGD, lr=1e-9),
            accumulate_batches=every,
            backend="autograd",
        )
    assert rows[5]["std_residual"] == pytest.approx(rows[1]["std_residual"], abs=1e-6)


class Short:
    """Says that it brings 5 minibatches, and brings fewer."""

    def __init__(self, brought: int) -> None:
        self.brought = brought

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        return iter(list(SMALL())[: self.brought])


def test_a_loader_that_brings_too_few_for_its_last_step_is_refused() -> None:
    for brought, every in ((4, 2), (3, 3), (4, 1)):
        fit(ELBO(CASE.bnn(), num_data=N), Short(brought), epochs=1, accumulate_batches=every)
    for brought, every in ((4, 3), (3, 2), (1, 5)):
        elbo = ELBO(CASE.bnn(), num_data=N)
        with pytest.raises(ValueError, match=f"length, or num_data, says, 5, got {brought},"):
            fit(elbo, Short(brought), epochs=1, accumulate_batches=every)
