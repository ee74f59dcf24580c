"""The predictive distributions of counts: mixtures of Poisson or negative binomial ones."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from bayesify.prediction.checks import check_level, signed
from bayesify.prediction.numeric import NumericPredictive
from bayesify.prediction.predictive import choose_samples
from bayesify.prediction.special import scipy_function

__all__ = [
    "CountPredictive",
    "NegativeBinomialPredictive",
    "PoissonPredictive",
    "check_counts",
    "negative_binomial_log_prob",
    "poisson_log_prob",
]

#: Limit of the bisection for a quantile, enough for 64 bits.
_MAX_STEPS = 64
#: Means must be below it to fit into 64 bits; quantiles and drawn rates are at most it.
_LARGEST = 2.0**62
#: From here Stirling's series of the log-gamma function has full precision.
_MANY = 15.0
#: Of greater odds, odds / (1 + odds) is so near 1 that most digits of the difference are lost.
_GREAT_ODDS = 1e6
#: Of greater exponents exp is not computed; it would overflow float32.
_MOST = 80.0


class CountPredictive(NumericPredictive):
    """An equal mixture of S distributions of counts for each component of each target.

    Example:
        >>> p = PoissonPredictive(torch.tensor([[2.0], [4.0]]).log())
        >>> p.mean, p.aleatoric, p.epistemic
        (tensor([3.]), tensor([3.]), tensor([1.]))
        >>> p.quantile(0.5), p.interval(0.9)
        (tensor([3]), (tensor([0]), tensor([7])))
    """

    #: Logarithm of the mean under each weight sample, shape (S, N, ...).
    log_rates: Tensor

    @property
    def samples(self) -> Tensor | None:
        """The mean of the target under each weight sample, shape (S, N, ...)."""
        return self._means

    def _tails(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return P(Y <= counts) and P(Y > counts) under each weight sample, in float64."""
        first = counts.double() + 1.0
        is_below = first <= 0.0
        below, above = self._tails_at(first.clamp(min=1.0))  # the functions are not defined below
        return below.where(~is_below, 0.0), above.where(~is_below, 1.0)

    @abstractmethod
    def _tails_at(self, first: Tensor) -> tuple[Tensor, Tensor]:
        """Return P(Y < first) and P(Y >= first) for counts of at least 1, in float64."""

    @abstractmethod
    def _draw(
        self, rates: npt.NDArray[np.float64], index: Tensor, generator: np.random.Generator
    ) -> npt.NDArray[np.int64]:
        """Draw counts of these means, for the weight samples of ``index``."""

    @property
    def _means(self) -> Tensor:
        return self.log_rates.exp()

    def cdf(self, targets: Tensor) -> Tensor:
        """Return the probability that each component is at most its target value, shape (N, ...).

        Between two counts it is that of the lower one.

        Raises:
            TypeError: the targets are no tensor.
            ValueError: the targets do not have the shape of ``mean``.
        """
        self._check_targets(targets)
        return self._tails(targets.double().floor())[0].mean(0).to(self.log_rates)

    def quantile(self, q: float) -> Tensor:
        """Return the least count whose distribution function is at least q, int64, (N, ...).

        Equal-tailed intervals from these quantiles hold their level or more: each tail beyond them
        has a probability of at most half of the rest.

        Raises:
            TypeError: q is not one number.
            ValueError: q is not strictly between 0 and 1, or a mean is NaN or at least 2^62.
        """
        check_level("q", q)
        # In float64: of great rates the rounding of the mean exceeds the std.
        wide: CountPredictive = copy.copy(self)
        object.__setattr__(wide, "log_rates", self.log_rates.double())
        mean, std = wide.mean, wide.total.sqrt()
        # Cantelli's inequality bounds the quantile. Bisection then keeps F(low) < q <= F(high).
        low = (mean - std * math.sqrt((1.0 - q) / q)).floor().clamp(min=0.0) - 1.0
        high = (mean + std * math.sqrt(q / (1.0 - q))).ceil().clamp(max=_LARGEST)
        for _ in range(_MAX_STEPS):
            if not bool((high - low > 1.0).any()):
                break
            middle = ((low + high) / 2).floor()
            below, above = (tail.mean(0) for tail in self._tails(middle))
            # In the nearer tail, since the other one rounds to 1.
            is_enough = below >= q if q <= 0.5 else above <= 1.0 - q
            is_open = high - low > 1.0
            high = torch.where(is_open & is_enough, middle, high)
            low = torch.where(is_open & ~is_enough, middle, low)
        # A low quantile may be small where one weight sample has a great rate.
        _check_means(mean.where(~(high < _LARGEST), 0.0).unsqueeze(0))
        return high.long()

    def simulate(self, num_draws: int, *, seed: int = 0) -> Tensor:
        """See ``NumericPredictive.simulate``; the counts are int64.

        Raises:
            ValueError: ``num_draws`` is below 1, or a mean is NaN or at least 2^62.
        """
        _, index = choose_samples(self.log_rates, num_draws, seed)
        rates = self.log_rates.double().exp()
        _check_means(rates)
        drawn = rates.detach().gather(0, index).cpu().numpy()
        draws = self._draw(drawn, index, np.random.default_rng(int(seed) % 2**64))
        return torch.from_numpy(draws).to(self.log_rates.device)


