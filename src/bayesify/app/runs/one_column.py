"""Plot the predictive distribution of a table with one numeric input and a numeric target."""

from __future__ import annotations

import numpy as np
import torch
from matplotlib.figure import Figure

from bayesify.app.runs.folder import Run
from bayesify.app.runs.measure import distinct_samples, in_units, predict_rows
from bayesify.app.runs.run_data import RunData
from bayesify.module.bayesian import BayesianModule
from bayesify.plots.bands import Band, bands
from bayesify.tabular.table_data import TableData

__all__ = ["one_column"]

_LEVELS = (0.025, 0.25, 0.5, 0.75, 0.975)
#: The curve extends beyond the training data by this fraction of their range on either side.
_BEYOND = 0.3
_MOST_POINTS = 1000


@torch.no_grad()
def one_column(run: Run, data: RunData, bnn: BayesianModule) -> Figure | None:
    """Plot the predictive distribution along the one input, with training rows.

    Args:
        run: the run.
        data: its data.
        bnn: its network.

    Returns:
        None where there are several inputs, or the target is not a number.
    """
    if not isinstance(data, TableData) or run.table is None or run.config.task != "regression":
        return None
    from bayesify.tabular.columns import NumberColumn

    (column, *more) = run.table.columns
    if more or not isinstance(column, NumberColumn) or column.missing:
        return None
    inputs = data.train_inputs[:, 0].double().numpy()
    # Tables of earlier versions lack the ends of the values; their inputs are linear in them.
    ends = inputs.min(), inputs.max()
    low, *_, high = column.typical or [end * column.std + column.mean for end in ends]
    room = _BEYOND * (high - low) or 1.0
    values = np.linspace(low - room, high + room, 200)
    axis = torch.from_numpy(column.encode(values))
    samples = distinct_samples(bnn, run.config.test_samples)
    distances = torch.from_numpy(column.outside(values))
    widened = predict_rows(bnn, axis, distances, samples, data.marginal)
    predictive = in_units(widened, data.shift, data.scale)
    # Evenly spaced rows suffice as a sample, because rows are shuffled.
    shown = torch.linspace(0, len(data.train_inputs) - 1, _MOST_POINTS).long().unique()
    # The first input grows with the value, but not everywhere in proportion.
    known = np.linspace(low, high, 10 * _MOST_POINTS)
    x = np.interp(inputs[shown.numpy()], column.encode(known)[:, 0], known)
    y = data.numbers(data.train_targets[shown]).flatten()
    figure = bands(
        [
            Band(
                f"{run.config.target}, from {column.name}",
                values.tolist(),
                {level: predictive.quantile(level).flatten().tolist() for level in _LEVELS},
            )
        ],
        (x.tolist(), y.tolist()),
    )
    figure.set_size_inches(7.4, 4.6)
    figure.axes[0].set(xlabel=column.name, ylabel=run.config.target)
    return figure
