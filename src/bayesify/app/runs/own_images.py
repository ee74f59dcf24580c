"""Images that a run did not train on, to predict or to measure by."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bayesify.app.runs.defaults import is_table_file
from bayesify.app.runs.run_files import RunError
from bayesify.datasets import (
    DataError,
    ImageSchema,
    LabelledImages,
    find_images_and_remarks,
    find_labelled_images,
)

__all__ = ["NewImages"]

_AT_ONCE = 256
#: Classes that an error message names.
_MOST_NAMED = 10


@dataclass(frozen=True, eq=False)
class NewImages:
    """Images that a run did not train on, as its network reads them.

    Args:
        schema: how an image becomes an input.
        found: their files; a label is "" where the class is not known.
        has_classes: whether there are classes to measure by.
    """

    schema: ImageSchema
    found: LabelledImages
    has_classes: bool

    @classmethod
    def to_predict(cls, path: Path, schema: ImageSchema) -> NewImages:
        """Find an image, the images of a folder, or those that a table names.

        Raises:
            RunError: a table is given to a run whose images were those of a folder.
            DataError, TableError: there is no image, or the table cannot be used.
        """
        if _is_table(path):
            return cls._of_table(path, schema)
        paths, remarks = ([path], ()) if path.is_file() else find_images_and_remarks(path)
        folder = path.parent if path.is_file() else path
        names = tuple(each.relative_to(folder).as_posix() for each in paths)
        found = LabelledImages(path, tuple(paths), ("",) * len(paths), names, remarks=remarks)
        return cls(schema, found, has_classes=False)

    @classmethod
    def to_measure(cls, path: Path, schema: ImageSchema) -> NewImages:
        """Find the images of a table, or of a folder with one subfolder for each class.

        Raises:
            RunError: none has a class of the run; or as :meth:`to_predict`.
            DataError, TableError: the folder or the table cannot be used.
        """
        if _is_table(path):
            new = cls._of_table(path, schema)
        else:
            new = cls(schema, find_labelled_images(path), has_classes=True)
        if not new.has_classes:
            assert schema.columns is not None
            raise RunError(
                f"{path} has no column {schema.columns[1]!r}, the classes to measure by; add it, "
                "or use bayesify predict"
            )
        if not set(new.found.labels) & set(schema.classes):
            some = ", ".join(schema.classes[:_MOST_NAMED])
            more = ", ..." if len(schema.classes) > _MOST_NAMED else ""
            raise RunError(f"{path} must have images of the classes {some}{more}, got none")
        return new

    @classmethod
    def _of_table(cls, path: Path, schema: ImageSchema) -> NewImages:
        from bayesify.tabular.image_table import read_image_table

        if schema.columns is None:
            raise RunError(
                f"{path} is a table, but the run's own images are those of a folder; give an image "
                "or a folder"
            )
        image, target = schema.columns
        table = read_image_table(path, image=image, target=target)
        count = len(table.paths)
        labels = ("",) * count if table.labels is None else table.labels
        rows = tuple(range(1, count + 1))
        found = LabelledImages(path, table.paths, labels, table.cells, rows, schema.columns)
        for place, each in enumerate(table.paths):  # before minutes of predicting
            if not each.is_file():
                with found.naming(place):
                    raise DataError(f"there is no image {each}")
        return cls(schema, found, has_classes=table.labels is not None)

    @property
    def names(self) -> Sequence[str]:
        """A table's cells, or the paths within a folder."""
        return self.found.keys

    @property
    def rows_not_measured(self) -> str | None:
        """One line on the images that have no class, or one that is new; None if there are none."""
        known, labels = set(self.schema.classes), self.found.labels
        absent = labels.count("")
        new = sum(label not in known for label in labels) - absent
        parts = [f"{absent:,} without a class"] if absent else []
        parts += [f"{new:,} of a class that training did not have"] if new else []
        return f"images that are not measured: {', '.join(parts)}" if parts else None

    def chunks(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Read the images, some at a time.

        Yields:
            Inputs (N, D) and their classes, float64 indices with nan where one is not known, shape
            (N,); None without classes.

        Raises:
            DataError: an image cannot be read.
        """
        places = {name: float(place) for place, name in enumerate(self.schema.classes)}
        targets = [places.get(label, math.nan) for label in self.found.labels]
        for start in range(0, len(self.found.paths), _AT_ONCE):
            part = range(start, min(start + _AT_ONCE, len(self.found.paths)))
            inputs = []
            for place in part:
                with self.found.naming(place):
                    inputs.append(self.schema.inputs([self.found.paths[place]]))
            known = torch.tensor(targets[part.start : part.stop], dtype=torch.float64)
            yield torch.cat(inputs), known if self.has_classes else None


def _is_table(path: Path) -> bool:
    return is_table_file(path.name) and not path.is_dir()
