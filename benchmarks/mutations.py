"""Plant small faults in the library, one at a time, and count those that the tests catch.

python benchmarks/mutations.py              # plant the faults, or resume; Ctrl-C keeps what is done
python benchmarks/mutations.py --slow       # run the slow tests on the faults that survived
python benchmarks/mutations.py --list-survivors
python benchmarks/mutations.py --rerun-survivors    # after tests were added

The default suite runs once under `coverage`, so that it is known which tests run each line. Each
fault is then tried on the tests that run its line, those of the mirrored folder first, then on the
rest of that folder and of the file, until one fails or a limit of seconds of tests is reached. The
tests run in forked processes on copies of the repository (see mutation_server.py); the checkout
itself is never changed.

No known tool is used: cosmic-ray starts the whole suite for each fault, which takes days here;
mutmut forks as this does, but it draws no sample, changes function bodies only, through wrappers
that the tests of signatures and doctests notice, and does not read C++.

Written to results/mutations: faults.jsonl, a line for each fault as it is done; summary.json and
table.md, the counts by file. equivalent.json is written by hand: the id of each survivor that
changes nothing a user can observe, and the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from mutation_faults import Fault, draw
from mutation_server import Answer, Request
from mutation_suite import ROOT, Suite, Worker, console, file_of, in_parallel, measured, workers
from records import commit, require_clean_tree

from bayesify.app.runs.environment import hardware, versions
from bayesify.io import atomic_write

RESULTS = ROOT / "results" / "mutations"
COMPILING = 900.0  # seconds for a planted kernel, which is compiled for each of its uses
FEW_SECONDS = 15.0  # of a fault before any was timed


class Tester:
    """Plants faults and runs the tests that may catch them."""

    def __init__(self, kind: str, suite: Suite, seconds: float) -> None:
        self._kind = kind
        self._suite = suite
        self._seconds = seconds
        self._sound: set[str] = set()  # tests that pass alone without a fault

    def run(self, worker: Worker, fault: Fault) -> dict[str, Any]:
        """Plant a fault and return what is recorded of it."""
        started = time.perf_counter()
        while True:
            groups, left_out = self._suite.select(fault, self._seconds)
            answer, ran = Answer("passed"), 0
            with worker.planted(fault):
                for tests in groups:
                    answer = worker.ask(self._request(tests, fault))
                    ran += len(answer.durations)
                    if answer.outcome != "passed":
                        break
            if self._is_sound(worker, answer, fault):
                break
        caught = answer.outcome != "passed"
        return {
            **{name: getattr(fault, name) for name in ("id", "path", "line", "operator")},
            "source": fault.source,
            "change": fault.change,
            "verdict": f"caught by the {self._kind} suite" if caught else "survived",
            "outcome": answer.outcome,
            "test": answer.failed[0] if answer.failed else None,
            "message": without_folders(answer.message),
            "suite": self._kind,
            "tests_run": ran,
            "tests_left_out": left_out,
            "seconds": round(time.perf_counter() - started, 2),
        }

    def _request(self, tests: list[str], fault: Fault) -> Request:
        """Ask for tests, with a limit that only a hang reaches."""
        expected = sum(self._suite.durations[test] for test in tests)
        files = list(dict.fromkeys(map(file_of, tests)))
        compiling = COMPILING if fault.path.startswith("training/kernel/") else 0.0
        limit = 60 + 2 * len(files) + 4 * expected + compiling
        return Request(files=files, tests=tests, seconds=limit)

    def _is_sound(self, worker: Worker, answer: Answer, fault: Fault) -> bool:
        """Tell whether the failed test passes alone without the fault; else leave it out."""
        test = answer.failed[0] if answer.failed else ""
        if test not in self._suite.durations or test in self._sound:
            return True
        if worker.ask(self._request([test], fault)).outcome == "passed":
            self._sound.add(test)
            return True
        self._suite.excluded.add(test)
        return False


def without_folders(text: str) -> str:
    """Shorten absolute paths, which differ between machines, to the names of files."""
    return re.sub(r"(?<![\w.])(?:/[\w.+-]+)+/(?=[\w.+-])", ".../", text)


def read_records() -> dict[str, dict[str, Any]]:
    """Return the last record of each fault by its id."""
    path = RESULTS / "faults.jsonl"
    records: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # the last line of a run that was killed while it wrote
            continue
        records[record["id"]] = record
    return records


def append(record: dict[str, Any]) -> None:
    """Append the record of one fault."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / "faults.jsonl"
    written = path.read_bytes() if path.exists() else b""
    torn = bool(written) and not written.endswith(b"\n")  # by a run that was killed
    with path.open("a") as file:
        file.write("\n" * torn + json.dumps(record) + "\n")


