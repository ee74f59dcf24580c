"""The lock of a run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bayesify.app.runs.folder_lock import claimed_folder, locked_folder


@pytest.mark.parametrize("mark", [".lock", "config.json"])
def test_what_a_killed_run_left_is_removed(mark: str, tmp_path: Path) -> None:
    (tmp_path / mark).touch()
    left, own = tmp_path / ".table.json.99999999-1.tmp", tmp_path / ".table.json.tmp"
    for path in (left, own):
        path.write_text("half")
    with locked_folder(tmp_path):
        assert own.exists()
        assert not left.exists()


def test_files_of_a_folder_without_a_run_stay(tmp_path: Path) -> None:
    path = tmp_path / ".table.json.99999999-1.tmp"
    path.write_text("mine")
    with locked_folder(tmp_path):
        assert path.exists()


@pytest.mark.parametrize("error", [FileExistsError, FileNotFoundError])
def test_a_folder_is_claimed_though_others_make_and_remove_some(
    error: type[OSError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent of an empty run is removed with it, perhaps by another process."""
    monkeypatch.chdir(tmp_path)
    made, failures = Path.mkdir, [error()]

    def mkdir(path: Path, *arguments: Any, **options: Any) -> None:
        if path.parent.name == "runs" and failures:
            raise failures.pop()
        made(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with claimed_folder("mnist") as folder:
        assert folder.is_dir()
    assert list(tmp_path.iterdir()) == []
