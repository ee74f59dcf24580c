"""MC dropout and deep ensembles: the same answers, from other sources of randomness."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.cases import normals
from tests.loops import loop_over
from torch import Tensor, nn

from bayesify import (
    BayesianModule,
    CategoricalLikelihood,
    DeepEnsemble,
    Delta,
    GaussianLikelihood,
    MCDropout,
)
from bayesify.noise.keys import Stream, derived_seed
from bayesify.prediction import CategoricalPredictive, GaussianPredictive

X = normals(7, 4, dtype=torch.float32)


def dropping(p: float = 0.5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Dropout(p), nn.Linear(30, 3)
    )


def point(seed: int = 0, **options: Any) -> BayesianModule:
    torch.manual_seed(seed)
    return BayesianModule(nn.Linear(4, 3), posterior=Delta, seed=seed, **options)


def one_layer() -> nn.Module:
    """Dropout between the layers of a recurrent network drops nothing if there is but one."""
    net = nn.LSTM(4, 4, num_layers=2, dropout=0.4)
    net.num_layers = 1
    return net


def test_dropout_masks_are_bernoulli_and_nothing_else_is_on() -> None:
    """The mean and variance of a linear layer after dropout are known; 4.5 standard errors."""
    p, copies, passes = 0.3, 100, 200
    count = copies * passes
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(p), nn.Linear(4, 1, bias=False))
    net[0].running_mean.fill_(0.5)
    answer = MCDropout(net, GaussianLikelihood()).predict(X.repeat(copies, 1), passes)
    assert isinstance(answer, GaussianPredictive)
    with torch.no_grad():
        inside = net.eval()[0](X) * net[2].weight[0]
    net.train()
    mean, variance = inside.sum(-1), inside.square().sum(-1) * p / (1 - p)
    error = (variance / count).sqrt()
    # Each copy of an example has masks of its own.
    averaged = answer.mean[:, 0].view(copies, -1).mean(0)
    spread = answer.epistemic[:, 0].view(copies, -1).mean(0) * passes / (passes - 1)
    assert ((averaged - mean).abs() < 4.5 * error).all()
    assert ((spread / variance - 1).abs() < 0.06).all()
    assert torch.equal(net[0].running_mean, torch.full((4,), 0.5))


@loop_over("wrapped", [False, True])
def test_dropout_leaves_modes_and_generators_as_they_were(wrapped: bool) -> None:
    net = dropping()
    net[1].eval()
    module = BayesianModule(net, posterior=Delta) if wrapped else net
    modes, state = [m.training for m in module.modules()], torch.get_rng_state()
    dropout = MCDropout(module, CategoricalLikelihood())
    first = dropout.predict(X, 20, keep_samples=True)
    assert isinstance(first, CategoricalPredictive)
    assert first.samples is not None
    assert [m.training for m in module.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(dropout.predict(X, 20).mean, first.mean)
    assert not torch.equal(dropout.predict(X, 20, seed=1).mean, first.mean)
    assert not torch.equal(first.samples[0], first.samples[1])
    assert not first.mean.requires_grad
    assert dropout.predict(X, 3, batch_size=2).mean.shape == (7, 3)
    with pytest.raises(RuntimeError):
        dropout.predict(X[:, :2], 2)
    assert [m.training for m in module.modules()] == modes, "also after an error"


class Attention(nn.Module):
    """Reads the p of its dropout layer, which it does not call, as transformers' attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.norm(x), self.dropout.p, self.training)


def test_a_dropout_layer_that_is_read_and_not_called_is_on() -> None:
    net = nn.Sequential(nn.Linear(4, 4), Attention(), nn.Dropout(0.1), nn.Linear(4, 3))
    net[2].p = 1e-9  # called, and drops nothing
    before = net[1].norm.running_mean.clone()
    modes = [each.training for each in net.modules()]
    dropout = MCDropout(net, CategoricalLikelihood())
    for _ in range(2):
        assert float(dropout.predict(X, 20).epistemic.min()) > 1e-6
    assert torch.equal(net[1].norm.running_mean, before)
    assert [each.training for each in net.modules()] == modes


class TwoPaths(nn.Module):
    """Calls its dropout layer, or reads its p in training mode alone."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: Tensor, called: Tensor) -> Tensor:
        if bool(called.any()):
            dropped: Tensor = self.dropout(x)
            return dropped
        return nn.functional.dropout(x, self.dropout.p if self.training else 0.0)


def test_a_prediction_does_not_depend_on_the_path_of_one_before() -> None:
    called, net = torch.ones(len(X), 1), TwoPaths()
    expected = MCDropout(net, CategoricalLikelihood()).predict((X, 0.0 * called), 20).epistemic
    assert float(expected.min()) > 1e-3
    dropout = MCDropout(net, CategoricalLikelihood())
    dropout.predict((X, called), 20)
    assert torch.equal(dropout.predict((X, 0.0 * called), 20).epistemic, expected)


class Annealed(nn.Module):
    """Sets the p of its dropout layer in each pass, and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        self.dropout.p = 0.4
        return nn.functional.dropout(x, self.dropout.p, self.training)


