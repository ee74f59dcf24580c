"""Networks for which a PAC-Bayes bound would not hold: statistics of training, mixed examples."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.training.test_certificate import at_prior
from torch import Tensor, nn

import bayesify as bf
from bayesify.metrics import sampled_error
from bayesify.training.certifiable import check_certifiable


def test_collected_statistics_of_single_examples_are_refused_too() -> None:
    net = nn.Sequential(nn.Conv1d(1, 3, 3), nn.InstanceNorm1d(3, track_running_stats=True))
    bnn = bf.BayesianModule(net, prior=bf.Gaussian(0.1), prior_mean="initial")
    with pytest.raises(ValueError, match="statistics that training collects, as 1 does"):
        check_certifiable(bnn)


class RunningMean(nn.Module):
    """Centres by a running mean of training, or by the buffer that each pass fills anew."""

    def __init__(self, *, collects: bool) -> None:
        super().__init__()
        self.collects = collects
        self.register_buffer("centre", torch.zeros(3))
        self.register_buffer("rotation", torch.eye(3).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        if not self.collects:
            self.centre = x.detach().mean(0)
        elif self.training:
            self.centre = self.centre.lerp(x.detach().mean(0), 0.1)
        return (self.rotation @ (x - self.centre if self.collects else x).T).T


def test_statistics_of_a_layer_of_ones_own_are_refused() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(40, 3), torch.zeros(40).long()
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
    for layer, name in (
        (RunningMean(collects=True), r"0\.centre"),
        (spectral, r"0\.parametrizations\.weight\.0\._u"),
    ):
        bnn = at_prior(nn.Sequential(layer, nn.Linear(3, 2)))
        before, state = copy.deepcopy(bnn.state_dict()), torch.get_rng_state()
        with pytest.raises(ValueError, match=f"training mode changes the buffer {name}; compute"):
            bf.certify(bnn, x, y, prior_indices=(), num_samples=10)
        torch.testing.assert_close(bnn.state_dict(), before, rtol=0.0, atol=0.0)
        assert torch.equal(torch.get_rng_state(), state)
    frozen = RunningMean(collects=True).eval()
    for layer in (frozen, RunningMean(collects=False)):
        bnn = at_prior(nn.Sequential(layer, nn.Linear(3, 2)))
        assert bf.certify(bnn, x, y, prior_indices=(), num_samples=10).num_examples == 40


class InTraining(nn.Module):
    """Sets its buffer, of zeros, in training mode."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.register_buffer("kept", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.kept = self.change(self.kept, x.detach())
        return x + self.kept


def test_a_buffer_that_training_changes_without_the_data_is_allowed() -> None:
    x, y = torch.rand(40, 3), torch.zeros(40).long()
    x[:, 0] = 1.0  # a feature that all examples have in common

    def certified(change: Callable[[Tensor, Tensor], Tensor]) -> int:
        bnn = at_prior(nn.Sequential(InTraining(change), nn.Linear(3, 2)))
        return bf.certify(bnn, x, y, prior_indices=(), num_samples=10).num_examples

    assert certified(lambda kept, _: kept + 1) == 40
    assert certified(lambda kept, _: kept + torch.rand(3)) == 40
    assert certified(lambda kept, x: kept + x.view(4, -1, 3).shape[0]) == 40
    for statistic in (lambda _, x: x.amax(0), lambda _, x: x[:, :1].mean(0).expand(3)):
        with pytest.raises(ValueError, match=r"training mode changes the buffer 0\.kept"):
            certified(statistic)
    with pytest.raises(ValueError, match=r"it failed on 40 examples, .*shape '.7, -1, 3.' is"):
        certified(lambda _, x: x.view(7, -1, 3).mean((0, 1)))


def test_a_prediction_that_depends_on_the_batch_is_refused() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False))
    bnn = bf.BayesianModule(net, prior=bf.Gaussian(0.1), prior_mean="initial", include=("0.*",))
    bnn.net[1].requires_grad_(False)
    with pytest.raises(ValueError, match="but 1 normalises each by the others of its batch"):
        check_certifiable(bnn)
    net = nn.Sequential(nn.Conv1d(1, 3, 3), nn.InstanceNorm1d(3))
    check_certifiable(bf.BayesianModule(net, prior=bf.Gaussian(0.1), prior_mean="initial"))


class Mixing(nn.Module):
    """A network that computes the logits of an example from the whole batch."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.mix = nn.Linear(3, 2), mix

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.layer(x))


@pytest.mark.parametrize(
    "mix",
    [
        nn.Softmax(dim=0),
        lambda h: h - h.mean(0),
        lambda h: torch.nn.functional.batch_norm(h, None, None, training=True),
        lambda h: (h - h.mean(0)) / h.std(0),
        lambda h: h.softmax(0).masked_fill(torch.tensor([False, True]), -1e9),
        lambda h: torch.where(h > 1.0, h - h.mean(0), h),  # of few examples
    ],
)
def test_a_network_that_mixes_the_examples_of_a_batch_is_refused(mix: Any) -> None:
    torch.manual_seed(0)
    bnn, x, y = at_prior(Mixing(mix)), torch.randn(400, 3), torch.zeros(400).long()
    message = (
        r"depend on the others of its batch: they are \[.* 2 and \[.*\] in one of 400; compute"
    )
    with pytest.raises(ValueError, match=message):
        bf.certify(bnn, x, y, prior_indices=(), num_samples=3000)
    with pytest.raises(ValueError, match=message):
        sampled_error(bnn, x, y, num_samples=2)


def rare_noise(h: Tensor) -> Tensor:
    return torch.where(torch.rand(len(h), 1) < 0.3, -h, h)


def test_noise_of_the_network_and_masked_classes_do_not_count_as_mixing() -> None:
    torch.manual_seed(0)
    mask = torch.tensor([False, True])
    for mix in (
        nn.Softmax(dim=-1),
        torch.rand_like,
        rare_noise,
        lambda h: h.masked_fill(mask, -math.inf),
    ):
        bnn, x = at_prior(Mixing(mix)), torch.randn(40, 3)
        assert 0.0 <= sampled_error(bnn, x, torch.zeros(40).long(), num_samples=100) <= 100.0


def test_examples_without_a_class_do_not_count_as_predicted_rightly() -> None:
    bnn = at_prior(nn.Linear(3, 2), likelihood=bf.CategoricalLikelihood(ignore_index=-100))
    with pytest.raises(ValueError, match=r"got a likelihood with ignore_index=-100; leave the"):
        bf.PACBayesObjective(bnn, num_data=40)
