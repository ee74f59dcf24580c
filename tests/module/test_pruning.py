"""Signal-to-noise pruning: which weights go, and that they stay gone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.cases import PRIORS, Case, each_prior, mlp, normals
from tests.loops import loop_over
from torch import Tensor, nn

from bayesify import (
    ELBO,
    BayesianModule,
    Delta,
    GaussianLikelihood,
    MeanFieldGaussian,
    kl_divergence,
    load,
    prune,
    save,
    snr,
)
from bayesify.distributions.posteriors import Posterior
from bayesify.distributions.softplus import inverse_softplus
from bayesify.module.pruning import snr_decibels

SIZE = 44
CASE = Case("gaussian", "mean-field", "categorical")


def uneven(case: Case = CASE) -> BayesianModule:
    """A network whose every weight has a std of its own, so that snr and |mean| order otherwise."""
    bnn = case.bnn()
    with torch.no_grad():
        bnn.posterior.rho.copy_(inverse_softplus(torch.exp(0.8 * normals(SIZE, seed=6) - 1.5)))
    return bnn


def test_snr_is_mean_over_std() -> None:
    bnn = uneven()
    exact = (bnn.posterior.mean.abs() / bnn.posterior.std).detach()
    assert torch.allclose(snr(bnn), exact, rtol=1e-13)
    assert torch.allclose(snr_decibels(bnn), 20.0 * exact.log10(), rtol=1e-13)
    assert not snr(bnn).requires_grad


def check_global_order(fraction: float, prune: Callable[..., Any] = prune) -> None:
    """The floor(fraction D) smallest ratios go, over all layers and biases, and no other."""
    bnn = uneven()
    small = prune(bnn, fraction)
    ratio = (bnn.posterior.mean.abs() / torch.log1p(bnn.posterior.rho.exp())).detach()
    order = np.argsort(ratio.numpy())
    gone = math.floor(round(fraction * SIZE, 6))
    expected = torch.ones(SIZE, dtype=torch.bool)
    expected[order[:gone]] = False
    assert torch.equal(small.posterior.mask, expected)
    assert torch.equal(small.posterior.mean[expected], bnn.posterior.mean[expected])
    assert bnn.posterior.mask is None, "the network given is not changed"


@loop_over("fraction", [0.0, 0.1, 0.25, 0.5, 0.9, 1.0, 1])
def test_pruning_is_global_by_snr(fraction: float) -> None:
    check_global_order(fraction)


def pruned_by(score: Callable[[BayesianModule], Tensor], missing: int = 0) -> Callable[..., Any]:
    """Remove the weights of the lowest scores, or fewer than asked for."""

    def wrong(bnn: BayesianModule, fraction: float) -> Any:
        mask = torch.ones(SIZE, dtype=torch.bool)
        mask[score(bnn).argsort()[: int(fraction * SIZE) - missing]] = False
        return SimpleNamespace(posterior=SimpleNamespace(mask=mask, mean=bnn.posterior.mean))

    return wrong


def test_another_order_of_pruning_is_caught() -> None:
    check_global_order(0.5, pruned_by(snr))
    for wrong in (
        pruned_by(lambda bnn: -snr(bnn)),
        pruned_by(lambda bnn: bnn.posterior.mean.detach().abs()),
        pruned_by(snr, missing=1),
    ):
        with pytest.raises(AssertionError):
            check_global_order(0.5, wrong)


@pytest.mark.parametrize("posterior", [MeanFieldGaussian, Delta])
def test_pruning_by_magnitude_ignores_the_noise(posterior: type[Posterior]) -> None:
    bnn = uneven() if posterior is MeanFieldGaussian else mlp_point()
    size = bnn.posterior.mean.abs().detach()
    small = prune(prune(bnn, 0.25, "magnitude"), 0.5, "magnitude")
    kept = small.posterior.mask
    assert int((~kept).sum()) == SIZE // 2
    assert float(size[kept].min()) >= float(size[~kept].max())
    assert bool((small.posterior.mean[~kept] == 0.0).all())
    if posterior is MeanFieldGaussian:
        assert not torch.equal(prune(bnn, 0.5).posterior.mask, kept), "another order by snr"
    x, _ = CASE.data(5)
    plain = small.to_module()
    assert torch.allclose(small.predict_mean(x).mean, plain(x).softmax(-1))


def mlp_point() -> BayesianModule:
    return Case("gaussian", "delta", "categorical").bnn()


def test_a_point_is_pruned_by_magnitude_only() -> None:
    with pytest.raises(TypeError, match=r"got Delta; .* prune with criterion='magnitude'"):
        prune(mlp_point(), 0.5)
    with pytest.raises(ValueError, match="criterion must be snr or magnitude, got 'size'"):
        prune(uneven(), 0.5, "size")  # type: ignore[arg-type]


@loop_over("percent", range(0, 101))
def test_no_fraction_loses_a_weight_to_rounding(percent: int) -> None:
    bnn = BayesianModule(nn.Linear(20, 5, bias=False))
    kept = prune(bnn, percent / 100).posterior.mask
    assert int((~kept).sum()) == percent


@each_prior
def test_pruned_weights_are_zero_everywhere(prior: object) -> None:
    bnn, (x, _) = uneven(), CASE.data(5)
    small = prune(bnn, 0.6)
    gone = ~small.posterior.mask
    assert int(gone.sum()) == 26
    assert bool((small.posterior.mean[gone] == 0.0).all())
    assert bool((small.posterior.std[gone] == 0.0).all())
    assert bool((snr(small)[gone] == 0.0).all())
    assert bool((snr_decibels(small)[gone] == -math.inf).all())
    draw = small.posterior.draw(normals(9, SIZE, seed=7))
    assert bool((draw.weights[:, gone] == 0.0).all())
    assert bool((draw.weights[:, ~gone] != 0.0).all())
    plain = small.to_module()
    flat = torch.cat([parameter.flatten() for parameter in plain.parameters()])
    assert torch.equal(flat == 0.0, gone)
    assert torch.allclose(small.predict_mean(x).mean, plain(x).softmax(-1))
    silent = small.layout.unflatten(gone)["0.weight"]
    assert 0 < int(silent.sum()) < 15


def test_predictions_use_the_pruned_weights() -> None:
    bnn, (x, _) = uneven(), CASE.data(5)
    bare = prune(bnn, 1.0)
    even = torch.full((5, 4), 0.25, dtype=torch.float64)
    assert torch.allclose(bare.predict(x, 3).mean, even, rtol=1e-14)
    assert torch.allclose(bare.predict_mean(x).mean, even, rtol=1e-14)
    assert bare.predict(x, 3).epistemic.abs().max() < 1e-12
    assert ELBO(bare, num_data=5)(*CASE.data(5)).kl.item() == 0.0
    whole = prune(bnn, 0.0)
    assert torch.equal(whole.predict(x, 3).mean, bnn.predict(x, 3).mean)


def train(bnn: BayesianModule, steps: int = 5) -> None:
    optimizer = torch.optim.AdamW(bnn.parameters(), lr=0.1, weight_decay=0.1)
    elbo = ELBO(bnn, num_data=12)
    for _ in range(steps):
        optimizer.zero_grad()
        elbo(*CASE.data(12)).loss.backward()
        optimizer.step()


@loop_over("prior", PRIORS)
@loop_over("posterior", ["mean-field", "delta"])
def test_pruned_weights_stay_zero_in_further_training(prior: str, posterior: str) -> None:
    small = prune(uneven(Case(prior, "mean-field", "categorical")), 0.5)
    if posterior == "delta":
        kept = small.posterior.mask
        small = Case(prior, "delta", "categorical").bnn()
        small.posterior.mask = kept
        with torch.no_grad():
            small.posterior.mean.masked_fill_(~kept, 0.0)
    gone = ~small.posterior.mask
    before = small.posterior.mean.detach().clone()
    train(small)
    assert bool((small.posterior.mean[gone] == 0.0).all())
    assert not torch.isclose(small.posterior.mean[~gone], before[~gone]).any()
    draw = small.posterior.draw(normals(3, SIZE))
    assert bool((draw.weights[:, gone] == 0.0).all())


def test_whatever_an_optimiser_does_a_pruned_weight_is_zero() -> None:
    """Noise or old momentum may move the raw parameter; nothing that uses it may notice."""
    small, (x, y) = prune(uneven(), 0.5), CASE.data(5)
    before = [small.predict_mean(x).mean, small.predict(x, 3).mean, snr(small)]
    loss = ELBO(small, num_data=5)(x, y).loss
    with torch.no_grad():
        small.posterior.mean[~small.posterior.mask] = 3.0
    after = [small.predict_mean(x).mean, small.predict(x, 3).mean, snr(small)]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert torch.equal(ELBO(small, num_data=5)(x, y).loss, loss)
    flat = torch.cat([parameter.flatten() for parameter in small.to_module().parameters()])
    assert torch.equal(flat != 0.0, small.posterior.mask)
    assert torch.equal(prune(small, 0.5).posterior.mask, small.posterior.mask)


@each_prior
def test_the_kl_drops_by_the_pruned_weights_terms(prior: object) -> None:
    bnn = uneven()
    small = prune(bnn, 0.4)
    noise = normals(2, SIZE, seed=8)

    def kl(weights: torch.Tensor, whole: BayesianModule) -> torch.Tensor:
        part = type(whole.posterior)(whole.posterior.mean[weights], whole.posterior.std[weights])
        return kl_divergence(part, prior, part.draw(noise[:, weights]))

    kept = small.posterior.mask
    dropped = kl_divergence(bnn.posterior, prior, bnn.posterior.draw(noise)) - kl_divergence(
        small.posterior, prior, small.posterior.draw(noise)
    )
    assert dropped.item() == pytest.approx(kl(~kept, bnn).item(), rel=1e-10)
    assert dropped.item() > 1.0


def test_pruning_twice_counts_what_went_before() -> None:
    bnn = uneven()
    once = prune(bnn, 0.7).posterior.mask
    twice = prune(prune(bnn, 0.3), 0.7)
    assert torch.equal(twice.posterior.mask, once)
    assert torch.equal(prune(twice, 0.2).posterior.mask, once), "nothing comes back"


def test_weights_of_mean_zero_do_not_count_as_pruned() -> None:
    """Biases often start at exactly 0, with ratio 0 like a pruned weight."""
    bnn = uneven()
    with torch.no_grad():
        bnn.posterior.mean[20:] = 0.0
    small = prune(bnn, 0.25)
    assert int(small.posterior.mask.sum()) == 33
    assert int(prune(small, 0.25).posterior.mask.sum()) == 33
    with torch.no_grad():  # and now some whose place in the flat vector comes first
        small.posterior.mean[:5] = 0.0
    assert int(prune(small, 0.25).posterior.mask.sum()) == 33
    assert int(prune(small, 0.5).posterior.mask.sum()) == 22


def test_equal_ratios_go_in_the_order_of_the_flat_vector() -> None:
    net = mlp()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(0.5)
    kept = prune(CASE.bnn(net), 0.5).posterior.mask
    assert torch.equal(kept, torch.arange(SIZE) >= 22)


@loop_over("dim", [0, 1, None])
def test_a_normalised_row_keeps_its_direction(dim: int | None) -> None:
    """Weight norm divides each row by its norm, and zeros by zero are not a number."""
    normalised = nn.utils.parametrizations.weight_norm(nn.Linear(6, 9), dim=dim)
    bnn = BayesianModule(nn.Sequential(normalised, nn.ReLU(), nn.Linear(9, 3)), init_std=0.05)
    rows = {0: 9, 1: 6, None: 1}[dim]
    for fraction in (0.7, 0.95, 1.0):
        small = prune(prune(bnn, 0.5), fraction)
        assert small.predict(torch.randn(4, 6), 5).mean.isfinite().all()
        size = bnn.layout.num_weights
        pruned = min(math.floor(fraction * size), size - rows)
        assert int(small.posterior.mask.sum()) == size - pruned
        assert torch.equal(small.posterior.mask, prune(bnn, fraction).posterior.mask)
    assert small.posterior.mask.nonzero().shape == (rows, 1)
    directions = bnn.layout.unflatten(small.posterior.mask)["0.parametrizations.weight.original1"]
    assert int(directions.sum()) == rows, "of each row one weight is left"
    assert not small.to_module()[0].weight.any(), "the magnitudes are pruned as other weights are"


def test_a_tensor_under_spectral_norm_keeps_a_weight() -> None:
    """It is divided by its norm, and zeros by zero are not a number."""
    normalised = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 9))
    bnn = BayesianModule(nn.Sequential(normalised, nn.ReLU(), nn.Linear(9, 3)), init_std=0.05)
    part = "0.parametrizations.weight.original"
    with torch.no_grad():
        bnn.posterior.mean[bnn.layout.slice_of(part)] *= 1e-3
    size = bnn.layout.num_weights
    for fraction, left in ((0.6, size - math.floor(0.6 * size)), (1.0, 1)):
        small = prune(bnn, fraction)
        assert small.predict(torch.randn(4, 6), 5).mean.isfinite().all()
        assert int(small.posterior.mask.sum()) == left
        assert int(bnn.layout.unflatten(small.posterior.mask)[part].sum()) == 1


def test_a_pruned_copy_shares_nothing() -> None:
    bnn = uneven()
    state = copy.deepcopy(bnn.state_dict())
    small = prune(bnn, 0.5)
    again = prune(small, 0.75)
    kept = small.posterior.mask.clone()
    train(again)
    assert all(torch.equal(value, state[name]) for name, value in bnn.state_dict().items())
    assert torch.equal(small.posterior.mask, kept)
    assert small.seed == bnn.seed


@loop_over("kind", [nn.Embedding, nn.EmbeddingBag])
def test_the_padding_row_of_an_embedding_stays_zero(kind: type[nn.Module], tmp_path: Path) -> None:
    net = nn.Sequential(kind(5, 3, padding_idx=2))  # type: ignore[call-arg]
    bnn = BayesianModule(net, init_std=0.5, likelihood=GaussianLikelihood())
    kept = bnn.posterior.mask
    assert kept is not None
    assert kept.view(5, 3).all(1).tolist() == [True, True, False, True, True]
    padding = torch.full((4, 1), 2)
    assert not bnn(padding).any()
    elbo = ELBO(bnn, num_data=4)
    terms = elbo(padding, torch.zeros_like(bnn(padding)))
    assert terms.kl.item() == pytest.approx(
        kl_divergence(
            MeanFieldGaussian(net[0].weight[[0, 1, 3, 4]].flatten(), 0.5), bnn.prior
        ).item()
    )
    save(bnn, tmp_path / "model.safetensors")
    again = load(tmp_path / "model.safetensors", net)
    assert torch.equal(again.posterior.mask, kept)
    with torch.no_grad():
        net[0].weight[2, 1] = 1.0
    assert BayesianModule(net).posterior.mask is None, "a row that holds a value is a weight"
