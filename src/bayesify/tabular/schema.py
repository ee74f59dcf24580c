"""Describe how a table becomes inputs and targets of the network; store it as JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from bayesify.distributions.likelihoods import (
    CategoricalLikelihood,
    Likelihood,
    OrdinalLikelihood,
)
from bayesify.io.documents import read_document, write_document
from bayesify.tabular.cells import Floats, Texts, by_value, is_missing
from bayesify.tabular.censoring import Limits
from bayesify.tabular.columns import (
    Column,
    Features,
    NumberColumn,
    RangedColumn,
    column_from_json,
)
from bayesify.tabular.files import TableError, TableFile
from bayesify.tabular.likelihoods import COUNTS, number_likelihood
from bayesify.tabular.number_form import NumberForm
from bayesify.tabular.rows import TableRows
from bayesify.tabular.scaling import Scaling

__all__ = [
    "LARGEST_TARGET",
    "OUTSIDE_RATE",
    "SCHEMA_NAME",
    "SMALLEST_SPREAD",
    "TableSchema",
    "Target",
    "label_of",
    "source_of",
    "tail_of",
    "values_of",
]

SCHEMA_NAME = "table.json"
#: The ranges of all numbers and dates together exclude at most this share of rows like training's.
OUTSIDE_RATE = 0.01
#: Squares of larger targets overflow in the metrics.
LARGEST_TARGET = 1e150
#: Squares of differences that are smaller underflow.
SMALLEST_SPREAD = 1e-150
#: Format 1 has no moderate inputs and no widened predictions; its runs predict as they did.
_FORMAT, _READ = 2, (1, 2)
#: Fields of a target that are lists in JSON; earlier versions have only the first.
_LISTS = ("classes", "marginal", "typical")


@dataclass(frozen=True)
class Target:
    """Target column: classes, or numbers that are standardised for training.

    Args:
        name: name of the column.
        task: ``"classification"`` or ``"regression"``.
        classes: the labels, as text, in order; none for regression.
        decimal_comma: whether 1.5 is written 1,5.
        shift: mean of the training targets, for regression.
        scale: standard deviation of the training targets.
        marginal: what training's targets alone tell of a row, see ``outside.widened``: the
            frequency of each class, or the variance of the standardised numbers. None in runs of
            earlier versions, whose predictions are not widened.
        thousands: what separates thousands, if anything.
        unit: unit around every number, or sign of a currency or of percent.
        whole: whether the training targets are whole numbers.
        typical: minimum, quartiles and maximum of the training targets.
        likelihood: of a regression, see ``tabular.likelihoods``; ``"ordinal"`` for classes in the
            order of ``classes``; empty for others, and in runs of earlier versions.
        log_rate: logarithm of the mean of the training counts.
        below: lower limit of a censored number; None for no limit.
        above: upper limit, as ``below``.

    Example:
        >>> target = Target("grade", "classification", classes=("bad", "good"))
        >>> target.parse(np.array(["good", "bad", ""], dtype=object))
        array([ 1.,  0., nan])
    """

    name: str
    task: str
    classes: tuple[str, ...] = ()
    decimal_comma: bool = False
    shift: float = 0.0
    scale: float = 1.0
    marginal: tuple[float, ...] = ()
    thousands: str = ""
    unit: str = ""
    whole: bool = False
    typical: tuple[float, ...] = ()
    likelihood: str = ""
    log_rate: float = 0.0
    below: float | None = None
    above: float | None = None

    def parse(self, texts: Texts) -> Floats:
        """Return class indices or numbers, shape (N,); nan for a cell without one."""
        codes, unique = by_value(texts)
        if self.task == "regression":
            values = self.form.parse(unique).copy()
            values[~np.isfinite(values)] = np.nan
        else:
            places = {label: float(place) for place, label in enumerate(self.classes)}
            labels = (label_of(text) for text in unique)
            values = np.array([places.get(label, np.nan) for label in labels])
        values[is_missing(unique)] = np.nan
        return values[codes]

    def values(self, rows: TableRows) -> Floats:
        """Return class indices or numbers of some rows, as :meth:`parse` does."""
        if self.task == "regression":
            numbers = rows.numbers(self.name)
            if numbers is not None:
                return np.where(np.isfinite(numbers), numbers, np.nan)
        return self.parse(rows.texts(self.name))

    @property
    def form(self) -> NumberForm:
        """How the numbers of a regression are written."""
        return NumberForm(self.decimal_comma, self.thousands, self.unit)

    @property
    def scaling(self) -> Scaling:
        """Scaling of the numbers of a regression."""
        return Scaling.of_numbers(self.shift, self.scale)

    @property
    def limits(self) -> Limits:
        """Limits between which a number was recorded."""
        return Limits.between(self.below, self.above)

    @property
    def has_counts(self) -> bool:
        """Whether the targets are counts, which are not standardised."""
        return self.likelihood in COUNTS

    @property
    def is_ordered(self) -> bool:
        """Whether the classes have an order."""
        return self.likelihood == "ordinal"

    def make_likelihood(self) -> Likelihood:
        """Return the likelihood of the network's outputs."""
        if self.task == "regression":
            return number_likelihood(self.likelihood or "gaussian")
        return OrdinalLikelihood(len(self.classes)) if self.is_ordered else CategoricalLikelihood()

    def to_json(self) -> dict[str, Any]:
        """Return the target as JSON."""
        lists = {name: list(getattr(self, name)) for name in _LISTS}
        return {**vars(self), **lists}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Target:
        """Return the target that :meth:`to_json` wrote.

        Raises:
            TableError: it is not of this form.
        """
        try:
            lists = {name: tuple(stored.get(name, ())) for name in _LISTS[1:]}
            return cls(**{**stored, "classes": tuple(stored["classes"]), **lists})
        except (KeyError, TypeError) as error:
            raise TableError(f"the stored target cannot be read: {error}") from error


