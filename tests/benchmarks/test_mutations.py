"""Faults for the mutation test: what is changed, what is left alone, and which tests are run."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def scripts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield


@pytest.fixture(scope="module")
def faults(scripts: None) -> ModuleType:
    return importlib.import_module("mutation_faults")


def planted(faults: ModuleType, text: str, path: str = "noise/keys.py") -> set[str]:
    """The texts that one fault makes of a text."""
    found = faults.faults_of(path, text.encode())
    return {fault.plant(text.encode()).decode() for fault in found}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("y = a + b", "y = a - b"),
        ("y = a ** b", "y = a * b"),
        ("y = (a) < b", "y = (a) <= b"),
        ("y = a not in b", "y = a in b"),
        ("y = a and b or c", "y = a or b or c"),
        ("y = not a", "y =  a"),
        ("y = -a", "y = +a"),
        ("y = 0.5", "y = 0.25"),
        ("y = 0", "y = 1"),
        ("y = True", "y = False"),
        ("y = x.mean(0)", "y = x.sum(0)"),
        ("y = torch.sqrt(x + 1)", "y = (x + 1)"),
        ("y = x.sqrt()", "y = x"),
        ("y = f(a, b)", "y = f(b, a)"),
        ("y = f(a, k=b)", "y = f(a)"),
        ("y = f(k=a, m=b)", "y = f( m=b)"),
        ("f(a)", "pass"),
        ("y += a", "pass"),
        ("if a:\n    y = 'b'", "if (not (a)):\n    y = 'b'"),
        ("def f():\n    return a", "def f():\n    return None"),
        ("if a:\n    raise ValueError(\n        'b'\n    )\n", "if a:\n    pass\n\n\n"),
        ("y = 'ä' + a if b else c", "y = 'ä' + a if (not (b)) else c"),  # columns count bytes
    ],
)
def test_each_operator(faults: ModuleType, text: str, expected: str) -> None:
    assert expected in planted(faults, text)


@pytest.mark.parametrize(
    "text",
    [
        '"""Text of 1 + 1."""\n# 2 + 2\n',
        "__all__ = ['a' + 'b']",
        "y: Literal[1, True]",
        "def f(a: Literal[0]) -> Literal[1]: ...",
        "if TYPE_CHECKING:\n    y = 1 + 1",
        "raise_ = f'{a + 1}'",
        "def __repr__(self):\n    return a + 1",
        "print(a + 1)",
        "assert a == 1",
        "@overload\ndef f(a: int = 1): ...",
        "import a",
    ],
)
def test_text_and_types_are_left_alone(faults: ModuleType, text: str) -> None:
    assert planted(faults, text) == set()


def test_cpp(faults: ModuleType) -> None:
    text = "#define A 1 + 1\n// a + b\n  for (i = 0; i < n; ++i)\n  y = a * b - 0.5f;  // a + b\n"
    changed = planted(faults, text, "training/kernel/cpp/step.cpp")
    last = {each.splitlines()[3].partition(";")[0].strip() for each in changed}
    assert last == {"y = a + b - 0.5f", "y = a * b + 0.5f", "y = a * b - 0.25f"}
    assert {tuple(each.splitlines()[:3]) for each in changed} == {tuple(text.splitlines()[:3])}


def test_the_draw_depends_on_the_seed_only(faults: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "noise").mkdir()
    (tmp_path / "noise" / "keys.py").write_text("y = a + b * c - 1\n" * 20)
    (tmp_path / "io").mkdir()
    (tmp_path / "io" / "files.py").write_text("y = a + b * c - 1\n" * 2)
    drawn = faults.draw(tmp_path, 12, seed=0)
    assert faults.draw(tmp_path, 12, seed=0) == drawn
    assert faults.draw(tmp_path, 12, seed=1) != drawn
    assert Counter(fault.path for fault in drawn) == {"noise/keys.py": 11, "io/files.py": 2}


@pytest.mark.slow
def test_the_draw_reaches_every_file_of_the_library(faults: ModuleType) -> None:
    package = ROOT / "src" / "bayesify"
    drawn = faults.draw(package, 300, seed=0)
    assert len(drawn) >= 300
    assert len({fault.id for fault in drawn}) == len(drawn)
    counts = Counter(fault.path for fault in drawn)
    assert sum(count for path, count in counts.items() if faults.is_cpp(path)) >= 10
    for path in faults.files_of_library(package):
        text = (package / path).read_bytes()
        assert counts[path] >= min(2, len(faults.faults_of(path, text)))
        own = [fault for fault in drawn if fault.path == path]
        assert all(fault.plant(text).count(b"\n") == text.count(b"\n") for fault in own)


def test_the_id_lasts_while_other_lines_change(faults: ModuleType) -> None:
    [before] = faults.faults_of("io.py", b"y = a + b")
    _, after = faults.faults_of("io.py", b"z = 1\ny = a + b")
    assert before.id == after.id
    assert (before.line, after.line) == (1, 2)


def test_messages_name_no_folder_of_a_machine(scripts: None) -> None:
    shortened = importlib.import_module("mutations").without_folders
    text = 'File "/home/me/tree-0/src/io.py", line 3\n/tmp/x/test_io.py:7: Error, 1/2 of a/b'
    assert shortened(text) == 'File ".../io.py", line 3\n.../test_io.py:7: Error, 1/2 of a/b'


def test_near_tests_come_first_and_the_limit_holds(faults: ModuleType) -> None:
    suite = importlib.import_module("mutation_suite").Suite(
        durations={
            "tests/plots/test_a.py::far": 1.0,
            "tests/noise/test_b.py::slow": 9.0,
            "tests/noise/test_b.py::fast": 2.0,
            "tests/noise/test_c.py::elsewhere": 3.0,
            "tests/noise/test_c.py::broken": 0.0,
        },
        lines={
            "noise/keys.py": {
                2: {
                    "tests/plots/test_a.py::far",
                    "tests/noise/test_b.py::slow",
                    "tests/noise/test_b.py::fast",
                }
            }
        },
        excluded={"tests/noise/test_c.py::broken"},
    )
    [fault] = faults.faults_of("noise/keys.py", b"def f():\n    y = a + b")
    groups, left_out = suite.select(fault, 7.0)
    assert groups == [
        ["tests/noise/test_b.py::fast"],
        ["tests/plots/test_a.py::far"],
        ["tests/noise/test_c.py::elsewhere"],
    ]
    assert left_out == 1


@pytest.mark.slow
def test_the_server_runs_the_copy(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    package = tree / "src" / "bayesify"
    package.mkdir(parents=True)
    (tree / "tests").mkdir()
    (tree / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '-n 2'\n")
    (package / "__init__.py").write_text("def f():\n    return 1\n")
    (tree / "tests" / "test_f.py").write_text(
        "import bayesify, subprocess, sys\n"
        "def test_here():\n    assert bayesify.f() == 1\n"
        "def test_below():\n"
        "    code = 'import bayesify; assert bayesify.f() == 1'\n"
        "    assert subprocess.run([sys.executable, '-c', code]).returncode == 0\n"
        "def test_hangs():\n    while bayesify.f() == 3: pass\n"
    )
    names = [f"tests/test_f.py::test_{name}" for name in ("below", "here", "hangs")]
    server = subprocess.Popen(
        [sys.executable, str(BENCHMARKS / "mutation_server.py"), str(tree)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    with server, server.stdin, server.stdout:
        server.stdout.readline()

        def run(**request: object) -> dict[str, object]:
            request = {"files": ["tests/test_f.py"], **request}
            print(json.dumps(request), file=server.stdin, flush=True)
            found: dict[str, object] = json.loads(server.stdout.readline())
            return found

        found = run(tests=names, lines=True)
        assert found["outcome"] == "passed"
        assert list(found["durations"]) == names
        assert found["lines"]["__init__.py"]["2"] == [1, 2]
        (package / "__init__.py").write_text("def f():\n    return 2\n")
        found = run(tests=names, first=False)
        assert found["outcome"] == "failed"
        assert found["failed"] == names[:2]
        (package / "__init__.py").write_text("def f():\n    return 3\n")
        assert run(tests=names[2:], seconds=2.0)["outcome"] == "hung"
