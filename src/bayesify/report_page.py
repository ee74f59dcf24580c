"""The HTML of a report: pure functions from numbers and images to text."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from bayesify.report_captions import CAPTIONS
from bayesify.report_style import STYLE, TEMPLATE

__all__ = ["report_page"]

Row = Mapping[str, float | None]

#: Name, unit and decimals of each known measure.
_MEASURES = {
    "error_predictive": ("error, averaged prediction", "%", 2),
    "error_mean_weights": ("error, mean weights", "%", 2),
    "nll": ("negative log likelihood", "nats per example", 4),
    "brier": ("Brier score", "0 best, 2 worst", 4),
    "ece": ("expected calibration error", "0 best, 1 worst", 4),
    "rmse": ("RMSE, averaged prediction", "", 4),
    "rmse_mean_weights": ("RMSE, mean weights", "", 4),
    "crps": ("CRPS", "", 4),
    "mean_std": ("predicted standard deviation", "", 4),
    **{f"coverage_{p}": (f"coverage of {p} % intervals", "%", 1) for p in (50, 80, 95)},
    **{f"width_{p}": (f"width of {p} % intervals", "", 4) for p in (50, 80, 95)},
}

#: Heading, what follows the number, note and decimals of each measure among the key numbers.
_TILES = {
    "error_predictive": ("test error", " %", "averaged prediction", 2),
    "error_mean_weights": ("test error", " %", "mean weights", 2),
    "rmse": ("test RMSE", "", "averaged prediction", 4),
    "rmse_mean_weights": ("test RMSE", "", "mean weights", 4),
    "nll": ("negative log likelihood", "", "nats per example", 4),
    "crps": ("CRPS", "", "unit of the target", 4),
    "coverage_95": ("95 % intervals hold", " %", "of the test data", 1),
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
    heading, caption = CAPTIONS.get(name, (name.replace("_", " ").replace("-", " "), ""))
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
