"""Encode columns of texts as tokens, for a pretrained network that is trained with an adapter."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar, Self

import numpy as np

from bayesify.tabular.cells import Floats, Texts
from bayesify.tabular.columns.encoded import EncodedColumn
from bayesify.tabular.files import TableError
from bayesify.tabular.text_encoder import LONGEST, Tokenizer, encoder_of, tokenizer_of

__all__ = ["NO_TOKEN", "TokenColumn"]

#: Input of a place after a text's last token.
NO_TOKEN = -1.0


@dataclass(frozen=True, kw_only=True)
class TokenColumn(EncodedColumn):
    """Texts: the numbers of their tokens, as many as the longest training text has.

    What lies outside cannot be measured before the network has read a text: only a missing text
    does, where training had none.

    Args:
        sha256: of the tokenizer's vocabulary.
        weights_sha256: of the pretrained network's weights.
        size: number T of tokens.
    """

    weights_sha256: str
    size: int = LONGEST
    kind: ClassVar[str] = "token"

    @classmethod
    def of(cls, name: str, encoder: str) -> TokenColumn:
        """Return the column of a pretrained network's tokens.

        Raises:
            TableError: there is no such network with a tokenizer, or peft is not installed.
        """
        if find_spec("peft") is None:  # before minutes of reading
            raise TableError("--adapter needs peft; pip install 'bayesify[cli,adapters]'")
        tokenizer = tokenizer_of(encoder)
        _, weights = encoder_of(encoder)
        return cls(
            name=name,
            encoder=encoder,
            sha256=tokenizer.sha256,
            reader_sha256=tokenizer.reader_sha256,
            weights_sha256=weights,
        )

    def check_weights(self, found: str) -> None:
        """Check the digest of the pretrained network's weights.

        Raises:
            TableError: it is another one than in training.
        """
        self._check_digest("weights", self.weights_sha256, found)

    @property
    def network(self) -> Tokenizer:
        """The tokenizer of the pretrained network."""
        return tokenizer_of(self.encoder)

    @property
    def longest(self) -> int:
        """Number of tokens of a text that are read."""
        return min(self.size, self.network.longest)

    def read(self, cells: Texts) -> Floats:
        """Return the tokens of different texts, padded by ``NO_TOKEN``, shape (N, T)."""
        found = np.full((len(cells), self.size), NO_TOKEN)
        for row, tokens in zip(found, self.network.tokens(cells.tolist(), self.size), strict=True):
            row[: len(tokens)] = tokens
        return found

    def fit(self, values: Floats, *, tail: int = 1, weights: Floats | None = None) -> Self:
        """Set the number of inputs to the tokens of the longest training text."""
        longest = int((values >= 0.0).sum(axis=1).max(initial=1))
        return dataclasses.replace(
            super().fit(values, tail=tail, weights=weights), size=max(1, longest)
        )

    @property
    def own_features(self) -> tuple[str, ...]:
        """The places of the tokens."""
        return tuple(f"{self.name}, token {place}" for place in range(1, self.size + 1))

    def _encode(self, values: Floats) -> list[Floats]:
        return list(np.nan_to_num(values[:, : self.size], nan=NO_TOKEN).T)

    def outside(self, values: Floats) -> Floats:
        """Return inf for a missing text where training had none, and else 0."""
        return super().outside(values[:, 0])
