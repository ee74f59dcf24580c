"""One weight for each example, wherever it is used, and antithetic pairs, exactly."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from tests import faults
from tests.cases import mlp, normals
from tests.loops import loop_over
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify import ELBO, BayesianModule, Flipout, LocalReparameterization, WeightSampling
from bayesify.estimators import Estimator
from bayesify.noise.keys import NoiseKey, Stream

D, OUT, NUM_DATA = 3, 4, 6
CALL = NoiseKey(2, Stream.CALL, 0)
EXACTLY = {"rtol": 0.0, "atol": 1e-12}


class Uses(nn.Module):
    """Two uses of one weight, on D unit inputs and a zero, the second time in reverse order.

    The outputs, shape (N, 2, D + 1, OUT), show which weight and which bias each position met.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(D, OUT)
        self.second = self.first if how == "module used twice" else nn.Linear(D, OUT)
        if how == "tied weights":
            self.second.weight, self.second.bias = self.first.weight, self.first.bias
        if how in FUNCTIONS:
            del self.second

    def forward(self, x: Tensor) -> Tensor:
        if self.how in FUNCTIONS:
            second = FUNCTIONS[self.how](x.flip(1), self.first.weight, self.first.bias)
        else:
            second = self.second(x.flip(1))
        return torch.stack([self.first(x), second.flip(1)], 1)


def folded(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As GPT-2's ``Conv1D``."""
    return torch.addmm(bias, x.reshape(-1, D), weight.T).view(*x.shape[:-1], OUT)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "functional": lambda x, weight, bias: F.linear(x, bias=bias, weight=weight),
    "transposed": lambda x, weight, bias: x @ weight.mT + bias,
    "transposed twice": lambda x, weight, bias: F.linear(x, weight.t().transpose(-1, 0), bias),
    "folded": folded,
    "einsum": lambda x, weight, bias: torch.einsum("npi, oi -> npo", x, weight) + bias,
    "from the left": lambda x, weight, bias: (weight @ x.mT).mT + bias,
}


