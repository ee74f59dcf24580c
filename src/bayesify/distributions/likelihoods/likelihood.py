"""The interface of likelihoods p(y | x, w): densities of the targets given a network's outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from bayesify.distributions.precision import WideModule
from bayesify.prediction import Predictive, SizedIterable

__all__ = ["Likelihood"]


class Likelihood(WideModule, ABC):
    """The distribution of a target given the network's output.

    Its own parameters, such as a learned noise, are point estimates that are trained with the
    other parameters.

    Example:
        >>> from bayesify import CategoricalLikelihood, GaussianLikelihood
        >>> for likelihood in (CategoricalLikelihood(), GaussianLikelihood(std=0.5)):
        ...     print(likelihood.error_name, likelihood.config())
        error (%) {}
        mean squared error {'std': 0.5, 'learn_std': False}
    """

    #: Name of the quantity that ``error`` returns, with its unit.
    error_name: str

    @abstractmethod
    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return log p(y | output) of each example, in nats.

        Args:
            outputs: the network's outputs, shape (S, N, ...).
            targets: the targets, shape (N, ...), without the sample axis.

        Returns:
            Shape (S, N), summed over the components of each target.

        Raises:
            ValueError: shape, dtype or values of the targets do not fit the outputs.
        """

    def expected_log_prob(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG002
        """Return E[log p(y | f)] over Gaussian outputs f of each example, in nats, or a bound.

        ``ClosedFormLastLayer`` trains with it. A likelihood that has none raises TypeError.

        Args:
            mean: the means of the outputs, shape (S, N, ...).
            variance: their variances, of the same shape.
            targets: the targets, shape (N, ...), without the sample axis.

        Returns:
            Shape (S, N), summed over the components of each target: the expectation, or a lower
            bound on it.

        Raises:
            TypeError: there is no closed form.
            ValueError: shape, dtype or values of the targets do not fit the outputs.
        """
        raise TypeError(
            f"ClosedFormLastLayer needs a likelihood with a closed-form expectation, such as "
            f"GaussianLikelihood(std=1.0), got {type(self).__name__}; use "
            "estimator=LocalReparameterization(), which draws the last layer's outputs"
        )

    @abstractmethod
    def predictive(self, outputs: SizedIterable, *, keep_samples: bool) -> Predictive:
        """Return the mixture over weight samples, from one output of shape (N, ...) at a time.

        Args:
            outputs: S tensors. They may be computed while iterating, so an implementation should
                hold only one of them at a time.
            keep_samples: whether the result holds the prediction of each weight sample.
        """

    @abstractmethod
    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the error of outputs (N, ...), averaged over N, a scalar; see ``error_name``.

        Raises:
            ValueError: shape, dtype or values of the targets do not fit the outputs.
        """

    def error_count(self, targets: Tensor) -> int:
        """Return how many errors :meth:`error` averages over: of examples, or of their positions.

        Args:
            targets: as for :meth:`error`.
        """
        return len(targets)

    @abstractmethod
    def config(self) -> dict[str, float | int | bool]:
        """Return the arguments of the constructor, from which a file restores the likelihood."""
