"""Measure a lower bound for the time of a compiled step with weight sampling.

Its parts are the forward and backward pass, and the memory traffic and the noise of each weight.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from bayesify.app.bench.cases import Case
from bayesify.app.bench.contestants import Contestant, Step, bayesian
from bayesify.training.kernel.formulas import prior_blocks
from bayesify.training.kernel.interface import Recipe, Vectors
from bayesify.training.kernel.native import NativeKernel

__all__ = ["FLOOR", "floor_contestants", "floor_ms"]

FLOOR = "floor"
#: Vectors of the optimizer's state, for mean and rho together.
_MOMENTS = {"adam": 4, "sgd": 2, "ivon": 2}
#: Weights whose noise is timed, few enough for the cache of a CPU core.
_FEW = 65_536


def floor_contestants(case: Case, batch: int) -> list[Contestant]:
    """Return the parts, to be timed in turns with the contestants.

    Example:
        >>> from bayesify.app.bench.cases import CASES
        >>> [each.estimator for each in floor_contestants(CASES["mlp-400"], 128)]
        ['passes', 'noise', 'traffic of the noise', 'traffic', 'traffic', 'traffic']
    """
    weights = bayesian(case).layout.num_weights
    parts = [
        Contestant(FLOOR, "passes", "none", partial(_passes, case, batch)),
        Contestant(FLOOR, "noise", "none", partial(_noise, case)),
        Contestant(FLOOR, "traffic of the noise", "none", _small_traffic),
    ]
    return parts + [
        Contestant(FLOOR, "traffic", name, partial(_traffic, weights, moments))
        for name, moments in _MOMENTS.items()
    ]


def floor_ms(
    times: dict[tuple[str, str], float], optimizer: str, num_weights: int
) -> dict[str, float]:
    """Return the floor of a compiled step, from the parts' times by name and optimizer, in ms.

    Example:
        >>> times = {("passes", "none"): 2.0, ("noise", "none"): 0.3, ("traffic", "adam"): 1.0,
        ...          ("traffic of the noise", "none"): 0.1}
        >>> floor_ms(times, "adam", num_weights=5 * 65_536)["floor_ms"]
        4.0
    """
    drawn = times["noise", "none"] - times["traffic of the noise", "none"]
    parts = {
        "floor_passes_ms": times["passes", "none"],
        "floor_traffic_ms": times["traffic", optimizer],
        "floor_noise_ms": max(0.0, drawn) * num_weights / _FEW,
    }
    return {"floor_ms": sum(parts.values()), **parts}


def _passes(case: Case, batch: int) -> Step:
    (inputs, targets), net = case.data(batch), case.make_net()

    def step() -> None:
        net.zero_grad(set_to_none=True)
        F.cross_entropy(net(inputs), targets).backward()

    return step


def _traffic(weights: int, moments: int) -> Step:
    gradient, leaf, *others = (torch.ones(weights) for _ in range(4 + moments))

    def step() -> None:
        # Read: gradient, mean, rho and moments. Written: leaf, mean, rho and moments.
        leaf.copy_(gradient)
        for vector in others:
            vector.mul_(1.0)

    return step


def _noise(case: Case) -> Step:
    form = prior_blocks(bayesian(case).weight_prior, "auto")
    assert form is not None
    mean, rho, leaf = (torch.zeros(_FEW) for _ in range(3))
    vectors = Vectors(mean, rho, leaf, (), (), (0, _FEW), None, None)
    recipe = Recipe(form, "adam", leaf="weights", dtype=leaf.dtype)
    return partial(NativeKernel(recipe, vectors, (1, 2)).refresh, 0)


def _small_traffic() -> Step:
    mean, rho, leaf = (torch.zeros(_FEW) for _ in range(3))

    def step() -> None:
        torch.add(mean, rho, out=leaf)

    return step
