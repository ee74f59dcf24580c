"""Read new rows for a trained network, a chunk at a time, and find those far outside training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bayesify.tabular.cells import Texts
from bayesify.tabular.columns import TextColumn
from bayesify.tabular.files import TableError, TableFile, open_table
from bayesify.tabular.schema import OUTSIDE_RATE, TableSchema, texts_of

__all__ = ["NewRows", "NewTable"]


@dataclass(frozen=True, eq=False)
class NewRows:
    """Some rows of a new table.

    Args:
        first: number of the first row, from 1.
        inputs: inputs of the network, shape (N, D).
        carried: cells of the columns that identify rows, by name.
        outside: for each row the column in which it lies farthest outside training's, or "".
        distances: how far each row lies outside in that column, shape (N,).
    """

    first: int
    inputs: Tensor
    carried: dict[str, Texts]
    outside: Texts
    distances: Tensor


@dataclass
class NewTable:
    r"""Table of new rows, read as the training table was.

    Args:
        file: its file.
        schema: schema of the training table.
        rows: number of rows read so far.
        outside: number of those that lie outside the training data.
        by_column: number of those that lie outside in each column.

    Example:
        >>> import tempfile
        >>> from bayesify.tabular.training_table import fit_table
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     old, new = Path(folder, "old.csv"), Path(folder, "new.csv")
        ...     _ = old.write_text("x,y\n" + "".join(f"{i / 7},{i * i / 3}\n" for i in range(20)))
        ...     _ = new.write_text("x\n1.5\n900\n")
        ...     table = NewTable.open(new, fit_table(old, "y")[1])
        ...     [rows.outside.tolist() for rows in table]
        ...     table.warning()
        [['', 'x']]
        "1 of 2 rows lies far outside the training data, most often in column 'x'"
    """

    file: TableFile
    schema: TableSchema
    rows: int = 0
    outside: int = 0
    by_column: dict[str, int] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, schema: TableSchema) -> NewTable:
        """Open a file, and check that it has every input column.

        Raises:
            TableError: it cannot be read, or lacks columns.
        """
        file = open_table(path)
        schema.check_columns(file.columns, path)
        return cls(file, schema)

    def remarks(self) -> list[str]:
        """Return notes for the user on how the new table is read."""
        schema = self.schema
        known = {column.name for column in schema.columns} | set(schema.dropped)
        extra = [name for name in self.file.columns if name not in known | {schema.target.name}]
        remarks = list(self.file.remarks)
        if extra:
            more = f" and {len(extra) - 5} more" if len(extra) > 5 else ""
            remarks.append(
                f"columns that the training table did not have are ignored: "
                f"{', '.join(map(repr, extra[:5]))}{more}"
            )
        if schema.target.name in self.file.columns:
            remarks.append(f"the target's column {schema.target.name!r} is ignored")
        return remarks

    def __iter__(self) -> Iterator[NewRows]:
        """Read the rows in their order.

        Raises:
            TableError: there are none, or the file cannot be read.
        """
        self.rows = self.outside = 0
        self.by_column = {}
        names = np.array([column.name for column in self.schema.columns], dtype=object)
        for chunk in self.file.chunks():
            values = self.schema.parse(chunk)
            distances = self.schema.outside(values)
            far: npt.NDArray[np.bool_] = distances > 0.0
            worst = np.where(far.any(axis=1), names[distances.argmax(axis=1)], "")
            for name, count in zip(names, far.sum(axis=0).tolist(), strict=True):
                self.by_column[name] = self.by_column.get(name, 0) + count
            self.outside += int(far.any(axis=1).sum())
            carried = {
                name: texts_of(chunk, name) for name in self.schema.carried if name in chunk.columns
            }
            inputs = torch.from_numpy(self.schema.encode(values))
            farthest = torch.from_numpy(distances.max(axis=1))
            yield NewRows(self.rows + 1, inputs, carried, worst, farthest)
            self.rows += len(chunk)
        if not self.rows:
            raise TableError(f"{self.file.path} has no rows below its header")

    @property
    def worst_column(self) -> str | None:
        """Column in which most of the rows read so far lie outside; None if no row does."""
        if not self.outside:
            return None
        return max(self.by_column, key=lambda name: self.by_column[name])

    def warning(self) -> str | None:
        """Return one line on the rows that lie outside the training data, or None."""
        if not self.outside:
            return None
        verb = "lies" if self.outside == 1 else "lie"
        return (
            f"{self.outside:,} of {self.rows:,} rows {verb} far outside the training data, most "
            f"often in column {self.worst_column!r}"
        )

    def rule(self) -> str:
        """Return the rule for rows outside, in words."""
        split, promised = self.schema.split, max(OUTSIDE_RATE, self.schema.least_rate)
        far, held = split.get("test_outside", 0), split.get("test", 0)
        has_texts = any(isinstance(column, TextColumn) for column in self.schema.columns)
        texts = ", or a text's features are farther from their means" if has_texts else ""
        return (
            "a row lies outside if a number or date is beyond training's by an interquartile "
            f"range, or a category or a missing value is new{texts}; the ranges exclude at most "
            f"{min(promised, 1.0):.2g} of rows drawn like training's, and {far:,} of {held:,} "
            "held-out rows lie outside"
        )
