"""Rank-one factors of the weights of any network."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from tests.cases import mlp, normals
from tests.training.test_statistics import check_mean
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from bayesify import (
    ELBO,
    BayesianModule,
    Gaussian,
    GaussianLikelihood,
    RankOne,
    fit,
    load,
    rank_one,
    save,
)
from bayesify.noise.keys import NoiseKey, Stream

STD, PRIOR_STD = 0.3, 0.5


class Net(nn.Module):
    """Convolutions of several kinds, a layer that is used twice, and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(4, 6, 3, groups=2)
        self.up = nn.ConvTranspose2d(6, 2, 2)
        self.line = nn.Conv1d(2, 2, 3)
        self.mix = nn.Linear(23, 23)
        self.head = nn.Linear(46, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.line(self.up(self.down(x).tanh()).flatten(2))
        return self.head(self.mix(self.mix(h).tanh()).flatten(1))


def random(net: nn.Module, **options: object) -> BayesianModule:
    return BayesianModule(
        rank_one(net),
        include=(RankOne,),
        prior=Gaussian(PRIOR_STD),
        prior_mean="initial",
        init_std=STD,
        **options,  # type: ignore[arg-type]
    )


def test_the_copy_computes_what_the_network_does_and_leaves_it_alone() -> None:
    net, x = Net().double(), normals(2, 4, 6, 6)
    names, before = [*dict(net.named_parameters())], copy.deepcopy(net.state_dict())
    copied = rank_one(net)
    assert torch.equal(copied(x), net(x))
    bnn = random(net)
    assert bnn.layout.num_weights == (6 + 2) + (6 + 2) + (2 + 2) + (23 + 23) + (3 + 46)
    assert torch.equal(bnn.mean_outputs(x), net(x))
    assert not torch.equal(bnn(x), net(x))
    assert [*dict(net.named_parameters())] == names
    assert all(torch.equal(net.state_dict()[name], before[name]) for name in before)


def test_a_sampled_weight_is_w_times_the_outer_product() -> None:
    net = nn.Linear(3, 2, bias=False).double()
    bnn = random(net)
    r, s = bnn.posterior.draw(normals(1, 5)).weights[0].split([2, 3])
    eye = torch.eye(3, dtype=torch.float64)
    outputs = bnn.run_with(torch.cat([r, s]), eye)
    assert torch.allclose(outputs.T, net.weight * torch.outer(r, s), rtol=1e-12)


def test_the_variance_is_that_of_a_product_of_normals() -> None:
    """Var[w r s] = w^2 ((1 + std^2)^2 - 1), over 4,000 draws; the error rate is 1e-3."""
    net = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        outputs, _ = random(net).sample_outputs(
            torch.ones(1, 1).double(), NoiseKey(0, Stream.TRAINING, 0), range(4000)
        )
    deviations = (outputs.flatten() - net.weight.item()).square()
    check_mean(deviations, net.weight.item() ** 2 * ((1.0 + STD**2) ** 2 - 1.0), 1)


def test_the_kl_is_that_from_a_prior_around_one() -> None:
    bnn = random(mlp())
    with torch.no_grad():
        bnn.posterior.mean.add_(0.2 * normals(bnn.layout.num_weights, seed=3))
    x, y = normals(4, 3), torch.arange(4)
    q, p = Normal(bnn.posterior.mean, bnn.posterior.std), Normal(1.0, PRIOR_STD)
    terms = ELBO(bnn, num_data=4)(x, y)
    assert terms.kl.item() == pytest.approx(kl_divergence(q, p).sum().item(), rel=1e-10)


@pytest.mark.filterwarnings("ignore:.*standard deviations have not converged")
def test_it_is_trained_saved_and_loaded(tmp_path: Path) -> None:
    x = normals(60, 3, dtype=torch.float32)
    net = mlp(torch.float32, num_outputs=1)
    bnn = random(net, likelihood=GaussianLikelihood(0.3))
    before = {name: p.detach().clone() for name, p in bnn.named_parameters()}
    history = fit(ELBO(bnn, num_data=60), [(x, x.sum(1, keepdim=True))], epochs=100, lr=0.01)
    assert history[-1]["nll"] < history[0]["nll"]  # type: ignore[operator]
    for name, parameter in bnn.named_parameters():
        assert not torch.equal(parameter, before[name]), name
    save(bnn, tmp_path / "model")
    again = load(tmp_path / "model", rank_one(mlp(torch.float32, num_outputs=1, seed=9)))
    assert torch.equal(again.predict(x).mean, bnn.predict(x).mean)
    assert torch.allclose(bnn.to_module()(x), bnn.mean_outputs(x))


def test_layers_are_chosen_by_name_and_mistakes_are_named() -> None:
    copied = rank_one(Net(), layers=("mix", "head"))
    assert [name for name, each in copied.named_modules() if isinstance(each, RankOne)] == [
        "mix.parametrizations.weight.0",
        "head.parametrizations.weight.0",
    ]
    with pytest.raises(ValueError, match=r"'body\.\*' matches none of 0, 2"):
        rank_one(mlp(), layers=("body.*",))
    with pytest.raises(ValueError, match="matches none of a network without any"):
        rank_one(nn.LSTM(2, 3))
    with pytest.raises(TypeError, match="must be a sequence of name patterns"):
        rank_one(mlp(), layers="0")
    with pytest.raises(TypeError, match=r"net must be an nn\.Module"):
        rank_one(3)  # type: ignore[arg-type]
    normed = nn.Sequential(nn.utils.spectral_norm(nn.Linear(2, 3)))
    with pytest.raises(TypeError, match=r"'0' has a SpectralNorm; use .*utils\.parametrizations"):
        rank_one(normed)
    with pytest.raises(TypeError, match=r"weight of 0 must be a parameter, but a hook computes it"):
        rank_one(normed.requires_grad_(requires_grad=False))
    works = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(2, 3))).eval()
    assert torch.equal(rank_one(works)(torch.ones(1, 2)), works(torch.ones(1, 2)))
