"""Networks of many kinds, each with inputs, and with what of it has no effect.

Every network takes N = 5 data and, but for ``dict-output``, returns logits of shape (5, 3). All
are in float64. ``tests/estimators/test_zoo.py`` holds them to laws.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests import zoo_modules as own
from tests.cases import normals
from tests.loops import loop_over
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from bayesify import BayesianModule, Estimator, Flipout, LocalReparameterization, WeightSampling
from bayesify.module.inputs import arguments_of
from bayesify.module.summary import ModuleSummary

ESTIMATORS: dict[str, Estimator] = {
    "sampling": WeightSampling(),
    "sampling-antithetic": WeightSampling(antithetic=True),
    "local": LocalReparameterization(),
    "local-per-position": LocalReparameterization(per_position=True),
    "flipout": Flipout(),
}
N, CLASSES = 5, 3
#: A rho whose std is nothing: softplus(-60) is 9e-27.
NO_NOISE = -60.0
#: Everything of a parameter.
ALL = slice(None)
CUT_PADDING = "the embedding's own backward passes over its padding row"


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """PyTorch's CPU generator from a seed, and then where it was; torch.manual_seed takes 1 ms."""
    before = torch.get_rng_state()
    torch.set_rng_state(torch.Generator().manual_seed(seed).get_state())
    try:
        yield
    finally:
        torch.set_rng_state(before)


@dataclass(frozen=True)
class Specimen:
    """One network of the zoo.

    Args:
        net: makes it, in training mode.
        inputs: its arguments, N data first, by position or by name.
        options: for ``BayesianModule``.
        training: in which mode it is held to the laws.
        inert: what of a parameter changes no output, and why; an index of the parameter. Where
            data are coupled, noise that they do not share counts all the same.
        cut: what of a parameter changes outputs, but is passed over by the gradient, and why.
        couples: why the outputs of one example depend on the other data, in training mode.
        reads: which tensor of its outputs the laws look at.
    """

    net: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...] | Mapping[str, Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)
    training: bool = True
    inert: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    cut: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    couples: str = ""
    reads: Callable[[Any], Tensor] | None = None

    @property
    def is_tensor(self) -> bool:
        """Whether it returns one tensor."""
        return self.reads is None

    def plain(self) -> nn.Module:
        """The network in float64 with parameters that are all away from 0, padding rows too."""
        with seeded(0):
            net = self.net().double()
        with torch.no_grad():
            for seed, parameter in enumerate(net.parameters()):
                parameter.add_(0.3 * normals(parameter.numel(), seed=seed).view_as(parameter))
        return net.train(self.training)

    def bnn(self, estimator: Estimator, std: float | None = 0.2, **options: Any) -> BayesianModule:
        """A Bayesian network of it in its mode; ``std`` None is none at all."""
        options = {"seed": 3, **self.options, **options}
        bnn = BayesianModule(
            self.plain(), estimator=estimator, init_std=1.0 if std is None else std, **options
        )
        if std is None:
            set_rho(bnn, ALL, NO_NOISE)
        return bnn.train(self.training)

    def run(self, net: nn.Module, inputs: Any = None) -> Tensor:
        """Outputs, under dropout masks that are the same at every call."""
        inputs = self.inputs if inputs is None else inputs
        args, kwargs = arguments_of(inputs)
        with seeded(1):
            outputs = net(*args, **kwargs)
        return outputs if self.reads is None else self.reads(outputs)

    def summary(self, bnn: BayesianModule, inputs: Any = None) -> ModuleSummary:
        """The treatment of its parameters."""
        args, kwargs = arguments_of(self.inputs if inputs is None else inputs)
        return bnn.summary(*args, **kwargs)

    def changed(self, change: Callable[[Tensor], Tensor]) -> Any:
        """The inputs, each of them changed."""
        if isinstance(self.inputs, Mapping):
            return {name: change(value) for name, value in self.inputs.items()}
        return tuple(change(value) for value in self.inputs)

    def inert_noise(self, bnn: BayesianModule) -> Mapping[str, tuple[Any, str]]:
        """What of the noise changes no output: where data are coupled, that which they share."""
        if not self.couples:
            return self.inert
        sampled = {row.name for row in self.summary(bnn) if row.treatment == "sampled"}
        return {name: self.inert[name] for name in self.inert if name in sampled}

    def mask(self, bnn: BayesianModule, marked: Mapping[str, tuple[Any, str]]) -> Tensor:
        """Where the flat weight vector holds what is marked, shape (D,)."""
        mask = torch.zeros(bnn.layout.num_weights, dtype=torch.bool)
        assert set(marked) <= set(bnn.layout.names)
        for name, part in bnn.layout.unflatten(mask).items():
            if name in marked:
                part[marked[name][0]] = True
        return mask


def set_rho(bnn: BayesianModule, where: Any, value: float) -> None:
    """Set the rho of some weights: a name of a parameter, or an index of the flat vector."""
    where = bnn.layout.slice_of(where) if isinstance(where, str) else where
    with torch.no_grad():
        bnn.posterior.rho[where] = value


