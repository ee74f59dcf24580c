"""Passes that are unlike the traced one, or that do odd things with weights, buffers and inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tests.cases import normals
from tests.estimators.test_zoo import ROUNDING, TARGETS
from tests.estimators.test_zoo_summary import LOCAL, PER_POSITION, each_local
from tests.loops import loop_over
from tests.zoo import ESTIMATORS, ZOO, N, Specimen, each_estimator, seeded, set_rho
from torch import Tensor, nn

from bayesify import ELBO, BayesianModule, Estimator


class Moody(nn.Module):
    """Uses one weight as a layer or as a matrix, and another once or twice, as the data say."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.layer = nn.Linear(4, 4)
        self.loop = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        often = 1 if x.mean() > 0.0 else 2
        x = self.drop(self.norm(x))
        x = self.layer(x) if often == 1 else x @ (1.0 * self.layer.weight.T) + self.layer.bias
        for _ in range(often):
            x = self.drop(self.loop(x))
        return x


def check_other_way(estimator: Estimator) -> None:
    """A pass that uses weights as the traced one did not leaves what a plain pass leaves."""
    specimen = Specimen(Moody, (normals(N, 4, seed=4).abs(),))
    plain, bnn = specimen.plain(), specimen.bnn(estimator, std=None)
    for sign in (1.0, -1.0, 1.0, -1.0):
        inputs = specimen.changed(lambda x, sign=sign: sign * x)
        states = []
        outputs = []
        for net in (plain, bnn):
            with seeded(1):
                outputs.append(net(*inputs))
                states.append(torch.get_rng_state())
        assert torch.allclose(*outputs, rtol=0.0, atol=ROUNDING)
        assert torch.equal(*states), "dropout went on from where one pass leaves it"
        for buffer, expected in zip(bnn.net.buffers(), plain.buffers(), strict=True):
            assert torch.allclose(buffer, expected, rtol=0.0, atol=ROUNDING)
        treatments = {row.name: row.treatment for row in bnn.summary()}
        if estimator in (LOCAL, PER_POSITION):
            fits = "exact" if sign > 0.0 else "sampled"
            assert sign > 0.0 or set(treatments.values()) == {fits}
        noisy = copy.deepcopy(bnn)
        set_rho(noisy, slice(None), 0.0)
        assert noisy(*inputs).isfinite().all()


@pytest.mark.filterwarnings("ignore::bayesify.module.shared_noise.SharedNoiseWarning")
@each_estimator
def test_a_pass_that_takes_another_way(estimator: Estimator) -> None:
    check_other_way(estimator)


class ByMode(nn.Module):
    """Uses its layer once in training mode and twice in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if self.training else self.layer(torch.tanh(self.layer(x)))


def check_modes() -> None:
    """What was seen in one mode says nothing about the other."""
    bnn, x = BayesianModule(ByMode(), estimator=LOCAL), torch.ones(N, 4)
    for training in (False, True, False):
        bnn.train(training)
        bnn(x)
        expected = "exact" if training else "sampled"
        assert {row.treatment for row in bnn.summary()} == {expected}


def test_each_mode_is_traced() -> None:
    check_modes()


class Reader(nn.Module):
    """Reads the value of its bias, in a way that returns no tensor."""

    def __init__(self, read: Callable[[Tensor], float]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.read(self.layer.bias.detach())


READS: dict[str, Callable[[Tensor], float]] = {
    "item": lambda bias: 2.0 if bias.item() < 9.0 else 0.0,
    "float": float,
    "list": lambda bias: bias.tolist()[0],
    "equal": lambda bias: 2.0 if torch.equal(bias, bias) else 0.0,
    "truth": lambda bias: 2.0 if bias else 0.0,
}


class Direct(Reader):
    """The same without cutting the graph first."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            factor = self.read(self.layer.bias)
        return self.layer(x) * factor


@loop_over("kind", [Reader, Direct])
@loop_over("read", READS.values())
@each_local
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_a_weight_whose_value_is_read(
    estimator: Estimator, read: Callable[[Tensor], float], kind: type[Reader]
) -> None:
    net = kind(read).double()
    bnn, x = BayesianModule(net, estimator=estimator, init_std=1e-12), normals(N, 3)
    assert torch.allclose(bnn(x), net(x), atol=1e-9)
    assert [row.treatment for row in bnn.summary()] == ["exact", "sampled"]


