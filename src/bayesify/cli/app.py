"""The commands, and how their errors become one line."""

from __future__ import annotations

import inspect as inspection
import sys
from typing import Annotated

import typer

import bayesify
from bayesify.cli.bench import bench
from bayesify.cli.data import data_app
from bayesify.cli.predict import predict
from bayesify.cli.reproduce import reproduce
from bayesify.cli.results import evaluate, inspect, prune, report
from bayesify.cli.train import train
from bayesify.training import NonFiniteLossError

__all__ = ["app", "run"]

app = typer.Typer(
    name="bayesify",
    help="Train Bayesian neural networks by variational inference (Bayes by Backprop).",
    epilog="Start with: bayesify train mnist --out runs/first",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

for _command in (train, predict, evaluate, prune, inspect, report, reproduce, bench):
    # Each paragraph on one line, for Typer to wrap at the terminal's width.
    _paragraphs = inspection.cleandoc(_command.__doc__ or "").split("\n\n")
    app.command(help="\n\n".join(" ".join(part.split()) for part in _paragraphs))(_command)
app.add_typer(data_app, name="data")


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code; errors are one line on standard error."""
    try:
        code = app(args=arguments, prog_name="bayesify", standalone_mode=False)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except typer.Exit as leaving:
        return leaving.exit_code
    except typer.Abort:
        return _fail("interrupted", 130)
    except NonFiniteLossError as error:
        return _fail(error, 1)
    except BrokenPipeError:
        return 1
    except (ValueError, TypeError, OSError, ImportError) as error:
        return _fail(error, 2)
    except ArithmeticError as error:
        return _fail(f"a setting is too large or too small to compute with ({error})", 2)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "memory" not in str(error):
            raise
        return _fail("there is not enough memory; use fewer units, samples or a smaller batch", 2)
    except Exception as error:
        # Typer's usage errors: their class has moved between releases, their method has not.
        if type(error).__name__ == "NoArgsIsHelpError":
            return 2
        if not hasattr(error, "format_message"):
            raise
        return _fail(error.format_message(), 2)
    return code if isinstance(code, int) else 0


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)
    ] = False,
) -> None:
    """Train Bayesian neural networks by variational inference (Bayes by Backprop)."""
    if version:
        typer.echo(f"bayesify {bayesify.__version__}")
        raise typer.Exit


def _fail(message: object, code: int) -> int:
    print(f"bayesify: {' '.join(str(message).split())}", file=sys.stderr)
    return code
