"""Loader of MNIST and Fashion-MNIST as tensors in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bayesify.datasets.catalog import IMAGE_DATASETS, DataSet, find_dataset
from bayesify.datasets.download import Progress, get_file
from bayesify.datasets.files import DataError, FoundFile, find_file
from bayesify.datasets.idx import parse_idx

__all__ = ["ImageData", "find_test_inputs", "load_images"]

_IMAGE_SHAPE = (28, 28)
#: Blundell et al. 2015, section 5.1: "divided by 126".
_PIXEL_SCALE = 126.0


@dataclass(frozen=True, eq=False)
class ImageData:
    """A data set of labelled images, each flattened to one row.

    ``inputs.unflatten(-1, data.image_shape)`` restores the images; multiplied by ``pixel_scale``
    their pixels lie from 0 to 255.

    Example:
        >>> data = load_images("mnist", limit=5)
        >>> pixels = data.train_inputs.unflatten(-1, data.image_shape) * data.pixel_scale
        >>> pixels.shape, round(float(pixels.max()))
        (torch.Size([5, 28, 28]), 255)
    """

    #: Name of the data set, as in ``load_images``.
    name: str
    #: (N, 784) float32, pixels / ``pixel_scale``.
    train_inputs: Tensor
    #: (N,) int64, indices into ``class_names``.
    train_targets: Tensor
    #: (N_test, 784) float32.
    test_inputs: Tensor
    #: (N_test,) int64.
    test_targets: Tensor
    #: Name of each class.
    class_names: tuple[str, ...]
    #: Height and width, in pixels.
    image_shape: tuple[int, int] = _IMAGE_SHAPE
    #: Number by which the pixels were divided.
    pixel_scale: float = _PIXEL_SCALE


def load_images(
    name: str,
    data_dir: str | Path | None = None,
    *,
    limit: int | None = None,
    progress: Progress | None = None,
) -> ImageData:
    """Load a data set of images; if it is not on this machine, download it into the user's cache.

    Every file is checked by SHA-256 on every call; see ``find_file`` for the search order.

    Args:
        name: ``"mnist"`` or ``"fashion-mnist"``.
        data_dir: search only this directory, and do not download.
        limit: keep only the first ``limit`` training images; all test images are kept.
        progress: called as a download proceeds.

    Raises:
        DataError: the name is unknown, ``limit`` is out of range, a file is missing or damaged,
            or images and labels do not match.

    Example:
        >>> data = load_images("mnist", limit=5)
        >>> data.train_inputs.shape, data.train_targets
        (torch.Size([5, 784]), tensor([5, 0, 4, 1, 9]))
    """
    dataset = find_dataset(name, IMAGE_DATASETS)
    if limit is not None and limit < 1:
        raise DataError(f"limit must be at least 1, got {limit}")
    files = [get_file(file, data_dir, progress=progress) for file in dataset.files]
    train_pixels, train_targets = _parse_pair(dataset, *files[:2])
    test_pixels, test_targets = _parse_pair(dataset, *files[2:])
    if limit is not None and limit > len(train_pixels):
        raise DataError(
            f"limit must be at most {len(train_pixels)}, the number of training images of {name}, "
            f"got {limit}"
        )
    return ImageData(
        name,
        _to_inputs(train_pixels[:limit]),
        train_targets[:limit],
        _to_inputs(test_pixels),
        test_targets,
        dataset.class_names,
    )


def find_test_inputs(name: str, data_dir: str | Path | None = None) -> Tensor | None:
    """Find the test inputs of a data set of images on this machine, shape (N_test, 784).

    Nothing is downloaded. A file with another checksum counts as absent: MNIST and Fashion-MNIST
    share their file names, so that a directory for one may hold files named as the other's.

    Args:
        name: as for :func:`load_images`.
        data_dir: search only this directory.

    Raises:
        DataError: the name is unknown.

    Example:
        >>> found = find_test_inputs("mnist")
        >>> None if found is None else found.shape
        torch.Size([10000, 784])
    """
    dataset = find_dataset(name, IMAGE_DATASETS)
    try:
        images, labels = (find_file(file, data_dir) for file in dataset.files[2:])
        if images is None or labels is None:
            return None
        return _to_inputs(_parse_pair(dataset, images, labels)[0])
    except DataError:
        return None


def _parse_pair(dataset: DataSet, images: FoundFile, labels: FoundFile) -> tuple[Tensor, Tensor]:
    pixels = parse_idx(images.content, num_dims=3, source=str(images.path))
    targets = parse_idx(labels.content, num_dims=1, source=str(labels.path)).to(torch.int64)
    if pixels.shape[1:] != _IMAGE_SHAPE:
        raise DataError(
            f"{images.path} must hold images of {_IMAGE_SHAPE} pixels, got "
            f"{tuple(pixels.shape[1:])}"
        )
    if len(pixels) != len(targets):
        raise DataError(
            f"{images.path} and {labels.path} must hold as many images as labels, got "
            f"{len(pixels)} and {len(targets)}"
        )
    outside = (targets >= len(dataset.class_names)).nonzero()
    if len(outside):
        first = int(outside[0])
        raise DataError(
            f"{labels.path} must hold labels from 0 to {len(dataset.class_names) - 1}, got "
            f"{len(outside)} outside, the first {int(targets[first])} at index {first}"
        )
    return pixels, targets


def _to_inputs(pixels: Tensor) -> Tensor:
    return pixels.flatten(1).to(torch.float32).div_(_PIXEL_SCALE)
