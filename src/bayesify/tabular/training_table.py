"""Read a table for training: detect its columns, read their values, hold out a part of the rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from bayesify.noise.keys import Stream, derived_seed
from bayesify.tabular.advice import without_wild
from bayesify.tabular.cells import Floats, Texts, as_numbers
from bayesify.tabular.censoring import Limits
from bayesify.tabular.columns import (
    CategoryColumn,
    Column,
    EncodedColumn,
    ImageColumn,
    RangedColumn,
    TextColumn,
    TokenColumn,
    facts_of,
)
from bayesify.tabular.detect import ColumnScan, find_target
from bayesify.tabular.files import CellError, TableError, TableFile, open_table
from bayesify.tabular.image_table import check_images
from bayesify.tabular.likelihoods import LARGEST_COUNT, CountStatistics, wrong_count
from bayesify.tabular.scaling import Scaling
from bayesify.tabular.schema import (
    LARGEST_TARGET,
    TableSchema,
    Target,
    label_of,
    tail_of,
    values_of,
)
from bayesify.tabular.stored_table import stored_table
from bayesify.tabular.table_data import TableData
from bayesify.tabular.table_memory import available_memory

__all__ = [
    "FEWEST_ROWS",
    "MOST_TEST_ROWS",
    "ColumnChoice",
    "check_names",
    "check_targets",
    "chosen_columns",
    "fit_table",
    "fitted",
    "load_table",
    "memory_needed",
    "table_data",
    "tames_targets",
    "target_tensor",
    "with_likelihood",
]

#: More rows than this make the measures hardly more precise, and take long to predict.
MOST_TEST_ROWS = 50_000
FEWEST_ROWS = 4
#: Rows whose texts or images are read before the progress is shown.
_TEXTS_AT_ONCE, _IMAGES_AT_ONCE = 1000, 64
#: Classes that an error message names.
_MOST_NAMED = 10
#: A target so many interquartile ranges from the median is reported.
_WILD = 1e6


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
        raise TableError(f"{path} has no rows below its header")
    found = with_likelihood(find_target(scans[target], task), likelihood, limits, ordered)

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
    remarks = [*file.remarks, *more]
    _check_memory(path, rows, columns, len(found.classes))
    source = {"path": str(path), "sha256": file.sha256, "columns": list(file.columns)}
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
    absent = rows - int(known.sum())
    if absent:
        remarks.append(
            f"{absent:,} row{'s have' if absent > 1 else ' has'} no usable target {target!r} and "
            f"{'are' if absent > 1 else 'is'} left out"
        )
    if found.task == "regression":
        remarks += check_targets(path, target, targets, found)
    train, test = _split(targets, known, found.task, test_fraction, seed, path)
    draft, more = fitted(draft, values, targets, train, test)
    schema = dataclasses.replace(draft, remarks=(*remarks, *more))
    return table_data(path, schema, values, targets, texts, train, test), schema


class ColumnChoice(NamedTuple):
    """The columns of a table that are used, and those that are not."""

    #: Input columns, before they are fitted.
    columns: list[Column]
    #: Names of the others, with the reason.
    dropped: dict[str, str]
    #: Those that identify rows: among the others, and paths of images.
    carried: list[str]
    #: Notes for the user on how the columns are read.
    remarks: list[str]


def chosen_columns(
    file: TableFile,
    scans: Mapping[str, ColumnScan],
    target: str,
    *,
    drop: Sequence[str] = (),
    keep: Sequence[str] = (),
    text: Sequence[str] = (),
    image: str | None = None,
    encoder: str | None = None,
    adapter: bool = False,
) -> ColumnChoice:
    """Return the columns of use for a prediction, from the scans of all.

    Args:
        file: the table.
        scans: the scan of each column by its name, but for those in ``drop``.
        target: as for :func:`fit_table`, like all that follow.
        drop: see there.
        keep: see there.
        text: see there.
        image: see there.
        encoder: see there.
        adapter: see there.

    Raises:
        TableError: no column is of use.
    """
    dropped = dict.fromkeys(drop, "asked for by --drop")
    columns: list[Column] = []
    remarks: list[str] = []
    carried = []
    for name, scan in scans.items():
        if name == target:
            continue
        if name in text or name == image:
            option: Literal["text", "image"] = "text" if name in text else "image"
            columns.append(_encoded_column(scan, option, encoder, adapter=adapter))
            carried += [name] * (name == image)
            continue
        reason = scan.reason_to_drop()
        if reason is None or (name in keep and scan.count):
            columns.append(scan.column())
            remarks += scan.remarks
            continue
        dropped[name] = reason
        if "identif" in reason or "numbers the rows" in reason:
            carried.append(name)
    if not columns:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in dropped.items())
        raise TableError(
            f"{file.path} has no column to predict {target!r} from "
            f"({reasons or 'it is the only one'}); bring one back with --keep NAME, or add columns"
        )
    return ColumnChoice(columns, dropped, carried, remarks)


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
    file = open_table(table) if isinstance(table, Path) else table
    path = file.path
    if file.sha256 != schema.source["sha256"]:
        raise TableError(
            f"{path} was changed after the run was made: its SHA-256 must be "
            f"{schema.source['sha256']}, got {file.sha256}; use the file as it was, or train again"
        )
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
    train, test = _split(
        targets, ~np.isnan(targets), schema.target.task, split["fraction"], split["seed"], path
    )
    return table_data(path, schema, values, targets, texts, train, test)


def check_names(
    file: TableFile,
    target: str,
    *,
    drop: Sequence[str],
    keep: Sequence[str],
    text: Sequence[str] = (),
    image: Sequence[str] = (),
) -> None:
    """Check that a table has the columns that are asked for, and that no two options contradict.

    Args:
        file: the table.
        target: as for :func:`fit_table`, like all that follow.
        drop: see there.
        keep: see there.
        text: see there.
        image: the column of paths of images, or none.

    Raises:
        TableError: a column is missing, or an option contradicts another.
    """
    known = ", ".join(map(repr, file.columns[:20])) + (", ..." if len(file.columns) > 20 else "")
    asked = (
        *(("target", [target]), ("drop", drop), ("keep", keep)),
        *(("text", text), ("image", image)),
    )
    for option, names in asked:
        for name in names:
            if name not in file.columns:
                raise TableError(
                    f"{file.path} has no column {name!r}, which --{option} asks for; its columns "
                    f"are {known}"
                )
    for name in drop:
        for option, names in asked:
            if option != "drop" and name in names:
                raise TableError(f"--drop {name} contradicts --{option}; leave one out")
    for option, names in (("text", text), ("image", image)):
        if target in names:
            raise TableError(f"--{option} {target} contradicts --target; leave one out")


def with_likelihood(
    target: Target, likelihood: str, limits: Limits | None, ordered: Sequence[str]
) -> Target:
    """Return the target with its likelihood.

    Raises:
        TableError: ``ordered`` is not the classes of the target, each once.
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
            f"{','.join(classes[:_MOST_NAMED])}{more}, got {','.join(labels)}{advice}"
        )
    return dataclasses.replace(target, classes=labels, likelihood="ordinal")


