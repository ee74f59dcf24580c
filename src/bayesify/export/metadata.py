"""The description of an exported network, stored in its file as one JSON text."""

from __future__ import annotations

import json
import math
import os
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from torch import nn

from bayesify.io.files import StorageError
from bayesify.module.freezing import FrozenNetwork
from bayesify.noise.arguments import one_number, whole_number

__all__ = ["METADATA_KEY", "ExportMetadata", "metadata_of", "read_metadata"]

#: The key of the JSON text in an ONNX file's ``metadata_props``, and its file name in a ``.pt2``.
METADATA_KEY = "bayesify"
_FORMAT = 1

Kind = Literal["classification", "regression"]


@dataclass(frozen=True)
class ExportMetadata:
    """Description of an exported network, stored in its file.

    The network's outputs are named: ``mean`` (probabilities), ``total`` and ``epistemic``
    (entropies in nats) for classes; ``mean``, ``std``, ``quantiles`` and ``epistemic`` (a variance)
    for numbers.

    Args:
        kind: the kind of the prediction.
        num_samples: number of weight samples in the network; 0 for its mean weights.
        classes: names of the classes as text, in the order of the probabilities; none for numbers.
        input: how to make the network's input, with a ``"kind"``; see docs/export.md.
        thresholds: by the name of an output, the largest value to answer at: a prediction whose
            uncertainty is above abstains. In the output's unit.
        quantiles: the levels of the output ``quantiles``, between 0 and 1; none for classes.

    Raises:
        TypeError: a value is of another type.
        ValueError: the kind is unknown, ``num_samples`` is negative, a threshold is not finite, or
            a level of a quantile does not lie between 0 and 1.

    Example:
        >>> description = ExportMetadata("classification", 32, classes=("cat", "dog"))
        >>> ExportMetadata.from_json(description.to_json()) == description
        True
    """

    kind: Kind
    num_samples: int
    classes: tuple[str, ...] = ()
    input: Mapping[str, Any] = field(default_factory=dict)
    thresholds: Mapping[str, float] = field(default_factory=dict)
    quantiles: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Check the values, and make plain those of NumPy and PyTorch."""
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, got {self.kind!r}")
        for name in ("input", "thresholds"):
            if not isinstance(getattr(self, name), Mapping):
                raise TypeError(f"{name} must be a mapping, got {getattr(self, name)!r}")
        for name in ("classes", "quantiles"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Iterable):
                raise TypeError(f"{name} must be a sequence, got {value!r}")
        try:
            json.dumps(self.input)
        except (TypeError, ValueError) as error:
            raise TypeError(f"input must hold values of JSON, got {self.input!r}") from error
        thresholds = {
            name: one_number(f"the threshold of {name}", value)
            for name, value in self.thresholds.items()
        }
        for name, value in thresholds.items():
            if not math.isfinite(value):
                raise ValueError(f"the threshold of {name} must be finite, got {value}")
        quantiles = tuple(one_number("a quantile's level", level) for level in self.quantiles)
        for level in quantiles:
            if not 0.0 < level < 1.0:
                raise ValueError(f"a quantile's level must lie between 0 and 1, got {level}")
        plain = {
            "num_samples": whole_number("num_samples", self.num_samples, 0),
            "classes": tuple(map(str, getattr(self.classes, "tolist", lambda: self.classes)())),
            "thresholds": thresholds,
            "quantiles": quantiles,
        }
        for name, value in plain.items():
            object.__setattr__(self, name, value)

    def to_json(self) -> str:
        """Return the JSON text that is stored in a file."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> ExportMetadata:
        """Read the JSON text of a file.

        Raises:
            ValueError: it is not of this form, or of a newer format.
        """
        document: Any = json.loads(text)
        if not isinstance(document, dict) or document.pop("format", None) != _FORMAT:
            raise ValueError(f"the description must be a JSON object of format {_FORMAT}")
        try:
            return cls(**document)
        except TypeError as error:
            raise ValueError(f"the description has other entries than it must: {error}") from error


def metadata_of(net: nn.Module) -> ExportMetadata | None:
    """Return what a frozen network tells of itself; None for another module.

    Example:
        >>> import bayesify as bf
        >>> metadata_of(bf.freeze(bf.BayesianModule(nn.Linear(3, 2)), num_samples=8)).kind
        'classification'
    """
    if not isinstance(net, FrozenNetwork):
        return None
    kind: Kind = "regression" if net.quantiles else "classification"
    return ExportMetadata(kind, net.num_samples, quantiles=net.quantiles)


def read_metadata(path: str | os.PathLike[str]) -> ExportMetadata:
    """Read the description of an exported network, from a file ``.onnx`` or ``.pt2``.

    No code is loaded, and no weight of a ``.pt2`` is read.

    Args:
        path: the file; it is read as ONNX if its name ends in ``.onnx``, as ``.pt2`` otherwise.

    Raises:
        StorageError: the file is missing, damaged, or bayesify did not write it.
        ModuleNotFoundError: onnx is not installed, for an ONNX file.

    Example:
        >>> import tempfile
        >>> text = ExportMetadata("regression", 8).to_json()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with zipfile.ZipFile(f"{folder}/net.pt2", "w") as archive:
        ...         archive.writestr("net/extra/bayesify", text)
        ...     read_metadata(f"{folder}/net.pt2").num_samples
        8
    """
    place = Path(path)
    if not place.is_file():
        raise StorageError(f"there is no file {place}")
    text = _onnx_text(place) if place.suffix == ".onnx" else _program_text(place)
    if text is None:
        raise StorageError(
            f"{place} must have a description, as bayesify exports it of frozen networks, but has "
            "none; export bayesify.freeze(bnn)"
        )
    try:
        return ExportMetadata.from_json(text)
    except (ValueError, RecursionError) as error:
        raise StorageError(f"the description in {place} cannot be read: {error}") from error


def _onnx_text(path: Path) -> str | None:
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load_model(path, load_external_data=False)
    except DecodeError as error:
        raise StorageError(f"{path} is not a whole ONNX file, it was cut off or altered") from error
    found = [entry.value for entry in model.metadata_props if entry.key == METADATA_KEY]
    return found[0] if found else None


#: What Python's zip reader raises of an altered archive.
#: Bytes of a description that is read: a table's is of some thousands.
_MOST_TEXT = 64 * 2**20
_DAMAGED = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    OSError,
    RuntimeError,
    UnicodeDecodeError,
)


def _program_text(path: Path) -> str | None:
    with path.open("rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                names = (n for n in archive.namelist() if n.endswith(f"/extra/{METADATA_KEY}"))
                found = next(names, None)
                if found is None:
                    return None
                size = archive.getinfo(found).file_size
                if size > _MOST_TEXT:
                    raise StorageError(f"the description in {path} is too long, {size:,} bytes")
                return archive.read(found).decode()
        except _DAMAGED as error:
            raise StorageError(
                f"{path} is not a whole .pt2 file, it was cut off or altered"
            ) from error