def _images(*shape: int) -> tuple[Tensor]:
    return (normals(N, *shape, seed=4),)


def _head(size: int) -> tuple[nn.Module, ...]:
    return nn.Tanh(), nn.Flatten(), nn.Linear(size, CLASSES)


SEQUENCE = _images(N, 4)  # as many time steps as data
TOKENS = (torch.tensor([[1, 2, 0, 3], [4, 5, 6, 1], [0, 0, 2, 3], [6, 5, 4, 1], [2, 2, 3, 0]]),)
VECTORS = _images(4)
OPPOSITE = 3.0 * torch.cat([normals(3, 4, seed=4), -normals(2, 4, seed=4)])
BATCH_NORM = "in training mode an example is normalised with the statistics of its minibatch"
BEFORE_NORM = "batch normalisation subtracts what is the same for all data, noise of each it keeps"
KEY_BIAS = "adds the same number to all scores of a query, which softmax passes over"


def _transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.2, activation="gelu", batch_first=True)
    encoder = nn.TransformerEncoder(layer, num_layers=1, enable_nested_tensor=False)
    return nn.Sequential(encoder, *_head(4 * N))


def _normed() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Conv1d(3, 2, 2, bias=False),
        nn.BatchNorm1d(2), *_head(6),
    )  # fmt: skip


_KEY_BIASES = {"0.layers.0.self_attn.in_proj_bias": (slice(4, 8), KEY_BIAS)}
_PLAIN_NORMED = Specimen(
    _normed, _images(2, 6), inert={"0.bias": (ALL, BEFORE_NORM)}, couples=BATCH_NORM
)
_BAG = Specimen(
    lambda: nn.Sequential(nn.EmbeddingBag(7, 4, mode="mean", padding_idx=0), *_head(4)),
    TOKENS,
    inert={"0.weight": (0, "a bag passes over padding")},
)
_ENCODER = Specimen(_transformer, SEQUENCE, inert=_KEY_BIASES)

