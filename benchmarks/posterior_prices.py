"""The price of each posterior next to its distance to Hamiltonian Monte Carlo.

python benchmarks/posterior_prices.py           two minutes
python benchmarks/posterior_prices.py --show    only writes the table in docs/which-posterior.md

Steps of training are timed in turns, on two networks, and their memory is counted. Rounds in which
others use the CPU are taken again; run it on a machine that does nothing else. The distances
are those of ``bayesify reproduce referee``. Results go to results/posterior-prices.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from pages import DOCS, insert
from records import RESULTS, commit, require_clean_tree, store_rows, stored

import bayesify as bf
from bayesify.app.bench.cases import NUM_DATA, Case, perceptron
from bayesify.app.bench.contestants import Contestant, Step, make_optimizer
from bayesify.app.bench.disturbance import is_unsteady
from bayesify.app.bench.step_memory import built_with_peak
from bayesify.app.bench.timing import Entrant, Turn, spread, take_turns
from bayesify.reproduce import read_results
from bayesify.reproduce.papers.referee.experiment import by_contestant, relative_distances
from bayesify.reproduce.papers.referee.problems import PROBLEMS

NAME, SET, BATCH = "posterior-prices", "steps", 128
CASES = {"8-40-40-10": perceptron("table", 40, inputs=8), "784-400-400-10": perceptron("net", 400)}
PLAIN = "plain network"


@dataclass(frozen=True)
class Family:
    """A posterior, or what is used in the place of one.

    Args:
        stored: its name in the results of the referee, or None.
        options: of ``BayesianModule``; None for a plain network.
        ivon: whether IVON trains it.
        networks: how many are trained, each at the price of one.
        most: the largest number of weights, or None.
    """

    stored: str | None
    options: Mapping[str, Any] | None = field(default_factory=dict)
    ivon: bool = False
    networks: int = 1
    most: int | None = None


_LOCAL = {"estimator": bf.LocalReparameterization()}
_LOW_RANK = {"posterior": bf.LowRankGaussian(10), **_LOCAL}
_BY_LAYER = {"posterior": bf.MatrixGaussian()}
FAMILIES = {
    PLAIN: Family("plain", None),
    "MC dropout": Family("mc-dropout", None),
    "ensemble of 5 plain networks": Family("ensemble", None, networks=5),
    "mean field": Family("mean-field-sampling"),
    "mean field, local reparametrisation": Family("mean-field-local", _LOCAL),
    "IVON, local reparametrisation": Family("mean-field-ivon", _LOCAL, ivon=True),
    "low rank 10, local reparametrisation": Family("low-rank", _LOW_RANK),
    "by layer": Family("matrix", _BY_LAYER),
    "full covariance": Family("full", {"posterior": bf.FullGaussian()}, most=3000),
    "mixture of 5 mean fields, local reparametrisation": Family(
        "mean-field-mixture", _LOCAL, networks=5
    ),
    "mixture of 5 by layer": Family("matrix-mixture", _BY_LAYER, networks=5),
}


def build(case: Case, family: Family) -> Step:
    """Return a function that makes one step, as ``fit`` makes it."""
    (inputs, targets), net = case.data(BATCH), case.net()
    if family.options is None:
        adam = make_optimizer("adam", net.parameters())

        def step() -> None:
            adam.zero_grad(set_to_none=True)
            F.cross_entropy(net(inputs), targets).backward()
            adam.step()

        return step
    bnn = bf.BayesianModule(net, prior=bf.Gaussian(0.1), **family.options)
    elbo = bf.ELBO(bnn, num_data=NUM_DATA)
    optimizer: Any = bf.IVON(elbo, lr=1e-6) if family.ivon else None
    made = optimizer or make_optimizer("adam", elbo.parameters())
    train = bf.make_step(elbo, made)
    return lambda: train(inputs, targets) and None


def measure(name: str, rounds: int) -> list[dict[str, Any]]:
    """Time the families in turns on one network, one row each."""
    case = CASES[name]
    weights = sum(parameter.numel() for parameter in case.net().parameters())
    entrants: dict[str, Entrant] = {}
    for label, family in FAMILIES.items():
        # What differs in the number of networks only, or in dropout, has no time of its own.
        is_own = family.networks == 1 and family.stored != "mc-dropout"
        if not is_own or weights > (family.most or math.inf):
            continue
        step, peak = built_with_peak(partial(build, case, family), warmup=2)
        contestant = Contestant(label, "none", "none", partial(build, case, family))
        entrants[label] = Entrant(contestant, step, peak)
    begun = time.perf_counter()
    entrants[PLAIN].step()
    turn = Turn.for_steps_of(time.perf_counter() - begun)
    take_turns(list(entrants.values()), rounds=rounds, turn=turn)
    plain = entrants[PLAIN]
    median = statistics.median(plain.times)
    return [
        {
            "network": name,
            "family": label,
            "ms_median": statistics.median(each.times),
            "ms_iqr": spread(each.times),
            "ratio": statistics.median(each.times) / median,
            "bytes": each.peak,
            "memory": each.peak / plain.peak,
            "disturbed": bool(each.disturbed) or is_unsteady(median, spread(plain.times)),
        }
        for label, each in entrants.items()
    ]


def distances() -> dict[str, list[float]]:
    """Return each family's distances to HMC, relative to the nearer mean field's, by problem."""
    results = read_results(RESULTS / "referee")
    found: dict[str, list[float]] = {label: [] for label in FAMILIES}
    for problem, settings in PROBLEMS.items():
        key = "total_variation" if settings["noise_std"] is None else "wasserstein"
        ratios = relative_distances(by_contestant(results, problem), key)
        for label, family in FAMILIES.items():
            if family.stored in ratios:
                found[label].append(ratios[family.stored])
    return found


def _prices(key: str) -> dict[tuple[str, str], float]:
    """Return a number of each family by network: of several networks the sum."""
    rows = stored(NAME, SET, {})["metrics"]["rows"]
    own = {(row["network"], row["family"]): row[key] for row in rows}
    found = dict(own)
    for name in CASES:
        for label, family in FAMILIES.items():
            one = next(o for o, e in FAMILIES.items() if e.networks == 1 and _is_alike(e, family))
            if (name, label) not in own and (name, one) in own:
                found[name, label] = own[name, one] * (family.networks if key == "ratio" else 1)
    return found


def _is_alike(one: Family, other: Family) -> bool:
    return one.options == other.options and one.ivon == other.ivon


def table() -> str:
    """Return price and distance of each family, and what follows from the numbers."""
    ratios, memory, far = _prices("ratio"), _prices("memory"), distances()
    sets = max(map(len, far.values()))
    small, large = CASES
    lines = [
        f"| | a step, {small} | a step, {large} | memory | distance to HMC | nearer than a "
        "mean field |",
        "|---|---|---|---|---|---|",
    ]
    for label in FAMILIES:
        cells = [f"{ratios[n, label]:.1f}" if (n, label) in ratios else "" for n in CASES]
        own = memory.get((large, label), memory.get((small, label)))
        cells.append("" if own is None else f"{own:,.1f}")
        known = far[label]
        cells.append(f"{statistics.geometric_mean(known):.2f}" if known else "")
        cells.append(f"{sum(each < 1.0 for each in known)} of {len(known)}" if known else "")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", _sentences(ratios, far, sets)])


def _sentences(
    ratios: Mapping[tuple[str, str], float], far: Mapping[str, list[float]], sets: int
) -> str:
    """Return the nearest families in words, with their prices."""
    small = next(iter(CASES))
    random = [label for label, each in FAMILIES.items() if each.options is not None]
    mean = {label: statistics.geometric_mean(far[label]) for label in random if far[label]}
    one = [label for label in mean if FAMILIES[label].networks == 1]
    parts = []
    of_one = "Of those of one network, with one weight sample a step"
    for group, what in ((list(mean), "Of all posteriors"), (one, of_one)):
        best = min(group, key=mean.__getitem__)
        parts.append(
            f"{what}, *{best}* is nearest to HMC in the mean over {sets} problems: "
            f"{100.0 * (1.0 - mean[best]):.0f} % nearer than the mean field, at "
            f"{ratios[small, best]:.1f} times a step of the plain network ({small})."
        )
    points = [label for label, each in FAMILIES.items() if each.options is None and far[label]]
    if points:
        best = min(points, key=lambda label: statistics.geometric_mean(far[label]))
        share = statistics.geometric_mean(far[best])
        parts.append(
            f"Without a posterior, *{best}* is {100.0 * (1.0 - share):.0f} % nearer, at "
            f"{ratios[small, best]:.1f} times."
        )
    worse = [label for label in mean if mean[label] > 1.0]
    if worse:
        parts.append(f"Farther than the nearer mean field: {'; '.join(worse)}.")
    cheap = min(one, key=lambda label: ratios[small, label])
    parts.append(f"The cheapest posterior is *{cheap}*.")
    return " ".join(parts)


def main() -> None:
    """Measure, store and show."""
    require_clean_tree()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="only write the table")
    arguments = parser.parse_args()
    if not arguments.show:
        torch.set_num_threads(arguments.threads)
        config = {"rounds": arguments.rounds, "threads": arguments.threads, "batch": BATCH}
        document = stored(NAME, SET, config)
        document |= {"config": {"set": SET, **config}, "commit": commit()}
        document |= {"metrics": {"rows": []}, "seconds": 0.0}
        started = time.perf_counter()
        rows = [row for name in CASES for row in measure(name, arguments.rounds)]
        if any(row["disturbed"] for row in rows):
            raise SystemExit("the machine was not quiet, so that nothing is stored; run it again")
        store_rows(document, rows, time.perf_counter() - started)
    insert(DOCS / "which-posterior.md", NAME, table())
    print(table())


if __name__ == "__main__":
    main()
