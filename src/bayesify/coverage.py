"""Which random parameter gets which treatment, as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from bayesify.layout import ParameterLayout
from bayesify.perturbations import Perturbation, Treatment
from bayesify.perturbations.tracing import Uses

__all__ = ["Coverage", "CoverageRow"]


class CoverageRow(NamedTuple):
    """One random parameter: its first name, shape, treatment, and why it gets it.

    ``treatment`` is ``"exact"``, ``"per-position"``, ``"sampled"`` or ``"unknown"``.
    """

    name: str
    shape: tuple[int, ...]
    treatment: str
    reason: str


class Coverage(tuple[CoverageRow, ...]):
    """How each random parameter of a network is perturbed in a forward pass; prints as a table.

    Example:
        >>> from torch import nn, zeros
        >>> from bayesify.module import BayesianModule
        >>> from bayesify.perturbations import Flipout
        >>> bnn = BayesianModule(nn.Linear(3, 2), perturbation=Flipout())
        >>> bnn.coverage(zeros(5, 3))
        parameter  shape  treatment  why
        weight     2 x 3  exact      linear meets each datum with signs of its own
        bias       2      exact      linear meets each datum with signs of its own
    """

    __slots__ = ()

    @classmethod
    def of(
        cls, layout: ParameterLayout, perturbation: Perturbation, uses: Uses | None, note: str = ""
    ) -> Coverage:
        """The treatments that a perturbation gives to parameters with these uses.

        Args:
            layout: the random parameters.
            perturbation: how they are perturbed.
            uses: what a traced pass found, or None if there was none yet.
            note: added to the reason of whatever is perturbed datum by datum.
        """
        rows = []
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            kind, reason = _treatment(perturbation, uses, name)
            reason += note if kind in ("exact", "per-position") else ""
            rows.append(CoverageRow(name, tuple(shape), kind, reason))
        return cls(rows)

    @property
    def counts(self) -> Mapping[str, int]:
        """How many parameters get each treatment."""
        return Counter(row.treatment for row in self)

    def __repr__(self) -> str:
        head = ("parameter", "shape", "treatment", "why")
        rows = [head] + [
            (r.name, " x ".join(map(str, r.shape)), r.treatment, r.reason) for r in self
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(
            "  ".join(
                [*(text.ljust(width) for text, width in zip(row[:3], widths, strict=True)), row[3]]
            )
            for row in rows
        )


def _treatment(perturbation: Perturbation, uses: Uses | None, name: str) -> Treatment:
    if not perturbation.needs_trace:
        return perturbation.treatment(())
    if uses is None:
        return Treatment("unknown", "no forward pass yet; give coverage() an example input")
    return perturbation.treatment(uses[name])
