"""Loader of the UCI Mushroom data: features of mushrooms, and which are poisonous."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bayesify.datasets.catalog import MUSHROOM
from bayesify.datasets.download import Progress, get_file
from bayesify.datasets.files import DataError

__all__ = ["MushroomData", "load_mushroom"]

#: In the order of the file's columns after the first, which is the class.
_FEATURES = (
    "cap-shape",
    "cap-surface",
    "cap-color",
    "bruises",
    "odor",
    "gill-attachment",
    "gill-spacing",
    "gill-size",
    "gill-color",
    "stalk-shape",
    "stalk-root",
    "stalk-surface-above-ring",
    "stalk-surface-below-ring",
    "stalk-color-above-ring",
    "stalk-color-below-ring",
    "veil-type",
    "veil-color",
    "ring-number",
    "ring-type",
    "spore-print-color",
    "population",
    "habitat",
)
_CLASSES = {"e": False, "p": True}


@dataclass(frozen=True, eq=False)
class MushroomData:
    """8,124 mushrooms with 22 one-hot features, 117 columns in all.

    Args:
        contexts: shape (8124, 117), float32, zeros and ones.
        poisonous: shape (8124,), bool.
        names: names of the columns, such as ``odor=f``, with the file's letters in alphabetical
            order; ``stalk-root=?``, an unknown root, is a value like the others.

    Example:
        >>> data = load_mushroom()
        >>> foul = data.contexts[:, data.names.index("odor=f")] == 1
        >>> bool(data.poisonous[foul].all())
        True
    """

    contexts: Tensor
    poisonous: Tensor
    names: tuple[str, ...]


def load_mushroom(
    data_dir: str | Path | None = None, *, progress: Progress | None = None
) -> MushroomData:
    """Load the Mushroom data of the UCI repository (Schlimmer 1981).

    If the file is not on this machine it is downloaded into the user's cache. Its uncompressed
    text is checked by SHA-256 on every call; see ``find_file`` for the search order.

    Args:
        data_dir: search only this directory, and do not download.
        progress: called as a download proceeds.

    Raises:
        DataError: the file is missing or damaged.

    Example:
        >>> data = load_mushroom()
        >>> data.contexts.shape, int(data.poisonous.sum()), data.names[0]
        (torch.Size([8124, 117]), 3916, 'cap-shape=b')
        >>> bool((data.contexts.sum(1) == 22).all())
        True
    """
    (file,) = MUSHROOM.files
    found = get_file(file, data_dir, progress=progress)
    rows = [line.split(",") for line in found.content.decode("ascii").split()]
    width = 1 + len(_FEATURES)
    if not rows or any(len(row) != width or row[0] not in _CLASSES for row in rows):
        raise DataError(
            f"{found.path} must hold lines of {width} letters, the first e or p; get another copy"
        )
    letters = np.array([row[1:] for row in rows])
    parts, names = [], []
    for column, feature in enumerate(_FEATURES):
        values = np.unique(letters[:, column])
        parts.append(letters[:, column, None] == values)
        names += [f"{feature}={value}" for value in values]
    contexts = torch.from_numpy(np.concatenate(parts, 1).astype(np.float32))
    poisonous = torch.tensor([_CLASSES[row[0]] for row in rows])
    return MushroomData(contexts, poisonous, tuple(names))
