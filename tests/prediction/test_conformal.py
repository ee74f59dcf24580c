"""Conformal intervals and sets: exact ranks, coverage in simulation, and faults that are caught.

The simulations have a two-sided false-alarm rate of 1e-4 each, with fixed seeds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import bayesify as bf
from bayesify.prediction import CategoricalPredictive, GaussianPredictive
from bayesify.prediction.conformal import Conformal, smallest_sets

REPETITIONS = 1000
#: Standard errors that a mean leaves by chance in 1 of 10,000 simulations.
Z = 3.89


class WithoutPlusOne(bf.ConformalIntervals):
    """A planted fault: the plain quantile of the n scores."""

    def _rank(self, level: float) -> int:
        return math.ceil(self.num_scores * level)


class SetsWithoutPlusOne(bf.ConformalSets):
    """The same fault for sets."""

    def _rank(self, level: float) -> int:
        return math.ceil(self.num_scores * level)


def wrong_model(targets: Tensor, factor: float) -> GaussianPredictive:
    """A model that predicts 0 and the wrong std: ``factor`` times the true one, which is 2."""
    return GaussianPredictive(torch.zeros(1, *targets.shape), torch.tensor(2.0 * factor))


def check_mean(values: Tensor, expected: float) -> None:
    """The mean over repetitions is the expected one, up to chance."""
    error = float(values.std()) / math.sqrt(len(values))
    assert abs(float(values.mean()) - expected) < Z * error, float(values.mean())


def share_held(ends: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    """The share of the targets (N, R) that their intervals hold, in each repetition."""
    lower, upper = ends
    return ((lower <= targets) & (targets <= upper)).double().mean(0)


def exact_coverage(kind: type[bf.ConformalIntervals], n: int, level: float) -> float:
    """The probability of holding a new target: each of n + 1 targets is the new one as often."""
    y = torch.arange(1.0, n + 2.0)
    held = 0
    for new in range(n + 1):
        rest = torch.cat([y[:new], y[new + 1 :]])
        found = kind.of(torch.zeros(n), torch.ones(n), rest)
        lower, upper = found.interval(torch.zeros(1), torch.ones(1), level)
        held += int(lower <= y[new] <= upper)
    return held / (n + 1)


@pytest.mark.parametrize(
    ("n", "level"), [(1, 0.5), (4, 0.8), (9, 0.9), (12, 0.9), (19, 0.95), (30, 0.95), (99, 0.07)]
)
def test_coverage_is_exact_for_every_rank(n: int, level: float) -> None:
    coverage = exact_coverage(bf.ConformalIntervals, n, level)
    # (n + 1) level is a whole number at 99 and 0.07, but not in floating point.
    assert coverage == math.ceil(round((n + 1) * level, 9)) / (n + 1)
    assert level <= coverage <= level + 1 / (n + 1)


@pytest.mark.parametrize(("n", "level"), [(5, 0.8), (10, 0.9), (12, 0.9), (20, 0.95)])
def test_ranks_without_plus_one_are_caught(n: int, level: float) -> None:
    assert exact_coverage(WithoutPlusOne, n, level) < level


def simulated_intervals(
    kind: type[bf.ConformalIntervals], factor: float, n: int, level: float
) -> Tensor:
    """The share of 100 new targets that is held, in each repetition."""
    generator = torch.Generator().manual_seed(7)
    # Repetitions are targets of one example, which are calibrated one by one.
    old = 2.0 * torch.randn(n, REPETITIONS, generator=generator)
    new = 2.0 * torch.randn(100, REPETITIONS, generator=generator)
    p = wrong_model(old, factor)
    q = wrong_model(new, factor)
    return share_held(kind.of(p.mean, p.std, old).interval(q.mean, q.std, level), new)


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("n", "level"), [(25, 0.9), (60, 0.95)])
def test_wrong_models_cover_as_promised(factor: float, n: int, level: float) -> None:
    held = simulated_intervals(bf.ConformalIntervals, factor, n, level)
    check_mean(held, math.ceil((n + 1) * level) / (n + 1))
    # Without calibration the wrong models do not.
    new = 2.0 * torch.randn(10_000, 1, generator=torch.Generator().manual_seed(1))
    plain = float(share_held(wrong_model(new, factor).interval(level), new))
    assert (abs(plain - level) < 0.02) == (factor == 1.0)


def test_a_quantile_without_plus_one_is_caught() -> None:
    held = simulated_intervals(WithoutPlusOne, 0.5, 25, 0.9)
    with pytest.raises(AssertionError):
        check_mean(held, math.ceil(26 * 0.9) / 26)


def line(inputs: Tensor, train: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Least squares on 6 columns, with a std of 1: mean and std for inputs (R, N, 6)."""
    weights = torch.linalg.lstsq(train[0], train[1].unsqueeze(-1)).solution
    mean = (inputs @ weights).squeeze(-1).T
    return mean, torch.ones_like(mean)


