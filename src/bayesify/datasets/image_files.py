"""Files of images: find those of a folder, and read one as pixels, by Pillow."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesify.datasets.files import DataError
from bayesify.io.files import one_line

__all__ = [
    "check_image",
    "find_images_and_remarks",
    "image_bytes",
    "image_kind",
    "middle_square",
    "open_image",
    "thumbnail",
]

_JPEG = (".jpg", ".jpeg", ".jpe", ".jfif")
_SUFFIXES = frozenset(
    (
        ".png",
        ".apng",
        *_JPEG,
        ".jp2",
        ".j2k",
        ".avif",
        ".webp",
        ".gif",
        ".bmp",
        ".tif",
        ".tiff",
        ".tga",
        ".ppm",
        ".pgm",
        ".pbm",
        ".pnm",
    )
)
#: Files that systems put next to images.
_NO_IMAGES = frozenset(("thumbs.db", "desktop.ini"))
_MOST_NAMED = 4


def find_images_and_remarks(folder: Path) -> tuple[list[Path], tuple[str, ...]]:
    """Return the images in a folder and below it, and a remark on the files that are left out.

    The images are those of known names, in order; none that is hidden. Links to folders are
    followed.

    Raises:
        DataError: the folder cannot be read, or holds no image.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in ("a.jpg", "b.heic", "c.heic", "README"):
        ...         Path(folder, name).touch()
        ...     find_images_and_remarks(Path(folder))[1]
        ('3 files without the suffix of an image are left out: 2 .heic, 1 without suffix',)
    """
    files = _visible_files(folder)
    found = [path for path in files if path.suffix.lower() in _SUFFIXES]
    remarks = _remarks(files)
    if not found:
        why = "".join(f"; {remark}" for remark in remarks)
        raise DataError(f"{folder} must hold images such as .png or .jpg, but has none{why}")
    return found, remarks


def _remarks(files: Sequence[Path]) -> tuple[str, ...]:
    others = [
        path.suffix.lower() or "without suffix"
        for path in files
        if path.suffix.lower() not in _SUFFIXES and path.name.lower() not in _NO_IMAGES
    ]
    if not others:
        return ()
    counts = Counter(others).most_common()
    some = ", ".join(f"{count:,} {suffix}" for suffix, count in counts[:_MOST_NAMED])
    count = "1 file" if len(others) == 1 else f"{len(others):,} files"
    verb = "is" if len(others) == 1 else "are"
    more = ", ..." if len(counts) > _MOST_NAMED else ""
    return (f"{count} without the suffix of an image {verb} left out: {some}{more}",)


def _visible_files(folder: Path) -> list[Path]:
    """Return the files in a folder and below it by their names, in order; none that is hidden."""
    if not folder.exists():
        raise DataError(f"there is no file or folder {folder}")
    found = []

    def on_unread(error: OSError) -> None:
        # A folder within it may be closed, as "lost+found" is.
        if not isinstance(error, PermissionError) or error.filename == str(folder):
            raise error

    try:
        for place, subfolders, names in os.walk(folder, onerror=on_unread, followlinks=True):
            here = Path(place)
            subfolders[:] = [
                name
                for name in subfolders
                if not (name.startswith(".") or _leads_back(here / name))
            ]
            found += [here / name for name in names if not name.startswith(".")]
        return sorted(path for path in found if path.is_file())
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error}") from error


def _leads_back(folder: Path) -> bool:
    """Return whether a folder is a link to one that it lies in, so that a walk would not end."""
    if not folder.is_symlink():
        return False
    return folder.resolve() in {parent.resolve() for parent in folder.absolute().parents}


def middle_square(image: Any, size: int, channels: int) -> Tensor:
    """Return an image's middle square in a size, shape (channels, size, size), uint8."""
    import numpy as np
    from PIL import Image, ImageOps

    plain = image.convert("L" if channels == 1 else "RGB")
    square = ImageOps.fit(plain, (size, size), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(square, dtype=np.uint8)).view(size, size, channels)
    return pixels.permute(2, 0, 1)


