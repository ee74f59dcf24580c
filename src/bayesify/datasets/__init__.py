"""Data sets as tensors: found on this machine or downloaded, checked by SHA-256, never guessed.

``load_images`` for MNIST and Fashion-MNIST, ``load_regression`` for the nine tables on which
regression is compared, with their ``standard_splits``, ``TensorLoader`` for minibatches, ``Passes``
for several passes that count as one epoch, ``load_mushroom`` for the mushrooms of a bandit.
``get_file`` is beneath the loaders; ``DataError`` is what all of them raise.
"""

from bayesify.datasets.catalog import (
    IMAGE_DATASETS,
    MUSHROOM,
    REGRESSION_DATASETS,
    DataSet,
    find_dataset,
    known_datasets,
)
from bayesify.datasets.download import Progress, get_file
from bayesify.datasets.files import DataError, DataFile, FoundFile, find_file
from bayesify.datasets.idx import parse_idx
from bayesify.datasets.images import ImageData, find_test_inputs, load_images
from bayesify.datasets.loader import Passes, TensorLoader
from bayesify.datasets.mushroom import MushroomData, load_mushroom
from bayesify.datasets.regression import RegressionData, Split, load_regression, standard_splits

__all__ = [
    "IMAGE_DATASETS",
    "MUSHROOM",
    "REGRESSION_DATASETS",
    "DataError",
    "DataFile",
    "DataSet",
    "FoundFile",
    "ImageData",
    "MushroomData",
    "Passes",
    "Progress",
    "RegressionData",
    "Split",
    "TensorLoader",
    "find_dataset",
    "find_file",
    "find_test_inputs",
    "get_file",
    "known_datasets",
    "load_images",
    "load_mushroom",
    "load_regression",
    "parse_idx",
    "standard_splits",
]
