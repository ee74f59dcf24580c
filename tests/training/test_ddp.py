"""DistributedDataParallel over ELBO: two processes, each with half a batch and noise of its own.

This file is also what the two processes run, with their rank and a folder as arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.loops import loop_over
from tests.ranks import run_ranks, together
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bayesify import (
    ELBO,
    IVON,
    BayesianModule,
    Estimator,
    Flipout,
    LocalReparameterization,
    ScaleMixture,
    WeightSampling,
    kl_divergence,
)
from bayesify.noise.keys import NoiseKey, Stream

RANKS = range(2)
LIMIT = 100.0  # seconds for all that the two processes do
BATCH, NUM_DATA, STEPS = 8, 40, 50
ESTIMATORS: dict[str, Estimator] = {
    "sampling": WeightSampling(),
    "antithetic": WeightSampling(antithetic=True),
    "local": LocalReparameterization(),
    "flipout": Flipout(),
}
CASES = [
    (name, samples)
    for name, samples in product(ESTIMATORS, (1, 2))
    if (name, samples) != ("antithetic", 1)
]
each_case = loop_over(("name", "samples"), CASES)
#: What is random: everything, or the last layer with the rest deterministic.
INCLUDED = {"everything": ("*",), "last-layer": ("2.*",)}
Results = list[dict[str, Tensor]]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (distributed.is_available() and distributed.is_gloo_available()),
        reason="this torch has no gloo",
    ),
]


def new_elbo(name: str, samples: int, include: tuple[str, ...] = ("*",)) -> ELBO:
    """The same in every process; ``"fused"`` is weight sampling by the kernel."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    estimator = ESTIMATORS["sampling" if name == "fused" else name]
    bnn = BayesianModule(net, init_std=0.3, estimator=estimator, seed=11, include=include)
    return ELBO(bnn, num_data=NUM_DATA, num_samples=samples, fused=name == "fused")


def half_batch(rank: int, step: int = 0) -> tuple[Tensor, Tensor]:
    """A rank's part of the data of one step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 3, dtype=torch.float64, generator=generator)
    part = slice(rank * BATCH // 2, (rank + 1) * BATCH // 2)
    return x[part], torch.arange(BATCH)[part] % 4


def gradient(model: nn.Module, elbo: ELBO, *data: Tensor, kl_scale: float = 1.0) -> Tensor:
    """The gradients of the first step, mean's and rho's in one vector."""
    elbo.step = 0
    elbo.zero_grad()
    model(*data, kl_scale=kl_scale).loss.backward()
    return flat_gradient(elbo)


def flat_gradient(elbo: ELBO) -> Tensor:
    parameters = (elbo.bnn.posterior.mean, elbo.bnn.posterior.get_parameter("rho"))
    return torch.cat([parameter.grad for parameter in parameters if parameter.grad is not None])


def adam(elbo: ELBO) -> torch.optim.Optimizer:
    return torch.optim.Adam(elbo.parameters(), lr=0.01)


def ivon(elbo: ELBO) -> torch.optim.Optimizer:
    return IVON(elbo, lr=0.02, betas=(0.9, 0.99), h0=0.5)


def trained(
    model: nn.Module,
    elbo: ELBO,
    rank: int,
    optimizer_of: Callable[[ELBO], torch.optim.Optimizer] = adam,
) -> Tensor:
    """All parameters after some steps on this rank's data."""
    optimizer = optimizer_of(elbo)
    elbo.step = 0
    for step in range(STEPS):
        optimizer.zero_grad()
        model(*half_batch(rank, step)).loss.backward()
        optimizer.step()
    whole = (getattr(each, "full_tensor", lambda e=each: e)() for each in elbo.parameters())
    return torch.cat([parameter.detach().flatten() for parameter in whole])


# --------------------------------------------------------------------------- in the two processes


def measure(rank: int) -> dict[str, Tensor]:
    """Everything that the tests look at."""
    results, data = {}, half_batch(rank)
    for name, samples in CASES:
        elbo = new_elbo(name, samples)
        model = DistributedDataParallel(elbo)
        key = f"{name}-{samples}"
        results[f"{key}-gradient"] = gradient(model, elbo, *data)
        results[f"{key}-without-kl"] = gradient(model, elbo, *data, kl_scale=0.0)
        with mock.patch("bayesify.training.elbo.process_rank", return_value=0):
            results[f"{key}-equal-noise"] = gradient(model, elbo, *data)
        elbo.step = 0
        results[f"{key}-outputs"] = model(*half_batch(0)).outputs
        with torch.no_grad():
            results[f"{key}-call"] = elbo.bnn(half_batch(0)[0])
        results[f"{key}-trained"] = trained(model, elbo, rank)
    for name, include in INCLUDED.items():
        elbo = new_elbo("sampling", 1, include)
        results[f"{name}-ddp"] = trained(DistributedDataParallel(elbo), elbo, rank)
        elbo = new_elbo("sampling", 1, include)
        for module in elbo.bnn.net:
            if any(True for _ in module.parameters()):
                fully_shard(module)
        results[f"{name}-sharded"] = trained(fully_shard(elbo), elbo, rank)
    elbo = new_elbo("sampling", 1)
    results["ivon-trained"] = trained(DistributedDataParallel(elbo), elbo, rank, ivon)
    alone = new_elbo("sampling", 1)
    results["trained-alone"] = trained(alone, alone, rank)
    for name in ("sampling", "local", "fused"):
        elbo = new_elbo(name, 1)
        elbo.bnn.prior = ScaleMixture(pi=0.5, std1=1.0, std2=0.1)
        model = DistributedDataParallel(elbo)
        results[f"{name}-monte-carlo"] = gradient(model, elbo, *data)
    return results


