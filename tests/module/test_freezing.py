"""Frozen networks: their predictions are those of the Bayesian network, or of the same law."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tests.cases import normals
from tests.zoo import CORE, ZOO
from torch import Tensor, nn

import bayesify as bf
from bayesify.module.freezing import FrozenNetwork
from bayesify.module.inputs import arguments_of
from bayesify.noise.keys import NoiseKey, Stream

SAMPLING, LOCAL = bf.WeightSampling(), bf.LocalReparameterization()
X = normals(5, 4, seed=1).float()


def make_mlp(outputs: int = 3, **options: object) -> bf.BayesianModule:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Sequential(nn.Linear(20, outputs)))
    return bf.BayesianModule(net, init_std=0.2, seed=5, **options)  # type: ignore[arg-type]


def check_equal(frozen: FrozenNetwork, predictive: bf.Predictive, inputs: object = X) -> None:
    args, kwargs = arguments_of(inputs)  # type: ignore[arg-type]
    found = frozen(*args, **kwargs)
    for name in found._fields:
        if name == "quantiles":
            levels = frozen.head.levels.tolist()
            expected = torch.stack([predictive.quantile(level) for level in levels], -1)
        else:
            expected = getattr(predictive, name)
        torch.testing.assert_close(getattr(found, name), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in CORE else pytest.mark.slow) for n in ZOO]
)
def test_stacked_weights_predict_as_the_network_does(name: str) -> None:
    specimen = ZOO[name]
    options = {} if specimen.reads is None else {"output": specimen.reads}
    bnn = specimen.bnn(SAMPLING, **options)
    frozen = bf.freeze(bnn, 6, estimator=SAMPLING)
    check_equal(frozen, bnn.predict(specimen.inputs, num_samples=6), specimen.inputs)


def test_a_tied_weight_is_held_once() -> None:
    bnn = ZOO["tied-embedding"].bnn(SAMPLING)
    own = bf.freeze(bnn, 6, estimator=SAMPLING).named_buffers()
    held = sum(buffer.numel() for name, buffer in own if "stacked" in name)
    assert held == 6 * bnn.layout.num_weights


def test_other_weights_are_noticed() -> None:
    bnn = make_mlp()
    with pytest.raises(AssertionError):
        check_equal(bf.freeze(bnn, 6, estimator=SAMPLING, seed=6), bnn.predict(X, num_samples=6))
    check_equal(
        bf.freeze(bnn, 6, estimator=SAMPLING, seed=6), bnn.predict(X, num_samples=6, seed=6)
    )


@pytest.mark.parametrize(
    ("outputs", "likelihood"),
    [
        (3, bf.CategoricalLikelihood()),
        (2, bf.BernoulliLikelihood()),
        (1, bf.OrdinalLikelihood(4)),
        (2, bf.GaussianLikelihood(std=0.3)),
        (2, bf.GaussianLikelihood(learn_std=True)),
        (1, bf.CensoredGaussianLikelihood(std=2.0)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_likelihood_has_its_outputs(outputs: int, likelihood: bf.Likelihood) -> None:
    bnn = make_mlp(outputs, likelihood=likelihood)
    check_equal(bf.freeze(bnn, 16, estimator=SAMPLING), bnn.predict(X, num_samples=16))


def test_noise_that_depends_on_the_input() -> None:
    net = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 4), nn.Unflatten(-1, (2, 2)))
    bnn = bf.BayesianModule(
        net, likelihood=bf.GaussianLikelihood(input_dependent=True, min_std=0.1), init_std=0.3
    )
    frozen = bf.freeze(bnn, 16, estimator=SAMPLING, quantiles=(0.001, 0.4, 0.999))
    check_equal(frozen, bnn.predict(X, num_samples=16))


def test_the_mean_weights() -> None:
    bnn = make_mlp()
    frozen = bf.freeze(bnn, 0)
    check_equal(frozen, bnn.predict_mean(X))
    assert not frozen(X).epistemic.any()
    point = make_mlp_of_a_point()
    check_equal(bf.freeze(point, 8), point.predict(X, num_samples=8))


def make_mlp_of_a_point() -> bf.BayesianModule:
    return bf.BayesianModule(nn.Linear(4, 3), posterior=bf.Delta)


def test_local_samples_are_those_of_the_estimator() -> None:
    bnn = make_mlp(estimator=LOCAL)
    key, one = NoiseKey(bnn.seed, Stream.PREDICTION, 0), X[:1]
    expected, _ = bnn.eval().sample_outputs(one, key, range(7))
    frozen = bf.freeze(bnn, 7)
    torch.testing.assert_close(frozen.outputs(one), expected, atol=1e-5, rtol=1e-5)
    # Each example is predicted as if it were alone.
    alone = torch.cat([frozen.outputs(x.unsqueeze(0)) for x in X], 1)
    torch.testing.assert_close(frozen.outputs(X), alone, atol=1e-5, rtol=1e-5)
    drawn = bf.freeze(bnn, 8, estimator=bf.LocalReparameterization(antithetic=True))
    first = drawn.outputs.chain[0].noise  # type: ignore[union-attr,index]
    assert torch.equal(first[::2], -first[1::2])


def std_of_samples(frozen: FrozenNetwork) -> Tensor:
    return frozen.outputs(X).double().std(0)


def test_local_samples_have_the_law_of_weight_samples() -> None:
    # The standard error of a std from S = 3,000 samples is about 1.3 %, that of a ratio 1.8 %. One
    # of 15 ratios is off by 5 times that less than once in 10,000 times.
    def check(bnn: bf.BayesianModule, law: bf.BayesianModule) -> None:
        local = std_of_samples(bf.freeze(bnn, 3_000, estimator=LOCAL))
        sampled = std_of_samples(bf.freeze(law, 3_000, estimator=SAMPLING))
        assert bool(((local / sampled - 1.0).abs() < 0.09).all())

    bnn = make_mlp()
    check(bnn, bnn)
    wider = copy.deepcopy(bnn)
    with torch.no_grad():
        wider.posterior.rho += 0.2
    with pytest.raises(AssertionError):
        check(wider, bnn)


def test_local_is_chosen_where_it_is_exact() -> None:
    small = bf.freeze(make_mlp(), 64)
    assert sum(b.numel() for b in small.buffers()) < 3 * 163 + 64 * 23 + 10
    conv = bf.BayesianModule(nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(9, 2)))
    x = normals(5, 2, 4, seed=2).float()
    check_equal(bf.freeze(conv, 4), conv.predict(x, num_samples=4), x)
    head = bf.BayesianModule(conv.to_module(), include=["2.*"], init_std=0.2)
    assert "stacked" not in " ".join(dict(bf.freeze(head, 4).named_buffers()))
    assert bf.freeze(head, 4)(x).mean.shape == (5, 2)


def shared() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer)


@pytest.mark.parametrize(
    ("bnn", "reason"),
    [
        (lambda: bf.BayesianModule(nn.Conv1d(2, 3, 2)), "weight is not a parameter of one"),
        (lambda: bf.BayesianModule(shared()), "a layer is used twice"),
        (lambda: bf.BayesianModule(nn.Linear(4, 2).half()), "its weights are torch.float16"),
        (lambda: bf.BayesianModule(nn.Linear(4, 2), output=lambda y: y), "picked from a result"),
        (lambda: make_mlp(posterior=bf.LowRankGaussian(rank=2)), "its posterior is Structured"),
        (lambda: bf.BayesianModule(nn.Linear(4, 2), include=["bias"]), "the bias is random and"),
    ],
)
def test_local_is_refused_where_it_is_not_exact(bnn: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        bf.freeze(bnn(), 4, estimator=LOCAL)  # type: ignore[operator]


def test_positions_that_share_weights_raise() -> None:
    bnn = bf.BayesianModule(nn.Sequential(nn.Linear(4, 3), nn.Flatten(), nn.Linear(6, 2)))
    x = normals(5, 2, 4, seed=2).float()
    with pytest.raises(ValueError, match=r"got \(5, 2, 4\).*estimator=WeightSampling"):
        bf.freeze(bnn, 4)(x)
    check_equal(bf.freeze(bnn, 4, estimator=SAMPLING), bnn.predict(x, num_samples=4), x)


def test_pruned_weights_stay_zero() -> None:
    bnn = bf.prune(make_mlp(), 0.9)
    check_equal(bf.freeze(bnn, 6, estimator=SAMPLING), bnn.predict(X, num_samples=6))
    local = bf.freeze(bnn, 6).outputs.chain[0]  # type: ignore[union-attr,index]
    assert int((local.variance != 0).sum()) == int((local.weight != 0).sum()) < 20


def test_a_frozen_network_is_ordinary() -> None:
    bnn = make_mlp()
    for estimator in (SAMPLING, LOCAL):
        frozen = bf.freeze(bnn, 4, estimator=estimator)
        before = frozen(X).mean
        assert not before.requires_grad
        assert not frozen.train().training
        assert not any(p.requires_grad for p in frozen.parameters())
        again = bf.freeze(make_mlp(), 4, estimator=estimator, seed=9)
        again.load_state_dict(frozen.state_dict())
        assert torch.equal(again(X).mean, before)
        assert frozen.double()(X.double()).mean.dtype == torch.float64
        frozen.float()
        with torch.no_grad():
            changed = copy.deepcopy(bnn)
            changed.posterior.mean.add_(1.0)
        assert torch.allclose(frozen(X).mean, before)


def test_certain_and_equal_predictions_are_finite() -> None:
    bnn = bf.BayesianModule(nn.Linear(4, 3), init_std=1e-6)
    with torch.no_grad():
        bnn.posterior.mean.mul_(1e4)
    for outputs in bf.freeze(bnn, 4)(X):
        assert bool(outputs.isfinite().all())
        assert bool((outputs >= 0.0).all())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_samples": -1}, ValueError, "at least 1, or 0 for the mean weights, got -1"),
        ({"num_samples": 2.5}, TypeError, r"num_samples must be a whole number, got 2\.5"),
        ({"estimator": bf.Flipout()}, TypeError, "got Flipout"),
    ],
)
def test_wrong_arguments(options: dict[str, object], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        bf.freeze(make_mlp(), **options)  # type: ignore[arg-type]


def test_wrong_networks_likelihoods_and_quantiles() -> None:
    with pytest.raises(TypeError, match="needs a BayesianModule, got Linear"):
        bf.freeze(nn.Linear(4, 3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got DeepEnsemble; of an ensemble freeze each member"):
        bf.freeze(bf.DeepEnsemble([make_mlp()]))  # type: ignore[arg-type]
    counts = make_mlp(1, likelihood=bf.PoissonLikelihood())
    with pytest.raises(TypeError, match="got PoissonLikelihood, whose quantiles"):
        bf.freeze(counts)
    numbers = make_mlp(1, likelihood=bf.GaussianLikelihood())
    for quantiles in ((), (0.5, 1.0), (float("nan"),)):
        with pytest.raises(ValueError, match="quantiles must be at least one level"):
            bf.freeze(numbers, quantiles=quantiles)


def test_opposite_weight_samples_are_refused() -> None:
    with pytest.raises(ValueError, match=r"without opposite pairs, got antithetic=True"):
        bf.freeze(make_mlp(), 2, estimator=bf.WeightSampling(antithetic=True))
    with pytest.raises(TypeError, match=r"quantiles must be a sequence of levels, got 0.5"):
        bf.freeze(make_mlp(likelihood=bf.GaussianLikelihood(1.0)), 2, quantiles=0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("place", ["", "0", "2", "2.0"])
@pytest.mark.parametrize("before", [False, True])
def test_hooks_are_not_lost(place: str, before: bool) -> None:
    net = make_mlp().to_module()
    module = net.get_submodule(place)
    if before:
        module.register_forward_pre_hook(lambda _, args: (3.0 * args[0],))
    else:
        module.register_forward_hook(lambda _, args, output: 3.0 * output)  # noqa: ARG005
    bnn = bf.BayesianModule(net, init_std=0.2)
    check_equal(bf.freeze(bnn, 16), bnn.predict(X, 16))
    with pytest.raises(ValueError, match="has hooks, or a forward of its own"):
        bf.freeze(bnn, 16, estimator=LOCAL)


@pytest.mark.parametrize("level", [1e-6, 1.0 - 1e-6])
def test_levels_that_float32_does_not_resolve_are_refused(level: float) -> None:
    bnn = make_mlp(1, likelihood=bf.GaussianLikelihood(0.5))
    with pytest.raises(ValueError, match=r"level from 0\.0001 to 0\.9999"):
        bf.freeze(bnn, 8, quantiles=(level,))
    frozen = bf.freeze(bnn, 8, estimator=SAMPLING, quantiles=(1e-4, 1.0 - 1e-4))
    predicted = bnn.predict(X, 8)
    expected = torch.stack([predicted.quantile(q) for q in (1e-4, 1.0 - 1e-4)], -1)
    torch.testing.assert_close(frozen(X).quantiles, expected, atol=3e-4, rtol=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_levels_stay_what_they_are_in_half_precision(dtype: torch.dtype) -> None:
    """In bfloat16 a level of .999 would be 1."""
    bnn = make_mlp(1, likelihood=bf.GaussianLikelihood(0.5))
    frozen = bf.freeze(bnn, 16, estimator=SAMPLING, quantiles=(0.001, 0.5, 0.999))
    outputs = normals(16, 5, 1, seed=8)
    expected = frozen.head(outputs).quantiles
    frozen.to(dtype)
    assert frozen.quantiles == pytest.approx((0.001, 0.5, 0.999), rel=1e-6)
    torch.testing.assert_close(frozen.head(outputs).quantiles, expected, atol=1e-5, rtol=0.0)
    assert frozen.double().head.levels.dtype is torch.float64


def test_a_bayesian_network_is_not_plain() -> None:
    bnn = bf.BayesianModule(nn.Linear(3, 2))
    with pytest.raises(TypeError, match=r"ordinary network, got BayesianModule; use freeze"):
        FrozenNetwork.of_plain(bnn, bnn.likelihood)


@pytest.mark.parametrize("samples", [0, 4])
def test_levels_may_come_in_any_form(samples: int) -> None:
    bnn = bf.BayesianModule(nn.Linear(3, 1), likelihood=bf.GaussianLikelihood(1.0))
    x, levels = torch.randn(5, 3), (0.1, 0.9)
    expected = bf.freeze(bnn, samples, quantiles=levels)(x).quantiles
    for form in (iter(levels), np.array(levels), torch.tensor(levels, dtype=torch.float64)):
        torch.testing.assert_close(bf.freeze(bnn, samples, quantiles=form)(x).quantiles, expected)
    with pytest.raises(TypeError, match=r"quantiles must be a sequence of levels, got 0\.5"):
        bf.freeze(bnn, samples, quantiles=0.5)  # type: ignore[arg-type]


def test_a_layer_that_mixes_examples_gets_weight_samples() -> None:
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    bnn = bf.BayesianModule(nn.Sequential(nn.Linear(3, 4), norm, nn.Linear(4, 2)))
    with pytest.raises(ValueError, match="1 normalises by the examples of a batch"):
        bf.freeze(bnn, 4, estimator=bf.LocalReparameterization())
    x = torch.randn(6, 3)
    torch.testing.assert_close(bf.freeze(bnn, 4)(x).mean, bnn.predict(x, 4).mean)


class Masked(nn.Module):
    """A network of three classes, of which the last is never possible."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(x)
        return outputs.masked_fill(torch.tensor([False, False, True]), -torch.inf)


