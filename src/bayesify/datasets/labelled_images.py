"""Images of your own with the name of each one's class: how an image becomes an input."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesify.datasets.files import DataError
from bayesify.datasets.image_files import image_bytes, image_kind, middle_square, open_image
from bayesify.io.documents import read_document, write_document
from bayesify.noise.arguments import whole_number
from bayesify.noise.keys import Stream, derived_seed

__all__ = [
    "IMAGES_NAME",
    "FolderData",
    "ImageSchema",
    "LabelledImages",
    "OnImages",
    "fit_labelled_images",
    "load_labelled_images",
]

IMAGES_NAME = "images.json"
#: Called with the number of images that were read, and of all.
OnImages = Callable[[int, int], None]

#: Images whose side is at most this are not scaled.
_SMALL = 32
_FEWEST = 2
_FORMAT = 1


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """Files of images, each with the name of its class.

    Args:
        source: the folder or table that names them.
        paths: N files.
        labels: N names of classes.
        keys: N texts that, with the files' content, identify the data.
        rows: of a table the number of each image's row, from 1; none of a folder.
        columns: of a table the names of the columns of paths and of classes.
        remarks: notes for the user on how they were found.

    Example:
        >>> found = LabelledImages(Path("a.csv"), (Path("x.png"),), ("cat",), ("x.png",), (7,))
        >>> with found.naming(0):
        ...     raise DataError("x.png cannot be read")
        Traceback (most recent call last):
        bayesify.datasets.files.DataError: a.csv, row 7: x.png cannot be read
    """

    source: Path
    paths: tuple[Path, ...]
    labels: tuple[str, ...]
    keys: tuple[str, ...]
    rows: tuple[int, ...] = ()
    columns: tuple[str, str] | None = None
    remarks: tuple[str, ...] = ()

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, sorted."""
        return tuple(sorted(set(self.labels)))

    @property
    def targets(self) -> Tensor:
        """Index of each image's class, shape (N,), int64."""
        places = {name: place for place, name in enumerate(self.classes)}
        return torch.tensor([places[label] for label in self.labels])

    @contextmanager
    def naming(self, place: int) -> Iterator[None]:
        """Add the row of a table to an error about an image.

        Raises:
            DataError: the error about the image.
        """
        try:
            yield
        except DataError as error:
            if not self.rows:
                raise
            raise DataError(f"{self.source}, row {self.rows[place]:,}: {error}") from error

    def check(self) -> None:
        """Check that there are enough images to train on and to hold out.

        Raises:
            DataError: there are fewer than two classes, or fewer than two images of one.
        """
        counts = Counter(self.labels)
        where = "each in a subfolder"
        if self.columns is not None:
            where = f"named in the column {self.columns[1]!r}"
        if len(counts) < 2:
            raise DataError(
                f"{self.source} must have images of at least two classes, {where}, got "
                f"{''.join(counts) + ' alone' if counts else 'none'}"
            )
        few = [name for name in self.classes if counts[name] < _FEWEST]
        if few:
            raise DataError(
                f"each class of {self.source} must have at least {_FEWEST} images, one to train on "
                f"and one to hold out, got {counts[few[0]]} of {few[0]}"
            )

    def sha256(self) -> str:
        """Return the digest of all images and their keys.

        Raises:
            DataError: one cannot be read.
        """
        digest = hashlib.sha256()
        for place, path in enumerate(self.paths):
            with self.naming(place):
                digest.update(self.keys[place].encode(errors="surrogateescape"))
                digest.update(hashlib.sha256(image_bytes(path)).digest())
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class FolderData:
    """Images of a folder or of a table of paths as tensors, a training and a held-out part.

    Example:
        >>> x, y = torch.zeros(2, 64), torch.tensor([0, 1])
        >>> data = FolderData("photos", x, y, x, y, ("cat", "dog"), (1, 8, 8))
        >>> data.train_inputs.unflatten(1, data.image_shape).shape
        torch.Size([2, 1, 8, 8])
    """

    #: Name of the folder or the table.
    name: str
    #: (N, channels * height * width) float32, standardised by channel.
    train_inputs: Tensor
    #: (N,) int64, indices into ``class_names``.
    train_targets: Tensor
    #: (N_test, channels * height * width) float32.
    test_inputs: Tensor
    #: (N_test,) int64.
    test_targets: Tensor
    #: Name of each class.
    class_names: tuple[str, ...]
    #: Channels, height and width.
    image_shape: tuple[int, int, int]


