"""Estimators on frames as they come, and on rows outside training; storing without pickle."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from bayesify.io import StorageError, read_tensors, write_tensors
from bayesify.sklearn import BayesianMLPClassifier, BayesianMLPRegressor
from bayesify.tabular import TableWarning

pytestmark = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")

KINDS = [BayesianMLPClassifier, BayesianMLPRegressor]


def frame(rows: int = 120) -> pd.DataFrame:
    """Columns of every type, all but one with missing values."""
    rng = np.random.default_rng(0)
    lost = np.arange(rows) % 10 == 3
    city = rng.choice(["Rome", "Oslo", "Pau"], rows).astype(object)
    when = pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 500, rows), unit="D")
    return pd.DataFrame(
        {
            "x": np.where(lost, np.nan, rng.normal(size=rows)),
            "count": pd.array(np.where(lost, 0, rng.integers(0, 9, rows)), dtype="Int64"),
            "city": np.where(lost, None, city),
            "size": pd.Categorical(rng.choice(["small", "large"], rows)),
            "ok": pd.array(np.where(lost, None, rng.random(rows) > 0.5), dtype="boolean"),
            "when": when.where(~pd.Series(lost)),
            "written": [f"{day:%Y-%m-%d}" for day in when],
            "empty": [None] * rows,
        }
    ).assign(count=lambda table: table["count"].mask(lost))


def target(table: pd.DataFrame, kind: Any) -> Any:
    y = 3.0 * (table["city"] == "Oslo") + 2.0 * table["x"].isna() + table["x"].fillna(0.0)
    return np.where(y > 1.0, "high", "low") if kind is BayesianMLPClassifier else y.to_numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_every_type_are_read(kind: Any) -> None:
    table = frame()
    y = target(table, kind)
    model = kind(steps=150, random_state=0).fit(table, y)
    assert [column.kind for column in model.columns_] == [
        "number",
        "number",
        "category",
        "category",
        "flag",
        "date",
        "date",
        "unused",
    ]
    assert model.columns_[2].levels == ("Oslo", "Pau", "Rome")
    assert [column.missing for column in model.columns_] == [
        True,
        True,
        True,
        False,
        True,
        True,
        False,
        False,
    ]
    assert model.score(table, y) > 0.8
    assert list(model.feature_names_in_) == list(table.columns)
    assert model.n_features_in_ == 8
    assert not model.outside_scores(table).any()
    # Text, and other types with the same values, mean the same.
    other = table.astype({"city": "category", "when": "string", "count": "float64"})
    np.testing.assert_array_equal(model.predict(other), model.predict(table))


@pytest.mark.parametrize("kind", ["int64", "Int64", "uint64[pyarrow]", "boolean", "bool[pyarrow]"])
def test_labels_of_every_type_of_pandas_keep_their_values(kind: str) -> None:
    x = np.random.default_rng(0).normal(size=(60, 2))
    labels = np.arange(60) % 3 + 2**53
    if "bool" in kind:
        labels = labels > 2**53
    model = BayesianMLPClassifier(steps=5, random_state=0).fit(x, pd.Series(labels).astype(kind))
    np.testing.assert_array_equal(model.classes_, np.unique(labels))
    again = clone(model).fit(x, pd.DataFrame({"y": labels}).astype(kind))
    np.testing.assert_array_equal(again.classes_, model.classes_)
    assert model.predict(x).dtype.kind == labels.dtype.kind or kind.startswith("uint")
    assert model.calibrate(x, pd.Series(labels, dtype=kind), cv=None) is model


@pytest.mark.parametrize("kind", KINDS)
def test_relevance_is_that_of_each_column(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(NotFittedError):
        _ = kind().relevance_
    rng = np.random.default_rng(0)
    table = pd.DataFrame(
        {
            "same": np.full(200, 5.0),
            "city": rng.choice(["Rome", "Oslo", "Pau"], 200),
            "noise": np.exp(2.0 * rng.normal(size=200)),  # of two inputs
            "empty": [None] * 200,
            "x": rng.normal(size=200),
            "when": pd.Timestamp("2024-01-01"),
            "lost": np.where(rng.random(200) < 0.3, np.nan, 4.0),
        }
    )
    y = 3.0 * (table["city"] == "Oslo") + table["x"] + 2.0 * table["lost"].isna()
    model = kind(steps=400, random_state=0)
    model.fit(table, y > 2.0 if kind is BayesianMLPClassifier else y)
    found = dict(zip(table, model.relevance_, strict=True))
    assert found["same"] == found["empty"] == found["when"] == 0.0
    # Of several inputs the largest counts; of one number with missing values, the mark of these.
    assert min(found["city"], found["x"], found["lost"]) > 3.0 * found["noise"] > 0.0
    assert found["lost"] != 1.0
    model.save(tmp_path / "model.safetensors")
    again = kind.load(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(again.relevance_, model.relevance_)
    with pytest.raises(AttributeError):
        model.relevance_ = found


@pytest.mark.parametrize("kind", KINDS)
def test_polars_frames_are_read_as_those_of_pandas(kind: Any) -> None:
    table = frame().drop(columns="written").reset_index(drop=True)
    same = pl.DataFrame(
        {name: pl.Series([None if pd.isna(v) else v for v in table[name]]) for name in table}
    ).with_columns(pl.col("size").cast(pl.Categorical), pl.col("when").cast(pl.Date))
    y = target(table, kind)
    model = kind(steps=5, random_state=0).fit(same, pl.Series("y", y))
    assert [column.kind for column in model.columns_] == [
        "number",
        "number",
        "category",
        "category",
        "flag",
        "date",
        "unused",
    ]
    assert list(model.feature_names_in_) == list(table.columns)
    expected = kind(steps=5, random_state=0).fit(table, y)
    np.testing.assert_array_equal(model.predict(same), expected.predict(table))
    with pytest.raises(ValueError, match=r"collect\(\)"):
        model.predict(same.lazy())


def test_dates_beyond_those_of_nanoseconds_are_read() -> None:
    days = pd.Series(pd.to_datetime(["9999-12-31", None, *["2024-01-01"] * 10]))
    for cells in (days, days.dt.tz_localize("Asia/Tokyo")):
        table = pd.DataFrame({"when": cells})
        model = BayesianMLPRegressor(steps=2, random_state=0).fit(table, np.arange(12.0))
        texts = table.astype("string")
        assert model.predict(table).tolist() == model.predict(texts).tolist()
        assert not model.outside_scores(table).any()


DAY = datetime.date(2024, 1, 1)
ARROW: dict[str, tuple[Any, str, list[Any]]] = {
    "day": (pa.date32(), "date", [DAY, None, datetime.date(9999, 12, 31)]),
    "time": (pa.timestamp("us"), "date", [datetime.datetime(2024, 1, 1, 12), None]),
    "zone": (pa.timestamp("ms", "Asia/Tokyo"), "date", [pd.Timestamp(DAY, tz="UTC"), None]),
    "amount": (pa.decimal128(10, 2), "number", [Decimal("1.5"), None, Decimal("-2.25")]),
    "span": (pa.duration("us"), "number", [datetime.timedelta(hours=6), None]),
    "whole": (pa.int64(), "number", [3, None, 5]),
    "ok": (pa.bool_(), "flag", [True, None, False]),
    "city": (pa.string(), "category", ["Rome", None, "Oslo"]),
    "size": (pa.dictionary(pa.int8(), pa.string()), "category", ["large", None, "small"]),
}


@pytest.mark.parametrize("name", ARROW)
def test_columns_of_arrow_are_read_as_objects_are(name: str) -> None:
    dtype, kind, values = ARROW[name]
    cells = (values * 12)[:24]
    arrow = pd.DataFrame({"x": pd.Series(cells, dtype=pd.ArrowDtype(dtype))})
    objects = pd.DataFrame({"x": pd.Series(cells, dtype=object)})
    model = BayesianMLPRegressor(steps=5, random_state=0).fit(arrow, np.arange(24.0))
    assert model.columns_[0].kind == kind
    assert model.columns_[0].missing
    same = BayesianMLPRegressor(steps=5, random_state=0).fit(objects, np.arange(24.0))
    for table in (arrow, objects):
        assert model.predict(table).tolist() == same.predict(table).tolist()
        assert not model.outside_scores(table).any()


def levels_of(texts: list[str]) -> tuple[str, ...]:
    table = pd.DataFrame({"text": texts, "x": np.arange(len(texts)) % 7})
    model = BayesianMLPRegressor(steps=1).fit(table, np.arange(len(texts)) % 5)
    return tuple(model.columns_[0].features)


def test_the_levels_of_a_text_that_have_an_input_each() -> None:
    few = [f"level {place:03}" for place in range(50)]
    assert levels_of(few * 2) == levels_of([*few, *few[::-1], "level 000"])
    assert len(levels_of(few)) == 50
    many = [f"level {place:03}" for place in range(256)]
    assert levels_of(many * 3) == tuple(f"text = {level}" for level in many)
    # One row says little about its level.
    once = [f"remark {place}" for place in range(100)]
    assert levels_of(["nothing"] * 300 + once) == ("text = nothing", "text = another")


def test_texts_beyond_the_levels_that_have_an_input_are_reported() -> None:
    texts = [f"level {place}" for place in range(300)] * 2 + ["level 299"]
    with pytest.warns(TableWarning, match=r"'text' has 300 levels: the 256 .* other 44 share one"):
        assert len(levels_of(texts)) == 257
    with pytest.warns(TableWarning, match="'text' is not used: .* free text"):
        assert levels_of([f"a remark, number {place}" for place in range(200)]) == ()
    remarks = [f"a remark, number {place % 200}" for place in range(300)]
    with pytest.warns(TableWarning, match="'text' is not used: .* free text"):
        assert levels_of(remarks) == ()


def test_missing_values_are_information_in_arrays_too() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 2))
    x[rng.random(200) < 0.3, 0] = np.nan
    y = 5.0 * np.isnan(x[:, 0]) + x[:, 1]
    model = BayesianMLPRegressor(steps=150, random_state=0).fit(x, y)
    assert model.score(x, y) > 0.95
    named = pd.DataFrame(x, columns=["a", "b"])
    same = BayesianMLPRegressor(steps=150, random_state=0).fit(named, y)
    np.testing.assert_array_equal(same.predict(named), model.predict(x))
    # A missing value where training had none is outside.
    assert model.outside_scores([[np.nan, 0.0], [0.0, np.nan]]).tolist() == [0.0, np.inf]


def test_other_columns_at_prediction_are_the_errors_of_scikit_learn() -> None:
    table = frame()
    model = BayesianMLPRegressor(steps=2).fit(table, target(table, BayesianMLPRegressor))
    for wrong, message in (
        (table[list(table)[::-1]], "must be in the same order"),
        (table.drop(columns="city"), "Feature names seen at fit time, yet now missing"),
        (table.assign(more=1), "Feature names unseen at fit time"),
    ):
        with pytest.raises(ValueError, match=message):
            model.predict(wrong)
    with pytest.warns(UserWarning, match="does not have valid feature names"):
        found = model.predict(table.to_numpy())
    np.testing.assert_allclose(found, model.predict(table))


def test_arrays_of_texts_and_numbers() -> None:
    x = [["Rome", 1.0], ["Oslo", 2.0], ["Rome", 3.0], ["Oslo", 4.0]] * 10
    y = [0, 1, 0, 1] * 10
    model = BayesianMLPClassifier(steps=60, random_state=0).fit(x, y)
    assert [column.kind for column in model.columns_] == ["category", "number"]
    assert model.score(np.array(x, dtype=object), y) == 1.0


@pytest.mark.parametrize(("dtype", "kind"), [("m8", "number"), ("M8", "date")])
def test_arrays_of_dates_and_durations_mean_the_same_in_every_unit(dtype: str, kind: str) -> None:
    days = np.arange(60)[:, None].astype(f"{dtype}[D]")
    expected = None
    for unit in ("D", "h", "s", "ns"):
        model = BayesianMLPRegressor(steps=20, random_state=0)
        model.fit(days.astype(f"{dtype}[{unit}]"), np.arange(60.0))
        assert [column.kind for column in model.columns_] == [kind]
        found = model.predict(days)
        expected = found if expected is None else expected
        np.testing.assert_array_equal(found, expected)


def test_a_text_of_its_own_in_every_row_is_not_used() -> None:
    table = pd.DataFrame({"x": np.arange(60.0) % 7, "who": [f"person {i}" for i in range(60)]})
    with pytest.warns(TableWarning, match="the column 'who' is not used: it identifies rows"):
        model = BayesianMLPRegressor(steps=2).fit(table, table["x"])
    assert [column.kind for column in model.columns_] == ["number", "unused"]


@pytest.mark.parametrize("kind", KINDS)
def test_partial_fit_keeps_the_columns_of_the_first_call(kind: Any) -> None:
    table = frame()
    y = target(table, kind)
    classes = {"classes": ["high", "low"]} if kind is BayesianMLPClassifier else {}
    model = kind(steps=20, random_state=0).partial_fit(table[:60], y[:60], **classes)
    columns = model.columns_
    later = table[60:].assign(city="Ulm")  # a new level
    with pytest.warns(TableWarning, match="'city' must hold levels such as .* 60 of 60 cells"):
        model.partial_fit(later, y[60:])
    assert model.columns_ is columns
    with pytest.warns(TableWarning, match="'city' must hold levels"):
        assert np.isinf(model.outside_scores(later)).all()
    assert model.n_iter_ == 40


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_weight_2_of_a_frame_is_the_row_twice(kind: Any) -> None:
    table = frame(60)
    y, counts = target(table, kind), np.arange(60) % 3
    repeated = table.loc[table.index.repeat(counts)], np.repeat(y, counts)
    one = kind(steps=20, random_state=0).fit(table, y, sample_weight=counts)
    other = kind(steps=20, random_state=0).fit(*repeated)
    np.testing.assert_array_equal(one.predict(table), other.predict(table))


def test_tools_of_scikit_learn_take_frames() -> None:
    table = frame(60)
    y = target(table, BayesianMLPRegressor)
    model = BayesianMLPRegressor(steps=20, random_state=0)
    assert np.isfinite(cross_val_score(model, table, y, cv=2)).all()
    assert GridSearchCV(model, {"steps": [2, 20]}, cv=2).fit(table, y).best_params_
    scaler = StandardScaler().set_output(transform="pandas")
    numbers = table[["x"]].assign(z=1.0 + np.arange(60))
    pipeline = make_pipeline(scaler, clone(model)).fit(numbers, y)
    assert list(pipeline[-1].feature_names_in_) == ["x", "z"]


# Rows outside training.


def numbers(rows: int = 200) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x = np.column_stack([rng.uniform(size=(rows, 2)), np.full(rows, 1000.0)])
    return x, 10.0 * x[:, 0] + 5.0 * x[:, 1] + rng.normal(size=rows)


def test_a_far_cell_widens_and_does_not_shout() -> None:
    x, y = numbers()
    model = BayesianMLPRegressor(noise="learned", steps=200, random_state=0).fit(x, y)
    rows = np.repeat(x[:1], 5, axis=0)
    rows[1:, 0] = 3.0, 1e6, -1e300, np.nan
    scores = model.outside_scores(rows)
    assert scores[0] == 0.0
    assert 1.0 < scores[1] < 10.0
    assert scores[2] > 1e5
    assert scores[4] == np.inf
    mean, std = model.predict(rows, return_std=True)
    assert (np.abs(mean) < 40.0).all()  # the targets run from 0 to 15
    p, alone = model.predictive(rows), model.predictive(np.repeat(x[:1], 5, axis=0))
    assert (std[2:] > y.std()).all()
    assert std[0] < 2.0 < std[1] < std[2]
    assert torch.equal(p.means[:, 0], alone.means[:, 0])  # to the bit, next to rows outside
    # What is added is epistemic: the variance of the targets for a row infinitely far.
    torch.testing.assert_close(p.total, p.aleatoric + p.epistemic)
    torch.testing.assert_close(p.aleatoric, p.aleatoric[:1].expand(5))
    rows[4, 0] = x[:, 0].mean()  # as a missing value is encoded
    within = float(model.predictive(rows).total[4])
    assert float(p.total[4]) == pytest.approx(within + y.var(), rel=1e-6)


def test_a_column_that_was_constant_has_no_effect_but_marks_the_row() -> None:
    x, y = numbers()
    model = BayesianMLPRegressor(steps=60, random_state=0).fit(x, y)
    moved = x.copy()
    moved[:, 2] = 1005.0
    np.testing.assert_allclose(model.predict(moved), model.predict(x), rtol=1e-9)
    assert np.isinf(model.outside_scores(moved)).all()
    assert not model.outside_scores(x).any()


def test_classes_of_a_far_row_are_mixed_with_the_frequencies() -> None:
    x, y = numbers()
    labels = np.where(y > 12.0, "high", "low")
    model = BayesianMLPClassifier(steps=100, random_state=0).fit(x, labels)
    share = (labels == "high").mean()
    np.testing.assert_allclose(model.class_prior_, [share, 1.0 - share])
    rows = np.array([[0.5, 0.1, 1000.0], [0.5, 0.1, 7.0]])
    (near, far), p = model.predict_proba(rows), model.predictive(rows)
    np.testing.assert_allclose(far, 0.5 * near + 0.5 * model.class_prior_, rtol=1e-9)
    assert p.epistemic[1] > p.epistemic[0]
    torch.testing.assert_close(p.total, p.aleatoric + p.epistemic)


# Weights of classes.


def test_weights_of_classes() -> None:
    x, y = numbers()
    labels = np.where(y > 12.0, "high", "low")
    given = {"high": 3.0}
    one = BayesianMLPClassifier(steps=20, random_state=0, class_weight=given).fit(x, labels)
    weights = np.where(labels == "high", 3.0, 1.0)
    other = BayesianMLPClassifier(steps=20, random_state=0).fit(x, labels, sample_weight=weights)
    np.testing.assert_array_equal(one.predict_proba(x), other.predict_proba(x))
    balanced = BayesianMLPClassifier(steps=20, class_weight="balanced").fit(x, labels)
    np.testing.assert_allclose(balanced.class_prior_, [0.5, 0.5])
    for wrong, message in (
        ({"huge": 1.0}, "must have only the classes"),
        ({"high": 0.0}, "positive and finite"),
        ("all", "a mapping by label"),
    ):
        with pytest.raises(ValueError, match=message):
            BayesianMLPClassifier(steps=2, class_weight=wrong).fit(x, labels)
    with pytest.raises(ValueError, match="needs all rows at once"):
        BayesianMLPClassifier(class_weight="balanced").partial_fit(x, labels, ["high", "low"])


# Storing.


@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_estimator_predicts_and_learns_as_the_first(kind: Any, tmp_path: Path) -> None:
    table = frame()
    y = target(table, kind)
    model = kind(steps=20, hidden_layer_sizes=np.array([7, 5]), random_state=3).fit(table, y)
    model.save(tmp_path / "model.safetensors")
    again = kind.load(tmp_path / "model.safetensors")
    far = table.assign(city=table["city"].where(np.arange(len(table)) % 2 == 0, "Ulm"))
    for rows in (table, far):
        np.testing.assert_array_equal(again.predict(rows), model.predict(rows))
        np.testing.assert_array_equal(again.predictive(rows).total, model.predictive(rows).total)
    assert again.n_iter_ == model.n_iter_
    assert again.get_params()["hidden_layer_sizes"] == (7, 5)
    assert again.get_params()["random_state"] == 3
    assert list(again.feature_names_in_) == list(table.columns)
    for each in (model, again):
        each.partial_fit(table[:50], y[:50])
    np.testing.assert_array_equal(again.predict(table), model.predict(table))


@pytest.mark.parametrize(
    "labels",
    [np.array([3, -1]), np.array([1.0, 2.0]), np.array([True, False]), np.array(["a", "bc"])],
    ids=["integers", "floats", "booleans", "text"],
)
def test_stored_labels_have_their_type(labels: Any, tmp_path: Path) -> None:
    x = np.arange(20.0)[:, None]
    weights, state = {labels[0].item(): 2}, np.random.RandomState(0)
    model = BayesianMLPClassifier(steps=2, class_weight=weights, random_state=state)
    model.fit(x, labels[np.arange(20) % 2]).save(tmp_path / "model.safetensors")
    again = BayesianMLPClassifier.load(tmp_path / "model.safetensors")
    assert again.classes_.dtype == model.classes_.dtype
    np.testing.assert_array_equal(again.predict(x), model.predict(x))
    assert again.class_weight == weights
    assert again.random_state is None


def test_files_that_are_none_of_this_class_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    model = BayesianMLPRegressor(steps=2).fit([[1.0], [2.0]], [1.0, 2.0])
    model.save(path)
    with pytest.raises(StorageError, match=r"use BayesianMLPRegressor\.load"):
        BayesianMLPClassifier.load(path)
    tensors, meta = read_tensors(path)
    assert json.dumps(meta["columns"], allow_nan=False)
    write_tensors(path, tensors, {**meta, "estimator_format": 9})
    with pytest.raises(StorageError, match="has the estimator format 9"):
        BayesianMLPRegressor.load(path)
    write_tensors(path, tensors, {"kind": "model"})
    with pytest.raises(StorageError, match="holds no estimator"):
        BayesianMLPRegressor.load(path)
