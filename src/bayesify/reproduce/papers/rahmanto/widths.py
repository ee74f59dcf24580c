"""Test accuracy by width, with 5 weight samples a step, compared with dropout and plain networks.

Rahmanto's table 2: two hidden layers of 400, 800 and 1200 units on MNIST, under the scale mixture
that the document's search found best, all trained by Adam. The document trained for 300 epochs. It
gives no learning rate, minibatch size, dropout rates or initial values; these are ours.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bayesify.app.runs import RunConfig
from bayesify.app.runs.measure import evaluate
from bayesify.reproduce.harness.experiment import (
    Context,
    Experiment,
    Job,
    Result,
    of_job,
)
from bayesify.reproduce.harness.image_runs import curve, mnist_of, settings_of, trained
from bayesify.reproduce.harness.markdown import table_head
from bayesify.reproduce.harness.seed_statistics import mean_and_error

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT", "REPORTED"]

WIDTHS = (400, 800, 1200)
#: Test accuracy in percent after 300 epochs, by method, in the order of the widths.
REPORTED: dict[str, tuple[float, float, float]] = {
    "bayes": (98.07, 98.05, 98.00),
    "dropout": (98.43, 98.52, 98.61),
    "plain": (98.09, 98.38, 98.41),
}
TITLES = {"bayes": "Bayes by Backprop", "dropout": "dropout", "plain": "plain network"}
REPORTED_EPOCHS = 300
#: Number of epochs that fits into an hour on a CPU.
EPOCHS = 15

_COMMON: dict[str, Any] = {"optimizer": "adam", "lr": 1e-3, "batch_size": 128, "epochs": EPOCHS}
_METHODS: dict[str, dict[str, Any]] = {
    "bayes": {
        **_COMMON,
        "prior": "scale-mixture",
        "pi": 0.25,
        "std1": 1.0,
        "std2": 3.35e-4,
        "estimator": "sampling",
        "train_samples": 5,
        "init_std": 0.02,
        "rho_lr_scale": 1.0,
        "schedule": "cosine",
        "kl_warmup": 0.5,
        "test_samples": 50,
    },
    "dropout": {
        **_COMMON,
        "baseline": "dropout",
        "dropout_input": 0.2,
        "dropout_hidden": 0.5,
        "schedule": "cosine",
    },
    "plain": {**_COMMON, "baseline": "sgd", "schedule": "cosine"},
}
#: Seconds per epoch on one core, by method and width.
_SECONDS = {
    "bayes": {400: 13.0, 800: 38.0, 1200: 80.0},
    "dropout": {400: 2.5, 800: 6.0, 1200: 11.0},
    "plain": {400: 2.0, 800: 5.0, 1200: 10.0},
}
_QUICK = {"epochs": 2, "limit": 1000}


def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
    """Return the three methods at 2x400 for every seed, and wider ones for the first seed."""
    made = []
    for seed in seeds:
        for width in WIDTHS if seed == seeds[0] else WIDTHS[:1]:
            for method, settings in _METHODS.items():
                hidden = width // 20 if quick else width
                settings = {**settings, "hidden": [hidden, hidden]}
                seconds = 6.0 + settings["epochs"] * _SECONDS[method][width]
                if quick:
                    settings, seconds = {**settings, **_QUICK}, 2.0
                config = {"method": method, "width": width, "settings": settings}
                made.append(Job(f"{method}-{width}", seed, config, seconds, ("mnist",)))
    return made


def run(job: Job, context: Context) -> dict[str, Any]:
    """Train one network, and measure it."""
    settings = settings_of(job.config["settings"])
    data = mnist_of(job, context)
    config = RunConfig.of("mnist", **settings, seed=job.seed)
    bnn, history = trained(config, data, context)
    measured, _ = evaluate(bnn, data, num_samples=config.test_samples, with_train=False)
    test = measured["test"]
    return {
        "test": test,
        "test_accuracy_mean_weights": 100.0 - test["error_mean_weights"],
        "test_accuracy_averaged": 100.0 - test["error_predictive"],
        "kl_nats": measured["kl_nats"],
        "curves": {
            "train_accuracy": [round(100.0 - e, 4) for e in curve(history, "train_error")],
            "test_accuracy": [round(100.0 - e, 4) for e in curve(history, "validation_error")],
            "train_nll": curve(history, "nll"),
            "test_nll": curve(history, "validation_nll"),
        },
    }


def table(results: Sequence[Result]) -> str:
    """Return the table of test accuracy by width and method, theirs next to ours."""
    lines = table_head(
        "| units | method | epochs | reported, 300 epochs | bayesify, mean weights | bayesify, "
        "averaged | nll, nats | seeds |"
    )
    for place, width in enumerate(WIDTHS):
        for method, title in TITLES.items():
            found = of_job(results, f"{method}-{width}")
            if not found:
                continue
            metrics, settings = (
                [result["metrics"] for result in found],
                found[0]["config"]["settings"],
            )
            averaged = [each["test_accuracy_averaged"] for each in metrics]
            lines.append(
                f"| 2x{settings['hidden'][0]} | {title} | {settings['epochs']} | "
                f"{REPORTED[method][place]:.2f} | "
                f"{mean_and_error([each['test_accuracy_mean_weights'] for each in metrics], 2)} | "
                f"{mean_and_error(averaged, 2) if method == 'bayes' else ''} | "
                f"{mean_and_error([each['test']['nll'] for each in metrics], 4)} | {len(found)} |"
            )
    epochs = sorted({result["config"]["settings"]["epochs"] for result in results})
    return (
        f"**{', '.join(map(str, epochs))} epochs of the document's {REPORTED_EPOCHS}.** Test "
        "accuracy in percent at the last epoch, mean +- standard error over seeds. Averaged: over "
        f"{_METHODS['bayes']['test_samples']} weight samples; the nll is of that, and of the one "
        "network where there are none.\n\n" + "\n".join(lines) + "\n"
    )


def files(results: Sequence[Result]) -> dict[str, str]:
    """Return the files that the document saves: every curve, and the summary, as CSV."""
    curves, summary = io.StringIO(), io.StringIO()
    names = ("train_accuracy", "test_accuracy", "train_nll", "test_nll")
    to_curves = csv.writer(curves, lineterminator="\n")
    to_summary = csv.writer(summary, lineterminator="\n")
    which = ["method", "width", "seed"]
    to_curves.writerow([*which, "epoch", *names, "quick"])
    measured = ["accuracy_mean_weights", "accuracy_averaged", "nll"]
    to_summary.writerow([*which, "epochs", *measured, "quick"])
    for result in sorted(results, key=lambda result: (result["job"], result["seed"])):
        config, metrics = result["config"], result["metrics"]
        which = [config["method"], str(config["width"]), str(result["seed"])]
        quick = str(result["quick"]).lower()
        columns = [metrics["curves"][name] for name in names]
        for epoch, values in enumerate(zip(*columns, strict=True), start=1):
            to_curves.writerow([*which, epoch, *values, quick])
        to_summary.writerow(
            [
                *which,
                config["settings"]["epochs"],
                f"{metrics['test_accuracy_mean_weights']:.2f}",
                f"{metrics['test_accuracy_averaged']:.2f}",
                f"{metrics['test']['nll']:.5f}",
                quick,
            ]
        )
    return {"curves.csv": curves.getvalue(), "summary.csv": summary.getvalue()}


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """Draw test accuracy by epoch, a panel for each width."""
    from bayesify.plots.compared import Curve, curves_compared

    panels = {}
    for place, width in enumerate(WIDTHS):
        drawn = []
        for method, title in TITLES.items():
            found = of_job(results, f"{method}-{width}")
            if found:
                runs = [result["metrics"]["curves"]["test_accuracy"] for result in found]
                drawn.append(Curve.by_epoch(title, runs))
                if method == "bayes":
                    reported = "reported, Bayes, epoch 300"
                    drawn.append(Curve.level(reported, len(runs[0]), REPORTED[method][place]))
        if drawn:
            panels[f"2x{width}"] = drawn
    return {"rahmanto-widths": curves_compared(panels, ylabel="test accuracy (%)")}


EXPERIMENT = Experiment(
    name="rahmanto-widths",
    source="Rahmanto, reproduction study in PyTorch, table 2",
    reported="test accuracy after 300 epochs: Bayes 98.00 to 98.07 %, dropout 98.43 to 98.61 %",
    seeds=(0,),
    memory_mb=1000,
    jobs=jobs,
    run=run,
    table=table,
    figures=figures,
    files=files,
    on_gpu=True,
)
