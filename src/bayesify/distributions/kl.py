"""KL(q || p) from posterior to prior, and its weight in the loss of each minibatch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from bayesify.distributions.by_group import ByGroup, EmpiricalGaussian
from bayesify.distributions.closed_forms import (
    gaussian_empirical,
    gaussian_gaussian,
    gaussian_grouped,
    gaussian_laplace,
    gaussian_log_uniform,
    gaussian_spike_and_slab,
)
from bayesify.distributions.posteriors import (
    Delta,
    GaussianPosterior,
    MeanFieldGaussian,
    Posterior,
    WeightDraw,
)
from bayesify.distributions.precision import at_least_float32
from bayesify.distributions.priors import BlockPrior, Gaussian, Laplace, Prior
from bayesify.distributions.softplus import log_softplus, softplus
from bayesify.distributions.sparsity import (
    GroupedGaussianBlock,
    LogUniform,
    SpikeAndSlabBlock,
    UnitPrior,
)

__all__ = [
    "KLMethod",
    "KLWeighting",
    "has_closed_form",
    "kl_divergence",
    "minibatch_weight",
    "of_each_weight",
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
    """Compute KL(q || p) = E_q[log q(w) - log p(w)] in nats, summed over the unpruned weights.

    Args:
        q: the posterior over D weights.
        p: the prior of each weight. Pass a prior that depends on parameter names, such as
            ``ByGroup``, as ``p.for_layout(bnn.layout)``.
        draw: weights drawn from q, over which the Monte Carlo estimate averages.
        method: ``"closed"`` for the closed form, ``"monte-carlo"`` for the estimate over ``draw``
            (Blundell et al. 2015, eq. 2), ``"auto"`` for the closed form where one exists and the
            estimate elsewhere. The choice is made for each block of weights with its own prior.
        prior_mean: the centre of the prior, shape (D,): the density of a weight is then
            p(w - prior_mean), as for a prior around a pretrained network (Krishnan et al. 2020,
            MOPED). None stands for zeros.

    Returns:
        A scalar, differentiable in the parameters of q.

    Raises:
        ValueError: ``method`` is unknown, requests a closed form that does not exist, or needs a
            draw that was not given; the draw is not of shape (S, D) with S of at least 1; p or
            ``prior_mean`` is for another number of weights.
        TypeError: q is a point, which has no density; p depends on parameter names and was not
            given a layout; or p has a closed form only, as ``LogUniform``, and a draw was to be
            used.

    Example:
        >>> q = MeanFieldGaussian(torch.zeros(10), std=1.0)
        >>> kl_divergence(q, Gaussian(std=1.0)).item()
        0.0
        >>> kl_divergence(q, Gaussian(std=1.0), prior_mean=torch.ones(10)).item()
        5.0
    """
    if method not in ("auto", "closed", "monte-carlo"):
        raise ValueError(f'kl method must be "auto", "closed" or "monte-carlo", got {method!r}')
    if isinstance(q, Delta):
        raise q.no_density()
    forms = _closed_forms(q, p)
    if method == "monte-carlo":
        forms = [None] * len(forms)
    for prior, form in zip(_priors_of(p), forms, strict=True):
        name = f"KL({type(q).__name__} || {type(prior).__name__})"
        if form is None and method == "closed":
            raise ValueError(
                f'{name} has no registered closed form; use method="auto" or "monte-carlo"'
            )
        if form is None and draw is None:
            raise ValueError(
                f"{name} is estimated by Monte Carlo and needs weights; pass "
                "draw=q.draw(q.noise(key, range(S)))"
            )
    if prior_mean is not None and prior_mean.shape != q.mean.shape:
        raise ValueError(
            f"prior_mean must hold one number for each weight, shape {tuple(q.mean.shape)}, got "
            f"shape {tuple(prior_mean.shape)}"
        )
    terms = _closed_form_terms(q, p, forms, prior_mean)
    if draw is not None and None in forms:
        _check_draw(draw, q)
        terms += _monte_carlo_terms(q, p, forms, prior_mean, draw)
    if type(q).total_correlation is not Posterior.total_correlation:
        terms.append(q.total_correlation())
    return terms[0] if len(terms) == 1 else torch.stack(terms).sum()


def _check_draw(draw: WeightDraw, q: Posterior) -> None:
    shape, of_noise = draw.weights.shape, draw.noise.shape
    fits = len(shape) == 2 and shape[0] >= 1 and shape[1:] == q.mean.shape
    if not (fits and len(of_noise) == 2 and of_noise[0] == shape[0]):
        raise ValueError(
            f"draw must hold S weight vectors, shape (S, {len(q.mean)}) with S of at least 1, got "
            f"shape {tuple(shape)} of noise {tuple(of_noise)}; use "
            "q.draw(q.noise(key, range(S)))"
        )


def has_closed_form(q: Posterior, p: Prior) -> bool:
    """Return True if the KL needs no draw with ``method="auto"``.

    Raises:
        TypeError: p depends on parameter names and was not given a layout.

    Example:
        >>> from bayesify.distributions.priors import ScaleMixture
        >>> has_closed_form(MeanFieldGaussian(torch.zeros(1), std=1.0), ScaleMixture())
        False
    """
    return None not in _closed_forms(q, p)


def minibatch_weight(
    weighting: KLWeighting,
    *,
    batch_index: int | None,
    num_batches: int | None,
    batch_size: int,
    num_data: int,
) -> float:
    """Return the factor on KL / N in the loss of minibatch i.

    With these factors the sum of B_i loss_i over an epoch is the free energy of all data, at
    temperature 1.
    ``"uniform"`` gives 1: minibatch i carries the share B_i / N of the KL. ``"geometric"`` gives
    pi_i N / B_i with pi_i = 2^-i / (1 - 2^-M) for i = 1..M (Blundell et al. 2015, eq. 9, written
    so that it does not overflow for large M).

    Args:
        weighting: ``"uniform"`` or ``"geometric"``.
        batch_index: i - 1, counted from 0; required for geometric weights.
        num_batches: M, the number of minibatches per epoch; required for geometric weights.
        batch_size: B_i, the number of examples in the minibatch.
        num_data: N, the number of examples in the data set.

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


