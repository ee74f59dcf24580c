"""Find the places of the library where one small fault can be planted, and draw a sample of them.

The fault is spliced into the text of its file, so that the numbers of the lines stay.
"""

from __future__ import annotations

import ast
import hashlib
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mutation_operators import edits_of_cpp, edits_of_python

__all__ = ["LIBRARY", "Fault", "draw", "faults_of", "files_of_library", "is_cpp"]

#: The ring of the package that the faults are planted in.
LIBRARY = (
    "noise",
    "distributions",
    "prediction",
    "estimators",
    "module",
    "training",
    "io",
    "referee",
    "metrics",
    "plots",
    "datasets",
    "bandits",
)
MINIMUM = 2  # faults of a Python file
MINIMUM_CPP = 3  # faults of a C++ file: four files make at least ten


@dataclass(frozen=True)
class Fault:
    """One fault: ``replacement`` for the bytes ``start:end`` of a file.

    Args:
        path: the file, relative to the package's folder.
        operator: the kind of change.
        start: the first byte that is replaced.
        end: the byte after the last that is replaced.
        replacement: the bytes that are written there.
        line: the line of the change, from 1.
        lines: the first and the last line of the statement around it.
        runs_at_import: whether the statement stands outside of every function.
        source: the line of the change, without its indentation.
        change: the old and the new text.
        id: a name that lasts while the line of the change stays the same.
    """

    path: str
    operator: str
    start: int
    end: int
    replacement: bytes
    line: int
    lines: tuple[int, int]
    runs_at_import: bool
    source: str
    change: str
    id: str

    def plant(self, text: bytes) -> bytes:
        """Return the file's text with the fault."""
        return text[: self.start] + self.replacement + text[self.end :]


def files_of_library(package: Path) -> list[str]:
    """List the library's source files, relative to the package's folder."""
    found = []
    for name in LIBRARY:
        top = package / name
        files = [top] if top.is_file() else sorted(top.rglob("*"))
        found += [path for path in files if path.suffix in {".py", ".cpp", ".h"}]
    return [path.relative_to(package).as_posix() for path in found]


def draw(package: Path, number: int, seed: int) -> list[Fault]:
    """Draw faults over all files, in proportion to their lines; of a file evenly over operators.

    Args:
        package: the package's folder.
        number: how many faults at least; more where the minimum of each file asks for it.
        seed: of the draw; the same seed and sources give the same faults.

    Returns:
        the faults in the order of the draw, mixed over the files.
    """
    texts = {path: (package / path).read_bytes() for path in files_of_library(package)}
    candidates = {path: faults_of(path, text) for path, text in texts.items()}
    sizes = {path: texts[path].count(b"\n") for path, found in candidates.items() if found}
    quotas = dict.fromkeys(sizes, 0)
    scale = number / max(1, sum(sizes.values()))
    while sum(quotas.values()) < number:  # a full file's share goes to the others
        for path, size in sizes.items():
            least = MINIMUM_CPP if is_cpp(path) else MINIMUM
            quotas[path] = min(len(candidates[path]), max(least, round(scale * size)))
        if all(quotas[path] == len(candidates[path]) for path in sizes):
            break
        scale *= 1.01
    drawn = [
        fault
        for path, quota in quotas.items()
        for fault in _draw_evenly(
            candidates[path], quota, texts[path], random.Random(f"{seed} {path}")
        )
    ]
    random.Random(seed).shuffle(drawn)
    return drawn


def _draw_evenly(
    found: Sequence[Fault], quota: int, text: bytes, generator: random.Random
) -> list[Fault]:
    """Draw faults: an operator first, so that constants do not crowd out the rest."""
    groups: dict[str, list[Fault]] = defaultdict(list)
    for fault in found:
        groups[fault.operator].append(fault)
    drawn: list[Fault] = []
    while groups and len(drawn) < quota:
        name = generator.choice(sorted(groups))
        group = groups[name]
        fault = group.pop(generator.randrange(len(group)))
        if is_cpp(fault.path) or _is_python(fault.plant(text)):
            drawn.append(fault)
        if not group:
            del groups[name]
    return drawn


def _is_python(text: bytes) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def is_cpp(path: str) -> bool:
    """Tell whether a file is one of the kernel's C++ sources."""
    return PurePosixPath(path).suffix != ".py"


def faults_of(path: str, text: bytes) -> list[Fault]:
    """List the faults of a file in the order of its lines; a few of them may not compile.

    Args:
        path: the file, relative to the package's folder; ``.py``, or else C++.
        text: its content.
    """
    edits = edits_of_cpp(text) if is_cpp(path) else edits_of_python(text)
    lines = text.decode().splitlines()
    seen: Counter[str] = Counter()
    found = []
    for edit, statement, runs_at_import in sorted(edits, key=lambda each: each[0].start):
        before = text[edit.start : edit.end]
        kept = before.count(b"\n") - edit.replacement.count(b"\n")
        replacement = edit.replacement + b"\n" * kept  # so that the lines below keep their numbers
        line = text.count(b"\n", 0, edit.start) + 1
        source = lines[line - 1].strip()
        shown, new = (" ".join(part.decode().split()) for part in (before, replacement))
        key = "\0".join((path, edit.operator, source, shown, new))
        seen[key] += 1
        found.append(
            Fault(
                path=path,
                operator=edit.operator,
                start=edit.start,
                end=edit.end,
                replacement=replacement,
                line=line,
                lines=statement,
                runs_at_import=runs_at_import,
                source=source,
                change=f"{shown or '(nothing)'}  ->  {new or '(nothing)'}",
                id=hashlib.sha256(f"{key}\0{seen[key]}".encode()).hexdigest()[:12],
            )
        )
    return found
