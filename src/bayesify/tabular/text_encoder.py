"""Turn texts into numbers by a pretrained network, the mean of its last states over the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bayesify.tabular.pretrained_model import load_model, load_reader, sha256_of_weights

__all__ = ["TextEncoder", "text_encoder"]

_NEEDS = "a tokenizer"
#: Tokens of a text that are read at most; the attention's cost grows with their square.
_LONGEST = 256
_BATCH = 64


class TextEncoder:
    """A pretrained network of ``transformers`` and its tokenizer, neither of which is trained.

    Args:
        source: a folder with ``config.json``, weights as safetensors and a tokenizer, or the name
            of such a model on Hugging Face's hub.

    Attributes:
        size: number F of features of a text.
        sha256: of the weights.

    Raises:
        TableError: transformers is not installed, or ``source`` is no such model.
    """

    def __init__(self, source: str) -> None:
        self._tokenizer: Any = load_reader(source, "AutoTokenizer", _NEEDS)
        loaded, missing = load_model(source, _NEEDS)
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        network: Any = loaded.get_encoder() if loaded.config.is_encoder_decoder else loaded
        self._network = network
        self.size = int(loaded.config.hidden_size)
        self.sha256 = sha256_of_weights(loaded.state_dict(), without=missing)
        positions = getattr(loaded.config, "max_position_embeddings", None) or _LONGEST
        self._longest = min(_LONGEST, positions, self._tokenizer.model_max_length)

    @torch.no_grad()
    def features(self, texts: Sequence[str]) -> npt.NDArray[np.float64]:
        """Return the features of texts, of which the first 256 tokens count, shape (N, F)."""
        found = np.empty((len(texts), self.size))
        # Texts of like length together, since each is padded to the longest of its batch.
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        for start in range(0, len(order), _BATCH):
            places = order[start : start + _BATCH]
            tokens = self._tokenizer(
                [texts[place] for place in places],
                padding=True,
                truncation=True,
                max_length=self._longest,
                return_tensors="pt",
            )
            states = self._network(**tokens).last_hidden_state
            weights = tokens["attention_mask"].unsqueeze(-1).to(states.dtype)
            means = (states * weights).sum(1) / weights.sum(1).clamp_min(1.0)
            found[places] = means.double().numpy()
        return found


@lru_cache(maxsize=1)
def text_encoder(source: str) -> TextEncoder:
    """Return the encoder of a folder or a name, loaded once in a process.

    Raises:
        TableError: as :class:`TextEncoder`.
    """
    return TextEncoder(source)