def test_classes_that_a_network_masks_have_no_uncertainty() -> None:
    bnn, x = bf.BayesianModule(Masked(), init_std=0.5), torch.ones(2, 4)
    expected, found = bnn.predict(x, 8), bf.freeze(bnn, num_samples=8)(x)
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.total, expected.total)
    torch.testing.assert_close(found.epistemic, expected.epistemic)


@pytest.mark.parametrize("samples", [0, 1, 8])
def test_classes_that_a_network_masks_leave_gradients_that_are_numbers(samples: int) -> None:
    torch.manual_seed(0)
    frozen = bf.freeze(bf.BayesianModule(Masked(), init_std=0.5), samples)
    x = torch.randn(2, 4, requires_grad=True)
    found = frozen(x)
    assert bool((found.mean[:, 2] == 0.0).all())
    for part in (found.mean[:, 0], found.total, found.epistemic):
        (slope,) = torch.autograd.grad(part.sum(), x, retain_graph=True)
        assert bool(slope.isfinite().all())
        assert bool(slope.any()) or (part is found.epistemic and samples < 2)


class RunningMean(nn.Linear):
    """A layer that keeps an average of its outputs in a buffer, and a sum in one that is None."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("average", torch.zeros(()))
        self.register_buffer("sum", None)

    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x)
        self.average = 0.9 * self.average + 0.1 * outputs.mean()
        self.sum = outputs.sum()
        return outputs


def test_a_buffer_that_a_pass_replaces_stays_an_ordinary_one() -> None:
    bnn = bf.BayesianModule(RunningMean())
    frozen, x = bf.freeze(bnn, 20, estimator=bf.WeightSampling()), torch.ones(4, 3)
    expected = bnn.predict(x, num_samples=20).mean
    assert torch.allclose(frozen(x).mean, expected, atol=1e-6)
    assert torch.allclose(copy.deepcopy(frozen)(x).mean, expected, atol=1e-6)
    averages = [each for name, each in frozen.state_dict().items() if name.endswith("average")]
    assert [each.clone().shape for each in averages] == [()]


class Centred(nn.Module):
    """A layer that subtracts the mean of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def hooked() -> nn.Module:
    layer = nn.ReLU()
    layer.register_forward_hook(lambda _, args, output: output - output.mean(0))  # noqa: ARG005
    return layer


