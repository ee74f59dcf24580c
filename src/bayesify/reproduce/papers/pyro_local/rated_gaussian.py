"""Gaussian posterior whose standard deviations share a learned rate in each layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bayesify.distributions.layout import ParameterLayout
from bayesify.distributions.posteriors import MeanFieldGaussian

__all__ = ["LEAST_SCALE", "RATE_LIMITS", "RatedGaussian", "layer_sizes"]

#: Lower bound of the scales.
LEAST_SCALE = 0.01
#: Bounds of the learned rates.
RATE_LIMITS = (0.1, 1.0)


class RatedGaussian(MeanFieldGaussian):
    """Independent Gaussians, w_i ~ N(mean_i, (rate_l scale_i)^2) for the weights i of layer l.

    The scale of each weight is ``LEAST_SCALE + exp(rho_i)``, so that its logarithm changes at the
    same speed everywhere. The rate is one factor for all weights of a layer. It is not the alpha of
    variational dropout (Kingma et al. 2015), whose noise is proportional to the mean. A rate is
    kept within ``RATE_LIMITS`` by a sigmoid of its logit, or is fixed at 1.

    Args:
        mean: initial means, shape (D,).
        scale: initial scale of all weights, above ``LEAST_SCALE``.
        sizes: how many neighbouring weights each of the layers has, D in all.
        rates: the initial rate of each layer, within the limits; None for one without, fixed at 1.

    Raises:
        ValueError: a scale, a size or a rate is out of its range.

    Example:
        >>> q = RatedGaussian(torch.zeros(3), scale=0.5, sizes=(2, 1), rates=(0.25, None))
        >>> q.std.detach()
        tensor([0.1250, 0.1250, 0.5000])
        >>> q.rates.detach()
        tensor([0.2500, 1.0000])
    """

    std_is_softplus: ClassVar[bool] = False

    def __init__(
        self,
        mean: Tensor,
        scale: float,
        sizes: Sequence[int],
        rates: Sequence[float | None],
    ) -> None:
        low, high = RATE_LIMITS
        if not (scale > LEAST_SCALE and math.isfinite(scale)):
            raise ValueError(f"scale must be finite and above {LEAST_SCALE}, got {scale}")
        if len(sizes) != len(rates) or min(sizes) < 1 or sum(sizes) != mean.numel():
            raise ValueError(
                f"sizes must be those of {len(rates)} layers, as rates has, with {mean.numel()} "
                f"weights in all, got {list(sizes)}"
            )
        if not all(rate is None or low < rate < high for rate in rates):
            raise ValueError(f"rates must be between {low} and {high}, got {list(rates)}")
        super().__init__(mean, scale)
        self.sizes = tuple(sizes)
        self.learned = tuple(rate is not None for rate in rates)
        with torch.no_grad():
            self.rho.fill_(math.log(scale - LEAST_SCALE))
        shares = [(rate - low) / (high - low) for rate in rates if rate is not None]
        #: Logits of the learned rates, in the order of their layers: log(share / (1 - share)).
        self.rate_logits = nn.Parameter(torch.tensor(shares, dtype=torch.float64).logit().to(mean))

    @property
    def rates(self) -> Tensor:
        """Rates of all layers, fixed ones included."""
        low, high = RATE_LIMITS
        found = iter((low + (high - low) * self.rate_logits.sigmoid()).unbind())
        one = self.rate_logits.new_ones(())
        return torch.stack([next(found) if learned else one for learned in self.learned])

    @property
    def full_std(self) -> Tensor:
        """Rate times scale, shape (D,), pruned weights included."""
        std: Tensor = _Std.apply(self.rho, self.rates, self.sizes)  # type: ignore[no-untyped-call]
        return std

    @property
    def log_std(self) -> Tensor:
        """Logarithm of the std, shape (D,); finite for every finite rho, unlike the std."""
        least = self.rho.new_tensor(math.log(LEAST_SCALE))
        log_scale = torch.logaddexp(self.rho, least)
        parts = zip(log_scale.split(self.sizes), self.rates.log(), strict=True)
        return torch.cat([part + log_rate for part, log_rate in parts])

    @property
    def log_std_slope(self) -> Tensor:
        """d log std / d rho, shape (D,), from 0 to 1."""
        return torch.sigmoid(self.rho - math.log(LEAST_SCALE))


class _Std(torch.autograd.Function):
    """Computes the stds, with a backward that reads D numbers half as often as autograd's."""

    @staticmethod
    def forward(rho: Tensor, rates: Tensor, sizes: tuple[int, ...]) -> Tensor:
        std = rho.exp().add_(LEAST_SCALE)
        for part, rate in zip(std.split(sizes), rates, strict=True):
            part.mul_(rate)
        return std

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor, tuple[int, ...]], output: Tensor
    ) -> None:
        _, rates, ctx.sizes = inputs
        ctx.save_for_backward(rates, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rates, std = ctx.saved_tensors
        # The sum of grad * std over a layer is rate * d/d rate. For rho, the constant part of the
        # scale is subtracted.
        in_rho = grad * std
        parts = zip(in_rho.split(ctx.sizes), grad.split(ctx.sizes), rates, strict=True)
        in_rates = []
        for part, of_std, rate in parts:
            in_rates.append(part.sum() / rate)
            part.sub_(LEAST_SCALE * rate * of_std)
        return in_rho, torch.stack(in_rates), None


def layer_sizes(layout: ParameterLayout) -> tuple[int, ...]:
    """Return the number of weights of each module of a network, its bias included.

    Example:
        >>> layer_sizes(ParameterLayout.of(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))))
        (8, 3)
    """
    sizes: dict[str, int] = {}
    for name, size in zip(layout.names, layout.sizes, strict=True):
        module = name.rpartition(".")[0]
        sizes[module] = sizes.get(module, 0) + size
    return tuple(sizes.values())
