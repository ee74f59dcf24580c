"""What every predictive distribution has, whatever the target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import Literal, Protocol, Self, get_args

import torch
from torch import Tensor

from bayesify.predictive.jackknife import jackknife

__all__ = ["Abstention", "Predictive", "SizedIterable", "Uncertainty", "stacked"]

#: The uncertainties of a predictive distribution, by name.
Uncertainty = Literal["total", "aleatoric", "epistemic"]


class SizedIterable(Sized, Iterable[Tensor], Protocol):
    """Tensors of which the number is known: a list, or some that are made as they are asked for."""


def stacked(tensors: SizedIterable) -> Tensor:
    """One tensor of all, each put in its place as it comes: ``torch.stack`` would hold them twice.

    Raises:
        ValueError: there are none.

    Example:
        >>> stacked([torch.zeros(2), torch.ones(2)])
        tensor([[0., 0.],
                [1., 1.]])
    """
    stack: Tensor | None = None
    for index, tensor in enumerate(tensors):
        if stack is None:
            stack = tensor.new_empty((len(tensors), *tensor.shape))
        stack[index] = tensor
    if stack is None:
        raise ValueError("at least one weight sample is needed, got none")
    return stack


@dataclass(frozen=True, eq=False)
class Abstention:
    """Answers only where the uncertainty is small enough.

    Args:
        answered: where there is an answer, boolean, the shape of ``uncertainty``.
        prediction: the answers everywhere, given or not; see ``Predictive.prediction``.
        uncertainty: what was compared with the threshold.

    Example:
        >>> from bayesify.predictive import GaussianPredictive
        >>> p = GaussianPredictive(torch.tensor([[0.0, -1.0], [0.0, 1.0]]), torch.tensor(0.5))
        >>> kept = p.abstain(0.5)
        >>> kept.answered, kept.coverage
        (tensor([ True, False]), 0.5)
    """

    answered: Tensor
    prediction: Tensor
    uncertainty: Tensor

    @property
    def coverage(self) -> float:
        """The share that is answered, from 0 to 1."""
        return float(self.answered.double().mean())


class Predictive(ABC):
    """The predictive distribution p(y | x) of N data: a mixture over S weight samples.

    ``total = aleatoric + epistemic``, each by a formula of its own. Aleatoric uncertainty is the
    noise that stays however much is known of the weights; epistemic uncertainty is what knowing
    the weights would remove. For classes they are the entropy of the averaged probabilities, the
    averaged entropy and the mutual information of class and weights, in nats (Depeweg et al.
    2018, eq. 2); for numbers the variance of the mixture, the averaged variance of the noise and
    the variance of the network's output, by the law of total variance (eq. 4 there).

    Example:
        >>> from bayesify.predictive import GaussianPredictive
        >>> p = GaussianPredictive(torch.tensor([[-1.0], [1.0]]), torch.tensor(0.5))
        >>> p.total, p.interval(0.9)
        (tensor([1.2500]), (tensor([-1.6408]), tensor([1.6408])))
    """

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """Class probabilities (N, K), the probability of 1, or the mean of the target (N, ...)."""

    @property
    @abstractmethod
    def prediction(self) -> Tensor:
        """The single best answer: the most probable class, or the mean of the target."""

    @property
    @abstractmethod
    def total(self) -> Tensor:
        """Entropy in nats (N,), or the variance of the target (N, ...)."""

    @property
    @abstractmethod
    def aleatoric(self) -> Tensor:
        """The part of ``total`` expected for known weights."""

    @property
    @abstractmethod
    def epistemic(self) -> Tensor:
        """The part of ``total`` that comes from not knowing the weights; never negative."""

    @property
    @abstractmethod
    def samples(self) -> Tensor | None:
        """What each weight sample says, shape (S, N, ...), if it was kept."""

    @abstractmethod
    def log_prob(self, targets: Tensor) -> Tensor:
        """log p(y | x) of the mixture, in nats, shape (N,)."""

    @abstractmethod
    def quantile(self, q: float) -> Tensor:
        """The q-quantile of the target, the shape of ``mean``."""

    @abstractmethod
    def subset(self, samples: Sequence[int] | Tensor) -> Self:
        """The predictive distribution of some of the weight samples, by their indices.

        Raises:
            ValueError: the samples were not kept, none is chosen, or there is no such sample.
        """

    @classmethod
    @abstractmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The mixture, in equal shares, of several predictive distributions of the same data.

        Raises:
            ValueError: there are none, or they are of different shapes.
        """

    def interval(self, level: float) -> tuple[Tensor, Tensor]:
        """The equal-tailed interval that holds the target with probability ``level``.

        Raises:
            ValueError: level is not strictly between 0 and 1.
        """
        if not 0.0 < level < 1.0:
            raise ValueError(f"level must lie strictly between 0 and 1, got {level}")
        return self.quantile(0.5 - 0.5 * level), self.quantile(0.5 + 0.5 * level)

    def standard_error(
        self, statistic: Callable[[Self], Tensor | float], *, groups: int | None = None
    ) -> Tensor:
        """The Monte Carlo standard error of any function of this distribution.

        How much it would vary if the prediction were repeated with other weight samples, S of
        them; halved by four times as many. By the jackknife that leaves out a group of weight
        samples at a time (Busing, Meijer and van der Leeden 1999, eqs 4 to 6), so that it needs
        nothing but the samples at hand; ``groups + 1`` evaluations of the statistic.

        Args:
            statistic: takes a predictive distribution and returns a tensor or a number.
            groups: how many groups, from 2 to S; None takes 25, or S if that is less. The error's
                own relative error is about ``1 / sqrt(2 * groups)``.

        Returns:
            The shape of what ``statistic`` returns.

        Raises:
            ValueError: the samples were not kept, there is only one, or ``groups`` is out of
                range.
            TypeError: ``statistic`` returns neither a tensor nor a number.

        Example:
            >>> from bayesify.predictive import GaussianPredictive
            >>> p = GaussianPredictive(torch.tensor([[-1.0], [0.0], [1.0]]), torch.tensor(0.5))
            >>> p.standard_error(lambda p: p.mean), p.standard_error(lambda p: p.quantile(0.9))
            (tensor([0.5774]), tensor([0.6...]))
        """
        if self.samples is None:
            raise ValueError(f"a standard error needs the weight samples; {KEEP_THEM}")
        return jackknife(lambda kept: statistic(self.subset(kept)), len(self.samples), groups)

    def abstain(self, threshold: float, *, by: Uncertainty = "total") -> Abstention:
        """Answer only where the uncertainty is at most ``threshold``.

        ``metrics.risk_coverage`` has the curve to choose the threshold by.

        Args:
            threshold: in nats, or in squared units of the target.
            by: which uncertainty, ``"total"``, ``"aleatoric"`` or ``"epistemic"``.

        Raises:
            ValueError: ``threshold`` is nan, or ``by`` is no uncertainty.

        Example:
            >>> from bayesify.predictive import CategoricalPredictive
            >>> p = CategoricalPredictive.from_logits([torch.tensor([[9.0, 0.0], [0.2, 0.0]])])
            >>> p.abstain(0.5).answered
            tensor([ True, False])
        """
        if threshold != threshold:
            raise ValueError("threshold must be a number, got nan")
        uncertainty = self.uncertainty(by)
        return Abstention(uncertainty <= threshold, self.prediction, uncertainty)

    def uncertainty(self, by: Uncertainty) -> Tensor:
        """``total``, ``aleatoric`` or ``epistemic``, by its name.

        Raises:
            ValueError: there is none of this name.
        """
        if by not in get_args(Uncertainty):
            raise ValueError(f"by must be one of {', '.join(get_args(Uncertainty))}, got {by!r}")
        found: Tensor = getattr(self, by)
        return found


