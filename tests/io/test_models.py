"""Networks come back from their files bit for bit, with all that belongs to them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.cases import CASES, Case, each_case, mlp
from tests.loops import loop_over
from tests.saved_networks import CASE, check_same, trained
from torch import Tensor, nn

from bayesify import (
    ELBO,
    BayesianModule,
    CategoricalLikelihood,
    GaussianLikelihood,
    LocalReparameterization,
    Prior,
    compress,
    fit,
    load,
    prune,
    save,
)
from bayesify.io import StorageError, write_tensors
from bayesify.noise.keys import NoiseKey, Stream


@each_case
@loop_over("dtype", [torch.float64, torch.float32])
def test_a_network_comes_back_bit_for_bit(case: Case, dtype: torch.dtype, tmp_path: Path) -> None:
    bnn = trained(case.bnn(case.net(dtype)))
    save(bnn, tmp_path / "a")
    net = case.net(torch.float32, seed=9)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    check_same(load(str(tmp_path / "a"), net), bnn, case.data(6, dtype)[0])
    assert all(map(torch.equal, net.state_dict().values(), before))


@loop_over("case", [case for case in CASES if not case.is_point])
def test_a_pruned_network_comes_back_smaller_and_zero(case: Case, tmp_path: Path) -> None:
    bnn = trained(case.bnn())
    small = prune(bnn, 0.75)
    for name, network in (("whole", bnn), ("small", small)):
        save(network, tmp_path / name)
    again = load(tmp_path / "small", case.net(seed=9))
    check_same(again, small, x := case.data(6)[0])
    gone = ~small.posterior.mask
    count = int(gone.sum())
    assert count == int(0.75 * len(gone))
    assert not again.posterior.mean[gone].any()
    noise = again.posterior.noise(NoiseKey(0, Stream.TRAINING, 0), range(5))
    samples = again.posterior.draw(noise).weights
    assert torch.equal(samples != 0, ~gone.expand(5, -1))
    # The file holds two numbers of 8 bytes fewer for each of these weights, and a bit for each;
    # under a MatrixGaussian one number, since a pruned weight's rho is part of the others' spread.
    size = 8 if case.posterior == "matrix" else 16
    whole, less = ((tmp_path / name).stat().st_size for name in ("whole", "small"))
    assert whole - less > count * size - 200
    twice = prune(again, 1.0)
    save(twice, tmp_path / "nothing")
    check_same(load(tmp_path / "nothing", case.net()), twice, x)


class Mixed(nn.Module):
    """Batch normalisation, a tied matrix, a frozen and a half-precision part, a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(4, 3)
            self.norm = nn.BatchNorm1d(3)
            self.out = nn.Linear(3, 4, bias=False)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.short = nn.Parameter(torch.randn(4).half())
            self.register_buffer("offset", torch.randn(4))
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.embed(tokens).mean(1))
        return self.frozen(self.out(hidden)) * self.short.float() + self.offset


def test_buffers_ties_and_deterministic_parts_are_kept(tmp_path: Path) -> None:
    bnn = BayesianModule(Mixed(0), exclude=("norm.*", "short"), seed=3)
    tokens = torch.arange(12).view(6, 2) % 4
    for _ in range(3):
        bnn(tokens)
    bnn = trained(bnn)
    for network in (bnn, prune(bnn, 0.5)):
        save(network, tmp_path / "a")
        again = load(tmp_path / "a", Mixed(1))
        check_same(again, network, tokens)
        assert again.net.norm.num_batches_tracked == 3
        assert again.layout.ties == (("embed.weight", "out.weight"),)
        plain = again.to_module()
        assert plain.out.weight is plain.embed.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_one_element_with_any_stride(dtype: torch.dtype, tmp_path: Path) -> None:
    """They count as contiguous."""

    class Scaled(nn.Module):
        scale: Tensor

        def __init__(self, value: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([0.5]))
            self.register_buffer("scale", torch.full((2, 2), value, dtype=dtype)[:1, 0])

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight * self.scale.to(x.dtype)

    bnn = BayesianModule(Scaled(3.0), likelihood=GaussianLikelihood())
    path = tmp_path / "model.safetensors"
    save(bnn, path)
    loaded = load(path, Scaled(0.0))
    assert torch.equal(loaded.posterior.mean, bnn.posterior.mean)
    assert torch.equal(loaded.posterior.std, bnn.posterior.std)
    assert loaded.net.scale.tolist() == [3.0]


def test_a_network_turned_to_another_dtype_keeps_it(tmp_path: Path) -> None:
    bnn = trained(CASE.bnn(mlp(torch.float32)).to(torch.float64))
    save(bnn, tmp_path / "a")
    check_same(load(tmp_path / "a", mlp(torch.float32)), bnn, CASE.data(6)[0])


