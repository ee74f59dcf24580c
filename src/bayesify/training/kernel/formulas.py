"""Formulas of a step, weight by weight: gradients in closed form, and the optimisers.

Elementwise in all arguments, so that one formula serves a vector, a block of it, or compiled code.
``step.cpp`` holds the same formulas for CPUs.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bayesify.distributions.closed_forms import mean_magnitude_gradients
from bayesify.distributions.priors import BlockPrior, Gaussian, Laplace, Prior, ScaleMixture
from bayesify.distributions.softplus import softplus_ratio
from bayesify.estimators import Estimator
from bayesify.estimators.per_example import PerExampleEstimator

__all__ = [
    "Gradients",
    "LeafKind",
    "OptimizerRule",
    "PriorBlocks",
    "PriorForm",
    "Rates",
    "centred_on",
    "gradients",
    "ivon_updated",
    "leaf_kind",
    "of_sample",
    "prior_blocks",
    "prior_form",
    "rho_of_precision",
    "updated",
]

#: What the network runs on: sampled weights, or means with standard deviations or variances.
LeafKind = Literal["weights", "stds", "variances"]
OptimizerRule = Literal["sgd", "momentum", "adam", "ivon"]
PriorKind = Literal["gaussian", "laplace", "scale-mixture"]
Scalar = Tensor | float


class PriorForm(NamedTuple):
    """A prior as its kind and up to three numbers, and the form of its KL.

    ``exact`` says whether by the closed form, or by Monte Carlo on the step's weights.
    """

    kind: PriorKind
    exact: bool
    numbers: tuple[Scalar, Scalar, Scalar]


class PriorBlocks(NamedTuple):
    """The priors of consecutive blocks of the weights: of one kind, with numbers of their own.

    ``starts`` is where each block begins.
    """

    forms: tuple[PriorForm, ...]
    starts: tuple[int, ...]

    @property
    def kind(self) -> PriorKind:
        """The kind of all of them."""
        return self.forms[0].kind

    @property
    def exact(self) -> bool:
        """Whether the KL is found by the closed form."""
        return self.forms[0].exact


class Gradients(NamedTuple):
    """Derivatives of the loss, in nats per example, each of the shape of the weights."""

    in_mean: Tensor
    in_rho: Tensor
    in_log_std: Tensor


class Rates(NamedTuple):
    """The rates of an optimiser for one vector in one step; SGD uses ``lr`` and ``beta1`` only.

    ``beta1`` is SGD's momentum; ``correction1`` and ``correction2`` are Adam's 1 - beta^t; ``ess``
    is IVON's effective sample size, N / temperature.
    """

    lr: Scalar
    beta1: Scalar
    beta2: Scalar = 0.0
    eps: Scalar = 0.0
    correction1: Scalar = 1.0
    correction2: Scalar = 1.0
    ess: Scalar = 1.0


def leaf_kind(estimator: Estimator) -> LeafKind:
    """The kind of tensors that an estimator runs the network on.

    Example:
        >>> from bayesify.estimators import Flipout, LocalReparameterization, WeightSampling
        >>> [leaf_kind(each) for each in (WeightSampling(), Flipout(), LocalReparameterization())]
        ['weights', 'stds', 'variances']
    """
    if not isinstance(estimator, PerExampleEstimator):
        return "weights"
    return "variances" if estimator.uses_variances else "stds"


def prior_form(prior: Prior, kl: str) -> PriorForm | None:
    """Describe a prior for the kernel, or return None if it has no closed-form gradient.

    Example:
        >>> prior_form(Gaussian(0.5), "auto")
        PriorForm(kind='gaussian', exact=True, numbers=(4.0, 0.0, 0.0))
    """
    exact = kl != "monte-carlo"
    # Exact types only: a subclass may have another density.
    if type(prior) is Gaussian:
        return PriorForm("gaussian", exact, (1.0 / prior.std**2, 0.0, 0.0))
    if type(prior) is Laplace:
        return PriorForm("laplace", exact, (1.0 / prior.scale, 0.0, 0.0))
    if type(prior) is ScaleMixture and kl != "closed":
        odds = math.log(prior.pi) - math.log1p(-prior.pi)
        log_ratio = odds - math.log(prior.std1) + math.log(prior.std2)
        numbers = (1.0 / prior.std1**2, 1.0 / prior.std2**2, log_ratio)
        return PriorForm("scale-mixture", False, numbers)
    return None


def prior_blocks(prior: Prior, kl: str) -> PriorBlocks | None:
    """Describe the prior of a flat vector of weights, or return None if there is no closed form.

    Example:
        >>> prior_blocks(BlockPrior((2, 1), (Gaussian(0.5), Gaussian(1.0))), "auto").starts
        (0, 2)
        >>> prior_blocks(BlockPrior((2, 1), (Gaussian(0.5), Laplace(1.0))), "auto") is None
        True
    """
    priors, sizes = [prior], [0]
    if type(prior) is BlockPrior:
        priors, sizes = [prior.priors[owner] for owner in prior.owners], list(prior.sizes)
    forms = [form for each in priors if (form := prior_form(each, kl)) is not None]
    if len(forms) < len(priors) or len({form.kind for form in forms}) > 1:
        return None
    return PriorBlocks(tuple(forms), tuple(accumulate(sizes[:-1], initial=0)))


def gradients(
    prior: PriorForm,
    *,
    in_mean: Tensor,
    in_log_std: Tensor | None,
    centred: Tensor,
    std: Tensor,
    deviation: Tensor | None,
    kl_factor: Scalar,
    num_samples: float = 1,
    sums: tuple[Tensor, ...] = (),
    out: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> Gradients:
    """The gradients of ``nll + kl_factor * KL`` (Blundell et al. 2015, eqs 3 and 4).

    Of a sampled weight w the derivative in log std is the one in w times w - mean, so that its
    noise is needed no more.

    Args:
        prior: and how its KL is found.
        in_mean: derivative of the nll in the mean, or in w.
        in_log_std: derivative of the nll in the logarithm of the standard deviation; None where
            it follows from that in w.
        centred: the mean less the prior's mean; of a KL that is not exact w less that.
        std: the standard deviation, softplus(rho).
        deviation: w - mean; not needed where the KL is exact and ``in_log_std`` is given.
        kl_factor: what multiplies the KL in the loss.
        num_samples: S, how many weight samples the loss is averaged over. Of several these are
            the last one's; its nll bears 1 / S already. Infinite where the sums hold all of them.
        sums: what :func:`of_sample` says of the samples before it, summed, in the mean and in the
            logarithm of the standard deviation; none where there is one sample.
        out: what to write the three into instead of new tensors where ``kl_factor`` is a number,
            and one to spare; the first may be ``in_mean``, the third ``in_log_std``.

    Example:
        >>> zero, one = torch.zeros(1), torch.ones(1)
        >>> got = gradients(PriorForm("gaussian", True, (1.0, 0.0, 0.0)), in_mean=zero,
        ...                 in_log_std=zero, centred=one, std=one / 2, deviation=None,
        ...                 kl_factor=0.1)
        >>> got.in_mean, got.in_log_std          # mean / s^2 and std^2 / s^2 - 1, times 0.1
        (tensor([0.1000]), tensor([-0.0750]))
    """
    # In as few passes over memory as possible where nothing is compiled. Outputs that are not
    # given are allocated.
    mean_out, rho_out, log_std_out, spare = (None,) * 4 if out is None else out
    if not prior.exact:
        assert deviation is not None
        if in_log_std is None:
            total_mean = of_sample(
                prior, in_mean, centred, kl_factor / num_samples, (mean_out, rho_out, spare)
            )
            total = torch.mul(total_mean, deviation, out=log_std_out)
            if sums:
                total_mean = torch.add(total_mean, sums[0], out=mean_out)
                total = torch.add(total, sums[1], out=log_std_out)
        else:
            score = _score(prior, centred, rho_out, spare)
            total_mean = _plus(in_mean, kl_factor, score, mean_out)
            total = _plus(in_log_std, kl_factor, score.mul_(deviation), log_std_out)
    else:
        if in_log_std is None:
            assert deviation is not None
            in_log_std = torch.mul(in_mean, deviation, out=log_std_out)
            if sums:
                in_mean = torch.add(in_mean, sums[0], out=mean_out)
                in_log_std = torch.add(in_log_std, sums[1], out=log_std_out)
        if prior.kind == "gaussian":
            kl_mean = torch.mul(centred, prior.numbers[0], out=spare)
            kl_log_std = torch.mul(std, std, out=rho_out).mul_(prior.numbers[0])
        else:
            slopes = mean_magnitude_gradients(centred, std)
            kl_mean = slopes[0] * prior.numbers[0]
            kl_log_std = (slopes[1] * std).mul_(prior.numbers[0])
        total = _plus(in_log_std, kl_factor, kl_log_std, log_std_out)
        total_mean = _plus(in_mean, kl_factor, kl_mean, mean_out)
    total.sub_(kl_factor)
    return Gradients(total_mean, softplus_ratio(std, rho_out, spare).mul_(total), total)


def of_sample(
    prior: PriorForm,
    in_mean: Tensor,
    centred: Tensor,
    kl_share: Scalar,
    out: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
) -> Tensor:
    """The contribution of one weight sample to the gradient in the mean.

    Times w - mean it is what it adds to the one in log std.

    Args:
        prior: a KL that is exact adds nothing here.
        in_mean: derivative of its part of the nll.
        centred: the sampled weights less the prior's mean.
        kl_share: what multiplies its part of the KL's estimate in the loss.
        out: what to write the result into, and two to spare; the first may be ``in_mean``.

    Example:
        >>> form = PriorForm("gaussian", False, (4.0, 0.0, 0.0))
        >>> of_sample(form, torch.ones(1), torch.ones(1), 0.5)
        tensor([3.])
    """
    if prior.exact:
        return in_mean
    return _plus(in_mean, kl_share, _score(prior, centred, out[1], out[2]), out[0])


def _score(prior: PriorForm, weights: Tensor, out: Tensor | None, spare: Tensor | None) -> Tensor:
    """-d log p(w) / dw."""
    if prior.kind == "gaussian":
        return torch.mul(weights, prior.numbers[0], out=out)
    if prior.kind == "laplace":
        return torch.sign(weights, out=out).mul_(prior.numbers[0])
    slab, spike, log_ratio = prior.numbers
    # The odds of the narrow component; weighed by what it adds, so that nothing cancels.
    odds = torch.mul(weights, weights, out=spare).mul_(0.5 * (slab - spike)).sub_(log_ratio)
    # Further out nothing changes, but exp would overflow, which takes a CPU several times as long.
    odds.clamp_(-80.0, 80.0)
    narrow = odds.sigmoid_().mul_(weights)
    return _plus(torch.mul(weights, slab, out=out), spike - slab, narrow, out)


def _plus(base: Tensor, factor: Scalar, summand: Tensor, out: Tensor | None) -> Tensor:
    """``base + factor * summand``, in one pass where the factor is a number."""
    if isinstance(factor, Tensor):
        return torch.addcmul(base, summand, factor)
    return torch.add(base, summand, alpha=factor, out=out)


def updated(
    rule: OptimizerRule,
    value: Tensor,
    gradient: Tensor,
    moments: tuple[Tensor, ...],
    rates: Rates,
) -> tuple[Tensor, ...]:
    """Compute one step of an optimiser: the new value and its new moments.

    ``"adam"`` is algorithm 1 of Kingma and Ba 2015, with two moments; ``"momentum"`` has one,
    ``"sgd"`` none.

    Example:
        >>> one, zero = torch.ones(1), torch.zeros(1)
        >>> rates = Rates(lr=0.1, beta1=0.9, beta2=0.99, correction1=0.1, correction2=0.01)
        >>> updated("adam", one, one, (zero, zero), rates)[0]
        tensor([0.9000])
        >>> updated("momentum", one, one, (one,), Rates(lr=0.1, beta1=0.5))
        (tensor([0.8500]), tensor([1.5000]))
    """
    if rule == "adam":
        first, second = moments
        first = first + (gradient - first) * (1.0 - rates.beta1)
        second = second * rates.beta2 + gradient * gradient * (1.0 - rates.beta2)
        root = second.sqrt() * (rates.correction2**-0.5) + rates.eps
        return value - first / root * (rates.lr / rates.correction1), first, second
    if rule == "momentum":
        first = moments[0] * rates.beta1 + gradient
        return value - first * rates.lr, first
    return (value - gradient * rates.lr,)


def ivon_updated(
    values: tuple[Tensor, ...],
    *,
    in_mean: Tensor,
    in_log_std: Tensor,
    centred: Tensor,
    delta: Scalar,
    rates: Rates,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute one step of IVON (Shen et al. 2024, algorithm 1).

    The paper's two estimates are those of the gradients of the loss ``nll + KL / ess``, less what
    the KL adds to them. With std^2 = 1 / (ess (h + delta)) and a weight sample w::

        g_hat = d nll / d w                  = d loss / d mean - delta * centred
        h_hat = g_hat (w - mean) / std^2     = h + d loss / d log std / std^2

    The second holds because d nll / d log std = g_hat (w - mean), and d KL / d log std =
    std^2 / prior_std^2 - 1 = ess std^2 (delta - h - delta). Averages over examples and weight
    samples pass through. h_hat may be negative, and so may h; but h + delta never falls below half
    of what it was, and so stays positive.

    Args:
        values: mean, momentum and h.
        in_mean: derivative of the loss in the mean.
        in_log_std: derivative of the loss in the logarithm of the standard deviation.
        centred: the mean less the prior's mean.
        delta: the weight decay, 1 / (ess prior_std^2).
        rates: lr, the two betas, 1 - beta1^t and ess.

    Returns:
        The new mean, rho, momentum and h.

    Example:
        >>> zero, one = torch.zeros(1), torch.ones(1)
        >>> rates = Rates(lr=0.5, beta1=0.9, beta2=0.9, correction1=0.1, ess=100.0)
        >>> mean, rho, momentum, h = ivon_updated((one, zero, one), in_mean=3 * one,
        ...     in_log_std=zero, centred=one, delta=1.0, rates=rates)
        >>> mean, momentum, h                # 1 - 0.5 (2 + 1) / (1 + 1), where g_hat is 2
        (tensor([0.2500]), tensor([0.2000]), tensor([1.]))
    """
    mean, momentum, h = values
    precision = h + delta  # of the posterior, per example
    gradient = _plus(in_mean, -delta, centred, None)  # g_hat
    excess = in_log_std * (rates.ess * (1.0 - rates.beta2))  # (1 - beta2) (h_hat - h) / precision
    momentum = _plus(momentum, 1.0 - rates.beta1, gradient - momentum, None)
    # beta2 h + (1 - beta2) h_hat + (1 - beta2)^2 (h - h_hat)^2 / (2 (h + delta))
    h = torch.addcmul(h, precision, torch.addcmul(excess, excess, excess, value=0.5))
    precision = h + delta
    newton = _plus(momentum / rates.correction1, delta, centred, None).div_(precision)
    return _plus(mean, -rates.lr, newton, None), rho_of_precision(precision, rates.ess), momentum, h


def centred_on(prior_mean: Tensor | None, mean: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean less the prior's mean, for IVON; 0 for pruned weights, which it leaves alone.

    Args:
        prior_mean: shape (D,), or None for zeros.
        mean: shape (D,).
        mask: False for pruned weights, shape (D,), or None where nothing was pruned.

    Example:
        >>> centred_on(torch.ones(2), torch.tensor([3.0, 0.0]), torch.tensor([True, False]))
        tensor([2., 0.])
    """
    if prior_mean is None:
        return mean
    centred = mean - prior_mean
    return centred if mask is None else torch.where(mask, centred, 0.0)


def rho_of_precision(precision: Tensor, ess: Scalar) -> Tensor:
    """Return rho where softplus(rho) is the std of IVON, 1 / sqrt(ess precision).

    Args:
        precision: h + delta of each weight, shape (D,).
        ess: the effective sample size.

    Example:
        >>> torch.nn.functional.softplus(rho_of_precision(torch.tensor([4.0]), ess=25.0))
        tensor([0.1000])
    """
    std = (precision * ess).rsqrt_()
    # inverse_softplus in the dtype of std, which is faster than in float64.
    return std.neg().expm1_().neg_().log_().add_(std)
