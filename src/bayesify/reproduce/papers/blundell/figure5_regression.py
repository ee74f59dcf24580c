"""Figure 5 of Blundell et al. 2015: regression on a curve, with uncertainty beyond the data.

y = x + 0.3 sin(2 pi (x + e)) + 0.3 sin(4 pi (x + e)) + e with e ~ N(0, .02) and x from 0 to 0.5.
Bayes by Backprop gives a median and an interquartile range that widens where there are no data. A
plain network gives one line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesify import (
    ELBO,
    BayesianModule,
    Delta,
    Gaussian,
    GaussianLikelihood,
    LocalReparameterization,
    Predictive,
    fit,
)
from bayesify.datasets import Passes, TensorLoader
from bayesify.module.networks import mlp
from bayesify.noise.keys import Stream, derived_seed
from bayesify.reproduce.harness.experiment import Context, EpochProgress, Experiment, Job, Result
from bayesify.reproduce.harness.markdown import table_head
from bayesify.reproduce.harness.seed_statistics import mean_and_error
from bayesify.training.schedules import cosine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT", "curve", "make_data"]

#: The paper writes N(0, .02), and elsewhere uses this notation for a variance. Here .02 is the
#: standard deviation: with a variance of .02 the noise in the sines would be as large as the sines.
_NOISE_STD = 0.02
_DATA_ENDS = (0.0, 0.5)
_BEYOND = (-0.5, 1.0)
_SHOWN = (-0.6, 1.2)

PROTOCOL: dict[str, Any] = {
    "num_data": 300,
    "noise_std": _NOISE_STD,
    "hidden": [100, 100],
    "lr": 0.01,
    "steps": 3000,
    "optimizer": "Adam, cosine to zero",
    "inputs": "standardised by the training data",
    "likelihood": "Gaussian, learned std",
}
_BAYES = {
    "method": "Bayes by Backprop",
    "estimator": "local reparametrisation, one sample a step",
    "prior_std": 0.5,
    "init_std": 0.02,
    "kl_warmup": 0.5,
    "test_samples": 1000,
}
_PLAIN = {"method": "plain network"}
_QUICK = {"steps": 1000}
_STEPS_AN_EPOCH = 100


def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
    """Return two jobs for each seed: Bayes by Backprop and the plain network on the same data."""
    short = _QUICK if quick else {}
    seconds = 10.0 if quick else 20.0
    return [
        Job(name, seed, {**PROTOCOL, **own, **short}, seconds)
        for seed in seeds
        for name, own in (("bayes", _BAYES), ("plain", _PLAIN))
    ]


def make_data(num_data: int, noise_std: float, seed: int) -> tuple[Tensor, Tensor]:
    """Draw inputs and targets of the paper's curve, each of shape (N, 1).

    Example:
        >>> x, y = make_data(5, 0.0, seed=0)
        >>> torch.equal(y, curve(x))
        True
    """
    generator = torch.Generator().manual_seed(derived_seed(seed, Stream.SHUFFLE, 0))
    low, high = _DATA_ENDS
    x = low + (high - low) * torch.rand(num_data, 1, generator=generator)
    noise = noise_std * torch.randn(num_data, 1, generator=generator)
    return x, curve(x, noise)


def curve(x: Tensor, noise: Tensor | float = 0.0) -> Tensor:
    """Return the paper's function of x, with the noise added inside and outside the sines."""
    shifted = x + noise
    waves = (2.0 * math.pi * shifted).sin() + (4.0 * math.pi * shifted).sin()
    return x + 0.3 * waves + noise


def run(job: Job, context: Context) -> dict[str, Any]:
    """Train one network, and measure its predictions along the axis."""
    config = job.config
    x, y = make_data(config["num_data"], config["noise_std"], job.seed)
    axis = torch.linspace(*_SHOWN, 181).unsqueeze(1)
    samples = config.get("test_samples", 1)
    centre, spread = x.mean(), x.std()
    bnn = train((x - centre) / spread, y, config, job.seed, context)
    predicted = bnn.predict((axis - centre) / spread, samples)
    # The range of the network's line alone; that of the target includes the noise.
    lines = predicted.samples
    assert lines is not None
    line_range = lines.quantile(0.75, 0) - lines.quantile(0.25, 0)
    range_of = partial(_at, axis, _interquartile_range(predicted))
    line_range_of = partial(_at, axis, line_range)
    on_data = [0.05 * step for step in range(11)]
    levels = (0.025, 0.25, 0.5, 0.75, 0.975)
    quantiles = {f"{level:g}": _rounded(predicted.quantile(level)) for level in levels}
    fitted = bnn.predict((x - centre) / spread, samples).mean
    return {
        "iqr_on_data": mean(range_of(place) for place in on_data),
        "iqr_beyond": [range_of(place) for place in _BEYOND],
        "line_iqr_on_data": mean(line_range_of(place) for place in on_data),
        "line_iqr_beyond": [line_range_of(place) for place in _BEYOND],
        "noise_std": _noise_std_of(bnn),
        "train_rmse": float((fitted - y).square().mean().sqrt()),
        "axis": _rounded(axis),
        "quantiles": quantiles,
    }


