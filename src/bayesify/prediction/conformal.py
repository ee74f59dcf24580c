"""Intervals and sets of classes that hold new targets with a guaranteed probability.

Conformal prediction widens or narrows a model's predictions until they hold the targets of examples
that the model was not trained on. The guarantee needs no assumption about the model: only that
these examples and the new ones are exchangeable, as independent draws from one distribution are.

Notation of the papers: n calibration examples, alpha = 1 - level, K networks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Self

import torch
from torch import Tensor

from bayesify.prediction.checks import check_level, check_sums, check_tensors
from bayesify.prediction.predictive import class_indices

__all__ = ["Conformal", "ConformalIntervals", "ConformalSets", "smallest_sets", "whole_ends"]

#: Numbers of a temporary tensor that compares new examples with calibration examples.
_MOST_NUMBERS = 4_000_000
#: Rounding of a network in float32, relative to a probability of 1 or to a standard deviation.
_LEAST_ROUNDING = 64.0 * torch.finfo(torch.float32).eps


@dataclass(frozen=True, eq=False)
class Conformal:
    """Scores of calibration examples: how far each target lies from its prediction.

    It is the common part of :class:`ConformalIntervals` and :class:`ConformalSets`.

    Args:
        scores: for each of K networks a tensor of shape (m, ...): the scores of m examples that
            this network was not trained on. K is 1, or see :meth:`joined`.

    Raises:
        ValueError: there is no score, one is NaN, or the networks have different numbers of them.

    Example:
        >>> found = Conformal((torch.rand(50), torch.rand(50)))
        >>> found.num_scores, round(found.guarantee(0.9), 3)
        (100, 0.78)
    """

    scores: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        """Check the scores."""
        shapes = {tuple(part.shape) for part in self.scores}
        if len(shapes) != 1 or not min(shapes)[0]:
            raise ValueError(
                "each network must have the scores of equally many examples, at least one, got "
                f"shapes {', '.join(map(str, sorted(shapes))) or 'of no network'}"
            )
        if any(bool(part.isnan().any()) for part in self.scores):
            raise ValueError(
                "scores must be numbers, got nan; correct the predictions or targets that are nan"
            )

    @classmethod
    def joined(cls, parts: Iterable[Self]) -> Self:
        """Join the scores of K networks, each trained without the examples of its own scores.

        This is CV+ (Barber, Candes, Ramdas and Tibshirani 2021): K-fold cross-validation, in which
        every example is scored by the network that was not trained on it. K = n is the jackknife+.

        Raises:
            ValueError: the networks have different numbers of scores.
        """
        return cls(tuple(scores for part in parts for scores in part.scores))

    @property
    def num_scores(self) -> int:
        """Number of calibration examples, n."""
        return sum(map(len, self.scores))

    def guarantee(self, level: float) -> float:
        """Return the least probability with which a new target is held.

        With one network it is ``level``, and at most ``level + 1 / (n + 1)`` if no two scores are
        equal. With K networks it is ``1 - 2 alpha - min(2 (1 - 1/K) / (n/K + 1), (1 - K/n) /
        (K + 1))`` (Barber et al. 2021, theorem 4), where about ``level`` is usual.

        The probability is over calibration examples and new example together.

        Raises:
            TypeError: ``level`` is not one number.
            ValueError: ``level`` is out of range, or there are too few examples for it.
        """
        self._rank(level)
        n, k = self.num_scores, len(self.scores)
        if k == 1:
            return level
        excess = min(2.0 * (1.0 - 1.0 / k) / (n / k + 1.0), (1.0 - k / n) / (k + 1.0))
        return max(0.0, 1.0 - 2.0 * (1.0 - level) - excess)

    def _rank(self, level: float) -> int:
        """Return the place of the conformal quantile among the sorted scores, from 1."""
        check_level("level", level)
        if len(self.scores) > 1 and level <= 0.5:
            raise ValueError(
                f"level must be above 0.5 for networks of a cross-validation, got {level}: nothing "
                "would be guaranteed"
            )
        # As a decimal fraction, since 100 * 0.07 is more than 7 in floating point.
        exact = Fraction(str(float(level)))
        rank = math.ceil((self.num_scores + 1) * exact)
        if rank > self.num_scores:
            raise ValueError(
                f"level {level} needs at least {math.ceil(exact / (1 - exact))} calibration "
                f"examples, got {self.num_scores}; give more, or lower the level"
            )
        return rank

    def _by_network(self, predictions: Tensor) -> Sequence[Tensor]:
        """Return the predictions of each network."""
        count = len(self.scores)
        if count == 1:
            return [predictions]
        if predictions.dim() == 0 or len(predictions) != count:
            raise ValueError(
                f"predictions must be those of the {count} networks, stacked along a first axis "
                f"of this length, got shape {tuple(predictions.shape)}"
            )
        return predictions.unbind(0)


@dataclass(frozen=True, eq=False)
class ConformalIntervals(Conformal):
    """Intervals of numbers that hold a new target with a guaranteed probability.

    The score is the error in units of the predicted standard deviation, ``|y - mean| / std``, and
    the interval ``mean +- q std`` with q a quantile of the scores: as wide as the model predicts,
    up to one factor. Several targets of an example are treated one by one.

    Example:
        >>> import bayesify as bf
        >>> y = torch.arange(-9.0, 10.0)  # the model predicts 0 with std 1, much too narrow
        >>> found = bf.ConformalIntervals.of(torch.zeros(19), torch.ones(19), y)
        >>> lower, upper = found.interval(torch.tensor([5.0]), torch.tensor([2.0]), level=0.9)
        >>> round(lower.item(), 2), round(upper.item(), 2), found.guarantee(0.9)
        (-13.0, 23.0, 0.9)
    """

    @classmethod
    def of(cls, mean: Tensor, std: Tensor, targets: Tensor) -> Self:
        """Score examples that the model was not trained on.

        A score has a margin of a few roundings of mean and error, and of a standard deviation in
        float32, in which networks compute: equal targets, such as grades and counts, lie at the end
        that one of them sets, and rounding would leave them outside. Means in float32 that are
        hundreds of standard deviations from 0 are not to be widened to float64.

        Args:
            mean: predicted means of n examples, shape (n, ...).
            std: predicted standard deviations, of the same shape, positive and finite.
            targets: what was observed, of the same shape.

        Raises:
            TypeError: one of them is no tensor.
            ValueError: the shapes differ, there is no example, a std is not positive and finite,
                or a number is NaN.
        """
        _check_std(mean, std)
        _check_shape("targets", targets, mean)
        error = (targets - mean).abs()
        margin = 4.0 * torch.finfo(error.dtype).eps * (mean.abs() + error)
        scores = (error + margin) / std
        # In units of the std, since means may have been widened to float64 after the network.
        return cls((scores + _LEAST_ROUNDING * (1.0 + scores),))

    def interval(self, mean: Tensor, std: Tensor, level: float) -> tuple[Tensor, Tensor]:
        """Return the ends of the intervals of new examples, both included.

        Args:
            mean: predicted means of N examples, shape (N, ...); of K joined networks (K, N, ...).
            std: predicted standard deviations, of the same shape, positive and finite.
            level: probability of holding the target, see :meth:`guarantee`.

        Raises:
            TypeError: ``level`` is not one number, or mean or std is no tensor.
            ValueError: ``level`` is out of range, there are too few calibration examples for it,
                the shapes do not fit, a mean is not finite, or a std is not positive and finite.
        """
        rank = self._rank(level)
        _check_std(mean, std)
        _check_finite("means", mean)
        means, stds = self._by_network(mean), self._by_network(std)
        shape = tuple(means[0].shape[1:])
        if shape != tuple(self.scores[0].shape[1:]):
            raise ValueError(
                f"an example must have the shape {tuple(self.scores[0].shape[1:])} of those that "
                f"were scored, got {shape}"
            )
        if len(means) == 1:
            width = self.scores[0].kthvalue(rank, dim=0).values * stds[0]
            return means[0] - width, means[0] + width
        rows = max(1, _MOST_NUMBERS // (self.num_scores * math.prod(shape)))
        pieces = zip(
            zip(*(part.split(rows) for part in means), strict=True),
            zip(*(part.split(rows) for part in stds), strict=True),
            strict=True,
        )
        ends = [self._between(some, wide, rank) for some, wide in pieces]
        lower, upper = (torch.cat(parts) for parts in zip(*ends, strict=True))
        return lower, upper

    def _between(
        self, means: Sequence[Tensor], stds: Sequence[Tensor], rank: int
    ) -> tuple[Tensor, Tensor]:
        """Return the ends of CV+, quantiles of ``mean_k -+ score std_k`` over all scores."""
        shape = (-1, 1, *means[0].shape[1:])
        widths = [
            scores.reshape(shape) * std for scores, std in zip(self.scores, stds, strict=True)
        ]
        low = torch.cat([mean - wide for mean, wide in zip(means, widths, strict=True)])
        high = torch.cat([mean + wide for mean, wide in zip(means, widths, strict=True)])
        opposite = self.num_scores + 1 - rank
        return low.kthvalue(opposite, dim=0).values, high.kthvalue(rank, dim=0).values


@dataclass(frozen=True, eq=False)
class ConformalSets(Conformal):
    """Sets of classes that hold a new example's class with a guaranteed probability.

    The score of a class is the probability of all classes that are more probable. The sets are
    those of the most probable classes: without calibration up to a total of ``level``, here up to
    the total that held the calibration examples. A set always holds the most probable class.

    It is the deterministic form of adaptive prediction sets (Romano, Sesia and Candes 2020) that
    leaves out the class's own probability.

    Args:
        scores: as for :class:`Conformal`; :meth:`of` computes them.
        num_classes: K, the number of classes that new probabilities must have; None allows any.

    Example:
        >>> import bayesify as bf
        >>> p = torch.tensor([[0.6, 0.3, 0.1]]).expand(19, 3)
        >>> found = bf.ConformalSets.of(p, torch.tensor([0] * 14 + [1] * 5))
        >>> found.sets(torch.tensor([[0.5, 0.3, 0.2], [0.7, 0.2, 0.1]]), level=0.9)
        tensor([[ True,  True, False],
                [ True, False, False]])
    """

    num_classes: int | None = None

    @classmethod
    def of(cls, probabilities: Tensor, targets: Tensor) -> Self:
        """Score examples that the model was not trained on.

        Args:
            probabilities: of each class, shape (n, K), with rows that sum to 1, such as
                ``Predictive.mean``.
            targets: indices of the observed classes, integers of shape (n,).

        Raises:
            TypeError: one of them is no tensor.
            ValueError: the shapes do not fit, a probability is not finite, a row does not sum to 1,
                there is no example, or a target is no class.
        """
        check_tensors(probabilities=probabilities)
        _check_probabilities(probabilities)
        _check_shape("targets", targets, probabilities[:, 0])
        index, classes = class_indices(targets), probabilities.shape[1]
        if len(index) and (int(index.min()) < 0 or int(index.max()) >= classes):
            raise ValueError(
                f"targets must be indices of {classes} classes, from 0 to {classes - 1}, got "
                f"{int(index.min())} to {int(index.max())}"
            )
        scores = _mass_before(probabilities).gather(1, index.unsqueeze(1))
        return cls((scores.squeeze(1),), classes)

    @classmethod
    def joined(cls, parts: Iterable[Self]) -> Self:
        """See ``Conformal.joined``; all networks must have the same classes.

        Raises:
            ValueError: the networks have different classes.
        """
        found = list(parts)
        counts = {part.num_classes for part in found} - {None}
        if len(counts) > 1:
            raise ValueError(
                "the networks must be calibrated on the same classes, got "
                f"{' and '.join(map(str, sorted(filter(None, counts))))} of them; give each "
                "network a probability of every class, 0 for those it does not know"
            )
        return replace(super().joined(found), num_classes=next(iter(counts), None))

    def sets(self, probabilities: Tensor, level: float) -> Tensor:
        """Return which classes are in the set of each new example, booleans of shape (N, K).

        Args:
            probabilities: of each class, shape (N, K), with rows that sum to 1; of two or more
                joined networks stacked along a first axis.
            level: probability of holding the class, see :meth:`guarantee`.

        Raises:
            TypeError: ``level`` is not one number, or the probabilities are no tensor.
            ValueError: ``level`` is out of range, there are too few calibration examples for it,
                the shapes do not fit, a probability is not finite, or a row does not sum to 1.
        """
        rank = self._rank(level)
        check_tensors(probabilities=probabilities)
        parts = self._by_network(probabilities)
        for part in parts:
            _check_probabilities(part, self.num_classes)
        # In how many comparisons a class is less plausible than a calibration example's own.
        behind = torch.zeros_like(parts[0], dtype=torch.int64)
        for scores, part in zip(self.scores, parts, strict=True):
            mass = _mass_before(part) - _rounding(part)
            behind += torch.searchsorted(scores.sort().values, mass.contiguous())
        best = torch.stack(list(parts)).mean(0).argmax(1, keepdim=True)
        return (behind < rank).scatter(1, best, True)


def smallest_sets(probabilities: Tensor, level: float) -> Tensor:
    """Return which classes are in the smallest set of total probability ``level``.

    The total may be below ``level`` by the rounding of the probabilities, 1e-5 in float32 and .016
    in bfloat16: of five equal classes four hold 80 %. The most probable class is always in the set.

    Args:
        probabilities: of each class, shape (N, K), with rows that sum to 1.
        level: strictly between 0 and 1.

    Raises:
        TypeError: ``level`` is not one number, or the probabilities are no tensor.
        ValueError: ``level`` is out of range, the shape is another, a probability is not finite, or
            a row does not sum to 1.

    Example:
        >>> smallest_sets(torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.0, 0.9]]), 0.75)
        tensor([[ True,  True, False],
                [False, False,  True]])
    """
    check_level("level", level)
    check_tensors(probabilities=probabilities)
    _check_probabilities(probabilities)
    before = _mass_before(probabilities)
    return (before < level - _rounding(probabilities)) | (before == 0.0)


def whole_ends(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least and the largest count within each interval, both from 0.

    An interval that holds no count gets the one below it.

    Example:
        >>> whole_ends(torch.tensor([-0.4, 1.2, 2.1]), torch.tensor([0.9, 3.0, 2.6]))
        (tensor([0., 2., 2.]), tensor([0., 3., 2.]))
    """
    upper = upper.clamp_min(0.0).floor()
    return lower.clamp_min(0.0).ceil().minimum(upper), upper


