"""Folder with one subfolder of images for each class, and how an image becomes an input."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesify import io as bayesify_io
from bayesify.datasets.files import DataError
from bayesify.noise.keys import Stream, derived_seed

__all__ = [
    "IMAGES_NAME",
    "FolderData",
    "ImageSchema",
    "find_images",
    "fit_image_folder",
    "load_image_folder",
]

IMAGES_NAME = "images.json"
#: Called with the number of images that were read, and of all.
OnImages = Callable[[int, int], None]

_SUFFIXES = frozenset(
    (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
)
#: Images whose side is at most this are not scaled.
_SMALL = 32
_FEWEST = 2
_FORMAT = 1


@dataclass(frozen=True, eq=False)
class FolderData:
    """Images of a folder as tensors, in a training and a held-out part."""

    #: Name of the folder.
    name: str
    #: (N, channels * height * width) float32, standardised by channel.
    train_inputs: Tensor
    #: (N,) int64, indices into ``class_names``.
    train_targets: Tensor
    #: (N_test, channels * height * width) float32.
    test_inputs: Tensor
    #: (N_test,) int64.
    test_targets: Tensor
    #: Name of each class, as its folder.
    class_names: tuple[str, ...]
    #: Channels, height and width.
    image_shape: tuple[int, int, int]


@dataclass(frozen=True)
class ImageSchema:
    """How the images of a folder become inputs of a network, and which are held out.

    An image is turned as its camera said, what is transparent becomes white, it is scaled until its
    shorter side is ``size``, cropped to the middle square, and standardised by the training images'
    mean and standard deviation of each channel.

    Args:
        classes: the names of the subfolders.
        size: height and width of an input.
        channels: 1 for images in grey, 3 for colour.
        mean: of each channel, from 0 to 1.
        std: of each channel.
        sha256: of all images with their paths.
        split: ``seed`` and ``fraction``, from which the held-out part follows; ``limit``; and how
            many images are for ``train`` and ``test``.
        remarks: notes for the user on how the folder was read.
    """

    classes: tuple[str, ...]
    size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    sha256: str
    split: Mapping[str, Any]
    remarks: tuple[str, ...] = ()

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an input."""
        return self.channels, self.size, self.size

    def inputs(self, paths: Iterable[Path], on_image: Callable[[], None] | None = None) -> Tensor:
        """Read images as inputs, shape (N, channels * size * size), float32.

        Raises:
            DataError: one cannot be read.
        """
        return self.standardised(_pixels(paths, self.size, self.channels, on_image))

    def pixels(self, files: Iterable[Path | BytesIO]) -> Tensor:
        """Read images as squares, shape (N, channels, size, size), uint8.

        Raises:
            DataError: one cannot be read.
        """
        return _pixels(files, self.size, self.channels, None)

    def standardised(self, pixels: Tensor) -> Tensor:
        """Return inputs (N, channels * size * size) for pixels (N, channels, size, size)."""
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return ((pixels.to(torch.float32) / 255.0 - mean) / std).flatten(1)

    def save(self, folder: Path) -> None:
        """Write ``images.json``, whole or not at all."""
        text = json.dumps({"format": _FORMAT, **asdict(self)}, indent=1, ensure_ascii=False)
        bayesify_io.atomic_write(folder / IMAGES_NAME, text + "\n")

    @classmethod
    def load(cls, folder: Path) -> ImageSchema:
        """Read ``images.json``.

        Raises:
            DataError: it is missing or cannot be read.
        """
        path = folder / IMAGES_NAME
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            if stored.pop("format") != _FORMAT:
                raise DataError(f"{path} must have format {_FORMAT}; read it by its own version")
            lists = {name: tuple(stored[name]) for name in ("classes", "mean", "std", "remarks")}
            return cls(**{**stored, **lists})
        except FileNotFoundError as error:
            raise DataError(f"there is no {path}, which describes the run's images") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error


def find_images(folder: Path) -> list[Path]:
    """Return the images in a folder and below it by their names, in order; none that is hidden.

    Raises:
        DataError: the folder cannot be read, or holds no image.
    """
    try:
        found = sorted(
            path
            for path in folder.rglob("*")
            if path.suffix.lower() in _SUFFIXES
            and not any(part.startswith(".") for part in path.relative_to(folder).parts)
            and path.is_file()
        )
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error}") from error
    if not found:
        raise DataError(f"{folder} must hold images such as .png or .jpg, but has none")
    return found


def fit_image_folder(
    folder: Path,
    *,
    size: int | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    limit: int | None = None,
    on_images: OnImages | None = None,
) -> tuple[FolderData, ImageSchema]:
    """Read a folder with one subfolder of images for each class, and hold out a part of each class.

    Args:
        folder: the folder; below a class's subfolder images may lie in others.
        size: height and width of an input; None keeps that of images that are all squares of one
            size of at most 32 pixels, and is 32 for others.
        test_fraction: part of each class that is held out, strictly between 0 and 1.
        seed: the held-out images are a function of it.
        limit: use only this number of training images.
        on_images: called as images are read.

    Raises:
        DataError: Pillow is not installed, the folder has no such subfolders, a class has fewer
            than two images, or an image cannot be read.
    """
    if find_spec("PIL") is None:
        raise DataError("a folder of images needs Pillow; pip install 'bayesify[cli,images]'")
    classes, paths, targets, remarks = _labelled(folder)
    kinds = {_kind(path) for path in paths}
    sides = {side for width, height, _ in kinds for side in (width, height)}
    if size is None:
        size = min(sides) if len(sides) == 1 and min(sides) <= _SMALL else _SMALL
    channels = 3 if any(is_coloured for *_, is_coloured in kinds) else 1
    train, test = _split(targets, test_fraction, seed)
    if limit is not None and limit > len(train):
        raise DataError(
            f"limit must be at most {len(train)}, the number of training images, got {limit}"
        )
    train = train[:limit].sort().values
    pixels = _all_pixels(paths, size, channels, on_images)
    known = pixels[train].to(torch.float64).transpose(0, 1).flatten(1) / 255.0
    schema = ImageSchema(
        classes=classes,
        size=size,
        channels=channels,
        mean=tuple(known.mean(1).tolist()),
        std=tuple(known.std(1).clamp_min(1e-3).tolist()),
        sha256=_sha256_of(folder, paths),
        split={
            **{"seed": seed, "fraction": test_fraction, "limit": limit},
            **{"train": len(train), "test": len(test)},
        },
        remarks=tuple(remarks),
    )
    return _data(folder, schema, pixels, targets, train, test), schema


