"""Importance and effect of columns: known functions, whole columns, and honest intervals."""

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.inspection import partial_dependence as sklearn_dependence
from torch import Tensor

from bayesify.prediction import CategoricalPredictive, GaussianPredictive, Predictive
from bayesify.sklearn import BayesianMLPClassifier, BayesianMLPRegressor
from bayesify.tabular.effects import PartialDependence, partial_dependence, permutation_importance


def linear(*weights: float, std: float = 1.0):
    """Prediction by a known linear function."""

    def predict(rows: Tensor) -> Predictive:
        return GaussianPredictive((rows @ rows.new_tensor(weights)).unsqueeze(0), torch.tensor(std))

    return predict


def standard_rows(count: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, columns, generator=generator, dtype=torch.float64)


def as_tensor(rows: Any) -> Tensor:
    return rows if isinstance(rows, Tensor) else torch.from_numpy(np.array(rows, np.float64))


# ------------------------------------------------------------------------------------- importance


@pytest.mark.parametrize(("true", "used"), [(0.0, 0.3), (0.0, 1.0), (0.3, 0.3), (1.0, 1.0)])
def test_the_interval_holds_the_importance_of_all_rows(true: float, used: float) -> None:
    # Of y = a + true * b + noise, predicted as a + used * b: both expectations are known.
    noise, std, runs = 0.5, 0.6, 200
    before = noise**2 + (true - used) ** 2
    after = noise**2 + true**2 + used**2
    known = ((after - before) / (2.0 * std**2), math.sqrt(after) - math.sqrt(before))
    held = [0, 0]
    for seed in range(runs):
        x = standard_rows(100, 3, seed)
        y = x[:, 0] + true * x[:, 1] + noise * x[:, 2]
        predict = linear(1.0, used, 0.0, std=std)
        (found,) = permutation_importance(predict, x, y, {"b": [1]}, seed=seed)
        for place, rise in enumerate((found.nll, found.error)):
            held[place] += rise.low <= known[place] <= rise.high
    assert all(0.91 * runs <= count <= runs for count in held), held


def test_the_only_relevant_column_is_first_and_the_others_hold_zero() -> None:
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(600, 4))
    y = 3.0 * rows[:, 2] + generator.normal(size=600)
    model = BayesianMLPRegressor((10,), steps=150, num_samples=20, random_state=0)
    model.fit(rows[:300], y[:300])
    columns = {f"x{place}": [place] for place in range(4)}
    found = permutation_importance(
        model.predictive, rows[300:], torch.from_numpy(y[300:]), columns, repeats=5
    )
    assert max(found, key=lambda each: each.nll.rise).column == "x2"
    for column, nll, error in found:
        for rise, low, high in (nll, error):
            assert low <= rise <= high
            assert (low > 0.0) if column == "x2" else (low <= 0.0 <= high), column


def test_a_column_moves_as_a_whole_and_every_row_gives_and_receives_as_often() -> None:
    count, repeats = 12, 3
    x = torch.zeros(count, 4)
    x[torch.arange(count), torch.arange(count) % 3] = 1.0
    x[:, 3] = torch.arange(count)
    donors = []

    def predict(rows: Tensor) -> Predictive:
        assert torch.equal(rows[:, :3].sum(1), torch.ones(len(rows)))  # one level in each row
        if len(rows) == count:
            donors.append(rows[:, 3].long())
        return CategoricalPredictive.from_logits([rows[:, :3]])

    targets = torch.arange(count) % 3
    permutation_importance(predict, x, targets, {"level": [0, 1, 2]}, repeats=repeats)
    donors.clear()
    permutation_importance(predict, x, targets, {"number": [3]}, repeats=repeats)
    own, *others = donors
    assert torch.equal(own, torch.arange(count))
    pairs = {(row, donor) for given in others for row, donor in enumerate(given.tolist())}
    assert len(pairs) == repeats * count  # no donor twice
    assert all(row != donor for row, donor in pairs)
    for given in others:
        assert given.sort().values.tolist() == list(range(count))


