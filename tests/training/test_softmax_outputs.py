"""Warnings of outputs that are probabilities where logits are needed."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import bayesify as bf
from bayesify.training import ConvergenceWarning, SigmoidOutputWarning, SoftmaxOutputWarning


def train(
    *layers: nn.Module,
    size: int = 3,
    positions: tuple[int, ...] = (),
    epochs: int = 1,
    num_samples: int = 1,
) -> list[str]:
    """Train a network that ends in these layers, and return what it warned of."""
    x, y = torch.randn(24, *positions, 2), torch.zeros(24, *positions, dtype=torch.long)
    net = nn.Sequential(nn.Linear(2, size), *layers)
    elbo = bf.ELBO(bf.BayesianModule(net), num_data=24, num_samples=num_samples)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SoftmaxOutputWarning)
        warnings.simplefilter("ignore", ConvergenceWarning)
        bf.fit(elbo, [(x[:12], y[:12]), (x[12:], y[12:])], epochs=epochs, progress=False)
    return [str(each.message) for each in caught if each.category is SoftmaxOutputWarning]


def test_a_softmax_of_its_own_is_reported_once() -> None:
    found = train(nn.Softmax(-1), epochs=2, num_samples=2)
    assert len(found) == 1
    assert "sum to 1 over the 3 classes, as after a softmax; leave nn.Softmax out" in found[0]
    assert "no probability is above 0.576" in found[0]  # e / (e + 2)


def test_so_is_one_over_the_classes_of_each_position() -> None:
    assert len(train(nn.Softmax(-1), positions=(5,))) == 1


@pytest.mark.parametrize("layer", [nn.Identity(), nn.LogSoftmax(-1), nn.Sigmoid(), nn.Softmax(0)])
def test_other_outputs_are_not(layer: nn.Module) -> None:
    assert train(layer) == []


def train_labels(*layers: nn.Module, likelihood: bf.Likelihood | None = None) -> list[str]:
    x, y = torch.randn(24, 2), torch.zeros(24, 3)
    net = nn.Sequential(nn.Linear(2, 3), *layers)
    bnn = bf.BayesianModule(net, likelihood=likelihood or bf.BernoulliLikelihood())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SigmoidOutputWarning)
        warnings.simplefilter("ignore", ConvergenceWarning)
        bf.fit(bf.ELBO(bnn, num_data=24), [(x, y)], epochs=2, progress=False)
    return [str(each.message) for each in caught if each.category is SigmoidOutputWarning]


def test_a_sigmoid_of_its_own_is_reported_once() -> None:
    (found,) = train_labels(nn.Sigmoid())
    assert "it ends in nn.Sigmoid; leave it out" in found
    assert torch.sigmoid(torch.tensor(1.0)).item() == pytest.approx(0.731, abs=5e-4)


@pytest.mark.parametrize("layer", [nn.Hardtanh(0.0, 1.0), nn.Sequential(nn.Sigmoid(), nn.Tanh())])
def test_other_outputs_from_0_to_1_are_not(layer: nn.Module) -> None:
    assert train_labels(layer) == []


class Hidden(nn.Sequential):
    """Logits of 0.5, and a sigmoid that is registered last and used before."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 3)
        nn.init.zeros_(self.last.weight)
        nn.init.constant_(self.last.bias, 0.5)
        self.act = nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.last(self.act(x))
        return outputs


class Wrapped(nn.Module):
    """A network of one's own, whose order of calls is not known."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Hidden()
        self.act = self.net.act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.net(x)
        return outputs


@pytest.mark.parametrize("net", [Hidden(), Wrapped()])
def test_a_sigmoid_that_is_not_last_is_not(net: nn.Module) -> None:
    assert train_labels(net) == []


def test_a_sigmoid_under_another_likelihood_is_not() -> None:
    assert train_labels(nn.Sigmoid(), likelihood=bf.GaussianLikelihood()) == []


def test_a_single_class_is_not() -> None:
    assert train(nn.Softmax(-1), size=1) == []
