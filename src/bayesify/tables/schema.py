"""How a table becomes the network's inputs and targets: all of it, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bayesify import storage
from bayesify.tables.columns import Column, Features, column_from_json
from bayesify.tables.files import TableError
from bayesify.tables.ranged import RangedColumn
from bayesify.tables.target import Target
from bayesify.tables.text import Floats, Texts

__all__ = ["OUTSIDE_RATE", "SCHEMA_NAME", "TableSchema", "texts_of"]

SCHEMA_NAME = "table.json"
#: The ranges of all numbers and dates together exclude at most this share of rows like training's.
OUTSIDE_RATE = 0.01
_FORMAT = 1


@dataclass(frozen=True)
class TableSchema:
    """The columns that the network is given, the target, and where they came from.

    Args:
        columns: in the order of the inputs, fitted to the training rows.
        target: the target column.
        dropped: the names of columns that are not used, with the reason.
        carried: those among them that identify rows, which predictions repeat.
        source: the file of the training table: ``path``, ``sha256`` and ``columns``.
        split: ``seed``, ``fraction`` and ``limit``, from which the held-out part follows; and how
            many rows are for ``train`` and ``test``.
        remarks: what a reader must know of how the table was read.

    Example:
        >>> from bayesify.tables.columns import NumberColumn
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
        """The names of the network's inputs."""
        return tuple(name for column in self.columns for name in column.features)

    @property
    def least_rate(self) -> float:
        """What the training rows can promise at best: 2 / (N + 1) for each number or date.

        A new value lies below all of N values, or above them, with so much probability if all
        are drawn alike, whatever their distribution.
        """
        ranged = sum(isinstance(column, RangedColumn) for column in self.columns)
        return float(2.0 * ranged / (self.split.get("train", 0) + 1))

    def check_columns(self, names: Sequence[str], path: Path) -> None:
        """See that a table has every column that the network is given.

        Raises:
            TableError: some are missing.
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

    def parse(self, piece: pd.DataFrame) -> list[Floats]:
        """The values of each column in some rows."""
        return [column.parse(texts_of(piece, column.name)) for column in self.columns]

    def encode(self, values: Sequence[Floats]) -> Features:
        """The network's inputs, shape (N, number of features), float32."""
        blocks = [column.encode(each) for column, each in zip(self.columns, values, strict=True)]
        return np.concatenate(blocks, axis=1)

    def outside(self, values: Sequence[Floats]) -> Floats:
        """How far each row lies outside training's in each column, shape (N, columns)."""
        distances = [
            column.outside(each) for column, each in zip(self.columns, values, strict=True)
        ]
        return np.stack(distances, axis=1)

    def to_json(self) -> dict[str, Any]:
        """All of it, as JSON."""
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
        """What :meth:`to_json` wrote.

        Raises:
            TableError: it is not of this form.
        """
        try:
            if stored["format"] != _FORMAT:
                raise TableError(
                    f"it has format {stored['format']}, this version of bayesify reads {_FORMAT}"
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
        text = json.dumps(self.to_json(), indent=1, ensure_ascii=False)
        storage.atomic_write(folder / SCHEMA_NAME, text + "\n")

    @classmethod
    def load(cls, folder: Path) -> TableSchema:
        """Read ``table.json``.

        Raises:
            TableError: it is missing or cannot be read.
        """
        path = folder / SCHEMA_NAME
        try:
            return cls.from_json(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError as error:
            raise TableError(f"there is no {path}, which describes the run's table") from error
        except (OSError, ValueError, RecursionError) as error:
            raise TableError(f"{path} cannot be read: {error}") from error


def texts_of(piece: pd.DataFrame, name: str) -> Texts:
    """The cells of a column, as text."""
    return np.asarray(piece[name].to_numpy(), dtype=object)
