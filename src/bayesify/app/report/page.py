"""Write the report of a run: one HTML page that opens offline, and each figure as PNG."""

from __future__ import annotations

import base64
import io
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# First, because it names the missing extra where matplotlib is not installed.
from bayesify.plots import Record  # isort: skip
from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.filters import do_filesizeformat
from matplotlib.figure import Figure

from bayesify.app.report.parts import Part, Table, fixed
from bayesify.io import atomic_write

__all__ = ["write_report"]

#: Name, unit and decimals of each known metric; None are by its size.
_METRICS = {
    "error_predictive": ("error, averaged prediction", "%", 2),
    "error_mean_weights": ("error, mean weights", "%", 2),
    "nll": ("negative log likelihood", "nats per example", 4),
    "brier": ("Brier score", "0 best, 2 worst", 4),
    "ece": ("expected calibration error", "0 best, 1 worst", 4),
    "rmse": ("RMSE, averaged prediction", "", None),
    "rmse_mean_weights": ("RMSE, mean weights", "", None),
    "crps": ("CRPS", "", None),
    "mean_std": ("predicted standard deviation", "", None),
    **{f"coverage_{p}": (f"coverage of {p} % intervals", "%", 1) for p in (50, 80, 90, 95)},
    **{f"width_{p}": (f"width of {p} % intervals", "", None) for p in (50, 80, 90, 95)},
}

#: Heading, unit after the number, note and decimals of each metric among the key numbers.
_TILES = {
    "error_predictive": ("test error", " %", "averaged prediction", 2),
    "error_mean_weights": ("test error", " %", "mean weights", 2),
    "rmse": ("test RMSE", "", "averaged prediction", None),
    "rmse_mean_weights": ("test RMSE", "", "mean weights", None),
    "nll": ("negative log likelihood", "", "nats per example", 4),
    "crps": ("CRPS", "", "unit of the target", None),
    "coverage_95": ("coverage of 95 % intervals", " %", "of the test targets", 1),
    "brier": ("Brier score", "", "0 best, 2 worst", 4),
    "ece": ("calibration error (ECE)", "", "0 best, 1 worst", 4),
}

#: Heading and caption of each known figure.
_CAPTIONS = {
    "one_column": (
        "Prediction along the input",
        "Median and intervals of the predictive distribution, noise included, with the training "
        "rows. The bands should widen beyond the rows and wherever there are few of them.",
    ),
    "learning_curves": (
        "Learning curves",
        "Values after each epoch: the minimised loss, its likelihood part and the error. A "
        "Bayesian network also shows the KL divergence of posterior and prior, and the "
        "posterior's median standard deviation. A curve that still changes at the end has not "
        "converged.",
    ),
    "reliability": (
        "Calibration",
        "Points on the diagonal are calibrated: of the examples predicted with 80 % confidence, "
        "80 % are right. Above the diagonal the network is underconfident, below it "
        "overconfident. The lower panel counts the examples on a logarithmic axis.",
    ),
    "interval_coverage": (
        "Coverage of the prediction intervals",
        "On the diagonal an 80 % interval holds 80 % of the test targets. Above the diagonal the "
        "intervals are too wide, below it too narrow. The band holds 95 % of the results that a "
        "calibrated network would have on as many examples.",
    ),
    "risk_coverage": (
        "Error when uncertain examples are left out",
        "The error of the test examples whose uncertainty lies below a threshold, by the share of "
        "examples below it. A low curve means that the uncertainty separates right from wrong "
        "predictions; the best possible order removes every wrong prediction first. The area is "
        "the mean of the curve. Choose a threshold on other data than these.",
    ),
    "predicted_against_true": (
        "Predicted and true values",
        "The prediction of each test row with its interval, over the true value. Predictions on "
        "the diagonal are exact. A good network has its widest intervals where its errors are "
        "largest.",
    ),
    "residual_plot": (
        "Residuals",
        "What is left of the true value without the prediction, over the prediction. Lines that "
        "bend or lie away from 0 show values at which the predictions are off on average; lines "
        "that spread show values at which they are less precise.",
    ),
    "importance_nll": ("Rise of the negative log likelihood", ""),
    "importance_error": ("Rise of the error", ""),
    "importance_rmse": ("Rise of the RMSE", ""),
    "votes": (
        "Images on which the weight samples disagree",
        "Each network drawn from the posterior votes for its most probable class. Shown are the "
        "test images whose leading class has the fewest votes. The prediction averages "
        "probabilities, and can differ from the majority.",
    ),
    "least_certain": (
        "Least certain test images",
        "The test images of the highest total uncertainty. Total is the entropy of the "
        "prediction; epistemic is the part that knowing the weights would remove. These images "
        "should be hard for a human reader, too.",
    ),
    "most_certain": (
        "Most certain test images",
        "The test images of the lowest total uncertainty. They should be easy to read; a wrong "
        "prediction here is a confident mistake.",
    ),
    "out_of_distribution": (
        "Images from another data set",
        "Epistemic uncertainty of the test images and of images from a data set that the network "
        "was not trained on. The further apart the two, the better a threshold separates them. "
        "AUROC is the share of pairs in the right order; chance is 0.5. The first bin also counts "
        "all values below it.",
    ),
    "snr": (
        "Signal-to-noise ratio of the weights",
        "The ratio |mean| / std in decibels. At 0 dB a weight equals its standard deviation. "
        "Weights far to the left carry little information and can be pruned; the dashed line "
        "marks the cut that removes three quarters.",
    ),
    "weight_densities": (
        "Distribution of the trained weights",
        "Density of the trained weights, without pruned ones. A prior with a narrow spike gathers "
        "means near zero; one sample adds the width of the posterior.",
    ),
    "weight_posteriors": (
        "Posteriors of single weights",
        "The posterior of three weights. A weight whose posterior is centred near zero can be "
        "pruned; a weight with zero far outside is determined by the data.",
    ),
    "pruning": (
        "Pruning",
        "The error as the weights of the lowest signal-to-noise ratio are removed without "
        "retraining. The averaged error uses few weight samples, so that its first row may differ "
        "slightly from the numbers above. The longer the curve stays at the dashed line, the "
        "fewer weights the network needs.",
    ),
}

