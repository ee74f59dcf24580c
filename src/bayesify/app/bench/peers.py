"""Other libraries at the same work: 784-H-H-10 with one weight sample per step.

Each is used as its documentation shows, and imported on demand. The loss is the cross-entropy plus
the library's own KL with the factor of its documentation; the prior is the scale mixture where the
library has one.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module, metadata
from importlib.util import find_spec, module_from_spec
from itertools import pairwise
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from bayesify.app.bench.cases import CLASSES, NUM_DATA, Case
from bayesify.app.bench.contestants import RATE, Contestant, Step, make_optimizer
from bayesify.module.networks import mlp

__all__ = ["PEERS", "Peer", "installed_peers", "peer_contestants"]

Loss = Callable[[Tensor, Tensor], Tensor]
Train = Callable[[Tensor, Tensor], None]


class Peer(NamedTuple):
    """Another library, and a function that trains with it.

    Args:
        name: in tables and figures.
        distribution: name of the distribution to install.
        module: name of the module to import.
        estimator: gradient estimator.
        optimizer: ``"adam"``, or its own.
        make: returns a training step, from the widths of a perceptron and a learning rate; it
            uses PyTorch's random numbers.
    """

    name: str
    distribution: str
    module: str
    estimator: str
    optimizer: str
    make: Callable[[Sequence[int], float], Train]

    @property
    def version(self) -> str | None:
        """The installed version, or None."""
        try:
            return metadata.version(self.distribution) if find_spec(self.module) else None
        except metadata.PackageNotFoundError:
            return None

    def contestant(self, case: Case, batch: int) -> Contestant:
        """Return the contestant for a training case."""
        build = partial(self._build, case, batch)
        return Contestant(self.name, self.estimator, self.optimizer, build, True, "adam")

    def _build(self, case: Case, batch: int) -> Step:
        assert case.hidden is not None
        inputs, targets = case.data(batch)
        widths = (case.shape[0], case.hidden, case.hidden, CLASSES)
        with warnings.catch_warnings(action="ignore"):
            train = self.make(widths, RATE)
        return partial(train, inputs, targets)


def installed_peers() -> tuple[list[Peer], list[str]]:
    """Return the installed peers, and the names of the others.

    Example:
        >>> found, missing = installed_peers()
        >>> len({peer.name for peer in found}) + len(missing)
        5
    """
    missing = dict.fromkeys(peer.name for peer in PEERS if peer.version is None)
    return [peer for peer in PEERS if peer.name not in missing], list(missing)


def peer_contestants(peers: Sequence[Peer], case: Case, batch: int) -> list[Contestant]:
    """Return the peers as contestants of a case; none unless it trains a small perceptron.

    Example:
        >>> from bayesify.app.bench.cases import CASES
        >>> peer_contestants(PEERS, CASES["resnet-20"], 128)
        []
    """
    if case.hidden is None or case.work != "train" or case.is_large:
        return []
    return [peer.contestant(case, batch) for peer in peers]


def _perceptron(widths: Sequence[int], linear: Callable[[int, int], nn.Module]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width, units in pairwise(widths):
        layers += [linear(width, units), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _with_adam(net: nn.Module, loss: Loss, lr: float) -> Train:
    optimizer = make_optimizer("adam", net.parameters(), lr)

    def train(inputs: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(inputs, targets).backward()
        optimizer.step()

    return train


def _torchbnn(widths: Sequence[int], lr: float) -> Train:
    library = import_module("torchbnn")
    net = _perceptron(widths, partial(library.BayesLinear, 0.0, 0.1))
    kl = library.BKLLoss(reduction="mean")
    return _with_adam(net, lambda x, y: F.cross_entropy(net(x), y) + 0.1 * kl(net), lr)


def _bayesian_torch(kind: str, widths: Sequence[int], lr: float) -> Train:
    library = import_module("bayesian_torch.models.dnn_to_bnn")
    net = mlp(widths[0], widths[1:-1], widths[-1])
    settings = {
        "prior_mu": 0.0,
        "prior_sigma": 1.0,
        "posterior_mu_init": 0.0,
        "posterior_rho_init": -3.0,
        "type": kind,
        "moped_enable": False,
        "moped_delta": 0.5,
    }
    library.dnn_to_bnn(net, settings)
    return _with_adam(
        net, lambda x, y: F.cross_entropy(net(x), y) + library.get_kl_loss(net) / len(x), lr
    )


def _blitz(widths: Sequence[int], lr: float) -> Train:
    linear = import_module("blitz.modules").BayesianLinear
    prior = {"prior_sigma_1": 1.0, "prior_sigma_2": math.exp(-8), "prior_pi": 0.75}
    # A new class, because the library modifies it.
    variational = import_module("blitz.utils").variational_estimator(
        type("Perceptron", (nn.Sequential,), {})
    )
    net = variational(*_perceptron(widths, partial(linear, **prior)))
    settings = {"criterion": nn.CrossEntropyLoss(), "sample_nbr": 1}
    settings["complexity_cost_weight"] = 1 / NUM_DATA
    return _with_adam(net, lambda x, y: net.sample_elbo(inputs=x, labels=y, **settings), lr)


def _torch_uncertainty(widths: Sequence[int], lr: float) -> Train:
    layers, losses = _layers_and_losses()
    prior = {"prior_sigma_1": 1.0, "prior_sigma_2": math.exp(-8), "prior_pi": 0.75}
    net = _perceptron(widths, partial(layers.BayesLinear, **prior))
    elbo = losses.ELBOLoss(net, nn.CrossEntropyLoss(), kl_weight=1 / NUM_DATA, num_samples=1)
    return _with_adam(net, elbo, lr)


def _layers_and_losses() -> tuple[Any, Any]:
    """Import two parts of torch-uncertainty, whose package also needs lightning and torchvision."""
    names = ("torch_uncertainty", "torch_uncertainty.utils")
    known = {name: module for name, module in sys.modules.items() if _is_within(name, names[0])}
    if names[0] not in known:
        for name in names:
            spec = find_spec(name)
            assert spec is not None
            sys.modules[name] = module_from_spec(spec)  # a package whose __init__ is not run
    try:
        return import_module(f"{names[0]}.layers"), import_module(f"{names[0]}.losses")
    finally:
        for name in [name for name in sys.modules if _is_within(name, names[0])]:
            if name not in known:
                del sys.modules[name]


def _is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _ivon(widths: Sequence[int], lr: float) -> Train:
    net = mlp(widths[0], widths[1:-1], widths[-1])
    optimizer = import_module("ivon").IVON(net.parameters(), lr=lr, ess=NUM_DATA)

    def train(inputs: Tensor, targets: Tensor) -> None:
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            F.cross_entropy(net(inputs), targets).backward()
        optimizer.step()

    return train


PEERS = (
    Peer("torchbnn", "torchbnn", "torchbnn", "sampling", "adam", _torchbnn),
    *(
        Peer("bayesian-torch", "bayesian-torch", "bayesian_torch", estimator, "adam", make)
        for estimator, make in (
            ("sampling", partial(_bayesian_torch, "Reparameterization")),
            ("flipout", partial(_bayesian_torch, "Flipout")),
        )
    ),
    Peer("blitz", "blitz-bayesian-pytorch", "blitz", "sampling", "adam", _blitz),
    Peer(
        "torch-uncertainty",
        "torch-uncertainty",
        "torch_uncertainty",
        "sampling",
        "adam",
        _torch_uncertainty,
    ),
    Peer("ivon-opt", "ivon-opt", "ivon", "sampling", "ivon", _ivon),
)
