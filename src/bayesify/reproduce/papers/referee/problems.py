"""Small models and data on which Hamiltonian Monte Carlo can be run until its chains agree."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesify import (
    BayesianModule,
    ByGroup,
    CategoricalLikelihood,
    Gaussian,
    GaussianLikelihood,
    Likelihood,
)
from bayesify.datasets import load_regression, standard_splits
from bayesify.module.networks import mlp
from bayesify.noise.keys import NoiseKey, Stream
from bayesify.reproduce.harness.experiment import Context
from bayesify.reproduce.harness.image_runs import images_of
from bayesify.reproduce.papers.uci import standardised

__all__ = ["PRIOR_GAIN", "PROBLEMS", "Problem", "load_problem", "make_network", "random_network"]

#: The prior's std of a weight is this times 1 / sqrt(inputs of the unit); of a bias it is 1.
PRIOR_GAIN = 2.0
_IMAGES, _TEST_IMAGES, _POOL = 160, 500, 4

#: By problem: hidden units, and the std of the noise of standardised targets (None for classes).
#: The noise is near the error of a trained network; it is the same for every contestant.
PROBLEMS: Mapping[str, dict[str, Any]] = {
    "toy": {"hidden": [20, 20], "noise_std": None, "dataset": None},
    "yacht": {"hidden": [50], "noise_std": 0.1, "dataset": "yacht"},
    "energy": {"hidden": [50], "noise_std": 0.1, "dataset": "energy"},
    "concrete": {"hidden": [50], "noise_std": 0.3, "dataset": "concrete"},
    "mnist-160": {"hidden": [20], "noise_std": None, "dataset": "mnist"},
}


class Problem(NamedTuple):
    """Training and test part, in the units that the network sees.

    ``shift`` and ``scale`` turn a prediction of numbers into the unit of ``test_targets``.
    """

    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    num_outputs: int
    shift: float = 0.0
    scale: float = 1.0

    @property
    def is_numeric(self) -> bool:
        """Whether the targets are numbers, not classes."""
        return self.train_targets.is_floating_point()


def load_problem(config: Mapping[str, Any], context: Context) -> Problem:
    """Load the data of a problem: the first standard split of a table, or classes.

    Example:
        >>> problem = load_problem(PROBLEMS["toy"], Context())
        >>> problem.train_inputs.shape, problem.test_inputs.shape, problem.num_outputs
        (torch.Size([60, 2]), torch.Size([400, 2]), 2)
    """
    name = config["dataset"]
    if name is None:
        return _arcs()
    if name == "mnist":
        data = images_of(context, name, _IMAGES)
        pool = nn.AvgPool2d(_POOL)
        train, test = (
            pool(each.unflatten(-1, (1, *data.image_shape))).flatten(1)
            for each in (data.train_inputs, data.test_inputs[:_TEST_IMAGES])
        )
        return Problem(train, data.train_targets, test, data.test_targets[:_TEST_IMAGES], 10)
    table = load_regression(name, context.data_dir, progress=context.on_download)
    split = standardised(table, standard_splits(len(table.targets), 1))
    return Problem(
        split.train_inputs[:, 0].contiguous(),
        split.train_targets[:, :1].contiguous(),
        split.test_inputs[:, 0].contiguous(),
        split.test_targets[:, :1].contiguous(),
        num_outputs=1,
        shift=float(split.shift[0]),
        scale=float(split.scale[0]),
    )


def make_network(
    problem: Problem,
    config: Mapping[str, Any],
    seed: int,
    *,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Create the network of a problem, with ReLU units."""
    rates = (0.0, dropout) if dropout else None
    num_inputs = problem.train_inputs.shape[1]
    return mlp(num_inputs, config["hidden"], problem.num_outputs, dropout=rates, seed=seed)


def random_network(net: nn.Module, config: Mapping[str, Any], **options: Any) -> BayesianModule:
    """Return the Bayesian module of a network, with the problem's likelihood and prior."""
    noise_std = config["noise_std"]
    likelihood: Likelihood = (
        CategoricalLikelihood() if noise_std is None else GaussianLikelihood(noise_std)
    )
    priors = {
        f"{name}.weight": Gaussian(config["prior_gain"] / math.sqrt(layer.in_features))
        for name, layer in net.named_modules()
        if isinstance(layer, nn.Linear)
    }
    prior = ByGroup({**priors, "*": Gaussian(1.0)})
    return BayesianModule(net, likelihood=likelihood, prior=prior, **options)


def _arcs() -> Problem:
    """Two interleaved half circles with noise; the test part is a grid beyond them.

    The target of a point of the grid is the nearer half circle.
    """

    def points(angles: Tensor) -> Tensor:
        upper = torch.stack([angles.cos(), angles.sin()], -1)
        return torch.cat([upper, torch.tensor([1.0, 0.5]) - upper])

    noise = NoiseKey(0, Stream.ENVIRONMENT, 0).normals(range(60), 2)
    arcs = points(torch.linspace(0.0, math.pi, 30))
    axis = torch.linspace(-2.0, 3.0, 20)
    grid = torch.cartesian_prod(axis, axis)
    nearest = torch.cdist(grid, points(torch.linspace(0.0, math.pi, 200))).argmin(-1) // 200
    return Problem(arcs + 0.2 * noise, torch.arange(60) // 30, grid, nearest, 2)