class ConvUses(nn.Module):
    """The same for two places of a convolution's input, each tap of its kernel an output."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(D, OUT, 3, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        impulses = torch.cat([x, x], 1).transpose(1, 2).unsqueeze(-1)
        met = self.conv(F.pad(impulses, (0, 4)).flatten(2))[..., :-2]
        # An impulse at q meets the kernel's taps 2, 1, 0 at the outputs q, q + 1, q + 2.
        taps = met.unflatten(-1, (2, D + 1, 5))[..., :3]
        return taps.permute(0, 2, 3, 1, 4).flatten(3)


def effective(net: nn.Module, estimator: Estimator) -> tuple[Tensor, Tensor, Tensor]:
    """Weight (N, 2, OUT, D) and bias (N, 2, OUT) of each example at each use, and the mean."""
    bnn = BayesianModule(net.double(), init_std=0.4, estimator=estimator)
    probes = torch.cat([torch.eye(D), torch.zeros(1, D)]).double().expand(NUM_DATA, -1, -1)
    with torch.no_grad():
        (outputs,), _ = bnn.sample_outputs(probes, CALL, range(1))
        mean = bnn.run_with(bnn.posterior.masked_mean, probes)
    bias = outputs[:, :, -1]
    weight = (outputs[:, :, :-1] - bias.unsqueeze(2)).transpose(2, 3)
    return weight, bias, (mean[0, 0, :-1] - mean[0, 0, -1]).T


def check_one_weight(net: nn.Module, estimator: Estimator) -> None:
    """A datum meets one weight and one bias at all its positions and uses."""
    weight, bias, mean = effective(net, estimator)
    for found in (weight, bias):
        assert torch.allclose(found[:, 0], found[:, 1], **EXACTLY), "the uses differ"
    size = (weight - mean).abs()
    assert torch.allclose(size[:, 0], size[:1, 0].expand_as(size[:, 0]), **EXACTLY), "sizes differ"
    same = torch.isclose(weight, weight[:1, :1], **EXACTLY).all()
    if isinstance(estimator, Flipout):
        assert not same, "all data meet one weight"
        signs = (weight - mean)[:, 0].sign()
        relative = signs * signs[:1]
        outer = relative[:, :, :1] * relative[:, :1, :] * relative[:, :1, :1]
        assert torch.equal(relative, outer), "the signs are not an outer product"
    else:
        assert same, "data meet several weights"


NETS = {
    **{how: lambda how=how: Uses(how) for how in ("module used twice", "tied weights", *FUNCTIONS)},
    "convolution": ConvUses,
}
each_net = loop_over("name", NETS)


@each_net
@loop_over("estimator", [LocalReparameterization(), Flipout()])
def test_a_datum_meets_one_weight_everywhere(name: str, estimator: Estimator) -> None:
    check_one_weight(NETS[name](), estimator)


def no_fault(patch: pytest.MonkeyPatch) -> None:
    """The estimator itself does not share weights."""


FAULTS: list[tuple[str, Estimator, faults.Fault]] = [
    ("convolution", LocalReparameterization(per_position=True), no_fault),
    ("convolution", LocalReparameterization(), faults.local_at_every_use),
    ("convolution", Flipout(), faults.flipout_signs_at_each_position),
    ("convolution", Flipout(), faults.flipout_one_sign_for_all_data),
]
for _name in ("module used twice", "tied weights", "functional", "transposed", "folded", "einsum"):
    FAULTS += [
        (_name, LocalReparameterization(), faults.local_at_every_use),
        (_name, Flipout(), faults.flipout_signs_at_each_position),
        (_name, Flipout(), faults.flipout_fresh_signs),
        (_name, Flipout(), faults.flipout_one_sign_for_all_data),
    ]


@loop_over(("name", "estimator", "fault"), FAULTS)
def test_several_weights_for_a_datum_are_caught(
    name: str, estimator: Estimator, fault: faults.Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=r"differ|one weight"):
        check_one_weight(NETS[name](), estimator)


class Vector(nn.Module):
    """A linear function whose weight is a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Groupings(nn.Module):
    """A weight (2, 3, 4) met with one axis of inputs, and with two; each output shows all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3, 4))

    def forward(self, x: Tensor) -> Tensor:
        one = torch.eye(2, dtype=x.dtype).expand(len(x), 2, 2)
        two = torch.eye(6, dtype=x.dtype).view(6, 2, 3).expand(len(x), 6, 2, 3)
        first = torch.einsum("npi,iho->npho", one, self.weight).flatten(1)
        return torch.stack([first, torch.einsum("nqih,iho->nqo", two, self.weight).flatten(1)], 1)


def test_a_datum_meets_one_weight_whatever_axes_are_one() -> None:
    bnn = BayesianModule(Groupings().double(), init_std=0.4, estimator=Flipout())
    x = normals(NUM_DATA, 1)
    assert [row.treatment for row in bnn.summary(x)] == ["exact"]
    outputs = bnn(x).detach()
    assert torch.allclose(outputs[:, 0], outputs[:, 1], **EXACTLY)
    assert not torch.allclose(outputs[0], outputs[1], **EXACTLY)


BIASED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "positions": (lambda: nn.Linear(D, OUT), (5, D)),
    "convolution": (lambda: nn.Conv2d(D, OUT, 2), (D, 3, 4)),
    "transposed": (lambda: nn.ConvTranspose1d(D, OUT, 3), (D, 4)),
    # Each weight is met once here, but the bias at every output.
    "transposed, one position": (lambda: nn.ConvTranspose2d(D, OUT, 3), (D, 1, 1)),
}


def check_one_bias(name: str, estimator: Estimator) -> None:
    """At zero inputs the outputs are the bias: one for all positions of an example."""
    make, shape = BIASED[name]
    bnn = BayesianModule(make().double(), init_std=0.4, estimator=estimator)
    outputs = bnn(torch.zeros(NUM_DATA, *shape, dtype=torch.float64)).detach()
    outputs = outputs.flatten(2) if name != "positions" else outputs.mT
    assert outputs.shape[2] > 1
    assert torch.allclose(outputs, outputs[..., :1].expand_as(outputs), **EXACTLY), "biases differ"


@loop_over("name", BIASED)
@loop_over("estimator", [LocalReparameterization(), Flipout()])
def test_a_datum_meets_one_bias_at_all_positions(name: str, estimator: Estimator) -> None:
    check_one_bias(name, estimator)


@loop_over("name", BIASED)
@loop_over(
    ("estimator", "fault"),
    [
        (LocalReparameterization(per_position=True), no_fault),
        (Flipout(), faults.flipout_signs_at_each_position),
    ],
)
def test_several_biases_for_a_datum_are_caught(
    name: str, estimator: Estimator, fault: faults.Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="biases differ"):
        check_one_bias(name, estimator)


@loop_over("estimator", [LocalReparameterization(), Flipout()])
@loop_over("lead", [(), (2,)])
def test_a_vector_as_weight(estimator: Estimator, lead: tuple[int, ...]) -> None:
    bnn = BayesianModule(Vector(), init_std=0.4, estimator=estimator)
    inputs = normals(NUM_DATA, *lead, D, dtype=torch.float32)
    assert bnn(inputs).shape == (NUM_DATA, *lead)
    assert not torch.allclose(bnn(inputs), bnn(inputs))


ESTIMATORS = [WeightSampling(), LocalReparameterization(), Flipout()]
each_estimator = loop_over("estimator", ESTIMATORS)
LINEAR: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(D, OUT), (5, D)),
    "positions": (lambda: nn.Linear(D, OUT), (5, 2, D)),
    "convolution": (lambda: nn.Conv1d(D, OUT, 2), (5, D, 4)),
    "module used twice": (lambda: Uses("module used twice"), (5, 2, D)),
}


def pairs_of(
    name: str, estimator: Estimator, samples: range, *, antithetic: bool = True
) -> tuple[Tensor, Tensor]:
    """The mean of each pair of outputs of a net that is linear in its weights, and what it is."""
    make, shape = LINEAR[name]
    estimator = dataclasses.replace(estimator, antithetic=antithetic)
    bnn = BayesianModule(make().double(), init_std=0.4, estimator=estimator)
    with torch.no_grad():
        outputs, _ = bnn.sample_outputs(normals(*shape, seed=3), CALL, samples)
        mean = bnn.run_with(bnn.posterior.masked_mean, normals(*shape, seed=3))
    assert outputs.std(0).min() > 1e-3, "there is no noise"
    return outputs.unflatten(0, (-1, 2)).mean(1), mean


def check_pairs(
    name: str, estimator: Estimator, samples: range, *, antithetic: bool = True
) -> None:
    got, mean = pairs_of(name, estimator, samples, antithetic=antithetic)
    assert torch.allclose(got, mean.expand_as(got), **EXACTLY), "a pair does not average out"


@each_estimator
@loop_over("name", LINEAR)
@loop_over("samples", [range(2), range(6), range(4, 8), range(10, 12)])
def test_antithetic_pairs_average_to_the_mean_network(
    name: str, estimator: Estimator, samples: range
) -> None:
    check_pairs(name, estimator, samples)


@each_estimator
@loop_over("name", LINEAR)
@loop_over(("samples", "antithetic"), [(range(4), False), (range(1, 5), True)])
def test_samples_that_are_no_pairs_do_not_average_out(
    name: str, estimator: Estimator, samples: range, antithetic: bool
) -> None:
    with pytest.raises(AssertionError, match="average out"):
        check_pairs(name, estimator, samples, antithetic=antithetic)


def test_antithetic_weights_are_mirrored_at_the_mean() -> None:
    bnn = BayesianModule(mlp(), init_std=0.4, estimator=WeightSampling(antithetic=True))
    _, draw = bnn.sample_outputs(normals(2, D), CALL, range(2, 8))
    assert draw is not None
    first, second = draw.weights[::2], draw.weights[1::2]
    assert torch.equal(draw.noise[::2], -draw.noise[1::2])
    assert torch.allclose(first + second, 2.0 * bnn.posterior.mean.expand_as(first), atol=1e-15)
    assert first.unique().numel() == first.numel(), "two pairs share noise"


@each_estimator
def test_the_samples_of_all_processes_are_those_of_one(
    estimator: Estimator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Process r of a run has samples r S to (r + 1) S: whole pairs, and none of another's."""
    estimator = dataclasses.replace(estimator, antithetic=True)
    x, y = normals(4, D), torch.zeros(4, dtype=torch.int64)
    alone = ELBO(BayesianModule(mlp(), estimator=estimator), num_data=4, num_samples=6)
    expected = alone(x, y).outputs
    for rank in range(3):
        monkeypatch.setattr("bayesify.training.elbo.process_rank", lambda rank=rank: rank)
        elbo = ELBO(BayesianModule(mlp(), estimator=estimator), num_data=4, num_samples=2)
        assert torch.equal(elbo(x, y).outputs, expected[2 * rank : 2 * rank + 2])
    assert expected.flatten(1).unique(dim=0).shape[0] == 6


