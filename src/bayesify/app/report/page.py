"""Write the report of a run: one HTML page that opens offline, and each figure as PNG."""

from __future__ import annotations

import base64
import io
import re
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# First, because it names the missing extra where matplotlib is not installed.
from bayesify.plots import Record  # isort: skip
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from bayesify.app.report.parts import Part
from bayesify.app.report.run_tables import (
    KeyNumber,
    key_numbers,
    metric_table,
    parts_table,
    pruning_table,
    text_table,
)
from bayesify.io import atomic_write

__all__ = ["write_report"]

#: Heading and caption of each known figure.
_CAPTIONS = {
    "one_column": (
        "Prediction along the input",
        "Median and intervals of the predictive distribution, noise included, with the training "
        "rows. The bands should widen beyond the rows and wherever there are few of them.",
    ),
    "learning_curves": (
        "Learning curves",
        "Values after each epoch: the minimised loss, its likelihood part and the error. During "
        "the warm-up the weight of the KL in the loss rises, and with it often the loss itself. A "
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
        "calibrated network would have on as many examples. For counts, and for numbers recorded "
        "between limits, calibrated intervals hold their level or more: there is no band then, and "
        "points above the diagonal are no fault.",
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
        "Each network drawn from the posterior votes for its most probable class. The votes are "
        "counted for the 200 test images with the highest epistemic uncertainty, or for all if "
        "there are fewer; shown are those whose leading class has the fewest votes. The prediction "
        "averages probabilities, and can differ from the majority.",
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
        "retraining. The averaged error of classes uses few weight samples where weights are "
        "removed; the errors of numbers are those of the first 2,000 rows at most. The longer the "
        "curve stays at the dashed line, the fewer weights the network needs.",
    ),
}

_EXAMPLES_CAPTION = (
    "Epistemic is the part of the total uncertainty that knowing the weights would remove: more "
    "examples like these would lower it."
)

#: The part at the top of the page.
_RESULT = "result"
#: Figures of what only a Bayesian network shows, the first on the page of images.
_FIRST = ("votes", "pruning")
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
    texts: Mapping[str, Sequence[Record]] | None = None,
    parts: Sequence[Part] = (),
) -> Path:
    """Write ``report.html``, which embeds all that it shows, and each figure as PNG.

    The page needs no network and no script. Each file is written under a temporary name and then
    renamed, the page last, so that no file is ever incomplete.

    Args:
        folder: the folder to write into; created if missing.
        title: title of the page.
        config: settings of the run, nested mappings allowed, of which those without a value are
            not shown; ``command``, if given, is shown as the command that repeats the run.
        metrics: as in ``metrics.json``: ``test`` and ``train`` with the keys of
            :func:`bayesify.metrics.classification_metrics`, ``kl_nats``, ``num_weights``,
            ``epochs``, ``passes``, ``seconds_train``; a missing value is not shown.
        history: one row per epoch.
        pruning: rows as for :func:`bayesify.plots.pruning_curve`; may be empty.
        figures: figures by name; the name becomes the file's name.
        notes: remarks and warnings for the top of the page, plain text.
        others: metrics of other runs by name, for a table of comparison.
        texts: tables of test texts, or of paths of images, by their headings; a row has ``text``,
            ``true``, ``predicted``, and ``total`` and ``epistemic`` uncertainty.
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
    images, lacking = _drawn(figures)
    if lacking:
        notes = [
            *notes,
            f"figures show boxes for {lacking}, which their font lacks; the tables show them",
        ]
    report = PageContent(
        title=title,
        summary=_summary(metrics, history),
        result=[_embedded(part, figures, images) for part in parts if part.name == _RESULT],
        notes=notes,
        tiles=key_numbers(metrics),
        parts=[
            _embedded(part, figures, images)
            for part in (
                *_comparison(title, metrics, others or {}),
                *_in_order(parts, figures, pruning, texts or {}, metrics),
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


class EmbeddedFigure(NamedTuple):
    """One figure: its name and texts, its size in CSS pixels and its PNG in base64."""

    name: str
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


def _drawn(figures: Mapping[str, Figure]) -> tuple[dict[str, bytes], str]:
    """Return the figures as PNG, and the characters that their font lacks."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        images = {name: _png(figure) for name, figure in figures.items()}
    lacking = dict[str, None]()
    for each in caught:
        found = re.match(r"Glyph (\d+) .* missing from font", str(each.message))
        if found:
            lacking[chr(int(found[1]))] = None
        else:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    return images, "".join(lacking)


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
        drawn.append(EmbeddedFigure(name, heading, caption, width, height, data))
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
    texts: Mapping[str, Sequence[Record]],
    metrics: Mapping[str, Any],
) -> list[Part]:
    """Return the parts below the key numbers in their order."""
    named = {name for part in first for name in part.figures}
    own = {name: Part(name, figures=(name,)) for name in figures if name not in named}
    if pruning:
        measured = metrics.get("test") or metrics.get("train") or {}
        table = pruning_table(pruning, is_regression="rmse" in measured)
        drawn = ("pruning",) if "pruning" in own else ()
        own["pruning"] = Part("pruning", "Pruning", tables=(table,), figures=drawn)
    # Those of the network come after what a table's owner wants to know.
    last = [name for name in _NETWORK if name in own] if first else []
    ahead = [] if first else [name for name in _FIRST if name in own]
    middle = [part for name, part in own.items() if name not in (*ahead, *last)]
    network = [own[name] for name in last]
    measures = parts_table(metrics)
    tables = [
        *(
            Part(f"texts-{number}", heading, tables=(text_table(rows),), caption=_EXAMPLES_CAPTION)
            for number, (heading, rows) in enumerate(texts.items(), start=1)
        ),
        *(
            [Part("measures", "Test and training data", tables=(measures,))]
            if measures.rows
            else []
        ),
    ]
    rest = [*tables, *network] if first else [*network, *tables]
    top = [own[name] for name in ahead] or [part for part in first if part.name != _RESULT]
    return [*top, *middle, *rest]


def _comparison(
    title: str, metrics: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]]
) -> list[Part]:
    if not others:
        return []
    part, named = ("test", "test") if metrics.get("test") else ("train", "training")
    table = metric_table({title: metrics, **others}, part)
    return [Part("comparison", f"Comparison on the {named} data", tables=(table,))]


def _summary(metrics: Mapping[str, Any], history: Sequence[Record]) -> str:
    epochs = metrics.get("epochs") or len(history)
    passes = metrics.get("passes") or 1
    each = f" of {passes:,} passes over the training data" if passes > 1 else ""
    parts = [f"{epochs:,} epoch{'' if epochs == 1 else 's'}{each}"] if epochs else []
    speeds = [speed for row in history if (speed := row.get("images_per_second")) is not None]
    if speeds:
        parts.append(f"{sum(speeds) / len(speeds):,.0f} examples per second in training")
    return ", ".join(parts)


def _command(config: Mapping[str, Any]) -> str:
    command = config.get("command") or ""
    return command if isinstance(command, str) else shlex.join(map(str, command))


def _settings(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the names and values of the settings that have a value."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            if value:
                yield f"{prefix}{name}", ", ".join(map(str, value))
        elif value is not None:
            yield f"{prefix}{name}", str(value)