@dataclass(frozen=True, eq=False)
class PoissonPredictive(CountPredictive):
    """An equal mixture of S Poisson distributions for each component of each target.

    Args:
        log_rates: logarithm of the mean under each weight sample, shape (S, N, ...).

    Raises:
        ValueError: ``log_rates`` has fewer than two axes or no sample.

    Example:
        >>> p = PoissonPredictive(torch.tensor([[2.0]]).log())
        >>> p.log_prob(torch.tensor([0])), p.cdf(torch.tensor([1]))
        (tensor([-2.]), tensor([0.4060]))
    """

    log_rates: Tensor

    _fields: ClassVar = ("log_rates",)

    @property
    def _noise_variance(self) -> Tensor:
        return self._means

    def _log_probs(self, targets: Tensor) -> Tensor:
        check_counts(targets)
        return poisson_log_prob(self.log_rates, targets)

    def _tails_at(self, first: Tensor) -> tuple[Tensor, Tensor]:
        rates = self.log_rates.double().exp()
        return torch.special.gammaincc(first, rates), torch.special.gammainc(first, rates)

    def _draw(
        self,
        rates: npt.NDArray[np.float64],
        index: Tensor,  # noqa: ARG002
        generator: np.random.Generator,
    ) -> npt.NDArray[np.int64]:
        return generator.poisson(rates)


@dataclass(frozen=True, eq=False)
class NegativeBinomialPredictive(CountPredictive):
    """An equal mixture of S negative binomial distributions for each component of each target.

    Args:
        log_rates: logarithm of the mean under each weight sample, shape (S, N, ...).
        dispersion: alpha in the variance mean + alpha mean^2, positive, broadcastable to
            ``log_rates``.

    Raises:
        ValueError: ``log_rates`` has fewer than two axes or no sample, or ``dispersion`` cannot be
            broadcast to it or is not positive.

    Example:
        >>> p = NegativeBinomialPredictive(torch.tensor([[2.0]]).log(), torch.tensor(0.5))
        >>> p.total, p.interval(0.9)
        (tensor([4.]), (tensor([0]), tensor([6])))
    """

    log_rates: Tensor
    dispersion: Tensor

    _fields: ClassVar = ("log_rates", "dispersion")

    def __post_init__(self) -> None:
        """Check shapes and values."""
        super().__post_init__()
        if torch.compiler.is_compiling():  # there are no values while a program is traced
            return
        if not bool((self.dispersion > 0.0).all()):
            raise ValueError(
                f"dispersion must be positive, got {float(self.dispersion.min())}; without "
                "dispersion use PoissonPredictive"
            )

    @property
    def _noise_variance(self) -> Tensor:
        rates = self._means
        return rates + self.dispersion.to(rates) * rates.square()

    def _log_probs(self, targets: Tensor) -> Tensor:
        check_counts(targets)
        return negative_binomial_log_prob(self.log_rates, targets, self.dispersion)

    def _tails_at(self, first: Tensor) -> tuple[Tensor, Tensor]:
        dispersion = self.dispersion.double()
        odds = dispersion * self.log_rates.double().exp()
        zero, one = 1.0 / (1.0 + odds), odds / (1.0 + odds)
        shape = 1.0 / dispersion
        incomplete = scipy_function("betainc")
        below, above = incomplete(shape, first, zero), incomplete(first, shape, one)
        is_great = odds > _GREAT_ODDS
        if bool(is_great.any()):  # it is slow
            there = is_great.expand_as(above)
            parts = (part.expand_as(above)[there] for part in (shape, first, zero))
            above[there] = scipy_function("betaincc")(*parts)
        return below, above

    def _draw(
        self,
        rates: npt.NDArray[np.float64],
        index: Tensor,
        generator: np.random.Generator,
    ) -> npt.NDArray[np.int64]:
        dispersion = self.dispersion.detach().double().expand(self.log_rates.shape)
        shape = 1.0 / dispersion.gather(0, index).cpu().numpy()
        means = np.minimum(rates * generator.gamma(shape) / shape, _LARGEST)
        return generator.poisson(means)


