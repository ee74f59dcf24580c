"""Build the parts of a report that speak to the owner of a table, and their figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from bayesify.app.report.parts import Part, Table, decimals, fixed, shown_number
from bayesify.plots import (
    EffectLine,
    effect_along_axis,
    effect_of_levels,
    importance_bars,
    residuals,
)
from bayesify.prediction import CategoricalPredictive, Predictive
from bayesify.tabular.effects import PartialDependence

if TYPE_CHECKING:  # pandas takes its time to load
    from bayesify.tabular.grids import Grid

__all__ = ["class_parts", "effect_part", "importance_part", "number_parts", "result_part"]

#: Classes of a confusion matrix and of a table by class; of more the most frequent ones, or those
#: with the lowest recall.
_MATRIX_CLASSES, _LISTED_CLASSES = 10, 20
_CONFUSED_PAIRS = 10
_DRAWN_COLUMNS = 20
_DRAWN_CLASSES = 4
_LEVELS = (50, 80, 90, 95)
_QUANTILES = (5, 25, 50, 75, 95)
_OTHERS = "all others"

Effects = Sequence[tuple["Grid", PartialDependence]]


def result_part(
    target: str, rows: int, test: Mapping[str, float], baseline: Mapping[str, Any]
) -> Part:
    """Compare the network with the same prediction for every row.

    Args:
        target: name of the target.
        rows: number of held-out rows.
        test: their metrics, as in ``metrics.json``.
        baseline: as in ``metrics.json``.
    """
    if "rmse" in baseline:
        same = f"the mean, {shown_number(baseline['prediction'])}"
        ours, theirs = test["rmse"], baseline["rmse"]
        lead = (
            f"On {rows:,} held-out rows the predictions of {target} are off by "
            f"{shown_number(ours)} (root of the mean squared error). Always predicting {same}, is "
            f"off by {shown_number(theirs)}."
        )
        measures: list[tuple[str, str, str, int | None]] = [
            ("RMSE", "rmse", "rmse", None),
            ("CRPS, in the unit of the target", "crps", "crps", None),
        ]
    else:
        same = f"the most frequent class, {baseline['prediction']}"
        ours, theirs = test["error_predictive"], baseline["error"]
        lead = (
            f"Of {rows:,} held-out rows {fixed(ours, 2)} % are given a wrong {target}. Always "
            f"predicting {same}, is wrong for {fixed(theirs, 2)} %."
        )
        measures = [
            ("error (%)", "error_predictive", "error", 2),
            ("Brier score", "brier", "brier", 4),
        ]
    measures.insert(1, ("negative log likelihood (nats per row)", "nll", "nll", 4))
    if ours >= theirs:
        lead += (
            " So the network is no better than that: its columns may say nothing about "
            f"{target}, or it was not trained well."
        )
    elif test["nll"] >= baseline["nll"]:
        lead += (
            " But its probabilities are no better than that: its negative log likelihood is the "
            "higher one, so that it is too sure of itself."
        )
    cells = [
        (name, fixed(test[own], digits), fixed(baseline[other], digits))
        for name, own, other, digits in measures
        if own in test
    ]
    heads = ("held-out rows", "this network", f"always {same}")
    return Part("result", "Result", lead, (Table(heads, cells),))


# ---------------------------------------------------------------------------------------- classes


def class_parts(
    predictive: CategoricalPredictive, targets: Tensor, class_names: Sequence[str]
) -> list[Part]:
    """Show which classes are confused, and how well each is found.

    Args:
        predictive: prediction of the held-out rows.
        targets: their class indices.
        class_names: K names.
    """
    count = len(class_names)
    pairs = (targets * count + predictive.prediction).bincount(minlength=count * count)
    matrix = pairs.reshape(count, count)
    tables = [_matrix(matrix, class_names)]
    if count > _MATRIX_CLASSES:
        tables.append(_confused(matrix, class_names))
    caption = (
        "A row of the table is the true class, a column the predicted one, and a cell the number "
        "of held-out rows; the colour is the share of the row, orange for mistakes."
    )
    measures = (
        "Recall is the share of a class's rows that are predicted as it, precision the share of "
        "its predictions that are right. For a class of few rows both are rough."
    )
    return [
        Part("confusion", "Which classes are confused", tables=tables, caption=caption),
        Part("classes", "Each class", tables=[_by_class(matrix, class_names)], caption=measures),
    ]


def _matrix(matrix: Tensor, names: Sequence[str]) -> Table:
    """Return the confusion matrix, with the rarer classes together if there are many."""
    names = list(names)
    if len(names) > _MATRIX_CLASSES:
        order = matrix.sum(1).argsort(descending=True, stable=True)
        shown = order[: _MATRIX_CLASSES - 1].sort().values
        rest = order[_MATRIX_CLASSES - 1 :]
        names = [*(names[place] for place in shown.tolist()), _OTHERS]
        by_row = torch.cat((matrix[shown], matrix[rest].sum(0, keepdim=True)))
        matrix = torch.cat((by_row[:, shown], by_row[:, rest].sum(1, keepdim=True)), 1)
    shares = matrix.double() / matrix.sum(1, keepdim=True).clamp_min(1)
    signs = 2.0 * torch.eye(len(names), dtype=torch.float64) - 1.0
    if names[-1] == _OTHERS:
        signs[-1, -1] = 0.0  # right and wrong ones together
    return Table(
        ("true \\ predicted", *names),
        [
            [name, *(f"{n:,}" for n in row)]
            for name, row in zip(names, matrix.tolist(), strict=True)
        ],
        shades=(shares * signs).tolist(),
    )


def _confused(matrix: Tensor, names: Sequence[str]) -> Table:
    """Return the pairs of classes with the most mistakes."""
    wrong = matrix.clone().fill_diagonal_(0).flatten()
    order = wrong.argsort(descending=True, stable=True)[:_CONFUSED_PAIRS]
    rows = []
    for place in order.tolist():
        true, predicted = divmod(place, len(names))
        if wrong[place]:
            of = f"{int(wrong[place]):,} of {int(matrix[true].sum()):,}"
            rows.append((names[true], names[predicted], of))
    return Table(("true", "predicted instead", "rows"), rows, "Most confused pairs", has_texts=True)


def _by_class(matrix: Tensor, names: Sequence[str]) -> Table:
    right, rows, predicted = matrix.diagonal(), matrix.sum(1), matrix.sum(0)
    places = [place for place in range(len(names)) if rows[place] or predicted[place]]
    title = ""
    if len(places) > _LISTED_CLASSES:
        with_rows = [place for place in places if rows[place]]
        places = sorted(with_rows, key=lambda k: float(right[k] / rows[k]))[:_LISTED_CLASSES]
        title = f"The {len(places)} of {len(names)} classes with the lowest recall"
    cells = [
        (
            names[k],
            *(f"{int(part[k]):,}" for part in (rows, predicted, right)),
            *(_percent(right[k], part[k]) for part in (rows, predicted)),
        )
        for k in places
    ]
    heads = ("class", "held-out rows", "predicted as it", "both", "recall (%)", "precision (%)")
    return Table(heads, cells, title=title)


def _percent(part: Tensor, whole: Tensor) -> str:
    return f"{100.0 * float(part) / float(whole):.1f}" if whole else "-"


# ---------------------------------------------------------------------------------------- numbers


def number_parts(
    predictive: Predictive, targets: Tensor, name: str, test: Mapping[str, float]
) -> tuple[list[Part], dict[str, Figure]]:
    """Show how far off the predictions are, and whether the intervals hold what they promise.

    Args:
        predictive: prediction of the held-out rows.
        targets: their true values, in the same unit.
        name: name of the target.
        test: their metrics, as in ``metrics.json``.

    Returns:
        The parts and their own figures; they also use those of ``regression_figures``.
    """
    mean = predictive.mean
    rest = (targets - mean).flatten().double()
    values = rest.quantile(torch.tensor(_QUANTILES, dtype=torch.float64) / 100.0).tolist()
    quantiles = Table(
        ("quantile", *(f"{level} %" for level in _QUANTILES)),
        [("true - predicted", *map(shown_number, values))],
    )
    held = Table(
        ("interval", "holds of the held-out rows (%)", "mean width"),
        [
            (
                f"{level} %",
                fixed(test[f"coverage_{level}"], 1),
                shown_number(test[f"width_{level}"]),
            )
            for level in _LEVELS
            if f"coverage_{level}" in test
        ],
    )
    parts = [
        Part("predictions", "Predicted and true values", figures=("predicted_against_true",)),
        Part("intervals", "Intervals", tables=(held,), figures=("interval_coverage",)),
        Part("residuals", "Residuals", tables=(quantiles,), figures=("residual_plot",)),
    ]
    return parts, {"residual_plot": residuals(mean, targets, name=name)}


# ---------------------------------------------------------------------------------------- columns


def importance_part(found: Mapping[str, Any], total: int) -> tuple[Part, dict[str, Figure]]:
    """Show how much worse the predictions are without a column.

    Args:
        found: importance, as in ``metrics.json``.
        total: number of the table's columns.
    """
    columns = found["columns"]
    loss, unit, digits = "error", "error (%)", 2
    if "rmse" in columns[0]:
        # Of all columns alike, by the largest.
        largest = max(abs(each["rmse"]["rise"]) for each in columns)
        loss, unit, digits = "rmse", "RMSE", decimals(largest)
    shown = columns[:_DRAWN_COLUMNS]
    losses = {"nll": "rise of the nll (nats per row)", loss: f"rise of the {unit}"}
    titles = {"nll": "Likelihood", loss: "RMSE" if loss == "rmse" else "Error"}
    figures = {
        f"importance_{key}": importance_bars(
            [(each["column"], *_ends(each[key])) for each in shown], label=label, title=titles[key]
        )
        for key, label in losses.items()
    }
    cells = [
        (
            each["column"],
            *(
                text
                for key, places in (("nll", 4), (loss, digits))
                for text in (
                    fixed(each[key]["rise"], places),
                    " to ".join(fixed(each[key][end], places) for end in ("low", "high")),
                )
            ),
        )
        for each in columns
    ]
    percent = f"{100 * found['level']:g} % interval"
    table = Table(("column", "rise of nll", percent, f"rise of {unit}", percent), cells)
    samples = found["weight_samples"]
    averaged = "" if samples == 1 else f", averaged over {samples} weight samples"
    fewer = (
        f" Measured are the {len(columns)} of {total} columns that came out highest in a first, "
        "rougher measurement."
        if len(columns) < total
        else ""
    )
    caption = (
        f"How much worse the predictions are on {found['rows']:,} held-out rows if the cells of a "
        f"column come from other rows, {found['repeats']} others for each{averaged}. An interval "
        "that holds 0 means that the column may as well be left out; of two columns that hold the "
        "same information, each can replace the other, and both may seem unimportant. This is what "
        f"the network uses, which need not be a cause.{fewer}"
    )
    part = Part(
        "importance",
        "Which columns matter",
        "",
        tables=(table,),
        figures=tuple(figures),
        side_by_side=True,
        caption=caption,
    )
    return part, figures


def _ends(rise: Mapping[str, float]) -> tuple[float, float, float]:
    return rise["rise"], rise["low"], rise["high"]


def effect_part(
    effects: Effects, target: str, class_names: Sequence[str], class_counts: Sequence[int]
) -> tuple[Part, dict[str, Figure]]:
    """Show the mean prediction as a column takes one value after another.

    Args:
        effects: the effect of each column, at least one.
        target: name of the target.
        class_names: names of the classes; none for numbers.
        class_counts: number of training rows of each class.
    """
    classes = _drawn_classes(effects, class_names, class_counts)
    lines = [_lines(effect, classes, class_names) for _, effect in effects]
    label = what = target
    if class_names:
        several = len(classes) > 1
        label = "probability" if several else f"probability of {class_names[classes[0]]}"
        what = "probability of a class" if several else label
    limits = _limits([line for each in lines for line in each], is_share=bool(class_names))
    figures: dict[str, Figure] = {}
    for (grid, _), drawn in zip(effects, lines, strict=True):
        options: dict[str, Any] = {"title": grid.name, "label": label, "limits": limits}
        if grid.kind == "level":
            figure = effect_of_levels(grid.labels, drawn, **options)
        else:
            figure = effect_along_axis(
                grid.axis.tolist(),
                drawn,
                marks=grid.tenths,
                dates=grid.kind == "date",
                **options,
            )
        figures[f"effect_{len(figures) + 1}"] = figure
    part = Part(
        "effects",
        "What the columns do",
        figures=tuple(figures),
        side_by_side=True,
        caption=_effect_caption(effects, what, len(classes), len(class_names)),
    )
    return part, figures


def _effect_caption(effects: Effects, what: str, drawn: int, classes: int) -> str:
    rows, samples = len(effects[0][1].rows), len(effects[0][1].samples)
    sentences = [
        f"The mean predicted {what} over {rows:,} held-out rows in which the column is set to one "
        "value after another (partial dependence), for the most important columns of those whose "
        "importance is clearly above 0."
    ]
    if samples > 1:
        sentences.append(
            f"The coloured band (or bar) holds 95 % of the curves of {samples} weight samples: it "
            "is what the network does not know about the mean, without the noise of a single row."
        )
    if drawn <= 1:
        sentences.append("The grey one holds the predictions of 80 % of the rows.")
    elif drawn < classes:
        sentences.append(
            f"Drawn are the {drawn} classes on which the columns have the largest effect."
        )
    if any(grid.tenths for grid, _ in effects):
        sentences.append("Ticks at the bottom are the deciles of the training rows.")
    sentences.append(
        "Where columns go together in the data, some of the rows so made do not occur, and the "
        "curve says little."
    )
    return " ".join(sentences)


def _drawn_classes(
    effects: Effects, class_names: Sequence[str], class_counts: Sequence[int]
) -> list[int]:
    """Return the classes to draw, in their order: of two the rarer one; none for numbers."""
    if len(class_names) <= 2:
        return [min(range(len(class_names)), key=lambda k: class_counts[k])] if class_names else []
    ranges = torch.stack([each.mean.amax(0) - each.mean.amin(0) for _, each in effects]).amax(0)
    return sorted(ranges.argsort(descending=True, stable=True)[:_DRAWN_CLASSES].tolist())


def _lines(
    effect: PartialDependence, classes: Sequence[int], class_names: Sequence[str]
) -> list[EffectLine]:
    mean, (low, high), (least, most) = effect.mean, effect.interval(0.95), effect.spread(0.8)
    lines = []
    for place in classes or [0]:
        values, lower, upper = (part[:, place].tolist() for part in (mean, low, high))
        if len(classes) > 1:
            lines.append(EffectLine(class_names[place], values, lower, upper))
        else:
            spread = least[:, place].tolist(), most[:, place].tolist()
            lines.append(EffectLine("", values, lower, upper, spread))
    return lines


def _limits(lines: Sequence[EffectLine], *, is_share: bool) -> tuple[float, float] | None:
    """Return limits for all figures, so that the sizes of effects can be compared."""
    every = torch.tensor(
        [v for line in lines for part in (line.low, line.high, *(line.spread or ())) for v in part]
    )
    low, high = float(every.min()), float(every.max())
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    if not (every.isfinite().all() and low - room < high + room):
        return None
    return (
        (max(low - room, -0.02), min(high + room, 1.02)) if is_share else (low - room, high + room)
    )
