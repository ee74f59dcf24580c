"""The likelihood of real-valued targets with heavy-tailed noise."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from bayesify.distributions.likelihoods.location_scale import LocationScaleLikelihood
from bayesify.distributions.precision import wide_default_dtype
from bayesify.distributions.softplus import inverse_softplus, softplus
from bayesify.noise.arguments import one_number
from bayesify.prediction import StudentTPredictive
from bayesify.prediction.student_t import student_t_log_density

__all__ = ["StudentTLikelihood"]

#: Smallest df that training reaches: the variance is then 201 scale^2.
_LEAST_DF = 2.01
#: Where training of df begins.
_FIRST_DF = 5.0


class StudentTLikelihood(LocationScaleLikelihood[StudentTPredictive]):
    """y = location + scale * noise, with noise of Student's t distribution.

    Its tails are heavier than a Gaussian's, so that outliers among the targets move the network
    less, and intervals of high level are wider. With nu degrees of freedom (df) and
    z = (y - location) / scale, the density in nats is

        log p(y) = log Gamma((nu + 1) / 2) - log Gamma(nu / 2) - log(nu pi) / 2 - log scale
                   - (nu + 1) / 2 log(1 + z^2 / nu),

    independently over the components of the target. The location is the mean, and the variance is
    scale^2 nu / (nu - 2); as nu grows the density tends to ``GaussianLikelihood(scale)``.

    The scale is one learned or fixed number, or predicted by the network for each component of
    each example (``input_dependent``). The network's outputs are then of shape (N, K, 2) for
    targets (N, K), with the location in ``outputs[..., 0]`` and the inverse softplus of the scale
    in ``outputs[..., 1]``, as for ``GaussianLikelihood``; else they have the shape of the targets.

    Args:
        scale: width of the density, positive, in units of the target; the initial value if it is
            learned; default 1.
        df: degrees of freedom, above 2, so that the variance exists; None learns one number as a
            point estimate, 2.01 + softplus(rho), which begins at 5.
        learn_scale: whether the scale is trained, as a point estimate.
        input_dependent: whether the network predicts the scale of each example.
        min_scale: added to a scale that the network predicts, in units of the target.

    Raises:
        TypeError: df, scale or min_scale is not one number.
        ValueError: df is not above 2 and finite; scale is not positive and finite; min_scale is
            negative or not finite, or not 0 without ``input_dependent``; or ``input_dependent`` is
            combined with a scale or with ``learn_scale=False``.

    Example:
        >>> likelihood = StudentTLikelihood(df=4.0)
        >>> likelihood.log_prob(torch.zeros(1, 2, 1), torch.tensor([[0.0], [100.0]]))
        tensor([[ -0.9808, -20.5419]], grad_fn=<...>)
        >>> StudentTLikelihood().df
        tensor(5., grad_fn=<...>)
    """

    _name, _predictive_name = "scale", "scale"

    def __init__(
        self,
        scale: float | None = None,
        *,
        df: float | None = None,
        learn_scale: bool = True,
        input_dependent: bool = False,
        min_scale: float = 0.0,
    ) -> None:
        if input_dependent and not learn_scale:
            raise ValueError(
                "input-dependent noise is predicted by the network, but got learn_scale=False too; "
                "remove one of the two"
            )
        df = None if df is None else one_number("df", df)
        if df is not None and not 2.0 < df < math.inf:
            raise ValueError(
                f"df must be above 2, so that the variance exists, and finite, got {df}; for "
                "nearly Gaussian noise use GaussianLikelihood"
            )
        super().__init__(
            scale, learn=learn_scale, input_dependent=input_dependent, minimum=min_scale
        )
        if df is not None:
            self._config["df"] = df
        self._fixed_df = torch.tensor(_FIRST_DF if df is None else df, dtype=torch.float64)
        first = inverse_softplus(self._fixed_df - _LEAST_DF) if df is None else None
        self.df_rho = None if first is None else nn.Parameter(first.to(wide_default_dtype()))

    @property
    def scale(self) -> Tensor:
        """Width of the density, a scalar; the standard deviation is scale sqrt(df / (df - 2)).

        Raises:
            ValueError: the noise is input-dependent.
        """
        return self._scale

    @property
    def df(self) -> Tensor:
        """Degrees of freedom, a scalar."""
        return self._fixed_df if self.df_rho is None else _LEAST_DF + softplus(self.df_rho)

    def _log_density(self, standardised: Tensor, log_scale: Tensor) -> Tensor:
        return student_t_log_density(standardised, self.df.to(standardised)) - log_scale

    def _mixture(self, locations: Tensor, scale: Tensor) -> StudentTPredictive:
        return StudentTPredictive(locations, scale, self.df.detach())
