"""Make the progress bars of the command line, which look alike."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn

__all__ = ["progress_bar"]


def progress_bar(
    console: Console,
    *columns: ProgressColumn,
    label: str = "{task.description}",
    auto_refresh: bool = True,
) -> Progress:
    """Return a bar that leaves no trace; nothing is drawn where the console is no terminal.

    Args:
        console: where to draw.
        columns: what follows the bar.
        label: what stands before the bar.
        auto_refresh: whether a thread redraws the bar while nothing reports.

    Example:
        >>> import io
        >>> with progress_bar(Console(file=io.StringIO()), TextColumn("files")) as bar:
        ...     bar.advance(bar.add_task("reading", total=2))
    """
    return Progress(
        TextColumn(label),
        BarColumn(bar_width=40),
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        auto_refresh=auto_refresh,
    )
