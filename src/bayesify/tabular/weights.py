"""Weigh the rows of a training table: a row of weight 2 is the row twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bayesify.distributions.likelihoods import CensoredGaussianLikelihood, Likelihood
from bayesify.distributions.likelihoods.likelihood import predictive_of
from bayesify.prediction import SizedIterable
from bayesify.prediction.predictive import P_co
from bayesify.tabular.likelihoods import has_classes
from bayesify.training.history import EpochRow, History

__all__ = [
    "Array",
    "DistinctRows",
    "WeightedLikelihood",
    "checked_weights",
    "class_factors",
    "per_counted_row",
]

Array = npt.NDArray[Any]


class WeightedLikelihood(Likelihood[P_co], Generic[P_co]):
    """Likelihood in which row i counts ``c_i`` times: p(y_i | x_i, w)^c_i.

    Its targets hold the weights in a last column, see :meth:`packed`, so that loaders and training
    backends treat them as any targets. The free energy of N rows is then sum c_i nll_i + KL, that
    of a table in which row i occurs ``c_i`` times. Losses are means over the N rows, with N the
    ``num_data`` of the objective.

    Args:
        likelihood: likelihood of the targets without weights.

    Example:
        >>> from bayesify.distributions.likelihoods import CategoricalLikelihood
        >>> targets = WeightedLikelihood.packed(torch.tensor([0, 1]), torch.tensor([2.0, 1.0]))
        >>> WeightedLikelihood(CategoricalLikelihood()).log_prob(torch.zeros(1, 2, 2), targets)
        tensor([[-1.3863, -0.6931]])
    """

    def __init__(self, likelihood: Likelihood[P_co]) -> None:
        super().__init__()
        self.likelihood = likelihood
        self.error_name = likelihood.error_name

    @staticmethod
    def packed(targets: Tensor, weights: Tensor) -> Tensor:
        """Return targets (N, ...) as (N, K) with the weights (N,) as a last column, in float64.

        Raises:
            ValueError: the lengths differ, or a weight is not positive and finite.
        """
        if weights.shape != targets.shape[:1]:
            raise ValueError(
                f"weights must be one number for each row, shape ({len(targets)},), got shape "
                f"{tuple(weights.shape)}"
            )
        if not bool(((weights > 0.0) & weights.isfinite()).all()):
            raise ValueError(
                "weights must be positive and finite; leave out the rows of weight 0, and correct "
                "the others"
            )
        columns = targets.to(torch.float64).reshape(len(targets), -1)
        return torch.cat([columns, weights.to(columns).unsqueeze(-1)], dim=-1)

    def _unpacked(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        targets, weights = packed[..., :-1], packed[..., -1]
        if has_classes(self.likelihood):  # their indices are exact in float64
            return targets.squeeze(-1).long(), weights
        if isinstance(self.likelihood, CensoredGaussianLikelihood):
            targets = targets.unflatten(-1, (-1, 2))
        return targets, weights

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return weight times log p(y | output), in nats, shape (S, N)."""
        plain, weights = self._unpacked(targets)
        return self.likelihood.log_prob(outputs, plain) * weights.to(outputs.dtype)

    def expected_log_prob(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        """Return weight times that of the inner likelihood, in nats, shape (S, N)."""
        plain, weights = self._unpacked(targets)
        expected = self.likelihood.expected_log_prob(mean, variance, plain)
        return expected * weights.to(mean.dtype)

    def predictive(self, outputs: SizedIterable, *, keep_samples: bool) -> P_co:
        """Return that of the inner likelihood."""
        return predictive_of(self.likelihood, outputs, keep_samples=keep_samples)

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return that of the inner likelihood, each row once."""
        return self.likelihood.error(outputs, self._unpacked(targets)[0])

    def error_count(self, targets: Tensor) -> int:
        """Return that of the inner likelihood, each row once."""
        return self.likelihood.error_count(self._unpacked(targets)[0])

    def config(self) -> dict[str, float | int | bool]:
        """Return that of the inner likelihood."""
        return self.likelihood.config()


#: Columns of the history that are means over the rows for training.
_MEANS = ("nll", "loss", "free_energy", "free_energy_untrained", "free_energy_untrained_error")


def per_counted_row(
    history: Sequence[EpochRow], weights: Tensor, held_out: Tensor | None = None
) -> History:
    """Return the history of a training on distinct rows with its means per row as it counts.

    The errors have each distinct row once.

    Args:
        history: of ``bayesify.fit`` under a :class:`WeightedLikelihood`.
        weights: those of the rows for training, shape (M,).
        held_out: those of the rows for validation, or None.

    Example:
        >>> per_counted_row([{"nll": 6.0, "train_error": 5.0}], torch.tensor([2.0, 4.0]))
        [{'nll': 2.0, 'train_error': 5.0}]
    """
    scales = dict.fromkeys(_MEANS, float(weights.mean()))
    if held_out is not None:
        scales["validation_nll"] = float(held_out.mean())
    return [
        {
            name: value if value is None else value / scales.get(name, 1.0)
            for name, value in row.items()
        }
        for row in history
    ]


class DistinctRows(NamedTuple):
    """Distinct rows of a table, each with the number of times that it counts.

    Rows of weight 0 are left out, equal rows are merged and their weights added, and all are sorted
    by their first column, then their second and so on. So a row of weight 2 gives the same bits as
    the row twice, whatever the order of the rows and the units of the columns.

    Example:
        >>> x, y = np.array([[2.0], [1.0], [1.0], [3.0]]), np.array([[0.0], [1.0], [1.0], [0.0]])
        >>> rows = DistinctRows.of(x, y, np.array([1.0, 1.0, 1.0, 0.0]))
        >>> rows.inputs[:, 0], rows.weights
        (tensor([1., 2.], dtype=torch.float64), tensor([2., 1.], dtype=torch.float64))
    """

    #: Shape (M, F), float64.
    inputs: Tensor
    #: Shape (M, K), float64; indices of classes have K = 1.
    targets: Tensor
    #: Shape (M,), float64, positive.
    weights: Tensor

    @classmethod
    def of(cls, inputs: Array, targets: Array, weights: Array) -> Self:
        """Return the distinct rows of a table.

        Args:
            inputs: shape (N, F); NaN and infinity are values as others are.
            targets: shape (N, K), finite.
            weights: shape (N,), at least 0 and not all 0.
        """
        used = weights > 0.0
        # Adding 0 turns -0 into 0: equal numbers must have equal bytes.
        table = np.ascontiguousarray(np.column_stack([inputs, targets])[used], np.float64) + 0.0
        table[np.isnan(table)] = np.nan  # there are NaN of several bytes
        _, first, place = np.unique(_sortable(table), return_index=True, return_inverse=True)
        # Weights are sorted, so that their sums do not depend on the order of the rows.
        order = np.lexsort((weights[used], place))
        sums = np.bincount(place[order], weights=weights[used][order])
        rows = torch.from_numpy(table[first])
        cut = inputs.shape[1]
        return cls(rows[:, :cut].contiguous(), rows[:, cut:].contiguous(), torch.from_numpy(sums))

    def subset(self, index: Tensor) -> Self:
        """Return some of the rows."""
        return type(self)(*(column[index] for column in self))

    def split(self, fraction: float, seed: int) -> tuple[Self, Self]:
        """Return the rows for training, and a random fraction of the rows that is held out.

        Raises:
            ValueError: one of the two would be empty.
        """
        count = len(self.weights)
        held = round(fraction * count)
        if not 0 < held < count:
            raise ValueError(
                f"early stopping must hold out some rows and leave some, but validation_fraction="
                f"{fraction} of {count} different rows with positive weight is {held}; give more "
                "rows or another fraction"
            )
        order = torch.from_numpy(np.random.default_rng(seed).permutation(count))
        return self.subset(order[held:]), self.subset(order[:held])


def _sortable(table: Array) -> Array:
    """Return each row of float64 as a string of bytes that sorts as its numbers do."""
    bits = table.view(np.uint64)
    sign = np.uint64(1 << 63)
    # Negative numbers come before the others, the larger magnitude first.
    ordered = np.where(bits & sign, ~bits, bits | sign).astype(">u8")
    found: Array = ordered.view(np.dtype((np.void, 8 * table.shape[1]))).ravel()
    return found


def checked_weights(sample_weight: Any, num_rows: int) -> Array:
    """Return one weight for each row, ones by default, shape (N,), float64.

    Raises:
        ValueError: the shape differs, a weight is negative, NaN or infinite, or all are 0.

    Example:
        >>> checked_weights(None, 2), checked_weights(3, 2)
        (array([1., 1.]), array([3., 3.]))
    """
    weights: Array = np.asarray(1.0 if sample_weight is None else sample_weight, dtype=np.float64)
    if weights.ndim == 0:
        weights = np.full(num_rows, weights)
    if weights.ndim != 1:
        raise ValueError(f"Sample weights must be 1D array or scalar, got {weights.ndim}D array")
    if weights.shape != (num_rows,):
        raise ValueError(
            f"sample_weight.shape == {weights.shape}, expected {(num_rows,)}: one for each row"
        )
    if not np.isfinite(weights).all() or (weights < 0.0).any():
        raise ValueError("sample_weight must be finite and at least 0; correct the others")
    if not (weights > 0.0).any():
        raise ValueError("sample_weight must be positive for at least one row, got only zeros")
    return weights


def class_factors(class_weight: Any, classes: Array, counts: Array) -> Array:
    """Return the number of times that a row of each class counts, shape (K,).

    Args:
        class_weight: a mapping by label, 1 for a label without; ``"balanced"``, which gives all
            classes the same part of the sum of all weights; or None for 1.
        classes: the labels, shape (K,).
        counts: the sum of the weights of each class, shape (K,).

    Raises:
        ValueError: it is none of these, or a weight is not positive and finite.

    Example:
        >>> class_factors("balanced", np.array(["a", "b"]), np.array([30.0, 10.0])).round(3)
        array([0.667, 2.   ])
        >>> class_factors({"b": 5}, np.array(["a", "b"]), np.array([30.0, 10.0]))
        array([1., 5.])
    """
    if class_weight is None:
        return np.ones(len(classes))
    if isinstance(class_weight, str) and class_weight == "balanced":
        # A class without rows has no part.
        present = counts > 0.0
        balanced: Array = np.zeros(len(classes))
        balanced[present] = counts.sum() / (present.sum() * counts[present])
        return balanced
    if not isinstance(class_weight, Mapping):
        raise ValueError(
            f'class_weight must be a mapping by label, "balanced" or None, got {class_weight!r}'
        )
    labels = classes.tolist()
    unknown = [label for label in class_weight if label not in labels]
    if unknown:
        raise ValueError(
            f"class_weight must have only the classes {labels}, got {unknown} too; remove them"
        )
    try:
        factors = np.array([float(class_weight.get(label, 1.0)) for label in labels])
    except (TypeError, ValueError) as error:
        raise ValueError(f"class_weight must be numbers, got {class_weight}") from error
    if not (np.isfinite(factors) & (factors > 0.0)).all():
        raise ValueError(f"class_weight must be positive and finite, got {class_weight}")
    return factors