def poisson_log_prob(log_rates: Tensor, counts: Tensor) -> Tensor:
    """Compute the log probability of counts: y log rate - rate - log y!, elementwise.

    The terms of great counts are large and cancel. By Stirling's series the sum is
    y (d - (exp(d) - 1)) - log(2 pi y) / 2 - ..., with d = log(rate / y). A rate of 0, as for an
    exposure of 0, has log probability 0 for the count 0, and -inf for others.

    Example:
        >>> poisson_log_prob(torch.tensor([0.0, 1.0]), torch.tensor([0, 3]))
        tensor([-1.0000, -1.5100])
        >>> poisson_log_prob(torch.tensor(-torch.inf), torch.tensor([0, 3]))
        tensor([0., -inf])
    """
    y = counts.to(log_rates)
    few, many = y.clamp(max=_MANY), y.clamp(min=_MANY)
    is_many = y >= _MANY
    # Where a branch is not used, its numbers must not make gradients of NaN.
    rates = log_rates.where(~is_many, 0.0).exp()
    # Of a rate of 0 the product with a count of 0 would be NaN.
    direct = few * log_rates.where(few > 0.0, 0.0) - rates - torch.lgamma(few + 1.0)
    d = (log_rates - many.log()).where(is_many, 0.0)
    series = many * (d - torch.expm1(d)) - 0.5 * (2.0 * math.pi * many).log() - _stirling(many)
    return torch.where(is_many, series, direct)


def negative_binomial_log_prob(log_rates: Tensor, counts: Tensor, dispersion: Tensor) -> Tensor:
    """Compute the log probability of counts with variance mean + dispersion mean^2, elementwise.

    The formula is that of ``NegativeBinomialLikelihood``, with r = 1 / dispersion. For great r,
    log Gamma(y + r) and log Gamma(r) are large and nearly equal, and for great y so are
    log Gamma(y + r) and log y!; their difference is then computed from Stirling's series.

    Example:
        >>> one = torch.tensor(1.0)
        >>> negative_binomial_log_prob(torch.tensor([0.0, 1.0]), torch.tensor([0, 3]), one)
        tensor([-0.6931, -2.2530])
    """
    y, alpha = counts.to(log_rates), dispersion.to(log_rates)
    few = _negative_binomial_of_few(log_rates, y.clamp(max=_MANY), alpha)
    # Of a rate of 0 the terms of many counts are NaN, and so are their gradients.
    is_few, is_zero = y < _MANY, log_rates == -math.inf
    rates_of_many = log_rates.where(~(is_few | is_zero), 0.0)
    many = _negative_binomial_of_many(rates_of_many, y.clamp(min=_MANY), alpha)
    return torch.where(is_few, few, many.where(~is_zero, log_rates))


