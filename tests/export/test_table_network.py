"""The network of a table as one module: the predictions of ``bayesify predict``."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.export.table_cases import TARGETS, Case, case, close, expected

from bayesify.export.table_columns import example_values
from bayesify.export.table_network import TableNetwork, mixture_quantiles
from bayesify.prediction import GaussianPredictive

LEVELS = (0.025, 0.5, 0.9)


def check(case: Case, num_samples: int, network: TableNetwork) -> None:
    values = example_values(case.schema.columns)
    with torch.no_grad():
        found = network(torch.from_numpy(values))
    p = expected(case, values, num_samples)
    distances = case.schema.outside([*values.T])
    is_outside = distances.max(axis=1) > 0.0
    assert is_outside.any()
    assert not is_outside.all()
    assert found["outside_training"].tolist() == is_outside.tolist()
    worst = np.where(is_outside, 1 + distances.argmax(axis=1), 0)
    assert found["outside_column"].tolist() == worst.tolist()
    if case.schema.target.classes:
        for name in ("mean", "total", "epistemic"):
            close(found[name], getattr(p, name))
        return
    std = p.total.sqrt().flatten()
    close(found["mean"], p.mean, std)
    close(found["std"], std)
    for name in ("total", "epistemic"):
        close(found[name], getattr(p, name), std.square())
    assert ("quantiles" in found) == isinstance(p, GaussianPredictive)
    for place, level in enumerate(LEVELS if "quantiles" in found else ()):
        close(found["quantiles"][:, place], p.quantile(level), std)


@pytest.mark.parametrize("num_samples", [0, 3, 20])
@pytest.mark.parametrize("kind", TARGETS)
def test_it_predicts_as_the_command_line(kind: str, num_samples: int, tmp_path: Path) -> None:
    """The mean weights; few samples, which are widened by noise or copies; and many."""
    found = case(kind, tmp_path)
    network = TableNetwork(found.bnn, found.schema, num_samples=num_samples, quantiles=LEVELS)
    check(found, num_samples, network)


def shift_outputs(network: TableNetwork) -> None:
    network.shift = network.shift + 0.01


def narrow(network: TableNetwork) -> None:
    assert network.marginal is not None
    network.marginal *= 0.9


def other_samples(network: TableNetwork) -> None:
    network.weights["hidden.0.bias"] = network.weights["hidden.0.bias"].flip(0) * 1.001


@pytest.mark.parametrize("fault", [shift_outputs, narrow, other_samples])
def test_the_check_notices_a_fault(fault: Callable[[TableNetwork], None], tmp_path: Path) -> None:
    found = case("gaussian", tmp_path)
    network = TableNetwork(found.bnn, found.schema, num_samples=20, quantiles=LEVELS)
    fault(network)
    with pytest.raises(AssertionError):
        check(found, 20, network)


def test_wrong_numbers(tmp_path: Path) -> None:
    found = case("gaussian", tmp_path)
    with pytest.raises(ValueError, match="must be 0, for the mean weights, or more, got -1"):
        TableNetwork(found.bnn, found.schema, num_samples=-1)
    with pytest.raises(ValueError, match=r"level must lie between 0 and 1, got 1\.5"):
        TableNetwork(found.bnn, found.schema, num_samples=2, quantiles=(1.5,))


def quantile_error(means: torch.Tensor, stds: torch.Tensor) -> float:
    levels = (0.005, 0.025, 0.3, 0.9, 0.995)
    found = mixture_quantiles(means, stds, levels)
    p = GaussianPredictive(means, stds)
    errors = [
        (each - p.quantile(level)).abs() / p.total.sqrt()
        for each, level in zip(found, levels, strict=True)
    ]
    return float(torch.stack(errors).max())


def test_quantiles_of_mixtures() -> None:
    """Of one Gaussian, of samples that agree, and of samples far apart with other noise."""
    generator = torch.Generator().manual_seed(0)
    for samples, spread in ((1, 1.0), (2, 0.3), (32, 0.1), (32, 1.0), (32, 5.0), (100, 20.0)):
        means, noise = torch.randn(2, samples, 500, dtype=torch.float64, generator=generator)
        assert quantile_error(spread * means, noise.clamp(-2.0, 2.0).exp()) < 1e-5


def between_modes() -> float:
    """The error of a median where the mixture is flat, in standard deviations."""
    means = torch.tensor([[-2.4], [2.7]], dtype=torch.float64)
    stds = torch.full_like(means, 0.5)
    p = GaussianPredictive(means, stds)
    [[found]] = mixture_quantiles(means, stds, (0.5,))
    return float((found - p.quantile(0.5)).abs() / p.total.sqrt())


def test_a_quantile_between_modes_is_that_of_the_prediction() -> None:
    assert between_modes() < 1e-7


def test_a_distribution_function_in_float32_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(z: torch.Tensor) -> torch.Tensor:
        return (0.5 - 0.5 * torch.erf((z * math.sqrt(0.5)).float())).double()

    monkeypatch.setattr("bayesify.export.table_network._upper_tail", rounded)
    assert between_modes() > 1e-5


def test_quantiles_are_finite_and_stable_where_the_noise_is_small() -> None:
    """Between samples far apart the density is 0, and the level may be met exactly."""
    levels = (0.025, 0.25, 0.5, 0.75)
    few = torch.tensor([[-5e5], [-2e5], [3e5], [4e5]], dtype=torch.float64)
    found = mixture_quantiles(few, torch.full_like(few, 1e-3), levels).squeeze(1)
    assert found.isfinite().all()
    for between, low, high in zip(found[1:], few[:-1], few[1:], strict=True):
        assert low <= between <= high
    generator = torch.Generator().manual_seed(0)
    means = torch.linspace(-2.0, 2.0, 32, dtype=torch.float64).unsqueeze(-1).repeat(1, 200)
    means += 0.003 * torch.randn(32, 200, dtype=torch.float64, generator=generator)
    rounded = means * (1.0 + 6e-8 * torch.randn(32, 200, generator=generator))
    for std in (0.5, 0.02, 1.8e-3, 1e-4, 1e-6):
        stds = torch.full_like(means, std)
        moved = mixture_quantiles(rounded, stds, levels) - mixture_quantiles(means, stds, levels)
        assert moved.abs().max() < 1e-5


@pytest.mark.parametrize(("name", "steps"), [("_NEWTON", 0), ("_BISECTIONS", 2)])
def test_too_few_steps_are_noticed(monkeypatch: pytest.MonkeyPatch, name: str, steps: int) -> None:
    means = 5.0 * torch.linspace(-1.0, 1.0, 32, dtype=torch.float64).unsqueeze(-1)
    stds = torch.full_like(means, math.exp(-2.0))
    assert quantile_error(means, stds) < 1e-9
    monkeypatch.setattr(f"bayesify.export.table_network.{name}", steps)
    assert quantile_error(means, stds) > 1e-7
