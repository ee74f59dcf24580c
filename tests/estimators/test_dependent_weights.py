"""Noise for each example where the weights of a layer depend on each other."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tests import faults
from tests.cases import mlp, normals
from tests.loops import loop_over
from tests.training.test_statistics import check_mean
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from bayesify import (
    ELBO,
    BayesianModule,
    Flipout,
    FullGaussian,
    LocalReparameterization,
    MatrixGaussian,
    MeanFieldGaussian,
    PosteriorByGroup,
    PosteriorFamily,
    WeightSampling,
    fit,
    prune,
)
from bayesify.distributions.kronecker import Kronecker
from bayesify.estimators import Estimator
from bayesify.noise.keys import NoiseKey, NoiseSource, Stream

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}
FAMILIES: dict[str, PosteriorFamily] = {
    "matrix": MatrixGaussian(),
    "inputs only": MatrixGaussian(max_side=4),
    "outputs only": MatrixGaussian(max_side=3),
    "bias apart": PosteriorByGroup({"*weight": MatrixGaussian(), "*": MeanFieldGaussian}),
    "bias depends apart": PosteriorByGroup({"*weight": MatrixGaussian(), "*": FullGaussian()}),
}
#: Outputs and inputs, so that ``max_side`` leaves out the one or the other.
SHAPES = {"inputs only": (5, 3), "outputs only": (3, 4)}


def correlated(
    net: nn.Module, family: PosteriorFamily, estimator: Estimator, **options: object
) -> BayesianModule:
    """A network in float64 whose weights depend strongly on each other."""
    bnn = BayesianModule(
        net.double(), posterior=family, init_std=0.4, estimator=estimator, seed=3, **options
    )
    with torch.no_grad():
        for index, parameter in enumerate(bnn.posterior.parameters()):
            shift = normals(parameter.numel(), seed=30 + index).view_as(parameter)
            parameter.add_(shift, alpha=0.6)
    return bnn


def layer(name: str = "matrix", *, bias: bool = True) -> BayesianModule:
    outputs, inputs = SHAPES.get(name, (3, 4))
    net = nn.Linear(inputs, outputs, bias=bias)
    return correlated(net, FAMILIES[name], LocalReparameterization())


def weight_factor(bnn: BayesianModule) -> Tensor:
    """F of shape (noise, D), differentiable: the covariance of the weights is F^T F."""
    q = bnn.posterior
    size = q.noise(NoiseKey(0, Stream.TRAINING, 0), range(1)).shape[1]
    return q.draw(torch.eye(size, dtype=q.mean.dtype)).weights - q.mean


def jacobian(bnn: BayesianModule, inputs: Tensor) -> Tensor:
    """The derivatives of the outputs in all weights, shape (N, outputs, D)."""
    values = {name: t.detach() for name, t in bnn.layout.unflatten(bnn.posterior.mean).items()}
    net = bnn.to_module()
    found = torch.func.jacrev(lambda v: functional_call(net, v, inputs))(values)
    return torch.cat([found[name].flatten(2) for name in bnn.layout.names], -1)


class GivenNoise:
    """In the place of the normals: those of minibatches as given, all others zero."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rows: Tensor | None = None
        self.shared: Tensor | None = None
        given = self

        def normals(
            _: NoiseSource, shape: Sequence[int], dtype: torch.dtype, *__: object
        ) -> Tensor:
            found = given.rows if len(shape) == 2 else given.shared
            if found is None or found.shape != tuple(shape):
                return torch.zeros(tuple(shape), dtype=dtype)
            return found

        patch.setattr(NoiseSource, "normals", normals)


def check_covariances(bnn: BayesianModule, inputs: Tensor, patch: pytest.MonkeyPatch) -> None:
    """Outputs are linear in the noise: those of unit vectors give all covariances exactly."""
    rows = jacobian(bnn, inputs)
    factor = weight_factor(bnn).detach()
    expected = rows @ factor.T @ factor @ rows.mT
    num_outputs = rows.shape[1]
    noise = GivenNoise(patch)
    mean = bnn(inputs)
    assert torch.allclose(mean, rows @ bnn.posterior.mean, **TOLERANCE), "the mean is off"
    columns = []
    for output in range(num_outputs):
        noise.rows = torch.zeros(len(inputs), num_outputs, dtype=inputs.dtype)
        noise.rows[:, output] = 1.0
        columns.append(bnn(inputs) - mean)
        noise.rows[1:] = 0.0
        assert not (bnn(inputs) - mean)[1:].any(), "the examples share their noise"
    found = torch.stack(columns, -1)
    assert torch.allclose(found @ found.mT, expected, **TOLERANCE), "the covariance is off"


