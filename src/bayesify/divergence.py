"""KL(q || p) of a posterior from a prior, and its weight in each minibatch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from bayesify.closed_forms import gaussian_empirical, gaussian_gaussian, gaussian_laplace
from bayesify.groups import ByGroup, EmpiricalGaussian
from bayesify.posteriors import MeanFieldGaussian, Posterior, WeightDraw
from bayesify.priors import Blocks, Gaussian, Laplace, Prior
from bayesify.softplus import log_softplus, softplus

__all__ = [
    "KLMethod",
    "KLWeighting",
    "has_closed_form",
    "kl_divergence",
    "minibatch_weight",
]

KLMethod = Literal["auto", "closed", "monte-carlo"]
KLWeighting = Literal["uniform", "geometric"]


def kl_divergence(
    q: Posterior,
    p: Prior,
    draw: WeightDraw | None = None,
    *,
    method: KLMethod = "auto",
    prior_mean: Tensor | None = None,
) -> Tensor:
    """KL(q || p) = E_q[log q(w) - log p(w)], in nats, summed over the weights that are not pruned.

    Args:
        q: the posterior over D weights.
        p: the prior of each; one that names parameters, as ``p.for_layout(bnn.layout)``.
        draw: weights drawn from q, which a Monte Carlo estimate averages over.
        method: ``"closed"`` for the closed form, ``"monte-carlo"`` for the estimate over ``draw``
            (Blundell et al. 2015, eq. 2), ``"auto"`` for the closed form where there is one. Each
            of several blocks of weights has its own.
        prior_mean: where the prior is centred, shape (D,): the density of a weight is then
            p(w - prior_mean), as about a pretrained network (Krishnan et al. 2020, MOPED). None
            stands for zeros.

    Returns:
        A scalar, differentiable in the parameters of q.

    Raises:
        ValueError: ``method`` is unknown, asks for a closed form that does not exist, or needs a
            draw that was not given; p or ``prior_mean`` is for another number of weights.
        TypeError: p still names parameters; or it learns from the spread of a q that has none.

    Example:
        >>> q = MeanFieldGaussian(torch.zeros(10), std=1.0)
        >>> kl_divergence(q, Gaussian(std=1.0)).item()
        0.0
        >>> kl_divergence(q, Gaussian(std=1.0), prior_mean=torch.ones(10)).item()
        5.0
    """
    if method not in ("auto", "closed", "monte-carlo"):
        raise ValueError(f'kl method must be "auto", "closed" or "monte-carlo", got {method!r}')
    forms = _forms(q, p)
    if method == "monte-carlo":
        forms = [None] * len(forms)
    for prior, form in zip(_priors(p), forms, strict=True):
        name = f"KL({type(q).__name__} || {type(prior).__name__})"
        if form is None and method == "closed":
            raise ValueError(f'{name} has no closed form here; use method="auto" or "monte-carlo"')
        if form is None and draw is None:
            raise ValueError(
                f"{name} is estimated by Monte Carlo and needs draw=q.draw(noise) with noise of "
                "shape (S, D)"
            )
    if prior_mean is not None and prior_mean.shape != q.mean.shape:
        raise ValueError(
            f"prior_mean must hold one number for each weight, shape {tuple(q.mean.shape)}, got "
            f"shape {tuple(prior_mean.shape)}"
        )
    terms = _exact_terms(q, p, forms, prior_mean)
    if draw is not None and None in forms:
        terms += _estimated_terms(q, p, forms, prior_mean, draw)
    return terms[0] if len(terms) == 1 else torch.stack(terms).sum()


def has_closed_form(q: Posterior, p: Prior) -> bool:
    """Whether ``method="auto"`` needs no draw.

    Raises:
        TypeError: p still names parameters.

    Example:
        >>> from bayesify.priors import ScaleMixture
        >>> has_closed_form(MeanFieldGaussian(torch.zeros(1), std=1.0), ScaleMixture())
        False
    """
    return None not in _forms(q, p)


def minibatch_weight(
    weighting: KLWeighting,
    *,
    batch_index: int | None,
    num_batches: int | None,
    batch_size: int,
    num_data: int,
) -> float:
    """The factor on KL / N that makes B_i loss_i sum to the free energy over an epoch.

    ``"uniform"`` gives 1: minibatch i bears the part B_i / N of the KL. ``"geometric"`` gives
    pi_i N / B_i with pi_i = 2^-i / (1 - 2^-M) for i = 1..M (Blundell et al. 2015, eq. 9, written
    so that it does not overflow for large M).

    Args:
        weighting: ``"uniform"`` or ``"geometric"``.
        batch_index: i - 1, from 0; needed for geometric weights.
        num_batches: M; needed for geometric weights.
        batch_size: B_i.
        num_data: N.

    Raises:
        ValueError: the weighting is unknown, or an index is missing or out of range.

    Example:
        >>> sum(minibatch_weight("geometric", batch_index=i, num_batches=3, batch_size=2,
        ...                      num_data=6) * 2 / 6 for i in range(3))
        1.0
    """
    if weighting == "uniform":
        return 1.0
    if weighting != "geometric":
        raise ValueError(f'kl_weighting must be "uniform" or "geometric", got {weighting!r}')
    if num_batches is None or num_batches < 1:
        raise ValueError(f"geometric weights need num_batches of at least 1, got {num_batches}")
    if batch_index is None or not 0 <= batch_index < num_batches:
        raise ValueError(
            f"geometric weights need batch_index from 0 to {num_batches - 1}, got {batch_index}; "
            "call elbo(x, y, batch_index=i)"
        )
    share = 2.0 ** -(batch_index + 1) / -math.expm1(-num_batches * math.log(2.0))
    return share * num_data / batch_size


class _Part(NamedTuple):
    """What a closed form reads of a ``MeanFieldGaussian``: weights about their prior's mean."""

    mean: Tensor
    rho: Tensor
    kept: Tensor | None

    @property
    def std_is_softplus(self) -> bool:
        return True

    @property
    def full_std(self) -> Tensor:
        return softplus(self.rho)

    @property
    def log_std(self) -> Tensor:
        return log_softplus(self.rho)


