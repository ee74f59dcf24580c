"""Rank-one factors: a few random numbers that multiply the deterministic weights of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.utils import parametrize

from bayesify.distributions.eligible import check_network
from bayesify.estimators.network_state import copy_network

__all__ = ["RankOne", "rank_one"]

_LAYERS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


class RankOne(nn.Module):
    """Factors r and s of one layer, whose weight is then W * (r s^T) along its first two axes.

    :func:`rank_one` makes them; ``include=(RankOne,)`` makes them random.

    Args:
        weight: the layer's weight W, of two axes or more.

    Example:
        >>> import torch
        >>> factors = RankOne(torch.ones(2, 3, 5))
        >>> [(name, tuple(p.shape)) for name, p in factors.named_parameters()]
        [('r', (2,)), ('s', (3,))]
        >>> bool((factors(torch.ones(2, 3, 5)) == 1.0).all())
        True
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.r = nn.Parameter(weight.detach().new_ones(weight.shape[0]))
        self.s = nn.Parameter(weight.detach().new_ones(weight.shape[1]))

    def forward(self, weight: Tensor) -> Tensor:
        """Return W * (r s^T), of the shape of W."""
        rest = [1] * (weight.dim() - 2)
        return weight * self.r.view(-1, 1, *rest) * self.s.view(1, -1, *rest)


def rank_one(net: nn.Module, layers: Sequence[str] = ("*",)) -> nn.Module:
    """Return a copy of a network whose weights are W * (r s^T), r and s being parameters of ones.

    With Gaussian r and s around 1 and W a point this is a rank-1 Bayesian network (Dusenberry et
    al. 2020, section 3): a layer of n outputs and m inputs has n + m random numbers, not n m. The
    weight of a convolution is multiplied by channels; a layer with groups has one s for the
    channels of all groups. Other parameters are unchanged.

    W and the biases are trained as points, without a prior: the KL is that of r and s. Their prior
    N(1, std^2) is that of ``prior_mean="initial"``, as in the example. To load a saved network,
    pass ``load`` the result of ``rank_one(net)``.

    Args:
        net: any network; it is copied, never changed.
        layers: shell patterns over the names of modules: which linear and convolutional layers have
            factors, by default all.

    Returns:
        The copy; its outputs are those of ``net``.

    Raises:
        TypeError: ``net`` is not a module, has random weights or cannot be made Bayesian, as one
            with ``torch.nn.utils.spectral_norm``; or ``layers`` is not a sequence of patterns.
        ValueError: a pattern matches no linear or convolutional layer.

    Example:
        >>> from torch import nn
        >>> from bayesify import BayesianModule, Gaussian
        >>> net = rank_one(nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 10)))
        >>> bnn = BayesianModule(
        ...     net, include=(RankOne,), prior=Gaussian(0.1), prior_mean="initial", init_std=0.1
        ... )
        >>> bnn.layout.num_weights  # 30 + 20 + 20 + 10, of 800
        80
    """
    check_network(net)
    if isinstance(layers, str) or not all(isinstance(pattern, str) for pattern in layers):
        raise TypeError(
            f'layers must be a sequence of name patterns such as ("body.*",), got {layers!r}'
        )
    copied = copy_network(net)
    found = {name: each for name, each in copied.named_modules() if isinstance(each, _LAYERS)}
    for pattern in layers:
        if not any(fnmatchcase(name, pattern) for name in found):
            raise ValueError(
                f"every pattern of layers must match a linear or convolutional layer, but "
                f"{pattern!r} matches none of {', '.join(found) or 'a network without any'}"
            )
    for name, layer in found.items():
        if any(fnmatchcase(name, pattern) for pattern in layers):
            weight = layer.weight
            if not isinstance(weight, Tensor):
                raise TypeError(
                    f"net must be an ordinary network, but the weights of {name} are random "
                    "already; give rank_one the network before BayesianModule gets it"
                )
            held = "weight" in layer._parameters or "weight" in layer._buffers
            if not (held or parametrize.is_parametrized(layer, "weight")):  # a frozen layer
                raise TypeError(
                    f"the weight of {name or 'net'} must be a parameter, but a hook computes it; "
                    "use torch.nn.utils.parametrizations instead, or leave the layer out by layers"
                )
            parametrize.register_parametrization(layer, "weight", RankOne(weight))
    return copied