def test_importance_is_the_mean_over_the_exchanged_rows() -> None:
    x, weights = standard_rows(9, 2), (2.0, 1.0)
    y = x @ x.new_tensor(weights) + standard_rows(9, 1, seed=1).squeeze(1)
    # With as many repetitions as other rows the exchange is complete, whatever the order.
    (found,) = permutation_importance(linear(*weights), x, y, {"a": [0]}, repeats=8)
    pairs = [
        (float(y[i] - weights[0] * x[j, 0] - weights[1] * x[i, 1])) ** 2
        for i in range(9)
        for j in range(9)
        if i != j
    ]
    before = float((y - x @ x.new_tensor(weights)).square().mean())
    assert found.nll.rise == pytest.approx(0.5 * (np.mean(pairs) - before))
    assert found.error.rise == pytest.approx(math.sqrt(np.mean(pairs)) - math.sqrt(before))


def test_rows_may_be_a_tensor_an_array_or_a_frame() -> None:
    x = standard_rows(30, 2)
    frame = pd.DataFrame(x.numpy(), columns=["a", "b"], index=range(100, 130))
    y = x[:, 0]
    expected = permutation_importance(linear(1.0, 0.2), x, y, {"a": [0]})
    found = [
        permutation_importance(lambda rows: linear(1.0, 0.2)(as_tensor(rows)), rows, y, columns)
        for rows, columns in ((x.numpy(), {"a": [0]}), (frame, {"a": ["a"]}))
    ]
    assert found == [expected, expected]
    pd.testing.assert_frame_equal(frame, pd.DataFrame(x.numpy(), frame.index, ["a", "b"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": 0}, "repeats must be at least 1 and below the number of rows, 5, got 0"),
        ({"repeats": 5}, "below the number of rows, 5, got 5"),
        ({"level": 1.0, "repeats": 2}, "level must lie strictly between 0 and 1, got 1.0"),
    ],
)
def test_importance_names_what_is_wrong(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        permutation_importance(
            linear(1.0), torch.zeros(5, 1), torch.zeros(5), {"a": [0]}, **options
        )


# ----------------------------------------------------------------------------------------- effects


def additive(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    rows = generator.uniform(-2.0, 2.0, size=(count, 2))
    y = 2.0 * np.sin(rows[:, 0]) + rows[:, 1] + 0.3 * generator.normal(size=count)
    return rows, y


@pytest.mark.slow
def test_the_band_holds_a_known_additive_effect_at_most_places() -> None:
    rows, y = additive(150, 0)
    model = BayesianMLPRegressor((20,), num_samples=100, random_state=0).fit(rows, y)
    grid = np.linspace(-1.8, 1.8, 25)
    effect = partial_dependence(model.predictive, rows, [0], grid)
    known = 2.0 * np.sin(grid) + rows[:, 1].mean()
    low, high = (end.numpy() for end in effect.interval(0.95))
    assert ((low <= known) & (known <= high)).mean() > 0.7
    assert (high - low).max() < 1.0  # narrow compared with the range of the effect, 4


@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
def test_the_mean_is_that_of_scikit_learn() -> None:
    rows, y = additive(60, 1)
    model = BayesianMLPRegressor((5,), steps=40, num_samples=7, random_state=0).fit(rows, y)
    expected = sklearn_dependence(model, rows, [1], method="brute", grid_resolution=5)
    effect = partial_dependence(model.predictive, rows, [1], expected["grid_values"][0])
    np.testing.assert_allclose(effect.mean, expected["average"][0], rtol=1e-9)
    assert (effect.samples.shape, effect.rows.shape) == ((7, 5), (60, 5))


@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
def test_a_classifier_keeps_its_samples_on_request() -> None:
    rows, y = additive(60, 2)
    model = BayesianMLPClassifier((5,), steps=40, num_samples=7, random_state=0).fit(rows, y > 0)
    with pytest.raises(ValueError, match="pass keep_samples=True"):
        partial_dependence(model.predictive, rows, [0], [0.0])
    effect = partial_dependence(
        lambda x: model.predictive(x, keep_samples=True), rows, [0], [-1.0, 1.0]
    )
    assert effect.samples.shape == (7, 2, 2)
    torch.testing.assert_close(effect.mean.sum(-1), torch.ones(2, dtype=torch.float64))
    assert effect.mean[1, 1] > effect.mean[0, 1]


def test_inputs_of_one_column_are_set_together_and_frames_by_name() -> None:
    def predict(rows: Tensor) -> Predictive:
        return linear(1.0, 10.0, 100.0)(as_tensor(rows))

    x = standard_rows(4, 3)
    frame = pd.DataFrame(x.numpy(), columns=list("abc"))
    grid = [[1.0, 2.0], [3.0, 4.0]]
    effects = [
        partial_dependence(predict, x, [0, 2], torch.tensor(grid)),
        partial_dependence(predict, x.numpy(), [0, 2], grid),
        partial_dependence(predict, frame, ["a", "c"], grid),
    ]
    expected = torch.stack([201.0 + 10.0 * x[:, 1], 403.0 + 10.0 * x[:, 1]], 1)
    for effect in effects:
        torch.testing.assert_close(effect.rows, expected)
    torch.testing.assert_close(x, standard_rows(4, 3))  # unchanged


def test_intervals_and_spreads_are_quantiles() -> None:
    values = torch.arange(11.0).unsqueeze(1)
    effect = PartialDependence(values, 10.0 * values)
    assert [end.tolist() for end in effect.interval(0.8)] == [[1.0], [9.0]]
    assert [end.tolist() for end in effect.spread(0.6)] == [[20.0], [80.0]]
    for of in (effect.interval, effect.spread):
        with pytest.raises(ValueError, match="strictly between 0 and 1, got 0"):
            of(0.0)


@pytest.mark.parametrize(("rows", "grid"), [(0, [1.0]), (3, [])])
def test_an_effect_needs_a_row_and_a_value(rows: int, grid: list[float]) -> None:
    with pytest.raises(ValueError, match="at least one value and one row"):
        partial_dependence(linear(1.0), torch.zeros(rows, 1), [0], grid)


def test_frames_of_polars_are_taken() -> None:
    polars = pytest.importorskip("polars")
    x = torch.linspace(-1.0, 1.0, 40).reshape(20, 2)

    def predict(rows: Any) -> Predictive:
        numbers = torch.tensor(rows.to_numpy())
        return GaussianPredictive(3.0 * numbers[:, :1].T, torch.tensor(1.0))

    frame = polars.DataFrame(x.numpy(), schema=["a", "b"])
    columns = {"a": ["a"], "b": ["b"]}
    found = permutation_importance(predict, frame, 3.0 * x[:, 0], columns)
    assert [each.nll.rise > 0.5 for each in found] == [True, False]


def test_cells_of_whole_numbers_and_short_texts_hold_every_value_of_a_grid() -> None:
    def predict(rows: Any) -> GaussianPredictive:
        values = torch.tensor(
            [
                float(len(str(row[0]))) if isinstance(row[0], str) else float(row[0])
                for row in rows.tolist()
            ],
            dtype=torch.float64,
        )
        return GaussianPredictive(values.unsqueeze(0), torch.tensor(1.0))

    grid = [0.25, 0.5]
    for rows in (np.array([[0], [1]]), np.array([[False], [True]]), torch.tensor([[0], [1]])):
        found = partial_dependence(predict, rows, [0], grid)
        assert found.mean.tolist() == grid
        assert rows[1, 0] == 1
    texts = np.array([["Rome"], ["Oslo"]])
    assert partial_dependence(predict, texts, [0], ["Amsterdam"]).mean.tolist() == [9.0]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["x"], "columns must be a mapping"),
        ({"x": 0}, "must be a sequence of places or names, got 0"),
        ({"x": [7]}, "columns must be places from -2 to 1, got 7"),
    ],
)
def test_columns_that_are_not_there(columns: Any, message: str) -> None:
    def predict(rows: Tensor) -> GaussianPredictive:
        return GaussianPredictive(rows[:, 0].unsqueeze(0), torch.tensor(1.0))

    rows = torch.randn(10, 2)
    with pytest.raises(ValueError, match=message):
        permutation_importance(predict, rows, rows[:, 0], columns)
    if isinstance(columns, dict):
        with pytest.raises(ValueError, match=message):
            partial_dependence(predict, rows, columns["x"], [0.0])
    with pytest.raises(TypeError, match=r"repeats must be a whole number, got 2\.5"):
        permutation_importance(predict, rows, rows[:, 0], {"x": [0]}, repeats=2.5)  # type: ignore[arg-type]


def test_a_level_is_one_number() -> None:
    rows = torch.zeros(5, 1, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"level must be one number between 0 and 1, got '0\.9'"):
        permutation_importance(None, rows, rows[:, 0], {"a": [0]}, repeats=2, level="0.9")  # type: ignore[arg-type]