def main(rank: int, folder: Path) -> None:
    with together(rank, folder, LIMIT / 2):
        save_file(measure(rank), folder / f"{rank}.safetensors")


# --------------------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What rank 0 and rank 1 measured."""
    folder = tmp_path_factory.mktemp("ddp")
    run_ranks(lambda rank: [sys.executable, __file__, str(rank), str(folder)], LIMIT)
    return [load_file(folder / f"{rank}.safetensors") for rank in RANKS]


def mean_gradient(name: str, samples: int, *, kl: bool = True) -> Tensor:
    """The mean of the two ranks' gradients, each of its own data and noise, in one process."""
    elbo = new_elbo(name, samples)
    bnn, key = elbo.bnn, NoiseKey(11, Stream.TRAINING, 0)
    nll = torch.zeros((), dtype=torch.float64)
    for rank in RANKS:
        x, y = half_batch(rank)
        outputs, _ = bnn.sample_outputs(x, key, range(rank * samples, (rank + 1) * samples))
        nll = nll - bnn.likelihood.log_prob(outputs, y).mean() / len(RANKS)
    share = kl_divergence(bnn.posterior, bnn.prior) / NUM_DATA
    (nll + share if kl else nll).backward()
    return flat_gradient(elbo)


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


@each_case
def test_gradients_are_the_mean_of_the_ranks(name: str, samples: int, results: Results) -> None:
    expected = mean_gradient(name, samples)
    for result in results:
        assert distance(result[f"{name}-{samples}-gradient"], expected) < 1e-12
        # The same check catches equal noise on both ranks.
        assert distance(result[f"{name}-{samples}-equal-noise"], expected) > 1e-4


@each_case
def test_the_kl_counts_once(name: str, samples: int, results: Results) -> None:
    elbo = new_elbo(name, samples)
    (kl_divergence(elbo.bnn.posterior, elbo.bnn.prior) / NUM_DATA).backward()
    expected = flat_gradient(elbo)
    assert float(expected.abs().max()) > 1e-2
    without = mean_gradient(name, samples, kl=False)
    for result in results:
        without_kl = result[f"{name}-{samples}-without-kl"]
        assert distance(without_kl, without) < 1e-12
        assert distance(result[f"{name}-{samples}-gradient"] - without_kl, expected) < 1e-12


@each_case
def test_ranks_draw_the_noise_of_their_own_samples(
    name: str, samples: int, results: Results
) -> None:
    bnn, x = new_elbo(name, samples).bnn, half_batch(0)[0]
    for rank, result in zip(RANKS, results, strict=True):
        own = range(rank * samples, (rank + 1) * samples)
        outputs, _ = bnn.sample_outputs(x, NoiseKey(11, Stream.TRAINING, 0), own)
        assert distance(result[f"{name}-{samples}-outputs"], outputs.detach()) < 1e-12
        call, _ = bnn.sample_outputs(x, NoiseKey(11, Stream.CALL, 0), range(rank, rank + 1))
        assert distance(result[f"{name}-{samples}-call"], call[0].detach()) < 1e-12
    zero, one = (result[f"{name}-{samples}-outputs"] for result in results)
    # No sample of one rank is any sample of the other.
    assert float((zero.unsqueeze(1) - one).abs().amax((2, 3)).min()) > 1e-3


@loop_over("name", ["sampling", "local", "fused"])
def test_a_monte_carlo_kl_is_averaged_over_the_ranks_samples(name: str, results: Results) -> None:
    def of(rank: int, noise_of: int) -> Tensor:
        elbo = new_elbo(name, 1)
        elbo.bnn.prior = ScaleMixture(pi=0.5, std1=1.0, std2=0.1)
        with mock.patch("bayesify.training.elbo.process_rank", return_value=noise_of):
            return gradient(elbo, elbo, *half_batch(rank))

    expected = (of(0, 0) + of(1, 1)) / 2
    fault = (of(0, 0) + of(1, 0)) / 2
    for result in results:
        assert distance(result[f"{name}-monte-carlo"], expected) < 1e-12
        assert distance(result[f"{name}-monte-carlo"], fault) > 1e-4


@each_case
def test_replicas_stay_bitwise_identical(name: str, samples: int, results: Results) -> None:
    zero, one = (result[f"{name}-{samples}-trained"] for result in results)
    assert torch.equal(zero, one)
    start = torch.cat([parameter.detach() for parameter in new_elbo(name, samples).parameters()])
    assert distance(zero, start) > 0.1
    # Without DistributedDataParallel they part.
    assert distance(*(result["trained-alone"] for result in results)) > 0.01


def test_ivon_takes_the_steps_of_the_averaged_gradients(results: Results) -> None:
    elbo = new_elbo("sampling", 1)
    optimizer, parameters = ivon(elbo), list(elbo.parameters())
    for step in range(STEPS):
        gradients = []
        for rank in RANKS:
            elbo.step = step
            optimizer.zero_grad()
            with mock.patch("bayesify.training.elbo.process_rank", return_value=rank):
                elbo(*half_batch(rank, step)).loss.backward()
            gradients.append([parameter.grad for parameter in parameters])
        for parameter, zero, one in zip(parameters, *gradients, strict=True):
            assert zero is not None
            assert one is not None
            parameter.grad = (zero + one) / 2
        optimizer.step()
    expected = torch.cat([parameter.detach() for parameter in parameters])
    for result in results:
        assert distance(result["ivon-trained"], expected) < 1e-10


@pytest.mark.parametrize("name", INCLUDED)
def test_sharded_parameters_train_alike(name: str, results: Results) -> None:
    for result in results:
        assert distance(result[f"{name}-sharded"], result[f"{name}-ddp"]) < 1e-12
        assert distance(result[f"{name}-sharded"], results[0][f"{name}-sharded"]) == 0.0


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
