"""The translation of a posterior density to JAX, against PyTorch: values and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.cases import normals
from torch import Tensor, nn

import bayesify as bf
from bayesify.referee.density import PosteriorDensity
from bayesify.referee.to_jax import to_jax

jax = pytest.importorskip("jax")

X = normals(6, 3)
NUMBERS, COUNTS, CLASSES = (
    normals(6, 1, seed=1),
    torch.arange(6.0).unsqueeze(-1),
    torch.arange(6) % 2,
)
ACTIVATIONS = (
    nn.ReLU(),
    nn.Tanh(),
    nn.Sigmoid(),
    nn.SiLU(),
    nn.GELU(),
    nn.Softplus(),
    nn.ELU(),
    nn.LeakyReLU(0.1),
    nn.LayerNorm(4),
    nn.Softmax(-1),
    nn.LogSigmoid(),
    nn.Identity(),
    nn.GELU("tanh"),
    nn.Softplus(beta=5.0),
    nn.Softplus(threshold=0.1),
    nn.ELU(0.7),
    nn.SELU(),
    nn.CELU(0.5),
    nn.BatchNorm1d(4),
)


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.function(x)
        return result


#: Arguments of operators that the tracer gives by name.
FUNCTIONS = {
    "alpha of add": lambda x: torch.add(x, x * x, alpha=0.5),
    "alpha of sub": lambda x: torch.sub(x, x * x, alpha=0.5),
    "alpha of rsub": lambda x: torch.rsub(x, x * x, alpha=2),
    "alpha and beta of addmm": lambda x: torch.addmm(x, x, x.T @ x, beta=0.5, alpha=0.1),
    "truth values that are added": lambda x: ((x > 0).to(x.dtype) + (x > 0.1).to(x.dtype)) * x,
    "numbers cut to whole ones": lambda x: x * (3.0 * x.detach()).to(torch.int64),
}
CASES: dict[str, tuple[nn.Module, Tensor, dict[str, Any]]] = {
    "gaussian": (nn.Linear(3, 1), NUMBERS, {"likelihood": bf.GaussianLikelihood(0.5)}),
    "learned noise, by group": (
        nn.Linear(3, 1),
        NUMBERS,
        {
            "likelihood": bf.GaussianLikelihood(0.5, learn_std=True),
            "prior": bf.ByGroup({"bias": bf.Laplace(0.5), "*": bf.Gaussian(1.0)}),
        },
    ),
    "noise by example, scale mixture": (
        nn.Sequential(nn.Linear(3, 2), nn.Unflatten(-1, (1, 2))),
        NUMBERS,
        {"likelihood": bf.GaussianLikelihood(input_dependent=True), "prior": bf.ScaleMixture()},
    ),
    "student": (
        nn.Linear(3, 1),
        NUMBERS,
        {"likelihood": bf.StudentTLikelihood(), "prior": bf.StudentT()},
    ),
    "classes": (nn.Linear(3, 2), CLASSES, {}),
    "labels": (nn.Linear(3, 1), COUNTS % 2, {"likelihood": bf.BernoulliLikelihood()}),
    "counts": (nn.Linear(3, 1), COUNTS, {"likelihood": bf.PoissonLikelihood()}),
    **{
        f"activation {activation}": (
            nn.Sequential(nn.Linear(3, 4), activation, nn.Linear(4, 2)),
            CLASSES,
            {"prior": bf.Gaussian(1.0)},
        )
        for activation in ACTIVATIONS
    },
    **{
        name: (nn.Sequential(nn.Linear(3, 4), Function(function), nn.Linear(4, 2)), CLASSES, {})
        for name, function in FUNCTIONS.items()
    },
}


def density_of(name: str) -> PosteriorDensity:
    net, targets, options = CASES[name]
    bnn = bf.BayesianModule(net, **options).double().eval()
    return PosteriorDensity(bnn, X, targets, temperature=2.0)


def check_translation(density: PosteriorDensity, scale: float) -> None:
    weights = scale * normals(len(density.centre), seed=3).double()
    variable = weights.clone().requires_grad_()
    energy = density(variable)
    (gradient,) = torch.autograd.grad(energy, variable)
    with jax.enable_x64(True):
        translated = to_jax(density, density.centre)
        # Compiled as a whole, as the sampler does: operator by operator, JAX compiles each one.
        found, slope = jax.jit(jax.value_and_grad(translated))(weights.numpy())
        assert found.dtype == np.float64
        assert float(found) == pytest.approx(energy.item(), rel=1e-12)
        np.testing.assert_allclose(np.asarray(slope), gradient.numpy(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_pytorch(name: str) -> None:
    check_translation(density_of(name), 1.0)


@pytest.mark.parametrize("name", ["classes", "noise by example, scale mixture", "labels"])
def test_large_weights_have_finite_gradients(name: str) -> None:
    check_translation(density_of(name), 1e3)


def test_another_density_is_caught() -> None:
    wrong = density_of("gaussian")
    wrong._temperature = 2.001
    weights = normals(len(wrong.centre), seed=3).double()
    with jax.enable_x64(True):
        found = float(to_jax(wrong, wrong.centre)(weights.numpy()))
    assert found != pytest.approx(density_of("gaussian")(weights).item(), rel=1e-6)


def test_pruned_weights_are_left_out() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    bnn = bf.prune(bf.BayesianModule(net), fraction=0.5).double()
    density = PosteriorDensity(bnn, X, CLASSES, temperature=1.0)
    assert len(density.centre) == 13
    check_translation(density, 1.0)


def test_an_unknown_operator_is_named() -> None:
    net = nn.Sequential(nn.Unflatten(-1, (1, 3)), nn.Conv1d(1, 2, 3), nn.Flatten())
    bnn = bf.BayesianModule(net).double()
    density = PosteriorDensity(bnn, X, CLASSES, temperature=1.0)
    with pytest.raises(NotImplementedError, match=r"uses aten\.convolution\.default, which"):
        to_jax(density, density.centre)
