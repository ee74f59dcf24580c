"""Choosing random parameters by module type, and the errors of a wrong choice."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.cases import mlp
from tests.loops import loop_over
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from bayesify import ELBO, BayesianModule, ParameterLayout, last_layer, load, save


class Special(nn.Linear):
    """A layer of a type derived from another."""


class OwnNorm(nn.LayerNorm):
    """A normalisation layer of the user's own."""


class Block(nn.Module):
    """A container with a normalisation layer inside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = OwnNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.block = Block()
        self.batch = nn.BatchNorm1d(3)
        self.head = Special(3, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.batch(self.block(self.embed(tokens))))


class WithoutValues(nn.Module):
    """One parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, 0))


def of(net: nn.Module | None = None, **options: object) -> ParameterLayout:
    return ParameterLayout.of(Net() if net is None else net, **options)


def both(prefix: str) -> tuple[str, str]:
    return f"{prefix}.weight", f"{prefix}.bias"


LINEAR, NORM, BATCH, HEAD = both("block.linear"), both("block.norm"), both("batch"), both("head")
EMBED = ("embed.weight",)
CHOICES = [
    ({"include": (nn.Linear,)}, LINEAR + HEAD),
    ({"include": (Special,)}, HEAD),
    ({"include": (Special, "block.linear.*")}, LINEAR + HEAD),
    ({"include": (nn.Module,)}, EMBED + LINEAR + HEAD),
    ({"include": ("*", nn.Linear)}, EMBED + LINEAR + HEAD),
    ({"include": [nn.Linear], "exclude": [Special]}, LINEAR),
    ({"include": (nn.Linear,), "exclude": ("*.bias",)}, (LINEAR[0], HEAD[0])),
    ({"exclude": (nn.Embedding, "head.*")}, LINEAR + NORM + BATCH),
    ({"exclude": (Block,)}, EMBED + BATCH + HEAD),
    # A container does not name the normalisation layer that it holds; its type and its name do.
    ({"include": (Block,)}, LINEAR),
    ({"include": (Block,), "exclude": ()}, LINEAR + NORM),
    ({"include": (Block, OwnNorm)}, LINEAR + NORM),
    ({"include": (Block, nn.LayerNorm)}, LINEAR + NORM),
    ({"include": (nn.LayerNorm,)}, NORM),
    ({"include": ("block.*",)}, LINEAR + NORM),
    ({"include": ("*", nn.LayerNorm)}, EMBED + LINEAR + NORM + HEAD),
    ({"include": (nn.Module, nn.BatchNorm1d)}, EMBED + LINEAR + BATCH + HEAD),
    ({"include": (nn.LayerNorm,), "exclude": ("*.bias",)}, NORM[:1]),
]


@loop_over(("options", "names"), CHOICES)
def test_types_and_patterns_choose(options: dict, names: tuple[str, ...]) -> None:
    assert of(**options).names == names


def scaled(name: str, shape: tuple[int, ...] = (3,)) -> type[nn.Module]:
    """A module of a class with this name, with a weight, a matrix and a linear layer."""

    def init(self: nn.Module) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.ones(shape))
        self.matrix = nn.Parameter(torch.ones(3, 3))
        self.linear = nn.Linear(3, 3)

    return type(name, (nn.Module,), {"__init__": init})


@loop_over(
    ("name", "is_norm"),
    [
        *((name, True) for name in ("LlamaRMSNorm", "LayerScale", "ScaleNorm", "RMSNormalization")),
        *((name, True) for name in ("Dinov2LayerScale", "LayerNorm2d", "EvoNorm2dB0")),
        *((name, False) for name in ("Head", "NormalInverseGamma", "LogNormalHead", "Scale")),
    ],
)
def test_norms_of_other_libraries_stay_deterministic(name: str, is_norm: bool) -> None:
    kind = scaled(name)
    rest = ("matrix", "linear.weight", "linear.bias")
    assert of(kind()).names == (rest if is_norm else ("weight", *rest))
    assert of(kind(), exclude=()).names == ("weight", *rest)
    assert of(kind(), include=("*", "weight")).names == ("weight", *rest)
    assert of(kind(), include=(kind,)).names == ("weight", *rest)
    assert of(scaled(name, (1, 3, 1, 1))()).names == of(kind()).names
    assert of(scaled(name, (2, 3))()).names == ("weight", *rest), "no vector"


