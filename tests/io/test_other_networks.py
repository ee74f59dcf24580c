"""Files of other networks, whose random weights fit and whose other parts do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cases import mlp
from tests.loops import loop_over
from tests.saved_networks import CASE, check_refused
from torch import Tensor, nn

from bayesify import (
    ELBO,
    BayesianModule,
    Delta,
    WeightSampling,
    compress,
    decompress,
    fit,
    freeze,
    load,
    save,
)
from bayesify.datasets import TensorLoader
from bayesify.io import StorageError


def network(width: int, *, norm: bool = False) -> nn.Module:
    """Only the last layer is random in the tests."""
    first = nn.Sequential(nn.Linear(width, 4), nn.LayerNorm(4) if norm else nn.ReLU())
    return nn.Sequential(first, nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("other", "part"),
    [
        (network(5), "its '0.0.weight' has shape (4, 3), that of the given network (4, 5)"),
        (network(3, norm=True), "it lacks '0.1."),
    ],
)
def test_other_parts_that_are_not_random_are_named(
    other: nn.Module, part: str, tmp_path: Path
) -> None:
    path = tmp_path / "net.safetensors"
    save(BayesianModule(network(3), include=["1.*"]), path)
    with pytest.raises(StorageError) as raised:
        load(path, other)
    assert f"{path} is of another architecture: {part}" in str(raised.value)
    assert "state_dict" not in str(raised.value)


class Expanded(nn.Module):
    """A buffer whose elements share one place in memory, to which PyTorch does not write."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("mean", torch.tensor(0.5).expand(3))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(x - self.mean)
        return outputs


def test_a_network_with_an_expanded_buffer_is_read_again(tmp_path: Path) -> None:
    bnn = BayesianModule(Expanded())
    save(bnn, tmp_path / "net.safetensors")
    assert torch.equal(load(tmp_path / "net.safetensors", Expanded()).net.mean, bnn.net.mean)
    compress(bnn, tmp_path / "net.bfz")
    assert torch.equal(decompress(tmp_path / "net.bfz", Expanded()).mean, bnn.net.mean)


class OwnState(nn.Linear):
    """Writes its parameters into the state dict by itself, as layers of torch_geometric do."""

    def _save_to_state_dict(self, destination: Any, prefix: str, _: bool) -> None:
        destination[f"{prefix}weight"] = self.weight.detach()
        destination[f"{prefix}bias"] = self.bias.detach()
        destination[f"{prefix}calls"] = torch.tensor(3)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:  # as operators of neuralop do
        state = super().state_dict(*args, **kwargs)
        state["_metadata"] = {"in_features": 3}
        return state

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        assert state.pop(f"{prefix}calls") == 3
        super()._load_from_state_dict(state, prefix, *args)


def test_a_layer_with_a_state_dict_of_its_own_is_read_again(tmp_path: Path) -> None:
    tied = OwnState(3, 3)
    bnn, x = BayesianModule(nn.Sequential(tied, nn.Tanh(), tied, OwnState(3, 2))), torch.ones(4, 3)
    state = ELBO(bnn, num_data=4).state_dict()
    assert [name for name in state if "net" in name] == [f"bnn.net.{i}.calls" for i in (0, 2, 3)]
    assert all(isinstance(value, Tensor) for value in state.values())
    save(bnn, tmp_path / "net.safetensors")
    tied = OwnState(3, 3)
    read = load(tmp_path / "net.safetensors", nn.Sequential(tied, nn.Tanh(), tied, OwnState(3, 2)))
    assert torch.equal(read.predict(x, 5).mean, bnn.predict(x, 5).mean)
    frozen = [freeze(each, 5, estimator=WeightSampling()) for each in (bnn, read)]
    state = frozen[0].state_dict()
    assert state.keys() == frozen[1].state_dict().keys()
    assert all(isinstance(value, Tensor) for value in state.values())
    assert sum(name.startswith("outputs.stacked") for name in state) == 4
    point, y = BayesianModule(OwnState(3, 2), posterior=Delta), torch.tensor([0, 1, 0, 1])
    elbo = ELBO(point, num_data=4)
    for epochs in (1, 2):
        loader = TensorLoader(x, y, batch_size=4)
        fit(elbo, loader, epochs=epochs, checkpoint_dir=tmp_path, resume=epochs == 2)


@pytest.mark.parametrize("net", ["net", None, Expanded])
def test_what_is_no_network_is_named(net: Any, tmp_path: Path) -> None:
    compress(BayesianModule(Expanded()), tmp_path / "net.bfz")
    with pytest.raises(TypeError, match="decompress needs a network of the same architecture, got"):
        decompress(tmp_path / "net.bfz", net)


@loop_over(
    "net",
    [
        nn.Linear(3, 4),
        nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)),
        nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4, bias=False)),
        nn.Sequential(*mlp(), nn.Tanh(), nn.Linear(4, 4)),
        nn.Sequential(nn.BatchNorm1d(3), *mlp()),
        nn.Sequential(*mlp(), nn.BatchNorm1d(4)),
        nn.Sequential(*mlp().requires_grad_(False)),
        nn.LSTM(3, 5),
    ],
)
def test_another_architecture_is_refused(net: nn.Module, tmp_path: Path) -> None:
    save(CASE.bnn(), tmp_path / "whole")
    message = check_refused(tmp_path / "a", (tmp_path / "whole").read_bytes(), net)
    assert (
        "another architecture" in message
        or "not describe a network that can be restored" in message
    )