def read_equivalent() -> dict[str, str]:
    """Return the reason of each fault that was judged to change nothing, by its id."""
    path = RESULTS / "equivalent.json"
    found: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    return found


def kind_of(record: dict[str, Any], equivalent: dict[str, str]) -> str:
    """Return the column of the table that a fault counts in."""
    if record["verdict"] == "survived":
        return "equivalent" if record["id"] in equivalent else "survived"
    return str(record["suite"])


COLUMNS = ("default", "slow", "survived", "equivalent")


def summarise(faults: Sequence[Fault], arguments: argparse.Namespace) -> None:
    """Write the counts of the faults that are done, and print the totals."""
    records, equivalent = read_records(), read_equivalent()
    done = [records[fault.id] for fault in faults if fault.id in records]
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for record in done:
        counts[record["path"]][kind_of(record, equivalent)] += 1
    total = sum(counts.values(), Counter[str]())
    caught, planted = total["default"] + total["slow"], total.total()
    score = caught / max(1, planted - total["equivalent"])
    rows = [
        {"file": path, "planted": own.total(), **{name: own[name] for name in COLUMNS}}
        for path, own in [*sorted(counts.items()), ("all", total)]
    ]
    document = {
        "experiment": "mutations",
        "config": {
            "faults": arguments.faults,
            "drawn": len(faults),
            "seconds": arguments.seconds,
            "slow_seconds": arguments.slow_seconds,
        },
        "seed": arguments.seed,
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(),
        "metrics": {
            "score": score,
            "files": rows,
            "operators": _by_operator(done, equivalent),
            "outcomes": Counter(record["outcome"] for record in done),
            "commits": sorted({str(record["commit"]) for record in done}),
        },
        "seconds": sum(record["seconds"] for record in done),
    }
    head = ["file", "planted", "caught", "caught by slow tests only", "survived", "equivalent"]
    table = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    table += [f"| {' | '.join(map(str, row.values()))} |" for row in rows]
    RESULTS.mkdir(parents=True, exist_ok=True)
    atomic_write(RESULTS / "summary.json", json.dumps(document, indent=2) + "\n")
    atomic_write(RESULTS / "table.md", "\n".join(table) + "\n")
    console.print(
        f"{planted} of {len(faults)} faults planted: {total['default']} caught by the default"
        f" suite, {total['slow']} by slow tests only, {total['survived']} survived,"
        f" {total['equivalent']} equivalent; score {score:.1%}",
        highlight=False,
    )


def _by_operator(
    done: Iterable[dict[str, Any]], equivalent: dict[str, str]
) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for record in done:
        counts[record["operator"]][kind_of(record, equivalent)] += 1
    return dict(sorted(counts.items()))


def list_survivors(faults: Sequence[Fault]) -> None:
    """Print each survivor that is not judged equivalent: id, place, line and change."""
    records, equivalent = read_records(), read_equivalent()
    for fault in sorted(faults, key=lambda each: (each.path, each.line)):
        record = records.get(fault.id)
        if record is None or kind_of(record, equivalent) != "survived":
            continue
        left_out = record["tests_left_out"]
        more = f", {left_out} left out by the limit" if left_out else ""
        print(f"{fault.id}  src/bayesify/{fault.path}:{fault.line}  {fault.operator}")
        print(f"    line    {fault.source}\n    change  {fault.change}")
        print(f"    tests   {record['tests_run']} run of the {record['suite']} suite{more}")


