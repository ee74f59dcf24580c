"""``bayesify train``: one run, by one or several processes."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.text import Text

from bayesify.app.cli.epoch_table import EpochTable, HistoryWriter, NoTable
from bayesify.app.cli.formatting import duration, seconds_of, summarise, weights_of
from bayesify.app.cli.prepare_run import create_folder, prepare, write_rows
from bayesify.app.cli.setting_options import with_settings
from bayesify.app.launch import Launch, requested_device, requested_launch, was_restarted
from bayesify.app.report.tuning_text import tuning_note
from bayesify.app.runs import ConfigError, Run, RunConfig, RunData, finish
from bayesify.app.runs import train as train_run
from bayesify.app.runs.folder import num_train
from bayesify.app.runs.memory import peak_memory
from bayesify.app.runs.settings import declarations
from bayesify.app.runs.train import seconds_per_epoch, use_threads
from bayesify.module.bayesian import BayesianModule
from bayesify.tabular.table_data import TableData
from bayesify.training.backends import NonFiniteLossError

__all__ = ["train"]

_ALONE = "leave --devices and --nodes out, or start it without torchrun"


@with_settings
def train(
    dataset: Annotated[str, typer.Argument(help=declarations()["dataset"].setting.help)],
    out: Annotated[Path, typer.Option(help="Folder of the run, new or empty.")],
    data_dir: Annotated[
        str | None,
        typer.Option(help="Look for the data only in this folder.", show_default=False),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the last checkpoint in --out.")
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
    seconds = None if tune is None else seconds_of(tune)
    settings: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
        if value is not None
    }
    if "ordered" in settings:
        settings["ordered"] = tuple(
            label.strip() for text in settings["ordered"] for label in text.split(",")
        )
    if "hidden" in settings:
        settings["hidden"] = _widths(settings["hidden"])
    if tune_storage is not None and seconds is None:
        raise ConfigError("tune-storage would do nothing without --tune; leave it out")
    device = requested_device(device)
    launch = requested_launch(devices, nodes, device, shared_noise=shared_noise)
    if launch is not None and seconds is not None:
        raise ConfigError(
            "a search trains its trials in one process each; give several processes the same "
            f"--tune-storage instead, and {_ALONE}"
        )
    is_first = launch is None or launch.is_first
    resume = resume or (launch is not None and was_restarted())
    console = Console(stderr=True, quiet=not is_first)
    run, data, is_new = prepare(
        console,
        dataset,
        out,
        settings,
        data_dir,
        resume=resume,
        tuned=seconds is not None,
        is_shared=tune_storage is not None,
    )
    if launch is not None:
        _check_can_divide(run.config, data)
    use_threads(run)
    if seconds is not None and is_new:
        run = _tuned(console, run, data, settings, seconds, tune, tune_storage)
    # Before the folder is created, so that an error here leaves no folder.
    bnn = run.load_module() if run.checkpoint.exists() and not is_new else run.make_module()
    announcement = _announcement(run, bnn, data, launch, device) if is_first else ""
    if is_new and launch is None:
        run = create_folder(run, data, device, processes=1)
    console.print(Text(announcement), soft_wrap=True)
    stream = data.stream if isinstance(data, TableData) else None
    prunes = run.config.make_pruning() is not None
    table = EpochTable(console, run.config.task, prunes=prunes)
    try:
        if launch is not None and (place := launch.waits_for) is not None:
            typer.echo(f"connecting with the first machine at {place}", err=True)
        alone = nullcontext(torch.device(device))
        with alone if launch is None else launch.joined() as own_device:
            use_threads(run)  # Fabric has a number of its own
            # Not before: the others look for a free folder, too.
            if is_new and is_first and launch is not None:
                run = create_folder(run, data, device, launch.count)
            if stream is not None:
                write_rows(console, run, stream)
            callback = HistoryWriter(run, table) if is_first else NoTable()
            trained = train_run(run, data, callback, own_device, shared_noise=shared_noise)
    except (KeyboardInterrupt, NonFiniteLossError) as error:
        if not is_first:
            return  # the first process reports it
        if isinstance(error, KeyboardInterrupt):
            table.close()
            more = f" --device {device}" if device != "cpu" else ""
            more += "" if launch is None else launch.command
            # Text, because Rich would read [brackets] and :colons: in a path as markup.
            note = Text(f"stopped; resume with: {run.command}{more} --resume")
            console.print(note, soft_wrap=True)
        raise
    finally:
        table.close()
    if not is_first:
        return
    with console.status("measuring and drawing ..."):
        metrics, report = finish(run, data, trained)
    if stream is not None:
        stream.path.unlink(missing_ok=True)
        metrics["peak_memory_bytes"] = peak_memory()
        run.write_metrics(metrics)
    if as_json:
        typer.echo(json.dumps(metrics))
        return
    summarise(console, run, metrics, [note for note in trained.notes if note not in table.notes])
    if stream is not None:
        peak = f"largest memory of the process: {metrics['peak_memory_bytes'] / 1e9:.2f} GB"
        console.print(Text(peak), soft_wrap=True)
    typer.echo(f"report: {report}")


def _tuned(
    console: Console,
    run: Run,
    data: RunData,
    given: dict[str, Any],
    seconds: float,
    budget: str | None,
    storage: str | None,
) -> Run:
    """Return a run with the settings that a search found."""
    from bayesify.app.cli.tuning_progress import TuningBar
    from bayesify.app.runs.tune import tune

    assert isinstance(data, TableData)
    with TuningBar(console, seconds) as bar:
        try:
            config, found = tune(
                run, data, given=given, seconds=seconds, progress=bar, storage=storage
            )
        except KeyboardInterrupt:
            bar.close()
            more = "" if storage is None else " --tune-storage URL"  # it may hold a password
            command = f"{run.command} --tune {budget}{more} --resume"
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


def _check_can_divide(config: RunConfig, data: RunData) -> None:
    """Raise ConfigError for a run that several processes cannot train together."""
    if isinstance(data, TableData) and data.stream is not None:
        raise ConfigError(f"a streamed table is trained on in one process; {_ALONE}")
    if config.objective != "elbo":
        raise ConfigError(f"objective {config.objective} is trained in one process; {_ALONE}")


def _announcement(
    run: Run, bnn: BayesianModule, data: RunData, launch: Launch | None, device: str
) -> str:
    """Describe what will be trained and how long it will take, estimated from a few steps."""
    config = run.config
    what = {None: "Bayes by Backprop", "sgd": "plain network", "dropout": "dropout network"}
    things = "images" if run.table is None else "rows"
    passes = f"({config.passes} passes each) " if config.passes > 1 else ""
    processes = 1 if launch is None else launch.count
    shared_noise = launch is not None and launch.shared_noise
    seconds = seconds_per_epoch(
        *(bnn, config, data), processes, torch.device(device), shared_noise=shared_noise
    )
    where = "" if processes == 1 else f", and what {processes} processes wait for each other"
    return (
        f"{what[config.baseline]}, {data.name}, {config.net}: {weights_of(bnn)}, "
        f"{num_train(data):,} {things}; {config.epochs} epochs {passes}of about "
        f"{duration(seconds)}, {duration(seconds * config.epochs)} in all{where}"
    )
