"""``bayesify train FILE --target NAME`` with a table, and every command on its run."""

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from tests.app.cli.test_cli import Said, as_json, bayesify, quick_runs
from tests.app.cli.test_errors import check_refused
from tests.tabular.test_training_table import messy
from tests.training.test_resume import timeless

from bayesify.app.cli.epoch_table import EpochTable
from bayesify.app.runs import Run

QUICK = ["--epochs", "2", "--passes", "2", "--hidden", "4", "--test-samples", "3"]

pytestmark = pytest.mark.usefixtures("quick")


def classes(rows: int = 60) -> str:
    """The table of :func:`messy` with a class for its target."""
    lines = messy(rows).splitlines()
    body = [
        f"{line.rpartition(',')[0]},{('low', 'high')[i % 3 == 0]}" for i, line in enumerate(lines)
    ]
    return "\n".join([lines[0], *body[1:]]) + "\n"


TABLES = {"regression": messy(), "classification": classes()}


@pytest.fixture(scope="module", params=TABLES)
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table and the run ``run`` made from it, which no test changes."""
    place = tmp_path_factory.mktemp("tables")
    said = trained(place, TABLES[request.param])
    (place / "said.txt").write_text(said.err)
    return place


def trained(place: Path, table: str) -> Said:
    """Write ``table.csv`` and train ``run`` from it."""
    (place / "table.csv").write_text(table)
    with quick_runs():
        said = bayesify("train", place / "table.csv", "--target", "price", *_out(place), *QUICK)
    assert said.code == 0, said.err
    return said


def _out(place: Path) -> list[str]:
    return ["--out", str(place / "run")]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_folder_holds_a_run(finished: Path) -> None:
    run = finished / "run"
    names = {path.name for path in run.iterdir()}
    assert names >= {
        "config.json",
        "table.json",
        "metrics.json",
        "history.csv",
        "report.html",
        "checkpoint.safetensors",
    }
    metrics = json.loads((run / "metrics.json").read_text())
    task = json.loads((run / "config.json").read_text())["settings"]["task"]
    expected = (
        {"error_mean_weights", "error_predictive", "nll", "brier", "ece"}
        if task == "classification"
        else {"rmse", "rmse_mean_weights", "nll", "crps", "coverage_95", "width_95"}
    )
    assert expected <= metrics["test"].keys()
    assert expected <= metrics["train"].keys()
    assert (metrics["epochs"], metrics["passes"]) == (2, 2)
    assert len(rows_of(run / "history.csv")) == 2
    page = (run / "report.html").read_text()
    for part in ("table.csv: price", "held out by seed 0", "not used: const", "table.csv --out"):
        assert part in page


def test_what_was_found_and_what_it_costs_are_reported(finished: Path) -> None:
    said = (finished / "said.txt").read_text()
    for part in (
        "table.csv: 48 rows for training, 12 held out by seed 0",
        "1 category, 1 number, 1 flag, 1 date",
        "not used: id, for it numbers the rows",
        "not used: const, for it is '7' in every row",
        "2 epochs (2 passes each) of about",
    ):
        assert part in said
    assert re.search(r"target price: (a number \(regression\)|2 classes \(classification\))", said)


@pytest.mark.parametrize("command", ["evaluate", "prune", "inspect", "report"])
def test_every_command_works_on_it(finished: Path, tmp_path: Path, command: str) -> None:
    run = Path(shutil.copytree(finished / "run", tmp_path / "run"))
    found = as_json(command, run)
    if command == "evaluate":
        assert found["test"] == json.loads((run / "metrics.json").read_text())["test"]
    if command == "prune":
        assert found["rows"][0]["fraction"] == 0.0
    if command == "inspect":
        assert "linear.weight" in [row["name"] for row in found["parameters"]]


def test_one_row_is_no_rows(finished: Path, tmp_path: Path) -> None:
    lines = (finished / "table.csv").read_text().splitlines(keepends=True)
    (tmp_path / "new.csv").write_text("".join(lines[:2]))
    said = bayesify("predict", finished / "run", tmp_path / "new.csv", "--out", tmp_path / "p.csv")
    assert "\n1 row predicted\n" in f"\n{said.err}"


def test_pruning_shows_errors_in_the_unit_of_the_target(finished: Path) -> None:
    run = Run.open(finished / "run")
    assert run.table is not None
    found = as_json("prune", finished / "run", "--fractions", "0", "--samples", "3")
    assert found["samples"] == 3
    row = found["rows"][0]
    said = bayesify("prune", finished / "run", "--fractions", "0", "--samples", "3")
    assert "\naveraged over 3 weight samples\n" in said.out
    if run.class_names:
        assert "error, averaged %" in said.out
        assert "rmse" not in row
        return
    metrics = run.metrics()["test"]
    assert row["rmse_mean_weights"] == pytest.approx(metrics["rmse_mean_weights"], rel=1e-4)
    assert row["rmse"] == pytest.approx(run.table.target.scale * row["error_predictive"] ** 0.5)
    assert "RMSE, averaged" in said.out
    assert f"{row['rmse_mean_weights']:.5g}" in said.out


def test_predictions_row_by_row(finished: Path, tmp_path: Path) -> None:
    """They agree with the library's own, and need nothing but the folder."""
    table = tmp_path / "new.csv"
    table.write_text((finished / "table.csv").read_text())
    shutil.copytree(finished / "run", tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["settings"]["dataset"] = str(tmp_path / "gone.csv")
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    out = tmp_path / "out.csv"
    said = as_json("predict", tmp_path / "run", table, "--out", out, "--samples", "5")
    assert said["rows"] == 60
    assert said["weight_samples"] == 5
    rows = rows_of(out)
    assert [row["row"] for row in rows] == [str(i + 1) for i in range(60)]
    assert [row["id"] for row in rows] == [str(i + 1) for i in range(60)]
    assert rows[3]["name"] == "person 3"
    run = Run.open(finished / "run")
    data = run.load_data()
    predictive = run.load_module().predict(data.test_inputs, 5)
    assert run.table is not None
    numbers = {
        key: np.array([float(r[key]) for r in rows]) for key in ("total", "aleatoric", "epistemic")
    }
    assert numbers["total"] == pytest.approx(numbers["aleatoric"] + numbers["epistemic"], 1e-4)
    target = run.table.target
    factor = target.scale**2 if target.task == "regression" else 1.0
    held = {float(value) * factor for value in predictive.total.flatten()}
    assert all(np.isclose(numbers["total"], value, rtol=1e-4).any() for value in held)
    if target.task == "regression":
        for row in rows:
            low, mean, high = (float(row[key]) for key in ("lower_95", "mean", "upper_95"))
            assert low < mean < high
            assert float(row["std"]) ** 2 == pytest.approx(float(row["total"]))
        assert said["level"] == 0.95
    else:
        for row in rows:
            probs = {name: float(row[f"p({name})"]) for name in target.classes}
            assert sum(probs.values()) == pytest.approx(1.0, abs=1e-6)
            assert row["prediction"] == max(probs, key=lambda name: probs[name])


def test_chunks_of_new_rows_make_no_difference(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("predict", finished / "run", finished / "table.csv", "--out")
    bayesify(*arguments, tmp_path / "whole.csv")
    monkeypatch.setattr("bayesify.tabular.files.table_file.CHUNK_ROWS", 7)
    monkeypatch.setattr("bayesify.app.runs.predict._CHUNK_ROWS", 3)
    bayesify(*arguments, tmp_path / "chunks.csv")
    whole, chunks = rows_of(tmp_path / "whole.csv"), rows_of(tmp_path / "chunks.csv")
    for one, other in zip(whole, chunks, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            try:
                assert float(one[key]) == pytest.approx(float(other[key]), rel=1e-4, abs=1e-6)
            except ValueError:
                assert one[key] == other[key]


def test_new_rows_far_outside_are_flagged_and_reported(finished: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.csv"
    new.write_text(
        "sold,when,city,size,colour,price\nyes,2024-03-05,Rome,0.1,red,?\n"
        "yes,2024-03-05,Rome,1e40,red,1\nno,2024-03-05,Paris,1e9,red,\n"
    )
    said = bayesify("predict", finished / "run", new, "--out", tmp_path / "p.csv")
    assert said.code == 0
    assert (
        "warning: 2 of 3 rows lie far outside the training data, most often in column 'size'"
        in (said.err)
    )
    assert "the rule: a row lies outside if" in said.err
    assert "note: columns that the training table did not have are ignored: 'colour'" in said.err
    if Run.open(finished / "run").config.task == "regression":
        assert "note: rows that are not measured: 2 without a target" in said.out
    else:  # the only target is 1
        assert "note: nothing is measured: the column 'price' must hold levels" in said.err
    rows = rows_of(tmp_path / "p.csv")
    assert [row["outside_training"] for row in rows] == ["false", "true", "true"]
    assert [row["outside_column"] for row in rows][:2] == ["", "size"]


def test_rows_outside_are_predicted_with_less_trust(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished / "run", run)
    table = (run / "table.json").read_text()
    lines = (finished / "table.csv").read_text().splitlines()
    size = lines[0].split(",").index("size")
    far = [*lines[1].split(",")[:size], "9e9", *lines[1].split(",")[size + 1 :]]
    new = tmp_path / "new.csv"
    new.write_text("\n".join([*lines[:2], ",".join(far)]) + "\n")

    def predicted(name: str) -> list[dict[str, str]]:
        out = tmp_path / f"{name}.csv"
        assert bayesify("predict", run, new, "--out", out, "--samples", "20").code == 0
        return rows_of(out)

    widened = predicted("widened")
    # A run of an earlier version does not tell what its targets alone tell, and has no digest.
    old = {key: each for key, each in json.loads(table).items() if key != "document_sha256"}
    old["target"]["marginal"] = []
    (run / "table.json").write_text(json.dumps(old))
    plain = predicted("plain")
    assert widened[0] == plain[0]
    assert float(widened[1]["epistemic"]) > float(plain[1]["epistemic"]) + 0.01
    if "std" in plain[1]:
        spread = json.loads(table)["target"]["scale"]
        more = float(widened[1]["total"]) - float(plain[1]["total"])
        assert more == pytest.approx(spread**2, rel=1e-3)
        assert float(widened[1]["mean"]) == pytest.approx(float(plain[1]["mean"]), rel=1e-6)
    else:
        shares = json.loads(table)["target"]["marginal"]
        assert float(widened[1]["p(high)"]) == pytest.approx(
            (float(plain[1]["p(high)"]) + shares[0]) / 2.0, rel=1e-4
        )


def test_a_level_of_one_half(finished: Path, tmp_path: Path) -> None:
    command = ("predict", finished / "run", finished / "table.csv", "--out", tmp_path / "p")
    assert as_json(*command).get("level", 0.95) == 0.95
    options = ("--force", "--level", "0.5")
    if Run.open(finished / "run").class_names:
        said = bayesify(*command, *options)
        check_refused(said, "level would do nothing here: classes have no intervals", "--conformal")
        assert as_json(*command, *options, "--conformal")["level"] == 0.5
        return
    assert as_json(*command, *options)["level"] == 0.5
    assert "lower_50" in rows_of(tmp_path / "p")[0]


def test_the_command_in_the_report_makes_the_same_run(finished: Path, tmp_path: Path) -> None:
    run = Run.open(finished / "run")
    words = shlex.split(run.command)[1:]
    words[words.index("--out") + 1] = str(tmp_path / "again")
    assert bayesify(*words).code == 0
    again = json.loads((tmp_path / "again" / "metrics.json").read_text())
    assert timeless(again) == timeless(run.metrics())


def test_it_resumes_where_it_stopped(finished: Path, tmp_path: Path) -> None:
    """Stopped after one epoch, it gives what the uninterrupted run gave."""
    start = ["train", str(finished / "table.csv"), "--target", "price", "--out", tmp_path / "run"]

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EpochTable, "on_epoch", stop)
        said = bayesify(*start, *QUICK, "--resume")
    assert said.code == 130
    assert "nothing to resume" in said.err
    assert "stopped; resume with: bayesify train" in said.err
    check_refused(bayesify(*start, "--resume", "--epochs", "9"), "is 2, but 9 was asked for")
    said = bayesify(*start, "--resume")
    assert said.code == 0, said.err
    assert "resuming after epoch 1 of 2" in said.err
    for name, value in timeless(Run.open(finished / "run").metrics()).items():
        assert Run.open(tmp_path / "run").metrics()[name] == value


@pytest.mark.parametrize(
    "options",
    [
        ["--noise", "input-dependent"],
        ["--baseline", "sgd"],
        ["--prior", "laplace", "--prior-std", "0.5", "--estimator", "flipout"],
        ["--drop", "city", "--drop", "when", "--keep", "id"],
        [
            "--limit",
            "30",
            "--test-fraction",
            "0.5",
            "--seed",
            "7",
            "--passes",
            "1",
            "--kl-weighting",
            "geometric",
            "--batch-size",
            "16",
        ],
        ["--task", "classification", "--target", "sold"],
    ],
    ids=str,
)
def test_options(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "t [1].csv").write_text(messy())
    start = ["train", str(tmp_path / "t [1].csv"), "--target", "price", *_out(tmp_path), *QUICK]
    short = [word for word in start if word != "--test-samples" or "--baseline" not in options]
    if "--baseline" in options:
        short.remove("3")
    said: Said = bayesify(*short, *options)
    assert said.code == 0, said.err
    run = Run.open(tmp_path / "run")
    assert run.table is not None
    out = tmp_path / "p.csv"
    assert bayesify("predict", tmp_path / "run", tmp_path / "t [1].csv", "--out", out).code == 0
    assert len(rows_of(out)) == 60
    if "--drop" in options:
        assert [column.name for column in run.table.columns] == ["id", "size", "sold"]
        assert "--drop city --drop when --keep id" in run.command


def test_a_parquet_file_trains_the_same_network_and_is_predicted(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(messy())
    pd.read_csv(tmp_path / "t.csv", parse_dates=["when"]).to_parquet(tmp_path / "t.parquet")
    answers = []
    for name in ("t.csv", "t.parquet"):
        run, out = tmp_path / f"run of {name}", tmp_path / f"p of {name}.csv"
        said = bayesify("train", tmp_path / name, "--target", "price", "--out", run, *QUICK)
        assert said.code == 0, said.err
        assert bayesify("evaluate", run).code == 0
        assert bayesify("predict", run, tmp_path / name, "--out", out).code == 0
        answers.append(rows_of(out))
    assert answers[0] == answers[1]


def test_predictions_far_from_0_keep_their_digits(tmp_path: Path) -> None:
    rows = [f"{i / 7},{1e9 + 1e-4 * ((i * 37) % 60):.6f}" for i in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["x,y", *rows]) + "\n")
    said = bayesify("train", tmp_path / "t.csv", "--target", "y", *_out(tmp_path), *QUICK)
    assert said.code == 0, said.err
    out = tmp_path / "p.csv"
    assert bayesify("predict", tmp_path / "run", tmp_path / "t.csv", "--out", out).code == 0
    for row in rows_of(out):
        std = float(row["std"])
        assert 2.0 * std < float(row["upper_95"]) - float(row["lower_95"]) < 6.0 * std


@pytest.mark.parametrize("task", TABLES)
def test_no_weight_of_a_baseline_is_called_random(tmp_path: Path, task: str) -> None:
    table = tmp_path / "table.csv"
    table.write_text(TABLES[task])
    command = ["train", table, "--target", "price", "--epochs", "1", "--hidden", "4"]
    said = bayesify(*command, "--baseline", "sgd", "--out", tmp_path / "plain")
    assert said.code == 0, said.err
    total = sum(p.numel() for p in Run.open(tmp_path / "plain").load_module().parameters())
    for text in (said.err, bayesify("inspect", tmp_path / "plain").out):
        assert f"{total:,} weights" in text
        assert "random of" not in text
    if task == "regression":  # its noise is a point estimate
        said = bayesify(*command, "--out", tmp_path / "bayes")
        assert re.search(r"[\d,]+ random of [\d,]+ weights", said.err)


def test_one_input_is_no_inputs(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("k,x,y\n" + "".join(f"{i % 7},{i / 60},{i * i % 11}.5\n" for i in range(60)))
    options = ("--target", "y", "--drop", "k", "--out", tmp_path / "run", *QUICK)
    said = bayesify("train", table, *options)
    assert said.code == 0, said.err
    assert "1 number; 1 input\n" in said.out + said.err
    assert "not used: k, for --drop asks for it\n" in said.out + said.err


def test_of_many_columns_few_are_expected_to_matter(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    columns = rng.normal(size=(150, 200))
    table = pd.DataFrame(columns, columns=[f"c{number}" for number in range(200)])
    table["price"] = columns[:, 0] - columns[:, 1] + 0.5 * rng.normal(size=150)
    table.to_csv(tmp_path / "wide.csv", index=False)
    options = [*_out(tmp_path), "--hidden", "4", "--epochs", "10", "--test-samples", "3"]
    said = bayesify("train", tmp_path / "wide.csv", "--target", "price", *options)
    assert said.code == 0, said.err
    net = Run.open(tmp_path / "run").load_module().net
    factors = net.get_parameter("log_relevance").detach().exp()
    assert factors[:2].min() > 1.5
    assert factors[2:].mean() < 0.13  # .21 without the hyperprior
