"""Encode columns of paths of images by the features of a pretrained network."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from bayesify.datasets import DataError, open_image
from bayesify.tabular.cells import Floats, Texts
from bayesify.tabular.columns.encoded import FeatureColumn
from bayesify.tabular.files import CellError, path_of_image
from bayesify.tabular.image_encoder import ImageEncoder, image_encoder

__all__ = ["ImageColumn"]

#: Images that are in memory at once.
_BATCH = 16


@dataclass(frozen=True, kw_only=True)
class ImageColumn(FeatureColumn):
    """Paths of images: standardised features of a pretrained network.

    Args:
        folder: paths are relative to it; it is not stored, since new images lie elsewhere.
    """

    folder: Path = Path()
    kind: ClassVar[str] = "image"

    @property
    def network(self) -> ImageEncoder:
        """The pretrained network."""
        return image_encoder(self.encoder)

    def within(self, folder: Path) -> Self:
        """Return the column for paths relative to another folder."""
        return dataclasses.replace(self, folder=folder)

    def read(self, cells: Texts) -> Floats:
        """Return the features of different images, shape (N, F).

        Raises:
            CellError: an image is missing or cannot be read.
        """
        parts = []
        for start in range(0, len(cells), _BATCH):
            images = []
            for place, cell in enumerate(cells[start : start + _BATCH], start=start):
                try:
                    images.append(open_image(path_of_image(self.folder, cell)))
                except DataError as error:
                    raise CellError(str(error), place) from error
            parts.append(self.network.features(images))
        return np.concatenate(parts)

    def to_json(self) -> dict[str, Any]:
        """Return the column as JSON."""
        stored = super().to_json()
        del stored["folder"]
        return stored
