"""A run's folder: what is in it, and how to read it."""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bayesify import saving, storage
from bayesify.datasets import load_images
from bayesify.likelihoods import CategoricalLikelihood, GaussianLikelihood
from bayesify.module import BayesianModule
from bayesify.networks import lenet5, mlp
from bayesify.posteriors import Delta, MeanFieldGaussian
from bayesify.runs.config import FORMAT, ConfigError, RunConfig
from bayesify.runs.data import RunData
from bayesify.runs.environment import commit, hardware, versions
from bayesify.tabular import TableNet, prior_by_inputs
from bayesify.tabular.network import NOISE
from bayesify.training.checkpoint import CHECKPOINT_NAME
from bayesify.training.history import History

if TYPE_CHECKING:  # pandas takes its time to load
    from bayesify.tables.schema import TableSchema

__all__ = ["Run", "RunError", "as_test_row", "check_is_free"]

_CONFIG, _METRICS, _HISTORY = "config.json", "metrics.json", "history.csv"


class RunError(ValueError):
    """A folder does not hold the run that was asked for, or holds another."""


@dataclass(frozen=True)
class Run:
    """A run's folder with its settings.

    It holds ``config.json``, ``history.csv``, ``checkpoint.safetensors``, ``metrics.json``,
    ``pruning.json``, ``report.html`` and the figures; of a table also ``table.json``.

    Args:
        folder: where.
        config: the settings.
        data_dir: where its data were found, if that was given.
        table: how its table becomes inputs and targets, if it has one.
    """

    folder: Path
    config: RunConfig
    data_dir: str | None = None
    table: TableSchema | None = None

    @classmethod
    def create(
        cls,
        folder: Path,
        config: RunConfig,
        *,
        data_dir: str | None,
        table: TableSchema | None = None,
    ) -> Run:
        """Begin a run in a new or empty folder.

        Raises:
            RunError: the folder holds something already.
        """
        check_is_free(folder)
        run = cls(folder, config, data_dir, table)
        folder.mkdir(parents=True, exist_ok=True)
        # Before the settings: a folder with those holds all that belongs to them.
        if table is not None:
            table.save(folder)
        run.write_json(
            _CONFIG,
            {
                "format": FORMAT,
                "settings": config.to_json(),
                "data_dir": data_dir,
                "command": run.command,
                "versions": versions(table=table is not None),
                "commit": commit(),
                "hardware": hardware(),
            },
        )
        return run

    @classmethod
    def open(cls, folder: Path) -> Run:
        """Read the settings of an existing run.

        Raises:
            RunError: there is no run in this folder, or its settings cannot be read.
        """
        document = _read_json(folder / _CONFIG, f"{folder} holds no run")
        try:
            config = RunConfig.from_json(document["settings"], document.get("format", 1))
        except (ConfigError, KeyError, TypeError) as error:
            raise RunError(f"{folder / _CONFIG} cannot be read: {error}") from error
        table = None
        if config.target is not None:
            from bayesify.tables.schema import TableSchema

            table = TableSchema.load(folder)
        return cls(folder, config, document.get("data_dir"), table)

    @property
    def command(self) -> str:
        """The command that makes this run."""
        config = self.config
        default = RunConfig.of(
            config.dataset, baseline=config.baseline, target=config.target
        ).to_json()
        words = ["bayesify", "train", config.dataset, "--out", str(self.folder)]
        for name, value in config.to_json().items():
            always = name in ("baseline", "target") and value is not None
            if name == "dataset" or not (always or value != default[name]):
                continue
            texts = value if name in ("drop", "keep") else [value]
            for each in texts:
                text = ",".join(map(str, each)) if isinstance(each, list) else str(each)
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
        """All of ``config.json``."""
        return _read_json(self.folder / _CONFIG, f"{self.folder} holds no run")

    def load_data(self, data_dir: str | None = None, **options: Any) -> RunData:
        """The data that the run was made with, from ``data_dir`` or where they were then."""
        if self.table is not None:
            from bayesify.tables.load import load_table

            if data_dir is not None:
                raise RunError("data-dir is for images; the path of a table is in its run")
            return load_table(Path(self.config.dataset), self.table)
        return load_images(
            self.config.dataset, data_dir or self.data_dir, limit=self.config.limit, **options
        )

    def make_module(self) -> BayesianModule:
        """The Bayesian network at its start."""
        config = self.config
        common: dict[str, Any] = {"likelihood": CategoricalLikelihood(), "seed": config.seed}
        if config.task == "regression":
            # The level of the noise is a parameter with no uncertainty of its own.
            common |= {"likelihood": GaussianLikelihood(input_dependent=True), "exclude": (NOISE,)}
        if config.baseline is not None:
            return BayesianModule(self._net(), posterior=Delta, **common)
        net, prior = self._net(), config.make_prior()
        if config.task == "regression":
            prior = prior_by_inputs(net, config.make_prior)
        return BayesianModule(
            net,
            prior=prior,
            posterior=MeanFieldGaussian,
            init_std=config.init_std,
            perturbation=config.make_perturbation(),
            **common,
        )

    def load_module(self) -> BayesianModule:
        """The network of the last checkpoint.

        Raises:
            StorageError: the file is missing, damaged or of another architecture.
            RunError: there is no checkpoint yet, or it is of another kind than the settings.
        """
        if not self.checkpoint.exists():
            raise RunError(
                f"{self.folder} has no checkpoint yet: its training stopped within the first "
                "epoch; go on with bayesify train ... --resume"
            )
        bnn = saving.load(self.checkpoint, self._net())
        if isinstance(bnn.posterior, Delta) != (self.config.baseline is not None):
            raise RunError(
                f"{self.checkpoint} holds a {type(bnn.posterior).__name__} posterior, "
                f"which is not what {self.folder / _CONFIG} describes"
            )
        return bnn

    def history(self) -> History:
        """The rows of ``history.csv``, epochs from 1.

        Raises:
            RunError: the file is missing or not of this form.
        """
        path = self.folder / _HISTORY
        try:
            with path.open(newline="") as file:
                return [
                    {name: float(text) if text else None for name, text in row.items()}
                    for row in csv.DictReader(file)
                ]
        except (OSError, ValueError, TypeError) as error:
            raise RunError(f"{path} cannot be read: {error}") from error

    def is_unfinished(self) -> bool:
        """Whether training is known to have stopped before its last epoch."""
        if not (self.folder / _HISTORY).exists():
            return False
        return len(self.history()) < self.config.epochs

    def write_history(self, history: History) -> None:
        """Write ``history.csv`` anew."""
        text = io.StringIO()
        rows = [as_test_row(row) for row in history]
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        storage.atomic_write(self.folder / _HISTORY, text.getvalue())

    def metrics(self) -> dict[str, Any]:
        """All of ``metrics.json``.

        Raises:
            RunError: training is not finished, or the file cannot be read.
        """
        path = self.folder / _METRICS
        document = _read_json(path, f"{self.folder} holds no finished run")
        if not all(isinstance(document.get(part), dict) for part in ("test", "train")):
            raise RunError(f"{path} cannot be read: it must hold an object test and one train")
        return document

    def write_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Write ``metrics.json`` anew."""
        self.write_json(_METRICS, metrics)

    def write_json(self, name: str, document: Mapping[str, Any] | Sequence[Any]) -> None:
        """Write a file of the folder, whole or not at all."""
        storage.atomic_write(self.folder / name, json.dumps(document, indent=2) + "\n")

    def _net(self) -> Any:
        config = self.config
        if self.table is not None:
            return TableNet(
                len(self.table.features),
                config.hidden,
                len(self.table.target.classes) or 1,
                noise=config.noise if config.task == "regression" else None,  # type: ignore[arg-type]
                seed=config.seed,
            )
        options: dict[str, Any] = {
            "dropout": (config.dropout_input, config.dropout_hidden),
            "init_std": config.mean_init_std,
            "seed": config.seed,
        }
        if config.net == "lenet5":
            return lenet5(**options)
        return mlp(784, config.hidden, 10, **options)


def check_is_free(folder: Path) -> None:
    """See that a new run can be made in a folder.

    Raises:
        RunError: it holds something already.
    """
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        held = "another run" if (folder / _CONFIG).exists() else "other files"
        mend = ", or go on with it by --resume" if held == "another run" else ""
        raise RunError(f"{folder} holds {held}; choose a new folder with --out{mend}")


def as_test_row(row: Mapping[str, float | None]) -> dict[str, float | None]:
    """A row of the history in a run's terms: images, and the test set for validation."""
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
