"""Choose the columns of a table that are used for a prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from bayesify.tabular.columns import Column, ImageColumn, TextColumn, TokenColumn
from bayesify.tabular.detect import ColumnScan
from bayesify.tabular.files import TableError, TableFile

__all__ = ["ColumnChoice", "check_names", "chosen_columns"]


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
        target: as for ``fit_table``, like all that follow.
        drop: see there.
        keep: see there.
        text: see there.
        image: the column of paths of images, or none.

    Raises:
        TableError: a column is missing, or an option contradicts another.
    """
    known = ", ".join(map(repr, file.columns[:20])) + (", ..." if len(file.columns) > 20 else "")
    asked = (
        ("target", [target]),
        ("drop", drop),
        ("keep", keep),
        ("text", text),
        ("image", image),
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
        target: as for ``fit_table``, like all that follow.
        drop: see there.
        keep: see there.
        text: see there.
        image: see there.
        encoder: see there.
        adapter: see there.

    Raises:
        TableError: no column is of use.
    """
    dropped = dict.fromkeys(drop, "--drop asks for it")
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
        found = any(name not in drop for name in dropped)
        mends = ["bring one back with --keep NAME"] * found + ["drop fewer"] * bool(drop)
        raise TableError(
            f"{file.path} has no column to predict {target!r} from "
            f"({reasons or 'it is the only one'}); {', '.join([*mends, 'or add columns'])}"
        )
    return ColumnChoice(columns, dropped, carried, remarks)


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
