"""Read a table of paths of images, and the class of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bayesify.datasets import LabelledImages
from bayesify.tabular.cells import is_missing
from bayesify.tabular.files import TableError, open_table, path_of_image
from bayesify.tabular.schema import label_of, texts_of

__all__ = ["ImageTable", "find_table_images", "read_image_table"]

#: Columns that an error message or a remark names.
_MOST_NAMED = 20


@dataclass(frozen=True)
class ImageTable:
    """Rows of a table that names images.

    Args:
        source: the file of the table.
        paths: the image of each row.
        cells: its path as the table has it.
        labels: its class, or "" where the cell is empty; None without a column of classes.
        remarks: notes for the user on how the table is read.
    """

    source: Path
    paths: tuple[Path, ...]
    cells: tuple[str, ...]
    labels: tuple[str, ...] | None
    remarks: tuple[str, ...]


def read_image_table(path: Path, *, image: str, target: str) -> ImageTable:
    r"""Read the paths of a table's images, relative to its folder, and their classes.

    Args:
        path: a CSV file, perhaps gzipped, or a Parquet file.
        image: the column of paths.
        target: the column of classes, which a table of new images need not have.

    Raises:
        TableError: the file cannot be read, has no such column or no rows, or a row has no path.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "a.csv")
        ...     _ = path.write_text("file,kind\nred/1.png,cat\n2.png,\n")
        ...     table = read_image_table(path, image="file", target="kind")
        ...     [each.relative_to(folder).as_posix() for each in table.paths], table.labels
        (['red/1.png', '2.png'], ('cat', ''))
    """
    file = open_table(path)
    if image not in file.columns:
        raise TableError(
            f"{path} has no column {image!r} with the paths of images; {_named(file.columns)}"
        )
    cells: list[str] = []
    labels: list[str] | None = [] if target in file.columns else None
    for chunk in file.chunks():
        found = [str(cell).strip() for cell in texts_of(chunk, image)]
        empty = is_missing(np.array(found, dtype=object))
        if empty.any():
            raise TableError(
                f"{path}, row {len(cells) + int(empty.argmax()) + 1:,}: the column {image!r} must "
                "name an image, got none; name one, or leave the row out"
            )
        cells += found
        if labels is not None:
            kinds = np.array([str(cell).strip() for cell in texts_of(chunk, target)], dtype=object)
            absent = is_missing(kinds)
            labels += [
                "" if lacks else label_of(kind) for kind, lacks in zip(kinds, absent, strict=True)
            ]
    if not cells:
        raise TableError(f"{path} has no rows below its header")
    unused = [name for name in file.columns if name not in (image, target)]
    remarks = list(file.remarks)
    if unused:
        remarks.append(f"not used: {_shown(unused)}")
    paths = tuple(path_of_image(path.parent, cell) for cell in cells)
    known = None if labels is None else tuple(labels)
    return ImageTable(path, paths, tuple(cells), known, tuple(remarks))


def find_table_images(path: Path, *, image: str, target: str) -> LabelledImages:
    r"""Return the images of a table's rows that have a class, to train on.

    Args:
        path: as for :func:`read_image_table`.
        image: the column of paths.
        target: the column of classes.

    Raises:
        TableError: as :func:`read_image_table`; or there is no column of classes, or it is the
            column of paths.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "a.csv")
        ...     _ = path.write_text("file,kind\n1.png,cat\n2.png,\n")
        ...     found = find_table_images(path, image="file", target="kind")
        >>> found.labels, found.remarks
        (('cat',), ("1 row has no class in 'kind' and is left out",))
    """
    if image == target:
        raise TableError(
            f"--image {image} contradicts --target; --target names the column of classes"
        )
    table = read_image_table(path, image=image, target=target)
    if table.labels is None:
        raise TableError(f"{path} has no column {target!r}, which --target asks for")
    kept = [place for place, label in enumerate(table.labels) if label]
    cells, labels = ([each[place] for place in kept] for each in (table.cells, table.labels))
    remarks = [*table.remarks, *_doubts(cells, labels)]
    absent = len(table.labels) - len(kept)
    if absent:
        verbs = "rows have" if absent > 1 else "row has"
        left = "are" if absent > 1 else "is"
        remarks.append(f"{absent:,} {verbs} no class in {target!r} and {left} left out")
    return LabelledImages(
        table.source,
        tuple(table.paths[place] for place in kept),
        tuple(labels),
        tuple(f"{cell}\0{label}\0" for cell, label in zip(cells, labels, strict=True)),
        rows=tuple(place + 1 for place in kept),
        columns=(image, target),
        remarks=tuple(remarks),
    )


def _doubts(cells: Sequence[str], labels: Sequence[str]) -> list[str]:
    """Return a remark if images occur in several rows, which may be trained on and held out."""
    classes: dict[str, set[str]] = {}
    for cell, label in zip(cells, labels, strict=True):
        classes.setdefault(cell, set()).add(label)
    again = len(cells) - len(classes)
    if not again:
        return []
    torn = sum(len(each) > 1 for each in classes.values())
    also = f", {torn:,} of them with several classes" if torn else ""
    return [
        f"{again:,} row{'s name images' if again > 1 else ' names an image'} that another row "
        f"names{also}: an image in both parts makes the held-out part too easy"
    ]


def _named(columns: Sequence[str]) -> str:
    return f"its columns are {_shown(columns)}"


def _shown(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > _MOST_NAMED else ""
    return ", ".join(map(repr, names[:_MOST_NAMED])) + more