class _GaussianSlice(NamedTuple):
    """Some weights of a ``MeanFieldGaussian``, minus the prior's mean."""

    mean: Tensor
    rho: Tensor
    mask: Tensor | None

    @property
    def std_is_softplus(self) -> bool:
        return True

    @property
    def full_std(self) -> Tensor:
        return softplus(self.rho)

    @property
    def log_std(self) -> Tensor:
        return log_softplus(self.rho)


class _GaussianSliceWithStd(NamedTuple):
    """The same for a posterior whose std is another function of its parameters than softplus."""

    mean: Tensor
    full_std: Tensor
    log_std: Tensor
    mask: Tensor | None

    @property
    def std_is_softplus(self) -> bool:
        return False


_ClosedForm = Callable[[Any, Any], Tensor]


def _priors_of(p: Prior) -> tuple[Prior, ...]:
    of_parameters = isinstance(p, ByGroup | UnitPrior)
    if of_parameters or (isinstance(p, EmpiricalGaussian) and p.per_parameter):
        raise TypeError(
            f"a {type(p).__name__} prior must know which parameter each weight belongs to; give "
            "prior.for_layout(bnn.layout)"
        )
    return p.priors if isinstance(p, BlockPrior) else (p,)


def _closed_forms(q: Posterior, p: Prior) -> list[_ClosedForm | None]:
    """Return the closed form of the KL for each prior, or None where none is registered."""
    # A subclass may read rho differently, so it has a closed form only if it declares its own std.
    own_std = isinstance(q, GaussianPosterior) and not q.std_is_softplus
    kind = MeanFieldGaussian if own_std else type(q)
    return [_CLOSED_FORMS.get((kind, type(prior))) for prior in _priors_of(p)]


def _split_by_prior(p: Prior, vector: Tensor) -> Sequence[Tensor]:
    """Return for each prior its part of the last axis of a vector, shape (..., D)."""
    return p.parts(vector) if isinstance(p, BlockPrior) else (vector,)


def _centred(q: Posterior, prior_mean: Tensor | None) -> Tensor:
    return q.mean if prior_mean is None else q.mean - prior_mean


def _split_mask(q: Posterior, p: Prior) -> Sequence[Tensor | None]:
    return [None] * len(_priors_of(p)) if q.mask is None else _split_by_prior(p, q.mask)


