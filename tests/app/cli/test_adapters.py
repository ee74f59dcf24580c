"""A variational adapter within the encoder of texts: trained, resumed, measured and predicted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tests.app.cli.test_cli import Said, as_json, bayesify, quick_runs, rows_of
from tests.app.cli.test_errors import check_refused
from tests.app.cli.test_texts import WORDS, write_table
from tests.encoders import save_encoder
from tests.training.test_resume import timeless

from bayesify.app.runs import Run, RunConfig

pytestmark = [
    pytest.mark.usefixtures("quick"),
    pytest.mark.filterwarnings("ignore:.*SwigPy|.*swigvarlink:DeprecationWarning"),
]
QUICK = ("--epochs", "3", "--hidden", "8", "--batch-size", "16", "--adapter-rank", "2")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table, an encoder, one with other weights, one with another tokenizer, a trained run."""
    place = tmp_path_factory.mktemp("adapters")
    save_encoder(place / "encoder")
    save_encoder(place / "other", seed=1)
    words = Path(shutil.copytree(place / "encoder", place / "words")) / "vocab.txt"
    words.write_text("\n".join(sorted(words.read_text().split())) + "\n")
    write_table(place / "table.csv")
    with quick_runs(figures=True):
        said = train(place, place / "run")
    assert said.code == 0, said.err
    (place / "said.txt").write_text(said.err)
    return place


def train(place: Path, out: Path, *more: str, target: str = "intent") -> Said:
    return bayesify(
        "train",
        place / "table.csv",
        "--target",
        target,
        "--text",
        "query",
        "--adapter",
        "--encoder",
        place / "encoder",
        "--out",
        out,
        *QUICK,
        *more,
    )


def test_what_is_trained_is_printed(place: Path) -> None:
    said = (place / "said.txt").read_text()
    assert "1 text in tokens, 1 number, 1 category" in said
    # Two layers, queries and values, of rank 2 on 8 features: A is 2 x 8 each.
    assert "32 random of " in said


def test_only_what_is_random_or_trained_is_stored(place: Path) -> None:
    with safe_open(place / "run" / "checkpoint.safetensors", "pt") as stored:
        names = list(stored.keys())
    inside = [name for name in names if ".encoder." in name and not name.startswith("optimizer")]
    assert inside
    assert all("lora_B" in name for name in inside), inside
    assert [name for name in names if "head" in name]
    config = json.loads((place / "run" / "config.json").read_text())
    assert config["settings"]["encoder"] == str(place / "encoder")
    assert "--adapter --adapter-rank 2" in config["command"]


def test_the_words_tell_the_class(place: Path, tmp_path: Path) -> None:
    said = train(place, tmp_path / "run", "--epochs", "60", "--lr", "0.02")
    assert said.code == 0, said.err
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["test"]["error_predictive"] < 40.0  # chance has 67 %
    assert metrics["importance"] is None


def test_the_encoder_itself_stays(place: Path) -> None:
    run = Run.open(place / "run")
    trained, fresh = run.load_module(), run.make_module()
    own = dict(fresh.net.named_parameters())
    for name, parameter in trained.net.named_parameters():
        same = torch.equal(parameter, own[name])
        assert same == (not parameter.requires_grad), name
    assert not torch.equal(trained.posterior.mean, fresh.posterior.mean)


def test_the_encoder_has_no_dropout(place: Path) -> None:
    module = Run.open(place / "run").make_module()
    dropout = [each.p for each in module.net.modules() if isinstance(each, torch.nn.Dropout)]
    assert dropout
    assert set(dropout) == {0.0}


def test_it_is_measured_again(place: Path) -> None:
    stored = json.loads((place / "run" / "metrics.json").read_text())
    measured = as_json("evaluate", place / "run")
    assert measured["test"] == pytest.approx(stored["test"], abs=1e-5)
    assert measured["test_samples"] == 10
    rows = as_json("prune", place / "run", "--fractions", "0.5")["rows"]
    assert [row["fraction"] for row in rows] == [0.0, 0.5]
    page = (place / "run" / "report.html").read_text()
    assert "Least certain test texts" in page
    as_json("report", place / "run")
    as_json("inspect", place / "run")


