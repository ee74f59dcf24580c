"""Tables of counts, of censored numbers and of ordered classes, by every command."""

from __future__ import annotations

import csv
import json
import math
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from tests.app.cli.test_cli import as_json, bayesify, quick_runs
from tests.app.cli.test_errors import check_refused
from tests.app.cli.test_tables import QUICK

from bayesify.app.runs import Run, RunConfig
from bayesify.app.runs.measure import FEW_SAMPLES
from bayesify.app.trained_table import open_run
from bayesify.distributions.likelihoods import (
    CensoredGaussianLikelihood,
    Likelihood,
    NegativeBinomialLikelihood,
    OrdinalLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)
from bayesify.tabular.table_data import TableData

TARGETS = ("visits", "dose", "grade")
KINDS: dict[str, tuple[str, list[str], type[Likelihood]]] = {
    "poisson": ("visits", ["--likelihood", "poisson"], PoissonLikelihood),
    "negative-binomial": (
        "visits",
        ["--likelihood", "negative-binomial"],
        NegativeBinomialLikelihood,
    ),
    "student-t": ("dose", ["--likelihood", "student-t"], StudentTLikelihood),
    "censored": (
        "dose",
        ["--likelihood", "censored", "--censored-above", "8", "--censored-below", "-1"],
        CensoredGaussianLikelihood,
    ),
    "ordered": ("grade", ["--ordered", "low,middle,high"], OrdinalLikelihood),
}

pytestmark = pytest.mark.usefixtures("quick")


def table(rows: int = 80) -> str:
    rng = np.random.default_rng(0)
    x, z = rng.normal(size=(2, rows))
    visits = rng.poisson(np.exp(1.0 + 0.6 * x))
    dose = np.clip(5.0 + 3.0 * x + rng.normal(size=rows), -1.0, 8.0)
    grade = np.array(["low", "middle", "high"])[np.digitize(x, [-0.5, 0.5])]
    columns = zip(x, z, visits, dose, grade, strict=True)
    return "x,z,visits,dose,grade\n" + "".join(
        f"{a:.4f},{b:.4f},{c},{d:.4f},{e}\n" for a, b, c, d, e in columns
    )


@pytest.fixture(scope="module")
def csv_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("likelihoods") / "table.csv"
    path.write_text(table())
    return path


def arguments(path: Path, target: str, options: list[str], out: Path) -> list[str]:
    drop = [word for name in TARGETS if name != target for word in ("--drop", name)]
    return [
        "train",
        *map(str, (path, "--target", target, *options, *drop, "--out", out, *QUICK)),
    ]


@pytest.fixture(scope="module", params=KINDS)
def run(
    request: pytest.FixtureRequest, csv_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    target, options, _ = KINDS[request.param]
    # A folder of its own each time: a worker that takes over tests may come back to a kind.
    out = tmp_path_factory.mktemp("run") / request.param
    with quick_runs():
        said = bayesify(*arguments(csv_file, target, options, out))
    assert said.code == 0, said.err
    (out / "said.txt").write_text(said.err)
    return out


def test_every_command_knows_the_likelihood(run: Path, csv_file: Path, tmp_path: Path) -> None:
    target, _, kind = KINDS[run.name]
    bnn = Run.open(run).load_module()
    assert type(bnn.likelihood) is kind
    metrics = json.loads((run / "metrics.json").read_text())
    assert np.isfinite(metrics["test"]["nll"])
    assert metrics["baseline"]["nll"] > 0.0
    if "rmse" in metrics["baseline"]:
        data = Run.open(run).load_data()
        assert isinstance(data, TableData)
        errors = data.numbers(data.test_targets) - metrics["baseline"]["prediction"]
        rmse = errors.double().square().mean().sqrt().item()
        assert metrics["baseline"]["rmse"] == pytest.approx(rmse, rel=1e-5)
    assert as_json("evaluate", run)["test"] == metrics["test"]
    whole = as_json("evaluate", run, csv_file)
    assert whole["rows_measured"] == 80
    # All rows are the 64 of training and the 16 held out, the former measured with fewer samples.
    parts = as_json("evaluate", run, "--samples", 3)
    assert parts["test_samples"] == parts["train_samples"] == 3
    mixed = 0.8 * parts["train"]["nll"] + 0.2 * parts["test"]["nll"]
    assert whole["metrics"]["nll"] == pytest.approx(mixed, rel=1e-3)
    pruned = as_json("prune", run, "--fractions", "0.5")["rows"]
    assert all(np.isfinite(row["error_predictive"]) for row in pruned)
    assert bayesify("report", run).code == 0
    assert (run / "report.html").exists()

    out = tmp_path / "predictions.csv"
    summary = as_json("predict", run, csv_file, "--out", out)
    assert summary["rows"] == 80
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if target == "grade":
        columns = ["p(low)", "p(middle)", "p(high)"]
        assert [name for name in rows[0] if name.startswith("p(")] == columns
        for row in rows:
            probabilities = [float(row[name]) for name in columns]
            assert sum(probabilities) == pytest.approx(1.0, abs=1e-5)
            assert row["prediction"] == columns[int(np.argmax(probabilities))][2:-1]
    else:
        for row in rows:
            low, mean, high = (float(row[name]) for name in ("lower_95", "mean", "upper_95"))
            assert low <= mean <= high
            assert float(row["std"]) ** 2 == pytest.approx(float(row["total"]), rel=1e-4)
            assert target != "visits" or (low >= 0.0 and low % 1.0 == 0.0)
    found = open_run(run).predict(csv_file)
    assert found.iloc[:, 1].astype(str).tolist()[0][:4] == list(rows[0].values())[1][:4]
    assert bayesify("predict", run, csv_file, "--out", tmp_path / "c.csv", "--conformal", "--level",
                    "0.8").code == 0  # fmt: skip
    if target == "visits":
        with (tmp_path / "c.csv").open(newline="") as file:
            ends = [
                float(row[f"{end}_80"])
                for row in csv.DictReader(file)
                for end in ("lower", "upper")
            ]
        assert all(end >= 0.0 and end % 1.0 == 0.0 for end in ends)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["poisson", "ordered"])
