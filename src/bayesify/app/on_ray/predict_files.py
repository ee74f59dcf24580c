"""Predict each file of a table by a task of Ray Data, and write a file of predictions for each."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
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

__all__ = ["PredictedFile", "Request", "pending_files", "predict_files"]

#: In the folder of predictions: what all its files were predicted with.
_SETTINGS = "settings.json"


@dataclass(frozen=True)
class Request:
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
            **{"network": digest, "level": self.level, "samples": self.samples},
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
    files: Sequence[Path], out: Path, request: Request, *, overwrite: bool
) -> dict[Path, Path]:
    """Return the files that are still to be predicted.

    Args:
        files: the files of the table.
        out: folder of the predictions.
        request: how the files are predicted.
        overwrite: whether to predict all of them again.

    Returns:
        The file to write for each; those that were predicted after they had been changed last are
        left out.

    Raises:
        RunError: two files would have one name, or the folder holds something else.
    """
    targets: dict[Path, Path] = {}
    for file in files:
        target = out / _name_of_predictions(file)
        if target in targets.values():
            raise RunError(
                f"each file must have a name of its own in {out}, but two give {target.name}"
            )
        if out.resolve() == file.resolve().parent:
            raise RunError(f"{out} holds the files to predict; choose another folder with --out")
        targets[file] = target
    settings = out / _SETTINGS
    if out.exists() and not out.is_dir():
        raise RunError(f"{out} is a file; choose a folder with --out, where each file has its own")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        found = json.loads(settings.read_text("utf-8")) if settings.exists() else {}
        if found != request.to_json():
            raise RunError(
                f"{out} holds something else than predictions of this network with these options; "
                "choose a new folder with --out, or overwrite files with --force"
            )
        targets = {file: to for file, to in targets.items() if not _is_predicted(file, to)}
    return targets


def _name_of_predictions(file: Path) -> str:
    if file.suffix.lower() == ".parquet":
        return f"{file.stem}.parquet"
    text = file.with_suffix("") if file.suffix.lower() == ".gz" else file
    return f"{text.stem}.csv"


def _is_predicted(file: Path, target: Path) -> bool:
    return target.exists() and target.stat().st_mtime > file.stat().st_mtime


def predict_files(
    address: str | None, request: Request, targets: Mapping[Path, Path]
) -> Iterator[str | PredictedFile]:
    """Predict files on a cluster, each as ``bayesify predict`` does it alone.

    A file whose worker or node dies is predicted again on another.

    Args:
        address: as for ``connected``.
        request: how they are predicted.
        targets: the file to write for each, in one folder that all nodes share.

    Yields:
        The size of the cluster in words, then each file when its predictions are complete.

    Raises:
        ConnectionError: no cluster answers at the address, or workers died again and again.
        RunError: a file cannot be predicted, or a node does not share the folder or has other code.
    """
    out = next(iter(targets.values())).parent
    with ExitStack() as stack:
        yield str(stack.enter_context(connected(address)))
        out.mkdir(parents=True, exist_ok=True)
        for target in targets.values():  # else those of other settings would count as predicted
            target.unlink(missing_ok=True)
        atomic_write(out / _SETTINGS, json.dumps(request.to_json(), indent=2) + "\n")
        same = stack.enter_context(shared(out))
        os.environ.setdefault("RAY_DATA_LOG_LEVEL", "ERROR")  # it reports each step otherwise
        ray.data.DataContext.get_current().enable_progress_bars = False
        items = [
            {"source": str(source.absolute()), "target": str(target.absolute())}
            for source, target in targets.items()
        ]
        predict = partial(_predict, folder=same, request=request)
        files = ray.data.from_items(items, override_num_blocks=len(items))
        predicted = files.map(predict, num_cpus=1)
        try:
            for row in predicted.iter_rows():
                found = json.loads(row["found"])
                if "error" in found:
                    raise RunError(found["error"])
                yield PredictedFile(**found)
        except RayTaskError:  # a fault of the program, with its traceback
            raise
        except RayError as error:
            raise ConnectionError(
                f"the cluster's workers died: {type(error).__name__}; Ray's logs tell why. The "
                "same command predicts the other files"
            ) from error


def _predict(item: dict[str, Any], *, folder: SharedFolder, request: Request) -> dict[str, Any]:
    """Predict a file in a worker of the cluster, and return what is known of it as JSON."""
    try:
        folder.check()
        found = _predicted(Path(item["source"]), Path(item["target"]), request)
    except (ValueError, OSError) as error:  # Ray Data would wrap an error into one of its own
        return {"found": json.dumps({"error": str(error)})}
    return {"found": json.dumps(asdict(found))}


def _predicted(source: Path, target: Path, request: Request) -> PredictedFile:
    run, bnn = _loaded(request)
    predictions = Predictions.of(
        run, bnn, level=request.level, samples=request.samples, class_names=run.class_names
    )
    assert run.table is not None  # as the command checks
    table = NewTable.open(new_table_file(source, run.table), run.table, lenient=request.lenient)
    write_table(target, table, predictions, overwrite=True)
    return PredictedFile(source.name, table.rows, table.outside, table.remarks)


@cache
def _loaded(request: Request) -> tuple[Run, BayesianModule]:
    """Load the run and its network, once for each process."""
    run = Run.open(request.run)
    use_threads(run)
    return run, run.load_module() if request.pruned is None else run.load_pruned(request.pruned)
