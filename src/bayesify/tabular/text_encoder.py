"""Turn texts into numbers by a pretrained network, the mean of its last states over the tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bayesify.tabular.files import TableError

__all__ = ["TextEncoder", "quiet_transformers", "text_encoder"]

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
        if find_spec("transformers") is None:
            raise TableError(
                "--encoder needs transformers; pip install 'bayesify[cli,transformers]'"
            )
        from transformers import AutoModel, AutoTokenizer

        try:
            with quiet_transformers():
                self._tokenizer: Any = AutoTokenizer.from_pretrained(source)
                # Weights of other formats are pickles.
                loaded, told = AutoModel.from_pretrained(
                    source, use_safetensors=True, output_loading_info=True, dtype=torch.float32
                )
        except Exception as error:  # transformers raises errors of many kinds
            reason = " ".join(str(error).split())
            raise TableError(
                f"--encoder {source} must be the folder, or the name on Hugging Face's hub, of a "
                "transformers model with a tokenizer and weights as safetensors "
                f"({reason[:200] or type(error).__name__})"
            ) from error
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        network: Any = loaded.get_encoder() if loaded.config.is_encoder_decoder else loaded
        self._network = network.eval().requires_grad_(requires_grad=False)
        self.size = int(loaded.config.hidden_size)
        self.sha256 = _sha256_of(loaded.state_dict(), without=told["missing_keys"])
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


def _sha256_of(tensors: dict[str, torch.Tensor], without: Sequence[str]) -> str:
    """Return the digest of weights; those that the file lacks, such as a pooler's, are random."""
    digest = hashlib.sha256()
    for name in sorted(set(tensors) - set(without)):
        digest.update(name.encode())
        values: Any = tensors[name].detach().contiguous().flatten().numpy()
        digest.update(values)
    return digest.hexdigest()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers from standard error, where a command shows its progress."""
    from transformers.utils import logging

    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()
