"""The commands, and their errors as one line on standard error."""

from __future__ import annotations

import inspect as inspection
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer

import bayesify
from bayesify.estimators.out_of_memory import is_out_of_memory
from bayesify.training import NonFiniteLossError
from bayesify.training.backends import CompilerError

__all__ = ["make_app", "run"]

#: The papers' command is an entry point: the application does not import the papers.
_PLUGINS = {point.name: point for point in entry_points(group="bayesify.commands")}
#: The commands in the order in which they are listed; ``data`` has commands of its own.
_COMMANDS = (
    "train",
    "predict",
    "serve",
    "evaluate",
    "certify",
    "prune",
    "compress",
    "inspect",
    "report",
    "export",
    *_PLUGINS,
    "bench",
    "data",
)
_INTERRUPTED = 130


def make_app(arguments: Sequence[str] = ()) -> typer.Typer:
    """Return the application with the command that these arguments begin with, or with all.

    The modules of the others are not imported, so that a command starts sooner.

    Example:
        >>> len(make_app(["inspect", "runs/first"]).registered_commands)
        1
    """
    named = [name for name in arguments[:1] if name in _COMMANDS]
    app = typer.Typer(
        name="bayesify",
        help=_root.__doc__,
        epilog="Start with: bayesify train mnist --out runs/first",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
    )
    app.callback(invoke_without_command=True)(_root)
    for name in named or _COMMANDS:
        command = _imported(name)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
            continue
        # Each paragraph on one line, so that Typer wraps it at the width of the terminal.
        paragraphs = inspection.cleandoc(command.__doc__ or "").split("\n\n")
        app.command(help="\n\n".join(" ".join(part.split()) for part in paragraphs))(command)
    return app


def _imported(name: str) -> Any:
    """Return the function of a command, or the commands of ``data``."""
    if name in _PLUGINS:
        return _PLUGINS[name].load()
    return getattr(import_module(f"bayesify.app.cli.{name}_command"), name)


def run(app: typer.Typer, arguments: list[str]) -> int:
    """Run one command and return its exit code; print its errors as one line each."""
    try:
        code = app(args=arguments, prog_name="bayesify", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    except typer.Exit as leaving:
        return leaving.exit_code
    except NonFiniteLossError as error:
        return _fail(error, 1)
    except BrokenPipeError:
        return 1
    except (ValueError, OSError, ImportError, CompilerError) as error:
        return _fail(error, 2)
    except OverflowError as error:
        return _fail(f"a setting is too large or too small to compute with ({error})", 2)
    except Exception as error:
        if is_out_of_memory(error):
            less = "use fewer units, samples or a smaller batch"
            return _fail(f"there is not enough memory; {less}", 2)
        if type(error).__name__ == "NoArgsIsHelpError":
            return 2
        # Typer's usage errors, whose class differs between releases.
        if hasattr(error, "format_message"):
            return _fail(error.format_message(), 2)
        raise
    if code == _INTERRUPTED:  # some releases of Typer return it for Ctrl-C, others raise Abort
        return _fail("interrupted", _INTERRUPTED)
    return code if isinstance(code, int) else 0


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)
    ] = False,
) -> None:
    """Train Bayesian neural networks by variational inference (Bayes by Backprop)."""
    if version:
        typer.echo(f"bayesify {bayesify.__version__}")
        raise typer.Exit


def _fail(message: object, code: int) -> int:
    if sys.stderr is not None:  # None after a shell's 2>&-, where print would use stdout
        print(f"bayesify: {' '.join(str(message).split())}", file=sys.stderr)
    return code
