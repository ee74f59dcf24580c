"""Turn the examples of a request into inputs of a table's network, and find those outside."""

from __future__ import annotations

import io
import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bayesify.app.serve import model
from bayesify.app.serve.images import PixelLimit, groups, image_file
from bayesify.app.serve.model import Batch
from bayesify.app.serve.requests import Examples, InputError
from bayesify.app.serve.rows import RowReader
from bayesify.datasets import DataError, open_image
from bayesify.tabular.cells import Floats, Texts
from bayesify.tabular.columns import Column, EncodedColumn, ImageColumn
from bayesify.tabular.schema import TableSchema

__all__ = ["RequestRows", "RowInputs"]

#: Images in one pass of their network.
_IMAGES_AT_ONCE = 16


class RowInputs(NamedTuple):
    """Rows as the network takes them.

    Args:
        inputs: inputs of the network, shape (N, D).
        distances: how far each row lies outside the training data, shape (N,).
        outside: for each row the column in which it lies farthest outside, or "".
    """

    inputs: Tensor
    distances: Tensor
    outside: list[str]


class RequestRows:
    """Reader of examples for the network of a table's run.

    Args:
        schema: schema of the training table.
        only_images: whether an example is an image file and no row, as of a folder of images.

    Raises:
        TableError: a pretrained network of a column is not there, or is not that of the training.

    Example:
        >>> from bayesify.tabular.columns import NumberColumn
        >>> from bayesify.tabular.schema import Target
        >>> columns = (NumberColumn(name="x", low=0.0, high=3.0, spread=1.0),)
        >>> inputs = RequestRows(TableSchema(columns, Target("y", "regression")))
        >>> inputs.encode(inputs.read(Examples([{"x": 1.5}, {"x": 90}]))).outside
        ['', 'x']
    """

    def __init__(self, schema: TableSchema, *, only_images: bool = False) -> None:
        for column in schema.columns:
            if isinstance(column, EncodedColumn):
                column.check_network()
        self._schema = schema
        unused = [*schema.dropped, *schema.carried, schema.target.name]
        self._rows = RowReader(schema.columns, unused)
        self.only_images = only_images

    @property
    def columns(self) -> list[model.Column]:
        """Descriptions of the columns that a row must have."""
        return [] if self.only_images else self._rows.columns

    @property
    def unused(self) -> list[str]:
        """Names that a row may have and that are not read."""
        return [] if self.only_images else self._rows.unused

    def read(self, examples: Examples) -> Batch:
        """Return the values of each column by its place, texts and image files as they are.

        Raises:
            InputError: an example is not as the training table's rows were.
        """
        if self.only_images:
            limit = PixelLimit()
            files = [
                image_file(item, ("examples", place), limit)
                for place, item in enumerate(examples.items)
            ]
            return {"0": np.array(files, dtype=object)}
        return {str(place): values for place, values in enumerate(self._rows.read(examples))}

    def encode(self, batch: Batch) -> RowInputs:
        """Return the inputs of the network; pretrained networks read texts and images.

        Raises:
            InputError: an image cannot be decoded.
        """
        schema = self._schema
        values = [
            self._values(column, each)
            for column, each in zip(schema.columns, batch.values(), strict=True)
        ]
        distances = schema.outside(values)
        return RowInputs(
            torch.from_numpy(schema.encode(values)),
            torch.from_numpy(distances.max(axis=1)),
            schema.worst(distances).tolist(),
        )

    def _values(self, column: Column, cells: npt.NDArray[Any]) -> Floats:
        if isinstance(column, ImageColumn):
            return self._features(column, cells)
        return column.parse(cells) if isinstance(column, EncodedColumn) else cells

    def _features(self, column: ImageColumn, files: Texts) -> Floats:
        """Return the features of image files, nan for None, shape (N, F)."""
        found = np.full((len(files), column.size), math.nan)
        known = [place for place, file in enumerate(files) if file is not None]
        for group in groups([files[place] for place in known], _IMAGES_AT_ONCE):
            places, images = [known[each] for each in group], []
            for place in places:
                try:
                    images.append(open_image(io.BytesIO(files[place])))
                except DataError as error:
                    path = ("examples", place, *(() if self.only_images else (column.name,)))
                    raise InputError(path, str(error)) from error
            found[places] = column.network.features(images)
        return found
