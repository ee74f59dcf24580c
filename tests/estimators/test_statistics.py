"""Every estimator's expected likelihood is that of weight sampling, at a stated error rate.

The networks here are wide, and each unit of width is a small network of its own with one to five
weights: one pass gives many independent samples, and quadrature over the weights the exact answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy import stats
from tests import faults
from tests.loops import loop_over
from tests.training.test_statistics import check_mean
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from bayesify import BayesianModule, Flipout, LocalReparameterization, WeightSampling
from bayesify.estimators import Estimator
from bayesify.noise.keys import NoiseKey, Stream

ESTIMATORS: dict[str, Estimator] = {
    "local": LocalReparameterization(),
    "flipout": Flipout(),
    "sampling": WeightSampling(antithetic=True),
}
STD = 0.9


class Chain(nn.Module):
    """A module used twice, one use upon the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.unit = nn.Conv1d(width, width, 1, groups=width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        first = self.unit(x.unsqueeze(-1).expand(-1, self.unit.groups, 1))
        return self.unit(first.tanh()).squeeze(-1)


class Tied(nn.Module):
    """Two linear layers with one weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(1, width, bias=False)
        self.second = nn.Linear(1, width, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).tanh() * self.second(0.5 * x)


class Embedded(nn.Module):
    """An embedding that is the output layer too; example n has the tokens 2 n and 2 n + 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(2 * width, 1)
        self.output = nn.Linear(1, 2 * width, bias=False)
        self.output.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.output(self.table(tokens)).unflatten(1, (-1, 2))
        own = logits.diagonal().T
        return (own[:, 1] - own[:, 0]).unsqueeze(0)


class Pooled(nn.Module):
    """A layer over positions, a nonlinearity, and the average over positions."""

    def __init__(self, layer: nn.Module, axis: int) -> None:
        super().__init__()
        self.layer, self.axis = layer, axis

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu().mean(self.axis)


class Grouped(nn.Module):
    """A convolution of two groups; what they say of each position is multiplied, then pooled."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 2 * width, 1, groups=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.conv(x).chunk(2, 1)
        return (first * second.relu()).mean(-1)


@dataclass(frozen=True)
class Case:
    """A net of any width, the tensors that hold its weights, and its inputs."""

    net: Callable[[int], nn.Module]
    #: From weights of shape (width, p) to the net's parameters.
    parameters: Callable[[Tensor], Mapping[str, Tensor]]
    mean: tuple[float, ...]
    inputs: Callable[[int], Tensor]
    width: int = 10_000
    nodes: int = 400
    nll: Callable[[Tensor], Tensor] = lambda outputs: 2.0 * outputs.square()


def copies(*values: object) -> Callable[[int], Tensor]:
    """Two data that are equal."""
    return lambda _: torch.tensor([values, values], dtype=torch.float64)


SEQUENCE = (1.0, -0.7, 0.4, 1.6)
CASES: dict[str, Case] = {
    "module used twice": Case(
        Chain, lambda w: {"unit.weight": w.unsqueeze(-1)}, (0.5,), copies(0.8), width=2000
    ),
    "tied linear layers": Case(
        Tied, lambda w: {"first.weight": w, "second.weight": w}, (0.5,), copies(1.3)
    ),
    "embedding and output": Case(
        Embedded,
        lambda w: {"table.weight": w.reshape(-1, 1), "output.weight": w.reshape(-1, 1)},
        (0.6, -0.4),
        lambda width: 2 * torch.arange(width),
        width=1500,
        nodes=24,
        nll=lambda log_odds: F.softplus(-log_odds),
    ),
    "linear over positions": Case(
        lambda width: Pooled(nn.Linear(1, width), 1),
        lambda w: {"layer.weight": w[:, :1], "layer.bias": w[:, 1]},
        (0.5, -0.2),
        copies(*[[x] for x in SEQUENCE]),
    ),
    "convolution": Case(
        lambda width: Pooled(nn.Conv1d(1, width, 2, bias=False), 2),
        lambda w: {"layer.weight": w.unsqueeze(1)},
        (0.5, -0.2),
        copies(SEQUENCE),
    ),
    "transposed convolution": Case(
        lambda width: Pooled(nn.ConvTranspose1d(1, width, 2, bias=False), 2),
        lambda w: {"layer.weight": w.unsqueeze(0)},
        (0.5, -0.2),
        copies(SEQUENCE),
    ),
    "grouped convolution": Case(
        Grouped,
        lambda w: {"conv.weight": w.T.reshape(-1, 1, 1)},
        (0.5, -0.2),
        copies(SEQUENCE, SEQUENCE[::-1]),
    ),
}
FAMILY = 3 * (len(CASES) + 1)


def grid(nodes: int, dimensions: int) -> tuple[Tensor, Tensor]:
    """Standard normal nodes (M, p) and weights (M,): Gauss-Hermite, or the trapezoids if many."""
    if nodes < 100:
        points, shares = np.polynomial.hermite_e.hermegauss(nodes)
    else:  # kinks spoil Gauss's rule
        points = np.linspace(-8.0, 8.0, nodes)
        shares = stats.norm.pdf(points)
    points, shares = torch.from_numpy(points), torch.from_numpy(shares / shares.sum())
    axes = torch.cartesian_prod(*[points] * dimensions).view(-1, dimensions)
    return axes, torch.cartesian_prod(*[shares] * dimensions).view(-1, dimensions).prod(-1)


def exact(case: Case) -> float:
    """The expected nll of one example, one weight sample shared by all its uses."""
    nodes, shares = grid(case.nodes, len(case.mean))
    weights = torch.tensor(case.mean, dtype=torch.float64) + STD * nodes
    total = 0.0
    for part, share in zip(weights.split(20_000), shares.split(20_000), strict=True):
        net, inputs = case.net(len(part)).double(), case.inputs(len(part))
        parameters = dict(case.parameters(part))
        outputs = functional_call(net, parameters, inputs, tie_weights=False)
        total += (share * case.nll(outputs).mean(0)).sum().item()
    return total


def sampled(case: Case, estimator: Estimator, net: nn.Module | None = None) -> Tensor:
    """The nll of each unit of width, averaged over the two samples and the equal data."""
    net = (case.net(case.width) if net is None else net).double()
    means = torch.tensor(case.mean, dtype=torch.float64).expand(case.width, -1)
    with torch.no_grad():
        for name, values in case.parameters(means).items():
            net.get_parameter(name).copy_(values)
    bnn = BayesianModule(net, init_std=STD, estimator=estimator)
    with torch.no_grad():
        outputs, _ = bnn.sample_outputs(
            case.inputs(case.width), NoiseKey(6, Stream.CALL, 0), range(2)
        )
    return case.nll(outputs).mean((0, 1))


@pytest.mark.slow
@loop_over("estimator", ESTIMATORS)
@loop_over("name", CASES)
def test_the_expected_nll_is_weight_samplings(name: str, estimator: str) -> None:
    case = CASES[name]
    check_mean(sampled(case, ESTIMATORS[estimator]), exact(case), FAMILY, (name, estimator))


POSITIONS = [
    "linear over positions", "convolution", "transposed convolution", "grouped convolution",
]  # fmt: skip


@loop_over("name", POSITIONS)
def test_fresh_noise_at_each_position_is_another_model(name: str) -> None:
    case = CASES[name]
    with pytest.raises(AssertionError, match="beyond"):
        check_mean(sampled(case, LocalReparameterization(per_position=True)), exact(case), FAMILY)


TWINS: list[tuple[str, str, faults.Fault]] = [
    *[(name, estimator, faults.weaker_noise) for name in CASES for estimator in ESTIMATORS],
    *[(name, "flipout", faults.flipout_signs_at_each_position) for name in POSITIONS],
    *[
        (name, estimator, fault)
        for name in ("module used twice", "tied linear layers")
        for estimator, fault in (
            ("local", faults.local_at_every_use),
            ("flipout", faults.flipout_fresh_signs),
        )
    ],
]


@pytest.mark.slow
@loop_over(("name", "estimator", "fault"), TWINS)
def test_a_planted_fault_changes_the_expected_nll(
    name: str, estimator: str, fault: faults.Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    expected = exact(case)
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="beyond"):
        check_mean(sampled(case, ESTIMATORS[estimator]), expected, FAMILY)


@loop_over("estimator", ESTIMATORS)
def test_noise_of_its_own_at_the_output_of_an_embedding_is_caught(estimator: str) -> None:
    case = CASES["embedding and output"]
    untied = case.net(case.width)
    untied.output.weight = nn.Parameter(untied.output.weight.clone())
    with pytest.raises(AssertionError, match="beyond"):
        check_mean(sampled(case, ESTIMATORS[estimator], untied), exact(case), FAMILY)


LSTM_WIDTH, LSTM_MEAN = 60, (0.8, -0.5, 1.2, 0.4, 1.5)
LSTM_INPUTS = (0.4, -0.2, 0.9, 0.3)  # the weights of the input, for the gates i, f, g, o


class Recurrent(nn.Module):
    """An LSTM with a linear head, whose units do not see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, LSTM_WIDTH, batch_first=True, bias=False)
        self.head = nn.Linear(LSTM_WIDTH, LSTM_WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def sampled_lstm(estimator: Estimator) -> Tensor:
    """The nll of each unit of width in each of 30 pairs of passes."""
    net, own = Recurrent().double(), torch.eye(LSTM_WIDTH, dtype=torch.float64)
    with torch.no_grad():
        net.lstm.weight_hh_l0.copy_(torch.cat([m * own for m in LSTM_MEAN[:4]]))
        net.lstm.weight_ih_l0.copy_(
            torch.tensor(LSTM_INPUTS).repeat_interleave(LSTM_WIDTH).view(-1, 1)
        )
        net.head.weight.copy_(LSTM_MEAN[4] * own)
    bnn = BayesianModule(
        net,
        init_std=torch.cat([own] * 5).flatten().clamp_min(1e-30),
        include=("lstm.weight_hh_l0", "head.weight"),
        estimator=estimator,
    )
    assert list(bnn.layout.names) == ["lstm.weight_hh_l0", "head.weight"]
    x = torch.tensor([1.0, 2.0, -1.5], dtype=torch.float64).view(1, 3, 1)
    with torch.no_grad():
        outputs, _ = bnn.sample_outputs(x, NoiseKey(6, Stream.CALL, 0), range(60))
    nll = 2.0 * (outputs[:, 0] - 0.1).square()
    # Pairs are no independent samples of each other.
    return nll.unflatten(0, (-1, 2)).mean(1).flatten()


def exact_lstm() -> float:
    """The expected nll of one unit, by its definition."""
    nodes, shares = grid(12, 5)
    weights = torch.tensor(LSTM_MEAN, dtype=torch.float64) + nodes
    hidden = cell = torch.zeros(len(nodes), dtype=torch.float64)
    for x in (1.0, 2.0, -1.5):
        i, f, g, o = (LSTM_INPUTS[k] * x + weights[:, k] * hidden for k in range(4))
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.tanh()
    return (shares * 2.0 * (weights[:, 4] * hidden - 0.1).square()).sum().item()


@loop_over("estimator", ESTIMATORS)
def test_the_expected_nll_of_an_lstm_with_a_head(
    estimator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = exact_lstm()
    check_mean(sampled_lstm(ESTIMATORS[estimator]), expected, FAMILY, ("lstm", estimator))
    faults.weaker_noise(monkeypatch)
    with pytest.raises(AssertionError, match="beyond"):
        check_mean(sampled_lstm(ESTIMATORS[estimator]), expected, FAMILY)
