"""Input-dependent noise and labels: their densities, errors, training and files."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tests.cases import normals
from tests.loops import loop_over
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify as bf
from bayesify import BernoulliLikelihood, GaussianLikelihood, Likelihood, StudentTLikelihood
from bayesify.prediction import BernoulliPredictive, GaussianPredictive

NOISY = GaussianLikelihood(input_dependent=True)
LABELS = BernoulliLikelihood()
WIDE = StudentTLikelihood()
BOUNDS = bf.CensoredGaussianLikelihood()


def test_input_dependent_noise_is_a_gaussian_of_each_datum() -> None:
    outputs, y = normals(3, 6, 2, 2), normals(6, 2, seed=1)
    std = np.log1p(np.exp(outputs[..., 1].numpy()))
    exact = stats.norm.logpdf(y.numpy(), outputs[..., 0].numpy(), std).sum(-1)
    np.testing.assert_allclose(NOISY.log_prob(outputs, y).numpy(), exact, rtol=1e-12)
    flat = NOISY.log_prob(outputs[:, :, 0], y[:, 0])
    assert flat.shape == (3, 6)
    np.testing.assert_allclose(
        NOISY.error(outputs[0], y), ((outputs[0, ..., 0] - y) ** 2).mean(), rtol=1e-12
    )
    for given in (outputs, outputs.transpose(0, 1).contiguous().transpose(0, 1)):
        p = NOISY.predictive(list(given), keep_samples=False)
        assert isinstance(p, GaussianPredictive)
        assert torch.equal(p.means, outputs[..., 0])
        np.testing.assert_allclose(p.noise_std.numpy(), std, rtol=1e-12)
        np.testing.assert_allclose(p.aleatoric.numpy(), (std**2).mean(0), rtol=1e-12)
        assert p.means.is_contiguous()


def test_noise_has_the_floor_that_was_given() -> None:
    """Without it, targets without noise have an unbounded density."""
    floored = GaussianLikelihood(input_dependent=True, min_std=0.25)
    outputs, y = normals(3, 6, 2, 2), normals(6, 2, seed=1)
    std = np.log1p(np.exp(outputs[..., 1].numpy())) + 0.25
    exact = stats.norm.logpdf(y.numpy(), outputs[..., 0].numpy(), std).sum(-1)
    np.testing.assert_allclose(floored.log_prob(outputs, y).numpy(), exact, rtol=1e-12)
    p = floored.predictive(list(outputs), keep_samples=False)
    assert isinstance(p, GaussianPredictive)
    np.testing.assert_allclose(p.noise_std.numpy(), std, rtol=1e-12)
    far = torch.tensor([[[[7.0, -1e4]]]])
    peak = floored.log_prob(far, torch.tensor([[7.0]]))
    assert peak.item() == pytest.approx(stats.norm.logpdf(0.0, 0.0, 0.25), rel=1e-6)
    config = {"input_dependent": True, "min_std": 0.25}
    assert floored.config() == config
    assert GaussianLikelihood(**config).config() == config  # type: ignore[arg-type]


@loop_over("raw", [-1e4, -100.0, -20.0, 0.0, 100.0, 1e4])
@loop_over("dtype", [torch.float32, torch.float64])
def test_no_noise_that_a_network_says_overflows(raw: float, dtype: torch.dtype) -> None:
    outputs = torch.tensor([[[[0.3, raw]]]], dtype=dtype, requires_grad=True)
    found = NOISY.log_prob(outputs, torch.tensor([[7.0]], dtype=dtype))
    assert found.isfinite().all()
    (gradient,) = torch.autograd.grad(found.sum(), outputs)
    assert gradient.isfinite().all()
    p = NOISY.predictive([outputs[0].detach()], keep_samples=False)
    assert isinstance(p, GaussianPredictive)
    assert p.noise_std.item() == pytest.approx(max(1e-6, np.logaddexp(0, raw)), rel=1e-5)
    if raw == -20.0:
        assert gradient[..., 1].item() > 1.0, "training can leave the floor"


def test_labels_are_bernoulli() -> None:
    logits, y = normals(3, 6, 2), normals(6, 2, seed=1) > 0
    prob = torch.sigmoid(logits).numpy()
    exact = stats.bernoulli.logpmf(y.numpy(), prob).sum(-1)
    for targets in (y, y.long(), y.double(), y.float(), y.to(torch.uint8)):
        np.testing.assert_allclose(LABELS.log_prob(logits, targets).numpy(), exact, rtol=1e-12)
        wrong = 100 * ((prob[0] > 0.5) != y.numpy()).mean()
        assert LABELS.error(logits[0], targets).item() == pytest.approx(wrong)
    assert LABELS.log_prob(logits[..., 0], y[:, 0]).shape == (3, 6)
    far = LABELS.log_prob(torch.tensor([[-1e4, 1e4]]), torch.tensor([1, 0]))
    assert far.tolist() == [[-1e4, -1e4]]


def test_the_probability_of_labels_together_is_of_the_mixture() -> None:
    logits, y = normals(5, 6, 2), normals(6, 2, seed=1) > 0
    each = np.where(y.numpy(), torch.sigmoid(logits).numpy(), torch.sigmoid(-logits).numpy())
    p = BernoulliPredictive.from_logits(list(logits), keep_samples=True)
    np.testing.assert_allclose(p.log_prob(y).numpy(), np.log(each.prod(-1).mean(0)), rtol=1e-12)
    bare = BernoulliPredictive.from_logits(list(logits))
    with pytest.raises(ValueError, match=r"the 2 labels .* keep_samples=True"):
        bare.log_prob(y)
    for one in (logits[..., 0], logits[..., :1]):
        single = BernoulliPredictive.from_logits(list(one))
        got = single.log_prob(y[:, 0].reshape(one.shape[1:]))
        np.testing.assert_allclose(got.numpy(), np.log(each[..., 0].mean(0)), rtol=1e-12)


def test_one_logit_says_what_two_classes_say() -> None:
    logits, y = normals(5, 6), normals(6, seed=1) > 0
    both = torch.stack((torch.zeros_like(logits), logits), -1)
    one = LABELS.predictive(list(logits), keep_samples=False)
    two = bf.CategoricalLikelihood().predictive(list(both), keep_samples=False)
    assert torch.allclose(one.mean, two.mean[:, 1], rtol=1e-12)
    for name in ("total", "aleatoric", "epistemic"):
        assert torch.allclose(getattr(one, name), getattr(two, name), rtol=1e-9)
    assert torch.allclose(one.log_prob(y), two.log_prob(y.long()), rtol=1e-12)


def net(outputs: int, *shape: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs), nn.Unflatten(-1, shape or (outputs,))
    )


X = normals(64, 3, dtype=torch.float32)
CASES: dict[str, tuple[Likelihood, nn.Module, Tensor]] = {
    "noisy": (NOISY, net(4, 2, 2), X[:, :2] * (1 + X[:, 2:].abs())),
    "heavy": (StudentTLikelihood(), net(2), X[:, :2] * (1 + X[:, 2:].abs())),
    "heavy-noisy": (
        StudentTLikelihood(input_dependent=True),
        net(4, 2, 2),
        X[:, :2] * (1 + X[:, 2:].abs()),
    ),
    "censored": (
        bf.CensoredGaussianLikelihood(learn_std=True),
        net(2),
        torch.stack([X[:, :2], X[:, :2].where(X[:, 2:] > 0, torch.inf)], -1),
    ),
    "poisson": (bf.PoissonLikelihood(), net(2), (1.0 + X[:, :2]).exp().floor()),
    "dispersed": (bf.NegativeBinomialLikelihood(), net(2), (1.0 + X[:, :2]).exp().floor()),
    "grades": (bf.OrdinalLikelihood(3), net(1), (X[:, 0] > -0.5).long() + (X[:, 0] > 0.5)),
    "labels": (LABELS, net(2), (X[:, :2] > 0).float()),
    "booleans": (LABELS, net(2), X[:, :2] > 0),
}


@pytest.mark.filterwarnings("ignore:.*standard deviations have not converged")
@loop_over("name", CASES)
@loop_over("backend", ["closed-form", "auto"])
def test_they_train_alone_and_together(name: str, backend: str, tmp_path: Path) -> None:
    likelihood, module, y = CASES[name]
    bnn = bf.BayesianModule(module, likelihood=likelihood, init_std=0.05, seed=1)
    other = copy.deepcopy(bnn)
    loader = DataLoader(TensorDataset(X, y), 32)
    history = bf.fit(
        bf.ELBO(bnn, num_data=64), loader, validation_loader=loader, epochs=15, backend=backend
    )
    assert history[-1]["nll"] < history[0]["nll"]
    assert math.isfinite(history[-1]["validation_error"])
    if backend == "auto":
        elbo = bf.ELBO(other, num_data=64)
        try:
            bf.fit_replicas([elbo], loader, epochs=15)
        except RuntimeError as error:
            pytest.skip(f"no compiler: {error}")
        for mine, its in zip(bnn.parameters(), other.parameters(), strict=True):
            assert torch.allclose(mine, its, atol=1e-4)
    bf.save(bnn, tmp_path / "model.safetensors")
    again = bf.load(tmp_path / "model.safetensors", module)
    assert again.likelihood.config() == likelihood.config()
    assert torch.equal(again.predict(X, 5).mean, bnn.predict(X, 5).mean)
    assert type(likelihood)(**likelihood.config()).config() == likelihood.config()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*standard deviations have not converged")
@loop_over("estimator", [bf.LocalReparameterization(), bf.Flipout()])
@loop_over("backend", ["autograd", "closed-form", "auto"])
@loop_over("name", CASES)
def test_they_train_under_every_estimator(name: str, backend: str, estimator: bf.Estimator) -> None:
    likelihood, module, y = CASES[name]
    bnn = bf.BayesianModule(
        module, likelihood=likelihood, init_std=0.05, estimator=estimator, seed=1
    )
    before = [parameter.detach().clone() for parameter in bnn.likelihood.parameters()]
    elbo = bf.ELBO(bnn, num_data=64)
    optimizer = torch.optim.Adam(elbo.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(X, y), 32)
    history = bf.fit(
        elbo, loader, validation_loader=loader, epochs=8, backend=backend, optimizer=optimizer
    )
    assert history[-1]["nll"] < history[0]["nll"]
    for old, new in zip(before, bnn.likelihood.parameters(), strict=True):
        assert not torch.equal(old, new), "the likelihood's own parameters train too"
    whole, parts = bnn.predict(X, 5), bnn.predict(X, 5, batch_size=7)
    assert torch.allclose(whole.mean, parts.mean, rtol=1e-4, atol=1e-5)


def test_noise_that_depends_on_the_input_is_found() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2000, 1, generator=generator) * 2 - 1
    std = 0.1 + 0.4 * (x > 0)
    y = x + std * torch.randn(2000, 1, generator=generator)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 2), nn.Unflatten(-1, (1, 2)))
    bnn = bf.BayesianModule(module, likelihood=NOISY, posterior=bf.Delta)
    elbo = bf.ELBO(bnn, num_data=2000, temperature=0.0)
    optimizer = torch.optim.Adam(elbo.parameters(), lr=0.02)
    for _ in range(200):
        optimizer.zero_grad()
        elbo(x, y).loss.backward()
        optimizer.step()
    found = bnn.predict_mean(torch.tensor([[-0.6], [0.6]])).aleatoric.sqrt().flatten()
    assert torch.allclose(found, torch.tensor([0.1, 0.5]), rtol=0.15)


@loop_over(
    ("call", "message"),
    [
        (lambda: GaussianLikelihood(input_dependent=True, learn_std=True), "got learn_std=True to"),
        (lambda: GaussianLikelihood(0.5, input_dependent=True), "got std=0.5 too; remove one"),
        (lambda: GaussianLikelihood(min_std=0.1), "add input_dependent=True, or give std"),
        (
            lambda: GaussianLikelihood(input_dependent=True, min_std=-1.0),
            "at least 0 and .*got -1.0",
        ),
        (lambda: GaussianLikelihood(input_dependent=True, min_std=math.inf), "finite, got inf"),
        (lambda: NOISY.std, "no single std; use .*noise_std"),
        (lambda: NOISY.log_prob(normals(2, 5, 3), normals(5)), r"\(N, K, 2\).*got \(5, 3\); end"),
        (lambda: NOISY.log_prob(normals(2, 5), normals(5)), r"\(N, K, 2\).*got \(5,\)"),
        (lambda: NOISY.log_prob(normals(2, 5, 1, 2), normals(5)), r"means, \(5, 1\), got \(5,\)"),
        (lambda: NOISY.error(normals(5, 4, 1), normals(5, 4)), r"got \(5, 4, 1\); end the net"),
        (lambda: NOISY.predictive([], keep_samples=False), "at least one weight sample"),
        (
            lambda: NOISY.predictive([normals(5, 4)], keep_samples=False),
            r"got \(5, 4\); end the network",
        ),
        (lambda: LABELS.log_prob(normals(2, 5, 1), torch.ones(5)), r"\(5, 1\), got \(5,\); noth"),
        (lambda: LABELS.log_prob(normals(2, 5), torch.full((5,), 2)), "must be 0 or 1, got 2; for"),
        (lambda: LABELS.log_prob(normals(2, 5), torch.full((5,), -1.0)), "0 or 1, got -1.0"),
        (lambda: LABELS.log_prob(normals(2, 5), torch.full((5,), math.nan)), "0 or 1, got nan"),
        (lambda: LABELS.log_prob(normals(2, 5), torch.ones(5).cfloat()), "dtype torch.complex64"),
        (lambda: LABELS.log_prob(normals(5), torch.ones(())), r"shape \(N,\) or \(N, K\)"),
        (lambda: LABELS.predictive([], keep_samples=False), "at least one weight sample"),
        (
            lambda: WIDE.log_prob(normals(2, 5), torch.ones(5) > 0),
            "torch.bool; for labels use Bern",
        ),
        (lambda: WIDE.error(normals(5), torch.ones(5) > 0), "real numbers, got torch.bool"),
        (lambda: NOISY.log_prob(normals(2, 5, 1, 2), torch.ones(5, 1) > 0), "got torch.bool"),
        (lambda: WIDE.log_prob(normals(2, 5), torch.ones(5).cfloat()), "got torch.complex64"),
        (lambda: BOUNDS.log_prob(normals(2, 5), torch.ones(5, 2) > 0), "got torch.bool"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@loop_over(
    ("likelihood", "outputs", "targets"),
    [
        (GaussianLikelihood(), (24, 1), torch.zeros(5, 1)),
        (WIDE, (24,), torch.zeros(5)),
        (NOISY, (24, 1, 2), torch.zeros(5, 1)),
        (BOUNDS, (24, 1), torch.zeros(5, 1, 2)),
        (LABELS, (24, 3), torch.zeros(5, 3)),
        (bf.PoissonLikelihood(), (24,), torch.zeros(5)),
        (bf.OrdinalLikelihood(3), (24, 1), torch.zeros(5).long()),
        (bf.CategoricalLikelihood(), (24, 4), torch.zeros(5).long()),
        (bf.CategoricalLikelihood(), (24, 7, 4), torch.zeros(5, 7).long()),
    ],
)
def test_too_few_targets_are_called_that(
    likelihood: Likelihood, outputs: tuple[int, ...], targets: Tensor
) -> None:
    message = r"rows as the outputs, shape \(24,.*, got \(5,.*: give inputs and targets of the same"
    with pytest.raises(ValueError, match=message):
        likelihood.log_prob(torch.zeros(2, *outputs), targets)


@loop_over(
    ("call", "message"),
    [
        (
            lambda: GaussianLikelihood(torch.ones(3)),
            r"std must be one number, got shape \(3,\); for",
        ),
        (lambda: GaussianLikelihood(np.ones((2, 1))), r"got shape \(2, 1\); for a std of each"),
        (lambda: GaussianLikelihood("0.5"), "std must be a number, got '0.5'; for"),
        (lambda: GaussianLikelihood([0.5]), r"std must be a number, got \[0.5\]; for"),
        (lambda: StudentTLikelihood(torch.ones(3)), r"scale must be one number, got shape \(3,\)"),
        (lambda: StudentTLikelihood(df=torch.ones(3)), r"df must be one number, got shape \(3,\)$"),
        (
            lambda: GaussianLikelihood(input_dependent=True, min_std=torch.ones(3)),
            r"min_std must be one number, got shape \(3,\)$",
        ),
        (
            lambda: bf.NegativeBinomialLikelihood(torch.ones(3)),
            r"dispersion must be one number, got shape \(3,\)$",
        ),
    ],
)
def test_arguments_that_are_no_numbers_are_refused(
    call: Callable[[], object], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        call()


@loop_over("std", [np.float32(0.5), torch.tensor(0.5), torch.tensor([0.5]), np.array(0.5), 0.5])
def test_a_std_may_be_a_number_of_numpy_or_of_torch(std: Any) -> None:
    likelihood = GaussianLikelihood(std)
    assert likelihood.std.shape == ()
    assert json.dumps(likelihood.config()) == '{"std": 0.5, "learn_std": false}'
    likelihood = GaussianLikelihood(std, learn_std=np.bool_(1))
    assert json.dumps(likelihood.config()) == '{"std": 0.5, "learn_std": true}'