def _negative_binomial_of_few(log_rates: Tensor, y: Tensor, alpha: Tensor) -> Tensor:
    r = 1.0 / alpha
    log_odds = log_rates + alpha.log()  # of mean against r
    is_large = r > _MANY
    near, far = r.clamp(max=_MANY), r.clamp(min=_MANY)
    # Of a rate of 0 the product with a count of 0 would be NaN.
    log_share = F.logsigmoid(log_odds).where(y > 0.0, 0.0)
    direct = torch.lgamma(y + near) - torch.lgamma(near) + y * log_share
    ratio = torch.log1p(y / far)
    series = (far - 0.5) * ratio - y + _stirling(y + far) - _stirling(far)
    # Multiplied by r, what softplus leaves out beyond its usual threshold of 20 shows in float64.
    log_sum = F.softplus(log_odds, threshold=40.0)
    # y log(y + r) + y log sigmoid(log_odds), without the logarithms of r, which cancel.
    series = series + y * (ratio + log_rates - log_sum).where(y > 0.0, 0.0)
    found = torch.where(is_large, series, direct)
    return found - torch.lgamma(y + 1.0) - r * log_sum


def _negative_binomial_of_many(log_rates: Tensor, y: Tensor, alpha: Tensor) -> Tensor:
    # With d = log(mean / y) and t = log((y + r) / (mean + r)) the terms that are large are
    # y d + (y + r) t, which is 0 at d = 0 and of second order around it. It has two forms: the
    # first cancels terms of size y, the second, with t + d instead of t, terms of size r.
    r = 1.0 / alpha
    d, whole = log_rates - y.log(), y + r
    # Not by maximum and minimum: where r = y each has half of the gradient.
    is_less = r < y
    great, small = torch.where(is_less, y, r), torch.where(is_less, r, y)
    by_count = y * d - (y + great) * _log_of_mixed_exp(y / (y + great), d)
    by_shape = -small * d - (y + small) * _log_of_mixed_exp(small / (y + small), -d)
    large = torch.where(is_less, by_shape, by_count)
    near, far = r.clamp(max=_MANY), r.clamp(min=_MANY)
    # r log r - r - log Gamma(r)
    of_shape = torch.where(
        r > _MANY,
        0.5 * (far / (2.0 * math.pi)).log() - _stirling(far),
        near * near.log() - near - torch.lgamma(near),
    )
    return large + of_shape - 0.5 * (y.log() + whole.log()) + _stirling(whole) - _stirling(y)


def _log_of_mixed_exp(share: Tensor, x: Tensor) -> Tensor:
    """Compute log(1 - share + share exp(x)) for a share of at most one half."""
    near = torch.log1p(share * torch.expm1(x.clamp(max=_MOST)))
    return near + (x - _MOST).clamp(min=0.0)


def _stirling(x: Tensor) -> Tensor:
    """Compute log Gamma(x) - (x - 1/2) log x + x - log(2 pi) / 2 for x of at least 15."""
    s = x.reciprocal().square()
    series: Tensor = (1 / 12 + s * (-1 / 360 + s * (1 / 1260 + s * (-1 / 1680 + s / 1188)))) / x
    return series


def _check_means(means: Tensor) -> None:
    """Raise ValueError where a mean, shape (S, N, ...), is NaN or does not fit into 64 bits."""
    wrong = ~(means < _LARGEST)
    if bool(wrong.any()):
        # The first example, whatever its sample.
        example = int(wrong.transpose(0, 1).flatten(1).any(1).nonzero()[0])
        got = means[:, example][wrong[:, example]][0].item()
        raise ValueError(
            f"counts are int64, so that their mean must be a number below 2^62, got {got:g} for "
            f"example {example}; correct its inputs, or scale those that are large"
        )


def check_counts(targets: Tensor) -> None:
    """Raise ValueError unless the targets are counts.

    Values are checked on the CPU only, and not in compiled code.
    """
    if targets.is_complex() or targets.dtype == torch.bool:
        raise ValueError(
            f"targets must be counts, which are integers from 0, got dtype {targets.dtype}"
            + ("; for labels use BernoulliLikelihood" if targets.dtype == torch.bool else "")
        )
    if targets.device.type != "cpu" or torch.compiler.is_compiling():
        return
    targets = signed(targets)
    wrong = targets[~((targets >= 0) & (targets == targets.floor()) & (targets < math.inf))]
    if wrong.numel():
        raise ValueError(
            f"targets must be counts, which are integers from 0, got {wrong[0].item()}; for real "
            "numbers use GaussianLikelihood or StudentTLikelihood"
        )
