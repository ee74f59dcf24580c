"""Widths, long training and baselines, as in the study of Koca and Dittmann (2021).

Bayes by Backprop with a N(0, 1) prior and plain SGD, errors of the mean weights: four widths on
MNIST and three on Fashion-MNIST for 10 epochs, 2x400 for 228, and the densities of the weights of
2x400 after 50 epochs beside those of plain and dropout networks trained by Adam.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bayesify.datasets import load_images
from bayesify.experiments.cells import cell
from bayesify.experiments.experiment import Context, Experiment, Row, Unit
from bayesify.experiments.networks import curve, histogram, settings_of, trained
from bayesify.noise import NoiseKey, Stream
from bayesify.runs import RunConfig
from bayesify.runs.measure import evaluate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from bayesify.module import BayesianModule

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
    """Eleven for each seed, without the one of densities for all seeds but the first."""
    made = []
    for seed in seeds:
        for name, settings, epochs in _units(with_densities=seed == seeds[0]):
            data = "fashion-mnist" if name.startswith("fashion") else "mnist"
            width = settings.pop("width")
            half = 0.5 if "baseline" in settings else 1.0
            seconds = 6.0 + half * epochs * _SECONDS[width]
            if quick:
                width, epochs, seconds = width // 10, _QUICK_EPOCHS, 3.0
                settings["limit"] = _QUICK_IMAGES
            settings |= {"hidden": [width, width], "epochs": epochs}
            made.append(Unit(name, seed, {"dataset": data, "settings": settings}, seconds))
    return made


def _units(*, with_densities: bool) -> list[tuple[str, dict[str, Any], int]]:
    widths = {"mnist": (200, 400, 800, 1200), "fashion-mnist": (200, 400, 800)}
    made = [
        (f"{data}-{width}", {**_BAYES, "width": width}, _EPOCHS)
        for data, each in widths.items()
        for width in each
    ]
    made.append((_LONG, {**_BAYES, "width": 400}, _LONG_EPOCHS))
    made.append(("plain", {**_ADAM, "baseline": "sgd", "width": 400}, _DENSITY_EPOCHS))
    made.append(("dropout", {**_ADAM, **_DROPOUT, "width": 400}, _DENSITY_EPOCHS))
    if with_densities:
        made.append((_DENSITY, {**_BAYES, "width": 400}, _DENSITY_EPOCHS))
    return made


def run(unit: Unit, context: Context) -> dict[str, Any]:
    """Train one network, and measure it.

    Raises:
        DataError: the data set is missing; said before anything is trained.
    """
    name, settings = unit.config["dataset"], settings_of(unit.config["settings"])
    data = load_images(
        name, context.data_dir, limit=settings.get("limit"), progress=context.on_download
    )
    config = RunConfig.of(name, **settings, seed=unit.seed)
    bnn, history = trained(config, data, context)
    measured, _ = evaluate(bnn, data, num_samples=config.test_samples, with_train=False)
    metrics: dict[str, Any] = {
        "test": measured["test"],
        "test_error_by_epoch": curve(history, "validation_error"),
        "train_error_by_epoch": curve(history, "train_error"),
    }
    if config.baseline is None:
        metrics |= {"kl_nats": measured["kl_nats"], "test_samples": config.test_samples}
    if unit.name in (_DENSITY, "plain", "dropout"):
        metrics["density"] = histogram(_weights(bnn, unit.seed), _LIMIT)
    return metrics


def _weights(bnn: BayesianModule, seed: int) -> Any:
    """One sample, as theirs; of a plain network its only one."""
    posterior = bnn.posterior
    noise = posterior.noise(NoiseKey(seed, Stream.PREDICTION, 0), range(1))
    return posterior.draw(noise).weights[0]


def table(rows: Sequence[Row]) -> str:
    """Test error by width and by method, theirs beside ours."""
    found = _by_unit(rows)
    lines = [
        "| | epochs | reported | bayesify, mean weights | bayesify, averaged | nll, nats | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, of in found.items():
        settings = of[0]["config"]["settings"]
        tests = [row["metrics"]["test"] for row in of]
        averaged = "" if "baseline" in settings else cell(_all(tests, "error_predictive"), 2)
        lines.append(
            f"| {_title(name, settings)} | {settings['epochs']} | {REPORTED.get(name, '')} | "
            f"{cell(_all(tests, 'error_mean_weights'), 2)} | {averaged} | "
            f"{cell(_all(tests, 'nll'), 4)} | {len(of)} |"
        )
    return (
        "Test error in percent at the last epoch, mean +- standard error over seeds; theirs is of "
        "the mean weights and of one run. Averaged: over "
        f"{_BAYES['test_samples']} weight samples. The nll is of the averaged prediction.\n\n"
        + "\n".join(lines)
        + f"\n\n{_verdict(found)}\n"
    )


def _verdict(found: Mapping[str, Sequence[Row]]) -> str:
    """How many of their errors ours are no higher than."""
    means = {
        name: sum(row["metrics"]["test"]["error_mean_weights"] for row in of) / len(of)
        for name, of in found.items()
        if name in REPORTED
    }
    higher = [name for name, value in means.items() if value > REPORTED[name]]
    text = f"No higher than reported: {len(means) - len(higher)} of {len(means)}"
    return f"{text}; higher: {', '.join(higher)}." if higher else f"{text}."


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Densities of the weights, as their last figure; the long run's error by epoch."""
    from bayesify.plots.weights import binned_densities

    made = {}
    names = {"plain": "plain, Adam", "dropout": "dropout, Adam", _DENSITY: "Bayes by Backprop"}
    seed = min(row["seed"] for row in rows)
    shown = {
        names[row["unit"]]: row["metrics"]["density"]
        for row in rows
        if row["seed"] == seed and "density" in row["metrics"]
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


def _all(tests: Sequence[Mapping[str, float]], key: str) -> list[float]:
    return [test[key] for test in tests]


EXPERIMENT = Experiment(
    name="koca-dittmann",
    source="Koca and Dittmann 2021, table of results and densities of the weights",
    reported="test error 2.16 to 2.76 % (MNIST), 1.63 % after 228 epochs, 12.6 to 13.2 % (Fashion)",
    seeds=(0, 1, 2),
    units=units,
    run=run,
    table=table,
    figures=figures,
)
