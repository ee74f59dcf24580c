"""Read a table for training: detect its columns, read their values, hold out a part of the rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from bayesify.tabular.advice import repeats_of, without_wild
from bayesify.tabular.cells import Floats, Texts
from bayesify.tabular.censoring import Limits
from bayesify.tabular.column_choice import check_names, chosen_columns
from bayesify.tabular.columns import CategoryColumn, EncodedColumn, ImageColumn, RangedColumn
from bayesify.tabular.detect import ColumnScan, find_target
from bayesify.tabular.files import CellError, TableError, TableFile, no_rows, open_table
from bayesify.tabular.held_out import Places, split_rows
from bayesify.tabular.image_table import check_images
from bayesify.tabular.schema import TableSchema, source_of, tail_of, values_of
from bayesify.tabular.stored_table import stored_table
from bayesify.tabular.table_data import TableData
from bayesify.tabular.table_memory import check_memory
from bayesify.tabular.targets import (
    check_targets,
    scaled_target,
    tames_targets,
    target_tensor,
    with_likelihood,
    without_target,
)

__all__ = [
    "check_source",
    "fit_table",
    "fitted",
    "load_table",
    "table_data",
    "with_levels",
    "with_trained_levels",
]

#: Rows whose texts or images are read before the progress is shown.
_TEXTS_AT_ONCE, _IMAGES_AT_ONCE = 1000, 64


def fit_table(
    table: Path | TableFile,
    target: str,
    *,
    task: str | None = None,
    likelihood: str = "",
    limits: Limits | None = None,
    ordered: Sequence[str] = (),
    test_fraction: float = 0.2,
    seed: int = 0,
    drop: Sequence[str] = (),
    keep: Sequence[str] = (),
    text: Sequence[str] = (),
    image: str | None = None,
    encoder: str | None = None,
    adapter: bool = False,
    limit: int | None = None,
    on_rows: Callable[[int, int], None] | None = None,
) -> tuple[TableData, TableSchema]:
    r"""Detect what a table holds and read it, in two passes over the file with no copy of its text.

    Args:
        table: a file, CSV, perhaps gzipped, or Parquet; a folder or a pattern; or an open table.
        target: name of the column to predict.
        task: ``"classification"`` or ``"regression"``; None decides by what the target holds.
        likelihood: of a regression, see ``tabular.likelihoods``; empty for the Gaussian one.
        limits: limits of a censored number.
        ordered: the classes in their order; none if they have no order.
        test_fraction: part of the rows that is held out, at least 0 and below 1; at most 50,000
            rows are.
        seed: the held-out rows are a function of it.
        drop: names of columns not to use.
        keep: names of columns to use though they look like identifiers.
        text: names of columns of text, which a pretrained network turns into numbers.
        image: name of a column of paths of images, which such a network reads.
        encoder: folder of that network, or its name on Hugging Face's hub.
        adapter: whether texts become tokens, for a network that is trained itself, not features.
        limit: use only this number of rows from the top.
        on_rows: called with the number of rows whose texts or images were read, and of all rows.

    Raises:
        TableError: the table cannot be used, or is too large for the free memory.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "a.csv")
        ...     rows = [f"{i / 7},{i * i / 3}\n" for i in range(20)]
        ...     _ = path.write_text("x,y\n" + "".join(rows))
        ...     data, schema = fit_table(path, "y")
        >>> data.train_inputs.shape, data.test_targets.shape, schema.target.task
        (torch.Size([16, 1]), torch.Size([4, 1]), 'regression')
    """
    file = open_table(table) if isinstance(table, Path) else table
    path, images = file.path, [] if image is None else [image]
    check_names(file, target, drop=drop, keep=keep, text=text, image=images)
    scans = {
        name: ColumnScan(name, decimal_commas=file.has_decimal_commas)
        for name in file.columns
        if name not in drop
    }
    rows = 0
    for chunk in file.batches(limit):
        rows += len(chunk)
        for name, scan in scans.items():
            scan.update(chunk.texts(name))
    if not rows:
        raise no_rows(path)
    found = with_likelihood(find_target(scans[target], task, ordered), likelihood, limits, ordered)

    columns, dropped, carried, more = chosen_columns(
        file,
        scans,
        target,
        drop=drop,
        keep=keep,
        text=text,
        image=image,
        encoder=encoder,
        adapter=adapter,
    )
    remarks = [*file.remarks, *scans[target].remarks, *more]
    check_memory(path, rows, columns, len(found.classes))
    source = source_of(file)
    if images:
        source["images"] = check_images(file, columns, limit)
    draft = TableSchema(
        tuple(columns),
        found,
        dropped,
        tuple(carried),
        source,
        {"seed": seed, "fraction": test_fraction, "limit": limit},
        (),
    )
    values, targets, texts = _values(file, draft, rows, on_rows)
    known = ~np.isnan(targets)
    remarks += without_target(rows - int(known.sum()), scans[target])
    if found.task == "regression":
        remarks += check_targets(path, target, targets, found)
    if not (text or image):
        remarks += repeats_of(column[known] for column in (*values, targets))
    train, test = split_rows(targets, known, found.task, test_fraction, seed, path)
    draft, values = with_trained_levels(draft, values, train)
    draft, more = fitted(draft, values, targets, train, test)
    schema = dataclasses.replace(draft, remarks=(*remarks, *more))
    return table_data(path, schema, values, targets, texts, train, test), schema


def load_table(
    table: Path | TableFile,
    schema: TableSchema,
    *,
    folder: Path | None = None,
    on_rows: Callable[[int, int], None] | None = None,
) -> TableData:
    """Read again the table that a schema was fitted to: the same rows, the same held-out part.

    Args:
        table: its file, or the open table.
        schema: what a table's columns hold.
        folder: where :func:`store_table` may have stored it.
        on_rows: as in :func:`fit_table`.

    Raises:
        TableError: the file is missing, or it or an image has changed.
    """
    file = open_table(table, latin1=schema.is_latin1) if isinstance(table, Path) else table
    path = file.path
    check_source(file, schema)
    images = check_images(file, schema.columns, schema.split["limit"])
    if images != schema.source.get("images", ""):
        raise TableError(
            f"the images of {path} were changed after the run was made: their SHA-256 must be "
            f"{schema.source['images']}, got {images}; use them as they were, or train again"
        )
    stored = None if folder is None else stored_table(folder, path, schema)
    if stored is not None:
        return stored
    split = schema.split
    rows = split["train"] + split["test"]
    values, targets, texts = _values(file, schema, rows, on_rows)
    train, test = split_rows(
        targets, ~np.isnan(targets), schema.target.task, split["fraction"], split["seed"], path
    )
    return table_data(path, schema, values, targets, texts, train, test)


def check_source(file: TableFile, schema: TableSchema) -> None:
    """Check that a table is the one that a schema was fitted to.

    Raises:
        TableError: its content is another.
    """
    if file.sha256 != schema.source["sha256"]:
        raise TableError(
            f"{file.path} was changed after the run was made: its SHA-256 must be "
            f"{schema.source['sha256']}, got {file.sha256}; use the data as they were, or "
            "train again"
        )


def _values(
    file: TableFile,
    schema: TableSchema,
    num_rows: int,
    on_rows: Callable[[int, int], None] | None,
) -> tuple[list[Floats], Floats, Texts]:
    """Return the values of every column and of the target, and cells that a network reads.

    A target is nan for a row without one. The cells are those of the first column of texts or
    images; there are none without such a column.
    """
    columns: list[list[Floats]] = [[] for _ in schema.columns]
    targets, texts = [], []
    readers = [column.within(file.folder) for column in schema.columns]
    named = [column.name for column in readers if isinstance(column, EncodedColumn)]
    done = 0
    # A text takes milliseconds, where a number takes microseconds.
    size = None
    if named:
        has_images = any(isinstance(column, ImageColumn) for column in readers)
        size = _IMAGES_AT_ONCE if has_images else _TEXTS_AT_ONCE
    for rows in file.batches(schema.split["limit"], size=size):
        try:
            for reader, parts in zip(readers, columns, strict=True):
                parts.append(values_of(rows, reader))
        except CellError as error:
            raise error.in_row(file.path, done + 1) from error
        targets.append(schema.target.values(rows))
        texts += [rows.texts(name) for name in named[:1]]
        done += len(rows)
        if on_rows is not None and named:
            on_rows(done, max(done, num_rows))
    cells = np.concatenate(texts) if texts else np.array([], dtype=object)
    return [np.concatenate(parts) for parts in columns], np.concatenate(targets), cells


def with_trained_levels(
    draft: TableSchema, values: Sequence[Floats], train: Places
) -> tuple[TableSchema, list[Floats]]:
    """Return the schema without the levels of categories that no training row has, and its values.

    So a held-out row with such a level lies outside the training data, as a new row does.
    """
    seen = [
        np.isin(np.arange(len(column.levels)), each[train])
        if isinstance(column, CategoryColumn)
        else None
        for column, each in zip(draft.columns, values, strict=True)
    ]
    return with_levels(draft, values, seen)


def with_levels(
    draft: TableSchema, values: Sequence[Floats], seen: Sequence[npt.NDArray[np.bool_] | None]
) -> tuple[TableSchema, list[Floats]]:
    """Return the schema with some levels of its categories, and its values.

    Args:
        draft: the schema.
        values: of each column, shape (N,), or (N, F) for texts.
        seen: of each column the levels that stay; None for one without levels.
    """
    columns, codes = [], []
    for column, each, those in zip(draft.columns, values, seen, strict=True):
        if not isinstance(column, CategoryColumn) or those is None:
            columns.append(column)
            codes.append(each)
            continue
        smaller = column.without_unseen(those)
        columns.append(smaller)
        codes.append(smaller.codes_of(column, each))
    return dataclasses.replace(draft, columns=tuple(columns)), codes


def fitted(
    draft: TableSchema,
    values: Sequence[Floats],
    targets: Floats,
    train: Places,
    test: Places,
    *,
    num_train: int | None = None,
) -> tuple[TableSchema, list[str]]:
    """Return the schema with the statistics of the training rows, and remarks.

    Args:
        draft: the schema without them.
        values: of each column.
        targets: those of the target.
        train: places of the training rows.
        test: places of the held-out rows.
        num_train: the number of training rows, where these are a sample of them.
    """
    count = len(train) if num_train is None else num_train
    ranged = sum(isinstance(column, RangedColumn) for column in draft.columns)
    tail = tail_of(len(train), ranged)
    columns = tuple(
        column.fit(each[train], tail=tail)
        for column, each in zip(draft.columns, values, strict=True)
    )
    remarks = [
        f"{column.name}: {len(column.levels) - column.kept:,} of its {len(column.levels):,} levels "
        "are rare and share one input"
        for column in columns
        if isinstance(column, CategoryColumn) and column.kept < len(column.levels)
    ]
    if count < 100:
        remarks.append(
            f"there are only {count} rows to train on and {len(test)} held out: the numbers "
            "below say little about new data"
            if len(test)
            else f"there are only {count} rows to train on"
        )
    target, note = scaled_target(draft.target, targets[train])
    if note is not None:
        remarks.append(note)
    schema = dataclasses.replace(draft, columns=columns, target=target)
    far = schema.farthest([each[test] for each in values]) > 0.0
    split = {
        **draft.split,
        "train": len(train),
        "test": len(test),
        "test_outside": int(far.sum()),
    }
    return dataclasses.replace(schema, split=split), remarks


def table_data(
    path: Path,
    schema: TableSchema,
    values: Sequence[Floats],
    targets: Floats,
    texts: Texts,
    train: Places,
    test: Places,
) -> TableData:
    """Return a table as tensors.

    Args:
        path: its file.
        schema: its schema, fitted.
        values: values of each column, shape (N,), or (N, F) for texts.
        targets: class indices or numbers, shape (N,); nan where there is none.
        texts: cells of a column of texts, shape (N,); none if there is no such column.
        train: places of the rows for training.
        test: places of the held-out rows.
    """
    target, recorded = schema.target, targets
    if target.task == "regression":
        targets = np.clip(recorded, target.limits.below, target.limits.above)
        if tames_targets(target):
            targets[train] = without_wild(targets[train][:, None])[0][:, 0]
    tensor = target_tensor(target, recorded, targets)
    parts = [[each[part] for each in values] for part in (train, test)]
    inputs = [torch.from_numpy(schema.encode(part)) for part in parts]
    distances = [torch.from_numpy(schema.farthest(part)) for part in parts]
    return TableData(
        path.name,
        inputs[0],
        tensor[train],
        distances[0],
        inputs[1],
        tensor[test],
        distances[1],
        target.classes,
        target.shift,
        target.scale,
        target.marginal,
        tuple(texts[test].tolist()) if len(texts) else (),
        target.limits,
        target.likelihood,
    )
