"""Style of all figures, and formats of their numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

try:
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
except ImportError as error:
    raise ImportError("figures need matplotlib; run pip install 'bayesify[cli]'") from error

__all__ = [
    "COLOURS",
    "STYLE",
    "Floats",
    "Record",
    "TickFormatter",
    "compact",
    "decibels",
    "legend_label",
    "log_locator",
    "plain",
    "scale_y",
    "shortened",
    "styled",
    "tick",
]

#: One epoch of a history, or one line of a pruning table; missing and None values are not drawn.
Record = Mapping[str, float | None]
Floats = npt.NDArray[np.float64]

#: Okabe and Ito's palette, distinct under every common kind of colour blindness.
COLOURS = {
    "blue": "#0072B2",
    "vermillion": "#D55E00",
    "green": "#009E73",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "purple": "#CC79A7",
    "ink": "#222222",
    "grey": "#8a8a8a",
}

#: Settings of all figures, applied with ``matplotlib.rc_context``.
STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": COLOURS["grey"],
    "axes.facecolor": "white",
    "axes.grid": True,
    "axes.labelcolor": COLOURS["ink"],
    "axes.labelsize": 9,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.unicode_minus": True,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.hspace": 0.06,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.wspace": 0.05,
    "figure.facecolor": "white",
    "figure.titlesize": 11,
    "figure.titleweight": "bold",
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9,
    "grid.color": "#e8e8e8",
    "grid.linewidth": 0.8,
    "legend.edgecolor": "white",
    "legend.fontsize": 8.5,
    "legend.framealpha": 0.85,  # so that no grid line crosses the text
    "legend.frameon": True,
    "lines.linewidth": 1.6,
    "text.color": COLOURS["ink"],
    "text.parse_math": False,  # a name may hold a dollar sign
    "text.usetex": False,
    "xtick.color": COLOURS["grey"],
    "xtick.labelcolor": COLOURS["ink"],
    "xtick.labelsize": 8.5,
    "ytick.color": COLOURS["grey"],
    "ytick.labelcolor": COLOURS["ink"],
    "ytick.labelsize": 8.5,
}

_UNITS = {"G": 1e9, "M": 1e6, "k": 1e3}
#: Rounding of the places of ticks, relative to their values.
_ROUNDING = 1e-10
#: Digits by which any two numbers differ.
_MOST_DIGITS = 17
#: Stands before a label that begins with an underscore, which matplotlib would not show.
_ZERO_WIDTH_SPACE = "\N{ZERO WIDTH SPACE}"
#: Decorator that draws in ``STYLE`` and then restores matplotlib's settings.
styled = mpl.rc_context(STYLE)


class TickFormatter(FuncFormatter):
    """Format the ticks of an axis by a function, with more digits where its labels would be wrong.

    A label may be off by a twentieth of the distance between two ticks.

    Example:
        >>> TickFormatter(plain).format_ticks([1012.0, 1013.0])
        ['1,012', '1,013']
        >>> TickFormatter(plain).format_ticks([1012.5, 1013.0])
        ['1,012.5', '1,013']
    """

    def format_ticks(self, values: list[float]) -> list[str]:
        """Return the labels of the ticks at these values."""
        labels = super().format_ticks(values)
        gaps = np.diff(np.unique(values))
        if not len(gaps):
            return labels
        allowed = 0.05 * float(gaps.min())
        largest = float(np.abs(values).max())
        digits = max(4, 1 + math.floor(math.log10(largest))) if largest else 4
        while digits <= _MOST_DIGITS and not _are_right(labels, values, allowed):
            labels = [_signed(f"{abs(value):,.{digits}g}", value) for value in values]
            digits += 1
        return labels


def _are_right(labels: Sequence[str], values: Sequence[float], allowed: float) -> bool:
    return all(
        abs(_number(label) - value) <= allowed + _ROUNDING * abs(value)
        for label, value in zip(labels, values, strict=True)
    )


def _number(label: str) -> float:
    """Return the number that a label shows: 1,500 or 350k."""
    text = label.replace(",", "").replace("\N{MINUS SIGN}", "-")
    factor = _UNITS.get(text[-1:], 1.0)
    return float(text.rstrip("kMG")) * factor


def _signed(text: str, value: float) -> str:
    return f"\N{MINUS SIGN}{text}" if value < 0.0 else text


def scale_y(ax: Axes, values: Floats, formatter: TickFormatter | None = None) -> None:
    """Set a logarithmic axis where the values span more than a factor of 5, else a linear one."""
    if values.size and values.min() > 0 and values.max() / values.min() > 5.0:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(log_locator(values.max() / values.min()))
        ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(formatter or TickFormatter(plain))


def log_locator(factor: float) -> LogLocator:
    """Return the places of ticks on a logarithmic axis whose values span a factor.

    Three in each factor of ten have room for few of these factors only.

    Example:
        >>> log_locator(1e7).tick_values(1.0, 1e4).tolist()[1:-1]
        [1.0, 10.0, 100.0, 1000.0, 10000.0]
    """
    return LogLocator(subs=(1.0, 2.0, 5.0) if factor < 3e4 else (1.0,), numticks=12)


def legend_label(name: str) -> str:
    """Return a label by which a legend shows a name, one such as "_total" too.

    Example:
        >>> legend_label("total"), len(legend_label("_total"))
        ('total', 7)
    """
    return f"{_ZERO_WIDTH_SPACE}{name}" if name.startswith("_") else name


def plain(value: float, _: object = None) -> str:
    """Format a tick without exponent, below 10^9: 0.05, 12, 110,000; the position is ignored."""
    if 1000 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.7g}"


def compact(value: float) -> str:
    """Format a number with three digits and k, M or G: 47,841 is "47.8k"."""
    value = float(f"{value:.3g}")
    if value >= 1e12:
        return f"{value:g}"
    for unit, size in _UNITS.items():
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def tick(value: float, _: object = None) -> str:
    """Format a tick in few characters: 0.25, 1,500, 350k, negative ones with a true minus sign."""
    text = plain(abs(value)) if abs(value) < 1e4 else compact(abs(value))
    return _signed(text, value)


def decibels(value: float) -> str:
    """Format decibels with one decimal and a true minus sign."""
    return f"{value:.1f} dB".replace("-", "\N{MINUS SIGN}")


def shortened(name: str, most: int = 26, *, end: int = 0) -> str:
    """Return a name, with dots for a part of it if it is long.

    Args:
        name: the name.
        most: its greatest length, in characters.
        end: the number of characters of its end that are kept.

    Example:
        >>> shortened("humidity"), shortened("a very long name of a column", 12)
        ('humidity', 'a very long\N{HORIZONTAL ELLIPSIS}')
        >>> shortened("encoder.layers.3.weight[5, 1]", 16, end=12)
        'enc\N{HORIZONTAL ELLIPSIS}weight[5, 1]'
    """
    if len(name) <= most:
        return name
    return f"{name[: most - 1 - end]}\N{HORIZONTAL ELLIPSIS}{name[len(name) - end :]}"
