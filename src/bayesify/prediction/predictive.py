"""The common interface of predictive distributions: moments, quantiles, uncertainties, errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, Self, get_args

import torch
from torch import Tensor

from bayesify.noise.arguments import whole_number
from bayesify.noise.keys import generator_of
from bayesify.prediction.checks import check_level
from bayesify.prediction.jackknife import jackknife

__all__ = [
    "KEEP_SAMPLES_HINT",
    "Abstention",
    "P_co",
    "Predictive",
    "SizedIterable",
    "Uncertainty",
    "blocks_of",
    "check_joinable",
    "check_kind",
    "choose_samples",
    "class_indices",
    "has_values",
    "select_samples",
    "stack_samples",
    "sum_components",
]

#: The uncertainties of a predictive distribution, by name.
Uncertainty = Literal["total", "aleatoric", "epistemic"]


class SizedIterable(Sized, Iterable[Tensor], Protocol):
    """An iterable of tensors with a length: a list, or tensors that are computed on iteration.

    Example:
        >>> class Zeros:
        ...     def __len__(self):
        ...         return 3
        ...     def __iter__(self):
        ...         return iter(torch.zeros(3, 2))
        >>> stack_samples(Zeros()).shape
        torch.Size([3, 2])
    """


def blocks_of(tensors: SizedIterable) -> Iterator[Tensor]:
    """Yield tensors stacked in the blocks in which they are computed; in blocks of one otherwise.

    Operations on few examples cost as much for a block as for one sample. An iterable that computes
    several tensors at a time has a method ``blocks``, which yields them stacked.

    Example:
        >>> [tuple(block.shape) for block in blocks_of([torch.zeros(2), torch.ones(2)])]
        [(1, 2), (1, 2)]
    """
    blocks: Callable[[], Iterator[Tensor]] | None = getattr(tensors, "blocks", None)
    return (tensor.unsqueeze(0) for tensor in tensors) if blocks is None else blocks()


def stack_samples(tensors: SizedIterable) -> Tensor:
    """Stack tensors along a new first axis, holding one block of them at a time.

    Each block is copied to its place as it is computed; ``torch.stack`` would hold all twice.

    Args:
        tensors: S tensors of one shape (N, ...), one for each weight sample.

    Returns:
        A tensor of shape (S, N, ...).

    Raises:
        ValueError: there is no tensor.

    Example:
        >>> stack_samples([torch.zeros(2), torch.ones(2)])
        tensor([[0., 0.],
                [1., 1.]])
    """
    stack, start = None, 0
    for block in blocks_of(tensors):
        if stack is None:
            stack = block.new_empty((len(tensors), *block.shape[1:]))
        stack[start : start + len(block)] = block
        start += len(block)
    if stack is None:
        raise ValueError("at least one weight sample is needed, got none")
    return stack


def sum_components(log_probs: Tensor) -> Tensor:
    """Sum over the components of each target, from shape (S, N, ...) to (S, N).

    Example:
        >>> sum_components(torch.ones(2, 3)).shape, sum_components(torch.ones(2, 3, 4, 5)).shape
        (torch.Size([2, 3]), torch.Size([2, 3]))
    """
    return log_probs.flatten(2).sum(-1) if log_probs.dim() > 2 else log_probs


@dataclass(frozen=True, eq=False)
class Abstention:
    """Predictions together with a mask of those whose uncertainty is below a threshold.

    Args:
        answered: True where the uncertainty is at most the threshold, the shape of
            ``uncertainty``.
        prediction: the predictions everywhere, see ``Predictive.prediction``.
        uncertainty: the uncertainty that was compared with the threshold.

    Example:
        >>> from bayesify.prediction import GaussianPredictive
        >>> p = GaussianPredictive(torch.tensor([[0.0, -1.0], [0.0, 1.0]]), torch.tensor(0.5))
        >>> abstention = p.abstain(0.5)
        >>> abstention.answered, abstention.coverage
        (tensor([ True, False]), 0.5)
    """

    answered: Tensor
    prediction: Tensor
    uncertainty: Tensor

    @property
    def coverage(self) -> float:
        """Share of the predictions that are answered, from 0 to 1."""
        return float(self.answered.double().mean())


class Predictive(ABC):
    """The predictive distribution p(y | x) of N examples: a mixture over S weight samples.

    ``total = aleatoric + epistemic``, each computed by its own formula. Aleatoric uncertainty is
    the noise that would remain if the weights were known; epistemic uncertainty is what knowing
    the weights would remove. For classes ``total`` is the entropy of the averaged probabilities,
    ``aleatoric`` the averaged entropy and ``epistemic`` the mutual information of class and
    weights, in nats (Depeweg et al. 2018, eq. 2). For numbers ``total`` is the variance of the
    mixture, ``aleatoric`` the averaged variance of the noise and ``epistemic`` the variance of the
    network's output, by the law of total variance (eq. 4 there).

    Example:
        >>> from bayesify.prediction import GaussianPredictive
        >>> p = GaussianPredictive(torch.tensor([[-1.0], [1.0]]), torch.tensor(0.5))
        >>> p.total, p.interval(0.9)
        (tensor([1.2500]), (tensor([-1.6408]), tensor([1.6408])))
    """

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """Class probabilities (N, K), or the probability of 1 or mean of the target (N, ...)."""

    @property
    @abstractmethod
    def prediction(self) -> Tensor:
        """The point prediction: the most probable class, or the mean of the target."""

    @property
    @abstractmethod
    def total(self) -> Tensor:
        """Entropy in nats (N,), or the variance of the target (N, ...)."""

    @property
    @abstractmethod
    def aleatoric(self) -> Tensor:
        """The part of ``total`` that would remain if the weights were known."""

    @property
    @abstractmethod
    def epistemic(self) -> Tensor:
        """The part of ``total`` that is due to uncertain weights; never negative."""

    @property
    @abstractmethod
    def samples(self) -> Tensor | None:
        """The prediction of each weight sample, shape (S, N, ...), or None if not kept."""

    @abstractmethod
    def log_prob(self, targets: Tensor) -> Tensor:
        """Return log p(y | x) of the mixture, in nats, shape (N,)."""

    @abstractmethod
    def quantile(self, q: float) -> Tensor:
        """Return the q-quantile of the target, with the shape of ``mean``.

        Args:
            q: one number between 0 and 1.

        Raises:
            TypeError: q is not one number, or the target has no quantiles.
            ValueError: q is not strictly between 0 and 1.
        """

    @abstractmethod
    def subset(self, samples: Sequence[int] | Tensor) -> Self:
        """Return the predictive distribution of some weight samples, given by their indices.

        Raises:
            ValueError: the samples were not kept, ``samples`` is empty, or an index is out of
                range.
        """

    @classmethod
    @abstractmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Mix several predictive distributions of the same examples in equal shares.

        Raises:
            ValueError: there is none, or their shapes differ.
        """

    def interval(self, level: float) -> tuple[Tensor, Tensor]:
        """Return the equal-tailed interval that contains the target with probability ``level``.

        Raises:
            TypeError: level is not one number.
            ValueError: level is not strictly between 0 and 1.
        """
        check_level("level", level)
        return self.quantile(0.5 - 0.5 * level), self.quantile(0.5 + 0.5 * level)

    def standard_error(
        self, statistic: Callable[[Self], Tensor | float], *, groups: int | None = None
    ) -> Tensor:
        """Estimate the Monte Carlo standard error of a function of this distribution.

        This is the standard deviation of the statistic over repeated predictions with S other
        weight samples each; four times as many samples halve it. It is estimated by the jackknife
        that leaves out one group of weight samples at a time (Busing, Meijer and van der Leeden
        1999, eqs 4 to 6), from the present samples alone, with ``groups + 1`` evaluations of the
        statistic.

        Args:
            statistic: maps a predictive distribution to a tensor or a number.
            groups: the number of groups, from 2 to S; None stands for 25, or S if S is smaller.
                The relative error of the estimate is about ``1 / sqrt(2 * groups)``.

        Returns:
            The standard error, with the shape of the statistic.

        Raises:
            ValueError: the samples were not kept, there is only one, or ``groups`` is out of
                range.
            TypeError: ``statistic`` returns neither a tensor nor a number, or ``groups`` is no
                whole number.

        Example:
            >>> from bayesify.prediction import GaussianPredictive
            >>> p = GaussianPredictive(torch.tensor([[-1.0], [0.0], [1.0]]), torch.tensor(0.5))
            >>> p.standard_error(lambda p: p.mean), p.standard_error(lambda p: p.quantile(0.9))
            (tensor([0.5774]), tensor([0.6...]))
        """
        if self.samples is None:
            raise ValueError(f"a standard error needs the weight samples; {KEEP_SAMPLES_HINT}")
        return jackknife(lambda indices: statistic(self.subset(indices)), len(self.samples), groups)

    def abstain(self, threshold: float, *, by: Uncertainty = "total") -> Abstention:
        """Answer only where the uncertainty is at most ``threshold``.

        ``metrics.risk_coverage`` computes the curve from which to choose the threshold.

        Args:
            threshold: in nats, or in squared units of the target.
            by: the uncertainty to compare: ``"total"``, ``"aleatoric"`` or ``"epistemic"``.

        Raises:
            ValueError: ``threshold`` is nan, or ``by`` is not one of these names.

        Example:
            >>> from bayesify.prediction import CategoricalPredictive
            >>> p = CategoricalPredictive.from_logits([torch.tensor([[9.0, 0.0], [0.2, 0.0]])])
            >>> p.abstain(0.5).answered
            tensor([ True, False])
        """
        if threshold != threshold:
            raise ValueError("threshold must be a number, got nan")
        uncertainty = self.uncertainty(by)
        return Abstention(uncertainty <= threshold, self.prediction, uncertainty)

    def uncertainty(self, by: Uncertainty) -> Tensor:
        """Return ``total``, ``aleatoric`` or ``epistemic``, by name.

        Raises:
            ValueError: there is no uncertainty of this name.
        """
        if by not in get_args(Uncertainty):
            raise ValueError(f"by must be one of {', '.join(get_args(Uncertainty))}, got {by!r}")
        found: Tensor = getattr(self, by)
        return found


