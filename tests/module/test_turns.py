"""Threads that share a network run it one after another, each with its own weights."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.loops import loop_over
from torch import Tensor, nn

import bayesify as bf

X = torch.linspace(-1.0, 1.0, 36).reshape(12, 3)


class Meeting(nn.Module):
    """A layer at which a pass waits until a second thread has come, or a while."""

    here: threading.Barrier | None = None
    have_met = False

    def forward(self, x: Tensor) -> Tensor:
        if self.here is not None:
            try:
                self.here.wait(0.1)
                self.have_met = True
            except threading.BrokenBarrierError:
                self.here.reset()
        return x

    def __deepcopy__(self, memo: dict[int, object]) -> Meeting:
        return self  # so that the copy in a BayesianModule meets too


def network(**options: Any) -> tuple[bf.BayesianModule, Meeting]:
    meeting = Meeting()
    net = nn.Sequential(nn.Linear(3, 4), meeting, nn.Dropout(0.5), nn.Linear(4, 2))
    return bf.BayesianModule(net, **{"init_std": 1.0, **options}), meeting


def predicted(bnn: bf.BayesianModule, seed: int) -> Tensor:
    return bnn.predict(X, 1, seed=seed).mean


def scored(bnn: bf.BayesianModule, seed: int) -> Tensor:
    return bnn.log_prob(X, torch.zeros(12, dtype=torch.long), 1, seed=seed)


def run_with(bnn: bf.BayesianModule, seed: int) -> Tensor:
    found: Tensor = bnn.eval().run_with(torch.full_like(bnn.posterior.mean, 1.0 - seed), X)
    return found.detach()


def predicted_at_the_mean(bnn: bf.BayesianModule, seed: int) -> Tensor:
    """One thread predicts with samples, the other with the mean weights."""
    return bnn.predict(X, 1).mean if seed else bnn.predict_mean(X).mean


def both_at_the_mean(bnn: bf.BayesianModule, seed: int) -> Tensor:
    """The thread that is done first must not switch the other's dropout on."""
    return bnn.predict_mean(X + seed).mean


def certified(bnn: bf.BayesianModule, seed: int) -> Tensor:
    """One thread certifies, by local reparametrisation, while the other predicts."""
    if seed:
        return bnn.predict(X, 1).mean
    targets = torch.zeros(12, dtype=torch.long)
    return torch.tensor(bf.certify(bnn, X, targets, prior_indices=[0], num_samples=20).error)


USES: list[Callable[[bf.BayesianModule, int], Tensor]] = [
    predicted,
    scored,
    predicted_at_the_mean,
    both_at_the_mean,
    certified,
    run_with,
]


def in_threads(use: Callable[[Any, int], Tensor], shared: object) -> list[Tensor]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda seed: use(shared, seed), range(2)))


@loop_over("use", USES)
def test_threads_get_what_one_thread_gets(use: Callable[[bf.BayesianModule, int], Tensor]) -> None:
    bnn, meeting = network()
    alone = [use(bnn, seed) for seed in range(2)]
    mode = bnn.net.training
    meeting.here = threading.Barrier(2)
    for found, expected in zip(in_threads(use, bnn), alone, strict=True):
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
    assert not meeting.have_met
    assert bnn.net.training == mode


def test_passes_in_training_mode_have_noise_of_their_own() -> None:
    bnn, meeting = network()
    bnn.net[2].p = 0.0
    again = copy.deepcopy(bnn)
    alone = [again(X) for _ in range(2)]
    meeting.here = threading.Barrier(2)
    found = in_threads(lambda shared, _: shared(X), bnn)
    assert not meeting.have_met
    assert sorted(each.sum().item() for each in found) == sorted(
        each.sum().item() for each in alone
    )


def test_threads_share_a_frozen_network() -> None:
    bnn, meeting = network()
    frozen = bf.freeze(bnn, 3, estimator=bf.WeightSampling())
    inputs = [X, X + 1.0]
    alone = [frozen(each).mean for each in inputs]
    meeting.here = threading.Barrier(2)
    found = in_threads(lambda shared, number: shared(inputs[number]).mean, frozen)
    assert not meeting.have_met
    torch.testing.assert_close(found, alone, rtol=0.0, atol=0.0)


def test_threads_share_the_passes_of_mc_dropout() -> None:
    bnn, meeting = network(posterior=bf.Delta, init_std=None)
    dropout = bf.MCDropout(bnn)
    alone = [dropout.predict(X, 2, seed=seed).mean for seed in range(2)]
    meeting.here = threading.Barrier(2)
    found = in_threads(lambda shared, seed: shared.predict(X, 2, seed=seed).mean, dropout)
    assert not meeting.have_met
    torch.testing.assert_close(found, alone, rtol=0.0, atol=0.0)


def test_copies_and_pickles_do_not_wait_for_the_original() -> None:
    bnn = bf.BayesianModule(nn.Linear(3, 2))
    copies = [copy.deepcopy(bnn), pickle.loads(pickle.dumps(bnn))]
    with bnn.in_turn(), ThreadPoolExecutor(1) as pool:
        for each in copies:
            assert pool.submit(each.predict, X, 1).result(timeout=10.0).mean.shape == (12, 2)


def test_two_networks_predict_at_once() -> None:
    both = [network()[0] for _ in range(2)]
    alone = [bnn.predict(X, 20).mean for bnn in both]
    found = in_threads(lambda shared, number: shared[number].predict(X, 20).mean, both)
    torch.testing.assert_close(found, alone, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("what", ["save", "deepcopy", "prune", "state_dict", "ensemble"])
def test_a_network_is_copied_between_the_passes_of_another_thread(
    what: str, tmp_path: Path
) -> None:
    bnn = bf.BayesianModule(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    names, x, stop = list(bnn.state_dict()), torch.randn(2000, 4), threading.Event()

    def predict() -> None:
        number = 0
        while not stop.is_set():
            bnn.predict(x, 10, seed=(number := number + 1))

    thread = threading.Thread(target=predict)
    thread.start()
    try:
        for _ in range(20):
            if what == "save":
                bf.save(bnn, tmp_path / "m")
                found = bf.load(tmp_path / "m", bnn.to_module()).state_dict()
            elif what == "ensemble":
                bf.DeepEnsemble([bnn]).save(tmp_path / "e")
                [member] = bf.DeepEnsemble.load(tmp_path / "e", bnn.to_module()).members
                found = member.state_dict()
            elif what == "prune":
                found = bf.prune(bnn, 0.5).state_dict()
                found.pop("posterior.mask", None)
            else:
                found = (copy.deepcopy(bnn) if what == "deepcopy" else bnn).state_dict()
            assert list(found) == names
    finally:
        stop.set()
        thread.join()


def test_networks_of_their_own_run_at_the_same_time() -> None:
    """What they share, the memory of passes with one seed, may change while it is read."""
    interval = sys.getswitchinterval()

    def call(number: int) -> None:
        bnn = bf.BayesianModule(nn.Linear(1, 1), seed=9_000 + number)
        for _ in range(1000):
            bnn(torch.zeros(1, 1))

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(call, range(4)))
    finally:
        sys.setswitchinterval(interval)
