"""``bayesify reproduce`` as a command, and the page that shows what it stored."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.app.cli.test_cli import as_json, bayesify
from tests.app.cli.test_errors import check_refused
from tests.reproduce.test_experiments import toy
from torch import nn

from bayesify.reproduce import EXPERIMENTS, Result, read_results
from bayesify.reproduce.harness.experiment import Job
from bayesify.reproduce.harness.half_precision import half_precision
from bayesify.reproduce.papers.blundell import bound, comparison

ROOT = Path(__file__).resolve().parents[2]


COMMIT = "0123456789ab" + 28 * "c"


def at_commit(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    for place in ("command", "harness.job_runner"):
        monkeypatch.setattr(f"bayesify.reproduce.{place}.commit", lambda: found)


@pytest.fixture
def with_toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setitem(EXPERIMENTS, "toy", toy())
    monkeypatch.chdir(tmp_path)
    at_commit(monkeypatch, COMMIT)
    return tmp_path


def test_the_list_is_as_promised(with_toy: Path) -> None:
    rows = as_json("reproduce", "--list")["experiments"]
    assert [row["name"] for row in rows] == list(EXPERIMENTS)
    for row in rows:
        assert row.keys() == {"name", "source", "reported", "cost", "stored"}
        assert all(isinstance(value, str) for value in row.values())
    assert rows[-1]["cost"] == "8.0 s on one core, 100 MB; --quick 4.0 s"
    assert rows[-1]["stored"] == "0 of 4 in results/toy"
    assert bayesify("reproduce", "toy", "--seeds", "1").code == 0
    rows = as_json("reproduce", "--list")["experiments"]
    assert rows[-1]["stored"] == "2 of 4 in results/toy"
    shown = bayesify("reproduce", "--list")
    assert shown.code == 0
    assert "Figure 5" in " ".join(shown.out.split())


def test_it_says_what_it_costs_and_what_it_did(with_toy: Path) -> None:
    said = bayesify("reproduce", "toy")
    assert said.code == 0
    lines = said.err.splitlines()
    assert lines[0] == "toy (a test): 4 runs; about 8.0 s on one core and 100 MB"
    assert lines[1] == "results in results/toy; stop at any time, the same command resumes"
    assert re.fullmatch(r"4/4 b, seed 1: [\d.]+ s", lines[5])
    assert lines[6:] == ["results/toy/table.md", "results/toy/toy.png"]
    assert said.out.startswith("| a | ")
    again = bayesify("reproduce", "toy")
    assert "4 runs, 4 of them there already; about 0.0 s" in again.err
    assert again.out == said.out


def test_a_folder_within_the_clone_has_the_clones_results(
    with_toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bayesify("reproduce", "toy").code == 0
    monkeypatch.setattr("bayesify.reproduce.command.checkout", lambda: with_toy)
    within = with_toy / "docs" / "pages"
    within.mkdir(parents=True)
    monkeypatch.chdir(within)
    said = bayesify("reproduce", "toy")
    assert "4 runs, 4 of them there already" in said.err
    assert "results in ../../results/toy; " in said.err
    assert list(within.iterdir()) == []
    monkeypatch.setattr("bayesify.reproduce.command.checkout", lambda: within / "elsewhere")
    assert "results in results/toy; " in bayesify("reproduce", "toy").err


def test_some_jobs_are_run_and_the_table_has_what_is_there(with_toy: Path) -> None:
    some = bayesify("reproduce", "toy", "--only", "b")
    assert some.code == 0, some.err
    assert some.err.startswith("toy (a test): 2 runs; about 4.0 s")
    names = [path.name for path in sorted((with_toy / "results" / "toy").glob("*.json"))]
    assert names == ["b-seed-0.json", "b-seed-1.json"]
    assert some.out.count("| b | ") == 2
    other = bayesify("reproduce", "toy", "--only", "a*, b", "--seeds", "1")
    assert "2 runs, 1 of them there already" in other.err
    both = bayesify("reproduce", "toy", "--only", "b")
    assert "2 runs, 2 of them there already" in both.err
    assert (both.out.count("| a | "), both.out.count("| b | ")) == (1, 2)


def test_quick_has_a_folder_of_its_own_and_says_so(with_toy: Path) -> None:
    said = bayesify("reproduce", "toy", "--quick")
    assert said.code == 0
    assert said.err.startswith("toy --quick, which reproduces nothing (a test): 2 runs")
    assert said.out.startswith("**Quick run")
    assert sorted(path.name for path in (with_toy / "results").iterdir()) == ["toy-quick"]
    found = as_json("reproduce", "toy", "--quick")
    assert found["quick"] is True
    assert len(found["rows"]) == 2
    assert found["figures"] == ["results/toy-quick/toy.png"]


@pytest.mark.slow
def test_two_quick_runs_of_a_real_one_are_alike(tmp_path: Path) -> None:
    options = ("reproduce", "uci", "--quick", "--seeds", "3")
    for name in ("one", "other"):
        as_json(*options, "--out", tmp_path / name)
    rows = {}
    for name in ("one", "other"):
        for path in (tmp_path / name).glob("*.json"):
            row = json.loads(path.read_text())
            assert row.pop("seconds") > 0.0
            assert row.pop("load") >= 0.0
            assert row["quick"] is True
            rows.setdefault(path.name, []).append(row)
    assert sorted(rows) == ["energy-seed-3.json", "yacht-seed-3.json"]
    for one, other in rows.values():
        assert one == other


REFUSED = {
    "reproduce": "needs the name of an experiment, or --list",
    "reproduce toy --list": "or --list and no name",
    "reproduce --list --quick": "quick would do nothing with --list",
    "reproduce table-1": "no experiment 'table-1'; known are ",
    "reproduce toy --seeds a": "seeds must be numbers such as 0,1,2, got 'a'",
    "reproduce toy --seeds 1,1": "seeds must be different numbers of at least 0, got 1, 1",
    "reproduce toy --seeds -1": "seeds must be different numbers of at least 0, got -1",
    "reproduce toy --out taken": "taken",
    "reproduce toy --device gpu": "device must be auto, cpu or cuda, got 'gpu'",
    "reproduce toy --only a,c*": "only must name jobs, got 'c*'; there are a, b",
    "reproduce --list --only a": "only would do nothing with --list",
    "reproduce --list --device auto": "device would do nothing with --list",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(with_toy: Path, line: str) -> None:
    (with_toy / "taken").write_text("a file")
    said = bayesify(*line.split())
    code, last = said.code, said.err.splitlines()[-1]
    assert (code, said.out) == (2, "")
    assert REFUSED[line] in last
    assert "Traceback" not in said.err


def test_a_gpu_is_used_by_experiments_that_can(
    with_toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as a CPU can show it: the device is looked up, and reaches the job."""
    gpu = "bayesify.reproduce.command.requested_device"
    monkeypatch.setattr(gpu, lambda name: "cpu" if name == "cpu" else "cuda")
    said = bayesify("reproduce", "toy", "--device", "cuda")
    assert said.code == 2
    assert "toy trains on the CPU only; leave --device out" in said.err
    assert bayesify("reproduce", "toy", "--device", "auto").code == 0
    trained_on = []

    def run(job: Any, context: Any) -> dict[str, Any]:
        trained_on.append(context.part("all", 0, 1).device)
        return {"value": 1.0}

    monkeypatch.setitem(EXPERIMENTS, "toy", replace(toy(), run=run, on_gpu=True))
    named = "bayesify.reproduce.harness.job_runner.hardware"
    monkeypatch.setattr(named, lambda device: f"a {device}")
    assert bayesify("reproduce", "toy", "--device", "cuda", "--out", "there").code == 0
    assert trained_on == ["cuda"] * 4
    stored = [json.loads(path.read_text()) for path in Path("there").glob("*.json")]
    assert {row["hardware"] for row in stored} == {"a cuda"}
    said = bayesify("reproduce", "toy", "--device", "cuda", "--on", "ray", "--out", "there")
    assert said.code == 2
    assert "on Ray jobs train on CPUs; leave --device or --on out" in said.err
    (row,) = (row for row in as_json("reproduce", "--list")["experiments"] if row["name"] == "toy")
    assert row["cost"].endswith("; takes --device cuda")


