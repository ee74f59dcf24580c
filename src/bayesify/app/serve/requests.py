"""Read the body of a request: a limited number of bytes, as JSON with a list of examples."""

from __future__ import annotations

import codecs
import sys
from collections.abc import AsyncIterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

__all__ = [
    "Examples",
    "InputError",
    "RequestError",
    "described",
    "parse_examples",
    "read_limited",
]

_KEYS = ("examples", "pixels")
#: Characters of a wrong value that a message repeats.
_SHOWN = 40


class RequestError(Exception):
    """A request that is not answered.

    Args:
        status: the HTTP status.
        message: one line that says what must hold, what was got and how to mend it.
        headers: further headers of the response.
    """

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})


class InputError(RequestError):
    """A wrong value in the body of a request.

    Args:
        path: where it is, such as ``("examples", 0, "age")``.
        message: what must hold, what was got and how to mend it.

    Example:
        >>> error = InputError(("examples", 0, "age"), "must be a number, got true")
        >>> error.status, str(error)
        (422, 'examples[0].age: must be a number, got true')
    """

    def __init__(self, path: tuple[str | int, ...], message: str) -> None:
        parts = [f"[{p}]" if isinstance(p, int) else f".{_one_line(p)}" for p in path]
        where = "".join(parts).lstrip(".")
        super().__init__(422, f"{where}: {message}" if where else message)
        self.path = path


@dataclass(frozen=True)
class Examples:
    """The content of a request.

    Args:
        items: its examples, as JSON has them; at least one.
        pixels: the range of images' pixels, ``"0-255"`` or ``"0-1"``; None if it is not named.
    """

    items: list[Any]
    pixels: str | None = None


async def read_limited(chunks: AsyncIterable[bytes], length: str | None, most: int) -> bytes:
    """Read a body of at most ``most`` bytes.

    Args:
        chunks: the body.
        length: the header Content-Length, if there is one; a larger body is then not read at all.
        most: the limit.

    Raises:
        RequestError: the body is larger.
    """
    error = RequestError(
        413,
        f"the body must have at most {most:,} bytes; send fewer examples in a request, or start "
        "the service with a larger --max-body-mb",
        {"Connection": "close"},
    )
    if length is not None and length.isdecimal() and int(length) > most:
        raise error
    parts, size = [], 0
    async for chunk in chunks:
        size += len(chunk)
        if size > most:
            raise error
        parts.append(chunk)
    return b"".join(parts)


def parse_examples(body: bytes, *, most: int) -> Examples:
    """Parse a body such as ``{"examples": [...]}``.

    Raises:
        InputError: it is not of this form, or has more than ``most`` examples.

    Example:
        >>> parse_examples(b'{"examples": [{"age": 38}]}', most=10).items
        [{'age': 38}]
    """
    try:
        content = from_json(body.removeprefix(codecs.BOM_UTF8))
    except ValueError as error:
        raise InputError((), f"the body must be JSON in UTF-8: {error}") from error
    if not isinstance(content, dict):
        raise InputError((), f"the body must be an object, got {described(content)}")
    for name in content:
        if name not in _KEYS:
            raise InputError(
                (str(name)[:_SHOWN],), 'is unknown; the body must be {"examples": [...]}'
            )
    if "examples" not in content:
        raise InputError(("examples",), 'is missing; the body must be {"examples": [...]}')
    items, pixels = content["examples"], content.get("pixels")
    if not isinstance(items, list) or not items:
        raise InputError(
            ("examples",), f"must be a list of at least one example, got {described(items)}"
        )
    if len(items) > most:
        raise InputError(
            ("examples",),
            f"must have at most {most:,} examples, got {len(items):,}; send several requests, or "
            "start the service with a larger --max-examples",
        )
    if "pixels" in content and pixels not in ("0-255", "0-1"):
        raise InputError(("pixels",), f'must be "0-255" or "0-1", got {described(pixels)}')
    return Examples(items, pixels)


def _one_line(name: str) -> str:
    """Return a name of a body's object as a message has it: shortened, without line ends."""
    shown = " ".join(name.split()) or repr(name)
    return f"{shown[:_SHOWN]}..." if len(shown) > _SHOWN else shown


def described(value: Any) -> str:
    """Return a JSON value for a message, shortened.

    Example:
        >>> described([1, 2]), described(True), described("a" * 100)
        ('a list of 2', 'true', '"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa..."')
    """
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, str):
        return f'"{value[:_SHOWN]}{"..." if len(value) > _SHOWN else ""}"'
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if value != value:
        return "NaN"
    fits = abs(value) <= sys.float_info.max  # a whole number of JSON may have any length
    return f"{float(value):g}" if fits else "infinity or a number too large"
