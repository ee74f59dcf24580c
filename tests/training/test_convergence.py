"""Convergence by groups of weights: few that carry the signal, many that do not."""

from __future__ import annotations

import math
from statistics import stdev

import pytest
import torch

from bayesify.training.convergence import ResidualMeter, StdResidual, grouped, residual_advice

IDLE, SIGNAL = 9_000, 1_000


def row(idle: float, signal: list[float], counts: tuple[int, int] = (IDLE, SIGNAL)) -> dict:  # type: ignore[type-arg]
    """The columns after one minibatch for each residual of the weights with a signal."""
    meter = ResidualMeter({})
    for each in signal:
        sums = (counts[0] * idle, 0.0, 0.0, counts[1] * each)
        meter.add(StdResidual(sums, (counts[0], 0, 0, counts[1])), kl_factor=1.0)
    return meter.row()


def test_weights_without_signal_do_not_outvote_the_others() -> None:
    found = row(0.12, [-1.1, -1.0, -1.2, -1.1, -1.1, -1.1])
    assert abs(found["std_residual"]) < 0.01
    assert found["std_residual_snr_below_0.1"] == pytest.approx(0.12)
    assert found["std_residual_worst"] == found["std_residual_snr_above_3"] == pytest.approx(-1.1)
    advice = residual_advice(found)
    assert advice is not None
    assert "still growing" in advice
    assert "of the weights with |mean| / std above 3 is -1.10 nats" in advice


@pytest.mark.parametrize(
    ("signal", "counts"),
    [
        ([-1.1] * 4, (IDLE, SIGNAL)),  # too few minibatches to know the error
        ([-9.0, 7.0, -8.0, 8.0, -9.0, 5.0], (IDLE, SIGNAL)),  # an average of noise
        ([-1.1] * 6, (9_999, 1)),  # one weight in ten thousand
        ([0.1, -0.1, 0.2, 0.0, -0.1, -0.2], (IDLE, SIGNAL)),
    ],
    ids=["few minibatches", "noise", "one weight", "converged"],
)
def test_no_group_is_accused_without_evidence(signal: list[float], counts: tuple[int, int]) -> None:
    assert residual_advice(row(0.0, signal, counts)) is None


def test_an_average_beyond_the_limit_is_told_without_a_worst_group() -> None:
    """A noisy group does not hide that the average over all weights is far from zero."""
    found = {"std_residual": -0.8, "std_residual_worst": -0.9, "std_residual_worst_error": 0.2}
    assert "d log std is -0.80" in (residual_advice(found) or "")
    assert residual_advice({**found, "std_residual": -0.4}) is None
    nan = {**found, "std_residual": math.nan}
    assert "are still undefined" in (residual_advice(nan) or "")
    worse = {**found, "std_residual": math.nan, "std_residual_worst_error": 0.01}
    assert "is -0.90" in (residual_advice(worse) or ""), "NaN does not hide the group"
    unknown = {**found, "std_residual_worst": math.nan}
    assert "is -0.80" in (residual_advice(unknown) or ""), "NaN does not hide the average"


def test_the_error_is_that_of_an_average_over_minibatches() -> None:
    signal = [-1.1, -1.0, -1.3, -1.1, -0.9]
    error = row(0.0, signal)["std_residual_worst_error"]
    assert error == pytest.approx(stdev(signal) / math.sqrt(5.0))


def test_groups_begin_above_the_borders() -> None:
    ratios = torch.tensor([0.0, 0.0999, 0.1, 0.1001, 0.9999, 1.0, 1.0001, 2.9999, 3.0, 3.0001])
    for std in (0.5, 1.0):  # powers of two: the borders are met exactly
        sums, counts = grouped(ratios, std * ratios, torch.full((10,), std), None)
        assert counts.tolist() == [3.0, 3.0, 3.0, 1.0]
        expected = [part.sum().item() for part in ratios.split([3, 3, 3, 1])]
        assert sums.tolist() == pytest.approx(expected)


def test_few_minibatches_are_judged_by_all_weights() -> None:
    found = row(-0.9, [-0.9])
    assert found["std_residual_worst_error"] is None
    assert residual_advice(found) is not None


def test_the_sums_resume() -> None:
    sums: dict[str, float] = {}
    for part in ([-1.0, -1.2, -1.1], [-1.0, -1.1, -1.2]):
        meter = ResidualMeter(sums)
        for each in part:
            meter.add(StdResidual((0.0, 0.0, 0.0, each), (0, 0, 0, 1)), kl_factor=1.0)
    assert meter.row() == row(0.0, [-1.0, -1.2, -1.1, -1.0, -1.1, -1.2], (0, 1))


def test_a_kl_of_hardly_any_weight_leaves_no_number() -> None:
    meter = ResidualMeter({})
    for factor in (1e-200, 1e-320):
        meter.add(StdResidual((-5.0, 0.0, 0.0, 0.0), (5, 0, 0, 0)), kl_factor=factor)
    assert meter.row()["std_residual"] is None
    meter.add(StdResidual((-5.0, 0.0, 0.0, 0.0), (5, 0, 0, 0)), kl_factor=1.0)
    assert meter.row()["std_residual"] == -1.0
