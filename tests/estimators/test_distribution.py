"""What one example meets is distributed as under weight sampling, and differs between examples."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from scipy import stats
from tests import faults
from tests.loops import loop_over
from tests.training.test_statistics import FALSE_ALARM, check_mean
from torch import Tensor, nn

from bayesify import BayesianModule, Flipout, LocalReparameterization, WeightSampling
from bayesify.estimators import Estimator
from bayesify.noise.keys import NoiseKey, Stream

ESTIMATORS = {
    "local": LocalReparameterization(),
    "flipout": Flipout(),
    "sampling": WeightSampling(),
}
each_estimator = loop_over("estimator", ESTIMATORS)
X = torch.tensor([0.4, -1.9], dtype=torch.float64)
FAMILY = 2 * 4 * len(ESTIMATORS)
WIDTH = {"linear": 20_000, "deep": 2000}


class Deep(nn.Module):
    """For each unit of width a network of its own, with one hidden unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(2, width)
        self.second = nn.Conv1d(width, width, 1, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh().unsqueeze(-1)).squeeze(-1)


NETS: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda width: nn.Linear(2, width),
    "deep": Deep,
}


def outputs_of(name: str, estimator: Estimator, *, seed: int = 0) -> Tensor:
    """The outputs of the second of three data, a sample for each unit of width."""
    net = NETS[name](WIDTH[name]).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(0.4)
    bnn = BayesianModule(net, init_std=0.8, estimator=estimator)
    key = NoiseKey(seed, Stream.CALL, 0)
    with torch.no_grad():
        return bnn.sample_outputs(X.expand(3, 2), key, range(1))[0][0, 1]


def check_distribution(name: str, estimator: str) -> None:
    """Kolmogorov-Smirnov and three moments: the normal's, or those of drawn weights."""
    got = outputs_of(name, ESTIMATORS[estimator])
    if name == "linear":
        mean = 0.4 * (X.sum().item() + 1.0)
        std = 0.8 * (X.square().sum().item() + 1.0) ** 0.5
        p_value = stats.kstest((got.numpy() - mean) / std, "norm").pvalue
        moments = {1: mean, 2: mean**2 + std**2, 3: mean**3 + 3.0 * mean * std**2}
        for power, moment in moments.items():
            check_mean(got**power, moment, FAMILY, (name, estimator, power))
    else:
        noise = torch.randn(WIDTH[name], 5, dtype=torch.float64, generator=generator())
        w = 0.4 + 0.8 * noise
        drawn = w[:, 3] * (w[:, :2] @ X + w[:, 2]).tanh() + w[:, 4]
        p_value = stats.ks_2samp(got.numpy(), drawn.numpy()).pvalue
        for power in (1, 2, 3):
            # Two independent samples of one size: their differences have mean 0.
            check_mean(got**power - drawn**power, 0.0, FAMILY, (name, estimator, power))
    assert p_value > FALSE_ALARM / FAMILY, f"p = {p_value:.2g}, beyond {FALSE_ALARM / FAMILY:.2g}"


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(8)


@each_estimator
@loop_over("name", NETS)
def test_the_outputs_of_one_datum_are_distributed_as_under_weight_sampling(
    name: str, estimator: str
) -> None:
    check_distribution(name, estimator)


FAULTS: list[tuple[str, faults.Fault]] = [
    *[(estimator, faults.weaker_noise) for estimator in ESTIMATORS],
    ("local", faults.local_std_for_variance),
    ("local", faults.local_half_the_variance),
    ("flipout", faults.flipout_of_absolute_noise),
]


@loop_over(
    ("name", "estimator", "fault"),
    [
        *[(name, *fault) for name in NETS for fault in FAULTS],
        ("linear", "local", faults.local_variance_of_raw_inputs),
    ],
)
def test_another_distribution_is_caught(
    name: str, estimator: str, fault: faults.Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="beyond"):
        check_distribution(name, estimator)


def deviations(net: nn.Module, inputs: Tensor, estimator: Estimator) -> Tensor:
    """Outputs less those at the mean: a row for each example, or for each position of each."""
    bnn = BayesianModule(net.double(), init_std=0.5, estimator=estimator)
    with torch.no_grad():
        outputs = bnn.sample_outputs(inputs, NoiseKey(3, Stream.CALL, 0), range(1))[0][0]
        noise = outputs - bnn.run_with(bnn.posterior.masked_mean, inputs)
    return (
        noise.movedim(1, -1).flatten(0, -2) if isinstance(net, nn.Conv1d) else noise.flatten(0, -2)
    )


def check_independent(rows: Tensor) -> None:
    """No two rows correlate."""
    pairs = list(itertools.combinations(rows, 2))
    assert len(pairs) >= 3
    for first, second in pairs:
        check_mean(first * second, 0.0, len(pairs), "noise of two rows")


ONES = torch.ones(4, 3, 1, dtype=torch.float64)
INDEPENDENT: dict[str, tuple[Callable[[], nn.Module], Tensor, Estimator]] = {
    "local, data": (lambda: nn.Linear(1, 8000), ONES[:, 0], LocalReparameterization()),
    "local, positions": (
        lambda: nn.Linear(1, 8000), ONES, LocalReparameterization(per_position=True)
    ),
    "local, convolution": (
        lambda: nn.Conv1d(1, 8000, 1), ONES.mT, LocalReparameterization(per_position=True)
    ),
    "flipout, data": (lambda: nn.Linear(1, 8000), ONES[:, 0], Flipout()),
    "flipout, data of a convolution": (lambda: nn.Conv1d(1, 8000, 1), ONES[:, :1].mT, Flipout()),
}  # fmt: skip


@loop_over("name", INDEPENDENT)
def test_noise_is_independent_across_data_and_positions(name: str) -> None:
    make, inputs, estimator = INDEPENDENT[name]
    check_independent(deviations(make(), inputs, estimator))


@loop_over("name", INDEPENDENT)
def test_noise_that_data_share_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, inputs, estimator = INDEPENDENT[name]
    faults.local_one_noise_for_all_data(monkeypatch)
    faults.flipout_one_sign_for_all_data(monkeypatch)
    with pytest.raises(AssertionError, match="beyond"):
        check_independent(deviations(make(), inputs, estimator))


@loop_over(
    ("name", "estimator"),
    [
        ("local, positions", LocalReparameterization()),
        ("local, convolution", LocalReparameterization()),
        ("local, positions", Flipout()),
        ("local, convolution", Flipout()),
        ("local, data", WeightSampling()),
    ],
)
def test_noise_that_a_datums_positions_share_correlates(name: str, estimator: Estimator) -> None:
    make, inputs, _ = INDEPENDENT[name]
    with pytest.raises(AssertionError, match="beyond"):
        check_independent(deviations(make(), inputs, estimator))


def test_local_noise_is_independent_beyond_its_correlation() -> None:
    """Under Flipout all data share the size of their noise; under local noise nothing."""
    local, shared = (
        deviations(make(), inputs, estimator).square()
        for make, inputs, estimator in (INDEPENDENT["local, data"], INDEPENDENT["flipout, data"])
    )
    check_independent(local - local.mean(1, keepdim=True))
    with pytest.raises(AssertionError, match="beyond"):
        check_independent(shared - shared.mean(1, keepdim=True))
