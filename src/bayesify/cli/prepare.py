"""What ``bayesify train`` does before it trains: settings, data, and what the run will cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from bayesify.cli.data import download_bar
from bayesify.cli.words import duration
from bayesify.module import BayesianModule
from bayesify.runs import ConfigError, Run, RunConfig, RunError
from bayesify.runs.data import RunData
from bayesify.runs.estimate import seconds_per_epoch
from bayesify.runs.folder import check_is_free

__all__ = ["announce", "prepared"]


def prepared(
    console: Console,
    dataset: str,
    out: Path,
    given: dict[str, Any],
    data_dir: str | None,
    *,
    resume: bool,
) -> tuple[Run, RunData, bool]:
    """The run that was asked for, its data, and whether it begins anew; nothing is written.

    Raises:
        ConfigError, RunError, DataError, TableError: it cannot be.
    """
    if "target" in given:
        # Absolute, so that the run finds its table from anywhere.
        dataset = str(Path(dataset).absolute())
        if data_dir is not None:
            raise ConfigError("data-dir is for images; give the path of the table itself")
    exists = (out / "config.json").exists()
    if resume and not exists:
        console.print(Text(f"nothing to resume in {out}: starting anew"), soft_wrap=True)
    if not (resume and exists):
        config = RunConfig.of(dataset, **given)
        if config.target is None:
            run = Run(out, config, data_dir)
            return run, _images(run), True
        check_is_free(out)
        return (*_table(console, out, config, given), True)
    run = Run.open(out)
    for name, value in {"dataset": dataset, **given}.items():
        stored = getattr(run.config, name)
        if value != stored:
            raise RunError(
                f"--resume goes on with the run in {out}, whose {name.replace('_', '-')} is "
                f"{stored}, but {value} was asked for; leave it out, or choose a new folder"
            )
    run = Run(out, run.config, data_dir or run.data_dir, run.table)
    return run, _images(run) if run.table is None else run.load_data(), False


def _images(run: Run) -> RunData:
    with download_bar() as progress:
        return run.load_data(progress=progress)


def _table(
    console: Console, out: Path, config: RunConfig, given: dict[str, Any]
) -> tuple[Run, RunData]:
    from bayesify.tables.load import fit_table

    assert config.target is not None
    with console.status("reading the table ..."):
        data, schema = fit_table(
            Path(config.dataset),
            config.target,
            task=config.task,
            test_fraction=config.test_fraction,
            seed=config.seed,
            drop=config.drop,
            keep=config.keep,
            limit=config.limit,
        )
    known = {**given, "task": schema.target.task}
    whole = RunConfig.of(config.dataset, num_rows=len(data.train_targets), **known)
    target = schema.target
    what = f"{len(target.classes)} classes" if target.classes else "a number"
    kinds: dict[str, int] = {}
    for column in schema.columns:
        kinds[column.kind] = kinds.get(column.kind, 0) + 1
    counted = ", ".join(f"{count} {kind}{'s'[: count > 1]}" for kind, count in kinds.items())
    lines = [
        f"{data.name}: {len(data.train_targets):,} rows for training, {len(data.test_targets):,} "
        f"held out by seed {config.seed}",
        f"target {target.name}: {what} ({target.task})",
        f"columns: {counted.replace('categorys', 'categories')}; {len(schema.features)} inputs",
        *(f"not used: {name}, for {reason}" for name, reason in schema.dropped.items()),
        *(f"note: {remark}" for remark in schema.remarks),
    ]
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    return Run(out, whole, None, schema), data


def announce(console: Console, run: Run, bnn: BayesianModule, data: RunData) -> None:
    """Say what will be trained and how long it will take, measured by a few steps."""
    config = run.config
    what = {None: "Bayes by Backprop", "sgd": "plain network", "dropout": "dropout network"}
    things = "images" if run.table is None else "rows"
    passes = f"({config.passes} passes each) " if config.passes > 1 else ""
    seconds = seconds_per_epoch(bnn, config, data)
    console.print(
        f"{what[config.baseline]}, {data.name}, {config.net}: {bnn.layout.num_weights:,} "
        f"weights, {len(data.train_targets):,} {things}; {config.epochs} epochs {passes}of about "
        f"{duration(seconds)}, {duration(seconds * config.epochs)} in all",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
