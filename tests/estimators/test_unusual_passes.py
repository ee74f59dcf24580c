"""Passes in which a network does the unusual: each was once answered wrongly, in silence."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.cases import normals
from tests.loops import loop_over, noted
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from bayesify import (
    ELBO,
    BayesianModule,
    ClosedFormLastLayer,
    Estimator,
    Flipout,
    GaussianLikelihood,
    LocalReparameterization,
    WeightSampling,
    fit,
)
from bayesify.datasets import TensorLoader
from bayesify.estimators import per_example as perexample
from bayesify.noise.keys import NoiseKey, Stream

ESTIMATORS = [WeightSampling(), LocalReparameterization(), Flipout()]
LOCAL = ESTIMATORS[1:]
each_estimator = loop_over("estimator", ESTIMATORS)
each_local = loop_over("estimator", LOCAL)
X, Y = normals(8, 3, seed=1), torch.arange(8) % 2


class Net(nn.Module):
    """A linear layer, and what is to be done with it."""

    def __init__(self, run: Callable[[nn.Linear, Tensor], Any], num_outputs: int = 2) -> None:
        super().__init__()
        self.linear = nn.Linear(3, num_outputs)
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(self.linear, x)


def bayesian(net: nn.Module, estimator: Estimator, **options: Any) -> BayesianModule:
    return BayesianModule(net.double(), estimator=estimator, init_std=0.5, **options)


def treatments(bnn: BayesianModule) -> set[str]:
    return {row.treatment for row in bnn.summary()}


def nll_after_fit(*, around_fit: bool) -> float:
    """The last epoch's, with one autocast around fit or with one around each step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))
    elbo = ELBO(BayesianModule(net, include=("2.*",), init_std=1e-3), num_data=8)
    right = elbo.forward

    def forward(*args: Any, **options: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return right(*args, **options)

    if not around_fit:
        elbo.forward = forward  # type: ignore[method-assign]
    with torch.autocast("cpu", torch.bfloat16, enabled=around_fit):
        loader, sgd = TensorLoader(X.float(), Y, 4), partial(torch.optim.SGD, lr=0.5)
        nll = fit(elbo, loader, epochs=6, optimizer=sgd, backend="autograd")[-1]["nll"]
    assert nll is not None
    return nll


@pytest.mark.filterwarnings("ignore:.*standard deviations have not converged")
def test_fit_under_one_autocast_trains_deterministic_layers_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = pytest.approx(nll_after_fit(around_fit=False), abs=1e-6)
    assert nll_after_fit(around_fit=True) == expected
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: None)
    assert nll_after_fit(around_fit=True) != expected, "casts of old parameters must be noticed"


@each_estimator
def test_a_network_that_edits_its_weights_leaves_the_posterior(estimator: Estimator) -> None:
    def clamped(linear: nn.Linear, x: Tensor) -> Tensor:
        linear.weight.data.clamp_(-0.01, 0.01)
        return linear(x)

    bnn = bayesian(Net(clamped), estimator)
    before = copy.deepcopy(bnn.posterior.state_dict())
    bnn(X)
    bnn.predict_mean(X)
    bnn.summary(X)
    after = bnn.posterior.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("orthogonal_map", [None, "householder", "cayley", "matrix_exp"])
def test_an_orthogonal_map_whose_signs_are_whole_numbers_is_refused(
    orthogonal_map: str | None,
) -> None:
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(4, 8), orthogonal_map=orthogonal_map)
    net = nn.Sequential(layer, nn.Linear(8, 2))
    if orthogonal_map in (None, "householder"):
        with pytest.raises(TypeError, match=r"'0\.param.*weight\.original' .*\"cayley\".*exclude"):
            BayesianModule(net)
        net = BayesianModule(net, exclude=("0.parametrizations.*",)).to_module(sample=0)
    else:
        net = BayesianModule(net, init_std=0.1).to_module(sample=0)
    weight = net[0].weight
    torch.testing.assert_close(weight.T @ weight, torch.eye(4), atol=1e-5, rtol=0.0)


def test_max_norm_is_refused() -> None:
    net = nn.Sequential(nn.Embedding(5, 4, max_norm=0.5), nn.Linear(4, 2))
    with pytest.raises(TypeError, match=r"'0' has max_norm=0.5; remove it.* or exclude its"):
        BayesianModule(net)


