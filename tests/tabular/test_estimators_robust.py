"""Estimators on tables with wild cells, skewed columns, wild targets, weights and repeated rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.special import ndtri
from sklearn.datasets import make_friedman1
from sklearn.metrics import log_loss

from bayesify.sklearn import BayesianMLPClassifier, BayesianMLPRegressor
from bayesify.tabular import TableWarning
from bayesify.tabular.columns import NumberColumn, UnusedColumn, column_from_json
from bayesify.training import ConvergenceWarning

quiet = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")

X, Y = make_friedman1(1600, noise=1.0, random_state=0)
TRAIN, TEST = slice(0, 800), slice(800, None)


def trained(x: Any = X, y: Any = Y) -> BayesianMLPRegressor:
    return BayesianMLPRegressor(random_state=0).fit(x[TRAIN], y[TRAIN])


def rmse(model: BayesianMLPRegressor, x: Any = X) -> float:
    return float(np.sqrt(np.mean((model.predict(x[TEST]) - Y[TEST]) ** 2)))


@pytest.fixture(scope="module")
def clean() -> BayesianMLPRegressor:
    return trained()


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [lambda x: np.exp(5.0 * x), lambda x: np.exp(2.0 * ndtri(x))],
    ids=["skewed", "lognormal"],
)
def test_skewed_columns_cost_little(
    clean: BayesianMLPRegressor, change: Callable[[Any], Any]
) -> None:
    x = change(X)
    assert rmse(trained(x), x) < 1.2 * rmse(clean)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::bayesify.tabular.TableWarning")
def test_wild_cells_gaps_and_a_moved_constant_together_cost_little(
    clean: BayesianMLPRegressor,
) -> None:
    x, y = X.copy(), Y.copy()
    x[TRAIN][np.random.default_rng(0).random((800, 10)) < 0.05] = np.nan
    x[3, 0], y[7] = 1e6, 1e6
    x = np.c_[x, np.where(np.arange(1600) < 800, 1000.0, 1005.0)]
    assert rmse(trained(x, y), x) < 1.1 * rmse(clean)


@pytest.mark.slow
@pytest.mark.parametrize("cell", [1e6, -1e6])
def test_a_wild_cell_of_a_new_row_has_a_bounded_mean_and_a_wide_interval(
    clean: BayesianMLPRegressor, cell: float
) -> None:
    targets = Y[TRAIN]
    for place in range(10):
        rows = X[800:900].copy()
        rows[:, place] = cell
        mean, std = clean.predict(rows, return_std=True)
        assert mean.min() > targets.min() - 2.0 * targets.std()
        assert mean.max() < targets.max() + 2.0 * targets.std()
        assert std.min() > targets.std()


@pytest.mark.slow
@pytest.mark.parametrize(("shift", "most_missed"), [(8.0, 2), (0.0, 20)])
def test_one_row_in_a_thousand_of_a_class(shift: float, most_missed: int) -> None:
    rng = np.random.default_rng(0)
    rare = np.arange(40_000) % 1000 == 7
    x = rng.normal(size=(40_000, 5))
    x[rare, 0] += shift
    model = BayesianMLPClassifier(num_samples=50, random_state=0)
    model.fit(x[:20_000], rare[:20_000])
    probability = model.predict_proba(x[20_000:])[:, 1]
    assert 0.5e-3 < probability.mean() < 2e-3
    found = probability > 0.5
    assert found[rare[20_000:]].sum() >= 20 - most_missed
    assert found[~rare[20_000:]].sum() <= 1


@pytest.mark.slow
def test_two_hundred_levels() -> None:
    rng = np.random.default_rng(0)
    level = rng.integers(0, 200, 2000)
    rows = pd.DataFrame(
        {"level": [f"level {place}" for place in level], "x": rng.normal(size=2000)}
    )
    labels = rows["x"].to_numpy() + level % 2 > 0.5
    model = BayesianMLPClassifier(steps=400, random_state=0).fit(rows[:1500], labels[:1500])
    new = slice(1500, None)
    assert model.predict_proba(rows[new])[:, 1].mean() == pytest.approx(
        labels[new].mean(), abs=0.05
    )
    assert model.score(rows[new], labels[new]) > 0.65
    assert not model.outside_scores(rows[new]).any()


@pytest.mark.slow
def test_two_hundred_levels_that_all_matter() -> None:
    rng = np.random.default_rng(0)
    level = rng.permutation(np.arange(4000) % 200)
    rows = pd.DataFrame({"level": [f"level {place}" for place in level]})
    y = 3.0 * rng.normal(size=200)[level] + 0.3 * rng.normal(size=4000)
    model = BayesianMLPRegressor(steps=500, random_state=0).fit(rows[:3000], y[:3000])
    assert model.columns_[0].kept == 200
    assert model.score(rows[3000:], y[3000:]) > 0.95


def test_ordinary_columns_are_standardised_as_ever() -> None:
    rng = np.random.default_rng(0)
    for values in (rng.normal(3.0, 2.0, 500), rng.uniform(size=500), rng.integers(0, 2, 500) * 1.0):
        column = NumberColumn(name="x").fit(values)
        assert column.features == ("x",)
        expected = (values - values.mean()) / values.std()
        np.testing.assert_allclose(column.encode(values)[:, 0], expected, rtol=1e-5, atol=1e-6)


def test_a_rare_level_that_is_far_from_the_others_is_not_wild() -> None:
    values = np.repeat([-5.0, -2.4, -2.3, 0.0], [20, 100, 100, 60])
    column = NumberColumn(name="x").fit(values)
    expected = (values - values.mean()) / values.std()
    np.testing.assert_allclose(column.encode(values)[:, 0], expected, rtol=1e-5)


def test_one_wild_value_hardly_moves_the_inputs_of_the_others() -> None:
    values = np.random.default_rng(0).normal(size=800)
    alone = NumberColumn(name="x").fit(values).encode(values)[1:]
    values[0] = 1e12
    column = NumberColumn(name="x").fit(values)
    np.testing.assert_allclose(column.encode(values)[1:], alone, atol=0.06)
    assert np.abs(column.encode(np.array([1e300, -1e300]))).max() < 8.0


def test_a_skewed_column_has_its_ranks_too() -> None:
    values = np.exp(np.random.default_rng(0).normal(size=800) * 3.0)
    column = NumberColumn(name="x").fit(values)
    assert column.features == ("x", "x by rank")
    ranks = column.encode(values)[:, 1]
    assert np.corrcoef(ranks, np.log(values))[0, 1] > 0.99
    assert (np.diff(ranks[np.argsort(values)]) >= 0.0).all()
    assert ranks.std() == pytest.approx(1.0, abs=1e-3)
    assert column_from_json(column.to_json()) == column
    strange = column.encode(np.array([np.nan, np.inf, 1e300, 0.0]))
    assert (strange[:2, 1] == 0.0).all()
    assert strange[2:, 1].tolist() == pytest.approx([ranks.max(), ranks.min()])


SHARES = (np.arange(400.0) + 0.5) / 400.0
NORMAL, ORDER = ndtri(SHARES), np.random.default_rng(0).permutation(400)


@pytest.mark.parametrize(
    ("values", "shape"),
    [
        (np.exp(5.0 * SHARES), SHARES),
        (-np.exp(5.0 - 5.0 * SHARES), SHARES),
        (1e305 * np.exp(5.0 * SHARES), SHARES),
        (1e-295 * np.exp(5.0 * SHARES), SHARES),
        (np.exp(3.0 * NORMAL) - 7.0, NORMAL),
        (np.sinh(2.0 * NORMAL), NORMAL),
    ],
    ids=["exp of uniform", "mirrored", "huge", "tiny", "lognormal", "heavy on both sides"],
)
def test_a_skewed_column_gets_the_shape_it_had_before(values: Any, shape: Any) -> None:
    column = NumberColumn(name="x").fit(values[ORDER])
    assert column.features == ("x", "x by rank")
    found = column.encode(values)[:, 1]
    # A uniform and a normal correlate by 0.977.
    assert np.corrcoef(found, shape)[0, 1] > 0.995
    assert (np.diff(found) >= 0.0).all()
    assert found.mean() == pytest.approx(0.0, abs=1e-3)
    assert found.std() == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("wild", [1e12, -1e12, 1e308, -1e308])
def test_a_wild_value_does_not_move_the_logarithm(wild: float) -> None:
    values = np.exp(5.0 * SHARES)
    alone = NumberColumn(name="x").fit(values).encode(values)[1:, 1]
    column = NumberColumn(name="x").fit(np.array([wild, *values[1:]]))
    np.testing.assert_allclose(column.encode(values)[1:, 1], alone, atol=0.06)
    assert np.abs(column.encode(np.array([wild]))).max() < 8.0


def test_a_column_that_no_logarithm_mends_has_the_scores_of_its_ranks() -> None:
    values = np.where(SHARES < 0.3, 0.0, np.where(SHARES < 0.6, 100.0 + SHARES, 1e4 + SHARES))
    column = NumberColumn(name="x").fit(values)
    found = column.encode(values)[:, 1]
    assert len(np.unique(found)) > 10
    tied = SHARES < 0.3
    np.testing.assert_allclose(np.corrcoef(found[~tied], NORMAL[~tied])[0, 1], 1.0, atol=0.01)


def test_statistics_of_a_column_count_weights_as_rows() -> None:
    rng = np.random.default_rng(0)
    values, counts = rng.exponential(size=300) ** 3, rng.integers(1, 4, 300)
    weighted = NumberColumn(name="x").fit(values, weights=counts * 1.0, tail=7)
    repeated = NumberColumn(name="x").fit(np.repeat(values, counts), tail=7)
    assert weighted.knots == repeated.knots
    for name in ("low", "high", "spread"):
        assert getattr(weighted, name) == pytest.approx(getattr(repeated, name), rel=1e-12)
    np.testing.assert_allclose(weighted.encode(values), repeated.encode(values), rtol=1e-5)


@quiet
@pytest.mark.filterwarnings("ignore:sample_weight sums to 2000:bayesify.tabular.TableWarning")
@pytest.mark.parametrize("weighted", [False, True])
def test_equal_rows_count_in_the_range_of_training(weighted: bool) -> None:
    # Three wild ages among 2,000 rows, most of which are equal to others.
    rng = np.random.default_rng(0)
    ages = np.clip(np.round(rng.normal(40.0, 3.0, 2000)), 30.0, 50.0)
    ages[:3] = 80.0, 85.0, 90.0
    labels, weights = rng.integers(2, size=2000), None
    if weighted:
        pairs, sizes = np.unique(np.column_stack([ages, labels]), axis=0, return_counts=True)
        ages, labels, weights = pairs[:, 0], pairs[:, 1].astype(int), sizes * 1.0
    model = BayesianMLPClassifier((4,), steps=3, random_state=0)
    scores = model.fit(ages[:, None], labels, weights).outside_scores([[40.0], [60.0], [85.0]])
    assert scores[0] == 0.0
    assert (scores[1:] > 1.0).all()


@pytest.mark.parametrize("total", [0.3, 1.0, 1.5, 3.0, 300.0])
def test_weights_of_any_sum_leave_the_range_of_training(total: float) -> None:
    # Weights that sum to little tell which rows count more, not that there are few rows.
    rng = np.random.default_rng(0)
    values, shares = rng.normal(size=300), rng.uniform(0.5, 1.5, 300)
    alone = NumberColumn(name="x").fit(values)
    column = NumberColumn(name="x").fit(values, weights=total * shares / shares.sum())
    assert not column.outside(values).any()
    assert column.outside(np.array([100.0])) > 10.0
    assert column.spread == pytest.approx(alone.spread, rel=0.2)
    for size in range(99_990, 100_010):
        NumberColumn(name="x").fit(np.arange(float(size)), weights=np.full(size, 1.0 / size))


def test_an_unused_column_is_stored() -> None:
    column = UnusedColumn(name="x")
    assert column_from_json(column.to_json()) == column


@quiet
def test_wild_targets_are_reported_with_the_mend() -> None:
    y = Y[:100].copy()
    y[[7, 9]] = 1e6, -1e7
    model = BayesianMLPRegressor(steps=5, random_state=0)
    with pytest.warns(TableWarning, match="2 targets lie more than 10 .*predict the logarithm"):
        mean = model.fit(X[:100], y).predict(X[:100])
    nearest = Y[:100].copy()
    nearest[[7, 9]] = np.delete(nearest, [7, 9]).max(), np.delete(nearest, [7, 9]).min()
    np.testing.assert_array_equal(model.fit(X[:100], nearest).predict(X[:100]), mean)


@quiet
@pytest.mark.parametrize("size", [1.0 / 800.0, 100.0])
@pytest.mark.parametrize("kind", [BayesianMLPClassifier, BayesianMLPRegressor])
def test_weights_that_sum_to_another_number_of_rows_are_reported(kind: Any, size: float) -> None:
    x, y = X[:40], (Y[:40] > 14.0) * 1
    with pytest.warns(TableWarning, match=r"for 40 rows: .* multiply them by len\(w\) / w\.sum"):
        kind(steps=2).fit(x, y, sample_weight=np.full(40, size))
    kind(steps=2).fit(x, y, sample_weight=np.tile([1.9, 0.3, 0.0, 1.0], 10))  # no warning


@quiet
@pytest.mark.parametrize("part", [1.0, 0.8], ids=["all", "a part drawn at random"])
@pytest.mark.parametrize("kind", [BayesianMLPClassifier, BayesianMLPRegressor])
def test_a_table_given_several_times_is_reported(kind: Any, part: float) -> None:
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(60), 10))
    rows = order[: int(part * 600)]
    with pytest.warns(TableWarning, match=r"every row occurs about .*drop_duplicates"):
        kind(steps=2).fit(X[rows], (Y[rows] > 14.0) * 1)


@quiet
def test_rows_that_occur_by_chance_are_not_reported() -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 3, (1000, 4))  # 81 possible rows
    BayesianMLPClassifier(steps=2).fit(x, rng.integers(0, 2, 1000))
    BayesianMLPClassifier(steps=2).fit(X[:100], rng.integers(0, 2, 100))
    # Deliberate counts are no mistake.
    BayesianMLPRegressor(steps=2).fit(X[:100], Y[:100], sample_weight=np.full(100, 2.0))


@pytest.mark.parametrize("kind", [BayesianMLPClassifier, BayesianMLPRegressor])
def test_training_that_is_too_short_names_a_setting_of_the_estimator(kind: Any) -> None:
    x, y = X[:100], (Y[:100] > 14.0) * 1
    with pytest.warns(ConvergenceWarning) as caught:
        kind(steps=3).fit(x, y)
    [text] = [str(warning.message) for warning in caught]
    assert "steps=6 instead of 3" in text
    assert "rho_lr_scale" not in text
    assert "init_std" not in text


@pytest.mark.filterwarnings("ignore:sample_weight sums to 2000")
def test_the_history_of_rows_that_repeat_is_per_row() -> None:
    generator = np.random.default_rng(0)
    x = generator.integers(0, 4, (400, 2)).astype(float)
    y = (x[:, 0] + generator.normal(size=400) > 1.5).astype(int)
    model = BayesianMLPClassifier((10,), steps=300, num_samples=50, random_state=0)
    row = model.fit(x, y).history_[-1]
    true = log_loss(y, model.predict_proba(x))
    assert row["nll"] == pytest.approx(true, abs=0.1)
    assert row["free_energy"] == pytest.approx(row["nll"] + row["kl"] / 400)
    x = generator.normal(size=(400, 2))
    y = (x[:, 0] + generator.normal(size=400) > 0.0).astype(int)
    row = model.set_params(early_stopping=True).fit(x, y, np.full(400, 5.0)).history_[-1]
    true = log_loss(y, model.predict_proba(x))
    assert row["nll"] == pytest.approx(true, abs=0.1)
    assert row["validation_nll"] == pytest.approx(true, abs=0.2)


def test_a_constant_column_may_come_as_float32() -> None:
    x = np.random.default_rng(0).normal(size=(80, 3))
    x[:, 1] = 0.1
    model = BayesianMLPRegressor((5,), steps=100, random_state=0).fit(x, x[:, 0])
    found = model.predict(x[:5].astype(np.float32), return_std=True)[1]
    np.testing.assert_allclose(found, model.predict(x[:5], return_std=True)[1], rtol=1e-4)
    x[:, 1] = 0.2
    assert (model.predict(x[:5], return_std=True)[1] > 2.0 * found).all()


def test_arrays_of_objects_hold_dates_and_missing_values() -> None:
    x = np.random.default_rng(0).normal(size=(80, 1))
    frame = pd.DataFrame({"a": x[:, 0], "d": pd.date_range("2024-01-01", periods=80)})
    model = BayesianMLPRegressor((5,), steps=100, random_state=0)
    expected = model.fit(frame, x[:, 0]).predict(frame)
    array = frame.to_numpy()
    np.testing.assert_allclose(model.fit(array, x[:, 0]).predict(array), expected)
    objects = x.astype(object)
    objects[3, 0] = pd.NA
    assert np.isfinite(model.fit(objects, x[:, 0]).predict(objects)).all()


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            BayesianMLPClassifier(class_weight={0: None}),
            {},
            "class_weight must be numbers",
        ),
        (
            BayesianMLPRegressor(),
            {"sample_weight": ["a"] * 20},
            "could not convert string to float",
        ),
    ],
)
def test_weights_that_are_no_numbers(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model.fit(np.arange(20.0).reshape(20, 1), np.arange(20) % 2, **options)
