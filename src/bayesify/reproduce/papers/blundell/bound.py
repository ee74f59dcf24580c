"""The bound on MNIST: the lowest free energy that was reached, and what a late KL warm-up costs it.

Two families of networks are trained on all 60,000 images. ``lowest`` tries to minimise the free
energy itself: priors, estimators, and the KL at its full weight for most of the training. Among
them nothing is chosen by test images: the free energy is a number of the training images alone.
``warm-up`` has the settings of table 1, and varies the length and the power of the KL's warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import mean
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bayesify.app.runs.run_config import ESTIMATORS
from bayesify.datasets import TensorLoader
from bayesify.distributions.by_group import ByGroup, EmpiricalGaussian
from bayesify.distributions.priors import Gaussian, Laplace, Prior, ScaleMixture
from bayesify.module.bayesian import BayesianModule
from bayesify.module.networks import mlp
from bayesify.module.pruning import prune
from bayesify.reproduce.harness.experiment import Context, EpochProgress, Experiment, Job, Result
from bayesify.reproduce.harness.half_precision import half_precision
from bayesify.reproduce.harness.image_runs import images_of
from bayesify.reproduce.harness.markdown import table_head
from bayesify.reproduce.harness.seed_statistics import mean_and_error, with_cost
from bayesify.reproduce.papers.blundell.classifiers import SAMPLES, averaged, outputs_of, scores
from bayesify.reproduce.papers.blundell.mnist_networks import by_job
from bayesify.training.elbo import ELBO
from bayesify.training.fit import fit
from bayesify.training.schedules import cosine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT", "LOWEST", "SEVERAL", "WARM_UPS", "make_network", "widths"]

_FRACTIONS = (0.5, 0.75, 0.95, 0.98, 0.99)
#: Seconds an epoch on one core, of weight sampling and of local reparametrisation, by width.
_SECONDS = {
    "sampling": {400: 2.1, 1200: 8.5},
    "antithetic": {400: 3.5, 1200: 14.0},
    "local": {400: 3.5, 1200: 14.0},
}
_COMMON: dict[str, Any] = {
    "width": 400,
    "batch_size": 256,
    "lr": 1.5e-3,
    "rho_lr_scale": 2.0,
    "epochs": 20,
    "estimator": "local",
    "train_samples": 1,
    "init_std": 0.02,
    "kl_warmup": 0.1,
    "kl_warmup_power": 1.0,
}
_MIXTURE = {"kind": "scale-mixture", "pi": 0.1, "std1": 1.0, "std2": 0.01}


def _gaussian(std: float) -> dict[str, Any]:
    return {"kind": "gaussian", "std": std}


_LAYERS = {"kind": "layers", "0.*": _gaussian(0.07), "2.*": _gaussian(0.1), "*": _gaussian(0.3)}
_SPARSE = {"kind": "scale-mixture", "pi": 0.2, "std1": 0.3, "std2": 0.03}
_ONE = {"prior": _gaussian(0.1)}
#: By name: title, and what differs from the settings in ``_COMMON``.
LOWEST: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        **{
            f"gaussian-{std:g}": (f"N(0, {std:g}^2)", {"prior": _gaussian(std)})
            for std in (0.03, 0.05, 0.1, 0.2, 0.3, 1.0)
        },
        "empirical": ("N(0, s^2), s learned by layer", {"prior": {"kind": "empirical"}}),
        "layers": ("N(0, .07^2), N(0, .1^2), N(0, .3^2) by layer", {"prior": _LAYERS}),
        "laplace": ("Laplace, scale .05", {"prior": {"kind": "laplace", "scale": 0.05}}),
        "sparse": ("mixture, pi .2, std .3 and .03", {"prior": _SPARSE}),
        "mixture": ("mixture of table 1, pi .1, std 1 and .01", {"prior": _MIXTURE}),
        "fan-in": ("N(0, .1^2), initial std by fan-in", {**_ONE, "init_std": "fan-in"}),
        "sampling": ("N(0, .1^2), weight sampling", {**_ONE, "estimator": "sampling"}),
        "pairs": (
            "N(0, .1^2), weight sampling, antithetic pairs",
            {**_ONE, "estimator": "antithetic", "train_samples": 2},
        ),
        "no-warm-up": ("N(0, .1^2), no warm-up", {**_ONE, "kl_warmup": 0.0}),
        "half": ("N(0, .1^2), warm-up over half", {**_ONE, "kl_warmup": 0.5}),
        "longer": ("N(0, .1^2)", {**_ONE, "epochs": 60}),
        "empirical-longer": (
            "N(0, s^2), s learned by layer",
            {"prior": {"kind": "empirical"}, "epochs": 60},
        ),
        "wide": ("N(0, .1^2)", {**_ONE, "width": 1200}),
    }
)
#: Those with every seed, which the text compares; of the others there is the first.
SEVERAL = ("lowest-longer", "lowest-empirical-longer", "lowest-wide")
#: The length of the warm-up, as a part of the epochs, and its power.
WARM_UPS = (
    (0.0, 1.0),
    *((length, power) for length in (0.25, 0.5, 0.95) for power in (1.0, 2.0, 4.0)),
)
_WARM_UP: dict[str, Any] = {
    **_COMMON,
    "estimator": "sampling",
    "epochs": 40,
    "prior": _MIXTURE,
}
_QUICK: dict[str, Any] = {"width": 20, "epochs": 3, "batch_size": 32, "limit": 2000}


def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
    """Return a job for each trial with the first seed, and a few with each.

    A quick run has a few small networks.
    """
    made = []
    for place, seed in enumerate(seeds):
        trials = {
            f"lowest-{name}": {**_COMMON, **settings} for name, (_, settings) in LOWEST.items()
        }
        trials |= {
            f"warm-up-{length:g}-{power:g}": {
                **_WARM_UP,
                "kl_warmup": length,
                "kl_warmup_power": power,
            }
            for length, power in WARM_UPS
        }
        for name, config in list(trials.items())[:: 4 if quick else 1]:
            if place and name not in SEVERAL:
                continue
            seconds = 20.0 + config["epochs"] * _SECONDS[config["estimator"]][config["width"]]
            chosen = {**config, **(_QUICK if quick else {})}
            made.append(Job(name, seed, chosen, 3.0 if quick else seconds, ("mnist",)))
    return made


def make_prior(config: Mapping[str, Any]) -> Prior:
    """Return the prior that a job's JSON names.

    Example:
        >>> make_prior({"kind": "laplace", "scale": 0.1})
        Laplace(scale=0.1)
    """
    values = {name: value for name, value in config.items() if name != "kind"}
    match config["kind"]:
        case "gaussian":
            return Gaussian(**values)
        case "laplace":
            return Laplace(**values)
        case "scale-mixture":
            return ScaleMixture(**values)
        case "empirical":
            return EmpiricalGaussian(**values)
        case "layers":
            return ByGroup({pattern: make_prior(part) for pattern, part in values.items()})
        case unknown:
            raise ValueError(f"kind must be that of a prior, got {unknown!r}")


def make_network(config: Mapping[str, Any], seed: int) -> BayesianModule:
    """Return the network of a job before its training."""
    net = mlp(784, [config["width"]] * 2, 10, seed=seed)
    return BayesianModule(
        net,
        prior=make_prior(config["prior"]),
        estimator=ESTIMATORS[config["estimator"]],
        init_std=_stds(net, config["init_std"]),
        seed=seed,
    )


def _stds(net: nn.Module, init_std: float | str) -> float | torch.Tensor:
    """Return initial stds: one number, or ``"fan-in"``, half of 1 / sqrt(inputs of the layer)."""
    if init_std != "fan-in":
        return float(init_std)
    layers = [module for module in net.modules() if isinstance(module, nn.Linear)]
    return torch.cat(
        [
            torch.full((parameter.numel(),), 0.5 / math.sqrt(layer.in_features))
            for layer in layers
            for parameter in layer.parameters()
        ]
    )


def run(job: Job, context: Context) -> dict[str, Any]:
    """Train a network, and measure its bound, its test error whole and pruned."""
    config = job.config
    data = images_of(context, "mnist", config.get("limit"))
    bnn = make_network(config, job.seed)
    elbo = ELBO(bnn, num_data=len(data.train_targets), num_samples=config["train_samples"])
    loader = TensorLoader(
        data.train_inputs, data.train_targets, config["batch_size"], seed=job.seed
    )
    epochs = config["epochs"]
    with half_precision("cpu"):
        history = fit(
            elbo,
            loader,
            epochs=epochs,
            optimizer=partial(torch.optim.Adam, lr=config["lr"], fused=True),
            scheduler=cosine,
            rho_lr_scale=config["rho_lr_scale"],
            kl_warmup_epochs=config["kl_warmup"] * epochs,
            kl_warmup_power=config["kl_warmup_power"],
            checkpoint_dir=context.work,
            resume=True,
            callback=EpochProgress(context, epochs),
        )
    inputs, targets = data.test_inputs, data.test_targets
    mixed = averaged(bnn, {}, inputs, SAMPLES)
    assert mixed is not None
    kept = [name for name in history[-1] if name.startswith(("free_energy", "std_", "nll", "kl"))]
    return {
        "last": {name: history[-1][name] for name in kept},
        "free_energy_by_epoch": [round(float(row["free_energy"] or 0.0), 4) for row in history],
        "mean_weights": scores(outputs_of(bnn, inputs), targets),
        "averaged": scores(mixed, targets),
        "pruned": {
            f"{fraction:g}": scores(outputs_of(prune(bnn, fraction), inputs), targets)
            for fraction in _FRACTIONS
        },
        "num_weights": bnn.layout.num_weights,
    }


def table(results: Sequence[Result]) -> str:
    """Return the networks by free energy, then the warm-ups."""
    found = by_job(results)
    lowest = {name: found[f"lowest-{name}"] for name in LOWEST if f"lowest-{name}" in found}
    ranked = sorted(lowest, key=lambda name: _free_energy(lowest[name]))
    heads = (
        "| {} | epochs | free energy | of it KL | untrained | derivative, worst group | error, "
        "mean weights | error, averaged | nll, averaged | 75 / 95 / 98 % removed |"
    )
    parts = [
        "Free energy in nats per training image, by which the lines are ordered, and the KL's part "
        "in it; the free energy with untrained means; the derivative of the free energy in log std "
        "of the group of weights in which it exceeds three standard errors by most (0 at the "
        "optimum). Test error in percent, at the last epoch.",
        "\n".join(
            [
                *table_head(heads.format("the KL at its full weight early")),
                *(f"| {_title(name)} | {_cells(lowest[name])} |" for name in ranked),
            ]
        ),
        "\n".join(
            [
                *table_head(heads.format("warm-up of the KL, settings of table 1")),
                *(
                    f"| {_warm_up(length, power)} | {_cells(found[name])} |"
                    for length, power in WARM_UPS
                    if (name := f"warm-up-{length:g}-{power:g}") in found
                ),
            ]
        ),
    ]
    return "\n\n".join(parts) + "\n"


def widths(results: Sequence[Result]) -> str:
    """Return the lines that differ in the prior only, in the order of ``LOWEST``, in short."""
    found = by_job(results)
    lines = table_head(
        "| prior | free energy | of it KL | untrained | derivative, worst group | test error, "
        "averaged | test nll, averaged |"
    )
    for name, (title, settings) in LOWEST.items():
        if set(settings) == {"prior"} and (of := found.get(f"lowest-{name}")):
            metrics = of[0]["metrics"]
            last, scored = metrics["last"], metrics["averaged"]
            lines.append(
                f"| {title} | {last['free_energy']:.3f} | {last['free_energy'] - last['nll']:.3f} "
                f"| {last['free_energy_untrained']:.2f} | {_shown(last['std_residual_worst'])} "
                f"| {scored['error']:.2f} | {scored['nll']:.4f} |"
            )
    return "\n".join(lines)


def _shown(residual: float | None) -> str:
    """Format a residual without a sign of zero; nothing where none was judged."""
    return "" if residual is None else f"{round(residual, 2) + 0.0:.2f}"


def _title(name: str) -> str:
    title, settings = LOWEST[name]
    return f"2x{settings.get('width', _COMMON['width'])}, {title}"


def _warm_up(length: float, power: float) -> str:
    return f"{100 * length:g} % of the epochs, power {power:g}" if length else "none"


def _free_energy(of: Sequence[Result]) -> float:
    return mean(float(result["metrics"]["last"]["free_energy"]) for result in of)


def _cells(of: Sequence[Result]) -> str:
    metrics = [result["metrics"] for result in of]
    last = [each["last"] for each in metrics]
    kl = [each["free_energy"] - each["nll"] for each in last]
    pruned = [
        mean_and_error([each["pruned"][fraction]["error"] for each in metrics], 2)
        for fraction in ("0.75", "0.95", "0.98")
    ]
    return " | ".join(
        [
            str(of[0]["config"]["epochs"]),
            mean_and_error([each["free_energy"] for each in last], 3),
            mean_and_error(kl, 3),
            mean_and_error([each["free_energy_untrained"] for each in last], 2),
            ", ".join(_shown(each["std_residual_worst"]) for each in last),
            mean_and_error([each["mean_weights"]["error"] for each in metrics], 2),
            mean_and_error([each["averaged"]["error"] for each in metrics], 2),
            mean_and_error([each["averaged"]["nll"] for each in metrics], 4),
            " / ".join(pruned),
        ]
    )


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """Draw the test error over the free energy: colours are powers, markers are lengths."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from bayesify.plots.style import COLOURS, styled

    found = by_job(results)

    def place(of: Sequence[Result]) -> tuple[float, float]:
        errors = [result["metrics"]["mean_weights"]["error"] for result in of]
        return _free_energy(of), mean(errors)

    warm_ups = {
        each: place(of)
        for each in WARM_UPS
        if (of := found.get(f"warm-up-{each[0]:g}-{each[1]:g}"))
    }
    lowest = [
        place(of)
        for name, (_, settings) in LOWEST.items()
        if "width" not in settings and (of := found.get(f"lowest-{name}"))
    ]
    if not (warm_ups or lowest):
        return {}
    colours = {1.0: COLOURS["blue"], 2.0: COLOURS["vermillion"], 4.0: COLOURS["green"]}
    markers = {0.0: "*", 0.25: "o", 0.5: "s", 0.95: "^"}

    @styled
    def draw() -> Figure:
        figure = Figure(figsize=(6.8, 4.6), layout="constrained")
        ax = figure.add_subplot()
        grey: dict[str, Any] = {"color": COLOURS["grey"], "linestyle": "none"}
        handles = []
        for power, colour in colours.items():
            line = [at for (length, each), at in warm_ups.items() if each == power or not length]
            if line:
                ax.plot(*zip(*line, strict=True), color=colour, lw=1.2)
            handles.append(Line2D([], [], color=colour, label=f"warm-up, power {power:g}"))
        for (length, power), at in warm_ups.items():
            colour = colours[power] if length else COLOURS["ink"]
            ax.plot(*at, marker=markers[length], color=colour, ms=9 if not length else 6)
        for length, marker in markers.items():
            label = f"over {100 * length:g} % of the epochs" if length else "no warm-up"
            handles.append(Line2D([], [], marker=marker, label=label, **grey))
        for at in lowest:
            ax.plot(*at, marker="D", ms=4, color=COLOURS["orange"])
        handles.append(
            Line2D(
                [],
                [],
                **{**grey, "color": COLOURS["orange"]},
                marker="D",
                label="KL at full weight early",
            )
        )
        if warm_ups:
            name = "warm-up-{:g}-{:g}".format(*next(iter(warm_ups)))
            level = float(found[name][0]["metrics"]["last"]["free_energy_untrained"])
            ax.axvline(level, color=COLOURS["grey"], ls="--", lw=1)
            top, text = ax.get_xaxis_transform(), f"untrained means of the mixture, {level:.2f} "
            ax.text(level, 0.97, text, transform=top, ha="right", va="top", fontsize=8.5)
        ax.set(xlabel="free energy (nats per training image)", ylabel="test error (%)")
        ax.set_title("2x400, MNIST")
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
        return figure

    return {"blundell-bound": draw()}


EXPERIMENT = Experiment(
    name="blundell-bound",
    source="the bound of Blundell et al. 2015, eq. 1, minimised on MNIST",
    reported="nothing: what free energy the networks of table 1 have, and could have",
    seeds=(0, 1, 2),
    memory_mb=1500,
    jobs=jobs,
    run=run,
    table=with_cost(table),
    figures=figures,
    half_precision=True,
)
