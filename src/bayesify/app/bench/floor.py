"""Measure a lower bound for the time of a step with weight sampling, compiled or in one's own loop.

Its parts are the forward and backward pass, and the memory traffic and the noise of each weight; in
a loop of one's own also the optimiser's step, on mean and rho.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F

from bayesify.app.bench.cases import Case
from bayesify.app.bench.contestants import OWN_LOOP, Contestant, Step, bayesian, make_optimizer
from bayesify.training.kernel.formulas import prior_blocks
from bayesify.training.kernel.interface import Recipe, Vectors
from bayesify.training.kernel.native import NativeKernel

__all__ = ["FLOOR", "floor_contestants", "floor_ms", "has_floor"]

FLOOR = "floor"
#: Vectors of the optimizer's state, for mean and rho together.
_MOMENTS = {"adam": 4, "sgd": 2, "ivon": 2}
#: The optimizers of PyTorch, whose step in a loop of one's own is timed itself.
_OWN = ("adam", "sgd")
#: Weights whose noise is timed, few enough for the cache of a CPU core.
_FEW = 65_536


def floor_contestants(case: Case, batch: int) -> list[Contestant]:
    """Return the parts, to be timed in turns with the contestants.

    Example:
        >>> from bayesify.app.bench.cases import CASES
        >>> sorted({each.estimator for each in floor_contestants(CASES["mlp-400"], 128)})
        ['noise', 'own traffic', 'passes', 'traffic', 'traffic of the noise', 'update']
    """
    weights = bayesian(case).layout.num_weights
    parts = [
        Contestant(FLOOR, "passes", "none", partial(_passes, case, batch)),
        Contestant(FLOOR, "noise", "none", partial(_noise, case)),
        Contestant(FLOOR, "traffic of the noise", "none", _small_traffic),
    ]
    parts += [
        Contestant(FLOOR, "traffic", name, partial(_traffic, weights, moments))
        for name, moments in _MOMENTS.items()
    ]
    parts.append(Contestant(FLOOR, "own traffic", "none", partial(_own_traffic, weights)))
    return parts + [
        Contestant(FLOOR, "update", name, partial(_update, weights, name)) for name in _OWN
    ]


def has_floor(contestant: Contestant) -> bool:
    """Return whether a floor is known for a contestant's step.

    Example:
        >>> has_floor(Contestant("compiled", "flipout", "adam", lambda: lambda: None))
        False
    """
    kinds = {"compiled": tuple(_MOMENTS), OWN_LOOP: _OWN}
    of = kinds.get(contestant.path, ())
    return contestant.estimator == "sampling" and contestant.optimizer in of


def floor_ms(
    times: Mapping[tuple[str, str], float], contestant: Contestant, num_weights: int
) -> dict[str, float]:
    """Return the floor of a step, from the parts' times by name and optimizer, in ms.

    It is empty where a part was not measured.

    Example:
        >>> times = {("passes", "none"): 2.0, ("noise", "none"): 0.3, ("traffic", "adam"): 1.0,
        ...          ("traffic of the noise", "none"): 0.1}
        >>> step = Contestant("compiled", "sampling", "adam", lambda: lambda: None)
        >>> floor_ms(times, step, num_weights=5 * 65_536)["floor_ms"]
        4.0
    """
    in_own_loop = contestant.path == OWN_LOOP
    traffic = ("own traffic", "none") if in_own_loop else ("traffic", contestant.optimizer)
    update = {"update": ("update", contestant.optimizer)} if in_own_loop else {}
    named = {"passes": ("passes", "none"), "traffic": traffic, **update}
    noise, its_traffic = ("noise", "none"), ("traffic of the noise", "none")
    if not {*named.values(), noise, its_traffic} <= times.keys():
        return {}
    parts = {f"floor_{name}_ms": times[part] for name, part in named.items()}
    drawn = max(0.0, times[noise] - times[its_traffic])
    parts["floor_noise_ms"] = drawn * num_weights / _FEW
    return {"floor_ms": sum(parts.values()), **parts}


def _passes(case: Case, batch: int) -> Step:
    (inputs, targets), net = case.data(batch), case.net()

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


def _own_traffic(weights: int) -> Step:
    mean, rho, leaf, gradient, in_rho = (torch.ones(weights) for _ in range(5))

    def step() -> None:
        # Sample; then turn the gradient into that in rho, while that in the mean stays in place.
        torch.add(mean, rho, out=leaf)
        torch.addcmul(gradient, leaf, rho, out=in_rho)

    return step


def _update(weights: int, optimizer: str) -> Step:
    posterior = [torch.zeros(weights, requires_grad=True) for _ in range(2)]
    for vector in posterior:
        vector.grad = torch.ones(weights)
    made = make_optimizer(optimizer, posterior)

    def step() -> None:
        made.step()

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