def _closed_form_terms(
    q: Posterior, p: Prior, forms: Sequence[_ClosedForm | None], prior_mean: Tensor | None
) -> list[Tensor]:
    """Return the KL of each prior that has a closed form, summed over its weights."""
    if all(form is None for form in forms):
        return []
    parts: Sequence[Any] = (q,)
    if isinstance(p, BlockPrior) or prior_mean is not None:
        q = cast("GaussianPosterior", q)  # the only classes with closed forms
        kind: Callable[..., Any] = _GaussianSlice if q.std_is_softplus else _GaussianSliceWithStd
        spreads = (q.rho,) if q.std_is_softplus else (q.full_std, q.log_std)
        slices = zip(
            _split_by_prior(p, _centred(q, prior_mean)),
            *(_split_by_prior(p, spread) for spread in spreads),
            _split_mask(q, p),
            strict=True,
        )
        parts = [kind(*fields) for fields in slices]
    return [
        _masked_sum(part.mask, form(part, prior))
        for part, form, prior in zip(parts, forms, _priors_of(p), strict=True)
        if form is not None
    ]


def _monte_carlo_terms(
    q: Posterior,
    p: Prior,
    forms: Sequence[_ClosedForm | None],
    prior_mean: Tensor | None,
    draw: WeightDraw,
) -> list[Tensor]:
    """Return the KL of each prior without a closed form, averaged over the draw."""
    weights = draw.weights if prior_mean is None else draw.weights - prior_mean
    # Half precision would overflow in 1 / std^2 of a narrow prior.
    weights = at_least_float32(weights)
    terms = zip(
        forms,
        _log_densities(q, p, forms, prior_mean),
        _split_by_prior(p, q.log_prob_of(draw)),
        _split_by_prior(p, weights),
        _split_mask(q, p),
        strict=True,
    )
    return [
        _masked_sum(mask, log_q - of_each_weight(log_prior(part), part)) / draw.weights.shape[0]
        for form, log_prior, log_q, part, mask in terms
        if form is None
    ]


def of_each_weight(log_density: Tensor, weights: Tensor) -> Tensor:
    """Return the log densities of a prior, after checking that there is one for each weight.

    Raises:
        ValueError: there is another number of them.
    """
    if log_density.shape != weights.shape:
        raise ValueError(
            "a prior's log_prob must return the log density of each weight, shape "
            f"{tuple(weights.shape)}, got {tuple(log_density.shape)}; do not sum over the weights"
        )
    return log_density


def _log_densities(
    q: Posterior, p: Prior, forms: Sequence[_ClosedForm | None], prior_mean: Tensor | None
) -> list[Callable[[Tensor], Tensor]]:
    """Return the log density of each prior; an ``EmpiricalGaussian`` takes its std from q."""
    densities: list[Callable[[Tensor], Tensor]] = [prior.log_prob for prior in _priors_of(p)]
    learning = {
        number: prior
        for number, (form, prior) in enumerate(zip(forms, _priors_of(p), strict=True))
        if form is None and isinstance(prior, EmpiricalGaussian)
    }
    if learning:
        stds = _split_by_prior(p, q.std)
        means, mask = _split_by_prior(p, _centred(q, prior_mean)), _split_mask(q, p)
        for i, prior in learning.items():
            std = prior.std_of(means[i], stds[i], mask[i]).detach()
            densities[i] = partial(_log_gaussian, std=std)
    return densities


def _log_gaussian(weights: Tensor, std: Tensor) -> Tensor:
    return -0.5 * (weights / std).square() - std.log() - 0.5 * math.log(2.0 * math.pi)


def _masked_sum(mask: Tensor | None, per_weight: Tensor) -> Tensor:
    if mask is not None:
        per_weight = torch.where(mask, per_weight, 0.0)
    # The sum over a network would overflow half precision.
    return per_weight.sum(dtype=torch.promote_types(per_weight.dtype, torch.float32))


_CLOSED_FORMS: dict[tuple[type[Posterior], type[Prior]], _ClosedForm] = {
    (MeanFieldGaussian, EmpiricalGaussian): gaussian_empirical,
    (MeanFieldGaussian, Gaussian): gaussian_gaussian,
    (MeanFieldGaussian, GroupedGaussianBlock): gaussian_grouped,
    (MeanFieldGaussian, Laplace): gaussian_laplace,
    (MeanFieldGaussian, LogUniform): gaussian_log_uniform,
    (MeanFieldGaussian, SpikeAndSlabBlock): gaussian_spike_and_slab,
}
