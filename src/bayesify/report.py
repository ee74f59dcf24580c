"""One self-contained page on a run: its numbers, figures and configuration."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# First, for it says what to install where matplotlib is missing.
from bayesify.plots import Row  # isort: skip
from matplotlib.figure import Figure

from bayesify.report_page import report_page
from bayesify.storage import atomic_write

__all__ = ["write_report"]


def write_report(
    folder: Path,
    *,
    title: str,
    config: Mapping[str, Any],
    metrics: Mapping[str, Any],
    history: Sequence[Row],
    pruning: Sequence[Row],
    figures: Mapping[str, Figure],
    notes: Sequence[str],
    beside: Mapping[str, Mapping[str, Any]] | None = None,
) -> Path:
    """Write ``report.html``, which holds everything it shows, and each figure as PNG.

    The page needs no network and no script. Each file appears whole or not at all: it is written
    under a temporary name and then renamed, the page last.

    Args:
        folder: where to write; made if missing.
        title: the page's title.
        config: what the run was made with, nested mappings allowed; ``command``, if given, is
            shown as the way to make it again.
        metrics: as in ``metrics.json``: ``test`` and ``train`` with the keys of
            :func:`bayesify.metrics.classification_metrics`, ``kl_nats``, ``num_weights``,
            ``epochs``, ``seconds_train``; what is missing is not shown.
        history: a row an epoch; its last one is summed up.
        pruning: rows as :func:`bayesify.plots.pruning_curve` takes them, or none.
        figures: by name; the name becomes the file's.
        notes: remarks and warnings that the reader must see first, plain text.
        beside: the metrics of other runs by name, for a table side by side.

    Returns:
        The path of ``report.html``.

    Raises:
        ValueError: a figure's name is not of letters, digits, ``-`` and ``_``.
        OSError: the folder cannot be written; what was there before is left whole.
    """
    for name in figures:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise ValueError(
                f"a figure's name becomes a file name and must be of letters, digits, - and _, "
                f"got {name!r}"
            )
    # All in memory first: if drawing fails, no file has changed.
    images = {name: _png(figure) for name, figure in figures.items()}
    page = report_page(title, config, metrics, history, pruning, images, notes, beside or {})
    folder.mkdir(parents=True, exist_ok=True)
    for name, image in images.items():
        atomic_write(folder / f"{name}.png", image)
    path = folder / "report.html"
    atomic_write(path, page)
    return path


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    # No software version in it, so that the same run gives the same bytes.
    figure.savefig(buffer, format="png", dpi=150, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()
