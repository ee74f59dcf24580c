"""What ``bayesify train`` trains with."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bayesify import ELBO, IVON, BayesianModule, Gaussian
from bayesify.app.runs import ConfigError, RunConfig
from bayesify.app.runs.train import optimizer_factory, with_option_names
from bayesify.training.convergence import residual_advice


def objective() -> ELBO:
    return ELBO(BayesianModule(nn.Linear(3, 2), prior=Gaussian(0.1)), num_data=100)


@pytest.mark.parametrize(("options", "shrunk"), [({}, 1.0), ({"weight_decay": 0.2}, 1.0 - 0.02)])
def test_weight_decay_shrinks_the_weights_of_a_baseline(
    options: dict[str, float], shrunk: float
) -> None:
    config = RunConfig.of("mnist", baseline="sgd", lr=0.1, **options)
    weights = nn.Parameter(torch.ones(3))
    optimizer = optimizer_factory(config, objective())([{"params": [weights]}])
    weights.grad = torch.zeros(3)
    optimizer.step()
    assert weights.detach() == pytest.approx(torch.full((3,), shrunk).numpy())


def test_weight_decay_of_adam() -> None:
    options = {"baseline": "sgd", "optimizer": "adam", "lr": 1e-3}
    config = RunConfig.of("mnist", **options, weight_decay=0.5)
    optimizer = optimizer_factory(config, objective())([{"params": [nn.Parameter(torch.ones(3))]}])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5]


def test_ivon_is_made_for_the_objective() -> None:
    elbo, config = objective(), RunConfig.of("mnist", optimizer="ivon")
    made = optimizer_factory(config, elbo)([])
    assert isinstance(made, IVON)
    assert made.elbo is elbo
    assert made.param_groups[0]["lr"] == config.lr


def test_ivon_has_defaults_of_its_own() -> None:
    config = RunConfig.of("mnist", optimizer="ivon")
    assert config.prior == "gaussian"
    assert config != RunConfig.of("mnist", prior="gaussian")
    assert {"rho_lr_scale", "init_std"} <= set(config.idle())
    assert RunConfig.of("mnist", **config.unusual()) == config
    assert RunConfig.from_json(config.to_json()) == config
    assert RunConfig.of("mnist", optimizer="ivon", lr=0.5, prior_std=0.2).lr == 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prior": "laplace"}, "needs --prior gaussian"),
        ({"baseline": "sgd"}, "without --baseline"),
        ({"kl": "monte-carlo"}, "--kl auto"),
        ({"kl_weighting": "geometric"}, "--kl-weighting uniform"),
        ({"temperature": 0.0}, "temperature above 0"),
        ({"init_std": 0.1}, "init-std would do nothing"),
        ({"rho_lr_scale": 2.0}, "rho-lr-scale would do nothing"),
    ],
)
def test_settings_that_ivon_cannot_have(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig.of("mnist", optimizer="ivon", lr=0.01, **options)


def test_ivon_on_a_table_is_an_error() -> None:
    with pytest.raises(ConfigError, match="mnist and fashion-mnist"):
        RunConfig.of("a.csv", target="y", task="classification", optimizer="ivon", lr=0.01)


def test_advice_names_options_that_the_optimizer_has() -> None:
    for residual in (-0.9, 0.9):
        advice = residual_advice({"std_residual": residual})
        assert advice is not None
        for optimizer in ("adam", "ivon"):
            config = RunConfig.of("mnist", optimizer=optimizer)
            text = with_option_names(advice, config)
            assert "IVON" not in text
            assert ("--rho-lr-scale" in text) == (optimizer == "adam")
            assert ("--init-std" in text) == (optimizer == "adam" and residual > 0)
