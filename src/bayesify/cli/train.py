"""``bayesify train``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from bayesify.cli.data import download_bar
from bayesify.cli.table import EpochTable
from bayesify.datasets import ImageData
from bayesify.module import BayesianModule
from bayesify.runs import ConfigError, Run, RunConfig, RunError, finish
from bayesify.runs import train as train_run
from bayesify.runs.estimate import seconds_per_epoch, use_threads
from bayesify.training.history import History, Row

__all__ = ["duration", "train"]

_DEFAULT = RunConfig.of("mnist")
_PLAIN = RunConfig.of("mnist", baseline="sgd")
_DROPOUT = RunConfig.of("mnist", baseline="dropout")


def _option(text: str, default: object = None, panel: str | None = None) -> Any:
    shown = "" if default is None else rf" \[default: {default}]"
    return typer.Option(help=text + shown, show_default=False, rich_help_panel=panel)


_POSTERIOR, _TRAINING, _BASELINE = "Prior and posterior", "Training", "Baselines"


def train(
    dataset: Annotated[str, typer.Argument(help="mnist or fashion-mnist.")],
    out: Annotated[Path, typer.Option(help="The run's folder, new or empty.")],
    baseline: Annotated[
        str | None, _option("Train a plain network instead: sgd or dropout.", None, _BASELINE)
    ] = None,
    net: Annotated[str | None, _option("mlp or lenet5.", _DEFAULT.net)] = None,
    hidden: Annotated[str | None, _option("Units of the mlp's hidden layers.", "400,400")] = None,
    prior: Annotated[
        str | None,
        _option("gaussian, scale-mixture or laplace.", _DEFAULT.prior, _POSTERIOR),
    ] = None,
    prior_std: Annotated[
        float | None,
        _option("Its standard deviation (gaussian, laplace).", _DEFAULT.prior_std, _POSTERIOR),
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
        _option("The posterior's std at the start.", _DEFAULT.init_std, _POSTERIOR),
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
            _DEFAULT.estimator,
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
            _DEFAULT.kl_warmup,
            _TRAINING,
        ),
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
            f"{_DEFAULT.lr}; sgd baseline {_PLAIN.lr}, dropout {_DROPOUT.lr}",
            _TRAINING,
        ),
    ] = None,
    momentum: Annotated[
        float | None, _option("Of sgd.", f"0; baselines {_PLAIN.momentum}", _TRAINING)
    ] = None,
    rho_lr_scale: Annotated[
        float | None,
        _option("Rate of rho as a multiple of --lr.", _DEFAULT.rho_lr_scale, _TRAINING),
    ] = None,
    schedule: Annotated[
        str | None, _option("cosine (to zero) or constant.", _DEFAULT.schedule, _TRAINING)
    ] = None,
    epochs: Annotated[
        int | None, _option("Passes over the training data.", _DEFAULT.epochs, _TRAINING)
    ] = None,
    batch_size: Annotated[
        int | None,
        _option(
            "Images a minibatch.",
            f"{_DEFAULT.batch_size}; baselines {_PLAIN.batch_size}",
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
        _option("Probability of dropping a pixel.", _DEFAULT.dropout_input, _BASELINE),
    ] = None,
    dropout_hidden: Annotated[
        float | None,
        _option("Probability of dropping a unit.", _DEFAULT.dropout_hidden, _BASELINE),
    ] = None,
    limit: Annotated[int | None, _option("Use only the first N training images.")] = None,
    precision: Annotated[
        str | None,
        _option("float32, or bfloat16 (autocast) in training.", _DEFAULT.precision, _TRAINING),
    ] = None,
    step: Annotated[
        str | None,
        _option("fused (one compiled kernel), plain or auto.", _DEFAULT.step, _TRAINING),
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

    The folder --out receives the settings, the history, a checkpoint after every epoch, the
    metrics, the figures and report.html. Ctrl-C stops after the current step; the same command
    with --resume goes on and gives what an uninterrupted run would have given.
    """
    given = {
        name: value
        for name, value in locals().items()
        if value is not None and name not in ("dataset", "out", "data_dir", "resume", "as_json")
    }
    if hidden is not None:
        given["hidden"] = _widths(hidden)
    console = Console(stderr=True)
    if resume and not (out / "config.json").exists():
        console.print(Text(f"nothing to resume in {out}: starting anew"), soft_wrap=True)
    run, is_new = _prepared(dataset, out, given, data_dir, resume=resume)
    with download_bar() as progress:
        data = run.load_data(progress=progress)
    # Made before the folder is, so that what cannot be made or read leaves no trace.
    bnn = run.load_module() if run.checkpoint.exists() and not is_new else run.make_module()
    use_threads(run)
    if is_new:
        run = Run.create(out, run.config, data_dir=data_dir)
    _announce(console, run, bnn, data)

    table = EpochTable(console)
    recorder = _Recorder(run, table)
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
    _summarise(console, run, metrics, trained.notes)
    typer.echo(f"report: {report}")