class Clock(nn.Module):
    """A linear layer of the time since a date, turned by angles, neither of which a file holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2)
        start = torch.tensor(1_700_000_123.0, dtype=torch.float64)
        self.register_buffer("start", start, persistent=False)
        self.register_buffer("turn", torch.polar(torch.ones(1), torch.ones(1)), persistent=False)
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, t: Tensor) -> Tensor:
        passed = (t - self.start).to(self.scale.dtype) * self.scale
        return torch.view_as_real(torch.view_as_complex(self.layer(passed)) * self.turn)


@loop_over("dtype", [torch.float64, torch.float32])
def test_buffers_that_a_file_does_not_hold_keep_their_kind(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    net = Clock()
    net.layer.to(dtype)
    net.scale, net.turn = (
        net.scale.to(dtype),
        net.turn.to(torch.promote_types(dtype, net.turn.dtype)),
    )
    bnn = trained(BayesianModule(net, likelihood=GaussianLikelihood(1.0)))
    save(bnn, tmp_path / "a")
    again = load(tmp_path / "a", Clock())
    check_same(again, bnn, torch.arange(3.0, dtype=torch.float64).unsqueeze(1) + 1_700_000_123)
    assert (again.net.start.dtype, again.net.turn.is_complex()) == (torch.float64, True)


class Stateful(nn.Linear):
    def get_extra_state(self) -> dict[str, float]:
        return {"scale": 2.0}

    def set_extra_state(self, state: dict[str, float]) -> None: ...


def test_state_that_is_no_tensor_is_refused_before_training(tmp_path: Path) -> None:
    bnn = BayesianModule(nn.Sequential(Stateful(3, 2)))
    message = r"holds tensors, got a network with a dict in net\.0\._extra_state; keep what"
    with pytest.raises(ValueError, match=message):
        save(bnn, tmp_path / "a")
    loader = [(torch.ones(1, 3), torch.tensor([0]))]
    with pytest.raises(ValueError, match=message):
        fit(ELBO(bnn, num_data=1), loader, checkpoint_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_dtype_that_the_format_lacks_is_named(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 2))
    net[0].register_buffer("phase", torch.zeros(2, dtype=torch.complex128))
    bnn = BayesianModule(net)
    message = r"dtype of safetensors, got torch\.complex128 for .*0\.phase; convert it"
    with pytest.raises(ValueError, match=message):
        save(bnn, tmp_path / "a")
    with pytest.raises(ValueError, match=message):
        compress(bnn, tmp_path / "a.bfz", step_size=0.01)
    assert list(tmp_path.iterdir()) == []


@dataclass(frozen=True)
class Wide(Prior):
    """A prior that bayesify does not know, with a field that JSON does not know."""

    stds: Tensor

    def log_prob(self, weights: Tensor) -> Tensor:
        return torch.distributions.Normal(0.0, self.stds.max()).log_prob(weights)


@dataclass(frozen=True)
class Laplace(Wide):
    """Called as one of bayesify's own."""


class Own(CategoricalLikelihood):
    """A likelihood that bayesify does not know."""


@loop_over("kind", [Wide, Laplace])
def test_components_of_ones_own_are_passed_by_hand(kind: type[Wide], tmp_path: Path) -> None:
    prior, likelihood = kind(torch.tensor([2.0])), Own()
    bnn = BayesianModule(mlp(), prior=prior, likelihood=likelihood)
    save(bnn, tmp_path / "a")
    own = {"prior": prior, "likelihood": likelihood}
    check_same(load(tmp_path / "a", mlp(), **own), bnn, CASE.data(6)[0])
    for missing in own:
        with pytest.raises(StorageError, match=rf"has no {missing} named .*pass your own to load"):
            load(tmp_path / "a", mlp(), **{name: own[name] for name in own if name != missing})


def test_an_option_of_numpy_is_stored_as_it_means(tmp_path: Path) -> None:
    """np.True_ is no bool, and JSON knows none but bools."""
    estimator = LocalReparameterization(antithetic=np.True_)  # type: ignore[arg-type]
    save(BayesianModule(nn.Linear(2, 1), estimator=estimator), tmp_path / "model")
    found = load(tmp_path / "model", nn.Linear(2, 1)).estimator
    assert found == LocalReparameterization(antithetic=True)
    assert found.antithetic is True


def test_load_names_what_is_no_file_and_no_network(tmp_path: Path) -> None:
    net, path = nn.Linear(3, 2), tmp_path / "model.safetensors"
    save(BayesianModule(net), path)
    calls: list[tuple[Any, Any]] = [(net, path), (path, nn.Linear)]
    for arguments in calls:
        with pytest.raises(TypeError, match=r"load needs a path and a network.*load\(path, net\)"):
            load(*arguments)
    with pytest.raises(TypeError, match=r"must be the plain network.*net\.to_module\(\)"):
        load(path, BayesianModule(net))


def test_an_ordinary_network_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"needs a BayesianModule, got Linear; .*save_model"):
        save(nn.Linear(3, 2), tmp_path / "model.safetensors")  # type: ignore[arg-type]
    elbo: Any = ELBO(BayesianModule(nn.Linear(3, 2)), num_data=1)
    with pytest.raises(TypeError, match=r"got ELBO; .*save\(elbo\.bnn, path\)"):
        save(elbo, tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_kind_is_told_by_what_it_lacks(tmp_path: Path) -> None:
    write_tensors(tmp_path / "other", {}, {"kind": "bandit"})
    with pytest.raises(StorageError, match="can be restored: it lacks '"):
        load(tmp_path / "other", nn.Linear(3, 2))
