"""Copies of the repository to run tests on, and which tests run each line of the package."""

from __future__ import annotations

import compileall
import hashlib
import json
import os
import py_compile
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from mutation_faults import Fault, is_cpp
from mutation_server import Answer, Request
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bayesify.io import atomic_write

__all__ = ["ROOT", "Suite", "Worker", "console", "file_of", "in_parallel", "measured", "workers"]

ROOT = Path(__file__).resolve().parents[1]
MAPS = ROOT / "build" / "mutations"  # ignored by git
MARKS = {"default": "not slow", "slow": "slow"}
CHUNK = 6  # test files of one run of the map
#: The Python code that calls the C++ kernel: its tests are those of the C++ lines.
CALLS_KERNEL = "training/kernel/native.py"
console = Console()
Job = TypeVar("Job")
Result = TypeVar("Result")


@dataclass
class Suite:
    """The tests of one mark, and which of them run each line of the package.

    Args:
        durations: seconds of each test.
        lines: for each file of the package and each line, the tests that run it.
        excluded: tests that fail without a fault; they are left out.
    """

    durations: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[int, set[str]]] = field(default_factory=dict)
    excluded: set[str] = field(default_factory=set)

    def add(self, answer: Answer) -> None:
        """Add the tests and lines of one run."""
        tests = list(answer.durations)
        self.durations.update(answer.durations)
        for path, lines in answer.lines.items():
            own = self.lines.setdefault(path, defaultdict(set))
            for line, numbers in lines.items():
                own[int(line)].update(tests[number] for number in numbers)

    def select(self, fault: Fault, seconds: float) -> tuple[list[list[str]], int]:
        """Choose the tests for a fault.

        Args:
            fault: the fault.
            seconds: the limit of all tests together.

        Returns:
            groups of tests, to be run one after another, and how many were left out by the limit.
        """
        path = CALLS_KERNEL if is_cpp(fault.path) else fault.path
        lines = self.lines.get(path, {})
        of_file = set().union(*lines.values())
        on_line: set[str] = set()
        if is_cpp(fault.path):
            on_line = of_file
        elif not fault.runs_at_import:
            first, last = fault.lines
            on_line = set().union(*(lines.get(line, ()) for line in range(first, last + 1)))
        near = {test for test in self.durations if _is_near(test, fault.path)}
        tiers = [on_line & near, on_line - near, near - on_line, of_file - near - on_line]
        groups, left_out, spent = [], 0, 0.0
        for tier in tiers:
            group = []
            for test in sorted(tier - self.excluded, key=self._cost):
                if spent + self.durations[test] > seconds:
                    left_out += 1
                else:
                    spent += self.durations[test]
                    group.append(test)
            if group:
                groups.append(self._byfile_of(group))
        return groups, left_out

    def _cost(self, test: str) -> tuple[float, str]:
        return self.durations[test], test

    def _byfile_of(self, tests: Iterable[str]) -> list[str]:
        """Order tests file by file, the cheapest file first: a file's fixtures are made once."""
        files: dict[str, list[str]] = defaultdict(list)
        for test in tests:
            files[file_of(test)].append(test)
        cheapest = sorted(files.values(), key=lambda own: sum(self.durations[test] for test in own))
        return [test for own in cheapest for test in sorted(own, key=self._cost)]


def file_of(test: str) -> str:
    """Return the file of a test's id."""
    return test.partition("::")[0]


def _is_near(test: str, path: str) -> bool:
    """Tell whether a test stands in the folder of tests/ that mirrors a file, or in the file."""
    file = file_of(test)
    parts = PurePosixPath(path)
    if len(parts.parts) == 1:
        return file in (f"tests/test_{parts.stem}.py", f"src/bayesify/{path}")
    folder = next(
        (each for each in parts.parents if (ROOT / "tests" / each).is_dir()), PurePosixPath("none")
    )
    return file == f"src/bayesify/{path}" or file.startswith(f"tests/{folder}/")


