"""Warnings of the tutorials' code as part of their pages."""

from __future__ import annotations

import sys
import textwrap
import warnings
from typing import Any

__all__ = ["show_in_pages"]

_show_elsewhere = warnings.showwarning
#: Characters of a line, which fit into a page at 1,280 pixels.
_WIDTH = 78


def show_in_pages() -> None:
    """Let a block of a page show the warnings that its code causes, as a reader would see them."""
    warnings.showwarning = _show


def _show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
    frame = sys._getframe()
    while not frame.f_code.co_filename.startswith("<code block:"):  # as markdown-exec names them
        if frame.f_back is None:
            _show_elsewhere(message, category, *place, **more)
            return
        frame = frame.f_back
    frame.f_globals["print"](textwrap.fill(f"{category.__name__}: {message}", width=_WIDTH))