_TEXT_CAPTION = (
    "The test texts of the highest total uncertainty. Epistemic is the part that knowing the "
    "weights would remove: more texts like these would lower it."
)

#: The part at the top of the page.
_RESULT = "result"
#: Figures of the network itself, in their order on the page of a table.
_NETWORK = ("learning_curves", "snr", "weight_densities", "weight_posteriors", "pruning")


def write_report(
    folder: Path,
    *,
    title: str,
    config: Mapping[str, Any],
    metrics: Mapping[str, Any],
    history: Sequence[Record],
    pruning: Sequence[Record],
    figures: Mapping[str, Figure],
    notes: Sequence[str],
    others: Mapping[str, Mapping[str, Any]] | None = None,
    texts: Sequence[Record] = (),
    parts: Sequence[Part] = (),
) -> Path:
    """Write ``report.html``, which embeds all that it shows, and each figure as PNG.

    The page needs no network and no script. Each file is written under a temporary name and then
    renamed, the page last, so that no file is ever incomplete.

    Args:
        folder: the folder to write into; created if missing.
        title: title of the page.
        config: settings of the run, nested mappings allowed; ``command``, if given, is shown as
            the command that repeats the run.
        metrics: as in ``metrics.json``: ``test`` and ``train`` with the keys of
            :func:`bayesify.metrics.classification_metrics`, ``kl_nats``, ``num_weights``,
            ``epochs``, ``seconds_train``; a missing value is not shown.
        history: one row per epoch.
        pruning: rows as for :func:`bayesify.plots.pruning_curve`; may be empty.
        figures: figures by name; the name becomes the file's name.
        notes: remarks and warnings for the top of the page, plain text.
        others: metrics of other runs by name, for a table of comparison.
        texts: the least certain test texts, each with ``text``, ``true``, ``predicted``, and
            ``total`` and ``epistemic`` uncertainty.
        parts: what comes first, for the owner of a table; the part called ``result`` is at the
            top, and figures of the network itself are last then. Figures that no part names have
            a part of their own.

    Returns:
        The path of ``report.html``.

    Raises:
        ValueError: the name of a figure has a character other than letters, digits, ``-`` and
            ``_``.
        OSError: the folder cannot be written; existing files are then left as they were.
    """
    for name in figures:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise ValueError(
                "the name of a figure becomes a file name and must be of letters, digits, - and "
                f"_, got {name!r}"
            )
    # All in memory first: if drawing raises, no file has changed.
    images = {name: _png(figure) for name, figure in figures.items()}
    report = PageContent(
        title=title,
        summary=_summary(metrics, history),
        result=[_embedded(part, figures, images) for part in parts if part.name == _RESULT],
        notes=notes,
        tiles=_tiles(metrics),
        parts=[
            _embedded(part, figures, images)
            for part in (
                *_comparison(title, metrics, others or {}),
                *_in_order(parts, figures, pruning, texts, metrics),
            )
        ],
        command=_command(config),
        settings=list(_settings(config)),
    )
    page = _TEMPLATES.get_template("template.html").render(report=report)
    folder.mkdir(parents=True, exist_ok=True)
    for name, image in images.items():
        atomic_write(folder / f"{name}.png", image)
    path = folder / "report.html"
    atomic_write(path, page)
    return path


