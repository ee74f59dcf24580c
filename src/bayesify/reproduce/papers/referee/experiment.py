"""Approximate posteriors compared with Hamiltonian Monte Carlo on the same small models.

Each job stores its predictive distribution of the test inputs, as class probabilities or quantiles;
the distances are computed from the stored ones. So jobs are independent of each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save

from bayesify import metrics as of
from bayesify.io import atomic_write
from bayesify.noise.keys import Stream, derived_seed
from bayesify.prediction import CategoricalPredictive, GaussianPredictive, Predictive
from bayesify.referee import PosteriorDraws, hmc
from bayesify.reproduce.harness.experiment import Context, Experiment, Job, Result
from bayesify.reproduce.harness.markdown import table_head
from bayesify.reproduce.harness.seed_statistics import mean_and_error
from bayesify.reproduce.papers.referee.contestants import CONTESTANTS, PROTOCOL, SETTINGS
from bayesify.reproduce.papers.referee.problems import (
    PRIOR_GAIN,
    PROBLEMS,
    Problem,
    load_problem,
    make_network,
    random_network,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "EXPERIMENT",
    "MEAN_FIELDS",
    "REFEREE",
    "R_HAT_LIMIT",
    "by_contestant",
    "relative_distances",
]

#: Name of the referee's jobs, files and rows.
REFEREE = "hmc"
#: Chains agree where R-hat is below this for every prediction.
R_HAT_LIMIT = 1.05
_SAMPLER: dict[str, Any] = {"chains": 4, "warmup": 1000, "samples": 1000, "max_tree_depth": 9}
_LEVEL, _QUANTILES, _DIGITS = 0.9, 50, 5
#: Draws of the referee whose mixture is stored; quantiles of all would take minutes.
_MOST_DRAWS = 1000
_QUICK_PROBLEMS = ("toy", "yacht")
_QUICK_CONTESTANTS = ("mean-field-local", "low-rank", "full", "plain", "ensemble")
_QUICK: dict[str, Any] = {"steps": 200, "test_samples": 50, "members": 2}
_QUICK_SAMPLER: dict[str, Any] = {"chains": 2, "warmup": 30, "samples": 30, "max_tree_depth": 5}
_SECONDS = {"toy": 60.0, "yacht": 300.0, "energy": 600.0, "concrete": 900.0, "mnist-160": 1200.0}


def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
    """Return a job for each problem and contestant; the referee has the first of a problem."""
    made = []
    for seed in seeds:
        for problem, settings in PROBLEMS.items():
            if quick and problem not in _QUICK_PROBLEMS:
                continue
            datasets = () if settings["dataset"] is None else (settings["dataset"],)
            for name in (REFEREE, *(_QUICK_CONTESTANTS if quick else CONTESTANTS)):
                own = _QUICK_SAMPLER if quick else _SAMPLER
                if name != REFEREE:
                    own = {**PROTOCOL, **SETTINGS.get(name, {}), **(_QUICK if quick else {})}
                config = {
                    "problem": problem,
                    "contestant": name,
                    "prior_gain": PRIOR_GAIN,
                    **settings,
                    **own,
                }
                seconds = _SECONDS[problem] if name == REFEREE else 30.0
                made.append(
                    Job(f"{problem}-{name}", seed, config, 5.0 if quick else seconds, datasets)
                )
    return made


def run(job: Job, context: Context) -> dict[str, Any]:
    """Sample or train, and measure on the test part."""
    problem, config = load_problem(job.config, context), job.config
    if config["contestant"] != REFEREE:
        contestant = CONTESTANTS[config["contestant"]]
        return _measured(contestant(problem, config, job.seed, context), problem)
    draws = _sample(problem, config, job.seed, context)
    count = min(_MOST_DRAWS, draws.weights[..., 0].numel())
    found = _measured(draws.predict(problem.test_inputs, count), problem)
    r_hat, inputs = draws.r_hat(problem.test_inputs), problem.test_inputs
    chains = [_stored(part.predict(inputs, count // 2), problem) for part in draws.halves()]
    return found | {
        "r_hat_max": float(r_hat.max()),
        "r_hat_mean": float(r_hat.mean()),
        "ess_min": float(draws.effective_sample_size(inputs).min()),
        "divergences": int(draws.divergences.sum()),
        "acceptance": float(draws.acceptance.mean()),
        "steps_a_draw": float(draws.num_steps.double().mean()),
        "between_halves": _distances(*chains, numeric=problem.is_numeric),
    }


def _sample(
    problem: Problem, config: Mapping[str, Any], seed: int, context: Context
) -> PosteriorDraws:
    """Run the chains; each that is finished is kept in the job's folder until the job is done."""
    bnn = random_network(make_network(problem, config, seed), config, seed=seed)
    chains = []
    for chain in range(config["chains"]):
        part = context.part(f"chain-{chain}", chain, config["chains"])
        path = None if context.work is None else context.work / f"chain-{chain}.safetensors"
        if path is not None and path.exists():
            chains.append(PosteriorDraws.of_state(bnn, load_file(path)))
            continue
        draws = hmc(
            bnn,
            (problem.train_inputs, problem.train_targets),
            num_chains=1,
            num_warmup=config["warmup"],
            num_samples=config["samples"],
            max_tree_depth=config["max_tree_depth"],
            seed=derived_seed(seed, Stream.TRAINING, chain),
            on_progress=part.on_progress,
        )
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, save(draws.state()))
        chains.append(draws)
    return PosteriorDraws.joined(chains)


