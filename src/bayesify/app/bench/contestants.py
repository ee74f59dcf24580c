"""The contestants: the plain network, and bayesify with each backend, estimator and optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.optim import SGD, Adam, Optimizer

import bayesify as bf
from bayesify.app.bench.cases import NUM_DATA, Case
from bayesify.training.backends import BackendName, StepOptions, make_backend

__all__ = [
    "OURS",
    "OWN_LOOP",
    "PLAIN_GRAPH",
    "PLAIN_NET",
    "RATE",
    "SAMPLES",
    "Contestant",
    "Step",
    "bayesian",
    "contestants_of",
    "make_optimizer",
]

#: One training step or prediction.
Step = Callable[[], None]

PLAIN_NET = "plain-net"
#: The same on a GPU, whose whole step is captured once as a CUDA graph.
PLAIN_GRAPH = "plain-net-graph"
#: A loop with the objective, its backward pass and the optimizer.
OWN_LOOP = "own-loop"
#: The path of predictions, which have no backend.
OURS = "bayesify"
#: Weight samples of a prediction.
SAMPLES = 100
_ESTIMATORS: dict[str, bf.Estimator] = {
    "sampling": bf.WeightSampling(),
    "local": bf.LocalReparameterization(),
    "flipout": bf.Flipout(),
}
_BACKENDS: tuple[BackendName, ...] = ("closed-form", "compiled")
# So small that no network learns these few examples, which would change its gradients.
RATE = 1e-6
_NONE = "none"
_BEFORE_CAPTURE = 3


@dataclass(frozen=True)
class Contestant:
    """An implementation of the work of a case.

    Args:
        path: ``"plain-net"``, ``"plain-net-graph"``, a backend of bayesify, ``"own-loop"``,
            ``"bayesify"`` (predictions), or a peer.
        estimator: gradient estimator, or ``"none"``.
        optimizer: ``"adam"``, ``"sgd"`` (momentum 0.9), ``"ivon"``, a peer's own, or ``"none"``.
        build: builds network and optimizer, and returns a function that does one step.
        is_peer: whether another library does the work.
        against: optimizer of the plain network that it is compared with, if not the same.
    """

    path: str
    estimator: str
    optimizer: str
    build: Callable[[], Step]
    is_peer: bool = False
    against: str | None = None

    @property
    def baseline(self) -> str:
        """The optimizer of the plain network that it is compared with."""
        return self.against or self.optimizer

    @property
    def label(self) -> str:
        """Its path, estimator and optimizer as text."""
        parts = (self.path, self.estimator, self.optimizer)
        return ", ".join(part for part in parts if part != _NONE)


def make_optimizer(name: str, parameters: Iterable[Any], lr: float = RATE) -> Optimizer:
    """Return Adam or SGD with momentum 0.9, in PyTorch's fused implementation.

    Example:
        >>> make_optimizer("sgd", torch.nn.Linear(2, 1).parameters()).defaults["momentum"]
        0.9
    """
    if name == "adam":
        return Adam(parameters, lr=lr, fused=True)
    return SGD(parameters, lr=lr, momentum=0.9, fused=True)


def contestants_of(case: Case, batch: int) -> list[Contestant]:
    """Return the plain network first, then bayesify.

    Training is measured with Adam for every estimator, and with SGD and IVON for weight sampling;
    IVON, whose prior is Gaussian, is compared with the plain network under Adam. That of a large
    network is measured with Adam and weight sampling only.

    Example:
        >>> from bayesify.app.bench.cases import CASES
        >>> [each.label for each in contestants_of(CASES["predict"], 128)]
        ['plain-net', 'bayesify, sampling']
    """
    if case.work != "train":
        return [
            Contestant(PLAIN_NET, _NONE, _NONE, partial(_plain_prediction, case, batch)),
            Contestant(OURS, _ESTIMATOR_OF[case.work], _NONE, partial(_prediction, case, batch)),
        ]
    if case.is_large:
        return [
            Contestant(PLAIN_NET, _NONE, "adam", partial(_plain_training, case, batch, "adam")),
            _trained(case, batch, "compiled", "sampling", "adam"),
            Contestant(OWN_LOOP, "sampling", "adam", partial(_own_loop, case, batch, "adam")),
        ]
    entered = [
        Contestant(PLAIN_NET, _NONE, name, partial(_plain_training, case, batch, name))
        for name in ("adam", "sgd")
    ]
    if case.device == "cuda":
        entered += [
            Contestant(PLAIN_GRAPH, _NONE, name, partial(_plain_graph, case, batch, name))
            for name in ("adam", "sgd")
        ]
    for optimizer, estimators, against in (
        ("adam", tuple(_ESTIMATORS), None),
        ("sgd", ("sampling",), None),
        ("ivon", ("sampling",), "adam"),
    ):
        for estimator in estimators:
            for kind in _BACKENDS:
                made = _trained(case, batch, kind, estimator, optimizer)
                entered.append(replace(made, against=against))
        build = partial(_own_loop, case, batch, optimizer)
        entered.append(Contestant(OWN_LOOP, "sampling", optimizer, build, against=against))
    return entered


_ESTIMATOR_OF = {"predict": "sampling", "predict-once": "sampling", "predict-mean": _NONE}


def bayesian(case: Case, estimator: str = "sampling") -> bf.BayesianModule:
    """Return the case's Bayesian network, with the scale mixture of Blundell et al. 2015.

    Example:
        >>> from bayesify.app.bench.cases import perceptron
        >>> bayesian(perceptron("tiny", 8, inputs=4)).layout.num_weights
        202
    """
    prior = bf.ScaleMixture(pi=0.75, std1=1.0, std2=math.exp(-8))
    return bf.BayesianModule(case.net(), prior=prior, estimator=_ESTIMATORS[estimator])


def _plain_training(case: Case, batch: int, optimizer: str) -> Step:
    (inputs, targets), net = case.data(batch), case.net()
    made = make_optimizer(optimizer, net.parameters())

    def step() -> None:
        made.zero_grad(set_to_none=True)
        F.cross_entropy(net(inputs), targets).backward()
        made.step()

    return step


def _plain_graph(case: Case, batch: int, optimizer: str) -> Step:
    (inputs, targets), net = case.data(batch), case.net()
    made = make_optimizer(optimizer, net.parameters())
    for group in made.param_groups:  # its state counts steps on the GPU
        group["capturable"] = optimizer == "adam"

    def step() -> None:
        made.zero_grad(set_to_none=True)
        F.cross_entropy(net(inputs), targets).backward()
        made.step()

    # As PyTorch asks for it: a few steps on another stream come first.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_BEFORE_CAPTURE):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    # Together: the graph reads and writes the memory of what the step refers to.
    return partial(_replay, graph, step)


def _replay(graph: torch.cuda.CUDAGraph, step: Step) -> None:  # noqa: ARG001
    graph.replay()


def _objective(case: Case, estimator: str, optimizer: str) -> tuple[bf.ELBO, Optimizer]:
    bnn = bayesian(case, estimator)
    if optimizer == "ivon":
        bnn.prior = bf.Gaussian(0.1)
        elbo = bf.ELBO(bnn, num_data=NUM_DATA)
        return elbo, bf.IVON(elbo, lr=RATE)
    elbo = bf.ELBO(bnn, num_data=NUM_DATA)
    return elbo, make_optimizer(optimizer, elbo.parameters())


def _trained(
    case: Case, batch: int, kind: BackendName, estimator: str, optimizer: str
) -> Contestant:
    build = partial(_training, case, batch, kind, estimator, optimizer)
    return Contestant(kind, estimator, optimizer, build)


def _training(case: Case, batch: int, kind: BackendName, estimator: str, optimizer: str) -> Step:
    inputs, targets = case.data(batch)
    backend = make_backend(*_objective(case, estimator, optimizer), kind)

    def step() -> None:
        backend.step(inputs, targets, StepOptions(batch_index=0))

    return step


def _own_loop(case: Case, batch: int, optimizer: str) -> Step:
    inputs, targets = case.data(batch)
    elbo, made = _objective(case, "sampling", optimizer)

    def step() -> None:
        made.zero_grad(set_to_none=True)
        elbo(inputs, targets).loss.backward()
        made.step()

    return step


def _plain_prediction(case: Case, batch: int) -> Step:
    (inputs, _), net = case.data(batch), case.net().eval()
    passes = 1 if case.work == "predict-mean" else SAMPLES

    @torch.no_grad()
    def step() -> None:
        for _ in range(passes):
            net(inputs)

    return step


def _prediction(case: Case, batch: int) -> Step:
    (inputs, _), bnn = case.data(batch), bayesian(case)

    def step() -> None:
        if case.work == "predict-mean":
            bnn.predict_mean(inputs)
            return
        if case.work == "predict-once":
            bnn.train()  # frees the weight samples of the call before
        bnn.predict(inputs, SAMPLES)

    return step
