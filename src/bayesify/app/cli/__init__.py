"""The command line of bayesify."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from bayesify import __version__

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 success, 1 diverged, 2 bad usage or input, 130 Ctrl-C."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["--version"]:  # the commands import PyTorch, which takes seconds
        print(f"bayesify {__version__}")
        sys.exit(0)
    try:
        from bayesify.app.cli.commands import make_app, run

        app = make_app(given)
    except KeyboardInterrupt:
        print("bayesify: interrupted", file=sys.stderr)
        sys.exit(130)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(("bayesify", "torch", "numpy", "safetensors")):
            raise
        print(
            f"bayesify: the command line needs {error.name}; pip install 'bayesify[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    for stream in (sys.stdout, sys.stderr):  # of a locale that cannot write every character
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    code = run(app, given)
    try:
        if sys.stdout is not None:  # None after a shell's >&-
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
