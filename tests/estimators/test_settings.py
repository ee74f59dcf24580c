"""What a Bayesian network is given: estimators, spreads and optimisers, right and wrong."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.cases import mlp
from tests.estimators.test_unusual_passes import X, Y, bayesian, each_estimator, treatments
from tests.loops import loop_over
from torch import nn

from bayesify import (
    ELBO,
    BayesianModule,
    Delta,
    Estimator,
    Flipout,
    RelativeStd,
    WeightSampling,
    fit,
    load,
    save,
)
from bayesify.app.runs.measure import evaluate
from bayesify.datasets import TensorLoader, load_images
from bayesify.io import model_meta


@loop_over(
    ("name", "value", "message"),
    [
        ("estimator", "flipout", r"such as Flipout\(\), got 'flipout'"),
        ("estimator", Flipout, r"such as Flipout\(\), got <class"),
        ("prior", 0.3, r"such as Gaussian\(0.3\), got 0.3"),
    ],
)
def test_what_is_assigned_is_checked(name: str, value: object, message: str) -> None:
    bnn = BayesianModule(nn.Linear(3, 2))
    with pytest.raises(TypeError, match=message):
        setattr(bnn, name, value)


def test_pairs_need_an_even_number_whenever_they_are_chosen() -> None:
    elbo = ELBO(bayesian(nn.Linear(3, 2), WeightSampling()), num_data=8)
    elbo.bnn.estimator = Flipout(antithetic=True)
    with pytest.raises(ValueError, match="must be even, got 1"):
        elbo(X, Y)


@each_estimator
def test_a_point_estimate_needs_no_estimator(estimator: Estimator) -> None:
    bnn = BayesianModule(nn.Linear(3, 2), posterior=Delta, estimator=estimator)
    assert torch.equal(bnn(X.float()), bnn.to_module()(X.float()))
    assert treatments(bnn) == {"sampled"}


def test_names_that_are_patterns_themselves(tmp_path: Any) -> None:
    net = nn.ModuleDict({"a*": nn.Linear(3, 2), "ab": nn.Linear(3, 2), "[c]": nn.Linear(3, 2)})
    bnn = BayesianModule(net, exclude=("ab.*",))
    save(bnn, tmp_path / "model.safetensors")
    assert load(tmp_path / "model.safetensors", net).layout == bnn.layout


@loop_over(
    ("given", "error", "message"),
    [
        ("0.1", TypeError, r"init_std must be a number, a vector of shape \(8,\) or .*got '0.1'"),
        (RelativeStd, TypeError, r"or RelativeStd\(0.1\), got <class"),
        (True, TypeError, "got True"),
        (torch.ones(3), ValueError, r"init_std must be .*, got shape \(3,\)"),
        (-1.0, ValueError, "init_std must be positive and finite, got -1.0"),
        (torch.zeros(8), ValueError, "init_std must be positive and finite"),
    ],
)
def test_a_wrong_init_std(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        BayesianModule(nn.Linear(3, 2), init_std=given)


@loop_over(
    ("optimizer", "error", "message"),
    [
        (torch.optim.SGD(nn.Linear(3, 2).parameters()), ValueError, "make it from bayesify"),
        ("adam", TypeError, "such as functools.partial.*got 'adam'"),
    ],
)
def test_an_optimizer_that_would_train_nothing(
    optimizer: Any, error: type[Exception], message: str
) -> None:
    elbo = ELBO(BayesianModule(nn.Linear(3, 2)), num_data=8)
    with pytest.raises(error, match=message):
        fit(elbo, TensorLoader(X.float(), Y, 4), optimizer=optimizer)


def test_an_estimator_is_described_by_what_is_not_usual(tmp_path: Any) -> None:
    """So that a checkpoint from before an option was added is that of the same run."""
    for estimator, described in (
        (WeightSampling(), {"type": "WeightSampling"}),
        (Flipout(antithetic=True), {"type": "Flipout", "antithetic": True}),
    ):
        bnn = bayesian(nn.Linear(3, 2), estimator)
        assert model_meta(bnn)["estimator"] == described
        save(bnn, tmp_path / "model.safetensors")
        again = load(tmp_path / "model.safetensors", nn.Linear(3, 2).double())
        assert again.estimator == estimator


def test_the_kl_that_is_reported_is_about_the_priors_mean() -> None:
    data = load_images("mnist", limit=10)
    data = replace(data, test_inputs=data.test_inputs[:10], test_targets=data.test_targets[:10])
    bnn = BayesianModule(nn.Linear(784, 10), prior_mean="initial", init_std=0.3)
    metrics, _ = evaluate(bnn, data, num_samples=1)
    # Posterior and prior are the same but for rounding.
    assert metrics["kl_nats"] == pytest.approx(0.0, abs=1e-2)


@pytest.mark.filterwarnings("ignore:.*standard deviations have not converged")
@each_estimator
def test_fit_trains_with_the_estimator_that_it_is_given(estimator: Estimator) -> None:
    means = []
    for made, given in ((estimator, None), (Flipout(antithetic=True), estimator)):
        elbo = ELBO(bayesian(mlp(), WeightSampling(), seed=4), num_data=8, num_samples=2)
        elbo.bnn.estimator = made
        fit(elbo, TensorLoader(X, Y, 4), epochs=2, estimator=given)
        assert elbo.bnn.estimator == estimator
        means.append(elbo.bnn.posterior.mean.detach())
    assert torch.equal(*means)


@pytest.mark.filterwarnings("ignore:.*standard deviations have not converged")
def test_validation_under_autocast_sees_the_last_step() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))
    elbo = ELBO(BayesianModule(net, include=("2.*",), init_std=1e-3), num_data=8, temperature=1e-6)
    loader = TensorLoader(X.float(), Y, 4)
    with torch.autocast("cpu", torch.bfloat16):
        history = fit(elbo, loader, loader, epochs=3, optimizer=partial(torch.optim.SGD, lr=0.5))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        outputs = elbo.bnn.mean_outputs(X.float()).float()
        nll = -elbo.bnn.likelihood.log_prob(outputs.unsqueeze(0), Y).mean()
    assert history[-1]["validation_nll"] == pytest.approx(float(nll), rel=1e-5)
