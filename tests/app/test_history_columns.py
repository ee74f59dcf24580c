"""The history of a run in its file."""

from __future__ import annotations

import csv
from pathlib import Path

from bayesify.app.runs import RunConfig
from bayesify.app.runs.folder import Run


def test_rows_of_an_older_version_have_empty_columns(tmp_path: Path) -> None:
    """A run that an older version began, and this one resumed."""
    run = Run(tmp_path, RunConfig.of("mnist"))
    run.write_history([{"epoch": 1, "nll": 0.5}, {"epoch": 2, "nll": 0.4, "free_energy": 2.0}])
    with (tmp_path / "history.csv").open(newline="") as file:
        old, new = csv.DictReader(file)
    assert old == {"epoch": "1", "nll": "0.5", "free_energy": ""}
    assert new == {"epoch": "2", "nll": "0.4", "free_energy": "2.0"}
    assert [row.get("free_energy") for row in run.history()] == [None, 2.0]