def _rounding(numbers: Tensor) -> float:
    """Return a bound on the rounding by which equal scores differ, as of one row in two batches.

    Scores are equal where rows are, as in tables of categories; conformal sets are widened by it,
    so that an equal score counts as one. It is at least that of float32, from which probabilities
    may have been widened. In half precision that many steps would be most of the probability.
    """
    eps = torch.finfo(numbers.dtype).eps
    return max(_LEAST_ROUNDING, min(64.0 * eps, max(2.0 * eps, 1e-4)))


def _mass_before(probabilities: Tensor) -> Tensor:
    """Return for each class the total probability of the classes before it, most probable first.

    Example:
        >>> _mass_before(torch.tensor([[0.25, 0.5, 0.25]]))
        tensor([[0.5000, 0.0000, 0.7500]])
    """
    wide = torch.promote_types(probabilities.dtype, torch.float32)
    ordered, order = probabilities.to(wide).sort(dim=1, descending=True, stable=True)
    before = torch.zeros_like(ordered)
    before[:, 1:] = ordered.cumsum(1)[:, :-1]
    return torch.empty_like(before).scatter(1, order, before)


def _check_shape(name: str, tensor: Tensor, expected: Tensor) -> None:
    check_tensors(**{name: tensor})
    if tensor.shape != expected.shape:
        raise ValueError(
            f"{name} must have shape {tuple(expected.shape)}, got {tuple(tensor.shape)}; nothing "
            "is broadcast"
        )


