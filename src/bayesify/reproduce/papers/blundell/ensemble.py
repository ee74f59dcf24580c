"""An ensemble of pruned networks with fewer weights than one dense network of 2x1200 units.

Networks of 2x800 units, with the settings of ``mixture-dropped`` in ``comparison``, are trained on
all 60,000 images from different seeds. Each is pruned by signal-to-noise, and their probabilities
are averaged. Plain networks with dropped pixels are trained for as long, and pruned by magnitude.

Two choices were made after test errors had been seen. Ten networks of 40 epochs, because three of
2x1200 had missed 1.20 % by .03: they miss it too. Then four of 100 epochs, as the networks of the
paper's table have. 2x800 is for its price. The plain networks came last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from bayesify.app.runs.measure import weights_left
from bayesify.noise.keys import Stream, derived_seed
from bayesify.reproduce.harness.experiment import Context, Experiment, Job, Result
from bayesify.reproduce.harness.image_runs import images_of
from bayesify.reproduce.harness.markdown import table_head
from bayesify.reproduce.harness.seed_statistics import mean_and_error, with_cost
from bayesify.reproduce.papers.blundell.classifiers import (
    EPOCHS,
    FRACTIONS,
    METHODS,
    outputs_of,
    pruned,
    scores,
    train_network,
)
from bayesify.reproduce.papers.blundell.comparison import CHOSEN
from bayesify.reproduce.papers.blundell.tuning import TRIALS, trial_settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT", "pooled"]

_WIDTH = 800


class _Ensemble(NamedTuple):
    method: str
    epochs: int
    members: int
    #: How many of the seeds have one.
    seeds: int


#: By the name of the job, in the order of the table.
_ENSEMBLES: Mapping[str, _Ensemble] = MappingProxyType(
    {
        "ensemble": _Ensemble("mixture-dropped", EPOCHS, 10, seeds=1),
        "ensemble-100-epochs": _Ensemble("mixture-dropped", 100, 4, seeds=5),
        "plain-ensemble-100-epochs": _Ensemble("sgd-dropped", 100, 4, seeds=2),
    }
)
#: Weights of the dense network of 2x1200 units with which the ensemble is compared.
DENSE = 784 * 1200 + 1200 + 1200 * 1200 + 1200 + 1200 * 10 + 10
#: Of a plain network, on one core.
_SECONDS_PER_EPOCH = 3.0
_QUICK: dict[str, Any] = {"epochs": 2, "limit": 2000, "batch_size": 32, "hidden": [20, 20]}


def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
    """Return an ensemble of each kind for the first seeds; of short training one, of plain two.

    A quick run has three small networks in each.
    """
    return [
        _job(name, seed, quick) for name, each in _ENSEMBLES.items() for seed in seeds[: each.seeds]
    ]


def _job(name: str, seed: int, quick: bool) -> Job:
    method, epochs, members, _ = _ENSEMBLES[name]
    settings = {
        **METHODS[method].fixed,
        **trial_settings(method, CHOSEN[method].trial),
        "hidden": [_WIDTH, _WIDTH],
        "epochs": epochs,
        **(_QUICK if quick else {}),
    }
    members = 3 if quick else members
    each = 2.0 if quick else METHODS[method].cost * _SECONDS_PER_EPOCH * epochs
    return Job(name, seed, {"members": members, "settings": settings}, members * each, ("mnist",))


def run(job: Job, context: Context) -> dict[str, Any]:
    """Train the networks of an ensemble, and measure how its first ones predict together.

    Returns:
        ``single``: the scores of each network at its mean weights by share of weights removed;
        ``pooled``: those of the averaged probabilities of the first 1, 2, ... networks;
        ``weights``: number of weights of one network by share.
    """
    settings, count = job.config["settings"], job.config["members"]
    data = images_of(context, "mnist", settings.get("limit"))
    inputs, targets = data.test_inputs, data.test_targets
    log_probs: dict[str, list[Tensor]] = {f"{fraction:g}": [] for fraction in FRACTIONS}
    weights: dict[str, int] = {}
    for number in range(count):
        seed = derived_seed(job.seed, Stream.INITIALIZATION, _WIDTH, number)
        part = context.part(f"member-{number}", number, count)
        bnn = train_network(settings, seed, data, part).bnn
        for fraction in FRACTIONS:
            small = pruned(bnn, fraction)
            weights[f"{fraction:g}"] = weights_left(small)
            log_probs[f"{fraction:g}"].append(outputs_of(small, inputs))
    return {
        "single": {
            share: [scores(each, targets) for each in of] for share, of in log_probs.items()
        },
        "pooled": {
            share: [scores(each, targets) for each in pooled(of)] for share, of in log_probs.items()
        },
        "weights": weights,
    }


def pooled(log_probs: Sequence[Tensor]) -> list[Tensor]:
    """Return the log of the average of the first 1, 2, ... probabilities, each (N, K).

    Example:
        >>> pooled([torch.tensor([[0.2, 0.8]]).log(), torch.tensor([[0.6, 0.4]]).log()])[1].exp()
        tensor([[0.4000, 0.6000]], dtype=torch.float64)
    """
    total = torch.zeros_like(log_probs[0], dtype=torch.float64)
    made = []
    for number, each in enumerate(log_probs, 1):
        total = total + each.double().exp()
        made.append((total / number).log())
    return made


def table(results: Sequence[Result]) -> str:
    """Return error and nll by number of networks, whole and pruned, with the weights left."""
    shares = [f"{fraction:g}" for fraction in FRACTIONS]
    heads = " | ".join(f"{100 * fraction:g} % removed" for fraction in FRACTIONS[1:])
    lines = table_head(
        f"| method | epochs | ensembles | networks | whole | {heads} | nll, whole "
        "| nll, 98 % removed | weights left at 98 % |"
    )
    for name, of_kind in _by_kind(results).items():
        epochs, members = _length(of_kind[0])
        metrics = [result["metrics"] for result in of_kind]
        for count in sorted({1, 3, 5, members} & set(range(1, members + 1))):

            def cell(
                share: str, score: str, count: int = count, metrics: list[Any] = metrics
            ) -> str:
                found = [_mean_score(each, share, score, count) for each in metrics]
                return mean_and_error(found, 2 if score == "error" else 4)

            cells = [
                METHODS[_ENSEMBLES[name].method].title,
                str(epochs),
                str(len(of_kind)),
                str(count),
                *(cell(share, "error") for share in shares),
                *(cell(share, "nll") for share in ("0", "0.98")),
                f"{count * metrics[0]['weights']['0.98']:,}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return (
        f"Networks of 2x{_WIDTH} units with the best settings of each method in {TRIALS} trials on "
        f"held-out images, which had {EPOCHS} epochs. Test error in percent at the mean weights, "
        "probabilities averaged over the networks; that share of the weights of each is removed in "
        "one shot, by signal-to-noise ratio, or by magnitude where there is no noise. A line of "
        "one network has the mean over all networks of an ensemble. Mean +- standard error over "
        "the ensembles. One dense "
        f"network of 2x1200 has {DENSE:,} weights.\n\n" + "\n".join(lines) + "\n"
    )


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """Draw the error over the number of networks, whole and pruned.

    Plain networks are drawn with 75 % removed at most: with more their errors leave the picture.
    """
    from bayesify.plots.compared import Curve, curves_compared

    panels = {}
    for name, of_kind in _by_kind(results).items():
        epochs, _ = _length(of_kind[0])
        curves = []
        plain = "baseline" in of_kind[0]["config"]["settings"]
        for share in ("0", "0.75") if plain else ("0", "0.75", "0.98"):
            title = f"{100 * float(share):g} % removed"
            metrics = [result["metrics"] for result in of_kind]
            runs = [
                [
                    _mean_score(each, share, "error", count)
                    for count in range(1, len(each["pooled"][share]) + 1)
                ]
                for each in metrics
            ]
            curves.append(Curve.by_epoch(title, runs))
        panels[f"{METHODS[_ENSEMBLES[name].method].title}\n{epochs} epochs"] = curves
    drawn = curves_compared(panels, xlabel="networks", ylabel="test error (%)")
    return {"blundell-ensemble": drawn}


def _mean_score(metrics: Any, share: str, score: str, count: int) -> float:
    """Return the score of the first ``count`` networks; of one, the mean over all networks."""
    if count == 1:
        return float(mean(each[score] for each in metrics["single"][share]))
    return float(metrics["pooled"][share][count - 1][score])


def _by_kind(results: Sequence[Result]) -> dict[str, list[Result]]:
    found = {name: [each for each in results if each["job"] == name] for name in _ENSEMBLES}
    return {name: of_kind for name, of_kind in found.items() if of_kind}


def _length(result: Result) -> tuple[int, int]:
    config = result["config"]
    return config["settings"]["epochs"], config["members"]


EXPERIMENT = Experiment(
    name="blundell-ensemble",
    source="an ensemble of the networks of blundell-comparison",
    reported="nothing: error of several pruned networks, with fewer weights than one dense network",
    seeds=(0, 1, 2, 3, 4),
    memory_mb=1500,
    jobs=jobs,
    run=run,
    table=with_cost(table),
    figures=figures,
    on_gpu=True,
)
