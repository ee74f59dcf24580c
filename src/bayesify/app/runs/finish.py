"""Finish a run: write its metrics, pruning table, figures and report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from bayesify.app.report.figures import build_figures
from bayesify.app.report.page import write_report
from bayesify.app.report.parts import Part
from bayesify.app.report.table_parts import (
    class_parts,
    effect_part,
    importance_part,
    number_parts,
    result_part,
)
from bayesify.app.report.tuning_text import tuning_note
from bayesify.app.runs.comparison import check_comparable, kind_of_run, labels_of
from bayesify.app.runs.folder import Run, as_test_row
from bayesify.app.runs.measure import (
    FRACTIONS,
    evaluate,
    prune_table,
    pruning_samples,
    rows_in_units,
    shown,
)
from bayesify.app.runs.one_column import one_column
from bayesify.app.runs.run_data import RunData
from bayesify.app.runs.table_effects import (
    baseline,
    column_effects,
    importance,
    targets_in_units,
)
from bayesify.app.runs.train import Trained
from bayesify.datasets import IMAGE_DATASETS, find_test_inputs, thumbnail
from bayesify.distributions.posteriors import Delta
from bayesify.module.bayesian import BayesianModule
from bayesify.prediction import CategoricalPredictive, NumericPredictive, Predictive
from bayesify.tabular.table_data import TableData
from bayesify.training.history import History

if TYPE_CHECKING:  # pandas takes its time to load
    from bayesify.tabular.columns import ImageColumn

__all__ = ["finish", "rewrite_report"]

#: Images of another data set to predict: a histogram of 10,000 shows no more.
_MOST_OUTSIDE = 2000
#: Texts, or paths of images, in a table of the report.
_MOST_TEXTS = 12
#: Height and width of an image of a table in the report, in pixels.
_PICTURE = 96
#: Metrics that are those of the last epoch.
_LAST_EPOCH = (
    "fraction_pruned",
    "free_energy",
    "free_energy_untrained",
    "free_energy_untrained_error",
    "std_residual",
    "std_residual_worst",
    "std_residual_worst_error",
)


def finish(run: Run, data: RunData, trained: Trained) -> tuple[dict[str, Any], Path]:
    """Measure a trained network and write everything about it.

    Returns:
        The metrics, as in ``metrics.json``, and the path of the report.
    """
    bnn, history, notes = trained
    measured, predictive = evaluate(bnn, data, num_samples=run.config.test_samples)
    last = history[-1]
    metrics = {
        **measured,
        "epochs": int(last["epoch"] or 0),
        "passes": run.config.passes,
        "seconds_train": last["seconds"],
        "temperature": None if run.config.baseline else run.config.temperature,
        **{name: last.get(name) for name in _LAST_EPOCH},
        **_table_metrics(run, data, bnn),
        "notes": notes,
    }
    tuning = run.tuning()
    if tuning is not None:
        metrics["tuning"] = tuning
    run.write_history(history)
    run.write_metrics(metrics)
    return metrics, _report(run, data, bnn, history, metrics, predictive)


def rewrite_report(
    run: Run, data: RunData, others: Sequence[Run] = (), *, data_dir: str | None = None
) -> Path:
    """Draw the figures and write the report of a finished run again, from its files.

    Args:
        run: the run.
        data: its data set.
        others: other finished runs, whose curves, weights and metrics are shown for comparison.
        data_dir: where to look for images of another data set; None looks where the run's data
            were.

    Raises:
        RunError: a run is not finished, or another one was measured by other data.
    """
    check_comparable(run, others)
    bnn = run.load_module()
    metrics = run.metrics()
    if run.table is not None:
        # Runs of older versions have none of these.
        metrics |= _table_metrics(run, data, bnn)
        run.write_metrics(metrics)
    _, predictive = evaluate(bnn, data, num_samples=run.config.test_samples, with_train=False)
    return _report(run, data, bnn, run.history(), metrics, predictive, others, data_dir)


def _report(
    run: Run,
    data: RunData,
    bnn: BayesianModule,
    history: History,
    metrics: dict[str, Any],
    predictive: Predictive,
    others: Sequence[Run] = (),
    data_dir: str | None = None,
) -> Path:
    pruning: list[dict[str, Any]] = []
    # Each fraction takes several passes of the pretrained network over all held-out rows.
    if not (isinstance(bnn.posterior, Delta) or run.config.adapter):
        samples = pruning_samples(data, run.config.test_samples)
        pruning = prune_table(bnn, data, FRACTIONS, num_samples=samples)
        if pruning and data.class_names:  # with more weight samples: one number for one thing
            whole = metrics["test"] or metrics["train"]
            pruning[0]["error_predictive"] = whole["error_predictive"]
        run.write_json("pruning.json", pruning)
    inputs, targets = shown(data)
    rows = [as_test_row(row) for row in history]
    labels = labels_of(others)
    baselines = [other.history() for other in others]
    truth, error = _truth(run, data), None
    if truth is not None and isinstance(data, TableData):
        # Training standardises the target; a reader has its own unit.
        rows = rows_in_units(rows, data.scale)
        pruning = rows_in_units(pruning, data.scale)
        scales = [
            data.scale if other.table is None else other.table.target.scale for other in others
        ]
        baselines = [rows_in_units(*each) for each in zip(baselines, scales, strict=True)]
        error = f"RMSE of {truth[0]}"
    figures = build_figures(
        bnn,
        images=inputs,
        targets=targets,
        predictive=predictive,
        history=rows,
        pruning=pruning,
        class_names=data.class_names,
        image_shape=data.image_shape,
        pictures=_pictures(run, data),
        baselines=dict(zip(labels, baselines, strict=True)),
        baseline_weights={
            label: _weights_left(other) for label, other in zip(labels, others, strict=True)
        },
        outside=_outside(run, data, bnn, data_dir or run.data_dir),
        truth=truth,
        error=error,
    )
    curve = one_column(run, data, bnn)
    if curve is not None:
        figures = {"one_column": curve, **figures}
    parts: list[Part] = []
    if isinstance(data, TableData) and len(data.test_targets):
        parts, own = _table_parts(run, data, bnn, metrics, predictive, has_curve=curve is not None)
        figures |= own
        # Figures that do not apply to this network were not drawn.
        parts = [part for part in parts if all(name in figures for name in part.figures)]
    document, idle = run.document, run.config.idle()
    del document["settings"]
    settings = {name: value for name, value in run.config.to_json().items() if name not in idle}
    return write_report(
        run.folder,
        title=_title(run, data),
        config={**settings, **document},
        metrics=metrics,
        history=rows,
        pruning=pruning,
        figures=figures,
        notes=[*metrics.get("notes", []), *_table_notes(run), *_image_notes(run)],
        others={label: other.metrics() for label, other in zip(labels, others, strict=True)},
        texts=_example_tables(run, data, predictive),
        parts=parts,
    )


def _table_metrics(run: Run, data: RunData, bnn: BayesianModule) -> dict[str, Any]:
    """Return what ``metrics.json`` has for tables alone, null where no row is held out."""
    if not isinstance(data, TableData):
        return {}
    if not len(data.test_targets):
        return {"baseline": None, "importance": None}
    # So does each column, a thousand times.
    found = None if run.config.adapter else importance(run, data, bnn)
    return {"baseline": baseline(data), "importance": found}


def _table_parts(
    run: Run,
    data: TableData,
    bnn: BayesianModule,
    metrics: dict[str, Any],
    predictive: Predictive,
    *,
    has_curve: bool,
) -> tuple[list[Part], dict[str, Figure]]:
    """Return the parts of a report for a table's owner, in their order, and their figures."""
    assert run.table is not None
    target, test = run.table.target.name, metrics["test"]
    targets, figures = targets_in_units(data), dict[str, Figure]()
    parts = [result_part(target, len(targets), test, metrics["baseline"])]
    if has_curve:
        parts.append(Part("one_column", figures=("one_column",)))
    if isinstance(predictive, CategoricalPredictive):
        parts += class_parts(predictive, targets, data.class_names)
        parts.append(Part("reliability", figures=("reliability",)))
    if isinstance(predictive, NumericPredictive):
        more, drawn = number_parts(predictive, targets, target, test)
        parts, figures = [*parts, *more], figures | drawn
    found = metrics["importance"]
    if found is not None:
        part, drawn = importance_part(found, len(run.table.columns))
        parts, figures = [*parts, part], figures | drawn
        effects = [] if has_curve else column_effects(run, data, bnn, found["columns"])
        if effects:
            counts = data.train_targets.bincount().tolist() if data.class_names else []
            part, drawn = effect_part(effects, target, data.class_names, counts)
            parts, figures = [*parts, part], figures | drawn
    return parts, figures


