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
