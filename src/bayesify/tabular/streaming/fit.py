"""Read a table that is larger than memory for training: one pass for its schema, one to encode it.

The first pass scans every column and draws rows by a hash of their numbers: the first of these are
held out, the others are the sample from which scales and quantiles come. The second pass writes
the inputs and targets of all other rows to an Arrow file, which the epochs read in random order.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bayesify.tabular import robust
from bayesify.tabular.advice import FEWEST_TARGETS, ordinary_range
from bayesify.tabular.cells import Floats
from bayesify.tabular.censoring import Limits
from bayesify.tabular.column_choice import check_names, chosen_columns
from bayesify.tabular.columns import CategoryColumn, Column, DateColumn, FlagColumn, NumberColumn
from bayesify.tabular.detect import find_target
from bayesify.tabular.files import TableError, TableFile, no_rows, open_table
from bayesify.tabular.held_out import MOST_TEST_ROWS, check_enough
from bayesify.tabular.likelihoods import LARGEST_COUNT
from bayesify.tabular.schema import LARGEST_TARGET, TableSchema, Target, source_of
from bayesify.tabular.stored_table import STORED_NAME, stored_table
from bayesify.tabular.streaming.encoded import STREAM_NAME, EncodedRows, write_encoded
from bayesify.tabular.streaming.memory import TrainingMemory, gigabytes
from bayesify.tabular.streaming.sample import RowSample, hash_key, row_hashes
from bayesify.tabular.streaming.scan import Moments, StreamScan
from bayesify.tabular.table_data import TableData
from bayesify.tabular.targets import (
    check_targets,
    tames_targets,
    target_tensor,
    with_likelihood,
    without_target,
)
from bayesify.tabular.training_table import (
    check_source,
    fitted,
    table_data,
    with_levels,
    with_trained_levels,
)

__all__ = ["fit_stream", "load_stream", "write_stream"]

#: Share of a sample that may lie beyond the range of ordinary numbers where the mean and standard
#: deviation of all rows are used: they then differ by at most 0.3 % from those of ordinary ones.
_FEW_BEYOND = 5e-5
#: Part of the size of the encoded rows that their file may take besides.
_ROOM = 0.1


@dataclass(frozen=True)
class _Drawn:
    """Places in the sample: of the held-out rows and of those for training; and the last hash."""

    train: np.ndarray[Any, np.dtype[np.int64]]
    test: np.ndarray[Any, np.dtype[np.int64]]
    threshold: int


def fit_stream(
    table: Path | TableFile,
    target: str,
    *,
    memory: TrainingMemory,
    folder: Path,
    task: str | None = None,
    likelihood: str = "",
    limits: Limits | None = None,
    ordered: Sequence[str] = (),
    test_fraction: float = 0.2,
    seed: int = 0,
    drop: Sequence[str] = (),
    keep: Sequence[str] = (),
    limit: int | None = None,
    on_rows: Callable[[int], None] | None = None,
) -> tuple[TableData, TableSchema]:
    r"""Detect what a table holds in one pass, with memory that does not grow with its rows.

    Levels, counts and missing values are those of all rows, and so are the mean and standard
    deviation of a column of numbers without wild ones. Quantiles, and all other statistics, are of
    a uniform sample of the training rows: a quantile's share of the rows has a standard error of at
    most ``0.5 / sqrt(sample)``. If the sample holds all training rows, everything is exact. Which
    rows are held out depends on their numbers and the seed alone.

    Args:
        table: as for ``fit_table``, like most of the following.
        target: see there.
        memory: how much of the table is in memory.
        folder: folder of the run, in which :func:`write_stream` will write.
        task: see there.
        likelihood: see there.
        limits: see there.
        ordered: see there.
        test_fraction: see there; the classes have no fixed shares.
        seed: see there.
        drop: see there.
        keep: see there.
        limit: see there.
        on_rows: called with the number of rows that were read.

    Returns:
        The held-out rows and the sample as tensors, whose ``stream`` is not written yet; and the
        schema.

    Raises:
        TableError: the table cannot be used, or there is not enough room on the disk.

    Example:
        >>> import tempfile
        >>> memory = TrainingMemory.of(4 * 10**9, 0, columns=2, as_text=True)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "a.csv")
        ...     rows = [f"{i / 7},{i * i / 3}\n" for i in range(20)]
        ...     _ = path.write_text("x,y\n" + "".join(rows))
        ...     data, schema = fit_stream(path, "y", memory=memory, folder=Path(folder))
        ...     write_stream(path, schema, data.stream)
        ...     batches = [len(targets) for _, targets in data.stream.loader(10, seed=0)]
        >>> data.num_train, len(data.test_targets), batches
        (16, 4, [10, 6])
    """
    file = open_table(table) if isinstance(table, Path) else table
    path = file.path
    check_names(file, target, drop=drop, keep=keep)
    scans = {
        name: StreamScan(name, decimal_commas=file.has_decimal_commas)
        for name in file.columns
        if name not in drop
    }
    sample = RowSample(memory.held_rows + memory.sample_rows, list(scans), key=hash_key(seed))
    for rows in file.batches(limit, columns=list(scans), size=memory.rows):
        for scan in scans.values():
            scan.read(rows)
        sample.update(rows)
        if on_rows is not None:
            on_rows(sample.seen)
    if not sample.seen:
        raise no_rows(path)
    for scan in scans.values():
        scan.finish()
    found = with_likelihood(find_target(scans[target], task, ordered), likelihood, limits, ordered)
    columns, dropped, carried, remarks = chosen_columns(file, scans, target, drop=drop, keep=keep)
    known = scans[target].usable_numbers if found.task == "regression" else scans[target].count
    _check_range(path, scans[target], found)
    draft = TableSchema(
        tuple(columns),
        found,
        dropped,
        tuple(carried),
        source_of(file),
        {"seed": seed, "fraction": test_fraction, "limit": limit},
        (),
    )
    some = sample.rows()
    values, targets = draft.parse(some), found.values(some)
    remarks = [*file.remarks, *scans[target].remarks, *remarks]
    remarks += without_target(sample.seen - known, scans[target])
    if found.task == "regression":
        remarks += check_targets(path, target, targets, found, sample.numbers())
    drawn = _drawn(path, sample, targets, known, test_fraction, memory)
    is_whole = len(drawn.train) == known - len(drawn.test)
    if is_whole:
        draft, values = with_trained_levels(draft, values, drawn.train)
    else:
        seen = [
            _seen_levels(column, scans[column.name], each[drawn.test])
            for column, each in zip(draft.columns, values, strict=True)
        ]
        draft, values = with_levels(draft, values, seen)
    num_train = known - len(drawn.test)
    draft, more = fitted(draft, values, targets, drawn.train, drawn.test, num_train=num_train)
    if not is_whole:
        held = [each[drawn.test] for each in values]
        every = known == sample.seen
        draft = _of_all_rows(draft, scans, values, targets, drawn, held, every=every)
        error = 50.0 / math.sqrt(len(drawn.train))
        more.append(
            f"quantiles are of a sample of {len(drawn.train):,} training rows, with a standard "
            f"error of at most {error:.2g} % of the rows; the measures of training rows, and the "
            "numbers of targets that are wild or at a limit, are of the rows drawn"
        )
    split = {
        **draft.split,
        "train": known - len(drawn.test),
        "sample": len(drawn.train),
        "streamed": {
            "threshold": drawn.threshold,
            "rows": sample.seen,
            "buffer_rows": memory.buffer_rows(len(draft.features)),
            "rows_at_once": memory.rows,
            "ordinary": _ordinary(draft.target, targets[drawn.train]),
        },
    }
    schema = dataclasses.replace(draft, split=split, remarks=(*remarks, *more))
    data = table_data(
        path, schema, values, targets, np.array([], dtype=object), drawn.train, drawn.test
    )
    stream = _encoded_rows(schema, folder)
    _check_room(stream)
    # The layout of a stored tensor, on which the last digits of products depend.
    inputs = {name: getattr(data, name).contiguous() for name in ("train_inputs", "test_inputs")}
    return dataclasses.replace(data, stream=stream, **inputs), schema


def load_stream(path: Path, schema: TableSchema, folder: Path | None) -> TableData:
    """Return the rows in memory of a streamed table, which its run's folder has.

    Args:
        path: the table, which is not read.
        schema: its schema.
        folder: folder of the run.

    Raises:
        TableError: the folder does not have them.
    """
    stored = None if folder is None else stored_table(folder, path, schema)
    if stored is None or folder is None:
        raise TableError(
            f"{folder} must have {STORED_NAME} with the held-out rows of its streamed table; train "
            "again"
        )
    return dataclasses.replace(stored, stream=_encoded_rows(schema, folder))


def write_stream(
    path: Path | TableFile,
    schema: TableSchema,
    stream: EncodedRows,
    *,
    on_rows: Callable[[int], None] | None = None,
) -> None:
    """Write the inputs and targets of all training rows, unless they are there.

    Args:
        path: the table.
        schema: its schema, from :func:`fit_stream`.
        stream: the file to write.
        on_rows: called with the number of rows that were read.

    Raises:
        TableError: the table was changed, or there is not enough room on the disk.
        OSError: the file cannot be written.
    """
    if stream.is_there():
        return
    file = open_table(path, latin1=schema.is_latin1) if isinstance(path, Path) else path
    check_source(file, schema)
    _check_room(stream)
    write_encoded(stream, _encoded(file, schema, on_rows))


def _check_room(stream: EncodedRows) -> None:
    parents = stream.path.absolute().parents
    free = shutil.disk_usage(next(each for each in parents if each.is_dir())).free
    needed = int((1.0 + _ROOM) * stream.num_bytes)
    if free < needed:
        raise TableError(
            f"{stream.path} needs about {gigabytes(needed)} on the disk until the training has "
            f"ended, but {gigabytes(free)} are free; choose another disk with --out"
        )


def _encoded(
    file: TableFile, schema: TableSchema, on_rows: Callable[[int], None] | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the inputs and targets of the training rows, in their order."""
    streamed, target = schema.split["streamed"], schema.target
    key, threshold = hash_key(schema.split["seed"]), np.uint64(streamed["threshold"])
    names = [*(column.name for column in schema.columns), target.name]
    first = 0
    for rows in file.batches(schema.split["limit"], columns=names, size=streamed["rows_at_once"]):
        recorded = target.values(rows)
        chosen = ~np.isnan(recorded)
        if schema.split["test"]:
            chosen &= row_hashes(first, len(rows), key) > threshold
        inputs = schema.encode([values[chosen] for values in schema.parse(rows)])
        recorded = recorded[chosen]
        tamed = _tamed(target, recorded, streamed["ordinary"])
        first += len(rows)
        yield (
            torch.from_numpy(np.ascontiguousarray(inputs)),
            target_tensor(target, recorded, tamed),
        )
        if on_rows is not None:
            on_rows(first)


