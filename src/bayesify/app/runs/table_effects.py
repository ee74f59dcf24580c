"""Measure on held-out rows what a run's columns are worth: the baseline, importance, effects."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesify.app.runs.folder import Run
from bayesify.app.runs.measure import distinct_samples, in_units, recorded
from bayesify.metrics import classification_metrics, regression_metrics
from bayesify.module.bayesian import BayesianModule
from bayesify.module.threads import num_threads
from bayesify.noise.keys import Stream, derived_seed
from bayesify.prediction import (
    CategoricalPredictive,
    GaussianPredictive,
    NegativeBinomialPredictive,
    PoissonPredictive,
    Predictive,
)
from bayesify.tabular.effects import (
    Importance,
    PartialDependence,
    Rise,
    partial_dependence,
    permutation_importance,
)
from bayesify.tabular.likelihoods import COUNTS
from bayesify.tabular.scaling import Scaling
from bayesify.tabular.table_data import TableData

if TYPE_CHECKING:  # pandas takes its time to load
    from bayesify.tabular.grids import Grid

__all__ = ["baseline", "column_effects", "importance", "targets_in_units"]

#: Rows, other rows a row is given cells of, and weight samples of an importance.
_MOST_ROWS, _FEWEST_ROWS = 1000, 10
_REPEATS = 5
_SAMPLES = 10
_LEVEL = 0.95
#: A table of many columns and inputs is measured on fewer rows: products of all these forward
#: passes. They take a few seconds.
_MOST_PRODUCTS = 2e10
_ENOUGH_ROWS = 200
#: Of more columns those are measured whose importance at the mean weights is highest.
_MOST_COLUMNS = 50
#: Columns whose effect is drawn, and the rows over which it is averaged.
_EFFECTS = 6
_EFFECT_ROWS = 200
#: Likelihoods whose wild targets count in full, so that their mean is not the shift of the scaling.
_UNCLIPPED = (*COUNTS, "student-t")


def baseline(data: TableData) -> dict[str, Any]:
    """Return what the same prediction for every row would score on the held-out rows.

    Returns:
        For classes ``prediction``, the most frequent one in training, its ``error`` in percent, and
        ``nll`` and ``brier`` of the training rows' shares, where a class without a row counts as
        half a row. For numbers ``prediction``, the mean of the training rows, its ``rmse``, and
        ``nll`` and ``crps`` of the Gaussian with their mean and standard deviation; of counts those
        of the likelihood with their mean and variance. For censored numbers, all come from the
        Gaussian within the limits.
    """
    targets = targets_in_units(data)
    if data.class_names:
        counts = data.train_targets.bincount(minlength=len(data.class_names)).double()
        # A class may occur only in held-out rows of a streamed table, and JSON has no infinity.
        weights = counts.clamp_min(0.5)
        shares = (weights / weights.sum()).expand(len(targets), -1)
        same = CategoricalPredictive.from_logits([shares.log()])
        found = classification_metrics(same, shares, targets)
        name = data.class_names[int(counts.argmax())]
        error = {"error": found["error_predictive"]}
        return {"prediction": name, **error, "nll": found["nll"], "brier": found["brier"]}
    every, numbers = _same_number(data, targets), data.numbers(data.train_targets)
    found = regression_metrics(every, targets)
    prediction = float(numbers.mean()) if data.likelihood in _UNCLIPPED else data.shift
    return {
        "prediction": prediction if data.limits.are_open else float(every.mean.flatten()[0]),
        **{name: found[name] for name in ("rmse", "nll", "crps")},
    }


def _same_number(data: TableData, targets: Tensor) -> Predictive:
    """Return the distribution of all targets alike with mean and variance of the training rows."""
    if data.likelihood in COUNTS:
        counts = data.train_targets.double()
        mean = counts.mean().clamp_min(0.5 / len(counts))
        rates = mean.log().expand(1, *targets.shape)
        dispersion = (counts.var(correction=0) - mean) / mean.square()
        if data.likelihood == "poisson" or dispersion <= 0.0:
            return PoissonPredictive(rates)
        return NegativeBinomialPredictive(rates, dispersion)
    same = Scaling.of_numbers(0.0, 1.0)
    if data.likelihood in _UNCLIPPED:
        same = Scaling.of(data.train_targets.double())
    means = same.shift.expand(1, *targets.shape)
    return recorded(GaussianPredictive(means, same.scale), data)


def targets_in_units(data: TableData) -> Tensor:
    """Return the held-out targets: class indices, or numbers in their own unit."""
    targets = data.test_targets
    return targets if data.class_names else data.numbers(targets)


def importance(run: Run, data: TableData, bnn: BayesianModule) -> dict[str, Any] | None:
    """Return the permutation importance of each column, as in ``metrics.json``.

    Returns:
        None for fewer than ten held-out rows. Else ``rows``, ``repeats``, ``weight_samples`` and
        ``level`` of the measurement, and ``columns``: the name, and the rise of the ``nll`` and of
        the ``error`` (percent) or ``rmse``, each with the ends of its interval, the highest rise of
        the nll first.
    """
    from bayesify.tabular.grids import column_places

    assert run.table is not None
    held_out = len(data.test_inputs)
    if held_out < _FEWEST_ROWS:
        return None
    columns = column_places(run.table)
    samples = distinct_samples(bnn, _SAMPLES)
    measured = min(len(columns), _MOST_COLUMNS)
    passes = measured * _REPEATS * samples * bnn.layout.num_weights
    count = min(held_out, _MOST_ROWS, max(_ENOUGH_ROWS, int(_MOST_PRODUCTS / passes)))
    rows = _some(run, held_out, count)
    inputs, targets = data.test_inputs[rows], targets_in_units(data)[rows]
    seed = run.config.seed
    # One thread: the tensors are small, and two threads are slower.
    if len(columns) > _MOST_COLUMNS:
        few = slice(_ENOUGH_ROWS)
        at_mean = partial(_predicted_at_mean, bnn, data)
        with num_threads(1):
            found = permutation_importance(
                at_mean, inputs[few], targets[few], columns, repeats=1, seed=seed
            )
        best = sorted(found, key=lambda each: -each.nll.rise)[:_MOST_COLUMNS]
        kept = {each.column for each in best}
        columns = {name: places for name, places in columns.items() if name in kept}
    with num_threads(1):
        found = permutation_importance(
            partial(_recorded, bnn, data, samples),
            inputs,
            targets,
            columns,
            repeats=_REPEATS,
            level=_LEVEL,
            seed=seed,
        )
    loss = "error" if data.class_names else "rmse"
    return {
        "rows": count,
        "repeats": _REPEATS,
        "weight_samples": samples,
        "level": _LEVEL,
        "columns": [_as_json(each, loss) for each in sorted(found, key=lambda e: -e.nll.rise)],
    }


def column_effects(
    run: Run, data: TableData, bnn: BayesianModule, columns: Sequence[dict[str, Any]]
) -> list[tuple[Grid, PartialDependence]]:
    """Return the effect of the most important columns, the most important first.

    Args:
        run: the run.
        data: its data.
        bnn: its network.
        columns: importances as in ``metrics.json``; only those with an interval above 0 count.
    """
    from bayesify.tabular.grids import column_places, grids_of

    assert run.table is not None
    places = column_places(run.table)
    by_name = {column.name: column for column in run.table.columns}
    names = [each["column"] for each in columns if each["nll"]["low"] > 0.0][:_EFFECTS]
    rows = _some(run, len(data.test_inputs), min(len(data.test_inputs), _EFFECT_ROWS))
    samples = distinct_samples(bnn, run.config.test_samples)
    predict = partial(_predicted, bnn, data, samples)
    found = []
    for name in names:
        for grid in grids_of(by_name[name], places[name], data.train_inputs.numpy()):
            values = torch.from_numpy(grid.inputs)
            with num_threads(1):
                effect = partial_dependence(predict, data.test_inputs[rows], grid.places, values)
            found.append((grid, effect))
    return found


def _some(run: Run, count: int, wanted: int) -> Tensor:
    """Return the places of some rows, a function of the run's seed."""
    generator = torch.Generator()
    generator.manual_seed(derived_seed(run.config.seed, Stream.SHUFFLE, 0, 3))
    return torch.randperm(count, generator=generator)[:wanted]


def _predicted(bnn: BayesianModule, data: TableData, samples: int, rows: Tensor) -> Predictive:
    # Of the network itself, without wider predictions for rows outside: it is what is explained.
    return in_units(bnn.predict(rows, samples, keep_samples=True), data.shift, data.scale)


def _recorded(bnn: BayesianModule, data: TableData, samples: int, rows: Tensor) -> Predictive:
    return recorded(bnn.predict(rows, samples, keep_samples=True), data)


def _predicted_at_mean(bnn: BayesianModule, data: TableData, rows: Tensor) -> Predictive:
    return recorded(bnn.predict_mean(rows), data)


def _as_json(importance: Importance, loss: str) -> dict[str, Any]:
    rises: dict[str, Rise] = {"nll": importance.nll, loss: importance.error}
    return {"column": importance.column, **{name: each._asdict() for name, each in rises.items()}}