@each_estimator
def test_max_norm_of_a_table_that_is_not_random_is_kept(estimator: Estimator) -> None:
    """In predictions, and in training, where every step makes rows longer."""
    table = nn.Embedding.from_pretrained(torch.randn(5, 4), freeze=False, max_norm=0.5)
    net = nn.Sequential(table, nn.Flatten(), nn.Linear(8, 2))
    bnn = BayesianModule(net, estimator=estimator, exclude=("0.*",))
    x, y = torch.tensor([[0, 1], [2, 3], [4, 0]]), torch.tensor([0, 1, 1])
    expected = copy.deepcopy(net)(x).softmax(-1)
    torch.testing.assert_close(bnn.predict_mean(x).mean, expected)
    found = bnn.predict(x, 8, keep_samples=True).samples
    for sample in range(8):
        torch.testing.assert_close(bnn.to_module(sample)(x).softmax(-1), found[sample])
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit(ELBO(bnn, num_data=3), [(x, y)], epochs=5, lr=0.1, progress=False)
        bnn.predict(x, 8)
        assert float(bnn.net[0].weight.detach().norm(dim=1).max()) < 0.5 + 1e-5


@loop_over("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_of_random_weights_are_refused(kind: Any) -> None:
    net = nn.Sequential(kind(5, 4, sparse=True), nn.Linear(4, 2))
    with pytest.raises(TypeError, match=r"the module '0' has sparse=True; set it to False, or"):
        BayesianModule(net)
    deterministic = BayesianModule(net, exclude=("0.*",))
    assert deterministic.layout.names == ("1.weight", "1.bias")


@loop_over("exclude", [None, ("1.*",)])
def test_a_bayesian_network_inside_another_is_refused(exclude: tuple[str, ...] | None) -> None:
    net = nn.Sequential(nn.Linear(3, 3), BayesianModule(nn.Linear(3, 2)))
    with pytest.raises(TypeError, match=r"must not contain a BayesianModule, but '1' is one"):
        BayesianModule(net, exclude=exclude)


def slope_by_jvp(linear: nn.Linear, x: Tensor) -> Tensor:
    return torch.func.jvp(linear, (x,), (torch.ones_like(x),))[1]


def slope_by_backward(linear: nn.Linear, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        linear(x).sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@each_local
@loop_over("slope", [slope_by_jvp, slope_by_backward])
def test_a_derivative_within_the_pass_is_one_weights(
    slope: Callable[[nn.Linear, Tensor], Tensor], estimator: Estimator
) -> None:
    bnn = bayesian(Net(slope), estimator)
    slopes = bnn(X)
    assert torch.equal(slopes[0], slopes[5])
    assert treatments(bnn) == {"sampled"}


def test_another_use_cannot_be_caught_by_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network with a fallback goes its way again with a sampled weight, not the fallback's."""

    def guarded(linear: nn.Linear, x: Tensor) -> Tensor:
        try:
            y = linear(x)
            return y if x.mean() > 0 else y + x @ linear.weight.T.clone()
        except Exception:
            return torch.full((len(x), 2), 7.0, dtype=x.dtype)

    for estimator in LOCAL:
        bnn = bayesian(Net(guarded), estimator)
        bnn(X.abs())
        assert treatments(bnn) == {"exact"}
        assert not (bnn(-X.abs()) == 7.0).any()
        assert bnn.summary()[0].treatment == "sampled"
    monkeypatch.setattr(perexample, "_UnexpectedUse", RuntimeError)
    right = perexample._NoiseInjector._add_use

    def forgetful(self: Any, name: str, use: Any) -> None:
        try:
            right(self, name, use)
        finally:
            self.unexpected = None

    monkeypatch.setattr(perexample._NoiseInjector, "_add_use", forgetful)
    bnn = bayesian(Net(guarded), Flipout())
    bnn(X.abs())
    assert (bnn(-X.abs()) == 7.0).all(), "the fault that this test is there to catch"


@each_estimator
def test_a_pass_within_a_backward_pass_is_refused(estimator: Estimator) -> None:
    bnn = bayesian(nn.Linear(3, 2), estimator)
    inputs = X.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="must not be run within a backward pass"):
        torch.utils.checkpoint.checkpoint(bnn, inputs, use_reentrant=False).sum().backward()


@each_local
def test_time_first_inputs_are_not_taken_for_data(estimator: Estimator) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    head = nn.Linear(4, 2)

    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.head = net, head

        def forward(self, steps: Tensor) -> Tensor:
            return self.head(self.net(steps).mean(0))

    bnn = bayesian(TimeFirst(), estimator)
    rows = bnn.summary(normals(6, 5, 3))
    assert {row.treatment for row in rows} == {"sampled"}
    assert "the outputs are not rows of examples" in rows[0].reason


@each_local
def test_one_output_of_rows_is_enough(estimator: Estimator) -> None:
    bnn = bayesian(Net(lambda linear, x: (x.sum(), linear(x))), estimator)
    bnn(X)
    assert treatments(bnn) == {"exact"}


@each_local
@loop_over(
    ("run", "args", "reason"),
    [
        (lambda linear, x: linear(x)[:, 0].view(8), (X,), "fails on a minibatch of another size"),
        (lambda linear, x: linear(x[0]), ([X],), "inputs do not tell the number of examples"),
    ],
)
def test_the_reason_is_told(
    run: Callable[..., Any], args: tuple[Any, ...], reason: str, estimator: Estimator
) -> None:
    bnn = bayesian(Net(run), estimator)
    row = bnn.summary(*args)[0]
    assert row.treatment == "sampled"
    assert reason in row.reason


def test_running_out_of_memory_while_tracing_is_not_hidden() -> None:
    def greedy(linear: nn.Linear, x: Tensor) -> Tensor:
        if len(x) > 8:
            raise torch.OutOfMemoryError("too large")
        return linear(x)

    with pytest.raises(torch.OutOfMemoryError):
        bayesian(Net(greedy), Flipout())(X)


@each_local
def test_a_number_that_changes_is_no_other_kind_of_pass(estimator: Estimator) -> None:
    passes: list[float] = []  # not in an attribute, which a trace restores

    class Tempered(nn.Linear):
        def forward(self, x: Tensor, temperature: float) -> Tensor:  # type: ignore[override]
            passes.append(temperature)
            return super().forward(x) / temperature

    bnn = bayesian(Tempered(3, 2), estimator)
    for step in range(10):
        bnn(X, 1.0 + step)
    assert len(passes) == 10 + 2, "two traced passes for all of them"


def test_inputs_may_have_any_name() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, tensors: Tensor, weights: Tensor) -> Tensor:
            return self.linear(tensors * weights)

    inputs = {"tensors": X, "weights": X}
    for estimator in ESTIMATORS:
        bnn = bayesian(Named(), estimator)
        assert bnn(**inputs).shape == (8, 2)
        assert bnn.predict(inputs, 2).mean.shape == (8, 2)


