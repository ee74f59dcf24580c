"""Small networks run on one thread, and the number of threads is restored."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from tests.loops import loop_over
from torch import Tensor, nn

import bayesify as bf
from bayesify.bandits import Learning, ThompsonSampler
from bayesify.datasets import TensorLoader
from bayesify.training import ConvergenceWarning


class Noting(nn.ReLU):
    """Notes the number of threads of each pass."""

    seen: set[int]

    def forward(self, x: Tensor) -> Tensor:
        type(self).seen.add(torch.get_num_threads())
        return super().forward(x)


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    Noting.seen = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def perceptron(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), Noting(), nn.Linear(width, 2))


def convolutions() -> nn.Module:
    layers = nn.Conv1d(1, 2, 2), Noting(), nn.Flatten(), nn.Linear(4, 2)
    return nn.Sequential(nn.Unflatten(1, (1, 3)), *layers)


class OwnMatrix(nn.Module):
    """A network whose passes are of unknown size, since its matrix is not a linear layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.relu = nn.Parameter(torch.zeros(3, 2)), Noting()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x @ self.matrix)


def data(batch_size: int = 32) -> TensorLoader:
    return TensorLoader(torch.randn(64, 3), torch.randint(2, (64,)), batch_size=batch_size)


def fitted(net: nn.Module) -> None:
    bf.fit(bf.ELBO(bf.BayesianModule(net), num_data=64), data(), epochs=1)


def fitted_together(net: nn.Module) -> None:
    elbos = [bf.ELBO(bf.BayesianModule(net, seed=seed), num_data=64) for seed in range(2)]
    bf.fit_replicas(elbos, data(), epochs=1)


def predicted(net: nn.Module) -> None:
    bf.BayesianModule(net).predict(torch.zeros(5, 3), 4, batch_size=5)


def predicted_at_the_mean(net: nn.Module) -> None:
    bf.BayesianModule(net).predict_mean(torch.zeros(5, 3), batch_size=5)


USES: list[Callable[[nn.Module], None]] = [
    fitted,
    fitted_together,
    predicted,
    predicted_at_the_mean,
]


def noted(use: Callable[[nn.Module], None], net: nn.Module) -> set[int]:
    """The numbers of threads in the passes of a use; a first one may measure what passes need."""
    use(net)
    return Noting.seen


@loop_over("use", USES)
def test_a_small_network_runs_on_one_thread(use: Callable[[nn.Module], None]) -> None:
    Noting.seen = set()
    assert 1 in noted(use, perceptron())
    Noting.seen = set()
    assert 1 not in noted(use, convolutions())
    Noting.seen = set()
    assert 1 not in noted(use, OwnMatrix())


def test_large_passes_keep_their_threads() -> None:
    bnn = bf.BayesianModule(perceptron(1000))  # 6,002 weights
    x = torch.zeros(6000, 3)
    bnn.predict(x, 1, batch_size=5000)
    Noting.seen = set()
    bnn.predict(x, 1, batch_size=5000)
    assert Noting.seen == {1}
    Noting.seen = set()
    bnn.predict(x, 1, batch_size=6000)
    assert Noting.seen == {2}


def test_positions_count() -> None:
    """Linear layers on each of many positions are no small work."""
    bnn = bf.BayesianModule(perceptron(100))  # 602 weights
    for positions, threads in ((1, 1), (2000, 2)):
        Noting.seen = set()
        bnn.predict_mean(torch.zeros(30, positions, 3), batch_size=30)
        assert threads in Noting.seen
    elbo = bf.ELBO(bnn, num_data=64)
    Noting.seen = set()
    loader = [(torch.zeros(64, 1000, 3).mean(1, keepdim=True), torch.zeros(64, 1).long())]
    bf.fit(elbo, loader, epochs=1)
    assert Noting.seen == {1}


def test_errors_restore_the_threads() -> None:
    class Failing(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            raise OSError(f"with {torch.get_num_threads()}, {len(x)}")

    elbo = bf.ELBO(bf.BayesianModule(Failing(nn.Linear(3, 2))), num_data=64)
    with pytest.raises(OSError, match="with 1, 32"):
        bf.fit(elbo, data(), epochs=1)


def test_a_bandit_learns_on_one_thread() -> None:
    net = nn.Sequential(nn.Linear(5, 4), Noting(), nn.Linear(4, 1))
    bnn = bf.BayesianModule(net, likelihood=bf.GaussianLikelihood())
    agent = ThompsonSampler(bnn, num_actions=2, learning=Learning(batch_size=2))
    agent.observe(torch.zeros(3), 0, 1.0)
    agent.learn()
    Noting.seen = set()
    agent.learn()
    assert Noting.seen == {1}


# ---- progress ---------------------------------------------------------------------------------


class Terminal:
    """Standard error that is a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        """Do nothing."""


def test_a_long_prediction_is_counted_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr("time.monotonic", lambda: 0.4 * next(clock))
    bnn = bf.BayesianModule(nn.Linear(3, 2))
    bnn.predict(torch.zeros(5, 3), 10, batch_size=2)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    bnn.predict(torch.zeros(5, 3), 10, batch_size=2)
    assert terminal.text == "", "something else stands between the program and its terminal"
    monkeypatch.setattr(sys, "__stderr__", terminal)
    bnn.predict(torch.zeros(5, 3), 2, batch_size=2)
    assert terminal.text == "", "within a second"
    bnn.predict(torch.zeros(5, 3), 10, batch_size=2)
    shown = terminal.text.split("\r")
    assert shown[1:3] == [f"predict: {number} of 10 weight samples" for number in (2, 3)]
    assert shown[-2:] == [" " * len(shown[-3]), ""], "the line is removed"