def _measured(predictive: Predictive, problem: Problem) -> dict[str, Any]:
    """Return test metrics, in the target's unit, and the stored predictive distribution."""
    targets = problem.test_targets
    if isinstance(predictive, GaussianPredictive):
        wide = _in_units(predictive, problem)
        found = {
            "nll": -float(wide.log_prob(targets).mean()),
            "rmse": float((wide.mean - targets).square().mean().sqrt()),
            "width_90": of.interval_width(wide, _LEVEL),
        }
    else:
        assert isinstance(predictive, CategoricalPredictive)
        log_probs = predictive.log_mean.double()
        found = {
            "nll": of.nll(log_probs, targets),
            "error": of.error_percent(log_probs.exp(), targets),
        }
    rounded = [
        [float(f"{value:.{_DIGITS}g}") for value in row] for row in _stored(predictive, problem)
    ]
    return {**found, "prediction": rounded}


def _stored(predictive: Predictive, problem: Problem) -> list[list[float]]:
    """Return class probabilities (N, K), or quantiles of each example (N, Q)."""
    if isinstance(predictive, GaussianPredictive):
        grid = of.quantile_grid(_in_units(predictive, problem), _QUANTILES)
        return [list(row) for row in grid.flatten(1).T.tolist()]
    return [list(row) for row in predictive.mean.double().tolist()]


def _in_units(predictive: GaussianPredictive, problem: Problem) -> GaussianPredictive:
    wide = GaussianPredictive(predictive.means.double(), predictive.noise_std.double())
    return wide.rescaled(problem.shift, problem.scale)


def _distances(
    prediction: Sequence[Sequence[float]], referee: Sequence[Sequence[float]], *, numeric: bool
) -> dict[str, float]:
    """Return the distances of two stored predictive distributions."""
    one, other = torch.tensor(prediction).double(), torch.tensor(referee).double()
    if numeric:  # the distance of sorted quantiles of equal weight is that of the distributions
        return {"wasserstein": float((one - other).abs().mean())}
    return {
        "agreement": of.agreement(one, other),
        "total_variation": of.total_variation(one, other),
    }


#: One posterior by two estimators, whose nearer one is what others are compared with.
MEAN_FIELDS = "mean-field-sampling", "mean-field-local"
_AGAINST = "distance, against the nearer mean field"


def by_contestant(
    results: Sequence[Result], problem: str
) -> dict[str, dict[int, Mapping[str, Any]]]:
    """Return the metrics of a problem by contestant and seed, with distances where known.

    Args:
        results: stored results of the experiment.
        problem: one of ``PROBLEMS``.

    Example:
        >>> by_contestant([], "toy")
        {}
    """
    own = [result for result in results if result["config"]["problem"] == problem]
    numeric = PROBLEMS[problem]["noise_std"] is not None
    referees = {
        result["seed"]: result["metrics"]
        for result in own
        if result["config"]["contestant"] == REFEREE
    }
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for name in (REFEREE, *CONTESTANTS):
        for result in own:
            if result["config"]["contestant"] != name:
                continue
            measured, referee = result["metrics"], referees.get(result["seed"])
            if name == REFEREE:
                measured = {**measured, **measured["between_halves"]}
            elif referee is not None:
                pair = measured["prediction"], referee["prediction"]
                measured = {**measured, **_distances(*pair, numeric=numeric)}
            found.setdefault(name, {})[result["seed"]] = measured
    return found


#: Columns of the tables: the metric, its title and digits.
_NUMBERS = (
    ("nll", "test nll (nats)", 3),
    ("rmse", "test RMSE", 3),
    ("width_90", "width of 90 % intervals", 2),
    ("wasserstein", "Wasserstein-1 to HMC", 3),
)
_CLASSES = (
    ("nll", "test nll (nats)", 3),
    ("error", "test error (%)", 1),
    ("agreement", "agreement with HMC (%)", 1),
    ("total_variation", "total variation to HMC", 3),
)