def test_an_export_tells_where_it_has_no_intervals(
    kind: str, csv_file: Path, tmp_path: Path
) -> None:
    target, options, _ = KINDS[kind]
    assert bayesify(*arguments(csv_file, target, options, tmp_path / "run")).code == 0
    said = bayesify("export", tmp_path / "run", "--out", tmp_path / "net.onnx", "--samples", "2")
    assert said.code == 0, said.err
    assert ("no quantiles, hence no intervals" in said.err) == (kind == "poisson")


def test_the_network_as_it_is_has_one_error(run: Path) -> None:
    """The pruning table begins with the errors of metrics.json, of recorded numbers too."""
    own = Run.open(run)
    test, table = own.metrics()["test"], own.table
    first = json.loads((run / "pruning.json").read_text())[0]
    said = as_json("prune", run, "--fractions", "0.5")["rows"][0]
    keys = {"error_predictive": "rmse", "error_mean_weights": "rmse_mean_weights"}
    assert table is not None
    for key, of_numbers in keys.items():
        if "rmse" in test:
            assert math.sqrt(first[key]) * table.target.scale == pytest.approx(test[of_numbers])
        else:
            assert first[key] == pytest.approx(test[key])
    # The errors of numbers are those of as many weight samples in all rows.
    samples = 3 if "rmse" in test else FEW_SAMPLES
    options = ("--fractions", "0.1", "--samples", samples)
    again = as_json("prune", run, *options)["rows"][1]["error_predictive"]
    assert json.loads((run / "pruning.json").read_text())[1]["error_predictive"] == again
    at_mean = "rmse_mean_weights" if "rmse" in test else "error_mean_weights"
    assert said[at_mean] == pytest.approx(test[at_mean])
    if "rmse" in test:  # by the same rule without --samples
        assert said["rmse"] == pytest.approx(test["rmse"])


def test_the_report_shows_no_setting_that_does_nothing(run: Path) -> None:
    page = (run / "report.html").read_text(encoding="utf-8")
    names = set(re.findall(r'<th scope="row">(.*?)</th>', page.partition('id="config"')[2]))
    assert names >= {"epochs", "target", "command"}
    assert not names & set(Run.open(run).config.idle())


def test_a_run_is_resumed_and_repeated(run: Path, csv_file: Path, tmp_path: Path) -> None:
    target, options, _ = KINDS[run.name]
    before = (run / "metrics.json").read_text()
    same = arguments(csv_file, target, options, run)
    assert bayesify(*same, "--resume").code == 0
    # All but the time.
    ours, theirs = json.loads(before), json.loads((run / "metrics.json").read_text())
    assert ours["test"] == theirs["test"]
    other = ["--likelihood", "gaussian"] if target != "grade" else ["--ordered", "high,low,middle"]
    check_refused(bayesify(*arguments(csv_file, target, other, run), "--resume"), "was asked for")
    # The command in config.json makes the same run.
    words = shlex.split(json.loads((run / "config.json").read_text())["command"])[1:]
    words[words.index("--out") + 1] = str(tmp_path / "again")
    assert bayesify(*words).code == 0
    again = json.loads((tmp_path / "again" / "metrics.json").read_text())
    assert again["test"] == ours["test"]


