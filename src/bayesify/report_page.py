"""The HTML of a report: pure functions from numbers and images to text."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from bayesify.report_style import STYLE, TEMPLATE

__all__ = ["report_page"]

Row = Mapping[str, float | None]

#: Heading and reading aid of each known figure, by name.
_CAPTIONS = {
    "learning_curves": (
        "Learning curves",
        "After each epoch: the loss that is minimised, its likelihood part, and the error. Of "
        "a Bayesian network also how far the posterior has moved from the prior, and its median "
        "width. A width that still changes at the end has not converged.",
    ),
    "reliability": (
        "Calibration",
        "Points on the diagonal are calibrated: of the examples given 80 % confidence, 80 % are "
        "right. Above it the network is too modest, below it too sure. The lower panel counts the "
        "examples, on a logarithmic axis.",
    ),
    "least_certain": (
        "The least certain test images",
        "The test images of the highest total uncertainty. Total is the entropy of the "
        "prediction, epistemic the part that knowing the weights would remove. A good network is "
        "unsure where a reader is, too.",
    ),
    "most_certain": (
        "The most certain test images",
        "The test images of the lowest total uncertainty: they should look unmistakable. A wrong "
        "prediction here would be a confident mistake.",
    ),
    "pruning": (
        "Pruning",
        "The error as the weights of the lowest signal-to-noise ratio are removed, without "
        "retraining; averaged over a few weight samples, so that its first row may differ "
        "a little from the numbers above. The further the curve stays at the dashed line, the "
        "fewer weights the network needs.",
    ),
    "snr": (
        "Signal-to-noise ratio of the weights",
        "The ratio |mean| / std in decibels: at 0 dB a weight is as large as its own uncertainty. "
        "Weights far to the left say little and can go; the dashed line marks the cut that "
        "removes three quarters.",
    ),
    "weight_densities": (
        "Trained weights",
        "How the values of the trained weights are spread, pruned ones left out. A prior with a "
        "narrow spike gathers means near zero; the sample adds the posterior's width.",
    ),
    "weight_posteriors": (
        "Single weights",
        "What the network knows of three of its weights. Where zero lies in the middle of the "
        "curve the weight can be removed; where it lies far out the data have fixed the weight.",
    ),
}

#: Name, unit and decimals of each known measure.
_MEASURES = {
    "error_predictive": ("error, averaged prediction", "%", 2),
    "error_mean_weights": ("error, mean weights", "%", 2),
    "nll": ("negative log likelihood", "nats per example", 4),
    "brier": ("Brier score", "0 best, 2 worst", 4),
    "ece": ("expected calibration error", "0 best, 1 worst", 4),
}

#: Heading, what follows the number, note and decimals of each measure among the key numbers.
_TILES = {
    "error_predictive": ("test error", " %", "averaged prediction", 2),
    "error_mean_weights": ("test error", " %", "mean weights", 2),
    "nll": ("negative log likelihood", "", "nats per example", 4),
    "brier": ("Brier score", "", "0 best, 2 worst", 4),
    "ece": ("calibration error (ECE)", "", "0 best, 1 worst", 4),
}


def report_page(
    title: str,
    config: Mapping[str, Any],
    metrics: Mapping[str, Any],
    history: Sequence[Row],
    pruning: Sequence[Row],
    images: Mapping[str, bytes],
    notes: Sequence[str],
    beside: Mapping[str, Mapping[str, Any]],
) -> str:
    """The whole page; arguments as for :func:`bayesify.report.write_report`, images as PNG."""
    figures = [_figure(name, image) for name, image in images.items() if name != "pruning"]
    parts = [
        f"<header><h1>{escape(title)}</h1>{_summary(metrics, history)}</header>",
        _notes(notes),
        _tiles(metrics),
        _beside(title, metrics, beside),
        *figures,
        _pruning(pruning, images.get("pruning")),
        _measures(metrics),
        _again(config),
        _config(config),
    ]
    body = "\n".join(part for part in parts if part)
    return TEMPLATE.format(title=escape(title), style=STYLE, body=body)


def _summary(metrics: Mapping[str, Any], history: Sequence[Row]) -> str:
    epochs = metrics.get("epochs") or len(history)
    said = [f"{epochs:,} epoch{'' if epochs == 1 else 's'}"] if epochs else []
    speeds = [speed for row in history if (speed := row.get("images_per_second")) is not None]
    if speeds:
        said.append(f"{sum(speeds) / len(speeds):,.0f} examples per second in training")
    return f"<p>{escape(', '.join(said))}</p>" if said else ""


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<section id="notes" class="notes"><h2>Notes</h2><ul>{items}</ul></section>'


def _tiles(metrics: Mapping[str, Any]) -> str:
    test = metrics.get("test") or {}
    tiles = [
        (heading, _fixed(test[key], digits) + suffix, note)
        for key, (heading, suffix, note, digits) in _TILES.items()
        if test.get(key) is not None
    ]
    if metrics.get("kl_nats"):
        tiles.append(("KL from the prior", f"{metrics['kl_nats']:,.0f}", "nats"))
    if metrics.get("num_weights") is not None:
        tiles.append(("weights", f"{metrics['num_weights']:,}", ""))
    if metrics.get("seconds_train") is not None:
        tiles.append(("training time", _duration(metrics["seconds_train"]), ""))
    if not tiles:
        return ""
    cards = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for name, value, note in tiles
    )
    return f'<section id="key-numbers"><dl class="tiles">{cards}</dl></section>'


def _figure(name: str, image: bytes, more: str = "") -> str:
    heading, caption = _CAPTIONS.get(name, (name.replace("_", " ").replace("-", " "), ""))
    data = base64.b64encode(image).decode()
    # Width and height stand at a fixed place of a PNG. At 100 pixels an inch all figures show
    # their text in one size; given here, the page does not jump while it loads.
    width, height = (round(int.from_bytes(image[at : at + 4], "big") / 1.5) for at in (16, 20))
    return (
        f'<section id="{escape(name)}"><h2>{escape(heading)}</h2><figure>'
        f'<div class="plate"><img alt="{escape(heading)}" width="{width}" height="{height}" '
        f'src="data:image/png;base64,{data}"></div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>{more}</section>"
    )


def _pruning(rows: Sequence[Row], image: bytes | None) -> str:
    columns: dict[str, tuple[str, Any]] = {
        "fraction": ("removed", lambda value: f"{100 * value:.4g} %"),
        "weights_left": ("weights left", lambda value: f"{value:,.0f}"),
        "error_mean_weights": ("error, mean weights (%)", lambda value: _fixed(value, 2)),
        "error_predictive": ("error, averaged (%)", lambda value: _fixed(value, 2)),
        "file_bytes": ("size on disk", _bytes),
    }
    used = [key for key in columns if any(row.get(key) is not None for row in rows)]
    table = ""
    if rows:
        table = _table(
            [columns[key][0] for key in used],
            [
                [
                    columns[key][1](value) if (value := row.get(key)) is not None else ""
                    for key in used
                ]
                for row in rows
            ],
        )
    if image is not None:
        return _figure("pruning", image, table)
    return f'<section id="pruning"><h2>Pruning</h2>{table}</section>' if table else ""


def _beside(title: str, metrics: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]]) -> str:
    if not others:
        return ""
    parts = {name: run.get("test", {}) for name, run in ({title: metrics} | dict(others)).items()}
    table = _table(["", *parts], _measure_rows(parts))
    return f'<section id="beside"><h2>Side by side, test data</h2>{table}</section>'


def _measures(metrics: Mapping[str, Any]) -> str:
    parts = {name: metrics[name] for name in ("test", "train") if metrics.get(name)}
    if not parts:
        return ""
    table = _table(["", *parts], _measure_rows(parts))
    return f'<section id="measures"><h2>Test and training data</h2>{table}</section>'


def _measure_rows(parts: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    keys = dict.fromkeys((*_MEASURES, *(key for values in parts.values() for key in values)))
    rows = []
    for key in keys:
        name, unit, digits = _MEASURES.get(key, (key.replace("_", " "), "", 4))
        values = [values.get(key) for values in parts.values()]
        if any(value is not None for value in values):
            label = f"{name} ({unit})" if unit else name
            rows.append([label, *("" if v is None else _fixed(v, digits) for v in values)])
    return rows


def _again(config: Mapping[str, Any]) -> str:
    command = config.get("command")
    if not command:
        return ""
    text = command if isinstance(command, str) else shlex.join(map(str, command))
    return (
        '<section id="again"><h2>Make it again</h2>'
        f"<pre><code>{escape(text)}</code></pre></section>"
    )


def _config(config: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th scope='row'>{escape(name)}</th><td>{escape(value)}</td></tr>"
        for name, value in _flat(config)
    )
    return (
        '<section id="config"><details><summary>The full configuration</summary>'
        f"<table class='config'><tbody>{rows}</tbody></table></details></section>"
    )


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            yield f"{prefix}{name}", ", ".join(map(str, value))
        else:
            yield f"{prefix}{name}", str(value)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th scope='col'>{escape(cell)}</th>" for cell in heads)
    body = "".join(
        f"<tr><th scope='row'>{escape(first)}</th>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return (
        f"<div class='wide'><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _fixed(value: Any, digits: int) -> str:
    return f"{value:,.{digits}f}" if isinstance(value, int | float) else str(value)


def _bytes(value: float) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} bytes"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
