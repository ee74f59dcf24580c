"""Networks that edit their weights in place are found, and trained by the fused objective."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.backend_cases import has_compiler, needs_compiler
from tests.loops import loop_over
from torch import Tensor, nn
from torch.optim import SGD

import bayesify as bf
from bayesify.datasets import TensorLoader
from bayesify.training import NonFiniteLossError, fit_replicas
from bayesify.training.backends import AutogradBackend, Backend, StepOptions, make_backend

X, Y = torch.randn(40, 4), torch.randint(3, (40,))
EXPLICIT = ["compiled", "closed-form"] if has_compiler else ["closed-form"]
Run = Callable[[nn.Linear, Tensor], Tensor]


class Net(nn.Module):
    """A linear layer with a pass of the test's own."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.linear, self.run = nn.Linear(4, 3), run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.linear, x)


def halved(linear: nn.Linear, x: Tensor) -> Tensor:
    return nn.functional.linear(x, 0.5 * linear.weight, linear.bias)


def without_grad(linear: nn.Linear, x: Tensor) -> Tensor:
    with torch.no_grad():
        linear.weight.mul_(0.5)
    return linear(x)


def with_grad(linear: nn.Linear, x: Tensor) -> Tensor:
    return nn.functional.linear(x, linear.weight.mul_(0.5), linear.bias)


def detached(linear: nn.Linear, x: Tensor) -> Tensor:
    linear.weight.detach().mul_(0.5)
    return linear(x)


def of_data(linear: nn.Linear, x: Tensor) -> Tensor:
    linear.weight.data.mul_(0.5)
    return linear(x)


def new_data(linear: nn.Linear, x: Tensor) -> Tensor:
    linear.weight.data = 0.5 * linear.weight.data
    return linear(x)


EDITS = [without_grad, with_grad, detached, of_data, new_data]


def elbo(run: Run, **options: Any) -> bf.ELBO:
    torch.manual_seed(0)
    return bf.ELBO(bf.BayesianModule(Net(run), init_std=0.1, **options), num_data=40)


def trained(each: bf.ELBO, make: Callable[..., Backend]) -> Tensor:
    backend = make(each, SGD(each.parameters(), lr=0.1))
    for _ in range(4):
        backend.step(X, Y, StepOptions(batch_index=0))
    return torch.cat([p.detach() for p in each.parameters()])


@loop_over("run, backend", [(run, backend) for run in EDITS for backend in EXPLICIT])
def test_an_edit_of_any_kind_is_found(run: Run, backend: Any) -> None:
    with pytest.raises(RuntimeError, match='under this backend; use backend="auto", or compute'):
        trained(elbo(run), lambda *args: make_backend(*args, backend))


@loop_over("backend", EXPLICIT)
def test_data_that_are_replaced_later_are_found(backend: Any) -> None:
    seen = []

    def run(linear: nn.Linear, x: Tensor) -> Tensor:
        seen.append(x)
        return (new_data if len(seen) > 2 else nn.Linear.forward)(linear, x)

    with pytest.raises(RuntimeError, match="must not edit its weights"):
        trained(elbo(run), lambda *args: make_backend(*args, backend))
    assert len(seen) == 3


@loop_over("backend", EXPLICIT)
def test_weights_that_are_nan_are_not_edited(backend: Any) -> None:
    each = elbo(nn.Linear.forward)
    with torch.no_grad():
        each.bnn.posterior.mean[0] = torch.nan
    with pytest.raises(NonFiniteLossError):
        trained(each, lambda *args: make_backend(*args, backend))


@loop_over("run, backend", [(r, b) for r in (without_grad, detached) for b in ("auto", "autograd")])
def test_an_edit_is_found_where_networks_train_at_once(run: Run, backend: Any) -> None:
    made = [elbo(run, seed=seed) for seed in range(2)]
    with pytest.raises(RuntimeError, match="where networks train at once; train each by fit"):
        fit_replicas(made, TensorLoader(X, Y, 20), epochs=1, backend=backend, progress=False)


@needs_compiler
@loop_over("prior", [bf.Gaussian(0.3), bf.ScaleMixture(std2=0.05)])
def test_auto_trains_such_a_network_by_the_fused_objective(prior: bf.Prior) -> None:
    """An edit that autograd sees is a factor; any other is one that has no gradient."""
    made = {run: trained(elbo(run, prior=prior), make_backend) for run in EDITS}
    expected = trained(elbo(halved, prior=prior), make_backend)
    torch.testing.assert_close(made[with_grad], expected, rtol=1e-5, atol=1e-6)
    for run in (detached, of_data, new_data):
        torch.testing.assert_close(made[run], made[without_grad], rtol=1e-6, atol=1e-7)


def backend_of(run: Run, noise: Any, **options: Any) -> Backend:
    """The backend after the first step."""
    each = elbo(run, **options)
    backend = make_backend(each, SGD(each.parameters(), lr=0.1), noise=noise)
    backend.step(X, Y, StepOptions(batch_index=0))
    return backend


@needs_compiler
@loop_over("noise", [None, "counter"])
def test_its_noise_is_that_of_the_compiled_backend(noise: Any) -> None:
    backend = backend_of(without_grad, noise)
    assert backend.description == "fused objective (the network edits its weights in place)"
    assert backend.noise == "counter"


def test_a_run_with_pytorchs_noise_keeps_it() -> None:
    """PyTorch's operations allow only edits that they do not see."""
    backend = backend_of(of_data, "generator")
    assert backend.description.startswith("autograd (the network edits")
    assert backend.noise == "generator"
    found = trained(elbo(of_data), lambda *args: make_backend(*args, noise="generator"))
    assert torch.equal(found, trained(elbo(of_data), AutogradBackend))


@loop_over(
    "run, prior",
    [(without_grad, bf.Gaussian()), (with_grad, bf.Gaussian()), (of_data, bf.ScaleMixture())],
)
def test_what_pytorchs_operations_do_not_allow_is_one_clear_error(run: Run, prior: Any) -> None:
    with pytest.raises(RuntimeError, match=r"where no C\+\+ kernel samples them; begin"):
        backend_of(run, "generator", prior=prior)


@needs_compiler
def test_such_a_run_resumes_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    def fit(epochs: int, folder: Path) -> dict[str, Tensor]:
        each = elbo(without_grad)
        loader, options = TensorLoader(X, Y, 20), {"checkpoint_dir": folder, "resume": True}
        with pytest.warns(bf.training.ConvergenceWarning):
            bf.fit(each, loader, epochs=epochs, progress=False, **options)
        return dict(each.bnn.state_dict())

    whole = fit(4, tmp_path / "whole")
    fit(2, tmp_path / "part")
    resumed = fit(4, tmp_path / "part")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
