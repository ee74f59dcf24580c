"""Measure what a network makes of the columns of a table: their importance and their effect.

Both functions take any prediction that returns a :class:`bayesify.Predictive`: of a network, of a
scikit-learn estimator or of a pipeline. Rows are a tensor, an array or a data frame.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bayesify.noise.arguments import whole_number
from bayesify.noise.keys import Stream, derived_seed
from bayesify.prediction import Predictive
from bayesify.prediction.checks import check_level

__all__ = [
    "Importance",
    "PartialDependence",
    "Rise",
    "partial_dependence",
    "permutation_importance",
]


class Rise(NamedTuple):
    """Rise of a loss, with the ends of its interval.

    Example:
        >>> Rise(0.4, low=0.3, high=0.5).low > 0.0  # the column matters
        True
    """

    rise: float
    low: float
    high: float


class Importance(NamedTuple):
    """Rise of the losses when the cells of a column are exchanged between rows.

    Args:
        column: name of the column.
        nll: rise of the negative log-likelihood, in nats per row.
        error: rise of the error in percent, or of the RMSE in the unit of the targets.

    Example:
        >>> found = Importance("age", nll=Rise(0.4, 0.3, 0.5), error=Rise(2.0, 1.0, 3.0))
        >>> found.column, found.nll.rise
        ('age', 0.4)
    """

    column: str
    nll: Rise
    error: Rise


def permutation_importance(
    predict: Callable[[Any], Predictive],
    inputs: Any,
    targets: Tensor,
    columns: Mapping[str, Sequence[Hashable]],
    *,
    repeats: int = 5,
    level: float = 0.95,
    seed: int = 0,
) -> list[Importance]:
    """Return how much worse the predictions are if a column's cells come from other rows.

    Each row is predicted ``repeats`` times with the cells of as many other rows; every row gives
    and receives equally often. The interval is that of the mean over rows drawn like these: a row
    counts with the rise of its loss by other cells, and of other rows' losses by its cells. The
    standard deviation of ``sklearn.inspection.permutation_importance`` is over repetitions on the
    same rows, and so narrower. With few repetitions the interval is rather too wide. An importance
    is that of the column for this network; where two columns hold the same information, both may
    have a low one.

    Args:
        predict: maps rows to their predictive distribution.
        inputs: N rows that were not used in training: a tensor (N, F), an array or a data frame.
        targets: their targets, as ``Predictive.log_prob`` expects them: class indices (N,), or
            numbers of the shape of the mean.
        columns: indices, or names in a data frame, that are exchanged together, by the name of a
            column: all inputs of a category are one column.
        repeats: other rows that each row is given cells of.
        level: level of the intervals, strictly between 0 and 1.
        seed: which rows these are is a function of it.

    Returns:
        One importance for each column, in the order of ``columns``.

    Raises:
        TypeError: ``repeats`` is no whole number.
        ValueError: there are fewer than two rows, a column is not there, or ``repeats`` or
            ``level`` is out of its range.

    Example:
        >>> from bayesify.prediction import GaussianPredictive
        >>> x = torch.linspace(-1.0, 1.0, 40).reshape(20, 2)
        >>> def predict(rows: Tensor) -> Predictive:
        ...     return GaussianPredictive(3.0 * rows[:, 0].unsqueeze(0), torch.tensor(1.0))
        >>> found = permutation_importance(predict, x, 3.0 * x[:, 0], {"a": [0], "b": [1]})
        >>> [(each.column, each.nll.rise > 0.5) for each in found]
        [('a', True), ('b', False)]
    """
    inputs = _rows_of(inputs)
    if not isinstance(columns, Mapping):
        raise ValueError(
            'columns must be a mapping such as {"age": [0], "sex": [1, 2]} from the names of '
            f"columns to their places, got {columns!r}"
        )
    for places in columns.values():
        _check_columns(inputs, places)
    count, repeats = len(inputs), whole_number("repeats", repeats, None)
    if not 1 <= repeats < count:
        raise ValueError(
            f"repeats must be at least 1 and below the number of rows, {count}, got {repeats}"
        )
    check_level("level", level)
    z = NormalDist().inv_cdf(0.5 + 0.5 * level)
    generator = torch.Generator().manual_seed(derived_seed(seed, Stream.SHUFFLE, 0, 2))
    order = torch.randperm(count, generator=generator)
    # Steps along a random circle: no row is its own donor, and none is a row's donor twice.
    donors = []
    for step in range(1, repeats + 1):
        donor = torch.empty_like(order)
        donor[order] = order.roll(step)
        donors.append(donor)
    whole = predict(inputs)
    own = _losses(whole, targets)
    # The error of numbers is the root of the mean of its rows' losses.
    roots = (False, whole.prediction.is_floating_point())
    found = []
    for name, places in columns.items():
        # Mean rise of a row's loss with other cells in it, and of others' with its cells.
        received, given = torch.zeros(2, 2, count, dtype=torch.float64)
        for donor in donors:
            changed = _losses(predict(_exchanged(inputs, places, donor)), targets)
            rises = (changed - own) / repeats
            received += rises
            given[:, donor] += rises
        nll, error = (
            _rise(received[i], given[i], own[i], z, root=root) for i, root in enumerate(roots)
        )
        found.append(Importance(name, nll, error))
    return found


def _losses(predictive: Predictive, targets: Tensor) -> Tensor:
    """Return the nll of each row, and its error in percent or its squared error, shape (2, N)."""
    nll = -predictive.log_prob(targets).double()
    prediction = predictive.prediction
    if prediction.is_floating_point():
        error = (prediction - targets).double().square()
    else:
        error = 100.0 * (prediction != targets).double()
    return torch.stack((nll, error.reshape(len(error), -1).mean(1)))


def _rise(received: Tensor, given: Tensor, own: Tensor, z: float, *, root: bool) -> Rise:
    """Return the rise of the mean of a loss, or of the root of its mean, with its interval."""
    before, rise = own.mean(), received.mean()
    # What a row adds to the rise: as one that receives cells, and as one that gives them.
    share = received + given
    if root:
        before, after = before.sqrt(), (before + rise).sqrt()
        least = torch.finfo(torch.float64).tiny
        share = 0.5 * ((own + share) / after.clamp_min(least) - own / before.clamp_min(least))
        rise = after - before
    half = z * float(share.std()) / len(own) ** 0.5
    return Rise(float(rise), float(rise) - half, float(rise) + half)


@dataclass(frozen=True, eq=False)
class PartialDependence:
    """Mean prediction of some rows as one column takes each value of a grid.

    Args:
        samples: the mean over the rows under each weight sample, shape (S, G, ...).
        rows: the prediction of each row, averaged over the weight samples, shape (N, G, ...).

    Example:
        >>> effect = PartialDependence(torch.tensor([[0.0, 1.0], [0.0, 3.0]]), torch.zeros(5, 2))
        >>> effect.mean, effect.interval(0.5)
        (tensor([0., 2.]), (tensor([0.0000, 1.5000]), tensor([0.0000, 2.5000])))
    """

    samples: Tensor
    rows: Tensor

    @property
    def mean(self) -> Tensor:
        """The averaged prediction at each value, shape (G, ...)."""
        return self.samples.mean(0)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the interval that holds a share ``level`` of the weight samples' curves.

        This is epistemic uncertainty: it has no noise of the targets in it.

        Raises:
            ValueError: level is not strictly between 0 and 1.
        """
        return _between(self.samples, level)

    def spread(self, level: float = 0.8) -> tuple[Tensor, Tensor]:
        """Return the interval that holds a share ``level`` of the rows' predictions.

        Raises:
            ValueError: level is not strictly between 0 and 1.
        """
        return _between(self.rows, level)


