"""The target of a table: its likelihood, the check of its values, their scale, their tensor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from bayesify.tabular.advice import without_wild
from bayesify.tabular.cells import Floats, as_numbers
from bayesify.tabular.censoring import Limits
from bayesify.tabular.columns import facts_of
from bayesify.tabular.detect import ColumnScan
from bayesify.tabular.files import TableError
from bayesify.tabular.label_list import joined_labels
from bayesify.tabular.likelihoods import LARGEST_COUNT, CountStatistics, wrong_count
from bayesify.tabular.scaling import Scaling
from bayesify.tabular.schema import LARGEST_TARGET, SMALLEST_SPREAD, Target, label_of

__all__ = [
    "check_targets",
    "scaled_target",
    "tames_targets",
    "target_tensor",
    "with_likelihood",
    "without_target",
]

#: Classes that an error message names.
_MOST_NAMED = 10
#: A target so many interquartile ranges from the median is reported.
_WILD = 1e6
#: The square of so many standard deviations overflows in float32.
_LARGEST_DEVIATION = 1e18


def with_likelihood(
    target: Target, likelihood: str, limits: Limits | None, ordered: Sequence[str]
) -> Target:
    """Return the target with its likelihood.

    Args:
        target: the target column.
        likelihood: as for ``fit_table``, like all that follow.
        limits: see there.
        ordered: see there.

    Raises:
        TableError: ``ordered`` is not the classes of the target, each once.

    Example:
        >>> target = Target("size", "classification", ("high", "low"))
        >>> with_likelihood(target, "", None, ("low", "high")).classes
        ('low', 'high')
    """
    if target.task == "regression":
        below, above = (limits.below, limits.above) if limits is not None else (-math.inf, math.inf)
        return dataclasses.replace(
            target,
            likelihood=likelihood,
            below=None if math.isinf(below) else below,
            above=None if math.isinf(above) else above,
        )
    if not ordered:
        return target
    labels = tuple(label_of(label) for label in ordered)
    if sorted(labels) != sorted(target.classes):
        classes = target.classes
        more = f" and {len(classes) - _MOST_NAMED:,} more" if len(classes) > _MOST_NAMED else ""
        advice = "; leave --ordered out for numbers" if more and _are_numbers(classes) else ""
        raise TableError(
            f"--ordered must have each class of the target {target.name!r} once, which are "
            f"{joined_labels(classes[:_MOST_NAMED])}{more}, got {joined_labels(labels)}{advice}"
        )
    return dataclasses.replace(target, classes=labels, likelihood="ordinal")


def _are_numbers(classes: Sequence[str]) -> bool:
    return bool(np.isfinite(as_numbers(np.array(classes, dtype=object))).all())


def without_target(count: int, scan: ColumnScan) -> list[str]:
    """Return a remark on rows that have no usable target; none without such rows.

    Example:
        >>> scan = ColumnScan("size")
        >>> scan.update(np.array(["small", "None"], dtype=object))
        >>> without_target(1, scan)
        ["1 row has no usable target 'size' and is left out; 'None' counts as missing"]
    """
    if not count:
        return []
    words = [repr(word) for word, _ in scan.words_for_missing.most_common(3)]
    what = f"; {', '.join(words)} count{'s' if len(words) == 1 else ''} as missing" if words else ""
    return [
        f"{count:,} row{'s have' if count > 1 else ' has'} no usable target {scan.name!r} and "
        f"{'are' if count > 1 else 'is'} left out{what}"
    ]


def check_targets(
    path: Path,
    name: str,
    targets: Floats,
    target: Target,
    numbers: npt.NDArray[np.int64] | None = None,
) -> list[str]:
    """Return remarks on numbers at a limit, and on one that lies absurdly far from the others.

    Args:
        path: file of the table, for messages.
        name: name of the target column.
        targets: its numbers, shape (N,); nan where there is none.
        target: the target column, with its likelihood.
        numbers: of the rows in the file, from 0, shape (N,); None where they are all of its rows.

    Raises:
        TableError: the squares of some overflow or of their differences underflow, one is no count
            where counts are asked for, or all are censored.

    Example:
        >>> target = Target("price", "regression")
        >>> check_targets(Path("a.csv"), "price", np.array([1.0, 2.0, 3.0, 1e300]), target)
        Traceback (most recent call last):
        bayesify.tabular.files.errors.TableError: a.csv: the target 'price' must be at most ...
    """
    places = np.flatnonzero(np.isfinite(targets))
    known = targets[places]
    if not len(known):
        return []
    rows = (places if numbers is None else numbers[places]) + 1
    worst = int(np.abs(known).argmax())
    if abs(known[worst]) > LARGEST_TARGET:
        raise TableError(
            f"{path}: the target {name!r} must be at most {LARGEST_TARGET:g} in size, got "
            f"{known[worst]:g} in row {rows[worst]:,}; correct or remove the row"
        )
    if 0.0 < known.max() - known.min() < SMALLEST_SPREAD:
        raise TableError(
            f"{path}: the target {name!r} must vary by at least {SMALLEST_SPREAD:g}, got numbers "
            f"from {known.min():g} to {known.max():g}; write it in a smaller unit"
        )
    wrong = wrong_count(known) if target.has_counts else None
    if wrong is not None:
        raise TableError(
            f"{path}: the target {name!r} must hold counts, integers from 0 to {LARGEST_COUNT:g}, "
            f"for --likelihood {target.likelihood}, got {wrong:g} in row "
            f"{rows[int((known == wrong).argmax())]:,}; use --likelihood gaussian for other "
            "numbers"
        )
    limits = target.limits
    censored = (known <= limits.below) | (known >= limits.above)
    if censored.all():
        raise TableError(
            f"{path}: the target {name!r} must have numbers between its limits, got none; correct "
            "--censored-below or --censored-above"
        )
    count = int(censored.sum())
    share = [] if limits.are_open else [f"{count:,} of {len(known):,} targets are at a limit"]
    middle = float(np.median(known))
    spread = next(
        (
            float(high - low)
            for tail in (0.25, 0.05)
            if (high := np.quantile(known, 1.0 - tail)) > (low := np.quantile(known, tail))
        ),
        math.inf,
    )
    far = int(np.abs(known - middle).argmax())
    recorded = np.clip(known, limits.below, limits.above)
    tamed, _ = without_wild(recorded[:, None])
    scaling = Scaling.of(torch.from_numpy(tamed))
    deviations = np.abs(recorded - scaling.shift.item())
    wild = int(deviations.argmax())
    if not target.has_counts and deviations[wild] > _LARGEST_DEVIATION * scaling.scale.item():
        raise TableError(
            f"{path}: the target {name!r} must be within {_LARGEST_DEVIATION:g} standard "
            f"deviations of the others, {scaling.scale.item():.3g}, got {known[wild]:g} in row "
            f"{rows[wild]:,}; correct or remove the row"
        )
    if abs(known[far] - middle) <= _WILD * spread:
        return share
    return [
        *share,
        f"the target {name!r} is {known[far]:g} in row {rows[far]:,}, where half of the rows "
        f"are within {spread:.3g} of each other: among the held-out rows it decides the error of "
        "all; correct or remove it if it is wrong",
    ]


def scaled_target(target: Target, values: Floats) -> tuple[Target, str | None]:
    """Return the target with the statistics of its training values, and a note of wild ones.

    Args:
        target: the target column, with its likelihood.
        values: class indices or numbers of the training rows, shape (N,).

    Example:
        >>> target, note = scaled_target(Target("y", "regression"), np.array([1.0, 3.0]))
        >>> target.shift, target.scale, note
        (2.0, 1.0, None)
    """
    if target.task != "regression":
        counts = np.bincount(values.astype(np.int64), minlength=len(target.classes))
        shares = tuple((counts / counts.sum()).tolist())
        return dataclasses.replace(target, marginal=shares), None
    whole, typical = facts_of(values)
    if target.has_counts:
        found = CountStatistics.of(torch.from_numpy(values[:, None]))
        counts_fitted = dataclasses.replace(
            target,
            log_rate=found.log_rates.item(),
            marginal=(found.spread.item(),),
            whole=whole,
            typical=typical,
        )
        return counts_fitted, None
    limits = target.limits
    tamed, note = without_wild(np.clip(values, limits.below, limits.above)[:, None])
    scaling = Scaling.of(torch.from_numpy(tamed))
    fitted = dataclasses.replace(
        target,
        shift=scaling.shift.item(),
        scale=scaling.scale.item(),
        marginal=(1.0,),
        whole=whole,
        typical=typical,
    )
    return fitted, None if target.likelihood == "student-t" else note


def tames_targets(target: Target) -> bool:
    """Return whether training targets far from all others count as the nearest of the others.

    Not in runs of earlier versions; the other likelihoods know values far from the others.
    """
    return bool(target.marginal) and target.likelihood in ("", "gaussian", "censored")


def target_tensor(target: Target, recorded: Floats, targets: Floats) -> torch.Tensor:
    """Return targets as the network is trained on them, as in ``TableData``.

    Args:
        target: the target column, fitted.
        recorded: class indices or numbers as they are in the table, nan where there is none, (N,).
        targets: numbers within their limits, the wild ones tamed, (N,); not used for classes.
    """
    if target.task != "regression":
        return torch.from_numpy(np.nan_to_num(recorded)).to(torch.int64)
    numbers = torch.from_numpy(targets)
    limits = target.limits
    if not limits.are_open:
        known = torch.from_numpy(recorded)
        exact = limits.is_exact(known).unsqueeze(-1)
        numbers = torch.stack([numbers] * 2, dim=-1).where(exact, limits.bounds(known))
    return target.scaling.standardised(numbers).to(torch.float32).unsqueeze(1)
