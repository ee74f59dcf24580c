"""Show a search of settings on standard error: its cost, its improvements and a bar of its time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import TextColumn
from rich.text import Text

from bayesify.app.cli.formatting import duration
from bayesify.app.cli.progress_bar import progress_bar
from bayesify.app.report.tuning_text import values_text
from bayesify.app.runs.tune import Plan

__all__ = ["TuningBar"]


class TuningBar:
    """A line per improvement, and below them a bar of the budget's time.

    There is no bar where standard error is not a terminal.

    Args:
        console: where to draw.
        seconds: budget of the search.
    """

    def __init__(self, console: Console, seconds: float) -> None:
        self._console, self._seconds = console, seconds
        self._best: float | None = None
        self._default: Mapping[str, Any] = {}
        self._bar = progress_bar(console, TextColumn("{task.fields[left]} left"))
        self._task = self._bar.add_task("trial 0", total=seconds, left=duration(seconds))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def on_start(self, plan: Plan) -> None:
        """Print what the search will cost."""
        self._default = plan.default
        rows = f"{plan.num_rows:,} training rows"
        parts = (
            f"each of {plan.num_parts} parts of the {rows} is held out in turn"
            if plan.num_parts > 1
            else f"a fifth of the {rows} is held out"
        )
        allowed = max(int(plan.seconds_left / max(plan.seconds_trial, 1e-9)), not plan.num_done)
        if plan.num_done:
            self._print(f"resuming the search after {plan.num_done} trials")
        self._print(
            f"tuning for {duration(plan.seconds_left)}: {parts}; with the default settings a trial "
            f"trains for about {duration(plan.seconds_trial)}, so that the time allows "
            f"about {allowed:,}, fewer where measuring takes long (the first is always finished); "
            "the final training comes after them"
        )
        searched = ", ".join(name.replace("_", "-") for name in plan.default)
        self._print(f"searched: {searched}; all else is kept, as is the temperature")
        self._bar.update(self._task, description=f"trial {plan.num_done}")
        self._bar.start()

    def on_step(self, seconds: float) -> None:
        """Move the bar."""
        left = duration(max(0.0, self._seconds - seconds))
        self._bar.update(self._task, completed=seconds, left=left)

    def on_trial(
        self, number: int, values: dict[str, Any], nll: float | None, best: float | None
    ) -> None:
        """Print a trial that is the best so far."""
        if nll is not None and nll == best and nll != self._best:
            self._best = nll
            kind = "the defaults" if values == self._default else values_text(values)
            self._print(f"trial {number}: nll {nll:.4f} nats, {kind}")
        shown = f", best nll {best:.4f}" if best is not None else ""
        self._bar.update(self._task, description=f"trial {number + 1}{shown}")

    def close(self) -> None:
        """Remove the bar."""
        self._bar.stop()

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)