def _outside(
    run: Run, data: RunData, bnn: BayesianModule, data_dir: str | None
) -> tuple[str, Predictive] | None:
    """Return the predictions for images of another data set, if one is at hand."""
    if data.name not in IMAGE_DATASETS or isinstance(bnn.posterior, Delta):
        return None
    for name in IMAGE_DATASETS:
        if name == data.name:
            continue
        inputs = find_test_inputs(name, data_dir)
        if inputs is not None:
            return name, bnn.predict(inputs[:_MOST_OUTSIDE], run.config.test_samples)
    return None


def _truth(run: Run, data: RunData) -> tuple[str, Tensor] | None:
    """Return the name of a table's target, and its test values in its own unit."""
    if not isinstance(data, TableData) or run.config.task != "regression":
        return None
    return run.config.target or "target", data.numbers(shown(data)[1])


def _image_column(run: Run) -> ImageColumn | None:
    """Return the column of images that a pretrained network reads, if there is one."""
    if run.table is None:
        return None
    from bayesify.tabular.columns import ImageColumn

    return next((each for each in run.table.columns if isinstance(each, ImageColumn)), None)


def _weights_left(run: Run) -> Tensor:
    """Return the means of a run's weights that are not pruned."""
    posterior = run.load_module().posterior
    return posterior.mean if posterior.mask is None else posterior.mean[posterior.mask]