def train(x: Tensor, y: Tensor, config: Any, seed: int, context: Context) -> BayesianModule:
    """Train Bayes by Backprop or the plain network, by the same code."""
    net = mlp(1, tuple(config["hidden"]), 1, seed=seed)
    likelihood = GaussianLikelihood(std=0.3, learn_std=True)
    if config["method"] == _PLAIN["method"]:
        bnn = BayesianModule(net, likelihood=likelihood, posterior=Delta, seed=seed)
        elbo, warmup = ELBO(bnn, num_data=len(x), temperature=0.0), 0.0
    else:
        bnn = BayesianModule(
            net,
            likelihood=likelihood,
            prior=Gaussian(config["prior_std"]),
            init_std=config["init_std"],
            estimator=LocalReparameterization(),
            seed=seed,
        )
        elbo, warmup = ELBO(bnn, num_data=len(x)), config["kl_warmup"]
    epochs = max(1, config["steps"] // _STEPS_AN_EPOCH)
    fit(
        elbo,
        Passes(TensorLoader(x, y, len(x), shuffle=False), _STEPS_AN_EPOCH),
        epochs=epochs,
        optimizer=partial(torch.optim.Adam, lr=config["lr"]),
        scheduler=cosine,
        kl_warmup_epochs=warmup * epochs,
        checkpoint_dir=context.work,
        resume=True,
        callback=EpochProgress(context, epochs),
    )
    return bnn


def table(results: Sequence[Result]) -> str:
    """Return the table of interquartile ranges on the data and beyond, by method."""
    lines = [
        *table_head(
            "| | seeds | on the data | at x = -0.5 | at x = 1.0 | smallest ratio | "
            "of the line alone: on the data | at x = -0.5 | at x = 1.0 |"
        ),
        "| Blundell et al. 2015, Figure 5 | | narrow | wide | wide | a picture only | | | |",
    ]
    for method in (_BAYES["method"], _PLAIN["method"]):
        found = [result["metrics"] for result in results if result["config"]["method"] == method]
        if not found:
            continue
        ratios = [min(each["iqr_beyond"]) / each["iqr_on_data"] for each in found]
        cells = []
        for prefix in ("", "line_"):
            cells.append(mean_and_error([each[f"{prefix}iqr_on_data"] for each in found], 3))
            beyond = zip(*(each[f"{prefix}iqr_beyond"] for each in found), strict=True)
            cells.extend(mean_and_error(each, 3) for each in beyond)
        cells.insert(3, f"{min(ratios):.1f}")
        lines.append(f"| {method} | {len(found)} | {' | '.join(cells)} |")
    return (
        "Interquartile range of the target's predictive distribution, mean +- standard error over "
        "seeds; then that of the network's line, without the noise.\n\n" + "\n".join(lines) + "\n"
    )


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """Draw the paper's figure for the first seed."""
    from bayesify.plots.bands import Band, bands

    seed = min(result["seed"] for result in results)
    panels = []
    for result in results:
        if result["seed"] == seed:
            axis, quantiles = result["metrics"]["axis"], result["metrics"]["quantiles"]
            shown = {float(q): values for q, values in quantiles.items()}
            if result["config"]["method"] == _PLAIN["method"]:
                shown = {0.5: shown[0.5]}  # a plain network has no distribution of lines
            panels.append(Band(result["config"]["method"], axis, shown))
    config = results[0]["config"]
    x, y = make_data(config["num_data"], config["noise_std"], seed)
    truth = curve(torch.tensor(panels[0].axis)).tolist()
    return {"regression-curve": bands(panels, (x.flatten().tolist(), y.flatten().tolist()), truth)}


def _noise_std_of(bnn: BayesianModule) -> float:
    assert isinstance(bnn.likelihood, GaussianLikelihood)
    return float(bnn.likelihood.std.detach())


def _at(axis: Tensor, values: Tensor, place: float) -> float:
    return float(values.flatten()[(axis.flatten() - place).abs().argmin()])


def _interquartile_range(predicted: Predictive) -> Tensor:
    return predicted.quantile(0.75) - predicted.quantile(0.25)


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 5) for value in values.flatten().tolist()]


EXPERIMENT = Experiment(
    name="regression-curve",
    source="Blundell et al. 2015, Figure 5",
    reported="median and interquartile range, wide beyond the data; with a plain network",
    seeds=(0, 1, 2, 3, 4),
    memory_mb=400,
    jobs=jobs,
    run=run,
    table=table,
    figures=figures,
)