@pytest.mark.parametrize(
    "layer",
    [
        nn.Softmax(dim=0),
        nn.Softmax(dim=-2),
        nn.LogSoftmax(dim=0),
        Centred(),
        hooked(),
        nn.Sequential(nn.ReLU(), Centred()),
    ],
    ids=repr,
)
def test_what_may_mix_examples_between_layers_gets_weight_samples(layer: nn.Module) -> None:
    net = nn.Sequential(nn.Linear(4, 8), layer, nn.Linear(8, 2))
    bnn = bf.BayesianModule(net, init_std=0.5)
    check_equal(bf.freeze(bnn, 4), bnn.predict(X, 4))
    with pytest.raises(ValueError, match="not known to act on each example by itself"):
        bf.freeze(bnn, 4, estimator=LOCAL)
    first = bf.BayesianModule(nn.Sequential(layer, nn.Linear(4, 2)))  # of N rows, not S N
    assert bf.freeze(first, 4, estimator=LOCAL)(X).mean.shape == (5, 2)


@pytest.mark.parametrize(
    "layer",
    [nn.GLU(0), nn.Flatten(0), nn.Flatten(-2), nn.LayerNorm((5, 8)), nn.Softmax()],
    ids=repr,
)
def test_the_axes_of_a_layer_are_looked_at(layer: nn.Module) -> None:
    bnn = bf.BayesianModule(nn.Sequential(nn.Linear(4, 8), layer))
    with pytest.raises(ValueError, match="not known to act on each example by itself"):
        bf.freeze(bnn, 4, estimator=LOCAL)


