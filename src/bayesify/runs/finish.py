"""What a finished run leaves: metrics, the pruning table, the figures and the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bayesify.datasets import ImageData
from bayesify.figures import build_figures
from bayesify.module import BayesianModule
from bayesify.posteriors import Delta
from bayesify.predictive import Predictive
from bayesify.report import write_report
from bayesify.runs.folder import Run, as_test_row
from bayesify.runs.measure import FRACTIONS, evaluate, prune_table
from bayesify.runs.train import Trained
from bayesify.training.history import History

__all__ = ["finish", "rewrite_report"]


def finish(run: Run, data: ImageData, trained: Trained) -> tuple[dict[str, Any], Path]:
    """Measure a trained network and write everything about it.

    Returns:
        The metrics, as in ``metrics.json``, and where the report is.
    """
    bnn, history, notes = trained
    measured, predictive = evaluate(bnn, data, num_samples=run.config.test_samples)
    last = history[-1]
    metrics = {
        **measured,
        "epochs": int(last["epoch"] or 0),
        "seconds_train": last["seconds"],
        "temperature": None if run.config.baseline else run.config.temperature,
        "std_residual": last["std_residual"],
        "notes": notes,
    }
    run.write_history(history)
    run.write_metrics(metrics)
    return metrics, _report(run, data, bnn, history, metrics, predictive)


def rewrite_report(run: Run, data: ImageData, beside: Sequence[Run] = ()) -> Path:
    """Draw the figures and write the report of a finished run again, from its files.

    Args:
        run: the run.
        data: its data set.
        beside: other finished runs, to show their curves, weights and metrics too.

    Raises:
        RunError: a run is not finished.
    """
    bnn = run.load_module()
    metrics = run.metrics()
    _, predictive = evaluate(bnn, data, num_samples=run.config.test_samples, with_train=False)
    return _report(run, data, bnn, run.history(), metrics, predictive, beside)


def _report(
    run: Run,
    data: ImageData,
    bnn: BayesianModule,
    history: History,
    metrics: dict[str, Any],
    predictive: Predictive,
    beside: Sequence[Run] = (),
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
    )
    document = run.document
    settings = document.pop("settings")
    return write_report(
        run.folder,
        title=f"{_kind(run)} on {data.name}",
        config={**settings, **document},
        metrics=metrics,
        history=[as_test_row(row) for row in history],
        pruning=pruning,
        figures=figures,
        notes=metrics.get("notes", []),
        beside={_label(other): other.metrics() for other in beside},
    )


def _label(run: Run) -> str:
    return f"{_kind(run)} ({run.folder.name})"


def _kind(run: Run) -> str:
    kinds = {None: "Bayes by Backprop", "sgd": "Plain network", "dropout": "Dropout network"}
    return kinds[run.config.baseline]
