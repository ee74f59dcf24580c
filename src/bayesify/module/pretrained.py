"""Starts from a trained network: last layers, relative standard deviations, prior means."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from glob import escape
from numbers import Real
from typing import Literal, TypeAlias

from torch import Tensor, nn

from bayesify.distributions.eligible import is_frozen, named_weights
from bayesify.distributions.layout import ParameterLayout, pattern_pairs
from bayesify.distributions.normalization import is_affine
from bayesify.noise.arguments import positive_number

__all__ = ["PriorMean", "RelativeStd", "init_std_of", "last_layer", "prior_mean_of"]

#: The centre of a prior: 0, the network's values, a vector of shape (D,), or one of these by name.
PriorMean: TypeAlias = Literal["initial"] | Tensor | Mapping[str, Literal["initial"] | float] | None

# Parameters under "parametrizations" (torch.nn.utils.parametrize) belong to the layer itself.
_PARAMETRIZATION = re.compile(r"(^|\.)parametrizations(\..*)?$")


def last_layer(net: nn.Module) -> tuple[str, ...]:
    """Return the value of ``include`` that makes only the last layer Bayesian.

    The last layer is the last module, in the order of registration, that has trainable parameters
    of its own and is not a normalisation layer. Modules are registered in the order in which they
    are assigned to their parent, which in most networks is the order in which they run; a parent
    comes before its children. If the order differs, name the parameters instead:
    ``include=("head.*",)``.

    Args:
        net: any module.

    Returns:
        Patterns that match exactly the names of that layer's trainable parameters. A parameter
        that is shared with another layer is one random variable and therefore random there too.

    Raises:
        TypeError: ``net`` is not a module.
        ValueError: no module has such parameters.

    Example:
        >>> from bayesify.module.bayesian import BayesianModule
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
        if not is_frozen(weight) and not is_affine(net, name):
            layers.setdefault(owner, []).append(escape(name))
    if not layers:
        raise ValueError(
            "the network must have a layer with trainable parameters that is not a normalisation "
            f"layer, but this {type(net).__name__} has none; unfreeze one with "
            "layer.requires_grad_(True)"
        )
    # The last in the order in which modules, not parameters, were registered.
    return tuple(layers[[path for path in modules if path in layers][-1]])


@dataclass(frozen=True)
class RelativeStd:
    """An initial posterior standard deviation in proportion to each weight, for ``init_std``.

    std_i = max(fraction |w_i|, minimum), where w_i is the network's value. Krishnan, Subedar,
    Tickoo: *Specifying weight priors in Bayesian deep neural networks with empirical Bayes*
    (MOPED), AAAI 2020, use std_i = fraction |w_i|; ``minimum`` is an addition of this library.

    Args:
        fraction: std as a fraction of |w|, positive; delta in the paper.
        minimum: the smallest std, positive, in the unit of a weight. Without it a weight of exactly
            0, as in many initial biases and last layers, would have no spread, and a weight near 0
            a spread too small to grow, since training changes log std in small steps. 0.001 is a
            twentieth of the default initial std, and is what fraction 0.1 gives a weight of 0.01.

    Raises:
        TypeError: an argument is not a real number.
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
            object.__setattr__(self, name, float(positive_number(name, getattr(self, name))))

    def of(self, mean: Tensor) -> Tensor:
        """Return the standard deviations for these means, with their shape and no gradient."""
        return (mean.detach().abs() * self.fraction).clamp_min(self.minimum)


def init_std_of(
    given: float | Tensor | RelativeStd | None, initial: Tensor
) -> float | Tensor | None:
    """Return the initial standard deviations of a posterior, or None for its default.

    Args:
        given: a number, a vector with one number for each weight, or ``RelativeStd``.
        initial: the network's values, shape (D,).

    Raises:
        TypeError: ``given`` is of another type.
        ValueError: ``given`` has another shape, or is not positive and finite.

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
        if given.is_complex():
            raise ValueError(f"{expected}, got {given.dtype}")
        fits = bool(((given > 0) & given.isfinite()).all())
    elif isinstance(given, Real) and not isinstance(given, bool):
        fits = 0.0 < given < math.inf
    else:
        raise TypeError(f"{expected}(0.1), got {given!r}")
    if not fits:
        raise ValueError(f"init_std must be positive and finite, got {given}")
    return given


def prior_mean_of(given: PriorMean, initial: Tensor, layout: ParameterLayout) -> Tensor | None:
    """Return the centre of a prior, shape (D,), or None for 0.

    Args:
        given: None, ``"initial"`` for the network's values, a vector of shape (D,), or a mapping
            from name patterns to ``"initial"`` or a number, of which the first that matches a
            parameter decides.
        initial: the network's values, shape (D,).
        layout: the layout of the random parameters.

    Raises:
        TypeError: a pattern is no string.
        ValueError: ``given`` is none of these, has another shape, is not finite or not real, or its
            patterns do not fit.

    Example:
        >>> import torch
        >>> net = nn.Linear(2, 1)
        >>> layout = ParameterLayout.of(net)
        >>> prior_mean_of({"bias": 0.0, "*": "initial"}, torch.ones(3), layout)
        tensor([1., 1., 0.])
    """
    if given is None:
        return None
    if isinstance(given, str) and given == "initial":
        return initial.detach().clone()
    if isinstance(given, Mapping):
        return _centre_by_pattern(given, initial, layout)
    if not isinstance(given, Tensor) or given.shape != initial.shape:
        got = f"shape {tuple(given.shape)}" if isinstance(given, Tensor) else repr(given)
        raise ValueError(
            f'prior_mean must be None, "initial", a vector of shape {tuple(initial.shape)} or a '
            f"mapping from name patterns, got {got}"
        )
    if given.is_complex() or not bool(given.isfinite().all()):
        raise ValueError(
            "prior_mean must hold finite real numbers, got "
            + (str(given.dtype) if given.is_complex() else "nan or infinite ones")
            + "; pass the weights of a network whose training did not diverge"
        )
    return given.detach().to(initial).clone()


def _centre_by_pattern(
    given: Mapping[str, Literal["initial"] | float], initial: Tensor, layout: ParameterLayout
) -> Tensor:
    pairs = pattern_pairs("prior_mean", given, '{"*.bias": 0.0, "*": "initial"}')
    centre, choices = initial.detach().clone(), [choice for _, choice in pairs]
    for choice in choices:
        is_number = isinstance(choice, Real) and not isinstance(choice, bool)
        is_initial = isinstance(choice, str) and choice == "initial"
        if not is_initial and not (is_number and math.isfinite(choice)):
            raise ValueError(
                f'prior_mean must give each pattern "initial" or a finite number, got {choice!r}'
            )
    for name, number in zip(
        layout.names,
        layout.first_matches([pattern for pattern, _ in pairs], "prior_mean", "a centre"),
        strict=True,
    ):
        choice = choices[number]
        if choice != "initial":
            centre[layout.slice_of(name)] = choice
    return centre
