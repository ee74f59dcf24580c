"""Deep ensembles of Bayesian networks: the bound of a mixture, saving and loading."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cases import normals
from torch import nn

import bayesify as bf
from bayesify.distributions.kl import kl_divergence
from bayesify.io import StorageError

X = normals(7, 4, dtype=torch.float32)


def member(seed: int, **options: Any) -> bf.BayesianModule:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    chosen = {"likelihood": bf.GaussianLikelihood(), "seed": seed, **options}
    if chosen.get("posterior") is not bf.Delta:
        chosen["init_std"] = 0.1
    return bf.BayesianModule(net, **chosen)


def network() -> nn.Module:
    return member(9).to_module()


def test_the_mean_of_the_members_kls_bounds_the_kl_of_the_mixture() -> None:
    """One weight: the KL of the mixture by the trapezoid rule, in float64."""
    prior, places = bf.Gaussian(1.0), torch.linspace(-12.0, 12.0, 200_001, dtype=torch.float64)
    for distance in (0.0, 0.3, 2.0):
        kls, densities = [], []
        for mean in (-distance, distance):
            net = nn.Linear(1, 1, bias=False).double()
            nn.init.constant_(net.weight, mean)
            bnn = bf.BayesianModule(net, prior=prior, init_std=0.4)
            kls.append(float(kl_divergence(bnn.posterior, bnn.prior).sum().detach()))
            normal = torch.distributions.Normal(torch.tensor(mean).double(), 0.4)
            densities.append(normal.log_prob(places).exp())
        mixture = sum(densities) / 2.0
        log_prior = torch.distributions.Normal(0.0, 1.0).log_prob(places)
        integrand = torch.where(mixture > 0.0, mixture * (mixture.log() - log_prior), 0.0)
        kl, bound = float(torch.trapezoid(integrand, places)), sum(kls) / 2.0
        assert kl <= bound + 1e-9
        if distance == 0.0:
            assert kl == pytest.approx(bound, abs=1e-9)
        else:  # and it is no more than log 2 away
            assert 0.01 < bound - kl <= math.log(2.0) + 1e-9


@pytest.mark.parametrize(
    "posterior", [bf.MeanFieldGaussian, bf.LowRankGaussian(2), bf.MatrixGaussian(), bf.Delta]
)
def test_a_saved_ensemble_predicts_the_same(posterior: Any, tmp_path: Path) -> None:
    members = [member(seed, posterior=posterior) for seed in range(3)]
    if posterior is bf.MeanFieldGaussian:
        members[1] = bf.prune(members[1], fraction=0.5)
    ensemble = bf.DeepEnsemble(members)
    ensemble.save(tmp_path / "ensemble.safetensors")
    again = bf.DeepEnsemble.load(tmp_path / "ensemble.safetensors", network())
    expected, found = ensemble.predict(X, 5), again.predict(X, 5)
    assert torch.equal(found.mean, expected.mean)
    assert torch.equal(found.total, expected.total)
    assert [each.seed for each in again.members] == [0, 1, 2]
    for one, other in zip(again.members, members, strict=True):
        assert torch.equal(one.posterior.masked_mean, other.posterior.masked_mean)


def test_a_frozen_body_may_stay_out_of_the_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    body = nn.Linear(4, 500).requires_grad_(False)
    members = []
    for seed in range(2):
        head = nn.Linear(500, 1)
        members.append(
            bf.BayesianModule(
                nn.Sequential(body, head), likelihood=bf.GaussianLikelihood(), seed=seed
            )
        )
    ensemble, sizes = bf.DeepEnsemble(members), []
    for frozen in (True, False):
        path = tmp_path / f"{frozen}.safetensors"
        ensemble.save(path, frozen=frozen)
        sizes.append(path.stat().st_size)
        found = bf.DeepEnsemble.load(path, nn.Sequential(body, nn.Linear(500, 1)))
        torch.testing.assert_close(found.predict(X, 3).mean, ensemble.predict(X, 3).mean)
    assert sizes[0] - sizes[1] > 2 * 4 * 500 * 4
    other = nn.Sequential(nn.Linear(4, 500).requires_grad_(False), nn.Linear(500, 1))
    with pytest.raises(StorageError, match="those of the given network are others"):
        bf.DeepEnsemble.load(tmp_path / "False.safetensors", other)


def test_members_of_different_architectures_are_loaded_into_networks_of_their_own(
    tmp_path: Path,
) -> None:
    nets = [nn.Linear(4, 1), nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))]
    noise = bf.GaussianLikelihood()
    ensemble = bf.DeepEnsemble([bf.BayesianModule(net, likelihood=noise) for net in nets])
    ensemble.save(tmp_path / "e")
    found = bf.DeepEnsemble.load(tmp_path / "e", nets)
    assert torch.equal(found.predict(X, 3).mean, ensemble.predict(X, 3).mean)
    with pytest.raises(ValueError, match="one network for all 2 members or one for each, got 1"):
        bf.DeepEnsemble.load(tmp_path / "e", nets[:1])
    with pytest.raises(TypeError, match="net must be the plain network"):
        bf.DeepEnsemble.load(tmp_path / "e", [nets[0], ensemble.members[1]])


def test_components_of_ones_own_are_given_again(tmp_path: Path) -> None:
    class Own(bf.Laplace):
        """A prior that a file cannot name."""

    ensemble = bf.DeepEnsemble([member(seed, prior=Own(1.0)) for seed in range(2)])
    ensemble.save(tmp_path / "ensemble.safetensors")
    with pytest.raises(StorageError, match="Own"):
        bf.DeepEnsemble.load(tmp_path / "ensemble.safetensors", network())
    again = bf.DeepEnsemble.load(tmp_path / "ensemble.safetensors", network(), prior=Own(1.0))
    assert [type(each.prior) for each in again.members] == [Own, Own]


def test_wrong_files_and_networks(tmp_path: Path) -> None:
    single, several = tmp_path / "single.safetensors", tmp_path / "several.safetensors"
    bf.save(member(0), single)
    bf.DeepEnsemble([member(0), member(1)]).save(several)
    with pytest.raises(StorageError, match=r"holds no ensemble; use bayesify\.load"):
        bf.DeepEnsemble.load(single, network())
    with pytest.raises(StorageError, match=r"use bayesify\.DeepEnsemble\.load"):
        bf.load(several, network())
    with pytest.raises(StorageError, match="of another architecture"):
        bf.DeepEnsemble.load(several, nn.Linear(4, 1))
    with pytest.raises(TypeError, match="net must be the plain network"):
        bf.DeepEnsemble.load(several, member(0))
    with pytest.raises(TypeError, match="load needs a path and a network"):
        bf.DeepEnsemble.load(network(), several)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="priors"):
        bf.DeepEnsemble.load(several, network(), priors=bf.Gaussian(1.0))
    with pytest.raises(TypeError, match=r"save needs a BayesianModule.*ensemble\.save"):
        bf.save(bf.DeepEnsemble([member(0)]), several)
    with pytest.raises(StorageError, match="there is no file"):
        bf.DeepEnsemble.load(tmp_path / "none", network())
    damaged = bytearray(several.read_bytes())
    damaged[-1] ^= 1
    several.write_bytes(damaged)
    with pytest.raises(StorageError, match="was altered"):
        bf.DeepEnsemble.load(several, network())