def test_it_is_told_what_the_target_is(run: Path) -> None:
    told = {
        "poisson": "target visits: a count, likelihood poisson",
        "negative-binomial": "a count, likelihood negative-binomial",
        "student-t": "target dose: a number, likelihood student-t",
        "censored": "targets are at a limit",
        "ordered": "3 ordered classes, low < middle < high",
    }
    text = (run / "said.txt").read_text()
    assert told[run.name] in text
    assert "counts something" not in text


def test_counts_are_hinted_at_and_not_chosen(csv_file: Path, tmp_path: Path) -> None:
    said = bayesify(*arguments(csv_file, "visits", [], tmp_path / "run"))
    assert said.code == 0
    assert said.err.count("if visits counts something, use --likelihood poisson") == 1
    assert Run.open(tmp_path / "run").config.likelihood == "gaussian"
    said = bayesify(*arguments(csv_file, "dose", [], tmp_path / "dose"))
    assert "counts something" not in said.err


def test_censored_targets_are_measured_as_they_are_recorded(csv_file: Path) -> None:
    out = csv_file.parent / "censored"
    if not out.exists():
        pytest.skip("the run is made by the other tests")
    data = Run.open(out).load_data()
    assert isinstance(data, TableData)
    bounds = data.train_targets
    assert bounds.shape[1:] == (1, 2)
    numbers = data.numbers(bounds).flatten()
    at_limit = bounds[:, 0, 0] != bounds[:, 0, 1]
    assert 0 < int(at_limit.sum()) < len(bounds)
    assert set(numbers[at_limit].round(decimals=4).tolist()) <= {-1.0, 8.0}
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["test"]["width_95"] <= 9.0


@pytest.mark.parametrize(
    ("target", "options", "part"),
    [
        ("dose", "--likelihood poisson", "must hold counts"),
        ("visits", "--likelihood censored", "needs --censored-below"),
        ("dose", "--censored-above 3", "applies only to --likelihood censored"),
        ("dose", "--likelihood censored --censored-above nan", "must be finite"),
        (
            "dose",
            "--likelihood censored --censored-above 1 --censored-below 2",
            "below the upper one",
        ),
        ("dose", "--likelihood censored --censored-above -5", "between its limits"),
        ("visits", "--likelihood poisson --noise learned", "noise would do nothing"),
        ("visits", "--likelihood normal", "must be one of gaussian, student-t"),
        ("visits", "--likelihood poisson --task classification", "would do nothing"),
        ("grade", "--likelihood poisson", "must hold numbers for regression"),
        ("grade", "--ordered low,high", "must have each class"),
        ("grade", "--ordered low,middle,high,low", "must have each class"),
        ("grade", "--ordered low,middle,top", "must have each class"),
        ("grade", "--ordered=", "must have each class"),
        ("grade", '--ordered "low,middle,high', "in quotation marks those that hold a comma"),
        ("visits", "--ordered low,high --task regression", "ordered would do nothing"),
        ("x", "--ordered 1,2", "and 70 more, got 1,2; leave --ordered out for numbers"),
    ],
)
def test_wrong_options(
    csv_file: Path, tmp_path: Path, target: str, options: str, part: str
) -> None:
    said = bayesify(*arguments(csv_file, target, options.split(), tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    check_refused(said, part)


def test_a_class_may_hold_a_comma(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    classes = ('"1,000-5,000"', "0-999", '"more, much"')
    path.write_text("x,pay\n" + "".join(f"{i % 7},{classes[i % 3]}\n" for i in range(60)))
    wrong = ["train", path, "--target", "pay", "--out", tmp_path / "run", *QUICK, "--ordered"]
    check_refused(bayesify(*wrong, "0-999,1"), 'are 0-999,"1,000-5,000","more, much", got 0-999,1')
    said = bayesify(*wrong, f"0-999,{classes[0]}", "--ordered", classes[2])
    assert said.code == 0, said.err
    run = Run.open(tmp_path / "run")
    assert run.class_names == ("0-999", "1,000-5,000", "more, much")
    again = bayesify(*shlex.split(run.command)[1:], "--resume")
    assert again.code == 0, again.err


def test_counts_of_new_rows_are_checked(run: Path, tmp_path: Path) -> None:
    if KINDS[run.name][0] != "visits":
        return
    (tmp_path / "new.csv").write_text("x,z,visits\n0.5,0.5,1.5\n")
    check_refused(bayesify("evaluate", run, tmp_path / "new.csv"), "must hold counts", "1.5")


def test_images_have_no_likelihood() -> None:
    with pytest.raises(ValueError, match="likelihood would do nothing"):
        RunConfig.of("mnist", likelihood="poisson")
