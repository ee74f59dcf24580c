"""Data sets as tensors: found on this machine or downloaded, checked by SHA-256, never guessed.

``load_images`` for MNIST and Fashion-MNIST, ``TensorLoader`` for minibatches. ``get_file`` is
beneath the loaders; ``DataError`` is what all of them raise.
"""

from bayesify.datasets.catalog import IMAGE_DATASETS, DataSet, find_dataset
from bayesify.datasets.download import Progress, get_file
from bayesify.datasets.files import DataError, DataFile, FoundFile, find_file
from bayesify.datasets.idx import parse_idx
from bayesify.datasets.images import ImageData, load_images
from bayesify.datasets.loader import TensorLoader

__all__ = [
    "IMAGE_DATASETS",
    "DataError",
    "DataFile",
    "DataSet",
    "FoundFile",
    "ImageData",
    "Progress",
    "TensorLoader",
    "find_dataset",
    "find_file",
    "get_file",
    "load_images",
    "parse_idx",
]