def test_the_p_of_a_layer_may_be_set_in_a_pass() -> None:
    found = MCDropout(Annealed(), CategoricalLikelihood()).predict(X, 20)
    assert float(found.epistemic.min()) > 1e-3


class LeftOver(nn.Module):
    """Has a dropout layer that predictions do not use, and collects statistics in training mode."""

    def __init__(self, *, auxiliary: bool = False) -> None:
        super().__init__()
        self.used, self.unused = nn.Sequential(nn.Dropout(0.3)), nn.Dropout(0.5)
        self.last = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))
        self.auxiliary = auxiliary

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        outputs = self.last(nn.functional.dropout(self.used(x), 0.5, self.training))
        return (outputs, self.unused(x)) if self.auxiliary and self.training else outputs


@pytest.mark.parametrize("auxiliary", [False, True])
def test_a_dropout_layer_that_is_not_used_turns_nothing_on(auxiliary: bool) -> None:
    torch.manual_seed(0)
    net = LeftOver(auxiliary=auxiliary).eval()
    found = MCDropout(net, CategoricalLikelihood()).predict(X, 20, keep_samples=True)
    assert not net.mean.any()
    assert not net.training
    alone = nn.Sequential(net.used, net.last).eval()
    expected = MCDropout(alone, CategoricalLikelihood()).predict(X, 20, keep_samples=True)
    assert torch.equal(found.mean, expected.mean)
    assert type(net.unused) is nn.Dropout


@loop_over(
    "net",
    [
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.4, batch_first=True),
        nn.MultiheadAttention(4, 2, dropout=0.4, batch_first=True),
        nn.LSTM(4, 4, num_layers=2, dropout=0.4, batch_first=True),
        nn.Sequential(nn.AlphaDropout(0.3)),
    ],
)
def test_dropout_inside_of_other_layers_is_on(net: nn.Module) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            inputs = (x, x, x) if isinstance(net, nn.MultiheadAttention) else (x,)
            outputs = net(*inputs)
            return outputs[0] if isinstance(outputs, tuple) else outputs

    p = MCDropout(Whole().eval(), GaussianLikelihood()).predict(normals(2, 5, 4).float(), 8)
    assert float((p.epistemic > 0.0).float().mean()) > 0.8


def test_an_ensemble_is_the_mixture_of_its_members() -> None:
    members = [point(seed) for seed in range(5)]
    p = DeepEnsemble(members).predict(X, keep_samples=True)
    assert isinstance(p, CategoricalPredictive)
    each = torch.stack([member.predict_mean(X).mean for member in members])
    assert p.samples is not None
    assert torch.allclose(p.samples, each, atol=1e-6)
    assert torch.allclose(p.mean, each.mean(0), atol=1e-6)
    assert float(p.epistemic.min()) > 0.0
    assert DeepEnsemble(members).predict(X).samples is None
    alone = DeepEnsemble(members[:1]).predict(X)
    assert float(alone.epistemic.max()) == 0.0


def test_members_with_noise_of_their_own_keep_it() -> None:
    members = [point(seed, likelihood=GaussianLikelihood(0.1 + seed)) for seed in range(3)]
    p = DeepEnsemble(members).predict(X)
    assert isinstance(p, GaussianPredictive)
    assert p.means.shape == (3, 7, 3)
    variance = torch.tensor([0.1, 1.1, 2.1]).square().mean()
    assert torch.allclose(p.aleatoric, variance.expand(7, 3))


def test_bayesian_members_share_their_samples_equally() -> None:
    torch.manual_seed(0)
    bayesian = [BayesianModule(nn.Linear(4, 3), init_std=0.5, seed=s) for s in range(2)]
    p = DeepEnsemble(bayesian).predict(X, 10, keep_samples=True)
    parts = [member.predict(X, 10, keep_samples=True) for member in bayesian]
    assert torch.allclose(p.mean, (parts[0].mean + parts[1].mean) / 2, atol=1e-6)
    assert p.samples is not None
    assert len(p.samples) == 20
    mixed = DeepEnsemble([bayesian[0], point()]).predict(X, 10)
    expected = (parts[0].mean + point().predict_mean(X).mean) / 2
    assert torch.allclose(mixed.mean, expected, atol=1e-6)
    alike = [BayesianModule(nn.Linear(4, 3), init_std=0.5) for _ in range(3)]
    with torch.no_grad():
        for member in alike[1:]:
            member.posterior.mean.copy_(alike[0].posterior.mean)
    drawn = DeepEnsemble(alike).predict(X, 1, keep_samples=True).samples
    assert drawn is not None
    assert len(drawn.unique(dim=0)) == 3, "equal seeds are no equal noise"
    one = DeepEnsemble(bayesian)
    assert not torch.equal(one.predict(X, 5).mean, one.predict(X, 5, seed=4).mean)


