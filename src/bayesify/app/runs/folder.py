"""The folder of a run: create it, read it and write its files."""

from __future__ import annotations

import csv
import glob
import io
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from bayesify import io as bayesify_io
from bayesify.app.runs.declarations import ConfigError
from bayesify.app.runs.environment import commit, hardware, versions
from bayesify.app.runs.network import bayesian_network, check_prunable, plain_network
from bayesify.app.runs.run_config import RunConfig
from bayesify.app.runs.run_data import RunData
from bayesify.app.runs.run_files import (
    CONFIG_NAME,
    MADE_FIRST,
    TUNING_SUMMARY,
    RunError,
    check_is_free,
)
from bayesify.app.runs.stored_settings import FORMAT
from bayesify.datasets import (
    IMAGE_DATASETS,
    DataError,
    ImageSchema,
    LabelledImages,
    find_labelled_images,
    load_images,
    load_labelled_images,
)
from bayesify.distributions.posteriors import Delta
from bayesify.module.bayesian import BayesianModule
from bayesify.training.checkpoint import CHECKPOINT_NAME
from bayesify.training.history import History
from bayesify.training.learned_prior import without_dropout

if TYPE_CHECKING:  # pandas takes its time to load
    from bayesify.tabular.files import TableFile
    from bayesify.tabular.schema import TableSchema

__all__ = ["Run", "as_test_row"]

_METRICS, _HISTORY = "metrics.json", "history.csv"


