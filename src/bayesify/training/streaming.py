"""Objective for examples that arrive in parts: the posterior after a part is the next prior."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from numbers import Real
from typing import Any, Self

import torch
from torch import Tensor

from bayesify.distributions.layout import abbreviate
from bayesify.distributions.posteriors import MeanFieldGaussian, WeightDraw
from bayesify.distributions.precision import Conversion, widely
from bayesify.distributions.priors import BlockPrior, Gaussian
from bayesify.distributions.softplus import inverse_softplus
from bayesify.module.bayesian import BayesianModule
from bayesify.module.multi_head import MultiHead
from bayesify.training.elbo import ELBO

__all__ = ["StreamingELBO"]

#: The buffers of the prior.
_BEFORE = "mean_before", "std_before", "log_std_before"
#: Begins the names of the buffers of what parameters without a posterior were.
_POINT = "point_before_"


class StreamingELBO(ELBO):
    """ELBO of new examples whose prior is the posterior at construction.

    With q_t, the posterior after the parts 1 to t, and N_t new examples (streaming variational
    Bayes, Broderick et al. 2013, eq. 2; continual learning, Nguyen et al. 2018, eq. 4)::

        loss = mean over the batch of -log p(y | x, w) + KL(q || q_{t-1}) / N_t

    Train the first part by the :class:`ELBO`, and each later part by a new objective of this class.
    The prior of the network is not used again: it is within the first posterior. Each example
    belongs in one part only; in two it would count twice. A pruned weight stays pruned and leaves
    the KL. The mean field loses the correlations of the weights at each part, so that the result
    equals that of all examples at once only where the exact posterior has none.

    Parameters that no example has trained yet, such as the head of a new task of ``MultiHead``, are
    named by ``new``: their prior is the network's. A head that the examples do not use stays as it
    is, because its KL is 0 and has no gradient.

    Weights that a part does not need are left with the std of their prior, and the noise of so many
    hides the next part from its first steps. With ``init_std`` training begins at smaller ones, as
    that of the first part does; the prior is the posterior before them, so that the ELBO is the
    same.

    Parameters that have no posterior, such as a learned noise or layers that are not random, are
    point estimates: without ``num_before`` the new examples alone train them, and a few examples
    undo what the earlier ones have taught. With it they have a Gaussian prior around their present
    values, with the precision of ``num_before`` examples of unit information each (Kass and
    Wasserman 1995): a penalty of ``num_before * (value - before)**2 / 2`` nats.

    Args:
        bnn: the network, with a ``MeanFieldGaussian`` posterior.
        num_data: N_t, the number of new examples.
        num_samples: S, weight samples per step.
        num_before: N_1 + ... + N_(t-1), the number of examples of the earlier parts. None is 0, and
            warns if parameters have no posterior, unless all others are ``new``.
        new: name patterns of the parameters that still have their initial values. For the first
            part these are all parameters that its examples use.
        init_std: largest standard deviation with which training begins, positive. Larger ones of
            ``bnn`` are lowered to it in place, after they were taken as the prior's, but for those
            of ``MultiHead`` heads that are not new, which the examples may not use. None leaves
            all.

    Raises:
        TypeError: the posterior is not a ``MeanFieldGaussian``, the prior of a new parameter is not
            ``Gaussian``, ``new`` is not a sequence of patterns, ``num_before`` or ``init_std`` is
            no number, or ``init_std`` is given for a subclass with another std.
        ValueError: ``num_data`` or ``num_samples`` is below 1, ``num_before`` is negative,
            ``init_std`` is not positive and finite, or a pattern matches no trained parameter.

    Example:
        >>> from torch import nn
        >>> elbo = StreamingELBO(BayesianModule(nn.Linear(3, 2)), num_data=100)
        >>> elbo(torch.zeros(8, 3), torch.zeros(8, dtype=torch.long)).kl.item()
        0.0
    """

    mean_before: Tensor
    std_before: Tensor
    log_std_before: Tensor

    def __init__(
        self,
        bnn: BayesianModule,
        *,
        num_data: int,
        num_samples: int = 1,
        num_before: float | None = None,
        new: Sequence[str] = (),
        init_std: float | None = None,
    ) -> None:
        given: Any = num_before
        if given is not None and not isinstance(given, Real):
            raise TypeError(f"num_before must be a number or None, got {given!r}")
        if num_before is not None and not 0.0 <= num_before < math.inf:
            raise ValueError(f"num_before must be at least 0 and finite, got {num_before}")
        given = init_std
        if given is not None and not isinstance(given, Real):
            raise TypeError(f"init_std must be a number or None, got {given!r}")
        if init_std is not None and not 0.0 < init_std < math.inf:
            raise ValueError(f"init_std must be positive and finite, or None, got {init_std}")
        super().__init__(bnn, num_data=num_data, num_samples=num_samples)
        posterior = bnn.posterior
        if not isinstance(posterior, MeanFieldGaussian):
            raise TypeError(
                "StreamingELBO needs a MeanFieldGaussian posterior, got "
                f"{type(posterior).__name__}; create the network with posterior=MeanFieldGaussian, "
                'or the estimator of partial_fit with posterior="mean-field"'
            )
        if init_std is not None and not posterior.std_is_softplus:
            raise TypeError(
                f"init_std needs a posterior whose std is softplus(rho), got "
                f"{type(posterior).__name__}; leave it out, and lower the std beforehand"
            )
        mean, std = posterior.mean.detach().clone(), posterior.full_std.detach().clone()
        log_std = posterior.log_std.detach().clone()
        points = _points(bnn)
        fresh, fresh_points = _matching(bnn, points, new)
        for name in fresh:
            place = bnn.layout.slice_of(name)
            prior_std = _prior_std(bnn, place)
            mean[place] = 0.0 if bnn.prior_mean is None else bnn.prior_mean[place]
            std[place], log_std[place] = prior_std, math.log(prior_std)
        self.register_buffer("mean_before", mean)
        self.register_buffer("std_before", std)
        self.register_buffer("log_std_before", log_std)
        points = {name: each for name, each in points.items() if name not in fresh_points}
        is_first = len(fresh) == len(bnn.layout.names)
        if num_before is None and points and not is_first:
            warnings.warn(
                f"the new examples alone will train {abbreviate(list(points))}, which have no "
                "posterior; give num_before, the number of earlier examples, to hold them, or "
                "num_before=0 to train them so",
                stacklevel=2,
            )
        self.num_before = float(num_before or 0)
        self._points = list(points) if num_before else []
        for number, parameter in enumerate(points.values() if num_before else ()):
            self.register_buffer(f"{_POINT}{number}", parameter.detach().clone())
        if init_std is not None:
            _narrow(bnn, init_std, _in_heads(bnn) - fresh)

    def _apply(self, fn: Conversion, recurse: bool = True) -> Self:
        # In half precision the prior would be another one than the posterior that it was.
        before = {name: getattr(self, name) for name in _BEFORE}
        made: Self = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, tensor in before.items():
            setattr(made, name, widely(fn)(tensor))
        return made

    @property
    def settings(self) -> dict[str, Any]:
        """See ``ELBO.settings``."""
        return {"num_before": self.num_before} if self.num_before else {}

    def complexity(
        self,
        draw: WeightDraw | None,  # noqa: ARG002
        step: int | Tensor,  # noqa: ARG002
        samples: range,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """Return the KL from the posterior at construction, and the penalty of points, in nats."""
        posterior = self.bnn.posterior
        assert isinstance(posterior, MeanFieldGaussian)
        log_ratio = posterior.log_std - self.log_std_before
        least = torch.finfo(self.std_before.dtype).tiny  # a std may underflow
        shift = ((posterior.mean - self.mean_before) / self.std_before.clamp(min=least)).square()
        per_weight = 0.5 * (shift + torch.expm1(2.0 * log_ratio)) - log_ratio
        if posterior.mask is not None:
            per_weight = torch.where(posterior.mask, per_weight, 0.0)
        # A sum over all weights overflows half precision.
        kl = per_weight.sum(dtype=torch.promote_types(per_weight.dtype, torch.float32))
        penalty = kl.new_zeros(())
        held = dict(self.bnn.named_parameters()) if self._points else {}
        for number, name in enumerate(self._points):
            moved = held[name] - getattr(self, f"{_POINT}{number}")
            penalty = penalty + 0.5 * self.num_before * moved.square().sum(dtype=kl.dtype)
        return kl, penalty


def _points(bnn: BayesianModule) -> dict[str, Tensor]:
    """Return the trained parameters that have no posterior, by their names."""
    own = {id(parameter) for parameter in bnn.posterior.parameters()}
    named = bnn.named_parameters()
    return {name: each for name, each in named if each.requires_grad and id(each) not in own}


def _matching(
    bnn: BayesianModule, points: Iterable[str], new: Sequence[str]
) -> tuple[set[str], set[str]]:
    """Return the first names of the random parameters with these names, and those of points."""
    if isinstance(new, str) or not all(isinstance(pattern, str) for pattern in new):
        raise TypeError(
            f'new must be a sequence of name patterns such as ("heads.1.*",), got {new!r}'
        )
    layout = bnn.layout
    found, found_points = set[str](), set[str]()
    for pattern in new:
        matched = [names[0] for names in layout.ties if any(fnmatchcase(n, pattern) for n in names)]
        matched_points = [n for n in points if fnmatchcase(n.removeprefix("net."), pattern)]
        if not (matched or matched_points):
            raise ValueError(
                f"every pattern of new must match a random parameter, or one that is trained "
                f"without a posterior, but {pattern!r} matches none of "
                f"{abbreviate([*layout.names, *points])}; correct or remove it"
            )
        found.update(matched)
        found_points.update(matched_points)
    return found, found_points


def _in_heads(bnn: BayesianModule) -> set[str]:
    """Return the names of the random parameters in the heads of a ``MultiHead``."""
    modules = bnn.net.named_modules()
    heads = [f"{path}.heads.".lstrip(".") for path, each in modules if isinstance(each, MultiHead)]
    return {name for name in bnn.layout.names if name.startswith(tuple(heads))}


@torch.no_grad()
def _narrow(bnn: BayesianModule, max_std: float, kept: set[str]) -> None:
    """Lower the larger standard deviations, but for those of the parameters to keep."""
    rho = bnn.posterior.rho
    assert isinstance(rho, Tensor)
    most = float(inverse_softplus(torch.tensor(max_std, dtype=torch.float64)))
    for name in bnn.layout.names:
        if name not in kept:
            rho[bnn.layout.slice_of(name)].clamp_(max=most)


def _prior_std(bnn: BayesianModule, place: slice) -> float:
    """Return the std of the prior of one parameter."""
    prior = bnn.weight_prior
    if type(prior) is BlockPrior:
        stops = accumulate(prior.sizes)
        owners = zip(prior.owners, stops, strict=True)
        prior = next(prior.priors[owner] for owner, stop in owners if place.start < stop)
    if type(prior) is not Gaussian:
        raise TypeError(
            f"new parameters need a Gaussian prior, got {type(prior).__name__}; create the network "
            "with prior=Gaussian(std)"
        )
    return prior.std
