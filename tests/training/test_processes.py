"""``fit`` in two processes: the same minibatches, the sum of the gradients, equal weights."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from tests.ranks import run_ranks
from tests.training import two_processes
from tests.training.two_processes import (
    EPOCHS,
    FITS,
    LIMIT,
    RANKS,
    STEPS,
    N,
    data,
    fitted,
    new_bnn,
    parameters_of,
    stepped,
)
from torch import Tensor, distributed
from torch.optim import SGD

import bayesify as bf
from bayesify.training import ConvergenceWarning
from bayesify.training.backends import StepOptions, make_backend
from bayesify.training.division import part_of
from bayesify.training.processes import Processes

Results = list[dict[str, Any]]
#: Trainings whose two processes have no noise of their own.
AS_ONE = [name for name in FITS if name.startswith(("point", "DataLoader", "shared"))]
#: Columns of the history.
ROW = ("loss", "nll", "kl", "free_energy", "train_error", "validation_error", "validation_nll")
pytestmark = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()),
    reason="this torch has no gloo",
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What rank 0 and rank 1 measured."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(lambda rank: [sys.executable, two_processes.__file__, str(rank), str(folder)], LIMIT)
    return [
        {
            **load_file(folder / f"{rank}.safetensors"),
            **json.loads((folder / f"{rank}.json").read_text()),
        }
        for rank in RANKS
    ]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


def near(value: float | None, expected: float | None, limit: float) -> bool:
    if value is None or expected is None:
        return value is expected
    return abs(value - expected) <= limit * max(1.0, abs(expected))


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def as_rank(case: str, size: int, rank: int, noise_of: int) -> tuple[Tensor, float]:
    """A rank's step in a process that is alone, with the noise of a rank."""
    x, y = data()
    inputs, targets, _ = part_of(x[:size], y[:size], rank, 2)
    noise_of = 0 if STEPS[case][-1] else noise_of
    with (
        mock.patch("bayesify.training.processes.process_rank", return_value=noise_of),
        mock.patch("bayesify.training.elbo.process_rank", return_value=noise_of),
    ):
        return stepped(case, inputs, targets, None, Processes())


