"""JSON schemas and examples of a model's requests, for OpenAPI."""

from __future__ import annotations

from typing import Any

from bayesify.app.serve.images import example_file
from bayesify.app.serve.model import Column, ModelCard

__all__ = ["example_request", "request_body"]


def request_body(card: ModelCard, *, most: int) -> dict[str, Any]:
    """Return the ``requestBody`` of /predict.

    Args:
        card: the model.
        most: the largest number of examples.
    """
    properties: dict[str, Any] = {
        "examples": {
            "type": "array",
            "minItems": 1,
            "maxItems": most,
            "items": _image(card) if card.input == "images" else _row(card),
        }
    }
    if card.image_shape:
        properties["pixels"] = {
            "type": "string",
            "enum": ["0-255", "0-1"],
            "default": "0-255",
            "description": "Range of the pixels in nested lists; say it where none is above 1.",
        }
    schema = {
        "type": "object",
        "required": ["examples"],
        "additionalProperties": False,
        "properties": properties,
    }
    content = {"schema": schema, "examples": {"one": {"value": example_request(card)}}}
    return {"required": True, "content": {"application/json": content}}


def example_request(card: ModelCard) -> dict[str, Any]:
    """Return a request with one example."""
    if card.input == "rows":
        return {"examples": [{column.name: column.example for column in card.columns}]}
    if not card.image_shape:
        return {"examples": [example_file()]}
    image = _bar(*card.image_shape[:2])
    if len(card.image_shape) > 2:
        image = [[[value] * card.image_shape[2] for value in row] for row in image]
    return {"examples": [image], "pixels": "0-255"}


def _bar(height: int, width: int) -> list[list[Any]]:
    """Return a vertical bar, which looks like the digit 1."""
    middle = range(width // 2 - 1, width // 2 + 2)
    inner = range(height // 6, height - height // 6)
    return [
        [255 if row in inner and column in middle else 0 for column in range(width)]
        for row in range(height)
    ]


def _image(card: ModelCard) -> dict[str, Any]:
    if not card.image_shape:
        return _file("any size")
    pixels: dict[str, Any] = {"type": "number", "minimum": 0, "maximum": 255}
    for size in reversed(card.image_shape):
        pixels = {"type": "array", "minItems": size, "maxItems": size, "items": pixels}
    height, width = card.image_shape[:2]
    return {"anyOf": [pixels, _file("any size" if card.any_size else f"{width} x {height} pixels")]}


def _file(size: str) -> dict[str, Any]:
    return {
        "type": "string",
        "contentEncoding": "base64",
        "description": f"A PNG or JPEG file of {size}, in base64.",
    }


def _row(card: ModelCard) -> dict[str, Any]:
    properties = {column.name: _cell(column) for column in card.columns}
    unused = {name: {"description": "Not read."} for name in card.unused_columns}
    return {
        "type": "object",
        "required": [column.name for column in card.columns],
        "additionalProperties": False,
        "properties": properties | unused,
    }


def _cell(column: Column) -> dict[str, Any]:
    kinds = {
        "number": ["number", "string", "null"],
        "category": ["string", "number", "boolean", "null"],
        "flag": ["boolean", "string", "null"],
    }
    schema: dict[str, Any] = {"type": kinds.get(column.kind, ["string", "null"])}
    if column.kind == "flag":
        schema = {"anyOf": [schema, {"enum": [0, 1]}]}
    if column.kind == "date":
        # Not "format": a text as in the training table is a date too, and "" a missing one.
        schema["description"] = "A date such as 2024-12-31, or text as in the training table."
    if column.kind == "image":
        schema |= _file("any size") | {"type": schema["type"]}
    if column.longest is not None:
        schema["description"] = (
            f"Its first {column.longest} tokens are read, as in training; the rest is cut off."
        )
    if column.kind == "number" and column.low is not None:
        schema["description"] = f"From {column.low:.15g} to {column.high:.15g} in training."
    if column.kind in ("category", "flag") and column.options:
        schema["description"] = f"In training: {', '.join(column.options)}."
    return {**schema, "examples": [column.example]}
