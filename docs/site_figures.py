"""Figures of the tutorials as part of their pages."""

from __future__ import annotations

import base64
from html import escape
from io import BytesIO

from matplotlib.figure import Figure

__all__ = ["html_of"]


def html_of(figure: Figure, description: str) -> str:
    """Return a figure as HTML that needs no other file.

    Args:
        figure: what is shown.
        description: its alternative text.
    """
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    return f'<img src="data:image/png;base64,{data}" alt="{escape(description)}">'
