"""The served model of an ONNX file that ``bayesify export`` wrote; it needs no PyTorch network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bayesify.app.serve.answers import class_answers, number_answers
from bayesify.app.serve.images import ImageReader, decoded_exactly
from bayesify.app.serve.model import Batch, ModelCard
from bayesify.app.serve.requests import Examples, InputError
from bayesify.app.serve.rows import RowReader
from bayesify.export import ExportMetadata, onnx_session, read_metadata
from bayesify.io.files import StorageError
from bayesify.tabular.columns import CategoryColumn, Column, FlagColumn, column_from_json

__all__ = ["OnnxModel"]

Array = npt.NDArray[Any]

#: What the description of an input has, by its kind.
_ENTRIES = {
    "image": ("image_shape", "shape", "pixels", "shift", "scale"),
    "table": ("columns", "target"),
}


class OnnxModel:
    """An exported network as a served model.

    Its weight samples, threshold and intervals are those of the file.

    Args:
        path: the file.

    Raises:
        StorageError: the file is missing, damaged, or of a network that cannot be served.

    Example:
        >>> OnnxModel(Path("nowhere.onnx"))
        Traceback (most recent call last):
        bayesify.io.files.StorageError: ...
    """

    def __init__(self, path: Path) -> None:
        self._metadata = metadata = read_metadata(path)
        kind = metadata.input.get("kind")
        if kind not in ("image", "table"):
            raise StorageError(
                f"{path} must describe its input as images or as a table, got {kind!r}; write it "
                "with bayesify export RUN"
            )
        entries = _ENTRIES[kind]
        missing = [name for name in entries if name not in metadata.input]
        if missing:
            raise StorageError(
                f"{path} must describe its input of kind {kind} by {', '.join(entries)}, but "
                f"{', '.join(missing)} is missing; write it with bayesify export RUN, or give "
                "ExportMetadata(input=...) all of them"
            )
        try:
            self._session = onnx_session(path)
        except Exception as error:  # ONNX Runtime's own classes
            raise StorageError(f"ONNX Runtime cannot load {path}: {error}") from error
        self._outputs = [each.name for each in self._session.get_outputs()]
        self._rows: RowReader | None = None
        self._columns: list[tuple[str, Column]] = []
        self._images: ImageReader | None = None
        try:
            if kind == "table":
                self._columns = [_named_column(each) for each in metadata.input["columns"]]
                columns = [column for _, column in self._columns]
                # Files of earlier versions do not name the unused columns.
                unused = [*metadata.input.get("unused", ()), metadata.input["target"]]
                self._rows = RowReader(columns, unused)
            else:
                self._images = _image_reader(path, metadata.input)
            self.card = self._describe(path)
            self._answer_a_blank()
        except StorageError:
            raise
        except Exception as error:  # a description of another form, or of another graph
            raise StorageError(
                f"{path} cannot be served, as its description is not that of its graph: "
                f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}; write it with "
                "bayesify export RUN"
            ) from error

    def _answer_a_blank(self) -> None:
        """Answer one example, so that a file that cannot fails before the first request."""
        blank: Any = {column.name: None for _, column in self._columns}
        if self._images is not None:
            blank = np.zeros(self._images.shape, int).tolist()
        with suppress(InputError):  # a row of missing values may be no example
            self.predict(self.read(Examples([blank])))

    def read(self, examples: Examples) -> Batch:
        """Return the inputs of the graph by name."""
        if self._images is not None:
            return {self._session.get_inputs()[0].name: self._inputs_of(self._images, examples)}
        assert self._rows is not None
        values = self._rows.read(examples)
        return {
            name: _raw(column, each)
            for (name, column), each in zip(self._columns, values, strict=True)
        }

    def predict(self, batch: Batch) -> list[dict[str, Any]]:
        """Return the answers of the graph."""
        found = dict(zip(self._outputs, self._session.run(None, batch), strict=True))
        common: dict[str, Any] = {"threshold": self.card.threshold}
        if "outside_column" in found:
            common["outside"] = [str(name) for name in found["outside_column"].tolist()]
        if self.card.task == "classification":
            return class_answers(
                *(found[name] for name in ("mean", "total", "epistemic")),
                classes=self.card.classes,
                **common,
            )
        mean, std, epistemic = (
            found[name].reshape(len(found["mean"])) for name in ("mean", "std", "epistemic")
        )
        bounds = found["quantiles"].reshape(len(mean), -1)
        low, high = (bounds[:, place] for place in self._ends)
        return number_answers(mean, std, (low, high), epistemic, **common)

    def _inputs_of(self, reader: ImageReader, examples: Examples) -> Array:
        described = self._metadata.input
        pixels = reader.read(examples)
        channels = described["image_shape"][0]
        first = pixels.reshape(len(pixels), *reader.shape[:2], channels).transpose(0, 3, 1, 2)
        shift, scale = (
            np.asarray(described[name], np.float32).reshape(-1, 1, 1) for name in ("shift", "scale")
        )
        inputs = (first - shift) / scale
        return np.ascontiguousarray(inputs.reshape(len(pixels), *described["shape"]), np.float32)

    def _describe(self, path: Path) -> ModelCard:
        metadata = self._metadata
        levels = metadata.quantiles
        if metadata.kind == "regression" and "quantiles" not in self._outputs:
            raise StorageError(
                f"{path} must have quantiles to answer with an interval; serve the run itself"
            )
        self._ends = (0, -1)
        if metadata.kind == "regression":
            self._ends = levels.index(min(levels)), levels.index(max(levels))
            if len(levels) < 2 or not math.isclose(min(levels) + max(levels), 1.0, abs_tol=1e-6):
                raise StorageError(
                    f"{path} must have quantiles of which the lowest and the highest level are as "
                    f"far from 0 as from 1, for an equal-tailed interval, got {levels}; export it "
                    "with quantiles=(0.025, 0.5, 0.975)"
                )
        target = metadata.input.get("target", "")
        threshold = metadata.thresholds.get("total")
        rows, images = self._rows, self._images
        return ModelCard(
            name=path.stem,
            source="onnx",
            task=metadata.kind,
            input="images" if rows is None else "rows",
            image_shape=[] if images is None else [*images.shape],
            draws_digits=_has_digits(metadata),
            columns=[] if rows is None else rows.columns,
            unused_columns=[] if rows is None else rows.unused,
            classes=[*metadata.classes],
            target=target,
            unit="nats" if metadata.classes else f"squared units of {target}",
            num_samples=metadata.num_samples,
            level=round(max(levels) - min(levels), 12) if levels else 0.95,
            threshold=threshold,
            threshold_origin="the file has it"
            if threshold is not None
            else "none: the file has no threshold of the total uncertainty",
        )


def _named_column(stored: Mapping[str, Any]) -> tuple[str, Column]:
    """Return the name of a graph's input, and its column."""
    return stored["input"], column_from_json({k: v for k, v in stored.items() if k != "input"})


