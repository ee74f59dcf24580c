"""Plain networks that the commands and experiments train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from bayesify.noise import Stream, derived_seed

__all__ = ["lenet5", "mlp"]


def mlp(
    num_inputs: int,
    hidden: Sequence[int],
    num_outputs: int,
    *,
    dropout: tuple[float, float] | None = None,
    init_std: float | None = None,
    seed: int = 0,
) -> nn.Sequential:
    """A multilayer perceptron with ReLU after each hidden layer.

    Args:
        num_inputs: features of a datum.
        hidden: the width of each hidden layer; at least one.
        num_outputs: outputs, such as the classes' logits.
        dropout: probabilities of dropping an input and a hidden unit, or None.
        init_std: draw every weight and bias from N(0, init_std^2); None keeps torch's own
            initial values.
        seed: what the initial values are a function of.

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
    with _initial_values(seed):
        layers: list[nn.Module] = [nn.Dropout(drop_input)] if drop_input else []
        width = num_inputs
        for units in hidden:
            layers += [nn.Linear(width, units), nn.ReLU()]
            layers += [nn.Dropout(drop_hidden)] if drop_hidden else []
            width = units
        return _drawn(nn.Sequential(*layers, nn.Linear(width, num_outputs)), init_std)


def lenet5(
    *,
    dropout: tuple[float, float] | None = None,
    init_std: float | None = None,
    seed: int = 0,
) -> nn.Sequential:
    """LeNet-5 (LeCun et al. 1998) with ReLU and max pooling: 61,706 weights, 10 classes.

    It takes images of 28 x 28 pixels as rows of 784.

    Args:
        dropout: probabilities of dropping a pixel and a unit of the layers after the
            convolutions, or None.
        init_std: as in :func:`mlp`.
        seed: likewise.

    Example:
        >>> lenet5()(torch.zeros(5, 784)).shape
        torch.Size([5, 10])
    """
    drop_input, drop_hidden = dropout or (0.0, 0.0)
    with _initial_values(seed):
        layers: list[nn.Module] = [nn.Dropout(drop_input)] if drop_input else []
        layers += [nn.Unflatten(-1, (1, 28, 28))]
        layers += [nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        for width, units in ((400, 120), (120, 84)):
            layers += [nn.Linear(width, units), nn.ReLU()]
            layers += [nn.Dropout(drop_hidden)] if drop_hidden else []
        return _drawn(nn.Sequential(*layers, nn.Linear(84, 10)), init_std)


@contextmanager
def _initial_values(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(seed, Stream.INITIALIZATION, 0))
        yield


def _drawn(net: nn.Sequential, init_std: float | None) -> nn.Sequential:
    if init_std is not None:
        for parameter in net.parameters():
            nn.init.normal_(parameter, std=init_std)
    return net