@dataclass(frozen=True)
class Run:
    """The folder of a run, with its settings.

    It holds ``config.json``, ``history.csv``, ``checkpoint.safetensors``, ``metrics.json``,
    ``pruning.json``, ``report.html`` and the figures; ``prior`` with the learned prior of a run by
    a PAC-Bayes bound; for a table also ``table.json``, ``table.safetensors`` if it has texts or
    images, and ``tuning.db`` and ``tuning.json`` if its settings were searched; for images of one's
    own ``images.json``.

    Args:
        folder: path of the folder.
        config: the settings.
        data_dir: folder with its data, if one was given.
        table: conversion of its table to inputs and targets, if it has one.
        images: conversion of its folder or table of images to inputs, if it has one.
    """

    folder: Path
    config: RunConfig
    data_dir: str | None = None
    table: TableSchema | None = None
    images: ImageSchema | None = None

    @classmethod
    def create(
        cls,
        folder: Path,
        config: RunConfig,
        *,
        data_dir: str | None,
        table: TableSchema | None = None,
        images: ImageSchema | None = None,
        device: str = "cpu",
        processes: int = 1,
        store_data: Callable[[Path], None] | None = None,
    ) -> Run:
        """Create a run in a new or empty folder, or in one with a finished search of its settings.

        Args:
            folder: path of the folder.
            config: the settings.
            data_dir: folder with its data, if one was given.
            table: conversion of its table, if it has one.
            images: conversion of its images, if it has some of its own.
            device: where it is trained.
            processes: the number of processes that train it together.
            store_data: writes what the run needs of its data into the folder.

        Raises:
            RunError: the folder holds something already.
        """
        check_is_free(folder, after_tuning=(folder / TUNING_SUMMARY).exists())
        run = cls(folder, config, data_dir, table, images)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            # Written before config.json, so that a folder with config.json is complete.
            for schema in (table, images):
                if schema is not None:
                    schema.save(folder)
            if store_data is not None:
                store_data(folder)
            run.write_json(
                CONFIG_NAME,
                {
                    "format": FORMAT,
                    "settings": config.to_json(),
                    "data_dir": data_dir,
                    "command": run.command,
                    "versions": versions(
                        table=table is not None, encoder=config.encoder is not None
                    ),
                    "device": device,
                    "processes": processes,
                    "commit": commit(),
                    "hardware": hardware(),
                },
            )
        except BaseException:  # Ctrl-C too
            for name in MADE_FIRST:
                (folder / name).unlink(missing_ok=True)
            raise
        return run

    @classmethod
    def open(cls, folder: Path) -> Run:
        """Read the settings of an existing run.

        Raises:
            RunError: there is no run in this folder, or its settings cannot be read.
        """
        document = _read_json(folder / CONFIG_NAME, f"{folder} holds no run")
        try:
            config = RunConfig.from_json(document["settings"], document.get("format", 1))
        except (ConfigError, KeyError, TypeError) as error:
            raise RunError(f"{folder / CONFIG_NAME} cannot be read: {error}") from error
        table = None
        if config.net == "table":
            from bayesify.tabular.schema import TableSchema

            table = TableSchema.load(folder)
        images = ImageSchema.load(folder) if config.net == "resnet8" else None
        data_dir = document.get("data_dir")
        if not isinstance(data_dir, str | None):
            raise RunError(
                f"{folder / CONFIG_NAME} cannot be read: data_dir must be a text or null, got "
                f"{data_dir!r}"
            )
        return cls(folder, config, data_dir, table, images)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes; none for regression."""
        if self.table is not None:
            return self.table.target.classes
        if self.images is not None:
            return self.images.classes
        return IMAGE_DATASETS[self.config.dataset].class_names

    @property
    def num_inputs(self) -> int:
        """Number of inputs of the network for one example."""
        if self.table is not None:
            return len(self.table.features)
        return prod((28, 28) if self.images is None else self.images.image_shape)

    @property
    def command(self) -> str:
        """The command that repeats this run."""
        return self.command_with(self.config.unusual())

    def command_with(self, settings: Mapping[str, Any]) -> str:
        """Return the command with these settings, as JSON, of this run's data and folder."""
        from bayesify.tabular.label_list import joined_labels

        words = ["bayesify", "train", self.config.dataset, "--out", str(self.folder)]
        for name, value in settings.items():
            if value is True:
                words.append(f"--{name.replace('_', '-')}")
                continue
            texts = value if name in ("drop", "keep", "text") else [value]
            for each in texts:
                text = joined_labels(each) if isinstance(each, list) else str(each)
                words += [f"--{name.replace('_', '-')}", text]
        if self.data_dir is not None:
            words += ["--data-dir", self.data_dir]
        return shlex.join(words)

    @property
    def checkpoint(self) -> Path:
        """The file with the state of training."""
        return self.folder / CHECKPOINT_NAME

    @property
    def document(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        return _read_json(self.folder / CONFIG_NAME, f"{self.folder} holds no run")

    def load_data(self, data_dir: str | None = None, **options: Any) -> RunData:
        """Load the data of the run, from ``data_dir`` or from where they were when it was made."""
        if self.table is not None:
            from bayesify.tabular.training_table import load_table

            if data_dir is not None:
                raise RunError(
                    "data-dir is for mnist and fashion-mnist; the path of a table is in its run"
                )
            path = Path(self.config.dataset)
            if "streamed" in self.table.split:
                from bayesify.tabular.streaming.fit import load_stream

                return load_stream(path, self.table, self.folder)
            self._check_data_are_there()
            source: Path | TableFile = path
            if self.config.target is None:
                from bayesify.tabular.image_table import folder_table

                source = folder_table(path)
            return load_table(source, self.table, folder=self.folder, **options)
        if self.images is not None:
            if data_dir is not None:
                raise RunError(
                    "data-dir is for mnist and fashion-mnist; the path of images is in their run"
                )
            self._check_data_are_there()
            return load_labelled_images(self._find_images(), self.images, **options)
        try:
            return load_images(
                self.config.dataset, data_dir or self.data_dir, limit=self.config.limit, **options
            )
        except DataError as error:
            if self.data_dir is None or data_dir is not None:
                raise
            words = ["bayesify", "train", self.config.dataset, "--out", str(self.folder)]
            command = shlex.join([*words, "--resume", "--data-dir"])
            raise DataError(
                f"the data of the run in {self.folder} are no longer in {self.data_dir}; put them "
                f"back there, or tell their new folder: {command} FOLDER ({error})"
            ) from error

    def _check_data_are_there(self) -> None:
        path = self.config.dataset
        # A pattern names no file itself.
        if not (Path(path).exists() or glob.glob(path, recursive=True)):  # noqa: PTH207
            command = shlex.join(["bayesify", "train", "NEWPATH", "--out", str(self.folder)])
            raise RunError(
                f"there is no file or folder {path}, the data of the run in {self.folder}; put "
                f"them back there, or tell their new path: {command} --resume"
            )

    def store_dataset(self) -> None:
        """Store where the data are, if they were moved."""
        document = self.document
        stored = document["settings"]["dataset"], document.get("data_dir")
        if stored != (self.config.dataset, self.data_dir):
            document["settings"]["dataset"] = self.config.dataset
            document["data_dir"] = self.data_dir
            self.write_json(CONFIG_NAME, {**document, "command": self.command})

    def _find_images(self) -> LabelledImages:
        assert self.images is not None
        source = Path(self.config.dataset)
        if self.images.columns is None:
            return find_labelled_images(source)
        from bayesify.tabular.image_table import find_table_images

        image, target = self.images.columns
        return find_table_images(source, image=image, target=target)

    def make_net(self) -> nn.Module:
        """Build the plain network, with initial values."""
        return plain_network(
            self.config,
            self.table,
            self.images,
            num_inputs=self.num_inputs,
            num_classes=len(self.class_names),
        )

    def make_module(self, learned: nn.Module | None = None) -> BayesianModule:
        """Build the Bayesian network with its initial values.

        Args:
            learned: the network at the centre of a PAC-Bayes run's prior; None for one with
                initial values, such as before its checkpoint is read.

        Raises:
            ConfigError: it cannot be pruned as it is trained, as the settings say.
        """
        net = self.make_net() if learned is None else learned
        if self.config.objective != "elbo":  # whose dropout is that of the prior's network
            net = without_dropout(net)
        bnn = bayesian_network(net, self.config, self.table)
        check_prunable(bnn, self.config)
        return bnn

    def load_module(self, pruned: Path | None = None) -> BayesianModule:
        """Load the network of the last checkpoint, or a pruned one.

        Args:
            pruned: a file of ``bayesify prune --out``; the folder then needs no checkpoint.

        Raises:
            StorageError: the file is missing, damaged or of another architecture.
            RunError: there is no checkpoint yet, or it is of another kind than the settings; or
                the pruned network is not of this run, or not pruned.
        """
        if pruned is not None:
            return self._load_pruned(pruned)
        if not self.checkpoint.exists() and (self.folder / _METRICS).exists():
            raise RunError(
                f"{self.folder} is finished, but its {self.checkpoint.name} is not there; put it "
                "back, predict with --pruned FILE of prune --out, or train again"
            )
        if not self.checkpoint.exists():
            raise RunError(
                f"{self.folder} has no checkpoint yet: its training stopped before the end of the "
                "first epoch; resume it with bayesify train ... --resume"
            )
        bnn = bayesify_io.load(self.checkpoint, self.make_net())
        if isinstance(bnn.posterior, Delta) != (self.config.baseline is not None):
            raise RunError(
                f"{self.checkpoint} holds a {type(bnn.posterior).__name__} posterior, "
                f"which is not what {self.folder / CONFIG_NAME} describes"
            )
        return bnn

    def _load_pruned(self, path: Path) -> BayesianModule:
        bnn = bayesify_io.load(path, self.make_net())
        mask = bnn.posterior.mask
        if mask is None:
            raise RunError(f"{path} must hold a pruned network, got one with all its weights")
        if self.checkpoint.exists():
            own = self.load_module().posterior.mean
            same = bool((bnn.posterior.mean == own * mask).all())
        else:
            same = bnn.seed == self.config.seed
        if not same:
            raise RunError(
                f"{path} must hold weights of the run {self.folder}, got others; write it with "
                "bayesify prune DIR --out FILE"
            )
        return bnn

    def history(self) -> History:
        """Read the rows of ``history.csv``; epochs count from 1.

        Raises:
            RunError: the file is missing or not of this form.
        """
        path = self.folder / _HISTORY
        try:
            with path.open(newline="") as file:
                reader = csv.DictReader(file)
                if "epoch" not in (reader.fieldnames or ()):
                    raise ValueError("it must have a column epoch")
                return [
                    {name: float(text) if text else None for name, text in row.items()}
                    for row in reader
                ]
        except (OSError, ValueError, TypeError) as error:
            raise RunError(f"{path} cannot be read: {error}") from error

    def is_unfinished(self) -> bool:
        """Return whether training is known to have stopped before its last epoch."""
        if not (self.folder / _HISTORY).exists():
            return False
        return len(self.history()) < self.config.epochs

    def write_history(self, history: History) -> None:
        """Replace ``history.csv``."""
        text = io.StringIO()
        rows = [as_test_row(row) for row in history]
        # The rows of a run that an older version began have fewer columns.
        columns = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(text, fieldnames=columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        bayesify_io.atomic_write(self.folder / _HISTORY, text.getvalue())

    def metrics(self) -> dict[str, Any]:
        """Read ``metrics.json``.

        Raises:
            RunError: training is not finished, or the file cannot be read.
        """
        path = self.folder / _METRICS
        document = _read_json(path, f"{self.folder} holds no finished run")
        test, train = document.get("test", ""), document.get("train", "")
        # There is no test part if no rows are held out.
        if not (train and isinstance(train, dict) and isinstance(test, dict | None) and test != {}):
            raise RunError(
                f"{path} cannot be read: it must hold the measures of test and train, each an "
                "object"
            )
        return document

    def tuning(self) -> dict[str, Any] | None:
        """Read ``tuning.json``; None if the settings were not searched.

        Raises:
            RunError: the file cannot be read.
        """
        path = self.folder / TUNING_SUMMARY
        return _read_json(path, f"{self.folder} holds no search") if path.exists() else None

    def write_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Replace ``metrics.json``."""
        self.write_json(_METRICS, metrics)

    def write_json(self, name: str, document: Mapping[str, Any] | Sequence[Any]) -> None:
        """Write a JSON file of the folder atomically."""
        bayesify_io.atomic_write(self.folder / name, json.dumps(document, indent=2) + "\n")


def as_test_row(row: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return a row of the history with the names of a run: images, and test for validation."""
    names = {
        "validation_error": "test_error",
        "validation_nll": "test_nll",
        "data_per_second": "images_per_second",
    }
    return {names.get(name, name): value for name, value in row.items()}


def _read_json(path: Path, missing: str) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RunError(f"{missing}: there is no {path}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise RunError(f"{path} cannot be read: it must hold a JSON object")
    return document
