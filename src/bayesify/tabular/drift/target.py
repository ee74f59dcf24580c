"""The column of a target, whose classes may be written as numbers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from bayesify.tabular.cells import Floats, Texts
from bayesify.tabular.columns import CategoryColumn, Column, NumberColumn
from bayesify.tabular.schema import Target, label_of

__all__ = ["Labels", "target_column"]


@dataclass(frozen=True, kw_only=True)
class Labels(CategoryColumn):
    """Classes of a target, whose 1 may be written 1.0."""

    def _parse(self, texts: Texts) -> Floats:
        return super()._parse(np.array([label_of(text) for text in texts], dtype=object))


def target_column(target: Target) -> Column:
    """Return the column of a target, to find how a new table writes it.

    Example:
        >>> target = Target("grade", "classification", classes=("bad", "good"))
        >>> target_column(target).parse(np.array(["good", "worst"], dtype=object)).tolist()
        [1.0, inf]
    """
    if target.task == "classification":
        return Labels(name=target.name, levels=target.classes, kept=len(target.classes))
    return NumberColumn(
        name=target.name,
        whole=target.whole,
        typical=target.typical,
        **dataclasses.asdict(target.form),
    )
