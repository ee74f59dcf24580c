"""Predictions in batches: the same answers however they are cut."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from tests.loops import loop_over
from tests.memory_cases import CUTS, KEY, NETWORKS, N, S, X, explicit, made, passes
from torch import Tensor, nn

from bayesify import (
    BayesianModule,
    BernoulliLikelihood,
    CategoricalLikelihood,
    Delta,
    GaussianLikelihood,
)
from bayesify.estimators.network_state import evaluation_mode
from bayesify.module.batching import Batching
from bayesify.module.kept_samples import sampler_of
from bayesify.module.networks import lenet5, mlp
from bayesify.module.pass_memory import MemoryTracker
from bayesify.module.sampling import SampledOutputs


@loop_over(
    ("name", "likelihood"),
    [*((name, "categorical") for name in NETWORKS), ("mlp", "gaussian"), ("conv", "gaussian")],
)
def test_answers_do_not_depend_on_the_batches(name: str, likelihood: str) -> None:
    bnn, inputs = made(name, likelihood)
    outputs = explicit(bnn, inputs)
    # What doubles its weights at each pass is another network in batches.
    for cut in CUTS if name != "late-failure" else [{}, {"batch_size": N}, {"max_memory": "64 MB"}]:
        p = bnn.predict(inputs, S, keep_samples=True, **cut)
        samples = outputs.softmax(-1) if likelihood == "categorical" else outputs
        assert torch.allclose(p.samples, samples, rtol=1e-12, atol=1e-13), cut
        assert torch.allclose(p.mean, samples.mean(0), rtol=1e-12, atol=1e-13), cut
        whole = bnn.mean_outputs(inputs, batch_size=N)
        assert torch.allclose(bnn.mean_outputs(inputs, **cut), whole, rtol=1e-12, atol=1e-13)
        found = bnn.predict_mean(inputs, **cut).mean
        expected = whole.softmax(-1) if likelihood == "categorical" else whole
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-13)


@loop_over("name", NETWORKS)
def test_weight_samples_share_passes_where_they_can(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bnn, inputs = made(name)
    bnn.predict(inputs, 1)  # which measures
    count = passes(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bnn.predict(inputs, S)
    assert len(count) == NETWORKS[name][2]
    count.clear()
    bnn.predict(inputs, S, batch_size=8)
    assert len(count) == 3 * S


def test_the_mean_network_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bnn, x = made("mlp")
    count = passes(monkeypatch)
    for expected in (3, 1, 1):  # at first over one example and over eight, to measure
        count.clear()
        bnn.predict_mean(x)
        assert len(count) == expected


def test_a_pass_is_of_few_megabytes() -> None:
    bnn, few = BayesianModule(lenet5()), torch.zeros(20, 784)
    many = few[:1].expand(4000, 784)
    with torch.no_grad(), evaluation_mode(bnn.net):
        size, group, *_ = Batching.of(bnn, many, {}, num_samples=S)
        with MemoryTracker() as tracker:
            bnn.run_with(bnn.posterior.mean, many[:size])
        assert group == 1
        assert 8e6 < tracker.peak < 18e6
        assert Batching.of(bnn, few, {}, num_samples=S)[:2] == (20, 1)
        assert Batching.of(bnn, few[:2], {}, num_samples=7)[:2] == (2, 1)
        assert Batching.of(bnn, few[:2], {}, num_samples=S)[:2] == (2, S)


class Noisy(nn.Linear):
    """Draws from torch's generator and counts its passes, in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) + torch.rand(len(x), 3, dtype=x.dtype)


