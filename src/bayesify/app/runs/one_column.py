"""Plot the predictive distribution of a table with one numeric input and a numeric target."""

from __future__ import annotations

import torch
from matplotlib.figure import Figure

from bayesify.app.runs.folder import Run, RunData
from bayesify.app.runs.measure import in_units
from bayesify.distributions.posteriors import Delta
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
    if more or not isinstance(column, NumberColumn) or data.train_inputs.shape[1] != 1:
        return None
    low, high = float(data.train_inputs.min()), float(data.train_inputs.max())
    room = _BEYOND * (high - low) or 1.0
    axis = torch.linspace(low - room, high + room, 200).unsqueeze(1)
    samples = 1 if isinstance(bnn.posterior, Delta) else run.config.test_samples
    predictive = in_units(bnn.predict(axis, samples), data.shift, data.scale)
    # Evenly spaced rows suffice as a sample, because rows are shuffled.
    shown = torch.linspace(0, len(data.train_inputs) - 1, _MOST_POINTS).long().unique()
    x = data.train_inputs[shown].flatten().double() * column.std + column.mean
    y = data.train_targets[shown].flatten().double() * data.scale + data.shift
    figure = bands(
        [
            Band(
                f"{run.config.target}, from {column.name}",
                (axis.flatten().double() * column.std + column.mean).tolist(),
                {level: predictive.quantile(level).flatten().tolist() for level in _LEVELS},
            )
        ],
        (x.tolist(), y.tolist()),
    )
    figure.set_size_inches(7.4, 4.6)
    figure.axes[0].set(xlabel=column.name, ylabel=run.config.target)
    return figure
