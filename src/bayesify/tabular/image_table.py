"""Read a table of paths of images, and the class of each."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from bayesify.datasets import (
    DataError,
    LabelledImages,
    check_image,
    find_images_and_remarks,
    find_labelled_images,
)
from bayesify.tabular.cells import is_missing
from bayesify.tabular.columns import Column, ImageColumn
from bayesify.tabular.files import (
    CellError,
    TableError,
    TableFile,
    no_rows,
    open_table,
    path_of_image,
)
from bayesify.tabular.rows import TableRows
from bayesify.tabular.schema import TableSchema, label_of
from bayesify.tabular.suffixes import TABLE_SUFFIXES

__all__ = [
    "CLASS",
    "FILE",
    "ImageTable",
    "check_images",
    "find_table_images",
    "folder_table",
    "new_table_file",
    "read_image_table",
]

#: Columns of a folder of images as a table.
FILE, CLASS = "file", "class"
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
    wanted = [image] if labels is None else [image, target]
    for rows in file.batches(columns=list(dict.fromkeys(wanted))):
        found = [str(cell).strip() for cell in rows.texts(image)]
        empty = is_missing(np.array(found, dtype=object))
        if empty.any():
            raise TableError(
                f"{path}, row {len(cells) + int(empty.argmax()) + 1:,}: the column {image!r} must "
                "name an image, got none; name one, or leave the row out"
            )
        cells += found
        if labels is not None:
            kinds = np.array([str(cell).strip() for cell in rows.texts(target)], dtype=object)
            absent = is_missing(kinds)
            labels += [
                "" if lacks else label_of(kind) for kind, lacks in zip(kinds, absent, strict=True)
            ]
    if not cells:
        raise no_rows(path)
    unused = [name for name in file.columns if name not in (image, target)]
    remarks = list(file.remarks)
    if unused:
        remarks.append(f"not used: {_shown(unused)}")
    folder = file.image_folder
    paths = tuple(path_of_image(folder, cell) for cell in cells)
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


@dataclass(frozen=True)
class _FolderFile(TableFile):
    """Folder of images as a table, with a column of paths and perhaps one of classes behind it."""

    images: LabelledImages

    @property
    def folder(self) -> Path:
        return self.path

    @property
    def num_rows(self) -> int:
        return len(self.images.paths)

    def parts(self, limit: int | None, columns: Sequence[str], size: int) -> Iterator[TableRows]:  # noqa: ARG002
        paths = [path.relative_to(self.path).as_posix() for path in self.images.paths]
        cells = dict(zip(self.columns, (paths, self.images.labels), strict=False))
        yield TableRows(
            pa.table({name: pa.array(cells[name][:limit], pa.large_string()) for name in columns})
        )


def folder_table(folder: Path) -> TableFile:
    """Return a folder with one subfolder of images for each class as a table.

    Raises:
        DataError: it is no such folder, or an image cannot be read.
        TableError: a class has the name of a missing value, such as none.

    Example:
        >>> folder_table(Path("nowhere"))
        Traceback (most recent call last):
        bayesify.datasets.files.DataError: there is no folder nowhere
    """
    found = find_labelled_images(folder)
    found.check()
    absent = [name for name in found.classes if is_missing(np.array([name], dtype=object))[0]]
    if absent:
        raise TableError(
            f"the name of a class must not stand for a missing value, got {folder / absent[0]}; "
            "rename the subfolder"
        )
    return _FolderFile(folder, (FILE, CLASS), found.sha256(), found.remarks, found)


def new_table_file(path: Path, schema: TableSchema, *, labelled: bool = False) -> TableFile:
    """Return new examples as a table: a table's file, or images for a run that reads images.

    Args:
        path: file, folder or pattern of a table; for a run that reads images an image or a folder
            of images, or the file or pattern of a table.
        schema: schema of the training table.
        labelled: whether a folder has one subfolder for each class.

    Raises:
        DataError: there is no such folder, or it holds no image.
        TableError: the file cannot be read.

    Example:
        >>> from bayesify.tabular.schema import Target
        >>> new_table_file(Path("nowhere.csv"), TableSchema((), Target("y", "regression")))
        Traceback (most recent call last):
        bayesify.tabular.files.errors.TableError: there is no file nowhere.csv
    """
    names = [column.name for column in schema.columns if isinstance(column, ImageColumn)]
    if not names or (path.suffix.lower() in TABLE_SUFFIXES and not path.is_dir()):
        return open_table(path, latin1=schema.is_latin1)
    if labelled:
        found = find_labelled_images(path)
        return _FolderFile(path, (names[0], schema.target.name), "", found.remarks, found)
    paths, remarks = ([path], ()) if path.is_file() else find_images_and_remarks(path)
    folder = path.parent if path.is_file() else path
    found = LabelledImages(path, tuple(paths), ("",) * len(paths), ())
    return _FolderFile(folder, (names[0],), "", remarks, found)


def check_images(file: TableFile, columns: Sequence[Column], limit: int | None = None) -> str:
    """Check that all images of a table are there, before a pretrained network reads them.

    Args:
        file: the table.
        columns: its columns, of which those of images are checked.
        limit: check only this number of rows from the top.

    Returns:
        The digest of the images, or "" if no column has any.

    Raises:
        TableError: an image is missing or is no image.

    Example:
        >>> import pandas as pd
        >>> from bayesify.tabular.files import table_of
        >>> column = ImageColumn(name="path", encoder="", sha256="", size=1)
        >>> check_images(table_of(pd.DataFrame({"path": ["no.png"]})), [column])
        Traceback (most recent call last):
        bayesify.tabular.files.errors.TableError: the data frame, row 1: there is no image no.png
    """
    names = [column.name for column in columns if isinstance(column, ImageColumn)]
    if not names:
        return ""
    digest, done, folder = hashlib.sha256(), 0, file.image_folder
    for rows in file.batches(limit, columns=names):
        for name in names:
            cells = np.array([str(cell).strip() for cell in rows.texts(name)], dtype=object)
            for place in np.flatnonzero(~is_missing(cells)).tolist():
                try:
                    content = check_image(path_of_image(folder, cells[place]))
                except DataError as error:
                    raise CellError(str(error), place).in_row(file.path, done + 1) from error
                digest.update(hashlib.sha256(content).digest())
        done += len(rows)
    return digest.hexdigest()


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
