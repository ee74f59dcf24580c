"""Figure 6 of Blundell et al. 2015: a contextual bandit that offers mushrooms, to eat or to pass.

Two agents sample their weights from the posterior of Bayes by Backprop (Thompson sampling), one of
them with noise that it learns for each input; three follow a plain network, two of them with random
actions now and then. The paper's agents train on 64 minibatches of 64 after each interaction, drawn
from the last 4,096: 3.2 million a run. Ours train on fewer and larger minibatches drawn from all
interactions, with more of them at the beginning. All agents are trained in the same way. An agent
that has learned hardly eats poisonous mushrooms, so that the last 4,096 interactions would hold too
few of them to learn from.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bayesify import BayesianModule, Delta, Gaussian, GaussianLikelihood
from bayesify.bandits import (
    EpsilonGreedy,
    Learning,
    MushroomBandit,
    Record,
    ThompsonSampler,
    play,
)
from bayesify.datasets import load_mushroom
from bayesify.module.networks import mlp
from bayesify.reproduce.harness.experiment import Context, Experiment, Job, Result
from bayesify.reproduce.harness.markdown import table_head
from bayesify.reproduce.harness.seed_statistics import mean_and_error
from bayesify.training.checkpoint import CHECKPOINT_NAME

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT"]

#: Interactions between two checkpoints; at most so many are lost when a run is killed.
EVERY = 1000
#: Number of last interactions by which an agent is judged.
_LAST = 1000
#: An agent has learned if its regret in these is lower: a quarter of the regret of random actions.
#: Never eating costs half of that, and 5 % of random actions a twentieth.
_LEARNT = 1250.0
_POINTS = 200

PROTOCOL: dict[str, Any] = {
    "interactions": 50_000,
    "hidden": [100, 100],
    "buffer_size": 50_000,
    # As in the paper, the KL is weighted as for at least 4,096 examples, its 64 minibatches of 64.
    "least_data": 4096,
    "batch_size": 128,
    # More minibatches after each of the first 500 interactions, when examples are few.
    "early_interactions": 500,
    "early_updates": 16,
    "updates": 1,
    "reward_scale": 10.0,
    "optimizer": "Adam",
}
#: Settings in which the agents differ, by the names of their jobs.
AGENTS: dict[str, dict[str, Any]] = {
    "bayes-by-backprop": {
        "agent": "Bayes by Backprop",
        "lr": 1e-3,
        "noise_std": 0.1,
        "prior_std": 0.1,
        "init_std": 0.02,
        "act_samples": 2,
    },
    # The rewards of poisonous mushrooms have a std of 20, those of others none.
    "bayes-input-noise": {
        "agent": "Bayes by Backprop, noise by input",
        "lr": 1e-3,
        "min_noise_std": 0.03,
        "prior_std": 0.3,
        "init_std": 0.02,
        "act_samples": 2,
    },
    "greedy": {"agent": "greedy", "lr": 1e-3, "epsilon": 0.0},
    "epsilon-1": {"agent": "1 % epsilon-greedy", "lr": 1e-3, "epsilon": 0.01},
    "epsilon-5": {"agent": "5 % epsilon-greedy", "lr": 1e-3, "epsilon": 0.05},
}
_QUICK = {
    "interactions": 300,
    "hidden": [20, 20],
    "least_data": 200,
    "batch_size": 32,
    "early_interactions": 20,
}
_SECONDS, _QUICK_SECONDS = 110.0, 1.0
#: Cumulative regret after 50,000 interactions in logs of two reimplementations by others.
_OTHERS = (6_700.0, 9_700.0)


def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
    """Return all agents for each seed, with the same mushrooms in the same order."""
    protocol, seconds = ({**PROTOCOL, **_QUICK}, _QUICK_SECONDS) if quick else (PROTOCOL, _SECONDS)
    return [
        Job(name, seed, {**settings, **protocol}, seconds, ("mushroom",))
        for seed in seeds
        for name, settings in AGENTS.items()
    ]


def run(job: Job, context: Context) -> dict[str, Any]:
    """Run one agent, and measure its regret."""
    config = job.config
    data = load_mushroom(context.data_dir, progress=context.on_download)
    steps = config["interactions"]
    tell = context.on_progress
    record = play(
        make_agent(config, data.contexts.shape[1], job.seed),
        MushroomBandit(data, seed=job.seed),
        steps,
        checkpoint=None if context.work is None else context.work / CHECKPOINT_NAME,
        every=EVERY,
        on_progress=None if tell is None else lambda done: _tell(tell, done, steps),
    )
    return measured(record)


def make_agent(
    config: Mapping[str, Any], num_features: int, seed: int
) -> ThompsonSampler | EpsilonGreedy:
    """Return the agent with a job's settings."""
    net, likelihood = _reward_network(config, num_features + 2, seed)
    learning = Learning(
        buffer_size=config["buffer_size"],
        least_data=config["least_data"],
        batch_size=config["batch_size"],
        updates=lambda seen: config[
            "early_updates" if seen <= config["early_interactions"] else "updates"
        ],
        reward_scale=config["reward_scale"],
        optimizer=partial(torch.optim.Adam, lr=config["lr"], fused=True),
        temperature=0.0 if "epsilon" in config else 1.0,
    )
    if "epsilon" in config:
        bnn = BayesianModule(net, likelihood=likelihood, posterior=Delta, seed=seed)
        return EpsilonGreedy(bnn, 2, epsilon=config["epsilon"], learning=learning)
    bnn = BayesianModule(
        net,
        likelihood=likelihood,
        prior=Gaussian(config["prior_std"]),
        init_std=config["init_std"],
        seed=seed,
    )
    return ThompsonSampler(bnn, 2, num_samples=config["act_samples"], learning=learning)


