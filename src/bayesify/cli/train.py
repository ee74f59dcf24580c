"""``bayesify train``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from bayesify.cli.prepare import announce, prepared
from bayesify.cli.table import EpochTable, Recorder
from bayesify.cli.words import duration, summarise
from bayesify.runs import ConfigError, Run, RunConfig, finish
from bayesify.runs import train as train_run
from bayesify.runs.estimate import use_threads

__all__ = ["duration", "train"]

_DEFAULT = RunConfig.of("mnist")
_PLAIN = RunConfig.of("mnist", baseline="sgd")
_DROPOUT = RunConfig.of("mnist", baseline="dropout")
_TABLE_DEFAULT = RunConfig.of("a.csv", target="y")


def _option(text: str, default: object = None, panel: str | None = None) -> Any:
    shown = "" if default is None else rf" \[default: {default}]"
    return typer.Option(help=text + shown, show_default=False, rich_help_panel=panel)


_TABLE, _POSTERIOR, _TRAINING, _BASELINE = "Tables", "Prior and posterior", "Training", "Baselines"


def train(
    dataset: Annotated[
        str, typer.Argument(help="mnist, fashion-mnist, or FILE.csv with --target NAME.")
    ],
    out: Annotated[Path, typer.Option(help="The run's folder, new or empty.")],
    target: Annotated[
        str | None, _option("The column of a table that is to be predicted.", None, _TABLE)
    ] = None,
    task: Annotated[
        str | None,
        _option("classification or regression.", "by what the target holds", _TABLE),
    ] = None,
    noise: Annotated[
        str | None,
        _option("Of regression: learned (one std) or input-dependent.", _DEFAULT.noise, _TABLE),
    ] = None,
    test_fraction: Annotated[
        float | None,
        _option("Part of the rows that is held out.", _DEFAULT.test_fraction, _TABLE),
    ] = None,
    drop: Annotated[
        list[str] | None, _option("A column not to use; may be given again.", None, _TABLE)
    ] = None,
    keep: Annotated[
        list[str] | None,
        _option("A column to use though it looks like an id; may be given again.", None, _TABLE),
    ] = None,
    baseline: Annotated[
        str | None, _option("Train a plain network instead: sgd or dropout.", None, _BASELINE)
    ] = None,
    net: Annotated[str | None, _option("Of images: mlp or lenet5.", _DEFAULT.net)] = None,
    hidden: Annotated[
        str | None, _option("Units of the hidden layers.", "400,400; tables 50")
    ] = None,
    prior: Annotated[
        str | None,
        _option("gaussian, scale-mixture or laplace.", _DEFAULT.prior, _POSTERIOR),
    ] = None,
    prior_std: Annotated[
        float | None,
        _option(
            "Its standard deviation (gaussian, laplace); where a table's target is a number, "
            "a weight's is this over the root of its layer's inputs.",
            f"{_DEFAULT.prior_std}; tables {_TABLE_DEFAULT.prior_std}",
            _POSTERIOR,
        ),
    ] = None,
    pi: Annotated[
        float | None, _option("Mixture: weight of the first part.", _DEFAULT.pi, _POSTERIOR)
    ] = None,
    std1: Annotated[
        float | None, _option("Mixture: std of the first part.", _DEFAULT.std1, _POSTERIOR)
    ] = None,
    std2: Annotated[
        float | None, _option("Mixture: std of the second part.", "exp(-8)", _POSTERIOR)
    ] = None,
    init_std: Annotated[
        float | None,
        _option(
            "The posterior's std at the start.",
            f"{_DEFAULT.init_std}; tables {_TABLE_DEFAULT.init_std}",
            _POSTERIOR,
        ),
    ] = None,
    mean_init_std: Annotated[
        float | None,
        _option("Draw initial means from N(0, X^2) instead of PyTorch's.", None, _POSTERIOR),
    ] = None,
    estimator: Annotated[
        str | None,
        _option(
            "How noise enters: sampling (one weight sample a minibatch), antithetic (sampling in "
            "pairs), local (reparametrisation), local-per-position or flipout.",
            f"{_DEFAULT.estimator}; tables {_TABLE_DEFAULT.estimator}",
            _TRAINING,
        ),
    ] = None,
    kl: Annotated[
        str | None, _option("auto, closed or monte-carlo.", _DEFAULT.kl, _TRAINING)
    ] = None,
    kl_weighting: Annotated[
        str | None,
        _option("uniform, or geometric (the paper's eq. 9).", _DEFAULT.kl_weighting, _TRAINING),
    ] = None,
    kl_warmup: Annotated[
        float | None,
        _option(
            "Part of the epochs over which the KL's weight rises from 0 to 1.",
            f"{_DEFAULT.kl_warmup}; tables {_TABLE_DEFAULT.kl_warmup}",
            _TRAINING,
        ),
    ] = None,
    kl_warmup_power: Annotated[
        float | None,
        _option("It rises as this power of a straight line.", _DEFAULT.kl_warmup_power, _TRAINING),
    ] = None,
    temperature: Annotated[
        float | None,
        _option("Factor on the KL; 1 is the ELBO.", _DEFAULT.temperature, _TRAINING),
    ] = None,
    optimizer: Annotated[
        str | None,
        _option("sgd or adam.", f"{_DEFAULT.optimizer}; baselines {_PLAIN.optimizer}", _TRAINING),
    ] = None,
    lr: Annotated[
        float | None,
        _option(
            "Learning rate on the mean loss of a minibatch; a rate eta on the summed loss, as in "
            "the paper, is eta x batch size here.",
            f"{_DEFAULT.lr}; sgd baseline {_PLAIN.lr}, dropout {_DROPOUT.lr}; tables "
            f"{_TABLE_DEFAULT.lr}",
            _TRAINING,
        ),
    ] = None,
    momentum: Annotated[
        float | None, _option("Of sgd.", f"0; baselines {_PLAIN.momentum}", _TRAINING)
    ] = None,
    rho_lr_scale: Annotated[
        float | None,
        _option(
            "Rate of rho as a multiple of --lr.",
            f"{_DEFAULT.rho_lr_scale}; tables {_TABLE_DEFAULT.rho_lr_scale}",
            _TRAINING,
        ),
    ] = None,
    schedule: Annotated[
        str | None, _option("cosine (to zero) or constant.", _DEFAULT.schedule, _TRAINING)
    ] = None,
    epochs: Annotated[
        int | None,
        _option(
            "Passes over the training data, or --passes times as many.",
            f"{_DEFAULT.epochs}; tables by their size",
            _TRAINING,
        ),
    ] = None,
    passes: Annotated[
        int | None, _option("Passes an epoch.", "1; tables by their size", _TRAINING)
    ] = None,
    batch_size: Annotated[
        int | None,
        _option(
            "Images or rows a minibatch.",
            f"{_DEFAULT.batch_size}; baselines {_PLAIN.batch_size}; tables "
            f"{_TABLE_DEFAULT.batch_size}",
            _TRAINING,
        ),
    ] = None,
    train_samples: Annotated[
        int | None, _option("Weight samples a step.", "1; antithetic 2", _TRAINING)
    ] = None,
    test_samples: Annotated[
        int | None, _option("Weight samples of the test predictions.", _DEFAULT.test_samples)
    ] = None,
    dropout_input: Annotated[
        float | None,
        _option(
            "Probability of dropping a pixel.",
            f"0; dropout baseline {_DROPOUT.dropout_input}",
            _TRAINING,
        ),
    ] = None,
    dropout_hidden: Annotated[
        float | None,
        _option(
            "Probability of dropping a unit.",
            f"0; dropout baseline {_DROPOUT.dropout_hidden}",
            _TRAINING,
        ),
    ] = None,
    limit: Annotated[int | None, _option("Use only the first N training images, or rows.")] = None,
    precision: Annotated[
        str | None,
        _option("float32, or bfloat16 (autocast) in training.", _DEFAULT.precision, _TRAINING),
    ] = None,
    step: Annotated[
        str | None,
        _option(
            "fused (one compiled kernel), plain or auto.",
            f"{_DEFAULT.step}; tables {_TABLE_DEFAULT.step}",
            _TRAINING,
        ),
    ] = None,
    seed: Annotated[int | None, _option("Of all randomness.", _DEFAULT.seed)] = None,
    threads: Annotated[
        int | None, _option("Processor threads; more pay on an idle machine.", _DEFAULT.threads)
    ] = None,
    data_dir: Annotated[str | None, _option("Look for the data only in this folder.", None)] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in --out.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train a Bayesian network, or a baseline, and report on it.

    The data are images, or a table in a CSV file: what its columns hold is found, a part of its
    rows is held out, and the target's column says whether to predict a number or a class.

    The folder --out receives the settings, the history, a checkpoint after every epoch, the
    metrics, the figures and report.html. Ctrl-C stops after the current step; the same command
    with --resume goes on and gives what an uninterrupted run would have given.
    """
    given = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in locals().items()
        if value is not None and name not in ("dataset", "out", "data_dir", "resume", "as_json")
    }
    if hidden is not None:
        given["hidden"] = _widths(hidden)
    console = Console(stderr=True)
    run, data, is_new = prepared(console, dataset, out, given, data_dir, resume=resume)
    # Made before the folder is, so that what cannot be made or read leaves no trace.
    bnn = run.load_module() if run.checkpoint.exists() and not is_new else run.make_module()
    use_threads(run)
    if is_new:
        run = Run.create(out, run.config, data_dir=data_dir, table=run.table)
    announce(console, run, bnn, data)

    table = EpochTable(console, run.config.task)
    recorder = Recorder(run, table)
    try:
        trained = train_run(run, data, recorder)
    except KeyboardInterrupt:
        table.close()
        # Text, because Rich would read [brackets] and :colons: in a path as markup.
        console.print(Text(f"stopped; go on with: {run.command} --resume"), soft_wrap=True)
        raise
    finally:
        table.close()
    with console.status("measuring and drawing ..."):
        metrics, report = finish(run, data, trained)
    if as_json:
        typer.echo(json.dumps(metrics))
        return
    summarise(console, run, metrics, trained.notes)
    typer.echo(f"report: {report}")


def _widths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"hidden must be positive numbers of units such as 400,400, got {text!r}"
        ) from error
