"""Low-rank adapters of MiniLM-L6 on CLINC150: by maximum likelihood and by the ELBO.

Each query has one of 150 intents. Measured on the test part: accuracy, nll, calibration, and how
well the uncertainty tells 1,000 queries outside of all intents. With all 100 training queries of
an intent, and with ten. Settings were chosen by ``tuning`` on the validation part; the test part,
with the queries outside of all intents, is read here only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch

from bayesify.module.bayesian import BayesianModule
from bayesify.reproduce.harness.experiment import Context, Experiment, Job, Result
from bayesify.reproduce.harness.markdown import table_head
from bayesify.reproduce.harness.seed_statistics import mean_and_error
from bayesify.reproduce.papers.clinc150.adapters import (
    SAMPLES,
    Data,
    Predict,
    Prediction,
    adapter_of,
    data_of,
    last_layer_of,
    measured,
    timed,
)
from bayesify.reproduce.papers.clinc150.tuning import METHODS
from bayesify.training.deep_ensemble import DeepEnsemble
from bayesify.training.mc_dropout import MCDropout
from bayesify.training.temperature_scaling import logit_temperature

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT"]

#: Training queries of each intent, by the name of the size.
SIZES: dict[str, int | None] = {"full": None, "few": 10}
#: Estimated seconds on one core with all training queries.
_SECONDS = {
    "lora": 1500.0,
    "ensemble": 1900.0,
    "last-layer": 240.0,
    "variational": 1200.0,
    "tempered": 1200.0,
}
#: Held-out queries on which ``widen`` chooses the width.
_WIDENED_BY = 2
_TOLERANCE = 0.01

_TEMPERATURE = METHODS["tempered"].settings(METHODS["tempered"].chosen)["temperature"]
TITLES = {
    "lora": "LoRA by maximum likelihood",
    "temperature": "the same, temperature scaling",
    "mc-dropout": "the same, MC dropout",
    "widened": "the same, widened without training",
    "ensemble": "three of them together",
    "last-layer": "variational last layer",
    "variational": "variational LoRA, the whole bound",
    "variational-mean": "the same, mean weights",
    "tempered": f"variational LoRA with dropout, the KL times {_TEMPERATURE:g}: no bound",
    "tempered-mean": "the same, mean weights",
}
_HEADS = {"full": "All 100 queries of an intent", "few": "Ten of an intent"}
_DRAWN = "lora", "temperature", "mc-dropout", "widened", "last-layer", "variational", "tempered"
REPORTED = """
| BERT-base, full (uncertainty-baselines) | accuracy | nll | ECE | AUROC |
|---|---|---|---|---|
| maximum likelihood | 96.5 | 0.186 | 0.0218 | 0.942 |
| MC dropout | 96.5 | 0.171 | 0.0170 | 0.951 |
| ensemble of 10 | 97.5 | 0.169 | 0.0128 | 0.958 |
| SNGP | 96.9 | 0.139 | 0.0104 | 0.969 |
"""


def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
    """Return the methods with all queries for each seed, then those with few; one ensemble."""
    methods = "lora", "variational", "last-layer", "tempered"
    made = [_job(each, size, seed, quick) for size in SIZES for seed in seeds for each in methods]
    return [*made, *(_job("ensemble", size, seeds[0], quick) for size in SIZES)]


def _job(method: str, size: str, seed: int, quick: bool) -> Job:
    tuned = METHODS["lora" if method == "ensemble" else method]
    settings = tuned.settings(tuned.chosen, size)
    if quick:
        settings = {**settings, "epochs": 1}
    config = {"size": size, "samples": 2 if quick else SAMPLES, "settings": settings}
    seconds = 5.0 if quick else _SECONDS[method] * (1.0 if size == "full" else 0.6)
    return Job(f"{method}-{size}", seed, config, seconds, ("clinc150",))


def run(job: Job, context: Context) -> dict[str, Any]:
    """Train one method and measure it on the test part, in each way in which it predicts.

    Returns:
        The results of ``measured`` by the names of ``TITLES``, and ``train_seconds``.
    """
    method = job.name.rpartition("-")[0]
    settings, samples = job.config["settings"], job.config["samples"]
    quick = samples < SAMPLES
    data = data_of(context, SIZES[job.config["size"]], quick=quick)
    if method == "last-layer":
        predict, seconds = last_layer_of(settings, data, job.seed, context)
        return {method: _both(predict, data), "train_seconds": seconds}
    count = 3 if method == "ensemble" else 1
    # No member of an ensemble is a network of another row.
    seeds = [job.seed + 1000 * (number + 1) for number in range(count)] if count > 1 else [job.seed]
    trained = [
        adapter_of(settings, data, seed, context.part(f"adapter-{number}", number, count))
        for number, seed in enumerate(seeds)
    ]
    bnn, seconds = trained[0][0], sum(each for _, each in trained)
    if method == "ensemble":
        rows = {method: _both(DeepEnsemble([each for each, _ in trained]).predict, data)}
    elif settings["method"] == "variational":
        rows = {
            method: _both(partial(bnn.predict, num_samples=samples), data),
            f"{method}-mean": _both(bnn.predict_mean, data),
        }
    else:
        rows = _point_rows(bnn, data, samples)
    return {**rows, "train_seconds": seconds}


def _point_rows(bnn: BayesianModule, data: Data, samples: int) -> dict[str, Any]:
    """Measure the ways in which one adapter of maximum likelihood predicts."""
    from bayesify.adapters import widen

    near, far = timed(bnn.predict_mean, data.test), timed(bnn.predict_mean, data.outside_test)
    held_out = timed(bnn.predict_mean, data.validation).log_probs
    temperature = logit_temperature(held_out, data.validation.targets)
    targets = data.test.targets
    scaled = measured(_scaled(near, temperature), _scaled(far, temperature), targets)
    dropout = MCDropout(bnn, seed=bnn.seed)
    some = data.validation.first(_WIDENED_BY)
    order = some.mask.sum(1).argsort()
    loader = [{**some.rows(index), "labels": some.targets[index]} for index in order.split(100)]
    begun = time.perf_counter()
    net: Any = bnn.to_module()
    wide = widen(net, loader, _TOLERANCE, num_samples=samples, output=None, seed=bnn.seed)
    widened = time.perf_counter() - begun
    return {
        "lora": measured(near, far, targets),
        "temperature": {**scaled, "temperature": temperature},
        "mc-dropout": _both(partial(dropout.predict, num_samples=samples), data),
        "widened": {
            **_both(partial(wide.predict, num_samples=samples), data),
            "widening_seconds": widened,
        },
    }


def _scaled(prediction: Prediction, temperature: float) -> Prediction:
    logs = torch.log_softmax(prediction.log_probs / temperature, -1)
    return prediction._replace(log_probs=logs)


def _both(predict: Predict, data: Data) -> dict[str, Any]:
    return measured(timed(predict, data.test), timed(predict, data.outside_test), data.test.targets)


def table(results: Sequence[Result]) -> str:
    """Return a table for each size of the training part, and what others reported."""
    one = "; the ensemble is one" if any("ensemble" in r["metrics"] for r in results) else ""
    parts = [
        f"MiniLM-L6 with 22.7 million weights, {SAMPLES} weight samples or dropout masks. Accuracy "
        "in percent, nll in nats, calibration error with 15 bins; AUROC of 1,000 queries outside "
        f"of all intents. Mean +- standard error over the seeds{one}. Seconds on one core, of "
        f"training and of 5,500 predictions, under a mean load of {_load(results)}: no "
        "timings of a quiet machine; rows of a GPU have none.\n"
    ]
    heads = (
        "method",
        "seeds",
        "accuracy",
        "nll",
        "ECE",
        "AUROC, mutual information",
        "AUROC, entropy",
        "AUROC, largest probability",
        "training",
        "prediction",
    )
    for size, title in _HEADS.items():
        lines = table_head(f"| {' | '.join(heads)} |")
        for name, label in TITLES.items():
            of_size = _of_size(results, size, name)
            if of_size:
                lines.append(f"| {label} | {' | '.join(_cells(name, of_size))} |")
        if len(lines) > 2:
            parts.append(f"{title}:\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts) + REPORTED


def _is_on_cpu(result: Result) -> bool:
    # ``hardware`` names a GPU before the CPU.
    return ";" not in result.get("hardware", "")


def _load(results: Sequence[Result]) -> str:
    on_cpu = [result for result in results if _is_on_cpu(result)]
    loads = [result["load"] for result in on_cpu if result.get("load") is not None]
    return f"{mean(loads):.1f}" if loads else "unknown size"


def _of_size(results: Sequence[Result], size: str, name: str) -> list[Mapping[str, Any]]:
    return [
        {**result["metrics"], "on_cpu": _is_on_cpu(result)}
        for result in results
        if result["config"]["size"] == size and name in result["metrics"]
    ]


def _cells(name: str, metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [each[name] for each in metrics]
    shown = [
        mean_and_error([row[score] for row in rows], digits)
        for score, digits in (("accuracy", 2), ("nll", 4), ("ece", 4))
    ]
    for score in ("mutual_information", "entropy", "max_probability"):
        values = [row["auroc"][score] for row in rows]
        # Point predictions have no mutual information, so that its AUROC is that of chance.
        none = score == "mutual_information" and all(value == 0.5 for value in values)
        shown.append("-" if none else mean_and_error(values, 4))
    timed = [(each["train_seconds"], each[name]["seconds"]) for each in metrics if each["on_cpu"]]
    seconds = [f"{mean(column):,.0f}" for column in zip(*timed, strict=True)] or ["", ""]
    return [str(len(rows)), *shown, *seconds]


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """Draw the nll over the AUROC of what lies outside, a point for each run."""
    from bayesify.plots.compared import Curve, curves_compared

    panels: dict[str, list[Curve]] = {}
    for size, title in _HEADS.items():
        for name in _DRAWN:
            rows = [metrics[name] for metrics in _of_size(results, size, name)]
            if rows:
                aurocs = [row["auroc"]["entropy"] for row in rows]
                curve = Curve(TITLES[name], aurocs, [[row["nll"] for row in rows]], points=True)
                panels.setdefault(title, []).append(curve)
    if not panels:
        return {}
    xlabel = "AUROC by entropy, outside of all intents"
    return {"clinc150": curves_compared(panels, xlabel=xlabel, ylabel="test nll (nats)")}


EXPERIMENT = Experiment(
    name="clinc150",
    source="CLINC150 (Larson et al. 2019), with rows that uncertainty-baselines report of BERT",
    reported="accuracy, nll, calibration error and AUROC of queries outside of all intents",
    seeds=(0, 1, 2),
    memory_mb=2500,
    jobs=jobs,
    run=run,
    table=table,
    figures=figures,
    on_gpu=True,
)
