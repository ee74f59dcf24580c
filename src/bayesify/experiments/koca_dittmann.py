"""Widths, long training and baselines, as in the study of Koca and Dittmann (2021).

Bayes by Backprop with a N(0, 1) prior and plain SGD, errors of the mean weights: four widths on
MNIST and three on Fashion-MNIST for 10 epochs, 2x400 for 228, and the densities of the weights of
2x400 after 50 epochs beside those of plain and dropout networks trained by Adam.

Each of the short runs is made twice: with the study's settings, and with a smaller start, of means
and of standard deviations, and a rate that falls to zero, all else being the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

from bayesify.datasets import load_images
from bayesify.experiments.cells import cell
from bayesify.experiments.experiment import Context, Experiment, Row, Unit
from bayesify.experiments.networks import curve, histogram, sampled_weights, settings_of, trained
from bayesify.runs import RunConfig
from bayesify.runs.measure import evaluate
from bayesify.training import NonFiniteLossError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT", "REPORTED"]

#: Test error in percent, by unit. Their plain network is called SGD and was trained by Adam.
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

#: SGD of rate 0.001 on the summed loss of a minibatch is 0.128 on the mean of its 128 data.
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
#: SGD hardly moves std in ten epochs: what it starts from is what the network is trained with.
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
#: Beyond it lie next to no weights, and it is what their figure shows.
_LIMIT = 0.3
#: Seconds an epoch on one core, by width.
_SECONDS = {200: 2.0, 400: 3.5, 800: 8.5, 1200: 17.0}
_QUICK_EPOCHS, _QUICK_IMAGES = 2, 2000


def units(seeds: Sequence[int], quick: bool) -> list[Unit]:
    """Sixteen for each seed, and for the first the long one and one of densities."""
    made = []
    for seed in seeds:
        for name, settings, epochs in _units(first=seed == seeds[0]):
            data = "fashion-mnist" if name.startswith("fashion") else "mnist"
            width = settings.pop("width")
            half = 0.5 if "baseline" in settings else 1.0
            seconds = 6.0 + half * epochs * _SECONDS[width]
            if quick:
                width, epochs, seconds = width // 10, _QUICK_EPOCHS, 3.0
                settings["limit"] = _QUICK_IMAGES
            settings |= {"hidden": [width, width], "epochs": epochs}
            config = {"dataset": data, "settings": settings}
            made.append(Unit(name, seed, config, seconds, (data,)))
    return made


def _units(*, first: bool) -> list[tuple[str, dict[str, Any], int]]:
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


def run(unit: Unit, context: Context) -> dict[str, Any]:
    """Train one network, and measure it; or say where it diverged.

    Raises:
        DataError: the data set is missing; said before anything is trained.
    """
    name, settings = unit.config["dataset"], settings_of(unit.config["settings"])
    data = load_images(
        name, context.data_dir, limit=settings.get("limit"), progress=context.on_download
    )
    config = RunConfig.of(name, **settings, seed=unit.seed)
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
    if unit.name in (_DENSITY, "plain", "dropout"):
        metrics["density"] = histogram(sampled_weights(bnn, unit.seed), _LIMIT)
    return metrics


def table(rows: Sequence[Row]) -> str:
    """Test error by width and by method, theirs beside ours."""
    found = _by_unit(rows)
    lines = [
        "| | epochs | reported | bayesify, mean weights | averaged | nll, nats | smaller start, "
        "falling rate: mean weights | averaged | nll, nats | seeds |",
        "|---" * 10 + "|",
    ]
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


def _cells(of: Sequence[Row]) -> list[str]:
    """Errors and nll of the runs of one kind, and how many of them diverged."""
    tests = [row["metrics"]["test"] for row in of if "test" in row["metrics"]]
    lost = len(of) - len(tests)
    if of and not tests:
        return ["diverges", "", ""]
    keys = {"error_mean_weights": 2, "error_predictive": 2, "nll": 4}
    cells = [cell([test[key] for test in tests], digits) for key, digits in keys.items()]
    if any("baseline" in row["config"]["settings"] for row in of):
        cells[1] = ""  # a plain network has nothing to average
    return [f"{cells[0]} ({lost} diverged)" if lost else cells[0], *cells[1:]] if of else [""] * 3


def _verdict(found: Mapping[str, Sequence[Row]]) -> str:
    """How many of their errors ours are no higher than, and which are."""
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


def _mean(of: Sequence[Row]) -> float:
    """Error of the mean weights over seeds; infinite where one diverged."""
    tests = [row["metrics"].get("test", {}) for row in of]
    return float(mean(test.get("error_mean_weights", math.inf) for test in tests))


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Densities of the weights, as their last figure; the long run's error by epoch."""
    from bayesify.plots.compared import Curve, curves_compared
    from bayesify.plots.weights import binned_densities

    made = {}
    long = [row["metrics"] for row in rows if row["unit"] == _LONG and "test" in row["metrics"]]
    if long:
        epochs = len(long[0]["test_error_by_epoch"])
        curves = [Curve.level("reported, last epoch", epochs, REPORTED[_LONG])]
        for name, key in (("test, mean weights", "test"), ("train, sampled", "train")):
            curves.append(Curve.by_epoch(name, [each[f"{key}_error_by_epoch"] for each in long]))
        made["koca-dittmann-long"] = curves_compared(
            {f"2x400 for {epochs} epochs": curves}, ylabel="error (%)"
        )
    names = {"plain": "plain, Adam", "dropout": "dropout, Adam", _DENSITY: "Bayes by Backprop"}
    seed = min(row["seed"] for row in rows)
    shown = {
        name: row["metrics"]["density"]
        for unit, name in names.items()
        for row in rows
        if (row["unit"], row["seed"]) == (unit, seed) and "density" in row["metrics"]
    }
    if shown:
        made["koca-dittmann-densities"] = binned_densities(shown)
    return made


def _by_unit(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """In the order of ``REPORTED``, then the others."""
    order = [*REPORTED, *{row["unit"] for row in rows if row["unit"] not in REPORTED}]
    found = {name: [row for row in rows if row["unit"] == name] for name in order}
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
    units=units,
    run=run,
    table=table,
    figures=figures,
)