def _between(values: Tensor, level: float) -> tuple[Tensor, Tensor]:
    check_level("level", level)
    return values.quantile(0.5 - 0.5 * level, 0), values.quantile(0.5 + 0.5 * level, 0)


def partial_dependence(
    predict: Callable[[Any], Predictive],
    inputs: Any,
    columns: Sequence[Hashable],
    grid: Sequence[Any] | npt.NDArray[Any] | Tensor,
) -> PartialDependence:
    """Return the mean prediction of rows in which a column is set to one value after another.

    ``sklearn.inspection.partial_dependence`` has the mean; this has the spread over the weight
    samples too. Where columns depend on each other some of the rows so made may not occur: their
    predictions are then extrapolations.

    Args:
        predict: maps rows to a predictive distribution that keeps its weight samples, such as
            ``lambda rows: bnn.predict(rows, keep_samples=True)``.
        inputs: rows that are typical: a tensor (N, F), an array or a data frame.
        columns: indices, or names in a data frame, of what is set together.
        grid: G values: for one column a number or a text, for several a sequence of them.

    Raises:
        ValueError: there is no value or no row, a column is not there, or the prediction did not
            keep its samples.

    Example:
        >>> from bayesify.prediction import GaussianPredictive
        >>> def predict(rows: Tensor) -> Predictive:
        ...     slopes = torch.tensor([[1.0], [3.0]])  # of two weight samples
        ...     return GaussianPredictive(slopes * rows[:, 0] + rows[:, 1], torch.tensor(1.0))
        >>> x = torch.tensor([[5.0, -1.0], [7.0, 1.0]])
        >>> effect = partial_dependence(predict, x, [0], [0.0, 1.0])
        >>> effect.mean, effect.samples[:, 1], effect.rows[:, 0]
        (tensor([0., 2.]), tensor([1., 3.]), tensor([-1.,  1.]))
    """
    inputs = _rows_of(inputs)
    if not len(grid) or not len(inputs):
        raise ValueError(
            f"grid and inputs must hold at least one value and one row, got {len(grid)} and "
            f"{len(inputs)}"
        )
    _check_columns(inputs, columns)
    samples, rows = [], []
    for value in grid:
        drawn = predict(_set(inputs, columns, value)).samples
        if drawn is None:
            raise ValueError(
                "predict must keep the weight samples; pass keep_samples=True to bnn.predict or "
                "to the estimator's predictive"
            )
        samples.append(drawn.mean(1))
        rows.append(drawn.mean(0))
    return PartialDependence(torch.stack(samples, 1), torch.stack(rows, 1))


