"""Turn predictions into the answers of the service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from bayesify.app.serve.requests import InputError

__all__ = [
    "ClassAnswer",
    "ClassAnswers",
    "NumberAnswer",
    "NumberAnswers",
    "check_finite",
    "class_answers",
    "number_answers",
]

Array = npt.NDArray[Any]

#: A total above the threshold by less than this part of it is taken for equal: rounding in float32
#: depends on the other examples of a pass, and many rows may have the very total of the threshold.
_ROUNDING = 1e-4


class _Answer(BaseModel):
    #: Total uncertainty: entropy in nats, or variance in squared units of the target.
    total: float
    #: Its part that is due to uncertain weights.
    epistemic: float
    #: Whether the total uncertainty is above the threshold, by more than rounding; null without a
    #: threshold.
    abstain: bool | None
    #: The column in which a row lies outside the training data, "" if it lies within; null if this
    #: is not known.
    outside: str | None


class ClassAnswer(_Answer):
    """The answer for one example of a classification."""

    prediction: str
    probabilities: dict[str, float]
    #: The number of weight samples under which each class is the most probable; null if the model
    #: has only their average.
    votes: dict[str, int] | None


class NumberAnswer(_Answer):
    """The answer for one row of a regression, in units of the target."""

    prediction: float
    std: float
    lower: float
    upper: float
    #: The mean under each weight sample; null if the model has only their average.
    votes: list[float] | None


class _Answers(BaseModel):
    #: The unit of total and epistemic.
    unit: str
    #: Largest total uncertainty that is not abstained from.
    threshold: float | None
    num_samples: int


class ClassAnswers(_Answers):
    """The answers to a request of a classification, in the order of its examples."""

    answers: list[ClassAnswer]


class NumberAnswers(_Answers):
    """The answers to a request of a regression, in the order of its examples."""

    answers: list[NumberAnswer]
    #: Probability of the interval from lower to upper.
    level: float


def class_answers(
    mean: Array,
    total: Array,
    epistemic: Array,
    *,
    classes: Sequence[str],
    threshold: float | None,
    samples: Array | None = None,
    outside: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Return the answers of a classification.

    Args:
        mean: averaged probabilities, shape (N, K).
        total: entropies in nats, shape (N,).
        epistemic: mutual information in nats, shape (N,).
        classes: K names.
        threshold: see :class:`ModelCard`.
        samples: probabilities of each weight sample, shape (S, N, K).
        outside: for each row the column in which it lies outside, or "".

    Raises:
        InputError: a number is not finite.

    Example:
        >>> found = class_answers(
        ...     np.array([[0.25, 0.75]]), np.array([0.56]), np.array([0.1]),
        ...     classes=("cat", "dog"), threshold=0.5,
        ... )
        >>> found[0]["prediction"], found[0]["abstain"], found[0]["outside"]
        ('dog', True, None)
    """
    check_finite(mean, total, epistemic)
    votes: list[dict[str, int] | None] = [None] * len(mean)
    if samples is not None:
        winners = samples.argmax(-1)
        counts = [(winners == place).sum(0).tolist() for place in range(len(classes))]
        votes = [
            {name: row[place] for place, name in enumerate(classes) if row[place]}
            for row in zip(*counts, strict=True)
        ]
    return [
        {
            "prediction": classes[int(np.argmax(row))],
            "probabilities": dict(zip(classes, row, strict=True)),
            "votes": vote,
            **common,
        }
        for row, vote, common in zip(
            mean.tolist(), votes, _common(total, epistemic, threshold, outside), strict=True
        )
    ]


def number_answers(
    mean: Array,
    std: Array,
    interval: tuple[Array, Array],
    epistemic: Array,
    *,
    threshold: float | None,
    samples: Array | None = None,
    outside: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Return the answers of a regression.

    Args:
        mean: means, shape (N,).
        std: standard deviations, whose squares are the total uncertainty, shape (N,).
        interval: lower and upper bounds, each of shape (N,).
        epistemic: variances, shape (N,).
        threshold: see :class:`ModelCard`.
        samples: means of each weight sample, shape (S, N).
        outside: as for :func:`class_answers`.

    Raises:
        InputError: a number is not finite.

    Example:
        >>> one = np.array([3.0])
        >>> found = number_answers(one, one, (one - 2, one + 2), one, threshold=None)
        >>> found[0]["prediction"], found[0]["total"], found[0]["upper"]
        (3.0, 9.0, 5.0)
    """
    lower, upper = interval
    total = np.square(std)
    check_finite(mean, total, lower, upper, epistemic)
    votes: list[list[float] | None] = [None] * len(mean)
    if samples is not None:
        votes = [row.tolist() for row in samples.T]
    parts = (each.tolist() for each in (mean, std, lower, upper))
    names = ("prediction", "std", "lower", "upper", "votes")
    return [
        {**dict(zip(names, own, strict=True)), **common}
        for *own, common in zip(
            *parts, votes, _common(total, epistemic, threshold, outside), strict=True
        )
    ]


def _common(
    total: Array, epistemic: Array, threshold: float | None, outside: Sequence[str] | None
) -> list[dict[str, Any]]:
    places: Sequence[str | None] = [None] * len(total) if outside is None else outside
    limit = None if threshold is None else threshold * (1.0 + _ROUNDING)
    return [
        {
            "total": whole,
            "epistemic": part,
            "abstain": None if limit is None else whole > limit,
            "outside": place,
        }
        for whole, part, place in zip(total.tolist(), epistemic.tolist(), places, strict=True)
    ]


def check_finite(*parts: Array) -> None:
    """Raise InputError where a prediction, shape (N, ...), is NaN or infinite."""
    for part in parts:
        fine = np.isfinite(part).reshape(len(part), -1).all(1)
        if not fine.all():
            raise InputError(
                ("examples", int((~fine).argmax())),
                "a prediction must be finite, got NaN or infinity: values lie too far outside the "
                "training data; correct or remove them",
            )