def in_one_process(case: str, size: int, noise_of: tuple[int, int]) -> tuple[Tensor, float]:
    """The mean of the two ranks' steps, weighted by their examples."""
    found = [as_rank(case, size, rank, noise_of[rank]) for rank in RANKS]
    weights = [size // 2 / size, 1.0 - size // 2 / size]
    (one, nll), (other, other_nll) = found
    return weights[0] * one + weights[1] * other, weights[0] * nll + weights[1] * other_nll


@pytest.mark.parametrize("case", STEPS)
def test_a_step_is_the_mean_of_the_ranks_steps(case: str, results: Results) -> None:
    estimated = "mixture" in case
    for size in (8,) if estimated else (8, 9):  # an estimated KL counts each rank's alike
        expected, nll = in_one_process(case, size, (0, 1))
        for result in results:
            assert distance(result[f"{case}, {size}"], expected) < 1e-12
            assert abs(result[f"{case}, {size}, nll"] - nll) < 1e-12
    assert torch.equal(results[0][f"{case}, 9"], results[1][f"{case}, 9"])
    # The same check catches noise that all ranks have in common, and a rank without any.
    fault = in_one_process(case, 8, (0, 0))[0]
    caught = distance(results[0][f"{case}, 8"], fault)
    assert caught < 1e-12 if "shared" in case else caught > 1e-4


@pytest.mark.parametrize("name", AS_ONE)
def test_without_noise_of_their_own_two_processes_are_one(name: str, results: Results) -> None:
    if name == "DataLoader" or name.endswith("closed-form"):
        torch.manual_seed(5)  # which the order must not depend on
    elbo, history = fitted(name, **({"shared_noise": False} if "shared" in name else {}))
    for result in results:
        assert distance(result[name], parameters_of(elbo)) < 1e-10
        for row, expected in zip(result[f"{name}, rows"], history, strict=True):
            for column in ROW:
                assert near(row[column], expected[column], 1e-9), column


@pytest.mark.parametrize("name", FITS)
def test_the_processes_end_with_the_same_weights_and_history(name: str, results: Results) -> None:
    zero, one = results
    assert torch.equal(zero[name], one[name])
    rows = [
        [{k: v for k, v in row.items() if "second" not in k} for row in result[f"{name}, rows"]]
        for result in results
    ]
    assert rows[0] == rows[1]
    assert zero[f"{name}, rows"][-1]["train_error"] < 40.0
    if name.startswith("own"):
        alone = parameters_of(fitted(name)[0])
        assert distance(zero[name], alone) > 1e-3, "the second rank's noise is missing"


def test_ctrl_c_in_one_process_stops_both_and_the_rest_is_the_same(results: Results) -> None:
    for result in results:
        assert torch.equal(result["interrupted"], result["own, compiled"])
        rows = result["interrupted, rows"], result["own, compiled, rows"]
        for row, expected in zip(*rows, strict=True):
            for column in set(row) - {"seconds", "data_per_second"}:
                assert near(row[column], expected[column], 1e-12)
    assert results[0]["interrupted at"] == results[1]["interrupted at"]


def test_statistics_are_averaged_and_dropout_differs(results: Results) -> None:
    zero, one = results
    assert torch.equal(zero["normalised"], one["normalised"])
    assert torch.equal(zero["statistics"], one["statistics"])
    assert distance(zero["drawn by the network"], one["drawn by the network"]) > 0.01


def test_every_validation_example_counts_once(results: Results) -> None:
    for result in results:
        assert near(result["validation, shuffled"], result["validation, in order"], 1e-9)


def test_the_edges_of_loaders_objectives_and_buffers(results: Results) -> None:
    zero, one = results
    assert zero["endless"] == one["endless"]
    assert torch.equal(zero["own buffer"], one["own buffer"])
    assert float(zero["own buffer"].abs().max()) > 0.0
    assert zero["stopped at the end"]
    assert one["stopped at the end"]


def test_a_step_of_ones_own_loop_adds_up_the_gradients(results: Results) -> None:
    x, y = data()
    steps = []
    for rank in RANKS:
        elbo = bf.ELBO(new_bnn(), num_data=N)
        with mock.patch("bayesify.training.processes.process_rank", return_value=rank):
            made = make_backend(elbo, SGD(elbo.parameters(), lr=1.0), processes=Processes())
        before = parameters_of(elbo)
        made.step(
            x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4], StepOptions(batch_index=0)
        )
        steps.append(parameters_of(elbo) - before)
    for result in results:
        assert distance(result["own loop"], (steps[0] + steps[1]) / 2) < 1e-12


def test_geometric_weights_count_the_examples_of_all(results: Results) -> None:
    x, y = data()
    elbo = bf.ELBO(new_bnn(), num_data=8, kl_weighting="geometric", num_batches=3)
    whole = elbo(x[:8], y[:8], batch_index=1).kl_factor
    for result in results:
        assert result["geometric"] == pytest.approx(whole, rel=1e-12)


def test_another_number_of_processes_may_resume(results: Results) -> None:
    zero, one = results
    assert torch.equal(zero["resumed"], one["resumed"])
    assert zero["resumed, epochs"] == EPOCHS
    assert any("resumed by 2 processes instead of 1" in note for note in zero["resumed, notes"])
    assert not any("resumed by" in note for note in one["resumed, notes"])


