"""Priors under which the weights that the data do not need fall to zero, alone or by unit."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn, get_args

from torch import Tensor

from bayesify.distributions.by_group import ByGroup, EmpiricalGaussian, UnitBlock
from bayesify.distributions.layout import ParameterLayout
from bayesify.distributions.priors import Gaussian, Prior, ScaleMixture

__all__ = [
    "GroupedGaussian",
    "GroupedGaussianBlock",
    "LogUniform",
    "SpikeAndSlab",
    "SpikeAndSlabBlock",
    "Unit",
    "UnitOrWeight",
    "UnitPrior",
]

#: What a group of weights belongs to.
Unit = Literal["input", "output"]
UnitOrWeight = Literal["input", "output", "weight"]


@dataclass(frozen=True)
class LogUniform(Prior):
    """The improper prior p(w) = C / |w|, under which log |w| is uniform.

    Sparse variational dropout (Kingma et al. 2015; Molchanov et al. 2017, section 4.2). The KL of a
    Gaussian to it depends on |mean| / std only, and is computed exactly, not by the approximation
    of Molchanov et al. 2017, eq. 14. It is known up to a constant, which is chosen so that the KL
    of a weight with mean 0 is zero.

    The prior is improper: its integral is infinite. The KL is therefore no number of nats that
    weights could be coded in, the objective is no bound on the evidence, ``free_energy`` is not
    reported, and there is no certificate. ``GroupedGaussian(by="weight")`` is the proper prior that
    is most like it.

    Example:
        >>> LogUniform().is_proper
        False
        >>> from bayesify.distributions.kl import kl_divergence
        >>> from bayesify.distributions.posteriors import MeanFieldGaussian
        >>> import torch
        >>> q = MeanFieldGaussian(torch.tensor([0.0, 10.0]), std=1.0)
        >>> kl_divergence(q, LogUniform()).detach()
        tensor(2.9327)
    """

    def log_prob(self, weights: Tensor) -> NoReturn:  # noqa: ARG002
        """Raise TypeError: an improper prior has no density."""
        raise TypeError(
            "a LogUniform prior is improper and has no density, so that there are no samples of "
            "it, no Monte Carlo KL and no penalty of a point estimate; use "
            'posterior=MeanFieldGaussian with kl="auto", or a proper prior such as '
            "ScaleMixture()"
        )

    @property
    def is_proper(self) -> bool:
        """False: the integral of 1 / |w| is infinite."""
        return False


class UnitPrior(Prior):
    """A prior that treats the weights of a unit of the network together.

    Of a parameter with several axes the first counts the outputs of a layer and the second its
    inputs, as in ``nn.Linear`` and ``nn.Conv2d``.

    Example:
        >>> isinstance(SpikeAndSlab(), UnitPrior)
        True
    """

    by: UnitOrWeight

    def for_layout(self, layout: ParameterLayout) -> Prior:
        """Return the priors of the parameters, each with the units of its shape."""
        return ByGroup({"*": self}).for_layout(layout)

    @abstractmethod
    def for_parameter(self, shape: Sequence[int]) -> Prior:
        """Return the prior of the weights of one parameter of this shape, flattened."""

    def log_prob(self, weights: Tensor) -> NoReturn:  # noqa: ARG002
        """Raise TypeError: the units depend on the layout of the network."""
        raise TypeError(
            f"a {type(self).__name__} prior must know which parameter each weight belongs to; use "
            "prior.for_layout(bnn.layout)"
        )

    def _units(self, shape: Sequence[int]) -> tuple[int, int, int] | None:
        """The shape as (before, units, after), or None for a parameter without units."""
        if self.by == "weight":
            return (1, math.prod(shape), 1)
        if len(shape) < 2:
            return None
        axis = 0 if self.by == "output" else 1
        return (math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))


@dataclass(frozen=True)
class GroupedGaussian(UnitPrior):
    """N(0, s^2) with one s for each input, output or weight, learned by empirical Bayes.

    At every step s^2 is the mean of mean^2 + std^2 over the group, which maximises the evidence
    lower bound, as in ``EmpiricalGaussian``. A group that the data do not need shrinks as a whole:
    automatic relevance determination (MacKay 1994; Neal 1996). With ``by="input"`` these are the
    pixels, and the hidden units of which the next layer makes no use. With ``by="weight"`` the KL
    of a weight is log(1 + mean^2 / std^2) / 2 (Kharitonov et al. 2018, variational dropout via
    empirical Bayes).

    Args:
        by: ``"input"`` for one s for each index of a parameter's second axis (a column of a weight
            matrix, an input channel of a convolution), ``"output"`` for the first axis (a row, a
            filter), ``"weight"`` for an s of each weight. Parameters with one axis, such as biases,
            have the prior ``EmpiricalGaussian()`` under the first two.

    Raises:
        ValueError: ``by`` is none of these.

    Example:
        >>> from torch import nn
        >>> layout = ParameterLayout.of(nn.Linear(3, 2))
        >>> GroupedGaussian(by="input").for_layout(layout).priors
        (GroupedGaussianBlock(shape=(2, 3, 1)), Gaussian(std=1.0))
    """

    by: UnitOrWeight = "input"

    def __post_init__(self) -> None:
        _check_choice(self.by, get_args(UnitOrWeight))

    def for_parameter(self, shape: Sequence[int]) -> Prior:
        """Return the prior of the weights of one parameter of this shape, flattened."""
        units = self._units(shape)
        if units is None:
            return EmpiricalGaussian().for_parameter(shape)
        return GroupedGaussianBlock(units)

    @property
    def is_learned(self) -> bool:
        """True: each s is a function of the posterior."""
        return True


@dataclass(frozen=True)
class GroupedGaussianBlock(UnitBlock):
    """``GroupedGaussian`` on one parameter.

    Example:
        >>> GroupedGaussianBlock((2, 3, 1)).is_learned
        True
    """

    @property
    def is_learned(self) -> bool:
        """True: each s is a function of the posterior."""
        return True


@dataclass(frozen=True)
class SpikeAndSlab(UnitPrior):
    """All weights of a unit from N(0, std1^2), or all from N(0, std2^2): slab or spike.

    ``ScaleMixture`` with one choice for all weights of an input or output unit instead of one for
    each weight (group spike and slab; George and McCulloch 1993 for single coefficients). It is
    proper and fixed. The KL is that of weights and choices together, at the best distribution of
    the choices, which has a closed form::

        KL = sum over weights of E[log q(w)] - sum over units of
             log(pi exp E[log N(w; 0, std1^2)] + (1 - pi) exp E[log N(w; 0, std2^2)])

    It is an upper bound on the KL of the weights alone, so that the objective still is a bound on
    the evidence.

    Args:
        pi: probability that a unit has the slab, strictly between 0 and 1.
        std1: standard deviation of the slab, larger than ``std2``.
        std2: standard deviation of the spike, positive. A unit moves from slab to spike only if
            its weights come near the spike: choose it no narrower than the initial weights.
        by: ``"input"`` for units along a parameter's second axis, ``"output"`` along the first, as
            in ``GroupedGaussian``. Parameters with one axis, such as biases, have the prior
            ``Gaussian(std1)``.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> from torch import nn
        >>> layout = ParameterLayout.of(nn.Linear(3, 2))
        >>> SpikeAndSlab(0.2, 0.5, 0.01, by="output").for_layout(layout).sizes
        (6, 2)
    """

    pi: float = 0.1
    std1: float = 0.5
    std2: float = 0.05
    by: Unit = "input"

    def __post_init__(self) -> None:
        checked = ScaleMixture(self.pi, self.std1, self.std2)
        for name in ("pi", "std1", "std2"):
            object.__setattr__(self, name, getattr(checked, name))
        _check_choice(self.by, get_args(Unit))

    def for_parameter(self, shape: Sequence[int]) -> Prior:
        """Return the prior of the weights of one parameter of this shape, flattened."""
        units = self._units(shape)
        if units is None:
            return Gaussian(self.std1)
        return SpikeAndSlabBlock(units, self.pi, self.std1, self.std2)


@dataclass(frozen=True)
class SpikeAndSlabBlock(UnitBlock):
    """``SpikeAndSlab`` on one parameter.

    Example:
        >>> SpikeAndSlabBlock((2, 3, 1), 0.1, 0.5, 0.01).is_learned
        False
    """

    pi: float
    std1: float
    std2: float


def _check_choice(by: str, choices: tuple[str, ...]) -> None:
    if by not in choices:
        raise ValueError(f"by must be one of {', '.join(choices)}, got {by!r}")