@loop_over("cap", [None, "64 MB"])
def test_measuring_leaves_nothing_behind(cap: str | None) -> None:
    bnn, x = BayesianModule(Noisy().double()), X.clone()
    before, modes = torch.get_rng_state(), [module.training for module in bnn.modules()]
    first = bnn.predict(x, S, max_memory=cap).mean
    assert bnn.net.count == S
    torch.set_rng_state(before)
    assert torch.equal(bnn.predict(x, S, max_memory=cap).mean, first)
    torch.set_rng_state(before)
    with torch.no_grad(), evaluation_mode(bnn.net):
        list(SampledOutputs(bnn, x, sampler_of(bnn.posterior, KEY), S, Batching(N, 1)))
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    bnn.predict(x, S, max_memory=cap)
    assert torch.equal(torch.get_rng_state(), after)
    assert [module.training for module in bnn.modules()] == modes
    assert torch.equal(x, X)


def test_inputs_that_a_network_edits_are_edited_once_and_the_callers_not_at_all() -> None:
    class Halving(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(0.5))

    bnn, x = BayesianModule(Halving(4, 3).double()), X.clone()
    expected = bnn.to_module()(X.clone())
    assert torch.equal(bnn.mean_outputs(x), expected)
    assert torch.equal(x, X)


def test_what_a_network_keeps_stays_a_tensor() -> None:
    bnn, x = made("keeping")
    expected = explicit(bnn, x)[-1]
    bnn.predict(x, S)
    assert torch.allclose(bnn.net.mask, expected)


def test_a_failed_attempt_leaves_nothing_behind() -> None:
    bnn, x = made("late-failure")
    bnn.predict(x, S)
    assert bnn.net.count == S


@loop_over("name", ["keeping", "recurrent"])
def test_outputs_hold_no_more_than_themselves(name: str) -> None:
    bnn, x = made(name)
    outputs = bnn.mean_outputs(x)
    assert outputs.untyped_storage().nbytes() == outputs.nbytes
    if name == "keeping":
        assert outputs.data_ptr() != bnn.net.mask.data_ptr()


@loop_over("cap", [None, "64 MB"])
def test_a_hook_sees_every_pass_and_no_shared_one(cap: str | None) -> None:
    bnn, x = made("mlp")
    seen = []
    bnn.net[0].register_forward_hook(lambda *args: seen.append(args[-1].shape))
    bnn.predict(x, S, max_memory=cap)
    assert seen[-S:] == [(N, 6)] * S
    assert len(seen) == S + (0 if cap is None else 2)


def test_data_that_belong_together_go_together() -> None:
    class Graph(nn.Linear):
        def forward(self, x: Tensor, neighbours: Tensor) -> Tensor:
            return super().forward(neighbours @ x)

    torch.manual_seed(0)
    bnn, inputs = BayesianModule(Graph(4, 3).double()), (X, torch.eye(N, dtype=X.dtype).flip(0))
    assert torch.allclose(
        bnn.mean_outputs(inputs), bnn.mean_outputs((X.flip(0), inputs[1].flip(0)))
    )
    assert bnn.predict(inputs, S).mean.shape == (N, 3)
    with pytest.raises(RuntimeError) as error:
        bnn.predict(inputs, S, max_memory="1 GB")
    assert "max_memory measures a pass over one example" in error.value.__notes__[0]


def test_outputs_that_are_no_rows_of_data_are_not_put_together() -> None:
    class TimeFirst(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).transpose(0, 1)

    bnn = BayesianModule(TimeFirst(4, 3).double(), likelihood=GaussianLikelihood())
    x = X.unsqueeze(1).expand(N, 2, 4)
    assert bnn.predict(x, 2).mean.shape == (2, N, 3)
    for cut in ({"batch_size": 20}, {"max_memory": "1 GB"}):
        with pytest.raises(ValueError, match=r"a row for each example .* got shape \(2, "):
            bnn.predict(x, 2, **cut)


@loop_over("samples", [1, 50])
def test_the_axis_of_one_example_is_not_lost(samples: int) -> None:
    class Squeezed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).squeeze()

    bnn = BayesianModule(Squeezed(4, 1).double(), likelihood=GaussianLikelihood())
    assert bnn.predict(X, samples).mean.shape == (N,)
    for answer in (bnn.predict, lambda x, _: bnn.predict_mean(x)):
        with pytest.raises(ValueError, match=r"a row for each example, .* use squeeze\(-1\)"):
            answer(X[:1], samples)


