"""Loader of CLINC150: what people ask an assistant, and questions outside of its 150 intents."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bayesify.datasets.catalog import CLINC150
from bayesify.datasets.download import Progress, get_file
from bayesify.datasets.files import DataError

__all__ = ["Clinc150", "Queries", "load_clinc150"]

_OUTSIDE = "oos"


@dataclass(frozen=True, eq=False)
class Queries:
    """Some queries and what they ask for.

    Args:
        texts: N queries.
        targets: the index of each one's intent, shape (N,), int64; -1 outside of them all.

    Example:
        >>> len(Queries(("what is my balance", "who won"), torch.tensor([3, -1])))
        2
    """

    texts: tuple[str, ...]
    targets: Tensor

    def __len__(self) -> int:
        """N, the number of queries."""
        return len(self.texts)


@dataclass(frozen=True, eq=False)
class Clinc150:
    """150 intents with 100, 20 and 30 queries each, and queries outside of them.

    Args:
        train: 15,000 queries.
        validation: 3,000 queries.
        test: 4,500 queries.
        outside_validation: 100 queries of no intent.
        outside_test: 1,000 queries of no intent.
        intents: the names of the 150 intents, in alphabetical order.

    Example:
        >>> one = Queries(("what is my balance",), torch.tensor([0]))
        >>> other = Queries(("who won",), torch.tensor([-1]))
        >>> data = Clinc150(one, one, one, other, other, intents=("balance",))
        >>> data.intents[data.train.targets[0]]
        'balance'
    """

    train: Queries
    validation: Queries
    test: Queries
    outside_validation: Queries
    outside_test: Queries
    intents: tuple[str, ...]


def load_clinc150(
    data_dir: str | Path | None = None, *, progress: Progress | None = None
) -> Clinc150:
    """Load CLINC150 (Larson et al. 2019, *An Evaluation Dataset for Intent Classification*).

    If the file is not on this machine it is downloaded into the user's cache. Its text is checked
    by SHA-256 on every call; see ``find_file`` for the search order.

    Args:
        data_dir: search only this directory, and do not download.
        progress: called as a download proceeds.

    Raises:
        DataError: the file is missing or damaged.

    Example:
        >>> data = load_clinc150()  # doctest: +SKIP
        >>> len(data.train), data.intents[0]  # doctest: +SKIP
        (15000, 'accept_reservations')
    """
    (file,) = CLINC150.files
    found = get_file(file, data_dir, progress=progress)
    try:
        parts: dict[str, list[list[str]]] = json.loads(found.content)
        intents = tuple(sorted({intent for _, intent in parts["train"]}))
        places = {name: place for place, name in enumerate(intents)} | {_OUTSIDE: -1}
        made = {
            name: Queries(
                tuple(text for text, _ in rows), torch.tensor([places[each] for _, each in rows])
            )
            for name, rows in parts.items()
        }
        return Clinc150(
            train=made["train"],
            validation=made["val"],
            test=made["test"],
            outside_validation=made["oos_val"],
            outside_test=made["oos_test"],
            intents=intents,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{found.path} must hold CLINC150's data_full.json; get another copy"
        ) from error
