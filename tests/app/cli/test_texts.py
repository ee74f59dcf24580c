"""Columns of texts: a pretrained network reads them, next to numbers and categories."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
from tests.app.cli.test_cli import Said, as_json, bayesify, quick_runs, rows_of
from tests.app.cli.test_errors import check_refused
from tests.encoders import save_encoder

from bayesify.app.runs import RunConfig

pytestmark = [
    pytest.mark.usefixtures("quick"),
    pytest.mark.filterwarnings("ignore:.*SwigPy|.*swigvarlink:DeprecationWarning"),
]
QUICK = ("--epochs", "3", "--hidden", "8", "--batch-size", "16")
WORDS = {"weather": ("word1", "word2"), "music": ("word11", "word12"), "alarm": ("word21",)}


def write_table(path: Path) -> Path:
    """60 rows: a text, a number and a category; the text's first word tells the intent."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["query", "hour", "device", "intent"])
        for row in range(60):
            intent = list(WORDS)[row % 3]
            first = WORDS[intent][row % len(WORDS[intent])]
            text = "" if row == 7 else f"{first} word{30 + row % 5} word{35 + row % 4}"
            writer.writerow([text, row % 24, ("phone", "car")[row % 2], intent])
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table, an encoder, another encoder, and a trained run."""
    place = tmp_path_factory.mktemp("texts")
    save_encoder(place / "encoder")
    save_encoder(place / "other", seed=1)
    write_table(place / "table.csv")
    with quick_runs():
        said = train(place, place / "run")
    assert said.code == 0, said.err
    (place / "said.txt").write_text(said.err)
    return place


def train(place: Path, out: Path, *more: str) -> Said:
    return bayesify(
        "train",
        place / "table.csv",
        "--target",
        "intent",
        "--text",
        "query",
        "--encoder",
        place / "encoder",
        "--out",
        out,
        *QUICK,
        *more,
    )


def test_a_text_is_one_column_of_the_table(place: Path) -> None:
    said = (place / "said.txt").read_text()
    assert "1 text, 1 number, 1 category; 12 inputs" in said
    schema = json.loads((place / "run" / "table.json").read_text())
    (column,) = (each for each in schema["columns"] if each["kind"] == "text")
    assert column["size"] == len(column["means"]) == len(column["stds"]) == 8
    assert column["missing"]


def test_the_words_tell_the_class(place: Path) -> None:
    metrics = json.loads((place / "run" / "metrics.json").read_text())
    assert metrics["test"]["error_predictive"] < 50.0  # chance has 67 %


def test_new_texts_are_predicted(place: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.csv"
    new.write_text('query,hour,device\n"word1 word30, word35",3,car\nword11,5,phone\n,5,phone\n')
    said = as_json("predict", place / "run", new, "--out", tmp_path / "p.csv")
    assert said["rows"] == 3
    rows = rows_of(tmp_path / "p.csv")
    assert {row["prediction"] for row in rows} <= set(WORDS)
    assert len({row["p(music)"] for row in rows}) == 3


def test_the_run_is_measured_again(place: Path) -> None:
    stored = json.loads((place / "run" / "metrics.json").read_text())
    measured = as_json("evaluate", place / "run")
    assert measured["test"] == pytest.approx(stored["test"], abs=1e-6)
    assert as_json("inspect", place / "run")["settings"]["text"] == ["query"]


def test_no_text_is_read_twice(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(shutil.copytree(place / "run", tmp_path / "run"))
    again = as_json("evaluate", run)
    with monkeypatch.context() as patch:
        patch.setattr(
            "bayesify.tabular.columns.texts.text_encoder", lambda _: pytest.fail("it was read")
        )
        assert as_json("evaluate", run) == again
        as_json("report", run)
    (run / "table.safetensors").unlink()
    assert as_json("evaluate", run)["test"] == pytest.approx(again["test"], abs=1e-6)


def test_a_damaged_table_is_named(place: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(place / "run", tmp_path / "run"))
    stored = run / "table.safetensors"
    stored.write_bytes(stored.read_bytes()[:-5])
    check_refused(bayesify("evaluate", run), "table.safetensors is not a whole safetensors file")


def test_the_report_shows_the_least_certain_texts(place: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(place / "run", tmp_path / "run"))
    page = (run / "report.html").read_text()
    assert "Least certain test texts" in page
    assert "word1 word3" in page
    (run / "report.html").unlink()
    as_json("report", run)
    assert "Least certain test texts" in (run / "report.html").read_text()


def test_the_least_certain_texts_come_first(place: Path) -> None:
    page = (place / "run" / "report.html").read_text()
    table = page.partition("Least certain test texts")[2].partition("</table>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", table)
    shown = [re.findall(r"<td>(.*?)</td>", row) for row in rows]
    totals = [float(cells[2]) for cells in shown if len(cells) == 4]
    assert len(totals) == 12
    assert totals == sorted(totals, reverse=True)


def test_tables_with_texts_and_classes_have_their_own_defaults() -> None:
    texts = {"text": ("query",), "encoder": "net"}
    classes, numbers, plain = (
        RunConfig.of("a.csv", num_rows=1000, target="intent", task=task, **more)
        for task, more in (("classification", texts), ("regression", texts), ("classification", {}))
    )
    assert (classes.prior_std, classes.lr) == (0.5, 0.02)
    assert classes.hidden == (50,)
    assert classes.relevance == "equal"
    assert (numbers.prior_std, numbers.lr) == (1.5, 0.02)
    assert (plain.prior_std, plain.lr) == (7.0, 0.03)


def test_the_command_repeats_the_run(place: Path, tmp_path: Path) -> None:
    command = json.loads((place / "run" / "config.json").read_text())["command"]
    assert f"--text query --encoder {place / 'encoder'}" in command
    said = train(place, tmp_path / "again")
    assert said.code == 0
    first, again = (
        json.loads((folder / "metrics.json").read_text())["test"]
        for folder in (place / "run", tmp_path / "again")
    )
    assert first == again


def test_training_is_resumed(place: Path) -> None:
    assert train(place, place / "run", "--resume").code == 0


def test_a_number_can_be_the_target(place: Path, tmp_path: Path) -> None:
    said = bayesify(
        "train",
        place / "table.csv",
        "--target",
        "hour",
        "--text",
        "query",
        "--out",
        tmp_path / "run",
        "--encoder",
        place / "encoder",
        "--task",
        "regression",
        *QUICK,
    )
    assert said.code == 0, said.err
    assert "Least certain test texts" in (tmp_path / "run" / "report.html").read_text()


REFUSED = {
    "--text query": "columns of texts need --encoder with the folder or the name of",
    "--encoder ENCODER": "encoder reads texts or images; name their column by --text or",
    "--text hour --encoder ENCODER": "'hour' must hold texts for --text, got numbers; leave --text",
    "--text nothing --encoder ENCODER": "has no column 'nothing', which --text asks for",
    "--text intent --encoder ENCODER": "--text intent contradicts --target",
    "--text query --drop query --encoder ENCODER": "--drop query contradicts --text",
    "--text query --encoder EMPTY": "must be the folder, or the name on Hugging Face's hub, of a",
    "--text query --encoder FILE": "must be the folder, or the name on Hugging Face's hub, of a",
}


@pytest.mark.parametrize("options", REFUSED)
def test_a_wrong_option_is_refused(
    options: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    words = {
        "ENCODER": place / "encoder",
        "EMPTY": tmp_path / "empty",
        "FILE": place / "table.csv",
    }
    given = [str(words.get(word, word)) for word in options.split()]
    out = tmp_path / "run"
    said = bayesify(
        "train", place / "table.csv", "--target", "intent", "--out", out, *QUICK, *given
    )
    check_refused(said, REFUSED[options])
    assert not out.exists()


def test_texts_need_a_table(tmp_path: Path) -> None:
    said = bayesify("train", "mnist", "--out", tmp_path / "run", "--text", "query")
    check_refused(said, "text")


def test_an_encoder_with_other_weights(place: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(place / "run", tmp_path / "run"))
    schema = (run / "table.json").read_text()
    (run / "table.json").write_text(schema.replace(str(place / "encoder"), str(place / "other")))
    new = tmp_path / "new.csv"
    new.write_text("query,hour,device\nword1,3,car\n")
    said = bayesify("predict", run, new, "--out", tmp_path / "p.csv")
    check_refused(said, "must have the weights of the training, with SHA-256")
    assert not (tmp_path / "p.csv").exists()


def test_free_text_names_the_option(place: Path, tmp_path: Path) -> None:
    said = bayesify(
        "train", place / "table.csv", "--target", "intent", "--out", tmp_path / "run", *QUICK
    )
    assert "--text with --encoder reads texts" in said.err