def test_a_point_estimate_has_one_answer() -> None:
    bnn = BayesianModule(mlp(4, (6,), 3).double(), posterior=Delta)
    samples = bnn.predict(X, S, keep_samples=True).samples
    expected = bnn.predict_mean(X).mean.expand(S, N, 3)
    assert torch.allclose(samples, expected, rtol=1e-12)


def test_the_targets_of_an_example_belong_together() -> None:
    """Of tokens the log of the averaged product, not the product of the averages."""
    torch.manual_seed(0)
    bnn = BayesianModule(
        nn.Linear(4, 3), init_std=1.0, likelihood=CategoricalLikelihood(ignore_index=-100)
    )
    x, y = torch.randn(5, 7, 4), torch.randint(3, (5, 7))
    y[:, -1] = -100
    p = bnn.predict(x, 20, keep_samples=True)
    assert p.samples is not None
    logs = p.samples[:, :, :-1].log().gather(-1, y[None, :, :-1, None].expand(20, -1, -1, -1))
    together = logs.squeeze(-1).sum(-1).logsumexp(0) - math.log(20)
    torch.testing.assert_close(bnn.log_prob(x, y, 20), together, rtol=1e-4, atol=1e-5)
    apart = p.mean[:, :-1].log().gather(-1, y[:, :-1, None]).squeeze(-1).sum(-1)
    assert bool((together > apart + 0.1).any())
    torch.testing.assert_close(bnn.log_prob(x, y, 20, batch_size=2), together, rtol=1e-4, atol=1e-5)
    labels = BayesianModule(nn.Linear(4, 3), likelihood=BernoulliLikelihood())
    assert labels.log_prob(x[:, 0], (y[:, :3] > 1).float(), 5).shape == (5,)


class Caching(nn.Module):
    """A layer that keeps something of a pass in evaluation mode until it is trained."""

    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))
        self.keeps = keeps
        self.cache: Tensor | None = None
        self.caches: dict[str, Tensor] = {}

    def train(self, mode: bool = True) -> Caching:
        self.cache = None
        self.caches.clear()
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        weight, scale = self.weight * 2.0, x.new_full((2,), 3.0)
        if self.keeps == "weight" and not self.training:
            self.cache = weight = weight if self.cache is None else self.cache
        elif self.keeps == "bare":
            weight = self.weight
        elif self.keeps == "view" and not self.training:
            self.cache = self.weight.T if self.cache is None else self.cache
            weight = self.cache.T
        elif self.keeps == "dict" and not self.training:
            weight = self.caches.setdefault("weight", weight)
        elif self.keeps == "constant":
            self.cache = scale if self.cache is None else self.cache
            scale = self.cache
        elif self.keeps == "outputs":
            self.cache = weight.sum()
        return nn.functional.linear(x, weight) * scale


@loop_over("keeps", ["weight", "view", "dict"])
def test_each_sample_computes_the_weights_that_a_network_caches(keeps: str) -> None:
    x, y = torch.rand(5, 3), torch.zeros(5, dtype=torch.int64)
    plain, bnn = (
        BayesianModule(nn.Sequential(Caching(each)), init_std=0.5)
        for each in ("" if keeps != "view" else "bare", keeps)
    )
    for cut in ({}, {}, {"max_memory": "64 MB"}, {"batch_size": 2}, {"batch_size": "all"}):
        for inputs in (x, x[:1]):
            found, expected = bnn.predict(inputs, S, **cut), plain.predict(inputs, S, **cut)
            torch.testing.assert_close(found.mean, expected.mean)
            assert found.epistemic.max() > 1e-3
            torch.testing.assert_close(bnn.predict_mean(x).mean, plain.predict_mean(x).mean)
            assert bnn.net[0].cache is None
            assert not bnn.net[0].caches
    torch.testing.assert_close(bnn.log_prob(x, y, S), plain.log_prob(x, y, S))
    point = BayesianModule(Caching(keeps), posterior=Delta)
    assert not point.predict(x, S).epistemic.any()


