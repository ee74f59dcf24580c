"""The split of uncertainty by three formulas, its Monte Carlo error, and what is made of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tests.cases import normals
from tests.loops import loop_over
from torch import Tensor

from bayesify import BayesianModule, Predictive
from bayesify.prediction import (
    BernoulliPredictive,
    CategoricalPredictive,
    GaussianPredictive,
    StudentTPredictive,
)
from bayesify.prediction.jackknife import jackknife


def gaussian(samples: int, *shape: int, spread: float = 1.0) -> GaussianPredictive:
    means = normals(*shape, seed=1) + spread * normals(samples, *shape, seed=2)
    return GaussianPredictive(means, 0.3 + normals(samples, *shape, seed=3).square())


def categorical(samples: int, *shape: int, spread: float = 1.0) -> CategoricalPredictive:
    logits = normals(*shape, seed=1) + spread * normals(samples, *shape, seed=2)
    return CategoricalPredictive.from_logits(list(logits), keep_samples=True)


def bernoulli(samples: int, *shape: int, spread: float = 1.0) -> BernoulliPredictive:
    logits = normals(*shape, seed=1) + spread * normals(samples, *shape, seed=2)
    return BernoulliPredictive.from_logits(list(logits), keep_samples=True)


def student_t(samples: int, *shape: int, spread: float = 1.0) -> StudentTPredictive:
    p = gaussian(samples, *shape, spread=spread)
    return StudentTPredictive(p.means, p.noise_std, torch.tensor(3.0))


KINDS = [gaussian, student_t, categorical, bernoulli]
Make = Callable[..., Any]


def parts_by_definition(p: Predictive) -> list[np.ndarray]:
    """Total, aleatoric and epistemic from the samples, in NumPy."""
    assert p.samples is not None
    each = p.samples.numpy()
    if isinstance(p, GaussianPredictive):
        variance = np.broadcast_to(p.noise_std.numpy() ** 2, each.shape)
        mixture = (variance + (each - each.mean(0)) ** 2).mean(0)
        return [mixture, variance.mean(0), each.var(0)]
    if isinstance(p, StudentTPredictive):
        variance = stats.t.var(3.0, scale=np.broadcast_to(p.scale.numpy(), each.shape))
        mixture = (variance + (each - each.mean(0)) ** 2).mean(0)
        return [mixture, variance.mean(0), each.var(0)]
    if isinstance(p, BernoulliPredictive):
        each = np.stack((1 - each, each), -1)
    mean = each.mean(0)
    information = stats.entropy(each, np.broadcast_to(mean, each.shape), axis=-1).mean(0)
    return [stats.entropy(mean, axis=-1), stats.entropy(each, axis=-1).mean(0), information]


def check_split(p: Predictive, tolerance: float = 1e-12) -> None:
    total, aleatoric, epistemic = p.total, p.aleatoric, p.epistemic
    assert ((aleatoric + epistemic - total) / total).abs().max() < tolerance
    assert float(epistemic.min()) >= 0.0


@loop_over("spread", [0.0, 1e-6, 1e-2, 1.0, 30.0])
@loop_over("samples", [1, 2, 7, 300])
@loop_over("make", KINDS)
def test_three_formulas_add_up(make: Make, samples: int, spread: float) -> None:
    p = make(samples, 20, 3, spread=spread)
    check_split(p)
    for got, exact in zip((p.total, p.aleatoric, p.epistemic), parts_by_definition(p), strict=True):
        np.testing.assert_allclose(got.numpy(), exact, rtol=1e-9, atol=1e-14)
    if samples == 1 or spread == 0.0:
        assert float(p.epistemic.max()) < 1e-14


@loop_over("width", [1.5e19, 3e19, 1e30])
def test_squares_that_overflow_leave_the_sum_of_the_parts(width: float) -> None:
    means = torch.tensor([[0.0, width, 1.0], [0.0, -width, 3.0]])
    for p in (
        GaussianPredictive(means, torch.tensor(0.5)),
        StudentTPredictive(means, torch.tensor(0.5), torch.tensor(4.0)),
    ):
        assert torch.equal(p.total[1], p.aleatoric[1] + p.epistemic[1])
        assert torch.allclose(p.total[[0, 2]], (p.aleatoric + p.epistemic)[[0, 2]])
        assert bool(p.total.isfinite()[1]) == (width == 1.5e19)
        compiled = torch.compile(lambda q: q.total, backend="eager")
        assert torch.equal(compiled(p), p.total)


def test_noise_may_be_absent_or_nan() -> None:
    means = torch.tensor([[-1.0], [1.0]])
    assert GaussianPredictive(means, torch.tensor(0.0)).total.tolist() == [1.0]
    assert GaussianPredictive(means, torch.tensor(torch.nan)).total.isnan().all()


def test_far_from_zero_too() -> None:
    p = GaussianPredictive(1e6 + gaussian(50, 20, 2).means, torch.tensor(0.1).double())
    check_split(p)
    q = GaussianPredictive(p.means.float() + 1e4, torch.tensor(1e-3))
    check_split(GaussianPredictive(q.means, q.noise_std), 1e-5)
    same = GaussianPredictive(torch.full((9, 4, 1), 1e8), torch.tensor(1e-3))
    assert torch.equal(same.epistemic, torch.zeros(4, 1))
    assert torch.allclose(same.total, same.aleatoric)


@loop_over("name", ["total", "aleatoric", "epistemic"])
@loop_over("make", KINDS)
def test_a_wrong_part_is_caught(make: Make, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p = make(7, 20, 3)
    wrong = getattr(p, name) * (1 + 1e-10)
    monkeypatch.setattr(type(p), name, property(lambda _: wrong))
    with pytest.raises(AssertionError):
        check_split(p)


def test_mutual_information_is_exact_in_single_precision_too() -> None:
    logits = normals(1, 50, 10) + 1e-3 * normals(30, 50, 10, seed=1)
    exact = CategoricalPredictive.from_logits(list(logits)).epistemic
    p = CategoricalPredictive.from_logits(list(logits.float()))
    assert ((p.epistemic - exact) / exact).abs().max() < 1e-3
    difference = p.total - p.aleatoric
    assert ((difference - exact) / exact).abs().max() > 0.02, "what rounding would leave of it"


@loop_over("keep_samples", [False, True])
def test_every_part_can_be_differentiated(keep_samples: bool) -> None:
    def parts(logits: Tensor) -> Tensor:
        p = CategoricalPredictive.from_logits(list(logits), keep_samples=keep_samples)
        return torch.stack((p.total, p.aleatoric, p.epistemic))

    torch.autograd.gradcheck(parts, normals(3, 4, 5).requires_grad_())


REPEATS, SAMPLES = 4000, 200
TARGETS = 0.3 * normals(REPEATS, seed=9)
LABELS = torch.zeros(REPEATS, dtype=torch.int64)
NUMBERS = GaussianPredictive(
    normals(SAMPLES, REPEATS, seed=2), 0.4 + 0.2 * normals(SAMPLES, REPEATS, seed=3).abs()
)
CLASSES = CategoricalPredictive.from_logits(
    list(torch.arange(3.0) + normals(SAMPLES, REPEATS, 3, seed=4)), keep_samples=True
)
STATISTICS: dict[str, tuple[Any, Callable[[Any], Tensor]]] = {
    "mean": (NUMBERS, lambda p: p.mean),
    "total": (NUMBERS, lambda p: p.total),
    "epistemic": (NUMBERS, lambda p: p.epistemic),
    "quantile": (NUMBERS, lambda p: p.quantile(0.9)),
    "log_prob": (NUMBERS, lambda p: p.log_prob(torch.full((REPEATS,), 0.7).double())),
    "probability": (CLASSES, lambda p: p.mean[:, 0]),
    "entropy": (CLASSES, lambda p: p.total),
    "information": (CLASSES, lambda p: p.epistemic),
    "class log_prob": (CLASSES, lambda p: p.log_prob(LABELS)),
}


def check_standard_error(error: Tensor, values: Tensor) -> None:
    """Against the spread over 4,000 repetitions, each an example with samples of its own.

    The spread is known to 1.1 %, the root mean squared estimate to 0.5 %: 6 % are 5 standard
    errors of their ratio, and leave room for the jackknife's bias of order 1 / S.
    """
    ratio = error.square().mean().sqrt() / values.std()
    assert abs(float(ratio) - 1.0) < 0.06, f"ratio {float(ratio):.3f}"


TWO = ["total", "class log_prob"]


@pytest.mark.parametrize(
    "names",
    [TWO, pytest.param([name for name in STATISTICS if name not in TWO], marks=pytest.mark.slow)],
    ids=["two", "the others"],
)
def test_the_standard_error_is_the_spread_over_repetitions(names: list[str]) -> None:
    for name in names:
        p, statistic = STATISTICS[name]
        error = p.standard_error(statistic, groups=11)  # of unequal size
        check_standard_error(error, statistic(p))
        with pytest.raises(AssertionError, match="ratio"):
            check_standard_error(error * 1.1, statistic(p))


def test_a_jackknife_of_single_samples_is_the_usual_standard_error_of_a_mean() -> None:
    x = normals(12, 5)
    got = jackknife(lambda kept: x[kept].mean(0), 12, 12)
    assert torch.allclose(got, x.std(0) / 12**0.5, rtol=1e-12)
    assert jackknife(lambda _: 3, 12).item() == 0.0


def test_the_error_of_a_prediction_halves_with_four_times_the_samples() -> None:
    bnn = BayesianModule(torch.nn.Linear(3, 2), init_std=0.5)
    few, many = (bnn.predict(torch.ones(4, 3), n, keep_samples=True) for n in (100, 400))
    ratio = few.standard_error(lambda p: p.epistemic) / many.standard_error(lambda p: p.epistemic)
    assert 1.2 < float(ratio.mean()) < 3.3


@loop_over("make", KINDS)
def test_a_subset_and_a_join_are_what_they_say(make: Make) -> None:
    p = make(6, 5, 3)
    halves = [p.subset([0, 2, 4]), p.subset(torch.tensor([1, 3, 5]))]
    joined = type(p).joined(halves)
    for name in ("mean", "total", "aleatoric", "epistemic"):
        assert torch.allclose(getattr(joined, name), getattr(p, name), rtol=1e-12, atol=1e-14)
    assert joined.samples is not None
    assert torch.allclose(joined.samples, p.samples[[0, 2, 4, 1, 3, 5]])
    assert not torch.allclose(halves[0].mean, p.mean)
    with pytest.raises(ValueError, match="at least one index"):
        p.subset([])
    with pytest.raises(ValueError, match="of the same examples, got none"):
        type(p).joined([])
    with pytest.raises(ValueError, match="of the same examples, got shapes"):
        type(p).joined([p, make(6, 4, 3)])


def test_joined_noise_stays_small() -> None:
    parts = [GaussianPredictive(normals(1, 5, 2, seed=s), torch.tensor(0.1 * s)) for s in (1, 2)]
    joined = GaussianPredictive.joined(parts)
    assert joined.noise_std.shape == (2, 1, 1)
    assert torch.allclose(joined.aleatoric, torch.full((5, 2), 0.025).double())
    alike = GaussianPredictive.joined([parts[0], parts[0]])
    other = StudentTPredictive(parts[0].means, torch.tensor(1.0), torch.tensor(3.0))
    with pytest.raises(ValueError, match=r"GaussianPredictive\.joined needs .* got StudentT"):
        GaussianPredictive.joined([parts[0], other])
    with pytest.raises(ValueError, match=r"CategoricalPredictive\.joined needs .* got Gaussian"):
        CategoricalPredictive.joined([parts[0]])
    assert alike.noise_std.dim() == 0


@loop_over("by", ["total", "aleatoric", "epistemic"])
def test_abstaining_answers_what_is_certain_enough(by: Any) -> None:
    for make in KINDS:
        p = make(9, 40, 3)
        values = p.uncertainty(by)
        assert torch.equal(values, getattr(p, by))
        threshold = float(values.flatten().sort().values[9])
        found = p.abstain(threshold, by=by)
        assert int(found.answered.sum()) == 10
        assert found.coverage == pytest.approx(10 / values.numel())
        assert torch.equal(found.prediction, p.prediction)
        assert p.abstain(float("inf")).coverage == 1.0


def test_predictions_are_the_best_single_answer() -> None:
    assert torch.equal(categorical(5, 9, 3).prediction, categorical(5, 9, 3).mean.argmax(-1))
    labels = bernoulli(5, 9, 3)
    assert torch.equal(labels.prediction, (labels.mean > 0.5).long())
    assert torch.equal(gaussian(5, 9, 3).prediction, gaussian(5, 9, 3).mean)


def test_rescaled_answers_are_in_the_targets_own_units() -> None:
    p = gaussian(6, 5, 2)
    shift, scale = torch.tensor([100.0, -3.0]), torch.tensor([10.0, 0.1])
    q, y = p.rescaled(shift, scale), normals(5, 2, seed=8)
    there = shift.double() + scale.double() * y
    assert torch.allclose(q.log_prob(there), p.log_prob(y) - scale.double().log().sum())
    assert torch.allclose(q.quantile(0.9), shift + scale * p.quantile(0.9))
    assert torch.allclose(q.cdf(there), p.cdf(y), atol=1e-12)
    assert torch.allclose(q.std, scale * p.std)
    assert torch.equal(q.variance, q.total)
    assert torch.allclose(p.rescaled(2, 3).mean, 2 + 3 * p.mean)
    check_split(q)


NAN = float("nan")


@loop_over(
    ("call", "kind", "message"),
    [
        (lambda: gaussian(5, 4).rescaled(0.0, 0.0), ValueError, "scale must be positive, got 0.0"),
        (lambda: gaussian(5, 4).rescaled(0.0, NAN), ValueError, "scale must be finite, got nan"),
        (lambda: gaussian(5, 4).rescaled(torch.ones(4), 1), ValueError, r"component .*\(\), got"),
        (lambda: gaussian(5, 4, 2).rescaled(0, torch.ones(3)), ValueError, r"\(2,\), got .*\(3,\)"),
        (
            lambda: GaussianPredictive(torch.ones(3), torch.tensor(1.0)),
            ValueError,
            r"\(S, N, ...\)",
        ),
        (lambda: GaussianPredictive(torch.ones(3, 2), torch.ones(3)), ValueError, "broadcastable"),
        (
            lambda: GaussianPredictive(torch.ones(3, 2), torch.tensor([-1.0, torch.nan])),
            ValueError,
            "noise_std must be 0 or more, got -1; give the width of the noise itself, not its log",
        ),
        (
            lambda: StudentTPredictive(torch.ones(3, 2), torch.tensor(-0.5), torch.tensor(3.0)),
            ValueError,
            "scale must be 0 or more, got -0.5",
        ),
        (lambda: gaussian(1, 4).standard_error(lambda p: p.mean), ValueError, "at least 2 weight"),
        (lambda: gaussian(5, 4).standard_error(lambda p: p.mean, groups=6), ValueError, "2 to .*5"),
        (lambda: gaussian(5, 4).standard_error(lambda p: p.mean, groups=1), ValueError, "got 1"),
        (
            lambda: gaussian(5, 4).standard_error(lambda p: p.mean, groups=2.5),  # type: ignore[arg-type]
            TypeError,
            r"groups must be a whole number, got 2\.5",
        ),
        (lambda: gaussian(5, 4).standard_error(lambda p: p.interval(0.9)), TypeError, "got tuple"),
        (
            lambda: CategoricalPredictive.from_logits([normals(2, 3)]).standard_error(len),
            ValueError,
            r"predict\(x, keep_samples=True\)",
        ),
        (
            lambda: CategoricalPredictive.from_logits([normals(2, 3)]).subset([0]),
            ValueError,
            "were not kept; call predict",
        ),
        (lambda: gaussian(5, 4).subset(torch.ones(5) > 0), ValueError, "convert a mask to ind"),
        (
            lambda: gaussian(5, 4).subset([1.9]),
            ValueError,
            "must be integer indices, got torch.float",
        ),
        (lambda: gaussian(5, 4).subset([0, 5]), ValueError, "from 0 to 4, .* got 5"),
        (lambda: gaussian(5, 4).subset([-6, 1]), ValueError, "from 0 to 4, .* got -6"),
        (lambda: gaussian(5, 4).abstain(NAN), ValueError, "got nan"),
        (lambda: gaussian(5, 4).abstain(1.0, by="spread"), ValueError, "one of total, .*'spread'"),
        (lambda: gaussian(5, 4).cdf(torch.zeros(4, 1)), ValueError, r"\(4,\), got \(4, 1\)"),
        (lambda: bernoulli(5, 4).quantile(0.5), TypeError, "use mean"),
    ],
)
def test_what_does_not_fit_is_refused(
    call: Callable[[], object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        call()
