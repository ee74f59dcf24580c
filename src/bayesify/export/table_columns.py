"""ONNX operators that turn the raw columns of a table into values, and example columns."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bayesify.tabular.cells import MISSING
from bayesify.tabular.columns import CategoryColumn, Column, FlagColumn, RangedColumn

if TYPE_CHECKING:
    import onnx

__all__ = [
    "INNER",
    "constants",
    "example_values",
    "input_names",
    "raw_columns",
    "value_nodes",
]

#: Names of the values within a graph begin with one of these.
INNER = ("columns/", "network/")
#: A text that is no level and no word of any column.
_UNKNOWN = "no level of the training table"
_EXAMPLES = 64


def input_names(columns: Sequence[Column], taken: Sequence[str]) -> list[str]:
    """Return the names of a graph's inputs: those of the columns, unless they are taken.

    Example:
        >>> from bayesify.tabular.columns import NumberColumn
        >>> input_names([NumberColumn(name="age"), NumberColumn(name="mean")], ["mean"])
        ['age', 'mean (input)']
    """
    names: list[str] = []
    for column in columns:
        name = column.name or "column"
        if name.startswith(INNER):
            name = f"input {name}"
        while name in taken or name in names:
            name += " (input)"
        names.append(name)
    return names


def value_nodes(column: Column, name: str, output: str) -> Iterator[onnx.NodeProto]:
    """Yield the nodes that compute the values of a column (N, 1), float64, from its input.

    Args:
        column: the column.
        name: name of the graph's input (N,).
        output: name of the values; names of the values between begin with it.
    """
    from onnx.helper import make_node

    if isinstance(column, RangedColumn):
        yield make_node("Unsqueeze", [name, "columns/last"], [output])
        return
    found, missing, unknown = (f"{output}/{part}" for part in ("found", "missing", "unknown"))
    words = "|".join(map(re.escape, sorted(MISSING)))
    yield make_node("RegexFullMatch", [name], [missing], pattern=rf"(?i)\s*(?:{words})\s*")
    yield make_node("Where", [missing, "columns/nan", "columns/inf"], [unknown])
    if isinstance(column, CategoryColumn):
        code, is_unknown = f"{output}/code", f"{output}/is_unknown"
        yield make_node(
            "LabelEncoder",
            [name],
            [code],
            domain="ai.onnx.ml",
            keys_strings=list(column.levels),
            values_int64s=list(range(len(column.levels))),
            default_int64=-1,
        )
        yield make_node("Cast", [code], [found], to=_double())
        yield make_node("Less", [code, "columns/zero"], [is_unknown])
        yield make_node("Where", [is_unknown, unknown, found], [f"{output}/value"])
    else:
        assert isinstance(column, FlagColumn)
        rest = unknown
        for value, word in zip(("no", "yes"), column.words, strict=True):
            is_word, known = f"{output}/is_{value}", f"{output}/{value}_or_other"
            pattern = rf"(?i)\s*{re.escape(word)}\s*"
            yield make_node("RegexFullMatch", [name], [is_word], pattern=pattern)
            yield make_node("Where", [is_word, f"columns/{value}", rest], [known])
            rest = known
        yield make_node("Identity", [rest], [f"{output}/value"])
    yield make_node("Unsqueeze", [f"{output}/value", "columns/last"], [output])


def constants() -> list[onnx.TensorProto]:
    """Return the constants that the nodes of the columns have in common."""
    from onnx.numpy_helper import from_array

    values: dict[str, Any] = {
        "nan": np.float64(math.nan),
        "inf": np.float64(math.inf),
        "no": np.float64(0.0),
        "yes": np.float64(1.0),
        "zero": np.int64(0),
        "last": np.array([1], dtype=np.int64),
    }
    return [from_array(np.asarray(value), f"columns/{name}") for name, value in values.items()]


def example_values(columns: Sequence[Column]) -> npt.NDArray[np.float64]:
    """Return values of columns to check a graph by: typical, missing, unknown and far outside.

    Example:
        >>> example_values([FlagColumn(name="sold", words=("no", "yes"))]).shape
        (64, 1)
    """
    generator = np.random.default_rng(0)
    return np.stack(
        [generator.choice(_candidates(column), _EXAMPLES) for column in columns], axis=1
    )


def _candidates(column: Column) -> list[float]:
    if isinstance(column, CategoryColumn):
        return [*map(float, range(min(len(column.levels), 20))), math.nan, math.inf]
    if not isinstance(column, RangedColumn):
        return [0.0, 1.0, 0.0, 1.0, math.nan, math.inf]
    std = column.std or 1.0
    near = [column.mean + place * std for place in (-1.5, -1.0, -0.5, 0.0, 0.3, 0.8, 1.7)]
    far = [column.mean + place * std for place in (-30.0, 20.0)]
    if column.plain:  # beyond it inputs are bounded, where a network would amplify rounding
        far.append(-1e300)
    return [*near, *far, *getattr(column, "typical", ()), math.nan]


def raw_columns(
    columns: Sequence[Column], names: Sequence[str], values: npt.NDArray[np.float64]
) -> dict[str, npt.NDArray[Any]]:
    """Return the inputs of a graph for values of the columns.

    Example:
        >>> column = FlagColumn(name="sold", words=("no", "yes"))
        >>> raw_columns([column], ["sold"], np.array([[1.0], [math.nan]]))
        {'sold': array(['yes', ''], dtype=object)}
    """
    found: dict[str, npt.NDArray[Any]] = {}
    for place, (column, name) in enumerate(zip(columns, names, strict=True)):
        if isinstance(column, RangedColumn):
            found[name] = values[:, place]
            continue
        assert isinstance(column, CategoryColumn | FlagColumn)
        words = column.levels if isinstance(column, CategoryColumn) else column.words
        texts = [_text(value, words) for value in values[:, place].tolist()]
        found[name] = np.array(texts, dtype=object)
    return found


def _text(value: float, words: Sequence[str]) -> str:
    if math.isnan(value):
        return ""
    return _UNKNOWN if math.isinf(value) else words[int(value)]


def _double() -> int:
    from onnx import TensorProto

    found: int = TensorProto.DOUBLE
    return found