_TEMPLATES = Environment(
    loader=PackageLoader("bayesify.app.report", "."),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


class KeyNumber(NamedTuple):
    """One key number."""

    heading: str
    value: str
    note: str


class EmbeddedFigure(NamedTuple):
    """One figure: its texts, its size in CSS pixels and its PNG in base64."""

    heading: str
    caption: str
    width: int
    height: int
    data: str


class EmbeddedPart(NamedTuple):
    """A part with its figures."""

    part: Part
    heading: str
    figures: Sequence[EmbeddedFigure]


class PageContent(NamedTuple):
    """Everything that the template shows."""

    title: str
    summary: str
    result: Sequence[EmbeddedPart]
    notes: Sequence[str]
    tiles: Sequence[KeyNumber]
    parts: Sequence[EmbeddedPart]
    command: str
    settings: Sequence[tuple[str, str]]


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    # Without the software's version, so that the same run gives the same bytes.
    figure.savefig(buffer, format="png", dpi=150, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def _embedded(
    part: Part, figures: Mapping[str, Figure], images: Mapping[str, bytes]
) -> EmbeddedPart:
    drawn = []
    for name in part.figures:
        heading, caption = _CAPTIONS.get(name, (_title_of(figures[name]) or _words(name), ""))
        # At 100 pixels an inch, the text of all figures has one size.
        width, height = (round(100 * inches) for inches in figures[name].get_size_inches())
        data = base64.b64encode(images[name]).decode()
        drawn.append(EmbeddedFigure(heading, caption, width, height, data))
    heading = part.heading
    if not heading:
        name = part.figures[0]
        heading = _CAPTIONS.get(name, (_words(name), ""))[0]
    return EmbeddedPart(part, heading, drawn)


def _words(name: str) -> str:
    return name.replace("_", " ").replace("-", " ")


def _title_of(figure: Figure) -> str:
    return str(figure.axes[0].get_title(loc="left")) if figure.axes else ""


def _in_order(
    first: Sequence[Part],
    figures: Mapping[str, Figure],
    pruning: Sequence[Record],
    texts: Sequence[Record],
    metrics: Mapping[str, Any],
) -> list[Part]:
    """Return the parts below the key numbers in their order."""
    named = {name for part in first for name in part.figures}
    own = {name: Part(name, figures=(name,)) for name in figures if name not in named}
    if pruning:
        table = _pruning_table(pruning, is_regression="rmse" in (metrics.get("test") or {}))
        drawn = ("pruning",) if "pruning" in own else ()
        own["pruning"] = Part("pruning", "Pruning", tables=(table,), figures=drawn)
    # Those of the network come after what a table's owner wants to know; pruning is the last.
    last = [name for name in _NETWORK if name in own] if first else ["pruning"][: "pruning" in own]
    middle = [part for name, part in own.items() if name not in last]
    network = [own[name] for name in last]
    measures = _parts_table(metrics)
    tables = [
        *(
            [
                Part(
                    "texts",
                    "Least certain test texts",
                    tables=(_text_table(texts),),
                    caption=_TEXT_CAPTION,
                )
            ]
            if texts
            else []
        ),
        *(
            [Part("measures", "Test and training data", tables=(measures,))]
            if measures.rows
            else []
        ),
    ]
    rest = [*tables, *network] if first else [*network, *tables]
    return [*(part for part in first if part.name != _RESULT), *middle, *rest]


def _comparison(
    title: str, metrics: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]]
) -> list[Part]:
    if not others:
        return []
    table = _metric_table({title: metrics, **others}, "test")
    return [Part("comparison", "Comparison on the test data", tables=(table,))]


