"""Faults that a review found, each held down by a test that failed before it was mended."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import bayesify as bf
from bayesify.datasets import TensorLoader
from bayesify.io import StorageError
from bayesify.noise.keys import Stream, derived_seed
from bayesify.training import ConvergenceWarning
from bayesify.training.convergence import std_residual
from bayesify.training.minibatches import minibatches

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
Y = torch.arange(24) % 3


class Two(nn.Module):
    """Two layers of one shape, registered in either order."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.add_module(first, nn.Linear(4, 4))
        self.add_module(second, nn.Linear(4, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.b(self.a(inputs).relu())


class Recurrent(nn.Module):
    """The last output of an LSTM, as three logits."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.lstm(inputs.unsqueeze(1))[0][:, -1]


def quiet_fit(elbo: bf.ELBO, loader: object, **options: object) -> list[dict[str, float | None]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return bf.fit(elbo, loader, **options)


def test_loading_into_another_order_of_layers_is_refused(tmp_path: Path) -> None:
    bf.save(bf.BayesianModule(Two("a", "b")), tmp_path / "model.safetensors")
    assert bf.load(tmp_path / "model.safetensors", Two("a", "b"))
    with pytest.raises(StorageError, match=r"have the order a\.weight"):
        bf.load(tmp_path / "model.safetensors", Two("b", "a"))


def test_a_recurrent_network_can_be_copied_and_pruned_after_training() -> None:
    bnn = bf.BayesianModule(Recurrent())
    quiet_fit(bf.ELBO(bnn, num_data=24), TensorLoader(X, Y, 8), epochs=1)
    pruned = bf.prune(copy.deepcopy(bnn), 0.5)
    assert torch.equal(pruned.to_module()(X), pruned.mean_outputs(X))


def test_the_number_of_a_subset_is_the_number_of_data() -> None:
    loader = DataLoader(TensorDataset(X, Y), 4, sampler=SubsetRandomSampler(range(12)))
    quiet_fit(bf.ELBO(bf.BayesianModule(nn.Linear(4, 3)), num_data=12), loader, epochs=1)
    with pytest.raises(ValueError, match="12 or 24, got 13"):
        bf.fit(bf.ELBO(bf.BayesianModule(nn.Linear(4, 3)), num_data=13), loader, epochs=1)


def test_dropout_and_shuffling_share_no_numbers() -> None:
    loader = TensorLoader(X, Y, 8, seed=5)
    shuffled = torch.Generator().manual_seed(derived_seed(5, Stream.SHUFFLE, 0))
    for _ in minibatches(loader, seed=5, epoch=0, skip=0):
        assert not torch.equal(torch.get_rng_state(), shuffled.get_state())


def test_what_a_step_draws_does_not_depend_on_the_steps_before() -> None:
    loader = TensorLoader(X, Y, 8)
    drawn = [torch.rand(3) for _ in minibatches(loader, seed=5, epoch=2, skip=0)]
    assert len({tuple(numbers.tolist()) for numbers in drawn}) == 3
    later = [torch.rand(3) for _ in minibatches(loader, seed=5, epoch=2, skip=1)]
    assert all(torch.equal(a, b) for a, b in zip(drawn[1:], later, strict=True))


def test_the_residual_is_finite_where_std_underflows() -> None:
    posterior = bf.MeanFieldGaussian(torch.zeros(3), std=0.1)
    with torch.no_grad():
        posterior.rho[0] = -500.0
    (-posterior.log_std.sum()).backward()
    residual = std_residual(posterior)
    assert residual is not None
    assert residual.mean == pytest.approx(-1.0)


def test_another_rate_or_warm_up_is_not_resumed(tmp_path: Path) -> None:
    def run(**options: object) -> None:
        elbo = bf.ELBO(bf.BayesianModule(nn.Linear(4, 3)), num_data=24)
        quiet_fit(elbo, TensorLoader(X, Y, 8), checkpoint_dir=tmp_path, resume=True, **options)

    run(epochs=1)
    run(epochs=2)
    for changed in ({"rho_lr_scale": 3.0}, {"kl_warmup_epochs": 1}):
        with pytest.raises(StorageError, match="another schedule"):
            run(epochs=3, **changed)


def test_the_kl_of_a_half_precision_network_does_not_overflow() -> None:
    bnn = bf.BayesianModule(nn.Linear(400, 400).half(), prior=bf.Gaussian(0.3))
    whole = bf.kl_divergence(copy.deepcopy(bnn.posterior).float(), bnn.prior)
    half = bf.kl_divergence(bnn.posterior, bnn.prior)
    assert half.dtype == torch.float32
    assert half.item() == pytest.approx(whole.item(), rel=1e-2)
    assert whole > torch.finfo(torch.float16).max


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    bnn = bf.BayesianModule(nn.Linear(4, 3), prior=bf.Gaussian(np.float32(0.5)), seed=np.int64(3))
    bf.ELBO(bnn, num_data=np.int64(24))(X, Y).loss.backward()
    bf.save(bnn, tmp_path / "model.safetensors")
    assert bf.load(tmp_path / "model.safetensors", nn.Linear(4, 3)).prior == bf.Gaussian(0.5)


def test_the_median_std_leaves_pruned_weights_out() -> None:
    small = bf.prune(bf.BayesianModule(nn.Linear(4, 3), init_std=0.1), 0.8)
    history = quiet_fit(bf.ELBO(small, num_data=24), TensorLoader(X, Y, 8), epochs=1)
    assert history[-1]["std_median"] == pytest.approx(0.1, rel=0.1)


def test_a_warm_up_that_never_ends_is_said() -> None:
    elbo = bf.ELBO(bf.BayesianModule(nn.Linear(4, 3)), num_data=24)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bf.fit(elbo, TensorLoader(X, Y, 8), epochs=1, kl_warmup_epochs=1)
    assert "never was the ELBO" in str(caught[0].message)


def test_networks_do_not_share_a_learned_noise() -> None:
    noise = bf.GaussianLikelihood(0.5, learn_std=True)
    first, second = (bf.BayesianModule(nn.Linear(4, 1), likelihood=noise) for _ in range(2))
    with torch.no_grad():
        first.likelihood.rho.fill_(3.0)
    assert math.isclose(second.likelihood.std.item(), 0.5, rel_tol=1e-6)


class Kept(nn.Module):
    """Keeps its activations, as for a plot."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.all: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.hidden = torch.tanh(self.first(inputs))
        self.all = [self.hidden]
        outputs: Tensor = self.last(self.hidden)
        return outputs


@pytest.mark.parametrize(
    "copied",
    [
        lambda bnn: bnn.to_module(),
        lambda bnn: bf.prune(bnn, 0.1),
        lambda bnn: bf.shrink(bnn, X),
        lambda bnn: bf.freeze(bnn, 2),
        copy.deepcopy,
    ],
)
def test_a_network_that_keeps_its_activations_is_copied(copied: Callable[[Any], Any]) -> None:
    bnn = bf.BayesianModule(Kept())
    loss = bf.ELBO(bnn, num_data=24)(X, Y).loss
    assert bnn.net.hidden.grad_fn is not None
    assert isinstance(copied(bnn), nn.Module)
    loss.backward()
    assert bnn.posterior.mean.grad is not None