def source_of(file: TableFile) -> dict[str, Any]:
    r"""Return what a schema stores of the file of a training table.

    ``windows_1252`` tells that text which is not UTF-8 was read as Windows-1252 where it can be.

    Example:
        >>> import tempfile
        >>> from bayesify.tabular.files import open_table
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "a.csv")
        ...     _ = path.write_text("x,y\n1,2\n")
        ...     list(source_of(open_table(path)))
        ['path', 'sha256', 'columns', 'windows_1252']
    """
    return {
        "path": str(file.path),
        "sha256": file.sha256,
        "columns": list(file.columns),
        "windows_1252": True,
    }


@dataclass(frozen=True)
class TableSchema:
    """Input columns and target of a table, and the file and rows that they were fitted to.

    Args:
        columns: input columns in their order, fitted to the training rows.
        target: the target column.
        dropped: the names of columns that are not used, with the reason.
        carried: those among the unused that identify rows; predictions repeat them.
        source: the file of the training table, as :func:`source_of` describes it.
        split: ``seed``, ``fraction`` and ``limit``, from which the held-out part follows; and how
            many rows are for ``train`` and ``test``.
        remarks: notes for the user on how the table was read.

    Example:
        >>> from bayesify.tabular.columns import NumberColumn
        >>> schema = TableSchema((NumberColumn(name="x"),), Target("y", "regression"))
        >>> schema.features, TableSchema.from_json(schema.to_json()) == schema
        (('x',), True)
    """

    columns: tuple[Column, ...]
    target: Target
    dropped: Mapping[str, str] = None  # type: ignore[assignment]
    carried: tuple[str, ...] = ()
    source: Mapping[str, Any] = None  # type: ignore[assignment]
    split: Mapping[str, Any] = None  # type: ignore[assignment]
    remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("dropped", "source", "split"):
            object.__setattr__(self, name, dict(getattr(self, name) or {}))

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the inputs of the network."""
        return tuple(name for column in self.columns for name in column.features)

    @property
    def is_latin1(self) -> bool:
        """Whether an earlier version read the training table, not UTF-8, as Latin-1 in any case.

        New tables are then read so too: their cells must be those of the columns' levels.
        """
        return "windows_1252" not in self.source and any(
            "was read as Latin-1" in remark for remark in self.remarks
        )

    @property
    def least_rate(self) -> float:
        """Lowest rate of rows outside that N training rows allow: 2 / (N + 1) a number or date.

        This is the probability that a new value lies below or above all of N values, if all are
        drawn from one distribution, whatever it is.
        """
        ranged = sum(isinstance(column, RangedColumn) for column in self.columns)
        # The ranges of a streamed table are those of a sample of its rows.
        rows = self.split.get("sample", self.split.get("train", 0))
        return float(2.0 * ranged / (rows + 1))

    def check_columns(self, names: Sequence[str], path: Path) -> None:
        """Check that a table has every input column, and once.

        Raises:
            TableError: some are missing, or have a name that occurs again.
        """
        lacking = [column.name for column in self.columns if column.name not in names]
        if lacking:
            more = f" and {len(lacking) - 5} more" if len(lacking) > 5 else ""
            raise TableError(
                f"{path} lacks {'columns' if len(lacking) > 1 else 'the column'} "
                f"{', '.join(map(repr, lacking[:5]))}{more} of the training table; add "
                f"{'them' if len(lacking) > 1 else 'it'}, with empty cells where values are not "
                "known"
            )
        for name in [column.name for column in self.columns]:
            again = f"{name} (2)"
            if again in names and again not in self.source.get("columns", [again]):
                raise TableError(
                    f"{path} has the column name {name!r} more than once, the training table had "
                    "it once; rename or remove one"
                )

    def parse(self, rows: TableRows) -> list[Floats]:
        """Return the values of each column in some rows."""
        return [values_of(rows, column) for column in self.columns]

    def encode(self, values: Sequence[Floats]) -> Features:
        """Return the inputs of the network, shape (N, number of features), float32."""
        blocks = [column.encode(each) for column, each in zip(self.columns, values, strict=True)]
        return np.concatenate(blocks, axis=1)

    def outside(self, values: Sequence[Floats]) -> Floats:
        """Return how far each row lies outside training's in each column, shape (N, columns)."""
        distances = [
            column.outside(each) for column, each in zip(self.columns, values, strict=True)
        ]
        return np.stack(distances, axis=1)

    def worst(self, distances: Floats) -> Texts:
        """Return the name of the column in which each row lies farthest outside, "" if in none.

        Args:
            distances: those of :meth:`outside`, shape (N, number of columns).
        """
        names = np.array([column.name for column in self.columns], dtype=object)
        found: Texts = np.where((distances > 0.0).any(axis=1), names[distances.argmax(axis=1)], "")
        return found

    def farthest(self, values: Sequence[Floats]) -> Floats:
        """Return how far each row lies outside in its worst column, shape (N,)."""
        return np.asarray(self.outside(values).max(axis=1), np.float64)

    def to_json(self) -> dict[str, Any]:
        """Return the schema as JSON."""
        return {
            "format": _FORMAT,
            "versions": {name: metadata.version(name) for name in ("numpy", "pandas")},
            "target": self.target.to_json(),
            "columns": [column.to_json() for column in self.columns],
            "dropped": dict(self.dropped),
            "carried": list(self.carried),
            "source": dict(self.source),
            "split": dict(self.split),
            "remarks": list(self.remarks),
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> TableSchema:
        """Return the schema that :meth:`to_json` wrote.

        Raises:
            TableError: it is not of this form.
        """
        try:
            if stored["format"] not in _READ:
                raise TableError(
                    f"it has format {stored['format']}, this version of bayesify reads "
                    f"{' and '.join(map(str, _READ))}; use the version that wrote it"
                )
            return cls(
                tuple(column_from_json(column) for column in stored["columns"]),
                Target.from_json(stored["target"]),
                stored["dropped"],
                tuple(stored["carried"]),
                stored["source"],
                stored["split"],
                tuple(stored["remarks"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise TableError(f"it is not the description of a table: {error}") from error

    def save(self, folder: Path) -> None:
        """Write ``table.json``, whole or not at all."""
        write_document(folder / SCHEMA_NAME, self.to_json())

    @classmethod
    def load(cls, folder: Path) -> TableSchema:
        """Read ``table.json``.

        Raises:
            TableError: it is missing, was altered or cannot be read.
        """
        path = folder / SCHEMA_NAME
        try:
            return cls.from_json(read_document(path))
        except FileNotFoundError as error:
            raise TableError(f"there is no {path}, which describes the run's table") from error
        except (OSError, ValueError, RecursionError) as error:
            raise TableError(f"{path} cannot be read: {error}") from error


def tail_of(num_rows: float, num_ranged: int) -> int:
    """Return k, for ranges from the k-th smallest to the k-th largest value of N training rows.

    N may be a sum of weights.

    Example:
        >>> tail_of(799, 1), tail_of(799, 10)
        (4, 1)
    """
    return max(1, math.floor(OUTSIDE_RATE * (num_rows + 1) / (2 * max(1, num_ranged))))


def values_of(rows: TableRows, column: Column) -> Floats:
    """Return the values of a column in some rows.

    Numbers that are stored as such are not parsed from their texts: they are the same however
    training's were written, and are read many times as fast.
    """
    if isinstance(column, NumberColumn):
        numbers = rows.numbers(column.name)
        if numbers is not None:
            return np.where(np.isinf(numbers), math.inf, numbers)
    return column.parse(rows.texts(column.name))


def label_of(text: str) -> str:
    """Return the label of a class: one for 1 and 1.0, one for 0 and -0.0; other text as it is.

    Example:
        >>> label_of("1.00"), label_of("-0"), label_of("1.5")
        ('1', '0', '1.5')
    """
    whole = text.partition(".")[0] if re.fullmatch(r"[+-]?\d+\.0+", text) else text
    return "0" if whole == "-0" else whole
