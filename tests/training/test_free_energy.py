"""The free energy, next to that of the best network that ignores the data."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

import bayesify as bf
from bayesify.datasets import TensorLoader
from bayesify.training.free_energy import free_energy_ignoring_data, is_above_ignorance

N = 2000


def wide_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 50), nn.ReLU(), nn.Linear(50, 3))


def examples(count: int = 256) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 6, generator=generator)
    return inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 1).long()


@torch.no_grad()
def by_hand(elbo: bf.ELBO, of_last: float, of_others: float) -> float:
    """The free energy of means 0 with these stds, over many samples."""
    bnn = elbo.bnn
    std = torch.full_like(bnn.posterior.mean, of_others)
    std[-153:] = of_last
    q = bf.MeanFieldGaussian(torch.zeros_like(std), std)
    noise = torch.randn(100, len(std), generator=torch.Generator().manual_seed(2))
    draw = q.draw(noise)
    kl = bf.kl_divergence(q, bnn.weight_prior, draw)
    inputs, targets = examples()
    nlls = [elbo.nll(bnn.run_with(w, inputs).unsqueeze(0), targets) for w in draw.weights]
    return float(torch.stack(nlls).mean() + kl / elbo.num_data)


@pytest.mark.parametrize(
    "prior", [bf.Gaussian(1.0), bf.Laplace(0.5), bf.ScaleMixture(0.2, 1.0, 0.05)], ids=str
)
def test_no_std_of_a_grid_is_better(prior: bf.Prior) -> None:
    elbo = bf.ELBO(bf.BayesianModule(wide_net(), prior=prior), num_data=N)
    found = free_energy_ignoring_data(elbo, [examples()])
    assert found is not None
    stds = [0.01 * 2.5**i for i in range(7)]
    best = min(
        by_hand(elbo, of_last, of_others) for of_last in stds for of_others in {of_last, *stds[3:]}
    )
    assert found == pytest.approx(best, abs=0.03)


def test_a_learned_width_costs_nothing() -> None:
    # The prior's width follows that of the posterior, which may then be as narrow as it likes.
    bnn = bf.BayesianModule(wide_net(), prior=bf.EmpiricalGaussian(min_size=2))
    inputs, targets = examples()
    found = free_energy_ignoring_data(bf.ELBO(bnn, num_data=N), [(inputs, targets)])
    assert found == pytest.approx(math.log(3), abs=0.02)


def test_the_network_stays_as_it_is() -> None:
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(), nn.Linear(5, 3))
    bnn = bf.BayesianModule(net, prior_mean="initial").train()
    before = {name: value.clone() for name, value in bnn.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    assert free_energy_ignoring_data(bf.ELBO(bnn, num_data=N), [examples()]) is not None
    assert bnn.net.training
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in bnn.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_point_estimate_and_no_data_have_none() -> None:
    point = bf.BayesianModule(wide_net(), posterior=bf.Delta)
    assert free_energy_ignoring_data(bf.ELBO(point, num_data=N), [examples()]) is None
    elbo = bf.ELBO(bf.BayesianModule(wide_net()), num_data=N)
    assert free_energy_ignoring_data(elbo, []) is None


def test_only_what_is_above_it_is_above_it() -> None:
    for own, above in ((2.0, False), (2.5, False), (2.6, True), (None, False)):
        row = {"free_energy": own, "free_energy_ignoring_data": 2.5}
        assert is_above_ignorance(row) is above


def trained(capsys: pytest.CaptureFixture[str], **options: Any) -> tuple[bf.training.History, str]:
    bnn = bf.BayesianModule(wide_net(), prior=bf.Gaussian(1.0), init_std=options.pop("init_std"))
    inputs, targets = examples(N)
    elbo = bf.ELBO(bnn, num_data=N, temperature=options.pop("temperature", 1.0))
    loader = TensorLoader(inputs, targets, 250)
    rows = bf.fit(elbo, loader, optimizer=partial(Adam, lr=0.02), **options)
    return rows, capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
def test_a_run_above_it_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    # The KL is hardly weighed, so that narrow weights stay narrow: a good fit at a great price.
    rows, printed = trained(capsys, epochs=10, init_std=1e-4, temperature=1e-3)
    last = rows[-1]
    assert last["free_energy"] == pytest.approx(last["nll"] + last["kl"] / N)
    assert last["nll"] < 0.3
    assert is_above_ignorance(last)
    assert "worth less than no training" in printed
    assert all(row["free_energy_ignoring_data"] is None for row in rows[:-1])


@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
def test_a_run_below_it_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    rows, printed = trained(capsys, epochs=60, init_std=0.3)
    assert not is_above_ignorance(rows[-1])
    assert "free energy" in printed
    assert "worth less" not in printed