def table(results: Sequence[Result]) -> str:
    """Return a table for each problem, and whether the chains of the referee agree."""
    lines = [
        "Predictive distributions of the test part compared with those of Hamiltonian Monte Carlo "
        "on the same model; +- is the standard error over seeds, which all have the same training "
        "and test part, so that it leaves out the choice of these. Numbers are in the unit of the "
        "target. In the row of HMC the distance is between two halves of its chains: what is not "
        "well above it is not distinguished from HMC. The last column compares with the mean field "
        "on the seeds that a contestant has.",
    ]
    for problem, settings in PROBLEMS.items():
        columns = _CLASSES if settings["noise_std"] is None else _NUMBERS
        found = by_contestant(results, problem)
        if not found:
            continue
        units = "x".join(map(str, settings["hidden"]))
        lines += ["", f"**{problem}**, hidden units {units}", ""]
        lines += table_head(f"| | {' | '.join(title for _, title, _ in columns)} | {_AGAINST} |")
        changes = _changes(found, columns[-1][0])
        for name, by_seed in found.items():
            cells = [
                mean_and_error([each[key] for each in by_seed.values() if key in each], digits)
                for key, _, digits in columns
            ]
            lines.append(f"| {name} | {' | '.join(cells)} | {changes.get(name, '')} |")
        lines += ["", _convergence(found.get(REFEREE, {}))]
    return "\n".join(lines) + "\n"


def relative_distances(
    found: Mapping[str, Mapping[int, Mapping[str, Any]]], key: str
) -> dict[str, float]:
    """Return each contestant's distance, over that of the nearer mean field on the same seeds.

    Args:
        found: the metrics of a problem by contestant and seed, see :func:`by_contestant`.
        key: name of the distance.

    Example:
        >>> found = {name: {0: {"d": 2.0}, 1: {"d": 4.0}} for name in MEAN_FIELDS}
        >>> relative_distances({**found, "full": {1: {"d": 3.0}}}, "d")["full"]
        0.75
    """
    distances = {
        name: {seed: each[key] for seed, each in by_seed.items() if key in each}
        for name, by_seed in found.items()
        if name != REFEREE
    }
    ratios = {}
    for name, own in distances.items():
        known = [distances[each] for each in MEAN_FIELDS if each in distances]
        nearer = [
            mean(each[seed] for seed in own) for each in known if own and own.keys() <= each.keys()
        ]
        if nearer:
            ratios[name] = mean(own.values()) / min(nearer)
    return ratios


def _changes(found: Mapping[str, Mapping[int, Mapping[str, Any]]], key: str) -> dict[str, str]:
    return {
        name: f"{100.0 * (ratio - 1.0):+.0f} %"
        for name, ratio in relative_distances(found, key).items()
    }


def _convergence(referee: Mapping[int, Mapping[str, Any]]) -> str:
    if not referee:
        return "HMC has not been run."
    worst = max(each["r_hat_max"] for each in referee.values())
    verdict = "the chains agree" if worst < R_HAT_LIMIT else "the chains do not agree"
    return (
        f"HMC: {verdict}, largest R-hat of a prediction {worst:.3f} (limit {R_HAT_LIMIT}), least "
        f"effective sample size {min(each['ess_min'] for each in referee.values()):.0f}, "
        f"{sum(each['divergences'] for each in referee.values())} divergences, "
        f"{max(each['steps_a_draw'] for each in referee.values()):.0f} steps a draw."
    )


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """Draw the distance of each contestant to the referee, a panel for each problem.

    The grey band ends at the distance between two halves of the referee's own draws.
    """
    from bayesify.plots.rows import Panel, rows_figure

    panels = []
    for problem, settings in PROBLEMS.items():
        numeric = settings["noise_std"] is not None
        key = "wasserstein" if numeric else "total_variation"
        found = {
            name: [each[key] for each in by_seed.values() if key in each]
            for name, by_seed in by_contestant(results, problem).items()
        }
        floor = found.pop(REFEREE, [])
        shown = {name: values for name, values in found.items() if values}
        if shown and floor:
            label = (
                "Wasserstein-1 to HMC (unit of the target)" if numeric else "total variation to HMC"
            )
            panels.append(Panel(problem, label, shown, sum(floor) / len(floor)))
    return {"referee": rows_figure(panels)} if panels else {}


EXPERIMENT = Experiment(
    name="referee",
    source="Izmailov, Vikram, Hoffman and Wilson (2021), as a method: HMC as the reference",
    reported="nothing: the distance of approximate posteriors to HMC on small networks",
    seeds=(0, 1, 2),
    memory_mb=1500,
    jobs=jobs,
    run=run,
    table=table,
    figures=figures,
)