@pytest.mark.parametrize(
    "layer",
    [
        nn.ReLU(),
        nn.Tanh(),
        nn.GELU(),
        nn.PReLU(8),
        nn.Softmax(-1),
        nn.LogSoftmax(1),
        nn.LayerNorm(8),
        nn.RMSNorm(8),
        nn.GroupNorm(2, 8),
        nn.BatchNorm1d(8),
        nn.Dropout(0.5),
        nn.Identity(),
        nn.Flatten(),
        nn.Sequential(nn.GLU(), nn.Linear(4, 8)),
        nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Flatten()),
    ],
    ids=repr,
)
def test_layers_that_act_on_rows_keep_local_reparametrisation(layer: nn.Module) -> None:
    net = nn.Sequential(nn.Linear(4, 8), layer, nn.Linear(8, 2))
    bnn = bf.BayesianModule(net, init_std=0.5, include=["0.*", "2.*"])
    frozen = bf.freeze(bnn, 7, estimator=LOCAL)
    alone = torch.cat([frozen.outputs(x.unsqueeze(0)) for x in X], 1)
    torch.testing.assert_close(frozen.outputs(X), alone, atol=1e-5, rtol=1e-5)


class Halved(nn.Module):
    """Halves its inputs in place; an LSTM has no form under vmap."""

    def __init__(self, *, recurrent: bool) -> None:
        super().__init__()
        self.body = nn.LSTM(4, 6, batch_first=True) if recurrent else nn.Linear(4, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x.div_(2.0))
        outputs: Tensor = self.last(hidden[0][:, -1] if isinstance(hidden, tuple) else hidden)
        return outputs