ZOO: dict[str, Specimen] = {
    "mlp": Specimen(lambda: nn.Sequential(nn.Linear(4, 6), *_head(6)), VECTORS),
    "dropout": Specimen(
        lambda: nn.Sequential(nn.Linear(4, 9), nn.Dropout(0.5), *_head(9)), VECTORS
    ),
    "linear-over-time": Specimen(lambda: nn.Sequential(nn.Linear(4, 3), *_head(15)), SEQUENCE),
    "conv1d-stride-dilation": Specimen(
        lambda: nn.Sequential(nn.Conv1d(2, 3, 3, stride=2, padding=1, dilation=2), *_head(9)),
        _images(2, 7),
    ),
    "conv1d-replicate": Specimen(
        lambda: nn.Sequential(nn.Conv1d(2, 3, 3, padding=2, padding_mode="replicate"), *_head(18)),
        _images(2, 4),
    ),
    "conv1d-whole-input": Specimen(
        lambda: nn.Sequential(nn.Conv1d(2, 4, 5), *_head(4)), _images(2, 5)
    ),
    "conv2d-circular": Specimen(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), *_head(27)),
        _images(2, 3, 3),
    ),
    "conv2d-reflect": Specimen(
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 2, padding=1, padding_mode="reflect", bias=False), *_head(32)
        ),
        _images(1, 3, 3),
    ),
    "conv2d-same": Specimen(
        lambda: nn.Sequential(nn.Conv2d(2, 2, (1, 3), padding="same", dilation=2), *_head(24)),
        _images(2, 3, 4),
    ),
    "conv2d-grouped": Specimen(
        lambda: nn.Sequential(nn.Conv2d(4, 6, 2, groups=2), *_head(24)), _images(4, 3, 3)
    ),
    "conv1d-depthwise": Specimen(
        lambda: nn.Sequential(nn.Conv1d(3, 6, 2, groups=3), nn.Conv1d(6, 2, 1), *_head(8)),
        _images(3, 5),
    ),
    "conv3d": Specimen(
        lambda: nn.Sequential(nn.Conv3d(1, 2, 2, stride=(1, 2, 1), padding=(1, 0, 0)), *_head(6)),
        _images(1, 2, 2, 2),
    ),
    "transposed1d-output-padding": Specimen(
        lambda: nn.Sequential(
            nn.ConvTranspose1d(2, 2, 3, stride=3, padding=1, output_padding=2), *_head(18)
        ),
        _images(2, 3),
    ),
    "transposed1d-from-one": Specimen(
        lambda: nn.Sequential(nn.ConvTranspose1d(3, 2, 4), *_head(8)), _images(3, 1)
    ),
    "transposed2d-groups-dilation": Specimen(
        lambda: nn.Sequential(nn.ConvTranspose2d(4, 4, 2, groups=2, dilation=2), *_head(64)),
        _images(4, 2, 2),
    ),
    "transposed3d": Specimen(
        lambda: nn.Sequential(nn.ConvTranspose3d(1, 2, 2, bias=False), *_head(54)),
        _images(1, 2, 2, 2),
    ),
    "batch-norm-training": _PLAIN_NORMED,
    "batch-norm-evaluation": dataclasses.replace(_PLAIN_NORMED, training=False, inert={}),
    "batch-norm-random": dataclasses.replace(_PLAIN_NORMED, options={"exclude": ()}),
    "layer-norm": Specimen(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), *_head(5)), VECTORS
    ),
    "layer-norm-random": Specimen(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), *_head(5)), VECTORS, {"exclude": ()}
    ),
    "group-norm-random": Specimen(
        lambda: nn.Sequential(nn.Conv1d(2, 4, 2), nn.GroupNorm(2, 4), *_head(12)),
        _images(2, 4),
        {"exclude": ()},
    ),
    "residual": Specimen(own.Residual, _images(2, 3, 3)),
    "lstm": Specimen(own.recurrent(nn.LSTM, batch_first=True, dropout=0.3), SEQUENCE),
    "lstm-projected": Specimen(own.recurrent(nn.LSTM, batch_first=False, proj_size=2), SEQUENCE),
    "gru-time-first": Specimen(own.recurrent(nn.GRU, batch_first=False), SEQUENCE),
    "rnn": Specimen(own.recurrent(nn.RNN, batch_first=True), SEQUENCE),
    "lstm-cell": Specimen(own.Cell, SEQUENCE),
    "attention": Specimen(
        own.Attention, SEQUENCE, inert={"attention.in_proj_bias": (slice(4, 8), KEY_BIAS)}
    ),
    "attention-of-two": Specimen(
        own.CrossAttention,
        {"query": normals(N, 2, 4, seed=5), "memory": normals(N, 3, 2, seed=6)},
    ),
    "transformer": _ENCODER,
    "transformer-evaluation": dataclasses.replace(_ENCODER, training=False),
    "embedding": Specimen(
        lambda: nn.Sequential(nn.Embedding(7, 3, padding_idx=0), *_head(12)),
        TOKENS,
        cut={"0.weight": (0, CUT_PADDING)},
    ),
    "embedding-bag": _BAG,
    "tied-embedding": Specimen(own.TiedEmbedding, TOKENS),
    "used-twice": Specimen(own.Twice, VECTORS),
    "siamese": Specimen(own.Siamese, (normals(N, 4, seed=5), normals(N, 4, seed=6))),
    "bare-parameters": Specimen(own.Bare, VECTORS),
    "functional": Specimen(own.Functional, _images(1, 4, 4)),
    "partly-frozen": Specimen(own.frozen, VECTORS),
    "dict-output": Specimen(own.DictOutput, VECTORS, reads=lambda outputs: outputs["logits"]),
    "inputs-by-name": Specimen(
        own.ByName, {"x": normals(N, 4, seed=5), "mask": normals(N, 3, seed=6) > 0}
    ),
    "branch-and-loop": Specimen(own.BranchAndLoop, VECTORS),
    "bilinear": Specimen(own.Bilinear, (normals(N, 2, seed=5), normals(N, 3, seed=6))),
    # Of opposite rows each unit has an output below 0, which its slope needs.
    "prelu": Specimen(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.PReLU(6), nn.Linear(6, CLASSES)), (OPPOSITE,)
    ),
    "weight-norm": Specimen(
        lambda: nn.Sequential(
            parametrizations.weight_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, CLASSES)
        ),
        VECTORS,
    ),
    "spectral-norm": Specimen(
        lambda: nn.Sequential(
            parametrizations.spectral_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, CLASSES)
        ),
        VECTORS,
    ),
    "autograd-function": Specimen(own.OwnFunction, VECTORS),
    "containers": Specimen(own.Containers, VECTORS),
    "einsum": Specimen(own.Einsum, VECTORS),
    "products": Specimen(own.Products, SEQUENCE),
    "shared-over-time": Specimen(own.FoldedTime, SEQUENCE),
}

#: Networks that `pytest` holds to the laws under every estimator. Each of the others is there held
#: to them under one estimator in turn, and under the rest by `pytest -m slow`.
CORE = (
    "mlp",
    "conv2d-grouped",
    "batch-norm-training",
    "lstm",
    "transformer-evaluation",
    "embedding",
    "tied-embedding",
    "used-twice",
    "dict-output",
)


def _rounds() -> Iterator[Any]:
    names = list(ESTIMATORS)
    for number, (name, specimen) in enumerate(ZOO.items()):
        first = names if name in CORE else [names[number % len(names)]]
        rest = [other for other in names if other not in first]
        yield pytest.param(specimen, first, id=name)
        if rest:
            yield pytest.param(specimen, rest, id=f"{name}-rest", marks=pytest.mark.slow)


#: Gives ``specimen`` and ``names``, those of the estimators.
each_specimen = pytest.mark.parametrize(("specimen", "names"), list(_rounds()))
each_estimator = loop_over("estimator", ESTIMATORS.values())