@each_estimator
def test_transforms_of_torch_func(estimator: Estimator) -> None:
    bnn = bayesian(nn.Linear(3, 2), estimator)
    jacobian = torch.func.jacrev(lambda x: bnn(x).sum(0))(X)
    assert jacobian.shape == (2, 8, 3)
    assert bnn(X).isfinite().all(), "the counter is an ordinary one still"


def test_many_uses_of_one_weight_take_linear_time() -> None:
    def recurrent(linear: nn.Linear, x: Tensor) -> Tensor:
        for _ in range(300):
            x = F.pad(linear(x), (0, 1))
        return x

    bnn = bayesian(Net(recurrent), Flipout())
    notes = 0
    right = Flipout.treatment

    def counting(self: Flipout, uses: Any) -> Any:
        nonlocal notes
        notes += len(uses)
        return right(self, uses)

    with pytest.MonkeyPatch.context() as patch:
        bnn(X)
        patch.setattr(Flipout, "treatment", counting)
        bnn(X)
    assert notes < 300 * 8


def test_a_module_made_in_inference_mode_runs_outside() -> None:
    with torch.inference_mode():
        net = nn.Linear(3, 2)
    fresh = nn.Linear(3, 2)
    fresh.load_state_dict(net.state_dict())
    assert BayesianModule(fresh)(X.float()).shape == (8, 2)


@each_local
def test_batch_normalisation_that_mixes_the_data_is_named(estimator: Estimator) -> None:
    bnn = bayesian(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), estimator)
    assert bnn.summary(X)[0].reason.endswith("; but 1 mixes the examples in training mode")
    bnn.eval()
    assert "mixes" not in bnn.summary(X)[0].reason


@each_local
def test_a_pass_run_again_has_the_noise_of_one_that_was_foreseen(estimator: Estimator) -> None:
    def branching(linear: nn.Linear, x: Tensor) -> Tensor:
        return linear(x) if x.mean() > 0 else linear(x) + x @ linear.weight.T

    bnn = bayesian(Net(branching), estimator)
    bnn(X.abs())
    key = NoiseKey(1, Stream.TRAINING, 0)
    unforeseen, _ = bnn.sample_outputs(-X.abs(), key, range(1))
    foreseen, _ = bnn.sample_outputs(-X.abs(), key, range(1))
    assert torch.equal(unforeseen, foreseen)


# ------------------------------------------------------------- uses that are not seen at once


def filled(layer: nn.Linear, x: Tensor) -> Tensor:
    square = x.new_zeros(3, 3)
    square[:2, :] = layer.weight
    return layer(x @ square)