@dataclass(frozen=True)
class ImageSchema:
    """Settings that turn images into inputs, and the held-out part.

    An image is rotated as its EXIF data tell, what is transparent becomes white, it is scaled until
    its shorter side is ``size``, cropped to the middle square, and standardised by the training
    images' mean and standard deviation of each channel.

    Args:
        classes: the names of the classes.
        size: height and width of an input.
        channels: 1 for images in grey, 3 for colour.
        mean: of each channel, from 0 to 1.
        std: of each channel.
        sha256: of all images with their paths.
        split: ``seed`` and ``fraction``, from which the held-out part follows; ``limit``; and how
            many images are for ``train`` and ``test``.
        remarks: notes for the user on how the images were found.
        columns: of a table the names of the columns of paths and of classes; None for a folder.

    Example:
        >>> schema = ImageSchema(("cat", "dog"), 8, 1, (0.5,), (0.25,), "0" * 64, {})
        >>> white = torch.full((1, 1, 8, 8), 255, dtype=torch.uint8)
        >>> schema.image_shape, schema.standardised(white).unique()
        ((1, 8, 8), tensor([2.]))
    """

    classes: tuple[str, ...]
    size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    sha256: str
    split: Mapping[str, Any]
    remarks: tuple[str, ...] = ()
    columns: tuple[str, str] | None = None

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an input."""
        return self.channels, self.size, self.size

    def inputs(self, paths: Iterable[Path]) -> Tensor:
        """Read images as inputs, shape (N, channels * size * size), float32.

        Raises:
            DataError: one cannot be read.
        """
        return self.standardised(self.pixels(paths))

    def pixels(self, files: Iterable[Path | BytesIO]) -> Tensor:
        """Read images as squares, shape (N, channels, size, size), uint8.

        Raises:
            DataError: one cannot be read.
        """
        return torch.stack(
            [middle_square(open_image(file), self.size, self.channels) for file in files]
        )

    def standardised(self, pixels: Tensor) -> Tensor:
        """Return inputs (N, channels * size * size) for pixels (N, channels, size, size)."""
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return ((pixels.to(torch.float32) / 255.0 - mean) / std).flatten(1)

    def save(self, folder: Path) -> None:
        """Write ``images.json``, whole or not at all."""
        write_document(folder / IMAGES_NAME, {"format": _FORMAT, **asdict(self)})

    @classmethod
    def load(cls, folder: Path) -> ImageSchema:
        """Read ``images.json``.

        Raises:
            DataError: it is missing, was altered or cannot be read.
        """
        path = folder / IMAGES_NAME
        try:
            stored = read_document(path)
            if stored.pop("format") != _FORMAT:
                raise DataError(f"{path} must have format {_FORMAT}; read it by its own version")
            lists = {name: tuple(stored[name]) for name in ("classes", "mean", "std", "remarks")}
            columns = stored.get("columns")  # runs of a folder of earlier versions have none
            named = None if columns is None else tuple(columns)
            return cls(**{**stored, **lists, "columns": named})
        except FileNotFoundError as error:
            raise DataError(f"there is no {path}, which describes the run's images") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error


def fit_labelled_images(
    found: LabelledImages,
    *,
    size: int | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    limit: int | None = None,
    on_images: OnImages | None = None,
) -> tuple[FolderData, ImageSchema]:
    """Read images of your own, and hold out a part of each class.

    Args:
        found: their files and classes.
        size: height and width of an input; None keeps that of images that are all squares of one
            size of at most 32 pixels, and is 32 for others.
        test_fraction: part of each class that is held out, strictly between 0 and 1.
        seed: the held-out images are a function of it.
        limit: use only this number of training images.
        on_images: called as images are read.

    Raises:
        DataError: Pillow is not installed, there are fewer than two classes, a class has fewer
            than two images, or an image cannot be read.
        ValueError: ``test_fraction`` is not strictly between 0 and 1, or ``size`` or ``limit`` is
            below 1.
        TypeError: ``size`` or ``limit`` is no whole number.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     names = [f"{place}.png" for place in range(4)]
        ...     paths = tuple(Path(folder, name) for name in names)
        ...     for place, path in enumerate(paths):
        ...         Image.new("L", (8, 8), 60 * place).save(path)
        ...     labels = ("dark", "dark", "light", "light")
        ...     found = LabelledImages(Path(folder), paths, labels, tuple(names))
        ...     data, schema = fit_labelled_images(found)
        >>> data.train_inputs.shape, data.test_targets, schema.image_shape
        (torch.Size([2, 64]), tensor([0, 1]), (1, 8, 8))
    """
    if not 0.0 < test_fraction < 1.0:
        raise ValueError(f"test_fraction must lie strictly between 0 and 1, got {test_fraction}")
    # Of Python, as JSON knows no numbers of NumPy.
    test_fraction, seed = float(test_fraction), whole_number("seed", seed, None)
    size = None if size is None else whole_number("size", size)
    limit = None if limit is None else whole_number("limit", limit)
    if find_spec("PIL") is None:
        raise DataError("images need Pillow; pip install 'bayesify[cli,images]'")
    found.check()
    kinds = set()
    for place, path in enumerate(found.paths):
        with found.naming(place):
            kinds.add(image_kind(path))
    sides = {side for width, height, _ in kinds for side in (width, height)}
    if size is None:
        size = min(sides) if len(sides) == 1 and min(sides) <= _SMALL else _SMALL
    channels = 3 if any(is_coloured for *_, is_coloured in kinds) else 1
    targets = found.targets
    train, test = _split(targets, test_fraction, seed)
    if limit is not None and limit > len(train):
        raise DataError(
            f"limit must be at most {len(train)}, the number of training images, got {limit}"
        )
    train = train[:limit].sort().values
    pixels = _all_pixels(found, size, channels, on_images)
    known = pixels[train].to(torch.float64).transpose(0, 1).flatten(1) / 255.0
    schema = ImageSchema(
        classes=found.classes,
        size=size,
        channels=channels,
        mean=tuple(known.mean(1).tolist()),
        std=tuple(known.std(1).clamp_min(1e-3).tolist()),
        sha256=found.sha256(),
        split={
            "seed": seed,
            "fraction": test_fraction,
            "limit": limit,
            "train": len(train),
            "test": len(test),
        },
        remarks=found.remarks,
        columns=found.columns,
    )
    return _data(found, schema, pixels, train, test), schema


def load_labelled_images(
    found: LabelledImages, schema: ImageSchema, on_images: OnImages | None = None
) -> FolderData:
    """Read again the images that a schema was fitted to: the same ones, the same held-out part.

    Args:
        found: the images that lie there now.
        schema: the settings of the earlier reading.
        on_images: called with the number of images read so far and the number of all.

    Returns:
        Inputs of shape (N, channels * height * width), standardised by channel, and targets of
        shape (N,), for training and held out.

    Raises:
        DataError: they have changed, or one cannot be read.

    Example:
        >>> nothing = LabelledImages(Path("photos"), (), (), ())
        >>> schema = ImageSchema(("a", "b"), 8, 1, (0.5,), (0.2,), "0" * 64, {})
        >>> load_labelled_images(nothing, schema)
        Traceback (most recent call last):
        bayesify.datasets.files.DataError: the images in photos were changed after the run was ...
    """
    sha256 = found.sha256()
    if sha256 != schema.sha256:
        what = "images of" if found.rows else "images in"
        raise DataError(
            f"the {what} {found.source} were changed after the run was made: their SHA-256 must be "
            f"{schema.sha256}, got {sha256}; use them as they were, or train again"
        )
    train, test = _split(found.targets, schema.split["fraction"], schema.split["seed"])
    train = train[: schema.split["limit"]].sort().values
    pixels = _all_pixels(found, schema.size, schema.channels, on_images)
    return _data(found, schema, pixels, train, test)


def _data(
    found: LabelledImages, schema: ImageSchema, pixels: Tensor, train: Tensor, test: Tensor
) -> FolderData:
    inputs, held_out = (schema.standardised(pixels[part]) for part in (train, test))
    targets = found.targets
    return FolderData(
        found.source.name,
        inputs,
        targets[train],
        held_out,
        targets[test],
        schema.classes,
        schema.image_shape,
    )


def _split(targets: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Draw the images for training, shuffled, and those held out, in order.

    Each class has at least one image on either side.
    """
    generator = torch.Generator().manual_seed(derived_seed(seed, Stream.SHUFFLE, 0, 1))
    order = torch.randperm(len(targets), generator=generator)
    held = torch.zeros(len(targets), dtype=torch.bool)
    for label in targets.unique():
        places = order[targets[order] == label]
        held[places[: min(max(1, round(fraction * len(places))), len(places) - 1)]] = True
    return order[~held[order]], held.nonzero().flatten()


def _all_pixels(
    found: LabelledImages, size: int, channels: int, on_images: OnImages | None
) -> Tensor:
    pixels = []
    for place, path in enumerate(found.paths):
        with found.naming(place):
            pixels.append(middle_square(open_image(path), size, channels))
        if on_images is not None:
            on_images(place + 1, len(found.paths))
    return torch.stack(pixels)