def _encoded_rows(schema: TableSchema, folder: Path) -> EncodedRows:
    target = schema.target
    shape: tuple[int, ...] = ()
    if target.task == "regression":
        shape = (1,) if target.limits.are_open else (1, 2)
    return EncodedRows(
        folder / STREAM_NAME,
        schema.split["train"],
        len(schema.features),
        shape,
        schema.split["streamed"]["buffer_rows"],
        schema.source["sha256"],
    )


def _check_range(path: Path, scan: StreamScan, target: Target) -> None:
    """Raise TableError where a number of any row cannot be a target."""
    if target.task != "regression" or not scan.moments.count:
        return
    low, high = scan.moments.low, scan.moments.high
    if max(abs(low), abs(high)) > LARGEST_TARGET:
        worst = low if abs(low) > abs(high) else high
        raise TableError(
            f"{path}: the target {target.name!r} must be at most {LARGEST_TARGET:g} in size, got "
            f"{worst:g}; correct or remove the row"
        )
    if target.has_counts and not (low >= 0.0 and high <= LARGEST_COUNT and scan.numbers_are_whole):
        raise TableError(
            f"{path}: the target {target.name!r} must hold counts, integers from 0 to "
            f"{LARGEST_COUNT:g}, for --likelihood {target.likelihood}, got others, from {low:g} to "
            f"{high:g}; use --likelihood gaussian for other numbers"
        )


