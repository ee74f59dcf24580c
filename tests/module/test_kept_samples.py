"""Predictions in a row share their weight samples, and notice every change."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import bayesify as bf
from bayesify.distributions.posteriors import Delta, MeanFieldGaussian
from bayesify.module.kept_samples import KeptSamples
from bayesify.noise.keys import NoiseKey, Stream

KEY = NoiseKey(0, Stream.PREDICTION, 0)
X = torch.linspace(-1.0, 1.0, 24).view(6, 4)
S = 12


def made(width: int = 5) -> bf.BayesianModule:
    torch.manual_seed(0)
    return bf.BayesianModule(nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3)))


def mean_of(bnn: bf.BayesianModule, *, num_samples: int = S) -> Tensor:
    return bnn.predict(X, num_samples).mean


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The indices of the samples that are drawn."""
    drawn: list[int] = []
    fill = NoiseKey.fill_normals

    def count(key: NoiseKey, vector: Tensor, sample: int) -> None:
        drawn.append(sample)
        fill(key, vector, sample)

    monkeypatch.setattr(NoiseKey, "fill_normals", count)
    return drawn


@pytest.mark.parametrize("width", [5, 20_000])  # samples that share a pass, and a loop
def test_the_third_prediction_draws_nothing_and_is_the_same(width: int, draws: list[int]) -> None:
    bnn = made(width)
    first = mean_of(bnn)
    assert torch.equal(mean_of(bnn), first)
    assert len(draws) == 2 * S
    assert torch.equal(mean_of(bnn), first)
    assert len(draws) == 2 * S


def test_more_samples_are_added_to_those_that_are_kept(draws: list[int]) -> None:
    bnn = made()
    expected = mean_of(made(), num_samples=2 * S)
    for _ in range(3):
        mean_of(bnn)
    for _ in range(2):
        assert torch.equal(mean_of(bnn, num_samples=2 * S), expected)
    before = len(draws)
    assert torch.equal(mean_of(bnn, num_samples=2 * S), expected)
    assert len(draws) == before


def train_a_step(bnn: bf.BayesianModule) -> None:
    elbo = bf.ELBO(bnn, num_data=6)
    optimizer = torch.optim.SGD(elbo.parameters(), lr=0.1)
    elbo(X, torch.zeros(6, dtype=torch.long)).loss.backward()
    optimizer.step()


def write_data(bnn: bf.BayesianModule) -> None:
    bnn.posterior.mean.data.numpy()[0] += 1.0  # counted by no version


def write_rho(bnn: bf.BayesianModule) -> None:
    bnn.posterior.rho.data.numpy()[0] += 1.0


def remove_half(bnn: bf.BayesianModule) -> None:
    bnn.posterior.mask = torch.arange(bnn.layout.num_weights) % 2 == 0


CHANGES: list[Callable[[bf.BayesianModule], object]] = [
    train_a_step,
    write_data,
    write_rho,
    remove_half,
    lambda bnn: setattr(bnn, "seed", 7),
    lambda bnn: bnn.bfloat16(),
]


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_noticed(change: Callable[[bf.BayesianModule], object]) -> None:
    bnn, fresh = made(), made()
    before = [mean_of(bnn) for _ in range(3)][-1]
    for each in (bnn, fresh):
        change(each)
    x = X.to(bnn.layout.dtype)
    expected = fresh.predict(x, S).mean
    assert not torch.equal(expected.to(before.dtype), before)
    for _ in range(3):
        assert torch.equal(bnn.predict(x, S).mean, expected)


def test_another_seed_of_a_call_has_its_own_samples() -> None:
    bnn = made()
    expected = made().predict(X, S, seed=5).mean
    for _ in range(3):
        mean_of(bnn)
    for _ in range(3):
        assert torch.equal(bnn.predict(X, S, seed=5).mean, expected)


class Decaying(nn.Linear):
    """Edits its weights, unseen by autograd, at each pass."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.mul_(0.5)
        return super().forward(x)


class Growing(nn.Linear):
    """Edits only weights that are larger than all means."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.copy_(torch.where(self.weight > 1.0, 2.0 * self.weight, self.weight))
        return super().forward(x)


class Doubling(nn.Linear):
    """Edits its weights by an operation on a list."""

    def forward(self, x: Tensor) -> Tensor:
        torch._foreach_mul_([self.weight], 2.0)
        return super().forward(x)


@pytest.mark.parametrize("layer", [Decaying, Growing, Doubling])
@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_network_may_edit_what_it_gets(layer: type[nn.Linear], batch_size: int | None) -> None:
    torch.manual_seed(0)
    bnn = bf.BayesianModule(layer(4, 3), init_std=1.0)
    means = [bnn.predict(X, S, batch_size=batch_size).mean for _ in range(4)]
    assert all(torch.equal(mean, means[0]) for mean in means)
    before = bnn.posterior.mean.clone()
    bnn.predict_mean(X)
    assert torch.equal(bnn.posterior.mean, before)


def test_copies_and_pickles_hold_no_samples() -> None:
    bnn = made()
    size = len(pickle.dumps(bnn))
    for _ in range(3):
        mean_of(bnn)
    assert len(pickle.dumps(bnn)) < size + 2000
    assert torch.equal(mean_of(copy.deepcopy(bnn)), mean_of(bnn))


@pytest.mark.parametrize("free", [lambda bnn: bnn.train(), lambda bnn: bnn.to("cpu")])
def test_training_and_moving_free_the_samples(
    free: Callable[[bf.BayesianModule], object], draws: list[int]
) -> None:
    bnn = made()
    for _ in range(3):
        mean_of(bnn)
    free(bnn)
    before = len(draws)
    mean_of(bnn)
    assert len(draws) == before + S


def test_a_limit_of_memory_keeps_nothing(draws: list[int]) -> None:
    bnn = made()
    for number in range(1, 4):
        bnn.predict(X, S, max_memory="1 GB")
        assert len(draws) == number * S


def test_the_bytes_are_bounded() -> None:
    posterior, kept = MeanFieldGaussian(torch.zeros(4_000_000), std=0.1), KeptSamples()
    with torch.no_grad():
        kept.sampler(posterior, KEY, 100)
        draw = kept.sampler(posterior, KEY, 100)
        for sample in range(16):
            draw(range(sample, sample + 1))
        assert len(kept) == 14  # of 16 MB each, next to mean and rho
        kept.clear()
        large = MeanFieldGaussian(torch.zeros(6_000_000), std=0.1)
        for _ in range(2):
            kept.sampler(large, KEY, 1)(range(1))
    assert len(kept) == 0


def test_a_group_of_which_some_are_kept(draws: list[int]) -> None:
    posterior, kept = MeanFieldGaussian(torch.zeros(4_000_000), std=0.1), KeptSamples()
    with torch.no_grad():
        kept.sampler(posterior, KEY, 20)
        group = kept.sampler(posterior, KEY, 20)(range(12, 16))
        assert draws == [12, 13, 14, 15]
        for _ in range(2):
            draws.clear()
            assert torch.equal(kept.sampler(posterior, KEY, 20)(range(12, 16)), group)
            assert draws == [14, 15]
        draws.clear()
        expected = posterior.draw(posterior.noise(KEY, range(12, 16))).weights
    assert torch.equal(group, expected)


def test_a_point_needs_no_samples() -> None:
    kept, point = KeptSamples(), Delta(torch.ones(3))
    for _ in range(3):
        assert torch.equal(kept.sampler(point, KEY, 2)(range(2)), torch.ones(2, 3))
    assert len(kept) == 0