if TYPE_CHECKING:
    from typing_extensions import TypeVar

    #: The kind of predictive distribution that a likelihood makes, so that type checkers know what
    #: ``predict`` returns; the base class where they cannot see the likelihood.
    P_co = TypeVar("P_co", bound=Predictive, covariant=True, default=Predictive)
else:  # a default needs Python 3.13
    from typing import TypeVar

    P_co = TypeVar("P_co", bound=Predictive, covariant=True)


#: The remedy for missing samples, for error messages.
KEEP_SAMPLES_HINT = "call predict(x, keep_samples=True)"


def select_samples(tensor: Tensor | None, samples: Sequence[int] | Tensor) -> Tensor:
    """Select weight samples from a tensor (S, ...) by their indices.

    Raises:
        ValueError: the tensor is None, ``samples`` is empty, or an index is out of range.
    """
    if tensor is None:
        raise ValueError(f"the weight samples were not kept; {KEEP_SAMPLES_HINT}")
    index = torch.as_tensor(samples, device=tensor.device)
    if index.dim() != 1 or len(index) == 0:
        raise ValueError(
            "samples must be at least one index of a weight sample, in one row, got shape "
            f"{tuple(index.shape)}"
        )
    if index.dtype == torch.bool or index.is_floating_point() or index.is_complex():
        raise ValueError(
            f"samples must be integer indices, got {index.dtype}; convert a mask to indices with "
            "mask.nonzero().flatten()"
        )
    low, high = int(index.min()), int(index.max())
    if low < -len(tensor) or high >= len(tensor):
        raise ValueError(
            f"samples must lie from 0 to {len(tensor) - 1}, as there are {len(tensor)} weight "
            f"samples, got {high if high >= len(tensor) else low}"
        )
    return tensor[index.long()]


