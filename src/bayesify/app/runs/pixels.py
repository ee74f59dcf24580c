"""Read images to predict from a file of pixels."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bayesify.datasets import DataError
from bayesify.datasets.idx import parse_idx
from bayesify.io.files import one_line

__all__ = ["read_pixels"]


def read_pixels(path: Path, shape: Sequence[int], scale: float) -> Tensor:
    """Read images as inputs of a network: a row of pixels each, divided by ``scale``.

    Args:
        path: ``.npy`` of shape (N, height, width), (N, height * width) or that of one image;
            ``.csv`` with one image per row, and optionally a header and a column ``label``; or
            IDX, as MNIST's own files. CSV and IDX may be gzipped.
        shape: height and width.
        scale: divisor of the pixels in training.

    Returns:
        float32, shape (N, height * width).

    Raises:
        DataError: the file is missing or does not hold such images.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.save(f"{folder}/a.npy", np.full((3, 28, 28), 126, dtype=np.uint8))
        ...     read_pixels(Path(folder, "a.npy"), (28, 28), 126.0).mean(-1)
        tensor([1., 1., 1.])
    """
    if path.is_dir():
        raise DataError(f"{path} is a folder; name a file of it, .npy, .csv or IDX")
    if not path.is_file():
        raise DataError(f"there is no file {path}")
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if content[:6] == b"\x93NUMPY":
        pixels = _from_npy(path)
    elif content[:3] == b"\0\0\x08":
        pixels = parse_idx(content, num_dims=3, source=str(path)).numpy()
    elif b"\0" not in content:
        pixels = _from_csv(path)
    else:
        raise DataError(f"{path} must be .npy, .csv or IDX (perhaps .gz) with images' pixels")
    size = math.prod(shape)
    if pixels.shape in (tuple(shape), (size,)):
        pixels = pixels[None]
    if pixels.ndim < 2 or len(pixels) < 1 or math.prod(pixels.shape[1:]) != size:
        raise DataError(
            f"{path} must hold images of {' x '.join(map(str, shape))} = {size} pixels, got an "
            f"array of shape {tuple(pixels.shape)}"
        )
    low, high = float(pixels.min()), float(pixels.max())
    if not (low >= 0.0 and 1.0 < high <= 255.0):
        hint = "; multiply them by 255" if low >= 0.0 and high <= 1.0 else ""
        raise DataError(
            f"the pixels in {path} must be from 0 to 255, got {low:g} to {high:g}{hint}"
        )
    return torch.from_numpy(pixels.reshape(len(pixels), size).astype(np.float32)).div_(scale)


def _from_npy(path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    try:
        with path.open("rb") as file:
            pixels = np.lib.format.read_array(file, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {one_line(error)}") from error
    if not (np.issubdtype(pixels.dtype, np.floating) or np.issubdtype(pixels.dtype, np.integer)):
        raise DataError(f"{path} must hold numbers, got {pixels.dtype}")
    return np.asarray(pixels)


def _from_csv(path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    import pandas as pd

    from bayesify.tabular.files import open_table

    file = open_table(path, headless=True)
    columns = [place for place, name in enumerate(file.columns) if name.lower() != "label"]
    chunks = [chunk.iloc[:, columns] for chunk in file.chunks()]
    if not chunks:
        raise DataError(f"{path} must hold a row of pixels for each image, but has none")
    numbers = pd.concat(chunks).apply(pd.to_numeric, errors="coerce").to_numpy(np.float64)
    if np.isnan(numbers).any():
        row, column = np.argwhere(np.isnan(numbers))[0].tolist()
        raise DataError(
            f"{path} must hold numbers, but row {row + 1} has none in column {columns[column] + 1}"
        )
    return np.asarray(numbers)
