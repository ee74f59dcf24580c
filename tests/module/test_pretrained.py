"""last_layer and RelativeStd: a Bayesian network that starts from a trained one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.ao.nn.quantized.dynamic
from tests.cases import mlp, normals
from tests.loops import loop_over
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from bayesify import BayesianModule, load, save
from bayesify.module.pretrained import RelativeStd, last_layer


class Net(nn.Module):
    """A parameter of its own, and parts under names that are assigned in the order given."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.children():
            x = part(x)
        return self.scale * x


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(requires_grad=False)


def half_frozen() -> nn.Module:
    layer = nn.Linear(3, 2)
    frozen(layer.weight)
    return layer


def tied() -> nn.Module:
    net = Net(embed=nn.Embedding(4, 3), head=nn.Linear(3, 4))
    net.head.weight = net.embed.weight
    return net


def shared() -> nn.Module:
    net = Net(body=linear(), head=linear())
    net.again = net.body
    return net


def linear() -> nn.Module:
    return nn.Linear(3, 3)


def wholly_parametrized() -> nn.Module:
    """A layer that runs another first, and of which every own parameter is parametrised."""
    net = Net(first=linear())
    net.w = nn.Parameter(torch.ones(2, 2))
    del net.scale
    parametrizations.orthogonal(net, "w")
    return net