def to_do(faults: Iterable[Fault], *, rerun_survivors: bool) -> list[Fault]:
    """Return the faults that the default suite was not tried on, and the survivors if asked."""
    records, equivalent = read_records(), read_equivalent()
    return [
        fault
        for fault in faults
        if fault.id not in records
        or (rerun_survivors and kind_of(records[fault.id], equivalent) == "survived")
    ]


def survivors(faults: Iterable[Fault]) -> list[Fault]:
    """Return the faults that survived the default suite, where the slow one was not tried."""
    records, equivalent = read_records(), read_equivalent()
    return [
        fault
        for fault in faults
        if fault.id in records
        and records[fault.id]["suite"] == "default"
        and kind_of(records[fault.id], equivalent) == "survived"
    ]


def print_cost(number: int, count: int, limit: float, kind: str) -> None:
    """Print how long the faults will take, from those that were timed before."""
    times = [each["seconds"] for each in read_records().values() if each["suite"] == kind]
    usual = sum(times) / len(times) if times else FEW_SECONDS
    console.print(
        f"{number} faults for the {kind} suite, {count} at a time: about"
        f" {number * usual / count / 60:.0f} min at {usual:.0f} s a fault, at most"
        f" {number * limit / count / 60:.0f} min of tests. Before that the {kind} suite runs once"
        " under coverage, unless it did so on the same sources.",
        highlight=False,
    )


def main() -> None:
    """Plant the faults that are not done yet."""
    require_clean_tree()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=320, help="at least so many in all")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=120, help="of default tests a fault")
    parser.add_argument("--slow", action="store_true", help="run slow tests on survivors")
    parser.add_argument("--slow-seconds", type=float, default=600, help="of slow tests a fault")
    parser.add_argument(
        "--only", nargs="*", default=[""], help="files that begin with one of these"
    )
    parser.add_argument("--limit", type=int, help="plant at most so many now")
    parser.add_argument("--list-survivors", action="store_true")
    parser.add_argument("--rerun-survivors", action="store_true")
    arguments = parser.parse_args()
    drawn = draw(ROOT / "src" / "bayesify", arguments.faults, arguments.seed)
    if arguments.list_survivors:
        list_survivors(drawn)
        return
    faults = [fault for fault in drawn if fault.path.startswith(tuple(arguments.only))]
    for number in (signal.SIGINT, signal.SIGTERM):  # heard in the background too
        signal.signal(number, signal.default_int_handler)
    left = to_do(faults, rerun_survivors=arguments.rerun_survivors)[: arguments.limit]
    try:
        if left or arguments.slow:
            with workers(arguments.workers) as started:
                test(left, "default", arguments.seconds, started)
                if arguments.slow:
                    test(survivors(faults), "slow", arguments.slow_seconds, started)
    except KeyboardInterrupt:
        console.print("stopped; the same command resumes")
    summarise(drawn, arguments)


def test(faults: Sequence[Fault], kind: str, seconds: float, started: Sequence[Worker]) -> None:
    """Plant faults and append what the tests of one kind say of each."""
    if not faults:
        return
    print_cost(len(faults), len(started), seconds, kind)
    suite = measured(kind, started)
    if suite.excluded:
        names = sorted(suite.excluded)
        console.print(f"{len(names)} tests fail without a fault and are left out: {names[:5]}")
    tester = Tester(kind, suite, seconds)
    records = in_parallel(faults, tester.run, started, f"faults, {kind} suite")
    for record in records:
        append({**record, "commit": commit()})
        if record["verdict"] == "survived":
            console.print(f"survived: {record['path']}:{record['line']}  {record['operator']}")


if __name__ == "__main__":
    main()
