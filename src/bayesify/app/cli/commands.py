"""The commands, and their errors as one line on standard error."""

from __future__ import annotations

import inspect as inspection
import sys
from importlib.metadata import entry_points
from typing import Annotated

import typer

import bayesify
from bayesify.app.cli.bench_command import bench
from bayesify.app.cli.certify_command import certify
from bayesify.app.cli.compress_command import compress
from bayesify.app.cli.data_command import data_app
from bayesify.app.cli.evaluate_command import evaluate
from bayesify.app.cli.export_command import export
from bayesify.app.cli.inspect_command import inspect
from bayesify.app.cli.predict_command import predict
from bayesify.app.cli.prune_command import prune
from bayesify.app.cli.report_command import report
from bayesify.app.cli.serve_command import serve
from bayesify.app.cli.train_command import train
from bayesify.app.out_of_memory import is_out_of_memory
from bayesify.training import NonFiniteLossError
from bayesify.training.backends import CompilerError

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

_INTERRUPTED = 130

#: The papers' command is an entry point: the application does not import the papers.
_PLUGINS = [point.load() for point in entry_points(group="bayesify.commands")]

for _command in (
    *(train, predict, serve, evaluate, certify, prune, compress, inspect, report, export),
    *(*_PLUGINS, bench),
):
    # Each paragraph on one line, so that Typer wraps it at the width of the terminal.
    _paragraphs = inspection.cleandoc(_command.__doc__ or "").split("\n\n")
    app.command(help="\n\n".join(" ".join(part.split()) for part in _paragraphs))(_command)
app.add_typer(data_app, name="data")


def run(arguments: list[str]) -> int:
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