def _are_numbers(classes: Sequence[str]) -> bool:
    return bool(np.isfinite(as_numbers(np.array(classes, dtype=object))).all())


def _encoded_column(
    scan: ColumnScan, option: Literal["text", "image"], encoder: str | None, *, adapter: bool
) -> Column:
    """Return the column that a pretrained network reads, for the option that names it."""
    assert encoder is not None
    if not scan.count:
        raise TableError(f"the column {scan.name!r} is empty; leave --{option} {scan.name} out")
    if scan.form is not None:
        what = "texts" if option == "text" else "paths of images"
        raise TableError(
            f"the column {scan.name!r} must hold {what} for --{option}, got numbers; leave "
            f"--{option} {scan.name} out, and it is used as numbers"
        )
    if option == "image":
        return ImageColumn.of(scan.name, encoder)
    return (TokenColumn if adapter else TextColumn).of(scan.name, encoder)


def _check_memory(path: Path, rows: int, columns: Sequence[Column], classes: int) -> None:
    inputs = sum(len(column.own_features) + 1 for column in columns)
    needed = memory_needed(rows, len(columns), inputs, classes)
    free = available_memory()
    if free is not None and needed > free:
        encoded = any(isinstance(column, EncodedColumn) for column in columns)
        stream = "" if encoded else "--max-memory to stream it, "
        raise TableError(
            f"{path} needs about {needed / 1e9:.1f} GB of memory ({rows:,} rows of {inputs} "
            f"inputs), but {free / 1e9:.1f} GB are free; use {stream}--limit N for its first N "
            "rows, or leave columns out with --drop"
        )


