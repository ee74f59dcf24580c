"""``bayesify train``: its options follow from the settings' declarations."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import torch
import typer
from rich.console import Console
from rich.text import Text

from bayesify.app.cli.epoch_table import EpochTable, HistoryWriter, NoTable
from bayesify.app.cli.formatting import (
    bytes_of,
    duration,
    reading,
    seconds_of,
    summarise,
    weights_of,
)
from bayesify.app.cli.results_commands import read_data
from bayesify.app.cli.row_progress import RowProgress
from bayesify.app.launch import (
    Launch,
    requested_device,
    requested_launch,
    was_restarted,
)
from bayesify.app.report.tuning_text import tuning_note
from bayesify.app.runs import ConfigError, Run, RunConfig, RunData, RunError, finish
from bayesify.app.runs import train as train_run
from bayesify.app.runs.declarations import Declaration, option
from bayesify.app.runs.defaults import is_image_folder, is_table_file, kind_of_data
from bayesify.app.runs.folder import check_is_free, is_tuning, num_train
from bayesify.app.runs.memory import peak_memory, used_memory
from bayesify.app.runs.settings import declarations
from bayesify.app.runs.train import seconds_per_epoch, use_threads
from bayesify.datasets import (
    IMAGE_DATASETS,
    DataError,
    LabelledImages,
    find_labelled_images,
    fit_labelled_images,
)
from bayesify.module.bayesian import BayesianModule
from bayesify.tabular.stored_table import store_table
from bayesify.tabular.table_data import TableData
from bayesify.training.backends import NonFiniteLossError

if TYPE_CHECKING:  # pandas takes its time to load
    from bayesify.tabular.files import TableFile
    from bayesify.tabular.schema import TableSchema
    from bayesify.tabular.streaming.encoded import EncodedRows

__all__ = ["train"]


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for each setting, in place of its ``**given``."""
    parameters = list(inspect.signature(command, eval_str=True).parameters.values())
    fixed = [each for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD]
    settings = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_option(name, declared)
        )
        for name, declared in declarations().items()
        if name not in inspect.signature(command).parameters
    ]
    # The order of the help: arguments, settings, then the options of this command alone.
    ordered = [*fixed[:2], *settings, *fixed[2:]]
    vars(command)["__signature__"] = inspect.Signature(
        [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in ordered]
    )
    return command


def _option(name: str, declared: Declaration) -> Any:
    """Return the annotation of a setting's option, from which Typer parses it."""
    *most, last = declared.choices or ("",)
    text = declared.setting.help.format(choices=f"{', '.join(most)} or {last}")
    default = _defaults(name)
    info = typer.Option(
        *([f"--{option(name)}"] if declared.kind is bool else []),  # a flag without its opposite
        help=text + (rf" \[default: {default}]" if default else ""),
        show_default=False,
        rich_help_panel=declared.setting.panel,
    )
    return Annotated[_parsed_as(declared.kind) | None, info]


def _parsed_as(kind: Any) -> Any:
    """Return the type by which Typer parses a setting; its choices are checked by the settings."""
    if get_origin(kind) is tuple:
        return list[str] if get_args(kind)[0] is str else str  # 400,400 is one value
    return next((each for each in (kind, *get_args(kind)) if each in (int, float, bool)), str)


#: Runs with defaults of their own.
_SPECIAL: dict[str, list[dict[str, Any]]] = {
    "one prior std": [{"prior": "gaussian"}, {"prior": "laplace"}],
    "lenet5": [{"net": "lenet5"}],
    "given --kl-warmup": [{"kl_warmup": 0.5}],
    "sgd baseline": [{"baseline": "sgd"}],
    "dropout baseline": [{"baseline": "dropout"}],
    "ivon": [{"optimizer": "ivon"}],
    "antithetic": [{"estimator": "antithetic"}],
    "tables": [{"target": "y", "task": task} for task in ("classification", "regression")],
    "folders": [{"dataset": "photos"}],
    "adapters": [
        {"target": "y", "task": "classification", "text": ("t",), "encoder": "e", "adapter": True}
    ],
}


def _defaults(name: str) -> str:
    """Return a setting's defaults for the help: the usual one, and others with their runs.

    Example:
        >>> _defaults("batch_size")
        '256; sgd baseline 128; dropout baseline 128; ivon 128; tables 512; folders 64; adapters 32'
    """
    usual = _shown(getattr(RunConfig.of("mnist"), name))
    texts = [usual]
    for kind, cases in _SPECIAL.items():
        few, many = (
            [
                _shown(getattr(run, name))
                for given in ({"dataset": "mnist", **case} for case in cases)
                if name not in given
                and name not in (run := RunConfig.of(num_rows=rows, **given)).idle()
            ]
            for rows in (1_000, 1_000_000)
        )
        if few != many:
            texts.append(f"{kind} by their size")
        elif set(few) - {usual}:
            texts.append(f"{kind} {' or '.join(dict.fromkeys(few))}")
    return "; ".join(text for text in texts if text)