def _drawn(
    path: Path,
    sample: RowSample,
    targets: Floats,
    known: int,
    fraction: float,
    memory: TrainingMemory,
) -> _Drawn:
    """Hold out the rows of the smallest hashes; the next ones are the sample for training."""
    check_enough(path, known)
    hashes = sample.hashes()
    usable = np.flatnonzero(~np.isnan(targets))
    usable = usable[np.argsort(hashes[usable])]
    held = 0
    if fraction:
        held = max(1, min(round(fraction * known), MOST_TEST_ROWS, memory.held_rows, known - 2))
        if not sample.is_whole:
            held = min(held, len(usable) // 2)
    if len(usable) - held < 2:
        raise TableError(
            f"{path}: of {len(hashes):,} rows that were drawn only {len(usable):,} have a target; "
            "leave out the rows without one, or raise --max-memory"
        )
    chosen = usable[held : held + memory.sample_rows]
    threshold = int(hashes[usable[held - 1]]) if held else 0
    return _Drawn(np.sort(chosen), np.sort(usable[:held]), threshold)


def _of_all_rows(
    schema: TableSchema,
    scans: dict[str, StreamScan],
    values: Sequence[Floats],
    targets: Floats,
    drawn: _Drawn,
    held: Sequence[Floats],
    *,
    every: bool,
) -> TableSchema:
    """Return the schema with the statistics of all training rows, as far as a pass tells them.

    Args:
        schema: fitted to the sample.
        scans: scans of all rows.
        values: values of the sample and the held-out rows.
        targets: their targets.
        drawn: their places.
        held: values of the held-out rows.
        every: whether every row has a target, so that the scans are of the rows that are used.
    """
    columns = [
        _with_counts(column, scans[column.name], sampled[drawn.train], left, every=every)
        for column, sampled, left in zip(schema.columns, values, held, strict=True)
    ]
    target = schema.target
    scan = scans[target.name]
    if target.task != "regression":
        counts = np.zeros(len(target.classes))
        labels = Target(target.name, target.task, target.classes)
        texts = np.array(list(scan.texts), dtype=object)
        places = labels.parse(texts).astype(np.int64)
        np.add.at(counts, places, list(scan.texts.values()))
        counts -= np.bincount(targets[drawn.test].astype(np.int64), minlength=len(counts))
        target = dataclasses.replace(target, marginal=tuple((counts / counts.sum()).tolist()))
    elif scan.is_plain and target.limits.are_open and not target.has_counts:
        found = _moments(scan.moments, targets[drawn.train], targets[drawn.test])
        if found is not None:
            target = dataclasses.replace(target, shift=found[0], scale=found[1])
    return dataclasses.replace(schema, columns=tuple(columns), target=target)


def _seen_levels(column: Column, scan: StreamScan, held: Floats) -> npt.NDArray[np.bool_] | None:
    """Return which levels of a category rows have that are not held out.

    Rows without a target have levels too, since the pass over all rows counts them. None stands
    for all levels, where there are none or the pass could not count them all.
    """
    if not isinstance(column, CategoryColumn) or scan.overflowed:
        return None
    codes = column.parse(np.array(list(scan.texts), dtype=object))
    counts = np.zeros(len(column.levels))
    known = np.isfinite(codes)
    np.add.at(counts, codes[known].astype(np.int64), np.array(list(scan.texts.values()))[known])
    held = held[np.isfinite(held)].astype(np.int64)
    return counts > np.bincount(held, minlength=len(counts))


def _with_counts(
    column: Column, scan: StreamScan, sampled: Floats, held: Floats, *, every: bool
) -> Column:
    missing = scan.missing
    if isinstance(column, NumberColumn):
        missing += scan.count - scan.usable_numbers
    if isinstance(column, DateColumn) and scan.count:
        missing += scan.count_unread_dates(column.form)
    absent = np.isnan(held) if isinstance(column, CategoryColumn) else ~np.isfinite(held)
    if missing > int(absent.sum()):
        column = dataclasses.replace(column, missing=True)
    if isinstance(column, FlagColumn) and len(scan.texts) > 1:
        column = dataclasses.replace(column, only=None)  # the sample may lack one of its words
    if isinstance(column, NumberColumn) and column.std and every and scan.is_plain:
        found = _moments(scan.moments, sampled, held)
        if found is not None:
            column = dataclasses.replace(column, mean=found[0], std=found[1])
    return column


def _moments(moments: Moments, sampled: Floats, held: Floats) -> tuple[float, float] | None:
    """Return mean and standard deviation of all training rows; None if some are wild."""
    finite = sampled[np.isfinite(sampled)]
    if not len(finite):
        return None
    low, high = robust.bounds(finite, np.ones(len(finite)), robust.WILD)
    beyond = float(((finite < low) | (finite > high)).mean())
    room = high / 2.0 - low / 2.0
    if beyond > _FEW_BEYOND or moments.low < low - room or moments.high > high + room:
        return None
    return moments.without(held[np.isfinite(held)])


def _ordinary(target: Target, numbers: Floats) -> list[list[float]] | None:
    """Return the ranges of targets that are not wild, by the sample; None where all are used."""
    if target.task != "regression" or not tames_targets(target) or len(numbers) < FEWEST_TARGETS:
        return None
    within = np.clip(numbers, target.limits.below, target.limits.above)
    return [list(part) for part in ordinary_range(within, np.ones(len(within)))]


def _tamed(target: Target, recorded: Floats, ordinary: list[list[float]] | None) -> Floats:
    numbers = np.clip(recorded, target.limits.below, target.limits.above)
    if ordinary is None:
        return numbers
    (low, high), ends = ordinary
    wild = (numbers < low) | (numbers > high)
    return np.where(wild, np.clip(numbers, ends[0], ends[1]), numbers)
