"""Two networks as peers: an ensemble of five, and a last-layer Laplace approximation.

Both are trained alike: standardised columns and targets, Adam at rate 0.01 on minibatches of 100
for at most 100 epochs, each stopped early by a fifth of the rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from bayesify.module.networks import mlp
from bayesify.prediction import CategoricalPredictive, GaussianPredictive
from bayesify.reproduce.papers.tables.peers import GaussianNumbers, Probabilities
from bayesify.reproduce.papers.tables.sets import Array
from bayesify.tabular.model import TableNet

__all__ = ["EnsembleClasses", "EnsembleNumbers", "LaplaceClasses", "LaplaceNumbers"]

_MEMBERS = 5
_HIDDEN = (50,)
_EPOCHS, _PATIENCE, _BATCH, _RATE = 100, 10, 100, 0.01
#: Steps on the log evidence, for the precision of the prior and the noise.
_EVIDENCE_STEPS = 100
Loss = Callable[[Tensor, Tensor], Tensor]


class _Standard:
    """Shift and scale of columns; those that are constant become 0."""

    def __init__(self, values: Array) -> None:
        self.shift, scale = values.mean(0), values.std(0)
        self.scale = np.where(scale > 1e-9 * np.abs(self.shift), scale, 1.0)

    def __call__(self, values: Array) -> Tensor:
        return torch.tensor((values - self.shift) / self.scale, dtype=torch.float32)


def train_network(net: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss, seed: int) -> None:
    """Train a network in place, and keep the weights with the lowest loss of held-out rows.

    Args:
        net: the network.
        inputs: shape (N, F).
        targets: shape (N,).
        loss: mean loss of outputs and targets.
        seed: of the rows that are held out, and of the order of the others.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(inputs), generator=generator)
    held_out, given = order[: len(order) // 5], order[len(order) // 5 :]
    optimizer = torch.optim.Adam(net.parameters(), lr=_RATE)
    best, state, stale = float("inf"), deepcopy(net.state_dict()), 0
    for _ in range(_EPOCHS):
        for rows in given[torch.randperm(len(given), generator=generator)].split(_BATCH):
            optimizer.zero_grad()
            loss(net(inputs[rows]), targets[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            found = float(loss(net(inputs[held_out]), targets[held_out]))
        stale += 1
        if found < best:
            best, state, stale = found, deepcopy(net.state_dict()), 0
        if stale == _PATIENCE:
            break
    net.load_state_dict(state)


class _Ensemble:
    """Five networks of this library's architecture, from different initial values."""

    def __init__(self, seed: int) -> None:
        self.seeds = range(_MEMBERS * seed, _MEMBERS * (seed + 1))

    def train(
        self, build: Callable[[int], nn.Module], inputs: Array, targets: Tensor, loss: Loss
    ) -> None:
        self.columns, self.members = _Standard(inputs), [build(seed) for seed in self.seeds]
        for net, seed in zip(self.members, self.seeds, strict=True):
            train_network(net, self.columns(inputs), targets, loss, seed)

    @torch.no_grad()
    def outputs(self, inputs: Array) -> list[Tensor]:
        standard = self.columns(inputs)
        return [net(standard).double() for net in self.members]


class EnsembleNumbers(_Ensemble):
    """Five networks with a mean and a noise for each row (Lakshminarayanan et al. 2017)."""

    def fit(self, inputs: Array, targets: Array) -> Self:
        """Train on rows."""
        self.unit = _Standard(targets)
        features = inputs.shape[1]

        def build(seed: int) -> nn.Module:
            return TableNet(features, _HIDDEN, 1, noise="input-dependent", seed=seed)

        self.train(build, inputs, self.unit(targets), _gaussian_loss)
        return self

    def predictive(self, inputs: Array) -> GaussianPredictive:
        """Return the mixture of the members' Gaussians."""
        outputs = torch.stack(self.outputs(inputs))[:, :, 0]
        scale, shift = float(self.unit.scale), float(self.unit.shift)
        stds = F.softplus(outputs[..., 1])
        return GaussianPredictive(outputs[..., 0] * scale + shift, stds * scale)

    def predict_interval(self, inputs: Array, level: float) -> tuple[Array, Array]:
        """Return lower and upper ends of the central interval."""
        low, high = self.predictive(inputs).interval(level)
        return low.numpy(), high.numpy()


def _gaussian_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    mean, raw = outputs[:, 0].unbind(-1)
    return F.gaussian_nll_loss(mean, targets, F.softplus(raw).square())


class EnsembleClasses(_Ensemble):
    """Five networks for classes, whose probabilities are averaged."""

    def fit(self, inputs: Array, targets: Array) -> Self:
        """Train on rows."""
        shape = inputs.shape[1], _HIDDEN, int(targets.max()) + 1

        def build(seed: int) -> nn.Module:
            return TableNet(*shape, seed=seed)

        self.train(build, inputs, torch.tensor(targets), F.cross_entropy)
        return self

    def predictive(self, inputs: Array) -> CategoricalPredictive:
        """Return the averaged probabilities."""
        return CategoricalPredictive.from_logits(self.outputs(inputs))


def _last_layer(kind: str, net: nn.Module, inputs: Tensor, targets: Tensor) -> Any:
    """Return the Laplace approximation of a trained network's last layer, with its defaults.

    The precision of the prior and the noise of numbers maximise the evidence.
    """
    # laplace-torch and its dependencies warn of their own use of PyTorch.
    with warnings.catch_warnings(action="ignore"):
        from laplace import Laplace

        laplace = Laplace(net, kind)
        laplace.fit(DataLoader(TensorDataset(inputs, targets), batch_size=_BATCH))
        if kind == "classification":
            laplace.optimize_prior_precision(method="marglik")
            return laplace
        prior, noise = (torch.zeros(1, requires_grad=True) for _ in range(2))
        optimizer = torch.optim.Adam([prior, noise], lr=0.1)
        for _ in range(_EVIDENCE_STEPS):
            optimizer.zero_grad()
            (-laplace.log_marginal_likelihood(prior.exp(), noise.exp())).backward()
            optimizer.step()
        return laplace


class LaplaceNumbers(GaussianNumbers):
    """A network for numbers with a Laplace approximation of its last layer, by laplace-torch."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def fit(self, inputs: Array, targets: Array) -> Self:
        """Train on rows."""
        self.columns, self.unit = _Standard(inputs), _Standard(targets)
        x, y = self.columns(inputs), self.unit(targets)[:, None]
        net = mlp(inputs.shape[1], _HIDDEN, 1, seed=self.seed)
        train_network(net, x, y, F.mse_loss, self.seed)
        self.laplace = _last_layer("regression", net, x, y)
        return self

    def mean_and_std(self, inputs: Array) -> tuple[Array, Array]:
        """Return the mean and the standard deviation of each row."""
        with torch.no_grad():
            mean, variance = self.laplace(self.columns(inputs))
            std = (variance[:, 0, 0] + self.laplace.sigma_noise.item() ** 2).sqrt()
        scale, shift = float(self.unit.scale), float(self.unit.shift)
        return mean[:, 0].double().numpy() * scale + shift, std.double().numpy() * scale


class LaplaceClasses(Probabilities):
    """A network for classes with a Laplace approximation of its last layer, by laplace-torch."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def fit(self, inputs: Array, targets: Array) -> Self:
        """Train on rows."""
        self.columns = _Standard(inputs)
        x, y = self.columns(inputs), torch.tensor(targets)
        net = mlp(inputs.shape[1], _HIDDEN, int(targets.max()) + 1, seed=self.seed)
        train_network(net, x, y, F.cross_entropy, self.seed)
        self.laplace = _last_layer("classification", net, x, y)
        return self

    def predictive(self, inputs: Array) -> CategoricalPredictive:
        """Return the probabilities, by the probit approximation."""
        with torch.no_grad():
            probabilities = self.laplace(self.columns(inputs), link_approx="probit")
        return CategoricalPredictive.from_logits([probabilities.double().log()])
