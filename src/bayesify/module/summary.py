"""Summary of a Bayesian module: shape and treatment of each random parameter, as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from bayesify.distributions.layout import ParameterLayout
from bayesify.estimators import Treatment

__all__ = ["ModuleSummary", "ParameterSummary"]


class ParameterSummary(NamedTuple):
    """One random parameter: its first name, shape and treatment, and the reason for it.

    ``treatment`` is ``"exact"``, ``"integrated"``, ``"per-position"``, ``"sampled"`` or
    ``"unknown"``; see :class:`~bayesify.estimators.Treatment`.

    Example:
        >>> from torch import nn, zeros
        >>> from bayesify.module.bayesian import BayesianModule
        >>> first = BayesianModule(nn.Linear(3, 2)).summary(zeros(5, 3))[0]
        >>> isinstance(first, ParameterSummary), first.name, first.shape
        (True, 'weight', (2, 3))
    """

    name: str
    shape: tuple[int, ...]
    treatment: str
    reason: str


class ModuleSummary(tuple[ParameterSummary, ...]):
    """How noise is added to each random parameter in a forward pass; prints as a table.

    Attributes:
        shared: the part of a pass's work, about as many multiplications, that depends on no random
            weight, so that ``predict`` runs it once for all weight samples, from 0 to 1.

    Example:
        >>> from torch import nn, zeros
        >>> from bayesify.module.bayesian import BayesianModule
        >>> from bayesify.estimators import Flipout
        >>> bnn = BayesianModule(nn.Linear(3, 2), estimator=Flipout())
        >>> bnn.summary(zeros(5, 3))
        parameter  shape  treatment  why
        weight     2 x 3  exact      linear uses random signs for each example
        bias       2      exact      linear uses random signs for each example
    """

    shared: float = 0.0

    @classmethod
    def of(
        cls,
        layout: ParameterLayout,
        treatments: Mapping[str, Treatment] | None,
        note: str = "",
        shared: float = 0.0,
    ) -> ModuleSummary:
        """Summarise how an estimator treats parameters.

        Args:
            layout: the layout of the random parameters.
            treatments: the treatment of each by its first name, or None if no pass was traced.
            note: appended to the reason of parameters with separate noise for each example.
            shared: the part of a pass's work that ``predict`` runs once for all weight samples.
        """
        rows = []
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            kind, reason = _UNKNOWN if treatments is None else treatments[name]
            reason += note if kind in ("exact", "per-position") else ""
            rows.append(ParameterSummary(name, tuple(shape), kind, reason))
        summary = cls(rows)
        summary.shared = shared
        return summary

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of parameters with each treatment."""
        return Counter(row.treatment for row in self)

    def __repr__(self) -> str:
        head = ("parameter", "shape", "treatment", "why")
        rows = [head] + [
            (r.name, " x ".join(map(str, r.shape)), r.treatment, r.reason) for r in self
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            "  ".join(
                [*(text.ljust(width) for text, width in zip(row[:3], widths, strict=True)), row[3]]
            )
            for row in rows
        ]
        if self.shared:
            share = f"{100.0 * self.shared:.0f} % of a pass's work"
            lines.append(f"predict runs {share} once for all weight samples")
        return "\n".join(lines)


_UNKNOWN = Treatment("unknown", "no forward pass yet; pass an example input to summary()")
