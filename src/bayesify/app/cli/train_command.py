"""``bayesify train``: one run, by one or several processes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.text import Text

from bayesify.app.cli.epoch_table import EpochTable, HistoryWriter
from bayesify.app.cli.formatting import duration, seconds_of, summarise, weights_of
from bayesify.app.cli.prepare_run import create_folder, prepare, write_rows
from bayesify.app.cli.setting_options import with_settings
from bayesify.app.launch import (
    Launch,
    OtherProcessError,
    requested_device,
    requested_launch,
    was_restarted,
)
from bayesify.app.report.tuning_text import tuning_note
from bayesify.app.runs import ConfigError, Run, RunData, RunError
from bayesify.app.runs import train as train_run
from bayesify.app.runs.comparison import kind_of_run
from bayesify.app.runs.finish import finish
from bayesify.app.runs.folder_lock import claimed_folder, locked_folder
from bayesify.app.runs.memory import peak_memory
from bayesify.app.runs.run_data import num_train
from bayesify.app.runs.settings import declarations
from bayesify.app.runs.train import (
    PRIOR_NAME,
    check_prior_part,
    check_pruning,
    seconds_per_epoch,
    use_threads,
)
from bayesify.module.bayesian import BayesianModule
from bayesify.tabular.table_data import TableData
from bayesify.training.backends import NonFiniteLossError
from bayesify.training.progress import NoProgress

if TYPE_CHECKING:  # pandas takes its time to load
    from bayesify.tabular.streaming.encoded import EncodedRows

__all__ = ["train"]

_ALONE = "leave --devices and --nodes out, or start it without torchrun"


@with_settings
def train(
    dataset: Annotated[str, typer.Argument(help=declarations()["dataset"].setting.help)],
    out: Annotated[
        Path | None,
        typer.Option(
            help=r"Folder of the run, new or empty. \[default: a new one below runs]",
            show_default=False,
        ),
    ] = None,
    data_dir: Annotated[
        str | None,
        typer.Option(
            help="Look only in this folder for data known by a name, such as mnist.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Resume from the last checkpoint in --out. Your own data may have another path.",
        ),
    ] = False,
    tune: Annotated[
        str | None,
        typer.Option(
            help="Of a table: first search for better settings for this time, such as 90s, 30m or "
            "2h, by held-out parts of the training rows. Settings that are given are kept.",
            show_default=False,
            rich_help_panel="Tables",
        ),
    ] = None,
    tune_storage: Annotated[
        str | None,
        typer.Option(
            help="With --tune: URL of a database for the search, such as sqlite:////shared/s.db or "
            "postgresql://host/name. Processes with the same table and settings, each with its own "
            r"--out, share the search there. \[default: a file in --out]",
            metavar="URL",
            show_default=False,
            rich_help_panel="Tables",
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            help="Where the network is trained: cpu, cuda, or auto for a GPU where there is one. "
            "Everything else runs on the CPU.",
            rich_help_panel="Devices",
        ),
    ] = "cpu",
    devices: Annotated[
        int | None,
        typer.Option(
            help="Processes on each machine that train together, each with its part of every "
            r"minibatch; with --device cuda on a GPU each. \[default: 1, or those of torchrun]",
            show_default=False,
            rich_help_panel="Devices",
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            help="Machines, with the same command on each and MASTER_ADDR, MASTER_PORT and "
            r"NODE_RANK in the environment. \[default: 1, or those of torchrun]",
            show_default=False,
            rich_help_panel="Devices",
        ),
    ] = None,
    shared_noise: Annotated[
        bool,
        typer.Option(
            "--shared-noise",
            help="With several processes: draw the same weights in each, which halves what they "
            "exchange and makes the gradients vary more.",
            rich_help_panel="Devices",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    **given: Any,
) -> None:
    """Train a Bayesian network, or a baseline, and report on it.

    The data are images or a table, CSV or Parquet. For a table the types of its columns are
    detected, and the values of the target decide between regression and classification. A folder
    has one subfolder of images for each class; a table with --image has a column of paths of
    images. Of your own data some rows or images are held out for testing. With --encoder a
    pretrained network reads columns of texts, or images; with --adapter it is trained for texts.

    A table may be a file, a folder of files or a pattern in quotes. One that does not fit into
    memory, or with --max-memory, is streamed: read twice, then trained on in random order from an
    encoded copy in --out, which is removed at the end.

    The folder --out receives the settings, the history, a checkpoint after every epoch, the
    metrics, the figures and report.html. Ctrl-C stops after the current step. The same command
    with --resume then continues, with the same results as an uninterrupted run.

    --tune 30m first searches the layers, the learning rate, the epochs, the prior, the noise and
    the relevance of a table's network, by the nll of held-out training rows; the rows for testing
    are not used. The defaults are the first trial, so that the chosen settings are never worse on
    those rows.

    --devices 2 trains in two processes, and so does torchrun -m bayesify train. The batch size is
    that of all processes together, so that it need not change with their number.
    """
    settings: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
        if value is not None
    }
    if "ordered" in settings:
        from bayesify.tabular.label_list import split_labels

        settings["ordered"] = tuple(
            label for text in settings["ordered"] for label in split_labels(text)
        )
    if "hidden" in settings:
        settings["hidden"] = _widths(settings["hidden"])
    if tune_storage is not None and tune is None:
        raise ConfigError("tune-storage would do nothing without --tune; leave it out")
    search = None if tune is None else _Search(tune, seconds_of(tune), tune_storage)
    launch = requested_launch(devices, nodes, requested_device(device), shared_noise=shared_noise)
    if launch.count > 1 and search is not None:
        raise ConfigError(
            "a search trains its trials in one process each; give several processes the same "
            f"--tune-storage instead, and {_ALONE}"
        )
    if launch.nodes == 1 and not launch.by_torchrun:  # this process would start the others
        _check_processes(launch, settings.get("objective", "elbo"))
    is_shared = launch.by_torchrun or launch.count > 1 or tune_storage is not None
    if out is None and (resume or is_shared):
        raise ConfigError(
            "a run that is resumed, or shared by several processes, needs its folder; name it "
            "with --out"
        )
    console = Console(stderr=True, quiet=not launch.is_first)
    if launch.waits_for is not None:
        typer.echo(f"connecting with the first machine at {launch.waits_for}", err=True)
    with ExitStack() as held:  # the lock of the folder, until all is written
        if out is None:
            out = held.enter_context(claimed_folder(dataset))
        try:
            with launch.joined() as joined:
                # One reads and decides for all; the others open the run that it made.
                with joined.all_succeed():
                    if launch.is_first:
                        run, data = _begin(
                            console,
                            dataset,
                            out,
                            settings,
                            data_dir,
                            search,
                            launch,
                            held,
                            resume=resume or was_restarted(),
                        )
                with joined.all_succeed():
                    if not launch.is_first:
                        run = _opened(out, data_dir)
                        data = run.load_data()
                use_threads(run)  # Fabric has a number of its own
                table = EpochTable(
                    console, run.config.task, prunes=run.config.make_pruning() is not None
                )
                callback = HistoryWriter(run, table) if launch.is_first else NoProgress()
                with _resumable(console, run, launch), closing(table):
                    trained = train_run(
                        run, data, callback, joined.device, shared_noise=shared_noise
                    )
        except (KeyboardInterrupt, NonFiniteLossError, OtherProcessError):
            if launch.is_first or launch.waits_for is not None:
                raise
            return  # the first process of this machine, or of torchrun's, reports it
        if not launch.is_first:
            return
        stream = _stream_of(data)
        with _resumable(console, run, launch), console.status("measuring and drawing ..."):
            metrics, report = finish(run, data, trained)
        if stream is not None:
            stream.path.unlink(missing_ok=True)
            metrics["peak_memory_bytes"] = peak_memory()
            run.write_metrics(metrics)
        if as_json:
            typer.echo(json.dumps(metrics))
            return
        summarise(
            console, run, metrics, [note for note in trained.notes if note not in table.notes]
        )
        if stream is not None:
            peak = f"largest memory of the process: {metrics['peak_memory_bytes'] / 1e9:.2f} GB"
            console.print(Text(peak), soft_wrap=True)
        typer.echo(f"report: {report}")


def _check_processes(launch: Launch, objective: str) -> None:
    if launch.count > 1 and objective != "elbo":
        raise ConfigError(f"objective {objective} is trained in one process; {_ALONE}")


class _Search(NamedTuple):
    """A search for settings before the training: its time as given, in seconds, and where it is."""

    budget: str
    seconds: float
    storage: str | None


def _begin(
    console: Console,
    dataset: str,
    out: Path,
    given: dict[str, Any],
    data_dir: str | None,
    search: _Search | None,
    launch: Launch,
    held: ExitStack,
    *,
    resume: bool,
) -> tuple[Run, RunData]:
    """Return a run that is ready to be trained and its data; say what training will cost.

    From here on ``held`` holds the lock of the run's folder.
    """
    is_there = resume and out.is_dir()
    if is_there:
        held.enter_context(locked_folder(out))
    run, data, is_new = prepare(
        console,
        dataset,
        out,
        given,
        data_dir,
        resume=resume,
        tuned=search is not None,
        is_shared=search is not None and search.storage is not None,
        processes=launch.devices,
    )
    _check_processes(launch, run.config.objective)
    use_threads(run)
    if not is_new:
        run.store_dataset()
    if search is not None and is_new:
        if not is_there:
            held.enter_context(locked_folder(out))
            is_there = True
        run = _tuned(console, run, data, given, search)
    # Before the folder is created, so that an error here leaves no folder.
    check_pruning(run.config, data)
    check_prior_part(run.config, data)
    bnn = run.load_module() if run.checkpoint.exists() and not is_new else run.make_module()
    announcement = _announcement(run, bnn, data, launch)
    stream = _stream_of(data)
    if is_new:
        if not is_there:
            held.enter_context(locked_folder(out))
        before = set(out.iterdir())
        run = create_folder(run, data, launch.device, launch.count)
        written = [*(set(out.iterdir()) - before), out / PRIOR_NAME]
        written += [] if stream is None else [stream.path]
        held.enter_context(_removed_if_diverged(run, written))
    console.print(Text(announcement), soft_wrap=True)
    if stream is not None:
        with _resumable(console, run, launch):
            write_rows(console, run, stream)
    return run, data


@contextmanager
def _removed_if_diverged(run: Run, written: Sequence[Path]) -> Iterator[None]:
    """Remove what was written if training diverges before the first checkpoint.

    So that it can begin anew with other settings in the same folder.
    """
    try:
        yield
    except NonFiniteLossError:
        if not run.checkpoint.exists():
            for path in written:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        raise


def _opened(out: Path, data_dir: str | None) -> Run:
    """Open the run that the first process made."""
    try:
        run = Run.open(out)
    except RunError as error:
        raise RunError(f"{error}; all machines must see --out under the same path") from error
    return replace(run, data_dir=data_dir or run.data_dir)


def _stream_of(data: RunData) -> EncodedRows | None:
    """Return the rows that are read from a file at every epoch."""
    return data.stream if isinstance(data, TableData) else None


@contextmanager
def _resumable(console: Console, run: Run, launch: Launch) -> Iterator[None]:
    """Say how to resume after Ctrl-C, or where to begin anew after training diverged."""
    try:
        yield
    except NonFiniteLossError:
        if run.checkpoint.exists():
            note = Text(f"begin anew in another folder, --out, or delete {run.folder} first")
            console.print(note, soft_wrap=True)
        raise
    except KeyboardInterrupt:
        # Text, because Rich would read [brackets] and :colons: in a path as markup.
        note = Text(f"stopped; resume with: {run.command}{launch.command} --resume")
        console.print(note, soft_wrap=True)
        raise


def _tuned(
    console: Console, run: Run, data: RunData, given: dict[str, Any], search: _Search
) -> Run:
    """Return a run with the settings that a search found."""
    from bayesify.app.cli.tuning_progress import TuningBar
    from bayesify.app.runs.tune import tune

    assert isinstance(data, TableData)
    seconds, storage = search.seconds, search.storage
    with TuningBar(console, seconds) as bar:
        try:
            config, found = tune(
                run, data, given=given, seconds=seconds, progress=bar, storage=storage
            )
        except KeyboardInterrupt:
            bar.close()
            more = "" if storage is None else " --tune-storage URL"  # it may hold a password
            # Not what the number of rows decides, since what is given is not searched.
            settings = run.config.to_json()
            own = {name: settings[name] for name in given if settings[name] not in (None, [])}
            shown = run.command_with({k: v for k, v in own.items() if v is not False})
            command = f"{shown} --tune {search.budget}{more} --resume"
            console.print(Text(f"stopped; resume with: {command}"), soft_wrap=True)
            raise
    console.print(Text(tuning_note(found)), soft_wrap=True)
    return replace(run, config=config)


def _widths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"hidden must be positive numbers of units such as 400,400, got {text!r}"
        ) from error


def _announcement(run: Run, bnn: BayesianModule, data: RunData, launch: Launch) -> str:
    """Describe what will be trained and how long it will take, estimated from a few steps."""
    config = run.config
    things = "images" if run.table is None else "rows"
    passes = f"({config.passes} passes each) " if config.passes > 1 else ""
    seconds = seconds_per_epoch(
        bnn,
        config,
        data,
        launch.count,
        torch.device(launch.device),
        shared_noise=launch.shared_noise,
    )
    where = f", and what {launch.count} processes wait for each other" if launch.count > 1 else ""
    return (
        f"{kind_of_run(run)}, {data.name}, {config.net}: {weights_of(bnn)}, "
        f"{num_train(data):,} {things}; {config.epochs} epochs {passes}of about "
        f"{duration(seconds)}, {duration(seconds * config.epochs)} in all{where}"
    )