class PreNorm(nn.Module):
    """A block that is called after the norm in it, around a block of its own kind."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3)
        self.inner = inner


def test_a_block_called_norm_does_not_select_the_norm_in_it() -> None:
    net = PreNorm(PreNorm(nn.Linear(3, 3)))
    linear = ("inner.inner.weight", "inner.inner.bias")
    assert of(net).names == linear
    assert of(net, include=(PreNorm,)).names == linear
    norms = ("norm.weight", "norm.bias", "inner.norm.weight", "inner.norm.bias")
    assert of(net, include=(PreNorm, nn.LayerNorm)).names == (*norms, *linear)


@loop_over("name", ["gamma", "gamma_1", "layer_scale_parameter", "lambda_1", "lambda1"])
def test_scales_of_a_block_stay_deterministic(name: str) -> None:
    block = nn.Linear(3, 2)
    setattr(block, name, nn.Parameter(1e-5 * torch.ones(2)))
    assert of(block).names == ("weight", "bias")
    assert of(block, include=("*", name)).names == ("weight", "bias", name)
    assert last_layer(block) == ("weight", "bias")
    setattr(block, name, nn.Parameter(torch.ones(2, 2)))
    assert of(block).names == ("weight", "bias", name)


def test_a_type_reaches_a_tied_parameter_and_no_frozen_one() -> None:
    net = Net()
    net.block.linear.weight = nn.Parameter(torch.zeros(5, 3))
    net.embed.weight = net.block.linear.weight
    net.head.bias.requires_grad_(requires_grad=False)
    assert of(net, include=(nn.Linear,)).names == ("embed.weight", "block.linear.bias", HEAD[0])
    assert of(net, exclude=(nn.Embedding, Block, nn.BatchNorm1d)).names == HEAD[:1]


def test_affines_stay_out_when_they_are_parametrised() -> None:
    net = nn.Sequential(nn.Linear(3, 2), parametrizations.weight_norm(nn.LayerNorm(2)))
    assert of(net).names == both("0")
    assert len(of(net, include=(nn.LayerNorm,)).names) == 3


def test_a_network_chosen_by_types_trains_and_is_saved(tmp_path: Path) -> None:
    net, tokens = Net(), torch.arange(10) % 5
    bnn = BayesianModule(net, include=(nn.Linear, nn.LayerNorm), exclude=(Special,))
    assert bnn.layout.names == LINEAR + NORM
    ELBO(bnn, num_data=10)(tokens, tokens % 2).loss.backward()
    assert bnn.posterior.mean.grad.abs().sum() > 0
    save(bnn, tmp_path / "model.safetensors")
    again = load(tmp_path / "model.safetensors", net)
    assert again.layout == bnn.layout
    assert torch.equal(again.predict(tokens, 2).mean, bnn.predict(tokens, 2).mean)


ALL_TYPES = "Net, Embedding, Block, Linear, OwnNorm, BatchNorm1d, Special"
SEQUENCE = "must be a sequence of patterns and module types"
WRONG_OPTIONS = [
    ((nn.Conv2d,), ValueError, f"type of OPTION must .* but Conv2d matches none of {ALL_TYPES}$"),
    ((nn.Linear, nn.ReLU), ValueError, "but ReLU matches none of Net"),
    (("x*",), ValueError, r"pattern of OPTION must .* but 'x\*' matches none of embed.weight"),
    (nn.Linear, TypeError, rf"OPTION {SEQUENCE}, got the type Linear; write OPTION=\(Linear,\)"),
    ("a", TypeError, rf"OPTION {SEQUENCE}, got the string 'a'; write OPTION=\('a',\)"),
    ("", TypeError, rf"OPTION {SEQUENCE}, got the string ''"),
    (3, TypeError, rf"OPTION {SEQUENCE} such as \('head\.\*',\), got 3"),
    (iter(("*",)), TypeError, rf"OPTION {SEQUENCE} such as .* got <tuple_iterator"),
    ((int,), TypeError, r"OPTION must hold .* module types such as nn.Linear, got <class 'int'>"),
    ((nn.Parameter,), TypeError, "OPTION must hold .*nn.Linear, got <class .*Parameter'>"),
    ((3,), TypeError, "OPTION must hold patterns .* got 3"),
    ((None,), TypeError, "OPTION must hold patterns .* got None"),
    (nn.Sequential(nn.ReLU()), TypeError, r"OPTION must .* got .*ReLU\(\)"),
]


@loop_over("option", ["include", "exclude"])
def test_a_wrong_option(option: str) -> None:
    for value, kind, message in WRONG_OPTIONS:
        with pytest.raises(kind, match=re.compile(message.replace("OPTION", option), re.DOTALL)):
            of(**{option: value})


@loop_over(
    ("call", "kind", "message"),
    [
        (lambda: of(include=None), TypeError, f"include {SEQUENCE} .* got None"),
        (
            lambda: of(include=(nn.Linear, "head.*"), exclude=(nn.Linear,)),
            ValueError,
            r"include=\(Linear, 'head\.\*'\), exclude=\(Linear,\) leave none of embed.weight",
        ),
        (
            lambda: of(nn.Sequential(nn.LayerNorm(2))),
            ValueError,
            r"exclude=None leave none of 0.weight, 0.bias; .*normalisation layers unless include",
        ),
        (lambda: of(WithoutValues()), ValueError, "leave none of w;"),
        (lambda: of(nn.ReLU(), include=(nn.Linear,)), ValueError, "a network without parameters"),
        (
            lambda: of(mlp(), include=(nn.Conv2d,)),
            ValueError,
            "Conv2d matches none of Sequential, Linear$",
        ),
        (lambda: of("net"), TypeError, "net must be an nn.Module, got 'net'"),
    ],
)
def test_nothing_is_left_or_nothing_was_there(
    call: Callable[[], object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        call()
