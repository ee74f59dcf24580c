"""Stored results name a commit, and scripts refuse to store others."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
#: Scripts and their parts that store no rows with a commit.
STORE_NOTHING = {
    "bench_table",
    "call_chain",
    "kernels",
    "mutation_faults",
    "mutation_operators",
    "mutation_server",
    "mutation_suite",
    "pages",
    "prediction_memory",
    "records",
    "same_results",
    "show_reproductions",
    "site_pages",
    "two_machines_table",
    "uncertainty",
}
#: Rows of commits that are not in the history, by folder: to be measured again.
LOST = {"export": 1, "serve": 1}


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda p: p.stem)
def test_a_script_that_stores_results_checks_the_tree(path: Path) -> None:
    calls = "    require_clean_tree()\n", "= require_clean_tree()\n"
    checks = any(call in path.read_text(encoding="utf-8") for call in calls)
    assert checks == (path.stem not in STORE_NOTHING)


def test_an_unclean_tree_is_refused_unless_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import records

    monkeypatch.setattr(records, "commit", lambda: f"{COMMIT}-dirty")
    monkeypatch.setattr(sys, "argv", ["script"])
    with pytest.raises(SystemExit, match="differs from 0123456789ab; commit or undo"):
        records.require_clean_tree()
    monkeypatch.setattr(sys, "argv", ["script", "--uncommitted", "name"])
    assert records.require_clean_tree()
    assert sys.argv == ["script", "name"]
    monkeypatch.setattr(sys, "argv", ["script", "--show"])
    assert not records.require_clean_tree()


def test_the_split_is_the_seed_of_its_own_results_only() -> None:
    """What else is stored by data set has its seeds in the settings or in the rows."""
    found = {
        path.parent.name
        for path in (ROOT / "results").glob("*/*.json")
        if '"seed": "the split"' in path.read_text(encoding="utf-8")
    }
    assert found == {"conformal", "table-recipe"}


def test_a_new_document_has_the_seed_that_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import records

    monkeypatch.setattr(records, "RESULTS", tmp_path)
    assert records.stored("made", "rows", {})["seed"] is None
    assert records.resumed("made", "rows", {}, seed="the split")["seed"] == "the split"


def stored_commits() -> list[tuple[str, str]]:
    """The folder and the commit of each stored file that names one."""
    documents = [
        (path.parent.name, json.loads(path.read_text(encoding="utf-8")))
        for path in (ROOT / "results").glob("*/*.json")
    ]
    return [
        (folder, document["commit"])
        for folder, document in documents
        if isinstance(document, dict) and document.get("commit")
    ]


def test_stored_rows_are_of_committed_code() -> None:
    found = {folder for folder, commit in stored_commits() if commit.endswith("-dirty")}
    assert not found


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
    ).stdout


def test_stored_rows_are_of_commits_of_the_history() -> None:
    try:
        whole = git("rev-parse", "--is-shallow-repository").strip() == "false"
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no clone")
    if not whole:
        pytest.skip("a clone without its history")
    history = set(git("rev-list", "HEAD").split())
    found = Counter(
        folder
        for folder, commit in stored_commits()
        if commit.removesuffix("-dirty") not in history
    )
    assert dict(found) == LOST
