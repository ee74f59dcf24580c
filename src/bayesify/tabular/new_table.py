"""Read new rows for a trained network, a chunk at a time, and find those far outside training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bayesify.tabular.cells import Floats, Texts
from bayesify.tabular.columns import Column, FeatureColumn
from bayesify.tabular.drift import read_columns, target_column
from bayesify.tabular.files import CellError, TableError, TableFile, open_table
from bayesify.tabular.image_table import check_images
from bayesify.tabular.likelihoods import wrong_count
from bayesify.tabular.rows import TableRows
from bayesify.tabular.schema import LARGEST_TARGET, OUTSIDE_RATE, TableSchema, values_of

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
        targets: class indices or numbers, nan where there is none; None if they are not read.
    """

    first: int
    inputs: Tensor
    carried: dict[str, Texts]
    outside: Texts
    distances: Tensor
    targets: Floats | None = None


@dataclass
class NewTable:
    r"""Table of new rows, read as the training table was.

    Args:
        file: its file.
        schema: schema of the training table.
        readers: columns that parse its cells, in the order of the schema's.
        target: column that parses its targets; None if they are not read.
        remarks: notes for the user on how it is read.
        target_error: why its targets cannot be read; "" if they can, or are not there.
        rows: number of rows read so far.
        outside: number of those that lie outside the training data.
        by_column: number of those that lie outside in each column.
        without_target: number of those without a target.
        unread_targets: number of those with a target that cannot be read, or a class that is new.
        size: rows in memory at once; None for ``CHUNK_ROWS``.
        on_rows: called with the number of rows read so far.

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
    readers: tuple[Column, ...]
    target: Column | None = None
    remarks: tuple[str, ...] = ()
    target_error: str = ""
    rows: int = 0
    outside: int = 0
    by_column: dict[str, int] = field(default_factory=dict)
    without_target: int = 0
    unread_targets: int = 0
    size: int | None = None
    on_rows: Callable[[int], None] | None = None

    @classmethod
    def open(
        cls,
        table: Path | TableFile,
        schema: TableSchema,
        *,
        lenient: bool = False,
        size: int | None = None,
        on_rows: Callable[[int], None] | None = None,
    ) -> NewTable:
        """Open a table, check that it has every input column, and find how each is written.

        All its rows are read once.

        Args:
            table: a file, or an open table.
            schema: schema of the training table.
            lenient: whether to read a column as in training though its cells look otherwise; a
                remark then says so.
            size: rows in memory at once; None for ``CHUNK_ROWS``.
            on_rows: called with the number of rows read so far, here and in the iteration.

        Raises:
            TableError: it cannot be read, lacks columns, or has a column that cannot be read
                surely.
        """
        file = open_table(table, latin1=schema.is_latin1) if isinstance(table, Path) else table
        schema.check_columns(file.columns, file.path)
        check_images(file, schema.columns)
        has_target = schema.target.name in file.columns
        readings = read_columns(
            file,
            schema.columns,
            target_column(schema.target) if has_target else None,
            size=size,
            on_rows=on_rows,
        )
        inputs = readings[: len(schema.columns)]
        errors = [each.error for each in inputs if each.error]
        if errors and not lenient:
            more = (
                f" (and {len(errors) - 1} more such column{'s' * (len(errors) > 2)})"
                if len(errors) > 1
                else ""
            )
            raise TableError(f"{file.path}: {errors[0]}{more}, or go on with --lenient")
        remarks = [*file.remarks, *_columns_remarks(file, schema)]
        remarks += [f"--lenient reads on: {error}" for error in errors]
        remarks += [each.remark for each in readings if each.remark and not each.error]
        readers = [
            (own if each.error else each.column).within(file.folder)
            for own, each in zip(schema.columns, inputs, strict=True)
        ]
        answer = readings[-1] if has_target else None
        error = answer.error if answer is not None else ""
        return cls(
            file,
            schema,
            tuple(readers),
            None if answer is None or error else answer.column,
            tuple(remarks),
            error,
            size=size,
            on_rows=on_rows,
        )

    def __iter__(self) -> Iterator[NewRows]:
        """Read the rows in their order.

        Raises:
            TableError: a target is too large, or the file cannot be read.
        """
        self.rows = self.outside = self.without_target = self.unread_targets = 0
        self.by_column = {}
        names = [column.name for column in self.schema.columns]
        carriers = [name for name in self.schema.carried if name in self.file.columns]
        target = [] if self.target is None else [self.target.name]
        wanted = dict.fromkeys([*names, *carriers, *target])
        for chunk in self.file.batches(columns=list(wanted), size=self.size):
            try:
                values = [values_of(chunk, each) for each in self.readers]
            except CellError as error:
                raise error.in_row(self.file.path, self.rows + 1) from error
            distances = self.schema.outside(values)
            far: npt.NDArray[np.bool_] = distances > 0.0
            for name, count in zip(names, far.sum(axis=0).tolist(), strict=True):
                self.by_column[name] = self.by_column.get(name, 0) + count
            self.outside += int(far.any(axis=1).sum())
            carried = {name: chunk.texts(name) for name in carriers}
            inputs = torch.from_numpy(self.schema.encode(values))
            worst = self.schema.worst(distances)
            farthest = torch.from_numpy(distances.max(axis=1))
            targets = self._targets(chunk)
            yield NewRows(self.rows + 1, inputs, carried, worst, farthest, targets)
            self.rows += len(chunk)
            if self.on_rows is not None:
                self.on_rows(self.rows)

    def _targets(self, chunk: TableRows) -> Floats | None:
        if self.target is None:
            return None
        values = values_of(chunk, self.target)
        self.without_target += int(np.isnan(values).sum())
        self.unread_targets += int(np.isinf(values).sum())
        too_large = np.isfinite(values) & (np.abs(values) > LARGEST_TARGET)
        if too_large.any():
            place = int(too_large.argmax())
            raise TableError(
                f"{self.file.path}: the target {self.target.name!r} must be at most "
                f"{LARGEST_TARGET:g} in size, got {values[place]:g} in row "
                f"{self.rows + 1 + place:,}; correct or remove the row"
            )
        found = np.where(np.isfinite(values), values, np.nan)
        wrong = wrong_count(found[~np.isnan(found)]) if self.schema.target.has_counts else None
        if wrong is not None:
            raise TableError(
                f"{self.file.path}: the target {self.target.name!r} must hold counts, as in "
                f"training, got {wrong:g}; correct or remove the row"
            )
        return found

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

    def target_remark(self) -> str | None:
        """Return one line on the rows read so far that have no usable target, or None."""
        parts = []
        if self.without_target:
            parts.append(f"{self.without_target:,} without a target")
        if self.unread_targets:
            what = "of a class that training did not have" if self.schema.target.classes else ""
            parts.append(f"{self.unread_targets:,} {what or 'with one that is no number'}")
        return f"rows that are not measured: {', '.join(parts)}" if parts else None

    def rule(self) -> str:
        """Return the rule for rows outside, in words."""
        split, promised = self.schema.split, max(OUTSIDE_RATE, self.schema.least_rate)
        far, held = split.get("test_outside", 0), split.get("test", 0)
        kinds = {c.kind for c in self.schema.columns if isinstance(c, FeatureColumn)}
        read = " or ".join(f"{'an' if kind == 'image' else 'a'} {kind}'s" for kind in sorted(kinds))
        texts = f", or {read} features are farther from their means" if kinds else ""
        rows = f", and {far:,} of {held:,} held-out rows lie outside" if held else ""
        return (
            "a row lies outside if a number or date is beyond training's by an interquartile "
            f"range, or a category or a missing value is new{texts}; the ranges exclude at most "
            f"{min(promised, 1.0):.2g} of rows drawn like training's{rows}"
        )


def _columns_remarks(file: TableFile, schema: TableSchema) -> list[str]:
    known = {column.name for column in schema.columns} | {*schema.dropped, schema.target.name}
    extra = [name for name in file.columns if name not in known]
    if not extra:
        return []
    more = f" and {len(extra) - 5} more" if len(extra) > 5 else ""
    return [
        f"columns that the training table did not have are ignored: "
        f"{', '.join(map(repr, extra[:5]))}{more}"
    ]
