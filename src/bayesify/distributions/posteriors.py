"""Posteriors: distributions q(w | theta) over the flat weight vector."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from bayesify.distributions.correlations import Correlation, Independent
from bayesify.distributions.layout import ParameterLayout
from bayesify.distributions.precision import WideModule
from bayesify.distributions.softplus import inverse_softplus, log_softplus, softplus, softplus_ratio
from bayesify.noise.keys import NoiseKey

__all__ = [
    "Delta",
    "GaussianPosterior",
    "MeanFieldGaussian",
    "Moments",
    "Posterior",
    "WeightDraw",
]


class WeightDraw(NamedTuple):
    """Weights drawn from a posterior, and the noise that they were computed from.

    The weights have shape (S, D), the noise (S, ``noise_size``). It is kept because log q(w) is
    exact and cheap to compute from it.
    """

    weights: Tensor
    noise: Tensor


class Moments(NamedTuple):
    """Mean and spread of each parameter by its first name, both zero for pruned weights.

    A spread is a standard deviation, or a variance if ``squared``.
    """

    means: Mapping[str, Tensor]
    spreads: Mapping[str, Tensor]
    squared: bool = False


class Posterior(WideModule, ABC):
    """A distribution over D weights whose samples are differentiable in its parameters.

    ``mask`` is None, or a mask of shape (D,) that is True for kept weights and False for pruned
    ones. A pruned weight is exactly zero in the mean and in every sample, whatever an optimiser
    writes to the parameters. These stay in float32 when a network is converted to half precision.

    Raises:
        ValueError: the mean is no floating vector.

    Example:
        >>> q = MeanFieldGaussian.centred_on(torch.ones(2), init_std=0.5)
        >>> q.mask = torch.tensor([True, False])
        >>> isinstance(q, Posterior), q.draw(torch.ones(1, 2)).weights.tolist()
        (True, [[1.5, 0.0]])
    """

    mean: nn.Parameter
    mask: Tensor | None

    def __init__(self, mean: Tensor) -> None:
        super().__init__()
        if mean.dim() != 1 or not mean.dtype.is_floating_point:
            raise ValueError(
                f"mean must be a floating vector of shape (D,), got shape {tuple(mean.shape)} "
                f"and dtype {mean.dtype}"
            )
        self.mean = nn.Parameter(mean.detach().clone())
        self.register_buffer("mask", None)

    @classmethod
    @abstractmethod
    def centred_on(cls, mean: Tensor, init_std: float | Tensor | None) -> Self:
        """Create a posterior centred on ``mean``; ``init_std=None`` is the default of the class."""

    @property
    def num_weights(self) -> int:
        """D, the number of weights."""
        return self.mean.numel()

    @property
    def masked_mean(self) -> Tensor:
        """The mean of each weight, shape (D,), zero where pruned."""
        return self._masked(self.mean)

    @property
    @abstractmethod
    def std(self) -> Tensor:
        """Standard deviation of each weight, shape (D,), zero where pruned."""

    @property
    def noise_size(self) -> int:
        """How many standard normals one weight sample needs: D if the weights are independent."""
        return self.mean.numel()

    def noise(self, key: NoiseKey, samples: range) -> Tensor:
        """Draw the standard normals that :meth:`draw` needs, shape (S, ``noise_size``)."""
        mean = self.mean
        return key.normals(samples, self.noise_size, dtype=mean.dtype, device=mean.device)

    @abstractmethod
    def draw(self, noise: Tensor) -> WeightDraw:
        """Transform standard normals of shape (S, ``noise_size``) to S weight vectors."""

    @abstractmethod
    def log_prob_of(self, draw: WeightDraw) -> Tensor:
        """Return the log density of each weight of a draw, in nats, shape (S, D).

        It is that of the weight's own marginal. Where the weights depend on each other, the sum
        over them is not log q(w), but its mean lacks only :meth:`total_correlation`.
        """

    def names_by_weight(self) -> list[str]:
        """Return the parameters whose rows belong to one weight each, and to nothing if pruned."""
        return [name for name, p in self.named_parameters() if p.shape[:1] == self.mean.shape]

    def total_correlation(self) -> Tensor:
        """KL from q to the product of its marginals, in nats, a scalar of at least 0.

        For a prior under which the weights are independent, KL(q || p) is the sum of the KLs of
        the marginals plus the total correlation (Watanabe 1960). It is 0 for independent weights.
        """
        return self.mean.new_zeros(())

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # The state of a pruned posterior can be loaded into an unpruned one, and vice versa.
        if f"{prefix}mean" in state_dict:
            pruned = f"{prefix}mask" in state_dict
            self.mask = torch.ones_like(self.mean, dtype=torch.bool) if pruned else None
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _masked(self, weights: Tensor) -> Tensor:
        return weights if self.mask is None else torch.where(self.mask, weights, 0.0)


class GaussianPosterior(Posterior):
    """A Gaussian over the weights, whose marginals have a mean and a standard deviation.

    Raises:
        ValueError: the mean is no floating vector, or a std is not positive and finite.

    Example:
        >>> isinstance(MeanFieldGaussian(torch.zeros(2), std=0.1), GaussianPosterior)
        True
    """

    #: Whether the std is softplus(rho), so that closed forms may be computed from rho. A subclass
    #: with another std sets this to False; its KL is then computed from its mean and std.
    std_is_softplus: ClassVar[bool] = False
    rho: nn.Parameter

    def __init__(self, mean: Tensor, std: float | Tensor) -> None:
        super().__init__(mean)
        stds = torch.as_tensor(std, dtype=mean.dtype, device=mean.device)
        if not bool(((stds > 0) & stds.isfinite()).all()):
            raise ValueError(f"std must be positive and finite, got {std}")
        self.rho = nn.Parameter(inverse_softplus(stds).expand_as(mean).clone())

    @property
    def std(self) -> Tensor:
        """Standard deviation of each weight, shape (D,), zero where pruned."""
        return self._masked(self.full_std)

    @property
    @abstractmethod
    def full_std(self) -> Tensor:
        """Standard deviation of each weight, shape (D,), pruned weights included."""

    @property
    def log_std(self) -> Tensor:
        """Its logarithm, shape (D,), pruned weights included."""
        return self.full_std.log()

    @property
    def log_scale(self) -> Tensor:
        """The logarithm of the std of each weight if it depended on no other, shape (D,)."""
        return self.log_std

    @property
    def group_correlations(self) -> list[Correlation]:
        """How the weights of each group depend on each other; one group by default."""
        return [Independent(self.num_weights)]

    def narrow(self, max_std: float, chosen: Tensor) -> None:
        """Lower larger standard deviations to ``max_std``, in place.

        Args:
            max_std: the largest standard deviation, positive.
            chosen: False for weights that stay as they are, shape (D,).

        Raises:
            TypeError: the std of the class is not softplus(rho).
        """
        if not self.std_is_softplus:
            raise TypeError(
                f"a smaller std can be set only where it is softplus(rho), got "
                f"{type(self).__name__}; leave init_std out, and lower the std beforehand"
            )
        most = inverse_softplus(torch.tensor(max_std, dtype=torch.float64))
        with torch.no_grad():
            self.rho.copy_(torch.where(chosen, self.rho.clamp(max=float(most)), self.rho))

    def split(self, vector: Tensor) -> list[Tensor]:
        """Return the parts of a vector of shape (D,) that belong to the groups."""
        return [vector]


class MeanFieldGaussian(GaussianPosterior):
    """Independent Gaussians, w_i = mean_i + softplus(rho_i) noise_i (Blundell et al. 2015, 3.2).

    Args:
        mean: initial means, shape (D,).
        std: initial standard deviations, positive: one number or a vector of shape (D,).

    Raises:
        ValueError: a standard deviation is not positive and finite.

    Example:
        >>> q = MeanFieldGaussian(torch.zeros(2), std=0.1)
        >>> q.std
        tensor([0.1000, 0.1000], grad_fn=<SoftplusBackward0>)
        >>> q.draw(torch.ones(1, 2)).weights.detach()
        tensor([[0.1000, 0.1000]])
    """

    default_init_std = 0.02
    #: A subclass with another std sets this to False and overrides ``full_std``, ``log_std`` and
    #: ``log_std_slope``.
    std_is_softplus: ClassVar[bool] = True

    @classmethod
    def centred_on(cls, mean: Tensor, init_std: float | Tensor | None) -> Self:
        """Create a posterior centred on ``mean`` with std ``init_std``, by default 0.02."""
        return cls(mean, cls.default_init_std if init_std is None else init_std)

    @property
    def full_std(self) -> Tensor:
        """softplus(rho), shape (D,), pruned weights included."""
        return softplus(self.rho)

    @property
    def log_std(self) -> Tensor:
        """log softplus(rho), shape (D,), finite for every finite rho, pruned weights included."""
        return log_softplus(self.rho)

    @property
    def log_std_slope(self) -> Tensor:
        """d log std / d rho, shape (D,), pruned weights included."""
        return softplus_ratio(self.full_std)

    def moments_of(self, layout: ParameterLayout) -> Moments:
        """Return mean and standard deviation of each parameter by its first name."""
        return Moments(layout.unflatten(self.masked_mean), layout.unflatten(self.std))

    def draw(self, noise: Tensor) -> WeightDraw:
        """Compute w = mean + std * noise, for noise of shape (S, D).

        Raises:
            ValueError: the noise has another length than the mean.
        """
        if noise.shape[-1:] != self.mean.shape:  # one number would be shared by all weights
            raise ValueError(
                f"noise must have shape (S, {len(self.mean)}), a number for each weight, got "
                f"{tuple(noise.shape)}"
            )
        return WeightDraw(self._masked(torch.addcmul(self.mean, self.full_std, noise)), noise)

    def log_prob(self, weights: Tensor) -> Tensor:
        """Return log q(w_i) of any weights of shape (..., D), in nats, with the same shape."""
        standardised = (weights - self.mean) / self.full_std
        return -0.5 * standardised.square() - self.log_std - _HALF_LOG_2PI

    def log_prob_of(self, draw: WeightDraw) -> Tensor:
        """Return ``log_prob(draw.weights)``, computed from the noise.

        (w - mean) / std equals the noise identically, so that value and total derivative are the
        same. Using the noise avoids the cancellation in w - mean and one pass over S x D numbers.
        """
        return -0.5 * draw.noise.square() - self.log_std - _HALF_LOG_2PI


class Delta(Posterior):
    """A point estimate: MAP with a prior, maximum likelihood with temperature 0.

    A point mass has no density, hence no KL; :class:`~bayesify.ELBO` reports -log p(mean) as
    ``penalty``.

    Example:
        >>> Delta(torch.ones(3)).draw(torch.zeros(2, 3)).weights.shape
        torch.Size([2, 3])
    """

    @classmethod
    def centred_on(cls, mean: Tensor, init_std: float | Tensor | None) -> Self:
        """Create the point ``mean``.

        Raises:
            ValueError: ``init_std`` was given; a point has no spread.
        """
        if init_std is not None:
            raise ValueError(
                f"init_std must be None for a Delta posterior, which has no std, got {init_std}"
            )
        return cls(mean)

    def noise(self, key: NoiseKey, samples: range) -> Tensor:  # noqa: ARG002
        """Return zeros, shape (S, D), without allocating them: a point needs no noise."""
        return self.mean.new_zeros(()).expand(len(samples), self.mean.numel())

    @property
    def std(self) -> Tensor:
        """Zeros, shape (D,)."""
        return torch.zeros_like(self.mean)

    def draw(self, noise: Tensor) -> WeightDraw:
        """Return the point once for each row of the noise, shape (S, D)."""
        return WeightDraw(self._masked(self.mean).expand_as(noise), noise)

    def log_prob_of(self, draw: WeightDraw) -> Tensor:  # noqa: ARG002
        """Raise TypeError: a point mass has no density."""
        raise self.no_density()

    def no_density(self) -> TypeError:
        """Return the error of a point mass, of which log q(w) or a KL is asked for."""
        return TypeError(
            "a Delta posterior has no density, so KL(q || p) does not exist; use ELBO, which "
            "reports -log p(mean) as penalty, or a MeanFieldGaussian posterior"
        )


_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