@loop_over("keeps", ["constant", "outputs"])
def test_what_a_network_keeps_besides_its_weights_is_no_matter(keeps: str) -> None:
    x = torch.ones(5, 3)
    plain, bnn = (BayesianModule(Caching(each), init_std=0.5) for each in ("", keeps))
    for cut in ({}, {"max_memory": "64 MB"}):
        torch.testing.assert_close(bnn.predict(x, S, **cut).mean, plain.predict(x, S, **cut).mean)


def test_a_constant_that_is_kept_does_not_keep_samples_from_sharing_a_pass() -> None:
    class Masked(nn.Linear):
        mask: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.mask is None:
                self.mask = torch.tensor([1.0, 0.0])
            return super().forward(x) * self.mask

    bnn = BayesianModule(Masked(3, 2), init_std=0.5).eval()
    with torch.no_grad():
        assert Batching.of(bnn, torch.ones(20, 3), {}, num_samples=100).group == 100


class CachingForGood(Caching):
    """A network that does not clear its cache, so that a pass of an earlier call has filled it."""

    def train(self, mode: bool = True) -> CachingForGood:
        nn.Module.train(self, mode)
        return self


def test_a_cache_outlasts_no_call() -> None:
    x = torch.rand(9, 3)
    plain = BayesianModule(Caching(""), init_std=0.5)
    calls = (lambda bnn: bnn.predict(x, 1), lambda bnn: bnn.mean_outputs(x, max_memory="64 MB"))
    for call in calls:
        bnn = BayesianModule(CachingForGood("weight"), init_std=0.5)
        call(bnn)
        for inputs in (x, x[:5], x[:2]):
            expected = plain.predict(inputs, S).mean
            torch.testing.assert_close(bnn.predict(inputs, S).mean, expected)


class CachingOfMany(Caching):
    """A network that caches, and takes no batch of one example."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.batch_norm(x, None, None, training=True))


def test_caches_of_a_network_that_takes_no_single_example() -> None:
    x = torch.arange(27.0).reshape(9, 3) ** 0.5
    plain = BayesianModule(CachingOfMany(""), init_std=0.5)
    for cut in ({}, {"batch_size": 5}, {}):
        bnn = BayesianModule(CachingOfMany("weight"), init_std=0.5)
        found = bnn.predict(x, S, keep_samples=True, **cut).samples
        torch.testing.assert_close(found, plain.predict(x, S, keep_samples=True, **cut).samples)
        assert (found[0] - found[1]).abs().max() > 0.01


class Stateful(nn.Module):
    """A recurrent network that resumes from its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(4, 5), nn.Linear(5, 3)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.cell(x, self.state)
        outputs: Tensor = self.head(self.state)
        return outputs


def test_measuring_a_pass_leaves_no_state() -> None:
    x, net = torch.ones(6, 4), Stateful()
    bnn, expected = BayesianModule(net, init_std=0.5), net(x).detach()
    for _ in "12":
        torch.testing.assert_close(bnn.mean_outputs(x), expected)
        bnn.net.state = None
    bnn.net.state = kept = torch.zeros(2, 5)  # which suits no other number of rows
    with pytest.raises(RuntimeError, match="hidden"):
        bnn.predict(x, 1)
    assert bnn.net.state is kept


def test_a_state_of_earlier_passes_is_refused() -> None:
    x = torch.randn(6, 4)
    for include in (["cell.*"], ["head.*"]):
        bnn = BayesianModule(Stateful(), include=include, init_std=0.5)
        for cut in ({}, {}, {"max_memory": "64 MB"}, {"batch_size": "all"}):
            with pytest.raises(ValueError, match="keeps a state of earlier passes in state, on"):
                bnn.predict(x, S, **cut)