ERRORS = {
    "sampler": "ValueError: fit divides each minibatch among the processes, but the loader's Dist",
    "order": "ValueError: the order of the data must be the same in all processes",
    "order of a DataLoader": "ValueError: the order of the data must be the same",
    "epochs": "ValueError: the epochs must be the same in all processes, got 1 in proc",
    "seed": "ValueError: the seed must be the same in all processes, got 0 in process 0, 1 in pr",
    "shared, flipout": "ValueError: shared_noise needs weight sampling by the compiled or closed",
    "shared, autograd": "ValueError: shared_noise needs weight sampling",
    "checkpoint": "ValueError: the position must be the same in all processes, got epoch 1, mini",
    "pac-bayes": "ValueError: PACBayesObjective carries values from minibatch to minibatch",
    "replicas": "ValueError: fit_replicas trains in one process, but torch.distributed has 2",
    "rate": "ValueError: the lr must be the same in all processes, got [0.1, 0.1] in process 0",
    "warm-up": "ValueError: the kl_warmup_epochs must be the same in all processes, got 0 in",
    "likelihood": "ValueError: the likelihood must be the same in all processes, got Gaussian",
    "prior": "ValueError: the prior must be the same in all processes, got Cauchy {'scale': '1.0'",
    "temperature": "ValueError: the temperature must be the same in all processes, got 1.0 in proc",
    "state": "ValueError: the state of the optimizer must be the same in all processes",
    "network": "ValueError: the network must be the same in all processes, got {'bnn.post",
    "shared in one": "ValueError: the shared_noise must be the same in all processes, got True in",
    "shared no more": "ValueError: this run began with shared_noise=True; resume with tha",
    "validation": "ValueError: fit divides each minibatch among the processes, but the loader's",
    "strings": "ValueError: to divide a minibatch among processes, its inputs must be ten",
    "step": "ValueError: the settings of the optimizer must be the same in all processes",
    "sharded": "ValueError: each process must hold whole parameters, but bnn.posterior.mean is sh",
    "rows": "ValueError: to divide a minibatch among processes, its inputs must be ten",
}


@pytest.mark.parametrize("name", ERRORS)
def test_every_process_gets_the_error(name: str, results: Results) -> None:
    for result in results:
        assert result[f"error, {name}"].startswith(ERRORS[name]), result[f"error, {name}"]


@pytest.mark.parametrize("backend", ["compiled", "closed-form", "autograd"])
def test_nan_in_one_process_is_seen_by_both(backend: str, results: Results) -> None:
    for result in results:
        assert "step" in result[f"error, nan, {backend}"]
        assert float(result["after nan"].abs().max()) == 0.0


def test_parts_are_of_nearly_equal_sizes_and_make_up_the_minibatch() -> None:
    for whole in range(1, 20):
        for count in range(1, 6):
            x = torch.arange(whole)
            parts = [part_of({"x": x, "none": None}, x, rank, count) for rank in range(count)]
            sizes = [round(share.weight * whole) for _, _, share in parts]
            assert sum(sizes) == whole
            assert max(sizes) - min(sizes) <= 1
            rows = [t.tolist() for _, t, share in parts if share.weight > 0.0]
            assert [row for part in rows for row in part] == x.tolist()
            assert all(len(targets) >= 1 for _, targets, _ in parts)


@pytest.mark.parametrize("workers", [0, 1])
def test_each_process_loads_its_part_with_augmentation_of_its_own(
    workers: int, results: Results
) -> None:
    names = f"augmented by {workers}", f"augmented by {workers}, targets"
    (zero, first), (one, second) = ([result[name] for name in names] for result in results)
    assert sorted([*first, *second]) == list(range(10))
    sources = range(3) if workers else range(1)  # Python's and NumPy's are not fit's to seed
    for source in sources:
        assert not torch.isin(zero[2:, source], one[2:, source]).any()


def test_nothing_hangs_when_a_process_fails() -> None:
    programs = ["import time; time.sleep(60)", "raise RuntimeError('planted')"]
    started = time.monotonic()
    with pytest.raises(AssertionError, match="planted"):
        run_ranks(lambda rank: [sys.executable, "-c", programs[rank]], limit=50)
    with pytest.raises(AssertionError, match="ended with"):
        run_ranks(lambda _: [sys.executable, "-c", programs[0]], limit=0.2)
    assert time.monotonic() - started < 40
