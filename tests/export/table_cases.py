"""Untrained networks of one small table for every kind of target."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bayesify import BayesianModule, Gaussian, LocalReparameterization
from bayesify.app.runs.measure import in_units
from bayesify.prediction import Predictive
from bayesify.tabular.censoring import Limits
from bayesify.tabular.model import TableNet, table_module
from bayesify.tabular.outside import widened
from bayesify.tabular.schema import TableSchema
from bayesify.tabular.training_table import fit_table

ROWS = 90
#: Options of ``fit_table`` for each kind of target.
TARGETS: dict[str, dict[str, Any]] = {
    "classes": {},
    "ordered": {"ordered": ("low", "middle", "high")},
    "gaussian": {},
    "student-t": {"likelihood": "student-t"},
    "censored": {"likelihood": "censored", "limits": Limits(above=110.0)},
    "poisson": {"likelihood": "poisson"},
    "negative-binomial": {"likelihood": "negative-binomial"},
}


class Case(NamedTuple):
    """A network and the schema of its table."""

    bnn: BayesianModule
    schema: TableSchema


def table(kind: str) -> str:
    """Numbers (skewed, one with missing values), a category, a flag and a date."""
    rng = np.random.default_rng(0)
    lines = ["city,size,income,sold,when,answer"]
    for row in range(ROWS):
        city = ("Rome", "Oslo", "São Paulo")[row % 3] if row % 7 else ""
        size = f"{rng.normal():.3f}" if row % 10 else ""
        date = f"202{row % 3}-{1 + row % 12:02}-{1 + row % 28:02}"
        mean = 3.0 * (row % 3) + rng.normal()
        answer: object = f"{100.0 + 7.0 * mean:.4f}"
        if kind in ("poisson", "negative-binomial"):
            answer = int(rng.poisson(1.0 + abs(mean)))
        elif kind in ("classes", "ordered"):
            answer = ("low", "middle", "high")[int(np.digitize(mean, (1.0, 5.0)))]
        income = f"{rng.lognormal(3.0, 2.0):.3f}"
        lines.append(f"{city},{size},{income},{('no', 'Yes')[row % 4 == 0]},{date},{answer}")
    return "\n".join(lines) + "\n"


def case(kind: str, folder: Path) -> Case:
    path = folder / f"{kind}.csv"
    path.write_text(table(kind), encoding="utf-8")
    schema = fit_table(path, "answer", **TARGETS[kind])[1]
    assert [column.kind for column in schema.columns] == [
        "category",
        "number",
        "number",
        "flag",
        "date",
    ]
    target = schema.target
    has_noise = not target.classes and not target.has_counts
    net = TableNet(
        len(schema.features),
        (6,),
        1 if target.is_ordered else len(target.classes) or 1,
        noise="input-dependent" if has_noise else None,
        log_rates=[target.log_rate] if target.has_counts else None,
        relevance=True,
    )
    with torch.no_grad():
        net.linear.weight.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(0))
    bnn = table_module(
        net,
        likelihood=target.make_likelihood(),
        prior_of=Gaussian,
        init_std=0.1,
        estimator=LocalReparameterization(),
        seed=3,
    )
    return Case(bnn, schema)


def expected(case: Case, values: np.ndarray, num_samples: int) -> Predictive:
    """The prediction of ``bayesify predict`` for the values of the columns."""
    bnn, schema = case
    columns = [*values.T]
    inputs = torch.from_numpy(schema.encode(columns))
    distances = torch.from_numpy(schema.farthest(columns))
    p = bnn.predict(inputs, num_samples) if num_samples else bnn.predict_mean(inputs)
    wide = widened(p, distances, torch.tensor(schema.target.marginal))
    return in_units(wide, schema.target.shift, schema.target.scale)


def close(found: Tensor, wanted: Tensor, unit: Tensor | float = 1.0) -> None:
    """Within 1e-5, relative and in the unit."""
    difference = (found.double() - wanted.double().reshape(found.shape)).abs()
    allowed = 1e-5 * (wanted.double().abs().reshape(found.shape) + unit)
    assert bool((difference <= allowed).all()), float((difference / allowed).max())