#: How to mend that samples are missing.
KEEP_THEM = "call predict(x, keep_samples=True)"


def chosen(tensor: Tensor | None, samples: Sequence[int] | Tensor) -> Tensor:
    """Some rows of what was kept of each weight sample.

    Raises:
        ValueError: nothing was kept, none is chosen, or there is no such row.
    """
    if tensor is None:
        raise ValueError(f"the weight samples were not kept; {KEEP_THEM}")
    index = torch.as_tensor(samples, device=tensor.device)
    if index.dim() != 1 or len(index) == 0:
        raise ValueError(
            "samples must be at least one index of a weight sample, in one row, got shape "
            f"{tuple(index.shape)}"
        )
    if index.dtype == torch.bool or index.is_floating_point() or index.is_complex():
        raise ValueError(
            f"samples must be indices, which are integers, got {index.dtype}; turn a mask into "
            "indices with mask.nonzero().flatten()"
        )
    low, high = int(index.min()), int(index.max())
    if low < -len(tensor) or high >= len(tensor):
        raise ValueError(
            f"samples must lie from 0 to {len(tensor) - 1}, for there are {len(tensor)} weight "
            f"samples, got {high if high >= len(tensor) else low}"
        )
    return tensor[index.long()]


def check_joinable(shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise ValueError unless there is one, and all are equal."""
    if len(set(shapes)) != 1:
        raise ValueError(
            "the predictive distributions must be at least one, and of the same data, got "
            f"{'none' if not shapes else 'shapes ' + ', '.join(map(str, sorted(set(shapes))))}"
        )


def check_level(q: float) -> None:
    """Raise ValueError unless there can be a q-quantile."""
    if not 0.0 < q < 1.0:
        raise ValueError(f"q must lie strictly between 0 and 1, got {q}")
