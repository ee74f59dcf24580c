"""Progress of training: the callback interface, and one line per epoch."""

from __future__ import annotations

import sys
from typing import Any, Protocol, Self

from bayesify.training.history import EpochRow, History

__all__ = ["Callback", "LineProgress", "NoProgress", "callback_of"]

#: The methods that ``fit`` calls.
_METHODS = ("on_start", "on_step", "on_epoch", "on_note", "on_warning")

_HOW = (
    "derive a class from bayesify.Callback, whose methods do nothing, override "
    "on_epoch(self, row), and pass an instance"
)


class Callback(Protocol):
    """An object that ``fit`` calls; a class that derives from this one overrides what it needs.

    An optional method ``on_note(text)`` receives remarks, and another, ``on_warning(text)``, what
    would be a ``ConvergenceWarning`` otherwise. An exception ends the training; the checkpoint of
    the last epoch stays. A class with a method such as ``on_epochs`` raises TypeError, since
    ``fit`` would never call it.

    Example:
        >>> class Plot(Callback):
        ...     def on_epoch(self, row):
        ...         print(f"epoch {row['epoch']}")
        >>> Plot().on_epoch({"epoch": 1})
        epoch 1
    """

    def __init_subclass__(cls) -> None:
        """Check the names of the methods.

        Raises:
            TypeError: one begins as one that ``fit`` calls and is another, such as ``on_epochs``.
        """
        super().__init_subclass__()
        others = [name for base in cls.__mro__[1:] for name in vars(base)]  # of another library
        mistaken = [
            name
            for name, value in vars(cls).items()
            if callable(value) and name.startswith(_METHODS) and name not in (*_METHODS, *others)
        ]
        if mistaken:
            raise TypeError(
                f"fit calls the methods {', '.join(_METHODS)} of a callback, and not "
                f"{', '.join(mistaken)} of {cls.__name__}; rename it"
            )

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Make an instance of a class that derives from this one.

        Raises:
            TypeError: it would be one of this class, whose methods do nothing.
        """
        if cls is Callback:
            raise TypeError(f"a callback must be of a class of its own, got Callback(); {_HOW}")
        return super().__new__(cls)

    def on_start(self, *, epochs: int, batches: int, history: History) -> None:  # noqa: ARG002
        """Training begins; ``history`` holds the rows of the epochs before a resume."""
        return

    def on_step(self, *, epoch: int, batch: int) -> None:  # noqa: ARG002
        """A minibatch is finished; both indices count from 0."""
        return

    def on_epoch(self, row: EpochRow) -> None:  # noqa: ARG002
        """An epoch is finished; ``row`` is its row of the history."""
        return


class LineProgress(Callback):
    """Print one line per epoch to standard error."""

    def on_start(self, *, epochs: int, batches: int, history: History) -> None:  # noqa: ARG002
        """Remember the number of epochs."""
        self._epochs = epochs

    def on_note(self, text: str) -> None:
        """Print a remark."""
        print(text, file=sys.stderr)

    def on_epoch(self, row: EpochRow) -> None:
        """Print the row."""
        parts = [f"epoch {row['epoch']:.0f}/{self._epochs}"]
        for name, form in (
            ("loss", ".4f"),
            ("nll", ".4f"),
            ("kl", ",.0f"),
            ("train_error", ".2f"),
            ("validation_error", ".2f"),
        ):
            value = row.get(name)
            if value is not None:
                parts.append(f"{name.replace('_', ' ')} {value:{form}}")
        print("  ".join(parts), file=sys.stderr)


class NoProgress(Callback):
    """Show nothing, remarks included.

    Example:
        >>> NoProgress().on_epoch({"epoch": 1.0})
    """


def callback_of(callback: Callback | None, *, progress: bool) -> Callback:
    """Return the callback of a run: the one that was given, or one that prints lines or nothing.

    Raises:
        TypeError: ``callback`` lacks a method, or is a class or several callbacks; or ``progress``
            is no bool.

    Example:
        >>> callback_of(print, progress=True)
        Traceback (most recent call last):
        TypeError: callback must be an object with the methods on_start, on_step and on_epoch, ...
    """
    if not isinstance(progress, bool):
        raise TypeError(
            f"progress must be True, for a line per epoch, or False, got {progress!r}; to show it "
            "in another way pass a callback, see bayesify.Callback"
        )
    if callback is None:
        return LineProgress() if progress else NoProgress()
    if isinstance(callback, list | tuple):
        raise TypeError(
            f"callback must be one object, got a {type(callback).__name__} of {len(callback)}; "
            "pass one whose methods call those of the others"
        )
    needed = ("on_start", "on_step", "on_epoch")
    if isinstance(callback, type) or any(not hasattr(callback, each) for each in needed):
        raise TypeError(
            "callback must be an object with the methods on_start, on_step and on_epoch, got "
            f"{callback!r}; {_HOW}"
        )
    return callback