def _check_probabilities(probabilities: Tensor, classes: int | None = None) -> None:
    """Raise ValueError unless these are the probabilities of one network, (N, K)."""
    if probabilities.dim() != 2 or not probabilities.shape[1]:
        raise ValueError(
            "probabilities of a network must have shape (N, K), a row for each example, got "
            f"{tuple(probabilities.shape)}; stack those of two or more joined networks only"
        )
    if not probabilities.is_floating_point():
        raise ValueError(
            f"probabilities must be floating-point numbers, got dtype {probabilities.dtype}; use "
            "predict(x).mean"
        )
    if classes is not None and probabilities.shape[1] != classes:
        raise ValueError(
            f"probabilities must be of the {classes} classes of the calibration, got "
            f"{probabilities.shape[1]}; calibrate on examples of this network"
        )
    wrong = ~probabilities.isfinite()
    if bool(wrong.any()):
        row = int(wrong.any(1).nonzero()[0])
        raise ValueError(
            f"probabilities must be finite, got {probabilities[row][wrong[row]][0].item()} in row "
            f"{row}; correct the inputs of this example, or leave it out"
        )
    check_sums("probabilities", probabilities)


def _check_finite(name: str, values: Tensor) -> None:
    wrong = ~values.isfinite()
    if bool(wrong.any()):
        raise ValueError(
            f"{name} must be finite, got {values[wrong][0].item()} for {int(wrong.sum())} of "
            f"{values.numel()}; correct the inputs of these examples, or leave them out"
        )


def _check_std(mean: Tensor, std: Tensor) -> None:
    check_tensors(mean=mean)
    _check_shape("std", std, mean)
    _check_finite("std", std)
    if not bool((std > 0.0).all()):
        raise ValueError(f"std must be positive, got {float(std.min()):g}")