def memory_needed(rows: int, columns: int, inputs: int, classes: int = 0) -> int:
    """Return the bytes that training on a table in memory needs.

    Args:
        rows: rows of the table.
        columns: columns that are used, without the target.
        inputs: inputs of the network.
        classes: number of classes; 0 for a regression.

    Example:
        >>> memory_needed(1_000_000, 20, 20)
        720000000
    """
    # The peak is measuring the trained network on all rows; these are measured bytes a row.
    answering = 4 * inputs + (64 + 48 * classes if classes else 640)
    return rows * max(8 * (columns + 1 + inputs), answering)


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


Places = npt.NDArray[np.int64]


def _split(
    targets: Floats, known: npt.NDArray[np.bool_], task: str, fraction: float, seed: int, path: Path
) -> tuple[Places, Places]:
    """Draw the rows for training and those held out; return their places, in order.

    The held-out part has each class's share, and at least one row of each class is for training.
    """
    places = np.flatnonzero(known)
    count = len(places)
    if count < FEWEST_ROWS:
        raise TableError(
            f"{path} must have at least {FEWEST_ROWS} rows with a target, to train on some and "
            f"measure on others, got {count}"
        )
    generator = torch.Generator()
    generator.manual_seed(derived_seed(seed, Stream.SHUFFLE, 0, 1))
    if not fraction:
        return places, places[:0]
    order = places[torch.randperm(count, generator=generator).numpy()]
    held = max(1, min(round(fraction * count), MOST_TEST_ROWS, count - 2))
    test = np.zeros(len(targets), dtype=np.bool_)
    if task == "classification":
        labels = targets[order].astype(np.int64)
        sizes = np.bincount(labels)
        # Place of each row within its class, in random order.
        by_class = np.argsort(labels, kind="stable")
        rank = np.empty(count, dtype=np.int64)
        rank[by_class] = np.arange(count) - (np.cumsum(sizes) - sizes)[labels[by_class]]
        # The rows that come first relative to the size of their class, except the last of each.
        due = np.where(rank < sizes[labels] - 1, (rank + 0.5) / sizes[labels], math.inf)
        chosen = np.argsort(due, kind="stable")[:held]
        test[order[chosen[np.isfinite(due[chosen])]]] = True
        if not test.any():
            raise TableError(
                f"{path} has a class of its own for every row, so that none can be held out; use "
                "--task regression, or another target"
            )
    else:
        test[order[:held]] = True
    return np.flatnonzero(known & ~test), np.flatnonzero(test)


def fitted(
    draft: TableSchema, values: Sequence[Floats], targets: Floats, train: Places, test: Places
) -> tuple[TableSchema, list[str]]:
    """Return the schema with the statistics of the training rows, and remarks."""
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
    if len(train) < 100:
        remarks.append(
            f"there are only {len(train)} rows to train on and {len(test)} held out: the numbers "
            "below say little about new data"
            if len(test)
            else f"there are only {len(train)} rows to train on"
        )
    target, note = _scaled(draft.target, targets[train])
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


def _scaled(target: Target, values: Floats) -> tuple[Target, str | None]:
    """Return the target with the statistics of its training values, and a note of wild ones."""
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


def check_targets(path: Path, name: str, targets: Floats, target: Target) -> list[str]:
    """Return a remark if one number lies absurdly far from the others.

    Raises:
        TableError: the squares of some overflow, one is no count where counts are asked for, or
            all are censored.
    """
    places = np.flatnonzero(np.isfinite(targets))
    known = targets[places]
    if not len(known):
        return []
    worst = int(np.abs(known).argmax())
    if abs(known[worst]) > LARGEST_TARGET:
        raise TableError(
            f"{path}: the target {name!r} must be at most {LARGEST_TARGET:g} in size, got "
            f"{known[worst]:g} in row {places[worst] + 1:,}; correct or remove the row"
        )
    wrong = wrong_count(known) if target.has_counts else None
    if wrong is not None:
        raise TableError(
            f"{path}: the target {name!r} must hold counts, integers from 0 to {LARGEST_COUNT:g}, "
            f"for --likelihood {target.likelihood}, got {wrong:g} in row "
            f"{places[int((known == wrong).argmax())] + 1:,}; use --likelihood gaussian for other "
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
    if abs(known[far] - middle) <= _WILD * spread:
        return share
    return [
        *share,
        f"the target {name!r} is {known[far]:g} in row {places[far] + 1:,}, where half of the rows "
        f"are within {spread:.3g} of each other: among the held-out rows it decides the error of "
        "all; correct or remove it if it is wrong",
    ]


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