def test_inputs_need_not_have_one_length() -> None:
    """The nodes and the edges of a graph, which must not be divided."""
    torch.manual_seed(0)
    edges = torch.tensor([[0, 1], [1, 2], [2, 0], [3, 4]])
    dropout = MCDropout(Graph(), CategoricalLikelihood()).predict((X, edges), 5, batch_size="all")
    members = [BayesianModule(Graph(), seed=seed) for seed in range(2)]
    ensemble = DeepEnsemble(members).predict((X, edges), 5, batch_size="all")
    assert dropout.mean.shape == ensemble.mean.shape == (7, 3)
    parts = [member.predict((X, edges), 5, batch_size="all").mean for member in members]
    assert torch.allclose(ensemble.mean, (parts[0] + parts[1]) / 2, atol=1e-6)


def test_memory_of_a_member_is_limited() -> None:
    ensemble = DeepEnsemble([BayesianModule(nn.Linear(4, 3), seed=seed) for seed in range(2)])
    p = ensemble.predict(X, 5, max_memory="64 MB")
    assert torch.allclose(p.mean, ensemble.predict(X, 5).mean, atol=1e-6)
    with pytest.raises(ValueError, match="max_memory"):
        ensemble.predict(X, 5, max_memory=10)


class Graph(nn.Module):
    """A layer whose outputs at a node are summed over its edges."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(4, 3), nn.Dropout(0.5)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        outputs: Tensor = self.dropout(self.layer(nodes))
        return outputs.index_add(0, edges[:, 1], outputs[edges[:, 0]])


@loop_over(
    ("call", "kind", "message"),
    [
        (lambda: MCDropout("net"), TypeError, "net must be an nn.Module, got 'net'"),
        (lambda: MCDropout(dropping()), ValueError, "pass one such as"),
        (lambda: MCDropout(dropping(), "x"), TypeError, "must be a Likelihood .* got 'x'"),
        (lambda: MCDropout(dropping(0.0), GaussianLikelihood()), ValueError, "p is above 0"),
        (lambda: MCDropout(point()), ValueError, "dropout layer whose p"),
        (lambda: MCDropout(one_layer(), GaussianLikelihood()), ValueError, "p is above 0"),
        (lambda: MCDropout(BayesianModule(dropping())), ValueError, "got the posterior MeanField"),
        (
            lambda: MCDropout(dropping(), CategoricalLikelihood()).predict(X, 0),
            ValueError,
            "num_samples must be at least 1, got 0",
        ),
        (
            lambda: MCDropout(dropping(), CategoricalLikelihood()).predict(X, batch_size=0),
            ValueError,
            "batch_size must be at least 1, got 0",
        ),
        (
            lambda: MCDropout(dropping(), CategoricalLikelihood()).predict(X, 1.5),  # type: ignore[arg-type]
            TypeError,
            r"num_samples must be a whole number, got 1\.5",
        ),
        (lambda: DeepEnsemble([]), ValueError, "at least one member, got none"),
        (lambda: DeepEnsemble(point()), TypeError, r"got one BayesianModule; pass \[member\]"),
        (lambda: DeepEnsemble([nn.Linear(2, 2)]), TypeError, "got Linear; wrap"),
        (
            lambda: DeepEnsemble([point(), point(likelihood=GaussianLikelihood())]),
            ValueError,
            "one kind, got CategoricalLikelihood, GaussianLikelihood",
        ),
        (lambda: DeepEnsemble([point()]).predict(X, 0), ValueError, "num_samples must be"),
    ],
)
def test_what_does_not_fit_is_refused(
    call: Callable[[], object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        call()


#: Seeds whose derived seeds agree in the lower 32 bits.
COLLIDING = (101882, 150711)


def test_seeds_share_no_masks_of_mc_dropout() -> None:
    """PyTorch keeps 32 bits of a seed on the CPU, in which the seeds of these answers agree."""
    one, other = (predicted_with(seed) for seed in COLLIDING)
    assert len({derived_seed(s, Stream.PREDICTION, 0) % 2**32 for s in COLLIDING}) == 1
    assert not torch.equal(one, other)
    assert torch.equal(predicted_with(COLLIDING[0]), one)


def predicted_with(seed: int) -> Tensor:
    net = nn.Sequential(nn.Dropout(0.5), nn.Identity())
    return MCDropout(net, GaussianLikelihood()).predict(torch.ones(1, 100), 1, seed=seed).mean


def test_two_threads_with_dropout_predict_as_one_does() -> None:
    def made(seed: int) -> MCDropout:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.ReLU(), nn.Linear(50, 3))
        return MCDropout(net, CategoricalLikelihood(), seed=seed)

    x, objects = torch.randn(20, 4), [made(0), made(1)]
    expected = [each.predict(x, 20).mean for each in objects]
    before = torch.get_rng_state()
    for _ in range(5):
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda each: each.predict(x, 20).mean, objects))
        assert all(map(torch.equal, found, expected))
    assert torch.equal(torch.get_rng_state(), before)
