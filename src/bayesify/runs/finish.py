"""What a finished run leaves: metrics, the pruning table, the figures and the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from bayesify.datasets import IMAGE_DATASETS, find_test_inputs
from bayesify.figures import build_figures
from bayesify.module import BayesianModule
from bayesify.posteriors import Delta
from bayesify.predictive import Predictive
from bayesify.report import write_report
from bayesify.runs.data import RunData
from bayesify.runs.folder import Run, as_test_row
from bayesify.runs.measure import FRACTIONS, evaluate, prune_table
from bayesify.runs.one_column import one_column
from bayesify.runs.train import Trained
from bayesify.tables.data import TableData
from bayesify.training.history import History

__all__ = ["finish", "rewrite_report"]

#: Images of another kind that are looked at: a histogram shows no more of 10,000.
_MOST_OUTSIDE = 2000


def finish(run: Run, data: RunData, trained: Trained) -> tuple[dict[str, Any], Path]:
    """Measure a trained network and write everything about it.

    Returns:
        The metrics, as in ``metrics.json``, and where the report is.
    """
    bnn, history, notes = trained
    measured, predictive = evaluate(bnn, data, num_samples=run.config.test_samples)
    last = history[-1]
    metrics = {
        **measured,
        "epochs": int(last["epoch"] or 0) * run.config.passes,
        "seconds_train": last["seconds"],
        "temperature": None if run.config.baseline else run.config.temperature,
        "std_residual": last["std_residual"],
        "notes": notes,
    }
    run.write_history(history)
    run.write_metrics(metrics)
    return metrics, _report(run, data, bnn, history, metrics, predictive)


def rewrite_report(
    run: Run, data: RunData, beside: Sequence[Run] = (), *, data_dir: str | None = None
) -> Path:
    """Draw the figures and write the report of a finished run again, from its files.

    Args:
        run: the run.
        data: its data set.
        beside: other finished runs, to show their curves, weights and metrics too.
        data_dir: where to look for images of another kind; None looks where the run's data were.

    Raises:
        RunError: a run is not finished.
    """
    bnn = run.load_module()
    metrics = run.metrics()
    _, predictive = evaluate(bnn, data, num_samples=run.config.test_samples, with_train=False)
    return _report(run, data, bnn, run.history(), metrics, predictive, beside, data_dir)


def _report(
    run: Run,
    data: RunData,
    bnn: BayesianModule,
    history: History,
    metrics: dict[str, Any],
    predictive: Predictive,
    beside: Sequence[Run] = (),
    data_dir: str | None = None,
) -> Path:
    pruning: list[dict[str, Any]] = []
    if not isinstance(bnn.posterior, Delta):
        pruning = prune_table(bnn, data, FRACTIONS)
        run.write_json("pruning.json", pruning)
    figures = build_figures(
        bnn,
        images=data.test_inputs,
        targets=data.test_targets,
        predictive=predictive,
        history=[as_test_row(row) for row in history],
        pruning=pruning,
        class_names=data.class_names,
        image_shape=data.image_shape,
        baselines={_label(other): other.history() for other in beside},
        baseline_weights={_label(other): other.load_module().posterior.mean for other in beside},
        outside=_outside(run, data, bnn, data_dir or run.data_dir),
        truth=_truth(run, data),
    )
    curve = one_column(run, data, bnn)
    if curve is not None:
        figures = {"one_column": curve, **figures}
    document = run.document
    settings = document.pop("settings")
    return write_report(
        run.folder,
        title=_title(run, data),
        config={**settings, **document},
        metrics=metrics,
        history=[as_test_row(row) for row in history],
        pruning=pruning,
        figures=figures,
        notes=[*metrics.get("notes", []), *_table_notes(run)],
        beside={_label(other): other.metrics() for other in beside},
    )


def _outside(
    run: Run, data: RunData, bnn: BayesianModule, data_dir: str | None
) -> tuple[str, Predictive] | None:
    """What the network says of images of another kind, where some are at hand."""
    if data.image_shape is None or isinstance(bnn.posterior, Delta):
        return None
    for name in IMAGE_DATASETS:
        if name == data.name:
            continue
        inputs = find_test_inputs(name, data_dir)
        if inputs is not None:
            return name, bnn.predict(inputs[:_MOST_OUTSIDE], run.config.test_samples)
    return None


def _truth(run: Run, data: RunData) -> tuple[str, Tensor] | None:
    """What a table's target is called, and its test values in its own unit."""
    if not isinstance(data, TableData) or run.config.task != "regression":
        return None
    return run.config.target or "target", data.test_targets.double() * data.scale + data.shift


def _title(run: Run, data: RunData) -> str:
    of = f": {run.config.target}" if run.config.target is not None else ""
    return f"{_kind(run)} on {data.name}{of}"


def _table_notes(run: Run) -> list[str]:
    """What a reader must know of how a table was read."""
    if run.table is None:
        return []
    split = run.table.split
    notes = [
        f"{split['train']:,} rows for training, {split['test']:,} held out by seed "
        f"{split['seed']}: these are the test data",
        *(f"not used: {name}, for {reason}" for name, reason in run.table.dropped.items()),
        *run.table.remarks,
    ]
    if run.config.task == "regression":
        notes.append(
            "in the curves over epochs and of pruning the target is standardised: an error is the "
            "share of its variance that is not explained"
        )
    return notes


def _label(run: Run) -> str:
    return f"{_kind(run)} ({run.folder.name})"


def _kind(run: Run) -> str:
    config = run.config
    kinds = {None: "Bayes by Backprop", "sgd": "Plain network", "dropout": "Dropout network"}
    drops = config.baseline is None and (config.dropout_input or config.dropout_hidden)
    return f"{kinds[config.baseline]}, dropout" if drops else kinds[config.baseline]
