"""The lock of a run's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from bayesify.app.runs.folder_lock import locked_folder


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