def draw(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs (R, rows, 6) and targets (R, rows) with noise of std 1."""
    shape = (REPETITIONS, rows, 6)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    noise = torch.randn(shape[:2], generator=generator, dtype=torch.float64)
    return x, x.sum(-1) + noise


@pytest.mark.parametrize("on_training_rows", [False, True])
def test_calibration_on_the_training_rows_is_caught(on_training_rows: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    train, held_out, new = (draw(rows, generator) for rows in (19, 19, 40))
    rows = train if on_training_rows else held_out
    found = bf.ConformalIntervals.of(*line(rows[0], train), rows[1].T)
    held = share_held(found.interval(*line(new[0], train), level=0.9), new[1].T)
    if on_training_rows:
        with pytest.raises(AssertionError):
            check_mean(held, 0.9)
        assert float(held.mean()) < 0.85
    else:
        check_mean(held, 0.9)


def cross_lines(
    folds: int, train: tuple[Tensor, Tensor], new: Tensor
) -> tuple[bf.ConformalIntervals, Tensor, Tensor]:
    """CV+ of least squares."""
    places = torch.arange(train[1].shape[1])
    parts, means, stds = [], [], []
    for fold in range(folds):
        held = places % folds == fold
        rest = train[0][:, ~held], train[1][:, ~held]
        parts.append(bf.ConformalIntervals.of(*line(train[0][:, held], rest), train[1][:, held].T))
        mean, std = line(new, rest)
        means.append(mean)
        stds.append(std)
    return bf.ConformalIntervals.joined(parts), torch.stack(means), torch.stack(stds)


@pytest.mark.parametrize("folds", [5, 20])
def test_cross_validated_intervals_cover_as_promised(folds: int) -> None:
    generator = torch.Generator().manual_seed(4)
    train, new = draw(20, generator), draw(40, generator)
    found, means, stds = cross_lines(folds, train, new[0])
    held = share_held(found.interval(means, stds, level=0.9), new[1].T)
    assert found.guarantee(0.9) < float(held.mean())
    # Not a theorem: what is usual, and hence what fails if the ends are swapped or shifted.
    assert float(held.mean()) == pytest.approx(0.91, abs=0.02)


def test_cross_validated_intervals_are_those_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    # The new examples are compared in several pieces.
    monkeypatch.setattr("bayesify.prediction.conformal._MOST_NUMBERS", 50)
    generator = torch.Generator().manual_seed(5)
    scores = torch.rand(4, 5, 2, generator=generator)
    means = torch.randn(4, 3, 2, generator=generator)
    stds = torch.rand(4, 3, 2, generator=generator) + 0.1
    found = bf.ConformalIntervals.joined(bf.ConformalIntervals((part,)) for part in scores)
    lower, upper = found.interval(means, stds, level=0.8)
    assert found.num_scores == 20
    for example, target in itertools.product(range(3), range(2)):
        ends: list[list[float]] = [[], []]
        for k, i in itertools.product(range(4), range(5)):
            width = scores[k, i, target] * stds[k, example, target]
            ends[0].append(float(means[k, example, target] - width))
            ends[1].append(float(means[k, example, target] + width))
        # floor(0.2 * 21) = 4 and ceil(0.8 * 21) = 17, counted from 1.
        assert float(lower[example, target]) == sorted(ends[0])[3]
        assert float(upper[example, target]) == sorted(ends[1])[16]


@pytest.mark.parametrize(
    ("n", "folds", "expected"),
    [(100, 1, 0.9), (100, 100, 0.8), (100, 10, 0.8 - 0.9 / 11), (1000, 5, 0.8 - 1.6 / 201)],
)
def test_the_guarantee_is_that_of_the_theorem(n: int, folds: int, expected: float) -> None:
    found = bf.ConformalIntervals(tuple(torch.rand(folds, n // folds)))
    assert found.guarantee(0.9) == pytest.approx(expected, abs=1e-12)


def test_the_width_follows_the_predicted_std() -> None:
    found = bf.ConformalIntervals((torch.arange(1.0, 20.0),))
    std = torch.tensor([1.0, 10.0])
    lower, upper = found.interval(torch.tensor([0.0, 100.0]), std, level=0.9)
    assert torch.equal(upper - lower, 36.0 * std)


def wrong_probabilities(logits: Tensor, factor: float) -> Tensor:
    """The probabilities of a model that is too certain, or too uncertain."""
    return CategoricalPredictive.from_logits([factor * logits]).mean


def simulated_sets(
    kind: type[bf.ConformalSets], factor: float, n: int, level: float
) -> tuple[Tensor, Tensor]:
    """The share of 50 new classes that is held, and the size of the sets, in each repetition."""
    generator = torch.Generator().manual_seed(11)
    held, sizes = [], []
    for _ in range(REPETITIONS):
        logits = torch.randn(n + 50, 5, generator=generator, dtype=torch.float64)
        y = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
        p = wrong_probabilities(logits, factor)
        member = kind.of(p[:n], y[:n]).sets(p[n:], level)
        assert bool(member.gather(1, p[n:].argmax(1, keepdim=True)).all())
        held.append(float(member.gather(1, y[n:, None]).double().mean()))
        sizes.append(float(member.sum(1).double().mean()))
    return torch.tensor(held), torch.tensor(sizes)


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_sets_of_wrong_models_cover_as_promised(factor: float) -> None:
    held, sizes = simulated_sets(bf.ConformalSets, factor, 25, 0.9)
    check_mean(held, math.ceil(26 * 0.9) / 26)
    # Sets as large as those of the right model, whose order of classes is the same.
    assert float(sizes.mean()) == pytest.approx(3.7, abs=0.2)


def test_sets_without_plus_one_are_caught() -> None:
    held, _ = simulated_sets(SetsWithoutPlusOne, 1.0, 25, 0.9)
    with pytest.raises(AssertionError):
        check_mean(held, math.ceil(26 * 0.9) / 26)


def test_cross_validated_sets_are_those_of_the_paper() -> None:
    generator = torch.Generator().manual_seed(6)
    p = torch.rand(3, 7, 4, generator=generator).softmax(-1)
    new = torch.rand(3, 5, 4, generator=generator).softmax(-1)
    y = torch.randint(4, (3, 7), generator=generator)
    found = bf.ConformalSets.joined(map(bf.ConformalSets.of, p, y))
    member = found.sets(new, level=0.6)
    for example, label in itertools.product(range(5), range(4)):
        farther = 0
        for k, i in itertools.product(range(3), range(7)):
            own = p[k, i][p[k, i] > p[k, i, y[k, i]]].sum()
            other = new[k, example][new[k, example] > new[k, example, label]].sum()
            farther += int(own < other - 1e-6)
        best = int(new[:, example].mean(0).argmax()) == label
        assert bool(member[example, label]) == (farther < 0.6 * 22 or best)


def test_sets_without_calibration_are_the_smallest() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2], [0.05, 0.9, 0.05], [1.0, 0.0, 0.0]])
    assert smallest_sets(p, 0.7).tolist() == [[True, True, False], [False, True, False], [1, 0, 0]]
    assert smallest_sets(p, 0.85).sum(1).tolist() == [3, 1, 1]


def test_a_class_that_is_never_predicted_is_held_by_whole_sets() -> None:
    p = torch.tensor([[0.6, 0.4, 0.0]]).expand(9, 3)
    found = bf.ConformalSets.of(p, torch.full((9,), 2))
    assert bool(found.sets(p, 0.9).all())


ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "too few": (
        lambda: numbers(8).interval(torch.zeros(1), torch.ones(1), 0.9),
        r"level 0\.9 needs at least 9 calibration examples, got 8; give more, or lower the level",
    ),
    "too few for almost 1": (
        lambda: numbers(8).guarantee(0.9999999),
        r"level 0\.9999999 needs at least 9999999 .* got 8",
    ),
    "too few for 0.95": (lambda: numbers(18).guarantee(0.95), "needs at least 19 .* got 18"),
    "level": (lambda: numbers(9).guarantee(1.0), "strictly between 0 and 1, got 1"),
    "level nan": (lambda: numbers(9).guarantee(math.nan), "strictly between 0 and 1, got nan"),
    "level of sets": (lambda: smallest_sets(torch.ones(1, 1), 0.0), "got 0"),
    "no guarantee": (
        lambda: Conformal.joined([numbers(9), numbers(9)]).guarantee(0.5),
        "must be above 0.5 for networks of a cross-validation, got 0.5",
    ),
    "none": (lambda: numbers(0), "at least one, got shapes"),
    "no network": (lambda: bf.ConformalIntervals(()), "got shapes of no network"),
    "unequal": (
        lambda: Conformal.joined([numbers(9), numbers(8)]),
        r"equally many examples, at least one, got shapes \(8,\), \(9,\)",
    ),
    "nan": (
        lambda: bf.ConformalIntervals.of(torch.zeros(1), torch.ones(1), torch.tensor([math.nan])),
        "must be numbers, got nan; correct",
    ),
    "nan of one network": (
        lambda: bf.ConformalIntervals.joined([numbers(9), numbers(9)]).interval(
            torch.tensor([[0.0, 0.0], [0.0, math.nan]]), torch.ones(2, 2), 0.9
        ),
        "means must be finite, got nan for 1 of 4; correct the inputs of these examples",
    ),
    "infinite mean": (
        lambda: numbers(9).interval(torch.tensor([-math.inf]), torch.ones(1), 0.9),
        "means must be finite, got -inf for 1 of 1",
    ),
    "std": (
        lambda: bf.ConformalIntervals.of(torch.zeros(2), torch.tensor([1.0, 0.0]), torch.zeros(2)),
        "std must be positive, got 0",
    ),
    "infinite std": (
        lambda: bf.ConformalIntervals.of(ONES, torch.tensor([1.0, math.inf]), ONES),
        "std must be finite, got inf for 1 of 2; correct the inputs of these examples",
    ),
    "new infinite std": (
        lambda: numbers(9).interval(torch.zeros(1), torch.tensor([math.inf]), 0.9),
        "std must be finite, got inf for 1 of 1",
    ),
    "targets": (
        lambda: bf.ConformalIntervals.of(torch.zeros(2), torch.ones(2), torch.zeros(2, 1)),
        r"targets must have shape \(2,\), got \(2, 1\); nothing is broadcast",
    ),
    "std's shape": (
        lambda: numbers(9).interval(torch.zeros(2), torch.ones(1), 0.9),
        r"std must have shape \(2,\), got \(1,\)",
    ),
    "another example": (
        lambda: numbers(9).interval(torch.zeros(2, 3), torch.ones(2, 3), 0.9),
        r"must have the shape \(\) of those that were scored, got \(3,\)",
    ),
    "not stacked": (
        lambda: bf.ConformalIntervals.joined([numbers(9), numbers(9)]).interval(
            torch.zeros(3), torch.ones(3), 0.9
        ),
        "must be those of the 2 networks, stacked",
    ),
    "no such class": (
        lambda: bf.ConformalSets.of(torch.ones(2, 3) / 3, torch.tensor([0, 3])),
        "indices of 3 classes, from 0 to 2, got 0 to 3",
    ),
    "classes' shape": (
        lambda: bf.ConformalSets.of(torch.ones(2, 3) / 3, torch.zeros(2, 1)),
        r"targets must have shape \(2,\)",
    ),
    "fractions of classes": (
        lambda: bf.ConformalSets.of(torch.ones(2, 3) / 3, torch.tensor([0.0, 1.9])),
        r"targets must be class indices of dtype torch.int64, got torch.float32; convert them",
    ),
    "booleans": (
        lambda: bf.ConformalSets.of(torch.ones(2, 2) / 2, torch.tensor([True, False])),
        "dtype torch.int64, got torch.bool",
    ),
    "one axis": (
        lambda: bf.ConformalSets.of(torch.ones(3), torch.tensor([0, 1, 2])),
        r"must have shape \(N, K\), a row for each example, got \(3,\)",
    ),
    "no class": (
        lambda: bf.ConformalSets.of(torch.ones(3, 0), torch.zeros(3)),
        r"must have shape \(N, K\), a row for each example, got \(3, 0\)",
    ),
    "integers": (
        lambda: bf.ConformalSets.of(torch.ones(1, 2).long(), torch.tensor([0])),
        "must be floating-point numbers, got dtype torch.int64",
    ),
    "nan in a row": (
        lambda: bf.ConformalSets.of(torch.tensor([[1.0], [math.nan]]), torch.tensor([0, 0])),
        "must be finite, got nan in row 1; correct the inputs of this example, or leave it out",
    ),
    "new nan": (
        lambda: classes(3).sets(torch.tensor([[0.5, math.nan, 0.5]]), 0.9),
        "must be finite, got nan in row 0",
    ),
    "new infinity": (
        lambda: bf.ConformalSets.joined([classes(3), classes(3)]).sets(
            torch.tensor([[[0.5, 0.4, 0.1]], [[0.5, math.inf, 0.5]]]), 0.9
        ),
        "must be finite, got inf in row 0",
    ),
    "logits": (
        lambda: bf.ConformalSets.of(torch.tensor([[0.5, 0.5], [3.0, -2.0]]), torch.tensor([0, 0])),
        r"which sum to 1, but a sum is off by 0 and the least probability is -2; turn logits into "
        r"probabilities with softmax\(-1\)",
    ),
    "new log-probabilities": (
        lambda: classes(2).sets(torch.tensor([[0.5, 0.5]]).log(), 0.9),
        "a sum is off by 2.39",
    ),
    "other classes": (
        lambda: classes(3).sets(torch.ones(2, 4), 0.9),
        "must be of the 3 classes of the calibration, got 4; calibrate on examples of this",
    ),
    "joined other classes": (
        lambda: bf.ConformalSets.joined([classes(3), classes(4)]),
        "calibrated on the same classes, got 3 and 4 of them",
    ),
    "one network, stacked": (
        lambda: bf.ConformalSets.joined([classes(3)]).sets(torch.ones(1, 2, 3), 0.9),
        r"must have shape \(N, K\).* got \(1, 2, 3\); stack those of two or more joined networks",
    ),
    "several networks, one row": (
        lambda: bf.ConformalSets.joined([classes(3), classes(3)]).sets(torch.ones(2, 3), 0.9),
        r"must have shape \(N, K\), a row for each example, got \(3,\)",
    ),
    "a number": (
        lambda: bf.ConformalSets.joined([classes(3), classes(3)]).sets(torch.ones(()), 0.9),
        r"must be those of the 2 networks, stacked .* got shape \(\)",
    ),
}


def classes(count: int) -> bf.ConformalSets:
    """Sets of so many classes, calibrated on 20 examples."""
    return bf.ConformalSets.of(torch.full((20, count), 1.0 / count), torch.zeros(20).long())


def numbers(count: int) -> bf.ConformalIntervals:
    return bf.ConformalIntervals((torch.arange(float(count)),))


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    action, message = ERRORS[case]
    with pytest.raises(ValueError, match=message):
        action()


ONES = torch.ones(2)
#: Which argument is an array, and how.
ARRAYS: dict[str, Callable[[], object]] = {
    "probabilities": lambda: bf.ConformalSets.of(torch.ones(2, 1).numpy(), torch.zeros(2).long()),
    "new probabilities": lambda: classes(1).sets(torch.ones(2, 1).numpy(), 0.9),
    "targets": lambda: bf.ConformalSets.of(torch.ones(2, 1), torch.zeros(2).long().numpy()),
    "mean": lambda: bf.ConformalIntervals.of(ONES.numpy(), ONES.numpy(), ONES.numpy()),
    "new mean": lambda: numbers(9).interval(ONES.numpy(), ONES.numpy(), 0.9),
    "std": lambda: bf.ConformalIntervals.of(ONES, ONES.numpy(), ONES),
    "targets ": lambda: bf.ConformalIntervals.of(ONES, ONES, ONES.numpy()),
}


@pytest.mark.parametrize("case", ARRAYS)
def test_arrays_are_named(case: str) -> None:
    with pytest.raises(TypeError, match=rf"{case.split()[-1]} must be a tensor, got ndarray; use"):
        ARRAYS[case]()


def test_a_level_is_one_number() -> None:
    with pytest.raises(TypeError, match=r"level must be one number between 0 and 1, got \[0.5, "):
        numbers(9).interval(ONES, ONES, [0.5, 0.9])  # type: ignore[arg-type]


def test_sets_know_their_classes_but_those_of_earlier_versions_do_not() -> None:
    known = bf.ConformalSets.joined([classes(3), classes(3)])
    assert known.num_classes == 3
    old = bf.ConformalSets(known.scores)
    new = torch.rand(2, 5, 3, generator=torch.Generator().manual_seed(0)).softmax(-1)
    assert old.num_classes is None
    assert torch.equal(old.sets(new, 0.9), known.sets(new, 0.9))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_classes_of_any_integers_are_scored(dtype: torch.dtype) -> None:
    p, y = torch.tensor([[0.6, 0.3, 0.1]]).expand(19, 3), torch.tensor([0] * 14 + [1] * 5)
    found, expected = bf.ConformalSets.of(p, y.to(dtype)), bf.ConformalSets.of(p, y)
    assert torch.equal(found.scores[0], expected.scores[0])