def _raw(column: Column, values: Array) -> Array:
    """Return the values of a column as the graph takes them: numbers, or texts."""
    names: Sequence[str]
    if isinstance(column, CategoryColumn):
        names = column.levels
    elif isinstance(column, FlagColumn):
        names = column.words
    else:
        return np.asarray(values, np.float64)
    unknown = f"not {max(names, key=len, default='')}"  # longer than every level, hence none
    return np.array(
        ["" if math.isnan(v) else unknown if math.isinf(v) else names[int(v)] for v in values],
        dtype=object,
    )


def _has_digits(metadata: ExportMetadata) -> bool:
    """Return whether the images are MNIST's digits, as far as a description tells."""
    # Those of a folder, which may be dark on white, are shifted by their mean; MNIST's are not.
    described = metadata.input
    has_size = described.get("image_shape") == [1, 28, 28]
    return has_size and described.get("shift") == [0.0] and metadata.classes == tuple("0123456789")


def _image_reader(path: Path, described: Mapping[str, Any]) -> ImageReader:
    channels, height, width = described["image_shape"]
    if list(described["pixels"]) != [0, 255] or channels not in (1, 3):
        raise StorageError(
            f"{path} must describe grey or colour images of pixels from 0 to 255, got {channels} "
            f"channels from {described['pixels']}"
        )
    shape = (height, width) if channels == 1 else (height, width, channels)
    return ImageReader(shape, lambda file: decoded_exactly(file, shape))
