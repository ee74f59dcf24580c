"""The likelihoods of counts: Poisson, and negative binomial for more dispersed counts."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Generic

import torch
from torch import Tensor, nn

from bayesify.distributions.likelihoods.likelihood import (
    Likelihood,
    check_target_rows,
)
from bayesify.distributions.precision import at_least_float32, wide_default_dtype
from bayesify.distributions.softplus import inverse_softplus, softplus
from bayesify.noise.arguments import one_number
from bayesify.prediction import (
    NegativeBinomialPredictive,
    PoissonPredictive,
    SizedIterable,
    stack_samples,
)
from bayesify.prediction.counts import (
    check_counts,
    negative_binomial_log_prob,
    poisson_log_prob,
)
from bayesify.prediction.predictive import P_co, sum_components

__all__ = ["NegativeBinomialLikelihood", "PoissonLikelihood"]

#: Above this output, a mean of 1e13, the log mean grows as a logarithm, so that nothing overflows.
_LARGEST_OUTPUT = 30.0
#: Smallest dispersion that training reaches.
_LEAST_DISPERSION = 1e-6


class CountLikelihood(Likelihood[P_co], Generic[P_co]):
    """Counts y = 0, 1, 2, ... whose mean is exp(output), independently over the components."""

    error_name = "mean squared error"

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the log probability, in nats, summed over the components, shape (S, N)."""
        self._check(outputs, targets)
        return sum_components(self._log_probs(_log_rates(outputs), targets))

    def predictive(
        self,
        outputs: SizedIterable,
        *,
        keep_samples: bool,  # noqa: ARG002
    ) -> P_co:
        """Return the mixture of the distributions under all weight samples, which it keeps."""
        return self._mixture(_log_rates(stack_samples(outputs)))

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared distance of targets and means."""
        self._check(outputs.unsqueeze(0), targets)
        return (_log_rates(outputs).exp() - targets).square().mean()

    @abstractmethod
    def _log_probs(self, log_rates: Tensor, targets: Tensor) -> Tensor:
        """Compute the log probability of each component."""

    @abstractmethod
    def _mixture(self, log_rates: Tensor) -> P_co:
        """Return the predictive distribution, from logarithms of means (S, N, ...)."""

    @staticmethod
    def _check(outputs: Tensor, targets: Tensor) -> None:
        if outputs.dim() < 2 or targets.shape != outputs.shape[1:]:
            check_target_rows(targets, tuple(outputs.shape[1:]))
            raise ValueError(
                "targets must have the shape of the network's output, (N,) or (N, K), which is "
                f"{tuple(outputs.shape[1:])}, got {tuple(targets.shape)}; nothing is broadcast: "
                "use y.unsqueeze(-1) or y.squeeze(-1)"
            )
        check_counts(targets)


class PoissonLikelihood(CountLikelihood[PoissonPredictive]):
    """Counts with a Poisson distribution, whose logarithmic mean is the network's output.

    With the output f, log p(y) = y f - exp(f) - log y!, in nats, independently over the components
    of the target. Outputs and targets have the same shape, (N,) or (N, K); targets are integers
    from 0, as integers or floating-point numbers. Given the weights, mean and variance are equal:
    for counts that vary more use :class:`NegativeBinomialLikelihood`.

    Where example i is observed for a time (or over an area) t_i, its exposure, let the network
    return f + log t_i.

    Above f = 30, a mean of 1e13, the logarithmic mean is 30 + log(1 + f - 30), so that nothing
    overflows in float32.

    Example:
        >>> outputs = torch.tensor([[[0.0], [1.0]]])
        >>> PoissonLikelihood().log_prob(outputs, torch.tensor([[0], [3]]))
        tensor([[-1.0000, -1.5100]])
    """

    def config(self) -> dict[str, float | int | bool]:
        """Return an empty dict: there are no arguments."""
        return {}

    def _log_probs(self, log_rates: Tensor, targets: Tensor) -> Tensor:
        return poisson_log_prob(log_rates, targets)

    def _mixture(self, log_rates: Tensor) -> PoissonPredictive:
        return PoissonPredictive(log_rates)


class NegativeBinomialLikelihood(CountLikelihood[NegativeBinomialPredictive]):
    """Counts that vary more than a Poisson distribution: variance = mean + alpha mean^2.

    The network's output is the logarithm of the mean m, as for :class:`PoissonLikelihood`, of which
    this is the mixture with a Gamma-distributed factor of the mean. With r = 1 / alpha,

        log p(y) = log Gamma(y + r) - log Gamma(r) - log y! - r log(1 + m / r)
                   + y log(m / (r + m)),

    in nats, independently over the components of the target. As the dispersion alpha falls to 0 the
    distribution tends to Poisson's.

    Args:
        dispersion: alpha, positive; the initial value if it is learned; default 1.
        learn_dispersion: whether alpha is trained, as a point estimate, 1e-6 + softplus(rho).

    Raises:
        TypeError: the dispersion is not one number.
        ValueError: it is not above 1e-6 and finite.

    Example:
        >>> likelihood = NegativeBinomialLikelihood(1.0, learn_dispersion=False)
        >>> likelihood.log_prob(torch.tensor([[[0.0], [1.0]]]), torch.tensor([[0], [3]]))
        tensor([[-0.6931, -2.2530]])
    """

    def __init__(self, dispersion: float = 1.0, *, learn_dispersion: bool = True) -> None:
        super().__init__()
        dispersion = one_number("dispersion", dispersion)
        if not _LEAST_DISPERSION < dispersion < math.inf:
            raise ValueError(
                f"dispersion must be above {_LEAST_DISPERSION} and finite, got {dispersion}; "
                "without dispersion use PoissonLikelihood"
            )
        self._config: dict[str, float | int | bool] = {
            "dispersion": dispersion,
            "learn_dispersion": bool(learn_dispersion),
        }
        self._fixed = torch.tensor(dispersion, dtype=torch.float64)
        first = inverse_softplus(self._fixed - _LEAST_DISPERSION).to(wide_default_dtype())
        self.rho = nn.Parameter(first) if learn_dispersion else None

    @property
    def dispersion(self) -> Tensor:
        """Alpha in the variance mean + alpha mean^2, a scalar."""
        return self._fixed if self.rho is None else _LEAST_DISPERSION + softplus(self.rho)

    def config(self) -> dict[str, float | int | bool]:
        """Return ``dispersion`` as given and ``learn_dispersion``."""
        return dict(self._config)

    def _log_probs(self, log_rates: Tensor, targets: Tensor) -> Tensor:
        return negative_binomial_log_prob(log_rates, targets, self.dispersion)

    def _mixture(self, log_rates: Tensor) -> NegativeBinomialPredictive:
        return NegativeBinomialPredictive(log_rates, self.dispersion.detach())


def _log_rates(outputs: Tensor) -> Tensor:
    # In half precision the mean would overflow or lose its digits.
    outputs = at_least_float32(outputs)
    excess = (outputs - _LARGEST_OUTPUT).clamp(min=0.0)
    return outputs.clamp(max=_LARGEST_OUTPUT) + torch.log1p(excess)
