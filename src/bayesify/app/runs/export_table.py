"""Export the network of a run on a table, with a threshold of abstention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bayesify.app.runs.abstention import COVERAGE, MOST_HELD_OUT, threshold_of
from bayesify.app.runs.declarations import ConfigError
from bayesify.app.runs.export import network_to_export
from bayesify.app.runs.folder import Run
from bayesify.app.runs.measure import in_units, widened_rows
from bayesify.app.runs.run_data import RunData
from bayesify.distributions.posteriors import Delta
from bayesify.export import export_table
from bayesify.module.bayesian import BayesianModule
from bayesify.tabular.table_data import TableData

__all__ = ["check_table_export", "export_table_run"]


def check_table_export(out: Path, *, int8: bool) -> None:
    """Check the arguments of a table's export that are only for runs on images.

    Raises:
        ConfigError: one is wrong.
    """
    if out.suffix != ".onnx":
        raise ConfigError(
            "a run of a table must be exported to .onnx: a program of PyTorch takes no texts, got "
            f"{out.name}"
        )
    if int8:
        raise ConfigError("int8 is for runs on images; leave it out for a run of a table")


def export_table_run(
    run: Run, out: Path, data: RunData, *, samples: int, fraction: float | None
) -> dict[str, Any]:
    """Export the network of a run on a table to an ONNX graph that takes raw columns.

    The file has a threshold of the total uncertainty, below which it lies for a share of the
    held-out rows, if some are held out.

    Args:
        run: the run.
        out: the file; an existing one is replaced.
        data: the run's data, whose held-out part gives the threshold.
        samples: weight samples; 0 for the mean weights.
        fraction: the fraction of the weights to remove, or None.

    Returns:
        What was written, as JSON; the threshold in nats, or in squared units of the target.

    Raises:
        RunError: the run is a baseline, which cannot be pruned.
        ExportError: a column holds texts, or the graph's outputs are wrong.
    """
    assert run.table is not None
    bnn = network_to_export(run, fraction)
    samples = 0 if isinstance(bnn.posterior, Delta) else samples
    assert isinstance(data, TableData)
    held_out = min(len(data.test_inputs), MOST_HELD_OUT)
    thresholds = {}
    if held_out:
        thresholds["total"] = _threshold(run, bnn, data, samples=samples)
    report = export_table(bnn, run.table, out, num_samples=samples, thresholds=thresholds)
    return {
        "out": str(out),
        "bytes": report.bytes,
        "num_samples": samples,
        "inputs": list(report.inputs),
        "outputs": list(report.outputs),
        "largest_difference": report.largest_difference,
        "threshold": thresholds.get("total"),
        "coverage": COVERAGE,
        "held_out": held_out,
    }


def _threshold(run: Run, bnn: BayesianModule, data: TableData, *, samples: int) -> float:
    assert run.table is not None
    target = run.table.target
    inputs, distances = data.test_inputs[:MOST_HELD_OUT], data.test_distances[:MOST_HELD_OUT]
    predictive = bnn.predict(inputs, samples) if samples else bnn.predict_mean(inputs)
    predictive = widened_rows(predictive, distances, target.marginal)
    return threshold_of(in_units(predictive, target.shift, target.scale).total)
