"""The study of a search: a file in the run's folder, or a database that several searches share."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError
from sqlalchemy import URL, make_url
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from bayesify.app.runs.declarations import ConfigError
from bayesify.app.runs.folder import Run
from bayesify.app.runs.levers import levers
from bayesify.app.runs.run_files import TUNING_STUDY, RunError
from bayesify.io.files import one_line
from bayesify.tabular.columns import EncodedColumn

__all__ = ["open_study"]

#: Attempts to open a database in which another process is creating the tables.
_ATTEMPTS = 50


@contextmanager
def open_study(
    run: Run,
    given: Collection[str],
    storage: str | None,
    pruner: optuna.pruners.BasePruner,
) -> Iterator[optuna.Study]:
    """Create the study of a search, or open it, for a ``with`` block.

    Args:
        run: the run, whose folder has the study unless there is a storage.
        given: settings that are not searched.
        storage: URL of a database, in which searches of the same table, images, encoder and
            settings share a study.
        pruner: ends trials early.

    Raises:
        ConfigError: the storage cannot be opened.
        RunError: the folder holds the study of another table or encoder, or of other settings, or
            a study that cannot be opened; or the database fails within the block.
    """
    assert run.table is not None
    encoded = [column for column in run.table.columns if isinstance(column, EncodedColumn)]
    encoder = sorted({digest for c in encoded for digest in (c.sha256, c.reader_sha256)})
    about = {
        "table": json.loads(json.dumps(run.table.to_json()["source"])),
        "settings": run.config.to_json(),
        "encoder": encoder,
    }
    name = "tune"
    if storage is not None:
        # One study for the same table, wherever its file lies, and the same settings.
        settings = {**about["settings"], "dataset": None}
        source = run.table.source
        same = [source["sha256"], settings, sorted(given)]
        if encoder:
            same += [source.get("images", ""), encoder]
        digest = hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()
        name = f"bayesify-{digest[:16]}"
    with _opened(run, storage) as database:
        study = optuna.create_study(
            study_name=name,
            storage=database,
            direction="minimize",
            pruner=pruner,
            load_if_exists=True,
        )
        if "given" not in study.user_attrs:
            for attribute, value in about.items():
                study.set_user_attr(attribute, value)
            study.set_user_attr("given", sorted(given))
        elif storage is None and (differing := _differing(study, about, run, given)):
            raise RunError(
                f"{run.folder} holds a search with other {' and another '.join(differing)}; resume "
                "it with the same command, or choose a new folder with --out"
            )
        yield study


def _differing(
    study: optuna.Study, about: dict[str, Any], run: Run, given: Collection[str]
) -> list[str]:
    """Return what a run has otherwise than the run that began its search."""
    # Earlier versions stored no digests of the encoder.
    stored = study.user_attrs
    differing = [name for name in about if stored.get(name, about[name]) != about[name]]
    kept = stored["given"]
    # A setting that is searched may not be given later, though it be the default.
    is_kept = levers(run.config, {*kept, *given}) == levers(run.config, kept)
    return differing if is_kept or "settings" in differing else [*differing, "settings"]


@contextmanager
def _opened(run: Run, storage: str | None) -> Iterator[optuna.storages.RDBStorage]:
    """Open the database of a study."""
    try:
        if storage is None:
            run.folder.mkdir(parents=True, exist_ok=True)
            url = URL.create("sqlite", database=str(run.folder.absolute() / TUNING_STUDY))
        else:
            url = make_url(storage)
        # Processes that share a file wait for each other.
        patience = {"connect_args": {"timeout": 60}} if url.drivername == "sqlite" else {}
        database = _with_tables(url.render_as_string(hide_password=False), patience)
    # Optuna has a RuntimeError for a database of another version.
    except (ImportError, RuntimeError, SQLAlchemyError, StorageInternalError) as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        if storage is None:
            file = run.folder / TUNING_STUDY
            raise RunError(f"{file}, the search, must be a file that opens: {reason}") from error
        raise ConfigError(
            "tune-storage must be the URL of a database that can be opened, such as "
            f"sqlite:////shared/search.db: {reason}"
        ) from error
    try:
        yield database
    except (SQLAlchemyError, StorageInternalError) as error:
        reason = one_line(error.__cause__ or error)
        raise RunError(
            f"the database of the search failed: {reason}; the trials that it holds are kept: "
            "check that it can be reached and written, and run the same command again"
        ) from error
    finally:
        database.remove_session()
        database.engine.dispose()


def _with_tables(url: str, patience: dict[str, Any]) -> optuna.storages.RDBStorage:
    """Open a database, and create its tables unless another process does so at the same time."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return optuna.storages.RDBStorage(url, engine_kwargs=patience)
        except SQLAlchemyError as error:
            # Its tables are there, or their version is, since this one found none.
            if "already exists" not in str(error) and not isinstance(error, IntegrityError):
                raise
        time.sleep(0.2)
    return optuna.storages.RDBStorage(url, engine_kwargs=patience)
