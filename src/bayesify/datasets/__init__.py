"""Data sets as tensors: found on this machine or downloaded, and checked by SHA-256.

``load_images`` loads MNIST and Fashion-MNIST; ``load_regression`` loads the nine regression tables
of Hernandez-Lobato and Adams (2015), ``standard_splits`` their splits, and ``gap_splits`` splits
whose test part lies between the training rows; ``load_mushroom`` loads the data of the mushroom
bandit, and ``load_clinc150`` queries to an assistant.
``find_labelled_images`` finds your own images in a folder with one subfolder a class, and
``fit_labelled_images`` reads them, or files of images whose classes are known otherwise.
``TensorLoader`` yields minibatches; ``Passes`` joins several passes into one epoch, and
``AugmentedImages`` shifts, turns, scales and shears images at random. The loaders call
``get_file``, and raise ``DataError``.
"""

from bayesify.datasets.augmentation import AugmentedImages, random_affine
from bayesify.datasets.catalog import (
    CLINC150,
    IMAGE_DATASETS,
    MUSHROOM,
    REGRESSION_DATASETS,
    DataSet,
    find_dataset,
    known_datasets,
)
from bayesify.datasets.clinc150 import Clinc150, Queries, load_clinc150
from bayesify.datasets.download import Progress, get_file
from bayesify.datasets.files import DataError, DataFile, FoundFile, find_file
from bayesify.datasets.idx import parse_idx
from bayesify.datasets.image_files import (
    check_image,
    find_images_and_remarks,
    open_image,
    thumbnail,
)
from bayesify.datasets.image_folder import find_labelled_images
from bayesify.datasets.images import ImageData, find_test_inputs, load_images
from bayesify.datasets.labelled_images import (
    FolderData,
    ImageSchema,
    LabelledImages,
    fit_labelled_images,
    load_labelled_images,
)
from bayesify.datasets.loader import Passes, TensorLoader
from bayesify.datasets.mushroom import MushroomData, load_mushroom
from bayesify.datasets.regression import (
    RegressionData,
    Split,
    gap_splits,
    load_regression,
    standard_splits,
)

__all__ = [
    "CLINC150",
    "IMAGE_DATASETS",
    "MUSHROOM",
    "REGRESSION_DATASETS",
    "AugmentedImages",
    "Clinc150",
    "DataError",
    "DataFile",
    "DataSet",
    "FolderData",
    "FoundFile",
    "ImageData",
    "ImageSchema",
    "LabelledImages",
    "MushroomData",
    "Passes",
    "Progress",
    "Queries",
    "RegressionData",
    "Split",
    "TensorLoader",
    "check_image",
    "find_dataset",
    "find_file",
    "find_images_and_remarks",
    "find_labelled_images",
    "find_test_inputs",
    "fit_labelled_images",
    "gap_splits",
    "get_file",
    "known_datasets",
    "load_clinc150",
    "load_images",
    "load_labelled_images",
    "load_mushroom",
    "load_regression",
    "open_image",
    "parse_idx",
    "random_affine",
    "standard_splits",
    "thumbnail",
]
