"""Checkpoints without frozen parameters: smaller, resumed exactly, and tied to the same network."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify as bf
from bayesify.io import StorageError

pytestmark = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")


def network(seed: int = 0) -> nn.Sequential:
    """A frozen layer and a head; another seed has another frozen layer."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 50), nn.Tanh(), nn.Linear(50, 2))
    net[0].requires_grad_(requires_grad=False)
    torch.manual_seed(5)
    net[2].reset_parameters()
    return net


def train(folder: Path, epochs: int, *, seed: int = 0, frozen: bool = False) -> bf.BayesianModule:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 3, generator=generator)
    loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=8)
    bnn = bf.BayesianModule(network(seed), include=["2.*"], seed=1)
    bf.fit(
        bf.ELBO(bnn, num_data=32),
        loader,
        epochs=epochs,
        checkpoint_dir=folder,
        resume=True,
        checkpoint_frozen=frozen,
        progress=False,
    )
    return bnn


def names_in(path: Path) -> set[str]:
    with safe_open(path, "pt") as stored:
        return set(stored.keys())


def test_the_file_has_no_frozen_parameters(tmp_path: Path) -> None:
    train(tmp_path / "without", 1)
    train(tmp_path / "with", 1, frozen=True)
    without, whole = (
        names_in(tmp_path / name / "checkpoint.safetensors") for name in ("without", "with")
    )
    assert whole - without == {"net.0.weight", "net.0.bias"}
    assert "posterior.mean" in without


def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 3)
    train(tmp_path / "parts", 1)
    parts = train(tmp_path / "parts", 3)
    assert torch.equal(whole.posterior.mean, parts.posterior.mean)
    assert torch.equal(whole.net[0].weight, parts.net[0].weight)
    loaded = bf.load(tmp_path / "parts" / "checkpoint.safetensors", network())
    assert torch.equal(loaded.posterior.mean, whole.posterior.mean)
    assert torch.equal(loaded.net[0].weight, whole.net[0].weight)


def test_another_frozen_network_is_refused(tmp_path: Path) -> None:
    train(tmp_path, 1)
    with pytest.raises(StorageError, match="was saved without its frozen parameters, and those"):
        train(tmp_path, 2, seed=9)
    with pytest.raises(StorageError, match="was saved without its frozen parameters, and those"):
        bf.load(tmp_path / "checkpoint.safetensors", network(9))


def test_a_pattern_without_a_match_is_an_error_before_anything_is_trained(tmp_path: Path) -> None:
    message = r"every pattern of frozen must match a frozen parameter, but 'boddy\.\*' matches none"
    bnn = bf.BayesianModule(network(), include=["2.*"])
    with pytest.raises(ValueError, match=message):
        bf.save(bnn, tmp_path / "m", frozen=["0.*", "boddy.*"])
    loader = bf.datasets.TensorLoader(torch.zeros(8, 3), torch.zeros(8, dtype=torch.long), 4)
    elbo, before = bf.ELBO(bnn, num_data=8), bnn.posterior.mean.detach().clone()
    with pytest.raises(ValueError, match=message):
        bf.fit(elbo, loader, checkpoint_dir=tmp_path / "c", checkpoint_frozen=["boddy.*"])
    assert torch.equal(bnn.posterior.mean, before)
    assert not (tmp_path / "m").exists()