def load_image_folder(
    folder: Path, schema: ImageSchema, on_images: OnImages | None = None
) -> FolderData:
    """Read again the folder that a schema was fitted to: the same images, the same held-out part.

    Raises:
        DataError: the folder is missing, or has changed.
    """
    _, paths, targets, _ = _labelled(folder)
    found = _sha256_of(folder, paths)
    if found != schema.sha256:
        raise DataError(
            f"the images in {folder} were changed after the run was made: their SHA-256 must be "
            f"{schema.sha256}, got {found}; use the folder as it was, or train again"
        )
    train, test = _split(targets, schema.split["fraction"], schema.split["seed"])
    train = train[: schema.split["limit"]].sort().values
    pixels = _all_pixels(paths, schema.size, schema.channels, on_images)
    return _data(folder, schema, pixels, targets, train, test)


def _data(
    folder: Path,
    schema: ImageSchema,
    pixels: Tensor,
    targets: Tensor,
    train: Tensor,
    test: Tensor,
) -> FolderData:
    inputs, held_out = (schema.standardised(pixels[part]) for part in (train, test))
    return FolderData(
        folder.name,
        *(inputs, targets[train], held_out, targets[test]),
        schema.classes,
        schema.image_shape,
    )


def _labelled(folder: Path) -> tuple[tuple[str, ...], list[Path], Tensor, list[str]]:
    """Return the classes, the paths of all images with their classes' indices, and remarks."""
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    paths = find_images(folder)
    loose = [path for path in paths if path.parent == folder]
    if loose:
        raise DataError(
            f"each image must lie in a subfolder of {folder} that has the name of its class, but "
            f"{len(loose)} {'lie' if len(loose) > 1 else 'lies'} in none, such as {loose[0].name}"
        )
    names = [path.relative_to(folder).parts[0] for path in paths]
    classes = tuple(sorted(set(names)))
    if len(classes) < 2:
        raise DataError(
            f"{folder} must have images of at least two classes, each in a subfolder, got "
            f"{classes[0]} alone"
        )
    counts = {name: names.count(name) for name in classes}
    few = [name for name in classes if counts[name] < _FEWEST]
    if few:
        raise DataError(
            f"each class must have at least {_FEWEST} images, one to train on and one to hold out, "
            f"got {counts[few[0]]} of {few[0]}"
        )
    empty = sorted(
        path.name
        for path in folder.iterdir()
        if path.is_dir() and path.name not in counts and not path.name.startswith(".")
    )
    remarks = [f"{name} has no images and is no class" for name in empty]
    return classes, paths, torch.tensor([classes.index(name) for name in names]), remarks


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
    paths: Sequence[Path], size: int, channels: int, on_images: OnImages | None
) -> Tensor:
    done = 0

    def on_image() -> None:
        nonlocal done
        done += 1
        if on_images is not None:
            on_images(done, len(paths))

    return _pixels(paths, size, channels, on_image)


def _pixels(
    paths: Iterable[Path | BytesIO], size: int, channels: int, on_image: Callable[[], None] | None
) -> Tensor:
    """Read images as squares, shape (N, channels, size, size), uint8."""
    import numpy as np
    from PIL import Image, ImageOps

    found = []
    for path in paths:
        try:
            with Image.open(path) as opened:
                image = ImageOps.exif_transpose(opened)
                image.load()
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise _unreadable(path, error) from error
        image = _in_bytes(image, path).convert("L" if channels == 1 else "RGB")
        square = ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)
        pixels = torch.from_numpy(np.array(square, dtype=np.uint8)).view(size, size, channels)
        found.append(pixels.permute(2, 0, 1))
        if on_image is not None:
            on_image()
    return torch.stack(found)


def _in_bytes(image: Any, path: Path | BytesIO) -> Any:
    """Return an image whose pixels are bytes, what is transparent on white."""
    import numpy as np
    from PIL import Image

    if image.mode.startswith("I;16"):  # Pillow would clip these at 255
        return Image.fromarray((np.asarray(image).astype(np.float64) / 257.0).round().astype("u1"))
    if image.mode in ("I", "F"):
        raise DataError(
            f"{_name_of(path)} has pixels of mode {image.mode}, whose range is not known; save it "
            "with 8 or 16 bits"
        )
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image


def _kind(path: Path) -> tuple[int, int, bool]:
    """Return an image's width, height, and whether it has colours, from its header."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return *image.size, image.mode not in ("1", "L", "LA", "I", "I;16", "F")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path | BytesIO, error: Exception) -> DataError:
    return DataError(
        f"{_name_of(path)} cannot be read as an image ({type(error).__name__}: "
        f"{' '.join(str(error).split())}); mend it or move it elsewhere"
    )


def _name_of(path: Path | BytesIO) -> str:
    return str(path) if isinstance(path, Path) else "the image"


def _sha256_of(folder: Path, paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.relative_to(folder).as_posix().encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
