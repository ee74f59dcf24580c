"""Read the columns that a run stored as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bayesify.tabular.columns.categories import CategoryColumn, FlagColumn
from bayesify.tabular.columns.column import Column, UnusedColumn
from bayesify.tabular.columns.dates import DateColumn
from bayesify.tabular.columns.images import ImageColumn
from bayesify.tabular.columns.numbers import NumberColumn
from bayesify.tabular.columns.texts import TextColumn
from bayesify.tabular.columns.tokens import TokenColumn
from bayesify.tabular.files import TableError

__all__ = ["column_from_json"]

_KINDS: dict[str, type[Column]] = {
    kind.kind: kind
    for kind in (
        NumberColumn,
        DateColumn,
        FlagColumn,
        CategoryColumn,
        TextColumn,
        TokenColumn,
        ImageColumn,
        UnusedColumn,
    )
}


def column_from_json(stored: Mapping[str, Any]) -> Column:
    """Return the column that :meth:`Column.to_json` wrote.

    Raises:
        TableError: it is not of this form.

    Example:
        >>> column_from_json(FlagColumn(name="sold", words=("no", "yes")).to_json()).name
        'sold'
    """
    try:
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in stored.items()
            if name != "kind"
        }
        return _KINDS[stored["kind"]](**fields)
    except (KeyError, TypeError) as error:
        raise TableError(f"a stored column cannot be read: {error}") from error
