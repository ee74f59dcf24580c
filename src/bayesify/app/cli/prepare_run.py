"""Find a run's settings, data and folder before it is trained."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from bayesify.app.cli.formatting import bytes_of, reading
from bayesify.app.cli.opened_run import read_data
from bayesify.app.cli.row_progress import RowProgress
from bayesify.app.runs import ConfigError, Run, RunConfig, RunData, RunError
from bayesify.app.runs.declarations import option
from bayesify.app.runs.defaults import is_image_folder, is_table_file, kind_of_data
from bayesify.app.runs.memory import used_memory
from bayesify.app.runs.run_files import check_is_free, is_tuning
from bayesify.datasets import (
    IMAGE_DATASETS,
    DataError,
    LabelledImages,
    find_labelled_images,
    fit_labelled_images,
)
from bayesify.tabular.stored_table import store_table
from bayesify.tabular.table_data import TableData

if TYPE_CHECKING:  # pandas takes its time to load
    from bayesify.tabular.files import TableFile
    from bayesify.tabular.schema import TableSchema
    from bayesify.tabular.streaming.encoded import EncodedRows

__all__ = ["create_folder", "prepare", "write_rows"]


def prepare(
    console: Console,
    dataset: str,
    out: Path,
    given: dict[str, Any],
    data_dir: str | None,
    *,
    resume: bool,
    tuned: bool,
    is_shared: bool,
    processes: int,
) -> tuple[Run, RunData, bool]:
    """Return the requested run, its data, and whether the run is new; write nothing.

    Raises:
        ConfigError, RunError, DataError, TableError: settings, folder or data cannot be used.
    """
    if not dataset.strip():  # as a path it would be the working directory
        raise DataError(f"no data set {dataset!r}; give a name, a file or a folder")
    is_folder = "target" not in given and is_image_folder(dataset)
    if is_folder and not is_table_file(dataset) and not Path(dataset).is_dir():
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
    if data_dir is not None:
        data_dir = str(Path(data_dir).absolute())
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
        return (*_read_table(console, out, config, given, processes, tuned=tuned), True)
    run = Run.open(out)
    is_own = run.table is not None or run.images is not None
    for name, value in {"dataset": dataset, **given}.items():
        stored = getattr(run.config, name)
        if name == "dataset" and is_own and not (dataset in IMAGE_DATASETS or value == stored):
            run = _moved(run, dataset)
        elif value != stored:
            raise RunError(
                f"--resume continues the run in {out}, whose {option(name)} is {stored}, but "
                f"{value} was asked for; leave it out, or choose a new folder"
            )
    run = replace(run, data_dir=data_dir or run.data_dir)
    return run, read_data(run), False


def _moved(run: Run, dataset: str) -> Run:
    """Return a run whose own data have moved to another path; reading them checks their digest."""
    if run.table is not None and "streamed" in run.table.split:  # which may not be read again
        from bayesify.tabular.files import open_table
        from bayesify.tabular.training_table import check_source

        check_source(open_table(Path(dataset)), run.table)
    return replace(run, config=replace(run.config, dataset=dataset))


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
    console: Console,
    out: Path,
    config: RunConfig,
    given: dict[str, Any],
    processes: int,
    *,
    tuned: bool,
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
        cap = fitting_memory(file, len(config.drop), config.limit, processes=processes)
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
    num_inputs = len(schema.features)
    lines = [
        f"{data.name}: {data.num_train:,} rows for training, {len(data.test_targets):,} held out "
        f"by seed {config.seed}",
        f"target {target.name}: {what} ({target.task})",
        f"columns: {counted.replace('categorys', 'categories')}; {num_inputs} "
        f"input{'s'[: num_inputs != 1]}",
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


def write_rows(console: Console, run: Run, stream: EncodedRows) -> None:
    """Write the encoded rows of a streamed table, from which the epochs read."""
    from bayesify.tabular.streaming.fit import write_stream

    assert run.table is not None
    with RowProgress(console) as progress:
        progress.begin("encoding the table", run.table.split["streamed"]["rows"])
        write_stream(Path(run.config.dataset), run.table, stream, on_rows=progress)


def create_folder(run: Run, data: RunData, device: str, processes: int) -> Run:
    """Create the folder of a new run."""
    store = None
    if run.table is not None and isinstance(data, TableData):
        store = partial(store_table, data=data, schema=run.table)
    return Run.create(
        run.folder,
        run.config,
        data_dir=run.data_dir,
        table=run.table,
        images=run.images,
        device=device,
        processes=processes,
        store_data=store,
    )
