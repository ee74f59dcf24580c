"""Write finished trials of a search as Optuna studies, for Optuna's tools and its dashboard."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bayesify.app.runs.tune import quiet_optuna
from bayesify.io import atomic_write

try:
    import optuna
    from optuna.distributions import BaseDistribution, FloatDistribution
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
except ImportError as error:
    raise ImportError(
        "a journal of Optuna studies needs optuna; run pip install 'bayesify[tune]'"
    ) from error

__all__ = ["FinishedTrial", "write_studies"]


class FinishedTrial(NamedTuple):
    """The parameters of a trial, and the value that the search maximises."""

    parameters: Mapping[str, float]
    value: float


def write_studies(path: Path, studies: Mapping[str, Sequence[FinishedTrial]]) -> None:
    """Write studies with their complete trials to a journal, in place of what was there.

    Args:
        path: the journal's file, for ``optuna.storages.journal.JournalFileBackend``.
        studies: the trials of each study, by its name; at least one trial in each.

    Example:
        >>> folder = Path(tempfile.mkdtemp())
        >>> write_studies(folder / "journal.log", {"a": [FinishedTrial({"x": 1.0}, 0.5)]})
        >>> storage = JournalStorage(JournalFileBackend(str(folder / "journal.log")))
        >>> optuna.load_study(study_name="a", storage=storage).best_params
        {'x': 1.0}
    """
    with quiet_optuna(), tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / path.name
        storage = JournalStorage(JournalFileBackend(str(journal)))
        for name, trials in studies.items():
            study = optuna.create_study(study_name=name, direction="maximize", storage=storage)
            ranges: dict[str, BaseDistribution] = {
                each: FloatDistribution(min(values), max(values))
                for each in trials[0].parameters
                if (values := [trial.parameters[each] for trial in trials])
            }
            for trial in trials:
                study.add_trial(
                    optuna.trial.create_trial(
                        params=dict(trial.parameters), distributions=ranges, value=trial.value
                    )
                )
        atomic_write(path, journal.read_bytes())