@each_estimator
@loop_over("num_samples", [1, 3])
def test_an_odd_number_of_antithetic_samples_is_refused(
    estimator: Estimator, num_samples: int
) -> None:
    pairs = BayesianModule(mlp(), estimator=dataclasses.replace(estimator, antithetic=True))
    with pytest.raises(ValueError, match=f"must be even, got {num_samples}"):
        ELBO(pairs, num_data=4, num_samples=num_samples)
    ELBO(BayesianModule(mlp(), estimator=estimator), num_data=4, num_samples=num_samples)


class Slope(nn.Module):
    """The derivative of a linear layer's output in its inputs, which is the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.detach().requires_grad_()
        outputs = self.linear(inputs).sum()
        return torch.autograd.grad(outputs, inputs, create_graph=True)[0]


@each_estimator
def test_a_derivative_in_the_inputs_is_that_of_one_weight(estimator: Estimator) -> None:
    bnn = BayesianModule(Slope().double(), estimator=estimator, init_std=0.5)
    slopes = bnn(torch.ones(3, 2, dtype=torch.float64))
    assert torch.equal(slopes[0], slopes[1])
    assert slopes[0, 0] != slopes[0, 1]
    assert {row.treatment for row in bnn.summary()} <= {"sampled", "unknown"}
    slopes.square().sum().backward()
    assert bnn.posterior.get_parameter("rho").grad.abs().min() > 0.0
