"""The reference of the command line, from the application itself."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

import typer.main

from bayesify.app.cli.commands import make_app

__all__ = ["reference"]


def reference() -> str:
    """Return all commands with their help, arguments and options, as Markdown."""
    root = typer.main.get_command(make_app())
    return "\n\n".join(chain.from_iterable(map(_section, _commands("bayesify", root))))


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield the command, or those below it, with their full names.

    Typer's classes differ between releases, hence Any.
    """
    below = getattr(command, "commands", None)
    if below is None:
        yield name, command
        return
    for each, found in below.items():
        yield from _commands(f"{name} {each}", found)


def _section(named: tuple[str, Any]) -> Iterator[str]:
    """Yield the heading, the usage, the help and the tables of a command."""
    name, command = named
    context = command.context_class(command, info_name=name)
    yield f"## {name}"
    yield f"```\n{command.get_usage(context).removeprefix('Usage: ')}\n```"
    yield _escaped(command.help)
    panels: dict[str, list[str]] = {}
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is None:  # hidden
            continue
        kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
        title = getattr(parameter, "rich_help_panel", None) or kind
        names, text = record
        panels.setdefault(title, []).append(f"| `{names}` | {_escaped(text)} |")
    for title, rows in panels.items():
        yield "\n".join([f"| {title} | |", "|---|---|", *rows])


def _escaped(text: str) -> str:
    """Return a text of the terminal, with Rich's escaped brackets, as Markdown."""
    plain = html.escape(text.replace(r"\[", "["), quote=False)
    escaped = re.sub(r"([\\`*_|\[\]])", r"\\\1", plain)
    return re.sub(r"(?<!\S)--[a-z][a-z-]*", r"`\g<0>`", escaped)  # no line ends within an option
