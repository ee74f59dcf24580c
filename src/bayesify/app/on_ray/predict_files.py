"""Predict each file of a table by a task of Ray Data, and write a file of predictions for each."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

# Before Ray itself, as this tells how to install it.
from bayesify.app.on_ray.cluster import SharedFolder, connected, shared  # isort: split

import ray
from ray.exceptions import RayError, RayTaskError

from bayesify.app.runs import Run, RunError
from bayesify.app.runs.predict import Predictions, write_table
from bayesify.app.runs.train import use_threads
from bayesify.io import atomic_write
from bayesify.module.bayesian import BayesianModule
from bayesify.tabular.image_table import new_table_file
from bayesify.tabular.new_table import NewTable

__all__ = ["PredictedFile", "PredictionSettings", "pending_files", "predict_files"]

#: In the folder of predictions: what all its files were predicted with.
_SETTINGS = "settings.json"
#: Times that a file is tried, as Ray Data would try one that kills its workers for ever.
_ATTEMPTS = 6


@dataclass(frozen=True)
class PredictionSettings:
    """How files are predicted.

    Args:
        run: folder of the run.
        level: as for ``Predictions.of``.
        samples: as for ``Predictions.of``.
        pruned: file of the pruned network that predicts; None for the run's own.
        lenient: as for ``NewTable.open``.
    """

    run: Path
    level: float
    samples: int
    pruned: Path | None = None
    lenient: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return what determines the predictions of a file."""
        network = self.pruned or Run.open(self.run).checkpoint
        with network.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {
            "network": digest,
            "level": self.level,
            "samples": self.samples,
            "lenient": self.lenient,
        }


@dataclass(frozen=True)
class PredictedFile:
    """A file that was predicted.

    Args:
        source: the file.
        rows: number of its rows.
        outside: number of those that lie outside the training data.
        remarks: notes for the user on how it was read.
    """

    source: str
    rows: int
    outside: int
    remarks: Sequence[str]


def pending_files(
    files: Sequence[Path], out: Path, settings: PredictionSettings, *, overwrite: bool
) -> dict[Path, Path]:
    """Return the files that are still to be predicted.

    Args:
        files: the files of the table.
        out: folder of the predictions.
        settings: how the files are predicted.
        overwrite: whether to predict all of them again.

    Returns:
        The file to write for each; those that were not changed since they were predicted are left
        out.

    Raises:
        RunError: a file is missing, two would have one name, or the folder holds something else.
    """
    targets: dict[Path, Path] = {}
    names: set[str] = set()
    place = out.resolve()
    for file in files:
        name = _name_of_predictions(file)
        if not file.is_file():
            raise RunError(f"there is no file {file}")
        if name in names:
            raise RunError(f"each file must have a name of its own in {out}, but two give {name}")
        if place == file.resolve().parent:
            raise RunError(f"{out} holds the files to predict; choose another folder with --out")
        targets[file] = out / name
        names.add(name)
    if out.exists() and not out.is_dir():
        raise RunError(f"{out} is a file; choose a folder with --out, where each file has its own")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        if _stored_settings(out) != settings.to_json():
            raise RunError(
                f"{out} holds something else than predictions of this network with these options; "
                "choose a new folder with --out, or overwrite files with --force"
            )
        begun = (out / _SETTINGS).stat().st_mtime_ns
        targets = {file: to for file, to in targets.items() if not _is_predicted(file, to, begun)}
    return targets


def _name_of_predictions(file: Path) -> str:
    if file.suffix.lower() == ".parquet":
        return f"{file.stem}.parquet"
    text = file.with_suffix("") if file.suffix.lower() == ".gz" else file
    return f"{text.stem}.csv"