def in_list(layer: nn.Linear, x: Tensor) -> Tensor:
    square = [x.new_zeros(2, 3)]
    torch._foreach_copy_(square, [layer.weight])
    return layer(x) + (x @ square[0].T)


def tangent(layer: nn.Linear, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = layer(forward_ad.make_dual(x, torch.ones_like(x)))
        return forward_ad.unpack_dual(dual).tangent


# PyTorch's own, where it is the first to use forward mode in a process.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@loop_over("run", [filled, in_list, tangent])
def test_weights_that_are_copied_or_differentiated_are_sampled(run: Any) -> None:
    net = Net(run)
    other = bayesian(net, WeightSampling(), seed=6)
    expected = torch.stack([other(X).detach() for _ in range(600)]).std(0)
    for estimator in LOCAL:
        with noted(estimator=estimator):
            bnn = bayesian(net, estimator, seed=5)
            outputs = torch.stack([bnn(X).detach() for _ in range(600)])
            assert bool(outputs.isfinite().all())
            weight = {row.name: row.treatment for row in bnn.summary()}["linear.weight"]
            assert weight == "sampled"
            ratio = outputs.std(0) / expected
            assert bool(((ratio > 0.8) & (ratio < 1.25)).all())


@each_estimator
def test_cached_parametrizations_are_those_of_the_pass(estimator: Any) -> None:
    net = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    bnn = bayesian(net, estimator, seed=3)

    def run(samples: int = 3) -> list[Tensor]:
        key = NoiseKey(1, Stream.TRAINING, 0)
        return list(bnn.sample_outputs(X, key, range(samples))[0])

    expected = run()
    with nn.utils.parametrize.cached():
        first = run()
        again = run()
    assert not torch.equal(first[0], first[1])
    for got in (first, again, run()):
        assert all(map(torch.equal, got, expected))


class Groups(nn.Module):
    """One kernel for inputs of two groups and of one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(normals(4, 2, 1, seed=2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(len(x), 1, 3).expand(-1, 4, -1)
        return F.conv1d(x, self.weight, groups=2) + F.conv1d(x[:, :2], self.weight)


@each_estimator
def test_one_kernel_for_several_numbers_of_groups(estimator: Any) -> None:
    outputs = bayesian(Groups(), estimator)(X)
    assert outputs.shape == (8, 4, 3)
    assert bool(outputs.isfinite().all())


class Tasks(nn.Module):
    """A head for each task, chosen by a number; ``step`` is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 1) for _ in range(2)])
        self.passes = 0

    def forward(self, x: Tensor, task: int = 0, step: int = 0) -> Tensor:  # noqa: ARG002
        self.passes += 1
        outputs: Tensor = self.heads[task](torch.tanh(self.body(x)))
        return outputs


@each_local
def test_a_number_that_selects_a_part_is_another_kind_of_pass(estimator: Estimator) -> None:
    bnn = BayesianModule(Tasks(), init_std=0.5, include=("heads.*",), estimator=estimator)
    rows = torch.ones(2000, 3)
    with torch.no_grad():
        for task in (0, 1, 0):
            assert bnn(rows, task=task).std() > 0.2, "each example has noise of its own"
    bnn.summary(rows[:8], task=0)
    treated = {row.name: row.treatment for row in bnn.summary(rows[:8], task=1)}
    assert treated["heads.0.weight"] == "sampled"
    assert treated["heads.1.weight"] == "exact"


def test_the_integrated_layer_is_that_of_the_pass() -> None:
    estimator, x = ClosedFormLastLayer(), normals(8, 3, dtype=torch.float32)
    bnn = BayesianModule(Tasks(), likelihood=GaussianLikelihood(), estimator=estimator)
    elbo = ELBO(bnn, num_data=8)
    for task in (0, 1):
        assert elbo({"x": x, "task": task}, torch.zeros(8, 1)).loss.isfinite()


def test_a_number_that_changes_at_every_call_is_not_traced_at_every_call() -> None:
    bnn = BayesianModule(Tasks(), estimator=LocalReparameterization())
    x = normals(8, 3, dtype=torch.float32)
    for step in range(100):
        bnn(x, step=step)
    before = bnn.net.passes
    for step in range(100, 150):
        bnn(x, step=step)
    assert bnn.net.passes == before + 50
    with torch.no_grad():  # another task is still told apart
        assert bnn(torch.ones(2000, 3), task=1, step=200).std() > 0.0
    treated = {row.name: row.treatment for row in bnn.summary()}
    assert (treated["heads.0.weight"], treated["heads.1.weight"]) == ("sampled", "exact")
