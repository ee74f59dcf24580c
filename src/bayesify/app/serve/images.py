"""Read images from JSON: nested lists of pixels, or PNG and JPEG files in base64."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bayesify.app.serve.requests import Examples, InputError, described
from bayesify.io.files import one_line

__all__ = [
    "FORMATS",
    "ImageReader",
    "PixelLimit",
    "check_size",
    "decoded_exactly",
    "example_file",
    "groups",
    "image_file",
]

#: Image files that are read.
FORMATS = ("PNG", "JPEG")
#: Pixels of an image file; more would need much memory for few bytes of a body.
_MOST_PIXELS = 4096 * 4096
#: Pixels of all image files of a request, which one thread decodes for all requests.
_MOST_TOGETHER = 4 * _MOST_PIXELS

Pixels = npt.NDArray[np.float32]
Path = tuple[str | int, ...]


class ImageReader:
    """Reader of images of one shape.

    Args:
        shape: height and width of nested lists, and for colours 3.
        decode: turns an image file into pixels of this shape, from 0 to 255.

    Example:
        >>> reader = ImageReader((1, 2), lambda file: np.zeros((1, 2)))
        >>> reader.read(Examples([[[0, 255]], [[128, 7]]])).tolist()
        [[[0.0, 255.0]], [[128.0, 7.0]]]
    """

    def __init__(
        self, shape: Sequence[int], decode: Callable[[io.BytesIO], npt.NDArray[Any]]
    ) -> None:
        self.shape = tuple(shape)
        self._decode = decode

    def read(self, examples: Examples) -> Pixels:
        """Return pixels from 0 to 255, shape (N, *shape).

        Raises:
            InputError: an example is no such image.
        """
        limit = PixelLimit()
        return np.stack(
            [
                self._one(item, examples.pixels, limit, ("examples", place))
                for place, item in enumerate(examples.items)
            ]
        )

    def _one(self, item: Any, pixels: str | None, limit: PixelLimit, path: Path) -> Pixels:
        if isinstance(item, str):
            return self._file(item, limit, path)
        found = np.array(_numbers(item, self.shape, path), np.float32).reshape(self.shape)
        largest = 1.0 if pixels == "0-1" else 255.0
        low, high = float(found.min()), float(found.max())
        if not 0.0 <= low <= high <= largest:  # NaN too
            wrong = np.argwhere(~((found >= 0.0) & (found <= largest)))[0].tolist()
            raise InputError(
                (*path, *wrong),
                f"a pixel must lie from 0 to {largest:g}, got "
                f"{described(float(found[tuple(wrong)]))}",
            )
        if pixels == "0-1":
            return found * np.float32(255.0)
        if pixels is None and 0.0 < high <= 1.0:
            raise InputError(
                path,
                f"pixels must lie from 0 to 255, but the largest is {high:g}; for pixels from 0 to "
                '1 add "pixels": "0-1" to the body, for almost black images "pixels": "0-255"',
            )
        return found

    def _file(self, text: str, limit: PixelLimit, path: Path) -> Pixels:
        content = _from_base64(text, path, "an image file in base64, or nested lists of pixels")
        limit.count(content, path)
        try:
            found = self._decode(io.BytesIO(content))
        except ValueError as error:  # DataError too
            raise InputError(path, str(error)) from error
        return np.asarray(found, np.float32).reshape(self.shape)


class PixelLimit:
    """A limit of the pixels of a request's image files, by their headers.

    Example:
        >>> PixelLimit().count(b"no image", ("examples", 0))
        Traceback (most recent call last):
        bayesify.app.serve.requests.InputError: examples[0]: must be an image as PNG or JPEG ...
    """

    def __init__(self) -> None:
        self._left = _MOST_TOGETHER

    def count(self, file: bytes, path: Path) -> None:
        """Count the pixels of one more file.

        Raises:
            InputError: it is no PNG or JPEG file, or too large, alone or with those before it.
        """
        try:
            width, height = check_size(io.BytesIO(file))
        except ValueError as error:
            raise InputError(path, str(error)) from error
        self._left -= width * height
        if self._left < 0:
            raise InputError(
                path,
                f"the image files of a request must have at most {_MOST_TOGETHER:,} pixels "
                "together, and this one has more than is left; send several requests",
            )


def image_file(item: Any, path: Path, limit: PixelLimit) -> bytes:
    """Return the image file that an example or a cell has in base64; its pixels are not read.

    Args:
        item: what JSON has.
        path: where it is.
        limit: that of the request.

    Raises:
        InputError: it is no text, no PNG or JPEG file, or too large.

    Example:
        >>> image_file("photos/1.png", ("examples", 0), PixelLimit())
        Traceback (most recent call last):
        bayesify.app.serve.requests.InputError: examples[0]: must be an image file in base64: ...
    """
    if not isinstance(item, str):
        raise InputError(path, f"must be an image file in base64, got {described(item)}")
    content = _from_base64(item, path, "an image file in base64")
    limit.count(content, path)
    return content


def example_file() -> str:
    """Return a small PNG file in base64.

    Example:
        >>> image_file(example_file(), ("examples", 0), PixelLimit())[1:4]
        b'PNG'
    """
    from PIL import Image

    file = io.BytesIO()
    Image.linear_gradient("L").resize((16, 16)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def groups(files: Sequence[bytes], most: int) -> Iterator[range]:
    """Yield the places of image files that may be decoded together, in their order.

    Together they have at most as many pixels as one image may have.

    Args:
        files: images that :func:`image_file` returned.
        most: the largest number of images in a group.
    """
    start, held = 0, 0
    for place, file in enumerate(files):
        width, height = check_size(io.BytesIO(file))
        held += width * height
        if place > start and (place - start == most or held > _MOST_PIXELS):
            yield range(start, place)
            start, held = place, width * height
    if files:
        yield range(start, len(files))


def _from_base64(text: str, path: Path, wanted: str) -> bytes:
    try:
        return base64.b64decode(text.partition(";base64,")[2] or text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(path, f"must be {wanted}: {error}") from error


def _numbers(value: Any, shape: tuple[int, ...], path: Path) -> list[float]:
    if not isinstance(value, list) or len(value) != shape[0]:
        whole = " x ".join(map(str, shape))
        raise InputError(path, f"must be a list of {whole} pixels, got {described(value)}")
    if len(shape) == 1:
        for place, each in enumerate(value):
            if type(each) is not float and type(each) is not int:
                raise InputError((*path, place), f"must be a number, got {described(each)}")
            if not abs(each) <= 1e9:
                raise InputError(
                    (*path, place), f"a pixel must be a finite number, got {described(each)}"
                )
        return value
    return [
        number
        for place, each in enumerate(value)
        for number in _numbers(each, shape[1:], (*path, place))
    ]


def check_size(file: io.BytesIO) -> tuple[int, int]:
    """Return width and height of an image file by its header, and check them.

    Raises:
        ValueError: it is not PNG or JPEG, or too large.
    """
    from PIL import Image

    try:
        with Image.open(file, formats=FORMATS) as image:
            width, height = image.size
    except (OSError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ValueError(f"must be an image as {' or '.join(FORMATS)} in base64") from None
    if width * height > _MOST_PIXELS:
        raise ValueError(
            f"an image must have at most {_MOST_PIXELS:,} pixels, got {width} x {height}"
        )
    file.seek(0)
    return width, height


def decoded_exactly(file: io.BytesIO, shape: Sequence[int]) -> npt.NDArray[Any]:
    """Return the pixels of an image file that must have a size.

    Args:
        file: the file.
        shape: height and width for grey, and 3 for colours.

    Raises:
        ValueError: it is no such image, or some of it is transparent.
    """
    from PIL import Image

    from bayesify.datasets.image_files import open_image

    height, width = shape[:2]
    found = check_size(file)
    if found != (width, height):
        raise ValueError(
            f"an image must have {width} x {height} pixels, got {' x '.join(map(str, found))}"
        )
    try:
        with Image.open(file, formats=FORMATS) as image:
            alpha = image.convert("RGBA").getchannel("A")
            least = int(np.asarray(alpha).min()) if image.has_transparency_data else 255
        file.seek(0)
        pixels = np.asarray(open_image(file).convert("L" if len(shape) == 2 else "RGB"))
    except Exception as error:  # Pillow raises errors of many kinds
        raise ValueError(f"the image cannot be read: {one_line(error)}") from error
    if least < 255:  # for white strokes on nothing a white ground would be wrong
        raise ValueError("an image must not be transparent, since what is behind it is not known")
    if pixels.shape[:2] != (height, width):
        raise ValueError("an image must not be rotated by its EXIF data; rotate its pixels")
    return pixels
