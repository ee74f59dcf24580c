"""The command line of bayesify."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from bayesify import __version__

__all__ = ["main"]

_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 success, 1 diverged, 2 bad usage or input, 130 Ctrl-C."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["--version"]:  # the commands import PyTorch, which takes seconds
        sys.exit(_tell_version())
    try:
        with _ending_at_ctrl_c():
            from bayesify.app.cli.commands import make_app, run

            app = make_app(given)
    except KeyboardInterrupt:
        _complain("interrupted")
        sys.exit(_INTERRUPTED)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(("bayesify", "torch", "numpy", "safetensors")):
            raise
        _complain(f"the command line needs {error.name}; pip install 'bayesify[cli]'")
        sys.exit(2)
    for stream in (sys.stdout, sys.stderr):  # of a locale that cannot write every character
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    code = run(app, given)
    try:
        if sys.stdout is not None:  # None after a shell's >&-
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has ended
        _discard_output()
    sys.exit(code)


@contextmanager
def _ending_at_ctrl_c() -> Iterator[None]:
    """End the process at Ctrl-C while PyTorch is imported, which may lose it or abort the process.

    Nothing is written yet. Within a process that has PyTorch nothing is changed.
    """
    is_main = threading.current_thread() is threading.main_thread()
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if "torch" in sys.modules or not (is_main and is_usual):
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_: object) -> None:
    with suppress(OSError):
        if sys.stderr is not None:
            os.write(2, b"bayesify: interrupted\n")
    os._exit(_INTERRUPTED)


def _tell_version() -> int:
    try:
        print(f"bayesify {__version__}", flush=True)
    except BrokenPipeError:
        _discard_output()
    except OSError as error:
        _discard_output()
        _complain(str(error))
        return 2
    return 0


def _discard_output() -> None:
    """Let what standard output still holds go nowhere, as it cannot be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str) -> None:
    if sys.stderr is not None:  # None after a shell's 2>&-, where print would use stdout
        print(f"bayesify: {message}", file=sys.stderr)
