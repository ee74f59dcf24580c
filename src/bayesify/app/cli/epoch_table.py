"""Show training on standard error as a table with one row per epoch."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import TaskID, TextColumn, TimeRemainingColumn

from bayesify.app.cli.progress_bar import progress_bar
from bayesify.app.runs.folder import Run, as_test_row
from bayesify.training.history import EpochRow, History

__all__ = ["EpochTable", "HistoryWriter"]

_ERRORS = {None: "err%", "classification": "err%", "regression": "mse"}


class EpochTable:
    """A row per epoch, and below them a progress bar for the minibatches of the current one.

    The train error is measured with the weights sampled in training, the test error with the
    mean weights. There is no bar where standard error is not a terminal.

    Args:
        console: where to draw.
        task: ``"regression"``, whose errors are mean squares of the standardised target, or None.
        prunes: whether weights are removed in training, so that a column has their percentage.
    """

    def __init__(self, console: Console, task: str | None = None, *, prunes: bool = False) -> None:
        self._console = console
        error, data = _ERRORS[task], "rows" if task else "images"
        # Mean squares are about 1; other errors are percentages.
        self._decimals = 4 if task == "regression" else 2
        self._header = (
            f"{'epoch':>9} {'loss':>8} {'nll':>8} {'KL, nats':>9} {f'train {error}':>10} "
            f"{f'test {error}':>9} {'pruned % ' if prunes else ''}{f'{data}/s':>8} {'left':>7}"
        )
        self._prunes = prunes
        self._bar = progress_bar(
            console,
            TextColumn("{task.completed:.0f}/{task.total:.0f} minibatches"),
            TimeRemainingColumn(),
            label="{task.description:>9}",
        )
        #: Remarks that were printed.
        self.notes: list[str] = []
        self._task: TaskID | None = None
        self._epochs = self._done = self._batches = 0
        self._started = 0.0

    def on_start(self, *, epochs: int, batches: int, history: History) -> None:
        """Print the header."""
        done = len(history)
        self._epochs, self._done, self._batches = epochs, done, batches
        if done:
            self._console.print(f"resuming after epoch {done} of {epochs}", highlight=False)
        if done < epochs:
            self._console.print(self._header, style="bold", highlight=False, soft_wrap=True)
        self._started = time.monotonic()

    def on_note(self, text: str) -> None:
        """Print a remark."""
        self.notes.append(text)
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def on_step(self, *, epoch: int, batch: int) -> None:
        """Move the bar."""
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task(f"{epoch + 1}/{self._epochs}", total=self._batches)
        self._bar.update(self._task, completed=batch + 1, description=f"{epoch + 1}/{self._epochs}")

    def on_epoch(self, row: EpochRow) -> None:
        """Print the epoch's row."""
        row = as_test_row(row)
        epoch = int(row["epoch"] or 0)
        here = epoch - self._done
        pruned = 100.0 * (row.get("fraction_pruned") or 0.0)
        left = (time.monotonic() - self._started) / here * (self._epochs - epoch)
        line = (
            f"{f'{epoch}/{self._epochs}':>9} {_number(row['loss'], '8.4f')} "
            f"{_number(row['nll'], '8.4f')} {_number(row['kl'], '9,.0f')} "
            f"{_number(row['train_error'], f'10.{self._decimals}f')} "
            f"{_number(row['test_error'], f'9.{self._decimals}f')} "
            f"{f'{pruned:8.2f} ' if self._prunes else ''}"
            f"{_number(row['images_per_second'], '8,.0f')} {_clock(left):>7}"
        )
        self._console.print(line, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.stop()


class HistoryWriter:
    """A callback that writes history.csv after every epoch, and forwards all calls to a table.

    Args:
        run: the run whose history.csv is written.
        table: shows the epochs.
    """

    def __init__(self, run: Run, table: EpochTable) -> None:
        self._run, self._table = run, table
        self._rows: History = []

    def on_start(self, *, epochs: int, batches: int, history: History) -> None:
        """Keep the rows so far."""
        self._rows = list(history)
        self._table.on_start(epochs=epochs, batches=batches, history=history)

    def on_note(self, text: str) -> None:
        """Forward a remark."""
        self._table.on_note(text)

    def on_step(self, *, epoch: int, batch: int) -> None:
        """Forward a step."""
        self._table.on_step(epoch=epoch, batch=batch)

    def on_epoch(self, row: EpochRow) -> None:
        """Write and show the epoch's row."""
        self._rows.append(row)
        self._run.write_history(self._rows)
        self._table.on_epoch(row)


def _number(value: float | None, form: str) -> str:
    return f"{value:{form}}" if value is not None else " " * int(form.split(",")[0].split(".")[0])


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
