"""Files without the frozen parameters, and files whose network is frozen by now."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from bayesify import ELBO, BayesianModule, fit, load, save
from bayesify.io import StorageError


def pretrained(seed: int = 0) -> nn.Module:
    """A body that is frozen, a normalisation with buffers, and a head."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 200), nn.BatchNorm1d(200), nn.ReLU(), nn.Linear(200, 2))
    net[0].requires_grad_(False)
    return net


def test_frozen_parameters_may_be_left_out(tmp_path: Path) -> None:
    x, whole, part = torch.randn(5, 3), tmp_path / "whole.safetensors", tmp_path / "part"
    bnn = BayesianModule(pretrained())
    bnn(torch.randn(50, 3))  # which changes the buffers
    save(bnn, whole)
    save(bnn, part, frozen=False)
    assert whole.stat().st_size - part.stat().st_size > 4 * 3 * 200
    again = load(part, pretrained())
    assert torch.equal(again.predict(x, 3).mean, bnn.predict(x, 3).mean)
    assert [p.requires_grad for p in again.net.parameters()] == [
        p.requires_grad for p in bnn.net.parameters()
    ]
    assert torch.equal(load(whole, pretrained(1)).predict(x, 3).mean, bnn.predict(x, 3).mean)


@pytest.mark.parametrize("change", ["others", "dtype", "one number"])
def test_other_frozen_parameters_are_refused(change: str, tmp_path: Path) -> None:
    path = tmp_path / "part.safetensors"
    save(BayesianModule(pretrained()), path, frozen=False)
    net = pretrained(1) if change == "others" else pretrained()
    if change == "dtype":
        net.double()
    if change == "one number":
        with torch.no_grad():
            net[0].bias[7] += 1e-6
    with pytest.raises(StorageError, match="pass the pretrained network that was made Bayesian"):
        load(path, net)


def test_a_network_that_is_frozen_by_now_is_refused_with_the_mend(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    save(BayesianModule(net), tmp_path / "net.safetensors")
    net[1].requires_grad_(False)
    with pytest.raises(StorageError, match=r"'1\.weight' is random, .* frozen; thaw it"):
        load(tmp_path / "net.safetensors", net)
    load(tmp_path / "net.safetensors", net.requires_grad_(True))


def test_without_frozen_parameters_the_file_is_whole(tmp_path: Path) -> None:
    bnn = BayesianModule(nn.Linear(3, 2))
    for frozen in (True, False):
        save(bnn, tmp_path / f"{frozen}", frozen=frozen)
    assert (tmp_path / "True").read_bytes() == (tmp_path / "False").read_bytes()


def test_a_tied_frozen_parameter(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
        net[1].weight = net[0].weight
        net[0].requires_grad_(False)
        return net

    path, bnn = tmp_path / "part.safetensors", BayesianModule(tied())
    save(bnn, path, frozen=False)
    again = load(path, tied())
    assert again.net[0].weight is again.net[1].weight
    assert torch.equal(
        again.predict(torch.ones(1, 3), 3).mean, bnn.predict(torch.ones(1, 3), 3).mean
    )


class Float8(nn.Module):
    """A frozen layer whose weights have 8 bits, as quantised networks have them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3).to(dtype), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.to(x.dtype).T


@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_frozen_parameters_of_8_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    """They are trained around, and shared again after loading."""
    net, x = nn.Sequential(Float8(dtype), nn.Linear(4, 2)), torch.randn(8, 3)
    bnn = BayesianModule(net, include=("1.*",))
    loader = [(x, torch.zeros(8, dtype=torch.long))]
    fit(ELBO(bnn, num_data=8), loader, epochs=2, progress=False, checkpoint_dir=tmp_path)
    for frozen in (True, False):
        path = tmp_path / f"{frozen}.safetensors"
        save(bnn, path, frozen=frozen)
        again = load(path, net)
        assert torch.equal(again.predict(x, 3).mean, bnn.predict(x, 3).mean)
        assert again.net[0].weight.data_ptr() == net[0].weight.data_ptr()