def test_uncommitted_code_stores_nothing_unless_told_to(
    with_toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_commit(monkeypatch, f"{COMMIT}-dirty")
    check_refused(bayesify("reproduce", "toy"), "differs from 0123456789ab;", "--uncommitted")
    assert not (with_toy / "results").exists()
    assert bayesify("reproduce", "toy", "--quick").code == 0
    assert bayesify("reproduce", "toy", "--uncommitted", "--seeds", "1").code == 0
    rows = [json.loads(path.read_text()) for path in Path("results/toy").glob("*.json")]
    assert {row["commit"] for row in rows} == {f"{COMMIT}-dirty"}
    # What is stored is shown, whatever the state of the checkout.
    assert bayesify("reproduce", "toy", "--seeds", "1").code == 0
    assert bayesify("reproduce", "toy").code == 2
    at_commit(monkeypatch, None)  # installed from a wheel
    assert bayesify("reproduce", "toy").code == 0


def test_missing_data_are_named(tmp_path: Path) -> None:
    said = bayesify(
        "reproduce", "uci", "--quick", "--data-dir", tmp_path, "--out", tmp_path / "out"
    )
    assert said.code == 2
    assert "energy.txt.gz of energy" in said.err.splitlines()[-1]


def test_a_damaged_result_is_refused_before_any_work(with_toy: Path) -> None:
    (with_toy / "out").mkdir()
    (with_toy / "out" / "a-seed-0.json").write_text("{")
    check_refused(bayesify("reproduce", "toy", "--out", "out"), "a-seed-0.json", "remove it")


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_the_page_shows_what_is_stored(name: str) -> None:
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md")]
    [page] = [page for page in pages if f"<!-- {name}: begin -->" in page]
    table = ROOT / "results" / name / "table.md"
    assert table.exists()
    _, _, rest = page.partition(f"<!-- {name}: begin -->")
    inside, mark, _ = rest.partition(f"<!-- {name}: end -->")
    assert mark
    assert inside.strip() == table.read_text(encoding="utf-8").strip()
    figures = list(table.parent.glob("*.png"))
    assert figures
    for drawn in figures:
        assert (ROOT / "docs" / "images" / drawn.name).read_bytes() == drawn.read_bytes()


def stored(module: Any) -> list[Result]:
    return read_results(ROOT / "results" / module.EXPERIMENT.name)


@pytest.mark.parametrize(
    ("page", "name", "made"),
    [
        ("README.md", "blundell-comparison", lambda: comparison.headline(stored(comparison))),
        ("docs/which-prior.md", "widths", lambda: bound.widths(stored(bound))),
    ],
)
def test_short_tables_are_those_of_the_stored_results(
    page: str, name: str, made: Callable[[], str]
) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    _, _, rest = text.partition(f"<!-- {name}: begin -->")
    inside, mark, _ = rest.partition(f"<!-- {name}: end -->")
    assert mark
    assert inside.strip() == made()


NO_BFLOAT16 = "this CPU has no bfloat16 instructions:"


@pytest.mark.parametrize("fast", [True, False])
def test_a_cpu_without_bfloat16_is_named_before_the_start(
    with_toy: Path, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    monkeypatch.setattr("bayesify.reproduce.command.has_fast_bfloat16", lambda: fast)
    assert NO_BFLOAT16 not in bayesify("reproduce", "toy", "--seeds", "5").err
    monkeypatch.setitem(EXPERIMENTS, "toy", replace(toy(), half_precision=True))
    lines = bayesify("reproduce", "toy").err.splitlines()
    assert (
        lines[1] == f"{NO_BFLOAT16} training is in float32, expect it to take longer"
    ) is not fast
    assert NO_BFLOAT16 not in bayesify("reproduce", "toy").err, "nothing is left to run"


def test_jobs_whose_settings_name_bfloat16_are_announced_as_slow_without_its_instructions(
    with_toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = EXPERIMENTS["blundell-comparison"]
    assert comparison.names_bfloat16(comparison.jobs((0,), False))
    assert not toy().names_bfloat16(toy().jobs((0,), False))

    def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
        named = {"settings": {"precision": "bfloat16"}}
        return [replace(job, config={**job.config, **named}) for job in toy().jobs(seeds, quick)]

    monkeypatch.setattr("bayesify.reproduce.command.has_fast_bfloat16", lambda: False)
    monkeypatch.setitem(EXPERIMENTS, "toy", replace(toy(), jobs=jobs))
    note = f"{NO_BFLOAT16} expect some thirty times as long"
    assert bayesify("reproduce", "toy").err.splitlines()[1] == note


@pytest.mark.parametrize("fast", [True, False])
def test_half_precision_is_bfloat16_only_where_the_cpu_has_its_instructions(
    monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    module = "bayesify.reproduce.harness.half_precision.has_fast_bfloat16"
    monkeypatch.setattr(module, lambda: fast)
    told = nullcontext() if fast else pytest.warns(UserWarning, match="trained in float32: this")
    layer, x = nn.Linear(3, 2), torch.zeros(1, 3)
    with told, half_precision("cpu"):
        assert layer(x).dtype == (torch.bfloat16 if fast else torch.float32)
    assert layer(x).dtype == torch.float32