def _summary(metrics: Mapping[str, Any], history: Sequence[Record]) -> str:
    epochs = metrics.get("epochs") or len(history)
    parts = [f"{epochs:,} epoch{'' if epochs == 1 else 's'}"] if epochs else []
    speeds = [speed for row in history if (speed := row.get("images_per_second")) is not None]
    if speeds:
        parts.append(f"{sum(speeds) / len(speeds):,.0f} examples per second in training")
    return ", ".join(parts)


def _tiles(metrics: Mapping[str, Any]) -> list[KeyNumber]:
    test = metrics.get("test") or {}
    tiles = [
        KeyNumber(heading, fixed(test[key], digits) + suffix, note)
        for key, (heading, suffix, note, digits) in _TILES.items()
        if test.get(key) is not None
    ]
    if metrics.get("kl_nats"):
        tiles.append(KeyNumber("KL from the prior", f"{metrics['kl_nats']:,.0f}", "nats"))
    if metrics.get("free_energy") is not None:
        untrained = metrics.get("free_energy_untrained")
        note = "nats per example"
        if untrained is not None:
            note += f"; with untrained means {fixed(untrained, 2)}"
        tiles.append(KeyNumber("free energy", fixed(metrics["free_energy"], 2), note))
    if metrics.get("num_weights") is not None:
        tiles.append(KeyNumber("weights", f"{metrics['num_weights']:,}", ""))
    if metrics.get("seconds_train") is not None:
        tiles.append(KeyNumber("training time", _duration(metrics["seconds_train"]), ""))
    return tiles


def _pruning_table(rows: Sequence[Record], *, is_regression: bool) -> Table:
    loss, unit, digits = ("RMSE", "", None) if is_regression else ("error", " (%)", 2)
    columns: dict[str, tuple[str, Any]] = {
        "fraction": ("removed", lambda value: f"{100 * value:.4g} %"),
        "weights_left": ("weights left", lambda value: f"{value:,.0f}"),
        "error_mean_weights": (f"{loss}, mean weights{unit}", lambda value: fixed(value, digits)),
        "error_predictive": (f"{loss}, averaged{unit}", lambda value: fixed(value, digits)),
        "file_bytes": ("size on disk", do_filesizeformat),
    }
    used = [key for key in columns if any(row.get(key) is not None for row in rows)]
    return Table(
        [columns[key][0] for key in used],
        [
            [columns[key][1](row[key]) if row.get(key) is not None else "" for key in used]
            for row in rows
        ],
    )


def _text_table(rows: Sequence[Record]) -> Table:
    heads = ("text", "true", "predicted", "total", "epistemic")
    cells = [
        [*(str(row[head]) for head in heads[:3]), *(f"{row[head]:#.3g}" for head in heads[3:])]
        for row in rows
    ]
    return Table(heads, cells, has_texts=True)


def _parts_table(metrics: Mapping[str, Any]) -> Table:
    return _metric_table({part: metrics for part in ("test", "train") if metrics.get(part)})


def _metric_table(runs: Mapping[str, Mapping[str, Any]], part: str | None = None) -> Table:
    """Tabulate metrics with one column per run; None takes the part named like the column."""
    parts = {name: run.get(part or name) or {} for name, run in runs.items()}
    keys = dict.fromkeys((*_METRICS, *(key for values in parts.values() for key in values)))
    rows = []
    for key in keys:
        name, unit, digits = _METRICS.get(key, (key.replace("_", " "), "", 4))
        values = [values.get(key) for values in parts.values()]
        if any(value is not None for value in values):
            label = f"{name} ({unit})" if unit else name
            rows.append([label, *("" if v is None else fixed(v, digits) for v in values)])
    return Table(["", *parts], rows)


def _command(config: Mapping[str, Any]) -> str:
    command = config.get("command") or ""
    return command if isinstance(command, str) else shlex.join(map(str, command))


def _settings(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            yield f"{prefix}{name}", ", ".join(map(str, value))
        else:
            yield f"{prefix}{name}", str(value)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
