"""What every likelihood has."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from bayesify.predictive import Predictive, SizedIterable

__all__ = ["Likelihood"]


class Likelihood(nn.Module, ABC):
    """A distribution of the target given the network's output.

    Parameters of its own (a learned noise) are point estimates, trained with the rest.

    Example:
        >>> from bayesify import CategoricalLikelihood, GaussianLikelihood
        >>> for likelihood in (CategoricalLikelihood(), GaussianLikelihood(std=0.5)):
        ...     print(likelihood.error_name, likelihood.config())
        error (%) {}
        mean squared error {'std': 0.5, 'learn_std': False}
    """

    #: What ``error`` measures, with its unit.
    error_name: str

    @abstractmethod
    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """log p(y | output) of each datum, in nats.

        Args:
            outputs: the network's outputs, shape (S, N, ...).
            targets: shape (N, ...), without sample axis.

        Returns:
            Shape (S, N), summed over the parts of one datum's target.

        Raises:
            ValueError: shapes, dtype or values of the targets do not fit.
        """

    @abstractmethod
    def predictive(self, outputs: SizedIterable, *, keep_samples: bool) -> Predictive:
        """The mixture over weight samples, from one output of shape (N, ...) at a time.

        Args:
            outputs: S tensors, made as they are asked for: each is to be used at once and let go.
            keep_samples: whether the result holds what each says.
        """

    @abstractmethod
    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The error of outputs (N, ...), a mean over N, as a scalar; see ``error_name``.

        Raises:
            ValueError: shapes, dtype or values of the targets do not fit.
        """

    @abstractmethod
    def config(self) -> dict[str, float | int | bool]:
        """The constructor's arguments, of which it can be made again."""
