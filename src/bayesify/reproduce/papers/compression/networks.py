"""The networks that papers on compression share, and the counts by which they are compared."""

from __future__ import annotations

from torch import nn

from bayesify.module.networks import mlp
from bayesify.noise.keys import seeded_initialization

__all__ = ["NETWORKS", "make_network", "num_nonzero", "units_left", "weight_layers"]

#: Titles of the networks by name.
NETWORKS = {
    "lenet-300-100": "LeNet-300-100",
    "lenet-5-caffe": "LeNet-5-Caffe",
    "2x1200": "2x1200, pixels dropped",
}


def make_network(name: str, *, dropout_input: float = 0.0, seed: int = 0) -> nn.Sequential:
    """Create a network for images of 28 x 28 pixels, flattened to shape (N, 784).

    LeNet-300-100 has 266,610 weights, LeNet-5-Caffe (convolutions of 20 and 50 filters of 5 x 5, a
    hidden layer of 500 units, ReLU after each) 431,080, and 2x1200 2,395,210, biases included.

    Args:
        name: one of ``NETWORKS``.
        dropout_input: probability of dropping a pixel in training.
        seed: seed of the initial values.

    Example:
        >>> import torch
        >>> make_network("lenet-5-caffe")(torch.zeros(3, 784)).shape
        torch.Size([3, 10])
    """
    dropout = (dropout_input, 0.0) if dropout_input else None
    if name == "lenet-300-100":
        return mlp(784, (300, 100), 10, dropout=dropout, seed=seed)
    if name == "2x1200":
        return mlp(784, (1200, 1200), 10, dropout=dropout, seed=seed)
    with seeded_initialization(seed):
        layers: list[nn.Module] = [nn.Dropout(dropout_input)] if dropout_input else []
        layers += [nn.Unflatten(-1, (1, 28, 28))]
        # ReLU after the pooling is the same function as before it, at a quarter of the cost.
        layers += [nn.Conv2d(1, 20, 5), nn.MaxPool2d(2), nn.ReLU()]
        layers += [nn.Conv2d(20, 50, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10))


def weight_layers(net: nn.Module) -> list[nn.Linear | nn.Conv2d]:
    """Return the layers with weights, in their order.

    Example:
        >>> [layer.weight.shape[0] for layer in weight_layers(make_network("lenet-300-100"))]
        [300, 100, 10]
    """
    return [each for each in net.modules() if isinstance(each, nn.Linear | nn.Conv2d)]


def num_nonzero(net: nn.Module) -> int:
    """Return the number of weights and biases that are not zero.

    Example:
        >>> num_nonzero(nn.Linear(3, 2))
        8
    """
    return sum(int(parameter.count_nonzero()) for parameter in net.parameters())


def units_left(net: nn.Module) -> list[int]:
    """Return the units left as papers count them, for a network from which dead units are removed.

    For a linear layer these are the inputs that it uses, for a convolution its filters:
    784-300-100 for all of LeNet-300-100, and 20-50-800-500 for all of LeNet-5-Caffe.

    Example:
        >>> units_left(make_network("lenet-5-caffe"))
        [20, 50, 800, 500]
    """
    return [
        len(layer.weight)
        if isinstance(layer, nn.Conv2d)
        else int((layer.weight != 0).any(dim=0).sum())
        for layer in weight_layers(net)
    ]