class _OwnPart(NamedTuple):
    """The same of one whose std is another function of its parameters."""

    mean: Tensor
    full_std: Tensor
    kept: Tensor | None

    @property
    def std_is_softplus(self) -> bool:
        return False

    @property
    def log_std(self) -> Tensor:
        return self.full_std.log()


_ClosedForm = Callable[[Any, Any], Tensor]


def _priors(p: Prior) -> tuple[Prior, ...]:
    if isinstance(p, ByGroup) or (isinstance(p, EmpiricalGaussian) and p.per_parameter):
        raise TypeError(
            f"a {type(p).__name__} prior must know which parameter each weight belongs to; give "
            "prior.for_layout(bnn.layout)"
        )
    return p.priors if isinstance(p, Blocks) else (p,)


def _forms(q: Posterior, p: Prior) -> list[_ClosedForm | None]:
    """For each prior the closed form of its KL, if there is one."""
    # What another class of posterior means by its rho is not known, unless it says so.
    own_std = isinstance(q, MeanFieldGaussian) and not q.std_is_softplus
    kind = MeanFieldGaussian if own_std else type(q)
    return [_CLOSED_FORMS.get((kind, type(prior))) for prior in _priors(p)]


def _cut(p: Prior, vector: Tensor) -> Sequence[Tensor]:
    """For each prior its part of the last axis of a vector, shape (..., D)."""
    return p.parts(vector) if isinstance(p, Blocks) else (vector,)


def _centred(q: Posterior, prior_mean: Tensor | None) -> Tensor:
    return q.mean if prior_mean is None else q.mean - prior_mean


def _cut_kept(q: Posterior, p: Prior) -> Sequence[Tensor | None]:
    return [None] * len(_priors(p)) if q.kept is None else _cut(p, q.kept)


def _exact_terms(
    q: Posterior, p: Prior, forms: Sequence[_ClosedForm | None], prior_mean: Tensor | None
) -> list[Tensor]:
    """The KLs of the priors that have a closed form, summed over the weights of each."""
    if all(form is None for form in forms):
        return []
    parts: Sequence[Any] = (q,)
    if isinstance(p, Blocks) or prior_mean is not None:
        q = cast("MeanFieldGaussian", q)  # the only posteriors with closed forms
        made: Callable[..., Any] = _Part if q.std_is_softplus else _OwnPart
        own = q.rho if q.std_is_softplus else q.full_std
        pieces = zip(_cut(p, _centred(q, prior_mean)), _cut(p, own), _cut_kept(q, p), strict=True)
        parts = [made(*piece) for piece in pieces]
    return [
        _total(part.kept, form(part, prior))
        for part, form, prior in zip(parts, forms, _priors(p), strict=True)
        if form is not None
    ]


def _estimated_terms(
    q: Posterior,
    p: Prior,
    forms: Sequence[_ClosedForm | None],
    prior_mean: Tensor | None,
    draw: WeightDraw,
) -> list[Tensor]:
    """The KLs of the other priors, as averages over a draw."""
    weights = draw.weights if prior_mean is None else draw.weights - prior_mean
    # 1 / std^2 of a narrow prior overflows half precision.
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
    pieces = zip(
        forms,
        _log_densities(q, p, forms, prior_mean),
        _cut(p, q.log_prob_of(draw)),
        _cut(p, weights),
        _cut_kept(q, p),
        strict=True,
    )
    return [
        _total(kept, log_q - log_prior(part)) / draw.weights.shape[0]
        for form, log_prior, log_q, part, kept in pieces
        if form is None
    ]


def _log_densities(
    q: Posterior, p: Prior, forms: Sequence[_ClosedForm | None], prior_mean: Tensor | None
) -> list[Callable[[Tensor], Tensor]]:
    """The log density of each prior; of one that learns its std, with the std that q gives it."""
    densities: list[Callable[[Tensor], Tensor]] = [prior.log_prob for prior in _priors(p)]
    learning = {
        number: prior
        for number, (form, prior) in enumerate(zip(forms, _priors(p), strict=True))
        if form is None and isinstance(prior, EmpiricalGaussian)
    }
    if learning:
        stds = _cut(p, q.std)
        means, kept = _cut(p, _centred(q, prior_mean)), _cut_kept(q, p)
        for i, prior in learning.items():
            std = prior.std_of(means[i], stds[i], kept[i]).detach()
            densities[i] = partial(_log_gaussian, std=std)
    return densities


def _log_gaussian(weights: Tensor, std: Tensor) -> Tensor:
    return -0.5 * (weights / std).square() - std.log() - 0.5 * math.log(2.0 * math.pi)


def _total(kept: Tensor | None, per_weight: Tensor) -> Tensor:
    if kept is not None:
        per_weight = torch.where(kept, per_weight, 0.0)
    # In float32 at least: the sum over a network overflows half precision.
    return per_weight.sum(dtype=torch.promote_types(per_weight.dtype, torch.float32))


_CLOSED_FORMS: dict[tuple[type[Posterior], type[Prior]], _ClosedForm] = {
    (MeanFieldGaussian, EmpiricalGaussian): gaussian_empirical,
    (MeanFieldGaussian, Gaussian): gaussian_gaussian,
    (MeanFieldGaussian, Laplace): gaussian_laplace,
}
