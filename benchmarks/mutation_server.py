"""Run selected tests on a copy of the repository, each time in a process forked from this one.

python benchmarks/mutation_server.py TREE

The parent has imported the libraries that the package needs, never the package: a fork then costs
the package's own import only. It reads requests from standard input and answers on standard
output, one JSON object a line:

    {"files": [...], "tests": [...], "seconds": 60, "first": true}  runs tests; see `Request`
    {"outcome": "failed", "failed": [...], "ran": 3, ...}           the answer; see `Answer`

TREE/src comes first on the path, in the child and in every process that its tests start.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Answer", "Request"]

MEMORY = 16 * 2**30  # bytes of address space; a fault that asks for more is caught


@dataclass(frozen=True)
class Request:
    """Tests to run.

    Args:
        files: their files, relative to the tree.
        tests: their ids in the order of the run; all tests of the files if None.
        mark: which of the tests by mark, as ``pytest -m``.
        seconds: the limit of the whole run.
        first: whether the first failure ends the run.
        lines: whether to record which lines of the package each test runs.
    """

    files: Sequence[str]
    tests: Sequence[str] | None = None
    mark: str = ""
    seconds: float = 3600.0
    first: bool = True
    lines: bool = False


@dataclass(frozen=True)
class Answer:
    """What a run of tests found.

    Args:
        outcome: ``passed``, ``failed``, ``crashed`` (the process ended) or ``hung`` (the limit).
        failed: ids of tests that failed, and of files that could not be collected.
        message: the end of the first failure, or of the process's output where it ended early.
        durations: seconds of each test that was run.
        lines: for each file of the package, the numbers of the tests that ran a line; the tests
            are numbered in the order of ``durations``.
        seconds: of the whole run.
    """

    outcome: str
    failed: list[str] = field(default_factory=list)
    message: str = ""
    durations: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    seconds: float = 0.0


class _Recorder:
    """A plugin of pytest: selects and orders the tests, and records how each ended."""

    def __init__(self, tests: Sequence[str] | None, coverage: Any = None) -> None:
        self.failed: list[str] = []
        self.message = ""
        self.durations: dict[str, float] = defaultdict(float)
        self._rank = None if tests is None else {test: rank for rank, test in enumerate(tests)}
        self._coverage = coverage

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        if self._rank is not None:
            rank = self._rank
            left = [item for item in items if item.nodeid not in rank]
            items[:] = sorted(
                (item for item in items if item.nodeid in rank), key=lambda item: rank[item.nodeid]
            )
            config.hook.pytest_deselected(items=left)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if self._coverage is not None:
            self._coverage.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            if self._coverage is not None:
                self._coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.durations[report.nodeid] += report.duration
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)
            crash = getattr(report.longrepr, "reprcrash", None)
            self.message = self.message or str(crash.message if crash else report.longrepr)[-300:]


def _run(request: Request, tree: Path) -> Answer:
    """Run the tests in this process."""
    started = time.perf_counter()
    coverage: Any = None
    if request.lines:
        from coverage import Coverage

        coverage = Coverage(
            data_file=None, config_file=False, source=[str(tree / "src" / "bayesify")]
        )
        coverage.start()
    recorder = _Recorder(request.tests, coverage)
    # The options of the project but for those that share the tests out over processes.
    options = [
        "-q",
        "-c",
        str(tree / "pyproject.toml"),
        "--rootdir",
        str(tree),
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-m",
        request.mark,
        "-o",
        "addopts=--doctest-modules --import-mode=importlib",
        "--basetemp",
        str(tree.with_name(f"{tree.name}-temporary")),
    ]
    options += ["-x"] if request.first else ["--continue-on-collection-errors"]
    code = pytest.main([*options, *request.files], plugins=[recorder])
    lines: dict[str, dict[str, list[int]]] = {}
    if coverage is not None:
        coverage.stop()
        lines = _lines(coverage.get_data(), tree, list(recorder.durations))
    if code == pytest.ExitCode.USAGE_ERROR:
        raise SystemExit("pytest could not start")
    passed = code in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}
    return Answer(
        "passed" if passed else "failed",
        recorder.failed,
        recorder.message,
        dict(recorder.durations),
        lines,
        time.perf_counter() - started,
    )


def _lines(data: Any, tree: Path, tests: list[str]) -> dict[str, dict[str, list[int]]]:
    """Turn the contexts of `coverage` into numbers of tests."""
    numbers = {test: number for number, test in enumerate(tests)}
    package = tree / "src" / "bayesify"
    found: dict[str, dict[str, list[int]]] = {}
    for path in data.measured_files():
        name = Path(path).relative_to(package).as_posix()
        found[name] = {
            str(line): sorted(numbers[test] for test in contexts if test in numbers)
            for line, contexts in data.contexts_by_lineno(path).items()
        }
    return found


def _child(request: Request, tree: Path, answer: Path) -> None:
    """Run the tests in a forked process, write the answer to a file, and end."""
    code = 1
    try:
        os.setsid()  # so that the processes of its tests can be ended with it
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        log = os.open(answer.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(tree)
        source = str(tree / "src")
        sys.path.insert(0, source)
        sys.argv = ["pytest"]
        os.environ["PYTHONPATH"] = source
        answer.write_text(json.dumps(asdict(_run(request, tree))))
        code = 0
    except SystemExit as error:  # as where a fault keeps conftest.py from being imported
        print(error, file=sys.stderr, flush=True)
    finally:
        os._exit(code)


class _Server:
    """Forks a child for each request, and ends it with all that it started."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._answer = tree.with_name(f"{tree.name}-answer.json")
        self._child = 0
        self._parent = os.getppid()

    def serve(self) -> None:
        signal.signal(signal.SIGTERM, lambda *_: self._leave())
        for line in sys.stdin:
            answer = self._answered(Request(**json.loads(line)))
            print(json.dumps(asdict(answer)), flush=True)

    def _answered(self, request: Request) -> Answer:
        self._answer.unlink(missing_ok=True)
        started = time.perf_counter()
        self._child = os.fork()
        if self._child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _child(request, self._tree, self._answer)
        outcome = "crashed"
        while os.waitpid(self._child, os.WNOHANG) == (0, 0):
            if os.getppid() != self._parent:
                self._leave()
            if time.perf_counter() - started > request.seconds:
                outcome = "hung"
                self._kill()
                os.waitpid(self._child, 0)
                break
            time.sleep(0.01)
        self._kill()  # what the tests left behind
        self._child = 0
        shutil.rmtree(self._tree.with_name(f"{self._tree.name}-temporary"), ignore_errors=True)
        seconds = time.perf_counter() - started
        if outcome == "hung" or not self._answer.exists():
            log = self._answer.with_suffix(".log").read_text(errors="replace")
            return Answer(outcome, message=log[-300:], seconds=seconds)
        found = json.loads(self._answer.read_text())
        return Answer(**{**found, "seconds": seconds})

    def _kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child, signal.SIGKILL)

    def _leave(self) -> None:
        if self._child:
            self._kill()
        os._exit(0)


def main() -> None:
    """Serve the tree that the command line names."""
    import matplotlib.pyplot
    import numpy
    import pandas
    import scipy.stats
    import sklearn.base
    import torch

    # One thread, and none started before the fork: a thread pool does not survive it.
    torch.set_num_threads(1)
    loaded = (matplotlib, numpy, pandas, scipy, sklearn, torch)
    print(json.dumps({module.__name__: module.__version__ for module in loaded}), flush=True)
    assert "bayesify" not in sys.modules
    _Server(Path(sys.argv[1]).resolve()).serve()


if __name__ == "__main__":
    main()
