"""The interface of likelihoods p(y | x, w): densities of the targets given a network's outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Generic

from torch import Tensor

from bayesify.distributions.precision import WideModule, at_least_float32
from bayesify.prediction import SizedIterable
from bayesify.prediction.predictive import P_co, blocks_of

__all__ = [
    "Likelihood",
    "check_for_each_example",
    "check_target_rows",
    "log_probs_of",
    "predictive_of",
]


class Likelihood(WideModule, ABC, Generic[P_co]):
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
    def predictive(self, outputs: SizedIterable, *, keep_samples: bool) -> P_co:
        """Return the mixture over weight samples, from one output of shape (N, ...) at a time.

        Args:
            outputs: S tensors; those of a network that predicts are in float32 at least. They may
                be computed while iterating, so an implementation should hold only one at a time.
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


def log_probs_of(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return log p(y | output) of each example in float32 at least, in nats, shape (S, N).

    Raises:
        ValueError: a likelihood of one's own returns another shape, the targets do not fit, or the
            outputs are complex.

    Example:
        >>> import torch
        >>> from bayesify import GaussianLikelihood
        >>> outputs = torch.zeros(2, 3, 1, dtype=torch.bfloat16)
        >>> log_probs_of(GaussianLikelihood(std=1.0), outputs, torch.zeros(3, 1)).dtype
        torch.float32
    """
    refusal = (
        f"outputs must be real numbers, as {type(likelihood).__name__} has no density of complex "
        f"ones, got {outputs.dtype}; return their real part, their abs() or "
        "torch.view_as_real(outputs) from the network"
    )
    try:
        found = likelihood.log_prob(at_least_float32(outputs), targets)  # under autocast too
    except (NotImplementedError, RuntimeError) as error:  # of an operation on complex numbers
        if outputs.is_complex():
            raise ValueError(refusal) from error
        raise
    if found.is_complex():
        raise ValueError(refusal)
    check_for_each_example(found, outputs, f"{type(likelihood).__name__}.log_prob")
    return found


def predictive_of(
    likelihood: Likelihood[P_co], outputs: SizedIterable, *, keep_samples: bool
) -> P_co:
    """Return the mixture over weight samples, predicted from outputs in float32 at least.

    In half precision variances overflow or vanish, and the probabilities of many classes do not sum
    to 1.

    Example:
        >>> import torch
        >>> from bayesify import CategoricalLikelihood
        >>> outputs = torch.zeros(2, 3, 100, dtype=torch.bfloat16)
        >>> predictive_of(CategoricalLikelihood(), outputs, keep_samples=False).total
        tensor([4.6052, 4.6052, 4.6052])
    """
    return likelihood.predictive(_WideOutputs(outputs), keep_samples=keep_samples)


class _WideOutputs:
    """The outputs under each weight sample in float32 at least, converted one block at a time."""

    def __init__(self, outputs: SizedIterable) -> None:
        self._outputs = outputs

    def __len__(self) -> int:
        return len(self._outputs)

    def __iter__(self) -> Iterator[Tensor]:
        for block in self.blocks():
            yield from block.unbind()

    def blocks(self) -> Iterator[Tensor]:
        """Yield the outputs in the blocks in which they are computed, shape (S_i, N, ...)."""
        return (at_least_float32(block) for block in blocks_of(self._outputs))


def check_for_each_example(found: Tensor, outputs: Tensor, name: str) -> None:
    """Check that a likelihood returned one number for each weight sample and example.

    Any other shape would be averaged as well, with another weight of the KL.

    Raises:
        ValueError: it returned another shape.

    Example:
        >>> import torch
        >>> check_for_each_example(torch.zeros(2, 3), torch.zeros(2, 3, 8), "Own.log_prob")
    """
    if found.shape != outputs.shape[:2]:
        raise ValueError(
            f"{name} must return shape (S, N) = {tuple(outputs.shape[:2])}, a number for each "
            f"weight sample and example, got {tuple(found.shape)}; sum over the components of a "
            "target, and let targets have the shape of the mean"
        )


def check_target_rows(targets: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError where targets differ from the shape they must have in their number only.

    Example:
        >>> import torch
        >>> check_target_rows(torch.zeros(5, 1), (24, 1))
        Traceback (most recent call last):
        ValueError: targets must have as many rows as the outputs, shape (24, 1), got (5, 1); ...
    """
    is_alike = targets.dim() > 0 and len(shape) > 0 and targets.shape[1:] == shape[1:]
    if is_alike and len(targets) != shape[0]:
        raise ValueError(
            f"targets must have as many rows as the outputs, shape {shape}, got "
            f"{tuple(targets.shape)}; nothing is broadcast: give inputs and targets of the same "
            "examples"
        )