def _check_columns(rows: Any, columns: object) -> None:
    """Raise ValueError where these are not columns of a table."""
    if isinstance(columns, str) or not isinstance(columns, Iterable):
        raise ValueError(f"columns must be a sequence of places or names, got {columns!r}")
    if np.ndim(rows) != 2:
        raise ValueError(f"inputs must have shape (N, F), got {tuple(np.shape(rows))}")
    count = rows.shape[1]
    known = set(rows.columns) if _is_frame(rows) else set(range(-count, count))
    asked = columns.tolist() if isinstance(columns, Tensor) else list(columns)
    missing = [each for each in asked if each not in known]
    if missing:
        what = "names of columns" if _is_frame(rows) else f"places from {-count} to {count - 1}"
        raise ValueError(f"columns must be {what}, got {missing[0]!r}; correct or remove it")


def _rows_of(table: Any) -> Any:
    """Return a table that can be indexed: pandas' for another data frame, such as polars'."""
    return table.to_pandas() if hasattr(table, "to_pandas") else table


def _is_frame(rows: Any) -> bool:
    return hasattr(rows, "iloc")


def _copied(rows: Any) -> Any:
    return rows.clone() if isinstance(rows, Tensor) else rows.copy()


def _taken(rows: Any, places: Tensor) -> Any:
    """Return some of the rows."""
    if isinstance(rows, Tensor):
        return rows[places]
    return rows.iloc[places.numpy()] if _is_frame(rows) else rows[places.numpy()]


def _exchanged(rows: Any, columns: Sequence[Hashable], donor: Tensor) -> Any:
    """Return the rows with the cells of some columns from other rows."""
    changed = _copied(rows)
    given = _taken(rows, donor)
    if _is_frame(rows):
        for name in columns:
            changed[name] = given[name].array
    else:
        changed[:, list(columns)] = given[:, list(columns)]
    return changed


def _set(rows: Any, columns: Sequence[Hashable], value: Any) -> Any:
    """Return the rows with some columns set to a value."""
    changed = _copied(rows)
    if _is_frame(rows):
        values = [value] if len(columns) == 1 and np.ndim(value) == 0 else list(value)
        for name, each in zip(columns, values, strict=True):
            changed[name] = each
        return changed
    if isinstance(rows, Tensor):
        given = torch.as_tensor(value)
        if not (rows.is_floating_point() or torch.equal(given.to(rows.dtype).to(given), given)):
            changed = changed.to(torch.promote_types(rows.dtype, given.dtype))
        changed[:, list(columns)] = torch.as_tensor(
            value, dtype=changed.dtype, device=changed.device
        )
        return changed
    of_value = np.asarray(value)
    # Whole numbers have no place for a half, and short texts none for a longer one.
    if rows.dtype.kind in "biuUS" and (of_value.astype(rows.dtype) != of_value).any():
        changed = changed.astype(np.result_type(rows.dtype, of_value.dtype))
    changed[:, list(columns)] = value
    return changed
