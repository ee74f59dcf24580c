"""Standard network architectures: multilayer perceptron, LeNet-5, ResNet-8 and ResNet-20."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesify.noise.keys import Stream, derived_seed, seeded_initialization

__all__ = ["lenet5", "mlp", "resnet8", "resnet20"]


def mlp(
    num_inputs: int,
    hidden: Sequence[int],
    num_outputs: int,
    *,
    dropout: tuple[float, float] | None = None,
    init_std: float | None = None,
    seed: int = 0,
) -> nn.Sequential:
    """Create a multilayer perceptron with ReLU after each hidden layer.

    Args:
        num_inputs: number of input features.
        hidden: the width of each hidden layer; at least one.
        num_outputs: number of outputs, such as logits of classes.
        dropout: probabilities of dropping an input and a hidden unit, or None.
        init_std: draw every weight and bias from N(0, init_std^2); None keeps PyTorch's initial
            values.
        seed: seed of the initial values.

    Raises:
        ValueError: there is no hidden layer, or one has no units.

    Example:
        >>> mlp(4, (3,), 2)
        Sequential(
          (0): Linear(in_features=4, out_features=3, bias=True)
          (1): ReLU()
          (2): Linear(in_features=3, out_features=2, bias=True)
        )
    """
    if not hidden or min(hidden) < 1:
        raise ValueError(f"hidden layers must have at least one unit each, got {list(hidden)}")
    drop_input, drop_hidden = dropout or (0.0, 0.0)
    # Not the global generator: several threads may build networks at once.
    generator = torch.Generator().manual_seed(derived_seed(seed, Stream.INITIALIZATION, 0))
    layers: list[nn.Module] = [nn.Dropout(drop_input)] if drop_input else []
    width = num_inputs
    for units in hidden:
        layers += [_linear(width, units, generator), nn.ReLU()]
        layers += [nn.Dropout(drop_hidden)] if drop_hidden else []
        width = units
    net = nn.Sequential(*layers, _linear(width, num_outputs, generator))
    return _initialise(net, init_std, generator)


def lenet5(
    *,
    dropout: tuple[float, float] | None = None,
    init_std: float | None = None,
    seed: int = 0,
) -> nn.Sequential:
    """Create LeNet-5 (LeCun et al. 1998) with ReLU and max pooling: 61,706 weights, 10 classes.

    Its inputs are images of 28 x 28 pixels, flattened to shape (N, 784).

    Args:
        dropout: probabilities of dropping a pixel and a unit of the layers after the
            convolutions, or None.
        init_std: as in :func:`mlp`.
        seed: seed of the initial values.

    Example:
        >>> lenet5()(torch.zeros(5, 784)).shape
        torch.Size([5, 10])
    """
    drop_input, drop_hidden = dropout or (0.0, 0.0)
    with seeded_initialization(seed):
        layers: list[nn.Module] = [nn.Dropout(drop_input)] if drop_input else []
        layers += [nn.Unflatten(-1, (1, 28, 28))]
        layers += [nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        for width, units in ((400, 120), (120, 84)):
            layers += [nn.Linear(width, units), nn.ReLU()]
            layers += [nn.Dropout(drop_hidden)] if drop_hidden else []
        return _initialise(nn.Sequential(*layers, nn.Linear(84, 10)), init_std)


def resnet20(*, num_classes: int = 10, seed: int = 0) -> nn.Sequential:
    """Create ResNet-20 for images of 3 x 32 x 32 pixels (He et al. 2016, section 4.2).

    Three stages of three residual blocks with 16, 32 and 64 channels and batch normalisation, 0.27
    million parameters. A shortcut between stages takes every other pixel and appends channels of
    zeros (option A), so that it has no parameters.

    Args:
        num_classes: number of outputs.
        seed: seed of the initial values; convolutions are initialised as in He et al. 2015.

    Example:
        >>> net = resnet20()
        >>> net(torch.zeros(5, 3, 32, 32)).shape, sum(p.numel() for p in net.parameters())
        (torch.Size([5, 10]), 269722)
    """
    with seeded_initialization(seed):
        return nn.Sequential(*_residual_layers(3, 3, num_classes))


def resnet8(image_shape: Sequence[int], num_classes: int, *, seed: int = 0) -> nn.Sequential:
    """Create ResNet-8, with one residual block a stage where ResNet-20 has three.

    Its inputs are images flattened to shape (N, channels * height * width).

    Args:
        image_shape: channels, height and width.
        num_classes: number of outputs.
        seed: as in :func:`resnet20`.

    Example:
        >>> net = resnet8((1, 28, 28), 10)
        >>> net(torch.zeros(5, 784)).shape, sum(p.numel() for p in net.parameters())
        (torch.Size([5, 10]), 75002)
    """
    with seeded_initialization(seed):
        layers = _residual_layers(image_shape[0], 1, num_classes)
        return nn.Sequential(nn.Unflatten(-1, tuple(image_shape)), *layers)


def _residual_layers(colours: int, blocks: int, num_classes: int) -> list[nn.Module]:
    layers: list[nn.Module] = [_conv3x3(colours, 16, 1), nn.BatchNorm2d(16), nn.ReLU()]
    width = 16
    for channels in (16, 32, 64):
        for _ in range(blocks):
            layers.append(_ResidualBlock(width, channels))
            width = channels
    return [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes)]


class _ResidualBlock(nn.Module):
    """Two convolutions and a shortcut; the stride is 2 if the number of channels grows."""

    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        self.stride, self.added = (1 if channels == width else 2), channels - width
        self.first = nn.Sequential(_conv3x3(width, channels, self.stride), nn.BatchNorm2d(channels))
        self.second = nn.Sequential(_conv3x3(channels, channels, 1), nn.BatchNorm2d(channels))

    def forward(self, inputs: Tensor) -> Tensor:
        residual = self.second(F.relu(self.first(inputs)))
        if self.added:
            strided = inputs[:, :, :: self.stride, :: self.stride]
            inputs = F.pad(strided, (0, 0, 0, 0, self.added // 2, self.added - self.added // 2))
        return F.relu(inputs + residual)


def _linear(width: int, units: int, generator: torch.Generator) -> nn.Linear:
    """A linear layer with PyTorch's initial values, drawn from ``generator``."""
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, width, units)
    nn.init.kaiming_uniform_(layer.weight, a=math.sqrt(5.0), generator=generator)
    bound = 1.0 / math.sqrt(width) if width else 0.0
    nn.init.uniform_(layer.bias, -bound, bound, generator=generator)
    return layer


def _conv3x3(width: int, channels: int, stride: int) -> nn.Conv2d:
    layer = nn.Conv2d(width, channels, 3, stride=stride, padding=1, bias=False)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return layer


def _initialise(
    net: nn.Sequential, init_std: float | None, generator: torch.Generator | None = None
) -> nn.Sequential:
    if init_std is not None:
        for parameter in net.parameters():
            nn.init.normal_(parameter, std=init_std, generator=generator)
    return net
