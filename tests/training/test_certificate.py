"""Risk certificates: the inverse of the binary KL, the bound's terms, and whether it holds."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, replace
from decimal import Decimal, localcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bayesify as bf
from bayesify.datasets import TensorLoader
from bayesify.metrics import binary_kl, binary_kl_inverse, sampled_error
from bayesify.training.certificate import Certificate


@pytest.mark.parametrize("q", [0.0, 1e-6, 0.01, 0.3, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("divergence", [1e-12, 1e-6, 1e-3, 0.1, 2.0, 50.0])
def test_the_inverse_is_exact_on_both_sides(q: float, divergence: float) -> None:
    for side, sign in (("upper", 1.0), ("lower", -1.0)):
        p = binary_kl_inverse(q, divergence, side)  # type: ignore[arg-type]
        assert sign * (p - q) >= 0.0
        inside, outside = p - sign * 1e-9, p + sign * 1e-9
        if sign * (inside - q) > 0.0:
            assert binary_kl(q, inside) <= divergence
        if 0.0 < outside < 1.0:
            assert binary_kl(q, outside) >= divergence


def exact_kl(q: float, p: float) -> Decimal:
    q_, p_ = Decimal(q), Decimal(p)
    parts = ((q_, p_), (1 - q_, 1 - p_))
    return sum((a * (a / b).ln() for a, b in parts if a), Decimal(0))


def test_the_inverse_is_never_inside_the_bound() -> None:
    draw = random.Random(0)
    with localcontext(prec=60):
        for _ in range(300):
            q, divergence = draw.choice([draw.random(), 0.02]), 10.0 ** draw.uniform(-7.0, 0.0)
            for side in ("upper", "lower"):
                p = binary_kl_inverse(q, divergence, side)  # type: ignore[arg-type]
                if p in (0.0, 1.0):
                    continue
                assert exact_kl(q, p) >= Decimal(divergence)
                assert exact_kl(q, p) <= Decimal(divergence * (1.0 + 1e-6))


def test_the_inverse_agrees_with_closed_forms() -> None:
    for divergence in (1e-9, 1e-3, 0.5, 3.0):
        # kl(0, p) = -log(1 - p), kl(1, p) = -log p, and kl(1/2, p) = -log(4 p (1 - p)) / 2.
        known = -math.expm1(-divergence)
        assert binary_kl_inverse(0.0, divergence) == pytest.approx(known, rel=1e-9)
        assert binary_kl_inverse(1.0, divergence, "lower") == pytest.approx(1.0 - known, rel=1e-9)
        half = 0.5 + 0.5 * math.sqrt(-math.expm1(-2.0 * divergence))
        assert binary_kl_inverse(0.5, divergence) == pytest.approx(half, abs=1e-9)
    assert binary_kl_inverse(0.25, 0.0) == 0.25
    assert binary_kl(0.25, 0.25) == 0.0
    # Pinsker: never above.
    assert all(binary_kl_inverse(0.1, d) <= 0.1 + math.sqrt(d / 2) for d in (1e-4, 0.01, 0.3))
    for arguments, message in (
        ((1.1, 0.1), "q must be from 0 to 1, got 1.1"),
        ((0.1, -1.0), "divergence must be at least 0, got -1.0"),
        ((0.1, math.nan), "divergence must be at least 0, got nan"),
        ((0.1, 0.1, "left"), 'side must be "upper" or "lower"'),
    ):
        with pytest.raises(ValueError, match=message):
            binary_kl_inverse(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [math.nan, 1.2, -0.1, math.inf, -math.inf])
def test_shares_out_of_range_have_no_divergence(wrong: float) -> None:
    with pytest.raises(ValueError, match=f"q must be from 0 to 1, got {wrong}"):
        binary_kl(wrong, 0.5)
    with pytest.raises(ValueError, match=f"p must be from 0 to 1, got {wrong}"):
        binary_kl(0.5, wrong)


def at_prior(net: nn.Module, std: float = 0.05, **options: Any) -> bf.BayesianModule:
    prior = bf.Gaussian(std)
    return bf.BayesianModule(net, prior=prior, prior_mean="initial", init_std=std, **options)


def linear(count: int = 300) -> tuple[bf.BayesianModule, Tensor, Tensor]:
    """A linear classifier away from its prior, and examples with noisy labels."""
    torch.manual_seed(0)
    bnn = at_prior(nn.Linear(4, 2))
    with torch.no_grad():
        bnn.posterior.mean += 0.02
    x = torch.randn(count, 4)
    y = bnn.mean_outputs(x).argmax(-1)
    noisy = torch.rand(count) < 0.1
    return bnn, x, torch.where(noisy, 1 - y, y)


def by_scipy(q: float, divergence: float) -> float:
    from scipy.optimize import brentq
    from scipy.special import rel_entr

    def excess(p: float) -> float:
        return float(rel_entr(q, p) + rel_entr(1 - q, 1 - p)) - divergence

    return float(brentq(excess, q, 1 - 1e-15, xtol=1e-14))


def test_a_certificate_is_the_formula_of_the_paper() -> None:
    bnn, x, y = linear()
    seen = list(range(0, 300, 3))
    delta, sampling, m = 0.04, 0.02, 5000
    found = bf.certify(
        bnn, x, y, prior_indices=seen, delta=delta, delta_sampling=sampling, num_samples=m
    )
    n, q = 200, bnn.posterior
    std, prior_std = q.std.detach().double(), 0.05
    shift = q.mean.detach().double() - bnn.prior_mean.double()  # type: ignore[union-attr]
    kl = float((torch.log(prior_std / std) + (std**2 + shift**2) / (2 * prior_std**2) - 0.5).sum())
    assert (found.num_examples, found.num_samples, found.confidence) == (n, m, 0.94)
    assert found.kl == pytest.approx(kl, rel=1e-6)
    sampled = by_scipy(found.error / 100, math.log(2 / sampling) / m)

    def bound(sampled: float, kl: float, n: int, delta: float) -> float:
        return 100 * by_scipy(sampled, (kl + math.log(2 * math.sqrt(n) / delta)) / n)

    wanted = bound(sampled, kl, n, delta)
    assert found.error_bound == pytest.approx(wanted, rel=1e-6)
    # Planted optimism: each of these is a smaller number, and no certificate.
    optimistic = {
        "all examples counted": bound(sampled, kl, 300, delta),
        "no weight samples' error": bound(found.error / 100, kl, n, delta),
        "no delta": bound(sampled, kl, n, 1.0),
        "no log term": 100 * by_scipy(sampled, kl / n),
        "no KL": bound(sampled, 0.0, n, delta),
    }
    for fault, value in optimistic.items():
        assert value < found.error_bound * (1 - 1e-3), fault


def test_a_loader_is_what_it_brings() -> None:
    bnn, x, y = linear()
    loader, options = TensorLoader(x, y, 64, shuffle=False), {"num_samples": 1000, "seed": 2}
    found = bf.certify(bnn, loader, y, prior_indices=(), **options)
    assert found == bf.certify(bnn, x, y, prior_indices=(), **options)
    assert sampled_error(bnn, loader, y, **options) == sampled_error(bnn, x, y, **options)


def test_numbers_of_numpy_are_numbers() -> None:
    bnn, x, y = linear()
    numbers: dict[str, Any] = {"num_samples": np.int64(50), "delta": np.float32(0.03125)}
    found = bf.certify(bnn, x, y, prior_indices=(), num_candidates=np.int64(2), **numbers)  # type: ignore[arg-type]
    expected = bf.certify(
        bnn, x, y, prior_indices=(), num_samples=50, delta=0.03125, num_candidates=2
    )
    assert json.dumps(asdict(found)) == json.dumps(asdict(expected))


def test_candidates_share_the_two_deltas() -> None:
    bnn, x, y = linear()
    one = bf.certify(
        bnn, x, y, prior_indices=(), delta=0.01, delta_sampling=0.002, num_samples=2000
    )
    five = bf.certify(
        bnn,
        x,
        y,
        prior_indices=(),
        delta=0.05,
        delta_sampling=0.01,
        num_samples=2000,
        num_candidates=5,
    )
    assert five.error_bound == pytest.approx(one.error_bound, rel=1e-12)
    assert five.confidence == pytest.approx(0.94)
    assert "all 5 candidates at once" in str(five)


def test_the_words_say_what_is_covered() -> None:
    bnn, x, y = linear()
    found = bf.certify(bnn, x, y, prior_indices=range(100), num_samples=1000)
    text = str(replace(found, error_bound=2.4712))
    assert text.startswith("With probability 0.965 over the data, at most 2.48 % of new examples")
    assert "It does not cover the mean weights, averaged predictions, or examples of anoth" in text


class Reused(nn.Module):
    """Uses its layer twice, so that local reparametrisation is not exact."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class NoVmap(Reused):
    """A network that reads a value, which vmap does not allow."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if float(x.detach().sum()) != 1e9 else -x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 4)),
        lambda: nn.Sequential(
            nn.Unflatten(-1, (1, 2, 2)), nn.Conv2d(1, 3, 2, padding=1), nn.Flatten(),
            nn.Linear(27, 4)
        ),
        Reused,
        NoVmap,
    ],
)  # fmt: skip
def test_samples_are_independent_pairs_of_weights_and_example(make: Any) -> None:
    """Their error is that of whole weight vectors, and their variance that of a coin.

    All examples are the same one, so that those that shared weights would all be right or all be
    wrong. The mean has a false-alarm rate of 1e-4 for each network (4 standard errors of both).
    """
    torch.manual_seed(0)
    bnn = at_prior(make(), std=0.7)
    x, y = torch.randn(1, 4).repeat(40, 1), torch.zeros(40, dtype=torch.long)
    exact = bnn.predict(x, 3000, keep_samples=True).samples.argmax(-1) != y
    by_weights = exact.double().mean(1)
    wanted, m = float(by_weights.mean()), 100
    found = [sampled_error(bnn, x, y, num_samples=m, seed=s) / 100 for s in range(20)]
    mean = sum(found) / len(found)
    spread = wanted * (1 - wanted) / m
    errors = math.sqrt(spread / len(found) + float(by_weights.var()) / 3000)
    assert abs(mean - wanted) < 4 * errors
    variance = sum((each - wanted) ** 2 for each in found) / len(found)
    limit = 2.7  # chi-squared with 20 degrees of freedom: 1e-4
    assert variance < limit * spread
    assert float(by_weights.var()) > limit * wanted * (1 - wanted) / 40  # the planted fault
    assert bnn.estimator == bf.WeightSampling()


def memorised(count: int, seen: Tensor, seed: int) -> tuple[bf.BayesianModule, Tensor, Tensor]:
    """A network that knows the random labels of the examples that it has seen."""
    torch.manual_seed(seed)
    x, y = torch.randn(count, 30), torch.randint(2, (count,))
    net = nn.Sequential(nn.Linear(30, 60), nn.ReLU(), nn.Linear(60, 2))
    net = bf.learn_prior_mean(
        net,
        TensorLoader(x[seen], y[seen], 20),
        num_data=len(seen),
        epochs=40,
        seed=seed,
        progress=False,
        optimizer=lambda groups: torch.optim.Adam(groups, lr=0.01),
    )
    return at_prior(net, 0.01), x, y


def test_a_prior_that_saw_the_examples_of_the_bound_is_caught() -> None:
    """Labels are coins, so that every classifier errs on half of the new examples.

    An honest certificate is wrong with probability 0.035. The planted one passes the indices of
    half of the examples, but its prior has seen all of them.
    """
    half = bf.split_for_prior(120, 0.5)
    bnn, x, y = memorised(120, half, seed=0)
    honest = bf.certify(bnn, x, y, prior_indices=half, num_samples=20_000)
    assert honest.error_bound > 50.0
    bnn, x, y = memorised(120, torch.arange(120), seed=0)
    planted = bf.certify(bnn, x, y, prior_indices=half, num_samples=20_000)
    assert planted.error_bound < 50.0


def test_bad_input_is_named() -> None:
    bnn, x, y = linear(30)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"prior_indices": range(23)}, "at least 8 examples that the prior has not seen, got 7"),
        ({"prior_indices": [30]}, "prior_indices must lie from 0 to 29, got 30 to 30"),
        ({"prior_indices": [-1]}, "prior_indices must lie from 0 to 29, got -1 to -1"),
        ({"delta": 0.0}, "delta and delta_sampling must be above 0"),
        ({"delta": 0.99, "delta_sampling": 0.02}, "sum to less than 1"),
        ({"num_samples": 0}, "num_samples must be at least 1, got 0"),
        ({"num_candidates": 0}, "num_candidates must be at least 1, got 0"),
        ({"targets": y[:5]}, r"targets must be class indices of shape \(30,\)"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            bf.certify(**{"bnn": bnn, "inputs": x, "targets": y, "prior_indices": (), **options})
    for call in (partial(bf.certify, prior_indices=()), sampled_error):
        with pytest.raises(
            TypeError, match=r"targets must be a tensor, got ndarray; use torch.as_"
        ):
            call(bnn, x, y.numpy())
    for indices in (None, {1, 2}):
        with pytest.raises(TypeError, match=r"prior_indices must be a sequence .* pass \(\) for a"):
            bf.certify(bnn, x, y, prior_indices=indices)  # type: ignore[arg-type]
    tokens = at_prior(nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"needs logits of shape \(N, K\)"):
        bf.certify(tokens, torch.randn(20, 3, 4), torch.zeros(20).long(), prior_indices=())


def test_a_mask_of_the_prior_is_the_same_as_its_indices() -> None:
    bnn, x, y = linear()
    seen = torch.arange(len(x)) % 3 == 0
    found = [
        bf.certify(bnn, x, y, prior_indices=each, num_samples=500)
        for each in (seen, seen.nonzero().squeeze(-1), seen.nonzero().squeeze(-1).tolist())
    ]
    assert found[0] == found[1] == found[2]
    assert found[0].num_examples == int((~seen).sum())
    with pytest.raises(ValueError, match=r"a mask .* must have shape \(300,\), got \(299,\)"):
        bf.certify(bnn, x, y, prior_indices=seen[1:])
    with pytest.raises(TypeError, match=r"integers or a mask, got torch.float32"):
        bf.certify(bnn, x, y, prior_indices=[0.9, 1.9])  # type: ignore[list-item]
    with pytest.raises(
        TypeError, match=r"got torch.uint8; write \.long\(\) for indices and \.bool"
    ):
        bf.certify(bnn, x, y, prior_indices=seen.byte())


def test_the_sampled_error_checks_its_arguments() -> None:
    bnn, x, y = linear()
    with pytest.raises(ValueError, match=r"class indices of shape \(300,\)"):
        sampled_error(bnn, x, y.unsqueeze(-1))
    with pytest.raises(ValueError, match="num_samples must be at least 1, got 0"):
        sampled_error(bnn, x, y, num_samples=0)
    with pytest.raises(TypeError, match=r"num_samples must be a whole number, got 1000\.0"):
        sampled_error(bnn, x, y, num_samples=1e3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"num_candidates must be a whole number, got 2\.5"):
        bf.certify(bnn, x, y, prior_indices=(), num_candidates=2.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sampled_error needs a BayesianModule, got Linear"):
        sampled_error(nn.Linear(3, 2), x, y)  # type: ignore[arg-type]
    labels = bf.BayesianModule(nn.Linear(3, 1), likelihood=bf.BernoulliLikelihood())
    with pytest.raises(ValueError, match="error of a classifier, got the likelihood Bernoulli"):
        sampled_error(labels, torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))
    low_rank = bf.BayesianModule(nn.Linear(3, 2), posterior=bf.LowRankGaussian())
    with pytest.raises(ValueError, match="mean field, got the posterior StructuredGaussian"):
        sampled_error(low_rank, torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))


def test_logits_without_noise_are_tied_as_in_a_prediction() -> None:
    """A network without weights always answers class 0."""
    bnn = bf.prune(bf.BayesianModule(nn.Linear(3, 2)), 1.0)
    x = torch.randn(40, 3)
    assert sampled_error(bnn, x, torch.zeros(40).long(), num_samples=500) == 0.0
    assert sampled_error(bnn, x, torch.ones(40).long(), num_samples=500) == 100.0


class LogStd(bf.MeanFieldGaussian):
    """A mean field whose rho is log std."""

    std_is_softplus = False

    def __init__(self, mean: Tensor, std: Any) -> None:
        super().__init__(mean, std)
        with torch.no_grad():
            self.rho.copy_(torch.as_tensor(std).log())

    @property
    def full_std(self) -> Tensor:
        return self.rho.exp()

    @property
    def log_std(self) -> Tensor:
        return self.rho

    @property
    def log_std_slope(self) -> Tensor:
        return torch.ones_like(self.rho)


def test_the_kl_of_a_subclass_with_another_std_is_its_own() -> None:
    torch.manual_seed(0)
    bnn = bf.BayesianModule(
        nn.Linear(30, 2),
        posterior=LogStd,
        prior=bf.Gaussian(1.0),
        prior_mean="initial",
        init_std=1.7,
    )
    x = torch.randn(400, 30)
    y = bnn.mean_outputs(x).argmax(-1)
    found = bf.certify(bnn, x, y, prior_indices=(), num_samples=100)
    with torch.no_grad():
        expected = float(bf.ELBO(bnn, num_data=400)(x, y).kl)
    assert found.kl == pytest.approx(expected, rel=1e-5)
    assert found.kl > 20.0
    with pytest.raises(
        TypeError, match=r"a smaller std can be set only where it is softplus\(rho\)"
    ):
        bf.StreamingELBO(bnn, num_data=10, init_std=1.0)


def test_labels_that_are_no_class_are_refused() -> None:
    bnn, x, y = linear()
    for wrong, seen in ((y + 1, "1 to 2"), (y - 1, "-1 to 0")):
        with pytest.raises(ValueError, match=f"class indices from 0 to 1, got {seen}"):
            bf.certify(bnn, x, wrong, prior_indices=(), num_samples=50)
        with pytest.raises(ValueError, match=f"class indices from 0 to 1, got {seen}"):
            sampled_error(bnn, x, wrong, num_samples=50)


def test_the_confidence_in_words_is_not_rounded_up() -> None:
    nearly = Certificate(2.471, 1.9, 2.0, 0.1, 30_000, 200_000, 2e-5, 2e-5)
    assert str(nearly).startswith("With probability 0.9999 over the data")
    assert str(replace(nearly, delta=0.025, delta_sampling=0.01)).startswith(
        "With probability 0.965 over the data"
    )


class Recurrent(nn.Module):
    """A classifier that runs with a weight vector for each example, under vmap or in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x.unsqueeze(1))[0][:, 0]


@pytest.mark.parametrize("net", [nn.Linear(4, 3), Recurrent()], ids=["linear", "recurrent"])
def test_logits_that_are_no_numbers_are_no_votes(net: nn.Module) -> None:
    x = torch.randn(40, 4)
    x[::2, 1] = math.nan
    with pytest.raises(ValueError, match=r"got NaN for \d+ of \d+ examples"):
        bf.certify(at_prior(net), x, torch.zeros(40).long(), prior_indices=())


@pytest.mark.parametrize("count", [20, 21])
def test_a_network_may_fail_on_a_single_example(count: int) -> None:
    class Squeezed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).squeeze()

    bnn = at_prior(Squeezed(3, 2))
    found = bf.certify(
        bnn,
        torch.randn(count, 3),
        torch.zeros(count, dtype=torch.long),
        prior_indices=(),
        num_samples=2048,
    )
    assert found.num_examples == count
