"""Objective for examples that arrive in parts: the posterior after a part is the next prior."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from bayesify.distributions.layout import abbreviate
from bayesify.distributions.posteriors import GaussianPosterior, WeightDraw
from bayesify.distributions.previous import PreviousPosterior
from bayesify.distributions.priors import BlockPrior, Gaussian
from bayesify.module.bayesian import BayesianModule
from bayesify.module.multi_head import MultiHead
from bayesify.noise.arguments import number_from_0, positive_number
from bayesify.training.elbo import ELBO

__all__ = ["StreamingELBO"]

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
    the KL. A posterior loses at each part what its family cannot hold, the mean field all
    correlations of the weights, so that the result equals that of all examples at once only where
    the family holds the exact posterior. ``MatrixGaussian()`` forgets less, at a higher price.

    Parameters that no example has trained yet, such as the head of a new task of ``MultiHead``, are
    named by ``new``: their prior is the network's, under which they are independent. A head that
    the examples do not use stays as it is, because its KL is 0 and has no gradient, under
    posteriors with correlations but for rounding.

    The noise of an objective begins anew, as a function of ``bnn.seed``. Give each part a seed of
    its own before its objective is made, as by ``bnn.seed = part``: the errors of parts with the
    same noise have the same sign, and add up.

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
        bnn: the network, with a Gaussian posterior: ``MeanFieldGaussian``, or that of a family such
            as ``MatrixGaussian()``.
        num_data: N_t, the number of new examples.
        num_samples: S, weight samples per step.
        num_before: N_1 + ... + N_(t-1), the number of examples of the earlier parts. None is 0, and
            warns if parameters have no posterior, unless all others are ``new``.
        new: name patterns of the parameters that still have their initial values. For the first
            part these are all parameters that its examples use.
        init_std: largest standard deviation with which training begins, positive. Larger ones of
            ``bnn`` are lowered to it in place, after they were taken as the prior's, but for those
            of ``MultiHead`` heads that are not new, which the examples may not use. Layers under
            ``MatrixGaussian`` begin without correlations then. None leaves all.

    Raises:
        TypeError: the posterior is not a Gaussian, the prior of a new parameter is not
            ``Gaussian``, ``new`` is not a sequence of patterns, ``num_before`` or ``init_std`` is
            no number, or ``init_std`` is given for a subclass with another std.
        ValueError: ``num_data`` or ``num_samples`` is below 1, ``num_before`` is negative,
            ``init_std`` is not positive and finite, a pattern matches no trained parameter, or some
            but not all of the weights that depend on each other are new.

    Example:
        >>> from torch import nn
        >>> elbo = StreamingELBO(BayesianModule(nn.Linear(3, 2)), num_data=100)
        >>> elbo(torch.zeros(8, 3), torch.zeros(8, dtype=torch.long)).kl.item()
        0.0
    """

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
        if num_before is not None:
            num_before = number_from_0("num_before", num_before)
        if init_std is not None:
            init_std = positive_number("init_std", init_std)
        super().__init__(bnn, num_data=num_data, num_samples=num_samples)
        posterior = bnn.posterior
        if not isinstance(posterior, GaussianPosterior):
            raise TypeError(
                "StreamingELBO needs a Gaussian posterior, such as MeanFieldGaussian or "
                f"MatrixGaussian(), got {type(posterior).__name__}; create the network with "
                "posterior=MeanFieldGaussian"
            )
        points = _points(bnn)
        fresh, fresh_points = _matching(bnn, points, new)
        self.previous = PreviousPosterior(posterior)
        if fresh:
            self.previous.renew(posterior, *_priors(bnn, fresh))
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
            kept = _in_heads(bnn) - fresh
            posterior.narrow(init_std, ~_places(bnn, kept))

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
        """Return the KL to the posterior at construction, and the penalty of points, in nats."""
        posterior = self.bnn.posterior
        assert isinstance(posterior, GaussianPosterior)
        kl = self.previous.kl_of(posterior)
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
    is_several = isinstance(new, Iterable) and not isinstance(new, str)
    if not (is_several and all(isinstance(pattern, str) for pattern in new)):
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


def _priors(bnn: BayesianModule, names: set[str]) -> tuple[Tensor, Tensor, Tensor]:
    """Return where the weights of parameters are, and the prior's mean and std there."""
    mean, std = torch.zeros_like(bnn.posterior.mean), torch.ones_like(bnn.posterior.mean)
    for name in names:
        place = bnn.layout.slice_of(name)
        if place.start == place.stop:  # a parameter without elements
            continue
        mean[place] = 0.0 if bnn.prior_mean is None else bnn.prior_mean[place]
        std[place] = _prior_std(bnn, place)
    return _places(bnn, names), mean, std


def _places(bnn: BayesianModule, names: set[str]) -> Tensor:
    """Return True for the weights of these parameters, shape (D,)."""
    found = torch.zeros_like(bnn.posterior.mean, dtype=torch.bool)
    for name in names:
        found[bnn.layout.slice_of(name)] = True
    return found


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
