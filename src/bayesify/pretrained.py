"""Starting from a trained network: its last layer alone, and spreads in proportion to weights."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from glob import escape
from numbers import Real
from typing import Literal

from torch import Tensor, nn

from bayesify.eligible import is_frozen, named_weights
from bayesify.layout import NORMALIZATION_LAYERS

__all__ = ["RelativeStd", "init_std_of", "last_layer", "prior_mean_of"]

# Parameters that torch.nn.utils.parametrizations computes with are those of the layer itself.
_PARAMETRIZATION = re.compile(r"(^|\.)parametrizations(\..*)?$")


def last_layer(net: nn.Module) -> tuple[str, ...]:
    """What to include for a network of which the last layer alone is Bayesian.

    The last layer is the last module, in the order of registration, that has trainable parameters
    of its own and is no normalisation layer. Modules are registered in the order in which they
    are assigned to their parent, which in most networks is the order in which they run; a parent
    comes before its parts. Where it is another, name the parameters yourself:
    ``include=("head.*",)``.

    Args:
        net: any module.

    Returns:
        The names of that module's trainable parameters, as patterns that match just these names,
        for ``include``. A parameter that it shares with another layer is one random variable, so
        it is random there too.

    Raises:
        TypeError: ``net`` is no module.
        ValueError: no module has such parameters.

    Example:
        >>> from bayesify.module import BayesianModule
        >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> last_layer(net)
        ('2.weight', '2.bias')
        >>> BayesianModule(net, include=last_layer(net)).layout.num_weights
        18
    """
    if not isinstance(net, nn.Module):
        raise TypeError(f"net must be an nn.Module, got {net!r}")
    modules = dict(net.named_modules(remove_duplicate=False))
    layers: dict[str, list[str]] = {}
    for name, weight in named_weights(net):
        owner = _PARAMETRIZATION.sub("", name.rpartition(".")[0])
        if not is_frozen(weight) and not isinstance(modules[owner], NORMALIZATION_LAYERS):
            layers.setdefault(owner, []).append(escape(name))
    if not layers:
        raise ValueError(
            "the network must have a layer with trainable parameters that is no normalisation "
            f"layer, but this {type(net).__name__} has none; unfreeze one with "
            "layer.requires_grad_(True)"
        )
    # The order of registration: that of the layers, not that in which their parameters come.
    return tuple(layers[[path for path in modules if path in layers][-1]])


@dataclass(frozen=True)
class RelativeStd:
    """An initial posterior standard deviation in proportion to each weight, for ``init_std``.

    std_i = max(fraction |w_i|, minimum), where w is what the network holds: a trained weight
    starts as sure of itself as it is large. Krishnan, Subedar, Tickoo: *Specifying weight priors
    in Bayesian deep neural networks with empirical Bayes* (MOPED), AAAI 2020, have
    std_i = fraction |w_i|; ``minimum`` is ours.

    Args:
        fraction: std as a fraction of |w|, positive; the paper's delta.
        minimum: the least std, positive, in the unit of a weight. Without it a weight of exactly
            0, where biases and last layers often start, would have no spread at all, and one of
            nearly 0 a spread too small to grow: training moves log std, by small steps. 0.001 is
            a twentieth of the std with which a network starts by default, and is what fraction 0.1
            gives a weight of 0.01.

    Raises:
        TypeError: an argument is no real number.
        ValueError: an argument is not positive and finite.

    Example:
        >>> import torch
        >>> RelativeStd(0.1).of(torch.tensor([-2.0, 0.5, 0.0]))
        tensor([0.2000, 0.0500, 0.0010])
    """

    fraction: float
    minimum: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("fraction", "minimum"):
            value = getattr(self, name)
            if not isinstance(value, Real) or isinstance(value, bool):
                raise TypeError(f"{name} must be a number such as 0.1, got {value!r}")
            number = float(value)
            if not 0.0 < number < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")
            object.__setattr__(self, name, number)

    def of(self, mean: Tensor) -> Tensor:
        """The standard deviations for these means: same shape, dtype and device, no gradient."""
        return (mean.detach().abs() * self.fraction).clamp_min(self.minimum)


def init_std_of(
    given: float | Tensor | RelativeStd | None, initial: Tensor
) -> float | Tensor | None:
    """The posterior's standard deviations at the start, or None for its own default.

    Args:
        given: a number, one number for each weight, or in proportion to them.
        initial: the network's values, shape (D,).

    Raises:
        TypeError: it is none of these.
        ValueError: it is of another shape, or not positive and finite.

    Example:
        >>> import torch
        >>> init_std_of(RelativeStd(0.1), torch.tensor([2.0]))
        tensor([0.2000])
    """
    if isinstance(given, RelativeStd):
        return given.of(initial)
    if given is None:
        return None
    expected = f"init_std must be a number, a vector of shape {tuple(initial.shape)} or RelativeStd"
    if isinstance(given, Tensor):
        if given.dim() and given.shape != initial.shape:
            raise ValueError(f"{expected}, got shape {tuple(given.shape)}")
        fits = bool(((given > 0) & given.isfinite()).all())
    elif isinstance(given, Real) and not isinstance(given, bool):
        fits = 0.0 < given < math.inf
    else:
        raise TypeError(f"{expected}(0.1), got {given!r}")
    if not fits:
        raise ValueError(f"init_std must be positive and finite, got {given}")
    return given


def prior_mean_of(given: Literal["initial"] | Tensor | None, initial: Tensor) -> Tensor | None:
    """Where a prior is centred, shape (D,), or None for 0.

    Args:
        given: None, ``"initial"`` for the network's own values, or a vector.
        initial: those values, shape (D,).

    Raises:
        ValueError: it is none of these, or of another shape.

    Example:
        >>> import torch
        >>> prior_mean_of("initial", torch.ones(2))
        tensor([1., 1.])
    """
    if given is None:
        return None
    if isinstance(given, str) and given == "initial":
        return initial.detach().clone()
    if not isinstance(given, Tensor) or given.shape != initial.shape:
        got = f"shape {tuple(given.shape)}" if isinstance(given, Tensor) else repr(given)
        raise ValueError(
            f'prior_mean must be None, "initial" or a vector of shape {tuple(initial.shape)}, got '
            f"{got}"
        )
    return given.detach().to(initial).clone()