def _stored_settings(out: Path) -> Any:
    try:
        return json.loads((out / _SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # there is none, or it is damaged
        return None


def _is_predicted(file: Path, target: Path, begun: int) -> bool:
    """Return whether predictions have the time of change of their file, as they are given it.

    Those that were made before ``begun``, when the settings were written, are of other settings.
    """
    if not target.exists():
        return False
    made = target.stat()
    return made.st_mtime_ns == file.stat().st_mtime_ns and made.st_ctime_ns >= begun


def predict_files(
    address: str | None, settings: PredictionSettings, targets: Mapping[Path, Path]
) -> Iterator[str | PredictedFile]:
    """Predict files on a cluster, each as ``bayesify predict`` does it alone.

    A file whose worker or node dies is predicted again on another. One that cannot be predicted
    does not stop the others.

    Args:
        address: as for ``connected``.
        settings: how they are predicted.
        targets: the file to write for each, in one folder that all nodes share.

    Yields:
        The size of the cluster in words, then each file when its predictions are complete.

    Raises:
        ConnectionError: no cluster answers at the address, or it fails.
        RunError: files cannot be predicted or kill their workers, or a node does not share the
            folder or runs other code; at the end, when the other files are predicted.
    """
    errors: list[str] = []
    out = next(iter(targets.values())).parent
    with ExitStack() as stack:
        _remove_incomplete(targets.values())
        stack.callback(_remove_incomplete, targets.values())  # when no worker is left
        yield str(stack.enter_context(connected(address)))
        out.mkdir(parents=True, exist_ok=True)
        for target in targets.values():  # after an interruption all that is there is new
            target.unlink(missing_ok=True)
        if _stored_settings(out) != settings.to_json():
            atomic_write(out / _SETTINGS, json.dumps(settings.to_json(), indent=2) + "\n")
        same = stack.enter_context(shared(out))
        os.environ.setdefault("RAY_DATA_LOG_LEVEL", "ERROR")  # it reports each step otherwise
        ray.data.DataContext.get_current().enable_progress_bars = False
        items = [
            {"source": str(source.absolute()), "target": str(target.absolute())}
            for source, target in targets.items()
        ]
        predict = partial(_predict, folder=same, settings=settings)
        files = ray.data.from_items(items, override_num_blocks=len(items))
        predicted = files.map(predict, num_cpus=1)
        try:
            for row in predicted.iter_rows():
                found = json.loads(row["found"])
                if "error" in found:
                    errors.append(found["error"])
                else:
                    yield PredictedFile(**found)
        except RayTaskError:  # a fault of the program, with its traceback
            raise
        except RayError as error:
            raise ConnectionError(
                f"the cluster failed: {type(error).__name__}; Ray's logs tell why. The same "
                "command predicts what is left"
            ) from error
    if errors:
        more = f" (and {len(errors) - 1} more such files)" if len(errors) > 1 else ""
        raise RunError(f"{errors[0]}{more}; the other files are predicted")


def _remove_incomplete(targets: Iterable[Path]) -> None:
    """Remove what workers left that were stopped while they wrote."""
    for target in targets:
        for path in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
            path.unlink(missing_ok=True)


def _predict(
    item: dict[str, Any], *, folder: SharedFolder, settings: PredictionSettings
) -> dict[str, Any]:
    """Predict a file in a worker of the cluster, and return what is known of it as JSON."""
    try:
        folder.check()
        source, target = Path(item["source"]), Path(item["target"])
        _count_attempt(source, target)
        found = _predicted(source, target, settings)
    except (ValueError, OSError) as error:  # Ray Data would wrap it into an error of its own
        return {"found": json.dumps({"error": str(error)})}
    return {"found": json.dumps(asdict(found))}


def _count_attempt(source: Path, target: Path) -> None:
    """Count the attempts to predict a file, in a file next to its predictions.

    Raises:
        RunError: the workers of all earlier attempts died.
    """
    path = target.with_name(f".{target.name}.attempts.tmp")
    count = path.stat().st_size if path.exists() else 0
    if count >= _ATTEMPTS:
        raise RunError(
            f"{source}: the worker died in each of {count} attempts, perhaps for lack of memory; "
            "split the file, and see Ray's logs"
        )
    with path.open("ab") as file:
        file.write(b".")


def _predicted(source: Path, target: Path, settings: PredictionSettings) -> PredictedFile:
    run, bnn = _loaded(settings)
    predictions = Predictions.of(run, bnn, level=settings.level, samples=settings.samples)
    assert run.table is not None  # as the command checks
    changed = source.stat().st_mtime_ns  # before it is read
    table = NewTable.open(new_table_file(source, run.table), run.table, lenient=settings.lenient)
    write_table(target, table, predictions, overwrite=True)
    os.utime(target, ns=(changed, changed))
    return PredictedFile(source.name, table.rows, table.outside, table.remarks)


@cache
def _loaded(settings: PredictionSettings) -> tuple[Run, BayesianModule]:
    """Load the run and its network, once for each process."""
    run = Run.open(settings.run)
    use_threads(run)
    return run, run.load_module(settings.pruned)
