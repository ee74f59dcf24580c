"""IVON's update by the kernel, in loops of one's own, compared with PyTorch's operations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.backend_cases import needs_compiler
from torch import Tensor, nn

import bayesify as bf
from bayesify.training import ivon
from bayesify.training.kernel import compiler, ivon_update

pytestmark = needs_compiler

PRIORS: dict[str, bf.Prior] = {
    "one prior": bf.Gaussian(0.3),
    "by group": bf.ByGroup({"0.*": bf.Gaussian(0.1), "*": bf.Gaussian(0.5)}),
}


def trained(
    *,
    dtype: torch.dtype = torch.float64,
    prior: bf.Prior = PRIORS["one prior"],
    prior_mean: Any = None,
    pruned: bool = False,
    init_std: float = 0.05,
    hidden: int = 700,
    steps: int = 5,
    change: Callable[[bf.IVON], object] = lambda _: None,
    updates: Callable[[bf.ELBO], object] = lambda _: None,
) -> list[Tensor]:
    """Return mean, rho, momentum and h after steps; ``updates`` changes the objective for them."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, hidden), nn.ReLU(), nn.Linear(hidden, 10)).to(dtype)
    bnn = bf.BayesianModule(net, prior=prior, prior_mean=prior_mean, seed=1, init_std=init_std)
    elbo = bf.ELBO(bf.prune(bnn, fraction=0.3) if pruned else bnn, num_data=1000)
    optimizer = bf.IVON(elbo, lr=0.1, betas=(0.9, 0.99), h0=None)
    change(optimizer)
    x, y = torch.randn(32, 20, dtype=dtype), torch.randint(10, (32,))
    for _ in range(steps):
        optimizer.zero_grad()
        elbo(x, y).loss.backward()
        own = elbo.fused
        updates(elbo)
        optimizer.step()
        elbo.fused = own
    q = elbo.bnn.posterior
    assert isinstance(q, bf.MeanFieldGaussian)
    return [each.detach().clone() for each in (q.mean, q.rho, *optimizer.state_of())]


def by_pytorch(elbo: bf.ELBO) -> None:
    elbo.fused = False


def largest_difference(one: list[Tensor], other: list[Tensor]) -> float:
    """Return it relative to the vector's root mean square."""
    return max(
        float((a - b).abs().max() / b.square().mean().sqrt())
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("prior_mean", [None, "initial"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_that_of_pytorch(
    prior: str, pruned: bool, prior_mean: Any, dtype: torch.dtype
) -> None:
    settings: dict[str, Any] = {"prior": PRIORS[prior], "pruned": pruned, "dtype": dtype}
    settings["prior_mean"] = prior_mean
    found, wanted = trained(**settings), trained(**settings, updates=by_pytorch)
    start = trained(**settings, steps=0)
    assert 0.0 < largest_difference(found, wanted) < (1e-4 if dtype == torch.float32 else 1e-12)
    assert largest_difference(found[:2], start[:2]) > 0.01, "the steps are not small"


@pytest.mark.parametrize(("hidden", "init_std"), [(1, 0.05), (3000, 0.05), (33, 2.0)])
def test_of_any_size_and_with_wide_posteriors(hidden: int, init_std: float) -> None:
    settings: dict[str, Any] = {"hidden": hidden, "init_std": init_std}
    assert largest_difference(trained(**settings), trained(**settings, updates=by_pytorch)) < 1e-10


@pytest.mark.parametrize("fault", ["gradient", "ess"])
def test_a_planted_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, real = trained(updates=by_pytorch), ivon_update.NativeIVON.update

    def faulty(self: Any, of: Any, moments: Any, gradients: Any, rates: Any) -> None:
        if fault == "gradient":
            gradients[0].mul_(1.01)
        else:  # in delta, 1 / (ess prior_std^2), too
            rates = rates._replace(ess=1.01 * rates.ess)
        real(self, of, moments, gradients, rates)

    monkeypatch.setattr(ivon_update.NativeIVON, "update", faulty)
    assert largest_difference(trained(), wanted) > 1e-4


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Without what earlier tests found out about the compiler."""
    ivon_update._has_kernel.cache_clear()
    yield
    ivon_update._has_kernel.cache_clear()


def test_without_a_compiler_it_is_pytorchs_and_none_is_looked_for_again(
    monkeypatch: pytest.MonkeyPatch, forgotten: None
) -> None:
    wanted, searches = trained(updates=by_pytorch), []

    def vanish(_: bf.ELBO) -> None:
        if not searches:  # the objective keeps the kernel that it has
            compiler.compiled_library.cache_clear()
            monkeypatch.setattr(compiler, "find_compiler", lambda: searches.append(1))

    assert largest_difference(trained(updates=vanish), wanted) == 0.0
    assert len(searches) == 1


def strided(optimizer: bf.IVON) -> None:
    momentum, _ = optimizer.state_of()
    optimizer.state[optimizer.elbo.bnn.posterior.mean]["momentum"] = torch.stack(
        [momentum, momentum], dim=1
    )[:, 0]


def test_vectors_that_it_cannot_read_are_left_to_pytorch() -> None:
    found = trained(change=strided)
    assert largest_difference(found, trained(updates=by_pytorch)) == 0.0


def test_an_objective_that_is_not_fused_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def called(*arguments: object) -> bool:
        calls.append(arguments)
        return False

    monkeypatch.setattr(ivon, "updated_by_kernel", called)
    trained(updates=by_pytorch)
    assert not calls
    trained(steps=2)
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["mean", "rho"])
def test_a_graph_of_before_the_update_is_an_error(name: str) -> None:
    elbo = bf.ELBO(bf.BayesianModule(nn.Linear(3, 2), prior=bf.Gaussian(1.0)), num_data=10)
    optimizer = bf.IVON(elbo)
    early = elbo.bnn.posterior.get_parameter(name).square().sum()
    elbo(torch.randn(4, 3), torch.tensor([0, 1, 1, 0])).loss.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        early.backward()


def test_copies_train_on_alike() -> None:
    net = nn.Linear(3, 2)
    elbo = bf.ELBO(bf.BayesianModule(net, prior=bf.Gaussian(1.0)), num_data=10)
    optimizer = bf.IVON(elbo)
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])

    def step(of: bf.IVON) -> Tensor:
        of.zero_grad()
        of.elbo(x, y).loss.backward()
        of.step()
        return of.elbo.bnn.posterior.mean.detach().clone()

    step(optimizer)
    twin = copy.deepcopy(optimizer)
    assert torch.equal(step(twin), step(optimizer))