class OwnBuffer(nn.Module):
    """Puts a new tensor in the place of its buffer at each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return self.layer(x - self.average)


class OneSize(nn.Module):
    """Works for minibatches of five data only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.place = nn.Parameter(torch.zeros(N, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.view(N, 4) + self.place)


class AnySize(nn.Module):
    """Convolutions over images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Conv2d(2, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean((2, 3))


def check_like_plain(net: Callable[[], nn.Module], *inputs: Tensor, what: Estimator) -> None:
    """Without noise one pass after the other is the plain network's, buffers included."""
    specimen = Specimen(net, ())
    plain, bnn = specimen.plain(), specimen.bnn(what, std=None)
    for x in inputs:
        expected = plain(x)
        assert torch.allclose(bnn(x), expected, rtol=0.0, atol=ROUNDING)
        for buffer, other in zip(bnn.net.buffers(), plain.buffers(), strict=True):
            assert torch.allclose(buffer, other, rtol=0.0, atol=ROUNDING)
    assert bnn.posterior.mean.isfinite().all()


@each_estimator
def test_a_new_tensor_as_buffer(estimator: Estimator) -> None:
    check_like_plain(OwnBuffer, normals(N, 4), normals(N, 4, seed=1), what=estimator)


@each_estimator
def test_one_size_of_minibatch_only(estimator: Estimator) -> None:
    check_like_plain(OneSize, normals(N, 4), normals(N, 4, seed=1), what=estimator)
    bnn = BayesianModule(OneSize().double(), estimator=estimator)
    assert bnn.summary(normals(N, 4)).counts == {"sampled": 3}


@each_estimator
def test_other_shapes_of_inputs(estimator: Estimator) -> None:
    sizes = [(N, 1, 3, 3), (2, 1, 5, 4), (1, 1, 3, 3), (N, 1, 3, 3)]
    check_like_plain(AnySize, *(normals(*size) for size in sizes), what=estimator)
    bnn = BayesianModule(AnySize().double(), estimator=estimator, init_std=0.3)
    small, large = bnn.summary(normals(*sizes[0])), bnn.summary(normals(*sizes[1]))
    assert (small == large) == (estimator not in (LOCAL, PER_POSITION))
    assert bnn(normals(*sizes[1])).shape == (2, 3)


@each_estimator
def test_a_network_that_returns_a_dict(estimator: Estimator) -> None:
    specimen = ZOO["dict-output"]
    bnn = specimen.bnn(estimator)
    assert set(bnn(*specimen.inputs)) == {"hidden", "logits"}
    elbo = ELBO(bnn, num_data=N, num_samples=2)
    for call in (lambda: elbo(specimen.inputs, TARGETS), lambda: bnn.predict(specimen.inputs, 2)):
        with pytest.raises(TypeError, match=r"one tensor .* got dict with .*; pick it"):
            call()


def test_time_steps_are_no_data() -> None:
    """As many time steps as data: what comes first within the network is not the data."""
    specimen = ZOO["shared-over-time"]
    for name, estimator in ESTIMATORS.items():
        rows = {row.name: row for row in specimen.summary(specimen.bnn(estimator))}
        assert rows["first.weight"].treatment == rows["first.bias"].treatment == "sampled"
        local = {"local-per-position": "per-position", "flipout": "exact"}.get(name, "sampled")
        assert rows["folded.weight"].treatment == local


def test_a_function_with_its_own_backward_in_both_modes_of_gradients() -> None:
    specimen = ZOO["autograd-function"]
    bnn = specimen.bnn(LOCAL)
    with torch.no_grad():
        without = specimen.summary(bnn).counts
    assert without == {"exact": 3}, "the backward of the user's own plays no part"
    assert specimen.summary(bnn).counts == {"exact": 2, "sampled": 1}
    specimen.run(bnn).sum().backward()
    with torch.no_grad():
        assert specimen.summary(bnn).counts == without