def _reward_network(
    config: Mapping[str, Any], num_inputs: int, seed: int
) -> tuple[nn.Module, GaussianLikelihood]:
    """Return a network for the mean of rewards, and for their noise where it depends on inputs."""
    if "min_noise_std" not in config:
        net = mlp(num_inputs, config["hidden"], 1, seed=seed)
        return net, GaussianLikelihood(std=config.get("noise_std"))
    net = nn.Sequential(mlp(num_inputs, config["hidden"], 2, seed=seed), nn.Unflatten(-1, (1, 2)))
    return net, GaussianLikelihood(input_dependent=True, min_std=config["min_noise_std"])


def measured(record: Record) -> dict[str, Any]:
    """Return the measurements of a run.

    Returns:
        ``regret`` at the end and ``regret_last``, of the last 1,000 interactions;
        ``poisonous_eaten`` in all; ``eaten_last``, in percent of the ``edible`` and of the
        ``poisonous`` of the last 1,000; ``curve`` with ``interactions`` and the ``regret`` there.
    """
    regret = record.regret
    steps = len(regret)
    last = slice(max(0, steps - _LAST), steps)
    before = float(regret[last.start - 1]) if last.start else 0.0
    eaten, poisonous = record.actions == 1, record.best_rewards == 0.0
    at = log_spaced(steps)
    return {
        "regret": float(regret[-1]),
        "regret_last": float(regret[-1]) - before,
        "poisonous_eaten": int((eaten & poisonous).sum()),
        "eaten_last": {
            "edible": _percent(eaten[last], ~poisonous[last]),
            "poisonous": _percent(eaten[last], poisonous[last]),
        },
        "curve": {"interactions": at, "regret": [float(regret[place - 1]) for place in at]},
    }


def log_spaced(steps: int) -> list[int]:
    """At most 200 whole numbers from 1 to ``steps``, evenly spaced in their logarithms.

    Example:
        >>> log_spaced(5), len(log_spaced(50_000)), log_spaced(50_000)[-1]
        ([1, 2, 3, 4, 5], 164, 50000)
    """
    top = math.log(steps)
    return sorted({round(math.exp(top * k / (_POINTS - 1))) for k in range(_POINTS)})


def table(results: Sequence[Result]) -> str:
    """Return the table of regret by agent: over the seeds, of each run, and in the last part."""
    steps = results[0]["config"]["interactions"]
    lines = [
        *table_head(
            f"| | runs | cumulative regret at {steps:,} | median | of each run | in the last 1,000 "
            "| poisonous eaten | of the last 1,000: edible eaten | poisonous eaten | never learnt |"
        ),
        "| Blundell et al. 2015, Figure 6 | 1 | a curve only | | | | | | | |",
        *(f"| others' code, Thompson sampling | 1 | {_regret(r)} | | | | | | | |" for r in _OTHERS),
    ]
    for name, found in _by_agent(results).items():
        regrets = [each["regret"] for each in found]
        cells = [
            str(len(found)),
            mean_and_error(regrets, 0),
            _regret(statistics.median(regrets)),
            ", ".join(map(_regret, regrets)),
            mean_and_error([each["regret_last"] for each in found], 0),
            mean_and_error([each["poisonous_eaten"] for each in found], 0),
            *(
                mean_and_error([e["eaten_last"][k] for e in found], 1) + " %"
                for k in ("edible", "poisonous")
            ),
            str(sum(each["regret_last"] >= _LEARNT for each in found)),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    config = results[0]["config"]
    return (
        "Regret is what the best actions would have got more: 5 for each edible mushroom that is "
        "passed; -5 or 35, each half of the time, for each poisonous one that is eaten. Mean +- "
        "standard error over runs, of which a number is one seed's; an agent that never learnt has "
        f"a regret of {_LEARNT:,.0f} or more in the last 1,000 interactions. All learn alike: "
        f"{config['early_updates']} minibatches of {config['batch_size']} at each of the first "
        f"{config['early_interactions']:,} interactions, then "
        f"{config['updates']}, drawn from all that was seen; in the paper always 64 of 64, from "
        "the last 4,096.\n\n" + "\n".join(lines) + "\n"
    )


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """Draw the cumulative regret over interactions: each run, and the median of each agent."""
    from bayesify.plots.regret import RegretCurves, cumulative_regret

    curves = [
        RegretCurves(
            name,
            found[0]["curve"]["interactions"],
            [each["curve"]["regret"] for each in found],
        )
        for name, found in _by_agent(results).items()
    ]
    return {"mushroom-regret": cumulative_regret(curves)}


def _by_agent(results: Sequence[Result]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {each["agent"]: [] for each in AGENTS.values()}
    for result in sorted(results, key=lambda result: int(result["seed"])):
        found[result["config"]["agent"]].append(result["metrics"])
    return {name: metrics for name, metrics in found.items() if metrics}


def _tell(on_progress: Any, done: int, steps: int) -> None:
    if done % 100 == 0 or done == steps:
        on_progress(done / steps)


def _percent(which: Tensor, among: Tensor) -> float:
    """Return the share of ``among`` that is in ``which``, in percent; 0 of none."""
    return 100.0 * float((which & among).sum()) / max(1, int(among.sum()))


def _regret(value: float) -> str:
    return f"{value:,.0f}"


EXPERIMENT = Experiment(
    name="mushroom",
    source="Blundell et al. 2015, Figure 6",
    reported="a curve only; 6.7k and 9.7k in others' logs; with greedy and epsilon-greedy",
    seeds=tuple(range(10)),
    memory_mb=500,
    jobs=jobs,
    run=run,
    table=table,
    figures=figures,
)