def _shown(value: object) -> str:
    if value is None or value == ():
        return ""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


@_with_settings
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
    run, data, is_new = _prepare(
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
        run = _create(run, data, device, processes=1)
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
                run = _create(run, data, device, launch.count)
            if stream is not None:
                _write_stream(console, run, stream)
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


def _prepare(
    console: Console,
    dataset: str,
    out: Path,
    given: dict[str, Any],
    data_dir: str | None,
    *,
    resume: bool,
    tuned: bool,
    is_shared: bool,
) -> tuple[Run, RunData, bool]:
    """Return the requested run, its data, and whether the run is new; write nothing.

    Raises:
        ConfigError, RunError, DataError, TableError: settings, folder or data cannot be used.
    """
    is_folder = "target" not in given and is_image_folder(dataset)
    if is_folder and not is_table_file(dataset) and not (dataset and Path(dataset).is_dir()):
        known = ", ".join(IMAGE_DATASETS)
        raise DataError(f"no data set {dataset!r} and no folder of that name; known are {known}")
    if "target" in given or is_folder:
        # Absolute, so that the run finds its data from any folder.
        dataset = str(Path(dataset).absolute())
        encoder = given.get("encoder")
        if encoder is not None and Path(encoder).is_dir():
            given["encoder"] = str(Path(encoder).absolute())
        if data_dir is not None:
            raise ConfigError(
                "data-dir is for mnist and fashion-mnist; give the path of the data themselves"
            )
    if tuned and kind_of_data({"dataset": dataset, **given}) != "table":
        raise ConfigError("tune is for tables; leave it out, or name the --target of a table")
    if tuned and "max_memory" in given:
        raise ConfigError(
            "tune needs the table in memory; leave --max-memory out, or use --limit N to search on "
            "the first N rows"
        )
    if tuned and "adapter" in given:
        raise ConfigError("tune searches networks on features; leave --adapter out")
    if tuned and "baseline" in given:
        raise ConfigError("tune searches the settings of Bayesian networks; leave --baseline out")
    exists = (out / "config.json").exists()
    after_tuning = resume and tuned
    if resume and not exists and not (after_tuning and (is_shared or is_tuning(out))):
        console.print(Text(f"nothing to resume in {out}: starting a new run"), soft_wrap=True)
    if not (resume and exists):
        config = RunConfig.of(dataset, **given)
        check_is_free(out, after_tuning=after_tuning)
        if config.net in ("mlp", "lenet5"):
            run = Run(out, config, data_dir)
            return run, read_data(run), True
        if config.net == "resnet8":
            return (*_read_images(console, out, config), True)
        return (*_read_table(console, out, config, given, tuned=tuned), True)
    run = Run.open(out)
    for name, value in {"dataset": dataset, **given}.items():
        stored = getattr(run.config, name)
        if value != stored:
            raise RunError(
                f"--resume continues the run in {out}, whose {option(name)} is {stored}, but "
                f"{value} was asked for; leave it out, or choose a new folder"
            )
    run = replace(run, data_dir=data_dir or run.data_dir)
    return run, read_data(run), False


def _read_images(console: Console, out: Path, config: RunConfig) -> tuple[Run, RunData]:
    """Read a folder or a table of images, print what was found, and return its run and data."""
    kind = "folder" if config.target is None else "table"
    if not config.test_fraction:
        raise ConfigError(f"test-fraction must be above 0 for a {kind} of images, got 0")
    with reading(console, "images") as on_images:
        data, schema = fit_labelled_images(
            _find_images(config),
            size=config.size,
            test_fraction=config.test_fraction,
            seed=config.seed,
            limit=config.limit,
            on_images=on_images,
        )
    colours = "in colour" if schema.channels == 3 else "in grey"
    lines = [
        f"{data.name}: {len(data.train_targets):,} images for training, "
        f"{len(data.test_targets):,} held out by seed {config.seed}",
        f"{len(schema.classes)} classes; {schema.size} x {schema.size} pixels {colours}",
        *(f"note: {remark}" for remark in schema.remarks),
    ]
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    return Run(out, config, None, images=schema), data


def _find_images(config: RunConfig) -> LabelledImages:
    """Return the images that the settings name, with their classes."""
    source, image, target = Path(config.dataset), config.image, config.target
    if image is None or target is None:
        return find_labelled_images(source)
    from bayesify.tabular.image_table import find_table_images

    return find_table_images(source, image=image, target=target)


def _read_table(
    console: Console, out: Path, config: RunConfig, given: dict[str, Any], *, tuned: bool
) -> tuple[Run, RunData]:
    """Read a table, print what was found in it, and return its run and data."""
    from bayesify.tabular.detect import may_be_counts
    from bayesify.tabular.files import open_table
    from bayesify.tabular.image_table import CLASS, FILE, folder_table
    from bayesify.tabular.streaming.cost import fitting_memory
    from bayesify.tabular.training_table import fit_table

    path, image = Path(config.dataset), config.image
    name, task = config.target, config.task
    if name is None:  # a folder of images
        file, image, name, task = folder_table(path), FILE, CLASS, "classification"
    else:
        file = open_table(path)
    settings: dict[str, Any] = {
        "task": task,
        "likelihood": config.likelihood if config.likelihood != "gaussian" else "",
        "limits": config.limits(),
        "ordered": config.ordered,
        "test_fraction": config.test_fraction,
        "seed": config.seed,
        "drop": config.drop,
        "keep": config.keep,
        "limit": config.limit,
    }
    cap = None if config.max_memory is None else bytes_of(config.max_memory)
    if cap is None and not tuned and config.encoder is None:
        cap = fitting_memory(file, len(config.drop), config.limit)
        if cap is not None:
            given = {**given, "max_memory": f"{cap} B"}
            note = "note: the table is streamed, because it does not fit into the free memory"
            console.print(Text(note), soft_wrap=True)
    if cap is None:
        with reading(console, "texts" if image is None else "images") as on_rows:
            data, schema = fit_table(
                file,
                name,
                text=config.text,
                image=image,
                encoder=config.encoder,
                adapter=config.adapter,
                on_rows=on_rows,
                **settings,
            )
    else:
        data, schema = _scan_table(console, out, file, name, cap, settings)
    known = {**given, "task": schema.target.task}
    config = RunConfig.of(config.dataset, num_rows=data.num_train, **known)
    target = schema.target
    what = f"{len(target.classes)} classes" if target.classes else "a number"
    if target.is_ordered:
        what = f"{len(target.classes)} ordered classes, {' < '.join(target.classes)}"
    elif target.likelihood:
        what = f"{'a count' if target.has_counts else what}, likelihood {target.likelihood}"
    kinds: dict[str, int] = {}
    for column in schema.columns:
        kinds[column.kind] = kinds.get(column.kind, 0) + 1
    words = {"token": "text in tokens"}
    counted = ", ".join(
        f"{count} {words.get(kind, kind)}{'s'[: count > 1]}" for kind, count in kinds.items()
    )
    lines = [
        f"{data.name}: {data.num_train:,} rows for training, {len(data.test_targets):,} held out "
        f"by seed {config.seed}",
        f"target {target.name}: {what} ({target.task})",
        f"columns: {counted.replace('categorys', 'categories')}; {len(schema.features)} inputs",
        *(f"not used: {name}, for {reason}" for name, reason in schema.dropped.items()),
        *(f"note: {remark}" for remark in schema.remarks),
    ]
    if not {"likelihood", "ordered", "task"} & given.keys() and may_be_counts(target):
        lines.append(
            f"note: if {target.name} counts something, use --likelihood poisson, or "
            "negative-binomial for counts that vary more"
        )
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    return Run(out, config, None, schema), data


def _scan_table(
    console: Console,
    out: Path,
    file: TableFile,
    target: str,
    cap: int,
    settings: dict[str, Any],
) -> tuple[TableData, TableSchema]:
    """Say what streaming a table will cost, and make the first pass over it."""
    from bayesify.tabular.streaming.cost import StreamCost
    from bayesify.tabular.streaming.fit import fit_stream
    from bayesify.tabular.streaming.memory import TrainingMemory

    columns = len(file.columns) - len(settings["drop"])
    memory = TrainingMemory.of(cap, used_memory(), columns=columns, as_text=file.num_rows is None)
    cost = StreamCost.of(file, settings["drop"], settings["limit"])
    console.print(Text(cost.words(memory, out)), soft_wrap=True)
    with RowProgress(console) as progress:
        progress.begin("reading the table", cost.rows)
        return fit_stream(file, target, memory=memory, folder=out, on_rows=progress, **settings)


def _write_stream(console: Console, run: Run, stream: EncodedRows) -> None:
    """Write the encoded rows of a streamed table, from which the epochs read."""
    from bayesify.tabular.streaming.fit import write_stream

    assert run.table is not None
    with RowProgress(console) as progress:
        progress.begin("encoding the table", run.table.split["streamed"]["rows"])
        write_stream(Path(run.config.dataset), run.table, stream, on_rows=progress)


def _create(run: Run, data: RunData, device: str, processes: int) -> Run:
    """Create the folder of a new run."""
    made = Run.create(
        *(run.folder, run.config),
        data_dir=run.data_dir,
        table=run.table,
        images=run.images,
        device=device,
        processes=processes,
    )
    if made.table is not None and isinstance(data, TableData):
        store_table(made.folder, data, made.table)
    return made


_ALONE = "leave --devices and --nodes out, or start it without torchrun"


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