def choose_samples(components: Tensor, num_draws: int, seed: int) -> tuple[torch.Generator, Tensor]:
    """Choose a weight sample for each draw of each example.

    Args:
        components: a tensor (S, N, ...) of one value per component of the mixture.
        num_draws: number of draws for each example.
        seed: the choice is a function of it.

    Returns:
        The generator (on the CPU) for further noise, and indices (num_draws, N, ...) of weight
        samples, the same for all components of a target, for ``components.gather(0, ...)``.

    Raises:
        TypeError: ``num_draws`` or the seed is no whole number.
        ValueError: ``num_draws`` is below 1.
    """
    num_draws = whole_number("num_draws", num_draws)
    generator = generator_of(seed)
    shape = components.shape
    index = torch.randint(len(components), (num_draws, *shape[1:2]), generator=generator)
    index = index.reshape(*index.shape, *[1] * (len(shape) - 2)).expand(num_draws, *shape[1:])
    return generator, index.to(components.device)


def class_indices(targets: Tensor) -> Tensor:
    """Return targets of any integer dtype as int64 class indices.

    Raises:
        ValueError: they are no integers.

    Example:
        >>> class_indices(torch.tensor([0, 2], dtype=torch.uint8))
        tensor([0, 2])
        >>> class_indices(torch.tensor([0.0, 1.9]))
        Traceback (most recent call last):
        ValueError: targets must be class indices of dtype torch.int64, got torch.float32; ...
    """
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise ValueError(
            f"targets must be class indices of dtype torch.int64, got {targets.dtype}; convert "
            "them with .long()"
        )
    return targets.long()


def check_kind(kind: type[Predictive], parts: Sequence[object]) -> None:
    """Raise ValueError unless all distributions that are to be joined are of a kind."""
    others = sorted({type(part).__name__ for part in parts if not isinstance(part, kind)})
    if others:
        raise ValueError(
            f"{kind.__name__}.joined needs distributions of this kind, got {', '.join(others)}"
        )


def check_joinable(shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise ValueError unless there is at least one shape and all are equal."""
    if len(set(shapes)) != 1:
        raise ValueError(
            "there must be at least one predictive distribution, and all must be of the same "
            "examples, got "
            f"{'none' if not shapes else 'shapes ' + ', '.join(map(str, sorted(set(shapes))))}"
        )


def has_values(tensor: Tensor) -> bool:
    """Return whether the numbers of a tensor are known, as they are not while a program is traced.

    Example:
        >>> has_values(torch.ones(2)), has_values(torch.ones(2, device="meta"))
        (True, False)
    """
    if torch.compiler.is_compiling() or tensor.is_meta:
        return False
    try:
        _ = [float(number) for number in tensor.detach().flatten()[:1]]
    except RuntimeError:  # under vmap, or of a fake tensor
        return False
    return True
