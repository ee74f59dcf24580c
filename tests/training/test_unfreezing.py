"""Layers that are frozen at first: trained later, saved and resumed as they were."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

import bayesify as bf
from bayesify.datasets import TensorLoader
from bayesify.training.history import EpochRow

pytestmark = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")

DATA = torch.Generator().manual_seed(0)
X = torch.randn(32, 4, generator=DATA)
Y = torch.randint(3, (32,), generator=DATA)


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Tanh(), nn.Linear(4, 3))


class Thaw(bf.Callback):
    """Trains the first layer, too, once so many epochs are over."""

    def __init__(self, bnn: bf.BayesianModule, after: int = 1) -> None:
        self.bnn, self.after = bnn, after

    def on_epoch(self, row: EpochRow) -> None:
        if row["epoch"] == self.after:
            self.bnn.net[0].requires_grad_(True)


@pytest.mark.parametrize("backend", ["auto", "closed-form", "autograd"])
def test_a_body_that_is_trained_from_some_epoch_on_is_the_networks_own(
    backend: bf.BackendName,
) -> None:
    net = network()
    before = net[0].weight.clone()
    other = bf.BayesianModule(net, seed=1).predict(X).mean
    bnn = bf.BayesianModule(net)
    elbo = bf.ELBO(bnn, num_data=32)
    optimizer = SGD(elbo.parameters(), lr=0.5)
    loader = TensorLoader(X, Y, 16)
    bf.fit(elbo, loader, epochs=2, optimizer=optimizer, backend=backend, callback=Thaw(bnn))
    assert not torch.equal(bnn.net[0].weight, before)
    assert torch.equal(net[0].weight, before)
    assert torch.equal(bf.BayesianModule(net, seed=1).predict(X).mean, other)


def test_so_it_is_in_a_loop_of_ones_own() -> None:
    net = network()
    before = net[0].weight.clone()
    elbo = bf.ELBO(bf.BayesianModule(net), num_data=32)
    step = bf.make_step(elbo, SGD(elbo.parameters(), lr=0.5))
    for trained in (False, True):
        elbo.bnn.net[0].requires_grad_(trained)
        step(X, Y)
    assert not torch.equal(elbo.bnn.net[0].weight, before)
    assert torch.equal(net[0].weight, before)


def test_values_loaded_after_it_are_not_written_to_the_callers_network() -> None:
    net = network()
    before = net[0].weight.clone()
    bnn = bf.BayesianModule(net)
    values = {name: each + 1 for name, each in bnn.state_dict().items()}
    bnn.net[0].requires_grad_(True)
    bnn.load_state_dict(values)
    assert torch.equal(bnn.net[0].weight, before + 1)
    assert torch.equal(net[0].weight, before)


def trained_names(bnn: bf.BayesianModule) -> set[str]:
    return {name for name, each in bnn.named_parameters() if each.requires_grad}


def test_a_file_says_what_was_frozen(tmp_path: Path) -> None:
    bnn = bf.BayesianModule(network())
    bnn.posterior.rho.requires_grad_(False)
    bf.save(bnn, tmp_path / "frozen")
    again = bf.load(tmp_path / "frozen", network().requires_grad_(True))
    assert trained_names(again) == trained_names(bnn) == {"posterior.mean"}
    bnn.requires_grad_(True)
    bf.save(bnn, tmp_path / "trained")
    again = bf.load(tmp_path / "trained", network())
    assert trained_names(again) == trained_names(bnn)
    assert "net.0.weight" in trained_names(again)
    ensemble = bf.DeepEnsemble([bf.BayesianModule(network(), seed=seed) for seed in range(2)])
    ensemble.save(tmp_path / "ensemble")
    found = bf.DeepEnsemble.load(tmp_path / "ensemble", network().requires_grad_(True))
    names = {"posterior.mean", "posterior.rho"}
    assert [trained_names(each) for each in found.members] == [names, names]


@pytest.mark.parametrize("stop", [1, 2])
def test_a_resumed_run_trains_what_it_trained(stop: int, tmp_path: Path) -> None:
    def trained(folder: Path, *epochs: int) -> bf.BayesianModule:
        for number in epochs:
            bnn = bf.BayesianModule(network())
            elbo = bf.ELBO(bnn, num_data=32)
            bf.fit(
                elbo,
                TensorLoader(X, Y, 16),
                epochs=number,
                optimizer=SGD(elbo.parameters(), lr=0.5),
                checkpoint_dir=folder,
                resume=True,
                callback=Thaw(bnn),
            )
        return bnn

    whole, parts = trained(tmp_path / "whole", 4), trained(tmp_path / "parts", stop, 4)
    assert torch.equal(whole.net[0].weight, parts.net[0].weight)
    assert torch.equal(whole.posterior.mean, parts.posterior.mean)


def test_a_group_of_parameters_may_join_the_optimizer() -> None:
    elbo = bf.ELBO(bf.BayesianModule(network()), num_data=32)
    body = elbo.bnn.net[0]
    before = body.weight.clone()
    optimizer = SGD(bf.parameter_groups(elbo), lr=0.5)

    class Join(bf.Callback):
        def on_epoch(self, row: EpochRow) -> None:
            if row["epoch"] == 1:
                body.requires_grad_(True)
                optimizer.add_param_group({"params": list(body.parameters()), "lr": 0.0})
            elif row["epoch"] == 2:
                unchanged.append(torch.equal(body.weight, before))
                optimizer.param_groups[-1]["lr"] = 0.1

    unchanged: list[bool] = []
    loader = TensorLoader(X, Y, 16)
    bf.fit(elbo, loader, epochs=3, optimizer=optimizer, callback=Join())
    assert unchanged == [True]
    assert not torch.equal(body.weight, before)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5, 0.1]


class Dropped(nn.Module):
    """A recurrent and an attention layer that hold their dropout as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(x.unsqueeze(1).expand(-1, 3, -1))
        return self.out(self.attention(hidden, hidden, hidden)[0][:, -1])


def test_a_learned_prior_has_no_dropout_within_layers_either() -> None:
    train = partial(bf.learn_prior_mean, num_data=32, epochs=1)
    found = train(Dropped(), TensorLoader(X, Y, 16)).train()
    assert torch.equal(found(X), found(X))