def _pictures(run: Run, data: RunData) -> Callable[[Tensor], Tensor] | None:
    """Return what draws the held-out images of a table; None for a table without images."""
    if _image_column(run) is None or not isinstance(data, TableData) or not data.test_texts:
        return None
    from bayesify.tabular.files import path_of_image

    source = Path(run.config.dataset)
    folder = source if run.config.target is None else source.parent
    cells = data.test_texts

    def draw(places: Tensor) -> Tensor:
        paths = (path_of_image(folder, cells[place]) for place in places.tolist())
        return torch.stack([thumbnail(path, _PICTURE) for path in paths])

    return draw


def _example_tables(
    run: Run, data: RunData, predictive: Predictive
) -> dict[str, list[dict[str, Any]]]:
    """Return tables of held-out texts or images by their heading.

    They are those of the highest total uncertainty, the highest first, and those that lie outside
    the training data, the farthest first. Images of classes are drawn instead of the first table.
    """
    if not isinstance(data, TableData) or not data.test_texts:
        return {}
    what = "texts" if _image_column(run) is None else "images"
    total = predictive.total.flatten()
    tables = {}
    if what == "texts" or not data.class_names:
        chosen = total.argsort(descending=True, stable=True)[:_MOST_TEXTS]
        tables[f"Least certain test {what}"] = _example_rows(data, predictive, chosen)
    order = data.test_distances.argsort(descending=True, stable=True)
    outside = order[data.test_distances[order] > 0.0]
    if len(outside):
        rows = _example_rows(data, predictive, outside[:_MOST_TEXTS])
        tables[f"Test {what} outside the training data"] = rows
    return tables


def _example_rows(data: TableData, predictive: Predictive, chosen: Tensor) -> list[dict[str, Any]]:
    total, epistemic = (part.flatten() for part in (predictive.total, predictive.epistemic))
    rows = []
    for place in chosen.tolist():
        target, mean = data.test_targets[place], predictive.mean[place]
        names = data.class_names
        if names:
            true, predicted = names[int(target)], names[int(mean.argmax())]
        else:
            true, predicted = (f"{float(value):.5g}" for value in (data.numbers(target), mean))
        rows.append(
            {
                "text": data.test_texts[place],
                "true": true,
                "predicted": predicted,
                "total": float(total[place]),
                "epistemic": float(epistemic[place]),
            }
        )
    return rows


def _title(run: Run, data: RunData) -> str:
    of = f": {run.config.target}" if run.config.target is not None else ""
    return f"{kind_of_run(run)} on {data.name}{of}"


def _table_notes(run: Run) -> list[str]:
    """Return notes on how a table was read."""
    if run.table is None:
        return []
    split = run.table.split
    notes = [
        f"{split['train']:,} rows for training, {split['test']:,} held out by seed "
        f"{split['seed']}: these are the test data"
        if split["test"]
        else f"{split['train']:,} rows for training, none held out: the figures are of training "
        "rows, and tell nothing of new ones",
        *(f"not used: {name}, for {reason}" for name, reason in run.table.dropped.items()),
        *run.table.remarks,
    ]
    tuning = run.tuning()
    if tuning is not None:
        notes.insert(0, tuning_note(tuning))
    if not run.table.target.limits.are_open:
        notes.append(
            "all measures but the error over epochs are of the number as it is recorded between "
            "its limits; bayesify predict writes the mean of the number itself, which may lie "
            "beyond them; the error over epochs is of this mean, and a mean beyond a limit counts "
            "as right for a number recorded at it"
        )
    if run.config.task == "regression" and not run.table.target.has_counts:
        notes.append(
            "the objective in the curves over epochs and the free energy are of the standardised "
            "target; all else is in the target's own unit"
        )
    return notes


def _image_notes(run: Run) -> list[str]:
    """Return notes on how a folder of images was read."""
    if run.images is None:
        return []
    split = run.images.split
    return [
        f"{split['train']:,} images for training, {split['test']:,} held out by seed "
        f"{split['seed']}: these are the test data",
        *run.images.remarks,
    ]
