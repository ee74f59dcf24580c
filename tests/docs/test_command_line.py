"""The reference of the command line: it has every command and every option."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from bayesify.app.cli.commands import make_app

SOURCE = Path(__file__).resolve().parents[2] / "docs" / "site_commands.py"


@pytest.fixture(scope="module")
def sections() -> dict[str, str]:
    """The text of each command by its name."""
    spec = importlib.util.spec_from_file_location("site_commands", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    parts = re.split(r"^## (.+)$", module.reference(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    below = getattr(command, "commands", {})
    for each, found in below.items():
        yield from commands(f"{name} {each}", found)
    if not below:
        yield name, command


def test_each_command_has_its_options(sections: dict[str, str]) -> None:
    known = dict(commands("bayesify", typer.main.get_command(make_app())))
    assert list(sections) == list(known)
    for name, command in known.items():
        shown = set(re.findall(r"^\| `(\S+?)[ `]", sections[name], re.M))
        options = {option.opts[0] for option in command.params if option.opts[0].startswith("--")}
        assert options <= shown
        assert len(shown) == len(command.params)


def test_defaults_and_help_are_shown_in_full(sections: dict[str, str]) -> None:
    assert "Remove the weights with the lowest signal-to-noise ratio" in sections["bayesify prune"]
    train = sections["bayesify train"]
    assert re.search(r"^\| `--dropout-input <float>` \| .+\\\[default: 0; .+\\\] \|$", train, re.M)
    assert r"lowest \|mean\| / std" in train
