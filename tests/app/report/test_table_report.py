"""The report of a table: baseline, classes, intervals, importance and effects of its columns."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import precision_score, recall_score
from tests.app.cli.test_cli import as_json, bayesify, quick_runs
from tests.app.report.test_report import Page

from bayesify.app.report.parts import shown_number
from bayesify.app.report.table_parts import (
    class_parts,
    effect_part,
    importance_part,
    number_parts,
    result_part,
)
from bayesify.app.runs import Run
from bayesify.app.runs.table_effects import baseline, column_effects, importance, targets_in_units
from bayesify.module.pruning import prune
from bayesify.prediction import CategoricalPredictive, GaussianPredictive
from bayesify.tabular.effects import PartialDependence
from bayesify.tabular.grids import Grid
from bayesify.tabular.table_data import TableData

QUICK = ["--epochs", "4", "--passes", "60", "--threads", "1"]
SAMPLES = ["--test-samples", "20"]


def number_data(train: list[float], test: list[float]) -> TableData:
    """Data of a regression, with targets standardised by mean 10 and standard deviation 4."""
    parts = [torch.tensor(part).unsqueeze(1) for part in (train, test)]
    x = [torch.zeros(len(part), 1) for part in parts]
    scaled = [(part - 10.0) / 4.0 for part in parts]
    far = [torch.zeros(len(part)) for part in parts]
    return TableData("t", x[0], scaled[0], far[0], x[1], scaled[1], far[1], (), 10.0, 4.0)


def class_data(train: list[int], test: list[int]) -> TableData:
    parts = [torch.tensor(part) for part in (train, test)]
    x = [torch.zeros(len(part), 1) for part in parts]
    far = [torch.zeros(len(part)) for part in parts]
    return TableData("t", x[0], parts[0], far[0], x[1], parts[1], far[1], ("a", "b", "c"))


# --------------------------------------------------------------------------------------- baseline


def test_the_baseline_of_numbers_is_the_mean_and_the_spread_of_training() -> None:
    found = baseline(number_data([6.0, 14.0], [10.0, 13.0, 6.0]))
    assert found["prediction"] == 10.0
    assert found["rmse"] == pytest.approx(math.sqrt((0 + 9 + 16) / 3))
    squares = 0.5 * np.array([0.0, 9.0, 16.0]) / 16.0
    assert found["nll"] == pytest.approx(0.5 * math.log(2 * math.pi * 16.0) + squares.mean())
    # Closed form of the CRPS of N(10, 4^2) at its mean.
    at_mean = baseline(number_data([6.0, 14.0], [10.0]))["crps"]
    assert at_mean == pytest.approx(4.0 * (math.sqrt(2.0) - 1.0) / math.sqrt(math.pi), rel=1e-6)


def test_the_baseline_of_targets_as_they_are_has_their_own_mean_and_spread() -> None:
    """Under a Student-t noise the scaling is that of the tamed targets, but none is tamed."""
    data = number_data([6.0, 14.0, 6.0, 494.0], [10.0, 13.0])
    found = baseline(dataclasses.replace(data, likelihood="student-t"))
    train, test = np.array([6.0, 14.0, 6.0, 494.0]), np.array([10.0, 13.0])
    assert found["prediction"] == pytest.approx(130.0)
    assert found["rmse"] == pytest.approx(np.sqrt(np.square(test - 130.0).mean()))
    var = train.var()
    nll = 0.5 * np.log(2.0 * np.pi * var) + 0.5 * np.square(test - 130.0).mean() / var
    assert found["nll"] == pytest.approx(nll)


def test_the_baseline_of_classes_is_the_most_frequent_one_of_training() -> None:
    found = baseline(class_data([0, 1, 1, 1, 2], [0, 2, 2, 1]))
    assert found["prediction"] == "b"
    assert found["error"] == 75.0
    assert found["nll"] == pytest.approx(-(3 * math.log(0.2) + math.log(0.6)) / 4)
    brier = {0: 0.64 + 0.36 + 0.04, 1: 0.04 + 0.16 + 0.04, 2: 0.04 + 0.36 + 0.64}
    assert found["brier"] == pytest.approx((brier[0] + 2 * brier[2] + brier[1]) / 4)


def test_a_class_that_only_held_out_rows_have_leaves_the_baseline_finite() -> None:
    found = baseline(class_data([0, 1, 1, 1], [1, 2]))
    assert found["nll"] == pytest.approx(-(math.log(3 / 4.5) + math.log(0.5 / 4.5)) / 2)
    assert found["error"] == 50.0


def test_the_first_sentence_says_what_the_network_is_worth() -> None:
    test = {"rmse": 2.0, "nll": 1.0, "crps": 1.2}
    same = {"prediction": 10.0, "rmse": 4.0, "nll": 2.0, "crps": 2.5}
    part = result_part("price", 1200, test, same)
    assert part.lead == (
        "On 1,200 held-out rows the predictions of price are off by 2.000 (root of the mean "
        "squared error). Always predicting the mean, 10.00, is off by 4.000."
    )
    (table,) = part.tables
    assert table.heads[2] == "always the mean, 10.00"
    assert [row[1:] for row in table.rows] == [
        ("2.000", "4.000"),
        ("1.0000", "2.0000"),
        ("1.200", "2.500"),
    ]
    assert "no better than that" in result_part("price", 9, test | {"rmse": 4.1}, same).lead
    assert "too sure of itself" in result_part("price", 9, test | {"nll": 2.5}, same).lead
    classes = {"prediction": "b", "error": 75.0, "nll": 1.1, "brier": 0.6}
    test = {"error_predictive": 7.125, "nll": 0.2, "brier": 0.1}
    lead = result_part("kind", 40, test, classes).lead
    assert "7.12 % are given a wrong kind" in lead
    assert "most frequent class, b, is wrong for 75.00 %" in lead


# ---------------------------------------------------------------------------------------- classes


def predicted(classes: torch.Tensor, count: int) -> CategoricalPredictive:
    return CategoricalPredictive.from_logits([9.0 * torch.nn.functional.one_hot(classes, count)])


def numbers(texts: Any) -> list[list[int]]:
    return [[int(text.replace(",", "")) for text in row[1:]] for row in texts]


@pytest.mark.parametrize("count", [2, 3, 10, 11, 40])
def test_the_confusion_matrix_sums_to_the_rows(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    true = (torch.rand(3000, generator=generator).square() * count).long()
    guess = torch.where(
        torch.rand(3000, generator=generator) < 0.7,
        true,
        torch.randint(count, (3000,), generator=generator),
    )
    names = [f"c{place:02d}" for place in range(count)]
    confusion, each = class_parts(predicted(guess, count), true, names)
    matrix = confusion.tables[0]
    cells = np.array(numbers(matrix.rows))
    assert cells.sum() == 3000
    assert cells.shape == (min(count, 10), min(count, 10))
    assert list(matrix.heads[1:]) == [row[0] for row in matrix.rows]
    shown = [name for name in matrix.heads[1:] if name in names]
    for row, name in zip(cells, shown, strict=False):
        assert row.sum() == int((true == names.index(name)).sum())
    assert (matrix.heads[-1] == "all others") == (count > 10)
    # Shares, positive where right; of the others together neither.
    shades = np.array(matrix.shades)
    np.testing.assert_allclose(np.abs(shades).sum(1)[: len(shown)], 1.0)
    right = [shades[k, k] > 0.0 for k in range(len(shown))]
    assert all(right)
    assert (shades[~np.eye(len(shades), dtype=bool)] <= 0.0).all()

    rows = {row[0]: row for row in each.tables[0].rows}
    assert len(rows) == min(count, 20)
    labels = range(count)
    recall = recall_score(true, guess, labels=labels, average=None)
    precision = precision_score(true, guess, labels=labels, average=None, zero_division=np.nan)
    if count > 20:
        assert {names.index(name) for name in rows} == set(np.argsort(recall)[:20].tolist())
    for name, row in rows.items():
        place = names.index(name)
        assert numbers([row[:4]]) == [
            [
                int((true == place).sum()),
                int((guess == place).sum()),
                int(((true == place) & (guess == place)).sum()),
            ]
        ]
        assert row[4] == f"{100 * recall[place]:.1f}"
        assert row[5] == f"{100 * precision[place]:.1f}"


def test_of_many_classes_the_most_confused_pairs_are_listed() -> None:
    true = torch.arange(12).repeat(10)
    guess = true.clone()
    guess[true == 4] = 7
    guess[:1] = 3
    (confusion, _) = class_parts(predicted(guess, 12), true, [f"c{k}" for k in range(12)])
    (_, pairs) = confusion.tables
    assert pairs.rows == [("c4", "c7", "10 of 10"), ("c0", "c3", "1 of 10")]


def test_a_class_that_is_never_predicted_has_no_precision() -> None:
    _, each = class_parts(predicted(torch.zeros(5).long(), 2), torch.arange(5) // 4, ["a", "b"])
    assert each.tables[0].rows == [
        ("a", "4", "5", "4", "100.0", "80.0"),
        ("b", "1", "0", "0", "0.0", "-"),
    ]


# ---------------------------------------------------------------------------------------- numbers


def test_intervals_and_residuals_are_tabulated() -> None:
    mean = torch.arange(101.0, dtype=torch.float64).unsqueeze(1)
    rest = torch.linspace(-5.0, 5.0, 101, dtype=torch.float64).unsqueeze(1)
    rest = rest[torch.randperm(101, generator=torch.Generator().manual_seed(0))]
    test = {"coverage_80": 81.25, "width_80": 1234.5, "coverage_95": 94.0, "width_95": 0.5}
    predictive = GaussianPredictive(mean.unsqueeze(0), torch.tensor(1.0))
    parts, figures = number_parts(predictive, mean + rest, "price", test)
    tables = {part.name: part.tables for part in parts}
    assert tables["intervals"][0].rows == [("80 %", "81.2", "1,234"), ("95 %", "94.0", "0.5000")]
    (row,) = tables["residuals"][0].rows
    assert row == ("true - predicted", "-4.500", "-2.500", "0", "2.500", "4.500")
    assert list(figures) == ["residual_plot"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.00012345, "0.0001234"),
        (-35.336, "-35.34"),
        (1e9, "1,000,000,000"),
        (math.nan, "nan"),
        (3e-7, "3e-07"),
        (2.5e22, "2.5e+22"),
    ],
)
def test_numbers_have_digits_by_their_size(value: float, text: str) -> None:
    assert shown_number(value) == text


# ---------------------------------------------------------------------------------------- columns


def rise(value: float) -> dict[str, float]:
    return {"rise": value, "low": value - 0.1, "high": value + 0.1}


def test_importance_is_drawn_and_listed_in_the_given_order() -> None:
    columns = [
        {"column": f"column {k}", "nll": rise(9.0 - k), "error": rise(-0.001)} for k in range(25)
    ]
    found = {"rows": 1000, "repeats": 5, "weight_samples": 10, "level": 0.95, "columns": columns}
    part, figures = importance_part(found, 30)
    assert list(figures) == ["importance_nll", "importance_error"] == list(part.figures)
    labels = [text.get_text() for text in figures["importance_nll"].axes[0].get_yticklabels()]
    assert labels == [f"column {k}" for k in range(20)]
    (table,) = part.tables
    assert len(table.rows) == 25
    assert table.rows[0] == ("column 0", "9.0000", "8.9000 to 9.1000", "0.00", "-0.10 to 0.10")
    assert "the 25 of 30 columns" in part.caption
    assert "1,000 held-out rows" in part.caption
    assert "25 of" not in importance_part(found, 25)[0].caption


def test_rises_of_the_rmse_have_the_decimals_of_the_largest() -> None:
    columns = [{"column": "a", "nll": rise(9.0), "rmse": rise(23.456)}]
    columns.append({"column": "b", "nll": rise(0.0), "rmse": rise(-0.00004)})
    found = {"rows": 60, "repeats": 5, "weight_samples": 1, "level": 0.95, "columns": columns}
    part, figures = importance_part(found, 2)
    assert list(figures) == ["importance_nll", "importance_rmse"]
    assert [row[3:] for row in part.tables[0].rows] == [
        ("23.46", "23.36 to 23.56"),
        ("0.00", "-0.10 to 0.10"),
    ]


def level_grid(labels: tuple[str, ...]) -> Grid:
    return Grid("k", "level", (0,), np.zeros((len(labels), 1), np.float32), np.empty(0), labels)


def test_effects_of_two_classes_are_of_the_rarer_one() -> None:
    shares = torch.tensor([0.2, 0.6]).expand(3, 2)
    effect = PartialDependence(torch.stack((1 - shares, shares), -1), torch.zeros(4, 2, 2))
    part, figures = effect_part([(level_grid(("x", "y")), effect)], "t", ["a", "b"], [10, 3])
    (ax,) = figures["effect_1"].axes
    assert ax.get_xlabel() == "probability of b"
    assert ax.lines[0].get_xdata().tolist() == pytest.approx([0.2, 0.6])
    assert "The mean predicted probability of b over 4 held-out rows" in part.caption
    assert "80 % of the rows" in part.caption


def test_effects_on_many_classes_are_of_those_that_change_most() -> None:
    samples = torch.zeros(5, 2, 6)
    samples[:, 1] = torch.tensor([0.0, 0.3, 0.1, 0.4, 0.01, 0.2])
    effect = PartialDependence(samples, torch.zeros(4, 2, 6))
    names = list("abcdef")
    part, figures = effect_part([(level_grid(("x", "y")), effect)], "t", names, [1] * 6)
    (legend,) = figures["effect_1"].legends
    assert [text.get_text() for text in legend.get_texts()] == ["b", "c", "d", "f"]
    assert "the 4 classes" in part.caption


# -------------------------------------------------------------------------------------- whole runs


def mixed(rows: int = 700) -> pd.DataFrame:
    """A table whose target depends on a date, a category with gaps and a number, not on another."""
    generator = np.random.default_rng(0)
    days = pd.date_range("2020-01-01", periods=rows, freq="2D")
    city = generator.choice(["Oslo", "Rome", "Ulm"], rows)
    size = generator.normal(50.0, 10.0, rows)
    value = 6.0 * np.sin(2 * np.pi * days.day_of_year / 365.25)
    value = value + np.where(city == "Rome", 5.0, 0.0) + 0.4 * size + generator.normal(size=rows)
    city[generator.random(rows) < 0.1] = ""
    noise = generator.normal(size=rows)
    return pd.DataFrame(
        {"day": days, "city": city, "size": size, "noise": noise, "load": 1000.0 * value}
    )


def kinds(rows: int = 800) -> pd.DataFrame:
    """A table with three classes, 100 : 20 : 1."""
    generator = np.random.default_rng(1)
    kind = generator.choice(3, rows, p=np.array([100, 20, 1]) / 121)
    kind[:8] = 2
    x = generator.normal(size=(rows, 2))
    x[:, 0] += 2.0 * kind
    names = np.array(["usual", "seldom", "rare"])[kind]
    return pd.DataFrame({"x": x[:, 0], "noise": x[:, 1], "kind": names})


def trained(place: Path, table: pd.DataFrame, *options: str) -> Run:
    table.to_csv(place / "table.csv", index=False)
    target = table.columns[-1]
    command = ["train", place / "table.csv", "--target", target, "--out", place / "run"]
    result = bayesify(*command, *QUICK, *(options or SAMPLES))
    assert result.code == 0, result.err
    return Run.open(place / "run")


@pytest.fixture(scope="module", params=["numbers", "classes"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    place = tmp_path_factory.mktemp(request.param)
    return trained(place, mixed() if request.param == "numbers" else kinds())


NETWORK = ["learning_curves", "snr", "weight_densities", "weight_posteriors", "pruning"]


@pytest.mark.slow
def test_the_report_begins_with_the_result_and_ends_with_the_network(run: Run) -> None:
    page = Page(run.folder / "report.html")
    common = ["importance", "effects", "risk_coverage", "measures", *NETWORK]
    own = (
        ["predictions", "intervals", "residuals"]
        if run.config.task == "regression"
        else ["confusion", "classes", "reliability"]
    )
    parts = [name for name in page.ids() if not name.startswith("figure-")]
    assert parts == [
        "result",
        "notes",
        "key-numbers",
        *own,
        *common,
        "command",
        "config",
    ]
    images = [attrs for tag, attrs in page.tags if tag == "img"]
    assert len(images) == len(list(run.folder.glob("*.png")))
    for attrs in images:
        assert attrs["alt"]


@pytest.mark.slow
def test_one_number_for_one_thing(run: Run) -> None:
    metrics, page = run.metrics(), Page(run.folder / "report.html").text
    test, same = metrics["test"], metrics["baseline"]
    key = "rmse" if run.config.task == "regression" else "error_predictive"
    shown = shown_number(test[key]) if key == "rmse" else f"{test[key]:.2f}"
    other = same[key.removesuffix("_predictive")]
    assert page.count(shown) >= 4  # sentence, table, tile, test and training data
    assert (
        shown_number(other) if key == "rmse" else f"{other:.2f} %".replace(" ", "\u00a0")
    ) in page
    assert test["nll"] < same["nll"]
    for level in (50, 80, 90, 95) if key == "rmse" else ():
        assert f"{test[f'coverage_{level}']:.1f}\n" in page
    pruning = json.loads((run.folder / "pruning.json").read_text())
    if key == "rmse":
        # Errors over epochs and of pruning are in the unit of the target.
        data = run.load_data()
        assert isinstance(data, TableData)
        whole = shown_number(math.sqrt(pruning[0]["error_mean_weights"]) * data.scale)
        assert whole == shown_number(test["rmse_mean_weights"])
        assert "RMSE, mean weights\n" in page


@pytest.mark.slow
def test_importance_and_baseline_are_stored_and_the_same_again(run: Run) -> None:
    metrics = run.metrics()
    data, bnn = run.load_data(), run.load_module()
    assert isinstance(data, TableData)
    assert importance(run, data, bnn) == metrics["importance"]
    found = metrics["importance"]
    names = [each["column"] for each in found["columns"]]
    assert run.table is not None
    assert sorted(names) == sorted(column.name for column in run.table.columns)
    rises = [each["nll"]["rise"] for each in found["columns"]]
    assert rises == sorted(rises, reverse=True)
    by_name = {each["column"]: each for each in found["columns"]}
    loss = "rmse" if run.config.task == "regression" else "error"
    for key in ("nll", loss):
        assert by_name["noise"][key]["low"] <= 0.0 <= by_name["noise"][key]["high"]
    relevant = ("day", "city", "size") if loss == "rmse" else ("x",)
    assert all(by_name[name]["nll"]["low"] > 0.0 for name in relevant)
    assert found["rows"] == len(data.test_inputs)
    # An older version's run has neither; writing its report again adds them.
    path = run.folder / "metrics.json"
    path.write_text(
        json.dumps({k: v for k, v in metrics.items() if k not in ("baseline", "importance")})
    )
    said = as_json("report", run.folder)
    assert said == {
        "report": str(run.folder / "report.html"),
        "baseline": metrics["baseline"],
        "importance": found,
    }
    assert {**run.metrics()} == metrics


@pytest.mark.slow
def test_effects_are_in_the_unit_of_the_target(run: Run) -> None:
    data, bnn = run.load_data(), run.load_module()
    assert isinstance(data, TableData)
    effects = column_effects(run, data, bnn, run.metrics()["importance"]["columns"])
    names = [grid.name for grid, _ in effects]
    assert not any("noise" in name for name in names)
    by_name = dict(zip(names, (effect for _, effect in effects), strict=True))
    if run.config.task == "regression":
        assert {"size", "city", "day", "day, day of the week"} == set(names)
        slope = (
            by_name["size"].mean.flatten().diff()
            / np.diff(next(grid for grid, _ in effects if grid.name == "size").axis).mean()
        )
        assert float(slope.mean()) == pytest.approx(400.0, rel=0.25)
        (levels,) = (grid.labels for grid, _ in effects if grid.name == "city")
        means = dict(zip(levels, by_name["city"].mean.flatten().tolist(), strict=True))
        assert set(levels) == {"Oslo", "Rome", "Ulm", "(missing)"}
        assert means["Rome"] - means["Oslo"] == pytest.approx(5000.0, rel=0.25)
    else:
        assert names == ["x"]
        torch.testing.assert_close(
            by_name["x"].mean.sum(-1), torch.ones(len(by_name["x"].mean)), atol=1e-4, rtol=0.0
        )


@pytest.mark.slow
def test_a_pruned_network_has_importance_and_effects(run: Run) -> None:
    data, bnn = run.load_data(), prune(run.load_module(), 0.8)
    assert isinstance(data, TableData)
    found = importance(run, data, bnn)
    assert found is not None
    assert column_effects(run, data, bnn, found["columns"])
    none = importance(run, data, prune(bnn, 1.0))
    assert none is not None
    assert all(each["nll"] == {"rise": 0.0, "low": 0.0, "high": 0.0} for each in none["columns"])
    assert column_effects(run, data, bnn, none["columns"]) == []


@pytest.mark.slow
def test_a_plain_network_has_effects_without_bands(tmp_path: Path) -> None:
    run = trained(tmp_path, mixed(300), "--baseline", "sgd")
    assert run.metrics()["importance"]["weight_samples"] == 1
    text = Page(run.folder / "report.html").text
    assert "The mean predicted load" in text
    assert (
        "weight samples" not in text.partition("What the columns do")[2].partition("Error when")[0]
    )


@pytest.mark.slow
def test_many_columns_are_measured_in_two_steps(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(400, 70))
    table = pd.DataFrame(x, columns=[f"x{k}" for k in range(70)])
    table["y"] = 3.0 * x[:, 66] + generator.normal(size=400)
    with quick_runs():  # without the figures of the network
        run = trained(tmp_path, table)
    found = run.metrics()["importance"]["columns"]
    assert len(found) == 50
    assert found[0]["column"] == "x66"
    assert "the 50 of 70 columns" in Page(run.folder / "report.html").text


@pytest.mark.slow
def test_a_table_of_few_rows_has_no_importance(tmp_path: Path) -> None:
    with quick_runs():
        run = trained(tmp_path, mixed(30))
    assert run.metrics()["importance"] is None
    assert "importance" not in Page(run.folder / "report.html").ids()


def test_targets_are_in_their_own_unit() -> None:
    data = number_data([6.0, 14.0], [10.0, 13.0])
    assert targets_in_units(data).tolist() == [[10.0], [13.0]]