HEAD = ("head.weight", "head.bias")
NETWORKS: list[tuple[Callable[[], nn.Module], tuple[str, ...]]] = [
    (mlp, ("2.weight", "2.bias")),
    (linear, ("weight", "bias")),
    (lambda: Net(), ("scale",)),
    (lambda: Net(body=linear(), head=linear()), HEAD),
    (lambda: Net(head=linear(), body=nn.Sequential(linear(), nn.ReLU())), ("body.0.*",)),
    (lambda: Net(head=linear(), norm=nn.LayerNorm(3), act=nn.ReLU()), HEAD),
    (lambda: Net(head=linear(), norm=nn.BatchNorm1d(3)), HEAD),
    (lambda: Net(head=linear(), norm=parametrizations.weight_norm(nn.LayerNorm(3))), HEAD),
    (lambda: Net(head=linear(), aux=frozen(linear())), HEAD),
    (lambda: Net(body=linear(), head=half_frozen()), ("head.bias",)),
    (lambda: Net(body=linear(), head=nn.LSTM(3, 2)), tuple(f"head.{n}" for n in
     ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"))),
    (lambda: Net(body=linear(), head=parametrizations.weight_norm(linear())), ("head.bias",
     "head.parametrizations.weight.original0", "head.parametrizations.weight.original1")),
    (wholly_parametrized, ("first.weight", "first.bias")),
    (tied, HEAD),
    (shared, ("again.weight", "again.bias")),
    (lambda: parametrizations.orthogonal(linear()), ("bias", "parametrizations.weight.original")),
]  # fmt: skip


@loop_over(("make", "names"), NETWORKS)
def test_the_last_layer_alone_is_chosen(
    make: Callable[[], nn.Module], names: tuple[str, ...]
) -> None:
    net = make()
    if names[0].endswith("*"):
        names = tuple(names[0].replace("*", leaf) for leaf in ("weight", "bias"))
    assert last_layer(net) == names
    layout = BayesianModule(net, include=last_layer(net)).layout
    sizes = [net.get_parameter(name).numel() for name in names]
    assert layout.num_weights == sum(sizes)
    assert all(layout.slice_of(name) for name in names)


def test_a_tied_last_layer_makes_the_shared_parameter_random() -> None:
    assert BayesianModule(tied(), include=last_layer(tied())).layout.ties == (
        ("embed.weight", "head.weight"),
        ("head.bias",),
    )


def test_the_names_are_patterns_of_themselves_only() -> None:
    net = Net(body=nn.ModuleDict({"ha": linear(), "hax": linear(), "h[ab]*": linear()}))
    assert last_layer(net) == ("body.h[[]ab][*].weight", "body.h[[]ab][*].bias")
    layout = BayesianModule(net, include=last_layer(net)).layout
    assert layout.names == ("body.h[ab]*.weight", "body.h[ab]*.bias")


def test_the_body_of_a_last_layer_network_stays_what_it_was() -> None:
    net = mlp()
    bnn = BayesianModule(net, include=last_layer(net), init_std=1e-12)
    assert {name for name, _ in bnn.named_parameters()} == {
        "net.0.weight", "net.0.bias", "posterior.mean", "posterior.rho",
    }  # fmt: skip
    x = normals(4, 3)
    assert torch.allclose(bnn(x), net(x))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_quantised_last_layer_is_not_passed_over() -> None:
    net = nn.Sequential(linear(), torch.ao.nn.quantized.dynamic.Linear(3, 2))
    with pytest.raises(TypeError, match=r"'1\._packed_params\._packed_params' is quantised"):
        BayesianModule(net, include=last_layer(net))


@loop_over("net", [nn.ReLU(), frozen(linear()), nn.Sequential(nn.LayerNorm(3), nn.ReLU())])
def test_there_may_be_no_last_layer(net: nn.Module) -> None:
    message = f"but this {type(net).__name__} has none; unfreeze one with layer.requires_grad_"
    with pytest.raises(ValueError, match=message):
        last_layer(net)


def test_the_last_layer_of_no_module() -> None:
    with pytest.raises(TypeError, match=r"net must be an nn\.Module, got 'head'"):
        last_layer("head")


@loop_over("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_relative_std_is_the_larger_of_fraction_and_minimum(dtype: torch.dtype) -> None:
    mean = torch.tensor([-2.0, 0.5, 0.25, 0.1, -0.0], dtype=dtype, requires_grad=True)
    std = RelativeStd(0.5, minimum=0.125).of(mean)
    assert std.tolist() == [1.0, 0.25, 0.125, 0.125, 0.125]
    assert std.dtype is dtype
    assert not std.requires_grad
    assert mean.tolist()[0] == -2.0


def test_a_posterior_starts_with_these_stds() -> None:
    net = mlp()
    mean = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    mean[:5] = 0.0
    with torch.no_grad():
        net[0].weight[0] = 0.0
        net[0].weight[1, :2] = 0.0
    bnn = BayesianModule(net, init_std=RelativeStd(0.1).of(mean))
    assert torch.equal(bnn.posterior.mean, mean)
    assert torch.allclose(bnn.posterior.std[:5], torch.full((5,), 1e-3, dtype=torch.float64))
    large = mean.abs() > 0.01
    assert large.sum() > 30
    assert torch.allclose(bnn.posterior.std[large], 0.1 * mean.abs()[large])


def test_a_relative_std_is_a_value() -> None:
    assert RelativeStd(1) == RelativeStd(np.float32(1.0), minimum=0.001)
    assert repr(RelativeStd(1)) == "RelativeStd(fraction=1.0, minimum=0.001)"
    with pytest.raises(AttributeError, match="cannot assign"):
        RelativeStd(1).fraction = 2.0


@loop_over("name", ["fraction", "minimum"])
def test_a_wrong_relative_std(name: str) -> None:
    for bad in (0.0, -0.1, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"{name} must be positive and finite, got {bad}"):
            RelativeStd(**{"fraction": 0.1, name: bad})
    for bad in ("0.1", None, True, torch.ones(2)):
        with pytest.raises(TypeError, match=f"{name} must be (a|one) number, got "):
            RelativeStd(**{"fraction": 0.1, name: bad})


def test_a_prior_is_centred_by_pattern(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    bnn = BayesianModule(net, prior_mean={"2.bias": 0.5, "2.*": 0.0, "*": "initial"})
    assert bnn.prior_mean is not None
    centre = bnn.layout.unflatten(bnn.prior_mean)
    assert torch.equal(centre["0.weight"], net[0].weight)
    assert torch.equal(centre["0.bias"], net[0].bias)
    assert torch.equal(centre["2.weight"], torch.zeros(2, 4))
    assert torch.equal(centre["2.bias"], torch.full((2,), 0.5))
    save(bnn, tmp_path / "net.safetensors")
    again = load(tmp_path / "net.safetensors", net)
    assert torch.equal(again.prior_mean, bnn.prior_mean)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"2.*": 0.0},
            "prior_mean must give every random parameter a centre, but no",
        ),
        ({"3.*": 0.0, "*": "initial"}, "'3.*' matches none of 0.weight"),
        ({"*": "initial", "2.*": 0.0}, "matches only 2.weight, 2.bias, which earlier"),
        ({"*": "first"}, "\"initial\" or a finite number, got 'first'"),
        ({"*": float("nan")}, "a finite number, got nan"),
        ("first", "or a mapping from name patterns, got 'first'"),
    ],
)
def test_a_wrong_centre(given: Any, message: str) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=message):
        BayesianModule(net, prior_mean=given)


