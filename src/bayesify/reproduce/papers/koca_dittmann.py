"""Widths, long training and baselines, as in the study of Koca and Dittmann (2021).

Bayes by Backprop with a N(0, 1) prior and plain SGD, errors of the mean weights: four widths on
MNIST and three on Fashion-MNIST for 10 epochs, 2x400 for 228 epochs, and the densities of the
weights of 2x400 after 50 epochs next to those of plain and dropout networks trained by Adam.

Each of the short runs is done twice: with the study's settings, and with smaller initial means and
standard deviations and a learning rate that falls to zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean
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
from bayesify.reproduce.harness.image_runs import (
    curve,
    histogram,
    images_of,
    sampled_weights,
    settings_of,
    trained,
)
from bayesify.reproduce.harness.markdown import table_head
from bayesify.reproduce.harness.seed_statistics import mean_and_error
from bayesify.training import NonFiniteLossError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT", "REPORTED"]

#: Test error in percent, by job. Their plain network is called SGD and was trained by Adam.
REPORTED: dict[str, float] = {
    "mnist-200": 2.51,
    "mnist-400": 2.33,
    "mnist-800": 2.16,
    "mnist-1200": 2.76,
    "mnist-400-long": 1.63,
    "fashion-mnist-200": 12.63,
    "fashion-mnist-400": 13.2,
    "fashion-mnist-800": 12.81,
    "plain": 1.74,
    "dropout": 1.51,
}
_SUFFIX = "-less-noise"
_LONG, _DENSITY = "mnist-400-long", "mnist-400-density"

#: A rate of 0.001 on the summed loss of a minibatch is 0.128 on the mean over its 128 examples.
_BAYES: dict[str, Any] = {
    "prior": "gaussian",
    "prior_std": 1.0,
    "estimator": "sampling",
    "optimizer": "sgd",
    "lr": 0.128,
    "batch_size": 128,
    "rho_lr_scale": 1.0,
    "schedule": "constant",
    "kl_warmup": 0.0,
    "init_std": 0.0486,  # softplus(-3)
    "mean_init_std": 0.1,
    "test_samples": 20,
}
#: SGD hardly changes the stds in ten epochs, so their initial values matter.
_LESS_NOISE: dict[str, Any] = {**_BAYES, "init_std": 0.01, "schedule": "cosine"}
del _LESS_NOISE["mean_init_std"]  # PyTorch's own initial means, of smaller spread
_ADAM: dict[str, Any] = {
    "optimizer": "adam",
    "lr": 1e-3,
    "batch_size": 128,
    "schedule": "constant",
}
_DROPOUT: dict[str, Any] = {"baseline": "dropout", "dropout_input": 0.0, "dropout_hidden": 0.5}
_EPOCHS, _LONG_EPOCHS, _DENSITY_EPOCHS = 10, 228, 50
#: Range of the densities, as in their figure; almost no weight is outside.
_LIMIT = 0.3
#: Seconds per epoch on one core, by width.
_SECONDS = {200: 2.0, 400: 3.5, 800: 8.5, 1200: 17.0}
_QUICK_EPOCHS, _QUICK_IMAGES = 2, 2000


def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
    """Return sixteen jobs for each seed; the first has a long run and one for densities, too."""
    made = []
    for seed in seeds:
        for name, settings, epochs in _jobs(first=seed == seeds[0]):
            data = "fashion-mnist" if name.startswith("fashion") else "mnist"
            width = settings.pop("width")
            half = 0.5 if "baseline" in settings else 1.0
            seconds = 6.0 + half * epochs * _SECONDS[width]
            if quick:
                width, epochs, seconds = width // 10, _QUICK_EPOCHS, 3.0
                settings["limit"] = _QUICK_IMAGES
            settings |= {"hidden": [width, width], "epochs": epochs}
            config = {"dataset": data, "settings": settings}
            made.append(Job(name, seed, config, seconds, (data,)))
    return made


def _jobs(*, first: bool) -> list[tuple[str, dict[str, Any], int]]:
    widths = {"mnist": (200, 400, 800, 1200), "fashion-mnist": (200, 400, 800)}
    made = [
        (f"{data}-{width}{suffix}", {**settings, "width": width}, _EPOCHS)
        for suffix, settings in (("", _BAYES), (_SUFFIX, _LESS_NOISE))
        for data, each in widths.items()
        for width in each
    ]
    made.append(("plain", {**_ADAM, "baseline": "sgd", "width": 400}, _DENSITY_EPOCHS))
    made.append(("dropout", {**_ADAM, **_DROPOUT, "width": 400}, _DENSITY_EPOCHS))
    if first:
        made.append((_LONG, {**_BAYES, "width": 400}, _LONG_EPOCHS))
        made.append((_DENSITY, {**_BAYES, "width": 400}, _DENSITY_EPOCHS))
    return made


def run(job: Job, context: Context) -> dict[str, Any]:
    """Train one network and measure it, or report that it diverged.

    Raises:
        DataError: the data set is missing; raised before anything is trained.
    """
    name, settings = job.config["dataset"], settings_of(job.config["settings"])
    data = images_of(context, name, settings.get("limit"))
    config = RunConfig.of(name, **settings, seed=job.seed)
    try:
        bnn, history = trained(config, data, context)
    except NonFiniteLossError as error:
        return {"diverged": str(error)}
    measured, _ = evaluate(bnn, data, num_samples=config.test_samples, with_train=False)
    metrics: dict[str, Any] = {
        "test": measured["test"],
        "test_error_by_epoch": curve(history, "validation_error"),
        "train_error_by_epoch": curve(history, "train_error"),
    }
    if config.baseline is None:
        metrics |= {"kl_nats": measured["kl_nats"], "test_samples": config.test_samples}
    if job.name in (_DENSITY, "plain", "dropout"):
        metrics["density"] = histogram(sampled_weights(bnn, job.seed), _LIMIT)
    return metrics


def table(results: Sequence[Result]) -> str:
    """Return the table of test errors by width and method, theirs next to ours."""
    found = _in_order(results)
    lines = table_head(
        "| | epochs | reported | bayesify, mean weights | averaged | nll, nats | smaller start, "
        "falling rate: mean weights | averaged | nll, nats | seeds |"
    )
    for name in dict.fromkeys(name.removesuffix(_SUFFIX) for name in found):
        ours, other = found.get(name, []), found.get(name + _SUFFIX, [])
        settings = (ours or other)[0]["config"]["settings"]
        counts = dict.fromkeys(str(len(of)) for of in (ours, other) if of)
        lines.append(
            f"| {_title(name, settings)} | {settings['epochs']} | {REPORTED.get(name, '')} | "
            f"{' | '.join([*_cells(ours), *_cells(other)])} | {' and '.join(counts)} |"
        )
    std, less = _BAYES["init_std"], _LESS_NOISE["init_std"]
    return (
        "Test error in percent at the last epoch, mean +- standard error over seeds; theirs is of "
        f"the mean weights and of one run. Averaged: over {_BAYES['test_samples']} weight samples, "
        "as is the nll but of plain and dropout networks. The first three columns of ours have the "
        f"study's settings, with a std of {std} and means from N(0, {_BAYES['mean_init_std']}^2) "
        f"at the start; the others begin with {less} and PyTorch's initial means, and the rate "
        "falls to zero as a cosine.\n\n" + "\n".join(lines) + f"\n\n{_verdict(found)}\n"
    )


def _cells(of: Sequence[Result]) -> list[str]:
    """Format errors and nll of the runs of one kind, and how many of them diverged."""
    tests = [result["metrics"]["test"] for result in of if "test" in result["metrics"]]
    lost = len(of) - len(tests)
    if of and not tests:
        return ["diverges", "", ""]
    keys = {"error_mean_weights": 2, "error_predictive": 2, "nll": 4}
    cells = [mean_and_error([test[key] for test in tests], digits) for key, digits in keys.items()]
    if any("baseline" in result["config"]["settings"] for result in of):
        cells[1] = ""  # a plain network has nothing to average
    return [f"{cells[0]} ({lost} diverged)" if lost else cells[0], *cells[1:]] if of else [""] * 3


def _verdict(found: Mapping[str, Sequence[Result]]) -> str:
    """Count the reported errors that ours do not exceed, and name the others."""
    said = []
    baselines = [name for name in ("plain", "dropout") if name in found]
    bayes = [name for name in REPORTED if name not in baselines]
    for names, suffix, settings in (
        (bayes, "", "With the study's settings"),
        (bayes, _SUFFIX, "With a smaller start and a falling rate"),
        (baselines, "", "Plain and dropout networks"),
    ):
        means = {name: _mean(found[name + suffix]) for name in names if name + suffix in found}
        if not means:
            continue
        level = [name for name, error in means.items() if error <= REPORTED[name]]
        higher = [n for n, error in means.items() if n not in level and math.isfinite(error)]
        lost = [name for name, error in means.items() if not math.isfinite(error)]
        text = f"{settings}: no higher than reported in {len(level)} of {len(means)}"
        text += f"; higher: {', '.join(higher)}" if higher else ""
        text += f"; diverged: {', '.join(lost)}" if lost else ""
        said.append(f"{text}.")
    return " ".join(said)


def _mean(of: Sequence[Result]) -> float:
    """Return the mean error of the mean weights over seeds, infinite if one run diverged."""
    tests = [result["metrics"].get("test", {}) for result in of]
    return float(mean(test.get("error_mean_weights", math.inf) for test in tests))


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """Draw the densities of the weights, as in their last figure, and the long run's errors."""
    from bayesify.plots.compared import Curve, curves_compared
    from bayesify.plots.weights import binned_densities

    made = {}
    runs = [result["metrics"] for result in of_job(results, _LONG)]
    long = [metrics for metrics in runs if "test" in metrics]
    if long:
        epochs = len(long[0]["test_error_by_epoch"])
        curves = [Curve.level("reported, last epoch", epochs, REPORTED[_LONG])]
        for name, key in (("test, mean weights", "test"), ("train, sampled", "train")):
            curves.append(Curve.by_epoch(name, [each[f"{key}_error_by_epoch"] for each in long]))
        made["koca-dittmann-long"] = curves_compared(
            {f"2x400 for {epochs} epochs": curves}, ylabel="error (%)"
        )
    names = {"plain": "plain, Adam", "dropout": "dropout, Adam", _DENSITY: "Bayes by Backprop"}
    seed = min(result["seed"] for result in results)
    shown = {
        name: result["metrics"]["density"]
        for job, name in names.items()
        for result in results
        if (result["job"], result["seed"]) == (job, seed) and "density" in result["metrics"]
    }
    if shown:
        made["koca-dittmann-densities"] = binned_densities(shown)
    return made


def _in_order(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Group results by job, in the order of ``REPORTED``, then the others."""
    order = dict.fromkeys([*REPORTED, *(result["job"] for result in results)])
    found = {name: of_job(results, name) for name in order}
    return {name: of for name, of in found.items() if of}


def _title(name: str, settings: Mapping[str, Any]) -> str:
    if "baseline" in settings:
        return {"plain": "MNIST, plain, Adam", "dropout": "MNIST, dropout, Adam"}[name]
    data = "Fashion-MNIST" if name.startswith("fashion") else "MNIST"
    return f"{data}, 2x{settings['hidden'][0]}"


EXPERIMENT = Experiment(
    name="koca-dittmann",
    source="Koca and Dittmann 2021, table of results and densities of the weights",
    reported="test error 2.16 to 2.76 % (MNIST), 1.63 % after 228 epochs, 12.6 to 13.2 % (Fashion)",
    seeds=(0, 1),
    memory_mb=800,
    jobs=jobs,
    run=run,
    table=table,
    figures=figures,
    on_gpu=True,
)