class _Recorder:
    """Passes everything on to the table, and writes history.csv as it grows."""

    def __init__(self, run: Run, table: EpochTable) -> None:
        self._run, self._table = run, table
        self._rows: History = []

    def on_start(self, *, epochs: int, batches: int, history: History) -> None:
        self._rows = list(history)
        self._table.on_start(epochs=epochs, batches=batches, history=history)

    def on_note(self, text: str) -> None:
        self._table.on_note(text)

    def on_step(self, *, epoch: int, batch: int) -> None:
        self._table.on_step(epoch=epoch, batch=batch)

    def on_epoch(self, row: Row) -> None:
        self._rows.append(row)
        self._run.write_history(self._rows)
        self._table.on_epoch(row)


def _prepared(
    dataset: str, out: Path, given: dict[str, Any], data_dir: str | None, *, resume: bool
) -> tuple[Run, bool]:
    if not (resume and (out / "config.json").exists()):
        return Run(out, RunConfig.of(dataset, **given), data_dir), True
    run = Run.open(out)
    asked = {"dataset": dataset, **given}
    for name, value in asked.items():
        stored = getattr(run.config, name)
        if value != stored:
            raise RunError(
                f"--resume goes on with the run in {out}, whose {name.replace('_', '-')} is "
                f"{stored}, but {value} was asked for; leave it out, or choose a new folder"
            )
    return Run(out, run.config, data_dir or run.data_dir), False


def _widths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"hidden must be positive numbers of units such as 400,400, got {text!r}"
        ) from error


def _announce(console: Console, run: Run, bnn: BayesianModule, data: ImageData) -> None:
    config = run.config
    what = {None: "Bayes by Backprop", "sgd": "plain network", "dropout": "dropout network"}
    seconds = seconds_per_epoch(bnn, config, data)
    console.print(
        f"{what[config.baseline]}, {config.dataset}, {config.net}: {bnn.layout.num_weights:,} "
        f"weights, {len(data.train_targets):,} images; {config.epochs} epochs of about "
        f"{duration(seconds)}, {duration(seconds * config.epochs)} in all",
        highlight=False,
        soft_wrap=True,
    )


def duration(seconds: float) -> str:
    """A time for people to read, such as "3 min"."""
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _summarise(console: Console, run: Run, metrics: dict[str, Any], notes: list[str]) -> None:
    test = metrics["test"]
    averaged = (
        f"{test['error_predictive']:.2f} % averaged over {metrics['test_samples']} weight samples, "
        if run.config.baseline is None
        else ""
    )
    console.print(
        f"test error {averaged}{test['error_mean_weights']:.2f} %"
        f"{' at the mean weights' if averaged else ''}\n"
        f"nll {test['nll']:.4f} nats, Brier {test['brier']:.4f}, "
        f"calibration error {test['ece']:.4f}",
        highlight=False,
        soft_wrap=True,
    )
    for note in notes:
        console.print(f"note: {note}", style="yellow", highlight=False, soft_wrap=True)
