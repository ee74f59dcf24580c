"""Encode columns of texts by the features of a pretrained network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bayesify.tabular.cells import Floats, Texts
from bayesify.tabular.columns.encoded import FeatureColumn
from bayesify.tabular.text_encoder import TextEncoder, text_encoder

__all__ = ["TextColumn"]


@dataclass(frozen=True, kw_only=True)
class TextColumn(FeatureColumn):
    """Texts: standardised features of a pretrained network."""

    kind: ClassVar[str] = "text"

    @classmethod
    def of(cls, name: str, encoder: str) -> TextColumn:
        """Return the column of a pretrained network's features.

        Raises:
            TableError: there is no such network.
        """
        network = text_encoder(encoder)
        return cls(
            name=name,
            encoder=encoder,
            sha256=network.sha256,
            reader_sha256=network.reader_sha256,
            size=network.size,
        )

    @property
    def network(self) -> TextEncoder:
        """The pretrained network."""
        return text_encoder(self.encoder)

    @property
    def longest(self) -> int:
        """Number of tokens of a text that are read."""
        return self.network.longest

    def read(self, cells: Texts) -> Floats:
        """Return the features of different texts, shape (N, F)."""
        return self.network.features(cells.tolist())