@loop_over("name", ["matrix", "inputs only", "outputs only"])
@loop_over("bias", [True, False])
def test_the_outputs_of_an_example_have_the_covariance_of_a_weight_sample(
    name: str, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bnn = layer(name, bias=bias)
    check_covariances(bnn, normals(5, SHAPES.get(name, (3, 4))[1], seed=7), monkeypatch)


def without_outputs(patch: pytest.MonkeyPatch) -> None:
    """The outputs are not correlated."""
    right = Kronecker.output_noise
    patch.setattr(Kronecker, "output_noise", lambda *args: (right(*args)[0], None))


def half_the_variance(patch: pytest.MonkeyPatch) -> None:
    """The variances halved."""
    right = Kronecker.output_noise

    def wrong(*args: object) -> tuple[Tensor, Tensor | None]:
        variances, factor = right(*args)  # type: ignore[arg-type]
        return 0.5 * variances, factor

    patch.setattr(Kronecker, "output_noise", wrong)


def inputs_not_mixed(patch: pytest.MonkeyPatch) -> None:
    """x in the place of B^T x."""
    right = Kronecker.output_noise

    def wrong(self: Kronecker, scale: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        columns, self.columns = self.columns, None
        found = right(self, scale, inputs)
        self.columns = columns
        return found

    patch.setattr(Kronecker, "output_noise", wrong)


FAULTS = [
    without_outputs,
    half_the_variance,
    inputs_not_mixed,
    faults.local_one_noise_for_all_data,
]


@loop_over("fault", FAULTS)
def test_a_wrong_covariance_is_caught(fault: faults.Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    bnn, inputs = layer(), normals(5, 4, seed=7)
    if fault is faults.local_one_noise_for_all_data:
        fault(monkeypatch)
        outputs = bnn(inputs[:1].expand(5, -1))
        assert torch.equal(outputs[0], outputs[1]), "the fault shares the noise of the examples"
        return
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="covariance is off"):
        check_covariances(bnn, inputs, monkeypatch)


def grid(dimensions: int, nodes: int = 6) -> tuple[Tensor, Tensor]:
    """Standard normal nodes (M, p) and weights (M,), exact for polynomials of degree 11."""
    points, shares = np.polynomial.hermite_e.hermegauss(nodes)
    axes = [torch.from_numpy(each) for each in (points, shares / shares.sum())]
    return (
        torch.cartesian_prod(*[axes[0]] * dimensions).view(-1, dimensions),
        torch.cartesian_prod(*[axes[1]] * dimensions).view(-1, dimensions).prod(-1),
    )


def quartic(outputs: Tensor) -> Tensor:
    """A loss whose expectation a grid of nodes gives exactly; it couples the outputs."""
    return outputs.square().sum(-1).square() + outputs.prod(-1) - outputs[..., 0] ** 3


@loop_over("bias", [True, False])
def test_the_expected_loss_and_its_gradients_are_those_of_weight_samples(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all noise: by the nodes of a grid, and by the covariance of weight samples."""
    bnn = correlated(nn.Linear(2, 2, bias=bias), MatrixGaussian(), LocalReparameterization())
    nodes, shares = grid(2)
    x = normals(1, 2, seed=8)
    parameters = dict(bnn.posterior.named_parameters())

    GivenNoise(monkeypatch).rows = nodes
    found = (shares * quartic(bnn(x.expand(len(nodes), -1)))).sum()
    gradients = torch.autograd.grad(found, list(parameters.values()))

    rows = jacobian(bnn, x)[0]
    factor = weight_factor(bnn)
    root = torch.linalg.cholesky(rows @ factor.T @ factor @ rows.T)
    expected = (shares * quartic(rows @ bnn.posterior.mean + nodes @ root.T)).sum()
    exact = torch.autograd.grad(expected, list(parameters.values()))

    assert found.item() == pytest.approx(expected.item(), rel=1e-10)
    for name, one, other in zip(parameters, gradients, exact, strict=True):
        assert one.any(), name
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-10 * other.abs().max().item()), name


STEPS = 100
DEEP = ["matrix", "inputs only", "bias apart", "bias depends apart"]


@pytest.mark.slow
@loop_over("name", DEEP)
def test_a_deep_networks_losses_and_gradients_agree_with_weight_sampling(name: str) -> None:
    """Two-sample z-tests of the loss and of a projection of each parameter's gradient.

    The chance that one of them fails for a right library is at most 1e-3 (``check_mean``).
    """
    x = normals(2, 3, seed=9)

    def sampled(estimator: Estimator) -> list[Tensor]:
        net = mlp(num_outputs=2)
        bnn = correlated(net, FAMILIES[name], estimator)
        parameters = list(bnn.posterior.parameters())
        sides = [normals(p.numel(), seed=50 + i) for i, p in enumerate(parameters)]
        rows = []
        for step in range(STEPS):
            outputs, _ = bnn.sample_outputs(x, NoiseKey(4, Stream.TRAINING, step), range(2))
            loss = F.softplus(2.0 * outputs[..., 0] - outputs[..., 1]).mean()
            found = torch.autograd.grad(loss, parameters)
            sums = [(g.flatten() @ side) for g, side in zip(found, sides, strict=True)]
            rows.append(torch.stack([loss.detach(), *sums]))
        return list(torch.stack(rows).unbind(1))

    found = sampled(LocalReparameterization()), sampled(WeightSampling())
    for one, other in zip(*found, strict=True):
        check_mean(one - other, 0.0, 8 * len(DEEP), name)


def check_sampled_together(bnn: BayesianModule, x: Tensor, patch: pytest.MonkeyPatch) -> None:
    """One weight sample for all examples, with the covariance of the posterior."""
    rows = jacobian(bnn, x).flatten(0, 1)
    factor = weight_factor(bnn).detach()
    noise = GivenNoise(patch)
    mean, columns = bnn(x).flatten(), []
    for unit in torch.eye(len(factor), dtype=x.dtype):
        noise.shared = unit
        columns.append(bnn(x).flatten() - mean)
    found = torch.stack(columns, -1)
    assert torch.allclose(found @ found.T, rows @ factor.T @ factor @ rows.T, **TOLERANCE)


SAMPLED: list[tuple[PosteriorFamily, Estimator]] = [
    (FullGaussian(), LocalReparameterization()),
    (FullGaussian(), Flipout()),
    (MatrixGaussian(), Flipout()),
]


@loop_over("family, estimator", SAMPLED)
def test_other_dependent_weights_are_sampled_together(
    family: PosteriorFamily, estimator: Estimator, monkeypatch: pytest.MonkeyPatch
) -> None:
    bnn, x = correlated(nn.Linear(3, 2), family, estimator), normals(4, 3, seed=2)
    rows = bnn.summary(x)
    assert [row.treatment for row in rows] == ["sampled", "sampled"]
    assert rows[0].reason == "depends on other weights, with which it is sampled"
    check_sampled_together(bnn, x, monkeypatch)


class Transposed(nn.Module):
    """A layer whose weight has its inputs first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(normals(3, 2, seed=1, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class TwiceBiased(nn.Linear):
    """A layer that uses its bias again."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


def test_layers_of_another_form_are_sampled_together(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normals(4, 3, seed=2)
    local = LocalReparameterization()
    pruned = prune(correlated(nn.Linear(3, 2), MatrixGaussian(), local), 0.4)
    for bnn, reason in (
        (correlated(Transposed(), MatrixGaussian(), local), "matmul is not a layer x W^T + b"),
        (correlated(TwiceBiased(3, 2), MatrixGaussian(), local), "sampled with bias, on which"),
        (pruned, "some weights of its layer are pruned"),
    ):
        row = bnn.summary(x)[0]
        assert row.treatment == "sampled"
        assert row.reason.startswith(reason)
        with monkeypatch.context() as patch:
            if bnn is not pruned:  # whose draws are not linear in the noise around its mean
                check_sampled_together(bnn, x, patch)
    assert not pruned(torch.zeros(2, 3).double())[:, ~pruned.posterior.mask[-2:]].any()


def test_summary_tells_the_layers_apart() -> None:
    net = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(12, 2))
    bnn = BayesianModule(
        net, posterior=MatrixGaussian(), estimator=LocalReparameterization(per_position=True)
    )
    found = {row.name: (row.treatment, row.reason) for row in bnn.summary(torch.zeros(5, 1, 8))}
    assert found["2.weight"] == found["2.bias"] == ("exact", "linear uses it once for each example")
    kind, reason = found["0.weight"]
    assert kind == "sampled"
    assert reason == "conv1d is not a layer x W^T + b of all weights that it depends on"
    assert bnn(torch.zeros(5, 1, 8)).shape == (5, 2)


class Sometimes(nn.Linear):
    """A layer that uses its bias again for some inputs only."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x)
        return outputs + self.bias if x.sum() > 100.0 else outputs


def test_an_unexpected_use_of_one_weight_samples_those_that_depend_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bnn = correlated(Sometimes(3, 2), MatrixGaussian(), LocalReparameterization())
    assert {row.treatment for row in bnn.summary(normals(4, 3))} == {"exact"}
    x = 100.0 + normals(4, 3, seed=2)
    check_sampled_together(bnn, x, monkeypatch)
    assert {row.treatment for row in bnn.summary()} == {"sampled"}


def test_fit_trains_it_in_float32_and_under_autocast() -> None:
    x, y = normals(60, 3, dtype=torch.float32), torch.arange(60) % 4
    for precision in (torch.float32, torch.bfloat16):
        bnn = BayesianModule(
            mlp(torch.float32),
            posterior=MatrixGaussian(),
            estimator=LocalReparameterization(),
            seed=1,
        )
        before = {name: p.detach().clone() for name, p in bnn.named_parameters()}
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
            history = fit(ELBO(bnn, num_data=60), [(x[:30], y[:30]), (x[30:], y[30:])], epochs=2)
        assert all(math.isfinite(row["loss"] or 0.0) for row in history)
        for name, parameter in bnn.named_parameters():
            assert not torch.equal(parameter, before[name]), name
    assert bnn.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def test_compiled_code_draws_the_same_outputs() -> None:
    x = normals(6, 3, seed=1)
    bnns = [correlated(mlp(), MatrixGaussian(), LocalReparameterization()) for _ in range(2)]
    compiled = torch.compile(bnns[1], backend="eager")
    assert torch.allclose(compiled(x), bnns[0](x), rtol=1e-12)
