"""Declaration of one setting of a run: help, range and where it applies; check of a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin

__all__ = ["ConfigError", "Declaration", "Rule", "Setting", "option"]


class ConfigError(ValueError):
    """A setting is out of its range or contradicts another."""


class Rule(NamedTuple):
    """A condition, and the words for it in error messages.

    Args:
        words: complete "NAME must ..." (a range) or "it applies only to ..." (a kind of run).
        holds: the condition, on the value or on the run's settings.
    """

    words: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Setting:
    """The declaration of one setting, next to its type and default in ``RunSettings``.

    Args:
        help: for ``bayesify train --help``, which fills in ``{choices}`` and adds the defaults.
        panel: heading of its group in that help.
        range: what its value must satisfy.
        applies: to which runs; None where to all.
    """

    help: str
    panel: str | None = None
    range: Rule | None = None
    applies: Rule | None = None


class Declaration(NamedTuple):
    """The declaration of a setting, with its type."""

    setting: Setting
    kind: Any

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that its type allows, if it is a ``Literal``."""
        kinds = (self.kind, *get_args(self.kind))
        return next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())

    def check(self, name: str, value: Any) -> None:
        """Raise ConfigError where a value is of a wrong type, no choice, or out of range."""
        if value is None and NoneType in get_args(self.kind):
            return
        if self.choices and value not in self.choices:
            raise ConfigError(
                f"{option(name)} must be one of {', '.join(self.choices)}, got {value}"
            )
        if not (self.choices or _is_of(self.kind, value)):
            kind = getattr(self.kind, "__name__", str(self.kind))
            raise ConfigError(f"{option(name)} must be of type {kind}, got {value!r}")
        wanted = self.setting.range
        if wanted is not None and not wanted.holds(value):
            raise ConfigError(f"{option(name)} must {wanted.words}, got {value}")


def option(name: str) -> str:
    """Return a setting's name on the command line."""
    return name.replace("_", "-")


def _is_of(kind: Any, value: Any) -> bool:
    """Whether a value is of a field's type; a whole number is a number too, a truth value is not.

    Example:
        >>> _is_of(float | None, 3), _is_of(int, True), _is_of(tuple[int, ...], (1, "2"))
        (True, False, False)
    """
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is_of(get_args(kind)[0], each) for each in value)
    if get_args(kind):
        return any(_is_of(part, value) for part in get_args(kind))
    if isinstance(value, bool) or kind is bool:
        return kind is bool and isinstance(value, bool)
    return isinstance(value, (int, float) if kind is float else kind)