def frozen_trunk() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    net[0].requires_grad_(False)
    return net


def test_frozen_parameters_share_the_callers_memory() -> None:
    net = frozen_trunk()
    values = {name: each.clone() for name, each in net.state_dict().items()}
    bnn = BayesianModule(net)
    assert bnn.net[0].weight.data_ptr() == net[0].weight.data_ptr()
    # What is done to the one leaves the other alone.
    bnn.double()
    assert net[0].weight.dtype == torch.float32
    assert bnn.net[0].weight.dtype == torch.float64
    twin = BayesianModule(net)
    others = {name: each + 1 for name, each in twin.state_dict().items()}
    twin.load_state_dict(others)
    assert torch.equal(twin.net[0].weight, net[0].weight + 1)
    assert all(torch.equal(each, values[name]) for name, each in net.state_dict().items())
    # The same values keep the memory.
    third = BayesianModule(net)
    third.load_state_dict(third.state_dict())
    assert third.net[0].weight.data_ptr() == net[0].weight.data_ptr()


def test_the_frozen_parameters_that_a_file_holds(tmp_path: Path) -> None:
    net, path = frozen_trunk(), tmp_path / "net.safetensors"
    save(BayesianModule(net), path, frozen=["*.bias"])
    other = frozen_trunk()
    other[0].weight = net[0].weight
    again = load(path, other)
    assert torch.equal(again.net[0].bias, net[0].bias)
    assert not torch.equal(other[0].bias, net[0].bias)
    for wrong in ("*.bias", None):
        with pytest.raises(TypeError, match=rf"sequence of patterns, got {re.escape(repr(wrong))}"):
            save(BayesianModule(net), path, frozen=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("frozen", [True, False])
def test_a_file_is_not_read_into_the_callers_memory(frozen: bool, tmp_path: Path) -> None:
    net, other = frozen_trunk(), frozen_trunk()
    before = other[0].weight.clone()
    save(BayesianModule(net), tmp_path / "net.safetensors", frozen=frozen)
    again = load(tmp_path / "net.safetensors", other if frozen else net)
    assert torch.equal(again.net[0].weight, net[0].weight)
    assert torch.equal(other[0].weight, before)
    shared = again.net[0].weight.data_ptr() == net[0].weight.data_ptr()
    assert shared == (not frozen)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (torch.full((8,), math.nan), ValueError, "finite real numbers, got nan or infinite ones"),
        (torch.full((8,), math.inf), ValueError, "finite real numbers, got nan or infinite ones"),
        (torch.full((8,), 1j), ValueError, "finite real numbers, got torch.complex64"),
        ({nn.Linear: 0.0}, TypeError, "prior_mean must hold patterns of parameter names"),
        ({"*": np.zeros(4)}, ValueError, '"initial" or a finite number, got array'),
        ({}, ValueError, "prior_mean must have at least one pattern"),
    ],
)
def test_a_centre_that_is_none(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        BayesianModule(nn.Linear(3, 2), prior_mean=given)
    with pytest.raises(ValueError, match=r"got torch\.complex64"):
        BayesianModule(nn.Linear(3, 2), init_std=torch.full((8,), 1j))
