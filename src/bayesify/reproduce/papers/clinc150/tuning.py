"""The choice of settings on CLINC150's validation part, with as many trials for each method.

A trial trains on all queries of the training part with the first seed. That of lowest nll on the
validation part is chosen: at the mean weights for maximum likelihood, averaged over weight samples
for the variational methods. Queries outside of all intents have no say.

The ranges were chosen after two fits that are not stored: three epochs of LoRA at rate .001 without
dropout, measured on the validation part, and two of a variational adapter at rate .002, of which
the training nll was seen. The tempered adapter came later, after the other methods' test results
and after five more fits, measured on the validation part: with dropout, with a random head, and at
temperature .1. The trials after the first three of each method, with more epochs and more layers,
came after the test results of the first seed. Of the whole bound four times the epochs had .0002
less, and the shorter training was kept. The last trial of each method came after three seeds of
all, when it was seen that the encoder's own dropout of .1 is on in all others but the last layer's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from bayesify.reproduce.harness.experiment import Context, Experiment, Job, Result
from bayesify.reproduce.harness.markdown import table_head
from bayesify.reproduce.papers.clinc150.adapters import (
    SAMPLES,
    Predict,
    adapter_of,
    data_of,
    last_layer_of,
    measured,
    timed,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT", "METHODS", "Method"]

_ADAPTER: dict[str, Any] = {
    "rank": 8,
    "layers": ["query", "value"],
    "epochs": 4,
    "batch_size": 32,
}


#: Every linear layer of the encoder, of which the chosen ones of the first trials are a third.
_ALL = ["query", "key", "value", "dense"]
_NARROW: dict[str, Any] = {"prior_std": 0.05, "init_std": 0.05}


@dataclass(frozen=True)
class Method:
    """A method, its settings and its trials.

    Args:
        fixed: settings of all trials.
        trials: what each trial sets.
        chosen: the number of the chosen trial.
        few: other settings of the training on ten queries of an intent, which has no trials.
        seconds: estimated time of a trial on one core.
    """

    fixed: Mapping[str, Any]
    trials: Sequence[Mapping[str, Any]]
    chosen: int
    few: Mapping[str, Any]
    seconds: float

    def settings(self, trial: int, size: str = "full") -> dict[str, Any]:
        """Return the settings of a trial, for all training queries or for few."""
        made = {**self.fixed, **self.trials[trial]}
        return {**made, **self.few} if size == "few" else made


#: Ten of an intent are a tenth of the steps of an epoch.
_LONGER = {"epochs": 20}
METHODS: Mapping[str, Method] = {
    "lora": Method(
        {**_ADAPTER, "method": "maximum likelihood", "dropout": 0.1},
        [
            {"lr": 1e-3},
            {"lr": 2e-3},
            {"lr": 4e-3},
            {"lr": 2e-3, "epochs": 8},
            {"lr": 1e-3, "layers": _ALL},
            {"lr": 1e-3, "layers": _ALL, "epochs": 8},
            {"lr": 2e-3, "dropout": 0.0, "encoder_dropout": 0.0},
        ],
        chosen=1,
        few=_LONGER,
        seconds=700.0,
    ),
    "variational": Method(
        {**_ADAPTER, "method": "variational", "random": ["A"], "dropout": 0.0},
        [
            {"prior_std": 0.05, "init_std": 0.05, "lr": 2e-3},
            {"prior_std": 0.05, "init_std": 0.05, "lr": 4e-3},
            {"prior_std": 0.1, "init_std": 0.1, "lr": 4e-3},
            _NARROW | {"lr": 4e-3, "epochs": 16},
            _NARROW | {"lr": 4e-3, "layers": _ALL, "epochs": 8},
            _NARROW | {"lr": 4e-3, "layers": _ALL, "epochs": 16},
            _NARROW | {"lr": 4e-3, "encoder_dropout": 0.0},
        ],
        chosen=1,
        few=_LONGER,
        seconds=900.0,
    ),
    "tempered": Method(
        {
            **_ADAPTER,
            "method": "variational",
            "random": ["A"],
            "dropout": 0.1,
            "prior_std": 0.05,
            "init_std": 0.05,
            "lr": 4e-3,
        },
        [
            {"temperature": 0.3},
            {"temperature": 0.1},
            {"temperature": 0.03},
            {"temperature": 0.03, "epochs": 8},
            {"temperature": 0.1, "lr": 2e-3, "layers": _ALL, "epochs": 8},
            {"temperature": 0.03, "lr": 2e-3, "layers": _ALL, "epochs": 8},
            {"temperature": 0.03, "dropout": 0.0, "encoder_dropout": 0.0},
        ],
        chosen=2,
        few=_LONGER,
        seconds=900.0,
    ),
    "last-layer": Method(
        {"method": "last layer", "epochs": 40, "batch_size": 128, "init_std": 0.1, "lr": 0.02},
        [
            {"prior_std": 0.3},
            {"prior_std": 1.0},
            {"prior_std": 3.0},
            {"prior_std": 1.5},
            {"prior_std": 1.0, "epochs": 100},
            {"prior_std": 1.0, "init_std": 0.3, "epochs": 100},
            {"prior_std": 1.0, "epochs": 200},
        ],
        chosen=5,
        few={"epochs": 200},
        seconds=120.0,
    ),
}


def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
    """Return every trial of every method for each seed; a quick run has the chosen ones."""
    made = []
    for seed in seeds:
        for name, method in METHODS.items():
            for trial in [method.chosen] if quick else range(len(method.trials)):
                settings = method.settings(trial)
                if quick:
                    settings = {**settings, "epochs": 1}
                config = {"method": name, "trial": trial, "settings": settings}
                seconds = 5.0 if quick else method.seconds
                made.append(Job(f"{name}-{trial}", seed, config, seconds, ("clinc150",)))
    return made


def run(job: Job, context: Context) -> dict[str, Any]:
    """Train one trial and measure it on the validation part."""
    settings = job.config["settings"]
    quick = settings["epochs"] == 1
    data = data_of(context, None, quick=quick)
    predict: Predict
    if job.config["method"] == "last-layer":
        predict, _ = last_layer_of(settings, data, job.seed, context)
    else:
        bnn, _ = adapter_of(settings, data, job.seed, context)
        is_random = settings["method"] == "variational"
        predict = partial(bnn.predict, num_samples=SAMPLES) if is_random else bnn.predict_mean
    inside = timed(predict, data.validation)
    return measured(inside, timed(predict, data.outside_validation), data.validation.targets)


def table(results: Sequence[Result]) -> str:
    """Return the trials of each method, the chosen ones marked."""
    lines = table_head("| method | trial | settings | accuracy | nll | ECE | AUROC |")
    for result in results:
        config, metrics = result["config"], result["metrics"]
        name, trial = config["method"], config["trial"]
        varied = ", ".join(map(_shown, METHODS[name].trials[trial].items()))
        mark = ", chosen" if trial == METHODS[name].chosen else ""
        lines.append(
            f"| {name} | {trial}{mark} | {varied} | {metrics['accuracy']:.2f} "
            f"| {metrics['nll']:.4f} | {metrics['ece']:.4f} | {metrics['auroc']['entropy']:.4f} |"
        )
    said = "Measured on the validation part, one seed. The AUROC (entropy) has no say in a choice."
    return f"{said}\n\n" + "\n".join(lines) + "\n"


def _shown(setting: tuple[str, Any]) -> str:
    name, value = setting
    return "all linear layers" if value is _ALL else f"{name} {value:g}"


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """Draw the nll of each trial."""
    from bayesify.plots.compared import Curve, curves_compared

    found: dict[str, list[tuple[int, float]]] = {}
    for result in results:
        config = result["config"]
        found.setdefault(config["method"], []).append((config["trial"], result["metrics"]["nll"]))
    curves = [
        Curve(name, [trial for trial, _ in trials], [[nll for _, nll in trials]], points=True)
        for name, trials in found.items()
    ]
    panels = {"Validation part": curves}
    drawn = curves_compared(panels, xlabel="trial", ylabel="nll (nats)")
    return {"clinc150-tuning": drawn}


EXPERIMENT = Experiment(
    name="clinc150-tuning",
    source="CLINC150 (Larson et al. 2019)",
    reported="nothing: the trials from which the settings of clinc150 are chosen",
    seeds=(0,),
    memory_mb=2500,
    jobs=jobs,
    run=run,
    table=table,
    figures=figures,
    on_gpu=True,
)