class Worker:
    """A copy of the repository, and the server that runs tests on it."""

    def __init__(self, folder: Path) -> None:
        self.tree = folder
        for name in _files_of_checkout():
            copy = folder / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy)
        # Compiled code that is checked by content: a planted fault is never overlooked because
        # the file kept its size and its time.
        compileall.compile_dir(
            folder / "src", quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH
        )
        environment = {name: text for name, text in os.environ.items() if name != "PYTEST_ADDOPTS"}
        cache = folder.with_name(f"{folder.name}-cache")  # planted kernels do not fill the user's
        cache.mkdir()
        environment |= {
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "COVERAGE_CORE": "ctrace",  # the one that knows which test runs a line
            "XDG_CACHE_HOME": str(cache),
        }
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("mutation_server.py")), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches this process only, which then ends the server
        )

    def wait(self) -> None:
        """Wait until the server has imported its libraries."""
        self._read()

    def ask(self, request: Request) -> Answer:
        """Run tests.

        Raises:
            ServerEndedError: the server ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asdict(request)) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ServerEndedError from error
        return Answer(**self._read())

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ServerEndedError
        found: dict[str, Any] = json.loads(line)
        return found

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """Plant a fault, and restore the file."""
        path = self.tree / "src" / "bayesify" / fault.path
        text = path.read_bytes()
        path.write_bytes(fault.plant(text))
        try:
            yield
        finally:
            path.write_bytes(text)

    def end(self) -> None:
        """End the server and the tests that it runs."""
        self._process.terminate()
        self._process.wait()


class ServerEndedError(RuntimeError):
    """The process that runs the tests ended, as after Ctrl-C."""


def _files_of_checkout() -> list[str]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return [name for name in found.stdout.split("\0") if name and (ROOT / name).is_file()]


@contextmanager
def workers(number: int) -> Iterator[list[Worker]]:
    """Start workers on copies of the repository in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="bayesify-mutations-") as folder:
        started: list[Worker] = []
        try:
            for index in range(number):
                started.append(Worker(Path(folder) / f"tree-{index}"))  # noqa: PERF401
            for worker in started:
                worker.wait()
            yield started
        finally:
            for worker in started:
                worker.end()


def in_parallel(
    jobs: Sequence[Job],
    of_job: Callable[[Worker, Job], Result],
    started: Sequence[Worker],
    title: str,
) -> Iterator[Result]:
    """Yield the result of each job as it is done, with a bar.

    Raises:
        RuntimeError: a job failed; its error is the cause.
    """
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    done: queue.SimpleQueue[Result | BaseException] = queue.SimpleQueue()

    def work(worker: Worker) -> None:
        while True:
            try:
                done.put(of_job(worker, waiting.get_nowait()))
            except queue.Empty:
                return
            except BaseException as error:
                done.put(error)
                return

    for worker in started:
        threading.Thread(target=work, args=(worker,), daemon=True).start()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(title, total=len(jobs))
        for number in range(1, len(jobs) + 1):
            while True:  # with a limit, so that Ctrl-C is heard while nothing is done
                try:
                    result = done.get(timeout=0.5)
                    break
                except queue.Empty:
                    continue
            if isinstance(result, BaseException):
                raise RuntimeError(f"{title}: a job failed") from result
            progress.advance(task)
            if not console.is_terminal:  # where no bar is drawn
                print(f"{title}: {number} of {len(jobs)}", flush=True)
            yield result


def measured(kind: str, started: Sequence[Worker]) -> Suite:
    """Run a suite under `coverage`, or read what an earlier run found on the same sources.

    Args:
        kind: ``default`` or ``slow``.
        started: the workers.
    """
    names = [
        name
        for name in _files_of_checkout()
        if name.startswith(("src/", "tests/")) or name == "pyproject.toml"
    ]
    digest = hashlib.sha256()
    for name in names:
        digest.update(f"{name}\0".encode() + (ROOT / name).read_bytes())
    folder = MAPS / f"{digest.hexdigest()[:16]}-{kind}"
    folder.mkdir(parents=True, exist_ok=True)
    files = [name for name in names if _has_tests(name)]
    chunks = [files[start : start + CHUNK] for start in range(0, len(files), CHUNK)]
    suite = Suite()

    def run(worker: Worker, chunk: Sequence[str]) -> list[Answer]:
        path = folder / f"{hashlib.sha256(' '.join(chunk).encode()).hexdigest()[:16]}.json"
        if path.exists():
            return [Answer(**each) for each in json.loads(path.read_text())]
        answers = _lines_of(worker, chunk, MARKS[kind])
        atomic_write(path, json.dumps([asdict(each) for each in answers]))
        return answers

    for answers in in_parallel(chunks, run, started, f"lines of the {kind} suite"):
        for answer in answers:
            suite.add(answer)
            suite.excluded.update(answer.failed)
    return suite


def _lines_of(worker: Worker, chunk: Sequence[str], mark: str) -> list[Answer]:
    """Run test files under `coverage`; a test that fails there is tried without.

    Raises:
        RuntimeError: a file ends the process or hangs; no suite to test faults with.
    """
    answer = worker.ask(Request(files=chunk, mark=mark, first=False, lines=True, seconds=7200))
    if answer.outcome in {"crashed", "hung"}:
        if len(chunk) > 1:
            return [each for name in chunk for each in _lines_of(worker, [name], mark)]
        raise RuntimeError(f"{chunk[0]} {answer.outcome} without a fault: {answer.message}")
    failed = [test for test in answer.failed if test in answer.durations]
    if failed:
        files = list(dict.fromkeys(map(file_of, failed)))
        again = worker.ask(Request(files=files, tests=failed, mark=mark, first=False))
        kept = again.failed if again.outcome in {"passed", "failed"} else failed
        answer = Answer(**{**asdict(answer), "failed": kept})
    return [answer]


def _has_tests(name: str) -> bool:
    if name.startswith("tests/"):
        return PurePosixPath(name).match("test_*.py")
    return name.endswith(".py") and name.startswith("src/") and ">>> " in (ROOT / name).read_text()
