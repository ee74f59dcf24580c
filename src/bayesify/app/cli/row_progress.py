"""Show how many rows of a table were read, and the time that is left."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import TaskID, TextColumn, TimeRemainingColumn

from bayesify.app.cli.progress_bar import progress_bar

__all__ = ["RowProgress"]


class RowProgress:
    """A progress bar for each pass over a table; none where standard error is not a terminal.

    Args:
        console: where to draw.

    Example:
        >>> import io
        >>> with RowProgress(Console(file=io.StringIO())) as progress:
        ...     progress.begin("reading", 5)
        ...     progress(3)
        >>> progress.rows
        3
    """

    def __init__(self, console: Console) -> None:
        self._bar = progress_bar(
            console, TextColumn("{task.completed:,.0f} rows"), TimeRemainingColumn()
        )
        self._task: TaskID | None = None
        #: Rows of the present pass that were read.
        self.rows = 0

    def begin(self, what: str, total: int | None) -> None:
        """Begin a pass.

        Args:
            what: the pass, in a word or two.
            total: rows of the table; None if it is not known.
        """
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(what, total=total)
        self.rows = 0

    def __call__(self, rows: int) -> None:
        """Show that so many rows of the present pass were read."""
        self.rows = rows
        if self._task is not None:
            self._bar.update(self._task, completed=rows)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