def test_new_texts_are_predicted(place: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.csv"
    long = " ".join(["word1"] * 300)
    new.write_text(
        f"query,hour,device,intent\nword1 word30,3,car,weather\n{long},5,phone,\n,5,car,\n"
    )
    said = as_json("predict", place / "run", new, "--out", tmp_path / "p.csv")
    assert said["rows"] == 3
    rows = rows_of(tmp_path / "p.csv")
    assert {row["prediction"] for row in rows} <= set(WORDS)
    assert len({row["p(music)"] for row in rows}) == 3
    found = as_json("evaluate", place / "run", new)
    assert (found["rows"], found["rows_measured"]) == (3, 1)


def test_a_text_alone_is_predicted_as_among_others(place: Path, tmp_path: Path) -> None:
    texts = ["word1 word30 word35", "word11", "word21 word31"]
    rows = []
    for number, some in enumerate(([*texts], *([text] for text in texts))):
        new = tmp_path / f"{number}.csv"
        new.write_text("query,hour,device\n" + "".join(f"{text},3,car\n" for text in some))
        as_json("predict", place / "run", new, "--out", tmp_path / f"p{number}.csv")
        rows += rows_of(tmp_path / f"p{number}.csv")
    for together, alone in zip(rows[:3], rows[3:], strict=True):
        for name in WORDS:
            assert float(together[f"p({name})"]) == pytest.approx(
                float(alone[f"p({name})"]), abs=1e-5
            )


def test_an_interrupted_run_resumes_to_the_same_end(place: Path, tmp_path: Path) -> None:
    whole = json.loads((place / "run" / "metrics.json").read_text())["test"]

    def stop(self: object, row: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bayesify.app.cli.epoch_table.HistoryWriter.on_epoch", stop)
        assert train(place, tmp_path / "run").code == 130
    assert not (tmp_path / "run" / "metrics.json").exists()
    assert train(place, tmp_path / "run", "--resume").code == 0
    again = json.loads((tmp_path / "run" / "metrics.json").read_text())["test"]
    assert again == whole
    run, other = (Run.open(folder).history() for folder in (place / "run", tmp_path / "run"))
    assert timeless(run) == timeless(other)


def test_a_number_can_be_the_target(place: Path, tmp_path: Path) -> None:
    said = train(place, tmp_path / "run", "--task", "regression", target="hour")
    assert said.code == 0, said.err
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["test"]["rmse"] < 30.0


def test_a_plain_adapter(place: Path, tmp_path: Path) -> None:
    said = train(place, tmp_path / "run", "--baseline", "sgd")
    assert said.code == 0, said.err
    assert as_json("evaluate", tmp_path / "run")["test_samples"] == 1
    as_json("report", place / "run", "--compare", tmp_path / "run")


def test_its_defaults() -> None:
    texts = {"text": ("query",), "encoder": "net", "adapter": True}
    small, large = (
        RunConfig.of("a.csv", num_rows=rows, target="intent", task="classification", **texts)
        for rows in (320, 15_000)
    )
    assert (small.epochs, large.epochs) == (50, 4)
    assert (small.prior_std, small.init_std, small.lr) == (0.05, 0.05, 0.004)
    assert (small.estimator, small.batch_size, small.test_samples) == ("flipout", 32, 10)


def test_another_encoder_is_refused(place: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(place / "run", tmp_path / "run"))
    config = (run / "config.json").read_text()
    (run / "config.json").write_text(config.replace(str(place / "encoder"), str(place / "other")))
    new = tmp_path / "new.csv"
    new.write_text("query,hour,device\nword1,3,car\n")
    said = bayesify("predict", run, new, "--out", tmp_path / "p.csv")
    check_refused(said, "the encoder ", "must have the weights of the training")
    (run / "config.json").write_text(config)
    schema = (run / "table.json").read_text()
    (run / "table.json").write_text(schema.replace(str(place / "encoder"), str(place / "words")))
    said = bayesify("predict", run, new, "--out", tmp_path / "p.csv")
    check_refused(said, "must have the tokenizer of the training, with SHA-256")
    assert not (tmp_path / "p.csv").exists()


REFUSED = {
    "--adapter": "adapter trains within a pretrained network of texts: it needs --text",
    "--adapter --encoder ENCODER": "adapter trains within a pretrained network of texts",
    "--adapter --text query": "columns of texts need --encoder with the folder or the name of",
    "--adapter --text hour --encoder ENCODER": "'hour' must hold texts for --text, got numbers",
    "--adapter --text query --encoder EMPTY": "of a transformers model with a tokenizer",
    "--adapter --text query --encoder ENCODER --adapter-rank 0": "adapter-rank must be at least 1",
    "--text query --encoder ENCODER --adapter-rank 4": "adapter-rank would do nothing here",
    "--adapter --text query --encoder ENCODER --relevance equal": "relevance would do nothing",
    "--adapter --text query --encoder ENCODER --backend compiled": "compiled trains no adapter",
    "--adapter --text query --encoder ENCODER --posterior low-rank": "adapter needs --posterior",
    "--adapter --text query --encoder ENCODER --tune 5s": "leave --adapter out",
}


@pytest.mark.parametrize("options", REFUSED)
def test_a_wrong_option_is_refused(
    options: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    words = {"ENCODER": place / "encoder", "EMPTY": tmp_path / "empty"}
    given = [str(words.get(word, word)) for word in options.split()]
    out = tmp_path / "run"
    said = bayesify("train", place / "table.csv", "--target", "intent", "--out", out, *given)
    check_refused(said, REFUSED[options])
    assert not out.exists()


def test_without_peft(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    said = train(place, tmp_path / "run")
    check_refused(said, "--adapter needs peft; pip install 'bayesify[cli,adapters]'")
    assert not (tmp_path / "run").exists()
