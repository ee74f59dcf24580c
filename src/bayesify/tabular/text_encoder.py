"""Turn texts into numbers by a pretrained network, the mean of its last states over the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bayesify.tabular.files import TableError
from bayesify.tabular.pretrained_model import (
    first_pass,
    load_model,
    load_reader,
    mean_of_tokens,
    sha256_of_json,
    sha256_of_weights,
)

__all__ = ["LONGEST", "TextEncoder", "Tokenizer", "encoder_of", "text_encoder", "tokenizer_of"]

_NEEDS = "a tokenizer"
#: Tokens of a text that are read at most; the attention's cost grows with their square.
LONGEST = 256
_BATCH = 64
#: A text that tells tokenizers apart: by case, accents, digits, signs, blanks, and their cut.
_PROBE = "The 2 Éclairs of O'Neill cost 3.50 €;  see HTTP://Ab.c/d_e-f (naïve ﬁ ½ 你好 İ)\t!\n" * 8
#: Words of the vocabulary that it reads too, at most.
_WORDS = 1000
#: Parts of the names of models whose first position is not 0.
_BEHIND_PADDING = ("roberta", "camembert", "mpnet", "longformer", "data2vec-text", "xmod", "ibert")


class Tokenizer:
    """The tokenizer of a pretrained network of ``transformers``.

    Args:
        source: as for :class:`TextEncoder`.

    Attributes:
        content: what ``sha256`` is of.
        reader: what ``reader_sha256`` is of.
        sha256: of its vocabulary.
        reader_sha256: of its vocabulary, and of the tokens of some texts.
        longest: number of tokens of a text that are read at most.

    Raises:
        TableError: transformers is not installed, or ``source`` has no tokenizer with words.
    """

    content = reader = "tokenizer"

    def __init__(self, source: str) -> None:
        self._tokenizer: Any = load_reader(source, "AutoTokenizer", _NEEDS)
        known = self._tokenizer.get_vocab()
        if set(known) <= set(self._tokenizer.all_special_tokens):
            raise TableError(
                f"the encoder {source} must have the files of its tokenizer, got a vocabulary of "
                f"{len(known)} special tokens; write it by tokenizer.save_pretrained"
            )
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        # The first tokens are read, from the first position on, whatever a model's texts end with.
        self._tokenizer.padding_side = self._tokenizer.truncation_side = "right"
        vocabulary = sorted(known.items())
        self.sha256 = sha256_of_json(vocabulary)
        positions = _positions_of(load_reader(source, "AutoConfig", _NEEDS))
        self.longest: int = min(LONGEST, self._tokenizer.model_max_length, positions)
        # By what it does: other versions of its library write its files and settings otherwise.
        some = [word.swapcase() for word, _ in vocabulary[:: 1 + len(vocabulary) // _WORDS]]
        self.reader_sha256 = sha256_of_json([vocabulary, self.tokens([_PROBE, *some], LONGEST)])

    def tokens(self, texts: Sequence[str], longest: int) -> list[list[int]]:
        """Return the numbers of the tokens of each text, at most ``longest`` of each."""
        if not texts:
            return []
        longest = min(longest, self.longest)
        found = self._tokenizer(list(texts), truncation=True, max_length=longest)
        return [list(each) for each in found["input_ids"]]

    def batch(self, texts: Sequence[str], longest: int) -> Any:
        """Return the network's inputs for texts, padded to the longest of them."""
        return self._tokenizer(
            list(texts),
            padding=True,
            truncation=True,
            max_length=min(longest, self.longest),
            return_tensors="pt",
        )


class TextEncoder:
    """A pretrained network of ``transformers`` and its tokenizer, neither of which is trained.

    Args:
        source: a folder with ``config.json``, weights as safetensors and a tokenizer, or the name
            of such a model on Hugging Face's hub.

    Attributes:
        content: what ``sha256`` is of.
        reader: what ``reader_sha256`` is of.
        size: number F of features of a text.
        sha256: of the weights.
        reader_sha256: of the tokenizer, as :class:`Tokenizer` has it.
        longest: number of tokens of a text that are read.

    Raises:
        TableError: transformers is not installed, or ``source`` is no such model.
    """

    content, reader = "weights", "tokenizer"

    def __init__(self, source: str) -> None:
        self._tokenizer = tokenizer_of(source)
        loaded, missing = load_model(source, _NEEDS)
        self._network = _reader_of(loaded)
        self.sha256 = sha256_of_weights(loaded.state_dict(), without=missing)
        self.reader_sha256 = self._tokenizer.reader_sha256
        self.longest: int = self._tokenizer.longest
        with first_pass(source, loaded, "texts"):
            self.size = self._means(["a"]).shape[1]

    def features(self, texts: Sequence[str]) -> npt.NDArray[np.float64]:
        """Return the features of texts, of which the first tokens count, shape (N, F)."""
        found = np.empty((len(texts), self.size))
        # Texts of like length together, since each is padded to the longest of its batch.
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        for start in range(0, len(order), _BATCH):
            places = order[start : start + _BATCH]
            found[places] = self._means([texts[place] for place in places])
        return found

    @torch.no_grad()
    def _means(self, texts: Sequence[str]) -> npt.NDArray[np.float64]:
        tokens = self._tokenizer.batch(texts, self.longest)
        states = self._network(**tokens).last_hidden_state
        means = mean_of_tokens(states, tokens["attention_mask"])
        return np.asarray(means.double().numpy())


@lru_cache(maxsize=1)
def text_encoder(source: str) -> TextEncoder:
    """Return the encoder of a folder or a name, loaded once in a process.

    Raises:
        TableError: as :class:`TextEncoder`.
    """
    return TextEncoder(source)


@lru_cache(maxsize=1)
def tokenizer_of(source: str) -> Tokenizer:
    """Return the tokenizer of a folder or a name, loaded once in a process.

    Raises:
        TableError: as :class:`Tokenizer`.
    """
    return Tokenizer(source)


def encoder_of(source: str) -> tuple[Any, str]:
    """Load the network that reads texts, frozen, to train an adapter within it.

    Returns:
        The network, and the digest of its weights.

    Raises:
        TableError: as :class:`TextEncoder`.
    """
    loaded, missing = load_model(source, _NEEDS)
    digest = sha256_of_weights(loaded.state_dict(), without=missing)
    network = _reader_of(loaded)
    # A pooler that the file lacks is random, and is not used.
    if getattr(network, "pooler", None) is not None:
        network.pooler = None
    return network, digest


def _reader_of(loaded: Any) -> Any:
    return loaded.get_encoder() if loaded.config.is_encoder_decoder else loaded


def _positions_of(config: Any) -> int:
    """Return how many tokens a model has positions for; ``LONGEST`` where nothing tells."""
    positions: int | None = getattr(config, "max_position_embeddings", None)
    if not positions or positions < 1:
        return LONGEST
    # These count positions from the one behind that of padding.
    is_behind = any(kind in config.model_type for kind in _BEHIND_PADDING)
    return positions - (config.pad_token_id + 1 if is_behind else 0)
