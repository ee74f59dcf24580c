"""Table 1 of Blundell et al. 2015, with figures 2 and 3: test error on MNIST by method and width.

Every number is measured after the last epoch of a run of fixed length. Settings were chosen on
10,000 of the training images, see the experiment ``blundell-recipe``. Methods that go beyond one
network trained on the bound have lines of their own: dropped pixels, tempering, an ensemble.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from bayesify.reproduce.harness.experiment import Experiment, Job, Result
from bayesify.reproduce.harness.markdown import table_head
from bayesify.reproduce.harness.seed_statistics import mean_and_error
from bayesify.reproduce.papers.blundell.mnist_networks import (
    DROPOUT,
    DROPPED,
    GAUSSIAN,
    REPORTED,
    SCALE_MIXTURE,
    SGD,
    TEMPERED,
    WIDTHS,
    by_job,
    network_job,
    pruned_errors,
    run_network,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT", "METHODS"]

#: Seconds an epoch on one core of the forward and backward passes of a plain network, by width.
_PLAIN_SECONDS = {400: 1.2, 800: 2.6, 1200: 4.8}


class Method(NamedTuple):
    """One line of the table: settings, and the time of an epoch relative to a plain network's.

    The widths in ``every`` are run for each seed, those in ``first`` for the first seed only.
    """

    title: str
    settings: dict[str, Any]
    cost: float
    every: tuple[int, ...] = (400,)
    first: tuple[int, ...] = (800, 1200)
    members: int = 1


METHODS: dict[str, Method] = {
    "sgd": Method("SGD", SGD, 1.0),
    "dropout": Method("SGD, dropout", DROPOUT, 1.6),
    "gaussian": Method("Bayes by Backprop, Gaussian prior", GAUSSIAN, 1.7),
    "scale-mixture": Method(
        "Bayes by Backprop, scale mixture", SCALE_MIXTURE, 1.7, every=(400, 1200), first=(800,)
    ),
    "dropped": Method(
        "scale mixture, 20 % of the pixels dropped", DROPPED, 1.8, every=(400, 1200), first=()
    ),
    "tempered": Method("scale mixture, tempered", TEMPERED, 2.5, every=(), first=(400,)),
    "ensemble": Method(
        "scale mixture, ensemble of 3", SCALE_MIXTURE, 1.7, every=(), first=(400,), members=3
    ),
}

#: N, the number of training images.
_IMAGES = 60_000
#: Upper end of figure 2, as in the paper: the first epochs would otherwise fill the axis.
_TOP = 2.4
#: Wider networks need more time for an epoch and fewer epochs.
_WIDE_EPOCHS = {"sgd": 20, "dropout": 30, "gaussian": 20}


def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
    """Return a job for each method, width and seed; a quick run has the narrowest width only."""
    made = []
    for place, seed in enumerate(seeds):
        for name, method in METHODS.items():
            widths = method.every if place else sorted(method.every + method.first)
            for width in widths[:1] if quick else widths:
                settings = {**method.settings, "hidden": [width, width]}
                if width > WIDTHS[0]:
                    settings["epochs"] = _WIDE_EPOCHS.get(name, settings["epochs"])
                epochs = method.members * settings["epochs"]
                seconds = 6.0 + method.cost * epochs * _PLAIN_SECONDS[width]
                more = {"members": method.members} if method.members > 1 else {}
                made.append(
                    network_job(f"{name}-{width}", seed, settings, seconds, quick=quick, **more)
                )
    return made


def _errors(results: Sequence[Result]) -> str:
    """Return the table of test errors by method and width, the paper's next to ours."""
    lines = table_head("| | " + " | ".join(f"2x{width}, paper | ours" for width in WIDTHS) + " |")
    found = by_job(results)
    for name in METHODS:
        cells = []
        for place, width in enumerate(WIDTHS):
            runs = found.get(f"{name}-{width}", [])
            paper = f"{REPORTED[name][place]:.2f}" if name in REPORTED else ""
            errors = [result["metrics"]["test"]["error_mean_weights"] for result in runs]
            cells += [paper, mean_and_error(errors, 2) if runs else ""]
        if any(cells[1::2]):
            lines.append(f"| {_title(name, found)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def table(results: Sequence[Result]) -> str:
    """Return the test errors, then all measurements of the same runs."""
    found = by_job(results)
    behind = table_head(
        "| | epochs | seeds | mean weights | averaged | nll, nats | calibration error | KL, nats "
        "| free energy | 95 % removed | 98 % removed |"
    )
    behind += [
        _behind(f"{_title(name, found)}, 2x{width}", found[f"{name}-{width}"])
        for name in METHODS
        for width in WIDTHS
        if f"{name}-{width}" in found
    ]
    return (
        "Test error in percent of the mean weights at the last epoch, mean +- standard error over "
        "seeds where there are several; the paper's is of one run.\n\n"
        + _errors(results)
        + "\n\nThe same runs: averaged over weight samples; nll, calibration error (15 bins) and "
        "KL; the free energy, the last epoch's nll in training plus KL / N, in nats per image, at "
        "temperature 1 in every row; the error of the mean weights with 95 and 98 % of them "
        "removed by signal-to-noise.\n\n" + "\n".join(behind) + "\n"
    )


def _title(name: str, found: dict[str, list[Result]]) -> str:
    """Return a method's title, with the temperature if it is not 1."""
    title = METHODS[name].title
    of = [
        result for job, results in found.items() if job.startswith(f"{name}-") for result in results
    ]
    temperatures = {result["config"]["settings"].get("temperature", 1.0) for result in of}
    if temperatures - {1.0}:
        title += f" (temperature {', '.join(f'{t:g}' for t in sorted(temperatures))})"
    return title


def _behind(title: str, of: Sequence[Result]) -> str:
    settings, metrics = of[0]["config"]["settings"], [result["metrics"] for result in of]
    test = [each["test"] for each in metrics]
    plain = "baseline" in settings
    pruned = [pruned_errors(of, fraction) for fraction in (0.95, 0.98)]
    kl = [each["kl_nats"] for each in metrics if "kl_nats" in each]
    count = settings.get("limit", _IMAGES)
    bound = [
        each["curves"]["train_nll"][-1] + each["kl_nats"] / count
        for each in metrics
        if "kl_nats" in each
    ]
    cells = [
        str(settings["epochs"]),
        str(len(of)),
        mean_and_error([each["error_mean_weights"] for each in test], 2),
        "" if plain else mean_and_error([each["error_predictive"] for each in test], 2),
        mean_and_error([each["nll"] for each in test], 4),
        mean_and_error([each["ece"] for each in test], 4),
        mean_and_error(kl, 0) if kl else "",
        mean_and_error(bound, 2) if bound else "",
        *(mean_and_error(errors, 2) if errors else "" for errors in pruned),
    ]
    return f"| {title} | {' | '.join(cells)} |"


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """Draw figure 2, test error by epoch, and figure 3, densities of the trained weights."""
    from bayesify.plots.compared import Curve, curves_compared
    from bayesify.plots.weights import binned_densities

    found, made = by_job(results), {}
    panels: dict[str, list[Curve]] = {}
    densities: dict[int, dict[str, Any]] = {}
    for width in WIDTHS:
        curves = []
        for name in (*REPORTED, "dropped"):
            if of := found.get(f"{name}-{width}"):
                runs = [result["metrics"]["curves"]["test_error"] for result in of]
                curves.append(Curve.by_epoch(METHODS[name].title, runs))
                # The paper shows the densities of these methods only.
                if name not in ("gaussian", "dropped"):
                    of_width = densities.setdefault(width, {})
                    of_width[METHODS[name].title] = of[0]["metrics"]["density"]
        if curves:
            panels[f"2x{width}"] = curves
    if panels:
        made["blundell-error"] = curves_compared(panels, ylabel="test error (%)", top=_TOP)
    if densities:
        # The paper shows 2x1200. Choose the widest network with the most methods finished.
        most = max(densities, key=lambda width: (len(densities[width]), width))
        made["blundell-densities"] = binned_densities(densities[most])
    return made


EXPERIMENT = Experiment(
    name="blundell-table1",
    source="Blundell et al. 2015, table 1, figures 2 and 3",
    reported="test error on MNIST: scale mixture 1.32 to 1.36 %, dropout 1.33 to 1.51, SGD 1.83",
    seeds=(0, 1, 2),
    memory_mb=1200,
    jobs=jobs,
    run=run_network,
    table=table,
    figures=figures,
    on_gpu=True,
)