@pytest.mark.parametrize("recurrent", [False, True])
def test_every_sample_sees_the_inputs_as_they_were(recurrent: bool) -> None:
    bnn = bf.BayesianModule(Halved(recurrent=recurrent), init_std=0.1)
    inputs = normals(5, 7, 4, seed=2).float() if recurrent else X.clone()
    before = inputs.clone()
    check_equal(bf.freeze(bnn, 6), bnn.predict(inputs, 6), inputs)
    assert torch.equal(inputs, before)


@pytest.mark.parametrize(("samples", "estimator"), [(0, None), (8, LOCAL), (8, SAMPLING)])
def test_the_callers_inputs_stay_as_they_are(samples: int, estimator: bf.Estimator | None) -> None:
    net = nn.Sequential(nn.ELU(inplace=True), nn.Linear(4, 3))
    frozen = bf.freeze(bf.BayesianModule(net), samples, estimator=estimator)
    x = X.clone()
    first = frozen(x).mean
    assert torch.equal(x, X)
    assert torch.equal(frozen(x).mean, first)


def test_gradients_in_the_inputs_of_a_pruned_network_are_finite() -> None:
    """A unit without weights has variance 0, where the root has an infinite slope."""
    x = X.clone().requires_grad_()
    bf.freeze(bf.prune(make_mlp(), 0.75), 8, estimator=LOCAL)(x).total.sum().backward()
    assert bool(x.grad.isfinite().all())


