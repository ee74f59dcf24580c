"""Tables of the operations through which units are followed, by the role that they have for them.

A unit is a feature of a linear layer or a channel of a convolution.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "ELEMENTWISE",
    "ELEMENTWISE_METHODS",
    "LAYERS",
    "MOVING",
    "MOVING_METHODS",
    "PER_UNIT",
    "WITHIN_UNITS",
    "Layer",
    "is_depthwise",
    "unit_weights",
]


class Layer(NamedTuple):
    """A kind of layer that reads and writes units: its attributes, and axes of its weight."""

    inputs: str
    outputs: str
    in_axis: int
    out_axis: int
    #: Axes that follow the units in its inputs and outputs.
    positions: int


#: Layers that read units and write other ones.
LAYERS: dict[type[nn.Module], Layer] = {
    nn.Linear: Layer("in_features", "out_features", 1, 0, 0),
    nn.Conv1d: Layer("in_channels", "out_channels", 1, 0, 1),
    nn.Conv2d: Layer("in_channels", "out_channels", 1, 0, 2),
    nn.Conv3d: Layer("in_channels", "out_channels", 1, 0, 3),
    nn.ConvTranspose1d: Layer("in_channels", "out_channels", 0, 1, 1),
    nn.ConvTranspose2d: Layer("in_channels", "out_channels", 0, 1, 2),
    nn.ConvTranspose3d: Layer("in_channels", "out_channels", 0, 1, 3),
}

#: Layers with parameters or averages of each unit, axis 1 of their inputs, and the attributes that
#: hold the number of units. A depthwise convolution is one too.
PER_UNIT: dict[type[nn.Module], tuple[str, ...]] = {
    nn.BatchNorm1d: ("num_features",),
    nn.BatchNorm2d: ("num_features",),
    nn.BatchNorm3d: ("num_features",),
    nn.InstanceNorm1d: ("num_features",),
    nn.InstanceNorm2d: ("num_features",),
    nn.InstanceNorm3d: ("num_features",),
    nn.PReLU: ("num_parameters",),
}


def is_depthwise(module: nn.Module) -> bool:
    """Return True for a convolution that treats each channel by itself.

    Example:
        >>> is_depthwise(nn.Conv2d(4, 8, 3, groups=4)), is_depthwise(nn.Conv2d(4, 8, 3))
        (True, False)
    """
    return (
        isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        and module.groups == module.in_channels > 1
    )


def unit_weights(module: nn.Module, layer: Layer) -> Tensor:
    """Return the weights of a layer by output, input and place in its kernel, on the CPU.

    Example:
        >>> unit_weights(nn.Conv2d(4, 8, 3), LAYERS[nn.Conv2d]).shape
        torch.Size([8, 4, 9])
    """
    weight = module.get_parameter("weight").detach().cpu()
    weight = weight if layer.out_axis == 0 else weight.transpose(0, 1)
    return weight.reshape(*weight.shape[:2], -1)


def _functions(names: Iterable[str]) -> frozenset[Callable[..., Any]]:
    places = (torch, F, operator)
    return frozenset(
        getattr(place, name) for name in names for place in places if hasattr(place, name)
    )


_ACTIVATIONS = (
    "relu", "relu_", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish",
    "sigmoid", "tanh", "softplus", "softsign", "softshrink", "hardshrink", "hardtanh",
    "hardsigmoid", "hardswish", "logsigmoid", "tanhshrink", "threshold",
)  # fmt: skip
_ARITHMETIC = (
    "exp", "log", "sqrt", "abs", "square", "neg", "clamp", "clamp_min", "clamp_max", "pow", "add",
    "sub", "mul", "div", "truediv", "iadd", "isub", "imul", "itruediv", "maximum", "minimum", "erf",
    "sin", "cos",
)  # fmt: skip
#: Operations whose output at a place depends on their inputs at that place alone.
ELEMENTWISE: frozenset[Any] = _functions((*_ACTIVATIONS, *_ARITHMETIC)) | {
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.Softshrink, nn.Hardshrink, nn.Hardtanh,
    nn.Hardsigmoid, nn.Hardswish, nn.LogSigmoid, nn.Tanhshrink, nn.Threshold,
}  # fmt: skip
ELEMENTWISE_METHODS = frozenset(
    (*_ACTIVATIONS, *_ARITHMETIC, *(f"{name}_" for name in ("add", "sub", "mul", "div", "clamp")))
)

_POOLS = [
    *(f"{kind}_pool{d}d" for kind in ("max", "avg") for d in (1, 2, 3)),
    *(f"adaptive_{kind}_pool{d}d" for kind in ("max", "avg") for d in (1, 2, 3)),
]
_MOVES = (
    "flatten", "permute", "transpose", "movedim", "swapaxes", "unsqueeze", "squeeze", "reshape",
    "cat", "concat", "mean", "amax", "clone", "detach",
)  # fmt: skip
#: Operations that move elements, or average or choose among those of one unit. Whether they do is
#: tested on an input whose elements are the numbers of their units.
MOVING: frozenset[Any] = _functions(
    (
        *_POOLS,
        *_MOVES,
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "pad",
        "getitem",
        "interpolate",
    )
) | {
    nn.Flatten, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d, nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d,
    nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReplicationPad1d, nn.ReplicationPad2d,
    nn.CircularPad1d, nn.CircularPad2d, nn.Upsample,
}  # fmt: skip
MOVING_METHODS = frozenset((*_MOVES, "contiguous", "view"))
#: Those of them that choose or repeat neighbours: for fewer units they would choose others, so that
#: they must leave the axis of the units as it is.
WITHIN_UNITS: frozenset[Any] = _functions((*_POOLS, "interpolate")) | {
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d, nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.ReflectionPad1d, nn.ReflectionPad2d,
    nn.ReplicationPad1d, nn.ReplicationPad2d, nn.CircularPad1d, nn.CircularPad2d, nn.Upsample,
}  # fmt: skip
