"""ParameterLayout and BayesianModule: which weights are random, and that the net stays itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.cases import CORRELATIONS, LIKELIHOOD_PARAMETERS, Case, each_case, mlp, normals
from tests.loops import loop_over
from torch import Tensor, nn

from bayesify import (
    ELBO,
    BayesianModule,
    Delta,
    FullGaussian,
    GaussianLikelihood,
    LowRankGaussian,
    MeanFieldGaussian,
    ParameterLayout,
    prune,
)
from bayesify.estimators.stateless import parameter_paths
from bayesify.noise.keys import NoiseKey, Stream

CASE = Case("scale-mixture", "mean-field", "categorical")


class Tied(nn.Module):
    """An embedding whose matrix is the output layer's too, and one layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.inner = nn.Linear(4, 4)
        self.again = self.inner
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.again(torch.tanh(self.inner(self.embed(tokens))))
        return self.head(hidden.mean(1))


class Scaled(nn.Module):
    """A parameter without axes, one without elements in use, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.linear = nn.Linear(3, 4)
        self.register_buffer("offset", torch.tensor(0.25))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.linear(x) + self.offset


def normalised() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, 6), nn.BatchNorm1d(6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 4)
    )


def test_ties_are_one_entry_with_all_its_names() -> None:
    layout = ParameterLayout.of(Tied())
    assert layout.names == ("embed.weight", "inner.weight", "inner.bias", "head.bias")
    assert layout.sizes == (28, 16, 4, 7)
    assert layout.num_weights == 55
    assert set(layout.ties[0]) == {"embed.weight", "head.weight"}
    assert set(layout.ties[1]) == {"inner.weight", "again.weight"}
    assert layout.slice_of("head.weight") == layout.slice_of("embed.weight") == slice(0, 28)
    assert layout.slice_of("again.bias") == slice(44, 48)


def test_flatten_and_unflatten_are_inverse() -> None:
    net = Tied()
    layout = ParameterLayout.of(net)
    tensors = {name: net.get_parameter(name).detach() for name in layout.names}
    flat = layout.flatten(tensors)
    back = layout.unflatten(flat)
    assert list(back) == list(layout.names)
    assert all(torch.equal(back[name], tensors[name]) for name in layout.names)
    samples = normals(2, 5, layout.num_weights)
    many = layout.unflatten(samples)
    assert many["inner.weight"].shape == (2, 5, 4, 4)
    part = samples[..., layout.slice_of("inner.weight")]
    assert torch.equal(many["inner.weight"].flatten(2), part)
    places = {name for names in parameter_paths(net, layout).values() for name in names}
    every_name = {name for name, _ in net.named_parameters(remove_duplicate=False)}
    # The module called again is the one called inner: one place for each of its parameters.
    assert places == {name for name in every_name if not name.startswith("again.")}


def test_a_parameter_without_axes_is_one_weight() -> None:
    net = Scaled()
    bnn = BayesianModule(net, init_std=1e-9)
    assert bnn.layout.num_weights == 1 + 12 + 4
    x = torch.ones(2, 3)
    assert torch.allclose(bnn(x), net(x), atol=1e-6)
    assert torch.equal(bnn.to_module().scale, net.scale)


@loop_over(
    ("options", "names"),
    [
        ({}, ("0.weight", "0.bias", "2.weight", "2.bias")),
        ({"include": ("*.weight",)}, ("0.weight", "2.weight")),
        ({"include": ("2.*",)}, ("2.weight", "2.bias")),
        ({"exclude": ("*.bias",)}, ("0.weight", "2.weight")),
        ({"include": ("2.*", "0.bias"), "exclude": ("2.bias",)}, ("0.bias", "2.weight")),
    ],
)
def test_include_and_exclude_choose_by_name(options: dict, names: tuple[str, ...]) -> None:
    assert ParameterLayout.of(mlp(), **options).names == names


def test_a_tied_parameter_is_matched_by_any_of_its_names() -> None:
    assert ParameterLayout.of(Tied(), include=("head.weight",)).names == ("embed.weight",)
    assert "embed.weight" not in ParameterLayout.of(Tied(), exclude=("head.weight",)).names


def test_frozen_parameters_are_not_random() -> None:
    net = mlp()
    net[0].requires_grad_(requires_grad=False)
    bnn = BayesianModule(net)
    assert bnn.layout.names == ("2.weight", "2.bias")
    assert torch.equal(bnn.net[0].weight, net[0].weight)
    assert not bnn.net[0].weight.requires_grad


def test_normalisation_stays_deterministic_unless_named() -> None:
    linear = ("0.weight", "0.bias", "4.weight", "4.bias")
    net = normalised()
    assert ParameterLayout.of(net).names == linear
    assert ParameterLayout.of(net, include=("*", "1.*")).names == (
        *linear[:2], "1.weight", "1.bias", *linear[2:]
    )  # fmt: skip
    assert len(ParameterLayout.of(net, exclude=()).names) == 8
    assert len(ParameterLayout.of(net, exclude=("0.*",)).names) == 6
    bnn = BayesianModule(net)
    assert sorted(name for name, _ in bnn.named_parameters()) == [
        "net.1.bias", "net.1.weight", "net.2.bias", "net.2.weight",
        "posterior.mean", "posterior.rho",
    ]  # fmt: skip
    bnn(normals(9, 3, dtype=torch.float32))
    assert bnn.net[1].num_batches_tracked == 1, "buffers keep working"
    assert net[1].num_batches_tracked == 0


def test_the_layout_knows_its_dtype() -> None:
    assert ParameterLayout.of(mlp(torch.float64)).dtype is torch.float64
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    assert ParameterLayout.of(mixed, include=("1.*",)).dtype is torch.float64


@each_case
def test_the_users_net_is_not_changed_or_shared(case: Case) -> None:
    net = nn.Sequential(*case.net(), nn.BatchNorm1d(case.num_outputs, dtype=torch.float64))
    before = copy.deepcopy(net.state_dict())
    bnn = case.bnn(net)
    optimizer = torch.optim.Adam(bnn.parameters(), lr=0.1)
    elbo = ELBO(bnn, num_data=8)
    for _ in range(3):
        optimizer.zero_grad()
        elbo(*case.data(8)).loss.backward()
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    own = {tensor.untyped_storage().data_ptr() for tensor in net.state_dict().values()}
    ours = {tensor.untyped_storage().data_ptr() for tensor in bnn.state_dict().values()}
    assert not own & ours
    flat = torch.cat([p.detach().flatten() for p in list(net.parameters())[:4]])
    assert not torch.isclose(bnn.posterior.mean, flat).any(), "the posterior did train"


@loop_over("make", [MeanFieldGaussian, Delta])
def test_a_posterior_has_its_own_memory(make: type[MeanFieldGaussian | Delta]) -> None:
    mean, std = torch.zeros(3), torch.ones(3)
    q = make.centred_on(mean, std if make is MeanFieldGaussian else None)
    with torch.no_grad():
        for parameter in q.parameters():
            parameter.fill_(7.0)
    assert torch.equal(mean, torch.zeros(3))
    assert torch.equal(std, torch.ones(3))


@each_case
def test_parameters_are_theta_the_likelihoods_and_the_rest(case: Case) -> None:
    names = {name for name, _ in case.bnn().named_parameters()}
    expected = {"posterior.mean"} if case.is_point else {"posterior.mean", "posterior.rho"}
    own = CORRELATIONS.get(case.posterior, set())
    if case.num_outputs == 1:  # a single output is correlated with no other
        own = own - {"1.rows"}
    expected |= {f"posterior.correlations.{name}" for name in own}
    learned = LIKELIHOOD_PARAMETERS.get(case.likelihood, set())
    assert names == expected | {f"likelihood.{name}" for name in learned}


@each_case
def test_a_call_is_what_the_net_would_return(case: Case) -> None:
    net = case.net()
    x, _ = case.data(6)
    exact = net(x)
    bnn = case.bnn(net, init_std=None if case.is_point else 1e-12)
    assert torch.allclose(bnn(x), exact, atol=1e-10)
    assert bnn(x).shape == exact.shape
    wide = case.bnn(net)
    first, second = wide(x), wide(x)
    assert torch.equal(first, second) == case.is_point
    assert torch.equal(case.bnn(net)(x), first), "calls repeat from the same seed"


def test_any_output_and_any_argument_pass_through() -> None:
    lstm = nn.LSTM(3, 4, batch_first=True)
    bnn = BayesianModule(lstm, init_std=1e-9)
    x = torch.ones(2, 5, 3)
    output, (hidden, cell) = bnn(x, (torch.ones(1, 2, 4), torch.zeros(1, 2, 4)))
    exact, (exact_hidden, exact_cell) = lstm(x, (torch.ones(1, 2, 4), torch.zeros(1, 2, 4)))
    for got, expected in ((output, exact), (hidden, exact_hidden), (cell, exact_cell)):
        assert torch.allclose(got, expected, atol=1e-6)
    assert torch.allclose(bnn(input=x)[0], lstm(input=x)[0], atol=1e-6)


@each_case
def test_deepcopy_and_state_dict_carry_everything(case: Case) -> None:
    bnn, (x, y) = case.bnn(), case.data(6)
    elbo = ELBO(bnn, num_data=6)
    for _ in range(2):
        elbo(x, y).loss.backward()
    with torch.no_grad():
        for parameter in bnn.parameters():
            parameter.add_(0.1 * parameter.grad)
    twin = copy.deepcopy(elbo)
    other = ELBO(case.bnn(case.net(seed=5)), num_data=6)
    assert not torch.equal(other(x, y).loss, copy.deepcopy(elbo)(x, y).loss)
    other.load_state_dict(elbo.state_dict())
    expected = elbo(x, y).loss
    assert torch.equal(twin(x, y).loss, expected)
    assert torch.equal(other(x, y).loss, expected)
    assert torch.equal(other.bnn.predict(x, 3).mean, bnn.predict(x, 3).mean)
    with torch.no_grad():
        twin.bnn.posterior.mean.add_(1.0)
    assert not torch.equal(twin.bnn.predict(x, 3).mean, bnn.predict(x, 3).mean)


def test_a_partial_state_leaves_pruning_alone() -> None:
    net = normalised()
    small = prune(BayesianModule(net), 0.5)
    kept = small.posterior.mask.clone()
    rest = {n: v for n, v in small.state_dict().items() if not n.startswith("posterior.")}
    small.load_state_dict(rest, strict=False)
    assert torch.equal(small.posterior.mask, kept)
    small.load_state_dict(BayesianModule(net).state_dict())
    assert small.posterior.mask is None
    small.load_state_dict(prune(BayesianModule(net), 0.5).state_dict())
    assert torch.equal(small.posterior.mask, kept)


def test_to_double_moves_noise_weights_and_answers() -> None:
    bnn = CASE.bnn(mlp(torch.float32)).to(torch.float64)
    x, y = CASE.data(5)
    assert bnn.predict(x, 3).mean.dtype is torch.float64
    terms = ELBO(bnn, num_data=5)(x, y)
    assert {value.dtype for value in terms[:4]} == {torch.float64}
    assert bnn(x).dtype is torch.float64
    assert bnn.to_module()(x).dtype is torch.float64


def test_noise_is_drawn_on_the_device_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NoiseKey, "fill_normals", lambda *_: None)  # "meta" has no generator
    posterior = MeanFieldGaussian(torch.zeros(3), std=1.0).to("meta")
    noise = posterior.noise(NoiseKey(0, Stream.TRAINING, 0), range(2))
    assert noise.device == torch.device("meta")
    assert noise.shape == (2, 3)


@loop_over("make", [Tied, normalised, Scaled])
def test_to_module_is_the_original_class_with_mean_weights(make: Callable[[], nn.Module]) -> None:
    net = make()
    bnn = BayesianModule(net, likelihood=GaussianLikelihood())
    with torch.no_grad():
        bnn.posterior.mean.add_(0.1)
    plain = bnn.to_module()
    assert type(plain) is type(net)
    assert list(plain.state_dict()) == list(net.state_dict())
    assert [n for n, _ in plain.named_parameters()] == [n for n, _ in net.named_parameters()]
    x = torch.arange(12).view(3, 4) % 7 if make is Tied else normals(4, 3, dtype=torch.float32)
    assert torch.equal(plain.eval()(x), bnn.predict_mean(x).mean)
    net.load_state_dict(plain.state_dict())
    assert torch.equal(net.eval()(x), plain(x))
    if make is Tied:
        assert plain.head.weight is plain.embed.weight
        assert plain.again is plain.inner
    before = bnn.posterior.mean.detach().clone()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(1.0)
    assert torch.equal(bnn.posterior.mean, before)


@loop_over("posterior", [MeanFieldGaussian, Delta, FullGaussian(), LowRankGaussian(rank=2)])
def test_to_module_of_a_sample_is_the_network_of_this_sample_of_predict(posterior: Any) -> None:
    bnn = BayesianModule(nn.Linear(4, 3), likelihood=GaussianLikelihood(), posterior=posterior)
    x = normals(5, 4, dtype=torch.float32)
    for seed in (None, 7):
        samples = bnn.predict(x, 4, keep_samples=True, seed=seed).samples
        assert samples is not None
        for number, expected in enumerate(samples):
            found = bnn.to_module(number, seed=seed)(x)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    before = {name: each.clone() for name, each in bnn.state_dict().items()}
    with torch.no_grad():
        bnn.to_module(sample=1).weight.zero_()
    assert all(torch.equal(each, before[name]) for name, each in bnn.state_dict().items())


def test_to_module_refuses_numbers_that_are_no_sample() -> None:
    bnn = BayesianModule(nn.Linear(4, 3))
    with pytest.raises(TypeError, match=r"sample must be a whole number, got 0\.5"):
        bnn.to_module(sample=0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sample must be at least 0, got -1"):
        bnn.to_module(sample=-1)
    with pytest.raises(ValueError, match="the mean weights have no seed, got 3"):
        bnn.to_module(seed=3)


def test_a_point_estimate_repeats_each_tie_once() -> None:
    net = Tied()
    tokens = torch.arange(12).view(3, 4) % 7
    bnn = BayesianModule(net, posterior=Delta)
    assert torch.equal(bnn(tokens), net(tokens))
    assert bnn.posterior.mean.numel() == 55


def listed() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.LayerNorm(3), nn.LSTM(2, 3))
    net.own = nn.ParameterList([torch.zeros(()), torch.zeros(2, 3)])
    return net


@loop_over("net", [nn.Linear(3, 2), nn.Linear(3, 2, bias=False), mlp().half(), Tied(), listed()])
def test_the_network_is_shown_as_it_was(net: nn.Module) -> None:
    bnn = BayesianModule(net)
    before = dict(bnn.net.named_parameters())
    shown = repr(net).replace("\n", "\n  ")
    for text in (repr(bnn), repr(ELBO(bnn, num_data=3)).replace("\n  ", "\n")):
        assert f"(net): {shown}\n" in text
    assert dict(bnn.net.named_parameters()) == before
    copy.deepcopy(bnn)
