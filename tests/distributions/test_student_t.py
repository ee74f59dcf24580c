"""The density of Student's t: its constant for every df, and its tails in float32."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from scipy import stats
from tests.distributions.test_kl import check_normalised
from tests.loops import loop_over
from torch import Tensor

from bayesify import StudentT
from bayesify.distributions import priors


@loop_over("df", [0.3, 1.0, 3.0, 30.0, 999.0, 1001.0, 1e5, 1e9, 1e15])
def test_students_density_is_normalised_for_every_df(df: float) -> None:
    check_normalised(StudentT(df, 0.2))
    if df <= 1e5:  # beyond, scipy's own constant loses digits
        w = np.array([0.0, 0.01, -0.3, 5.0, 1e3])
        exact = stats.t.logpdf(w, df, scale=0.2)
        assert np.allclose(
            StudentT(df, 0.2).log_prob(torch.from_numpy(w)).numpy(), exact, rtol=1e-10
        )


def test_a_constant_of_lost_digits_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def naive(df: float) -> float:
        return math.lgamma(0.5 * df + 0.5) - math.lgamma(0.5 * df) - 0.5 * math.log(math.pi * df)

    monkeypatch.setattr(priors, "_log_student_peak", naive)
    check_normalised(StudentT(30.0, 0.2))
    with pytest.raises(AssertionError):
        check_normalised(StudentT(1e9, 0.2))


def check_students_tails(log_prob: Callable[[StudentT, Tensor], Tensor]) -> None:
    """log p(w) - log p(0) and the slope, in float32, against 60 digits."""
    for df, scale in itertools.product((0.5, 1.0, 4.0, 1e4, 1e15), (1e-15, 0.5, 1e15)):
        prior = StudentT(df, scale)
        zero = prior.log_prob(torch.zeros(1)).item()
        for size in (0.0, 1e-30, 1e-3 * scale, scale, math.sqrt(df) * scale, 50.0 * scale, 1e15):
            w = torch.tensor(-size, requires_grad=True)
            value = log_prob(prior, w)
            (slope,) = torch.autograd.grad(value, w)
            with localcontext(prec=60):
                square = (Decimal(w.item()) / Decimal(scale)) ** 2 / Decimal(df)
                exact = -(Decimal(df) + 1) / 2 * (1 + square).ln()
                unit = Decimal(df) * Decimal(scale) ** 2 + Decimal(w.item()) ** 2
                steep = float(-(Decimal(df) + 1) * Decimal(w.item()) / unit)
            where = (df, scale, size)
            assert value.item() == pytest.approx(
                zero + float(exact), rel=2e-6, abs=2e-6 * (1.0 + abs(zero))
            ), where
            assert slope.item() == pytest.approx(steep, rel=5e-6, abs=1e-37), where


def test_students_tails_are_right_up_to_1e15() -> None:
    check_students_tails(lambda prior, w: prior.log_prob(w))


@loop_over(
    "naive",
    [
        lambda p, w: -0.5 * (p.df + 1.0) * torch.log1p((w / p.scale).square() / p.df),
        lambda p, w: -0.5 * (p.df + 1.0) * torch.log(1.0 + (w / p.scale / p.df**0.5).square()),
        lambda p, w: -(p.df + 1.0) * torch.hypot(torch.ones(()), w / p.scale / p.df**0.5).log(),
    ],
)
def test_a_naive_tail_is_caught(naive: Callable[[StudentT, Tensor], Tensor]) -> None:
    def with_the_constant(prior: StudentT, w: Tensor) -> Tensor:
        return naive(prior, w) + prior.log_prob(torch.zeros(()))

    with pytest.raises(AssertionError):
        check_students_tails(with_the_constant)


@loop_over("bad", [0.0, -1.0, math.inf, math.nan])
def test_its_arguments_are_checked(bad: float) -> None:
    with pytest.raises(ValueError, match=f"df must be positive and finite, got {bad}"):
        StudentT(bad, 1.0)
    with pytest.raises(ValueError, match=f"scale must be positive and finite, got {bad}"):
        StudentT(1.0, bad)
    with pytest.raises(ValueError, match=r"df must lie between 1e-15 and .*got 1e-20"):
        StudentT(1e-20, 1.0)
