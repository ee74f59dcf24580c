"""Encode columns whose cells a pretrained network reads."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from bayesify.tabular.cells import Floats, Texts, by_value, is_missing
from bayesify.tabular.columns.column import LARGEST_INPUT, Column
from bayesify.tabular.columns.numbers import HUGE
from bayesify.tabular.files import CellError, TableError
from bayesify.tabular.scaling import Scaling

__all__ = ["EncodedColumn", "FeatureColumn"]


class _Encoder(Protocol):
    """A pretrained network or its tokenizer (``TextEncoder``, ``ImageEncoder``, ``Tokenizer``)."""

    #: What the digests are of.
    content: str
    reader: str
    sha256: str
    reader_sha256: str


class _FeatureEncoder(_Encoder, Protocol):
    """A pretrained network that gives each cell a number of features."""

    size: int


@dataclass(frozen=True, kw_only=True)
class EncodedColumn(Column):
    """Cells that a pretrained network reads.

    Args:
        encoder: folder of the pretrained network, or its name on Hugging Face's hub.
        sha256: of its weights, or of its tokenizer's vocabulary.
        size: number F of the values of a cell.
        reader_sha256: of its tokenizer or image processor; "" in runs of earlier versions, where it
            is not checked.
    """

    encoder: str
    sha256: str
    size: int
    reader_sha256: str = ""

    @property
    @abstractmethod
    def network(self) -> _Encoder:
        """The pretrained network, or its tokenizer.

        Raises:
            TableError: it is not there.
        """

    @abstractmethod
    def read(self, cells: Texts) -> Floats:
        """Return the values of different cells that are not missing, shape (N, F).

        Raises:
            CellError: a cell cannot be read.
        """

    def check_network(self) -> None:
        """Check that the pretrained network is there and is that of the training.

        Raises:
            TableError: it is not there, or has other weights, or another tokenizer or image
                processor.
        """
        network = self.network
        self._check_digest(network.content, self.sha256, network.sha256)
        if self.reader_sha256:
            self._check_digest(network.reader, self.reader_sha256, network.reader_sha256)

    def _check_digest(self, content: str, expected: str, found: str) -> None:
        if found != expected:
            raise TableError(
                f"the encoder {self.encoder} must have the {content} of the training, with SHA-256 "
                f"{expected}, got {found}; use that one, or train again"
            )

    def parse(self, texts: Texts) -> Floats:
        """Return the values of some cells, shape (N, F); nan for a missing one.

        Raises:
            TableError: the pretrained network is not there, or has other weights than in training.
            CellError: a cell cannot be read.
        """
        codes, unique = by_value(texts)
        known = ~is_missing(unique)
        features = np.full((len(unique), self.size), math.nan)
        if known.any():
            self.check_network()
            try:
                features[known] = self.read(unique[known])
            except CellError as error:
                code = np.flatnonzero(known)[error.place]
                raise CellError(str(error), int((codes == code).argmax())) from error
        return features[codes]

    def _parse(self, texts: Texts) -> Floats:
        return self.parse(texts)

    def _is_missing(self, values: Floats) -> npt.NDArray[np.bool_]:
        return np.isnan(values[:, 0])


@dataclass(frozen=True, kw_only=True)
class FeatureColumn(EncodedColumn):
    """Cells that a pretrained network turns into features, which are standardised.

    A cell lies outside if its features are farther from their means than those of training's cells,
    in units of their standard deviations. A text on another topic need not be.

    Args:
        means: F means of the training cells' features.
        stds: F standard deviations.
        high: root mean square of standardised features above which a cell lies outside.
        spread: interquartile range of the training cells' root mean squares.
    """

    means: tuple[float, ...] = ()
    stds: tuple[float, ...] = ()
    high: float = HUGE
    spread: float = 1.0

    @classmethod
    def of(cls, name: str, encoder: str) -> Self:
        """Return the column of a pretrained network's features.

        Raises:
            TableError: there is no such network.
        """
        bare = cls(name=name, encoder=encoder, sha256="", size=0)
        network = bare.network
        return dataclasses.replace(
            bare,
            sha256=network.sha256,
            reader_sha256=network.reader_sha256,
            size=network.size,
        )

    @property
    @abstractmethod
    def network(self) -> _FeatureEncoder:
        """The pretrained network."""

    def fit(self, values: Floats, *, tail: int = 1, weights: Floats | None = None) -> Self:
        """Add the features' means and standard deviations, and the range of their distance."""
        del weights
        known = values[~self._is_missing(values)]
        if not len(known):
            return super().fit(values)
        scaling = Scaling.of(torch.from_numpy(known))
        means, stds = (tuple(part.flatten().tolist()) for part in (scaling.shift, scaling.scale))
        column = dataclasses.replace(super().fit(values), means=means, stds=stds)
        distances = np.sort(column._distances(known))
        spread = float(np.subtract(*np.quantile(distances, (0.75, 0.25)))) or 1.0
        high = float(distances[-min(tail, len(distances))]) + spread
        return dataclasses.replace(column, high=high, spread=spread)

    @property
    def own_features(self) -> tuple[str, ...]:
        """The pretrained network's features by number."""
        return tuple(f"{self.name} {place}" for place in range(1, self.size + 1))

    def _standardised(self, values: Floats) -> Floats:
        scaled = (values - np.asarray(self.means)) / np.asarray(self.stds)
        return np.asarray(np.clip(np.nan_to_num(scaled), -LARGEST_INPUT, LARGEST_INPUT))

    def _distances(self, values: Floats) -> Floats:
        return np.asarray(np.sqrt(np.square(self._standardised(values)).mean(axis=1)))

    def _encode(self, values: Floats) -> list[Floats]:
        return list(self._standardised(values).T)

    def outside(self, values: Floats) -> Floats:
        """Return the distance beyond training's, in interquartile ranges of its distances."""
        beyond = np.maximum(self._distances(values) - self.high, 0.0) / self.spread
        return np.maximum(super().outside(values[:, 0]), beyond)