def open_image(file: Path | BytesIO) -> Any:
    """Return an image of Pillow with bytes for pixels, rotated as its EXIF data tell.

    What is transparent becomes white, and 16 bits become 8.

    Args:
        file: the path of the image, or its content.

    Raises:
        DataError: there is no such file, it is no image, or its range of values is not known.

    Example:
        >>> open_image(Path("nowhere.png"))
        Traceback (most recent call last):
        bayesify.datasets.files.DataError: there is no image nowhere.png
    """
    from PIL import Image, ImageOps

    with _reading(file), Image.open(file) as opened:
        # Pillow would write all EXIF data again, and fail at a tag of an odd type.
        opened.getexif()
        opened.info.pop("exif", None)
        image = ImageOps.exif_transpose(opened)
        image.load()
        if opened.format == "PPM" and image.mode == "I":  # Pillow has scaled it to 16 bits
            image = image.convert("I;16")
    return _in_bytes(image, file)


def thumbnail(path: Path, size: int) -> Tensor:
    """Return an image's middle square, shape (size, size, 3) from 0 to 1; white if it is gone.

    Args:
        path: the file.
        size: height and width in pixels.

    Example:
        >>> thumbnail(Path("nowhere.png"), 2).mean()
        tensor(1.)
    """
    try:
        square = middle_square(open_image(path), size, 3)
    except DataError:
        return torch.ones(size, size, 3)
    return square.permute(1, 2, 0).to(torch.float32) / 255.0


def _in_bytes(image: Any, path: Path | BytesIO) -> Any:
    """Return an image whose pixels are bytes, what is transparent on white."""
    import numpy as np
    from PIL import Image

    if image.mode.startswith("I;16"):  # Pillow would clip these at 255
        return Image.fromarray((np.asarray(image).astype(np.float64) / 257.0).round().astype("u1"))
    if image.mode == "LAB":  # Pillow converts it with a colour profile only
        raise DataError(f"{_name_of(path)} has pixels of mode LAB; save it with RGB or grey pixels")
    if image.mode in ("I", "F"):
        raise DataError(
            f"{_name_of(path)} has pixels of mode {image.mode}, whose range is not known; save it "
            "with 8 or 16 bits"
        )
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image


def image_kind(path: Path) -> tuple[int, int, bool]:
    """Return an image's width, height, and whether it has colours, from its header.

    Raises:
        DataError: there is no such file, or it is no image.

    Example:
        >>> image_kind(Path("nowhere.png"))
        Traceback (most recent call last):
        bayesify.datasets.files.DataError: there is no image nowhere.png
    """
    from PIL import Image

    with _reading(path), Image.open(path) as image:
        is_grey = image.mode in ("1", "L", "LA", "I", "F") or image.mode.startswith("I;16")
        return *image.size, not is_grey


def check_image(path: Path) -> bytes:
    """Return the content of a file, whose first bytes are those of an image.

    Args:
        path: the file.

    Raises:
        DataError: there is no such file, or it is no image.

    Example:
        >>> check_image(Path("nowhere.png"))
        Traceback (most recent call last):
        bayesify.datasets.files.DataError: there is no image nowhere.png
    """
    image_kind(path)
    return image_bytes(path)


def image_bytes(path: Path) -> bytes:
    """Return the content of an image's file.

    Raises:
        DataError: there is no such file, or it cannot be read.

    Example:
        >>> image_bytes(Path("nowhere.png"))
        Traceback (most recent call last):
        bayesify.datasets.files.DataError: there is no image nowhere.png
    """
    with _reading(path):
        return path.read_bytes()


@contextmanager
def _reading(file: Path | BytesIO) -> Iterator[None]:
    """Raise DataError, which names the image, for any error of reading it."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"there is no image {_name_of(file)}") from error
    except Exception as error:  # Pillow raises errors of many kinds
        raise DataError(
            f"{_name_of(file)} cannot be read as an image ({type(error).__name__}: "
            f"{one_line(error)}); mend it or move it elsewhere"
        ) from error


def _name_of(file: Path | BytesIO) -> str:
    return str(file) if isinstance(file, Path) else "the image"
