"""Models for tables next to each other: the sets, the scores, the peers and the tables."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bayesify.datasets import DataError
from bayesify.io import StorageError
from bayesify.metrics import crps
from bayesify.prediction import CategoricalPredictive, GaussianPredictive
from bayesify.reproduce import Context, Job, find_experiment
from bayesify.reproduce.papers.tables import experiment, models, sets
from bayesify.reproduce.papers.tables.evaluation import (
    Scores,
    class_scores,
    evaluate,
    number_scores,
    quantile_crps,
)
from bayesify.reproduce.papers.tables.models import MODELS, OURS, TableModel
from bayesify.reproduce.papers.tables.peers import ConstantNoise
from bayesify.reproduce.papers.tables.rank_figure import rank_figure
from bayesify.reproduce.papers.tables.score_tables import (
    close_to_best,
    mean_ranks,
    score_tables,
    values_of,
)
from bayesify.reproduce.papers.tables.sets import SETS, SPLITS, Kind, TableSet, find_set, parts

IN_REPOSITORY = {"concrete", "energy", "yacht", "wine", "mushroom"}
AT_HAND = [name for name, table in SETS.items() if set(table.datasets) <= IN_REPOSITORY]
#: Their defaults fit small tables so closely that the noise which they find is too small.
OVERCONFIDENT = ("catboost", "lightgbm", "ngboost")
MODULES = {"laplace-torch": "laplace", "MAPIE": "mapie", "scikit-learn": "sklearn"}


# ------------------------------------------------------------------------------------------- sets


@pytest.mark.parametrize("name", AT_HAND)
def test_a_set_is_a_table_of_its_kind(name: str) -> None:
    table = find_set(name)
    inputs, targets = table.load(Context())
    assert inputs.dtype == np.float64
    assert inputs.shape[0] == len(targets)
    assert np.isfinite(inputs).all()
    if table.kind == "classes":
        assert sorted(set(targets.tolist())) == list(range(targets.max() + 1))
        assert np.bincount(targets).min() >= 10
    else:
        assert targets.dtype == np.float64
        assert np.isfinite(targets).all()
        assert targets.std() > 0.0
    again = table.load(Context())
    assert np.array_equal(inputs, again[0])
    assert np.array_equal(targets, again[1])


def test_no_table_is_in_both_groups() -> None:
    of = {
        group: {name for table in SETS.values() if table.group == group for name in table.datasets}
        for group in ("development", "decision")
    }
    assert of["development"] == {"concrete", "energy", "yacht", "wine"}
    assert not of["development"] & of["decision"]
    for group in of:
        kinds = [table.kind for table in SETS.values() if table.group == group]
        assert min(kinds.count("numbers"), kinds.count("classes")) >= 6


def ids(count: int, kind: str) -> TableSet:
    """A set whose only column is the number of the row."""

    def load(context: Context) -> Any:
        rows = np.arange(count)
        return rows[:, None].astype(float), rows % 4 // 3 if kind == "classes" else rows * 1.0

    return TableSet("ids", kind, "development", load)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["numbers", "classes"])
def test_validation_rows_are_no_test_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETS, "ids", ids(1000, kind))
    train, _, test, targets = parts("ids", 3)
    given, _, held_out, _ = parts("ids", 3, "validation")
    rows = [set(part[:, 0].astype(int).tolist()) for part in (train, test, given, held_out)]
    assert [len(part) for part in rows] == [800, 200, 640, 160]
    assert rows[0] | rows[1] == set(range(1000))
    assert rows[2] | rows[3] == rows[0]
    if kind == "classes":
        assert int(targets.sum()) == 50
    assert not np.array_equal(test, parts("ids", 4)[2])
    assert np.array_equal(test, parts("ids", 3)[2])


def test_large_tables_are_drawn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETS, "ids", ids(30_000, "numbers"))
    train, _, test, _ = parts("ids", 0)
    assert len(train) == len(test) == sets.MOST_ROWS
    assert not set(train[:, 0]) & set(test[:, 0])
    assert test.max() > 25_000  # not the first ones


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="no set 'yaht'; known are concrete, energy"):
        parts("yaht", 0)
    with pytest.raises(ValueError, match="part must be"):
        parts("yacht", 0, "train")  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------- scores


def test_scores_of_numbers_are_those_of_the_closed_forms() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, std = torch.randn(50, generator=generator).double(), torch.rand(50).double() + 0.5
    y = torch.randn(50, generator=generator).double()
    p = GaussianPredictive(mean[None], std[None])
    low, high = p.interval(0.9)
    found = number_scores(p, (low.numpy(), high.numpy()), y)
    density = torch.exp(-0.5 * ((y - mean) / std) ** 2) / std / math.sqrt(2.0 * math.pi)
    assert found["nll"] == pytest.approx(-float(density.log().mean()), rel=1e-9)
    assert found["crps"] == pytest.approx(crps(p, y), rel=1e-12)
    assert found["rmse"] == pytest.approx(float((y - mean).square().mean().sqrt()), rel=1e-9)
    assert found["width"] == pytest.approx(2.0 * 1.6448536 * float(std.mean()), rel=1e-6)
    inside = (abs(y - mean) <= 1.6448536 * std).double().mean()
    assert found["coverage"] == pytest.approx(100.0 * float(inside))
    assert quantile_crps(p, y) == pytest.approx(crps(p, y), rel=1e-3)


def test_scores_of_classes_are_those_of_scikit_learn() -> None:
    from sklearn.metrics import accuracy_score, log_loss

    logits = torch.randn(60, 3, generator=torch.Generator().manual_seed(1)).double()
    probs, y = torch.softmax(logits, -1), torch.arange(60) % 3
    found = class_scores(probs.log(), y)
    assert found["nll"] == pytest.approx(log_loss(y.numpy(), probs.numpy()), rel=1e-6)
    predicted = probs.argmax(-1).numpy()
    assert found["accuracy"] == pytest.approx(100.0 * accuracy_score(y.numpy(), predicted))
    one_hot = torch.nn.functional.one_hot(y)
    assert found["brier"] == pytest.approx(float((probs - one_hot).square().sum(-1).mean()))
    # A class that was given the probability 0 costs a finite nll.
    certain = class_scores(torch.tensor([[1.0, 0.0]]).log(), torch.tensor([1]))
    assert certain["nll"] == pytest.approx(math.log(1e6), rel=1e-6)


class Recorder:
    """A model that keeps the rows that it is given."""

    def __init__(self, seed: int) -> None:
        self.seed, self.threads = seed, torch.get_num_threads()

    def fit(self, inputs: Any, targets: Any) -> None:  # noqa: ARG002
        self.trained = inputs

    def predict(self, inputs: Any) -> Any:
        self.tested = inputs
        return np.zeros(len(inputs))

    def predict_interval(self, inputs: Any, level: float) -> Any:
        assert level == 0.9
        return np.full(len(inputs), -1e9), np.full(len(inputs), 1e9)


def test_evaluate_trains_and_tests_on_the_parts() -> None:
    made: list[Recorder] = []

    def make(seed: int) -> Recorder:
        made.append(Recorder(seed))
        return made[-1]

    for part in ("test", "validation"):
        found = evaluate(make, "yacht", 2, part)  # type: ignore[arg-type]
        expected = parts("yacht", 2, part)  # type: ignore[arg-type]
        assert made[-1].seed == 2
        assert np.array_equal(made[-1].trained, expected.train_inputs)
        assert np.array_equal(made[-1].tested, expected.test_inputs)
        assert found["nll"] is None
        assert found["coverage"] == 100.0
        assert found["rmse"] == pytest.approx(np.sqrt(np.mean(expected.test_targets**2)))


# ------------------------------------------------------------------------------------------ peers


def noisy_line(rng: np.random.Generator) -> Any:
    x = rng.uniform(-1.0, 1.0, (400, 2))
    return x, 10.0 + 3.0 * x[:, 0] + 0.5 * rng.normal(size=400)


def noisy_classes(rng: np.random.Generator) -> Any:
    x = rng.uniform(-2.0, 2.0, (400, 2))
    return x, (rng.uniform(size=400) < 1.0 / (1.0 + np.exp(-3.0 * x[:, 0]))).astype(int)


def scores_of(
    name: str, kind: Kind, load: Callable[[Context], Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[TableModel, Scores]:
    """A model, and its scores on a set that is generated for a test."""
    model = MODELS[name]
    if find_spec(MODULES.get(model.package, model.package)) is None:
        pytest.skip(f"needs {model.package}")
    monkeypatch.setitem(SETS, "made", TableSet("made", kind, "development", load))
    make = model.make(kind)
    assert make is not None
    return model, evaluate(make, "made", 0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_each_model_of_numbers_knows_the_noise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = scores_of(
        name, "numbers", lambda _: noisy_line(np.random.default_rng(0)), monkeypatch
    )
    assert found["rmse"] is not None
    assert 0.4 < found["rmse"] < 0.7  # the noise is 0.5
    assert found["coverage"] is not None
    assert (40.0 if name in OVERCONFIDENT else 80.0) <= found["coverage"] <= 100.0
    if name == "conformal":
        assert found["nll"] is None
    else:
        assert found["nll"] is not None
        # 0.73 is the entropy of the noise.
        assert 0.5 < found["nll"] < (10.0 if name in OVERCONFIDENT else 1.1)
    assert model.version().startswith(model.package)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.classes])
def test_each_model_of_classes_predicts_odds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = scores_of(
        name, "classes", lambda _: noisy_classes(np.random.default_rng(0)), monkeypatch
    )
    assert found["accuracy"] is not None
    assert found["accuracy"] > 70.0
    assert found["nll"] is not None
    # A coin has 0.69; trees that are sure of their mistakes have more.
    assert 0.2 < found["nll"] < (0.7 if name in (OURS, "linear", "ensemble", "laplace") else 2.0)


def test_the_constant_noise_is_that_of_rows_that_were_held_out() -> None:
    class Memory:
        """Knows its training rows by heart, and predicts 0 for others."""

        def fit(self, inputs: Any, targets: Any) -> Any:
            self.known = dict(zip(inputs[:, 0].tolist(), targets.tolist(), strict=True))
            return self

        def predict(self, inputs: Any) -> Any:
            return np.array([self.known.get(x, 0.0) for x in inputs[:, 0].tolist()])

    x, y = np.arange(100.0)[:, None], np.full(100, 7.0)
    model = ConstantNoise(Memory(), seed=0).fit(x, y)
    assert model.std == pytest.approx(7.0)
    assert len(model.model.known) == 100
    p = model.predictive(x[:3])
    assert p.mean.tolist() == [7.0, 7.0, 7.0]
    assert p.total.sqrt().tolist() == pytest.approx([7.0, 7.0, 7.0])


def test_a_package_that_is_missing_is_named() -> None:
    absent = TableModel("none", "no-such-package", 1.0, Recorder, None)
    with pytest.raises(DataError, match=r"needs no-such-package; pip install 'bayesify\[cli,bench"):
        absent.version()


# --------------------------------------------------------------------------------------- the jobs


def job_of(name: str, seed: int = 0) -> Job:
    [job] = [job for job in experiment.jobs((seed,), False) if job.name == name]
    return job


def test_full_and_quick_are_the_same_protocol() -> None:
    full = {job.name: job for job in find_experiment("tables").jobs((0,), False)}
    numbers = sum(table.kind == "numbers" for table in SETS.values())
    assert len(full) == numbers * len(MODELS) + (len(SETS) - numbers) * (len(MODELS) - 1)
    for job in find_experiment("tables").jobs((0,), True):
        changed = {key for key in job.config if job.config[key] != full[job.name].config[key]}
        assert changed == {"splits"}
        assert MODELS[job.config["model"]].package in ("bayesify", "scikit-learn")


def test_a_job_resumes_after_its_last_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def counted(make: Any, name: str, split: int, **given: Any) -> dict[str, float | None]:
        seen.append(split)
        if seen == [0, 1, 2]:
            raise KeyboardInterrupt
        return {"rmse": split / 3.0, "nll": None}

    monkeypatch.setattr(experiment, "evaluate", counted)
    progress: list[float] = []
    context = Context(work=tmp_path, on_progress=progress.append)
    with pytest.raises(KeyboardInterrupt):
        experiment.run(job_of("yacht-linear"), context)
    metrics = experiment.run(job_of("yacht-linear"), context)
    assert seen == [0, 1, 2, 2, 3, 4]
    assert progress == [0.2, 0.4, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert metrics["rmse"] == pytest.approx([0.0, 1 / 3, 2 / 3, 1.0, 4 / 3], abs=1e-5)
    assert "nll" not in metrics
    assert metrics["package"].startswith("scikit-learn ")
    # Another seed has other splits.
    seen.clear()
    seen.append(-1)
    experiment.run(job_of("yacht-linear", seed=2), Context())
    assert seen[1:] == [10, 11, 12, 13, 14]
    (tmp_path / "split-0.json").write_text("{")
    with pytest.raises(StorageError, match=r"split-0\.json cannot be read"):
        experiment.run(job_of("yacht-linear"), context)
    for wrong in ("[]", "{}", '{"nll": "x"}'):
        (tmp_path / "split-0.json").write_text(wrong)
        with pytest.raises(StorageError, match=r"split-0\.json does not hold the scores"):
            experiment.run(job_of("yacht-linear"), context)


def test_a_job_is_a_function_of_its_seed() -> None:
    job = job_of("noise-by-input-linear")
    times = ("fit_seconds", "predict_seconds")
    one, other = (
        {name: found for name, found in experiment.run(job, Context()).items() if name not in times}
        for _ in range(2)
    )
    assert one == other
    assert len(one["nll"]) == SPLITS
    assert len(set(one["nll"])) == SPLITS


# ----------------------------------------------------------------------------------------- tables


def made_up(name: str, model: str, **metrics: Any) -> Any:
    seconds = {"fit_seconds": [1.0, 3.0], "predict_seconds": [0.01, 0.01]}
    return {
        "config": {"set": name, "model": model},
        "metrics": {"package": MODELS[model].package + " 1.0", **seconds, **metrics},
        "load": 1.5,
    }


def numbers(name: str, model: str, rmse: list[float], **more: Any) -> Any:
    shared = {"rmse": rmse, "coverage": [90.0, 80.0], "width": [2.0, 2.0]}
    return made_up(name, model, **{**shared, **more})


RESULTS = [
    numbers("yacht", OURS, [1.0, 2.0], nll=[1.0, 1.2], crps=[0.5, 0.5], width=[1.0, 1.0]),
    numbers("yacht", "linear", [2.0, 3.0], nll=[1.1, 1.1], crps=[0.7, 0.5]),
    numbers("yacht", "conformal", [0.5, 0.7], coverage=[95.0, 95.0], width=[4.0, 4.0]),
    numbers("energy", OURS, [1.0, 1.0], nll=[3.0, 3.0], crps=[0.5, 0.5]),
    numbers("energy", "linear", [2.0, 2.0], nll=[2.0, 2.0], crps=[0.6, 0.6]),
]


def test_ranks_share_their_places() -> None:
    values = values_of(RESULTS, "numbers", "development", "nll")
    # Equal means on yacht, and 2 to 1 on energy.
    assert mean_ranks(values) == ({OURS: 1.75, "linear": 1.25}, 2)
    assert mean_ranks(values, more=True) == ({OURS: 1.25, "linear": 1.75}, 2)


def test_ranks_are_over_sets_that_all_were_run_on() -> None:
    values = values_of(RESULTS, "numbers", "development", "rmse")
    assert list(values) == ["energy", "yacht"]
    assert mean_ranks(values) == ({OURS: 2.0, "linear": 3.0, "conformal": 1.0}, 1)
    assert mean_ranks({}) == ({}, 0)


def test_what_is_close_to_the_best_is_counted_by_error_and_by_accuracy() -> None:
    results = [
        *RESULTS,
        made_up("iris", OURS, accuracy=[94.0, 94.0]),
        made_up("iris", "linear", accuracy=[98.0, 98.0]),
        made_up("digits", OURS, accuracy=[90.0, 90.0]),
        made_up("digits", "linear", accuracy=[96.0, 96.0]),
    ]
    # 1.5 to .6 on yacht, the best on energy, and 98 / 94 < 1.05 < 96 / 90.
    assert close_to_best(results, OURS) == (2, 4)
    assert close_to_best(results, "conformal") == (1, 1)
    assert "the best model's on 2 of 4 sets." in experiment.table(results)


def test_tables_mark_the_best_and_leave_what_is_missing() -> None:
    text = score_tables(RESULTS)
    lines = text.splitlines()
    assert "| yacht | **1.10 +- 0.10** | **1.10 +- 0.00** |" in lines
    assert "| energy | 3.00 +- 0.00 | **2.00 +- 0.00** |" in lines
    title = MODELS["conformal"].title
    assert f"| | bayesify | {MODELS['linear'].title} | {title} |" in lines
    assert "| yacht | 1.500 +- 0.500 | 2.500 +- 0.500 | **0.600 +- 0.100** |" in lines
    assert any(line.startswith("| energy | **1.00 +- 0.00** |") for line in lines)
    ranks = next(line for line in lines if line.startswith(f"| {title} | - | - | **1.0** |"))
    # Its width is twice the median of 1, 2 and 4.
    assert ranks.endswith("| 95.0 | 95.0, 95.0 | 2.00 |")
    assert "| 90.0 +- 0.0" not in text
    assert "decision sets" not in text


def test_the_table_states_what_it_rests_on() -> None:
    text = experiment.table(RESULTS)
    assert "over 2 random splits" in text
    assert "Packages: MAPIE 1.0, bayesify 1.0, scikit-learn 1.0." in text
    assert "seconds" not in text, "measured while the machine had other work"
    assert "Without results here: random forest," in text


def test_the_figure_has_a_row_for_each_model() -> None:
    drawn = experiment.figures(RESULTS)["tables"]
    [ax] = drawn.axes
    names = [label.get_text() for label in ax.get_yticklabels()]
    # Sorted by the nll; what has none comes last.
    assert names == [MODELS[name].title for name in ("linear", OURS, "conformal")]
    assert experiment.figures([]) == {}
    with pytest.raises(ValueError, match="panels must hold"):
        rank_figure({}, "x")


def test_the_results_are_small_enough_to_keep() -> None:
    folder = Path(__file__).resolve().parents[2] / "results" / "tables"
    stored = sorted(folder.glob("*.json"))
    assert stored
    assert sum(path.stat().st_size for path in stored) < 2_000_000
    known = {job.file_name: job for job in experiment.jobs((0,), False)}
    for path in stored:
        result = json.loads(path.read_text())
        assert result["config"] == dict(known[path.name].config)
        assert not result["commit"].endswith("-dirty")


def test_a_model_that_is_not_dense_has_no_predictive() -> None:
    assert MODELS["conformal"].make("classes") is None
    assert models.MODELS[OURS].make("classes") is not None
    p = CategoricalPredictive.from_logits([torch.tensor([[0.0, -torch.inf]])])
    assert class_scores(p.log_mean, torch.tensor([0]))["nll"] == 0.0