@pytest.mark.parametrize("shift", [0.0, 20.0], ids=["near", "far apart"])
def test_quantiles_have_the_slope_of_the_mixture(shift: float) -> None:
    torch.manual_seed(1)
    head = bf.freeze(make_mlp(1, likelihood=bf.GaussianLikelihood(std=0.3)), 4).head.double()
    outputs = normals(4, 5, 1, seed=8)
    outputs[:2] += shift
    for unit in range(4):
        step = torch.zeros(4, 1, 1).double()
        step[unit] = 1e-3
        slope = (head(outputs + step).quantiles - head(outputs - step).quantiles) / 2e-3
        moved = outputs.clone().requires_grad_()
        found = head(moved).quantiles
        torch.testing.assert_close(found.detach(), head(outputs).quantiles)
        for level in (0, 2):
            (grad,) = torch.autograd.grad(found[..., level].sum(), moved, retain_graph=True)
            torch.testing.assert_close(grad[unit], slope[..., level], atol=2e-3, rtol=0.0)


def test_an_array_is_no_tensor() -> None:
    for estimator in (SAMPLING, LOCAL):
        with pytest.raises(TypeError, match=r"needs tensors, got an array; use torch\.as_tensor"):
            bf.freeze(make_mlp(), 3, estimator=estimator)(X.numpy())
